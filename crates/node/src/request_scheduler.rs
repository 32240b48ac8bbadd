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

use crate::bug_injection::{self, Bug};
use crate::core_metrics::Tally;
use crate::monitor::Window;
use crate::request_queue::{Job, Jobs};
use crate::tenants::FLOWS_MAX;
use octokv_base::Nanos;
use octokv_nvmf::{Operation, Outcome};
use octokv_sched::fair_queue::WEIGHT_UNIT;
use octokv_sched::migration_plan::CorePlan;
use octokv_sched::{
    Backward, Charge, Chosen, CoreId, Cost, Depth, Fair, FairBounds, FlowId, FlowSettings, Route, Router,
    Settings,
};
use std::collections::VecDeque;

/// What the window's choice says of one flow.
#[derive(Clone, Copy, Debug, Default)]
struct Rule {
    moves: bool,
    backwardings: u32,
}

/// The buffers that wait with a request.
fn buffer_bytes(operation: &Operation) -> usize {
    match operation {
        Operation::Store { record, .. } => record.capacity(),
        Operation::Write { data, .. } | Operation::Compare { data, .. } => data.capacity(),
        _ => 0,
    }
}

/// Which of a core's charges is that of a request, if any is: small, since every request carries one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note(u32);

impl Note {
    /// None is.
    pub const NONE: Note = Note(u32::MAX);
}

impl Default for Note {
    fn default() -> Note {
        Note::NONE
    }
}

/// One core's choices.
pub struct Dispatch {
    core: CoreId,
    chosen: Chosen,
    rules: Box<[Rule]>,
    router: Router,
    backward: Backward<Job>,
    fair: Fair<Job>,
    /// How many of its requests run at a time.
    depth: Depth,
    /// Whether the fair queue knows a flow.
    known: Box<[bool]>,
    /// What it is told of each.
    flows: Box<[FlowSettings]>,
    /// The weights of the last window on this core, of the flows that had any part in it.
    weights: Vec<(FlowId, u32)>,
    /// Of the requests that the fair queue has let run; and which places are free.
    charges: Vec<Option<Charge>>,
    free_charges: Vec<u32>,
    /// What the fair queue had no room for, in the order in which it came; and how many of them are of each flow.
    refused: VecDeque<Job>,
    refused_of: Box<[u32]>,
    /// Bytes of buffers that wait with requests of each flow, and how many may before no more of it is received.
    held_bytes: Box<[usize]>,
    held_bytes_max: usize,
    /// Whether requests that go back may be looked at in this turn.
    may_rotate: bool,
    /// How long answers to a flow have been of late, in bytes.
    answer_bytes: Box<[u64]>,
    /// Whether requests just begin: nothing is chosen, so nothing waits here.
    is_plain: bool,
}

/// What a request costs a core, as a guess: a base for each, and time for its bytes, as they were measured of the hash engine
/// in memory (docs/BENCHMARKS.md, 64 B and 4 KiB).
fn cost_of(bytes: u64) -> Cost {
    const BASE_NS: u64 = 1_000;
    const BYTES_PER_NS: u64 = 4;
    Cost { ns: BASE_NS + bytes / BYTES_PER_NS, bytes }
}

impl Dispatch {
    /// Of one of `cores` cores, which holds at most so many requests.
    pub fn new(core: CoreId, cores: usize, requests_max: usize, held_bytes_max: usize) -> Dispatch {
        let settings = Settings::default();
        let bounds = FairBounds {
            flows_max: FLOWS_MAX,
            requests_max: (requests_max as u32).max(FLOWS_MAX),
            in_flight_max: settings.in_flight,
        };
        Dispatch {
            core,
            chosen: Chosen::Nothing,
            rules: vec![Rule::default(); FLOWS_MAX as usize].into(),
            router: Router::new(cores),
            backward: Backward::new(requests_max, settings.held_max),
            fair: Fair::new(bounds),
            depth: Depth::new(settings.in_flight),
            known: vec![false; FLOWS_MAX as usize].into(),
            flows: vec![settings.flow; FLOWS_MAX as usize].into(),
            weights: Vec::new(),
            charges: Vec::new(),
            free_charges: Vec::new(),
            refused: VecDeque::new(),
            refused_of: vec![0; FLOWS_MAX as usize].into(),
            held_bytes: vec![0; FLOWS_MAX as usize].into(),
            held_bytes_max,
            may_rotate: true,
            answer_bytes: vec![0; FLOWS_MAX as usize].into(),
            is_plain: true,
        }
    }

