//! The initiator on sockets: submit commands, poll for answers, one core, no thread, no waiting.
//!
//! Each [`Session::poll`] sends what waits (one gathered send per queue), receives once per queue that
//! may have bytes into one linear buffer, parses all of it, and answers through the callback.
//! In steady state no command allocates. Tested in `tests/`.

use crate::command::{Answer, Command};
use crate::config::Settings;
use crate::controller_init::Facts;
use crate::error::{Error, Lost};
use crate::initiator::{Effect, Initiator};
use octokv_base::{Nanos, Pool};
use octokv_runtime::{Received, Sent, SocketId, Sockets};
use std::io::IoSlice;
use std::net::SocketAddr;

/// Why a command was not taken.
#[derive(Debug, PartialEq, Eq)]
pub enum Rejected {
    /// Every slot of every queue is in use: poll, then try again.
    Full,
    /// There is no connection now: poll, then try again.
    NotConnected,
    /// The session has ended.
    Over,
    /// There is something wrong with the command itself.
    Invalid(Error),
}

/// The connection of one queue.
struct Stream {
    socket: Option<SocketId>,
    buffer: Box<[u8]>,
    filled: usize,
}

const ADMIN_RECEIVE_BYTES: usize = 16 << 10;

/// A session with one namespace. See the module's text.
pub struct Session<S: Sockets> {
    sockets: S,
    address: SocketAddr,
    initiator: Initiator,
    streams: Vec<Stream>,
    now: Nanos,
    effects: Vec<Effect>,
    ready: Vec<SocketId>,
    slices: Vec<IoSlice<'static>>,
}

impl<S: Sockets> Session<S> {
    /// A session that begins to connect at once; poll it until [`Session::is_live`].
    pub fn new(sockets: S, address: SocketAddr, settings: Settings, now: Nanos) -> Session<S> {
        Session {
            sockets,
            address,
            initiator: Initiator::new(settings, now),
            streams: Vec::new(),
            now,
            effects: Vec::new(),
            ready: Vec::new(),
            slices: Vec::new(),
        }
    }

    /// Whether commands can be submitted.
    pub fn is_live(&self) -> bool {
        self.initiator.is_live()
    }

    /// Why the session has ended, once it has.
    pub fn ended(&self) -> Option<Error> {
        self.initiator.is_over().then(|| match self.initiator.last_loss() {
            Some(lost) => Error::Connect(self.address, lost),
            None => Error::Closed,
        })
    }

    /// Why the last connection was lost, while there is none.
    pub fn last_loss(&self) -> Option<Lost> {
        self.initiator.last_loss()
    }

