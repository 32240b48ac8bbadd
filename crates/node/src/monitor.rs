//! The monitor of a node: measures all cores each sampling interval and chooses the policy action.
//!
//! ```text
//!   every interval, the least busy core:   snapshots ─▶ counters ─▶ sched::compute_metrics ─▶ sched::choose ─▶ IntervalReport
//!   every core, in its next iteration:     new report? ─▶ applies its part (crate::request_scheduler), samples round trips
//! ```
//! In: the counters of all cores, the operator's settings. Out: the last [`IntervalReport`] and its number. A core
//! pays two loads per iteration for it; the measuring core changes with the load (OctoKV §IV-D). The end of an
//! interval wakes only the core that measures next.
//!
//! Invariants: one core measures at a time; counters of an interval are differences of snapshots at its start and
//! end, so that their sums over intervals are exact; settings are validated before they are stored.

use crate::core_metrics::{CoreMetricsSnapshot, SharedCoreMetrics, TenantMetricsSnapshot};
use crate::tenants::{TENANTS_MAX, TenantTable};
use octokv_base::Nanos;
use octokv_sched::cross_core_weights::{CoreUsage, TenantUsage, core_weights};
use octokv_sched::metrics::{CoreCounters, StageTimes, TenantCounters};
use octokv_sched::{
    Decision, IntervalCounters, IntervalMetrics, PolicyAction, SchedConfig, SettingError, TenantId, choose,
    compute_metrics,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Measurements of one sampling interval and the decision made from them.
#[derive(Clone, Debug)]
pub struct IntervalReport {
    /// Interval number, from 1.
    pub number: u64,
    /// When the interval ended.
    pub ended_at: Nanos,
    /// Its measured length.
    pub length: Nanos,
    /// The decision that holds until the next interval ends.
    pub decision: Decision,
    /// The metrics that led to it.
    pub metrics: IntervalMetrics,
    /// The counters behind the metrics.
    pub counters: IntervalCounters,
    /// Tenants and their hosts' names, by number.
    pub hosts: Vec<(TenantId, String)>,
    /// Under `fair` on several cores: by tenant and core, the weights that bring its service over all cores near its
    /// configured weight.
    pub weights: Vec<(TenantId, Vec<u32>)>,
    /// The settings in effect.
    pub config: SchedConfig,
    /// The core that measured.
    pub measured_by_core: usize,
    /// Time the measuring core spent on it; zero under a simulated clock.
    pub measure_duration: Nanos,
}

struct MonitorState {
    config: SchedConfig,
    /// Start of the interval and the snapshots taken then; `None` before the first.
    interval_start: Option<(Nanos, Vec<CoreMetricsSnapshot>)>,
    last_interval: Option<Arc<IntervalReport>>,
}

/// The monitor, shared by all cores.
pub struct Monitor {
    core_metrics: Arc<[SharedCoreMetrics]>,
    tenants: TenantTable,
    state: Mutex<MonitorState>,
    /// Intervals ended so far.
    interval_count: AtomicU64,
    /// When the current interval ends, in nanoseconds, and which core ends it.
    interval_end_ns: AtomicU64,
    measuring_core: AtomicUsize,
    clock: ClockFn,
}

/// The monitoring work of a core in this iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MonitorDuty {
    /// Nothing.
    Nothing,
    /// An iteration at this time, to end the interval.
    EndIntervalAt(Nanos),
    /// It has ended an interval, and this core ends the next one: wake it to learn the deadline.
    WakeNext(usize),
}

/// Clock to time the measurement itself.
pub type ClockFn = fn() -> Nanos;

