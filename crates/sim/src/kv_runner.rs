//! Runs one simulation with key-value clients, from its plan.
//!
//! ```text
//!   boot ─▶ audit ─▶ phase: load and faults ─▶ its end: quiesce, bit flips, restart or crash ─▶ audit ─▶ … ─▶ verify
//! ```
//! In: a [`KvScenarioPlan`]. Out: statistics, or the first violation. The calls of every key between two audits must
//! be linearizable ([`octokv_engine::linearizability`]); after quiescing no resource may be in use; at the end the disk must
//! verify. Corruption is accepted only at bits that the plan flipped.

use crate::clients::{ClientHost, Clients};
use crate::fault_injector::FaultInjector;
use crate::faulty_disk::DiskFaults;
use crate::history::History;
use crate::kv_workload::KvWorkload;
use crate::node_under_test::{
    AuditResult, KvNodeUnderTest, RecoveryResult, TaskResult, handle_without_devices,
};
use crate::power_loss::{crash_survivors, matches_any};
use crate::progress::LoadProgress;
use crate::scenario::{FaultKind, KvScenarioPlan, Phase, PhaseEnd};
use crate::sim_node::SimNode;
use crate::stats::{PROGRESS_TIMEOUT, ScenarioStats};
use octokv_base::prng::mix64;
use octokv_base::{Key, Nanos, Prng};
use octokv_engine::Durability;
use octokv_engine::conformance::key_of;
use octokv_engine::hash::superblock::SUPERBLOCK_STRIDE_BYTES;
use octokv_engine::linearizability::{CheckResult, KeyState, Observed, check_linearizable};
use octokv_runtime::simulated::{CrashModel, HostFailure, SimEnv, SimEnvConfig};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Time after which an idle volume has written its durability marker.
const DURABILITY_MARKER_DELAY: Nanos = Nanos::from_millis(60);

struct KvRunner<'a> {
    plan: &'a KvScenarioPlan,
    sim: SimEnv,
    random: Prng,
    node: KvNodeUnderTest,
    hosts: Vec<ClientHost>,
    shared: Rc<RefCell<KvWorkload>>,
    faults: FaultInjector,
    /// Offsets of bytes with flipped bits; some may have been overwritten since.
    corrupted_bytes: Vec<u64>,
    /// Whether writes acknowledged since the last audit may be lost.
    may_lose_unflushed: bool,
    /// Failed writes and flushes at the last start of the node.
    writes_failed: u64,
    stats: ScenarioStats,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &KvScenarioPlan) -> Result<ScenarioStats, String> {
    let mut runner = KvRunner::new(plan);
    let result = runner.run();
    let at = runner.sim.now();
    result.map_err(|message| {
        format!(
            "at {} ns, {} core(s), durability {:?}: {message}",
            at.0, plan.node.cores, plan.node.durability
        )
    })?;
    Ok(runner.stats)
}

