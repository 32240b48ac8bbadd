//! Metrics of a run: of the client, and of each core in the order of the connections.
//!
//! In: metric snapshots of the cores before and after, counters of the client. Out: [`RunStats`].

use octokv_base::Nanos;
use octokv_node::core_metrics::CoreMetricsSnapshot;

/// Counters of a client.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClientStats {
    /// Completed operations.
    pub completed: u64,
    /// Response time of each operation, in nanoseconds, in the order of completion.
    pub response_ns: Vec<u32>,
    /// By connection: outstanding commands, integrated over time, in command-nanoseconds.
    pub outstanding_ns: Vec<u128>,
}

/// Metrics of a core and its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CoreRunStats {
    /// Busy fraction of the time, 0 to 1.
    pub utilisation: f64,
    /// Requests received over its connection.
    pub requests_received: u64,
    /// Requests executed here, received by this core or others: executions of the engine and of the device stage.
    pub requests_executed: u64,
    /// Mean time in the node of the requests of its connection, in microseconds.
    pub latency_us: f64,
    /// Mean number of outstanding commands of its connection, counted by the client.
    pub queue_depth: f64,
    /// Mean number of its outstanding commands that are in the node.
    pub in_node_depth: f64,
}

/// Metrics of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunStats {
    /// Measured time.
    pub span: Nanos,
    /// Operations completed within the measured time.
    pub completed: u64,
    /// Operations per second.
    pub throughput_ops_s: f64,
    /// Mean time from submission to response, in microseconds.
    pub response_us_mean: f64,
    /// 99th percentile of that time, in microseconds.
    pub response_us_p99: f64,
    /// Mean time in the node over all cores, in microseconds.
    pub latency_us_mean: f64,
    /// Requests executed on another core than their connection's.
    pub offloaded: u64,
    /// Cores, in the order of the connections.
    pub cores: Vec<CoreRunStats>,
}

impl RunStats {
    /// Computes metrics from snapshots at the start and the end of a time span.
    pub fn new(
        span: Nanos,
        before: &[CoreMetricsSnapshot],
        after: &[CoreMetricsSnapshot],
        mut counted: ClientStats,
    ) -> RunStats {
        let span_ns = span.0.max(1) as f64;
        let core = |(at, (before, after)): (usize, (&CoreMetricsSnapshot, &CoreMetricsSnapshot))| {
            let completed = sum_over_tenants(after, |tenant| tenant.completed)
                - sum_over_tenants(before, |tenant| tenant.completed);
            let latency = sum_over_tenants(after, |tenant| tenant.latency_total.0)
                - sum_over_tenants(before, |tenant| tenant.latency_total.0);
            let ran =
                |seen: &CoreMetricsSnapshot| seen.executed_locally + seen.executed_for.iter().sum::<u64>();
            CoreRunStats {
                utilisation: (busy_ns(after) - busy_ns(before)) as f64 / span_ns,
                requests_received: sum_over_tenants(after, |tenant| tenant.started)
                    - sum_over_tenants(before, |tenant| tenant.started),
                requests_executed: ran(after) - ran(before),
                latency_us: latency as f64 / completed.max(1) as f64 / 1e3,
                queue_depth: counted.outstanding_ns.get(at).map_or(0.0, |sum| *sum as f64 / span_ns),
                in_node_depth: latency as f64 / span_ns,
            }
        };
        let cores: Vec<CoreRunStats> = before.iter().zip(after).enumerate().map(core).collect();
        let sums = |seen: &[CoreMetricsSnapshot], metric: fn(&CoreMetricsSnapshot) -> u64| {
            seen.iter().map(metric).sum::<u64>()
        };
        let of = |metric: fn(&CoreMetricsSnapshot) -> u64| sums(after, metric) - sums(before, metric);
        let latency_ns = of(|seen| sum_over_tenants(seen, |tenant| tenant.latency_total.0));
        let in_node = of(|seen| sum_over_tenants(seen, |tenant| tenant.completed));
        counted.response_ns.sort_unstable();
        let sum: u128 = counted.response_ns.iter().map(|&ns| u128::from(ns)).sum();
        let p99 = counted.response_ns.get(counted.response_ns.len() * 99 / 100).copied().unwrap_or(0);
        RunStats {
            span,
            completed: counted.completed,
            throughput_ops_s: counted.completed as f64 / span_ns * 1e9,
            response_us_mean: sum as f64 / counted.response_ns.len().max(1) as f64 / 1e3,
            response_us_p99: f64::from(p99) / 1e3,
            latency_us_mean: latency_ns as f64 / in_node.max(1) as f64 / 1e3,
            offloaded: of(|seen| seen.offloaded_to.iter().sum()),
            cores,
        }
    }

    /// Mean and population standard deviation of a metric over the cores.
    pub fn mean_and_deviation(&self, metric: impl Fn(&CoreRunStats) -> f64) -> (f64, f64) {
        let count = self.cores.len().max(1) as f64;
        let mean = self.cores.iter().map(&metric).sum::<f64>() / count;
        let variance = self.cores.iter().map(|core| (metric(core) - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }
}

fn sum_over_tenants(
    seen: &CoreMetricsSnapshot,
    metric: impl Fn(&octokv_node::core_metrics::TenantMetricsSnapshot) -> u64,
) -> u64 {
    seen.tenants.iter().map(metric).sum()
}

fn busy_ns(seen: &CoreMetricsSnapshot) -> u64 {
    seen.stage_times.target.0 + seen.stage_times.kv.0 + seen.stage_times.device.0
}
