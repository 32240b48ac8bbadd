//! One session of an engine on a client host, over a block namespace: from its connection to its end.
//!
//! ```text
//!   Connecting ──live──▶ Opening ──opened, every key audited──▶ Running ──▶ Closing ──▶ Ended
//!        │                  │                                     │ a write error, or fenced  ▲
//!        └──────────────────┴─────────────────────────────────────┴───────────────────────────┘
//! ```
//! In: an address, a random number generator, the load. Out: calls and results in the history; the audit of recovery.
//! Some calls are dropped half done, and their outcome is unknown: the engine runs them to their end.
//! Invariants: a session begins no call after its first failed write; an ended session has no task.

use super::scenario::RemoteScenarioPlan;
use crate::clients::client_config;
use crate::draw::{draw_value_bytes, draw_weighted};
use crate::history::{CallId, History};
use crate::node_under_test::{AuditResult, audit_keys};
use crate::progress::{LoadProgress, TrackProgress};
use crate::scenario::NodePlan;
use octokv_base::{BufferPool, Nanos, Prng};
use octokv_client::{ClientConfig, RemoteSession, Session};
use octokv_device::Device;
use octokv_engine::conformance::{record_of, value_of};
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_engine::{
    AnyEngine, AnyVolume, DeleteOutcome, Durability, Engine, EngineError, OpenConfig, OpenError, PutMode,
    PutOutcome, Volume, WallClock,
};
use octokv_runtime::simulated::{SimEnv, SimHostId, SimSockets};
use octokv_runtime::{DeviceHandle, ReactorHandle};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

/// One call in this many is dropped, after a random time up to [`PATIENCE_MAX`].
const CALLS_PER_DROP: u64 = 16;
/// Longer than most calls take.
const PATIENCE_MAX: Nanos = Nanos::from_millis(2);

/// State that all engine sessions share with the runner.
pub struct EngineRunState {
    /// Calls and results of all sessions.
    pub history: History,
    /// Counters and limits of the load; while quiescing, the session closes the engine.
    pub progress: LoadProgress,
    /// Whether a format of the volume has completed.
    pub formatted: bool,
    /// Result of recovery in the current session, until the runner takes it.
    pub open_result: Option<Result<Vec<AuditResult>, OpenError>>,
    /// Whether the runner has checked the audit, so that operations may begin.
    pub may_submit: bool,
    /// Whether the current session has ended.
    pub session_ended: bool,
    /// Whether it ended with a clean shutdown.
    pub closed_cleanly: bool,
    /// Sessions fenced because writes may have been lost with the connection.
    pub fenced_sessions: u64,
}

impl TrackProgress for EngineRunState {
    fn progress(&self) -> &LoadProgress {
        &self.progress
    }

    fn progress_mut(&mut self) -> &mut LoadProgress {
        &mut self.progress
    }
}

struct ConnectedEngine {
    remote: RemoteSession<SimSockets>,
    channel: DeviceHandle,
    opened: Rc<RefCell<Option<OpenedEngine>>>,
}

/// The engine of a session, with its volume.
#[derive(Clone)]
struct OpenedEngine {
    engine: Rc<AnyEngine>,
    volume: AnyVolume,
}

/// One engine session; a reactor drives it.
pub struct EngineSession {
    plan: RemoteScenarioPlan,
    random: Prng,
    handle: ReactorHandle,
    shared: Rc<RefCell<EngineRunState>>,
    session: Option<Session<SimSockets>>,
    connected: Option<ConnectedEngine>,
    calls_running: Rc<Cell<usize>>,
    must_end: Rc<Cell<bool>>,
    closing: bool,
}

