//! Hosts that send invalid PDUs to a real node over TCP: each gets the specified response, and a well-behaved host is
//! not affected.
//!
//! FES of a termination request: 1 invalid header field, 2 sequence error, 3 header digest error, 4 data out of
//! range, 5 limit exceeded, 6 unsupported parameter (NVMe TCP Transport 1.1, 3.6.2.3). FEI is the offset of the
//! invalid field, or the received digest.

use octokv_adversary::attack_harness::{AttackHarness, NodeLimits};
use octokv_adversary::command_builder::{exist, flush, keep_alive, log_page, retrieve};
use octokv_adversary::command_builder::{random_value, store_by_r2t, store_in_capsule};
use octokv_adversary::raw_connection::{ConnectParams, RawConnection, ReceivedPdu, TargetAddr};
use octokv_wire::pdu::{DataHeader, IcRequest, IcResponse, Role, TermReq, flags};
use octokv_wire::{Cqe, Status};
use std::path::Path;

fn start_harness() -> AttackHarness {
    AttackHarness::start(Path::new(env!("CARGO_BIN_EXE_octokv")), NodeLimits::default()).unwrap()
}

/// The state of an attacker's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStage {
    TcpConnected,
    Opened,
    Admin,
    Discovery,
    Io,
    Transfer,
    Terminating,
}

const STAGES: [ConnectionStage; 7] = [
    ConnectionStage::TcpConnected,
    ConnectionStage::Opened,
    ConnectionStage::Admin,
    ConnectionStage::Discovery,
    ConnectionStage::Io,
    ConnectionStage::Transfer,
    ConnectionStage::Terminating,
];

/// A connection at this stage, the one that keeps its controller alive, and the open transfer.
struct Attacker {
    peer: RawConnection,
    _admin: Option<RawConnection>,
    transfer: Option<DataHeader>,
}

const TRANSFER_BYTES: u32 = 40_000;

fn attacker(victim: &TargetAddr, stage: ConnectionStage) -> Attacker {
    let alone = |peer| Attacker { peer, _admin: None, transfer: None };
    match stage {
        ConnectionStage::TcpConnected => alone(RawConnection::connect_tcp(victim).unwrap()),
        ConnectionStage::Opened => alone(RawConnection::connect_initialised(victim, false, false).unwrap()),
        ConnectionStage::Admin => alone(RawConnection::connect_admin(victim).unwrap().0),
        ConnectionStage::Discovery => alone(
            RawConnection::connect_admin_as(victim, &ConnectParams::discovery(), false, false).unwrap().0,
        ),
        ConnectionStage::Io | ConnectionStage::Transfer | ConnectionStage::Terminating => {
            let (admin, mut peer) = RawConnection::connect_pair(victim, 16).unwrap();
            let mut transfer = None;
            if stage == ConnectionStage::Transfer {
                let asked = peer.submit_and_await_r2t(&store_by_r2t(1, b"attacked", TRANSFER_BYTES)).unwrap();
                transfer = Some(asked);
            }
            if stage == ConnectionStage::Terminating {
                peer.send(&[0xff; 8]).unwrap();
                let received = peer.receive_pdu().unwrap();
                assert!(
                    matches!(
                        received,
                        ReceivedPdu::TermReq { fatal_error_status: 1, fatal_error_information: 0 }
                    ),
                    "{received:?}"
                );
            }
            Attacker { peer, _admin: Some(admin), transfer }
        }
    }
}

