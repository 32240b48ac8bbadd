//! The machine of one queue against PDUs written by hand: every transition, every fault, any bytes.

use octokv_base::{Buffer, Key, NamespaceId, Nanos, Pool, Random, crc32c};
use octokv_client::command::{Command, Kind, Prepared, Value};
use octokv_client::error::Lost;
use octokv_client::queue_pair::{Done, Event, Queue};
use octokv_client::{Facts, StoreMode};
use octokv_wire::pdu::{self, Data as Range, End, Header, IcResponse, Link, Unchecked, flags};
use octokv_wire::vendor::{Announcement, FEATURE_LONG_KEYS};
use octokv_wire::{Cqe, Fault, Status};

struct Bench {
    queue: Queue,
    pool: Pool,
    link: Link,
    done: Vec<Done>,
}

const HOST_DATA: u32 = 4096;

impl Bench {
    fn opening(header_digest: bool, data_digest: bool) -> Bench {
        let link = Link { header_digest, data_digest, ..Link::plain() };
        let queue = Queue::new(4, 8192, header_digest, data_digest);
        Bench { queue, pool: Pool::new(1 << 24), link, done: Vec::new() }
    }

    fn open_with(header_digest: bool, data_digest: bool) -> Bench {
        let mut bench = Bench::opening(header_digest, data_digest);
        assert_eq!(bench.outgoing().len(), pdu::IC_BYTES);
        let granted = IcResponse {
            controller_alignment: 4,
            header_digest,
            data_digest,
            host_data_bytes_max: HOST_DATA,
        };
        bench.receive(&granted.encode()).unwrap();
        assert_eq!(bench.queue.room(), 4);
        bench
    }

    fn open() -> Bench {
        Bench::open_with(false, false)
    }

    /// What the queue has to send; it counts as sent.
    fn outgoing(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while !self.queue.is_flushed() {
            let mut slices = Vec::new();
            self.queue.slices(&mut slices);
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
            // In two goes, so that parts are split.
            self.queue.sent(bytes.len().div_ceil(2));
            all.extend_from_slice(&bytes[..bytes.len().div_ceil(2)]);
        }
        all
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<usize, Lost> {
        let done = &mut self.done;
        self.queue.receive(bytes, &self.pool, &mut |event| {
            if let Event::Done(one) = event {
                done.push(one);
            }
        })
    }

    fn submit(&mut self, command: Command<'_>, token: u64) {
        let announcement = Announcement { version: 1, key_bytes_max: 1024, features: FEATURE_LONG_KEYS };
        let facts = Facts { announcement: Some(announcement), ..Facts::for_tests() };
        let prepared = Prepared::new(command, NamespaceId(1), &facts).unwrap();
        self.queue.submit(prepared, token, Nanos::from_secs(1), &self.pool);
    }

    fn retrieve(&mut self, limit_bytes: u32) {
        self.submit(Command::Retrieve { key: key(1), limit_bytes }, 7);
        self.outgoing();
    }

    fn store(&mut self, bytes: usize) {
        let value = Value::Shared(pattern(bytes).into());
        self.submit(Command::Store { key: key(1), value, mode: StoreMode::Upsert }, 9);
    }

    fn response(&self, id: u16, status: Status, dw0: u32) -> Vec<u8> {
        let mut out = Vec::new();
        pdu::encode_response(&Cqe::new(id, 0, status, dw0, 0), &self.link, &mut out);
        out
    }

    fn data(&self, id: u16, offset: u32, bits: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let range = Range { command_id: id, tag: 0, offset, bytes: bytes.len() as u32 };
        range.encode(End::Controller, bits, &self.link, &mut out);
        out.extend_from_slice(bytes);
        if self.link.trailer_bytes(bytes.len()) > 0 {
            out.extend_from_slice(&crc32c(bytes).to_le_bytes());
        }
        out
    }

    fn ready(&self, id: u16, tag: u16, offset: u32, bytes: u32) -> Vec<u8> {
        let mut out = Vec::new();
        Range { command_id: id, tag, offset, bytes }.encode_ready_to_transfer(&self.link, &mut out);
        out
    }

    fn fault(&mut self, bytes: &[u8]) -> Fault {
        match self.receive(bytes) {
            Err(Lost::Fault(fault)) => {
                let said = self.outgoing();
                assert_eq!(said[0], pdu::Kind::HostTerminate as u8, "the peer is told");
                assert_eq!(u16::from_le_bytes([said[8], said[9]]), fault.fatal() as u16);
                fault
            }
            other => panic!("{other:?} is not a fault"),
        }
    }
}

fn key(bytes: usize) -> Key {
    Key::new(&vec![b'k'; bytes]).unwrap()
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251) as u8).collect()
}

