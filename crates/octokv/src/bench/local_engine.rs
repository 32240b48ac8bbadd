//! The system `local-engine` from the flags of `octokv bench`: which device, which engine, how it is opened.

use crate::choices::DurabilityChoice;
use crate::cli::{BenchArgs, SystemArg};
use crate::engine_arg::EngineArg;
use crate::exit_status::{CliError, CliResult};
use crate::size::{Size, UnitSetting};
use anyhow::{Context, anyhow};
use octokv_bench::baselines::{BaselineKind, EmbeddedOptions};
use octokv_bench::local_engine::{LocalEngine, LocalVolumeConfig};
use octokv_bench::workload::WorkloadOp;
use octokv_bench::{BenchConfig, SystemUnderTest, Workload};
use octokv_engine::log::format::configured_chunk_bytes;
use octokv_engine::log::log_layout::CHUNK_BYTES_MAX;
use octokv_engine::{Durability, EngineKind, FormatConfig, OpenConfig, WallClock};
use octokv_node::{NodeConfig, default_compact_bytes_per_second};
use octokv_sys::{clock, file, process};

/// Least bytes of buffers of a core: four values of the largest length.
const POOL_BYTES_MIN: usize = 8 << 20;
/// Least bytes of a cache.
const CACHE_BYTES_MIN: u64 = 1 << 20;

/// Opens the engine on the device of `--path`, with the defaults of `octokv serve`.
///
/// # Errors
/// A usage error with the flag; a device that cannot be opened, or holds other data.
pub fn open(bench: &BenchArgs, config: &BenchConfig) -> Result<LocalEngine, CliError> {
    let usage = |what: &str| Err(CliError::Usage(what.to_owned()));
    let EngineArg(engine) = bench.engine.unwrap_or_default();
    let Some(path) = &bench.path else { return usage("--system local-engine needs --path FILE") };
    let cache_bytes = bench.cache.unwrap_or_default().0;
    if (1..CACHE_BYTES_MIN).contains(&cache_bytes) {
        return usage("--cache: must be 0 or at least 1MiB");
    }
    if engine != EngineKind::Log && (bench.partitions.is_some() || bench.chunk_bytes.is_some()) {
        return usage("--partitions and --chunk-bytes are for --engine log");
    }
    let UnitSetting(chunk_bytes) = bench.chunk_bytes.unwrap_or(UnitSetting(None));
    if chunk_bytes.is_some_and(|bytes| !bytes.is_power_of_two() || bytes > CHUNK_BYTES_MAX) {
        return usage("--chunk-bytes: must be a power of two up to 16MiB, or auto");
    }
    let UnitSetting(unit_bytes) = bench.unit.unwrap_or(UnitSetting(None));
    if !matches!(unit_bytes, None | Some(512 | 1024 | 2048 | 4096)) {
        return usage("--unit: must be 512, 1024, 2048 or 4096, or auto");
    }
    let defaults = FormatConfig::default();
    let partitions = bench.partitions.unwrap_or(defaults.partitions);
    if partitions == 0 {
        return usage("--partitions: must be at least 1");
    }
    if !bench.against.is_empty() && engine == EngineKind::Lsm && cache_bytes == 0 {
        return usage("--against with --engine lsm needs --cache, which both get");
    }
    let value_bytes_max = u32::try_from(config.value_sizes.max_bytes()).unwrap_or(u32::MAX);
    let format = FormatConfig {
        engine,
        value_bytes_max: defaults.value_bytes_max.max(value_bytes_max),
        unit_bytes,
        partitions,
        chunk_bytes: chunk_bytes.map(|bytes| configured_chunk_bytes(bytes, unit_bytes)),
        seed: process::random_u64().context("random numbers for a format")?,
        ..defaults
    };
    let defaults =
        local_volume_config(format, bench.durability, bench.client_cores.len().max(1), cache_bytes);
    let volume = LocalVolumeConfig { pool_bytes: pool_bytes(bench, defaults.pool_bytes), ..defaults };
    let device = file::open_device(path, bench.size.map(|Size(bytes)| bytes), true)
        .with_context(|| format!("device {}", path.display()))?;
    Ok(LocalEngine::open(device, volume, bench.format).map_err(|error| anyhow!("{error}"))?)
}

