//! One world, played from its plan to its end.
//!
//! ```text
//!   boot ─▶ audit ─▶ round: load and faults ─▶ its end: rest, rot, restart or crash ─▶ audit ─▶ … ─▶ check
//! ```
//! In: a [`Plan`]. Out: figures, or the first promise that does not hold. From audit to audit the calls of
//! every key must have an order ([`crate::register`]); at rest nothing may be in use; at the end the disk
//! must verify. Damage is accepted only where the plan made a bit rot.

use crate::client_host::{Clients, Host, Shared};
use crate::faulty_disk::DiskFaults;
use crate::history::{History, Seen, State};
use crate::linearizability::{Verdict, explain, is_one_of, survivors};
use crate::node_under_test::{Audited, Later, Machine, Opened, handle_without_devices};
use crate::scenario::{End, FaultKind, HostPlan, Plan, Round};
use octokv_base::prng::mix;
use octokv_base::{Key, Nanos, Random};
use octokv_engine::Durability;
use octokv_engine::conformance::key_of;
use octokv_runtime::simulated::{CrashPlan, Stop, VirtualWorld, WorldSettings};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Figures of a world that held all promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Commands answered or lost.
    pub operations: u64,
    /// Commands that were answered with what they asked for.
    pub served: u64,
    /// Virtual time that passed.
    pub elapsed: Nanos,
    /// Deaths of the node, those during recovery included.
    pub crashes: u64,
    /// Requests that ran on another core than that of their connection.
    pub moved: u64,
    /// Requests that waited for their turn among tenants.
    pub held: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Device operations that were made to fail.
    pub device_errors: u64,
    /// Bits that rotted.
    pub rotten_bits: u64,
    /// Lives of an engine on a client that ended since they might have lost what they wrote.
    pub fenced: u64,
    /// Changes of an operator.
    pub changes: u64,
    /// Commands refused because of them.
    pub turned_away: u64,
    /// Keys whose calls were too entangled to judge.
    pub undecided: u64,
    /// The same for the same seed, always.
    pub trace: u64,
}

/// How long anything may take in virtual time once nothing is wrong any more.
const PATIENCE: Nanos = Nanos::from_secs(60);
/// How long a volume at rest takes to say so in its journal.
const SETTLING: Nanos = Nanos::from_millis(60);

struct Play<'a> {
    plan: &'a Plan,
    world: VirtualWorld,
    random: Random,
    machine: Machine,
    hosts: Vec<Host>,
    shared: Rc<RefCell<Shared>>,
    faults: DiskFaults,
    /// Faults in force, and until when.
    active: Vec<(Nanos, FaultKind)>,
    /// Bytes whose bits rotted, and where not all of them can have been overwritten.
    rotten: Vec<u64>,
    /// Whether what was acknowledged since the last audit may be lost.
    relaxed: bool,
    /// Writes and flushes that had failed when the node was started last.
    writes_failed: u64,
    figures: Figures,
}

/// Plays a plan. The error says what does not hold.
pub fn play(plan: &Plan) -> Result<Figures, String> {
    let mut play = Play::new(plan);
    let played = play.run();
    let at = play.world.now();
    played.map_err(|what| {
        format!("at {} ns, {} core(s), durability {:?}: {what}", at.0, plan.node.cores, plan.node.durability)
    })?;
    Ok(play.figures)
}

