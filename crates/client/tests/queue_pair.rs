//! State machine of one queue against hand-written PDUs: every transition, every protocol error, random bytes.

use octokv_base::{Buffer, BufferPool, Key, NamespaceId, Nanos, Prng, crc32c};
use octokv_client::command::{Command, CommandKind, EncodedCommand, Value};
use octokv_client::completion::CommandCompletion;
use octokv_client::error::ConnectionError;
use octokv_client::queue_pair::{QueueEvent, QueuePair};
use octokv_client::{ControllerInfo, StoreMode};
use octokv_wire::pdu::{
    self, DataHeader, IcResponse, NegotiatedParams, PduHeader, Role, UncheckedCommonHeader, flags,
};
use octokv_wire::vendor::{FEATURE_LONG_KEYS, VendorCapabilities};
use octokv_wire::{Cqe, PduError, Status};

struct QueueFixture {
    queue: QueuePair,
    pool: BufferPool,
    params: NegotiatedParams,
    completed: Vec<CommandCompletion>,
}

const H2C_DATA_BYTES_MAX: u32 = 4096;

impl QueueFixture {
    fn opening(header_digest: bool, data_digest: bool) -> QueueFixture {
        let params = NegotiatedParams { header_digest, data_digest, ..NegotiatedParams::initial() };
        let queue = QueuePair::new(4, 8192, header_digest, data_digest);
        QueueFixture { queue, pool: BufferPool::new(1 << 24), params, completed: Vec::new() }
    }

    fn open_with(header_digest: bool, data_digest: bool) -> QueueFixture {
        let mut fixture = QueueFixture::opening(header_digest, data_digest);
        assert_eq!(fixture.take_sent().len(), pdu::IC_BYTES);
        let granted = IcResponse {
            controller_alignment: 4,
            header_digest,
            data_digest,
            h2c_data_bytes_max: H2C_DATA_BYTES_MAX,
        };
        fixture.receive(&granted.encode()).unwrap();
        assert_eq!(fixture.queue.free_slots(), 4);
        fixture
    }

    fn open() -> QueueFixture {
        QueueFixture::open_with(false, false)
    }

    /// The unsent bytes of the queue; they count as sent.
    fn take_sent(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while !self.queue.is_flushed() {
            let mut slices = Vec::new();
            self.queue.slices(&mut slices);
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
            // In two steps, so that parts are split.
            self.queue.advance_sent(bytes.len().div_ceil(2));
            all.extend_from_slice(&bytes[..bytes.len().div_ceil(2)]);
        }
        all
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<usize, ConnectionError> {
        let completed = &mut self.completed;
        self.queue.receive(bytes, &self.pool, &mut |event| {
            if let QueueEvent::Completed(completion) = event {
                completed.push(completion);
            }
        })
    }

    fn submit(&mut self, command: Command<'_>, token: u64) {
        let capabilities =
            VendorCapabilities { version: 1, key_bytes_max: 1024, features: FEATURE_LONG_KEYS };
        let info = ControllerInfo { vendor_capabilities: Some(capabilities), ..ControllerInfo::for_tests() };
        let encoded = EncodedCommand::new(command, NamespaceId(1), &info).unwrap();
        self.queue.submit(encoded, token, Nanos::from_secs(1), &self.pool);
    }

    fn retrieve(&mut self, limit_bytes: u32) {
        self.submit(Command::Retrieve { key: key(1), limit_bytes }, 7);
        self.take_sent();
    }

    fn store(&mut self, bytes: usize) {
        let value = Value::Shared(pattern(bytes).into());
        self.submit(Command::Store { key: key(1), value, mode: StoreMode::Upsert }, 9);
    }

    fn response(&self, id: u16, status: Status, dw0: u32) -> Vec<u8> {
        let mut out = Vec::new();
        pdu::encode_response(&Cqe::new(id, 0, status, dw0, 0), &self.params, &mut out);
        out
    }

    fn data(&self, id: u16, offset: u32, bits: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let header = DataHeader { command_id: id, tag: 0, offset, bytes: bytes.len() as u32 };
        header.encode(Role::Controller, bits, &self.params, &mut out);
        out.extend_from_slice(bytes);
        if self.params.trailer_bytes(bytes.len()) > 0 {
            out.extend_from_slice(&crc32c(bytes).to_le_bytes());
        }
        out
    }

    fn r2t(&self, id: u16, tag: u16, offset: u32, bytes: u32) -> Vec<u8> {
        let mut out = Vec::new();
        DataHeader { command_id: id, tag, offset, bytes }.encode_ready_to_transfer(&self.params, &mut out);
        out
    }

    fn pdu_error(&mut self, bytes: &[u8]) -> PduError {
        match self.receive(bytes) {
            Err(ConnectionError::Protocol(error)) => {
                let term_req = self.take_sent();
                assert_eq!(term_req[0], pdu::PduType::H2cTermReq as u8, "a termination request is sent");
                assert_eq!(u16::from_le_bytes([term_req[8], term_req[9]]), error.fatal_error_status() as u16);
                error
            }
            other => panic!("{other:?} is not a protocol error"),
        }
    }
}

fn key(bytes: usize) -> Key {
    Key::new(&vec![b'k'; bytes]).unwrap()
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251) as u8).collect()
}

