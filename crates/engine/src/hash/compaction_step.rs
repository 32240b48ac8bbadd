//! One step of compaction: what reads, replaces and paces are made of, and how a put stops them.
//!
//! In: an entry of the index, with its record. Out: a replacement of it, an ordinary overwrite. Invariants: a step has the compaction
//! lock and runs to its end; it waits for the lock of no key. Tested in `compaction_tests.rs`, its pace in `compaction_pace_tests.rs`.

use super::engine::{HashCore, Predecessor, RecordToWrite};
use super::index::{IndexEntry, RecordRef};
use super::pieces::ReservedSpace;
use super::volume::SpaceFor;
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::Extent;
use crate::common::group_commit::{flush_deferred, is_compaction_locked, lock_compaction};
use crate::common::key_locks::KeyGuard;
use crate::common::record::RecordHeader;
use crate::{Durability, EngineError};
use octokv_base::{Key, Nanos};
use octokv_runtime::ReactorHandle;
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Entries of the index that are looked at between two pauses: some ten microseconds of a core that serves requests.
const SCAN_ENTRIES: usize = 4096;
/// Index partitions that are looked at between two pauses.
const SCAN_PARTITIONS: usize = 256;
/// The pause after a step, as a multiple of the time that it took: compaction then has a quarter of a slow device's time.
const PAUSE_FACTOR: u64 = 3;
/// The least pause after a step.
const PAUSE_MIN: Nanos = Nanos::from_micros(100);
/// The longest pause after a step.
const PAUSE_MAX: Nanos = Nanos::from_secs(60);
/// An entry of the index, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexedRecord {
    pub partition: usize,
    pub tag: u64,
    pub record_ref: RecordRef,
}

/// What a step has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// Wrote the record, with so many units.
    Written(u64),
    /// There is no run for a record of so many units.
    NoRun(u64),
    /// Left the record alone: it is damaged, locked, too long, or no longer there; or memory is short.
    Left,
}

/// A record that was read and whose value is intact.
pub(super) struct VerifiedRecord {
    pub key: Key,
    pub hash: u128,
    /// Key and value are at their places.
    pub record: RecordToWrite,
}

/// The pauses between steps; none for a caller without a clock.
pub(super) struct Pacer<'a> {
    pub handle: Option<&'a ReactorHandle>,
    pub bytes_per_second: u64,
}

impl Pacer<'_> {
    pub fn now(&self) -> Nanos {
        self.handle.map_or(Nanos::ZERO, |handle| handle.now())
    }

    /// Pauses after what began at `start`, and read and wrote so many bytes.
    pub async fn pause(&self, start: Nanos, bytes: u64) {
        if let Some(handle) = self.handle {
            let took = handle.now().since(start);
            handle.sleep(pause_after(took, bytes, self.bytes_per_second)).await;
        }
    }
}

/// The pause after what took so long, and read and wrote so many bytes.
fn pause_after(took: Nanos, bytes: u64, bytes_per_second: u64) -> Nanos {
    let paced = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1));
    let paced = Nanos(u64::try_from(paced).unwrap_or(u64::MAX));
    paced.max(Nanos(took.0.saturating_mul(PAUSE_FACTOR))).clamp(PAUSE_MIN, PAUSE_MAX)
}

impl HashCore {
    pub(super) fn is_compaction_over(&self) -> bool {
        self.volume.compaction.is_over.load(Ordering::Relaxed) || self.volume.commits.has_failed()
    }

