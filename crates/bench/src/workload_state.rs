//! What the workers of one workload share: its configuration, its counters, its targets.

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
    pub system_name: &'static str,
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