impl<'a> Play<'a> {
    fn new(plan: &'a Plan) -> Play<'a> {
        let mut random = Random::new(mix(plan.seed ^ 0x0c70));
        let settings = WorldSettings { seed: random.next_u64(), turn_cost: plan.turn_cost, link: plan.link };
        let world = VirtualWorld::new(settings);
        let faults = DiskFaults::new(random.fork());
        let machine = Machine::new(&world, plan.node, faults.clone());
        let is_asked_for = |key: &Key| plan.load.long_keys || key.len() <= 16;
        let keys = (0..).map(key_of).filter(is_asked_for).take(plan.load.keys as usize).collect();
        let shared = Shared {
            history: History::new(keys),
            load: plan.load,
            asked: 0,
            limit: 0,
            answered: 0,
            served: 0,
            failure: None,
            faults: faults.clone(),
            resting: false,
        };
        let shared = Rc::new(RefCell::new(shared));
        let host = |plan: &HostPlan| Host { host: world.add_host(), plan: *plan, live: Rc::default() };
        let hosts = plan.hosts.iter().map(host).collect();
        let (active, rotten) = (Vec::new(), Vec::new());
        let figures = Figures::default();
        Play {
            plan,
            world,
            random,
            machine,
            hosts,
            shared,
            faults,
            active,
            rotten,
            relaxed: false,
            writes_failed: 0,
            figures,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot(true, &[])?;
        for index in 0..self.hosts.len() {
            self.start_clients(index);
        }
        for round in &self.plan.rounds {
            self.play_round(round)?;
        }
        self.settle()?;
        self.check_disk()?;
        let shared = self.shared.borrow();
        self.figures.operations = shared.answered;
        self.figures.served = shared.served;
        (self.figures.moved, self.figures.held) = self.machine.moved_and_held();
        self.figures.elapsed = self.world.now();
        self.figures.device_errors = self.faults.failed();
        self.figures.trace = mix(self.world.trace() ^ shared.history.digest());
        Ok(())
    }

    fn keys(&self) -> Vec<Key> {
        self.shared.borrow().history.keys().to_vec()
    }

    fn start_clients(&mut self, index: usize) {
        let host = &self.hosts[index];
        let handle = handle_without_devices(&self.world, host.host);
        let (node, random) = (self.machine.address(), self.random.fork());
        let mut clients = Clients::new(&self.world, host, node, random, handle.clone(), &self.shared);
        self.world.add_reactor(host.host, handle, move |now| clients.turn(now));
    }

    /// Runs until `done`; an error when that takes longer than anything may.
    fn wait(&mut self, what: &str, mut done: impl FnMut(&Machine) -> bool) -> Result<(), String> {
        let deadline = self.world.now() + PATIENCE;
        let (world, machine, shared) = (self.world.clone(), &self.machine, Rc::clone(&self.shared));
        let finished = world.run_while_not(deadline, || shared.borrow().failure.is_some() || done(machine));
        self.failure()?;
        if finished { Ok(()) } else { Err(format!("standstill: {what} never comes to its end")) }
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
        for fault in &round.faults {
            self.run_to(begun + fault.after)?;
            self.begin(fault.kind, self.world.now() + fault.lasts);
        }
        self.run_to(begun + round.operations)?;
        match &round.end {
            End::Rest => self.settle()?,
            End::Rot { records, metadata, restart } => {
                self.settle()?;
                self.rot(*records, *metadata);
                if *restart || *metadata {
                    self.restart()?;
                } else {
                    self.audit_at_rest()?;
                }
            }
            End::Restart => {
                self.rest()?;
                self.restart()?;
            }
            End::Crash { stop, steps, again } => {
                for _ in 0..*steps {
                    self.world.step(Nanos::NEVER);
                }
                self.crash(*stop);
                self.heal();
                self.boot(false, again)?;
            }
        }
        self.failure()
    }

    /// Runs until so many commands are answered, ending faults whose time is over.
    fn run_to(&mut self, answered: u64) -> Result<(), String> {
        let mut deadline = self.world.now() + PATIENCE;
        loop {
            let next = self.active.iter().map(|(until, _)| *until).min().unwrap_or(Nanos::NEVER);
            let shared = Rc::clone(&self.shared);
            let done = || {
                let shared = shared.borrow();
                shared.answered >= answered || shared.failure.is_some()
            };
            let limit = next.min(deadline);
            if self.world.run_while_not(limit, done) {
                return self.failure();
            }
            let now = self.world.now();
            while let Some(at) = self.active.iter().position(|(until, _)| *until <= now) {
                let (_, kind) = self.active.swap_remove(at);
                self.end(kind);
                deadline = now + PATIENCE;
            }
            if now >= deadline {
                return Err("standstill: clients get no more answers".to_owned());
            }
        }
    }

    fn begin(&mut self, kind: FaultKind, until: Nanos) {
        let node = self.machine.host;
        match kind {
            FaultKind::Reset { host } => {
                self.world.reset_streams(self.hosts[host].host, node);
                return;
            }
            FaultKind::Partition { host } => self.world.set_partitioned(self.hosts[host].host, node, true),
            FaultKind::SlowLink { host, link } => self.world.set_link(self.hosts[host].host, node, link),
            FaultKind::HostDies { host, .. } if self.is_dead(host) => return,
            FaultKind::HostDies { host, stop } => {
                self.world.stop_host(self.hosts[host].host, stop);
                self.hosts[host].live.set(0);
            }
            FaultKind::SlowDisk { .. } | FaultKind::DiskErrors { .. } => self.faults.begin(kind),
        }
        self.active.push((until, kind));
    }

    fn is_dead(&self, index: usize) -> bool {
        let dies = |kind: &FaultKind| matches!(kind, FaultKind::HostDies { host, .. } if *host == index);
        self.active.iter().any(|(_, kind)| dies(kind))
    }

    fn end(&mut self, kind: FaultKind) {
        let node = self.machine.host;
        match kind {
            FaultKind::Reset { .. } => {}
            FaultKind::Partition { host } => self.world.set_partitioned(self.hosts[host].host, node, false),
            FaultKind::SlowLink { host, .. } => {
                self.world.set_link(self.hosts[host].host, node, self.plan.link);
            }
            FaultKind::HostDies { host, .. } => {
                self.world.start_host(self.hosts[host].host);
                self.start_clients(host);
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

    /// Has every client leave, and waits until nothing is in use.
    fn rest(&mut self) -> Result<(), String> {
        self.heal();
        self.shared.borrow_mut().resting = true;
        let lives: Vec<Rc<Cell<usize>>> = self.hosts.iter().map(|host| Rc::clone(&host.live)).collect();
        self.wait("the leaving of clients", |_| lives.iter().all(|live| live.get() == 0))?;
        self.machine.watch(true);
        let rested = self.wait("the node's work for clients that left", Machine::is_at_rest);
        if let Err(what) = rested {
            return Err(format!("{what} ({})", self.machine.leak().unwrap_or_default()));
        }
        // The volume notes in its journal that all is durable.
        self.world.run_until(self.world.now() + SETTLING);
        self.wait("the node's own work", Machine::is_at_rest)?;
        self.machine.watch(false);
        self.machine.leak().map_or(Ok(()), |leak| Err(format!("a leak: {leak}")))
    }

    /// Brings everything to rest and looks up what every key holds.
    fn settle(&mut self) -> Result<(), String> {
        self.rest()?;
        if self.faults.writes_failed() > self.writes_failed {
            // A batch of the journal whose write failed may show only after a restart.
            self.crash(Stop::Killed);
            self.boot(false, &[])?;
            return self.rest();
        }
        self.audit_at_rest()
    }

    fn audit_at_rest(&mut self) -> Result<(), String> {
        let later = self.machine.audit(self.keys());
        let found = self.result_of("the audit", &later)?;
        self.take_audit(found)
    }

    fn result_of<T>(&mut self, what: &str, later: &Later<T>) -> Result<T, String> {
        self.wait(what, |_| later.borrow().is_some())?;
        later.borrow_mut().take().ok_or_else(|| format!("{what} left nothing"))
    }

    /// Closes the node in order and starts it again.
    fn restart(&mut self) -> Result<(), String> {
        let later = self.machine.close();
        match self.result_of("closing", &later)? {
            Ok(()) => {}
            Err(_) if self.faults.failed() > 0 => {}
            Err(fault) => return Err(format!("closing failed: {fault}")),
        }
        self.count_checkpoints();
        self.shared.borrow_mut().history.open = false;
        self.machine.stop(Stop::Killed);
        self.boot(false, &[])
    }

    fn count_checkpoints(&mut self) {
        if let Some(volume) = self.machine.volume() {
            self.figures.checkpoints += volume.statistics().checkpoints;
        }
    }

    fn crash(&mut self, stop: Stop) {
        self.count_checkpoints();
        self.shared.borrow_mut().history.open = false;
        self.figures.crashes += 1;
        let loses = matches!(stop, Stop::PowerCut(plan) if plan != CrashPlan::KeepAll);
        self.relaxed |= loses && self.plan.node.durability == Durability::Device;
        self.machine.stop(stop);
    }

    /// Starts the node, dying `again` on the way, and audits it before anybody can connect.
    fn boot(&mut self, first: bool, again: &[(Nanos, Stop)]) -> Result<(), String> {
        let keys = self.keys();
        let mut later = self.machine.boot(keys.clone(), first);
        for &(after, stop) in again {
            self.world.run_until(self.world.now() + after);
            self.crash(stop);
            later = self.machine.boot(keys.clone(), first);
        }
        let opened: Opened = self.result_of("recovery", &later)?;
        let (volume, found) = opened.map_err(|error| format!("the node does not open its disk: {error}"))?;
        self.take_audit(found)?;
        self.machine.serve(volume);
        self.writes_failed = self.faults.writes_failed();
        self.shared.borrow_mut().history.open = true;
        Ok(())
    }

    /// Takes in what every key holds: no order of calls may contradict it.
    fn take_audit(&mut self, found: Vec<Audited>) -> Result<(), String> {
        let shared = Rc::clone(&self.shared);
        let history = &mut shared.borrow_mut().history;
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(self.state_of(history, key, audited)?);
        }
        let relaxed = std::mem::take(&mut self.relaxed);
        let mut before = Vec::new();
        for (key, state) in states.iter().enumerate() {
            before.push(history.events(key).len());
            if relaxed && *state != State::Damaged {
                let may = survivors(&history.starts()[key..=key], history.events(key), history.flushes());
                if !is_one_of(*state, &may) {
                    let key = &history.keys()[key];
                    return Err(format!("after the power cut {key} holds {state:?}, not one of {may:?}"));
                }
            }
        }
        history.audited(&states);
        for key in 0..states.len() {
            let events = match relaxed || states[key] == State::Damaged {
                true => &history.events(key)[..before[key]],
                false => history.events(key),
            };
            match explain(history.starts()[key], events) {
                Verdict::Explained => {}
                Verdict::Undecided => self.figures.undecided += 1,
                Verdict::Unexplained => return Err(unexplained(history, key, events)),
            }
        }
        history.next_segment(states);
        Ok(())
    }

    fn state_of(&self, history: &History, key: usize, audited: Audited) -> Result<State, String> {
        let name = &history.keys()[key];
        match audited {
            Audited::Missing => Ok(State::Missing),
            Audited::Value(bytes) => match history.identify(key, &bytes, bytes.len() as u32)? {
                Seen::Value(operation) => Ok(State::Holds { operation, bytes: history.length_of(operation) }),
                _ => Ok(State::Holds { operation: 0, bytes: 0 }),
            },
            Audited::Damaged(lba) => {
                if self.rotten.iter().any(|&at| self.machine.record_holds(lba, at)) {
                    return Ok(State::Damaged);
                }
                Err(format!("{name}: the record at block {lba} is damaged, and nothing rotted there"))
            }
            Audited::Failed(fault) => Err(format!("{name} cannot be read: {fault}")),
        }
    }

    /// Lets bits rot: among the records, and in the first copy of the metadata.
    fn rot(&mut self, records: u64, metadata: bool) {
        let Some(superblock) = self.machine.superblock() else { return };
        let unit = u64::from(superblock.unit_bytes);
        let (first, end) = (superblock.data_first * unit, superblock.units() * unit);
        for _ in 0..records {
            // Where something lies, if it is found soon.
            for _ in 0..50 {
                let at = first + self.random.below(end - first);
                if self.machine.rot(at, self.random.below(8) as u8) {
                    self.rotten.push(at);
                    self.figures.rotten_bits += 1;
                    break;
                }
            }
        }
        if metadata {
            let journal = superblock.journal_first(0) * unit;
            let area = superblock.area_first(self.random.below(2) as u8, 0) * unit;
            let spans = [
                (0, 2 * superblock::STRIDE),
                (journal, u64::from(superblock.journal_units) * unit),
                (area, superblock.area_units * unit),
            ];
            let (start, bytes) = spans[self.random.below(3) as usize];
            for _ in 0..50 {
                if self.machine.rot(start + self.random.below(bytes), self.random.below(8) as u8) {
                    self.figures.rotten_bits += 1;
                    break;
                }
            }
        }
    }

    /// The stopped node's disk, read from end to end: it holds what the last audit found, and nothing is
    /// wrong with it but what rotted.
    fn check_disk(&mut self) -> Result<(), String> {
        self.count_checkpoints();
        let used = self.machine.volume().map(|volume| volume.statistics().used_bytes);
        self.shared.borrow_mut().history.open = false;
        self.machine.stop(Stop::Killed);
        let later = self.machine.check();
        let report = self.result_of("the check", &later)?;
        let report = report.map_err(|error| format!("the disk cannot be checked: {error}"))?;
        for problem in &report.problems {
            if !self.rotten.iter().any(|&at| self.machine.record_holds(problem.lba, at)) {
                return Err(format!("check finds: {problem}"));
            }
        }
        let present = |state: &&State| **state != State::Missing;
        let keys = self.shared.borrow().history.starts().iter().filter(present).count() as u64;
        if report.keys != keys {
            return Err(format!("check finds {} keys, the node served {keys}", report.keys));
        }
        if Some(report.used_bytes) != used {
            return Err(format!("check finds {} B in use, the node said {used:?}", report.used_bytes));
        }
        Ok(())
    }
}

mod superblock {
    pub const STRIDE: u64 = octokv_engine::hash::superblock::SUPERBLOCK_STRIDE_BYTES;
}

/// What is said of calls that no order explains.
pub(crate) fn unexplained(history: &History, key: usize, events: &[crate::history::Event]) -> String {
    let mut text = format!("no order explains the calls of {}", history.keys()[key]);
    text.push_str(&format!(", which held {:?} at first:\n", history.starts()[key]));
    let mut sorted = events.to_vec();
    sorted.sort_by_key(|event| event.began);
    for event in &sorted[sorted.len().saturating_sub(60)..] {
        let ended = if event.ended == u64::MAX { "never".to_owned() } else { event.ended.to_string() };
        text.push_str(&format!(
            "  {:>7} to {ended:>7}  {:?} -> {:?}\n",
            event.began, event.call, event.outcome
        ));
    }
    text
}
