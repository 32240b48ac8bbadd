//! Load on a namespace: workloads, the generator that drives them, and reports that compare.
//!
//! The generator polls [`octokv_client::Session`]s on a few OS threads; each of a workload's `threads` is
//! a TCP connection with `depth` commands in flight. Clock, threads and files come from the caller.
//!
//! # Layout
//! - [`plan`]: what to run: workloads, sizes, when to stop; and what makes no sense.
//! - [`data`]: keys and values made from an index and a seed, and values checked against them.
//! - [`worker`]: one OS thread: a session, its streams, their latencies.
//! - [`run`](mod@run): the workers of a workload together.
//! - [`report`]: figures as a table and as a JSON document.
//! - [`ledger`]: writers that remember what was acknowledged, to be held against a node after a crash.

pub mod data;
pub mod ledger;
pub mod plan;
pub mod report;
pub mod run;
pub mod worker;

pub use ledger::Ledger;
pub use plan::{End, Plan, Workload};
pub use run::{Error, Host, Progress, run};

/// Where time comes from: nanoseconds since any fixed point.
pub type Clock = fn() -> octokv_base::Nanos;
