//! Runs one simulation with key-value clients, from its plan.
//!
//! ```text
//!   boot: recovery, audit ─▶ … ─▶ end of a phase: bit flips, clean shutdown or crash ─▶ audit ─▶ … ─▶ verify
//! ```
//! In: a [`KvScenarioPlan`]. Out: statistics, or the first violation. `runner.rs` has the phases. The calls of every
//! key between two audits must be linearizable ([`octokv_engine::linearizability`]); at the end the disk must verify.
//! Corruption is accepted only at bits that the plan flipped.

use crate::disk_replacement::CutReplacement;
use crate::draw::between;
use crate::engine_plan::EnginePlan;
use crate::engine_worker::EngineWorker;
use crate::history::History;
use crate::kv_workload::KvWorkload;
use crate::node_under_test::{
    AuditResult, KvNodeUnderTest, RecoveryResult, TaskResult, handle_without_devices,
};
use crate::operator::Operator;
use crate::parallel_core::ParallelCore;
use crate::power_loss::{crash_survivors, matches_any};
use crate::runner::{ScenarioRunner, Simulation, run};
use crate::scenario::{FaultKind, KvScenarioPlan, Scenario, ScheduledFault};
use crate::sim_node::NodesUnderTest;
use crate::stats::ScenarioStats;
use octokv_base::prng::mix64;
use octokv_base::{Key, NamespaceId, Nanos, Prng};
use octokv_engine::EngineKind;
use octokv_engine::common::superblock::SUPERBLOCK_STRIDE_BYTES;
use octokv_engine::conformance::key_of;
use octokv_engine::linearizability::KeyState;
use octokv_engine::{AnyVolume, Durability, Volume};
use octokv_runtime::simulated::{CrashModel, HostFailure};
use std::rc::Rc;

/// Time after which an idle volume has written its durability marker.
const DURABILITY_MARKER_DELAY: Nanos = Nanos::from_millis(60);

/// See the module header.
pub(crate) struct KvRunner {
    pub simulation: Simulation<Vec<KvNodeUnderTest>, KvWorkload>,
    pub disks: Vec<DiskState>,
    /// Reconfigures the first node.
    operator: Option<Operator>,
    /// Whether disks fail or lose bits.
    has_disk_faults: bool,
    /// Whether nodes crash.
    pub(crate) has_crashes: bool,
}

