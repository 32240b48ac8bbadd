//! PDUs from the head of a connection's bytes: framing, digests, transfers.
//!
//! ```text
//!          H2CData header             last byte, no digest
//!   Head ─────────────────▶ Data ──────────────────────────▶ Head
//!     ▲                       │ last byte                      ▲
//!     │ any other PDU, whole  └────────▶ Digest ── 4 bytes ────┘
//!     └──(ICReq, H2CTermReq, capsule)
//! ```
//! Invariants: an H2CData PDU is taken as its bytes come, straight to the buffer of its command, so that
//! the receive buffer never has to hold one; any other PDU is taken whole, none is longer than the
//! longest capsule; a PDU that cannot be worked on now is not taken at all. Data is never in the way of
//! a stall, since it frees what others wait for.

use crate::connection::{CloseReason, Connection, ConnectionState, ReceiveResult, StallReason};
use crate::io_request::IoRequest;
use octokv_base::{BufferPool, Crc32c, Nanos, crc32c};
use octokv_wire::pdu::{
    ADMIN_CAPSULE_DATA_BYTES, DIGEST_BYTES, DataHeader, IcResponse, NegotiatedParams, PduHeader, PduLayout,
    PduType, Role, UncheckedCommonHeader, UncheckedIc,
};
use octokv_wire::{PduError, Status};

/// Where in a PDU the next byte is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReceiveState {
    /// At its beginning.
    Head,
    /// In the data of an H2CData for this slot; `left` bytes of it are to come, a digest perhaps behind.
    Data { slot: u16, left: u32, has_digest: bool },
    /// At the digest behind that data, which must be this.
    Digest { slot: u16, computed: u32 },
}

/// The digest of the data of the H2CData under way, as far as it is here.
pub(crate) struct DataDigest(Crc32c);

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

/// What one step did with the head of the bytes.
pub(crate) enum ReceiveStep {
    /// Took so many of them, at least one.
    Consumed(usize),
    /// Needs more of them.
    NeedMoreBytes,
    /// Must wait for something else.
    Stalled(StallReason),
}

/// A command's capsule behind its entry.
#[derive(Clone, Copy)]
pub(crate) struct Capsule<'a> {
    /// The data in it.
    pub data: &'a [u8],
    /// The data's digest was wrong.
    pub has_bad_digest: bool,
}

