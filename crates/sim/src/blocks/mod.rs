//! Simulations of block namespaces.
//!
//! ```text
//!   boot ─▶ audit ─▶ phase: load, faults, operator changes ─▶ its end: quiesce, restart or crash ─▶ audit ─▶ …
//! ```
//! In: a [`scenario::BlockScenarioPlan`]. Out: statistics, or the first violation. Each block is a register: the
//! calls on it between two audits must be linearizable ([`octokv_engine::linearizability`]). After a power loss each block
//! holds its last durable contents (written with FUA, or before an acknowledged flush) or something newer. Blocks
//! that no client uses stay zero. After quiescing no resource may be in use; requests on a removed namespace must
//! end; every command completes exactly once.
//!
//! # Layout
//! - this file: the runner. [`scenario`]: its plan. [`node`]: the node under test. [`workload`]: its clients.
//! - [`operator`]: reconfigures the node while it runs.

pub mod node;
pub mod operator;
pub mod scenario;
pub mod workload;

use crate::clients::{ClientHost, Clients};
use crate::fault_injector::FaultInjector;
use crate::faulty_disk::DiskFaults;
use crate::history::History;
use crate::node_under_test::handle_without_devices;
use crate::power_loss::{crash_survivors, matches_any};
use crate::progress::LoadProgress;
use crate::scenario::{FaultKind, Phase, PhaseEnd};
use crate::sim_node::SimNode;
use crate::stats::{PROGRESS_TIMEOUT, ScenarioStats};
use node::BlockNodeUnderTest;
use octokv_base::prng::mix64;
use octokv_base::{Key, Nanos, Prng};
use octokv_engine::linearizability::{CallRecord, CheckResult, KeyState, Observed, check_linearizable};
use octokv_runtime::simulated::{CrashModel, HostFailure, SimEnv, SimEnvConfig};
use operator::Operator;
use scenario::{BlockScenarioPlan, DiskPlan};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use workload::{BlockWorkload, observe_block};

struct BlockRunner<'a> {
    plan: &'a BlockScenarioPlan,
    sim: SimEnv,
    random: Prng,
    node: BlockNodeUnderTest,
    operator: Operator,
    hosts: Vec<ClientHost>,
    shared: Rc<RefCell<BlockWorkload>>,
    faults: FaultInjector,
    /// Whether writes acknowledged and not flushed since the last audit may be lost.
    may_lose_unflushed: bool,
    /// By disk and block: states that may return after a power loss, considering only earlier segments.
    crash_states: Vec<Vec<Vec<KeyState>>>,
    stats: ScenarioStats,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &BlockScenarioPlan) -> Result<ScenarioStats, String> {
    let mut runner = BlockRunner::new(plan);
    let result = runner.run();
    let at = runner.sim.now();
    result.map_err(|message| format!("at {} ns, {} core(s): {message}", at.0, plan.node.cores))?;
    Ok(runner.stats)
}

/// Key of a block in histories; block contents are generated from it.
fn block_key(disk: usize, cell: u64) -> Key {
    Key::new(format!("disk {disk} block {cell}").as_bytes()).expect("at most 1024 bytes")
}

