//! One TCP connection, from its first byte to its last.
//!
//! In: bytes from the head of a linear receive buffer, outcomes of requests, the time. Out: requests,
//! and bytes in the [`SendBuffer`]. What PDUs do is in `intake`, what commands do in
//! `commands`.
//!
//! ```text
//!  AwaitIcReq ──ICReq──▶ AwaitConnect ──Connect, queue 0──▶ Admin      (I/O controller)
//!      │                   │ │ │                       └──▶ Discovery  (discovery controller)
//!      │                   │ │ └──Connect, queue n──▶ Io
//!      │                   │ │                         │
//!      │ error             │ │ error                   │ error, Disconnect
//!      ▼                   ▼ │                         ▼
//!  Terminating ◀───────────┴─┼─────────────────────── (Admin, Discovery, Io)
//!      │ reply sent and a second passed               │ controller over or reset, host silent,
//!      ▼                     ▼ too slow               ▼ H2CTermReq, socket closed
//!    Closed ◀────────────────┴────────────────────────┘
//! ```
//! Invariants: the state changes only by `set_state`, which lets the controller go where
//! the connection leaves it; every request that went out is completed exactly once, whatever the state;
//! the memory held is bounded: slots by the queue's size, buffers by `receive_bytes_max`, replies by
//! `outbox_bytes_max` plus what is at the engine. Tested in `tests/` of this room.

use crate::command_handler::is_negative_result;
use crate::command_slots::{CommandSlots, InFlight, SlotState};
use crate::controller::{Controller, ControllerState};
use crate::counters::CounterSet;
use crate::io_commands;
use crate::io_request::{IoRequest, RequestOutcome};
use crate::namespaces::NamespaceSnapshot;
use crate::pdu_receive::{DataDigest, ReceiveState};
use crate::pdu_send::PduWriter;
use crate::send_buffer::SendBuffer;
use crate::subsystem::Target;
use octokv_base::{BufferPool, Nanos};
use octokv_wire::pdu::{Role, TermReq};
use octokv_wire::{PduError, Status};
use std::net::SocketAddr;
use std::sync::Arc;

/// How long a connection that we end stays open, so that the host can read why.
const TERMINATION_LINGER: Nanos = Nanos::from_secs(1);
/// How often a live connection looks at its controller when nothing comes.
const CONTROLLER_CHECK_INTERVAL: Nanos = Nanos::from_millis(500);
/// How often a connection whose transfers wait for buffers looks for some.
const BUFFER_RETRY_INTERVAL: Nanos = Nanos::from_millis(1);
/// How long the data of a transfer may stop coming before the connection is given up: its buffers are wanted.
const TRANSFER_IDLE_TIMEOUT: Nanos = Nanos::from_secs(30);
/// And how slowly it may come in all, beyond that, in bytes a second.
const TRANSFER_BYTES_PER_SECOND_MIN: u64 = 256 << 10;
/// Signs of life are passed on at most this often.
const ACTIVITY_RECORD_INTERVAL: Nanos = Nanos::from_millis(5);

/// What [`Connection::receive`] did with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveResult {
    /// How many bytes of the head were taken; the caller keeps the rest and gives it again.
    pub consumed_bytes: usize,
    /// Why a complete command waits although its bytes are here. While this is set, call `receive` with
    /// the same bytes again each turn, and receive no more from the socket.
    pub stalled: Option<StallReason>,
}

/// What a connection waits for before it takes more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallReason {
    /// A slot: as many commands as the queue holds are being worked on.
    Slots,
    /// A buffer of the pool.
    Buffers,
    /// The host, which does not read its replies.
    SendBuffer,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The host sent what must not be.
    PduError(PduError),
    /// The host said that we sent what must not be.
    HostTerminated(TermReq),
    /// The host disconnected the queue.
    Disconnected,
    /// The host did not finish its Connect in time.
    HandshakeTimeout,
    /// The host was silent for longer than its keep-alive time.
    KeepAliveExpired,
    /// The host announced data and did not send them.
    TransferTimeout,
    /// The controller was reset or has ended.
    ControllerEnded,
    /// The socket was closed or broke.
    PeerClosed,
    /// There are too many connections.
    ConnectionLimit,
}

/// Where a connection stands.
#[derive(Clone, Debug)]
pub(crate) enum ConnectionState {
    AwaitIcReq { deadline: Nanos },
    AwaitConnect { deadline: Nanos },
    Admin(Arc<Controller>),
    Discovery(Arc<Controller>),
    Io(IoQueue),
    Terminating { deadline: Nanos },
    Closed,
}

/// An I/O queue: its controller, and the generation of it that the queue belongs to.
#[derive(Clone, Debug)]
pub(crate) struct IoQueue {
    pub controller: Arc<Controller>,
    pub id: u16,
    pub generation: u32,
    /// Whether the host turned all command sets on.
    pub all_command_sets: bool,
}

