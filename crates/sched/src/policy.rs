//! The choice for the next window (OctoFAS Algorithms 1 and 4; OctoKV §IV-D).
//!
//! ```text
//!   policy            when                                    requests of whom move      requests of whom go back
//!   none, fair        never                                   -                          -
//!   round-robin,      a core above T_OL, and                  all                        -
//!     proportional      most − least above T_LB
//!   inter             always                                  migrate_tenants            -
//!   intra             always                                  -                          dense, B times
//!   hybrid            always                                  dense                      dense that stay, B times
//!   auto              LB < T_LB, fair      ─▶ as inter
//!                     in balance, F ≤ 0.9  ─▶ as intra
//!                     LB < T_LB, F ≤ 0.9   ─▶ as hybrid
//!                     neither              ─▶ as none
//! ```
//! In: the figures of a window and the settings. Out: a [`Decision`], which says for each core and each flow what it needs
//! until the next one. Pure: the same figures always give the same decision.
//!
//! "Always" still moves nothing where nothing is to be gained: from a node that is [idle](crate::measure::IDLE), or between
//! cores that are alike; and no flow is dense where all are alike.
//!
//! In a hybrid sparse flows stay where they are and go straight through, whatever `migrate_tenants` says (Algorithm 4). A request
//! of a dense flow that the core's router does not move is one that goes back.

use crate::config::{MigrateTenants, Policy, SchedConfig};
use crate::ids::TenantId;
use crate::metrics::{IDLE_LOAD_MAX, IntervalMetrics};
use crate::migration_plan::{CoreMigrations, MigrationPlan, SpreadOrder, core_loads};
use crate::{load_balance, octofas_inter, octofas_intra};

/// What is done until the next window's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    /// Nothing.
    Nothing,
    /// OctoKV's load balance, in this order.
    Balance(SpreadOrder),
    /// Requests move between cores.
    Inter,
    /// Requests of dense flows go back.
    Intra,
    /// Requests of dense flows move, and those that do not go back.
    Hybrid,
    /// Each core's fair queue says who is next.
    Fair,
}

/// What holds for the requests of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// Which one.
    pub tenant: TenantId,
    /// Whether it is dense.
    pub dense: bool,
    /// Whether its core's router is asked where its requests run; where not, they run here.
    pub migrates: bool,
    /// B: how often those that run here go back. 0: not at all, and they need no queue.
    pub requeues: u32,
}

/// A choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What is done.
    pub action: PolicyAction,
    /// Whether a core was above T_OL.
    pub overloaded: bool,
    /// Whether loads were out of balance, by the condition of the policy's paper.
    pub imbalanced: bool,
    /// Whether flows were treated unfairly.
    pub unfair: bool,
    /// By core: what its router is given.
    pub plan: MigrationPlan,
    /// The flows that were measured, in the order of the figures.
    pub tenants: Vec<TenantRule>,
    /// Whether requests of flows that come later move.
    unmeasured_migrate: bool,
}

impl Decision {
    /// The choice of a node that has not measured anything yet: nothing is done.
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

    /// What holds for a flow. One that was not measured is taken for sparse. Looks through all flows: once a window, not
    /// for each request.
    pub fn rule(&self, tenant: TenantId) -> TenantRule {
        let newcomer = TenantRule { tenant, dense: false, migrates: self.unmeasured_migrate, requeues: 0 };
        self.tenants.iter().find(|rule| rule.tenant == tenant).copied().unwrap_or(newcomer)
    }

    /// What a core's router is given; nothing for a core that was not measured.
    pub fn core_migrations(&self, core: crate::CoreId) -> Option<&CoreMigrations> {
        self.plan.cores.get(core.index())
    }
}

/// Chooses.
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
    // A flow that nobody measured is taken for sparse.
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
