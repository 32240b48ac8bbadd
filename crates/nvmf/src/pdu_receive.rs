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

use crate::connection::{Closing, Connection, Consumed, Stall, State};
use crate::io_request::Request;
use octokv_base::{Crc32c, Nanos, Pool, crc32c};
use octokv_wire::pdu::{
    ADMIN_CAPSULE_DATA_BYTES, DIGEST_BYTES, Data, End, Frame, Header, IcResponse, Kind, Link, Unchecked,
    UncheckedIc,
};
use octokv_wire::{Fault, Status};

/// Where in a PDU the next byte is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Inflow {
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
pub(crate) enum Step {
    /// Took so many of them, at least one.
    Took(usize),
    /// Needs more of them.
    Starved,
    /// Must wait for something else.
    Stalled(Stall),
}

/// A command's capsule behind its entry.
#[derive(Clone, Copy)]
pub(crate) struct Capsule<'a> {
    /// The data in it.
    pub data: &'a [u8],
    /// The data's digest was wrong.
    pub is_damaged: bool,
}

impl Connection {
    pub(crate) fn take_in(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        pool: &Pool,
        requests: &mut Vec<Request>,
    ) -> Consumed {
        self.grant(pool);
        let mut taken = 0;
        let stalled = loop {
            match self.step(now, &bytes[taken..], pool, requests) {
                Step::Took(count) => taken += count,
                Step::Starved => break None,
                Step::Stalled(why) => break Some(why),
            }
        };
        self.remember_pool(pool);
        Consumed { bytes: taken, stalled }
    }

    /// Keeps the pool at hand while a transfer waits for a buffer of it.
    fn remember_pool(&mut self, pool: &Pool) {
        let is_waiting = self.slots.first_waiting().is_some();
        if is_waiting != self.wanted_pool.is_some() {
            self.wanted_pool = is_waiting.then(|| pool.clone());
        }
    }

    /// Asks for data that waited for buffers, where there are some now.
    #[inline]
    pub(crate) fn grant_waiting(&mut self) {
        if let Some(pool) = self.wanted_pool.take() {
            self.grant(&pool);
            self.remember_pool(&pool);
        }
    }

    fn step(&mut self, now: Nanos, bytes: &[u8], pool: &Pool, requests: &mut Vec<Request>) -> Step {
        if matches!(self.state(), State::Terminating { .. } | State::Closed) {
            // What the host still sends is of no interest.
            return if bytes.is_empty() { Step::Starved } else { Step::Took(bytes.len()) };
        }
        match self.inflow {
            Inflow::Head => self.take_pdu(now, bytes, pool, requests),
            Inflow::Data { .. } => self.take_data(bytes, pool, requests),
            Inflow::Digest { slot, computed } => {
                let Some(received) = bytes.first_chunk::<DIGEST_BYTES>() else { return Step::Starved };
                self.inflow = Inflow::Head;
                if u32::from_le_bytes(*received) != computed {
                    self.counts.digest_errors += 1;
                    if let Some((_, transfer, _)) = self.slots.receiving(slot) {
                        transfer.damaged = true;
                    }
                }
                self.end_data(slot, pool, requests);
                Step::Took(DIGEST_BYTES)
            }
        }
    }

    fn take_pdu(&mut self, now: Nanos, bytes: &[u8], pool: &Pool, requests: &mut Vec<Request>) -> Step {
        let Some(unchecked) = Unchecked::new(bytes) else { return Step::Starved };
        let frame = match self.frame(unchecked) {
            Ok(frame) => frame,
            Err(fault) => return self.fail(now, fault, bytes),
        };
        let needed = match frame.kind {
            Kind::HostData => frame.prefix_bytes as usize,
            _ => frame.pdu_bytes(),
        };
        if bytes.len() < needed {
            return Step::Starved;
        }
        let header = match frame.header(bytes) {
            Ok(header) => header,
            Err(fault) => return self.fail(now, fault, bytes),
        };
        match header {
            Header::Command(sqe) => {
                let capsule = self.open_capsule(&frame, bytes);
                match self.take_command(now, sqe, capsule, pool, requests) {
                    Ok(None) => Step::Took(needed),
                    Ok(Some(stall)) => Step::Stalled(stall),
                    Err(fault) => self.fail(now, fault, bytes),
                }
            }
            Header::Data(data) => match self.begin_data(&frame, &data) {
                Ok(()) => Step::Took(needed),
                Err(fault) => self.fail(now, fault, bytes),
            },
            Header::IcRequest(request) => match self.initialize(request) {
                Ok(()) => Step::Took(needed),
                Err(fault) => self.fail(now, fault, bytes),
            },
            Header::Terminate(terminate) => {
                self.close(Closing::HostTerminated(terminate));
                Step::Took(bytes.len())
            }
            // `Unchecked::check` lets only what a controller may receive through.
            Header::IcResponse(_) | Header::Response(_) | Header::ReadyToTransfer(_) => {
                unreachable!("a controller received {:?}", frame.kind)
            }
        }
    }

