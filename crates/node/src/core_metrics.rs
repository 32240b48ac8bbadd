//! What a core has done, in figures that every core can read: the monitor's source.
//!
//! ```text
//!   core, by its Tally: begun, worked, answered, moved, … ──▶ Board, plain stores ──▶ monitor: Seen, now and a window ago
//! ```
//! In: what the core's reactor says as it happens. Out: sums since the start. One core writes a [`Board`], any reads it;
//! readers may see one figure a little before another.
//!
//! # Waiting behind other flows
//! OctoFAS compares a flow's response time with what it would be alone, which cannot be measured while it is not. What
//! can be measured is how long its core worked for others while a request of it was in the node: from the begin of
//! the turn in which it was received to its answer. That is taken for its wait behind other flows, up to the whole
//! time. What it leaves out: bytes that wait in the kernel for the next turn, and a device that works for others.

use octokv_base::Nanos;
use octokv_runtime::{Busy, BusyReader, Stage};
use octokv_sched::metrics::Stages;
use octokv_sched::{CoreId, FlowId};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A sum that one core adds to and all read.
#[derive(Default)]
struct Sum(AtomicU64);

impl Sum {
    #[inline]
    fn add(&self, what: u64) {
        // One writer: no read-modify-write needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(what), Ordering::Relaxed);
    }
    /// What was added to others before is seen by who sees this by [`Sum::read_first`].
    fn add_last(&self, what: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(what), Ordering::Release);
    }
    fn read_first(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
    fn set(&self, what: u64) {
        self.0.store(what, Ordering::Relaxed);
    }
    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct FlowBoard {
    begun: Sum,
    answered: Sum,
    bytes: Sum,
    latency_ns: Sum,
    waited_ns: Sum,
    work_ns: Sum,
    round_trip_ns: Sum,
    held: Sum,
    outdone: Sum,
    served_ns: Sum,
}

/// One core's figures.
pub struct Board {
    busy: OnceLock<BusyReader>,
    /// How long it worked for all flows.
    work_ns: Sum,
    own_here: Sum,
    moved_to: Box<[Sum]>,
    ran_for: Box<[Sum]>,
    flows: Box<[FlowBoard]>,
}

/// What a core had done of one flow's at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowSeen {
    /// Requests that came over its connections.
    pub begun: u64,
    /// Those of them that were answered.
    pub answered: u64,
    /// Bytes of its connections, both ways.
    pub bytes: u64,
    /// The sum of the answered requests' times in the node.
    pub latency: Nanos,
    /// How much of that the core worked for others.
    pub waited: Nanos,
    /// How long the core worked for it.
    pub work: Nanos,
    /// The network's round trip as the core last heard of it; nothing where it has not.
    pub round_trip: Nanos,
    /// Requests that waited here for their turn among tenants.
    pub held: u64,
    /// Those of them that waited for others, and not for a limit.
    pub outdone: u64,
    /// What the fair queue charged for those that it let begin here.
    pub served: Nanos,
}

/// What a core had done at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Its time.
    pub busy: Stages,
    /// Requests of its own connections that ran here.
    pub own_here: u64,
    /// By core, that it sent there.
    pub moved_to: Vec<u64>,
    /// By core, that it ran for others.
    pub ran_for: Vec<u64>,
    /// By flow.
    pub flows: Vec<FlowSeen>,
}

impl Board {
    /// The figures of one of `cores` cores, with so many flows.
    pub fn new(cores: usize, flows: u32) -> Board {
        let sums = || (0..cores).map(|_| Sum::default()).collect();
        Board {
            busy: OnceLock::new(),
            work_ns: Sum::default(),
            own_here: Sum::default(),
            moved_to: sums(),
            ran_for: sums(),
            flows: (0..flows).map(|_| FlowBoard::default()).collect(),
        }
    }

    /// How long the core has worked for others than a flow.
    fn others_ns(&self, flow: FlowId) -> u64 {
        // The other way round than they are written: what is added meanwhile makes it too little and not too much.
        let all = self.work_ns.read_first();
        all.saturating_sub(self.flows[flow.0 as usize].work_ns.read())
    }

