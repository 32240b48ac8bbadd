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
//! not left; whatever the peer sends, a [`Lost`] is the worst. Tested with a scripted peer in `tests/queue.rs` and with the real target in `tests/target.rs`.

use crate::command::{Data, Kind, Prepared, Value};
use crate::error::Lost;
use crate::send_buffer::{COPY_BYTES_MAX, Outbox};
use octokv_base::{Buffer, Crc32c, Key, Nanos, Pool};
use octokv_wire::pdu::{self, Data as Range, End, Frame, Header, IcRequest, Link, Unchecked, flags};
use octokv_wire::{Cqe, Fault, Sgl, Status};
use std::io::IoSlice;
use std::sync::Arc;

/// What a queue reports while it receives.
#[derive(Debug)]
pub enum Event {
    /// The connection is initialised: commands may go.
    Opened,
    /// A command is complete.
    Done(Done),
}

/// A completed command.
#[derive(Debug)]
pub struct Done {
    /// The caller's token.
    pub token: u64,
    /// What the command was for.
    pub kind: Kind,
    /// Its completion.
    pub cqe: Cqe,
    /// The data that came.
    pub data: Data,
    /// Whether the data's digests, where there were any, were right.
    pub digest_ok: bool,
    /// The buffer whose data the command carried, unless parts of it are still being sent.
    pub host: Option<Buffer>,
}

/// A command that a lost connection leaves without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// The caller's token.
    pub token: u64,
    /// What the command was for.
    pub kind: Kind,
    /// Whether any byte of it was sent.
    pub sent: bool,
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
enum Use {
    Free,
    Waiting,
    /// Complete, but parts of its value wait in the outbox.
    Leaving,
}

#[derive(Debug)]
struct Slot {
    state: Use,
    token: u64,
    kind: Kind,
    deadline: Nanos,
    /// Where its capsule begins in the stream of sent bytes.
    begins_at: u64,
    key: Option<Key>,
    payload: Payload,
    /// Bytes that the controller may ask for by R2T, and how many of them it has asked for.
    transfer_bytes: u32,
    asked_bytes: u32,
    unsent_parts: u32,
    /// Where what is to be sent of it so far ends in the stream of sent bytes.
    ends_at: u64,
    incoming: Option<Buffer>,
    incoming_bytes: u32,
    received_bytes: u32,
    digest_ok: bool,
}

impl Slot {
    fn free() -> Slot {
        Slot {
            state: Use::Free,
            token: 0,
            kind: Kind::Own,
            deadline: Nanos::NEVER,
            begins_at: 0,
            key: None,
            payload: Payload::None,
            transfer_bytes: 0,
            asked_bytes: 0,
            unsent_parts: 0,
            ends_at: 0,
            incoming: None,
            incoming_bytes: 0,
            received_bytes: 0,
            digest_ok: true,
        }
    }
}

/// Where in the stream of received bytes we are.
#[derive(Debug)]
enum Reading {
    /// At the start of a PDU.
    Header,
    /// In the data of a C2HData.
    Data { slot: u16, left: u32, frame: Frame },
    /// At the digest behind it.
    Digest { slot: u16, frame: Frame, computed: u32 },
}

/// One queue. See the module's text.
pub struct Queue {
    open: bool,
    asked: IcRequest,
    link: Link,
    host_data_bytes_max: u32,
    capsule_data_bytes: u32,
    slots: Vec<Slot>,
    free: Vec<u16>,
    outbox: Outbox,
    reading: Reading,
    /// The digest of the data being read, where digests are on.
    crc: Crc32c,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue(open {}, {} in flight, {:?})", self.open, self.in_flight(), self.reading)
    }
}

impl Queue {
    /// A queue on a connection that is being made: the ICReq waits to be sent.
    pub fn new(depth: u16, capsule_data_bytes: u32, header_digest: bool, data_digest: bool) -> Queue {
        let asked = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        let mut outbox = Outbox::default();
        outbox.append(|staging| staging.extend_from_slice(&asked.encode()));
        Queue {
            open: false,
            asked,
            link: Link::plain(),
            host_data_bytes_max: 0,
            capsule_data_bytes,
            slots: (0..depth).map(|_| Slot::free()).collect(),
            free: (0..depth).rev().collect(),
            outbox,
            reading: Reading::Header,
            crc: Crc32c::new(),
        }
    }

    /// How many commands could be submitted now.
    pub fn room(&self) -> usize {
        if self.open { self.free.len() } else { 0 }
    }

