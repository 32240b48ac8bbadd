//! State machine of one controller and its queues, without I/O: initialization, use, connection loss, reconnection.
//!
//! In: time, received bytes by queue, commands, lost connections. Out: bytes to send by queue, responses through a sink,
//! [`ConnectionAction`]s (open or close the connection of a queue). Queue 0 is the admin queue.
//!
//! ```text
//!            start             initialized             all queues connected
//!  Backoff ───────▶ Initializing ───────▶ ConnectingQueues ─────────▶ Live ──close──▶ Draining
//!     ▲                 │                     │                        │                 │
//!     └───── delay ─────┴──────── lost ───────┴────────────────────────┘     shut down or timeout
//!                       └─ permanent, or no more attempts ─▶ Ended ◀─────────────────────┘
//! ```
//! Invariants: the loss of one connection loses the whole controller: all its connections are closed and every command in
//! flight completes exactly once; commands are accepted only while live; bytes of a previous controller are never
//! processed as those of the current one, because its connections are closed; a block namespace that was replaced ends the
//! session. While live, one Asynchronous Event Request is pending; its completion rescans the namespace.

use crate::bug_injection::{self, InjectedBug};
use crate::command::{Command, CommandKind, EncodedCommand, Response};
use crate::completion::{CommandCompletion, TokenReport, decode_response};
use crate::config::{ClientConfig, backoff_delay, with_jitter};
use crate::controller_info::{ControllerInfo, verify_same_namespace};
use crate::controller_init::{self, InitNext, InitStep};
use crate::error::{ConnectionError, Error};
pub use crate::initiator_state::ConnectionAction;
use crate::initiator_state::{
    ADMIN_QUEUE_DEPTH, ADMIN_RESERVED_SLOTS, ASYNC_EVENT_TOKEN, CHANGED_LIST_TOKEN, DRAIN_TIMEOUT,
    INIT_STEP_TOKEN, InitiatorState, KEEP_ALIVE_TOKEN, READY_POLL_INTERVAL, SHUTDOWN_TOKEN, new_queue,
};
use crate::queue_pair::{QueueEvent, QueuePair};
use octokv_base::{BufferPool, Nanos, Prng};
use octokv_wire::fabrics::ControllerConfiguration;
use std::io::IoSlice;

/// One controller. See the module documentation.
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
    /// How many times it became live.
    connection_epoch: u64,
    /// Whether an Asynchronous Event Request is pending.
    event_request_pending: bool,
    /// Rescan of the namespace after a change: its step and the info so far.
    rescan: Option<(InitStep, ControllerInfo)>,
    lost_at: Nanos,
    attempts: u32,
    last_error: Option<ConnectionError>,
    timeout_check_at: Nanos,
    last_queue: usize,
    /// The tokens of the completions since they were taken, with flow control.
    pub(crate) token_reports: Vec<TokenReport>,
    /// Generator of the jitter of delays; `None` for delays without jitter.
    jitter: Option<Prng>,
}

impl Initiator {
    /// An initiator that starts to connect at once.
    pub fn new(config: ClientConfig, now: Nanos) -> Initiator {
        let pool = BufferPool::new(config.pool_bytes);
        let jitter = config.jitter_seed.map(Prng::new);
        let mut initiator = Initiator {
            config,
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
            token_reports: Vec::new(),
            jitter,
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

    /// Cause of the last connection loss, or of the end.
    pub fn last_error(&self) -> Option<ConnectionError> {
        self.last_error
    }

    /// Controller and namespace limits, once it was live.
    pub fn controller_info(&self) -> Option<&ControllerInfo> {
        self.was_ever_live.then_some(&self.controller_info)
    }

    /// How many times it became live. Commands of the same epoch reached the same controller.
    pub fn connection_epoch(&self) -> u64 {
        self.connection_epoch
    }

    /// Configuration.
    pub fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Pool of the response buffers.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Number of commands that can be submitted now.
    pub fn free_slots(&self) -> usize {
        if !self.is_live() { 0 } else { self.queues.iter().skip(1).map(QueuePair::free_slots).sum() }
    }

    /// Number of the caller's commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queues.iter().skip(1).map(QueuePair::in_flight).sum()
    }

    /// Moves the pending connection actions to `into`.
    pub fn take_actions(&mut self, into: &mut Vec<ConnectionAction>) {
        into.append(&mut self.actions);
    }

    /// Appends the unsent bytes of a queue.
    pub fn slices<'a>(&'a self, queue: u16, into: &mut Vec<IoSlice<'a>>) {
        if let Some(queue) = self.queues.get(usize::from(queue)) {
            queue.slices(into);
        }
    }

