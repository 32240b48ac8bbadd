//! Simulations of the hash engine on a client, over a block namespace of a remote node.
//!
//! ```text
//!   node boots ─▶ engine session: connect, open, audit, run ─▶ (connection, client or node is lost ─▶ next session)
//!              ─▶ phase end: quiesce, restart or crash ─▶ …
//! ```
//! In: a [`scenario::RemoteScenarioPlan`]. Out: statistics, or the first violation. `runner.rs` has the phases. The
//! engine acknowledges a write when it is durable at the node: the next session must find it, regardless of crashes of
//! node and client and lost connections in between. The calls of every key between two sessions' audits must be
//! linearizable.
//!
//! # Layout
//! - this file: the runner. [`scenario`]: its plan. [`engine_session`]: one session of the engine.

pub mod engine_session;
pub mod scenario;

use crate::blocks::node::BlockNodeUnderTest;
use crate::history::History;
use crate::node_under_test::{AuditResult, handle_without_devices};
use crate::progress::LoadProgress;
use crate::runner::{ScenarioRunner, Simulation, run};
use crate::scenario::Scenario;
use crate::stats::ScenarioStats;
use engine_session::{EngineRunState, EngineSession};
use octokv_base::{Key, NamespaceId, Nanos};
use octokv_engine::OpenError;
use octokv_engine::conformance::key_of;
use octokv_engine::linearizability::KeyState;
use octokv_runtime::simulated::{HostFailure, SimReactorId};
use scenario::RemoteScenarioPlan;
use std::rc::Rc;

/// Pause between the end of a session and the start of the next.
const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// Consecutive sessions that may fail to open the volume while no fault is active.
const FAILED_SESSIONS_MAX: u64 = 50;
/// The client host that runs the engine.
const CLIENT: usize = 0;

struct RemoteRunner<'a> {
    plan: &'a RemoteScenarioPlan,
    simulation: Simulation<BlockNodeUnderTest, EngineRunState>,
    /// Reactor of the current session; `None` while the client host is down.
    session_reactor: Option<SimReactorId>,
    next_session_at: Nanos,
    failed_sessions: u64,
    open_error: Option<OpenError>,
}

/// Runs a plan.
///
/// # Errors
/// The first violated guarantee, with the simulated time.
pub fn run_scenario(plan: &RemoteScenarioPlan) -> Result<ScenarioStats, String> {
    let simulation = Simulation::begin(
        plan.seed ^ 0x4e07,
        plan.iteration_cost,
        plan.link,
        &[plan.host],
        1,
        |sim, faults| BlockNodeUnderTest::new(sim, &plan.block_plan(), faults[0].clone()),
        |_| EngineRunState {
            history: History::new((0..plan.load.keys).map(key_of).collect::<Vec<Key>>()),
            progress: LoadProgress::default(),
            formatted: false,
            open_result: None,
            may_submit: false,
            session_ended: true,
            closed_cleanly: false,
            fenced_sessions: 0,
        },
    );
    let runner = RemoteRunner {
        plan,
        simulation,
        session_reactor: None,
        next_session_at: Nanos::ZERO,
        failed_sessions: 0,
        open_error: None,
    };
    run(runner, &plan.phases)
}

impl ScenarioRunner for RemoteRunner<'_> {
    type Node = BlockNodeUnderTest;
    type Workload = EngineRunState;

    fn simulation(&self) -> &Simulation<BlockNodeUnderTest, EngineRunState> {
        &self.simulation
    }

    fn simulation_mut(&mut self) -> &mut Simulation<BlockNodeUnderTest, EngineRunState> {
        &mut self.simulation
    }

    /// The next duty begins a session.
    fn start_clients(&mut self, _host: usize) {}

    fn note_stopped_clients(&mut self, _host: usize) {
        self.session_reactor = None;
        self.simulation.workload.borrow_mut().history.node_is_up = false;
    }

    fn boot(&mut self) -> Result<(), String> {
        self.simulation.node.boot(&[NamespaceId(1)]);
        Ok(())
    }

    fn stop(&mut self, _node: usize, failure: HostFailure) {
        self.simulation.node.sim_node.stop(failure);
    }

    fn run_duties(&mut self) -> Result<bool, String> {
        self.supervise_session()?;
        Ok(false)
    }

    fn next_duty_at(&self) -> Nanos {
        let Simulation { sim, faults, workload, .. } = &self.simulation;
        let waits = self.session_reactor.is_none()
            && !faults.is_crashed(CLIENT)
            && !workload.borrow().progress.quiescing;
        if waits { self.next_session_at.max(sim.now() + Nanos(1)) } else { Nanos::NEVER }
    }

    fn has_duty(&self, workload: &EngineRunState) -> bool {
        workload.open_result.is_some() || (workload.session_ended && self.session_reactor.is_some())
    }

    /// Closes the engine, cleanly if possible.
    fn disconnect_clients(&mut self) -> Result<(), String> {
        self.run_until("the end of the engine session", |workload| workload.session_ended)?;
        let closed = self.simulation.workload.borrow().closed_cleanly;
        if self.plan.fault_profile == Scenario::Calm && !closed {
            return Err("the engine did not shut down cleanly although no fault was injected".to_owned());
        }
        self.end_session();
        Ok(())
    }

    /// Each session audits every key when it has opened the volume.
    fn audit(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// A final session audits the writes of the last one.
    fn finish(&mut self) -> Result<(), String> {
        self.simulation.workload.borrow_mut().progress.quiescing = false;
        self.run_until("the final audit", |workload| workload.may_submit)?;
        self.quiesce()?;
        self.simulation.stats.fenced_sessions = self.simulation.workload.borrow().fenced_sessions;
        Ok(())
    }

    fn digest(&self) -> u64 {
        self.simulation.workload.borrow().history.digest()
    }
}

