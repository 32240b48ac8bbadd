//! The health of a device that several cores use: whether it has failed, and what it did.
//!
//! In: the outcome and the latency of each operation ([`super::supervised`]). Out: the failure, if there is one, and counters. A failed device stays failed until it is opened
//! again: which of the writes in flight it has is not known.
//!
//! | failure | when |
//! | --- | --- |
//! | [`DeviceFailure::TimedOut`] | no operation of the device ends on a core for the timeout and its grace, or one does not end within [`TIMEOUTS_MAX`](super::supervised::TIMEOUTS_MAX) timeouts |
//! | [`DeviceFailure::Removed`] | an operation fails with an error that says that there is no device any more |
//! | [`DeviceFailure::Failing`] | for as long as the timeout every operation failed, [`FAILURES_MIN`] at least |
//!
//! An error of one block is no failure of the device: others succeed beside it, and however often it is read again, it counts once. Nor is an error of the medium. Tested in `tests/supervised.rs`.

use crate::DeviceError;
use octokv_base::Nanos;
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The fewest [`DeviceError::Io`] in a row for which a device counts as failed. Reads, writes and flushes that succeed end a row.
pub const FAILURES_MIN: u64 = 16;
/// Shards of the counters, each in cache lines of its own; cores beyond this number share one.
const SHARDS: usize = 16;

/// ENODATA and EILSEQ: blocks that are lost while the device works.
const MEDIA_CODES: [i32; 2] = [61, 84];
/// ENXIO, ENODEV, ESHUTDOWN.
const GONE_CODES: [i32; 3] = [6, 19, 108];

/// Why a device has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFailure {
    /// An operation hung. With the timeout, not the time waited.
    #[error("an operation hung: the timeout is {} s", .0.0 as f64 / 1e9)]
    TimedOut(Nanos),
    /// The device is gone, with this system error code.
    #[error("the device is gone: {}", std::io::Error::from_raw_os_error(*.0))]
    Removed(i32),
    /// Every operation failed for this time.
    #[error("all operations failed for {} s, the last one with: {last}", .span.0 as f64 / 1e9)]
    Failing {
        /// From the first failure to the last.
        span: Nanos,
        /// The last error.
        last: DeviceError,
    },
}

/// The kinds of operations that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A deallocation.
    Trim,
}

/// The operations of one kind that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationLoad {
    /// Their number.
    pub operations: u64,
    /// The bytes that they transferred.
    pub bytes: u64,
    /// The sum of their latencies, from submission to completion.
    pub latency_total: Nanos,
    /// The longest of them.
    pub latency_max: Nanos,
}

impl OperationLoad {
    /// The mean latency; zero without operations.
    pub fn latency_mean(&self) -> Nanos {
        Nanos(self.latency_total.0.checked_div(self.operations).unwrap_or(0))
    }
}

/// What a device did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLoad {
    /// Reads.
    pub reads: OperationLoad,
    /// Writes.
    pub writes: OperationLoad,
    /// Flushes.
    pub flushes: OperationLoad,
    /// Operations that failed since the device was opened, without those that hung.
    pub errors: u64,
    /// Operations that have not ended.
    pub in_flight: u64,
}

#[derive(Default)]
struct KindCounters {
    operations: AtomicU64,
    bytes: AtomicU64,
    latency: AtomicU64,
    latency_max: AtomicU64,
}

impl KindCounters {
    fn add_to(&self, sum: &mut OperationLoad) {
        sum.operations += self.operations.load(Ordering::Relaxed);
        sum.bytes += self.bytes.load(Ordering::Relaxed);
        sum.latency_total = sum.latency_total + Nanos(self.latency.load(Ordering::Relaxed));
        sum.latency_max = sum.latency_max.max(Nanos(self.latency_max.load(Ordering::Relaxed)));
    }
}

/// The counters of some cores, in cache lines of their own.
#[derive(Default)]
#[repr(align(64))]
struct CounterShard {
    /// Reads, writes, flushes, deallocations.
    kinds: [KindCounters; 4],
    started: AtomicU64,
    ended: AtomicU64,
    errors: AtomicU64,
}

