//! OctoFAS inter-core scheduling: requests migrate one by one, round robin, from cores above the average load to cores
//! below it (OctoFAS §4.3.1, Algorithm 2).
//!
//! ```text
//!   each high core, round robin, while its estimate is above U_avg and it has events:
//!       the next low core whose estimate is below U_avg receives one
//!       estimate of the sender − one event's load, estimate of the receiver + one event's load
//! ```
//! In: a [`CoreLoad`] for each core, of the tenants that migrate. Out: a [`MigrationPlan`].
//!
//! The paper does this as requests arrive, on utilisations that all cores can read. Here the algorithm runs ahead of
//! time with the counts of the last interval, since cores share no state: the result is a budget for each core, and
//! [`Router`](crate::router::Router) spreads it evenly over the interval's requests instead of migrating everything
//! first and nothing later. If that would take more than a few thousand steps, several events move per step, no more
//! than bring an estimate to U_avg. Each sender has its own position in the round robin of receivers.
//!
//! Compared with [`crate::load_balance`]: the same cores send, with the same stop at U_avg. It differs in the receivers
//! if one low core has little capacity (the others receive once it is full) and in the condition that triggers it.
//!
//! Invariants: those of a [`MigrationPlan`]; a low core exceeds U_avg by less than one event's load, a high core falls
//! below it by less than one. Tests: against the algorithm run event by event, and random cores checked against the
//! invariants.

use crate::config::SchedConfig;
use crate::metrics::IntervalMetrics;
use crate::migration_plan::{CoreLoad, LOAD_EPSILON, MigrationPlan, SpreadOrder, average_load};

/// Approximate number of steps of one plan, which takes tens of microseconds.
const STEPS: u64 = 4096;

/// Whether LB is below T_LB (OctoFAS §4.2.2).
pub fn is_imbalanced(metrics: &IntervalMetrics, config: &SchedConfig) -> bool {
    metrics.natural_balance < config.imbalance_ratio
}

/// Computes the plan without checking the threshold.
pub fn plan(cores: &[CoreLoad]) -> MigrationPlan {
    plan_in_steps(cores, STEPS)
}

fn plan_in_steps(cores: &[CoreLoad], steps: u64) -> MigrationPlan {
    let average = average_load(cores);
    let is_above = |load: f64| load > average + LOAD_EPSILON;
    let is_below = |load: f64| load < average - LOAD_EPSILON;
    let mut loads: Vec<f64> = cores.iter().map(|core| core.total()).collect();
    let mut left: Vec<u64> = cores.iter().map(|core| core.events).collect();
    let sends = |at: &usize| is_above(cores[*at].total()) && cores[*at].event_load() > 0.0;
    let high: Vec<usize> = (0..cores.len()).filter(sends).collect();
    let low: Vec<usize> = (0..cores.len()).filter(|&at| is_below(cores[at].total())).collect();

    let excess = |at: &usize| (cores[*at].total() - average).min(cores[*at].movable);
    let step = high.iter().map(excess).sum::<f64>() / steps as f64;

    let mut cells = vec![vec![0; cores.len()]; cores.len()];
    // By sender: the position in `low` of the next receiver. The senders start at different positions.
    let mut next: Vec<usize> = (0..high.len()).collect();
    let mut moved = !low.is_empty();
    while moved {
        moved = false;
        for (&from, next) in high.iter().zip(&mut next) {
            if left[from] == 0 || !is_above(loads[from]) {
                continue;
            }
            let mut candidates = (0..low.len()).map(|step| (*next + step) % low.len());
            let Some(receiver_index) = candidates.find(|&candidate| is_below(loads[low[candidate]])) else {
                break;
            };
            let (to, event_load) = (low[receiver_index], cores[from].event_load());
            let together = ((step / event_load) as u64).max(1);
            let excess = events_to_cover(loads[from] - average, event_load);
            let capacity = events_to_cover(average - loads[to], event_load);
            let events = together.min(left[from]).min(excess).min(capacity);
            cells[from][to] += events;
            left[from] -= events;
            loads[from] -= events as f64 * event_load;
            loads[to] += events as f64 * event_load;
            *next = receiver_index + 1;
            moved = true;
        }
    }
    MigrationPlan::from_matrix(&cells, cores, SpreadOrder::RoundRobin)
}

