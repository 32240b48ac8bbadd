//! Changes of the disks of a volume on several, by the runner: one that has failed is replaced, and others are added.
//!
//! In: the planned changes that are due. Out: the node with its new list of disks, deletions in the history for the keys that a replaced disk had, and the first violation.
//!
//! Invariants:
//! - The keys of a replaced disk are lost, with a crash in its replacement if another disk has recorded that. Of keys that were moving from or to it the history allows both outcomes.
//! - Once all devices serve, every move ends, and partitions are balanced.

use crate::disk_replacement::{CutReplacement, is_replaced};
use crate::draw::pick;
use crate::history::CallId;
use crate::kv_runner::KvRunner;
use crate::node_under_test::{AuditResult, KvNodeUnderTest};
use crate::runner::{ScenarioRunner, Simulation};
use crate::scenario_draw::draw_stop;
use crate::sim_node::NodesUnderTest;
use crate::stats::PROGRESS_TIMEOUT;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_device::DeviceError;
use octokv_engine::linearizability::Call;
use octokv_engine::{AnyVolume, EngineError, MoveStage, OpenError, Volume};
use octokv_runtime::simulated::SimEnv;
use std::rc::Rc;

/// Commands between two attempts to add a disk.
const RETRY_COMMANDS: u64 = 40;
/// The steps of the simulation between the beginning of an addition and a crash in it are fewer.
const STEPS_OF_ADDITION: u64 = 600;
/// The steps of the simulation between the beginning of a replacement and a crash in it are fewer.
const STEPS_OF_REPLACEMENT: u64 = 400;
/// The longest that a crash waits for a stage of a move.
const STAGE_TIMEOUT: Nanos = Nanos::from_millis(200);
/// The steps of the simulation between a stage of a move and a crash are fewer.
const STEPS_OF_STAGE: u64 = 80;
/// The steps of the simulation between the beginning of a superblock's write and a crash are fewer.
const STEPS_OF_WRITE: u64 = 12;

/// How a replacement ended.
enum ReplacementEnd {
    /// The new disk serves, or none had failed.
    Done,
    /// With a crash.
    Cut,
}

fn run_steps(sim: &SimEnv, steps: u64) {
    for _ in 0..steps {
        sim.step(Nanos::NEVER);
    }
}

impl KvRunner {
    /// Replaces a disk of a node that has failed: what it held is lost at some moment meanwhile. The node may crash meanwhile. It starts with the former disk; if that
    /// has failed again, or others have recorded the replacement, the replacement is repeated.
    pub(crate) fn replace_disk(&mut self, node: usize) -> Result<(), String> {
        match self.run_replacement(node, self.has_crashes)? {
            ReplacementEnd::Done => Ok(()),
            ReplacementEnd::Cut => self.run_replacement(node, false).map(|_| ()),
        }
    }

    fn run_replacement(&mut self, node: usize, may_crash: bool) -> Result<ReplacementEnd, String> {
        let (keys, under_test) = (self.keys(node), &mut self.simulation.node[node]);
        let Some(at) = under_test.failed_device() else { return Ok(ReplacementEnd::Done) };
        let workload = Rc::clone(&self.simulation.workload);
        let moving: Vec<bool> = keys.iter().map(|key| under_test.is_key_moving(at, key)).collect();
        let lost = (0..keys.len()).filter(|&key| moving[key] || under_test.is_key_of(at, &keys[key]));
        let lost: Vec<(usize, CallId)> =
            lost.map(|key| (key, workload.borrow_mut().histories[node].begin(key, Call::Clear))).collect();
        // By a generator of its own, of the commands so far: the other draws do not depend on it. Keys in swap regions, or that move, outlast a crash or not.
        let random = &mut Prng::new(mix64(workload.borrow().progress.completed ^ 0x4e9));
        let is_known = under_test.sim_node.plan.swap_bytes == 0 && !moving.contains(&true);
        let crashes = may_crash && is_known && random.one_in(2);
        let replacement = under_test.begin_replacement(at);
        if crashes {
            let Simulation { sim, faults, .. } = &self.simulation;
            if random.one_in(2) {
                run_steps(sim, random.below(STEPS_OF_REPLACEMENT));
            } else {
                // The superblocks of the new disk, and then of the others.
                let disk = &faults.disks()[node];
                let writes = disk.front_writes() + random.below(12);
                sim.run_until_true(sim.now() + STAGE_TIMEOUT, || disk.front_writes() >= writes);
                run_steps(sim, random.below(STEPS_OF_WRITE));
            }
            let has_ended = replacement.has_ended()?;
            self.crash(node, draw_stop(random));
            self.simulation.node[node].undo_replacement(replacement);
            self.simulation.stats.replacements_cut += 1;
            self.disks[node].cut_replacement = Some(CutReplacement { lost, has_ended });
            return self.recover(node, &[]).map(|()| ReplacementEnd::Cut);
        }
        under_test.finish_replacement(&replacement)?;
        self.simulation.stats.disks_replaced += 1;
        let history = &mut workload.borrow_mut().histories[node];
        let mut known = lost.into_iter().filter(|(key, _)| !moving[*key]);
        known.try_for_each(|(_, call)| history.end_durable(call))?;
        Ok(ReplacementEnd::Done)
    }

