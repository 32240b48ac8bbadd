//! From what was counted in one window to the figures that choices are made of.
//!
//! In: [`IntervalCounters`], what each core and each flow did within the window. Out: [`IntervalMetrics`]. Pure; nothing is remembered
//! from window to window.
//!
//! ```text
//!   core      busy in target, kv, device ──▶ utilisation, shares R_oF, R_KV, R_D
//!             requests by where they ran ──▶ natural load: as if nothing had been moved
//!   cores     natural loads              ──▶ LB = least ÷ most, most − least, the most
//!   flow      requests, latency, waits   ──▶ intensity, slowdown S = RT ÷ (RT − waited behind others)
//!   flows     slowdowns                  ──▶ F = least ÷ most
//! ```
//!
//! # Natural loads
//! The papers balance on measured utilisation and do not say what the window after shows: once requests are moved, the
//! utilisations are level, no threshold is passed, and a policy that looked at them alone would move nothing, find
//! the imbalance again, and so switch itself on and off for ever. So choices are made on natural loads: what
//! each core would have had if every request had run on the core of its connection. A core's natural load is the measured
//! one, without the kv and device time of what it ran for others, and with that of its own requests that ran
//! elsewhere, at the time per request that they took there. The sum over cores is that of the measured ones. A natural
//! load may be above 1: so much comes in through that core's connections.
//!
//! # Where there is nothing to divide by
//! | case | figure |
//! | --- | --- |
//! | a core on which nothing ran | shares of all cores together; where nothing ran at all R_oF = 1, so nothing can be moved |
//! | one core, or no natural load above [`IDLE`] | LB = 1, difference 0 |
//! | a flow of which nothing was answered and nothing waits (it came, went or rests) | intensity 0, no slowdown |
//! | a flow of which nothing was answered while something waits | slowdown ∞ |
//! | response time 0 | slowdown 1 |
//! | waited as long as the response took, or longer by a clock's error | the rest counts as 1 ns a request |
//! | fewer than two flows with a slowdown, or all of them ∞ | F = 1 |
//! | a window of no length | as if it had 1 ns |
//! | a list with fewer entries than cores | the missing ones are 0; what is said of cores that do not exist is left out |
//!
//! Sources: OctoKV §IV-D; OctoFAS §3.1 and §4.2. That RT alone is RT without the time waited behind other flows is ours:
//! OctoFAS does not say how it is known while a flow is not alone.

use crate::ids::{CoreId, TenantId};
use octokv_base::Nanos;

/// Where no core's load is above this, the node is idle, and its loads are in balance whatever their ratio: one background
/// task would otherwise be an imbalance. (OctoFAS has no such floor; OctoKV has T_OL.)
pub const IDLE_LOAD_MAX: f64 = 0.05;

/// Time of a core by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Sockets, protocol and commands: stays on the connection's core.
    pub target: Nanos,
    /// Engines: may run on another core.
    pub kv: Nanos,
    /// Device submissions and completions: goes where the engine's part goes.
    pub device: Nanos,
}

/// What one core did within the window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CoreCounters {
    /// Time in each stage, without empty polls.
    pub busy: StageTimes,
    /// Requests of its connections that were begun and not answered, on average: shown to operators, decides nothing.
    pub queue_depth: f64,
    /// Requests of its own connections that ran here.
    pub executed_locally: u64,
    /// By core: requests of its own connections that it sent there.
    pub offloaded_to: Vec<u64>,
    /// By core: requests of that core's connections that ran here.
    pub executed_for: Vec<u64>,
}

/// What one flow got within the window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantCounters {
    /// Which one.
    pub tenant: TenantId,
    /// By core of the connection: requests that were answered.
    pub requests_by_core: Vec<u64>,
    /// Bytes of keys and values in both directions.
    pub bytes: u64,
    /// The sum of their times from the last byte in to the first byte out.
    pub latency: Nanos,
    /// How much of that sum was spent waiting behind requests of other flows.
    pub waited: Nanos,
    /// The network's part of one request's response time.
    pub round_trip: Nanos,
    /// Requests that have come and wait at the window's end.
    pub waiting: u64,
}

