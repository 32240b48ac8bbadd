//! The papers' experiments: each paper's numbers next to those of this machine, and why they differ.
//!
//! An experiment that cannot run on this machine is a row "not run" with the reason; the others run.
//!
//! # Layout
//! - [`cli`]: the arguments. [`error`](mod@error): why a command failed. [`progress`]: progress, for the caller to show.
//! - `octokv_paper`, `octofas`, `iterkvssd`, `leed`: tables and figures of these papers, in virtual time. `paper_experiment`: selection
//!   and output, used by all four. `job_runner`: runs each simulation once. `data_points`: our numbers with the papers'.
//! - `figure_plot`: the plots of a figure.
//! - [`simulation`]: the papers' machines and loads, simulated around the production node and client.
//! - `netkvs`: Table 1 of the NetKVS poster, as native runs.
//! - `native_runs`: balancing and fairness on two processors of this machine.
//! - `qemu_guest`: Debian's kernel in an emulated guest, from this binary alone.
//! - `octokv_binary`: the path of the `octokv` program, which is node and load generator of native runs.
//! - `output_parser`: parses the output of load generators.
//! - `comparison_table`: rows, ratios and sentences of NetKVS. `json_report`: the JSON report of all papers.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "experiments on this machine: they start processes, read the clock and write files"
)]

pub mod cli;
mod comparison_table;
mod data_points;
pub mod error;
mod figure_plot;
mod iterkvssd;
mod job_runner;
mod json_report;
mod leed;
mod native_runs;
mod netkvs;
mod octofas;
mod octokv_binary;
mod octokv_paper;
mod output_parser;
mod paper_experiment;
pub mod progress;
mod qemu_guest;
pub mod simulation;

pub use cli::{Paper, ReproduceArgs};
pub use error::{LabError, LabResult};
pub use progress::{LabProgress, ProgressSink};

/// Runs `octokv reproduce`.
///
/// # Errors
/// If the arguments name no figure or directory that exists, or a run fails.
pub fn run(reproduce: &ReproduceArgs, progress: ProgressSink<'_>) -> LabResult {
    match reproduce.paper {
        Paper::Netkvs => netkvs::run(reproduce),
        Paper::Octokv => octokv_paper::EXPERIMENT.run(reproduce, progress),
        Paper::Octofas => octofas::EXPERIMENT.run(reproduce, progress),
        Paper::Iterkvssd => iterkvssd::EXPERIMENT.run(reproduce, progress),
        Paper::Leed => leed::EXPERIMENT.run(reproduce, progress),
    }
}
