//! Native runs of balancing and fairness on two processors of this machine: a node on an SSD model in real time, hosts
//! in processes of their own, and policies that alternate while all of them run.
//!
//! ```text
//!   node, two cores ◀── hosts: octokv bench, each on one processor; suspended and resumed (SIGSTOP, SIGCONT)
//!     │ sampling intervals   policy: off, on, off, on, …              for each: rates, by the node's monitor
//!     └────────────────────▶ points: medians over the rounds
//! ```
//! In: rounds and intervals. Out: points, or one with the reason for their absence. Results depend on the machine and
//! vary between runs.

use crate::data_points::{DataPoint, DataPoints};
use crate::octokv_binary::octokv_binary;
use anyhow::{Context, Result, anyhow, bail};
use octokv_admin::http_client;
use octokv_admin::scheduling_api::{
    SCHEDULING_INTERVAL_PATH, SCHEDULING_PATH, SchedConfigPatch, SchedulingReport,
};
use octokv_bench::child_process::ChildProcess;
use octokv_bench::server_process::ServerProcess;
use octokv_sys::process::set_process_suspended;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const VALUE_BYTES: &str = "16384";
const KEYS: &str = "20000";
const INTERVAL: Duration = Duration::from_millis(100);
/// Sampling intervals after a change that are skipped: the last before it, the one of the change, and the first after it.
const INTERVALS_SKIPPED: usize = 3;
/// Hosts terminate after this time if they are not killed.
const BENCH_SECONDS_MAX: &str = "300";
/// Longest wait for a sampling interval.
const INTERVAL_WAIT_MAX: Duration = Duration::from_secs(20);
const DENSE: &str = "nqn.2026-11.io.octokv:dense";
const SPARSE: &str = "nqn.2026-11.io.octokv:sparse";

/// Number of runs, and whether one failed.
#[derive(Debug, Default)]
pub struct NativeRuns {
    rounds: usize,
    intervals: usize,
    failed: bool,
}

impl NativeRuns {
    /// Rounds and intervals of a quick run, or of a full one.
    pub fn for_mode(quick: bool) -> NativeRuns {
        let (rounds, intervals) = if quick { (1, 4) } else { (7, 10) };
        NativeRuns { rounds, intervals, failed: false }
    }
}

/// A node on two processors, with its files.
struct NativeNode {
    server: ServerProcess,
    socket: PathBuf,
    processors: [usize; 2],
    _directory: TempDir,
}

/// A load generator that runs. Dropping it kills the process.
struct BenchProcess(ChildProcess);

impl BenchProcess {
    fn set_suspended(&mut self, suspended: bool) -> Result<()> {
        set_process_suspended(self.0.child(), suspended).context("a load generator has ended")
    }

    /// A load generator that has ended submits nothing, and the results would attribute that to the node.
    fn ensure_running(&mut self) -> Result<()> {
        match self.0.try_wait().context("octokv bench")? {
            Some(status) => bail!("a load generator has ended: {status}"),
            None => Ok(()),
        }
    }
}

/// The two processors, or the reason for their absence.
fn processors() -> Result<[usize; 2], String> {
    match octokv_sys::thread::allowed_cores()[..] {
        [one, other, ..] => Ok([one, other]),
        _ => Err("two processors are needed".to_owned()),
    }
}

impl NativeNode {
    fn start(processors: [usize; 2]) -> Result<NativeNode> {
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
        let server =
            ServerProcess::start_with_flags(&octokv_binary()?, &["--config".as_ref(), config.as_os_str()])?;
        let node = NativeNode { server, socket, processors, _directory: directory };
        node.set_scheduling(SchedConfigPatch {
            interval_ms: Some(INTERVAL.as_millis() as u64),
            ..SchedConfigPatch::default()
        })?;
        let mut filled = node.start_host(SPARSE, other, "1", "64", &["--workload", "fillseq"])?;
        if !filled.0.wait().context("octokv bench")?.success() {
            bail!("the keys could not be stored");
        }
        Ok(node)
    }

    fn set_scheduling(&self, settings: SchedConfigPatch) -> Result<()> {
        http_client::put(&self.socket, SCHEDULING_PATH, Some(&settings)).map_err(admin_error)
    }

    fn set_policy(&self, policy: &str) -> Result<()> {
        self.set_scheduling(SchedConfigPatch {
            policy: Some(policy.to_owned()),
            ..SchedConfigPatch::default()
        })
    }

    /// Starts a load generator on a processor with this number of connections and operations in flight on each.
    fn start_host(
        &self,
        name: &str,
        processor: usize,
        threads: &str,
        depth: &str,
        more: &[&str],
    ) -> Result<BenchProcess> {
        let binary = octokv_binary()?;
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
        command.args(more).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(BenchProcess(ChildProcess::spawn(&mut command).context("octokv bench cannot be started")?))
    }

