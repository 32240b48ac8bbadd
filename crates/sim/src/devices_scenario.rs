//! The plan of a simulation with a volume on several devices, of any engine, drawn from that of one node.
//!
//! In: a seed. Out: a plan whose node has two to four disks, which are given to it in another order at each start, and whose power is lost on all of them at once.

use crate::draw::{between, pick};
use crate::engine_plan::EnginePlan;
use crate::scans::ScanLoad;
use crate::scenario::{FaultKind, KvScenarioPlan, NodePlan, Phase, PhaseEnd, Scenario, ScheduledFault};
use crate::sim_node::DEVICE_TIMEOUT;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_engine::{Durability, EngineKind, HashKind};
use octokv_runtime::simulated::{CrashModel, HostFailure};

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
    draw_additions(&mut plan, &mut Prng::new(mix64(seed ^ 0x9407)));
    draw_roles(&mut plan.nodes[0], &mut Prng::new(mix64(seed ^ 0x401e5)));
    plan
}

/// Draws the cores that are for drives alone, in a third of the plans with several cores.
fn draw_roles(node: &mut NodePlan, random: &mut Prng) {
    if node.cores > 1 && random.one_in(3) {
        node.drive_cores = between(random, 1, node.cores as u64 - 1) as usize;
        // They have the place of owners.
        node.has_owner_cores = false;
    }
}

/// Draws the disks that are added: one or two in half of the plans. By a generator of its own: the other draws of a seed do not depend on it.
fn draw_additions(plan: &mut KvScenarioPlan, random: &mut Prng) {
    let node = &mut plan.nodes[0];
    if !random.one_in(2) {
        return;
    }
    plan.load.keys = pick(random, &[8, 20, 64, 64]);
    let (key_bytes, values_bytes) = (8 << 10, plan.load.keys * plan.load.value_bytes_max);
    // No disk is full: then all partitions move that have to.
    node.disk.size_bytes += (2 * (values_bytes + plan.load.keys * key_bytes)).next_multiple_of(4096);
    // The moves take a part of a millisecond for a key, or several of them.
    node.compact_bytes_per_second = pick(random, &[u64::MAX, 16 << 20, 4 << 20, 1 << 20]);
    if random.one_in(3) {
        node.durability = Durability::Completed;
    }
    let (mut before, mut due_at) = (0, Vec::new());
    for &Phase { operations, .. } in &plan.phases {
        // Near the end of a phase moves are cut by it.
        let from = if random.one_in(2) { operations - operations.min(40) } else { 0 };
        due_at.push(before + from + random.below(operations - from));
        before += operations;
    }
    let count = if random.one_in(3) { 2 } else { 1 };
    for addition in &mut node.additions[..count] {
        *addition = due_at.remove(random.below(due_at.len() as u64) as usize);
    }
    node.additions.sort_unstable();
    let disks = node.devices as u64 + count as u64;
    for phase in &mut plan.phases {
        if let PhaseEnd::Crash { stop, .. } = &mut phase.end
            && random.one_in(2)
        {
            // Of the writes of a superblock and of those in front of it, some are kept.
            *stop = HostFailure::PowerLoss(CrashModel::RandomWrites);
        }
        for fault in &mut phase.faults {
            if let FaultKind::SlowDisk { one_in, delay_max, .. } = &mut fault.kind {
                // Few operations that are late by much, beside which others go on.
                *one_in = pick(random, &[10, 20, 40]);
                *delay_max = Nanos::from_millis(pick(random, &[20, 50]));
            }
            if let FaultKind::HangDisk { node, .. } = fault.kind {
                let disk = random.below(disks) as usize;
                fault.after_commands = random.below(phase.operations.min(120));
                fault.kind = match random.one_in(2) {
                    true => FaultKind::HangDisk { node, disk },
                    false => FaultKind::PullDisk { node, disk },
                };
            }
        }
        let fails = |fault: &ScheduledFault| {
            matches!(fault.kind, FaultKind::HangDisk { .. } | FaultKind::PullDisk { .. })
        };
        if !phase.faults.iter().any(fails) && random.one_in(4) {
            let kind = FaultKind::DiskErrors {
                node: 0,
                read_one_in: pick(random, &[0, 20, 100]),
                write_one_in: pick(random, &[0, 0, 30, 200]),
                flush_one_in: pick(random, &[0, 0, 30]),
            };
            let duration = Nanos::from_millis(between(random, 2, 100));
            let after_commands = random.below(phase.operations);
            phase.faults.push(ScheduledFault { after_commands, duration, kind });
        }
        phase.faults.sort_by_key(|fault| fault.after_commands);
    }
}
