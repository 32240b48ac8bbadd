//! The state of group commit: queued changes, batches in flight, and the position in the journal ring.
//!
//! In: changes with their records, and what their writers find out about them. Out: batches in order, and wake-ups. Does no I/O: that is in
//! [`super::group_commit`], which describes the protocol.
//!
//! ```text
//!   queue:    ▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓ ▒▒▒▒▒▒▒   front: the changes of the batches in flight, in their order; then
//!             batch n    n+1    unclaimed
//!   next:     the position of batch n+2
//! ```
//! Invariants: a change is in one batch; batches are numbered without gaps and complete in order; a waiter is woken
//! when its condition holds, and all waiters are when writing has failed. At most [`LEADERS_MAX`] batches are in flight.
//! The queue holds one change per writer, each a task that holds its key's lock.

use super::allocator::Extent;
use super::batch_parts::{BatchBuffers, ChangeState, QueuedChange, UnwrittenRecord};
use super::journal::{self, BATCH_HEADER_BYTES, BatchHeader, JournalEntry, JournalPosition, batch_units_max};
use crate::bug_injection::{self, InjectedBug};
use crate::{Durability, EngineError};
use octokv_device::DeviceError;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Batches in flight at once. More of them shorten the wait of a put for the preceding batch; each flush is then shared
/// by fewer puts.
pub const LEADERS_MAX: usize = 3;

/// Changes in flight beside which another batch may begin, whatever its size: few writers do not wait for each other.
const CHANGES_BESIDE_MAX: usize = 1;
/// How many changes may be in flight for each one that waits, so that another batch may begin beside larger ones. Less than this
/// makes larger batches, and a light tenant waits for those of a heavy one.
const IN_FLIGHT_PER_WAITING: usize = 2;

/// Batches of the largest size that fit before reserved units of the ring, at least: two that a claim asks for, and two more.
const RESERVATION_BATCHES_MIN: u32 = 4;

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

/// The queued changes and the state of the journal, shared by all cores.
pub struct CommitQueue<E: JournalEntry> {
    state: Mutex<CommitState<E>>,
    failed: AtomicBool,
    config: JournalConfig,
}

struct CommitState<E: JournalEntry> {
    /// The changes of the batches in flight, then the unclaimed ones.
    queue: VecDeque<QueuedChange<E>>,
    /// The number of changes in batches in flight: the front of the queue.
    claimed: usize,
    /// The number of changes committed since the opening: the ticket of the queue's front.
    committed: u64,
    /// The number of tasks that write a batch, or a checkpoint to make space for one. At most [`LEADERS_MAX`].
    leaders: usize,
    /// The position of the next batch.
    next: JournalPosition,
    /// The batches in flight, in order.
    in_flight: VecDeque<InFlightBatch>,
    /// The `units_used` at which replay from the last checkpoint begins.
    tail_units_used: u64,
    /// The `units_used` at which units that are reserved begin; `u64::MAX` if none are.
    reserved_units_used: u64,
    /// Batches up to this one are in the index.
    published: u64,
    /// Batches up to this one are durable.
    flushed_through: u64,
    /// Space freed by batches after `flushed_through`, whose old records a power cut may bring back. At most one run
    /// per unit of the record area: the runs are disjoint, since none is allocated again before it leaves the list.
    pending_free: Vec<Extent>,
    /// Changes that are cancelled since the write of their record has failed, by ticket. At most one for each writer, which
    /// takes it.
    cancelled: Vec<(u64, DeviceError)>,
    /// The last batch with changes.
    last_change_batch: u64,
    /// The `flushed_through` of the newest batch.
    last_marked_durable: u64,
    batches_written: u64,
    /// The maintenance task, asleep until there are changes to mark.
    maintainer: Option<Waker>,
    /// One for each leader that may start.
    free_buffers: Vec<BatchBuffers<E>>,
}