impl Monitor {
    /// A monitor of `cores` cores.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn new(cores: usize, config: SchedConfig, clock: ClockFn) -> Result<Monitor, SettingError> {
        config.check()?;
        Ok(Monitor {
            core_metrics: (0..cores).map(|_| SharedCoreMetrics::new(cores, TENANTS_MAX)).collect(),
            tenants: TenantTable::default(),
            state: Mutex::new(MonitorState { config, interval_start: None, last_interval: None }),
            interval_count: AtomicU64::new(0),
            interval_end_ns: AtomicU64::new(0),
            measuring_core: AtomicUsize::new(0),
            clock,
        })
    }

    /// The counters of each core.
    pub fn core_metrics(&self) -> &Arc<[SharedCoreMetrics]> {
        &self.core_metrics
    }

    /// The tenants of the node.
    pub fn tenants(&self) -> &TenantTable {
        &self.tenants
    }

    /// Intervals ended so far; a core compares it with the number it saw last.
    #[inline]
    pub fn interval_count(&self) -> u64 {
        self.interval_count.load(Ordering::Acquire)
    }

    /// The report of the last interval.
    pub fn last_interval(&self) -> Option<Arc<IntervalReport>> {
        self.state.lock().last_interval.clone()
    }

    /// Since the start: requests that ran on another core than their connection's, and requests that waited in a
    /// queue of the scheduler.
    pub fn offloaded_and_queued(&self) -> (u64, u64) {
        let snapshots = self.core_metrics.iter().map(SharedCoreMetrics::snapshot);
        snapshots.fold((0, 0), |(offloaded, queued), snapshot| {
            let queued_here: u64 = snapshot.tenants.iter().map(|tenant| tenant.queued).sum();
            (offloaded + snapshot.offloaded_to.iter().sum::<u64>(), queued + queued_here)
        })
    }

    /// The scheduling settings.
    pub fn config(&self) -> SchedConfig {
        self.state.lock().config.clone()
    }

    /// Replaces the settings from the end of the current interval on. The caller wakes the cores: the measuring one
    /// may sleep until the old end.
    ///
    /// # Errors
    /// A setting is out of its range; then nothing has changed.
    pub fn set_config(&self, config: SchedConfig) -> Result<(), SettingError> {
        config.check()?;
        let mut state = self.state.lock();
        // A shorter interval takes effect before the longer one would end.
        if let Some((start, _)) = state.interval_start {
            let ends = (start + config.interval).0;
            self.interval_end_ns
                .store(ends.min(self.interval_end_ns.load(Ordering::Relaxed)), Ordering::Release);
        }
        state.config = config;
        Ok(())
    }

    /// Ends the interval if it is due and `core` is the measuring core. Every core calls it in every iteration.
    #[inline]
    pub fn poll(&self, core: usize, now: Nanos) -> MonitorDuty {
        if self.measuring_core.load(Ordering::Acquire) != core {
            return MonitorDuty::Nothing;
        }
        let end = Nanos(self.interval_end_ns.load(Ordering::Acquire));
        if now < end { MonitorDuty::EndIntervalAt(end) } else { self.end_interval(core, now) }
    }

    #[cold]
    fn end_interval(&self, core: usize, now: Nanos) -> MonitorDuty {
        let mut state = self.state.lock();
        // Another core may have ended it since.
        let end = Nanos(self.interval_end_ns.load(Ordering::Acquire));
        if now < end {
            return MonitorDuty::EndIntervalAt(end);
        }
        let started_at = (self.clock)();
        let snapshots: Vec<CoreMetricsSnapshot> =
            self.core_metrics.iter().map(SharedCoreMetrics::snapshot).collect();
        let length = state.config.interval;
        if let Some((start, before)) = state.interval_start.take() {
            let hosts = self.tenants.names();
            let counters = interval_counters(now.since(start), &before, &snapshots);
            let metrics = compute_metrics(&counters);
            let decision = choose(&metrics, &state.config);
            let number = self.interval_count.load(Ordering::Relaxed) + 1;
            let next = metrics.least_busy_core().index();
            let last = state.last_interval.as_deref();
            let weights = match decision.action {
                PolicyAction::Fair if snapshots.len() > 1 => {
                    let active = counters.tenants.iter().map(|tenant| tenant.tenant);
                    next_core_weights(active, (&before, &snapshots), last, &hosts, &state.config)
                }
                _ => Vec::new(),
            };
            let report = IntervalReport {
                number,
                ended_at: now,
                length: now.since(start),
                decision,
                metrics,
                counters,
                hosts,
                weights,
                config: state.config.clone(),
                measured_by_core: core,
                measure_duration: (self.clock)().since(started_at),
            };
            state.last_interval = Some(Arc::new(report));
            self.interval_count.store(number, Ordering::Release);
            self.interval_end_ns.store((now + length).0, Ordering::Release);
            self.measuring_core.store(next, Ordering::Release);
        } else {
            self.interval_end_ns.store((now + length).0, Ordering::Release);
        }
        state.interval_start = Some((now, snapshots));
        match self.measuring_core.load(Ordering::Relaxed) {
            next if next == core => MonitorDuty::EndIntervalAt(now + length),
            next => MonitorDuty::WakeNext(next),
        }
    }
}

