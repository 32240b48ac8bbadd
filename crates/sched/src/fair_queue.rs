//! Fair queue of a core: selects the next request among tenants with weights and rate limits, in front of the engine.
//!
//! ```text
//!   enqueue ─▶ [ a │ a │ a │ a ]   start tag 70 ┐                           at most `in_flight_max`
//!   enqueue ─▶ [ b ]               start tag 50 ┼─▶ dequeue: least start ─▶ in flight ─▶ complete: actual cost
//!   enqueue ─▶ [ c │ c ] over its limit ────────┘   tag first
//!                 └─ throttled until its limit conforms
//!   try_begin ───────── nothing waits and a slot is free: straight through ──▶
//! ```
//! In: requests with their expected cost, the time, and their actual cost at completion. Out: the next request to
//! execute. Passive, one per core; nothing is allocated after [`FairQueue::new`].
//!
//! This is start-time fair queueing (Goyal, Vin and Cheng 1996) with a bounded number of requests in flight, as in
//! SFQ(D) (Jin, Chase and Kaur 2004), limits like mClock's (Gulati, Merchant and Varman 2010), and a cost correction at
//! completion. Reasons: docs/decisions/0012-tenants-by-start-tags.md.
//!
//! # Rules
//! The start tag of a request is the finish tag of its tenant's previous request, or the queue's virtual time if that
//! is later; its finish tag is the start tag plus cost ÷ weight. Virtual time is the start tag of the last request that
//! began, and the greatest finish tag once nothing is in flight. If the actual cost differs from the expected one, the
//! difference is added to the tenant's next finish tag. Equal tags are served in the order of their creation.
//!
//! # Invariants
//! Work counts when it begins; `l` is a tenant's largest request and `w` its weight, both as charged.
//! - While two tenants are backlogged without a pause, their work ÷ weight differs by at most `l1 ÷ w1 + l2 ÷ w2` more
//!   or less than before. So while all tenants are backlogged, none is ahead of or behind GPS (the fluid model, which
//!   serves all tenants at once by weight) by more than `(1 − f) × l + f × (sum of the others' l)`, where `f` is its
//!   part of all weights. With tenants that are backlogged only at times, the bound behind GPS is the sum of all `l`: tested, not
//!   proven.
//! - A request at the head of its tenant waits for no more than the requests in flight and, of each other tenant, `w ×
//!   l1 ÷ w1 + l`. A tenant that was idle, or received less than its share, waits for the requests in flight and is
//!   then served first, except for others like it.
//! - A limited tenant receives, over any time `t`, no more than `rate × (t + burst)` and one request.
//! - While a request waits whose tenant's limits conform and a slot is free, [`FairQueue::dequeue`] returns one.
//! - A tenant without waiting requests can always enqueue one; the others share the remaining slots.
//!
//! A tenant that reconnects under the same id keeps its debt, at most about one request: otherwise a host that
//! reconnects for each request would always be first. REQUIRES: the caller reuses the id that was free the longest,
//! since a new tenant inherits the debt of its id.
//!
//! Cost: a queued request costs O(log tenants); one that [`FairQueue::try_begin`] admits costs O(1). Tests:
//! `fair_queue/tests.rs`; against GPS `fair_queue/gps_tests.rs`; random operations `fair_queue/random_tests.rs`.

mod gcra;
mod slab_queues;

use crate::config::TenantQos;
use crate::ids::TenantId;
use gcra::Gcra;
use octokv_base::Nanos;
use slab_queues::{SlabQueues, TenantQueue};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// Internal value of a configured weight of 1, so that the weights on a core can be finer:
/// [`crate::cross_core_weights`].
pub const WEIGHT_UNIT: u32 = 1024;
/// Greatest weight on one core.
pub const WEIGHT_MAX: u32 = 1000 * WEIGHT_UNIT * 16;
/// A tag is nanoseconds × 2^26 ÷ weight, rounded down: by less than a thousandth at the greatest weight and 250 ns.
const TAG_BITS: u32 = 26;
/// Greatest cost of a request, 68 s; a greater one is clamped. 2^36 × 2^26 fits into a `u64`, and 2^64 of them into a
/// tag.
const COST_MAX_NS: u64 = 1 << 36;
const _: () = assert!(COST_MAX_NS.leading_zeros() >= TAG_BITS);

