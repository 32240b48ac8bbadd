//! Hosts whose commands are invalid, too many, too large, or never read: each command gets the specification's status,
//! and memory stays within its bound.

use octokv_adversary::attack_harness::{AttackHarness, NodeLimits};
use octokv_adversary::command_builder::{
    abort, async_event_request, delete, exist, flush, identify, keep_alive, list, log_page, random_value,
    retrieve, store, store_by_r2t, store_in_capsule, vendor_command,
};
use octokv_adversary::node_process::eventually;
use octokv_adversary::raw_connection::{RECEIVE_TIMEOUT, RawConnection, ReceivedPdu};
use octokv_wire::kv::{StoreOptions, UncheckedKeyList, opcode};
use octokv_wire::{Sgl, Sqe, Status, queue_entry, vendor};
use std::path::Path;
use std::time::{Duration, Instant};

fn start_harness(limits: NodeLimits) -> AttackHarness {
    AttackHarness::start(Path::new(env!("CARGO_BIN_EXE_octokv")), limits).unwrap()
}

#[track_caller]
fn assert_status(peer: &mut RawConnection, sqe: &Sqe, data: &[u8], status: Status) -> u32 {
    let cqe = peer.execute(sqe, data).unwrap();
    assert!(cqe.status().is(status), "{sqe:?}: {:?}, not {status:?}", cqe.status());
    assert_eq!(cqe.command_id, sqe.command_id);
    cqe.dw0.get()
}

/// The same entry with another key length.
fn with_key_bytes(mut sqe: Sqe, bytes: u32) -> Sqe {
    sqe.cdw11 = (sqe.cdw11.get() & !0xff | bytes).into();
    sqe
}

