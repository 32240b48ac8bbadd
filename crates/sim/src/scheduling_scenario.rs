//! The scheduling part of a plan: policy, sampling interval and simulated CPU cost of requests, drawn from a seed.
//!
//! In half of all simulations requests cost no CPU time, so load is always balanced; in the others cores are busy,
//! and every policy of the node may migrate or queue requests. Each start of the node selects the next policy, and
//! the simulated operator changes it from time to time.

use crate::draw::{between, pick};
use octokv_base::{Nanos, Prng};
use octokv_node::SimulatedCosts;
use octokv_node::monitor::Monitor;
use octokv_sched::{MigrateTenants, Policy, SchedConfig, TenantQos};
use std::sync::Arc;

/// Scheduling configuration of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct SchedulingPlan {
    /// Policy of the first start of the node.
    pub policy: Policy,
    /// Sampling interval (W in the papers).
    pub interval: Nanos,
    /// Tenants whose requests may migrate.
    pub migrate_tenants: MigrateTenants,
    /// Maximum number of times that a request is requeued.
    pub requeues_max: u32,
    /// Requests that the fair queue of a core keeps in flight.
    pub in_flight: u32,
    /// Rate limit of each tenant, in operations per second; 0 for none.
    pub operations_per_s: u64,
    /// Sampling intervals between two policy changes; 0 for no changes.
    pub policy_intervals: u64,
    /// Simulated CPU time of a request.
    pub costs: SimulatedCosts,
}

impl SchedulingPlan {
    /// Draws a configuration.
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

    /// The monitor for start number `start` of the node; its thresholds act on any imbalance.
    pub fn start_monitor(&self, start: usize, cores: usize) -> Arc<Monitor> {
        let scheduling = Monitor::new(cores, self.scheduler_config(start), || Nanos::ZERO);
        Arc::new(scheduling.expect("drawn values are within the ranges of the configuration"))
    }

    /// Sets the next policy if it is due, as an operator does. Called in each iteration of the first core; `chosen`
    /// counts the changes so far.
    pub fn rotate_policy(&self, scheduling: &Monitor, start: usize, chosen: &mut u64) {
        let due = scheduling.interval_count().checked_div(self.policy_intervals).unwrap_or(0);
        if due > *chosen {
            *chosen = due;
            scheduling
                .set_config(self.scheduler_config(start + due as usize))
                .expect("drawn values are within the ranges of the configuration");
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
            // Starts alternate between limits above and below the number of requests in flight.
            in_flight: [self.in_flight, 1, 7][start % 3],
            default_qos: TenantQos { operations_per_s: limit, ..TenantQos::default() },
            ..SchedConfig::default()
        }
    }
}