/// What the runner knows of a node's disk.
#[derive(Default)]
pub(crate) struct DiskState {
    /// Whether the disk has been formatted.
    is_formatted: bool,
    /// Offsets of bytes with flipped bits; some may have been overwritten since.
    corrupted_bytes: Vec<u64>,
    /// Whether writes acknowledged since the last audit may be lost.
    may_lose_unflushed: bool,
    /// Failed writes and flushes at the last start of the node.
    writes_failed: u64,
    /// Completed commands before which no disk is added.
    pub no_addition_before: u64,
    /// The replacement of a disk in which the node crashed last, until it is open again.
    pub cut_replacement: Option<CutReplacement>,
    /// A core beside those of the running node.
    parallel_core: Option<Rc<ParallelCore>>,
    /// Background work that nothing needs.
    worker: Option<EngineWorker>,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &KvScenarioPlan) -> Result<ScenarioStats, String> {
    let is_key_used = |key: &Key| plan.load.long_keys || key.len() <= 16;
    let keys: Vec<Key> = (0..).map(key_of).filter(is_key_used).take(plan.load.keys as usize).collect();
    let mut simulation = Simulation::begin(
        plan.seed ^ 0x0c70,
        plan.iteration_cost,
        plan.link,
        &plan.hosts,
        plan.nodes.len(),
        |sim, faults| {
            let nodes = plan.nodes.iter().zip(faults);
            nodes.map(|(node, faults)| KvNodeUnderTest::new(sim, *node, faults.clone())).collect::<Vec<_>>()
        },
        |faults| {
            let histories = (0..plan.nodes.len()).map(|node| History::of_node(keys.clone(), node));
            KvWorkload {
                keeps_connections: plan.keeps_connections,
                keeps_iterators: plan.scenario == Scenario::Calm
                    && plan.operator_interval.is_none()
                    && !plan.has_failing_disk(),
                has_operator: plan.operator_interval.is_some(),
                ..KvWorkload::new(histories.collect(), plan.load, faults.to_vec())
            }
        },
    );
    let nodes = simulation.node.iter().map(|node| node.sim_node.host);
    let hosts: Vec<_> = nodes.chain(simulation.hosts.iter().map(|host| host.id)).collect();
    hosts.iter().zip(&plan.clocks).for_each(|(host, clock)| simulation.sim.set_clock(*host, *clock));
    let disks = plan.nodes.iter().map(|node| {
        // A generator of its own: the other draws of a seed do not depend on it.
        let worker = EngineWorker::new(Prng::new(mix64(plan.seed ^ 0x73ee)), node.engine);
        DiskState { worker, ..DiskState::default() }
    });
    let disks = disks.collect();
    let operator = plan.operator_interval.map(|interval| {
        assert!(plan.nodes.len() == 1, "an operator of one node");
        let names = simulation.hosts.iter().map(|host| format!("nqn.2026-11.io.octokv:client-{}", host.id.0));
        let names = names.collect();
        Operator::new(simulation.random.fork(), 1, Some(interval), names)
    });
    let has_errors = |fault: &ScheduledFault| matches!(fault.kind, FaultKind::DiskErrors { .. });
    let has_disk_faults = !matches!(plan.scenario, Scenario::Calm | Scenario::Crashes | Scenario::Network)
        || plan.phases.iter().flat_map(|phase| &phase.faults).any(has_errors);
    let has_crashes = plan.scenario.has_crashes();
    run(KvRunner { simulation, disks, operator, has_disk_faults, has_crashes }, &plan.phases)
}

impl ScenarioRunner for KvRunner {
    type Node = Vec<KvNodeUnderTest>;
    type Workload = KvWorkload;

    fn simulation(&self) -> &Simulation<Vec<KvNodeUnderTest>, KvWorkload> {
        &self.simulation
    }

    fn simulation_mut(&mut self) -> &mut Simulation<Vec<KvNodeUnderTest>, KvWorkload> {
        &mut self.simulation
    }

    fn start_clients(&mut self, host: usize) {
        self.simulation.start_clients(host);
    }

    fn boot(&mut self) -> Result<(), String> {
        self.for_each_node(|runner, node| runner.recover(node, &[]))
    }

    /// Recovers and audits the volume and starts serving; the crashes are during recovery.
    fn recover(&mut self, node: usize, crashes_in_recovery: &[(Nanos, HostFailure)]) -> Result<(), String> {
        self.refuse_retired(node)?;
        let keys = self.keys(node);
        let format = !self.disks[node].is_formatted;
        // The start of a node does not depend on whether the volume has the disk.
        let takes_aside = self.simulation.node[node].has_disk_aside() && self.simulation.random.one_in(2);
        if takes_aside {
            self.simulation.node[node].take_aside();
        }
        let mut task_result = self.simulation.node[node].start_recovery(keys.clone(), format);
        for &(after, failure) in crashes_in_recovery {
            let sim = &self.simulation.sim;
            sim.run_until(sim.now() + after);
            self.crash(node, failure);
            task_result = self.simulation.node[node].start_recovery(keys.clone(), format);
        }
        let mut opened: RecoveryResult = self.wait_result("recovery", &task_result)?;
        if let Err(error) = &opened
            && self.change_list(node, error, takes_aside)
        {
            let task_result = self.simulation.node[node].start_recovery(keys, format);
            opened = self.wait_result("recovery with other disks", &task_result)?;
        }
        let (volume, mut found) =
            opened.map_err(|error| format!("the node cannot open its disk: {error}"))?;
        self.disks[node].is_formatted = true;
        if self.is_in_memory(node) {
            self.forget_contents(node)?;
        }
        self.settle_cut_replacement(node, &volume, &mut found)?;
        self.check_audit(node, found)?;
        let id = self.operator.as_mut().map_or(NamespaceId(1), |operator| operator.initial_namespaces()[0]);
        self.simulation.node[node].start_serving_as(volume, id);
        self.simulation.workload.borrow_mut().served_as[node] = Some(id);
        self.start_parallel_core(node);
        self.disks[node].writes_failed = self.simulation.faults.disks()[node].writes_failed();
        self.simulation.workload.borrow_mut().histories[node].node_is_up = true;
        self.restore_defaults()
    }