/// The data PDUs that a host sent as (offset, last, data), digests verified.
fn data_pdus(mut bytes: &[u8], params: &NegotiatedParams) -> Vec<(u32, bool, Vec<u8>)> {
    let params = &NegotiatedParams { receive_data_bytes_max: u32::MAX, ..*params };
    let mut found = Vec::new();
    while let Some(common_header) = UncheckedCommonHeader::new(bytes) {
        let layout = common_header.check(Role::Controller, params).unwrap();
        let (prefix, size) = (layout.prefix_bytes as usize, layout.data_bytes as usize);
        let data = bytes[prefix..prefix + size].to_vec();
        if layout.trailer_bytes > 0 {
            assert_eq!(crc32c(&data).to_le_bytes(), bytes[prefix + size..layout.pdu_bytes()]);
        }
        match layout.decode_header(bytes).unwrap() {
            PduHeader::Data(header) => found.push((header.offset, layout.is_last(), data)),
            PduHeader::Command(_) => found.push((u32::MAX, true, data)),
            _ => panic!("a host sends commands and data only"),
        }
        bytes = &bytes[layout.pdu_bytes()..];
    }
    assert!(bytes.is_empty());
    found
}

#[test]
fn no_command_is_accepted_before_initialization() {
    let fixture = QueueFixture::opening(false, false);
    assert_eq!((fixture.queue.free_slots(), fixture.queue.in_flight()), (0, 0));
}

#[test]
fn digests_that_were_not_requested_are_an_error() {
    let mut fixture = QueueFixture::opening(false, true);
    fixture.take_sent();
    let granted = IcResponse {
        controller_alignment: 4,
        header_digest: true,
        data_digest: true,
        h2c_data_bytes_max: H2C_DATA_BYTES_MAX,
    };
    assert_eq!(fixture.pdu_error(&granted.encode()), PduError::DigestBits { bits: 3 });
}

#[test]
fn a_small_value_travels_in_the_capsule() {
    for (bytes, digests) in [(0, false), (5, false), (5, true), (1025, false), (8192, true)] {
        let mut fixture = QueueFixture::open_with(digests, digests);
        fixture.store(bytes);
        let sent = fixture.take_sent();
        assert_eq!(data_pdus(&sent, &fixture.params), [(u32::MAX, true, pattern(bytes))]);
        fixture.receive(&fixture.response(0, Status::SUCCESS, 0)).unwrap();
        assert_eq!(
            (fixture.completed.len(), fixture.completed[0].token, fixture.queue.in_flight()),
            (1, 9, 0)
        );
    }
}

