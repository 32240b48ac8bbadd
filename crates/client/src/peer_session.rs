//! One outgoing session of a reactor: commands as futures, on a connection that is reestablished when it is lost.
//!
//! ```text
//!   execute ──▶ admission, first in first out ──slot and bytes are free──▶ in flight ──response or error──▶ caller
//!                   └────────────── connection lost, or closed ──error──▶ caller
//! ```
//! In: commands of the reactor's tasks; time and sockets, by [`crate::PollGroup::poll`]. Out: their responses.
//!
//! Invariants: every command ends with a response or an error, at the latest a command timeout after it was admitted;
//! a command that is submitted while there is no connection fails at once, and none is sent twice; when the connection
//! is lost, writes that were sent end with [`Error::OutcomeUnknown`] and all other commands with
//! [`Error::Disconnected`]. Commands have no order among each other. A command whose future is dropped is not cancelled.
//! Limitation: the peer executes commands that it has received although their connection is lost, perhaps after
//! commands of the next connection; a caller that needs an order compares versions.
//! Tested in `tests/peer_session.rs`, on real sockets in `crates/node/tests/peers.rs`, with faults in
//! `crates/sim/tests/peers.rs`.

use crate::command::{Command, Response};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::{ConnectionError, Error, SubmitError};
use crate::peer_commands::{CommandLimits, PeerCommands};
use crate::session_io::SessionIo;
use octokv_base::Nanos;
use octokv_runtime::{CoreWaker, SocketId, Sockets, WaiterQueue, WaiterTicket};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Configuration of an outgoing session.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Subsystem, namespace, names, timeouts and reconnection. With `retry_first_connection` a peer may start later than
    /// this node.
    pub client: ClientConfig,
    /// Most bytes of buffers of commands in flight: data of writes, and the longest data that reads may return. A
    /// command that alone exceeds it is sent when no other is in flight.
    pub buffer_bytes_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CloseState {
    Open,
    /// The next poll begins to close the session.
    Requested,
    Begun,
}

struct PeerState {
    io: SessionIo,
    commands: PeerCommands,
    /// Callers that wait until their command is admitted, with its `buffer_bytes`.
    admission: WaiterQueue<usize>,
    /// Callers of [`PeerSession::until_live`].
    live_waiters: WaiterQueue<()>,
    close_state: CloseState,
}

/// The state that the handles, the futures and the poll group share.
pub(crate) struct PeerShared {
    state: RefCell<PeerState>,
    core_waker: Arc<CoreWaker>,
}

impl PeerShared {
    pub fn new(
        address: SocketAddr,
        config: PeerConfig,
        now: Nanos,
        core_waker: Arc<CoreWaker>,
    ) -> Rc<PeerShared> {
        let PeerConfig { client, buffer_bytes_max } = config;
        let commands = usize::from(client.io_queues.max(1)) * usize::from(client.queue_depth.max(1));
        let limits = CommandLimits { commands, buffer_bytes: buffer_bytes_max };
        let state = RefCell::new(PeerState {
            io: SessionIo::new(address, client, now),
            commands: PeerCommands::new(limits),
            admission: WaiterQueue::default(),
            live_waiters: WaiterQueue::default(),
            close_state: CloseState::Open,
        });
        Rc::new(PeerShared { state, core_waker })
    }

    /// Requests the close of the session.
    pub fn request_close(&self) {
        let mut state = self.state.borrow_mut();
        if state.close_state == CloseState::Open && state.io.ended().is_none() {
            state.close_state = CloseState::Requested;
            self.core_waker.notify();
        }
    }

    /// Sets the time from which the timeouts of commands count that tasks submit before the poll.
    pub fn begin_iteration(&self, now: Nanos) {
        self.state.borrow_mut().io.begin_iteration(now);
    }

    /// Handles deadlines, sends, receives from the `ready` sockets, and completes commands. Returns whether there was
    /// any work.
    pub fn poll<S: Sockets>(&self, sockets: &mut S, ready: &[SocketId], now: Nanos) -> bool {
        let state = &mut *self.state.borrow_mut();
        let PeerState { io, commands, close_state, .. } = state;
        let completed_before = commands.completed_count();
        let mut on_done = |token, result| commands.complete(token, result);
        let mut progress = io.advance(sockets, now, &mut on_done);
        if *close_state == CloseState::Requested {
            *close_state = CloseState::Begun;
            io.close(now, &mut on_done);
            progress = true;
        }
        progress |= io.receive(sockets, ready, &mut on_done);
        progress |= commands.completed_count() > completed_before;
        progress | state.wake_waiters()
    }