    fn stop(&mut self, node: usize, failure: HostFailure) {
        self.count_checkpoints(node);
        self.simulation.faults.disks()[node].set_interference(None);
        self.disks[node].parallel_core = None;
        self.disks[node].worker.iter_mut().for_each(EngineWorker::stop);
        self.simulation.workload.borrow_mut().histories[node].node_is_up = false;
        self.simulation.node[node].stop(failure);
    }

    fn begin_work_before_crash(&mut self, node: usize) -> u64 {
        let steps_of_moves = self.await_moves(node);
        let KvRunner { simulation, disks, .. } = self;
        let worker = disks[node].worker.as_mut();
        steps_of_moves + worker.map_or(0, |worker| worker.begin_before_crash(&simulation.node[node]))
    }

    fn crash(&mut self, node: usize, failure: HostFailure) {
        let loses = matches!(failure, HostFailure::PowerLoss(model) if model != CrashModel::KeepAll);
        let durability = self.simulation.node[node].sim_node.plan.durability;
        self.disks[node].may_lose_unflushed |= loses && durability == Durability::Completed;
        self.simulation.stats.crashes += 1;
        self.note_cut_move(node);
        self.stop(node, failure);
    }

    /// Shuts the nodes down cleanly and starts them.
    fn restart(&mut self) -> Result<(), String> {
        self.for_each_node(KvRunner::restart_node)
    }

    /// The calls up to the loss are checked without an audit; the new disk is empty.
    fn lose_disk(&mut self, node: usize, steps: u64) -> Result<(), String> {
        self.simulation.faults.disks()[node].set_lost(true);
        self.simulation.node[node].set_disk_lost(true);
        for _ in 0..steps {
            self.simulation.sim.step(Nanos::NEVER);
        }
        self.take_violation()?;
        self.simulation.stats.disks_lost += 1;
        self.stop(node, HostFailure::ProcessKilled);
        self.simulation.node[node].set_disk_lost(false);
        self.simulation.faults.disks()[node].set_lost(false);
        self.disks[node] = DiskState::default();
        self.forget_contents(node)?;
        self.recover(node, &[])
    }

    /// Applies the operator's next change if it is due.
    fn run_duties(&mut self) -> Result<bool, String> {
        let Simulation { sim, node, workload, .. } = &self.simulation;
        let completed = workload.borrow().progress.completed;
        for (disk, node) in self.disks.iter_mut().zip(node) {
            disk.worker.iter_mut().for_each(|worker| worker.run(node, completed));
        }
        if self.simulation.node.iter().any(KvNodeUnderTest::has_disk_to_replace) {
            return self.for_each_node(KvRunner::replace_disk).map(|()| true);
        }
        if let Some(node) = (0..self.disks.len()).find(|&node| self.is_addition_due(node, completed)) {
            return self.add_disk(node, self.has_crashes).map(|()| true);
        }
        let Some(operator) = &mut self.operator else { return Ok(false) };
        let is_due = sim.now() >= operator.next_time() || completed >= operator.next_at_completed();
        if is_due {
            operator.apply_random_change(sim, node, workload)?;
        }
        Ok(is_due)
    }

    fn next_duty_at(&self) -> Nanos {
        self.operator.as_ref().map_or(Nanos::NEVER, Operator::next_time)
    }

