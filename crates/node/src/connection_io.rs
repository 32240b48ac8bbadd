//! One connection: its socket, its machine, and the bytes between them.
//!
//! In: bytes from the socket, by way of the core's one receive buffer or, of a large value, straight into its
//! record; outcomes of requests. Out: requests,
//! and replies by one gathered send. Holds: what was received and not yet taken (part of a PDU, or all
//! of it while the machine waits for buffers).
//!
//! Invariants: bytes reach the machine in order, each once; while bytes wait that the machine would not
//! take, nothing more is received, so the peer's TCP window closes.

use crate::tenants::{OVERFLOW_TENANT, TenantTable};
use crate::time_budget::{ByteQuantum, UsageHistory};
use octokv_base::{BufferPool, Nanos};
use octokv_nvmf::{Connection, IoRequest};
use octokv_runtime::{ReceiveStatus, SendStatus, SocketId, Sockets};
use octokv_sched::TenantId;
use std::io::IoSlice;

/// Bytes received at once: one linear buffer per core. Measured: less costs system calls.
pub const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// From so many missing bytes of a value on, a receive of their own is cheaper than a copy of them.
const IN_PLACE_BYTES_MIN: usize = 16 * 1024;

/// Bytes that the machine takes before what they ask for is carried out: the buffers of a few commands stay in
/// the core's first caches, where those of a whole receive would not.
const SLICE_BYTES_MAX: usize = 32 * 1024;
/// And the first of a receive, each twice the one before: what they ask for may take long, and time is looked at
/// between slices.
const SLICE_BYTES_FIRST: usize = 2048;
/// Of a connection whose commands were costly, and of a fresh one: this part of a quantum.
const SLICE_FIRST_DIVISOR: usize = 32;

/// Bytes received at once when each command costs much: one command without data.
const RECEIVE_BYTES_MIN: usize = 72;

/// Bytes that are sent at once, at the least while that many wait, and at the most. A send of few costs the same.
const SEND_BYTES_MIN: usize = 32 * 1024;
const SEND_BYTES_MAX: usize = 1 << 20;

/// Memory for bytes that wait which a connection keeps when none do.
const PENDING_RETAIN_BYTES: usize = 64 * 1024;

/// How long a host may take for the last bytes of a connection that has ended.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(1);

/// One connection of a core.
pub struct ConnectionIo {
    pub(crate) socket: SocketId,
    pub(crate) connection: Connection,
    /// Received and not taken, from `pending_from` on.
    unconsumed: Vec<u8>,
    /// Bytes at the head of `pending` that were taken since: moving the rest each time would cost more than taking.
    unconsumed_from: usize,
    /// The machine would not take what is pending until something of its own ends.
    stalled: bool,
    /// When it was first seen that the connection has ended with bytes to send.
    ended_at: Option<Nanos>,
    /// Whether the socket is closed already, and only requests are still out.
    pub(crate) socket_closed: bool,
    /// Whether it is on the core's list of links with something to send.
    pub(crate) in_send_list: bool,
    /// Bytes received at once.
    pub(crate) receive_quantum: ByteQuantum,
    /// Bytes sent at once.
    pub(crate) send_quantum: ByteQuantum,
    /// How much it took of turns of late.
    pub(crate) usage: UsageHistory,
    /// Whose it is, once it has asked for something.
    pub(crate) tenant: Option<TenantId>,
}

/// What became of the time and the room for a link's requests after some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveBudget {
    /// There is more of both.
    Ample,
    /// There is more, but a slice twice as long may take more than the link's share.
    Low,
    /// The link has had its share of the turn, or requests wait for room.
    Exhausted,
}

impl ConnectionIo {
    /// A fresh connection.
    pub fn new(socket: SocketId, connection: Connection) -> ConnectionIo {
        ConnectionIo {
            socket,
            connection,
            unconsumed: Vec::new(),
            unconsumed_from: 0,
            stalled: false,
            ended_at: None,
            socket_closed: false,
            in_send_list: false,
            receive_quantum: ByteQuantum::new(RECEIVE_BYTES_MIN, RECEIVE_BUFFER_BYTES),
            send_quantum: ByteQuantum::new(SEND_BYTES_MIN, SEND_BYTES_MAX),
            usage: UsageHistory::default(),
            tenant: None,
        }
    }

