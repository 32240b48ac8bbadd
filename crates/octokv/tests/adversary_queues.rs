//! Hosts that play games with connections, controllers and queues of a real node: each Connect is answered with the
//! specification's status and the field that is wrong, silence is ended in time, and floods take only what the
//! settings allow.

#![allow(clippy::disallowed_methods, reason = "a test of time limits reads the clock")]

use octokv_adversary::attack_harness::{Limits, Siege};
use octokv_adversary::command_builder::{event_request, exist, flush, keep_alive};
use octokv_adversary::node_process::eventually;
use octokv_adversary::raw_connection::{Heard, Joining, PATIENCE, Peer, Victim, granted};
use octokv_wire::fabrics::{Command, Configuration, Connect, NEW_CONTROLLER, invalid_parameter};
use octokv_wire::pdu::IcRequest;
use octokv_wire::{Cqe, Status};
use std::path::Path;
use std::time::{Duration, Instant};

fn siege(limits: Limits) -> Siege {
    Siege::begin(Path::new(env!("CARGO_BIN_EXE_octokv")), limits).unwrap()
}

/// Connects a queue on a connection of its own.
fn join(victim: &Victim, joining: &Joining) -> (Peer, Cqe) {
    let mut peer = Peer::open(victim, false, false).unwrap();
    let cqe = peer.join(joining).unwrap();
    (peer, cqe)
}

/// DW0 of a refused Connect: the offset of the bad field in the entry, or in the data.
fn entry(offset: u16) -> u32 {
    invalid_parameter(offset, false)
}
fn data(offset: u16) -> u32 {
    invalid_parameter(offset, true)
}

