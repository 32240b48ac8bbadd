//! Key Value commands over an I/O queue: capsules, transfers, digests, statuses, back-pressure.

use crate::common::*;
use octokv_base::{BufferPool, Key, NamespaceId, Nanos, ShortKey};
use octokv_nvmf::{RequestOutcome, StallReason, SubsystemConfig};
use octokv_wire::kv::{UncheckedKeyList, opcode};
use octokv_wire::pdu::{DataHeader, flags};
use octokv_wire::queue_entry::feature;
use octokv_wire::{Sgl, Sqe, Status, kv, vendor};

fn queue() -> (TestHost, TestHost) {
    let admin = TestHost::admin(&target());
    let io = TestHost::io(&admin, 1);
    (admin, io)
}

#[test]
fn values_round_trip_with_and_without_digests() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        let admin = TestHost::admin_with(&target(), header_digest, data_digest);
        let mut io = TestHost::io_with(&admin, 1, header_digest, data_digest);
        for bytes in [1, 100, 1024, 1025, 4096, 16 * 1024] {
            let value = value(bytes);
            assert!(io.store(b"key", &value, 0).status().is_success());
            let response = io.retrieve(b"key", bytes as u32);
            assert_eq!((response.status(), response.dw0()), (Status::SUCCESS, bytes as u32));
            assert_eq!(response.data, value);
        }
        for (bytes, piece) in [(1, 1), (20_000, 4096), (100_000, 1000), (2 << 20, 512 * 1024)] {
            let value = value(bytes);
            assert!(io.store_by_transfer(b"large", &value, piece).status().is_success());
            assert_eq!(io.retrieve(b"large", 2 << 20).data, value, "{bytes} B by {piece}");
        }
    }
}

#[test]
fn a_stream_split_anywhere_gives_the_same_responses() {
    let (_admin, mut io) = queue();
    let large = value(9000);
    let sqe = store_sqe(1, b"a", 3, Sgl::in_capsule(3), 0);
    let mut stream = io.capsule(&sqe, b"abc");
    let sqe = store_sqe(2, b"b", large.len(), Sgl::transport(large.len() as u32), 0);
    stream.extend(io.capsule(&sqe, &[]));
    // The first transfer of a new queue has tag 0 or 1: the Store before it is still in flight.
    let range = |offset: u32, bytes: u32| DataHeader { command_id: 2, tag: 1, offset, bytes };
    stream.extend(io.data_pdu(range(0, 5000), &large[..5000], 0));
    stream.extend(io.data_pdu(range(5000, 4000), &large[5000..], flags::LAST));
    for byte in stream {
        io.send(&[byte]);
    }
    io.execute_requests();
    assert_eq!(io.engine.values.len(), 2);
    assert_eq!(io.engine.values[&(1, Key::new(b"b").unwrap())], large);
}

