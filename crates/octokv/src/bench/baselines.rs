//! `octokv bench --against`: baselines measured alternately with the node, and ratios.
//!
//! ```text
//!   find every program ─▶ make a directory ─▶ round 1: workload 1: node, baseline, baseline; workload 2: ...  round 2: ...
//!   on every return, and on a signal: terminate the processes, remove the directory
//! ```
//! In: a configuration, the node. Out: a line per result, ratios, the baselines' descriptions, the report. Invariant:
//! every usage error is reported before anything is connected, started or created.

use super::output::print_result;
use super::platform::{PLATFORM, SPIN_BEFORE_SLEEP};
use crate::choices::PollingChoice;
use crate::cli::{BenchArgs, SystemArg};
use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use anyhow::{Context, anyhow};
use octokv_base::Nanos;
use octokv_bench::baselines::child_processes::ChildProcesses;
use octokv_bench::baselines::compare::{BaselineComparison, compare, comparison_table};
use octokv_bench::baselines::{self, Baseline, BaselineEnv, BaselineInfo, BaselineKind, EmbeddedOptions};
use octokv_bench::workload_result::{WorkloadResult, table_header};
use octokv_bench::{BenchConfig, StopCondition, Workload, WorkloadProgress};
use octokv_sys::{signal, thread};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Exit code of a run that a signal ended, as in shells for SIGINT.
const EXIT_INTERRUPTED: i32 = 130;
/// Rounds without `--rounds`.
const DEFAULT_ROUNDS: usize = 3;
/// Deletions in flight per thread before a fill.
const DELETE_DEPTH: usize = 16;
/// Greatest value of `--rounds`.
const ROUNDS_MAX: usize = 1000;

/// The baselines of a run, their processes and their directory.
pub struct BaselineRunner {
    baselines: Vec<Box<dyn Baseline>>,
    children: Arc<ChildProcesses>,
    directory: TempDir,
    rounds: usize,
    /// Whether ours is an engine in this process.
    is_local: bool,
}

/// Results of a run, with or without baselines.
#[derive(Default)]
pub struct ComparisonRun {
    /// Results of the node and the baselines in the order of execution.
    pub results: Vec<WorkloadResult>,
    /// Descriptions of the baselines.
    pub baselines: Vec<BaselineInfo>,
    /// Ratios, one per workload and baseline.
    pub comparisons: Vec<BaselineComparison>,
}

/// Checks the flags that exclude or require baselines.
///
/// # Errors
/// A usage error with the flag.
pub fn check(bench: &BenchArgs) -> CliResult {
    let usage = |what: String| Err(CliError::Usage(what));
    if bench.against.is_empty() {
        let flags = [
            ("rounds", bench.rounds.is_some()),
            ("peer-dir", bench.peer_dir.is_some()),
            ("peer-polling", bench.peer_polling.is_some()),
        ];
        return match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => usage(format!("--{flag} is for --against")),
            None => Ok(()),
        };
    }
    let kinds = &bench.against;
    if let Some((_, twice)) = kinds.iter().enumerate().find(|(at, kind)| kinds[..*at].contains(kind)) {
        return usage(format!("--against {} is given twice", twice.name()));
    }
    if bench.rounds.is_some_and(|rounds| !(1..=ROUNDS_MAX).contains(&rounds)) {
        return usage(format!("--rounds: must be from 1 to {ROUNDS_MAX}"));
    }
    match bench.system {
        SystemArg::Kv => {}
        SystemArg::LocalEngine => super::local_engine::check_baselines(kinds)?,
        _ => return usage("--against is for --system kv or local-engine".to_owned()),
    }
    match (bench.svg.is_some(), bench.rates.is_empty()) {
        (true, _) => usage("--svg cannot be combined with --against".to_owned()),
        (_, false) => usage("--against takes one --rate, not --rates".to_owned()),
        _ => Ok(()),
    }
}

