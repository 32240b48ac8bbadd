//! Group commit: concurrent writes share journal batches and flushes.
//!
//! In: one change per put or delete, with its record. Out: records, journal batches, flushes, applied changes, freed space. The state in between is in [`super::commit_queue`]; what an engine adds is [`GroupCommit`].
//!
//! ```text
//!   changes queue ──▶ one writer leads: claims up to a batch, writes its records, side by side as one, and both copies,
//!        ▲            flushes, and in the order of the batches applies the changes and wakes the writers ──┐
//!        └────────── the next writer leads the next batch ◀───────────────────────────────────────────────┘
//! ```
//! Invariants: at most [`LEADERS_MAX`](super::commit_queue::LEADERS_MAX) batches are in flight, and no change is in two of
//! them; batches are numbered without gaps; a batch is flushed after its copies and all records that it names are
//! written; changes are applied and acknowledged in the order of the journal, after their batch and all preceding ones
//! are durable; after a failed journal write no change is acknowledged and no further batch is claimed until the next
//! opening, since that batch may or may not be on the device.
//!
//! A crash may thus leave a batch without its records, or without the preceding batch; neither was acknowledged. Replay
//! verifies the records of each batch that no later one marks as durable.
//!
//! Entries may change before the flush. If the write of a record has failed, its entry is cancelled. The predecessor's key
//! is read and compared while the record is written: if it is another key, the entry is amended to replace nothing.
//! Records of a batch whose space is adjacent leave as one vectored write, for which the device needs no more than for one of them;
//! if it fails, so do all of their changes.

use super::allocator::Extent;
use super::batch_parts::{BatchBuffers, ChangeState, UnwrittenRecord};
use super::commit_queue::{BatchClaim, CommitQueue, PoisonGuard, WaiterAction};
use super::journal::JournalPosition;
use super::journal::{self, BatchHeader, JournalEntry};
use super::key_locks::{KeyGuard, KeyLocks};
use crate::bug_injection::{self, InjectedBug};
use crate::{Durability, EngineError};
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceFuture, VECTOR_BUFFERS_MAX};
use smallvec::SmallVec;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

/// Attempts to write a checkpoint for which a batch waits.
const CHECKPOINT_ATTEMPTS: u32 = 3;
/// The longest record, in bytes, that is written with its batch: a longer one would delay the other changes.
const BATCHED_RECORD_BYTES_MAX: usize = 128 << 10;
/// Bytes from which a vectored write of records gets no further record: a device works on several at once.
const VECTOR_BYTES: usize = 512 << 10;
/// The number of the checkpoint lock in [`GroupCommit::maintenance_locks`].
const CHECKPOINT_LOCK: u64 = 0;
/// The number of the deferred flush lock in [`GroupCommit::maintenance_locks`].
const FLUSH_LOCK: u64 = 1;
/// The number of the preparation lock in [`GroupCommit::maintenance_locks`].
const PREPARATION_LOCK: u64 = 2;
/// The number of the lock of the last space in [`GroupCommit::maintenance_locks`].
const LAST_SPACE_LOCK: u64 = 3;
/// The number of the compaction lock in [`GroupCommit::maintenance_locks`].
const COMPACTION_LOCK: u64 = 4;

/// One core's handle on an engine whose changes are committed in groups.
pub trait GroupCommit {
    /// A change.
    type Entry: JournalEntry;

    /// The changes of all cores.
    fn commits(&self) -> &CommitQueue<Self::Entry>;
    /// The device of journal and records.
    fn device(&self) -> &dyn Device;
    /// The block of a unit of a copy (0, 1) of the journal.
    fn journal_lba(&self, copy: u64, unit: u32) -> Lba;
    /// Applies a durable change, and gives the space that it frees. Changes come in the order of their numbers.
    fn apply(&self, entry: &Self::Entry, number: u64) -> Option<Extent>;
    /// Retires freed space, which waits for its readers.
    fn retire(&self, freed: &[Extent]);
    /// Locks of this module: one serializes checkpoints, one deferred flushes, one the preparation of never-written space, one the
    /// deletes that take the last space, one the steps of compaction.
    fn maintenance_locks(&self) -> &KeyLocks;
    /// Writes a checkpoint, and releases the journal before it. REQUIRES: no other is being written.
    fn write_checkpoint(&self) -> impl Future<Output = Result<(), EngineError>>;
}

