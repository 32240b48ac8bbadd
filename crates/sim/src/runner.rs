//! The life of a simulation, the same for every kind: begin, phases, faults and their ends, quiesce, end.
//!
//! ```text
//!   begin ─▶ boot ─▶ phase: load and faults ─▶ its end: quiesce and audit, restart or crash ─▶ … ─▶ quiesce, audit ─▶ end
//! ```
//! In: a [`ScenarioRunner`], which adds its kind's node, clients and checks; the phases of its plan. Out: statistics, or
//! the first violation. Holds: what every kind has, a [`Simulation`]. Invariants: after quiescing no resource of the
//! node is in use; a step of the life ends within [`PROGRESS_TIMEOUT`] while no fault is active.
//! Tested by `crates/sim/tests/`.

use crate::clients::{ClientHost, Clients, Workload};
use crate::fault_injector::FaultInjector;
use crate::faulty_disk::DiskFaults;
use crate::node_under_test::handle_without_devices;
use crate::progress::TrackProgress;
use crate::scenario::{ClientHostPlan, FaultKind, Phase, PhaseEnd};
use crate::sim_node::NodesUnderTest;
use crate::stats::{PROGRESS_TIMEOUT, ScenarioStats};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimLinkConfig};
use std::cell::RefCell;
use std::rc::Rc;

/// A simulation: `N` is the node under test, or several, `W` what its clients share.
pub(crate) struct Simulation<N, W> {
    /// Clock, network and disks.
    pub sim: SimEnv,
    /// Random choices of the runner.
    pub random: Prng,
    /// The node under test, or several.
    pub node: N,
    /// Client hosts.
    pub hosts: Vec<ClientHost>,
    /// What the clients share.
    pub workload: Rc<RefCell<W>>,
    /// Faults of network, hosts and disks.
    pub faults: FaultInjector,
    /// Counters so far.
    pub stats: ScenarioStats,
}

impl<N: NodesUnderTest, W> Simulation<N, W> {
    /// A simulation at time zero: `node_count` stopped nodes, each with faults of its disks, and client hosts without
    /// clients. `seed` determines every random choice of the run; a reactor iteration takes `iteration_cost` at least;
    /// `link` are the links without a fault.
    pub fn begin(
        seed: u64,
        iteration_cost: Nanos,
        link: SimLinkConfig,
        hosts: &[ClientHostPlan],
        node_count: usize,
        make_node: impl FnOnce(&SimEnv, &[DiskFaults]) -> N,
        make_workload: impl FnOnce(&[DiskFaults]) -> W,
    ) -> Simulation<N, W> {
        let mut random = Prng::new(mix64(seed));
        let config = SimEnvConfig { seed: random.next_u64(), iteration_cost_min: iteration_cost, link };
        let sim = SimEnv::new(config);
        let disks: Vec<DiskFaults> = (0..node_count).map(|_| DiskFaults::new(random.fork())).collect();
        let node = make_node(&sim, &disks);
        let workload = Rc::new(RefCell::new(make_workload(&disks)));
        let hosts: Vec<ClientHost> = hosts.iter().map(|host| ClientHost::new(&sim, *host)).collect();
        let clients = hosts.iter().map(|host| host.id).collect();
        let nodes = node.sim_nodes().iter().map(|node| node.host).collect();
        let faults = FaultInjector::new(&sim, nodes, clients, link, disks);
        Simulation { sim, random, node, hosts, workload, faults, stats: ScenarioStats::default() }
    }

    /// Drops every reactor: clients hold the simulation, which holds them.
    fn end(&self) {
        let nodes = self.node.sim_nodes();
        let hosts = self.hosts.iter().map(|host| host.id).chain(nodes.iter().map(|node| node.host));
        hosts.for_each(|host| self.sim.stop_host(host, HostFailure::ProcessKilled));
    }
}

impl<N: NodesUnderTest, W: Workload + 'static> Simulation<N, W> {
    /// Starts the clients of a host, which connect to the nodes.
    pub fn start_clients(&mut self, host: usize) {
        let Simulation { sim, random, node, hosts, workload, .. } = self;
        let addresses = node.sim_nodes().iter().map(|node| node.address()).collect();
        let (host, random) = (&hosts[host], random.fork());
        let handle = handle_without_devices(sim, host.id);
        workload.borrow_mut().progress_mut().add_client(handle.core_waker());
        let mut clients = Clients::new(sim, host, addresses, random, handle.clone(), workload);
        sim.add_reactor(host.id, handle, move |now| clients.run_iteration(now));
    }
}

/// One kind of simulation: its node, clients and checks. Each error is the first violated guarantee.
pub(crate) trait ScenarioRunner {
    /// The node under test, or several.
    type Node: NodesUnderTest;
    /// What its clients share.
    type Workload: TrackProgress;

    /// The simulation.
    fn simulation(&self) -> &Simulation<Self::Node, Self::Workload>;

    /// The simulation, to change it.
    fn simulation_mut(&mut self) -> &mut Simulation<Self::Node, Self::Workload>;

