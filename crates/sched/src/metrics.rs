//! Computes the metrics of one sampling interval from its counters.
//!
//! In: [`IntervalCounters`], the work of each core and each tenant in the interval. Out: [`IntervalMetrics`]. Pure; no
//! state is kept between intervals.
//!
//! ```text
//!   core      busy in target, kv, device ──▶ utilisation, shares R_oF, R_KV, R_D
//!             requests by executing core ──▶ natural load: the load without migration
//!   cores     natural loads              ──▶ LB = min ÷ max, max − min, max
//!   tenant    requests, latency, waits   ──▶ intensity, slowdown S = RT ÷ (RT − waited behind others)
//!   tenants   slowdowns                  ──▶ F = min ÷ max
//! ```
//!
//! # Natural load
//! The papers balance on measured utilisation and do not describe the interval after a migration: once requests
//! migrate, utilisations are level, no threshold is exceeded, and a policy based on utilisation alone would stop
//! migrating, find the imbalance again, and oscillate. Decisions therefore use natural loads: the load that each core
//! would have if every request ran on the core of its connection. A core's natural load is the measured load, minus the
//! kv and device time of the requests that it executed for other cores, plus that of its own requests that ran
//! elsewhere, at the time per request measured there. The sum over all cores equals the sum of the measured loads. A
//! natural load above 1 is valid: the connections of that core bring more work than one core can do.
//!
//! # Division by zero and missing data
//! | case | metric |
//! | --- | --- |
//! | a core on which nothing ran | the shares of all cores together; if nothing ran on any core R_oF = 1, so nothing can migrate |
//! | one core, or no natural load above [`IDLE_LOAD_MAX`] | LB = 1, difference 0 |
//! | a tenant without a completed or waiting request (new, gone or idle) | intensity 0, no slowdown |
//! | a tenant without a completed request and with a waiting one | slowdown ∞ |
//! | response time 0 | slowdown 1 |
//! | waited as long as the response took, or longer by a clock error | the remainder counts as 1 ns per request |
//! | fewer than two tenants with a slowdown, or all of them ∞ | F = 1 |
//! | an interval of zero length | computed as 1 ns |
//! | a list with fewer entries than cores | missing entries are 0; entries beyond the last core are ignored |
//!
//! Sources: OctoKV §IV-D; OctoFAS §3.1 and §4.2. The definition of RT alone as RT minus the time waited behind other
//! tenants is ours: OctoFAS does not say how to obtain it while other tenants are active.

use crate::ids::{CoreId, TenantId};
use octokv_base::Nanos;

/// If no core's load is above this (part of one core, 0 to 1), the node is idle and its loads count as balanced
/// whatever their ratio: one background task would otherwise be an imbalance. (OctoFAS has no such floor; OctoKV has
/// T_OL.)
pub const IDLE_LOAD_MAX: f64 = 0.05;

/// CPU time of one core in one interval, by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Sockets, protocol and commands: stays on the core of the connection.
    pub target: Nanos,
    /// Storage engine: can migrate to another core.
    pub kv: Nanos,
    /// Device submissions and completions: migrates with the engine's part.
    pub device: Nanos,
}

/// Counters of one core in one interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CoreCounters {
    /// CPU time by stage, without empty polls.
    pub busy: StageTimes,
    /// Mean number of requests of its connections in progress. For display; no decision depends on it.
    pub queue_depth: f64,
    /// Requests of its own connections that it executed.
    pub executed_locally: u64,
    /// Requests of its own connections that it sent to each core, indexed by core.
    pub offloaded_to: Vec<u64>,
    /// Requests that it executed for the connections of each core, indexed by core.
    pub executed_for: Vec<u64>,
}

/// Counters of one tenant in one interval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantCounters {
    /// The tenant; unique in [`IntervalCounters::tenants`].
    pub tenant: TenantId,
    /// Completed requests, indexed by the core of the connection.
    pub requests_by_core: Vec<u64>,
    /// Bytes of keys and values in both directions.
    pub bytes: u64,
    /// Sum of the request latencies, from the last byte received to the first byte sent.
    pub latency: Nanos,
    /// Part of `latency` spent waiting behind requests of other tenants.
    pub waited: Nanos,
    /// Network part of the response time of one request.
    pub round_trip: Nanos,
    /// Requests received and waiting at the end of the interval.
    pub waiting: u64,
}

/// All counters of one sampling interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntervalCounters {
    /// Length of the interval.
    pub interval: Nanos,
    /// Counters by core.
    pub cores: Vec<CoreCounters>,
    /// Counters of the known tenants, in any order, each tenant once.
    pub tenants: Vec<TenantCounters>,
}

/// Shares of the stages in a core's CPU time: R_oF, R_KV and R_D, each 0 to 1. Their sum is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageShares {
    /// R_oF, the share of sockets and protocol.
    pub target: f64,
    /// R_KV, the share of the storage engine.
    pub kv: f64,
    /// R_D, the share of device submissions and completions.
    pub device: f64,
}

