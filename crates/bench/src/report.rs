//! The JSON report of a run (docs/BENCHMARKS.md lists its fields).
//!
//! One object: `schema`, `octokv_version`, `command`, `machine`, `settings`, `results`, and with baselines `baselines` and
//! `comparisons`. The names of a result carry their units; except for `series` and `targets` it is flat.

use crate::baselines::BaselineInfo;
use crate::baselines::compare::BaselineComparison;
use crate::config::{BenchConfig, StopCondition};
use crate::machine_info::MachineInfo;
use crate::system_under_test::SystemUnderTest;
use crate::workload_result::WorkloadResult;
use serde::Serialize;

/// The configuration of a run, as reported.
#[derive(Clone, Debug, Serialize)]
pub struct ReportedConfig {
    /// Name of the system under test.
    pub system: &'static str,
    /// URL of the first namespace, or the directory of the files.
    pub url: String,
    /// URLs of all namespaces; empty for a store in this process.
    pub urls: Vec<String>,
    /// Number of files of an engine on files.
    pub files: Option<usize>,
    /// Name of an engine on a local device.
    pub engine: Option<&'static str>,
    /// Bytes of its cache; 0 for its default.
    pub cache_bytes: Option<u64>,
    /// Options of RocksDB in this process.
    pub rocksdb_options: Option<String>,
    /// When a store in this process acknowledges a write.
    pub durability: Option<&'static str>,
    /// Clients, each with a connection of its own; threads of an engine in this process.
    pub threads: usize,
    /// Operations in flight on each connection.
    pub depth: usize,
    /// Key length in bytes, if fixed.
    pub key_bytes: Option<usize>,
    /// Key lengths in the form of the command line.
    pub key_sizes: String,
    /// Value length in bytes, if fixed.
    pub value_bytes: Option<usize>,
    /// Value lengths in the form of the command line.
    pub value_sizes: String,
    /// Number of different keys before any insert.
    pub keys: u64,
    /// Configured key distribution; `None` for the default of each workload.
    pub distribution: Option<&'static str>,
    /// Skew of zipf and latest.
    pub zipf_theta: f64,
    /// Rates of the open loop, in operations per second, one run each. Empty for a closed loop.
    pub rates_ops_s: Vec<f64>,
    /// Operations of each workload, if it ends by their number.
    pub operations: Option<u64>,
    /// Seconds of each workload, if it ends by time.
    pub seconds: Option<f64>,
    /// Seconds before each workload that are not counted.
    pub warm_up_s: f64,
    /// Seed of key choice, lengths and values.
    pub seed: u64,
    /// Whether values read are verified.
    pub verify: bool,
    /// Pairs of one scan of scanrandom or scanwhilewriting.
    pub scan_length: u32,
    /// Stores per second of the writer beside a workload; `None` for one after the other.
    pub write_rate_ops_s: Option<f64>,
    /// Whether operations that ended with an error status were counted and did not end the run.
    pub tolerates_errors: bool,
}

impl ReportedConfig {
    /// Describes a configuration on a system. `data_locations` are its URLs or its directory, at least one; `rates` are the
    /// rates that the configuration runs at.
    pub fn new(
        system: &SystemUnderTest,
        data_locations: &[String],
        config: &BenchConfig,
        rates: &[f64],
    ) -> ReportedConfig {
        let (operations, seconds) = match config.stop {
            StopCondition::Operations(count) => (Some(count), None),
            StopCondition::Time(span) => (None, Some(span.as_secs_f64())),
        };
        ReportedConfig {
            system: system.name(),
            url: data_locations[0].clone(),
            urls: if system.data_path().is_some() { Vec::new() } else { data_locations.to_vec() },
            files: system.files(),
            engine: system.engine(),
            cache_bytes: system.cache_bytes(),
            rocksdb_options: system.rocksdb_options(),
            durability: system.durability(),
            threads: config.threads,
            depth: config.depth,
            key_bytes: config.key_sizes.fixed_bytes(),
            key_sizes: config.key_sizes.to_string(),
            value_bytes: config.value_sizes.fixed_bytes(),
            value_sizes: config.value_sizes.to_string(),
            keys: config.keys,
            distribution: config.distribution.map(|kind| kind.name()),
            zipf_theta: config.zipf_theta,
            rates_ops_s: rates.to_vec(),
            operations,
            seconds,
            warm_up_s: config.warm_up.as_secs_f64(),
            seed: config.seed,
            verify: config.verify,
            scan_length: config.scan_length,
            write_rate_ops_s: config.write_rate,
            tolerates_errors: config.tolerates_errors,
        }
    }
}

/// The JSON report of a run.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Name and version of the format: [`BENCH_SCHEMA`].
    pub schema: &'static str,
    /// The version of octokv that wrote it.
    pub octokv_version: &'static str,
    /// The command line of the run.
    pub command: String,
    /// The machine that ran it.
    pub machine: MachineInfo,
    /// The configuration.
    pub settings: ReportedConfig,
    /// One result per workload and rate; with baselines one per round, workload and system, in the order of the runs.
    pub results: Vec<WorkloadResult>,
    /// The baselines, if any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub baselines: Vec<BaselineInfo>,
    /// Ratios and medians, one per workload and baseline.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub comparisons: Vec<BaselineComparison>,
}

/// The value of [`BenchReport::schema`].
pub const BENCH_SCHEMA: &str = "octokv-bench/3";
