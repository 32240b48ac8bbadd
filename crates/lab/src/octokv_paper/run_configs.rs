//! Configurations of the OctoKV paper's simulated runs: load, connections, policy.

use crate::job_runner::{self, Durations};
use crate::simulation::config::ExperimentConfig;
use crate::simulation::experiment::SimulatedExperiment;
use crate::simulation::metrics::RunStats;
use crate::simulation::parameters::{
    CONNECTION_THRESHOLD, CostModel, Operation, SAMPLING_INTERVAL, TABLE_IV, request_costs,
};
use crate::simulation::workload::ConnectionPolicy;
use anyhow::Result;
use octokv_sched::{Policy, SchedConfig};

const SEED: u64 = 1;
/// Length of Fig. 8 in sampling intervals, which are the paper's seconds.
pub const SERIES_INTERVALS: usize = 30;
/// The interval at which Fig. 8 switches balancing on.
pub const SWITCH_INTERVAL: usize = 15;

/// Distribution of requests over connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OctokvPlacement {
    /// In order, up to the threshold (OctoFAS §3.3).
    InOrder,
    /// By the shares of Table IV.
    ByShares,
}

impl OctokvPlacement {
    /// Name in series.
    pub fn name(self) -> &'static str {
        match self {
            OctokvPlacement::InOrder => "in order",
            OctokvPlacement::ByShares => "by Table IV's shares",
        }
    }
}

/// Mode of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunMode {
    /// For a fixed time after a warm-up.
    Steady,
    /// A number of requests after a warm-up: each stage counts each of them.
    Requests(u64),
    /// By sampling interval; the policy applies from [`SWITCH_INTERVAL`] on.
    Switched,
}

/// Configuration of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct OctokvRunConfig {
    /// Costs of a request.
    pub costs: CostModel,
    /// Whether the costs include the engine.
    pub engine: bool,
    /// Put or get.
    pub operation: Operation,
    /// Client threads.
    pub threads: usize,
    /// Distribution over connections.
    pub placement: OctokvPlacement,
    /// Scheduling policy.
    pub policy: Policy,
    /// T_OL and T_LB.
    pub thresholds: (f64, f64),
    /// Whether the engine keeps its journal.
    pub journal: bool,
    /// Mode of a run.
    pub mode: RunMode,
}

impl OctokvRunConfig {
    /// The default: the paper's costs and thresholds, with the engine, without balancing.
    pub fn new(operation: Operation, threads: usize, placement: OctokvPlacement) -> OctokvRunConfig {
        OctokvRunConfig {
            costs: CostModel::Paper,
            engine: true,
            operation,
            threads,
            placement,
            policy: Policy::None,
            thresholds: (0.4, 0.1),
            journal: true,
            mode: RunMode::Steady,
        }
    }

    /// The same with a policy.
    pub fn with_policy(self, policy: Policy) -> OctokvRunConfig {
        OctokvRunConfig { policy, ..self }
    }

    fn scheduling_config(&self, policy: Policy) -> SchedConfig {
        let (overload, imbalance_difference) = self.thresholds;
        SchedConfig {
            policy,
            interval: SAMPLING_INTERVAL,
            overload,
            imbalance_difference,
            ..SchedConfig::default()
        }
    }
}

impl job_runner::ExperimentJob for OctokvRunConfig {
    type Output = Vec<RunStats>;

    fn run(&self, durations: &Durations) -> Result<Vec<RunStats>, String> {
        let placement = match self.placement {
            OctokvPlacement::InOrder => ConnectionPolicy::FillInOrder(CONNECTION_THRESHOLD),
            OctokvPlacement::ByShares => ConnectionPolicy::Weighted(TABLE_IV.to_vec()),
        };
        let initial_policy = if self.mode == RunMode::Switched { Policy::None } else { self.policy };
        let experiment = SimulatedExperiment::new(&ExperimentConfig {
            seed: SEED,
            costs: request_costs(self.costs, self.operation, self.engine),
            operation: self.operation,
            threads: self.threads,
            connection_policy: placement,
            scheduling: self.scheduling_config(initial_policy),
            journal: self.journal,
        })?;
        experiment.run_for(durations.warm_up)?;
        match self.mode {
            RunMode::Steady => Ok(vec![experiment.run_for(durations.measured)?]),
            RunMode::Requests(requests) => Ok(vec![experiment.run_requests(requests)?]),
            RunMode::Switched => {
                let interval = |number: usize| {
                    if number == SWITCH_INTERVAL {
                        experiment.set_policy(self.scheduling_config(self.policy))?;
                    }
                    experiment.run_for(SAMPLING_INTERVAL)
                };
                (0..SERIES_INTERVALS).map(interval).collect()
            }
        }
    }
}

/// Runner of these configurations.
pub type OctokvRunner = job_runner::JobRunner<OctokvRunConfig>;

impl OctokvRunner {
    /// Returns the results of steady runs.
    ///
    /// # Errors
    /// The first run that failed.
    pub fn run_steady(&mut self, jobs: &[OctokvRunConfig]) -> Result<Vec<RunStats>> {
        let all = self.run_all(jobs)?;
        Ok(all.into_iter().filter_map(|mut stats| stats.pop()).collect())
    }
}