    /// Whether a queue has no unsent bytes.
    pub fn is_flushed(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_none_or(QueuePair::is_flushed)
    }

    /// Removes `bytes` unsent bytes, which the socket of the queue accepted.
    #[inline]
    pub fn advance_sent(&mut self, queue: u16, bytes: usize) {
        self.queues[usize::from(queue)].advance_sent(bytes);
        // A command that completed before it was sent ends here, perhaps as the last one.
        self.shut_down_when_drained();
    }

    /// Submits a command on the next I/O queue with a free slot, round robin.
    ///
    /// # Errors
    /// The violated limit of the command; no response follows.
    ///
    /// # Panics
    /// If no slot is free. REQUIRES: [`Initiator::free_slots`] is not 0.
    #[inline]
    pub fn submit(&mut self, now: Nanos, command: Command<'_>, token: u64) -> Result<(), Error> {
        command.check_epoch(self.connection_epoch)?;
        let encoded = EncodedCommand::new(command, self.config.namespace, &self.controller_info)?;
        let count = self.queues.len() - 1;
        let index =
            (0..count).map(|i| 1 + (self.last_queue + i) % count).find(|&i| self.queues[i].free_slots() > 0);
        let index = index.expect("the caller checked free_slots");
        self.last_queue = index;
        let deadline = now + self.config.command_timeout;
        self.queues[index].submit(encoded, token, deadline, &self.pool);
        Ok(())
    }

    /// Submits a command on one I/O queue, counted from 0.
    ///
    /// # Errors
    /// The violated limit of the command; no response follows.
    ///
    /// # Panics
    /// If that queue has no free slot. REQUIRES: [`Initiator::queue_free_slots`] is not 0.
    pub fn submit_on(
        &mut self,
        queue: usize,
        now: Nanos,
        command: Command<'_>,
        token: u64,
    ) -> Result<(), Error> {
        command.check_epoch(self.connection_epoch)?;
        let encoded = EncodedCommand::new(command, self.config.namespace, &self.controller_info)?;
        let deadline = now + self.config.command_timeout;
        self.queues[1 + queue].submit(encoded, token, deadline, &self.pool);
        Ok(())
    }

    /// Number of commands that an I/O queue, counted from 0, accepts now; 0 if it does not exist.
    pub fn queue_free_slots(&self, queue: usize) -> usize {
        if !self.is_live() {
            0
        } else {
            queue.checked_add(1).and_then(|at| self.queues.get(at)).map_or(0, QueuePair::free_slots)
        }
    }

