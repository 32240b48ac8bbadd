//! Group commit: whoever waits for durability waits together.
//!
//! In: one index change per put or delete whose record is on the device already. Out: journal batches,
//! flushes, changes of the index, freed space. Holds: the changes that wait, and where the ring goes on.
//!
//! ```text
//!   changes wait ──▶ the first to find no leader leads: takes up to a batch of them, writes both copies,
//!        ▲           flushes, applies them to the index in order, answers them ──┐
//!        └────────── the next to wait leads the next batch ◀────────────────────┘
//! ```
//! Invariants: one batch is under way at a time; batches are numbered without gaps; changes reach the
//! index in the order of the journal and only after their batch is durable; after a failed journal write
//! no change is ever acknowledged again (whether that batch is on the device cannot be known).

use super::HashEngine;
use super::journal::{self, BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, BatchHeader, Entry, batch_units_max};
use super::space::Extent;
use super::volume::Volume;
use crate::planted::{self, Bug};
use crate::{Durability, Fault};
use octokv_base::Buffer;
use octokv_flash::DeviceError;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

/// How often a checkpoint is tried for which a batch waits.
const CHECKPOINT_TRIES: u32 = 3;

/// A place in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalPosition {
    /// The unit of the ring where the next batch begins.
    pub unit: u32,
    /// The number of that batch.
    pub batch: u64,
    /// The number of its first entry.
    pub entry: u64,
    /// Units used since the volume was opened, those left at the ring's end included.
    pub used: u64,
}

/// The changes that wait and the state of the journal.
pub struct Commits {
    state: Mutex<State>,
    failed: AtomicBool,
    ring_units: u32,
    batch_units_max: u32,
}

struct State {
    waiting: VecDeque<Waiting>,
    /// How many changes were committed before the first that waits.
    committed: u64,
    leading: bool,
    next: JournalPosition,
    /// The batch that is being written.
    under_way: Option<JournalPosition>,
    /// Where the last checkpoint lets replay begin.
    tail_used: u64,
    /// Batches up to this one are durable.
    flushed_through: u64,
    /// Space freed by batches after that one: a power cut may yet bring back who had it.
    limbo: Vec<Extent>,
    /// The last batch with changes, and what the newest batch says of durability.
    last_changes: u64,
    last_said: u64,
    batches: u64,
    /// Who keeps the volume in order, asleep until there are changes to mark.
    maintainer: Option<Waker>,
    /// Reused by each leader in turn.
    scratch: Option<Scratch>,
}

struct Waiting {
    entry: Entry,
    waker: Option<Waker>,
}

struct Scratch {
    entries: Vec<Entry>,
    freed: Vec<Extent>,
    wakers: Vec<Waker>,
    copies: [Buffer; 2],
}

/// What a waiter does next.
enum Turn {
    Lead,
    Done(Result<(), Fault>),
}

