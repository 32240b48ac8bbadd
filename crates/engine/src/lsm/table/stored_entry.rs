//! Entries in data blocks: their bytes are those of [`TreeEntry::encode`], behind the key.
//!
//! In: blocks. Out: entries that refer to the block's bytes. Invariant: an inline value lies within the block that its entry came from.
//! Tested by the tests of whole tables.

use super::key_block::{BlockBody, KeyBlock};
use crate::lsm::entry::{EntryValue, TreeEntry, ValueAddress};
use octokv_base::{UnixTime, Version};

/// A block of entries.
pub type DataBlock = KeyBlock<StoredEntry>;

/// An entry of a data block, without its key.
#[derive(Clone, Copy, Debug)]
pub struct StoredEntry {
    sequence: u64,
    version: Version,
    expires_at: UnixTime,
    value: StoredEntryValue,
}

#[derive(Clone, Copy, Debug)]
enum StoredEntryValue {
    Tombstone,
    /// These bytes of the block.
    Inline {
        start: u32,
        bytes: u32,
    },
    InSegment(ValueAddress),
}

impl BlockBody for StoredEntry {
    fn decode(bytes: &[u8], at: usize) -> Option<(StoredEntry, usize)> {
        let mut rest = bytes.get(at..)?;
        let TreeEntry { sequence, version, expires_at, value, .. } = TreeEntry::decode(&[], &mut rest)?;
        let end = bytes.len() - rest.len();
        let value = match value {
            EntryValue::Tombstone => StoredEntryValue::Tombstone,
            // The value is the last part of an entry. Blocks are far shorter than 4 GiB.
            EntryValue::Inline(value) => {
                StoredEntryValue::Inline { start: (end - value.len()) as u32, bytes: value.len() as u32 }
            }
            EntryValue::InSegment(address) => StoredEntryValue::InSegment(address),
        };
        Some((StoredEntry { sequence, version, expires_at, value }, end))
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl StoredEntry {
    /// The entry of a key. REQUIRES: `block` is the one that this came from.
    pub fn entry<'a>(&self, key: &'a [u8], block: &'a DataBlock) -> TreeEntry<'a> {
        let StoredEntry { sequence, version, expires_at, value } = *self;
        let value = match value {
            StoredEntryValue::Tombstone => EntryValue::Tombstone,
            StoredEntryValue::Inline { start, bytes } => {
                EntryValue::Inline(&block.bytes()[start as usize..][..bytes as usize])
            }
            StoredEntryValue::InSegment(address) => EntryValue::InSegment(address),
        };
        TreeEntry { key, sequence, version, expires_at, value }
    }
}
