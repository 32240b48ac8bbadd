//! Passes: the right of a write to use space, given in the order of arrival. Shared by all cores.
//!
//! ```text
//!   take ──live data is at its limit──▶ Full
//!     │ ──may begin, and none of its queue came earlier──▶ pass ──dropped──▶ the first waiter that may begin is woken
//!     └──waits: puts in one queue, deletes and tombstones in another──▶ woken when chunks become free
//!          ├ nothing that compaction can free, and nothing in progress──▶ Full
//!          └ without a task that compacts, the first of a queue compacts, once for each change that may have made garbage or space
//! ```
//! In: what writes need, changes of live data, freed chunks, tasks that compact. Out: passes, the need of the first waiters.
//!
//! A write takes its pass before it holds anything, and has it until its changes are published. Deletes have a queue of their own: they
//! may begin with fewer free chunks, and free space, so they do not wait for puts.
//!
//! Invariants: what is live, and what passes may add, does not exceed the capacity by a put; a write begins only if those in progress
//! leave the floor of its purpose whatever they and compaction take ([`SpaceLimits::may_begin`]), alone in any case as soon as that is so;
//! value compaction and splits leave F_key, and what writes in progress may take, so key compaction always has its chunks; no write overtakes
//! another of its queue; one that is dropped while it waits gives up its place. The pool counts free chunks elsewhere, so work that frees one
//! calls [`SpacePasses::chunks_freed`].
//! Tested in `space_pass_tests.rs`, also against a model.

use super::chunk_pool::ChunkPool;
use super::space_limits::{ChunkPurpose, SpaceLimits};
use crate::EngineError;
use crate::common::waker_batch::WakerBatch;
use crate::sync::Mutex;
use octokv_runtime::waiter_queue::{WaiterQueue, WaiterTicket};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
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

/// The live data is at its limit, or nothing frees the space that a write needs: [`crate::PutOutcome::Full`], or no space for a delete.
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
    /// Writes that did not begin at once.
    waited: u64,
    /// Deletes and tombstones, then puts.
    queues: [WaiterQueue<SpaceNeed>; 2],
    /// By store, the most units of the images of segments that compaction and splits have changed, until they are published.
    image_units: BTreeMap<u32, u64>,
    /// Chunks of records that are about to be appended by compaction.
    record_chunks: u32,
    /// Key logs that are compacted.
    key_rounds: u32,
    /// Tasks that compact for the waiters, and whether a waiter does.
    tasks: usize,
    is_helped: bool,
    /// Why the tasks free nothing, if that has lasted: what waits fails with it.
    failure: Option<EngineError>,
    /// Writes and compactions that ended, and chunks that became free: what lets a further compaction help.
    changes: u64,
    /// The changes with which compaction found nothing that it could free, and nothing was in progress: until the next change a write that cannot begin is refused.
    exhausted_at: Option<u64>,
}

impl PassState {
    /// Whether no further space can become free unless something changes.
    fn is_exhausted(&self) -> bool {
        self.exhausted_at == Some(self.changes) && self.is_at_rest()
    }

    /// Whether nothing in progress can change what is live, or what is free.
    fn is_at_rest(&self) -> bool {
        self.writes == 0 && self.image_units.is_empty() && self.record_chunks == 0 && self.key_rounds == 0
    }

    /// The free chunks with which a write may begin beside those in progress.
    fn wanted(&self, need: &SpaceNeed, pool: &ChunkPool) -> u64 {
        u64::from(pool.limits().pass_floor(need.kind.purpose())) + self.taken_with(need, pool)
    }

    fn may_begin(&self, need: &SpaceNeed, rooms: &KeyRooms, pool: &ChunkPool) -> bool {
        let taken = self.taken_with(need, pool) + self.taken_by_compaction(rooms, pool);
        pool.limits().may_begin(need.kind.purpose(), pool.free(), taken)
    }

    fn taken_with(&self, need: &SpaceNeed, pool: &ChunkPool) -> u64 {
        pool.limits().chunks_taken_max(self.writes + 1, self.units + need.units, pool.image_units())
    }

