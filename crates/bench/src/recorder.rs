//! What one worker, or all together, counted: answers, latencies, bytes, and the same over time.
//! Invariant: counting an operation does not allocate.

use crate::arrival_schedule::Backlog;
use crate::syscall_timing::SyscallTimes;
use crate::time_series::TimeSeries;
use hdrhistogram::Histogram;
use octokv_base::Nanos;

/// The longest latency that is told apart from longer ones, in nanoseconds.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// One operation, answered.
#[derive(Clone, Copy, Debug)]
pub struct OpResult {
    /// When it began, or was meant to begin.
    pub started: Nanos,
    /// When its answer was handed over.
    pub finished: Nanos,
    /// Whether the key was there, or is now.
    pub found: bool,
    /// Value bytes that it moved.
    pub value_bytes: u64,
    /// Keys that it listed.
    pub keys_listed: u64,
}

/// What was counted.
pub struct Recorder {
    pub(crate) start: Nanos,
    pub(crate) last_response_at: Nanos,
    pub(crate) found: u64,
    pub(crate) missing: u64,
    pub(crate) value_bytes: u64,
    pub(crate) keys_listed: u64,
    pub(crate) latency_ns: Histogram<u64>,
    pub(crate) backlog: Backlog,
    pub(crate) series: TimeSeries,
    /// Where the engine works on files.
    pub(crate) syscalls: Option<SyscallTimes>,
}

impl Recorder {
    /// Counts operations that are answered from then on.
    pub fn new(start: Nanos) -> Recorder {
        Recorder {
            start,
            last_response_at: start,
            found: 0,
            missing: 0,
            value_bytes: 0,
            keys_listed: 0,
            latency_ns: Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("bounds that make sense"),
            backlog: Backlog::default(),
            series: TimeSeries::new(start),
            syscalls: None,
        }
    }

    /// An operation was answered.
    #[inline]
    pub fn record_op(&mut self, answered: OpResult) {
        let OpResult { started, finished: now, found, value_bytes, keys_listed } = answered;
        if now < self.start {
            return;
        }
        self.last_response_at = self.last_response_at.max(now);
        let latency = now.since(started);
        self.latency_ns.saturating_record(latency.0);
        self.series.record(now, latency);
        self.value_bytes += value_bytes;
        self.keys_listed += keys_listed;
        if found {
            self.found += 1;
        } else {
            self.missing += 1;
        }
    }

    /// An operation that was answered at `now` spent so much in calls.
    #[inline]
    pub fn record_syscalls(&mut self, now: Nanos, syscalls: SyscallTimes) {
        if now >= self.start {
            self.syscalls.get_or_insert_default().add(syscalls);
        }
    }

    /// From the first counted moment to the last answer, in seconds.
    pub fn elapsed_s(&self) -> f64 {
        self.last_response_at.since(self.start).as_secs_f64()
    }

    /// So much over that time, per second; 0 where no time has passed.
    pub fn per_second(&self, amount: f64) -> f64 {
        let elapsed_s = self.elapsed_s();
        if elapsed_s > 0.0 { amount / elapsed_s } else { 0.0 }
    }

    /// The open loop ended so far behind.
    pub fn set_backlog(&mut self, backlog: Backlog) {
        self.backlog = backlog;
    }

    /// Adds what another worker counted at the same time.
    pub fn add(&mut self, other: Recorder) {
        self.start = self.start.min(other.start);
        self.last_response_at = self.last_response_at.max(other.last_response_at);
        self.found += other.found;
        self.missing += other.missing;
        self.value_bytes += other.value_bytes;
        self.keys_listed += other.keys_listed;
        self.latency_ns.add(&other.latency_ns).expect("both have the same bounds");
        self.backlog.add(other.backlog);
        self.series.add(other.series);
        if let Some(syscalls) = other.syscalls {
            self.syscalls.get_or_insert_default().add(syscalls);
        }
    }
}
