//! A set of the partitions of a spanned volume: a bit each, as superblocks have it.

/// The partitions of a spanned volume.
pub const SPAN_PARTITIONS: usize = 256;

/// See the module header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionSet([u8; SPAN_PARTITIONS / 8]);

impl PartitionSet {
    /// The set of these bits, the lowest of the first byte for partition 0.
    pub fn from_bytes(bytes: [u8; SPAN_PARTITIONS / 8]) -> PartitionSet {
        PartitionSet(bytes)
    }

    /// A bit for each partition.
    pub fn as_bytes(&self) -> &[u8; SPAN_PARTITIONS / 8] {
        &self.0
    }

    /// Whether it has a partition.
    #[inline]
    pub fn has(&self, partition: usize) -> bool {
        self.0[partition / 8] >> (partition % 8) & 1 != 0
    }

    /// Adds a partition.
    pub fn insert(&mut self, partition: usize) {
        self.0[partition / 8] |= 1 << (partition % 8);
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; SPAN_PARTITIONS / 8]
    }

    /// The number of partitions.
    pub fn count(&self) -> usize {
        self.0.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// Those of either.
    pub fn with(&self, other: &PartitionSet) -> PartitionSet {
        PartitionSet(std::array::from_fn(|at| self.0[at] | other.0[at]))
    }

    /// Those that the other lacks.
    pub fn without(&self, other: &PartitionSet) -> PartitionSet {
        PartitionSet(std::array::from_fn(|at| self.0[at] & !other.0[at]))
    }
}

impl FromIterator<usize> for PartitionSet {
    fn from_iter<I: IntoIterator<Item = usize>>(partitions: I) -> PartitionSet {
        let mut set = PartitionSet::default();
        partitions.into_iter().for_each(|partition| set.insert(partition));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_what_was_inserted() {
        let set: PartitionSet = [0, 9, 255].into_iter().collect();
        assert_eq!((set.count(), set.as_bytes()[0], set.as_bytes()[1], set.as_bytes()[31]), (3, 1, 2, 128));
        assert!(set.has(9) && !set.has(8) && !set.is_empty());
        let other: PartitionSet = [9, 10].into_iter().collect();
        assert_eq!((set.with(&other).count(), set.without(&other).count()), (4, 2));
        assert!(set.without(&set).is_empty() && PartitionSet::from_bytes(*set.as_bytes()) == set);
    }
}
