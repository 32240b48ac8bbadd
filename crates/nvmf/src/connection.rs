//! One TCP connection, from its first byte to its last.
//!
//! In: bytes from the head of a linear receive buffer, outcomes of requests, the time. Out: requests,
//! and bytes in the [`Outbox`]. What PDUs do is in `intake`, what commands do in
//! `commands`.
//!
//! ```text
//!  AwaitIcReq ──ICReq──▶ AwaitConnect ──Connect, queue 0──▶ Admin      (I/O controller)
//!      │                   │ │ │                       └──▶ Discovery  (discovery controller)
//!      │                   │ │ └──Connect, queue n──▶ Io
//!      │                   │ │                         │
//!      │ fault             │ │ fault                   │ fault, Disconnect
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

use crate::command_handler::is_answer;
use crate::command_slots::{Phase, Running, Slots};
use crate::controller::{Condition, Controller};
use crate::counters::Counts;
use crate::io_commands;
use crate::io_request::{Outcome, Request};
use crate::namespaces::Namespaces;
use crate::pdu_receive::{DataDigest, Inflow};
use crate::pdu_send::Replies;
use crate::send_buffer::Outbox;
use crate::subsystem::Target;
use octokv_base::{Nanos, Pool};
use octokv_wire::pdu::{End, Terminate};
use octokv_wire::{Fault, Status};
use std::net::SocketAddr;
use std::sync::Arc;

/// How long a connection that we end stays open, so that the host can read why.
const LINGER: Nanos = Nanos::from_secs(1);
/// How often a live connection looks at its controller when nothing comes.
const WATCH: Nanos = Nanos::from_millis(500);
/// How often a connection whose transfers wait for buffers looks for some.
const BUFFER_WATCH: Nanos = Nanos::from_millis(1);
/// How long the data of a transfer may stop coming before the connection is given up: its buffers are wanted.
const TRANSFER_LIMIT: Nanos = Nanos::from_secs(30);
/// And how slowly it may come in all, beyond that, in bytes a second.
const TRANSFER_BYTES_S_MIN: u64 = 256 << 10;
/// Signs of life are passed on at most this often.
const SIGN_SPACING: Nanos = Nanos::from_millis(5);

/// What [`Connection::receive`] did with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumed {
    /// How many bytes of the head were taken; the caller keeps the rest and gives it again.
    pub bytes: usize,
    /// Why a complete command waits although its bytes are here. While this is set, call `receive` with
    /// the same bytes again each turn, and receive no more from the socket.
    pub stalled: Option<Stall>,
}

/// What a connection waits for before it takes more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// A slot: as many commands as the queue holds are being worked on.
    Slots,
    /// A buffer of the pool.
    Buffers,
    /// The host, which does not read its replies.
    Outbox,
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The host sent what must not be.
    Fault(Fault),
    /// The host said that we sent what must not be.
    HostTerminated(Terminate),
    /// The host disconnected the queue.
    Disconnected,
    /// The host did not finish its Connect in time.
    Handshake,
    /// The host was silent for longer than its keep-alive time.
    KeepAlive,
    /// The host announced data and did not send them.
    Transfer,
    /// The controller was reset or has ended.
    ControllerEnded,
    /// The socket was closed or broke.
    PeerClosed,
    /// There are too many connections.
    NoRoom,
}

/// Where a connection stands.
#[derive(Clone, Debug)]
pub(crate) enum State {
    AwaitIcReq { until: Nanos },
    AwaitConnect { until: Nanos },
    Admin(Arc<Controller>),
    Discovery(Arc<Controller>),
    Io(IoQueue),
    Terminating { until: Nanos },
    Closed,
}

/// An I/O queue: its controller, and the generation of it that the queue belongs to.
#[derive(Clone, Debug)]
pub(crate) struct IoQueue {
    pub controller: Arc<Controller>,
    pub id: u16,
    pub generation: u32,
    /// Whether the host turned all command sets on.
    pub all_sets: bool,
}

