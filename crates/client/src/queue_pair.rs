//! One queue of a controller on its TCP connection, as a machine without I/O.
//!
//! In: commands ([`Queue::submit`]), bytes of the peer ([`Queue::receive`]), what was sent
//! ([`Queue::sent`]). Out: completions through a sink, bytes to send ([`Queue::slices`]).
//!
//! ```text
//!           ICResp
//!  Opening ────────▶ Open ──────▶ (dropped with the connection, see `Queue::abandon`)
//!
//!  a slot:  Free ──submit──▶ Waiting ──completion, all sent──▶ Free
//!                               └──completion before all was sent──▶ Leaving ──all sent──▶ Free
//! ```
//! Invariants: a slot's value lives until no part of it waits in the outbox; data from the peer goes
//! only where a waiting command has room for it, in order; success is not believed of a command whose data has
//! not left; whatever the peer sends, a [`ConnectionError`] is the worst. Tested with a scripted peer in `tests/queue.rs` and with the real target in `tests/target.rs`.

use crate::command::{CommandKind, EncodedCommand, ResponseData, Value};
use crate::completion::{AbortedCommand, CommandCompletion};
use crate::error::ConnectionError;
use crate::send_buffer::{COPY_BYTES_MAX, SendBuffer};
use octokv_base::{Buffer, BufferPool, Crc32c, Key, Nanos};
use octokv_wire::pdu::{
    self, DataHeader as Range, IcRequest, NegotiatedParams, PduHeader, PduLayout, Role,
    UncheckedCommonHeader, flags,
};
use octokv_wire::{Cqe, PduError, Sgl, Status};
use std::io::IoSlice;
use std::sync::Arc;

/// What a queue reports while it receives.
#[derive(Debug)]
pub enum QueueEvent {
    /// The connection is initialised: commands may go.
    Initialized,
    /// A command is complete.
    Completed(CommandCompletion),
}

#[derive(Debug)]
enum Payload {
    None,
    Shared(Arc<[u8]>),
    Buffer { buffer: Buffer, from: usize, to: usize },
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::None => &[],
            Payload::Shared(bytes) => bytes,
            Payload::Buffer { buffer, from, to } => &buffer[*from..*to],
        }
    }

    fn into_buffer(self) -> Option<Buffer> {
        match self {
            Payload::None | Payload::Shared(_) => None,
            Payload::Buffer { buffer, .. } => Some(buffer),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandSlotState {
    Free,
    Waiting,
    /// Complete, but parts of its value wait in the outbox.
    CompletedUnsent,
}

#[derive(Debug)]
struct CommandSlot {
    state: CommandSlotState,
    token: u64,
    kind: CommandKind,
    deadline: Nanos,
    /// Where its capsule begins in the stream of sent bytes.
    stream_start: u64,
    key: Option<Key>,
    payload: Payload,
    /// Bytes that the controller may ask for by R2T, and how many of them it has asked for.
    transfer_bytes: u32,
    requested_bytes: u32,
    unsent_parts: u32,
    /// Where what is to be sent of it so far ends in the stream of sent bytes.
    stream_end: u64,
    read_buffer: Option<Buffer>,
    response_bytes_max: u32,
    received_bytes: u32,
    digest_ok: bool,
}

impl CommandSlot {
    fn free() -> CommandSlot {
        CommandSlot {
            state: CommandSlotState::Free,
            token: 0,
            kind: CommandKind::Internal,
            deadline: Nanos::NEVER,
            stream_start: 0,
            key: None,
            payload: Payload::None,
            transfer_bytes: 0,
            requested_bytes: 0,
            unsent_parts: 0,
            stream_end: 0,
            read_buffer: None,
            response_bytes_max: 0,
            received_bytes: 0,
            digest_ok: true,
        }
    }
}

/// Where in the stream of received bytes we are.
#[derive(Debug)]
enum ReceivePhase {
    /// At the start of a PDU.
    Header,
    /// In the data of a C2HData.
    Data { slot: u16, remaining_bytes: u32, layout: PduLayout },
    /// At the digest behind it.
    Digest { slot: u16, layout: PduLayout, computed: u32 },
}

/// One queue. See the module's text.
pub struct QueuePair {
    is_initialized: bool,
    ic_request: IcRequest,
    params: NegotiatedParams,
    h2c_data_bytes_max: u32,
    capsule_data_bytes: u32,
    slots: Vec<CommandSlot>,
    free_slots: Vec<u16>,
    send_buffer: SendBuffer,
    receive_phase: ReceivePhase,
    /// The digest of the data being read, where digests are on.
    data_crc: Crc32c,
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Queue(open {}, {} in flight, {:?})",
            self.is_initialized,
            self.in_flight(),
            self.receive_phase
        )
    }
}

