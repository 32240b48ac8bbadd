//! Configuration of a node. [`crate::start`] validates it and names each invalid setting.

use octokv_base::{NamespaceId, Nanos};
use octokv_device::ssd_model::DriveProfile;
use octokv_engine::{Durability, EngineKind, FormatConfig, OpenConfig, TreeOptions};
use octokv_nvmf::{AnaState, HealthStatus, HostAcl, SubsystemConfig};
use octokv_runtime::{DeviceDriver, Polling};
use octokv_sched::StartingCosts;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The subsystem NQN if none is configured.
pub const DEFAULT_NQN: &str = "nqn.2026-11.io.octokv:node";
/// The TCP port that IANA assigned to NVMe over Fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// Most requests in execution per core.
pub const REQUESTS_MAX: usize = 1 << 24;
/// Shortest time after which an unused iterator ends.
pub const ITERATOR_IDLE_MIN: Nanos = Nanos::from_secs(1);
/// The least [`NodeConfig::device_timeout`].
pub const DEVICE_TIMEOUT_MIN: Nanos = Nanos::from_secs(1);
/// Highest namespace identifier.
pub const NAMESPACE_ID_MAX: u32 = 1024;
/// Highest ANA group identifier.
pub const ANA_GROUPS_MAX: u32 = 32;
/// Fewest bytes of a cache of values.
pub const CACHE_BYTES_MIN: u64 = 1 << 20;
/// The most never-written space of a namespace that is written ahead of its use, in bytes, and the default for keys.
pub const PREPARE_BYTES_MAX: u64 = 1 << 30;

/// What compaction of the hash engine reads and writes by default, in bytes per second: a value of a MiB eight times a second, and one
/// percent of what an NVMe drive transfers.
const HASH_COMPACT_BYTES_PER_SECOND: u64 = 16 << 20;

/// What the scrub of a volume reads by default, in bytes per second: a thousandth of what an NVMe drive reads.
const SCRUB_BYTES_PER_SECOND: u64 = 4 << 20;

/// What compaction of an engine may read and write by default, in bytes per second. The ordered engine sets its own pace, which has no bound: its reads and writes
/// depend on compactions that keep up. The log engine compacts when it has to, without a bound.
pub fn default_compact_bytes_per_second(engine: EngineKind) -> u64 {
    match engine {
        EngineKind::Hash => HASH_COMPACT_BYTES_PER_SECOND,
        EngineKind::Lsm | EngineKind::Log => u64::MAX,
    }
}

/// The storage under a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceConfig {
    /// Memory of this process; its contents are lost when the process ends.
    Memory {
        /// Size in bytes.
        bytes: u64,
        /// Block size in bytes.
        block_bytes: u32,
    },
    /// A regular file or a block device.
    File {
        /// Its path.
        path: PathBuf,
        /// Size in bytes of a file that does not exist yet; with `None` a missing file is an error.
        create_bytes: Option<u64>,
    },
}

/// The command set of a namespace.
#[derive(Clone, Debug)]
pub enum CommandSetConfig {
    /// NVMe Key Value commands, served by an engine.
    KeyValue {
        /// Its engine, and the format of a new volume.
        format: FormatConfig,
    },
    /// NVM (block) commands, served by the device.
    Blocks {
        /// Block size in bytes: 512 or 4096.
        block_bytes: u32,
    },
}

/// Policy for data that a device already holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingDataPolicy {
    /// Opens a Key Value volume as one; fails on any other contents and leaves them unchanged.
    Check,
    /// Discards the contents.
    Discard,
    /// Serves the contents unchanged, as blocks.
    Keep,
}