impl State {
    /// Whether the drawing has an arrow from this to `next`.
    fn may_become(&self, next: &State) -> bool {
        use State::*;
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
            State::Admin(controller) | State::Discovery(controller) => Some(controller),
            State::Io(queue) => Some(&queue.controller),
            State::AwaitIcReq { .. }
            | State::AwaitConnect { .. }
            | State::Terminating { .. }
            | State::Closed => None,
        }
    }
}

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    pub(crate) target: Arc<Target>,
    /// The namespaces as last looked at.
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) local: SocketAddr,
    peer: SocketAddr,
    state: State,
    pub(crate) inflow: Inflow,
    pub(crate) data_digest: DataDigest,
    pub(crate) replies: Replies,
    pub(crate) slots: Slots,
    pub(crate) counts: Counts,
    /// Where pages of admin commands are made.
    pub(crate) page: Vec<u8>,
    closing: Option<Closing>,
    host_nqn: Option<String>,
    /// How the last Connect was refused.
    pub(crate) refused: Option<Status>,
    /// Within the bound of connections.
    pub(crate) has_room: bool,
    /// The pool, while transfers wait for buffers of it.
    pub(crate) wanted_pool: Option<Pool>,
    pub(crate) ticked: Nanos,
    signed: Nanos,
}

impl Connection {
    /// A connection that was just accepted on `local` from `peer`.
    pub fn new(target: Arc<Target>, local: SocketAddr, peer: SocketAddr, now: Nanos) -> Connection {
        let has_room = target.connection_opened();
        let until = now + target.settings().handshake_limit;
        let namespaces = target.namespaces();
        Connection {
            target,
            namespaces,
            local,
            peer,
            state: State::AwaitIcReq { until },
            inflow: Inflow::Head,
            data_digest: DataDigest::new(),
            replies: Replies::new(),
            slots: Slots::new(0),
            counts: Counts::default(),
            page: Vec::new(),
            closing: None,
            host_nqn: None,
            refused: None,
            has_room,
            wanted_pool: None,
            ticked: now,
            signed: now,
        }
    }

