//! The window of a value log's compaction: the chunks at the head whose records are moved together, and the segments that were visited.
//!
//! ```text
//!   value log     head │ sealed │ sealed │ end …… │ sealed │ tail          a window: the head and the chunks before its end
//!   segments      0 1 0 0 1 1 0 0                                          1: none of its entries has a record in the window
//!   split of 1:   0 1 0 0 1 1 0 0 1                                        the new half is as visited as its parent was
//! ```
//! While free space is too short for what the visits of a round move, and the round does not wait, they move the records of the head chunk alone, and are not noted.
//!
//! In: the head of a value log, visits. Out: whether a segment has to be visited.
//! Invariants: a visited segment has no record in the window, since new records lie behind it; a new half inherits the bit that its parent had
//! when it was split, because every access first adds the halves that are missing. A bit of memory a segment.
//! Tested below.

use super::hash_prefix::SegmentNumber;
use super::log_place::ChunkIndex;
use super::window_space::WindowSpace;
use std::ops::Range;

/// A window, and which segments were visited in it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CompactionWindow {
    first: ChunkIndex,
    end: ChunkIndex,
    space: WindowSpace,
    /// A bit per segment.
    visited: Vec<u64>,
    segments: u64,
    is_begun: bool,
    /// The end of the chunks whose records visits move now: that of the window, or of its head chunk while free space is short.
    reach: ChunkIndex,
}

impl CompactionWindow {
    /// A window of these chunks, of a store with so many segments, none of them visited.
    pub(super) fn new(chunks: Range<ChunkIndex>, space: WindowSpace, segments: u64) -> CompactionWindow {
        let visited = vec![0; segments.div_ceil(64) as usize];
        let Range { start: first, end } = chunks;
        CompactionWindow { first, end, space, visited, segments, is_begun: false, reach: end }
    }

    /// Its chunks in front of the head of the log.
    fn compacted(&self, head: ChunkIndex) -> u32 {
        head.min(self.end).0.saturating_sub(self.first.0)
    }

    /// The most chunks that compacting it will take from now on, before it gives them back.
    pub(super) fn takes_more(&self, head: ChunkIndex) -> u64 {
        self.space.takes_more(self.compacted(head))
    }

    /// Whether compacting it has taken more chunks than it gave back, and can give some.
    pub(super) fn has_debt(&self, head: ChunkIndex) -> bool {
        head < self.end && self.space.has_debt(self.compacted(head))
    }

    /// The first chunk behind the window.
    pub(super) fn end(&self) -> ChunkIndex {
        self.end
    }

    /// The end of the chunks whose records visits move.
    pub(super) fn reach(&self) -> ChunkIndex {
        self.reach
    }

    /// Makes the following visits move the records of chunks below `reach` alone.
    pub(super) fn set_reach(&mut self, reach: ChunkIndex) {
        self.reach = reach.min(self.end);
    }

    /// Whether records in the window were moved.
    pub(super) fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// Notes that records in the window were moved.
    pub(super) fn set_begun(&mut self) {
        self.is_begun = true;
    }

    /// Whether a segment was visited. `segments` is the present number of segments.
    pub(super) fn is_visited(&mut self, segment: SegmentNumber, segments: u64) -> bool {
        self.add_halves(segments);
        self.bit(segment.0.into())
    }

    /// Notes that a segment has no record below [`CompactionWindow::reach`], which counts if that is the end of the window.
    pub(super) fn set_visited(&mut self, segment: SegmentNumber, segments: u64) {
        if self.reach < self.end {
            return;
        }
        self.add_halves(segments);
        self.set_bit(segment.0.into());
    }

    /// Forgets all visits.
    pub(super) fn clear_visits(&mut self) {
        self.visited.fill(0);
    }

    /// The first segment from one on that was not visited.
    pub(super) fn next_unvisited(&mut self, from: SegmentNumber, segments: u64) -> Option<SegmentNumber> {
        self.add_halves(segments);
        // Segments have 32 bits.
        (u64::from(from.0)..segments)
            .find(|&segment| !self.bit(segment))
            .map(|segment| SegmentNumber(segment as u32))
    }

    /// How many segments were not visited.
    pub(super) fn unvisited(&mut self, segments: u64) -> u64 {
        self.add_halves(segments);
        segments - self.visited.iter().map(|bits| u64::from(bits.count_ones())).sum::<u64>()
    }

    /// Adds the segments that splits made since the last access. Linear hashing splits segment s into s and s + 2^level.
    fn add_halves(&mut self, segments: u64) {
        self.visited.resize(segments.div_ceil(64) as usize, 0);
        for half in self.segments..segments {
            let parent = half - (1 << half.ilog2());
            if self.bit(parent) {
                self.set_bit(half);
            }
        }
        self.segments = segments;
    }

    fn bit(&self, segment: u64) -> bool {
        self.visited[(segment / 64) as usize] >> (segment % 64) & 1 == 1
    }

    fn set_bit(&mut self, segment: u64) {
        self.visited[(segment / 64) as usize] |= 1 << (segment % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::super::hash_prefix::{HashLevel, HashPrefix};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// The model has the visited ranges of prefixes, by prefixes that stand for each.
        #[test]
        fn a_half_is_as_visited_as_the_segment_that_it_was_part_of(steps in vec((any::<u64>(), 0..4u32), 0..300)) {
            let samples: Vec<HashPrefix> = (0..256u64).map(|first| HashPrefix(first << 56)).collect();
            let mut level = HashLevel::FIRST;
            let space = WindowSpace::new(7, 7.0, 7, level.segments());
            let mut window = CompactionWindow::new(ChunkIndex(0)..ChunkIndex(7), space, level.segments());
            let mut visited = vec![false; samples.len()];
            for (prefix, step) in steps {
                let segment = level.segment_of(HashPrefix(prefix)).0;
                match step {
                    0 | 1 if level.segments() < 256 => level = level.advanced(),
                    2 => {
                        window.set_visited(segment, level.segments());
                        for (visited, sample) in visited.iter_mut().zip(&samples) {
                            *visited |= level.segment_of(*sample).0 == segment;
                        }
                    }
                    _ => {
                        let is_visited = window.is_visited(segment, level.segments());
                        let of_segment = (0..samples.len()).filter(|&at| level.segment_of(samples[at]).0 == segment);
                        let model: Vec<bool> = of_segment.map(|at| visited[at]).collect();
                        prop_assert!(model.iter().all(|&visited| visited == is_visited), "{segment:?}: {model:?}");
                    }
                }
            }
            let mut next = SegmentNumber(0);
            while let Some(unvisited) = window.next_unvisited(next, level.segments()) {
                prop_assert!(!window.is_visited(unvisited, level.segments()));
                let before = window.unvisited(level.segments());
                window.set_visited(unvisited, level.segments());
                prop_assert_eq!(window.unvisited(level.segments()), before - 1);
                next = SegmentNumber(unvisited.0 + 1);
            }
            prop_assert!((0..level.segments()).all(|segment| window.is_visited(SegmentNumber(segment as u32), level.segments())));
            prop_assert_eq!(window.unvisited(level.segments()), 0);
            window.clear_visits();
            prop_assert_eq!(window.unvisited(level.segments()), level.segments());
            prop_assert_eq!(window.next_unvisited(SegmentNumber(0), level.segments()), Some(SegmentNumber(0)));
        }
    }
}
