//! Load on a node: runs the workloads, prints a table, writes the document.

use crate::arguments::Bench;
use crate::child::address_of;
use crate::meter::Meter;
use crate::outcome::{Failure, Outcome};
use anyhow::{Context, anyhow};
use octokv_base::Nanos;
use octokv_bench::report::{Document, Figures, Machine, SCHEMA, Settings, table_head, table_line};
use octokv_bench::{End, Host, Plan, run as run_plan};
use octokv_client::Url;
use octokv_runtime::Polling;
use octokv_sys::{clock, thread};
use std::io::Write;
use std::path::Path;

/// How long the load's threads spin before they sleep, where they do.
const SPIN: Nanos = Nanos::from_micros(100);

/// What this process gives the generator.
pub const HOST: Host = Host {
    now: clock::now,
    spawn: |core, body| match core {
        Some(core) => thread::spawn_pinned(core, "octokv-load", body).map(drop),
        None => thread::spawn("octokv-load", body).map(drop),
    },
};

/// Runs `octokv bench`.
pub fn run(bench: &Bench) -> Outcome {
    let plan = plan(bench)?;
    let cores: Vec<Option<usize>> = match bench.client_cores.as_slice() {
        [] => vec![None],
        cores => cores.iter().copied().map(Some).collect(),
    };
    let to_stdout = bench.json.as_deref() == Some(Path::new("-"));
    let mut results = Vec::new();
    if !to_stdout {
        writeln!(std::io::stdout(), "{}", table_head())?;
    }
    for &workload in &plan.workloads {
        let one = Plan { workloads: vec![workload], ..plan.clone() };
        let polling = bench.client_polling.policy(SPIN);
        let figures = measure(&one, &bench.at.url, &cores, polling, Meter::new(workload.name()))?;
        for line in &figures {
            if !to_stdout {
                writeln!(std::io::stdout(), "{}", table_line(line))?;
            }
        }
        results.extend(figures);
    }
    if let Some(file) = &bench.json {
        write_document(file, bench, &plan, results)?;
    }
    Ok(())
}

/// Runs a plan against a namespace.
pub fn measure(
    plan: &Plan,
    url: &Url,
    cores: &[Option<usize>],
    polling: Polling,
    mut meter: Meter,
) -> Result<Vec<Figures>, Failure> {
    let address = address_of(url)?;
    let client = client_settings(url);
    let figures = run_plan(plan, address, &client, cores, polling, HOST, |progress| {
        meter.show(progress.part, &format!("{} operations", progress.operations));
    });
    Ok(figures.map_err(|error| anyhow!("{error} (--url {url})"))?)
}

/// Settings of a session with a namespace.
pub fn client_settings(url: &Url) -> octokv_client::Settings {
    octokv_client::Settings {
        subsystem: url.subsystem.clone(),
        namespace: url.namespace,
        ..octokv_client::Settings::default()
    }
}

fn plan(bench: &Bench) -> Result<Plan, Failure> {
    let span = |name: &str, seconds: f64| match seconds {
        seconds if (0.0..=1e6).contains(&seconds) => Ok(Nanos((seconds * 1e9) as u64)),
        _ => Err(Failure::Usage(format!("--{name} {seconds}: must be from 0 to 1000000"))),
    };
    let bytes = |name: &str, size: u64, most: u64| match usize::try_from(size) {
        Ok(bytes) if size <= most => Ok(bytes),
        _ => Err(Failure::Usage(format!("--{name} {size}: must be at most {most}"))),
    };
    let plan = Plan {
        workloads: bench.workload.clone(),
        key_bytes: bytes("key-size", bench.key_size.0, octokv_base::KEY_BYTES_MAX as u64)?,
        value_bytes: bytes("value-size", bench.value_size.0, 1 << 30)?,
        keys: bench.num,
        threads: bench.threads,
        depth: bench.depth,
        end: match bench.seconds {
            Some(seconds) => End::Time(span("seconds", seconds)?),
            None => End::Operations(bench.ops.unwrap_or(bench.num)),
        },
        warm_up: span("warm-up", bench.warm_up)?,
        seed: bench.seed,
        verify: !bench.no_verify,
    };
    plan.check().map_err(|invalid| Failure::Usage(invalid.to_string()))?;
    Ok(plan)
}

fn write_document(file: &Path, bench: &Bench, plan: &Plan, results: Vec<Figures>) -> Outcome {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let document = Document {
        schema: SCHEMA,
        command: words.join(" "),
        machine: machine(),
        settings: Settings::new(&bench.at.url.to_string(), plan),
        results,
    };
    let mut text = serde_json::to_string_pretty(&document).context("the document")?;
    text.push('\n');
    if file == Path::new("-") {
        return Ok(std::io::stdout().write_all(text.as_bytes())?);
    }
    Ok(std::fs::write(file, text).with_context(|| format!("document {}", file.display()))?)
}

/// What is known of this machine.
fn machine() -> Machine {
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