#[test]
fn keys_and_values_are_accepted_up_to_every_limit_and_rejected_beyond() {
    let harness = start_harness(NodeLimits::default());
    let (admin, mut io) = RawConnection::connect_pair(harness.target_addr(), 16).unwrap();
    let (small, most) = (random_value(1, 100), harness.limits.value_bytes_max);
    use Status as S;
    // Standard keys: 1 to 16 bytes, for every command; List may start anywhere.
    for (bytes, status) in [
        (1, S::SUCCESS),
        (16, S::SUCCESS),
        (0, S::KV_INVALID_KEY_SIZE),
        (17, S::KV_INVALID_KEY_SIZE),
        (255, S::KV_INVALID_KEY_SIZE),
    ] {
        let key = [0xa5; 16];
        assert_status(&mut io, &with_key_bytes(store_in_capsule(1, &key, &small), bytes), &small, status);
        assert_status(&mut io, &with_key_bytes(retrieve(1, &key, 4096), bytes), &[], status);
        assert_status(&mut io, &with_key_bytes(exist(1, &key), bytes), &[], status);
        assert_status(&mut io, &with_key_bytes(delete(1, &key), bytes), &[], status);
        let listed = if bytes == 0 { S::SUCCESS } else { status };
        assert_status(&mut io, &with_key_bytes(list(1, &key, 4096), bytes), &[], listed);
    }
    // Long keys: 1 to 1024 bytes.
    for (bytes, status) in [
        (1_u16, S::SUCCESS),
        (17, S::SUCCESS),
        (1024, S::SUCCESS),
        (0, S::KV_INVALID_KEY_SIZE),
        (1025, S::KV_INVALID_KEY_SIZE),
        (u16::MAX, S::KV_INVALID_KEY_SIZE),
    ] {
        let key = vec![0x6b; usize::from(bytes.min(2000))];
        let here = key.len() as u32;
        let options = StoreOptions::default();
        let put = vendor::VendorCommand::Store { options, key_bytes: bytes, value_bytes: 100 };
        let both = [key.clone(), small.clone()].concat();
        assert_status(&mut io, &vendor_command(1, put, both.len() as u32), &both, status);
        let get = vendor::VendorCommand::Retrieve { key_bytes: bytes, limit_bytes: 4096 };
        assert_status(&mut io, &vendor_command(1, get, here), &key, status);
        assert_status(
            &mut io,
            &vendor_command(1, vendor::VendorCommand::Exist { key_bytes: bytes }, here),
            &key,
            status,
        );
        assert_status(
            &mut io,
            &vendor_command(1, vendor::VendorCommand::Delete { key_bytes: bytes }, here),
            &key,
            status,
        );
    }
    // Values: empty, the longest, one byte more.
    assert_status(&mut io, &store_in_capsule(1, b"none", &[]), &[], S::SUCCESS);
    assert_eq!(assert_status(&mut io, &retrieve(1, b"none", 4096), &[], S::SUCCESS), 0);
    let longest = random_value(2, most as usize);
    let mut done = io.submit_and_await_r2t(&store_by_r2t(1, b"most", most)).unwrap();
    let piece = harness.limits.h2c_data_bytes_max;
    let end = done.offset + done.bytes;
    while done.offset < end {
        done.bytes = piece.min(end - done.offset);
        let bits = if done.offset + done.bytes == end { octokv_wire::pdu::flags::LAST } else { 0 };
        let data = &longest[done.offset as usize..][..done.bytes as usize];
        let pdu = io.h2c_data(done, data, bits);
        io.send(&pdu).unwrap();
        done.offset += done.bytes;
    }
    assert!(io.receive_completion().unwrap().status().is_success());
    assert_eq!(assert_status(&mut io, &retrieve(1, b"most", 10), &[], S::SUCCESS), most);
    assert_status(&mut io, &store_by_r2t(1, b"most", most + 1), &[], S::KV_INVALID_VALUE_SIZE);
    assert_status(&mut io, &store_by_r2t(1, b"most", u32::MAX), &[], S::KV_INVALID_VALUE_SIZE);
    assert_eq!(
        assert_status(&mut io, &retrieve(1, b"most", 10), &[], S::SUCCESS),
        most,
        "the value of before"
    );
    // The entry and its data disagree.
    assert_status(&mut io, &store(1, b"k", 101, Sgl::in_capsule(100)), &small, S::INVALID_SGL_LENGTH);
    assert_status(&mut io, &store(1, b"k", 100, Sgl::in_capsule(101)), &small, S::INVALID_SGL_LENGTH);
    assert_status(&mut io, &store(1, b"k", 100, Sgl::in_capsule(u32::MAX)), &small, S::INVALID_SGL_LENGTH);
    assert_status(&mut io, &store(1, b"k", 50_000, Sgl::transport(40_000)), &[], S::INVALID_SGL_LENGTH);
    assert_status(&mut io, &store(1, b"k", 100, Sgl::transport(0)), &[], S::INVALID_SGL_LENGTH);
    let mut elsewhere = store_in_capsule(1, b"k", &small);
    elsewhere.sgl = octokv_wire::Sqe::from_bytes(&[0xff; 64]).sgl;
    assert_status(&mut io, &elsewhere, &small, S::INVALID_SGL_TYPE);
    assert_status(&mut io, &exist(1, b"k"), &[], S::KV_KEY_DOES_NOT_EXIST);
    // Both conditions at once; namespaces that do not exist.
    let mut both = store_in_capsule(1, b"k", &small);
    both.cdw11 = (both.cdw11.get() | 0x300).into();
    assert_status(&mut io, &both, &small, S::INVALID_FIELD);
    for nsid in [0, 2, 0x7fff_ffff, u32::MAX] {
        let mut elsewhere = exist(1, b"k");
        elsewhere.nsid = nsid.into();
        assert_status(&mut io, &elsewhere, &[], S::INVALID_NAMESPACE);
    }
    drop((io, admin));
    harness.finish().unwrap();
}

#[test]
fn commands_on_the_wrong_queue_are_rejected_and_the_queue_stays_usable() {
    let harness = start_harness(NodeLimits::default());
    let (mut admin, mut io) = RawConnection::connect_pair(harness.target_addr(), 16).unwrap();
    const KEY_VALUE: [u8; 6] =
        [opcode::FLUSH, opcode::STORE, opcode::RETRIEVE, opcode::LIST, opcode::DELETE, opcode::EXIST];
    for wrong in 0..=u8::MAX {
        let here = Sqe { nsid: 1.into(), ..Sqe::new(wrong, 7) };
        // Fabrics commands and the queue's own are tested elsewhere; an opcode in neither set must be rejected.
        let of_extension = matches!(wrong, 0x81 | 0x83 | 0x87 | 0x91 | 0x95);
        if wrong != queue_entry::FABRICS_OPCODE && !KEY_VALUE.contains(&wrong) && !of_extension {
            assert_status(&mut io, &here, &[], Status::INVALID_OPCODE);
        }
        use queue_entry::admin as a;
        let own = [
            a::GET_LOG_PAGE,
            a::IDENTIFY,
            a::ABORT,
            a::SET_FEATURES,
            a::GET_FEATURES,
            a::ASYNC_EVENT_REQUEST,
            a::KEEP_ALIVE,
        ];
        if wrong != queue_entry::FABRICS_OPCODE && !own.contains(&wrong) {
            assert_status(&mut admin, &here, &[], Status::INVALID_OPCODE);
        }
    }
    assert!(admin.execute(&keep_alive(1), &[]).unwrap().status().is_success());
    assert!(io.execute(&flush(1), &[]).unwrap().status().is_success());
    drop((io, admin));
    harness.finish().unwrap();
}