    /// The chunks that compaction in progress may take, beside F_key.
    fn taken_by_compaction(&self, rooms: &KeyRooms, pool: &ChunkPool) -> u64 {
        let image_chunks = |(&store, &units): (&u32, &u64)| {
            SpaceLimits::image_chunks_max(units, rooms.of(store), pool.image_units())
        };
        let more_rounds = u64::from(self.key_rounds.saturating_sub(1));
        self.image_units.iter().map(image_chunks).sum::<u64>()
            + u64::from(self.record_chunks)
            + more_rounds * u64::from(pool.limits().key)
    }

    /// The chunks that nothing in progress may take, and that are not F_key.
    fn spare(&self, rooms: &KeyRooms, pool: &ChunkPool) -> Option<u64> {
        let limits = pool.limits();
        let of_writes = limits.chunks_taken_max(self.writes, self.units, pool.image_units());
        let taken = of_writes + self.taken_by_compaction(rooms, pool) + u64::from(limits.key);
        u64::from(pool.free()).checked_sub(taken)
    }

    fn admits(&self, kind: PassKind, live_bytes: u64, chunk_bytes: u64, pool: &ChunkPool) -> bool {
        let used = self.used_bytes.saturating_add(self.granted_bytes).saturating_add(live_bytes);
        // The garbage of pinned chunks is not freed.
        let limit = kind.limit_chunks(pool.limits()).map(|chunks| chunks.saturating_sub(pool.pinned()));
        let used = used.saturating_add(pool.key_end_excess_bytes(kind.purpose()));
        limit.is_none_or(|chunks| used <= u64::from(chunks) * chunk_bytes)
    }

    fn grant(&mut self, need: &SpaceNeed) {
        self.granted_bytes += need.live_bytes;
        self.units += need.units;
        self.writes += 1;
    }

    /// Wakes the first waiter of each queue that may begin, or that compacts itself: it wakes the next one.
    fn wake(&mut self, rooms: &KeyRooms, pool: &ChunkPool, wakers: &mut WakerBatch) {
        for queue in 0..self.queues.len() {
            let first = self.queues[queue].first();
            let has_turn = self.tasks == 0 || self.failure.is_some() || self.is_exhausted();
            if first.is_some_and(|need| has_turn || self.may_begin(need, rooms, pool)) {
                wakers.add(self.queues[queue].take_first_waker());
            }
        }
    }
}

/// The units that images may take in the tail of each store's key log, by the number of its partition.
struct KeyRooms(Box<[AtomicU32]>);

impl KeyRooms {
    /// 0 of a store that is not known.
    fn of(&self, store: u32) -> u32 {
        self.0.get(store as usize).map_or(0, |room| room.load(Ordering::Acquire))
    }
}

/// The passes of a volume.
pub struct SpacePasses {
    unit_bytes: u32,
    rooms: KeyRooms,
    state: Mutex<PassState>,
}

impl SpacePasses {
    /// No write is in progress; `used_bytes` of the pool are live, whose units have so many bytes.
    pub fn new(used_bytes: u64, unit_bytes: u32, stores: usize) -> SpacePasses {
        let rooms = KeyRooms(std::iter::repeat_with(AtomicU32::default).take(stores).collect());
        SpacePasses { unit_bytes, rooms, state: Mutex::new(PassState { used_bytes, ..PassState::default() }) }
    }

    /// Notes the first free unit in the tail of a store's key log. REQUIRES: called behind each append, with the lock of the store's state.
    pub fn set_key_tail(&self, store: u32, unit: u32, pool: &ChunkPool) {
        if let Some(room) = self.rooms.0.get(store as usize) {
            room.store(pool.image_units().saturating_sub(unit), Ordering::Release);
        }
    }

    /// The units that images may take in the tail of a store's key log.
    pub fn key_room(&self, store: u32) -> u32 {
        self.rooms.of(store)
    }

    /// Ready with a pass when all that came earlier with puts, or with deletes and tombstones, have theirs, and the write may begin.
    pub fn take<'a>(&'a self, pool: &'a ChunkPool, need: SpaceNeed) -> PassRequest<'a> {
        PassRequest { passes: self, pool, need, ticket: None }
    }

    /// The writes so far that waited for their pass.
    pub fn waited_writes(&self) -> u64 {
        self.state.lock().waited
    }

