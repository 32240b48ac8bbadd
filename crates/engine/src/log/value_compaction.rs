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

use super::compaction_rounds::{RoundEnd, RoundPace};
use super::compaction_window::CompactionWindow;
use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::records_to_move::VisitTarget;
use super::sealed_sums::LiveContents;
use super::segment_buckets::image_units;
use super::segment_visits::{SegmentVisits, SegmentsToVisit, VisitsEnd};
use super::store::{Store, StoreState};
use super::value_chunk_ids::ValueChunk;
use super::window_space::WindowSpace;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use std::collections::VecDeque;
use std::ops::Range;

/// The units of a short image, with one for longer places.
const SHORT_IMAGE_UNITS: u32 = 2;
/// The most chunks that a round without room for its window writes while another value log is compacted, to free the head chunk alone (decision 0028 has
/// measurements).
const CHUNKS_ALONE_MAX: u64 = 2;

impl StoreState {
    /// Whether a segment was visited in the window.
    pub(super) fn is_visited(&mut self, segment: SegmentNumber) -> bool {
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
    /// Runs one round of value compaction, and further ones in the same window while `goes_on` returns true. `window_room` limits the free
    /// chunks that a new window may take, by [`CompactionWindow::takes_more`]; `None` is no limit.
    ///
    /// # Errors
    /// Device failures, no memory. The head is where the last round left it, and a further round goes on.
    pub(super) async fn compact_values(
        &self,
        store: &Store,
        (pace, window_room): (RoundPace, Option<u64>),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<RoundEnd, EngineError> {
        let mut visits = SegmentVisits::new(self, store, VisitTarget::Window, pace);
        let mut has_advanced = false;
        let end = loop {
            let end = self.value_round(store, (pace, window_room), &mut visits, goes_on).await;
            if end == Ok(RoundEnd::OutOfTurn) {
                break end;
            }
            let end = visits.beside(self.end_round(store, LogKind::Values, end)).await;
            has_advanced |= end == Ok(RoundEnd::Advanced);
            if end != Ok(RoundEnd::Advanced) || !visits.is_ahead() {
                break end;
            }
        };
        let finished = visits.finish().await;
        let end = end?;
        finished?;
        Ok(if has_advanced { RoundEnd::Advanced } else { end })
    }

    /// One round: moves the live records of the head chunk, and advances the head.
    async fn value_round(
        &self,
        store: &Store,
        (pace, window_room): (RoundPace, Option<u64>),
        visits: &mut SegmentVisits<'_>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<RoundEnd, EngineError> {
        let head = match self.open_window(store, (pace, window_room)) {
            Ok(head) => head,
            Err(end) => return Ok(end),
        };
        let ids = visits.begin_round(head).await;
        // Records of images that are not published are not counted yet.
        visits.beside(self.commit_all(store)).await?;
        if self.is_chunk_empty(head.chunk) {
            visits.begin_ahead(goes_on);
        } else if let VisitsEnd::Paused { has_moved } =
            self.visit_chunk(store, (head, ids), visits, goes_on).await?
        {
            return Ok(RoundEnd::Paused { has_moved });
        }
        visits.beside(self.state_value_tail_behind(store, head.index)).await?;
        let state = &mut *store.state.lock();
        let next = ChunkIndex(head.index.0 + 1);
        state.advance_head(LogKind::Values, next, &self.volume.pool);
        Ok(RoundEnd::Advanced)
    }

    /// Has an image state a tail of the value log behind a chunk: recovery follows the chunks from that of the head to the next.
    async fn state_value_tail_behind(&self, store: &Store, index: ChunkIndex) -> Result<(), EngineError> {
        while store.state.lock().stated_value_chunk <= index {
            self.append_marker_now(store).await?;
        }
        Ok(())
    }

    /// The chunk behind the head, if visits currently move its records.
    pub(super) fn chunk_behind_head(&self, store: &Store) -> Option<ValueChunk> {
        let state = store.state.lock();
        let (index, chunk) = state.values.sealed().nth(1)?;
        let is_reached = state.window.as_ref().is_some_and(|window| index < window.reach());
        is_reached.then_some(ValueChunk { index, chunk })
    }

    /// Whether visits currently move records of the whole window, not those of the head chunk alone.
    pub(super) fn reaches_window_end(&self, store: &Store) -> bool {
        let window_end = |window: &CompactionWindow| window.reach() == window.end();
        store.state.lock().window.as_ref().is_some_and(window_end)
    }

    /// The head chunk, in a window: a new one if there is none, or its end is reached. While free space is too short for what the visits of the round
    /// would move, they move the records of the head chunk alone. A visit then writes an image for hardly more than a record, so with [`RoundPace::InTurn`] the round
    /// waits for those of other value logs if that takes too many chunks.
    ///
    /// # Errors
    /// How the round ends: without a chunk, because writes of records in it are under way, because a new window would take too many chunks, or because it waits.
    fn open_window(
        &self,
        store: &Store,
        (pace, window_room): (RoundPace, Option<u64>),
    ) -> Result<ValueChunk, RoundEnd> {
        let mut guard = store.state.lock();
        let state = &mut *guard;
        let (index, chunk) = state.values.sealed().next().ok_or(RoundEnd::NoChunk)?;
        let new = match &state.window {
            Some(window) if window.end() > index => None,
            _ => Some(self.next_window(store, state, ValueChunk { index, chunk }, window_room)?),
        };
        let end = new.as_ref().or(state.window.as_ref()).map_or(index, CompactionWindow::end);
        let (needed, compactions) = (self.chunks_of_round(state, chunk, end), &self.volume.compactions);
        // Key compaction gets room for the images that become garbage only when the round has ended. Other rounds move their windows, too.
        let spare = self.volume.passes.spare_chunks(&self.volume.pool).into();
        let has_space = compactions.take_round(store.id, LogKind::Values, needed, spare);
        // Its own round is one of them. A volume in which two windows have no room while compaction begins is too small for them.
        let has_others = compactions.count(LogKind::Values) > 1;
        let has_windows = 2 * needed <= self.volume.pool.limits().start.into();
        let may_wait = pace == RoundPace::InTurn && has_others && has_windows;
        if !has_space && may_wait && self.is_dear_alone(state, chunk) {
            return Err(RoundEnd::OutOfTurn);
        }
        if new.is_some() {
            state.window = new;
        }
        if let Some(window) = &mut state.window {
            window.set_reach(if has_space { end } else { ChunkIndex(index.0 + 1) });
        }
        Ok(ValueChunk { index, chunk })
    }

    /// The window that begins with the head chunk of a value log.
    ///
    /// # Errors
    /// How the round ends: writes of records in the chunk are under way, or the window would take too many chunks.
    fn next_window(
        &self,
        store: &Store,
        state: &StoreState,
        ValueChunk { index, chunk }: ValueChunk,
        window_room: Option<u64>,
    ) -> Result<CompactionWindow, RoundEnd> {
        let sealed = state.values.chunk_count() as u32 - 1;
        let chunks = sealed.checked_div(self.volume.settings.window_divisor).unwrap_or(1).max(1);
        // Behind this no record is under way, written or not: new ones begin in the last chunk.
        let written = store.tail.lock().completed().index;
        let settled = state.first_unentered().map_or(written, |first| first.min(written));
        let end = ChunkIndex(index.0 + chunks).min(settled);
        if end <= index {
            return Err(RoundEnd::Paused { has_moved: false });
        }
        let window = self.window_of(state, index..end);
        match window_room {
            Some(room) if window.takes_more(index) > room => match self.is_chunk_empty(chunk) {
                // A chunk in which nothing lives is freed without a window.
                true => Ok(self.window_of(state, index..ChunkIndex(index.0 + 1))),
                false => Err(RoundEnd::OutOfTurn),
            },
            _ => Ok(window),
        }
    }

    /// A window of these chunks.
    fn window_of(&self, state: &StoreState, chunks: Range<ChunkIndex>) -> CompactionWindow {
        let (records, granules) = self.live_until(state, chunks.end);
        let live_chunks = granules as f64 / f64::from(self.volume.layout().chunk_granules());
        let (count, segments) = (chunks.end.0 - chunks.start.0, state.table.segments());
        CompactionWindow::new(chunks, WindowSpace::new(count, live_chunks, records, segments), segments)
    }

    /// The live records and granules of the chunks of a value log from its head to `end`.
    pub(super) fn live_until(&self, state: &StoreState, end: ChunkIndex) -> (u64, u64) {
        let uncounted = self.uncounted_values(state);
        let chunks = state.values.sealed().take_while(|&(index, _)| index < end);
        let live = chunks.map(|(_, chunk)| self.volume.pool.live_of(chunk).unwrap_or(uncounted));
        live.fold((0, 0), |(records, amount), live| {
            (records + u64::from(live.records), amount + u64::from(live.amount))
        })
    }

    /// The chunks that a round may take before it frees the head chunk, if its visits reach to the end of the window: each record of the chunk
    /// is of another segment, which has its share of the records of the window.
    fn chunks_of_round(&self, state: &StoreState, chunk: ChunkNumber, window_end: ChunkIndex) -> u64 {
        let (layout, limits) = (self.volume.layout(), self.volume.pool.limits());
        let segments = state.table.segments().max(1);
        let (visits, images_bytes) = self.visits_of_round(state, chunk);
        let live_bytes = self.live_until(state, window_end).1 << layout.granule_log2;
        let moved_bytes = live_bytes / segments * visits;
        // A chunk for the rest of each sum, and those that moving the longest record takes.
        let least = 2 + limits.value - limits.key;
        (moved_bytes + images_bytes) / u64::from(layout.chunk_bytes()) + u64::from(least)
    }

    /// The visits of a round, if each record of the head chunk is of another segment, and the bytes of their images.
    fn visits_of_round(&self, state: &StoreState, chunk: ChunkNumber) -> (u64, u64) {
        let layout = self.volume.layout();
        let segments = state.table.segments().max(1);
        let visits = u64::from(self.live_of_values(state, chunk).records).min(segments);
        let entry_bytes = (state.totals.entry_bytes / segments) as usize;
        let image_units = image_units(entry_bytes, layout.unit_bytes).unwrap_or(layout.chain_max());
        (visits, visits * u64::from(image_units) * u64::from(layout.unit_bytes))
    }

    /// Whether a round that moves the records of the head chunk alone writes more than [`CHUNKS_ALONE_MAX`] chunks to free one.
    fn is_dear_alone(&self, state: &StoreState, chunk: ChunkNumber) -> bool {
        let layout = self.volume.layout();
        let moved_bytes = u64::from(self.live_of_values(state, chunk).amount) << layout.granule_log2;
        let (_, images_bytes) = self.visits_of_round(state, chunk);
        moved_bytes + images_bytes > CHUNKS_ALONE_MAX * u64::from(layout.chunk_bytes())
    }

    /// The live records of a value chunk, and their granules; an estimate for a chunk without a count ([`LogCore::uncounted_values`]).
    fn live_of_values(&self, state: &StoreState, chunk: ChunkNumber) -> LiveContents {
        self.volume.pool.live_of(chunk).unwrap_or_else(|| self.uncounted_values(state))
    }

    /// The chunks that moving a record of one unit and its image takes: none if the tails of both logs have room.
    pub(super) fn moved_chunks_min(&self, store: &Store) -> u32 {
        let of_record = store.tail.lock().chunks_of(self.volume.layout().unit_granules());
        of_record + self.image_chunks_min(store)
    }

    /// The chunks that a short image takes.
    pub(super) fn image_chunks_min(&self, store: &Store) -> u32 {
        u32::from(self.volume.passes.key_room(store.id) < SHORT_IMAGE_UNITS)
    }

    /// Visits the segments with records in a chunk, whose ids may be known, until no image names one.
    async fn visit_chunk(
        &self,
        store: &Store,
        (head, ids): (ValueChunk, Option<VecDeque<u32>>),
        visits: &mut SegmentVisits<'_>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<VisitsEnd, EngineError> {
        if ids.is_some() && bug_injection::is_injected(InjectedBug::LogTrustPrefetch) {
            return Ok(VisitsEnd::All);
        }
        let ids = match ids {
            Some(ids) => Some(ids),
            None => visits.beside(self.ids_of_chunk(store, head)).await?,
        };
        let unvisited = || SegmentsToVisit::UnvisitedFrom(SegmentNumber(0));
        let end = visits.visit(ids.map_or_else(unvisited, SegmentsToVisit::OfIds), goes_on).await?;
        if end != VisitsEnd::All {
            return Ok(end);
        }
        visits.beside(self.commit_all(store)).await?;
        let is_counted_out = self.volume.pool.live_of(head.chunk).is_none_or(|live| live.records == 0);
        if is_counted_out {
            return Ok(VisitsEnd::All);
        }
        // Damaged buckets hide the entries of records, which are counted for ever. That no other entry is left has to be seen.
        if let Some(window) = &mut store.state.lock().window {
            window.clear_visits();
        }
        let end = visits.visit(unvisited(), goes_on).await?;
        visits.beside(self.commit_all(store)).await?;
        Ok(end)
    }

    /// Visits all segments with records in a pinned chunk. Whether none is left.
    ///
    /// # Errors
    /// Device failures, behind which all records were moved that could be read; no memory.
    pub(super) async fn visit_pinned(&self, store: &Store, chunk: ChunkNumber) -> Result<bool, EngineError> {
        let all = SegmentsToVisit::AllFrom(SegmentNumber(0));
        let mut visits = SegmentVisits::new(self, store, VisitTarget::Pinned(chunk), RoundPace::Any);
        let end = visits.visit(all, &|| false).await;
        visits.finish().await?;
        Ok(end? == VisitsEnd::All)
    }
}
