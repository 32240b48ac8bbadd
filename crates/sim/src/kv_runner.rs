//! Runs one simulation with key-value clients, from its plan.
//!
//! ```text
//!   boot: recovery, audit ─▶ … ─▶ end of a phase: bit flips, clean shutdown or crash ─▶ audit ─▶ … ─▶ verify
//! ```
//! In: a [`KvScenarioPlan`]. Out: statistics, or the first violation. `runner.rs` has the phases. The calls of every
//! key between two audits must be linearizable ([`octokv_engine::linearizability`]); at the end the disk must verify.
//! Corruption is accepted only at bits that the plan flipped.

use crate::history::History;
use crate::kv_workload::KvWorkload;
use crate::node_under_test::{AuditResult, KvNodeUnderTest, RecoveryResult, TaskResult};
use crate::power_loss::{crash_survivors, matches_any};
use crate::progress::LoadProgress;
use crate::runner::{ScenarioRunner, Simulation, run};
use crate::scenario::KvScenarioPlan;
use crate::stats::ScenarioStats;
use octokv_base::{Key, Nanos};
use octokv_engine::Durability;
use octokv_engine::conformance::key_of;
use octokv_engine::hash::superblock::SUPERBLOCK_STRIDE_BYTES;
use octokv_engine::linearizability::KeyState;
use octokv_runtime::simulated::{CrashModel, HostFailure};
use std::rc::Rc;

/// Time after which an idle volume has written its durability marker.
const DURABILITY_MARKER_DELAY: Nanos = Nanos::from_millis(60);

struct KvRunner {
    simulation: Simulation<KvNodeUnderTest, KvWorkload>,
    /// Whether the disk has been formatted.
    is_formatted: bool,
    /// Offsets of bytes with flipped bits; some may have been overwritten since.
    corrupted_bytes: Vec<u64>,
    /// Whether writes acknowledged since the last audit may be lost.
    may_lose_unflushed: bool,
    /// Failed writes and flushes at the last start of the node.
    writes_failed: u64,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &KvScenarioPlan) -> Result<ScenarioStats, String> {
    let is_key_used = |key: &Key| plan.load.long_keys || key.len() <= 16;
    let keys = (0..).map(key_of).filter(is_key_used).take(plan.load.keys as usize).collect();
    let simulation = Simulation::begin(
        plan.seed ^ 0x0c70,
        plan.iteration_cost,
        plan.link,
        &plan.hosts,
        |sim, faults| KvNodeUnderTest::new(sim, plan.node, faults),
        |faults| KvWorkload {
            history: History::new(keys),
            load: plan.load,
            progress: LoadProgress::default(),
            faults,
        },
    );
    let runner = KvRunner {
        simulation,
        is_formatted: false,
        corrupted_bytes: Vec::new(),
        may_lose_unflushed: false,
        writes_failed: 0,
    };
    run(runner, &plan.phases)
}

impl ScenarioRunner for KvRunner {
    type Node = KvNodeUnderTest;
    type Workload = KvWorkload;

    fn simulation(&self) -> &Simulation<KvNodeUnderTest, KvWorkload> {
        &self.simulation
    }

    fn simulation_mut(&mut self) -> &mut Simulation<KvNodeUnderTest, KvWorkload> {
        &mut self.simulation
    }

    fn start_clients(&mut self, host: usize) {
        self.simulation.start_clients(host);
    }

    fn boot(&mut self) -> Result<(), String> {
        self.recover(&[])
    }

    /// Recovers and audits the volume and starts serving; the crashes are during recovery.
    fn recover(&mut self, crashes_in_recovery: &[(Nanos, HostFailure)]) -> Result<(), String> {
        let keys = self.simulation.workload.borrow().history.keys().to_vec();
        let format = !self.is_formatted;
        let mut task_result = self.simulation.node.start_recovery(keys.clone(), format);
        for &(after, failure) in crashes_in_recovery {
            let sim = &self.simulation.sim;
            sim.run_until(sim.now() + after);
            self.crash(failure);
            task_result = self.simulation.node.start_recovery(keys.clone(), format);
        }
        let opened: RecoveryResult = self.wait_result("recovery", &task_result)?;
        let (volume, found) = opened.map_err(|error| format!("the node cannot open its disk: {error}"))?;
        self.is_formatted = true;
        self.check_audit(found)?;
        self.simulation.node.start_serving(volume);
        self.writes_failed = self.simulation.faults.disk().writes_failed();
        self.simulation.workload.borrow_mut().history.node_is_up = true;
        Ok(())
    }

    fn stop(&mut self, failure: HostFailure) {
        self.count_checkpoints();
        self.simulation.workload.borrow_mut().history.node_is_up = false;
        self.simulation.node.stop(failure);
    }

    fn crash(&mut self, failure: HostFailure) {
        let loses = matches!(failure, HostFailure::PowerLoss(model) if model != CrashModel::KeepAll);
        let durability = self.simulation.node.sim_node.plan.durability;
        self.may_lose_unflushed |= loses && durability == Durability::Completed;
        self.simulation.stats.crashes += 1;
        self.stop(failure);
    }

    /// Shuts the node down cleanly and starts it.
    fn restart(&mut self) -> Result<(), String> {
        let task_result = self.simulation.node.start_clean_shutdown();
        match self.wait_result("the clean shutdown", &task_result)? {
            Ok(()) => {}
            Err(_) if self.simulation.faults.disk().operations_failed() > 0 => {}
            Err(fault) => return Err(format!("clean shutdown failed: {fault}")),
        }
        self.stop(HostFailure::ProcessKilled);
        self.boot()
    }