    /// A window has ended: what is chosen holds from now on. Where that is something else than before, what waits begins.
    pub fn choose(&mut self, window: &Window, jobs: &mut Jobs, now: Nanos) {
        let decision = &window.decision;
        for flow in 0..FLOWS_MAX {
            let rule = decision.rule(FlowId(flow));
            self.rules[flow as usize] = Rule { moves: rule.moves, backwardings: rule.backwardings };
        }
        self.router.install(decision.of_core(self.core).unwrap_or(&CorePlan::default()));
        self.backward.set_held_max(window.settings.held_max);
        self.depth.set_most(window.settings.in_flight);
        self.fair.set_in_flight_max(self.depth.get());
        if decision.chosen != self.chosen {
            let before = jobs.len();
            self.release(jobs);
            self.depth.rest();
            if bug_injection::is(Bug::DropHeld) {
                jobs.truncate(before);
            }
        }
        self.chosen = decision.chosen;
        self.is_plain = self.chosen == Chosen::Nothing;
        // A flow that comes later has what is said of nobody, until the next window knows its name.
        let mut flows = [window.settings.flow; FLOWS_MAX as usize];
        for (flow, host) in &window.hosts {
            flows[flow.0 as usize] = window.settings.of_tenant(host);
        }
        for flow in (0..FLOWS_MAX).filter(|&flow| self.known[flow as usize]) {
            if self.flows[flow as usize] != flows[flow as usize] {
                self.fair.change(FlowId(flow), &flows[flow as usize], now);
            }
        }
        self.flows.copy_from_slice(&flows);
        self.weights.clear();
        let on_core = |(flow, weights): &(FlowId, Vec<u32>)| Some((*flow, *weights.get(self.core.index())?));
        self.weights.extend(window.weights.iter().filter_map(on_core));
        for flow in 0..FLOWS_MAX {
            if self.known[flow as usize] {
                self.weigh(FlowId(flow));
            }
        }
    }

    /// Gives a flow its weight on this core: the last window's, or that of its settings.
    fn weigh(&mut self, flow: FlowId) {
        let own = self.weights.iter().find(|(of, _)| *of == flow);
        let nominal = self.flows[flow.0 as usize].weight * WEIGHT_UNIT;
        self.fair.set_weight(flow, own.map_or(nominal, |(_, weight)| *weight));
    }

    /// Whether requests just begin, in the order in which they come.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// A request of one of this core's connections: where it runs.
    pub fn route(&mut self, job: &Job) -> Route {
        if !self.rules[job.flow.0 as usize].moves {
            return Route::Here;
        }
        self.router.route()
    }

    /// A request that runs here, now or later.
    pub fn keep(&mut self, job: Job, jobs: &mut Jobs, tally: &Tally, now: Nanos) {
        match self.chosen {
            Chosen::Intra | Chosen::Hybrid if self.backwardings(&job) > 0 => {
                // With no room there it is not dense any more for this once.
                let flow = job.flow;
                match self.backward.push(job, now) {
                    Ok(()) => tally.held(flow),
                    Err(job) => jobs.push(job),
                }
            }
            Chosen::Fair => self.queue(job, jobs, tally, now),
            Chosen::Nothing | Chosen::Balance(_) | Chosen::Inter | Chosen::Intra | Chosen::Hybrid => {
                jobs.push(job);
            }
        }
    }

    /// How often a request goes back: those of other cores do not (OctoFAS Algorithm 2: the poller forwards them).
    fn backwardings(&self, job: &Job) -> u32 {
        if job.home == self.core { self.rules[job.flow.0 as usize].backwardings } else { 0 }
    }

    fn queue(&mut self, mut job: Job, jobs: &mut Jobs, tally: &Tally, now: Nanos) {
        let flow = job.flow;
        let cost = cost_of(match &job.operation {
            Operation::Store { value_bytes, .. } => u64::from(*value_bytes),
            Operation::Write { data, .. } | Operation::Compare { data, .. } => data.len() as u64,
            // As long as those before: a host may name more room than its values need.
            Operation::Retrieve { .. } | Operation::List { .. } | Operation::Read { .. } => {
                self.answer_bytes[flow.0 as usize]
            }
            Operation::Delete { .. }
            | Operation::Exist { .. }
            | Operation::Flush
            | Operation::WriteZeroes { .. }
            | Operation::Deallocate { .. }
            | Operation::Verify { .. } => 0,
        });
        if !std::mem::replace(&mut self.known[flow.0 as usize], true) {
            self.fair.add(flow, &self.flows[flow.0 as usize], now);
            self.weigh(flow);
        }
        if let Some(charge) = self.fair.pass(flow, cost, now) {
            tally.served(flow, charge.cost_ns());
            job.note = self.note(charge);
            jobs.push(job);
            return;
        }
        let bytes = buffer_bytes(&job.operation);
        match self.fair.offer(flow, cost, job, now) {
            Ok(()) => {
                tally.held(flow);
                if !self.fair.is_parked(flow) {
                    tally.outdone(flow);
                }
                self.held_bytes[flow.0 as usize] += bytes;
            }
            Err(job) => {
                self.refused_of[flow.0 as usize] += 1;
                self.refused.push_back(job);
            }
        }
    }

