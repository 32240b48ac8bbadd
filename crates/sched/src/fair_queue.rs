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
//! Passive, one to a core; nothing is allocated after [`Fair::new`].
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
//! - While a request waits whose flow's limits are open and there is room, [`Fair::next`] gives one.
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

use crate::config::FlowSettings;
use crate::ids::FlowId;
use gcra::Limit;
use octokv_base::Nanos;
use slab_queues::{List, Shelf};
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

/// A request that has begun. It goes back by [`Fair::done`], or its place in flight stays taken.
#[derive(Debug)]
#[must_use = "its place in flight stays taken until it is done"]
pub struct Charge {
    flow: FlowId,
    generation: u32,
    ns: u64,
    weight: u32,
}

impl Charge {
    /// Whose request it is.
    pub fn flow(&self) -> FlowId {
        self.flow
    }

    /// What it was charged when it began.
    pub fn cost_ns(&self) -> u64 {
        self.ns
    }
}

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairBounds {
    /// Flows: their names are below this.
    pub flows_max: u32,
    /// Requests that wait; at least as many as flows.
    pub requests_max: u32,
    /// Requests that run at a time.
    pub in_flight_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    /// Nothing waits.
    Out,
    /// Its first request may begin.
    Ready,
    /// Its first request waits for its limits.
    Parked,
}

#[derive(Debug)]
struct Flow {
    is_there: bool,
    /// Which of those that had this name.
    generation: u32,
    weight: u32,
    operations: Option<Limit>,
    bytes: Option<Limit>,
    stands: Stands,
    waiting: List,
    /// Of the first request that waits.
    start: i128,
    /// Of the last request that began.
    finish: i128,
    /// What finish tags will be put right by, once the first request that waits has begun.
    correction: i128,
}

/// A place in one of the two heaps: by tag or time, then by when it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn<K> {
    key: K,
    number: u64,
    flow: u32,
}

/// The queue.
#[derive(Debug)]
pub struct Fair<T> {
    flows: Vec<Flow>,
    shelf: Shelf<T>,
    ready: BinaryHeap<Reverse<Turn<i128>>>,
    parked: BinaryHeap<Reverse<Turn<Nanos>>>,
    virtual_time: i128,
    finish_max: i128,
    in_flight: u32,
    in_flight_max: u32,
    turns: u64,
}

/// What a cost adds to a tag.
fn tag(ns: u64, weight: u32) -> i128 {
    i128::from((ns << TAG_BITS) / u64::from(weight))
}

fn chargeable(ns: u64) -> u64 {
    ns.clamp(1, COST_MAX_NS)
}

impl Flow {
    const NOBODY: Flow = Flow {
        is_there: false,
        generation: 0,
        weight: WEIGHT_UNIT,
        operations: None,
        bytes: None,
        stands: Stands::Out,
        waiting: List::EMPTY,
        start: 0,
        finish: 0,
        correction: 0,
    };

    /// From when on its next request may begin.
    fn opens_at(&self) -> Nanos {
        let at = |limit: &Option<Limit>| limit.as_ref().map_or(Nanos::ZERO, Limit::opens_at);
        at(&self.operations).max(at(&self.bytes))
    }

    /// New limits begin with nothing saved up; limits that stay the same go on.
    fn set_limits(&mut self, settings: &FlowSettings, now: Nanos) {
        let set = |limit: &mut Option<Limit>, rate: Option<u64>| {
            let same = |limit: &Limit| rate.is_some_and(|rate| limit.is_for(rate, settings.burst));
            if !limit.as_ref().is_some_and(same) {
                *limit = rate.map(|rate| Limit::new(rate, settings.burst, now));
            }
        };
        set(&mut self.operations, settings.operations_per_s);
        set(&mut self.bytes, settings.bytes_per_s);
    }
}

impl<T> Fair<T> {
    /// A queue without flows.
    ///
    /// # Panics
    /// Where there are more flows than requests, or nothing may be in flight.
    pub fn new(bounds: FairBounds) -> Fair<T> {
        assert!(bounds.in_flight_max > 0, "nothing could run");
        let flows = bounds.flows_max as usize;
        Fair {
            flows: std::iter::repeat_with(|| Flow::NOBODY).take(flows).collect(),
            shelf: Shelf::new(bounds.flows_max, bounds.requests_max),
            ready: BinaryHeap::with_capacity(flows),
            parked: BinaryHeap::with_capacity(flows),
            virtual_time: 0,
            finish_max: 0,
            in_flight: 0,
            in_flight_max: bounds.in_flight_max,
            turns: 0,
        }
    }

