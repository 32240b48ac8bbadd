//! A store: the keys of one part of the ring, in a segment table and two logs.
//!
//! ```text
//!   StoreState, one short lock      table │ key log │ value log │ busy segments │ batches │ totals │ retired chunks
//!   ValueTail, another              the end of the value log
//! ```
//! In: changes of segments, claimed images, published batches. Out: places, what the next image states, chunks to free.
//! Invariants: order of locks: state, then tail; neither across an await. What an image states of heads is what the logs have when it
//! is claimed; a chunk in front of a head is freed only after an image that states this head is durable, and a key chunk only in front of
//! the replay start of the durable checkpoint. A value chunk that has a record of a write under way is not in front of the head.
//! Tested in `compaction_tests.rs` and `tests/log_conformance.rs`.

use super::batch_state::{BatchState, ChangeTicket};
use super::busy_segments::{BusySegments, ChangeSource};
use super::chunk_directory::DIRECTORY_ID_BYTES;
use super::chunk_log::ChunkLog;
use super::chunk_pool::{ChunkPool, ChunkState};
use super::compaction_window::CompactionWindow;
use super::hash_prefix::{HashPrefix, SegmentNumber, prefix_of};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind, LogPlace};
use super::pinned_chunks::PinnedChunks;
use super::segment_buckets::{ImageRole, ImageState, PreviousImage, StoreTotals, ValueTailPlace};
use super::segment_entry::ValuePlace;
use super::segment_image::{EntryDifference, OldValue, SegmentImage};
use super::segment_ref::SegmentRef;
use super::segment_table::LogSegmentTable;
use super::store_image::PinnedChunk;
use super::value_tail::ValueTail;
use crate::bug_injection::{self, InjectedBug};
use crate::common::key_locks::{KeyGuard, KeyLocks, KeyWaiter};
use crate::common::waker_batch::WakerBatch;
use crate::sync::Mutex;
use futures_util::future::{Either, Ready, ready};
use octokv_base::{RingPosition, RingRange};
use std::collections::BTreeMap;

/// A change of one entry of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryChange {
    /// What it means for the totals, and the record that became garbage.
    pub difference: EntryDifference,
    /// The record of the new entry.
    pub new: Option<OldValue>,
}

/// A position in the first-in-first-out queue of a key's writes that decide; ready with the guard when all earlier ones have decided.
pub(super) type KeyTurn<'a> = Either<Ready<KeyGuard<'a>>, KeyWaiter<'a>>;

/// A store of an open volume.
pub(super) struct Store {
    /// Its partition.
    pub id: u32,
    /// The part of the ring whose keys it has.
    pub range: RingRange,
    pub state: Mutex<StoreState>,
    pub tail: Mutex<ValueTail>,
    /// Admission: a write holds its key's lock until it has space and a position in `turns`.
    key_locks: KeyLocks,
    /// Decision: a write holds its position until it has decided.
    turns: KeyLocks,
}

/// A chunk in front of the head of its log that is not free yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitingChunk {
    pub log: LogKind,
    pub index: ChunkIndex,
    pub chunk: ChunkNumber,
    /// The last image of the first batch that states the head behind it; `None` before that batch.
    pub stated_by: Option<u64>,
}

/// The halves of a segment that is being split.
pub(super) struct PendingSplit {
    pub segment: SegmentNumber,
    pub ticket: ChangeTicket,
    pub low: SegmentImage,
    pub high: SegmentImage,
    /// Whether a batch has claimed them.
    pub is_claimed: bool,
}

/// Where the published images of a key log end, which is where the replay of a checkpoint begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PublishedEnd {
    pub index: ChunkIndex,
    pub unit: u32,
    /// The opening that wrote the last image.
    pub incarnation: u32,
    pub previous: PreviousImage,
}

