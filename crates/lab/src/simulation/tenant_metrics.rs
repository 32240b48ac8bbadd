//! Metrics of a run with several tenants (OctoFAS §3.1, §4.2).
//!
//! In: metric snapshots of the cores before and after, counters of each client, interval reports of the node's monitor.
//! Out: [`MultiTenantRunStats`]; slowdown S, fairness F, load balance LB and Jain's index of such runs.
//!
//! Two slowdowns: [`slowdowns`] follow OctoFAS's definition, with the response time of a run with the tenant alone;
//! [`TenantRunStats::slowdown_online`] is the estimate of the node, which has no such run.

use super::metrics::{ClientStats, RunStats};
use octokv_base::Nanos;
use octokv_node::core_metrics::{CoreMetricsSnapshot, TenantMetricsSnapshot};
use octokv_node::monitor::IntervalReport;
use octokv_sched::{PolicyAction, TenantId};
use std::sync::Arc;

/// Metrics of one tenant on one core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantCoreStats {
    /// Requests completed over its connection there.
    pub completed: u64,
    /// Their mean time in the node, in microseconds.
    pub latency_us: f64,
}

/// Metrics of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantRunStats {
    /// Completed operations.
    pub completed: u64,
    /// Operations per second.
    pub throughput_ops_s: f64,
    /// Mean time from submission to response, in microseconds.
    pub response_us_mean: f64,
    /// 99th percentile of that time, in microseconds.
    pub response_us_p99: f64,
    /// Mean time in the node, in microseconds.
    pub latency_us_mean: f64,
    /// Slowdown by the node's monitor, the mean of its intervals; `None` if it reported none.
    pub slowdown_online: Option<f64>,
    /// Cores, in the order of the connections.
    pub cores: Vec<TenantCoreStats>,
}

/// Metrics of a run with several tenants.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiTenantRunStats {
    /// Metrics of all tenants together.
    pub total: RunStats,
    /// Metrics of each tenant.
    pub tenants: Vec<TenantRunStats>,
    /// F by the node's monitor, the mean of its intervals; `None` if no interval ended.
    pub fairness_online: Option<f64>,
    /// The policy action at the end of each interval.
    pub policy_actions: Vec<PolicyAction>,
}

impl MultiTenantRunStats {
    /// Computes metrics from snapshots at the start and the end of a time span, counters of each client, the tenant id of
    /// each client on the node, and the intervals that ended within.
    pub fn new(
        span: Nanos,
        before: &[CoreMetricsSnapshot],
        after: &[CoreMetricsSnapshot],
        counted: Vec<ClientStats>,
        ids: &[Option<TenantId>],
        intervals: &[Arc<IntervalReport>],
    ) -> MultiTenantRunStats {
        let tenant = |(counted, id): (&ClientStats, &Option<TenantId>)| {
            tenant_run_stats(span, before, after, counted, *id, intervals)
        };
        let tenants = counted.iter().zip(ids).map(tenant).collect();
        let total = RunStats::new(span, before, after, sum_clients(counted));
        let fairness_online = mean(intervals.iter().map(|interval| interval.metrics.fairness));
        let policy_actions = intervals.iter().map(|interval| interval.decision.action).collect();
        MultiTenantRunStats { total, tenants, fairness_online, policy_actions }
    }

    /// LB: utilisation of the least busy core divided by that of the busiest.
    pub fn load_balance(&self) -> f64 {
        min_max_ratio(self.total.cores.iter().map(|core| core.utilisation))
    }
}

/// S of each tenant: its mean response time divided by that of a run alone.
pub fn slowdowns(run: &MultiTenantRunStats, alone_us: &[f64]) -> Vec<f64> {
    run.tenants.iter().zip(alone_us).map(|(tenant, alone)| tenant.response_us_mean / alone).collect()
}

/// F: the smallest slowdown divided by the largest.
pub fn fairness(slowdowns: &[f64]) -> f64 {
    min_max_ratio(slowdowns.iter().copied())
}

/// Jain's index: 1 if all parts are equal, 1/n if one of n parts has everything.
pub fn jain_index(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    sum * sum / (parts.len() as f64 * squares)
}

fn min_max_ratio(numbers: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = (numbers.clone().fold(f64::INFINITY, f64::min), numbers.fold(0.0, f64::max));
    least / most
}

fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = numbers.fold((0.0, 0), |(sum, count), number| (sum + number, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Sums the counters of all clients.
fn sum_clients(counted: Vec<ClientStats>) -> ClientStats {
    let add = |mut all: ClientStats, one: ClientStats| {
        all.completed += one.completed;
        all.response_ns.extend(one.response_ns);
        for (all, one) in all.outstanding_ns.iter_mut().zip(one.outstanding_ns) {
            *all += one;
        }
        all
    };
    counted.into_iter().reduce(add).unwrap_or_default()
}

fn tenant_run_stats(
    span: Nanos,
    before: &[CoreMetricsSnapshot],
    after: &[CoreMetricsSnapshot],
    counted: &ClientStats,
    id: Option<TenantId>,
    intervals: &[Arc<IntervalReport>],
) -> TenantRunStats {
    let seen = |seen: &CoreMetricsSnapshot| id.map(|id| seen.tenants[id.0 as usize]).unwrap_or_default();
    let less = |after: &CoreMetricsSnapshot,
                before: &CoreMetricsSnapshot,
                of: fn(&TenantMetricsSnapshot) -> u64| of(&seen(after)) - of(&seen(before));
    let core = |(before, after): (&CoreMetricsSnapshot, &CoreMetricsSnapshot)| {
        let completed = less(after, before, |tenant| tenant.completed);
        let latency_ns = less(after, before, |tenant| tenant.latency_total.0);
        (completed, latency_ns)
    };
    let cores: Vec<(u64, u64)> = before.iter().zip(after).map(core).collect();
    let us = |(completed, latency_ns): (u64, u64)| latency_ns as f64 / completed.max(1) as f64 / 1e3;
    let mut response_ns = counted.response_ns.clone();
    response_ns.sort_unstable();
    let sum: u128 = response_ns.iter().map(|&ns| u128::from(ns)).sum();
    let p99 = response_ns.get(response_ns.len() * 99 / 100).copied().unwrap_or(0);
    let reported = intervals.iter().filter_map(|interval| {
        interval
            .metrics
            .tenants
            .iter()
            .find(|tenant| Some(tenant.tenant) == id)
            .and_then(|tenant| tenant.slowdown)
    });
    TenantRunStats {
        completed: counted.completed,
        throughput_ops_s: counted.completed as f64 / span.0.max(1) as f64 * 1e9,
        response_us_mean: sum as f64 / response_ns.len().max(1) as f64 / 1e3,
        response_us_p99: f64::from(p99) / 1e3,
        latency_us_mean: us(cores.iter().fold((0, 0), |sum, core| (sum.0 + core.0, sum.1 + core.1))),
        slowdown_online: mean(reported),
        cores: cores
            .iter()
            .map(|&core| TenantCoreStats { completed: core.0, latency_us: us(core) })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_index_and_fairness_follow_their_definitions() {
        for (want, parts) in
            [(1.0, &[3.0, 3.0][..]), (0.5, &[4.0, 0.0]), (0.9, &[1.0, 2.0]), (0.25, &[0.0, 0.0, 7.0, 0.0])]
        {
            assert!((jain_index(parts) - want).abs() < 1e-12, "{parts:?}");
        }
        assert_eq!((fairness(&[1.0, 2.0]), fairness(&[1.5, 1.5, 1.5])), (0.5, 1.0));
    }
}
