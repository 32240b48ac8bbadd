//! The frame of a table's blocks: kind, checksum and compression.
//!
//! ```text
//!   payload │ kind u8 │ checksum u32
//!   payload of a compressed block: length u32, its LZ4 block
//! ```
//! The checksum is the CRC-32C of payload and kind, exclusive or the low 32 bits of a mix of volume, table and the block's offset: a
//! block of another table, of another volume or of another place has a wrong one. A block is compressed only if that saves an eighth
//! of its bytes.
//! Invariant: [`open`] takes any bytes, and allocates no more than its caller's limit. Tested below and by the fuzz target `table_block`.

use octokv_base::crc32c;
use octokv_base::prng::mix64;

/// The bytes of a block behind its payload.
pub const TRAILER_BYTES: usize = 1 + size_of::<u32>();
/// A compressed block saves at least this part of its bytes.
const SAVED_DIVISOR: usize = 8;
const COMPRESSED: u8 = 1 << 7;

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Entries.
    Data = 1,
    /// The filter of the table's keys.
    Filter = 2,
    /// Where the data blocks lie.
    Index = 3,
}

/// Whose block it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOwner {
    /// The volume.
    pub volume_id: u64,
    /// The table.
    pub table_id: u64,
}

impl BlockOwner {
    /// What the checksum of a block at an offset is masked with.
    fn mask(self, offset: u32) -> u32 {
        let table = mix64(self.volume_id ^ mix64(self.table_id.wrapping_add(1)));
        mix64(table.wrapping_add(u64::from(offset))) as u32
    }
}

/// Appends the trailer to the payload that begins at `start`.
pub fn seal(bytes: &mut Vec<u8>, start: usize, kind: BlockKind, owner: BlockOwner, offset: u32) {
    seal_kind(bytes, start, kind as u8, owner, offset);
}

/// Replaces the payload that begins at `start` by a compressed one if that is worth it, and appends the trailer. `scratch` is reused.
pub fn seal_compressed(
    bytes: &mut Vec<u8>,
    start: usize,
    kind: BlockKind,
    owner: BlockOwner,
    offset: u32,
    scratch: &mut Vec<u8>,
) {
    let payload = &bytes[start..];
    scratch.resize(lz4_flex::block::get_maximum_output_size(payload.len()), 0);
    let bytes_max = payload.len() - payload.len().div_ceil(SAVED_DIVISOR);
    let compressed = lz4_flex::block::compress_into(payload, scratch).ok();
    let compressed = compressed.filter(|compressed| size_of::<u32>() + compressed <= bytes_max);
    let Some(compressed) = compressed else { return seal(bytes, start, kind, owner, offset) };
    let length = payload.len() as u32;
    bytes.truncate(start);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&scratch[..compressed]);
    seal_kind(bytes, start, kind as u8 | COMPRESSED, owner, offset);
}

fn seal_kind(bytes: &mut Vec<u8>, start: usize, kind: u8, owner: BlockOwner, offset: u32) {
    bytes.push(kind);
    let checksum = crc32c(&bytes[start..]) ^ owner.mask(offset);
    bytes.extend_from_slice(&checksum.to_le_bytes());
}

/// The payload of a block, decompressed; `None` unless it is that block, intact, and of at most `payload_bytes_max` bytes.
pub fn open(
    bytes: &[u8],
    kind: BlockKind,
    owner: BlockOwner,
    offset: u32,
    payload_bytes_max: usize,
) -> Option<Box<[u8]>> {
    let payload = open_in(bytes, kind, owner, offset, payload_bytes_max, Vec::with_capacity);
    payload.map(Vec::into_boxed_slice)
}

