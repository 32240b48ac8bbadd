//! Decides where and when a core's requests run: carries out the decisions of `octokv_sched` request by request.
//!
//! ```text
//!   requests of this core's connections ─▶ route ── Offload ──▶ mailbox of that core
//!                                            │ Local
//!   requests of other cores ─────────────────┴─▶ enqueue ─┬──────────────────────────────▶ RequestQueue
//!                                                         ├─▶ RequeueQueue: dense ──poll─▶ RequestQueue
//!                                                         └─▶ FairQueue ────────────poll─▶ RequestQueue
//! ```
//! In: requests, the decision of the last sampling interval, the time. Out: requests that start here, requests for
//! other cores. One core owns it.
//!
//! Invariants: a request leaves by exactly one path, once; an offloaded request is not offloaded again; no request
//! waits longer than the policy's bound (`octokv_sched::requeue`; under `octokv_sched::fair_queue` its tenant's limit
//! and weight set the time); the core stops receiving from a tenant with too much queued, and from that tenant only;
//! with policy action Nothing a request costs one comparison.

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
use slab::Slab;
use sole_tenant::SoleTenant;
use std::collections::VecDeque;

mod sole_tenant;

/// The decision's rule for one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct TenantAction {
    may_offload: bool,
    requeues: u32,
}

/// Capacity of the buffers that a queued request holds, in bytes.
fn buffer_bytes(operation: &RequestOperation) -> usize {
    match operation {
        RequestOperation::Store { record, .. } => record.capacity(),
        RequestOperation::Write { data, .. } | RequestOperation::Compare { data, .. } => data.capacity(),
        _ => 0,
    }
}

/// Limits on the requests that a scheduler queues.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerLimits {
    /// Requests of the requeue queue, and of the fair queue.
    pub requests_max: usize,
    /// Requests in the whole node. It bounds the overflow list: a tenant with a request there is not received from, so
    /// the list holds at most the requests of one iteration and those that other cores offloaded before.
    pub node_requests_max: usize,
    /// Bytes of buffers of one tenant's queued requests, above which it is not received from.
    pub queued_bytes_max: usize,
}

/// The scheduler of one core.
pub struct RequestScheduler {
    core: CoreId,
    action: PolicyAction,
    rules: Box<[TenantAction]>,
    router: Router,
    requeue_queue: RequeueQueue<PendingRequest>,
    fair_queue: FairQueue<PendingRequest>,
    /// Limit on requests of the fair queue in execution.
    concurrency_limit: ConcurrencyLimit,
    /// By tenant: whether the fair queue has it.
    in_fair_queue: Box<[bool]>,
    /// Whose requests the fair queue has had lately.
    sole_tenant: SoleTenant,
    /// By tenant: its weight and rate limits.
    tenant_limits: Box<[TenantQos]>,
    /// Weights on this core from the last interval, of the tenants that were active in it.
    weights: Vec<(TenantId, u32)>,
    /// Tickets of the requests that the fair queue has started, by [`TicketId`].
    tickets: Slab<ServiceTicket>,
    /// Requests that the fair queue rejected, in arrival order, and their count by tenant.
    overflow: VecDeque<PendingRequest>,
    overflow_count: Box<[u32]>,
    overflow_max: usize,
    /// By tenant: bytes of buffers held by queued requests; above the maximum the core stops receiving from the
    /// tenant.
    queued_bytes: Box<[usize]>,
    queued_bytes_max: usize,
    /// Whether the requeue queue may be polled: once per iteration.
    may_poll_requeue: bool,
    /// By tenant: moving average of response lengths, in bytes.
    mean_response_bytes: Box<[u64]>,
    /// Whether requests start in arrival order: policy action Nothing, so nothing is queued here.
    is_passthrough: bool,
}

/// Estimated cost of a request: a base and a time per byte, measured on the hash engine in memory
/// (docs/BENCHMARKS.md, 64 B and 4 KiB).
fn estimate_cost(bytes: u64) -> Cost {
    const BASE_NS: u64 = 1_000;
    const BYTES_PER_NS: u64 = 4;
    Cost { ns: BASE_NS + bytes / BYTES_PER_NS, bytes }
}