    /// A flow comes. It has nothing saved up and nothing owed, but for what one of the same name owed.
    ///
    /// # Panics
    /// Where there is one of this name, the name is beyond the bounds, or the settings are not checked.
    pub fn add(&mut self, flow: FlowId, settings: &FlowSettings, now: Nanos) {
        assert!(settings.check().is_ok(), "{settings:?}");
        let virtual_time = self.virtual_time;
        let entry = &mut self.flows[flow.0 as usize];
        assert!(!entry.is_there, "{flow} is there");
        let weight = settings.weight * WEIGHT_UNIT;
        let owed = (entry.finish - virtual_time).max(0) * i128::from(entry.weight) / i128::from(weight);
        let generation = entry.generation;
        let finish = virtual_time + owed;
        *entry = Flow { is_there: true, generation, weight, finish, ..Flow::NOBODY };
        entry.set_limits(settings, now);
    }

    /// Gives a flow other weights and limits. Its limits hold at once, its weight from its next request on.
    ///
    /// # Panics
    /// Where there is no such flow, or the settings are not checked.
    pub fn change(&mut self, flow: FlowId, settings: &FlowSettings, now: Nanos) {
        assert!(settings.check().is_ok(), "{settings:?}");
        self.set_weight(flow, settings.weight * WEIGHT_UNIT);
        let entry = &mut self.flows[flow.0 as usize];
        entry.set_limits(settings, now);
        if entry.stands == Stands::Parked {
            entry.start = entry.start.max(self.virtual_time);
        }
        if entry.stands != Stands::Out {
            self.step_out(flow.0);
            self.stand(flow.0, now);
        }
    }

    /// Gives a flow another weight on this core, in [`WEIGHT_UNIT`]s, within 1 and [`WEIGHT_MAX`].
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn set_weight(&mut self, flow: FlowId, weight: u32) {
        let entry = &mut self.flows[flow.0 as usize];
        assert!(entry.is_there, "{flow} is not there");
        entry.weight = weight.clamp(1, WEIGHT_MAX);
    }

    /// A flow goes; what waits of it is handed to `gone`. What it has in flight goes on, and is [`Fair::done`] as ever.
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn remove(&mut self, flow: FlowId, mut gone: impl FnMut(T)) {
        self.step_out(flow.0);
        let entry = &mut self.flows[flow.0 as usize];
        assert!(entry.is_there, "{flow} is not there");
        entry.is_there = false;
        entry.finish += std::mem::take(&mut entry.correction);
        entry.generation = entry.generation.wrapping_add(1);
        while let Some((request, _)) = self.shelf.pop(&mut entry.waiting) {
            gone(request);
        }
        self.rest();
    }

    /// A request that need not wait, because nobody does and there is room, begins at once: the way for a flow that is
    /// alone. `None` where it has to be offered.
    ///
    /// # Panics
    /// Where there is no such flow.
    #[inline]
    pub fn pass(&mut self, flow: FlowId, cost: Cost, now: Nanos) -> Option<Charge> {
        if !self.ready.is_empty() || self.in_flight >= self.in_flight_max || self.next_deadline() <= now {
            return None;
        }
        let virtual_time = self.virtual_time;
        let entry = &mut self.flows[flow.0 as usize];
        assert!(entry.is_there, "{flow} is not there");
        if entry.stands != Stands::Out || entry.opens_at() > now {
            return None;
        }
        entry.start = entry.finish.max(virtual_time);
        Some(self.begin(flow.0, cost, now))
    }

    /// A request comes to wait.
    ///
    /// # Errors
    /// The request, where its flow has as many waiting as its part of the bound is: take no more of this flow's input.
    ///
    /// # Panics
    /// Where there is no such flow.
    pub fn offer(&mut self, flow: FlowId, cost: Cost, request: T, now: Nanos) -> Result<(), T> {
        let virtual_time = self.virtual_time;
        let entry = &mut self.flows[flow.0 as usize];
        assert!(entry.is_there, "{flow} is not there");
        self.shelf.push(&mut entry.waiting, request, cost)?;
        if entry.stands == Stands::Out {
            entry.start = entry.finish.max(virtual_time);
            self.stand(flow.0, now);
        }
        Ok(())
    }

