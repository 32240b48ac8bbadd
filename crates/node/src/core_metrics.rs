//! What a core has done, in figures that every core can read: the monitor's source.
//!
//! ```text
//!   core, by its Tally: begun, worked, answered, moved, … ──▶ Board, plain stores ──▶ monitor: Seen, now and a window ago
//! ```
//! In: what the core's reactor says as it happens. Out: sums since the start. One core writes a [`SharedCoreMetrics`], any reads it;
//! readers may see one figure a little before another.
//!
//! # Waiting behind other flows
//! OctoFAS compares a flow's response time with what it would be alone, which cannot be measured while it is not. What
//! can be measured is how long its core worked for others while a request of it was in the node: from the begin of
//! the turn in which it was received to its answer. That is taken for its wait behind other flows, up to the whole
//! time. What it leaves out: bytes that wait in the kernel for the next turn, and a device that works for others.

use octokv_base::Nanos;
use octokv_runtime::{CpuTime, CpuTimeReader, Stage};
use octokv_sched::metrics::StageTimes;
use octokv_sched::{CoreId, TenantId};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A sum that one core adds to and all read.
#[derive(Default)]
struct Counter(AtomicU64);

impl Counter {
    #[inline]
    fn add(&self, value: u64) {
        // One writer: no read-modify-write needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
    }
    /// What was added to others before is seen by who sees this by [`Counter::read_first`].
    fn add_release(&self, value: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(value), Ordering::Release);
    }
    fn read_acquire(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct SharedTenantMetrics {
    started: Counter,
    completed: Counter,
    bytes: Counter,
    latency_ns: Counter,
    waited_ns: Counter,
    cpu_ns: Counter,
    round_trip_ns: Counter,
    queued: Counter,
    backlogged: Counter,
    charged_ns: Counter,
}

/// One core's figures.
pub struct SharedCoreMetrics {
    cpu_time: OnceLock<CpuTimeReader>,
    /// How long it worked for all flows.
    cpu_ns: Counter,
    executed_locally: Counter,
    offloaded_to: Box<[Counter]>,
    executed_for: Box<[Counter]>,
    tenants: Box<[SharedTenantMetrics]>,
}

/// What a core had done of one flow's at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantMetricsSnapshot {
    /// Requests that came over its connections.
    pub started: u64,
    /// Those of them that were answered.
    pub completed: u64,
    /// Bytes of its connections, both ways.
    pub bytes: u64,
    /// The sum of the answered requests' times in the node.
    pub latency_total: Nanos,
    /// How much of that the core worked for others.
    pub wait_total: Nanos,
    /// How long the core worked for it.
    pub cpu_time: Nanos,
    /// The network's round trip as the core last heard of it; nothing where it has not.
    pub round_trip: Nanos,
    /// Requests that waited here for their turn among tenants.
    pub queued: u64,
    /// Those of them that waited for others, and not for a limit.
    pub backlogged: u64,
    /// What the fair queue charged for those that it let begin here.
    pub charged: Nanos,
}

/// What a core had done at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreMetricsSnapshot {
    /// Its time.
    pub stage_times: StageTimes,
    /// Requests of its own connections that ran here.
    pub executed_locally: u64,
    /// By core, that it sent there.
    pub offloaded_to: Vec<u64>,
    /// By core, that it ran for others.
    pub executed_for: Vec<u64>,
    /// By flow.
    pub tenants: Vec<TenantMetricsSnapshot>,
}

impl SharedCoreMetrics {
    /// The figures of one of `cores` cores, with so many flows.
    pub fn new(cores: usize, tenants: u32) -> SharedCoreMetrics {
        let sums = || (0..cores).map(|_| Counter::default()).collect();
        SharedCoreMetrics {
            cpu_time: OnceLock::new(),
            cpu_ns: Counter::default(),
            executed_locally: Counter::default(),
            offloaded_to: sums(),
            executed_for: sums(),
            tenants: (0..tenants).map(|_| SharedTenantMetrics::default()).collect(),
        }
    }

    /// How long the core has worked for others than a flow.
    fn other_tenants_ns(&self, tenant: TenantId) -> u64 {
        // The other way round than they are written: what is added meanwhile makes it too little and not too much.
        let all = self.cpu_ns.read_acquire();
        all.saturating_sub(self.tenants[tenant.0 as usize].cpu_ns.read())
    }

