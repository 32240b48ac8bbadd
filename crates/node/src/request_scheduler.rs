//! Where a core's requests run, and when: the choices of `octokv_sched`, carried out request by request.
//!
//! ```text
//!   requests of this core's connections ─▶ route ── Move ──▶ mailbox of that core
//!                                            │ Here
//!   requests of other cores ─────────────────┴─▶ keep ─┬──────────────────────────────▶ jobs
//!                                                      ├─▶ Backward: dense flows ─poll─▶ jobs
//!                                                      └─▶ Fair ──────────────────poll─▶ jobs
//! ```
//! In: jobs, the window's choice, the time. Out: jobs that begin here, jobs for other cores. Owned by one core.
//!
//! Invariants: a job leaves by exactly one way, once; one that came from another core is not moved again; no job is
//! held for longer than the policy's bound (`octokv_sched::backward`; under `octokv_sched::fair` its tenant's limit and weight
//! say how long); a flow with too much waiting is not received from, and the others are; where nothing is chosen a
//! request costs one comparison.

use crate::bug_injection::{self, InjectedBug};
use crate::core_metrics::MetricsWriter;
use crate::monitor::IntervalReport;
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::tenants::TENANTS_MAX;
use octokv_base::Nanos;
use octokv_nvmf::{RequestOperation, RequestOutcome};
use octokv_sched::fair_queue::WEIGHT_UNIT;
use octokv_sched::migration_plan::CoreMigrations;
use octokv_sched::{
    ConcurrencyLimit, CoreId, Cost, FairQueue, FairQueueLimits, PolicyAction, RequeueQueue, Router,
    RoutingDecision, SchedConfig, ServiceTicket, TenantId, TenantQos,
};
use std::collections::VecDeque;

/// What the window's choice says of one flow.
#[derive(Clone, Copy, Debug, Default)]
struct TenantAction {
    may_offload: bool,
    requeues: u32,
}

/// The buffers that wait with a request.
fn buffer_bytes(operation: &RequestOperation) -> usize {
    match operation {
        RequestOperation::Store { record, .. } => record.capacity(),
        RequestOperation::Write { data, .. } | RequestOperation::Compare { data, .. } => data.capacity(),
        _ => 0,
    }
}

/// One core's choices.
pub struct RequestScheduler {
    core: CoreId,
    action: PolicyAction,
    rules: Box<[TenantAction]>,
    router: Router,
    requeue_queue: RequeueQueue<PendingRequest>,
    fair_queue: FairQueue<PendingRequest>,
    /// How many of its requests run at a time.
    concurrency_limit: ConcurrencyLimit,
    /// Whether the fair queue knows a flow.
    in_fair_queue: Box<[bool]>,
    /// What it is told of each.
    tenant_limits: Box<[TenantQos]>,
    /// The weights of the last window on this core, of the flows that had any part in it.
    weights: Vec<(TenantId, u32)>,
    /// Of the requests that the fair queue has let run; and which places are free.
    tickets: Vec<Option<ServiceTicket>>,
    free_tickets: Vec<u32>,
    /// What the fair queue had no room for, in the order in which it came; and how many of them are of each flow.
    overflow: VecDeque<PendingRequest>,
    overflow_count: Box<[u32]>,
    /// Bytes of buffers that wait with requests of each flow, and how many may before no more of it is received.
    queued_bytes: Box<[usize]>,
    queued_bytes_max: usize,
    /// Whether requests that go back may be looked at in this turn.
    may_poll_requeue: bool,
    /// How long answers to a flow have been of late, in bytes.
    mean_response_bytes: Box<[u64]>,
    /// Whether requests just begin: nothing is chosen, so nothing waits here.
    is_passthrough: bool,
}

/// What a request costs a core, as a guess: a base for each, and time for its bytes, as they were measured of the hash engine
/// in memory (docs/BENCHMARKS.md, 64 B and 4 KiB).
fn estimate_cost(bytes: u64) -> Cost {
    const BASE_NS: u64 = 1_000;
    const BYTES_PER_NS: u64 = 4;
    Cost { ns: BASE_NS + bytes / BYTES_PER_NS, bytes }
}

