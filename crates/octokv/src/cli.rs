//! Commands, flags and their help.

use crate::admin;
use crate::arg_parsers::parse_host_nqn;
use crate::calibrate_args::CalibrateArgs;
use crate::choices::{DurabilityChoice, PollingChoice};
use crate::engine_arg::EngineArg;
use crate::sched;
use crate::serve_args::ServeArgs;
use crate::size::{Size, SizeDistributionArg, UnitSetting};
use clap::{Args, Parser, Subcommand, ValueEnum};
use octokv_bench::Workload;
use octokv_bench::baselines::BaselineKind;
use octokv_bench::config::SCAN_LENGTH_DEFAULT;
use octokv_client::Url;
use octokv_sim::Scenario;
use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use tracing_subscriber::filter::LevelFilter;

/// Default namespace of the client commands.
pub const DEFAULT_URL: &str = "nvme+tcp://127.0.0.1:4420/nqn.2026-11.io.octokv:node?nsid=1";

/// octokv: an open, persistent NVMe Key-Value target.
///
/// Results go to standard output, messages and log lines to standard error. Exit codes: 0 done, 1 the operation failed,
/// 2 usage error (arguments, the configuration file, or an invalid change), 3 the key does not exist.
#[derive(Debug, Parser)]
#[command(name = "octokv", version, about, max_term_width = 100)]
pub struct Cli {
    /// Log level on standard error, one line per event.
    #[arg(long, global = true, value_name = "LEVEL", default_value = "warn")]
    pub log: LogLevel,
    /// The command.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// Severity of logged events.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogLevel {
    /// No events.
    Off,
    /// Failures of this process.
    Error,
    /// Also rejected requests and degraded operation.
    Warn,
    /// Also connections, start and stop.
    Info,
    /// Also details for debugging.
    Debug,
    /// All events.
    Trace,
}

impl LogLevel {
    /// As a filter of the subscriber.
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

/// A command and its arguments.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run a storage node; prints one line when ready, shuts down cleanly on SIGTERM, SIGINT or SIGHUP.
    ///
    /// Each flag overrides its setting in the configuration file. octokv.example.toml documents all settings, including
    /// those without a flag, with their defaults.
    Serve(Box<ServeArgs>),
    /// Add, remove and list the namespaces of a running node.
    ///
    /// Changes are saved in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Ns(admin::NsCommand),
    /// Compact a key-value namespace of a running node fully, wait until that has ended, and print the namespace.
    ///
    /// A node compacts by itself beside its other work: this does all that there is at once.
    Compact(admin::CompactArgs),
    /// Control which hosts may connect to a running node.
    ///
    /// Changes are saved in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Host(admin::HostCommand),
    /// Set the access states of a running node's namespace groups (asymmetric namespace access).
    ///
    /// Changes are saved in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Ana(admin::AnaCommand),
    /// Configure scheduling on a running node: load balancing between cores, fairness between hosts.
    ///
    /// Changes are saved in the node's state file and survive restarts: docs/ADMINISTRATION.md.
    #[command(subcommand)]
    Sched(sched::SchedCommand),
    /// Show metrics of a running node's cores and hosts, per sampling interval.
    Stats(sched::StatsArgs),
    /// Store a value.
    Put(PutArgs),
    /// Write a value to standard output, unmodified.
    Get(GetArgs),
    /// Delete a key and its value.
    Delete(DeleteArgs),
    /// Print the length of a key's value in bytes.
    Exist(ExistArgs),
    /// List keys, one per line, in the node's order (by hash).
    ///
    /// A key of printable characters is printed as text. Any other key, and a text that begins with 0x, is printed as
    /// 0x and two hexadecimal digits per byte: pass such a key to the other commands with --hex.
    List(ListArgs),
    /// Print the pairs of a range of keys in order, one per line, as they are at one moment. The namespace needs an ordered engine.
    ///
    /// A line is key, tab, value. A key is printed as by `list`. A value of printable characters and spaces is printed as text; any
    /// other value, and a text that begins with 0x, as 0x and two hexadecimal digits per byte. If the node loses the iterator,
    /// as when it restarts, the scan goes on behind the last key, in the pairs as they are then, and says so on standard error.
    Scan(ScanArgs),
    /// Read and verify a whole device without changing it. The node must not be running.
    Check(CheckArgs),
    /// Make a volume of an earlier format one of the newest, in place. The node must not be running, and no earlier octokv can
    /// open the volume afterwards.
    Upgrade(UpgradeArgs),
    /// Benchmark a node, or a local engine: throughput and latency.
    Bench(Box<BenchArgs>),
    /// Measure what puts and deletes cost a device, relative to gets, as starting costs of device tokens (`octokv serve --token-costs`).
    Calibrate(Box<CalibrateArgs>),
    /// Run deterministic simulations with injected faults; a failure prints the command that replays its seed.
    Sim(SimArgs),
    /// Run a paper's experiment and print its results beside those of this machine.
    #[cfg(feature = "lab")]
    Reproduce(octokv_lab::ReproduceArgs),
    /// Demonstrate a node and a client on a temporary file: puts, gets, a kill, a restart, a benchmark.
    Demo,
}

