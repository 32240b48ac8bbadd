//! The statistics of a volume's tree.
//!
//! In: memtables, the current version with its live bytes, snapshots, what background work counts. Out: [`TreeStatistics`]. Nothing is held up: each part is read
//! under its own lock, one after the other, so that parts may be of moments that lie close together.

use super::compaction_choice::pending_bytes;
use super::snapshots::SnapshotInfo;
use super::version_edit::LEVELS;
use super::volume::LsmVolume;
use crate::tree_statistics::{
    LevelStatistics, PostponedStatistics, SnapshotAge, StallStatistics, TREE_LEVELS, TreeStatistics,
};
use octokv_base::Nanos;
use std::sync::atomic::{AtomicU64, Ordering};

const _: () = assert!(LEVELS == TREE_LEVELS);

impl LsmVolume {
    /// The current statistics of the tree.
    pub(super) fn tree_statistics(&self) -> TreeStatistics {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let unit_bytes = self.unit_bytes() as u64;
        let memtables = self.memtables.current();
        let (version, segment_live_bytes) =
            (self.versions.current(), self.versions.with_usage(|_, usage| usage.sum_bytes()));
        let levels = std::array::from_fn(|level| LevelStatistics {
            tables: version.level_tables(level) as u64,
            bytes: version.level_bytes(level),
        });
        let (mut segments, mut segment_units) = (0, 0);
        for segment in version.segments().iter() {
            segments += 1;
            segment_units += segment.meta.extent().units;
        }
        let work = &self.compaction;
        TreeStatistics {
            levels,
            memtables: memtables.newest_first().count() as u64,
            memtable_bytes: memtables.bytes(),
            flushes: load(&work.flushes),
            flushed_bytes: load(&work.flushed_bytes),
            compactions: load(&work.compactions),
            compacted_bytes: load(&work.written_bytes),
            moved_values: load(&work.moved_values),
            moved_bytes: load(&work.moved_bytes),
            pending_bytes: pending_bytes(&version, &self.settings.compaction),
            postponed: self.postponed_statistics(),
            stalls: StallStatistics {
                waited_writes: load(&work.waited_writes),
                waited: Nanos(load(&work.waited_ns)),
                delayed_writes: load(&work.delayed_writes),
                delayed: Nanos(load(&work.delayed_ns)),
            },
            segments,
            segment_bytes: segment_units * unit_bytes,
            segment_live_bytes,
            last_sequence: self.memtables.last_number(),
            iterators: self.snapshots.count() as u64,
            expired_iterators: self.snapshots.expired_count(),
            oldest_snapshot: self.snapshots.oldest().map(|oldest| self.age_of(oldest)),
            pinned_bytes: self.pinned_units() * unit_bytes,
        }
    }

    fn postponed_statistics(&self) -> PostponedStatistics {
        let [tables, segments] = self.compaction.postponed.lock().counts();
        let compactions = self.compaction.postponed_compactions.load(Ordering::Relaxed);
        PostponedStatistics { tables, segments, compactions }
    }

    /// By the wall clock, which its creation has read: the clock of idle time may be as old as the last look at iterators.
    fn age_of(&self, snapshot: SnapshotInfo) -> SnapshotAge {
        let age_ms = self.clock.now().0.saturating_sub(snapshot.point.time.0);
        SnapshotAge {
            sequence: snapshot.point.sequence,
            age: Nanos(age_ms.saturating_mul(Nanos::from_millis(1).0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EngineKind, FormatConfig, OpenConfig, WallClock};
    use octokv_base::BufferPool;
    use octokv_device::{Device, MemoryDevice, RamDisk};
    use octokv_runtime::block_on;
    use std::rc::Rc;

    #[test]
    fn stalls_are_those_that_writers_count() {
        let disk = RamDisk::new(16 << 20, 512).expect("memory");
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(disk));
        let config = OpenConfig {
            durability: crate::Durability::PowerSafe,
            cores: 1,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        };
        let format = FormatConfig { engine: EngineKind::Lsm, ..FormatConfig::default() };
        let pool = BufferPool::new(16 << 20);
        let volume = block_on(super::super::open(&device, &pool, config, &format), || ()).expect("opens");
        assert_eq!(volume.tree_statistics().stalls, StallStatistics::default());
        let state = &volume.compaction;
        state.waited_writes.store(1, Ordering::Relaxed);
        state.waited_ns.store(2, Ordering::Relaxed);
        state.delayed_writes.store(3, Ordering::Relaxed);
        state.delayed_ns.store(4, Ordering::Relaxed);
        let want =
            StallStatistics { waited_writes: 1, waited: Nanos(2), delayed_writes: 3, delayed: Nanos(4) };
        assert_eq!(volume.tree_statistics().stalls, want);
    }
}