/// The data PDUs in what a host sent: (offset, last, data), digests checked.
fn data_pdus(mut bytes: &[u8], link: &Link) -> Vec<(u32, bool, Vec<u8>)> {
    let link = &Link { receive_data_bytes_max: u32::MAX, ..*link };
    let mut found = Vec::new();
    while let Some(unchecked) = Unchecked::new(bytes) {
        let frame = unchecked.check(End::Controller, link).unwrap();
        let (prefix, size) = (frame.prefix_bytes as usize, frame.data_bytes as usize);
        let data = bytes[prefix..prefix + size].to_vec();
        if frame.trailer_bytes > 0 {
            assert_eq!(crc32c(&data).to_le_bytes(), bytes[prefix + size..frame.pdu_bytes()]);
        }
        match frame.header(bytes).unwrap() {
            Header::Data(range) => found.push((range.offset, frame.is_last(), data)),
            Header::Command(_) => found.push((u32::MAX, true, data)),
            _ => panic!("a host sends commands and data"),
        }
        bytes = &bytes[frame.pdu_bytes()..];
    }
    assert!(bytes.is_empty());
    found
}

#[test]
fn no_command_goes_before_the_connection_is_initialised() {
    let bench = Bench::opening(false, false);
    assert_eq!((bench.queue.room(), bench.queue.in_flight()), (0, 0));
}

#[test]
fn digests_that_nobody_asked_for_are_refused() {
    let mut bench = Bench::opening(false, true);
    bench.outgoing();
    let granted = IcResponse {
        controller_alignment: 4,
        header_digest: true,
        data_digest: true,
        host_data_bytes_max: HOST_DATA,
    };
    assert_eq!(bench.fault(&granted.encode()), Fault::DigestBits { bits: 3 });
}

#[test]
fn a_small_value_travels_in_the_capsule() {
    for (bytes, digests) in [(0, false), (5, false), (5, true), (1025, false), (8192, true)] {
        let mut bench = Bench::open_with(digests, digests);
        bench.store(bytes);
        let sent = bench.outgoing();
        assert_eq!(data_pdus(&sent, &bench.link), [(u32::MAX, true, pattern(bytes))]);
        bench.receive(&bench.response(0, Status::SUCCESS, 0)).unwrap();
        assert_eq!((bench.done.len(), bench.done[0].token, bench.queue.in_flight()), (1, 9, 0));
    }
}

#[test]
fn a_large_value_waits_for_ready_to_transfer_and_comes_in_pieces() {
    for digests in [false, true] {
        let mut bench = Bench::open_with(digests, digests);
        bench.store(10_000);
        assert_eq!(data_pdus(&bench.outgoing(), &bench.link), [(u32::MAX, true, vec![])]);
        bench.receive(&bench.ready(0, 3, 0, 9000)).unwrap();
        let sent = bench.outgoing();
        bench.receive(&bench.ready(0, 4, 9000, 1000)).unwrap();
        let rest = bench.outgoing();
        let all = pattern(10_000);
        let first = data_pdus(&sent, &bench.link);
        let want = [
            (0, false, all[..4096].to_vec()),
            (4096, false, all[4096..8192].to_vec()),
            (8192, true, all[8192..9000].to_vec()),
        ];
        assert_eq!(first, want);
        assert_eq!(data_pdus(&rest, &bench.link), [(9000, true, all[9000..].to_vec())]);
        bench.receive(&bench.response(0, Status::SUCCESS, 0)).unwrap();
        assert_eq!((bench.done.len(), bench.queue.room()), (1, 4));
    }
}

#[test]
fn a_long_key_precedes_its_value_in_the_capsule_and_in_transfers() {
    let want = |bytes| [vec![b'k'; 1000], pattern(bytes)].concat();
    let mut bench = Bench::open_with(false, true);
    let value = Value::Shared(pattern(2000).into());
    bench.submit(Command::Store { key: key(1000), value, mode: StoreMode::Upsert }, 1);
    assert_eq!(data_pdus(&bench.outgoing(), &bench.link), [(u32::MAX, true, want(2000))]);
    let value = Value::Slice(&pattern(9000));
    bench.submit(Command::Store { key: key(1000), value, mode: StoreMode::Upsert }, 2);
    bench.outgoing();
    bench.receive(&bench.ready(1, 0, 0, 10_000)).unwrap();
    let sent = data_pdus(&bench.outgoing(), &bench.link);
    let joined: Vec<u8> = sent.iter().flat_map(|(_, _, data)| data.clone()).collect();
    assert_eq!(joined, want(9000));
}

