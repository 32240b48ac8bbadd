//! The superblock: the layout of a volume, and the location of its last complete checkpoint.
//!
//! ```text
//!   24 hash seed u64         72 incarnation u32       104 journal batch u64 (the first to replay)
//!   32 unit_bytes u32        76 hash u8 (kind)        112 entry u64 (the last number assigned before it)
//!   36 journal_units u32     77 index parts log2 u8   120 namespace u32     124 clean u32
//!   40 area_units u64        78 bitmap parts log2 u16 128 value_bytes_max u32   132 checkpoint incarnation u32
//!   48 data_first u64        80 checkpoint id u64     140 zeros to 512
//!   56 data_units u64        88 checkpoint area u32 (0, 1; 2 = none yet)
//!                            92 journal unit u32 (in the ring)
//!                            96 checkpoint bytes u64
//! ```
//! The other bytes, and what keeps it safe, are [`crate::common::superblock`]'s.

use super::index::RECORD_UNITS_MAX;
use super::journal::IndexChange;
use crate::HashKind;
use crate::common::journal::batch_units_max;
use crate::common::record::{RecordFormat, record_bytes};
use crate::common::superblock::{
    COUNT_MAX, DeviceOfVolume, EngineNumber, SUPERBLOCK_AREA_BYTES, SUPERBLOCK_BYTES, Superblock,
    SuperblockError, SuperblockField, SuperblockHeader,
};
use octokv_base::KEY_BYTES_MAX;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The longest value of a volume of format 2, in bytes.
pub const VALUE_BYTES_MAX: u64 = 256 << 20;
/// Units before the journal.
pub const fn superblock_units(unit_bytes: u32) -> u64 {
    SUPERBLOCK_AREA_BYTES / unit_bytes as u64
}
/// The least capacity of the journal, in batches of the largest size.
pub const RING_BATCHES_MIN: u32 = 8;
/// The limit of the journal's units: beyond any real ring, and safe from overflow of a position and a batch.
pub const JOURNAL_UNITS_MAX: u32 = 1 << 31;

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
    /// Bytes per unit, the granularity of allocation: 512, 1024, 2048 or 4096.
    pub unit_bytes: u32,
    /// Units of each of the two journal copies.
    pub journal_units: u32,
    /// Units of each checkpoint area's copy.
    pub area_units: u64,
    /// The first unit of the record area.
    pub data_start_unit: u64,
    /// Units of the record area.
    pub data_units: u64,
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

/// The location of the last checkpoint, and the position at which replay begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its area, 0 or 1; `None` before the first checkpoint.
    pub area: Option<u8>,
    /// Its number.
    pub id: u64,
    /// The length of its images in bytes.
    pub bytes: u64,
    /// The unit of the ring at which the first batch to replay begins.
    pub journal_unit: u32,
    /// The number of that batch.
    pub batch: u64,
    /// The last entry number assigned before that batch.
    pub entry: u64,
    /// The opening that wrote it: replay ignores batches of earlier ones.
    pub incarnation: u32,
}

impl Checkpoint {
    /// The area of the next checkpoint.
    pub(super) fn next_area(&self) -> u8 {
        1 - self.area.unwrap_or(1)
    }
}

/// The bytes of a superblock on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SuperblockLayout {
    shared_front: [u8; 24],
    hash_seed: U64,
    unit_bytes: U32,
    journal_units: U32,
    area_units: U64,
    data_start_unit: U64,
    data_units: U64,
    shared_generation: [u8; 8],
    incarnation: U32,
    hash_kind: u8,
    index_partitions_log2: u8,
    bitmap_partitions_log2: U16,
    checkpoint_id: U64,
    checkpoint_area: U32,
    journal_unit: U32,
    checkpoint_bytes: U64,
    journal_batch: U64,
    journal_entry: U64,
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

/// The checkpoint area of a volume without a checkpoint.
const NO_CHECKPOINT_AREA: u32 = 2;

impl HashSuperblock {
    /// The units of the whole volume.
    pub fn units(&self) -> u64 {
        self.data_start_unit + self.data_units
    }

    /// The first unit of a copy (0, 1) of the journal.
    pub fn journal_start_unit(&self, copy: u64) -> u64 {
        superblock_units(self.unit_bytes) + copy * u64::from(self.journal_units)
    }

    /// The first unit of a copy (0, 1) of a checkpoint area (0, 1).
    pub fn area_start_unit(&self, area: u8, copy: u64) -> u64 {
        let areas = self.journal_start_unit(2);
        areas + (u64::from(area) * 2 + copy) * self.area_units
    }

