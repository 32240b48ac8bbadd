//! The plan of one simulation, drawn from one seed: configuration, clients, load, faults, phase ends.
//!
//! In: a seed and a [`Scenario`]. Out: a [`KvScenarioPlan`], a pure function of both; `{:#?}` of it prints every input of a seed.

use crate::draw::{between, pick};
use crate::scans::ScanLoad;
use crate::scheduling_scenario::SchedulingPlan;
use crate::tree_plan::TreePlan;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::Durability;
use octokv_engine::HashKind;
use octokv_runtime::simulated::{CrashModel, HostFailure, SimClock, SimDiskConfig, SimLinkConfig};

/// Kind of faults that a simulation injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// None: clients connect and disconnect, the node shuts down cleanly and restarts.
    Calm,
    /// Process kills and power losses of the node, also during recovery.
    Crashes,
    /// Connection resets, partitions, slow links, crashes of client hosts.
    Network,
    /// Device errors, delays and bit flips.
    Disk,
    /// All of the above.
    Everything,
    /// Block namespaces, with any of the fault profiles above.
    Blocks,
    /// Like `Blocks`, with an operator that adds and removes namespaces, denies hosts and changes ANA states.
    Namespaces,
    /// The hash engine on a client, over a block namespace of the node.
    Remote,
    /// Three nodes with clocks of their own; network faults, links cut one way, pauses, drifting clocks, crashes of one
    /// node, disk faults of one node, lost disks.
    Nodes,
    /// Keys in memory, which most commands find without waiting; an operator who removes and adds the namespace, denies hosts and
    /// changes ANA states; network faults; slow device operations.
    Memory,
    /// The ordered engine, with scans, and any of the fault profiles above.
    Ordered,
}

impl Scenario {
    /// Every scenario, in the order that [`crate::default_scenario`] rotates through.
    pub const ALL: [Scenario; 11] = [
        Scenario::Calm,
        Scenario::Crashes,
        Scenario::Network,
        Scenario::Disk,
        Scenario::Everything,
        Scenario::Blocks,
        Scenario::Namespaces,
        Scenario::Remote,
        Scenario::Nodes,
        Scenario::Memory,
        Scenario::Ordered,
    ];

    /// Its name on the command line (`--scenario`).
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Calm => "calm",
            Scenario::Crashes => "crashes",
            Scenario::Network => "network",
            Scenario::Disk => "disk",
            Scenario::Everything => "everything",
            Scenario::Blocks => "blocks",
            Scenario::Namespaces => "namespaces",
            Scenario::Remote => "remote",
            Scenario::Nodes => "nodes",
            Scenario::Memory => "memory",
            Scenario::Ordered => "ordered",
        }
    }

    /// The scenario with this command line name, or `None`.
    pub fn by_name(name: &str) -> Option<Scenario> {
        Scenario::ALL.into_iter().find(|scenario| scenario.name() == name)
    }

    pub(crate) fn has_crashes(self) -> bool {
        matches!(self, Scenario::Crashes | Scenario::Everything | Scenario::Nodes)
    }

    pub(crate) fn has_network_faults(self) -> bool {
        matches!(self, Scenario::Network | Scenario::Everything | Scenario::Nodes | Scenario::Memory)
    }

    pub(crate) fn has_disk_faults(self) -> bool {
        matches!(self, Scenario::Disk | Scenario::Everything | Scenario::Nodes)
    }
}

/// Plan of one simulation with key-value clients.
#[derive(Clone, Debug)]
pub struct KvScenarioPlan {
    /// The seed that the plan was drawn from.
    pub seed: u64,
    /// The scenario that the plan was drawn for.
    pub scenario: Scenario,
    /// The nodes.
    pub nodes: Vec<NodePlan>,
    /// Clocks of the nodes and then of the client hosts; empty if all show the simulation's time.
    pub clocks: Vec<SimClock>,
    /// Whether no fault may cost a connection: then none may be lost.
    pub keeps_connections: bool,
    /// Client hosts.
    pub hosts: Vec<ClientHostPlan>,
    /// Commands that clients submit.
    pub load: KvLoad,
    /// Link properties while no link fault is active.
    pub link: SimLinkConfig,
    /// Simulated time of one reactor iteration at least.
    pub iteration_cost: Nanos,
    /// Phases, run in order until the simulation ends.
    pub phases: Vec<Phase>,
    /// Mean number of completed commands between operator changes; `None` for no operator.
    pub operator_interval: Option<u64>,
}