/// What was counted in one window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntervalCounters {
    /// How long it was.
    pub interval: Nanos,
    /// By core.
    pub cores: Vec<CoreCounters>,
    /// The flows there are, in any order, each once.
    pub tenants: Vec<TenantCounters>,
}

/// R_oF, R_KV and R_D: which part of a core's time each stage had. Their sum is 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageShares {
    /// R_oF.
    pub target: f64,
    /// R_KV.
    pub kv: f64,
    /// R_D.
    pub device: f64,
}

/// A load, as a part of one core's time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NaturalLoad {
    /// What cannot be moved.
    pub fixed: f64,
    /// What can.
    pub movable: f64,
}

impl NaturalLoad {
    /// Both.
    pub fn total(self) -> f64 {
        self.fixed + self.movable
    }
}

/// One core's figures.
#[derive(Clone, Debug, PartialEq)]
pub struct CoreIntervalMetrics {
    /// The measured busy part of the window, 0 to 1.
    pub utilisation: f64,
    /// How its time was divided.
    pub shares: StageShares,
    /// Its load as if nothing had been moved.
    pub natural: NaturalLoad,
    /// As it was counted.
    pub queue_depth: f64,
    /// Requests of its own connections that ran within the window, wherever: those that `natural.movable` is made of.
    pub own_requests: u64,
    /// Requests that it sent to other cores.
    pub offloaded: u64,
    /// Requests that it ran for other cores.
    pub executed_for_others: u64,
}

/// One flow's figures.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantIntervalMetrics {
    /// Which one.
    pub tenant: TenantId,
    /// By core of the connection, an entry for each: requests that were answered.
    pub requests_by_core: Vec<u64>,
    /// Their sum.
    pub requests: u64,
    /// Requests a second.
    pub intensity: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// The mean response time that its host sees, network included; `None` where nothing was answered.
    pub response_time: Option<Nanos>,
    /// How many times longer that is than it would be alone.
    pub slowdown: Option<f64>,
}

/// All figures of one window.
#[derive(Clone, Debug, PartialEq)]
pub struct IntervalMetrics {
    /// By core.
    pub cores: Vec<CoreIntervalMetrics>,
    /// In the order of the counters.
    pub tenants: Vec<TenantIntervalMetrics>,
    /// LB of the utilisations: what an operator sees of what balancing brings about.
    pub utilisation_balance: f64,
    /// LB of the natural loads: what is chosen by.
    pub natural_balance: f64,
    /// The greatest natural load without the least.
    pub natural_difference: f64,
    /// The greatest natural load.
    pub natural_load_max: f64,
    /// F.
    pub fairness: f64,
}

impl IntervalMetrics {
    /// The core with the lowest utilisation, the first of equals: the one that collects the next window's counters
    /// (OctoKV §IV-D). The first core where there is none.
    pub fn least_busy_core(&self) -> CoreId {
        let least = |a: &(usize, &CoreIntervalMetrics), b: &(usize, &CoreIntervalMetrics)| {
            a.1.utilisation.total_cmp(&b.1.utilisation)
        };
        self.cores.iter().enumerate().min_by(least).map_or(CoreId(0), |(index, _)| CoreId::from_index(index))
    }
}

/// Counters into figures.
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

/// Each core's load as if every request had run on the core of its connection; see the head of this file.
pub fn natural_loads(counters: &IntervalCounters) -> Vec<NaturalLoad> {
    let interval_ns = interval_ns(counters.interval);
    let count = counters.cores.len();
    // By core: what one request took there, in kv and device.
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
        // Time in these stages without a request is the node's own work on that core.
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

/// Requests of a core's connections that ran, wherever.
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

/// S, from sums over the window.
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

/// F: the least slowdown by the greatest.
fn fairness(slowdowns: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = min_max(slowdowns.clone());
    if slowdowns.count() < 2 || least == f64::INFINITY { 1.0 } else { least / most }
}

/// LB: the least load by the greatest.
fn balance_ratio(loads: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = min_max(loads.clone());
    if loads.count() < 2 || most <= IDLE_LOAD_MAX { 1.0 } else { least / most }
}

/// 0 and 0 of none.
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

/// The entries of other cores that exist.
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

    /// `None` where nothing ran.
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
