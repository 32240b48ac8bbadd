//! Accounting of a core: the one place that reads its processor time and writes its metrics.
//!
//! In: the ends of stages, with the tenant they belong to. Out: the time they took; the metrics that the monitor sums; the
//! policy decisions that follow from them. Invariant: every nanosecond of an iteration ends in exactly one stage, and at
//! most one tenant.

use crate::connection_io::ConnectionIo;
use crate::core_metrics::MetricsWriter;
use crate::monitor::{IntervalReport, Monitor, MonitorDuty};
use octokv_base::Nanos;
use octokv_runtime::{CpuTime, ReactorHandle, Sockets, Stage};
use octokv_sched::{CoreId, TenantId};
use std::cell::Cell;
use std::sync::Arc;

/// Connections whose network round trip is sampled per interval.
const RTT_SAMPLES_PER_INTERVAL: usize = 32;

/// Simulated time of a request, under a simulated clock; ignored on a real core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedCosts {
    /// To receive, parse and complete a request, on its connection's core.
    pub target: Nanos,
    /// To execute it, on the executing core.
    pub kv: Nanos,
    /// To submit and complete its device operations, on the executing core.
    pub device: Nanos,
}

/// Accounting of the commands of one connection that are executed at once, in groups.
pub(super) struct GroupAccounting<'a> {
    pub accounting: &'a Accounting,
    pub tenant: TenantId,
    /// When the iteration began.
    pub now: Nanos,
    /// Time in which the current group was parsed.
    pub parse_time: Cell<Nanos>,
    /// Time of the groups so far, for the budget of the connection.
    pub time: &'a Cell<Nanos>,
    /// Commands of the groups so far, and bytes of their data.
    pub executed: &'a Cell<(u64, u64)>,
}

impl GroupAccounting<'_> {
    /// Ends the stage in which a group was parsed. [`GroupAccounting::end_group`] charges its time.
    pub fn begin_group(&self) {
        let parse_time = self.accounting.end_stage(Stage::Target, true);
        self.parse_time.set(parse_time);
    }

    /// Ends the stage in which `commands` commands of a group, with `bytes` bytes of data, were executed and answered.
    pub fn end_group(&self, commands: usize, bytes: u64) {
        if commands > 0 {
            let (commands_before, bytes_before) = self.executed.get();
            self.executed.set((commands_before + commands as u64, bytes_before + bytes));
            self.accounting.advance_simulated(commands);
            let metrics = &self.accounting.metrics;
            let count = commands as u64;
            let timing = metrics.record_started(self.tenant, count);
            metrics.record_executed_locally(count);
            let ended = self.now + self.accounting.iteration_elapsed();
            metrics.completion_batch(self.tenant, ended).add_many(timing, count);
        }
        let time = self.parse_time.take() + self.accounting.end_stage(Stage::Kv, true);
        self.accounting.charge(self.tenant, time);
        self.time.set(self.time.get() + time);
    }
}

/// See the module header.
pub(super) struct Accounting {
    handle: ReactorHandle,
    pub metrics: MetricsWriter,
    pub monitor: Arc<Monitor>,
    costs: SimulatedCosts,
    core: CoreId,
    /// Number of the last interval applied.
    pub last_interval: u64,
    /// Connection from which the next round-trip sample starts.
    next_rtt_sample: usize,
    /// When this core must end the current interval, if it must.
    interval_ends: Nanos,
}

impl Accounting {
    /// The accounting of core `core`, whose clock is that of `handle`.
    pub fn new(
        core: CoreId,
        handle: ReactorHandle,
        monitor: Arc<Monitor>,
        costs: SimulatedCosts,
    ) -> Accounting {
        let metrics = MetricsWriter::new(Arc::clone(monitor.core_metrics()), core, handle.cpu_time());
        Accounting {
            handle,
            metrics,
            monitor,
            costs,
            core,
            last_interval: 0,
            next_rtt_sample: 0,
            interval_ends: Nanos::NEVER,
        }
    }

    fn cpu_time(&self) -> &CpuTime {
        self.handle.cpu_time()
    }

    /// Begins an iteration. Time since the last one, perhaps asleep, belongs to no tenant.
    pub fn begin_iteration(&self, now: Nanos) {
        self.cpu_time().end_stage(Stage::Idle, false);
        self.cpu_time().begin_iteration();
        self.metrics.begin_iteration(now);
    }

    /// Ends a stage that belongs to no tenant, or to one that is charged later, and gives its time.
    pub fn end_stage(&self, stage: Stage, worked: bool) -> Nanos {
        self.cpu_time().end_stage(stage, worked)
    }

    /// Time of the current stage so far.
    pub fn stage_elapsed(&self) -> Nanos {
        self.cpu_time().stage_elapsed()
    }

    /// Time since the iteration began.
    pub fn iteration_elapsed(&self) -> Nanos {
        self.cpu_time().iteration_elapsed()
    }

    /// Ends the stage in which `requests` requests were received and parsed, and gives its time.
    pub fn end_ingress(&self, requests: usize, worked: bool) -> Nanos {
        self.cpu_time().advance_simulated(Stage::Target, self.costs.target.times(requests));
        self.end_stage(Stage::Target, worked)
    }

    /// Adds the simulated time of whole requests.
    fn advance_simulated(&self, requests: usize) {
        let SimulatedCosts { target, kv, device } = self.costs;
        for (stage, cost) in [(Stage::Target, target), (Stage::Kv, kv), (Stage::Device, device)] {
            self.cpu_time().advance_simulated(stage, cost.times(requests));
        }
    }

    /// Charges a tenant for time.
    pub fn charge(&self, tenant: TenantId, time: Nanos) {
        self.metrics.add_cpu_time(tenant, time);
    }

    /// Checks whether a sampling interval has ended or this core must end it. Gives the report of an interval that was not
    /// applied yet; `wake` wakes another core that has to end one.
    pub fn check_interval(&mut self, now: Nanos, wake: impl FnOnce(usize)) -> Option<Arc<IntervalReport>> {
        self.interval_ends = match self.monitor.poll(self.core.index(), now) {
            MonitorDuty::Nothing => Nanos::NEVER,
            MonitorDuty::EndIntervalAt(ends) => ends,
            MonitorDuty::WakeNext(next) => {
                wake(next);
                Nanos::NEVER
            }
        };
        if self.monitor.interval_count() == self.last_interval {
            return None;
        }
        let interval = self.monitor.last_interval()?;
        self.last_interval = interval.number;
        Some(interval)
    }

    /// Samples round trips of some connections for the next decision.
    #[cold]
    pub fn sample_round_trips(&mut self, sockets: &impl Sockets, connections: &[Option<ConnectionIo>]) {
        // One system call each, so only a few per interval.
        let (count, from) = (connections.len(), self.next_rtt_sample);
        self.next_rtt_sample = (from + RTT_SAMPLES_PER_INTERVAL).checked_rem(count).unwrap_or(0);
        for io in connections.iter().cycle().skip(from).take(count.min(RTT_SAMPLES_PER_INTERVAL)).flatten() {
            if let Some(tenant) = io.tenant
                && let Some(round_trip) = sockets.round_trip_time(io.socket)
            {
                self.metrics.set_round_trip(tenant, round_trip);
            }
        }
    }

    /// When this core must end the current interval, if it must.
    pub fn next_deadline(&self) -> Nanos {
        self.interval_ends
    }
}
