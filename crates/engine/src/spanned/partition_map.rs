//! Which device of a spanned volume has which keys: 256 partitions of the positions on the ring, each on one device.
//!
//! In: the sizes of devices. Out: a device for each position, by its lowest byte: engines divide the ring by the highest bits, and what a device has has to be uniform in these.
//! Invariant: as many partitions as the device's part of all bytes, rounded.

use octokv_base::{RingPosition, RingRange};

/// The partitions of a spanned volume.
pub const SPAN_PARTITIONS: usize = 256;
/// The most devices of a spanned volume: each has at least 4 partitions if they are equal.
pub const SPAN_DEVICES_MAX: usize = 64;

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
