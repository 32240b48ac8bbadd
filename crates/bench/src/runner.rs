//! The runner: starts the workers of each workload, reports progress, and merges their results.

use crate::baselines::resp_worker;
use crate::config::{BenchConfig, StopCondition};
use crate::error::{BenchError, TargetFailure};
use crate::local_engine::LocalEngine;
use crate::log_work::LogWork;
use crate::op_generator::KeySpace;
use crate::platform::GeneratorPlatform;
use crate::recorder::Recorder;
use crate::resource_usage::ResourceSample;
use crate::shard::Shard;
use crate::system_under_test::SystemUnderTest;
use crate::values::ValueGenerator;
use crate::workload::Workload;
use crate::workload_result::{TargetResult, WorkloadResult};
use crate::workload_state::{TargetNode, WorkerGroup, WorkloadProgress, WorkloadState};
use crate::{host_kvs, kv_worker, local_engine, remote_engine, rocksdb_store};
use octokv_base::Nanos;
use octokv_client::{ClientConfig, Reconnect};
use octokv_runtime::Polling;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Runs every workload of a configuration on a system, each with connections of its own. `nodes` are the targets: one,
/// or with Key Value commands several, to which threads, keys and operations are assigned ([`Shard`]). A target has one
/// worker per entry of `cores` that is assigned to it, at least one (for an engine on files, which has no node, one per
/// operation in flight). `progress` is called about five times a second.
///
/// # Errors
/// The first failure and its target; values stored until then stay.
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
            finished: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        });
        let targets: Vec<(Arc<WorkloadState>, WorkerAssignments)> =
            (nodes.iter().zip(targets).zip(Shard::all(nodes.len())))
                .map(|((node, (config, workers)), shard)| {
                    let shared = WorkloadState {
                        group: Arc::clone(&group),
                        workload,
                        system_name: system.name(),
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
        let before = system.data_path().map(ResourceSample::take);
        let log_before = system.log_statistics();
        let recorders = run_workers(&targets, system, config, &mut progress)?;
        let mut result = result_of(workload, system, config, nodes, recorders);
        if let Some((before, path)) = before.zip(system.data_path()) {
            let operations =
                targets.iter().map(|(shared, _)| shared.completed_ops.load(Ordering::Relaxed)).sum();
            result.set_usage(before.until(&ResourceSample::take(path), operations));
            result.index_bytes = system.index_bytes();
            let log = log_before.zip(system.log_statistics());
            result.log = log.and_then(|(before, after)| LogWork::between(&before, &after, operations));
        }
        results.push(result);
    }
    Ok(results)
}

/// Runs every workload of a configuration on an engine in this process, with one reactor per entry of `cores`.
///
/// # Errors
/// The first failure; values stored until then stay.
pub fn run_local_engine(
    config: &BenchConfig,
    engine: &Arc<LocalEngine>,
    cores: &[Option<usize>],
    polling: Polling,
    platform: GeneratorPlatform,
) -> Result<Vec<WorkloadResult>, BenchError> {
    let system = SystemUnderTest::LocalEngine(Arc::clone(engine));
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let node = TargetNode { name: String::new(), address: nowhere, client: ClientConfig::default() };
    run(config, &system, &[node], cores, polling, platform, |_| ()).map_err(|failed| failed.error)
}

/// The OS threads of one target: the core of each and the number of connections that it drives.
type WorkerAssignments = Vec<(Option<usize>, usize)>;

/// Merges the recorders of all targets; several targets have a result each as well.
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
    let mut result =
        WorkloadResult::new(workload, system.name(), config, total.expect("a run has at least one target"));
    result.targets = targets;
    result
}

/// Runs one workload on all targets and returns a recorder for each.
fn run_workers(
    targets: &[(Arc<WorkloadState>, WorkerAssignments)],
    system: &SystemUnderTest,
    config: &BenchConfig,
    progress: &mut impl FnMut(WorkloadProgress),
) -> Result<Vec<Recorder>, TargetFailure> {
    let (report, reports) = channel();
    let (platform, group) = (targets[0].0.platform, &targets[0].0.group);
    for (target, (shared, workers)) in targets.iter().enumerate() {
        for (number, &(core, threads)) in workers.iter().enumerate() {
            let (worker, system, report) = (Arc::clone(shared), system.clone(), report.clone());
            let body = Box::new(move || {
                let result = run_worker_thread(&worker, &system, number, threads);
                // Before the report: the caller may close the store when all have reported.
                drop((worker, system));
                // The receiver is gone only if starting a thread failed.
                let _ = report.send((target, result));
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
    // Every worker reports before it ends, unless it panicked, which its thread has printed.
    let not_reported = |target| TargetFailure { target, error: BenchError::Thread(0) };
    let each = recorders
        .into_iter()
        .enumerate()
        .map(|(target, recorder)| recorder.ok_or_else(|| not_reported(target)));
    each.collect()
}

/// Progress of a workload after `operations` completed operations.
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

/// The body of a worker thread.
fn run_worker_thread(
    shared: &WorkloadState,
    system: &SystemUnderTest,
    number: usize,
    threads: usize,
) -> Result<Recorder, BenchError> {
    match system {
        SystemUnderTest::Kv => kv_worker::run_worker(shared, number, threads),
        SystemUnderTest::RemoteEngine(engine) => remote_engine::run_worker(shared, *engine),
        SystemUnderTest::LocalEngine(local) => local_engine::run_worker(shared, local, number, threads),
        SystemUnderTest::HostKvs(store) => host_kvs::run_worker(shared, store, number),
        SystemUnderTest::RocksDb(store) => rocksdb_store::run_worker(shared, store, number),
        SystemUnderTest::RespServer(_) => resp_worker::run_worker(shared, number, threads),
    }
}
