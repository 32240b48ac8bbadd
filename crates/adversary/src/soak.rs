//! Soak test: a node under load, attacks, kills and reconfiguration for a long time, with leak checks.
//!
//! ```text
//!   first part:  load ─ kill -9 ─ restart ─ load ─ kill -9 ─ …       every acknowledged write is present each time
//!   second part: restart ─ load (warm-up) ─ pause: SAMPLE ─ load … ─ pause: SAMPLE ─ verify ─ stop ─ octokv check
//! ```
//! Both samples are of the same process while it is idle. Pass criteria: no connection, controller, request, buffer or
//! device operation is left; its descriptors, sockets, threads and tasks must be equal, and its memory may grow by a fifth.
//! Memory under load is sampled each second and its slope printed: that shows leaks that end with the load.

use crate::node_process::{NodeProcess, ResourceUsage, eventually, is_idle};
use crate::soak_clients::{self, COUNTER_NAMES, SoakCommand, SoakControl};
use anyhow::{Context, Result, bail, ensure};
use octokv_admin::api_types::NodeStatus;
use octokv_base::Prng;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Configuration of a soak test.
#[derive(Clone, Debug)]
pub struct SoakConfig {
    /// Path of the octokv binary.
    pub binary: PathBuf,
    /// Total duration.
    pub span: Duration,
    /// Directory of the device file, on a file system with direct I/O.
    pub directory: PathBuf,
    /// Seed of the kill times.
    pub seed: u64,
}

/// Allowed growth of memory, as a part of the first sample: memory that allocators keep.
const SLACK_PART: f64 = 0.2;
/// Allowed growth of memory in any case, in bytes.
const SLACK_BYTES: u64 = 16 << 20;
/// Time within which clients must pause and the node become idle.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(30);
const VALUE_BYTES_MAX: usize = 1 << 20;
/// Client threads: two model clients, the acknowledgement log, the filler, two attackers, the client killer, the
/// operator.
const CLIENT_THREADS: usize = 8;

/// Runs a soak test and prints its results.
///
/// # Errors
/// The first violated guarantee, or resources that are not released.
pub fn run(config: &SoakConfig) -> Result<()> {
    let directory = tempfile::tempdir_in(&config.directory)?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let device = directory.path().join("device");
    let text = format!(
        "device = \"{}\"\nsize = \"192MiB\"\nlisten = [\"127.0.0.1:{port}\"]\nbuffer_bytes = \"32MiB\"\n\
         value_bytes_max = \"1MiB\"\nreceive_bytes_max = \"4MiB\"\nsend_buffer_bytes_max = \"4MiB\"\n\
         connections_max = 400\nhandshake_limit_s = 2\n",
        device.display()
    );
    let start = || NodeProcess::start(&config.binary, &text, directory.path());
    let node = start()?;
    let control = Arc::new(SoakControl::new(&node, config.binary.clone(), VALUE_BYTES_MAX));
    let threads = start_clients(&control)?;
    let ended = run_soak(config, node, &start, &control);
    if let Err(error) = &ended {
        eprintln!("soak: {error:#}");
    }
    // In any case stop all clients; model clients and acknowledgement log verify their keys once more.
    control.set_command(SoakCommand::Stop);
    for thread in threads {
        let _ = thread.join();
    }
    let node = match (ended, control.take_error()) {
        // After a failure of the node, errors of clients are only a consequence of it.
        (Err(error), _) => return Err(error),
        (Ok(_), Some(error)) => return Err(error),
        (Ok(node), None) => node,
    };
    let log = node.stderr_log();
    node.stop()?;
    ensure!(!log.contains("panicked"), "the node panicked: {log}");
    let check = Command::new(&config.binary).args(["check", "--device"]).arg(&device).output()?;
    ensure!(check.status.success(), "octokv check: {}", String::from_utf8_lossy(&check.stderr));
    for (name, count) in COUNTER_NAMES.iter().zip(&control.counts) {
        println!("{:>10} {name}", count.load(Ordering::Relaxed));
    }
    println!("soak: every acknowledged write is present, and every resource was released");
    Ok(())
}

