//! Encodes completions, data and R2Ts into the send buffer.
//!
//! Invariants: digests as negotiated; LAST on every data PDU, since each response's data is one PDU; never
//! SUCCESS, since a completion always follows (Retrieve returns the value's length in it); no data PDU of
//! zero bytes, since SPDK's host hangs on one.

use octokv_base::{BufferPool, DataBuffer, DataRef, Received, crc32c};
use octokv_wire::pdu::{DataHeader, NegotiatedParams, Role, encode_response, flags};
use octokv_wire::send_buffer::{COPY_BYTES_MAX, ResponseData, SendBuffer};
use octokv_wire::{Cqe, Status};

/// More than the headers of a data PDU and a completion have, with padding, in bytes.
const HEADERS_BYTES_MAX: usize = 512;

/// Unsent bytes of a connection up to which data is lent and not copied: about what a socket takes at once.
const LENT_BYTES_MAX: usize = 1 << 20;

/// Writes the PDUs of one connection, and tracks its submission queue head.
#[derive(Debug)]
pub(crate) struct PduWriter {
    pub send_buffer: SendBuffer,
    pub params: NegotiatedParams,
    /// Entries of the submission queue; 0 before Connect.
    queue_entries: u16,
    sq_head: u16,
    flow_control: bool,
    /// Loans so far ([`octokv_wire::send_buffer::ResponseData`]).
    loans: u64,
}

impl PduWriter {
    pub fn new() -> PduWriter {
        let params = NegotiatedParams::initial();
        PduWriter {
            send_buffer: SendBuffer::default(),
            params,
            queue_entries: 0,
            sq_head: 0,
            flow_control: true,
            loans: 0,
        }
    }

    /// Starts tracking the queue head, from the completion of Connect on.
    pub fn set_queue(&mut self, entries: u16, flow_control: bool) {
        self.queue_entries = entries;
        self.flow_control = flow_control;
    }

    /// SQHD of the next completion, which advances by one with each. Without flow control it stays FFFFh,
    /// which in the completion of Connect confirms that mode.
    fn advance_sq_head(&mut self) -> u16 {
        if !self.flow_control {
            return u16::MAX;
        }
        if self.queue_entries > 0 {
            self.sq_head = if self.sq_head + 1 == self.queue_entries { 0 } else { self.sq_head + 1 };
        }
        self.sq_head
    }

    /// Appends a completion.
    #[inline]
    pub fn write_completion(&mut self, command_id: u16, status: Status, dw0: u32, dw1: u32) {
        let cqe = Cqe::new(command_id, self.advance_sq_head(), status, dw0, dw1);
        self.send_buffer.append(|out| encode_response(&cqe, &self.params, out));
    }

    /// Appends a copy of data for the host.
    pub fn write_data_copy(&mut self, command_id: u16, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        self.write_data_header(command_id, data.len());
        self.send_buffer.push_copy(data);
        self.write_data_digest(data);
    }

    /// Appends the first `bytes` bytes of data for the host and a successful completion: short data is copied in place, longer
    /// data stays where it is until it is sent, as the next loan of this connection unless it is shared. Data behind more than
    /// [`LENT_BYTES_MAX`] of unsent bytes is copied to a buffer of `pool`, so that little has to be copied at once when the host does
    /// not read. Nothing is appended if the pool has no buffer. REQUIRES: no data digest was negotiated.
    #[inline]
    pub fn write_data_and_success(
        &mut self,
        command_id: u16,
        data: DataRef<'_>,
        bytes: usize,
        dw0: u32,
        pool: &BufferPool,
    ) -> Received {
        let sent = &data.as_bytes()[..bytes];
        if bytes <= COPY_BYTES_MAX {
            self.write_short_data_and_success(command_id, sent, dw0, 0);
            return Received::Taken;
        }
        match data {
            DataRef::Shared(buffer) => {
                let kept = DataBuffer::Shared(buffer.clone());
                self.write_kept_data_and_success(command_id, kept, bytes, dw0);
                Received::Taken
            }
            DataRef::Borrowed(_) => {
                let Some(reservation) = pool.reserve(bytes) else { return Received::Refused };
                if self.send_buffer.unsent_bytes() + bytes > LENT_BYTES_MAX {
                    let mut buffer = reservation.into_buffer();
                    buffer.copy_from_slice(sent);
                    self.write_kept_data_and_success(command_id, buffer.into(), bytes, dw0);
                    return Received::Taken;
                }
                let loan = self.loans;
                self.loans += 1;
                self.write_long_data_and_success(
                    command_id,
                    ResponseData::Lent(loan, reservation),
                    bytes,
                    dw0,
                );
                Received::Lent(bytes)
            }
        }
    }