/// Selects a namespace.
#[derive(Debug, Args)]
pub struct UrlArgs {
    /// The namespace: nvme+tcp://HOST:PORT/NQN?nsid=N.
    #[arg(long, env = "OCTOKV_URL", default_value = DEFAULT_URL)]
    pub url: Url,
}

/// Format of keys and values on the command line.
#[derive(Clone, Copy, Debug, Args)]
pub struct KeyFormatArgs {
    /// Read keys and values as hexadecimal, with or without 0x, and print keys, and the values of a scan, as hexadecimal
    /// without 0x.
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
    /// Read the value from a file; "-" is standard input.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Fail if the key exists (exit code 1).
    #[arg(long, conflicts_with = "update_only")]
    pub add_only: bool,
    /// Fail if the key does not exist (exit code 3).
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
    /// Start at this key, or at its position in the order.
    #[arg(long, value_name = "KEY")]
    pub start: Option<OsString>,
    /// Maximum number of keys [default: all].
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `scan`.
#[derive(Debug, Args)]
pub struct ScanArgs {
    /// Lowest key, included [default: no bound].
    #[arg(long, value_name = "KEY")]
    pub from: Option<OsString>,
    /// Key below which all keys are [default: no bound].
    #[arg(long, value_name = "KEY")]
    pub to: Option<OsString>,
    /// Begin with the highest key.
    #[arg(long)]
    pub reverse: bool,
    /// Print keys alone; values are not read.
    #[arg(long)]
    pub keys_only: bool,
    /// Maximum number of pairs [default: all].
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<u64>,
    /// Maximum number of pairs of one command to the node: 1 for one by one, as in the IterKVSSD paper.
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    #[command(flatten)]
    pub key_format: KeyFormatArgs,
    #[command(flatten)]
    pub url_args: UrlArgs,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The file or block device; all of a volume on several, each with this flag.
    #[arg(long, value_name = "PATH", required = true)]
    pub device: Vec<PathBuf>,
}

/// Arguments of `upgrade`.
#[derive(Debug, Args)]
pub struct UpgradeArgs {
    /// The file or block device; all of a volume on several, each with this flag.
    #[arg(long, value_name = "PATH", required = true)]
    pub device: Vec<PathBuf>,
}

/// Arguments of `sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Seeds from A up to but excluding B [default: 0..100; with --minutes all from 0].
    #[arg(long, value_name = "A..B")]
    pub seeds: Option<SeedRange>,
    /// calm, crashes, network, disk, everything, blocks, namespaces or remote [default: alternate].
    #[arg(long, value_name = "NAME", value_parser = parse_scenario)]
    pub scenario: Option<Scenario>,
    /// Start no further seed after this many minutes.
    #[arg(long)]
    pub minutes: Option<f64>,
}

/// A non-empty range of seeds, written `A..B`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedRange(pub Range<u64>);

impl FromStr for SeedRange {
    type Err = String;
    fn from_str(text: &str) -> Result<SeedRange, String> {
        let seeds = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
        let seeds = seeds.filter(|seeds: &Range<u64>| !seeds.is_empty());
        seeds.map(SeedRange).ok_or_else(|| "seeds must be A..B, two numbers with A less than B".to_owned())
    }
}

