//! The sizes with which a tree works, by the size of its volume.
//!
//! Small volumes have small parts, so that a tenth of the space holds several memtables, tables and segments, and so that a test meets what a large volume meets.

use super::compaction::CompactionSettings;
use super::level_cursor::LevelCursorConfig;
use super::memtables::MemtableBounds;
use super::pacing::PacingSettings;
use super::prefetch_degree::PrefetchMode;
use crate::OpenConfig;
use crate::common::volume_layout::VolumeLayout;
use octokv_base::Nanos;

/// The sizes with which a tree works.
#[derive(Clone, Debug)]
pub struct TreeSettings {
    /// A memtable of so many bytes is flushed.
    pub memtable_bytes: usize,
    /// The most memtables that wait for their flush: a put that finds more flushes one itself.
    pub memtables_max: usize,
    /// From so many tombstones on, which are half of its entries or more, the active memtable is flushed before it is full, if that leads to a short compaction: a seek steps
    /// over each of them, and over what it replaced.
    pub tombstones_max: usize,
    /// The most bytes of a table, with all that it consists of, but for one with many entries of one key.
    pub table_bytes: u64,
    /// The length of a value segment in bytes. A longer record has one of its own.
    pub segment_bytes: u64,
    /// Space that only flushes and compactions take, in bytes, so that a full volume can be emptied.
    pub reserve_bytes: u64,
    /// Memory for blocks of tables, in bytes.
    pub cache_bytes: u64,
    /// The most snapshots, and so iterators.
    pub snapshots_max: usize,
    /// An iterator that is not used for so long ends.
    pub iterator_idle: Nanos,
    /// How many values an iterator reads ahead of the next one.
    pub prefetch: PrefetchMode,
    /// What all iterators hold ahead at most, in bytes of values.
    pub prefetch_bytes_max: u64,
    /// How an iterator reads tables.
    pub iterator_cursors: LevelCursorConfig,
    /// The views that a core keeps open, of iterators that it advanced last.
    pub views_max: usize,
    /// What is compacted.
    pub compaction: CompactionSettings,
    /// How fast.
    pub pacing: PacingSettings,
    /// Whether the blocks of tables are compressed.
    pub compresses: bool,
}

/// The fewest bytes of the run of a table whose keys have so many bytes. Shorter runs that are free are not used: an image has two keys of each table.
pub fn run_bytes_least(key_bytes: usize) -> u64 {
    (8 << 10).max(32 * key_bytes as u64)
}

impl TreeSettings {
    /// When a memtable is full. Of values that lie apart it has a part of the reserve at most: puts that replace others then wait for no flush.
    pub fn memtable_bounds(&self) -> MemtableBounds {
        MemtableBounds { memory_bytes: self.memtable_bytes, written_bytes: self.reserve_bytes / 4 }
    }

    /// Those of a volume. `cache_bytes`: memory for blocks of tables; 0 selects a size by that of the volume.
    pub fn for_layout(layout: &VolumeLayout, cache_bytes: u64) -> TreeSettings {
        let unit_bytes = u64::from(layout.unit_bytes);
        let data_bytes = layout.data_units * unit_bytes;
        let ring_bytes = u64::from(layout.journal_units) * unit_bytes;
        let memtable_bytes = (ring_bytes / 8).min(data_bytes / 64).clamp(64 << 10, 64 << 20);
        // An image has the first and last key of each table: the areas hold those of so many.
        let table_bytes = (data_bytes / 128).clamp(64 << 10, 16 << 20);
        let segment_bytes = (data_bytes / 256).clamp(256 << 10, 64 << 20);
        let input_bytes_max = 16 * table_bytes.max(memtable_bytes / 4);
        TreeSettings {
            memtable_bytes: memtable_bytes as usize,
            memtables_max: 4,
            tombstones_max: 16 << 10,
            table_bytes,
            segment_bytes,
            reserve_bytes: data_bytes / 16 + 4 * memtable_bytes,
            cache_bytes: if cache_bytes > 0 {
                cache_bytes
            } else {
                (data_bytes / 64).clamp(1 << 20, 64 << 20)
            },
            snapshots_max: 4096,
            iterator_idle: OpenConfig::TREE.iterator_idle,
            prefetch: OpenConfig::TREE.prefetch,
            prefetch_bytes_max: 64 << 20,
            iterator_cursors: LevelCursorConfig::ITERATOR,
            views_max: 64,
            compaction: CompactionSettings {
                level1_bytes: 4 * memtable_bytes,
                input_bytes_max,
                moved_bytes_max: input_bytes_max,
                parallel_max: 1,
                unit_bytes,
                ..CompactionSettings::default()
            },
            pacing: PacingSettings {
                pending_soft_bytes: data_bytes / 16,
                pending_hard_bytes: data_bytes / 4,
                space_soft_bytes: input_bytes_max.min(data_bytes / 16),
                ..PacingSettings::default()
            },
            compresses: OpenConfig::TREE.compresses,
        }
    }
}
