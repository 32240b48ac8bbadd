//! The fields and states of one connection, and the functions that change its state or complete a command.
//!
//! Lowest file of the connection: the other files of this folder import it, and it imports none of them.

use crate::command_slots::CommandSlots;
use crate::controller::{Controller, ControllerState};
use crate::counters::CounterSet;
use crate::error_log::ErrorLogEntry;
use crate::io_request::{IoRequest, RequestOperation};
use crate::iterator_turns::IteratorTurn;
use crate::namespace_directory::NamespaceSnapshot;
use crate::pdu_send::PduWriter;
use crate::subsystem::Target;
use crate::token_share::{ShareOwner, TokenCommand, TokenHold};
use octokv_base::{BufferPool, Crc32c, Lba, NamespaceId, Nanos};
use octokv_wire::pdu::{Role, TermReq};
use octokv_wire::{PduError, Sqe, Status};
use std::net::SocketAddr;
use std::sync::Arc;

/// How long a terminated connection stays open, so that the host can read the termination request.
const TERMINATION_LINGER: Nanos = Nanos::from_secs(1);

/// The result of [`Connection::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveResult {
    /// Bytes consumed from the head; the caller passes the remaining ones again.
    pub consumed_bytes: usize,
    /// The missing resource if a complete command could not be accepted. While it is set, call `receive`
    /// with the same bytes in each iteration and read no more from the socket.
    pub stalled: Option<StallReason>,
}

/// A resource that must become free before the connection accepts another command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallReason {
    /// A command slot: the queue is full.
    Slots,
    /// A buffer of the pool.
    Buffers,
    /// Space in the send buffer: the host does not read its responses.
    SendBuffer,
    /// The turn of a command on an iterator: others on it have not ended.
    IteratorTurn,
}

/// The reason why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The host violated the NVMe/TCP protocol; the target sent a C2HTermReq.
    PduError(PduError),
    /// The host reported a protocol error of the target with an H2CTermReq.
    HostTerminated(TermReq),
    /// The host sent a Disconnect command.
    Disconnected,
    /// Connect was not completed within `handshake_limit`.
    HandshakeTimeout,
    /// The host sent nothing for longer than its keep-alive time.
    KeepAliveExpired,
    /// Data that an R2T requested arrived too slowly or not at all.
    TransferTimeout,
    /// The controller was reset, shut down by access control, or has ended.
    ControllerEnded,
    /// The socket was closed or failed.
    PeerClosed,
}

/// The state of a connection; `connection.rs` draws the transitions.
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

/// An I/O queue and the controller generation that it was connected in.
#[derive(Clone, Debug)]
pub(super) struct IoQueue {
    pub controller: Arc<Controller>,
    pub id: u16,
    pub generation: u32,
    /// CC.CSS was 110b at Connect: Key Value namespaces are accessible.
    pub all_command_sets: bool,
}

impl ConnectionState {
    /// Whether the state diagram has a transition from this state to `next`.
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

/// The position of the next byte within a PDU.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReceiveState {
    /// At the first byte of a PDU.
    Head,
    /// In the data of an H2CData of this slot, with `left` bytes to come and then a digest if `has_digest`.
    Data { slot: u16, left: u32, has_digest: bool },
    /// At the data digest, which must equal `computed`.
    Digest { slot: u16, computed: u32 },
}

/// The running CRC-32C of the current H2CData's data.
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

/// The part of a command capsule that follows the SQE.
#[derive(Clone, Copy)]
pub(super) struct Capsule<'a> {
    /// The in-capsule data.
    pub data: &'a [u8],
    /// The data digest did not match.
    pub has_bad_digest: bool,
}

/// One TCP connection, which is one NVMe queue pair; see the state diagram in `connection.rs`.
#[derive(Debug)]
pub struct Connection {
    pub(super) target: Arc<Target>,
    /// The namespace snapshot as of the last I/O command.
    pub(super) namespaces: Arc<NamespaceSnapshot>,
    pub(super) local_address: SocketAddr,
    pub(super) peer_address: SocketAddr,
    pub(super) state: ConnectionState,
    pub(super) receive_state: ReceiveState,
    pub(super) data_digest: DataDigest,
    pub(super) pdu_writer: PduWriter,
    pub(super) slots: CommandSlots,
    pub(super) counters: CounterSet,
    /// Reused buffer for the pages of admin commands.
    pub(super) page_buffer: Vec<u8>,
    pub(super) close_reason: Option<CloseReason>,
    pub(super) host_nqn: Option<String>,
    /// The status of the last failed Connect.
    pub(super) connect_error: Option<Status>,
    /// False if the connection exceeds `connections_max`: its Connect fails with "controller busy".
    pub(super) within_connection_limit: bool,
    /// The pool to retry; set while a transfer waits for a buffer.
    pub(super) buffer_wait_pool: Option<BufferPool>,
    /// The turn of the command at the head of the bytes, which has not come yet.
    pub(super) waiting_turn: Option<IteratorTurn>,
    pub(super) last_tick_at: Nanos,
    pub(super) last_activity_at: Nanos,
}

