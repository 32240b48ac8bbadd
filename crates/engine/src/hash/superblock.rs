//! The superblock: what a device is, and where its index was last written whole.
//!
//! ```text
//!   byte 0  generation even    4096  generation odd    8192  copy of the first    12288  copy of the second
//!
//!    0 magic "OCTOKV\0\0"    48 data_first u64         88 checkpoint area u32 (0, 1; 2 = none yet)
//!    8 CRC-32C u32           56 data_units u64         92 journal position u32 (unit in the ring)
//!   12 version u16           64 generation u64         96 checkpoint bytes u64
//!   14 engine u16            72 incarnation u32       104 journal batch u64 (the first to replay)
//!   16 volume u64            76 hash u8 (kind)        112 entry u64 (the last that the journal gave out)
//!   24 hash seed u64         77 segments log2 u8      120 namespace u32     124 clean u32
//!   32 unit_bytes u32        78 partitions log2 u16   128 value_bytes_max u32   132 checkpoint incarnation u32   136 zeros to 512
//!   36 journal_units u32     80 checkpoint id u64
//!   40 area_units u64
//! ```
//! The checksum covers bytes 12 to 512. Generations alternate between two places, and each is
//! written twice, the copy after the first is durable: a torn write leaves the other generation, a rotten
//! block leaves the copy.

use super::journal::batch_units_max;
use octokv_base::crc32c;

/// The bytes that matter; the rest of the unit is zero.
pub const SUPERBLOCK_BYTES: usize = 512;
/// The distance between superblocks, in bytes.
pub const SUPERBLOCK_STRIDE_BYTES: u64 = 4096;
/// How many superblocks there are: two generations, two copies.
pub const SUPERBLOCKS: u64 = 4;

/// Units in front of the journal.
pub const fn superblock_units(unit_bytes: u32) -> u64 {
    SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES / unit_bytes as u64
}
/// The format that this code writes, and the only one that it reads.
pub const VERSION: u16 = 1;
/// The hash engine's number.
pub const ENGINE_HASH: u16 = 1;
/// The journal holds at least so many of the largest batches.
pub const RING_BATCHES_MIN: u32 = 8;
/// Numbers that count up stay below this: nobody writes so many batches, and adding to them cannot overflow.
pub const COUNT_MAX: u64 = 1 << 62;
const MAGIC: [u8; 8] = *b"OCTOKV\0\0";

/// How a key becomes its 128-bit hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashKind {
    /// XXH3-128 with the volume's seed: fast.
    Xxh3,
    /// The first 128 bits of SHA-1, as in the OctoKV paper.
    Sha1,
}

/// A superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random at format: records and batches of an earlier format are no part of this volume.
    pub volume_id: u64,
    /// The seed of the hash.
    pub hash_seed: u64,
    /// Which hash.
    pub hash: HashKind,
    /// Bytes per unit of allocation.
    pub unit_bytes: u32,
    /// Units of each of the two journal copies.
    pub journal_units: u32,
    /// Units of each checkpoint area's copy.
    pub area_units: u64,
    /// The first unit of records.
    pub data_start_unit: u64,
    /// Units of records.
    pub data_units: u64,
    /// log2 of the index's partitions.
    pub index_partitions_log2: u8,
    /// log2 of the bitmap's partitions.
    pub bitmap_partitions_log2: u8,
    /// The namespace that the volume holds.
    pub namespace: u32,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// Counts superblocks written.
    pub generation: u64,
    /// Counts openings for writing.
    pub incarnation: u32,
    /// The last whole checkpoint.
    pub checkpoint: Checkpoint,
    /// Whether the volume was closed in order.
    pub is_clean_shutdown: bool,
}

/// Where the last checkpoint is and where the journal goes on from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Which area: 0 or 1; `None` before the first.
    pub area: Option<u8>,
    /// Its number.
    pub id: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The unit of the ring where the first batch to replay begins.
    pub journal_unit: u32,
    /// The number of that batch.
    pub batch: u64,
    /// The last entry number given out before it.
    pub entry: u64,
    /// The opening that wrote it: a batch of an earlier one is no part of what follows it.
    pub incarnation: u32,
}

/// Why a device is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockError {
    /// All zeros: never formatted.
    Blank,
    /// No superblock is there: another format.
    Foreign,
    /// A volume of octokv in another version of the format.
    Version(u16),
    /// A volume of another engine.
    Engine(u16),
    /// Every copy of the superblock is damaged.
    Damaged,
}

