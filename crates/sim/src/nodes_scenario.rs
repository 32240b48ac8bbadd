//! The plan of a simulation with many nodes, drawn from that of one node.
//!
//! In: a seed. Out: a plan with [`NODES`] equal nodes, a clock for each host, and faults of any
//! node: those of one node, links cut one way, pauses, drifting clocks, lost disks. One in three plans has no fault but
//! clocks that drift, and clients that pause longer than their keep-alive timeout: no connection may be lost.

use crate::draw::{between, pick};
use crate::scenario::{
    ClientHostPlan, FaultKind, FaultedHost, KvScenarioPlan, NodePlan, Phase, PhaseEnd, Scenario,
    ScheduledFault,
};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::SimClock;

/// The number of nodes.
pub const NODES: usize = 3;
/// The greatest drift without a fault, in parts per million. A client sends a Keep Alive after half of the timeout.
const DRIFT_MAX_PPM: u64 = 200_000;
/// The greatest drift by a fault.
const FAULTY_DRIFT_MAX_PPM: u64 = 450_000;

/// Draws the plan of a seed.
pub fn draw_nodes_plan(seed: u64) -> KvScenarioPlan {
    let mut plan = KvScenarioPlan::draw(seed, Scenario::Nodes);
    let random = &mut Prng::new(mix64(seed ^ 0x40de));
    plan.nodes = vec![NodePlan { prepare_bytes: 0, compact_bytes_per_second: 0, ..plan.nodes[0] }; NODES];
    // A client host has at least a session for each node.
    plan.hosts.iter_mut().for_each(|host| host.sessions = host.sessions.max(NODES));
    plan.clocks = (0..NODES + plan.hosts.len()).map(|_| draw_clock(random)).collect();
    plan.keeps_connections = random.one_in(3);
    let sessions: u64 = plan.hosts.iter().map(|host| host.sessions as u64).sum();
    for phase in &mut plan.phases {
        if plan.keeps_connections {
            phase.faults.clear();
            phase.end = PhaseEnd::Quiesce;
            // So few that they end within the time in which a phase must make progress.
            phase.operations = 8 * sessions;
        } else {
            choose_nodes(phase, random);
            add_faults(phase, plan.hosts.len(), random);
        }
    }
    if plan.keeps_connections {
        plan.hosts.iter_mut().for_each(make_slow);
    }
    plan
}

fn draw_clock(random: &mut Prng) -> SimClock {
    let offset = pick(random, &[Nanos::ZERO, Nanos::from_millis(7), Nanos::from_secs(100_000_000)]);
    SimClock::new(offset, draw_drift(random, DRIFT_MAX_PPM))
}

fn draw_drift(random: &mut Prng, most: u64) -> i64 {
    between(random, 0, 2 * most) as i64 - most as i64
}

/// A client whose only traffic is, most of the time, its Keep Alive.
fn make_slow(host: &mut ClientHostPlan) {
    host.think_time_max = Nanos(host.keep_alive.0 * 3);
    host.command_timeout = Nanos::from_secs(5);
}

/// Draws the node of each fault and of the end of a phase.
fn choose_nodes(phase: &mut Phase, random: &mut Prng) {
    for fault in &mut phase.faults {
        match &mut fault.kind {
            FaultKind::ConnectionReset { node, .. }
            | FaultKind::Partition { node, .. }
            | FaultKind::LinkCut { node, .. }
            | FaultKind::SlowLink { node, .. }
            | FaultKind::SlowDisk { node, .. }
            | FaultKind::DiskErrors { node, .. }
            | FaultKind::HangDisk { node, .. }
            | FaultKind::PullDisk { node, .. } => *node = random.below(NODES as u64) as usize,
            FaultKind::ClientHostCrash { .. } | FaultKind::Pause { .. } | FaultKind::ClockDrift { .. } => {}
        }
    }
    let any = random.below(NODES as u64) as usize;
    match &mut phase.end {
        PhaseEnd::Crash { node, .. } => *node = any,
        // Which bits a node's disk has is left to the scenarios of one node.
        PhaseEnd::CorruptBits { .. } => {
            phase.end = PhaseEnd::LoseDisk { node: any, steps: random.below(200) }
        }
        PhaseEnd::LoseDisk { .. } | PhaseEnd::Quiesce | PhaseEnd::Restart => {}
    }
}

fn add_faults(phase: &mut Phase, clients: usize, random: &mut Prng) {
    for _ in 0..between(random, 1, 4) {
        let (node, host) = (random.below(NODES as u64) as usize, random.below(clients as u64) as usize);
        let faulted = if random.one_in(2) { FaultedHost::Node(node) } else { FaultedHost::Client(host) };
        let kind = match random.below(3) {
            0 => FaultKind::LinkCut { host, node, to_node: random.one_in(2) },
            1 => FaultKind::Pause { host: faulted },
            _ => {
                let drift_ppm = draw_drift(random, FAULTY_DRIFT_MAX_PPM);
                FaultKind::ClockDrift { host: faulted, drift_ppm }
            }
        };
        let longest = pick(random, &[2_000, 50_000, 3_000_000]);
        phase.faults.push(ScheduledFault {
            after_commands: random.below(phase.operations),
            duration: Nanos::from_micros(between(random, 100, longest)),
            kind,
        });
    }
    phase.faults.sort_by_key(|fault| fault.after_commands);
}
