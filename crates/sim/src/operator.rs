//! A simulated operator that reconfigures a running node: removes and adds namespaces, denies and allows hosts, changes
//! ANA states.
//!
//! In: a random number generator; the node. Out: changes, applied core by core while the simulation runs, with steps of
//! the simulation in between. Invariants: a disk gets a namespace only after the last request on
//! its previous one has ended; a request that never ends is a violation. Each disk has namespace identifiers of its
//! own: a late request of a host cannot reach another disk.

use crate::progress::TrackProgress;
use octokv_base::{NamespaceId, Nanos, Prng};
use octokv_node::control::CoreChangeError;
use octokv_nvmf::{HostAcl, Target};
use octokv_runtime::simulated::SimEnv;
use octokv_wire::Status;
use octokv_wire::log_page::AnaState;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// ANA groups that namespaces are assigned to.
pub const ANA_GROUPS: u32 = 2;
/// Maximum time between changes while no command completes.
const CHANGE_INTERVAL_MAX: Nanos = Nanos::from_millis(50);

/// Status codes of commands rejected, without effect, because of a change by the operator.
const REJECTED_STATUSES: [Status; 4] = [
    Status::INVALID_NAMESPACE,
    Status::ANA_INACCESSIBLE,
    Status::ANA_PERSISTENT_LOSS,
    Status::ANA_TRANSITION,
];

/// Whether a command was rejected, without effect, because of a change by the operator.
pub fn is_rejection(status: Status) -> bool {
    REJECTED_STATUSES.iter().any(|one| status.is(*one))
}

/// A node that serves each of its disks as one namespace, or as none.
pub trait ReconfigurableNode {
    /// The target, or `None` while the node is down.
    fn target(&self) -> Option<&Arc<Target>>;

    /// Serves a disk as a namespace, in the real node's order: attach on every core, then publish. `between` runs before each
    /// core.
    ///
    /// # Errors
    /// A core does not respond, or cannot open the disk.
    fn add_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError>;

    /// Removes a disk's namespace in the real node's order: unpublish, then detach from core after core. `between` runs before
    /// each core.
    ///
    /// # Errors
    /// A core does not respond: requests of the namespace do not end.
    fn remove_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError>;
}

/// A load that knows which namespace each disk is served as.
pub trait TrackNamespaces: TrackProgress {
    /// Current namespace of each disk; `None` while it has none.
    fn served_as(&mut self) -> &mut [Option<NamespaceId>];
}

/// Draws changes and their times.
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
    /// An operator of a node with `disks` disks, who changes something after `mean_interval` commands in the mean, or never, and
    /// allows or denies these host NQNs.
    pub fn new(random: Prng, disks: usize, mean_interval: Option<u64>, hosts: Vec<String>) -> Operator {
        let mut operator = Operator {
            random,
            disks,
            hosts,
            mean_interval,
            next_at_completed: 0,
            next_time: Nanos::NEVER,
            changes: 0,
        };
        operator.schedule_next(0, Nanos::ZERO);
        operator
    }

    /// Number of completed commands at which the next change is due.
    pub fn next_at_completed(&self) -> u64 {
        self.next_at_completed
    }

    /// Time at which the next change is due regardless of completed commands.
    pub fn next_time(&self) -> Nanos {
        self.next_time
    }

    /// Number of changes so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    fn schedule_next(&mut self, completed: u64, now: Nanos) {
        (self.next_at_completed, self.next_time) = match self.mean_interval {
            Some(every) => (completed + 1 + self.random.below(2 * every), now + CHANGE_INTERVAL_MAX),
            None => (u64::MAX, Nanos::NEVER),
        };
    }

    /// Steps the simulation between the parts of a change.
    fn run_some_steps(&mut self, sim: &SimEnv) {
        for _ in 0..self.random.below(12) {
            sim.step(Nanos::NEVER);
        }
    }

    /// The next identifier of a disk's namespace.
    fn next_id(&mut self, disk: usize) -> NamespaceId {
        let second = if self.mean_interval.is_some() { self.random.below(2) as u32 } else { 0 };
        NamespaceId(1 + 2 * disk as u32 + second)
    }

    /// The namespaces that a starting node serves, by disk.
    pub fn initial_namespaces(&mut self) -> Vec<NamespaceId> {
        (0..self.disks).map(|disk| self.next_id(disk)).collect()
    }

    /// Applies one random change and schedules the next.
    ///
    /// # Errors
    /// If a core does not respond: requests on a removed namespace do not end.
    pub fn apply_random_change(
        &mut self,
        sim: &SimEnv,
        node: &impl ReconfigurableNode,
        shared: &Rc<RefCell<impl TrackNamespaces>>,
    ) -> Result<(), String> {
        self.changes += 1;
        let disk = self.random.below(self.disks as u64) as usize;
        match self.random.below(6) {
            0..3 => {
                let served = shared.borrow_mut().served_as()[disk];
                match served {
                    Some(id) => self.remove_namespace(sim, node, shared, disk, id)?,
                    None => self.add_namespace(sim, node, shared, disk)?,
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
        let completed = shared.borrow().progress().completed;
        self.schedule_next(completed, sim.now());
        Ok(())
    }

    fn add_namespace(
        &mut self,
        sim: &SimEnv,
        node: &impl ReconfigurableNode,
        shared: &Rc<RefCell<impl TrackNamespaces>>,
        disk: usize,
    ) -> Result<(), String> {
        let id = self.next_id(disk);
        let added = node.add_namespace(disk, id, || self.run_some_steps(sim));
        added.map_err(|error| format!("{id} was not added: {error:?}"))?;
        shared.borrow_mut().served_as()[disk] = Some(id);
        Ok(())
    }

    fn remove_namespace(
        &mut self,
        sim: &SimEnv,
        node: &impl ReconfigurableNode,
        shared: &Rc<RefCell<impl TrackNamespaces>>,
        disk: usize,
        id: NamespaceId,
    ) -> Result<(), String> {
        shared.borrow_mut().served_as()[disk] = None;
        let removed = node.remove_namespace(disk, id, || self.run_some_steps(sim));
        removed.map_err(|error| {
            format!("no progress: requests of {id}, which was removed, do not end: {error:?}")
        })
    }

    /// Attaches every disk, allows every host and makes every ANA group optimized.
    ///
    /// # Errors
    /// If a core does not respond.
    pub fn restore_defaults(
        &mut self,
        sim: &SimEnv,
        node: &impl ReconfigurableNode,
        shared: &Rc<RefCell<impl TrackNamespaces>>,
    ) -> Result<(), String> {
        if let Some(target) = node.target() {
            target.set_host_acl(HostAcl::Any);
            (1..=ANA_GROUPS).for_each(|group| target.set_ana_state(group, AnaState::Optimized));
        }
        for disk in 0..self.disks {
            let served = shared.borrow_mut().served_as()[disk];
            if served.is_none() {
                self.add_namespace(sim, node, shared, disk)?;
            }
        }
        let completed = shared.borrow().progress().completed;
        self.schedule_next(completed, sim.now());
        Ok(())
    }
}
