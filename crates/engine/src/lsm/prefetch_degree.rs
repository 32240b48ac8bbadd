//! How many values an iterator reads ahead of its consumer (value prefetch, IterKVSSD), and the memory that all iterators of a volume may hold for it. Pure.
//!
//! A value that is read D values ahead has D times the consumer's work between two values until it is needed. So the arithmetic is:
//!
//! ```text
//!   needed   latency ÷ work between two values, rounded up, + 1      hides the latency, if the device reads that much at once
//!   useful   3 × (least latency ÷ interval, rounded up, + 1)         three times what the device has kept in flight (Little's law)
//!   earned   start × 2 for each value consumed in order              small for a consumer that stops after a few
//!   D        the least of these, of 64, and of bytes_max ÷ bytes of a value
//! ```
//! The interval includes the time for which the consumer waited, the work does not: they differ while the degree is too low, or the device is
//! saturated. In the first case the interval falls when the degree rises, and `useful` triples; in the second it does not, and `useful` keeps the queue of the device short:
//! its least latency is that of a read that did not queue. Three times, since values are taken in order: the slowest read of many counts.
//!
//! When a read takes as many times the least latency as there are rounds, the queue is full. If the device serves all its reads alike, the second and the third
//! round gain nothing, and are lost at the end of the scan, where the next scan waits for them. If latencies vary, or values share channels at random, they keep the device
//! busy. A trial tells: from there on the scan does with one round and a value for `CONSUMED_FOR_QUEUED` that were consumed, so that it reads in vain a small
//! part of itself. If its values then come slower, it has all rounds again, and so have later scans, until the next probe.
//!
//! On a saturated device no read of a scan has that least latency: each queues behind D of its own, and the first ones behind those that the scan before
//! read in vain. The least latency in sight is then D intervals, which asks for three times D. So it is taken from [`ScanHistory`], over the scans of the volume, by the
//! length of the values. What never grows would be wrong for ever after one read that a cache of the device served, or once the device is slower. So one scan in
//! [`PROBE_SCANS`] measures it anew: it reads nothing ahead for [`PROBE_VALUES`] values, and so empties the queue first (as BBR's
//! ProbeRTT does: Cardwell and others, ACM Queue 14, 2016).
//!
//! Latency is the smoothed mean and twice its deviation (RFC 6298 has 4 for a timeout).
//!
//! D rises at once, and falls by one for each [`FALL_VALUES`] consumed values. A wait although D is as high as needed adds one until waits end: intervals may vary.
//!
//! The expected length of a scan, in values, follows that of earlier scans ([`LengthEstimate`]). Up to the expected end, D is at most the number of values left to it. Behind it, D is at most the
//! number of values that the scan has taken since, or one for [`CONSUMED_FOR_ONE_AHEAD`] values, if that is more. So a scan of ten values reads ten, whatever their latency asks for, and one that is longer than expected
//! reads less in vain than it has read in use.
//!
//! A scan without a past starts with [`COLD_START`]. Its first latency passes before anything is known of the consumer, so a short scan costs up to twice
//! the time of the best degree. [`ScanHistory`] gives later scans of the same volume the start with which earlier ones would have been best, and none where scans end at once.
//!
//! In: of each consumed value, when it was wanted, had and read. Out: the degree. Invariants: the degree is at most [`DEGREE_MAX`]; the bytes of all grants of a
//! [`PrefetchBudget`] never exceed it. Tested in `prefetch_degree_tests.rs`, in a closed loop with a device and a consumer.

use super::length_estimate::LengthEstimate;
use octokv_base::Nanos;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The highest degree, in values.
pub const DEGREE_MAX: u32 = 64;
/// The degree with which a scan starts if nothing is known of earlier ones.
pub const COLD_START: u32 = 2;
/// The number of consumed values after which the degree falls by one, if a lower one is enough.
pub const FALL_VALUES: u32 = 8;
/// The number of scans after which one measures the least latency anew: its [`PROBE_VALUES`] waits are then few, also beside scans of ten values.
pub const PROBE_SCANS: u32 = 64;
/// The values that such a scan reads one after another: the first behind what an earlier scan left, the others behind nothing of this iterator.
pub const PROBE_VALUES: u64 = 3;
/// The rounds of `useful`: three times what the device has kept in flight.
const ROUNDS: u32 = 3;
/// The values over which intervals with and without the queue are compared, at least.
const TRIAL_VALUES: u64 = 32;
/// Consumed values for each one that may queue behind the first round, so that 3 % of a scan are read in vain at most.
const CONSUMED_FOR_QUEUED: u64 = 32;
/// Behind its expected end a scan reads one value ahead for so many that it took, or more.
pub const CONSUMED_FOR_ONE_AHEAD: u64 = 16;
/// What one iterator reads ahead at most, in bytes, if that is more than one value.
pub const ITERATOR_BYTES_MAX: u64 = 4 << 20;

