//! Configuration of a node: the defaults, overridden by the configuration file, overridden by flags.
//!
//! The file is TOML with the keys of [`ConfigFile`], flat except for `sched` and the `[[namespace]]` tables.
//! `octokv.example.toml` documents every key with its default, which a test verifies.

use crate::choices::{DriverChoice, DurabilityChoice, HashChoice, PollingChoice};
use crate::config_error::{self, InvalidSetting, check_range};
use crate::drive_arg::DriveArg;
use crate::engine_arg::EngineArg;
use crate::namespace_config;
use crate::serve_args::ServeArgs;
use crate::size::{PrefetchSetting, RateSetting, Size, UnitSetting};
use crate::token_costs;
use octokv_admin::DeviceNames;
use octokv_admin::scheduling_api::SchedConfigPatch;
use octokv_base::Nanos;
use octokv_engine::log::format::configured_chunk_bytes;
use octokv_engine::lsm::prefetch_degree::{DEGREE_MAX, PrefetchMode};
use octokv_engine::{EngineKind, FormatConfig, HashKind, TreeOptions};
use octokv_node::{DeviceConfig, ExistingDataPolicy, NodeConfig};
use octokv_nvmf::SubsystemConfig;
use octokv_runtime::DeviceDriver;
use octokv_sched::StartingCosts;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Block size of the memory device: the smallest, so that any unit is a multiple.
const MEMORY_BLOCK_BYTES: u32 = 512;

/// All settings of a configuration file; octokv.example.toml documents each.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConfigFile {
    pub device: DeviceNames,
    pub size: Size,
    pub nand: DriveArg,
    pub engine: EngineArg,
    pub cache_bytes: Size,
    pub prepare_bytes: Size,
    pub compact_bytes_per_second: RateSetting,
    pub scrub_bytes_per_second: Size,
    pub iterator_idle_s: u64,
    pub value_prefetch: PrefetchSetting,
    pub compress: bool,
    pub device_tokens: bool,
    pub token_costs: String,
    pub unit: UnitSetting,
    pub hash: HashChoice,
    pub bitmap_partitions: u32,
    pub value_bytes_max: Size,
    pub inline_bytes_max: Size,
    pub swap_bytes: Size,
    pub swap_gap: u32,
    pub partitions: u16,
    pub chunk_bytes: UnitSetting,
    pub key_bytes_max: u16,
    pub durability: DurabilityChoice,
    pub driver: DriverChoice,
    pub device_depth: usize,
    pub device_timeout_s: u64,
    pub listen: Vec<SocketAddr>,
    pub nqn: String,
    pub serial: String,
    pub model: String,
    pub cores: Vec<usize>,
    pub drive_cores: Vec<usize>,
    pub polling: PollingChoice,
    pub spin_us: u64,
    pub buffer_bytes: Size,
    pub requests_max: usize,
    pub connections_max: usize,
    pub controllers_max: usize,
    pub controllers_per_host_max: usize,
    pub io_queues_max: u16,
    pub queue_depth: u16,
    pub in_capsule_bytes: Size,
    pub h2c_data_bytes_max: Size,
    pub receive_bytes_max: Size,
    pub send_buffer_bytes_max: Size,
    pub event_requests_max: u8,
    pub keep_alive_max_s: u64,
    pub handshake_limit_s: u64,
    pub discovery_idle_limit_s: u64,
    pub stop_limit_s: u64,
    pub hosts: BTreeSet<String>,
    pub referrals: Vec<SocketAddr>,
    pub state: String,
    pub admin: String,
    pub sched: SchedConfigPatch,
    pub namespace: Vec<namespace_config::NamespaceSection>,
}

