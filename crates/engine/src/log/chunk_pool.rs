//! The chunks of a device: which are free, who uses the others, and what lives in them. Shared by all cores.
//!
//! ```text
//!   Free ─reserve─▶ Reserved ─open─▶ Open ─seal─▶ Sealed ─retire─▶ Retired ─release─▶ Free
//!     ▲                │ return_reserved            └─pin─▶ Pinned ─retire─▶ ┘
//!     └────────────────┘
//! ```
//! Reserved: named as the next of a log, and not written. Open: the tail of a log. Sealed: full. Pinned: a device error keeps it from being
//! compacted, and the head of its log has passed it. Retired: nothing in it is needed, and a recovery may still read it.
//!
//! Readers use no lock and no epoch: they detect reuse and repeat (LEED §3.3). A reader takes [`ChunkPool::opens_now`], then finds a place,
//! reads it, and asks [`ChunkPool::unopened_since`]. A chunk that is opened counts the opening before its first write:
//!
//! ```text
//!   reader:  t = opens  ·  locate  ·  read ........ opened_at(chunk) ≤ t ?  yes: the bytes are those of the place  no: again
//!   writer:                    opens += 1, opened_at := opens  ·  write
//! ```
//! Invariants: one owner of a chunk at a time; a chunk is opened after all readers could find its former contents elsewhere (it was
//! retired and released before), so a reader that took `t` after the opening was counted finds no former place in it; counts of live data
//! never fall below zero; the sums of each log are those of its sealed chunks. 28 bytes of memory a chunk.
//! Tested in `chunk_pool_tests.rs`, also against a model.

use super::log_layout::{CHUNKS_MAX, ChunkSizes, MARKER_UNITS};
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::sealed_sums::{LiveContents, SealedCounters, SealedSums};
use super::space_limits::{ChunkPurpose, SpaceLimits};
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::{Extent, FitPolicy, SpaceAllocator};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The most live records or images of a chunk.
pub const CHUNK_RECORDS_MAX: u32 = (1 << RECORD_BITS) - 1;
/// The most live granules or units of a chunk.
pub const CHUNK_AMOUNT_MAX: u32 = (1 << AMOUNT_BITS) - 1;

const AMOUNT_BITS: u32 = 31;
const RECORD_BITS: u32 = 28;
const RECORDS_AT: u32 = AMOUNT_BITS;
const STATE_AT: u32 = RECORDS_AT + RECORD_BITS;
const KIND_AT: u32 = STATE_AT + 3;
const UNCOUNTED_AT: u32 = KIND_AT + 1;
const _: () = assert!(UNCOUNTED_AT == 63);
const _: () = assert!(size_of::<ChunkCell>() == 24);

/// The state of a chunk. See the picture above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// No log has it.
    Free,
    /// The next of a log, not written yet.
    Reserved,
    /// The tail of a log.
    Open,
    /// A full chunk of a log.
    Sealed,
    /// A chunk that cannot be compacted now; its log goes on without it.
    Pinned,
    /// Emptied, and still part of what a recovery may read.
    Retired,
}

const STATES: [ChunkState; 6] = [
    ChunkState::Free,
    ChunkState::Reserved,
    ChunkState::Open,
    ChunkState::Sealed,
    ChunkState::Pinned,
    ChunkState::Retired,
];

impl ChunkState {
    /// Whether the states follow one another.
    fn may_become(self, next: ChunkState) -> bool {
        use ChunkState::{Free, Open, Pinned, Reserved, Retired, Sealed};
        matches!(
            (self, next),
            (Free, Reserved)
                | (Reserved, Open | Free)
                | (Open, Sealed)
                | (Sealed, Pinned | Retired)
                | (Pinned, Retired)
                | (Retired, Free)
        )
    }
}

/// The log that a chunk belongs to, and the place of the chunk there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkOwner {
    /// The partition of the store.
    pub partition: u32,
    /// Which of its logs.
    pub kind: LogKind,
    /// The place in the log.
    pub index: ChunkIndex,
}

/// State, kind and live contents of a chunk, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkWord {
    state: ChunkState,
    kind: LogKind,
    /// `None`: not counted since a recovery.
    live: Option<LiveContents>,
}

impl ChunkWord {
    const FREE: ChunkWord = ChunkWord { state: ChunkState::Free, kind: LogKind::Keys, live: None };

