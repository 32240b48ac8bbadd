//! The partition map: assigns each of 256 hash partitions to a device, in proportion to the sizes of the devices.
//!
//! In: the sizes of devices. Out: a device for each position, by its lowest byte: engines divide the ring by the highest bits, and what a device has has to be uniform in these.
//! Invariant: as many partitions as the device's part of all bytes, rounded.

use super::partition_set::{PartitionSet, SPAN_PARTITIONS};
use octokv_base::{RingPosition, RingRange};

/// The most devices of a spanned volume: each has at least 4 partitions if they are equal.
pub const SPAN_DEVICES_MAX: usize = 64;

/// Partitions that move together, at most: a move reads all of their device once, and begins anew after a crash.
const MOVED_AT_ONCE: usize = 64;

/// The move of partitions from a device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedMove {
    /// The device that has them.
    pub from: usize,
    /// The device that is to have them.
    pub to: usize,
    /// The partitions.
    pub partitions: PartitionSet,
}

/// The device of each partition, by its index in the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionMap([u8; SPAN_PARTITIONS]);

impl PartitionMap {
    /// Partitions on devices of these sizes in bytes, as evenly as their sizes allow.
    ///
    /// # Panics
    /// Without a device, with more than [`SPAN_DEVICES_MAX`], or with one of no bytes.
    pub fn spread(device_bytes: &[u64]) -> PartitionMap {
        assert!((1..=SPAN_DEVICES_MAX).contains(&device_bytes.len()), "{} devices", device_bytes.len());
        assert!(device_bytes.iter().all(|&bytes| bytes > 0), "a device of no bytes");
        let mut counts = vec![0_u128; device_bytes.len()];
        PartitionMap(std::array::from_fn(|_| {
            // The device on which one more is the smallest part of its bytes.
            let is_less = |a: usize, b: usize| {
                (counts[a] + 1) * u128::from(device_bytes[b]) < (counts[b] + 1) * u128::from(device_bytes[a])
            };
            let next =
                (1..counts.len()).fold(0, |best, device| if is_less(device, best) { device } else { best });
            counts[next] += 1;
            next as u8
        }))
    }

    /// The map of these bytes, a device for each partition; `None` unless all are among `devices` devices.
    pub fn from_bytes(bytes: [u8; SPAN_PARTITIONS], devices: u16) -> Option<PartitionMap> {
        bytes.iter().all(|&device| u16::from(device) < devices).then_some(PartitionMap(bytes))
    }

    /// The partitions of a device.
    pub fn partitions_of(&self, device: usize) -> PartitionSet {
        (0..SPAN_PARTITIONS).filter(|&partition| usize::from(self.0[partition]) == device).collect()
    }

    /// This map after a move.
    pub fn moved(&self, planned: &PlannedMove) -> PartitionMap {
        let device = |partition| match planned.partitions.has(partition) {
            true => planned.to as u8,
            false => self.0[partition],
        };
        PartitionMap(std::array::from_fn(device))
    }

    /// The next move towards [`PartitionMap::spread`] on devices of these sizes: of the device that has the most too many to that which lacks the most.
    /// Partitions of `fixed` stay, and so does a device that has no others. `None` if no device lacks more than one, or none has a partition to give.
    ///
    /// # Panics
    /// As [`PartitionMap::spread`].
    pub fn next_move(&self, device_bytes: &[u64], fixed: &PartitionSet) -> Option<PlannedMove> {
        let spread = PartitionMap::spread(device_bytes);
        let too_many = |device: &usize| {
            let count = |map: &PartitionMap| map.partitions_of(*device).count() as i64;
            count(self) - count(&spread)
        };
        let to = (0..device_bytes.len()).min_by_key(too_many)?;
        let has_free = |device: &usize| !self.partitions_of(*device).without(fixed).is_empty();
        let from = (0..device_bytes.len()).filter(has_free).max_by_key(too_many)?;
        let count = (-too_many(&to)).min(too_many(&from));
        if -too_many(&to) <= 1 || count <= 0 {
            return None;
        }
        let of_from = self.partitions_of(from).without(fixed);
        let moved = (0..SPAN_PARTITIONS).filter(|&partition| of_from.has(partition));
        let partitions: PartitionSet = moved.take(MOVED_AT_ONCE.min(count as usize)).collect();
        (!partitions.is_empty()).then_some(PlannedMove { from, to, partitions })
    }

    /// A byte for each partition.
    pub fn as_bytes(&self) -> &[u8; SPAN_PARTITIONS] {
        &self.0
    }

    /// The partition of a position.
    #[inline]
    pub fn partition_of(&self, position: RingPosition) -> usize {
        position.0 as usize % SPAN_PARTITIONS
    }

    /// The device of the keys at a position.
    #[inline]
    pub fn device_of(&self, position: RingPosition) -> usize {
        self.0[self.partition_of(position)].into()
    }