impl QueuePair {
    /// A queue on a connection that is being made: the ICReq waits to be sent.
    pub fn new(depth: u16, capsule_data_bytes: u32, header_digest: bool, data_digest: bool) -> QueuePair {
        let asked = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        let mut outbox = SendBuffer::default();
        outbox.append(|staging| staging.extend_from_slice(&asked.encode()));
        QueuePair {
            is_initialized: false,
            ic_request: asked,
            params: NegotiatedParams::initial(),
            h2c_data_bytes_max: 0,
            capsule_data_bytes,
            slots: (0..depth).map(|_| CommandSlot::free()).collect(),
            free_slots: (0..depth).rev().collect(),
            send_buffer: outbox,
            receive_phase: ReceivePhase::Header,
            data_crc: Crc32c::new(),
        }
    }

    /// How many commands could be submitted now.
    pub fn free_slots(&self) -> usize {
        if self.is_initialized { self.free_slots.len() } else { 0 }
    }

    /// How many commands wait for their completion.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Whether nothing waits to be sent.
    pub fn is_flushed(&self) -> bool {
        self.send_buffer.is_empty()
    }

    /// Appends what waits to be sent.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>) {
        self.send_buffer.slices(|slot| self.slots[usize::from(slot)].payload.bytes(), into);
    }

    /// Forgets `count` bytes, which the socket took.
    pub fn advance_sent(&mut self, count: usize) {
        let QueuePair { send_buffer: outbox, slots, free_slots: free, .. } = self;
        outbox.advance(count, |index| {
            let slot = &mut slots[usize::from(index)];
            slot.unsent_parts -= 1;
            if slot.unsent_parts == 0 && slot.state == CommandSlotState::CompletedUnsent {
                *slot = CommandSlot::free();
                free.push(index);
            }
        });
    }

    /// Whether a command is overdue.
    pub fn is_overdue(&self, now: Nanos) -> bool {
        self.slots.iter().any(|slot| slot.state == CommandSlotState::Waiting && slot.deadline <= now)
    }

    /// Puts a command on its way.
    ///
    /// # Panics
    /// When there is no [`Queue::room`].
    #[inline]
    pub fn submit(&mut self, command: EncodedCommand<'_>, token: u64, deadline: Nanos, pool: &BufferPool) {
        let index = self.free_slots.pop().expect("the caller looked for room");
        let host_bytes = command.host_data_bytes();
        let EncodedCommand {
            mut sqe,
            kind,
            key,
            value,
            response_bytes_max: incoming_bytes,
            read_buffer: into,
        } = command;
        let in_capsule = host_bytes > 0 && host_bytes <= self.capsule_data_bytes as usize;
        sqe.command_id.set(index);
        sqe.sgl = match (host_bytes, in_capsule) {
            (0, _) => Sgl::transport(incoming_bytes),
            (_, true) => Sgl::in_capsule(host_bytes as u32),
            (_, false) => Sgl::transport(host_bytes as u32),
        };
        let begins_at = self.send_buffer.appended_bytes();
        let capsule_bytes = if in_capsule { host_bytes } else { 0 };
        let params = self.params;
        self.send_buffer.append(|staging| pdu::encode_command(&sqe, capsule_bytes, &params, staging));
        let small = value.as_ref().is_none_or(|value| value.bytes().len() <= COPY_BYTES_MAX);
        let (payload, copied) = match value {
            // A buffer goes back to its owner with the answer.
            Some(value @ Value::Buffer { .. }) => (retain_payload(value, pool), None),
            Some(value) if in_capsule && small => (Payload::None, Some(value)),
            Some(value) => (retain_payload(value, pool), None),
            None => (Payload::None, None),
        };
        self.slots[usize::from(index)] = CommandSlot {
            state: CommandSlotState::Waiting,
            token,
            kind,
            deadline,
            stream_start: begins_at,
            key,
            payload,
            transfer_bytes: if in_capsule { 0 } else { host_bytes as u32 },
            read_buffer: into,
            response_bytes_max: incoming_bytes,
            ..CommandSlot::free()
        };
        if let Some(value) = copied {
            self.append_copied_data(index, value.bytes());
        } else if in_capsule {
            self.append_data(index, 0, host_bytes);
        }
        self.slots[usize::from(index)].stream_end = self.send_buffer.appended_bytes();
    }

    /// In-capsule data that is copied whole: the key and a small value.
    #[inline]
    fn append_copied_data(&mut self, index: u16, value: &[u8]) {
        let key = self.slots[usize::from(index)].key.as_ref().map_or(&[][..], Key::as_bytes);
        let digest = self.params.data_digest;
        self.send_buffer.append(|staging| {
            let from = staging.len();
            staging.extend_from_slice(key);
            staging.extend_from_slice(value);
            if digest && staging.len() > from {
                let crc = octokv_base::crc32c(&staging[from..]);
                staging.extend_from_slice(&crc.to_le_bytes());
            }
        });
    }

    /// Puts the range `from..from + bytes` of key and value, and its digest, into the outbox.
    fn append_data(&mut self, index: u16, from: usize, bytes: usize) {
        let slot = &mut self.slots[usize::from(index)];
        let key = slot.key.as_ref().map_or(&[][..], Key::as_bytes);
        let to = from + bytes;
        let key_part = &key[from.min(key.len())..to.min(key.len())];
        let (value_from, value_to) = (from.max(key.len()) - key.len(), to.max(key.len()) - key.len());
        let value_part = &slot.payload.bytes()[value_from..value_to];
        let crc = self.params.data_digest.then(|| {
            let mut crc = Crc32c::new();
            crc.update(key_part);
            crc.update(value_part);
            crc.finish().to_le_bytes()
        });
        self.send_buffer.append(|staging| staging.extend_from_slice(key_part));
        if value_part.len() > COPY_BYTES_MAX {
            slot.unsent_parts += 1;
            self.send_buffer.append_reference(index, value_from, value_to);
        } else {
            self.send_buffer.append(|staging| staging.extend_from_slice(value_part));
        }
        if let Some(crc) = crc {
            self.send_buffer.append(|staging| staging.extend_from_slice(&crc));
        }
    }

    /// Takes bytes from the head of what the peer sent; gives how many. The caller keeps the rest and
    /// gives it again with more behind it.
    ///
    /// # Errors
    /// Why the connection is lost. Where that is the peer's fault, the outbox says so to it.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<usize, ConnectionError> {
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            match self.receive_part(rest, pool, sink) {
                Ok(0) => return Ok(taken),
                Ok(count) => taken += count,
                Err(cause) => {
                    if let ConnectionError::Protocol(error) = cause {
                        let term = pdu::TermReq::for_error(&error);
                        let quoted = rest.len().min(pdu::TERM_REQ_BYTES_MAX);
                        self.send_buffer.append(|out| term.encode(Role::Host, &rest[..quoted], out));
                    }
                    return Err(cause);
                }
            }
        }
    }

    /// Takes one part of a PDU; 0 when more bytes are needed.
    #[inline]
    fn receive_part(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<usize, ConnectionError> {
        match &mut self.receive_phase {
            ReceivePhase::Header => self.receive_header(bytes, pool, sink),
            ReceivePhase::Data { slot, remaining_bytes: left, layout: frame } => {
                let count = bytes.len().min(*left as usize);
                let piece = &bytes[..count];
                let (index, frame) = (*slot, *frame);
                *left -= count as u32;
                let ended = *left == 0;
                if frame.trailer_bytes > 0 {
                    self.data_crc.update(piece);
                }
                self.copy_data(index, piece);
                if ended {
                    if frame.trailer_bytes > 0 {
                        let computed = self.data_crc.finish();
                        self.receive_phase = ReceivePhase::Digest { slot: index, layout: frame, computed };
                    } else {
                        self.finish_data(index, &frame, sink);
                    }
                }
                Ok(count)
            }
            ReceivePhase::Digest { slot, layout: frame, computed } => {
                let Some(digest) = bytes.first_chunk() else { return Ok(0) };
                let (index, frame) = (*slot, *frame);
                let right = u32::from_le_bytes(*digest) == *computed;
                self.slots[usize::from(index)].digest_ok &= right;
                self.finish_data(index, &frame, sink);
                Ok(pdu::DIGEST_BYTES)
            }
        }
    }

    fn copy_data(&mut self, index: u16, piece: &[u8]) {
        let slot = &mut self.slots[usize::from(index)];
        let from = slot.received_bytes as usize;
        let buffer = slot.read_buffer.as_mut().expect("a buffer was taken when the data was announced");
        buffer[from..from + piece.len()].copy_from_slice(piece);
        slot.received_bytes += piece.len() as u32;
    }

    fn finish_data(&mut self, index: u16, layout: &PduLayout, sink: &mut impl FnMut(QueueEvent)) {
        self.receive_phase = ReceivePhase::Header;
        if layout.is_success() {
            self.complete(index, Cqe::new(index, 0, Status::SUCCESS, 0, 0), sink);
        }
    }

    fn receive_header(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<usize, ConnectionError> {
        let Some(common_header) = UncheckedCommonHeader::new(bytes) else { return Ok(0) };
        let layout = common_header.check(Role::Host, &self.params).map_err(ConnectionError::Protocol)?;
        let prefix = layout.prefix_bytes as usize;
        if bytes.len() < prefix {
            return Ok(0);
        }
        match (layout.decode_header(bytes).map_err(ConnectionError::Protocol)?, self.is_initialized) {
            (PduHeader::Response(cqe), true) => {
                let (cqe, index) = (*cqe, cqe.command_id.get());
                if !self.is_waiting(index) || (cqe.status().is_success() && !self.is_all_sent(index)) {
                    return Err(ConnectionError::Protocol(PduError::CommandId { command_id: index }));
                }
                self.complete(index, cqe, sink);
            }
            (PduHeader::Data(range), true) => self.begin_data(&range, &layout, pool, sink)?,
            (PduHeader::ReadyToTransfer(range), true) => self.handle_r2t(&range)?,
            (PduHeader::IcResponse(ic), false) => {
                self.apply_ic_response(ic.check_response().map_err(ConnectionError::Protocol)?)?;
                sink(QueueEvent::Initialized);
            }
            (PduHeader::TermReq(term), _) => {
                return Err(ConnectionError::Terminated {
                    fatal_status: term.fatal_status,
                    information: term.information,
                });
            }
            // Either end's own PDUs were refused by `check`; what is left may not come in this state.
            _ => {
                return Err(ConnectionError::Protocol(PduError::UnexpectedPduType {
                    kind: layout.pdu_type as u8,
                }));
            }
        }
        Ok(prefix)
    }

    fn apply_ic_response(&mut self, granted: pdu::IcResponse) -> Result<(), ConnectionError> {
        let more = (granted.header_digest && !self.ic_request.header_digest)
            || (granted.data_digest && !self.ic_request.data_digest);
        if more {
            let bits = u8::from(granted.header_digest) | u8::from(granted.data_digest) << 1;
            return Err(ConnectionError::Protocol(PduError::DigestBits { bits }));
        }
        self.params = NegotiatedParams {
            header_digest: granted.header_digest,
            data_digest: granted.data_digest,
            send_alignment: granted.controller_alignment,
            receive_data_bytes_max: u32::MAX,
        };
        self.h2c_data_bytes_max = granted.h2c_data_bytes_max;
        self.is_initialized = true;
        Ok(())
    }

    fn is_waiting(&self, index: u16) -> bool {
        self.slots.get(usize::from(index)).is_some_and(|slot| slot.state == CommandSlotState::Waiting)
    }

    /// Whether a command's data has left, all of it: none can be carried out before.
    fn is_all_sent(&self, index: u16) -> bool {
        let slot = &self.slots[usize::from(index)];
        slot.requested_bytes == slot.transfer_bytes && self.send_buffer.sent_bytes() >= slot.stream_end
    }

    #[inline]
    fn begin_data(
        &mut self,
        range: &Range,
        layout: &PduLayout,
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<(), ConnectionError> {
        let index = range.command_id;
        if !self.is_waiting(index) {
            return Err(ConnectionError::Protocol(PduError::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(range.offset) + u64::from(range.bytes);
        let out = PduError::DataRange { offset: range.offset, bytes: range.bytes };
        if range.offset != slot.received_bytes || end > u64::from(slot.response_bytes_max) {
            return Err(ConnectionError::Protocol(out));
        }
        if range.bytes != layout.data_bytes {
            return Err(ConnectionError::Protocol(PduError::PduLength {
                pdu_bytes: layout.pdu_bytes() as u32,
            }));
        }
        if layout.is_success() && !layout.is_last() {
            return Err(ConnectionError::Protocol(PduError::Flags { flags: layout.flags }));
        }
        if range.bytes == 0 {
            self.finish_data(index, layout, sink);
            return Ok(());
        }
        if slot.read_buffer.is_none() {
            // The last data PDU tells how much there is in all; before it, anything up to the limit.
            let room = if layout.is_last() { end as usize } else { slot.response_bytes_max as usize };
            slot.read_buffer = Some(pool.take(room).unwrap_or_else(|| Buffer::zeroed(room)));
        }
        if layout.trailer_bytes > 0 {
            self.data_crc = Crc32c::new();
        }
        self.receive_phase =
            ReceivePhase::Data { slot: index, remaining_bytes: range.bytes, layout: *layout };
        Ok(())
    }

    fn handle_r2t(&mut self, range: &Range) -> Result<(), ConnectionError> {
        let index = range.command_id;
        if !self.is_waiting(index) {
            return Err(ConnectionError::Protocol(PduError::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(range.offset) + u64::from(range.bytes);
        if range.offset != slot.requested_bytes || range.bytes == 0 || end > u64::from(slot.transfer_bytes) {
            return Err(ConnectionError::Protocol(PduError::DataRange {
                offset: range.offset,
                bytes: range.bytes,
            }));
        }
        slot.requested_bytes = end as u32;
        let params = self.params;
        let mut offset = range.offset;
        while offset < end as u32 {
            let bytes = (end as u32 - offset).min(self.h2c_data_bytes_max);
            let piece = Range { command_id: index, tag: range.tag, offset, bytes };
            let bits = if offset + bytes == end as u32 { flags::LAST } else { 0 };
            self.send_buffer.append(|staging| piece.encode(Role::Host, bits, &params, staging));
            self.append_data(index, offset as usize, bytes as usize);
            offset += bytes;
        }
        self.slots[usize::from(index)].stream_end = self.send_buffer.appended_bytes();
        Ok(())
    }

    #[inline]
    fn complete(&mut self, index: u16, cqe: Cqe, sink: &mut impl FnMut(QueueEvent)) {
        let slot = &mut self.slots[usize::from(index)];
        let leaving = slot.unsent_parts > 0;
        let payload =
            if leaving { Payload::None } else { std::mem::replace(&mut slot.payload, Payload::None) };
        let completion = CommandCompletion {
            token: slot.token,
            kind: slot.kind,
            cqe,
            data: ResponseData::new(slot.read_buffer.take(), slot.received_bytes as usize),
            digest_ok: slot.digest_ok,
            host_buffer: payload.into_buffer(),
        };
        if leaving {
            slot.state = CommandSlotState::CompletedUnsent;
        } else {
            slot.state = CommandSlotState::Free;
            slot.key = None;
            self.free_slots.push(index);
        }
        sink(QueueEvent::Completed(completion));
    }

    /// Ends the queue: names every command that will get no answer.
    pub fn abort_all(&mut self, mut aborted: impl FnMut(AbortedCommand)) {
        let sent_total = self.send_buffer.sent_bytes();
        for slot in self.slots.iter_mut().filter(|slot| slot.state == CommandSlotState::Waiting) {
            slot.state = CommandSlotState::CompletedUnsent;
            aborted(AbortedCommand {
                token: slot.token,
                kind: slot.kind,
                sent: sent_total > slot.stream_start,
            });
        }
        self.is_initialized = false;
    }

    /// Lets commands carry so much data in their capsules from now on.
    pub fn set_capsule_data_bytes(&mut self, bytes: u32) {
        self.capsule_data_bytes = bytes;
    }
}

fn retain_payload(value: Value<'_>, pool: &BufferPool) -> Payload {
    match value {
        Value::Shared(bytes) => Payload::Shared(bytes),
        Value::Buffer { buffer, from, to } => Payload::Buffer { buffer, from, to },
        Value::Slice(bytes) => {
            let to = bytes.len();
            let mut buffer = pool.take(to).unwrap_or_else(|| Buffer::zeroed(to));
            buffer[..to].copy_from_slice(bytes);
            Payload::Buffer { buffer, from: 0, to }
        }
    }
}
