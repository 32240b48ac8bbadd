//! The workers of a workload together: started, watched, added up.

use crate::baselines::resp::Fault as ServerFault;
use crate::baselines::resp_worker;
use crate::config::{End, Plan};
use crate::op_generator::{Chooser, Keys, Operation};
use crate::recorder::Tally;
use crate::report::{Figures, TargetFigures};
use crate::shard::Share;
use crate::system_under_test::System;
use crate::values::Values;
use crate::workload::Workload;
use crate::{Clock, host_kvs, kv_worker, remote_engine};
use octokv_base::{Key, Nanos, Random};
use octokv_client::{Reconnect, Settings};
use octokv_engine::Fault;
use octokv_engine::hash::OpenError;
use octokv_runtime::Polling;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// What runs on a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// What the machine under the generator gives it.
#[derive(Clone, Copy)]
pub struct Host {
    /// The time.
    pub now: Clock,
    /// Starts a thread, on one core where one is named.
    pub spawn: fn(core: Option<usize>, body: Body) -> std::io::Result<()>,
}

/// How far a workload is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Which one.
    pub workload: Workload,
    /// Operations done.
    pub operations: u64,
    /// Part of the whole, 0 to 1.
    pub part: f64,
}

/// Why a run did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// No connection, or it was lost.
    Connect(octokv_client::Error),
    /// The node does not take so many connections.
    Threads {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// The node does not take so many commands on a connection.
    Depth {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// A thread could not be started, or not waited for; the error number.
    Thread(i32),
    /// An operation failed.
    Command {
        /// Of which workload.
        workload: Workload,
        /// On which key.
        key: Key,
        /// How.
        error: octokv_client::Error,
    },
    /// The device under the engine holds no volume that can be used.
    Open {
        /// The device's name.
        name: String,
        /// Why.
        error: OpenError,
    },
    /// The engine failed.
    Engine {
        /// In which workload.
        workload: Workload,
        /// On which key.
        key: Key,
        /// How.
        fault: Fault,
    },
    /// A peer's server failed.
    Server {
        /// The peer.
        name: &'static str,
        /// In which workload.
        workload: Workload,
        /// On which key, where it was one.
        key: Option<Key>,
        /// How.
        fault: ServerFault,
    },
    /// The engine could not write its last checkpoint.
    Close(Fault),
    /// A value that was read is not what a workload with these sizes and this seed stores.
    Wrong {
        /// Whose.
        key: Key,
        /// How long it is, in bytes.
        have_bytes: usize,
    },
    /// The node's list of keys says more than it holds.
    List {
        /// Where it was to begin.
        from: Key,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Connect(error) => error.fmt(f),
            Error::Threads { wanted, granted } => {
                write!(f, "{wanted} threads on one core: the node takes {granted} connections of one client")
            }
            Error::Depth { wanted, granted } => {
                write!(f, "a depth of {wanted}: the node takes {granted} commands at a time on a connection")
            }
            Error::Thread(errno) => {
                write!(f, "the load cannot be started: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Error::Command { workload, key, error } => write!(f, "{}, key {key}: {error}", workload.name()),
            Error::Open { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    OpenError::NotOurs(_) => {
                        f.write_str("; it was left as it is (--format gives up what it holds)")
                    }
                    _ => Ok(()),
                }
            }
            Error::Engine { workload, key, fault } => write!(f, "{}, key {key}: {fault}", workload.name()),
            Error::Server { name, workload, key, fault } => {
                write!(f, "{}, ", workload.name())?;
                if let Some(key) = key {
                    write!(f, "key {key}, ")?;
                }
                write!(f, "server {name}: {fault}")
            }
            Error::Close(fault) => write!(f, "the last checkpoint failed: {fault}"),
            Error::Wrong { key, have_bytes } => write!(
                f,
                "key {key} has a value of {have_bytes} bytes that a workload with this value size and seed \
                 never stored"
            ),
            Error::List { from } => write!(f, "the list of keys from {from} on is malformed"),
        }
    }
}

impl std::error::Error for Error {}

/// A failure, and on which target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its place in the list of nodes.
    pub target: usize,
    /// What failed.
    pub error: Error,
}

