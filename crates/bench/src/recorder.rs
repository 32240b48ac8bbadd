//! The recorder of a worker: counters, a latency histogram and a time series; recorders of workers merge.
//! Invariant: recording an operation does not allocate.

use crate::arrival_schedule::Backlog;
use crate::syscall_timing::SyscallTimes;
use crate::time_series::TimeSeries;
use hdrhistogram::Histogram;
use octokv_base::Nanos;

/// Upper bound of the histogram, in nanoseconds; longer latencies are recorded as this one.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// A completed operation.
#[derive(Clone, Copy, Debug)]
pub struct OpResult {
    /// When it was submitted, or was due with a rate.
    pub started: Nanos,
    /// When its response was delivered.
    pub finished: Nanos,
    /// Whether the key existed, or exists now.
    pub found: bool,
    /// Value bytes read and written.
    pub value_bytes: u64,
    /// Keys in the response of a list; 0 for other operations.
    pub keys_listed: u64,
    /// Pairs that a scan read; 0 for other operations.
    pub pairs_read: u64,
}

/// Counters, latencies and time series of one worker or of several.
pub struct Recorder {
    pub(crate) start: Nanos,
    pub(crate) last_response_at: Nanos,
    pub(crate) found: u64,
    pub(crate) missing: u64,
    pub(crate) value_bytes: u64,
    pub(crate) keys_listed: u64,
    pub(crate) pairs_read: u64,
    pub(crate) writes_beside: u64,
    pub(crate) failed: u64,
    pub(crate) latency_ns: Histogram<u64>,
    pub(crate) backlog: Backlog,
    pub(crate) series: TimeSeries,
    /// Only for an engine on files.
    pub(crate) syscalls: Option<SyscallTimes>,
}

impl Recorder {
    /// Creates a recorder of operations that complete at `start` or later.
    pub fn new(start: Nanos) -> Recorder {
        Recorder {
            start,
            last_response_at: start,
            found: 0,
            missing: 0,
            value_bytes: 0,
            keys_listed: 0,
            pairs_read: 0,
            writes_beside: 0,
            failed: 0,
            latency_ns: Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are valid"),
            backlog: Backlog::default(),
            series: TimeSeries::new(start),
            syscalls: None,
        }
    }

    /// Records a completed operation.
    #[inline]
    pub fn record_op(&mut self, result: OpResult) {
        let OpResult { started, finished: now, found, value_bytes, keys_listed, pairs_read } = result;
        if now < self.start {
            return;
        }
        self.last_response_at = self.last_response_at.max(now);
        let latency = now.since(started);
        self.latency_ns.saturating_record(latency.0);
        self.series.record(now, latency);
        self.value_bytes += value_bytes;
        self.keys_listed += keys_listed;
        self.pairs_read += pairs_read;
        if found {
            self.found += 1;
        } else {
            self.missing += 1;
        }
    }

    /// Records a store of the writer beside a workload, completed at `now`. It is no operation of the workload.
    #[inline]
    pub fn record_write_beside(&mut self, now: Nanos) {
        if now >= self.start {
            self.writes_beside += 1;
        }
    }

    /// Records an operation that ended with an error status at `now`. It is in no other count, and in no latency.
    #[inline]
    pub fn record_failed(&mut self, now: Nanos) {
        if now >= self.start {
            self.failed += 1;
        }
    }

    /// Records the time that an operation completed at `now` spent in system calls.
    #[inline]
    pub fn record_syscalls(&mut self, now: Nanos, syscalls: SyscallTimes) {
        if now >= self.start {
            self.syscalls.get_or_insert_default().add(syscalls);
        }
    }

    /// Seconds from `start` to the last response.
    pub fn elapsed_s(&self) -> f64 {
        self.last_response_at.since(self.start).as_secs_f64()
    }

    /// `amount` per second of that time; 0 if no time has passed.
    pub fn per_second(&self, amount: f64) -> f64 {
        let elapsed_s = self.elapsed_s();
        if elapsed_s > 0.0 { amount / elapsed_s } else { 0.0 }
    }

    /// Sets the backlog at the end of an open loop.
    pub fn set_backlog(&mut self, backlog: Backlog) {
        self.backlog = backlog;
    }

    /// Adds the recorder of another worker of the same run.
    pub fn add(&mut self, other: Recorder) {
        self.start = self.start.min(other.start);
        self.last_response_at = self.last_response_at.max(other.last_response_at);
        self.found += other.found;
        self.missing += other.missing;
        self.value_bytes += other.value_bytes;
        self.keys_listed += other.keys_listed;
        self.pairs_read += other.pairs_read;
        self.writes_beside += other.writes_beside;
        self.failed += other.failed;
        self.latency_ns.add(&other.latency_ns).expect("both have the same bounds");
        self.backlog.add(other.backlog);
        self.series.add(other.series);
        if let Some(syscalls) = other.syscalls {
            self.syscalls.get_or_insert_default().add(syscalls);
        }
    }
}