    /// The node's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        self.initiator.settings()
    }

    /// What is known of the controller and namespace, once it was live.
    pub fn facts(&self) -> Option<&Facts> {
        self.initiator.facts()
    }

    /// How often it went live: two commands of one life met the same controller.
    pub fn lives(&self) -> u64 {
        self.initiator.lives()
    }

    /// How many commands can be submitted now.
    pub fn room(&self) -> usize {
        self.initiator.room()
    }

    /// How many commands wait for their answers.
    pub fn in_flight(&self) -> usize {
        self.initiator.in_flight()
    }

    /// The pool that the data of answers comes from; values to store may come from it too.
    pub fn pool(&self) -> &Pool {
        self.initiator.pool()
    }

    /// The sockets, to wait on.
    pub fn sockets_mut(&mut self) -> &mut S {
        &mut self.sockets
    }

    /// When [`Session::poll`] must be called at the latest, whatever the sockets say.
    pub fn next_deadline(&self) -> Nanos {
        self.initiator.next_deadline()
    }

    /// Takes a command; the next [`Session::poll`] sends it. Its answer comes with `token`.
    ///
    /// # Errors
    /// Why it was not taken; then no answer comes.
    #[inline]
    pub fn submit(&mut self, command: Command<'_>, token: u64) -> Result<(), Rejected> {
        if self.initiator.room() == 0 {
            return Err(self.why_not());
        }
        self.initiator.submit(self.now, command, token).map_err(Rejected::Invalid)
    }

    /// Takes a command for one of the I/O queues, counted from 0: for who divides commands among connections itself.
    ///
    /// # Errors
    /// Why it was not taken, as of [`Session::submit`]; full is that queue.
    pub fn submit_on(&mut self, queue: usize, command: Command<'_>, token: u64) -> Result<(), Rejected> {
        if self.initiator.queue_room(queue) == 0 {
            return Err(self.why_not());
        }
        self.initiator.submit_on(queue, self.now, command, token).map_err(Rejected::Invalid)
    }

    fn why_not(&self) -> Rejected {
        match (self.initiator.is_live(), self.initiator.is_over()) {
            (true, _) => Rejected::Full,
            (false, false) => Rejected::NotConnected,
            (false, true) => Rejected::Over,
        }
    }

    /// Sends, receives, lets time pass. Calls `on_done` once for each command that is answered or lost.
    /// True when there was anything to do.
    pub fn poll(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Answer, Error>)) -> bool {
        self.now = now;
        if self.initiator.next_deadline() <= now {
            self.initiator.tick(now, &mut on_done);
        }
        let mut busy = self.carry_out(&mut on_done);
        busy |= self.send_all(&mut on_done);
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.sockets.ready(&mut ready);
        for &socket in &ready {
            if let Some(index) = self.streams.iter().position(|stream| stream.socket == Some(socket)) {
                busy |= self.receive(index, &mut on_done);
            }
        }
        self.ready = ready;
        busy |= self.carry_out(&mut on_done);
        busy | self.send_all(&mut on_done)
    }

    /// Ends the session in good order; poll until [`Session::ended`].
    pub fn close(&mut self, now: Nanos, mut on_done: impl FnMut(u64, Result<Answer, Error>)) {
        self.initiator.close(now, &mut on_done);
    }

    fn receive(&mut self, index: usize, on_done: &mut impl FnMut(u64, Result<Answer, Error>)) -> bool {
        let Stream { socket, buffer, filled } = &mut self.streams[index];
        let Some(id) = *socket else { return false };
        match self.sockets.receive(id, &mut buffer[*filled..]) {
            Received::Nothing => false,
            Received::Closed => {
                self.initiator.connection_lost(self.now, on_done);
                true
            }
            Received::Bytes(bytes) => {
                let end = *filled + bytes;
                let taken = self.initiator.receive(index as u16, self.now, &buffer[..end], on_done);
                buffer.copy_within(taken..end, 0);
                *filled = end - taken;
                true
            }
        }
    }

    fn send_all(&mut self, on_done: &mut impl FnMut(u64, Result<Answer, Error>)) -> bool {
        let mut busy = false;
        for index in 0..self.streams.len() {
            let Some(socket) = self.streams[index].socket else { continue };
            let queue = index as u16;
            while !self.initiator.is_flushed(queue) {
                match self.send(queue, socket) {
                    Sent::Bytes(bytes) => {
                        self.initiator.sent(queue, bytes);
                        busy = true;
                    }
                    Sent::Full => break,
                    Sent::Broken => {
                        self.initiator.connection_lost(self.now, on_done);
                        break;
                    }
                }
            }
        }
        busy
    }

    fn send(&mut self, queue: u16, socket: SocketId) -> Sent {
        let mut slices = recycle(std::mem::take(&mut self.slices));
        self.initiator.slices(queue, &mut slices);
        let sent = self.sockets.send(socket, &slices);
        self.slices = recycle(slices);
        sent
    }

    fn carry_out(&mut self, on_done: &mut impl FnMut(u64, Result<Answer, Error>)) -> bool {
        let mut effects = std::mem::take(&mut self.effects);
        self.initiator.take_effects(&mut effects);
        let busy = !effects.is_empty();
        for effect in effects.drain(..) {
            match effect {
                Effect::Open(queue) => match self.sockets.connect(self.address) {
                    Ok(socket) => self.attach(queue, socket),
                    Err(_) => self.initiator.connection_lost(self.now, on_done),
                },
                Effect::Close(queue) => {
                    let stream = self.streams.get_mut(usize::from(queue));
                    if let Some(socket) = stream.and_then(|stream| stream.socket.take()) {
                        if !self.initiator.is_flushed(queue) {
                            // The last words: a termination request, if there is room for it.
                            self.send(queue, socket);
                        }
                        self.sockets.close(socket);
                    }
                }
            }
        }
        self.effects = effects;
        busy
    }

    fn attach(&mut self, queue: u16, socket: SocketId) {
        let index = usize::from(queue);
        while self.streams.len() <= index {
            let bytes = match self.streams.len() {
                0 => ADMIN_RECEIVE_BYTES,
                _ => self.initiator.settings().receive_bytes.max(4096),
            };
            let buffer = vec![0; bytes].into_boxed_slice();
            self.streams.push(Stream { socket: None, buffer, filled: 0 });
        }
        self.streams[index].socket = Some(socket);
        self.streams[index].filled = 0;
    }
}

impl<S: Sockets> Drop for Session<S> {
    fn drop(&mut self) {
        for socket in self.streams.iter_mut().filter_map(|stream| stream.socket.take()) {
            self.sockets.close(socket);
        }
    }
}

/// The allocation of a list of slices for slices of another lifetime.
fn recycle<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("the list was just cleared")).collect()
}