/// A batch that is being written.
struct InFlightBatch {
    position: JournalPosition,
    entry_count: usize,
    /// The number of its changes that are undecided.
    undecided: usize,
    /// Its leader, if that waits for writers or for preceding batches.
    leader: Option<Waker>,
}

/// The next action of a waiter.
pub enum WaiterAction {
    /// It writes the next batch.
    Lead,
    /// Its change is committed.
    Committed,
    /// Its change is cancelled: the write of its record has failed.
    Cancelled(DeviceError),
    /// Writing has failed.
    ReadOnly,
}

/// The result of claiming a batch.
// Constructed once per batch and destructured at once.
#[expect(clippy::large_enum_variant)]
pub enum BatchClaim<E> {
    /// The changes, position and header of a batch.
    Batch(BatchBuffers<E>, JournalPosition, BatchHeader),
    /// The ring has no space.
    JournalFull,
    /// Another leader has claimed the leader's own change.
    AlreadyClaimed,
    /// Writing has failed.
    ReadOnly,
}

/// Makes the volume read-only on drop, unless it is disarmed: if a write sequence is dropped or fails half-way, the
/// contents of the device are unknown until recovery.
pub struct PoisonGuard<'a, E: JournalEntry>(pub &'a CommitQueue<E>);

impl<E: JournalEntry> PoisonGuard<'_, E> {
    /// The write sequence is complete.
    pub fn disarm(self) {
        std::mem::forget(self);
    }
}