/// A valid PDU of this type.
fn pdu_of(kind: u8, attacker: &Attacker, stage: ConnectionStage) -> Vec<u8> {
    let mut bytes = Vec::new();
    let link = attacker.peer.params;
    match kind {
        0 => {
            let request = IcRequest {
                host_alignment: 4,
                header_digest: false,
                data_digest: false,
                open_transfers_max: 1,
            };
            bytes.extend(request.encode());
        }
        1 => {
            let response = IcResponse {
                controller_alignment: 4,
                header_digest: false,
                data_digest: false,
                h2c_data_bytes_max: 4096,
            };
            bytes.extend(response.encode());
        }
        2 => TermReq { fatal_status: 1, information: 7 }.encode(Role::Host, &[1; 24], &mut bytes),
        3 => TermReq { fatal_status: 1, information: 7 }.encode(Role::Controller, &[1; 24], &mut bytes),
        4 => {
            let io = matches!(
                stage,
                ConnectionStage::Io | ConnectionStage::Transfer | ConnectionStage::Terminating
            );
            bytes = attacker.peer.capsule(&if io { flush(9) } else { keep_alive(9) }, &[]);
        }
        5 => octokv_wire::pdu::encode_response(&Cqe::new(1, 0, Status::SUCCESS, 0, 0), &link, &mut bytes),
        6 => {
            let range =
                attacker.transfer.unwrap_or(DataHeader { command_id: 1, tag: 0, offset: 0, bytes: 64 });
            let data = random_value(3, range.bytes as usize);
            bytes = attacker.peer.h2c_data(range, &data, flags::LAST);
        }
        7 => {
            let range = DataHeader { command_id: 1, tag: 0, offset: 0, bytes: 64 };
            range.encode(Role::Controller, flags::LAST, &link, &mut bytes);
            bytes.extend([0; 64]);
        }
        9 => {
            let range = DataHeader { command_id: 1, tag: 0, offset: 0, bytes: 64 };
            range.encode_ready_to_transfer(&link, &mut bytes);
        }
        unknown => bytes.extend([unknown, 0, 24, 0, 24, 0, 0, 0].into_iter().chain([0; 16])),
    }
    bytes
}

/// The expected outcome of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PduOutcome {
    Opened,
    Answered(Status),
    Terminated { fatal: u16, information: u32 },
    Closed,
}

fn pdu_outcome(received: &ReceivedPdu) -> PduOutcome {
    match received {
        ReceivedPdu::IcResp => PduOutcome::Opened,
        ReceivedPdu::Response(cqe) => PduOutcome::Answered(cqe.status()),
        ReceivedPdu::TermReq { fatal_error_status: fatal, fatal_error_information: information } => {
            PduOutcome::Terminated { fatal: *fatal, information: *information }
        }
        ReceivedPdu::Closed => PduOutcome::Closed,
        other => panic!("{other:?}"),
    }
}

/// The specification's outcome of a PDU type at a stage.
fn specified_outcome(kind: u8, stage: ConnectionStage) -> PduOutcome {
    let out_of_sequence = PduOutcome::Terminated { fatal: 2, information: 0 };
    match (kind, stage) {
        // Input after the node's termination is ignored; the connection closes.
        (_, ConnectionStage::Terminating) => PduOutcome::Closed,
        // A host's own termination has no response.
        (2, _) => PduOutcome::Closed,
        (0, ConnectionStage::TcpConnected) => PduOutcome::Opened,
        (4, ConnectionStage::Opened) => PduOutcome::Answered(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
        (
            4,
            ConnectionStage::Admin
            | ConnectionStage::Discovery
            | ConnectionStage::Io
            | ConnectionStage::Transfer,
        ) => PduOutcome::Answered(Status::SUCCESS),
        // Unsolicited data has an unknown tag: byte 10 of its header.
        (6, ConnectionStage::Io) => PduOutcome::Terminated { fatal: 1, information: 10 },
        (6, ConnectionStage::Transfer) => PduOutcome::Answered(Status::SUCCESS),
        (0..=7 | 9, _) => out_of_sequence,
        _ => PduOutcome::Terminated { fatal: 1, information: 0 },
    }
}

#[test]
fn every_pdu_type_at_every_connection_stage_has_its_specified_outcome() {
    let harness = start_harness();
    let kinds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0x80, 0xff];
    for stage in STAGES {
        // In groups: a connection that the node ended stays open for a second, so that the host can read the reason.
        for kinds in kinds.chunks(7) {
            let mut attackers: Vec<_> =
                kinds.iter().map(|_| attacker(harness.target_addr(), stage)).collect();
            for (attacker, &kind) in attackers.iter_mut().zip(kinds) {
                let bytes = pdu_of(kind, attacker, stage);
                attacker.peer.send(&bytes).unwrap();
            }
            for (attacker, &kind) in attackers.iter_mut().zip(kinds) {
                let received = pdu_outcome(&attacker.peer.receive_pdu().unwrap());
                assert_eq!(received, specified_outcome(kind, stage), "PDU type {kind} at {stage:?}");
            }
        }
    }
    harness.finish().unwrap();
}