/// Configuration of one namespace.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Namespace identifier (NSID), 1 to [`NAMESPACE_ID_MAX`].
    pub id: NamespaceId,
    /// The devices under it, at least one; a block namespace has one.
    pub devices: Vec<DeviceConfig>,
    /// Drive whose latency each device emulates; `None` adds no latency.
    pub drive_profile: Option<&'static DriveProfile>,
    /// Memory of a cache of values, in bytes: [`CACHE_BYTES_MIN`] or more, or 0 for none. Key Value namespaces only.
    pub cache_bytes: u64,
    /// Never-written space of a file that is written with zeros ahead of its use, in bytes: at most [`PREPARE_BYTES_MAX`];
    /// 0 for none. Key Value namespaces only; no effect on block devices and memory.
    pub prepare_bytes: u64,
    /// Its command set, with the parameters of that set.
    pub command_set: CommandSetConfig,
    /// Policy for data that the device already holds.
    pub existing_data: ExistingDataPolicy,
    /// ANA group, 1 to 32.
    pub ana_group: u32,
    /// Whether the node fails to start without it. A namespace that is not required and fails to open is listed by
    /// [`RunningNode::offline`](crate::RunningNode::offline).
    pub required: bool,
    /// Low 8 bytes of a block namespace's NGUID: unique among all block namespaces ever configured. A Key Value
    /// volume has its own identifier.
    pub nguid_suffix: u64,
}

#[cfg(test)]
impl NamespaceConfig {
    /// A namespace of blocks of 4 KiB on a device of 1 MiB in memory.
    pub(crate) fn blocks_in_memory(id: NamespaceId) -> NamespaceConfig {
        NamespaceConfig {
            id,
            devices: vec![DeviceConfig::Memory { bytes: 1 << 20, block_bytes: 4096 }],
            drive_profile: None,
            cache_bytes: 0,
            prepare_bytes: 0,
            command_set: CommandSetConfig::Blocks { block_bytes: 4096 },
            existing_data: ExistingDataPolicy::Keep,
            ana_group: 1,
            required: false,
            nguid_suffix: 7,
        }
    }
}

/// Configuration of a node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The devices of namespace 1, a Key Value namespace, at least one.
    pub devices: Vec<DeviceConfig>,
    /// Drive whose latency each of them emulates; `None` adds no latency.
    pub drive_profile: Option<&'static DriveProfile>,
    /// Memory of a cache of values in front of that device, in bytes: see [`NamespaceConfig::cache_bytes`].
    pub cache_bytes: u64,
    /// Never-written space of that device that is written ahead of its use: see [`NamespaceConfig::prepare_bytes`].
    pub prepare_bytes: u64,
    /// What the compaction of a Key Value namespace may read and write, in bytes per second: see
    /// [`OpenConfig::compact_bytes_per_second`]; 0 for no compaction. `None` selects that of the engine:
    /// [`default_compact_bytes_per_second`].
    pub compact_bytes_per_second: Option<u64>,
    /// What verification in the background reads of each namespace with a log engine, in bytes per second; 0 for none
    /// ([`octokv_engine::Volume::set_scrub_rate`]).
    pub scrub_bytes_per_second: u64,
    /// Options of Key Value namespaces whose engine is ordered. An iterator that its host does not use ends after [`TreeOptions::iterator_idle`], at least
    /// [`ITERATOR_IDLE_MIN`].
    pub tree: TreeOptions,
    /// With starting costs, commands of a namespace on several devices wait for tokens of their device, as many as its throughput has a use for, and hosts
    /// may ask for their windows of them. `None` without tokens.
    pub device_tokens: Option<StartingCosts>,
    /// Engine of namespace 1, and format of its new volume.
    pub format: FormatConfig,
    /// Policy for data that the devices of namespace 1 already hold.
    pub existing_data: ExistingDataPolicy,
    /// The namespaces besides namespace 1.
    pub namespaces: Vec<NamespaceConfig>,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// Listen addresses; port 0 takes any free port.
    pub listen: Vec<SocketAddr>,
    /// Processor numbers; each runs one reactor.
    pub cores: Vec<usize>,
    /// Those of `cores` that execute requests for drives and have no connections ([`crate::core_roles`]); empty if every core does both.
    pub drive_cores: Vec<usize>,
    /// The subsystem NQN, 1 to 223 bytes.
    pub nqn: String,
    /// Whether an idle core polls or sleeps.
    pub polling: Polling,
    /// Device I/O by io_uring or by worker threads.
    pub driver: DeviceDriver,
    /// Most device operations in flight, per core.
    pub device_depth: usize,
    /// The time without a completed operation after which one of several devices of a namespace has failed, at least [`DEVICE_TIMEOUT_MIN`].
    pub device_timeout: Nanos,
    /// The commands in flight by which one of several devices with swap regions has to exceed another before its puts are stored there
    /// ([`OpenConfig::swap_gap`]).
    pub swap_gap: u32,
    /// Size of the buffer pool in bytes, per core; at least four times the longest value.
    pub buffer_bytes: usize,
    /// Most TCP connections of the node.
    pub connections_max: usize,
    /// Most requests in execution, per core.
    pub requests_max: usize,
    /// Protocol limits. The node overwrites its NQN, its connection limit and the idle time of iterators with the fields above.
    pub subsystem: SubsystemConfig,
    /// Access control: the hosts that may connect.
    pub host_acl: HostAcl,
    /// Discovery services that this node refers hosts to.
    pub referrals: Vec<SocketAddr>,
    /// ANA groups whose state is not "optimized", with their states.
    pub ana_states: Vec<(u32, AnaState)>,
    /// Values of the SMART/Health log from before this start.
    pub health: HealthStatus,
    /// Longest time that a stop waits for hosts to receive their last responses.
    pub shutdown_timeout: Nanos,
    /// Scheduling policy, its parameters and tenant limits.
    pub scheduling: octokv_sched::SchedConfig,
    /// Seed of a new volume's random identifiers; `None` takes it from the operating system.
    pub seed: Option<u64>,
}