    /// Apart from data that is lent, which is moved less if only that is inlined.
    #[inline(never)]
    fn write_kept_data_and_success(&mut self, command_id: u16, buffer: DataBuffer, bytes: usize, dw0: u32) {
        self.write_long_data_and_success(command_id, ResponseData::Kept(buffer), bytes, dw0);
    }

    /// Appends the first `bytes` bytes of data by reference, and a successful completion.
    #[inline(always)]
    fn write_long_data_and_success(&mut self, command_id: u16, data: ResponseData, bytes: usize, dw0: u32) {
        self.send_buffer.push_reference(data, 0, bytes);
        let (header, cqe) = self.data_and_success(command_id, bytes, (dw0, 0));
        let PduWriter { send_buffer, params, .. } = self;
        send_buffer.append_before_value(|out| header.encode(Role::Controller, flags::LAST, params, out));
        send_buffer.append(|out| encode_response(&cqe, params, out));
    }

    /// Appends a copy of data, at most [`COPY_BYTES_MAX`] bytes, and a successful completion. REQUIRES: no data digest was negotiated.
    #[inline]
    pub fn write_short_data_and_success(&mut self, command_id: u16, sent: &[u8], dw0: u32, dw1: u32) {
        let (header, cqe) = self.data_and_success(command_id, sent.len(), (dw0, dw1));
        let PduWriter { send_buffer, params, .. } = self;
        send_buffer.append_up_to(sent.len() + HEADERS_BYTES_MAX, |out| {
            if !sent.is_empty() {
                header.encode(Role::Controller, flags::LAST, params, out);
                out.extend_from_slice(sent);
            }
            encode_response(&cqe, params, out);
        });
    }

    /// The headers of `bytes` bytes of data and a successful completion.
    #[inline(always)]
    fn data_and_success(
        &mut self,
        command_id: u16,
        bytes: usize,
        (dw0, dw1): (u32, u32),
    ) -> (DataHeader, Cqe) {
        let cqe = Cqe::new(command_id, self.advance_sq_head(), Status::SUCCESS, dw0, dw1);
        (data_header(command_id, bytes), cqe)
    }

    /// Appends bytes `from..to` of `buffer` as data for the host; keeps the buffer until they are sent.
    ///
    /// # Panics
    /// If the range is empty or exceeds the buffer.
    #[inline]
    pub fn write_data_buffer(&mut self, command_id: u16, buffer: DataBuffer, from: usize, to: usize) {
        assert!(from < to && to <= buffer.len(), "{from}..{to} of {buffer:?}");
        self.write_data_header(command_id, to - from);
        let digest = self.params.data_digest.then(|| crc32c(&buffer[from..to]));
        self.send_buffer.push_buffer(buffer, from, to);
        if let Some(digest) = digest {
            self.send_buffer.push_copy(&digest.to_le_bytes());
        }
    }

    /// Appends an R2T for the first `bytes` bytes of a command's data, with this transfer tag.
    pub fn write_r2t(&mut self, command_id: u16, tag: u16, bytes: u32) {
        let range = DataHeader { command_id, tag, offset: 0, bytes };
        self.send_buffer.append(|out| range.encode_ready_to_transfer(&self.params, out));
    }

    #[inline]
    fn write_data_header(&mut self, command_id: u16, bytes: usize) {
        let data = data_header(command_id, bytes);
        self.send_buffer.append(|out| data.encode(Role::Controller, flags::LAST, &self.params, out));
    }

    fn write_data_digest(&mut self, data: &[u8]) {
        if self.params.data_digest {
            self.send_buffer.push_copy(&crc32c(data).to_le_bytes());
        }
    }
}

/// The header of a command's data, which is in one PDU.
#[inline(always)]
fn data_header(command_id: u16, bytes: usize) -> DataHeader {
    DataHeader { command_id, tag: 0, offset: 0, bytes: bytes as u32 }
}