/// An I/O connection sends `bytes`; the node must send this termination request and then close.
#[track_caller]
fn assert_terminated(victim: &TargetAddr, what: &str, bytes: &[u8], fatal: u16, information: u32) {
    let mut attacker = attacker(victim, ConnectionStage::Io);
    attacker.peer.send(bytes).unwrap();
    let received = pdu_outcome(&attacker.peer.receive_pdu().unwrap());
    assert_eq!(received, PduOutcome::Terminated { fatal, information }, "{what}");
}

/// A capsule with 8 bytes of data and these first eight bytes.
fn header(flags: u8, header_bytes: u8, data_offset: u8, pdu_bytes: u32) -> Vec<u8> {
    let mut bytes = vec![4, flags, header_bytes, data_offset];
    bytes.extend(pdu_bytes.to_le_bytes());
    bytes.extend([0; 72]);
    bytes
}

#[test]
fn invalid_headers_terminate_the_connection_and_name_the_field() {
    let harness = start_harness();
    let victim = harness.target_addr();
    let limit = harness.limits.in_capsule_bytes;
    let table: &[(&str, Vec<u8>, u16, u32)] = &[
        ("plen 0", header(0, 72, 0, 0), 1, 4),
        ("plen shorter than the header", header(0, 72, 0, 71), 1, 4),
        ("plen longer than the header, without data", header(0, 72, 0, 73), 1, 4),
        ("plen huge, without data", header(0, 72, 0, u32::MAX), 1, 4),
        ("plen huge, with data", header(0, 72, 72, u32::MAX), 1, 4),
        ("plen before the data", header(0, 72, 80, 76), 1, 4),
        ("data beyond what a capsule carries", header(0, 72, 72, 72 + limit + 1), 1, 4),
        ("hlen 0", header(0, 0, 0, 72), 1, 2),
        ("hlen too small", header(0, 64, 0, 72), 1, 2),
        ("hlen too large", header(0, 76, 0, 76), 1, 2),
        ("pdo within the header", header(0, 72, 8, 80), 1, 3),
        ("pdo not aligned", header(0, 72, 73, 80), 1, 3),
        ("a header digest that was not agreed on", header(flags::HEADER_DIGEST, 72, 0, 76), 1, 1),
        ("a data digest that was not agreed on", header(flags::DATA_DIGEST, 72, 72, 84), 1, 1),
    ];
    for (what, bytes, fatal, information) in table {
        assert_terminated(victim, what, bytes, *fatal, *information);
    }
    // The same before any negotiation: the first PDU.
    let request =
        IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
    let table: &[(&str, usize, u8, u16, u32)] = &[
        ("hlen", 2, 127, 1, 2),
        ("plen", 4, 129, 1, 4),
        ("format version", 8, 1, 6, 8),
        ("alignment", 10, 32, 1, 10),
        ("digest bits", 11, 4, 1, 11),
    ];
    for &(what, at, byte, fatal, information) in table {
        let mut peer = RawConnection::connect_tcp(victim).unwrap();
        let mut bytes = request.encode();
        bytes[at] = byte;
        peer.send(&bytes).unwrap();
        assert_eq!(
            pdu_outcome(&peer.receive_pdu().unwrap()),
            PduOutcome::Terminated { fatal, information },
            "ICReq {what}"
        );
    }
    // The node closes by itself if the host does not.
    let mut peer = RawConnection::connect_tcp(victim).unwrap();
    peer.send(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").unwrap();
    assert!(peer.wait_closed().unwrap(), "a termination request first");
    harness.finish().unwrap();
}

#[test]
fn a_wrong_header_digest_ends_the_connection_and_a_wrong_data_digest_fails_that_command_alone() {
    let harness = start_harness();
    let victim = harness.target_addr();
    let params = ConnectParams::admin(victim);
    let (_admin, id) = RawConnection::connect_admin_as(victim, &params, true, true).unwrap();
    let open = || {
        let mut io = RawConnection::connect_initialised(victim, true, true).unwrap();
        let joined = io.fabrics_connect(&ConnectParams::io(victim, id, 1, 16)).unwrap();
        assert!(joined.status().is_success(), "{joined:?}");
        io
    };
    let mut io = open();
    let (old, new) = (random_value(1, 5000), random_value(2, 5000));
    assert!(io.execute(&store_in_capsule(1, b"digest", &old), &old).unwrap().status().is_success());

    let mut wrong = io.capsule(&store_in_capsule(2, b"digest", &new), &new);
    *wrong.last_mut().unwrap() ^= 1;
    io.send(&wrong).unwrap();
    let failed = io.receive_completion().unwrap();
    assert_eq!((failed.command_id.get(), failed.status()), (2, Status::TRANSIENT_TRANSPORT_ERROR));

    let large = random_value(3, 60_000);
    let asked = io.submit_and_await_r2t(&store_by_r2t(3, b"digest", large.len() as u32)).unwrap();
    let mut wrong = io.h2c_data(asked, &large, flags::LAST);
    *wrong.last_mut().unwrap() ^= 0x80;
    io.send(&wrong).unwrap();
    let failed = io.receive_completion().unwrap();
    assert_eq!((failed.command_id.get(), failed.status()), (3, Status::TRANSIENT_TRANSPORT_ERROR));

    // Only those commands fail: the connection continues, and the value is the old one.
    io.send(&io.capsule(&retrieve(4, b"digest", 8192), &[])).unwrap();
    let ReceivedPdu::C2hData(_, found) = io.receive_pdu().unwrap() else { panic!("no data") };
    assert!(found == old);
    assert_eq!(io.receive_completion().unwrap().dw0.get(), 5000);

    let mut wrong = io.capsule(&flush(5), &[]);
    let digest_at = wrong.len() - 4;
    wrong[digest_at] ^= 1;
    let received = u32::from_le_bytes(wrong[digest_at..].try_into().unwrap());
    io.send(&wrong).unwrap();
    assert_eq!(
        pdu_outcome(&io.receive_pdu().unwrap()),
        PduOutcome::Terminated { fatal: 3, information: received }
    );
    drop(io);

    // The same in an H2CData; its command is never executed.
    assert!(octokv_adversary::node_process::eventually(
        octokv_adversary::raw_connection::RECEIVE_TIMEOUT,
        || harness.attacker_sockets() == 1
    ));
    let mut io = open();
    let asked = io.submit_and_await_r2t(&store_by_r2t(1, b"never", 30_000)).unwrap();
    let mut wrong = io.h2c_data(asked, &random_value(4, 30_000), flags::LAST);
    wrong[16] ^= 1;
    io.send(&wrong).unwrap();
    let received = io.receive_pdu().unwrap();
    assert!(matches!(received, ReceivedPdu::TermReq { fatal_error_status: 3, .. }), "{received:?}");
    drop(io);
    assert!(octokv_adversary::node_process::eventually(
        octokv_adversary::raw_connection::RECEIVE_TIMEOUT,
        || harness.attacker_sockets() == 1
    ));
    assert_eq!(open().execute(&exist(1, b"never"), &[]).unwrap().status(), Status::KV_KEY_DOES_NOT_EXIST);
    drop(_admin);
    harness.finish().unwrap();
}

#[test]
fn unsolicited_data_terminates_the_connection_and_stores_nothing() {
    let harness = start_harness();
    let victim = harness.target_addr();
    let most = harness.limits.h2c_data_bytes_max;
    const ALL: u32 = TRANSFER_BYTES;
    // The declared range, the bytes sent, the flags, and the termination: FES, FEI.
    type Row = (&'static str, fn(DataHeader) -> DataHeader, u32, u8, u16, u32);
    let table: &[Row] = &[
        ("an invented tag", |d| DataHeader { tag: d.tag + 1, ..d }, ALL, flags::LAST, 1, 10),
        ("a huge tag", |d| DataHeader { tag: u16::MAX, ..d }, ALL, flags::LAST, 1, 10),
        ("another command", |d| DataHeader { command_id: 77, ..d }, ALL, flags::LAST, 1, 8),
        (
            "an offset further on",
            |d| DataHeader { offset: 4, bytes: ALL - 4, ..d },
            ALL - 4,
            flags::LAST,
            4,
            12,
        ),
        ("a huge offset", |d| DataHeader { offset: u32::MAX, ..d }, ALL, flags::LAST, 4, 12),
        ("beyond the length", |d| DataHeader { bytes: ALL + 4, ..d }, ALL + 4, flags::LAST, 4, 12),
        ("nothing", |d| DataHeader { bytes: 0, ..d }, 0, flags::LAST, 4, 12),
        ("more than declared", |d| DataHeader { bytes: 1000, ..d }, 1004, 0, 1, 4),
        ("less than declared", |d| DataHeader { bytes: 1004, ..d }, 1000, 0, 1, 4),
        ("the last of it too early", |d| DataHeader { bytes: 1000, ..d }, 1000, flags::LAST, 1, 1),
    ];
    for &(what, change, bytes, bits, fatal, information) in table {
        let mut attacker = attacker(victim, ConnectionStage::Transfer);
        let range = change(attacker.transfer.unwrap());
        // Encoded for the bytes sent, then the declared length.
        let mut pdu =
            attacker.peer.h2c_data(DataHeader { bytes, ..range }, &random_value(5, bytes as usize), bits);
        pdu[16..20].copy_from_slice(&range.bytes.to_le_bytes());
        attacker.peer.send(&pdu).unwrap();
        let received = pdu_outcome(&attacker.peer.receive_pdu().unwrap());
        assert_eq!(received, PduOutcome::Terminated { fatal, information }, "{what}");
    }
    // More in one PDU than negotiated.
    let mut large = attacker(victim, ConnectionStage::Io);
    let asked = large.peer.submit_and_await_r2t(&store_by_r2t(1, b"attacked", most + 8)).unwrap();
    large
        .peer
        .send(&large.peer.h2c_data(asked, &random_value(6, asked.bytes as usize), flags::LAST))
        .unwrap();
    let received = pdu_outcome(&large.peer.receive_pdu().unwrap());
    assert_eq!(received, PduOutcome::Terminated { fatal: 5, information: 16 }, "beyond MAXH2CDATA");
    // After the last one the tag is unknown. First, the requested data is sent.
    let mut late = attacker(victim, ConnectionStage::Io);
    let asked = late.peer.submit_and_await_r2t(&store_by_r2t(1, b"whole", 30_000)).unwrap();
    let pdu = late.peer.h2c_data(asked, &random_value(7, 30_000), flags::LAST);
    late.peer.send(&pdu).unwrap();
    assert!(late.peer.receive_completion().unwrap().status().is_success());
    late.peer.send(&pdu).unwrap();
    assert_eq!(
        pdu_outcome(&late.peer.receive_pdu().unwrap()),
        PduOutcome::Terminated { fatal: 1, information: 10 }
    );
    drop((large, late));
    // Only the complete value was stored.
    let (admin, mut io) = RawConnection::connect_pair(victim, 16).unwrap();
    assert_eq!(io.execute(&exist(1, b"attacked"), &[]).unwrap().status(), Status::KV_KEY_DOES_NOT_EXIST);
    assert!(io.execute(&exist(2, b"whole"), &[]).unwrap().status().is_success());
    // The node logs the errors: log page 01h still responds.
    drop((io, admin));
    let (mut admin, _) = RawConnection::connect_admin(victim).unwrap();
    assert!(admin.execute(&log_page(1, 1, 1024), &[]).unwrap().status().is_success());
    drop(admin);
    harness.finish().unwrap();
}
