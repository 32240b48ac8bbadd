//! What group commit remembers: the changes that wait, the batches that are under way, where the ring goes on.
//!
//! In: changes, and word of their records. Out: batches, in order, and who is woken. Does no input or output
//! itself: that is [`super::commit`]'s, which says how all this is used.
//!
//! ```text
//!   waiting:  ▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓ ▒▒▒▒▒▒▒   front: those of the batches under way, in their order; then those
//!             batch n    n+1    taken by none
//!   next:     where batch n+2 will begin
//! ```
//! Invariants: a change is in one batch; batches are numbered without gaps and leave in order; whoever waits is
//! woken when what it waits for has come, and everyone is when writing has failed.

use super::allocator::Extent;
use super::journal::{self, BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, BatchHeader, JournalEntry, batch_units_max};
use crate::bug_injection::{self, InjectedBug};
use crate::{Durability, EngineError};
use octokv_base::Buffer;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Batches under way at once. One more makes a put wait for less of the batch before it, and shares its
/// flush with fewer.
pub(super) const LEADERS_MAX: usize = 3;

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
    pub units_used: u64,
}

/// The journal that batches go to: its size, and the header fields that every batch of this opening shares.
#[derive(Clone, Copy, Debug)]
pub struct JournalConfig {
    /// Units of the ring.
    pub ring_units: u32,
    /// Bytes per unit.
    pub unit_bytes: u32,
    /// The volume's random number.
    pub volume_id: u64,
    /// The opening that writes.
    pub incarnation: u32,
    /// When a batch counts as complete.
    pub durability: Durability,
    /// Units of the record area: bounds the space that can be pending free.
    pub record_units: u64,
}

/// The changes that wait and the state of the journal.
pub struct CommitQueue {
    state: Mutex<CommitState>,
    failed: AtomicBool,
    config: JournalConfig,
}

struct CommitState {
    /// Those of the batches under way, then those that no batch has taken.
    queue: VecDeque<QueuedChange>,
    /// How many of them are in batches under way.
    claimed: usize,
    /// How many changes were committed before the first that waits.
    committed: u64,
    /// Who writes a batch, or makes room for one.
    leaders: usize,
    /// Where the next batch goes.
    next: JournalPosition,
    /// The batches that are being written, in order.
    in_flight: VecDeque<InFlightBatch>,
    /// Where the last checkpoint lets replay begin.
    tail_units_used: u64,
    /// Batches up to this one are in the index.
    published: u64,
    /// Batches up to this one are durable.
    flushed_through: u64,
    /// Space freed by batches after `flushed_through`, whose old records a power cut may bring back. At most one run
    /// per unit of the record area: the runs are disjoint, since none is allocated again before it leaves the list.
    pending_free: Vec<Extent>,
    /// The last batch with changes, and what the newest batch says of durability.
    last_change_batch: u64,
    last_marked_durable: u64,
    batches_written: u64,
    /// Who keeps the volume in order, asleep until there are changes to mark.
    maintainer: Option<Waker>,
    /// Used by each leader in turn.
    free_buffers: Vec<BatchBuffers>,
}

struct QueuedChange {
    entry: JournalEntry,
    record_state: RecordState,
    waker: Option<Waker>,
}

/// What is known of the record that a change names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordState {
    InFlight,
    /// It is on the device.
    Written(WriteOutcome),
    Failed,
}

impl RecordState {
    pub(super) fn from_result(outcome: &Result<WriteOutcome, EngineError>) -> RecordState {
        outcome.map_or(RecordState::Failed, RecordState::Written)
    }

    /// The change of `entry` as it has become.
    pub(super) fn amended(self, entry: JournalEntry) -> JournalEntry {
        match self {
            RecordState::InFlight => entry,
            RecordState::Written(outcome) => outcome.amended(entry),
            RecordState::Failed => entry.cancelled(),
        }
    }
}

/// How a record that was under way beside its batch came to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// In the place of the one that the change says it replaces, if any.
    Confirmed,
    /// Beside that one, which is another key's of the same tag.
    OtherKey,
}

impl WriteOutcome {
    /// The change of `entry` as it has become.
    pub(super) fn amended(self, entry: JournalEntry) -> JournalEntry {
        match self {
            WriteOutcome::Confirmed => entry,
            WriteOutcome::OtherKey => JournalEntry { old_location: 0, ..entry },
        }
    }
}

