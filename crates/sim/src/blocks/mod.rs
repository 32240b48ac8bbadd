//! Simulations of block namespaces.
//!
//! ```text
//!   boot: audit ─▶ … ─▶ phase: load, faults, operator changes ─▶ its end: quiesce, restart or crash ─▶ audit ─▶ …
//! ```
//! In: a [`scenario::BlockScenarioPlan`]. Out: statistics, or the first violation. `runner.rs` has the phases. Each
//! block is a register: the calls on it between two audits must be linearizable ([`octokv_engine::linearizability`]).
//! After a power loss each block holds its last durable contents (written with FUA, or before an acknowledged flush) or
//! something newer. Blocks that no client uses stay zero. Requests on a removed namespace must end; every command
//! completes exactly once.
//!
//! # Layout
//! - this file: the runner. [`scenario`]: its plan. [`node`]: the node under test. [`workload`]: its clients.

pub mod node;
pub mod scenario;
pub mod workload;

use crate::history::History;
use crate::operator::Operator;
use crate::power_loss::{crash_survivors, matches_any};
use crate::progress::LoadProgress;
use crate::runner::{ScenarioRunner, Simulation, run};
use crate::stats::ScenarioStats;
use node::BlockNodeUnderTest;
use octokv_base::prng::mix64;
use octokv_base::{Key, Nanos};
use octokv_engine::linearizability::{CallRecord, KeyState, Observed};
use octokv_runtime::simulated::{CrashModel, HostFailure};
use scenario::{BlockScenarioPlan, DiskPlan};
use std::rc::Rc;
use workload::{BlockWorkload, observe_block};

struct BlockRunner<'a> {
    plan: &'a BlockScenarioPlan,
    simulation: Simulation<BlockNodeUnderTest, BlockWorkload>,
    operator: Operator,
    /// Whether writes acknowledged and not flushed since the last audit may be lost.
    may_lose_unflushed: bool,
    /// By disk and block: states that may return after a power loss, considering only earlier segments.
    crash_states: Vec<Vec<Vec<KeyState>>>,
    /// Whether the node has stopped since the last audit.
    memory_is_lost: bool,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &BlockScenarioPlan) -> Result<ScenarioStats, String> {
    let history = |(disk, plan): (usize, &DiskPlan)| {
        History::new((0..plan.count).map(|cell| block_key(disk, cell)).collect())
    };
    let mut simulation = Simulation::begin(
        plan.seed ^ 0xb10c,
        plan.iteration_cost,
        plan.link,
        &plan.hosts,
        1,
        |sim, faults| BlockNodeUnderTest::new(sim, plan, faults[0].clone()),
        |faults| BlockWorkload {
            histories: plan.disks.iter().enumerate().map(history).collect(),
            disks: plan.disks.clone(),
            served_as: vec![None; plan.disks.len()],
            load: plan.load,
            bytes_max: u64::from(plan.node.value_bytes_max),
            progress: LoadProgress::default(),
            rejected_commands: 0,
            faults: faults[0].clone(),
            has_operator: plan.operator_interval.is_some(),
            must_not_time_out: !plan.may_time_out(),
        },
    );
    let names = simulation.hosts.iter().map(|host| format!("nqn.2026-11.io.octokv:client-{}", host.id.0));
    let operator =
        Operator::new(simulation.random.fork(), plan.disks.len(), plan.operator_interval, names.collect());
    let crash_states = plan.disks.iter().map(|disk| vec![vec![KeyState::Missing]; disk.count as usize]);
    let crash_states = crash_states.collect();
    run(
        BlockRunner {
            plan,
            simulation,
            operator,
            may_lose_unflushed: false,
            crash_states,
            memory_is_lost: false,
        },
        &plan.phases,
    )
}

/// Key of a block in histories; block contents are generated from it.
fn block_key(disk: usize, cell: u64) -> Key {
    Key::new(format!("disk {disk} block {cell}").as_bytes()).expect("at most 1024 bytes")
}