fn parse_scenario(name: &str) -> Result<Scenario, String> {
    let names = Scenario::ALL.map(Scenario::name).join(", ");
    Scenario::by_name(name).ok_or_else(|| format!("must be one of {names}"))
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// System under test: key-value commands to the node; an engine in this process on the node's blocks, on a local
    /// device by the path of a node, or on files; RocksDB in this process, to compare with.
    #[arg(long, value_name = "NAME", default_value = "kv")]
    pub system: SystemArg,
    /// fillseq, fillrandom, filluniquerandom, overwrite, readseq, readrandom, readmissing, readwhilewriting, seekrandom,
    /// scanrandom, scanwhilewriting, deleteseq, deleterandom, deleteuniquerandom, ycsb-a to ycsb-f, ycsb-w; a list runs in order.
    ///
    /// Keys: fillseq, readseq and deleteseq use them in order, filluniquerandom and deleteuniquerandom each once in random order, ycsb-d draws
    /// the latest, other ycsb-* by zipf, the rest uniformly. readmissing reads keys that were never stored.
    /// readwhilewriting reads beside one more stream, which stores. seekrandom lists 100 keys from a random one.
    /// scanrandom reads --scan-length pairs in order from a random key, by an iterator of its own; scanwhilewriting does
    /// the same beside one more stream, which stores. YCSB needs its keys: run fillseq first, with the same --num, sizes
    /// and seed.
    /// ycsb-a: 50 % reads, 50 % updates; -b: 95 % and 5 %; -c: reads; -d: 95 % reads, 5 % inserts; -e: 95 % scans of 1 to
    /// 100 pairs, without iterators lists of as many keys, 5 % inserts; -f: 50 % reads, 50 % read-modify-writes, each one
    /// operation; -w: updates. Inserted keys follow --num in order.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "fillrandom,readrandom")]
    pub workload: Vec<Workload>,
    /// Key size in bytes: N, or A..B for uniformly distributed sizes.
    #[arg(long, value_name = "BYTES", default_value = "16")]
    pub key_size: SizeDistributionArg,
    /// Value size in bytes: N, A..B, or sizes with weights such as 4096:9,65536:1.
    #[arg(long, value_name = "BYTES", default_value = "16384")]
    pub value_size: SizeDistributionArg,
    /// Key distribution [default: each workload's own].
    #[arg(long)]
    pub distribution: Option<DistributionArg>,
    /// Skew of zipf and latest, 0.01 to 10 [default: 0.99].
    #[arg(long, value_name = "THETA")]
    pub zipf: Option<f64>,
    /// Independent clients, each with its own connection (with an engine in this process: streams; with host-kvs: OS
    /// threads).
    #[arg(long, value_name = "COUNT", default_value_t = 12)]
    pub threads: usize,
    /// Operations in flight per client.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub depth: usize,
    /// Number of distinct keys.
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    pub num: u64,
    /// Operations per workload [default: --num].
    #[arg(long, value_name = "COUNT", conflicts_with = "seconds")]
    pub ops: Option<u64>,
    /// Run time of each workload in seconds, instead of a number of operations.
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Open loop: start this many operations per second over all threads, whether or not earlier ones completed;
    /// latency counts from the scheduled start [default: closed loop, each stream starts an operation when its previous
    /// one completes].
    #[arg(long, value_name = "PER_SECOND")]
    pub rate: Option<f64>,
    /// Run each workload at each of these rates.
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "rate")]
    pub rates: Vec<f64>,
    /// Pairs that a scan of scanrandom or scanwhilewriting reads.
    #[arg(long, value_name = "COUNT", default_value_t = SCAN_LENGTH_DEFAULT)]
    pub scan_length: u32,
    /// With readwhilewriting and scanwhilewriting: stores per second of the writer [default: each store when the previous one completes].
    #[arg(long, value_name = "PER_SECOND")]
    pub write_rate: Option<f64>,
    /// Seconds of unmeasured operations before each workload.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub warm_up: f64,
    /// CPUs of the load generator, one OS thread each, assigned to the namespaces in turn; with local-engine, those of the
    /// engine's reactors, which drive its streams [default: one thread for each namespace, unpinned].
    #[arg(long, visible_alias = "cores", value_name = "LIST", value_delimiter = ',')]
    pub client_cores: Vec<usize>,
    /// Host NQN of the connections: the node treats each NQN as one tenant.
    #[arg(long, value_name = "NQN", value_parser = parse_host_nqn)]
    pub host_nqn: Option<String>,
    /// Behaviour of an OS thread of the load generator while it waits for completions.
    #[arg(long, default_value = "adaptive")]
    pub client_polling: PollingChoice,
    /// Seed of keys and values; the same seed stores the same values.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Do not verify the values read.
    #[arg(long)]
    pub no_verify: bool,
    /// Send a command once the device of its key has tokens for it (nodes with `device_tokens`).
    #[arg(long)]
    pub flow_control: bool,
    /// Count operations that the node answers with an error status as failed, and go on: to measure the rest of a node
    /// while a device fails.
    #[arg(long)]
    pub tolerate_errors: bool,
    /// Write the results, with machine and settings, to a file, whose missing directories are created; "-" is standard
    /// output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the results into files of a directory, which is created if it is missing: N-WORKLOAD-latency.svg,
    /// N-WORKLOAD-throughput.svg, with --rates N-WORKLOAD-rates.svg; N counts the workloads from 1.
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// With remote-engine or local-engine: when the engine acknowledges a write [default: flush].
    #[arg(long)]
    pub durability: Option<DurabilityChoice>,
    /// With an engine in this process: discard the data of the namespace, the device or the files and format them.
    #[arg(long)]
    pub format: bool,
    /// With local-engine: file or block device of the engine; with --against, each fill discards its data. With rocksdb:
    /// directory of its files, which is created if it is missing.
    #[arg(long, value_name = "FILE")]
    pub path: Option<PathBuf>,
    /// With local-engine: size of a missing file.
    #[arg(long)]
    pub size: Option<Size>,
    /// With local-engine: the storage engine [default: hash].
    #[arg(long)]
    pub engine: Option<EngineArg>,
    /// With local-engine --engine log: stores of a new volume [default: 32].
    #[arg(long, value_name = "COUNT")]
    pub partitions: Option<u16>,
    /// With local-engine --engine log: bytes of a chunk of a new volume, at least 64 units (256KiB with --unit auto), or `auto` [default: auto].
    #[arg(long, value_name = "SIZE")]
    pub chunk_bytes: Option<UnitSetting>,
    /// With local-engine: allocation unit of a new volume in bytes, 512 to 4096, or `auto` [default: auto].
    #[arg(long, value_name = "BYTES")]
    pub unit: Option<UnitSetting>,
    /// With local-engine: memory of the engine's cache, which rocksdb gets too [default: 0, the engine's own].
    #[arg(long, value_name = "SIZE")]
    pub cache: Option<Size>,
    /// Memory for a store in this process. With local-engine: buffers of all cores, at least 8 MiB each [default: 256 MiB each].
    /// With rocksdb: half is its block cache, a quarter are memtables [default: 256 MiB].
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// With rocksdb: do not sync writes, as to load data that is not measured.
    #[arg(long)]
    pub no_sync: bool,
    /// With rocksdb: its options, as NAME=VALUE;..., behind ours, which follow from --memory.
    #[arg(long, value_name = "OPTIONS")]
    pub rocksdb_options: Option<String>,
    /// With host-kvs: existing directory of its files; missing files are created.
    #[arg(long, value_name = "DIR")]
    pub host_kvs_dir: Option<PathBuf>,
    /// With host-kvs: number of files [default: --threads].
    #[arg(long, value_name = "COUNT")]
    pub host_kvs_files: Option<usize>,
    /// Measure these baselines alternately with ours and print ratios: rocksdb (db_bench, embedded), redis, valkey
    /// (a server started for the run, which syncs every write); a list, or repeated. For kv; rocksdb for local-engine too.
    ///
    /// All run on this machine with the same keys, values, threads, depth and length. rocksdb supports fillseq,
    /// fillrandom, overwrite, readrandom, readmissing, readwhilewriting and scanrandom (its seekrandom); redis and valkey
    /// all but readwhilewriting and those that list or scan. Beside local-engine, rocksdb gets the same cache, a memtable
    /// of the same size and direct I/O, and ours is opened anew for each workload, as db_bench is.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub against: Vec<BaselineKind>,
    /// With --against: number of alternating rounds [default: 3].
    #[arg(long, value_name = "COUNT")]
    pub rounds: Option<usize>,
    /// With --against: directory of the baselines' temporary files; use the disk of the node's device to compare like
    /// with like [default: the working directory].
    #[arg(long, value_name = "DIR")]
    pub peer_dir: Option<PathBuf>,
    /// With --against redis or valkey: behaviour of an OS thread of the load generator while it waits for that server,
    /// which shares its cores with the generator [default: sleep].
    #[arg(long)]
    pub peer_polling: Option<PollingChoice>,
    /// The namespace: nvme+tcp://HOST:PORT/NQN?nsid=N. If repeated, threads, keys and operations are divided among the
    /// namespaces: key i is on namespace i modulo their number.
    #[arg(long, env = "OCTOKV_URL", default_value = DEFAULT_URL)]
    pub url: Vec<Url>,
}

/// Key distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DistributionArg {
    /// Every key with the same probability.
    Uniform,
    /// Zipf: few keys often, most rarely; frequent keys are scattered.
    Zipf,
    /// Recent keys most often.
    Latest,
}

/// System under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SystemArg {
    /// Key-value commands to the node.
    Kv,
    /// The hash engine in this process, on the node's block namespace.
    RemoteEngine,
    /// An engine in this process, on a local file or block device, by the path of a node.
    LocalEngine,
    /// The hash engine in this process, on files, synced with each put.
    HostKvs,
    /// RocksDB in this process, by its shared library, synced with each put: a baseline of local-engine.
    #[value(name = "rocksdb")]
    RocksDb,
}
