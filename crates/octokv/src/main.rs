//! The octokv binary: `serve`; `ns`, `compact`, `host`, `ana`, `sched` and `stats` for a running node; the client commands,
//! `bench`, `calibrate`, `check`, `upgrade`, `sim`, `reproduce`, `demo`.
//!
//! Exit codes: 0 done, 1 the operation failed, 2 usage error (arguments, the configuration file, or an invalid change),
//! 3 the key does not exist. Results go to standard output; messages, progress and log lines to standard error.
//!
//! # Layout
//! - [`cli`]: commands and flags; [`arg_parsers`], [`choices`]: their values.
//! - [`config`]: the node's configuration from file and flags; `octokv.example.toml`.
//! - [`config_error`]: error messages about the configuration file.
//! - [`namespace_config`]: `[[namespace]]` tables of that file.
//! - [`drive_arg`], [`engine_arg`]: names of simulated drives and of storage engines.
//! - [`size`]: sizes with units.
//! - [`exit_status`]: exit codes and messages.
//! - [`serve`]: runs a node until a signal; [`serve_args`]: its flags.
//! - [`admin`]: ns, compact, host, ana: changes a running node.
//! - [`sched`]: sched, stats: scheduling of a running node and its metrics.
//! - [`kv_commands`]: put, get, delete, exist, list; [`scan`](mod@scan): scan.
//! - [`check`]: verifies a device; [`upgrade`]: makes its volume one of the newest format.
//! - [`bench`](mod@bench): benchmarks, a table, a JSON report.
//! - [`calibrate`]: measures the starting costs of device tokens; [`calibrate_args`]: its flags; [`token_costs`]: the file of the costs.
//! - [`sim`]: deterministic simulations with injected faults.
//! - `reproduce`: the papers' experiments (crate `octokv_lab`), with the cargo feature `lab`.
//! - [`demo`]: a demonstration on a temporary file.
//! - [`progress`]: progress: a bar on a terminal, plain lines elsewhere.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the binary: files, processes and threads begin here"
)]

mod admin;
mod arg_parsers;
mod bench;
mod calibrate;
mod calibrate_args;
mod check;
mod choices;
mod cli;
mod config;
mod config_error;
mod demo;
mod drive_arg;
mod engine_arg;
mod exit_status;
mod kv_commands;
mod namespace_config;
mod progress;
#[cfg(feature = "lab")]
mod reproduce;
mod scan;
mod sched;
mod serve;
mod serve_args;
mod sim;
mod size;
mod token_costs;
mod upgrade;

use clap::Parser;
use cli::{Cli, CliCommand};
use octokv_sys::page_allocator::PageAllocator;
use std::process::ExitCode;

/// Takes memory of value buffers from the kernel only when bytes are written to it.
#[global_allocator]
static ALLOCATOR: PageAllocator = PageAllocator;

fn main() -> ExitCode {
    let arguments = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(arguments.log.level_filter())
        .init();
    let result = match arguments.command {
        CliCommand::Serve(serve) => serve::run(&serve),
        CliCommand::Ns(ns) => admin::ns(&ns),
        CliCommand::Compact(compact) => admin::compact(&compact),
        CliCommand::Host(host) => admin::host(&host),
        CliCommand::Ana(ana) => admin::ana(&ana),
        CliCommand::Sched(command) => sched::sched(&command),
        CliCommand::Stats(arguments) => sched::stats(&arguments),
        CliCommand::Put(put) => kv_commands::put(&put),
        CliCommand::Get(get) => kv_commands::get(&get),
        CliCommand::Delete(delete) => kv_commands::delete(&delete),
        CliCommand::Exist(exist) => kv_commands::exist(&exist),
        CliCommand::List(list) => kv_commands::list(&list),
        CliCommand::Scan(scan) => scan::scan(&scan),
        CliCommand::Check(check) => check::run(&check),
        CliCommand::Upgrade(upgrade) => upgrade::run(&upgrade),
        CliCommand::Bench(bench) => bench::run(&bench),
        CliCommand::Calibrate(calibrate) => calibrate::run(&calibrate),
        CliCommand::Sim(sim) => sim::run(&sim),
        #[cfg(feature = "lab")]
        CliCommand::Reproduce(reproduce) => reproduce::run(&reproduce),
        CliCommand::Demo => demo::run(),
    };
    exit_status::to_exit_code(result)
}
