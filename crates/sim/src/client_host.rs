//! One client host: sessions of the production client that submit random key-value commands.
//!
//! In: the node's address, a random number generator, and the state shared by all hosts. Out: calls and their
//! results in the history, and the first violation.
//!
//! Invariants: each submitted command completes exactly once while its session exists; a command of a dropped
//! session has an unknown outcome; while quiescing, sessions submit nothing and end, by a disconnect or by a drop.

use crate::draw::{draw_value_bytes, draw_weighted};
use crate::faulty_disk::DiskFaults;
use crate::history::{CallId, History};
use crate::scenario::{ClientHostPlan, KvLoad};
use octokv_base::map::FxHashMap;
use octokv_base::{Key, Nanos, Prng};
use octokv_client::{
    ClientConfig, Command, ConnectionError, Error, Reconnect, Response, Session, StoreMode, Value,
};
use octokv_engine::PutMode;
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::{SimEnv, SimHostId, SimSockets};
use octokv_wire::kv::UncheckedKeyList;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

/// State shared by all client hosts of a simulation.
pub struct KvRunState {
    /// Calls and results of all clients.
    pub history: History,
    /// Distribution of commands.
    pub load: KvLoad,
    /// Commands submitted so far.
    pub submitted: u64,
    /// Maximum of `submitted` in this phase.
    pub submit_limit: u64,
    /// Commands completed, or lost with their session.
    pub completed: u64,
    /// Commands completed without error.
    pub succeeded: u64,
    /// The first violated guarantee.
    pub violation: Option<String>,
    /// Active faults of the node's disk.
    pub faults: DiskFaults,
    /// Whether clients submit nothing and disconnect.
    pub quiescing: bool,
}

/// Buffer lengths of lists, in bytes: one that holds every key of the simulation, and one that truncates.
const LIST_BYTES: [u32; 2] = [64 << 10, 300];
const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// Time that a disconnect may take before the session is dropped.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(3);

/// A command without a response yet.
struct OutstandingKvCommand {
    kind: KvCommandKind,
    id: CallId,
    reads_failed: u64,
}

enum KvCommandKind {
    Put,
    Delete,
    Get { key: usize },
    Exist,
    List { whole: bool },
    Flush,
}

struct KvSessionSlot {
    session: Option<Session<SimSockets>>,
    pending: FxHashMap<u64, OutstandingKvCommand>,
    /// Time of the next connection attempt or command.
    not_before: Nanos,
    /// Start of the disconnect, if one is in progress.
    closing_since: Option<Nanos>,
}

/// One client host, as the runner sees it.
pub struct ClientHost {
    /// The simulated host.
    pub id: SimHostId,
    /// Its configuration.
    pub plan: ClientHostPlan,
    /// Number of sessions, updated in each iteration; the runner waits until it is 0.
    pub session_count: Rc<Cell<usize>>,
}

/// The sessions of one host; a reactor drives them.
pub struct KvClients {
    sim: SimEnv,
    host: SimHostId,
    node: SocketAddr,
    plan: ClientHostPlan,
    random: Prng,
    handle: ReactorHandle,
    shared: Rc<RefCell<KvRunState>>,
    slots: Vec<KvSessionSlot>,
    next_token: u64,
    session_count: Rc<Cell<usize>>,
}

impl KvClients {
    /// Clients on `host` for the node at address `node`.
    pub fn new(
        sim: &SimEnv,
        host: &ClientHost,
        node: SocketAddr,
        random: Prng,
        handle: ReactorHandle,
        shared: &Rc<RefCell<KvRunState>>,
    ) -> KvClients {
        let ClientHost { id: host, plan, session_count } = host;
        let slot = |_| KvSessionSlot {
            session: None,
            pending: FxHashMap::default(),
            not_before: Nanos::ZERO,
            closing_since: None,
        };
        session_count.set(0);
        KvClients {
            sim: sim.clone(),
            host: *host,
            node,
            plan: *plan,
            random,
            handle,
            shared: Rc::clone(shared),
            slots: (0..plan.sessions).map(slot).collect(),
            next_token: 0,
            session_count: Rc::clone(session_count),
        }
    }

