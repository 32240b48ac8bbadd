//! Splits: the next segment in the order of linear hashing becomes two, so that segments keep their size.
//!
//! ```text
//!   acquire segment `split` ─▶ only holder, nothing unpublished ─▶ halves ─▶ one batch with both images ─▶ table, level + 1
//! ```
//! In: stores with more bytes of entries than their segments should have. Out: more segments. Invariants: one split of a store at a time; both
//! images are adjacent in the key log, or recovery takes neither; operations that wait for the segment meanwhile look their keys up again.
//! Tested in `tests/log_conformance.rs`, `tests/log_power_loss.rs` and, for failures, below.

use super::batch_state::BatchWait;
use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::segment_reads::HeldSegment;
use super::segment_ref::SegmentRef;
use super::space_pass::CompactionSpace;
use super::store::{PendingSplit, Store};
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use octokv_device::DeviceError;
use octokv_runtime::yield_now;
use std::sync::atomic::Ordering;

/// How often a split asks for a segment that others hold, before it is put off.
const ATTEMPTS_MAX: u32 = 64;

/// How a split begins.
enum SplitStart {
    /// Both halves wait for a batch.
    Waits(BatchWait),
    /// There was nothing to write.
    Ended,
    /// Others hold the segment.
    Held,
    /// Changes of the segment are not published.
    Unpublished(BatchWait),
    /// The segment is not the next one any more.
    Outdated,
}

impl LogCore {
    /// Notes that a store may have grown: if a split is due, the task of this core makes it; if many are, this caller does.
    ///
    /// # Errors
    /// As for [`LogCore::split_once`].
    pub(super) async fn note_growth(&self, store: &Store) -> Result<(), EngineError> {
        if !self.volume.may_split() || self.split_lag_percent(store) <= 100 {
            return Ok(());
        }
        self.splits.set();
        let most = 100 + u64::from(self.volume.settings.split_lag_percent);
        if self.split_lag_percent(store) > most {
            // Without turns, writers that split one segment hold it for each other, and none ever holds it alone.
            let _turn = self.volume.split_locks.lock(store.id.into()).await;
            if self.split_lag_percent(store) > most {
                // Boxed because it is rare: it would enlarge every put's future.
                Box::pin(self.split_once(store)).await?;
            }
        }
        Ok(())
    }

    /// The bytes of entries of a store, in percent of what its segments should have, rounded up.
    fn split_lag_percent(&self, store: &Store) -> u64 {
        let (entry_bytes, segments) = {
            let state = store.state.lock();
            (state.totals.entry_bytes, state.table.segments())
        };
        let target_bytes = segments.saturating_mul(self.volume.settings.segment_target_bytes.into()).max(1);
        entry_bytes.saturating_mul(100).div_ceil(target_bytes)
    }

    /// Splits due segments until it is dropped. A failed split is repeated when its store has grown. Until then puts succeed, unless their segment is full.
    pub(super) async fn run_splits(&self) {
        loop {
            self.splits.wait().await;
            // A store that others keep busy, or whose split failed, which is counted, is tried again when it has grown.
            let _ = self.split_due_stores().await;
        }
    }

    /// Splits segments in each store in which that is due, as many as are. Whether one was split.
    ///
    /// # Errors
    /// As for [`LogCore::split_once`].
    pub(super) async fn split_due_stores(&self) -> Result<bool, EngineError> {
        let mut has_split = false;
        for store in &self.volume.stores {
            while self.is_split_due(store) {
                if !self.split_once(store).await? {
                    break;
                }
                has_split = true;
            }
        }
        Ok(has_split)
    }

    /// Whether a store has more bytes of entries than its segments should.
    pub(super) fn is_split_due(&self, store: &Store) -> bool {
        let state = store.state.lock();
        self.volume.may_split()
            && !state.is_lost
            && state.table.is_split_due(state.totals.entry_bytes, self.volume.settings.segment_target_bytes)
    }

    /// Splits the next segment of a store. False if others use it all the time, another split runs, or free space is short.
    ///
    /// # Errors
    /// Device failures, no memory.
    pub(super) async fn split_once(&self, store: &Store) -> Result<bool, EngineError> {
        let split = self.split_next(store).await;
        if split.is_err() {
            self.volume.counters.failed_splits.fetch_add(1, Ordering::Relaxed);
        }
        split
    }

