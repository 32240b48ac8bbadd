//! Group commit: whoever waits for durability waits together.
//!
//! In: one index change per put or delete, whose record may still be on its way to the device. Out: journal
//! batches, flushes, changes of the index, freed space. What is remembered between them is [`super::batches`].
//!
//! ```text
//!   changes wait ──▶ one of them leads: takes up to a batch of them, writes both copies, meanwhile its records
//!        ▲           land; flushes; in the order of the batches applies them to the index and answers them ──┐
//!        └────────── the next to wait leads the next batch ◀──────────────────────────────────────────────┘
//! ```
//! Invariants: a few batches are under way at a time, and no entry is in two of them; batches are numbered
//! without gaps; a batch is flushed after its copies and every record that it names were written; changes reach
//! the index, and those who wait their answer, in the order of the journal and only once their batch and all
//! before it are durable; after a failed journal write no change is ever acknowledged again (whether that
//! batch is on the device cannot be known).
//!
//! A crash may thus leave a batch without its records, or without the batch before it; neither was acknowledged.
//! Replay verifies the records of every batch that no later one calls durable ([`super::open`]). Before the
//! flush a change whose record could not be written is struck from its batch, and one that would have replaced
//! another key's record is mended: what a put replaces is looked up in the index, and read to be sure, beside
//! all this.

use super::commit_queue::{
    BatchBuffers, BatchClaim, JournalPosition, PoisonGuard, RecordState, WaiterAction, WriteOutcome,
};
use super::engine::HashEngine;
use super::journal::{self, BatchHeader, JournalEntry};
use crate::bug_injection::{self, InjectedBug};
use crate::{Durability, EngineError};
use octokv_base::Buffer;
use std::cell::Cell;
use std::future::{Future, Ready, poll_fn};
use std::pin::{Pin, pin};

/// How often a checkpoint is tried for which a batch waits.
const CHECKPOINT_ATTEMPTS: u32 = 3;
/// The longest record, in bytes, that is still on its way when a batch takes its change: longer ones would keep
/// the others of the batch waiting.
const CONCURRENT_RECORD_BYTES_MAX: usize = 128 << 10;

impl HashEngine {
    /// Makes a change visible whose record landed on a device that keeps nothing.
    pub(super) fn apply_volatile(&self, entry: JournalEntry, outcome: WriteOutcome) {
        let volume = &self.volume;
        volume.epochs.retire(volume.apply(&outcome.amended(entry), 0).as_slice());
    }

    /// Makes one change durable and visible, with the record that it names and that `record` is writing. The
    /// key's lock is held. Where the record did not land the answer says why, nothing has changed, and its
    /// space is nobody's.
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

    /// Makes durable what was acknowledged without a flush, and lets the space that it freed be used.
    pub(super) async fn flush_deferred(&self) -> Result<(), EngineError> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        // Whoever comes second waits for the space that the first has taken out of limbo.
        let _guard = volume.maintenance_locks.lock(1).await;
        let Some((batch, freed)) = commits.take_pending_free() else { return Ok(()) };
        self.flush_device().await?;
        commits.note_flushed_through(batch);
        volume.epochs.retire(&freed);
        Ok(())
    }

    /// Says in the journal that the last changes are durable, so that replay need not verify their records
    /// and takes damage to them for damage, not for a write that a crash cut short. For when there is
    /// nothing else to do; [`HashEngine::maintain`] does it.
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

    /// Makes the changes of a batch in the index and notes the space that they free.
    fn publish(&self, buffers: &mut BatchBuffers, at: JournalPosition) {
        let numbered = buffers.entries.iter().zip(at.entry..);
        buffers.freed.extend(numbered.filter_map(|(entry, number)| self.volume.apply(entry, number)));
    }

    /// Waits for a checkpoint, or writes it, until a batch fits the ring. One that fails leaves the one before
    /// in force, so it is tried again; only a device that fails every time ends the writing.
    async fn make_journal_room(&self) -> Result<(), EngineError> {
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

    /// Writes one batch of what waits, applies it and answers it. The caller leads; `own` is its change and
    /// `landing` ends when that change's record has landed. Nothing is written where another has taken that change.
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
                // In memory of its own: every task has room for the largest of its futures, and this one is rare.
                BatchClaim::JournalFull => Box::pin(self.make_journal_room()).await?,
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
        // Whoever is told that a put failed must not find its value after a power cut: what the batch said first
        // may be on the device already.
        if (durable || is_amended) && !bug_injection::is_injected(InjectedBug::SkipFlush) {
            self.device.flush().await.result?;
        }
        commits.wait_predecessors(at.batch).await?;
        if !bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
            self.publish(&mut buffers, at);
        }
        // Only now: a reader may find a record until its entry is out of the index.
        if bug_injection::is_injected(InjectedBug::ReuseSpaceEarly) {
            // It is free already.
        } else if durable || bug_injection::is_injected(InjectedBug::ReuseSpaceUnflushed) {
            volume.epochs.retire(&buffers.freed);
        } else {
            commits.defer_free(&buffers.freed);
        }
        commits.complete_batch(header.flushed_through, durable, buffers);
        Ok(())
    }
}
