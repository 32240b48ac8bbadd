//! Group commit: concurrent writes share journal batches and flushes.
//!
//! In: one index change per put or delete, whose record write may still be in flight. Out: journal batches, flushes, index
//! changes, freed space. The state in between is in [`super::commit_queue`].
//!
//! ```text
//!   changes queue ──▶ one writer leads: claims up to a batch, writes both copies while the records are written,
//!        ▲            flushes, and in the order of the batches applies the changes and wakes the writers ──┐
//!        └────────── the next writer leads the next batch ◀───────────────────────────────────────────────┘
//! ```
//! Invariants: at most [`LEADERS_MAX`](super::commit_queue::LEADERS_MAX) batches are in flight, and no change is in two of
//! them; batches are numbered without gaps; a batch is flushed after its copies and all records that it names are
//! written; changes are applied and acknowledged in the order of the journal, after their batch and all preceding ones
//! are durable; after a failed journal write no change is acknowledged until the next opening, since that batch may or
//! may not be on the device.
//!
//! A crash may thus leave a batch without its records, or without the preceding batch; neither was acknowledged. Replay
//! verifies the records of each batch that no later one marks as durable ([`super::recovery`]). Before the flush, a
//! change whose record write failed is cancelled, and one whose predecessor is another key's record is amended: the
//! predecessor comes from the index and is read and compared beside the writes.

use super::commit_queue::{
    BatchBuffers, BatchClaim, JournalPosition, PoisonGuard, RecordState, WaiterAction, WriteOutcome,
};
use super::engine::HashEngine;
use super::journal::{self, BatchHeader, JournalEntry};
use super::volume::FLUSH_LOCK;
use crate::bug_injection::{self, InjectedBug};
use crate::{Durability, EngineError};
use octokv_base::Buffer;
use std::cell::Cell;
use std::future::{Future, Ready, poll_fn};
use std::pin::{Pin, pin};

/// Attempts to write a checkpoint for which a batch waits.
const CHECKPOINT_ATTEMPTS: u32 = 3;
/// The longest record, in bytes, that is written beside its batch: a longer one would delay the other changes.
const CONCURRENT_RECORD_BYTES_MAX: usize = 128 << 10;

impl HashEngine {
    /// Applies a change whose record is on a volatile device, which has no journal.
    pub(super) fn apply_volatile(&self, entry: JournalEntry, outcome: WriteOutcome) {
        let volume = &self.volume;
        volume.epochs.retire(volume.apply(&outcome.amended(entry), 0).as_slice());
    }

    /// Makes one change durable and applies it, beside `record_write`, the write of its record. REQUIRES: the caller
    /// holds the key's lock.
    ///
    /// The inner result is that of the record's write: if it failed, nothing has changed, and the caller releases the
    /// record's space.
    ///
    /// # Errors
    /// A failed journal write, which makes the volume read-only.
    pub(super) async fn commit(
        &self,
        mut entry: JournalEntry,
        record_write: impl Future<Output = Result<WriteOutcome, EngineError>>,
    ) -> Result<Result<(), EngineError>, EngineError> {
        let commits = &self.volume.commits;
        let mut record_write = pin!(record_write);
        let is_long = entry.units as usize * self.volume.unit_bytes() > CONCURRENT_RECORD_BYTES_MAX;
        let mut record_state = RecordState::InFlight;
        if is_long {
            match record_write.as_mut().await {
                Ok(outcome) => entry = outcome.amended(entry),
                Err(error) => return Ok(Err(error)),
            }
            record_state = RecordState::Written(WriteOutcome::Confirmed);
        }
        let ticket = commits.enqueue(entry, record_state);
        let commit_guard = PoisonGuard(commits);
        let result = Cell::new(Ok(()));
        let mut record_done = pin!((!is_long).then_some(async {
            let outcome = record_write.await;
            commits.set_record_state(ticket, RecordState::from_result(&outcome));
            result.set(outcome.map(drop));
        }));
        loop {
            let action = poll_fn(|context| {
                if let Some(pending) = record_done.as_mut().as_pin_mut()
                    && pending.poll(context).is_ready()
                {
                    record_done.set(None);
                }
                commits.poll_waiter(ticket, context)
            })
            .await;
            match action {
                WaiterAction::Lead => {
                    let leader_guard = PoisonGuard(commits);
                    self.write_batch(Some(ticket), record_done.as_mut()).await?;
                    leader_guard.disarm();
                    commits.release_leadership();
                }
                WaiterAction::Done(Err(error)) => return Err(error),
                WaiterAction::Done(Ok(())) => break,
            }
        }
        commit_guard.disarm();
        Ok(result.get())
    }

