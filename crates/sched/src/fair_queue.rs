//! Who is next on a core: a fair queue of tenants with weights and limits, in front of the engine.
//!
//! ```text
//!   offer ─▶ [ a │ a │ a │ a ]   start tag 70 ┐                        at most `in_flight_max`
//!   offer ─▶ [ b ]               start tag 50 ┼─▶ next: least start ─▶ run, run, run ─▶ done: what it really cost
//!   offer ─▶ [ c │ c ] over its limit ────────┘   tag first
//!                └─ parked until its limit opens
//!   pass ───────────── nobody waits and there is room: straight through ──▶
//! ```
//! In: requests with what they are expected to cost, the time, and what they cost in the end. Out: which request runs next.
//! Passive, one to a core; nothing is allocated after [`FairQueue::new`].
//!
//! This is start-time fair queueing (Goyal, Vin and Cheng 1996) with a bounded number of requests in flight, as SFQ(D) has it
//! (Jin, Chase and Kaur 2004), limits like mClock's (Gulati, Merchant and Varman 2010), and costs put right afterwards.
//! Why these: docs/decisions/0012-tenants-by-start-tags.md.
//!
//! # Rules
//! A request's start tag is the finish tag of its flow's request before, or the queue's virtual time where that is later; its
//! finish tag is the start tag plus cost ÷ weight. Virtual time is the start tag of what began last, and the greatest
//! finish tag once nothing is in flight. When a request cost more or less than was expected, the difference is added to
//! its flow's next finish tag. Equal tags go in the order in which they were made.
//!
//! # What holds
//! Work counts when it begins; `l` is a flow's largest request and `w` its weight, both as charged.
//! - While two flows wait without a pause, their work ÷ weight differs by at most `l1 ÷ w1 + l2 ÷ w2` more or less than
//!   before. So while all flows wait, none is ahead of or behind a fluid, which serves all of them at once by weight, by more
//!   than `(1 − f) × l + f × (sum of the others' l)`, where `f` is its part of all weights. Of flows that come and go
//!   none was seen behind the fluid by more than the sum of all `l`; that is tested, not proven.
//! - A request at the head of its flow waits for no more than what is in flight and, of each other flow, `w × l1 ÷ w1 + l`.
//!   A flow that has been silent, or has had less than its part, waits for what is in flight and then goes first, but for
//!   others like it.
//! - A limited flow has, over any span `t`, no more than `rate × (t + burst)` and one request.
//! - While a request waits whose flow's limits are open and there is room, [`FairQueue::next`] gives one.
//! - A flow with nothing waiting is never refused; the others share what is left.
//!
//! A flow that goes and comes back under the same name owes what it owed, at most about one request: otherwise
//! one that reconnects for each request would always be first. Another tenant that is given the name would owe it, so
//! give the name that was free the longest.
//!
//! Cost: a request that goes through the queue takes O(log flows); one that passes O(1). Tests: `fair/tests.rs`; beside a fluid
//! `fair/fluid.rs`; in any use `fair/any_use.rs`.

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

/// What weight 1 of the settings is here, so that a core's weights can be finer: [`crate::across`].
pub const WEIGHT_UNIT: u32 = 1024;
/// The greatest weight on one core.
pub const WEIGHT_MAX: u32 = 1000 * WEIGHT_UNIT * 16;
/// A tag is nanoseconds × 2^26 ÷ weight, rounded down: by less than a thousandth at the greatest weight and 250 ns.
const TAG_BITS: u32 = 26;
/// No request costs more; one that says so counts as this (68 s). 2^36 × 2^26 fits into a `u64`, and 2^64 of them into
/// a tag.
const COST_MAX_NS: u64 = 1 << 36;
const _: () = assert!(COST_MAX_NS.leading_zeros() >= TAG_BITS);

/// What a request is expected to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Of what is shared: time of the core, or of the device if that is what is short. 0 counts as 1.
    pub ns: u64,
    /// Bytes of key and value, for the limit on bytes.
    pub bytes: u64,
}

/// A request that has begun. It goes back by [`FairQueue::done`], or its place in flight stays taken.
#[derive(Debug)]
#[must_use = "its place in flight stays taken until it is done"]
pub struct ServiceTicket {
    tenant: TenantId,
    generation: u32,
    cost_ns: u64,
    weight: u32,
}

