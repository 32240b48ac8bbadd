//! One controller and its queues, as a machine without I/O: set up, used, lost, set up again.
//!
//! In: time, bytes by queue, commands, news of connections. Out: bytes by queue, answers through a sink,
//! [`ConnectionAction`]s (open or close the connection of a queue). Queue 0 is the admin queue.
//!
//! ```text
//!            start            set up              all queues connected
//!  Waiting ────────▶ Setting ────────▶ Queues ──────────────────────────▶ Live ──close──▶ Draining
//!     ▲                 │                 │                                │                 │
//!     └── pause ────────┴─────── lost ────┴────────────────────────────────┘          shut down or late
//!                       └─ never live, final, or no more attempts ─▶ Over ◀──────────────────┘
//! ```
//! Invariants: one loss takes down the whole controller: all its connections are closed and every
//! command in flight is answered exactly once; commands are taken only while live; what is sent to a
//! controller of before is never read as an answer of now (its connections are gone); a namespace of blocks
//! that is another than before ends it. While live an event request is out; when it tells of a change, the
//! namespace is looked at again.

use crate::command::{Command, CommandKind, EncodedCommand, Response};
use crate::completion::{CommandCompletion, decode_response};
use crate::config::{ClientConfig, backoff_delay};
use crate::controller_info::{BlockInfo, ControllerInfo};
use crate::controller_init::{self, InitNext, InitStep};
use crate::error::{ConnectionError, Error};
use crate::queue_pair::{QueueEvent, QueuePair};
use octokv_base::{BufferPool, Nanos};
use octokv_wire::fabrics::ControllerConfiguration;
use octokv_wire::pdu::ADMIN_CAPSULE_DATA_BYTES;
use std::io::IoSlice;

/// What the driver of the machine has to do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionAction {
    /// Connect this queue's connection.
    Open(u16),
    /// Send what it takes at once, then close this queue's connection.
    Close(u16),
}

/// Where a controller stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitiatorState {
    /// Until the next attempt.
    Backoff { until: Nanos },
    /// The admin queue connects and a step is under way; `again_at` when CSTS is to be read again.
    Initializing { step: InitStep, deadline: Nanos, poll_ready_at: Option<Nanos> },
    /// So many I/O queues are still connecting.
    ConnectingQueues { remaining: u16, deadline: Nanos },
    /// In use; the next sign of life is due at `alive_at`.
    Live { keep_alive_at: Nanos },
    /// Waits for the last answers, then for the controller's shutdown.
    Draining { deadline: Nanos, shutting_down: bool },
    /// Ended, and why; none after a close.
    Ended(Option<ConnectionError>),
}

const READY_POLL_INTERVAL: Nanos = Nanos::from_millis(1);
const DRAIN_TIMEOUT: Nanos = Nanos::from_secs(1);
/// What commands of our own, while live, are for: their tokens.
const KEEP_ALIVE_TOKEN: u64 = 0;
const ASYNC_EVENT_TOKEN: u64 = 1;
const CHANGED_LIST_TOKEN: u64 = 2;
const INIT_STEP_TOKEN: u64 = 3;
const SHUTDOWN_TOKEN: u64 = 4;
/// Room that keep alives leave on the admin queue: for an event request, a look at the namespace, a shutdown.
const ADMIN_RESERVED_SLOTS: usize = 3;
const ADMIN_QUEUE_DEPTH: u16 = controller_init::ADMIN_QUEUE_ENTRIES as u16 - 1;

/// One controller. See the module's text.
#[derive(Debug)]
pub struct Initiator {
    config: ClientConfig,
    pool: BufferPool,
    state: InitiatorState,
    controller_info: ControllerInfo,
    queues: Vec<QueuePair>,
    actions: Vec<ConnectionAction>,
    internal_events: Vec<QueueEvent>,
    was_ever_live: bool,
    /// How often it went live.
    connection_epoch: u64,
    /// An event request is out.
    event_request_pending: bool,
    /// A look at the namespace after a change is under way: its step, and what was learnt by then.
    rescan: Option<(InitStep, ControllerInfo)>,
    lost_at: Nanos,
    attempts: u32,
    last_error: Option<ConnectionError>,
    timeout_check_at: Nanos,
    last_queue: usize,
}

