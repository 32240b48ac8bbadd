//! Compaction: makes one record of a value in pieces, in the background. It restores the speed of reads, and never decides whether a
//! put fits.
//!
//! ```text
//!   pass    index in memory ─▶ values in pieces ─┬─ a run is free ─▶ join
//!                                                └─ none is ─▶ make one (compaction_window.rs) ─▶ join there
//!   join    allocate ─▶ read and verify pieces ─▶ try the key's lock, look again ─▶ write and commit, as an overwrite does
//! ```
//! In: the index, the time. Out: ordinary replacements that change neither value nor version nor expiry.
//!
//! Invariants: one record is in flight; the space that compaction holds is that of this record and of one window; what holds space has
//! the compaction lock, or gives the space up when a put or a delete finds none ([`HashCore::pause_compaction`]). Nothing waits for
//! the lock of a key, so that a writer with a key may wait for compaction.
//! Tested in `compaction_tests.rs`, its pace in `compaction_pace_tests.rs`, and by the simulator.

use super::compaction_step::{IndexedRecord, Pacer, StepOutcome, VerifiedRecord};
use super::compaction_window::{HoldGuard, MadeWindow};
use super::engine::{HashCore, RecordToWrite};
use super::index::RECORD_UNITS_MAX;
use super::pieces::ReservedSpace;
use crate::EngineError;
use crate::common::group_commit::lock_compaction;
use crate::common::record::{LAYOUT, RecordFlags, RecordMeta, record_bytes};
use crate::common::write_rules;
use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::cell::Cell;
use std::cmp::Reverse;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;

/// The rest after a pass that gained nothing: the first one, and the longest. It doubles, since a pass reads the whole index.
const REST_LIMITS: [Nanos; 2] = [Nanos::from_millis(100), Nanos::from_secs(60)];

impl HashCore {
    /// Compacts, with pauses, until the volume is closed or read-only; at once if it has no values in pieces by its format, or
    /// compaction is switched off. While there is nothing to do it waits for `rounds`, the count of maintenance rounds. `report`
    /// receives each error. REQUIRES: the task that polls this polls the maintenance as well.
    pub(super) async fn run_compaction(
        self: &Rc<Self>,
        handle: &ReactorHandle,
        rounds: &Cell<u64>,
        report: impl Fn(EngineError),
    ) {
        let volume = &self.volume;
        let bytes_per_second = volume.compaction.bytes_per_second;
        if bytes_per_second == 0 || !self.stores_pieces() {
            return;
        }
        let pacer = Pacer { handle: Some(handle), bytes_per_second };
        let mut rest = REST_LIMITS[0];
        loop {
            let has_work = || volume.compaction.values_in_pieces.load(Ordering::Relaxed) > 0;
            wait_until(|| has_work() || self.is_compaction_over()).await;
            if self.is_compaction_over() {
                return;
            }
            let before = rounds.get();
            match self.compact_pass(&pacer).await {
                Ok(true) => {
                    rest = REST_LIMITS[0];
                    continue;
                }
                // Buffers are for requests first.
                Ok(false) | Err(EngineError::NoMemory) => {}
                Err(error) => report(error),
            }
            wait_until(|| rounds.get() != before || self.is_compaction_over()).await;
            handle.sleep(rest).await;
            rest = Nanos(rest.0.saturating_mul(2)).min(REST_LIMITS[1]);
        }
    }