#[test]
fn connects_that_cannot_be_are_refused_with_the_field_that_is_wrong() {
    let siege = siege(Limits::default());
    let victim = siege.victim();
    let (_admin, mine) = Peer::admin(victim).unwrap();
    let (_discovery, discovery) = Peer::admin_as(victim, &Joining::discovery(), false, false).unwrap();
    let mut disabled = Peer::open(victim, false, false).unwrap();
    let not_enabled = granted(&disabled.join(&Joining::admin(victim)).unwrap()).unwrap();
    let other_host = Joining {
        host: "nqn.2026-11.io.octokv:another".to_owned(),
        host_id: [9; 16],
        ..Joining::admin(victim)
    };
    let (_other, others) = Peer::admin_as(victim, &other_host, false, false).unwrap();
    let _first = Peer::io(victim, mine, 1, 16).unwrap();

    let io = |queue, entries| Joining::io(victim, mine, queue, entries);
    let admin = || Joining::admin(victim);
    let with = |joining: Joining, change: fn(Connect) -> Connect| Joining {
        connect: change(joining.connect),
        ..joining
    };
    let depth = u32::from(siege.limits.queue_depth);
    let (invalid, sequence) = (Status::CONNECT_INVALID_PARAMETERS, Status::COMMAND_SEQUENCE_ERROR);
    let table: Vec<(&str, Joining, Status, u32)> = vec![
        ("a queue twice", io(1, 16), sequence, 0),
        ("a queue beyond the limit", io(siege.limits.io_queues_max + 1, 16), invalid, entry(42)),
        ("the last queue identifier", io(u16::MAX, 16), invalid, entry(42)),
        ("a queue of one entry", io(2, 1), invalid, entry(44)),
        ("a queue deeper than CAP says", io(2, depth + 1), invalid, entry(44)),
        ("the deepest queue", io(2, 65_536), invalid, entry(44)),
        ("no such controller", Joining { controller_id: 0x7777, ..io(2, 16) }, invalid, data(16)),
        (
            "a queue of a new controller",
            Joining { controller_id: NEW_CONTROLLER, ..io(2, 16) },
            invalid,
            data(16),
        ),
        ("another host's controller", Joining { controller_id: others, ..io(2, 16) }, invalid, data(512)),
        ("another host identifier", Joining { host_id: [3; 16], ..io(2, 16) }, invalid, data(0)),
        (
            "a queue of a discovery controller",
            Joining { controller_id: discovery, ..io(2, 16) },
            invalid,
            data(16),
        ),
        ("a queue before enable", Joining { controller_id: not_enabled, ..io(1, 16) }, sequence, 0),
        (
            "an I/O queue of discovery",
            with(Joining::discovery(), |c| Connect { queue_id: 1, ..c }),
            invalid,
            entry(42),
        ),
        ("a controller that is named", Joining { controller_id: mine, ..admin() }, invalid, data(16)),
        (
            "no such subsystem",
            Joining { subsystem: "nqn.2026-11.org.example:no".to_owned(), ..admin() },
            invalid,
            data(256),
        ),
        ("a subsystem without a name", Joining { subsystem: String::new(), ..admin() }, invalid, data(256)),
        ("a host name that is none", Joining { host: "a host".to_owned(), ..admin() }, invalid, data(512)),
        (
            "a record format that is not",
            with(admin(), |c| Connect { format: 1, ..c }),
            Status::CONNECT_INCOMPATIBLE_FORMAT,
            0,
        ),
        (
            "a keep-alive time beyond the limit",
            with(admin(), |c| Connect { keep_alive_ms: u32::MAX, ..c }),
            invalid,
            entry(48),
        ),
    ];
    for (what, joining, status, dw0) in table {
        let (mut peer, cqe) = join(victim, &joining);
        assert!(cqe.status().is(status), "{what}: {:?}", cqe.status());
        assert_eq!(cqe.dw0.get(), dw0, "{what}");
        // The same connection may try again, rightly.
        let again =
            peer.join(&Joining { host: "nqn.2026-11.io.octokv:again".to_owned(), ..admin() }).unwrap();
        assert!(again.status().is_success(), "after {what}: {again:?}");
    }
    // On a connected queue no second Connect: the queue goes on.
    let (mut admin_peer, _) = Peer::admin(victim).unwrap();
    assert!(admin_peer.join(&admin()).unwrap().status().is(sequence));
    assert!(admin_peer.ask(&keep_alive(1), &[]).unwrap().status().is_success());
    let mut second = Peer::io(victim, mine, 2, 16).unwrap();
    assert!(second.join(&io(3, 16)).unwrap().status().is(sequence));
    assert!(second.ask(&flush(1), &[]).unwrap().status().is_success());
    // Other Fabrics commands have no place on an I/O queue, nor Disconnect on the admin queue.
    let property = Command::PropertyGet { offset: 0x1c, wide: false }.encode(2);
    assert!(second.ask(&property, &[]).unwrap().status().is(Status::INVALID_OPCODE));
    assert!(
        admin_peer
            .ask(&Command::Disconnect.encode(2), &[])
            .unwrap()
            .status()
            .is(Status::DISCONNECT_INVALID_QUEUE)
    );
    drop((admin_peer, second));
    // A reset takes the I/O queues with it; one that was connected before is closed, its identifier is free.
    let (mut admin_peer, id) = Peer::admin(victim).unwrap();
    let mut before = Peer::io(victim, id, 1, 16).unwrap();
    admin_peer.configure(Configuration(0)).unwrap();
    assert!(!before.until_closed().unwrap());
    admin_peer.configure(Configuration::ENABLED).unwrap();
    let mut after = Peer::io(victim, id, 1, 16).unwrap();
    assert!(after.ask(&flush(1), &[]).unwrap().status().is_success());
    // And so does the end of the admin connection.
    drop(admin_peer);
    assert!(!after.until_closed().unwrap());
    drop((_admin, _discovery, disabled, _other, _first, after, before));
    siege.end().unwrap();
}

