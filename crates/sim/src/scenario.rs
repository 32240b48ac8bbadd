//! What happens in one world, as data drawn from one seed: machine, clients, load, faults, ends.
//!
//! In: a seed and a [`Scenario`]. Out: a [`KvScenarioPlan`], the same for the same two on every machine. Nothing here
//! runs anything; printed with `{:#?}`, a plan says all that a failing seed was about.

use crate::scheduling_scenario::SchedulingPlan;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::Durability;
use octokv_engine::hash::HashKind;
use octokv_runtime::simulated::{CrashModel, HostFailure, SimDiskConfig, SimLinkConfig};

/// Which kinds of faults a world has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// None: hosts come and go in order, the node is restarted in order.
    Calm,
    /// The node is killed, or its power is cut, also while it recovers.
    Crashes,
    /// Connections are reset, links cut and slowed, client hosts die.
    Network,
    /// The device fails, dawdles and rots.
    Disk,
    /// All of them.
    Everything,
    /// Namespaces of blocks, in any of these weathers.
    Blocks,
    /// The same, and an operator who adds and removes namespaces, turns hosts away and changes access.
    Namespaces,
    /// The hash engine on a client, over a namespace of blocks of the node.
    Remote,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 8] = [
        Scenario::Calm,
        Scenario::Crashes,
        Scenario::Network,
        Scenario::Disk,
        Scenario::Everything,
        Scenario::Blocks,
        Scenario::Namespaces,
        Scenario::Remote,
    ];

    /// Its name on the command line.
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
        }
    }

    /// The scenario of a name.
    pub fn by_name(name: &str) -> Option<Scenario> {
        Scenario::ALL.into_iter().find(|scenario| scenario.name() == name)
    }

    pub(crate) fn has_crashes(self) -> bool {
        matches!(self, Scenario::Crashes | Scenario::Everything)
    }

    pub(crate) fn has_network_faults(self) -> bool {
        matches!(self, Scenario::Network | Scenario::Everything)
    }

    pub(crate) fn has_disk_faults(self) -> bool {
        matches!(self, Scenario::Disk | Scenario::Everything)
    }
}

/// One world from beginning to end.
#[derive(Clone, Debug)]
pub struct KvScenarioPlan {
    /// What it was drawn from.
    pub seed: u64,
    /// What it was drawn for.
    pub scenario: Scenario,
    /// The node.
    pub node: NodePlan,
    /// The hosts of clients.
    pub hosts: Vec<ClientHostPlan>,
    /// What they do.
    pub load: KvLoad,
    /// The links, while nothing is wrong with them.
    pub link: SimLinkConfig,
    /// What a turn of a reactor costs.
    pub iteration_cost: Nanos,
    /// One after another, until the world ends.
    pub phases: Vec<Phase>,
}

/// The node and its disk.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// Reactors.
    pub cores: usize,
    /// Granularity of space.
    pub unit_bytes: u32,
    /// The hash.
    pub hash: HashKind,
    /// log2 of the bitmap's partitions.
    pub partitions_log2: u8,
    /// The longest value.
    pub value_bytes_max: u32,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// Buffers of each core.
    pub pool_bytes: usize,
    /// Device operations of a core at a time.
    pub device_depth: usize,
    /// Requests of a core at a time.
    pub requests_max: usize,
    /// Entries of a queue.
    pub queue_depth: u16,
    /// In-capsule data.
    pub in_capsule_bytes: u32,
    /// Data of one H2CData PDU.
    pub max_h2c_data: u32,
    /// Announced and unsent bytes of a connection.
    pub receive_bytes_max: usize,
    /// Unsent bytes of a connection.
    pub outbox_bytes_max: usize,
    /// The disk.
    pub disk: SimDiskConfig,
    /// Who is served where and when.
    pub scheduling: SchedulingPlan,
}

