//! Simulation of a key-value drive with iterators (IterKVSSD): the production engine on a model of the paper's drive, and one
//! synchronous host, in virtual time.
//!
//! ```text
//!   host ──command──▶ firmware: protocol, search ──▶ engine ──▶ flash model
//!        ◀──result, DMA── one at a time                └─ prefetches, between commands too
//! ```
//! A command takes its costs before and after the engine's part of it, and the engine's reads take the flash model's time. What
//! the engine reads ahead goes on between commands, as in a drive with several flash controllers.
//!
//! # Layout
//! - [`parameters`]: every number of the machine and of the workload, with its source.
//! - [`experiment`](mod@experiment): the drive with its store, and scans with several settings.
//! - [`scan_client`]: the host: seeks, and scans by one Next after another.

pub mod experiment;
pub mod parameters;
pub mod scan_client;