    /// All of them, now.
    pub fn seen(&self) -> Seen {
        let spent = self.busy.get().map(BusyReader::spent).unwrap_or_default();
        let sums = |sums: &[Sum]| sums.iter().map(Sum::read).collect();
        let flow = |flow: &FlowBoard| FlowSeen {
            begun: flow.begun.read(),
            answered: flow.answered.read(),
            bytes: flow.bytes.read(),
            latency: Nanos(flow.latency_ns.read()),
            waited: Nanos(flow.waited_ns.read()),
            work: Nanos(flow.work_ns.read()),
            round_trip: Nanos(flow.round_trip_ns.read()),
            held: flow.held.read(),
            outdone: flow.outdone.read(),
            served: Nanos(flow.served_ns.read()),
        };
        Seen {
            busy: Stages {
                target: spent[Stage::Target as usize],
                kv: spent[Stage::Kv as usize],
                device: spent[Stage::Device as usize],
            },
            own_here: self.own_here.read(),
            moved_to: sums(&self.moved_to),
            ran_for: sums(&self.ran_for),
            flows: self.flows.iter().map(flow).collect(),
        }
    }
}

/// When a request came, and how long the core that it is on, or on the way to, had worked for others when that began, less what
/// it has waited behind others elsewhere: wrapping, since only differences count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    begun: Nanos,
    others_ns: u64,
}

/// What the core itself remembers of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    work: Nanos,
    /// As it was at the begin of the last turn that worked for it.
    work_before: Nanos,
    turn: u64,
}

/// A core's pen on its own [`Board`].
pub struct Tally {
    boards: Arc<[Board]>,
    core: CoreId,
    turn: Cell<u64>,
    /// The turn's begin, and how long the core had worked for all flows then, and has now.
    now: Cell<Nanos>,
    work_before: Cell<Nanos>,
    work: Cell<Nanos>,
    own: RefCell<Box<[Own]>>,
}

impl Tally {
    /// The pen of one of the cores that `boards` are of; `busy` is its account of time.
    pub fn new(boards: Arc<[Board]>, core: CoreId, busy: &Busy) -> Tally {
        // A core that starts again, as in a simulation, goes on with what is there.
        let board = &boards[core.index()];
        let _ = board.busy.set(busy.reader());
        let own = |flow: &FlowBoard| Own { work: Nanos(flow.work_ns.read()), ..Own::default() };
        let own: Box<[Own]> = board.flows.iter().map(own).collect();
        let work = Nanos(board.work_ns.read());
        Tally {
            boards,
            core,
            turn: Cell::new(1),
            now: Cell::new(Nanos::ZERO),
            work_before: Cell::new(work),
            work: Cell::new(work),
            own: RefCell::new(own),
        }
    }

    fn board(&self) -> &Board {
        &self.boards[self.core.index()]
    }

    /// A turn begins.
    pub fn turn(&self, now: Nanos) {
        self.now.set(now);
        self.turn.set(self.turn.get() + 1);
        self.work_before.set(self.work.get());
    }

    /// The core has worked for a flow.
    #[inline]
    pub fn worked(&self, flow: FlowId, span: Nanos) {
        let own = &mut self.own.borrow_mut()[flow.0 as usize];
        if own.turn != self.turn.get() {
            own.turn = self.turn.get();
            own.work_before = own.work;
        }
        own.work = own.work + span;
        self.work.set(self.work.get() + span);
        self.board().flows[flow.0 as usize].work_ns.add(span.0);
        self.board().work_ns.add_last(span.0);
    }

    /// So many requests of a flow came in this turn: the stamp of each.
    #[inline]
    pub fn begun(&self, flow: FlowId, requests: u64) -> Stamp {
        self.board().flows[flow.0 as usize].begun.add(requests);
        let own = self.own.borrow()[flow.0 as usize];
        let before = if own.turn == self.turn.get() { own.work_before } else { own.work };
        Stamp { begun: self.now.get(), others_ns: self.work_before.get().since(before).0 }
    }