    /// Whose it is. A connection that has not said so yet is nobody's.
    #[inline]
    pub fn resolve_tenant(&mut self, tenants: &TenantTable) -> TenantId {
        if let Some(tenant) = self.tenant {
            return tenant;
        }
        // Not by a name that was refused: it may be another's.
        self.tenant = self.connection.connected_host_nqn().map(|host| tenants.acquire(host));
        self.tenant.unwrap_or(OVERFLOW_TENANT)
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
        pool: &BufferPool,
        mut execute: impl FnMut(&mut Connection, &mut Vec<IoRequest>) -> ReceiveBudget,
        requests: &mut Vec<IoRequest>,
    ) -> Option<usize> {
        if !self.may_receive() {
            return None;
        }
        if let Some(received) = self.receive_in_place(now, sockets, pool, requests) {
            execute(&mut self.connection, requests);
            return received;
        }
        let kept = self.unconsumed.len() - self.unconsumed_from;
        if kept + buffer.len() / 4 > buffer.len() {
            // More than any PDU is pending and none of it was taken: only a stall does that.
            self.stalled = true;
            return None;
        }
        let end = buffer.len().min(kept + self.receive_quantum.bytes());
        match sockets.receive(self.socket, &mut buffer[kept..end]) {
            ReceiveStatus::WouldBlock => None,
            ReceiveStatus::Closed => {
                self.connection.peer_closed();
                Some(0)
            }
            ReceiveStatus::Bytes(count) => {
                buffer[..kept].copy_from_slice(&self.unconsumed[self.unconsumed_from..]);
                let bytes = &buffer[..kept + count];
                let consumed_bytes = self.feed(now, bytes, pool, execute, requests);
                self.unconsumed.clear();
                self.unconsumed_from = 0;
                self.unconsumed.extend_from_slice(&bytes[consumed_bytes..]);
                Some(if self.stalled { consumed_bytes } else { count })
            }
        }
    }

    /// Has the machine take bytes from their head, and gives how many it took.
    fn feed(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        mut execute: impl FnMut(&mut Connection, &mut Vec<IoRequest>) -> ReceiveBudget,
        requests: &mut Vec<IoRequest>,
    ) -> usize {
        let first =
            (self.receive_quantum.bytes() / SLICE_FIRST_DIVISOR).clamp(RECEIVE_BYTES_MIN, SLICE_BYTES_FIRST);
        let (mut consumed_bytes, mut slice) = (0, first);
        while consumed_bytes < bytes.len() {
            let end = (consumed_bytes + slice).min(bytes.len());
            let consumed = self.connection.receive(now, &bytes[consumed_bytes..end], pool, requests);
            consumed_bytes += consumed.consumed_bytes;
            let in_flight_before = self.connection.in_flight();
            let budget = execute(&mut self.connection, requests);
            // What waited for an answer need not where one has come.
            let has_completed = self.connection.in_flight() < in_flight_before;
            self.stalled = consumed.stalled.is_some() && !has_completed;
            // What is left is offered again when there is time and room.
            self.stalled |= budget == ReceiveBudget::Exhausted
                && consumed_bytes < bytes.len()
                && consumed.consumed_bytes > 0;
            if self.stalled {
                break;
            }
            match (consumed.consumed_bytes, end == bytes.len()) {
                _ if consumed.stalled.is_some() => {}
                // The front of a PDU that ends behind this slice, or that has not come whole.
                (0, false) => slice *= 2,
                (_, true) => break,
                _ if budget == ReceiveBudget::Low => {}
                _ => slice = (slice * 2).min(SLICE_BYTES_MAX),
            }
        }
        consumed_bytes
    }

