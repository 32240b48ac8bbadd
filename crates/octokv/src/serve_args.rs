//! The flags of `octokv serve`.

use crate::choices::{DriverChoice, DurabilityChoice, HashChoice, PollingChoice};
use crate::drive_arg::DriveArg;
use crate::engine_arg::EngineArg;
use crate::size::{PrefetchSetting, RateSetting, Size, UnitSetting};
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Flags of `serve`. Each overrides the configuration file; octokv.example.toml has the defaults.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// Configuration file; octokv.example.toml documents it.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Device of namespace 1: a file, a block device, or "memory"; a missing file is created and formatted. Several, each with this flag, hold a
    /// part of its keys each.
    #[arg(long, value_name = "PATH")]
    pub device: Vec<String>,
    /// Size of each missing file or memory; an existing device keeps its size.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Size>,
    /// Simulate the service times of this drive, with its write buffer, flushes and garbage collection; never faster
    /// than the device itself.
    #[arg(long, value_name = "DRIVE")]
    pub nand: Option<DriveArg>,
    /// Discard the data on the device of namespace 1 and format it.
    #[arg(long)]
    pub format: bool,
    /// Storage engine of namespace 1, and of the others that name none.
    #[arg(long)]
    pub engine: Option<EngineArg>,
    /// Memory of a cache of values in front of the device of namespace 1; 0 for none.
    #[arg(long, value_name = "SIZE")]
    pub cache_bytes: Option<Size>,
    /// Never-written space of the file of namespace 1 that is written ahead of its use; 0 for none.
    #[arg(long, value_name = "SIZE")]
    pub prepare_bytes: Option<Size>,
    /// What the compaction of a namespace may read and write per second, or `auto`; 0 for no compaction.
    #[arg(long, value_name = "SIZE")]
    pub compact_bytes_per_second: Option<RateSetting>,
    /// Engine log: what verification in the background reads of a namespace per second; 0 for none.
    #[arg(long, value_name = "SIZE")]
    pub scrub_bytes_per_second: Option<Size>,
    /// Time after which an iterator that its host does not use ends, in seconds.
    #[arg(long, value_name = "SECONDS")]
    pub iterator_idle_s: Option<u64>,
    /// Time without a completed operation after which one of several devices of a namespace has failed, in seconds.
    #[arg(long, value_name = "SECONDS")]
    pub device_timeout_s: Option<u64>,
    /// Engine lsm: values that an iterator reads ahead, 0 to 64, or `auto`: by the latency of reads and the pace of the host.
    #[arg(long, value_name = "VALUES")]
    pub value_prefetch: Option<PrefetchSetting>,
    /// Namespaces on several devices: commands wait for tokens of their device, whose throughput adapts them.
    #[arg(long)]
    pub device_tokens: bool,
    /// With --device-tokens: file of starting costs that `octokv calibrate --json` wrote, or "none".
    #[arg(long, value_name = "FILE")]
    pub token_costs: Option<String>,
    /// Engine lsm: compress the blocks of new tables (LZ4).
    #[arg(long)]
    pub compress: bool,
    /// Format, engine lsm: values of fewer bytes lie beside their keys.
    #[arg(long, value_name = "SIZE")]
    pub inline_bytes_max: Option<Size>,
    /// Format, several devices: space of each device of namespace 1 for values of overloaded others, engines hash and log; 0 for none.
    #[arg(long, value_name = "SIZE")]
    pub swap_bytes: Option<Size>,
    /// Several devices with swap space: the commands in flight by which a device has to exceed another before its values are stored there.
    #[arg(long, value_name = "COMMANDS")]
    pub swap_gap: Option<u32>,
    /// Format, engine log: stores of the volume, each with a part of the keys; halved while there are fewer than 16 chunks for each.
    #[arg(long, value_name = "COUNT")]
    pub partitions: Option<u16>,
    /// Format, engine log: bytes of a chunk, a power of two up to 16MiB; less than 64 units is raised to that (32KiB with --unit 512, 256KiB with --unit auto or 4096); or `auto`: by the device's size and the longest value.
    #[arg(long, value_name = "SIZE")]
    pub chunk_bytes: Option<UnitSetting>,
    /// Format: allocation unit in bytes, 512 to 4096, or `auto`: the disk's physical block, or the file system's of a
    /// file.
    #[arg(long, value_name = "BYTES")]
    pub unit: Option<UnitSetting>,
    /// Format: hash function of keys.
    #[arg(long)]
    pub hash: Option<HashChoice>,
    /// When a write is acknowledged.
    #[arg(long)]
    pub durability: Option<DurabilityChoice>,
    /// Address to listen on, IPv4 or a bracketed IPv6 one; port 0 selects a free port. Repeatable.
    #[arg(long, value_name = "ADDR:PORT", value_delimiter = ',')]
    pub listen: Vec<SocketAddr>,
    /// CPUs to run on, one reactor each.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// CPUs of these that execute requests for drives and have no connections; the others have the connections. Without, each does both.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub drive_cores: Vec<usize>,
    /// NQN of the subsystem.
    #[arg(long)]
    pub nqn: Option<String>,
    /// I/O interface to devices.
    #[arg(long)]
    pub driver: Option<DriverChoice>,
    /// Behaviour of an idle core.
    #[arg(long)]
    pub polling: Option<PollingChoice>,
    /// State file for run-time changes: a path, "auto" (beside a device that is a file, with ".state" appended) or
    /// "none". Without one the node cannot be changed at run time.
    #[arg(long, value_name = "FILE")]
    pub state: Option<String>,
    /// Admin socket: a path, "auto" (/run/octokv/PORT.sock for root, else under $XDG_RUNTIME_DIR) or "none".
    #[arg(long, value_name = "SOCKET")]
    pub admin: Option<String>,
}
