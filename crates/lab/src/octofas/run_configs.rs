//! Configurations of OctoFAS's simulated runs: tenants and their load, connections, policy.

use crate::job_runner::{self, Durations};
use crate::simulation::config::{MultiTenantConfig, TenantConfig, tenant_host_nqn};
use crate::simulation::experiment::SimulatedExperiment;
use crate::simulation::parameters::{
    CostModel, OCTOFAS_CONNECTION_THRESHOLD, Operation, SAMPLING_INTERVAL, TABLE_IV, request_costs,
};
use crate::simulation::tenant_metrics::MultiTenantRunStats;
use crate::simulation::workload::ConnectionPolicy;
use anyhow::Result;
use octokv_base::Nanos;
use octokv_sched::{MigrateTenants, Policy, SchedConfig, TenantQos};

const SEED: u64 = 1;
/// The paper has no time limit for requeued requests ("backwarding").
const REQUEUE_HOLD_MAX: Nanos = Nanos::from_secs(1);

/// Distribution of requests over connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OctofasPlacement {
    /// In order, up to the threshold (§3.3).
    InOrder,
    /// The first tenant in order, the others by the shares of OctoKV's Table IV.
    ByShares,
    /// All over the first connection.
    OneCore,
}

impl OctofasPlacement {
    /// Name in series.
    pub fn name(self) -> &'static str {
        match self {
            OctofasPlacement::InOrder => "in order",
            OctofasPlacement::ByShares => "flow 2 by Table IV's shares",
            OctofasPlacement::OneCore => "one core",
        }
    }

    fn placement(self, tenant: usize) -> ConnectionPolicy {
        match (self, tenant) {
            (OctofasPlacement::InOrder, _) | (OctofasPlacement::ByShares, 0) => {
                ConnectionPolicy::FillInOrder(OCTOFAS_CONNECTION_THRESHOLD)
            }
            (OctofasPlacement::ByShares, _) => ConnectionPolicy::Weighted(TABLE_IV.to_vec()),
            (OctofasPlacement::OneCore, _) => ConnectionPolicy::Single(0),
        }
    }
}

/// Configuration of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct OctofasRunConfig {
    /// Costs of a request.
    pub costs: CostModel,
    /// Put or get.
    pub operation: Operation,
    /// Threads of each tenant.
    pub threads: Vec<usize>,
    /// Distribution over connections.
    pub placement: OctofasPlacement,
    /// Scheduling policy.
    pub policy: Policy,
    /// Tenants whose requests `inter` moves.
    pub migrate: MigrateTenants,
    /// Requeues of requests of dense tenants; `None` for the number that intensities give.
    pub requeues: Option<u32>,
    /// Concurrency limit of the fair queue of a core; `None` for the default.
    pub in_flight: Option<u32>,
    /// Weight of each tenant.
    pub weights: Vec<u32>,
    /// Whether all tenants share a client machine and its link.
    pub one_machine: bool,
}

impl OctofasRunConfig {
    /// The default: puts at the paper's costs from one machine, without a policy.
    pub fn new(threads: &[usize], placement: OctofasPlacement) -> OctofasRunConfig {
        OctofasRunConfig {
            costs: CostModel::Paper,
            operation: Operation::Put,
            threads: threads.to_vec(),
            placement,
            policy: Policy::None,
            migrate: MigrateTenants::All,
            requeues: None,
            in_flight: None,
            weights: vec![1; threads.len()],
            one_machine: true,
        }
    }

    /// The same with a policy.
    pub fn with_policy(&self, policy: Policy) -> OctofasRunConfig {
        OctofasRunConfig { policy, ..self.clone() }
    }

    /// The same with OctoFAS's best parameters: dense tenants move and requeue 20 times.
    pub fn with_dense_policy(&self, policy: Policy) -> OctofasRunConfig {
        OctofasRunConfig { migrate: MigrateTenants::Dense, ..self.with_policy(policy) }.with_requeues(20)
    }

    /// The same with this number of requeues of dense tenants.
    pub fn with_requeues(self, requeues: u32) -> OctofasRunConfig {
        OctofasRunConfig { requeues: Some(requeues), ..self }
    }

    /// The same with one active tenant; the others are connected and idle.
    pub fn only_tenant(&self, tenant: usize) -> OctofasRunConfig {
        let threads =
            self.threads.iter().enumerate().map(|(at, &threads)| if at == tenant { threads } else { 0 });
        OctofasRunConfig {
            threads: threads.collect(),
            weights: vec![1; self.threads.len()],
            requeues: None,
            in_flight: None,
            migrate: MigrateTenants::All,
            ..self.with_policy(Policy::None)
        }
    }

    fn scheduling_config(&self) -> SchedConfig {
        let (policy, move_flows) = (self.policy, self.migrate);
        let mut config = SchedConfig {
            policy,
            interval: SAMPLING_INTERVAL,
            migrate_tenants: move_flows,
            ..SchedConfig::default()
        };
        if let Some(requeues) = self.requeues {
            // Independent of the intensities.
            config =
                SchedConfig { alpha: 100.0, requeues_max: requeues, held_max: REQUEUE_HOLD_MAX, ..config };
        }
        config.in_flight = self.in_flight.unwrap_or(config.in_flight);
        for (tenant, &weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight != 1) {
            config.tenants.insert(tenant_host_nqn(tenant), TenantQos { weight, ..TenantQos::default() });
        }
        config
    }
}

impl job_runner::ExperimentJob for OctofasRunConfig {
    type Output = MultiTenantRunStats;

    fn run(&self, durations: &Durations) -> Result<MultiTenantRunStats, String> {
        let tenant = |(tenant, &threads): (usize, &usize)| TenantConfig {
            threads,
            connection_policy: self.placement.placement(tenant),
        };
        let experiment = SimulatedExperiment::multi_tenant(&MultiTenantConfig {
            seed: SEED,
            costs: request_costs(self.costs, self.operation, true),
            operation: self.operation,
            tenants: self.threads.iter().enumerate().map(tenant).collect(),
            shared_client_host: self.one_machine,
            scheduling: self.scheduling_config(),
            journal: true,
        })?;
        experiment.run_for(durations.warm_up)?;
        experiment.run_tenants_for(durations.measured)
    }
}

/// Runner of these configurations.
pub type OctofasRunner = job_runner::JobRunner<OctofasRunConfig>;

impl OctofasRunner {
    /// Returns the result of one run.
    ///
    /// # Errors
    /// If the run failed.
    pub fn run_one(&mut self, job: &OctofasRunConfig) -> Result<MultiTenantRunStats> {
        Ok(self.run_all(std::slice::from_ref(job))?.remove(0))
    }
}