/// The keys of [`ConfigFile`] in their order, for suggestions in error messages.
pub const CONFIG_KEYS: &[&str] = &[
    "device",
    "size",
    "nand",
    "engine",
    "cache_bytes",
    "prepare_bytes",
    "compact_bytes_per_second",
    "scrub_bytes_per_second",
    "iterator_idle_s",
    "value_prefetch",
    "compress",
    "device_tokens",
    "token_costs",
    "unit",
    "hash",
    "bitmap_partitions",
    "value_bytes_max",
    "inline_bytes_max",
    "swap_bytes",
    "swap_gap",
    "partitions",
    "chunk_bytes",
    "key_bytes_max",
    "durability",
    "driver",
    "device_depth",
    "device_timeout_s",
    "listen",
    "nqn",
    "serial",
    "model",
    "cores",
    "drive_cores",
    "polling",
    "spin_us",
    "buffer_bytes",
    "requests_max",
    "connections_max",
    "controllers_max",
    "controllers_per_host_max",
    "io_queues_max",
    "queue_depth",
    "in_capsule_bytes",
    "h2c_data_bytes_max",
    "receive_bytes_max",
    "send_buffer_bytes_max",
    "event_requests_max",
    "keep_alive_max_s",
    "handshake_limit_s",
    "discovery_idle_limit_s",
    "stop_limit_s",
    "hosts",
    "referrals",
    "state",
    "admin",
    "sched",
    "namespace",
];

/// Path of a file of the node, or a keyword.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathSetting {
    /// `auto`: the default path, if there is one.
    Auto,
    /// `none`: disabled.
    None,
    /// An explicit path.
    Path(PathBuf),
}

const AUTO: &str = "auto";
const NONE: &str = "none";

impl PathSetting {
    fn parse(word: &str) -> PathSetting {
        match word {
            AUTO => PathSetting::Auto,
            NONE => PathSetting::None,
            path => PathSetting::Path(path.into()),
        }
    }
}

/// Configuration of changes at run time.
#[derive(Clone, Debug)]
pub struct AdminConfig {
    /// Path of the state file.
    pub state_file: PathSetting,
    /// Path of the admin socket.
    pub socket: PathSetting,
    /// Host list of the configuration.
    pub hosts: BTreeSet<String>,
}

const NANOS_PER_SECOND: u64 = 1_000_000_000;

impl Default for ConfigFile {
    /// The defaults of the node.
    fn default() -> ConfigFile {
        let node = NodeConfig::default();
        let (target, format) = (&node.subsystem, &node.format);
        let device = DeviceNames::of_configs(&node.devices);
        let size = match &node.devices[0] {
            DeviceConfig::File { create_bytes, .. } => create_bytes.unwrap_or(1 << 30),
            DeviceConfig::Memory { bytes, .. } => *bytes,
        };
        let (polling, spin) = match node.polling {
            octokv_runtime::Polling::Adaptive { spin } => (PollingChoice::Adaptive, spin),
            octokv_runtime::Polling::Busy => (PollingChoice::Busy, Nanos::ZERO),
            octokv_runtime::Polling::Sleep => (PollingChoice::Sleep, Nanos::ZERO),
        };
        ConfigFile {
            device,
            size: Size(size),
            nand: DriveArg(node.drive_profile),
            engine: EngineArg::default(),
            cache_bytes: Size(node.cache_bytes),
            prepare_bytes: Size(node.prepare_bytes),
            compact_bytes_per_second: RateSetting(node.compact_bytes_per_second),
            scrub_bytes_per_second: Size(node.scrub_bytes_per_second),
            iterator_idle_s: node.tree.iterator_idle.0 / NANOS_PER_SECOND,
            value_prefetch: PrefetchSetting(node.tree.prefetch),
            compress: node.tree.compresses,
            device_tokens: node.device_tokens.is_some(),
            token_costs: NONE.to_owned(),
            unit: UnitSetting(format.unit_bytes),
            hash: match format.hash {
                HashKind::Xxh3 => HashChoice::Xxh3,
                HashKind::Sha1 => HashChoice::Sha1,
            },
            bitmap_partitions: 1 << format.bitmap_partitions_log2,
            value_bytes_max: Size(u64::from(format.value_bytes_max)),
            inline_bytes_max: Size(u64::from(format.inline_bytes_max)),
            swap_bytes: Size(format.swap_bytes),
            partitions: format.partitions,
            chunk_bytes: UnitSetting(format.chunk_bytes),
            key_bytes_max: target.key_bytes_max,
            durability: match node.durability {
                octokv_engine::Durability::PowerSafe => DurabilityChoice::Flush,
                octokv_engine::Durability::Completed => DurabilityChoice::Device,
            },
            driver: match node.driver {
                DeviceDriver::Auto => DriverChoice::Auto,
                DeviceDriver::Uring => DriverChoice::Uring,
                DeviceDriver::Threads => DriverChoice::Threads,
            },
            device_depth: node.device_depth,
            device_timeout_s: node.device_timeout.0 / NANOS_PER_SECOND,
            swap_gap: node.swap_gap,
            listen: node.listen.clone(),
            nqn: node.nqn.clone(),
            serial: target.serial.clone(),
            model: target.model.clone(),
            cores: node.cores.clone(),
            drive_cores: node.drive_cores.clone(),
            polling,
            spin_us: spin.0 / 1_000,
            buffer_bytes: Size(node.buffer_bytes as u64),
            requests_max: node.requests_max,
            connections_max: node.connections_max,
            controllers_max: target.controllers_max,
            controllers_per_host_max: target.controllers_per_host_max,
            io_queues_max: target.io_queues_max,
            queue_depth: target.queue_depth,
            in_capsule_bytes: Size(u64::from(target.in_capsule_bytes)),
            h2c_data_bytes_max: Size(u64::from(target.h2c_data_bytes_max)),
            receive_bytes_max: Size(target.receive_bytes_max as u64),
            send_buffer_bytes_max: Size(target.send_buffer_bytes_max as u64),
            event_requests_max: target.event_requests_max,
            keep_alive_max_s: target.keep_alive_max.0 / NANOS_PER_SECOND,
            handshake_limit_s: target.handshake_limit.0 / NANOS_PER_SECOND,
            discovery_idle_limit_s: target.discovery_idle_limit.0 / NANOS_PER_SECOND,
            stop_limit_s: node.shutdown_timeout.0 / NANOS_PER_SECOND,
            hosts: [octokv_admin::service::ANY_HOST.to_owned()].into(),
            referrals: node.referrals.clone(),
            state: AUTO.to_owned(),
            admin: AUTO.to_owned(),
            sched: SchedConfigPatch::default(),
            namespace: Vec::new(),
        }
    }
}

