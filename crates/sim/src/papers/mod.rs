//! Worlds for the papers' experiments: the production node and client under the papers' loads, in virtual time.
//!
//! A core of these worlds is busy for what requests cost it, and what its work leads to (bytes, device operations,
//! messages to other cores) leaves when that work is done. Everything is drawn from a seed; the same seed gives the same
//! figures, bit for bit.
//!
//! # Layout
//! - [`parameters`]: every number, and where it comes from.
//! - [`load`]: the paper's client: threads, connections, which request goes where.
//! - [`serve`]: the node; [`bench`](mod@bench): it and its clients, run for a time or a number of requests.
//! - [`figures`]: what a run came to; [`flows`]: what it came to for each of several tenants.
//! - [`device`], [`sockets`]: the drive and the network, as cores that take their time see them.

pub mod bench;
pub mod device;
pub mod figures;
pub mod flows;
pub mod load;
pub mod parameters;
pub mod serve;
pub mod sockets;