    /// All of them, now.
    pub fn snapshot(&self) -> CoreMetricsSnapshot {
        let spent = self.cpu_time.get().map(CpuTimeReader::stage_times).unwrap_or_default();
        let sums = |sums: &[Counter]| sums.iter().map(Counter::read).collect();
        let tenant = |flow: &SharedTenantMetrics| TenantMetricsSnapshot {
            started: flow.started.read(),
            completed: flow.completed.read(),
            bytes: flow.bytes.read(),
            latency_total: Nanos(flow.latency_ns.read()),
            wait_total: Nanos(flow.waited_ns.read()),
            cpu_time: Nanos(flow.cpu_ns.read()),
            round_trip: Nanos(flow.round_trip_ns.read()),
            queued: flow.queued.read(),
            backlogged: flow.backlogged.read(),
            charged: Nanos(flow.charged_ns.read()),
        };
        CoreMetricsSnapshot {
            stage_times: StageTimes {
                target: spent[Stage::Target as usize],
                kv: spent[Stage::Kv as usize],
                device: spent[Stage::Device as usize],
            },
            executed_locally: self.executed_locally.read(),
            offloaded_to: sums(&self.offloaded_to),
            executed_for: sums(&self.executed_for),
            tenants: self.tenants.iter().map(tenant).collect(),
        }
    }
}

/// When a request came, and how long the core that it is on, or on the way to, had worked for others when that began, less what
/// it has waited behind others elsewhere: wrapping, since only differences count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTiming {
    started_at: Nanos,
    other_tenants_ns: u64,
}

/// What the core itself remembers of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct TenantCpuTime {
    cpu_time: Nanos,
    /// As it was at the begin of the last turn that worked for it.
    cpu_time_before: Nanos,
    iteration: u64,
}

/// A core's pen on its own [`SharedCoreMetrics`].
pub struct MetricsWriter {
    all_cores: Arc<[SharedCoreMetrics]>,
    core: CoreId,
    iteration: Cell<u64>,
    /// The turn's begin, and how long the core had worked for all flows then, and has now.
    iteration_start: Cell<Nanos>,
    cpu_time_total_before: Cell<Nanos>,
    cpu_time_total: Cell<Nanos>,
    tenant_cpu_times: RefCell<Box<[TenantCpuTime]>>,
}

impl MetricsWriter {
    /// The pen of one of the cores that `boards` are of; `busy` is its account of time.
    pub fn new(all_cores: Arc<[SharedCoreMetrics]>, core: CoreId, cpu_time: &CpuTime) -> MetricsWriter {
        // A core that starts again, as in a simulation, goes on with what is there.
        let metrics = &all_cores[core.index()];
        let _ = metrics.cpu_time.set(cpu_time.reader());
        let tenant_cpu_time = |tenant: &SharedTenantMetrics| TenantCpuTime {
            cpu_time: Nanos(tenant.cpu_ns.read()),
            ..TenantCpuTime::default()
        };
        let tenant_cpu_times: Box<[TenantCpuTime]> = metrics.tenants.iter().map(tenant_cpu_time).collect();
        let cpu_time_total = Nanos(metrics.cpu_ns.read());
        MetricsWriter {
            all_cores,
            core,
            iteration: Cell::new(1),
            iteration_start: Cell::new(Nanos::ZERO),
            cpu_time_total_before: Cell::new(cpu_time_total),
            cpu_time_total: Cell::new(cpu_time_total),
            tenant_cpu_times: RefCell::new(tenant_cpu_times),
        }
    }

    fn metrics(&self) -> &SharedCoreMetrics {
        &self.all_cores[self.core.index()]
    }

    /// A turn begins.
    pub fn begin_iteration(&self, now: Nanos) {
        self.iteration_start.set(now);
        self.iteration.set(self.iteration.get() + 1);
        self.cpu_time_total_before.set(self.cpu_time_total.get());
    }

    /// The core has worked for a flow.
    #[inline]
    pub fn add_cpu_time(&self, tenant: TenantId, span: Nanos) {
        let tenant_cpu = &mut self.tenant_cpu_times.borrow_mut()[tenant.0 as usize];
        if tenant_cpu.iteration != self.iteration.get() {
            tenant_cpu.iteration = self.iteration.get();
            tenant_cpu.cpu_time_before = tenant_cpu.cpu_time;
        }
        tenant_cpu.cpu_time = tenant_cpu.cpu_time + span;
        self.cpu_time_total.set(self.cpu_time_total.get() + span);
        self.metrics().tenants[tenant.0 as usize].cpu_ns.add(span.0);
        self.metrics().cpu_ns.add_release(span.0);
    }

    /// So many requests of a flow came in this turn: the stamp of each.
    #[inline]
    pub fn record_started(&self, tenant: TenantId, requests: u64) -> RequestTiming {
        self.metrics().tenants[tenant.0 as usize].started.add(requests);
        let tenant_cpu = self.tenant_cpu_times.borrow()[tenant.0 as usize];
        let before = if tenant_cpu.iteration == self.iteration.get() {
            tenant_cpu.cpu_time_before
        } else {
            tenant_cpu.cpu_time
        };
        RequestTiming {
            started_at: self.iteration_start.get(),
            other_tenants_ns: self.cpu_time_total_before.get().since(before).0,
        }
    }

