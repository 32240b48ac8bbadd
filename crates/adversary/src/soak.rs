//! A node in everything at once for a long time, after which it holds what it held before.
//!
//! ```text
//!   first part:  work ─ kill -9 ─ restart ─ work ─ kill -9 ─ …        every acknowledged write is there each time
//!   second part: restart ─ work (warm-up) ─ rest: FIGURES ─ work … ─ rest: FIGURES ─ verify ─ stop ─ octokv check
//! ```
//! The two sets of figures are of the same process, both at rest: no connection, controller, request, buffer or
//! device operation is left; its descriptors, sockets, threads and tasks must be the same, and its memory within a
//! fifth of what it was. Memory at work is sampled each second, and its slope is printed: a leak that a rest hides
//! shows there.

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

/// What to do.
#[derive(Clone, Debug)]
pub struct SoakConfig {
    /// The binary of the node.
    pub binary: PathBuf,
    /// How long, in all.
    pub span: Duration,
    /// Where the device goes, on a file system with direct transfers.
    pub directory: PathBuf,
    /// Draws the moments of the kills.
    pub seed: u64,
}

/// How much more memory the node may have at the end, in parts of what it had: a fifth for what allocators keep.
const SLACK_PART: f64 = 0.2;
/// And at least so many bytes.
const SLACK_BYTES: u64 = 16 << 20;
/// How long hosts may take to leave, and the node to settle.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(30);
const VALUE_BYTES_MAX: usize = 1 << 20;
/// The hosts: two keepers, the ledger, the filler, two attackers, the killer of clients, the operator.
const CLIENT_THREADS: usize = 8;

/// Runs it.
///
/// # Errors
/// The first promise that was broken, or figures that did not come back.
pub fn run(settings: &SoakConfig) -> Result<()> {
    let directory = tempfile::tempdir_in(&settings.directory)?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let device = directory.path().join("device");
    let text = format!(
        "device = \"{}\"\nsize = \"192MiB\"\nlisten = [\"127.0.0.1:{port}\"]\nbuffer_bytes = \"32MiB\"\n\
         value_bytes_max = \"1MiB\"\nreceive_bytes_max = \"4MiB\"\noutbox_bytes_max = \"4MiB\"\n\
         connections_max = 400\nhandshake_limit_s = 2\n",
        device.display()
    );
    let start = || NodeProcess::start(&settings.binary, &text, directory.path());
    let node = start()?;
    let control = Arc::new(SoakControl::new(&node, settings.binary.clone(), VALUE_BYTES_MAX));
    let threads = start_clients(&control)?;
    let ended = run_soak(settings, node, &start, &control);
    if let Err(error) = &ended {
        eprintln!("soak: {error:#}");
    }
    // Whatever came of it, everybody goes home; keepers and ledger read all of their keys once more.
    control.set_command(SoakCommand::Stop);
    for thread in threads {
        let _ = thread.join();
    }
    let node = match (ended, control.take_error()) {
        // Without the node hosts find nobody: that is what came of it, and not why.
        (Err(error), _) => return Err(error),
        (Ok(_), Some(trouble)) => return Err(trouble),
        (Ok(node), None) => node,
    };
    let said = node.stderr_log();
    node.stop()?;
    ensure!(!said.contains("panicked"), "the node panicked: {said}");
    let check = Command::new(&settings.binary).args(["check", "--device"]).arg(&device).output()?;
    ensure!(check.status.success(), "octokv check: {}", String::from_utf8_lossy(&check.stderr));
    for (name, count) in COUNTER_NAMES.iter().zip(&control.counts) {
        println!("{:>10} {name}", count.load(Ordering::Relaxed));
    }
    println!("soak: everything acknowledged is there, and the node holds what it held");
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
    start("keeper a", |control| soak_clients::run_model_client(control, b'a'))?;
    start("keeper b", |control| soak_clients::run_model_client(control, b'b'))?;
    start("ledger", soak_clients::run_ack_log)?;
    start("filler", soak_clients::run_filler)?;
    start("attacker 1", |control| soak_clients::run_attacker(control, 1))?;
    start("attacker 2", |control| soak_clients::run_attacker(control, 2))?;
    start("killer", soak_clients::run_client_killer)?;
    start("operator", soak_clients::run_admin)?;
    assert_eq!(threads.len(), CLIENT_THREADS);
    Ok(threads)
}

