//! The batches of a store: segment images that leave as one append. The leader of the next, the published batches, and those that are durable. No I/O.
//!
//! ```text
//!   change ─ticket─▶ unclaimed ─claim, by a leader─▶ Writing ─written─▶ Flushing ─flushed, predecessor published─▶ Published
//!
//!   batch 7            ├─ write ─┤├──── flush ────┤ publish
//!   batch 8                       ├─ write ─┤├──── flush ────┤ publish       at most one writes, and at most one other flushes
//!   changes meanwhile             └ unclaimed: batch 9 ──────▶ led by a waiter of it as soon as 7 is published
//! ```
//! A batch has a bound, so a leader may not claim all that is unclaimed, nor the change that it waits for. So a change is named by a
//! ticket of its own (one for all changes of a segment until that is claimed), and not by the number of a batch; its waiter leads
//! again, or waits for another leader.
//!
//! In: changes, ends of writes and flushes. Out: turns of waiters, wake-ups.
//! Invariants: a ticket is unclaimed, in one batch in flight, or published; batches are numbered without gaps and published in order;
//! after a failure nothing is claimed or published. A waiter is woken when its turn comes, and if it is dropped then, the next one is.
//! Tested in `batch_state_tests.rs` against a model.

use crate::EngineError;
use crate::common::waker_batch::WakerBatch;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::task::{Context, Poll, Waker};

/// Batches in flight when another may begin: one, which flushes.
const IN_FLIGHT_BESIDE_MAX: usize = 1;

/// Names the changes of a segment that leave together. Tickets ascend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangeTicket(u64);

/// What a waiter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchWait {
    /// The publication of this change.
    Change(ChangeTicket),
    /// The publication of all changes before this one.
    AllBefore(ChangeTicket),
}

/// The turn of a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchTurn {
    /// It leads: it calls [`BatchState::claim`] or [`BatchState::step_down`] before it awaits anything.
    Lead,
    /// Its changes are published.
    Published,
    /// Writing has failed.
    ReadOnly,
}

/// A waiter that was polled and has to wait.
#[derive(Debug, PartialEq, Eq)]
pub struct BatchWaiterId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchPhase {
    Writing,
    Flushing,
}

/// A batch in flight.
#[derive(Debug)]
struct LogBatch {
    number: u64,
    phase: BatchPhase,
    /// Ascending.
    tickets: Vec<ChangeTicket>,
    /// The sequence number of its last image.
    last_sequence: u64,
    /// Its leader, if that waits for the preceding batch.
    leader: Option<Waker>,
}

#[derive(Debug)]
struct BatchWaiter {
    wait: BatchWait,
    waker: Option<Waker>,
}

/// The batches of a store.
#[derive(Debug)]
pub struct BatchState {
    next_ticket: u64,
    unclaimed: BTreeSet<ChangeTicket>,
    /// In order, at most two.
    in_flight: VecDeque<LogBatch>,
    next_batch: u64,
    /// Whether a leader is about to claim.
    is_claiming: bool,
    has_failed: bool,
    claimed_sequence: u64,
    published_sequence: u64,
    durable_sequence: u64,
    next_waiter: u64,
    /// In the order of their first polls.
    waiters: BTreeMap<u64, BatchWaiter>,
}

impl BatchState {
    /// No batch is in flight; images up to `last_sequence` are durable and published.
    pub fn new(last_sequence: u64) -> BatchState {
        BatchState {
            next_ticket: 0,
            unclaimed: BTreeSet::new(),
            in_flight: VecDeque::new(),
            next_batch: 1,
            is_claiming: false,
            has_failed: false,
            claimed_sequence: last_sequence,
            published_sequence: last_sequence,
            durable_sequence: last_sequence,
            next_waiter: 0,
            waiters: BTreeMap::new(),
        }
    }

    /// A ticket for changes that no batch has claimed.
    pub fn open(&mut self) -> ChangeTicket {
        let ticket = self.next_ticket();
        self.next_ticket += 1;
        self.unclaimed.insert(ticket);
        ticket
    }

    /// The ticket of the next change, behind all changes so far.
    pub fn next_ticket(&self) -> ChangeTicket {
        ChangeTicket(self.next_ticket)
    }

