//! The workers of a workload together: started, watched, added up.

use crate::baselines::resp::ServerError as ServerFault;
use crate::baselines::resp_worker;
use crate::config::{BenchConfig, StopCondition};
use crate::op_generator::{KeySpace, OpGenerator, Operation};
use crate::recorder::Recorder;
use crate::report::{TargetResult, WorkloadResult};
use crate::shard::Shard;
use crate::system_under_test::SystemUnderTest;
use crate::values::ValueGenerator;
use crate::workload::Workload;
use crate::{Clock, host_kvs, kv_worker, remote_engine};
use octokv_base::{Key, Nanos, Prng};
use octokv_client::{ClientConfig, Reconnect};
use octokv_engine::EngineError;
use octokv_engine::hash::OpenError;
use octokv_runtime::Polling;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// What runs on a thread.
pub type ThreadBody = Box<dyn FnOnce() + Send>;

/// What the machine under the generator gives it.
#[derive(Clone, Copy)]
pub struct GeneratorPlatform {
    /// The time.
    pub now: Clock,
    /// Starts a thread, on one core where one is named.
    pub spawn: fn(core: Option<usize>, body: ThreadBody) -> std::io::Result<()>,
}

/// How far a workload is.
#[derive(Clone, Copy, Debug)]
pub struct WorkloadProgress {
    /// Which one.
    pub workload: Workload,
    /// Operations done.
    pub operations: u64,
    /// Part of the whole, 0 to 1.
    pub fraction: f64,
}

/// Why a run did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BenchError {
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
        error: EngineError,
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
        error: ServerFault,
    },
    /// The engine could not write its last checkpoint.
    Close(EngineError),
    /// A value that was read is not what a workload with these sizes and this seed stores.
    WrongValue {
        /// Whose.
        key: Key,
        /// How long it is, in bytes.
        have_bytes: usize,
    },
    /// The node's list of keys says more than it holds.
    MalformedList {
        /// Where it was to begin.
        from: Key,
    },
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BenchError::Connect(error) => error.fmt(f),
            BenchError::Threads { wanted, granted } => {
                write!(f, "{wanted} threads on one core: the node takes {granted} connections of one client")
            }
            BenchError::Depth { wanted, granted } => {
                write!(f, "a depth of {wanted}: the node takes {granted} commands at a time on a connection")
            }
            BenchError::Thread(errno) => {
                write!(f, "the load cannot be started: {}", std::io::Error::from_raw_os_error(*errno))
            }
            BenchError::Command { workload, key, error } => {
                write!(f, "{}, key {key}: {error}", workload.name())
            }
            BenchError::Open { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    OpenError::Superblock(_) => {
                        f.write_str("; it was left as it is (--format gives up what it holds)")
                    }
                    _ => Ok(()),
                }
            }
            BenchError::Engine { workload, key, error } => {
                write!(f, "{}, key {key}: {error}", workload.name())
            }
            BenchError::Server { name, workload, key, error } => {
                write!(f, "{}, ", workload.name())?;
                if let Some(key) = key {
                    write!(f, "key {key}, ")?;
                }
                write!(f, "server {name}: {error}")
            }
            BenchError::Close(error) => write!(f, "the last checkpoint failed: {error}"),
            BenchError::WrongValue { key, have_bytes } => write!(
                f,
                "key {key} has a value of {have_bytes} bytes that a workload with this value size and seed \
                 never stored"
            ),
            BenchError::MalformedList { from } => write!(f, "the list of keys from {from} on is malformed"),
        }
    }
}

impl std::error::Error for BenchError {}

/// A failure, and on which target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetFailure {
    /// Its place in the list of nodes.
    pub target: usize,
    /// What failed.
    pub error: BenchError,
}

/// What the workers of all targets share: they begin together, and when one fails all end.
pub(crate) struct WorkerGroup {
    pub workers: usize,
    pub connected: AtomicUsize,
    pub failed: AtomicBool,
}

