//! What a node is told when it starts. Checked by [`crate::start`], which names what cannot be.

use octokv_base::{NamespaceId, Nanos};
use octokv_device::ssd_model::DriveProfile;
use octokv_engine::Durability;
use octokv_engine::hash::FormatConfig;
use octokv_nvmf::{AnaState, HealthStatus, HostAcl, SubsystemConfig};
use octokv_runtime::{DeviceDriver, Polling};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The subsystem's name unless another is given.
pub const DEFAULT_NQN: &str = "nqn.2026-11.io.octokv:node";
/// The port that IANA gave to NVMe over Fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// What holds the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceConfig {
    /// This process's memory: gone when it ends.
    Memory {
        /// How much.
        bytes: u64,
        /// The block size in bytes.
        block_bytes: u32,
    },
    /// A regular file or a block device.
    File {
        /// Where it is.
        path: PathBuf,
        /// How large to make it when it does not exist; `None` refuses a missing file.
        create_bytes: Option<u64>,
    },
}

/// Which engine keeps the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// OctoKV's hash engine.
    #[default]
    Hash,
}

/// What a namespace is made of.
#[derive(Clone, Debug)]
pub enum CommandSetConfig {
    /// Keys and values, kept by an engine.
    KeyValue {
        /// How a new volume is made.
        format: FormatConfig,
    },
    /// Logical blocks.
    Blocks {
        /// Bytes of one: 512 or 4096.
        block_bytes: u32,
    },
}

/// What is done about what a device holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingDataPolicy {
    /// A volume of keys is opened, for keys; anything that does not belong there is refused and left as it is.
    Check,
    /// It is given up.
    Discard,
    /// For blocks: hosts get it as it is.
    Keep,
}

/// One namespace of a node.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Its identifier.
    pub id: NamespaceId,
    /// What holds it.
    pub device: DeviceConfig,
    /// Its answers take the time of this drive's; `None` for its own.
    pub drive_profile: Option<&'static DriveProfile>,
    /// What it is made of.
    pub command_set: CommandSetConfig,
    /// What is done about what the device holds already.
    pub existing_data: ExistingDataPolicy,
    /// Its group of asymmetric access, 1 to 32.
    pub ana_group: u32,
    /// Whether the node starts only with it. One that is not required and whose device cannot be used is told among
    /// [`RunningNode::offline`](crate::RunningNode::offline).
    pub required: bool,
    /// Tells a namespace of blocks from every other that there ever was: a part of its NGUID. A volume of keys has its
    /// own.
    pub nguid_suffix: u64,
}

/// Everything a node is told.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// What holds namespace 1, of keys.
    pub device: DeviceConfig,
    /// The answers of that device take the time of this drive's; `None` for its own.
    pub drive_profile: Option<&'static DriveProfile>,
    /// Which engine.
    pub engine: EngineKind,
    /// How a new volume is made.
    pub format: FormatConfig,
    /// Whether whatever the device holds is given up for a new volume.
    pub reformat: bool,
    /// The namespaces besides namespace 1.
    pub namespaces: Vec<NamespaceConfig>,
    /// When writes are acknowledged.
    pub durability: Durability,
    /// Where to listen; port 0 takes any free one.
    pub listen: Vec<SocketAddr>,
    /// The processors that run reactors, one each.
    pub cores: Vec<usize>,
    /// The subsystem's NQN.
    pub nqn: String,
    /// What an idle core does.
    pub polling: Polling,
    /// How a core reaches its device.
    pub driver: DeviceDriver,
    /// The most device operations of one core at a time.
    pub device_depth: usize,
    /// The most memory for values in flight, per core, in bytes.
    pub buffer_bytes: usize,
    /// The most TCP connections at a time.
    pub connections_max: usize,
    /// The most requests of one core at a time.
    pub requests_max: usize,
    /// The protocol's bounds. Its NQN and its bound on connections are taken from above.
    pub subsystem: SubsystemConfig,
    /// Who may connect.
    pub host_acl: HostAcl,
    /// Discovery services that hosts are referred to.
    pub referrals: Vec<SocketAddr>,
    /// Groups of asymmetric access that are not optimized.
    pub ana_states: Vec<(u32, AnaState)>,
    /// What the health log tells of the time before this start.
    pub health: HealthStatus,
    /// How long a stop waits for hosts to take their last replies.
    pub shutdown_timeout: Nanos,
    /// Who is served where and when.
    pub scheduling: octokv_sched::SchedConfig,
    /// Where a new volume's random numbers come from; `None` asks the system.
    pub seed: Option<u64>,
}

impl Default for NodeConfig {
    fn default() -> NodeConfig {
        NodeConfig {
            device: DeviceConfig::File { path: "octokv.img".into(), create_bytes: Some(1 << 30) },
            drive_profile: None,
            engine: EngineKind::Hash,
            format: FormatConfig::default(),
            reformat: false,
            namespaces: Vec::new(),
            durability: Durability::PowerSafe,
            listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))],
            cores: vec![0],
            nqn: DEFAULT_NQN.to_owned(),
            polling: Polling::default(),
            driver: DeviceDriver::Auto,
            device_depth: 256,
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
    /// Namespace 1, and the others.
    pub(crate) fn all_namespaces(&self) -> impl Iterator<Item = NamespaceConfig> + '_ {
        let first_namespace = NamespaceConfig {
            id: NamespaceId(1),
            device: self.device.clone(),
            drive_profile: self.drive_profile,
            command_set: CommandSetConfig::KeyValue { format: self.format },
            existing_data: if self.reformat {
                ExistingDataPolicy::Discard
            } else {
                ExistingDataPolicy::Check
            },
            ana_group: 1,
            required: true,
            nguid_suffix: 0,
        };
        std::iter::once(first_namespace).chain(self.namespaces.iter().cloned())
    }
}
