//! One node and its clients in a world of their own, run for a time or for a number of requests.
//!
//! ```text
//!   new: format, open ─▶ six cores ─▶ for each flow a session of six queues ─▶ which core has which? ─▶ (gets: keys are stored)
//!   run_for, run_requests: Figures    run_flows_for: Together     set: another policy, from the next window on
//! ```
//! In: a [`Trial`] of one flow or a [`FlowsTrial`] of several. Out: [`Figures`] of each run, or what went wrong. Cores are
//! told in the order of the first flow's connections, whatever core of the node each came to; the other flows' connections
//! are put into that order, so that a place has one core for all.
//!
//! Invariants: after [`Bench::run_requests`] nothing is outstanding, so every stage has had every request; a trial of one flow
//! and a [`FlowsTrial`] of the same are the same run, bit for bit.

use super::metrics::{Counted, Figures};
use super::node::{LIMIT, NQN, Node, POOL_BYTES, handle_on};
use super::parameters::{CORES, KEYS_READ, Operation, drive, wire};
use super::ssd_device::Flash;
use super::tenant_metrics::{FlowsTrial, Together, name_of};
use super::workload::{Client, Load, Placement};
use octokv_base::{Nanos, Random};
use octokv_client::{Session, Settings as ClientSettings};
use octokv_device::ssd_model::Model;
use octokv_node::Costs;
use octokv_node::core_metrics::Seen;
use octokv_node::monitor::{Scheduling, Window};
use octokv_runtime::Doorbell;
use octokv_runtime::simulated::{HostId, Stop, VirtualWorld, WorldSettings};
use octokv_sched::{FlowId, Settings};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// A turn that charges nothing takes this.
const TURN: Nanos = Nanos(100);
/// What is tried.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a request costs a core.
    pub costs: Costs,
    /// Put or get.
    pub operation: Operation,
    /// Threads of the client.
    pub threads: usize,
    /// Which connection a request goes over.
    pub placement: Placement,
    /// Who runs what where.
    pub scheduling: Settings,
    /// Whether the engine keeps its journal. The paper's says nothing of one; ours loses all without.
    pub journal: bool,
}

/// One tenant: a host with threads of its own.
struct Tenant {
    machine: HostId,
    load: Rc<RefCell<Load>>,
}

/// A world in which it is.
pub struct Bench {
    world: VirtualWorld,
    node: HostId,
    tenants: Vec<Tenant>,
    scheduling: Arc<Scheduling>,
    /// By connection: its core.
    core_of: Vec<usize>,
}

impl Bench {
    /// Everything up to the first operation that counts.
    ///
    /// # Errors
    /// What went wrong.
    pub fn new(trial: &Trial) -> Result<Bench, String> {
        Bench::with_flows(&FlowsTrial::alone(trial))
    }

    /// The same for several flows.
    ///
    /// # Errors
    /// What went wrong.
    pub fn with_flows(trial: &FlowsTrial) -> Result<Bench, String> {
        let world = VirtualWorld::new(WorldSettings { turn_cost: TURN, ..WorldSettings::new(trial.seed) });
        let node = world.add_host();
        let mut tenants: Vec<Tenant> = Vec::new();
        for number in 0..trial.flows.len() {
            let shared = tenants.first().filter(|_| trial.one_machine).map(|first| first.machine);
            let machine = shared.unwrap_or_else(|| world.add_host());
            world.set_link(machine, node, wire(false));
            tenants.push(Tenant { machine, load: Load::new(number as u32, CORES) });
        }
        let scheduling = Scheduling::new(CORES, trial.scheduling.clone(), || Nanos::ZERO);
        let scheduling = Arc::new(scheduling.map_err(|error| error.to_string())?);
        let mut bench = Bench { world, node, tenants, scheduling, core_of: (0..CORES).collect() };
        let flash = Flash::new(Model::new(drive(), 4096));
        bench.serve(&flash, trial)?;
        for flow in 0..trial.flows.len() {
            bench.connect(flow, trial.seed)?;
            bench.find_cores(flow)?;
        }
        // Only now: connections that overtake each other would come to other cores.
        for tenant in &bench.tenants {
            bench.world.set_link(tenant.machine, node, wire(true));
        }
        if trial.operation == Operation::Get {
            for flow in 0..trial.flows.len() {
                bench.set_load(flow, Operation::Put, CORES, Placement::InOrder(1));
                let missing = KEYS_READ - bench.tenants[flow].load.borrow().stored;
                bench.run_requests(u64::from(missing))?;
                bench.set_load(flow, Operation::Put, 0, Placement::InOrder(1));
            }
        }
        for (flow, load) in trial.flows.iter().enumerate() {
            bench.set_load(flow, trial.operation, load.threads, load.placement.clone());
        }
        Ok(bench)
    }