/// What the workers of one workload on one target share.
pub(crate) struct WorkloadState {
    pub group: Arc<WorkerGroup>,
    /// The target's share of it.
    pub config: BenchConfig,
    pub workload: Workload,
    pub system: SystemUnderTest,
    pub address: SocketAddr,
    pub client: ClientConfig,
    pub platform: GeneratorPlatform,
    pub polling: Polling,
    pub values: ValueGenerator,
    pub keys: KeySpace,
    /// Those of this target.
    pub workers: usize,
    /// Operations given out.
    pub issued_ops: AtomicU64,
    /// Operations answered.
    pub completed_ops: AtomicU64,
}

/// Where the node is, and how to connect to it.
#[derive(Clone, Debug)]
pub struct TargetNode {
    /// Its name in reports.
    pub name: String,
    /// Its address.
    pub address: SocketAddr,
    /// The settings of sessions with it.
    pub client: ClientConfig,
}

/// Runs every workload of a plan on a system, each with connections of its own. `nodes` are its targets: one, or with
/// Key Value commands several, among which threads, keys and operations are dealt ([`Shard`]). A target has one worker
/// per entry of `cores` that it is dealt, at least one (for an engine over files, which has no node, one per operation
/// in flight). `progress` is told about five times a second.
///
/// # Errors
/// The first thing that failed, and on which target; what was stored by then stays.
pub fn run(
    config: &BenchConfig,
    system: &SystemUnderTest,
    nodes: &[TargetNode],
    cores: &[Option<usize>],
    polling: Polling,
    platform: GeneratorPlatform,
    mut progress: impl FnMut(WorkloadProgress),
) -> Result<Vec<WorkloadResult>, TargetFailure> {
    let mut results = Vec::new();
    for &workload in &config.workloads {
        let targets: Vec<(BenchConfig, WorkerAssignments)> = Shard::all(nodes.len())
            .map(|shard| {
                let config = config.for_shard(shard);
                let workers = system.assign_workers(&config, &shard.assign(cores));
                (config, workers)
            })
            .collect();
        let group = Arc::new(WorkerGroup {
            workers: targets.iter().map(|(_, workers)| workers.len()).sum(),
            connected: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        });
        let targets: Vec<(Arc<WorkloadState>, WorkerAssignments)> =
            (nodes.iter().zip(targets).zip(Shard::all(nodes.len())))
                .map(|((node, (config, workers)), shard)| {
                    let shared = WorkloadState {
                        group: Arc::clone(&group),
                        workload,
                        system: system.clone(),
                        address: node.address,
                        client: ClientConfig { reconnect: Reconnect::Never, ..node.client.clone() },
                        platform,
                        polling,
                        values: ValueGenerator::new(config.seed, config.value_sizes.max_bytes()),
                        keys: KeySpace::new(shard, config.keys, config.threads * config.depth),
                        workers: workers.len(),
                        issued_ops: AtomicU64::new(0),
                        completed_ops: AtomicU64::new(0),
                        config,
                    };
                    (Arc::new(shared), workers)
                })
                .collect();
        let recorders = run_workers(&targets, config, &mut progress)?;
        results.push(result_of(workload, system, config, nodes, recorders));
    }
    Ok(results)
}

/// The OS threads of one target: the core of each and how many of the plan's threads it drives.
type WorkerAssignments = Vec<(Option<usize>, usize)>;

/// The figures of all targets together, and where there are several those of each.
fn result_of(
    workload: Workload,
    system: &SystemUnderTest,
    config: &BenchConfig,
    nodes: &[TargetNode],
    recorders: Vec<Recorder>,
) -> WorkloadResult {
    let targets = match nodes {
        [_] => Vec::new(),
        several => several
            .iter()
            .zip(&recorders)
            .zip(Shard::all(nodes.len()))
            .map(|((node, recorder), shard)| {
                TargetResult::new(&node.name, config.for_shard(shard).threads, recorder)
            })
            .collect(),
    };
    let total = recorders.into_iter().reduce(|mut total, recorder| {
        total.add(recorder);
        total
    });
    let mut result = WorkloadResult::new(workload, system.name(), config, total.expect("a run has a target"));
    result.targets = targets;
    result
}

