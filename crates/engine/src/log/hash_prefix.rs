//! From a position on the ring to a store, and by linear hashing to a segment of it.
//!
//! ```text
//!   position ──▶ store: one of n equal ring ranges ──▶ prefix: 64 bits of the position within the range, ascending along the ring
//!   segment at level L: the first L bits of the prefix, read backwards            L = 2, split = 1: segment 0 is split, 1 to 3 are not
//!
//!   prefix    000…   001…   01…        10…        11…                             ring order: 0, 4, 2, 1, 3
//!   segment   0      4      2          1          3
//! ```
//! Linear hashing (Litwin, VLDB 1980) splits segments in the order of their numbers: segment s into s and s + 2^L. Usually it takes the
//! last bits of a hash. Here it takes the first ones in reverse, so a segment has all keys of one range of the ring: a listing in ring
//! order reads one segment after another, each once.
//!
//! Invariants: split < 2^level; every prefix has one segment; a segment of depth d is a range of 2^(64 - d) prefixes, of which a split
//! moves the upper half.
//! Tested below.

use octokv_base::{RingPosition, RingRange};

/// The highest level. With it there are at most 2^32 - 1 segments: number 2^32 - 1 is a marker's ([`SegmentNumber::MARKER`]).
pub const LEVEL_MAX: u8 = 31;
/// The most bits of a prefix that name a segment: one more than the highest level.
pub const DEPTH_MAX: u8 = LEVEL_MAX + 1;

/// The number of a segment in its store, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentNumber(pub u32);

impl SegmentNumber {
    /// The number in an image that is of no segment.
    pub const MARKER: SegmentNumber = SegmentNumber(u32::MAX);

    /// Whether there may be a segment of this number at this depth.
    pub fn is_at_depth(self, depth: u8) -> bool {
        depth <= DEPTH_MAX && u64::from(self.0) < 1 << depth && self != SegmentNumber::MARKER
    }
}

/// The position of a key in its store's range of the ring, in 64 bits: ascends with the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HashPrefix(pub u64);

impl HashPrefix {
    /// The lowest prefix: where a listing begins.
    pub const MIN: HashPrefix = HashPrefix(0);

    /// The first 32 bits, by which the directory of a value chunk names a segment under any level.
    pub fn id(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The lowest prefix with these first 32 bits.
    pub fn of_id(id: u32) -> HashPrefix {
        HashPrefix(u64::from(id) << 32)
    }

    /// Whether a split of its segment of this depth moves it to the new segment.
    ///
    /// # Panics
    /// If a segment of this depth cannot be split.
    pub fn is_moved_by_split(self, depth: u8) -> bool {
        assert!(depth < DEPTH_MAX, "depth {depth}");
        self.0 >> (63 - depth) & 1 == 1
    }
}

/// The first and the last prefix of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixRange {
    /// The lowest.
    pub first: HashPrefix,
    /// The highest.
    pub last: HashPrefix,
}

/// The state of linear hashing: segments below `split` have level + 1 bits of the prefix, as those from 2^level on; the others level bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashLevel {
    /// The bits of the prefix that name a segment which is not split, at most [`LEVEL_MAX`].
    pub level: u8,
    /// The next segment to split, below 2^level.
    pub split: u32,
}

impl HashLevel {
    /// One segment with every key.
    pub const FIRST: HashLevel = HashLevel { level: 0, split: 0 };

    /// Whether the fields are a state of linear hashing.
    pub fn is_valid(self) -> bool {
        self.level <= LEVEL_MAX && u64::from(self.split) < 1 << self.level && self.segments() < 1 << 32
    }

    /// The number of segments.
    pub fn segments(self) -> u64 {
        (1 << self.level) + u64::from(self.split)
    }

    /// The segment of a prefix, and its depth: the bits of the prefix that name it.
    pub fn segment_of(self, prefix: HashPrefix) -> (SegmentNumber, u8) {
        let reversed = prefix.0.reverse_bits();
        let low_bits = |bits: u8| (reversed & ((1 << bits) - 1)) as u32;
        let number = low_bits(self.level);
        match number < self.split {
            true => (SegmentNumber(low_bits(self.level + 1)), self.level + 1),
            false => (SegmentNumber(number), self.level),
        }
    }

