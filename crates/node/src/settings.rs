//! What a node is told when it starts. Checked by [`crate::start`], which names what cannot be.

use octokv_base::Nanos;
use octokv_engine::Durability;
use octokv_engine::hash::FormatSettings;
use octokv_runtime::{DeviceDriver, Polling};
use octokv_target::TargetSettings;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// The subsystem's name unless another is given.
pub const DEFAULT_NQN: &str = "nqn.2026-11.io.octokv:node";
/// The port that IANA gave to NVMe over Fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// What holds the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSettings {
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

/// Everything a node is told.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// What holds the data.
    pub device: DeviceSettings,
    /// Which engine.
    pub engine: EngineKind,
    /// How a new volume is made.
    pub format: FormatSettings,
    /// Whether whatever the device holds is given up for a new volume.
    pub reformat: bool,
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
    pub target: TargetSettings,
    /// How long a stop waits for hosts to take their last replies.
    pub stop_limit: Nanos,
    /// Where a new volume's random numbers come from; `None` asks the system.
    pub seed: Option<u64>,
}

impl Default for NodeSettings {
    fn default() -> NodeSettings {
        NodeSettings {
            device: DeviceSettings::File { path: "octokv.img".into(), create_bytes: Some(1 << 30) },
            engine: EngineKind::Hash,
            format: FormatSettings::default(),
            reformat: false,
            durability: Durability::Flush,
            listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))],
            cores: vec![0],
            nqn: DEFAULT_NQN.to_owned(),
            polling: Polling::default(),
            driver: DeviceDriver::Auto,
            device_depth: 256,
            buffer_bytes: 256 << 20,
            connections_max: 1024,
            requests_max: 16 * 1024,
            target: TargetSettings::new(DEFAULT_NQN),
            stop_limit: Nanos::from_secs(2),
            seed: None,
        }
    }
}