/// Expected cost of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Cost in the shared resource: CPU time of the core, or device time if the device is the bottleneck. 0 counts as
    /// 1.
    pub ns: u64,
    /// Bytes of key and value, for the byte limit.
    pub bytes: u64,
}

/// A request in flight. REQUIRES: pass it to [`FairQueue::complete`]; until then it occupies a slot.
#[derive(Debug)]
#[must_use = "it occupies a slot until it is completed"]
pub struct ServiceTicket {
    tenant: TenantId,
    generation: u32,
    cost_ns: u64,
    weight: u32,
}

impl ServiceTicket {
    /// The tenant of the request.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// Cost charged at its begin, in nanoseconds.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns
    }
}

/// Capacity of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairQueueLimits {
    /// Number of tenants: their ids are below this.
    pub tenants_max: u32,
    /// Waiting requests; at least `tenants_max`.
    pub requests_max: u32,
    /// Requests in flight; 1 or more.
    pub in_flight_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    /// No request waits.
    Idle,
    /// The first request may begin.
    Ready,
    /// The first request waits for the tenant's limits.
    Throttled,
}

#[derive(Debug)]
struct TenantState {
    is_registered: bool,
    /// Counts the tenants that had this id.
    generation: u32,
    weight: u32,
    operations_limit: Option<Gcra>,
    bytes_limit: Option<Gcra>,
    state: QueueState,
    queue: TenantQueue,
    /// Start tag of the first waiting request.
    start_tag: i128,
    /// Finish tag of the last request that began.
    finish_tag: i128,
    /// Correction of the next finish tag, applied when the first waiting request begins.
    tag_correction: i128,
}

/// An entry of one of the two heaps, ordered by tag or time, then by its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HeapEntry<K> {
    key: K,
    sequence: u64,
    tenant: u32,
}

/// A fair queue of requests `T`.
#[derive(Debug)]
pub struct FairQueue<T> {
    tenants: Vec<TenantState>,
    queues: SlabQueues<(T, Cost)>,
    ready: BinaryHeap<Reverse<HeapEntry<i128>>>,
    throttled: BinaryHeap<Reverse<HeapEntry<Nanos>>>,
    virtual_time: i128,
    finish_tag_max: i128,
    in_flight: u32,
    in_flight_max: u32,
    last_sequence: u64,
}

/// Tag increment of a cost.
fn tag_increment(ns: u64, weight: u32) -> i128 {
    i128::from((ns << TAG_BITS) / u64::from(weight))
}

fn clamp_cost_ns(ns: u64) -> u64 {
    ns.clamp(1, COST_MAX_NS)
}

impl TenantState {
    const VACANT: TenantState = TenantState {
        is_registered: false,
        generation: 0,
        weight: WEIGHT_UNIT,
        operations_limit: None,
        bytes_limit: None,
        state: QueueState::Idle,
        queue: TenantQueue::EMPTY,
        start_tag: 0,
        finish_tag: 0,
        tag_correction: 0,
    };

    /// The time from which its next request may begin.
    fn conforms_at(&self) -> Nanos {
        let at = |limit: &Option<Gcra>| limit.as_ref().map_or(Nanos::ZERO, Gcra::conforms_at);
        at(&self.operations_limit).max(at(&self.bytes_limit))
    }

    /// New limits start without a burst; unchanged limits keep their state.
    fn set_limits(&mut self, config: &TenantQos, now: Nanos) {
        let set = |limit: &mut Option<Gcra>, rate: Option<u64>| {
            let same = |limit: &Gcra| rate.is_some_and(|rate| limit.matches(rate, config.burst));
            if !limit.as_ref().is_some_and(same) {
                *limit = rate.map(|rate| Gcra::new(rate, config.burst, now));
            }
        };
        set(&mut self.operations_limit, config.operations_per_s);
        set(&mut self.bytes_limit, config.bytes_per_s);
    }
}

