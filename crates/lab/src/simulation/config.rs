//! The configuration of an experiment: load, costs and scheduling, of one tenant or of several.

use super::parameters::Operation;
use super::workload::ConnectionPolicy;
use octokv_client::ClientConfig;
use octokv_node::SimulatedCosts;
use octokv_sched::SchedConfig;

/// Configuration of an experiment with one tenant.
#[derive(Clone, Debug)]
pub struct ExperimentConfig {
    /// Seed of all random choices.
    pub seed: u64,
    /// Costs of a request on a core.
    pub costs: SimulatedCosts,
    /// Put or get.
    pub operation: Operation,
    /// Threads of the client.
    pub threads: usize,
    /// Connection policy of requests.
    pub connection_policy: ConnectionPolicy,
    /// Scheduling configuration of the node.
    pub scheduling: SchedConfig,
    /// Whether the engine writes its journal. The paper mentions none; without it our engine cannot recover.
    pub journal: bool,
}

/// The load of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantConfig {
    /// Client threads; 0 for a tenant that is connected and idle.
    pub threads: usize,
    /// Connection policy of requests.
    pub connection_policy: ConnectionPolicy,
}

/// Configuration of an experiment with several tenants.
#[derive(Clone, Debug)]
pub struct MultiTenantConfig {
    /// Seed of all random choices.
    pub seed: u64,
    /// Costs of a request on a core.
    pub costs: SimulatedCosts,
    /// Operation of all tenants.
    pub operation: Operation,
    /// The tenants.
    pub tenants: Vec<TenantConfig>,
    /// Whether all tenants share a client machine and its link, as in OctoFAS; otherwise each has its own.
    pub shared_client_host: bool,
    /// Scheduling configuration of the node.
    pub scheduling: SchedConfig,
    /// Whether the engine writes its journal.
    pub journal: bool,
}

impl MultiTenantConfig {
    /// The multi-tenant configuration of a single tenant.
    pub fn single_tenant(trial: &ExperimentConfig) -> MultiTenantConfig {
        MultiTenantConfig {
            seed: trial.seed,
            costs: trial.costs,
            operation: trial.operation,
            tenants: vec![TenantConfig {
                threads: trial.threads,
                connection_policy: trial.connection_policy.clone(),
            }],
            shared_client_host: true,
            scheduling: trial.scheduling.clone(),
            journal: trial.journal,
        }
    }
}

/// The host NQN of a tenant.
pub fn tenant_host_nqn(tenant: usize) -> String {
    let first = ClientConfig::default().host_nqn;
    if tenant == 0 { first } else { format!("{first}-{}", tenant + 1) }
}