impl<'a> KvRunner<'a> {
    fn new(plan: &'a KvScenarioPlan) -> KvRunner<'a> {
        let mut random = Prng::new(mix64(plan.seed ^ 0x0c70));
        let config = SimEnvConfig {
            seed: random.next_u64(),
            iteration_cost_min: plan.iteration_cost,
            link: plan.link,
        };
        let sim = SimEnv::new(config);
        let faults = DiskFaults::new(random.fork());
        let node = KvNodeUnderTest::new(&sim, plan.node, faults.clone());
        let is_key_used = |key: &Key| plan.load.long_keys || key.len() <= 16;
        let keys = (0..).map(key_of).filter(is_key_used).take(plan.load.keys as usize).collect();
        let shared = KvWorkload {
            history: History::new(keys),
            load: plan.load,
            progress: LoadProgress::default(),
            faults: faults.clone(),
        };
        let shared = Rc::new(RefCell::new(shared));
        let hosts: Vec<ClientHost> = plan.hosts.iter().map(|host| ClientHost::new(&sim, *host)).collect();
        let clients = hosts.iter().map(|host| host.id).collect();
        let faults = FaultInjector::new(&sim, node.sim_node.host, clients, plan.link, faults);
        let stats = ScenarioStats::default();
        KvRunner {
            plan,
            sim,
            random,
            node,
            hosts,
            shared,
            faults,
            corrupted_bytes: Vec::new(),
            may_lose_unflushed: false,
            writes_failed: 0,
            stats,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot(true, &[])?;
        for index in 0..self.hosts.len() {
            self.start_clients(index);
        }
        for phase in &self.plan.phases {
            self.run_phase(phase)?;
        }
        self.quiesce_and_audit()?;
        self.verify_disk()?;
        let shared = self.shared.borrow();
        self.stats.operations = shared.progress.completed;
        self.stats.succeeded = shared.progress.succeeded;
        (self.stats.offloaded, self.stats.queued) = self.node.sim_node.offloaded_and_queued();
        self.stats.elapsed = self.sim.now();
        self.stats.device_errors = self.faults.disk().operations_failed();
        self.stats.trace_hash = mix64(self.sim.trace_hash() ^ shared.history.digest());
        Ok(())
    }

    fn keys(&self) -> Vec<Key> {
        self.shared.borrow().history.keys().to_vec()
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
            PhaseEnd::Quiesce => self.quiesce_and_audit()?,
            PhaseEnd::CorruptBits { records, metadata, restart } => {
                self.quiesce_and_audit()?;
                self.corrupt_bits(*records, *metadata);
                if *restart || *metadata {
                    self.restart()?;
                } else {
                    self.audit_quiescent()?;
                }
            }
            PhaseEnd::Restart => {
                self.quiesce()?;
                self.restart()?;
            }
            PhaseEnd::Crash { stop, steps_before: steps, crashes_in_recovery } => {
                for _ in 0..*steps {
                    self.sim.step(Nanos::NEVER);
                }
                self.crash(*stop);
                self.end_all_faults();
                self.boot(false, crashes_in_recovery)?;
            }
        }
        self.take_violation()
    }

    /// Runs until `completed` commands have completed, ending faults at their end times.
    fn run_until_completed(&mut self, completed: u64) -> Result<(), String> {
        let mut deadline = self.sim.now() + PROGRESS_TIMEOUT;
        loop {
            let next = self.faults.next_end();
            let shared = Rc::clone(&self.shared);
            let done = || {
                let shared = shared.borrow();
                shared.progress.completed >= completed || shared.progress.violation.is_some()
            };
            let limit = next.min(deadline);
            if self.sim.run_until_true(limit, done) {
                return self.take_violation();
            }
            let now = self.sim.now();
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
        let idle = self.wait_for("the node's work for disconnected clients", SimNode::is_quiescent);
        if let Err(message) = idle {
            return Err(format!("{message} ({})", self.node.sim_node.find_leak().unwrap_or_default()));
        }
        // By then the volume has written its durability marker.
        self.sim.run_until(self.sim.now() + DURABILITY_MARKER_DELAY);
        self.wait_for("the node's background work", SimNode::is_quiescent)?;
        self.node.sim_node.find_leak().map_or(Ok(()), |leak| Err(format!("a leak: {leak}")))
    }

    /// Quiesces and audits every key.
    fn quiesce_and_audit(&mut self) -> Result<(), String> {
        self.quiesce()?;
        if self.faults.disk().writes_failed() > self.writes_failed {
            // A failed write of a journal batch may become visible only after a restart.
            self.crash(HostFailure::ProcessKilled);
            self.boot(false, &[])?;
            return self.quiesce();
        }
        self.audit_quiescent()
    }

    fn audit_quiescent(&mut self) -> Result<(), String> {
        let task_result = self.node.start_audit(self.keys());
        let found = self.wait_result("the audit", &task_result)?;
        self.check_audit(found)
    }

    fn wait_result<T>(&mut self, what: &str, task_result: &TaskResult<T>) -> Result<T, String> {
        self.wait_for(what, |_| task_result.borrow().is_some())?;
        task_result.borrow_mut().take().ok_or_else(|| format!("{what} has no result"))
    }

    /// Shuts the node down cleanly and starts it crashes_in_recovery.
    fn restart(&mut self) -> Result<(), String> {
        let task_result = self.node.start_clean_shutdown();
        match self.wait_result("the clean shutdown", &task_result)? {
            Ok(()) => {}
            Err(_) if self.faults.disk().operations_failed() > 0 => {}
            Err(fault) => return Err(format!("clean shutdown failed: {fault}")),
        }
        self.count_checkpoints();
        self.shared.borrow_mut().history.node_is_up = false;
        self.node.stop(HostFailure::ProcessKilled);
        self.boot(false, &[])
    }

    fn count_checkpoints(&mut self) {
        if let Some(volume) = self.node.volume() {
            self.stats.checkpoints += volume.statistics().checkpoints;
        }
    }

    fn crash(&mut self, stop: HostFailure) {
        self.count_checkpoints();
        self.shared.borrow_mut().history.node_is_up = false;
        self.stats.crashes += 1;
        let loses = matches!(stop, HostFailure::PowerLoss(plan) if plan != CrashModel::KeepAll);
        self.may_lose_unflushed |= loses && self.plan.node.durability == Durability::Completed;
        self.node.stop(stop);
    }

    /// Recovers and audits the volume and starts serving; `crashes_in_recovery` lists crashes during recovery.
    fn boot(&mut self, first: bool, crashes_in_recovery: &[(Nanos, HostFailure)]) -> Result<(), String> {
        let keys = self.keys();
        let mut task_result = self.node.start_recovery(keys.clone(), first);
        for &(after, stop) in crashes_in_recovery {
            self.sim.run_until(self.sim.now() + after);
            self.crash(stop);
            task_result = self.node.start_recovery(keys.clone(), first);
        }
        let opened: RecoveryResult = self.wait_result("recovery", &task_result)?;
        let (volume, found) = opened.map_err(|error| format!("the node cannot open its disk: {error}"))?;
        self.check_audit(found)?;
        self.node.start_serving(volume);
        self.writes_failed = self.faults.disk().writes_failed();
        self.shared.borrow_mut().history.node_is_up = true;
        Ok(())
    }

    /// Checks the history of every key against the audit and begins the next segment.
    fn check_audit(&mut self, found: Vec<AuditResult>) -> Result<(), String> {
        let shared = Rc::clone(&self.shared);
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
            match check_linearizable(history.starts()[key], events) {
                CheckResult::Linearizable => {}
                CheckResult::Undecided => self.stats.undecided_keys += 1,
                CheckResult::NotLinearizable => {
                    return Err(format!("not linearizable: {}", history.listing(key, events)));
                }
            }
        }
        history.next_segment(states);
        Ok(())
    }

    fn key_state_of(&self, history: &History, key: usize, audited: AuditResult) -> Result<KeyState, String> {
        let name = &history.keys()[key];
        match audited {
            AuditResult::Missing => Ok(KeyState::Missing),
            AuditResult::Value(bytes) => match history.identify_value(key, &bytes, bytes.len() as u32)? {
                Observed::Value(operation) => {
                    Ok(KeyState::Holds { operation, bytes: history.value_bytes_of(operation) })
                }
                _ => Ok(KeyState::Holds { operation: 0, bytes: 0 }),
            },
            AuditResult::Corrupt(lba) => {
                if self.corrupted_bytes.iter().any(|&at| self.node.record_contains(lba, at)) {
                    return Ok(KeyState::Corrupt);
                }
                Err(format!("{name}: the record at block {lba} is corrupted without an injected bit flip"))
            }
            AuditResult::Failed(fault) => Err(format!("{name} cannot be read: {fault}")),
        }
    }

    /// Flips bits of the disk: `records` in the record area, and one of one copy of the metadata if `metadata`.
    fn corrupt_bits(&mut self, records: u64, metadata: bool) {
        let Some(superblock) = self.node.superblock() else { return };
        let unit = u64::from(superblock.unit_bytes);
        let (first, end) = (superblock.data_start_unit * unit, superblock.units() * unit);
        for _ in 0..records {
            // Up to 50 attempts to hit a sector in use.
            for _ in 0..50 {
                let at = first + self.random.below(end - first);
                if self.node.flip_bit(at, self.random.below(8) as u8) {
                    self.corrupted_bytes.push(at);
                    self.stats.corrupted_bits += 1;
                    break;
                }
            }
        }
        if metadata {
            let journal = superblock.journal_start_unit(0) * unit;
            let area = superblock.area_start_unit(self.random.below(2) as u8, 0) * unit;
            let spans = [
                (0, 2 * SUPERBLOCK_STRIDE_BYTES),
                (journal, u64::from(superblock.journal_units) * unit),
                (area, superblock.area_units * unit),
            ];
            let (start, bytes) = spans[self.random.below(3) as usize];
            for _ in 0..50 {
                if self.node.flip_bit(start + self.random.below(bytes), self.random.below(8) as u8) {
                    self.stats.corrupted_bits += 1;
                    break;
                }
            }
        }
    }

    /// Stops the node and verifies its disk: it must hold the keys of the last audit and no corruption but injected bit
    /// flips.
    fn verify_disk(&mut self) -> Result<(), String> {
        self.count_checkpoints();
        let used = self.node.volume().map(|volume| volume.statistics().used_bytes);
        self.shared.borrow_mut().history.node_is_up = false;
        self.node.stop(HostFailure::ProcessKilled);
        let task_result = self.node.start_verify();
        let report = self.wait_result("verification", &task_result)?;
        let report = report.map_err(|error| format!("the disk cannot be verified: {error}"))?;
        for problem in &report.problems {
            if !self.corrupted_bytes.iter().any(|&at| self.node.record_contains(problem.lba, at)) {
                return Err(format!("verify found: {problem}"));
            }
        }
        let present = |state: &&KeyState| **state != KeyState::Missing;
        let keys = self.shared.borrow().history.starts().iter().filter(present).count() as u64;
        if report.keys != keys {
            return Err(format!("verify found {} keys, the node served {keys}", report.keys));
        }
        if Some(report.used_bytes) != used {
            return Err(format!("verify found {} B in use, the node reported {used:?}", report.used_bytes));
        }
        Ok(())
    }
}