    /// Waits also for the durability marker, which the volume then has written.
    fn settle(&mut self) -> Result<(), String> {
        self.wait_until_quiescent("the node's work for disconnected clients")?;
        let sim = &self.simulation.sim;
        sim.run_until(sim.now() + DURABILITY_MARKER_DELAY);
        self.wait_until_quiescent("the node's background work")
    }

    fn audit(&mut self) -> Result<(), String> {
        if self.simulation.faults.disk().writes_failed() > self.writes_failed {
            // A failed write of a journal batch may become visible only after a restart.
            self.crash(HostFailure::ProcessKilled);
            self.boot()?;
            return self.quiesce();
        }
        self.audit_running_node()
    }

    fn corrupt_bits(&mut self, records: u64, metadata: bool, restart: bool) -> Result<(), String> {
        self.flip_bits(records, metadata);
        if restart || metadata { self.restart() } else { self.audit_running_node() }
    }

    fn finish(&mut self) -> Result<(), String> {
        self.verify_disk()
    }

    fn digest(&self) -> u64 {
        self.simulation.workload.borrow().history.digest()
    }
}

impl KvRunner {
    fn audit_running_node(&mut self) -> Result<(), String> {
        let keys = self.simulation.workload.borrow().history.keys().to_vec();
        let task_result = self.simulation.node.start_audit(keys);
        let found = self.wait_result("the audit", &task_result)?;
        self.check_audit(found)
    }

    fn wait_result<T>(&mut self, what: &str, task_result: &TaskResult<T>) -> Result<T, String> {
        self.wait_for(what, |_| task_result.borrow().is_some())?;
        task_result.borrow_mut().take().ok_or_else(|| format!("{what} has no result"))
    }

    fn count_checkpoints(&mut self) {
        if let Some(volume) = self.simulation.node.volume() {
            self.simulation.stats.checkpoints += volume.statistics().checkpoints;
        }
    }

    /// Checks the history of every key against the audit and begins the next segment.
    fn check_audit(&mut self, found: Vec<AuditResult>) -> Result<(), String> {
        let shared = Rc::clone(&self.simulation.workload);
        let history = &mut shared.borrow_mut().history;
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(self.key_state_of(history, key, audited)?);
        }
        let relaxed = std::mem::take(&mut self.may_lose_unflushed);
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

    fn key_state_of(&self, history: &History, key: usize, audited: AuditResult) -> Result<KeyState, String> {
        let name = &history.keys()[key];
        match audited {
            AuditResult::Missing => Ok(KeyState::Missing),
            AuditResult::Value(bytes) => history.state_of_value(key, &bytes),
            AuditResult::Corrupt(lba) => {
                if self.corrupted_bytes.iter().any(|&at| self.simulation.node.record_contains(lba, at)) {
                    return Ok(KeyState::Corrupt);
                }
                Err(format!("{name}: the record at block {lba} is corrupted without an injected bit flip"))
            }
            AuditResult::Failed(fault) => Err(format!("{name} cannot be read: {fault}")),
        }
    }

    /// Flips bits of the disk: `records` in the record area, and one of one copy of the metadata if `metadata`.
    fn flip_bits(&mut self, records: u64, metadata: bool) {
        let Simulation { node, random, stats, .. } = &mut self.simulation;
        let Some(superblock) = node.superblock() else { return };
        let unit = u64::from(superblock.unit_bytes);
        let (first, end) = (superblock.data_start_unit * unit, superblock.units() * unit);
        for _ in 0..records {
            // Up to 50 attempts to hit a sector in use.
            for _ in 0..50 {
                let at = first + random.below(end - first);
                if node.flip_bit(at, random.below(8) as u8) {
                    self.corrupted_bytes.push(at);
                    stats.corrupted_bits += 1;
                    break;
                }
            }
        }
        if metadata {
            let journal = superblock.journal_start_unit(0) * unit;
            let area = superblock.area_start_unit(random.below(2) as u8, 0) * unit;
            let spans = [
                (0, 2 * SUPERBLOCK_STRIDE_BYTES),
                (journal, u64::from(superblock.journal_units) * unit),
                (area, superblock.area_units * unit),
            ];
            let (start, bytes) = spans[random.below(3) as usize];
            for _ in 0..50 {
                if node.flip_bit(start + random.below(bytes), random.below(8) as u8) {
                    stats.corrupted_bits += 1;
                    break;
                }
            }
        }
    }

    /// Stops the node and verifies its disk: it must hold the keys of the last audit and no corruption but injected bit
    /// flips.
    fn verify_disk(&mut self) -> Result<(), String> {
        let used = self.simulation.node.volume().map(|volume| volume.statistics().used_bytes);
        self.stop(HostFailure::ProcessKilled);
        let task_result = self.simulation.node.start_verify();
        let report = self.wait_result("verification", &task_result)?;
        let report = report.map_err(|error| format!("the disk cannot be verified: {error}"))?;
        for problem in &report.problems {
            if !self.corrupted_bytes.iter().any(|&at| self.simulation.node.record_contains(problem.lba, at)) {
                return Err(format!("verify found: {problem}"));
            }
        }
        let present = |state: &&KeyState| **state != KeyState::Missing;
        let keys = self.simulation.workload.borrow().history.starts().iter().filter(present).count() as u64;
        if report.keys != keys {
            return Err(format!("verify found {} keys, the node served {keys}", report.keys));
        }
        if Some(report.used_bytes) != used {
            return Err(format!("verify found {} B in use, the node reported {used:?}", report.used_bytes));
        }
        Ok(())
    }
}