/// A load without migration, as a part of one core's time; can be above 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NaturalLoad {
    /// Part that stays on the core of the connection.
    pub fixed: f64,
    /// Part that can migrate.
    pub movable: f64,
}

impl NaturalLoad {
    /// Sum of both parts.
    pub fn total(self) -> f64 {
        self.fixed + self.movable
    }
}

/// Metrics of one core.
#[derive(Clone, Debug, PartialEq)]
pub struct CoreIntervalMetrics {
    /// Measured busy part of the interval, 0 to 1.
    pub utilisation: f64,
    /// Shares of the stages in its CPU time.
    pub shares: StageShares,
    /// Its load without migration.
    pub natural: NaturalLoad,
    /// Mean queue depth, as counted.
    pub queue_depth: f64,
    /// Requests of its own connections executed in the interval on any core: the requests behind `natural.movable`.
    pub own_requests: u64,
    /// Requests that it sent to other cores.
    pub offloaded: u64,
    /// Requests that it executed for other cores.
    pub executed_for_others: u64,
}

/// Metrics of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantIntervalMetrics {
    /// The tenant.
    pub tenant: TenantId,
    /// Completed requests, indexed by the core of the connection, with an entry for each core.
    pub requests_by_core: Vec<u64>,
    /// Sum of `requests_by_core`.
    pub requests: u64,
    /// Completed requests per second.
    pub intensity: f64,
    /// Bytes of keys and values per second, both directions.
    pub bytes_per_s: f64,
    /// Mean response time seen by the host, network included; `None` if no request completed.
    pub response_time: Option<Nanos>,
    /// Response time ÷ response time alone, 1 or more; `None` if the tenant was inactive.
    pub slowdown: Option<f64>,
}

/// All metrics of one sampling interval.
#[derive(Clone, Debug, PartialEq)]
pub struct IntervalMetrics {
    /// Metrics by core.
    pub cores: Vec<CoreIntervalMetrics>,
    /// Metrics by tenant, in the order of the counters.
    pub tenants: Vec<TenantIntervalMetrics>,
    /// LB of the utilisations, 0 to 1: the visible result of balancing.
    pub utilisation_balance: f64,
    /// LB of the natural loads, 0 to 1: the input of decisions.
    pub natural_balance: f64,
    /// Greatest natural load minus the least.
    pub natural_difference: f64,
    /// Greatest natural load.
    pub natural_load_max: f64,
    /// F: least slowdown ÷ greatest, 0 to 1.
    pub fairness: f64,
}

impl IntervalMetrics {
    /// The core with the lowest utilisation, the first of equals. It collects the counters of the next interval (OctoKV
    /// §IV-D). Core 0 if there are no cores.
    pub fn least_busy_core(&self) -> CoreId {
        let least = |a: &(usize, &CoreIntervalMetrics), b: &(usize, &CoreIntervalMetrics)| {
            a.1.utilisation.total_cmp(&b.1.utilisation)
        };
        self.cores.iter().enumerate().min_by(least).map_or(CoreId(0), |(index, _)| CoreId::from_index(index))
    }
}

/// Computes all metrics from the counters of one interval.
pub fn compute_metrics(counters: &IntervalCounters) -> IntervalMetrics {
    let interval_ns = interval_ns(counters.interval);
    let natural = natural_loads(counters);
    let pooled = counters.cores.iter().fold(StageTimes::default(), |sum, core| sum.plus(core.busy));
    let pooled = pooled.shares().unwrap_or(StageShares { target: 1.0, kv: 0.0, device: 0.0 });
    let count = counters.cores.len();
    let core = |(index, core): (usize, &CoreCounters)| CoreIntervalMetrics {
        utilisation: (core.busy.total_ns() / interval_ns).min(1.0),
        shares: core.busy.shares().unwrap_or(pooled),
        natural: natural[index],
        queue_depth: core.queue_depth,
        own_requests: own_requests(counters, index),
        offloaded: saturating_sum(other_cores(&core.offloaded_to, index, count)),
        executed_for_others: saturating_sum(other_cores(&core.executed_for, index, count)),
    };
    let cores: Vec<CoreIntervalMetrics> = counters.cores.iter().enumerate().map(core).collect();
    let tenants: Vec<TenantIntervalMetrics> =
        counters.tenants.iter().map(|tenant| tenant_metrics(tenant, interval_ns, count)).collect();
    let (least, busiest) = min_max(natural.iter().map(|load| load.total()));
    let in_balance = count < 2 || busiest <= IDLE_LOAD_MAX;
    IntervalMetrics {
        utilisation_balance: balance_ratio(cores.iter().map(|core| core.utilisation)),
        natural_balance: balance_ratio(natural.iter().map(|load| load.total())),
        natural_difference: if in_balance { 0.0 } else { busiest - least },
        natural_load_max: busiest,
        fairness: fairness(tenants.iter().filter_map(|tenant| tenant.slowdown)),
        cores,
        tenants,
    }
}

