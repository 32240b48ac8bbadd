//! An initiator with the connections of its queues, on sockets that the caller lends to each call.
//!
//! ```text
//!   advance: deadlines ─▶ connection changes ─▶ send      receive: ready sockets ─▶ connection changes ─▶ send
//! ```
//! In: sockets, time, the sockets that are ready, commands. Out: responses, by callback. A [`crate::Session`] owns its
//! sockets; the sessions of a [`crate::PollGroup`] use those of their reactor. Invariants: a queue has at most one
//! connection; the receive buffer of a queue holds bytes of its current connection only. Tested through both.

use crate::bug_injection::{self, InjectedBug};
use crate::command::{Command, Response};
use crate::config::ClientConfig;
use crate::error::{Error, SubmitError};
use crate::initiator::{ConnectionAction, Initiator};
use octokv_base::Nanos;
use octokv_runtime::{ReceiveStatus, SendStatus, SocketId, Sockets};
use std::io::IoSlice;
use std::net::SocketAddr;

/// Connection and receive buffer of one queue.
struct QueueConnection {
    socket: Option<SocketId>,
    buffer: Box<[u8]>,
    filled: usize,
}

const ADMIN_RECEIVE_BYTES: usize = 16 << 10;

/// An initiator and its connections. See the module documentation.
pub(crate) struct SessionIo {
    address: SocketAddr,
    initiator: Initiator,
    connections: Vec<QueueConnection>,
    now: Nanos,
    actions: Vec<ConnectionAction>,
    slices: Vec<IoSlice<'static>>,
}

impl SessionIo {
    /// An initiator whose next [`SessionIo::advance`] starts to connect.
    pub fn new(address: SocketAddr, config: ClientConfig, now: Nanos) -> SessionIo {
        SessionIo {
            address,
            initiator: Initiator::new(config, now),
            connections: Vec::new(),
            now,
            actions: Vec::new(),
            slices: Vec::new(),
        }
    }

    /// Cause of the end, once the session has ended.
    pub fn ended(&self) -> Option<Error> {
        self.initiator.is_ended().then(|| match self.initiator.last_error() {
            Some(cause) => Error::Connect(self.address, cause),
            None => Error::Closed,
        })
    }

    /// Address of the node.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The state machine.
    pub fn initiator(&self) -> &Initiator {
        &self.initiator
    }

    /// The initiator, to take its token reports.
    pub fn initiator_mut(&mut self) -> &mut Initiator {
        &mut self.initiator
    }

    /// Sets the time from which the timeouts of submitted commands count, when commands are submitted before
    /// [`SessionIo::advance`].
    pub fn begin_iteration(&mut self, now: Nanos) {
        self.now = now;
    }

    /// Submits a command; the next send includes it.
    ///
    /// # Errors
    /// [`SubmitError`]; no response follows.
    #[inline]
    pub fn submit(&mut self, command: Command<'_>, token: u64) -> Result<(), SubmitError> {
        if self.initiator.free_slots() == 0 {
            return Err(self.submit_error());
        }
        self.initiator.submit(self.now, command, token).map_err(SubmitError::Invalid)
    }

    /// Submits a command on one I/O queue, counted from 0.
    ///
    /// # Errors
    /// [`SubmitError`]; [`SubmitError::QueueFull`] refers to that queue.
    pub fn submit_on(&mut self, queue: usize, command: Command<'_>, token: u64) -> Result<(), SubmitError> {
        if self.initiator.queue_free_slots(queue) == 0 {
            return Err(self.submit_error());
        }
        self.initiator.submit_on(queue, self.now, command, token).map_err(SubmitError::Invalid)
    }

    fn submit_error(&self) -> SubmitError {
        match (self.initiator.is_live(), self.initiator.is_ended()) {
            (true, _) => SubmitError::QueueFull,
            (false, false) => SubmitError::NotConnected,
            (false, true) => SubmitError::Ended,
        }
    }

    /// Handles deadlines up to `now`, opens and closes connections, and sends. Returns whether there was any work.
    pub fn advance<S: Sockets>(
        &mut self,
        sockets: &mut S,
        now: Nanos,
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        self.now = now;
        if self.initiator.next_deadline() <= now {
            self.initiator.tick(now, on_done);
        }
        self.apply_actions_and_send(sockets, on_done)
    }

    /// Receives from the sockets of this session among `ready`, then opens and closes connections, and sends. Returns
    /// whether there was any work. REQUIRES: called after [`SessionIo::advance`], at the same time.
    pub fn receive<S: Sockets>(
        &mut self,
        sockets: &mut S,
        ready: &[SocketId],
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        let mut progress = false;
        for &socket in ready {
            if let Some(index) =
                self.connections.iter().position(|connection| connection.socket == Some(socket))
            {
                progress |= self.receive_on(sockets, index, on_done);
            }
        }
        progress | self.apply_actions_and_send(sockets, on_done)
    }