#[test]
fn floods_of_connections_and_controllers_take_what_the_settings_allow_and_no_more() {
    // Surplus connections are not let go by the handshake limit here: it is far away.
    let siege = siege(Limits { handshake_limit_s: 60, ..Limits::default() });
    let (victim, limits) = (siege.victim(), &siege.limits);
    // Controllers of one host, then of many hosts: both bounds answer "busy", which is worth another try.
    let mut controllers = Vec::new();
    for number in 0..limits.controllers_max * 2 {
        let host = format!("nqn.2026-11.io.octokv:host{}", if number < 12 { 0 } else { number });
        let (peer, cqe) = join(victim, &Joining { host, ..Joining::admin(victim) });
        if cqe.status().is_success() {
            controllers.push(peer);
        } else {
            assert_eq!(cqe.status(), Status::CONNECT_CONTROLLER_BUSY, "controller {number}");
            let most = if number < 12 { limits.controllers_per_host_max } else { limits.controllers_max - 1 };
            assert_eq!(controllers.len(), most, "controller {number}");
        }
    }
    assert_eq!(controllers.len(), limits.controllers_max - 1, "the honest host has the last");
    siege.honest_is_served().unwrap();
    // Connections: those beyond the bound are closed, at once or when their turn comes.
    let mut flood = Vec::new();
    for _ in 0..limits.connections_max * 8 {
        flood.push(Peer::reach(victim).unwrap());
    }
    let honest = 2;
    let settled = eventually(PATIENCE, || siege.strangers() <= limits.connections_max - honest);
    assert!(settled, "{} connections", siege.strangers());
    siege.honest_is_served().unwrap();
    let refused = flood.iter_mut().map(Peer::drain).filter(|left| matches!(left, Ok(None))).count();
    assert!(refused >= limits.connections_max * 6, "{refused} were refused");
    // Once they are gone a host that comes connects: `Siege::end` has one come.
    drop((flood, controllers));
    siege.until_deserted().unwrap();
    // Comings and goings, at every point of the handshake.
    for round in 0..400 {
        let mut peer = Peer::reach(victim).unwrap();
        let request =
            IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
        match round % 4 {
            0 => {}
            1 => peer.send(&request.encode()[..round % 128]).unwrap(),
            2 => peer.send(&request.encode()).unwrap(),
            _ => {
                peer.send(&request.encode()).unwrap();
                peer.hear().unwrap();
                // Answered or refused, depending on how many of the others the node still has.
                let _ = peer.join(&Joining::admin(victim));
            }
        }
    }
    siege.end().unwrap();
}

#[test]
fn silent_and_trickling_hosts_are_let_go_when_the_handshake_limit_is_over() {
    let limits = Limits { handshake_limit_s: 1, ..Limits::default() };
    let siege = siege(limits);
    let victim = siege.victim();
    let began = Instant::now();
    let mut silent = Peer::reach(victim).unwrap();
    let mut opened = Peer::open(victim, false, false).unwrap();
    let mut half = Peer::reach(victim).unwrap();
    let request =
        IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
    half.send(&request.encode()[..100]).unwrap();
    // One byte at a time, none of which buys more time.
    let mut trickle = Peer::reach(victim).unwrap();
    let mut bytes = request.encode().into_iter();
    let mut trickled = 0;
    while !matches!(trickle.drain(), Ok(None)) {
        assert!(began.elapsed() < PATIENCE, "{trickled} bytes were let through");
        trickle.send(&[bytes.next().expect("the node closes before the last byte")]).unwrap();
        trickled += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(trickled >= 10, "it was let go after {trickled} bytes");
    for (name, peer) in [("silent", &mut silent), ("opened", &mut opened), ("half", &mut half)] {
        assert!(!peer.until_closed().unwrap(), "{name}");
        let after = began.elapsed();
        assert!(after >= Duration::from_millis(900) && after < PATIENCE, "{name} was let go after {after:?}");
    }
    // A connected host may be as slow as it likes, when its bytes are right.
    let (admin, mut io) = Peer::pair(victim, 16).unwrap();
    for byte in io.capsule(&exist(1, b"slow"), &[]) {
        io.send(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(io.completion().unwrap().status(), Status::KV_KEY_DOES_NOT_EXIST);
    drop((admin, io, silent, opened, half, trickle));
    siege.end().unwrap();
}

#[test]
fn a_host_that_stops_its_keep_alive_loses_its_controller_and_all_of_its_queues() {
    let siege = siege(Limits::default());
    let victim = siege.victim();
    let mut joining = Joining::admin(victim);
    joining.connect.keep_alive_ms = 1000;
    let (mut admin, id) = Peer::admin_as(victim, &joining, false, false).unwrap();
    let mut io = Peer::io(victim, id, 1, 16).unwrap();
    for event in 0..4 {
        admin.send(&admin.capsule(&event_request(event), &[])).unwrap();
    }
    // Twice as long as its keep-alive time it is heard of, and lives.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert!(admin.ask(&keep_alive(9), &[]).unwrap().status().is_success());
        std::thread::sleep(Duration::from_millis(100));
    }
    let silent = Instant::now();
    assert!(!io.until_closed().unwrap());
    // Its last sign of life was a tenth of a second before that, or more.
    assert!(silent.elapsed() >= Duration::from_millis(500), "{:?}", silent.elapsed());
    assert!(matches!(admin.hear().unwrap(), Heard::Closed));
    drop((admin, io));
    siege.end().unwrap();
}
