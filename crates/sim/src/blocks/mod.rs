//! One world of namespaces of blocks, played from its plan to its end.
//!
//! ```text
//!   boot ─▶ audit ─▶ round: load, faults, an operator's changes ─▶ its end: rest, restart or crash ─▶ audit ─▶ …
//! ```
//! In: a [`plan::BlocksPlan`]. Out: figures, or the first promise that does not hold. A block is a register: from
//! audit to audit the calls on each must have an order ([`crate::register`]). After a power cut each holds what
//! was durable (written with FUA, or before a flush that was acknowledged) or something newer. Blocks that nobody
//! uses stay zero. At rest nothing may be in use; what leaves must end; every command is answered once.
//!
//! # Layout
//! - this file: the play. [`scenario`]: what happens. [`node`]: the node under test. [`clients`]: its clients.
//! - [`operator`]: who changes things while it runs.

pub mod clients;
pub mod node;
pub mod operator;
pub mod scenario;

use crate::client_host::Host;
use crate::faulty_disk::DiskFaults;
use crate::history::{Event, History, Seen, State};
use crate::linearizability::{Verdict, explain, is_one_of, survivors};
use crate::node_under_test::handle_without_devices;
use crate::runner::{Figures, unexplained};
use crate::scenario::{End, FaultKind, HostPlan, Round};
use clients::{Clients, Shared, seen};
use node::Node;
use octokv_base::prng::mix;
use octokv_base::{Key, Nanos, Random};
use octokv_runtime::simulated::{CrashPlan, Stop, VirtualWorld, WorldSettings};
use operator::Operator;
use scenario::{BlocksPlan, DiskPlan};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// How long anything may take in virtual time once nothing is wrong any more.
pub(crate) const PATIENCE: Nanos = Nanos::from_secs(60);

struct Play<'a> {
    plan: &'a BlocksPlan,
    world: VirtualWorld,
    random: Random,
    node: Node,
    operator: Operator,
    hosts: Vec<Host>,
    shared: Rc<RefCell<Shared>>,
    faults: DiskFaults,
    /// Faults in force, and until when.
    active: Vec<(Nanos, FaultKind)>,
    /// Whether what was acknowledged since the last audit and not flushed may be lost.
    relaxed: bool,
    /// What each block of each disk may hold after a power cut now, as far as earlier segments go.
    floors: Vec<Vec<Vec<State>>>,
    figures: Figures,
}

/// Plays a plan. The error says what does not hold.
pub fn play(plan: &BlocksPlan) -> Result<Figures, String> {
    let mut play = Play::new(plan);
    let played = play.run();
    let at = play.world.now();
    played.map_err(|what| format!("at {} ns, {} core(s): {what}", at.0, plan.node.cores))?;
    Ok(play.figures)
}

/// The name of a block in histories; its contents depend on it.
fn cell_name(disk: usize, cell: u64) -> Key {
    Key::new(format!("disk {disk} block {cell}").as_bytes()).expect("short")
}