impl<T> FairQueue<T> {
    /// Creates a queue without tenants.
    ///
    /// # Panics
    /// If there are more tenants than requests, or `in_flight_max` is 0.
    pub fn new(bounds: FairQueueLimits) -> FairQueue<T> {
        assert!(bounds.in_flight_max > 0, "in_flight_max is 0");
        let tenants = bounds.tenants_max as usize;
        FairQueue {
            tenants: std::iter::repeat_with(|| TenantState::VACANT).take(tenants).collect(),
            queues: SlabQueues::new(bounds.tenants_max, bounds.requests_max),
            ready: BinaryHeap::with_capacity(tenants),
            throttled: BinaryHeap::with_capacity(tenants),
            virtual_time: 0,
            finish_tag_max: 0,
            in_flight: 0,
            in_flight_max: bounds.in_flight_max,
            last_sequence: 0,
        }
    }

    /// Adds a tenant, without credit and without debt except that of an earlier tenant with the same id.
    ///
    /// # Panics
    /// If the id is in use or not below `tenants_max`, or the QoS is invalid.
    pub fn add_tenant(&mut self, tenant: TenantId, config: &TenantQos, now: Nanos) {
        assert!(config.check().is_ok(), "{config:?}");
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(!entry.is_registered, "{tenant} exists");
        let weight = config.weight * WEIGHT_UNIT;
        let debt = (entry.finish_tag - virtual_time).max(0) * i128::from(entry.weight) / i128::from(weight);
        let generation = entry.generation;
        let finish = virtual_time + debt;
        *entry = TenantState {
            is_registered: true,
            generation,
            weight,
            finish_tag: finish,
            ..TenantState::VACANT
        };
        entry.set_limits(config, now);
    }

    /// Changes the weight and limits of a tenant. Limits apply at once, the weight from its next request.
    ///
    /// # Panics
    /// If the tenant does not exist, or the QoS is invalid.
    pub fn update_tenant(&mut self, tenant: TenantId, config: &TenantQos, now: Nanos) {
        assert!(config.check().is_ok(), "{config:?}");
        self.set_weight(tenant, config.weight * WEIGHT_UNIT);
        let entry = &mut self.tenants[tenant.0 as usize];
        entry.set_limits(config, now);
        if entry.state == QueueState::Throttled {
            entry.start_tag = entry.start_tag.max(self.virtual_time);
        }
        if entry.state != QueueState::Idle {
            self.remove_from_heap(tenant.0);
            self.push_to_heap(tenant.0, now);
        }
    }

    /// Changes the weight of a tenant on this core, in [`WEIGHT_UNIT`]s, clamped to 1 to [`WEIGHT_MAX`].
    ///
    /// # Panics
    /// If the tenant does not exist.
    pub fn set_weight(&mut self, tenant: TenantId, weight: u32) {
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        entry.weight = weight.clamp(1, WEIGHT_MAX);
    }

    /// Removes a tenant and passes its waiting requests to `discard`. REQUIRES: its requests in flight still end in
    /// [`FairQueue::complete`].
    ///
    /// # Panics
    /// If the tenant does not exist.
    pub fn remove_tenant(&mut self, tenant: TenantId, mut discard: impl FnMut(T)) {
        self.remove_from_heap(tenant.0);
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        entry.is_registered = false;
        entry.finish_tag += std::mem::take(&mut entry.tag_correction);
        entry.generation = entry.generation.wrapping_add(1);
        while let Some((request, _)) = self.queues.pop(&mut entry.queue) {
            discard(request);
        }
        self.sync_virtual_time();
    }

    /// Begins a request at once if no request could begin before it and a slot is free: the fast path of a tenant that
    /// is alone. `None` if it has to be enqueued.
    ///
    /// # Panics
    /// If the tenant does not exist.
    #[inline]
    pub fn try_begin(&mut self, tenant: TenantId, cost: Cost, now: Nanos) -> Option<ServiceTicket> {
        if !self.ready.is_empty() || self.in_flight >= self.in_flight_max || self.next_deadline() <= now {
            return None;
        }
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        if entry.state != QueueState::Idle || entry.conforms_at() > now {
            return None;
        }
        entry.start_tag = entry.finish_tag.max(virtual_time);
        Some(self.begin(tenant.0, cost, now))
    }

