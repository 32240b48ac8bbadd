//! What the superblock of a device says of swapped keys: which of its partitions may have keys in the regions of which other devices.
//!
//! Invariant: a partition and a device are noted before a key of the partition is stored in the region of the device. Tested in `superblock.rs` and `tests/spanned_swap.rs`.

use super::partition_map::SPAN_DEVICES_MAX;
use super::partition_set::SPAN_PARTITIONS;

/// The partitions of a home device that have swapped keys, and the devices of the regions, as its superblock has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapNotes {
    /// A bit for each partition.
    pub partitions: [u8; SPAN_PARTITIONS / 8],
    /// A bit for each device.
    pub guests: u64,
}
const _: () = assert!(SPAN_DEVICES_MAX <= u64::BITS as usize);

impl SwapNotes {
    /// Whether a key of the partition may be in the region of `guest`.
    pub fn has(&self, partition: usize, guest: usize) -> bool {
        self.partitions[partition / 8] >> (partition % 8) & 1 != 0 && self.guests >> guest & 1 != 0
    }

    /// Those without the region of a device.
    pub fn without(mut self, guest: usize) -> SwapNotes {
        self.guests &= !(1 << guest);
        self
    }

    /// Adds a partition and a device.
    pub fn add(&mut self, partition: usize, guest: usize) {
        self.partitions[partition / 8] |= 1 << (partition % 8);
        self.guests |= 1 << guest;
    }
}
