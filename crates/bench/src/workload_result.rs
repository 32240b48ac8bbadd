//! The result of a workload, and its lines of the table.

use crate::config::BenchConfig;
use crate::log_work::LogWork;
use crate::recorder::Recorder;
use crate::resource_usage::ResourceUsage;
use crate::syscall_timing::SyscallTimes;
use crate::time_series::TimeSeriesPoint;
use crate::workload::Workload;
use octokv_base::Nanos;
use serde::Serialize;
use std::fmt::Write;

/// The result of one workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadResult {
    /// Name of the workload.
    pub workload: &'static str,
    /// Name of the system under test.
    pub system: &'static str,
    /// Round of a comparison with baselines, from 1 on.
    pub round: Option<usize>,
    /// Connections, or streams for an engine on files.
    pub threads: usize,
    /// Operations in flight on each connection.
    pub depth: usize,
    /// Key length in bytes, if fixed.
    pub key_bytes: Option<usize>,
    /// Key lengths in the form of the command line.
    pub key_sizes: String,
    /// Value length in bytes, if fixed.
    pub value_bytes: Option<usize>,
    /// Value lengths in the form of the command line.
    pub value_sizes: String,
    /// Key distribution; `None` if keys are taken in order.
    pub distribution: Option<&'static str>,
    /// Skew of zipf and latest.
    pub zipf_theta: Option<f64>,
    /// Rate of an open loop, in operations per second; `None` for a closed loop.
    pub rate_ops_s: Option<f64>,
    /// With a rate: how late the next operation would have started at the end.
    pub behind_s: Option<f64>,
    /// With a rate: operations that were due and did not start.
    pub backlog_operations: Option<u64>,
    /// Completed operations after the warm-up.
    pub operations: u64,
    /// Those of them whose key did not exist.
    pub not_found: u64,
    /// Keys in the responses of all lists.
    pub keys_listed: u64,
    /// Pairs that all scans read.
    pub pairs_read: u64,
    /// Stores of the writer beside the workload, which are none of its operations.
    pub writes_beside: u64,
    /// Operations that ended with an error status, which are in no other count and in no latency.
    pub failed: u64,
    /// Whether every value read was verified.
    pub verified: bool,
    /// Seconds from the end of the warm-up to the last response.
    pub elapsed_s: f64,
    /// Operations per second.
    pub throughput_ops_s: f64,
    /// Value bytes per second, in MiB.
    pub throughput_mib_s: f64,
    /// Mean latency of an operation.
    pub latency_us_mean: f64,
    /// Median latency.
    pub latency_us_p50: f64,
    /// 99th percentile of the latency.
    pub latency_us_p99: f64,
    /// 99.9th percentile of the latency.
    pub latency_us_p99_9: f64,
    /// Maximum latency.
    pub latency_us_max: f64,
    /// Engine on files: part of the mean spent waiting for the lock of the file.
    pub file_wait_us_mean: Option<f64>,
    /// Part of the mean spent in pread.
    pub file_read_us_mean: Option<f64>,
    /// Part of the mean spent in pwrite.
    pub file_write_us_mean: Option<f64>,
    /// Part of the mean spent in fsync.
    pub file_sync_us_mean: Option<f64>,
    /// Store in this process: processor time of the process, an operation.
    pub cpu_us_per_operation: Option<f64>,
    /// Reads that the disk of its data completed for an operation, for all processes together.
    pub device_reads_per_operation: Option<f64>,
    /// Writes of the disk, an operation.
    pub device_writes_per_operation: Option<f64>,
    /// Flushes of the disk, an operation.
    pub device_flushes_per_operation: Option<f64>,
    /// Bytes that the disk read, an operation.
    pub device_read_bytes_per_operation: Option<f64>,
    /// Bytes that the disk wrote, an operation.
    pub device_written_bytes_per_operation: Option<f64>,
    /// The largest resident set of the process since its start, in bytes.
    pub resident_bytes_peak: Option<u64>,
    /// Bytes of the store's index at the end: in memory, for RocksDB on the disk.
    pub index_bytes: Option<u64>,
    /// What a log engine in this process did; `None` for other systems.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<LogWork>,
    /// The result of each of several targets; empty for one target.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetResult>,
    /// Interval of the series, in seconds.
    pub series_interval_s: f64,
    /// Throughput and latency by interval.
    pub series: Vec<TimeSeriesPoint>,
    /// The latency distribution, for plots.
    #[serde(skip)]
    pub latency_quantiles: Vec<LatencyQuantile>,
}