impl ServiceTicket {
    /// Whose request it is.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// What it was charged when it began.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns
    }
}

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairQueueLimits {
    /// Flows: their names are below this.
    pub tenants_max: u32,
    /// Requests that wait; at least as many as flows.
    pub requests_max: u32,
    /// Requests that run at a time.
    pub in_flight_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    /// Nothing waits.
    Idle,
    /// Its first request may begin.
    Ready,
    /// Its first request waits for its limits.
    Throttled,
}

#[derive(Debug)]
struct TenantState {
    is_registered: bool,
    /// Which of those that had this name.
    generation: u32,
    weight: u32,
    operations_limit: Option<Gcra>,
    bytes_limit: Option<Gcra>,
    state: QueueState,
    queue: TenantQueue,
    /// Of the first request that waits.
    start_tag: i128,
    /// Of the last request that began.
    finish_tag: i128,
    /// What finish tags will be put right by, once the first request that waits has begun.
    tag_correction: i128,
}

/// A place in one of the two heaps: by tag or time, then by when it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HeapEntry<K> {
    key: K,
    sequence: u64,
    tenant: u32,
}

/// The queue.
#[derive(Debug)]
pub struct FairQueue<T> {
    tenants: Vec<TenantState>,
    queues: SlabQueues<T>,
    ready: BinaryHeap<Reverse<HeapEntry<i128>>>,
    throttled: BinaryHeap<Reverse<HeapEntry<Nanos>>>,
    virtual_time: i128,
    finish_tag_max: i128,
    in_flight: u32,
    in_flight_max: u32,
    last_sequence: u64,
}