fn write_field(bytes: &mut [u8; SUPERBLOCK_BYTES], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

impl Superblock {
    /// As written.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut b = [0; SUPERBLOCK_BYTES];
        write_field(&mut b, 0, &MAGIC);
        write_field(&mut b, 12, &VERSION.to_le_bytes());
        write_field(&mut b, 14, &ENGINE_HASH.to_le_bytes());
        write_field(&mut b, 16, &self.volume_id.to_le_bytes());
        write_field(&mut b, 24, &self.hash_seed.to_le_bytes());
        write_field(&mut b, 32, &self.unit_bytes.to_le_bytes());
        write_field(&mut b, 36, &self.journal_units.to_le_bytes());
        write_field(&mut b, 40, &self.area_units.to_le_bytes());
        write_field(&mut b, 48, &self.data_start_unit.to_le_bytes());
        write_field(&mut b, 56, &self.data_units.to_le_bytes());
        write_field(&mut b, 64, &self.generation.to_le_bytes());
        write_field(&mut b, 72, &self.incarnation.to_le_bytes());
        write_field(&mut b, 76, &[matches!(self.hash, HashKind::Sha1) as u8, self.index_partitions_log2]);
        write_field(&mut b, 78, &u16::from(self.bitmap_partitions_log2).to_le_bytes());
        write_field(&mut b, 80, &self.checkpoint.id.to_le_bytes());
        write_field(&mut b, 88, &u32::from(self.checkpoint.area.unwrap_or(2)).to_le_bytes());
        write_field(&mut b, 92, &self.checkpoint.journal_unit.to_le_bytes());
        write_field(&mut b, 96, &self.checkpoint.bytes.to_le_bytes());
        write_field(&mut b, 104, &self.checkpoint.batch.to_le_bytes());
        write_field(&mut b, 112, &self.checkpoint.entry.to_le_bytes());
        write_field(&mut b, 120, &self.namespace.to_le_bytes());
        write_field(&mut b, 124, &u32::from(self.is_clean_shutdown).to_le_bytes());
        write_field(&mut b, 128, &self.value_bytes_max.to_le_bytes());
        write_field(&mut b, 132, &self.checkpoint.incarnation.to_le_bytes());
        let crc = crc32c(&b[12..]);
        write_field(&mut b, 8, &crc.to_le_bytes());
        b
    }

    /// The units that the whole volume spans.
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
}

/// Bytes read from a device, which may be anything.
pub struct UncheckedSuperblock<'a>(pub &'a [u8; SUPERBLOCK_BYTES]);

impl UncheckedSuperblock<'_> {
    /// The superblock, once magic, checksum, version and engine hold and its fields agree.
    pub fn check(self) -> Result<Superblock, SuperblockError> {
        let b = self.0;
        let u16_at = |at: usize| u16::from_le_bytes([b[at], b[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(b[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(b[at..at + 8].try_into().expect("eight bytes"));
        if b.iter().all(|&byte| byte == 0) {
            return Err(SuperblockError::Blank);
        }
        if b[..8] != MAGIC {
            return Err(SuperblockError::Foreign);
        }
        if crc32c(&b[12..]) != u32_at(8) {
            return Err(SuperblockError::Damaged);
        }
        if u16_at(12) != VERSION {
            return Err(SuperblockError::Version(u16_at(12)));
        }
        if u16_at(14) != ENGINE_HASH {
            return Err(SuperblockError::Engine(u16_at(14)));
        }
        let area = u32_at(88);
        let checkpoint = Checkpoint {
            area: (area < 2).then_some(area as u8),
            id: u64_at(80),
            bytes: u64_at(96),
            journal_unit: u32_at(92),
            batch: u64_at(104),
            entry: u64_at(112),
            incarnation: u32_at(132),
        };
        let superblock = Superblock {
            volume_id: u64_at(16),
            hash_seed: u64_at(24),
            hash: if b[76] == 1 { HashKind::Sha1 } else { HashKind::Xxh3 },
            unit_bytes: u32_at(32),
            journal_units: u32_at(36),
            area_units: u64_at(40),
            data_start_unit: u64_at(48),
            data_units: u64_at(56),
            index_partitions_log2: b[77],
            bitmap_partitions_log2: b[78],
            namespace: u32_at(120),
            value_bytes_max: u32_at(128),
            generation: u64_at(64),
            incarnation: u32_at(72),
            checkpoint,
            is_clean_shutdown: u32_at(124) == 1,
        };
        superblock.is_consistent().then_some(superblock).ok_or(SuperblockError::Damaged)
    }
}

impl Superblock {
    /// Whether the fields agree with each other: a checksum vouches for bytes, not for sense.
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
            && self.incarnation < u32::MAX
            && self.journal_units >= RING_BATCHES_MIN * batch_units_max(self.unit_bytes)
            && self.checkpoint.journal_unit < self.journal_units
            && self.checkpoint.bytes.div_ceil(u64::from(self.unit_bytes)) <= self.area_units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A superblock with every field set to something of its own.
    pub(crate) fn example() -> Superblock {
        Superblock {
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
        assert_eq!(UncheckedSuperblock(&example().encode()).check(), Ok(example()));
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            let mut bytes = example().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = UncheckedSuperblock(&bytes).check();
            assert!(
                matches!(found, Err(SuperblockError::Damaged | SuperblockError::Foreign)),
                "bit {bit}: {found:?}"
            );
        }
    }

    #[test]
    fn blank_foreign_and_other_versions_give_distinct_errors() {
        assert_eq!(UncheckedSuperblock(&[0; 512]).check(), Err(SuperblockError::Blank));
        assert_eq!(UncheckedSuperblock(&[0x55; 512]).check(), Err(SuperblockError::Foreign));
        let mut later = example().encode();
        later[12] = 2;
        let crc = crc32c(&later[12..]);
        later[8..12].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(UncheckedSuperblock(&later).check(), Err(SuperblockError::Version(2)));
    }
}
