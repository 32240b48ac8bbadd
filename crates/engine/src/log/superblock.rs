//! The superblock of the log engine: the layout of a volume, its last complete checkpoint, and the state that is in no log.
//!
//! ```text
//!   24 hash seed u64              62 log2 of granule u8       96 checkpoint: bytes u64
//!   32 unit_bytes u32             63 zero u8                 104 checkpoint: stores u32
//!   36 chunk_units u32            72 incarnation u32         108 next partition u32
//!   40 area_units u64             76 namespace u32           112 forgotten below this version u64
//!   48 chunks_start_unit u64      80 checkpoint: id u64      120 value_bytes_max u32
//!   56 chunks u32                 88 checkpoint: area u32    124 clean u32
//!   60 stores at format u16       92 checkpoint: incarnation 128 zero u64; 140 zeros to 512
//! ```
//! Area 2 is none. The other bytes, and what keeps it safe, are [`crate::common::superblock`]'s; the layout is [`super::log_layout`]'s.
//! Integers are little-endian.

use super::log_layout::LogLayout;
use crate::common::superblock::{
    COUNT_MAX, DeviceOfVolume, EngineNumber, SUPERBLOCK_BYTES, Superblock, SuperblockError, SuperblockField,
    SuperblockHeader, decode_flag,
};
use octokv_base::Version;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The checkpoint area of a volume without a checkpoint.
const NO_CHECKPOINT_AREA: u32 = 2;

/// The location of the last checkpoint. Where replay of each store begins is in its images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogCheckpoint {
    /// Its area, 0 or 1; `None` before the first checkpoint.
    pub area: Option<u8>,
    /// Its number.
    pub id: u64,
    /// The opening that wrote it: replay ignores images of earlier ones.
    pub incarnation: u32,
    /// The length of its images in bytes.
    pub bytes: u64,
    /// The stores in it; 0 before the first checkpoint.
    pub stores: u32,
}

impl LogCheckpoint {
    /// That of a new volume.
    pub const NONE: LogCheckpoint = LogCheckpoint { area: None, id: 0, incarnation: 0, bytes: 0, stores: 0 };

    /// The area of the next checkpoint.
    pub fn next_area(&self) -> u8 {
        1 - self.area.unwrap_or(1)
    }

    /// Whether the fields are consistent with a layout that is.
    fn is_consistent(&self, layout: &LogLayout) -> bool {
        let is_possible = match self.area {
            Some(_) => self.stores > 0 && self.stores <= layout.chunks,
            None => *self == LogCheckpoint::NONE,
        };
        is_possible
            && self.id < COUNT_MAX
            && self.bytes.div_ceil(u64::from(layout.unit_bytes)) <= layout.area_units
    }
}

/// The decoded superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSuperblock {
    /// A random number, chosen at format: every checksum in the logs is seeded with it.
    pub volume_id: u64,
    /// The seed of the hash function that orders keys on the ring.
    pub hash_seed: u64,
    /// The regions.
    pub layout: LogLayout,
    /// The identifier of the namespace that the volume holds.
    pub namespace: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// The number of superblocks written since the format.
    pub generation: u64,
    /// The number of openings for writing since the format.
    pub incarnation: u32,
    /// The last complete checkpoint.
    pub checkpoint: LogCheckpoint,
    /// The identifier of the next partition; identifiers are not used twice.
    pub next_partition: u32,
    /// Tombstones of lower versions are as absent keys.
    pub forgotten_below: Version,
    /// Whether the last use ended with a clean shutdown.
    pub is_clean_shutdown: bool,
}

/// The bytes of a superblock on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct LogSuperblockLayout {
    shared_front: [u8; 24],
    hash_seed: U64,
    unit_bytes: U32,
    chunk_units: U32,
    area_units: U64,
    chunks_start_unit: U64,
    chunks: U32,
    stores: U16,
    granule_log2: u8,
    zero: u8,
    shared_generation: [u8; 8],
    incarnation: U32,
    namespace: U32,
    checkpoint_id: U64,
    checkpoint_area: U32,
    checkpoint_incarnation: U32,
    checkpoint_bytes: U64,
    checkpoint_stores: U32,
    next_partition: U32,
    forgotten_below: U64,
    value_bytes_max: U32,
    clean_shutdown: U32,
    zero_too: U64,
    shared_device: [u8; 4],
    zeros: [u8; SUPERBLOCK_BYTES - 140],
}
const _: () = assert!(size_of::<LogSuperblockLayout>() == SUPERBLOCK_BYTES);
const _: () = assert!(offset_of!(LogSuperblockLayout, shared_generation) == 64);
const _: () = assert!(offset_of!(LogSuperblockLayout, checkpoint_id) == 80);
const _: () = assert!(offset_of!(LogSuperblockLayout, shared_device) == 136);

impl LogSuperblock {
    /// Whether the fields are consistent. A valid checksum does not imply valid fields.
    pub fn is_consistent(&self) -> bool {
        self.layout.is_consistent()
            && self.checkpoint.is_consistent(&self.layout)
            && self.generation < COUNT_MAX
            && self.incarnation < u32::MAX
            && self.next_partition >= self.layout.stores.into()
            && u64::from(self.value_bytes_max) <= self.layout.value_bytes_limit()
    }
}