/// Builds the node's configuration from the file and the flags of `serve`.
///
/// # Errors
/// One line with the file, line and key of the first invalid setting.
pub fn node_config(flags: &ServeArgs) -> Result<(NodeConfig, AdminConfig), String> {
    let (mut config, source) = match &flags.config {
        None => (ConfigFile::default(), None),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| format!("configuration {}: {error}", path.display()))?;
            (parse_config(path, &text)?, Some((path, text)))
        }
    };
    config.apply_flags(flags);
    let of_logs =
        [("--partitions", flags.partitions.is_some()), ("--chunk-bytes", flags.chunk_bytes.is_some())];
    if let Some((flag, _)) =
        of_logs.into_iter().find(|(_, given)| *given && !config.has_engine(EngineKind::Log))
    {
        return Err(format!("{flag} is for engine = \"log\", which no namespace has"));
    }
    if flags.token_costs.is_some() && !config.device_tokens {
        return Err("--token-costs is for --device-tokens, which is off".to_owned());
    }
    let existing_data = if flags.format { ExistingDataPolicy::Discard } else { ExistingDataPolicy::Check };
    let node_config = config.to_node_config(existing_data);
    let admin_config = config.admin_config();
    let settings = node_config.map_err(|InvalidSetting { key, requirement }| {
        let location = source.as_ref().and_then(|(path, text)| config_error::locate_key(path, text, key));
        let location = location.map_or_else(String::new, |location| format!("{location}: "));
        format!("{location}{key} must be {requirement}")
    })?;
    Ok((NodeConfig { device_tokens: config.starting_costs()?, ..settings }, admin_config))
}

/// Parses a configuration file over the defaults.
///
/// # Errors
/// One line with the file, line and key, and the most similar valid key.
pub fn parse_config(path: &Path, text: &str) -> Result<ConfigFile, String> {
    toml::from_str(text).map_err(|error| config_error::describe_error(path, text, &error, CONFIG_KEYS))
}