/// What a store has under its lock.
pub(super) struct StoreState {
    pub table: LogSegmentTable,
    pub keys: ChunkLog,
    pub values: ChunkLog,
    pub busy: BusySegments<SegmentImage, EntryChange>,
    pub batches: BatchState,
    /// After the last claimed image.
    pub totals: StoreTotals,
    /// The same after the last published image.
    pub totals_published: StoreTotals,
    /// The last claimed image.
    pub previous: PreviousImage,
    /// The end of the last published image.
    pub published: PublishedEnd,
    /// The units of all claimed images since the opening.
    pub appended_units: u64,
    /// The chunk of the value tail that the last claimed image states.
    pub stated_value_chunk: ChunkIndex,
    /// Value chunks with records of writes under way, whose entries are in no image yet, and how many.
    unentered: BTreeMap<ChunkIndex, u32>,
    /// The split under way.
    pub split: Option<PendingSplit>,
    /// The chunks of the value log whose records compaction moves.
    pub window: Option<CompactionWindow>,
    /// In no order.
    pub retired: Vec<WaitingChunk>,
    /// Chunks that device errors keep from being compacted.
    pub pinned: PinnedChunks,
    /// Where the replay of the durable checkpoint begins: key chunks from here on are not freed.
    pub replay_start: ChunkIndex,
    /// Whether recovery found that a segment is older than acknowledged, and not which: nothing is served.
    pub is_lost: bool,
}

/// The recovered parts of a store.
pub(super) struct StoreParts {
    pub table: LogSegmentTable,
    pub keys: ChunkLog,
    pub values: ChunkLog,
    pub totals: StoreTotals,
    pub last_sequence: u64,
    pub previous: PreviousImage,
    /// The opening that wrote the last image, or an earlier one.
    pub incarnation: u32,
    /// The chunk of the value tail that the last image states.
    pub stated_value_chunk: ChunkIndex,
    pub retired: Vec<WaitingChunk>,
    pub pinned: Vec<PinnedChunk>,
    pub replay_start: ChunkIndex,
    pub is_lost: bool,
}

/// An image that a batch has claimed: where it will lie, and what it replaces.
pub(super) struct ClaimedImage {
    /// [`SegmentNumber::MARKER`] of a marker.
    pub segment: SegmentNumber,
    pub place: LogPlace,
    pub state: ImageState,
    pub image: SegmentImage,
    pub chain: u8,
    pub changes: Vec<EntryChange>,
    pub source: ChangeSource,
}

/// The number of a key's lock. Shifted, since `u64::MAX` is none: two neighbouring prefixes share a lock.
fn lock_number(prefix: HashPrefix) -> u64 {
    prefix.0 >> 1
}

impl Store {
    /// A store of an open volume.
    pub(super) fn new(id: u32, range: RingRange, parts: StoreParts, tail: ValueTail) -> Store {
        let tail_of_keys = parts.keys.tail();
        let published = PublishedEnd {
            index: tail_of_keys.index,
            unit: tail_of_keys.unit,
            incarnation: parts.incarnation,
            previous: parts.previous,
        };
        let state = StoreState {
            table: parts.table,
            keys: parts.keys,
            values: parts.values,
            busy: BusySegments::default(),
            batches: BatchState::new(parts.last_sequence),
            totals: parts.totals,
            totals_published: parts.totals,
            previous: parts.previous,
            published,
            appended_units: 0,
            stated_value_chunk: parts.stated_value_chunk,
            unentered: BTreeMap::new(),
            split: None,
            window: None,
            retired: parts.retired,
            pinned: PinnedChunks::recovered(parts.pinned),
            replay_start: parts.replay_start,
            is_lost: parts.is_lost,
        };
        let (key_locks, turns) = (KeyLocks::default(), KeyLocks::default());
        Store { id, range, state: Mutex::new(state), tail: Mutex::new(tail), key_locks, turns }
    }

    /// The prefix of a position in its range.
    pub(super) fn prefix_of(&self, position: RingPosition) -> HashPrefix {
        prefix_of(position, &self.range)
    }

