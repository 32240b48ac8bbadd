//! What operations take and give: values, conditions, versions, expiry, and their outcomes.

use crate::cached::CacheStatistics;
use crate::log_statistics::LogStatistics;
use crate::tree_statistics::TreeStatistics;
use octokv_base::{Buffer, DataBuffer, RingPosition, UnixTime, Version};
use std::ops::Range;

/// The condition of a put on its key (NVMe KV 1.3, Store options; the last one is ours).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// Stores the value whether or not the key exists.
    Upsert,
    /// Stores the value only if the key does not exist.
    AddOnly,
    /// Stores the value only if the key exists.
    UpdateOnly,
    /// Stores the value only if the key has this version; [`Version::NONE`]: only if it has none, whether or not it exists.
    IfVersion(Version),
}

/// How a put stores its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutOptions {
    /// The condition.
    pub mode: PutMode,
    /// The version of the write: it applies only if it is newer than the key's. A put without one, [`Version::NONE`],
    /// always applies, and the key keeps its version.
    pub version: Version,
    /// When the key ceases to exist. A key that has expired is as one that does not exist, but for its version.
    pub expires_at: UnixTime,
}

impl Default for PutOptions {
    fn default() -> PutOptions {
        PutOptions { mode: PutMode::Upsert, version: Version::NONE, expires_at: UnixTime::NEVER }
    }
}

impl From<PutMode> for PutOptions {
    fn from(mode: PutMode) -> PutOptions {
        PutOptions { mode, ..PutOptions::default() }
    }
}

/// The value of a put, in one buffer or several.
#[derive(Debug)]
pub struct PutValue {
    /// The front of the record: room for the engine's header and the key, then the value from
    /// [`Engine::record_layout`](crate::Engine::record_layout)'s value offset of the key's length on.
    pub record: Buffer,
    /// The rest of the value, in order, if it does not lie in `record` alone.
    pub more: Option<Box<[Buffer]>>,
    /// The length of the whole value, in bytes. The last buffer may be longer than the rest of the value.
    pub bytes: usize,
}

impl PutValue {
    /// A value in one buffer, from the engine's value offset of its key's length on.
    pub fn new(record: Buffer, bytes: usize) -> PutValue {
        PutValue { record, more: None, bytes }
    }
}

/// When a write is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// After a flush, which all waiting writes share: the write survives a power loss.
    PowerSafe,
    /// When the device has completed it, as in the papers: a power loss may undo it.
    Completed,
}

/// The outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value is stored, with the engine's durability.
    Stored,
    /// The key exists, and the mode is [`PutMode::AddOnly`].
    Exists,
    /// The key does not exist, and the mode is [`PutMode::UpdateOnly`].
    NotFound,
    /// The key has another version than [`PutMode::IfVersion`] says: this one.
    OtherVersion(Version),
    /// The key has the version of the put or a newer one, this one; the put changed nothing.
    NotNewer(Version),
    /// No space is left for the value; the previous value remains.
    Full,
    /// The value is longer than the engine's limit.
    TooLong,
}

/// The outcome of a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// The key does not exist any more, with the engine's durability.
    Deleted,
    /// The key did not exist. A delete with a version leaves its tombstone nevertheless.
    NotFound,
    /// The key has the version of the delete or a newer one, this one; the delete changed nothing.
    NotNewer(Version),
}

/// The part of a value that a get reads, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueRange {
    /// The first byte.
    pub offset: u32,
    /// The most bytes.
    pub bytes_max: u32,
}

impl ValueRange {
    /// The whole value.
    pub const ALL: ValueRange = ValueRange { offset: 0, bytes_max: u32::MAX };

    /// The part of a value of `bytes` bytes that lies in the range.
    pub fn within(&self, bytes: u32) -> Range<u32> {
        let start = self.offset.min(bytes);
        start..start + self.bytes_max.min(bytes - start)
    }
}

/// A value, or the requested part of it, within the buffer of its record.
#[derive(Debug)]
pub struct StoredValue {
    /// The buffer, with other bytes around those of the value.
    pub buffer: DataBuffer,
    /// The offset of the first requested byte in the buffer.
    pub offset: u32,
    /// The number of requested bytes that the value has.
    pub bytes: u32,
    /// The length of the whole value, in bytes.
    pub value_bytes: u32,
    /// The version of the key.
    pub version: Version,
    /// When it expires.
    pub expires_at: UnixTime,
}