/// Locks out other checkpoints until the guard is dropped.
pub async fn lock_checkpoint<E: GroupCommit>(engine: &E) -> KeyGuard<'_> {
    engine.maintenance_locks().lock(CHECKPOINT_LOCK).await
}

/// Locks out preparation, which reserves space of the record area and of the journal, until the guard is dropped.
pub async fn lock_preparation<E: GroupCommit>(engine: &E) -> KeyGuard<'_> {
    engine.maintenance_locks().lock(PREPARATION_LOCK).await
}

/// Locks out steps of compaction until the guard is dropped. REQUIRES: the caller is in no epoch, and has none of the other locks but
/// that of the last space.
pub async fn lock_compaction<E: GroupCommit>(engine: &E) -> KeyGuard<'_> {
    engine.maintenance_locks().lock(COMPACTION_LOCK).await
}

/// Whether a step of compaction runs, or somebody locks it out. It shows a step that has begun before an allocation of the caller
/// failed because of it: the lock of the bitmap orders the two.
pub fn is_compaction_locked<E: GroupCommit>(engine: &E) -> bool {
    engine.maintenance_locks().is_locked(COMPACTION_LOCK)
}

/// Locks out other deletes that need the last free space until the guard is dropped. REQUIRES: the caller has none of the
/// other locks.
pub async fn lock_last_space<E: GroupCommit>(engine: &E) -> KeyGuard<'_> {
    engine.maintenance_locks().lock(LAST_SPACE_LOCK).await
}

/// Writes a checkpoint if `needed` still holds when no other is being written.
///
/// # Errors
/// Those of [`GroupCommit::write_checkpoint`].
pub async fn checkpoint_if<E: GroupCommit>(engine: &E, needed: impl Fn() -> bool) -> Result<(), EngineError> {
    let _guard = lock_checkpoint(engine).await;
    match needed() {
        true => engine.write_checkpoint().await,
        false => Ok(()),
    }
}

/// Flushes the device. A failure makes the volume read-only: the kernel reports lost writes only once, and not which
/// writes they were.
///
/// # Errors
/// The device's. [`EngineError::ReadOnly`] if the volume is read-only, also when this flush succeeds: an earlier one may have lost acknowledged
/// writes, and a batch that failed may be on the device.
pub async fn flush_device<E: GroupCommit>(engine: &E) -> Result<(), EngineError> {
    let flushed = engine.device().flush().await.result;
    if flushed.is_err() {
        engine.commits().fail();
    }
    flushed?;
    match engine.commits().has_failed() {
        true => Err(EngineError::ReadOnly),
        false => Ok(()),
    }
}

/// Makes one change durable and applies it, with its record if it has one. Meanwhile `decision` finds out what the change
/// replaces. REQUIRES: the caller holds the key's lock.
///
/// The inner result is that of the decision and of the record's write: if one failed, nothing has changed, and the caller
/// releases the record's space.
///
/// # Errors
/// A failed journal write, which makes the volume read-only.
pub async fn commit<E: GroupCommit, R>(
    engine: &E,
    entry: E::Entry,
    mut record: Option<UnwrittenRecord>,
    decision: &mut R,
) -> Result<Result<(), EngineError>, EngineError>
where
    R: Future<Output = Result<<E::Entry as JournalEntry>::Outcome, EngineError>> + Unpin,
{
    let commits = engine.commits();
    if let Some(long) = record.take_if(|record| record.buffer.len() > BATCHED_RECORD_BYTES_MAX)
        && let Err(error) = engine.device().write(long.at, long.buffer).await.result
    {
        return Ok(Err(error.into()));
    }
    // It often needs nothing.
    let mut state = ChangeState::Undecided;
    if let Poll::Ready(outcome) = poll_fn(|context| Poll::Ready(Pin::new(&mut *decision).poll(context))).await
    {
        match outcome {
            Ok(outcome) => state = ChangeState::Decided(outcome),
            Err(error) => return Ok(Err(error)),
        }
    }
    let mut is_undecided = state == ChangeState::Undecided;
    let ticket = commits.enqueue(entry, record, state);
    let commit_guard = PoisonGuard(commits);
    let mut result = Ok(());
    let mut poll_decision = |context: &mut Context<'_>| {
        if is_undecided && let Poll::Ready(outcome) = Pin::new(&mut *decision).poll(context) {
            is_undecided = false;
            commits.decide(ticket, ChangeState::from_result(&outcome));
            result = outcome.map(drop);
        }
    };
    let cancelled = loop {
        let action = poll_fn(|context| {
            poll_decision(context);
            commits.poll_waiter(ticket, context)
        })
        .await;
        match action {
            WaiterAction::Lead => {
                let leader_guard = PoisonGuard(commits);
                let mut batch = pin!(write_batch(engine, Some(ticket)));
                poll_fn(|context| {
                    poll_decision(context);
                    batch.as_mut().poll(context)
                })
                .await?;
                leader_guard.disarm();
                commits.release_leadership();
            }
            WaiterAction::ReadOnly => return Err(EngineError::ReadOnly),
            WaiterAction::Cancelled(error) => break Err(error.into()),
            WaiterAction::Committed => break Ok(()),
        }
    };
    commit_guard.disarm();
    Ok(result.and(cancelled))
}