/// What the workers of all targets share: they begin together, and when one fails all end.
pub(crate) struct Crew {
    pub workers: usize,
    pub connected: AtomicUsize,
    pub failed: AtomicBool,
}

/// What the workers of one workload on one target share.
pub(crate) struct Shared {
    pub crew: Arc<Crew>,
    /// The target's share of it.
    pub plan: Plan,
    pub workload: Workload,
    pub system: System,
    pub address: SocketAddr,
    pub client: Settings,
    pub host: Host,
    pub polling: Polling,
    pub values: Values,
    pub keys: Keys,
    /// Those of this target.
    pub workers: usize,
    /// Operations given out.
    pub next: AtomicU64,
    /// Operations answered.
    pub done: AtomicU64,
}

/// Where the node is, and how to connect to it.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name in reports.
    pub name: String,
    /// Its address.
    pub address: SocketAddr,
    /// The settings of sessions with it.
    pub client: Settings,
}

/// Runs every workload of a plan on a system, each with connections of its own. `nodes` are its targets: one, or with
/// Key Value commands several, among which threads, keys and operations are dealt ([`Share`]). A target has one worker
/// per entry of `cores` that it is dealt, at least one (for an engine over files, which has no node, one per operation
/// in flight). `progress` is told about five times a second.
///
/// # Errors
/// The first thing that failed, and on which target; what was stored by then stays.
pub fn run(
    plan: &Plan,
    system: &System,
    nodes: &[Node],
    cores: &[Option<usize>],
    polling: Polling,
    host: Host,
    mut progress: impl FnMut(Progress),
) -> Result<Vec<Figures>, Failed> {
    let mut figures = Vec::new();
    for &workload in &plan.workloads {
        let targets: Vec<(Plan, Workers)> = Share::all(nodes.len())
            .map(|share| {
                let plan = plan.share(share);
                let workers = system.workers(&plan, &share.deal(cores));
                (plan, workers)
            })
            .collect();
        let crew = Arc::new(Crew {
            workers: targets.iter().map(|(_, workers)| workers.len()).sum(),
            connected: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        });
        let targets: Vec<(Arc<Shared>, Workers)> = (nodes.iter().zip(targets).zip(Share::all(nodes.len())))
            .map(|((node, (plan, workers)), share)| {
                let shared = Shared {
                    crew: Arc::clone(&crew),
                    workload,
                    system: system.clone(),
                    address: node.address,
                    client: Settings { reconnect: Reconnect::Never, ..node.client.clone() },
                    host,
                    polling,
                    values: Values::new(plan.seed, plan.value_sizes.most()),
                    keys: Keys::new(share, plan.keys, plan.threads * plan.depth),
                    workers: workers.len(),
                    next: AtomicU64::new(0),
                    done: AtomicU64::new(0),
                    plan,
                };
                (Arc::new(shared), workers)
            })
            .collect();
        let tallies = run_workers(&targets, plan, &mut progress)?;
        figures.push(figures_of(workload, system, plan, nodes, tallies));
    }
    Ok(figures)
}

/// The OS threads of one target: the core of each and how many of the plan's threads it drives.
type Workers = Vec<(Option<usize>, usize)>;

/// The figures of all targets together, and where there are several those of each.
fn figures_of(
    workload: Workload,
    system: &System,
    plan: &Plan,
    nodes: &[Node],
    tallies: Vec<Tally>,
) -> Figures {
    let targets = match nodes {
        [_] => Vec::new(),
        several => several
            .iter()
            .zip(&tallies)
            .zip(Share::all(nodes.len()))
            .map(|((node, tally), share)| TargetFigures::new(&node.name, plan.share(share).threads, tally))
            .collect(),
    };
    let total = tallies.into_iter().reduce(|mut total, tally| {
        total.add(tally);
        total
    });
    let mut figures = Figures::new(workload, system.name(), plan, total.expect("a run has a target"));
    figures.targets = targets;
    figures
}

