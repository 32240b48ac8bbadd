//! One connection: its socket, its machine, and the bytes between them.
//!
//! In: bytes from the socket, by way of the core's one receive buffer or, of a large value, straight into its
//! record; outcomes of requests. Out: requests,
//! and replies by one gathered send. Holds: what was received and not yet taken (part of a PDU, or all
//! of it while the machine waits for buffers).
//!
//! Invariants: bytes reach the machine in order, each once; while bytes wait that the machine would not
//! take, nothing more is received, so the peer's TCP window closes.

use crate::reactor::RECEIVE_BYTES;
use crate::tenants::{Flows, OTHERS};
use crate::time_budget::{Quantum, Talk};
use octokv_base::{Nanos, Pool};
use octokv_nvmf::{Connection, Request};
use octokv_runtime::{Received, Sent, SocketId, Sockets};
use octokv_sched::FlowId;
use std::io::IoSlice;

/// From so many missing bytes of a value on, a receive of their own is cheaper than a copy of them.
const IN_PLACE_BYTES_MIN: usize = 16 * 1024;

/// Bytes that the machine takes before what they ask for is carried out: the buffers of a few commands stay in
/// the core's first caches, where those of a whole receive would not.
const SLICE_BYTES: usize = 32 * 1024;
/// And the first of a receive, each twice the one before: what they ask for may take long, and time is looked at
/// between slices.
const SLICE_BYTES_FIRST: usize = 2048;
/// Of a connection whose commands were costly, and of a fresh one: this part of a quantum.
const SLICE_PART_FIRST: usize = 32;

/// Bytes received at once when each command costs much: one command without data.
const RECEIVE_BYTES_MIN: usize = 72;

/// Bytes that are sent at once, at the least while that many wait, and at the most. A send of few costs the same.
const SEND_BYTES_MIN: usize = 32 * 1024;
const SEND_BYTES: usize = 1 << 20;

/// Memory for bytes that wait which a connection keeps when none do.
const PENDING_KEEP_BYTES: usize = 64 * 1024;

/// How long a host may take for the last bytes of a connection that has ended.
const LAST_BYTES: Nanos = Nanos::from_secs(1);

/// One connection of a core.
pub struct Link {
    pub(crate) socket: SocketId,
    pub(crate) connection: Connection,
    /// Received and not taken, from `pending_from` on.
    pending: Vec<u8>,
    /// Bytes at the head of `pending` that were taken since: moving the rest each time would cost more than taking.
    pending_from: usize,
    /// The machine would not take what is pending until something of its own ends.
    stalled: bool,
    /// When it was first seen that the connection has ended with bytes to send.
    ended: Option<Nanos>,
    /// Whether the socket is closed already, and only requests are still out.
    pub(crate) socket_closed: bool,
    /// Whether it is on the core's list of links with something to send.
    pub(crate) listed: bool,
    /// Bytes received at once.
    pub(crate) quantum: Quantum,
    /// Bytes sent at once.
    pub(crate) send_quantum: Quantum,
    /// How much it took of turns of late.
    pub(crate) talk: Talk,
    /// Whose it is, once it has asked for something.
    pub(crate) flow: Option<FlowId>,
}

/// What became of the time and the room for a link's requests after some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// There is more of both.
    More,
    /// There is more, but a slice twice as long may take more than the link's share.
    Scarce,
    /// The link has had its share of the turn, or requests wait for room.
    Enough,
}

impl Link {
    /// A fresh connection.
    pub fn new(socket: SocketId, connection: Connection) -> Link {
        Link {
            socket,
            connection,
            pending: Vec::new(),
            pending_from: 0,
            stalled: false,
            ended: None,
            socket_closed: false,
            listed: false,
            quantum: Quantum::new(RECEIVE_BYTES_MIN, RECEIVE_BYTES),
            send_quantum: Quantum::new(SEND_BYTES_MIN, SEND_BYTES),
            talk: Talk::default(),
            flow: None,
        }
    }

