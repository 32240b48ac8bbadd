//! The command line: `octokv serve`; `ns`, `host`, `ana`, `sched` and `stats` for a node that runs; the client's commands, `bench`,
//! `check`, `sim`, `reproduce`, `demo`.
//!
//! Exit codes: 0 done, 1 the operation failed, 2 usage (arguments, the configuration file, or a change that cannot
//! be), 3 the key does not exist. Results go to standard output; messages, progress and events to standard error.
//!
//! # Layout
//! - [`cli`]: what can be typed.
//! - [`config`]: the configuration file and the flags over it, as settings of a node; `octokv.example.toml`.
//! - [`config_error`]: what is wrong with a configuration file: where, which key, what was meant.
//! - [`namespace_config`]: `[[namespace]]` tables of that file.
//! - [`drive_arg`]: names of drives whose times a device takes.
//! - [`size`]: sizes as people write them.
//! - [`exit_status`]: how a command ends: exit codes and messages.
//! - [`serve`]: a node until it is told to end.
//! - [`admin`]: ns, host, ana: changing a node that runs.
//! - [`sched`]: sched, stats: who is served where and when, and what the monitor sees.
//! - [`kv_commands`]: put, get, delete, exist, list.
//! - [`check`]: verify a device.
//! - [`bench`](mod@bench): load, a table, a document.
//! - [`sim`]: worlds with faults, from seeds.
//! - `reproduce`: the papers' experiments (crate `octokv_lab`), with the cargo feature `lab`.
//! - [`demo`]: everything once, within seconds, on a temporary file.
//! - [`progress`]: progress: a bar on a terminal, plain lines elsewhere.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the binary: files, processes and threads begin here"
)]

mod admin;
mod bench;
mod check;
mod cli;
mod config;
mod config_error;
mod demo;
mod drive_arg;
mod exit_status;
mod kv_commands;
mod namespace_config;
mod progress;
#[cfg(feature = "lab")]
mod reproduce;
mod sched;
mod serve;
mod sim;
mod size;

use clap::Parser;
use cli::{Cli, CliCommand};
use octokv_sys::page_allocator::PageAllocator;
use std::process::ExitCode;

/// Values' buffers cost their memory when bytes land in them.
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
        CliCommand::Host(host) => admin::host(&host),
        CliCommand::Ana(ana) => admin::ana(&ana),
        CliCommand::Sched(command) => sched::sched(&command),
        CliCommand::Stats(arguments) => sched::stats(&arguments),
        CliCommand::Put(put) => kv_commands::put(&put),
        CliCommand::Get(get) => kv_commands::get(&get),
        CliCommand::Delete(delete) => kv_commands::delete(&delete),
        CliCommand::Exist(exist) => kv_commands::exist(&exist),
        CliCommand::List(list) => kv_commands::list(&list),
        CliCommand::Check(check) => check::run(&check),
        CliCommand::Bench(bench) => bench::run(&bench),
        CliCommand::Sim(sim) => sim::run(&sim),
        #[cfg(feature = "lab")]
        CliCommand::Reproduce(reproduce) => reproduce::run(&reproduce),
        CliCommand::Demo => demo::run(),
    };
    exit_status::to_exit_code(result)
}
