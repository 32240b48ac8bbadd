//! Protocol violations by a host, and the FES and FEI of the resulting termination request.

use crate::common::*;
use octokv_nvmf::CloseReason;
use octokv_wire::pdu::{DataHeader, IcRequest, flags};
use octokv_wire::pdu_error::FatalErrorStatus;
use octokv_wire::{PduError, Sgl};

/// Sends `bytes`, and expects the connection to end with this error and a matching termination request.
#[track_caller]
fn expect_pdu_error(host: &mut TestHost, bytes: &[u8], fault: PduError) {
    host.send(bytes);
    let terminate = host.terminated();
    assert_eq!(host.connection.close_reason(), Some(CloseReason::PduError(fault)));
    assert_eq!(
        (terminate.fatal_status, terminate.information),
        (fault.fatal_error_status() as u16, fault.fatal_error_information())
    );
    assert!(host.received_pdus.is_empty() && host.unsent.is_empty());
}

fn ic() -> Vec<u8> {
    let request =
        IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
    request.encode().to_vec()
}

fn changed(mut bytes: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    bytes[at] = byte;
    bytes
}

#[test]
fn a_bad_icreq_ends_the_connection() {
    let table = [
        (2, 127, PduError::HeaderLength { header_bytes: 127 }, FatalErrorStatus::InvalidHeaderField, 2),
        (4, 200, PduError::PduLength { pdu_bytes: 200 }, FatalErrorStatus::InvalidHeaderField, 4),
        (8, 1, PduError::FormatVersion { version: 1 }, FatalErrorStatus::UnsupportedParameter, 8),
        (10, 32, PduError::Alignment { alignment: 32 }, FatalErrorStatus::InvalidHeaderField, 10),
        (11, 4, PduError::DigestBits { bits: 4 }, FatalErrorStatus::InvalidHeaderField, 11),
    ];
    for (at, byte, fault, fatal, information) in table {
        assert_eq!((fault.fatal_error_status(), fault.fatal_error_information()), (fatal, information));
        expect_pdu_error(&mut TestHost::new(&target()), &changed(ic(), at, byte), fault);
    }
}

#[test]
fn an_unexpected_pdu_type_ends_the_connection() {
    let unexpected = |kind| PduError::UnexpectedPduType { kind };
    let target = target();
    let mut fresh = TestHost::new(&target);
    let capsule = fresh.capsule(&store_sqe(1, b"k", 0, Sgl::transport(0), 0), &[]);
    expect_pdu_error(&mut fresh, &capsule, unexpected(4));
    expect_pdu_error(&mut TestHost::initialized(&target, false, false), &ic(), unexpected(0));
    let data = DataHeader { command_id: 1, tag: 0, offset: 0, bytes: 4 };
    let mut admin = TestHost::admin(&target);
    let bytes = admin.data_pdu(data, &[0; 4], flags::LAST);
    expect_pdu_error(&mut admin, &bytes, unexpected(6));
    for kind in [1, 3, 5, 7, 9] {
        expect_pdu_error(
            &mut TestHost::initialized(&target, false, false),
            &changed(ic(), 0, kind),
            unexpected(kind),
        );
    }
    for kind in [8, 10, 255] {
        let fault = PduError::UnknownPduType { kind };
        expect_pdu_error(&mut TestHost::initialized(&target, false, false), &changed(ic(), 0, kind), fault);
    }
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let mut host = TestHost::admin_with(&target(), true, false);
    let mut capsule = host.capsule(&store_sqe(1, b"k", 0, Sgl::transport(0), 0), &[]);
    capsule[20] ^= 1;
    host.send(&capsule);
    let terminate = host.terminated();
    assert_eq!(terminate.fatal_status, FatalErrorStatus::HeaderDigestError as u16);
    assert_eq!(terminate.information, u32::from_le_bytes(capsule[72..76].try_into().unwrap()));
    assert!(matches!(
        host.connection.close_reason(),
        Some(CloseReason::PduError(PduError::HeaderDigest { .. }))
    ));
}

