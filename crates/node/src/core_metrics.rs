//! Counters of one core that all cores can read: the monitor's input.
//!
//! ```text
//!   core, by its MetricsWriter: started, executed, completed, offloaded, … ──▶ SharedCoreMetrics (plain stores)
//!       ──▶ monitor: a CoreMetricsSnapshot now and one an interval ago
//! ```
//! In: events of the core's reactor. Out: sums since the start. One core writes a [`SharedCoreMetrics`], any core
//! reads it; a reader may see one counter slightly older than another.
//!
//! # Waiting behind other tenants
//! OctoFAS compares a tenant's response time with its response time when alone, which is not measurable while other
//! tenants are active. The node measures instead the time that the core works for other tenants while a request is in
//! the node, from the start of the iteration that received it to its completion, and counts it as waiting, up to the
//! whole latency. Not included: the time that bytes wait in the kernel for the next iteration, and the time that a
//! device is busy for others.

use octokv_base::Nanos;
use octokv_runtime::{CpuTime, CpuTimeReader, Stage};
use octokv_sched::metrics::StageTimes;
use octokv_sched::{CoreId, TenantId};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A sum that one core adds to and all cores read.
#[derive(Default)]
struct Counter(AtomicU64);

impl Counter {
    #[inline]
    fn add(&self, value: u64) {
        // A single writer needs no read-modify-write.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
    }
    /// Pairs with [`Counter::read_acquire`]: a reader of this value also sees earlier additions to other counters
    /// before.
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

/// Counters of one core, in cache lines of their own: cores that write beside each other would take the line from each other
/// several times per group of requests.
#[repr(align(64))]
pub struct SharedCoreMetrics {
    cpu_time: OnceLock<CpuTimeReader>,
    /// Time it worked for any tenant.
    cpu_ns: Counter,
    executed_locally: Counter,
    offloaded_to: Box<[Counter]>,
    executed_for: Box<[Counter]>,
    tenants: Box<[SharedTenantMetrics]>,
}

/// One core's counters of one tenant at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantMetricsSnapshot {
    /// Requests received on its connections.
    pub started: u64,
    /// Requests of its connections completed, whichever core executed them.
    pub completed: u64,
    /// Bytes received and sent on its connections.
    pub bytes: u64,
    /// Sum of the latencies of completed requests.
    pub latency_total: Nanos,
    /// Part of that latency in which the core worked for other tenants.
    pub wait_total: Nanos,
    /// Time that the core worked for it.
    pub cpu_time: Nanos,
    /// Network round trip last measured; zero if none was.
    pub round_trip: Nanos,
    /// Requests that waited here in a queue of the scheduler.
    pub queued: u64,
    /// The ones among them that waited for other tenants and not for a limit.
    pub backlogged: u64,
    /// Cost charged by the fair queue for requests started here.
    pub charged: Nanos,
}

/// One core's counters at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreMetricsSnapshot {
    /// Time by stage.
    pub stage_times: StageTimes,
    /// Requests of its own connections executed here.
    pub executed_locally: u64,
    /// By core: requests offloaded to it.
    pub offloaded_to: Vec<u64>,
    /// By core: requests executed for it.
    pub executed_for: Vec<u64>,
    /// By tenant number.
    pub tenants: Vec<TenantMetricsSnapshot>,
}

impl SharedCoreMetrics {
    /// Zeroed counters of one of `cores` cores, for `tenants` tenants.
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

    /// Time that the core has worked for other tenants.
    fn other_tenants_ns(&self, tenant: TenantId) -> u64 {
        // Read in the reverse order of the writes: a concurrent addition makes the result too small, never too large.
        let all = self.cpu_ns.read_acquire();
        all.saturating_sub(self.tenants[tenant.0 as usize].cpu_ns.read())
    }