    /// Closes the session gracefully. REQUIRES: the caller continues to poll until [`SessionIo::ended`].
    pub fn close(&mut self, now: Nanos, on_done: &mut impl FnMut(u64, Result<Response, Error>)) {
        self.initiator.close(now, on_done);
    }

    /// Closes all sockets, of a session that is dropped.
    pub fn close_sockets<S: Sockets>(&mut self, sockets: &mut S) {
        for socket in self.connections.iter_mut().filter_map(|connection| connection.socket.take()) {
            sockets.close(socket);
        }
    }

    fn apply_actions_and_send<S: Sockets>(
        &mut self,
        sockets: &mut S,
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        let progress = self.apply_actions(sockets, on_done);
        progress | self.send_all(sockets, on_done)
    }

    fn receive_on<S: Sockets>(
        &mut self,
        sockets: &mut S,
        index: usize,
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        let QueueConnection { socket, buffer, filled } = &mut self.connections[index];
        let Some(id) = *socket else { return false };
        match sockets.receive(id, &mut buffer[*filled..]) {
            ReceiveStatus::WouldBlock => false,
            ReceiveStatus::Closed => {
                self.initiator.on_connection_lost(self.now, on_done);
                true
            }
            ReceiveStatus::Bytes(bytes) => {
                let end = *filled + bytes;
                let consumed = self.initiator.receive(index as u16, self.now, &buffer[..end], on_done);
                buffer.copy_within(consumed..end, 0);
                *filled = end - consumed;
                true
            }
        }
    }

    fn send_all<S: Sockets>(
        &mut self,
        sockets: &mut S,
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        let mut progress = false;
        for index in 0..self.connections.len() {
            let Some(socket) = self.connections[index].socket else { continue };
            let queue = index as u16;
            while !self.initiator.is_flushed(queue) {
                match self.send(sockets, queue, socket) {
                    SendStatus::Bytes(bytes) => {
                        self.initiator.advance_sent(queue, bytes);
                        progress = true;
                    }
                    SendStatus::WouldBlock => break,
                    SendStatus::Closed => {
                        self.initiator.on_connection_lost(self.now, on_done);
                        // All connections are closed now, before a new attempt can have other queues.
                        self.apply_actions(sockets, on_done);
                        return true;
                    }
                }
            }
        }
        progress
    }

    fn send<S: Sockets>(&mut self, sockets: &mut S, queue: u16, socket: SocketId) -> SendStatus {
        let mut slices = recycle(std::mem::take(&mut self.slices));
        self.initiator.slices(queue, &mut slices);
        let sent = sockets.send(socket, &slices);
        self.slices = recycle(slices);
        sent
    }

    fn apply_actions<S: Sockets>(
        &mut self,
        sockets: &mut S,
        on_done: &mut impl FnMut(u64, Result<Response, Error>),
    ) -> bool {
        let mut actions = std::mem::take(&mut self.actions);
        let mut progress = false;
        // Twice if a connection cannot be opened: then all are closed.
        loop {
            self.initiator.take_actions(&mut actions);
            if actions.is_empty() {
                self.actions = actions;
                return progress;
            }
            progress = true;
            for action in actions.drain(..) {
                match action {
                    ConnectionAction::Open(queue) => match sockets.connect(self.address) {
                        Ok(socket) => self.attach_socket(queue, socket),
                        Err(_) => self.initiator.on_connection_lost(self.now, on_done),
                    },
                    ConnectionAction::Close(queue) => {
                        let connection = self.connections.get_mut(usize::from(queue));
                        if let Some(socket) = connection.and_then(|connection| connection.socket.take()) {
                            if !self.initiator.is_flushed(queue) {
                                // Last chance to send a termination request: nothing else is left.
                                self.send(sockets, queue, socket);
                            }
                            sockets.close(socket);
                        }
                    }
                }
            }
        }
    }

    fn attach_socket(&mut self, queue: u16, socket: SocketId) {
        let index = usize::from(queue);
        while self.connections.len() <= index {
            let bytes = match self.connections.len() {
                0 => ADMIN_RECEIVE_BYTES,
                _ => self.initiator.config().receive_buffer_bytes.max(4096),
            };
            let buffer = vec![0; bytes].into_boxed_slice();
            self.connections.push(QueueConnection { socket: None, buffer, filled: 0 });
        }
        self.connections[index].socket = Some(socket);
        if !bug_injection::is_injected(InjectedBug::KeepReceivedBytes) {
            self.connections[index].filled = 0;
        }
    }
}

/// Reuses the allocation of a slice list for slices of another lifetime.
fn recycle<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("the list is empty")).collect()
}