/// The configuration of a volume that is opened as `octokv serve` does by default.
pub fn local_volume_config(
    format: FormatConfig,
    durability: Option<DurabilityChoice>,
    cores: usize,
    cache_bytes: u64,
) -> LocalVolumeConfig {
    let node = NodeConfig::default();
    let open = OpenConfig {
        durability: match durability {
            None | Some(DurabilityChoice::Flush) => Durability::PowerSafe,
            Some(DurabilityChoice::Device) => Durability::Completed,
        },
        cores,
        cache_bytes,
        prepare_bytes: node.prepare_bytes,
        compact_bytes_per_second: default_compact_bytes_per_second(format.engine),
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::new(clock::wall).with_monotonic(clock::now),
        tokens: None,
    };
    LocalVolumeConfig {
        format,
        open,
        driver: node.driver,
        device_depth: node.device_depth,
        drive: None,
        pool_bytes: node.buffer_bytes,
        now: clock::now,
    }
}

/// Bytes of buffers of each core.
fn pool_bytes(bench: &BenchArgs, default: usize) -> usize {
    let Some(Size(bytes)) = bench.memory else { return default };
    let of_core = usize::try_from(bytes).unwrap_or(usize::MAX) / bench.client_cores.len().max(1);
    of_core.clamp(POOL_BYTES_MIN, default)
}

/// Checks the flags and workloads that only some systems support.
///
/// # Errors
/// A usage error with the flag or the workload.
pub fn check(bench: &BenchArgs, config: &BenchConfig) -> CliResult {
    let system = bench.system;
    let is_local = system == SystemArg::LocalEngine;
    let flags = [
        ("size", bench.size.is_some()),
        ("engine", bench.engine.is_some()),
        ("unit", bench.unit.is_some()),
        ("partitions", bench.partitions.is_some()),
        ("chunk-bytes", bench.chunk_bytes.is_some()),
        ("cache", bench.cache.is_some()),
    ];
    if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given && !is_local) {
        return Err(CliError::Usage(format!("--{flag} is for --system local-engine")));
    }
    if bench.write_rate.is_some() && !config.workloads.iter().any(|workload| workload.has_writer()) {
        return Err(CliError::Usage(
            "--write-rate is for --workload readwhilewriting and scanwhilewriting".to_owned(),
        ));
    }
    let is_ordered = is_local && bench.engine.is_some_and(|EngineArg(engine)| engine == EngineKind::Lsm);
    let reason = |workload: &Workload| {
        let lists = workload.includes(WorkloadOp::List);
        match system {
            SystemArg::Kv => None,
            SystemArg::HostKvs if workload.has_writer() => Some("a file has one writer at a time"),
            SystemArg::RocksDb if workload.has_writer() => Some("db_bench has it: --against rocksdb"),
            _ if lists && !(is_ordered && *workload == Workload::YcsbE) => {
                Some("lists of keys are for --system kv")
            }
            _ if workload.includes(WorkloadOp::Scan) && !is_ordered => {
                Some("scans are for --system kv, and local-engine with --engine lsm")
            }
            _ => None,
        }
    };
    let unsupported = config.workloads.iter().find_map(|workload| Some((workload, reason(workload)?)));
    match unsupported {
        Some((workload, why)) => Err(CliError::Usage(format!("--workload {}: {why}", workload.name()))),
        None => Ok(()),
    }
}

/// Checks that a baseline can be compared with an engine in this process.
///
/// # Errors
/// A usage error with the baseline.
pub fn check_baselines(kinds: &[BaselineKind]) -> CliResult {
    match kinds.iter().find(|kind| !kind.is_embedded()) {
        Some(kind) => {
            let what = format!("--against {} is for --system kv: it is reached over a network", kind.name());
            Err(CliError::Usage(what))
        }
        None => Ok(()),
    }
}

/// What an embedded baseline gets to be like an engine in this process; `None` for a node.
pub fn embedded_options(system: &SystemUnderTest) -> Option<EmbeddedOptions> {
    match system {
        SystemUnderTest::LocalEngine(engine) => Some(EmbeddedOptions {
            cache_bytes: engine.open_config().cache_bytes,
            write_buffer_bytes: engine.memtable_bytes(),
        }),
        _ => None,
    }
}
