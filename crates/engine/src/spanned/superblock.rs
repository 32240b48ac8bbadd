//! The superblock of a device of a spanned volume, in front of the volume that lies on it.
//!
//! ```text
//!    16 volume u64 (the same on all devices)    136 device u16, devices u16
//!    24 engine of the volumes on the devices u16    32 hash seed u64    144 device of each partition [u8; 256]
//!    72 partitions of which keys may be left, a bit each [u8; 32]
//!   400 replacements of each device [u8; 64]
//!   464 partitions with swapped keys, a bit each [u8; 32]    496 devices with them, a bit each u64    504 swap region, units of 64 KiB u32
//!   508 number of the map u32
//! ```
//! Version 2 has replacements: what does not know them would serve a device that was replaced. Version 3 has a swap region: what does not know it
//! would serve older values of swapped keys. Version 4 has several maps, of which the latest counts: what does not know it would serve keys from where
//! they were. Tested below.

use super::partition_map::{PartitionMap, SPAN_DEVICES_MAX};
use super::partition_set::{PartitionSet, SPAN_PARTITIONS};
use super::swap_notes::SwapNotes;
use super::swap_region::SWAP_UNIT_BYTES;
use crate::EngineKind;
use crate::common::superblock::{
    DeviceOfVolume, EngineNumber, SUPERBLOCK_BYTES, Superblock, SuperblockError, SuperblockField,
    SuperblockHeader,
};
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a device of a spanned volume says of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanSuperblock {
    /// The number of the spanned volume.
    pub volume_id: u64,
    /// The place of the device in it.
    pub device: DeviceOfVolume,
    /// The number of superblocks written to the device since the format.
    pub generation: u64,
    /// The engine of the volumes on the devices.
    pub engine: EngineKind,
    /// The seed of positions on the ring.
    pub hash_seed: u64,
    /// Which device has which keys.
    pub map: PartitionMap,
    /// How often the device of each index was replaced by one without its keys, as far as this device was told.
    pub replacements: [u8; SPAN_DEVICES_MAX],
    /// The bytes of the swap region of each device; 0 for none.
    pub swap_bytes: u64,
    /// Where keys of this device may have newer values.
    pub swaps: SwapNotes,
    /// The number of the map, as far as this device was told: the map with the highest number counts.
    pub map_number: u32,
    /// Partitions of other devices of which this one may have keys, which count for nothing: a move of them has begun, or they were moved. Those of its own are at a cutover:
    /// their destination may have a later map.
    pub left_over: PartitionSet,
}

/// The version with replacements.
const VERSION_REPLACED: u16 = 2;
/// The version with swap regions.
const VERSION_SWAPS: u16 = 3;
/// The version with several maps.
const VERSION_MAPS: u16 = 4;

/// The fields of the span, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SpanLayout {
    common: [u8; 24],
    engine: U16,
    zero: [u8; 6],
    hash_seed: U64,
    zero_too: [u8; 24],
    generation: [u8; 8],
    left_over: [u8; SPAN_PARTITIONS / 8],
    unused: [u8; 32],
    device: [u8; 4],
    zero_at_last: [u8; 4],
    map: [u8; SPAN_PARTITIONS],
    replacements: [u8; SPAN_DEVICES_MAX],
    swap_partitions: [u8; SPAN_PARTITIONS / 8],
    swap_guests: U64,
    swap_units: U32,
    map_number: U32,
}
const _: () = assert!(size_of::<SpanLayout>() == SUPERBLOCK_BYTES);
const _: () = assert!(offset_of!(SpanLayout, generation) == 64);
const _: () = assert!(offset_of!(SpanLayout, left_over) == 72);
const _: () = assert!(offset_of!(SpanLayout, device) == 136);
const _: () = assert!(offset_of!(SpanLayout, replacements) == 400);
const _: () = assert!(offset_of!(SpanLayout, swap_partitions) == 464);

impl Superblock for SpanSuperblock {
    const ENGINE: EngineNumber = EngineNumber::SPAN;
    const VERSIONS: RangeInclusive<u16> = 1..=VERSION_MAPS;

    fn header(&self) -> SuperblockHeader {
        let SpanSuperblock { volume_id, device, generation, .. } = *self;
        let version = match self.replacements.iter().any(|&count| count > 0) {
            _ if self.map_number > 0 || !self.left_over.is_empty() => VERSION_MAPS,
            _ if self.swap_bytes > 0 => VERSION_SWAPS,
            true => VERSION_REPLACED,
            false => 1,
        };
        SuperblockHeader { version, engine: Self::ENGINE, volume_id, generation, device }
    }

