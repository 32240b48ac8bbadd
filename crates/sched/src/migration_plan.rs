//! What a core is told about requests that are to run elsewhere, and what such a plan is made from.
//!
//! In: the figures of a window, and which flows move. Out: [`CoreLoad`]s for whoever plans ([`crate::balance`],
//! [`crate::inter`]); a [`MigrationPlan`] for [`crate::route::Router`].
//!
//! Invariants of a plan, whoever made it: a core sends or receives, never both; what a core may send is no more than its
//! events; loads are [natural](mod@crate::measure), so that a plan in force does not undo itself.

use crate::ids::CoreId;
use crate::metrics::IntervalMetrics;

/// Loads that differ by less are the same: sums of floats come out differently by their order.
pub(crate) const LOAD_EPSILON: f64 = 1e-9;
/// More events than any core sees in a window; counters above it are taken for it.
const EVENTS_MAX: u64 = 1 << 48;

/// One core, as a plan sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CoreLoad {
    /// The part of its natural load that stays where it is.
    pub fixed: f64,
    /// The part that may be moved.
    pub movable: f64,
    /// The requests that `movable` is made of: N_high of OctoKV §IV-E.
    pub events: u64,
}

impl CoreLoad {
    /// Its whole load.
    pub fn total(self) -> f64 {
        self.fixed + self.movable
    }

    /// The load that one request is, 0 where none is to be moved.
    pub fn event_load(self) -> f64 {
        if self.events == 0 { 0.0 } else { self.movable / self.events as f64 }
    }
}

/// The cores, where only requests of flows that `moves` says of may be moved; it is given the place of a flow in
/// [`IntervalMetrics::flows`]. Where all of them do, requests that belong to no flow move as well.
///
/// What a flow's requests weigh on a core is in proportion to their number: costs are not counted by flow and core.
pub fn core_loads(metrics: &IntervalMetrics, moves: impl Fn(usize) -> bool) -> Vec<CoreLoad> {
    let all = (0..metrics.tenants.len()).all(&moves);
    let candidate = |(at, core): (usize, &crate::metrics::CoreIntervalMetrics)| {
        let of_flow = |index: &usize| metrics.tenants[*index].requests_by_core[at];
        let of_flows = (0..metrics.tenants.len()).filter(|index| moves(*index)).map(|index| of_flow(&index));
        let moving = of_flows.fold(0, u64::saturating_add).min(core.own_requests);
        let events = if all { core.own_requests } else { moving };
        let part = if core.own_requests == 0 { 0.0 } else { events as f64 / core.own_requests as f64 };
        let movable = core.natural.movable * part;
        CoreLoad { fixed: core.natural.total() - movable, movable, events: events.min(EVENTS_MAX) }
    };
    metrics.cores.iter().enumerate().map(candidate).collect()
}

/// U_avg; 0 of no core.
pub fn average_load(cores: &[CoreLoad]) -> f64 {
    let sum: f64 = cores.iter().map(|core| core.total()).sum();
    if cores.is_empty() { 0.0 } else { sum / cores.len() as f64 }
}

/// In which order a core sends to those that take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpreadOrder {
    /// One to each in turn, as long as it takes any.
    #[default]
    RoundRobin,
    /// To each in proportion to what it takes, evenly mixed.
    Proportional,
}

/// So many events for one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationQuota {
    /// Who runs them.
    pub to: CoreId,
    /// At most so many within a window.
    pub events: u64,
}

/// What one core does with its own requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreMigrations {
    /// How many of them it is expected to have within a window, of those that may be moved.
    pub events_expected: u64,
    /// Where to, in the order of cores; none of them has 0 events. Their sum is at most `of_events`.
    pub quotas: Vec<MigrationQuota>,
    /// In which order.
    pub order: SpreadOrder,
}

impl CoreMigrations {
    /// How many leave within a window.
    pub fn leaving(&self) -> u64 {
        self.quotas.iter().map(|quota| quota.events).fold(0, u64::saturating_add)
    }
}

/// What every core does until the next window's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationPlan {
    /// By core. A core without shares keeps everything.
    pub cores: Vec<CoreMigrations>,
}

