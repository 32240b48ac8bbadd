//! Statistics of a log-structured merge tree, as operators see them.
//!
//! In: what the ordered engine counts. Out: numbers of one moment, of one volume whatever the number of its cores. An engine without a tree has none.

use octokv_base::Nanos;

/// The levels of a tree.
pub const TREE_LEVELS: usize = 7;

/// The state of a tree, and what its background work did. "Since the opening": since this process opened the volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeStatistics {
    /// The levels, from level 0.
    pub levels: [LevelStatistics; TREE_LEVELS],
    /// The memtables, the one that takes writes included.
    pub memtables: u64,
    /// Their memory in bytes.
    pub memtable_bytes: u64,
    /// Memtables that were flushed since the opening.
    pub flushes: u64,
    /// The tables that these became, in bytes.
    pub flushed_bytes: u64,
    /// Compactions that ended since the opening, those that only moved tables to another level not included.
    pub compactions: u64,
    /// The tables that these wrote, in bytes.
    pub compacted_bytes: u64,
    /// Values that compactions moved to another segment since the opening.
    pub moved_values: u64,
    /// The records of these values, in bytes.
    pub moved_bytes: u64,
    /// The bytes that compactions will read until every level has reached its target, estimated.
    pub pending_bytes: u64,
    /// What compactions leave alone because the device failed to read it.
    pub postponed: PostponedStatistics,
    /// The writes that had to wait for background work.
    pub stalls: StallStatistics,
    /// Value segments.
    pub segments: u64,
    /// Their space in bytes.
    pub segment_bytes: u64,
    /// The bytes of keys and values in segments to which tables refer; a write counts from its flush on.
    pub segment_live_bytes: u64,
    /// The number of the last change: sequence numbers count from it backwards.
    pub last_sequence: u64,
    /// Iterators that are open.
    pub iterators: u64,
    /// Iterators that ended since the opening because they were not used for too long.
    pub expired_iterators: u64,
    /// The oldest snapshot of an open iterator.
    pub oldest_snapshot: Option<SnapshotAge>,
    /// The space of tables and segments that only older versions have, for iterators, and of those that flushes and compactions are writing, in bytes.
    pub pinned_bytes: u64,
}

/// The tables of a level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelStatistics {
    /// Their number.
    pub tables: u64,
    /// Their length in bytes.
    pub bytes: u64,
}

/// Compactions that device errors hold up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PostponedStatistics {
    /// Tables that the device failed to read, and that no compaction has read since.
    pub tables: u64,
    /// Value segments with values of which the same is true.
    pub segments: u64,
    /// Compactions that failed since the opening because the device failed to read.
    pub compactions: u64,
}

/// The writes that background work held up since the opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallStatistics {
    /// Writes that waited for space, or for room in memory or in the journal.
    pub waited_writes: u64,
    /// The sum of their waits.
    pub waited: Nanos,
    /// Puts that waited for their turn, since compaction could not keep up with all of them.
    pub delayed_writes: u64,
    /// The sum of their waits.
    pub delayed: Nanos,
}

/// A snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotAge {
    /// The number of the last change that it has.
    pub sequence: u64,
    /// The time since it was created, by the wall clock.
    pub age: Nanos,
}
