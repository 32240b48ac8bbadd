//! Draws the plan of one simulation with one node from a seed.
//!
//! In: a seed and a [`Scenario`]. Out: a [`KvScenarioPlan`], a pure function of both; the parts, for plans of other kinds.

use crate::draw::{between, pick};
use crate::engine_plan::EnginePlan;
use crate::scenario::{
    ClientHostPlan, FaultKind, KvLoad, KvScenarioPlan, NodePlan, Phase, PhaseEnd, Scenario, ScheduledFault,
};
use crate::scheduling_scenario::SchedulingPlan;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::{Durability, HashKind};
use octokv_runtime::simulated::{CrashModel, HostFailure, SimDiskConfig, SimLinkConfig};

impl KvScenarioPlan {
    /// Draws the plan of a seed and scenario, with one node.
    pub fn draw(seed: u64, scenario: Scenario) -> KvScenarioPlan {
        let mut random = Prng::new(mix64(seed.wrapping_mul(8) + scenario as u64));
        let random = &mut random;
        let mut node = draw_node(random);
        // A generator of its own: the other draws of a seed do not depend on it.
        node.has_owner_cores = Prng::new(mix64(seed ^ 0x0e4e)).one_in(3);
        node.cache_bytes = draw_cache_bytes(seed);
        node.prepare_bytes = draw_prepare_bytes(seed);
        node.compact_bytes_per_second = draw_compact_bytes_per_second(seed);
        node.format_version = draw_format_version(seed);
        if random.one_in(2) {
            // A small disk makes the engine reuse space soon.
            let data_bytes = u64::from(node.value_bytes_max) * between(random, 2, 8);
            node.disk.size_bytes = (7 << 17) + data_bytes.next_multiple_of(4096);
        }
        let count = between(random, 1, 3);
        let hosts: Vec<ClientHostPlan> = (0..count).map(|_| draw_host(random, scenario, &node)).collect();
        let count = between(random, 2, 5);
        let phases: Vec<Phase> = (0..count).map(|_| draw_phase(random, scenario, hosts.len())).collect();
        let load = draw_load(random, &node);
        KvScenarioPlan {
            seed,
            scenario,
            nodes: vec![node],
            clocks: Vec::new(),
            keeps_connections: false,
            hosts,
            load,
            link: draw_link(random),
            iteration_cost: Nanos(between(random, 200, 4_000)),
            phases,
            operator_interval: None,
        }
    }
}

/// The cache of a seed: none in two thirds of them; else one that evicts, one that does sometimes, or one that holds
/// everything. A generator of its own: the other draws of a seed do not depend on it.
pub(crate) fn draw_cache_bytes(seed: u64) -> u64 {
    let mut random = Prng::new(mix64(seed ^ 0xcac4e));
    if random.one_in(3) { pick(&mut random, &[16 << 10, 64 << 10, 4 << 20]) } else { 0 }
}

/// The preparation of a seed: none in a third of them; else little ahead, some, or everything. A generator of its own, as
/// above.
pub(crate) fn draw_prepare_bytes(seed: u64) -> u64 {
    let mut random = Prng::new(mix64(seed ^ 0x9e7a));
    pick(&mut random, &[0, 32 << 10, 256 << 10, 1 << 20, 1 << 30, 0])
}

/// The rate of compaction of a seed: none in a third; else slow, or as fast as the disk. A generator of its own, as above.
pub(crate) fn draw_compact_bytes_per_second(seed: u64) -> u64 {
    let mut random = Prng::new(mix64(seed ^ 0xc03bac7));
    pick(&mut random, &[0, 16 << 20, 1 << 40])
}

/// The version of the engine's format of a seed, by a generator of its own.
pub(crate) fn draw_format_version(seed: u64) -> u16 {
    if Prng::new(mix64(seed ^ 0xf0e4a7)).one_in(2) { 2 } else { 1 }
}

