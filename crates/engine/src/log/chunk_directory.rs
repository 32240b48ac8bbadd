//! The directory of a value chunk: which segments its records belong to, at the end of the chunk.
//!
//! ```text
//!   │ records, packed by granules │ zeros │ ids u32 each, in the order of the records │ trailer, 32 bytes │
//!   0                        data end                                                           end of the chunk
//!
//!   trailer    0 magic "OKVD"     8 partition u32       16 ids u32               24 incarnation u32
//!              4 CRC-32C u32     12 chunk index u32     20 data granules u32     28 zero u32
//! ```
//! An id is the first half of the prefix of the record's key ([`super::hash_prefix::HashPrefix::id`]): it names the segment under any
//! level. A record in extents has an id in each of its chunks. The checksum covers the ids and the trailer from byte 8 on, exclusive or
//! the seed of the chunk ([`super::log_place::checksum_seed`], at 0). Integers are little-endian.
//!
//! Invariants: records and directory do not overlap; any bytes are a directory or an error, and that of another chunk, store or use of
//! the chunk is an error.
//! Tested below.

use super::log_place::{ChecksumKind, ChunkIndex, checksum_seed};
use octokv_base::Crc32c;
use std::mem::offset_of;
use std::ops::Range;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The bytes behind the ids.
pub const DIRECTORY_TRAILER_BYTES: usize = 32;
/// The bytes of an id.
pub const DIRECTORY_ID_BYTES: usize = 4;

const MAGIC: [u8; 4] = *b"OKVD";
const CHECKED_FROM: usize = offset_of!(DirectoryTrailerLayout, partition);
const CRC_AT: Range<usize> = offset_of!(DirectoryTrailerLayout, crc)..CHECKED_FROM;

/// The trailer on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct DirectoryTrailerLayout {
    magic: [u8; 4],
    crc: U32,
    partition: U32,
    chunk_index: U32,
    ids: U32,
    data_granules: U32,
    incarnation: U32,
    zero: U32,
}
const _: () = assert!(size_of::<DirectoryTrailerLayout>() == DIRECTORY_TRAILER_BYTES);
const _: () = assert!(CHECKED_FROM == 8);

/// Which chunk a directory is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryPlace {
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
    /// The chunk in the store's value log.
    pub index: ChunkIndex,
    /// The bytes of the chunk.
    pub chunk_bytes: u32,
    /// Log2 of the bytes of a granule.
    pub granule_log2: u8,
}

/// What a directory says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkDirectory {
    /// An id for each record, in the order of the records.
    pub ids: Vec<u32>,
    /// The granules in front of the end of the last record.
    pub data_granules: u32,
    /// The opening of the volume that wrote it.
    pub incarnation: u32,
}

/// Why bytes are not the directory of a chunk: there is none if the chunk was open when the volume was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryError {
    /// No magic number, or counts that no chunk of this length has.
    Malformed,
    /// It is longer than the bytes: so many are needed, at the end of the chunk.
    Longer {
        /// The bytes of the directory.
        need_bytes: usize,
    },
    /// The checksum does not match.
    Checksum,
}

/// The bytes of a directory of so many ids.
pub fn directory_bytes(ids: usize) -> usize {
    ids * DIRECTORY_ID_BYTES + DIRECTORY_TRAILER_BYTES
}

impl DirectoryPlace {
    /// The most granules of one more record in a chunk that has so many, and so many ids: its id needs space, too.
    pub fn free_granules(&self, data_granules: u32, ids: usize) -> u32 {
        let data_bytes_max = (self.chunk_bytes as usize).saturating_sub(directory_bytes(ids + 1));
        ((data_bytes_max >> self.granule_log2) as u32).saturating_sub(data_granules)
    }

    fn seed(&self) -> u32 {
        checksum_seed(self.volume_id, self.partition, ChecksumKind::Directory, self.index, 0)
    }

    fn is_possible(&self, ids: usize, data_granules: u32) -> bool {
        let data_bytes = u64::from(data_granules) << self.granule_log2;
        data_bytes + directory_bytes(ids) as u64 <= self.chunk_bytes.into()
    }
}

/// Encodes a directory into the last bytes of `out`, which ends where the chunk does. The bytes before it are left as they are.
///
/// # Panics
/// If `out` is shorter than the directory, or records and directory do not fit the chunk.
pub fn encode_directory(out: &mut [u8], directory: &ChunkDirectory, place: DirectoryPlace) {
    let ChunkDirectory { ids, data_granules, incarnation } = directory;
    assert!(place.is_possible(ids.len(), *data_granules), "{data_granules} granules, {} ids", ids.len());
    let start = out.len() - directory_bytes(ids.len());
    let (of_ids, trailer) = out[start..].split_at_mut(ids.len() * DIRECTORY_ID_BYTES);
    for (bytes, id) in of_ids.chunks_exact_mut(DIRECTORY_ID_BYTES).zip(ids) {
        bytes.copy_from_slice(&id.to_le_bytes());
    }
    let layout = DirectoryTrailerLayout {
        magic: MAGIC,
        crc: U32::ZERO,
        partition: place.partition.into(),
        chunk_index: place.index.0.into(),
        ids: (ids.len() as u32).into(),
        data_granules: (*data_granules).into(),
        incarnation: (*incarnation).into(),
        zero: U32::ZERO,
    };
    trailer.copy_from_slice(layout.as_bytes());
    let crc = directory_crc(of_ids, trailer, place);
    trailer[CRC_AT].copy_from_slice(&crc.to_le_bytes());
}

fn directory_crc(ids: &[u8], trailer: &[u8], place: DirectoryPlace) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(ids);
    crc.update(&trailer[CHECKED_FROM..]);
    crc.finish() ^ place.seed()
}