    /// Makes compaction give up its window, and waits until no step runs; locks steps out until the guard is dropped. `None` if compaction
    /// holds no space and has held none since [`Compaction::steps`] was `steps_before`. REQUIRES: the caller is in no epoch.
    pub(super) async fn pause_compaction(&self, steps_before: u64) -> Option<KeyGuard<'_>> {
        let gave_up = self.give_up_window();
        let is_held = gave_up || is_compaction_locked(self);
        match is_held || self.volume.compaction.steps() != steps_before {
            true => {
                let guard = lock_compaction(self).await;
                // A step may have taken one since.
                self.give_up_window();
                Some(guard)
            }
            false => None,
        }
    }

    /// Calls `each` for some entries of the index from `at` on, and pauses. Gives where the next ones are; `None` at the end.
    pub(super) async fn scan(
        &self,
        at: (usize, u64),
        pacer: &Pacer<'_>,
        mut each: impl FnMut(IndexedRecord),
    ) -> Option<(usize, u64)> {
        let start = pacer.now();
        let (first_partition, mut tag) = at;
        let (mut partition, mut count) = (first_partition, 0);
        let partitions = &self.volume.partitions;
        let next = loop {
            if partition == partitions.len() {
                break None;
            }
            if partition - first_partition == SCAN_PARTITIONS || count >= SCAN_ENTRIES {
                break Some((partition, tag));
            }
            let (mut last, mut more) = (None, None);
            for entry in partitions[partition].state.lock().table.iter_from(tag) {
                // All entries of a tag are looked at together.
                if count >= SCAN_ENTRIES && last != Some(entry.tag()) {
                    more = Some((partition, entry.tag()));
                    break;
                }
                (last, count) = (Some(entry.tag()), count + 1);
                each(indexed_record(partition, entry));
            }
            if more.is_some() {
                break more;
            }
            (partition, tag) = (partition + 1, 0);
        };
        pacer.pause(start, 0).await;
        next
    }

    /// Runs a step to its end, also if the caller is dropped, with the compaction lock; and pauses.
    pub(super) async fn run_step<F>(
        self: &Rc<Self>,
        pacer: &Pacer<'_>,
        step: impl FnOnce(Rc<HashCore>) -> F + 'static,
    ) -> Result<StepOutcome, EngineError>
    where
        F: Future<Output = Result<StepOutcome, EngineError>> + 'static,
    {
        let (start, core) = (pacer.now(), Rc::clone(self));
        let outcome = self
            .abandoned
            .detachable(async move {
                let _guard = lock_compaction(&*core).await;
                if core.is_compaction_over() {
                    return Ok(StepOutcome::Left);
                }
                let outcome = step(Rc::clone(&core)).await;
                core.volume.compaction.steps.fetch_add(1, Ordering::Release);
                outcome
            })
            .await?;
        let units = match outcome {
            StepOutcome::Written(units) => 2 * units,
            StepOutcome::NoRun(_) | StepOutcome::Left => 1,
        };
        pacer.pause(start, units * self.volume.unit_bytes() as u64).await;
        Ok(outcome)
    }

    /// Counts a record that compaction has written.
    pub(super) fn count_compacted(&self, is_joined: bool, units: u64) {
        let compaction = &self.volume.compaction;
        let count = if is_joined { &compaction.joined_values } else { &compaction.moved_records };
        count.fetch_add(1, Ordering::Relaxed);
        compaction.moved_bytes.fetch_add(units * self.volume.unit_bytes() as u64, Ordering::Relaxed);
    }

    /// The header and the key of the record in `bytes`, if it is the one that the index names at this entry.
    pub(super) fn record_of_entry(
        &self,
        entry: &IndexedRecord,
        bytes: &[u8],
    ) -> Option<(RecordHeader, Key, u128)> {
        let volume = &self.volume;
        let (header, key) = volume.record_header(bytes, entry.record_ref.location).ok()?;
        let key = Key::new(key)?;
        let hash = volume.hash(&key);
        let is_it = volume.is_record(entry.record_ref, &header)
            && volume.partition_and_tag(hash) == (entry.partition, entry.tag);
        is_it.then_some((header, key, hash))
    }

    /// Releases the window, if compaction holds one. Whether it did.
    pub(super) fn give_up_window(&self) -> bool {
        let held = self.volume.compaction.held.lock().take();
        let is_held = held.is_some();
        if let Some(held) = held {
            held.release(&self.volume.space);
        }
        is_held
    }

    /// A run of the empty window, if it has so many units left.
    pub(super) fn take_from_window(&self, units: u64) -> Option<Extent> {
        self.volume.compaction.held.lock().as_mut()?.take(units)
    }

    /// Allocates space for a record. The core's puts stay in the partition of the bitmap in which they are.
    pub(super) fn allocate_apart(&self, hash: u128, units: u64) -> Option<Extent> {
        let preferred_partition = Cell::new(self.preferred_partition.get());
        self.allocate_from(&preferred_partition, hash, units, SpaceFor::Value)
    }

    /// Writes a record in place of the one of an entry, whose value it has, into the space that `space` has for it; unless the key
    /// is locked or has another record now. REQUIRES: the caller is in an epoch since the index had the entry.
    pub(super) async fn replace(
        &self,
        entry: &IndexedRecord,
        verified: VerifiedRecord,
        space: &mut ReservedSpace<'_>,
    ) -> Result<StepOutcome, EngineError> {
        let (volume, VerifiedRecord { key, hash, record }) = (&self.volume, verified);
        // A writer that has the lock may wait for readers, of which this is one.
        let Ok(_key_guard) = volume.lock_key(hash) else { return Ok(StepOutcome::Left) };
        if !volume.has_entry(entry.partition, entry.tag, entry.record_ref) {
            return Ok(StepOutcome::Left);
        }
        if bug_injection::is_injected(InjectedBug::CompactionFreesEarly) {
            self.free_pieces_early(entry.record_ref).await;
        }
        // From here on the write gives the space back, if it fails.
        let extent = space.head.take().expect("reserved for the record");
        let predecessor = Predecessor::Verified(Some((entry.record_ref, record.meta)));
        self.write_and_commit(hash, &key, record, extent, predecessor).await?;
        Ok(StepOutcome::Written(extent.units))
    }

    /// An injected bug: gives up the space of a record's pieces, if it has any, so that it is not given up again.
    async fn free_pieces_early(&self, old: RecordRef) {
        if self.is_in_pieces(&old) {
            let pieces = self.extents_of_pieces(old).await;
            let units: u64 = pieces.iter().map(|extent| extent.units).sum();
            self.volume.count_units_of_pieces(-(units as i64));
            pieces.into_iter().for_each(|extent| self.volume.space.release(extent));
            self.volume.lost_pieces.lock().insert(old.location);
        }
    }

    /// Makes the space that a step has freed free after the last reader, also if changes are acknowledged without a flush: what
    /// compaction holds is bounded.
    pub(super) async fn flush_freed(&self) -> Result<(), EngineError> {
        match self.volume.commits.durability() {
            Durability::PowerSafe => Ok(()),
            Durability::Completed => flush_deferred(self).await,
        }
    }
}

/// The entry of a partition.
fn indexed_record(partition: usize, entry: IndexEntry) -> IndexedRecord {
    IndexedRecord { partition, tag: entry.tag(), record_ref: entry.record_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_after_a_step_is_of_its_bytes_and_of_its_time() {
        let table = [
            // took, bytes, bytes per second: pause
            (Nanos::ZERO, 0, 1 << 20, PAUSE_MIN),
            (Nanos::from_micros(1), 1 << 20, 1 << 20, Nanos::from_secs(1)),
            (Nanos::from_millis(500), 1 << 20, 1 << 20, Nanos::from_millis(1_500)),
            (Nanos::from_millis(5), 4 << 20, 16 << 20, Nanos::from_millis(250)),
            (Nanos(u64::MAX), u64::MAX, 1, PAUSE_MAX),
            (Nanos::ZERO, u64::MAX, 0, PAUSE_MAX),
        ];
        for (took, bytes, rate, want) in table {
            assert_eq!(pause_after(took, bytes, rate), want, "{took:?}, {bytes} bytes");
        }
    }
}
