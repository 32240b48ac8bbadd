//! One TCP connection, which is one NVMe queue pair, as a sans-I/O state machine: its public functions.
//!
//! In: bytes from the head of a linear receive buffer, outcomes of requests, the time. Out: requests, and
//! bytes in the [`SendBuffer`]. `pdu_receive` handles PDUs, `command_handler` commands; `state` holds the
//! fields.
//!
//! ```text
//!  AwaitIcReq ──ICReq──▶ AwaitConnect ──Connect, queue 0──▶ Admin      (I/O controller)
//!      │                   │ │ │                       └──▶ Discovery  (discovery controller)
//!      │                   │ │ └──Connect, queue n──▶ Io
//!      │                   │ │                         │
//!      │ PDU error         │ │ PDU error               │ PDU error, Disconnect
//!      ▼                   ▼ │                         ▼
//!  Terminating ◀───────────┴─┼─────────────────────── (Admin, Discovery, Io)
//!      │ TERMINATION_LINGER  │                        │ controller reset or ended, keep alive or
//!      ▼ has passed          ▼ handshake timeout      ▼ transfer timeout, H2CTermReq, socket closed
//!    Closed ◀────────────────┴────────────────────────┘
//! ```
//! Invariants: only `set_state` changes the state, and it releases the controller or queue that the
//! connection leaves; each request is completed exactly once, in any state; memory is bounded: slots by the
//! queue's size, buffers by `receive_bytes_max`, unsent responses by `send_buffer_bytes_max` plus the responses
//! of requests in flight. Tested in `tests/` of this crate.

mod admin_handler;
mod command_handler;
mod direct_path;
mod pdu_receive;
mod state;
mod transfers;

pub use state::{CloseReason, Connection, ReceiveResult, StallReason};

use crate::command_plan::{CommandResult, InFlight};
use crate::command_slots::CommandSlots;
use crate::controller::ControllerState;
use crate::counters::CounterSet;
use crate::direct::{DirectBackend, LongWay};
use crate::io_commands;
use crate::io_request::{IoRequest, RequestOutcome};
use crate::iterator_commands;
use crate::pdu_send::PduWriter;
use crate::subsystem::Target;
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_wire::Status;
use octokv_wire::send_buffer::{COPY_BYTES_MAX, SendBuffer};
use state::{ConnectionState, DataDigest, IoQueue, ReceiveState, is_negative_result};
use std::net::SocketAddr;
use std::sync::Arc;

/// The longest time between two checks of the controller's state by an idle connection.
const CONTROLLER_CHECK_INTERVAL: Nanos = Nanos::from_millis(500);
/// The longest time between two attempts to get buffers for waiting transfers.
const BUFFER_RETRY_INTERVAL: Nanos = Nanos::from_millis(1);
/// A connection updates its controller's activity time at most this often.
const ACTIVITY_RECORD_INTERVAL: Nanos = Nanos::from_millis(5);

impl Connection {
    /// Creates the state of a connection that was just accepted on `local_address` from `peer_address`.
    pub fn new(
        target: Arc<Target>,
        local_address: SocketAddr,
        peer_address: SocketAddr,
        now: Nanos,
    ) -> Connection {
        let within_connection_limit = target.register_connection();
        let deadline = now + target.config().handshake_limit;
        let namespaces = target.namespaces();
        Connection {
            target,
            namespaces,
            local_address,
            peer_address,
            state: ConnectionState::AwaitIcReq { deadline },
            receive_state: ReceiveState::Head,
            data_digest: DataDigest::new(),
            pdu_writer: PduWriter::new(),
            slots: CommandSlots::new(0),
            counters: CounterSet::default(),
            page_buffer: Vec::new(),
            close_reason: None,
            host_nqn: None,
            connect_error: None,
            within_connection_limit,
            buffer_wait_pool: None,
            waiting_turn: None,
            last_tick_at: now,
            last_activity_at: now,
        }
    }