    /// The turn of a waiter, whose place is `waiter` from its first poll that is pending to the one that is ready. A waiter that is dropped
    /// between them calls [`BatchState::forget`].
    pub fn poll(
        &mut self,
        wait: BatchWait,
        waiter: &mut Option<BatchWaiterId>,
        context: &Context<'_>,
    ) -> Poll<BatchTurn> {
        let turn = if self.is_published(wait) {
            BatchTurn::Published
        } else if self.has_failed {
            BatchTurn::ReadOnly
        } else if self.may_lead() && self.has_unclaimed(wait) {
            self.is_claiming = true;
            BatchTurn::Lead
        } else {
            let id = waiter.get_or_insert_with(|| {
                self.next_waiter += 1;
                BatchWaiterId(self.next_waiter)
            });
            let place = self.waiters.entry(id.0).or_insert(BatchWaiter { wait, waker: None });
            match &mut place.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        };
        if let Some(BatchWaiterId(id)) = waiter.take() {
            self.waiters.remove(&id);
        }
        Poll::Ready(turn)
    }

    /// Forgets a waiter that is dropped, and passes its turn on.
    pub fn forget(&mut self, BatchWaiterId(id): BatchWaiterId) -> WakerBatch {
        self.waiters.remove(&id);
        self.wake_next_leader()
    }

    /// Leads a batch that no waiter waits for, as of a marker. False if a waiter or a batch has to go first; the caller tries again. After
    /// true it is as after [`BatchTurn::Lead`].
    pub fn try_lead(&mut self) -> bool {
        let may_lead = self.may_lead() && !self.has_failed;
        self.is_claiming |= may_lead;
        may_lead
    }

    /// Begins a batch with these changes, and gives its number. Its last image has the sequence number `last_sequence`.
    ///
    /// # Panics
    /// If the caller does not lead, a change is not unclaimed, or the sequence does not ascend.
    pub fn claim(&mut self, tickets: impl IntoIterator<Item = ChangeTicket>, last_sequence: u64) -> u64 {
        assert!(std::mem::take(&mut self.is_claiming), "a claim without a lead");
        assert!(last_sequence > self.claimed_sequence, "{last_sequence} after {}", self.claimed_sequence);
        let mut tickets: Vec<ChangeTicket> = tickets.into_iter().collect();
        tickets.sort_unstable();
        for ticket in &tickets {
            assert!(self.unclaimed.remove(ticket), "{ticket:?} is claimed twice");
        }
        let number = self.next_batch;
        self.next_batch += 1;
        self.claimed_sequence = last_sequence;
        let phase = BatchPhase::Writing;
        self.in_flight.push_back(LogBatch { number, phase, tickets, last_sequence, leader: None });
        number
    }

    /// Gives up a lead without a batch.
    ///
    /// # Panics
    /// If the caller does not lead.
    pub fn step_down(&mut self) -> WakerBatch {
        assert!(std::mem::take(&mut self.is_claiming), "a leader that does not lead steps down");
        self.wake_next_leader()
    }

    /// Notes that the images of a batch are written: the next may begin beside its flush.
    ///
    /// # Panics
    /// If it is not being written.
    pub fn written(&mut self, batch: u64) -> WakerBatch {
        let writing = self
            .in_flight
            .back_mut()
            .filter(|last| (last.number, last.phase) == (batch, BatchPhase::Writing));
        writing.unwrap_or_else(|| panic!("batch {batch} is not being written")).phase = BatchPhase::Flushing;
        self.wake_next_leader()
    }

    /// Whether a batch is the next to be published.
    pub fn can_publish(&self, batch: u64) -> bool {
        let is_next = |first: &LogBatch| (first.number, first.phase) == (batch, BatchPhase::Flushing);
        !self.has_failed && self.in_flight.front().is_some_and(is_next)
    }

    /// Ready when a batch is the next to be published. REQUIRES: it is written, and flushed if it has to be; only its leader asks.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`] if writing has failed.
    pub fn poll_predecessor(&mut self, batch: u64, context: &Context<'_>) -> Poll<Result<(), EngineError>> {
        if self.has_failed {
            return Poll::Ready(Err(EngineError::ReadOnly));
        }
        if self.can_publish(batch) {
            return Poll::Ready(Ok(()));
        }
        let own = self.in_flight.iter_mut().find(|own| own.number == batch);
        own.expect("a batch is in flight until it is published").leader = Some(context.waker().clone());
        Poll::Pending
    }