    fn has_duty(&self, workload: &KvWorkload) -> bool {
        let operator = self.operator.iter().map(Operator::next_at_completed);
        let workers = self.disks.iter().filter_map(|disk| disk.worker.as_ref());
        let due_at = operator.chain(workers.map(EngineWorker::next_at_completed)).min().unwrap_or(u64::MAX);
        workload.progress.completed >= due_at
            || self.simulation.node.iter().any(KvNodeUnderTest::has_disk_to_replace)
            || (0..self.disks.len()).any(|node| self.is_addition_due(node, workload.progress.completed))
    }

    /// Waits also for the durability marker, which the volume then has written.
    fn settle(&mut self) -> Result<(), String> {
        self.restore_defaults()?;
        self.wait_until_quiescent("the nodes' work for disconnected clients")?;
        self.disks.iter().filter_map(|disk| disk.parallel_core.as_ref()).for_each(|core| core.finish());
        self.take_violation()?;
        let sim = &self.simulation.sim;
        sim.run_until(sim.now() + DURABILITY_MARKER_DELAY);
        self.wait_until_quiescent("the nodes' background work")?;
        let merges = self.simulation.node.iter().any(|node| node.sim_node.plan.swap_bytes > 0);
        if merges || self.disks.iter().any(|disk| disk.worker.is_some()) {
            // A compaction that pauses has buffers, and no device operation; so has a merge of a swapped key.
            let is_working = || self.disks.iter().flat_map(|disk| &disk.worker).any(EngineWorker::is_running);
            let is_idle = |nodes: &Vec<KvNodeUnderTest>| {
                !is_working() && nodes.are_quiescent() && nodes.find_leak().is_none()
            };
            self.wait_for("the background work of the engine", is_idle)?;
        }
        self.finish_moves()
    }

    fn audit(&mut self) -> Result<(), String> {
        let mut restarted = false;
        for node in 0..self.disks.len() {
            if self.has_failed_writes(node) || self.has_stuck_moves(node) {
                // A failed write of a journal batch may become visible only after a restart.
                self.crash(node, HostFailure::ProcessKilled);
                self.recover(node, &[])?;
                restarted = true;
            } else {
                self.audit_running_node(node)?;
            }
        }
        if restarted { self.quiesce() } else { Ok(()) }
    }

    fn corrupt_bits(&mut self, records: u64, metadata: bool, restart: bool) -> Result<(), String> {
        self.for_each_node(|runner, node| {
            runner.flip_bits(node, records, metadata);
            // An audit through a cache would see the value of before, and so would only some of the gets after it.
            let plan = &runner.simulation.node[node].sim_node.plan;
            let has_cache = plan.cache_bytes > 0;
            // The log engine writes the last unit of a value log again, from memory: what was flipped in it is intact then.
            let is_written_again = matches!(plan.engine, EnginePlan::Log(_));
            match restart || metadata || has_cache || is_written_again {
                true => runner.restart_node(node),
                false => runner.audit_running_node(node),
            }
        })
    }

    fn finish(&mut self) -> Result<(), String> {
        self.simulation.stats.scanned_pairs = self.simulation.workload.borrow().scans.pairs;
        self.simulation.stats.rejected_commands = self.simulation.workload.borrow().rejected_commands;
        self.simulation.stats.unavailable_commands = self.simulation.workload.borrow().unavailable_commands;
        self.simulation.stats.admin_changes = self.operator.as_ref().map_or(0, Operator::changes);
        self.for_each_node(|runner, node| match runner.is_in_memory(node) {
            true => runner.verify_memory(node),
            false => runner.verify_disk(node),
        })
    }

    fn digest(&self) -> u64 {
        let workload = self.simulation.workload.borrow();
        workload.histories.iter().fold(0, |digest, history| digest ^ history.digest())
    }
}

impl KvRunner {
    /// Whether writes or flushes have failed since the last start of a node.
    pub(crate) fn has_failed_writes(&self, node: usize) -> bool {
        self.simulation.faults.disks()[node].writes_failed() > self.disks[node].writes_failed
    }