impl Superblock for LogSuperblock {
    const ENGINE: EngineNumber = EngineNumber::LOG;
    const VERSIONS: RangeInclusive<u16> = 1..=1;

    fn header(&self) -> SuperblockHeader {
        SuperblockHeader {
            version: 1,
            engine: Self::ENGINE,
            volume_id: self.volume_id,
            generation: self.generation,
            device: DeviceOfVolume::ONLY,
        }
    }

    fn encode_fields(&self, bytes: &mut [u8; SUPERBLOCK_BYTES]) {
        let layout = LogSuperblockLayout {
            shared_front: [0; 24],
            hash_seed: self.hash_seed.into(),
            unit_bytes: self.layout.unit_bytes.into(),
            chunk_units: self.layout.chunk_units.into(),
            area_units: self.layout.area_units.into(),
            chunks_start_unit: self.layout.chunks_start_unit.into(),
            chunks: self.layout.chunks.into(),
            stores: self.layout.stores.into(),
            granule_log2: self.layout.granule_log2,
            zero: 0,
            shared_generation: [0; 8],
            incarnation: self.incarnation.into(),
            namespace: self.namespace.into(),
            checkpoint_id: self.checkpoint.id.into(),
            checkpoint_area: self.checkpoint.area.map_or(NO_CHECKPOINT_AREA, u32::from).into(),
            checkpoint_incarnation: self.checkpoint.incarnation.into(),
            checkpoint_bytes: self.checkpoint.bytes.into(),
            checkpoint_stores: self.checkpoint.stores.into(),
            next_partition: self.next_partition.into(),
            forgotten_below: self.forgotten_below.to_bits().into(),
            value_bytes_max: self.value_bytes_max.into(),
            clean_shutdown: u32::from(self.is_clean_shutdown).into(),
            zero_too: U64::ZERO,
            shared_device: [0; 4],
            zeros: [0; SUPERBLOCK_BYTES - 140],
        };
        *bytes = zerocopy::transmute!(layout);
    }