    /// Notes that the changes of a batch are visible to readers, and durable or not.
    ///
    /// # Panics
    /// Unless it is the next to be published.
    pub fn published(&mut self, batch: u64, is_durable: bool) -> WakerBatch {
        assert!(self.can_publish(batch), "batch {batch} is published out of order");
        let published = self.in_flight.pop_front().expect("it is the first");
        self.published_sequence = published.last_sequence;
        if is_durable {
            self.note_durable(published.last_sequence);
        }
        let mut wakers = WakerBatch::default();
        wakers.add(self.in_flight.front_mut().and_then(|next| next.leader.take()));
        let (unclaimed, in_flight) = (&self.unclaimed, &self.in_flight);
        for waiter in self.waiters.values_mut() {
            if !is_pending(waiter.wait, unclaimed, in_flight) {
                wakers.add(waiter.waker.take());
            }
        }
        wakers.append(self.wake_next_leader());
        wakers
    }

    /// Makes the store read-only and wakes all: which images are on the device is no longer known.
    pub fn fail(&mut self) -> WakerBatch {
        self.has_failed = true;
        let mut wakers = WakerBatch::default();
        self.in_flight.iter_mut().for_each(|batch| wakers.add(batch.leader.take()));
        self.waiters.values_mut().for_each(|waiter| wakers.add(waiter.waker.take()));
        wakers
    }

    /// Whether writing has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether no batch is in flight, and none is about to be claimed.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && !self.is_claiming
    }

    /// The changes that no batch has claimed.
    pub fn unclaimed(&self) -> usize {
        self.unclaimed.len()
    }

    /// The sequence number of the last image that was claimed.
    pub fn claimed_sequence(&self) -> u64 {
        self.claimed_sequence
    }

    /// The sequence number of the last image that is published. A flush that begins now makes it durable.
    pub fn published_sequence(&self) -> u64 {
        self.published_sequence
    }

    /// The sequence number of the last image that is known to be durable.
    pub fn durable_sequence(&self) -> u64 {
        self.durable_sequence
    }

    /// Notes that the images up to a sequence number are durable.
    ///
    /// # Panics
    /// If they are not published.
    pub fn note_durable(&mut self, sequence: u64) {
        assert!(sequence <= self.published_sequence, "{sequence} of {} is durable", self.published_sequence);
        self.durable_sequence = self.durable_sequence.max(sequence);
    }

    /// Whether a batch may begin.
    fn may_lead(&self) -> bool {
        let is_writing = self.in_flight.back().is_some_and(|last| last.phase == BatchPhase::Writing);
        !self.is_claiming && !is_writing && self.in_flight.len() <= IN_FLIGHT_BESIDE_MAX
    }

    fn is_published(&self, wait: BatchWait) -> bool {
        !is_pending(wait, &self.unclaimed, &self.in_flight)
    }

    fn has_unclaimed(&self, wait: BatchWait) -> bool {
        is_unclaimed(wait, &self.unclaimed)
    }

    /// The waker of the first waiter that could lead a batch, if one may begin.
    fn wake_next_leader(&mut self) -> WakerBatch {
        let mut wakers = WakerBatch::default();
        if self.may_lead() && !self.has_failed {
            let mut waiters = self.waiters.values_mut();
            // One without a waker was woken, and will be polled.
            let next = waiters.find(|waiter| is_unclaimed(waiter.wait, &self.unclaimed));
            wakers.add(next.and_then(|waiter| waiter.waker.take()));
        }
        wakers
    }
}

fn is_unclaimed(wait: BatchWait, unclaimed: &BTreeSet<ChangeTicket>) -> bool {
    match wait {
        BatchWait::Change(ticket) => unclaimed.contains(&ticket),
        BatchWait::AllBefore(end) => unclaimed.first().is_some_and(|&first| first < end),
    }
}

fn is_pending(wait: BatchWait, unclaimed: &BTreeSet<ChangeTicket>, in_flight: &VecDeque<LogBatch>) -> bool {
    let is_in = |batch: &LogBatch| match wait {
        BatchWait::Change(ticket) => batch.tickets.binary_search(&ticket).is_ok(),
        BatchWait::AllBefore(end) => batch.tickets.first().is_some_and(|&first| first < end),
    };
    is_unclaimed(wait, unclaimed) || in_flight.iter().any(is_in)
}