fn start_clients(control: &Arc<SoakControl>) -> Result<Vec<std::thread::JoinHandle<()>>> {
    let mut threads = Vec::new();
    let mut start = |name: &'static str, body: fn(&SoakControl) -> Result<()>| -> Result<()> {
        let control = Arc::clone(control);
        threads.push(octokv_sys::thread::spawn(name, move || {
            let result = body(&control);
            control.record_result(name, result);
        })?);
        Ok(())
    };
    start("model a", |control| soak_clients::run_model_client(control, b'a'))?;
    start("model b", |control| soak_clients::run_model_client(control, b'b'))?;
    start("ack log", soak_clients::run_ack_log)?;
    start("filler", soak_clients::run_filler)?;
    start("attacker 1", |control| soak_clients::run_attacker(control, 1))?;
    start("attacker 2", |control| soak_clients::run_attacker(control, 2))?;
    start("killer", soak_clients::run_client_killer)?;
    start("operator", soak_clients::run_admin)?;
    assert_eq!(threads.len(), CLIENT_THREADS);
    Ok(threads)
}

fn run_soak(
    config: &SoakConfig,
    first: NodeProcess,
    start: &dyn Fn() -> Result<NodeProcess>,
    control: &SoakControl,
) -> Result<NodeProcess> {
    let mut random = Prng::new(config.seed);
    let began = Instant::now();
    let kills_until = began + config.span / 3;
    let (mut node, mut kills) = (first, 0);
    control.set_command(SoakCommand::Run);
    loop {
        let span = Duration::from_millis(3000 + random.below(9000)).min(config.span / 8);
        run_until(&node, control, Instant::now() + span, &mut None)?;
        if Instant::now() >= kills_until {
            break;
        }
        node.kill()?;
        kills += 1;
        node = start().with_context(|| format!("after kill {kills}"))?;
    }
    println!("{kills} kills of the node with SIGKILL; after each, clients verified every key");
    // The second part uses one process throughout; its first sample is before any connection.
    pause_all(control)?;
    node.kill()?;
    node = start()?;
    let fresh = node.resource_usage()?;
    println!("{:<8} {}", "fresh", describe_usage(&fresh));
    control.set_command(SoakCommand::Run);
    run_until(&node, control, Instant::now() + config.span / 6, &mut None)?;
    let (usage_before, node_before) = pause_and_sample(&node, control, fresh)?;
    println!("{:<8} {}, {}", "start", describe_usage(&usage_before), describe_status(&node_before));
    let mut samples = Some(Vec::new());
    control.set_command(SoakCommand::Run);
    run_until(&node, control, began + config.span, &mut samples)?;
    let (usage_after, node_after) = pause_and_sample(&node, control, fresh)?;
    println!("{:<8} {}, {}", "end", describe_usage(&usage_after), describe_status(&node_after));
    let samples = samples.unwrap_or_default();
    println!("memory under load: {:+.3} MiB per minute over {} samples", slope(&samples), samples.len());
    let same = |part: fn(&ResourceUsage) -> usize| part(&usage_before) == part(&usage_after);
    ensure!(same(|held| held.descriptors) && same(|held| held.sockets), "descriptors were not released");
    ensure!(same(|held| held.threads), "threads were not released");
    let (start, end) = (own_bytes(&usage_before, &node_before), own_bytes(&usage_after, &node_after));
    let slack = ((start as f64 * SLACK_PART) as u64).max(SLACK_BYTES);
    ensure!(end <= start + slack, "memory was not released: {start} B, then {end} B, without pooled buffers");
    Ok(node)
}