/// One host of clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientHostPlan {
    /// Sessions.
    pub sessions: usize,
    /// I/O queues of a session.
    pub queues: u16,
    /// Commands of a queue at a time.
    pub queue_depth: u16,
    /// Commands of a session at a time.
    pub commands_max: usize,
    /// Header digests.
    pub header_digest: bool,
    /// Data digests.
    pub data_digest: bool,
    /// How long a command may take.
    pub command_timeout: Nanos,
    /// The keep-alive time.
    pub keep_alive: Nanos,
    /// The longest pause between commands of a session; zero for none.
    pub think_time_max: Nanos,
}

/// What clients ask for.
#[derive(Clone, Copy, Debug)]
pub struct KvLoad {
    /// How many keys there are.
    pub keys: u64,
    /// Whether some are longer than standard commands carry; capsules without room cannot carry them.
    pub long_keys: bool,
    /// The longest value.
    pub value_bytes_max: u64,
    /// Shares of put, add-only, update-only, get, short get, delete, exist, list, flush.
    pub mix: [u64; 9],
}

/// A stretch of load with faults in it, and how it ends.
#[derive(Clone, Debug)]
pub struct Phase {
    /// Commands answered before the end comes.
    pub operations: u64,
    /// What goes wrong meanwhile.
    pub faults: Vec<ScheduledFault>,
    /// How it ends.
    pub end: PhaseEnd,
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug)]
pub struct ScheduledFault {
    /// After so many commands of the round.
    pub after_commands: u64,
    /// For so long, where it lasts.
    pub duration: Nanos,
    /// What.
    pub kind: FaultKind,
}

/// What goes wrong. `host` counts the hosts of clients.
#[derive(Clone, Copy, Debug)]
pub enum FaultKind {
    /// All connections of a host are reset.
    ConnectionReset {
        /// Whose.
        host: usize,
    },
    /// A host cannot be reached.
    Partition {
        /// Which.
        host: usize,
    },
    /// A host's link gets bad.
    SlowLink {
        /// Whose.
        host: usize,
        /// How bad.
        link: SimLinkConfig,
    },
    /// A host of clients dies and comes back when the fault is over.
    ClientHostCrash {
        /// Which.
        host: usize,
        /// How.
        stop: HostFailure,
    },
    /// One in so many device operations takes up to this much longer.
    SlowDisk {
        /// How many.
        one_in: u64,
        /// How much.
        delay_max: Nanos,
    },
    /// One in so many device operations fails; zero for none of that kind.
    DiskErrors {
        /// Reads.
        read_one_in: u64,
        /// Writes.
        write_one_in: u64,
        /// Flushes.
        flush_one_in: u64,
    },
}

/// How a round ends.
#[derive(Clone, Debug)]
pub enum PhaseEnd {
    /// Every client leaves; everything must come to rest.
    Quiesce,
    /// As rest, and then bits rot in so many places, one of them in a copy of the metadata if so drawn.
    CorruptBits {
        /// Places among the records.
        records: u64,
        /// Whether one copy of a metadata block rots too.
        metadata: bool,
        /// Whether the node is restarted then.
        restart: bool,
    },
    /// As rest, and then the node is closed in order and started again.
    Restart,
    /// The node dies at once; then, while it recovers, after each of these spans again.
    Crash {
        /// How.
        stop: HostFailure,
        /// How many steps of the world after the last command.
        steps_before: u64,
        /// Deaths during recovery.
        crashes_in_recovery: Vec<(Nanos, HostFailure)>,
    },
}

pub(crate) fn pick<T: Copy>(random: &mut Prng, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize]
}

pub(crate) fn between(random: &mut Prng, low: u64, high: u64) -> u64 {
    low + random.below(high - low + 1)
}

