//! The JSON document of a namespace's tree: the state of an ordered engine's levels, memtables and segments, and what its background work did.

use octokv_base::Nanos;
use octokv_engine::{SnapshotAge, TreeStatistics};
use octokv_node::{DeviceStatus, NamespaceStatus};
use serde::{Deserialize, Serialize};

/// The tree of a namespace with an ordered engine. Its counts are since the namespace was opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TreeReport {
    /// Namespace ID.
    pub nsid: u32,
    /// The index of its device, in a volume on several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u16>,
    /// The levels, from level 0.
    pub levels: Vec<LevelReport>,
    /// Memtables, the one that takes writes included.
    pub memtables: u64,
    /// Their memory in bytes.
    pub memtable_bytes: u64,
    /// Memtables that were flushed.
    pub flushes: u64,
    /// The tables that these became, in bytes.
    pub flushed_bytes: u64,
    /// Compactions that wrote tables.
    pub compactions: u64,
    /// These tables in bytes.
    pub compacted_bytes: u64,
    /// Values that compactions moved to another segment.
    pub moved_values: u64,
    /// Their records in bytes.
    pub moved_bytes: u64,
    /// The bytes that compactions will read until every level has reached its target, estimated.
    pub pending_bytes: u64,
    /// Tables that compactions leave alone because the device failed to read them.
    pub postponed_tables: u64,
    /// Value segments of which the same is true.
    pub postponed_segments: u64,
    /// Compactions that failed because the device failed to read.
    pub postponed_compactions: u64,
    /// Writes that waited for space, or for room in memory or in the journal.
    pub waited_writes: u64,
    /// The sum of their waits in milliseconds.
    pub waited_ms: f64,
    /// Puts that waited for their turn, since compaction could not keep up with all of them.
    pub delayed_writes: u64,
    /// The sum of their waits in milliseconds.
    pub delayed_ms: f64,
    /// Value segments.
    pub segments: u64,
    /// Their space in bytes.
    pub segment_bytes: u64,
    /// The bytes of keys and values in segments to which tables refer.
    pub segment_live_bytes: u64,
    /// The number of the last change.
    pub last_sequence: u64,
    /// Iterators that are open.
    pub iterators: u64,
    /// Iterators that ended because no host used them for too long.
    pub expired_iterators: u64,
    /// The oldest snapshot of an open iterator.
    pub oldest_snapshot: Option<SnapshotReport>,
    /// Space in bytes that is held for open iterators alone, or that flushes and compactions are writing.
    pub pinned_bytes: u64,
}

/// The tables of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelReport {
    /// Their number.
    pub tables: u64,
    /// Their length in bytes.
    pub bytes: u64,
}

/// A snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The number of the last change that it has.
    pub sequence: u64,
    /// The time since it was created, in seconds.
    pub age_s: f64,
}

impl TreeReport {
    /// Those of a namespace, if it has trees: one, or one of each of several devices.
    pub fn all_of(namespace: &NamespaceStatus) -> Vec<TreeReport> {
        let report = |device, tree| TreeReport::new((namespace.config.id.0, device), tree);
        let own = namespace.tree.iter().map(|tree| report(None, tree));
        let of_devices = namespace.devices.iter().filter_map(|DeviceStatus { report: of_device, .. }| {
            Some(report(Some(of_device.index), of_device.statistics.tree.as_ref()?))
        });
        own.chain(of_devices).collect()
    }

    fn new((nsid, device): (u32, Option<u16>), tree: &TreeStatistics) -> TreeReport {
        let millis = |duration: Nanos| duration.0 as f64 / 1e6;
        let snapshot = |SnapshotAge { sequence, age }| SnapshotReport { sequence, age_s: age.as_secs_f64() };
        TreeReport {
            nsid,
            device,
            levels: tree
                .levels
                .iter()
                .map(|level| LevelReport { tables: level.tables, bytes: level.bytes })
                .collect(),
            memtables: tree.memtables,
            memtable_bytes: tree.memtable_bytes,
            flushes: tree.flushes,
            flushed_bytes: tree.flushed_bytes,
            compactions: tree.compactions,
            compacted_bytes: tree.compacted_bytes,
            moved_values: tree.moved_values,
            moved_bytes: tree.moved_bytes,
            pending_bytes: tree.pending_bytes,
            postponed_tables: tree.postponed.tables,
            postponed_segments: tree.postponed.segments,
            postponed_compactions: tree.postponed.compactions,
            waited_writes: tree.stalls.waited_writes,
            waited_ms: millis(tree.stalls.waited),
            delayed_writes: tree.stalls.delayed_writes,
            delayed_ms: millis(tree.stalls.delayed),
            segments: tree.segments,
            segment_bytes: tree.segment_bytes,
            segment_live_bytes: tree.segment_live_bytes,
            last_sequence: tree.last_sequence,
            iterators: tree.iterators,
            expired_iterators: tree.expired_iterators,
            oldest_snapshot: tree.oldest_snapshot.map(snapshot),
            pinned_bytes: tree.pinned_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_engine::{LevelStatistics, PostponedStatistics, StallStatistics, TREE_LEVELS};
    use serde_json::json;

    /// Each number is another one, so that two that are exchanged show.
    #[test]
    fn every_number_has_its_name() {
        let mut levels = [LevelStatistics::default(); TREE_LEVELS];
        levels[1] = LevelStatistics { tables: 1, bytes: 2 };
        let stalls = StallStatistics {
            waited_writes: 14,
            waited: Nanos::from_millis(15),
            delayed_writes: 26,
            delayed: Nanos::from_millis(27),
        };
        let statistics = TreeStatistics {
            levels,
            memtables: 3,
            memtable_bytes: 4,
            flushes: 5,
            flushed_bytes: 6,
            compactions: 7,
            compacted_bytes: 8,
            moved_values: 9,
            moved_bytes: 10,
            pending_bytes: 11,
            postponed: PostponedStatistics { tables: 28, segments: 29, compactions: 30 },
            stalls,
            segments: 16,
            segment_bytes: 17,
            segment_live_bytes: 18,
            last_sequence: 19,
            iterators: 20,
            expired_iterators: 21,
            oldest_snapshot: Some(SnapshotAge { sequence: 22, age: Nanos::from_millis(2_500) }),
            pinned_bytes: 24,
        };
        let report = TreeReport::new((25, None), &statistics);
        let none = json!({ "tables": 0, "bytes": 0 });
        let one = json!({ "tables": 1, "bytes": 2 });
        let document = json!({
            "nsid": 25, "levels": [none, one, none, none, none, none, none], "memtables": 3, "memtable_bytes": 4,
            "flushes": 5, "flushed_bytes": 6, "compactions": 7, "compacted_bytes": 8, "moved_values": 9,
            "moved_bytes": 10, "pending_bytes": 11, "postponed_tables": 28, "postponed_segments": 29,
            "postponed_compactions": 30, "waited_writes": 14,
            "waited_ms": 15.0, "delayed_writes": 26, "delayed_ms": 27.0, "segments": 16, "segment_bytes": 17, "segment_live_bytes": 18, "last_sequence": 19,
            "iterators": 20, "expired_iterators": 21, "oldest_snapshot": { "sequence": 22, "age_s": 2.5 },
            "pinned_bytes": 24,
        });
        assert_eq!(serde_json::to_value(&report).unwrap(), document);
        assert_eq!(serde_json::from_value::<TreeReport>(document).unwrap(), report);
    }
}