    async fn split_next(&self, store: &Store) -> Result<bool, EngineError> {
        let next = {
            let state = store.state.lock();
            if state.split.is_some() || !state.table.level().can_advance() {
                return Ok(false);
            }
            let level = state.table.level();
            level.range_of(SegmentNumber(level.split)).first
        };
        // Both halves have to fit into one chunk behind a hop.
        let units = u32::from(self.volume.layout().chain_max()) + 2;
        let space = CompactionSpace::Image { store: store.id, units };
        let Some(_images) = self.volume.passes.begin_compaction(&self.volume.pool, space) else {
            return Ok(false);
        };
        let mut attempts = 0;
        loop {
            let held = self.acquire(store, next).await?;
            match self.begin_split(store, &held) {
                SplitStart::Waits(wait) => {
                    held.into_split();
                    self.commit_split(store, wait).await?;
                    self.note_split();
                    return Ok(true);
                }
                SplitStart::Ended => {
                    held.into_split();
                    self.note_split();
                    return Ok(true);
                }
                SplitStart::Outdated => return Ok(false),
                SplitStart::Unpublished(wait) => {
                    drop(held);
                    self.commit(store, wait).await?;
                }
                SplitStart::Held => {
                    drop(held);
                    yield_now().await;
                }
            }
            attempts += 1;
            if attempts == ATTEMPTS_MAX {
                return Ok(false);
            }
        }
    }

    fn note_split(&self) {
        self.volume.counters.splits.fetch_add(1, Ordering::Relaxed);
        self.volume.segments.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the halves of a segment.
    fn begin_split(&self, store: &Store, held: &HeldSegment<'_>) -> SplitStart {
        let mut guard = store.state.lock();
        let (state, segment) = (&mut *guard, held.segment);
        let level = state.table.level();
        if state.split.is_some() || segment.0 != level.split {
            return SplitStart::Outdated;
        }
        if !state.busy.begin_split(segment) {
            return match state.busy.last_change(segment) {
                Some(change) => SplitStart::Unpublished(BatchWait::Change(change)),
                None => SplitStart::Held,
            };
        }
        let depth = level.depth_of(segment);
        let image = state.busy.image(segment);
        if image.entries() == 0 && state.table.get(segment).is_empty() {
            state.table.grow(SegmentRef::EMPTY, SegmentRef::EMPTY);
            let wakers = state.busy.end_split(segment, &mut state.table);
            drop(guard);
            wakers.wake();
            return SplitStart::Ended;
        }
        let is_moved = |key: &[u8]| self.prefix_in(store, key).is_moved_by_split(depth);
        let (low, high) = match bug_injection::is_injected(InjectedBug::LogSplitForgetsChain) {
            true => image.first_entries(self.volume.layout().unit_bytes as usize).split(is_moved),
            false => image.split(is_moved),
        };
        let ticket = state.batches.open();
        state.split = Some(PendingSplit { segment, ticket, low, high, is_claimed: false });
        SplitStart::Waits(BatchWait::Change(ticket))
    }

    /// Waits until a split is published; a lack of space ends, since compaction takes none that it does not give back.
    async fn commit_split(&self, store: &Store, wait: BatchWait) -> Result<(), EngineError> {
        loop {
            match self.commit(store, wait).await {
                Err(EngineError::Device { error: DeviceError::NoSpace, .. }) => yield_now().await,
                Err(error) => {
                    // Nothing is published any more: the commits of operations that wait for the segment fail as well.
                    let wakers = {
                        let state = &mut *store.state.lock();
                        let split = state.split.take().expect("a split waits until it is published");
                        let wakers = state.busy.cancel_split(split.segment);
                        state.busy.leave(split.segment, &mut state.table);
                        wakers
                    };
                    wakers.wake();
                    return Err(error);
                }
                Ok(()) => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compaction_tests::{check_values, filled};
    use super::super::test_log_volume::OpenTestVolume;
    use super::*;
    use crate::Durability;
    use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
    use octokv_runtime::block_on;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_split_that_the_device_fails_is_counted_and_repeated() {
        // Puts never split by themselves.
        let volume =
            OpenTestVolume::new(20, Durability::PowerSafe, |settings| settings.split_lag_percent = u32::MAX);
        let model = filled(&volume, 150, 1);
        let split = || block_on(volume.core.split_due_stores(), || ());
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &volume.core.volume.counters;
        volume.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)));
        for failures in 1..4 {
            assert!(matches!(split(), Err(EngineError::Device { .. })));
            assert_eq!(count(&counters.failed_splits), failures);
        }
        volume.faults.clear();
        let splits = count(&counters.splits);
        assert_eq!(split(), Ok(true));
        assert!(count(&counters.splits) > splits && count(&counters.failed_splits) == 3);
        check_values(&volume, 150, &model);
    }
}