fn run_soak(
    settings: &SoakConfig,
    first: NodeProcess,
    start: &dyn Fn() -> Result<NodeProcess>,
    control: &SoakControl,
) -> Result<NodeProcess> {
    let mut random = Prng::new(settings.seed);
    let began = Instant::now();
    let kills_until = began + settings.span / 3;
    let (mut node, mut kills) = (first, 0);
    control.set_command(SoakCommand::Run);
    loop {
        let span = Duration::from_millis(3000 + random.below(9000)).min(settings.span / 8);
        run_until(&node, control, Instant::now() + span, &mut None)?;
        if Instant::now() >= kills_until {
            break;
        }
        node.kill()?;
        kills += 1;
        node = start().with_context(|| format!("after kill {kills}"))?;
    }
    println!("{kills} kills of the node with SIGKILL, each followed by a look at every key");
    // The second part: one process to its end. It is fresh when nobody has come yet.
    pause_all(control)?;
    node.kill()?;
    node = start()?;
    let fresh = node.resource_usage()?;
    println!("{:<8} {}", "fresh", describe_usage(&fresh));
    control.set_command(SoakCommand::Run);
    run_until(&node, control, Instant::now() + settings.span / 6, &mut None)?;
    let (usage_before, node_before) = pause_and_sample(&node, control, fresh)?;
    println!("{:<8} {}, {}", "start", describe_usage(&usage_before), describe_status(&node_before));
    let mut samples = Some(Vec::new());
    control.set_command(SoakCommand::Run);
    run_until(&node, control, began + settings.span, &mut samples)?;
    let (usage_after, node_after) = pause_and_sample(&node, control, fresh)?;
    println!("{:<8} {}, {}", "end", describe_usage(&usage_after), describe_status(&node_after));
    let samples = samples.unwrap_or_default();
    println!("memory at work: {:+.3} MiB a minute over {} samples", slope(&samples), samples.len());
    let same = |part: fn(&ResourceUsage) -> usize| part(&usage_before) == part(&usage_after);
    ensure!(same(|held| held.descriptors) && same(|held| held.sockets), "descriptors did not come back");
    ensure!(same(|held| held.threads), "threads did not come back");
    let (start, end) = (own_bytes(&usage_before, &node_before), own_bytes(&usage_after, &node_after));
    let slack = ((start as f64 * SLACK_PART) as u64).max(SLACK_BYTES);
    ensure!(end <= start + slack, "memory did not come back: {start} B, then {end} B beside the buffers");
    Ok(node)
}

/// Hosts work until then, unless something goes wrong. Memory is sampled each second.
fn run_until(
    node: &NodeProcess,
    control: &SoakControl,
    until: Instant,
    samples: &mut Option<Vec<(f64, f64)>>,
) -> Result<()> {
    let began = Instant::now();
    let mut next = began;
    while Instant::now() < until {
        if let Some(trouble) = control.take_error() {
            bail!("{trouble:#}\nthe node said:\n{}", node.stderr_log());
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

/// Everybody rests; what the node holds when they have left and nothing is under way, and its background tasks.
fn pause_and_sample(
    node: &NodeProcess,
    control: &SoakControl,
    fresh: ResourceUsage,
) -> Result<(ResourceUsage, NodeStatus)> {
    pause_all(control)?;
    let reached_idle = eventually(QUIESCE_TIMEOUT, || {
        let usage = node.resource_usage().unwrap_or_default();
        // A store has one task of its own; another one ends.
        let is_at_rest = |now: &NodeStatus| is_idle(now) && background_tasks(now) == now.namespaces;
        usage.sockets == fresh.sockets && node.status().is_ok_and(|now| is_at_rest(&now))
    });
    let status = node.status()?;
    ensure!(reached_idle, "at rest: {status:?}, {:?}: {}", node.resource_usage()?, node.stderr_log());
    ensure!(status.namespaces == 1, "namespaces were left: {status:?}");
    // Threads that waited in the place of the administration's own end when nobody asks for a while.
    let ended =
        eventually(QUIESCE_TIMEOUT, || node.resource_usage().unwrap_or_default().threads == fresh.threads);
    let usage = node.resource_usage()?;
    ensure!(ended, "threads did not come back: {usage:?}, at first {fresh:?}");
    // What is freed goes back to the system with the next checkpoint, at the latest.
    std::thread::sleep(Duration::from_secs(1));
    Ok((ResourceUsage { threads: usage.threads, ..node.resource_usage()? }, node.status()?))
}

fn background_tasks(status: &NodeStatus) -> u64 {
    status.cores.iter().map(|core| core.background_tasks).sum()
}

fn pooled_buffer_bytes(status: &NodeStatus) -> u64 {
    status.cores.iter().map(|core| core.buffer_memory_bytes).sum()
}

/// Memory beside the buffers that the node keeps for the next values: how many those are, within `buffer_bytes`, is
/// chance.
fn own_bytes(usage: &ResourceUsage, status: &NodeStatus) -> u64 {
    usage.resident_bytes.saturating_sub(pooled_buffer_bytes(status))
}

fn describe_status(status: &NodeStatus) -> String {
    let kept = pooled_buffer_bytes(status) as f64 / 1048576.0;
    format!("{kept:.1} MiB of it in kept buffers, {} tasks", background_tasks(status))
}

/// Everybody leaves.
fn pause_all(control: &SoakControl) -> Result<()> {
    control.set_command(SoakCommand::Pause);
    let all = eventually(QUIESCE_TIMEOUT, || control.paused_count() == CLIENT_THREADS);
    if let Some(trouble) = control.take_error() {
        return Err(trouble);
    }
    ensure!(all, "only {} of {CLIENT_THREADS} hosts rest", control.paused_count());
    Ok(())
}

fn describe_usage(usage: &ResourceUsage) -> String {
    format!(
        "{:>4} descriptors, {:>3} sockets, {:>3} threads, {:>6.1} MiB of memory ({:.1} at the most)",
        usage.descriptors,
        usage.sockets,
        usage.threads,
        usage.resident_bytes as f64 / 1048576.0,
        usage.peak_bytes as f64 / 1048576.0
    )
}

/// The slope of the straight line that fits samples best.
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