    /// Starts a load generator that overwrites keys until it is dropped.
    fn start_writer(&self, name: &str, processor: usize, threads: &str, depth: &str) -> Result<BenchProcess> {
        self.start_host(
            name,
            processor,
            threads,
            depth,
            &["--workload", "overwrite", "--seconds", BENCH_SECONDS_MAX],
        )
    }

    /// Waits for the next `count` sampling intervals after those that a change affects.
    fn next_intervals(&self, count: usize) -> Result<Vec<SchedulingReport>> {
        let (mut intervals, give_up) = (Vec::<SchedulingReport>::new(), Instant::now() + INTERVAL_WAIT_MAX);
        while intervals.len() < INTERVALS_SKIPPED + count {
            let interval: SchedulingReport =
                http_client::get(&self.socket, SCHEDULING_INTERVAL_PATH).map_err(admin_error)?;
            if intervals.last().is_none_or(|last| last.number < interval.number) {
                intervals.push(interval);
            } else if Instant::now() > give_up {
                bail!("the node's monitor measures nothing");
            }
            std::thread::sleep(INTERVAL / 5);
        }
        Ok(intervals.split_off(INTERVALS_SKIPPED))
    }

    /// Starts a host on the processor of its connection's core, or on the other one. Returns it with that core.
    fn start_host_by_core(&self, own: bool, depth: &str) -> Result<(BenchProcess, usize)> {
        // Each new connection is placed on the next core.
        for _ in 0..2 {
            let core = usize::from(own);
            let host = self.start_writer(DENSE, self.processors[1], "1", depth)?;
            let intervals = self.next_intervals(2)?;
            let requests =
                |core: usize| intervals.iter().map(|interval| interval.cores[core].requests).sum::<u64>();
            if requests(core) > requests(1 - core) {
                return Ok((host, core));
            }
        }
        bail!("no connection was accepted on the expected core")
    }
}

fn admin_error(error: http_client::AdminClientError) -> anyhow::Error {
    anyhow!("the node's admin server: {error}")
}

fn mean(intervals: &[SchedulingReport], figure: impl Fn(&SchedulingReport) -> f64) -> f64 {
    intervals.iter().map(figure).sum::<f64>() / intervals.len().max(1) as f64
}

/// Completed operations per second of one host, or of all.
fn throughput_of(intervals: &[SchedulingReport], host: Option<&str>) -> f64 {
    let of = |interval: &SchedulingReport| {
        let tenants = interval.tenants.iter().filter(|tenant| host.is_none_or(|host| tenant.host == host));
        tenants.map(|tenant| tenant.operations_s).sum()
    };
    mean(intervals, of)
}

/// Adds a point from the results of its rounds.
fn push_rounds(
    points: &mut DataPoints,
    series: &str,
    x: &str,
    rounds: impl Iterator<Item = f64>,
    unit: &'static str,
) {
    points.add_measured(series, x, None, &rounds.map(Ok).collect::<Vec<_>>(), unit);
}

/// A single point with the reason for the absence of the others.
fn not_run_points(mut points: DataPoints, why: String) -> Vec<DataPoint> {
    points.add_measured("two processors", "throughput", None, &[Err(why)], "op/s");
    points.points
}

impl NativeRuns {
    /// Whether a run failed that this machine supports.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// OctoKV's Fig. 7 on this machine: puts of 16 KiB over one connection, alternating balancing off and on.
    ///
    /// # Errors
    /// None: a failure is a point with its reason.
    pub fn balancing(&mut self) -> Result<Vec<DataPoint>> {
        self.run_or_report(DataPoints::for_figure("Figure 7 on cores"), balancing)
    }

    /// OctoFAS's experiments on this machine: a sparse and a dense host, alone and together, both on one processor, with
    /// connections on both cores of the node.
    ///
    /// # Errors
    /// None: a failure is a point with its reason.
    pub fn fairness(&mut self) -> Result<Vec<DataPoint>> {
        self.run_or_report(DataPoints::for_figure("Figure 9 on cores"), fairness)
    }

    /// Turns a failure into a point with its reason, so that the other figures run.
    fn run_or_report(
        &mut self,
        mut points: DataPoints,
        make: fn(&NativeRuns, [usize; 2], &mut DataPoints) -> Result<()>,
    ) -> Result<Vec<DataPoint>> {
        let processors = match processors() {
            Ok(processors) => processors,
            Err(why) => return Ok(not_run_points(points, why)),
        };
        Ok(match make(self, processors, &mut points) {
            Ok(()) => points.points,
            Err(error) => {
                self.failed = true;
                not_run_points(points, format!("{error:#}"))
            }
        })
    }
}

