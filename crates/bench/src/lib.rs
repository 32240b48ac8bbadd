//! Load on a namespace: workloads, the generator that drives them, and reports that compare.
//!
//! The generator polls [`octokv_client::Session`]s on a few OS threads; each of a workload's `threads` is
//! a TCP connection with `depth` commands in flight. Or it drives the hash engine in this process: on a node's
//! namespace of blocks, or on files. Clock, threads and files come from the caller.
//!
//! # Layout
//! - [`plan`]: what to run: workloads, sizes, how fast, when to stop; and what makes no sense.
//! - [`workload`]: what operations do and in which shares; YCSB's mixes.
//! - [`distribution`]: which key is drawn: uniform, zipf, latest.
//! - [`sizes`]: how long keys and values are.
//! - [`share`]: what each of several targets has of a run.
//! - `choose`: the next operation, and the keys that inserts add.
//! - [`pace`]: the open loop: when operations are meant to begin.
//! - [`data`]: keys and values made from an index and a seed, and values checked against them.
//! - [`system`]: what is put under load.
//! - [`worker`]: Key Value commands: one OS thread: a session, its streams, their latencies.
//! - [`remote_engine`]: the engine on this side, on the node's blocks.
//! - [`host_kvs`]: the engine on this side, on files: OctoKV's baseline.
//! - [`calls`]: what of its time is spent in the kernel's calls.
//! - `operate`: one operation on an engine.
//! - [`run`](mod@run): the workers of a workload together.
//! - [`tally`]: what workers count; [`series`]: the same over time.
//! - [`peers`]: other stores under the same workloads, and ratios to ours.
//! - [`report`]: figures as a table and as a JSON document.
//! - [`plot`]: figures as pictures.
//! - [`names`]: workloads and peers by their names.
//! - [`ledger`]: writers that remember what was acknowledged, to be held against a node after a crash.

pub mod calls;
mod choose;
pub mod data;
pub mod distribution;
pub mod host_kvs;
pub mod ledger;
pub mod names;
mod operate;
pub mod pace;
pub mod peers;
pub mod plan;
pub mod plot;
pub mod remote_engine;
pub mod report;
pub mod run;
pub mod series;
pub mod share;
pub mod sizes;
pub mod system;
pub mod tally;
pub mod worker;
pub mod workload;

pub use distribution::Distribution;
pub use ledger::Ledger;
pub use plan::{End, Plan};
pub use run::{Error, Failed, Host, Node, Progress, run};
pub use share::Share;
pub use sizes::Sizes;
pub use system::{EngineSettings, System};
pub use workload::Workload;

/// Where time comes from: nanoseconds since any fixed point.
pub type Clock = fn() -> octokv_base::Nanos;