#[test]
fn a_value_that_is_still_being_sent_outlives_an_early_completion() {
    let mut bench = Bench::open();
    bench.store(8000);
    bench.receive(&bench.response(0, Status::KV_CAPACITY_EXCEEDED, 0)).unwrap();
    assert_eq!((bench.done.len(), bench.queue.room()), (1, 3), "the slot is kept");
    let sent = bench.outgoing();
    assert_eq!(data_pdus(&sent, &bench.link), [(u32::MAX, true, pattern(8000))]);
    assert_eq!(bench.queue.room(), 4);
}

#[test]
fn data_arrives_in_any_pieces_and_under_every_digest() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        for step in [1, 7, 24, 1000, 100_000] {
            let mut bench = Bench::open_with(header_digest, data_digest);
            bench.retrieve(10_000);
            let value = pattern(6000);
            let stream = [
                bench.data(0, 0, 0, &value[..4000]),
                bench.data(0, 4000, flags::LAST, &value[4000..]),
                bench.response(0, Status::SUCCESS, 6000),
            ]
            .concat();
            let mut held = Vec::new();
            for piece in stream.chunks(step) {
                held.extend_from_slice(piece);
                let taken = bench.receive(&held).unwrap();
                held.drain(..taken);
            }
            assert!(held.is_empty());
            let done = bench.done.pop().expect("one completion");
            assert_eq!((&*done.data, done.digest_ok, done.cqe.dw0.get()), (&value[..], true, 6000));
        }
    }
}

#[test]
fn success_with_the_last_data_stands_for_a_completion() {
    let mut bench = Bench::open_with(false, true);
    bench.submit(Command::List { start: key(1), limit_bytes: 64 }, 5);
    bench.outgoing();
    bench.receive(&bench.data(0, 0, flags::LAST | flags::SUCCESS, &[0; 64])).unwrap();
    assert_eq!((bench.done.len(), bench.done[0].token, bench.done[0].data.len()), (1, 5, 64));
}

#[test]
fn a_wrong_data_digest_fails_its_command_alone() {
    let mut bench = Bench::open_with(false, true);
    bench.retrieve(100);
    let mut data = bench.data(0, 0, flags::LAST, &[1; 100]);
    data[30] ^= 1;
    bench.receive(&data).unwrap();
    bench.receive(&bench.response(0, Status::SUCCESS, 100)).unwrap();
    assert!(!bench.done[0].digest_ok);
    assert_eq!(bench.queue.room(), 4);
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let mut bench = Bench::open_with(true, false);
    bench.retrieve(100);
    let mut response = bench.response(0, Status::SUCCESS, 0);
    response[9] ^= 1;
    assert!(matches!(bench.fault(&response), Fault::HeaderDigest { .. }));
}

#[test]
fn what_a_peer_may_not_send_is_a_fault() {
    let data = |id, offset, bytes: usize| Bench::open().data(id, offset, flags::LAST, &vec![0; bytes]);
    let ready = |id, offset, bytes| Bench::open().ready(id, 5, offset, bytes);
    let response = |id| Bench::open().response(id, Status::SUCCESS, 0);
    let granted = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: false,
        host_data_bytes_max: HOST_DATA,
    };
    let table: &[(&str, Vec<u8>, Fault)] = &[
        ("a completion of no command", response(2), Fault::CommandId { command_id: 2 }),
        ("a completion out of range", response(999), Fault::CommandId { command_id: 999 }),
        ("data for no command", data(3, 0, 10), Fault::CommandId { command_id: 3 }),
        ("data beyond the buffer", data(0, 0, 101), Fault::DataRange { offset: 0, bytes: 101 }),
        ("data out of order", data(0, 50, 10), Fault::DataRange { offset: 50, bytes: 10 }),
        ("a transfer for no command", ready(3, 0, 1), Fault::CommandId { command_id: 3 }),
        ("a transfer of a read", ready(0, 0, 1), Fault::DataRange { offset: 0, bytes: 1 }),
        ("a transfer beyond the value", ready(1, 0, 9001), Fault::DataRange { offset: 0, bytes: 9001 }),
        ("a transfer out of order", ready(1, 1, 10), Fault::DataRange { offset: 1, bytes: 10 }),
        ("a transfer of nothing", ready(1, 0, 0), Fault::DataRange { offset: 0, bytes: 0 }),
        ("a second ICResp", granted.encode().to_vec(), Fault::UnexpectedKind { kind: 1 }),
    ];
    for (what, bytes, want) in table {
        let mut bench = Bench::open();
        bench.retrieve(100);
        bench.store(9000);
        bench.outgoing();
        assert_eq!(bench.fault(bytes), *want, "{what}");
    }
    let mut bench = Bench::opening(false, false);
    bench.outgoing();
    assert_eq!(bench.fault(&response(0)), Fault::UnexpectedKind { kind: 5 });
    let mut bench = Bench::open();
    bench.retrieve(100);
    let early = bench.data(0, 0, flags::SUCCESS, &[0; 10]);
    assert_eq!(bench.fault(&early), Fault::Flags { flags: flags::SUCCESS });
}