/// The result of one of several targets.
#[derive(Clone, Debug, Serialize)]
pub struct TargetResult {
    /// URL of the target.
    pub url: String,
    /// Connections assigned to it.
    pub threads: usize,
    /// Completed operations after the warm-up.
    pub operations: u64,
    /// Those of them whose key did not exist.
    pub not_found: u64,
    /// Operations per second.
    pub throughput_ops_s: f64,
    /// Value bytes per second, in MiB.
    pub throughput_mib_s: f64,
    /// Mean latency of an operation.
    pub latency_us_mean: f64,
    /// 99th percentile of the latency.
    pub latency_us_p99: f64,
}

impl TargetResult {
    /// Builds the result from the recorder of a target.
    pub fn new(url: &str, threads: usize, recorder: &Recorder) -> TargetResult {
        TargetResult {
            url: url.to_owned(),
            threads,
            operations: recorder.found + recorder.missing,
            not_found: recorder.missing,
            throughput_ops_s: recorder.per_second((recorder.found + recorder.missing) as f64),
            throughput_mib_s: recorder.per_second(recorder.value_bytes as f64) / f64::from(1 << 20),
            latency_us_mean: recorder.latency_ns.mean() / 1e3,
            latency_us_p99: recorder.latency_ns.value_at_quantile(0.99) as f64 / 1e3,
        }
    }
}

/// A point of the latency distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyQuantile {
    /// Fraction of the operations that took at most [`LatencyQuantile::latency_us`], 0 to 1.
    pub fraction: f64,
    /// Latency in microseconds.
    pub latency_us: f64,
}

impl WorkloadResult {
    /// Builds the result from the recorders of all workers, merged.
    pub fn new(
        workload: Workload,
        system: &'static str,
        config: &BenchConfig,
        recorder: Recorder,
    ) -> WorkloadResult {
        let operations = recorder.found + recorder.missing;
        let quantile = |fraction: f64| recorder.latency_ns.value_at_quantile(fraction) as f64 / 1e3;
        let distribution = config.distribution_of(workload);
        let (elapsed_s, throughput_ops_s) = (recorder.elapsed_s(), recorder.per_second(operations as f64));
        let throughput_mib_s = recorder.per_second(recorder.value_bytes as f64) / f64::from(1 << 20);
        let (interval, series) = recorder.series.points(recorder.last_response_at);
        let mean_us = |of: fn(&SyscallTimes) -> Nanos| {
            let syscalls = recorder.syscalls.as_ref()?;
            (operations > 0).then(|| of(syscalls).0 as f64 / 1e3 / operations as f64)
        };
        WorkloadResult {
            workload: workload.name(),
            system,
            round: None,
            threads: config.threads,
            depth: config.depth,
            key_bytes: config.key_sizes.fixed_bytes(),
            key_sizes: config.key_sizes.to_string(),
            value_bytes: config.value_sizes.fixed_bytes(),
            value_sizes: config.value_sizes.to_string(),
            distribution: distribution.map(|kind| kind.name()),
            zipf_theta: distribution.filter(|kind| kind.is_skewed()).map(|_| config.zipf_theta),
            rate_ops_s: config.rate,
            behind_s: config.rate.map(|_| recorder.backlog.lag.as_secs_f64()),
            backlog_operations: config.rate.map(|_| recorder.backlog.operations),
            operations,
            not_found: recorder.missing,
            keys_listed: recorder.keys_listed,
            pairs_read: recorder.pairs_read,
            writes_beside: recorder.writes_beside,
            failed: recorder.failed,
            verified: config.verify && (workload.reads_values() || recorder.pairs_read > 0),
            elapsed_s,
            throughput_ops_s,
            throughput_mib_s,
            latency_us_mean: recorder.latency_ns.mean() / 1e3,
            latency_us_p50: quantile(0.5),
            latency_us_p99: quantile(0.99),
            latency_us_p99_9: quantile(0.999),
            latency_us_max: recorder.latency_ns.max() as f64 / 1e3,
            file_wait_us_mean: mean_us(|syscalls| syscalls.wait),
            file_read_us_mean: mean_us(|syscalls| syscalls.read),
            file_write_us_mean: mean_us(|syscalls| syscalls.write),
            file_sync_us_mean: mean_us(|syscalls| syscalls.sync),
            cpu_us_per_operation: None,
            device_reads_per_operation: None,
            device_writes_per_operation: None,
            device_flushes_per_operation: None,
            device_read_bytes_per_operation: None,
            device_written_bytes_per_operation: None,
            resident_bytes_peak: None,
            index_bytes: None,
            log: None,
            targets: Vec::new(),
            series_interval_s: interval.as_secs_f64(),
            series,
            latency_quantiles: quantile_steps(operations)
                .map(|part| LatencyQuantile { fraction: part, latency_us: quantile(part) })
                .collect(),
        }
    }
}