pub(crate) fn draw_node(random: &mut Prng) -> NodePlan {
    let unit_bytes = pick(random, &[512, 1024, 4096, 4096]);
    let block_bytes = if random.one_in(2) { 512 } else { unit_bytes };
    let value_bytes_max = pick(random, &[4_096, 8 << 10, 40_000, 200_000]);
    let data_bytes = u64::from(value_bytes_max) * between(random, 20, 100);
    let disk = SimDiskConfig {
        size_bytes: (3 << 20) + data_bytes.next_multiple_of(4096),
        block_bytes,
        read_latency: Nanos::from_micros(between(random, 5, 90)),
        write_latency: Nanos::from_micros(between(random, 5, 40)),
        flush_latency: Nanos::from_micros(between(random, 1, 400)),
        jitter: Nanos::from_micros(between(random, 0, 60)),
        bytes_per_second: pick(random, &[0, 200_000_000, 2_000_000_000]),
        parallelism: between(random, 1, 16) as usize,
    };
    NodePlan {
        cores: between(random, 1, 4) as usize,
        engine: EnginePlan::Hash,
        unit_bytes,
        hash: pick(random, &[HashKind::Xxh3, HashKind::Sha1]),
        format_version: 1,
        partitions_log2: random.below(5) as u8,
        value_bytes_max,
        durability: pick(random, &[Durability::PowerSafe, Durability::PowerSafe, Durability::Completed]),
        pool_bytes: pick(random, &[5, 8, 100]) * (value_bytes_max as usize + 8192),
        device_depth: pick(random, &[1, 4, 32, 128]),
        requests_max: pick(random, &[1, 3, 16, 256]),
        drive_cores: 0,
        has_owner_cores: false,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        queue_depth: pick(random, &[2, 5, 32, 256]),
        in_capsule_bytes: pick(random, &[0, 512, 4096, 16 << 10]),
        max_h2c_data: pick(random, &[4096, 16 << 10, 512 << 10]),
        receive_bytes_max: pick(random, &[1, 4, 100]) * (value_bytes_max as usize + 8192),
        send_buffer_bytes_max: pick(random, &[4096, 100_000, 16 << 20]),
        disk,
        devices: 1,
        is_in_memory: false,
        has_parallel_core: false,
        replaces_disks: false,
        additions: [u64::MAX; 2],
        swap_bytes: 0,
        swap_gap: 0,
        put_tokens: 0,
        // A clone of the generator: the scheduling plan does not change the draws that follow.
        scheduling: SchedulingPlan::draw(&mut random.clone()),
    }
}

pub(crate) fn draw_host(random: &mut Prng, scenario: Scenario, node: &NodePlan) -> ClientHostPlan {
    let short_timeout = scenario.has_network_faults() && random.one_in(2);
    ClientHostPlan {
        sessions: between(random, 1, 3) as usize,
        queues: between(random, 1, 3) as u16,
        queue_depth: (pick(random, &[1, 4, 32])).min(node.queue_depth - 1),
        commands_max: pick(random, &[1, 3, 8, 16]),
        header_digest: random.one_in(2),
        data_digest: random.one_in(2),
        command_timeout: if short_timeout {
            Nanos::from_millis(between(random, 20, 200))
        } else {
            Nanos::from_secs(5)
        },
        keep_alive: Nanos::from_millis(between(random, 200, 2_000)),
        think_time_max: if random.one_in(3) {
            Nanos::from_micros(between(random, 10, 2_000))
        } else {
            Nanos::ZERO
        },
    }
}

pub(crate) fn draw_load(random: &mut Prng, node: &NodePlan) -> KvLoad {
    let some = |random: &mut Prng, most: u64| random.below(most + 1);
    let mut mix =
        [10 + some(random, 30), some(random, 10), some(random, 10), 10 + some(random, 40), 0, 0, 0, 0, 0];
    mix[4] = some(random, 5);
    mix[5] = some(random, 25);
    mix[6] = some(random, 10);
    mix[7] = some(random, 2);
    mix[8] = some(random, 3);
    let bytes = pick(random, &[64, 2_000, u64::MAX, u64::MAX]).min(u64::from(node.value_bytes_max));
    let long_keys = node.in_capsule_bytes >= 1024;
    KvLoad { keys: pick(random, &[3, 8, 20, 64]), long_keys, value_bytes_max: bytes, mix, scans: None }
}