    /// How long the core has worked for others than a flow.
    fn others(&self, flow: FlowId) -> Nanos {
        self.work.get().since(self.own.borrow()[flow.0 as usize].work)
    }

    /// Requests of a flow are answered, at `now`: what [`Answers`] counts is added when it is dropped.
    #[inline]
    pub fn answers(&self, flow: FlowId, now: Nanos) -> Answers<'_> {
        let board = &self.board().flows[flow.0 as usize];
        Answers { board, now, others_ns: self.others(flow).0, count: 0, latency_ns: 0, waited_ns: 0 }
    }

    /// A request of a flow is answered, at `now`.
    #[inline]
    pub fn answered(&self, flow: FlowId, stamp: Stamp, now: Nanos) {
        self.answers(flow, now).add(stamp);
    }

    /// So many bytes went over a flow's connections.
    pub fn bytes(&self, flow: FlowId, bytes: usize) {
        self.board().flows[flow.0 as usize].bytes.add(bytes as u64);
    }

    /// The network's round trip of a flow.
    pub fn round_trip(&self, flow: FlowId, round_trip: Nanos) {
        self.board().flows[flow.0 as usize].round_trip_ns.set(round_trip.0);
    }

    /// So many requests of this core's connections run here.
    #[inline]
    pub fn own_here(&self, requests: u64) {
        self.board().own_here.add(requests);
    }

    /// A request of this core's connections is sent to another core.
    pub fn moved(&self, to: CoreId) {
        self.board().moved_to[to.index()].add(1);
    }

    /// A request of a flow waits for its turn among tenants.
    pub fn held(&self, flow: FlowId) {
        self.board().flows[flow.0 as usize].held.add(1);
    }

    /// It waits for others, and not for a limit.
    pub fn outdone(&self, flow: FlowId) {
        self.board().flows[flow.0 as usize].outdone.add(1);
    }

    /// The fair queue let a request begin, and charged so much for it.
    pub fn served(&self, flow: FlowId, charged_ns: u64) {
        self.board().flows[flow.0 as usize].served_ns.add(charged_ns);
    }

    /// A request of another core's ran here.
    pub fn ran_for(&self, home: CoreId) {
        self.board().ran_for[home.index()].add(1);
    }

    /// The stamp of a request that leaves this core for another, to run there or when it has: from now on what that core does
    /// for others is its wait, and what this one does is not.
    pub fn towards(&self, to: CoreId, flow: FlowId, stamp: Stamp) -> Stamp {
        let waited = self.others(flow).0.wrapping_sub(stamp.others_ns);
        Stamp { others_ns: self.boards[to.index()].others_ns(flow).wrapping_sub(waited), ..stamp }
    }
}

/// Requests of one flow that are answered at one time. Nothing is worked meanwhile.
pub struct Answers<'a> {
    board: &'a FlowBoard,
    now: Nanos,
    others_ns: u64,
    count: u64,
    latency_ns: u64,
    waited_ns: u64,
}

impl Answers<'_> {
    /// One more.
    #[inline]
    pub fn add(&mut self, stamp: Stamp) {
        let latency = self.now.since(stamp.begun).0;
        self.count += 1;
        self.latency_ns += latency;
        // A figure of another core may have been read a moment late: then it is a little less than nothing.
        let waited = self.others_ns.wrapping_sub(stamp.others_ns);
        self.waited_ns += if waited >> 63 == 0 { waited.min(latency) } else { 0 };
    }
}