    fn encode_fields(&self, bytes: &mut [u8; SUPERBLOCK_BYTES]) {
        let layout = SpanLayout::mut_from_bytes(bytes).expect("as long as a superblock");
        layout.engine = self.engine.number().0.into();
        layout.hash_seed = self.hash_seed.into();
        layout.map = *self.map.as_bytes();
        layout.replacements = self.replacements;
        layout.swap_partitions = self.swaps.partitions;
        layout.swap_guests = self.swaps.guests.into();
        layout.left_over = *self.left_over.as_bytes();
        layout.map_number = self.map_number.into();
        layout.swap_units = ((self.swap_bytes / SWAP_UNIT_BYTES) as u32).into();
    }

    fn decode_fields(
        header: SuperblockHeader,
        bytes: &[u8; SUPERBLOCK_BYTES],
    ) -> Result<SpanSuperblock, SuperblockError> {
        let layout = SpanLayout::ref_from_bytes(bytes).expect("as long as a superblock");
        let SuperblockHeader { volume_id, generation, device, .. } = header;
        let number = layout.engine.get();
        let engine = EngineKind::from_number(EngineNumber(number)).ok_or(SuperblockError::UnknownValue {
            field: SuperblockField::EngineOfDevices,
            value: number.into(),
        })?;
        // One device alone would be a volume within itself.
        let map = PartitionMap::from_bytes(layout.map, device.count).filter(|_| device.count > 1);
        let map = map.ok_or(SuperblockError::Inconsistent)?;
        // Earlier versions have zeros there.
        let (hash_seed, replacements) = (layout.hash_seed.get(), layout.replacements);
        let swap_bytes = u64::from(layout.swap_units.get()) * SWAP_UNIT_BYTES;
        let swaps = SwapNotes { partitions: layout.swap_partitions, guests: layout.swap_guests.get() };
        Ok(SpanSuperblock {
            volume_id,
            device,
            generation,
            engine,
            hash_seed,
            map,
            replacements,
            swap_bytes,
            swaps,
            map_number: layout.map_number.get(),
            left_over: PartitionSet::from_bytes(layout.left_over),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::superblock::UncheckedSuperblock;
    use octokv_base::crc32c;

    fn example() -> SpanSuperblock {
        SpanSuperblock {
            volume_id: 7,
            device: DeviceOfVolume { index: 2, count: 3 },
            generation: 4,
            engine: EngineKind::Log,
            hash_seed: 9,
            map: PartitionMap::spread(&[5, 6, 7]),
            replacements: [0; SPAN_DEVICES_MAX],
            swap_bytes: 0,
            swaps: SwapNotes::default(),
            map_number: 0,
            left_over: PartitionSet::default(),
        }
    }

    #[test]
    fn a_superblock_is_read_as_it_was_written() {
        for engine in EngineKind::ALL {
            let superblock = SpanSuperblock { engine, ..example() };
            assert_eq!(UncheckedSuperblock(&superblock.encode()).check(), Ok(superblock));
        }
        let mut replaced = example();
        replaced.replacements[1] = 3;
        assert_eq!(UncheckedSuperblock(&replaced.encode()).check(), Ok(replaced));
        let mut swaps = SwapNotes::default();
        swaps.add(255, 63);
        let swapped = SpanSuperblock { swap_bytes: 5 << 20, swaps, ..replaced };
        assert_eq!(UncheckedSuperblock(&swapped.encode()).check(), Ok(swapped));
        let moved = SpanSuperblock { map_number: 1 << 20, ..example() };
        let moving = SpanSuperblock { left_over: [0, 255].into_iter().collect(), ..example() };
        for superblock in [moved, moving] {
            assert_eq!(UncheckedSuperblock(&superblock.encode()).check(), Ok(superblock));
        }
        let version = |superblock: SpanSuperblock| superblock.header().version;
        let versions = [example(), replaced, swapped, moved, moving].map(version);
        assert_eq!(versions, [1, 2, 3, 4, 4]);
    }

    #[test]
    fn values_that_cannot_be_are_refused_under_a_valid_checksum() {
        let changed = |at: usize, byte: u8| {
            let mut bytes = example().encode();
            bytes[at] = byte;
            let crc = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            UncheckedSuperblock(&bytes).check::<SpanSuperblock>().map(|_| ())
        };
        assert_eq!(changed(511, 0), Ok(()));
        let field = SuperblockField::EngineOfDevices;
        assert_eq!(changed(24, 4), Err(SuperblockError::UnknownValue { field, value: 4 }));
        assert_eq!(changed(144, 3), Err(SuperblockError::Inconsistent));
        assert_eq!(changed(12, 5), Err(SuperblockError::Version { found: 5, known: 4 }));
        let alone =
            SpanSuperblock { device: DeviceOfVolume::ONLY, map: PartitionMap::spread(&[1]), ..example() };
        let checked = UncheckedSuperblock(&alone.encode()).check::<SpanSuperblock>();
        assert_eq!(checked, Err(SuperblockError::Inconsistent), "it would be a volume within itself");
    }
}