/// A mean that follows its samples by an eighth of the difference (RFC 6298).
#[derive(Clone, Copy, Debug, Default)]
struct SmoothedMean {
    /// In eighths.
    eighths: Option<u64>,
}

impl SmoothedMean {
    fn add(&mut self, sample: u64) {
        let sample = sample.min(u64::MAX >> 8);
        self.eighths = Some(self.eighths.map_or(sample * 8, |mean| mean - mean / 8 + sample));
    }

    fn get(&self) -> Option<u64> {
        self.eighths.map(|mean| mean / 8)
    }
}

/// The least latency of reads by the length of what they read, in classes of a factor of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeastLatencies {
    /// In nanoseconds; `u32::MAX` where none was measured, or none below 4.3 s.
    by_class: [u32; LeastLatencies::CLASSES],
}

impl LeastLatencies {
    const UNKNOWN: u32 = u32::MAX;
    /// Of longer values than [`ITERATOR_BYTES_MAX`], one is read ahead whatever their latency.
    const CLASSES: usize = ITERATOR_BYTES_MAX.ilog2() as usize + 1;
    const NONE: LeastLatencies =
        LeastLatencies { by_class: [LeastLatencies::UNKNOWN; LeastLatencies::CLASSES] };

    fn class(bytes: u64) -> usize {
        (bytes.max(1).ilog2() as usize).min(LeastLatencies::CLASSES - 1)
    }

    fn note(&mut self, bytes: u64, latency_ns: u64) {
        let least = &mut self.by_class[LeastLatencies::class(bytes)];
        *least = (*least).min(u32::try_from(latency_ns).unwrap_or(LeastLatencies::UNKNOWN));
    }

    fn of(&self, bytes: u64) -> u64 {
        u64::from(self.by_class[LeastLatencies::class(bytes)])
    }
}

/// What is known of a value that a consumer took.
#[derive(Clone, Copy, Debug)]
pub struct ConsumedValue {
    /// For how long the consumer waited for it; zero if it was there.
    pub waited: Nanos,
    /// The time since the consumer took the preceding value, the wait included; `None` for the first one after a seek.
    pub interval: Option<Nanos>,
    /// How long its read took; `None` if there was none (a value in the table or in memory).
    pub latency: Option<Nanos>,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Whether more than one round of reads gains anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueTrial {
    /// So many values were consumed while the queue was full, and took this time together.
    With { values: u64, time: u64 },
    /// The scan has done without the queue for so many values, which took this time together.
    Without { interval_before: u64, values: u64, time: u64 },
    /// Without it values came slower.
    Needed,
}

impl QueueTrial {
    const NOT_FULL: QueueTrial = QueueTrial::With { values: 0, time: 0 };

    fn note(&mut self, interval: u64, is_full: bool) {
        match self {
            QueueTrial::With { values, time } if is_full => {
                *values += 1;
                *time = time.saturating_add(interval);
                if *values == TRIAL_VALUES {
                    let interval_before = *time / TRIAL_VALUES;
                    *self = QueueTrial::Without { interval_before, values: 0, time: 0 };
                }
            }
            QueueTrial::Without { interval_before, values, time } => {
                *values += 1;
                *time = time.saturating_add(interval);
                // An eighth: less is luck.
                if *values >= TRIAL_VALUES && *time / *values > *interval_before + *interval_before / 8 {
                    *self = QueueTrial::Needed;
                }
            }
            QueueTrial::With { .. } | QueueTrial::Needed => {}
        }
    }
}

/// How the degree of an iterator is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchMode {
    /// Always this one, up to [`DEGREE_MAX`].
    Fixed(u32),
    /// By what is measured.
    Adaptive,
}

/// The degree of one scan: the values from one seek on.
#[derive(Clone, Debug)]
pub struct PrefetchDegree {
    mode: PrefetchMode,
    /// The degree by latency and consumption, before the bound by the expected length.
    degree: u32,
    start: u32,
    /// The values of the scan, by those before it; `None` if there were none, or the degree is fixed.
    expected: Option<u32>,
    /// How much the consumer has earned by going on.
    earned: u32,
    consumed: u64,
    interval: SmoothedMean,
    work: SmoothedMean,
    latency: SmoothedMean,
    deviation: SmoothedMean,
    /// Of this scan and those before it.
    least: LeastLatencies,
    queue: QueueTrial,
    /// Whether it measures the least latency anew.
    is_probe: bool,
    bytes: SmoothedMean,
    /// Added for waits that the means do not explain.
    slack: u32,
    /// Consumed values since the degree was found too high, or since the consumer waited.
    unneeded: u32,
    /// What the means ask for, whatever was earned.
    wanted: u32,
}

