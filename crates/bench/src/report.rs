//! The JSON document of a run.

use crate::baselines::BaselineInfo;
use crate::baselines::compare::BaselineComparison;
use crate::config::{BenchConfig, StopCondition};
use crate::machine_info::MachineInfo;
use crate::system_under_test::SystemUnderTest;
use crate::workload_result::WorkloadResult;
use serde::Serialize;

/// What was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct ReportedConfig {
    /// The system.
    pub system: &'static str,
    /// The first namespace, or the directory of the files.
    pub url: String,
    /// All namespaces; none where the system works on files.
    pub urls: Vec<String>,
    /// Files, where the system works on files.
    pub files: Option<usize>,
    /// When the engine in this process acknowledges a write, where there is one.
    pub durability: Option<&'static str>,
    /// Connections.
    pub threads: usize,
    /// Operations in flight on each.
    pub depth: usize,
    /// Key length, where all have one.
    pub key_bytes: Option<usize>,
    /// Key lengths as they are typed.
    pub key_sizes: String,
    /// Value length, where all have one.
    pub value_bytes: Option<usize>,
    /// Value lengths as they are typed.
    pub value_sizes: String,
    /// Different keys, before any is inserted.
    pub keys: u64,
    /// How keys are drawn, where that was asked for; else each workload has its own way.
    pub distribution: Option<&'static str>,
    /// The skew of those distributions that have one.
    pub zipf_theta: f64,
    /// Operations per second that were asked for; one after the other. Empty where each begins when one has ended.
    pub rates_ops_s: Vec<f64>,
    /// Operations of each workload, where they end it.
    pub operations: Option<u64>,
    /// Time of each workload, where it ends it.
    pub seconds: Option<f64>,
    /// Uncounted time before each.
    pub warm_up_s: f64,
    /// The seed.
    pub seed: u64,
    /// Whether values read are compared.
    pub verify: bool,
}

impl ReportedConfig {
    /// Of a plan on a system; `places` are where its data is, one at least, `rates` those that the plan is run at.
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
            urls: if system.files().is_some() { Vec::new() } else { data_locations.to_vec() },
            files: system.files(),
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
        }
    }
}

/// The document of a run.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Which document this is, and its version.
    pub schema: &'static str,
    /// The version of octokv that wrote it.
    pub octokv_version: &'static str,
    /// The command line that made it.
    pub command: String,
    /// On which machine.
    pub machine: MachineInfo,
    /// With which settings.
    pub settings: ReportedConfig,
    /// One per workload and rate; beside peers one per round, workload and side, in the order in which they ran.
    pub results: Vec<WorkloadResult>,
    /// Beside peers: what they were.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub baselines: Vec<BaselineInfo>,
    /// Beside peers: ratios and medians, one per workload and peer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub comparisons: Vec<BaselineComparison>,
}

/// The [`BenchReport::schema`] that this code writes.
pub const BENCH_SCHEMA: &str = "octokv-bench/3";
