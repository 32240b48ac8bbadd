//! Compaction of a value log: the live records of its head chunks move to the tail, a window at a time.
//!
//! ```text
//!   window = head chunks │ round = one of them
//!   directory ─▶ ids ─▶ segments that were not visited in the window ─▶ S visits at a time
//!     visit    segment held ─▶ all its records in the window read, appended to the tail, written
//!                           ─▶ under the lock: each entry that still has the old place gets the new one ─▶ dirty, visited
//!   ─▶ published ─▶ live records of the chunk = 0 ─▶ the head advances, which the next image or marker states
//! ```
//! In: a store whose value log has a sealed chunk. Out: a head that is one chunk further, or the same head and the visits so far.
//!
//! Invariants: the head passes a chunk only when no image, published or not, names a record in it, no write of a record in it is under way,
//! and an image has stated a tail behind it. A record is moved only if it is intact; one that is damaged in three reads leaves an entry of a
//! lost value. Without a directory every record of the chunk is found by its header, or every segment is visited. Visits in progress
//! are never dropped: others may wait for the writes that they lead.
//! Tested in `compaction_tests.rs`.

use super::chunk_pool::{ChunkPool, LiveContents};
use super::compaction_rounds::RoundEnd;
use super::compaction_window::CompactionWindow;
use super::core::LogCore;
use super::hash_prefix::{HashPrefix, SegmentNumber};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::pinned_chunks::is_passing_error;
use super::segment_buckets::image_units;
use super::segment_image::OldValue;
use super::segment_visit::{VisitEnd, VisitTarget};
use super::store::{Store, StoreState, granules_of};
use super::window_space::WindowSpace;
use crate::EngineError;
use crate::common::work_slice::WorkSlice;
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::map::FxHashSet;
use std::collections::VecDeque;
use std::ops::Range;

/// A visit takes the core about as long as so many bytes that are copied.
const VISIT_BYTES: u64 = 16 << 10;
/// The units of a short image, with one for longer places.
const SHORT_IMAGE_UNITS: u32 = 2;

/// How visits ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VisitsEnd {
    /// All segments were visited.
    All,
    /// Space became short. Whether any record was moved before.
    Paused { has_moved: bool },
}

/// Segments that have to be visited.
enum SegmentsToVisit {
    /// Those of these ids.
    OfIds(VecDeque<u32>),
    /// All from this one on that were not visited in the window. New halves have higher numbers than their parents.
    UnvisitedFrom(SegmentNumber),
    /// All from this one on.
    AllFrom(SegmentNumber),
}

/// The head chunk of a value log, in its window.
#[derive(Clone, Copy)]
pub(super) struct HeadChunk {
    pub index: ChunkIndex,
    pub chunk: ChunkNumber,
}

impl StoreState {
    /// Notes that compaction has moved a record, which leaves space in chunks that are not at the head yet.
    pub(super) fn note_vacated(&mut self, old: &OldValue, layout: &LogLayout, pool: &ChunkPool) {
        for (chunk, granules) in granules_of(old, layout) {
            if let Some((owner, _)) = pool.owner_of(pool.first_unit_of(chunk)) {
                *self.vacated_granules.entry(owner.index).or_default() += granules;
            }
        }
    }

    /// Whether a segment was visited in the window.
    fn is_visited(&mut self, segment: SegmentNumber) -> bool {
        let segments = self.table.segments();
        self.window.as_mut().is_some_and(|window| window.is_visited(segment, segments))
    }

    /// Notes that no entry of a segment has a record in the window.
    pub(super) fn set_visited(&mut self, segment: SegmentNumber) {
        let segments = self.table.segments();
        if let Some(window) = &mut self.window {
            window.set_visited(segment, segments);
        }
    }
}

impl LogCore {
    /// One round of value compaction: moves the live records of the head chunk, and advances the head. `window_room` limits the free chunks that a new
    /// window may take, by [`CompactionWindow::takes_more`]; `None` is no limit.
    ///
    /// # Errors
    /// Device failures, no memory. The head is where it was, and a further round goes on.
    pub(super) async fn compact_values(
        &self,
        store: &Store,
        window_room: Option<u64>,
    ) -> Result<RoundEnd, EngineError> {
        let head = match self.open_window(store, window_room) {
            Ok(head) => head,
            Err(end) => return Ok(end),
        };
        // Records of images that are not published are not counted yet.
        self.commit_all(store).await?;
        if !self.is_chunk_empty(head.chunk)
            && let VisitsEnd::Paused { has_moved } = self.visit_chunk(store, head).await?
        {
            return Ok(RoundEnd::Paused { has_moved });
        }
        // The images that state the head state a tail behind it: recovery follows the chunks from one to the next.
        while store.state.lock().stated_value_chunk <= head.index {
            self.append_marker_now(store).await?;
        }
        let state = &mut *store.state.lock();
        let next = ChunkIndex(head.index.0 + 1);
        state.advance_head(LogKind::Values, next, &self.volume.pool);
        state.vacated_granules = state.vacated_granules.split_off(&next);
        Ok(RoundEnd::Advanced)
    }

