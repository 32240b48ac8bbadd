//! Free runs for compaction: a window of units that is emptied, so that a value in pieces finds a run.
//!
//! ```text
//!   choose   of equal windows those with the most free units; of them, by one pass over the index, the one with the fewest units of
//!            records, and nothing else in it
//!   empty    allocate its free units ─▶ move its records, one after the other ─▶ allocate what they leave
//!   fill     joined values take its units from the front; the rest is released
//! ```
//! In: the bitmap, the index in memory. Out: records at other places, a run. A window that holds pieces, or lists of them, is left
//! alone: whose they are is known on the device only, and joins empty it anyway. What the index does not explain in a window counts as
//! such: writes in flight, space that waits for its readers.
//!
//! Invariants: the units that are held are allocated in the bitmap, which keeps all others out at no cost to them; a window lies in one
//! partition of the bitmap.

use super::compaction_state::{HeldWindow, STUCK_MAX};
use super::compaction_step::{IndexedRecord, Pacer, StepOutcome, VerifiedRecord};
use super::engine::{HashCore, RecordToWrite};
use super::index::RecordRef;
use super::pieces::ReservedSpace;
use crate::EngineError;
use crate::common::allocator::Extent;
use std::cmp::Reverse;
use std::ops::Range;
use std::rc::Rc;

/// The window that is tried first, in bytes, if no value needs more: a few values of a MiB share the passes over the index.
const WINDOW_BYTES: u64 = 4 << 20;
/// Windows of which one pass over the index finds out what they hold.
const CANDIDATES: usize = 16;
/// Times that a window's records are looked for: writers may put some into it between a release and an allocation.
const ROUNDS_MAX: usize = 3;
/// Compaction makes no window if less than one unit in this many would be free beside it: puts need it more.
const SPARE_DIVISOR: u64 = 64;

/// Whether there is a window for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MadeWindow {
    /// There is; compaction holds it.
    Empty,
    /// No window can be emptied.
    NotFound,
    /// One was to be emptied, but a record in it cannot be moved, or others needed the space.
    NotEmptied,
}

/// A window that might be emptied.
struct Candidate {
    units: Range<u64>,
    free_units: u64,
    /// Units in it that are records'.
    record_units: u64,
    /// Units of the records that have some in it.
    units_to_move: u64,
    /// Whether a value in pieces has its record in it.
    has_lists: bool,
}

fn overlap(window: &Range<u64>, record_ref: &RecordRef) -> u64 {
    let end = (record_ref.location + record_ref.units).min(window.end);
    end.saturating_sub(record_ref.location.max(window.start))
}

impl HashCore {
    /// Empties a window of at least `units` units, and holds it. REQUIRES: the caller has a [`HoldGuard`].
    pub(super) async fn make_window(
        self: &Rc<Self>,
        units: u64,
        pacer: &Pacer<'_>,
    ) -> Result<MadeWindow, EngineError> {
        let preferred = units.max(WINDOW_BYTES / self.volume.unit_bytes() as u64);
        self.flush_freed().await?;
        let mut window = self.choose_window(preferred, pacer).await;
        if window.is_none() && units < preferred {
            window = self.choose_window(units, pacer).await;
        }
        match window {
            None => Ok(MadeWindow::NotFound),
            Some(window) => match self.empty_window(window, pacer).await? {
                true => Ok(MadeWindow::Empty),
                false => Ok(MadeWindow::NotEmptied),
            },
        }
    }

    /// The window of so many units that has the fewest in use, of those that can be emptied.
    async fn choose_window(&self, window_units: u64, pacer: &Pacer<'_>) -> Option<Range<u64>> {
        let (volume, space) = (&self.volume, &self.volume.space);
        volume.epochs.reclaim_all(|extent| space.release(extent));
        let mut candidates: Vec<Candidate> = Vec::new();
        for index in 0..space.partition_count() {
            let partition = space.partition_range(index);
            let mut start = partition.start;
            while start + window_units <= partition.end {
                let units = start..start + window_units;
                start = units.end;
                let free_units = space.count_free(units.clone());
                let is_better = candidates.last().is_none_or(|last| free_units > last.free_units);
                if is_better || candidates.len() < CANDIDATES {
                    let at = candidates.partition_point(|other| other.free_units >= free_units);
                    let (record_units, units_to_move, has_lists) = (0, 0, false);
                    candidates
                        .insert(at, Candidate { units, free_units, record_units, units_to_move, has_lists });
                    candidates.truncate(CANDIDATES);
                }
            }
            pacer.pause(pacer.now(), 0).await;
        }
        let spare_units = volume.space.units() / SPARE_DIVISOR;
        let free_units = space.free_units();
        candidates.retain(|candidate| candidate.free_units > 0 && free_units >= window_units + spare_units);
        candidates.sort_by_key(|candidate| candidate.units.start);
        let mut next = (!candidates.is_empty()).then_some((0, 0));
        while let Some(at) = next {
            next = self
                .scan(at, pacer, |IndexedRecord { record_ref, .. }| {
                    let first = candidates.partition_point(|one| one.units.end <= record_ref.location);
                    for candidate in &mut candidates[first..] {
                        let units = overlap(&candidate.units, &record_ref);
                        if units == 0 {
                            break;
                        }
                        candidate.record_units += units;
                        candidate.units_to_move += record_ref.units;
                        candidate.has_lists |= self.is_in_pieces(&record_ref);
                    }
                })
                .await;
        }
        let is_possible = |candidate: &&Candidate| {
            let is_known = space.count_free(candidate.units.clone()) == candidate.free_units
                && candidate.free_units + candidate.record_units == window_units;
            let free_elsewhere = space.free_units().saturating_sub(candidate.free_units);
            is_known && !candidate.has_lists && candidate.units_to_move + spare_units <= free_elsewhere
        };
        let mut stuck = volume.compaction.stuck.lock();
        let is_possible = |candidate: &&Candidate| {
            is_possible(candidate) && !stuck.iter().any(|location| candidate.units.contains(location))
        };
        let best = candidates.iter().filter(is_possible).max_by_key(|candidate| {
            (candidate.free_units, Reverse(candidate.units_to_move), Reverse(candidate.units.start))
        });
        let best = best.map(|candidate| candidate.units.clone());
        if best.is_none() {
            // What could not be read may be readable in the next pass.
            stuck.clear();
        }
        best
    }