#[test]
fn a_digest_flag_that_was_not_negotiated_ends_the_connection() {
    let target = target();
    let mut host = TestHost::admin_with(&target, true, false);
    let capsule = host.capsule(&store_sqe(1, b"k", 0, Sgl::transport(0), 0), &[]);
    expect_pdu_error(&mut host, &changed(capsule, 1, 0), PduError::Flags { flags: 0 });
    let mut host = TestHost::admin(&target);
    let capsule = host.capsule(&store_sqe(1, b"k", 0, Sgl::transport(0), 0), &[]);
    expect_pdu_error(&mut host, &changed(capsule, 1, 1), PduError::Flags { flags: 1 });
}

#[test]
fn a_capsule_longer_than_ioccsz_ends_the_connection() {
    let target = target();
    let admin = TestHost::admin(&target);
    let mut io = TestHost::io(&admin, 1);
    let data = value(16 * 1024 + 4);
    let bytes = io.capsule(&store_sqe(1, b"k", data.len(), Sgl::in_capsule(data.len() as u32), 0), &data);
    expect_pdu_error(&mut io, &bytes, PduError::PduLength { pdu_bytes: bytes.len() as u32 });
    // Before the rest of the PDU arrives.
    let mut admin = admin;
    let mut head = admin.capsule(&store_sqe(1, b"k", 4, Sgl::in_capsule(4), 0), &[0; 4]);
    head[4..8].copy_from_slice(&0x4000_0000u32.to_le_bytes());
    expect_pdu_error(&mut admin, &head[..8], PduError::PduLength { pdu_bytes: 0x4000_0000 });
}

/// An I/O queue with one open transfer of 8192 bytes, and its R2T.
fn open_transfer() -> (TestHost, TestHost, DataHeader) {
    let admin = TestHost::admin(&target());
    let mut io = TestHost::io(&admin, 1);
    io.send_command(&store_sqe(7, b"k", 8192, Sgl::transport(8192), 0), &[]);
    let Some(ReceivedPdu::ReadyToTransfer(range)) = io.received_pdus.pop_front() else { panic!("no R2T") };
    assert_eq!((range.command_id, range.offset, range.bytes), (7, 0, 8192));
    (admin, io, range)
}

#[test]
fn unsolicited_h2cdata_ends_the_connection() {
    let mine = |change: fn(&mut DataHeader), bits: u8, fault: PduError| {
        let (_admin, mut io, range) = open_transfer();
        let mut data = DataHeader { bytes: 4096, ..range };
        change(&mut data);
        let payload = vec![0; data.bytes as usize];
        let bytes = io.data_pdu(data, &payload, bits);
        expect_pdu_error(&mut io, &bytes, fault);
    };
    mine(|data| data.tag = 9, 0, PduError::TransferTag { tag: 9 });
    mine(|data| data.tag = 40_000, 0, PduError::TransferTag { tag: 40_000 });
    mine(|data| data.command_id = 8, 0, PduError::CommandId { command_id: 8 });
    mine(|data| data.offset = 4096, 0, PduError::DataRange { offset: 4096, bytes: 4096 });
    mine(|data| data.bytes = 8196, flags::LAST, PduError::DataRange { offset: 0, bytes: 8196 });
    mine(|_| {}, flags::LAST, PduError::LastFlag { flags: flags::LAST });
    let too_much = 512 * 1024 + 4;
    mine(|data| data.bytes = 512 * 1024 + 4, 0, PduError::DataLimitExceeded { bytes: too_much });
}

#[test]
fn h2cdata_out_of_range_or_repeated_ends_the_connection() {
    let (_admin, mut io, range) = open_transfer();
    let first = DataHeader { bytes: 4096, ..range };
    let bytes = io.data_pdu(first, &[0; 4096], 0);
    io.send(&bytes);
    expect_pdu_error(&mut io, &bytes, PduError::DataRange { offset: 0, bytes: 4096 });
    let (_admin, mut io, range) = open_transfer();
    let bytes = io.data_pdu(range, &[0; 8192], flags::LAST);
    io.send(&bytes);
    assert_eq!(io.requests.len(), 1);
    expect_pdu_error(&mut io, &bytes, PduError::TransferTag { tag: range.tag });
    // The earlier Store, which is complete, is still in flight.
    assert_eq!(io.connection.in_flight(), 1);
}