impl<E: JournalEntry> Drop for PoisonGuard<'_, E> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl<E: JournalEntry> CommitQueue<E> {
    /// The queue of a journal whose next batch is `next`.
    pub fn new(next: JournalPosition, config: JournalConfig) -> CommitQueue<E> {
        let durable = next.batch.saturating_sub(1);
        let state = CommitState {
            queue: VecDeque::with_capacity(E::BATCH_ENTRIES_MAX),
            claimed: 0,
            committed: 0,
            leaders: 0,
            next,
            in_flight: VecDeque::with_capacity(LEADERS_MAX),
            tail_units_used: 0,
            reserved_units_used: u64::MAX,
            published: durable,
            flushed_through: durable,
            pending_free: Vec::new(),
            cancelled: Vec::new(),
            last_change_batch: durable,
            last_marked_durable: 0,
            batches_written: 0,
            maintainer: None,
            free_buffers: std::iter::repeat_with(BatchBuffers::new).take(LEADERS_MAX).collect(),
        };
        CommitQueue { state: Mutex::new(state), failed: AtomicBool::new(false), config }
    }

    fn batch_units_max(&self) -> u32 {
        batch_units_max::<E>(self.config.unit_bytes)
    }

    /// When a batch counts as complete.
    pub fn durability(&self) -> Durability {
        self.config.durability
    }
    /// Bytes per unit of the journal.
    pub fn unit_bytes(&self) -> u32 {
        self.config.unit_bytes
    }
    /// Whether writing has failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Batches written since the opening.
    pub fn batches_written(&self) -> u64 {
        self.state.lock().batches_written
    }

    /// The position at which replay must begin for an index image that is written from now on.
    pub fn replay_from(&self) -> JournalPosition {
        let state = self.state.lock();
        let mut position = state.in_flight.front().map_or(state.next, |batch| batch.position);
        if position.unit + self.batch_units_max() > self.config.ring_units {
            position.unit = 0;
        }
        position
    }

    /// Releases the ring before `position` for reuse.
    pub fn release_before(&self, position: JournalPosition) {
        self.state.lock().tail_units_used = position.units_used;
    }

    /// Whether more than half of the ring is in use.
    pub fn is_checkpoint_due(&self) -> bool {
        self.used_units() > u64::from(self.config.ring_units) / 2
    }
    /// The units of the ring that replay needs, unused units at its end included.
    pub fn used_units(&self) -> u64 {
        let state = self.state.lock();
        state.next.units_used - state.tail_units_used
    }

    /// Makes the volume read-only and wakes all waiters: the contents of the device are no longer known.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        let mut state = self.state.lock();
        // No batch will have them, and their buffers belong to a pool.
        state.queue.iter_mut().for_each(|change| change.record = None);
        let mut wakers: Vec<Waker> =
            state.queue.iter_mut().filter_map(|change| change.waker.take()).collect();
        wakers.extend(state.in_flight.iter_mut().filter_map(|batch| batch.leader.take()));
        wakers.extend(state.maintainer.take());
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Queues a change, with the record that its batch is to write, and gives its ticket.
    pub fn enqueue(&self, entry: E, record: Option<UnwrittenRecord>, state: ChangeState<E::Outcome>) -> u64 {
        let mut queue = self.state.lock();
        queue.queue.push_back(QueuedChange { entry, record, state, waker: None });
        queue.committed + queue.queue.len() as u64 - 1
    }

    /// Notes what the writer of an undecided change has found out.
    pub fn decide(&self, ticket: u64, decided: ChangeState<E::Outcome>) {
        let mut state = self.state.lock();
        // Its batch waits for this, so it is not committed yet, unless a bug is injected.
        let Some(index) = ticket.checked_sub(state.committed).map(|index| index as usize) else { return };
        // The write of its record may have failed meanwhile.
        if state.queue[index].state == ChangeState::Undecided {
            state.queue[index].state = decided;
        }
        if index >= state.claimed {
            return;
        }
        let mut end = 0;
        let contains_change = |batch: &&mut InFlightBatch| {
            end += batch.entry_count;
            index < end
        };
        let batch = state.in_flight.iter_mut().find(contains_change).expect("a claimed change is in a batch");
        batch.undecided -= 1;
        let leader = if batch.undecided == 0 { batch.leader.take() } else { None };
        drop(state);
        if let Some(leader) = leader {
            leader.wake();
        }
    }

    /// Cancels changes of a batch whose records could not be written. `indices` are those of their entries.
    pub fn cancel(&self, batch: u64, indices: impl Iterator<Item = usize>, error: DeviceError) {
        let mut state = self.state.lock();
        let first = state.entries_before(batch);
        for index in indices {
            state.queue[first + index].state = ChangeState::Failed;
            let ticket = state.committed + (first + index) as u64;
            state.cancelled.push((ticket, error));
        }
    }

    /// Whether a batch of any size fits before the ring's tail.
    pub fn has_room(&self) -> bool {
        self.has_room_after(&self.state.lock())
    }

    fn has_room_after(&self, state: &CommitState<E>) -> bool {
        // A batch, and at worst as many unused units at the end of the ring.
        let end = state.next.units_used + 2 * u64::from(self.batch_units_max());
        end <= state.reserved_units_used && end - state.tail_units_used <= u64::from(self.config.ring_units)
    }

    /// The first unit of the ring that [`CommitQueue::reserve_journal`] may reserve.
    pub fn reservable_from(&self) -> u32 {
        let ahead = RESERVATION_BATCHES_MIN * self.batch_units_max();
        (self.state.lock().next.unit + ahead) % self.config.ring_units
    }

    /// Keeps batches out of units of the ring until [`CommitQueue::end_reservation`]. False, and nothing is reserved, unless
    /// replay needs none of them and some batches still fit before them. REQUIRES: the units are within the ring, and none
    /// are reserved.
    pub fn reserve_journal(&self, units: Range<u32>) -> bool {
        let mut state = self.state.lock();
        assert_eq!(state.reserved_units_used, u64::MAX, "one reservation at a time");
        let ring_units = u64::from(self.config.ring_units);
        let ahead = (u64::from(units.start) + ring_units - u64::from(state.next.unit)) % ring_units;
        let free_units = ring_units - (state.next.units_used - state.tail_units_used);
        let ahead_min = u64::from(RESERVATION_BATCHES_MIN * self.batch_units_max());
        let is_free = ahead >= ahead_min && ahead + units.len() as u64 <= free_units;
        if is_free {
            state.reserved_units_used = state.next.units_used + ahead;
        }
        is_free
    }

    /// Whether units of the ring are reserved.
    pub fn has_reservation(&self) -> bool {
        self.state.lock().reserved_units_used != u64::MAX
    }
    /// Ends the reservation.
    pub fn end_reservation(&self) {
        self.state.lock().reserved_units_used = u64::MAX;
    }

    /// Claims the next batch: its changes, among them `own` unless another leader has claimed it, and its position.
    /// REQUIRES: the caller leads.
    ///
    /// Claims nothing after a failed write. That write may be on the device, but its change is not applied and its key's
    /// lock is free: a change of the same key queued since then names the same predecessor, and replay would find two
    /// successors of one record.
    pub fn claim_batch(&self, own: Option<u64>) -> BatchClaim<E> {
        let mut state = self.state.lock();
        if self.has_failed() {
            return BatchClaim::ReadOnly;
        }
        if own.is_some_and(|ticket| ticket < state.committed + state.claimed as u64) {
            return BatchClaim::AlreadyClaimed;
        }
        if !self.has_room_after(&state) {
            return BatchClaim::JournalFull;
        }
        let mut buffers = state.free_buffers.pop().expect("buffers for each leader");
        buffers.entries.clear();
        buffers.freed.clear();
        let (mut undecided, mut entries_bytes) = (0, 0);
        let claimed = state.claimed;
        for change in state.queue.range_mut(claimed..).take(E::BATCH_ENTRIES_MAX) {
            entries_bytes += change.entry.encoded_bytes();
            if E::FIXED_BYTES.is_none() && BATCH_HEADER_BYTES + entries_bytes > E::BATCH_BYTES_MAX {
                entries_bytes -= change.entry.encoded_bytes();
                break;
            }
            undecided += usize::from(change.state == ChangeState::Undecided);
            let index = buffers.entries.len();
            buffers.records.extend(change.record.take().map(|record| (index, record)));
            buffers.entries.push(change.state.amended(change.entry.clone()));
        }
        let entries = buffers.entries.len();
        let units = journal::batch_units(entries_bytes, self.config.unit_bytes);
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
            undecided,
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

    /// Waits until no change of the batch is undecided.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`] if writing has failed.
    pub async fn wait_decided(&self, batch: u64) -> Result<(), EngineError> {
        self.wait_batch(batch, |_, batch| batch.undecided == 0).await
    }

    /// Waits until the preceding batches are applied to the index.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`] if writing has failed.
    pub async fn wait_predecessors(&self, batch: u64) -> Result<(), EngineError> {
        self.wait_batch(batch, |index, _| index == 0).await
    }

    /// Waits until `is_ready` holds for the batch and its index among those in flight.
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

    /// Amends entries that are cancelled or whose predecessor is another key's. True if there were any.
    pub fn amend_entries(&self, batch: u64, entries: &mut [E]) -> bool {
        let state = self.state.lock();
        let first = state.entries_before(batch);
        let mut is_changed = false;
        for (change, entry) in state.queue.range(first..).zip(entries) {
            let amended = change.state.amended(entry.clone());
            is_changed |= amended != *entry;
            *entry = amended;
        }
        is_changed
    }

    /// The last applied batch and the pending space, also what came after the batch's flush; `None` if nothing needs a flush.
    pub fn take_pending_free(&self) -> Option<(u64, Vec<Extent>)> {
        let mut state = self.state.lock();
        let (last, pending) = (state.published, std::mem::take(&mut state.pending_free));
        (state.flushed_through < last || !pending.is_empty()).then_some((last, pending))
    }

    /// Adds space to the pending free list, until a flush has made the batch durable that freed it.
    pub fn defer_free(&self, freed: &[Extent]) {
        let mut state = self.state.lock();
        state.pending_free.extend_from_slice(freed);
        assert!(
            state.pending_free.len() as u64 <= self.config.record_units,
            "{} runs of units are pending free in a record area of {} units",
            state.pending_free.len(),
            self.config.record_units
        );
    }

    /// Notes that all batches up to `batch` are durable.
    pub fn note_flushed_through(&self, batch: u64) {
        let mut state = self.state.lock();
        state.flushed_through = state.flushed_through.max(batch);
    }

    /// Completes the first batch in flight, whose changes are in the index, and wakes their writers.
    pub fn complete_batch(&self, marked_durable: u64, durable: bool, mut buffers: BatchBuffers<E>) {
        let mut state = self.state.lock();
        let batch = state.in_flight.pop_front().expect("the caller's batch is in flight");
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
        buffers.wakers.extend(state.queue.drain(..count).filter_map(|change| change.waker));
        buffers.wakers.extend(state.in_flight.front_mut().and_then(|next| next.leader.take()));
        if state.last_marked_durable < state.last_change_batch {
            buffers.wakers.extend(state.maintainer.take());
        }
        drop(state);
        buffers.wakers.drain(..).for_each(Waker::wake);
        self.state.lock().free_buffers.push(buffers);
    }

    /// Ends the caller's leadership and wakes the first unclaimed writer, which may lead next.
    pub fn release_leadership(&self) {
        let mut state = self.state.lock();
        state.leaders -= 1;
        let first = state.claimed;
        let next = state.queue.get_mut(first).and_then(|change| change.waker.take());
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    /// Whether no change is queued and no batch is in flight, or writing has failed.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        self.has_failed() || (state.leaders == 0 && state.queue.is_empty())
    }

    /// The next action of the writer with `ticket`; `Pending` registers its waker.
    pub fn poll_waiter(&self, ticket: u64, context: &Context<'_>) -> Poll<WaiterAction> {
        let mut state = self.state.lock();
        if state.committed > ticket {
            let cancelled = state.cancelled.iter().position(|&(cancelled, _)| cancelled == ticket);
            return Poll::Ready(match cancelled.map(|index| state.cancelled.swap_remove(index)) {
                Some((_, error)) => WaiterAction::Cancelled(error),
                None => WaiterAction::Committed,
            });
        }
        let index = (ticket - state.committed) as usize;
        if self.has_failed() {
            // It may have come after the failure.
            state.queue[index].record = None;
            return Poll::Ready(WaiterAction::ReadOnly);
        }
        if index >= state.claimed && state.may_lead() {
            state.leaders += 1;
            return Poll::Ready(WaiterAction::Lead);
        }
        match &mut state.queue[index].waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Whether there are changes that no batch header marks as durable.
    pub fn has_unmarked_changes(&self) -> bool {
        let state = self.state.lock();
        state.last_marked_durable < state.last_change_batch
    }

    /// Waits until there are changes that no batch header marks as durable, or until writing has failed.
    pub async fn wait_unmarked_changes(&self) {
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

    /// Takes the leadership for a durability marker, if no batch header marks the last changes as durable and the queue is
    /// empty without a leader.
    pub fn try_lead_for_marker(&self) -> bool {
        let mut state = self.state.lock();
        let wanted = state.last_marked_durable < state.last_change_batch
            && state.leaders == 0
            && state.queue.is_empty();
        state.leaders += usize::from(wanted);
        wanted
    }
}

impl<E: JournalEntry> CommitState<E> {
    /// Whether a writer may lead another batch now. If not, one in flight wakes the first that waits when it ends.
    fn may_lead(&self) -> bool {
        let waiting = self.queue.len() - self.claimed;
        self.leaders < LEADERS_MAX
            && (self.claimed <= CHANGES_BESIDE_MAX || waiting * IN_FLIGHT_PER_WAITING >= self.claimed)
    }

    /// The number of changes in batches in flight that precede a batch.
    fn entries_before(&self, batch: u64) -> usize {
        let before = self.in_flight.iter().take_while(|other| other.position.batch < batch);
        before.map(|other| other.entry_count).sum()
    }
}

#[cfg(test)]
#[path = "commit_queue_tests.rs"]
mod tests;
