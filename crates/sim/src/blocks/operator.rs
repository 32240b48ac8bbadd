//! Who changes a node while it runs: takes namespaces away and gives them back, turns hosts away and lets them in,
//! changes the access to groups of namespaces.
//!
//! In: a stream of random numbers; the node. Out: its changes, core by core with the world running in between, as
//! an order reaches the cores of a real node. Invariants: a namespace is given back only when the last request on
//! it from before has ended; one that never ends is a failure. A namespace's identifiers are its own: hosts
//! that were late would reach another's blocks.

use super::PATIENCE;
use super::clients::Shared;
use super::node::Node;
use super::scenario::BlocksPlan;
use octokv_base::{NamespaceId, Nanos, Random};
use octokv_nvmf::Hosts;
use octokv_runtime::simulated::VirtualWorld;
use octokv_wire::log_page::AnaState;
use std::cell::RefCell;
use std::rc::Rc;

/// The longest time without a change where nobody is answered.
const IMPATIENCE: Nanos = Nanos::from_millis(50);
/// Groups of access that namespaces are in.
const GROUPS: u32 = 2;

/// The operator of a world.
pub struct Operator {
    random: Random,
    disks: usize,
    hosts: Vec<String>,
    every: Option<u64>,
    next_at: u64,
    next_time: Nanos,
    changes: u64,
}

impl Operator {
    /// One for these hosts.
    pub fn new(random: Random, plan: &BlocksPlan, hosts: Vec<String>) -> Operator {
        let (disks, every) = (plan.disks.len(), plan.operator);
        let mut operator =
            Operator { random, disks, hosts, every, next_at: 0, next_time: Nanos::NEVER, changes: 0 };
        operator.plan_next(0, Nanos::ZERO);
        operator
    }

    /// After so many answers the next change is due.
    pub fn next_at(&self) -> u64 {
        self.next_at
    }

    /// And at this time at the latest.
    pub fn next_time(&self) -> Nanos {
        self.next_time
    }

    /// How many there were.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn plan_next(&mut self, answered: u64, now: Nanos) {
        (self.next_at, self.next_time) = match self.every {
            Some(every) => (answered + 1 + self.random.below(2 * every), now + IMPATIENCE),
            None => (u64::MAX, Nanos::NEVER),
        };
    }

    /// Lets the world go on for a moment, in the middle of a change.
    fn pause(&mut self, world: &VirtualWorld) {
        for _ in 0..self.random.below(12) {
            world.step(Nanos::NEVER);
        }
    }

    /// Changes one thing.
    pub fn change(
        &mut self,
        world: &VirtualWorld,
        node: &Node,
        shared: &Rc<RefCell<Shared>>,
    ) -> Result<(), String> {
        self.changes += 1;
        let disk = self.random.below(self.disks as u64) as usize;
        match self.random.below(6) {
            0..3 => {
                let served = shared.borrow().served_as[disk];
                match served {
                    Some(id) => self.remove(world, node, shared, disk, id)?,
                    None => self.add(world, node, shared, disk),
                }
            }
            3 => {
                let hosts = match self.random.one_in(3) {
                    true => Hosts::Any,
                    false => {
                        let all = self.hosts.clone();
                        Hosts::Listed(all.into_iter().filter(|_| !self.random.one_in(2)).collect())
                    }
                };
                if let Some(target) = node.target() {
                    target.set_hosts(hosts);
                }
            }
            _ => {
                let states = [
                    AnaState::Optimized,
                    AnaState::Optimized,
                    AnaState::NonOptimized,
                    AnaState::Inaccessible,
                    AnaState::PersistentLoss,
                    AnaState::Change,
                ];
                let group = 1 + self.random.below(u64::from(GROUPS)) as u32;
                let state = states[self.random.below(states.len() as u64) as usize];
                if let Some(target) = node.target() {
                    target.set_ana_state(group, state);
                }
            }
        }
        let answered = shared.borrow().answered;
        self.plan_next(answered, world.now());
        Ok(())
    }

    /// As the node adds one: every core serves it before hosts see it.
    fn add(&mut self, world: &VirtualWorld, node: &Node, shared: &Rc<RefCell<Shared>>, disk: usize) {
        let second = if self.every.is_some() { self.random.below(2) as u32 } else { 0 };
        let id = NamespaceId(1 + 2 * disk as u32 + second);
        let volume = node.volume(disk);
        for core in 0..node.cores() {
            node.attach(core, disk, id, &volume);
            self.pause(world);
        }
        node.show(disk, id, 1 + disk as u32 % GROUPS);
        shared.borrow_mut().served_as[disk] = Some(id);
    }

    /// As the node removes one: hosts see it no more, then one core after another gives it up, the first one last.
    fn remove(
        &mut self,
        world: &VirtualWorld,
        node: &Node,
        shared: &Rc<RefCell<Shared>>,
        disk: usize,
        id: NamespaceId,
    ) -> Result<(), String> {
        if let Some(target) = node.target() {
            target.remove_namespace(id);
        }
        shared.borrow_mut().served_as[disk] = None;
        for core in (0..node.cores()).rev() {
            self.pause(world);
            let mut leaving = Node::leaving();
            node.detach(core, id, &mut leaving);
            let deadline = world.now() + PATIENCE;
            if !world.run_while_not(deadline, || leaving.is_over()) {
                return Err(format!("standstill: requests of {id}, which was removed, never end"));
            }
        }
        Ok(())
    }

    /// Has every disk served, every host let in and every group accessible.
    pub fn put_in_order(
        &mut self,
        world: &VirtualWorld,
        node: &Node,
        shared: &Rc<RefCell<Shared>>,
    ) -> Result<(), String> {
        if let Some(target) = node.target() {
            target.set_hosts(Hosts::Any);
            (1..=GROUPS).for_each(|group| target.set_ana_state(group, AnaState::Optimized));
        }
        for disk in 0..self.disks {
            let served = shared.borrow().served_as[disk];
            if served.is_none() {
                self.add(world, node, shared, disk);
            }
        }
        let answered = shared.borrow().answered;
        self.plan_next(answered, world.now());
        Ok(())
    }
}
