//! Concurrent segment visits of value compaction, with prefetch of the next round (LEED §3.3).
//!
//! ```text
//!   round of chunk k      S visits at a time ── the last of them ──▶ published, head advanced, chunk free
//!   chunk k + 1           prefetch:  directory read ─▶ visits in the free slots ──▶ its round visits the remaining segments
//! ```
//! Enough segments at once are prepared together ([`super::prepared_visits`]): in the place of one visit, before those of them.
//! A round waits for its slowest visit; prefetched visits keep the device busy meanwhile. A visit moves all records of its segment in the window, whichever
//! chunk's directory lists the segment, so a prefetched visit does the work of the later round.
//!
//! In: segments, and whether the next round follows. Out: the result of the visits. Invariants: a segment that ids name has one visit at a time; no visit in
//! progress is dropped or left without being polled, as others may wait for the writes that it leads; prefetched visits do not change the result of the current round,
//! and the next round visits again what they did not complete.
//! Tested in `compaction_tests.rs` and `compaction_overlap_tests.rs`, and below.

use super::compaction_rounds::RoundPace;
use super::core::LogCore;
use super::hash_prefix::{HashPrefix, SegmentNumber};
use super::pinned_chunks::is_passing_error;
use super::prepared_visits::PreparedVisit;
use super::records_to_move::VisitTarget;
use super::segment_visit::VisitEnd;
use super::space_pass::CompactionPass;
use super::store::Store;
use super::value_chunk_ids::ValueChunk;
use crate::EngineError;
use crate::common::work_slice::WorkSlice;
use futures_util::future::{Either, LocalBoxFuture, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::map::FxHashSet;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::pin::pin;

/// A visit takes the core about as long as so many bytes that are copied.
const VISIT_BYTES: u64 = 16 << 10;

/// How visits ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VisitsEnd {
    /// All segments were visited.
    All,
    /// Space became short. Whether any record was moved before.
    Paused { has_moved: bool },
}

/// Segments that have to be visited.
pub(super) enum SegmentsToVisit {
    /// Those of these ids.
    OfIds(VecDeque<u32>),
    /// All from this one on that were not visited in the window. New halves have higher numbers than their parents.
    UnvisitedFrom(SegmentNumber),
    /// All from this one on.
    AllFrom(SegmentNumber),
}

/// The prefetch of the next round, which is that of the chunk behind the head.
enum ChunkAhead {
    /// Not decided yet.
    Unknown,
    /// None: the next round does not follow, or the chunk has no readable directory.
    Absent,
    /// The directory is being read.
    Reading(ValueChunk),
    /// The directory was read. `ids` are the ids of all records of the chunk, `left` the segments without a prefetched visit so far.
    Visiting { head: ValueChunk, ids: VecDeque<u32>, left: SegmentsToVisit },
}

impl ChunkAhead {
    /// The state behind the read of the directory, before the first visit.
    fn visiting(head: ValueChunk, ids: VecDeque<u32>) -> ChunkAhead {
        let left = SegmentsToVisit::OfIds(ids.clone());
        ChunkAhead::Visiting { head, ids, left }
    }
}

/// A completed task.
enum Ended<'a> {
    Visit {
        segment: SegmentNumber,
        is_ahead: bool,
        end: Result<VisitEnd, EngineError>,
        image: Option<CompactionPass<'a>>,
    },
    /// The read of the directory of the chunk behind the head.
    Ids(Result<Option<VecDeque<u32>>, EngineError>),
    /// Visits were prepared.
    Prepared(Vec<PreparedVisit>),
}

/// The next segment to visit.
enum NextVisit {
    /// Its visit may begin.
    Ready(PreparedVisit),
    /// Segments are being prepared; their visits follow.
    Awaited,
    /// No segment is left, or only ones whose visits are in progress.
    Absent,
}

/// The visits of a store that are in progress.
pub(super) struct SegmentVisits<'a> {
    core: &'a LogCore,
    store: &'a Store,
    target: VisitTarget,
    pace: RoundPace,
    running: FuturesUnordered<LocalBoxFuture<'a, Ended<'a>>>,
    /// The segments that are visited now, or prepared for it.
    visiting: FxHashSet<SegmentNumber>,
    /// How many segments are prepared together.
    together: RangeInclusive<usize>,
    /// Visits that may begin.
    prepared: VecDeque<PreparedVisit>,
    is_preparing: bool,
    /// Whether `prepared`, and what is being prepared, belongs to the next round.
    is_prepared_ahead: bool,
    /// How many of those visits belong to the round.
    of_round: usize,
    /// The rights to append the images of visits that have ended.
    images: Vec<CompactionPass<'a>>,
    ahead: ChunkAhead,
    failure: Option<EngineError>,
    has_moved: bool,
    has_left: bool,
    is_paused: bool,
}

