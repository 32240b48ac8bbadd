//! The plan of a simulation with the ordered engine, drawn from that of one node with any of the fault profiles.
//!
//! In: a seed. Out: a plan whose volume has memtables of a few entries, tables of a few blocks and segments of a few records, so
//! that flushes and compactions run all the time; whose clients scan beside their other commands; and whose node flushes,
//! compacts and writes checkpoints at random times besides.

use crate::draw::{between, pick};
use crate::engine_plan::EnginePlan;
use crate::scans::ScanLoad;
use crate::scenario::{KvScenarioPlan, Scenario};
use crate::tree_plan::TreePlan;
use octokv_base::Prng;
use octokv_base::prng::mix64;

/// The smallest disk that a volume of the ordered engine fits, with some space for its segments, in bytes.
const DISK_BYTES_MIN: u64 = 9 << 20;

/// Draws the plan of a seed.
pub fn draw_ordered_plan(seed: u64) -> KvScenarioPlan {
    let random = &mut Prng::new(mix64(seed ^ 0x04de4ed));
    let profiles =
        [Scenario::Calm, Scenario::Crashes, Scenario::Network, Scenario::Disk, Scenario::Everything];
    let mut plan = KvScenarioPlan::draw(seed, pick(random, &profiles));
    let node = &mut plan.nodes[0];
    node.engine = EnginePlan::Tree(TreePlan::draw(random));
    node.has_owner_cores = false;
    // The memory of blocks of tables.
    node.cache_bytes = pick(random, &[16 << 10, 1 << 20]);
    if node.compact_bytes_per_second == 0 {
        // Of the hash engine's plan: without compaction there is no tree of several levels.
        node.compact_bytes_per_second = u64::MAX;
    }
    node.pool_bytes = node.pool_bytes.max(pick(random, &[1 << 20, 8 << 20]));
    node.disk.size_bytes += DISK_BYTES_MIN;
    if plan.load.keys < 8 {
        // The search for an order of the calls on a key is bounded.
        for host in &mut plan.hosts {
            (host.commands_max, host.sessions) = (host.commands_max.min(4), host.sessions.min(2));
        }
    }
    plan.load.scans = Some(ScanLoad { one_in: between(random, 2, 6), open_max: pick(random, &[1, 3, 8]) });
    plan
}