#[test]
fn a_range_may_be_asked_for_once() {
    let mut bench = Bench::open();
    bench.store(9000);
    bench.outgoing();
    bench.receive(&bench.ready(0, 1, 0, 9000)).unwrap();
    bench.outgoing();
    let again = bench.ready(0, 1, 0, 9000);
    assert_eq!(bench.fault(&again), Fault::DataRange { offset: 0, bytes: 9000 });
}

#[test]
fn a_termination_by_the_peer_ends_the_connection_with_its_words() {
    let mut bench = Bench::open();
    let mut out = Vec::new();
    let term = pdu::Terminate { fatal: 2, information: 9 };
    term.encode(End::Controller, &[1, 2, 3], &mut out);
    assert_eq!(bench.receive(&out).unwrap_err(), Lost::Terminated { fatal: 2, information: 9 });
}

#[test]
fn a_lost_queue_names_its_commands_and_which_of_them_were_sent() {
    let mut bench = Bench::open();
    bench.retrieve(100);
    bench.store(10);
    let mut orphans = Vec::new();
    bench.queue.abandon(|orphan| orphans.push((orphan.token, orphan.kind, orphan.sent)));
    let retrieve = Kind::Retrieve { limit_bytes: 100 };
    assert_eq!(orphans, [(7, retrieve, true), (9, Kind::Store, false)]);
    assert_eq!(bench.queue.room(), 0);
}

#[test]
fn a_buffer_is_sent_from_where_it_lies() {
    let mut bench = Bench::open();
    let mut buffer = Buffer::zeroed(8000);
    buffer.copy_from_slice(&pattern(8000));
    let value = Value::Buffer { buffer, from: 64, to: 5064 };
    bench.submit(Command::Store { key: key(2), value, mode: StoreMode::AddOnly }, 1);
    let sent = data_pdus(&bench.outgoing(), &bench.link);
    assert_eq!(sent, [(u32::MAX, true, pattern(8000)[64..5064].to_vec())]);
}

#[test]
fn an_overdue_command_is_noticed() {
    let mut bench = Bench::open();
    bench.retrieve(1);
    assert!(!bench.queue.is_overdue(Nanos(999_999_999)) && bench.queue.is_overdue(Nanos::from_secs(1)));
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Random::new(11);
    for round in 0..20_000u32 {
        let (header_digest, data_digest) = (round & 1 != 0, round & 2 != 0);
        let mut bench = Bench::open_with(header_digest, data_digest);
        bench.retrieve(3000);
        bench.store(9000);
        bench.outgoing();
        let mut stream = Vec::new();
        for _ in 0..6 {
            let id = random.below(3) as u16;
            let (offset, bytes) = (random.below(3) as u32 * 1000, random.below(2000) as usize);
            let mut one = match random.below(5) {
                0 => bench.response(id, Status::SUCCESS, random.next_u64() as u32),
                1 => bench.ready(id, 1, offset, bytes as u32),
                2 => bench.data(id, offset, flags::LAST | flags::SUCCESS, &pattern(bytes)),
                _ => bench.data(id, offset, random.below(16) as u8 & !3, &pattern(bytes)),
            };
            if random.one_in(3) {
                let at = random.below(one.len() as u64) as usize;
                one[at] = random.next_u64() as u8;
            }
            stream.append(&mut one);
        }
        let mut held = Vec::new();
        while !stream.is_empty() {
            let count = (random.below(3000) as usize + 1).min(stream.len());
            held.extend(stream.drain(..count));
            match bench.receive(&held) {
                Ok(taken) => drop(held.drain(..taken)),
                Err(_) => break,
            }
        }
        bench.queue.abandon(|_| {});
        bench.outgoing();
    }
}
