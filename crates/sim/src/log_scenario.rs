//! The plan of a simulation with the log engine, drawn from that of one node with any of the fault profiles.
//!
//! In: a seed. Out: a plan whose volume has some hundred chunks of a few units, and segments of a few entries, so that segments are
//! split, both logs are compacted and chunks are reused all the time; and whose node compacts, splits, and writes markers and
//! checkpoints at random times besides.

use crate::draw::{between, pick};
use crate::engine_plan::EnginePlan;
use crate::log_plan::LogPlan;
use crate::scenario::{FaultKind, KvScenarioPlan, Phase, Scenario, ScheduledFault};
use crate::scenario_draw::draw_cache_bytes;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};

/// Draws the plan of a seed.
pub fn draw_log_plan(seed: u64) -> KvScenarioPlan {
    let random = &mut Prng::new(mix64(seed ^ 0x1eed));
    let profiles = [
        Scenario::Calm,
        Scenario::Crashes,
        Scenario::Crashes,
        Scenario::Network,
        Scenario::Disk,
        Scenario::Everything,
        Scenario::Everything,
    ];
    let mut plan = KvScenarioPlan::draw(seed, pick(random, &profiles));
    let node = &mut plan.nodes[0];
    node.unit_bytes = pick(random, &[512, 512, 1024, 4096]);
    node.value_bytes_max = node.value_bytes_max.min(pick(random, &[4_096, 4_096, 20_000, 60_000]));
    let log = LogPlan::draw(random, node.unit_bytes, node.value_bytes_max);
    node.engine = EnginePlan::Log(log);
    node.disk.block_bytes = node.disk.block_bytes.min(node.unit_bytes);
    node.disk.size_bytes = log.disk_bytes();
    // It has owners by its stores.
    (node.has_owner_cores, node.cache_bytes) = (false, draw_cache_bytes(seed));
    if node.compact_bytes_per_second > 1 << 30 {
        // Rounds of compaction overlap only without a limit.
        node.compact_bytes_per_second = u64::MAX;
    }
    node.pool_bytes = node.pool_bytes.max(pick(random, &[1 << 20, 8 << 20]));
    let bytes_max = pick(random, &[200, 1_000, u64::MAX, u64::MAX]);
    plan.load.value_bytes_max = plan.load.value_bytes_max.min(node.value_bytes_max.into()).min(bytes_max);
    plan.load.keys = pick(random, &[8, 20, 64, 120, 300]);
    // A list has to hold all.
    plan.load.long_keys &= plan.load.keys <= 120;
    // More puts than elsewhere: they fill logs.
    plan.load.mix[0] += 25;
    if plan.load.keys == 8 {
        // The search for an order of the calls on a key is bounded.
        for host in &mut plan.hosts {
            (host.commands_max, host.sessions) = (host.commands_max.min(8), host.sessions.min(2));
        }
    }
    for phase in &mut plan.phases {
        add_slow_operations(phase, random);
    }
    plan
}

/// Makes single operations of the device slow: chunks are reused while they are read.
fn add_slow_operations(phase: &mut Phase, random: &mut Prng) {
    if random.one_in(2) {
        let one_in = pick(random, &[10, 40]);
        let kind = FaultKind::SlowDisk { node: 0, one_in, delay_max: Nanos::from_millis(60) };
        let duration = Nanos::from_millis(between(random, 100, 2_000));
        phase.faults.insert(0, ScheduledFault { after_commands: 0, duration, kind });
    }
}
