//! The configuration of an experiment: load, costs and scheduling, of one tenant or of several.

use super::parameters::Operation;
use super::workload::ConnectionPolicy;
use octokv_client::ClientConfig;
use octokv_node::SimulatedCosts;
use octokv_sched::SchedConfig;

/// What is tried.
#[derive(Clone, Debug)]
pub struct ExperimentConfig {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a request costs a core.
    pub costs: SimulatedCosts,
    /// Put or get.
    pub operation: Operation,
    /// Threads of the client.
    pub threads: usize,
    /// Which connection a request goes over.
    pub connection_policy: ConnectionPolicy,
    /// Who runs what where.
    pub scheduling: SchedConfig,
    /// Whether the engine keeps its journal. The paper's says nothing of one; ours loses all without.
    pub journal: bool,
}

/// One tenant's threads.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantConfig {
    /// How many; none where it is connected and silent.
    pub threads: usize,
    /// Which connection a request goes over.
    pub connection_policy: ConnectionPolicy,
}

/// What is tried with several tenants.
#[derive(Clone, Debug)]
pub struct MultiTenantConfig {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a request costs a core.
    pub costs: SimulatedCosts,
    /// Put or get, all of them.
    pub operation: Operation,
    /// The tenants.
    pub tenants: Vec<TenantConfig>,
    /// Whether all are on one machine, behind one wire, as OctoFAS's are; else each has a machine and a wire.
    pub shared_client_host: bool,
    /// Who runs what where.
    pub scheduling: SchedConfig,
    /// Whether the engine keeps its journal.
    pub journal: bool,
}

impl MultiTenantConfig {
    /// One flow, of which a trial says everything.
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

/// The name of a tenant's host.
pub fn tenant_host_nqn(tenant: usize) -> String {
    let first = ClientConfig::default().host_nqn;
    if tenant == 0 { first } else { format!("{first}-{}", tenant + 1) }
}
