//! The plan of one simulation, as data: configuration, clients, load, faults, phase ends.
//!
//! Drawn by [`crate::scenario_draw`]; `{:#?}` of a [`KvScenarioPlan`] prints every input of a seed.

use crate::engine_plan::EnginePlan;
use crate::scans::ScanLoad;
use crate::scheduling_scenario::SchedulingPlan;
use octokv_base::Nanos;
use octokv_engine::Durability;
use octokv_engine::HashKind;
use octokv_runtime::simulated::{HostFailure, SimClock, SimDiskConfig, SimLinkConfig};

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
    /// The log engine, on a small device, with any of the fault profiles above.
    Log,
    /// A volume of any engine on several disks, with crashes, network faults or slow disks.
    Devices,
}

impl Scenario {
    /// Every scenario, in the order that [`crate::default_scenario`] rotates through.
    pub const ALL: [Scenario; 13] = [
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
        Scenario::Log,
        Scenario::Devices,
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
            Scenario::Log => "log",
            Scenario::Devices => "devices",
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

impl KvScenarioPlan {
    /// Whether a disk fails in a phase, or operations of one: if it hangs, commands may wait for longer than their hosts do.
    pub fn has_failing_disk(&self) -> bool {
        let fails = |fault: &ScheduledFault| {
            let kind = fault.kind;
            matches!(
                kind,
                FaultKind::HangDisk { .. } | FaultKind::PullDisk { .. } | FaultKind::DiskErrors { .. }
            )
        };
        self.phases.iter().flat_map(|phase| &phase.faults).any(fails)
    }
}

/// Configuration of the node and its disk.
#[derive(Clone, Copy, Debug)]
pub struct NodePlan {
    /// Reactor threads, one per core.
    pub cores: usize,
    /// The engine, with the sizes of its volume.
    pub engine: EnginePlan,
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
    /// The cores that execute requests for drives and have no connections; 0 if every core does both.
    pub drive_cores: usize,
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
    /// The disk, or each of them.
    pub disk: SimDiskConfig,
    /// The disks.
    pub devices: usize,
    /// Whether the disk is memory of the node, which a stop loses.
    pub is_in_memory: bool,
    /// Whether another core executes operations in the middle of those that end at once.
    pub has_parallel_core: bool,
    /// Whether an operator replaces a disk of several that has failed.
    pub replaces_disks: bool,
    /// After how many completed commands an operator adds a disk to several, in ascending order; `u64::MAX` for never.
    pub additions: [u64; 2],
    /// The swap region of each of several disks, in bytes; 0 for none.
    pub swap_bytes: u64,
    /// The commands in flight by which a disk has to exceed another before its puts are swapped.
    pub swap_gap: u32,
    /// The tokens of a Put and of a Delete on each of several disks, which bound what is in flight there; 0 for no bound.
    pub put_tokens: u32,
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
    /// One of the disks of a node completes no operation that begins: it has failed until the node is started again. The phase has to end with a crash or a restart.
    HangDisk {
        /// Node.
        node: usize,
        /// Which of its disks: a number of the plan, or behind these of the disks that are added.
        disk: usize,
    },
    /// One of the disks of a node is pulled: every operation that begins fails, executed or not, until the node is started again. The phase has to end as with [`FaultKind::HangDisk`].
    PullDisk {
        /// Node.
        node: usize,
        /// As above.
        disk: usize,
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
