//! Migration plans: how many requests each core sends to which others in an interval, and the loads that a plan is
//! computed from.
//!
//! In: the metrics of an interval, and which tenants migrate. Out: [`CoreLoad`]s for [`crate::load_balance`] and
//! [`crate::octofas_inter`]; a [`MigrationPlan`] for [`crate::router::Router`].
//!
//! Invariants of every plan: a core sends or receives, never both; a core sends no more than its events; loads are
//! [natural](mod@crate::metrics), so that a plan in force does not undo itself.

use crate::ids::CoreId;
use crate::metrics::IntervalMetrics;

/// Loads that differ by less are equal: the sum of floats depends on their order.
pub(crate) const LOAD_EPSILON: f64 = 1e-9;
/// Upper bound of a core's events in an interval; larger counters are clamped to it.
const EVENTS_MAX: u64 = 1 << 48;

/// The load of one core as input of a plan, in parts of one core's time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CoreLoad {
    /// Part of its natural load that stays on the core.
    pub fixed: f64,
    /// Part that can migrate.
    pub movable: f64,
    /// The requests behind `movable`: N_high of OctoKV §IV-E.
    pub events: u64,
}

impl CoreLoad {
    /// Its whole load.
    pub fn total(self) -> f64 {
        self.fixed + self.movable
    }

    /// The load of one request, 0 if none can migrate.
    pub fn event_load(self) -> f64 {
        if self.events == 0 { 0.0 } else { self.movable / self.events as f64 }
    }
}

/// Computes the core loads if only requests of the tenants with `moves` migrate; its argument is the index of a tenant
/// in [`IntervalMetrics::tenants`]. If all tenants migrate, requests without a tenant migrate as well.
///
/// The load of a tenant's requests on a core is proportional to their number: costs are not counted by tenant and core.
pub fn core_loads(metrics: &IntervalMetrics, moves: impl Fn(usize) -> bool) -> Vec<CoreLoad> {
    let all = (0..metrics.tenants.len()).all(&moves);
    let candidate = |(at, core): (usize, &crate::metrics::CoreIntervalMetrics)| {
        let requests_of = |index: &usize| metrics.tenants[*index].requests_by_core[at];
        let movable =
            (0..metrics.tenants.len()).filter(|index| moves(*index)).map(|index| requests_of(&index));
        let moving = movable.fold(0, u64::saturating_add).min(core.own_requests);
        let events = if all { core.own_requests } else { moving };
        let part = if core.own_requests == 0 { 0.0 } else { events as f64 / core.own_requests as f64 };
        let movable = core.natural.movable * part;
        CoreLoad { fixed: core.natural.total() - movable, movable, events: events.min(EVENTS_MAX) }
    };
    metrics.cores.iter().enumerate().map(candidate).collect()
}

/// U_avg; 0 without cores.
pub fn average_load(cores: &[CoreLoad]) -> f64 {
    let sum: f64 = cores.iter().map(|core| core.total()).sum();
    if cores.is_empty() { 0.0 } else { sum / cores.len() as f64 }
}

/// The order in which a core sends to its receivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpreadOrder {
    /// Round robin over the receivers with budget left.
    #[default]
    RoundRobin,
    /// In proportion to the budgets, evenly mixed.
    Proportional,
}

/// A number of events for one receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationQuota {
    /// The receiver.
    pub to: CoreId,
    /// The most events that one interval migrates to it.
    pub events: u64,
}

/// One core's part of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreMigrations {
    /// Requests of tenants that migrate, expected per interval.
    pub events_expected: u64,
    /// Quotas of the receivers in core order, none with 0 events. Their sum is at most `events_expected`.
    pub quotas: Vec<MigrationQuota>,
    /// Order of the receivers.
    pub order: SpreadOrder,
}

impl CoreMigrations {
    /// Events that leave the core per interval.
    pub fn leaving(&self) -> u64 {
        self.quotas.iter().map(|quota| quota.events).fold(0, u64::saturating_add)
    }
}

/// The migrations of all cores until the next decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationPlan {
    /// Parts by core. A core without quotas keeps all requests.
    pub cores: Vec<CoreMigrations>,
}

impl MigrationPlan {
    /// A plan without migration for this many cores.
    pub fn empty(cores: usize) -> MigrationPlan {
        MigrationPlan { cores: vec![CoreMigrations::default(); cores] }
    }

    /// Whether nothing migrates.
    pub fn is_empty(&self) -> bool {
        self.cores.iter().all(|core| core.quotas.is_empty())
    }

    /// Events that a core receives per interval.
    pub fn arriving(&self, core: CoreId) -> u64 {
        let quotas = self.cores.iter().flat_map(|plan| &plan.quotas);
        quotas.filter(|quota| quota.to == core).map(|share| share.events).fold(0, u64::saturating_add)
    }

    /// Builds a plan from events by sender and receiver, `cells[from][to]`.
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

    /// One to eight random cores; some idle, some without movable load, some alike.
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

    /// Asserts the invariants of every plan.
    pub(crate) fn assert_valid_plan(plan: &MigrationPlan, cores: &[CoreLoad]) {
        let average = average_load(cores);
        assert_eq!(plan.cores.len(), cores.len());
        let left: u64 = plan.cores.iter().map(CoreMigrations::leaving).sum();
        let arrived: u64 = (0..cores.len()).map(|core| plan.arriving(CoreId::from_index(core))).sum();
        assert_eq!(left, arrived, "requests sent equal requests received");
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
        let tenant = |id: u32, by_core: [u64; 2]| TenantCounters {
            tenant: TenantId(id),
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
            ([true, true], some(0.2, 100)), // Requests without a tenant as well.
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