    /// Reads all counters.
    pub fn snapshot(&self) -> CoreMetricsSnapshot {
        let spent = self.cpu_time.get().map(CpuTimeReader::stage_times).unwrap_or_default();
        let sums = |sums: &[Counter]| sums.iter().map(Counter::read).collect();
        let tenant = |tenant: &SharedTenantMetrics| TenantMetricsSnapshot {
            started: tenant.started.read(),
            completed: tenant.completed.read(),
            bytes: tenant.bytes.read(),
            latency_total: Nanos(tenant.latency_ns.read()),
            wait_total: Nanos(tenant.waited_ns.read()),
            cpu_time: Nanos(tenant.cpu_ns.read()),
            round_trip: Nanos(tenant.round_trip_ns.read()),
            queued: tenant.queued.read(),
            backlogged: tenant.backlogged.read(),
            charged: Nanos(tenant.charged_ns.read()),
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

/// Arrival time of a request, and how long its core had worked for other tenants then, less the wait on other cores.
/// Arithmetic wraps, since only differences count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTiming {
    started_at: Nanos,
    other_tenants_ns: u64,
}

/// The core's private copy of a tenant's time.
#[derive(Clone, Copy, Debug, Default)]
struct TenantCpuTime {
    cpu_time: Nanos,
    /// Value at the start of the last iteration that worked for the tenant.
    cpu_time_before: Nanos,
    iteration: u64,
}

/// One core's writer of its own [`SharedCoreMetrics`].
pub struct MetricsWriter {
    all_cores: Arc<[SharedCoreMetrics]>,
    core: CoreId,
    iteration: Cell<u64>,
    /// Start of the iteration; the core's time for all tenants at that time, and now.
    iteration_start: Cell<Nanos>,
    cpu_time_total_before: Cell<Nanos>,
    cpu_time_total: Cell<Nanos>,
    tenant_cpu_times: RefCell<Box<[TenantCpuTime]>>,
}

impl MetricsWriter {
    /// The writer of `core`'s entry of `all_cores`; `cpu_time` accounts its stages.
    pub fn new(all_cores: Arc<[SharedCoreMetrics]>, core: CoreId, cpu_time: &CpuTime) -> MetricsWriter {
        // A restarted core, as in a simulation, continues its counters.
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

    /// Begins an iteration at `now`.
    pub fn begin_iteration(&self, now: Nanos) {
        self.iteration_start.set(now);
        self.iteration.set(self.iteration.get() + 1);
        self.cpu_time_total_before.set(self.cpu_time_total.get());
    }

    /// Adds time that the core worked for a tenant.
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

    /// Counts `requests` received from a tenant in this iteration and returns the timing of each.
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

    /// Time that the core has worked for other tenants.
    fn other_tenants_time(&self, tenant: TenantId) -> Nanos {
        self.cpu_time_total.get().since(self.tenant_cpu_times.borrow()[tenant.0 as usize].cpu_time)
    }

    /// A batch of completions of one tenant at `now`; dropping it adds its sums to the counters.
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

    /// Counts one completion at `now`.
    #[inline]
    pub fn record_completed(&self, tenant: TenantId, timing: RequestTiming, now: Nanos) {
        self.completion_batch(tenant, now).add(timing);
    }

    /// Adds bytes received or sent.
    pub fn add_bytes(&self, tenant: TenantId, bytes: usize) {
        self.metrics().tenants[tenant.0 as usize].bytes.add(bytes as u64);
    }

    /// Sets the measured network round trip.
    pub fn set_round_trip(&self, tenant: TenantId, round_trip: Nanos) {
        self.metrics().tenants[tenant.0 as usize].round_trip_ns.set(round_trip.0);
    }

    /// Counts requests of this core's connections that run here.
    #[inline]
    pub fn record_executed_locally(&self, requests: u64) {
        self.metrics().executed_locally.add(requests);
    }

    /// Counts a request offloaded to core `to`.
    pub fn record_offloaded_to(&self, to: CoreId) {
        self.metrics().offloaded_to[to.index()].add(1);
    }

    /// Counts a request that waits in a queue of the scheduler.
    pub fn record_queued(&self, tenant: TenantId) {
        self.metrics().tenants[tenant.0 as usize].queued.add(1);
    }

    /// Counts a queued request that waits for other tenants and not for a limit.
    pub fn record_backlogged(&self, tenant: TenantId) {
        self.metrics().tenants[tenant.0 as usize].backlogged.add(1);
    }

    /// Adds the cost that the fair queue charged for a request.
    pub fn record_charged(&self, tenant: TenantId, charged_ns: u64) {
        self.metrics().tenants[tenant.0 as usize].charged_ns.add(charged_ns);
    }

    /// Counts a request executed for another core.
    pub fn record_executed_for(&self, home_core: CoreId) {
        self.metrics().executed_for[home_core.index()].add(1);
    }

    /// Timing of a request that moves to core `to`, before or after its execution: from then on that core's work for
    /// other tenants is its wait, and this core's is not.
    pub fn transfer_timing(&self, to: CoreId, tenant: TenantId, timing: RequestTiming) -> RequestTiming {
        let waited = self.other_tenants_time(tenant).0.wrapping_sub(timing.other_tenants_ns);
        RequestTiming {
            other_tenants_ns: self.all_cores[to.index()].other_tenants_ns(tenant).wrapping_sub(waited),
            ..timing
        }
    }
}

/// Completions of one tenant at one time; the core does no other work while it exists.
pub struct CompletionBatch<'a> {
    metrics: &'a SharedTenantMetrics,
    now: Nanos,
    other_tenants_ns: u64,
    count: u64,
    latency_ns: u64,
    waited_ns: u64,
}

impl CompletionBatch<'_> {
    /// Adds one completion.
    #[inline]
    pub fn add(&mut self, timing: RequestTiming) {
        self.add_many(timing, 1);
    }

    /// Adds `count` completions of requests that started together.
    #[inline]
    pub fn add_many(&mut self, timing: RequestTiming, count: u64) {
        let latency = self.now.since(timing.started_at).0;
        self.count += count;
        self.latency_ns += latency * count;
        // A counter of another core may be read slightly late: then the difference is slightly negative.
        let waited = self.other_tenants_ns.wrapping_sub(timing.other_tenants_ns);
        self.waited_ns += if waited >> 63 == 0 { waited.min(latency) * count } else { 0 };
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
        let (all_cores, writers) = writers(1);
        let writer = &writers[0];
        writer.begin_iteration(Nanos(1_000));
        writer.add_cpu_time(B, Nanos(100));
        // The work for B in this iteration came first.
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
        // Work for its own tenant is no wait, in the same iteration and before.
        writer.begin_iteration(Nanos(3_000));
        writer.add_cpu_time(A, Nanos(500));
        let timing = writer.record_started(A, 1);
        writer.add_cpu_time(A, Nanos(400));
        writer.record_completed(A, timing, Nanos(4_000));
        assert_eq!(all_cores[0].snapshot().tenants[A.0 as usize].wait_total, want.wait_total);
    }

    #[test]
    fn wait_time_is_at_most_the_latency() {
        let (all_cores, writers) = writers(1);
        writers[0].begin_iteration(Nanos(10));
        let timing = writers[0].record_started(A, 1);
        writers[0].add_cpu_time(B, Nanos(900));
        writers[0].record_completed(A, timing, Nanos(15));
        let snapshot = all_cores[0].snapshot().tenants[A.0 as usize];
        assert_eq!((snapshot.latency_total, snapshot.wait_total), (Nanos(5), Nanos(5)));
    }

    #[test]
    fn wait_time_of_an_offloaded_request_covers_both_cores_and_the_transfer() {
        let (all_cores, writers) = writers(2);
        let (home, away) = (&writers[0], &writers[1]);
        away.add_cpu_time(B, Nanos(77));
        home.begin_iteration(Nanos(100));
        let timing = home.record_started(A, 1);
        home.add_cpu_time(B, Nanos(5));
        home.record_offloaded_to(CoreId(1));
        let timing = home.transfer_timing(CoreId(1), A, timing);
        home.add_cpu_time(B, Nanos(1_000));
        // While it is in transit the receiving core works for others; work for its own tenant is no wait.
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
        assert_eq!(other.tenants[1].completed, 0, "the connection's core counts the completion");
    }

    #[test]
    fn a_restarted_core_continues_its_counters() {
        let (all_cores, writers) = writers(2);
        writers[0].add_cpu_time(B, Nanos(1_000));
        let again = MetricsWriter::new(Arc::clone(&all_cores), CoreId(0), &CpuTime::simulated());
        again.begin_iteration(Nanos(10));
        let timing = again.record_started(A, 1);
        again.add_cpu_time(B, Nanos(7));
        let timing = writers[1].transfer_timing(CoreId(0), A, again.transfer_timing(CoreId(1), A, timing));
        again.record_completed(A, timing, Nanos(90));
        assert_eq!(all_cores[0].snapshot().tenants[1].wait_total, Nanos(7));
    }
}