    /// The bytes of live data, without what passes may add.
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes
    }

    /// Notes that more or less of the pool is live. A write calls it while it has its pass. False if less than nothing would be live: then nothing
    /// is.
    #[must_use]
    pub fn add_used(&self, bytes: i64) -> bool {
        let mut state = self.state.lock();
        let used = state.used_bytes.checked_add_signed(bytes);
        state.used_bytes = used.unwrap_or(0);
        used.is_some()
    }

    /// Whether live data may grow by so many bytes for this kind of write, as for a delete that finds no key and becomes a tombstone.
    pub fn admits(&self, pool: &ChunkPool, kind: PassKind, live_bytes: u64) -> bool {
        self.state.lock().admits(kind, live_bytes, self.chunk_bytes(pool), pool)
    }

    /// Wakes the waiters whose turn has come because chunks became free, or a compaction has ended. REQUIRES: called after each release and
    /// each compaction; the caller holds no lock.
    pub fn chunks_freed(&self, pool: &ChunkPool) {
        self.change(pool, |state| state.changes += 1);
    }

    /// Why the tasks that compact free nothing.
    pub fn failure(&self) -> Option<EngineError> {
        self.state.lock().failure
    }

    /// Notes why the tasks that compact free nothing, or that they do again. Writes that wait fail, one after the other.
    pub fn set_failure(&self, pool: &ChunkPool, failure: Option<EngineError>) {
        if self.failure() != failure {
            self.change(pool, |state| state.failure = failure);
        }
    }

    /// The changes so far: writes and compactions that ended, and chunks that became free.
    pub fn changes(&self) -> u64 {
        self.state.lock().changes
    }

    /// Notes that compaction frees nothing for the writes that wait, as of so many changes, and that none is in progress. If no write is either, those that wait and cannot
    /// begin are refused, until something changes.
    pub fn set_exhausted(&self, pool: &ChunkPool, changes: u64) {
        let mut wakers = WakerBatch::default();
        let mut state = self.state.lock();
        if state.exhausted_at != Some(changes) && state.changes == changes && state.is_at_rest() {
            state.exhausted_at = Some(changes);
            state.wake(&self.rooms, pool, &mut wakers);
        }
        drop(state);
        wakers.wake();
    }

    /// The free chunks with which the first waiters of both queues may begin; 0 if no write waits.
    pub fn wanted_chunks(&self, pool: &ChunkPool) -> u32 {
        let state = self.state.lock();
        let firsts = state.queues.iter().filter_map(WaiterQueue::first);
        let wanted = firsts.map(|need| state.wanted(need, pool)).max().unwrap_or(0);
        // At most the chunks, which are numbers of 32 bits.
        wanted.min(u64::from(pool.chunks())) as u32
    }

    /// The free chunks that nothing in progress may take, without F_key.
    pub fn spare_chunks(&self, pool: &ChunkPool) -> u32 {
        // At most the free chunks.
        self.state.lock().spare(&self.rooms, pool).unwrap_or(0) as u32
    }

    /// Reserves space for a step of compaction or of a split; `None` if the reservations in progress leave too few free chunks.
    pub fn begin_compaction<'a>(
        &'a self,
        pool: &'a ChunkPool,
        space: CompactionSpace,
    ) -> Option<CompactionPass<'a>> {
        let mut state = self.state.lock();
        let is_alone = space == CompactionSpace::KeyRound && state.key_rounds == 0;
        state.add(space);
        // F_key is there for one round.
        if is_alone || state.spare(&self.rooms, pool).is_some() {
            return Some(CompactionPass { passes: self, pool, space });
        }
        state.remove(space);
        None
    }

    /// Notes a task that compacts while writes wait, until the guard is dropped.
    pub fn begin_task<'a>(&'a self, pool: &'a ChunkPool) -> CompactionTask<'a> {
        self.state.lock().tasks += 1;
        CompactionTask { passes: self, pool }
    }

    /// Applies a change to the state, then wakes the waiters that may proceed.
    fn change(&self, pool: &ChunkPool, change: impl FnOnce(&mut PassState)) {
        let mut wakers = WakerBatch::default();
        let mut state = self.state.lock();
        change(&mut state);
        state.wake(&self.rooms, pool, &mut wakers);
        drop(state);
        wakers.wake();
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
        let turn = if !state.admits(need.kind, need.live_bytes, chunk_bytes, this.pool) {
            Poll::Ready(Err(SpaceFull))
        } else if is_first && state.may_begin(&need, &this.passes.rooms, this.pool) {
            state.grant(&need);
            Poll::Ready(Ok(SpacePass { passes: this.passes, pool: this.pool, need }))
        } else if is_first && state.is_exhausted() {
            Poll::Ready(Err(SpaceFull))
        } else {
            let ticket = *this.ticket.get_or_insert_with(|| {
                state.waited += 1;
                state.queues[queue].push(need)
            });
            let is_waiting = state.queues[queue].set_waker(ticket, context.waker());
            assert!(is_waiting, "a request waits until it is ready or dropped");
            return Poll::Pending;
        };
        if let Some(ticket) = this.ticket.take() {
            state.queues[queue].remove(ticket);
            state.wake(&this.passes.rooms, this.pool, &mut wakers);
        }
        drop(state);
        wakers.wake();
        turn
    }
}