    /// Whether a key is known to be absent without an access: its segment has no image, and no write of it has begun.
    pub(super) fn is_absent(&self, prefix: HashPrefix) -> bool {
        let state = self.state.lock();
        let number = lock_number(prefix);
        // In the order in which a write has them: one that has left the first has the second.
        state.is_absent(prefix) && !self.key_locks.is_locked(number) && !self.turns.is_locked(number)
    }

    /// Locks a key behind the earlier writes of it. A write has the lock until it has space and has called [`Store::queue_turn`].
    pub(super) async fn lock_key(&self, prefix: HashPrefix) -> KeyGuard<'_> {
        self.key_locks.lock(lock_number(prefix)).await
    }

    /// Queues a write of a key for its decision, in the order in which writes of the key got its lock. REQUIRES: the caller has the key's lock and a space pass, since a
    /// write with a position must not wait for space.
    pub(super) fn queue_turn(&self, prefix: HashPrefix) -> KeyTurn<'_> {
        match self.turns.lock_or_queue(lock_number(prefix)) {
            Ok(guard) => Either::Left(ready(guard)),
            Err(waiter) => Either::Right(waiter),
        }
    }

    /// Notes that the images up to a sequence number are durable, frees the chunks that waited for them, and gives how many.
    pub(super) fn note_durable(&self, sequence: u64, pool: &ChunkPool) -> usize {
        let mut state = self.state.lock();
        state.batches.note_durable(sequence);
        state.release_retired(pool)
    }
}

impl StoreState {
    /// Counts a record of a write under way, which has to be entered or given up ([`StoreState::note_entered`]).
    pub(super) fn note_unentered(&mut self, chunks: impl Iterator<Item = ChunkIndex>) {
        chunks.for_each(|index| *self.unentered.entry(index).or_default() += 1);
    }

    /// Ends what [`StoreState::note_unentered`] began, with the same chunks.
    pub(super) fn note_entered(&mut self, chunks: impl Iterator<Item = ChunkIndex>) {
        for index in chunks {
            let count = self.unentered.get_mut(&index).expect("a record under way is counted");
            *count -= 1;
            if *count == 0 {
                self.unentered.remove(&index);
            }
        }
    }

    /// The first value chunk with a record of a write under way.
    pub(super) fn first_unentered(&self) -> Option<ChunkIndex> {
        self.unentered.first_key_value().map(|(&index, _)| index)
    }

    /// The chunk that follows one of the value log.
    pub(super) fn value_chunk_behind(&self, index: ChunkIndex) -> ChunkNumber {
        self.values.chunk_at(ChunkIndex(index.0 + 1)).unwrap_or(self.values.next_reserved())
    }

    /// What an image at the end of the key log states. REQUIRES: its space was appended last; `completed` is not more than one chunk
    /// behind that of the last claimed image.
    pub(super) fn image_state(
        &mut self,
        role: ImageRole,
        segment: SegmentNumber,
        chain: u8,
        completed: ValueTailPlace,
        incarnation: u32,
        sequence: u64,
    ) -> ImageState {
        debug_assert!(completed.index.0 <= self.stated_value_chunk.0 + 1);
        self.stated_value_chunk = completed.index;
        let depth = match role {
            ImageRole::Marker => 0,
            ImageRole::Segment => self.table.level().depth_of(segment),
            ImageRole::SplitFirst | ImageRole::SplitSecond => self.table.level().level + 1,
        };
        let lag = sequence - self.batches.durable_sequence();
        let state = ImageState {
            role,
            segment,
            depth,
            sequence,
            incarnation,
            // One of more than 32 bits would say too much, and none is that long.
            durable_lag: u32::try_from(lag).unwrap_or(u32::MAX),
            key_head: self.keys.head(),
            value_head: self.values.head(),
            next_key_chunk: self.keys.next_reserved(),
            next_value_chunk: self.value_chunk_behind(completed.index),
            value_tail: completed,
            totals: self.totals,
            previous: self.previous,
        };
        self.previous = PreviousImage { segment, chain };
        self.appended_units += u64::from(chain);
        state
    }

