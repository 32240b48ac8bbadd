//! `octokv bench --against`: peers beside the node, in turns, and ratios.
//!
//! ```text
//!   find every program ─▶ make a directory ─▶ round 1: workload 1: ours, peer, peer; workload 2: ...  round 2: ...
//!   whatever happens, a signal too: end the processes, remove the directory
//! ```
//! In: a plan, the node. Out: a line per turn, ratios, what the peers were, the document. Invariant: nothing is
//! connected, started or made before every mistake that can be known was told.

use crate::bench::{HOST, SPIN, tell};
use crate::cli::{Bench, SystemName};
use crate::config::Polling;
use crate::exit_status::{Failure, Outcome};
use crate::progress::Meter;
use anyhow::{Context, anyhow};
use octokv_base::Nanos;
use octokv_bench::baselines::child_processes::Children;
use octokv_bench::baselines::compare::{Comparison, compare, table};
use octokv_bench::baselines::{Account, Ground, Kind, Peer};
use octokv_bench::report::{Figures, table_head};
use octokv_bench::{End, Plan, Progress, Workload};
use octokv_sys::{signal, thread};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Exit code of a run that a signal ended, as shells have it for SIGINT.
const EXIT_INTERRUPTED: i32 = 130;
/// How many rounds there are unless told otherwise.
const ROUNDS: usize = 3;
/// Keys that are deleted at a time by each thread before a fill.
const EMPTYING_DEPTH: usize = 16;
/// The most.
const ROUNDS_MAX: usize = 1000;

/// The peers of a run, and what they leave behind when it is cut short.
pub struct Peers {
    peers: Vec<Box<dyn Peer>>,
    children: Arc<Children>,
    directory: TempDir,
    rounds: usize,
}

/// What a run came to, beside peers or without any.
#[derive(Default)]
pub struct Beside {
    /// The figures of every turn, in order.
    pub figures: Vec<Figures>,
    /// What the peers were.
    pub accounts: Vec<Account>,
    /// Ratios, one per workload and peer.
    pub comparisons: Vec<Comparison>,
}

/// The flags that make no sense with peers, or without.
///
/// # Errors
/// A usage error that says which.
pub fn check(bench: &Bench) -> Outcome {
    let usage = |what: String| Err(Failure::Usage(what));
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
    if bench.system != SystemName::Kv {
        return usage("--against is for --system kv".to_owned());
    }
    match (bench.svg.is_some(), bench.rates.is_empty()) {
        (true, _) => usage("--svg draws no peers: leave out --against".to_owned()),
        (_, false) => usage("--against takes one --rate, not --rates".to_owned()),
        _ => Ok(()),
    }
}

impl Peers {
    /// Those that are asked for, each with its program and a place of its own; nothing is started yet.
    ///
    /// # Errors
    /// When a program is not there, a peer cannot do the plan, or no files can be made.
    pub fn new(bench: &Bench, plan: &Plan, cores: &[Option<usize>]) -> Result<Peers, Failure> {
        for &kind in &bench.against {
            if !is_there(kind.program()) {
                let (name, program, package) = (kind.name(), kind.program(), kind.package());
                return Err(Failure::Failed(anyhow!(
                    "--against {name}: there is no {program}; Debian's package {package} has it (apt-get install {package})"
                )));
            }
        }
        let place = match &bench.peer_dir {
            Some(directory) => directory.clone(),
            None => PathBuf::from("."),
        };
        let unusable = |error: std::io::Error| {
            Failure::Usage(format!("--peer-dir {}: no files can be made there: {error}", place.display()))
        };
        let absolute = place.canonicalize().map_err(unusable)?;
        let directory =
            tempfile::Builder::new().prefix("octokv-peers-").tempdir_in(absolute).map_err(unusable)?;
        let children = Arc::new(Children::default());
        let polling = bench.peer_polling.unwrap_or(Polling::Sleep).policy(SPIN);
        let peer = |&kind: &Kind| {
            kind.peer(Ground {
                directory: directory.path().join(kind.name()),
                empty,
                children: Arc::clone(&children),
                host: HOST,
                cores: cores.to_vec(),
                polling,
            })
        };
        let peers: Vec<Box<dyn Peer>> = bench.against.iter().map(peer).collect();
        for peer in &peers {
            let name = peer.kind().name();
            peer.check(plan).map_err(|what| Failure::Usage(format!("--against {name}: {what}")))?;
        }
        Ok(Peers { peers, children, directory, rounds: bench.rounds.unwrap_or(ROUNDS) })
    }

