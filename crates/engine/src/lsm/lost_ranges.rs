//! Lost ranges: keys of which a compaction could not read all entries
//! ([decision 0027](../../../../docs/decisions/0027-an-ordered-engine-from-common-parts.md)).
//!
//! A read of a key in such a range fails unless it finds an entry newer than the range's sequence number: a lost entry may have been the key's last
//! write. Ranges overlap if compactions lost parts of one range at different times. Beyond [`LOST_RANGES_MAX`] two neighbours become one: more reads
//! fail then, and none answers wrongly.
//!
//! Invariants: ranges are in order of their first keys, then of their last; none is within another of at least its sequence number; all are
//! shared between versions. Tested below against the plain list.

use std::sync::Arc;

/// The most ranges of a version.
pub const LOST_RANGES_MAX: usize = 1024;

/// Keys of which entries were lost.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LostRange {
    /// The first key that may have lost an entry.
    pub first_key: Vec<u8>,
    /// The last key that may have lost an entry.
    pub last_key: Vec<u8>,
    /// The highest sequence number that a lost entry may have.
    pub newest_sequence: u64,
}

impl LostRange {
    fn contains(&self, key: &[u8]) -> bool {
        (&self.first_key[..]..=&self.last_key[..]).contains(&key)
    }

    /// Whether this range says all that another says.
    fn covers(&self, other: &LostRange) -> bool {
        self.first_key <= other.first_key
            && other.last_key <= self.last_key
            && other.newest_sequence <= self.newest_sequence
    }
}

/// The lost ranges of a version. A clone shares them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostRanges(Option<Arc<[LostRange]>>);

impl LostRanges {
    /// The ranges, in order.
    pub fn as_slice(&self) -> &[LostRange] {
        self.0.as_deref().unwrap_or(&[])
    }

    /// The highest sequence number of an entry of the key that may be lost. A read of the key that finds no newer entry fails.
    pub fn newest_lost(&self, key: &[u8]) -> Option<u64> {
        let ranges = self.as_slice();
        let end = ranges.partition_point(|range| &range.first_key[..] <= key);
        ranges[..end].iter().filter(|range| range.contains(key)).map(|range| range.newest_sequence).max()
    }

    /// The first range that meets the keys from `first` to `last`, both included.
    pub fn first_overlapping(&self, first: &[u8], last: &[u8]) -> Option<&LostRange> {
        self.as_slice().iter().find(|range| &range.first_key[..] <= last && first <= &range.last_key[..])
    }

    /// These ranges without `removed` and then with `added`.
    pub fn edited(&self, added: &[LostRange], removed: &[LostRange]) -> LostRanges {
        if added.is_empty() && removed.is_empty() {
            return self.clone();
        }
        let mut ranges: Vec<LostRange> = self.as_slice().to_vec();
        ranges.retain(|range| !removed.contains(range));
        for new in added {
            if !ranges.iter().any(|range| range.covers(new)) {
                ranges.retain(|range| !new.covers(range));
                ranges.push(new.clone());
            }
        }
        ranges.sort();
        while ranges.len() > LOST_RANGES_MAX {
            join_nearest(&mut ranges);
        }
        LostRanges((!ranges.is_empty()).then(|| ranges.into()))
    }
}

/// Makes one of the two neighbours that lie together most closely, as far as their keys tell it.
fn join_nearest(ranges: &mut Vec<LostRange>) {
    let shared_bytes = |index: &usize| {
        let keys = ranges[*index].last_key.iter().zip(&ranges[index + 1].first_key);
        keys.take_while(|(one, other)| one == other).count()
    };
    let Some(index) = (0..ranges.len() - 1).max_by_key(shared_bytes) else { return };
    let next = ranges.remove(index + 1);
    let joined = &mut ranges[index];
    joined.last_key = joined.last_key.clone().max(next.last_key);
    joined.newest_sequence = joined.newest_sequence.max(next.newest_sequence);
    let joined = joined.clone();
    ranges.retain(|range| *range == joined || !joined.covers(range));
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn lost(first: u16, last: u16, newest_sequence: u64) -> LostRange {
        let key = |number: u16| number.to_be_bytes().to_vec();
        LostRange { first_key: key(first), last_key: key(last), newest_sequence }
    }

    #[test]
    fn a_key_has_the_newest_loss_of_all_ranges_with_it() {
        for seed in 0..40 {
            let mut random = Prng::new(seed);
            let (mut ranges, mut model) = (LostRanges::default(), Vec::<LostRange>::new());
            for _ in 0..30 {
                let mut removed = Vec::new();
                if random.one_in(3)
                    && let Some(range) = ranges.as_slice().first()
                {
                    removed.push(range.clone());
                    model.retain(|other| !range.covers(other));
                }
                let (one, other) = (random.below(100) as u16, random.below(100) as u16);
                let added = [lost(one.min(other), one.max(other), random.below(50))];
                model.push(added[0].clone());
                ranges = ranges.edited(&added, &removed);
                assert!(ranges.as_slice().is_sorted());
                for number in 0..100u16 {
                    let key = number.to_be_bytes();
                    let newest = model.iter().filter(|range| range.contains(&key));
                    let newest = newest.map(|range| range.newest_sequence).max();
                    assert_eq!(ranges.newest_lost(&key), newest, "seed {seed}");
                    let meets = model.iter().any(|range| range.contains(&key));
                    assert_eq!(ranges.first_overlapping(&key, &key).is_some(), meets);
                }
            }
        }
    }

    #[test]
    fn beyond_the_bound_neighbours_join_and_no_loss_is_forgotten() {
        let mut ranges = LostRanges::default();
        for number in 0..LOST_RANGES_MAX as u16 + 500 {
            ranges = ranges.edited(&[lost(number * 8, number * 8 + 1, u64::from(number))], &[]);
            assert!(ranges.as_slice().len() <= LOST_RANGES_MAX);
        }
        for number in 0..LOST_RANGES_MAX as u16 + 500 {
            let newest = ranges.newest_lost(&(number * 8 + 1).to_be_bytes());
            assert!(newest.is_some_and(|newest| newest >= u64::from(number)));
        }
        let unlost = (0..8000u16).filter(|key| ranges.newest_lost(&key.to_be_bytes()).is_none());
        assert!(unlost.count() > 3000, "ranges far apart stay apart");
    }
}
