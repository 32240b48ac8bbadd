//! Simulation of one drive of a SmartNIC with a log store (LEED): the production engine on a model of the paper's drive, one core, and
//! clients without a network, in virtual time.
//!
//! ```text
//!   clients ──request──▶ core: engine ──commands──▶ drive model
//!    one each    ◀──result── │
//!                            └─ compaction, splits, flushes
//! ```
//! As in the paper's design, one core serves one drive, and other cores the network. Each command of the drive takes the core a time, that of
//! compaction too.
//!
//! # Layout
//! - [`parameters`]: every number of the machine and of the workload, with its source.
//! - [`experiment`](mod@experiment): the drive with its store, and phases of load on it.
//! - [`load_client`]: gets, puts and deletes, closed loops. [`load_stats`]: what they, the drive and the engine counted.

pub mod experiment;
pub mod load_client;
pub mod load_stats;
pub mod parameters;