    /// Takes bytes from the head of what the host sent. What must be asked of the engine is appended to
    /// `requests`; each of them must come back by [`Connection::complete`].
    pub fn receive(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Consumed {
        self.watch();
        let consumed = self.take_in(now, bytes, pool, requests);
        // Bytes that are offered again because nothing was taken of them are no sign of life.
        if consumed.bytes > 0 {
            self.note_sign(now);
        }
        consumed
    }

    /// Where the bytes that come next belong, while a value is on its way: a socket may be read straight
    /// into it, provided that every byte received before was given to [`Connection::receive`] and taken.
    /// Then tell by [`Connection::landed`] how many came. Worth it for large values.
    pub fn landing(&mut self) -> Option<&mut [u8]> {
        self.landing_place()
    }

    /// `count` bytes were received into [`Connection::landing`].
    ///
    /// # Panics
    /// When the landing had no room for so many.
    pub fn landed(&mut self, now: Nanos, count: usize, pool: &Pool, requests: &mut Vec<Request>) {
        self.note_sign(now);
        self.take_landed(count, pool, requests);
    }

    /// Ends a request of `slot`: its completion, with data where there is some, goes to the outbox.
    ///
    /// # Panics
    /// When no request of that slot is out, or the outcome is not one of its operation.
    pub fn complete(&mut self, _now: Nanos, slot: u32, outcome: Outcome) {
        if !self.slots.count_down(slot as u16) {
            self.note_flush(&outcome);
            return;
        }
        let namespace = self.slots.namespace(slot as u16);
        let (command_id, phase) = self.slots.release(slot as u16);
        let Phase::Running(running) = phase else {
            unreachable!("slot {slot} was completed and is {phase:?}");
        };
        if let Running::ShutDown { before, written, .. } = running {
            self.note_flush(&outcome);
            self.end_shutdown(command_id, before, written);
            return;
        }
        let State::Io(queue) = &self.state else {
            return; // The connection ended meanwhile: nobody waits for the answer.
        };
        if matches!(outcome, Outcome::Unrecovered | Outcome::WriteFault) {
            self.counts.media_errors += 1;
        }
        let missing_fails = |id| queue.controller.missing_fails(id);
        let answer = io_commands::answer(running, outcome, missing_fails);
        let lba = match running {
            Running::Blocks(work) => Some(work.lba()),
            _ => None,
        };
        if let Some((buffer, from, to)) = answer.data {
            let sent =
                if lba.is_some() { &mut self.counts.read_bytes } else { &mut self.counts.retrieved_bytes };
            *sent += (to - from) as u64;
            self.replies.keep(command_id, buffer, from, to);
        }
        if !answer.status.is_success() && !is_answer(answer.status) {
            self.note_failure(command_id, namespace, lba, answer.status);
        }
        self.respond(command_id, answer.status, answer.dw0, 0);
        self.grant_waiting();
    }

    /// Lets time pass: limits, notices, buffers that came free, and what other cores did to the controller.
    pub fn tick(&mut self, now: Nanos) {
        self.ticked = now;
        self.watch();
        self.grant_waiting();
        match &self.state {
            State::AwaitIcReq { until } | State::AwaitConnect { until } if *until <= now => {
                self.close(Closing::Handshake);
            }
            State::Terminating { until } if *until <= now => self.set_state(State::Closed),
            State::Admin(controller) | State::Discovery(controller) => {
                let limit = self.target.settings().discovery_idle_limit;
                if controller.silence_deadline(limit) <= now {
                    controller.end(Condition::Expired);
                    self.counts.keep_alive_expired += 1;
                    self.close(Closing::KeepAlive);
                } else {
                    self.tell_events();
                }
            }
            State::Io(_) if self.transfer_is_late(now) => self.close(Closing::Transfer),
            State::AwaitIcReq { .. }
            | State::AwaitConnect { .. }
            | State::Io(_)
            | State::Terminating { .. }
            | State::Closed => {}
        }
        self.pass_counts();
    }

    /// Whether data that was asked for does not come, or so slowly that its buffers are held for nothing: a host that
    /// sends a byte now and then, or other commands, holds them no longer than one that sends nothing. What was asked for
    /// before has its time, too: it is over when the last data comes, and was in its way.
    fn transfer_is_late(&self, now: Nanos) -> bool {
        let (is_silent, bytes) = (now.since(self.signed) >= TRANSFER_LIMIT, self.slots.receiving_bytes());
        self.slots.open_transfers().any(|transfer| {
            let bytes = transfer.open.max(bytes) as u64;
            let whole = TRANSFER_LIMIT + Nanos::from_millis(bytes * 1000 / TRANSFER_BYTES_S_MIN);
            is_silent || now.since(transfer.asked) >= whole
        })
    }

    /// When [`Connection::tick`] must be called at the latest.
    pub fn next_deadline(&self) -> Nanos {
        match &self.state {
            State::AwaitIcReq { until } | State::AwaitConnect { until } | State::Terminating { until } => {
                *until
            }
            State::Admin(controller) | State::Discovery(controller) => {
                let limit = self.target.settings().discovery_idle_limit;
                controller.silence_deadline(limit).min(self.ticked + WATCH)
            }
            State::Io(_) if self.wanted_pool.is_some() => self.ticked + BUFFER_WATCH,
            State::Io(_) => self.ticked + WATCH,
            State::Closed => Nanos::NEVER,
        }
    }

    /// The socket was closed by the host, or broke: nothing more will come or can be sent.
    pub fn peer_closed(&mut self) {
        self.close(Closing::PeerClosed);
        self.replies.outbox.clear();
    }

    /// What is to be sent.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.replies.outbox
    }

    /// Whether the socket is to be closed once the outbox is empty. Requests may still be out then.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Why the connection ended, once it is ending.
    pub fn closing_reason(&self) -> Option<Closing> {
        self.closing
    }