/// Weights of tenants on each core for the next interval, from the service and the weights of the last one.
fn next_core_weights(
    tenants: impl Iterator<Item = TenantId>,
    (before, now): (&[CoreMetricsSnapshot], &[CoreMetricsSnapshot]),
    last_interval: Option<&IntervalReport>,
    hosts: &[(TenantId, String)],
    config: &SchedConfig,
) -> Vec<(TenantId, Vec<u32>)> {
    let tenants: Vec<TenantId> = tenants.collect();
    let service_of = |tenant: &TenantId| {
        let host = hosts.iter().find(|(of, _)| of == tenant).map_or("", |(_, host)| host);
        let weight = config.qos_of(host).weight;
        // Only if the number still belongs to the same host; a changed setting takes effect at once.
        let previous =
            last_interval.filter(|last| last.hosts.iter().any(|(of, name)| of == tenant && name == host));
        let weighed = previous.and_then(|last| {
            let (_, weights) = last.weights.iter().find(|(of, _)| of == tenant)?;
            Some((weights, u64::from(last.config.qos_of(host).weight.max(1))))
        });
        let weight_on = |core: usize| {
            let (weights, set) = weighed?;
            let scaled = u64::from(*weights.get(core)?) * u64::from(weight) / set;
            Some(u32::try_from(scaled).unwrap_or(u32::MAX).max(1))
        };
        let core = |(at, (before, now)): (usize, (&CoreMetricsSnapshot, &CoreMetricsSnapshot))| {
            let (before, now) = (before.tenants[tenant.0 as usize], now.tenants[tenant.0 as usize]);
            CoreUsage {
                served_ns: now.charged.since(before.charged).0,
                was_backlogged: now.backlogged.saturating_sub(before.backlogged) * 2
                    > now.started.saturating_sub(before.started),
                weight: weight_on(at).unwrap_or(0),
            }
        };
        let cores = before.iter().zip(now).enumerate().map(core).collect();
        TenantUsage { weight, cores }
    };
    let services: Vec<TenantUsage> = tenants.iter().map(service_of).collect();
    tenants.into_iter().zip(core_weights(&services)).collect()
}

/// Counters of an interval: differences of two snapshots of every core.
fn interval_counters(
    interval: Nanos,
    before: &[CoreMetricsSnapshot],
    now: &[CoreMetricsSnapshot],
) -> IntervalCounters {
    let differences = |now: &[u64], before: &[u64]| -> Vec<u64> {
        now.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).collect()
    };
    let core = |(now, before): (&CoreMetricsSnapshot, &CoreMetricsSnapshot)| CoreCounters {
        busy: StageTimes {
            target: now.stage_times.target.since(before.stage_times.target),
            kv: now.stage_times.kv.since(before.stage_times.kv),
            device: now.stage_times.device.since(before.stage_times.device),
        },
        queue_depth: mean_queue_depth(interval, now, before),
        executed_locally: now.executed_locally.saturating_sub(before.executed_locally),
        offloaded_to: differences(&now.offloaded_to, &before.offloaded_to),
        executed_for: differences(&now.executed_for, &before.executed_for),
    };
    let tenant_counters = |number: u32| {
        let at = number as usize;
        let per_core = || now.iter().zip(before).map(|(now, before)| (now.tenants[at], before.tenants[at]));
        let sum = |counter: fn(&TenantMetricsSnapshot) -> u64| -> u64 {
            per_core().map(|(now, before)| counter(&now).saturating_sub(counter(&before))).sum()
        };
        let requests_by_core: Vec<u64> =
            per_core().map(|(now, before)| now.completed.saturating_sub(before.completed)).collect();
        let waiting = per_core().map(|(now, _)| now.started.saturating_sub(now.completed)).sum();
        // Mean over the cores with a measured round trip, weighted by completed requests.
        let round_trips = || per_core().filter(|(now, _)| now.round_trip > Nanos::ZERO);
        let weight = |now: &TenantMetricsSnapshot, before: &TenantMetricsSnapshot| {
            now.completed.saturating_sub(before.completed).max(1)
        };
        let weights: u64 = round_trips().map(|(now, before)| weight(&now, &before)).sum();
        let weighted_sum: u128 = round_trips()
            .map(|(now, before)| u128::from(now.round_trip.0) * u128::from(weight(&now, &before)))
            .sum();
        TenantCounters {
            tenant: TenantId(number),
            requests_by_core,
            bytes: sum(|snapshot| snapshot.bytes),
            latency: Nanos(sum(|snapshot| snapshot.latency_total.0)),
            waited: Nanos(sum(|snapshot| snapshot.wait_total.0)),
            round_trip: Nanos((weighted_sum / u128::from(weights.max(1))) as u64),
            waiting,
        }
    };
    let is_active = |tenant: &TenantCounters| {
        tenant.waiting > 0 || tenant.bytes > 0 || tenant.requests_by_core.iter().any(|&n| n > 0)
    };
    IntervalCounters {
        interval,
        cores: now.iter().zip(before).map(core).collect(),
        tenants: (0..TENANTS_MAX).map(tenant_counters).filter(is_active).collect(),
    }
}

