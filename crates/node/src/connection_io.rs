//! I/O of one connection: moves bytes between its socket and its protocol state machine.
//!
//! In: bytes from the socket, through the core's receive buffer or, for a large value, directly into its record;
//! outcomes of requests. Out: requests, and responses in one gathered send. Holds: bytes received and not consumed
//! (part of a PDU, or everything while the state machine is stalled).
//!
//! Invariants: the state machine gets every byte once, in order; a stalled connection receives nothing more, so the
//! peer's TCP window closes.

use crate::loans::Loans;
use crate::tenants::{OVERFLOW_TENANT, TenantTable};
use crate::time_budget::{ByteQuantum, UsageHistory};
use octokv_base::{BufferPool, Nanos};
use octokv_nvmf::{Connection, DirectBackend, IoRequest};
use octokv_runtime::{ReceiveStatus, SendStatus, SocketId, Sockets};
use octokv_sched::TenantId;
use std::io::IoSlice;

/// Size of a core's receive buffer and most bytes per receive. Measured: a smaller one costs system calls.
pub const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Missing bytes of a value from which a separate receive is cheaper than a copy.
const IN_PLACE_BYTES_MIN: usize = 16 * 1024;

/// Most bytes parsed before their requests start: the buffers of a few commands stay in the core's L1 and L2 caches,
/// those of a whole receive would not.
const SLICE_BYTES_MAX: usize = 32 * 1024;
/// First slice of a receive; each next one doubles. Requests may run long, and the time is checked between slices.
const SLICE_BYTES_FIRST: usize = 2048;
/// Divisor of the quantum for the first slice, on a new connection or one with costly commands.
const SLICE_FIRST_DIVISOR: usize = 32;

/// Smallest receive, for connections with costly commands: one command without data.
const RECEIVE_BYTES_MIN: usize = 72;

/// Smallest and largest send quantum; a send of fewer bytes costs the same.
const SEND_BYTES_MIN: usize = 32 * 1024;
const SEND_BYTES_MAX: usize = 1 << 20;

/// Capacity that the buffer of unconsumed bytes keeps when it is empty.
const PENDING_RETAIN_BYTES: usize = 64 * 1024;

/// How long a host may take to receive the last bytes of a closed connection.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(1);

/// One connection of a core.
pub struct ConnectionIo {
    pub(crate) socket: SocketId,
    pub(crate) connection: Connection,
    /// Bytes of devices that its responses refer to.
    pub(crate) loans: Loans,
    /// Bytes received; those from `unconsumed_from` on are not consumed.
    unconsumed: Vec<u8>,
    /// Bytes at the head of `unconsumed` that are consumed: moving the rest each time would cost more than parsing
    /// it.
    unconsumed_from: usize,
    /// The state machine accepts no bytes until a request of its own completes.
    stalled: bool,
    /// When the connection was first seen closed with bytes left to send.
    ended_at: Option<Nanos>,
    /// The socket is closed; only requests in execution keep the connection.
    pub(crate) socket_closed: bool,
    /// Whether it is in the core's list of connections with bytes to send.
    pub(crate) in_send_list: bool,
    /// Most bytes per receive.
    pub(crate) receive_quantum: ByteQuantum,
    /// Most bytes per send.
    pub(crate) send_quantum: ByteQuantum,
    /// Recent use of iteration time.
    pub(crate) usage: UsageHistory,
    /// The tenant, from the first request on.
    pub(crate) tenant: Option<TenantId>,
}

/// Budget that remains for a connection's receive after some of its requests ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveBudget {
    /// Time remains.
    Ample,
    /// Time remains, but a slice twice as long may exceed the connection's share.
    Low,
    /// The connection has used its share of the iteration, or requests wait for workers.
    Exhausted,
}

impl ConnectionIo {
    /// A new connection.
    pub fn new(socket: SocketId, connection: Connection) -> ConnectionIo {
        ConnectionIo {
            socket,
            connection,
            loans: Loans::default(),
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

    /// The connection's tenant; [`OVERFLOW_TENANT`] before Connect.
    #[inline]
    pub fn resolve_tenant(&mut self, tenants: &TenantTable) -> TenantId {
        if let Some(tenant) = self.tenant {
            return tenant;
        }
        // Only an accepted name counts: a rejected one may be another host's.
        self.tenant = self.connection.connected_host_nqn().map(|host| tenants.acquire(host));
        self.tenant.unwrap_or(OVERFLOW_TENANT)
    }

    /// Whether it consumes no bytes until a request of its own completes.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Whether it may receive now.
    pub fn may_receive(&self) -> bool {
        !self.stalled && !self.socket_closed && !self.connection.is_closed()
    }

    /// Receives at most a quantum and feeds it to the state machine slice by slice. After each slice `execute` runs
    /// the parsed requests, completes those that have ended, and returns the remaining budget. Returns the bytes
    /// received (the bytes consumed if the connection stalled), 0 at the end of the stream, `None` if nothing was
    /// there.
    #[allow(clippy::too_many_arguments)] // The parts of one core, borrowed for one receive.
    pub fn receive(
        &mut self,
        now: Nanos,
        sockets: &mut impl Sockets,
        buffer: &mut [u8],
        pool: &BufferPool,
        direct: &mut impl DirectBackend,
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
            // More than any PDU is unconsumed: only a stall causes that.
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
                let consumed_bytes = self.feed(now, bytes, pool, direct, execute, requests);
                self.unconsumed.clear();
                self.unconsumed_from = 0;
                self.unconsumed.extend_from_slice(&bytes[consumed_bytes..]);
                Some(if self.stalled { consumed_bytes } else { count })
            }
        }
    }