    /// Whose it is. A connection that has not said so yet is nobody's.
    #[inline]
    pub fn flow_of(&mut self, flows: &Flows) -> FlowId {
        if let Some(flow) = self.flow {
            return flow;
        }
        // Not by a name that was refused: it may be another's.
        self.flow = self.connection.host().map(|host| flows.join(host));
        self.flow.unwrap_or(OTHERS)
    }

    /// Whether it waits for something of its own before it takes more bytes.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Whether it takes more bytes of its socket now.
    pub fn may_receive(&self) -> bool {
        !self.stalled && !self.socket_closed && !self.connection.is_closed()
    }

    /// Receives what the socket has, at most a quantum and what the buffer holds, and has the machine take it, a
    /// slice at a time: after each, `run` carries out what was asked and hands back what came of it, and says whether
    /// there is room for more. Gives the number of bytes that came, 0 for the end, those that were taken where not all were; `None` when nothing
    /// was there.
    #[allow(clippy::too_many_arguments)] // One core's parts, lent for one receive.
    pub fn receive(
        &mut self,
        now: Nanos,
        sockets: &mut impl Sockets,
        buffer: &mut [u8],
        pool: &Pool,
        mut run: impl FnMut(&mut Connection, &mut Vec<Request>) -> Room,
        requests: &mut Vec<Request>,
    ) -> Option<usize> {
        if !self.may_receive() {
            return None;
        }
        if let Some(received) = self.receive_in_place(now, sockets, pool, requests) {
            run(&mut self.connection, requests);
            return received;
        }
        let kept = self.pending.len() - self.pending_from;
        if kept + buffer.len() / 4 > buffer.len() {
            // More than any PDU is pending and none of it was taken: only a stall does that.
            self.stalled = true;
            return None;
        }
        let end = buffer.len().min(kept + self.quantum.bytes());
        match sockets.receive(self.socket, &mut buffer[kept..end]) {
            Received::Nothing => None,
            Received::Closed => {
                self.connection.peer_closed();
                Some(0)
            }
            Received::Bytes(count) => {
                buffer[..kept].copy_from_slice(&self.pending[self.pending_from..]);
                let bytes = &buffer[..kept + count];
                let taken = self.take(now, bytes, pool, run, requests);
                self.pending.clear();
                self.pending_from = 0;
                self.pending.extend_from_slice(&bytes[taken..]);
                Some(if self.stalled { taken } else { count })
            }
        }
    }

    /// Has the machine take bytes from their head, and gives how many it took.
    fn take(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &Pool,
        mut run: impl FnMut(&mut Connection, &mut Vec<Request>) -> Room,
        requests: &mut Vec<Request>,
    ) -> usize {
        let first = (self.quantum.bytes() / SLICE_PART_FIRST).clamp(RECEIVE_BYTES_MIN, SLICE_BYTES_FIRST);
        let (mut taken, mut slice) = (0, first);
        while taken < bytes.len() {
            let end = (taken + slice).min(bytes.len());
            let consumed = self.connection.receive(now, &bytes[taken..end], pool, requests);
            taken += consumed.bytes;
            let running = self.connection.in_flight();
            let room = run(&mut self.connection, requests);
            // What waited for an answer need not where one has come.
            let settled = self.connection.in_flight() < running;
            self.stalled = consumed.stalled.is_some() && !settled;
            // What is left is offered again when there is time and room.
            self.stalled |= room == Room::Enough && taken < bytes.len() && consumed.bytes > 0;
            if self.stalled {
                break;
            }
            match (consumed.bytes, end == bytes.len()) {
                _ if consumed.stalled.is_some() => {}
                // The front of a PDU that ends behind this slice, or that has not come whole.
                (0, false) => slice *= 2,
                (_, true) => break,
                _ if room == Room::Scarce => {}
                _ => slice = (slice * 2).min(SLICE_BYTES),
            }
        }
        taken
    }

