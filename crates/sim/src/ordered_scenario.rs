//! The plan of a simulation with the ordered engine, drawn from that of one node with any of the fault profiles.
//!
//! In: a seed. Out: a plan whose volume has memtables of a few entries, tables of a few blocks and segments of a few records, so
//! that flushes and compactions run all the time; whose clients scan beside their other commands; and whose node flushes,
//! compacts and writes checkpoints at random times besides.

use crate::draw::{between, pick};
use crate::scans::ScanLoad;
use crate::scenario::{FaultKind, KvScenarioPlan, Scenario};
use octokv_base::Prng;
use octokv_base::prng::mix64;
use octokv_engine::lsm::prefetch_degree::PrefetchMode;
use octokv_engine::lsm::settings::TreeSettings;

/// The smallest disk that a volume of the ordered engine fits, with some space for its segments, in bytes.
const DISK_BYTES_MIN: u64 = 9 << 20;

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
    fn draw(random: &mut Prng) -> TreePlan {
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
        settings.compaction.level1_bytes = 2 * self.table_bytes;
        settings.compaction.multiplier = 2;
        settings.compaction.input_bytes_max = 16 * self.table_bytes;
    }
}

/// Draws the plan of a seed.
pub fn draw_ordered_plan(seed: u64) -> KvScenarioPlan {
    let random = &mut Prng::new(mix64(seed ^ 0x04de4ed));
    let profiles =
        [Scenario::Calm, Scenario::Crashes, Scenario::Network, Scenario::Disk, Scenario::Everything];
    let mut plan = KvScenarioPlan::draw(seed, pick(random, &profiles));
    let node = &mut plan.nodes[0];
    node.tree = Some(TreePlan::draw(random));
    node.has_owner_cores = false;
    // The memory of blocks of tables.
    node.cache_bytes = pick(random, &[16 << 10, 1 << 20]);
    node.pool_bytes = node.pool_bytes.max(pick(random, &[1 << 20, 8 << 20]));
    node.disk.size_bytes += DISK_BYTES_MIN;
    if plan.load.keys < 8 {
        // The search for an order of the calls on a key is bounded.
        for host in &mut plan.hosts {
            (host.commands_max, host.sessions) = (host.commands_max.min(4), host.sessions.min(2));
        }
    }
    for fault in plan.phases.iter_mut().flat_map(|phase| &mut phase.faults) {
        if let FaultKind::DiskErrors { read_one_in, .. } = &mut fault.kind {
            // A failed read has the code of a medium that lost the block: flipped bits do that, and lose the same block again.
            *read_one_in = 0;
        }
    }
    plan.load.scans = Some(ScanLoad { one_in: between(random, 2, 6), open_max: pick(random, &[1, 3, 8]) });
    plan
}
