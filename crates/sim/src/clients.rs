//! One client host: sessions of the production client, driven by a [`Workload`].
//!
//! In: the node's address, a random number generator, and the workload, which all hosts of a simulation share. Out:
//! commands and their responses, passed to the workload.
//!
//! Invariants: each submitted command completes exactly once while its session exists; a command of a dropped
//! session has an unknown outcome; while quiescing, sessions submit nothing and end, by a disconnect or by a drop.

use crate::progress::TrackProgress;
use crate::scenario::ClientHostPlan;
use octokv_base::map::FxHashMap;
use octokv_base::{NamespaceId, Nanos, Prng};
use octokv_client::{
    ClientConfig, Command, ConnectionError, Error, Reconnect, Response, Session, SubmitError,
};
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::{SimEnv, SimHostId, SimSockets};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// Time that a disconnect may take before the session is dropped.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(3);

/// The commands that clients submit and the checks of their responses.
pub trait Workload: TrackProgress {
    /// A command without a response yet.
    type Outstanding;

    /// Disk and namespace of a new session; `None` if the node has no namespace.
    fn select_namespace(&self, random: &mut Prng) -> Option<(usize, NamespaceId)>;

    /// The node that has this disk.
    fn node_of(&self, _disk: usize) -> usize {
        0
    }

    /// Whether the loss of a connection is a violation, since no fault may cause it.
    fn must_keep_connections(&self) -> bool {
        false
    }

    /// Whether the node still serves this disk as this namespace.
    fn is_served(&self, disk: usize, namespace: NamespaceId) -> bool;

    /// A session ends: its outstanding commands complete no more.
    fn end_session(&mut self, _session: u64) {}