impl ConfigFile {
    fn apply_flags(&mut self, flags: &ServeArgs) {
        fn over<T: Clone>(setting: &mut T, flag: &Option<T>) {
            if let Some(value) = flag {
                setting.clone_from(value);
            }
        }
        over(&mut self.size, &flags.size);
        over(&mut self.nand, &flags.nand);
        over(&mut self.engine, &flags.engine);
        over(&mut self.cache_bytes, &flags.cache_bytes);
        over(&mut self.prepare_bytes, &flags.prepare_bytes);
        over(&mut self.compact_bytes_per_second, &flags.compact_bytes_per_second);
        over(&mut self.scrub_bytes_per_second, &flags.scrub_bytes_per_second);
        over(&mut self.iterator_idle_s, &flags.iterator_idle_s);
        over(&mut self.device_timeout_s, &flags.device_timeout_s);
        over(&mut self.swap_gap, &flags.swap_gap);
        over(&mut self.value_prefetch, &flags.value_prefetch);
        self.compress |= flags.compress;
        self.device_tokens |= flags.device_tokens;
        over(&mut self.token_costs, &flags.token_costs);
        over(&mut self.inline_bytes_max, &flags.inline_bytes_max);
        over(&mut self.swap_bytes, &flags.swap_bytes);
        over(&mut self.partitions, &flags.partitions);
        over(&mut self.chunk_bytes, &flags.chunk_bytes);
        over(&mut self.unit, &flags.unit);
        over(&mut self.hash, &flags.hash);
        over(&mut self.durability, &flags.durability);
        over(&mut self.nqn, &flags.nqn);
        over(&mut self.driver, &flags.driver);
        over(&mut self.polling, &flags.polling);
        over(&mut self.state, &flags.state);
        over(&mut self.admin, &flags.admin);
        if !flags.device.is_empty() {
            self.device = DeviceNames::new(flags.device.clone());
        }
        if !flags.listen.is_empty() {
            self.listen.clone_from(&flags.listen);
        }
        if !flags.cores.is_empty() {
            self.cores.clone_from(&flags.cores);
        }
        if !flags.drive_cores.is_empty() {
            self.drive_cores.clone_from(&flags.drive_cores);
        }
    }

    /// The starting costs of device tokens, those of `token_costs` if that names a file; `None` without tokens.
    fn starting_costs(&self) -> Result<Option<StartingCosts>, String> {
        match self.token_costs.as_str() {
            _ if !self.device_tokens => Ok(None),
            NONE => Ok(Some(StartingCosts::default())),
            path => token_costs::read(Path::new(path)).map(Some),
        }
    }

    /// Whether a namespace of the configuration has this engine.
    fn has_engine(&self, kind: EngineKind) -> bool {
        let named = self.namespace.iter().filter_map(|table| table.engine);
        named.chain([self.engine]).any(|EngineArg(engine)| engine == kind)
    }