impl Commits {
    pub(super) fn new(next: JournalPosition, ring_units: u32, unit_bytes: u32) -> Commits {
        let copy = || Buffer::zeroed(BATCH_BYTES_MAX.next_multiple_of(4096));
        let scratch = Scratch {
            entries: Vec::with_capacity(BATCH_ENTRIES_MAX),
            freed: Vec::with_capacity(BATCH_ENTRIES_MAX),
            wakers: Vec::with_capacity(BATCH_ENTRIES_MAX),
            copies: [copy(), copy()],
        };
        let durable = next.batch.saturating_sub(1);
        let state = State {
            waiting: VecDeque::with_capacity(BATCH_ENTRIES_MAX),
            committed: 0,
            leading: false,
            next,
            under_way: None,
            tail_used: 0,
            flushed_through: durable,
            limbo: Vec::new(),
            last_changes: durable,
            last_said: 0,
            batches: 0,
            maintainer: None,
            scratch: Some(scratch),
        };
        Commits {
            state: Mutex::new(state),
            failed: AtomicBool::new(false),
            ring_units,
            batch_units_max: batch_units_max(unit_bytes),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn batches(&self) -> u64 {
        self.state.lock().batches
    }

    /// Where replay must begin for an index written from now on.
    pub(super) fn replay_from(&self) -> JournalPosition {
        let state = self.state.lock();
        let mut position = state.under_way.unwrap_or(state.next);
        if position.unit + self.batch_units_max > self.ring_units {
            position.unit = 0;
        }
        position
    }

    /// Lets the ring use again what lies before `position`.
    pub(super) fn release_before(&self, position: JournalPosition) {
        self.state.lock().tail_used = position.used;
    }

    /// Whether half of the ring is in use.
    pub(super) fn wants_checkpoint(&self) -> bool {
        let state = self.state.lock();
        state.next.used - state.tail_used > u64::from(self.ring_units) / 2
    }

    /// Stops all further writes: what the device holds is no longer known.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        let wakers: Vec<Waker> =
            self.state.lock().waiting.iter_mut().filter_map(|waiting| waiting.waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    fn join(&self, entry: Entry) -> u64 {
        let mut state = self.state.lock();
        state.waiting.push_back(Waiting { entry, waker: None });
        state.committed + state.waiting.len() as u64 - 1
    }

    /// Whether a batch of any size fits before the ring's end meets its tail.
    fn has_room(&self) -> bool {
        let state = self.state.lock();
        // A batch, and at worst as much again left unused at the end of the ring.
        state.next.used + 2 * u64::from(self.batch_units_max) - state.tail_used <= u64::from(self.ring_units)
    }

    /// Takes the changes of the next batch and its place in the ring.
    fn take_batch(&self) -> (Scratch, JournalPosition) {
        let mut state = self.state.lock();
        let mut scratch = state.scratch.take().expect("one leader at a time");
        scratch.entries.clear();
        scratch.freed.clear();
        let most = BATCH_ENTRIES_MAX;
        scratch.entries.extend(state.waiting.iter().take(most).map(|waiting| waiting.entry));
        if state.next.unit + self.batch_units_max > self.ring_units {
            state.next.used += u64::from(self.ring_units - state.next.unit);
            state.next.unit = 0;
        }
        let at = state.next;
        state.under_way = Some(at);
        (scratch, at)
    }

    fn header_of(&self, at: JournalPosition, volume: &Volume) -> BatchHeader {
        let flushed_through = self.state.lock().flushed_through;
        BatchHeader {
            volume: volume.id(),
            batch: at.batch,
            first_entry: at.entry,
            incarnation: volume.superblock.lock().incarnation,
            unflushed: volume.durability == Durability::Device,
            flushed_through,
        }
    }

    /// The last batch that was written, and the space that waits for it to be durable; `None` when it is.
    fn take_limbo(&self) -> Option<(u64, Vec<Extent>)> {
        let mut state = self.state.lock();
        let last = state.next.batch.saturating_sub(1);
        (state.flushed_through < last).then(|| (last, std::mem::take(&mut state.limbo)))
    }

    /// Notes that the batch is written and its changes are in the index, and answers those who waited.
    fn batch_is_done(&self, at: JournalPosition, units: u32, said: u64, durable: bool, mut scratch: Scratch) {
        let mut state = self.state.lock();
        let count = scratch.entries.len();
        state.next = JournalPosition {
            unit: at.unit + units,
            batch: at.batch + 1,
            entry: at.entry + count as u64,
            used: at.used + u64::from(units),
        };
        state.under_way = None;
        if durable {
            state.flushed_through = at.batch;
        }
        state.last_said = said;
        state.batches += 1;
        if count > 0 {
            state.last_changes = at.batch;
        }
        state.committed += count as u64;
        scratch.wakers.extend(state.waiting.drain(..count).filter_map(|waiting| waiting.waker));
        if state.last_said < state.last_changes {
            scratch.wakers.extend(state.maintainer.take());
        }
        drop(state);
        scratch.wakers.drain(..).for_each(Waker::wake);
        self.state.lock().scratch = Some(scratch);
    }

    /// Gives the lead to the next who waits.
    fn step_down(&self) {
        let mut state = self.state.lock();
        state.leading = false;
        let next = state.waiting.front_mut().and_then(|waiting| waiting.waker.take());
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        self.has_failed() || (!state.leading && state.waiting.is_empty())
    }

    fn is_committed(&self, ticket: u64) -> bool {
        self.state.lock().committed > ticket
    }

    /// Waits until there are changes that the journal does not yet say are durable.
    pub(super) async fn changes(&self) {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if state.last_said < state.last_changes {
                return Poll::Ready(());
            }
            state.maintainer = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether the newest batch does not yet say that the last changes are durable, and nobody leads.
    fn take_lead_to_mark(&self) -> bool {
        let mut state = self.state.lock();
        let wanted = state.last_said < state.last_changes && !state.leading && state.waiting.is_empty();
        state.leading |= wanted;
        wanted
    }
}

/// Work that must come to its end: where it is dropped or fails half-way, what the device holds is not
/// known, and nothing more is written until the volume is opened again.
pub(super) struct Unfinished<'a>(pub(super) &'a Commits);

impl Unfinished<'_> {
    /// It has come to its end.
    pub(super) fn finished(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl HashEngine {
    /// Makes one change durable and visible. The key's lock is held.
    pub(super) async fn commit(&self, entry: Entry) -> Result<(), Fault> {
        if self.volume.volatile {
            self.volume.epochs.free(self.volume.apply(&entry, 0).as_slice());
            return Ok(());
        }
        let commits = &self.volume.commits;
        let ticket = commits.join(entry);
        let turn = poll_fn(|context| {
            let mut state = commits.state.lock();
            if state.committed > ticket {
                return Poll::Ready(Turn::Done(Ok(())));
            }
            if commits.has_failed() {
                return Poll::Ready(Turn::Done(Err(Fault::ReadOnly)));
            }
            if !state.leading {
                state.leading = true;
                return Poll::Ready(Turn::Lead);
            }
            let place = (ticket - state.committed) as usize;
            state.waiting[place].waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        match turn {
            Turn::Done(result) => result,
            Turn::Lead => self.lead(ticket).await,
        }
    }

    /// Writes batches until the change of `ticket` is among them.
    async fn lead(&self, ticket: u64) -> Result<(), Fault> {
        let commits = &self.volume.commits;
        let lead = Unfinished(commits);
        while !commits.is_committed(ticket) {
            self.write_batch().await?;
        }
        lead.finished();
        commits.step_down();
        Ok(())
    }

    /// Makes durable what was acknowledged without a flush, and lets the space that it freed be used.
    pub(super) async fn settle(&self) -> Result<(), Fault> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        // Whoever comes second waits for the space that the first has taken out of limbo.
        let _held = volume.checkpointing.lock(1).await;
        let Some((batch, freed)) = commits.take_limbo() else { return Ok(()) };
        self.flush_device().await?;
        let mut state = commits.state.lock();
        state.flushed_through = state.flushed_through.max(batch);
        volume.epochs.free(&freed);
        Ok(())
    }

    /// Says in the journal that the last changes are durable, so that replay need not verify their records
    /// and takes damage to them for damage, not for a write that a crash cut short. For when there is
    /// nothing else to do; [`HashEngine::maintain`] does it.
    pub async fn mark(&self) -> Result<(), Fault> {
        let commits = &self.volume.commits;
        if !commits.has_failed() && commits.take_lead_to_mark() {
            let lead = Unfinished(commits);
            self.write_batch().await?;
            lead.finished();
            commits.step_down();
        }
        Ok(())
    }

    /// Makes the changes of a batch in the index and notes the space that they free.
    fn publish(&self, scratch: &mut Scratch, at: JournalPosition) {
        let numbered = scratch.entries.iter().zip(at.entry..);
        scratch.freed.extend(numbered.filter_map(|(entry, number)| self.volume.apply(entry, number)));
    }

    /// Waits for a checkpoint, or writes it, until a batch fits the ring. One that fails leaves the one before
    /// in force, so it is tried again; only a device that fails every time ends the writing.
    async fn make_room(&self) -> Result<(), Fault> {
        let commits = &self.volume.commits;
        let mut tries = CHECKPOINT_TRIES;
        while !commits.has_room() {
            if let Err(fault) = self.checkpoint_when(|| !commits.has_room()).await {
                tries -= 1;
                if tries == 0 || commits.has_failed() {
                    return Err(fault);
                }
            }
        }
        Ok(())
    }

    /// Writes one batch of what waits, applies it and answers it. The caller leads.
    async fn write_batch(&self) -> Result<(), Fault> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        if !commits.has_room() {
            // In memory of its own: every task has room for the largest of its futures, and this one is rare.
            Box::pin(self.make_room()).await?;
        }
        let (mut scratch, at) = commits.take_batch();
        if planted::is(Bug::PublishBeforeDurable) {
            self.publish(&mut scratch, at);
        }
        let header = commits.header_of(at, volume);
        let [mut first, mut second] = scratch.copies;
        first.set_len(first.capacity());
        let units = journal::encode(&mut first, &header, &scratch.entries, volume.fixed().unit_bytes);
        let bytes = units as usize * volume.unit_bytes();
        first.set_len(bytes);
        second.set_len(bytes);
        second.copy_from_slice(&first);
        let write = |copy, buffer| {
            let unit = volume.fixed().journal_first(copy) + u64::from(at.unit);
            self.device.write(volume.lba(unit), buffer)
        };
        let (first, second) = (write(0, first), write(1, second));
        let (first, second) = (first.await, second.await);
        first.result.and(second.result)?;
        let durable = volume.durability == Durability::Flush;
        if durable && !planted::is(Bug::SkipFlush) {
            self.device.flush().await.result?;
        }
        let lost = Fault::Device(DeviceError::Io(0));
        scratch.copies = [first.buffer.ok_or(lost)?, second.buffer.ok_or(lost)?];
        if !planted::is(Bug::PublishBeforeDurable) {
            self.publish(&mut scratch, at);
        }
        // Only now: a reader may find a record until its entry is out of the index.
        if planted::is(Bug::ReuseSpaceEarly) {
            // It is free already.
        } else if durable || planted::is(Bug::FreeUnflushed) {
            volume.epochs.free(&scratch.freed);
        } else {
            commits.state.lock().limbo.extend_from_slice(&scratch.freed);
        }
        commits.batch_is_done(at, units, header.flushed_through, durable, scratch);
        Ok(())
    }
}
