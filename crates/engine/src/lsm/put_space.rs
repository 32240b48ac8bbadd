//! The space that a put takes: of the open value segment, or of the next one, after work that can free some.
//!
//! In: the units of a record. Out: its place, or that the volume is full. Invariants: a put waits as long as there is garbage that a collection can make space of; it is refused once none is left, neither
//! in segments nor in what memtables have replaced. Tested in `tests/lsm_full.rs`.

use super::core::LsmCore;
use super::maintenance::{CompactionStep, SEGMENT_LOCK, is_no_space};
use super::space_reserve::SpaceDemand;
use super::table_meta::SegmentMeta;
use super::value_segments::RecordSpace;
use super::version_edit::VersionEdit;
use crate::EngineError;
use crate::common::group_commit::checkpoint_if;
use octokv_runtime::yield_now;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A put that finds no space makes more than it needs, so that not every put does: one of so many parts of the reserve, or a segment.
const SPARE_DIVISOR: u64 = 32;
/// A put makes space instead of opening a segment shorter than one of so many parts of the length that segments have.
const SHORTER_SEGMENTS: u64 = 2;

impl LsmCore {
    /// Waits for work without which a write cannot go on, and counts it.
    pub(super) async fn counted_wait<T>(&self, work: impl Future<Output = T>) -> T {
        let state = &self.volume.compaction;
        let start = self.clock();
        let done = work.await;
        state.waited_writes.fetch_add(1, Ordering::Relaxed);
        if let (Some(start), Some(end)) = (start, self.clock()) {
            state.waited_ns.fetch_add(end.0.saturating_sub(start.0), Ordering::Relaxed);
        }
        done
    }

    /// Whether a put of a value in the tree finds space, after work that can free some.
    pub(super) async fn has_space(&self) -> Result<bool, EngineError> {
        let volume = &self.volume;
        match volume.has_spare_units(1) {
            true => Ok(true),
            false => Box::pin(self.counted_wait(self.make_space(1))).await,
        }
    }

    /// Compacts until there is space for `units`, and for some more puts, or nothing more can be freed: first what puts can use, then what the memtables have replaced, in the end everything. Others may take what
    /// was freed: what they replaced is garbage, too, so that this goes on until there is none. Whether there is space for the units.
    ///
    /// # Errors
    /// Device failures: also one of a read, if there is no space and what could not be read may have some.
    async fn make_space(&self, units: u64) -> Result<bool, EngineError> {
        let volume = &self.volume;
        let more_units = (volume.reserve_units() / SPARE_DIVISOR).max(volume.segment_units());
        let mut need = SpaceDemand::ForPuts;
        // What has found no run before may find one now.
        volume.compaction.crowded.lock().clear();
        while !volume.has_spare_units(units + more_units) || !volume.has_spare_run(units) {
            match self.compact_at_once(need).await? {
                CompactionStep::Compacted | CompactionStep::LookAgain => yield_now().await,
                CompactionStep::Postponed(_) => break,
                CompactionStep::Nothing if volume.memtables.current().has_entries() => {
                    match self.flush_memtables().await {
                        Err(error) if is_no_space(&error) => break,
                        flushed => {
                            flushed?;
                            self.remove_unused_segments().await?;
                            checkpoint_if(self, || volume.is_image_long()).await?;
                        }
                    }
                }
                CompactionStep::Nothing if need == SpaceDemand::All => break,
                CompactionStep::Nothing => need = SpaceDemand::All,
            }
        }
        match (volume.has_spare_run(units), volume.compaction.postponed.lock().error()) {
            // Not known to be full.
            (false, Some(error)) => Err(error),
            (has_run, _) => Ok(has_run),
        }
    }

    /// Space for the record of a value; `None` if the volume is full.
    ///
    /// # Errors
    /// Those of an edit, and of work that can free space.
    pub(super) async fn record_space(
        &self,
        units: u64,
        value_bytes: u32,
    ) -> Result<Option<RecordSpace<'_>>, EngineError> {
        self.volume.note_record(units);
        match self.volume.segments.reserve(units, value_bytes) {
            Some(space) => Ok(Some(space)),
            // Boxed because it is rare: it would enlarge every put's future.
            None => Box::pin(self.open_segment(units, value_bytes)).await,
        }
    }

    async fn open_segment(
        &self,
        units: u64,
        value_bytes: u32,
    ) -> Result<Option<RecordSpace<'_>>, EngineError> {
        let volume = &self.volume;
        let mut tried = false;
        loop {
            let guard = volume.work_locks.lock(SEGMENT_LOCK).await;
            if let Some(space) = volume.segments.reserve(units, value_bytes) {
                return Ok(Some(space));
            }
            let segment_units = volume.segment_units_for(units);
            // A short one is used up soon, and what it leaves is a short free run.
            let shortest = if tried { units } else { units.max(segment_units / SHORTER_SEGMENTS) };
            if let Some(run) = volume.allocate(segment_units, shortest, true) {
                let meta: Arc<SegmentMeta> = volume.segment_meta(volume.next_segment_id(), run);
                let edit = VersionEdit { added_segments: vec![Arc::clone(&meta)], ..VersionEdit::default() };
                self.commit_edit(edit).await?;
                volume.segments.open(meta);
                return Ok(volume.segments.reserve(units, value_bytes));
            }
            drop(guard);
            if !self.counted_wait(self.make_space(units)).await? {
                return Ok(None);
            }
            // Another put may be the first to take what was freed: then there is more to free, which that one replaced.
            tried = true;
        }
    }
}