    /// Lets those begin whose turn it is. Gives whether it did anything.
    pub fn poll(&mut self, jobs: &mut Jobs, tally: &Tally, now: Nanos) -> bool {
        if self.is_plain {
            return false;
        }
        let mut worked = false;
        if std::mem::take(&mut self.may_rotate) && !self.backward.is_empty() {
            let rules = &self.rules;
            let backwardings = |job: &Job| rules[job.flow.0 as usize].backwardings;
            let polled = self.backward.poll(now, usize::MAX, backwardings, |job| jobs.push(job));
            worked |= polled.forwarded + polled.rotated > 0;
        }
        while let Some((charge, mut job)) = self.fair.next(now) {
            self.held_bytes[job.flow.0 as usize] -= buffer_bytes(&job.operation);
            tally.served(job.flow, charge.cost_ns());
            job.note = self.note(charge);
            jobs.push(job);
            worked = true;
        }
        for _ in 0..self.refused.len() {
            let Some(job) = self.refused.pop_front() else { break };
            self.refused_of[job.flow.0 as usize] -= 1;
            self.keep(job, jobs, tally, now);
        }
        worked
    }

    /// Keeps a charge until its request has ended.
    fn note(&mut self, charge: Charge) -> Note {
        self.depth.began(charge.flow());
        let place = self.free_charges.pop().unwrap_or_else(|| {
            self.charges.push(None);
            (self.charges.len() - 1) as u32
        });
        self.charges[place as usize] = Some(charge);
        Note(place)
    }

    /// A request has ended.
    #[inline]
    pub fn done(&mut self, note: Note, outcome: &Outcome) {
        if note != Note::NONE {
            self.end_charge(note, outcome);
        }
    }

    fn end_charge(&mut self, note: Note, outcome: &Outcome) {
        let charge = self.charges[note.0 as usize].take().expect("a request ends once");
        self.free_charges.push(note.0);
        let bytes = match outcome {
            Outcome::Value { bytes, .. } | Outcome::Listing { bytes, .. } => Some(*bytes as u64),
            Outcome::Blocks { buffer } => Some(buffer.len() as u64),
            _ => None,
        };
        if let Some(bytes) = bytes {
            let mean = &mut self.answer_bytes[charge.flow().0 as usize];
            *mean = (*mean * 7 + bytes) / 8;
        }
        self.fair.done(charge, bytes.map(|bytes| cost_of(bytes).ns));
    }

    /// Whether requests that end have to be told to [`Dispatch::done`] before others begin.
    #[inline]
    pub fn is_charging(&self) -> bool {
        self.fair.in_flight() > 0
    }

    /// Lets everything begin that waits here.
    pub fn release(&mut self, jobs: &mut Jobs) {
        self.backward.poll(Nanos::NEVER, usize::MAX, |_| 0, |job| jobs.push(job));
        for flow in (0..FLOWS_MAX).filter(|&flow| std::mem::take(&mut self.known[flow as usize])) {
            self.fair.remove(FlowId(flow), |job| jobs.push(job));
        }
        self.refused.drain(..).for_each(|job| jobs.push(job));
        self.refused_of.fill(0);
        self.held_bytes.fill(0);
    }

    /// Whether no more of a flow is to be received: it has more waiting than its part, of requests or of buffers. Others are
    /// heard meanwhile.
    #[inline]
    pub fn is_full(&self, flow: FlowId) -> bool {
        !self.is_plain
            && (self.refused_of[flow.0 as usize] > 0
                || self.held_bytes[flow.0 as usize] > self.held_bytes_max)
    }

    /// A turn begins.
    #[inline]
    pub fn turn(&mut self, now: Nanos) {
        self.may_rotate = true;
        if self.chosen == Chosen::Fair {
            self.depth.turn(now);
            self.fair.set_in_flight_max(self.depth.get());
        }
    }

    /// A turn has ended, in which something was done or nothing.
    #[inline]
    pub fn turned(&mut self, worked: bool) {
        if self.chosen == Chosen::Fair {
            self.depth.ended(worked, self.fair.in_flight() > 0, self.fair.waits_for_room());
        }
    }

    /// Lets everything begin, now and from now on: the node stops.
    pub fn drain(&mut self, jobs: &mut Jobs) {
        self.release(jobs);
        self.chosen = Chosen::Nothing;
        self.is_plain = true;
    }

    /// How many requests wait here.
    pub fn len(&self) -> usize {
        self.backward.len() + self.fair.waiting() + self.refused.len()
    }

    /// When there will be something to do without anything having come.
    pub fn next_deadline(&self, now: Nanos) -> Nanos {
        // Requests that go back are looked at in every turn.
        let backward = if self.backward.is_empty() { Nanos::NEVER } else { now };
        // More may run when it is seen for how long too few did.
        let room =
            if self.fair.waits_for_room() { self.depth.interval_ends().max(now) } else { Nanos::NEVER };
        backward.min(self.fair.next_deadline()).min(room)
    }
}

#[cfg(test)]
mod tests;
