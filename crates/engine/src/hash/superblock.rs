//! The superblock: the layout of a volume, and the location of its last complete checkpoint.
//!
//! ```text
//!   24 hash seed u64            76 hash u8 (kind)              120 namespace u32
//!   32 layout, 32 bytes         77 index parts log2 u8         124 clean u32
//!   72 incarnation u32          78 bitmap parts log2 u16       128 value_bytes_max u32
//!                               80 checkpoint, 40 bytes        132 checkpoint incarnation u32
//!                                                              140 zeros to 512
//! ```
//! [`crate::common::volume_layout`] draws layout and checkpoint. The other bytes, and what keeps it safe, are
//! [`crate::common::superblock`]'s.

use super::index::RECORD_UNITS_MAX;
use super::journal::IndexChange;
use crate::HashKind;
use crate::common::journal::JournalEntry;
use crate::common::record::{RecordFormat, record_bytes};
use crate::common::superblock::{
    COUNT_MAX, DeviceOfVolume, EngineNumber, SUPERBLOCK_BYTES, Superblock, SuperblockError, SuperblockField,
    SuperblockHeader, decode_flag,
};
use crate::common::volume_layout::{Checkpoint, CheckpointLayout, RegionsLayout, VolumeLayout};
use octokv_base::KEY_BYTES_MAX;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The longest value of a volume of format 2, in bytes.
pub const VALUE_BYTES_MAX: u64 = 256 << 20;

/// The decoded superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashSuperblock {
    /// The version of the format.
    pub format: RecordFormat,
    /// A random number, chosen at format: separates records and batches of an earlier format from this volume.
    pub volume_id: u64,
    /// The seed of the hash function.
    pub hash_seed: u64,
    /// The hash function.
    pub hash: HashKind,
    /// The regions; the data area has the records.
    pub layout: VolumeLayout,
    /// log2 of the number of index partitions, at most 20.
    pub index_partitions_log2: u8,
    /// log2 of the number of bitmap partitions, at most 12.
    pub bitmap_partitions_log2: u8,
    /// The identifier of the namespace that the volume holds.
    pub namespace: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// The number of superblocks written since the format.
    pub generation: u64,
    /// The number of openings for writing since the format.
    pub incarnation: u32,
    /// The last complete checkpoint.
    pub checkpoint: Checkpoint,
    /// Whether the last use ended with a clean shutdown.
    pub is_clean_shutdown: bool,
}

/// The bytes of a superblock on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SuperblockLayout {
    shared_front: [u8; 24],
    hash_seed: U64,
    regions: RegionsLayout,
    shared_generation: [u8; 8],
    incarnation: U32,
    hash_kind: u8,
    index_partitions_log2: u8,
    bitmap_partitions_log2: U16,
    checkpoint: CheckpointLayout,
    namespace: U32,
    clean_shutdown: U32,
    value_bytes_max: U32,
    checkpoint_incarnation: U32,
    shared_device: [u8; 4],
    zeros: [u8; SUPERBLOCK_BYTES - 140],
}
const _: () = assert!(size_of::<SuperblockLayout>() == SUPERBLOCK_BYTES);
const _: () = assert!(offset_of!(SuperblockLayout, shared_generation) == 64);
const _: () = assert!(offset_of!(SuperblockLayout, hash_kind) == 76);
const _: () = assert!(offset_of!(SuperblockLayout, shared_device) == 136);

impl HashSuperblock {
    /// Whether the fields are consistent. A valid checksum does not imply valid fields.
    pub(super) fn is_consistent(&self) -> bool {
        self.layout.is_consistent(IndexChange::BATCH_BYTES_MAX)
            && self.checkpoint.is_consistent(&self.layout)
            && self.index_partitions_log2 <= 20
            && self.bitmap_partitions_log2 <= 12
            && self.generation < COUNT_MAX
            && self.incarnation < u32::MAX
            && match self.format {
                RecordFormat::V1 => self.record_units_max() <= RECORD_UNITS_MAX,
                // Longer values are stored in pieces.
                RecordFormat::V2 => u64::from(self.value_bytes_max) <= VALUE_BYTES_MAX,
            }
    }

    /// Units of the longest record.
    fn record_units_max(&self) -> u64 {
        let bytes = record_bytes(KEY_BYTES_MAX, self.value_bytes_max as usize) as u64;
        bytes.div_ceil(u64::from(self.layout.unit_bytes))
    }
}

impl Superblock for HashSuperblock {
    const ENGINE: EngineNumber = EngineNumber::HASH;
    const VERSIONS: RangeInclusive<u16> = 1..=2;

    fn header(&self) -> SuperblockHeader {
        SuperblockHeader {
            version: match self.format {
                RecordFormat::V1 => 1,
                RecordFormat::V2 => 2,
            },
            engine: Self::ENGINE,
            volume_id: self.volume_id,
            generation: self.generation,
            device: DeviceOfVolume::ONLY,
        }
    }