impl ConnectionState {
    /// Whether the drawing has an arrow from this to `next`.
    fn can_transition_to(&self, next: &ConnectionState) -> bool {
        use ConnectionState::*;
        match self {
            AwaitIcReq { .. } => matches!(next, AwaitConnect { .. } | Terminating { .. } | Closed),
            AwaitConnect { .. } => {
                matches!(next, Admin(_) | Discovery(_) | Io(_) | Terminating { .. } | Closed)
            }
            Admin(_) | Discovery(_) | Io(_) => matches!(next, Terminating { .. } | Closed),
            Terminating { .. } => matches!(next, Closed),
            Closed => false,
        }
    }

    pub fn controller(&self) -> Option<&Arc<Controller>> {
        match self {
            ConnectionState::Admin(controller) | ConnectionState::Discovery(controller) => Some(controller),
            ConnectionState::Io(queue) => Some(&queue.controller),
            ConnectionState::AwaitIcReq { .. }
            | ConnectionState::AwaitConnect { .. }
            | ConnectionState::Terminating { .. }
            | ConnectionState::Closed => None,
        }
    }
}

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    pub(crate) target: Arc<Target>,
    /// The namespaces as last looked at.
    pub(crate) namespaces: Arc<NamespaceSnapshot>,
    pub(crate) local_address: SocketAddr,
    peer_address: SocketAddr,
    state: ConnectionState,
    pub(crate) receive_state: ReceiveState,
    pub(crate) data_digest: DataDigest,
    pub(crate) pdu_writer: PduWriter,
    pub(crate) slots: CommandSlots,
    pub(crate) counters: CounterSet,
    /// Where pages of admin commands are made.
    pub(crate) page_buffer: Vec<u8>,
    close_reason: Option<CloseReason>,
    host_nqn: Option<String>,
    /// How the last Connect was refused.
    pub(crate) connect_error: Option<Status>,
    /// Within the bound of connections.
    pub(crate) within_connection_limit: bool,
    /// The pool, while transfers wait for buffers of it.
    pub(crate) buffer_wait_pool: Option<BufferPool>,
    pub(crate) last_tick_at: Nanos,
    last_activity_at: Nanos,
}