    /// Completes the history after a crash in a replacement, before the audit. If another disk has recorded the replacement, the keys of the replaced disk are lost;
    /// otherwise they are all there. A replacement that ended before the crash has to be recorded.
    pub(crate) fn settle_cut_replacement(
        &mut self,
        node: usize,
        volume: &AnyVolume,
        found: &mut [AuditResult],
    ) -> Result<(), String> {
        let Some(CutReplacement { lost, has_ended }) = self.disks[node].cut_replacement.take() else {
            return Ok(());
        };
        let history = &mut self.simulation.workload.borrow_mut().histories[node];
        if !volume.device_reports().iter().any(is_replaced) {
            if has_ended {
                return Err("a replacement that ended is not known after a crash".to_owned());
            }
            lost.into_iter().for_each(|(_, call)| history.mark_not_executed(call));
            return Ok(());
        }
        self.simulation.stats.replacements_recorded += 1;
        for &(key, _) in &lost {
            if let AuditResult::Failed(EngineError::Device { error: DeviceError::Unavailable, .. }) =
                found[key]
            {
                found[key] = AuditResult::Missing;
            }
        }
        lost.into_iter().try_for_each(|(_, call)| history.end_durable(call))
    }

    /// Checks that the disk which was replaced last is absent in its former place.
    pub(crate) fn refuse_retired(&mut self, node: usize) -> Result<(), String> {
        if self.simulation.node[node].has_disk_aside() {
            // The others may need it.
            return Ok(());
        }
        let Some(opened) = self.simulation.node[node].start_opening_with_retired() else { return Ok(()) };
        match self.wait_result("an opening with a disk that was replaced", &opened)? {
            Ok(Some(OpenError::DeviceReplaced { .. })) => Ok(()),
            Ok(None) => Err("a disk that was replaced is served".to_owned()),
            Ok(Some(error)) | Err(error) => {
                Err(format!("a disk that was replaced is not recognized: {error}"))
            }
        }
    }

    /// Whether a disk can be added to a node, and is due after so many completed commands.
    pub(crate) fn is_addition_due(&self, node: usize, completed: u64) -> bool {
        let due_at = self.simulation.node[node].next_addition_at();
        completed >= due_at.max(self.disks[node].no_addition_before)
            && self.simulation.node[node].is_healthy()
    }

    /// Adds a disk to a node beside its clients. With `may_crash`, the node may crash meanwhile, and is started again.
    pub(crate) fn add_disk(&mut self, node: usize, may_crash: bool) -> Result<(), String> {
        let Simulation { sim, random, node: nodes, workload, stats, .. } = &mut self.simulation;
        let under_test = &mut nodes[node];
        let addition = under_test.begin_addition();
        // Of the crash: in the part of the volume, or between two cores.
        let crashes = may_crash && random.one_in(3);
        if crashes && random.one_in(2) {
            let steps = random.below(STEPS_OF_ADDITION);
            run_steps(sim, steps);
            under_test.set_aside(addition);
            return self.crash_addition(node);
        }
        sim.run_until_true(sim.now() + PROGRESS_TIMEOUT, || addition.added.borrow().is_some());
        let added = addition.added.borrow_mut().take().ok_or("the addition of a disk does not end")?;
        if let Err(error) = added {
            under_test.set_aside(addition);
            let completed = workload.borrow().progress.completed;
            self.disks[node].no_addition_before = completed + RETRY_COMMANDS;
            return match self.simulation.faults.disks()[node].has_failed() {
                true => Ok(()),
                false => Err(format!("a disk is not added: {error}")),
            };
        }
        under_test.finish_addition(addition);
        let cores = under_test.sim_node.plan.cores;
        let with_disk = if crashes { random.below(cores as u64) as usize } else { cores };
        let between = || run_steps(sim, random.below(12));
        let extended = under_test.extend_cores(with_disk, between);
        extended.map_err(|error| format!("a core does not get the new disk: {error:?}"))?;
        if crashes {
            return self.crash_addition(node);
        }
        stats.disks_added += 1;
        Ok(())
    }