    /// Consumes PDUs from the head of the received bytes and appends the requests to execute to `requests`.
    ///
    /// The caller executes each request and passes its outcome to [`Connection::complete`], also after the
    /// connection has closed. Bytes that are not consumed must be passed again, at the head of the next
    /// call.
    pub fn receive(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveResult {
        self.receive_direct(now, bytes, pool, requests, &mut LongWay)
    }

    /// As [`Connection::receive`], but commands that `direct` can execute at once are executed and completed within this call:
    /// they appear in `requests` only if they have to wait.
    pub fn receive_direct<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> ReceiveResult {
        self.check_controller();
        let result = self.receive_pdus(now, bytes, pool, requests, direct);
        // A retry of bytes that were not consumed is no activity of the host.
        if result.consumed_bytes > 0 {
            self.record_activity(now);
        }
        result
    }

    /// The buffer range that the next bytes of an H2CData belong to, or `None` outside of H2CData.
    ///
    /// A socket may be read straight into it, which saves a copy of large values.
    ///
    /// REQUIRES: all bytes received before were passed to [`Connection::receive`] and consumed. Report the
    /// count with [`Connection::payload_received`].
    pub fn payload_buffer(&mut self) -> Option<&mut [u8]> {
        self.current_payload_buffer()
    }

    /// Accounts for `count` bytes that were received into [`Connection::payload_buffer`].
    ///
    /// # Panics
    /// If no payload is expected, or `count` exceeds the length of the payload buffer.
    pub fn payload_received(
        &mut self,
        now: Nanos,
        count: usize,
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) {
        self.record_activity(now);
        self.advance_payload(count, pool, requests);
    }

    /// Completes one request of `slot`: appends its data, if any, and its completion to the send buffer.
    ///
    /// # Panics
    /// If the slot has no request in flight, or the outcome is not one of the request's operation.
    pub fn complete(&mut self, slot: u16, outcome: RequestOutcome) {
        let hold = self.slots.take_hold(slot);
        let Some((command_id, namespace, in_flight)) = self.slots.finish_one(slot) else {
            self.record_flush_result(&outcome);
            return;
        };
        if let InFlight::ShutDown { cc_before, cc_written, .. } = in_flight {
            self.record_flush_result(&outcome);
            self.end_shutdown(command_id, cc_before, cc_written);
            return;
        }
        let token_dw1 = hold.map_or(0, |hold| self.token_dw1(hold));
        self.complete_command((command_id, token_dw1), namespace, in_flight, outcome);
        self.grant_waiting_transfers();
    }

    /// Appends the data, if any, and the completion of a command.
    #[inline]
    fn complete_command(
        &mut self,
        (command_id, token_dw1): (u16, u32),
        namespace: NamespaceId,
        in_flight: InFlight,
        outcome: RequestOutcome,
    ) {
        let ConnectionState::Io(queue) = &self.state else {
            return; // The connection has ended: no completion is sent.
        };
        if let (InFlight::Retrieve { limit_bytes }, RequestOutcome::Value { buffer, offset, bytes }) =
            (in_flight, &outcome)
        {
            let sent = (*bytes).min(limit_bytes as usize);
            if sent > 0 && sent <= COPY_BYTES_MAX && !self.pdu_writer.params.data_digest {
                self.counters.count_sent_data(in_flight, sent);
                let dw0 = io_commands::data_dw0(in_flight, *bytes);
                let value = &buffer[*offset..*offset + sent];
                self.pdu_writer.write_short_data_and_success(command_id, value, dw0, token_dw1);
                return;
            }
        }
        if matches!(outcome, RequestOutcome::Unrecovered | RequestOutcome::WriteFault) {
            self.counters.media_errors += 1;
        }
        if in_flight.is_of_iterator() {
            let result = self.iterator_result(queue, namespace, in_flight, outcome);
            return self.send_result(command_id, namespace, in_flight, result);
        }
        let delete_missing_is_error = |id| queue.controller.delete_missing_is_error(id);
        let mut result = io_commands::command_result(in_flight, outcome, delete_missing_is_error);
        result.dw1 |= token_dw1;
        self.send_result(command_id, namespace, in_flight, result);
    }

    /// The result of a command over iterators. Keeps a new one.
    #[cold]
    fn iterator_result(
        &self,
        queue: &IoQueue,
        namespace: NamespaceId,
        in_flight: InFlight,
        outcome: RequestOutcome,
    ) -> CommandResult {
        let keep = |handle, namespace_serial| {
            let has_namespace = || {
                let snapshot = self.target.namespace_directory.snapshot();
                snapshot.entry(namespace).is_some_and(|entry| entry.serial == namespace_serial)
            };
            let limits = (self.target.config().iterators_max, self.last_tick_at);
            queue.controller.keep_iterator(handle, queue.generation, namespace, has_namespace, limits)
        };
        iterator_commands::command_result(in_flight, outcome, keep)
    }

    /// Appends the data, if any, and the completion of a command with this result.
    #[inline(always)] // The result is then no value.
    fn send_result(
        &mut self,
        command_id: u16,
        namespace: NamespaceId,
        in_flight: InFlight,
        result: CommandResult,
    ) {
        let lba = match in_flight {
            InFlight::Blocks(op) => Some(op.lba()),
            _ => None,
        };
        if let Some((buffer, from, to)) = result.data {
            self.counters.count_sent_data(in_flight, to - from);
            self.pdu_writer.write_data_buffer(command_id, buffer, from, to);
        }
        if !result.status.is_success() && !is_negative_result(result.status) {
            self.record_failure(command_id, namespace, lba, result.status);
        }
        self.respond(command_id, result.status, result.dw0, result.dw1);
    }

    /// Handles timeouts, asynchronous events, freed buffers and state changes of the controller by other
    /// cores.
    ///
    /// REQUIRES: called no later than [`Connection::next_deadline`].
    pub fn tick(&mut self, now: Nanos) {
        self.last_tick_at = now;
        self.check_controller();
        self.grant_waiting_transfers();
        match &self.state {
            ConnectionState::AwaitIcReq { deadline } | ConnectionState::AwaitConnect { deadline }
                if *deadline <= now =>
            {
                self.close(CloseReason::HandshakeTimeout);
            }
            ConnectionState::Terminating { deadline } if *deadline <= now => {
                self.set_state(ConnectionState::Closed)
            }
            ConnectionState::Admin(controller) | ConnectionState::Discovery(controller) => {
                let limit = self.target.config().discovery_idle_limit;
                if controller.keep_alive_deadline(limit) <= now {
                    controller.terminate(ControllerState::KeepAliveExpired);
                    self.counters.keep_alive_expired += 1;
                    self.close(CloseReason::KeepAliveExpired);
                } else {
                    controller.end_idle_iterators(now, self.target.config().iterator_idle_limit);
                    self.deliver_async_events();
                }
            }
            ConnectionState::Io(_) if self.has_late_transfer(now) => self.close(CloseReason::TransferTimeout),
            ConnectionState::AwaitIcReq { .. }
            | ConnectionState::AwaitConnect { .. }
            | ConnectionState::Io(_)
            | ConnectionState::Terminating { .. }
            | ConnectionState::Closed => {}
        }
        self.flush_counters();
    }

    /// The latest time for the next call of [`Connection::tick`].
    pub fn next_deadline(&self) -> Nanos {
        match &self.state {
            ConnectionState::AwaitIcReq { deadline }
            | ConnectionState::AwaitConnect { deadline }
            | ConnectionState::Terminating { deadline } => *deadline,
            ConnectionState::Admin(controller) | ConnectionState::Discovery(controller) => {
                let limit = self.target.config().discovery_idle_limit;
                controller.keep_alive_deadline(limit).min(self.last_tick_at + CONTROLLER_CHECK_INTERVAL)
            }
            ConnectionState::Io(_) if self.buffer_wait_pool.is_some() => {
                self.last_tick_at + BUFFER_RETRY_INTERVAL
            }
            ConnectionState::Io(_) => self.last_tick_at + CONTROLLER_CHECK_INTERVAL,
            ConnectionState::Closed => Nanos::NEVER,
        }
    }

    /// Ends the connection after its socket was closed or failed; discards unsent bytes.
    pub fn peer_closed(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.pdu_writer.send_buffer.clear();
    }

    /// The bytes to send.
    pub fn send_buffer(&mut self) -> &mut SendBuffer {
        &mut self.pdu_writer.send_buffer
    }

    /// Whether the socket must be closed once the send buffer is empty. Requests may still be in flight.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, ConnectionState::Closed)
    }