impl Initiator {
    /// A machine that begins to connect at once.
    pub fn new(settings: ClientConfig, now: Nanos) -> Initiator {
        let pool = BufferPool::new(settings.pool_bytes);
        let mut initiator = Initiator {
            config: settings,
            pool,
            state: InitiatorState::Backoff { until: now },
            controller_info: ControllerInfo::unknown(),
            queues: Vec::new(),
            actions: Vec::new(),
            internal_events: Vec::new(),
            was_ever_live: false,
            connection_epoch: 0,
            event_request_pending: false,
            rescan: None,
            lost_at: now,
            attempts: 0,
            last_error: None,
            timeout_check_at: now,
            last_queue: 0,
        };
        initiator.start_connecting(now);
        initiator
    }

    /// Whether commands can be submitted.
    pub fn is_live(&self) -> bool {
        matches!(self.state, InitiatorState::Live { .. })
    }

    /// Whether it has ended.
    pub fn is_ended(&self) -> bool {
        matches!(self.state, InitiatorState::Ended(_))
    }

    /// Why the last connection was lost, or why it ended.
    pub fn last_error(&self) -> Option<ConnectionError> {
        self.last_error
    }

    /// What is known of the controller and its namespace, once it was live.
    pub fn controller_info(&self) -> Option<&ControllerInfo> {
        self.was_ever_live.then_some(&self.controller_info)
    }

    /// How often it went live: two commands of one life met the same controller.
    pub fn connection_epoch(&self) -> u64 {
        self.connection_epoch
    }

    /// The settings.
    pub fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// The pool that the data of answers comes from.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// How many commands can be submitted now.
    pub fn free_slots(&self) -> usize {
        if !self.is_live() { 0 } else { self.queues.iter().skip(1).map(QueuePair::free_slots).sum() }
    }

    /// How many of the caller's commands wait for an answer.
    pub fn in_flight(&self) -> usize {
        self.queues.iter().skip(1).map(QueuePair::in_flight).sum()
    }

    /// What is to be done with connections; empties the list.
    pub fn take_actions(&mut self, into: &mut Vec<ConnectionAction>) {
        into.append(&mut self.actions);
    }

