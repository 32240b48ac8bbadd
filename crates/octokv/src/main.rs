//! The command line: `octokv serve`; `ns`, `host`, `ana`, `sched` and `stats` for a node that runs; the client's commands, `bench`,
//! `check`, `sim`, `reproduce`, `demo`.
//!
//! Exit codes: 0 done, 1 the operation failed, 2 usage (arguments, the configuration file, or a change that cannot
//! be), 3 the key does not exist. Results go to standard output; messages, progress and events to standard error.
//!
//! # Layout
//! - [`arguments`]: what can be typed.
//! - [`config`]: the configuration file and the flags over it, as settings of a node; `octokv.example.toml`.
//! - [`diagnosis`]: what is wrong with a configuration file: where, which key, what was meant.
//! - [`namespace`]: `[[namespace]]` tables of that file.
//! - [`nand`]: names of drives whose times a device takes.
//! - [`size`]: sizes as people write them.
//! - [`outcome`]: how a command ends: exit codes and messages.
//! - [`serve`]: a node until it is told to end.
//! - [`admin`]: ns, host, ana: changing a node that runs.
//! - [`sched`]: sched, stats: who is served where and when, and what the monitor sees.
//! - [`keys`]: put, get, delete, exist, list.
//! - [`check`]: verify a device.
//! - [`bench`](mod@bench): load, a table, a document.
//! - [`sim`]: worlds with faults, from seeds.
//! - [`reproduce`]: papers' experiments, their figures beside ours.
//! - [`demo`]: everything once, within seconds, on a temporary file.
//! - [`child`]: a server process of this same binary.
//! - [`meter`]: progress: a bar on a terminal, plain lines elsewhere.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the binary: files, processes and threads begin here"
)]

mod admin;
mod arguments;
mod bench;
mod check;
mod child;
mod config;
mod demo;
mod diagnosis;
mod keys;
mod meter;
mod namespace;
mod nand;
mod outcome;
mod reproduce;
mod sched;
mod serve;
mod sim;
mod size;

use arguments::{Arguments, Command};
use clap::Parser;
use octokv_sys::pages::PageAllocator;
use std::process::ExitCode;

/// Values' buffers cost their memory when bytes land in them.
#[global_allocator]
static ALLOCATOR: PageAllocator = PageAllocator;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(arguments.log.filter())
        .init();
    let result = match arguments.command {
        Command::Serve(serve) => serve::run(&serve),
        Command::Ns(ns) => admin::ns(&ns),
        Command::Host(host) => admin::host(&host),
        Command::Ana(ana) => admin::ana(&ana),
        Command::Sched(command) => sched::sched(&command),
        Command::Stats(arguments) => sched::stats(&arguments),
        Command::Put(put) => keys::put(&put),
        Command::Get(get) => keys::get(&get),
        Command::Delete(delete) => keys::delete(&delete),
        Command::Exist(exist) => keys::exist(&exist),
        Command::List(list) => keys::list(&list),
        Command::Check(check) => check::run(&check),
        Command::Bench(bench) => bench::run(&bench),
        Command::Sim(sim) => sim::run(&sim),
        Command::Reproduce(reproduce) => reproduce::run(&reproduce),
        Command::Demo => demo::run(),
    };
    outcome::exit(result)
}
