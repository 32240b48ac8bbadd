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

use crate::node_process::{Holdings, Node, eventually, is_deserted};
use crate::soak_clients::{self, COUNTS, Order, Stage};
use anyhow::{Context, Result, bail, ensure};
use octokv_admin::api_types::Figures;
use octokv_base::Random;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What to do.
#[derive(Clone, Debug)]
pub struct Settings {
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
const SETTLING: Duration = Duration::from_secs(30);
const VALUE_BYTES_MAX: usize = 1 << 20;
/// The hosts: two keepers, the ledger, the filler, two attackers, the killer of clients, the operator.
const HOSTS: usize = 8;

/// Runs it.
///
/// # Errors
/// The first promise that was broken, or figures that did not come back.
pub fn run(settings: &Settings) -> Result<()> {
    let directory = tempfile::tempdir_in(&settings.directory)?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let device = directory.path().join("device");
    let text = format!(
        "device = \"{}\"\nsize = \"192MiB\"\nlisten = [\"127.0.0.1:{port}\"]\nbuffer_bytes = \"32MiB\"\n\
         value_bytes_max = \"1MiB\"\nreceive_bytes_max = \"4MiB\"\noutbox_bytes_max = \"4MiB\"\n\
         connections_max = 400\nhandshake_limit_s = 2\n",
        device.display()
    );
    let start = || Node::start(&settings.binary, &text, directory.path());
    let node = start()?;
    let stage = Arc::new(Stage::new(&node, settings.binary.clone(), VALUE_BYTES_MAX));
    let threads = start_hosts(&stage)?;
    let ended = soak(settings, node, &start, &stage);
    if let Err(error) = &ended {
        eprintln!("soak: {error:#}");
    }
    // Whatever came of it, everybody goes home; keepers and ledger read all of their keys once more.
    stage.order(Order::End);
    for thread in threads {
        let _ = thread.join();
    }
    let node = match (ended, stage.trouble()) {
        // Without the node hosts find nobody: that is what came of it, and not why.
        (Err(error), _) => return Err(error),
        (Ok(_), Some(trouble)) => return Err(trouble),
        (Ok(node), None) => node,
    };
    let said = node.said();
    node.stop()?;
    ensure!(!said.contains("panicked"), "the node panicked: {said}");
    let check = Command::new(&settings.binary).args(["check", "--device"]).arg(&device).output()?;
    ensure!(check.status.success(), "octokv check: {}", String::from_utf8_lossy(&check.stderr));
    for (name, count) in COUNTS.iter().zip(&stage.counts) {
        println!("{:>10} {name}", count.load(Ordering::Relaxed));
    }
    println!("soak: everything acknowledged is there, and the node holds what it held");
    Ok(())
}

fn start_hosts(stage: &Arc<Stage>) -> Result<Vec<std::thread::JoinHandle<()>>> {
    let mut threads = Vec::new();
    let mut start = |name: &'static str, body: fn(&Stage) -> Result<()>| -> Result<()> {
        let stage = Arc::clone(stage);
        threads.push(octokv_sys::thread::spawn(name, move || {
            let result = body(&stage);
            stage.note(name, result);
        })?);
        Ok(())
    };
    start("keeper a", |stage| soak_clients::keep(stage, b'a'))?;
    start("keeper b", |stage| soak_clients::keep(stage, b'b'))?;
    start("ledger", soak_clients::write)?;
    start("filler", soak_clients::fill)?;
    start("attacker 1", |stage| soak_clients::attack(stage, 1))?;
    start("attacker 2", |stage| soak_clients::attack(stage, 2))?;
    start("killer", soak_clients::kill_clients)?;
    start("operator", soak_clients::change)?;
    assert_eq!(threads.len(), HOSTS);
    Ok(threads)
}

