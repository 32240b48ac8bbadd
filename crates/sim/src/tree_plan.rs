//! The sizes of a simulated volume of the ordered engine.
//!
//! In: random numbers. Out: sizes so small that memtables, tables and segments of a few entries come and go all the time.

use crate::draw::{between, pick};
use octokv_base::Prng;
use octokv_engine::lsm::prefetch_degree::PrefetchMode;
use octokv_engine::lsm::settings::TreeSettings;

/// The parts of a volume of the ordered engine. Lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct TreePlan {
    /// Values below this length lie in the tree.
    pub inline_bytes_max: u32,
    /// Of a memtable. An empty one takes some tens of KiB, so that the smallest has one entry.
    pub memtable_bytes: usize,
    /// Of a table.
    pub table_bytes: u64,
    /// Of a value segment.
    pub segment_bytes: u64,
    /// Tables of level 0 from which on it is compacted.
    pub level0_trigger: usize,
    /// The most snapshots.
    pub snapshots_max: usize,
    /// The views that a core keeps.
    pub views_max: usize,
    /// Values that an iterator reads ahead.
    pub prefetch_degree: u32,
    /// Mean number of completed commands between flushes, compactions and checkpoints that no one needs.
    pub work_interval: u64,
}

impl TreePlan {
    pub(crate) fn draw(random: &mut Prng) -> TreePlan {
        let memtable_bytes = pick(random, &[1 << 10, 48 << 10, 96 << 10]);
        TreePlan {
            inline_bytes_max: pick(random, &[1, 40, 300, 4_096]),
            memtable_bytes,
            table_bytes: pick(random, &[2 << 10, 6 << 10, 32 << 10]),
            segment_bytes: pick(random, &[16 << 10, 64 << 10, 256 << 10]),
            level0_trigger: between(random, 1, 4) as usize,
            snapshots_max: pick(random, &[2, 40, 40]),
            views_max: pick(random, &[1, 4, 64]),
            prefetch_degree: pick(random, &[0, 1, 4, 16]),
            work_interval: between(random, 4, 60),
        }
    }

    /// Applies the plan to the sizes of a volume.
    pub fn adjust(&self, settings: &mut TreeSettings) {
        settings.memtable_bytes = self.memtable_bytes;
        settings.table_bytes = self.table_bytes;
        settings.segment_bytes = self.segment_bytes;
        settings.reserve_bytes = settings.reserve_bytes.min(1 << 20);
        settings.snapshots_max = self.snapshots_max;
        settings.views_max = self.views_max;
        settings.prefetch = PrefetchMode::Fixed(self.prefetch_degree);
        settings.compaction.level0_trigger = self.level0_trigger;
        settings.pacing.level0_soft = self.level0_trigger + 1;
        settings.pacing.level0_hard = 4 * self.level0_trigger + 4;
        settings.compaction.level1_bytes = 2 * self.table_bytes;
        settings.compaction.multiplier = 2;
        settings.compaction.input_bytes_max = 16 * self.table_bytes;
    }
}
