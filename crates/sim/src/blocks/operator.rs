//! Who changes a node while it runs: takes namespaces away and gives them back, turns hosts away and lets them in,
//! changes the access to groups of namespaces.
//!
//! In: a stream of random numbers; the node. Out: its changes, core by core with the world running in between, as
//! an order reaches the cores of a real node. Invariants: a namespace is given back only when the last request on
//! it from before has ended; one that never ends is a failure. A namespace's identifiers are its own: hosts
//! that were late would reach another's blocks.

use super::PROGRESS_TIMEOUT;
use super::clients::BlockRunState;
use super::node::BlockNodeUnderTest;
use super::scenario::BlockScenarioPlan;
use octokv_base::{NamespaceId, Nanos, Prng};
use octokv_nvmf::HostAcl;
use octokv_runtime::simulated::SimEnv;
use octokv_wire::log_page::AnaState;
use std::cell::RefCell;
use std::rc::Rc;

/// The longest time without a change where nobody is answered.
const CHANGE_INTERVAL_MAX: Nanos = Nanos::from_millis(50);
/// Groups of access that namespaces are in.
const ANA_GROUPS: u32 = 2;

/// The operator of a world.
pub struct Operator {
    random: Prng,
    disks: usize,
    hosts: Vec<String>,
    mean_interval: Option<u64>,
    next_at_completed: u64,
    next_time: Nanos,
    changes: u64,
}

impl Operator {
    /// One for these hosts.
    pub fn new(random: Prng, plan: &BlockScenarioPlan, hosts: Vec<String>) -> Operator {
        let (disks, every) = (plan.disks.len(), plan.operator_interval);
        let mut operator = Operator {
            random,
            disks,
            hosts,
            mean_interval: every,
            next_at_completed: 0,
            next_time: Nanos::NEVER,
            changes: 0,
        };
        operator.schedule_next(0, Nanos::ZERO);
        operator
    }

    /// After so many answers the next change is due.
    pub fn next_at_completed(&self) -> u64 {
        self.next_at_completed
    }

    /// And at this time at the latest.
    pub fn next_time(&self) -> Nanos {
        self.next_time
    }

    /// How many there were.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn schedule_next(&mut self, completed: u64, now: Nanos) {
        (self.next_at_completed, self.next_time) = match self.mean_interval {
            Some(every) => (completed + 1 + self.random.below(2 * every), now + CHANGE_INTERVAL_MAX),
            None => (u64::MAX, Nanos::NEVER),
        };
    }

    /// Lets the world go on for a moment, in the middle of a change.
    fn run_some_steps(&mut self, sim: &SimEnv) {
        for _ in 0..self.random.below(12) {
            sim.step(Nanos::NEVER);
        }
    }

    /// Changes one thing.
    pub fn apply_random_change(
        &mut self,
        sim: &SimEnv,
        node: &BlockNodeUnderTest,
        shared: &Rc<RefCell<BlockRunState>>,
    ) -> Result<(), String> {
        self.changes += 1;
        let disk = self.random.below(self.disks as u64) as usize;
        match self.random.below(6) {
            0..3 => {
                let served = shared.borrow().served_as[disk];
                match served {
                    Some(id) => self.remove_namespace(sim, node, shared, disk, id)?,
                    None => self.add_namespace(sim, node, shared, disk),
                }
            }
            3 => {
                let hosts = match self.random.one_in(3) {
                    true => HostAcl::Any,
                    false => {
                        let all = self.hosts.clone();
                        HostAcl::Listed(all.into_iter().filter(|_| !self.random.one_in(2)).collect())
                    }
                };
                if let Some(target) = node.target() {
                    target.set_host_acl(hosts);
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
                let group = 1 + self.random.below(u64::from(ANA_GROUPS)) as u32;
                let state = states[self.random.below(states.len() as u64) as usize];
                if let Some(target) = node.target() {
                    target.set_ana_state(group, state);
                }
            }
        }
        let completed = shared.borrow().completed;
        self.schedule_next(completed, sim.now());
        Ok(())
    }

    /// As the node adds one: every core serves it before hosts see it.
    fn add_namespace(
        &mut self,
        sim: &SimEnv,
        node: &BlockNodeUnderTest,
        shared: &Rc<RefCell<BlockRunState>>,
        disk: usize,
    ) {
        let second = if self.mean_interval.is_some() { self.random.below(2) as u32 } else { 0 };
        let id = NamespaceId(1 + 2 * disk as u32 + second);
        let volume = node.volume(disk);
        for core in 0..node.cores() {
            node.attach_namespace(core, disk, id, &volume);
            self.run_some_steps(sim);
        }
        node.publish_namespace(disk, id, 1 + disk as u32 % ANA_GROUPS);
        shared.borrow_mut().served_as[disk] = Some(id);
    }

    /// As the node removes one: hosts see it no more, then one core after another gives it up, the first one last.
    fn remove_namespace(
        &mut self,
        sim: &SimEnv,
        node: &BlockNodeUnderTest,
        shared: &Rc<RefCell<BlockRunState>>,
        disk: usize,
        id: NamespaceId,
    ) -> Result<(), String> {
        if let Some(target) = node.target() {
            target.remove_namespace(id);
        }
        shared.borrow_mut().served_as[disk] = None;
        for core in (0..node.cores()).rev() {
            self.run_some_steps(sim);
            let mut draining = BlockNodeUnderTest::new_draining();
            node.detach_namespace(core, id, &mut draining);
            let deadline = sim.now() + PROGRESS_TIMEOUT;
            if !sim.run_until_true(deadline, || draining.is_drained()) {
                return Err(format!("standstill: requests of {id}, which was removed, never end"));
            }
        }
        Ok(())
    }

    /// Has every disk served, every host let in and every group accessible.
    pub fn restore_defaults(
        &mut self,
        sim: &SimEnv,
        node: &BlockNodeUnderTest,
        shared: &Rc<RefCell<BlockRunState>>,
    ) -> Result<(), String> {
        if let Some(target) = node.target() {
            target.set_host_acl(HostAcl::Any);
            (1..=ANA_GROUPS).for_each(|group| target.set_ana_state(group, AnaState::Optimized));
        }
        for disk in 0..self.disks {
            let served = shared.borrow().served_as[disk];
            if served.is_none() {
                self.add_namespace(sim, node, shared, disk);
            }
        }
        let completed = shared.borrow().completed;
        self.schedule_next(completed, sim.now());
        Ok(())
    }
}
