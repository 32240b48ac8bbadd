//! The index of a table: a separator and the place of each data block.
//!
//! ```text
//!   a block of key_block.rs; a body: sequence varint │ offset varint │ length varint
//! ```
//! A separator is a position at or behind the last entry of its block, and before the first entry of the next block. If the key
//! changes between them it is the shortest such key, with sequence number 0, which is behind all entries of that key; else, and for
//! the last block, it is the position of the last entry itself. So the first block whose separator is not before a position is the
//! only one that can hold the key's first entry at or behind the position.
//!
//! Offsets count the bytes of data alone, without the metadata between them ([`TablePlace`](super::info::TablePlace)).
//! Tested below and by the tests of whole tables.

use super::frame::TRAILER_BYTES;
use super::key_block::{BlockBody, KeyBlock, KeyBlockBuilder, shared_bytes};
use crate::lsm::entry::{Position, push_varint, take_varint};
use octokv_base::KEY_BYTES_MAX;

/// The index of one table.
pub type TableIndex = KeyBlock<BlockRef>;

/// The most bytes of a body.
pub const INDEX_BODY_BYTES_MAX: usize = 10 + 5 + 5;

/// The place of a data block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRef {
    /// The sequence number of the separator.
    pub sequence: u64,
    /// The bytes of data before it.
    pub offset: u32,
    /// Its length, trailer included, in bytes.
    pub bytes: u32,
}

impl BlockBody for BlockRef {
    fn decode(bytes: &[u8], at: usize) -> Option<(BlockRef, usize)> {
        let mut rest = bytes.get(at..)?;
        let sequence = take_varint(&mut rest)?;
        let mut field = || u32::try_from(take_varint(&mut rest)?).ok();
        let (offset, block_bytes) = (field()?, field()?);
        let is_block = block_bytes as usize > TRAILER_BYTES;
        is_block.then_some((BlockRef { sequence, offset, bytes: block_bytes }, bytes.len() - rest.len()))
    }

    #[inline]
    fn end(bytes: &[u8], at: usize) -> Option<usize> {
        // Three varints, which usually lie within eight bytes: behind the third byte that is the last of one.
        if let Some(word) = bytes.get(at..).and_then(|bytes| bytes.first_chunk()) {
            let first = !u64::from_le_bytes(*word) & 0x8080_8080_8080_8080;
            let second = first & first.wrapping_sub(1);
            let third = second & second.wrapping_sub(1);
            if third != 0 {
                return Some(at + 1 + (third.trailing_zeros() / u8::BITS) as usize);
            }
        }
        BlockRef::decode(bytes, at).map(|(_, end)| end)
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// Appends a block with the position that separates it from the next one.
pub fn push_block(index: &mut KeyBlockBuilder, separator: Position<'_>, offset: u32, bytes: u32) {
    index.push(separator.key, |body| {
        for field in [separator.sequence, u64::from(offset), u64::from(bytes)] {
            push_varint(body, field);
        }
    });
}

/// The shortest key from `first` on and before `second`, in `scratch`. REQUIRES: `first < second`.
pub fn separator<'a>(first: &'a [u8], second: &[u8], scratch: &'a mut Vec<u8>) -> &'a [u8] {
    assert!(first < second, "keys out of order");
    let shared = shared_bytes(first, second);
    scratch.clear();
    if second.len() > shared + 1 {
        scratch.extend_from_slice(&second[..=shared]);
    } else {
        // The first byte that can be greater, while the key stays before the second one.
        let can_rise = |&at: &usize| first[at] < if at == shared { second[at] - 1 } else { u8::MAX };
        let Some(at) = (shared..first.len()).find(can_rise) else { return first };
        scratch.extend_from_slice(&first[..=at]);
        scratch[at] += 1;
    }
    if scratch.len() < first.len() { scratch } else { first }
}

/// The keys that a block may have, both included, by its separator and the one before it; `None` before the first block.
pub fn key_range(before: Option<Position<'_>>, separator: Position<'_>) -> (Vec<u8>, Vec<u8>) {
    let mut first = before.map_or_else(Vec::new, |before| before.key.to_vec());
    if before.is_some_and(|before| before.sequence == 0) && first.len() < KEY_BYTES_MAX {
        // The next key in order.
        first.push(0);
    }
    (first, separator.key.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn short_key() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(prop_oneof![Just(0), Just(1), Just(254), Just(255), any::<u8>()], 0..6)
    }

    proptest! {
        #[test]
        fn a_separator_lies_between_and_no_shorter_key_does(first in short_key(), second in short_key()) {
            prop_assume!(first < second);
            let mut scratch = Vec::new();
            let found = separator(&first, &second, &mut scratch);
            prop_assert!(first[..] <= *found && *found < second[..], "{found:?}");
            // Only prefixes of the second key, and the key that follows a prefix of the first, can be shorter ones between them.
            for bytes in 0..found.len() {
                let mut between = first.get(..bytes).unwrap_or(&first).to_vec();
                let prefix = second[..bytes.min(second.len())].to_vec();
                prop_assert!(prefix < first || prefix >= second, "{prefix:?}");
                if let Some(last) = between.last_mut() && *last < 255 {
                    *last += 1;
                    prop_assert!(between < first || between >= second, "{between:?}");
                }
            }
        }
    }

    #[test]
    fn a_block_reference_of_no_block_is_none() {
        for body in [&[0, 0, TRAILER_BYTES as u8][..], &[0, 0], &[0xff; 20]] {
            assert_eq!(BlockRef::decode(body, 0), None);
        }
        let body = [0, 0, TRAILER_BYTES as u8 + 1];
        assert_eq!(BlockRef::decode(&body, 0), Some((BlockRef { sequence: 0, offset: 0, bytes: 6 }, 3)));
    }
}