impl RequestScheduler {
    /// Of one of `cores` cores, which holds at most so many requests.
    pub fn new(core: CoreId, cores: usize, requests_max: usize, queued_bytes_max: usize) -> RequestScheduler {
        let config = SchedConfig::default();
        let limits = FairQueueLimits {
            tenants_max: TENANTS_MAX,
            requests_max: (requests_max as u32).max(TENANTS_MAX),
            in_flight_max: config.in_flight,
        };
        RequestScheduler {
            core,
            action: PolicyAction::Nothing,
            rules: vec![TenantAction::default(); TENANTS_MAX as usize].into(),
            router: Router::new(cores),
            requeue_queue: RequeueQueue::new(requests_max, config.held_max),
            fair_queue: FairQueue::new(limits),
            concurrency_limit: ConcurrencyLimit::new(config.in_flight),
            in_fair_queue: vec![false; TENANTS_MAX as usize].into(),
            tenant_limits: vec![config.default_qos; TENANTS_MAX as usize].into(),
            weights: Vec::new(),
            tickets: Vec::new(),
            free_tickets: Vec::new(),
            overflow: VecDeque::new(),
            overflow_count: vec![0; TENANTS_MAX as usize].into(),
            queued_bytes: vec![0; TENANTS_MAX as usize].into(),
            queued_bytes_max,
            may_poll_requeue: true,
            mean_response_bytes: vec![0; TENANTS_MAX as usize].into(),
            is_passthrough: true,
        }
    }

    /// A window has ended: what is chosen holds from now on. Where that is something else than before, what waits begins.
    pub fn apply_decision(&mut self, interval: &IntervalReport, queue: &mut RequestQueue, now: Nanos) {
        let decision = &interval.decision;
        for tenant in 0..TENANTS_MAX {
            let rule = decision.rule(TenantId(tenant));
            self.rules[tenant as usize] =
                TenantAction { may_offload: rule.migrates, requeues: rule.requeues };
        }
        self.router.install(decision.core_migrations(self.core).unwrap_or(&CoreMigrations::default()));
        self.requeue_queue.set_held_max(interval.config.held_max);
        self.concurrency_limit.set_max(interval.config.in_flight);
        self.fair_queue.set_in_flight_max(self.concurrency_limit.get());
        if decision.action != self.action {
            let queued_before = queue.len();
            self.release_all(queue);
            self.concurrency_limit.pause();
            if bug_injection::is_injected(InjectedBug::DropQueued) {
                queue.truncate(queued_before);
            }
        }
        self.action = decision.action;
        self.is_passthrough = self.action == PolicyAction::Nothing;
        // A flow that comes later has what is said of nobody, until the next window knows its name.
        let mut tenant_limits = [interval.config.default_qos; TENANTS_MAX as usize];
        for (tenant, host) in &interval.hosts {
            tenant_limits[tenant.0 as usize] = interval.config.qos_of(host);
        }
        for tenant in (0..TENANTS_MAX).filter(|&flow| self.in_fair_queue[flow as usize]) {
            if self.tenant_limits[tenant as usize] != tenant_limits[tenant as usize] {
                self.fair_queue.update_tenant(TenantId(tenant), &tenant_limits[tenant as usize], now);
            }
        }
        self.tenant_limits.copy_from_slice(&tenant_limits);
        self.weights.clear();
        let on_core =
            |(tenant, weights): &(TenantId, Vec<u32>)| Some((*tenant, *weights.get(self.core.index())?));
        self.weights.extend(interval.weights.iter().filter_map(on_core));
        for tenant in 0..TENANTS_MAX {
            if self.in_fair_queue[tenant as usize] {
                self.update_weight(TenantId(tenant));
            }
        }
    }

    /// Gives a flow its weight on this core: the last window's, or that of its settings.
    fn update_weight(&mut self, tenant: TenantId) {
        let own_weight = self.weights.iter().find(|(of, _)| *of == tenant);
        let nominal = self.tenant_limits[tenant.0 as usize].weight * WEIGHT_UNIT;
        self.fair_queue.set_weight(tenant, own_weight.map_or(nominal, |(_, weight)| *weight));
    }

    /// Whether requests just begin, in the order in which they come.
    #[inline]
    pub fn is_passthrough(&self) -> bool {
        self.is_passthrough
    }

    /// A request of one of this core's connections: where it runs.
    pub fn route(&mut self, request: &PendingRequest) -> RoutingDecision {
        if !self.rules[request.tenant.0 as usize].may_offload {
            return RoutingDecision::Local;
        }
        self.router.route()
    }