impl WorkloadResult {
    /// Sets what the workload took of the process and of the disk.
    pub(crate) fn set_usage(&mut self, usage: Option<ResourceUsage>) {
        let disk = usage.and_then(|usage| usage.disk);
        self.cpu_us_per_operation = usage.map(|usage| usage.cpu_us);
        self.device_reads_per_operation = disk.map(|disk| disk.reads);
        self.device_writes_per_operation = disk.map(|disk| disk.writes);
        self.device_flushes_per_operation = disk.map(|disk| disk.flushes);
        self.device_read_bytes_per_operation = disk.map(|disk| disk.read_bytes);
        self.device_written_bytes_per_operation = disk.map(|disk| disk.written_bytes);
        self.resident_bytes_peak = usage.and_then(|usage| usage.resident_bytes_peak);
    }
}

/// Fractions for quantiles of this number of operations, ten per decade of the remainder: 0, 0.2, ... 0.9, 0.92, ... 0.99, ...
fn quantile_steps(operations: u64) -> impl Iterator<Item = f64> {
    let steps = (operations.max(1) as f64).log10() * 10.0;
    (0..=steps as u32).map(|step| 1.0 - 10f64.powf(-f64::from(step) / 10.0))
}

const COLUMNS: [(&str, usize); 11] = [
    ("workload", 16),
    ("system", 13),
    ("operations", 11),
    ("seconds", 8),
    ("ops/s", 10),
    ("MiB/s", 8),
    ("mean us", 9),
    ("p50 us", 9),
    ("p99 us", 9),
    ("p99.9 us", 10),
    ("max us", 10),
];

/// The header line of the table.
pub fn table_header() -> String {
    let mut line = format!("{:<16}", COLUMNS[0].0);
    for (name, width) in &COLUMNS[1..] {
        // Writing to a string cannot fail.
        let _ = write!(line, " {name:>width$}");
    }
    line
}

/// The line of a workload.
pub fn table_row(result: &WorkloadResult) -> String {
    let f = result;
    let mut line = format!(
        "{:<16} {:>13} {:>11} {:>8.2} {:>10.0} {:>8.1} {:>9.1} {:>9.1} {:>9.1} {:>10.1} {:>10.1}",
        f.workload,
        f.system,
        f.operations,
        f.elapsed_s,
        f.throughput_ops_s,
        f.throughput_mib_s,
        f.latency_us_mean,
        f.latency_us_p50,
        f.latency_us_p99,
        f.latency_us_p99_9,
        f.latency_us_max
    );
    if f.not_found > 0 {
        let _ = write!(line, "  ({} not found)", f.not_found);
    }
    let beside = [
        (f.keys_listed, "keys listed"),
        (f.pairs_read, "pairs read"),
        (f.writes_beside, "writes beside"),
        (f.failed, "failed"),
    ];
    for (count, what) in beside.into_iter().filter(|(count, _)| *count > 0) {
        let _ = write!(line, "  ({count} {what})");
    }
    if let Some(round) = f.round {
        let _ = write!(line, "  (round {round})");
    }
    if let Some(cpu_us) = f.cpu_us_per_operation {
        let _ = write!(line, "  (an operation: {cpu_us:.1} us of CPU");
        if let (Some(reads), Some(writes)) = (f.device_reads_per_operation, f.device_writes_per_operation) {
            let _ = write!(line, ", {reads:.2} reads, {writes:.2} writes");
        }
        line.push(')');
    }
    if let (Some(rate), Some(behind_s)) = (f.rate_ops_s, f.behind_s) {
        let _ = write!(line, "  (rate {rate}, {behind_s:.3} s behind)");
    }
    line
}