impl Default for NodeConfig {
    fn default() -> NodeConfig {
        NodeConfig {
            devices: vec![DeviceConfig::File { path: "octokv.img".into(), create_bytes: Some(1 << 30) }],
            drive_profile: None,
            cache_bytes: 0,
            prepare_bytes: PREPARE_BYTES_MAX,
            compact_bytes_per_second: None,
            scrub_bytes_per_second: SCRUB_BYTES_PER_SECOND,
            tree: OpenConfig::TREE,
            device_tokens: None,
            format: FormatConfig::default(),
            existing_data: ExistingDataPolicy::Check,
            namespaces: Vec::new(),
            durability: Durability::PowerSafe,
            listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))],
            cores: vec![0],
            drive_cores: Vec::new(),
            nqn: DEFAULT_NQN.to_owned(),
            polling: Polling::default(),
            driver: DeviceDriver::Auto,
            device_depth: 256,
            device_timeout: Nanos::from_secs(30),
            swap_gap: OpenConfig::SWAP_GAP,
            buffer_bytes: 256 << 20,
            connections_max: 1024,
            requests_max: 16 * 1024,
            subsystem: SubsystemConfig::new(DEFAULT_NQN),
            host_acl: HostAcl::Any,
            referrals: Vec::new(),
            ana_states: Vec::new(),
            health: HealthStatus::default(),
            shutdown_timeout: Nanos::from_secs(2),
            scheduling: octokv_sched::SchedConfig::default(),
            seed: None,
        }
    }
}

impl NodeConfig {
    /// Namespace 1 and the configured others.
    pub(crate) fn all_namespaces(&self) -> impl Iterator<Item = NamespaceConfig> + '_ {
        let first_namespace = NamespaceConfig {
            id: NamespaceId(1),
            devices: self.devices.clone(),
            drive_profile: self.drive_profile,
            cache_bytes: self.cache_bytes,
            prepare_bytes: self.prepare_bytes,
            command_set: CommandSetConfig::KeyValue { format: self.format },
            existing_data: self.existing_data,
            ana_group: 1,
            required: true,
            nguid_suffix: 0,
        };
        std::iter::once(first_namespace).chain(self.namespaces.iter().cloned())
    }
}