    /// Whether the session has ended. Then its sockets are closed and no command is in flight.
    pub fn release_if_ended<S: Sockets>(&self, sockets: &mut S) -> bool {
        let state = &mut *self.state.borrow_mut();
        let has_ended = state.io.ended().is_some();
        if has_ended {
            state.io.close_sockets(sockets);
        }
        has_ended
    }

    /// Latest time of the next poll.
    pub fn next_deadline(&self) -> Nanos {
        self.state.borrow().io.initiator().next_deadline()
    }
}

impl PeerState {
    fn accepts_commands(&self) -> bool {
        self.close_state == CloseState::Open && self.io.initiator().is_live()
    }

    /// Whether a free slot and the bounds admit a command.
    fn has_room(&self, buffer_bytes: usize) -> bool {
        self.io.initiator().free_slots() > 0 && self.commands.has_room(buffer_bytes)
    }

    fn unavailable_error(&self) -> Error {
        if self.close_state != CloseState::Open {
            return Error::Closed;
        }
        match (self.io.ended(), self.io.initiator().last_error()) {
            (Some(error), _) => error,
            (None, Some(cause)) => Error::Disconnected(cause),
            (None, None) => Error::NotConnected,
        }
    }

    /// Wakes the callers whose condition may hold now. Returns whether there were any.
    fn wake_waiters(&mut self) -> bool {
        let mut woken = false;
        if !self.accepts_commands() {
            while let Some((_, waker)) = self.admission.pop_front() {
                waker.into_iter().for_each(Waker::wake);
                woken = true;
            }
        } else if let Some(&buffer_bytes) = self.admission.first()
            && self.has_room(buffer_bytes)
            && let Some(waker) = self.admission.take_first_waker()
        {
            waker.wake();
            woken = true;
        }
        if self.live_result().is_some() {
            while let Some(((), waker)) = self.live_waiters.pop_front() {
                waker.into_iter().for_each(Waker::wake);
                woken = true;
            }
        }
        woken
    }

    /// What a caller of [`PeerSession::until_live`] awaits; `None` while the session may still become live.
    fn live_result(&self) -> Option<Result<(), Error>> {
        if self.accepts_commands() {
            return Some(Ok(()));
        }
        let has_ended = self.close_state != CloseState::Open || self.io.initiator().is_ended();
        has_ended.then(|| Err(self.unavailable_error()))
    }

    fn poll_admission(
        &mut self,
        ticket: &mut Option<WaiterTicket>,
        buffer_bytes: usize,
        waker: &Waker,
    ) -> Poll<Result<(), Error>> {
        if !self.accepts_commands() {
            return Poll::Ready(Err(self.unavailable_error()));
        }
        // A loss of the connection dequeues every caller.
        let queued = ticket.filter(|&ticket| self.admission.set_waker(ticket, waker));
        let is_first = match queued {
            Some(ticket) => self.admission.earlier(ticket).next().is_none(),
            None => self.admission.is_empty(),
        };
        if is_first && self.has_room(buffer_bytes) {
            return Poll::Ready(Ok(()));
        }
        *ticket = Some(queued.unwrap_or_else(|| {
            let ticket = self.admission.push(buffer_bytes);
            self.admission.set_waker(ticket, waker);
            ticket
        }));
        Poll::Pending
    }
}

/// An outgoing session. Clones share it; it is closed when the last one is dropped.
pub struct PeerSession(Rc<PeerShared>);

impl PeerSession {
    pub(crate) fn new(shared: Rc<PeerShared>) -> PeerSession {
        PeerSession(shared)
    }

    /// Executes a command: waits until the bounds admit it, sends it, and awaits its response. If the peer is busy the
    /// caller retries ([`Error::Busy`], [`Response::Retry`]).
    ///
    /// # Errors
    /// [`Error::NotConnected`], [`Error::Disconnected`] or [`Error::Closed`]: the command was not executed, or only
    /// read. [`Error::OutcomeUnknown`]: the connection was lost before the response to a write. Otherwise the node's
    /// status, or a limit that the command exceeds.
    pub async fn execute(&self, command: Command<'_>) -> Result<Response, Error> {
        let buffer_bytes = {
            let state = self.0.state.borrow();
            let info = state.io.initiator().controller_info();
            command.buffer_bytes(info.ok_or_else(|| state.unavailable_error())?)
        };
        Admission { peer: &self.0, buffer_bytes, ticket: None }.await?;
        CommandFuture { peer: &self.0, token: Some(self.submit(command, buffer_bytes)?) }.await
    }