    /// How long the core has worked for others than a flow.
    fn other_tenants_time(&self, tenant: TenantId) -> Nanos {
        self.cpu_time_total.get().since(self.tenant_cpu_times.borrow()[tenant.0 as usize].cpu_time)
    }

    /// Requests of a flow are answered, at `now`: what [`CompletionBatch`] counts is added when it is dropped.
    #[inline]
    pub fn completion_batch(&self, tenant: TenantId, now: Nanos) -> CompletionBatch<'_> {
        let metrics = &self.metrics().tenants[tenant.0 as usize];
        CompletionBatch {
            metrics,
            now,
            other_tenants_ns: self.other_tenants_time(tenant).0,
            count: 0,
            latency_ns: 0,
            waited_ns: 0,
        }
    }

    /// A request of a flow is answered, at `now`.
    #[inline]
    pub fn record_completed(&self, tenant: TenantId, timing: RequestTiming, now: Nanos) {
        self.completion_batch(tenant, now).add(timing);
    }

    /// So many bytes went over a flow's connections.
    pub fn add_bytes(&self, tenant: TenantId, bytes: usize) {
        self.metrics().tenants[tenant.0 as usize].bytes.add(bytes as u64);
    }

    /// The network's round trip of a flow.
    pub fn set_round_trip(&self, tenant: TenantId, round_trip: Nanos) {
        self.metrics().tenants[tenant.0 as usize].round_trip_ns.set(round_trip.0);
    }

    /// So many requests of this core's connections run here.
    #[inline]
    pub fn record_executed_locally(&self, requests: u64) {
        self.metrics().executed_locally.add(requests);
    }

    /// A request of this core's connections is sent to another core.
    pub fn record_offloaded_to(&self, to: CoreId) {
        self.metrics().offloaded_to[to.index()].add(1);
    }

    /// A request of a flow waits for its turn among tenants.
    pub fn record_queued(&self, tenant: TenantId) {
        self.metrics().tenants[tenant.0 as usize].queued.add(1);
    }

    /// It waits for others, and not for a limit.
    pub fn record_backlogged(&self, tenant: TenantId) {
        self.metrics().tenants[tenant.0 as usize].backlogged.add(1);
    }

    /// The fair queue let a request begin, and charged so much for it.
    pub fn record_charged(&self, tenant: TenantId, charged_ns: u64) {
        self.metrics().tenants[tenant.0 as usize].charged_ns.add(charged_ns);
    }

    /// A request of another core's ran here.
    pub fn record_executed_for(&self, home_core: CoreId) {
        self.metrics().executed_for[home_core.index()].add(1);
    }

    /// The stamp of a request that leaves this core for another, to run there or when it has: from now on what that core does
    /// for others is its wait, and what this one does is not.
    pub fn transfer_timing(&self, to: CoreId, tenant: TenantId, timing: RequestTiming) -> RequestTiming {
        let waited = self.other_tenants_time(tenant).0.wrapping_sub(timing.other_tenants_ns);
        RequestTiming {
            other_tenants_ns: self.all_cores[to.index()].other_tenants_ns(tenant).wrapping_sub(waited),
            ..timing
        }
    }
}

/// Requests of one flow that are answered at one time. Nothing is worked meanwhile.
pub struct CompletionBatch<'a> {
    metrics: &'a SharedTenantMetrics,
    now: Nanos,
    other_tenants_ns: u64,
    count: u64,
    latency_ns: u64,
    waited_ns: u64,
}

impl CompletionBatch<'_> {
    /// One more.
    #[inline]
    pub fn add(&mut self, timing: RequestTiming) {
        let latency = self.now.since(timing.started_at).0;
        self.count += 1;
        self.latency_ns += latency;
        // A figure of another core may have been read a moment late: then it is a little less than nothing.
        let waited = self.other_tenants_ns.wrapping_sub(timing.other_tenants_ns);
        self.waited_ns += if waited >> 63 == 0 { waited.min(latency) } else { 0 };
    }
}

