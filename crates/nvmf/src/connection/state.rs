//! The fields and states of one connection, and the only functions that change its state.

use crate::command_slots::CommandSlots;
use crate::controller::{Controller, ControllerState};
use crate::counters::CounterSet;
use crate::error_log::ErrorLogEntry;
use crate::io_request::{IoRequest, RequestOperation};
use crate::namespace_directory::NamespaceSnapshot;
use crate::pdu_send::PduWriter;
use crate::subsystem::Target;
use octokv_base::{BufferPool, Crc32c, Lba, NamespaceId, Nanos};
use octokv_wire::pdu::{Role, TermReq};
use octokv_wire::{PduError, Sqe, Status};
use std::net::SocketAddr;
use std::sync::Arc;

/// How long a connection that we end stays open, so that the host can read why.
const TERMINATION_LINGER: Nanos = Nanos::from_secs(1);

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
pub(super) enum ConnectionState {
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
pub(super) struct IoQueue {
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

/// Where in a PDU the next byte is.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReceiveState {
    /// At its beginning.
    Head,
    /// In the data of an H2CData for this slot; `left` bytes of it are to come, a digest perhaps behind.
    Data { slot: u16, left: u32, has_digest: bool },
    /// At the digest behind that data, which must be this.
    Digest { slot: u16, computed: u32 },
}

/// The digest of the data of the H2CData under way, as far as it is here.
pub(super) struct DataDigest(pub(super) Crc32c);

impl DataDigest {
    pub fn new() -> DataDigest {
        DataDigest(Crc32c::new())
    }
}

impl std::fmt::Debug for DataDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DataDigest")
    }
}

/// A command's capsule behind its entry.
#[derive(Clone, Copy)]
pub(super) struct Capsule<'a> {
    /// The data in it.
    pub data: &'a [u8],
    /// The data's digest was wrong.
    pub has_bad_digest: bool,
}

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    pub(super) target: Arc<Target>,
    /// The namespaces as last looked at.
    pub(super) namespaces: Arc<NamespaceSnapshot>,
    pub(super) local_address: SocketAddr,
    pub(super) peer_address: SocketAddr,
    pub(super) state: ConnectionState,
    pub(super) receive_state: ReceiveState,
    pub(super) data_digest: DataDigest,
    pub(super) pdu_writer: PduWriter,
    pub(super) slots: CommandSlots,
    pub(super) counters: CounterSet,
    /// Where pages of admin commands are made.
    pub(super) page_buffer: Vec<u8>,
    pub(super) close_reason: Option<CloseReason>,
    pub(super) host_nqn: Option<String>,
    /// How the last Connect was refused.
    pub(super) connect_error: Option<Status>,
    /// Within the bound of connections.
    pub(super) within_connection_limit: bool,
    /// The pool, while transfers wait for buffers of it.
    pub(super) buffer_wait_pool: Option<BufferPool>,
    pub(super) last_tick_at: Nanos,
    pub(super) last_activity_at: Nanos,
}

impl Connection {
    pub(super) fn state(&self) -> &ConnectionState {
        &self.state
    }

    /// The one door through which the state changes.
    pub(super) fn set_state(&mut self, next: ConnectionState) {
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
    pub(super) fn close(&mut self, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        if !self.is_closed() {
            self.set_state(ConnectionState::Closed);
        }
    }

    /// Ends the connection because of what the host sent, and says so; `quoted` is where the bad PDU
    /// begins.
    pub(super) fn terminate(&mut self, now: Nanos, error: PduError, rejected_pdu: &[u8]) {
        self.counters.transport_faults += 1;
        let request = TermReq::for_error(&error);
        self.pdu_writer.send_buffer.append(|out| request.encode(Role::Controller, rejected_pdu, out));
        self.close_after_drain(now, CloseReason::PduError(error));
    }

    /// Ends the connection once the host has had time to read what is in the outbox.
    pub(super) fn close_after_drain(&mut self, now: Nanos, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        self.set_state(ConnectionState::Terminating { deadline: now + TERMINATION_LINGER });
    }

    /// Keeps what the host calls itself, connected or not.
    pub(super) fn set_host_nqn(&mut self, nqn: &str) {
        if self.host_nqn.as_deref() != Some(nqn) {
            self.host_nqn = Some(nqn.to_owned());
        }
    }

    pub(super) fn flush_counters(&mut self) {
        let mut counters = self.counters;
        if let Some(controller) = self.state.controller() {
            controller.counters.add_and_reset(&mut counters);
        }
        self.target.counters.add_and_reset(&mut self.counters);
    }

    #[inline]
    pub(super) fn push_request(
        &mut self,
        slot: u16,
        namespace: NamespaceId,
        operation: RequestOperation,
        requests: &mut Vec<IoRequest>,
    ) {
        self.counters.count_operation(&operation);
        self.slots.set_namespace(slot, namespace);
        requests.push(IoRequest { slot: u32::from(slot), namespace, operation });
    }

    /// Fails a command, and notes it in the error log.
    pub(super) fn fail_command(&mut self, sqe: &Sqe, status: Status) {
        self.record_failure(sqe.command_id(), sqe.namespace(), None, status);
        self.respond(sqe.command_id(), status, 0, 0);
    }

    /// Notes a command that failed in the error log.
    pub(super) fn record_failure(
        &self,
        command_id: u16,
        namespace: NamespaceId,
        lba: Option<Lba>,
        status: Status,
    ) {
        let queue_id = match self.state() {
            ConnectionState::Io(queue) => queue.id,
            _ => 0,
        };
        self.target.error_log.record(ErrorLogEntry { queue_id, command_id, nsid: namespace.0, lba, status });
    }

    /// A completion.
    #[inline]
    pub(super) fn respond(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        if !status.is_success() {
            let counter = if is_negative_result(status) {
                &mut self.counters.misses
            } else {
                &mut self.counters.errors
            };
            *counter += 1;
        }
        self.pdu_writer.write_completion(command_id, status, dw0, dw1);
    }
}

/// Whether a status that is no success is what the host asked for, and no error.
pub(super) fn is_negative_result(status: Status) -> bool {
    status.is(Status::KV_KEY_DOES_NOT_EXIST)
        || status.is(Status::KV_KEY_EXISTS)
        || status.is(Status::MEDIA_COMPARE_FAILURE)
}