/// Bytes read from the end of a value chunk, not validated.
#[derive(Clone, Copy)]
pub struct UncheckedDirectory<'a> {
    /// The bytes, which end where the chunk does.
    pub bytes: &'a [u8],
    /// The chunk.
    pub place: DirectoryPlace,
}

impl UncheckedDirectory<'_> {
    /// The directory, if it is the chunk's and intact.
    ///
    /// # Errors
    /// [`DirectoryError`]; [`DirectoryError::Longer`] only if the chunk may have so long a directory.
    pub fn check(&self) -> Result<ChunkDirectory, DirectoryError> {
        let (rest, layout) = DirectoryTrailerLayout::ref_from_suffix(self.bytes)
            .map_err(|_| DirectoryError::Longer { need_bytes: DIRECTORY_TRAILER_BYTES })?;
        let (ids, data_granules) = (layout.ids.get() as usize, layout.data_granules.get());
        let is_of_chunk =
            layout.partition.get() == self.place.partition && layout.chunk_index.get() == self.place.index.0;
        if layout.magic != MAGIC || !is_of_chunk || !self.place.is_possible(ids, data_granules) {
            return Err(DirectoryError::Malformed);
        }
        let Some(start) = rest.len().checked_sub(ids * DIRECTORY_ID_BYTES) else {
            return Err(DirectoryError::Longer { need_bytes: directory_bytes(ids) });
        };
        let of_ids = &rest[start..];
        if directory_crc(of_ids, layout.as_bytes(), self.place) != layout.crc.get() {
            return Err(DirectoryError::Checksum);
        }
        let id = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let ids = of_ids.chunks_exact(DIRECTORY_ID_BYTES).map(id).collect();
        Ok(ChunkDirectory { ids, data_granules, incarnation: layout.incarnation.get() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const PLACE: DirectoryPlace = DirectoryPlace {
        volume_id: 7,
        partition: 1,
        index: ChunkIndex(2),
        chunk_bytes: 64 << 10,
        granule_log2: 3,
    };

    fn example() -> ChunkDirectory {
        ChunkDirectory { ids: vec![0x0403_0201, 7, u32::MAX], data_granules: 0x105, incarnation: 9 }
    }

    fn encoded(directory: &ChunkDirectory, room: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; directory_bytes(directory.ids.len()) + room];
        encode_directory(&mut bytes, directory, PLACE);
        bytes
    }

    fn check(bytes: &[u8]) -> Result<ChunkDirectory, DirectoryError> {
        UncheckedDirectory { bytes, place: PLACE }.check()
    }

    proptest! {
        #[test]
        fn a_directory_gives_back_its_ids(
            ids in vec(any::<u32>(), 0..200),
            data_granules in 0..8000u32,
            incarnation: u32,
            room in 0usize..600,
        ) {
            let directory = ChunkDirectory { ids, data_granules, incarnation };
            prop_assume!(PLACE.is_possible(directory.ids.len(), data_granules));
            let bytes = encoded(&directory, room);
            prop_assert!(bytes[..room].iter().all(|&byte| byte == 0xee), "bytes before the directory");
            let need_bytes = bytes.len() - room;
            for missing in 1..need_bytes.min(100) {
                let need_bytes = if need_bytes - missing < 32 { 32 } else { need_bytes };
                let cut = check(&bytes[room + missing..]);
                prop_assert_eq!(cut, Err(DirectoryError::Longer { need_bytes }));
            }
            prop_assert_eq!(check(&bytes), Ok(directory));
        }

        #[test]
        fn no_bytes_panic(mut bytes in vec(any::<u8>(), 0..200), ids: u32, data_granules: u32) {
            if let Some(start) = bytes.len().checked_sub(32) {
                bytes[start..start + 4].copy_from_slice(b"OKVD");
                let fields = [1, 2, ids >> (ids % 32), data_granules >> (data_granules % 32)];
                for (index, field) in fields.iter().enumerate() {
                    bytes[start + 8 + 4 * index..start + 12 + 4 * index].copy_from_slice(&field.to_le_bytes());
                }
            }
            prop_assert!(check(&bytes).is_err());
        }

        #[test]
        fn a_record_fits_exactly_if_its_id_does(data_granules in 0..8192u32, ids in 0usize..4000) {
            let free = PLACE.free_granules(data_granules, ids);
            prop_assert!(free == 0 || PLACE.is_possible(ids + 1, data_granules + free));
            prop_assert!(!PLACE.is_possible(ids + 1, data_granules + free + 1));
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let bytes = encoded(&example(), 0);
        for bit in 0..8 * bytes.len() {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_directory_of_another_chunk_store_or_volume_is_none() {
        let bytes = encoded(&example(), 0);
        let others = [
            (DirectoryPlace { volume_id: 8, ..PLACE }, DirectoryError::Checksum),
            (DirectoryPlace { partition: 2, ..PLACE }, DirectoryError::Malformed),
            (DirectoryPlace { index: ChunkIndex(3), ..PLACE }, DirectoryError::Malformed),
            (DirectoryPlace { chunk_bytes: 2048, ..PLACE }, DirectoryError::Malformed),
        ];
        for (place, error) in others {
            assert_eq!(UncheckedDirectory { bytes: &bytes, place }.check(), Err(error), "{place:?}");
        }
    }

    #[test]
    fn the_layout_of_a_directory_is_fixed() {
        let bytes = encoded(&example(), 0);
        assert_eq!(bytes[..12], [1, 2, 3, 4, 7, 0, 0, 0, 255, 255, 255, 255]);
        assert_eq!(bytes[12..16], *b"OKVD");
        assert_eq!(bytes[20..32], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(bytes[32..44], [5, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    }
}