impl BaselineRunner {
    /// Creates the selected baselines, each with its program and directory; starts nothing.
    ///
    /// # Errors
    /// A missing program, an unsupported workload, or a directory that cannot be used.
    pub fn new(
        bench: &BenchArgs,
        config: &BenchConfig,
        cores: &[Option<usize>],
        embedded: Option<EmbeddedOptions>,
    ) -> Result<BaselineRunner, CliError> {
        for &kind in &bench.against {
            if !is_in_path(kind.program()) {
                let (name, program, package) = (kind.name(), kind.program(), kind.package());
                return Err(CliError::Failed(anyhow!(
                    "--against {name}: {program} is not installed; it is in the Debian package {package} (apt-get install {package})"
                )));
            }
        }
        let location = match &bench.peer_dir {
            Some(directory) => directory.clone(),
            None => PathBuf::from("."),
        };
        let unusable = |error: std::io::Error| {
            CliError::Usage(format!("--peer-dir {}: files cannot be created: {error}", location.display()))
        };
        let absolute = location.canonicalize().map_err(unusable)?;
        let directory =
            tempfile::Builder::new().prefix("octokv-peers-").tempdir_in(absolute).map_err(unusable)?;
        let children = Arc::new(ChildProcesses::default());
        let polling = bench.peer_polling.unwrap_or(PollingChoice::Sleep).to_runtime(SPIN_BEFORE_SLEEP);
        let baseline = |&kind: &BaselineKind| {
            let env = BaselineEnv {
                directory: directory.path().join(kind.name()),
                recreate: recreate_directory,
                processes: Arc::clone(&children),
                platform: PLATFORM,
                cores: cores.to_vec(),
                polling,
                embedded,
            };
            baselines::create(kind, env)
        };
        let baselines: Vec<Box<dyn Baseline>> = bench.against.iter().map(baseline).collect();
        for baseline in &baselines {
            let name = baseline.kind().name();
            baseline
                .check_supported(config)
                .map_err(|what| CliError::Usage(format!("--against {name}: {what}")))?;
        }
        let rounds = bench.rounds.unwrap_or(DEFAULT_ROUNDS);
        Ok(BaselineRunner { baselines, children, directory, rounds, is_local: embedded.is_some() })
    }

    /// Runs all rounds. `ours` runs one workload on ours, and `discard` removes its keys. With `to_table` it prints every result, and the ratios at
    /// the end.
    ///
    /// # Errors
    /// The first run that failed.
    pub fn run(
        mut self,
        config: &BenchConfig,
        ours: impl Fn(&BenchConfig) -> Result<WorkloadResult, CliError>,
        discard: impl Fn(&BenchConfig) -> CliResult,
        to_table: bool,
    ) -> Result<ComparisonRun, CliError> {
        self.install_signal_cleanup()?;
        if to_table {
            writeln!(std::io::stdout(), "{}", table_header())?;
        }
        let sides = 1 + self.baselines.len();
        let mut results: Vec<WorkloadResult> = Vec::new();
        for round in 1..=self.rounds {
            for &workload in &config.workloads {
                let one = BenchConfig { workloads: vec![workload], ..config.clone() };
                if workload.is_fill() {
                    // A baseline starts empty, too; the removal is not measured.
                    discard(&one).inspect_err(|_| wait_if_interrupted())?;
                }
                for side in 0..sides {
                    let result = match side.checked_sub(1) {
                        None => ours(&one),
                        Some(number) => run_baseline(&mut *self.baselines[number], &one),
                    };
                    let result = WorkloadResult {
                        round: Some(round),
                        ..result.inspect_err(|_| wait_if_interrupted())?
                    };
                    if to_table {
                        print_result(&result)?;
                    }
                    results.push(result);
                }
            }
        }
        let per_round = config.workloads.len() * sides;
        let results_of = |at: usize| results[at..].iter().step_by(per_round).collect::<Vec<_>>();
        let comparisons: Vec<BaselineComparison> = (0..per_round)
            .filter(|at| at % sides > 0)
            .map(|at| compare(&results_of(at - at % sides), &results_of(at)))
            .collect();
        let descriptions: Vec<BaselineInfo> = self.baselines.iter().map(|baseline| baseline.info()).collect();
        if to_table {
            print_ratios(&mut std::io::stdout(), &comparisons, &descriptions, (self.rounds, self.is_local))?;
        }
        Ok(ComparisonRun { results, baselines: descriptions, comparisons })
    }