    /// The depth of a segment. REQUIRES: there is one of this number.
    pub fn depth_of(self, segment: SegmentNumber) -> u8 {
        let is_split = segment.0 < self.split || u64::from(segment.0) >= 1 << self.level;
        self.level + u8::from(is_split)
    }

    /// The prefixes of a segment. REQUIRES: there is one of this number.
    pub fn range_of(self, segment: SegmentNumber) -> PrefixRange {
        let depth = self.depth_of(segment);
        let first = u64::from(segment.0).reverse_bits();
        PrefixRange { first: HashPrefix(first), last: HashPrefix(first | bits_behind(depth)) }
    }

    /// The lowest prefix behind the segment of this one; `None` if it is the last on the ring.
    pub fn next_prefix(self, prefix: HashPrefix) -> Option<HashPrefix> {
        let (_, depth) = self.segment_of(prefix);
        (prefix.0 | bits_behind(depth)).checked_add(1).map(HashPrefix)
    }

    /// The segment that the next split makes: it gets the upper half of the range of segment `split`.
    pub fn next_segment(self) -> SegmentNumber {
        SegmentNumber((1 << self.level) + self.split)
    }

    /// Whether one more segment can be split.
    pub fn can_advance(self) -> bool {
        self.segments() + 1 < 1 << 32
    }

    /// The state after the next split.
    ///
    /// # Panics
    /// If there are as many segments as there can be.
    pub fn advanced(self) -> HashLevel {
        assert!(self.can_advance(), "{} segments", self.segments());
        HashLevel::of_segments(self.segments() + 1)
    }

    /// The least state that has a segment of this number and depth, as an image of it proves; `None` if no state has.
    pub fn with_segment(segment: SegmentNumber, depth: u8) -> Option<HashLevel> {
        if !segment.is_at_depth(depth) {
            return None;
        }
        let Some(level) = depth.checked_sub(1) else { return Some(HashLevel::FIRST) };
        let split_segment = u64::from(segment.0) & ((1 << level) - 1);
        Some(HashLevel::of_segments((1 << level) + split_segment + 1)).filter(|state| state.is_valid())
    }

    /// The state with so many segments. REQUIRES: 1 to 2^32 - 1.
    fn of_segments(segments: u64) -> HashLevel {
        let level = segments.ilog2();
        HashLevel { level: level as u8, split: (segments - (1 << level)) as u32 }
    }
}

/// The bits of a prefix that a segment of this depth does not fix, all set.
fn bits_behind(depth: u8) -> u64 {
    u64::MAX.checked_shr(depth.into()).unwrap_or(0)
}

/// The prefix of a position in a store's range.
///
/// # Panics
/// If the position is not in the range.
pub fn prefix_of(position: RingPosition, range: &RingRange) -> HashPrefix {
    assert!(range.contains(position), "position {position} in {range}");
    let width = range.last().0 - range.first().0;
    let within = position.0 - range.first().0;
    // A range of one position has one prefix.
    HashPrefix((within.checked_shl(width.leading_zeros()).unwrap_or(0) >> 64) as u64)
}

/// The initial store of a position, of so many: floor(position · stores / 2^128).
pub fn initial_store_of(position: RingPosition, stores: u16) -> u16 {
    let stores = u128::from(stores);
    let low = (position.0 & u128::from(u64::MAX)) * stores;
    let high = (position.0 >> 64) * stores;
    ((high + (low >> 64)) >> 64) as u16
}