/// Configuration of the node and its disk.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// Reactor threads, one per core.
    pub cores: usize,
    /// The parts of the ordered engine; `None` selects the hash engine.
    pub tree: Option<TreePlan>,
    /// Allocation unit of the engine, in bytes.
    pub unit_bytes: u32,
    /// Hash function of the index.
    pub hash: HashKind,
    /// Version of the engine's format.
    pub format_version: u16,
    /// log2 of the number of bitmap partitions.
    pub partitions_log2: u8,
    /// Maximum value length, in bytes.
    pub value_bytes_max: u32,
    /// Condition under which the engine acknowledges writes.
    pub durability: Durability,
    /// Buffer memory of each core, in bytes.
    pub pool_bytes: usize,
    /// Maximum device operations in flight per core.
    pub device_depth: usize,
    /// Maximum requests in flight per core.
    pub requests_max: usize,
    /// Whether each key has an owner core, which alone may execute operations on it.
    pub has_owner_cores: bool,
    /// Memory of the volume's cache of values, in bytes; 0 for none.
    pub cache_bytes: u64,
    /// Space of the disk that is written with zeros ahead of its use, in bytes; 0 for none.
    pub prepare_bytes: u64,
    /// What compaction may read and write, in bytes per second; 0 for none.
    pub compact_bytes_per_second: u64,
    /// Maximum entries of a queue (CAP.MQES + 1).
    pub queue_depth: u16,
    /// In-capsule data size of I/O queues, in bytes.
    pub in_capsule_bytes: u32,
    /// Maximum data of one H2CData PDU, in bytes (MAXH2CDATA).
    pub max_h2c_data: u32,
    /// Maximum value bytes of a connection's incomplete transfers to the node.
    pub receive_bytes_max: usize,
    /// Unsent bytes at which a connection accepts no further command.
    pub send_buffer_bytes_max: usize,
    /// The disk.
    pub disk: SimDiskConfig,
    /// Whether the disk is memory of the node, which a stop loses.
    pub is_in_memory: bool,
    /// Whether another core executes operations in the middle of those that end at once.
    pub has_parallel_core: bool,
    /// Scheduling configuration and simulated request costs.
    pub scheduling: SchedulingPlan,
}

/// Configuration of one client host.
#[derive(Clone, Copy, Debug)]
pub struct ClientHostPlan {
    /// Number of sessions.
    pub sessions: usize,
    /// I/O queues of a session.
    pub queues: u16,
    /// Maximum commands in flight per queue.
    pub queue_depth: u16,
    /// Maximum commands in flight per session.
    pub commands_max: usize,
    /// Whether PDUs carry header digests.
    pub header_digest: bool,
    /// Whether PDUs carry data digests.
    pub data_digest: bool,
    /// Time after which a command without a response ends the connection.
    pub command_timeout: Nanos,
    /// Keep-alive timeout (KATO).
    pub keep_alive: Nanos,
    /// Maximum pause between two commands of a session; zero for none.
    pub think_time_max: Nanos,
}

/// Key-value commands that clients submit.
#[derive(Clone, Copy, Debug)]
pub struct KvLoad {
    /// Size of the key space.
    pub keys: u64,
    /// Whether keys may exceed the 16 bytes of standard commands; requires in-capsule data.
    pub long_keys: bool,
    /// Maximum value length, in bytes.
    pub value_bytes_max: u64,
    /// Weights of put, add-only put, update-only put, get, truncated get, delete, exist, list, flush.
    pub mix: [u64; 9],
    /// Scans beside them.
    pub scans: Option<ScanLoad>,
}

/// A stretch of load with faults, and its end.
#[derive(Clone, Debug)]
pub struct Phase {
    /// Commands completed before the end of the phase begins.
    pub operations: u64,
    /// Faults injected during the phase, by ascending `after_commands`.
    pub faults: Vec<ScheduledFault>,
    /// Event that ends the phase.
    pub end: PhaseEnd,
}