    fn crash_addition(&mut self, node: usize) -> Result<(), String> {
        self.simulation.stats.additions_cut += 1;
        let failure = draw_stop(&mut self.simulation.random);
        self.crash(node, failure);
        self.recover(node, &[])
    }

    /// In front of a crash: adds the next disk in half of the cases, and runs until partitions move. Gives the steps of the simulation until the crash.
    pub(crate) fn await_moves(&mut self, node: usize) -> u64 {
        let Simulation { random, node: nodes, .. } = &mut self.simulation;
        let (adds, waits) = (random.one_in(2), !random.one_in(4));
        if nodes[node].sim_node.plan.additions[0] == u64::MAX || !waits {
            return 0;
        }
        if adds
            && self.is_addition_due(node, u64::MAX - 1)
            && let Err(message) = self.add_disk(node, false)
        {
            self.simulation.workload.borrow_mut().progress.fail(message);
        }
        let Simulation { sim, random, node: nodes, faults, .. } = &mut self.simulation;
        let stage =
            pick(random, &[MoveStage::Copy, MoveStage::Cutover, MoveStage::Cutover, MoveStage::CleanUp]);
        sim.run_until_true(sim.now() + STAGE_TIMEOUT, || nodes[node].move_stage() == stage);
        if random.one_in(3) {
            return random.below(STEPS_OF_STAGE);
        }
        // Two for each device: of the destination first.
        let disk = &faults.disks()[node];
        let writes = disk.front_writes() + pick(random, &[1, 1, 2, 3, 5]);
        sim.run_until_true(sim.now() + STAGE_TIMEOUT, || disk.front_writes() >= writes);
        random.below(STEPS_OF_WRITE)
    }

    /// Counts a crash in moves.
    pub(crate) fn note_cut_move(&mut self, node: usize) {
        let [copy, cutover, clean_up] = &mut self.simulation.stats.moves_cut;
        match self.simulation.node[node].move_stage() {
            MoveStage::AtRest => {}
            MoveStage::Copy => *copy += 1,
            MoveStage::Cutover | MoveStage::Undecided => *cutover += 1,
            MoveStage::CleanUp => *clean_up += 1,
        }
    }

    /// Whether partitions cannot move before a node is started again.
    pub(crate) fn has_stuck_moves(&self, node: usize) -> bool {
        let under_test = &self.simulation.node[node];
        // A volume of which a write has failed is read-only.
        let is_read_only = self.has_failed_writes(node);
        is_read_only || !under_test.is_healthy() || under_test.move_stage() == MoveStage::Undecided
    }

    /// Adds the disks that were set aside, and waits until partitions are balanced on nodes whose devices all serve.
    pub(crate) fn finish_moves(&mut self) -> Result<(), String> {
        if self.simulation.node.iter().all(|node| node.sim_node.plan.additions[0] == u64::MAX) {
            return Ok(());
        }
        for node in 0..self.disks.len() {
            let under_test = &self.simulation.node[node];
            if under_test.has_disk_aside() && !self.has_stuck_moves(node) {
                self.add_disk(node, false)?;
            }
        }
        let is_finished =
            |node: usize| self.has_stuck_moves(node) || self.simulation.node[node].is_balanced();
        self.wait_for("the move of partitions", |nodes: &Vec<KvNodeUnderTest>| {
            (0..nodes.len()).all(is_finished) && nodes.are_quiescent() && nodes.find_leak().is_none()
        })
    }

    /// Whether a disk that was set aside, or is not given, is why a node could not be opened: it is given with other disks then.
    pub(crate) fn change_list(&mut self, node: usize, error: &OpenError, had_aside: bool) -> bool {
        let under_test = &mut self.simulation.node[node];
        match error {
            OpenError::DevicesMissing { .. } if under_test.has_disk_aside() => under_test.take_aside(),
            OpenError::DevicesMissing { .. } | OpenError::SpanDevice { .. } if had_aside => {
                under_test.put_back()
            }
            _ => return false,
        }
        true
    }
}