    /// Adds changes to the totals.
    pub(super) fn add_to_totals(&mut self, changes: &[EntryChange], layout: &LogLayout) {
        let granules = |value: &Option<OldValue>| {
            let bytes = value.as_ref().map_or(0, |value| value.record_bytes);
            i64::from(bytes.div_ceil(1 << layout.granule_log2))
        };
        let StoreTotals { keys, live_granules, entry_bytes } = &mut self.totals;
        let add = |total: &mut u64, difference: i64| {
            *total = total.checked_add_signed(difference).expect("no more is deleted than was written");
        };
        for EntryChange { difference, new } in changes {
            add(keys, difference.keys.into());
            add(entry_bytes, difference.entry_bytes.into());
            add(live_granules, granules(new) - granules(&difference.old));
        }
    }

    /// Makes written images those that readers find, and gives the bytes of the pool that are live now and were not before. The halves of a
    /// split are adjacent.
    pub(super) fn publish_images(
        &mut self,
        images: &[ClaimedImage],
        layout: &LogLayout,
        pool: &ChunkPool,
    ) -> (WakerBatch, i64) {
        let mut wakers = WakerBatch::default();
        let (mut low, mut units, mut value_bytes) = (None, 0, 0);
        if let Some(last) = images.last() {
            self.totals_published = last.state.totals;
            self.published = PublishedEnd {
                index: last.place.index,
                unit: last.place.unit + u32::from(last.chain),
                incarnation: last.state.incarnation,
                previous: PreviousImage { segment: last.segment, chain: last.chain },
            };
        }
        for claimed in images {
            let unit = layout.unit_of(claimed.place.chunk, claimed.place.unit);
            let image = SegmentRef::new(unit, claimed.chain);
            match claimed.state.role {
                ImageRole::Marker => {}
                ImageRole::Segment => {
                    units += self.set_image(claimed.segment, image, pool);
                    value_bytes += count_values(&claimed.changes, layout, pool);
                    self.busy.published(claimed.segment, &mut self.table);
                }
                ImageRole::SplitFirst => low = Some((claimed.segment, image)),
                ImageRole::SplitSecond => {
                    let (segment, low) = low.take().expect("the first half is before the second");
                    units += i64::from(low.chain()) + i64::from(image.chain());
                    units -= i64::from(self.table.get(segment).chain());
                    wakers.append(self.publish_split(segment, low, image, pool));
                }
            }
        }
        (wakers, units * i64::from(layout.unit_bytes) + value_bytes)
    }

    fn publish_split(
        &mut self,
        segment: SegmentNumber,
        low: SegmentRef,
        high: SegmentRef,
        pool: &ChunkPool,
    ) -> WakerBatch {
        count_image(self.table.get(segment), -1, pool);
        count_image(low, 1, pool);
        count_image(high, 1, pool);
        self.table.grow(low, high);
        self.split = None;
        self.busy.end_split(segment, &mut self.table)
    }

    /// Sets the table's entry, and counts both images in their chunks. Gives by how many units the new one is longer.
    fn set_image(&mut self, segment: SegmentNumber, image: SegmentRef, pool: &ChunkPool) -> i64 {
        let old = self.table.get(segment);
        count_image(image, 1, pool);
        count_image(old, -1, pool);
        self.table.set(segment, image);
        i64::from(image.chain()) - i64::from(old.chain())
    }

    /// Notes which image states the heads that retired chunks wait for. REQUIRES: a batch was claimed now, whose last image is this.
    pub(super) fn note_heads_stated(&mut self, last_sequence: u64) {
        for retired in &mut self.retired {
            retired.stated_by.get_or_insert(last_sequence);
        }
    }

