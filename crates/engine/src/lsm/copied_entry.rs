//! Entries with bytes of their own: what a compaction holds of the keys between its input and its output.

use super::entry::{EntryValue, TreeEntry, ValueAddress};
use octokv_base::{UnixTime, Version};

/// The value of an [`CopiedEntry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopiedValue {
    /// None.
    Tombstone,
    /// These bytes.
    Inline(Box<[u8]>),
    /// That of a record in a value segment.
    InSegment(ValueAddress),
}

/// An entry without its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedEntry {
    /// The sequence number.
    pub sequence: u64,
    /// The version of the key.
    pub version: Version,
    /// When the value expires.
    pub expires_at: UnixTime,
    /// The value.
    pub value: CopiedValue,
}

impl CopiedEntry {
    /// A copy of an entry.
    pub fn of(entry: &TreeEntry<'_>) -> CopiedEntry {
        let value = match entry.value {
            EntryValue::Tombstone => CopiedValue::Tombstone,
            EntryValue::Inline(value) => CopiedValue::Inline(value.into()),
            EntryValue::InSegment(address) => CopiedValue::InSegment(address),
        };
        CopiedEntry { sequence: entry.sequence, version: entry.version, expires_at: entry.expires_at, value }
    }

    /// The entry of a key.
    pub fn entry<'a>(&'a self, key: &'a [u8]) -> TreeEntry<'a> {
        let value = match &self.value {
            CopiedValue::Tombstone => EntryValue::Tombstone,
            CopiedValue::Inline(value) => EntryValue::Inline(value),
            CopiedValue::InSegment(address) => EntryValue::InSegment(*address),
        };
        TreeEntry { key, sequence: self.sequence, version: self.version, expires_at: self.expires_at, value }
    }
}