#[test]
fn a_large_value_is_sent_in_pieces_after_ready_to_transfer() {
    for digests in [false, true] {
        let mut fixture = QueueFixture::open_with(digests, digests);
        fixture.store(10_000);
        assert_eq!(data_pdus(&fixture.take_sent(), &fixture.params), [(u32::MAX, true, vec![])]);
        fixture.receive(&fixture.r2t(0, 3, 0, 9000)).unwrap();
        let sent = fixture.take_sent();
        fixture.receive(&fixture.r2t(0, 4, 9000, 1000)).unwrap();
        let rest = fixture.take_sent();
        let all = pattern(10_000);
        let first = data_pdus(&sent, &fixture.params);
        let want = [
            (0, false, all[..4096].to_vec()),
            (4096, false, all[4096..8192].to_vec()),
            (8192, true, all[8192..9000].to_vec()),
        ];
        assert_eq!(first, want);
        assert_eq!(data_pdus(&rest, &fixture.params), [(9000, true, all[9000..].to_vec())]);
        fixture.receive(&fixture.response(0, Status::SUCCESS, 0)).unwrap();
        assert_eq!((fixture.completed.len(), fixture.queue.free_slots()), (1, 4));
    }
}

#[test]
fn a_long_key_precedes_its_value_in_the_capsule_and_in_transfers() {
    let want = |bytes| [vec![b'k'; 1000], pattern(bytes)].concat();
    let mut fixture = QueueFixture::open_with(false, true);
    let value = Value::Shared(pattern(2000).into());
    fixture.submit(Command::Store { key: key(1000), value, mode: StoreMode::Upsert }, 1);
    assert_eq!(data_pdus(&fixture.take_sent(), &fixture.params), [(u32::MAX, true, want(2000))]);
    let value = Value::Slice(&pattern(9000));
    fixture.submit(Command::Store { key: key(1000), value, mode: StoreMode::Upsert }, 2);
    fixture.take_sent();
    fixture.receive(&fixture.r2t(1, 0, 0, 10_000)).unwrap();
    let sent = data_pdus(&fixture.take_sent(), &fixture.params);
    let joined: Vec<u8> = sent.iter().flat_map(|(_, _, data)| data.clone()).collect();
    assert_eq!(joined, want(9000));
}

#[test]
fn a_value_that_is_still_being_sent_outlives_an_early_completion() {
    let mut fixture = QueueFixture::open();
    fixture.store(8000);
    fixture.receive(&fixture.response(0, Status::KV_CAPACITY_EXCEEDED, 0)).unwrap();
    assert_eq!((fixture.completed.len(), fixture.queue.free_slots()), (1, 3), "the slot is still in use");
    let sent = fixture.take_sent();
    assert_eq!(data_pdus(&sent, &fixture.params), [(u32::MAX, true, pattern(8000))]);
    assert_eq!(fixture.queue.free_slots(), 4);
}

#[test]
fn data_arrives_in_any_pieces_and_under_every_digest() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        for step in [1, 7, 24, 1000, 100_000] {
            let mut fixture = QueueFixture::open_with(header_digest, data_digest);
            fixture.retrieve(10_000);
            let value = pattern(6000);
            let stream = [
                fixture.data(0, 0, 0, &value[..4000]),
                fixture.data(0, 4000, flags::LAST, &value[4000..]),
                fixture.response(0, Status::SUCCESS, 6000),
            ]
            .concat();
            let mut received_bytes = Vec::new();
            for chunk in stream.chunks(step) {
                received_bytes.extend_from_slice(chunk);
                let consumed = fixture.receive(&received_bytes).unwrap();
                received_bytes.drain(..consumed);
            }
            assert!(received_bytes.is_empty());
            let completion = fixture.completed.pop().expect("one completion");
            assert_eq!(
                (&*completion.data, completion.digest_ok, completion.cqe.dw0.get()),
                (&value[..], true, 6000)
            );
        }
    }
}

#[test]
fn success_with_the_last_data_stands_for_a_completion() {
    let mut fixture = QueueFixture::open_with(false, true);
    fixture.submit(Command::List { start: key(1), limit_bytes: 64 }, 5);
    fixture.take_sent();
    fixture.receive(&fixture.data(0, 0, flags::LAST | flags::SUCCESS, &[0; 64])).unwrap();
    assert_eq!(
        (fixture.completed.len(), fixture.completed[0].token, fixture.completed[0].data.len()),
        (1, 5, 64)
    );
}