    /// The request that begins now, if one may.
    pub fn next(&mut self, now: Nanos) -> Option<(Charge, T)> {
        self.open(now);
        if self.in_flight >= self.in_flight_max {
            return None;
        }
        let flow = self.ready.peek()?.0.flow;
        let entry = &mut self.flows[flow as usize];
        let (request, cost) = self.shelf.pop(&mut entry.waiting).expect("who is ready has a request");
        let charge = self.begin(flow, cost, now);
        let entry = &mut self.flows[flow as usize];
        let top = self.ready.peek_mut().expect("it was looked at");
        if entry.waiting.is_empty() {
            entry.stands = Stands::Out;
            PeekMut::pop(top);
        } else {
            entry.start = entry.finish;
            let at = entry.opens_at();
            self.turns += 1;
            if at > now {
                entry.stands = Stands::Parked;
                PeekMut::pop(top);
                self.parked.push(Reverse(Turn { key: at, number: self.turns, flow }));
            } else {
                let mut top = top;
                *top = Reverse(Turn { key: entry.start, number: self.turns, flow });
            }
        }
        Some((charge, request))
    }

    /// A request has ended; `cost_ns` is what it took in the end, or `None` where that is not known.
    pub fn done(&mut self, charge: Charge, cost_ns: Option<u64>) {
        self.in_flight = self.in_flight.checked_sub(1).expect("a charge is done once");
        let entry = &mut self.flows[charge.flow.0 as usize];
        if let Some(cost_ns) = cost_ns
            && entry.generation == charge.generation
        {
            let difference = tag(chargeable(cost_ns), charge.weight) - tag(charge.ns, charge.weight);
            if entry.stands == Stands::Out {
                entry.finish += difference;
                self.finish_max = self.finish_max.max(entry.finish);
            } else {
                entry.correction += difference;
            }
        }
        self.rest();
    }

    /// When a limit opens for a request that waits for it; [`Nanos::NEVER`] where none does. There may be nothing to do then
    /// if there is no room.
    #[inline]
    pub fn next_deadline(&self) -> Nanos {
        self.parked.peek().map_or(Nanos::NEVER, |turn| turn.0.key)
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.shelf.len()
    }

    /// How many requests of a flow wait.
    pub fn waiting_of(&self, flow: FlowId) -> usize {
        self.flows[flow.0 as usize].waiting.len()
    }

    /// Whether a flow waits for one of its limits, and not for others.
    pub fn is_parked(&self, flow: FlowId) -> bool {
        self.flows[flow.0 as usize].stands == Stands::Parked
    }

    /// Whether a request that may begin waits for one to end.
    pub fn waits_for_room(&self) -> bool {
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
    fn begin(&mut self, flow: u32, cost: Cost, now: Nanos) -> Charge {
        let entry = &mut self.flows[flow as usize];
        let ns = chargeable(cost.ns);
        self.virtual_time = self.virtual_time.max(entry.start);
        entry.finish = entry.start + tag(ns, entry.weight) + std::mem::take(&mut entry.correction);
        self.finish_max = self.finish_max.max(entry.finish);
        if let Some(limit) = &mut entry.operations {
            limit.took(1, now);
        }
        if let Some(limit) = &mut entry.bytes {
            limit.took(cost.bytes, now);
        }
        self.in_flight += 1;
        Charge { flow: FlowId(flow), generation: entry.generation, ns, weight: entry.weight }
    }

    /// Puts a flow that has a request into one of the heaps.
    fn stand(&mut self, flow: u32, now: Nanos) {
        let entry = &mut self.flows[flow as usize];
        let at = entry.opens_at();
        self.turns += 1;
        if at > now {
            entry.stands = Stands::Parked;
            self.parked.push(Reverse(Turn { key: at, number: self.turns, flow }));
        } else {
            entry.stands = Stands::Ready;
            self.ready.push(Reverse(Turn { key: entry.start, number: self.turns, flow }));
        }
    }

    /// Takes a flow out of its heap. Looks through it: for when flows change and go.
    fn step_out(&mut self, flow: u32) {
        match std::mem::replace(&mut self.flows[flow as usize].stands, Stands::Out) {
            Stands::Out => {}
            Stands::Ready => self.ready.retain(|turn| turn.0.flow != flow),
            Stands::Parked => self.parked.retain(|turn| turn.0.flow != flow),
        }
    }

    /// Lets those stand up whose limits have opened. They have saved up nothing meanwhile.
    fn open(&mut self, now: Nanos) {
        while let Some(turn) = self.parked.peek().filter(|turn| turn.0.key <= now) {
            let flow = turn.0.flow;
            self.parked.pop();
            let entry = &mut self.flows[flow as usize];
            entry.start = entry.start.max(self.virtual_time);
            self.stand(flow, now);
        }
    }

    /// Where nothing runs and nothing could, all that was served is forgotten.
    fn rest(&mut self) {
        if self.in_flight == 0 && self.ready.is_empty() {
            self.virtual_time = self.virtual_time.max(self.finish_max);
        }
    }
}

#[cfg(test)]
mod tests;
