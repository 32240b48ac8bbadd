//! Load on a node, or on an engine in this process: runs the workloads, prints a table, writes the document.
//!
//! # Layout
//! - [`baselines`]: peers in turns with the node.
//! - [`bench_config`]: the flags as a plan, and what is wrong with them.
//! - [`plots`]: the files of `--svg`.
//! - [`targets`]: the nodes of `--url`, and what is wrong with several.

mod baselines;
mod bench_config;
mod plots;
mod targets;

pub use targets::client_settings;

use crate::cli::{Bench, SystemName};
use crate::config;
use crate::exit_status::{Failure, Outcome};
use crate::progress::Meter;
use anyhow::{Context, anyhow};
use baselines::{Beside, Peers};
use octokv_base::Nanos;
use octokv_bench::host_kvs::{DbFile, HostKvs, file_bytes};
use octokv_bench::report::{
    Document, Figures, Machine, SCHEMA, Settings, table_head, table_line, target_line,
};
use octokv_bench::workload::Action;
use octokv_bench::{EngineSettings, Failed, Host, Node, Plan, System, remote_engine, run as run_plan};
use octokv_client::Url;
use octokv_engine::Durability;
use octokv_runtime::Polling;
use octokv_sys::{clock, file, process, thread};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

/// How long the load's threads spin before they sleep, where they do.
pub const SPIN: Nanos = Nanos::from_micros(100);

/// What this process gives the generator.
pub const HOST: Host = Host {
    now: clock::now,
    spawn: |core, body| match core {
        Some(core) => thread::spawn_pinned(core, "octokv-load", body).map(drop),
        None => thread::spawn("octokv-load", body).map(drop),
    },
};

/// Memory for what an engine in this process has in work.
const POOL_BYTES: usize = 256 << 20;

/// Runs `octokv bench`.
pub fn run(bench: &Bench) -> Outcome {
    let plan = bench_config::of(bench)?;
    baselines::check(bench)?;
    if let Some(directory) = &bench.svg {
        plots::check(directory)?;
    }
    if let Some(file) = &bench.json {
        check_document(file)?;
    }
    targets::check(bench, &plan)?;
    let system = system(bench, &plan)?;
    let nodes = targets::nodes(bench)?;
    let cores: Vec<Option<usize>> = match bench.client_cores.as_slice() {
        [] => vec![None],
        cores => cores.iter().copied().map(Some).collect(),
    };
    let polling = bench.client_polling.policy(SPIN);
    let to_stdout = bench.json.as_deref() == Some(Path::new("-"));
    let ours = |plan: &Plan| {
        let meter = Meter::new(plan.workloads[0].name());
        Ok(measure_on(&system, plan, &nodes, &cores, polling, meter)?.remove(0))
    };
    let beside = match bench.against.as_slice() {
        [] => Beside { figures: alone(bench, &plan, to_stdout, ours)?, ..Beside::default() },
        _ => {
            let plan = Plan { rate: bench.rate, ..plan.clone() };
            let peers = Peers::new(bench, &plan, &cores)?;
            peers.run(&plan, ours, !to_stdout)?
        }
    };
    if let Some(file) = &bench.json {
        write_document(file, bench, &system, &plan, beside)?;
    }
    if let System::HostKvs(store) = &system {
        store.close().map_err(|error| anyhow!("{error}"))?;
    }
    Ok(())
}

/// Runs every workload at every rate; tells each at its end and draws them all.
fn alone(
    bench: &Bench,
    plan: &Plan,
    to_stdout: bool,
    mut ours: impl FnMut(&Plan) -> Result<Figures, Failure>,
) -> Result<Vec<Figures>, Failure> {
    // One list per workload, of one result per rate.
    let mut results = Vec::new();
    if !to_stdout {
        writeln!(std::io::stdout(), "{}", table_head())?;
    }
    for &workload in &plan.workloads {
        let mut of_workload = Vec::new();
        for rate in bench_config::rates(bench) {
            let figures = ours(&Plan { workloads: vec![workload], rate, ..plan.clone() })?;
            if !to_stdout {
                tell(&figures)?;
            }
            of_workload.push(figures);
        }
        results.push(of_workload);
    }
    if let Some(directory) = &bench.svg {
        plots::write(directory, &results, !bench.rates.is_empty())?;
    }
    Ok(results.concat())
}

/// The lines of one workload.
fn tell(figures: &Figures) -> Outcome {
    let mut out = std::io::stdout();
    writeln!(out, "{}", table_line(figures))?;
    for target in &figures.targets {
        writeln!(out, "{}", target_line(target))?;
    }
    Ok(())
}

/// Runs a plan of Key Value commands against a namespace.
pub fn measure(
    plan: &Plan,
    url: &Url,
    cores: &[Option<usize>],
    polling: Polling,
    meter: Meter,
) -> Result<Vec<Figures>, Failure> {
    measure_on(&System::Kv, plan, &[targets::node(url)?], cores, polling, meter)
}

fn measure_on(
    system: &System,
    plan: &Plan,
    nodes: &[Node],
    cores: &[Option<usize>],
    polling: Polling,
    mut meter: Meter,
) -> Result<Vec<Figures>, Failure> {
    let figures = run_plan(plan, system, nodes, cores, polling, HOST, |progress| {
        meter.show(progress.part, &format!("{} operations", progress.operations));
    });
    Ok(figures.map_err(|Failed { target, error }| match nodes[target].name.as_str() {
        "" => anyhow!("{error}"),
        url => anyhow!("{error} (--url {url})"),
    })?)
}