    /// From now on SIGINT, SIGTERM and SIGHUP terminate the baselines, remove their files and end this process.
    fn install_signal_cleanup(&self) -> anyhow::Result<()> {
        let stop = signal::install_handlers().context("signal handlers")?;
        let (children, directory) = (Arc::clone(&self.children), self.directory.path().to_owned());
        let watch = move || {
            stop.wait();
            children.terminate_all();
            // A failed removal cannot be reported any more.
            let _ = std::fs::remove_dir_all(&directory);
            std::process::exit(EXIT_INTERRUPTED)
        };
        thread::spawn("octokv-signals", watch).context("the signal thread")?;
        Ok(())
    }
}

impl Drop for BaselineRunner {
    fn drop(&mut self) {
        // The directory field is dropped after the processes have ended.
        self.baselines.clear();
        self.children.terminate_all();
    }
}

/// Waits for the signal thread to end this process: a failure caused by the signal must not be reported.
fn wait_if_interrupted() {
    while signal::shutdown_signal().is_some_and(signal::ShutdownSignal::is_requested) {
        std::thread::park();
    }
}

/// The configuration that deletes all keys.
pub fn deletion_config(config: &BenchConfig) -> BenchConfig {
    BenchConfig {
        workloads: vec![Workload::DeleteSequential],
        depth: config.depth.max(DELETE_DEPTH),
        stop: StopCondition::Operations(config.keys),
        distribution: None,
        rate: None,
        warm_up: Nanos::ZERO,
        ..config.clone()
    }
}

fn run_baseline(baseline: &mut dyn Baseline, config: &BenchConfig) -> Result<WorkloadResult, CliError> {
    let mut reporter =
        ProgressReporter::new(&format!("{} {}", baseline.kind().name(), config.workloads[0].name()));
    let mut progress = |progress: WorkloadProgress| {
        reporter.update(progress.fraction, &format!("{} operations", progress.operations));
    };
    Ok(baseline.run(config, &mut progress).map_err(anyhow::Error::from)?)
}

/// Prints the ratios and what affects the comparison.
fn print_ratios(
    out: &mut impl Write,
    comparisons: &[BaselineComparison],
    descriptions: &[BaselineInfo],
    (rounds, is_local): (usize, bool),
) -> std::io::Result<()> {
    write!(out, "\n{}\n", comparison_table(comparisons, rounds))?;
    match is_local {
        true => writeln!(out, "A fill starts with an empty baseline and an empty volume.")?,
        false => {
            writeln!(out, "A fill starts with an empty baseline and without its keys on the node.")?;
        }
    }
    for baseline in descriptions {
        let version = baseline.version.as_deref().unwrap_or("of unknown version");
        let network = match baseline.embedded {
            true if is_local => "embedded, as ours",
            true => "embedded: its operations do not cross a network, those of the node do",
            false => "over loopback TCP, by the same load generator",
        };
        writeln!(out, "{} {version}, {network}; executed as:", baseline.baseline)?;
        for line in &baseline.as_run {
            writeln!(out, "  {line}")?;
        }
        for note in &baseline.notes {
            writeln!(out, "  note: {note}")?;
        }
    }
    Ok(())
}

/// Replaces a directory by an empty one.
fn recreate_directory(directory: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => std::fs::create_dir(directory),
    }
}

/// Whether the program is in PATH.
fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}