#[test]
fn a_wrong_data_digest_fails_its_command_alone() {
    let mut fixture = QueueFixture::open_with(false, true);
    fixture.retrieve(100);
    let mut data = fixture.data(0, 0, flags::LAST, &[1; 100]);
    data[30] ^= 1;
    fixture.receive(&data).unwrap();
    fixture.receive(&fixture.response(0, Status::SUCCESS, 100)).unwrap();
    assert!(!fixture.completed[0].digest_ok);
    assert_eq!(fixture.queue.free_slots(), 4);
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let mut fixture = QueueFixture::open_with(true, false);
    fixture.retrieve(100);
    let mut response = fixture.response(0, Status::SUCCESS, 0);
    response[9] ^= 1;
    assert!(matches!(fixture.pdu_error(&response), PduError::HeaderDigest { .. }));
}

#[test]
fn pdus_that_break_the_protocol_are_errors() {
    let data = |id, offset, bytes: usize| QueueFixture::open().data(id, offset, flags::LAST, &vec![0; bytes]);
    let ready = |id, offset, bytes| QueueFixture::open().r2t(id, 5, offset, bytes);
    let response = |id| QueueFixture::open().response(id, Status::SUCCESS, 0);
    let granted = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: false,
        h2c_data_bytes_max: H2C_DATA_BYTES_MAX,
    };
    let table: &[(&str, Vec<u8>, PduError)] = &[
        ("a completion of no command", response(2), PduError::CommandId { command_id: 2 }),
        ("a completion out of range", response(999), PduError::CommandId { command_id: 999 }),
        ("data for no command", data(3, 0, 10), PduError::CommandId { command_id: 3 }),
        ("data beyond the buffer", data(0, 0, 101), PduError::DataRange { offset: 0, bytes: 101 }),
        ("data out of order", data(0, 50, 10), PduError::DataRange { offset: 50, bytes: 10 }),
        ("a transfer for no command", ready(3, 0, 1), PduError::CommandId { command_id: 3 }),
        ("a transfer of a read", ready(0, 0, 1), PduError::DataRange { offset: 0, bytes: 1 }),
        ("a transfer beyond the value", ready(1, 0, 9001), PduError::DataRange { offset: 0, bytes: 9001 }),
        ("a transfer out of order", ready(1, 1, 10), PduError::DataRange { offset: 1, bytes: 10 }),
        ("a transfer of nothing", ready(1, 0, 0), PduError::DataRange { offset: 0, bytes: 0 }),
        ("a second ICResp", granted.encode().to_vec(), PduError::UnexpectedPduType { kind: 1 }),
    ];
    for (what, bytes, want) in table {
        let mut fixture = QueueFixture::open();
        fixture.retrieve(100);
        fixture.store(9000);
        fixture.take_sent();
        assert_eq!(fixture.pdu_error(bytes), *want, "{what}");
    }
    let mut fixture = QueueFixture::opening(false, false);
    fixture.take_sent();
    assert_eq!(fixture.pdu_error(&response(0)), PduError::UnexpectedPduType { kind: 5 });
    let mut fixture = QueueFixture::open();
    fixture.retrieve(100);
    let early = fixture.data(0, 0, flags::SUCCESS, &[0; 10]);
    assert_eq!(fixture.pdu_error(&early), PduError::Flags { flags: flags::SUCCESS });
}

#[test]
fn a_range_may_be_requested_once() {
    let mut fixture = QueueFixture::open();
    fixture.store(9000);
    fixture.take_sent();
    fixture.receive(&fixture.r2t(0, 1, 0, 9000)).unwrap();
    fixture.take_sent();
    let again = fixture.r2t(0, 1, 0, 9000);
    assert_eq!(fixture.pdu_error(&again), PduError::DataRange { offset: 0, bytes: 9000 });
}

#[test]
fn a_term_req_of_the_peer_ends_the_connection_with_its_status() {
    let mut fixture = QueueFixture::open();
    let mut out = Vec::new();
    let term = pdu::TermReq { fatal_status: 2, information: 9 };
    term.encode(Role::Controller, &[1, 2, 3], &mut out);
    assert_eq!(
        fixture.receive(&out).unwrap_err(),
        ConnectionError::Terminated { fatal_status: 2, information: 9 }
    );
}