impl RemoteRunner<'_> {
    fn begin_session(&mut self) {
        self.end_session();
        let Simulation { sim, random, node, hosts, workload, .. } = &mut self.simulation;
        let (client, node) = (hosts[CLIENT].id, node.sim_node.address());
        let handle = handle_without_devices(sim, client);
        {
            let mut shared = workload.borrow_mut();
            (shared.session_ended, shared.closed_cleanly, shared.may_submit, shared.open_result) =
                (false, false, false, None);
            shared.progress.add_client(handle.core_waker());
        }
        let random = random.fork();
        let mut session = EngineSession::new(sim, client, node, self.plan, random, handle.clone(), workload);
        self.session_reactor = Some(sim.add_reactor(client, handle, move |now| session.run_iteration(now)));
    }

    fn end_session(&mut self) {
        if let Some(reactor) = self.session_reactor.take() {
            self.simulation.sim.remove_reactor(reactor);
        }
        self.simulation.workload.borrow_mut().history.node_is_up = false;
    }

    /// Supervises sessions: checks the audit of a session that has opened the volume, replaces one that has ended.
    fn supervise_session(&mut self) -> Result<(), String> {
        self.take_violation()?;
        let opened = self.simulation.workload.borrow_mut().open_result.take();
        match opened {
            Some(Ok(found)) => self.check_audit(found)?,
            // Failed reads make recovery report corruption; permanent corruption fails the sessions that follow, too.
            Some(Err(error)) => {
                self.simulation.workload.borrow_mut().session_ended = true;
                self.open_error = Some(error);
            }
            None => {}
        }
        let (session_ended, quiescing) = (
            self.simulation.workload.borrow().session_ended,
            self.simulation.workload.borrow().progress.quiescing,
        );
        if !session_ended || self.simulation.faults.is_crashed(CLIENT) {
            return Ok(());
        }
        if self.session_reactor.is_some() {
            self.end_session();
            self.next_session_at = self.simulation.sim.now() + RETRY_DELAY;
            self.failed_sessions += 1;
            if self.simulation.faults.has_active() {
                self.failed_sessions = 0;
            }
            if self.failed_sessions > FAILED_SESSIONS_MAX {
                let why = self.open_error.take().map_or("no connection".to_owned(), |why| why.to_string());
                return Err(format!(
                    "{FAILED_SESSIONS_MAX} consecutive sessions failed to open the volume, the last with {why}"
                ));
            }
        }
        if !quiescing && self.simulation.sim.now() >= self.next_session_at {
            self.begin_session();
        }
        Ok(())
    }

    /// Checks the history of every key against the audit and begins the next segment.
    fn check_audit(&mut self, found: Vec<AuditResult>) -> Result<(), String> {
        let shared = Rc::clone(&self.simulation.workload);
        let shared = &mut *shared.borrow_mut();
        let history = &mut shared.history;
        let mut states = Vec::with_capacity(found.len());
        for (key, audited) in found.into_iter().enumerate() {
            states.push(match audited {
                AuditResult::Missing => KeyState::Missing,
                AuditResult::Value(bytes) => history.state_of_value(key, &bytes)?,
                AuditResult::Corrupt(lba) => {
                    return Err(format!("{}: the record at block {lba} is corrupted", history.keys()[key]));
                }
                // Connection or disk failed during the audit: the next session audits again.
                AuditResult::Failed(_) => {
                    shared.session_ended = true;
                    return Ok(());
                }
            });
        }
        history.record_audit(&states);
        for key in 0..states.len() {
            self.simulation.stats.undecided_keys += u64::from(!history.check(key, history.events(key))?);
        }
        history.next_segment(states);
        (history.node_is_up, shared.may_submit) = (true, true);
        shared.progress.notify_clients();
        self.failed_sessions = 0;
        Ok(())
    }
}