    /// How many requests are out.
    pub fn in_flight(&self) -> usize {
        self.slots.running()
    }

    /// What the host calls itself, once it has been let in under that name.
    pub fn host(&self) -> Option<&str> {
        self.state().controller().and(self.host_nqn())
    }

    /// What the host calls itself, once it has tried to connect.
    pub fn host_nqn(&self) -> Option<&str> {
        self.host_nqn.as_deref()
    }

    /// What its last Connect was refused with, where it was.
    pub fn refused(&self) -> Option<Status> {
        self.refused
    }

    /// Keeps what the host calls itself, connected or not.
    pub(crate) fn name_host(&mut self, nqn: &str) {
        if self.host_nqn.as_deref() != Some(nqn) {
            self.host_nqn = Some(nqn.to_owned());
        }
    }

    /// The host's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// The one door through which the state changes.
    pub(crate) fn set_state(&mut self, next: State) {
        assert!(self.state.may_become(&next), "{:?} -> {next:?}", self.state);
        self.pass_counts();
        if let Some(controller) = next.controller() {
            let nqn = controller.host.nqn.clone();
            self.refused = None;
            self.name_host(&nqn);
        }
        match std::mem::replace(&mut self.state, next) {
            State::Admin(controller) | State::Discovery(controller) => {
                controller.end(Condition::Gone);
                self.target.forget(&controller);
            }
            State::Io(queue) => queue.controller.disconnect_queue(queue.id, queue.generation),
            State::AwaitIcReq { .. }
            | State::AwaitConnect { .. }
            | State::Terminating { .. }
            | State::Closed => {}
        }
        if matches!(self.state, State::Terminating { .. } | State::Closed) {
            self.inflow = Inflow::Head;
            self.wanted_pool = None;
            self.slots.drop_all_but_running();
        }
    }

    /// Ends the connection at once. What is in the outbox may still be sent.
    pub(crate) fn close(&mut self, why: Closing) {
        self.closing.get_or_insert(why);
        if !self.is_closed() {
            self.set_state(State::Closed);
        }
    }

    /// Ends the connection because of what the host sent, and says so; `quoted` is where the bad PDU
    /// begins.
    pub(crate) fn terminate(&mut self, now: Nanos, fault: Fault, quoted: &[u8]) {
        self.counts.transport_faults += 1;
        let request = Terminate::for_fault(&fault);
        self.replies.outbox.append(|out| request.encode(End::Controller, quoted, out));
        self.linger(now, Closing::Fault(fault));
    }

    /// Ends the connection once the host has had time to read what is in the outbox.
    pub(crate) fn linger(&mut self, now: Nanos, why: Closing) {
        self.closing.get_or_insert(why);
        self.set_state(State::Terminating { until: now + LINGER });
    }

    /// Looks at what became of the controller, perhaps by another core.
    fn watch(&mut self) {
        let is_over = match &self.state {
            State::Io(queue) => {
                let life = queue.controller.life();
                !life.condition.serves_io() || life.generation != queue.generation
            }
            State::Admin(controller) | State::Discovery(controller) => controller.life().condition.is_over(),
            State::AwaitIcReq { .. }
            | State::AwaitConnect { .. }
            | State::Terminating { .. }
            | State::Closed => false,
        };
        if is_over {
            self.close(Closing::ControllerEnded);
        }
    }

    fn note_sign(&mut self, now: Nanos) {
        if now.since(self.signed) >= SIGN_SPACING {
            self.signed = now;
            if let Some(controller) = self.state.controller() {
                controller.note_sign(now);
            }
        }
    }

    fn pass_counts(&mut self) {
        let mut counts = self.counts;
        if let Some(controller) = self.state.controller() {
            controller.statistics.absorb(&mut counts);
        }
        self.target.statistics.absorb(&mut self.counts);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close(Closing::PeerClosed);
        self.pass_counts();
        self.target.connection_closed();
    }
}