    /// Audits the state that the nodes recover, and starts them.
    fn boot(&mut self) -> Result<(), String>;

    /// Stops a node.
    fn stop(&mut self, node: usize, failure: HostFailure);

    /// Starts the clients of a host: in the beginning, and after a fault that stopped the host.
    fn start_clients(&mut self, host: usize);

    /// Checks histories and state. REQUIRES: the node is quiescent.
    fn audit(&mut self) -> Result<(), String>;

    /// The end, after the last audit: further checks and counters.
    fn finish(&mut self) -> Result<(), String>;

    /// Hash of the histories, to compare two runs.
    fn digest(&self) -> u64;

    /// Notes that a fault has stopped a client host.
    fn note_stopped_clients(&mut self, host: usize) {
        self.simulation().hosts[host].session_count.set(0);
    }

    /// Does what the kind has due between two steps. True extends the time within which clients must progress.
    fn run_duties(&mut self) -> Result<bool, String> {
        Ok(false)
    }

    /// Time of the next duty; [`Nanos::NEVER`] without one.
    fn next_duty_at(&self) -> Nanos {
        Nanos::NEVER
    }

    /// Whether the clients have made a duty due.
    fn has_duty(&self, _workload: &Self::Workload) -> bool {
        false
    }

    /// Waits until every client has disconnected. REQUIRES: clients are quiescing.
    fn disconnect_clients(&mut self) -> Result<(), String> {
        let hosts = &self.simulation().hosts;
        self.wait_for("the disconnect of clients", |_| hosts.iter().all(|host| host.session_count.get() == 0))
    }

    /// Waits until the node without clients has nothing left to do.
    fn settle(&mut self) -> Result<(), String> {
        self.wait_until_quiescent("the node's work for disconnected clients")
    }

    /// Flips bits of the disk, as a phase end demands, and audits. REQUIRES: the node is quiescent and audited.
    fn corrupt_bits(&mut self, _records: u64, _metadata: bool, _restart: bool) -> Result<(), String> {
        Ok(())
    }

    /// Restarts the quiescent node.
    fn restart(&mut self) -> Result<(), String> {
        self.stop(0, HostFailure::ProcessKilled);
        self.boot()
    }

    /// Loses the disk of a node, and replaces node and disk by new ones this many simulation steps later.
    fn lose_disk(&mut self, _node: usize, _steps: u64) -> Result<(), String> {
        Ok(())
    }

    /// Begins work on a node that a crash is to interrupt. Gives the steps of the simulation until then, besides those of the plan.
    fn begin_work_before_crash(&mut self, _node: usize) -> u64 {
        0
    }

    /// Crashes a node.
    fn crash(&mut self, node: usize, failure: HostFailure) {
        self.simulation_mut().stats.crashes += 1;
        self.stop(node, failure);
    }

    /// Boots a crashed node, which crashes again at these times after each boot.
    fn recover(&mut self, node: usize, crashes_in_recovery: &[(Nanos, HostFailure)]) -> Result<(), String> {
        self.boot()?;
        for &(after, failure) in crashes_in_recovery {
            let sim = &self.simulation().sim;
            sim.run_until(sim.now() + after);
            self.run_duties()?;
            self.crash(node, failure);
            self.boot()?;
        }
        Ok(())
    }

    /// Takes the first violation that clients have found.
    fn take_violation(&self) -> Result<(), String> {
        self.simulation().workload.borrow_mut().progress_mut().take_violation()
    }

    /// Runs the simulation until `done`.
    fn wait_for(&self, what: &str, mut done: impl FnMut(&Self::Node) -> bool) -> Result<(), String> {
        let Simulation { sim, node, workload, .. } = self.simulation();
        let finished = sim.run_until_true(sim.now() + PROGRESS_TIMEOUT, || {
            workload.borrow().progress().violation.is_some() || done(node)
        });
        self.take_violation()?;
        if finished { Ok(()) } else { Err(format!("no progress: {what} does not end")) }
    }

    /// Waits until no connection, request or device operation of a node is left.
    fn wait_until_quiescent(&self, what: &str) -> Result<(), String> {
        let find_leak = || self.simulation().node.find_leak().unwrap_or_default();
        self.wait_for(what, NodesUnderTest::are_quiescent)
            .map_err(|message| format!("{message} ({})", find_leak()))
    }

    /// Runs the simulation until `done` is true. Meanwhile ends each fault at its end time and runs the duties that are
    /// due.
    fn run_until(&mut self, what: &str, done: impl Fn(&Self::Workload) -> bool) -> Result<(), String> {
        let (sim, workload) = (self.simulation().sim.clone(), Rc::clone(&self.simulation().workload));
        let mut deadline = sim.now() + PROGRESS_TIMEOUT;
        loop {
            if self.run_duties()? {
                deadline = sim.now() + PROGRESS_TIMEOUT;
            }
            self.take_violation()?;
            if done(&workload.borrow()) {
                return Ok(());
            }
            let limit = self.simulation().faults.next_end().min(deadline).min(self.next_duty_at());
            let has_event = || {
                let workload = workload.borrow();
                done(&workload) || workload.progress().violation.is_some() || self.has_duty(&workload)
            };
            if sim.run_until_true(limit, has_event) {
                continue;
            }
            let now = sim.now();
            while let Some(kind) = self.simulation_mut().faults.take_due(now) {
                self.end_fault(kind);
                deadline = now + PROGRESS_TIMEOUT;
            }
            if now >= deadline {
                return Err(format!("no progress: {what} does not happen"));
            }
        }
    }

