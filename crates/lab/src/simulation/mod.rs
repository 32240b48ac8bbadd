//! Worlds for the papers' experiments: the production node and client under the papers' loads, in virtual time.
//!
//! A core of these worlds is busy for what requests cost it, and what its work leads to (bytes, device operations,
//! messages to other cores) leaves when that work is done. Everything is drawn from a seed; the same seed gives the same
//! figures, bit for bit.
//!
//! # Layout
//! - [`parameters`]: every number, and where it comes from.
//! - [`config`]: the configuration of an experiment.
//! - [`workload`]: the paper's client: threads, connections, which request goes where.
//! - [`node`]: the node; [`experiment`](mod@experiment): it and its clients, run for a time or a number of requests.
//! - [`metrics`]: what a run came to; [`tenant_metrics`]: what it came to for each of several tenants.
//! - [`ssd_device`], [`delayed_sockets`]: the drive and the network, as cores that take their time see them.

pub mod config;
pub mod delayed_sockets;
pub mod experiment;
pub mod metrics;
pub mod node;
pub mod parameters;
pub mod ssd_device;
pub mod tenant_metrics;
pub mod workload;