impl EngineSession {
    /// A session that starts to connect.
    pub fn new(
        sim: &SimEnv,
        host: SimHostId,
        node: SocketAddr,
        plan: &RemoteScenarioPlan,
        random: Prng,
        handle: ReactorHandle,
        shared: &Rc<RefCell<EngineRunState>>,
    ) -> EngineSession {
        let config = ClientConfig { ..client_config(host, &plan.host) };
        let session = Session::new(sim.sockets(host), node, config, sim.now());
        EngineSession {
            plan: plan.clone(),
            random,
            handle,
            shared: Rc::clone(shared),
            session: Some(session),
            connected: None,
            calls_running: Rc::default(),
            must_end: Rc::default(),
            closing: false,
        }
    }

    /// Runs one reactor iteration. Returns whether any work was done.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        let mut busy = self.handle.begin_iteration(now) > 0;
        if self.shared.borrow().session_ended {
            return false;
        }
        busy |= self.connect(now);
        let Some(connected) = &self.connected else {
            let wake = self.session.as_ref().map_or(Nanos::NEVER, Session::next_deadline);
            self.handle.request_wakeup_at(wake);
            return busy;
        };
        let (remote, channel) = (connected.remote.clone(), connected.channel.clone());
        busy |= remote.poll(now);
        busy |= self.handle.poll_background() > 0;
        busy |= channel.poll() > 0;
        busy |= self.handle.poll_background() > 0;
        if remote.is_fenced() || remote.with_session(|session| session.ended().is_some()) {
            self.must_end.set(true);
        }
        while self.can_submit() {
            self.submit();
            busy = true;
        }
        busy |= self.handle.poll_background() > 0;
        busy |= self.end_if_due();
        self.handle.request_wakeup_at(remote.next_deadline());
        busy
    }

    fn connect(&mut self, now: Nanos) -> bool {
        let Some(session) = &mut self.session else { return false };
        let busy = session.poll(now, |_, _| ());
        if session.ended().is_some() || self.shared.borrow().progress.quiescing {
            self.session = None;
            self.end();
            return true;
        }
        if session.is_live()
            && let Some(session) = self.session.take()
        {
            match RemoteSession::new(session, now) {
                Ok(remote) => self.open(remote),
                Err(error) => self
                    .shared
                    .borrow_mut()
                    .progress
                    .fail(format!("a live session has no block device: {error}")),
            }
            return true;
        }
        busy
    }

    /// Opens the volume and audits every key, in the background.
    fn open(&mut self, remote: RemoteSession<SimSockets>) {
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        let opened: Rc<RefCell<Option<OpenedEngine>>> = Rc::default();
        let (shared, opened_by_task) = (Rc::clone(&self.shared), Rc::clone(&opened));
        let (format, handle) = (self.plan.format_config(), self.handle.clone());
        let pool = BufferPool::new(self.plan.node.pool_bytes);
        let NodePlan { cache_bytes, compact_bytes_per_second, .. } = self.plan.node;
        self.connected = Some(ConnectedEngine { remote, channel, opened });
        self.handle.spawn(async move {
            let open = async {
                let devices = [device];
                if !shared.borrow().formatted {
                    AnyVolume::format(&devices, &format).await?;
                    shared.borrow_mut().formatted = true;
                }
                let config = OpenConfig {
                    durability: Durability::PowerSafe,
                    cores: 1,
                    cache_bytes,
                    prepare_bytes: 0,
                    compact_bytes_per_second,
                    tree: OpenConfig::TREE,
                    swap_gap: OpenConfig::SWAP_GAP,
                    clock: WallClock::default(),
                    tokens: None,
                };
                let volume = AnyVolume::open(&devices, &pool, config, &format).await?;
                let engine = Rc::new(volume.engine(0, &devices, pool));
                Ok(OpenedEngine { engine, volume })
            };
            match open.await {
                Ok(opened) => {
                    let engine = Rc::clone(&opened.engine);
                    let keys = shared.borrow().history.keys().to_vec();
                    let found = audit_keys(&engine, &keys).await;
                    shared.borrow_mut().open_result = Some(Ok(found));
                    *opened_by_task.borrow_mut() = Some(opened);
                    let abandoning = Rc::clone(&engine);
                    handle.spawn(async move { abandoning.run_abandoned().await });
                    engine.maintain(&handle, |_| ()).await;
                }
                Err(error) => shared.borrow_mut().open_result = Some(Err(error)),
            }
        });
    }

    fn opened(&self) -> Option<OpenedEngine> {
        self.connected.as_ref()?.opened.borrow().clone()
    }

    fn can_submit(&self) -> bool {
        let shared = self.shared.borrow();
        shared.may_submit
            && !self.must_end.get()
            && !shared.progress.quiescing
            && shared.progress.may_submit()
            && self.calls_running.get() < self.plan.host.commands_max
    }

    fn submit(&mut self) {
        let Some(OpenedEngine { engine, .. }) = self.opened() else { return };
        let (random, load) = (&mut self.random, self.plan.load);
        let kind = draw_weighted(random, &load.mix);
        let index = random.below(load.keys) as usize;
        let bytes = draw_value_bytes(random, load.value_bytes_max);
        let (shared, running, must_end) =
            (Rc::clone(&self.shared), Rc::clone(&self.calls_running), Rc::clone(&self.must_end));
        let patience = (random.below(CALLS_PER_DROP) == 0).then(|| Nanos(random.below(PATIENCE_MAX.0)));
        let handle = self.handle.clone();
        shared.borrow_mut().progress.submitted += 1;
        running.set(running.get() + 1);
        self.handle.spawn(async move {
            let call = run_call(&engine, &shared, &must_end, kind, index, bytes);
            match patience {
                None => call.await,
                Some(patience) => drop_after(&handle, patience, call).await,
            }
            shared.borrow_mut().progress.completed += 1;
            running.set(running.get() - 1);
        });
    }

    /// While quiescing, closes the engine; ends the session once it is closed or after a write error.
    fn end_if_due(&mut self) -> bool {
        let (quiescing, may_submit) =
            (self.shared.borrow().progress.quiescing, self.shared.borrow().may_submit);
        if self.calls_running.get() > 0 {
            return false;
        }
        // A write that is still in flight could reach the disk after the next session has recovered.
        if self.must_end.get() && self.opened().is_none_or(|opened| opened.volume.is_idle()) {
            self.end();
            return true;
        }
        if quiescing
            && may_submit
            && !self.closing
            && let Some(OpenedEngine { engine, volume }) = self.opened()
            && volume.is_idle()
        {
            self.closing = true;
            let (shared, running, must_end) =
                (Rc::clone(&self.shared), Rc::clone(&self.calls_running), Rc::clone(&self.must_end));
            running.set(1);
            self.handle.spawn(async move {
                let closed = engine.close().await;
                shared.borrow_mut().closed_cleanly = closed.is_ok();
                running.set(0);
                must_end.set(true);
            });
            return true;
        }
        false
    }

    fn end(&mut self) {
        let fenced = self.connected.as_ref().is_some_and(|connected| connected.remote.is_fenced());
        let mut shared = self.shared.borrow_mut();
        shared.fenced_sessions += u64::from(fenced);
        shared.may_submit = false;
        shared.session_ended = true;
    }
}