    /// Runs one reactor iteration. Returns whether any work was done.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        self.handle.begin_iteration(now);
        let (mut busy, mut wake) = (false, Nanos::NEVER);
        for index in 0..self.slots.len() {
            busy |= self.run_slot(index, now);
            let quiescing = self.shared.borrow().quiescing;
            let slot = &self.slots[index];
            wake = wake.min(match &slot.session {
                Some(session) => {
                    let submit_at = if slot.not_before > now { slot.not_before } else { Nanos::NEVER };
                    let closed_at = slot.closing_since.map_or(Nanos::NEVER, |since| since + CLOSE_TIMEOUT);
                    session.next_deadline().min(submit_at).min(closed_at)
                }
                None if quiescing => Nanos::NEVER,
                None => slot.not_before.max(now + Nanos(1)),
            });
        }
        self.session_count.set(self.slots.iter().filter(|slot| slot.session.is_some()).count());
        self.handle.request_wakeup_at(wake);
        busy
    }

    fn run_slot(&mut self, index: usize, now: Nanos) -> bool {
        let quiescing = self.shared.borrow().quiescing;
        let slot = &mut self.slots[index];
        if slot.session.is_none() {
            if quiescing || now < slot.not_before {
                return false;
            }
            let config = client_config(self.host, &self.plan);
            let sockets = self.sim.sockets(self.host);
            let slot = &mut self.slots[index];
            slot.session = Some(Session::new(sockets, self.node, config, now));
            return true;
        }
        let mut busy = self.poll(index, now);
        let slot = &mut self.slots[index];
        let ended = slot.session.as_ref().is_none_or(|session| session.ended().is_some());
        if ended || (quiescing && self.should_drop_session(index, now)) {
            self.drop_session(index, now);
            return true;
        }
        if quiescing {
            return busy;
        }
        while self.can_submit(index, now) {
            self.submit(index, now);
            busy = true;
        }
        busy
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return false };
        let (shared, pending) = (&self.shared, &mut slot.pending);
        session.poll(now, |token, response| {
            let mut shared = shared.borrow_mut();
            match pending.remove(&token) {
                Some(command) => shared.complete(command, response),
                None => shared.fail(format!("token {token} completed twice")),
            }
        })
    }

    /// While quiescing: whether to drop this session now; otherwise starts its disconnect once no command is pending.
    fn should_drop_session(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        if let Some(since) = slot.closing_since {
            return now >= since + CLOSE_TIMEOUT;
        }
        let Some(session) = &mut slot.session else { return false };
        if !session.is_live() {
            return true;
        }
        if !slot.pending.is_empty() && !self.random.one_in(2_000) {
            return false;
        }
        if self.random.one_in(2) {
            return true;
        }
        let (shared, pending) = (&self.shared, &mut slot.pending);
        session.close(now, |token, response| {
            if let Some(command) = pending.remove(&token) {
                shared.borrow_mut().complete(command, response);
            }
        });
        slot.closing_since = Some(now);
        false
    }

    fn drop_session(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = slot.session.take() else { return };
        let mut shared = self.shared.borrow_mut();
        if let Some(Error::Connect(_, lost)) = session.ended()
            && is_protocol_violation(&lost)
        {
            shared.fail(format!("protocol violation: a session ended: {lost}"));
        }
        shared.completed += slot.pending.len() as u64;
        drop((shared, session));
        slot.pending.clear();
        (slot.not_before, slot.closing_since) = (now + RETRY_DELAY, None);
    }

    fn can_submit(&self, index: usize, now: Nanos) -> bool {
        let slot = &self.slots[index];
        let shared = self.shared.borrow();
        let has_free_slot = slot.session.as_ref().is_some_and(|session| session.free_slots() > 0);
        has_free_slot
            && now >= slot.not_before
            && slot.pending.len() < self.plan.commands_max
            && shared.submitted < shared.submit_limit
            && shared.violation.is_none()
    }

    fn submit(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return };
        let mut shared = self.shared.borrow_mut();
        let token = self.next_token;
        self.next_token += 1;
        let submitted = shared.submit_random(&mut self.random, |command| session.submit(command, token));
        match submitted {
            Ok(command) => drop(slot.pending.insert(token, command)),
            Err(why) => shared.fail(why),
        }
        if self.plan.think_time_max > Nanos::ZERO {
            slot.not_before = now + Nanos(self.random.below(self.plan.think_time_max.0));
        }
    }
}

impl Drop for KvClients {
    /// The host crashed: its outstanding commands never complete.
    fn drop(&mut self) {
        let lost: usize = self.slots.iter().map(|slot| slot.pending.len()).sum();
        self.shared.borrow_mut().completed += lost as u64;
    }
}

