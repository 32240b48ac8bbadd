//! Simulations of the hash engine on a client, over a block namespace of a remote node.
//!
//! ```text
//!   node boots ─▶ engine session: connect, open, audit, run ─▶ (connection, client or node is lost ─▶ next session)
//!              ─▶ phase end: quiesce, restart or crash ─▶ …
//! ```
//! In: a [`scenario::RemoteScenarioPlan`]. Out: statistics, or the first violation. The engine acknowledges a write
//! when it is durable at the node: the next session must find it, regardless of crashes of node and client and lost
//! connections in between. The calls of every key between two sessions' audits must be linearizable.
//!
//! # Layout
//! - this file: the runner. [`scenario`]: its plan. [`engine_session`]: one session of the engine.

pub mod engine_session;
pub mod scenario;

use crate::blocks::node::BlockNodeUnderTest;
use crate::fault_injector::FaultInjector;
use crate::faulty_disk::DiskFaults;
use crate::history::History;
use crate::node_under_test::{AuditResult, handle_without_devices};
use crate::progress::LoadProgress;
use crate::scenario::{Phase, PhaseEnd, Scenario};
use crate::stats::{PROGRESS_TIMEOUT, ScenarioStats};
use engine_session::{EngineRunState, EngineSession};
use octokv_base::prng::mix64;
use octokv_base::{Key, NamespaceId, Nanos, Prng};
use octokv_engine::conformance::key_of;
use octokv_engine::hash::OpenError;
use octokv_engine::linearizability::{CheckResult, KeyState, Observed, check_linearizable};
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimHostId, SimReactorId};
use scenario::RemoteScenarioPlan;
use std::cell::RefCell;
use std::rc::Rc;

/// Pause between the end of a session and the start of the next.
const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// Consecutive sessions that may fail to open the volume while no fault is active.
const FAILED_SESSIONS_MAX: u64 = 50;

struct RemoteRunner<'a> {
    plan: &'a RemoteScenarioPlan,
    sim: SimEnv,
    random: Prng,
    node: BlockNodeUnderTest,
    client: SimHostId,
    /// Reactor of the current session; `None` while the client host is down.
    session_reactor: Option<SimReactorId>,
    next_session_at: Nanos,
    failed_sessions: u64,
    open_error: Option<OpenError>,
    shared: Rc<RefCell<EngineRunState>>,
    faults: FaultInjector,
    stats: ScenarioStats,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &RemoteScenarioPlan) -> Result<ScenarioStats, String> {
    let mut runner = RemoteRunner::new(plan);
    let result = runner.run();
    let at = runner.sim.now();
    result.map_err(|message| format!("at {} ns, {} core(s): {message}", at.0, plan.node.cores))?;
    Ok(runner.stats)
}