    /// Whether the requests of a tenant may bypass the queue now, and be charged afterwards: nothing waits, and the tenant has
    /// no rate limits.
    ///
    /// # Panics
    /// If the tenant does not exist.
    #[inline]
    pub fn may_bypass(&self, tenant: TenantId) -> bool {
        let entry = &self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        self.waiting() == 0 && entry.operations_limit.is_none() && entry.bytes_limit.is_none()
    }

    /// Charges a tenant for requests that bypassed the queue, all as one request. Returns the charge in nanoseconds.
    ///
    /// # Panics
    /// If the tenant does not exist.
    pub fn charge_bypassed(&mut self, tenant: TenantId, cost: Cost, now: Nanos) -> u64 {
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        if entry.state == QueueState::Idle {
            entry.start_tag = entry.finish_tag.max(virtual_time);
            let ticket = self.begin(tenant.0, cost, now);
            let charged_ns = ticket.cost_ns();
            self.complete(ticket, None);
            charged_ns
        } else {
            // Requests of the tenant have come into the queue since: the first of them pays.
            let ns = clamp_cost_ns(cost.ns);
            entry.tag_correction += tag_increment(ns, entry.weight);
            ns
        }
    }

    /// Appends a request to its tenant's queue.
    ///
    /// # Errors
    /// Returns the request if the tenant has used its share of the slots: take no more of its input.
    ///
    /// # Panics
    /// If the tenant does not exist.
    pub fn enqueue(&mut self, tenant: TenantId, cost: Cost, request: T, now: Nanos) -> Result<(), T> {
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} does not exist");
        self.queues.push(&mut entry.queue, (request, cost)).map_err(|(request, _)| request)?;
        if entry.state == QueueState::Idle {
            entry.start_tag = entry.finish_tag.max(virtual_time);
            self.push_to_heap(tenant.0, now);
        }
        Ok(())
    }

    /// Removes and begins the next request, if one may begin.
    pub fn dequeue(&mut self, now: Nanos) -> Option<(ServiceTicket, T)> {
        self.release_conforming(now);
        if self.in_flight >= self.in_flight_max {
            return None;
        }
        let tenant = self.ready.peek()?.0.tenant;
        let entry = &mut self.tenants[tenant as usize];
        let (request, cost) = self.queues.pop(&mut entry.queue).expect("a ready tenant has a request");
        let ticket = self.begin(tenant, cost, now);
        let entry = &mut self.tenants[tenant as usize];
        let top = self.ready.peek_mut().expect("peeked above");
        if entry.queue.is_empty() {
            entry.state = QueueState::Idle;
            PeekMut::pop(top);
        } else {
            entry.start_tag = entry.finish_tag;
            let at = entry.conforms_at();
            self.last_sequence += 1;
            if at > now {
                entry.state = QueueState::Throttled;
                PeekMut::pop(top);
                self.throttled.push(Reverse(HeapEntry { key: at, sequence: self.last_sequence, tenant }));
            } else {
                let mut top = top;
                *top = Reverse(HeapEntry { key: entry.start_tag, sequence: self.last_sequence, tenant });
            }
        }
        Some((ticket, request))
    }

    /// Completes a request. `cost_ns` is its actual cost, `None` if that is unknown.
    pub fn complete(&mut self, ticket: ServiceTicket, cost_ns: Option<u64>) {
        self.in_flight = self.in_flight.checked_sub(1).expect("a ticket is completed once");
        let entry = &mut self.tenants[ticket.tenant.0 as usize];
        if let Some(cost_ns) = cost_ns
            && entry.generation == ticket.generation
        {
            let difference = tag_increment(clamp_cost_ns(cost_ns), ticket.weight)
                - tag_increment(ticket.cost_ns, ticket.weight);
            if entry.state == QueueState::Idle {
                entry.finish_tag += difference;
                self.finish_tag_max = self.finish_tag_max.max(entry.finish_tag);
            } else {
                entry.tag_correction += difference;
            }
        }
        self.sync_virtual_time();
    }

    /// The time at which a limit admits a waiting request; [`Nanos::NEVER`] if none is throttled. At this time
    /// [`FairQueue::dequeue`] may still return `None`, if no slot is free.
    #[inline]
    pub fn next_deadline(&self) -> Nanos {
        self.throttled.peek().map_or(Nanos::NEVER, |head| head.0.key)
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.queues.len()
    }

    /// Number of waiting requests of a tenant.
    pub fn waiting_of(&self, tenant: TenantId) -> usize {
        self.tenants[tenant.0 as usize].queue.len()
    }

    /// Whether a tenant waits for one of its limits, not for others.
    pub fn is_throttled(&self, tenant: TenantId) -> bool {
        self.tenants[tenant.0 as usize].state == QueueState::Throttled
    }

    /// Whether a request that may begin waits for a slot.
    pub fn is_concurrency_limited(&self) -> bool {
        !self.ready.is_empty() && self.in_flight >= self.in_flight_max
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Changes the number of slots; requests in flight continue.
    ///
    /// # Panics
    /// If `in_flight_max` is 0.
    pub fn set_in_flight_max(&mut self, in_flight_max: u32) {
        assert!(in_flight_max > 0, "in_flight_max is 0");
        self.in_flight_max = in_flight_max;
    }

    /// Charges the first request of a tenant. REQUIRES: its start tag is set.
    #[inline]
    fn begin(&mut self, tenant: u32, cost: Cost, now: Nanos) -> ServiceTicket {
        let entry = &mut self.tenants[tenant as usize];
        let ns = clamp_cost_ns(cost.ns);
        self.virtual_time = self.virtual_time.max(entry.start_tag);
        entry.finish_tag =
            entry.start_tag + tag_increment(ns, entry.weight) + std::mem::take(&mut entry.tag_correction);
        self.finish_tag_max = self.finish_tag_max.max(entry.finish_tag);
        if let Some(limit) = &mut entry.operations_limit {
            limit.charge(1, now);
        }
        if let Some(limit) = &mut entry.bytes_limit {
            limit.charge(cost.bytes, now);
        }
        self.in_flight += 1;
        ServiceTicket {
            tenant: TenantId(tenant),
            generation: entry.generation,
            cost_ns: ns,
            weight: entry.weight,
        }
    }

    /// Adds a tenant with a request to one of the heaps.
    fn push_to_heap(&mut self, tenant: u32, now: Nanos) {
        let entry = &mut self.tenants[tenant as usize];
        let at = entry.conforms_at();
        self.last_sequence += 1;
        if at > now {
            entry.state = QueueState::Throttled;
            self.throttled.push(Reverse(HeapEntry { key: at, sequence: self.last_sequence, tenant }));
        } else {
            entry.state = QueueState::Ready;
            self.ready.push(Reverse(HeapEntry {
                key: entry.start_tag,
                sequence: self.last_sequence,
                tenant,
            }));
        }
    }

    /// Removes a tenant from its heap. A linear search: for changes and removals of tenants only.
    fn remove_from_heap(&mut self, tenant: u32) {
        match std::mem::replace(&mut self.tenants[tenant as usize].state, QueueState::Idle) {
            QueueState::Idle => {}
            QueueState::Ready => self.ready.retain(|entry| entry.0.tenant != tenant),
            QueueState::Throttled => self.throttled.retain(|entry| entry.0.tenant != tenant),
        }
    }

    /// Moves tenants whose limits conform to the ready heap. They gain no credit for the time throttled.
    fn release_conforming(&mut self, now: Nanos) {
        while let Some(head) = self.throttled.peek().filter(|entry| entry.0.key <= now) {
            let tenant = head.0.tenant;
            self.throttled.pop();
            let entry = &mut self.tenants[tenant as usize];
            entry.start_tag = entry.start_tag.max(self.virtual_time);
            self.push_to_heap(tenant, now);
        }
    }

    /// If nothing is in flight or ready, earlier service no longer counts.
    fn sync_virtual_time(&mut self) {
        if self.in_flight == 0 && self.ready.is_empty() {
            self.virtual_time = self.virtual_time.max(self.finish_tag_max);
        }
    }
}

#[cfg(test)]
mod tests;
