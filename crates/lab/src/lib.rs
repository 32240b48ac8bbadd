//! The papers' experiments: each paper's figures beside those of this machine, and why they differ.
//!
//! An experiment that cannot run here is a row that says "not run" and why; the others run.
//!
//! # Layout
//! - [`cli`]: the arguments. [`error`](mod@error): why a command failed. [`progress`]: progress, for the caller to show.
//! - [`octokv_paper`], [`octofas`]: the tables and figures of these papers, in virtual time. [`paper_experiment`]: what
//!   both share; [`job_runner`]: each run once; [`data_points`]: the papers' numbers beside ours.
//! - [`figure_plot`]: the plots of a figure.
//! - [`simulation`]: the machines and loads of those papers, simulated around the production node and client.
//! - [`netkvs`]: Table 1 of the NetKVS poster: which runs, against which node.
//! - [`native_runs`]: balancing and fairness on this machine's own processors.
//! - [`qemu_guest`]: Debian's kernel in an emulated guest, from this binary alone.
//! - [`octokv_binary`](mod@octokv_binary): the path of the program that serves and loads.
//! - [`output_parser`]: results out of the output of a load generator.
//! - [`comparison_table`]: rows, ratios, sentences. [`json_report`]: the JSON document of every paper.

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
mod job_runner;
mod json_report;
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
    }
}