/// Runs the clients until `until` or their first error; appends the memory of each second to `samples`.
fn run_until(
    node: &NodeProcess,
    control: &SoakControl,
    until: Instant,
    samples: &mut Option<Vec<(f64, f64)>>,
) -> Result<()> {
    let began = Instant::now();
    let mut next = began;
    while Instant::now() < until {
        if let Some(error) = control.take_error() {
            bail!("{error:#}\nlog of the node:\n{}", node.stderr_log());
        }
        if Instant::now() >= next {
            let usage = node.resource_usage()?;
            if let Some(samples) = samples {
                samples.push((began.elapsed().as_secs_f64() / 60.0, usage.resident_bytes as f64 / 1048576.0));
            }
            next += Duration::from_secs(1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Pauses all clients, waits until the node is idle, and returns its resources and status.
fn pause_and_sample(
    node: &NodeProcess,
    control: &SoakControl,
    fresh: ResourceUsage,
) -> Result<(ResourceUsage, NodeStatus)> {
    pause_all(control)?;
    let reached_idle = eventually(QUIESCE_TIMEOUT, || {
        let usage = node.resource_usage().unwrap_or_default();
        // Of each namespace its maintenance remains, and on each core what runs dropped operations; other tasks end.
        let tasks = |now: &NodeStatus| now.namespaces * (1 + now.cores.len() as u64);
        let has_no_work = |now: &NodeStatus| is_idle(now) && background_tasks(now) == tasks(now);
        usage.sockets == fresh.sockets && node.status().is_ok_and(|now| has_no_work(&now))
    });
    let status = node.status()?;
    ensure!(reached_idle, "not idle: {status:?}, {:?}: {}", node.resource_usage()?, node.stderr_log());
    ensure!(status.namespaces == 1, "namespaces were not removed: {status:?}");
    // Surplus threads of the admin server end after some time without a request.
    let ended =
        eventually(QUIESCE_TIMEOUT, || node.resource_usage().unwrap_or_default().threads == fresh.threads);
    let usage = node.resource_usage()?;
    ensure!(ended, "threads were not released: {usage:?}, initially {fresh:?}");
    // The next checkpoint, at the latest, returns freed memory to the system.
    std::thread::sleep(Duration::from_secs(1));
    Ok((ResourceUsage { threads: usage.threads, ..node.resource_usage()? }, node.status()?))
}

fn background_tasks(status: &NodeStatus) -> u64 {
    status.cores.iter().map(|core| core.background_tasks).sum()
}

fn pooled_buffer_bytes(status: &NodeStatus) -> u64 {
    status.cores.iter().map(|core| core.buffer_memory_bytes).sum()
}

/// Memory without pooled buffers: the number of pooled buffers, within `buffer_bytes`, varies at random.
fn own_bytes(usage: &ResourceUsage, status: &NodeStatus) -> u64 {
    usage.resident_bytes.saturating_sub(pooled_buffer_bytes(status))
}

fn describe_status(status: &NodeStatus) -> String {
    let pooled_mib = pooled_buffer_bytes(status) as f64 / 1048576.0;
    format!("{pooled_mib:.1} MiB of it in pooled buffers, {} tasks", background_tasks(status))
}

/// Pauses all clients and waits until they have disconnected.
fn pause_all(control: &SoakControl) -> Result<()> {
    control.set_command(SoakCommand::Pause);
    let all = eventually(QUIESCE_TIMEOUT, || control.paused_count() == CLIENT_THREADS);
    if let Some(error) = control.take_error() {
        return Err(error);
    }
    ensure!(all, "only {} of {CLIENT_THREADS} clients paused", control.paused_count());
    Ok(())
}

fn describe_usage(usage: &ResourceUsage) -> String {
    format!(
        "{:>4} descriptors, {:>3} sockets, {:>3} threads, {:>6.1} MiB of memory (peak {:.1})",
        usage.descriptors,
        usage.sockets,
        usage.threads,
        usage.resident_bytes as f64 / 1048576.0,
        usage.peak_bytes as f64 / 1048576.0
    )
}

/// Slope of the least-squares line through the samples.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let count = samples.len().max(1) as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| samples.iter().map(part).sum::<f64>() / count;
    let (x, y) = (mean(|sample| sample.0), mean(|sample| sample.1));
    let over: f64 = samples.iter().map(|sample| (sample.0 - x) * (sample.1 - y)).sum();
    let under: f64 = samples.iter().map(|sample| (sample.0 - x).powi(2)).sum();
    if under == 0.0 { 0.0 } else { over / under }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_is_that_of_the_line() {
        let samples: Vec<(f64, f64)> = (0..20).map(|x| (f64::from(x), 7.0 + 3.0 * f64::from(x))).collect();
        assert!((slope(&samples) - 3.0).abs() < 1e-9);
        assert_eq!(slope(&[]), 0.0);
    }
}