impl<'a> Play<'a> {
    fn new(plan: &'a BlocksPlan) -> Play<'a> {
        let mut random = Random::new(mix(plan.seed ^ 0xb10c));
        let settings = WorldSettings { seed: random.next_u64(), turn_cost: plan.turn_cost, link: plan.link };
        let world = VirtualWorld::new(settings);
        let faults = DiskFaults::new(random.fork());
        let node = Node::new(&world, plan, faults.clone());
        let history = |(disk, plan): (usize, &DiskPlan)| {
            History::new((0..plan.count).map(|cell| cell_name(disk, cell)).collect())
        };
        let shared = Rc::new(RefCell::new(Shared {
            histories: plan.disks.iter().enumerate().map(history).collect(),
            disks: plan.disks.clone(),
            served_as: vec![None; plan.disks.len()],
            load: plan.load,
            bytes_max: u64::from(plan.node.value_bytes_max),
            asked: 0,
            limit: 0,
            answered: 0,
            served: 0,
            turned_away: 0,
            failure: None,
            faults: faults.clone(),
            resting: false,
            changes: plan.operator.is_some(),
            prompt: !plan.may_time_out(),
        }));
        let host = |plan: &HostPlan| Host { host: world.add_host(), plan: *plan, live: Rc::default() };
        let hosts: Vec<Host> = plan.hosts.iter().map(host).collect();
        let names = hosts.iter().map(|host| format!("nqn.2026-11.io.octokv:client-{}", host.host.0));
        let operator = Operator::new(random.fork(), plan, names.collect());
        Play {
            plan,
            world,
            random,
            node,
            operator,
            hosts,
            shared,
            faults,
            active: Vec::new(),
            relaxed: false,
            floors: plan.disks.iter().map(|disk| vec![vec![State::Missing]; disk.count as usize]).collect(),
            figures: Figures::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot()?;
        for index in 0..self.hosts.len() {
            self.start_clients(index);
        }
        for round in &self.plan.rounds {
            self.play_round(round)?;
        }
        self.settle()?;
        let shared = self.shared.borrow();
        self.figures.operations = shared.answered;
        self.figures.served = shared.served;
        self.figures.turned_away = shared.turned_away;
        self.figures.changes = self.operator.changes();
        (self.figures.moved, self.figures.held) = self.node.moved_and_held();
        self.figures.elapsed = self.world.now();
        self.figures.device_errors = self.faults.failed();
        let digest = shared.histories.iter().fold(0, |sum, history| mix(sum ^ history.digest()));
        self.figures.trace = mix(self.world.trace() ^ digest);
        Ok(())
    }

    fn start_clients(&mut self, index: usize) {
        let host = &self.hosts[index];
        let handle = handle_without_devices(&self.world, host.host);
        let (node, random) = (self.node.address(), self.random.fork());
        let mut clients = Clients::new(&self.world, host, node, random, handle.clone(), &self.shared);
        self.world.add_reactor(host.host, handle, move |now| clients.turn(now));
    }

    /// Runs until `done`; an error when that takes longer than anything may.
    fn wait(&mut self, what: &str, mut done: impl FnMut(&Node) -> bool) -> Result<(), String> {
        let deadline = self.world.now() + PATIENCE;
        let (world, node, shared) = (self.world.clone(), &self.node, Rc::clone(&self.shared));
        let finished = world.run_while_not(deadline, || shared.borrow().failure.is_some() || done(node));
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
            End::Rest | End::Rot { .. } => self.settle()?,
            End::Restart => {
                self.rest()?;
                self.stop(Stop::Killed);
                self.boot()?;
            }
            End::Crash { stop, steps, again } => {
                for _ in 0..*steps {
                    self.world.step(Nanos::NEVER);
                }
                self.crash(*stop);
                self.heal();
                self.boot()?;
                for &(after, stop) in again {
                    self.world.run_until(self.world.now() + after);
                    self.crash(stop);
                    self.boot()?;
                }
            }
        }
        self.failure()
    }

    /// Runs until so many commands are answered, ending faults whose time is over and letting the operator work.
    fn run_to(&mut self, answered: u64) -> Result<(), String> {
        let mut deadline = self.world.now() + PATIENCE;
        loop {
            let next = self.active.iter().map(|(until, _)| *until).min().unwrap_or(Nanos::NEVER);
            let shared = Rc::clone(&self.shared);
            let stop_at = answered.min(self.operator.next_at());
            let done = || {
                let shared = shared.borrow();
                shared.answered >= stop_at || shared.failure.is_some()
            };
            let operator_at = self.operator.next_time();
            if self.world.run_while_not(next.min(deadline).min(operator_at), done) {
                self.failure()?;
                if self.shared.borrow().answered >= answered {
                    return Ok(());
                }
            }
            let now = self.world.now();
            if self.shared.borrow().answered >= self.operator.next_at() || now >= operator_at {
                self.operator.change(&self.world, &self.node, &self.shared)?;
                deadline = now + PATIENCE;
            }
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
        let node = self.node.host;
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
        let node = self.node.host;
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
        self.node.watch(true);
        let rested = self.wait("the node's work for clients that left", Node::is_at_rest);
        if let Err(what) = rested {
            return Err(format!("{what} ({})", self.node.leak().unwrap_or_default()));
        }
        self.operator.put_in_order(&self.world, &self.node, &self.shared)?;
        self.node.watch(false);
        self.node.leak().map_or(Ok(()), |leak| Err(format!("a leak: {leak}")))
    }

    /// Brings everything to rest and looks up what every block holds.
    fn settle(&mut self) -> Result<(), String> {
        self.rest()?;
        self.audit()
    }

    fn stop(&mut self, stop: Stop) {
        let mut shared = self.shared.borrow_mut();
        shared.histories.iter_mut().for_each(|history| history.open = false);
        shared.served_as.fill(None);
        drop(shared);
        self.node.stop(stop);
    }

    fn crash(&mut self, stop: Stop) {
        self.figures.crashes += 1;
        let stop = match stop {
            Stop::PowerCut(plan) => Stop::PowerCut(self.plan.cut(plan)),
            Stop::Killed => stop,
        };
        self.relaxed |= matches!(stop, Stop::PowerCut(plan) if plan != CrashPlan::KeepAll);
        self.stop(stop);
    }

    /// Audits the disks of the node, which is down, and starts it.
    fn boot(&mut self) -> Result<(), String> {
        self.audit()?;
        self.node.boot();
        self.shared.borrow_mut().histories.iter_mut().for_each(|history| history.open = true);
        self.operator.put_in_order(&self.world, &self.node, &self.shared)
    }

    /// Looks up what every block holds: no order of calls may contradict it.
    fn audit(&mut self) -> Result<(), String> {
        let relaxed = std::mem::take(&mut self.relaxed);
        for disk in 0..self.plan.disks.len() {
            let contents = self.node.contents(disk);
            let shared = Rc::clone(&self.shared);
            let history = &mut shared.borrow_mut().histories[disk];
            let states = self.states(disk, history, &contents)?;
            let before: Vec<usize> = (0..states.len()).map(|cell| history.events(cell).len()).collect();
            history.audited(&states);
            for (cell, &state) in states.iter().enumerate() {
                let all = history.events(cell);
                let events: &[Event] = if relaxed { &all[..before[cell]] } else { all };
                let floor = &mut self.floors[disk][cell];
                if !history.flushes().is_empty() {
                    // It covered whatever was there when the segment began.
                    *floor = vec![history.starts()[cell]];
                }
                let may = survivors(floor, &all[..before[cell]], history.flushes());
                if relaxed && !is_one_of(state, &may) {
                    let what = unexplained(history, cell, events);
                    return Err(format!("after the power cut {state:?} is not one of {may:?}: {what}"));
                }
                // What a power cut left is durable; otherwise it may be what it was, or anything since.
                *floor = if relaxed { Vec::new() } else { may };
                if !floor.contains(&state) {
                    floor.push(state);
                }
                match explain(history.starts()[cell], events) {
                    Verdict::Explained => {}
                    Verdict::Undecided => self.figures.undecided += 1,
                    Verdict::Unexplained => return Err(unexplained(history, cell, events)),
                }
            }
            history.next_segment(states);
        }
        Ok(())
    }

    fn states(&self, disk: usize, history: &History, contents: &[u8]) -> Result<Vec<State>, String> {
        let DiskPlan { block_bytes, first, count, .. } = self.plan.disks[disk];
        let (mut states, used) = (Vec::new(), first..first + count);
        for (lba, block) in (0..).zip(contents.chunks(block_bytes as usize)) {
            if used.contains(&lba) {
                let seen = seen(history, states.len(), block)?;
                states.push(match seen {
                    Seen::Value(operation) => State::Holds { operation, bytes: block_bytes },
                    _ => State::Missing,
                });
            } else if block.iter().any(|&byte| byte != 0) {
                return Err(format!("disk {disk}: block {lba}, which nobody uses, is not zero"));
            }
        }
        Ok(states)
    }
}