    /// [`HashEngine::compact`](super::HashEngine::compact).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn compact(self: &Rc<Self>) -> Result<bool, EngineError> {
        match self.stores_pieces() && !self.is_compaction_over() {
            true => self.compact_pass(&Pacer { handle: None, bytes_per_second: 0 }).await,
            false => Ok(false),
        }
    }

    /// Ends compaction for good, after the step that runs, if any.
    pub(super) async fn end_compaction(&self) {
        self.volume.compaction.is_over.store(true, Ordering::Relaxed);
        drop(lock_compaction(self).await);
    }

    /// One pass over the index. Whether it joined a value.
    async fn compact_pass(self: &Rc<Self>, pacer: &Pacer<'_>) -> Result<bool, EngineError> {
        let mut gained = false;
        // Windows of so many units, or more, cannot be made.
        let mut too_many_units = u64::MAX;
        let mut next = Some((0, 0));
        while let Some(at) = next {
            let mut found = Vec::new();
            next = self
                .scan(at, pacer, |entry| found.extend(self.is_in_pieces(&entry.record_ref).then_some(entry)))
                .await;
            let mut waiting = Vec::new();
            for entry in found {
                match self
                    .run_step(pacer, move |core| async move { core.join_pieces(entry, false).await })
                    .await?
                {
                    StepOutcome::Written(_) => gained = true,
                    StepOutcome::NoRun(units) => waiting.push((units, entry)),
                    StepOutcome::Left => {}
                }
                if self.is_compaction_over() {
                    return Ok(gained);
                }
            }
            waiting.sort_by_key(|&(units, _)| Reverse(units));
            while let Some(&(units, _)) = waiting.first() {
                let _hold_guard = HoldGuard(self);
                let made = match units < too_many_units {
                    true => self.make_window(units, pacer).await?,
                    false => MadeWindow::NotFound,
                };
                match made {
                    MadeWindow::Empty => {}
                    MadeWindow::NotFound => {
                        too_many_units = too_many_units.min(units);
                        // A shorter value may find one.
                        waiting.retain(|&(other, _)| other < units);
                        continue;
                    }
                    // So that nothing is moved again and again for nothing, others come after a rest.
                    MadeWindow::NotEmptied => return Ok(gained),
                }
                let (before, mut left) = (waiting.len(), Vec::new());
                for (units, entry) in waiting {
                    match self
                        .run_step(pacer, move |core| async move { core.join_pieces(entry, true).await })
                        .await?
                    {
                        StepOutcome::Written(_) => gained = true,
                        StepOutcome::NoRun(_) => left.push((units, entry)),
                        StepOutcome::Left => {}
                    }
                }
                waiting = left;
                // Others took the window: they had a use for it.
                if waiting.len() == before || self.is_compaction_over() {
                    return Ok(gained);
                }
            }
        }
        Ok(gained)
    }

    /// Makes one record of a value in pieces, in the window if `is_in_window`.
    async fn join_pieces(
        &self,
        entry: IndexedRecord,
        is_in_window: bool,
    ) -> Result<StepOutcome, EngineError> {
        let (volume, unit) = (&self.volume, self.volume.unit_bytes());
        let IndexedRecord { record_ref, .. } = entry;
        // What a value whose space others have now still says is not made durable.
        if volume.lost_pieces.lock().contains(&record_ref.location) {
            return Ok(StepOutcome::Left);
        }
        let epoch_guard = self.enter_epoch();
        if !volume.has_entry(entry.partition, entry.tag, record_ref) {
            return Ok(StepOutcome::Left);
        }
        // What cannot be read is reported to reads of the key, and of no account to other values.
        let Ok(head) = self.read_whole(record_ref).await else { return Ok(StepOutcome::Left) };
        let Some((header, key, hash)) = self.record_of_entry(&entry, &head) else {
            return Ok(StepOutcome::Left);
        };
        let (value_bytes, meta) = (header.value_bytes, header.meta);
        let units = record_bytes(key.len(), value_bytes).div_ceil(unit) as u64;
        // One that has expired is to be forgotten, or replaced.
        if units > RECORD_UNITS_MAX || !write_rules::is_live(&meta, || volume.clock.now()) {
            return Ok(StepOutcome::Left);
        }
        let extent = match is_in_window {
            true => self.take_from_window(units),
            false => self.allocate_apart(hash, units),
        };
        let Some(extent) = extent else { return Ok(StepOutcome::NoRun(units)) };
        let mut space = ReservedSpace::new(volume);
        space.head = Some(extent);
        let Some(mut buffer) = self.pool.take(units as usize * unit) else { return Ok(StepOutcome::Left) };
        let offset = LAYOUT.value_offset(key.len());
        let value = &mut buffer[offset..offset + value_bytes];
        if self.read_pieces_into(&header, &head, 0..value_bytes, value).await.is_err() {
            return Ok(StepOutcome::Left);
        }
        let flags = meta.flags.without(RecordFlags::PIECES);
        let meta = RecordMeta { flags, ..meta };
        let record = RecordToWrite { buffer, value_bytes, stored_bytes: value_bytes, meta };
        let outcome = self.replace(&entry, VerifiedRecord { key, hash, record }, &mut space).await?;
        drop(epoch_guard);
        if let StepOutcome::Written(units) = outcome {
            self.count_compacted(true, units);
            self.flush_freed().await?;
        }
        Ok(outcome)
    }
}

/// Waits until a condition holds, which is looked at whenever the task is polled.
async fn wait_until(condition: impl Fn() -> bool) {
    poll_fn(|_| if condition() { Poll::Ready(()) } else { Poll::Pending }).await;
}
