//! The segments of a store that operations hold in memory: one image each, its holders, its waiters, and what of it has to be written.
//! No I/O.
//!
//! ```text
//!   Idle ─acquire─▶ Loading ─loaded─▶ Held (holders ≥ 1) ⇄ dirty ─claim─▶ in a batch ─published─▶ Held, or Idle
//!                      │                 └─begin_split─▶ Splitting ─end_split─▶ Idle: all waiters begin again
//!                      ├─ read failed: each waiter gets the error, Idle
//!                      └─ reader dropped: the first waiter reads, or Idle
//! ```
//! The holders of a segment change one image in turn (under the lock of the store); a segment whose changes are not published stays, so
//! that the next operation changes the newest image, which is not in the segment table yet.
//!
//! In: segments that operations acquire, images, changes. Out: turns of waiters, dirty segments in the order of their first change, those
//! of users before those of compaction.
//! Invariants: a segment leaves only without holders, not dirty, and in no batch in flight; the lock bit of the table is set exactly while
//! it is here; one operation reads an image at a time; waiters have their turns in the order in which they came. A waiter that is dropped
//! leaves, or passes on what it was granted.
//! Tested in `busy_segments_tests.rs` against a model.

use super::batch_state::{BatchState, ChangeTicket};
use super::hash_prefix::SegmentNumber;
use super::segment_table::LogSegmentTable;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::waker_batch::WakerBatch;
use octokv_base::map::FxHashMap;
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

/// What an operation that asks for a segment has to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Acquired {
    /// Nothing: it holds the image.
    Loaded,
    /// Read the image that the table names (or make an empty one), and call [`BusySegments::loaded`]; if it is dropped before,
    /// [`BusySegments::abandon_load`].
    Load,
    /// Wait: [`BusySegments::poll`].
    Wait(SegmentTicket),
}

/// A waiter for a segment.
#[derive(Debug, PartialEq, Eq)]
pub struct SegmentTicket(u64);

/// The turn of a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentTurn {
    /// It holds the image.
    Loaded,
    /// It has to read the image, as after [`Acquired::Load`].
    Load,
    /// The segment was split: its key may be in the other half now, so it begins again.
    Retry,
    /// The image could not be read.
    Failed(EngineError),
}

/// Which work changed a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeSource {
    /// Puts and deletes: their segments are claimed first.
    User,
    /// Compaction.
    Compaction,
}

/// The changes of a segment that a batch takes.
#[derive(Debug, PartialEq, Eq)]
pub struct ClaimedSegment<C> {
    /// Their ticket.
    pub ticket: ChangeTicket,
    /// In the order in which they were made. Empty if the image is only moved.
    pub changes: Vec<C>,
    /// Whose they are: of users, if any of them is.
    pub source: ChangeSource,
}

#[derive(Debug)]
enum BusyState<I> {
    Loading,
    Held(I),
    Splitting(I),
}

#[derive(Debug)]
struct BusySegment<I, C> {
    state: BusyState<I>,
    /// Operations that use the image, the reader of it, and waiters that were granted it.
    holders: u32,
    /// Waiters without a turn, in order.
    queue: VecDeque<u64>,
    dirty: Option<(ChangeTicket, ChangeSource)>,
    /// Since the last claim.
    changes: Vec<C>,
    /// Batches in flight that have an image of it.
    batches: u32,
    last_change: Option<ChangeTicket>,
}

#[derive(Debug)]
struct SegmentWaiter {
    segment: SegmentNumber,
    turn: Option<SegmentTurn>,
    waker: Option<Waker>,
}

/// The busy segments of a store, with images `I` and changes `C`.
#[derive(Debug)]
pub struct BusySegments<I, C> {
    segments: FxHashMap<SegmentNumber, BusySegment<I, C>>,
    next_ticket: u64,
    /// From its first moment to the poll that gives it its turn.
    waiters: FxHashMap<u64, SegmentWaiter>,
    /// In the order of their first change.
    dirty_of_users: VecDeque<SegmentNumber>,
    dirty_of_compaction: VecDeque<SegmentNumber>,
}

