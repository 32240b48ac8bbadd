//! State shared by the workers of one workload: its configuration, its counters, its targets.

use crate::config::{BenchConfig, StopCondition};
use crate::op_generator::{KeySpace, OpGenerator, Operation};
use crate::platform::GeneratorPlatform;
use crate::values::ValueGenerator;
use crate::workload::Workload;
use octokv_base::{Nanos, Prng};
use octokv_client::ClientConfig;
use octokv_runtime::Polling;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Progress of a workload.
#[derive(Clone, Copy, Debug)]
pub struct WorkloadProgress {
    /// The workload.
    pub workload: Workload,
    /// Completed operations.
    pub operations: u64,
    /// Completed fraction, 0 to 1.
    pub fraction: f64,
}

/// A target of the load, and how to connect to it.
#[derive(Clone, Debug)]
pub struct TargetNode {
    /// Its name in reports.
    pub name: String,
    /// Its address.
    pub address: SocketAddr,
    /// Configuration of its sessions.
    pub client: ClientConfig,
}

/// State of the workers of all targets: they start together, and all stop if one fails.
pub(crate) struct WorkerGroup {
    pub workers: usize,
    pub connected: AtomicUsize,
    /// Workers whose streams have ended.
    pub finished: AtomicUsize,
    pub failed: AtomicBool,
}

/// State that the workers of one workload on one target share.
pub(crate) struct WorkloadState {
    pub group: Arc<WorkerGroup>,
    /// The configuration of the target's shard.
    pub config: BenchConfig,
    pub workload: Workload,
    pub system_name: &'static str,
    pub address: SocketAddr,
    pub client: ClientConfig,
    pub platform: GeneratorPlatform,
    pub polling: Polling,
    pub values: ValueGenerator,
    pub keys: KeySpace,
    /// Number of workers of this target.
    pub workers: usize,
    /// Operations handed to workers.
    pub issued_ops: AtomicU64,
    /// Completed operations.
    pub completed_ops: AtomicU64,
}

impl WorkloadState {
    /// Whether worker `number` has the writer beside the workload: one per target.
    pub fn has_writer(&self, number: usize) -> bool {
        number == 0 && self.workload.has_writer()
    }

    /// Whether the streams of every worker have ended, or one has failed: the writer beside the workload ends then.
    pub fn is_finished(&self) -> bool {
        let group = &self.group;
        group.finished.load(Ordering::Acquire) >= group.workers || group.failed.load(Ordering::Relaxed)
    }

    /// The next operation; `None` at the end of the workload.
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

    /// End of a timed workload that starts at `begin`; never for one that ends by its number of operations.
    pub fn end_time(&self, begin: Nanos) -> Nanos {
        match self.config.stop {
            StopCondition::Time(span) => begin + self.config.warm_up + span,
            StopCondition::Operations(_) => Nanos::NEVER,
        }
    }

    /// Creates the operation generator of worker `number`.
    pub fn op_generator(&self, number: usize) -> OpGenerator {
        let random = Prng::new(self.config.seed ^ (number as u64 + 1) << 32 ^ self.workload as u64);
        OpGenerator::new(&self.config, self.workload, random)
    }
}

/// The state of a workload without a target.
#[cfg(test)]
pub(crate) fn test_state(config: BenchConfig, workload: Workload) -> WorkloadState {
    use crate::shard::Shard;
    let group = WorkerGroup {
        workers: 1,
        connected: AtomicUsize::new(0),
        finished: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
    };
    WorkloadState {
        group: Arc::new(group),
        workload,
        system_name: "none",
        address: SocketAddr::from(([127, 0, 0, 1], 0)),
        client: ClientConfig::default(),
        platform: GeneratorPlatform { now: || Nanos::ZERO, spawn: |_, _| Ok(()) },
        polling: Polling::Sleep,
        values: ValueGenerator::new(config.seed, config.value_sizes.max_bytes()),
        keys: KeySpace::new(Shard::WHOLE, config.keys, 1),
        workers: 1,
        issued_ops: AtomicU64::new(0),
        completed_ops: AtomicU64::new(0),
        config,
    }
}
