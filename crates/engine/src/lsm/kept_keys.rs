//! Keys whose entries a compaction of level 0 leaves there: older entries of them lie in tables that it does not read.
//!
//! In: key ranges of tables. Out: which keys are within one, and where an output table has to end, since no table of the next level may reach across a range.
//! Invariant: the ranges are in order and disjoint. Tested below.

/// Ranges of keys, of each the first and the last one, both included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptKeys(Vec<(Vec<u8>, Vec<u8>)>);

impl KeptKeys {
    /// The keys of any of these ranges.
    pub fn of_ranges<'a>(ranges: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> KeptKeys {
        let mut sorted: Vec<(&[u8], &[u8])> = ranges.collect();
        sorted.sort_unstable();
        let mut disjoint: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for (first, last) in sorted {
            match disjoint.last_mut() {
                Some((_, before)) if first <= &before[..] => {
                    if last > &before[..] {
                        *before = last.to_vec();
                    }
                }
                _ => disjoint.push((first.to_vec(), last.to_vec())),
            }
        }
        KeptKeys(disjoint)
    }

    /// Whether no key is kept.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a key is within a range.
    pub fn has(&self, key: &[u8]) -> bool {
        self.section(key) % 2 == 1
    }

    /// Whether a key from `first` to `last`, both included, is within a range.
    pub fn overlaps(&self, first: &[u8], last: &[u8]) -> bool {
        self.section(first) % 2 == 1 || self.section(first) != self.section(last)
    }

    /// The section of a key: 0 before the first range, 1 in it, 2 between it and the second, and so on. All entries of a table are of one section.
    pub fn section(&self, key: &[u8]) -> usize {
        let ended = self.0.partition_point(|(_, last)| &last[..] < key);
        let is_within = self.0.get(ended).is_some_and(|(first, _)| &first[..] <= key);
        2 * ended + usize::from(is_within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn sections_agree_with_a_list_of_keys() {
        for seed in 0..300 {
            let mut random = Prng::new(seed);
            let mut is_kept = [false; 40];
            let mut ranges = Vec::new();
            for _ in 0..random.below(6) {
                let first = random.below(40) as u8;
                let last = first + random.below(u64::from(40 - first).min(6)) as u8;
                is_kept[usize::from(first)..=usize::from(last)].fill(true);
                ranges.push(([first], [last]));
            }
            let kept = KeptKeys::of_ranges(ranges.iter().map(|(first, last)| (&first[..], &last[..])));
            assert_eq!(kept.is_empty(), ranges.is_empty());
            for first in 0..40u8 {
                assert_eq!(kept.has(&[first]), is_kept[usize::from(first)], "seed {seed}, key {first}");
                for last in first..40u8 {
                    let within = &is_kept[usize::from(first)..=usize::from(last)];
                    let overlaps = within.iter().any(|&is_kept| is_kept);
                    assert_eq!(kept.overlaps(&[first], &[last]), overlaps, "seed {seed}, {first}..={last}");
                    // Keys of one section have no range between them that only one of them is in.
                    if kept.section(&[first]) == kept.section(&[last]) && !is_kept[usize::from(first)] {
                        assert!(!overlaps, "seed {seed}, {first}..={last}");
                    }
                }
            }
        }
    }
}