impl PrefetchDegree {
    /// The degree at the begin of a scan.
    pub fn new(mode: PrefetchMode, history: &ScanHistory) -> PrefetchDegree {
        let start = match mode {
            PrefetchMode::Fixed(degree) => degree.min(DEGREE_MAX),
            PrefetchMode::Adaptive => history.start,
        };
        let is_probe = mode == PrefetchMode::Adaptive && history.scans_since_probe >= PROBE_SCANS;
        PrefetchDegree {
            mode,
            degree: if is_probe { 0 } else { start },
            start,
            expected: history.lengths.expected().filter(|_| mode == PrefetchMode::Adaptive),
            earned: start,
            consumed: 0,
            interval: SmoothedMean::default(),
            work: SmoothedMean::default(),
            latency: SmoothedMean::default(),
            deviation: SmoothedMean::default(),
            least: if is_probe { LeastLatencies::NONE } else { history.least },
            queue: if is_probe || !history.needs_queue { QueueTrial::NOT_FULL } else { QueueTrial::Needed },
            is_probe,
            bytes: SmoothedMean::default(),
            slack: 0,
            unneeded: 0,
            wanted: start,
        }
    }

    /// How many values to have, or to be reading, behind the one that the consumer has.
    pub fn degree(&self) -> u32 {
        self.degree.min(self.ahead_max())
    }

    /// How many values to have behind the next one at most, by the expected end of the scan.
    fn ahead_max(&self) -> u32 {
        let Some(expected) = self.expected.map(u64::from) else { return u32::MAX };
        let taken = self.consumed + 1;
        let ahead = expected.abs_diff(taken).max(taken / CONSUMED_FOR_ONE_AHEAD);
        u32::try_from(ahead).unwrap_or(u32::MAX)
    }

    /// Values that the consumer took.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Notes that the consumer took a value, in the order of the scan, and gives the new degree.
    pub fn consume(&mut self, value: &ConsumedValue) -> u32 {
        self.consumed += 1;
        if self.mode == PrefetchMode::Adaptive {
            self.adapt(value);
        }
        self.degree()
    }

    fn adapt(&mut self, value: &ConsumedValue) {
        self.measure(value);
        if self.consumed > 1 {
            self.earned = (self.earned.max(1) * 2).min(DEGREE_MAX);
        }
        if self.is_probe && self.consumed < PROBE_VALUES {
            return;
        }
        let is_waiting = value.waited > Nanos(0);
        let Some((needed, useful)) = self.needed_and_useful() else { return };
        if is_waiting && self.degree >= needed + self.slack {
            self.slack = (self.slack + 1).min(needed);
        }
        self.wanted = (needed + self.slack).min(useful).min(self.values_max());
        let target = self.wanted.min(self.earned.max(self.start));
        if target > self.degree {
            (self.degree, self.unneeded) = (target, 0);
        } else if target < self.degree || (self.slack > 0 && !is_waiting) {
            self.unneeded += 1;
            if self.unneeded == FALL_VALUES {
                self.unneeded = 0;
                self.slack = self.slack.saturating_sub(1);
                self.degree = target.max(self.degree - 1);
            }
        } else {
            self.unneeded = 0;
        }
        // Memory is not given up slowly, nor is a queue.
        self.degree = self.degree.min(self.values_max());
        if let QueueTrial::Without { .. } = self.queue {
            self.degree = self.degree.min(useful);
        }
    }

    fn measure(&mut self, value: &ConsumedValue) {
        self.bytes.add(value.bytes);
        if let Some(Nanos(interval)) = value.interval {
            self.interval.add(interval);
            self.work.add(interval.saturating_sub(value.waited.0));
        }
        if let Some(Nanos(latency)) = value.latency {
            let mean = self.latency.get().unwrap_or(latency);
            self.deviation.add(latency.abs_diff(mean));
            self.latency.add(latency);
            self.least.note(self.mean_bytes(), latency);
        }
        if let (Some(Nanos(interval)), Some(latency)) = (value.interval, self.latency.get()) {
            self.queue.note(interval, latency / u64::from(ROUNDS) >= self.least.of(self.mean_bytes()));
        }
    }

    fn mean_bytes(&self) -> u64 {
        self.bytes.get().unwrap_or(0).max(1)
    }