#[test]
fn an_h2cdata_with_inconsistent_lengths_ends_the_connection() {
    let (_admin, mut io, range) = open_transfer();
    let mut bytes = io.data_pdu(DataHeader { bytes: 4096, ..range }, &[0; 4096], 0);
    bytes[16..20].copy_from_slice(&4095u32.to_le_bytes());
    expect_pdu_error(&mut io, &bytes, PduError::PduLength { pdu_bytes: 24 + 4096 });
    let (_admin, mut io, range) = open_transfer();
    let mut empty = io.data_pdu(DataHeader { bytes: 4096, ..range }, &[], 0);
    empty[4..8].copy_from_slice(&24u32.to_le_bytes());
    empty[16..20].fill(0);
    expect_pdu_error(&mut io, &empty, PduError::DataRange { offset: 0, bytes: 0 });
}

#[test]
fn more_open_transfers_than_queue_entries_end_the_connection() {
    let admin = TestHost::admin(&target());
    let mut io = TestHost::io(&admin, 1);
    for id in 0..32 {
        io.send_command(&store_sqe(id, b"k", 5000, Sgl::transport(5000), 0), &[]);
    }
    io.received_pdus.clear();
    let bytes = io.capsule(&store_sqe(32, b"k", 5000, Sgl::transport(5000), 0), &[]);
    expect_pdu_error(&mut io, &bytes, PduError::QueueOverrun { command_id: 32 });
    drop(io);
    assert_eq!(admin.pool.in_use_bytes(), 0);
}

#[test]
fn a_terminated_connection_releases_its_buffers() {
    let (_admin, mut io, _range) = open_transfer();
    assert!(io.pool.in_use_bytes() > 0);
    io.send(&[255; 8]);
    io.advance_time(octokv_base::Nanos::from_secs(2));
    assert!(io.connection.is_closed());
    assert_eq!(io.pool.in_use_bytes(), 0, "released although the connection object still exists");
}

#[test]
fn a_transfer_whose_data_does_not_arrive_ends_the_connection() {
    let (_admin, mut io, _range) = open_transfer();
    io.advance_time(octokv_base::Nanos::from_secs(29));
    assert!(!io.connection.is_closed());
    io.advance_time(octokv_base::Nanos::from_secs(2));
    assert_eq!(io.connection.close_reason(), Some(CloseReason::TransferTimeout));
}

#[test]
fn a_slow_transfer_holds_its_buffers_no_longer_than_a_silent_one() {
    let (_admin, mut io, range) = open_transfer();
    let pdu = io.data_pdu(range, &value(range.bytes as usize), flags::LAST);
    let mut bytes = pdu.iter();
    for second in 0..30 {
        assert!(!io.connection.is_closed(), "after {second} s");
        io.send(&[*bytes.next().unwrap()]);
        io.advance_time(octokv_base::Nanos::from_secs(1));
    }
    io.send(&[*bytes.next().unwrap()]);
    io.advance_time(octokv_base::Nanos::from_secs(3));
    assert_eq!(io.connection.close_reason(), Some(CloseReason::TransferTimeout));
    assert_eq!(io.pool.in_use_bytes(), 0);
}

#[test]
fn the_transfer_timeout_covers_all_data_requested_at_once() {
    const ONE: usize = 1 << 20;
    let admin = TestHost::admin(&target());
    let mut io = TestHost::io(&admin, 1);
    io.pool = octokv_base::BufferPool::new(64 << 20);
    for id in 0..25 {
        io.send_command(&store_sqe(id, b"k", ONE, Sgl::transport(ONE as u32), 0), &[]);
    }
    assert_eq!(io.received_pdus.len(), 25, "all R2Ts are sent before the first data arrives");
    for id in 0..25 {
        // A third of a MiB each second: the last data arrives more than a minute after its R2T.
        io.advance_time(octokv_base::Nanos::from_secs(3));
        assert_eq!(io.connection.close_reason(), None, "{id} of 25 arrived");
        io.send_requested_data(&value(ONE), 256 << 10);
    }
    io.execute_requests();
    assert_eq!(io.connection.close_reason(), None);
}