    /// A request that runs here, now or later.
    pub fn enqueue(
        &mut self,
        request: PendingRequest,
        queue: &mut RequestQueue,
        metrics: &MetricsWriter,
        now: Nanos,
    ) {
        match self.action {
            PolicyAction::Intra | PolicyAction::Hybrid if self.requeue_count(&request) > 0 => {
                // With no room there it is not dense any more for this once.
                let tenant = request.tenant;
                match self.requeue_queue.push(request, now) {
                    Ok(()) => metrics.record_queued(tenant),
                    Err(request) => queue.push(request),
                }
            }
            PolicyAction::Fair => self.enqueue_fair(request, queue, metrics, now),
            PolicyAction::Nothing
            | PolicyAction::Balance(_)
            | PolicyAction::Inter
            | PolicyAction::Intra
            | PolicyAction::Hybrid => {
                queue.push(request);
            }
        }
    }

    /// How often a request goes back: those of other cores do not (OctoFAS Algorithm 2: the poller forwards them).
    fn requeue_count(&self, request: &PendingRequest) -> u32 {
        if request.home_core == self.core { self.rules[request.tenant.0 as usize].requeues } else { 0 }
    }

    fn enqueue_fair(
        &mut self,
        mut request: PendingRequest,
        queue: &mut RequestQueue,
        metrics: &MetricsWriter,
        now: Nanos,
    ) {
        let tenant = request.tenant;
        let cost = estimate_cost(match &request.operation {
            RequestOperation::Store { value_bytes, .. } => u64::from(*value_bytes),
            RequestOperation::Write { data, .. } | RequestOperation::Compare { data, .. } => {
                data.len() as u64
            }
            // As long as those before: a host may name more room than its values need.
            RequestOperation::Retrieve { .. }
            | RequestOperation::List { .. }
            | RequestOperation::Read { .. } => self.mean_response_bytes[tenant.0 as usize],
            RequestOperation::Delete { .. }
            | RequestOperation::Exist { .. }
            | RequestOperation::Flush
            | RequestOperation::WriteZeroes { .. }
            | RequestOperation::Deallocate { .. }
            | RequestOperation::Verify { .. } => 0,
        });
        if !std::mem::replace(&mut self.in_fair_queue[tenant.0 as usize], true) {
            self.fair_queue.add_tenant(tenant, &self.tenant_limits[tenant.0 as usize], now);
            self.update_weight(tenant);
        }
        if let Some(ticket) = self.fair_queue.try_begin(tenant, cost, now) {
            metrics.record_charged(tenant, ticket.cost_ns());
            request.ticket_id = self.store_ticket(ticket);
            queue.push(request);
            return;
        }
        let bytes = buffer_bytes(&request.operation);
        match self.fair_queue.enqueue(tenant, cost, request, now) {
            Ok(()) => {
                metrics.record_queued(tenant);
                if !self.fair_queue.is_throttled(tenant) {
                    metrics.record_backlogged(tenant);
                }
                self.queued_bytes[tenant.0 as usize] += bytes;
            }
            Err(request) => {
                self.overflow_count[tenant.0 as usize] += 1;
                self.overflow.push_back(request);
            }
        }
    }

    /// Lets those begin whose turn it is. Gives whether it did anything.
    pub fn poll(&mut self, queue: &mut RequestQueue, metrics: &MetricsWriter, now: Nanos) -> bool {
        if self.is_passthrough {
            return false;
        }
        let mut worked = false;
        if std::mem::take(&mut self.may_poll_requeue) && !self.requeue_queue.is_empty() {
            let rules = &self.rules;
            let requeues = |request: &PendingRequest| rules[request.tenant.0 as usize].requeues;
            let polled = self.requeue_queue.poll(now, usize::MAX, requeues, |request| queue.push(request));
            worked |= polled.forwarded + polled.requeued > 0;
        }
        while let Some((ticket, mut request)) = self.fair_queue.dequeue(now) {
            self.queued_bytes[request.tenant.0 as usize] -= buffer_bytes(&request.operation);
            metrics.record_charged(request.tenant, ticket.cost_ns());
            request.ticket_id = self.store_ticket(ticket);
            queue.push(request);
            worked = true;
        }
        for _ in 0..self.overflow.len() {
            let Some(request) = self.overflow.pop_front() else { break };
            self.overflow_count[request.tenant.0 as usize] -= 1;
            self.enqueue(request, queue, metrics, now);
        }
        worked
    }