    /// Processes received bytes of a queue and returns how many it consumed. REQUIRES: the caller passes the
    /// rest again, followed by further bytes.
    pub fn receive(
        &mut self,
        queue: u16,
        now: Nanos,
        bytes: &[u8],
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> usize {
        if matches!(self.state, InitiatorState::Backoff { .. } | InitiatorState::Ended(_)) {
            // The connection is about to be closed: discard its bytes.
            return bytes.len();
        }
        let Initiator {
            queues, pool, internal_events, connection_epoch, token_reports, controller_info, ..
        } = self;
        let Some(queue_pair) = queues.get_mut(usize::from(queue)) else { return bytes.len() };
        let result = queue_pair.receive(bytes, pool, &mut |event| match event {
            QueueEvent::Completed(completion) if !completion.kind.is_internal() => {
                if controller_info.device_log.is_some() {
                    token_reports.push(TokenReport::of(&completion));
                }
                sink(completion.token, decode_response(completion, *connection_epoch))
            }
            internal_event => internal_events.push(internal_event),
        });
        if !self.internal_events.is_empty() {
            let mut events = std::mem::take(&mut self.internal_events);
            for event in events.drain(..) {
                self.handle_internal_event(queue, now, event, sink);
            }
            self.internal_events = events;
        }
        self.shut_down_when_drained();
        match result {
            Ok(consumed) => consumed,
            Err(cause) => {
                self.handle_connection_error(now, cause, sink);
                bytes.len()
            }
        }
    }

    /// Handles the loss of a connection, or a failure to open it.
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

    /// Closes the session: accepts no more commands, awaits the completions of those in flight for at most
    /// one second, then shuts the controller down.
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

    /// Handles all deadlines up to `now`.
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
            InitiatorState::Live { keep_alive_at } => {
                if self.timeout_check_at <= now {
                    self.timeout_check_at = now + self.config.timeout_check_interval();
                    if self.queues.iter().any(|queue| queue.is_overdue(now)) {
                        return self.handle_connection_error(now, ConnectionError::TimedOut, sink);
                    }
                }
                if keep_alive_at <= now && self.queues[0].free_slots() > ADMIN_RESERVED_SLOTS {
                    self.submit_internal(0, controller_init::keep_alive_command(), KEEP_ALIVE_TOKEN, now);
                    self.state =
                        InitiatorState::Live { keep_alive_at: now + self.config.keep_alive_interval() };
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

    /// Time at which [`Initiator::tick`] must run.
    pub fn next_deadline(&self) -> Nanos {
        match self.state {
            InitiatorState::Backoff { until } => until,
            InitiatorState::Initializing { deadline, poll_ready_at, .. } => {
                poll_ready_at.unwrap_or(deadline).min(deadline)
            }
            InitiatorState::ConnectingQueues { deadline, .. } | InitiatorState::Draining { deadline, .. } => {
                deadline
            }
            InitiatorState::Live { keep_alive_at } if self.is_idle() => keep_alive_at,
            InitiatorState::Live { keep_alive_at } => keep_alive_at.min(self.timeout_check_at),
            InitiatorState::Ended(_) => Nanos::NEVER,
        }
    }

    /// Whether no command with a deadline is in flight: an event request may be pending forever.
    fn is_idle(&self) -> bool {
        self.queues.iter().map(QueuePair::in_flight).sum::<usize>() == usize::from(self.event_request_pending)
    }

    /// Starts to connect the admin queue.
    fn start_connecting(&mut self, now: Nanos) {
        self.queues.clear();
        (self.event_request_pending, self.rescan) = (false, None);
        self.queues.push(new_queue(&self.config, ADMIN_QUEUE_DEPTH));
        self.actions.push(ConnectionAction::Open(0));
        let deadline = now + self.config.connect_timeout;
        self.state = InitiatorState::Initializing { step: InitStep::Connect, deadline, poll_ready_at: None };
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

    /// Handles an initialized connection or the completion of an internal command.
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
            (InitiatorState::Initializing { step, deadline, .. }, QueueEvent::Completed(completion)) => {
                self.handle_step_completion(step, deadline, now, &completion, sink);
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
            (InitiatorState::ConnectingQueues { remaining, deadline }, QueueEvent::Completed(completion)) => {
                let status = completion.cqe.status();
                if !status.is_success() {
                    return self.handle_connection_error(now, ConnectionError::ConnectRejected(status), sink);
                }
                self.queues[usize::from(queue)]
                    .set_capsule_data_bytes(self.controller_info.capsule_data_bytes);
                self.state = InitiatorState::ConnectingQueues { remaining: remaining - 1, deadline };
                if remaining == 1 {
                    self.enter_live(now);
                }
            }
            (InitiatorState::Live { .. }, QueueEvent::Completed(completion)) => {
                if let Err(cause) = self.handle_live_completion(now, &completion) {
                    self.handle_connection_error(now, cause, sink);
                }
            }
            (InitiatorState::Draining { shutting_down: true, .. }, QueueEvent::Completed(completion))
                if completion.token == SHUTDOWN_TOKEN =>
            {
                self.end(None, sink);
            }
            // The completion is obsolete, or the controller was lost while the same bytes were processed.
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

    /// Handles the completion of an initialization step.
    fn handle_step_completion(
        &mut self,
        step: InitStep,
        deadline: Nanos,
        now: Nanos,
        completion: &CommandCompletion,
        sink: &mut impl FnMut(u64, Result<Response, Error>),
    ) {
        let before = if self.was_ever_live { self.controller_info.blocks } else { None };
        let next = controller_init::next_step(
            step,
            &completion.cqe,
            &completion.data,
            &self.config,
            &mut self.controller_info,
        );
        match next.and_then(|next| verify_same_namespace(before, self.controller_info.blocks).map(|()| next))
        {
            Ok(InitNext::Step(step)) => {
                self.state = InitiatorState::Initializing { step, deadline, poll_ready_at: None };
                self.submit_init_step(step, now);
            }
            Ok(InitNext::Wait) => {
                let poll_ready_at = Some(now + READY_POLL_INTERVAL);
                self.state = InitiatorState::Initializing { step, deadline, poll_ready_at };
            }
            Ok(InitNext::Done) => self.open_io_queues(deadline),
            Err(cause) => self.handle_connection_error(now, cause, sink),
        }
    }

    /// Handles the completion of an internal command while live.
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
                    // For any event: reading the list re-enables the event for the next change.
                    self.submit_internal(
                        0,
                        controller_init::changed_namespaces_command(),
                        CHANGED_LIST_TOKEN,
                        now,
                    );
                }
                Ok(())
            }
            // Rescan whatever the status: a controller without this list may still report a change.
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

    /// Continues the check that the namespace still exists and is the same.
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

    /// Submits an event request if the controller supports it and none is pending.
    fn request_async_event(&mut self, now: Nanos) {
        if self.controller_info.reports_namespace_changes && !self.event_request_pending {
            self.event_request_pending = true;
            self.submit_internal(0, controller_init::async_event_request(), ASYNC_EVENT_TOKEN, now);
        }
    }

    fn open_io_queues(&mut self, deadline: Nanos) {
        let depth = self.controller_info.queue_depth(self.config.queue_depth);
        for id in 1..=self.controller_info.io_queues {
            self.queues.push(new_queue(&self.config, depth));
            self.actions.push(ConnectionAction::Open(id));
        }
        self.state = InitiatorState::ConnectingQueues { remaining: self.controller_info.io_queues, deadline };
    }

    fn enter_live(&mut self, now: Nanos) {
        self.was_ever_live = true;
        self.connection_epoch += 1;
        self.attempts = 0;
        self.last_error = None;
        self.timeout_check_at = now + self.config.timeout_check_interval();
        self.state = InitiatorState::Live { keep_alive_at: now + self.config.keep_alive_interval() };
        self.request_async_event(now);
    }

    /// Submits the shutdown once no command is in flight.
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
        let delay = backoff_delay(self.config.reconnect, self.attempts, now.since(self.lost_at));
        self.attempts = self.attempts.saturating_add(1);
        let is_closing = matches!(self.state, InitiatorState::Draining { .. });
        let may_retry = !is_closing && (self.was_ever_live || self.config.retry_first_connection);
        match delay {
            Some(delay) if may_retry && !cause.is_permanent() => {
                let delay = self.jitter.as_mut().map_or(delay, |random| with_jitter(delay, random));
                self.last_error = Some(cause);
                self.abort_commands(cause, sink);
                self.state = InitiatorState::Backoff { until: now + delay };
            }
            _ => self.end(Some(cause), sink),
        }
    }

    fn end(&mut self, cause: Option<ConnectionError>, sink: &mut impl FnMut(u64, Result<Response, Error>)) {
        self.last_error = cause.or(self.last_error);
        self.abort_commands(cause.unwrap_or(ConnectionError::Closed), sink);
        self.state = InitiatorState::Ended(cause);
    }

    /// Closes all connections and completes all commands in flight.
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
                let outcome_unknown = aborted.sent
                    && !aborted.kind.is_retryable()
                    && !bug_injection::is_injected(InjectedBug::ForgetSentWrites);
                let error = if outcome_unknown { Error::OutcomeUnknown } else { Error::Disconnected(cause) };
                sink(aborted.token, Err(error));
            });
        }
    }
}
