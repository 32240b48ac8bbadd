//! An initiator on sockets: submit commands, poll for responses. One core, no thread, non-blocking.
//!
//! Each [`Session::poll`] sends the unsent bytes (one gathered send per queue), receives once per ready queue into one
//! linear buffer, parses all of it, and passes responses to the callback. In steady state no command allocates. Tested in
//! `tests/`.

use crate::command::{Command, Response};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::{ConnectionError, Error};
use crate::initiator::{ConnectionAction, Initiator};
use octokv_base::{BufferPool, Nanos};
use octokv_runtime::{ReceiveStatus, SendStatus, SocketId, Sockets};
use std::io::IoSlice;
use std::net::SocketAddr;

/// Reason why a command was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum SubmitError {
    /// All slots of all queues are in use: poll, then retry.
    QueueFull,
    /// The session is disconnected: poll, then retry.
    NotConnected,
    /// The session has ended.
    Ended,
    /// The command itself is invalid.
    Invalid(Error),
}

/// Connection and receive buffer of one queue.
struct QueueConnection {
    socket: Option<SocketId>,
    buffer: Box<[u8]>,
    filled: usize,
}

const ADMIN_RECEIVE_BYTES: usize = 16 << 10;

/// A session with one namespace. See the module documentation.
pub struct Session<S: Sockets> {
    sockets: S,
    address: SocketAddr,
    initiator: Initiator,
    connections: Vec<QueueConnection>,
    now: Nanos,
    actions: Vec<ConnectionAction>,
    ready_sockets: Vec<SocketId>,
    slices: Vec<IoSlice<'static>>,
}

impl<S: Sockets> Session<S> {
    /// A session that starts to connect at once. REQUIRES: the caller polls it until [`Session::is_live`].
    pub fn new(sockets: S, address: SocketAddr, config: ClientConfig, now: Nanos) -> Session<S> {
        Session {
            sockets,
            address,
            initiator: Initiator::new(config, now),
            connections: Vec::new(),
            now,
            actions: Vec::new(),
            ready_sockets: Vec::new(),
            slices: Vec::new(),
        }
    }

    /// Whether commands can be submitted.
    pub fn is_live(&self) -> bool {
        self.initiator.is_live()
    }

    /// Cause of the end, once the session has ended.
    pub fn ended(&self) -> Option<Error> {
        self.initiator.is_ended().then(|| match self.initiator.last_error() {
            Some(cause) => Error::Connect(self.address, cause),
            None => Error::Closed,
        })
    }

    /// Cause of the last connection loss, while disconnected.
    pub fn last_error(&self) -> Option<ConnectionError> {
        self.initiator.last_error()
    }

    /// Address of the node.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Configuration.
    pub fn config(&self) -> &ClientConfig {
        self.initiator.config()
    }

    /// Controller and namespace limits, once the session was live.
    pub fn controller_info(&self) -> Option<&ControllerInfo> {
        self.initiator.controller_info()
    }

    /// How many times it became live. Commands of the same epoch reached the same controller.
    pub fn connection_epoch(&self) -> u64 {
        self.initiator.connection_epoch()
    }

    /// Number of commands that can be submitted now.
    pub fn free_slots(&self) -> usize {
        self.initiator.free_slots()
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.initiator.in_flight()
    }

    /// Pool of the response buffers; values to store may come from it too.
    pub fn pool(&self) -> &BufferPool {
        self.initiator.pool()
    }

    /// The sockets, to wait for readiness.
    pub fn sockets_mut(&mut self) -> &mut S {
        &mut self.sockets
    }

    /// Latest time of the next [`Session::poll`], whatever the sockets report.
    pub fn next_deadline(&self) -> Nanos {
        self.initiator.next_deadline()
    }

    /// Submits a command; the next [`Session::poll`] sends it and a later one returns its response with
    /// `token`.
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