impl Connection {
    /// A connection that was just accepted on `local` from `peer`.
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
            last_tick_at: now,
            last_activity_at: now,
        }
    }

    /// Takes bytes from the head of what the host sent. What must be asked of the engine is appended to
    /// `requests`; each of them must come back by [`Connection::complete`].
    pub fn receive(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveResult {
        self.check_controller();
        let result = self.receive_pdus(now, bytes, pool, requests);
        // Bytes that are offered again because nothing was taken of them are no sign of life.
        if result.consumed_bytes > 0 {
            self.record_activity(now);
        }
        result
    }

    /// Where the bytes that come next belong, while a value is on its way: a socket may be read straight
    /// into it, provided that every byte received before was given to [`Connection::receive`] and taken.
    /// Then tell by [`Connection::landed`] how many came. Worth it for large values.
    pub fn payload_buffer(&mut self) -> Option<&mut [u8]> {
        self.current_payload_buffer()
    }

    /// `count` bytes were received into [`Connection::landing`].
    ///
    /// # Panics
    /// When the landing had no room for so many.
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

    /// Ends a request of `slot`: its completion, with data where there is some, goes to the outbox.
    ///
    /// # Panics
    /// When no request of that slot is out, or the outcome is not one of its operation.
    pub fn complete(&mut self, _now: Nanos, slot: u32, outcome: RequestOutcome) {
        if !self.slots.finish_one(slot as u16) {
            self.record_flush_result(&outcome);
            return;
        }
        let namespace = self.slots.namespace(slot as u16);
        let (command_id, phase) = self.slots.release(slot as u16);
        let SlotState::InFlight(in_flight) = phase else {
            unreachable!("slot {slot} was completed and is {phase:?}");
        };
        if let InFlight::ShutDown { cc_before, cc_written, .. } = in_flight {
            self.record_flush_result(&outcome);
            self.end_shutdown(command_id, cc_before, cc_written);
            return;
        }
        let ConnectionState::Io(queue) = &self.state else {
            return; // The connection ended meanwhile: nobody waits for the answer.
        };
        if matches!(outcome, RequestOutcome::Unrecovered | RequestOutcome::WriteFault) {
            self.counters.media_errors += 1;
        }
        let delete_missing_is_error = |id| queue.controller.delete_missing_is_error(id);
        let result = io_commands::command_result(in_flight, outcome, delete_missing_is_error);
        let lba = match in_flight {
            InFlight::Blocks(op) => Some(op.lba()),
            _ => None,
        };
        if let Some((buffer, from, to)) = result.data {
            let sent = if lba.is_some() {
                &mut self.counters.read_bytes
            } else {
                &mut self.counters.retrieved_bytes
            };
            *sent += (to - from) as u64;
            self.pdu_writer.write_data_buffer(command_id, buffer, from, to);
        }
        if !result.status.is_success() && !is_negative_result(result.status) {
            self.record_failure(command_id, namespace, lba, result.status);
        }
        self.respond(command_id, result.status, result.dw0, 0);
        self.grant_waiting_transfers();
    }

    /// Lets time pass: limits, notices, buffers that came free, and what other cores did to the controller.
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

    /// Whether data that was asked for does not come, or so slowly that its buffers are held for nothing: a host that
    /// sends a byte now and then, or other commands, holds them no longer than one that sends nothing. What was asked for
    /// before has its time, too: it is over when the last data comes, and was in its way.
    fn has_late_transfer(&self, now: Nanos) -> bool {
        let (is_silent, bytes) =
            (now.since(self.last_activity_at) >= TRANSFER_IDLE_TIMEOUT, self.slots.receiving_bytes());
        self.slots.open_transfers().any(|transfer| {
            let bytes = transfer.open_bytes.max(bytes) as u64;
            let whole =
                TRANSFER_IDLE_TIMEOUT + Nanos::from_millis(bytes * 1000 / TRANSFER_BYTES_PER_SECOND_MIN);
            is_silent || now.since(transfer.requested_at) >= whole
        })
    }

    /// When [`Connection::tick`] must be called at the latest.
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

    /// The socket was closed by the host, or broke: nothing more will come or can be sent.
    pub fn peer_closed(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.pdu_writer.send_buffer.clear();
    }

    /// What is to be sent.
    pub fn send_buffer(&mut self) -> &mut SendBuffer {
        &mut self.pdu_writer.send_buffer
    }

    /// Whether the socket is to be closed once the outbox is empty. Requests may still be out then.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, ConnectionState::Closed)
    }

    /// Why the connection ended, once it is ending.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.close_reason
    }

    /// How many requests are out.
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// What the host calls itself, once it has been let in under that name.
    pub fn connected_host_nqn(&self) -> Option<&str> {
        self.state().controller().and(self.host_nqn())
    }

    /// What the host calls itself, once it has tried to connect.
    pub fn host_nqn(&self) -> Option<&str> {
        self.host_nqn.as_deref()
    }

    /// What its last Connect was refused with, where it was.
    pub fn connect_error(&self) -> Option<Status> {
        self.connect_error
    }

    /// Keeps what the host calls itself, connected or not.
    pub(crate) fn set_host_nqn(&mut self, nqn: &str) {
        if self.host_nqn.as_deref() != Some(nqn) {
            self.host_nqn = Some(nqn.to_owned());
        }
    }

    /// The host's address.
    pub fn peer_address(&self) -> SocketAddr {
        self.peer_address
    }

    pub(crate) fn state(&self) -> &ConnectionState {
        &self.state
    }

    /// The one door through which the state changes.
    pub(crate) fn set_state(&mut self, next: ConnectionState) {
        assert!(self.state.can_transition_to(&next), "{:?} -> {next:?}", self.state);
        self.flush_counters();
        if let Some(controller) = next.controller() {
            let nqn = controller.host.nqn.clone();
            self.connect_error = None;
            self.set_host_nqn(&nqn);
        }
        match std::mem::replace(&mut self.state, next) {
            ConnectionState::Admin(controller) | ConnectionState::Discovery(controller) => {
                controller.terminate(ControllerState::Disconnected);
                self.target.unregister_controller(&controller);
            }
            ConnectionState::Io(queue) => queue.controller.disconnect_queue(queue.id, queue.generation),
            ConnectionState::AwaitIcReq { .. }
            | ConnectionState::AwaitConnect { .. }
            | ConnectionState::Terminating { .. }
            | ConnectionState::Closed => {}
        }
        if matches!(self.state, ConnectionState::Terminating { .. } | ConnectionState::Closed) {
            self.receive_state = ReceiveState::Head;
            self.buffer_wait_pool = None;
            self.slots.release_all_but_in_flight();
        }
    }

    /// Ends the connection at once. What is in the outbox may still be sent.
    pub(crate) fn close(&mut self, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        if !self.is_closed() {
            self.set_state(ConnectionState::Closed);
        }
    }

    /// Ends the connection because of what the host sent, and says so; `quoted` is where the bad PDU
    /// begins.
    pub(crate) fn terminate(&mut self, now: Nanos, error: PduError, rejected_pdu: &[u8]) {
        self.counters.transport_faults += 1;
        let request = TermReq::for_error(&error);
        self.pdu_writer.send_buffer.append(|out| request.encode(Role::Controller, rejected_pdu, out));
        self.close_after_drain(now, CloseReason::PduError(error));
    }

    /// Ends the connection once the host has had time to read what is in the outbox.
    pub(crate) fn close_after_drain(&mut self, now: Nanos, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        self.set_state(ConnectionState::Terminating { deadline: now + TERMINATION_LINGER });
    }

    /// Looks at what became of the controller, perhaps by another core.
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

    fn flush_counters(&mut self) {
        let mut counters = self.counters;
        if let Some(controller) = self.state.controller() {
            controller.counters.add_and_reset(&mut counters);
        }
        self.target.counters.add_and_reset(&mut self.counters);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.flush_counters();
        self.target.unregister_connection();
    }
}