impl<'a> PassRequest<'a> {
    /// The turn of the write to compact itself: no task and no other write compacts, none of its queue came earlier, and something has
    /// changed since `compacted_at`, which is that of an earlier turn. REQUIRES: it was polled, and waits.
    pub fn compaction_turn(&self, compacted_at: Option<u64>) -> Option<WaiterTurn<'a>> {
        let ticket = self.ticket?;
        let mut state = self.passes.state.lock();
        let is_first = state.queues[self.need.kind.queue()].earlier(ticket).next().is_none();
        if state.tasks > 0 || state.is_helped || !is_first || compacted_at == Some(state.changes) {
            return None;
        }
        state.is_helped = true;
        Some(WaiterTurn { passes: self.passes, pool: self.pool, changes: state.changes })
    }
}

impl Drop for PassRequest<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        self.passes.change(self.pool, |state| {
            state.queues[self.need.kind.queue()].remove(ticket);
        });
    }
}

/// What compaction may take in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionSpace {
    /// The image of a changed segment of a store, with so many units at most, until it is published.
    Image {
        /// The partition of the store.
        store: u32,
        /// The units.
        units: u32,
    },
    /// The chunks of a record, while it is appended.
    Record(u32),
    /// The round of a key log, until the chunk that it empties is free.
    KeyRound,
}

impl PassState {
    fn add(&mut self, space: CompactionSpace) {
        match space {
            CompactionSpace::Image { store, units } => {
                *self.image_units.entry(store).or_default() += u64::from(units);
            }
            CompactionSpace::Record(chunks) => self.record_chunks += chunks,
            CompactionSpace::KeyRound => self.key_rounds += 1,
        }
    }

    fn remove(&mut self, space: CompactionSpace) {
        match space {
            CompactionSpace::Image { store, units } => {
                let of_store = self.image_units.get_mut(&store).expect("the store has an image");
                *of_store -= u64::from(units);
                if *of_store == 0 {
                    self.image_units.remove(&store);
                }
            }
            CompactionSpace::Record(chunks) => self.record_chunks -= chunks,
            CompactionSpace::KeyRound => self.key_rounds -= 1,
        }
    }
}

/// The right of compaction to use space. Dropping it gives it back.
pub struct CompactionPass<'a> {
    passes: &'a SpacePasses,
    pool: &'a ChunkPool,
    space: CompactionSpace,
}

impl Drop for CompactionPass<'_> {
    fn drop(&mut self) {
        // No change that lets a further compaction help: rounds say so when they end.
        self.passes.change(self.pool, |state| state.remove(self.space));
    }
}

/// The right of a write that waits to compact, for all that wait.
pub struct WaiterTurn<'a> {
    passes: &'a SpacePasses,
    pool: &'a ChunkPool,
    /// The changes when it began.
    pub changes: u64,
}

impl Drop for WaiterTurn<'_> {
    fn drop(&mut self) {
        self.passes.change(self.pool, |state| state.is_helped = false);
    }
}

/// A task that compacts for writes that wait, until it is dropped: then they compact themselves.
pub struct CompactionTask<'a> {
    passes: &'a SpacePasses,
    pool: &'a ChunkPool,
}

impl Drop for CompactionTask<'_> {
    fn drop(&mut self) {
        self.passes.change(self.pool, |state| state.tasks -= 1);
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
        self.passes.change(self.pool, |state| {
            state.granted_bytes -= self.need.live_bytes;
            state.units -= self.need.units;
            state.writes -= 1;
            state.changes += 1;
        });
    }
}
