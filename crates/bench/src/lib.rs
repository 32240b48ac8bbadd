//! Load on a namespace: workloads, the generator that drives them, and reports that compare.
//!
//! The generator polls [`octokv_client::Session`]s on a few OS threads; each of a workload's `threads` is
//! a TCP connection with `depth` commands in flight. Or it drives the hash engine in this process: on a node's
//! namespace of blocks, or on files. Clock, threads and files come from the caller.
//!
//! # Layout
//! - [`plan`]: what to run: workloads, sizes, when to stop; and what makes no sense.
//! - [`data`]: keys and values made from an index and a seed, and values checked against them.
//! - [`system`]: what is put under load.
//! - [`worker`]: Key Value commands: one OS thread: a session, its streams, their latencies.
//! - [`remote_engine`]: the engine on this side, on the node's blocks.
//! - [`host_kvs`]: the engine on this side, on files: OctoKV's baseline.
//! - `operate`: one operation on an engine.
//! - [`run`](mod@run): the workers of a workload together.
//! - [`report`]: figures as a table and as a JSON document.
//! - [`ledger`]: writers that remember what was acknowledged, to be held against a node after a crash.

pub mod data;
pub mod host_kvs;
pub mod ledger;
mod operate;
pub mod plan;
pub mod remote_engine;
pub mod report;
pub mod run;
pub mod system;
pub mod worker;

pub use ledger::Ledger;
pub use plan::{End, Plan, Workload};
pub use run::{Error, Host, Node, Progress, run};
pub use system::{EngineSettings, System};

/// Where time comes from: nanoseconds since any fixed point.
pub type Clock = fn() -> octokv_base::Nanos;