impl Drop for EngineSession {
    /// Outstanding operations never complete; the tasks that hold the handle are dropped.
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        shared.progress.completed += self.calls_running.get() as u64;
        (shared.may_submit, shared.session_ended) = (false, true);
        drop(shared);
        self.connected = None;
        self.handle.shutdown();
    }
}

/// Drops a call that has not ended after `patience`: its outcome is unknown.
async fn drop_after(handle: &ReactorHandle, patience: Nanos, call: impl Future<Output = ()>) {
    let (mut call, mut end) = (pin!(call), pin!(handle.sleep(patience)));
    poll_fn(|context| match call.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => end.as_mut().poll(context),
    })
    .await;
}

/// Runs one engine operation and records its result.
async fn run_call(
    engine: &AnyEngine,
    shared: &RefCell<EngineRunState>,
    must_end: &Cell<bool>,
    kind: usize,
    index: usize,
    bytes: usize,
) {
    let key = shared.borrow().history.keys()[index].clone();
    let begin = |call| shared.borrow_mut().history.begin(index, call);
    let (id, outcome) = match kind {
        0..3 => {
            let mode = [PutMode::Upsert, PutMode::AddOnly, PutMode::UpdateOnly][kind];
            let operation = shared.borrow_mut().history.next_operation(bytes as u32);
            let value = value_of(&key, operation, bytes);
            let id = begin(Call::Put { operation, bytes: bytes as u32, mode });
            let outcome = match engine
                .put(&key, mode, record_of(engine.record_layout(), &key, &value), bytes)
                .await
            {
                Ok(PutOutcome::Stored) => Ok(Some(CallResult::Acknowledged)),
                Ok(PutOutcome::Exists | PutOutcome::NotFound) => Ok(Some(CallResult::ConditionFailed)),
                Ok(PutOutcome::Full) => Ok(None),
                Ok(PutOutcome::TooLong | PutOutcome::OtherVersion(_) | PutOutcome::NotNewer(_)) => Err(None),
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
        5 => {
            let id = begin(Call::Delete);
            let outcome = match engine.delete(&key).await {
                Ok(DeleteOutcome::Deleted) => Ok(Some(CallResult::Acknowledged)),
                Ok(DeleteOutcome::NotFound) => Ok(Some(CallResult::ConditionFailed)),
                Ok(DeleteOutcome::NotNewer(_)) => Err(None),
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
        6 => {
            let id = begin(Call::Exist);
            let found = engine.exist(&key).await.map_err(Some);
            let seen = |found: Option<usize>| {
                Some(CallResult::Observed(
                    found.map_or(Observed::Absent, |bytes| Observed::Length(bytes as u32)),
                ))
            };
            (id, found.map(seen))
        }
        8 => {
            // Every acknowledged write is already durable: a flush changes no key.
            must_end.set(must_end.get() | engine.flush().await.is_err());
            return;
        }
        _ => {
            let id = begin(Call::Get);
            let outcome = match engine.get(&key).await {
                Ok(None) => Ok(Some(CallResult::Observed(Observed::Absent))),
                Ok(Some(value)) => {
                    let bytes = value.as_bytes();
                    match shared.borrow().history.identify_value(index, bytes, bytes.len() as u32) {
                        Ok(seen) => Ok(Some(CallResult::Observed(seen))),
                        Err(message) => return shared.borrow_mut().progress.fail(message),
                    }
                }
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
    };
    let writes = matches!(kind, 0..3 | 5);
    record_outcome(&mut shared.borrow_mut(), must_end, id, writes, outcome);
}

fn record_outcome(
    shared: &mut EngineRunState,
    must_end: &Cell<bool>,
    id: CallId,
    writes: bool,
    outcome: Result<Option<CallResult>, Option<EngineError>>,
) {
    let recorded = match outcome {
        Ok(Some(outcome)) => {
            shared.progress.succeeded += 1;
            shared.history.end(id, outcome)
        }
        Ok(None) => {
            shared.history.mark_not_executed(id);
            Ok(())
        }
        Err(Some(EngineError::NoMemory)) => {
            shared.history.mark_not_executed(id);
            Ok(())
        }
        // The write may have been executed; the next session's audit finds out.
        Err(Some(EngineError::Device { .. } | EngineError::ReadOnly)) if writes => {
            must_end.set(true);
            Ok(())
        }
        Err(Some(EngineError::Device { .. } | EngineError::ReadOnly)) => {
            shared.history.mark_not_executed(id);
            Ok(())
        }
        Err(fault) => Err(format!("unexpected error: {fault:?}")),
    };
    if let Err(message) = recorded {
        shared.progress.fail(message);
    }
}
