//! A world with the hash engine on a client, over a namespace of blocks of a node that it reaches by the network.
//!
//! ```text
//!   node boots ─▶ a life: connect, open, audit, work ─▶ (the connection, the client or the node is lost ─▶ a life)
//!              ─▶ its end: rest, restart or crash ─▶ …
//! ```
//! In: a [`plan::RemotePlan`]. Out: figures, or the first promise that does not hold. The engine acknowledges what
//! is durable at the node: what it acknowledged is there for the next life, whatever happened to node, client and
//! connection in between; from opening to opening the calls of every key have an order.
//!
//! # Layout
//! - this file: the play. [`scenario`]: what happens. [`engine_session`]: one life of the engine.

pub mod engine_session;
pub mod scenario;

use crate::blocks::PATIENCE;
use crate::blocks::node::Node;
use crate::faulty_disk::DiskFaults;
use crate::history::{History, Seen, State};
use crate::linearizability::{Verdict, explain};
use crate::node_under_test::{Audited, handle_without_devices};
use crate::runner::{Figures, unexplained};
use crate::scenario::{End, FaultKind, Round, Scenario};
use engine_session::{Life, Shared};
use octokv_base::prng::mix;
use octokv_base::{Key, NamespaceId, Nanos, Random};
use octokv_engine::conformance::key_of;
use octokv_engine::hash::OpenError;
use octokv_runtime::simulated::{HostId, ReactorId, Stop, VirtualWorld, WorldSettings};
use scenario::RemotePlan;
use std::cell::RefCell;
use std::rc::Rc;

/// How long after the end of a life the next one begins.
const RETRY: Nanos = Nanos::from_millis(3);
/// How many lives in a row may fail to open the volume while nothing is wrong.
const VAIN_LIVES_MAX: u64 = 50;

struct Play<'a> {
    plan: &'a RemotePlan,
    world: VirtualWorld,
    random: Random,
    node: Node,
    client: HostId,
    /// The present life, unless its host is dead.
    life: Option<ReactorId>,
    is_dead: bool,
    next_life: Nanos,
    vain_lives: u64,
    not_opened: Option<OpenError>,
    shared: Rc<RefCell<Shared>>,
    faults: DiskFaults,
    /// Faults in force, and until when.
    active: Vec<(Nanos, FaultKind)>,
    figures: Figures,
}

/// Plays a plan. The error says what does not hold.
pub fn play(plan: &RemotePlan) -> Result<Figures, String> {
    let mut play = Play::new(plan);
    let played = play.run();
    let at = play.world.now();
    played.map_err(|what| format!("at {} ns, {} core(s): {what}", at.0, plan.node.cores))?;
    Ok(play.figures)
}