/// The range of an initial store, of so many.
///
/// # Panics
/// If there is no such store.
pub fn initial_range(store: u16, stores: u16) -> RingRange {
    assert!(store < stores, "store {store} of {stores}");
    // The first position of a store is store · 2^128 / stores, rounded up.
    let quotient = u128::MAX / u128::from(stores);
    let remainder = u128::MAX % u128::from(stores) + 1;
    let first = |store: u16| {
        let store = u128::from(store);
        store * quotient + (store * remainder).div_ceil(stores.into())
    };
    let last = if store + 1 == stores { u128::MAX } else { first(store + 1) - 1 };
    RingRange::new(RingPosition(first(store)), RingPosition(last)).expect("stores are fewer than positions")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any state of linear hashing.
    fn states() -> impl Strategy<Value = HashLevel> {
        prop_oneof![1..300u64, 1..1u64 << 32, (1u64 << 32) - 3..1u64 << 32].prop_map(HashLevel::of_segments)
    }

    /// The segments that a listing visits, with the first prefix of each.
    fn visited(state: HashLevel) -> Vec<(SegmentNumber, HashPrefix)> {
        let mut next = Some(HashPrefix::MIN);
        let mut visited = Vec::new();
        while let Some(prefix) = next {
            visited.push((state.segment_of(prefix).0, prefix));
            next = state.next_prefix(prefix);
        }
        visited
    }

    #[test]
    fn a_listing_visits_every_segment_once_in_ring_order() {
        for segments in 1..=300 {
            let state = HashLevel::of_segments(segments);
            assert!(state.is_valid());
            let visited = visited(state);
            assert!(visited.is_sorted_by_key(|(_, prefix)| *prefix), "{state:?}");
            let mut numbers: Vec<u32> = visited.iter().map(|(segment, _)| segment.0).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..segments as u32).collect::<Vec<_>>(), "{state:?}");
            for (segment, prefix) in visited {
                assert_eq!(state.range_of(segment).first, prefix, "{state:?}");
            }
        }
    }

    #[test]
    fn the_picture_is_right() {
        let state = HashLevel { level: 2, split: 1 };
        let order: Vec<u32> = visited(state).iter().map(|(segment, _)| segment.0).collect();
        assert_eq!(order, [0, 4, 2, 1, 3]);
    }

    proptest! {
        #[test]
        fn a_segment_is_a_range_of_the_ring(state in states(), prefix: u64, other: u64) {
            let (segment, depth) = state.segment_of(HashPrefix(prefix));
            prop_assert!(u64::from(segment.0) < state.segments() && segment.is_at_depth(depth));
            prop_assert_eq!(state.depth_of(segment), depth);
            let PrefixRange { first, last } = state.range_of(segment);
            prop_assert!((first.0..=last.0).contains(&prefix));
            prop_assert_eq!(u128::from(last.0 - first.0) + 1, 1 << (64 - depth));
            for inside in [first.0, last.0, first.0 + other % (last.0 - first.0).max(1)] {
                prop_assert_eq!(state.segment_of(HashPrefix(inside)), (segment, depth));
            }
            let is_inside = (first.0..=last.0).contains(&other);
            prop_assert_eq!(state.segment_of(HashPrefix(other)).0 == segment, is_inside);
            prop_assert_eq!(state.next_prefix(HashPrefix(prefix)), last.0.checked_add(1).map(HashPrefix));
        }

        #[test]
        fn a_split_moves_exactly_the_upper_half_of_one_segment(state in states(), prefix: u64) {
            prop_assume!(state.can_advance());
            let (low, high) = (SegmentNumber(state.split), state.next_segment());
            let parent = state.range_of(low);
            let split = state.advanced();
            prop_assert_eq!(split.segments(), state.segments() + 1);
            let (low_range, high_range) = (split.range_of(low), split.range_of(high));
            prop_assert_eq!(low_range.first, parent.first);
            prop_assert_eq!(low_range.last.0 + 1, high_range.first.0);
            prop_assert_eq!(high_range.last, parent.last);
            prop_assert_eq!(low_range.last.0 - low_range.first.0, high_range.last.0 - high_range.first.0);
            // A prefix of the parent is where its bit says; any other stays.
            let within = HashPrefix(parent.first.0 | prefix & (parent.last.0 - parent.first.0));
            let half = if within.is_moved_by_split(state.depth_of(low)) { high } else { low };
            prop_assert_eq!(split.segment_of(within).0, half);
            let before = state.segment_of(HashPrefix(prefix)).0;
            if before != low {
                prop_assert_eq!(split.segment_of(HashPrefix(prefix)).0, before);
            }
        }

        #[test]
        fn an_image_proves_the_least_state_that_has_its_segment(state in states(), prefix: u64) {
            let (segment, depth) = state.segment_of(HashPrefix(prefix));
            let least = HashLevel::with_segment(segment, depth).expect("a state has it");
            prop_assert!(least.segments() <= state.segments());
            prop_assert_eq!(least.depth_of(segment), depth);
            prop_assert!(u64::from(segment.0) < least.segments());
            // One split less, and the segment has fewer bits or is not there.
            if least.segments() > 1 {
                let before = HashLevel::of_segments(least.segments() - 1);
                let is_there = u64::from(segment.0) < before.segments();
                prop_assert!(!is_there || before.depth_of(segment) < depth);
            }
        }

        #[test]
        fn a_directory_names_the_segment_of_its_record(state in states(), prefix: u64) {
            let id = HashPrefix(prefix).id();
            prop_assert_eq!(state.segment_of(HashPrefix::of_id(id)), state.segment_of(HashPrefix(prefix)));
        }

        #[test]
        fn prefixes_ascend_with_positions(first: u128, width: u128, a: u128, b: u128) {
            let last = first.saturating_add(width);
            let range = RingRange::new(RingPosition(first), RingPosition(last)).unwrap();
            let position = |offset: u128| RingPosition(first + offset % (last - first).max(1));
            let (low, high) = (position(a).min(position(b)), position(a).max(position(b)));
            prop_assert!(prefix_of(low, &range) <= prefix_of(high, &range));
            prop_assert_eq!(prefix_of(range.first(), &range), HashPrefix::MIN);
            // The last position is in the upper half of the prefixes, so no first split is in vain.
            prop_assert!(last == first || prefix_of(range.last(), &range).0 >> 63 == 1 || last - first < 1 << 64);
        }

        #[test]
        fn every_position_is_in_the_range_of_its_initial_store(position: u128, stores in 1..=u16::MAX) {
            let store = initial_store_of(RingPosition(position), stores);
            prop_assert!(initial_range(store, stores).contains(RingPosition(position)));
        }
    }

    #[test]
    fn initial_ranges_follow_one_another_around_the_ring() {
        for stores in [1, 2, 3, 7, 32, 1000, u16::MAX] {
            assert_eq!(initial_range(0, stores).first(), RingPosition::MIN);
            assert_eq!(initial_range(stores - 1, stores).last(), RingPosition::MAX);
            for store in 1..stores {
                let (before, range) = (initial_range(store - 1, stores), initial_range(store, stores));
                assert_eq!(before.last().0 + 1, range.first().0, "store {store} of {stores}");
                for (end, of) in [(before.last(), store - 1), (range.first(), store)] {
                    assert_eq!(initial_store_of(end, stores), of, "{end} of {stores}");
                }
            }
        }
    }

    #[test]
    fn a_range_of_one_position_has_one_prefix() {
        let range = RingRange::new(RingPosition(7), RingPosition(7)).unwrap();
        assert_eq!(prefix_of(RingPosition(7), &range), HashPrefix::MIN);
    }

    #[test]
    fn the_last_state_has_no_segment_of_a_markers_number() {
        let last = HashLevel { level: 31, split: (1 << 31) - 1 };
        assert!(last.is_valid() && !last.can_advance());
        assert_eq!(last.segments(), u64::from(u32::MAX));
        // The segment that would be split next keeps one bit less.
        assert_eq!(last.segment_of(HashPrefix(u64::MAX)), (SegmentNumber((1 << 31) - 1), 31));
        for state in [(32, 0), (31, 1 << 31), (0, 1), (255, 0)] {
            assert!(!HashLevel { level: state.0, split: state.1 }.is_valid(), "{state:?}");
        }
        for (number, depth) in [(u32::MAX, 32), (4, 2), (0, 33), (1, 255), (1, 0)] {
            assert_eq!(HashLevel::with_segment(SegmentNumber(number), depth), None, "{number} at {depth}");
        }
    }
}
