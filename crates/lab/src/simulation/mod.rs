//! Simulation of the papers' machines: the production node and client under the papers' loads, in virtual time.
//!
//! A core is busy for the cost of its requests, and the effects of its work (bytes, device operations, messages to
//! other cores) take place when that work is done. All random choices derive from a seed; the same seed gives the same
//! results, bit for bit.
//!
//! # Layout
//! - [`parameters`]: every parameter and its source. [`config`]: the configuration of an experiment.
//! - [`workload`]: the papers' client: threads, connections, connection policies.
//! - [`node`]: the node; [`experiment`](mod@experiment): node and clients, run for a time or a number of requests.
//! - [`metrics`]: metrics of a run; [`tenant_metrics`]: metrics of each of several tenants.
//! - [`engine_on_drive`]: one core with an engine on a drive, without a network.
//! - [`iterators`]: a drive with iterators, and its host. [`log_store`]: a drive with a log store, its core, and clients.
//! - [`log_node`]: four drives with a log store, their cores, and clients.
//! - [`ssd_device`], [`delayed_sockets`]: drive and network, with effects delayed by the simulated work of a core.

pub mod config;
pub mod delayed_sockets;
pub mod engine_on_drive;
pub mod experiment;
pub mod iterators;
pub mod log_node;
pub mod log_store;
pub mod metrics;
pub mod node;
pub mod parameters;
pub mod percentile;
pub mod ssd_device;
pub mod tenant_metrics;
pub mod workload;