    fn decode_fields(
        header: SuperblockHeader,
        bytes: &[u8; SUPERBLOCK_BYTES],
    ) -> Result<LogSuperblock, SuperblockError> {
        if header.device != DeviceOfVolume::ONLY {
            return Err(SuperblockError::SeveralDevices(header.device));
        }
        let layout: &LogSuperblockLayout = zerocopy::transmute_ref!(bytes);
        let area = match layout.checkpoint_area.get() {
            area @ (0 | 1) => Some(area as u8),
            NO_CHECKPOINT_AREA => None,
            value => {
                return Err(SuperblockError::UnknownValue { field: SuperblockField::CheckpointArea, value });
            }
        };
        let superblock = LogSuperblock {
            volume_id: header.volume_id,
            hash_seed: layout.hash_seed.get(),
            layout: LogLayout {
                unit_bytes: layout.unit_bytes.get(),
                chunk_units: layout.chunk_units.get(),
                area_units: layout.area_units.get(),
                chunks_start_unit: layout.chunks_start_unit.get(),
                chunks: layout.chunks.get(),
                stores: layout.stores.get(),
                granule_log2: layout.granule_log2,
            },
            namespace: layout.namespace.get(),
            value_bytes_max: layout.value_bytes_max.get(),
            generation: header.generation,
            incarnation: layout.incarnation.get(),
            checkpoint: LogCheckpoint {
                area,
                id: layout.checkpoint_id.get(),
                incarnation: layout.checkpoint_incarnation.get(),
                bytes: layout.checkpoint_bytes.get(),
                stores: layout.checkpoint_stores.get(),
            },
            next_partition: layout.next_partition.get(),
            forgotten_below: Version::from_bits(layout.forgotten_below.get()),
            is_clean_shutdown: decode_flag(SuperblockField::CleanShutdown, layout.clean_shutdown.get())?,
        };
        superblock.is_consistent().then_some(superblock).ok_or(SuperblockError::Inconsistent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::superblock::UncheckedSuperblock;
    use octokv_base::{Prng, crc32c};

    /// A superblock with a distinct value in each field.
    fn example() -> LogSuperblock {
        LogSuperblock {
            volume_id: 0x0102_0304_0506_0708,
            hash_seed: 9,
            layout: LogLayout {
                unit_bytes: 512,
                chunk_units: 128,
                area_units: 160,
                chunks_start_unit: 32 + 640,
                chunks: 300,
                stores: 4,
                granule_log2: 5,
            },
            namespace: 2,
            value_bytes_max: 1 << 20,
            generation: 5,
            incarnation: 6,
            checkpoint: LogCheckpoint { area: Some(1), id: 11, incarnation: 3, bytes: 40_000, stores: 7 },
            next_partition: 8,
            forgotten_below: Version::from_bits(0x1112_1314_1516_1718),
            is_clean_shutdown: true,
        }
    }

    fn check(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<LogSuperblock, SuperblockError> {
        UncheckedSuperblock(bytes).check()
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
    fn a_superblock_of_the_log_engine_gives_back_every_field() {
        let new = LogSuperblock { checkpoint: LogCheckpoint::NONE, ..example() };
        for superblock in [example(), new] {
            for is_clean_shutdown in [false, true] {
                let superblock = LogSuperblock { is_clean_shutdown, ..superblock };
                assert_eq!(check(&superblock.encode()), Ok(superblock));
            }
        }
        assert_eq!((new.checkpoint.next_area(), example().checkpoint.next_area()), (0, 0));
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            let mut bytes = example().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = check(&bytes);
            assert!(
                matches!(found, Err(SuperblockError::Damaged | SuperblockError::Foreign)),
                "bit {bit}: {found:?}"
            );
        }
    }

    #[test]
    fn other_engines_versions_and_devices_are_refused() {
        assert_eq!(check(&[0; 512]), Err(SuperblockError::Blank));
        assert_eq!(check(&with_byte(12, 2)), Err(SuperblockError::Version { found: 2, known: 1 }));
        let error = SuperblockError::Engine { found: EngineNumber::LSM, wanted: EngineNumber::LOG };
        assert_eq!(check(&with_byte(14, 2)), Err(error));
        let device = DeviceOfVolume { index: 0, count: 2 };
        assert_eq!(check(&with_byte(138, 2)), Err(SuperblockError::SeveralDevices(device)));
    }

    #[test]
    fn unknown_field_values_are_refused_with_the_field_and_the_value() {
        let table = [
            (88, 3, SuperblockField::CheckpointArea, 3),
            (91, 1, SuperblockField::CheckpointArea, 0x100_0001),
            (124, 2, SuperblockField::CleanShutdown, 2),
        ];
        for (at, byte, field, value) in table {
            assert_eq!(
                check(&with_byte(at, byte)),
                Err(SuperblockError::UnknownValue { field, value }),
                "byte {at}"
            );
        }
    }

    #[test]
    fn the_last_value_of_each_field_is_consistent_and_the_next_is_not() {
        type Change = fn(&mut LogSuperblock, u64);
        let limits: [(&str, u64, u64, Change); 9] = [
            ("generation", COUNT_MAX - 1, COUNT_MAX, |s, count| s.generation = count),
            ("checkpoint", COUNT_MAX - 1, COUNT_MAX, |s, count| s.checkpoint.id = count),
            ("incarnation", u32::MAX as u64 - 1, u32::MAX as u64, |s, count| s.incarnation = count as u32),
            ("images", 160 * 512, 160 * 512 + 1, |s, bytes| s.checkpoint.bytes = bytes),
            ("a store", 1, 0, |s, stores| s.checkpoint.stores = stores as u32),
            ("stores", 300, 301, |s, stores| s.checkpoint.stores = stores as u32),
            ("partition", 4, 3, |s, id| s.next_partition = id as u32),
            // A chunk has at least a 64th of it.
            ("longest value", 300 << 13, (300 << 13) + 1, |s, bytes| s.value_bytes_max = bytes as u32),
            ("layout", 300, 63, |s, chunks| s.layout.chunks = chunks as u32),
        ];
        for (field, last, next, change) in limits {
            let [last, next] = [last, next].map(|value| {
                let mut superblock = example();
                change(&mut superblock, value);
                check(&superblock.encode())
            });
            assert!(last.is_ok(), "{field}: {last:?}");
            assert_eq!(next, Err(SuperblockError::Inconsistent), "{field}");
        }
    }

    #[test]
    fn a_volume_without_a_checkpoint_has_nothing_in_it() {
        let checkpoint = LogCheckpoint { area: None, ..example().checkpoint };
        let bytes = LogSuperblock { checkpoint, ..example() }.encode();
        assert_eq!(check(&bytes), Err(SuperblockError::Inconsistent));
    }

    #[test]
    fn the_layout_of_version_1_is_fixed() {
        let bytes = example().encode();
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([12, 14].map(|at| u16::from_le_bytes([bytes[at], bytes[at + 1]])), [1, 3]);
        assert_eq!([16, 24].map(u64_at), [0x0102_0304_0506_0708, 9]);
        assert_eq!(([32, 36, 56].map(u32_at), [40, 48].map(u64_at)), ([512, 128, 300], [160, 672]));
        assert_eq!((bytes[60..64].to_vec(), u64_at(64)), (vec![4, 0, 5, 0], 5));
        assert_eq!([72, 76, 88, 92].map(u32_at), [6, 2, 1, 3]);
        assert_eq!([80, 96, 112].map(u64_at), [11, 40_000, 0x1112_1314_1516_1718]);
        assert_eq!([104, 108, 120, 124].map(u32_at), [7, 8, 1 << 20, 1]);
        assert_eq!(bytes[128..], [0; 384]);
    }

    #[test]
    fn no_bytes_panic() {
        let mut random = Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes = example().encode();
            for _ in 0..1 + random.below(8) {
                bytes[12 + random.below(130) as usize] = random.next_u64() as u8;
            }
            let crc = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            if let Ok(superblock) = check(&bytes) {
                assert_eq!(check(&superblock.encode()), Ok(superblock));
            }
        }
    }
}