/// Mean number of requests in a core, by Little's law: summed latency of the completed requests over the interval.
fn mean_queue_depth(interval: Nanos, now: &CoreMetricsSnapshot, before: &CoreMetricsSnapshot) -> f64 {
    let tenants = now.tenants.iter().zip(&before.tenants);
    let latency: u64 = tenants.map(|(now, before)| now.latency_total.since(before.latency_total).0).sum();
    latency as f64 / interval.0.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_sched::TenantQos;
    use octokv_sched::fair_queue::WEIGHT_UNIT;

    /// A snapshot of a core that served tenants 1, 2, … for so many milliseconds, each of them always backlogged.
    fn snapshot(served_ms: &[u64]) -> CoreMetricsSnapshot {
        let of = |served: &u64| {
            let served = Nanos::from_millis(*served);
            TenantMetricsSnapshot {
                started: served.0 / 1_000,
                backlogged: served.0 / 1_000,
                charged: served,
                ..TenantMetricsSnapshot::default()
            }
        };
        let mut tenants = vec![TenantMetricsSnapshot::default(); TENANTS_MAX as usize];
        tenants.iter_mut().skip(1).zip(served_ms).for_each(|(tenant, served)| *tenant = of(served));
        CoreMetricsSnapshot { tenants, ..CoreMetricsSnapshot::default() }
    }

    fn interval_report(
        hosts: &[(TenantId, String)],
        weights: Vec<(TenantId, Vec<u32>)>,
        config: SchedConfig,
    ) -> IntervalReport {
        let counters = IntervalCounters::default();
        IntervalReport {
            number: 1,
            ended_at: Nanos(1),
            length: Nanos(1),
            decision: Decision::initial(2),
            metrics: compute_metrics(&counters),
            counters,
            hosts: hosts.to_vec(),
            weights,
            config,
            measured_by_core: 0,
            measure_duration: Nanos::ZERO,
        }
    }

    #[test]
    fn a_tenant_served_on_other_cores_gets_less_weight_beside_one_that_is_not() {
        let (both, one) = (TenantId(1), TenantId(2));
        let hosts = [(both, "both".to_owned()), (one, "one".to_owned())];
        let before = [snapshot(&[0, 0]), snapshot(&[0, 0])];
        let after = [snapshot(&[500, 500]), snapshot(&[1_000, 0])];
        let next = |last: Option<&IntervalReport>, config: &SchedConfig| {
            next_core_weights([both, one].into_iter(), (&before, &after), last, &hosts, config)
        };
        let config = SchedConfig::default();
        let first = next(None, &config);
        assert_eq!((first[0].0, first[1].0), (both, one));
        assert!(first[0].1[0] < WEIGHT_UNIT && first[1].1[0] > WEIGHT_UNIT, "{first:?}");
        assert_eq!(first[0].1[1], WEIGHT_UNIT, "it is alone on that core");
        let last = interval_report(&hosts, first.clone(), config.clone());
        let second = next(Some(&last), &config);
        assert!(second[0].1[0] < first[0].1[0], "its previous weight counts: {first:?}, {second:?}");
        // Another host that has taken the number does not inherit the weight.
        let others =
            interval_report(&[(both, "another".to_owned()), hosts[1].clone()], first.clone(), config);
        assert!(next(Some(&others), &SchedConfig::default())[0].1[0] > second[0].1[0]);
    }

    #[test]
    fn a_configured_weight_applies_at_once_and_a_limit_does_not_raise_it() {
        let (a, b) = (TenantId(1), TenantId(2));
        let hosts = [(a, "a".to_owned()), (b, "b".to_owned())];
        let before = [snapshot(&[0, 0]), snapshot(&[0, 0])];
        let after = [snapshot(&[500, 500]), snapshot(&[500, 500])];
        let last = interval_report(
            &hosts,
            vec![(a, vec![WEIGHT_UNIT; 2]), (b, vec![WEIGHT_UNIT; 2])],
            SchedConfig::default(),
        );
        let mut config = SchedConfig::default();
        config.tenants.insert("a".to_owned(), TenantQos { weight: 100, ..TenantQos::default() });
        let of = |config: &SchedConfig, after: &[CoreMetricsSnapshot]| {
            let next = next_core_weights([a, b].into_iter(), (&before, after), Some(&last), &hosts, config);
            f64::from(next[0].1[0]) / f64::from(next[1].1[0])
        };
        // Service under other weights may change it by a factor of two either way.
        assert!(of(&config, &after) >= 100.0, "{}", of(&config, &after));
        // A tenant that waits only for its limit is not entitled to more.
        let mut limited = [snapshot(&[10, 990]), snapshot(&[10, 990])];
        limited.iter_mut().for_each(|core| core.tenants[1].backlogged = 0);
        assert!((of(&SchedConfig::default(), &limited) - 1.0).abs() < 0.01);
    }
}