impl<'a> BlockRunner<'a> {
    fn new(plan: &'a BlockScenarioPlan) -> BlockRunner<'a> {
        let mut random = Prng::new(mix64(plan.seed ^ 0xb10c));
        let config = SimEnvConfig {
            seed: random.next_u64(),
            iteration_cost_min: plan.iteration_cost,
            link: plan.link,
        };
        let sim = SimEnv::new(config);
        let faults = DiskFaults::new(random.fork());
        let node = BlockNodeUnderTest::new(&sim, plan, faults.clone());
        let history = |(disk, plan): (usize, &DiskPlan)| {
            History::new((0..plan.count).map(|cell| block_key(disk, cell)).collect())
        };
        let shared = Rc::new(RefCell::new(BlockWorkload {
            histories: plan.disks.iter().enumerate().map(history).collect(),
            disks: plan.disks.clone(),
            served_as: vec![None; plan.disks.len()],
            load: plan.load,
            bytes_max: u64::from(plan.node.value_bytes_max),
            progress: LoadProgress::default(),
            rejected_commands: 0,
            faults: faults.clone(),
            has_operator: plan.operator_interval.is_some(),
            must_not_time_out: !plan.may_time_out(),
        }));
        let hosts: Vec<ClientHost> = plan.hosts.iter().map(|host| ClientHost::new(&sim, *host)).collect();
        let clients = hosts.iter().map(|host| host.id).collect();
        let faults = FaultInjector::new(&sim, node.sim_node.host, clients, plan.link, faults);
        let names = hosts.iter().map(|host| format!("nqn.2026-11.io.octokv:client-{}", host.id.0));
        let operator = Operator::new(random.fork(), plan, names.collect());
        BlockRunner {
            plan,
            sim,
            random,
            node,
            operator,
            hosts,
            shared,
            faults,
            may_lose_unflushed: false,
            crash_states: plan
                .disks
                .iter()
                .map(|disk| vec![vec![KeyState::Missing]; disk.count as usize])
                .collect(),
            stats: ScenarioStats::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot()?;
        for index in 0..self.hosts.len() {
            self.start_clients(index);
        }
        for phase in &self.plan.phases {
            self.run_phase(phase)?;
        }
        self.quiesce_and_audit()?;
        let shared = self.shared.borrow();
        self.stats.operations = shared.progress.completed;
        self.stats.succeeded = shared.progress.succeeded;
        self.stats.rejected_commands = shared.rejected_commands;
        self.stats.admin_changes = self.operator.changes();
        (self.stats.offloaded, self.stats.queued) = self.node.sim_node.offloaded_and_queued();
        self.stats.elapsed = self.sim.now();
        self.stats.device_errors = self.faults.disk().operations_failed();
        let digest = shared.histories.iter().fold(0, |sum, history| mix64(sum ^ history.digest()));
        self.stats.trace_hash = mix64(self.sim.trace_hash() ^ digest);
        Ok(())
    }

    fn start_clients(&mut self, index: usize) {
        let host = &self.hosts[index];
        let handle = handle_without_devices(&self.sim, host.id);
        let (node, random) = (self.node.sim_node.address(), self.random.fork());
        let mut clients = Clients::new(&self.sim, host, node, random, handle.clone(), &self.shared);
        self.sim.add_reactor(host.id, handle, move |now| clients.run_iteration(now));
    }

    /// Runs the simulation until `done`.
    ///
    /// # Errors
    /// A violation, or no progress within [`PROGRESS_TIMEOUT`].
    fn wait_for(&mut self, what: &str, mut done: impl FnMut(&SimNode) -> bool) -> Result<(), String> {
        let deadline = self.sim.now() + PROGRESS_TIMEOUT;
        let (sim, node, shared) = (self.sim.clone(), &self.node.sim_node, Rc::clone(&self.shared));
        let finished =
            sim.run_until_true(deadline, || shared.borrow().progress.violation.is_some() || done(node));
        self.take_violation()?;
        if finished { Ok(()) } else { Err(format!("no progress: {what} does not end")) }
    }

    fn take_violation(&self) -> Result<(), String> {
        self.shared.borrow_mut().progress.take_violation()
    }

    fn run_phase(&mut self, phase: &Phase) -> Result<(), String> {
        let begun = self.shared.borrow_mut().progress.begin_phase(phase);
        for fault in &phase.faults {
            self.run_until_completed(begun + fault.after_commands)?;
            if let Some(host) = self.faults.begin(fault) {
                self.hosts[host].session_count.set(0);
            }
        }
        self.run_until_completed(begun + phase.operations)?;
        match &phase.end {
            PhaseEnd::Quiesce | PhaseEnd::CorruptBits { .. } => self.quiesce_and_audit()?,
            PhaseEnd::Restart => {
                self.quiesce()?;
                self.stop(HostFailure::ProcessKilled);
                self.boot()?;
            }
            PhaseEnd::Crash { stop, steps_before: steps, crashes_in_recovery } => {
                for _ in 0..*steps {
                    self.sim.step(Nanos::NEVER);
                }
                self.crash(*stop);
                self.end_all_faults();
                self.boot()?;
                for &(after, stop) in crashes_in_recovery {
                    self.sim.run_until(self.sim.now() + after);
                    self.crash(stop);
                    self.boot()?;
                }
            }
        }
        self.take_violation()
    }

    /// Runs until `completed` commands have completed, ending faults at their end times and applying operator changes.
    fn run_until_completed(&mut self, completed: u64) -> Result<(), String> {
        let mut deadline = self.sim.now() + PROGRESS_TIMEOUT;
        loop {
            let next = self.faults.next_end();
            let shared = Rc::clone(&self.shared);
            let stop_at = completed.min(self.operator.next_at_completed());
            let done = || {
                let shared = shared.borrow();
                shared.progress.completed >= stop_at || shared.progress.violation.is_some()
            };
            let operator_at = self.operator.next_time();
            if self.sim.run_until_true(next.min(deadline).min(operator_at), done) {
                self.take_violation()?;
                if self.shared.borrow().progress.completed >= completed {
                    return Ok(());
                }
            }
            let now = self.sim.now();
            if self.shared.borrow().progress.completed >= self.operator.next_at_completed()
                || now >= operator_at
            {
                self.operator.apply_random_change(&self.sim, &self.node, &self.shared)?;
                deadline = now + PROGRESS_TIMEOUT;
            }
            while let Some(kind) = self.faults.take_due(now) {
                self.end_fault(kind);
                deadline = now + PROGRESS_TIMEOUT;
            }
            if now >= deadline {
                return Err("no progress: clients receive no responses".to_owned());
            }
        }
    }

    fn end_fault(&mut self, kind: FaultKind) {
        if let Some(host) = self.faults.end(kind) {
            self.start_clients(host);
        }
    }

    fn end_all_faults(&mut self) {
        for kind in self.faults.take_all() {
            self.end_fault(kind);
        }
    }

    /// Disconnects all clients and waits until no resource of the node is in use.
    fn quiesce(&mut self) -> Result<(), String> {
        self.end_all_faults();
        self.shared.borrow_mut().progress.quiescing = true;
        let session_counts: Vec<Rc<Cell<usize>>> =
            self.hosts.iter().map(|host| Rc::clone(&host.session_count)).collect();
        self.wait_for("the disconnect of clients", |_| session_counts.iter().all(|count| count.get() == 0))?;
        // Every core takes the messages that other cores have sent it.
        self.sim.step(Nanos::NEVER);
        self.operator.restore_defaults(&self.sim, &self.node, &self.shared)?;
        let idle = self.wait_for("the node's work for disconnected clients", SimNode::is_quiescent);
        if let Err(message) = idle {
            return Err(format!("{message} ({})", self.node.sim_node.find_leak().unwrap_or_default()));
        }
        self.node.sim_node.find_leak().map_or(Ok(()), |leak| Err(format!("a leak: {leak}")))
    }

    /// Quiesces and audits every block.
    fn quiesce_and_audit(&mut self) -> Result<(), String> {
        self.quiesce()?;
        self.audit()
    }

    fn stop(&mut self, stop: HostFailure) {
        let mut shared = self.shared.borrow_mut();
        shared.histories.iter_mut().for_each(|history| history.node_is_up = false);
        shared.served_as.fill(None);
        drop(shared);
        self.node.sim_node.stop(stop);
    }

    fn crash(&mut self, stop: HostFailure) {
        self.stats.crashes += 1;
        let stop = match stop {
            HostFailure::PowerLoss(plan) => HostFailure::PowerLoss(self.plan.crash_model(plan)),
            HostFailure::ProcessKilled => stop,
        };
        self.may_lose_unflushed |=
            matches!(stop, HostFailure::PowerLoss(plan) if plan != CrashModel::KeepAll);
        self.stop(stop);
    }

    /// Audits the disks of the stopped node and starts it.
    fn boot(&mut self) -> Result<(), String> {
        self.audit()?;
        let ids = self.operator.initial_namespaces();
        self.node.boot(&ids);
        {
            let mut shared = self.shared.borrow_mut();
            shared.histories.iter_mut().for_each(|history| history.node_is_up = true);
            shared.served_as = ids.into_iter().map(Some).collect();
        }
        self.operator.restore_defaults(&self.sim, &self.node, &self.shared)
    }

    /// Checks the history of every block against its contents on disk and begins the next segment.
    fn audit(&mut self) -> Result<(), String> {
        let relaxed = std::mem::take(&mut self.may_lose_unflushed);
        for disk in 0..self.plan.disks.len() {
            let contents = self.node.read_disk(disk);
            let shared = Rc::clone(&self.shared);
            let history = &mut shared.borrow_mut().histories[disk];
            let states = self.block_states(disk, history, &contents)?;
            let before: Vec<usize> = (0..states.len()).map(|cell| history.events(cell).len()).collect();
            history.record_audit(&states);
            for (cell, &state) in states.iter().enumerate() {
                let all = history.events(cell);
                let events: &[CallRecord] = if relaxed { &all[..before[cell]] } else { all };
                let crash_states = &mut self.crash_states[disk][cell];
                if !history.flushes().is_empty() {
                    // The flush made the initial state of the segment durable.
                    *crash_states = vec![history.starts()[cell]];
                }
                let allowed = crash_survivors(crash_states, &all[..before[cell]], history.flushes());
                if relaxed && !matches_any(state, &allowed) {
                    let calls = history.listing(cell, events);
                    return Err(format!("after the power loss {state:?} is not one of {allowed:?}: {calls}"));
                }
                // State after a power loss is durable; otherwise any of the earlier states may return.
                *crash_states = if relaxed { Vec::new() } else { allowed };
                if !crash_states.contains(&state) {
                    crash_states.push(state);
                }
                match check_linearizable(history.starts()[cell], events) {
                    CheckResult::Linearizable => {}
                    CheckResult::Undecided => self.stats.undecided_keys += 1,
                    CheckResult::NotLinearizable => {
                        return Err(format!("not linearizable: {}", history.listing(cell, events)));
                    }
                }
            }
            history.next_segment(states);
        }
        Ok(())
    }

    fn block_states(&self, disk: usize, history: &History, contents: &[u8]) -> Result<Vec<KeyState>, String> {
        let DiskPlan { block_bytes, first, count, .. } = self.plan.disks[disk];
        let (mut states, used) = (Vec::new(), first..first + count);
        for (lba, block) in (0..).zip(contents.chunks(block_bytes as usize)) {
            if used.contains(&lba) {
                let seen = observe_block(history, states.len(), block)?;
                states.push(match seen {
                    Observed::Value(operation) => KeyState::Holds { operation, bytes: block_bytes },
                    _ => KeyState::Missing,
                });
            } else if block.iter().any(|&byte| byte != 0) {
                return Err(format!("disk {disk}: block {lba}, which no client uses, is not zero"));
            }
        }
        Ok(states)
    }
}