/// Client configuration of a host.
pub(crate) fn client_config(host: SimHostId, plan: &ClientHostPlan) -> ClientConfig {
    ClientConfig {
        host_nqn: format!("nqn.2026-11.io.octokv:client-{}", host.0),
        host_id: [host.0 as u8; 16],
        io_queues: plan.queues,
        queue_depth: plan.queue_depth,
        header_digest: plan.header_digest,
        data_digest: plan.data_digest,
        command_timeout: plan.command_timeout,
        connect_timeout: Nanos::from_secs(2),
        keep_alive: plan.keep_alive,
        reconnect: Reconnect::BackOff {
            first_delay: Nanos::from_millis(1),
            delay_max: Nanos::from_millis(50),
            give_up_after: Nanos::from_secs(5),
        },
        receive_buffer_bytes: 64 << 10,
        pool_bytes: 64 << 20,
        ..ClientConfig::default()
    }
}

/// Whether this error violates the protocol: no fault of hosts, links or disks may cause it.
fn is_protocol_violation(lost: &ConnectionError) -> bool {
    match lost {
        ConnectionError::Closed
        | ConnectionError::TimedOut
        | ConnectionError::ControllerFatal
        | ConnectionError::ConnectRejected(_)
        | ConnectionError::InitFailed(_) => false,
        ConnectionError::Protocol(_)
        | ConnectionError::Terminated { .. }
        | ConnectionError::AuthenticationRequired
        | ConnectionError::NamespaceNotFound
        | ConnectionError::UnsupportedCommandSet
        | ConnectionError::UnsupportedBlockFormat
        | ConnectionError::NamespaceChanged => true,
    }
}

impl KvRunState {
    /// Records the first violation; ignores later ones.
    pub fn fail(&mut self, message: String) {
        self.violation.get_or_insert(message);
    }