    /// Where much of a large value is still to come, receives it straight into the record that the device
    /// will write. `None` where that is not so.
    fn receive_in_place(
        &mut self,
        now: Nanos,
        sockets: &mut impl Sockets,
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> Option<Option<usize>> {
        if !self.unconsumed.is_empty() {
            return None;
        }
        let buffer = self.connection.payload_buffer().filter(|place| place.len() >= IN_PLACE_BYTES_MIN)?;
        let bytes = buffer.len().min(self.receive_quantum.bytes().max(IN_PLACE_BYTES_MIN));
        Some(match sockets.receive(self.socket, &mut buffer[..bytes]) {
            ReceiveStatus::WouldBlock => None,
            ReceiveStatus::Closed => {
                self.connection.peer_closed();
                Some(0)
            }
            ReceiveStatus::Bytes(count) => {
                self.connection.payload_received(now, count, pool, requests);
                Some(count)
            }
        })
    }

    /// Offers a stalled machine its pending bytes again. Gives how many it took.
    pub fn resume(&mut self, now: Nanos, pool: &BufferPool, requests: &mut Vec<IoRequest>) -> usize {
        if self.connection.is_closed() {
            self.stalled = false;
        }
        if !self.stalled {
            return 0;
        }
        let rest = &self.unconsumed[self.unconsumed_from..];
        // As much as of bytes that have just come: other connections have their turn, too.
        let mut slice = rest.len().min(SLICE_BYTES_MAX).min(self.receive_quantum.bytes());
        let mut consumed = self.connection.receive(now, &rest[..slice], pool, requests);
        while consumed.consumed_bytes == 0 && consumed.stalled.is_none() && slice < rest.len() {
            // The front of a PDU that ends behind this slice.
            slice = (slice * 2).min(rest.len());
            consumed = self.connection.receive(now, &rest[..slice], pool, requests);
        }
        self.unconsumed_from += consumed.consumed_bytes;
        let left = self.unconsumed.len() - self.unconsumed_from;
        self.stalled = consumed.stalled.is_some() || (consumed.consumed_bytes > 0 && left > 0);
        if left == 0 || self.unconsumed_from >= left {
            self.unconsumed.drain(..self.unconsumed_from);
            self.unconsumed_from = 0;
        }
        if self.unconsumed.is_empty() && self.unconsumed.capacity() > PENDING_RETAIN_BYTES {
            self.unconsumed = Vec::new();
        }
        consumed.consumed_bytes
    }

    /// Gives up on a host that does not take the last bytes of a connection that has ended. True when it did.
    pub fn close_if_timed_out(&mut self, now: Nanos) -> bool {
        if self.socket_closed || !self.connection.is_closed() || self.connection.send_buffer().is_empty() {
            return false;
        }
        let ended_at = *self.ended_at.get_or_insert(now);
        if now.since(ended_at) < CLOSE_TIMEOUT {
            return false;
        }
        self.connection.peer_closed();
        true
    }

    /// Sends what waits, at most a quantum, as much as the socket takes in one go. Gives how many bytes it took, 0
    /// when the connection is broken; `None` when there was nothing to send, or no room.
    pub fn send(&mut self, sockets: &mut impl Sockets, slices: &mut Vec<IoSlice<'static>>) -> Option<usize> {
        if self.socket_closed || self.connection.send_buffer().is_empty() {
            return None;
        }
        let mut gathered = reuse_allocation(std::mem::take(slices));
        self.connection.send_buffer().slices(&mut gathered, self.send_quantum.bytes());
        let sent = sockets.send(self.socket, &gathered);
        *slices = reuse_allocation(gathered);
        match sent {
            SendStatus::WouldBlock => None,
            SendStatus::Bytes(count) => {
                self.connection.send_buffer().advance(count);
                Some(count)
            }
            SendStatus::Closed => {
                self.connection.peer_closed();
                Some(0)
            }
        }
    }
}

/// The same allocation, empty, for slices of another lifetime.
fn reuse_allocation<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
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
        let reused: Vec<IoSlice<'static>> = reuse_allocation(slices);
        assert_eq!((reused.as_ptr() as usize, reused.capacity(), reused.len()), (start, 100, 0));
    }
}