    /// Draws a command of the session with this number and passes it to `submit`.
    ///
    /// # Errors
    /// If the client rejects the command.
    fn submit_random(
        &mut self,
        random: &mut Prng,
        disk: usize,
        session: u64,
        submit: impl FnMut(Command<'_>) -> Result<(), SubmitError>,
    ) -> Result<Self::Outstanding, String>;

    /// Checks and records the response of a command.
    ///
    /// # Errors
    /// The first violated guarantee.
    fn check(&mut self, command: &Self::Outstanding, response: Result<Response, Error>)
    -> Result<(), String>;

    /// Whether this error violates the protocol: no fault of the simulation may cause it.
    fn is_protocol_violation(&self, error: &ConnectionError) -> bool;

    /// Whether a command timeout is a violation.
    fn must_not_time_out(&self) -> bool;

    /// Counts the response of a command and checks it.
    fn complete(&mut self, command: Self::Outstanding, response: Result<Response, Error>) {
        self.progress_mut().completed += 1;
        self.progress_mut().succeeded += u64::from(response.is_ok());
        if let Err(message) = self.check(&command, response) {
            self.progress_mut().fail(message);
        }
    }
}

struct SessionSlot<O> {
    session: Option<Session<SimSockets>>,
    /// The number of the session, among those of all hosts.
    number: u64,
    /// Disk of the session's namespace.
    disk: usize,
    /// Outstanding commands, by token.
    pending: FxHashMap<u64, O>,
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

impl ClientHost {
    /// A host without sessions yet.
    pub fn new(sim: &SimEnv, plan: ClientHostPlan) -> ClientHost {
        ClientHost { id: sim.add_host(), plan, session_count: Rc::default() }
    }
}

/// The sessions of one host; a reactor drives them.
pub struct Clients<W: Workload> {
    sim: SimEnv,
    host: SimHostId,
    /// The addresses of the nodes.
    nodes: Vec<SocketAddr>,
    plan: ClientHostPlan,
    random: Prng,
    handle: ReactorHandle,
    workload: Rc<RefCell<W>>,
    slots: Vec<SessionSlot<W::Outstanding>>,
    next_token: u64,
    session_count: Rc<Cell<usize>>,
}

impl<W: Workload> Clients<W> {
    /// Clients on `host` for the nodes at these addresses.
    pub fn new(
        sim: &SimEnv,
        host: &ClientHost,
        nodes: Vec<SocketAddr>,
        random: Prng,
        handle: ReactorHandle,
        workload: &Rc<RefCell<W>>,
    ) -> Clients<W> {
        let ClientHost { id: host, plan, session_count } = host;
        let slot = |_| SessionSlot {
            session: None,
            number: 0,
            disk: 0,
            pending: FxHashMap::default(),
            not_before: Nanos::ZERO,
            closing_since: None,
        };
        session_count.set(0);
        Clients {
            sim: sim.clone(),
            host: *host,
            nodes,
            plan: *plan,
            random,
            handle,
            workload: Rc::clone(workload),
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
            let quiescing = self.is_quiescing();
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

    fn is_quiescing(&self) -> bool {
        self.workload.borrow().progress().quiescing
    }

    fn run_slot(&mut self, index: usize, now: Nanos) -> bool {
        let quiescing = self.is_quiescing();
        if self.slots[index].session.is_none() {
            if quiescing || now < self.slots[index].not_before {
                return false;
            }
            return self.connect(index, now);
        }
        let mut busy = self.poll(index, now);
        let slot = &self.slots[index];
        let Some(session) = &slot.session else { return busy };
        let is_removed = !self.workload.borrow().is_served(slot.disk, session.config().namespace);
        if session.ended().is_some()
            || (quiescing && self.should_drop_session(index, now))
            || (is_removed && self.random.one_in(20))
        {
            self.drop_session(index, now);
            return true;
        }
        if quiescing {
            // The next iteration sends what the disconnect has queued.
            return busy || self.slots[index].closing_since == Some(now);
        }
        while self.can_submit(index, now) {
            self.submit(index, now);
            busy = true;
        }
        busy
    }

    /// Connects to a random namespace. Returns false if the node has none.
    fn connect(&mut self, index: usize, now: Nanos) -> bool {
        let selected = self.workload.borrow().select_namespace(&mut self.random);
        let slot = &mut self.slots[index];
        let Some((disk, namespace)) = selected else {
            slot.not_before = now + RETRY_DELAY;
            return false;
        };
        let config = ClientConfig { namespace, ..client_config(self.host, &self.plan) };
        slot.disk = disk;
        slot.number = self.workload.borrow_mut().progress_mut().next_session();
        let node = self.nodes[self.workload.borrow().node_of(disk)];
        slot.session = Some(Session::new(self.sim.sockets(self.host), node, config, now));
        true
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return false };
        let (workload, pending) = (&self.workload, &mut slot.pending);
        let busy = session.poll(now, |token, response| {
            let mut workload = workload.borrow_mut();
            match pending.remove(&token) {
                Some(command) => workload.complete(command, response),
                None => workload.progress_mut().fail(format!("token {token} completed twice")),
            }
        });
        let mut workload = self.workload.borrow_mut();
        if workload.must_not_time_out() && session.last_error() == Some(ConnectionError::TimedOut) {
            workload.progress_mut().fail("a command timed out without an injected fault".to_owned());
        }
        if let Some(error) = session.last_error().filter(|_| workload.must_keep_connections())
            && !workload.progress().quiescing
        {
            workload.progress_mut().fail(format!("a connection was lost without an injected fault: {error}"));
        }
        busy
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
        let (workload, pending) = (&self.workload, &mut slot.pending);
        session.close(now, |token, response| {
            if let Some(command) = pending.remove(&token) {
                workload.borrow_mut().complete(command, response);
            }
        });
        slot.closing_since = Some(now);
        false
    }

    fn drop_session(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = slot.session.take() else { return };
        let mut workload = self.workload.borrow_mut();
        if let Some(Error::Connect(_, lost)) = session.ended()
            && workload.is_protocol_violation(&lost)
        {
            workload.progress_mut().fail(format!("protocol violation: a session ended: {lost}"));
        }
        workload.progress_mut().completed += slot.pending.len() as u64;
        workload.end_session(slot.number);
        drop((workload, session));
        slot.pending.clear();
        (slot.not_before, slot.closing_since) = (now + RETRY_DELAY, None);
    }

    fn can_submit(&self, index: usize, now: Nanos) -> bool {
        let slot = &self.slots[index];
        let has_free_slot = slot.session.as_ref().is_some_and(|session| session.free_slots() > 0);
        has_free_slot
            && now >= slot.not_before
            && slot.pending.len() < self.plan.commands_max
            && self.workload.borrow().progress().may_submit()
    }

    fn submit(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return };
        let mut workload = self.workload.borrow_mut();
        let token = self.next_token;
        self.next_token += 1;
        workload.progress_mut().submitted += 1;
        let submit = |command: Command<'_>| session.submit(command, token);
        match workload.submit_random(&mut self.random, slot.disk, slot.number, submit) {
            Ok(command) => drop(slot.pending.insert(token, command)),
            Err(message) => workload.progress_mut().fail(message),
        }
        if self.plan.think_time_max > Nanos::ZERO {
            slot.not_before = now + Nanos(self.random.below(self.plan.think_time_max.0));
        }
    }
}

impl<W: Workload> Drop for Clients<W> {
    /// The host crashed: its outstanding commands never complete.
    fn drop(&mut self) {
        let lost: usize = self.slots.iter().map(|slot| slot.pending.len()).sum();
        let mut workload = self.workload.borrow_mut();
        workload.progress_mut().completed += lost as u64;
        self.slots.iter().for_each(|slot| workload.end_session(slot.number));
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
