//! The superblock of the ordered engine: the layout of a volume, its last complete checkpoint, and the state that is in no version.
//!
//! ```text
//!   24 hash seed u64             120 namespace u32               144 image entry u64
//!   32 layout, 32 bytes          124 clean u32                   152 forgotten: below this version, u64
//!   72 incarnation u32           128 value_bytes_max u32         160 forgotten: up to this sequence number, u64
//!   76 inline_bytes_max u32      132 checkpoint incarnation u32  168 forgotten: at this time, u64
//!   80 checkpoint, 40 bytes      140 has versions u32            176 zeros to 512
//! ```
//! [`crate::common::volume_layout`] draws layout and checkpoint, which lie where the hash engine has them. The other bytes, and what
//! keeps it safe, are [`crate::common::superblock`]'s.

use super::journal::JournalChange;
use super::retention::ForgottenTombstones;
use crate::common::journal::JournalEntry;
use crate::common::record::record_bytes;
use crate::common::superblock::{
    COUNT_MAX, DeviceOfVolume, EngineNumber, SUPERBLOCK_BYTES, Superblock, SuperblockError, SuperblockField,
    SuperblockHeader, decode_flag,
};
use crate::common::volume_layout::{Checkpoint, CheckpointLayout, RegionsLayout, VolumeLayout};
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version};
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most bytes of a journal batch with its header, before rounding to units.
pub(super) const BATCH_BYTES_MAX: usize = JournalChange::BATCH_BYTES_MAX;
/// The longest value of any volume, in bytes.
pub const LSM_VALUE_BYTES_MAX: u64 = 256 << 20;
/// The limit of [`LsmSuperblock::inline_bytes_max`].
pub const INLINE_BYTES_LIMIT: u32 = 16 << 10;
const _: () = assert!(INLINE_BYTES_LIMIT as usize <= super::table::writer::INLINE_VALUE_BYTES_MAX);
/// The smallest data area, in bytes.
pub const DATA_AREA_BYTES_MIN: u64 = 4 << 20;
/// The record of the longest value takes at most this part of the data area.
const RECORDS_IN_DATA_MIN: u64 = 4;

/// The decoded superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LsmSuperblock {
    /// A random number, chosen at format: separates records, tables and batches of an earlier format from this volume.
    pub volume_id: u64,
    /// The seed of the hash function that orders keys on the ring.
    pub hash_seed: u64,
    /// The regions; the data area has tables and value segments.
    pub layout: VolumeLayout,
    /// The identifier of the namespace that the volume holds.
    pub namespace: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// Values of fewer bytes lie in the tree, the others in value segments; at most [`INLINE_BYTES_LIMIT`].
    pub inline_bytes_max: u32,
    /// The number of superblocks written since the format.
    pub generation: u64,
    /// The number of openings for writing since the format.
    pub incarnation: u32,
    /// The last complete checkpoint.
    pub checkpoint: Checkpoint,
    /// The last journal entry whose edit is in the checkpoint's image; 0 if there is none.
    pub image_entry: u64,
    /// The tombstones that the last `forget_below` ended.
    pub forgotten: ForgottenTombstones,
    /// Whether a write of this volume ever had a version.
    pub has_versions: bool,
    /// Whether the last use ended with a clean shutdown.
    pub is_clean_shutdown: bool,
}

/// The bytes of a superblock on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct LsmSuperblockLayout {
    shared_front: [u8; 24],
    hash_seed: U64,
    regions: RegionsLayout,
    shared_generation: [u8; 8],
    incarnation: U32,
    inline_bytes_max: U32,
    checkpoint: CheckpointLayout,
    namespace: U32,
    clean_shutdown: U32,
    value_bytes_max: U32,
    checkpoint_incarnation: U32,
    shared_device: [u8; 4],
    has_versions: U32,
    image_entry: U64,
    forgotten_below: U64,
    forgotten_sequence: U64,
    forgotten_time: U64,
    zeros: [u8; SUPERBLOCK_BYTES - 176],
}
const _: () = assert!(size_of::<LsmSuperblockLayout>() == SUPERBLOCK_BYTES);
const _: () = assert!(offset_of!(LsmSuperblockLayout, shared_generation) == 64);
const _: () = assert!(offset_of!(LsmSuperblockLayout, checkpoint) == 80);
const _: () = assert!(offset_of!(LsmSuperblockLayout, shared_device) == 136);
const _: () = assert!(offset_of!(LsmSuperblockLayout, zeros) == 176);