    /// Validates the settings whose violation is an assertion in another crate.
    fn check(&self) -> Result<(), InvalidSetting> {
        let bad = |key, must: &str| Err(InvalidSetting { key, requirement: must.to_owned() });
        if !matches!(self.unit.0, None | Some(512 | 1024 | 2048 | 4096)) {
            return bad("unit", "512, 1024, 2048 or 4096 bytes, or \"auto\"");
        }
        if !self.bitmap_partitions.is_power_of_two() || self.bitmap_partitions > 4096 {
            return bad("bitmap_partitions", "a power of two from 1 to 4096");
        }
        if self.device.is_incomplete() {
            return bad("device", "a path, or \"memory\"");
        }
        if let Err(why) = octokv_wire::nqn::check(&self.nqn) {
            return bad("nqn", &format!("an NQN of the form nqn.YYYY-MM.DOMAIN:NAME ({why})"));
        }
        for host in self.hosts.iter().filter(|host| *host != octokv_admin::service::ANY_HOST) {
            if let Err(why) = octokv_wire::nqn::check(host) {
                return bad("hosts", &format!("\"any\", or host NQNs; \"{host}\" is not one ({why})"));
            }
        }
        if self.token_costs.is_empty() {
            return bad("token_costs", "a path, or \"none\"");
        }
        for (key, location) in [("state", &self.state), ("admin", &self.admin)] {
            if location.is_empty() {
                return bad(key, "a path, \"auto\" or \"none\"");
            }
        }
        let printable = |text: &str| text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if !printable(&self.serial) || self.serial.len() > 20 {
            return bad("serial", "up to 20 printable ASCII characters");
        }
        if !printable(&self.model) || self.model.len() > 40 {
            return bad("model", "up to 40 printable ASCII characters");
        }
        check_range("value_bytes_max", &self.value_bytes_max.0, 4096, 1 << 30, "4KiB to 1GiB")?;
        let inline_bytes_max = u64::from(octokv_engine::lsm::superblock::INLINE_BYTES_LIMIT);
        check_range("inline_bytes_max", &self.inline_bytes_max.0, 0, inline_bytes_max, "at most 16KiB")?;
        check_range("partitions", &self.partitions, 1, u16::MAX, "1 to 65535")?;
        let chunk_bytes = 1..=octokv_engine::log::log_layout::CHUNK_BYTES_MAX;
        if self.chunk_bytes.0.is_some_and(|bytes| !bytes.is_power_of_two() || !chunk_bytes.contains(&bytes)) {
            return bad("chunk_bytes", "a power of two up to 16MiB, or \"auto\"");
        }
        check_range("iterator_idle_s", &self.iterator_idle_s, 1, 86_400, "1 to 86400")?;
        if let PrefetchMode::Fixed(values) = self.value_prefetch.0 {
            check_range("value_prefetch", &values, 0, DEGREE_MAX, "auto, or 0 to 64")?;
        }
        check_range("key_bytes_max", &self.key_bytes_max, 16, 1024, "16 to 1024")?;
        check_range("device_depth", &self.device_depth, 1, 32_768, "1 to 32768")?;
        check_range("swap_gap", &self.swap_gap, 1, 1_000_000, "1 to 1000000")?;
        check_range("device_timeout_s", &self.device_timeout_s, 1, 3_600, "1 to 3600")?;
        check_range("requests_max", &self.requests_max, 1, octokv_node::REQUESTS_MAX, "1 to 16777216")?;
        check_range("connections_max", &self.connections_max, 1, 1 << 20, "1 to 1048576")?;
        check_range("controllers_max", &self.controllers_max, 1, 0xff00, "1 to 65280")?;
        check_range("controllers_per_host_max", &self.controllers_per_host_max, 1, 0xff00, "1 to 65280")?;
        check_range("io_queues_max", &self.io_queues_max, 1, 65_534, "1 to 65534")?;
        check_range("queue_depth", &self.queue_depth, 2, u16::MAX, "2 to 65535")?;
        check_range("in_capsule_bytes", &self.in_capsule_bytes.0, 0, 64 << 10, "at most 64KiB")?;
        if !self.in_capsule_bytes.0.is_multiple_of(16) {
            return bad("in_capsule_bytes", "a multiple of 16");
        }
        check_range("h2c_data_bytes_max", &self.h2c_data_bytes_max.0, 4096, 1 << 30, "4KiB to 1GiB")?;
        if !self.h2c_data_bytes_max.0.is_multiple_of(4) {
            return bad("h2c_data_bytes_max", "a multiple of 4");
        }
        let least = self.value_bytes_max.0;
        check_range(
            "receive_bytes_max",
            &self.receive_bytes_max.0,
            least,
            u64::MAX,
            "value_bytes_max or more",
        )?;
        check_range("send_buffer_bytes_max", &self.send_buffer_bytes_max.0, 4096, u64::MAX, "4KiB or more")?;
        check_range("event_requests_max", &self.event_requests_max, 1, u8::MAX, "1 to 255")?;
        check_range("keep_alive_max_s", &self.keep_alive_max_s, 1, 4_294_967, "1 to 4294967")?;
        check_range("handshake_limit_s", &self.handshake_limit_s, 1, 86_400, "1 to 86400")?;
        check_range("discovery_idle_limit_s", &self.discovery_idle_limit_s, 1, 86_400, "1 to 86400")?;
        check_range("stop_limit_s", &self.stop_limit_s, 0, 3_600, "at most 3600")?;
        check_range("spin_us", &self.spin_us, 0, 1_000_000, "at most 1000000")
    }

    fn sched_config(&self) -> Result<octokv_sched::SchedConfig, InvalidSetting> {
        let applied = self.sched.apply_to(&octokv_sched::SchedConfig::default());
        applied.map_err(|why| InvalidSetting { key: "sched", requirement: format!("valid: {why}") })
    }

    fn admin_config(&self) -> AdminConfig {
        AdminConfig {
            state_file: PathSetting::parse(&self.state),
            socket: PathSetting::parse(&self.admin),
            hosts: self.hosts.clone(),
        }
    }