    /// How many values hide the latency, and how many the device can be expected to read at once. `None` before the second value, and
    /// without reads.
    fn needed_and_useful(&self) -> Option<(u32, u32)> {
        let latency = self.latency.get()? + 2 * self.deviation.get()?;
        let in_time =
            |latency: u64, time: u64| latency.div_ceil(time.max(1)).min(u64::from(DEGREE_MAX)) as u32 + 1;
        let needed = in_time(latency, self.work.get()?).min(DEGREE_MAX);
        let least_latency = self.least.of(self.mean_bytes());
        let round = in_time(least_latency, self.interval.get()?);
        let behind_round = match self.queue {
            QueueTrial::Without { .. } => {
                u32::try_from(self.consumed / CONSUMED_FOR_QUEUED).unwrap_or(u32::MAX)
            }
            QueueTrial::With { .. } | QueueTrial::Needed => u32::MAX,
        };
        let useful = round + behind_round.min((ROUNDS - 1) * round);
        Some((needed, useful.min(DEGREE_MAX)))
    }

    /// The values in [`ITERATOR_BYTES_MAX`], at least one.
    fn values_max(&self) -> u32 {
        (ITERATOR_BYTES_MAX / self.mean_bytes()).clamp(1, u64::from(DEGREE_MAX)) as u32
    }
}

/// What earlier scans of a volume, on one core, say about the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanHistory {
    start: u32,
    lengths: LengthEstimate,
    least: LeastLatencies,
    needs_queue: bool,
    scans_since_probe: u32,
}

impl Default for ScanHistory {
    fn default() -> ScanHistory {
        ScanHistory {
            start: COLD_START,
            lengths: LengthEstimate::default(),
            least: LeastLatencies::NONE,
            needs_queue: false,
            scans_since_probe: 0,
        }
    }
}

impl ScanHistory {
    /// The degree with which the next scan starts.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Notes a scan that ended: at the next seek, or with the iterator. The start doubles up to what the scan could have used; it falls to a quarter
    /// if the scan ended before. So where short scans are as frequent as long ones it stays low: a long scan loses one latency by that, a
    /// short one reads values in vain.
    pub fn end_scan(&mut self, scan: &PrefetchDegree) {
        if scan.mode != PrefetchMode::Adaptive || scan.consumed == 0 {
            return;
        }
        self.note_latencies(scan);
        self.lengths.add(u32::try_from(scan.consumed).unwrap_or(u32::MAX));
        let behind_first = u32::try_from(scan.consumed - 1).unwrap_or(u32::MAX);
        self.start = if behind_first < scan.start {
            behind_first.max(scan.start / 4)
        } else {
            let doubled = (scan.start.max(1) * 2).min(behind_first);
            // Before two values are consumed, nothing is wanted.
            if scan.consumed > 1 { doubled.min(scan.wanted) } else { self.start }
        };
    }

    fn note_latencies(&mut self, scan: &PrefetchDegree) {
        self.scans_since_probe = if scan.is_probe { 0 } else { self.scans_since_probe.saturating_add(1) };
        self.needs_queue = scan.queue == QueueTrial::Needed || (self.needs_queue && !scan.is_probe);
        // A probe that ended before it was one has measured what lay in the queue.
        let replaces = scan.is_probe && scan.consumed >= PROBE_VALUES;
        for (known, measured) in self.least.by_class.iter_mut().zip(scan.least.by_class) {
            if replaces && measured != LeastLatencies::UNKNOWN {
                *known = measured;
            } else {
                *known = measured.min(*known);
            }
        }
    }
}

/// The bytes that the iterators of a volume hold ahead of their consumers, on all cores.
#[derive(Debug)]
pub struct PrefetchBudget {
    bytes_max: u64,
    taken: AtomicU64,
}

impl PrefetchBudget {
    /// A budget of which nothing is taken.
    pub fn new(bytes_max: u64) -> Arc<PrefetchBudget> {
        Arc::new(PrefetchBudget { bytes_max, taken: AtomicU64::new(0) })
    }

    /// Takes bytes for a value that is read ahead; `None` if they are not there: it is read when the consumer wants it.
    pub fn take(self: &Arc<PrefetchBudget>, bytes: u64) -> Option<PrefetchGrant> {
        let add = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= self.bytes_max);
        // The count orders nothing else.
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(PrefetchGrant { budget: Arc::clone(self), bytes })
    }

    /// The bytes of all grants.
    pub fn taken_bytes(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The most bytes of all grants.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }
}

/// Bytes of a [`PrefetchBudget`], which go back when it is dropped.
#[derive(Debug)]
pub struct PrefetchGrant {
    budget: Arc<PrefetchBudget>,
    bytes: u64,
}

impl PrefetchGrant {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PrefetchGrant {
    fn drop(&mut self) {
        let taken = self.budget.taken.fetch_sub(self.bytes, Ordering::Relaxed);
        assert!(taken >= self.bytes, "{taken} bytes are taken, {} come back", self.bytes);
    }
}