/// Failures without a success between them.
#[derive(Clone, Copy)]
struct FailureRun {
    since: Nanos,
    count: u64,
    /// The last of them: its time, and its first block.
    last: (Nanos, u64),
    /// The successes when it began.
    successes: u64,
}

/// The health of one device, shared by all cores.
#[derive(Default)]
pub struct DeviceHealth {
    failure: OnceLock<DeviceFailure>,
    shards: [CounterShard; SHARDS],
    failures: Mutex<Option<FailureRun>>,
    /// Cores that use it.
    cores: AtomicUsize,
    is_reported: AtomicBool,
}

impl DeviceHealth {
    /// Why the device has failed, if it has.
    pub fn failure(&self) -> Option<DeviceFailure> {
        self.failure.get().copied()
    }

    /// The failure, to the first caller that asks for it: to be reported once.
    pub fn take_unreported(&self) -> Option<DeviceFailure> {
        let failure = self.failure()?;
        (!self.is_reported.swap(true, Ordering::Relaxed)).then_some(failure)
    }

    /// What the device did.
    pub fn load(&self) -> DeviceLoad {
        let mut load = DeviceLoad::default();
        for shard in &self.shards {
            let [reads, writes, flushes, _] = &shard.kinds;
            for (kind, sum) in
                [(reads, &mut load.reads), (writes, &mut load.writes), (flushes, &mut load.flushes)]
            {
                kind.add_to(sum);
            }
            load.errors += shard.errors.load(Ordering::Relaxed);
            let ended = shard.ended.load(Ordering::Relaxed);
            load.in_flight += shard.started.load(Ordering::Relaxed).saturating_sub(ended);
        }
        load
    }

    /// Notes that the device has failed. The first failure stays.
    pub(crate) fn fail(&self, failure: DeviceFailure) {
        self.failure.get_or_init(|| failure);
    }

    /// The number of a core that begins to use the device.
    pub(crate) fn add_core(&self) -> usize {
        self.cores.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that an operation of a core begins.
    pub(crate) fn note_start(&self, core: usize) {
        self.shards[core % SHARDS].started.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that an operation of a core ended, or was given up.
    pub(crate) fn note_end(&self, core: usize) {
        self.shards[core % SHARDS].ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes an operation that succeeded.
    pub(crate) fn note_success(&self, core: usize, kind: OperationKind, bytes: u64, latency: Nanos) {
        let kind = &self.shards[core % SHARDS].kinds[kind as usize];
        kind.operations.fetch_add(1, Ordering::Relaxed);
        kind.bytes.fetch_add(bytes, Ordering::Relaxed);
        kind.latency.fetch_add(latency.0, Ordering::Relaxed);
        kind.latency_max.fetch_max(latency.0, Ordering::Relaxed);
    }

    /// The operations that succeeded, on all cores.
    pub(crate) fn successes(&self) -> u64 {
        let of_shard = |shard: &CounterShard| {
            shard.kinds.iter().map(|kind| kind.operations.load(Ordering::Relaxed)).sum::<u64>()
        };
        self.shards.iter().map(of_shard).sum()
    }

    /// Notes an operation from a block on that failed at a time, and gives the failure of the device that follows from it.
    pub(crate) fn note_error(
        &self,
        core: usize,
        (now, block): (Nanos, u64),
        timeout: Nanos,
        error: DeviceError,
    ) -> Option<DeviceFailure> {
        self.shards[core % SHARDS].errors.fetch_add(1, Ordering::Relaxed);
        let DeviceError::Io(code) = error else { return None };
        if MEDIA_CODES.contains(&code) {
            return None;
        }
        if GONE_CODES.contains(&code) {
            return Some(DeviceFailure::Removed(code));
        }
        let successes = self.successes();
        let mut failures = self.failures.lock();
        // Errors with a pause between them, in which nothing was tried, are no row.
        let is_row = |run: &FailureRun| run.successes == successes && now.since(run.last.0) <= timeout;
        let mut run = failures.filter(is_row).unwrap_or(FailureRun {
            since: now,
            count: 1,
            last: (now, block),
            successes,
        });
        run.count += u64::from(run.last.1 != block);
        run.last = (now, block);
        *failures = Some(run);
        let span = now.since(run.since);
        (run.count >= FAILURES_MIN && span >= timeout).then_some(DeviceFailure::Failing { span, last: error })
    }
}