/// A batch that is being written.
struct InFlightBatch {
    position: JournalPosition,
    entry_count: usize,
    /// Records that it names and that are not written yet.
    unwritten_records: usize,
    /// Its leader, which waits for those or for the batches before.
    leader: Option<Waker>,
}

pub(super) struct BatchBuffers {
    pub(super) entries: Vec<JournalEntry>,
    pub(super) freed: Vec<Extent>,
    wakers: Vec<Waker>,
    pub(super) copies: [Buffer; 2],
}

impl BatchBuffers {
    fn new() -> BatchBuffers {
        let copy = || Buffer::zeroed(BATCH_BYTES_MAX.next_multiple_of(4096));
        BatchBuffers {
            entries: Vec::with_capacity(BATCH_ENTRIES_MAX),
            freed: Vec::with_capacity(BATCH_ENTRIES_MAX),
            wakers: Vec::with_capacity(BATCH_ENTRIES_MAX + 2),
            copies: [copy(), copy()],
        }
    }
}

/// What a waiter does next.
pub(super) enum WaiterAction {
    Lead,
    Done(Result<(), EngineError>),
}

/// What a leader finds.
// Made once a batch and taken apart at once.
#[expect(clippy::large_enum_variant)]
pub(super) enum BatchClaim {
    /// The changes of a batch, and what its header says.
    Batch(BatchBuffers, JournalPosition, BatchHeader),
    /// The ring has no room.
    JournalFull,
    /// Another took the leader's own change meanwhile.
    AlreadyClaimed,
}

/// Work that must come to its end: where it is dropped or fails half-way, what the device holds is not
/// known, and nothing more is written until the volume is opened again.
pub(super) struct PoisonGuard<'a>(pub(super) &'a CommitQueue);