impl Drop for CompletionBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        self.metrics.completed.add(self.count);
        self.metrics.latency_ns.add(self.latency_ns);
        self.metrics.waited_ns.add(self.waited_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn writers(cores: usize) -> (Arc<[SharedCoreMetrics]>, Vec<MetricsWriter>) {
        let all_cores: Arc<[SharedCoreMetrics]> =
            (0..cores).map(|_| SharedCoreMetrics::new(cores, 4)).collect();
        let writer = |core| {
            MetricsWriter::new(Arc::clone(&all_cores), CoreId::from_index(core), &CpuTime::simulated())
        };
        let writers = (0..cores).map(writer).collect();
        (all_cores, writers)
    }

    #[test]
    fn wait_time_is_what_the_core_works_for_other_tenants_meanwhile() {
        let (all_cores, tallies) = writers(1);
        let writer = &tallies[0];
        writer.begin_iteration(Nanos(1_000));
        writer.add_cpu_time(B, Nanos(100));
        // What was done for B in this turn came first.
        let timing = writer.record_started(A, 1);
        writer.add_cpu_time(A, Nanos(30));
        writer.begin_iteration(Nanos(2_000));
        writer.add_cpu_time(B, Nanos(7));
        writer.add_cpu_time(A, Nanos(20));
        writer.record_completed(A, timing, Nanos(2_050));
        let snapshot = all_cores[0].snapshot();
        let want = TenantMetricsSnapshot {
            started: 1,
            completed: 1,
            latency_total: Nanos(1_050),
            wait_total: Nanos(107),
            cpu_time: Nanos(50),
            ..TenantMetricsSnapshot::default()
        };
        assert_eq!(snapshot.tenants[A.0 as usize], want);
        // What is its own flow's is no wait, in the same turn and before.
        writer.begin_iteration(Nanos(3_000));
        writer.add_cpu_time(A, Nanos(500));
        let timing = writer.record_started(A, 1);
        writer.add_cpu_time(A, Nanos(400));
        writer.record_completed(A, timing, Nanos(4_000));
        assert_eq!(all_cores[0].snapshot().tenants[A.0 as usize].wait_total, want.wait_total);
    }

    #[test]
    fn wait_time_is_at_most_the_latency() {
        let (all_cores, tallies) = writers(1);
        tallies[0].begin_iteration(Nanos(10));
        let timing = tallies[0].record_started(A, 1);
        tallies[0].add_cpu_time(B, Nanos(900));
        tallies[0].record_completed(A, timing, Nanos(15));
        let snapshot = all_cores[0].snapshot().tenants[A.0 as usize];
        assert_eq!((snapshot.latency_total, snapshot.wait_total), (Nanos(5), Nanos(5)));
    }

    #[test]
    fn wait_time_of_an_offloaded_request_covers_both_cores_and_the_transfer() {
        let (all_cores, tallies) = writers(2);
        let (home, away) = (&tallies[0], &tallies[1]);
        away.add_cpu_time(B, Nanos(77));
        home.begin_iteration(Nanos(100));
        let timing = home.record_started(A, 1);
        home.add_cpu_time(B, Nanos(5));
        home.record_offloaded_to(CoreId(1));
        let timing = home.transfer_timing(CoreId(1), A, timing);
        home.add_cpu_time(B, Nanos(1_000));
        // It is on its way, and the core that it goes to is at others' work; what is its own flow's is no wait.
        away.add_cpu_time(B, Nanos(300));
        away.add_cpu_time(A, Nanos(60));
        away.add_cpu_time(B, Nanos(40));
        away.add_cpu_time(A, Nanos(10));
        away.record_executed_for(CoreId(0));
        let timing = away.transfer_timing(CoreId(0), A, timing);
        away.add_cpu_time(B, Nanos(1_000));
        home.add_cpu_time(B, Nanos(2));
        home.record_completed(A, timing, Nanos(700));
        let (one, other) = (all_cores[0].snapshot(), all_cores[1].snapshot());
        assert_eq!((one.tenants[1].wait_total, one.tenants[1].latency_total), (Nanos(347), Nanos(600)));
        assert_eq!((one.offloaded_to, other.executed_for), (vec![0, 1], vec![1, 0]));
        assert_eq!(other.tenants[1].completed, 0, "it is the connection's core that answers");
    }

    #[test]
    fn a_restarted_core_continues_its_counters() {
        let (all_cores, tallies) = writers(2);
        tallies[0].add_cpu_time(B, Nanos(1_000));
        let again = MetricsWriter::new(Arc::clone(&all_cores), CoreId(0), &CpuTime::simulated());
        again.begin_iteration(Nanos(10));
        let timing = again.record_started(A, 1);
        again.add_cpu_time(B, Nanos(7));
        let timing = tallies[1].transfer_timing(CoreId(0), A, again.transfer_timing(CoreId(1), A, timing));
        again.record_completed(A, timing, Nanos(90));
        assert_eq!(all_cores[0].snapshot().tenants[1].wait_total, Nanos(7));
    }
}
