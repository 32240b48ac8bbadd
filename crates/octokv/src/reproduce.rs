//! A paper's experiment on this machine: the paper's figures beside ours, and why they differ.
//!
//! Whatever cannot run here is a row that says "not run" and why; the rest runs.
//!
//! # Layout
//! - [`octokv`], [`octofas`]: the tables and figures of the papers of these names, in virtual time. [`virtual_time`]: what both
//!   have in common; [`runs`]: each run once; [`points`]: the papers' numbers beside ours.
//! - [`netkvs`]: the NetKVS poster's Table 1: which runs, against which node.
//! - [`cores`]: balancing and fairness on this machine's own processors.
//! - [`guest`](mod@guest): Debian's kernel in an emulated guest, from this binary alone.
//! - [`sample`]: figures out of what a load generator printed.
//! - [`table`]: rows, ratios, the sentences. [`document`]: what programs read, of every paper.

mod cores;
mod document;
mod guest;
mod netkvs;
mod octofas;
mod octokv;
mod points;
mod runs;
mod sample;
mod table;
mod virtual_time;

use crate::arguments::{Paper, Reproduce};
use crate::outcome::Outcome;

/// Runs `octokv reproduce`.
pub fn run(reproduce: &Reproduce) -> Outcome {
    match reproduce.paper {
        Paper::Netkvs => netkvs::run(reproduce),
        Paper::Octokv => octokv::EXPERIMENT.run(reproduce),
        Paper::Octofas => octofas::EXPERIMENT.run(reproduce),
    }
}