/// Runs one workload on all targets; gives what each counted.
fn run_workers(
    targets: &[(Arc<WorkloadState>, WorkerAssignments)],
    config: &BenchConfig,
    progress: &mut impl FnMut(WorkloadProgress),
) -> Result<Vec<Recorder>, TargetFailure> {
    let (report, reports) = channel();
    let (platform, group) = (targets[0].0.platform, &targets[0].0.group);
    for (target, (shared, workers)) in targets.iter().enumerate() {
        for (number, &(core, threads)) in workers.iter().enumerate() {
            let (worker, report) = (Arc::clone(shared), report.clone());
            let body = Box::new(move || {
                // Lost only when the receiver gave up, and then nobody wants it.
                let _ = report.send((target, run_worker_thread(&worker, number, threads)));
            });
            if let Err(error) = (platform.spawn)(core, body) {
                group.failed.store(true, Ordering::Release);
                group.connected.fetch_add(group.workers, Ordering::AcqRel);
                return Err(TargetFailure {
                    target,
                    error: BenchError::Thread(error.raw_os_error().unwrap_or_default()),
                });
            }
        }
    }
    drop(report);
    let begin = (platform.now)();
    let mut recorders: Vec<Option<Recorder>> = targets.iter().map(|_| None).collect();
    let mut failure: Option<TargetFailure> = None;
    loop {
        match reports.recv_timeout(Duration::from_millis(200)) {
            Ok((target, Ok(tally))) => match &mut recorders[target] {
                none @ None => *none = Some(tally),
                Some(total) => total.add(tally),
            },
            Ok((target, Err(error))) => failure = failure.or(Some(TargetFailure { target, error })),
            Err(RecvTimeoutError::Timeout) => {
                let done =
                    targets.iter().map(|(shared, _)| shared.completed_ops.load(Ordering::Relaxed)).sum();
                progress(progress_of(targets[0].0.workload, config, done, (platform.now)().since(begin)));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if let Some(failed) = failure {
        return Err(failed);
    }
    // Every worker reports before it ends, unless it panicked, which its thread has said.
    let not_reported = |target| TargetFailure { target, error: BenchError::Thread(0) };
    let each = recorders
        .into_iter()
        .enumerate()
        .map(|(target, recorder)| recorder.ok_or_else(|| not_reported(target)));
    each.collect()
}

/// How far a workload is when so many operations are done.
fn progress_of(
    workload: Workload,
    config: &BenchConfig,
    operations: u64,
    elapsed: Nanos,
) -> WorkloadProgress {
    let part = match config.stop {
        StopCondition::Operations(count) => operations as f64 / count as f64,
        StopCondition::Time(span) => elapsed.as_secs_f64() / (span + config.warm_up).as_secs_f64(),
    };
    WorkloadProgress { workload, operations, fraction: part.min(1.0) }
}

/// What a worker's thread does.
fn run_worker_thread(shared: &WorkloadState, number: usize, threads: usize) -> Result<Recorder, BenchError> {
    match &shared.system {
        SystemUnderTest::Kv => kv_worker::run_worker(shared, number, threads),
        SystemUnderTest::RemoteEngine(engine) => remote_engine::run_worker(shared, *engine),
        SystemUnderTest::HostKvs(store) => host_kvs::run_worker(shared, store, number),
        SystemUnderTest::RespServer(_) => resp_worker::run_worker(shared, number, threads),
    }
}

impl WorkloadState {
    /// The next operation; none when the workload has no more.
    #[inline]
    pub fn next_op(&self, op_generator: &mut OpGenerator) -> Option<Operation> {
        let number = self.issued_ops.fetch_add(1, Ordering::Relaxed);
        if let StopCondition::Operations(count) = self.config.stop
            && number >= count
        {
            return None;
        }
        Some(op_generator.next_op(number, &self.config, &self.keys))
    }

    /// When a workload that began then ends by itself.
    pub fn end_time(&self, begin: Nanos) -> Nanos {
        match self.config.stop {
            StopCondition::Time(span) => begin + self.config.warm_up + span,
            StopCondition::Operations(_) => Nanos::NEVER,
        }
    }

    /// Where the operations of worker `number` come from.
    pub fn op_generator(&self, number: usize) -> OpGenerator {
        let random = Prng::new(self.config.seed ^ (number as u64 + 1) << 32 ^ self.workload as u64);
        OpGenerator::new(&self.config, self.workload, random)
    }
}
