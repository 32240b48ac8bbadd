//! What two processors of this machine show of balancing and of fairness: a node on a modelled drive in real time, hosts in
//! processes of their own, and policies in turn while all of them run on.
//!
//! ```text
//!   node, two cores ◀── hosts: octokv bench, each on one processor; stopped and continued (SIGSTOP, SIGCONT)
//!     │ windows          policy: off, on, off, on, …                          of each turn: rates, by the node's monitor
//!     └────────────────▶ points: medians over the rounds
//! ```
//! In: how much is run. Out: points, or one that says why there are none. These depend on the machine, and are not the same
//! twice.

use super::data_points::{Point, Points};
use crate::child_process::Server;
use anyhow::{Context, Result, anyhow, bail};
use octokv_admin::http_client;
use octokv_admin::scheduling_api::{SchedulingSettings, WindowReport};
use octokv_sys::process::stand_still;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const VALUE_BYTES: &str = "16384";
const KEYS: &str = "20000";
const WINDOW: Duration = Duration::from_millis(100);
/// Windows after a change that are not counted: the last before it, the one that it came in, and the first that shows it.
const SKIPPED: usize = 3;
/// Hosts that nobody stops end after so long.
const HOST_LIMIT_S: &str = "300";
/// How long a window may be waited for.
const LATE: Duration = Duration::from_secs(20);
const DENSE: &str = "nqn.2026-11.io.octokv:dense";
const SPARSE: &str = "nqn.2026-11.io.octokv:sparse";

/// How much is run, and whether it came to an end.
#[derive(Debug, Default)]
pub struct OnCores {
    rounds: usize,
    windows: usize,
    failed: bool,
}

impl OnCores {
    /// Of a quick run, or of one that says something.
    pub fn of(quick: bool) -> OnCores {
        let (rounds, windows) = if quick { (1, 4) } else { (7, 10) };
        OnCores { rounds, windows, failed: false }
    }
}

/// A node on two processors, with its files.
struct Node {
    server: Server,
    socket: PathBuf,
    processors: [usize; 2],
    _directory: TempDir,
}

/// A host under way. Dropped, it is killed.
struct Host(Child);

impl Host {
    fn stand_still(&mut self, still: bool) -> Result<()> {
        stand_still(&mut self.0, still).context("a host's process is there no more")
    }

