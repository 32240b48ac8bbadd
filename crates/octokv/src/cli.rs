//! What can be typed: commands, flags, and their help.

use crate::admin;
use crate::config::{Driver, Durability, Engine, Hash, Polling};
use crate::drive_arg::DriveArg;
use crate::sched;
use crate::size::{Size, SizeDistributionArg};
use clap::{Args, Parser, Subcommand, ValueEnum};
use octokv_bench::Workload;
use octokv_bench::baselines::BaselineKind as Peer;
use octokv_client::Url;
use octokv_sim::Scenario;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use tracing_subscriber::filter::LevelFilter;

/// Where a node is looked for unless told otherwise.
pub const DEFAULT_URL: &str = "nvme+tcp://127.0.0.1:4420/nqn.2026-11.io.octokv:node?nsid=1";

/// octokv: an open, persistent NVMe Key-Value target.
///
/// Results go to standard output, messages and events to standard error. Exit codes: 0 done, 1 the operation failed,
/// 2 usage (arguments, the configuration file, or a change that cannot be), 3 the key does not exist.
#[derive(Debug, Parser)]
#[command(name = "octokv", version, about, max_term_width = 100)]
pub struct Cli {
    /// Which events are told on standard error, one line each.
    #[arg(long, global = true, value_name = "LEVEL", default_value = "warn")]
    pub log: LogLevel,
    /// What to do.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// How much is told.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// What went wrong here.
    Error,
    /// Also what was refused.
    Warn,
    /// Also who comes and goes.
    Info,
    /// Also what may help to find a mistake.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// As the subscriber knows it.
    pub fn level_filter(self) -> LevelFilter {
        match self {
            LogLevel::Off => LevelFilter::OFF,
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run a storage node; prints one line when it is ready, ends in order on SIGTERM, SIGINT or SIGHUP.
    ///
    /// Each flag overrides its setting in the configuration file. octokv.example.toml has every setting, those without
    /// a flag too, with its default.
    Serve(ServeArgs),
    /// Add, remove and list the namespaces of a running node.
    ///
    /// Changes are kept in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Ns(admin::NsCommand),
    /// Say which hosts may connect to a running node.
    ///
    /// Changes are kept in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Host(admin::HostCommand),
    /// Say how well a running node reaches groups of namespaces (asymmetric namespace access).
    ///
    /// Changes are kept in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Ana(admin::AnaCommand),
    /// Say who is served where and when by a running node: load balance between cores, fairness between hosts.
    ///
    /// Changes are kept in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Sched(sched::SchedCommand),
    /// Show what a running node's monitor sees of its cores and hosts, window by window.
    Stats(sched::StatsArgs),
    /// Store a value.
    Put(PutArgs),
    /// Write a value to standard output, as it is.
    Get(GetArgs),
    /// Remove a key and its value.
    Delete(DeleteArgs),
    /// Print the length of a key's value in bytes.
    Exist(ExistArgs),
    /// List keys, one per line, in the node's order (by their hashes).
    List(ListArgs),
    /// Read and verify everything on a device; changes nothing. The node must not be running.
    Check(CheckArgs),
    /// Put load on a node, or on an engine in this process, and report throughput and latency.
    Bench(Box<BenchArgs>),
    /// Play whole worlds with faults, each from a seed; a failure prints its replay line.
    Sim(SimArgs),
    /// Run a paper's experiment here and print its figures beside those of this machine.
    #[cfg(feature = "lab")]
    Reproduce(octokv_lab::ReproduceArgs),
    /// A node and a client on a temporary file: puts, gets, a kill, a restart, figures.
    Demo,
}

/// Flags of `serve`. Each overrides the configuration file; see octokv.example.toml for the defaults.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// Settings, as in octokv.example.toml.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What holds namespace 1: a file, a block device, or "memory"; a missing file is created and formatted.
    #[arg(long, value_name = "PATH")]
    pub device: Option<String>,
    /// How large a missing file, or memory, is made; an existing device keeps its size.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Size>,
    /// Have the device's answers take the time of a drive of this kind, with its write buffer, flushes and garbage
    /// collection; never less than the device's own.
    #[arg(long, value_name = "DRIVE")]
    pub nand: Option<DriveArg>,
    /// Give up whatever the device of namespace 1 holds and format it.
    #[arg(long)]
    pub format: bool,
    /// The storage engine.
    #[arg(long)]
    pub engine: Option<Engine>,
    /// When formatting: the granularity of space in bytes, 512 to 4096.
    #[arg(long, value_name = "BYTES")]
    pub unit: Option<Size>,
    /// When formatting: how keys are hashed.
    #[arg(long)]
    pub hash: Option<Hash>,
    /// When a write is acknowledged.
    #[arg(long)]
    pub durability: Option<Durability>,
    /// Address to listen on, IPv4 or an IPv6 one in brackets; port 0 takes a free one. May be given several times.
    #[arg(long, value_name = "ADDR:PORT", value_delimiter = ',')]
    pub listen: Vec<SocketAddr>,
    /// Processors to run on, one reactor each.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// The subsystem's name.
    #[arg(long)]
    pub nqn: Option<String>,
    /// How devices are reached.
    #[arg(long)]
    pub driver: Option<Driver>,
    /// What an idle core does.
    #[arg(long)]
    pub polling: Option<Polling>,
    /// Where what is changed while the node runs is kept: a file, "auto" (beside a device that is a file, with ".state"
    /// at the end) or "none". Without one nothing can be changed.
    #[arg(long, value_name = "FILE")]
    pub state: Option<String>,
    /// The administration socket: a path, "auto" (/run/octokv/PORT.sock for root, else under $XDG_RUNTIME_DIR) or
    /// "none".
    #[arg(long, value_name = "SOCKET")]
    pub admin: Option<String>,
}

/// Which namespace.
#[derive(Debug, Args)]
pub struct UrlArgs {
    /// The namespace: nvme+tcp://HOST:PORT/NQN?nsid=N.
    #[arg(long, env = "OCTOKV_URL", default_value = DEFAULT_URL)]
    pub url: Url,
}

/// How keys and values are written.
#[derive(Clone, Copy, Debug, Args)]
pub struct KeyFormatArgs {
    /// Keys and values on the command line, and keys that are printed, are hexadecimal.
    #[arg(long)]
    pub hex: bool,
}

/// Arguments of `put`.
#[derive(Debug, Args)]
pub struct PutArgs {
    /// The key.
    pub key: OsString,
    /// The value.
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    pub value: Option<OsString>,
    /// Take the value from a file, byte for byte; "-" is standard input.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Fail when the key exists (exit code 1).
    #[arg(long, conflicts_with = "update_only")]
    pub add_only: bool,
    /// Fail when the key does not exist (exit code 3).
    #[arg(long)]
    pub update_only: bool,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// The key.
    pub key: OsString,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `delete`.
#[derive(Debug, Args)]
pub struct DeleteArgs {
    /// The key.
    pub key: OsString,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `exist`.
#[derive(Debug, Args)]
pub struct ExistArgs {
    /// The key.
    pub key: OsString,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Begin at this key, or where it would be.
    #[arg(long, value_name = "KEY")]
    pub start: Option<OsString>,
    /// Print at most so many [default: all].
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The file or block device.
    #[arg(long, value_name = "PATH")]
    pub device: PathBuf,
}

/// Arguments of `sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Which seeds: from A up to, and without, B [default: 0..100; with --minutes all from 0].
    #[arg(long, value_name = "A..B")]
    pub seeds: Option<SeedRange>,
    /// calm, crashes, network, disk, everything, blocks, namespaces or remote [default: each in turn].
    #[arg(long, value_name = "NAME", value_parser = parse_scenario)]
    pub scenario: Option<Scenario>,
    /// Begin no further seed after so many minutes.
    #[arg(long)]
    pub minutes: Option<f64>,
}

/// Seeds as they are typed: `A..B`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedRange(pub Range<u64>);

impl FromStr for SeedRange {
    type Err = String;
    fn from_str(text: &str) -> Result<SeedRange, String> {
        let seeds = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
        let seeds = seeds.filter(|seeds: &Range<u64>| !seeds.is_empty());
        seeds.map(SeedRange).ok_or_else(|| "seeds are A..B, two numbers, A less than B".to_owned())
    }
}

fn parse_scenario(name: &str) -> Result<Scenario, String> {
    let names = Scenario::ALL.map(Scenario::name).join(", ");
    Scenario::by_name(name).ok_or_else(|| format!("there are {names}"))
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What is put under load: Key Value commands to the node, the engine here on the node's blocks, or the engine
    /// here on files of this machine.
    #[arg(long, value_name = "NAME", default_value = "kv")]
    pub system: SystemArg,
    /// fillseq, fillrandom, overwrite, readseq, readrandom, readmissing, seekrandom, deleteseq, deleterandom, ycsb-a to ycsb-f,
    /// ycsb-w; a list runs in order.
    ///
    /// Keys: fillseq, readseq and deleteseq take them in order, ycsb-d draws the latest, other ycsb-* by zipf, the rest uniformly.
    /// readmissing reads keys that nothing stores. seekrandom lists 100 keys from one on. YCSB needs its keys: run
    /// fillseq first, with the same --num, sizes and seed. ycsb-a: 50 % reads, 50 % updates; -b: 95 % and 5 %; -c: reads;
    /// -d: 95 % reads, 5 % inserts; -e: 95 % lists of 1 to 100 keys, without their values, 5 % inserts; -f: 50 % reads,
    /// 50 % read-modify-writes, each one operation; -w: updates. Inserted keys follow --num in order.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "fillrandom,readrandom")]
    pub workload: Vec<Workload>,
    /// Bytes of a key: N, or A..B for lengths from A to B, each as often as any other.
    #[arg(long, value_name = "BYTES", default_value = "16")]
    pub key_size: SizeDistributionArg,
    /// Bytes of a value: N, A..B, or lengths with weights such as 4096:9,65536:1.
    #[arg(long, value_name = "BYTES", default_value = "16384")]
    pub value_size: SizeDistributionArg,
    /// How keys are drawn [default: each workload's own].
    #[arg(long)]
    pub distribution: Option<DistributionArg>,
    /// Skew of zipf and latest, 0.01 to 10 [default: 0.99].
    #[arg(long, value_name = "THETA")]
    pub zipf: Option<f64>,
    /// Independent clients, each on a connection of its own (with host-kvs: OS threads).
    #[arg(long, value_name = "COUNT", default_value_t = 12)]
    pub threads: usize,
    /// Operations in flight on each.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub depth: usize,
    /// Different keys.
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    pub num: u64,
    /// Operations of each workload [default: as many as there are keys].
    #[arg(long, value_name = "COUNT", conflicts_with = "seconds")]
    pub ops: Option<u64>,
    /// How long each workload runs, instead of a number of operations.
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Begin so many operations a second, over all threads, whether or not others have ended; their latency counts from
    /// when they were meant to begin [default: each stream begins one when its last has ended].
    #[arg(long, value_name = "PER_SECOND")]
    pub rate: Option<f64>,
    /// Run each workload at each of these rates.
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "rate")]
    pub rates: Vec<f64>,
    /// Seconds in which operations are done and not counted, before each workload.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub warm_up: f64,
    /// Processors that make the load, one OS thread each, dealt among the namespaces [default: one thread for each
    /// namespace, anywhere].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub client_cores: Vec<usize>,
    /// The name by which the load's connections say who they are: to a node each name is a tenant of its own.
    #[arg(long, value_name = "NQN", value_parser = parse_host_nqn)]
    pub host_nqn: Option<String>,
    /// What the load's OS threads do while they wait for answers.
    #[arg(long, default_value = "adaptive")]
    pub client_polling: Polling,
    /// Draws keys and makes values; the same seed stores the same values.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Do not compare values that are read with what was stored.
    #[arg(long)]
    pub no_verify: bool,
    /// Write the results, with machine and settings, to a file, whose missing directories are created; "-" is standard
    /// output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the results into files of a directory, which is created if it is missing: N-WORKLOAD-latency.svg,
    /// N-WORKLOAD-throughput.svg, with --rates N-WORKLOAD-rates.svg; N counts the workloads from 1.
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// With remote-engine: when the engine here acknowledges a write [default: flush].
    #[arg(long)]
    pub durability: Option<Durability>,
    /// With remote-engine or host-kvs: give up what the namespace or the files hold and format them.
    #[arg(long)]
    pub format: bool,
    /// With host-kvs: the directory of its files, which must be there; missing files are made.
    #[arg(long, value_name = "DIR")]
    pub host_kvs_dir: Option<PathBuf>,
    /// With host-kvs: how many files there are [default: as many as threads].
    #[arg(long, value_name = "COUNT")]
    pub host_kvs_files: Option<usize>,
    /// Measure these beside the node, in turns, and print ratios: rocksdb (db_bench, embedded), redis, valkey (a server
    /// of our own that syncs every write); a list, or given several times.
    ///
    /// All run on this machine with the plan's keys, values, threads, depth and length. rocksdb does fillseq, fillrandom,
    /// overwrite, readrandom, readmissing and deleterandom; redis and valkey all but seekrandom and ycsb-e.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub against: Vec<Peer>,
    /// With --against: how often ours and theirs take turns [default: 3].
    #[arg(long, value_name = "COUNT")]
    pub rounds: Option<usize>,
    /// With --against: where the peers' files are for as long as it takes; on the disk of the node's device, to compare
    /// like with like [default: the working directory].
    #[arg(long, value_name = "DIR")]
    pub peer_dir: Option<PathBuf>,
    /// With --against redis or valkey: what the load's OS threads do while they wait for that server, which has no cores
    /// of its own that a spinning thread would leave it [default: sleep].
    #[arg(long)]
    pub peer_polling: Option<Polling>,
    /// The namespace: nvme+tcp://HOST:PORT/NQN?nsid=N. Given several times, threads, keys and operations are dealt among
    /// them: key i is on number i modulo how many there are.
    #[arg(long, env = "OCTOKV_URL", default_value = DEFAULT_URL)]
    pub url: Vec<Url>,
}

/// How keys are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DistributionArg {
    /// All alike.
    Uniform,
    /// Some often, most seldom, the often drawn ones anywhere.
    Zipf,
    /// The newest most often.
    Latest,
}

/// Which system is put under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SystemArg {
    /// Key Value commands to the node.
    Kv,
    /// The hash engine in this process, on the node's namespace of blocks.
    RemoteEngine,
    /// The hash engine in this process, on files, synced with each put.
    HostKvs,
}

/// A name of a host.
pub fn parse_host_nqn(text: &str) -> Result<String, String> {
    octokv_wire::nqn::check(text).map(str::to_owned).map_err(|invalid| invalid.to_string())
}