    fn pack(self) -> u64 {
        let live = self.live.unwrap_or_default();
        u64::from(live.amount)
            | u64::from(live.records) << RECORDS_AT
            | (self.state as u64) << STATE_AT
            | u64::from(self.kind == LogKind::Values) << KIND_AT
            | u64::from(self.live.is_none()) << UNCOUNTED_AT
    }

    fn unpack(word: u64) -> ChunkWord {
        let live = LiveContents {
            records: (word >> RECORDS_AT) as u32 & CHUNK_RECORDS_MAX,
            amount: word as u32 & CHUNK_AMOUNT_MAX,
        };
        ChunkWord {
            // Words are made by `pack` alone.
            state: STATES[(word >> STATE_AT) as usize & 7],
            kind: if word >> KIND_AT & 1 == 1 { LogKind::Values } else { LogKind::Keys },
            live: (word >> UNCOUNTED_AT == 0).then_some(live),
        }
    }
}

/// The entry of one chunk.
struct ChunkCell {
    /// The number of the opening of the volume's chunks by which this one was opened last; 0: not since the volume was opened.
    opened_at: AtomicU64,
    /// Partition and index: of the last owner while the chunk is free or reserved.
    owner: AtomicU64,
    /// A [`ChunkWord`].
    word: AtomicU64,
}

impl ChunkCell {
    fn load(&self) -> ChunkWord {
        ChunkWord::unpack(self.word.load(Ordering::Acquire))
    }

    /// Changes the word by `change`, and gives the former one and the new one.
    fn update(&self, mut change: impl FnMut(ChunkWord) -> ChunkWord) -> (ChunkWord, ChunkWord) {
        let mut next = ChunkWord::FREE;
        let change = |word| {
            next = change(ChunkWord::unpack(word));
            Some(next.pack())
        };
        let former = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        (ChunkWord::unpack(former.unwrap_or_else(|word| word)), next)
    }
}

/// The chunks of a device.
pub struct ChunkPool {
    /// By chunks.
    space: SpaceAllocator,
    cells: Box<[ChunkCell]>,
    /// By chunk, the granules that compaction has moved out of it since it was opened.
    vacated: Box<[AtomicU32]>,
    /// By store, of both of its logs.
    sealed: Box<[[SealedCounters; 2]]>,
    /// Of the key logs of all stores together.
    key_logs: SealedCounters,
    /// The openings of chunks since the volume was opened.
    opens: AtomicU64,
    /// Falls before a chunk leaves `space`, and rises after it is back there: never above what `space` has.
    free: AtomicU32,
    pinned: AtomicU32,
    /// See [`ChunkPool::miscounts`].
    miscounts: AtomicU64,
    limits: SpaceLimits,
    /// The unit of the device at which chunk 0 begins.
    first_unit: u64,
    sizes: ChunkSizes,
}

impl ChunkPool {
    /// A pool whose chunks are all free, from a unit of the device on.
    ///
    /// # Panics
    /// If a chunk has no units for images, or more than a count of live ones holds, or there are more than [`CHUNKS_MAX`].
    pub fn new(first_unit: u64, sizes: ChunkSizes, limits: SpaceLimits) -> ChunkPool {
        let chunk_units = sizes.units;
        assert!(
            (MARKER_UNITS + 1..=CHUNK_RECORDS_MAX).contains(&chunk_units),
            "a chunk of {chunk_units} units"
        );
        assert!(limits.pool <= CHUNKS_MAX, "{} chunks", limits.pool);
        let cell = || ChunkCell {
            opened_at: AtomicU64::new(0),
            owner: AtomicU64::new(0),
            word: AtomicU64::new(ChunkWord::FREE.pack()),
        };
        ChunkPool {
            space: SpaceAllocator::new(0, limits.pool.into(), 1, FitPolicy::Next),
            cells: std::iter::repeat_with(cell).take(limits.pool as usize).collect(),
            vacated: std::iter::repeat_with(AtomicU32::default).take(limits.pool as usize).collect(),
            sealed: std::iter::repeat_with(Default::default).take(limits.stores as usize).collect(),
            key_logs: SealedCounters::default(),
            opens: AtomicU64::new(0),
            free: AtomicU32::new(limits.pool),
            pinned: AtomicU32::new(0),
            miscounts: AtomicU64::new(0),
            limits,
            first_unit,
            sizes,
        }
    }

    /// The limits that the pool keeps.
    pub fn limits(&self) -> &SpaceLimits {
        &self.limits
    }

