//! What all cores know of a volume's compaction: its counts, and the space that it holds.
//!
//! In: the window that compaction holds. Out: the same, to a put or a delete that needs its space. Invariant: the runs of a window are allocated in
//! the bitmap. Tested in `compaction_tests.rs`.

use crate::CompactionStatistics;
use crate::common::allocator::{Extent, SpaceAllocator};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Records that are remembered as stuck.
pub(super) const STUCK_MAX: usize = 64;

/// A window whose free units compaction has allocated.
pub(super) struct HeldWindow {
    units: Range<u64>,
    /// Those of its units, in disjoint runs; all of them once it is empty.
    runs: Vec<Extent>,
    held_units: u64,
}

impl HeldWindow {
    /// A window of which nothing is held yet.
    pub fn new(units: Range<u64>) -> HeldWindow {
        HeldWindow { units, runs: Vec::new(), held_units: 0 }
    }

    /// Whether all of it is held.
    pub fn is_empty(&self) -> bool {
        self.held_units == self.units.end - self.units.start
    }

    pub fn release(self, space: &SpaceAllocator) {
        self.runs.into_iter().for_each(|run| space.release(run));
    }

    /// Its units, without those that were taken from its front.
    pub fn units(&self) -> &Range<u64> {
        &self.units
    }

    /// Takes so many units from the front of the empty window; `None` if it has less left, or is not empty.
    pub fn take(&mut self, units: u64) -> Option<Extent> {
        let location = self.units.start;
        if !self.is_empty() || self.units.end - location < units {
            return None;
        }
        self.units.start += units;
        self.held_units -= units;
        self.runs.clear();
        if self.held_units > 0 {
            self.runs.push(Extent { location: self.units.start, units: self.held_units });
        }
        Some(Extent { location, units })
    }

    /// Allocates the free units of the window.
    pub fn hold_free(&mut self, space: &SpaceAllocator) {
        let mut at = self.units.start;
        while at < self.units.end
            && let Some(run) = space.allocate_within(at..self.units.end)
        {
            at = run.location + run.units;
            self.held_units += run.units;
            self.runs.push(run);
        }
    }
}

/// What all cores know of a volume's compaction.
pub(super) struct Compaction {
    pub(super) bytes_per_second: u64,
    /// Entries of the index whose values are in pieces.
    pub(super) values_in_pieces: AtomicU64,
    /// The window that is being emptied, or filled.
    pub(super) held: Mutex<Option<HeldWindow>>,
    /// Units of windows whose records cannot be moved: the last [`STUCK_MAX`].
    pub(super) stuck: Mutex<VecDeque<u64>>,
    /// Steps that have ended.
    pub(super) steps: AtomicU64,
    /// Whether the volume is being closed, so that no step begins.
    pub(super) is_over: AtomicBool,
    pub(super) joined_values: AtomicU64,
    pub(super) moved_records: AtomicU64,
    pub(super) moved_bytes: AtomicU64,
}

impl Compaction {
    pub(super) fn new(bytes_per_second: u64, values_in_pieces: u64) -> Compaction {
        Compaction {
            bytes_per_second,
            values_in_pieces: AtomicU64::new(values_in_pieces),
            held: Mutex::new(None),
            stuck: Mutex::new(VecDeque::new()),
            steps: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            joined_values: AtomicU64::new(0),
            moved_records: AtomicU64::new(0),
            moved_bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn statistics(&self) -> CompactionStatistics {
        CompactionStatistics {
            values_in_pieces: self.values_in_pieces.load(Ordering::Relaxed),
            joined_values: self.joined_values.load(Ordering::Relaxed),
            moved_records: self.moved_records.load(Ordering::Relaxed),
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
        }
    }

    /// The steps that have ended. Of use to [`HashCore::pause_compaction`].
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Acquire)
    }
}