    /// Where much of a large value is still to come, receives it straight into the record that the device
    /// will write. `None` where that is not so.
    fn receive_in_place(
        &mut self,
        now: Nanos,
        sockets: &mut impl Sockets,
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Option<Option<usize>> {
        if !self.pending.is_empty() {
            return None;
        }
        let place = self.connection.landing().filter(|place| place.len() >= IN_PLACE_BYTES_MIN)?;
        let bytes = place.len().min(self.quantum.bytes().max(IN_PLACE_BYTES_MIN));
        Some(match sockets.receive(self.socket, &mut place[..bytes]) {
            Received::Nothing => None,
            Received::Closed => {
                self.connection.peer_closed();
                Some(0)
            }
            Received::Bytes(count) => {
                self.connection.landed(now, count, pool, requests);
                Some(count)
            }
        })
    }

    /// Offers a stalled machine its pending bytes again. Gives how many it took.
    pub fn resume(&mut self, now: Nanos, pool: &Pool, requests: &mut Vec<Request>) -> usize {
        if self.connection.is_closed() {
            self.stalled = false;
        }
        if !self.stalled {
            return 0;
        }
        let rest = &self.pending[self.pending_from..];
        // As much as of bytes that have just come: other connections have their turn, too.
        let mut slice = rest.len().min(SLICE_BYTES).min(self.quantum.bytes());
        let mut consumed = self.connection.receive(now, &rest[..slice], pool, requests);
        while consumed.bytes == 0 && consumed.stalled.is_none() && slice < rest.len() {
            // The front of a PDU that ends behind this slice.
            slice = (slice * 2).min(rest.len());
            consumed = self.connection.receive(now, &rest[..slice], pool, requests);
        }
        self.pending_from += consumed.bytes;
        let left = self.pending.len() - self.pending_from;
        self.stalled = consumed.stalled.is_some() || (consumed.bytes > 0 && left > 0);
        if left == 0 || self.pending_from >= left {
            self.pending.drain(..self.pending_from);
            self.pending_from = 0;
        }
        if self.pending.is_empty() && self.pending.capacity() > PENDING_KEEP_BYTES {
            self.pending = Vec::new();
        }
        consumed.bytes
    }

    /// Gives up on a host that does not take the last bytes of a connection that has ended. True when it did.
    pub fn give_up_when_late(&mut self, now: Nanos) -> bool {
        if self.socket_closed || !self.connection.is_closed() || self.connection.outbox().is_empty() {
            return false;
        }
        let since = *self.ended.get_or_insert(now);
        if now.since(since) < LAST_BYTES {
            return false;
        }
        self.connection.peer_closed();
        true
    }

    /// Sends what waits, at most a quantum, as much as the socket takes in one go. Gives how many bytes it took, 0
    /// when the connection is broken; `None` when there was nothing to send, or no room.
    pub fn send(&mut self, sockets: &mut impl Sockets, slices: &mut Vec<IoSlice<'static>>) -> Option<usize> {
        if self.socket_closed || self.connection.outbox().is_empty() {
            return None;
        }
        let mut list = recycled(std::mem::take(slices));
        self.connection.outbox().slices(&mut list, self.send_quantum.bytes());
        let sent = sockets.send(self.socket, &list);
        *slices = recycled(list);
        match sent {
            Sent::Full => None,
            Sent::Bytes(count) => {
                self.connection.outbox().advance(count);
                Some(count)
            }
            Sent::Broken => {
                self.connection.peer_closed();
                Some(0)
            }
        }
    }
}

/// The same allocation, empty, for slices of another lifetime.
fn recycled<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("it is empty")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recycling_keeps_the_allocation() {
        let bytes = [0; 8];
        let mut slices = Vec::with_capacity(100);
        slices.push(IoSlice::new(&bytes));
        let start = slices.as_ptr() as usize;
        let recycled: Vec<IoSlice<'static>> = recycled(slices);
        assert_eq!((recycled.as_ptr() as usize, recycled.capacity(), recycled.len()), (start, 100, 0));
    }
}