/// The same, in the empty memory for so many bytes that `memory` gives.
pub fn open_in(
    bytes: &[u8],
    kind: BlockKind,
    owner: BlockOwner,
    offset: u32,
    payload_bytes_max: usize,
    memory: impl FnOnce(usize) -> Vec<u8>,
) -> Option<Vec<u8>> {
    let (covered, checksum) = bytes.split_last_chunk()?;
    if u32::from_le_bytes(*checksum) != crc32c(covered) ^ owner.mask(offset) {
        return None;
    }
    let (&found, payload) = covered.split_last()?;
    if found == kind as u8 {
        return (payload.len() <= payload_bytes_max).then(|| {
            let mut memory = memory(payload.len());
            memory.extend_from_slice(payload);
            memory
        });
    }
    if found != kind as u8 | COMPRESSED {
        return None;
    }
    let (length, compressed) = payload.split_first_chunk()?;
    let length =
        usize::try_from(u32::from_le_bytes(*length)).ok().filter(|&length| length <= payload_bytes_max)?;
    let mut decompressed = memory(length);
    decompressed.resize(length, 0);
    let found = lz4_flex::block::decompress_into(compressed, &mut decompressed).ok()?;
    (found == length).then_some(decompressed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: BlockOwner = BlockOwner { volume_id: 7, table_id: 3 };
    const LIMIT: usize = 1 << 16;

    fn sealed(payload: &[u8]) -> Vec<u8> {
        let mut bytes = b"before".to_vec();
        bytes.extend_from_slice(payload);
        seal_compressed(&mut bytes, 6, BlockKind::Data, OWNER, 4096, &mut Vec::new());
        bytes.split_off(6)
    }

    fn opened(bytes: &[u8]) -> Option<Box<[u8]>> {
        open(bytes, BlockKind::Data, OWNER, 4096, LIMIT)
    }

    fn incompressible(bytes: usize) -> Vec<u8> {
        let mut payload = vec![0; bytes];
        octokv_base::Prng::new(1).fill(&mut payload);
        payload
    }

    #[test]
    fn a_block_is_opened_by_its_owner_at_its_place_alone() {
        for payload in [&b""[..], b"some bytes", &[b'x'; 5000], &incompressible(5000)] {
            let bytes = sealed(payload);
            assert_eq!(opened(&bytes).as_deref(), Some(payload));
            for owner in [BlockOwner { volume_id: 8, ..OWNER }, BlockOwner { table_id: 4, ..OWNER }] {
                assert_eq!(open(&bytes, BlockKind::Data, owner, 4096, LIMIT), None);
            }
            assert_eq!(open(&bytes, BlockKind::Data, OWNER, 4097, LIMIT), None, "another place");
            assert_eq!(open(&bytes, BlockKind::Index, OWNER, 4096, LIMIT), None, "another kind");
            if let Some(limit) = payload.len().checked_sub(1) {
                assert_eq!(open(&bytes, BlockKind::Data, OWNER, 4096, limit), None, "too long");
            }
        }
    }

    #[test]
    fn a_block_is_compressed_if_that_saves_an_eighth() {
        assert!(sealed(&[b'x'; 4096]).len() < 100);
        assert_eq!(sealed(&incompressible(4096)).len(), 4096 + TRAILER_BYTES);
        // LZ4 copies the random bytes, and a few describe the rest: 512 bytes of 4,096 have to be saved.
        let with_zeros = |zeros: usize| {
            let mut payload = incompressible(4096);
            payload[..zeros].fill(0);
            sealed(&payload).len() < payload.len()
        };
        assert!(with_zeros(600) && !with_zeros(500));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        for payload in [incompressible(700), vec![b'x'; 700]] {
            let bytes = sealed(&payload);
            for bit in 0..8 * bytes.len() {
                let mut changed = bytes.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(opened(&changed), None, "bit {bit}");
            }
            for end in 0..bytes.len() {
                assert_eq!(opened(&bytes[..end]), None, "{end} bytes");
            }
        }
    }

    #[test]
    fn a_compressed_block_with_a_wrong_length_is_none() {
        for claimed in [0, 699, 701, u32::MAX] {
            let mut bytes = claimed.to_le_bytes().to_vec();
            bytes.extend_from_slice(&lz4_flex::block::compress(&[b'x'; 700]));
            seal_kind(&mut bytes, 0, BlockKind::Data as u8 | COMPRESSED, OWNER, 4096);
            assert_eq!(opened(&bytes), None, "{claimed}");
        }
    }
}
