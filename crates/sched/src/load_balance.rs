//! OctoKV load balancing: how many requests of each overloaded core execute on other cores in an interval, and on which
//! (OctoKV §IV-D and §IV-E).
//!
//! ```text
//!   U                       high cores: U > U_avg          low cores: U < U_avg
//!   │ ▓▓ ┐ excess
//!   │ ▓▓ ┘         ▓▓       migrated from a core: the lesser of its movable load U × (R_KV + R_D)
//!   ├─▓▓───────────▓▓──── U_avg                                  and its excess U − U_avg
//!   │ ▓▓  ▒▒ free  ▓▓  ▒▒
//!   │ ▓▓  ▓▓       ▓▓  ▓▓   migrated to a core: a part of that, at most its free capacity U_avg − U
//! ```
//! In: a [`CoreLoad`] for each core. Out: a [`MigrationPlan`], empty if migration gains nothing.
//!
//! The paper gives the number for one high core and one low core: all N_high events if U_low + U_high × (R_KV + R_D)
//! is below U_avg, else N_high × (U_avg − U_low) ÷ (U_high × (R_KV + R_D)). It says that this can be extended to more
//! cores. Here each high core sends by the formula with "U_avg − U_low" read as its own excess: for a pair these are
//! the same number, as U_avg is the middle, and for any number of cores the sum of the excesses is the sum of the free
//! capacities, so nothing has to be cut. The alternative, one ratio for all high cores (all free capacity ÷ all
//! movable load), would take a slightly high core with much movable load far below the average, to compensate for a
//! core that can send little; the highest core would gain nothing.
//!
//! Round robin assigns equal parts, but never more than a core's free capacity; the remainder goes to the others. (The
//! paper's round robin assigns equal parts even to a core that is nearly full.)
//!
//! Invariants: those of a [`MigrationPlan`]; a low core exceeds U_avg by less than one event's load, a high core falls
//! below it by less than one. Tests: tables here, random cores checked against the invariants, the paper's Tables IV
//! and V.

use crate::config::SchedConfig;
use crate::metrics::IntervalMetrics;
use crate::migration_plan::{CoreLoad, LOAD_EPSILON, MigrationPlan, SpreadOrder, average_load};

/// Whether a core's load is above T_OL (OctoKV §IV-D, the first condition).
pub fn is_overloaded(metrics: &IntervalMetrics, config: &SchedConfig) -> bool {
    metrics.natural_load_max > config.overload
}

/// Whether loads differ by more than T_LB (OctoKV §IV-D, the second condition).
pub fn is_imbalanced(metrics: &IntervalMetrics, config: &SchedConfig) -> bool {
    metrics.natural_difference > config.imbalance_difference
}

/// R: the part of a core's events to send, from their load `movable` and the load `excess` to remove.
fn leaving_ratio(movable: f64, excess: f64) -> f64 {
    if movable < excess { 1.0 } else { (excess / movable).clamp(0.0, 1.0) }
}

/// Computes the plan without checking the thresholds.
pub fn plan(cores: &[CoreLoad], order: SpreadOrder) -> MigrationPlan {
    let average = average_load(cores);
    let mut capacities: Vec<f64> = cores.iter().map(|core| average - core.total()).collect();
    capacities.iter_mut().filter(|capacity| **capacity < LOAD_EPSILON).for_each(|capacity| *capacity = 0.0);
    let weights: Vec<f64> = match order {
        SpreadOrder::RoundRobin => {
            capacities.iter().map(|capacity| if *capacity > 0.0 { 1.0 } else { 0.0 }).collect()
        }
        SpreadOrder::Proportional => capacities.clone(),
    };
    let mut cells = vec![vec![0; cores.len()]; cores.len()];
    for (core, row) in cores.iter().zip(&mut cells) {
        let (excess, event_load) = (core.total() - average, core.event_load());
        if excess < LOAD_EPSILON || event_load <= 0.0 {
            continue;
        }
        let leaving = whole_events(core.events as f64 * leaving_ratio(core.movable, excess)).min(core.events);
        let parts = divide_within_capacity(leaving as f64 * event_load, &weights, &capacities);
        let mut left = leaving;
        for ((events, capacity), part) in row.iter_mut().zip(&mut capacities).zip(parts) {
            *events = whole_events(part / event_load).min(left);
            left -= *events;
            *capacity -= *events as f64 * event_load;
        }
        // Fractions of events that are left over go to the core with the most free capacity; a fraction of an event
        // suffices.
        while left > 0 {
            let receiver = (0..capacities.len()).max_by(|a, b| capacities[*a].total_cmp(&capacities[*b]));
            let Some(to) = receiver.filter(|to| capacities[*to] > LOAD_EPSILON) else { break };
            row[to] += 1;
            left -= 1;
            capacities[to] -= event_load;
        }
    }
    MigrationPlan::from_matrix(&cells, cores, order)
}