    fn for_each_node(
        &mut self,
        mut action: impl FnMut(&mut KvRunner, usize) -> Result<(), String>,
    ) -> Result<(), String> {
        (0..self.disks.len()).try_for_each(|node| action(self, node))
    }

    pub(crate) fn keys(&self, node: usize) -> Vec<Key> {
        self.simulation.workload.borrow().histories[node].keys().to_vec()
    }

    /// Starts a core that acts in the middle of operations of the others, if the plan has one.
    fn start_parallel_core(&mut self, node: usize) {
        let Simulation { sim, node: nodes, random, faults, workload, .. } = &mut self.simulation;
        let (plan, under_test) = (nodes[node].sim_node.plan, &nodes[node]);
        let (Some(volume), Some(memory)) = (under_test.volume(), under_test.memory()) else { return };
        if plan.has_parallel_core {
            let host = under_test.sim_node.host;
            let (handle, random) = (handle_without_devices(sim, host), random.fork());
            let core = ParallelCore::new(volume, plan.cores, memory, node, workload, random, handle.clone());
            let core = Rc::new(core);
            let own = Rc::clone(&core);
            sim.add_reactor(host, handle, move |now| own.run_iteration(now));
            self.disks[node].parallel_core = Some(Rc::clone(&core));
            faults.disks()[node].set_interference(Some(Rc::new(move || core.act())));
        }
    }

    fn is_in_memory(&self, node: usize) -> bool {
        self.simulation.node[node].sim_node.plan.is_in_memory
    }

    /// Checks the calls up to the loss of a node's storage without an audit; the storage is then empty.
    fn forget_contents(&mut self, node: usize) -> Result<(), String> {
        let history = &mut self.simulation.workload.borrow_mut().histories[node];
        self.simulation.stats.undecided_keys += history.end_segment_unaudited()?;
        Ok(())
    }

    fn restore_defaults(&mut self) -> Result<(), String> {
        let Simulation { sim, node, workload, .. } = &self.simulation;
        self.operator.as_mut().map_or(Ok(()), |operator| operator.restore_defaults(sim, node, workload))
    }

    fn restart_node(&mut self, node: usize) -> Result<(), String> {
        if self.is_in_memory(node) {
            // The last look at its contents.
            self.audit_running_node(node)?;
        }
        let task_result = self.simulation.node[node].start_clean_shutdown();
        match self.wait_result("the clean shutdown", &task_result)? {
            Ok(()) => {}
            Err(_) if self.simulation.faults.disks()[node].has_failed() => {}
            Err(fault) => return Err(format!("clean shutdown failed: {fault}")),
        }
        self.stop(node, HostFailure::ProcessKilled);
        self.recover(node, &[])
    }

    fn audit_running_node(&mut self, node: usize) -> Result<(), String> {
        let keys = self.keys(node);
        let task_result = self.simulation.node[node].start_audit(keys);
        let found = self.wait_result("the audit", &task_result)?;
        self.check_audit(node, found)
    }

    pub(crate) fn wait_result<T>(&mut self, what: &str, task_result: &TaskResult<T>) -> Result<T, String> {
        self.wait_for(what, |_| task_result.borrow().is_some())?;
        task_result.borrow_mut().take().ok_or_else(|| format!("{what} has no result"))
    }