    /// The reason for closing; `None` while the connection is open.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// The number of commands that are in flight at the engine.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// The host's NQN, once its Connect has succeeded.
    pub fn connected_host_nqn(&self) -> Option<&str> {
        self.state().controller().and(self.host_nqn())
    }

    /// The host's NQN as its last Connect named it, whether or not that succeeded.
    pub fn host_nqn(&self) -> Option<&str> {
        self.host_nqn.as_deref()
    }

    /// The status of the last failed Connect; `None` after a successful one.
    pub fn connect_error(&self) -> Option<Status> {
        self.connect_error
    }

    /// The host's address and port.
    pub fn peer_address(&self) -> SocketAddr {
        self.peer_address
    }

    /// Closes the connection if its controller has ended or, for an I/O queue, was reset or left the ready
    /// states.
    fn check_controller(&mut self) {
        let is_over = match &self.state {
            ConnectionState::Io(queue) => {
                let epoch = queue.controller.epoch();
                !epoch.state.serves_io() || epoch.generation != queue.generation
            }
            ConnectionState::Admin(controller) | ConnectionState::Discovery(controller) => {
                controller.epoch().state.has_ended()
            }
            ConnectionState::AwaitIcReq { .. }
            | ConnectionState::AwaitConnect { .. }
            | ConnectionState::Terminating { .. }
            | ConnectionState::Closed => false,
        };
        if is_over {
            self.close(CloseReason::ControllerEnded);
        }
    }

    fn record_activity(&mut self, now: Nanos) {
        if now.since(self.last_activity_at) >= ACTIVITY_RECORD_INTERVAL {
            self.last_activity_at = now;
            if let Some(controller) = self.state.controller() {
                controller.record_activity(now);
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.flush_counters();
        self.target.unregister_connection();
    }
}
