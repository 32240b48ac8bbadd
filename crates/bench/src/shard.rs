//! A shard: the part of the keys, threads and operations of a run that one of several targets has.
//!
//! ```text
//!   index   0  1  2  3  4  5  6  7      three targets: key i is on target i mod 3, with local index i div 3
//!   target  0  1  2  0  1  2  0  1
//! ```
//! Invariants: every index is on one target, the same in every run with as many targets; the local indices of a target
//! are in order and without gaps, so that it samples its keys as a single target samples all.

/// The shard of one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of the target, from 0 on.
    pub shard_index: u64,
    /// Number of targets, at least one.
    pub shard_count: u64,
}

impl Shard {
    /// The shard of a single target.
    pub const WHOLE: Shard = Shard { shard_index: 0, shard_count: 1 };

    /// The shards of `targets` targets.
    pub fn all(targets: usize) -> impl Iterator<Item = Shard> {
        (0..targets as u64).map(move |number| Shard { shard_index: number, shard_count: targets as u64 })
    }

    /// Number of the first `total` indices that are in the shard.
    pub fn count(self, total: u64) -> u64 {
        total / self.shard_count + u64::from(self.shard_index < total % self.shard_count)
    }

    /// The global index of a local index.
    #[inline]
    pub fn global_index(self, nth: u64) -> u64 {
        nth * self.shard_count + self.shard_index
    }

    /// The local index of a global index.
    #[inline]
    pub fn local_index(self, index: u64) -> u64 {
        index / self.shard_count
    }

    /// The elements of a list that are assigned to the shard. If the list is shorter than the number of targets, several
    /// shards share an element.
    pub fn assign<T: Copy>(self, list: &[T]) -> Vec<T> {
        let own = list.iter().skip(self.shard_index as usize).step_by(self.shard_count as usize).copied();
        let own: Vec<T> = own.collect();
        if own.is_empty() { vec![list[self.shard_index as usize % list.len()]] } else { own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_is_in_one_shard_and_shards_have_no_gaps() {
        for (targets, total) in [(1, 7), (2, 7), (3, 9), (3, 10), (3, 11), (5, 5), (5, 3)] {
            let mut owners = vec![0; total as usize];
            for shard in Shard::all(targets) {
                for nth in 0..shard.count(total) {
                    let index = shard.global_index(nth);
                    assert_eq!(
                        (shard.local_index(index), index % shard.shard_count),
                        (nth, shard.shard_index)
                    );
                    owners[index as usize] += 1;
                }
                assert!(shard.global_index(shard.count(total)) >= total);
            }
            assert!(owners.iter().all(|&owners| owners == 1), "{targets} {total}: {owners:?}");
        }
        assert_eq!(
            (Shard::WHOLE.count(9), Shard::WHOLE.global_index(8), Shard::WHOLE.local_index(8)),
            (9, 8, 8)
        );
    }

    #[test]
    fn a_list_is_assigned_to_shards_and_a_short_one_reused() {
        let assigned =
            |targets, list: &[u8]| Shard::all(targets).map(|shard| shard.assign(list)).collect::<Vec<_>>();
        assert_eq!(assigned(2, &[1, 2, 3]), [vec![1, 3], vec![2]]);
        assert_eq!(assigned(3, &[1, 2]), [vec![1], vec![2], vec![1]]);
        assert_eq!(assigned(1, &[4, 5]), [vec![4, 5]]);
    }
}
