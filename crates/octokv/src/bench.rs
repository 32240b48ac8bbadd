//! `octokv bench`: runs workloads against a node or a local engine, prints a table, writes the JSON report.
//!
//! # Layout
//! - [`baselines`]: other stores measured alternately with the node.
//! - [`bench_config`]: the benchmark configuration from the flags.
//! - [`local_engine`]: an engine on a local device; which system supports what.
//! - [`rocksdb`]: RocksDB in this process.
//! - [`output`]: table rows on standard output.
//! - [`platform`]: clock, threads and polling of the load generator.
//! - [`plots`]: the files of `--svg`.
//! - [`targets`]: the nodes of `--url`.

mod baselines;
mod bench_config;
mod local_engine;
mod output;
mod platform;
mod plots;
mod rocksdb;
mod targets;

pub use local_engine::local_volume_config;
pub use platform::{PLATFORM, SPIN_BEFORE_SLEEP};
pub use targets::session_config;

use crate::choices::DurabilityChoice;
use crate::cli::{BenchArgs, SystemArg};
use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use anyhow::{Context, anyhow};
use baselines::{BaselineRunner, ComparisonRun};
use octokv_bench::host_kvs::{DbFile, HostKvs, db_file_bytes};
use octokv_bench::machine_info::MachineInfo;
use octokv_bench::report::{BENCH_SCHEMA, BenchReport, ReportedConfig};
use octokv_bench::workload_result::{WorkloadResult, table_header};
use octokv_bench::{
    BenchConfig, LocalEngineConfig, SystemUnderTest, TargetFailure, TargetNode, remote_engine,
    run as run_plan,
};
use octokv_client::Url;
use octokv_engine::Durability;
use octokv_runtime::Polling;
use octokv_sys::{clock, file, output_file, process};
use output::print_result;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// Buffer pool of a local engine, in bytes.
const POOL_BYTES: usize = 256 << 20;

/// Runs `octokv bench`.
///
/// # Errors
/// Invalid flags, an output that cannot be written, or a failed workload.
pub fn run(bench: &BenchArgs) -> CliResult {
    let config = bench_config::from_flags(bench)?;
    baselines::check(bench)?;
    targets::check(bench, &config)?;
    prepare_outputs(bench)?;
    let system = prepare_system(bench, &config)?;
    let nodes = targets::nodes(bench)?;
    let cores: Vec<Option<usize>> = match bench.client_cores.as_slice() {
        [] => vec![None],
        cores => cores.iter().copied().map(Some).collect(),
    };
    let polling = bench.client_polling.to_runtime(SPIN_BEFORE_SLEEP);
    let to_stdout = bench.json.as_deref() == Some(Path::new(output_file::STDOUT));
    let is_compared = !bench.against.is_empty();
    let ours = |config: &BenchConfig| {
        if let (SystemUnderTest::LocalEngine(engine), true) = (&system, is_compared) {
            // The baseline runs each workload in a process of its own, which opens its files.
            engine.reopen().map_err(|error| anyhow!("{error}"))?;
        }
        let reporter = ProgressReporter::new(config.workloads[0].name());
        Ok(run_on_system(&system, config, &nodes, &cores, polling, reporter)?.remove(0))
    };
    let comparison_run = match bench.against.as_slice() {
        [] => ComparisonRun {
            results: run_without_baselines(bench, &config, to_stdout, ours)?,
            ..ComparisonRun::default()
        },
        _ => {
            let config = BenchConfig { rate: bench.rate, ..config.clone() };
            let discard = |config: &BenchConfig| match &system {
                SystemUnderTest::LocalEngine(engine) => {
                    Ok(engine.discard_all().map_err(|error| anyhow!("{error}"))?)
                }
                _ => ours(&baselines::deletion_config(config)).map(drop),
            };
            let embedded = local_engine::embedded_options(&system);
            let runner = BaselineRunner::new(bench, &config, &cores, embedded)?;
            runner.run(&config, ours, discard, !to_stdout)?
        }
    };
    if let Some(file) = &bench.json {
        write_json_report(file, bench, &system, &config, comparison_run)?;
    }
    let closed = match &system {
        SystemUnderTest::HostKvs(store) => store.close(),
        SystemUnderTest::LocalEngine(engine) => engine.close(),
        _ => Ok(()),
    };
    Ok(closed.map_err(|error| anyhow!("{error}"))?)
}