impl MigrationPlan {
    /// Nothing moves among so many cores.
    pub fn empty(cores: usize) -> MigrationPlan {
        MigrationPlan { cores: vec![CoreMigrations::default(); cores] }
    }

    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.cores.iter().all(|core| core.quotas.is_empty())
    }

    /// How many events come to a core within a window.
    pub fn arriving(&self, core: CoreId) -> u64 {
        let quotas = self.cores.iter().flat_map(|plan| &plan.quotas);
        quotas.filter(|quota| quota.to == core).map(|share| share.events).fold(0, u64::saturating_add)
    }

    /// From events by sender and receiver; `cells[from][to]`.
    pub(crate) fn from_matrix(cells: &[Vec<u64>], cores: &[CoreLoad], order: SpreadOrder) -> MigrationPlan {
        let core = |(row, candidate): (&Vec<u64>, &CoreLoad)| {
            let quota =
                |(to, events): (usize, &u64)| MigrationQuota { to: CoreId::from_index(to), events: *events };
            let quotas: Vec<MigrationQuota> =
                row.iter().enumerate().filter(|(_, events)| **events > 0).map(quota).collect();
            let events_expected = if quotas.is_empty() { 0 } else { candidate.events };
            CoreMigrations { events_expected, quotas, order }
        };
        MigrationPlan { cores: cells.iter().zip(cores).map(core).collect() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::metrics::{CoreCounters, IntervalCounters, StageTimes, TenantCounters, compute_metrics};
    use crate::{Nanos, TenantId};
    use octokv_base::Prng;

    /// Anything from one core to eight; some idle, some with nothing to move, some alike.
    pub(crate) fn random_cores(random: &mut Prng) -> Vec<CoreLoad> {
        let count = random.below(8) as usize + 1;
        let alike = random.one_in(4);
        let mut cores: Vec<CoreLoad> = Vec::new();
        for _ in 0..count {
            let part = |random: &mut Prng, most: f64| random.below(1000) as f64 / 1000.0 * most;
            let movable = if random.one_in(5) { 0.0 } else { part(random, 0.5) };
            let events = if random.one_in(4) { random.below(20) } else { random.below(100_000) };
            let fixed = if random.one_in(5) { 0.0 } else { part(random, 0.7) };
            let fresh = CoreLoad { fixed, movable: if events == 0 { 0.0 } else { movable }, events };
            cores.push(if alike { *cores.first().unwrap_or(&fresh) } else { fresh });
        }
        cores
    }

    /// What holds of every plan for these cores.
    pub(crate) fn assert_valid_plan(plan: &MigrationPlan, cores: &[CoreLoad]) {
        let average = average_load(cores);
        assert_eq!(plan.cores.len(), cores.len());
        let left: u64 = plan.cores.iter().map(CoreMigrations::leaving).sum();
        let arrived: u64 = (0..cores.len()).map(|core| plan.arriving(CoreId::from_index(core))).sum();
        assert_eq!(left, arrived, "what leaves arrives");
        for (at, (core, migrations)) in cores.iter().zip(&plan.cores).enumerate() {
            let (leaving, arriving) = (migrations.leaving(), plan.arriving(CoreId::from_index(at)));
            assert!(leaving <= core.events && leaving <= migrations.events_expected);
            assert!(migrations.quotas.iter().all(|quota| quota.events > 0 && quota.to.index() != at));
            assert!(leaving == 0 || core.total() > average, "a low core sends nothing: {at} of {cores:?}");
            assert!(
                arriving == 0 || core.total() < average,
                "a high core receives nothing: {at} of {cores:?}"
            );
            let events = |from: usize| plan.cores[from].quotas.iter().filter(|quota| quota.to.index() == at);
            let work = |from: usize| -> f64 {
                events(from).map(|quota| quota.events as f64 * cores[from].event_load()).sum()
            };
            let arriving_work: f64 = (0..cores.len()).map(work).sum();
            let largest =
                (0..cores.len()).filter(|from| work(*from) > 0.0).map(|from| cores[from].event_load());
            let largest = largest.fold(0.0, f64::max);
            if arriving > 0 {
                assert!(
                    core.total() + arriving_work <= average + largest + 1e-6,
                    "{at} has too much: {cores:?}"
                );
            }
            let leaving_work = leaving as f64 * core.event_load();
            if leaving > 0 {
                let least = average - core.event_load() - 1e-6;
                assert!(core.total() - leaving_work >= least, "{at} has too little: {cores:?}");
            }
        }
    }

    #[test]
    fn only_requests_of_migrating_tenants_are_movable() {
        let tenant = |flow: u32, by_core: [u64; 2]| TenantCounters {
            tenant: TenantId(flow),
            requests_by_core: by_core.to_vec(),
            bytes: 0,
            latency: Nanos::ZERO,
            waited: Nanos::ZERO,
            round_trip: Nanos::ZERO,
            waiting: 0,
        };
        let core = |target_ms: u64, kv_ms: u64, own_here: u64| CoreCounters {
            busy: StageTimes {
                target: Nanos::from_millis(target_ms),
                kv: Nanos::from_millis(kv_ms),
                device: Nanos::ZERO,
            },
            executed_locally: own_here,
            ..CoreCounters::default()
        };
        let metrics = compute_metrics(&IntervalCounters {
            interval: Nanos::from_secs(1),
            cores: vec![core(500, 200, 100), core(100, 50, 0)],
            tenants: vec![tenant(1, [75, 0]), tenant(2, [20, 0])],
        });
        let some = |movable: f64, events| (movable, events);
        for (moves, want) in [
            ([true, true], some(0.2, 100)), // Those of no flow as well.
            ([true, false], some(0.15, 75)),
            ([false, true], some(0.04, 20)),
            ([false, false], some(0.0, 0)),
        ] {
            let got = core_loads(&metrics, |tenant| moves[tenant]);
            assert_eq!(got[0].events, want.1);
            assert!((got[0].movable - want.0).abs() < 1e-9 && (got[0].total() - 0.7).abs() < 1e-9, "{got:?}");
            assert_eq!((got[1].movable, got[1].events), (0.0, 0), "the second core's work is its own");
        }
    }
}
