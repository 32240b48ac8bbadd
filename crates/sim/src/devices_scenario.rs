//! The plan of a simulation with a volume on several devices, of any engine, drawn from that of one node.
//!
//! In: a seed. Out: a plan whose node has two to four disks, which are given to it in another order at each start, and whose power is lost on all of them at once.

use crate::draw::{between, pick};
use crate::engine_plan::EnginePlan;
use crate::scans::ScanLoad;
use crate::scenario::{FaultKind, KvScenarioPlan, PhaseEnd, Scenario, ScheduledFault};
use crate::sim_node::DEVICE_TIMEOUT;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_engine::{EngineKind, HashKind};

/// The least that a swap region takes.
const SWAP_BYTES: u64 = 18 << 20;

/// Draws the plan of a seed.
pub fn draw_devices_plan(seed: u64) -> KvScenarioPlan {
    let random = &mut Prng::new(mix64(seed ^ 0xde71ce5));
    let profiles = [Scenario::Calm, Scenario::Crashes, Scenario::Crashes, Scenario::Network];
    let mut plan = KvScenarioPlan::draw(seed, pick(random, &profiles));
    let node = &mut plan.nodes[0];
    let kind = pick(random, &EngineKind::ALL);
    node.engine = EnginePlan::AsConfigured(kind);
    node.devices = between(random, 2, 4) as usize;
    // The ring of several devices is that of XXH3.
    node.hash = HashKind::Xxh3;
    node.disk.size_bytes += SUPERBLOCK_AREA_BYTES;
    if kind != EngineKind::Hash {
        node.has_owner_cores = false;
        // The least that volumes of these engines take.
        node.disk.size_bytes += 20 << 20;
        node.pool_bytes = node.pool_bytes.max(8 << 20);
        node.compact_bytes_per_second = u64::MAX;
    }
    if kind == EngineKind::Lsm {
        node.cache_bytes = pick(random, &[64 << 10, 4 << 20]);
        plan.load.scans =
            Some(ScanLoad { one_in: between(random, 2, 6), open_max: pick(random, &[1, 3, 8]) });
    }
    if plan.load.keys < 8 {
        // The search for an order of the calls on a key is bounded.
        for host in &mut plan.hosts {
            (host.commands_max, host.sessions) = (host.commands_max.min(4), host.sessions.min(2));
        }
    }
    plan.nodes[0].replaces_disks = random.one_in(2);
    if kind != EngineKind::Lsm && plan.nodes[0].format_version > 1 && random.one_in(2) {
        let node = &mut plan.nodes[0];
        node.swap_bytes = SWAP_BYTES;
        node.swap_gap = pick(random, &[0, 1, 3, 8]);
        node.disk.size_bytes += SWAP_BYTES;
    }
    let disks = plan.nodes[0].devices as u64;
    for phase in &mut plan.phases {
        if random.one_in(3) {
            let kind = FaultKind::HangDisk { node: 0, disk: random.below(disks) as usize };
            let after_commands = random.below(30);
            phase.faults.insert(0, ScheduledFault { after_commands, duration: DEVICE_TIMEOUT, kind });
            // It has failed until the node is started again.
            if matches!(phase.end, PhaseEnd::Quiesce) {
                phase.end = PhaseEnd::Restart;
            }
        } else if random.one_in(2) {
            let kind = FaultKind::SlowDisk { node: 0, one_in: 10, delay_max: Nanos::from_millis(20) };
            let duration = Nanos::from_millis(between(random, 100, 2_000));
            phase.faults.insert(0, ScheduledFault { after_commands: 0, duration, kind });
        }
    }
    if random.one_in(2) {
        // Of a capacity of 512 at first: from eight Puts at a time to one, so that commands wait.
        plan.nodes[0].put_tokens = pick(random, &[64, 200, 512]);
    }
    plan
}
