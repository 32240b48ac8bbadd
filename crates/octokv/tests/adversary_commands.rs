//! Hosts whose commands are wrong, too many, too large, or never read: each command gets the specification's status,
//! and memory stays within its bound.

#![allow(clippy::disallowed_methods, reason = "the attack has a pace")]

use octokv_adversary::attack_harness::{Limits, Siege};
use octokv_adversary::command_builder::{
    abort, delete, event_request, exist, flush, identify, keep_alive, list, log_page, long, retrieve, store,
    store_here, store_there, value,
};
use octokv_adversary::node_process::eventually;
use octokv_adversary::raw_connection::{Heard, PATIENCE, Peer};
use octokv_wire::kv::{StoreOptions, UncheckedList, opcode};
use octokv_wire::{Sgl, Sqe, Status, queue_entry, vendor};
use std::path::Path;
use std::time::{Duration, Instant};

fn siege(limits: Limits) -> Siege {
    Siege::begin(Path::new(env!("CARGO_BIN_EXE_octokv")), limits).unwrap()
}

#[track_caller]
fn says(peer: &mut Peer, sqe: &Sqe, data: &[u8], status: Status) -> u32 {
    let cqe = peer.ask(sqe, data).unwrap();
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
fn keys_and_values_at_every_limit_are_taken_and_past_every_limit_refused() {
    let siege = siege(Limits::default());
    let (admin, mut io) = Peer::pair(siege.victim(), 16).unwrap();
    let (small, most) = (value(1, 100), siege.limits.value_bytes_max);
    use Status as S;
    // Standard keys: 1 to 16 bytes, for every command; List may begin anywhere.
    for (bytes, status) in [
        (1, S::SUCCESS),
        (16, S::SUCCESS),
        (0, S::KV_INVALID_KEY_SIZE),
        (17, S::KV_INVALID_KEY_SIZE),
        (255, S::KV_INVALID_KEY_SIZE),
    ] {
        let key = [0xa5; 16];
        says(&mut io, &with_key_bytes(store_here(1, &key, &small), bytes), &small, status);
        says(&mut io, &with_key_bytes(retrieve(1, &key, 4096), bytes), &[], status);
        says(&mut io, &with_key_bytes(exist(1, &key), bytes), &[], status);
        says(&mut io, &with_key_bytes(delete(1, &key), bytes), &[], status);
        let listed = if bytes == 0 { S::SUCCESS } else { status };
        says(&mut io, &with_key_bytes(list(1, &key, 4096), bytes), &[], listed);
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
        let put = vendor::Command::Store { options, key_bytes: bytes, value_bytes: 100 };
        let both = [key.clone(), small.clone()].concat();
        says(&mut io, &long(1, put, both.len() as u32), &both, status);
        let get = vendor::Command::Retrieve { key_bytes: bytes, limit_bytes: 4096 };
        says(&mut io, &long(1, get, here), &key, status);
        says(&mut io, &long(1, vendor::Command::Exist { key_bytes: bytes }, here), &key, status);
        says(&mut io, &long(1, vendor::Command::Delete { key_bytes: bytes }, here), &key, status);
    }
    // Values: none, the longest, one more.
    says(&mut io, &store_here(1, b"none", &[]), &[], S::SUCCESS);
    assert_eq!(says(&mut io, &retrieve(1, b"none", 4096), &[], S::SUCCESS), 0);
    let longest = value(2, most as usize);
    let mut done = io.ask_to_send(&store_there(1, b"most", most)).unwrap();
    let piece = siege.limits.h2c_data_bytes_max;
    let end = done.offset + done.bytes;
    while done.offset < end {
        done.bytes = piece.min(end - done.offset);
        let bits = if done.offset + done.bytes == end { octokv_wire::pdu::flags::LAST } else { 0 };
        let data = &longest[done.offset as usize..][..done.bytes as usize];
        let pdu = io.host_data(done, data, bits);
        io.send(&pdu).unwrap();
        done.offset += done.bytes;
    }
    assert!(io.completion().unwrap().status().is_success());
    assert_eq!(says(&mut io, &retrieve(1, b"most", 10), &[], S::SUCCESS), most);
    says(&mut io, &store_there(1, b"most", most + 1), &[], S::KV_INVALID_VALUE_SIZE);
    says(&mut io, &store_there(1, b"most", u32::MAX), &[], S::KV_INVALID_VALUE_SIZE);
    assert_eq!(says(&mut io, &retrieve(1, b"most", 10), &[], S::SUCCESS), most, "the value of before");
    // The entry and its data do not agree.
    says(&mut io, &store(1, b"k", 101, Sgl::in_capsule(100)), &small, S::INVALID_SGL_LENGTH);
    says(&mut io, &store(1, b"k", 100, Sgl::in_capsule(101)), &small, S::INVALID_SGL_LENGTH);
    says(&mut io, &store(1, b"k", 100, Sgl::in_capsule(u32::MAX)), &small, S::INVALID_SGL_LENGTH);
    says(&mut io, &store(1, b"k", 50_000, Sgl::transport(40_000)), &[], S::INVALID_SGL_LENGTH);
    says(&mut io, &store(1, b"k", 100, Sgl::transport(0)), &[], S::INVALID_SGL_LENGTH);
    let mut elsewhere = store_here(1, b"k", &small);
    elsewhere.sgl = octokv_wire::Sqe::from_bytes(&[0xff; 64]).sgl;
    says(&mut io, &elsewhere, &small, S::INVALID_SGL_TYPE);
    says(&mut io, &exist(1, b"k"), &[], S::KV_KEY_DOES_NOT_EXIST);
    // Both conditions at once; namespaces that are not.
    let mut both = store_here(1, b"k", &small);
    both.cdw11 = (both.cdw11.get() | 0x300).into();
    says(&mut io, &both, &small, S::INVALID_FIELD);
    for nsid in [0, 2, 0x7fff_ffff, u32::MAX] {
        let mut elsewhere = exist(1, b"k");
        elsewhere.nsid = nsid.into();
        says(&mut io, &elsewhere, &[], S::INVALID_NAMESPACE);
    }
    drop((io, admin));
    siege.end().unwrap();
}

#[test]
fn commands_on_the_wrong_queue_are_refused_and_the_queue_goes_on() {
    let siege = siege(Limits::default());
    let (mut admin, mut io) = Peer::pair(siege.victim(), 16).unwrap();
    const KEY_VALUE: [u8; 6] =
        [opcode::FLUSH, opcode::STORE, opcode::RETRIEVE, opcode::LIST, opcode::DELETE, opcode::EXIST];
    for wrong in 0..=u8::MAX {
        let here = Sqe { nsid: 1.into(), ..Sqe::new(wrong, 7) };
        // Fabrics commands and the queue's own are tested elsewhere; what is in neither set must be refused.
        let of_extension = matches!(wrong, 0x81 | 0x83 | 0x87 | 0x91 | 0x95);
        if wrong != queue_entry::FABRICS && !KEY_VALUE.contains(&wrong) && !of_extension {
            says(&mut io, &here, &[], Status::INVALID_OPCODE);
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
        if wrong != queue_entry::FABRICS && !own.contains(&wrong) {
            says(&mut admin, &here, &[], Status::INVALID_OPCODE);
        }
    }
    assert!(admin.ask(&keep_alive(1), &[]).unwrap().status().is_success());
    assert!(io.ask(&flush(1), &[]).unwrap().status().is_success());
    drop((io, admin));
    siege.end().unwrap();
}

#[test]
fn event_requests_and_aborts_beyond_their_limits_are_refused_and_none_is_lost() {
    let siege = siege(Limits::default());
    let most = u16::from(siege.limits.event_requests_max);
    let (mut admin, io) = Peer::pair(siege.victim(), 16).unwrap();
    let flood: Vec<u8> = (0..500).flat_map(|id| admin.capsule(&event_request(id), &[])).collect();
    admin.send(&flood).unwrap();
    // The first so many stay; every other is refused, in order.
    for id in most..500 {
        let cqe = admin.completion().unwrap();
        assert_eq!(cqe.command_id.get(), id);
        assert!(cqe.status().is(Status::EVENT_LIMIT_EXCEEDED), "{cqe:?}");
    }
    // A command identifier that an event request has is taken.
    let cqe = admin.ask(&keep_alive(0), &[]).unwrap();
    assert!(cqe.status().is(Status::COMMAND_ID_CONFLICT), "{cqe:?}");
    // Aborts of everything: those four are aborted, of all others "not aborted" is said.
    let (mut aborted, mut not) = (0, 0);
    for queue in [0, 1, 2, u16::MAX] {
        for command in 0..200 {
            admin.send(&admin.capsule(&abort(1000, queue, command), &[])).unwrap();
            let mut cqe = admin.completion().unwrap();
            if cqe.command_id.get() != 1000 {
                assert!(cqe.status().is(Status::ABORT_REQUESTED), "{cqe:?}");
                assert_eq!((cqe.command_id.get(), queue), (command, 0));
                aborted += 1;
                cqe = admin.completion().unwrap();
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
    siege.end().unwrap();
}

#[test]
fn an_identifier_in_use_is_refused_and_more_commands_than_the_queue_holds_end_the_connection() {
    let siege = siege(Limits::default());
    let (admin, mut io) = Peer::pair(siege.victim(), 8).unwrap();
    // A transfer holds identifier 5 until its data has come.
    let asked = io.ask_to_send(&store_there(5, b"twice", 20_000)).unwrap();
    for sqe in [store_there(5, b"twice", 20_000), exist(5, b"twice"), flush(5)] {
        says(&mut io, &sqe, &[], Status::COMMAND_ID_CONFLICT);
    }
    io.send(&io.host_data(asked, &value(1, 20_000), octokv_wire::pdu::flags::LAST)).unwrap();
    assert!(io.completion().unwrap().status().is_success());
    says(&mut io, &exist(5, b"twice"), &[], Status::SUCCESS);
    // Nothing is at the engine and every slot waits for data: only the host could free one, behind this command.
    let flood: Vec<u8> = (0..9).flat_map(|id| io.capsule(&store_there(id, b"flood", 20_000), &[])).collect();
    io.send(&flood).unwrap();
    let mut asks = 0;
    loop {
        match io.hear().unwrap() {
            Heard::Ask(_) => asks += 1,
            // FES 1, FEI 10: the command identifier of the one too many.
            Heard::Terminated { fatal: 1, information: 10 } => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(asks <= 8, "{asks}");
    drop((io, admin));
    siege.end().unwrap();
}

/// Connections of one controller, all I/O queues.
fn queues(siege: &Siege, controllers: usize) -> (Vec<Peer>, Vec<Peer>) {
    let (mut admins, mut queues) = (Vec::new(), Vec::new());
    for _ in 0..controllers {
        let (admin, id) = Peer::admin(siege.victim()).unwrap();
        for queue in 1..=siege.limits.io_queues_max {
            queues.push(Peer::io(siege.victim(), id, queue, 64).unwrap());
        }
        admins.push(admin);
    }
    (admins, queues)
}

#[test]
fn sixty_four_thousand_commands_at_once_of_hosts_that_never_read_stay_within_the_memory_bound() {
    let siege = siege(Limits::default());
    let (admins, mut io) = queues(&siege, 4);
    let large = value(9, 12_000);
    assert!(io[0].ask(&store_here(1, b"large", &large), &large).unwrap().status().is_success());
    // 16 connections with 4096 commands each: Retrieves that bring 12 KB, more than 700 MB in all.
    let mut unsent: Vec<Vec<u8>> = Vec::new();
    for peer in &io {
        let commands = (0..4096).flat_map(|id| peer.capsule(&retrieve(id, b"large", 16 << 10), &[]));
        unsent.push(commands.collect());
    }
    let before = unsent.iter().map(Vec::len).sum::<usize>();
    // They push as long as the node takes anything; when it has taken nothing for a while, its bounds hold.
    let mut quiet = 0;
    while quiet < 20 {
        let mut taken = 0;
        for (peer, bytes) in io.iter_mut().zip(&mut unsent) {
            let count = peer.push(bytes).unwrap().expect("the node may not close on a full queue");
            bytes.drain(..count);
            taken += count;
        }
        quiet = if taken == 0 { quiet + 1 } else { 0 };
        siege.honest_is_served().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = unsent.iter().map(Vec::len).sum::<usize>();
    assert!(left < before, "nothing was sent");
    // One of them reads after all, and has every answer.
    let mut answers = 0;
    let mut last = io.pop().unwrap();
    let mut rest = unsent.pop().unwrap();
    while answers < 4096 {
        let count = last.push(&rest).unwrap().expect("open");
        rest.drain(..count);
        match last.hear().unwrap() {
            Heard::Response(cqe) => {
                assert!(cqe.status().is_success() || cqe.status().is(Status::COMMAND_INTERRUPTED), "{cqe:?}");
                answers += 1;
            }
            Heard::Data(_, data) => assert!(data == large),
            other => panic!("{other:?}"),
        }
    }
    drop((io, last, admins));
    siege.end().unwrap();
}

#[test]
fn hosts_that_leave_in_the_midst_of_everything_leave_nothing_behind() {
    let siege = siege(Limits::default());
    let large = value(9, 12_000);
    for round in 0..30_u32 {
        let Ok((_admin, mut io)) = Peer::pair(siege.victim(), 64) else {
            // The node still counts those that left a moment ago.
            siege.until_deserted().unwrap();
            continue;
        };
        io.ask(&store_here(100, b"left", &large), &large).unwrap();
        let mut bytes = Vec::new();
        for id in 0..20 {
            bytes.extend(match (u32::from(id) + round) % 4 {
                0 => io.capsule(&retrieve(id, b"left", 16 << 10), &[]),
                1 => io.capsule(&store_there(id, b"left", 100_000), &[]),
                2 => io.capsule(&store_here(id, b"left", &large), &large),
                _ => io.capsule(&list(id, b"", 100_000), &[]),
            });
        }
        // Cut somewhere; with unread answers the kernel makes a reset of the close.
        io.send(&bytes[..bytes.len() - (round as usize * 37) % 3000]).unwrap();
        if round % 2 == 0 {
            io.hear().unwrap();
        }
    }
    siege.end().unwrap();
}

#[test]
fn a_huge_list_and_floods_of_pages_are_answered_within_their_bounds() {
    let siege = siege(Limits::default());
    let (mut admin, mut io) = Peer::pair(siege.victim(), 64).unwrap();
    for number in 0..3000_u32 {
        let key = format!("list{number:08}");
        assert!(io.ask(&store_here(1, key.as_bytes(), &[1; 10]), &[1; 10]).unwrap().status().is_success());
    }
    // Far more than any transfer may bring: what the host asks for is cut, and whole keys come.
    io.send(&io.capsule(&list(1, b"", u32::MAX), &[])).unwrap();
    let Heard::Data(_, data) = io.hear().unwrap() else { panic!("no list") };
    let keys = UncheckedList(&data).check().unwrap().keys().filter(|key| key.starts_with(b"list")).count();
    assert_eq!(keys, 3000);
    assert!(data.len() <= siege.limits.value_bytes_max as usize);
    assert!(io.completion().unwrap().status().is_success());
    // No room for even the count; room for the count alone.
    says(&mut io, &list(1, b"", 0), &[], Status::INVALID_FIELD);
    says(&mut io, &list(1, b"", 3), &[], Status::INVALID_FIELD);
    says(&mut io, &list(1, b"", 4), &[], Status::SUCCESS);
    // As many as the queue takes, all at once.
    for round in 0..4 {
        let flood: Vec<u8> = (0..60).flat_map(|id| io.capsule(&list(id, b"", u32::MAX), &[])).collect();
        io.send(&flood).unwrap();
        for _ in 0..60 {
            let status = io.completion().unwrap().status();
            assert!(
                status.is_success() || status.is(Status::COMMAND_INTERRUPTED),
                "round {round}: {status:?}"
            );
        }
    }
    // Pages: every Identify there is or is not, every log page, as long as can be asked for.
    for cns in 0..=0x20 {
        admin.ask(&identify(2, cns), &[]).unwrap();
    }
    for page in 0..=u8::MAX {
        admin.ask(&log_page(2, page, 4096), &[]).unwrap();
        admin.ask(&log_page(2, page, u32::MAX), &[]).unwrap();
    }
    let flood: Vec<u8> = (0..2000).flat_map(|id| admin.capsule(&identify(id, 1), &[])).collect();
    admin.send(&flood).unwrap();
    for _ in 0..2000 {
        let status = admin.completion().unwrap().status();
        assert!(status.is_success(), "{status:?}");
    }
    drop((io, admin));
    assert!(eventually(PATIENCE, || siege.strangers() == 0));
    siege.end().unwrap();
}

#[test]
fn many_long_lists_at_once_leave_other_hosts_their_turn() {
    // Records of 4 KiB: a listing reads the whole block of each. Buffers for all of the listings at once.
    let siege = siege(Limits {
        device_bytes: 128 << 20,
        unit_bytes: 4096,
        buffer_bytes: 32 << 20,
        ..Limits::default()
    });
    let (admin, mut io) = Peer::pair(siege.victim(), 64).unwrap();
    for first in (0..14_000_u32).step_by(50) {
        let stores: Vec<u8> = (0..50)
            .flat_map(|id| {
                let key = format!("list{:08}", first + u32::from(id));
                io.capsule(&store_here(id, key.as_bytes(), &[1; 10]), &[1; 10])
            })
            .collect();
        io.send(&stores).unwrap();
        for _ in 0..50 {
            assert!(io.completion().unwrap().status().is_success());
        }
    }
    siege.forget_the_worst();
    // Together they read 840,000 records.
    let began = Instant::now();
    let flood: Vec<u8> = (0..60).flat_map(|id| io.capsule(&list(id, b"", u32::MAX), &[])).collect();
    io.send(&flood).unwrap();
    for _ in 0..60 {
        let status = io.completion().unwrap().status();
        assert!(status.is_success() || status.is(Status::COMMAND_INTERRUPTED), "{status:?}");
    }
    let took = began.elapsed();
    drop((io, admin));
    let outcome = siege.end().unwrap();
    // A listing that gave nobody a turn would make it wait for most of that; what is usual `scripts/hostile` measures.
    let worst = Duration::from_nanos(outcome.honest.worst_ns);
    assert!(worst < took / 3, "an honest host waited {worst:?} of {took:?}");
}
