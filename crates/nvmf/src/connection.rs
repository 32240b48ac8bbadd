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

mod admin_handler;
mod command_handler;
mod pdu_receive;
mod state;
mod transfers;

pub use state::{CloseReason, Connection, ReceiveResult, StallReason};

use crate::command_plan::InFlight;
use crate::command_slots::{CommandSlots, SlotState};
use crate::controller::ControllerState;
use crate::counters::CounterSet;
use crate::io_commands;
use crate::io_request::{IoRequest, RequestOutcome};
use crate::pdu_send::PduWriter;
use crate::send_buffer::SendBuffer;
use crate::subsystem::Target;
use octokv_base::{BufferPool, Nanos};
use octokv_wire::Status;
use state::{ConnectionState, DataDigest, ReceiveState, is_negative_result};
use std::net::SocketAddr;
use std::sync::Arc;

/// How often a live connection looks at its controller when nothing comes.
const CONTROLLER_CHECK_INTERVAL: Nanos = Nanos::from_millis(500);
/// How often a connection whose transfers wait for buffers looks for some.
const BUFFER_RETRY_INTERVAL: Nanos = Nanos::from_millis(1);
/// Signs of life are passed on at most this often.
const ACTIVITY_RECORD_INTERVAL: Nanos = Nanos::from_millis(5);

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

    /// The host's address.
    pub fn peer_address(&self) -> SocketAddr {
        self.peer_address
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
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.flush_counters();
        self.target.unregister_connection();
    }
}