/// Creates the directories of `--json` and `--svg` and checks that they can be written, before anything runs.
fn prepare_outputs(bench: &BenchArgs) -> CliResult {
    if let Some(file) = &bench.json {
        output_file::prepare_file(file).map_err(|error| {
            CliError::Usage(format!("--json {}: cannot be written: {error}", file.display()))
        })?;
    }
    if let Some(directory) = &bench.svg {
        output_file::prepare_directory(directory).map_err(|error| {
            CliError::Usage(format!("--svg {}: files cannot be created: {error}", directory.display()))
        })?;
    }
    Ok(())
}

/// Runs every workload at every rate, prints each result and draws the plots.
fn run_without_baselines(
    bench: &BenchArgs,
    config: &BenchConfig,
    to_stdout: bool,
    mut ours: impl FnMut(&BenchConfig) -> Result<WorkloadResult, CliError>,
) -> Result<Vec<WorkloadResult>, CliError> {
    // One list per workload, of one result per rate.
    let mut results = Vec::new();
    if !to_stdout {
        writeln!(std::io::stdout(), "{}", table_header())?;
    }
    for &workload in &config.workloads {
        let mut of_workload = Vec::new();
        for rate in bench_config::rates(bench) {
            let result = ours(&BenchConfig { workloads: vec![workload], rate, ..config.clone() })?;
            if !to_stdout {
                print_result(&result)?;
            }
            of_workload.push(result);
        }
        results.push(of_workload);
    }
    if let Some(directory) = &bench.svg {
        plots::write(directory, &results, !bench.rates.is_empty())?;
    }
    Ok(results.concat())
}

/// Runs a configuration of key-value commands against a namespace.
///
/// # Errors
/// An unreachable node, or a failed workload.
pub fn run_kv(
    config: &BenchConfig,
    url: &Url,
    cores: &[Option<usize>],
    polling: Polling,
    reporter: ProgressReporter,
) -> Result<Vec<WorkloadResult>, CliError> {
    run_on_system(&SystemUnderTest::Kv, config, &[targets::node(url)?], cores, polling, reporter)
}

fn run_on_system(
    system: &SystemUnderTest,
    config: &BenchConfig,
    nodes: &[TargetNode],
    cores: &[Option<usize>],
    polling: Polling,
    mut reporter: ProgressReporter,
) -> Result<Vec<WorkloadResult>, CliError> {
    let results = run_plan(config, system, nodes, cores, polling, PLATFORM, |progress| {
        reporter.update(progress.fraction, &format!("{} operations", progress.operations));
    });
    Ok(results.map_err(|TargetFailure { target, error }| match nodes[target].name.as_str() {
        "" => anyhow!("{error}"),
        url => anyhow!("{error} (--url {url})"),
    })?)
}