    /// The head chunk, in a window: a new one if there is none, or its end is reached.
    ///
    /// # Errors
    /// How the round ends: without a chunk, because writes of records in it are under way, or because a new window would take too many chunks.
    fn open_window(&self, store: &Store, window_room: Option<u64>) -> Result<HeadChunk, RoundEnd> {
        let mut guard = store.state.lock();
        let state = &mut *guard;
        let (index, chunk) = state.values.sealed().next().ok_or(RoundEnd::NoChunk)?;
        if state.window.as_ref().is_none_or(|window| window.end() <= index) {
            let sealed = state.values.chunk_count() as u32 - 1;
            let chunks = sealed.checked_div(self.volume.settings.window_divisor).unwrap_or(1).max(1);
            // Behind this no record is under way, written or not: new ones begin in the last chunk.
            let written = store.tail.lock().completed().index;
            let settled = state.first_unentered().map_or(written, |first| first.min(written));
            let end = ChunkIndex(index.0 + chunks).min(settled);
            if end <= index {
                return Err(RoundEnd::Paused { has_moved: false });
            }
            let mut window = self.window_of(state, index..end);
            if window_room.is_some_and(|room| window.takes_more(index) > room) {
                if !self.is_chunk_empty(chunk) {
                    return Err(RoundEnd::OutOfTurn);
                }
                // A chunk in which nothing lives is freed without a window.
                window = self.window_of(state, index..ChunkIndex(index.0 + 1));
            }
            state.window = Some(window);
        }
        let needed = self.chunks_of_round(state, chunk);
        if let Some(window) = &mut state.window {
            // Key compaction gets room for the images that become garbage only when the round has ended. Other rounds move their windows, too.
            let spare = self.volume.passes.spare_chunks(&self.volume.pool).into();
            let has_space = self.volume.compactions.take_round(store.id, LogKind::Values, needed, spare);
            window.set_reach(if has_space { window.end() } else { ChunkIndex(index.0 + 1) });
        }
        Ok(HeadChunk { index, chunk })
    }

    /// A window of these chunks.
    fn window_of(&self, state: &StoreState, chunks: Range<ChunkIndex>) -> CompactionWindow {
        let (records, granules) = self.live_until(state, chunks.end);
        let live_chunks = granules as f64 / f64::from(self.volume.layout().chunk_granules());
        let (count, segments) = (chunks.end.0 - chunks.start.0, state.table.segments());
        CompactionWindow::new(chunks, WindowSpace::new(count, live_chunks, records, segments), segments)
    }

    /// The live records and granules of the chunks of a value log from its head to `end`.
    fn live_until(&self, state: &StoreState, end: ChunkIndex) -> (u64, u64) {
        let granules = self.volume.layout().chunk_granules();
        // Without a count all of it may be live, in the shortest records.
        let uncounted = LiveContents { records: granules, amount: granules };
        let chunks = state.values.sealed().take_while(|&(index, _)| index < end);
        let live = chunks.map(|(_, chunk)| self.volume.pool.live_of(chunk).unwrap_or(uncounted));
        live.fold((0, 0), |(records, amount), live| {
            (records + u64::from(live.records), amount + u64::from(live.amount))
        })
    }

    /// The chunks that a round may take before it frees the head chunk, if its visits reach to the end of the window: each record of the chunk
    /// is of another segment, which has its share of the records of the window.
    fn chunks_of_round(&self, state: &StoreState, chunk: ChunkNumber) -> u64 {
        let (layout, pool) = (self.volume.layout(), &self.volume.pool);
        let Some(window) = &state.window else { return 0 };
        let segments = state.table.segments().max(1);
        let visits = pool.live_of(chunk).map_or(segments, |live| u64::from(live.records).min(segments));
        let live_bytes = self.live_until(state, window.end()).1 << layout.granule_log2;
        let moved_bytes = live_bytes / segments * visits;
        let entry_bytes = (state.totals.entry_bytes / segments) as usize;
        let image_units = image_units(entry_bytes, layout.unit_bytes).unwrap_or(layout.chain_max());
        let images_bytes = visits * u64::from(image_units) * u64::from(layout.unit_bytes);
        let limits = pool.limits();
        // A chunk for the rest of each sum, and those that moving the longest record takes.
        let least = 2 + limits.value - limits.key;
        (moved_bytes + images_bytes) / u64::from(layout.chunk_bytes()) + u64::from(least)
    }

    /// The chunks that moving a record of one unit and its image takes: none if the tails of both logs have room.
    fn moved_chunks_min(&self, store: &Store) -> u32 {
        let of_record = store.tail.lock().chunks_of(self.volume.layout().unit_granules());
        of_record + self.image_chunks_min(store)
    }

    /// The chunks that a short image takes.
    pub(super) fn image_chunks_min(&self, store: &Store) -> u32 {
        u32::from(self.volume.passes.key_room(store.id) < SHORT_IMAGE_UNITS)
    }

