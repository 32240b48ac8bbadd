//! Passes: the right of a write to use space, given in the order of arrival. Shared by all cores.
//!
//! ```text
//!   take ──live data is at its limit──▶ Full
//!     │ ──may begin, and none of its queue came earlier──▶ pass ──dropped──▶ the first waiter that may begin is woken
//!     └──waits: puts in one queue, deletes and tombstones in another──▶ woken when chunks become free
//! ```
//! In: what writes need, changes of live data, freed chunks. Out: passes, the need of the first waiter.
//!
//! A write takes its pass before it holds anything, and has it until its changes are published. Deletes have a queue of their own: they
//! may begin with fewer free chunks, and free space, so they do not wait for puts.
//!
//! Invariants: what is live, and what passes may add, does not exceed the capacity by a put; a write begins only if those in progress
//! leave the floor of its purpose whatever they take ([`SpaceLimits::may_begin`]), alone in any case as soon as that is so; no write overtakes
//! another of its queue; one that is dropped while it waits gives up its place. The pool counts free chunks elsewhere, so work that frees one
//! calls [`SpacePasses::chunks_freed`].
//! Tested in `space_pass_tests.rs`, also against a model.

use super::chunk_pool::ChunkPool;
use super::space_limits::{ChunkPurpose, SpaceLimits};
use crate::common::waker_batch::WakerBatch;
use crate::sync::Mutex;
use octokv_runtime::waiter_queue::{WaiterQueue, WaiterTicket};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The work that asks for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    /// A put: admitted up to the capacity.
    Put,
    /// A tombstone of an absent key: admitted up to [`SpaceLimits::tombstone_chunks`].
    Tombstone,
    /// A delete: always admitted.
    Delete,
}

impl PassKind {
    /// What its chunks are taken for.
    pub fn purpose(self) -> ChunkPurpose {
        match self {
            PassKind::Put => ChunkPurpose::User,
            PassKind::Tombstone | PassKind::Delete => ChunkPurpose::Delete,
        }
    }

    fn limit_chunks(self, limits: &SpaceLimits) -> Option<u32> {
        match self {
            PassKind::Put => Some(limits.capacity_chunks()),
            PassKind::Tombstone => Some(limits.tombstone_chunks()),
            PassKind::Delete => None,
        }
    }

    fn queue(self) -> usize {
        usize::from(self == PassKind::Put)
    }
}

/// What a write may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceNeed {
    /// The kind of write.
    pub kind: PassKind,
    /// The most units that it appends, to both logs of its store together.
    pub units: u64,
    /// The most bytes by which it makes more of the pool live.
    pub live_bytes: u64,
}

/// The live data is at its limit: [`crate::PutOutcome::Full`], or no space for a tombstone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceFull;

#[derive(Default)]
struct PassState {
    used_bytes: u64,
    /// The most bytes that passes add.
    granted_bytes: u64,
    /// Writes with a pass, and the most units that they append.
    writes: u32,
    units: u64,
    /// Deletes and tombstones, then puts.
    queues: [WaiterQueue<SpaceNeed>; 2],
}

impl PassState {
    /// The free chunks with which a write may begin beside those in progress.
    fn wanted(&self, need: &SpaceNeed, pool: &ChunkPool) -> u64 {
        let limits = pool.limits();
        let taken = limits.chunks_taken_max(self.writes + 1, self.units + need.units, pool.chunk_units());
        u64::from(limits.pass_floor(need.kind.purpose())) + taken
    }

    fn may_begin(&self, need: &SpaceNeed, pool: &ChunkPool) -> bool {
        let limits = pool.limits();
        let taken = limits.chunks_taken_max(self.writes + 1, self.units + need.units, pool.chunk_units());
        limits.may_begin(need.kind.purpose(), pool.free(), taken)
    }

    fn admits(&self, kind: PassKind, live_bytes: u64, chunk_bytes: u64, limits: &SpaceLimits) -> bool {
        let used = self.used_bytes.saturating_add(self.granted_bytes).saturating_add(live_bytes);
        kind.limit_chunks(limits).is_none_or(|chunks| used <= u64::from(chunks) * chunk_bytes)
    }

    fn grant(&mut self, need: &SpaceNeed) {
        self.granted_bytes += need.live_bytes;
        self.units += need.units;
        self.writes += 1;
    }

    /// Wakes the first waiter of each queue that may begin: it wakes the next one.
    fn wake(&mut self, pool: &ChunkPool, wakers: &mut WakerBatch) {
        for queue in 0..self.queues.len() {
            let first = self.queues[queue].first();
            if first.is_some_and(|need| self.may_begin(need, pool)) {
                wakers.add(self.queues[queue].take_first_waker());
            }
        }
    }
}

/// The passes of a volume.
pub struct SpacePasses {
    unit_bytes: u32,
    state: Mutex<PassState>,
}