    /// Whether a device may have keys of a range.
    pub fn has_keys_of(&self, device: usize, range: RingRange) -> bool {
        let positions = (range.last().0 - range.first().0).min(SPAN_PARTITIONS as u128 - 1);
        (0..=positions).any(|offset| self.device_of(RingPosition(range.first().0 + offset)) == device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(map: &PartitionMap, devices: usize) -> Vec<usize> {
        (0..devices).map(|device| map.0.iter().filter(|&&of| usize::from(of) == device).count()).collect()
    }

    #[test]
    fn equal_devices_take_turns() {
        let map = PartitionMap::spread(&[7 << 30; 4]);
        assert_eq!(map.0[..6], [0, 1, 2, 3, 0, 1]);
        assert_eq!(counts(&map, 4), [64; 4]);
        assert_eq!(counts(&PartitionMap::spread(&[1; 3]), 3), [86, 85, 85]);
        assert_eq!(counts(&PartitionMap::spread(&[1; 64]), 64), [4; 64]);
    }

    #[test]
    fn a_device_has_its_part_of_the_bytes() {
        assert_eq!(counts(&PartitionMap::spread(&[100, 300]), 2), [64, 192]);
        assert_eq!(counts(&PartitionMap::spread(&[1 << 40, 1 << 40, 2 << 40]), 3), [64, 64, 128]);
        let map = PartitionMap::spread(&[300, 100]);
        assert!(map.0.windows(4).all(|four| four.contains(&0) && four.contains(&1)), "{map:?}");
    }

    #[test]
    fn moves_end_with_each_device_at_its_part_and_none_moves_twice() {
        for (before, after) in [
            (vec![7_u64; 3], vec![7; 4]),
            (vec![7, 7], vec![7, 7, 14]),
            (vec![5, 5], vec![5, 5, 5, 5]),
            (vec![5, 5, 5], vec![5, 50, 5]),
        ] {
            let mut map = PartitionMap::spread(&before);
            let (mut moved, mut moves) = (PartitionSet::default(), 0);
            while let Some(planned) = map.next_move(&after, &PartitionSet::default()) {
                assert!(planned.partitions.count() <= MOVED_AT_ONCE && planned.from != planned.to);
                assert!(planned.partitions.without(&map.partitions_of(planned.from)).is_empty());
                assert_eq!(moved.without(&planned.partitions), moved, "{planned:?} moves some again");
                moved = moved.with(&planned.partitions);
                map = map.moved(&planned);
                moves += 1;
            }
            let spread = counts(&PartitionMap::spread(&after), after.len());
            let close = |(have, want): (&usize, &usize)| have.abs_diff(*want) <= 1;
            let have = counts(&map, after.len());
            assert!(moves > 0 && have.iter().zip(&spread).all(close), "{have:?} of {spread:?}");
        }
        for bytes in [vec![1; 3], vec![3, 1, 2], vec![1; 64]] {
            assert_eq!(PartitionMap::spread(&bytes).next_move(&bytes, &PartitionSet::default()), None);
        }
        let map = PartitionMap::spread(&[1; 2]);
        let fixed = map.partitions_of(0).with(&[1].into_iter().collect());
        let planned = map.next_move(&[1; 3], &map.partitions_of(0));
        assert!(planned.is_none_or(|planned| planned.from == 1), "{planned:?}");
        // The device with most too many has none to give, the other one has.
        let map = PartitionMap::spread(&[1; 3]);
        let planned = map.next_move(&[1; 4], &map.partitions_of(0)).expect("others have too many");
        assert!(planned.from != 0 && planned.to == 3, "{planned:?}");
        assert_eq!(map.next_move(&[1; 4], &PartitionSet::from_bytes([255; 32])), None);
        let map = PartitionMap::spread(&[1; 2]);
        let planned = map.next_move(&[1, 2, 4], &fixed);
        assert!(planned.is_none_or(|planned| !planned.partitions.has(1)), "{planned:?}");
    }

    #[test]
    fn positions_and_ranges_have_the_devices_of_their_partitions() {
        let map = PartitionMap::spread(&[1; 2]);
        let position = |rest: u128, last: u8| RingPosition(rest << 8 | u128::from(last));
        for (last, device) in [(0, 0), (1, 1), (254, 0), (255, 1)] {
            for rest in [0, 77, (1 << 120) - 1] {
                assert_eq!(map.device_of(position(rest, last)), device, "{last} {rest}");
            }
        }
        let one = RingRange::new(position(4, 4), position(4, 4)).unwrap();
        assert!(map.has_keys_of(0, one) && !map.has_keys_of(1, one));
        let two = RingRange::new(position(4, 255), position(5, 0)).unwrap();
        assert!([0, 1].iter().all(|&device| map.has_keys_of(device, two)));
        assert!(map.has_keys_of(1, RingRange::FULL));
        let end = RingRange::new(RingPosition(u128::MAX), RingPosition::MAX).unwrap();
        assert!(map.has_keys_of(1, end) && !map.has_keys_of(0, end));
    }

    #[test]
    fn a_device_that_there_is_not_is_none_of_the_map() {
        let mut bytes = *PartitionMap::spread(&[1; 2]).as_bytes();
        assert_eq!(PartitionMap::from_bytes(bytes, 2), Some(PartitionMap(bytes)));
        bytes[255] = 2;
        assert_eq!(PartitionMap::from_bytes(bytes, 2), None);
    }
}
