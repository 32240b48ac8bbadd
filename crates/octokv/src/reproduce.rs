//! A paper's experiment on this machine: the paper's figures beside ours, and why they differ.
//!
//! Whatever cannot run here is a row that says "not run" and why; the rest runs.
//!
//! # Layout
//! - [`octokv`], [`octofas`]: the tables and figures of the papers of these names, in virtual time. [`simulated_experiment`]: what both
//!   have in common; [`job_runner`]: each run once; [`data_points`]: the papers' numbers beside ours.
//! - [`netkvs`]: the NetKVS poster's Table 1: which runs, against which node.
//! - [`native_runs`]: balancing and fairness on this machine's own processors.
//! - [`qemu_guest`](mod@guest): Debian's kernel in an emulated guest, from this binary alone.
//! - [`output_parser`]: figures out of what a load generator printed.
//! - [`comparison_table`]: rows, ratios, the sentences. [`json_report`]: what programs read, of every paper.

mod comparison_table;
mod data_points;
mod job_runner;
mod json_report;
mod native_runs;
mod netkvs;
mod octofas;
mod octokv;
mod output_parser;
mod qemu_guest;
mod simulated_experiment;

use crate::cli::{Paper, ReproduceArgs};
use crate::exit_status::CliResult;

/// Runs `octokv reproduce`.
pub fn run(reproduce: &ReproduceArgs) -> CliResult {
    match reproduce.paper {
        Paper::Netkvs => netkvs::run(reproduce),
        Paper::Octokv => octokv::EXPERIMENT.run(reproduce),
        Paper::Octofas => octofas::EXPERIMENT.run(reproduce),
    }
}