impl<I, C> Default for BusySegments<I, C> {
    fn default() -> BusySegments<I, C> {
        BusySegments {
            segments: FxHashMap::default(),
            next_ticket: 0,
            waiters: FxHashMap::default(),
            dirty_of_users: VecDeque::new(),
            dirty_of_compaction: VecDeque::new(),
        }
    }
}

impl<I, C> BusySegments<I, C> {
    /// The number of busy segments.
    pub fn count(&self) -> usize {
        self.segments.len()
    }

    /// Whether a segment is busy.
    pub fn is_busy(&self, segment: SegmentNumber) -> bool {
        self.segments.contains_key(&segment)
    }

    /// Asks for a segment.
    pub fn acquire(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) -> Acquired {
        if table.lock(segment) {
            self.insert(segment, BusyState::Loading);
            return Acquired::Load;
        }
        let busy = self.segments.get_mut(&segment).expect("a locked segment is busy");
        if let BusyState::Held(_) = busy.state {
            busy.holders += 1;
            return Acquired::Loaded;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        busy.queue.push_back(ticket);
        self.waiters.insert(ticket, SegmentWaiter { segment, turn: None, waker: None });
        Acquired::Wait(SegmentTicket(ticket))
    }

    /// Holds a segment whose image is in memory already. REQUIRES: the image is the one that the table names.
    ///
    /// # Panics
    /// If the segment is busy.
    pub fn hold_loaded(&mut self, segment: SegmentNumber, image: I, table: &mut LogSegmentTable) {
        assert!(table.lock(segment), "{segment:?} is busy");
        self.insert(segment, BusyState::Held(image));
    }

    /// The turn of a waiter. After one, the ticket is used up.
    pub fn poll(&mut self, ticket: &SegmentTicket, context: &Context<'_>) -> Poll<SegmentTurn> {
        let waiter = self.waiters.get_mut(&ticket.0).expect("a waiter has one turn");
        if let Some(turn) = waiter.turn {
            self.waiters.remove(&ticket.0);
            return Poll::Ready(turn);
        }
        match &mut waiter.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Gives up the place of a waiter that is dropped, or what it was granted.
    pub fn cancel(
        &mut self,
        SegmentTicket(ticket): SegmentTicket,
        table: &mut LogSegmentTable,
    ) -> WakerBatch {
        let Some(SegmentWaiter { segment, turn, .. }) = self.waiters.remove(&ticket) else {
            return WakerBatch::default();
        };
        match turn {
            None => self.busy(segment).queue.retain(|&other| other != ticket),
            Some(SegmentTurn::Loaded) => self.leave(segment, table),
            Some(SegmentTurn::Load) => return self.abandon_load(segment, table),
            Some(SegmentTurn::Retry | SegmentTurn::Failed(_)) => {}
        }
        WakerBatch::default()
    }

    /// Ends a read: with an image its reader and all waiters hold the segment, with an error none does.
    ///
    /// # Panics
    /// If the segment is not being read.
    pub fn loaded(
        &mut self,
        segment: SegmentNumber,
        image: Result<I, EngineError>,
        table: &mut LogSegmentTable,
    ) -> WakerBatch {
        let busy = self.loading(segment);
        let queue = std::mem::take(&mut busy.queue);
        let turn = match image {
            Ok(image) => {
                busy.state = BusyState::Held(image);
                busy.holders += queue.len() as u32;
                SegmentTurn::Loaded
            }
            Err(error) => {
                self.remove(segment, table);
                SegmentTurn::Failed(error)
            }
        };
        self.grant(queue, turn)
    }

    /// Gives up a read whose reader is dropped: the first waiter reads.
    ///
    /// # Panics
    /// If the segment is not being read.
    pub fn abandon_load(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) -> WakerBatch {
        let next = self.loading(segment).queue.pop_front();
        if next.is_none() {
            self.remove(segment, table);
        }
        self.grant(next, SegmentTurn::Load)
    }

    /// The image of a segment. REQUIRES: the caller holds it.
    ///
    /// # Panics
    /// If there is none.
    pub fn image(&mut self, segment: SegmentNumber) -> &mut I {
        match &mut self.busy(segment).state {
            BusyState::Held(image) | BusyState::Splitting(image) => image,
            BusyState::Loading => panic!("{segment:?} is not loaded"),
        }
    }

    /// Notes a change of the image, or that the image has to be written elsewhere, and gives the ticket of what will be written. REQUIRES:
    /// the caller holds the segment.
    ///
    /// # Panics
    /// If the segment is being read or split.
    pub fn mark_dirty(
        &mut self,
        segment: SegmentNumber,
        change: Option<C>,
        source: ChangeSource,
        batches: &mut BatchState,
    ) -> ChangeTicket {
        let busy = self.segments.get_mut(&segment).expect("a segment that is changed is busy");
        assert!(matches!(busy.state, BusyState::Held(_)), "{segment:?} is changed while it is read or split");
        busy.changes.extend(change);
        let ticket = match (busy.dirty, source) {
            (Some((ticket, ChangeSource::Compaction)), ChangeSource::User) => {
                self.dirty_of_compaction.retain(|&other| other != segment);
                self.dirty_of_users.push_back(segment);
                busy.dirty = Some((ticket, ChangeSource::User));
                ticket
            }
            (Some((ticket, _)), _) => ticket,
            (None, _) => {
                let queue = match source {
                    ChangeSource::User => &mut self.dirty_of_users,
                    ChangeSource::Compaction => &mut self.dirty_of_compaction,
                };
                queue.push_back(segment);
                let ticket = batches.open();
                busy.dirty = Some((ticket, source));
                ticket
            }
        };
        busy.last_change = Some(ticket);
        ticket
    }

    /// The ticket of the last change of an image, if that may not be published: outcomes that depend on the image wait for it. REQUIRES: the
    /// segment is busy.
    pub fn last_change(&mut self, segment: SegmentNumber) -> Option<ChangeTicket> {
        self.busy(segment).last_change
    }

    /// The segment that a batch has to take next.
    pub fn next_dirty(&self) -> Option<SegmentNumber> {
        self.dirty_of_users.front().or(self.dirty_of_compaction.front()).copied()
    }

    /// Takes the next dirty segment into a batch: its image is written as it is now.
    ///
    /// # Panics
    /// If it is not the next.
    pub fn claim(&mut self, segment: SegmentNumber) -> ClaimedSegment<C> {
        assert_eq!(self.next_dirty(), Some(segment), "claimed out of order");
        if self.dirty_of_users.pop_front().is_none() {
            self.dirty_of_compaction.pop_front();
        }
        let busy = self.busy(segment);
        let (ticket, source) = busy.dirty.take().expect("a segment in the queue is dirty");
        busy.batches += 1;
        ClaimedSegment { ticket, changes: std::mem::take(&mut busy.changes), source }
    }

    /// Notes that a batch that has an image of the segment is published. REQUIRES: the table names that image.
    ///
    /// # Panics
    /// If no batch has one.
    pub fn published(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) {
        let busy = self.busy(segment);
        busy.batches = busy.batches.checked_sub(1).unwrap_or_else(|| panic!("{segment:?} is in no batch"));
        if busy.batches == 0 && busy.dirty.is_none() {
            busy.last_change = None;
        }
        self.release_idle(segment, table);
    }

    /// Ends the hold of an operation.
    ///
    /// # Panics
    /// If the segment has no holder, or is being read or split.
    pub fn leave(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) {
        let busy = self.busy(segment);
        assert!(matches!(busy.state, BusyState::Held(_)), "{segment:?} is left while it is read or split");
        busy.holders = busy.holders.checked_sub(1).unwrap_or_else(|| panic!("{segment:?} has no holder"));
        self.release_idle(segment, table);
    }

    /// Begins to split a segment, for its only holder: others that come wait. False if there are others, or changes that are not
    /// published.
    pub fn begin_split(&mut self, segment: SegmentNumber) -> bool {
        let busy = self.busy(segment);
        if busy.holders > 1 || busy.dirty.is_some() || busy.batches > 0 {
            return false;
        }
        busy.state = match std::mem::replace(&mut busy.state, BusyState::Loading) {
            BusyState::Held(image) => BusyState::Splitting(image),
            BusyState::Loading | BusyState::Splitting(_) => panic!("{segment:?} is not held"),
        };
        true
    }

    /// Ends a split, and the hold of its operation: waiters begin again. REQUIRES: the table has both halves.
    ///
    /// # Panics
    /// If the segment is not being split.
    pub fn end_split(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) -> WakerBatch {
        let busy = self.busy(segment);
        assert!(matches!(busy.state, BusyState::Splitting(_)), "{segment:?} is not being split");
        let queue = std::mem::take(&mut busy.queue);
        self.remove(segment, table);
        self.grant(queue, SegmentTurn::Retry)
    }

    /// Gives up a split of which nothing was written. Its operation holds the segment still, and so do all waiters now.
    ///
    /// # Panics
    /// If the segment is not being split.
    pub fn cancel_split(&mut self, segment: SegmentNumber) -> WakerBatch {
        let busy = self.busy(segment);
        busy.state = match std::mem::replace(&mut busy.state, BusyState::Loading) {
            BusyState::Splitting(image) => BusyState::Held(image),
            BusyState::Loading | BusyState::Held(_) => panic!("{segment:?} is not being split"),
        };
        let queue = std::mem::take(&mut busy.queue);
        busy.holders += queue.len() as u32;
        self.grant(queue, SegmentTurn::Loaded)
    }

    fn insert(&mut self, segment: SegmentNumber, state: BusyState<I>) {
        let busy = BusySegment {
            state,
            holders: 1,
            queue: VecDeque::new(),
            dirty: None,
            changes: Vec::new(),
            batches: 0,
            last_change: None,
        };
        assert!(self.segments.insert(segment, busy).is_none(), "{segment:?} was busy without a lock");
    }

    fn busy(&mut self, segment: SegmentNumber) -> &mut BusySegment<I, C> {
        self.segments.get_mut(&segment).unwrap_or_else(|| panic!("{segment:?} is not busy"))
    }

    fn loading(&mut self, segment: SegmentNumber) -> &mut BusySegment<I, C> {
        let busy = self.busy(segment);
        assert!(matches!(busy.state, BusyState::Loading), "{segment:?} is not being read");
        busy
    }

    fn grant(&mut self, queue: impl IntoIterator<Item = u64>, turn: SegmentTurn) -> WakerBatch {
        let mut wakers = WakerBatch::default();
        for ticket in queue {
            let waiter = self.waiters.get_mut(&ticket).expect("a queued waiter waits");
            waiter.turn = Some(turn);
            wakers.add(waiter.waker.take());
        }
        wakers
    }

    fn release_idle(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) {
        let busy = self.busy(segment);
        let is_dropped = bug_injection::is_injected(InjectedBug::LogDropBusy);
        if busy.holders == 0 && busy.dirty.is_none() && (busy.batches == 0 || is_dropped) {
            self.remove(segment, table);
        }
    }

    fn remove(&mut self, segment: SegmentNumber, table: &mut LogSegmentTable) {
        let removed = self.segments.remove(&segment).expect("a segment that leaves is busy");
        assert!(removed.queue.is_empty(), "{segment:?} leaves its waiters behind");
        table.unlock(segment);
    }
}