/// What a cost adds to a tag.
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

    /// From when on its next request may begin.
    fn conforms_at(&self) -> Nanos {
        let at = |limit: &Option<Gcra>| limit.as_ref().map_or(Nanos::ZERO, Gcra::conforms_at);
        at(&self.operations_limit).max(at(&self.bytes_limit))
    }

    /// New limits begin with nothing saved up; limits that stay the same go on.
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
    /// A queue without flows.
    ///
    /// # Panics
    /// Where there are more flows than requests, or nothing may be in flight.
    pub fn new(bounds: FairQueueLimits) -> FairQueue<T> {
        assert!(bounds.in_flight_max > 0, "nothing could run");
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

    /// A flow comes. It has nothing saved up and nothing owed, but for what one of the same name owed.
    ///
    /// # Panics
    /// Where there is one of this name, the name is beyond the bounds, or the settings are not checked.
    pub fn add_tenant(&mut self, tenant: TenantId, config: &TenantQos, now: Nanos) {
        assert!(config.check().is_ok(), "{config:?}");
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(!entry.is_registered, "{tenant} is there");
        let weight = config.weight * WEIGHT_UNIT;
        let owed = (entry.finish_tag - virtual_time).max(0) * i128::from(entry.weight) / i128::from(weight);
        let generation = entry.generation;
        let finish = virtual_time + owed;
        *entry = TenantState {
            is_registered: true,
            generation,
            weight,
            finish_tag: finish,
            ..TenantState::VACANT
        };
        entry.set_limits(config, now);
    }

    /// Gives a flow other weights and limits. Its limits hold at once, its weight from its next request on.
    ///
    /// # Panics
    /// Where there is no such flow, or the settings are not checked.
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

    /// Gives a flow another weight on this core, in [`WEIGHT_UNIT`]s, within 1 and [`WEIGHT_MAX`].
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn set_weight(&mut self, tenant: TenantId, weight: u32) {
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} is not there");
        entry.weight = weight.clamp(1, WEIGHT_MAX);
    }

    /// A flow goes; what waits of it is handed to `gone`. What it has in flight goes on, and is [`FairQueue::done`] as ever.
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn remove_tenant(&mut self, tenant: TenantId, mut gone: impl FnMut(T)) {
        self.remove_from_heap(tenant.0);
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} is not there");
        entry.is_registered = false;
        entry.finish_tag += std::mem::take(&mut entry.tag_correction);
        entry.generation = entry.generation.wrapping_add(1);
        while let Some((request, _)) = self.queues.pop(&mut entry.queue) {
            gone(request);
        }
        self.sync_virtual_time();
    }

    /// A request that need not wait, because nobody does and there is room, begins at once: the way for a flow that is
    /// alone. `None` where it has to be offered.
    ///
    /// # Panics
    /// Where there is no such flow.
    #[inline]
    pub fn try_begin(&mut self, tenant: TenantId, cost: Cost, now: Nanos) -> Option<ServiceTicket> {
        if !self.ready.is_empty() || self.in_flight >= self.in_flight_max || self.next_deadline() <= now {
            return None;
        }
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} is not there");
        if entry.state != QueueState::Idle || entry.conforms_at() > now {
            return None;
        }
        entry.start_tag = entry.finish_tag.max(virtual_time);
        Some(self.begin(tenant.0, cost, now))
    }

    /// A request comes to wait.
    ///
    /// # Errors
    /// The request, where its flow has as many waiting as its part of the bound is: take no more of this flow's input.
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn enqueue(&mut self, tenant: TenantId, cost: Cost, request: T, now: Nanos) -> Result<(), T> {
        let virtual_time = self.virtual_time;
        let entry = &mut self.tenants[tenant.0 as usize];
        assert!(entry.is_registered, "{tenant} is not there");
        self.queues.push(&mut entry.queue, request, cost)?;
        if entry.state == QueueState::Idle {
            entry.start_tag = entry.finish_tag.max(virtual_time);
            self.push_to_heap(tenant.0, now);
        }
        Ok(())
    }

    /// The request that begins now, if one may.
    pub fn dequeue(&mut self, now: Nanos) -> Option<(ServiceTicket, T)> {
        self.release_conforming(now);
        if self.in_flight >= self.in_flight_max {
            return None;
        }
        let tenant = self.ready.peek()?.0.tenant;
        let entry = &mut self.tenants[tenant as usize];
        let (request, cost) = self.queues.pop(&mut entry.queue).expect("who is ready has a request");
        let ticket = self.begin(tenant, cost, now);
        let entry = &mut self.tenants[tenant as usize];
        let top = self.ready.peek_mut().expect("it was looked at");
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

    /// A request has ended; `cost_ns` is what it took in the end, or `None` where that is not known.
    pub fn complete(&mut self, ticket: ServiceTicket, cost_ns: Option<u64>) {
        self.in_flight = self.in_flight.checked_sub(1).expect("a charge is done once");
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

    /// When a limit opens for a request that waits for it; [`Nanos::NEVER`] where none does. There may be nothing to do then
    /// if there is no room.
    #[inline]
    pub fn next_deadline(&self) -> Nanos {
        self.throttled.peek().map_or(Nanos::NEVER, |head| head.0.key)
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.queues.len()
    }

    /// How many requests of a flow wait.
    pub fn waiting_of(&self, tenant: TenantId) -> usize {
        self.tenants[tenant.0 as usize].queue.len()
    }

    /// Whether a flow waits for one of its limits, and not for others.
    pub fn is_throttled(&self, tenant: TenantId) -> bool {
        self.tenants[tenant.0 as usize].state == QueueState::Throttled
    }

    /// Whether a request that may begin waits for one to end.
    pub fn is_concurrency_limited(&self) -> bool {
        !self.ready.is_empty() && self.in_flight >= self.in_flight_max
    }

    /// How many requests run.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Another bound on what runs; what runs already goes on.
    ///
    /// # Panics
    /// Where nothing could run.
    pub fn set_in_flight_max(&mut self, in_flight_max: u32) {
        assert!(in_flight_max > 0, "nothing could run");
        self.in_flight_max = in_flight_max;
    }

    /// Charges the first request of a flow, whose start tag is set.
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

    /// Puts a flow that has a request into one of the heaps.
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

    /// Takes a flow out of its heap. Looks through it: for when flows change and go.
    fn remove_from_heap(&mut self, tenant: u32) {
        match std::mem::replace(&mut self.tenants[tenant as usize].state, QueueState::Idle) {
            QueueState::Idle => {}
            QueueState::Ready => self.ready.retain(|entry| entry.0.tenant != tenant),
            QueueState::Throttled => self.throttled.retain(|entry| entry.0.tenant != tenant),
        }
    }

    /// Lets those stand up whose limits have opened. They have saved up nothing meanwhile.
    fn release_conforming(&mut self, now: Nanos) {
        while let Some(head) = self.throttled.peek().filter(|turn| turn.0.key <= now) {
            let tenant = head.0.tenant;
            self.throttled.pop();
            let entry = &mut self.tenants[tenant as usize];
            entry.start_tag = entry.start_tag.max(self.virtual_time);
            self.push_to_heap(tenant, now);
        }
    }

    /// Where nothing runs and nothing could, all that was served is forgotten.
    fn sync_virtual_time(&mut self) {
        if self.in_flight == 0 && self.ready.is_empty() {
            self.virtual_time = self.virtual_time.max(self.finish_tag_max);
        }
    }
}

#[cfg(test)]
mod tests;