impl StoredValue {
    /// The requested bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.offset as usize..][..self.bytes as usize]
    }
}

/// Metadata of an existing key: length, version and expiry of its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyStatus {
    /// The length of the value, in bytes.
    pub value_bytes: usize,
    /// The version of the key.
    pub version: Version,
    /// When it expires.
    pub expires_at: UnixTime,
}

/// One entry of a scan: the last write of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanEntry<'a> {
    /// The position of the key, in whose order a scan yields.
    pub position: RingPosition,
    /// The key.
    pub key: &'a [u8],
    /// The version of the key.
    pub version: Version,
    /// Whether the last write was a delete with a version, of which the tombstone is left.
    pub is_tombstone: bool,
    /// A hash of the value and its expiry, the same on every node and engine; 0 for a tombstone. See [`value_digest`].
    pub digest: u64,
}

/// The digest of a value in a [`ScanEntry`]: XXH3-64 of the value, with the expiry time in milliseconds as the seed.
pub fn value_digest(value: &[u8], expires_at: UnixTime) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(value, expires_at.0)
}

/// The stages of prefetching for a coming operation. Issued one after the other with other operations in between, they
/// bring index and record into the processor's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchStage {
    /// The header of the key's index partition.
    Partition,
    /// The index entry.
    Entry,
    /// The front of the record, with the key.
    Record,
}

/// Statistics of an engine. They are kept, not computed: reading them scans nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// The number of keys.
    pub keys: u64,
    /// The size of the record area, in bytes.
    pub capacity_bytes: u64,
    /// The part of it that records occupy, in bytes.
    pub used_bytes: u64,
    /// Memory of the index, in bytes.
    pub index_bytes: u64,
    /// Journal batches written since opening.
    pub journal_batches: u64,
    /// Checkpoints written since opening.
    pub checkpoints: u64,
    /// Never-written space that was written with zeros ahead of its use since opening, in bytes.
    pub prepared_bytes: u64,
    /// Values in pieces, and what compaction did since opening.
    pub compaction: CompactionStatistics,
    /// The cache of values; all 0 without one.
    pub cache: CacheStatistics,
    /// The tree of the ordered engine; `None` of an engine without one.
    pub tree: Option<TreeStatistics>,
    /// The logs of the log engine; `None` of an engine without them.
    pub log: Option<LogStatistics>,
}

/// Values in pieces, and what compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactionStatistics {
    /// Values that are in pieces now.
    pub values_in_pieces: u64,
    /// Values in pieces that became one record.
    pub joined_values: u64,
    /// Records that were moved to make a run of free space.
    pub moved_records: u64,
    /// The records of both, in bytes of whole units.
    pub moved_bytes: u64,
}

impl EngineStatistics {
    /// Adds those of another volume, without its cache, its tree and its logs: these are of one volume.
    pub fn add(&mut self, other: &EngineStatistics) {
        self.keys += other.keys;
        self.capacity_bytes += other.capacity_bytes;
        self.used_bytes += other.used_bytes;
        self.index_bytes += other.index_bytes;
        self.journal_batches += other.journal_batches;
        self.checkpoints += other.checkpoints;
        self.prepared_bytes += other.prepared_bytes;
        self.compaction.values_in_pieces += other.compaction.values_in_pieces;
        self.compaction.joined_values += other.compaction.joined_values;
        self.compaction.moved_records += other.compaction.moved_records;
        self.compaction.moved_bytes += other.compaction.moved_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_value() {
        let range = |offset, bytes_max| ValueRange { offset, bytes_max }.within(10);
        assert_eq!(ValueRange::ALL.within(10), 0..10);
        assert_eq!(range(3, 4), 3..7);
        assert_eq!(range(3, 40), 3..10);
        assert_eq!(range(10, 1), 10..10);
        assert_eq!(range(11, 1), 10..10);
        assert_eq!(range(3, 0), 3..3);
        assert_eq!(range(u32::MAX, u32::MAX), 10..10);
    }

    #[test]
    fn a_digest_depends_on_value_and_expiry() {
        let digests = [
            value_digest(b"one", UnixTime::NEVER),
            value_digest(b"two", UnixTime::NEVER),
            value_digest(b"one", UnixTime(7)),
            value_digest(b"", UnixTime::NEVER),
        ];
        for (at, digest) in digests.iter().enumerate() {
            assert!(!digests[..at].contains(digest), "{at}");
        }
    }
}
