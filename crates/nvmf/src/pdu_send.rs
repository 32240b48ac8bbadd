//! Completions, data and transfer requests, from their fields to the outbox's bytes.
//!
//! Invariants: digests as agreed on; LAST on every data PDU, since each reply's data is one PDU; never
//! SUCCESS, since a completion always follows (a Retrieve's carries the value's length); no data PDU of
//! zero bytes, which SPDK's host would wait on for ever.

use crate::send_buffer::Outbox;
use octokv_base::{Buffer, crc32c};
use octokv_wire::pdu::{Data, End, Link, encode_response, flags};
use octokv_wire::{Cqe, Status};

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Replies {
    pub outbox: Outbox,
    pub link: Link,
    /// Entries of the submission queue, 0 before Connect.
    entries: u16,
    head: u16,
    flow_control: bool,
}

impl Replies {
    pub fn new() -> Replies {
        let link = Link::plain();
        Replies { outbox: Outbox::default(), link, entries: 0, head: 0, flow_control: true }
    }

    /// The queue exists from now on. The completion of its Connect is the first that counts.
    pub fn set_queue(&mut self, entries: u16, flow_control: bool) {
        self.entries = entries;
        self.flow_control = flow_control;
    }

    /// SQHD of the next completion: it moves on by one with each. Without flow control it stays FFFFh,
    /// which in Connect's completion grants what the host asked for.
    fn next_head(&mut self) -> u16 {
        if !self.flow_control {
            return u16::MAX;
        }
        if self.entries > 0 {
            self.head = if self.head + 1 == self.entries { 0 } else { self.head + 1 };
        }
        self.head
    }

    /// A completion.
    #[inline]
    pub fn respond(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        let cqe = Cqe::new(command_id, self.next_head(), status, dw0, dw1);
        self.outbox.append(|out| encode_response(&cqe, &self.link, out));
    }

    /// Data for the host, copied.
    pub fn copy(&mut self, command_id: u16, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        self.data_header(command_id, data.len());
        self.outbox.copy(data);
        self.data_digest(data);
    }

    /// Data for the host: bytes `from..to` of `buffer`, which is kept until they are sent.
    #[inline]
    pub fn keep(&mut self, command_id: u16, buffer: Buffer, from: usize, to: usize) {
        assert!(from < to && to <= buffer.len(), "{from}..{to} of {buffer:?}");
        self.data_header(command_id, to - from);
        let digest = self.link.data_digest.then(|| crc32c(&buffer[from..to]));
        self.outbox.keep(buffer, from, to);
        if let Some(digest) = digest {
            self.outbox.copy(&digest.to_le_bytes());
        }
    }

    /// Asks the host for the first `bytes` bytes of a command's data, under this tag.
    pub fn ask(&mut self, command_id: u16, tag: u16, bytes: u32) {
        let range = Data { command_id, tag, offset: 0, bytes };
        self.outbox.append(|out| range.encode_ready_to_transfer(&self.link, out));
    }

    #[inline]
    fn data_header(&mut self, command_id: u16, bytes: usize) {
        let data = Data { command_id, tag: 0, offset: 0, bytes: bytes as u32 };
        self.outbox.append(|out| data.encode(End::Controller, flags::LAST, &self.link, out));
    }

    fn data_digest(&mut self, data: &[u8]) {
        if self.link.data_digest {
            self.outbox.copy(&crc32c(data).to_le_bytes());
        }
    }
}
