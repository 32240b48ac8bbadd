//! The load generator: workloads against a namespace, the same workloads against baselines, and reports.
//!
//! The generator polls [`octokv_client::Session`]s on a few OS threads; each of a workload's `threads` is
//! a TCP connection with `depth` commands in flight. Alternatively it drives an engine in this process: on a block
//! namespace of a node, on a local device, or on files. Clock, threads and files are provided by the caller.
//!
//! # Layout
//! - [`config`]: the configuration of a run, and its validation. [`platform`]: clock and threads of the caller.
//! - [`workload`]: operations and mixes of the workloads, YCSB's among them.
//! - [`key_distribution`]: key choice: uniform, zipf, latest. [`size_distribution`]: lengths of keys and values.
//! - [`shard`]: the part of a run that each of several targets has.
//! - `op_generator`: the next operation, and the keys that inserts add.
//! - [`arrival_schedule`]: the open loop: start times of operations at a fixed rate.
//! - [`values`]: keys and values from an index and a seed, and the check of values read.
//! - [`system_under_test`]: the systems. [`workload_state`]: the state that the workers of a workload share.
//! - [`kv_worker`]: Key Value commands: one OS thread with one session.
//! - [`remote_engine`]: the engine in this process, on a block namespace of the node.
//! - [`local_engine`]: the engine in this process, on a local device, by the path of a node.
//! - [`host_kvs`]: the engine in this process, on files: Host KVS, the baseline of the OctoKV paper.
//! - [`rocksdb_store`]: RocksDB in this process, by its library. `blocking_streams`: one stream on a thread of its own.
//! - [`syscall_timing`]: the time that Host KVS spends in system calls.
//! - `engine_op`: one operation on an engine in this process; `engine_streams`: the streams of one core on it.
//! - `flow_sender`: commands that wait for the tokens of devices.
//! - `scan_progress`: the pairs of one scan, checked.
//! - [`runner`]: starts the workers of a workload and merges their results. [`error`](mod@error): why a run failed.
//! - [`recorder`]: counters and latencies of a worker; [`time_series`]: the same by interval.
//! - `resource_usage`: processor time and disk accesses of a workload. [`log_work`]: what the log engine did in it.
//! - [`workload_result`]: the result of a workload, and its lines of the table.
//! - [`calibration`]: the times of gets, puts and deletes at saturation, and their ratios.
//! - [`ordered_measurements`]: measurements of the ordered engine that take more than one workload.
//! - [`baselines`]: other stores under the same workloads, and ratios to ours.
//! - [`report`]: the JSON report. [`machine_info`]: the machine in it. [`statistics`]: the median. [`plot`]: SVG plots.
//! - [`child_process`]: child processes and their output. [`server_process`]: a child process that runs `octokv serve`.
//! - [`temporary_directory`](mod@temporary_directory): a directory for device files.
//! - [`name_lookup`]: workloads and baselines by name.
//! - [`ack_log`]: a log of acknowledged writes that is verified against a node after a crash.

pub mod ack_log;
pub mod arrival_schedule;
pub mod baselines;
mod blocking_streams;
pub mod calibration;
pub mod child_process;
pub mod config;
mod engine_op;
mod engine_streams;
pub mod error;
mod flow_sender;
pub mod host_kvs;
pub mod key_distribution;
pub mod kv_worker;
pub mod local_engine;
pub mod log_work;
pub mod machine_info;
pub mod name_lookup;
mod op_generator;
pub mod ordered_measurements;
pub mod platform;
pub mod plot;
pub mod recorder;
pub mod remote_engine;
pub mod report;
mod resource_usage;
pub mod rocksdb_store;
pub mod runner;
mod scan_progress;
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