/// The number of events of this load that brings an estimate to its target, or just past it.
fn events_to_cover(distance: f64, event_load: f64) -> u64 {
    ((distance / event_load).ceil() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CoreId;
    use crate::migration_plan::tests::{assert_valid_plan, random_cores};
    use octokv_base::Prng;

    fn core(fixed: f64, movable: f64, events: u64) -> CoreLoad {
        CoreLoad { fixed, movable, events }
    }

    /// By core: events sent and events received.
    fn sent_and_received(plan: &MigrationPlan) -> Vec<(u64, u64)> {
        let of = |at: usize| (plan.cores[at].leaving(), plan.arriving(CoreId::from_index(at)));
        (0..plan.cores.len()).map(of).collect()
    }

    #[test]
    fn events_are_sent_round_robin_until_estimates_reach_the_average() {
        type InterRow = (&'static [(u64, u64)], &'static [(f64, f64, u64)]);
        let table: &[InterRow] = &[
            (&[], &[]),
            (&[(0, 0)], &[(0.5, 0.5, 10)]),
            (&[(0, 0), (0, 0), (0, 0)], &[(0.1, 0.2, 9), (0.1, 0.2, 9), (0.2, 0.1, 9)]),
            (&[(0, 0), (0, 0)], &[(0.9, 0.0, 0), (0.1, 0.0, 0)]),
            (&[(10, 0), (0, 10)], &[(0.8, 0.1, 10), (0.1, 0.0, 0)]),
            (&[(40, 0), (0, 40)], &[(0.1, 0.8, 80), (0.1, 0.0, 0)]),
            // Capacities of 0.297 and 0.102: round robin until the second is full.
            (&[(40, 0), (0, 29), (0, 11)], &[(0.5, 0.5, 50), (0.305, 0.0, 0), (0.5, 0.0, 0)]),
            (&[(5, 0), (0, 3), (0, 2)], &[(0.5, 0.05, 5), (0.3, 0.0, 0), (0.3, 0.0, 0)]),
            // Two senders, round robin.
            (&[(3, 0), (3, 0), (0, 6)], &[(0.77, 0.03, 3), (0.77, 0.03, 3), (0.2, 0.0, 0)]),
        ];
        for (want, cores) in table {
            let cores: Vec<CoreLoad> = cores.iter().map(|&(f, m, events)| core(f, m, events)).collect();
            assert_eq!(sent_and_received(&plan(&cores)), *want, "{cores:?}");
        }
    }

    #[test]
    fn random_cores_are_better_balanced_afterwards() {
        let random = &mut Prng::new(3);
        for _ in 0..3000 {
            let cores = random_cores(random);
            assert_valid_plan(&plan(&cores), &cores);
        }
    }

    #[test]
    fn batched_steps_match_single_steps() {
        let random = &mut Prng::new(5);
        for _ in 0..300 {
            let cores = random_cores(random);
            let plans = [u64::MAX, 1000].map(|steps| plan_in_steps(&cores, steps));
            let [one_by_one, together] = plans.map(|plan| loads_after(&plan, &cores));
            let event = cores.iter().map(|core| core.event_load()).fold(0.0, f64::max);
            for (one, many) in one_by_one.into_iter().zip(together) {
                assert!((one - many).abs() < 0.02 + 8.0 * event, "{one} {many} {cores:?}");
            }
        }
    }

    /// Loads by core after the plan.
    fn loads_after(plan: &MigrationPlan, cores: &[CoreLoad]) -> Vec<f64> {
        let mut loads: Vec<f64> = cores.iter().map(|core| core.total()).collect();
        for (from, migrations) in plan.cores.iter().enumerate() {
            for quota in &migrations.quotas {
                let load = quota.events as f64 * cores[from].event_load();
                loads[from] -= load;
                loads[quota.to.index()] += load;
            }
        }
        loads
    }

    #[test]
    fn load_is_out_of_balance_below_the_threshold() {
        let config = SchedConfig::default();
        for (balance, imbalanced) in [(0.0, true), (0.74, true), (0.75, false), (1.0, false)] {
            let mut metrics = crate::metrics::compute_metrics(&crate::metrics::IntervalCounters::default());
            metrics.natural_balance = balance;
            assert_eq!(is_imbalanced(&metrics, &config), imbalanced);
        }
    }
}