impl Connection {
    pub(super) fn state(&self) -> &ConnectionState {
        &self.state
    }

    /// Changes the state and releases the controller or queue of the state before. All changes go through
    /// here.
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
            self.waiting_turn = None;
            self.slots.release_all_but_in_flight();
        }
    }

    /// Ends the connection at once. Bytes in the send buffer may still be sent.
    pub(super) fn close(&mut self, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        if !self.is_closed() {
            self.set_state(ConnectionState::Closed);
        }
    }

    /// Ends the connection with a C2HTermReq for a protocol error; `rejected_pdu` begins at the PDU in
    /// error.
    pub(super) fn terminate(&mut self, now: Nanos, error: PduError, rejected_pdu: &[u8]) {
        self.counters.transport_faults += 1;
        let request = TermReq::for_error(&error);
        self.pdu_writer.send_buffer.append(|out| request.encode(Role::Controller, rejected_pdu, out));
        self.close_after_drain(now, CloseReason::PduError(error));
    }

    /// Ends the connection after [`TERMINATION_LINGER`], so that the host can read the send buffer.
    pub(super) fn close_after_drain(&mut self, now: Nanos, reason: CloseReason) {
        self.close_reason.get_or_insert(reason);
        self.set_state(ConnectionState::Terminating { deadline: now + TERMINATION_LINGER });
    }

    /// Stores the host's NQN, connected or not.
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
        self.counters.count_operation((&operation).into());
        if let ConnectionState::Io(queue) = &self.state
            && let Some(owner) = queue.controller.share_owner()
        {
            self.hold_tokens(slot, owner, (namespace, &operation));
        }
        requests.push(IoRequest { slot, namespace, operation });
    }

    /// Keeps the cost of a command on the device of its key until its completion.
    #[cold]
    fn hold_tokens(
        &mut self,
        slot: u16,
        owner: ShareOwner,
        (namespace, operation): (NamespaceId, &RequestOperation),
    ) {
        let shares = self.namespaces.get(namespace).and_then(|info| info.tokens.as_ref());
        if let Some((shares, key)) = shares.zip(operation.key()) {
            let command = match operation {
                RequestOperation::Store { value_bytes, .. } => TokenCommand::Put(*value_bytes as usize),
                RequestOperation::Delete { .. } => TokenCommand::Delete,
                _ => TokenCommand::Get,
            };
            self.slots.set_hold(slot, shares.begin(owner, key.as_bytes(), command));
        }
    }

    /// Ends what a command holds: the tokens of its device for the host, in the bits of DW1.
    #[cold]
    pub(super) fn token_dw1(&self, hold: TokenHold) -> u32 {
        let ConnectionState::Io(queue) = &self.state else { return 0 };
        match queue.controller.share_owner() {
            Some(owner) => hold.end(owner.weight) << 16,
            None => 0,
        }
    }

    /// Completes a command with an error and records it in the error log.
    pub(super) fn fail_command(&mut self, sqe: &Sqe, status: Status) {
        // The command at the head may have waited for it.
        self.waiting_turn = None;
        self.record_failure(sqe.command_id(), sqe.namespace(), None, status);
        self.respond(sqe.command_id(), status, 0, 0);
    }

    /// Records a failed command in the error log.
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

    /// Appends a completion, and counts it if it is not a success.
    #[inline]
    pub(super) fn respond(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        if !status.is_success() {
            let counter = if is_negative_result(status) {
                &mut self.counters.negative_results
            } else {
                &mut self.counters.errors
            };
            *counter += 1;
        }
        self.pdu_writer.write_completion(command_id, status, dw0, dw1);
    }
}

/// Whether a status is an expected negative result (no such key, key exists, compare failure), not an
/// error.
pub(super) fn is_negative_result(status: Status) -> bool {
    status.is(Status::KV_KEY_DOES_NOT_EXIST)
        || status.is(Status::KV_KEY_EXISTS)
        || status.is(Status::MEDIA_COMPARE_FAILURE)
}