    fn count_checkpoints(&mut self, node: usize) {
        if let Some(volume) = self.simulation.node[node].volume() {
            let statistics = volume.statistics();
            self.simulation.stats.checkpoints += statistics.checkpoints;
            self.simulation.stats.cache_hits += statistics.cache.hits;
            let compaction = statistics.compaction;
            self.simulation.stats.compacted += compaction.joined_values + compaction.moved_records;
            if let Some(tree) = statistics.tree {
                self.simulation.stats.flushes += tree.flushes;
                self.simulation.stats.compactions += tree.compactions;
                self.simulation.stats.delayed_writes += tree.stalls.delayed_writes;
            }
            if let Some(log) = statistics.log {
                let stats = &mut self.simulation.stats.log;
                stats.splits += log.splits;
                stats.rounds += log.compaction_rounds;
                stats.moved_images += log.moved_images;
                stats.moved_values += log.moved_values;
                stats.markers += log.markers;
                stats.repeated_reads += log.repeated_reads;
                stats.image_cache_hits += log.image_cache_hits;
                stats.waited_writes += log.waited_writes;
                stats.lost_values += log.lost_values;
                assert_eq!(log.miscounts, 0, "live contents are counted wrongly");
            }
            let logs = match volume {
                AnyVolume::Log(logs) => Some(logs),
                AnyVolume::CachedLog(cached) => Some(cached.volume()),
                _ => None,
            };
            let has_replayed = logs.is_some_and(|logs| logs.replayed_images() > 0);
            self.simulation.stats.log.replays += u64::from(has_replayed);
        }
    }