impl KvScenarioPlan {
    /// The plan of a seed in a scenario.
    pub fn draw(seed: u64, scenario: Scenario) -> KvScenarioPlan {
        let mut random = Prng::new(mix64(seed.wrapping_mul(8) + scenario as u64));
        let random = &mut random;
        let mut node = draw_node(random);
        if random.one_in(2) {
            // Space is used again soon where there is little.
            let room = u64::from(node.value_bytes_max) * between(random, 2, 8);
            node.disk.size_bytes = (7 << 17) + room.next_multiple_of(4096);
        }
        let count = between(random, 1, 3);
        let hosts: Vec<ClientHostPlan> = (0..count).map(|_| draw_host(random, scenario, &node)).collect();
        let count = between(random, 2, 5);
        let phases: Vec<Phase> = (0..count).map(|_| draw_phase(random, scenario, hosts.len())).collect();
        let load = draw_load(random, &node);
        KvScenarioPlan {
            seed,
            scenario,
            node,
            hosts,
            load,
            link: draw_link(random),
            iteration_cost: Nanos(between(random, 200, 4_000)),
            phases,
        }
    }
}

pub(crate) fn draw_node(random: &mut Prng) -> NodePlan {
    let unit_bytes = pick(random, &[512, 1024, 4096, 4096]);
    let block_bytes = if random.one_in(2) { 512 } else { unit_bytes };
    let value_bytes_max = pick(random, &[4_096, 8 << 10, 40_000, 200_000]);
    let room = u64::from(value_bytes_max) * between(random, 20, 100);
    let disk = SimDiskConfig {
        size_bytes: (3 << 20) + room.next_multiple_of(4096),
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
        unit_bytes,
        hash: pick(random, &[HashKind::Xxh3, HashKind::Sha1]),
        partitions_log2: random.below(5) as u8,
        value_bytes_max,
        durability: pick(random, &[Durability::PowerSafe, Durability::PowerSafe, Durability::Completed]),
        pool_bytes: pick(random, &[5, 8, 100]) * (value_bytes_max as usize + 8192),
        device_depth: pick(random, &[1, 4, 32, 128]),
        requests_max: pick(random, &[1, 3, 16, 256]),
        queue_depth: pick(random, &[2, 5, 32, 256]),
        in_capsule_bytes: pick(random, &[0, 512, 4096, 16 << 10]),
        max_h2c_data: pick(random, &[4096, 16 << 10, 512 << 10]),
        receive_bytes_max: pick(random, &[1, 4, 100]) * (value_bytes_max as usize + 8192),
        outbox_bytes_max: pick(random, &[4096, 100_000, 16 << 20]),
        disk,
        // Of a source of its own, so that everything else is as it would be without it.
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
    KvLoad { keys: pick(random, &[3, 8, 20, 64]), long_keys, value_bytes_max: bytes, mix }
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
            0 | 1 => FaultKind::ConnectionReset { host },
            2 => FaultKind::Partition { host },
            3 => {
                let link = SimLinkConfig {
                    latency: Nanos::from_micros(between(random, 100, 20_000)),
                    jitter: Nanos::from_micros(between(random, 0, 20_000)),
                    bytes_per_second: pick(random, &[500_000, 5_000_000]),
                    window_bytes: pick(random, &[1_000, 16 << 10]),
                    fragments: true,
                };
                FaultKind::SlowLink { host, link }
            }
            _ => FaultKind::ClientHostCrash { host, stop: draw_stop(random) },
        });
    }
    if !scenario.has_disk_faults() {
        return None;
    }
    Some(match random.below(3) {
        0 => FaultKind::SlowDisk {
            one_in: pick(random, &[1, 3, 20]),
            delay_max: Nanos::from_micros(pick(random, &[200, 5_000, 60_000])),
        },
        1 => FaultKind::DiskErrors { read_one_in: between(random, 3, 60), write_one_in: 0, flush_one_in: 0 },
        _ => {
            let rate = |random: &mut Prng| pick(random, &[0, 5, 40]);
            FaultKind::DiskErrors {
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
            stop: draw_stop(random),
            steps_before: random.below(60),
            crashes_in_recovery: again,
        };
    }
    if random.one_in(2) { PhaseEnd::Quiesce } else { PhaseEnd::Restart }
}