    /// Advances the head of a log, and retires the chunks before it.
    pub(super) fn advance_head(&mut self, log: LogKind, to: ChunkIndex, pool: &ChunkPool) {
        let chunks = match log {
            LogKind::Keys => &mut self.keys,
            LogKind::Values => &mut self.values,
        };
        let retired = chunks.advance_head(to, pool).into_iter();
        let retired = retired.map(|(index, chunk)| WaitingChunk { log, index, chunk, stated_by: None });
        self.retired.extend(retired);
        if bug_injection::is_injected(InjectedBug::LogFreeBeforeFlush) {
            self.release_retired(pool);
        }
    }

    /// Frees the retired chunks that no recovery needs, and gives how many.
    pub(super) fn release_retired(&mut self, pool: &ChunkPool) -> usize {
        let before = self.retired.len();
        let durable = self.batches.durable_sequence();
        let replay_start = self.replay_start;
        let frees_early = bug_injection::is_injected(InjectedBug::LogFreeBeforeFlush);
        self.retired.retain(|retired| {
            let is_stated = frees_early || retired.stated_by.is_some_and(|sequence| sequence <= durable);
            let is_replayed = retired.log == LogKind::Keys && retired.index >= replay_start;
            let is_free = is_stated && !is_replayed;
            if is_free {
                debug_assert_eq!(pool.state_of(retired.chunk), ChunkState::Retired);
                pool.release(retired.chunk);
            }
            !is_free
        });
        before - self.retired.len()
    }

    /// Whether the segment of a prefix has no image and is not in memory: it has no key.
    pub(super) fn is_absent(&self, prefix: HashPrefix) -> bool {
        let (segment, _) = self.table.level().segment_of(prefix);
        self.table.get(segment).is_empty() && !self.busy.is_busy(segment) && !self.is_lost
    }
}

fn count_image(image: SegmentRef, images: i32, pool: &ChunkPool) {
    if let Some((chunk, _)) = pool.chunk_of(image.unit()).filter(|_| !image.is_empty()) {
        pool.add_live(chunk, images, i64::from(images) * i64::from(image.chain()));
    }
}

/// Counts the records of changes in their chunks, and gives by how many bytes there are more, with an id in a directory for each key.
fn count_values(changes: &[EntryChange], layout: &LogLayout, pool: &ChunkPool) -> i64 {
    let count = |value: &Option<OldValue>, records: i32| {
        let mut granules_more = 0;
        for (chunk, granules) in value.iter().flat_map(|value| granules_of(value, layout)) {
            pool.add_live(chunk, records, i64::from(records) * i64::from(granules));
            granules_more += i64::from(records) * i64::from(granules);
        }
        granules_more << layout.granule_log2
    };
    let bytes_of = |change: &EntryChange| {
        let ids = i64::from(change.difference.keys) * DIRECTORY_ID_BYTES as i64;
        ids + count(&change.new, 1) + count(&change.difference.old, -1)
    };
    changes.iter().map(bytes_of).sum()
}

/// Notes the granules that a moved record leaves in its old chunks. REQUIRES: the caller has the lock of the store.
pub(super) fn note_vacated(old: &OldValue, layout: &LogLayout, pool: &ChunkPool) {
    // The places are of the device: a chunk may be none of the pool's.
    for (chunk, granules) in granules_of(old, layout).filter(|(chunk, _)| chunk.0 < pool.chunks()) {
        pool.add_vacated(chunk, granules);
    }
}

/// The chunks of a record, and its granules in each.
pub(super) fn granules_of(value: &OldValue, layout: &LogLayout) -> impl Iterator<Item = (ChunkNumber, u32)> {
    let whole = match &value.at {
        ValuePlace::Record(granule) => {
            let granules = value.record_bytes.div_ceil(1 << layout.granule_log2);
            layout.place_of_granule(*granule).map(|(chunk, _)| (chunk, granules))
        }
        ValuePlace::Nowhere | ValuePlace::Extents(_) => None,
    };
    let extents = match &value.at {
        ValuePlace::Extents(extents) => &extents.extents[..],
        ValuePlace::Nowhere | ValuePlace::Record(_) => &[],
    };
    whole.into_iter().chain(extents.iter().map(|extent| (extent.chunk, extent.granules)))
}