fn soak(settings: &Settings, first: Node, start: &dyn Fn() -> Result<Node>, stage: &Stage) -> Result<Node> {
    let mut random = Random::new(settings.seed);
    let began = Instant::now();
    let kills_until = began + settings.span / 3;
    let (mut node, mut kills) = (first, 0);
    stage.order(Order::Work);
    loop {
        let span = Duration::from_millis(3000 + random.below(9000)).min(settings.span / 8);
        work(&node, stage, Instant::now() + span, &mut None)?;
        if Instant::now() >= kills_until {
            break;
        }
        node.kill()?;
        kills += 1;
        node = start().with_context(|| format!("after kill {kills}"))?;
    }
    println!("{kills} kills of the node with SIGKILL, each followed by a look at every key");
    // The second part: one process to its end. It is fresh when nobody has come yet.
    rest(stage)?;
    node.kill()?;
    node = start()?;
    let fresh = node.holdings()?;
    println!("{:<8} {}", "fresh", line(&fresh));
    stage.order(Order::Work);
    work(&node, stage, Instant::now() + settings.span / 6, &mut None)?;
    let (before, node_before) = figures(&node, stage, fresh)?;
    println!("{:<8} {}, {}", "start", line(&before), inside(&node_before));
    let mut samples = Some(Vec::new());
    stage.order(Order::Work);
    work(&node, stage, began + settings.span, &mut samples)?;
    let (after, node_after) = figures(&node, stage, fresh)?;
    println!("{:<8} {}, {}", "end", line(&after), inside(&node_after));
    let samples = samples.unwrap_or_default();
    println!("memory at work: {:+.3} MiB a minute over {} samples", slope(&samples), samples.len());
    let same = |part: fn(&Holdings) -> usize| part(&before) == part(&after);
    ensure!(same(|held| held.descriptors) && same(|held| held.sockets), "descriptors did not come back");
    ensure!(same(|held| held.threads), "threads did not come back");
    let (start, end) = (own_bytes(&before, &node_before), own_bytes(&after, &node_after));
    let slack = ((start as f64 * SLACK_PART) as u64).max(SLACK_BYTES);
    ensure!(end <= start + slack, "memory did not come back: {start} B, then {end} B beside the buffers");
    Ok(node)
}

/// Hosts work until then, unless something goes wrong. Memory is sampled each second.
fn work(node: &Node, stage: &Stage, until: Instant, samples: &mut Option<Vec<(f64, f64)>>) -> Result<()> {
    let began = Instant::now();
    let mut next = began;
    while Instant::now() < until {
        if let Some(trouble) = stage.trouble() {
            bail!("{trouble:#}\nthe node said:\n{}", node.said());
        }
        if Instant::now() >= next {
            let held = node.holdings()?;
            if let Some(samples) = samples {
                samples.push((began.elapsed().as_secs_f64() / 60.0, held.resident_bytes as f64 / 1048576.0));
            }
            next += Duration::from_secs(1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Everybody rests; what the node holds when they have left and nothing is under way, and its background tasks.
fn figures(node: &Node, stage: &Stage, fresh: Holdings) -> Result<(Holdings, Figures)> {
    rest(stage)?;
    let settled = eventually(SETTLING, || {
        let held = node.holdings().unwrap_or_default();
        // A store has one task of its own; another one ends.
        let rests = |now: &Figures| is_deserted(now) && tasks(now) == now.namespaces;
        held.sockets == fresh.sockets && node.figures().is_ok_and(|now| rests(&now))
    });
    let said = node.figures()?;
    ensure!(settled, "at rest: {said:?}, {:?}: {}", node.holdings()?, node.said());
    ensure!(said.namespaces == 1, "namespaces were left: {said:?}");
    // Threads that waited in the place of the administration's own end when nobody asks for a while.
    let ended = eventually(SETTLING, || node.holdings().unwrap_or_default().threads == fresh.threads);
    let held = node.holdings()?;
    ensure!(ended, "threads did not come back: {held:?}, at first {fresh:?}");
    // What is freed goes back to the system with the next checkpoint, at the latest.
    std::thread::sleep(Duration::from_secs(1));
    Ok((Holdings { threads: held.threads, ..node.holdings()? }, node.figures()?))
}

fn tasks(figures: &Figures) -> u64 {
    figures.cores.iter().map(|core| core.background_tasks).sum()
}

fn kept_bytes(figures: &Figures) -> u64 {
    figures.cores.iter().map(|core| core.buffer_memory_bytes).sum()
}

/// Memory beside the buffers that the node keeps for the next values: how many those are, within `buffer_bytes`, is
/// chance.
fn own_bytes(held: &Holdings, figures: &Figures) -> u64 {
    held.resident_bytes.saturating_sub(kept_bytes(figures))
}

fn inside(figures: &Figures) -> String {
    let kept = kept_bytes(figures) as f64 / 1048576.0;
    format!("{kept:.1} MiB of it in kept buffers, {} tasks", tasks(figures))
}

/// Everybody leaves.
fn rest(stage: &Stage) -> Result<()> {
    stage.order(Order::Rest);
    let all = eventually(SETTLING, || stage.resting() == HOSTS);
    if let Some(trouble) = stage.trouble() {
        return Err(trouble);
    }
    ensure!(all, "only {} of {HOSTS} hosts rest", stage.resting());
    Ok(())
}

fn line(held: &Holdings) -> String {
    format!(
        "{:>4} descriptors, {:>3} sockets, {:>3} threads, {:>6.1} MiB of memory ({:.1} at the most)",
        held.descriptors,
        held.sockets,
        held.threads,
        held.resident_bytes as f64 / 1048576.0,
        held.peak_bytes as f64 / 1048576.0
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
