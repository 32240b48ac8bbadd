//! Where something lies in a log: its chunk, by number on the device and by index in the log, and the seed of the checksums there.
//!
//! ```text
//!   device   chunk 0 │ chunk 1 │ chunk 2 │ chunk 3 │ …        ChunkNumber: a place, used again and again
//!   a log      index 7 ▲  (free)  index 5 ▲  index 6 ▲        ChunkIndex: the order in the log, never used twice
//!
//!   seed = low 32 bits of mix(mix(volume ^ mix(partition · 4 + kind)) + index · 2^32 + place in the chunk)      mix: SplitMix64's
//! ```
//! Invariant: a block that was written for an earlier use of a chunk, for another store, at another place of the chunk or for another volume has
//! another seed, so its checksum fails.
//! Tested below.

use octokv_base::prng::mix64;

/// The logs of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogKind {
    /// The key log: segment images.
    Keys,
    /// The value log: value records, and the directory of each chunk.
    Values,
}

/// The place of a chunk on the device: counted from the first chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkNumber(pub u32);

/// The place of a chunk in its log: rises by one from chunk to chunk, and is never used twice in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIndex(pub u32);

/// A place in a log that begins a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPlace {
    /// The chunk, in the log.
    pub index: ChunkIndex,
    /// The same chunk, on the device.
    pub chunk: ChunkNumber,
    /// The unit, counted from the start of the chunk.
    pub unit: u32,
}

/// What a checksum covers. The discriminants are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumKind {
    /// A bucket of a segment image, at a unit of a chunk.
    Bucket = 0,
    /// The header of a value record, at a granule of a chunk.
    Record = 1,
    /// The directory of a value chunk, at 0.
    Directory = 2,
}

/// What a checksum of a store's chunk is combined with, by exclusive or. `at` counts units or granules from the start of the chunk.
pub fn checksum_seed(volume_id: u64, partition: u32, kind: ChecksumKind, index: ChunkIndex, at: u32) -> u32 {
    let of_store = mix64(volume_id ^ mix64(u64::from(partition) * 4 + kind as u64));
    mix64(of_store.wrapping_add(u64::from(index.0) << 32 | u64::from(at))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_place_changes_the_seed() {
        let seeds = [
            checksum_seed(7, 1, ChecksumKind::Bucket, ChunkIndex(3), 5),
            checksum_seed(8, 1, ChecksumKind::Bucket, ChunkIndex(3), 5),
            checksum_seed(7, 2, ChecksumKind::Bucket, ChunkIndex(3), 5),
            checksum_seed(7, 1, ChecksumKind::Record, ChunkIndex(3), 5),
            checksum_seed(7, 1, ChecksumKind::Directory, ChunkIndex(3), 5),
            checksum_seed(7, 1, ChecksumKind::Bucket, ChunkIndex(4), 5),
            checksum_seed(7, 1, ChecksumKind::Bucket, ChunkIndex(3), 6),
            checksum_seed(7, 1, ChecksumKind::Bucket, ChunkIndex(5), 3),
        ];
        for (index, seed) in seeds.iter().enumerate() {
            assert!(!seeds[..index].contains(seed), "seed {index}: {seeds:?}");
        }
    }

    #[test]
    fn no_place_overflows() {
        for kind in [ChecksumKind::Bucket, ChecksumKind::Record, ChecksumKind::Directory] {
            checksum_seed(u64::MAX, u32::MAX, kind, ChunkIndex(u32::MAX), u32::MAX);
        }
    }
}