/// The line of one of several targets, below its workload.
pub fn target_row(target: &TargetResult) -> String {
    let t = target;
    let mut line = format!(
        "  {:<28} {:>11} {:>8} {:>10.0} {:>8.1} {:>9.1} {:>9} {:>9.1}  {}",
        format!("{} of the threads", t.threads),
        t.operations,
        "",
        t.throughput_ops_s,
        t.throughput_mib_s,
        t.latency_us_mean,
        "",
        t.latency_us_p99,
        t.url
    );
    if t.not_found > 0 {
        let _ = write!(line, "  ({} not found)", t.not_found);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::OpResult;

    fn sample_result() -> WorkloadResult {
        let (mut one, mut other) = (Recorder::new(Nanos(1_000)), Recorder::new(Nanos(2_000)));
        let op_result = |started, now, found| OpResult {
            started: Nanos(started),
            finished: Nanos(now),
            found,
            value_bytes: if found { 1 << 20 } else { 0 },
            keys_listed: 0,
            pairs_read: 2,
        };
        one.record_op(op_result(0, 999, true)); // In the warm-up: not counted.
        for i in 1..=99u64 {
            one.record_op(op_result(0, i * 1_000, true));
        }
        other.record_op(op_result(1_000_000, 2_001_000, false));
        one.record_write_beside(Nanos(999)); // In the warm-up: not counted.
        one.record_write_beside(Nanos(1_000));
        other.record_write_beside(Nanos(2_000));
        one.record_failed(Nanos(999)); // In the warm-up: not counted.
        other.record_failed(Nanos(2_000));
        one.add(other);
        WorkloadResult::new(Workload::ReadRandom, "kv", &BenchConfig::default(), one)
    }

    #[test]
    fn a_result_adds_up_all_recorders() {
        let f = sample_result();
        assert_eq!((f.operations, f.not_found), (100, 1));
        assert_eq!((f.pairs_read, f.writes_beside, f.failed), (200, 2, 1));
        assert!((f.elapsed_s - 0.002).abs() < 1e-9);
        assert!((f.throughput_ops_s - 50_000.0).abs() < 1e-3);
        assert!((f.throughput_mib_s - 49_500.0).abs() < 1e-3);
        assert!((f.latency_us_p50 - 50.0).abs() < 0.1);
        assert!((f.latency_us_p99 - 99.0).abs() < 0.1);
        assert!((f.latency_us_max / 1_001.0 - 1.0).abs() < 0.001);
    }

    #[test]
    fn syscall_time_is_per_operation_and_only_for_engines_on_files() {
        assert_eq!(sample_result().file_sync_us_mean, None);
        let (mut one, mut other) = (Recorder::new(Nanos(1_000)), Recorder::new(Nanos(1_000)));
        let op_result = OpResult {
            started: Nanos(0),
            finished: Nanos(9_000),
            found: true,
            value_bytes: 1,
            keys_listed: 0,
            pairs_read: 0,
        };
        let syscalls = SyscallTimes { sync: Nanos(6_000), write: Nanos(1_000), ..SyscallTimes::default() };
        for recorder in [&mut one, &mut other] {
            recorder.record_op(op_result);
            recorder.record_syscalls(Nanos(9_000), syscalls);
        }
        one.record_syscalls(Nanos(999), syscalls); // In the warm-up: not counted.
        one.add(other);
        let f = WorkloadResult::new(Workload::FillSequential, "host-kvs", &BenchConfig::default(), one);
        assert_eq!((f.file_sync_us_mean, f.file_write_us_mean), (Some(6.0), Some(1.0)));
        assert_eq!((f.file_read_us_mean, f.file_wait_us_mean), (Some(0.0), Some(0.0)));
    }

    #[test]
    fn quantiles_go_as_far_as_there_are_operations() {
        let f = sample_result();
        let last = f.latency_quantiles.last().unwrap();
        assert_eq!((f.latency_quantiles.len(), f.latency_quantiles[0].fraction), (21, 0.0));
        assert!((last.fraction - 0.99).abs() < 1e-9 && last.latency_us >= 99.0, "{last:?}");
        assert_eq!(quantile_steps(0).count(), 1);
        assert_eq!(f.series.iter().map(|point| point.operations).sum::<u64>(), 100);
    }

    #[test]
    fn table_columns_line_up_with_their_headers() {
        let (head, line) = (table_header(), table_row(&sample_result()));
        let end = |text: &str, of: &str| text.find(of).unwrap() + of.len();
        assert_eq!(end(&head, "operations"), end(&line, " 100"));
        assert_eq!(end(&head, "system"), end(&line, " kv"));
        assert!(line.ends_with("(1 not found)  (200 pairs read)  (2 writes beside)  (1 failed)"), "{line}");
    }
}