/// Flushes the changes that were acknowledged without a flush, and retires the space that they freed.
///
/// # Errors
/// A failed flush, which makes the volume read-only.
pub async fn flush_deferred<E: GroupCommit>(engine: &E) -> Result<(), EngineError> {
    let commits = engine.commits();
    // A second caller waits until the first has retired the pending space.
    let _guard = engine.maintenance_locks().lock(FLUSH_LOCK).await;
    let Some((batch, freed)) = commits.take_pending_free() else { return Ok(()) };
    flush_device(engine).await?;
    commits.note_flushed_through(batch);
    engine.retire(&freed);
    Ok(())
}

/// Writes a durability marker: an empty batch that marks the last changes as durable. Replay then does not verify
/// their records, and reports damage to them as corruption instead of as a torn write. [`Engine::maintain`](crate::Engine::maintain) calls
/// it when idle. Does nothing if a writer leads.
///
/// # Errors
/// A failed journal write, which makes the volume read-only.
pub async fn write_durability_marker<E: GroupCommit>(engine: &E) -> Result<(), EngineError> {
    let commits = engine.commits();
    if !commits.has_failed() && commits.try_lead_for_marker() {
        let leader_guard = PoisonGuard(commits);
        write_batch(engine, None).await?;
        leader_guard.disarm();
        commits.release_leadership();
    }
    Ok(())
}

/// Applies the changes of a batch and collects the space that they free.
fn publish<E: GroupCommit>(engine: &E, buffers: &mut BatchBuffers<E::Entry>, at: JournalPosition) {
    let numbered = buffers.entries.iter().zip(at.entry..);
    buffers.freed.extend(numbered.filter_map(|(entry, number)| engine.apply(entry, number)));
}

