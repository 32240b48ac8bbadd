//! Load on a namespace: workloads, the generator that drives them, and reports that compare.
//!
//! The generator polls [`octokv_client::Session`]s on a few OS threads; each of a workload's `threads` is
//! a TCP connection with `depth` commands in flight. Or it drives the hash engine in this process: on a node's
//! namespace of blocks, or on files. Clock, threads and files come from the caller.
//!
//! # Layout
//! - [`config`]: what to run: workloads, sizes, how fast, when to stop; and what makes no sense.
//! - [`workload`]: what operations do and in which shares; YCSB's mixes.
//! - [`key_distribution`]: which key is drawn: uniform, zipf, latest.
//! - [`size_distribution`]: how long keys and values are.
//! - [`shard`]: what each of several targets has of a run.
//! - `choose`: the next operation, and the keys that inserts add.
//! - [`arrival_schedule`]: the open loop: when operations are meant to begin.
//! - [`values`]: keys and values made from an index and a seed, and values checked against them.
//! - [`system_under_test`]: what is put under load.
//! - [`kv_worker`]: Key Value commands: one OS thread: a session, its streams, their latencies.
//! - [`remote_engine`]: the engine on this side, on the node's blocks.
//! - [`host_kvs`]: the engine on this side, on files: OctoKV's baseline.
//! - [`syscall_timing`]: what of its time is spent in the kernel's calls.
//! - `operate`: one operation on an engine.
//! - [`runner`](mod@run): the workers of a workload together.
//! - [`recorder`]: what workers count; [`time_series`]: the same over time.
//! - [`baselines`]: other stores under the same workloads, and ratios to ours.
//! - [`report`]: figures as a table and as a JSON document.
//! - [`plot`]: figures as pictures.
//! - [`server_process`]: a server process of the `octokv` binary.
//! - [`temporary_directory`](mod@temporary_directory): a directory for device files.
//! - [`name_lookup`]: workloads and peers by their names.
//! - [`ack_log`]: writers that remember what was acknowledged, to be held against a node after a crash.

pub mod ack_log;
pub mod arrival_schedule;
pub mod baselines;
pub mod child_process;
pub mod config;
mod engine_op;
pub mod error;
pub mod host_kvs;
pub mod key_distribution;
pub mod kv_worker;
pub mod machine_info;
pub mod name_lookup;
mod op_generator;
pub mod platform;
pub mod plot;
pub mod recorder;
pub mod remote_engine;
pub mod report;
pub mod runner;
pub mod server_process;
pub mod shard;
pub mod size_distribution;
pub mod statistics;
pub mod syscall_timing;
pub mod system_under_test;
pub mod temporary_directory;
pub mod time_series;
pub mod values;
pub mod workload;
pub mod workload_result;
pub mod workload_state;

pub use ack_log::AckLog;
pub use config::{BenchConfig, StopCondition};
pub use error::{BenchError, TargetFailure};
pub use key_distribution::KeyDistribution;
pub use platform::{Clock, GeneratorPlatform};
pub use runner::run;
pub use shard::Shard;
pub use size_distribution::SizeDistribution;
pub use system_under_test::{LocalEngineConfig, SystemUnderTest};
pub use workload::Workload;
pub use workload_state::{TargetNode, WorkloadProgress};