impl RequestScheduler {
    /// The scheduler of `core`, one of `cores`.
    pub fn new(core: CoreId, cores: usize, limits: SchedulerLimits) -> RequestScheduler {
        let SchedulerLimits { requests_max, node_requests_max, queued_bytes_max } = limits;
        let config = SchedConfig::default();
        let fair_limits = FairQueueLimits {
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
            fair_queue: FairQueue::new(fair_limits),
            concurrency_limit: ConcurrencyLimit::new(config.in_flight),
            in_fair_queue: vec![false; TENANTS_MAX as usize].into(),
            sole_tenant: SoleTenant::default(),
            tenant_limits: vec![config.default_qos; TENANTS_MAX as usize].into(),
            weights: Vec::new(),
            tickets: Slab::new(),
            overflow: VecDeque::new(),
            overflow_count: vec![0; TENANTS_MAX as usize].into(),
            overflow_max: node_requests_max,
            queued_bytes: vec![0; TENANTS_MAX as usize].into(),
            queued_bytes_max,
            may_poll_requeue: true,
            mean_response_bytes: vec![0; TENANTS_MAX as usize].into(),
            is_passthrough: true,
        }
    }

    /// Applies the decision of the interval that has ended. If the policy action changes, everything queued starts.
    pub fn apply_decision(&mut self, interval: &IntervalReport, queue: &mut RequestQueue, now: Nanos) {
        let decision = &interval.decision;
        for tenant in 0..TENANTS_MAX {
            let rule = decision.rule(TenantId(tenant));
            let may_offload = rule.migrates && decision.action != PolicyAction::Nothing;
            self.rules[tenant as usize] = TenantAction { may_offload, requeues: rule.requeues };
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
        // A tenant that connects later has the default limits until the next interval.
        let mut tenant_limits = [interval.config.default_qos; TENANTS_MAX as usize];
        for (tenant, host) in &interval.hosts {
            tenant_limits[tenant.0 as usize] = interval.config.qos_of(host);
        }
        for tenant in (0..TENANTS_MAX).filter(|&tenant| self.in_fair_queue[tenant as usize]) {
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

    /// Sets a tenant's weight on this core: the last interval's, or the configured one.
    fn update_weight(&mut self, tenant: TenantId) {
        let own_weight = self.weights.iter().find(|(of, _)| *of == tenant);
        let nominal = self.tenant_limits[tenant.0 as usize].weight * WEIGHT_UNIT;
        self.fair_queue.set_weight(tenant, own_weight.map_or(nominal, |(_, weight)| *weight));
    }

    /// Whether requests start in arrival order without queueing.
    #[inline]
    pub fn is_passthrough(&self) -> bool {
        self.is_passthrough
    }

    /// Whether requests of a tenant may be executed as they are received: the policy has nothing to do for them. Under the
    /// fair queue, of a tenant that is alone on this core; [`RequestScheduler::charge_direct`] follows.
    #[inline]
    pub fn may_execute_directly(&self, tenant: TenantId, now: Nanos) -> bool {
        match self.action {
            PolicyAction::Nothing => true,
            PolicyAction::Fair => {
                self.in_fair_queue[tenant.0 as usize]
                    && self.sole_tenant.is_alone(tenant, now)
                    && self.fair_queue.may_bypass(tenant)
            }
            PolicyAction::Balance(_) | PolicyAction::Inter | PolicyAction::Intra | PolicyAction::Hybrid => {
                let rule = self.rules[tenant.0 as usize];
                !rule.may_offload && rule.requeues == 0
            }
        }
    }

    /// Charges a tenant for requests that were executed as they were received, with so many bytes of data.
    #[inline]
    pub fn charge_direct(
        &mut self,
        tenant: TenantId,
        requests: u64,
        bytes: u64,
        metrics: &MetricsWriter,
        now: Nanos,
    ) {
        if self.action == PolicyAction::Fair && requests > 0 {
            self.sole_tenant.record(tenant, now);
            let cost = Cost { ns: estimate_cost(bytes).ns + (requests - 1) * estimate_cost(0).ns, bytes };
            metrics.record_charged(tenant, self.fair_queue.charge_bypassed(tenant, cost, now));
        }
    }

    /// Where a request of this core's connections runs, if its key has no owner core.
    pub fn route(&mut self, request: &PendingRequest) -> RoutingDecision {
        if !self.rules[request.tenant.0 as usize].may_offload {
            return RoutingDecision::Local;
        }
        self.router.route()
    }

    /// Takes a request that runs on this core, now or later.
    pub fn enqueue(
        &mut self,
        request: PendingRequest,
        queue: &mut RequestQueue,
        metrics: &MetricsWriter,
        now: Nanos,
    ) {
        match self.action {
            PolicyAction::Intra | PolicyAction::Hybrid if self.requeue_count(&request) > 0 => {
                // If the requeue queue is full, the request is treated as sparse once.
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

    /// How often a request is requeued; an offloaded one is not (OctoFAS Algorithm 2: the poller forwards it).
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
        self.sole_tenant.record(tenant, now);
        let cost = estimate_cost(match &request.operation {
            RequestOperation::Store { value_bytes, .. } => u64::from(*value_bytes),
            RequestOperation::Write { data, .. } | RequestOperation::Compare { data, .. } => {
                data.len() as u64
            }
            // The tenant's average: a host may offer a larger buffer than its values need.
            RequestOperation::Retrieve { .. }
            | RequestOperation::List { .. }
            | RequestOperation::NextPairs { .. }
            | RequestOperation::Read { .. } => self.mean_response_bytes[tenant.0 as usize],
            RequestOperation::Delete { .. }
            | RequestOperation::Exist { .. }
            | RequestOperation::CreateIterator(_)
            | RequestOperation::SeekIterator { .. }
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
                assert!(
                    self.overflow.len() < self.overflow_max,
                    "more overflowed requests than command slots"
                );
                self.overflow_count[tenant.0 as usize] += 1;
                self.overflow.push_back(request);
            }
        }
    }

    /// Moves the requests that the requeue or fair queue releases now to `queue`. Returns whether any moved.
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

    /// Keeps a ticket until its request completes.
    fn store_ticket(&mut self, ticket: ServiceTicket) -> TicketId {
        self.concurrency_limit.request_began(ticket.tenant());
        TicketId(self.tickets.insert(ticket) as u32)
    }

    /// Returns the ticket of a completed request.
    #[inline]
    pub fn on_complete(&mut self, ticket_id: TicketId, outcome: &RequestOutcome) {
        if ticket_id != TicketId::NONE {
            self.end_ticket(ticket_id, outcome);
        }
    }

    fn end_ticket(&mut self, ticket_id: TicketId, outcome: &RequestOutcome) {
        // A request completes once: a second completion panics.
        let ticket = self.tickets.remove(ticket_id.0 as usize);
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

    /// Whether completions must reach [`RequestScheduler::on_complete`] before more requests can start.
    #[inline]
    pub fn has_open_tickets(&self) -> bool {
        self.fair_queue.in_flight() > 0
    }

    /// Starts everything queued here.
    pub fn release_all(&mut self, queue: &mut RequestQueue) {
        self.requeue_queue.poll(Nanos::NEVER, usize::MAX, |_| 0, |request| queue.push(request));
        for tenant in
            (0..TENANTS_MAX).filter(|&tenant| std::mem::take(&mut self.in_fair_queue[tenant as usize]))
        {
            self.fair_queue.remove_tenant(TenantId(tenant), |request| queue.push(request));
        }
        self.overflow.drain(..).for_each(|request| queue.push(request));
        self.overflow_count.fill(0);
        self.queued_bytes.fill(0);
        self.sole_tenant = SoleTenant::default();
    }

    /// Whether to stop receiving from a tenant: too many of its requests or buffers are queued.
    #[inline]
    pub fn is_tenant_full(&self, tenant: TenantId) -> bool {
        !self.is_passthrough
            && (self.overflow_count[tenant.0 as usize] > 0
                || self.queued_bytes[tenant.0 as usize] > self.queued_bytes_max)
    }

    /// Begins an iteration at `now`.
    #[inline]
    pub fn begin_iteration(&mut self, now: Nanos) {
        self.may_poll_requeue = true;
        if self.action == PolicyAction::Fair {
            self.concurrency_limit.begin_iteration(now);
            self.fair_queue.set_in_flight_max(self.concurrency_limit.get());
        }
    }

    /// Ends an iteration; `worked`: it did any work.
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

    /// Starts everything, now and from now on: the node is stopping.
    pub fn drain(&mut self, queue: &mut RequestQueue) {
        self.release_all(queue);
        self.action = PolicyAction::Nothing;
        self.is_passthrough = true;
        self.rules.fill(TenantAction::default());
    }

    /// Requests queued here.
    pub fn len(&self) -> usize {
        self.requeue_queue.len() + self.fair_queue.waiting() + self.overflow.len()
    }

    /// When the scheduler next has work without new input.
    pub fn next_deadline(&self, now: Nanos) -> Nanos {
        // The requeue queue is polled in every iteration.
        let requeue_deadline = if self.requeue_queue.is_empty() { Nanos::NEVER } else { now };
        // The concurrency limit may rise at the end of its measuring period.
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