    /// Where the next PDU's parts lie, if it may come now.
    fn frame(&self, unchecked: Unchecked) -> Result<Frame, Fault> {
        let frame = unchecked.check(End::Controller, &self.replies.link)?;
        let awaits_ic = matches!(self.state(), State::AwaitIcReq { .. });
        let is_expected = match frame.kind {
            Kind::IcRequest => awaits_ic,
            Kind::HostTerminate => true,
            Kind::CapsuleCommand => !awaits_ic,
            Kind::HostData => matches!(self.state(), State::Io(_)),
            _ => false,
        };
        if !is_expected {
            return Err(Fault::UnexpectedKind { kind: frame.kind as u8 });
        }
        let settings = self.target.settings();
        let data_bytes_max = match (frame.kind, self.state()) {
            (Kind::HostData, _) => settings.max_h2c_data,
            (_, State::Io(_)) => settings.in_capsule_bytes,
            // Connect comes before its queue is known.
            _ => ADMIN_CAPSULE_DATA_BYTES,
        };
        if frame.data_bytes > data_bytes_max {
            return Err(match frame.kind {
                Kind::HostData => Fault::DataBytes { bytes: frame.data_bytes },
                _ => Fault::PduBytes { pdu_bytes: frame.pdu_bytes() as u32 },
            });
        }
        Ok(frame)
    }

    /// Ends the connection with all that it sent.
    fn fail(&mut self, now: Nanos, fault: Fault, bytes: &[u8]) -> Step {
        self.terminate(now, fault, &bytes[..bytes.len().min(128)]);
        Step::Took(bytes.len())
    }

    fn initialize(&mut self, request: UncheckedIc) -> Result<(), Fault> {
        let request = request.check_request()?;
        let host_data_bytes_max = self.target.settings().max_h2c_data;
        let response = IcResponse {
            controller_alignment: 4,
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            host_data_bytes_max,
        };
        self.replies.outbox.copy(&response.encode());
        self.replies.link = Link {
            header_digest: request.header_digest,
            data_digest: request.data_digest,
            send_alignment: request.host_alignment,
            receive_data_bytes_max: u32::MAX, // `frame` has a bound for each kind.
        };
        let State::AwaitIcReq { until } = *self.state() else {
            unreachable!("`frame` lets ICReq through only where it is awaited");
        };
        self.set_state(State::AwaitConnect { until });
        Ok(())
    }