    /// Another policy, from the end of the window that runs on.
    pub fn set_policy(&self, settings: Settings) -> Result<(), String> {
        self.scheduling.set(settings).map_err(|error| error.to_string())
    }

    /// Runs for so long; operations go on.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_for(&self, span: Nanos) -> Result<Figures, String> {
        self.run_flows_for(span).map(|together| together.whole)
    }

    /// The same, with each flow's figures and what the node's monitor found.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_flows_for(&self, span: Nanos) -> Result<Together, String> {
        self.loads().for_each(|mut load| load.allowed = u64::MAX);
        let (began, before) = self.begin();
        let mut windows: Vec<Arc<Window>> = Vec::new();
        let mut known = self.scheduling.windows();
        // Without a stop of its own: at each, reactors that have nothing to do would have a turn.
        self.world.run_while_not(began + span, || {
            if self.scheduling.windows() > known
                && let Some(window) = self.scheduling.window()
            {
                known = window.number;
                windows.push(window);
            }
            false
        });
        self.end(began, &before, &windows)
    }

    /// Runs so many operations of each flow that has threads, to the last answer.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_requests(&self, requests: u64) -> Result<Figures, String> {
        self.run_flows_requests(requests).map(|together| together.whole)
    }

    /// The same, with each flow's figures.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_flows_requests(&self, requests: u64) -> Result<Together, String> {
        self.drain()?;
        let (began, before) = self.begin();
        for mut load in self.loads().filter(|load| load.threads > 0) {
            load.allowed = load.asked + requests;
        }
        self.drain_to(|load| load.asked >= load.allowed)?;
        self.end(began, &before, &[])
    }

    fn loads(&self) -> impl Iterator<Item = std::cell::RefMut<'_, Load>> {
        self.tenants.iter().map(|tenant| tenant.load.borrow_mut())
    }

    /// Waits until nothing is outstanding.
    fn drain(&self) -> Result<(), String> {
        self.loads().for_each(|mut load| load.allowed = load.asked);
        self.drain_to(|_| true)
    }

    fn drain_to(&self, also: impl Fn(&Load) -> bool) -> Result<(), String> {
        let is_done = |load: &Load| also(load) && load.answered == load.asked;
        let ended = || {
            self.tenants.iter().any(|tenant| tenant.load.borrow().failure.is_some())
                || self.tenants.iter().all(|tenant| is_done(&tenant.load.borrow()))
        };
        let is_over = self.world.run_while_not(self.world.now() + LIMIT, ended);
        self.failure()?;
        if is_over { Ok(()) } else { Err("operations were not answered".to_owned()) }
    }

    fn begin(&self) -> (Nanos, Vec<Seen>) {
        let now = self.world.now();
        self.loads().for_each(|mut load| drop(load.take_counted(now)));
        (now, self.seen())
    }

    fn end(&self, began: Nanos, before: &[Seen], windows: &[Arc<Window>]) -> Result<Together, String> {
        self.failure()?;
        let now = self.world.now();
        let counted: Vec<Counted> = self.loads().map(|mut load| load.take_counted(now)).collect();
        let (span, after) = (now.since(began), self.seen());
        let flows: Vec<Option<FlowId>> = (0..self.tenants.len()).map(|flow| self.flow_of(flow)).collect();
        Ok(Together::new(span, before, &after, counted, &flows, windows))
    }

    /// Which flow of the node's a tenant is.
    fn flow_of(&self, tenant: usize) -> Option<FlowId> {
        let name = name_of(tenant);
        self.scheduling.flows().names().into_iter().find(|(_, host)| *host == name).map(|(flow, _)| flow)
    }

    fn failure(&self) -> Result<(), String> {
        self.loads().find_map(|load| load.failure.clone()).map_or(Ok(()), Err)
    }

    /// What cores have done, in the order of the connections.
    fn seen(&self) -> Vec<Seen> {
        self.core_of.iter().map(|&core| self.scheduling.boards()[core].seen()).collect()
    }

    fn set_load(&self, flow: usize, operation: Operation, threads: usize, placement: Placement) {
        let mut load = self.tenants[flow].load.borrow_mut();
        (load.operation, load.threads, load.placement) = (operation, threads, placement);
    }

    fn serve(&self, flash: &Rc<RefCell<Flash>>, trial: &FlowsTrial) -> Result<(), String> {
        let node = self.node_of(trial.costs, trial.journal);
        let volume = node.open(flash)?;
        node.serve(flash, &volume);
        Ok(())
    }

    fn node_of(&self, costs: Costs, journal: bool) -> Node<'_> {
        Node { world: &self.world, host: self.node, scheduling: &self.scheduling, costs, journal }
    }

    fn connect(&self, flow: usize, seed: u64) -> Result<(), String> {
        let defaults = ClientSettings::default();
        let mut host_id = defaults.host_id;
        // The same name always comes with the same identifier, and another with another.
        host_id[15] = host_id[15].wrapping_add(flow as u8);
        let settings = ClientSettings {
            subsystem: NQN.to_owned(),
            host: name_of(flow),
            host_id,
            queues: CORES as u16,
            depth: 64,
            receive_bytes: 64 << 10,
            pool_bytes: POOL_BYTES,
            ..defaults
        };
        let (machine, load) = (self.tenants[flow].machine, &self.tenants[flow].load);
        let address = self.node_of(Costs::default(), false).address();
        let session = Session::new(self.world.sockets(machine), address, settings, self.world.now());
        let handle = handle_on(&self.world, machine, Doorbell::silent());
        let random = Random::new(octokv_base::prng::mix(seed.wrapping_add((flow as u64) << 32)));
        let mut client = Client::new(session, handle.clone(), Rc::clone(load), random);
        self.world.add_reactor(machine, handle, move |now| client.turn(now));
        let is_live = || load.borrow().live || load.borrow().failure.is_some();
        let is_over = self.world.run_while_not(self.world.now() + LIMIT, is_live);
        self.failure()?;
        if is_over { Ok(()) } else { Err("a session was not taken in".to_owned()) }
    }

    /// Has one operation go over each connection of a flow, to see on which core it is. The first flow's say in which order
    /// cores are told, and the others are put into that order.
    fn find_cores(&mut self, flow: usize) -> Result<(), String> {
        let mut found = Vec::new();
        for connection in 0..CORES {
            self.set_load(flow, Operation::Put, 1, Placement::One(connection));
            let figures = self.run_requests(1)?;
            found.push(figures.cores.iter().position(|core| core.target_events == 1).unwrap_or(CORES));
        }
        self.set_load(flow, Operation::Put, 0, Placement::InOrder(1));
        let mut sorted = found.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..CORES) {
            return Err(format!("the connections are on cores {found:?}, not on one each"));
        }
        if flow == 0 {
            self.core_of = found;
        } else {
            let place = |core| found.iter().position(|&at| at == core).unwrap_or(core);
            self.tenants[flow].load.borrow_mut().queues = (0..CORES).map(place).collect();
        }
        Ok(())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What the world holds holds the world: reactors, and what is still to happen.
        for tenant in &self.tenants {
            self.world.stop_host(tenant.machine, Stop::Killed);
        }
        self.world.stop_host(self.node, Stop::Killed);
        while self.world.step(Nanos::NEVER) {}
    }
}