/// Writes a checkpoint, or waits for one, until a batch fits in the ring. After a failed attempt the previous
/// checkpoint remains valid; after [`CHECKPOINT_ATTEMPTS`] failures the volume becomes read-only.
async fn make_journal_space<E: GroupCommit>(engine: &E) -> Result<(), EngineError> {
    let commits = engine.commits();
    let mut attempts_left = CHECKPOINT_ATTEMPTS;
    while !commits.has_room() {
        if commits.has_reservation() {
            // It ends before the lock is released.
            drop(lock_preparation(engine).await);
            continue;
        }
        if let Err(error) = checkpoint_if(engine, || !commits.has_room()).await {
            attempts_left -= 1;
            if attempts_left == 0 || commits.has_failed() {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// A write of records of a batch: the indices of their entries, and the device's operation.
type RecordsWrite = (SmallVec<[usize; 1]>, DeviceFuture);

/// Starts to write the records of a batch, adjacent ones together.
fn start_records<E: GroupCommit>(
    engine: &E,
    buffers: &mut BatchBuffers<E::Entry>,
) -> SmallVec<[RecordsWrite; 1]> {
    let device = engine.device();
    let block_bytes = u64::from(device.geometry().block_bytes);
    buffers.records.sort_unstable_by_key(|(_, record)| record.at);
    let mut writes = SmallVec::new();
    let mut records = buffers.records.drain(..).peekable();
    while let Some((index, first)) = records.next() {
        let (mut indices, mut vector) = (SmallVec::from_buf([index]), Vec::new());
        let (mut bytes, at) = (first.buffer.len(), first.at);
        let mut last = Some(first.buffer);
        while bytes < VECTOR_BYTES
            && vector.len() + 1 < VECTOR_BUFFERS_MAX
            && let Some((index, next)) =
                records.next_if(|(_, next)| next.at.0 == at.0 + bytes as u64 / block_bytes)
        {
            bytes += next.buffer.len();
            vector.extend(last.replace(next.buffer));
            indices.push(index);
        }
        let write = match last {
            Some(buffer) if vector.is_empty() => device.write(at, buffer),
            last => {
                vector.extend(last);
                if bug_injection::is_injected(InjectedBug::MisplaceRecords) {
                    let end = vector.len() - 1;
                    vector.swap(0, end);
                }
                device.write_vectored(at, vector)
            }
        };
        writes.push((indices, write));
    }
    writes
}

/// Waits for the writes of a batch's records, and cancels the changes of those that failed.
async fn finish_records<E: GroupCommit>(engine: &E, batch: u64, writes: SmallVec<[RecordsWrite; 1]>) {
    for (indices, write) in writes {
        if let Err(error) = write.await.result {
            engine.commits().cancel(batch, indices.into_iter(), error);
        }
    }
}

/// Writes both copies of a batch.
async fn write_copies<E: GroupCommit>(
    engine: &E,
    buffers: &mut BatchBuffers<E::Entry>,
    unit: u32,
    header: &BatchHeader,
) -> Result<(), EngineError> {
    let unit_bytes = engine.commits().unit_bytes();
    let empty = [Buffer::zeroed(0), Buffer::zeroed(0)];
    let [mut first, mut second] = std::mem::replace(&mut buffers.copies, empty);
    first.set_len(first.capacity());
    let units = journal::encode(&mut first, header, &buffers.entries, unit_bytes);
    let bytes = units as usize * unit_bytes as usize;
    first.set_len(bytes);
    second.set_len(bytes);
    second.copy_from_slice(&first);
    let write = |copy, buffer| engine.device().write(engine.journal_lba(copy, unit), buffer);
    let (first, second) = (write(0, first), write(1, second));
    let (first, second) = (first.await, second.await);
    first.result.and(second.result)?;
    // Only a bug of ours loses the buffer of a write.
    buffers.copies = [first, second].map(|written| written.buffer.expect("a write returns its buffer"));
    Ok(())
}

/// Writes, flushes and applies one batch, and wakes its writers. Does nothing if another leader has claimed `own`, the
/// caller's change. REQUIRES: the caller leads, and meanwhile polls what it finds out for its own change.
async fn write_batch<E: GroupCommit>(engine: &E, own: Option<u64>) -> Result<(), EngineError> {
    let commits = engine.commits();
    let (mut buffers, at, header) = loop {
        match commits.claim_batch(own) {
            BatchClaim::Batch(scratch, at, header) => break (scratch, at, header),
            BatchClaim::AlreadyClaimed => return Ok(()),
            BatchClaim::ReadOnly => return Err(EngineError::ReadOnly),
            // Boxed because it is rare: it would enlarge every writer's future.
            BatchClaim::JournalFull => Box::pin(make_journal_space(engine)).await?,
        }
    };
    if bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
        publish(engine, &mut buffers, at);
    }
    let records = start_records(engine, &mut buffers);
    write_copies(engine, &mut buffers, at.unit, &header).await?;
    let unfinished = match bug_injection::is_injected(InjectedBug::SkipRecordWait) {
        true => records,
        false => {
            finish_records(engine, at.batch, records).await;
            commits.wait_decided(at.batch).await?;
            SmallVec::new()
        }
    };
    let is_amended = commits.amend_entries(at.batch, &mut buffers.entries);
    if is_amended {
        write_copies(engine, &mut buffers, at.unit, &header).await?;
    }
    let durable = commits.durability() == Durability::PowerSafe;
    // A put that failed must not reappear after a power loss, and the batch's first version may be on the device.
    if (durable || is_amended) && !bug_injection::is_injected(InjectedBug::SkipFlush) {
        engine.device().flush().await.result?;
    }
    commits.wait_predecessors(at.batch).await?;
    if !bug_injection::is_injected(InjectedBug::PublishBeforeDurable) {
        publish(engine, &mut buffers, at);
    }
    // After applying: a reader can find a record until its entry is out of the index.
    if bug_injection::is_injected(InjectedBug::ReuseSpaceEarly) {
        // The put has released the space already.
    } else if durable || bug_injection::is_injected(InjectedBug::ReuseSpaceUnflushed) {
        engine.retire(&buffers.freed);
    } else {
        commits.defer_free(&buffers.freed);
    }
    drop(unfinished);
    commits.complete_batch(header.flushed_through, durable, buffers);
    Ok(())
}