    /// Allocates the free units of a window and moves its records elsewhere. False if some could not be moved.
    async fn empty_window(
        self: &Rc<Self>,
        window: Range<u64>,
        pacer: &Pacer<'_>,
    ) -> Result<bool, EngineError> {
        let held = HeldWindow::new(window.clone());
        let window_units = (window.end - window.start) as usize;
        self.run_step(pacer, move |core| async move {
            *core.volume.compaction.held.lock() = Some(held);
            Ok(StepOutcome::Left)
        })
        .await?;
        for _ in 0..ROUNDS_MAX {
            if self.hold_free_units() == Some(true) {
                return Ok(true);
            }
            let mut records = Vec::new();
            let mut next = Some((0, 0));
            while let Some(at) = next {
                next = self
                    .scan(at, pacer, |entry| {
                        // Each has a unit in it: that there are more is the doing of writers while this looks.
                        if overlap(&window, &entry.record_ref) > 0 && records.len() < window_units {
                            records.push(entry);
                        }
                    })
                    .await;
            }
            for entry in records {
                let outcome =
                    self.run_step(pacer, move |core| async move { core.move_record(entry).await }).await?;
                let is_stuck = matches!(outcome, StepOutcome::NoRun(_));
                if is_stuck || self.is_compaction_over() || self.hold_free_units().is_none() {
                    return Ok(false);
                }
            }
            self.flush_freed().await?;
            self.volume.epochs.readers_left().await;
        }
        Ok(self.hold_free_units() == Some(true))
    }

    /// Allocates the free units of the window. Gives whether it has no other units left; `None` if a put took the window.
    fn hold_free_units(&self) -> Option<bool> {
        let space = &self.volume.space;
        self.volume.epochs.reclaim_all(|extent| space.release(extent));
        let mut held = self.volume.compaction.held.lock();
        let window = held.as_mut()?;
        window.hold_free(space);
        Some(window.is_empty())
    }

    /// Moves a record out of the window. `NoRun` if it cannot be moved.
    async fn move_record(&self, entry: IndexedRecord) -> Result<StepOutcome, EngineError> {
        let (volume, record_ref) = (&self.volume, entry.record_ref);
        let stuck = StepOutcome::NoRun(record_ref.units);
        let epoch_guard = self.enter_epoch();
        if !volume.has_entry(entry.partition, entry.tag, record_ref) {
            return Ok(StepOutcome::Left);
        }
        if self.is_in_pieces(&record_ref) {
            return Ok(stuck);
        }
        let Some(buffer) = self.pool.take(record_ref.units as usize * volume.unit_bytes()) else {
            return Err(EngineError::NoMemory);
        };
        let read = self.device.read(self.lba(record_ref.location), buffer).await.into_read();
        let found = read.ok().and_then(|buffer| {
            let (header, key, hash) = self.record_of_entry(&entry, &buffer)?;
            volume.value_range(&header, &buffer).ok()?;
            Some((buffer, header, key, hash))
        });
        // It stays as it is, and so does the window.
        let Some((buffer, header, key, hash)) = found else {
            self.note_stuck(record_ref.location);
            return Ok(stuck);
        };
        let mut space = ReservedSpace::new(volume);
        space.head = self.allocate_outside(hash, record_ref.units);
        if space.head.is_none() {
            return Ok(stuck);
        }
        let value_bytes = header.value_bytes;
        let record = RecordToWrite { buffer, value_bytes, stored_bytes: value_bytes, meta: header.meta };
        let outcome = self.replace(&entry, VerifiedRecord { key, hash, record }, &mut space).await?;
        drop(epoch_guard);
        if let StepOutcome::Written(units) = outcome {
            self.count_compacted(false, units);
        }
        Ok(outcome)
    }

    /// Remembers a unit of the window whose record cannot be moved.
    fn note_stuck(&self, location: u64) {
        let compaction = &self.volume.compaction;
        let start = compaction.held.lock().as_ref().map_or(0, |window| window.units().start);
        let mut stuck = compaction.stuck.lock();
        stuck.push_back(location.max(start));
        if stuck.len() > STUCK_MAX {
            stuck.pop_front();
        }
    }

    /// Allocates a run outside of the window; `None` if there is none, or the window was given up.
    fn allocate_outside(&self, hash: u128, units: u64) -> Option<Extent> {
        self.hold_free_units()?;
        let extent = self.allocate_apart(hash, units)?;
        let held = self.volume.compaction.held.lock();
        let is_inside = held.as_ref().is_some_and(|window| {
            let record_ref = RecordRef { location: extent.location, units, fingerprint: 0 };
            overlap(window.units(), &record_ref) > 0
        });
        if is_inside || held.is_none() {
            // A reader left between the two.
            drop(held);
            self.volume.space.release(extent);
            return None;
        }
        Some(extent)
    }
}

/// Gives up the window when it is dropped.
pub(super) struct HoldGuard<'a>(pub &'a HashCore);

impl Drop for HoldGuard<'_> {
    fn drop(&mut self) {
        self.0.give_up_window();
    }
}
