//! A paper's experiment on this machine: the paper's figures beside ours, and why they differ.
//!
//! Whatever cannot run here is a row that says "not run" and why; the rest runs.
//!
//! # Layout
//! - [`octokv`]: the OctoKV paper's tables and figures, in virtual time. [`points`]: their numbers beside ours.
//! - [`netkvs`]: the NetKVS poster's Table 1: which runs, against which node.
//! - [`guest`](mod@guest): Debian's kernel in an emulated guest, from this binary alone.
//! - [`sample`]: figures out of what a load generator printed.
//! - [`table`]: rows, ratios, the sentences, the document.

mod guest;
mod netkvs;
mod octokv;
mod points;
mod sample;
mod table;

use crate::arguments::{Paper, Reproduce};
use crate::outcome::Outcome;

/// Runs `octokv reproduce`.
pub fn run(reproduce: &Reproduce) -> Outcome {
    match reproduce.paper {
        Paper::Netkvs => netkvs::run(reproduce),
        Paper::Octokv => octokv::run(reproduce),
    }
}