    /// How many commands wait for their completion.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether nothing waits to be sent.
    pub fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Appends what waits to be sent.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>) {
        self.outbox.slices(|slot| self.slots[usize::from(slot)].payload.bytes(), into);
    }

    /// Forgets `count` bytes, which the socket took.
    pub fn sent(&mut self, count: usize) {
        let Queue { outbox, slots, free, .. } = self;
        outbox.advance(count, |index| {
            let slot = &mut slots[usize::from(index)];
            slot.unsent_parts -= 1;
            if slot.unsent_parts == 0 && slot.state == Use::Leaving {
                *slot = Slot::free();
                free.push(index);
            }
        });
    }

    /// Whether a command is overdue.
    pub fn is_overdue(&self, now: Nanos) -> bool {
        self.slots.iter().any(|slot| slot.state == Use::Waiting && slot.deadline <= now)
    }

    /// Puts a command on its way.
    ///
    /// # Panics
    /// When there is no [`Queue::room`].
    #[inline]
    pub fn submit(&mut self, command: Prepared<'_>, token: u64, deadline: Nanos, pool: &Pool) {
        let index = self.free.pop().expect("the caller looked for room");
        let host_bytes = command.host_bytes();
        let Prepared { mut sqe, kind, key, value, incoming_bytes, into } = command;
        let in_capsule = host_bytes > 0 && host_bytes <= self.capsule_data_bytes as usize;
        sqe.command_id.set(index);
        sqe.sgl = match (host_bytes, in_capsule) {
            (0, _) => Sgl::transport(incoming_bytes),
            (_, true) => Sgl::in_capsule(host_bytes as u32),
            (_, false) => Sgl::transport(host_bytes as u32),
        };
        let begins_at = self.outbox.put_total();
        let capsule_bytes = if in_capsule { host_bytes } else { 0 };
        let link = self.link;
        self.outbox.append(|staging| pdu::encode_command(&sqe, capsule_bytes, &link, staging));
        let small = value.as_ref().is_none_or(|value| value.bytes().len() <= COPY_BYTES_MAX);
        let (payload, copied) = match value {
            // A buffer goes back to its owner with the answer.
            Some(value @ Value::Buffer { .. }) => (keep(value, pool), None),
            Some(value) if in_capsule && small => (Payload::None, Some(value)),
            Some(value) => (keep(value, pool), None),
            None => (Payload::None, None),
        };
        self.slots[usize::from(index)] = Slot {
            state: Use::Waiting,
            token,
            kind,
            deadline,
            begins_at,
            key,
            payload,
            transfer_bytes: if in_capsule { 0 } else { host_bytes as u32 },
            incoming: into,
            incoming_bytes,
            ..Slot::free()
        };
        if let Some(value) = copied {
            self.put_copied(index, value.bytes());
        } else if in_capsule {
            self.put_data(index, 0, host_bytes);
        }
        self.slots[usize::from(index)].ends_at = self.outbox.put_total();
    }

    /// In-capsule data that is copied whole: the key and a small value.
    #[inline]
    fn put_copied(&mut self, index: u16, value: &[u8]) {
        let key = self.slots[usize::from(index)].key.as_ref().map_or(&[][..], Key::as_bytes);
        let digest = self.link.data_digest;
        self.outbox.append(|staging| {
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
    fn put_data(&mut self, index: u16, from: usize, bytes: usize) {
        let slot = &mut self.slots[usize::from(index)];
        let key = slot.key.as_ref().map_or(&[][..], Key::as_bytes);
        let to = from + bytes;
        let key_part = &key[from.min(key.len())..to.min(key.len())];
        let (value_from, value_to) = (from.max(key.len()) - key.len(), to.max(key.len()) - key.len());
        let value_part = &slot.payload.bytes()[value_from..value_to];
        let crc = self.link.data_digest.then(|| {
            let mut crc = Crc32c::new();
            crc.update(key_part);
            crc.update(value_part);
            crc.finish().to_le_bytes()
        });
        self.outbox.append(|staging| staging.extend_from_slice(key_part));
        if value_part.len() > COPY_BYTES_MAX {
            slot.unsent_parts += 1;
            self.outbox.reference(index, value_from, value_to);
        } else {
            self.outbox.append(|staging| staging.extend_from_slice(value_part));
        }
        if let Some(crc) = crc {
            self.outbox.append(|staging| staging.extend_from_slice(&crc));
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
        pool: &Pool,
        sink: &mut impl FnMut(Event),
    ) -> Result<usize, Lost> {
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            match self.step(rest, pool, sink) {
                Ok(0) => return Ok(taken),
                Ok(count) => taken += count,
                Err(lost) => {
                    if let Lost::Fault(fault) = lost {
                        let term = pdu::Terminate::for_fault(&fault);
                        let quoted = rest.len().min(pdu::TERM_BYTES_MAX);
                        self.outbox.append(|out| term.encode(End::Host, &rest[..quoted], out));
                    }
                    return Err(lost);
                }
            }
        }
    }

    /// Takes one part of a PDU; 0 when more bytes are needed.
    #[inline]
    fn step(&mut self, bytes: &[u8], pool: &Pool, sink: &mut impl FnMut(Event)) -> Result<usize, Lost> {
        match &mut self.reading {
            Reading::Header => self.header(bytes, pool, sink),
            Reading::Data { slot, left, frame } => {
                let count = bytes.len().min(*left as usize);
                let piece = &bytes[..count];
                let (index, frame) = (*slot, *frame);
                *left -= count as u32;
                let ended = *left == 0;
                if frame.trailer_bytes > 0 {
                    self.crc.update(piece);
                }
                self.take_data(index, piece);
                if ended {
                    if frame.trailer_bytes > 0 {
                        let computed = self.crc.finish();
                        self.reading = Reading::Digest { slot: index, frame, computed };
                    } else {
                        self.end_of_data(index, &frame, sink);
                    }
                }
                Ok(count)
            }
            Reading::Digest { slot, frame, computed } => {
                let Some(digest) = bytes.first_chunk() else { return Ok(0) };
                let (index, frame) = (*slot, *frame);
                let right = u32::from_le_bytes(*digest) == *computed;
                self.slots[usize::from(index)].digest_ok &= right;
                self.end_of_data(index, &frame, sink);
                Ok(pdu::DIGEST_BYTES)
            }
        }
    }

    fn take_data(&mut self, index: u16, piece: &[u8]) {
        let slot = &mut self.slots[usize::from(index)];
        let from = slot.received_bytes as usize;
        let buffer = slot.incoming.as_mut().expect("a buffer was taken when the data was announced");
        buffer[from..from + piece.len()].copy_from_slice(piece);
        slot.received_bytes += piece.len() as u32;
    }

    fn end_of_data(&mut self, index: u16, frame: &Frame, sink: &mut impl FnMut(Event)) {
        self.reading = Reading::Header;
        if frame.is_success() {
            self.complete(index, Cqe::new(index, 0, Status::SUCCESS, 0, 0), sink);
        }
    }

    fn header(&mut self, bytes: &[u8], pool: &Pool, sink: &mut impl FnMut(Event)) -> Result<usize, Lost> {
        let Some(unchecked) = Unchecked::new(bytes) else { return Ok(0) };
        let frame = unchecked.check(End::Host, &self.link).map_err(Lost::Fault)?;
        let prefix = frame.prefix_bytes as usize;
        if bytes.len() < prefix {
            return Ok(0);
        }
        match (frame.header(bytes).map_err(Lost::Fault)?, self.open) {
            (Header::Response(cqe), true) => {
                let (cqe, index) = (*cqe, cqe.command_id.get());
                if !self.is_waiting(index) || (cqe.status().is_success() && !self.is_all_sent(index)) {
                    return Err(Lost::Fault(Fault::CommandId { command_id: index }));
                }
                self.complete(index, cqe, sink);
            }
            (Header::Data(range), true) => self.data(&range, &frame, pool, sink)?,
            (Header::ReadyToTransfer(range), true) => self.ready_to_transfer(&range)?,
            (Header::IcResponse(ic), false) => {
                self.opened(ic.check_response().map_err(Lost::Fault)?)?;
                sink(Event::Opened);
            }
            (Header::Terminate(term), _) => {
                return Err(Lost::Terminated { fatal: term.fatal, information: term.information });
            }
            // Either end's own PDUs were refused by `check`; what is left may not come in this state.
            _ => return Err(Lost::Fault(Fault::UnexpectedKind { kind: frame.kind as u8 })),
        }
        Ok(prefix)
    }

    fn opened(&mut self, granted: pdu::IcResponse) -> Result<(), Lost> {
        let more = (granted.header_digest && !self.asked.header_digest)
            || (granted.data_digest && !self.asked.data_digest);
        if more {
            let bits = u8::from(granted.header_digest) | u8::from(granted.data_digest) << 1;
            return Err(Lost::Fault(Fault::DigestBits { bits }));
        }
        self.link = Link {
            header_digest: granted.header_digest,
            data_digest: granted.data_digest,
            send_alignment: granted.controller_alignment,
            receive_data_bytes_max: u32::MAX,
        };
        self.host_data_bytes_max = granted.host_data_bytes_max;
        self.open = true;
        Ok(())
    }

    fn is_waiting(&self, index: u16) -> bool {
        self.slots.get(usize::from(index)).is_some_and(|slot| slot.state == Use::Waiting)
    }

    /// Whether a command's data has left, all of it: none can be carried out before.
    fn is_all_sent(&self, index: u16) -> bool {
        let slot = &self.slots[usize::from(index)];
        slot.asked_bytes == slot.transfer_bytes && self.outbox.sent_total() >= slot.ends_at
    }

    #[inline]
    fn data(
        &mut self,
        range: &Range,
        frame: &Frame,
        pool: &Pool,
        sink: &mut impl FnMut(Event),
    ) -> Result<(), Lost> {
        let index = range.command_id;
        if !self.is_waiting(index) {
            return Err(Lost::Fault(Fault::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(range.offset) + u64::from(range.bytes);
        let out = Fault::DataRange { offset: range.offset, bytes: range.bytes };
        if range.offset != slot.received_bytes || end > u64::from(slot.incoming_bytes) {
            return Err(Lost::Fault(out));
        }
        if range.bytes != frame.data_bytes {
            return Err(Lost::Fault(Fault::PduBytes { pdu_bytes: frame.pdu_bytes() as u32 }));
        }
        if frame.is_success() && !frame.is_last() {
            return Err(Lost::Fault(Fault::Flags { flags: frame.flags }));
        }
        if range.bytes == 0 {
            self.end_of_data(index, frame, sink);
            return Ok(());
        }
        if slot.incoming.is_none() {
            // The last data PDU tells how much there is in all; before it, anything up to the limit.
            let room = if frame.is_last() { end as usize } else { slot.incoming_bytes as usize };
            slot.incoming = Some(pool.take(room).unwrap_or_else(|| Buffer::zeroed(room)));
        }
        if frame.trailer_bytes > 0 {
            self.crc = Crc32c::new();
        }
        self.reading = Reading::Data { slot: index, left: range.bytes, frame: *frame };
        Ok(())
    }

    fn ready_to_transfer(&mut self, range: &Range) -> Result<(), Lost> {
        let index = range.command_id;
        if !self.is_waiting(index) {
            return Err(Lost::Fault(Fault::CommandId { command_id: index }));
        }
        let slot = &mut self.slots[usize::from(index)];
        let end = u64::from(range.offset) + u64::from(range.bytes);
        if range.offset != slot.asked_bytes || range.bytes == 0 || end > u64::from(slot.transfer_bytes) {
            return Err(Lost::Fault(Fault::DataRange { offset: range.offset, bytes: range.bytes }));
        }
        slot.asked_bytes = end as u32;
        let link = self.link;
        let mut offset = range.offset;
        while offset < end as u32 {
            let bytes = (end as u32 - offset).min(self.host_data_bytes_max);
            let piece = Range { command_id: index, tag: range.tag, offset, bytes };
            let bits = if offset + bytes == end as u32 { flags::LAST } else { 0 };
            self.outbox.append(|staging| piece.encode(End::Host, bits, &link, staging));
            self.put_data(index, offset as usize, bytes as usize);
            offset += bytes;
        }
        self.slots[usize::from(index)].ends_at = self.outbox.put_total();
        Ok(())
    }

    #[inline]
    fn complete(&mut self, index: u16, cqe: Cqe, sink: &mut impl FnMut(Event)) {
        let slot = &mut self.slots[usize::from(index)];
        let leaving = slot.unsent_parts > 0;
        let payload =
            if leaving { Payload::None } else { std::mem::replace(&mut slot.payload, Payload::None) };
        let done = Done {
            token: slot.token,
            kind: slot.kind,
            cqe,
            data: Data::new(slot.incoming.take(), slot.received_bytes as usize),
            digest_ok: slot.digest_ok,
            host: payload.into_buffer(),
        };
        if leaving {
            slot.state = Use::Leaving;
        } else {
            slot.state = Use::Free;
            slot.key = None;
            self.free.push(index);
        }
        sink(Event::Done(done));
    }

    /// Ends the queue: names every command that will get no answer.
    pub fn abandon(&mut self, mut orphan: impl FnMut(Orphan)) {
        let sent_total = self.outbox.sent_total();
        for slot in self.slots.iter_mut().filter(|slot| slot.state == Use::Waiting) {
            slot.state = Use::Leaving;
            orphan(Orphan { token: slot.token, kind: slot.kind, sent: sent_total > slot.begins_at });
        }
        self.open = false;
    }

    /// Lets commands carry so much data in their capsules from now on.
    pub fn set_capsule_data_bytes(&mut self, bytes: u32) {
        self.capsule_data_bytes = bytes;
    }
}

fn keep(value: Value<'_>, pool: &Pool) -> Payload {
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