    /// A host that has ended asks for nothing, and its figures would say so of the node.
    fn check(&mut self) -> Result<()> {
        match self.0.try_wait().context("octokv bench")? {
            Some(status) => bail!("a host has ended: {status}"),
            None => Ok(()),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The processors, or why there are none for this.
fn processors() -> Result<[usize; 2], String> {
    match octokv_sys::thread::cores()[..] {
        [one, other, ..] => Ok([one, other]),
        _ => Err("two processors are needed".to_owned()),
    }
}

impl Node {
    fn start(processors: [usize; 2]) -> Result<Node> {
        let directory = TempDir::with_prefix("octokv-cores-").context("a temporary directory")?;
        let path = |name: &str| directory.path().join(name);
        let socket = path("admin.sock");
        let [one, other] = processors;
        let text = format!(
            "device = \"memory\"\nsize = \"4GiB\"\nunit = 512\nnand = \"970-evo\"\ndurability = \"device\"\n\
             cores = [{one}, {other}]\npolling = \"sleep\"\nlisten = [\"127.0.0.1:0\"]\nadmin = \"{}\"\nstate = \"{}\"\n",
            socket.display(),
            path("state").display()
        );
        let config = path("octokv.toml");
        std::fs::write(&config, text).context("the node's configuration")?;
        let server = Server::with(&["--config".as_ref(), config.as_os_str()])?;
        let node = Node { server, socket, processors, _directory: directory };
        node.set(SchedulingSettings {
            window_ms: Some(WINDOW.as_millis() as u64),
            ..SchedulingSettings::default()
        })?;
        let mut filled = node.host(SPARSE, other, "1", "64", &["--workload", "fillseq"])?;
        if !filled.0.wait().context("octokv bench")?.success() {
            bail!("the keys could not be stored");
        }
        Ok(node)
    }

    fn set(&self, settings: SchedulingSettings) -> Result<()> {
        http_client::put(&self.socket, "/v1/scheduling", Some(&settings)).map_err(told)
    }

    fn policy(&self, policy: &str) -> Result<()> {
        self.set(SchedulingSettings { policy: Some(policy.to_owned()), ..SchedulingSettings::default() })
    }

    /// A host on a processor: connections, and operations in flight on each.
    fn host(&self, name: &str, processor: usize, threads: &str, depth: &str, more: &[&str]) -> Result<Host> {
        let binary = std::env::current_exe().context("this program's own file")?;
        let mut command = Command::new(binary);
        command.args([
            "bench",
            "--value-size",
            VALUE_BYTES,
            "--num",
            KEYS,
            "--no-verify",
            "--host-nqn",
            name,
        ]);
        command.args(["--threads", threads, "--depth", depth, "--client-polling", "sleep"]);
        command.args(["--client-cores", &processor.to_string(), "--url", &self.server.url.to_string()]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Host(command.spawn().context("octokv bench cannot be started")?))
    }

    /// One that overwrites until it is dropped.
    fn writer(&self, name: &str, processor: usize, threads: &str, depth: &str) -> Result<Host> {
        self.host(name, processor, threads, depth, &["--workload", "overwrite", "--seconds", HOST_LIMIT_S])
    }

    /// The next windows, those in which a change shows left out.
    fn windows(&self, count: usize) -> Result<Vec<WindowReport>> {
        let (mut windows, give_up) = (Vec::<WindowReport>::new(), Instant::now() + LATE);
        while windows.len() < SKIPPED + count {
            let window: WindowReport =
                http_client::get(&self.socket, "/v1/scheduling/window").map_err(told)?;
            if windows.last().is_none_or(|last| last.number < window.number) {
                windows.push(window);
            } else if Instant::now() > give_up {
                bail!("the node's monitor measures nothing");
            }
            std::thread::sleep(WINDOW / 5);
        }
        Ok(windows.split_off(SKIPPED))
    }

    /// A host on the processor of its connection's core, or on the other one.
    fn beside(&self, own: bool, depth: &str) -> Result<(Host, usize)> {
        // Each host's connection comes to the next core.
        for _ in 0..2 {
            let core = usize::from(own);
            let host = self.writer(DENSE, self.processors[1], "1", depth)?;
            let windows = self.windows(2)?;
            let requests =
                |core: usize| windows.iter().map(|window| window.cores[core].requests).sum::<u64>();
            if requests(core) > requests(1 - core) {
                return Ok((host, core));
            }
        }
        bail!("no connection came to the core that was to have it")
    }
}

fn told(error: http_client::Error) -> anyhow::Error {
    anyhow!("the node's administration: {error}")
}

fn mean(windows: &[WindowReport], figure: impl Fn(&WindowReport) -> f64) -> f64 {
    windows.iter().map(figure).sum::<f64>() / windows.len().max(1) as f64
}

/// Answers a second of one host, or of all.
fn rate(windows: &[WindowReport], host: Option<&str>) -> f64 {
    let of = |window: &WindowReport| {
        let flows = window.flows.iter().filter(|flow| host.is_none_or(|host| flow.host == host));
        flows.map(|flow| flow.operations_s).sum()
    };
    mean(windows, of)
}

/// A point of what its rounds came to.
fn point(points: &mut Points, series: &str, x: &str, rounds: impl Iterator<Item = f64>, unit: &'static str) {
    points.real(series, x, None, &rounds.map(Ok).collect::<Vec<_>>(), unit);
}

/// What takes the place of points that there cannot be.
fn not_run(mut points: Points, why: String) -> Vec<Point> {
    points.real("two processors", "throughput", None, &[Err(why)], "op/s");
    points.all
}

impl OnCores {
    /// Whether something went wrong that need not have.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// OctoKV's Fig. 7 on this machine: puts of 16 KiB over one connection, balancing off and on in turn.
    pub fn balancing(&mut self) -> Result<Vec<Point>> {
        self.run(Points::of("Figure 7 on cores"), balancing)
    }

    /// OctoFAS's experiments on this machine: a sparse and a dense host, alone and together, both on one processor and their
    /// connections on both cores of the node.
    pub fn fairness(&mut self) -> Result<Vec<Point>> {
        self.run(Points::of("Figure 9 on cores"), fairness)
    }

    /// Whatever goes wrong is a point that says so; the other figures are made.
    fn run(
        &mut self,
        mut points: Points,
        make: fn(&OnCores, [usize; 2], &mut Points) -> Result<()>,
    ) -> Result<Vec<Point>> {
        let processors = match processors() {
            Ok(processors) => processors,
            Err(why) => return Ok(not_run(points, why)),
        };
        Ok(match make(self, processors, &mut points) {
            Ok(()) => points.all,
            Err(error) => {
                self.failed = true;
                not_run(points, format!("{error:#}"))
            }
        })
    }
}

fn balancing(extent: &OnCores, processors: [usize; 2], points: &mut Points) -> Result<()> {
    let node = Node::start(processors)?;
    for (place, own) in [("host beside the busy core", true), ("host beside the idle core", false)] {
        for depth in ["12", "128"] {
            let (mut host, busy) = node.beside(own, depth)?;
            let series = format!("{place}, {depth} puts at a time");
            let mut turns = [Vec::new(), Vec::new()];
            for _ in 0..extent.rounds {
                for (policy, turns) in ["none", "proportional"].iter().zip(&mut turns) {
                    node.policy(policy)?;
                    turns.push(node.windows(extent.windows)?);
                }
            }
            node.policy("none")?;
            host.check()?;
            drop(host);
            let [off, on] = &turns;
            let rates = |turns: &[Vec<WindowReport>]| turns.iter().map(|turn| rate(turn, None)).collect();
            let (rates_off, rates_on): (Vec<f64>, Vec<f64>) = (rates(off), rates(on));
            point(points, &series, "off", rates_off.iter().copied(), "op/s");
            point(points, &series, "on", rates_on.iter().copied(), "op/s");
            for (core, name) in [(busy, "its core"), (1 - busy, "the other")] {
                for (way, turns) in [("off", off), ("on", on)] {
                    let of = |turn: &Vec<WindowReport>| mean(turn, |window| window.cores[core].utilisation);
                    point(points, &series, &format!("{name}, {way}"), turns.iter().map(of), "1");
                }
            }
            let gains = rates_off.iter().zip(&rates_on).map(|(off, on)| (on / off - 1.0) * 100.0);
            point(points, &series, "throughput", gains, "%");
        }
    }
    Ok(())
}

fn fairness(extent: &OnCores, processors: [usize; 2], points: &mut Points) -> Result<()> {
    const POLICIES: [&str; 5] = ["none", "intra", "hybrid", "auto", "fair"];
    let node = Node::start(processors)?;
    let [_, clients] = node.processors;
    let mut sparse = node.writer(SPARSE, clients, "2", "1")?;
    let mut dense = node.writer(DENSE, clients, "8", "4")?;
    // By host and round: its rate alone; by policy and round: both rates.
    let mut alone = [Vec::new(), Vec::new()];
    let mut shared = POLICIES.map(|_| Vec::new());
    for _ in 0..extent.rounds {
        node.policy("none")?;
        for (name, alone) in [SPARSE, DENSE].into_iter().zip(&mut alone) {
            let other = if name == SPARSE { &mut dense } else { &mut sparse };
            other.stand_still(true)?;
            alone.push(rate(&node.windows(extent.windows)?, Some(name)));
            other.stand_still(false)?;
        }
        for (policy, shared) in POLICIES.iter().zip(&mut shared) {
            node.policy(policy)?;
            let windows = node.windows(extent.windows)?;
            let rates = [SPARSE, DENSE].map(|name| rate(&windows, Some(name)));
            shared.push((rates, mean(&windows, |window| window.fairness)));
        }
    }
    sparse.check()?;
    dense.check()?;
    for ((name, alone), threads) in ["sparse", "dense"].iter().zip(&alone).zip(["2", "32"]) {
        point(points, "alone", &format!("{name}, {threads} puts at a time"), alone.iter().copied(), "op/s");
    }
    let nothing = shared[0].clone();
    for (policy, shared) in POLICIES.iter().zip(&shared) {
        // Each host has so many in flight, so a response takes longer as its rate is lower.
        let slowdowns = |round: usize| [0, 1].map(|host: usize| alone[host][round] / shared[round].0[host]);
        let rounds = || (0..shared.len()).map(slowdowns);
        point(points, policy, "sparse", rounds().map(|slowdowns| slowdowns[0]), "times slower");
        point(points, policy, "dense", rounds().map(|slowdowns| slowdowns[1]), "times slower");
        let fairness = rounds().map(|[one, other]| one.min(other) / one.max(other));
        point(points, policy, "fairness", fairness, "1");
        point(points, policy, "the monitor's", shared.iter().map(|round| round.1), "1");
        point(points, policy, "both", shared.iter().map(|(rates, _)| rates.iter().sum()), "op/s");
        if *policy != POLICIES[0] {
            let of_none =
                |round: usize| shared[round].0.iter().sum::<f64>() / nothing[round].0.iter().sum::<f64>();
            let change = (0..shared.len()).map(|round| (of_none(round) - 1.0) * 100.0);
            point(points, policy, "against none", change, "%");
        }
    }
    Ok(())
}