    /// Feeds bytes to the state machine and returns how many it consumed.
    #[allow(clippy::too_many_arguments)] // As `receive`.
    fn feed(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        direct: &mut impl DirectBackend,
        mut execute: impl FnMut(&mut Connection, &mut Vec<IoRequest>) -> ReceiveBudget,
        requests: &mut Vec<IoRequest>,
    ) -> usize {
        let first =
            (self.receive_quantum.bytes() / SLICE_FIRST_DIVISOR).clamp(RECEIVE_BYTES_MIN, SLICE_BYTES_FIRST);
        let (mut consumed_bytes, mut slice) = (0, first);
        while consumed_bytes < bytes.len() {
            let end = (consumed_bytes + slice).min(bytes.len());
            let consumed =
                self.connection.receive_direct(now, &bytes[consumed_bytes..end], pool, requests, direct);
            consumed_bytes += consumed.consumed_bytes;
            let in_flight_before = self.connection.in_flight();
            let budget = execute(&mut self.connection, requests);
            // A completion may have freed the resource that the state machine waits for.
            let has_completed = self.connection.in_flight() < in_flight_before;
            self.stalled = consumed.stalled.is_some() && !has_completed;
            // The remaining bytes are passed again when the budget allows.
            self.stalled |= budget == ReceiveBudget::Exhausted
                && consumed_bytes < bytes.len()
                && consumed.consumed_bytes > 0;
            if self.stalled {
                break;
            }
            match (consumed.consumed_bytes, end == bytes.len()) {
                _ if consumed.stalled.is_some() => {}
                // The head of a PDU that ends behind this slice or is not complete.
                (0, false) => slice *= 2,
                (_, true) => break,
                _ if budget == ReceiveBudget::Low => {}
                _ => slice = (slice * 2).min(SLICE_BYTES_MAX),
            }
        }
        consumed_bytes
    }

    /// If much of a large value is missing, receives it directly into the record that the device will write; `None`
    /// otherwise.
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
        let buffer = self.connection.payload_buffer().filter(|buffer| buffer.len() >= IN_PLACE_BYTES_MIN)?;
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

    /// Feeds unconsumed bytes to a stalled connection and returns how many it consumed.
    pub fn resume(&mut self, now: Nanos, pool: &BufferPool, requests: &mut Vec<IoRequest>) -> usize {
        if self.connection.is_closed() {
            self.stalled = false;
        }
        if !self.stalled {
            return 0;
        }
        let rest = &self.unconsumed[self.unconsumed_from..];
        // At most as much as of newly received bytes, so that other connections get time.
        let mut slice = rest.len().min(SLICE_BYTES_MAX).min(self.receive_quantum.bytes());
        let mut consumed = self.connection.receive(now, &rest[..slice], pool, requests);
        while consumed.consumed_bytes == 0 && consumed.stalled.is_none() && slice < rest.len() {
            // The head of a PDU that ends behind this slice.
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

    /// Closes a connection whose host does not receive the last bytes within `CLOSE_TIMEOUT`. Returns whether it
    /// did.
    pub fn close_if_timed_out(&mut self, now: Nanos) -> bool {
        if self.socket_closed || !self.connection.is_closed() || self.connection.send_buffer().is_empty() {
            return false;
        }
        let ended_at = *self.ended_at.get_or_insert(now);
        if now.since(ended_at) < CLOSE_TIMEOUT {
            return false;
        }
        self.connection.peer_closed();
        self.loans.end_all();
        true
    }

    /// Ends the loans of a connection that has nothing left to send.
    pub fn end_unsendable_loans(&mut self) {
        if self.connection.send_buffer().is_empty() {
            self.loans.end_all();
        }
    }

    /// Sends at most a quantum, as much as the socket takes in one call; ends all loans if it takes less. Returns the bytes sent, 0 if
    /// the connection is broken or only loans ended; `None` if there was nothing to send or the socket buffer is full.
    pub fn send(&mut self, sockets: &mut impl Sockets, slices: &mut Vec<IoSlice<'static>>) -> Option<usize> {
        if self.socket_closed || self.connection.send_buffer().is_empty() {
            self.loans.end_all();
            return None;
        }
        let mut gathered = reuse_allocation(std::mem::take(slices));
        let (loans, send_buffer) = (&mut self.loans, self.connection.send_buffer());
        let bytes_max = self.send_quantum.bytes();
        let gathered_bytes = send_buffer.slices_with(|data| loans.resolve(data), &mut gathered, bytes_max);
        let sent = sockets.send(self.socket, &gathered);
        *slices = reuse_allocation(gathered);
        let (bytes, is_partial) = match sent {
            SendStatus::WouldBlock => (None, true),
            SendStatus::Bytes(count) if count == send_buffer.unsent_bytes() => {
                send_buffer.advance_to_end();
                loans.end_all();
                (Some(count), false)
            }
            SendStatus::Bytes(count) => {
                send_buffer.advance_with(count, |data| loans.release(data));
                (Some(count), count < gathered_bytes)
            }
            SendStatus::Closed => {
                self.connection.peer_closed();
                self.loans.end_all();
                (Some(0), false)
            }
        };
        if is_partial && !self.loans.is_empty() {
            self.loans.copy_unsent(&mut self.connection);
            // The copy took time, which is the connection's.
            return bytes.or(Some(0));
        }
        bytes
    }
}

/// Reuses the allocation for slices of another lifetime.
fn reuse_allocation<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!("the vector was cleared")).collect()
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