    fn submit(&self, command: Command<'_>, buffer_bytes: usize) -> Result<u64, Error> {
        let state = &mut *self.0.state.borrow_mut();
        let token = state.commands.next_token();
        let submitted = state.io.submit(command, token);
        if submitted.is_ok() {
            state.commands.insert(buffer_bytes);
            // A task of another iteration step may have submitted it: the next iteration sends it.
            self.0.core_waker.notify();
        }
        state.wake_waiters();
        submitted.map(|()| token).map_err(|error| match error {
            SubmitError::Invalid(error) => error,
            SubmitError::QueueFull | SubmitError::NotConnected | SubmitError::Ended => {
                unreachable!("the command was admitted: {error:?}")
            }
        })
    }

    /// Waits until the session accepts commands.
    ///
    /// # Errors
    /// [`Error::Connect`] or [`Error::Closed`] if it has ended.
    pub async fn until_live(&self) -> Result<(), Error> {
        UntilLive { peer: &self.0, ticket: None }.await
    }

    /// Closes the session gracefully: commands in flight may complete for up to a second, then the controller is shut
    /// down. Further commands fail with [`Error::Closed`].
    pub fn close(&self) {
        self.0.request_close();
    }

    /// Whether commands are accepted.
    pub fn is_live(&self) -> bool {
        self.0.state.borrow().accepts_commands()
    }

    /// Cause of the end, once the session has ended.
    pub fn ended(&self) -> Option<Error> {
        self.0.state.borrow().io.ended()
    }

    /// Cause of the last connection loss, while disconnected.
    pub fn last_error(&self) -> Option<ConnectionError> {
        self.0.state.borrow().io.initiator().last_error()
    }

    /// How many times it became live.
    pub fn connection_epoch(&self) -> u64 {
        self.0.state.borrow().io.initiator().connection_epoch()
    }

    /// Limits of the peer's controller and namespace, once the session was live.
    pub fn controller_info(&self) -> Option<ControllerInfo> {
        self.0.state.borrow().io.initiator().controller_info().cloned()
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.0.state.borrow().commands.in_flight()
    }

    /// Address of the peer.
    pub fn address(&self) -> SocketAddr {
        self.0.state.borrow().io.address()
    }
}

impl Clone for PeerSession {
    fn clone(&self) -> PeerSession {
        PeerSession(Rc::clone(&self.0))
    }
}

impl Drop for PeerSession {
    fn drop(&mut self) {
        // This handle and the poll group hold it.
        if Rc::strong_count(&self.0) == 2 {
            self.0.request_close();
        }
    }
}

/// Waits until the session is live or has ended.
struct UntilLive<'a> {
    peer: &'a PeerShared,
    ticket: Option<WaiterTicket>,
}

impl Future for UntilLive<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let UntilLive { peer, ticket } = &mut *self;
        let state = &mut *peer.state.borrow_mut();
        if let Some(result) = state.live_result() {
            return Poll::Ready(result);
        }
        // The session was live and is not any more: the wake-up took this caller out of the queue.
        if !ticket.is_some_and(|ticket| state.live_waiters.set_waker(ticket, context.waker())) {
            let queued = state.live_waiters.push(());
            state.live_waiters.set_waker(queued, context.waker());
            *ticket = Some(queued);
        }
        Poll::Pending
    }
}

impl Drop for UntilLive<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.peer.state.borrow_mut().live_waiters.remove(ticket);
        }
    }
}

/// Waits until a command is admitted.
struct Admission<'a> {
    peer: &'a PeerShared,
    buffer_bytes: usize,
    ticket: Option<WaiterTicket>,
}

impl Future for Admission<'_> {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Admission { peer, buffer_bytes, ticket } = &mut *self;
        peer.state.borrow_mut().poll_admission(ticket, *buffer_bytes, context.waker())
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.peer.state.borrow_mut();
        if state.admission.remove(ticket).is_some() {
            // The wake-up of this caller may have been the only one.
            state.wake_waiters();
        }
    }
}

/// Awaits the response of a command in flight.
struct CommandFuture<'a> {
    peer: &'a PeerShared,
    /// `None` once the future has returned `Ready`.
    token: Option<u64>,
}

impl Future for CommandFuture<'_> {
    type Output = Result<Response, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let token = self.token.expect("a completed command is not polled again");
        let polled = self.peer.state.borrow_mut().commands.poll(token, context.waker());
        if polled.is_ready() {
            self.token = None;
        }
        polled
    }
}

impl Drop for CommandFuture<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.peer.state.borrow_mut().commands.abandon(token);
        }
    }
}