/// Prepares the system under test that the flags select.
fn prepare_system(bench: &BenchArgs, config: &BenchConfig) -> Result<SystemUnderTest, CliError> {
    let of = |flag: &str, given: bool, allowed: bool, systems: &str| match given && !allowed {
        true => Err(CliError::Usage(format!("--{flag} is for --system {systems}"))),
        false => Ok(()),
    };
    let (remote, host) = (bench.system == SystemArg::RemoteEngine, bench.system == SystemArg::HostKvs);
    let (kv, local) = (bench.system == SystemArg::Kv, bench.system == SystemArg::LocalEngine);
    of("durability", bench.durability.is_some(), remote || local, "remote-engine or local-engine")?;
    let rocksdb = bench.system == SystemArg::RocksDb;
    of("format", bench.format, !kv, "remote-engine, local-engine, host-kvs or rocksdb")?;
    of("path", bench.path.is_some(), local || rocksdb, "local-engine or rocksdb")?;
    of("memory", bench.memory.is_some(), local || rocksdb, "local-engine or rocksdb")?;
    of("no-sync", bench.no_sync, rocksdb, "rocksdb")?;
    of("rocksdb-options", bench.rocksdb_options.is_some(), rocksdb, "rocksdb")?;
    of("host-kvs-dir", bench.host_kvs_dir.is_some(), host, "host-kvs")?;
    of("host-kvs-files", bench.host_kvs_files.is_some(), host, "host-kvs")?;
    of("rate", bench.rate.is_some(), kv, "kv")?;
    of("rates", !bench.rates.is_empty(), kv, "kv")?;
    local_engine::check(bench, config)?;
    let seed = process::random_u64().context("random numbers for a format")?;
    match bench.system {
        SystemArg::Kv => Ok(SystemUnderTest::Kv),
        SystemArg::RemoteEngine => {
            if bench.client_cores.len() > 1 {
                let what = "--client-cores: with --system remote-engine the engine runs on one core";
                return Err(CliError::Usage(what.to_owned()));
            }
            let durability = match bench.durability {
                None | Some(DurabilityChoice::Flush) => Durability::PowerSafe,
                Some(DurabilityChoice::Device) => Durability::Completed,
            };
            let engine = LocalEngineConfig { durability, pool_bytes: POOL_BYTES, seed };
            let url = &bench.url[0];
            let node = targets::node(url)?;
            remote_engine::format_if_needed(config, &node, engine, bench.format, clock::now)
                .map_err(|error| anyhow!("{error} (--url {url})"))?;
            Ok(SystemUnderTest::RemoteEngine(engine))
        }
        SystemArg::LocalEngine => {
            Ok(SystemUnderTest::LocalEngine(Arc::new(local_engine::open(bench, config)?)))
        }
        SystemArg::RocksDb => Ok(SystemUnderTest::RocksDb(Arc::new(rocksdb::open(bench, config)?))),
        SystemArg::HostKvs => {
            let Some(directory) = &bench.host_kvs_dir else {
                return Err(CliError::Usage("--system host-kvs needs --host-kvs-dir DIR".to_owned()));
            };
            let files = open_host_kvs_files(directory, bench, config)?;
            let store = HostKvs::open(files, config, POOL_BYTES, seed).map_err(|error| anyhow!("{error}"))?;
            Ok(SystemUnderTest::HostKvs(Arc::new(store)))
        }
    }
}

/// Opens or creates the files of a host KVS.
fn open_host_kvs_files(
    directory: &Path,
    bench: &BenchArgs,
    config: &BenchConfig,
) -> Result<Vec<DbFile>, CliError> {
    let count = bench.host_kvs_files.unwrap_or(config.threads);
    if !(1..=HOST_KVS_FILES_MAX).contains(&count) {
        return Err(CliError::Usage(format!(
            "--host-kvs-files {count}: must be from 1 to {HOST_KVS_FILES_MAX}"
        )));
    }
    let bytes = db_file_bytes(config, count);
    let open = |number: usize| -> anyhow::Result<DbFile> {
        let path = directory.join(format!("octokv-host-kvs-{number}.db"));
        let named = || format!("file {}", path.display());
        if bench.format && path.exists() {
            std::fs::remove_file(&path).with_context(named)?;
        }
        let buffered = file::open_device(&path, Some(bytes), false).with_context(named)?;
        let direct = buffered.reopen_direct().with_context(named)?;
        Ok(DbFile { buffered, direct })
    };
    Ok((0..count).map(open).collect::<anyhow::Result<_>>()?)
}

/// Maximum number of files of a host KVS.
const HOST_KVS_FILES_MAX: usize = 1024;

fn write_json_report(
    file: &Path,
    bench: &BenchArgs,
    system: &SystemUnderTest,
    config: &BenchConfig,
    comparison_run: ComparisonRun,
) -> CliResult {
    let locations = match bench.host_kvs_dir.as_ref().or(bench.path.as_ref()) {
        Some(path) => vec![path.display().to_string()],
        None => bench.url.iter().map(Url::to_string).collect(),
    };
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let document = BenchReport {
        schema: BENCH_SCHEMA,
        octokv_version: env!("CARGO_PKG_VERSION"),
        command: words.join(" "),
        machine: MachineInfo::of_this_machine(),
        settings: ReportedConfig::new(
            system,
            &locations,
            config,
            &bench_config::rates(bench).flatten().collect::<Vec<_>>(),
        ),
        results: comparison_run.results,
        baselines: comparison_run.baselines,
        comparisons: comparison_run.comparisons,
    };
    let mut text = serde_json::to_string_pretty(&document).context("the document")?;
    text.push('\n');
    Ok(output_file::write(file, text.as_bytes()).with_context(|| format!("document {}", file.display()))?)
}