    /// Runs all rounds. `ours` runs a plan of one workload on the node. With `to_table` every turn is told at its end, and
    /// what they come to at last.
    ///
    /// # Errors
    /// The first turn that failed.
    pub fn run(
        mut self,
        plan: &Plan,
        mut ours: impl FnMut(&Plan) -> Result<Figures, Failure>,
        to_table: bool,
    ) -> Result<Beside, Failure> {
        self.end_with_signals()?;
        if to_table {
            writeln!(std::io::stdout(), "{}", table_head())?;
        }
        let sides = 1 + self.peers.len();
        let mut figures: Vec<Figures> = Vec::new();
        for round in 1..=self.rounds {
            for &workload in &plan.workloads {
                let one = Plan { workloads: vec![workload], ..plan.clone() };
                if workload.is_fill() {
                    // A peer is made empty, too, and its turn does not count the time.
                    ours(&emptying(&one)).inspect_err(|_| wait_if_interrupted())?;
                }
                for side in 0..sides {
                    let turn = match side.checked_sub(1) {
                        None => ours(&one),
                        Some(number) => turn_of(&mut *self.peers[number], &one),
                    };
                    let turn = Figures { round: Some(round), ..turn.inspect_err(|_| wait_if_interrupted())? };
                    if to_table {
                        tell(&turn)?;
                    }
                    figures.push(turn);
                }
            }
        }
        let per_round = plan.workloads.len() * sides;
        let turns = |at: usize| figures[at..].iter().step_by(per_round).collect::<Vec<_>>();
        let comparisons: Vec<Comparison> = (0..per_round)
            .filter(|at| at % sides > 0)
            .map(|at| compare(&turns(at - at % sides), &turns(at)))
            .collect();
        let accounts: Vec<Account> = self.peers.iter().map(|peer| peer.account()).collect();
        if to_table {
            tell_ratios(&mut std::io::stdout(), &comparisons, &accounts, self.rounds)?;
        }
        Ok(Beside { figures, accounts, comparisons })
    }

    /// From now on SIGINT, SIGTERM and SIGHUP end the peers, remove their files and end this process.
    fn end_with_signals(&self) -> anyhow::Result<()> {
        let stop = signal::install().context("signals")?;
        let (children, directory) = (Arc::clone(&self.children), self.directory.path().to_owned());
        let watch = move || {
            stop.wait();
            children.end_all();
            // Where something is left there is nobody to tell.
            let _ = std::fs::remove_dir_all(&directory);
            std::process::exit(EXIT_INTERRUPTED)
        };
        thread::spawn("octokv-signals", watch).context("the thread that waits for signals")?;
        Ok(())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // The directory goes with its field, when nobody writes to it any more.
        self.peers.clear();
        self.children.end_all();
    }
}

/// What fails because a signal ends it is not what went wrong: the watcher ends this process.
fn wait_if_interrupted() {
    while signal::stop().is_some_and(signal::Stop::requested) {
        std::thread::park();
    }
}

/// What deletes the keys of a plan.
fn emptying(plan: &Plan) -> Plan {
    Plan {
        workloads: vec![Workload::DeleteSequential],
        depth: plan.depth.max(EMPTYING_DEPTH),
        end: End::Operations(plan.keys),
        distribution: None,
        rate: None,
        warm_up: Nanos::ZERO,
        ..plan.clone()
    }
}

fn turn_of(peer: &mut dyn Peer, plan: &Plan) -> Result<Figures, Failure> {
    let mut meter = Meter::new(&format!("{} {}", peer.kind().name(), plan.workloads[0].name()));
    let mut progress = |progress: Progress| {
        meter.show(progress.part, &format!("{} operations", progress.operations));
    };
    Ok(peer.run(plan, &mut progress).map_err(anyhow::Error::from)?)
}

/// Ratios, and what a reader has to know of the peers.
fn tell_ratios(
    out: &mut impl Write,
    comparisons: &[Comparison],
    accounts: &[Account],
    rounds: usize,
) -> std::io::Result<()> {
    write!(out, "\n{}\n", table(comparisons, rounds))?;
    writeln!(out, "A fill begins with an empty peer and without its keys on the node.")?;
    for account in accounts {
        let version = account.version.as_deref().unwrap_or("of unknown version");
        let network = match account.embedded {
            true => "embedded: its operations cross no network, ours do",
            false => "over loopback TCP, by the same generator as ours",
        };
        writeln!(out, "{} {version}, {network}; as run:", account.peer)?;
        for line in &account.as_run {
            writeln!(out, "  {line}")?;
        }
        for note in &account.notes {
            writeln!(out, "  note: {note}")?;
        }
    }
    Ok(())
}

/// A directory without anything in it, whatever was there.
fn empty(directory: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => std::fs::create_dir(directory),
    }
}

/// Whether a program is found as a shell finds it.
fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}