/// One injected fault.
#[derive(Clone, Copy, Debug)]
pub struct ScheduledFault {
    /// Commands of the phase completed before the fault begins.
    pub after_commands: u64,
    /// Duration, in simulated time; a [`FaultKind::ConnectionReset`] has none.
    pub duration: Nanos,
    /// The fault.
    pub kind: FaultKind,
}

/// The host that a fault affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultedHost {
    /// A node.
    Node(usize),
    /// A client host.
    Client(usize),
}

/// Kinds of faults. `host` is an index into the client hosts, `node` into the nodes.
#[derive(Clone, Copy, Debug)]
pub enum FaultKind {
    /// Resets all connections of a host to a node.
    ConnectionReset {
        /// Client host.
        host: usize,
        /// Node.
        node: usize,
    },
    /// Drops all traffic between a host and a node.
    Partition {
        /// Client host.
        host: usize,
        /// Node.
        node: usize,
    },
    /// Drops the traffic between a host and a node in one direction.
    LinkCut {
        /// Client host.
        host: usize,
        /// Node.
        node: usize,
        /// Whether the traffic to the node is dropped, else that from it.
        to_node: bool,
    },
    /// Pauses the processes of a host.
    Pause {
        /// The host.
        host: FaultedHost,
    },
    /// Changes the drift of a host's clock.
    ClockDrift {
        /// The host.
        host: FaultedHost,
        /// Microseconds gained per second.
        drift_ppm: i64,
    },
    /// Degrades the link between a host and a node.
    SlowLink {
        /// Client host.
        host: usize,
        /// Node.
        node: usize,
        /// Link properties during the fault.
        link: SimLinkConfig,
    },
    /// Stops a client host; it restarts when the fault ends.
    ClientHostCrash {
        /// Client host.
        host: usize,
        /// Process kill or power loss.
        stop: HostFailure,
    },
    /// Delays random device operations.
    SlowDisk {
        /// Node.
        node: usize,
        /// On average one operation in this many is delayed.
        one_in: u64,
        /// Longest delay of an operation, in simulated time.
        delay_max: Nanos,
    },
    /// Fails random device operations, on average one in the given number; 0 for none of that kind.
    DiskErrors {
        /// Node.
        node: usize,
        /// Reads.
        read_one_in: u64,
        /// Writes.
        write_one_in: u64,
        /// Flushes.
        flush_one_in: u64,
    },
}

/// Event that ends a phase.
#[derive(Clone, Debug)]
pub enum PhaseEnd {
    /// All clients disconnect; the node must become idle.
    Quiesce,
    /// Quiesces, then flips bits at random places of the disk that are in use.
    CorruptBits {
        /// Bits flipped in the record area.
        records: u64,
        /// Whether a bit of one copy of the metadata flips too.
        metadata: bool,
        /// Whether the node restarts afterwards.
        restart: bool,
    },
    /// Quiesces, then shuts the node down cleanly and starts it again.
    Restart,
    /// Crashes a node without quiescing.
    Crash {
        /// Node.
        node: usize,
        /// Process kill or power loss.
        stop: HostFailure,
        /// Simulation steps between the last command of the phase and the crash.
        steps_before: u64,
        /// Further crashes: time after the start of recovery, and kind.
        crashes_in_recovery: Vec<(Nanos, HostFailure)>,
    },
    /// Loses the disk of a node without quiescing; node and disk are replaced by new ones.
    LoseDisk {
        /// Node.
        node: usize,
        /// Simulation steps between the loss and the replacement.
        steps: u64,
    },
}

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
        tree: None,
        unit_bytes,
        hash: pick(random, &[HashKind::Xxh3, HashKind::Sha1]),
        format_version: 1,
        partitions_log2: random.below(5) as u8,
        value_bytes_max,
        durability: pick(random, &[Durability::PowerSafe, Durability::PowerSafe, Durability::Completed]),
        pool_bytes: pick(random, &[5, 8, 100]) * (value_bytes_max as usize + 8192),
        device_depth: pick(random, &[1, 4, 32, 128]),
        requests_max: pick(random, &[1, 3, 16, 256]),
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
        is_in_memory: false,
        has_parallel_core: false,
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
