//! State machine of one queue on its TCP connection, without I/O.
//!
//! In: commands ([`QueuePair::submit`]), received bytes ([`QueuePair::receive`]), the number of sent bytes
//! ([`QueuePair::advance_sent`]). Out: completions through a sink, bytes to send ([`QueuePair::slices`]).
//!
//! ```text
//!                 ICResp
//!  uninitialized ────────▶ initialized ──────▶ (dropped with the connection, see `QueuePair::abort_all`)
//!
//!  slot:  Free ──submit──▶ Waiting ──completion, all parts sent──▶ Free
//!                             └──completion before that──▶ CompletedUnsent ──all parts sent──▶ Free
//! ```
//! Invariants: a slot keeps its value until the send buffer references no part of it; received data goes only to a waiting
//! command, in order and within its buffer; a success completion before all data of the command was sent is a protocol
//! error; a command that is aborted as not sent is never sent, since its caller takes it for not executed; no
//! received bytes panic, they return a [`ConnectionError`] at worst. Bounded by the queue depth. Tested with
//! hand-written PDUs in `tests/queue_pair.rs` and with the target in `tests/nvmf_target.rs`.

use crate::bug_injection::{self, InjectedBug};
use crate::command::{EncodedCommand, ResponseData, Value};
use crate::command_slot::{CommandSlot, CommandSlotState, Payload, retain_payload};
use crate::completion::{AbortedCommand, CommandCompletion};
use crate::error::ConnectionError;
use octokv_base::{Buffer, BufferPool, Crc32c, Key, Nanos};
use octokv_wire::pdu::{
    self, DataHeader, IcRequest, NegotiatedParams, PduHeader, PduLayout, Role, UncheckedCommonHeader, flags,
};
use octokv_wire::send_buffer::{COPY_BYTES_MAX, SendBuffer};
use octokv_wire::{Cqe, PduError, Sgl, Status};
use std::io::IoSlice;

/// Capacity that the staging area of the send buffer keeps when all is sent, in bytes: a queue of many small values.
const STAGING_RETAIN_BYTES: usize = 1 << 20;

/// Event during [`QueuePair::receive`].
#[derive(Debug)]
pub enum QueueEvent {
    /// The connection is initialized: commands may be submitted.
    Initialized,
    /// A command completed.
    Completed(CommandCompletion),
}

/// Position in the received byte stream.
#[derive(Debug)]
enum ReceivePhase {
    /// At the start of a PDU.
    Header,
    /// In the data of a C2HData.
    Data { slot: u16, remaining_bytes: u32, layout: PduLayout },
    /// At the data digest.
    Digest { slot: u16, layout: PduLayout, computed: u32 },
}

/// One submission and completion queue pair on one connection. See the module documentation.
pub struct QueuePair {
    is_initialized: bool,
    ic_request: IcRequest,
    params: NegotiatedParams,
    h2c_data_bytes_max: u32,
    capsule_data_bytes: u32,
    slots: Vec<CommandSlot>,
    free_slots: Vec<u16>,
    /// References name the slot that owns the value.
    send_buffer: SendBuffer<u16>,
    receive_phase: ReceivePhase,
    /// Whether the send buffer ends with a termination request.
    is_terminating: bool,
    /// Digest of the data received so far, if data digests are enabled.
    data_crc: Crc32c,
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "QueuePair(initialized {}, {} in flight, {:?})",
            self.is_initialized,
            self.in_flight(),
            self.receive_phase
        )
    }
}

impl QueuePair {
    /// A queue on a new connection: the ICReq is in the send buffer.
    pub fn new(depth: u16, capsule_data_bytes: u32, header_digest: bool, data_digest: bool) -> QueuePair {
        let ic_request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        let mut send_buffer = SendBuffer::new(STAGING_RETAIN_BYTES);
        send_buffer.push_copy(&ic_request.encode());
        QueuePair {
            is_initialized: false,
            ic_request,
            params: NegotiatedParams::initial(),
            h2c_data_bytes_max: 0,
            capsule_data_bytes,
            slots: (0..depth).map(|_| CommandSlot::free()).collect(),
            free_slots: (0..depth).rev().collect(),
            send_buffer,
            receive_phase: ReceivePhase::Header,
            is_terminating: false,
            data_crc: Crc32c::new(),
        }
    }

    /// Number of commands that can be submitted now.
    pub fn free_slots(&self) -> usize {
        if self.is_initialized { self.free_slots.len() } else { 0 }
    }

