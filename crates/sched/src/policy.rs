//! Selects the action of the next interval (OctoFAS Algorithms 1 and 4; OctoKV §IV-D).
//!
//! ```text
//!   policy            condition                               tenants that migrate       tenants that are requeued
//!   none, fair        never                                   -                          -
//!   round-robin,      a core above T_OL, and                  all                        -
//!     proportional      max − min above T_LB
//!   inter             always                                  migrate_tenants            -
//!   intra             always                                  -                          dense, B times
//!   hybrid            always                                  dense                      dense that stay, B times
//!   auto              LB < T_LB, fair      ─▶ as inter
//!                     in balance, F ≤ 0.9  ─▶ as intra
//!                     LB < T_LB, F ≤ 0.9   ─▶ as hybrid
//!                     neither              ─▶ as none
//! ```
//! In: the metrics of an interval and the configuration. Out: a [`Decision`] with the parameters of each core and each
//! tenant until the next one. Pure: the same metrics always give the same decision.
//!
//! "Always" still migrates nothing if there is no gain: from a node that is [idle](crate::metrics::IDLE_LOAD_MAX), or
//! between cores with equal load; and no tenant is dense if all are alike.
//!
//! In hybrid, sparse tenants stay on their core and are forwarded at once, whatever `migrate_tenants` says (Algorithm
//! 4). A request of a dense tenant that the core's router keeps local is requeued.

use crate::config::{MigrateTenants, Policy, SchedConfig};
use crate::ids::TenantId;
use crate::metrics::{IDLE_LOAD_MAX, IntervalMetrics};
use crate::migration_plan::{CoreMigrations, MigrationPlan, SpreadOrder, core_loads};
use crate::{load_balance, octofas_inter, octofas_intra};

/// The action until the next decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    /// No action.
    Nothing,
    /// OctoKV load balancing, in this order.
    Balance(SpreadOrder),
    /// Requests migrate between cores.
    Inter,
    /// Requests of dense tenants are requeued.
    Intra,
    /// Requests of dense tenants migrate, and those that stay are requeued.
    Hybrid,
    /// Each core's fair queue orders requests.
    Fair,
}

/// The rule for the requests of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// The tenant.
    pub tenant: TenantId,
    /// Whether it is dense.
    pub dense: bool,
    /// Whether the core's router routes its requests; otherwise they execute locally.
    pub migrates: bool,
    /// B: how often its local requests are requeued. 0: never, and they need no queue.
    pub requeues: u32,
}

/// The result of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The action.
    pub action: PolicyAction,
    /// Whether a core was above T_OL.
    pub overloaded: bool,
    /// Whether loads were imbalanced, by the condition of the policy's paper.
    pub imbalanced: bool,
    /// Whether tenants were treated unfairly.
    pub unfair: bool,
    /// The migration plan: a part for the router of each core.
    pub plan: MigrationPlan,
    /// Rules of the measured tenants, in the order of the metrics.
    pub tenants: Vec<TenantRule>,
    /// Whether requests of tenants that connect later migrate.
    unmeasured_migrate: bool,
}

impl Decision {
    /// The decision of a node without measurements: no action.
    pub fn initial(cores: usize) -> Decision {
        Decision {
            action: PolicyAction::Nothing,
            overloaded: false,
            imbalanced: false,
            unfair: false,
            plan: MigrationPlan::empty(cores),
            tenants: Vec::new(),
            unmeasured_migrate: false,
        }
    }

    /// The rule of a tenant. A tenant without measurements counts as sparse. A linear search: call it once per
    /// interval, not per request.
    pub fn rule(&self, tenant: TenantId) -> TenantRule {
        let newcomer = TenantRule { tenant, dense: false, migrates: self.unmeasured_migrate, requeues: 0 };
        self.tenants.iter().find(|rule| rule.tenant == tenant).copied().unwrap_or(newcomer)
    }

    /// The part of a core's router; `None` for a core that was not measured.
    pub fn core_migrations(&self, core: crate::CoreId) -> Option<&CoreMigrations> {
        self.plan.cores.get(core.index())
    }
}

/// Selects the action, the migration plan and the tenant rules.
pub fn choose(metrics: &IntervalMetrics, config: &SchedConfig) -> Decision {
    let overloaded = load_balance::is_overloaded(metrics, config);
    let by_difference = load_balance::is_imbalanced(metrics, config);
    let by_ratio = octofas_inter::is_imbalanced(metrics, config);
    let unfair = octofas_intra::is_unfair(metrics, config);
    let balanced = |order| {
        if overloaded && by_difference { PolicyAction::Balance(order) } else { PolicyAction::Nothing }
    };
    let (chosen, imbalanced) = match config.policy {
        Policy::None => (PolicyAction::Nothing, by_ratio),
        Policy::RoundRobin => (balanced(SpreadOrder::RoundRobin), by_difference),
        Policy::Proportional => (balanced(SpreadOrder::Proportional), by_difference),
        Policy::Inter => (PolicyAction::Inter, by_ratio),
        Policy::Intra => (PolicyAction::Intra, by_ratio),
        Policy::Hybrid => (PolicyAction::Hybrid, by_ratio),
        Policy::Auto => (octofas_action(unfair, by_ratio), by_ratio),
        Policy::Fair => (PolicyAction::Fair, by_ratio),
    };
    let migrate_tenants = match chosen {
        PolicyAction::Balance(_) => Some(MigrateTenants::All),
        PolicyAction::Inter => Some(config.migrate_tenants),
        PolicyAction::Hybrid => Some(MigrateTenants::Dense),
        PolicyAction::Nothing | PolicyAction::Intra | PolicyAction::Fair => None,
    };
    let dense = octofas_intra::classify_dense(&metrics.tenants);
    let plan = match migrate_tenants {
        Some(selected) if metrics.natural_load_max > IDLE_LOAD_MAX => {
            let cores = core_loads(metrics, |index| selected.includes(dense[index]));
            match chosen {
                PolicyAction::Balance(order) => load_balance::plan(&cores, order),
                _ => octofas_inter::plan(&cores),
            }
        }
        _ => MigrationPlan::empty(metrics.cores.len()),
    };
    let moving = !plan.is_empty();
    let requeues = match chosen {
        PolicyAction::Intra | PolicyAction::Hybrid => {
            octofas_intra::requeue_counts(&metrics.tenants, &dense, config)
        }
        _ => vec![0; dense.len()],
    };
    let moves = |dense: bool| moving && migrate_tenants.is_some_and(|selected| selected.includes(dense));
    let rule = |((tenant, &dense), requeues)| {
        let tenant: &crate::metrics::TenantIntervalMetrics = tenant;
        TenantRule { tenant: tenant.tenant, dense, migrates: moves(dense), requeues }
    };
    let tenants = metrics.tenants.iter().zip(&dense).zip(requeues).map(rule).collect();
    // A tenant without measurements counts as sparse.
    Decision {
        action: chosen,
        overloaded,
        imbalanced,
        unfair,
        plan,
        tenants,
        unmeasured_migrate: moves(false),
    }
}

/// OctoFAS Algorithm 1.
fn octofas_action(unfair: bool, imbalanced: bool) -> PolicyAction {
    match (unfair, imbalanced) {
        (false, false) => PolicyAction::Nothing,
        (false, true) => PolicyAction::Inter,
        (true, false) => PolicyAction::Intra,
        (true, true) => PolicyAction::Hybrid,
    }
}

#[cfg(test)]
mod tests;