#[test]
fn a_value_may_be_received_directly_into_its_buffer() {
    for digests in [false, true] {
        let admin = TestHost::admin_with(&target(), digests, digests);
        let mut io = TestHost::io_with(&admin, 1, digests, digests);
        assert!(io.connection.payload_buffer().is_none());
        let both = value(20 + 100_000);
        let command = vendor::VendorCommand::Store {
            options: vendor::store_options(kv::StoreMode::Upsert),
            key_bytes: 20,
            value_bytes: 100_000,
        };
        let mut sqe = command.encode(1, NSID);
        sqe.sgl = Sgl::transport(both.len() as u32);
        io.send_command(&sqe, &[]);
        let Some(ReceivedPdu::ReadyToTransfer(range)) = io.received_pdus.pop_front() else {
            panic!("no R2T")
        };
        let pdu = io.data_pdu(range, &both, flags::LAST);
        let prefix = if digests { 28 } else { 24 };
        io.send(&pdu[..prefix + 5]);
        let mut rest = &pdu[prefix + 5..];
        let mut landings = 0;
        while let Some(place) = io.connection.payload_buffer() {
            let count = place.len().min(40_000);
            place[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            io.connection.payload_received(io.now, count, &io.pool, &mut io.requests);
            landings += 1;
        }
        assert_eq!((landings, rest.len()), (4, if digests { 4 } else { 0 }));
        io.send(rest);
        io.execute_requests();
        assert!(io.next_response().status().is_success());
        assert_eq!(io.engine.values[&(1, Key::new(&both[..20]).unwrap())], both[20..]);
    }
}

#[test]
fn a_zero_length_value_is_returned_without_a_data_pdu() {
    let (_admin, mut io) = queue();
    assert!(io.store(b"empty", b"", 0).status().is_success());
    let response = io.retrieve(b"empty", 4096);
    assert_eq!((response.status(), response.dw0(), response.data.len()), (Status::SUCCESS, 0, 0));
}

#[test]
fn retrieve_returns_the_full_length_and_truncates_the_data() {
    let (_admin, mut io) = queue();
    io.store(b"key", &value(5000), 0);
    let response = io.retrieve(b"key", 1000);
    assert_eq!((response.dw0(), response.data), (5000, value(5000)[..1000].to_vec()));
    assert_eq!(io.retrieve(b"key", 0).dw0(), 5000);
    // A host that rounds CDW10 up beyond its buffer gets no more data than the buffer holds.
    let key = ShortKey::new(b"key").unwrap();
    let mut sqe = kv::KvCommand::Retrieve { key, limit_bytes: 8192 }.encode(77, NSID);
    sqe.sgl = Sgl::transport(600);
    sqe.cdw12 = 0xdead_beef.into();
    assert_eq!(io.run(sqe, &[]).data.len(), 600);
}

#[test]
fn store_options_delete_and_exist_have_the_specified_statuses() {
    let (_admin, mut io) = queue();
    const UPDATE_ONLY: u8 = 1;
    const ADD_ONLY: u8 = 2;
    assert_eq!(io.store(b"k", b"1", UPDATE_ONLY).status(), Status::KV_KEY_DOES_NOT_EXIST);
    assert!(io.store(b"k", b"1", ADD_ONLY).status().is_success());
    assert_eq!(io.store(b"k", b"2", ADD_ONLY).status(), Status::KV_KEY_EXISTS);
    assert!(io.store(b"k", b"3", UPDATE_ONLY | 4).status().is_success());
    assert!(io.store(b"k", b"3", 3).status().is(Status::INVALID_FIELD));
    let response = io.key_command(opcode::EXIST, b"k");
    assert_eq!((response.status(), response.dw0()), (Status::SUCCESS, 0));
    assert_eq!(io.key_command(opcode::EXIST, b"none").status(), Status::KV_KEY_DOES_NOT_EXIST);
    assert_eq!(io.retrieve(b"none", 10).status(), Status::KV_KEY_DOES_NOT_EXIST);
    assert!(io.key_command(opcode::DELETE, b"k").status().is_success());
    assert!(io.key_command(opcode::DELETE, b"k").status().is_success(), "Delete of a missing key succeeds");
    assert!(io.key_command(opcode::FLUSH, b"").status().is_success());
}

#[test]
fn delete_of_a_missing_key_fails_if_the_kv_configuration_says_so() {
    let (mut admin, mut io) = queue();
    let kv_configuration = feature::KV_CONFIGURATION;
    assert!(admin.set_feature(kv_configuration, 1, 1).status().is_success());
    assert_eq!(admin.get_feature(kv_configuration, 1).dw0(), 1);
    assert_eq!(admin.get_feature(kv_configuration, 2).dw0(), 0);
    assert_eq!(io.key_command(opcode::DELETE, b"k").status(), Status::KV_KEY_DOES_NOT_EXIST);
    assert!(admin.set_feature(kv_configuration, u32::MAX, 0).status().is_success());
    assert!(io.key_command(opcode::DELETE, b"k").status().is_success());
    assert!(admin.set_feature(kv_configuration, 9, 0).status().is(Status::INVALID_NAMESPACE));
}

#[test]
fn invalid_key_and_value_sizes_have_their_statuses() {
    let (_admin, mut io) = queue();
    for operation in [opcode::STORE, opcode::RETRIEVE, opcode::DELETE, opcode::EXIST] {
        assert!(io.key_command(operation, b"").status().is(Status::KV_INVALID_KEY_SIZE), "{operation:02x}");
    }
    for operation in [opcode::STORE, opcode::RETRIEVE, opcode::DELETE, opcode::EXIST, opcode::LIST] {
        let id = io.id();
        let mut sqe = Sqe::new(operation, id);
        (sqe.nsid, sqe.cdw11) = (1.into(), 17.into());
        assert!(io.run(sqe, &[]).status().is(Status::KV_INVALID_KEY_SIZE), "{operation:02x}");
    }
    let id = io.id();
    let sqe = store_sqe(id, b"k", (2 << 20) + 1, Sgl::transport((2 << 20) + 1), 0);
    assert!(io.run(sqe, &[]).status().is(Status::KV_INVALID_VALUE_SIZE));
    let mut sqe = store_sqe(99, b"k", 1, Sgl::in_capsule(1), 0);
    for nsid in [0, 3, u32::MAX] {
        sqe.nsid = nsid.into();
        assert!(io.run(sqe, b"v").status().is(Status::INVALID_NAMESPACE), "{nsid}");
    }
}

#[test]
fn opcodes_of_other_command_sets_are_invalid() {
    let (_admin, mut io) = queue();
    for operation in [0x04, 0x05, 0x08, 0x09, 0x0d, 0x15, 0xa9, 0xb1, 0xff] {
        assert!(io.key_command(operation, b"k").status().is(Status::INVALID_OPCODE), "{operation:02x}");
    }
}

#[test]
fn list_returns_keys_from_the_start_key_on() {
    let (_admin, mut io) = queue();
    for key in [b"a".as_slice(), b"bb", b"ccc"] {
        io.store(key, b"v", 0);
    }
    let mut list = |start: &[u8], limit: u32| {
        let id = io.id();
        let start = ShortKey::new(start).unwrap();
        let mut sqe = kv::KvCommand::List { start, limit_bytes: limit }.encode(id, NSID);
        sqe.sgl = Sgl::transport(limit);
        io.run(sqe, &[])
    };
    let names =
        |data: &[u8]| UncheckedKeyList(data).check().unwrap().keys().map(<[u8]>::to_vec).collect::<Vec<_>>();
    assert_eq!(names(&list(b"", 4096).data), [b"a".to_vec(), b"bb".to_vec(), b"ccc".to_vec()]);
    assert_eq!(names(&list(b"b", 4096).data), [b"bb".to_vec(), b"ccc".to_vec()]);
    assert_eq!(names(&list(b"", 9).data), [b"a".to_vec()]);
    let response = list(b"z", 4096);
    assert_eq!((response.dw0(), names(&response.data).len()), (0, 0));
    assert!(list(b"", 3).status().is(Status::INVALID_FIELD));
}

#[test]
fn vendor_commands_carry_long_keys_in_capsule_and_by_r2t() {
    let (_admin, mut io) = queue();
    let key = value(300);
    let stored = value(5000);
    let both = [key.clone(), stored.clone()].concat();
    let command = vendor::VendorCommand::Store {
        options: vendor::store_options(kv::StoreMode::Upsert),
        key_bytes: 300,
        value_bytes: 5000,
    };
    let mut sqe = command.encode(1, NSID);
    sqe.sgl = Sgl::in_capsule(5300);
    assert!(io.run(sqe, &both).status().is_success());
    sqe.sgl = Sgl::transport(5300);
    io.send_command(&sqe, &[]);
    io.send_requested_data(&both, 123);
    io.execute_requests();
    assert!(io.next_response().status().is_success());
    assert_eq!(io.engine.values[&(1, Key::new(&key).unwrap())], stored);

    let mut sqe = vendor::VendorCommand::Retrieve { key_bytes: 300, limit_bytes: 8192 }.encode(2, NSID);
    sqe.sgl = Sgl::in_capsule(300);
    let response = io.run(sqe, &key);
    assert_eq!((response.dw0(), response.data), (5000, stored));
    let mut sqe = vendor::VendorCommand::Exist { key_bytes: 300 }.encode(3, NSID);
    sqe.sgl = Sgl::transport(300);
    io.send_command(&sqe, &[]);
    io.send_requested_data(&key, 300);
    io.execute_requests();
    assert_eq!(io.next_response().dw0(), 5000);
    let mut sqe = vendor::VendorCommand::List { key_bytes: 0, limit_bytes: 4096 }.encode(4, NSID);
    sqe.sgl = Sgl::transport(0);
    let response = io.run(sqe, &[]);
    assert_eq!(UncheckedKeyList(&response.data).check().unwrap().keys().next(), Some(key.as_slice()));
    let mut sqe = vendor::VendorCommand::Delete { key_bytes: 300 }.encode(5, NSID);
    sqe.sgl = Sgl::in_capsule(300);
    assert!(io.run(sqe, &key).status().is_success());
    assert!(io.engine.values.is_empty());
    let sqe = vendor::VendorCommand::Delete { key_bytes: 1025 }.encode(6, NSID);
    assert!(io.run(sqe, &[]).status().is(Status::KV_INVALID_KEY_SIZE));
    let mut short = vendor::VendorCommand::Delete { key_bytes: 20 }.encode(7, NSID);
    short.sgl = Sgl::in_capsule(10);
    assert!(io.run(short, &[0; 10]).status().is(Status::INVALID_SGL_LENGTH));
}

#[test]
fn every_outcome_has_its_status() {
    let (_admin, mut io) = queue();
    let table = [
        (RequestOutcome::CapacityExceeded, Status::KV_CAPACITY_EXCEEDED),
        (RequestOutcome::InvalidValueSize, Status::KV_INVALID_VALUE_SIZE),
        (RequestOutcome::InvalidKeySize, Status::KV_INVALID_KEY_SIZE),
        (RequestOutcome::Unrecovered, Status::KV_UNRECOVERED_ERROR),
        (RequestOutcome::NotReady, Status::NAMESPACE_NOT_READY),
        (RequestOutcome::Busy, Status::COMMAND_INTERRUPTED),
        (RequestOutcome::AlreadyExists, Status::KV_KEY_EXISTS),
        (RequestOutcome::NotFound, Status::KV_KEY_DOES_NOT_EXIST),
    ];
    for (outcome, status) in table {
        let id = io.id();
        io.send_command(&store_sqe(id, b"k", 1, Sgl::in_capsule(1), 0), b"v");
        let slot = io.requests.pop().unwrap().slot;
        io.connection.complete(slot, outcome);
        io.drain();
        assert_eq!(io.next_response().status(), status);
    }
}

#[test]
fn a_wrong_data_digest_fails_that_command_alone() {
    let admin = TestHost::admin_with(&target(), true, true);
    let mut io = TestHost::io_with(&admin, 1, true, true);
    let mut capsule = io.capsule(&store_sqe(1, b"k", 100, Sgl::in_capsule(100), 0), &value(100));
    *capsule.last_mut().unwrap() ^= 1;
    io.send(&capsule);
    assert_eq!(io.next_response().status(), Status::TRANSIENT_TRANSPORT_ERROR);
    // By R2T: the command fails after its last byte.
    let sqe = store_sqe(2, b"k", 8192, Sgl::transport(8192), 0);
    io.send_command(&sqe, &[]);
    let Some(ReceivedPdu::ReadyToTransfer(range)) = io.received_pdus.pop_front() else { panic!("no R2T") };
    let mut bad = io.data_pdu(DataHeader { bytes: 4096, ..range }, &value(4096), 0);
    bad[2000] ^= 1;
    io.send(&bad);
    assert!(io.received_pdus.is_empty());
    let good = io.data_pdu(DataHeader { offset: 4096, bytes: 4096, ..range }, &value(4096), flags::LAST);
    io.send(&good);
    assert_eq!(io.next_response().status(), Status::TRANSIENT_TRANSPORT_ERROR);
    assert!(io.requests.is_empty());
    assert!(io.store(b"k", &value(100), 0).status().is_success());
}

#[test]
fn a_command_identifier_in_use_is_a_conflict() {
    let (_admin, mut io) = queue();
    let sqe = store_sqe(5, b"k", 1, Sgl::in_capsule(1), 0);
    io.send_command(&sqe, b"v");
    io.send_command(&sqe, b"w");
    assert!(io.next_response().status().is(Status::COMMAND_ID_CONFLICT));
    io.execute_requests();
    assert!(io.next_response().status().is_success());
    assert!(io.run(sqe, b"x").status().is_success());
}

#[test]
fn sqhd_advances_with_each_completion_unless_flow_control_is_off() {
    let (admin, mut io) = queue();
    let heads: Vec<u16> = (0..40).map(|_| io.store(b"k", b"v", 0).cqe.sq_head.get()).collect();
    // Connect was the first of 32 entries.
    let want: Vec<u16> = (2..42).map(|head| head % 32).collect();
    assert_eq!(heads, want);
    let mut off = TestHost::initialized(&admin.target, false, false);
    let id = admin.target.controllers()[0].id;
    let response = off.connect_as(2, id, NQN, HOST_NQN, |connect| connect.attributes = 4);
    assert_eq!(response.cqe.sq_head.get(), 0xffff);
}

#[test]
fn a_full_queue_stalls_receive_until_a_slot_is_free() {
    let (_admin, mut io) = queue();
    for id in 0..33 {
        io.send_command(&store_sqe(id, b"k", 1, Sgl::in_capsule(1), 0), b"v");
    }
    assert_eq!(io.connection.in_flight(), 32);
    assert_eq!(io.last.unwrap().stalled, Some(StallReason::Slots));
    assert!(!io.unsent.is_empty());
    let first = io.requests.remove(0);
    io.connection.complete(first.slot, RequestOutcome::Stored);
    io.pump();
    assert_eq!((io.connection.in_flight(), io.unsent.len()), (32, 0));
    assert_eq!(io.last.unwrap().stalled, None);
}

#[test]
fn without_buffers_a_capsule_stalls_and_an_r2t_is_deferred() {
    let (_admin, mut io) = queue();
    io.pool = BufferPool::new(64 * 1024);
    let hold: Vec<_> = (0..16).map(|_| io.pool.take(1).unwrap()).collect();
    io.send_command(&store_sqe(1, b"t", 40_000, Sgl::transport(40_000), 0), &[]);
    assert_eq!(io.last.unwrap().stalled, None);
    assert!(
        io.unsent.is_empty() && io.received_pdus.is_empty(),
        "the command was accepted and its R2T deferred"
    );
    assert_eq!(io.connection.next_deadline(), io.now + Nanos::from_millis(1));
    io.send_command(&store_sqe(2, b"k", 1, Sgl::in_capsule(1), 0), b"v");
    assert!(!io.unsent.is_empty(), "the capsule was not consumed");
    assert_eq!(io.last.unwrap().stalled, Some(StallReason::Buffers));
    drop(hold);
    io.advance_time(Nanos::from_millis(1));
    assert!(
        matches!(io.received_pdus.front(), Some(ReceivedPdu::ReadyToTransfer(_))),
        "a tick retries the buffer"
    );
    io.pump();
    assert_eq!((io.unsent.len(), io.last.unwrap().stalled), (0, None));
    io.send_requested_data(&value(40_000), 40_000);
    assert_eq!(io.requests.len(), 2);
    io.execute_requests();
}

#[test]
fn a_capsule_that_would_wait_for_its_own_connections_data_is_interrupted() {
    let (_admin, mut io) = queue();
    io.pool = BufferPool::new(64 * 1024);
    io.send_command(&store_sqe(1, b"t", 60_000, Sgl::transport(60_000), 0), &[]);
    let Some(ReceivedPdu::ReadyToTransfer(_)) = io.received_pdus.front() else {
        panic!("an unused pool grants any")
    };
    let r2t = io.received_pdus.pop_front();
    let response = io.run(store_sqe(2, b"k", 1, Sgl::in_capsule(1), 0), b"v");
    assert_eq!(response.status(), Status::COMMAND_INTERRUPTED);
    io.received_pdus.extend(r2t);
    io.send_requested_data(&value(60_000), 60_000);
    io.execute_requests();
    assert!(io.next_response().status().is_success());
    assert!(io.store(b"k", b"v", 0).status().is_success());
}

#[test]
fn open_transfers_stay_within_the_limit_of_a_connection() {
    let mut config = SubsystemConfig::new(NQN);
    config.receive_bytes_max = 3 << 20;
    let admin = TestHost::admin(&target_with(config));
    let mut io = TestHost::io(&admin, 1);
    for id in 0..10 {
        io.send_command(&store_sqe(id, b"t", 1 << 20, Sgl::transport(1 << 20), 0), &[]);
    }
    assert!(io.unsent.is_empty(), "all commands were accepted");
    let mut most = 0;
    for left in (0..10).rev() {
        most = most.max(io.pool.in_use_bytes());
        io.send_requested_data(&value(1 << 20), 256 * 1024);
        io.execute_requests();
        // The completion follows the R2Ts that its end made possible.
        let at =
            io.received_pdus.iter().position(|reply| matches!(reply, ReceivedPdu::Completion(_))).unwrap();
        io.received_pdus.remove(at);
        assert_eq!(io.last.unwrap().stalled, None, "{left} left: data must not stall");
    }
    assert!(most <= 3 << 20, "{most} B were in use");
    assert_eq!(io.pool.in_use_bytes(), 0);
}

#[test]
fn hosts_that_do_not_read_stay_within_the_dynamic_threshold() {
    let admin = TestHost::admin(&target());
    let pool = octokv_base::BufferPool::new(1 << 20);
    let mut hosts: Vec<TestHost> = (1..=3).map(|queue| TestHost::io(&admin, queue)).collect();
    let mut sqe =
        kv::KvCommand::Retrieve { key: ShortKey::new(b"k").unwrap(), limit_bytes: 16_000 }.encode(0, NSID);
    sqe.sgl = Sgl::transport(16_000);
    let mut stalled = [false; 3];
    for id in 0_u16..100 {
        sqe.command_id = id.into();
        for (io, stalled) in hosts.iter_mut().zip(&mut stalled) {
            let bytes = io.capsule(&sqe, &[]);
            *stalled |= io.connection.receive(io.now, &bytes, &pool, &mut io.requests).stalled
                == Some(StallReason::SendBuffer);
            for request in std::mem::take(&mut io.requests) {
                let buffer = pool.take(16_000).expect("no connection may take the last buffer");
                io.connection.complete(
                    request.slot,
                    RequestOutcome::Value { buffer: buffer.into(), offset: 0, bytes: 16_000 },
                );
            }
        }
    }
    assert_eq!(stalled, [true; 3]);
    // A quarter each, and a quarter is free, within one response.
    assert!(pool.free_bytes().abs_diff((1 << 20) / 4) < 3 * 16_384, "{} B are free", pool.free_bytes());
    for io in &mut hosts {
        assert!(io.connection.send_buffer().unsent_bytes().abs_diff((1 << 20) / 4) < 3 * 16_384);
    }
}

#[test]
fn a_host_that_does_not_read_responses_is_stalled() {
    let mut config = SubsystemConfig::new(NQN);
    config.send_buffer_bytes_max = 100_000;
    let admin = TestHost::admin(&target_with(config));
    let mut io = TestHost::io(&admin, 1);
    io.store(b"k", &value(16_000), 0);
    let retrieve = |id| {
        let mut sqe = kv::KvCommand::Retrieve { key: ShortKey::new(b"k").unwrap(), limit_bytes: 16_000 }
            .encode(id, NSID);
        sqe.sgl = Sgl::transport(16_000);
        sqe
    };
    let mut stream: Vec<u8> = Vec::new();
    for id in 100..130 {
        stream.extend(io.capsule(&retrieve(id), &[]));
    }
    let mut stalled = false;
    for _ in 0..100 {
        // One command at a time; its response stays in the send buffer.
        let next = stream.len().min(72);
        let consumed = io.connection.receive(io.now, &stream[..next], &io.pool, &mut io.requests);
        stream.drain(..consumed.consumed_bytes);
        stalled |= consumed.stalled == Some(StallReason::SendBuffer);
        for request in std::mem::take(&mut io.requests) {
            let mut buffer = octokv_base::Buffer::zeroed(16_000);
            buffer.fill(1);
            let outcome = RequestOutcome::Value { buffer: buffer.into(), offset: 0, bytes: 16_000 };
            io.connection.complete(request.slot, outcome);
        }
    }
    assert!(stalled && io.connection.send_buffer().unsent_bytes() < 100_000 + 17_000);
    assert!(!stream.is_empty());
    io.drain();
    let consumed = io.connection.receive(io.now, &stream, &io.pool, &mut io.requests);
    assert!(consumed.consumed_bytes > 0);
}

#[test]
fn sgl_lengths_are_checked_against_capsule_and_value() {
    let (_admin, mut io) = queue();
    let table = [
        (Sgl::in_capsule(50), 100, 50, Status::INVALID_SGL_LENGTH), // Shorter than the value.
        (Sgl::in_capsule(100), 100, 50, Status::INVALID_SGL_LENGTH), // Longer than the capsule.
        (Sgl::transport(50), 100, 0, Status::INVALID_SGL_LENGTH),
        (Sgl::in_capsule(100), 100, 100, Status::SUCCESS),
        (Sgl::in_capsule(100), 60, 100, Status::SUCCESS), // Longer than the value: the rest is ignored.
    ];
    for (sgl, value_bytes, data_bytes, status) in table {
        let id = io.id();
        let response = io.run(store_sqe(id, b"k", value_bytes, sgl, 0), &value(data_bytes));
        assert!(response.status().is(status), "{sgl:?} {value_bytes}: {:?}", response.status());
    }
    assert_eq!(io.engine.values[&(1, Key::new(b"k").unwrap())].len(), 60);
}

#[test]
fn namespaces_have_separate_keys() {
    let (_admin, mut io) = queue();
    io.store(b"k", b"one", 0);
    let mut sqe = kv::KvCommand::Exist { key: ShortKey::new(b"k").unwrap() }.encode(50, NamespaceId(2));
    assert_eq!(io.run(sqe, &[]).status(), Status::KV_KEY_DOES_NOT_EXIST);
    sqe.nsid = 1.into();
    assert!(io.run(sqe, &[]).status().is_success());
}

#[test]
fn an_outcome_after_the_connection_has_closed_is_discarded() {
    let (_admin, mut io) = queue();
    io.send_command(&store_sqe(1, b"k", 1, Sgl::in_capsule(1), 0), b"v");
    io.connection.peer_closed();
    assert!(io.connection.is_closed());
    assert_eq!(io.connection.in_flight(), 1);
    let slot = io.requests.pop().unwrap().slot;
    io.connection.complete(slot, RequestOutcome::Stored);
    assert_eq!(io.connection.in_flight(), 0);
    assert!(io.connection.send_buffer().is_empty());
}

#[test]
fn commands_and_bytes_are_counted() {
    let (mut admin, mut io) = queue();
    io.store(b"k", &value(600_000)[..16_000], 0);
    io.retrieve(b"k", 16_000);
    io.retrieve(b"none", 10);
    io.key_command(opcode::EXIST, b"k");
    io.key_command(opcode::DELETE, b"k");
    io.key_command(0xff, b"k");
    io.advance_time(Nanos::from_millis(1));
    admin.advance_time(Nanos::from_millis(1));
    let counts = admin.target.counters();
    assert_eq!((counts.stores, counts.retrieves, counts.exists, counts.deletes), (1, 2, 1, 1));
    assert_eq!((counts.stored_bytes, counts.retrieved_bytes), (16_000, 16_000));
    assert_eq!((counts.negative_results, counts.errors), (1, 1));
    let report = &admin.target.controllers()[0];
    assert_eq!((report.counters.stores, report.queue_count), (1, 1));
    assert_eq!(report.host_nqn, HOST_NQN);
}