/// The longest value whose record is not too large a part of a data area, in bytes.
pub(super) fn value_bytes_limit(layout: &VolumeLayout) -> u64 {
    let record_bytes_max = layout.data_units / RECORDS_IN_DATA_MIN * u64::from(layout.unit_bytes);
    record_bytes_max.saturating_sub(record_bytes(KEY_BYTES_MAX, 0) as u64).min(LSM_VALUE_BYTES_MAX)
}

impl LsmSuperblock {
    /// Whether the fields are consistent. A valid checksum does not imply valid fields.
    pub(super) fn is_consistent(&self) -> bool {
        self.layout.is_consistent(BATCH_BYTES_MAX)
            && self.layout.data_units * u64::from(self.layout.unit_bytes) >= DATA_AREA_BYTES_MIN
            && self.checkpoint.is_consistent(&self.layout)
            && [self.generation, self.image_entry, self.forgotten.sequence]
                .iter()
                .all(|&count| count < COUNT_MAX)
            && self.incarnation < u32::MAX
            // Replay skips the edits up to this one.
            && (self.checkpoint.area.is_some() || self.image_entry == 0)
            && u64::from(self.value_bytes_max) <= value_bytes_limit(&self.layout)
            && self.inline_bytes_max <= INLINE_BYTES_LIMIT
    }
}