impl<'a> RemoteRunner<'a> {
    fn new(plan: &'a RemoteScenarioPlan) -> RemoteRunner<'a> {
        let mut random = Prng::new(mix64(plan.seed ^ 0x4e07));
        let config = SimEnvConfig {
            seed: random.next_u64(),
            iteration_cost_min: plan.iteration_cost,
            link: plan.link,
        };
        let sim = SimEnv::new(config);
        let faults = DiskFaults::new(random.fork());
        let node = BlockNodeUnderTest::new(&sim, &plan.block_plan(), faults.clone());
        let client = sim.add_host();
        let faults = FaultInjector::new(&sim, node.sim_node.host, vec![client], plan.link, faults);
        let shared = EngineRunState {
            history: History::new((0..plan.load.keys).map(key_of).collect::<Vec<Key>>()),
            progress: LoadProgress::default(),
            formatted: false,
            open_result: None,
            may_submit: false,
            session_ended: true,
            closed_cleanly: false,
            fenced_sessions: 0,
        };
        RemoteRunner {
            plan,
            sim,
            random,
            node,
            client,
            session_reactor: None,
            next_session_at: Nanos::ZERO,
            failed_sessions: 0,
            open_error: None,
            shared: Rc::new(RefCell::new(shared)),
            faults,
            stats: ScenarioStats::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        self.boot();
        for phase in &self.plan.phases {
            self.run_phase(phase)?;
        }
        self.quiesce()?;
        // A final session audits the writes of the last one.
        self.shared.borrow_mut().progress.quiescing = false;
        self.run_until("the final audit", |shared| shared.may_submit)?;
        self.quiesce()?;
        let shared = self.shared.borrow();
        self.stats.operations = shared.progress.completed;
        self.stats.succeeded = shared.progress.succeeded;
        self.stats.fenced_sessions = shared.fenced_sessions;
        self.stats.elapsed = self.sim.now();
        self.stats.device_errors = self.faults.disk().operations_failed();
        self.stats.trace_hash = mix64(self.sim.trace_hash() ^ shared.history.digest());
        Ok(())
    }

    fn boot(&mut self) {
        self.node.boot(&[NamespaceId(1)]);
    }

    fn begin_session(&mut self) {
        self.end_session();
        let handle = handle_without_devices(&self.sim, self.client);
        {
            let mut shared = self.shared.borrow_mut();
            (shared.session_ended, shared.closed_cleanly, shared.may_submit, shared.open_result) =
                (false, false, false, None);
        }
        let random = self.random.fork();
        let mut session = EngineSession::new(
            &self.sim,
            self.client,
            self.node.sim_node.address(),
            self.plan,
            random,
            handle.clone(),
            &self.shared,
        );
        self.session_reactor =
            Some(self.sim.add_reactor(self.client, handle, move |now| session.run_iteration(now)));
    }

    fn end_session(&mut self) {
        if let Some(reactor) = self.session_reactor.take() {
            self.sim.remove_reactor(reactor);
        }
        self.shared.borrow_mut().history.node_is_up = false;
    }

    /// Supervises sessions: checks the audit of a session that has opened the volume, replaces one that has ended.
    fn supervise_session(&mut self) -> Result<(), String> {
        self.take_violation()?;
        let opened = self.shared.borrow_mut().open_result.take();
        match opened {
            Some(Ok(found)) => self.check_audit(found)?,
            // Failed reads make recovery report corruption; permanent corruption fails the sessions that follow, too.
            Some(Err(error)) => {
                self.shared.borrow_mut().session_ended = true;
                self.open_error = Some(error);
            }
            None => {}
        }
        let (session_ended, quiescing) =
            (self.shared.borrow().session_ended, self.shared.borrow().progress.quiescing);
        if !session_ended || self.faults.is_crashed(0) {
            return Ok(());
        }
        if self.session_reactor.is_some() {
            self.end_session();
            self.next_session_at = self.sim.now() + RETRY_DELAY;
            self.failed_sessions += 1;
            if self.faults.has_active() {
                self.failed_sessions = 0;
            }
            if self.failed_sessions > FAILED_SESSIONS_MAX {
                let why = self.open_error.take().map_or("no connection".to_owned(), |why| why.to_string());
                return Err(format!(
                    "{FAILED_SESSIONS_MAX} consecutive sessions failed to open the volume, the last with {why}"
                ));
            }
        }
        if !quiescing && self.sim.now() >= self.next_session_at {
            self.begin_session();
        }
        Ok(())
    }

    /// Runs until `done`, supervising sessions and ending faults at their end times.
    fn run_until(&mut self, what: &str, done: impl Fn(&EngineRunState) -> bool) -> Result<(), String> {
        let mut deadline = self.sim.now() + PROGRESS_TIMEOUT;
        loop {
            self.supervise_session()?;
            if done(&self.shared.borrow()) {
                return Ok(());
            }
            let next = self.faults.next_end();
            let waits = self.session_reactor.is_none()
                && !self.faults.is_crashed(0)
                && !self.shared.borrow().progress.quiescing;
            let session_at =
                if waits { self.next_session_at.max(self.sim.now() + Nanos(1)) } else { Nanos::NEVER };
            let shared = Rc::clone(&self.shared);
            let has_session = self.session_reactor.is_some();
            let has_event = || {
                let shared = shared.borrow();
                done(&shared)
                    || shared.progress.violation.is_some()
                    || shared.open_result.is_some()
                    || (shared.session_ended && has_session)
            };
            self.sim.run_until_true(next.min(deadline).min(session_at), has_event);
            let now = self.sim.now();
            while let Some(kind) = self.faults.take_due(now) {
                self.faults.end(kind);
                deadline = now + PROGRESS_TIMEOUT;
            }
            if now >= deadline {
                return Err(format!("no progress: {what} does not happen"));
            }
        }
    }

    fn take_violation(&self) -> Result<(), String> {
        self.shared.borrow_mut().progress.take_violation()
    }

    fn run_phase(&mut self, phase: &Phase) -> Result<(), String> {
        let begun = self.shared.borrow_mut().progress.begin_phase(phase);
        let completed =
            |count: u64| move |shared: &EngineRunState| shared.progress.completed >= begun + count;
        for fault in &phase.faults {
            self.run_until("the completion of an operation", completed(fault.after_commands))?;
            if self.faults.begin(fault).is_some() {
                self.session_reactor = None;
                self.shared.borrow_mut().history.node_is_up = false;
            }
        }
        self.run_until("the completion of an operation", completed(phase.operations))?;
        match &phase.end {
            PhaseEnd::Quiesce | PhaseEnd::CorruptBits { .. } => self.quiesce()?,
            PhaseEnd::Restart => {
                self.quiesce()?;
                self.node.sim_node.stop(HostFailure::ProcessKilled);
                self.boot();
            }
            PhaseEnd::Crash { stop, steps_before: steps, crashes_in_recovery } => {
                for _ in 0..*steps {
                    self.sim.step(Nanos::NEVER);
                }
                self.crash(*stop);
                for &(after, stop) in crashes_in_recovery {
                    let until = self.sim.now() + after;
                    self.sim.run_until(until);
                    self.supervise_session()?;
                    self.crash(stop);
                }
                self.end_all_faults();
            }
        }
        self.supervise_session()
    }

    fn crash(&mut self, stop: HostFailure) {
        self.stats.crashes += 1;
        self.node.sim_node.stop(stop);
        self.boot();
    }

    fn end_all_faults(&mut self) {
        for kind in self.faults.take_all() {
            self.faults.end(kind);
        }
    }

    /// Closes the engine, cleanly if possible, and waits until no resource of the node is in use.
    fn quiesce(&mut self) -> Result<(), String> {
        self.end_all_faults();
        self.shared.borrow_mut().progress.quiescing = true;
        self.run_until("the end of the engine session", |shared| shared.session_ended)?;
        let closed = self.shared.borrow().closed_cleanly;
        if self.plan.fault_profile == Scenario::Calm && !closed {
            return Err("the engine did not shut down cleanly although no fault was injected".to_owned());
        }
        self.end_session();
        // Every core takes the messages that other cores have sent it.
        self.sim.step(Nanos::NEVER);
        let deadline = self.sim.now() + PROGRESS_TIMEOUT;
        let node = &self.node.sim_node;
        let is_idle = self.sim.run_until_true(deadline, || node.is_quiescent());
        match self.node.sim_node.find_leak() {
            Some(leak) => Err(format!("a leak: {leak}")),
            None if is_idle => Ok(()),
            None => Err("no progress: the node does not become idle".to_owned()),
        }
    }

    /// Checks the history of every key against the audit and begins the next segment.
    fn check_audit(&mut self, found: Vec<AuditResult>) -> Result<(), String> {
        let shared = Rc::clone(&self.shared);
        let shared = &mut *shared.borrow_mut();
        let history = &mut shared.history;
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(match audited {
                AuditResult::Missing => KeyState::Missing,
                AuditResult::Value(bytes) => match history.identify_value(key, &bytes, bytes.len() as u32)? {
                    Observed::Value(operation) => {
                        KeyState::Holds { operation, bytes: history.value_bytes_of(operation) }
                    }
                    _ => KeyState::Holds { operation: 0, bytes: 0 },
                },
                AuditResult::Corrupt(lba) => {
                    return Err(format!("{}: the record at block {lba} is corrupted", history.keys()[key]));
                }
                // Connection or disk failed during the audit: the next session audits crashes_in_recovery.
                AuditResult::Failed(_) => {
                    shared.session_ended = true;
                    return Ok(());
                }
            });
        }
        history.record_audit(&states);
        for key in 0..states.len() {
            match check_linearizable(history.starts()[key], history.events(key)) {
                CheckResult::Linearizable => {}
                CheckResult::Undecided => self.stats.undecided_keys += 1,
                CheckResult::NotLinearizable => {
                    return Err(format!("not linearizable: {}", history.listing(key, history.events(key))));
                }
            }
        }
        history.next_segment(states);
        (history.node_is_up, shared.may_submit) = (true, true);
        self.failed_sessions = 0;
        Ok(())
    }
}