#[test]
fn event_requests_and_aborts_beyond_their_limits_are_refused_and_none_is_lost() {
    let harness = start_harness(NodeLimits::default());
    let most = u16::from(harness.limits.event_requests_max);
    let (mut admin, io) = RawConnection::connect_pair(harness.target_addr(), 16).unwrap();
    let flood: Vec<u8> = (0..500).flat_map(|id| admin.capsule(&async_event_request(id), &[])).collect();
    admin.send(&flood).unwrap();
    // The first ones stay pending; every other is rejected, in order.
    for id in most..500 {
        let cqe = admin.receive_completion().unwrap();
        assert_eq!(cqe.command_id.get(), id);
        assert!(cqe.status().is(Status::EVENT_LIMIT_EXCEEDED), "{cqe:?}");
    }
    // The command identifier of a pending event request is in use.
    let cqe = admin.execute(&keep_alive(0), &[]).unwrap();
    assert!(cqe.status().is(Status::COMMAND_ID_CONFLICT), "{cqe:?}");
    // Aborts of every identifier: those four are aborted, all others complete with "not aborted".
    let (mut aborted, mut not) = (0, 0);
    for queue in [0, 1, 2, u16::MAX] {
        for command in 0..200 {
            admin.send(&admin.capsule(&abort(1000, queue, command), &[])).unwrap();
            let mut cqe = admin.receive_completion().unwrap();
            if cqe.command_id.get() != 1000 {
                assert!(cqe.status().is(Status::ABORT_REQUESTED), "{cqe:?}");
                assert_eq!((cqe.command_id.get(), queue), (command, 0));
                aborted += 1;
                cqe = admin.receive_completion().unwrap();
                assert_eq!(cqe.dw0.get() & 1, 0);
            } else {
                assert_eq!(cqe.dw0.get() & 1, 1);
                not += 1;
            }
            assert!(cqe.status().is_success(), "{cqe:?}");
        }
    }
    assert_eq!((aborted, not), (most, 800 - most));
    drop((io, admin));
    harness.finish().unwrap();
}