    /// Draws a command and passes it to `submit`.
    fn submit_random(
        &mut self,
        random: &mut Prng,
        submit: impl FnOnce(Command<'_>) -> Result<(), octokv_client::SubmitError>,
    ) -> Result<OutstandingKvCommand, String> {
        self.submitted += 1;
        let command_index = draw_weighted(random, &self.load.mix);
        let index = random.below(self.load.keys) as usize;
        let key = self.history.keys()[index].clone();
        let reads_failed = self.faults.reads_failed();
        let pending = |kind, id| OutstandingKvCommand { kind, id, reads_failed };
        let (pending, submitted) = match command_index {
            0..3 => {
                let modes = [
                    (StoreMode::Upsert, PutMode::Upsert),
                    (StoreMode::AddOnly, PutMode::AddOnly),
                    (StoreMode::UpdateOnly, PutMode::UpdateOnly),
                ];
                let (store_mode, mode) = modes[command_index];
                let bytes = draw_value_bytes(random, self.load.value_bytes_max);
                let operation = self.history.next_operation(bytes as u32);
                let value = value_of(&key, operation, bytes);
                let id = self.history.begin(index, Call::Put { operation, bytes: bytes as u32, mode });
                let command = Command::Store { key, value: Value::Slice(&value), mode: store_mode };
                (pending(KvCommandKind::Put, id), submit(command))
            }
            3 | 4 => {
                let limit_bytes = if command_index == 3 { u32::MAX } else { 8 + random.below(3_000) as u32 };
                let id = self.history.begin(index, Call::Get);
                (
                    pending(KvCommandKind::Get { key: index }, id),
                    submit(Command::Retrieve { key, limit_bytes }),
                )
            }
            5 => {
                let id = self.history.begin(index, Call::Delete);
                (pending(KvCommandKind::Delete, id), submit(Command::Delete { key }))
            }
            6 => {
                let id = self.history.begin(index, Call::Exist);
                (pending(KvCommandKind::Exist, id), submit(Command::Exist { key }))
            }
            7 => {
                let whole = random.one_in(2);
                let id = self.history.begin_keyless();
                let start = if whole { Key::new(&[]).ok_or("no empty key")? } else { key };
                let limit_bytes = LIST_BYTES[usize::from(!whole)];
                (pending(KvCommandKind::List { whole }, id), submit(Command::List { start, limit_bytes }))
            }
            _ => {
                let id = self.history.begin_keyless();
                (pending(KvCommandKind::Flush, id), submit(Command::Flush))
            }
        };
        submitted.map_err(|why| format!("the client rejected a command: {why:?}"))?;
        Ok(pending)
    }

    /// Records the response of a command and checks it.
    fn complete(&mut self, pending: OutstandingKvCommand, response: Result<Response, Error>) {
        self.completed += 1;
        self.succeeded += u64::from(response.is_ok());
        let checked = match response {
            Ok(response) => self.check_response(&pending, response),
            Err(error) => self.check_error(&pending, &error),
        };
        if let Err(message) = checked {
            self.fail(message);
        }
    }

    fn check_response(&mut self, pending: &OutstandingKvCommand, response: Response) -> Result<(), String> {
        let outcome = match (&pending.kind, response) {
            (KvCommandKind::Put, Response::Stored) | (KvCommandKind::Delete, Response::Deleted) => {
                CallResult::Acknowledged
            }
            (KvCommandKind::Put, Response::NotFound | Response::AlreadyExists) => CallResult::ConditionFailed,
            (KvCommandKind::Delete, Response::NotFound) => CallResult::ConditionFailed,
            (KvCommandKind::Get { .. } | KvCommandKind::Exist, Response::NotFound) => {
                CallResult::Observed(Observed::Absent)
            }
            (KvCommandKind::Get { key }, Response::Value { data, full_bytes }) => {
                CallResult::Observed(self.history.identify_value(*key, &data, full_bytes)?)
            }
            (KvCommandKind::Exist, Response::Exists { value_bytes }) => {
                CallResult::Observed(value_bytes.map_or(Observed::Present, Observed::Length))
            }
            (KvCommandKind::List { whole }, Response::Keys { list }) => {
                return self.check_list(pending.id, *whole, &list);
            }
            (KvCommandKind::Flush, Response::Flushed) => {
                self.history.record_flush(pending.id);
                return Ok(());
            }
            (_, response) => return Err(format!("unexpected response: {response:?}")),
        };
        self.history.end(pending.id, outcome)
    }

    fn check_error(&mut self, pending: &OutstandingKvCommand, error: &Error) -> Result<(), String> {
        let on_key = !matches!(pending.kind, KvCommandKind::List { .. } | KvCommandKind::Flush);
        match error {
            Error::Disconnected(lost) if is_protocol_violation(lost) => return Err(format!("{error}")),
            Error::Busy
            | Error::CapacityExceeded
            | Error::Disconnected(_)
            | Error::TimedOut
            | Error::Closed => {
                if on_key {
                    self.history.mark_not_executed(pending.id);
                }
            }
            Error::OutcomeUnknown => {}
            Error::UnrecoveredRead => return self.check_unrecovered(pending),
            other => return Err(format!("unexpected error: {other}")),
        }
        Ok(())
    }

    /// An unrecovered write may have been executed; an unrecovered read requires a corrupted record or a device error.
    fn check_unrecovered(&mut self, pending: &OutstandingKvCommand) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > pending.reads_failed;
        match pending.kind {
            KvCommandKind::Put | KvCommandKind::Delete | KvCommandKind::Flush
                if self.faults.operations_failed() > 0 =>
            {
                Ok(())
            }
            KvCommandKind::Put | KvCommandKind::Delete | KvCommandKind::Flush => {
                Err("a write failed without a device error".to_owned())
            }
            KvCommandKind::List { .. } if read_failed => Ok(()),
            KvCommandKind::List { .. } => Err("a list failed without a device error".to_owned()),
            KvCommandKind::Get { .. } | KvCommandKind::Exist if read_failed => {
                self.history.mark_not_executed(pending.id);
                Ok(())
            }
            KvCommandKind::Get { .. } | KvCommandKind::Exist => {
                self.history.end(pending.id, CallResult::Observed(Observed::Corrupt))
            }
        }
    }

    fn check_list(&mut self, id: CallId, whole: bool, list: &[u8]) -> Result<(), String> {
        let list = UncheckedKeyList(list).check().map_err(|short| format!("malformed list: {short:?}"))?;
        let mut listed = vec![false; self.history.keys().len()];
        for key in list.keys() {
            let Some(index) = self.history.key_index(key) else {
                return Err(format!("a list contains {key:?}, which no client stored"));
            };
            if std::mem::replace(&mut listed[index], true) {
                return Err(format!("a list contains {key:?} twice"));
            }
        }
        for (index, &is_listed) in listed.iter().enumerate() {
            if is_listed || whole {
                let seen = if is_listed { Observed::Present } else { Observed::Absent };
                self.history.record_listing(id, index, seen);
            }
        }
        Ok(())
    }
}