    /// Number of commands in flight, completed commands with unsent parts included.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Whether the send buffer is empty.
    pub fn is_flushed(&self) -> bool {
        self.send_buffer.is_empty()
    }

    /// Appends the unsent bytes as slices.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>) {
        let resolve = |&slot: &u16| self.slots[usize::from(slot)].payload.bytes();
        self.send_buffer.slices_with(resolve, into, usize::MAX);
    }

    /// Removes the first `count` unsent bytes, which the socket accepted.
    ///
    /// # Panics
    /// If fewer bytes are unsent.
    pub fn advance_sent(&mut self, count: usize) {
        let QueuePair { send_buffer, slots, free_slots, .. } = self;
        send_buffer.advance_with(count, |index| {
            let slot = &mut slots[usize::from(index)];
            slot.unsent_parts -= 1;
            if slot.unsent_parts == 0 && slot.state == CommandSlotState::CompletedUnsent {
                *slot = CommandSlot::free();
                free_slots.push(index);
            }
        });
    }

    /// Whether a command has exceeded its deadline.
    pub fn is_overdue(&self, now: Nanos) -> bool {
        self.slots.iter().any(|slot| slot.state == CommandSlotState::Waiting && slot.deadline <= now)
    }

    /// Submits a command; the next send transmits it.
    ///
    /// # Panics
    /// If no slot is free. REQUIRES: [`QueuePair::free_slots`] is not 0.
    #[inline]
    pub fn submit(&mut self, command: EncodedCommand<'_>, token: u64, deadline: Nanos, pool: &BufferPool) {
        let index = self.free_slots.pop().expect("the caller checked free_slots");
        let host_bytes = command.host_data_bytes();
        let EncodedCommand { mut sqe, kind, key, value, response_bytes_max, read_buffer } = command;
        let in_capsule = host_bytes > 0 && host_bytes <= self.capsule_data_bytes as usize;
        sqe.command_id.set(index);
        sqe.sgl = match (host_bytes, in_capsule) {
            (0, _) => Sgl::transport(response_bytes_max),
            (_, true) => Sgl::in_capsule(host_bytes as u32),
            (_, false) => Sgl::transport(host_bytes as u32),
        };
        let stream_start = self.send_buffer.appended_bytes();
        let capsule_bytes = if in_capsule { host_bytes } else { 0 };
        let params = self.params;
        self.send_buffer.append(|staging| pdu::encode_command(&sqe, capsule_bytes, &params, staging));
        let small = value.as_ref().is_none_or(|value| value.bytes().len() <= COPY_BYTES_MAX);
        let (payload, copied) = match value {
            // The completion returns the buffer to its owner.
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
            stream_start,
            key,
            payload,
            transfer_bytes: if in_capsule { 0 } else { host_bytes as u32 },
            read_buffer,
            response_bytes_max,
            ..CommandSlot::free()
        };
        if let Some(value) = copied {
            self.append_copied_data(index, value.bytes());
        } else if in_capsule {
            self.append_data(index, 0, host_bytes);
        }
        self.slots[usize::from(index)].stream_end = self.send_buffer.appended_bytes();
    }

    /// Appends in-capsule data that is copied whole: the key, a small value and the digest.
    #[inline]
    fn append_copied_data(&mut self, index: u16, value: &[u8]) {
        let key = self.slots[usize::from(index)].key.as_ref().map_or(&[][..], Key::as_bytes);
        let digest = self.params.data_digest;
        self.send_buffer.append_up_to(key.len() + value.len() + pdu::DIGEST_BYTES, |staging| {
            let from = staging.len();
            staging.extend_from_slice(key);
            staging.extend_from_slice(value);
            if digest && staging.len() > from {
                let crc = octokv_base::crc32c(&staging[from..]);
                staging.extend_from_slice(&crc.to_le_bytes());
            }
        });
    }

    /// Appends the range `from..from + bytes` of key and value, and its digest.
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
        self.send_buffer.push_copy(key_part);
        if value_part.len() > COPY_BYTES_MAX {
            slot.unsent_parts += 1;
            self.send_buffer.push_reference(index, value_from, value_to);
        } else {
            self.send_buffer.push_copy(value_part);
        }
        if let Some(crc) = crc {
            self.send_buffer.push_copy(&crc);
        }
    }

    /// Processes received bytes and returns how many it consumed. REQUIRES: the caller passes the rest again,
    /// followed by further bytes.
    ///
    /// # Errors
    /// The reason why the connection is lost; no command may be submitted. After a protocol error the send buffer holds the
    /// rest of commands of which a part was sent, and a termination request.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<usize, ConnectionError> {
        let mut consumed = 0;
        loop {
            let rest = &bytes[consumed..];
            match self.receive_part(rest, pool, sink) {
                Ok(0) => return Ok(consumed),
                Ok(count) => consumed += count,
                Err(cause) => {
                    if let ConnectionError::Protocol(error) = cause {
                        self.append_term_req(&error, rest);
                    }
                    return Err(cause);
                }
            }
        }
    }

    /// Replaces the commands of which nothing was sent by a termination request that quotes `received`.
    fn append_term_req(&mut self, error: &PduError, received: &[u8]) {
        let sent_bytes = self.send_buffer.sent_bytes();
        let waiting = self.slots.iter().filter(|slot| slot.state == CommandSlotState::Waiting);
        let unsent = waiting.map(|slot| slot.stream_start).filter(|start| *start >= sent_bytes);
        if let Some(start) = unsent.min() {
            self.send_buffer.truncate_with(start, |_| ());
        }
        let term = pdu::TermReq::for_error(error);
        let quoted = &received[..received.len().min(pdu::TERM_REQ_BYTES_MAX)];
        self.send_buffer.append(|out| term.encode(Role::Host, quoted, out));
        self.is_terminating = true;
    }

    /// Processes one part of a PDU; 0 if more bytes are needed.
    #[inline]
    fn receive_part(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<usize, ConnectionError> {
        match &mut self.receive_phase {
            ReceivePhase::Header => self.receive_header(bytes, pool, sink),
            ReceivePhase::Data { slot, remaining_bytes, layout } => {
                let count = bytes.len().min(*remaining_bytes as usize);
                let data = &bytes[..count];
                let (index, layout) = (*slot, *layout);
                *remaining_bytes -= count as u32;
                let ended = *remaining_bytes == 0;
                if layout.trailer_bytes > 0 {
                    self.data_crc.update(data);
                }
                self.copy_data(index, data);
                if ended {
                    if layout.trailer_bytes > 0 {
                        let computed = self.data_crc.finish();
                        self.receive_phase = ReceivePhase::Digest { slot: index, layout, computed };
                    } else {
                        self.finish_data(index, &layout, sink);
                    }
                }
                Ok(count)
            }
            ReceivePhase::Digest { slot, layout, computed } => {
                let Some(digest) = bytes.first_chunk() else { return Ok(0) };
                let (index, layout) = (*slot, *layout);
                let matches = u32::from_le_bytes(*digest) == *computed;
                self.slots[usize::from(index)].digest_ok &= matches;
                self.finish_data(index, &layout, sink);
                Ok(pdu::DIGEST_BYTES)
            }
        }
    }

    fn copy_data(&mut self, index: u16, data: &[u8]) {
        let slot = &mut self.slots[usize::from(index)];
        let from = slot.received_bytes as usize;
        let buffer = slot.read_buffer.as_mut().expect("the header of the data PDU allocates a buffer");
        buffer[from..from + data.len()].copy_from_slice(data);
        slot.received_bytes += data.len() as u32;
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
            (PduHeader::Data(header), true) => self.begin_data(&header, &layout, pool, sink)?,
            (PduHeader::ReadyToTransfer(header), true) => self.handle_r2t(&header)?,
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
            // `check` rejects PDU types of the host; the others are not allowed in this state.
            _ => {
                return Err(ConnectionError::Protocol(PduError::UnexpectedPduType {
                    kind: layout.pdu_type as u8,
                }));
            }
        }
        Ok(prefix)
    }

    fn apply_ic_response(&mut self, granted: pdu::IcResponse) -> Result<(), ConnectionError> {
        let not_requested = (granted.header_digest && !self.ic_request.header_digest)
            || (granted.data_digest && !self.ic_request.data_digest);
        if not_requested {
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

    /// Whether all data of a command was sent. The controller cannot execute it earlier.
    fn is_all_sent(&self, index: u16) -> bool {
        let slot = &self.slots[usize::from(index)];
        slot.requested_bytes == slot.transfer_bytes && self.send_buffer.sent_bytes() >= slot.stream_end
    }

    #[inline]
    fn begin_data(
        &mut self,
        header: &DataHeader,
        layout: &PduLayout,
        pool: &BufferPool,
        sink: &mut impl FnMut(QueueEvent),
    ) -> Result<(), ConnectionError> {
        let index = header.command_id;
        if !self.is_waiting(index) {
            return Err(ConnectionError::Protocol(PduError::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(header.offset) + u64::from(header.bytes);
        let out_of_range = PduError::DataRange { offset: header.offset, bytes: header.bytes };
        if header.offset != slot.received_bytes || end > u64::from(slot.response_bytes_max) {
            return Err(ConnectionError::Protocol(out_of_range));
        }
        if header.bytes != layout.data_bytes {
            return Err(ConnectionError::Protocol(PduError::PduLength {
                pdu_bytes: layout.pdu_bytes() as u32,
            }));
        }
        if layout.is_success() && !layout.is_last() {
            return Err(ConnectionError::Protocol(PduError::Flags { flags: layout.flags }));
        }
        if header.bytes == 0 {
            self.finish_data(index, layout, sink);
            return Ok(());
        }
        if slot.read_buffer.is_none() {
            // The last data PDU gives the length of all data; before it, the limit applies.
            let buffer_bytes = if layout.is_last() { end as usize } else { slot.response_bytes_max as usize };
            slot.read_buffer = Some(pool.take(buffer_bytes).unwrap_or_else(|| Buffer::zeroed(buffer_bytes)));
        }
        if layout.trailer_bytes > 0 {
            self.data_crc = Crc32c::new();
        }
        self.receive_phase =
            ReceivePhase::Data { slot: index, remaining_bytes: header.bytes, layout: *layout };
        Ok(())
    }

    fn handle_r2t(&mut self, header: &DataHeader) -> Result<(), ConnectionError> {
        let index = header.command_id;
        if !self.is_waiting(index) {
            return Err(ConnectionError::Protocol(PduError::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(header.offset) + u64::from(header.bytes);
        if header.offset != slot.requested_bytes || header.bytes == 0 || end > u64::from(slot.transfer_bytes)
        {
            return Err(ConnectionError::Protocol(PduError::DataRange {
                offset: header.offset,
                bytes: header.bytes,
            }));
        }
        slot.requested_bytes = end as u32;
        let params = self.params;
        let mut offset = header.offset;
        while offset < end as u32 {
            let bytes = (end as u32 - offset).min(self.h2c_data_bytes_max);
            let data_header = DataHeader { command_id: index, tag: header.tag, offset, bytes };
            let bits = if offset + bytes == end as u32 { flags::LAST } else { 0 };
            self.send_buffer.append(|staging| data_header.encode(Role::Host, bits, &params, staging));
            self.append_data(index, offset as usize, bytes as usize);
            offset += bytes;
        }
        self.slots[usize::from(index)].stream_end = self.send_buffer.appended_bytes();
        Ok(())
    }

    #[inline]
    fn complete(&mut self, index: u16, cqe: Cqe, sink: &mut impl FnMut(QueueEvent)) {
        let slot = &mut self.slots[usize::from(index)];
        let unsent = slot.unsent_parts > 0;
        let payload =
            if unsent { Payload::None } else { std::mem::replace(&mut slot.payload, Payload::None) };
        let completion = CommandCompletion {
            token: slot.token,
            kind: slot.kind,
            cqe,
            data: ResponseData::new(slot.read_buffer.take(), slot.received_bytes as usize),
            digest_ok: slot.digest_ok,
            host_buffer: payload.into_buffer(),
        };
        if unsent {
            slot.state = CommandSlotState::CompletedUnsent;
        } else {
            slot.state = CommandSlotState::Free;
            slot.key = None;
            self.free_slots.push(index);
        }
        sink(QueueEvent::Completed(completion));
    }

    /// Ends the queue and reports every command that will not complete. Only a termination request is left to send, with the
    /// rest of sent commands before it.
    pub fn abort_all(&mut self, mut aborted: impl FnMut(AbortedCommand)) {
        let sent_bytes = self.send_buffer.sent_bytes();
        for slot in self.slots.iter_mut().filter(|slot| slot.state == CommandSlotState::Waiting) {
            slot.state = CommandSlotState::CompletedUnsent;
            aborted(AbortedCommand {
                token: slot.token,
                kind: slot.kind,
                sent: sent_bytes > slot.stream_start,
            });
        }
        self.is_initialized = false;
        if !self.is_terminating && !bug_injection::is_injected(InjectedBug::SendAbortedCommands) {
            self.send_buffer.clear();
        }
    }

    /// Sets the maximum in-capsule data of later commands, in bytes.
    pub fn set_capsule_data_bytes(&mut self, bytes: u32) {
        self.capsule_data_bytes = bytes;
    }
}