    /// Whether the fields are consistent. A valid checksum does not imply valid fields.
    pub(super) fn is_consistent(&self) -> bool {
        matches!(self.unit_bytes, 512 | 1024 | 2048 | 4096)
            && self.area_units < 1 << 36
            && self.area_start_unit(0, 4) == self.data_start_unit
            && self.data_start_unit.checked_add(self.data_units).is_some_and(|end| end < 1 << 36)
            && self.index_partitions_log2 <= 20
            && self.bitmap_partitions_log2 <= 12
            && [self.generation, self.checkpoint.id, self.checkpoint.batch, self.checkpoint.entry]
                .iter()
                .all(|&count| count < COUNT_MAX)
            // Batches count from 1: 0 is "none".
            && self.checkpoint.batch > 0
            && self.incarnation < u32::MAX
            && self.journal_units >= RING_BATCHES_MIN * batch_units_max::<IndexChange>(self.unit_bytes)
            && self.journal_units < JOURNAL_UNITS_MAX
            && self.checkpoint.journal_unit < self.journal_units
            && self.checkpoint.bytes.div_ceil(u64::from(self.unit_bytes)) <= self.area_units
            && match self.format {
                RecordFormat::V1 => self.record_units_max() <= RECORD_UNITS_MAX,
                // Longer values are stored in pieces.
                RecordFormat::V2 => u64::from(self.value_bytes_max) <= VALUE_BYTES_MAX,
            }
    }

    /// Units of the longest record.
    fn record_units_max(&self) -> u64 {
        let bytes = record_bytes(KEY_BYTES_MAX, self.value_bytes_max as usize) as u64;
        bytes.div_ceil(u64::from(self.unit_bytes))
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
            unit_bytes: self.unit_bytes.into(),
            journal_units: self.journal_units.into(),
            area_units: self.area_units.into(),
            data_start_unit: self.data_start_unit.into(),
            data_units: self.data_units.into(),
            shared_generation: [0; 8],
            incarnation: self.incarnation.into(),
            hash_kind: self.hash as u8,
            index_partitions_log2: self.index_partitions_log2,
            bitmap_partitions_log2: u16::from(self.bitmap_partitions_log2).into(),
            checkpoint_id: self.checkpoint.id.into(),
            checkpoint_area: self.checkpoint.area.map_or(NO_CHECKPOINT_AREA, u32::from).into(),
            journal_unit: self.checkpoint.journal_unit.into(),
            checkpoint_bytes: self.checkpoint.bytes.into(),
            journal_batch: self.checkpoint.batch.into(),
            journal_entry: self.checkpoint.entry.into(),
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
        let unknown = |field, value| Err(SuperblockError::UnknownValue { field, value });
        let hash = match layout.hash_kind {
            0 => HashKind::Xxh3,
            1 => HashKind::Sha1,
            kind => return unknown(SuperblockField::HashKind, kind.into()),
        };
        let area = match layout.checkpoint_area.get() {
            area @ (0 | 1) => Some(area as u8),
            NO_CHECKPOINT_AREA => None,
            area => return unknown(SuperblockField::CheckpointArea, area),
        };
        let is_clean_shutdown = match layout.clean_shutdown.get() {
            flag @ (0 | 1) => flag == 1,
            flag => return unknown(SuperblockField::CleanShutdown, flag),
        };
        let Ok(bitmap_partitions_log2) = u8::try_from(layout.bitmap_partitions_log2.get()) else {
            return Err(SuperblockError::Inconsistent);
        };
        let superblock = HashSuperblock {
            format: if header.version == 1 { RecordFormat::V1 } else { RecordFormat::V2 },
            volume_id: header.volume_id,
            hash_seed: layout.hash_seed.get(),
            hash,
            unit_bytes: layout.unit_bytes.get(),
            journal_units: layout.journal_units.get(),
            area_units: layout.area_units.get(),
            data_start_unit: layout.data_start_unit.get(),
            data_units: layout.data_units.get(),
            index_partitions_log2: layout.index_partitions_log2,
            bitmap_partitions_log2,
            namespace: layout.namespace.get(),
            value_bytes_max: layout.value_bytes_max.get(),
            generation: header.generation,
            incarnation: layout.incarnation.get(),
            checkpoint: Checkpoint {
                area,
                id: layout.checkpoint_id.get(),
                bytes: layout.checkpoint_bytes.get(),
                journal_unit: layout.journal_unit.get(),
                batch: layout.journal_batch.get(),
                entry: layout.journal_entry.get(),
                incarnation: layout.checkpoint_incarnation.get(),
            },
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
            unit_bytes: 4096,
            journal_units: 64,
            area_units: 10,
            data_start_unit: 4 + 128 + 40,
            data_units: 1_000,
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
        let mut superblock = HashSuperblock { journal_units, data_start_unit, ..example() };
        superblock.checkpoint.journal_unit = journal_units - 1;
        let found = UncheckedSuperblock(&superblock.encode()).check::<HashSuperblock>();
        assert_eq!(found, Err(SuperblockError::Inconsistent));
    }

    #[test]
    fn the_last_value_of_each_field_is_consistent_and_the_next_is_not() {
        type Change = fn(&mut HashSuperblock, u64);
        let ring = |superblock: &mut HashSuperblock, units: u64| {
            superblock.journal_units = units as u32;
            superblock.data_start_unit = 4 + 2 * units + 40;
        };
        let limits: [(&str, u64, u64, Change); 12] = [
            ("records", (1 << 36) - 172 - 1, (1 << 36) - 172, |s, units| s.data_units = units),
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