    /// Keeps a charge until its request has ended.
    fn store_ticket(&mut self, ticket: ServiceTicket) -> TicketId {
        self.concurrency_limit.request_began(ticket.tenant());
        let index = self.free_tickets.pop().unwrap_or_else(|| {
            self.tickets.push(None);
            (self.tickets.len() - 1) as u32
        });
        self.tickets[index as usize] = Some(ticket);
        TicketId(index)
    }

    /// A request has ended.
    #[inline]
    pub fn on_complete(&mut self, ticket_id: TicketId, outcome: &RequestOutcome) {
        if ticket_id != TicketId::NONE {
            self.end_ticket(ticket_id, outcome);
        }
    }

    fn end_ticket(&mut self, ticket_id: TicketId, outcome: &RequestOutcome) {
        let ticket = self.tickets[ticket_id.0 as usize].take().expect("a request ends once");
        self.free_tickets.push(ticket_id.0);
        let bytes = match outcome {
            RequestOutcome::Value { bytes, .. } | RequestOutcome::Listing { bytes, .. } => {
                Some(*bytes as u64)
            }
            RequestOutcome::Blocks { buffer } => Some(buffer.len() as u64),
            _ => None,
        };
        if let Some(bytes) = bytes {
            let mean = &mut self.mean_response_bytes[ticket.tenant().0 as usize];
            *mean = (*mean * 7 + bytes) / 8;
        }
        self.fair_queue.complete(ticket, bytes.map(|bytes| estimate_cost(bytes).ns));
    }

    /// Whether requests that end have to be told to [`RequestScheduler::done`] before others begin.
    #[inline]
    pub fn has_open_tickets(&self) -> bool {
        self.fair_queue.in_flight() > 0
    }

    /// Lets everything begin that waits here.
    pub fn release_all(&mut self, queue: &mut RequestQueue) {
        self.requeue_queue.poll(Nanos::NEVER, usize::MAX, |_| 0, |request| queue.push(request));
        for tenant in (0..TENANTS_MAX).filter(|&flow| std::mem::take(&mut self.in_fair_queue[flow as usize]))
        {
            self.fair_queue.remove_tenant(TenantId(tenant), |request| queue.push(request));
        }
        self.overflow.drain(..).for_each(|request| queue.push(request));
        self.overflow_count.fill(0);
        self.queued_bytes.fill(0);
    }

    /// Whether no more of a flow is to be received: it has more waiting than its part, of requests or of buffers. Others are
    /// heard meanwhile.
    #[inline]
    pub fn is_tenant_full(&self, tenant: TenantId) -> bool {
        !self.is_passthrough
            && (self.overflow_count[tenant.0 as usize] > 0
                || self.queued_bytes[tenant.0 as usize] > self.queued_bytes_max)
    }

    /// A turn begins.
    #[inline]
    pub fn begin_iteration(&mut self, now: Nanos) {
        self.may_poll_requeue = true;
        if self.action == PolicyAction::Fair {
            self.concurrency_limit.begin_iteration(now);
            self.fair_queue.set_in_flight_max(self.concurrency_limit.get());
        }
    }

    /// A turn has ended, in which something was done or nothing.
    #[inline]
    pub fn end_iteration(&mut self, worked: bool) {
        if self.action == PolicyAction::Fair {
            self.concurrency_limit.end_iteration(
                worked,
                self.fair_queue.in_flight() > 0,
                self.fair_queue.is_concurrency_limited(),
            );
        }
    }

    /// Lets everything begin, now and from now on: the node stops.
    pub fn drain(&mut self, queue: &mut RequestQueue) {
        self.release_all(queue);
        self.action = PolicyAction::Nothing;
        self.is_passthrough = true;
    }

    /// How many requests wait here.
    pub fn len(&self) -> usize {
        self.requeue_queue.len() + self.fair_queue.waiting() + self.overflow.len()
    }

    /// When there will be something to do without anything having come.
    pub fn next_deadline(&self, now: Nanos) -> Nanos {
        // Requests that go back are looked at in every turn.
        let requeue_deadline = if self.requeue_queue.is_empty() { Nanos::NEVER } else { now };
        // More may run when it is seen for how long too few did.
        let limit_deadline = if self.fair_queue.is_concurrency_limited() {
            self.concurrency_limit.period_ends_at().max(now)
        } else {
            Nanos::NEVER
        };
        requeue_deadline.min(self.fair_queue.next_deadline()).min(limit_deadline)
    }
}

#[cfg(test)]
mod tests;