#[test]
fn an_aborted_queue_reports_its_commands_and_which_were_sent() {
    let mut fixture = QueueFixture::open();
    fixture.retrieve(100);
    fixture.store(10);
    let mut aborted_commands = Vec::new();
    fixture.queue.abort_all(|command| aborted_commands.push((command.token, command.kind, command.sent)));
    let retrieve = CommandKind::Retrieve { limit_bytes: 100 };
    assert_eq!(aborted_commands, [(7, retrieve, true), (9, CommandKind::Store, false)]);
    assert_eq!(fixture.queue.free_slots(), 0);
}

#[test]
fn an_aborted_queue_sends_no_byte_of_a_command() {
    let mut fixture = QueueFixture::open();
    // Of the first one a part is sent, and its outcome is unknown anyway.
    fixture.store(5000);
    fixture.queue.advance_sent(100);
    fixture.store(10);
    fixture.store(9000);
    fixture.queue.abort_all(|_| {});
    assert!(fixture.queue.is_flushed() && fixture.take_sent().is_empty());
}

#[test]
fn after_a_protocol_error_only_the_rest_of_a_pdu_precedes_the_termination_request() {
    let mut fixture = QueueFixture::open();
    fixture.store(5000);
    fixture.store(5000);
    let both = fixture.take_sent().len();
    let mut fixture = QueueFixture::open();
    for bytes in [5000, 5000, 10, 9000] {
        fixture.store(bytes);
    }
    fixture.queue.advance_sent(both / 2 + 100);
    let wrong = fixture.response(9, Status::SUCCESS, 0);
    fixture.receive(&wrong).unwrap_err();
    let mut outcomes = Vec::new();
    fixture.queue.abort_all(|command| outcomes.push(command.sent));
    assert_eq!(outcomes, [true, true, false, false]);
    let sent = fixture.take_sent();
    assert_eq!(sent[both / 2 - 100], pdu::PduType::H2cTermReq as u8);
    assert_eq!(sent.len(), both / 2 - 100 + 24 + wrong.len());
}

#[test]
fn a_buffer_is_sent_without_a_copy() {
    let mut fixture = QueueFixture::open();
    let mut buffer = Buffer::zeroed(8000);
    buffer.copy_from_slice(&pattern(8000));
    let value = Value::Buffer { buffer, from: 64, to: 5064 };
    fixture.submit(Command::Store { key: key(2), value, mode: StoreMode::AddOnly }, 1);
    let sent = data_pdus(&fixture.take_sent(), &fixture.params);
    assert_eq!(sent, [(u32::MAX, true, pattern(8000)[64..5064].to_vec())]);
}

#[test]
fn an_overdue_command_is_detected() {
    let mut fixture = QueueFixture::open();
    fixture.retrieve(1);
    assert!(!fixture.queue.is_overdue(Nanos(999_999_999)) && fixture.queue.is_overdue(Nanos::from_secs(1)));
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Prng::new(11);
    for round in 0..20_000u32 {
        let (header_digest, data_digest) = (round & 1 != 0, round & 2 != 0);
        let mut fixture = QueueFixture::open_with(header_digest, data_digest);
        fixture.retrieve(3000);
        fixture.store(9000);
        fixture.take_sent();
        let mut stream = Vec::new();
        for _ in 0..6 {
            let id = random.below(3) as u16;
            let (offset, bytes) = (random.below(3) as u32 * 1000, random.below(2000) as usize);
            let mut pdu = match random.below(5) {
                0 => fixture.response(id, Status::SUCCESS, random.next_u64() as u32),
                1 => fixture.r2t(id, 1, offset, bytes as u32),
                2 => fixture.data(id, offset, flags::LAST | flags::SUCCESS, &pattern(bytes)),
                _ => fixture.data(id, offset, random.below(16) as u8 & !3, &pattern(bytes)),
            };
            if random.one_in(3) {
                let at = random.below(pdu.len() as u64) as usize;
                pdu[at] = random.next_u64() as u8;
            }
            stream.append(&mut pdu);
        }
        let mut received_bytes = Vec::new();
        while !stream.is_empty() {
            let count = (random.below(3000) as usize + 1).min(stream.len());
            received_bytes.extend(stream.drain(..count));
            match fixture.receive(&received_bytes) {
                Ok(consumed) => drop(received_bytes.drain(..consumed)),
                Err(_) => break,
            }
        }
        fixture.queue.abort_all(|_| {});
        fixture.take_sent();
    }
}