/// Runs one workload on all targets; gives what each counted.
fn run_workers(
    targets: &[(Arc<Shared>, Workers)],
    plan: &Plan,
    progress: &mut impl FnMut(Progress),
) -> Result<Vec<Tally>, Failed> {
    let (report, reports) = channel();
    let (host, crew) = (targets[0].0.host, &targets[0].0.crew);
    for (target, (shared, workers)) in targets.iter().enumerate() {
        for (number, &(core, threads)) in workers.iter().enumerate() {
            let (worker, report) = (Arc::clone(shared), report.clone());
            let body = Box::new(move || {
                // Lost only when the receiver gave up, and then nobody wants it.
                let _ = report.send((target, drive(&worker, number, threads)));
            });
            if let Err(error) = (host.spawn)(core, body) {
                crew.failed.store(true, Ordering::Release);
                crew.connected.fetch_add(crew.workers, Ordering::AcqRel);
                return Err(Failed {
                    target,
                    error: Error::Thread(error.raw_os_error().unwrap_or_default()),
                });
            }
        }
    }
    drop(report);
    let begin = (host.now)();
    let mut tallies: Vec<Option<Tally>> = targets.iter().map(|_| None).collect();
    let mut failure: Option<Failed> = None;
    loop {
        match reports.recv_timeout(Duration::from_millis(200)) {
            Ok((target, Ok(tally))) => match &mut tallies[target] {
                none @ None => *none = Some(tally),
                Some(total) => total.add(tally),
            },
            Ok((target, Err(error))) => failure = failure.or(Some(Failed { target, error })),
            Err(RecvTimeoutError::Timeout) => {
                let done = targets.iter().map(|(shared, _)| shared.done.load(Ordering::Relaxed)).sum();
                progress(progress_of(targets[0].0.workload, plan, done, (host.now)().since(begin)));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if let Some(failed) = failure {
        return Err(failed);
    }
    // Every worker reports before it ends, unless it panicked, which its thread has said.
    let silent = |target| Failed { target, error: Error::Thread(0) };
    let each = tallies.into_iter().enumerate().map(|(target, tally)| tally.ok_or_else(|| silent(target)));
    each.collect()
}

/// How far a workload is when so many operations are done.
fn progress_of(workload: Workload, plan: &Plan, operations: u64, elapsed: Nanos) -> Progress {
    let part = match plan.end {
        End::Operations(count) => operations as f64 / count as f64,
        End::Time(span) => elapsed.as_secs_f64() / (span + plan.warm_up).as_secs_f64(),
    };
    Progress { workload, operations, part: part.min(1.0) }
}

/// What a worker's thread does.
fn drive(shared: &Shared, number: usize, threads: usize) -> Result<Tally, Error> {
    match &shared.system {
        System::Kv => kv_worker::drive(shared, number, threads),
        System::RemoteEngine(engine) => remote_engine::drive(shared, *engine),
        System::HostKvs(store) => host_kvs::drive(shared, store, number),
        System::Resp(_) => resp_worker::drive(shared, number, threads),
    }
}

impl Shared {
    /// The next operation; none when the workload has no more.
    #[inline]
    pub fn next_operation(&self, chooser: &mut Chooser) -> Option<Operation> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if let End::Operations(count) = self.plan.end
            && number >= count
        {
            return None;
        }
        Some(chooser.operation(number, &self.plan, &self.keys))
    }

    /// When a workload that began then ends by itself.
    pub fn until(&self, begin: Nanos) -> Nanos {
        match self.plan.end {
            End::Time(span) => begin + self.plan.warm_up + span,
            End::Operations(_) => Nanos::NEVER,
        }
    }

    /// Where the operations of worker `number` come from.
    pub fn chooser(&self, number: usize) -> Chooser {
        let random = Random::new(self.plan.seed ^ (number as u64 + 1) << 32 ^ self.workload as u64);
        Chooser::new(&self.plan, self.workload, random)
    }
}