impl PoisonGuard<'_> {
    /// It has come to its end.
    pub(super) fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for PoisonGuard<'_> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl CommitQueue {
    pub(super) fn new(next: JournalPosition, config: JournalConfig) -> CommitQueue {
        let durable = next.batch.saturating_sub(1);
        let state = CommitState {
            queue: VecDeque::with_capacity(BATCH_ENTRIES_MAX),
            claimed: 0,
            committed: 0,
            leaders: 0,
            next,
            in_flight: VecDeque::with_capacity(LEADERS_MAX),
            tail_units_used: 0,
            published: durable,
            flushed_through: durable,
            pending_free: Vec::new(),
            last_change_batch: durable,
            last_marked_durable: 0,
            batches_written: 0,
            maintainer: None,
            free_buffers: std::iter::repeat_with(BatchBuffers::new).take(LEADERS_MAX).collect(),
        };
        CommitQueue { state: Mutex::new(state), failed: AtomicBool::new(false), config }
    }

    fn batch_units_max(&self) -> u32 {
        batch_units_max(self.config.unit_bytes)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn batches_written(&self) -> u64 {
        self.state.lock().batches_written
    }

    /// Where replay must begin for an index written from now on.
    pub(super) fn replay_from(&self) -> JournalPosition {
        let state = self.state.lock();
        let mut position = state.in_flight.front().map_or(state.next, |batch| batch.position);
        if position.unit + self.batch_units_max() > self.config.ring_units {
            position.unit = 0;
        }
        position
    }

    /// Lets the ring use again what lies before `position`.
    pub(super) fn release_before(&self, position: JournalPosition) {
        self.state.lock().tail_units_used = position.units_used;
    }

    /// Whether half of the ring is in use.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        let state = self.state.lock();
        state.next.units_used - state.tail_units_used > u64::from(self.config.ring_units) / 2
    }

    /// Stops all further writes: what the device holds is no longer known.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        let mut state = self.state.lock();
        let mut wakers: Vec<Waker> =
            state.queue.iter_mut().filter_map(|waiting| waiting.waker.take()).collect();
        wakers.extend(state.in_flight.iter_mut().filter_map(|batch| batch.leader.take()));
        wakers.extend(state.maintainer.take());
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(super) fn enqueue(&self, entry: JournalEntry, record: RecordState) -> u64 {
        let mut state = self.state.lock();
        state.queue.push_back(QueuedChange { entry, record_state: record, waker: None });
        state.committed + state.queue.len() as u64 - 1
    }

    /// Notes that the record of a change was written, or could not be.
    pub(super) fn set_record_state(&self, ticket: u64, record_state: RecordState) {
        let mut state = self.state.lock();
        // Its batch waits for this, so it is not committed (but where a bug is planted).
        let Some(index) = ticket.checked_sub(state.committed).map(|place| place as usize) else { return };
        state.queue[index].record_state = record_state;
        if index >= state.claimed {
            return;
        }
        let mut end = 0;
        let contains_change = |batch: &&mut InFlightBatch| {
            end += batch.entry_count;
            index < end
        };
        let batch = state.in_flight.iter_mut().find(contains_change).expect("a change that was taken");
        batch.unwritten_records -= 1;
        let leader = if batch.unwritten_records == 0 { batch.leader.take() } else { None };
        drop(state);
        if let Some(leader) = leader {
            leader.wake();
        }
    }

    /// Whether a batch of any size fits before the ring's end meets its tail.
    pub(super) fn has_room(&self) -> bool {
        self.has_room_after(&self.state.lock())
    }

    fn has_room_after(&self, state: &CommitState) -> bool {
        // A batch, and at worst as much again left unused at the end of the ring.
        state.next.units_used + 2 * u64::from(self.batch_units_max()) - state.tail_units_used
            <= u64::from(self.config.ring_units)
    }

    /// Takes the changes of the next batch, among them `own` if nobody has taken it, and its place in the ring.
    pub(super) fn claim_batch(&self, own: Option<u64>) -> BatchClaim {
        let mut state = self.state.lock();
        if own.is_some_and(|ticket| ticket < state.committed + state.claimed as u64) {
            return BatchClaim::AlreadyClaimed;
        }
        if !self.has_room_after(&state) {
            return BatchClaim::JournalFull;
        }
        let mut buffers = state.free_buffers.pop().expect("one for each leader");
        buffers.entries.clear();
        buffers.freed.clear();
        let mut unwritten = 0;
        for change in state.queue.range(state.claimed..).take(BATCH_ENTRIES_MAX) {
            unwritten += usize::from(change.record_state == RecordState::InFlight);
            buffers.entries.push(change.record_state.amended(change.entry));
        }
        let entries = buffers.entries.len();
        let units = journal::batch_units(entries, self.config.unit_bytes);
        if state.next.unit + self.batch_units_max() > self.config.ring_units {
            state.next.units_used += u64::from(self.config.ring_units - state.next.unit);
            state.next.unit = 0;
        }
        let at = state.next;
        state.next = JournalPosition {
            unit: at.unit + units,
            batch: at.batch + 1,
            entry: at.entry + entries as u64,
            units_used: at.units_used + u64::from(units),
        };
        state.claimed += entries;
        state.in_flight.push_back(InFlightBatch {
            position: at,
            entry_count: entries,
            unwritten_records: unwritten,
            leader: None,
        });
        let flushed_through = match bug_injection::is_injected(InjectedBug::MarkDurableEarly) {
            true => at.batch - 1,
            false => state.flushed_through,
        };
        let header = BatchHeader {
            volume_id: self.config.volume_id,
            batch: at.batch,
            first_entry: at.entry,
            incarnation: self.config.incarnation,
            is_predecessor_unflushed: self.config.durability == Durability::Completed
                || flushed_through + 1 < at.batch,
            flushed_through,
        };
        BatchClaim::Batch(buffers, at, header)
    }

    /// Waits until every record of the batch was written, or could not be.
    pub(super) async fn wait_records(&self, batch: u64) -> Result<(), EngineError> {
        self.wait_batch(batch, |_, batch| batch.unwritten_records == 0).await
    }

    /// Waits until the batches before it are in the index.
    pub(super) async fn wait_predecessors(&self, batch: u64) -> Result<(), EngineError> {
        self.wait_batch(batch, |index, _| index == 0).await
    }

    /// Waits until `is_ready` says so of the batch: told its place among those under way and itself.
    async fn wait_batch(
        &self,
        batch: u64,
        is_ready: impl Fn(usize, &InFlightBatch) -> bool,
    ) -> Result<(), EngineError> {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if self.has_failed() {
                return Poll::Ready(Err(EngineError::ReadOnly));
            }
            let index = (batch - state.published - 1) as usize;
            if is_ready(index, &state.in_flight[index]) {
                return Poll::Ready(Ok(()));
            }
            state.in_flight[index].leader = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Mends the changes of a batch whose records did not land as they say. True if there were any.
    pub(super) fn amend_entries(&self, batch: u64, entries: &mut [JournalEntry]) -> bool {
        let state = self.state.lock();
        let before = state.in_flight.iter().take_while(|other| other.position.batch < batch);
        let first = before.map(|other| other.entry_count).sum::<usize>();
        let mut is_changed = false;
        for (change, entry) in state.queue.range(first..).zip(entries) {
            let amended = change.record_state.amended(*entry);
            is_changed |= amended != *entry;
            *entry = amended;
        }
        is_changed
    }

    /// The last batch in the index, and the space that waits for it to be durable; `None` when it is.
    pub(super) fn take_pending_free(&self) -> Option<(u64, Vec<Extent>)> {
        let mut state = self.state.lock();
        let last = state.published;
        (state.flushed_through < last).then(|| (last, std::mem::take(&mut state.pending_free)))
    }

    /// Keeps space until a flush has made the batch durable that freed it.
    pub(super) fn defer_free(&self, freed: &[Extent]) {
        let mut state = self.state.lock();
        state.pending_free.extend_from_slice(freed);
        assert!(
            state.pending_free.len() as u64 <= self.config.record_units,
            "{} runs of units are pending free in a record area of {} units",
            state.pending_free.len(),
            self.config.record_units
        );
    }

    /// Notes that the batches up to `batch` are durable.
    pub(super) fn note_flushed_through(&self, batch: u64) {
        let mut state = self.state.lock();
        state.flushed_through = state.flushed_through.max(batch);
    }

    /// Notes that the first batch under way is written and its changes are in the index, and answers those who
    /// waited.
    pub(super) fn complete_batch(&self, marked_durable: u64, durable: bool, mut buffers: BatchBuffers) {
        let mut state = self.state.lock();
        let batch = state.in_flight.pop_front().expect("the batch of the caller");
        let (count, number) = (batch.entry_count, batch.position.batch);
        state.published = number;
        if durable {
            state.flushed_through = number;
        }
        state.last_marked_durable = marked_durable;
        state.batches_written += 1;
        if count > 0 {
            state.last_change_batch = number;
        }
        state.committed += count as u64;
        state.claimed -= count;
        buffers.wakers.extend(state.queue.drain(..count).filter_map(|waiting| waiting.waker));
        buffers.wakers.extend(state.in_flight.front_mut().and_then(|next| next.leader.take()));
        if state.last_marked_durable < state.last_change_batch {
            buffers.wakers.extend(state.maintainer.take());
        }
        drop(state);
        buffers.wakers.drain(..).for_each(Waker::wake);
        self.state.lock().free_buffers.push(buffers);
    }

    /// Gives the lead to the next who waits.
    pub(super) fn release_leadership(&self) {
        let mut state = self.state.lock();
        state.leaders -= 1;
        let first = state.claimed;
        let next = state.queue.get_mut(first).and_then(|waiting| waiting.waker.take());
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        self.has_failed() || (state.leaders == 0 && state.queue.is_empty())
    }

    /// What the waiter of `ticket` does next; where that is to wait, it is woken.
    pub(super) fn poll_waiter(&self, ticket: u64, context: &Context<'_>) -> Poll<WaiterAction> {
        let mut state = self.state.lock();
        if state.committed > ticket {
            return Poll::Ready(WaiterAction::Done(Ok(())));
        }
        if self.has_failed() {
            return Poll::Ready(WaiterAction::Done(Err(EngineError::ReadOnly)));
        }
        let index = (ticket - state.committed) as usize;
        if index >= state.claimed && state.leaders < LEADERS_MAX {
            state.leaders += 1;
            return Poll::Ready(WaiterAction::Lead);
        }
        state.queue[index].waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits until there are changes that no batch header marks as durable, or until writing has failed.
    pub(super) async fn wait_unmarked_changes(&self) {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if self.has_failed() || state.last_marked_durable < state.last_change_batch {
                return Poll::Ready(());
            }
            state.maintainer = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether the newest batch does not yet say that the last changes are durable, and nobody leads.
    pub(super) fn try_lead_for_marker(&self) -> bool {
        let mut state = self.state.lock();
        let wanted = state.last_marked_durable < state.last_change_batch
            && state.leaders == 0
            && state.queue.is_empty();
        state.leaders += usize::from(wanted);
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "3 runs of units are pending free in a record area of 2 units")]
    fn more_pending_runs_than_units_is_a_bug() {
        let config = JournalConfig {
            ring_units: 512,
            unit_bytes: 512,
            volume_id: 1,
            incarnation: 1,
            durability: Durability::Completed,
            record_units: 2,
        };
        let commits = CommitQueue::new(JournalPosition::default(), config);
        commits.defer_free(&[Extent { location: 1, units: 1 }; 3]);
    }
}