    /// The units of a chunk.
    pub fn chunk_units(&self) -> u32 {
        self.sizes.units
    }

    /// The sizes by which chunks are measured.
    pub fn sizes(&self) -> &ChunkSizes {
        &self.sizes
    }

    /// The units of a key chunk in which images lie.
    pub fn image_units(&self) -> u32 {
        self.sizes.image_units()
    }

    /// The number of chunks.
    pub fn chunks(&self) -> u32 {
        self.limits.pool
    }

    /// The number of free chunks.
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::Acquire)
    }

    /// The number of pinned chunks.
    pub fn pinned(&self) -> u32 {
        self.pinned.load(Ordering::Acquire)
    }

    /// The bytes of memory of the chunk table.
    pub fn memory_bytes(&self) -> usize {
        self.cells.len() * (size_of::<ChunkCell>() + size_of::<AtomicU32>())
    }

    /// The first unit of a chunk on the device.
    pub fn first_unit_of(&self, chunk: ChunkNumber) -> u64 {
        self.first_unit + u64::from(chunk.0) * u64::from(self.sizes.units)
    }

    /// The openings so far: a reader takes them before it finds the place that it will read.
    pub fn opens_now(&self) -> u64 {
        self.opens.load(Ordering::SeqCst)
    }

    /// Whether the chunk of a unit was not opened since a reader took `opens`: what it read meanwhile is what was there. False for a unit
    /// outside of the pool.
    pub fn unopened_since(&self, unit: u64, opens: u64) -> bool {
        self.chunk_of(unit)
            .is_some_and(|(chunk, _)| self.cell(chunk).opened_at.load(Ordering::SeqCst) <= opens)
            || bug_injection::is_injected(InjectedBug::LogSkipReuseCheck)
    }

    /// Takes a free chunk; `None` if that would leave fewer than the floor of the purpose ([`SpaceLimits::reservation_floor`]).
    pub fn reserve(&self, purpose: ChunkPurpose) -> Option<ChunkNumber> {
        let floor = self.limits.reservation_floor(purpose);
        let take = |free: u32| (free > floor).then(|| free - 1);
        self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        let extent =
            self.space.allocate(0, &Cell::new(0), 1).expect("the count of free chunks is at most theirs");
        // Chunks have 26 bits.
        let chunk = ChunkNumber(extent.location as u32);
        self.set_state(chunk, ChunkState::Reserved);
        Some(chunk)
    }

    /// Frees a chunk that was reserved and not opened.
    pub fn return_reserved(&self, chunk: ChunkNumber) {
        self.set_state(chunk, ChunkState::Free);
        self.give_back(chunk);
    }

    /// Makes a chunk the tail of a log. REQUIRES: it is reserved, and the caller writes to it only after this call.
    pub fn open(&self, chunk: ChunkNumber, owner: ChunkOwner) {
        let cell = self.cell(chunk);
        let opening = self.opens.fetch_add(1, Ordering::SeqCst) + 1;
        // Before the owner: a reader that sees the new owner sees the opening, too.
        cell.opened_at.store(opening, Ordering::SeqCst);
        cell.owner.store(pack_owner(owner), Ordering::Release);
        self.vacated[chunk.0 as usize].store(0, Ordering::Relaxed);
        let live = Some(LiveContents::default());
        let word = ChunkWord { state: ChunkState::Open, kind: owner.kind, live };
        let (former, _) = cell.update(|_| word);
        assert!(former.state.may_become(ChunkState::Open), "{chunk:?}: {:?} to Open", former.state);
    }

    /// Notes that a chunk is full.
    pub fn seal(&self, chunk: ChunkNumber) {
        self.set_state(chunk, ChunkState::Sealed);
    }

    /// Notes that a chunk cannot be compacted now, and that its log goes on without it.
    pub fn pin(&self, chunk: ChunkNumber) {
        self.set_state(chunk, ChunkState::Pinned);
    }

    /// Notes that nothing in a chunk is live: it waits until no recovery needs it.
    pub fn retire(&self, chunk: ChunkNumber) {
        self.set_state(chunk, ChunkState::Retired);
    }

    /// Frees a chunk. REQUIRES: it is retired, a head of its log behind it is durable, and no checkpoint's replay begins in it.
    pub fn release(&self, chunk: ChunkNumber) {
        assert_eq!(self.state_of(chunk), ChunkState::Retired, "{chunk:?} is released");
        self.set_state(chunk, ChunkState::Free);
        self.give_back(chunk);
    }

    /// Takes over a chunk that a recovery found in use. Without `live`, its live contents are not counted. False, and nothing has changed,
    /// if there is no such chunk, or it is in use already. REQUIRES: no reader or writer uses the pool yet.
    #[must_use]
    pub fn adopt(
        &self,
        chunk: ChunkNumber,
        state: ChunkState,
        owner: ChunkOwner,
        live: Option<LiveContents>,
    ) -> bool {
        assert_ne!(state, ChunkState::Free, "a chunk in use");
        if !self.space.mark_used(Extent { location: chunk.0.into(), units: 1 }) {
            return false;
        }
        self.free.fetch_sub(1, Ordering::AcqRel);
        self.pinned.fetch_add(u32::from(state == ChunkState::Pinned), Ordering::AcqRel);
        let cell = self.cell(chunk);
        cell.owner.store(pack_owner(owner), Ordering::Release);
        let change = cell.update(|_| ChunkWord { state, kind: owner.kind, live });
        self.note_change(chunk, change);
        true
    }

    /// The state of a chunk.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn state_of(&self, chunk: ChunkNumber) -> ChunkState {
        self.cell(chunk).load().state
    }

    /// The live contents of a chunk; `None` if they are not counted since a recovery.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn live_of(&self, chunk: ChunkNumber) -> Option<LiveContents> {
        self.cell(chunk).load().live
    }

    /// The chunk of a unit of the device, and the unit's place there; `None` outside of the pool.
    pub fn chunk_of(&self, unit: u64) -> Option<(ChunkNumber, u32)> {
        let at = unit.checked_sub(self.first_unit)?;
        let (chunk, within) = (at / u64::from(self.sizes.units), at % u64::from(self.sizes.units));
        (chunk < u64::from(self.chunks())).then_some((ChunkNumber(chunk as u32), within as u32))
    }

    /// The log that has a unit of the device, and the unit's place in its chunk; `None` if none has it. A reader has to ask
    /// [`ChunkPool::unopened_since`] behind it.
    pub fn owner_of(&self, unit: u64) -> Option<(ChunkOwner, u32)> {
        let (chunk, within) = self.chunk_of(unit)?;
        let cell = self.cell(chunk);
        let word = cell.load();
        let has_owner = !matches!(word.state, ChunkState::Free | ChunkState::Reserved);
        has_owner.then(|| (unpack_owner(cell.owner.load(Ordering::Acquire), word.kind), within))
    }

    /// Changes the live contents of a chunk by so many records or images, and their granules or units. What is not counted stays so.
    ///
    /// A count that leaves its range, or a chunk that no log has, is what a structure with a valid checksum said wrongly, or a defect: the
    /// chunk is not counted any more, as those of a recovery, and [`ChunkPool::miscounts`] says so.
    pub fn add_live(&self, chunk: ChunkNumber, records: i32, amount: i64) {
        let mut is_possible = false;
        if let Some(cell) = self.cells.get(chunk.0 as usize) {
            let change = cell.update(|mut word| {
                is_possible = !matches!(word.state, ChunkState::Free | ChunkState::Reserved);
                if let Some(live) = word.live.filter(|_| is_possible) {
                    word.live = changed_contents(live, records, amount);
                    is_possible = word.live.is_some();
                }
                word
            });
            self.note_change(chunk, change);
        }
        if !is_possible {
            self.note_miscount();
        }
    }

    /// Notes that compaction has moved granules out of a chunk. Until the head passes the chunk they are free and cannot be used again, and compacting the log
    /// frees none of them sooner, so they do not count as its garbage. REQUIRES: the caller has the lock of the store.
    pub fn add_vacated(&self, chunk: ChunkNumber, granules: u32) {
        let vacated = self.vacated[chunk.0 as usize].fetch_add(granules, Ordering::Relaxed);
        let word = self.cell(chunk).load();
        let part = |vacated| self.part_of(word, vacated);
        self.replace_part(chunk, part(vacated), part(vacated.saturating_add(granules)));
    }

    /// What the sealed chunks of a log have together. REQUIRES: the caller has the lock of the store, as all changes of its chunks have.
    pub fn sealed_sums(&self, partition: u32, kind: LogKind) -> SealedSums {
        self.counters(partition, kind).map_or(SealedSums::default(), SealedCounters::load)
    }

    /// The bytes that live data of this purpose cannot have beside what the limits allow for: [`ChunkSizes::key_end_excess_bytes`] of all key logs, as far as
    /// the reserve has no room for them.
    pub fn key_end_excess_bytes(&self, purpose: ChunkPurpose) -> u64 {
        let chunk_bytes = u64::from(self.sizes.units) * u64::from(self.sizes.unit_bytes);
        let room = u64::from(self.limits.reserve_room(purpose)) * chunk_bytes;
        self.sizes.key_end_excess_bytes(&self.key_logs.load()).saturating_sub(room)
    }

    /// The part of a chunk in the sums of its log: none if it is not sealed.
    pub fn sealed_part(&self, chunk: ChunkNumber) -> SealedSums {
        self.part_of(self.cell(chunk).load(), self.vacated[chunk.0 as usize].load(Ordering::Relaxed))
    }

    fn counters(&self, partition: u32, kind: LogKind) -> Option<&SealedCounters> {
        self.sealed.get(partition as usize).map(|logs| &logs[usize::from(kind == LogKind::Values)])
    }

    fn part_of(&self, word: ChunkWord, vacated: u32) -> SealedSums {
        match word.state {
            ChunkState::Sealed => SealedSums::of_chunk(&self.sizes, word.kind, word.live, vacated),
            _ => SealedSums::default(),
        }
    }

    fn note_change(&self, chunk: ChunkNumber, (former, next): (ChunkWord, ChunkWord)) {
        let vacated = self.vacated[chunk.0 as usize].load(Ordering::Relaxed);
        self.replace_part(chunk, self.part_of(former, vacated), self.part_of(next, vacated));
    }

    /// Replaces the part of a chunk in the sums of its log. Of one change, so that changes may be added in any order.
    fn replace_part(&self, chunk: ChunkNumber, former: SealedSums, next: SealedSums) {
        if next == former {
            return;
        }
        let cell = self.cell(chunk);
        let kind = cell.load().kind;
        let owner = unpack_owner(cell.owner.load(Ordering::Acquire), kind);
        if let Some(counters) = self.counters(owner.partition, kind) {
            counters.change(former, next);
        }
        if kind == LogKind::Keys {
            self.key_logs.change(former, next);
        }
    }

    /// Changes of live contents that were not possible, of chunks and of the volume.
    pub fn miscounts(&self) -> u64 {
        self.miscounts.load(Ordering::Relaxed)
    }

    /// Counts a change of live contents that is not possible.
    pub fn note_miscount(&self) {
        self.miscounts.fetch_add(1, Ordering::Relaxed);
    }

    fn set_state(&self, chunk: ChunkNumber, next: ChunkState) {
        let change = self.cell(chunk).update(|word| ChunkWord { state: next, ..word });
        self.note_change(chunk, change);
        let (former, _) = change;
        self.pinned.fetch_add(u32::from(next == ChunkState::Pinned), Ordering::AcqRel);
        self.pinned.fetch_sub(u32::from(former.state == ChunkState::Pinned), Ordering::AcqRel);
        assert!(former.state.may_become(next), "{chunk:?}: {:?} to {next:?}", former.state);
    }

    fn give_back(&self, chunk: ChunkNumber) {
        self.space.release(Extent { location: chunk.0.into(), units: 1 });
        self.free.fetch_add(1, Ordering::AcqRel);
    }

    fn cell(&self, chunk: ChunkNumber) -> &ChunkCell {
        &self.cells[chunk.0 as usize]
    }
}

/// Live contents behind a change; `None` if a count leaves its range.
fn changed_contents(live: LiveContents, records: i32, amount: i64) -> Option<LiveContents> {
    let records = live.records.checked_add_signed(records).filter(|&count| count <= CHUNK_RECORDS_MAX)?;
    let amount = u64::from(live.amount).checked_add_signed(amount)?;
    let amount = u32::try_from(amount).ok().filter(|&amount| amount <= CHUNK_AMOUNT_MAX)?;
    Some(LiveContents { records, amount })
}

fn pack_owner(owner: ChunkOwner) -> u64 {
    u64::from(owner.partition) << 32 | u64::from(owner.index.0)
}

fn unpack_owner(owner: u64, kind: LogKind) -> ChunkOwner {
    ChunkOwner { partition: (owner >> 32) as u32, kind, index: ChunkIndex(owner as u32) }
}