/// The whole events in a number; a number that is an integer but for rounding counts as that integer.
fn whole_events(events: f64) -> u64 {
    (events + 1e-6) as u64
}

/// Divides a load by weights among receivers of limited capacity; the excess of one goes to the others.
fn divide_within_capacity(mut load: f64, weights: &[f64], capacities: &[f64]) -> Vec<f64> {
    let mut parts = vec![0.0; weights.len()];
    let mut open: Vec<usize> =
        (0..weights.len()).filter(|&at| weights[at] > 0.0 && capacities[at] > 0.0).collect();
    loop {
        let unit = load / open.iter().map(|&at| weights[at]).sum::<f64>();
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&at| weights[at] * unit >= capacities[at]);
        if full.is_empty() {
            rest.into_iter().for_each(|at| parts[at] = weights[at] * unit);
            return parts;
        }
        for at in full {
            parts[at] = capacities[at];
            load = (load - capacities[at]).max(0.0);
        }
        open = rest;
    }
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
    fn one_high_and_one_low_core_have_the_papers_formula() {
        let random = &mut Prng::new(4);
        for _ in 0..5000 {
            let [high, low, movable] = [(); 3].map(|()| random.below(1001) as f64 / 1000.0);
            let events = random.below(1000) + 1;
            let cores = [core(high * (1.0 - movable), high * movable, events), core(low, 0.0, 0)];
            if high <= low + 1e-6 || movable == 0.0 {
                continue;
            }
            let threshold = (high + low) / 2.0;
            let want = if low + high * movable < threshold {
                events as f64
            } else {
                events as f64 * ((threshold - low) / (high * movable)).clamp(0.0, 1.0)
            };
            for order in [SpreadOrder::RoundRobin, SpreadOrder::Proportional] {
                let got = plan(&cores, order).cores[0].leaving();
                assert_eq!(got, (want + 1e-6) as u64, "{high} {low} {movable} {events}");
            }
        }
    }

    #[test]
    fn events_move_from_high_cores_to_low_ones() {
        type BalanceRow = (&'static [(u64, u64)], &'static [(u64, u64)], &'static [(f64, f64, u64)]);
        // By core, events sent and received, with round robin and with proportional shares.
        let table: &[BalanceRow] = &[
            (&[], &[], &[]),
            (&[(0, 0)], &[(0, 0)], &[(0.5, 0.5, 100)]),
            (
                &[(0, 0), (0, 0), (0, 0)],
                &[(0, 0), (0, 0), (0, 0)],
                &[(0.1, 0.2, 9), (0.1, 0.2, 9), (0.2, 0.1, 9)],
            ),
            (&[(0, 0), (0, 0)], &[(0, 0), (0, 0)], &[(1.0, 0.0, 100), (0.0, 0.0, 0)]),
            // The capacities of 0.3 and 0.1 are filled.
            (
                &[(80, 0), (0, 60), (0, 20)],
                &[(80, 0), (0, 60), (0, 20)],
                &[(0.5, 0.5, 100), (0.3, 0.0, 0), (0.5, 0.0, 0)],
            ),
            // All 20 events of 0.01: equal parts, or in the ratio of the capacities 0.3 and 0.1.
            (
                &[(20, 0), (0, 10), (0, 10)],
                &[(20, 0), (0, 15), (0, 5)],
                &[(0.8, 0.2, 20), (0.3, 0.0, 0), (0.5, 0.0, 0)],
            ),
            // Equal parts of 30 events would exceed the capacity of the second.
            (
                &[(30, 0), (0, 20), (0, 10)],
                &[(30, 0), (0, 23), (0, 7)],
                &[(0.7, 0.3, 30), (0.3, 0.0, 0), (0.5, 0.0, 0)],
            ),
            // A core that is slightly high sends little, whatever the other cannot send.
            (
                &[(10, 0), (5, 0), (0, 15)],
                &[(10, 0), (5, 0), (0, 15)],
                &[(0.8, 0.1, 10), (0.05, 0.5, 50), (0.05, 0.0, 0)],
            ),
        ];
        for (round_robin, proportional, cores) in table {
            let cores: Vec<CoreLoad> = cores.iter().map(|&(f, m, events)| core(f, m, events)).collect();
            assert_eq!(sent_and_received(&plan(&cores, SpreadOrder::RoundRobin)), *round_robin, "{cores:?}");
            assert_eq!(
                sent_and_received(&plan(&cores, SpreadOrder::Proportional)),
                *proportional,
                "{cores:?}"
            );
        }
    }

    #[test]
    fn random_cores_are_better_balanced_afterwards() {
        let random = &mut Prng::new(2);
        for _ in 0..5000 {
            let cores = random_cores(random);
            for order in [SpreadOrder::RoundRobin, SpreadOrder::Proportional] {
                let plan = plan(&cores, order);
                assert_valid_plan(&plan, &cores);
                // All events of the formula leave, except those that fit nowhere by a fraction of an event.
                for (core, migrations) in cores.iter().zip(&plan.cores) {
                    let excess = core.total() - average_load(&cores);
                    let events_max = core.events as f64 * leaving_ratio(core.movable, excess);
                    if core.movable > 0.0 && excess > LOAD_EPSILON {
                        assert!(
                            migrations.leaving() as f64 > events_max - 1.001 - cores.len() as f64,
                            "{cores:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn tables_iv_and_v_of_the_paper_are_reproduced() {
        // Events of each core before balancing, with 80 % of the time in the stage that stays, as in the paper.
        let before = [26511, 30412, 10441, 11844, 11035, 9757];
        let load = |events: u64| events as f64 / 40_000.0;
        let cores = before.map(|events| core(load(events) * 0.8, load(events) * 0.2, events));
        for (order, within) in [(SpreadOrder::RoundRobin, 0.06), (SpreadOrder::Proportional, 0.09)] {
            let plan = plan(&cores, order);
            assert_eq!((plan.cores[0].leaving(), plan.cores[1].leaving()), (26511, 30412));
            let after = [25024.0, 25323.0, 25231.0, 24422.0];
            for (at, paper) in (2..6).zip(after) {
                let ours = before[at] + plan.arriving(CoreId::from_index(at));
                assert!((ours as f64 / paper - 1.0).abs() < within, "core {at}: {ours}, the paper {paper}");
            }
        }
    }

    #[test]
    fn both_conditions_hold_only_above_their_thresholds() {
        let config = SchedConfig::default();
        for (busiest, difference, overloaded, imbalanced) in [
            (0.4, 0.1, false, false),
            (0.41, 0.11, true, true),
            (0.9, 0.0, true, false),
            (0.0, 0.3, false, true),
        ] {
            let mut metrics = crate::metrics::compute_metrics(&crate::metrics::IntervalCounters::default());
            (metrics.natural_load_max, metrics.natural_difference) = (busiest, difference);
            assert_eq!(is_overloaded(&metrics, &config), overloaded);
            assert_eq!(is_imbalanced(&metrics, &config), imbalanced);
        }
    }
}