    /// Checks the history of every key of a node against the audit and begins the next segment.
    fn check_audit(&mut self, node: usize, found: Vec<AuditResult>) -> Result<(), String> {
        let shared = Rc::clone(&self.simulation.workload);
        let history = &mut shared.borrow_mut().histories[node];
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(self.key_state_of(node, history, key, audited)?);
        }
        let relaxed = std::mem::take(&mut self.disks[node].may_lose_unflushed);
        let mut before = Vec::new();
        for (key, state) in states.iter().enumerate() {
            before.push(history.events(key).len());
            if relaxed && *state != KeyState::Corrupt {
                let allowed =
                    crash_survivors(&history.starts()[key..=key], history.events(key), history.flushes());
                if !matches_any(*state, &allowed) {
                    let key = &history.keys()[key];
                    return Err(format!(
                        "after the power loss {key} holds {state:?}, which is not one of {allowed:?}"
                    ));
                }
            }
        }
        history.record_audit(&states);
        for key in 0..states.len() {
            let events = match relaxed || states[key] == KeyState::Corrupt {
                true => &history.events(key)[..before[key]],
                false => history.events(key),
            };
            self.simulation.stats.undecided_keys += u64::from(!history.check(key, events)?);
        }
        history.next_segment(states);
        Ok(())
    }

    fn key_state_of(
        &self,
        node: usize,
        history: &History,
        key: usize,
        audited: AuditResult,
    ) -> Result<KeyState, String> {
        let name = &history.keys()[key];
        match audited {
            AuditResult::Missing => Ok(KeyState::Missing),
            AuditResult::Value(bytes) => history.state_of_value(key, &bytes),
            AuditResult::Corrupt(lba) => {
                if self.is_corrupted(node, lba) {
                    return Ok(KeyState::Corrupt);
                }
                Err(format!("{name}: the record at block {lba} is corrupted without an injected bit flip"))
            }
            AuditResult::Failed(fault) => Err(format!("{name} cannot be read: {fault}")),
        }
    }

    /// Flips bits of the disk: `records` in the record area, and one of one copy of the metadata if `metadata`.
    fn flip_bits(&mut self, node: usize, records: u64, metadata: bool) {
        let (index, corrupted_bytes) = (node, &mut self.disks[node].corrupted_bytes);
        let Simulation { node: nodes, random, stats, workload, .. } = &mut self.simulation;
        let node = &mut nodes[node];
        let Some(layout) = node.device_layout() else { return };
        for _ in 0..records {
            // Up to 50 attempts to hit a sector in use.
            for _ in 0..50 {
                let at = between(random, layout.records.start, layout.records.end - 1);
                if node.flip_bit(at, random.below(8) as u8) {
                    workload.borrow_mut().has_lost_blocks[index] = node.sim_node.plan.engine.shares_blocks();
                    corrupted_bytes.push(at);
                    stats.corrupted_bits += 1;
                    break;
                }
            }
        }
        if metadata {
            let images = &layout.images[random.below(layout.images.len() as u64) as usize];
            let spans = [&(0..2 * SUPERBLOCK_STRIDE_BYTES), &layout.journal, images];
            let span = spans[random.below(3) as usize];
            // An engine may have no journal.
            let span = if span.is_empty() { images } else { span };
            for _ in 0..50 {
                if node.flip_bit(between(random, span.start, span.end - 1), random.below(8) as u8) {
                    stats.corrupted_bits += 1;
                    break;
                }
            }
        }
    }

    /// Whether an injected bit flip is in the record that may begin at a block, or in a block that it shares with others.
    fn is_corrupted(&self, node: usize, lba: u64) -> bool {
        let bytes = &self.disks[node].corrupted_bytes;
        if self.simulation.node[node].sim_node.plan.engine.shares_blocks() {
            // A block of a table, whose keys stay lost when its table is gone; a bucket of a segment, which stays lost.
            return !bytes.is_empty();
        }
        bytes.iter().any(|&at| self.simulation.node[node].record_contains(lba, at))
    }

    /// Compares the statistics of a volume in memory with the keys of the last audit.
    fn verify_memory(&mut self, node: usize) -> Result<(), String> {
        let node_under_test = &self.simulation.node[node];
        let Some(volume) = node_under_test.volume() else { return Ok(()) };
        let (statistics, layout) = (volume.statistics(), volume.info().record_layout);
        let unit_bytes = node_under_test.sim_node.plan.unit_bytes as usize;
        let workload = self.simulation.workload.borrow();
        let history = &workload.histories[node];
        let (mut keys, mut used_bytes) = (0, 0);
        for (key, state) in history.keys().iter().zip(history.starts()) {
            if let KeyState::Holds { bytes, .. } = state {
                let record_bytes = layout.value_offset(key.len()) + *bytes as usize;
                keys += 1;
                used_bytes += record_bytes.next_multiple_of(unit_bytes) as u64;
            }
        }
        if (statistics.keys, statistics.used_bytes) != (keys, used_bytes) {
            return Err(format!(
                "the volume counts {} keys in {} B, the node served {keys} in {used_bytes} B",
                statistics.keys, statistics.used_bytes
            ));
        }
        Ok(())
    }

    /// Stops a node and verifies its disk: it must hold the keys of the last audit and no corruption but injected bit
    /// flips.
    fn verify_disk(&mut self, node: usize) -> Result<(), String> {
        let used = self.simulation.node[node].volume().map(|volume| volume.statistics().used_bytes);
        self.stop(node, HostFailure::ProcessKilled);
        let task_result = self.simulation.node[node].start_verify();
        let report = self.wait_result("verification", &task_result)?;
        let report = report.map_err(|error| format!("the disk cannot be verified: {error}"))?;
        for problem in &report.problems {
            if !self.is_corrupted(node, problem.lba) {
                return Err(format!("verify found: {problem}"));
            }
        }
        let present = |state: &&KeyState| **state != KeyState::Missing;
        let keys =
            self.simulation.workload.borrow().histories[node].starts().iter().filter(present).count() as u64;
        let engine = self.simulation.node[node].sim_node.plan.engine;
        if report.keys != keys && !(engine.shares_blocks() && self.is_corrupted(node, 0)) {
            return Err(format!("verify found {} keys, the node served {keys}", report.keys));
        }
        // Of a list that cannot be read the pieces are in use until the next opening, and free from then on.
        // Of a tree, space of work that the stop has cut off, and the segment to which puts write, is free then, too.
        let lost_some = (self.has_disk_faults
            || matches!(engine, EnginePlan::Tree(_) | EnginePlan::AsConfigured(EngineKind::Lsm)))
            && Some(report.used_bytes) < used;
        if Some(report.used_bytes) != used && !lost_some {
            return Err(format!("verify found {} B in use, the node reported {used:?}", report.used_bytes));
        }
        Ok(())
    }
}