/// Computes each core's natural load; the module header defines it.
pub fn natural_loads(counters: &IntervalCounters) -> Vec<NaturalLoad> {
    let interval_ns = interval_ns(counters.interval);
    let count = counters.cores.len();
    // By core: kv and device time per request executed there.
    let event_ns: Vec<f64> = counters
        .cores
        .iter()
        .enumerate()
        .map(|(at, core)| {
            let ran = core.executed_locally.saturating_add(saturating_sum(other_cores(
                &core.executed_for,
                at,
                count,
            )));
            if ran == 0 { 0.0 } else { core.busy.movable_ns() / ran as f64 }
        })
        .collect();
    let load = |(at, core): (usize, &CoreCounters)| {
        let ran_any =
            core.executed_locally > 0 || saturating_sum(other_cores(&core.executed_for, at, count)) > 0;
        // Time in these stages without any request is background work of that core.
        let work_ns = if ran_any { 0.0 } else { core.busy.movable_ns() };
        let here_ns = core.executed_locally as f64 * event_ns[at];
        let away = counters.cores.iter().zip(&event_ns).enumerate().filter(|(other, _)| *other != at);
        let away_ns: f64 =
            away.map(|(_, (other, ns))| other.executed_for.get(at).copied().unwrap_or(0) as f64 * ns).sum();
        NaturalLoad {
            fixed: (core.busy.target.0 as f64 + work_ns) / interval_ns,
            movable: (here_ns + away_ns) / interval_ns,
        }
    };
    counters.cores.iter().enumerate().map(load).collect()
}

/// Requests of a core's connections executed on any core.
fn own_requests(counters: &IntervalCounters, at: usize) -> u64 {
    let others = counters.cores.iter().enumerate().filter(|(other, _)| *other != at);
    let away = others.map(|(_, other)| other.executed_for.get(at).copied().unwrap_or(0));
    counters.cores[at].executed_locally.saturating_add(saturating_sum(away))
}

fn tenant_metrics(counters: &TenantCounters, interval_ns: f64, cores: usize) -> TenantIntervalMetrics {
    let by_core: Vec<u64> =
        (0..cores).map(|core| counters.requests_by_core.get(core).copied().unwrap_or(0)).collect();
    let requests = saturating_sum(by_core.iter().copied());
    let seconds = interval_ns / 1e9;
    TenantIntervalMetrics {
        tenant: counters.tenant,
        requests,
        intensity: requests as f64 / seconds,
        bytes_per_s: counters.bytes as f64 / seconds,
        response_time: counters.latency.0.checked_div(requests).map(|ns| counters.round_trip + Nanos(ns)),
        slowdown: slowdown(counters, requests),
        requests_by_core: by_core,
    }
}

/// Slowdown S from sums over the interval; `None` if the tenant was inactive.
fn slowdown(counters: &TenantCounters, requests: u64) -> Option<f64> {
    if requests == 0 {
        return (counters.waiting > 0).then_some(f64::INFINITY);
    }
    let requests = requests as f64;
    let shared_ns = counters.round_trip.0 as f64 * requests + counters.latency.0 as f64;
    if shared_ns == 0.0 {
        return Some(1.0);
    }
    let waited_ns = counters.waited.min(counters.latency).0 as f64;
    let alone_ns = (shared_ns - waited_ns).max(requests);
    Some((shared_ns / alone_ns).max(1.0))
}

/// F: the least slowdown ÷ the greatest.
fn fairness(slowdowns: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = min_max(slowdowns.clone());
    if slowdowns.count() < 2 || least == f64::INFINITY { 1.0 } else { least / most }
}

/// LB: the least load ÷ the greatest.
fn balance_ratio(loads: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = min_max(loads.clone());
    if loads.count() < 2 || most <= IDLE_LOAD_MAX { 1.0 } else { least / most }
}

/// The least and the greatest number; 0 and 0 for an empty iterator.
fn min_max(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let least = numbers.clone().reduce(f64::min).unwrap_or(0.0);
    (least, numbers.reduce(f64::max).unwrap_or(0.0))
}

fn interval_ns(interval: Nanos) -> f64 {
    interval.0.max(1) as f64
}

fn saturating_sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// The entries of the other existing cores.
fn other_cores(by_core: &[u64], at: usize, cores: usize) -> impl Iterator<Item = u64> {
    by_core.iter().take(cores).enumerate().filter(move |(core, _)| *core != at).map(|(_, number)| *number)
}

impl StageTimes {
    fn plus(self, other: StageTimes) -> StageTimes {
        StageTimes {
            target: self.target + other.target,
            kv: self.kv + other.kv,
            device: self.device + other.device,
        }
    }

    fn movable_ns(self) -> f64 {
        self.kv.0 as f64 + self.device.0 as f64
    }

    fn total_ns(self) -> f64 {
        self.target.0 as f64 + self.movable_ns()
    }

    /// `None` if nothing ran.
    fn shares(self) -> Option<StageShares> {
        let total_ns = self.total_ns();
        let share = |span: Nanos| span.0 as f64 / total_ns;
        (total_ns > 0.0).then(|| StageShares {
            target: share(self.target),
            kv: share(self.kv),
            device: share(self.device),
        })
    }
}

#[cfg(test)]
mod tests;