/// The system that is asked for, ready to be put under load.
fn system(bench: &Bench, plan: &Plan) -> Result<System, Failure> {
    let of = |flag: &str, given: bool, allowed: bool, systems: &str| match given && !allowed {
        true => Err(Failure::Usage(format!("--{flag} is for --system {systems}"))),
        false => Ok(()),
    };
    let (remote, host) = (bench.system == SystemName::RemoteEngine, bench.system == SystemName::HostKvs);
    of("durability", bench.durability.is_some(), remote, "remote-engine")?;
    of("format", bench.format, remote || host, "remote-engine or host-kvs")?;
    of("host-kvs-dir", bench.host_kvs_dir.is_some(), host, "host-kvs")?;
    of("host-kvs-files", bench.host_kvs_files.is_some(), host, "host-kvs")?;
    let kv = !remote && !host;
    of("rate", bench.rate.is_some(), kv, "kv")?;
    of("rates", !bench.rates.is_empty(), kv, "kv")?;
    if let Some(workload) = plan.workloads.iter().find(|workload| workload.does(Action::List) && !kv) {
        let what = format!("--workload {}: lists of keys are for --system kv", workload.name());
        return Err(Failure::Usage(what));
    }
    let seed = process::random_u64().context("random numbers for a format")?;
    match bench.system {
        SystemName::Kv => Ok(System::Kv),
        SystemName::RemoteEngine => {
            if bench.client_cores.len() > 1 {
                let what = "--client-cores: with --system remote-engine the engine runs on one core";
                return Err(Failure::Usage(what.to_owned()));
            }
            let durability = match bench.durability {
                None | Some(config::Durability::Flush) => Durability::Flush,
                Some(config::Durability::Device) => Durability::Device,
            };
            let engine = EngineSettings { durability, pool_bytes: POOL_BYTES, seed };
            let url = &bench.url[0];
            let node = targets::node(url)?;
            remote_engine::prepare(plan, &node, engine, bench.format, clock::now)
                .map_err(|error| anyhow!("{error} (--url {url})"))?;
            Ok(System::RemoteEngine(engine))
        }
        SystemName::HostKvs => {
            let Some(directory) = &bench.host_kvs_dir else {
                return Err(Failure::Usage("--system host-kvs needs --host-kvs-dir DIR".to_owned()));
            };
            let files = open_files(directory, bench, plan)?;
            let store = HostKvs::open(files, plan, POOL_BYTES, seed).map_err(|error| anyhow!("{error}"))?;
            Ok(System::HostKvs(Arc::new(store)))
        }
    }
}

/// The files of a Host KVS: those that are there, or new ones.
fn open_files(directory: &Path, bench: &Bench, plan: &Plan) -> Result<Vec<DbFile>, Failure> {
    let count = bench.host_kvs_files.unwrap_or(plan.threads);
    if !(1..=FILES_MAX).contains(&count) {
        return Err(Failure::Usage(format!("--host-kvs-files {count}: must be from 1 to {FILES_MAX}")));
    }
    let bytes = file_bytes(plan, count);
    let open = |number: usize| -> anyhow::Result<DbFile> {
        let path = directory.join(format!("octokv-host-kvs-{number}.db"));
        let named = || format!("file {}", path.display());
        if bench.format && path.exists() {
            std::fs::remove_file(&path).with_context(named)?;
        }
        let buffered = file::open_device(&path, Some(bytes), false).with_context(named)?;
        let direct = buffered.direct_view().with_context(named)?;
        Ok(DbFile { buffered, direct })
    };
    Ok((0..count).map(open).collect::<anyhow::Result<_>>()?)
}

/// The most files of a Host KVS.
const FILES_MAX: usize = 1024;

/// Whether a document can be written to a file, which stays as it is.
///
/// # Errors
/// A usage error that says why not.
fn check_document(file: &Path) -> Outcome {
    let there = std::fs::symlink_metadata(file);
    // What is no file and no directory is written to once, at the end.
    if file == Path::new("-")
        || there.as_ref().is_ok_and(|there| !there.is_file() && !there.is_dir() && !there.is_symlink())
    {
        return Ok(());
    }
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
    if let Err(error) = opened {
        return Err(Failure::Usage(format!("--json {}: cannot be written: {error}", file.display())));
    }
    if there.is_err() {
        std::fs::remove_file(file).with_context(|| format!("document {}", file.display()))?;
    }
    Ok(())
}

fn write_document(file: &Path, bench: &Bench, system: &System, plan: &Plan, beside: Beside) -> Outcome {
    let places = match &bench.host_kvs_dir {
        Some(directory) => vec![directory.display().to_string()],
        None => bench.url.iter().map(Url::to_string).collect(),
    };
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let document = Document {
        schema: SCHEMA,
        octokv_version: env!("CARGO_PKG_VERSION"),
        command: words.join(" "),
        machine: machine(),
        settings: Settings::new(
            system,
            &places,
            plan,
            &bench_config::rates(bench).flatten().collect::<Vec<_>>(),
        ),
        results: beside.figures,
        peers: beside.accounts,
        comparisons: beside.comparisons,
    };
    let mut text = serde_json::to_string_pretty(&document).context("the document")?;
    text.push('\n');
    if file == Path::new("-") {
        return Ok(std::io::stdout().write_all(text.as_bytes())?);
    }
    Ok(std::fs::write(file, text).with_context(|| format!("document {}", file.display()))?)
}

/// What is known of this machine.
pub fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| -> Option<String> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let memory_kib = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|text| text.split_ascii_whitespace().next()?.parse::<u64>().ok());
    Machine {
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".to_owned()),
        cores: thread::cores().len(),
        memory_bytes: memory_kib.unwrap_or(0) * 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        architecture: std::env::consts::ARCH.to_owned(),
    }
}