    fn subsystem_config(&self) -> SubsystemConfig {
        SubsystemConfig {
            serial: self.serial.clone(),
            model: self.model.clone(),
            controllers_max: self.controllers_max,
            controllers_per_host_max: self.controllers_per_host_max,
            connections_max: self.connections_max,
            io_queues_max: self.io_queues_max,
            queue_depth: self.queue_depth,
            in_capsule_bytes: self.in_capsule_bytes.0 as u32,
            h2c_data_bytes_max: self.h2c_data_bytes_max.0 as u32,
            value_bytes_max: self.value_bytes_max.0 as u32,
            key_bytes_max: self.key_bytes_max,
            receive_bytes_max: self.receive_bytes_max.0 as usize,
            send_buffer_bytes_max: self.send_buffer_bytes_max.0 as usize,
            keep_alive_max: Nanos::from_secs(self.keep_alive_max_s),
            handshake_limit: Nanos::from_secs(self.handshake_limit_s),
            discovery_idle_limit: Nanos::from_secs(self.discovery_idle_limit_s),
            event_requests_max: self.event_requests_max,
            ..SubsystemConfig::new(&self.nqn)
        }
    }

    /// Converts to the node's configuration.
    fn to_node_config(&self, existing_data: ExistingDataPolicy) -> Result<NodeConfig, InvalidSetting> {
        self.check()?;
        let defaults = NodeConfig::default();
        let format = FormatConfig {
            engine: self.engine.0,
            unit_bytes: self.unit.0,
            hash: match self.hash {
                HashChoice::Xxh3 => HashKind::Xxh3,
                HashChoice::Sha1 => HashKind::Sha1,
            },
            bitmap_partitions_log2: self.bitmap_partitions.ilog2() as u8,
            value_bytes_max: self.value_bytes_max.0 as u32,
            inline_bytes_max: self.inline_bytes_max.0 as u32,
            swap_bytes: self.swap_bytes.0,
            partitions: self.partitions,
            chunk_bytes: self.chunk_bytes.0.map(|bytes| configured_chunk_bytes(bytes, self.unit.0)),
            ..defaults.format
        };
        let namespaces = self
            .namespace
            .iter()
            .map(|table| table.to_config(format, &self.nqn))
            .collect::<Result<Vec<_>, _>>();
        Ok(NodeConfig {
            devices: self.device.to_configs(Some(self.size.0), MEMORY_BLOCK_BYTES),
            drive_profile: self.nand.0,
            cache_bytes: self.cache_bytes.0,
            prepare_bytes: self.prepare_bytes.0,
            compact_bytes_per_second: self.compact_bytes_per_second.0,
            scrub_bytes_per_second: self.scrub_bytes_per_second.0,
            tree: TreeOptions {
                iterator_idle: Nanos::from_secs(self.iterator_idle_s),
                prefetch: self.value_prefetch.0,
                compresses: self.compress,
            },
            device_tokens: self.device_tokens.then(StartingCosts::default),
            format,
            existing_data,
            durability: match self.durability {
                DurabilityChoice::Flush => octokv_engine::Durability::PowerSafe,
                DurabilityChoice::Device => octokv_engine::Durability::Completed,
            },
            listen: self.listen.clone(),
            cores: self.cores.clone(),
            drive_cores: self.drive_cores.clone(),
            nqn: self.nqn.clone(),
            polling: self.polling.to_runtime(Nanos::from_micros(self.spin_us)),
            driver: match self.driver {
                DriverChoice::Auto => DeviceDriver::Auto,
                DriverChoice::Uring => DeviceDriver::Uring,
                DriverChoice::Threads => DeviceDriver::Threads,
            },
            device_depth: self.device_depth,
            device_timeout: Nanos::from_secs(self.device_timeout_s),
            swap_gap: self.swap_gap,
            buffer_bytes: self.buffer_bytes.0 as usize,
            connections_max: self.connections_max,
            requests_max: self.requests_max,
            subsystem: self.subsystem_config(),
            shutdown_timeout: Nanos::from_secs(self.stop_limit_s),
            referrals: self.referrals.clone(),
            scheduling: self.sched_config()?,
            host_acl: octokv_admin::service::host_acl(&self.hosts),
            namespaces: namespaces?,
            ..defaults
        })
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
