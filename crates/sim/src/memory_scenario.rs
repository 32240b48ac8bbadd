//! The plan of a simulation with keys in memory, drawn from that of one node.
//!
//! In: a seed. Out: a plan whose commands mostly end at once, beside commands that have to wait: device operations that take
//! time hold keys and buffers, queues and buffers are small, scheduling policies change, connections have digests. In two
//! thirds of the plans an operator removes and adds the namespace, denies hosts and changes ANA states. A stop of the node
//! loses all keys.

use crate::draw::{between, pick};
use crate::scenario::{FaultKind, KvScenarioPlan, Phase, PhaseEnd, Scenario, ScheduledFault};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::HostFailure;
use octokv_sched::Policy;

/// Draws the plan of a seed.
pub fn draw_memory_plan(seed: u64) -> KvScenarioPlan {
    let mut plan = KvScenarioPlan::draw(seed, Scenario::Memory);
    let random = &mut Prng::new(mix64(seed ^ 0x3e30));
    let node = &mut plan.nodes[0];
    node.is_in_memory = true;
    node.has_parallel_core = random.one_in(2);
    if node.has_parallel_core {
        // Its operations end at once; with a cache, only reads of what is in it do.
        node.cache_bytes = 0;
    }
    node.has_owner_cores = random.one_in(8);
    node.cores = between(random, 1, 4) as usize;
    node.in_capsule_bytes = pick(random, &[512, 4096, 16 << 10, 16 << 10]);
    node.disk.size_bytes = node.disk.size_bytes.min(8 << 20);
    if random.one_in(2) {
        // No policy for most of the time: then commands end at once.
        (node.scheduling.policy, node.scheduling.policy_intervals) = (Policy::None, 0);
        node.scheduling.operations_per_s = 0;
    }
    for host in &mut plan.hosts {
        (host.header_digest, host.data_digest) = (random.one_in(6), random.one_in(6));
        host.commands_max = pick(random, &[1, 8, 16, 32]);
        host.queue_depth = pick(random, &[1, 4, 32, 32]).min(plan.nodes[0].queue_depth - 1);
        host.think_time_max = if random.one_in(4) { host.think_time_max } else { Nanos::ZERO };
    }
    // Few keys, so that commands of one group meet on a key.
    plan.load.keys = pick(random, &[2, 4, 8, 20]);
    plan.load.long_keys = plan.nodes[0].in_capsule_bytes >= 1024;
    if plan.load.keys < 8 {
        // The search for an order of the calls on a key is bounded.
        for host in &mut plan.hosts {
            let commands_max = if plan.nodes[0].has_parallel_core { 4 } else { 8 };
            (host.commands_max, host.sessions) = (host.commands_max.min(commands_max), host.sessions.min(2));
        }
    }
    let has_network_faults = random.one_in(2);
    for phase in &mut plan.phases {
        if !has_network_faults {
            phase.faults.clear();
        }
        add_slow_operations(phase, random);
        phase.end = match random.below(4) {
            0 => PhaseEnd::Restart,
            1 => PhaseEnd::Crash {
                node: 0,
                stop: HostFailure::ProcessKilled,
                steps_before: random.below(60),
                crashes_in_recovery: Vec::new(),
            },
            _ => PhaseEnd::Quiesce,
        };
    }
    plan.operator_interval = (!random.one_in(3)).then(|| between(random, 10, 100));
    plan
}

/// Device operations that take time: their commands hold keys while others end at once.
fn add_slow_operations(phase: &mut Phase, random: &mut Prng) {
    for _ in 0..random.below(3) {
        let kind = FaultKind::SlowDisk {
            node: 0,
            one_in: pick(random, &[1, 2, 8]),
            delay_max: Nanos::from_micros(pick(random, &[10, 200, 2_000])),
        };
        phase.faults.push(ScheduledFault {
            after_commands: random.below(phase.operations),
            duration: Nanos::from_micros(between(random, 1_000, 100_000)),
            kind,
        });
    }
    phase.faults.sort_by_key(|fault| fault.after_commands);
}