#[test]
fn an_identifier_in_use_is_refused_and_more_commands_than_the_queue_holds_end_the_connection() {
    let harness = start_harness(NodeLimits::default());
    let (admin, mut io) = RawConnection::connect_pair(harness.target_addr(), 8).unwrap();
    // A transfer holds identifier 5 until its data has arrived.
    let asked = io.submit_and_await_r2t(&store_by_r2t(5, b"twice", 20_000)).unwrap();
    for sqe in [store_by_r2t(5, b"twice", 20_000), exist(5, b"twice"), flush(5)] {
        assert_status(&mut io, &sqe, &[], Status::COMMAND_ID_CONFLICT);
    }
    io.send(&io.h2c_data(asked, &random_value(1, 20_000), octokv_wire::pdu::flags::LAST)).unwrap();
    assert!(io.receive_completion().unwrap().status().is_success());
    assert_status(&mut io, &exist(5, b"twice"), &[], Status::SUCCESS);
    // Nothing is at the engine and every slot waits for data: only the host could free one, behind this command.
    let flood: Vec<u8> = (0..9).flat_map(|id| io.capsule(&store_by_r2t(id, b"flood", 20_000), &[])).collect();
    io.send(&flood).unwrap();
    let mut asks = 0;
    loop {
        match io.receive_pdu().unwrap() {
            ReceivedPdu::R2t(_) => asks += 1,
            // FES 1, FEI 10: the command identifier of the first excess command.
            ReceivedPdu::TermReq { fatal_error_status: 1, fatal_error_information: 10 } => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(asks <= 8, "{asks}");
    drop((io, admin));
    harness.finish().unwrap();
}

/// Connections of this many controllers, with all I/O queues.
fn connect_queues(harness: &AttackHarness, controllers: usize) -> (Vec<RawConnection>, Vec<RawConnection>) {
    let (mut admins, mut queues) = (Vec::new(), Vec::new());
    for _ in 0..controllers {
        let (admin, id) = RawConnection::connect_admin(harness.target_addr()).unwrap();
        for queue in 1..=harness.limits.io_queues_max {
            queues.push(RawConnection::connect_io(harness.target_addr(), id, queue, 64).unwrap());
        }
        admins.push(admin);
    }
    (admins, queues)
}

#[test]
fn sixty_four_thousand_commands_at_once_of_hosts_that_never_read_stay_within_the_memory_bound() {
    let harness = start_harness(NodeLimits::default());
    let (admins, mut io) = connect_queues(&harness, 4);
    let large = random_value(9, 12_000);
    assert!(io[0].execute(&store_in_capsule(1, b"large", &large), &large).unwrap().status().is_success());
    // 16 connections with 4096 commands each: Retrieves of 12 KB, more than 700 MB in all.
    let mut unsent: Vec<Vec<u8>> = Vec::new();
    for peer in &io {
        let commands = (0..4096).flat_map(|id| peer.capsule(&retrieve(id, b"large", 16 << 10), &[]));
        unsent.push(commands.collect());
    }
    let before = unsent.iter().map(Vec::len).sum::<usize>();
    // They send as long as the node reads; once it has read nothing for a while, its bounds hold.
    let mut quiet = 0;
    while quiet < 20 {
        let mut taken = 0;
        for (peer, bytes) in io.iter_mut().zip(&mut unsent) {
            let count =
                peer.send_nonblocking(bytes).unwrap().expect("the node may not close on a full queue");
            bytes.drain(..count);
            taken += count;
        }
        quiet = if taken == 0 { quiet + 1 } else { 0 };
        harness.reference_client_progresses().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = unsent.iter().map(Vec::len).sum::<usize>();
    assert!(left < before, "nothing was sent");
    // One of them reads after all, and receives every response.
    let mut answers = 0;
    let mut last = io.pop().unwrap();
    let mut rest = unsent.pop().unwrap();
    while answers < 4096 {
        let count = last.send_nonblocking(&rest).unwrap().expect("open");
        rest.drain(..count);
        match last.receive_pdu().unwrap() {
            ReceivedPdu::Response(cqe) => {
                assert!(cqe.status().is_success() || cqe.status().is(Status::COMMAND_INTERRUPTED), "{cqe:?}");
                answers += 1;
            }
            ReceivedPdu::C2hData(_, data) => assert!(data == large),
            other => panic!("{other:?}"),
        }
    }
    drop((io, last, admins));
    harness.finish().unwrap();
}

#[test]
fn hosts_that_disconnect_mid_command_leak_nothing() {
    let harness = start_harness(NodeLimits::default());
    let large = random_value(9, 12_000);
    for round in 0..30_u32 {
        let Ok((_admin, mut io)) = RawConnection::connect_pair(harness.target_addr(), 64) else {
            // The node still counts connections closed a moment ago.
            harness.wait_idle().unwrap();
            continue;
        };
        io.execute(&store_in_capsule(100, b"left", &large), &large).unwrap();
        let mut bytes = Vec::new();
        for id in 0..20 {
            bytes.extend(match (u32::from(id) + round) % 4 {
                0 => io.capsule(&retrieve(id, b"left", 16 << 10), &[]),
                1 => io.capsule(&store_by_r2t(id, b"left", 100_000), &[]),
                2 => io.capsule(&store_in_capsule(id, b"left", &large), &large),
                _ => io.capsule(&list(id, b"", 100_000), &[]),
            });
        }
        // Truncated; with unread responses the kernel turns the close into a reset.
        io.send(&bytes[..bytes.len() - (round as usize * 37) % 3000]).unwrap();
        if round % 2 == 0 {
            io.receive_pdu().unwrap();
        }
    }
    harness.finish().unwrap();
}

#[test]
fn a_huge_list_and_floods_of_pages_are_answered_within_their_bounds() {
    let harness = start_harness(NodeLimits::default());
    let (mut admin, mut io) = RawConnection::connect_pair(harness.target_addr(), 64).unwrap();
    for number in 0..3000_u32 {
        let key = format!("list{number:08}");
        assert!(
            io.execute(&store_in_capsule(1, key.as_bytes(), &[1; 10]), &[1; 10])
                .unwrap()
                .status()
                .is_success()
        );
    }
    // Far more than any transfer: the request is truncated, and whole keys are returned.
    io.send(&io.capsule(&list(1, b"", u32::MAX), &[])).unwrap();
    let ReceivedPdu::C2hData(_, data) = io.receive_pdu().unwrap() else { panic!("no list") };
    let keys = UncheckedKeyList(&data).check().unwrap().keys().filter(|key| key.starts_with(b"list")).count();
    assert_eq!(keys, 3000);
    assert!(data.len() <= harness.limits.value_bytes_max as usize);
    assert!(io.receive_completion().unwrap().status().is_success());
    // No space for the count; space for the count alone.
    assert_status(&mut io, &list(1, b"", 0), &[], Status::INVALID_FIELD);
    assert_status(&mut io, &list(1, b"", 3), &[], Status::INVALID_FIELD);
    assert_status(&mut io, &list(1, b"", 4), &[], Status::SUCCESS);
    // As many as the queue accepts, all at once.
    for round in 0..4 {
        let flood: Vec<u8> = (0..60).flat_map(|id| io.capsule(&list(id, b"", u32::MAX), &[])).collect();
        io.send(&flood).unwrap();
        for _ in 0..60 {
            let status = io.receive_completion().unwrap().status();
            assert!(
                status.is_success() || status.is(Status::COMMAND_INTERRUPTED),
                "round {round}: {status:?}"
            );
        }
    }
    // Pages: every existing and missing Identify, every log page, at the maximum length.
    for cns in 0..=0x20 {
        admin.execute(&identify(2, cns), &[]).unwrap();
    }
    for page in 0..=u8::MAX {
        admin.execute(&log_page(2, page, 4096), &[]).unwrap();
        admin.execute(&log_page(2, page, u32::MAX), &[]).unwrap();
    }
    let flood: Vec<u8> = (0..2000).flat_map(|id| admin.capsule(&identify(id, 1), &[])).collect();
    admin.send(&flood).unwrap();
    for _ in 0..2000 {
        let status = admin.receive_completion().unwrap().status();
        assert!(status.is_success(), "{status:?}");
    }
    drop((io, admin));
    assert!(eventually(RECEIVE_TIMEOUT, || harness.attacker_sockets() == 0));
    harness.finish().unwrap();
}

#[test]
fn many_long_lists_at_once_do_not_starve_other_hosts() {
    // Records of 4 KiB: a listing reads the whole block of each. Buffers for all listings at once.
    let harness = start_harness(NodeLimits {
        device_bytes: 128 << 20,
        unit_bytes: 4096,
        buffer_bytes: 32 << 20,
        ..NodeLimits::default()
    });
    let (admin, mut io) = RawConnection::connect_pair(harness.target_addr(), 64).unwrap();
    for first in (0..14_000_u32).step_by(50) {
        let stores: Vec<u8> = (0..50)
            .flat_map(|id| {
                let key = format!("list{:08}", first + u32::from(id));
                io.capsule(&store_in_capsule(id, key.as_bytes(), &[1; 10]), &[1; 10])
            })
            .collect();
        io.send(&stores).unwrap();
        for _ in 0..50 {
            assert!(io.receive_completion().unwrap().status().is_success());
        }
    }
    harness.reset_max_latency();
    // Together they read 840,000 records.
    let began = Instant::now();
    let flood: Vec<u8> = (0..60).flat_map(|id| io.capsule(&list(id, b"", u32::MAX), &[])).collect();
    io.send(&flood).unwrap();
    for _ in 0..60 {
        let status = io.receive_completion().unwrap().status();
        assert!(status.is_success() || status.is(Status::COMMAND_INTERRUPTED), "{status:?}");
    }
    let took = began.elapsed();
    drop((io, admin));
    let outcome = harness.finish().unwrap();
    // A listing that never yielded would delay it for most of that; `scripts/adversary` measures the usual delay.
    let worst = Duration::from_nanos(outcome.reference_client.max_latency_ns);
    assert!(worst < took / 3, "an honest host waited {worst:?} of {took:?}");
}