impl SpacePasses {
    /// No write is in progress; `used_bytes` of the pool are live, whose units have so many bytes.
    pub fn new(used_bytes: u64, unit_bytes: u32) -> SpacePasses {
        SpacePasses { unit_bytes, state: Mutex::new(PassState { used_bytes, ..PassState::default() }) }
    }

    /// Ready with a pass when all that came earlier with puts, or with deletes and tombstones, have theirs, and the write may begin.
    pub fn take<'a>(&'a self, pool: &'a ChunkPool, need: SpaceNeed) -> PassRequest<'a> {
        PassRequest { passes: self, pool, need, ticket: None }
    }

    /// The bytes of live data, without what passes may add.
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes
    }

    /// Notes that more or less of the pool is live. A write calls it while it has its pass.
    ///
    /// # Panics
    /// If less than nothing would be live.
    pub fn add_used(&self, bytes: i64) {
        let mut state = self.state.lock();
        let used = state.used_bytes.checked_add_signed(bytes);
        state.used_bytes = used.unwrap_or_else(|| panic!("{bytes} of {} bytes", state.used_bytes));
    }

    /// Whether live data may grow by so many bytes for this kind of write, as for a delete that finds no key and becomes a tombstone.
    pub fn admits(&self, pool: &ChunkPool, kind: PassKind, live_bytes: u64) -> bool {
        self.state.lock().admits(kind, live_bytes, self.chunk_bytes(pool), pool.limits())
    }

    /// Wakes the waiters whose turn has come because chunks became free. REQUIRES: called after each release; the caller holds no lock.
    pub fn chunks_freed(&self, pool: &ChunkPool) {
        let mut wakers = WakerBatch::default();
        self.state.lock().wake(pool, &mut wakers);
        wakers.wake();
    }

    /// The free chunks that the first waiter needs, of deletes and tombstones if one waits; `None` if no write waits.
    pub fn first_need(&self, pool: &ChunkPool) -> Option<(ChunkPurpose, u32)> {
        let state = self.state.lock();
        let need = state.queues.iter().find_map(WaiterQueue::first)?;
        let wanted = state.wanted(need, pool).min(u64::from(pool.chunks()));
        Some((need.kind.purpose(), wanted as u32))
    }

    fn chunk_bytes(&self, pool: &ChunkPool) -> u64 {
        u64::from(pool.chunk_units()) * u64::from(self.unit_bytes)
    }
}

/// A write that asks for a pass. Dropping it gives up its place.
#[must_use = "a write asks when it is polled"]
pub struct PassRequest<'a> {
    passes: &'a SpacePasses,
    pool: &'a ChunkPool,
    need: SpaceNeed,
    ticket: Option<WaiterTicket>,
}

impl<'a> Future for PassRequest<'a> {
    type Output = Result<SpacePass<'a>, SpaceFull>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (need, queue) = (this.need, this.need.kind.queue());
        let mut wakers = WakerBatch::default();
        let mut state = this.passes.state.lock();
        let chunk_bytes = this.passes.chunk_bytes(this.pool);
        let is_first = match this.ticket {
            Some(ticket) => state.queues[queue].earlier(ticket).next().is_none(),
            None => state.queues[queue].is_empty(),
        };
        let turn = if !state.admits(need.kind, need.live_bytes, chunk_bytes, this.pool.limits()) {
            Poll::Ready(Err(SpaceFull))
        } else if is_first && state.may_begin(&need, this.pool) {
            state.grant(&need);
            Poll::Ready(Ok(SpacePass { passes: this.passes, pool: this.pool, need }))
        } else {
            let ticket = *this.ticket.get_or_insert_with(|| state.queues[queue].push(need));
            let is_waiting = state.queues[queue].set_waker(ticket, context.waker());
            assert!(is_waiting, "a request waits until it is ready or dropped");
            return Poll::Pending;
        };
        if let Some(ticket) = this.ticket.take() {
            state.queues[queue].remove(ticket);
            state.wake(this.pool, &mut wakers);
        }
        drop(state);
        wakers.wake();
        turn
    }
}

impl Drop for PassRequest<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut wakers = WakerBatch::default();
        let mut state = self.passes.state.lock();
        state.queues[self.need.kind.queue()].remove(ticket);
        state.wake(self.pool, &mut wakers);
        drop(state);
        wakers.wake();
    }
}

/// The right of a write to use space. Dropping it gives it back.
pub struct SpacePass<'a> {
    passes: &'a SpacePasses,
    pool: &'a ChunkPool,
    need: SpaceNeed,
}

impl SpacePass<'_> {
    /// What the write may use.
    pub fn need(&self) -> &SpaceNeed {
        &self.need
    }
}

impl Drop for SpacePass<'_> {
    fn drop(&mut self) {
        let mut wakers = WakerBatch::default();
        let mut state = self.passes.state.lock();
        state.granted_bytes -= self.need.live_bytes;
        state.units -= self.need.units;
        state.writes -= 1;
        state.wake(self.pool, &mut wakers);
        drop(state);
        wakers.wake();
    }
}