fn balancing(runs: &NativeRuns, processors: [usize; 2], points: &mut DataPoints) -> Result<()> {
    let node = NativeNode::start(processors)?;
    for (label, own) in [("host beside the busy core", true), ("host beside the idle core", false)] {
        for depth in ["12", "128"] {
            let (mut host, busy) = node.start_host_by_core(own, depth)?;
            let series = format!("{label}, {depth} puts at a time");
            let mut reports = [Vec::new(), Vec::new()];
            for _ in 0..runs.rounds {
                for (policy, reports) in ["none", "proportional"].iter().zip(&mut reports) {
                    node.set_policy(policy)?;
                    reports.push(node.next_intervals(runs.intervals)?);
                }
            }
            node.set_policy("none")?;
            host.ensure_running()?;
            drop(host);
            let [off, on] = &reports;
            let rates = |reports: &[Vec<SchedulingReport>]| {
                reports.iter().map(|interval_reports| throughput_of(interval_reports, None)).collect()
            };
            let (rates_off, rates_on): (Vec<f64>, Vec<f64>) = (rates(off), rates(on));
            push_rounds(points, &series, "off", rates_off.iter().copied(), "op/s");
            push_rounds(points, &series, "on", rates_on.iter().copied(), "op/s");
            for (core, name) in [(busy, "its core"), (1 - busy, "the other")] {
                for (way, reports) in [("off", off), ("on", on)] {
                    let of = |interval_reports: &Vec<SchedulingReport>| {
                        mean(interval_reports, |interval| interval.cores[core].utilisation)
                    };
                    push_rounds(points, &series, &format!("{name}, {way}"), reports.iter().map(of), "1");
                }
            }
            let gains = rates_off.iter().zip(&rates_on).map(|(off, on)| (on / off - 1.0) * 100.0);
            push_rounds(points, &series, "throughput", gains, "%");
        }
    }
    Ok(())
}

fn fairness(runs: &NativeRuns, processors: [usize; 2], points: &mut DataPoints) -> Result<()> {
    const POLICIES: [&str; 5] = ["none", "intra", "hybrid", "auto", "fair"];
    let node = NativeNode::start(processors)?;
    let [_, clients] = node.processors;
    let mut sparse = node.start_writer(SPARSE, clients, "2", "1")?;
    let mut dense = node.start_writer(DENSE, clients, "8", "4")?;
    // By host and round: its rate alone; by policy and round: both rates.
    let mut alone = [Vec::new(), Vec::new()];
    let mut shared = POLICIES.map(|_| Vec::new());
    for _ in 0..runs.rounds {
        node.set_policy("none")?;
        for (name, alone) in [SPARSE, DENSE].into_iter().zip(&mut alone) {
            let other = if name == SPARSE { &mut dense } else { &mut sparse };
            other.set_suspended(true)?;
            alone.push(throughput_of(&node.next_intervals(runs.intervals)?, Some(name)));
            other.set_suspended(false)?;
        }
        for (policy, shared) in POLICIES.iter().zip(&mut shared) {
            node.set_policy(policy)?;
            let intervals = node.next_intervals(runs.intervals)?;
            let rates = [SPARSE, DENSE].map(|name| throughput_of(&intervals, Some(name)));
            shared.push((rates, mean(&intervals, |interval| interval.fairness)));
        }
    }
    sparse.ensure_running()?;
    dense.ensure_running()?;
    for ((name, alone), threads) in ["sparse", "dense"].iter().zip(&alone).zip(["2", "32"]) {
        push_rounds(
            points,
            "alone",
            &format!("{name}, {threads} puts at a time"),
            alone.iter().copied(),
            "op/s",
        );
    }
    let nothing = shared[0].clone();
    for (policy, shared) in POLICIES.iter().zip(&shared) {
        // Each host has a fixed number of operations in flight, so its response time is inverse to its rate.
        let slowdowns = |round: usize| [0, 1].map(|host: usize| alone[host][round] / shared[round].0[host]);
        let rounds = || (0..shared.len()).map(slowdowns);
        push_rounds(points, policy, "sparse", rounds().map(|slowdowns| slowdowns[0]), "times slower");
        push_rounds(points, policy, "dense", rounds().map(|slowdowns| slowdowns[1]), "times slower");
        let fairness = rounds().map(|[one, other]| one.min(other) / one.max(other));
        push_rounds(points, policy, "fairness", fairness, "1");
        push_rounds(points, policy, "the monitor's", shared.iter().map(|round| round.1), "1");
        push_rounds(points, policy, "both", shared.iter().map(|(rates, _)| rates.iter().sum()), "op/s");
        if *policy != POLICIES[0] {
            let of_none =
                |round: usize| shared[round].0.iter().sum::<f64>() / nothing[round].0.iter().sum::<f64>();
            let change = (0..shared.len()).map(|round| (of_none(round) - 1.0) * 100.0);
            push_rounds(points, policy, "against none", change, "%");
        }
    }
    Ok(())
}