    /// Flushes the changes that were acknowledged without a flush, and retires the space that they freed.
    pub(super) async fn flush_deferred(&self) -> Result<(), EngineError> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        // A second caller waits until the first has retired the pending space.
        let _guard = volume.maintenance_locks.lock(FLUSH_LOCK).await;
        let Some((batch, freed)) = commits.take_pending_free() else { return Ok(()) };
        self.flush_device().await?;
        commits.note_flushed_through(batch);
        volume.epochs.retire(&freed);
        Ok(())
    }

    /// Writes a durability marker: an empty batch that marks the last changes as durable. Replay then does not verify
    /// their records, and reports damage to them as corruption instead of as a torn write. [`HashEngine::maintain`] calls
    /// it when idle. Does nothing if a writer leads.
    ///
    /// # Errors
    /// A failed journal write, which makes the volume read-only.
    pub async fn write_durability_marker(&self) -> Result<(), EngineError> {
        let commits = &self.volume.commits;
        if !commits.has_failed() && commits.try_lead_for_marker() {
            let leader_guard = PoisonGuard(commits);
            self.write_batch(None, pin!(None::<Ready<()>>)).await?;
            leader_guard.disarm();
            commits.release_leadership();
        }
        Ok(())
    }

    /// Applies the changes of a batch to the index and collects the space that they free.
    fn publish(&self, buffers: &mut BatchBuffers, at: JournalPosition) {
        let numbered = buffers.entries.iter().zip(at.entry..);
        buffers.freed.extend(numbered.filter_map(|(entry, number)| self.volume.apply(entry, number)));
    }

    /// Writes a checkpoint, or waits for one, until a batch fits in the ring. After a failed attempt the previous
    /// checkpoint remains valid; after [`CHECKPOINT_ATTEMPTS`] failures the volume becomes read-only.
    async fn make_journal_space(&self) -> Result<(), EngineError> {
        let commits = &self.volume.commits;
        let mut attempts_left = CHECKPOINT_ATTEMPTS;
        while !commits.has_room() {
            if let Err(error) = self.checkpoint_if(|| !commits.has_room()).await {
                attempts_left -= 1;
                if attempts_left == 0 || commits.has_failed() {
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Writes both copies of a batch.
    async fn write_copies(
        &self,
        buffers: &mut BatchBuffers,
        unit: u32,
        header: &BatchHeader,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        let empty = [Buffer::zeroed(0), Buffer::zeroed(0)];
        let [mut first, mut second] = std::mem::replace(&mut buffers.copies, empty);
        first.set_len(first.capacity());
        let units = journal::encode(&mut first, header, &buffers.entries, volume.layout().unit_bytes);
        let bytes = units as usize * volume.unit_bytes();
        first.set_len(bytes);
        second.set_len(bytes);
        second.copy_from_slice(&first);
        let write = |copy, buffer| {
            let unit = volume.layout().journal_start_unit(copy) + u64::from(unit);
            self.device.write(volume.lba(unit), buffer)
        };
        let (first, second) = (write(0, first), write(1, second));
        let (first, second) = (first.await, second.await);
        first.result.and(second.result)?;
        // Only a bug of ours loses the buffer of a write.
        buffers.copies = [first, second].map(|written| written.buffer.expect("a write returns its buffer"));
        Ok(())
    }

    /// Writes, flushes and applies one batch, and wakes its writers. Does nothing if another leader has claimed `own`, the
    /// caller's change, whose record write is `record_done`. REQUIRES: the caller leads.
    async fn write_batch(
        &self,
        own: Option<u64>,
        mut record_done: Pin<&mut Option<impl Future<Output = ()>>>,
    ) -> Result<(), EngineError> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        let (mut buffers, at, header) = loop {
            match commits.claim_batch(own) {
                BatchClaim::Batch(scratch, at, header) => break (scratch, at, header),
                BatchClaim::AlreadyClaimed => return Ok(()),
                // Boxed because it is rare: it would enlarge every writer's future.
                BatchClaim::JournalFull => Box::pin(self.make_journal_space()).await?,
            }
        };
        if bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
            self.publish(&mut buffers, at);
        }
        self.write_copies(&mut buffers, at.unit, &header).await?;
        if let Some(pending) = record_done.as_mut().as_pin_mut() {
            pending.await;
            record_done.set(None);
        }
        if !bug_injection::is_injected(InjectedBug::SkipRecordWait) {
            commits.wait_records(at.batch).await?;
        }
        let is_amended = commits.amend_entries(at.batch, &mut buffers.entries);
        if is_amended {
            self.write_copies(&mut buffers, at.unit, &header).await?;
        }
        let durable = volume.durability == Durability::PowerSafe;
        // A put that failed must not reappear after a power loss, and the batch's first version may be on the device.
        if (durable || is_amended) && !bug_injection::is_injected(InjectedBug::SkipFlush) {
            self.device.flush().await.result?;
        }
        commits.wait_predecessors(at.batch).await?;
        if !bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
            self.publish(&mut buffers, at);
        }
        // After applying: a reader can find a record until its entry is out of the index.
        if bug_injection::is_injected(InjectedBug::ReuseSpaceEarly) {
            // The put has released the space already.
        } else if durable || bug_injection::is_injected(InjectedBug::ReuseSpaceUnflushed) {
            volume.epochs.retire(&buffers.freed);
        } else {
            commits.defer_free(&buffers.freed);
        }
        commits.complete_batch(header.flushed_through, durable, buffers);
        Ok(())
    }
}
