//! Receives PDUs from the head of a connection's bytes: framing, digests, H2CData.
//!
//! ```text
//!           H2CData header             last byte, no digest
//!    Head ─────────────────▶ Data ──────────────────────────▶ Head
//!      ▲                       │ last byte                      ▲
//!      │ any other PDU, whole  └────────▶ Digest ── 4 bytes ────┘
//!      └──(ICReq, H2CTermReq, capsule)
//! ```
//! Invariants: the data of an H2CData PDU is consumed as it arrives and copied to its command's buffer, so
//! the receive buffer never holds a whole one; any other PDU is consumed whole and is no longer than the
//! longest capsule; a PDU that must wait is not consumed at all. H2CData never stalls, since it frees the
//! resources that stalled commands wait for.

use super::state::{
    Capsule, CloseReason, Connection, ConnectionState, DataDigest, ReceiveResult, ReceiveState, StallReason,
};
use crate::direct::DirectBackend;
use crate::io_request::IoRequest;
use octokv_base::{BufferPool, Nanos, crc32c};
use octokv_wire::pdu::{
    ADMIN_CAPSULE_DATA_BYTES, DIGEST_BYTES, DataHeader, IcResponse, NegotiatedParams, PduHeader, PduLayout,
    PduType, PlainCapsule, Role, UncheckedCommonHeader, UncheckedIc,
};
use octokv_wire::{PduError, Status};

/// The result of one step on the head of the bytes.
pub(super) enum ReceiveStep {
    /// Consumed so many bytes, at least one.
    Consumed(usize),
    /// The PDU is incomplete.
    NeedMoreBytes,
    /// The command waits for a resource.
    Stalled(StallReason),
}

impl Connection {
    pub(super) fn receive_pdus<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> ReceiveResult {
        self.grant_transfers(pool);
        let mut consumed_bytes = 0;
        let stalled = loop {
            let rest = &bytes[consumed_bytes..];
            let step = match self.accepts_groups() {
                true => self.receive_capsules(now, rest, pool, requests, direct),
                false => None,
            };
            match step.unwrap_or_else(|| self.receive_step(now, rest, pool, requests)) {
                ReceiveStep::Consumed(count) => consumed_bytes += count,
                ReceiveStep::NeedMoreBytes => break None,
                ReceiveStep::Stalled(reason) => break Some(reason),
            }
        };
        self.update_buffer_wait_pool(pool);
        ReceiveResult { consumed_bytes, stalled }
    }

    /// Receives the capsules at the head of the bytes: a group that need not wait, or one that may have to. `None` if there is
    /// none, or an unusual one.
    #[inline]
    fn receive_capsules<D: DirectBackend>(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
        direct: &mut D,
    ) -> Option<ReceiveStep> {
        let first = PlainCapsule::recognize(bytes, self.in_capsule_bytes_max())?;
        if direct.is_open() && direct.select(first.sqe.namespace()) {
            return self.receive_group(now, bytes, pool, requests, direct);
        }
        self.handle_plain_capsule(&first, pool, requests)
    }

    /// Whether the next byte is the first of a PDU.
    #[inline]
    pub(super) fn is_at_pdu_head(&self) -> bool {
        matches!(self.receive_state, ReceiveState::Head)
    }

    fn receive_step(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &BufferPool,
        requests: &mut Vec<IoRequest>,
    ) -> ReceiveStep {
        if matches!(self.state(), ConnectionState::Terminating { .. } | ConnectionState::Closed) {
            // Discards whatever the host sends after termination.
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
            // `UncheckedCommonHeader::check` rejects PDUs that only a controller sends.
            PduHeader::IcResponse(_) | PduHeader::Response(_) | PduHeader::ReadyToTransfer(_) => {
                unreachable!("a controller received {:?}", layout.pdu_type)
            }
        }
    }

    /// Validates the common header against the connection's state and limits.
    #[inline]
    pub(super) fn check_pdu(&self, unchecked: UncheckedCommonHeader) -> Result<PduLayout, PduError> {
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
        let data_bytes_max = match (layout.pdu_type, self.state()) {
            (PduType::H2cData, _) => self.target.config().h2c_data_bytes_max,
            (_, ConnectionState::Io(_)) => self.in_capsule_bytes_max(),
            // The queue type is unknown before Connect.
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

    /// The most bytes of data in a capsule of an I/O queue.
    #[inline]
    pub(super) fn in_capsule_bytes_max(&self) -> u32 {
        self.target.config().in_capsule_bytes
    }

    /// Terminates the connection and discards the rest of its bytes.
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
            receive_data_bytes_max: u32::MAX, // `check_pdu` limits each PDU type.
        };
        let ConnectionState::AwaitIcReq { deadline } = *self.state() else {
            unreachable!("`check_pdu` accepts an ICReq only in AwaitIcReq");
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

    /// Starts an H2CData, which must continue its transfer at the next offset.
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
            unreachable!("H2CData bytes outside of an H2CData PDU");
        };
        if bytes.is_empty() {
            return ReceiveStep::NeedMoreBytes;
        }
        let available = &bytes[..bytes.len().min(left as usize)];
        if has_digest {
            self.data_digest.0.update(available);
        }
        // A transfer ends only with its last byte, so its slot exists while its data arrives.
        let (_, transfer, buffer) =
            self.slots.receiving(slot).expect("the slot of an H2CData has a transfer");
        transfer.layout.copy(buffer, transfer.received_bytes, available);
        self.advance_data(available.len() as u32, pool, requests);
        ReceiveStep::Consumed(available.len())
    }

    /// Accounts for `count` bytes of data that were stored in the buffer.
    fn advance_data(&mut self, count: u32, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let ReceiveState::Data { slot, left, has_digest } = &mut self.receive_state else {
            unreachable!("H2CData bytes outside of an H2CData PDU");
        };
        *left -= count;
        let (slot, is_complete, has_digest) = (*slot, *left == 0, *has_digest);
        let (_, transfer, _) = self.slots.receiving(slot).expect("the slot of an H2CData has a transfer");
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

    pub(super) fn current_payload_buffer(&mut self) -> Option<&mut [u8]> {
        let ReceiveState::Data { slot, left, .. } = self.receive_state else { return None };
        let (_, transfer, buffer) = self.slots.receiving(slot)?;
        let (at, run) = transfer.layout.locate(transfer.received_bytes);
        let bytes = run.min(left as usize);
        buffer.get_mut(at..at + bytes)
    }

    pub(super) fn advance_payload(&mut self, count: usize, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let ReceiveState::Data { slot, has_digest, .. } = self.receive_state else {
            panic!("{count} bytes were received but no payload is expected");
        };
        let (_, transfer, buffer) =
            self.slots.receiving(slot).expect("the slot of an H2CData has a transfer");
        let (at, run) = transfer.layout.locate(transfer.received_bytes);
        assert!(count <= run, "{count} bytes were received into a payload buffer of {run}");
        if has_digest {
            self.data_digest.0.update(&buffer[at..at + count]);
        }
        self.advance_data(count as u32, pool, requests);
    }

    /// Ends an H2CData, and submits the command if its data is complete.
    fn finish_h2c_data(&mut self, slot: u16, pool: &BufferPool, requests: &mut Vec<IoRequest>) {
        let (command_id, transfer, _) =
            self.slots.receiving(slot).expect("the slot of an H2CData has a transfer");
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
}
