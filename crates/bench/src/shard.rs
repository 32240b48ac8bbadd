//! What one of several targets has of a run: its share of the keys, the threads and the operations.
//!
//! ```text
//!   index   0  1  2  3  4  5  6  7      three targets: key i is on target i mod 3, and is the (i div 3)-th there
//!   target  0  1  2  0  1  2  0  1
//! ```
//! Invariants: every index is on one target, the same in every run with as many targets; a target's indices are in
//! order and without gaps, so that it draws from its own keys as a target that is alone draws from all.

/// The share of target `number` of so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which target, from 0 on.
    pub number: u64,
    /// How many targets there are, at least one.
    pub of: u64,
}

impl Share {
    /// Of a target that is alone.
    pub const WHOLE: Share = Share { number: 0, of: 1 };

    /// The shares of so many targets.
    pub fn all(targets: usize) -> impl Iterator<Item = Share> {
        (0..targets as u64).map(move |number| Share { number, of: targets as u64 })
    }

    /// How many of the first `total` indices are in it.
    pub fn count(self, total: u64) -> u64 {
        total / self.of + u64::from(self.number < total % self.of)
    }

    /// The index of the `nth` that is in it.
    #[inline]
    pub fn index(self, nth: u64) -> u64 {
        nth * self.of + self.number
    }

    /// Which one of it an index is.
    #[inline]
    pub fn nth(self, index: u64) -> u64 {
        index / self.of
    }

    /// Those of a list that are in it; where the list is shorter than there are targets, some are in several.
    pub fn deal<T: Copy>(self, list: &[T]) -> Vec<T> {
        let own = list.iter().skip(self.number as usize).step_by(self.of as usize).copied();
        let own: Vec<T> = own.collect();
        if own.is_empty() { vec![list[self.number as usize % list.len()]] } else { own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_in_one_share_and_shares_have_no_gaps() {
        for (targets, total) in [(1, 7), (2, 7), (3, 9), (3, 10), (3, 11), (5, 5), (5, 3)] {
            let mut owners = vec![0; total as usize];
            for share in Share::all(targets) {
                for nth in 0..share.count(total) {
                    let index = share.index(nth);
                    assert_eq!((share.nth(index), index % share.of), (nth, share.number));
                    owners[index as usize] += 1;
                }
                assert!(share.index(share.count(total)) >= total);
            }
            assert!(owners.iter().all(|&owners| owners == 1), "{targets} {total}: {owners:?}");
        }
        assert_eq!((Share::WHOLE.count(9), Share::WHOLE.index(8), Share::WHOLE.nth(8)), (9, 8, 8));
    }

    #[test]
    fn a_list_is_dealt_out_and_a_short_one_shared() {
        let dealt =
            |targets, list: &[u8]| Share::all(targets).map(|share| share.deal(list)).collect::<Vec<_>>();
        assert_eq!(dealt(2, &[1, 2, 3]), [vec![1, 3], vec![2]]);
        assert_eq!(dealt(3, &[1, 2]), [vec![1], vec![2], vec![1]]);
        assert_eq!(dealt(1, &[4, 5]), [vec![4, 5]]);
    }
}