impl<'a> SegmentVisits<'a> {
    /// None so far.
    pub(super) fn new(
        core: &'a LogCore,
        store: &'a Store,
        target: VisitTarget,
        pace: RoundPace,
    ) -> SegmentVisits<'a> {
        SegmentVisits {
            core,
            store,
            target,
            pace,
            running: FuturesUnordered::new(),
            visiting: FxHashSet::default(),
            together: RangeInclusive::new(1, 0),
            prepared: VecDeque::new(),
            is_preparing: false,
            is_prepared_ahead: false,
            of_round: 0,
            images: Vec::new(),
            ahead: ChunkAhead::Unknown,
            failure: None,
            has_moved: false,
            has_left: false,
            is_paused: false,
        }
    }

    /// Visits the segments of one round and publishes their changes. Starts the prefetch of the next round when all of them have been started and `goes_on`
    /// returns true.
    ///
    /// # Errors
    /// Of visits of the round, behind which all others have ended; of the commit.
    pub(super) async fn visit(
        &mut self,
        mut segments: SegmentsToVisit,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<VisitsEnd, EngineError> {
        (self.failure, self.has_moved, self.has_left, self.is_paused) = (None, false, false, false);
        self.together = self.core.segments_together(self.store, self.target);
        let mut slice = WorkSlice::default();
        loop {
            let has_more = self.begin_visits(&mut segments);
            if !has_more {
                self.begin_ahead(goes_on);
                if self.of_round == 0 {
                    break;
                }
            }
            let ended = self.running.next().await.expect("a visit of the round runs");
            self.note(ended);
            slice.count_bytes(VISIT_BYTES).await;
        }
        self.publish().await?;
        match self.failure {
            Some(error) => Err(error),
            None if self.is_paused || self.has_left => Ok(VisitsEnd::Paused { has_moved: self.has_moved }),
            None => Ok(VisitsEnd::All),
        }
    }

    /// Polls `work` to completion, and prefetched visits beside it.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            self.visit_ahead();
            if self.running.is_empty() {
                return work.await;
            }
            match select(work.as_mut(), self.running.next()).await {
                Either::Left((end, _)) => return end,
                Either::Right((ended, _)) => ended.into_iter().for_each(|ended| self.note(ended)),
            }
        }
    }

    /// Whether the prefetch of the next round has started. The caller runs that round then.
    pub(super) fn is_ahead(&self) -> bool {
        matches!(self.ahead, ChunkAhead::Reading(_) | ChunkAhead::Visiting { .. })
    }

    /// Begins the round of `head`, whose prefetched visits are of the round from now on. Returns the ids of its records if its directory was prefetched.
    pub(super) async fn begin_round(&mut self, head: ValueChunk) -> Option<VecDeque<u32>> {
        while matches!(self.ahead, ChunkAhead::Reading(_)) {
            let ended = self.running.next().await.expect("a read runs");
            self.note(ended);
        }
        self.is_prepared_ahead = false;
        match std::mem::replace(&mut self.ahead, ChunkAhead::Unknown) {
            ChunkAhead::Visiting { head: of_ids, ids, .. } if of_ids == head => Some(ids),
            _ => None,
        }
    }

    /// Waits for the visits in progress, and publishes what they changed.
    ///
    /// # Errors
    /// Of the commit.
    pub(super) async fn finish(mut self) -> Result<(), EngineError> {
        self.ahead = ChunkAhead::Absent;
        while let Some(ended) = self.running.next().await {
            self.note(ended);
        }
        self.publish().await
    }

    /// Publishes the images of visits that have ended.
    async fn publish(&mut self) -> Result<(), EngineError> {
        let images = std::mem::take(&mut self.images);
        if images.is_empty() {
            return Ok(());
        }
        let (core, store) = (self.core, self.store);
        let published = self.beside(core.commit_all(store)).await;
        drop(images);
        published
    }

    /// Starts visits of the round, as many as may run. Returns whether segments are left to start.
    fn begin_visits(&mut self, segments: &mut SegmentsToVisit) -> bool {
        // What the device fails to read keeps nothing else from being moved.
        while self.failure.as_ref().is_none_or(is_passing_error) && !self.is_paused {
            if !self.has_place() {
                return true;
            }
            match self.next_visit(segments, false) {
                NextVisit::Ready(visit) if self.has_space() => {
                    self.of_round += 1;
                    self.begin_visit(visit, false);
                }
                NextVisit::Ready(visit) => {
                    self.prepared.push_front(visit);
                    self.is_paused = true;
                }
                NextVisit::Awaited => return true,
                NextVisit::Absent => {
                    // Those that are visited now are looked at again.
                    let has_more = matches!(segments, SegmentsToVisit::OfIds(ids) if !ids.is_empty());
                    if !has_more || self.prepared.is_empty() {
                        return has_more;
                    }
                    // Some are prepared for the next round, and may not begin before this one has ended.
                    self.discard_prepared();
                }
            }
        }
        self.discard_prepared();
        false
    }

    /// The next visit of segments of the round, or of the next one. Prepares some together if there are enough of them.
    fn next_visit(&mut self, segments: &mut SegmentsToVisit, is_ahead: bool) -> NextVisit {
        let has_prepared = self.is_preparing || !self.prepared.is_empty();
        if has_prepared && self.is_prepared_ahead != is_ahead {
            // The round may still have segments whose visits were incomplete.
            let alone = if is_ahead { None } else { self.take_segments(segments, 1).pop() };
            return alone.map_or(NextVisit::Absent, |next| NextVisit::Ready(PreparedVisit::alone(next)));
        }
        if !has_prepared {
            let (least, most) = self.together.clone().into_inner();
            let next = self.take_segments(segments, most.max(1));
            self.is_prepared_ahead = is_ahead;
            if next.len() >= least.max(2) {
                let (core, store, pace) = (self.core, self.store, self.pace);
                self.is_preparing = true;
                self.running.push(Box::pin(async move {
                    Ended::Prepared(core.prepare_visits(store, next, pace).await)
                }));
            } else {
                self.prepared.extend(next.into_iter().map(PreparedVisit::alone));
            }
        }
        match self.prepared.pop_front() {
            Some(visit) => NextVisit::Ready(visit),
            None if self.is_preparing => NextVisit::Awaited,
            None => NextVisit::Absent,
        }
    }

    /// Takes up to `most` segments that are not being visited, and marks them as being visited.
    fn take_segments(
        &mut self,
        segments: &mut SegmentsToVisit,
        most: usize,
    ) -> Vec<(SegmentNumber, HashPrefix)> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((segment, prefix)) = segments.next_of(self.store, &self.visiting)
        {
            self.visiting.insert(segment);
            taken.push((segment, prefix));
        }
        taken
    }

    /// Gives up visits that were prepared: a later round visits their segments.
    fn discard_prepared(&mut self) {
        for visit in self.prepared.drain(..) {
            self.visiting.remove(&visit.segment);
        }
    }

    fn has_place(&self) -> bool {
        self.running.len() < self.core.visits_at_once(self.pace)
    }

    /// Whether there is space for a short record and its image; longer ones find that out by themselves.
    fn has_space(&self) -> bool {
        let volume = &self.core.volume;
        volume.passes.spare_chunks(&volume.pool) >= self.core.moved_chunks_min(self.store)
    }

    fn begin_visit(&mut self, visit: PreparedVisit, is_ahead: bool) {
        let (core, store, target) = (self.core, self.store, self.target);
        let segment = visit.segment;
        self.running.push(Box::pin(async move {
            let (end, image) = core.visit_segment(store, visit, target).await;
            Ended::Visit { segment, is_ahead, end, image }
        }));
    }

    /// Starts the prefetch of the next round if that follows, once in a round.
    pub(super) fn begin_ahead(&mut self, goes_on: &dyn Fn() -> bool) {
        if matches!(self.ahead, ChunkAhead::Unknown) {
            let may_begin = !self.is_paused && self.failure.is_none() && self.target == VisitTarget::Window;
            let behind = may_begin.then(|| self.core.chunk_behind_head(self.store)).flatten();
            self.ahead = match behind.filter(|_| goes_on()) {
                // Visits have emptied it.
                Some(head) if self.core.is_chunk_empty(head.chunk) => {
                    ChunkAhead::visiting(head, VecDeque::new())
                }
                Some(head) => {
                    let (core, store) = (self.core, self.store);
                    self.running
                        .push(Box::pin(async move { Ended::Ids(core.ids_of_chunk(store, head).await) }));
                    ChunkAhead::Reading(head)
                }
                None => ChunkAhead::Absent,
            };
        }
        self.visit_ahead();
    }

    /// Starts prefetched visits, as many as may run.
    fn visit_ahead(&mut self) {
        while self.has_place()
            && self.has_space()
            && self.core.reaches_window_end(self.store)
            && let ChunkAhead::Visiting { left, .. } = &mut self.ahead
        {
            let mut segments = std::mem::replace(left, SegmentsToVisit::OfIds(VecDeque::new()));
            let next = self.next_visit(&mut segments, true);
            if let ChunkAhead::Visiting { left, .. } = &mut self.ahead {
                *left = segments;
            }
            let NextVisit::Ready(visit) = next else { return };
            self.begin_visit(visit, true);
        }
    }

    fn note(&mut self, ended: Ended<'a>) {
        let (segment, is_ahead, end, image) = match ended {
            Ended::Visit { segment, is_ahead, end, image } => (segment, is_ahead, end, image),
            Ended::Ids(ids) => {
                if let ChunkAhead::Reading(head) = self.ahead {
                    self.ahead = match ids {
                        Ok(Some(ids)) => ChunkAhead::visiting(head, ids),
                        // Its own round meets the same.
                        Ok(None) | Err(_) => ChunkAhead::Absent,
                    };
                }
                return;
            }
            Ended::Prepared(visits) => {
                self.is_preparing = false;
                self.prepared.extend(visits);
                return;
            }
        };
        self.visiting.remove(&segment);
        self.images.extend(image);
        let moved = end.map_or(0, |end| end.moved);
        if moved > 0
            && self.target == VisitTarget::Window
            && let Some(window) = &mut self.store.state.lock().window
        {
            window.set_begun();
        }
        if is_ahead {
            // If it did not complete, the round of its chunk visits the segment again.
            if end.is_ok_and(|end| end.is_short)
                && let ChunkAhead::Visiting { left, .. } = &mut self.ahead
            {
                *left = SegmentsToVisit::OfIds(VecDeque::new());
                self.discard_prepared();
            }
            return;
        }
        self.of_round -= 1;
        self.has_moved |= moved > 0;
        match end {
            Ok(VisitEnd { is_complete, is_short, .. }) => {
                self.has_left |= !is_complete;
                self.is_paused |= is_short;
            }
            Err(error) if self.failure.as_ref().is_none_or(is_passing_error) => self.failure = Some(error),
            Err(_) => {}
        }
    }
}

