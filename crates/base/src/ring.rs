//! The ring of keys: every key's position, by which keys are placed on partitions and nodes and listed in hash order.
//!
//! A position is the key's XXH3-128 with the seed of its volume or keyspace, as an unsigned number. The seed is secret
//! from hosts that could otherwise choose keys of one partition. Ranges include both ends, so that the whole ring is
//! one; none wraps around. Tested below.

use crate::Key;
use std::fmt;

/// A position on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingPosition(pub u128);

impl RingPosition {
    /// The lowest position.
    pub const MIN: RingPosition = RingPosition(0);
    /// The highest position.
    pub const MAX: RingPosition = RingPosition(u128::MAX);

    /// The position of a key.
    pub fn of(key: &Key, seed: u64) -> RingPosition {
        RingPosition::of_bytes(key.as_bytes(), seed)
    }

    /// The position of the key of these bytes.
    #[inline]
    pub fn of_bytes(key: &[u8], seed: u64) -> RingPosition {
        RingPosition(xxhash_rust::xxh3::xxh3_128_with_seed(key, seed))
    }
}

impl fmt::Display for RingPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A range of positions, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingRange {
    first: RingPosition,
    last: RingPosition,
}

impl RingRange {
    /// The whole ring.
    pub const FULL: RingRange = RingRange { first: RingPosition::MIN, last: RingPosition::MAX };

    /// The range from `first` to `last`; `None` if `last` is lower.
    pub fn new(first: RingPosition, last: RingPosition) -> Option<RingRange> {
        (first <= last).then_some(RingRange { first, last })
    }

    /// The lowest position.
    pub fn first(&self) -> RingPosition {
        self.first
    }

    /// The highest position.
    pub fn last(&self) -> RingPosition {
        self.last
    }

    /// Whether it holds a position.
    pub fn contains(&self, position: RingPosition) -> bool {
        self.first <= position && position <= self.last
    }

    /// Whether it shares a position with another range.
    pub fn overlaps(&self, other: &RingRange) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// The parts below `at` and from `at` on; `None` unless both hold a position.
    pub fn split(&self, at: RingPosition) -> Option<(RingRange, RingRange)> {
        let below = RingPosition(at.0.checked_sub(1)?);
        Some((RingRange::new(self.first, below)?, RingRange::new(at, self.last)?))
    }
}

impl fmt::Display for RingRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_depend_on_key_and_seed_and_never_change() {
        let key = Key::new(b"octokv").expect("a key");
        let position = RingPosition::of(&key, 0);
        // As the reference implementation has it: printf octokv | xxhsum -H2.
        assert_eq!(position, RingPosition(0xa139_43ef_eaac_c6f8_fbd9_3319_a915_080f));
        assert_ne!(position, RingPosition::of(&key, 1));
        assert_ne!(position, RingPosition::of(&Key::new(b"octokw").expect("a key"), 0));
        assert_eq!(position.to_string().len(), 32);
    }

    #[test]
    fn ranges_split_into_parts_that_hold_every_position_once() {
        let (low, high) = RingRange::FULL.split(RingPosition(7)).expect("two parts");
        assert_eq!((low.last(), high.first()), (RingPosition(6), RingPosition(7)));
        for position in [0, 6, 7, u128::MAX].map(RingPosition) {
            assert!(low.contains(position) != high.contains(position), "{position}");
        }
        assert!(!low.overlaps(&high) && low.overlaps(&RingRange::FULL) && RingRange::FULL.overlaps(&high));
        assert_eq!(RingRange::FULL.split(RingPosition::MIN), None, "nothing is below the first position");
        let one = RingRange::new(RingPosition(7), RingPosition(7)).expect("one position");
        assert_eq!(one.split(RingPosition(7)), None);
        assert_eq!(one.split(RingPosition(8)), None);
        assert_eq!(RingRange::new(RingPosition(8), RingPosition(7)), None);
    }
}