impl Superblock for LsmSuperblock {
    const ENGINE: EngineNumber = EngineNumber::LSM;
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
        let layout = LsmSuperblockLayout {
            shared_front: [0; 24],
            hash_seed: self.hash_seed.into(),
            regions: self.layout.into(),
            shared_generation: [0; 8],
            incarnation: self.incarnation.into(),
            inline_bytes_max: self.inline_bytes_max.into(),
            checkpoint: self.checkpoint.into(),
            namespace: self.namespace.into(),
            clean_shutdown: u32::from(self.is_clean_shutdown).into(),
            value_bytes_max: self.value_bytes_max.into(),
            checkpoint_incarnation: self.checkpoint.incarnation.into(),
            shared_device: [0; 4],
            has_versions: u32::from(self.has_versions).into(),
            image_entry: self.image_entry.into(),
            forgotten_below: self.forgotten.below.to_bits().into(),
            forgotten_sequence: self.forgotten.sequence.into(),
            forgotten_time: self.forgotten.time.0.into(),
            zeros: [0; SUPERBLOCK_BYTES - 176],
        };
        *bytes = zerocopy::transmute!(layout);
    }

    fn decode_fields(
        header: SuperblockHeader,
        bytes: &[u8; SUPERBLOCK_BYTES],
    ) -> Result<LsmSuperblock, SuperblockError> {
        if header.device != DeviceOfVolume::ONLY {
            return Err(SuperblockError::SeveralDevices(header.device));
        }
        let layout: &LsmSuperblockLayout = zerocopy::transmute_ref!(bytes);
        let superblock = LsmSuperblock {
            volume_id: header.volume_id,
            hash_seed: layout.hash_seed.get(),
            layout: layout.regions.decode(),
            namespace: layout.namespace.get(),
            value_bytes_max: layout.value_bytes_max.get(),
            inline_bytes_max: layout.inline_bytes_max.get(),
            generation: header.generation,
            incarnation: layout.incarnation.get(),
            checkpoint: layout.checkpoint.decode(layout.checkpoint_incarnation.get())?,
            image_entry: layout.image_entry.get(),
            forgotten: ForgottenTombstones {
                below: Version::from_bits(layout.forgotten_below.get()),
                sequence: layout.forgotten_sequence.get(),
                time: UnixTime(layout.forgotten_time.get()),
            },
            has_versions: decode_flag(SuperblockField::HasVersions, layout.has_versions.get())?,
            is_clean_shutdown: decode_flag(SuperblockField::CleanShutdown, layout.clean_shutdown.get())?,
        };
        superblock.is_consistent().then_some(superblock).ok_or(SuperblockError::Inconsistent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::superblock::UncheckedSuperblock;
    use crate::common::volume_layout::VOLUME_UNITS_MAX;
    use octokv_base::crc32c;

    /// A superblock with a distinct value in each field.
    fn example() -> LsmSuperblock {
        LsmSuperblock {
            volume_id: 0x0102_0304_0506_0708,
            hash_seed: 9,
            layout: VolumeLayout {
                unit_bytes: 4096,
                journal_units: 256,
                area_units: 64,
                data_start_unit: 4 + 512 + 256,
                data_units: 2_048,
            },
            namespace: 2,
            value_bytes_max: 1 << 20,
            inline_bytes_max: 3 << 8,
            generation: 5,
            incarnation: 6,
            checkpoint: Checkpoint {
                area: Some(1),
                id: 11,
                bytes: 40_000,
                journal_unit: 7,
                batch: 8,
                entry: 99,
                incarnation: 4,
            },
            image_entry: 120,
            forgotten: ForgottenTombstones {
                below: Version::from_bits(0x1112_1314_1516_1718),
                sequence: 77,
                time: UnixTime(1_700_000_000_000),
            },
            has_versions: true,
            is_clean_shutdown: false,
        }
    }

    fn check(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<LsmSuperblock, SuperblockError> {
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
    fn a_superblock_of_the_ordered_engine_gives_back_every_field() {
        let new = LsmSuperblock {
            checkpoint: Checkpoint::NONE,
            image_entry: 0,
            forgotten: ForgottenTombstones::NONE,
            ..example()
        };
        for (has_versions, is_clean_shutdown) in [(false, false), (false, true), (true, false), (true, true)]
        {
            for superblock in [example(), new] {
                let superblock = LsmSuperblock { has_versions, is_clean_shutdown, ..superblock };
                assert_eq!(check(&superblock.encode()), Ok(superblock));
            }
        }
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
        assert_eq!(check(&with_byte(12, 0)), Err(SuperblockError::Version { found: 0, known: 1 }));
        let error = SuperblockError::Engine { found: EngineNumber::HASH, wanted: EngineNumber::LSM };
        assert_eq!(check(&with_byte(14, 1)), Err(error));
        let device = DeviceOfVolume { index: 0, count: 2 };
        assert_eq!(check(&with_byte(138, 2)), Err(SuperblockError::SeveralDevices(device)));
    }

    #[test]
    fn unknown_field_values_are_refused_with_the_field_and_the_value() {
        let table = [
            (88, 3, SuperblockField::CheckpointArea, 3),
            (90, 1, SuperblockField::CheckpointArea, 0x1_0001),
            (124, 2, SuperblockField::CleanShutdown, 2),
            (140, 2, SuperblockField::HasVersions, 2),
            (143, 1, SuperblockField::HasVersions, 0x100_0001),
        ];
        for (at, byte, field, value) in table {
            assert_eq!(
                check(&with_byte(at, byte)),
                Err(SuperblockError::UnknownValue { field, value }),
                "byte {at}"
            );
        }
    }

    /// A ring of so many units, and the areas behind it.
    fn set_ring(superblock: &mut LsmSuperblock, units: u64) {
        superblock.layout.journal_units = units as u32;
        superblock.layout.data_start_unit = 4 + 2 * units + 256;
    }

    #[test]
    fn the_last_value_of_each_field_is_consistent_and_the_next_is_not() {
        type Change = fn(&mut LsmSuperblock, u64);
        let least_data: Change = |s, units| {
            s.value_bytes_max = 1_000;
            s.layout.data_units = units;
        };
        let longest_of_any: Change = |s, bytes| {
            s.layout.data_units = 1 << 20;
            s.value_bytes_max = bytes as u32;
        };
        let limits: [(&str, u64, u64, Change); 19] = [
            ("unit", 4096, 8192, |s, bytes| s.layout.unit_bytes = bytes as u32),
            ("data", VOLUME_UNITS_MAX - 772, VOLUME_UNITS_MAX - 771, |s, units| s.layout.data_units = units),
            ("least data", 1_024, 1_023, least_data),
            ("start of data", 772, 773, |s, unit| s.layout.data_start_unit = unit),
            ("shortest ring", 256, 255, set_ring),
            ("longest ring", (1 << 31) - 1, 1 << 31, set_ring),
            ("generation", COUNT_MAX - 1, COUNT_MAX, |s, count| s.generation = count),
            ("checkpoint", COUNT_MAX - 1, COUNT_MAX, |s, count| s.checkpoint.id = count),
            ("last batch", COUNT_MAX - 1, COUNT_MAX, |s, count| s.checkpoint.batch = count),
            ("entry", COUNT_MAX - 1, COUNT_MAX, |s, count| s.checkpoint.entry = count),
            ("image entry", COUNT_MAX - 1, COUNT_MAX, |s, count| s.image_entry = count),
            ("forgotten", COUNT_MAX - 1, COUNT_MAX, |s, count| s.forgotten.sequence = count),
            ("first batch", 1, 0, |s, batch| s.checkpoint.batch = batch),
            ("incarnation", u32::MAX as u64 - 1, u32::MAX as u64, |s, count| s.incarnation = count as u32),
            ("position", 255, 256, |s, unit| s.checkpoint.journal_unit = unit as u32),
            ("images", 64 * 4_096, 64 * 4_096 + 1, |s, bytes| s.checkpoint.bytes = bytes),
            ("inline values", 16_384, 16_385, |s, bytes| s.inline_bytes_max = bytes as u32),
            // The longest key and its header take 1,088 bytes.
            ("longest value", 512 * 4_096 - 1_088, 512 * 4_096 - 1_087, |s, bytes| {
                s.value_bytes_max = bytes as u32
            }),
            ("longest value of any volume", 256 << 20, (256 << 20) + 1, longest_of_any),
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
    fn a_volume_without_a_checkpoint_has_no_edit_in_its_image() {
        let with = |image_entry| {
            let checkpoint = Checkpoint { area: None, ..example().checkpoint };
            check(&LsmSuperblock { checkpoint, image_entry, ..example() }.encode())
        };
        assert!(with(0).is_ok());
        assert_eq!(with(1), Err(SuperblockError::Inconsistent));
    }

    #[test]
    fn the_layout_of_version_1_is_fixed() {
        let bytes = example().encode();
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([12, 14].map(|at| u16::from_le_bytes([bytes[at], bytes[at + 1]])), [1, 2]);
        assert_eq!([16, 24].map(u64_at), [0x0102_0304_0506_0708, 9]);
        assert_eq!(([32, 36].map(u32_at), [40, 48, 56].map(u64_at)), ([4096, 256], [64, 772, 2_048]));
        assert_eq!((u64_at(64), [72, 76].map(u32_at)), (5, [6, 768]));
        assert_eq!((u64_at(80), [88, 92].map(u32_at)), (11, [1, 7]));
        assert_eq!([96, 104, 112].map(u64_at), [40_000, 8, 99]);
        assert_eq!([120, 124, 128, 132, 136, 140].map(u32_at), [2, 0, 1 << 20, 4, 0, 1]);
        assert_eq!([144, 152, 160, 168].map(u64_at), [120, 0x1112_1314_1516_1718, 77, 1_700_000_000_000]);
        assert_eq!(bytes[176..], [0; 336]);
    }

    #[test]
    fn no_bytes_panic() {
        let mut random = octokv_base::Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes = example().encode();
            for _ in 0..1 + random.below(8) {
                bytes[12 + random.below(200) as usize] = random.next_u64() as u8;
            }
            let crc = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            if let Ok(superblock) = check(&bytes) {
                assert_eq!(check(&superblock.encode()), Ok(superblock));
            }
        }
    }
}