impl<'a> Play<'a> {
    fn new(plan: &'a RemotePlan) -> Play<'a> {
        let mut random = Random::new(mix(plan.seed ^ 0x4e07));
        let settings = WorldSettings { seed: random.next_u64(), turn_cost: plan.turn_cost, link: plan.link };
        let world = VirtualWorld::new(settings);
        let faults = DiskFaults::new(random.fork());
        let node = Node::new(&world, &plan.blocks(), faults.clone());
        let client = world.add_host();
        let shared = Shared {
            history: History::new((0..plan.load.keys).map(key_of).collect::<Vec<Key>>()),
            asked: 0,
            limit: 0,
            answered: 0,
            served: 0,
            failure: None,
            resting: false,
            formatted: false,
            opened: None,
            may_work: false,
            over: true,
            closed: false,
            fenced: 0,
        };
        Play {
            plan,
            world,
            random,
            node,
            client,
            life: None,
            is_dead: false,
            next_life: Nanos::ZERO,
            vain_lives: 0,
            not_opened: None,
            shared: Rc::new(RefCell::new(shared)),
            faults,
            active: Vec::new(),
            figures: Figures::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot();
        for round in &self.plan.rounds {
            self.play_round(round)?;
        }
        self.rest()?;
        // A last life, to look up what the last but one left.
        self.shared.borrow_mut().resting = false;
        self.work_until("the last opening", |shared| shared.may_work)?;
        self.rest()?;
        let shared = self.shared.borrow();
        self.figures.operations = shared.answered;
        self.figures.served = shared.served;
        self.figures.fenced = shared.fenced;
        self.figures.elapsed = self.world.now();
        self.figures.device_errors = self.faults.failed();
        self.figures.trace = mix(self.world.trace() ^ shared.history.digest());
        Ok(())
    }

    fn boot(&mut self) {
        self.node.boot();
        let (volume, id) = (self.node.volume(0), NamespaceId(1));
        for core in 0..self.node.cores() {
            self.node.attach(core, 0, id, &volume);
        }
        self.node.show(0, id, 1);
    }

    fn begin_life(&mut self) {
        self.end_life();
        let handle = handle_without_devices(&self.world, self.client);
        {
            let mut shared = self.shared.borrow_mut();
            (shared.over, shared.closed, shared.may_work, shared.opened) = (false, false, false, None);
        }
        let random = self.random.fork();
        let mut life = Life::new(
            &self.world,
            self.client,
            self.node.address(),
            self.plan,
            random,
            handle.clone(),
            &self.shared,
        );
        self.life = Some(self.world.add_reactor(self.client, handle, move |now| life.turn(now)));
    }

    fn end_life(&mut self) {
        if let Some(life) = self.life.take() {
            self.world.remove_reactor(life);
        }
        self.shared.borrow_mut().history.open = false;
    }

    /// Looks after the lives: takes in what one found, begins the next when one is over.
    fn tend(&mut self) -> Result<(), String> {
        self.failure()?;
        let opened = self.shared.borrow_mut().opened.take();
        match opened {
            Some(Ok(found)) => self.take_audit(found)?,
            // What cannot be read now counts as damaged; damage that stays is found by the lives that follow.
            Some(Err(error)) => {
                self.shared.borrow_mut().over = true;
                self.not_opened = Some(error);
            }
            None => {}
        }
        let (over, resting) = (self.shared.borrow().over, self.shared.borrow().resting);
        if !over || self.is_dead {
            return Ok(());
        }
        if self.life.is_some() {
            self.end_life();
            self.next_life = self.world.now() + RETRY;
            self.vain_lives += 1;
            if !self.active.is_empty() {
                self.vain_lives = 0;
            }
            if self.vain_lives > VAIN_LIVES_MAX {
                let why = self.not_opened.take().map_or("no connection".to_owned(), |why| why.to_string());
                return Err(format!("{VAIN_LIVES_MAX} lives in a row came to nothing, the last by {why}"));
            }
        }
        if !resting && self.world.now() >= self.next_life {
            self.begin_life();
        }
        Ok(())
    }

    /// Runs until `done`, tending lives and ending faults whose time is over.
    fn work_until(&mut self, what: &str, done: impl Fn(&Shared) -> bool) -> Result<(), String> {
        let mut deadline = self.world.now() + PATIENCE;
        loop {
            self.tend()?;
            if done(&self.shared.borrow()) {
                return Ok(());
            }
            let next = self.active.iter().map(|(until, _)| *until).min().unwrap_or(Nanos::NEVER);
            let waits = self.life.is_none() && !self.is_dead && !self.shared.borrow().resting;
            let life_at = if waits { self.next_life.max(self.world.now() + Nanos(1)) } else { Nanos::NEVER };
            let shared = Rc::clone(&self.shared);
            let has_life = self.life.is_some();
            let news = || {
                let shared = shared.borrow();
                done(&shared)
                    || shared.failure.is_some()
                    || shared.opened.is_some()
                    || (shared.over && has_life)
            };
            self.world.run_while_not(next.min(deadline).min(life_at), news);
            let now = self.world.now();
            while let Some(at) = self.active.iter().position(|(until, _)| *until <= now) {
                let (_, kind) = self.active.swap_remove(at);
                self.end(kind);
                deadline = now + PATIENCE;
            }
            if now >= deadline {
                return Err(format!("standstill: {what} never comes"));
            }
        }
    }

    fn failure(&self) -> Result<(), String> {
        self.shared.borrow_mut().failure.take().map_or(Ok(()), Err)
    }

    fn play_round(&mut self, round: &Round) -> Result<(), String> {
        let begun = self.shared.borrow().answered;
        {
            let mut shared = self.shared.borrow_mut();
            // A crash comes in the middle of things: there is always more to ask.
            let more = if matches!(round.end, End::Crash { .. }) { 1_000 } else { 0 };
            shared.limit = shared.asked + round.operations + more;
            shared.resting = false;
        }
        let answered = |count: u64| move |shared: &Shared| shared.answered >= begun + count;
        for fault in &round.faults {
            self.work_until("an answer", answered(fault.after))?;
            self.begin(fault.kind, self.world.now() + fault.lasts);
        }
        self.work_until("an answer", answered(round.operations))?;
        match &round.end {
            End::Rest | End::Rot { .. } => self.rest()?,
            End::Restart => {
                self.rest()?;
                self.node.stop(Stop::Killed);
                self.boot();
            }
            End::Crash { stop, steps, again } => {
                for _ in 0..*steps {
                    self.world.step(Nanos::NEVER);
                }
                self.crash(*stop);
                for &(after, stop) in again {
                    let until = self.world.now() + after;
                    self.world.run_until(until);
                    self.tend()?;
                    self.crash(stop);
                }
                self.heal();
            }
        }
        self.tend()
    }

    fn crash(&mut self, stop: Stop) {
        self.figures.crashes += 1;
        self.node.stop(stop);
        self.boot();
    }

    fn begin(&mut self, kind: FaultKind, until: Nanos) {
        let (node, client) = (self.node.host, self.client);
        match kind {
            FaultKind::Reset { .. } => {
                self.world.reset_streams(client, node);
                return;
            }
            FaultKind::Partition { .. } => self.world.set_partitioned(client, node, true),
            FaultKind::SlowLink { link, .. } => self.world.set_link(client, node, link),
            FaultKind::HostDies { .. } if self.is_dead => return,
            FaultKind::HostDies { stop, .. } => {
                self.world.stop_host(client, stop);
                (self.is_dead, self.life) = (true, None);
                self.shared.borrow_mut().history.open = false;
            }
            FaultKind::SlowDisk { .. } | FaultKind::DiskErrors { .. } => self.faults.begin(kind),
        }
        self.active.push((until, kind));
    }

    fn end(&mut self, kind: FaultKind) {
        let (node, client) = (self.node.host, self.client);
        match kind {
            FaultKind::Reset { .. } => {}
            FaultKind::Partition { .. } => self.world.set_partitioned(client, node, false),
            FaultKind::SlowLink { .. } => self.world.set_link(client, node, self.plan.link),
            FaultKind::HostDies { .. } => {
                self.world.start_host(client);
                self.is_dead = false;
            }
            FaultKind::SlowDisk { .. } | FaultKind::DiskErrors { .. } => self.faults.clear(),
        }
    }

    /// Ends every fault.
    fn heal(&mut self) {
        for (_, kind) in std::mem::take(&mut self.active) {
            self.end(kind);
        }
        self.faults.clear();
    }

    /// Has the engine closed, in order where it still can, and waits until nothing is in use.
    fn rest(&mut self) -> Result<(), String> {
        self.heal();
        self.shared.borrow_mut().resting = true;
        self.work_until("the engine's end", |shared| shared.over)?;
        let closed = self.shared.borrow().closed;
        if self.plan.weather == Scenario::Calm && !closed {
            return Err("the engine was not closed, although nothing was wrong".to_owned());
        }
        self.end_life();
        self.node.watch(true);
        let deadline = self.world.now() + PATIENCE;
        let node = &self.node;
        let rested = self.world.run_while_not(deadline, || node.is_at_rest());
        self.node.watch(false);
        match self.node.leak() {
            Some(leak) => Err(format!("a leak: {leak}")),
            None if rested => Ok(()),
            None => Err("standstill: the node's work never comes to its end".to_owned()),
        }
    }

    /// Takes in what every key holds: no order of calls may contradict it.
    fn take_audit(&mut self, found: Vec<Audited>) -> Result<(), String> {
        let shared = Rc::clone(&self.shared);
        let shared = &mut *shared.borrow_mut();
        let history = &mut shared.history;
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(match audited {
                Audited::Missing => State::Missing,
                Audited::Value(bytes) => match history.identify(key, &bytes, bytes.len() as u32)? {
                    Seen::Value(operation) => State::Holds { operation, bytes: history.length_of(operation) },
                    _ => State::Holds { operation: 0, bytes: 0 },
                },
                Audited::Damaged(lba) => {
                    return Err(format!("{}: the record at block {lba} is damaged", history.keys()[key]));
                }
                // The connection or the disk failed meanwhile: another life will look.
                Audited::Failed(_) => {
                    shared.over = true;
                    return Ok(());
                }
            });
        }
        history.audited(&states);
        for key in 0..states.len() {
            match explain(history.starts()[key], history.events(key)) {
                Verdict::Explained => {}
                Verdict::Undecided => self.figures.undecided += 1,
                Verdict::Unexplained => return Err(unexplained(history, key, history.events(key))),
            }
        }
        history.next_segment(states);
        (history.open, shared.may_work) = (true, true);
        self.vain_lives = 0;
        Ok(())
    }
}