    /// Submits a command on one I/O queue, counted from 0, for callers that assign commands to connections
    /// themselves.
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

    /// Sends, receives and handles deadlines up to `now`. Calls `on_done` once per command that completed or
    /// was aborted. Returns whether there was any work.
    pub fn poll(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Response, Error>)) -> bool {
        self.now = now;
        if self.initiator.next_deadline() <= now {
            self.initiator.tick(now, &mut on_done);
        }
        let mut progress = self.apply_actions(&mut on_done);
        progress |= self.send_all(&mut on_done);
        let mut ready = std::mem::take(&mut self.ready_sockets);
        ready.clear();
        self.sockets.ready(&mut ready);
        for &socket in &ready {
            if let Some(index) =
                self.connections.iter().position(|connection| connection.socket == Some(socket))
            {
                progress |= self.receive(index, &mut on_done);
            }
        }
        self.ready_sockets = ready;
        progress |= self.apply_actions(&mut on_done);
        progress | self.send_all(&mut on_done)
    }

    /// Closes the session gracefully. REQUIRES: the caller polls until [`Session::ended`].
    pub fn close(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Response, Error>)) {
        self.initiator.close(now, &mut on_done);
    }

    fn receive(&mut self, index: usize, on_done: &mut impl FnMut(u64, Result<Response, Error>)) -> bool {
        let QueueConnection { socket, buffer, filled } = &mut self.connections[index];
        let Some(id) = *socket else { return false };
        match self.sockets.receive(id, &mut buffer[*filled..]) {
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

    fn send_all(&mut self, on_done: &mut impl FnMut(u64, Result<Response, Error>)) -> bool {
        let mut progress = false;
        for index in 0..self.connections.len() {
            let Some(socket) = self.connections[index].socket else { continue };
            let queue = index as u16;
            while !self.initiator.is_flushed(queue) {
                match self.send(queue, socket) {
                    SendStatus::Bytes(bytes) => {
                        self.initiator.advance_sent(queue, bytes);
                        progress = true;
                    }
                    SendStatus::WouldBlock => break,
                    SendStatus::Closed => {
                        self.initiator.on_connection_lost(self.now, on_done);
                        break;
                    }
                }
            }
        }
        progress
    }

    fn send(&mut self, queue: u16, socket: SocketId) -> SendStatus {
        let mut slices = recycle(std::mem::take(&mut self.slices));
        self.initiator.slices(queue, &mut slices);
        let sent = self.sockets.send(socket, &slices);
        self.slices = recycle(slices);
        sent
    }

    fn apply_actions(&mut self, on_done: &mut impl FnMut(u64, Result<Response, Error>)) -> bool {
        let mut actions = std::mem::take(&mut self.actions);
        self.initiator.take_actions(&mut actions);
        let progress = !actions.is_empty();
        for action in actions.drain(..) {
            match action {
                ConnectionAction::Open(queue) => match self.sockets.connect(self.address) {
                    Ok(socket) => self.attach_socket(queue, socket),
                    Err(_) => self.initiator.on_connection_lost(self.now, on_done),
                },
                ConnectionAction::Close(queue) => {
                    let connection = self.connections.get_mut(usize::from(queue));
                    if let Some(socket) = connection.and_then(|connection| connection.socket.take()) {
                        if !self.initiator.is_flushed(queue) {
                            // Last chance to send a termination request.
                            self.send(queue, socket);
                        }
                        self.sockets.close(socket);
                    }
                }
            }
        }
        self.actions = actions;
        progress
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
        self.connections[index].filled = 0;
    }
}

impl<S: Sockets> Drop for Session<S> {
    fn drop(&mut self) {
        for socket in self.connections.iter_mut().filter_map(|connection| connection.socket.take()) {
            self.sockets.close(socket);
        }
    }
}

/// Reuses the allocation of a slice list for slices of another lifetime.
fn recycle<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("the list is empty")).collect()
}