    fn encode_fields(&self, bytes: &mut [u8; SUPERBLOCK_BYTES]) {
        let layout = SuperblockLayout {
            shared_front: [0; 24],
            hash_seed: self.hash_seed.into(),
            regions: self.layout.into(),
            shared_generation: [0; 8],
            incarnation: self.incarnation.into(),
            hash_kind: self.hash as u8,
            index_partitions_log2: self.index_partitions_log2,
            bitmap_partitions_log2: u16::from(self.bitmap_partitions_log2).into(),
            checkpoint: self.checkpoint.into(),
            namespace: self.namespace.into(),
            clean_shutdown: u32::from(self.is_clean_shutdown).into(),
            value_bytes_max: self.value_bytes_max.into(),
            checkpoint_incarnation: self.checkpoint.incarnation.into(),
            shared_device: [0; 4],
            zeros: [0; SUPERBLOCK_BYTES - 140],
        };
        *bytes = zerocopy::transmute!(layout);
    }

    fn decode_fields(
        header: SuperblockHeader,
        bytes: &[u8; SUPERBLOCK_BYTES],
    ) -> Result<HashSuperblock, SuperblockError> {
        if header.device != DeviceOfVolume::ONLY {
            return Err(SuperblockError::SeveralDevices(header.device));
        }
        let layout: &SuperblockLayout = zerocopy::transmute_ref!(bytes);
        let hash = match layout.hash_kind {
            0 => HashKind::Xxh3,
            1 => HashKind::Sha1,
            kind => {
                return Err(SuperblockError::UnknownValue {
                    field: SuperblockField::HashKind,
                    value: kind.into(),
                });
            }
        };
        let checkpoint = layout.checkpoint.decode(layout.checkpoint_incarnation.get())?;
        let is_clean_shutdown = decode_flag(SuperblockField::CleanShutdown, layout.clean_shutdown.get())?;
        let Ok(bitmap_partitions_log2) = u8::try_from(layout.bitmap_partitions_log2.get()) else {
            return Err(SuperblockError::Inconsistent);
        };
        let superblock = HashSuperblock {
            format: if header.version == 1 { RecordFormat::V1 } else { RecordFormat::V2 },
            volume_id: header.volume_id,
            hash_seed: layout.hash_seed.get(),
            hash,
            layout: layout.regions.decode(),
            index_partitions_log2: layout.index_partitions_log2,
            bitmap_partitions_log2,
            namespace: layout.namespace.get(),
            value_bytes_max: layout.value_bytes_max.get(),
            generation: header.generation,
            incarnation: layout.incarnation.get(),
            checkpoint,
            is_clean_shutdown,
        };
        superblock.is_consistent().then_some(superblock).ok_or(SuperblockError::Inconsistent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::superblock::UncheckedSuperblock;
    use octokv_base::crc32c;

    /// A superblock with a distinct value in each field.
    pub(crate) fn example() -> HashSuperblock {
        HashSuperblock {
            format: RecordFormat::V1,
            volume_id: 0x0102_0304_0506_0708,
            hash_seed: 9,
            hash: HashKind::Sha1,
            layout: VolumeLayout {
                unit_bytes: 4096,
                journal_units: 64,
                area_units: 10,
                data_start_unit: 4 + 128 + 40,
                data_units: 1_000,
            },
            index_partitions_log2: 4,
            bitmap_partitions_log2: 3,
            namespace: 1,
            value_bytes_max: 2 << 20,
            generation: 5,
            incarnation: 6,
            checkpoint: Checkpoint {
                area: Some(1),
                id: 2,
                bytes: 40_000,
                journal_unit: 7,
                batch: 8,
                entry: 99,
                incarnation: 5,
            },
            is_clean_shutdown: true,
        }
    }

    #[test]
    fn a_superblock_gives_back_every_field() {
        for format in [RecordFormat::V1, RecordFormat::V2] {
            let superblock = HashSuperblock { format, ..example() };
            assert_eq!(UncheckedSuperblock(&superblock.encode()).check::<HashSuperblock>(), Ok(superblock));
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            let mut bytes = example().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = UncheckedSuperblock(&bytes).check::<HashSuperblock>();
            assert!(
                matches!(found, Err(SuperblockError::Damaged | SuperblockError::Foreign)),
                "bit {bit}: {found:?}"
            );
        }
    }

    #[test]
    fn blank_foreign_and_other_versions_give_distinct_errors() {
        assert_eq!(UncheckedSuperblock(&[0; 512]).check::<HashSuperblock>(), Err(SuperblockError::Blank));
        assert_eq!(
            UncheckedSuperblock(&[0x55; 512]).check::<HashSuperblock>(),
            Err(SuperblockError::Foreign)
        );
        let mut later = example().encode();
        later[12] = 3;
        let crc = crc32c(&later[12..]);
        later[8..12].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(
            UncheckedSuperblock(&later).check::<HashSuperblock>(),
            Err(SuperblockError::Version { found: 3, known: 2 })
        );
    }

    /// The example with one byte changed under a valid checksum.
    fn with_byte(at: usize, byte: u8) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = example().encode();
        bytes[at] = byte;
        let crc = crc32c(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn unknown_field_values_are_refused_with_the_field_and_the_value() {
        let table = [
            (76, 2, SuperblockField::HashKind, 2),
            (76, 255, SuperblockField::HashKind, 255),
            (88, 3, SuperblockField::CheckpointArea, 3),
            (90, 1, SuperblockField::CheckpointArea, 0x1_0001),
            (124, 2, SuperblockField::CleanShutdown, 2),
        ];
        for (at, byte, field, value) in table {
            let found = UncheckedSuperblock(&with_byte(at, byte)).check::<HashSuperblock>();
            assert_eq!(found, Err(SuperblockError::UnknownValue { field, value }), "byte {at}");
        }
        // Both bytes of the bitmap's partitions count.
        assert_eq!(
            UncheckedSuperblock(&with_byte(79, 1)).check::<HashSuperblock>(),
            Err(SuperblockError::Inconsistent)
        );
        assert_eq!(
            UncheckedSuperblock(&with_byte(78, 13)).check::<HashSuperblock>(),
            Err(SuperblockError::Inconsistent)
        );
        assert!(
            UncheckedSuperblock(&with_byte(88, 2))
                .check::<HashSuperblock>()
                .unwrap()
                .checkpoint
                .area
                .is_none()
        );
    }

    #[test]
    fn a_ring_whose_positions_could_overflow_is_inconsistent() {
        let journal_units = u32::MAX;
        let data_start_unit = 4 + 2 * u64::from(journal_units) + 40;
        let layout = VolumeLayout { journal_units, data_start_unit, ..example().layout };
        let mut superblock = HashSuperblock { layout, ..example() };
        superblock.checkpoint.journal_unit = journal_units - 1;
        let found = UncheckedSuperblock(&superblock.encode()).check::<HashSuperblock>();
        assert_eq!(found, Err(SuperblockError::Inconsistent));
    }

    #[test]
    fn the_last_value_of_each_field_is_consistent_and_the_next_is_not() {
        type Change = fn(&mut HashSuperblock, u64);
        let ring = |superblock: &mut HashSuperblock, units: u64| {
            superblock.layout.journal_units = units as u32;
            superblock.layout.data_start_unit = 4 + 2 * units + 40;
        };
        let limits: [(&str, u64, u64, Change); 12] = [
            ("records", (1 << 36) - 172 - 1, (1 << 36) - 172, |s, units| s.layout.data_units = units),
            ("partitions of the index", 20, 21, |s, log2| s.index_partitions_log2 = log2 as u8),
            ("partitions of the bitmap", 12, 13, |s, log2| s.bitmap_partitions_log2 = log2 as u8),
            ("generation", COUNT_MAX - 1, COUNT_MAX, |s, count| s.generation = count),
            ("entry", COUNT_MAX - 1, COUNT_MAX, |s, count| s.checkpoint.entry = count),
            ("first batch", 1, 0, |s, batch| s.checkpoint.batch = batch),
            // The longest key and its header take 1,088 bytes.
            ("longest value", 8_191 * 4_096 - 1_088, 8_191 * 4_096 - 1_087, |s, bytes| {
                s.value_bytes_max = bytes as u32
            }),
            ("incarnation", u32::MAX as u64 - 1, u32::MAX as u64, |s, count| s.incarnation = count as u32),
            ("shortest ring", 64, 63, ring),
            ("longest ring", (1 << 31) - 1, 1 << 31, ring),
            ("position", 63, 64, |s, unit| s.checkpoint.journal_unit = unit as u32),
            ("images", 40_960, 40_961, |s, bytes| s.checkpoint.bytes = bytes),
        ];
        for (field, last, next, change) in limits {
            let [last, next] = [last, next].map(|value| {
                let mut superblock = example();
                change(&mut superblock, value);
                UncheckedSuperblock(&superblock.encode()).check::<HashSuperblock>()
            });
            assert!(last.is_ok(), "{field}: {last:?}");
            assert_eq!(next, Err(SuperblockError::Inconsistent), "{field}");
        }
    }

    #[test]
    fn the_layout_of_version_1_is_fixed() {
        let bytes = example().encode();
        assert_eq!(bytes[16..24], 0x0102_0304_0506_0708_u64.to_le_bytes());
        assert_eq!(
            (bytes[32..36].to_vec(), bytes[36], bytes[76], bytes[77], bytes[78]),
            (4096_u32.to_le_bytes().to_vec(), 64, 1, 4, 3)
        );
        assert_eq!(
            (bytes[88], bytes[92], bytes[104], bytes[112], bytes[124], bytes[132]),
            (1, 7, 8, 99, 1, 5)
        );
        assert_eq!(bytes[136..], [0; 376]);
    }
}