    fn open_capsule<'a>(&mut self, frame: &Frame, bytes: &'a [u8]) -> Capsule<'a> {
        let from = frame.prefix_bytes as usize;
        let to = from + frame.data_bytes as usize;
        let data = &bytes[from..to];
        let is_damaged = frame.trailer_bytes > 0 && {
            let received = [bytes[to], bytes[to + 1], bytes[to + 2], bytes[to + 3]];
            crc32c(data) != u32::from_le_bytes(received)
        };
        Capsule { data, is_damaged }
    }

    /// An H2CData begins: it must go on where its transfer stands.
    fn begin_data(&mut self, frame: &Frame, data: &Data) -> Result<(), Fault> {
        let found = self.slots.receiving(data.tag);
        let (command_id, transfer, _) = found.ok_or(Fault::TransferTag { tag: data.tag })?;
        if command_id != data.command_id {
            return Err(Fault::CommandId { command_id: data.command_id });
        }
        let left = transfer.expected - transfer.received;
        if data.bytes != frame.data_bytes {
            return Err(Fault::PduBytes { pdu_bytes: frame.pdu_bytes() as u32 });
        }
        if data.offset != transfer.received || data.bytes == 0 || data.bytes > left {
            return Err(Fault::DataRange { offset: data.offset, bytes: data.bytes });
        }
        if frame.is_last() && data.bytes < left {
            return Err(Fault::LastFlag { flags: frame.flags });
        }
        let has_digest = frame.trailer_bytes > 0;
        if has_digest {
            self.data_digest = DataDigest::new();
        }
        self.inflow = Inflow::Data { slot: data.tag, left: data.bytes, has_digest };
        Ok(())
    }

    fn take_data(&mut self, bytes: &[u8], pool: &Pool, requests: &mut Vec<Request>) -> Step {
        let Inflow::Data { slot, left, has_digest } = self.inflow else {
            unreachable!("data is taken only within data");
        };
        if bytes.is_empty() {
            return Step::Starved;
        }
        let here = &bytes[..bytes.len().min(left as usize)];
        if has_digest {
            self.data_digest.0.update(here);
        }
        // A transfer ends only by its last byte: its slot is there as long as its data comes.
        let (_, transfer, buffer) = self.slots.receiving(slot).expect("a transfer whose data comes");
        transfer.landing.copy(buffer, transfer.received, here);
        self.move_on(here.len() as u32, pool, requests);
        Step::Took(here.len())
    }

    /// The next `count` bytes of data are in their place.
    fn move_on(&mut self, count: u32, pool: &Pool, requests: &mut Vec<Request>) {
        let Inflow::Data { slot, left, has_digest } = &mut self.inflow else {
            unreachable!("data is taken only within data");
        };
        *left -= count;
        let (slot, is_complete, has_digest) = (*slot, *left == 0, *has_digest);
        let (_, transfer, _) = self.slots.receiving(slot).expect("a transfer whose data comes");
        transfer.received += count;
        if !is_complete {
            return;
        }
        if has_digest {
            self.inflow = Inflow::Digest { slot, computed: self.data_digest.0.finish() };
        } else {
            self.inflow = Inflow::Head;
            self.end_data(slot, pool, requests);
        }
    }

    pub(crate) fn landing_place(&mut self) -> Option<&mut [u8]> {
        let Inflow::Data { slot, left, .. } = self.inflow else { return None };
        let (_, transfer, buffer) = self.slots.receiving(slot)?;
        let (at, run) = transfer.landing.place(transfer.received);
        let room = run.min(left as usize);
        buffer.get_mut(at..at + room)
    }

    pub(crate) fn take_landed(&mut self, count: usize, pool: &Pool, requests: &mut Vec<Request>) {
        let Inflow::Data { slot, has_digest, .. } = self.inflow else {
            panic!("{count} bytes were received into no landing");
        };
        let (_, transfer, buffer) = self.slots.receiving(slot).expect("a transfer whose data comes");
        let (at, run) = transfer.landing.place(transfer.received);
        assert!(count <= run, "{count} bytes were received into {run}");
        if has_digest {
            self.data_digest.0.update(&buffer[at..at + count]);
        }
        self.move_on(count as u32, pool, requests);
    }

    /// An H2CData is over: the transfer is, too, when nothing is missing.
    fn end_data(&mut self, slot: u16, pool: &Pool, requests: &mut Vec<Request>) {
        let (command_id, transfer, _) = self.slots.receiving(slot).expect("a transfer whose data came");
        if transfer.received < transfer.expected {
            return;
        }
        if transfer.damaged {
            self.slots.release(slot);
            self.respond(command_id, Status::TRANSIENT_TRANSPORT_ERROR, 0, 0);
        } else {
            self.launch_received(slot, requests);
        }
        self.grant(pool);
    }

    /// Gives buffers to the transfers that wait for them, in turn, and asks for their data.
    pub(crate) fn grant(&mut self, pool: &Pool) {
        let share = self.target.settings().receive_bytes_max;
        while let Some((slot, bytes)) = self.slots.first_waiting() {
            if !may_grant(bytes, self.slots.receiving_bytes(), share, pool.out_bytes(), pool.budget_bytes()) {
                return;
            }
            let Some(buffer) = pool.take(bytes) else { return };
            let (command_id, expected) = self.slots.start_receiving(slot, buffer, self.ticked);
            self.replies.ask(command_id, slot, expected);
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
fn may_grant(bytes: usize, open: usize, share: usize, out: usize, budget: usize) -> bool {
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
            assert_eq!(may_grant(bytes, open, share, out, budget), want, "{bytes} {open} {share} {out}");
        }
    }
}