pub(crate) fn draw_link(random: &mut Prng) -> SimLinkConfig {
    SimLinkConfig {
        latency: Nanos::from_micros(between(random, 1, 100)),
        jitter: Nanos::from_micros(between(random, 0, 50)),
        bytes_per_second: pick(random, &[0, 100_000_000, 3_000_000_000]),
        window_bytes: pick(random, &[8 << 10, 128 << 10, 1 << 20]),
        fragments: random.one_in(2),
    }
}

pub(crate) fn draw_phase(random: &mut Prng, scenario: Scenario, hosts: usize) -> Phase {
    let operations = between(random, 60, 500);
    let mut faults = Vec::new();
    let count = if scenario == Scenario::Calm { 0 } else { random.below(5) };
    for _ in 0..count {
        let Some(kind) = draw_fault(random, scenario, hosts) else { continue };
        let longest = pick(random, &[2_000, 50_000, 900_000]);
        let lasts = Nanos::from_micros(between(random, 100, longest));
        faults.push(ScheduledFault { after_commands: random.below(operations), duration: lasts, kind });
    }
    faults.sort_by_key(|fault| fault.after_commands);
    Phase { operations, faults, end: draw_phase_end(random, scenario) }
}

pub(crate) fn draw_stop(random: &mut Prng) -> HostFailure {
    let plans = [CrashModel::KeepAll, CrashModel::LoseAll, CrashModel::RandomWrites, CrashModel::TornWrites];
    match random.below(3) {
        0 => HostFailure::ProcessKilled,
        _ => HostFailure::PowerLoss(pick(random, &plans)),
    }
}

fn draw_fault(random: &mut Prng, scenario: Scenario, hosts: usize) -> Option<FaultKind> {
    let host = random.below(hosts as u64) as usize;
    let network = scenario.has_network_faults() && (!scenario.has_disk_faults() || random.one_in(2));
    if network {
        return Some(match random.below(5) {
            0 | 1 => FaultKind::ConnectionReset { host, node: 0 },
            2 => FaultKind::Partition { host, node: 0 },
            3 => {
                let link = SimLinkConfig {
                    latency: Nanos::from_micros(between(random, 100, 20_000)),
                    jitter: Nanos::from_micros(between(random, 0, 20_000)),
                    bytes_per_second: pick(random, &[500_000, 5_000_000]),
                    window_bytes: pick(random, &[1_000, 16 << 10]),
                    fragments: true,
                };
                FaultKind::SlowLink { host, node: 0, link }
            }
            _ => FaultKind::ClientHostCrash { host, stop: draw_stop(random) },
        });
    }
    if !scenario.has_disk_faults() {
        return None;
    }
    Some(match random.below(3) {
        0 => FaultKind::SlowDisk {
            node: 0,
            one_in: pick(random, &[1, 3, 20]),
            delay_max: Nanos::from_micros(pick(random, &[200, 5_000, 60_000])),
        },
        1 => FaultKind::DiskErrors {
            node: 0,
            read_one_in: between(random, 3, 60),
            write_one_in: 0,
            flush_one_in: 0,
        },
        _ => {
            let rate = |random: &mut Prng| pick(random, &[0, 5, 40]);
            FaultKind::DiskErrors {
                node: 0,
                read_one_in: rate(random),
                write_one_in: rate(random),
                flush_one_in: rate(random),
            }
        }
    })
}

fn draw_phase_end(random: &mut Prng, scenario: Scenario) -> PhaseEnd {
    if scenario.has_disk_faults() && random.one_in(2) {
        return PhaseEnd::CorruptBits {
            records: random.below(4),
            metadata: random.one_in(3),
            restart: random.one_in(2),
        };
    }
    if scenario.has_crashes() && !random.one_in(6) {
        let mut again = Vec::new();
        while random.one_in(3) {
            again.push((Nanos::from_micros(between(random, 1, 3_000)), draw_stop(random)));
        }
        return PhaseEnd::Crash {
            node: 0,
            stop: draw_stop(random),
            steps_before: random.below(60),
            crashes_in_recovery: again,
        };
    }
    if random.one_in(2) { PhaseEnd::Quiesce } else { PhaseEnd::Restart }
}