    /// Runs until `completed` commands have completed.
    fn run_until_completed(&mut self, completed: u64) -> Result<(), String> {
        self.run_until("the completion of a command", |workload| workload.progress().completed >= completed)
    }

    /// Ends a fault; the clients of a host that it stopped start again.
    fn end_fault(&mut self, kind: FaultKind) {
        if let Some(host) = self.simulation_mut().faults.end(kind) {
            self.start_clients(host);
        }
    }

    /// Ends every active fault.
    fn end_all_faults(&mut self) {
        for kind in self.simulation_mut().faults.take_all() {
            self.end_fault(kind);
        }
    }

    /// Disconnects all clients and waits until no resource of the node is in use.
    fn quiesce(&mut self) -> Result<(), String> {
        self.end_all_faults();
        self.simulation().workload.borrow_mut().progress_mut().begin_quiescing();
        self.disconnect_clients()?;
        // Every core takes the messages that other cores have sent it.
        self.simulation().sim.step(Nanos::NEVER);
        self.settle()?;
        let leak = self.simulation().node.find_leak();
        leak.map_or(Ok(()), |leak| Err(format!("a leak: {leak}")))
    }

    /// Quiesces, then audits.
    fn quiesce_and_audit(&mut self) -> Result<(), String> {
        self.quiesce()?;
        self.audit()
    }

    /// Runs one phase with its faults and its end.
    fn run_phase(&mut self, phase: &Phase) -> Result<(), String> {
        let begun = self.simulation().workload.borrow_mut().progress_mut().begin_phase(phase);
        for fault in &phase.faults {
            self.run_until_completed(begun + fault.after_commands)?;
            if let Some(host) = self.simulation_mut().faults.begin(fault) {
                self.note_stopped_clients(host);
            }
        }
        self.run_until_completed(begun + phase.operations)?;
        match &phase.end {
            PhaseEnd::Quiesce => self.quiesce_and_audit()?,
            PhaseEnd::CorruptBits { records, metadata, restart } => {
                self.quiesce_and_audit()?;
                self.corrupt_bits(*records, *metadata, *restart)?;
            }
            PhaseEnd::Restart => {
                self.quiesce()?;
                self.restart()?;
            }
            PhaseEnd::Crash { node, stop, steps_before, crashes_in_recovery } => {
                let steps_of_work = self.begin_work_before_crash(*node);
                for _ in 0..steps_before + steps_of_work {
                    self.simulation().sim.step(Nanos::NEVER);
                }
                self.crash(*node, *stop);
                self.end_all_faults();
                self.recover(*node, crashes_in_recovery)?;
            }
            PhaseEnd::LoseDisk { node, steps } => {
                self.end_all_faults();
                self.lose_disk(*node, *steps)?;
            }
        }
        self.take_violation()
    }

    /// Runs every phase, from the first boot to the last audit.
    fn run_phases(&mut self, phases: &[Phase]) -> Result<(), String> {
        self.boot()?;
        (0..self.simulation().hosts.len()).for_each(|host| self.start_clients(host));
        for phase in phases {
            self.run_phase(phase)?;
        }
        self.quiesce_and_audit()?;
        self.finish()
    }
}

/// Runs a simulation from its begin to its end. The error is the first violated guarantee, with the simulated time.
pub(crate) fn run(mut runner: impl ScenarioRunner, phases: &[Phase]) -> Result<ScenarioStats, String> {
    let result = runner.run_phases(phases);
    let digest = runner.digest();
    let Simulation { sim, node, workload, faults, stats, .. } = runner.simulation_mut();
    let nodes = node.sim_nodes();
    {
        let workload = workload.borrow();
        stats.operations = workload.progress().completed;
        stats.succeeded = workload.progress().succeeded;
    }
    for (offloaded, queued) in nodes.iter().map(|node| node.offloaded_and_queued()) {
        stats.offloaded += offloaded;
        stats.queued += queued;
    }
    stats.elapsed = sim.now();
    stats.in_place = faults.disks().iter().map(DiskFaults::in_place).sum();
    stats.hung_operations = faults.disks().iter().map(DiskFaults::hung_operations).sum();
    stats.device_errors = faults.disks().iter().map(DiskFaults::operations_failed).sum();
    stats.trace_hash = mix64(sim.trace_hash() ^ digest);
    let (stats, at, plan) = (*stats, sim.now(), nodes[0].plan);
    runner.simulation().end();
    result.map_err(|message| {
        format!("at {} ns, {} core(s), durability {:?}: {message}", at.0, plan.cores, plan.durability)
    })?;
    Ok(stats)
}