impl SegmentsToVisit {
    /// The next segment that was not visited and is not visited now, with a prefix in it.
    fn next_of(
        &mut self,
        store: &Store,
        visiting: &FxHashSet<SegmentNumber>,
    ) -> Option<(SegmentNumber, HashPrefix)> {
        let mut guard = store.state.lock();
        let state = &mut *guard;
        let level = state.table.level();
        match self {
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
}

#[cfg(test)]
mod tests {
    use super::super::test_log_volume::OpenTestVolume;
    use super::*;
    use crate::Durability;

    #[test]
    fn what_is_prepared_for_the_next_round_is_of_this_one_only_if_it_is_left() {
        let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
        let store = &volume.stores()[0];
        let mut visits = SegmentVisits::new(&volume.core, store, VisitTarget::Window, RoundPace::Any);
        let (segment, prefix) = (SegmentNumber(0), HashPrefix::MIN);
        visits.visiting.insert(segment);
        visits.prepared.push_back(PreparedVisit::alone((segment, prefix)));
        visits.is_prepared_ahead = true;
        let mut ids = VecDeque::new();
        assert!(!visits.begin_visits(&mut SegmentsToVisit::OfIds(ids.clone())), "nothing is left");
        assert_eq!((visits.of_round, visits.prepared.len()), (0, 1));
        ids.push_back(prefix.id());
        assert!(!visits.begin_visits(&mut SegmentsToVisit::OfIds(ids)), "it has begun");
        assert_eq!((visits.of_round, visits.prepared.len(), visits.running.len()), (1, 0, 1));
    }
}