    /// Appends what a queue has to send.
    pub fn slices<'a>(&'a self, queue: u16, into: &mut Vec<IoSlice<'a>>) {
        if let Some(queue) = self.queues.get(usize::from(queue)) {
            queue.slices(into);
        }
    }

    /// Whether a queue has nothing to send.
    pub fn is_flushed(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_none_or(QueuePair::is_flushed)
    }

    /// The socket of a queue took so many bytes.
    pub fn advance_sent(&mut self, queue: u16, bytes: usize) {
        self.queues[usize::from(queue)].advance_sent(bytes);
    }

    /// Puts a command on its way. The caller has seen [`Initiator::room`].
    ///
    /// # Errors
    /// What is wrong with the command; nothing was done.
    ///
    /// # Panics
    /// When there is no room.
    #[inline]
    pub fn submit(&mut self, now: Nanos, command: Command<'_>, token: u64) -> Result<(), Error> {
        let encoded = EncodedCommand::new(command, self.config.namespace, &self.controller_info)?;
        let count = self.queues.len() - 1;
        let index =
            (0..count).map(|i| 1 + (self.last_queue + i) % count).find(|&i| self.queues[i].free_slots() > 0);
        let index = index.expect("the caller looked for room");
        self.last_queue = index;
        let deadline = now + self.config.command_timeout;
        self.queues[index].submit(encoded, token, deadline, &self.pool);
        Ok(())
    }

    /// Puts a command on its way on this of the I/O queues, counted from 0.
    ///
    /// # Errors
    /// What is wrong with it.
    ///
    /// # Panics
    /// When that queue has no room.
    pub fn submit_on(
        &mut self,
        queue: usize,
        now: Nanos,
        command: Command<'_>,
        token: u64,
    ) -> Result<(), Error> {
        let encoded = EncodedCommand::new(command, self.config.namespace, &self.controller_info)?;
        let deadline = now + self.config.command_timeout;
        self.queues[1 + queue].submit(encoded, token, deadline, &self.pool);
        Ok(())
    }

    /// How many commands one of the I/O queues takes now, counted from 0; none of one that there is not.
    pub fn queue_free_slots(&self, queue: usize) -> usize {
        if !self.is_live() {
            0
        } else {
            queue.checked_add(1).and_then(|at| self.queues.get(at)).map_or(0, QueuePair::free_slots)
        }
    }

    /// Takes bytes from the head of what came on a queue's connection; gives how many. The caller gives
    /// the rest again with more behind it.
    pub fn receive(
        &mut self,
        queue: u16,
        now: Nanos,
        bytes: &[u8],
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> usize {
        if matches!(self.state, InitiatorState::Backoff { .. } | InitiatorState::Ended(_)) {
            // The connection is about to be closed: whatever still comes on it belongs to nobody.
            return bytes.len();
        }
        let Initiator { queues, pool, internal_events: own, .. } = self;
        let Some(queue_pair) = queues.get_mut(usize::from(queue)) else { return bytes.len() };
        let result = queue_pair.receive(bytes, pool, &mut |event| match event {
            QueueEvent::Completed(done) if !done.kind.is_internal() => {
                sink(done.token, decode_response(done))
            }
            own_event => own.push(own_event),
        });
        if !self.internal_events.is_empty() {
            let mut events = std::mem::take(&mut self.internal_events);
            for event in events.drain(..) {
                self.handle_internal_event(queue, now, event, sink);
            }
            self.internal_events = events;
        }
        match result {
            Ok(taken) => taken,
            Err(cause) => {
                self.handle_connection_error(now, cause, sink);
                bytes.len()
            }
        }
    }

    /// The connection of a queue is gone, or could not be made.
    pub fn on_connection_lost(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Response, Error>)) {
        match self.state {
            InitiatorState::Backoff { .. } | InitiatorState::Ended(_) => {}
            InitiatorState::Draining { .. } => self.end(None, sink),
            InitiatorState::Initializing { .. }
            | InitiatorState::ConnectingQueues { .. }
            | InitiatorState::Live { .. } => {
                self.handle_connection_error(now, ConnectionError::Closed, sink);
            }
        }
    }

    /// Ends the session: takes no more commands, waits for the answers of those in flight (a second at
    /// most), shuts the controller down.
    pub fn close(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Response, Error>)) {
        match self.state {
            InitiatorState::Live { .. } => {
                self.state = InitiatorState::Draining { deadline: now + DRAIN_TIMEOUT, shutting_down: false };
                self.shut_down_when_drained();
            }
            InitiatorState::Backoff { .. }
            | InitiatorState::Initializing { .. }
            | InitiatorState::ConnectingQueues { .. } => self.end(None, sink),
            InitiatorState::Draining { .. } | InitiatorState::Ended(_) => {}
        }
    }

    /// Lets time pass.
    pub fn tick(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Response, Error>)) {
        match self.state {
            InitiatorState::Backoff { until } if until <= now => self.start_connecting(now),
            InitiatorState::Initializing { deadline, .. }
            | InitiatorState::ConnectingQueues { deadline, .. }
                if deadline <= now =>
            {
                self.handle_connection_error(now, ConnectionError::TimedOut, sink);
            }
            InitiatorState::Initializing { step, deadline, poll_ready_at: Some(at) } if at <= now => {
                self.state = InitiatorState::Initializing { step, deadline, poll_ready_at: None };
                self.submit_init_step(step, now);
            }
            InitiatorState::Live { keep_alive_at: alive_at } => {
                if self.timeout_check_at <= now {
                    self.timeout_check_at = now + self.timeout_check_interval();
                    if self.queues.iter().any(|queue| queue.is_overdue(now)) {
                        return self.handle_connection_error(now, ConnectionError::TimedOut, sink);
                    }
                }
                if alive_at <= now && self.queues[0].free_slots() > ADMIN_RESERVED_SLOTS {
                    self.submit_internal(0, controller_init::keep_alive_command(), KEEP_ALIVE_TOKEN, now);
                    self.state =
                        InitiatorState::Live { keep_alive_at: now + Nanos(self.config.keep_alive.0 / 2) };
                }
            }
            InitiatorState::Draining { deadline, .. } if deadline <= now => self.end(None, sink),
            InitiatorState::Draining { .. } => self.shut_down_when_drained(),
            InitiatorState::Backoff { .. }
            | InitiatorState::Initializing { .. }
            | InitiatorState::ConnectingQueues { .. }
            | InitiatorState::Ended(_) => {}
        }
    }

    /// When [`Initiator::tick`] has something to do.
    pub fn next_deadline(&self) -> Nanos {
        match self.state {
            InitiatorState::Backoff { until } => until,
            InitiatorState::Initializing { deadline, poll_ready_at: again_at, .. } => {
                again_at.unwrap_or(deadline).min(deadline)
            }
            InitiatorState::ConnectingQueues { deadline, .. } | InitiatorState::Draining { deadline, .. } => {
                deadline
            }
            InitiatorState::Live { keep_alive_at: alive_at } if self.is_idle() => alive_at,
            InitiatorState::Live { keep_alive_at: alive_at } => alive_at.min(self.timeout_check_at),
            InitiatorState::Ended(_) => Nanos::NEVER,
        }
    }

    /// Whether no command waits for an answer that is due: an event request may wait for ever.
    fn is_idle(&self) -> bool {
        let waiting = self.queues.iter().map(QueuePair::in_flight).sum::<usize>();
        waiting == usize::from(self.event_request_pending)
    }

    fn timeout_check_interval(&self) -> Nanos {
        Nanos((self.config.command_timeout.0 / 8).clamp(1_000_000, 100_000_000))
    }

    /// Begins to connect.
    fn start_connecting(&mut self, now: Nanos) {
        self.queues.clear();
        (self.event_request_pending, self.rescan) = (false, None);
        self.queues.push(self.new_queue(ADMIN_QUEUE_DEPTH));
        self.actions.push(ConnectionAction::Open(0));
        let deadline = now + self.config.connect_timeout;
        self.state = InitiatorState::Initializing { step: InitStep::Connect, deadline, poll_ready_at: None };
    }

    fn new_queue(&self, depth: u16) -> QueuePair {
        let ClientConfig { header_digest, data_digest, .. } = self.config;
        QueuePair::new(depth, ADMIN_CAPSULE_DATA_BYTES, header_digest, data_digest)
    }

    fn submit_init_step(&mut self, step: InitStep, now: Nanos) {
        let command = controller_init::step_command(step, &self.config);
        self.submit_internal(0, command, INIT_STEP_TOKEN, now);
    }

    fn submit_internal(&mut self, queue: u16, command: EncodedCommand<'_>, token: u64, now: Nanos) {
        let deadline = match command.kind {
            CommandKind::AsyncEvent => Nanos::NEVER,
            _ => now + self.config.command_timeout,
        };
        self.queues[usize::from(queue)].submit(command, token, deadline, &self.pool);
    }

    /// An initialised connection, or the answer to a command of our own.
    fn handle_internal_event(
        &mut self,
        queue: u16,
        now: Nanos,
        event: QueueEvent,
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) {
        match (self.state, event) {
            (InitiatorState::Initializing { step: InitStep::Connect, .. }, QueueEvent::Initialized) => {
                self.submit_init_step(InitStep::Connect, now)
            }
            (InitiatorState::Initializing { step, deadline, .. }, QueueEvent::Completed(done)) => {
                let before = if self.was_ever_live { self.controller_info.blocks } else { None };
                let following = controller_init::next_step(
                    step,
                    &done.cqe,
                    &done.data,
                    &self.config,
                    &mut self.controller_info,
                );
                match following.and_then(|next| {
                    verify_same_namespace(before, self.controller_info.blocks).map(|()| next)
                }) {
                    Ok(InitNext::Step(step)) => {
                        self.state = InitiatorState::Initializing { step, deadline, poll_ready_at: None };
                        self.submit_init_step(step, now);
                    }
                    Ok(InitNext::Wait) => {
                        let again_at = Some(now + READY_POLL_INTERVAL);
                        self.state = InitiatorState::Initializing { step, deadline, poll_ready_at: again_at };
                    }
                    Ok(InitNext::Done) => self.open_io_queues(deadline),
                    Err(cause) => self.handle_connection_error(now, cause, sink),
                }
            }
            (InitiatorState::ConnectingQueues { .. }, QueueEvent::Initialized) => {
                let entries = u32::from(self.controller_info.queue_depth(self.config.queue_depth)) + 1;
                let connect = controller_init::connect_command(
                    queue,
                    entries,
                    self.controller_info.controller_id,
                    &self.config,
                );
                self.submit_internal(queue, connect, INIT_STEP_TOKEN, now);
            }
            (InitiatorState::ConnectingQueues { remaining: left, deadline }, QueueEvent::Completed(done)) => {
                let status = done.cqe.status();
                if !status.is_success() {
                    return self.handle_connection_error(now, ConnectionError::ConnectRejected(status), sink);
                }
                self.queues[usize::from(queue)]
                    .set_capsule_data_bytes(self.controller_info.capsule_data_bytes);
                self.state = InitiatorState::ConnectingQueues { remaining: left - 1, deadline };
                if left == 1 {
                    self.enter_live(now);
                }
            }
            (InitiatorState::Live { .. }, QueueEvent::Completed(done)) => {
                if let Err(cause) = self.handle_live_completion(now, &done) {
                    self.handle_connection_error(now, cause, sink);
                }
            }
            (InitiatorState::Draining { shutting_down: true, .. }, QueueEvent::Completed(done))
                if done.token == SHUTDOWN_TOKEN =>
            {
                self.end(None, sink);
            }
            // Nobody needs the answer any more; or the controller was lost within the same bytes.
            (
                InitiatorState::Live { .. }
                | InitiatorState::Draining { .. }
                | InitiatorState::Backoff { .. }
                | InitiatorState::Ended(_)
                | InitiatorState::Initializing { .. },
                QueueEvent::Completed(_) | QueueEvent::Initialized,
            ) => {}
        }
    }

    /// The answer to a command of our own while live.
    fn handle_live_completion(
        &mut self,
        now: Nanos,
        completion: &CommandCompletion,
    ) -> Result<(), ConnectionError> {
        let status = completion.cqe.status();
        match completion.token {
            ASYNC_EVENT_TOKEN => {
                self.event_request_pending = false;
                if status.is_success() {
                    // Whatever it is about: reading the list lets the next change be told.
                    self.submit_internal(
                        0,
                        controller_init::changed_namespaces_command(),
                        CHANGED_LIST_TOKEN,
                        now,
                    );
                }
                Ok(())
            }
            // A controller that has no such list may still have told the truth.
            CHANGED_LIST_TOKEN => {
                self.rescan = Some((InitStep::NamespaceList, self.controller_info.clone()));
                self.submit_init_step(InitStep::NamespaceList, now);
                Ok(())
            }
            INIT_STEP_TOKEN => self.continue_rescan(now, completion),
            _ if status.is_success() => Ok(()),
            _ => Err(ConnectionError::InitFailed(status)),
        }
    }

    /// Goes on looking whether the namespace is there, and is what it was.
    fn continue_rescan(&mut self, now: Nanos, completion: &CommandCompletion) -> Result<(), ConnectionError> {
        let Some((step, mut info)) = self.rescan.take() else { return Ok(()) };
        match controller_init::next_step(step, &completion.cqe, &completion.data, &self.config, &mut info)? {
            InitNext::Step(
                next @ (InitStep::Descriptors | InitStep::KvNamespace | InitStep::BlockNamespace),
            ) => {
                self.rescan = Some((next, info));
                self.submit_init_step(next, now);
            }
            InitNext::Step(_) | InitNext::Wait | InitNext::Done => {
                verify_same_namespace(self.controller_info.blocks, info.blocks)?;
                self.controller_info = info;
                self.request_async_event(now);
            }
        }
        Ok(())
    }

    /// Lets the controller tell of the next change.
    fn request_async_event(&mut self, now: Nanos) {
        if self.controller_info.reports_namespace_changes && !self.event_request_pending {
            self.event_request_pending = true;
            self.submit_internal(0, controller_init::async_event_request(), ASYNC_EVENT_TOKEN, now);
        }
    }

    fn open_io_queues(&mut self, deadline: Nanos) {
        let depth = self.controller_info.queue_depth(self.config.queue_depth);
        for id in 1..=self.controller_info.io_queues {
            self.queues.push(self.new_queue(depth));
            self.actions.push(ConnectionAction::Open(id));
        }
        self.state = InitiatorState::ConnectingQueues { remaining: self.controller_info.io_queues, deadline };
    }

    fn enter_live(&mut self, now: Nanos) {
        self.was_ever_live = true;
        self.connection_epoch += 1;
        self.attempts = 0;
        self.last_error = None;
        self.timeout_check_at = now + self.timeout_check_interval();
        self.state = InitiatorState::Live { keep_alive_at: now + Nanos(self.config.keep_alive.0 / 2) };
        self.request_async_event(now);
    }

    /// Sends the shutdown when the last answer has come.
    fn shut_down_when_drained(&mut self) {
        if let InitiatorState::Draining { deadline, shutting_down: false } = self.state
            && self.in_flight() == 0
        {
            let sqe =
                controller_init::set_configuration_sqe(ControllerConfiguration::ENABLED.with_shutdown());
            self.queues[0].submit(EncodedCommand::internal(sqe, 0), SHUTDOWN_TOKEN, deadline, &self.pool);
            self.state = InitiatorState::Draining { deadline, shutting_down: true };
        }
    }

    fn handle_connection_error(
        &mut self,
        now: Nanos,
        cause: ConnectionError,
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) {
        if self.attempts == 0 {
            self.lost_at = now;
        }
        let wait = backoff_delay(self.config.reconnect, self.attempts, now.since(self.lost_at));
        self.attempts += 1;
        match wait {
            Some(wait) if self.was_ever_live && !cause.is_permanent() => {
                self.last_error = Some(cause);
                self.abort_commands(cause, sink);
                self.state = InitiatorState::Backoff { until: now + wait };
            }
            _ => self.end(Some(cause), sink),
        }
    }

    fn end(&mut self, cause: Option<ConnectionError>, sink: &mut impl FnMut(u64, Result<Response, Error>)) {
        self.last_error = cause.or(self.last_error);
        self.abort_commands(cause.unwrap_or(ConnectionError::Closed), sink);
        self.state = InitiatorState::Ended(cause);
    }

    /// Closes every connection and answers every command in flight.
    fn abort_commands(
        &mut self,
        cause: ConnectionError,
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) {
        self.actions.retain(|action| matches!(action, ConnectionAction::Close(_)));
        for (index, queue) in self.queues.iter_mut().enumerate() {
            self.actions.push(ConnectionAction::Close(index as u16));
            queue.abort_all(|aborted| {
                if aborted.kind.is_internal() {
                    return;
                }
                let unknown = aborted.sent && !aborted.kind.is_retryable();
                let error = if unknown { Error::OutcomeUnknown } else { Error::Disconnected(cause) };
                sink(aborted.token, Err(error));
            });
        }
    }
}

/// Whether a namespace of blocks is what it was before.
fn verify_same_namespace(before: Option<BlockInfo>, now: Option<BlockInfo>) -> Result<(), ConnectionError> {
    match (before, now) {
        (Some(before), Some(now)) if now.matches(&before) => Ok(()),
        (None, _) => Ok(()),
        (Some(_), _) => Err(ConnectionError::NamespaceChanged),
    }
}