impl ScenarioRunner for BlockRunner<'_> {
    type Node = BlockNodeUnderTest;
    type Workload = BlockWorkload;

    fn simulation(&self) -> &Simulation<BlockNodeUnderTest, BlockWorkload> {
        &self.simulation
    }

    fn simulation_mut(&mut self) -> &mut Simulation<BlockNodeUnderTest, BlockWorkload> {
        &mut self.simulation
    }

    fn start_clients(&mut self, host: usize) {
        self.simulation.start_clients(host);
    }

    /// Audits the disks of the stopped node and starts it.
    fn boot(&mut self) -> Result<(), String> {
        self.audit()?;
        let ids = self.operator.initial_namespaces();
        self.simulation.node.boot(&ids);
        let mut workload = self.simulation.workload.borrow_mut();
        workload.histories.iter_mut().for_each(|history| history.node_is_up = true);
        workload.served_as = ids.into_iter().map(Some).collect();
        drop(workload);
        self.restore_defaults()
    }

    fn stop(&mut self, _node: usize, failure: HostFailure) {
        let mut workload = self.simulation.workload.borrow_mut();
        workload.histories.iter_mut().for_each(|history| history.node_is_up = false);
        workload.served_as.fill(None);
        drop(workload);
        self.simulation.node.stop(failure);
        self.memory_is_lost = true;
    }

    fn crash(&mut self, node: usize, failure: HostFailure) {
        let failure = match failure {
            HostFailure::PowerLoss(model) => HostFailure::PowerLoss(self.plan.crash_model(model)),
            HostFailure::ProcessKilled => failure,
        };
        self.may_lose_unflushed |=
            matches!(failure, HostFailure::PowerLoss(model) if model != CrashModel::KeepAll);
        self.simulation.stats.crashes += 1;
        self.stop(node, failure);
    }

    /// Applies the operator's next change if it is due.
    fn run_duties(&mut self) -> Result<bool, String> {
        let Simulation { sim, node, workload, .. } = &self.simulation;
        let is_due = sim.now() >= self.operator.next_time() || self.has_duty(&workload.borrow());
        if is_due {
            self.operator.apply_random_change(sim, node, workload)?;
        }
        Ok(is_due)
    }

    fn next_duty_at(&self) -> Nanos {
        self.operator.next_time()
    }

    fn has_duty(&self, workload: &BlockWorkload) -> bool {
        workload.progress.completed >= self.operator.next_at_completed()
    }

    fn settle(&mut self) -> Result<(), String> {
        self.restore_defaults()?;
        self.wait_until_quiescent("the node's work for disconnected clients")
    }

    /// Checks the history of every block against its contents on disk and begins the next segment.
    fn audit(&mut self) -> Result<(), String> {
        let relaxed = std::mem::take(&mut self.may_lose_unflushed);
        let memory_is_lost = std::mem::take(&mut self.memory_is_lost);
        for disk in 0..self.plan.disks.len() {
            if memory_is_lost && self.plan.disks[disk].is_in_memory {
                self.forget_contents(disk)?;
            }
            let contents = self.simulation.node.read_disk(disk);
            let shared = Rc::clone(&self.simulation.workload);
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
                self.simulation.stats.undecided_keys += u64::from(!history.check(cell, events)?);
            }
            history.next_segment(states);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        self.simulation.stats.rejected_commands = self.simulation.workload.borrow().rejected_commands;
        self.simulation.stats.admin_changes = self.operator.changes();
        Ok(())
    }

    fn digest(&self) -> u64 {
        let workload = self.simulation.workload.borrow();
        workload.histories.iter().fold(0, |sum, history| mix64(sum ^ history.digest()))
    }
}

impl BlockRunner<'_> {
    /// Checks the calls up to the loss of a disk in memory without an audit; it is then empty.
    fn forget_contents(&mut self, disk: usize) -> Result<(), String> {
        let history = &mut self.simulation.workload.borrow_mut().histories[disk];
        self.simulation.stats.undecided_keys += history.end_segment_unaudited()?;
        self.crash_states[disk] = vec![vec![KeyState::Missing]; self.plan.disks[disk].count as usize];
        Ok(())
    }

    fn restore_defaults(&mut self) -> Result<(), String> {
        let Simulation { sim, node, workload, .. } = &self.simulation;
        self.operator.restore_defaults(sim, node, workload)
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
