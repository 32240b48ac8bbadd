//! An initiator on sockets: submit commands, poll for responses. One core, no thread, non-blocking.
//!
//! Each [`Session::poll`] sends the unsent bytes (one gathered send per queue), receives once per ready queue into one
//! linear buffer, parses all of it, and passes responses to the callback (`session_io`). In steady state no command
//! allocates. Tested in `tests/`.

use crate::command::{Command, Response};
use crate::completion::TokenReport;
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::{ConnectionError, Error, SubmitError};
use crate::session_io::SessionIo;
use octokv_base::{BufferPool, Nanos};
use octokv_runtime::{SocketId, Sockets};
use std::net::SocketAddr;

/// A session with one namespace. See the module documentation.
pub struct Session<S: Sockets> {
    sockets: S,
    io: SessionIo,
    ready_sockets: Vec<SocketId>,
}

impl<S: Sockets> Session<S> {
    /// A session that starts to connect at once. REQUIRES: the caller polls it until [`Session::is_live`].
    pub fn new(sockets: S, address: SocketAddr, config: ClientConfig, now: Nanos) -> Session<S> {
        Session { sockets, io: SessionIo::new(address, config, now), ready_sockets: Vec::new() }
    }

    /// Whether commands can be submitted.
    pub fn is_live(&self) -> bool {
        self.io.initiator().is_live()
    }

    /// Cause of the end, once the session has ended.
    pub fn ended(&self) -> Option<Error> {
        self.io.ended()
    }

    /// Cause of the last connection loss, while disconnected.
    pub fn last_error(&self) -> Option<ConnectionError> {
        self.io.initiator().last_error()
    }

    /// Address of the node.
    pub fn address(&self) -> SocketAddr {
        self.io.address()
    }

    /// Configuration.
    pub fn config(&self) -> &ClientConfig {
        self.io.initiator().config()
    }

    /// Controller and namespace limits, once the session was live.
    pub fn controller_info(&self) -> Option<&ControllerInfo> {
        self.io.initiator().controller_info()
    }

    /// How many times it became live. Commands of the same epoch reached the same controller.
    pub fn connection_epoch(&self) -> u64 {
        self.io.initiator().connection_epoch()
    }

    /// Number of commands that can be submitted now.
    pub fn free_slots(&self) -> usize {
        self.io.initiator().free_slots()
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.io.initiator().in_flight()
    }

    /// Pool of the response buffers; values to store may come from it too.
    pub fn pool(&self) -> &BufferPool {
        self.io.initiator().pool()
    }

    /// The sockets, to wait for readiness.
    pub fn sockets_mut(&mut self) -> &mut S {
        &mut self.sockets
    }

    /// Latest time of the next [`Session::poll`], whatever the sockets report.
    pub fn next_deadline(&self) -> Nanos {
        self.io.initiator().next_deadline()
    }

    /// Sets the time from which the timeouts of submitted commands count, when commands are submitted before
    /// [`Session::poll`] and the last one is long ago.
    pub fn begin_iteration(&mut self, now: Nanos) {
        self.io.begin_iteration(now);
    }

    /// Submits a command; the next [`Session::poll`] sends it and a later one returns its response with
    /// `token`.
    ///
    /// # Errors
    /// [`SubmitError`]; no response follows.
    #[inline]
    pub fn submit(&mut self, command: Command<'_>, token: u64) -> Result<(), SubmitError> {
        self.io.submit(command, token)
    }

    /// Submits a command on one I/O queue, counted from 0, for callers that assign commands to connections
    /// themselves.
    ///
    /// # Errors
    /// [`SubmitError`]; [`SubmitError::QueueFull`] refers to that queue.
    pub fn submit_on(&mut self, queue: usize, command: Command<'_>, token: u64) -> Result<(), SubmitError> {
        self.io.submit_on(queue, command, token)
    }

    /// Sends, receives and handles deadlines up to `now`. Calls `on_done` once per command that completed or
    /// was aborted. Returns whether there was any work.
    pub fn poll(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Response, Error>)) -> bool {
        let Session { sockets, io, ready_sockets } = self;
        let progress = io.advance(sockets, now, &mut on_done);
        ready_sockets.clear();
        sockets.ready(ready_sockets);
        progress | io.receive(sockets, ready_sockets, &mut on_done)
    }

    /// Moves the tokens of the commands that completed to `into`. REQUIRES: it is called after each [`Session::poll`] if there
    /// is a [`ControllerInfo::device_log`].
    pub fn take_token_reports(&mut self, into: &mut Vec<TokenReport>) {
        into.append(&mut self.io.initiator_mut().token_reports);
    }

    /// Closes the session gracefully. REQUIRES: the caller polls until [`Session::ended`].
    pub fn close(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Response, Error>)) {
        self.io.close(now, &mut on_done);
    }
}

impl<S: Sockets> Drop for Session<S> {
    fn drop(&mut self) {
        self.io.close_sockets(&mut self.sockets);
    }
}