    /// Visits the segments with records in a chunk until no image names one.
    async fn visit_chunk(&self, store: &Store, head: HeadChunk) -> Result<VisitsEnd, EngineError> {
        let first = match self.ids_of_chunk(store, head).await? {
            Some(ids) => SegmentsToVisit::OfIds(ids),
            None => SegmentsToVisit::UnvisitedFrom(SegmentNumber(0)),
        };
        let end = self.visit_all(store, first, VisitTarget::Window).await?;
        if end != VisitsEnd::All {
            return Ok(end);
        }
        self.commit_all(store).await?;
        let is_counted_out = self.volume.pool.live_of(head.chunk).is_none_or(|live| live.records == 0);
        if is_counted_out {
            return Ok(VisitsEnd::All);
        }
        // Damaged buckets hide the entries of records, which are counted for ever. That no other entry is left has to be seen.
        if let Some(window) = &mut store.state.lock().window {
            window.clear_visits();
        }
        let unvisited = SegmentsToVisit::UnvisitedFrom(SegmentNumber(0));
        let end = self.visit_all(store, unvisited, VisitTarget::Window).await?;
        self.commit_all(store).await?;
        Ok(end)
    }

    /// Visits all segments with records in a pinned chunk. Whether none is left.
    ///
    /// # Errors
    /// Device failures, behind which all records were moved that could be read; no memory.
    pub(super) async fn visit_pinned(&self, store: &Store, chunk: ChunkNumber) -> Result<bool, EngineError> {
        let all = SegmentsToVisit::AllFrom(SegmentNumber(0));
        Ok(self.visit_all(store, all, VisitTarget::Pinned(chunk)).await? == VisitsEnd::All)
    }

    /// Visits segments, some at a time.
    async fn visit_all(
        &self,
        store: &Store,
        mut segments: SegmentsToVisit,
        target: VisitTarget,
    ) -> Result<VisitsEnd, EngineError> {
        let (mut running, mut visiting) = (FuturesUnordered::new(), FxHashSet::default());
        let (mut failure, mut has_moved, mut has_left, mut is_paused) = (None, false, false, false);
        let (mut images, mut slice) = (Vec::new(), WorkSlice::default());
        loop {
            // What the device fails to read keeps nothing else from being moved.
            while failure.as_ref().is_none_or(is_passing_error)
                && !is_paused
                && running.len() < self.volume.settings.sub_compactions.max(1)
                && let Some((segment, prefix)) = next_segment(store, &mut segments, &visiting)
            {
                // Without space for a short record and its image; longer ones find that out by themselves.
                if self.volume.passes.spare_chunks(&self.volume.pool) < self.moved_chunks_min(store) {
                    is_paused = true;
                    break;
                }
                visiting.insert(segment);
                running.push(async move { (segment, self.visit_segment(store, prefix, target).await) });
            }
            let Some((segment, (visit, image))) = running.next().await else { break };
            visiting.remove(&segment);
            images.extend(image);
            slice.count_bytes(VISIT_BYTES).await;
            match visit {
                Ok(VisitEnd { moved, is_complete, is_short }) => {
                    has_moved |= moved > 0;
                    has_left |= !is_complete;
                    is_paused |= is_short;
                }
                Err(error) if failure.as_ref().is_none_or(is_passing_error) => failure = Some(error),
                Err(_) => {}
            }
        }
        if has_moved
            && target == VisitTarget::Window
            && let Some(window) = &mut store.state.lock().window
        {
            window.set_begun();
        }
        if !images.is_empty() {
            let committed = self.commit_all(store).await;
            failure = failure.or(committed.err());
        }
        drop(images);
        match failure {
            Some(error) => Err(error),
            None if is_paused || has_left => Ok(VisitsEnd::Paused { has_moved }),
            None => Ok(VisitsEnd::All),
        }
    }
}

/// The next segment that was not visited and is not visited now, with a prefix in it.
fn next_segment(
    store: &Store,
    segments: &mut SegmentsToVisit,
    visiting: &FxHashSet<SegmentNumber>,
) -> Option<(SegmentNumber, HashPrefix)> {
    let mut guard = store.state.lock();
    let state = &mut *guard;
    let level = state.table.level();
    match segments {
        SegmentsToVisit::OfIds(ids) => {
            // A segment that is visited now may be split before: its ids are looked at again.
            for _ in 0..ids.len() {
                let id = ids.pop_front()?;
                let prefix = HashPrefix::of_id(id);
                let (segment, _) = level.segment_of(prefix);
                if visiting.contains(&segment) {
                    ids.push_back(id);
                } else if !state.is_visited(segment) {
                    return Some((segment, prefix));
                }
            }
            None
        }
        SegmentsToVisit::UnvisitedFrom(from) => {
            let segment = state.window.as_mut()?.next_unvisited(*from, level.segments())?;
            *from = SegmentNumber(segment.0 + 1);
            Some((segment, level.range_of(segment).first))
        }
        SegmentsToVisit::AllFrom(from) => {
            let segment = *from;
            let is_one = u64::from(segment.0) < level.segments();
            *from = SegmentNumber(segment.0 + u32::from(is_one));
            is_one.then(|| (segment, level.range_of(segment).first))
        }
    }
}