impl Drop for Answers<'_> {
    #[inline]
    fn drop(&mut self) {
        self.board.answered.add(self.count);
        self.board.latency_ns.add(self.latency_ns);
        self.board.waited_ns.add(self.waited_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: FlowId = FlowId(1);
    const B: FlowId = FlowId(2);

    fn tallies(cores: usize) -> (Arc<[Board]>, Vec<Tally>) {
        let boards: Arc<[Board]> = (0..cores).map(|_| Board::new(cores, 4)).collect();
        let tally = |core| Tally::new(Arc::clone(&boards), CoreId::at(core), &Busy::virtual_time());
        let tallies = (0..cores).map(tally).collect();
        (boards, tallies)
    }

    #[test]
    fn a_request_waits_for_what_its_core_does_for_others_while_it_is_there() {
        let (boards, tallies) = tallies(1);
        let tally = &tallies[0];
        tally.turn(Nanos(1_000));
        tally.worked(B, Nanos(100));
        // What was done for B in this turn came first.
        let stamp = tally.begun(A, 1);
        tally.worked(A, Nanos(30));
        tally.turn(Nanos(2_000));
        tally.worked(B, Nanos(7));
        tally.worked(A, Nanos(20));
        tally.answered(A, stamp, Nanos(2_050));
        let seen = boards[0].seen();
        let want = FlowSeen {
            begun: 1,
            answered: 1,
            latency: Nanos(1_050),
            waited: Nanos(107),
            work: Nanos(50),
            ..FlowSeen::default()
        };
        assert_eq!(seen.flows[A.0 as usize], want);
        // What is its own flow's is no wait, in the same turn and before.
        tally.turn(Nanos(3_000));
        tally.worked(A, Nanos(500));
        let stamp = tally.begun(A, 1);
        tally.worked(A, Nanos(400));
        tally.answered(A, stamp, Nanos(4_000));
        assert_eq!(boards[0].seen().flows[A.0 as usize].waited, want.waited);
    }

    #[test]
    fn nobody_waits_longer_than_the_answer_takes() {
        let (boards, tallies) = tallies(1);
        tallies[0].turn(Nanos(10));
        let stamp = tallies[0].begun(A, 1);
        tallies[0].worked(B, Nanos(900));
        tallies[0].answered(A, stamp, Nanos(15));
        let seen = boards[0].seen().flows[A.0 as usize];
        assert_eq!((seen.latency, seen.waited), (Nanos(5), Nanos(5)));
    }

    #[test]
    fn a_request_that_was_moved_waits_on_both_cores_and_on_its_way() {
        let (boards, tallies) = tallies(2);
        let (home, away) = (&tallies[0], &tallies[1]);
        away.worked(B, Nanos(77));
        home.turn(Nanos(100));
        let stamp = home.begun(A, 1);
        home.worked(B, Nanos(5));
        home.moved(CoreId(1));
        let stamp = home.towards(CoreId(1), A, stamp);
        home.worked(B, Nanos(1_000));
        // It is on its way, and the core that it goes to is at others' work; what is its own flow's is no wait.
        away.worked(B, Nanos(300));
        away.worked(A, Nanos(60));
        away.worked(B, Nanos(40));
        away.worked(A, Nanos(10));
        away.ran_for(CoreId(0));
        let stamp = away.towards(CoreId(0), A, stamp);
        away.worked(B, Nanos(1_000));
        home.worked(B, Nanos(2));
        home.answered(A, stamp, Nanos(700));
        let (one, other) = (boards[0].seen(), boards[1].seen());
        assert_eq!((one.flows[1].waited, one.flows[1].latency), (Nanos(347), Nanos(600)));
        assert_eq!((one.moved_to, other.ran_for), (vec![0, 1], vec![1, 0]));
        assert_eq!(other.flows[1].answered, 0, "it is the connection's core that answers");
    }

    #[test]
    fn a_core_that_starts_again_goes_on_with_what_it_had() {
        let (boards, tallies) = tallies(2);
        tallies[0].worked(B, Nanos(1_000));
        let again = Tally::new(Arc::clone(&boards), CoreId(0), &Busy::virtual_time());
        again.turn(Nanos(10));
        let stamp = again.begun(A, 1);
        again.worked(B, Nanos(7));
        let stamp = tallies[1].towards(CoreId(0), A, again.towards(CoreId(1), A, stamp));
        again.answered(A, stamp, Nanos(90));
        assert_eq!(boards[0].seen().flows[1].waited, Nanos(7));
    }
}
