//! The rate of a volume's scrub, and what it has found ([`super::scrub`]).
//!
//! In: what a pass reads and finds. Out: statistics. Invariant: damage is that of the last pass, or of the one under way if this has found more.
//! Tested in `tests/log_scrub.rs`.

use crate::log_statistics::ScrubStatistics;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the scrub of a volume may do, and what it found.
#[derive(Debug, Default)]
pub(super) struct ScrubState {
    /// The bytes that it reads in a second; 0 for no scrub.
    per_second: AtomicU64,
    passes: AtomicU64,
    read_bytes: AtomicU64,
    skipped_segments: AtomicU64,
    /// Of the pass under way, and of the last one that ended.
    damaged_buckets: [AtomicU64; 2],
    damaged_values: [AtomicU64; 2],
}

impl ScrubState {
    /// Sets the bytes that it reads in a second.
    pub(super) fn set_rate(&self, bytes_per_second: u64) {
        self.per_second.store(bytes_per_second, Ordering::Relaxed);
    }

    /// The bytes that it reads in a second.
    pub(super) fn rate(&self) -> u64 {
        self.per_second.load(Ordering::Relaxed)
    }

    /// Ends a pass: its damage counts become those of the last pass, and the next pass begins at 0.
    pub(super) fn end_pass(&self) {
        for [current, last] in [&self.damaged_buckets, &self.damaged_values] {
            last.store(current.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
        self.passes.fetch_add(1, Ordering::Relaxed);
    }

    /// The damaged places that the pass under way has found.
    pub(super) fn found(&self) -> u64 {
        self.damaged_buckets[0].load(Ordering::Relaxed) + self.damaged_values[0].load(Ordering::Relaxed)
    }

    /// The current statistics.
    pub(super) fn statistics(&self) -> ScrubStatistics {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let most = |[current, last]: &[AtomicU64; 2]| load(current).max(load(last));
        ScrubStatistics {
            passes: load(&self.passes),
            read_bytes: load(&self.read_bytes),
            skipped_segments: load(&self.skipped_segments),
            damaged_buckets: most(&self.damaged_buckets),
            damaged_values: most(&self.damaged_values),
        }
    }

    /// Counts bytes that were read.
    pub(super) fn add_read_bytes(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a segment that could not be verified.
    pub(super) fn add_skipped_segment(&self) {
        self.skipped_segments.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts damaged buckets of an image.
    pub(super) fn add_damaged_buckets(&self, buckets: u32) {
        self.damaged_buckets[0].fetch_add(buckets.into(), Ordering::Relaxed);
    }

    /// Counts a value that cannot be read.
    pub(super) fn add_damaged_value(&self) {
        self.damaged_values[0].fetch_add(1, Ordering::Relaxed);
    }
}
