//! Who is served where and when, in a world: a policy, its window, what requests cost a core, drawn from a seed.
//!
//! In half of all worlds requests cost nothing, and so nothing is ever out of balance; in the others cores have work,
//! and any policy of the node may move it or hold it back. Each start of the node takes the next policy, and so does an
//! operator from time to time.

use crate::scenario::{between, pick};
use octokv_base::{Nanos, Prng};
use octokv_node::SimulatedCosts;
use octokv_node::monitor::Monitor;
use octokv_sched::{MigrateTenants, Policy, SchedConfig, TenantQos};
use std::sync::Arc;

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub struct SchedulingPlan {
    /// The policy of the first start.
    pub policy: Policy,
    /// W.
    pub interval: Nanos,
    /// Whose requests move.
    pub migrate_tenants: MigrateTenants,
    /// How often requests go back at the most.
    pub requeues_max: u32,
    /// Requests that a fair queue lets run at a time.
    pub in_flight: u32,
    /// The most operations a second of a tenant; 0 for no limit.
    pub operations_per_s: u64,
    /// After so many windows the operator chooses the next policy; 0 for never.
    pub policy_intervals: u64,
    /// What a request costs.
    pub costs: SimulatedCosts,
}

impl SchedulingPlan {
    /// One of a seed's.
    pub fn draw(random: &mut Prng) -> SchedulingPlan {
        let idle = random.one_in(2);
        let mut cost = |most: u64| Nanos(if idle { 0 } else { between(random, 100, most) });
        let costs = SimulatedCosts { target: cost(60_000), kv: cost(400_000), device: cost(60_000) };
        SchedulingPlan {
            policy: pick(random, &Policy::ALL),
            interval: Nanos::from_millis(between(random, 10, 40)),
            migrate_tenants: pick(random, &MigrateTenants::ALL),
            requeues_max: pick(random, &[0, 3, 15, 1000]),
            in_flight: pick(random, &[1, 2, 32]),
            operations_per_s: pick(random, &[0, 0, 0, 500, 5_000]),
            policy_intervals: pick(random, &[0, 1, 2, 5]),
            costs,
        }
    }

    /// The monitor of the node's `start`th start, which looks for imbalance where there is any.
    pub fn start_monitor(&self, start: usize, cores: usize) -> Arc<Monitor> {
        let scheduling = Monitor::new(cores, self.scheduler_config(start), || Nanos::ZERO);
        Arc::new(scheduling.expect("drawn within its ranges"))
    }

    /// What an operator does at each turn of the first core: the next policy, when it is time.
    pub fn rotate_policy(&self, scheduling: &Monitor, start: usize, chosen: &mut u64) {
        let due = scheduling.interval_count().checked_div(self.policy_intervals).unwrap_or(0);
        if due > *chosen {
            *chosen = due;
            scheduling
                .set_config(self.scheduler_config(start + due as usize))
                .expect("drawn within its ranges");
        }
    }

    fn scheduler_config(&self, start: usize) -> SchedConfig {
        let first = Policy::ALL.iter().position(|policy| *policy == self.policy).unwrap_or(0);
        let limit = (self.operations_per_s > 0).then_some(self.operations_per_s);
        SchedConfig {
            policy: Policy::ALL[(first + start) % Policy::ALL.len()],
            interval: self.interval,
            overload: 0.0,
            imbalance_difference: 0.0,
            imbalance_ratio: 1.0,
            fairness: 1.0,
            migrate_tenants: self.migrate_tenants,
            requeues_max: self.requeues_max,
            // Now more, now fewer than run already.
            in_flight: [self.in_flight, 1, 7][start % 3],
            default_qos: TenantQos { operations_per_s: limit, ..TenantQos::default() },
            ..SchedConfig::default()
        }
    }
}