impl Connection {
    pub(crate) fn receive_pdus(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveResult {
        self.grant_transfers(pool);
        let mut consumed_bytes = 0;
        let stalled = loop {
            match self.receive_step(now, &bytes[consumed_bytes..], pool, requests) {
                ReceiveStep::Consumed(count) => consumed_bytes += count,
                ReceiveStep::NeedMoreBytes => break None,
                ReceiveStep::Stalled(reason) => break Some(reason),
            }
        };
        self.update_buffer_wait_pool(pool);
        ReceiveResult { consumed_bytes, stalled }
    }

    /// Keeps the pool at hand while a transfer waits for a buffer of it.
    fn update_buffer_wait_pool(&mut self, pool: &BufferPool) {
        let is_waiting = self.slots.first_waiting().is_some();
        if is_waiting != self.buffer_wait_pool.is_some() {
            self.buffer_wait_pool = is_waiting.then(|| pool.clone());
        }
    }

    /// Asks for data that waited for buffers, where there are some now.
    #[inline]
    pub(crate) fn grant_waiting_transfers(&mut self) {
        if let Some(pool) = self.buffer_wait_pool.take() {
            self.grant_transfers(&pool);
            self.update_buffer_wait_pool(&pool);
        }
    }

    fn receive_step(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveStep {
        if matches!(self.state(), ConnectionState::Terminating { .. } | ConnectionState::Closed) {
            // What the host still sends is of no interest.
            return if bytes.is_empty() {
                ReceiveStep::NeedMoreBytes
            } else {
                ReceiveStep::Consumed(bytes.len())
            };
        }
        match self.receive_state {
            ReceiveState::Head => self.receive_pdu(now, bytes, pool, requests),
            ReceiveState::Data { .. } => self.receive_data(bytes, pool, requests),
            ReceiveState::Digest { slot, computed } => {
                let Some(received) = bytes.first_chunk::<DIGEST_BYTES>() else {
                    return ReceiveStep::NeedMoreBytes;
                };
                self.receive_state = ReceiveState::Head;
                if u32::from_le_bytes(*received) != computed {
                    self.counters.digest_errors += 1;
                    if let Some((_, transfer, _)) = self.slots.receiving(slot) {
                        transfer.has_bad_digest = true;
                    }
                }
                self.finish_h2c_data(slot, pool, requests);
                ReceiveStep::Consumed(DIGEST_BYTES)
            }
        }
    }

    fn receive_pdu(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveStep {
        let Some(unchecked) = UncheckedCommonHeader::new(bytes) else { return ReceiveStep::NeedMoreBytes };
        let layout = match self.check_pdu(unchecked) {
            Ok(layout) => layout,
            Err(error) => return self.terminate_and_discard(now, error, bytes),
        };
        let needed = match layout.pdu_type {
            PduType::H2cData => layout.prefix_bytes as usize,
            _ => layout.pdu_bytes(),
        };
        if bytes.len() < needed {
            return ReceiveStep::NeedMoreBytes;
        }
        let header = match layout.decode_header(bytes) {
            Ok(header) => header,
            Err(error) => return self.terminate_and_discard(now, error, bytes),
        };
        match header {
            PduHeader::Command(sqe) => {
                let capsule = self.parse_capsule(&layout, bytes);
                match self.handle_command(now, sqe, capsule, pool, requests) {
                    Ok(None) => ReceiveStep::Consumed(needed),
                    Ok(Some(stall)) => ReceiveStep::Stalled(stall),
                    Err(error) => self.terminate_and_discard(now, error, bytes),
                }
            }
            PduHeader::Data(data) => match self.begin_h2c_data(&layout, &data) {
                Ok(()) => ReceiveStep::Consumed(needed),
                Err(error) => self.terminate_and_discard(now, error, bytes),
            },
            PduHeader::IcRequest(request) => match self.handle_ic_request(request) {
                Ok(()) => ReceiveStep::Consumed(needed),
                Err(error) => self.terminate_and_discard(now, error, bytes),
            },
            PduHeader::TermReq(terminate) => {
                self.close(CloseReason::HostTerminated(terminate));
                ReceiveStep::Consumed(bytes.len())
            }
            // `Unchecked::check` lets only what a controller may receive through.
            PduHeader::IcResponse(_) | PduHeader::Response(_) | PduHeader::ReadyToTransfer(_) => {
                unreachable!("a controller received {:?}", layout.pdu_type)
            }
        }
    }

    /// Where the next PDU's parts lie, if it may come now.
    fn check_pdu(&self, unchecked: UncheckedCommonHeader) -> Result<PduLayout, PduError> {
        let layout = unchecked.check(Role::Controller, &self.pdu_writer.params)?;
        let awaits_ic = matches!(self.state(), ConnectionState::AwaitIcReq { .. });
        let is_expected = match layout.pdu_type {
            PduType::IcRequest => awaits_ic,
            PduType::H2cTermReq => true,
            PduType::CapsuleCommand => !awaits_ic,
            PduType::H2cData => matches!(self.state(), ConnectionState::Io(_)),
            _ => false,
        };
        if !is_expected {
            return Err(PduError::UnexpectedPduType { kind: layout.pdu_type as u8 });
        }
        let config = self.target.config();
        let data_bytes_max = match (layout.pdu_type, self.state()) {
            (PduType::H2cData, _) => config.h2c_data_bytes_max,
            (_, ConnectionState::Io(_)) => config.in_capsule_bytes,
            // Connect comes before its queue is known.
            _ => ADMIN_CAPSULE_DATA_BYTES,
        };
        if layout.data_bytes > data_bytes_max {
            return Err(match layout.pdu_type {
                PduType::H2cData => PduError::DataLimitExceeded { bytes: layout.data_bytes },
                _ => PduError::PduLength { pdu_bytes: layout.pdu_bytes() as u32 },
            });
        }
        Ok(layout)
    }

    /// Ends the connection with all that it sent.
    fn terminate_and_discard(&mut self, now: Nanos, error: PduError, bytes: &[u8]) -> ReceiveStep {
        self.terminate(now, error, &bytes[..bytes.len().min(128)]);
        ReceiveStep::Consumed(bytes.len())
    }

    fn handle_ic_request(&mut self, request: UncheckedIc) -> Result<(), PduError> {
        let request = request.check_request()?;
        let host_data_bytes_max = self.target.config().h2c_data_bytes_max;
        let response = IcResponse {
            controller_alignment: 4,
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            h2c_data_bytes_max: host_data_bytes_max,
        };
        self.pdu_writer.send_buffer.push_copy(&response.encode());
        self.pdu_writer.params = NegotiatedParams {
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            send_alignment: request.host_alignment,
            receive_data_bytes_max: u32::MAX, // `check_pdu` has a bound for each kind.
        };
        let ConnectionState::AwaitIcReq { deadline } = *self.state() else {
            unreachable!("`check_pdu` lets ICReq through only where it is awaited");
        };
        self.set_state(ConnectionState::AwaitConnect { deadline });
        Ok(())
    }

    fn parse_capsule<'a>(&mut self, layout: &PduLayout, bytes: &'a [u8]) -> Capsule<'a> {
        let from = layout.prefix_bytes as usize;
        let to = from + layout.data_bytes as usize;
        let data = &bytes[from..to];
        let has_bad_digest = layout.trailer_bytes > 0 && {
            let received = [bytes[to], bytes[to + 1], bytes[to + 2], bytes[to + 3]];
            crc32c(data) != u32::from_le_bytes(received)
        };
        Capsule { data, has_bad_digest }
    }

    /// An H2CData begins: it must go on where its transfer stands.
    fn begin_h2c_data(&mut self, layout: &PduLayout, data: &DataHeader) -> Result<(), PduError> {
        let found = self.slots.receiving(data.tag);
        let (command_id, transfer, _) = found.ok_or(PduError::TransferTag { tag: data.tag })?;
        if command_id != data.command_id {
            return Err(PduError::CommandId { command_id: data.command_id });
        }
        let left = transfer.expected_bytes - transfer.received_bytes;
        if data.bytes != layout.data_bytes {
            return Err(PduError::PduLength { pdu_bytes: layout.pdu_bytes() as u32 });
        }
        if data.offset != transfer.received_bytes || data.bytes == 0 || data.bytes > left {
            return Err(PduError::DataRange { offset: data.offset, bytes: data.bytes });
        }
        if layout.is_last() && data.bytes < left {
            return Err(PduError::LastFlag { flags: layout.flags });
        }
        let has_digest = layout.trailer_bytes > 0;
        if has_digest {
            self.data_digest = DataDigest::new();
        }
        self.receive_state = ReceiveState::Data { slot: data.tag, left: data.bytes, has_digest };
        Ok(())
    }

    fn receive_data(
        &mut self,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveStep {
        let ReceiveState::Data { slot, left, has_digest } = self.receive_state else {
            unreachable!("data is taken only within data");
        };
        if bytes.is_empty() {
            return ReceiveStep::NeedMoreBytes;
        }
        let here = &bytes[..bytes.len().min(left as usize)];
        if has_digest {
            self.data_digest.0.update(here);
        }
        // A transfer ends only by its last byte: its slot is there as long as its data comes.
        let (_, transfer, buffer) = self.slots.receiving(slot).expect("a transfer whose data comes");
        transfer.layout.copy(buffer, transfer.received_bytes, here);
        self.advance_data(here.len() as u32, pool, requests);
        ReceiveStep::Consumed(here.len())
    }

    /// The next `count` bytes of data are in their place.
    fn advance_data(&mut self, count: u32, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let ReceiveState::Data { slot, left, has_digest } = &mut self.receive_state else {
            unreachable!("data is taken only within data");
        };
        *left -= count;
        let (slot, is_complete, has_digest) = (*slot, *left == 0, *has_digest);
        let (_, transfer, _) = self.slots.receiving(slot).expect("a transfer whose data comes");
        transfer.received_bytes += count;
        if !is_complete {
            return;
        }
        if has_digest {
            self.receive_state = ReceiveState::Digest { slot, computed: self.data_digest.0.finish() };
        } else {
            self.receive_state = ReceiveState::Head;
            self.finish_h2c_data(slot, pool, requests);
        }
    }

    pub(crate) fn current_payload_buffer(&mut self) -> Option<&mut [u8]> {
        let ReceiveState::Data { slot, left, .. } = self.receive_state else { return None };
        let (_, transfer, buffer) = self.slots.receiving(slot)?;
        let (at, run) = transfer.layout.locate(transfer.received_bytes);
        let room = run.min(left as usize);
        buffer.get_mut(at..at + room)
    }

    pub(crate) fn advance_payload(&mut self, count: usize, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let ReceiveState::Data { slot, has_digest, .. } = self.receive_state else {
            panic!("{count} bytes were received into no landing");
        };
        let (_, transfer, buffer) = self.slots.receiving(slot).expect("a transfer whose data comes");
        let (at, run) = transfer.layout.locate(transfer.received_bytes);
        assert!(count <= run, "{count} bytes were received into {run}");
        if has_digest {
            self.data_digest.0.update(&buffer[at..at + count]);
        }
        self.advance_data(count as u32, pool, requests);
    }

    /// An H2CData is over: the transfer is, too, when nothing is missing.
    fn finish_h2c_data(&mut self, slot: u16, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let (command_id, transfer, _) = self.slots.receiving(slot).expect("a transfer whose data came");
        if transfer.received_bytes < transfer.expected_bytes {
            return;
        }
        if transfer.has_bad_digest {
            self.slots.release(slot);
            self.respond(command_id, Status::TRANSIENT_TRANSPORT_ERROR, 0, 0);
        } else {
            self.submit_received(slot, requests);
        }
        self.grant_transfers(pool);
    }

    /// Gives buffers to the transfers that wait for them, in turn, and asks for their data.
    pub(crate) fn grant_transfers(&mut self, pool: &BufferPool) {
        let share = self.target.config().receive_bytes_max;
        while let Some((slot, bytes)) = self.slots.first_waiting() {
            if !can_grant(
                bytes,
                self.slots.receiving_bytes(),
                share,
                pool.in_use_bytes(),
                pool.budget_bytes(),
            ) {
                return;
            }
            let Some(buffer) = pool.take(bytes) else { return };
            let (command_id, expected) = self.slots.start_receiving(slot, buffer, self.last_tick_at);
            self.pdu_writer.write_r2t(command_id, slot, expected);
        }
    }
}

/// What transfers may take of a pool of this budget: the rest is for commands that wait for nothing but
/// the engine, so that these always end, and no connection waits with its own data behind such a command.
pub(crate) const fn transfer_budget(budget_bytes: usize, is_first: bool) -> usize {
    budget_bytes - budget_bytes / if is_first { 8 } else { 4 }
}

/// Whether a connection with `open` bytes of transfers under way, of its `share`, may begin one more when
/// `out` bytes of the pool's budget are in use. An unused pool grants any.
fn can_grant(bytes: usize, open: usize, share: usize, out: usize, budget: usize) -> bool {
    let is_first = open == 0;
    let within_share = is_first || open + bytes <= share;
    within_share && (out == 0 || out + bytes <= transfer_budget(budget, is_first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_granted_within_the_share_and_leave_a_rest_of_the_pool() {
        let table = [
            // want, bytes, open, share, out, budget
            (true, 10, 0, 5, 0, 80), // The first may exceed the share.
            (true, 10, 20, 30, 20, 80),
            (false, 11, 20, 30, 20, 80),
            (true, 10, 10, 99, 50, 80),
            (false, 11, 10, 99, 50, 80), // A quarter of the pool is left.
            (true, 10, 0, 99, 60, 80),
            (false, 11, 0, 99, 60, 80), // An eighth, when it is the connection's first.
            (true, 90, 0, 99, 0, 80),   // The pool itself refuses this one.
        ];
        for (want, bytes, open, share, out, budget) in table {
            assert_eq!(can_grant(bytes, open, share, out, budget), want, "{bytes} {open} {share} {out}");
        }
    }
}
