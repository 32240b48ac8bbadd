//! Hosts that misuse connections, controllers and queues of a real node: each Connect completes with the
//! specification's status and the invalid field, silent connections are closed in time, and floods use no more than the
//! configured limits.

use octokv_adversary::attack_harness::{AttackHarness, NodeLimits};
use octokv_adversary::command_builder::{async_event_request, exist, flush, keep_alive};
use octokv_adversary::node_process::eventually;
use octokv_adversary::raw_connection::{
    ConnectParams, RECEIVE_TIMEOUT, RawConnection, ReceivedPdu, TargetAddr, expect_success,
};
use octokv_wire::fabrics::{
    Connect, ControllerConfiguration, FabricsCommand, NEW_CONTROLLER, invalid_parameter_dw0,
};
use octokv_wire::pdu::IcRequest;
use octokv_wire::{Cqe, Status};
use std::path::Path;
use std::time::{Duration, Instant};

fn start_harness(limits: NodeLimits) -> AttackHarness {
    AttackHarness::start(Path::new(env!("CARGO_BIN_EXE_octokv")), limits).unwrap()
}

/// Connects a queue on its own connection.
fn connect_queue(victim: &TargetAddr, params: &ConnectParams) -> (RawConnection, Cqe) {
    let mut peer = RawConnection::connect_initialised(victim, false, false).unwrap();
    let cqe = peer.fabrics_connect(params).unwrap();
    (peer, cqe)
}

/// DW0 of a rejected Connect: the offset of the invalid field in the entry, or in the data.
fn invalid_entry_field(offset: u16) -> u32 {
    invalid_parameter_dw0(offset, false)
}
fn invalid_data_field(offset: u16) -> u32 {
    invalid_parameter_dw0(offset, true)
}

#[test]
fn invalid_connects_are_rejected_and_name_the_field() {
    let harness = start_harness(NodeLimits::default());
    let victim = harness.target_addr();
    let (_admin, mine) = RawConnection::connect_admin(victim).unwrap();
    let (_discovery, discovery) =
        RawConnection::connect_admin_as(victim, &ConnectParams::discovery(), false, false).unwrap();
    let mut disabled = RawConnection::connect_initialised(victim, false, false).unwrap();
    let not_enabled =
        expect_success(&disabled.fabrics_connect(&ConnectParams::admin(victim)).unwrap()).unwrap();
    let other_host = ConnectParams {
        host_nqn: "nqn.2026-11.io.octokv:another".to_owned(),
        host_id: [9; 16],
        ..ConnectParams::admin(victim)
    };
    let (_other, others) = RawConnection::connect_admin_as(victim, &other_host, false, false).unwrap();
    let _first = RawConnection::connect_io(victim, mine, 1, 16).unwrap();

    let io = |queue, entries| ConnectParams::io(victim, mine, queue, entries);
    let admin = || ConnectParams::admin(victim);
    let with = |params: ConnectParams, change: fn(Connect) -> Connect| ConnectParams {
        connect: change(params.connect),
        ..params
    };
    let depth = u32::from(harness.limits.queue_depth);
    let (invalid, sequence) = (Status::CONNECT_INVALID_PARAMETERS, Status::COMMAND_SEQUENCE_ERROR);
    let table: Vec<(&str, ConnectParams, Status, u32)> = vec![
        ("a queue twice", io(1, 16), sequence, 0),
        (
            "a queue beyond the limit",
            io(harness.limits.io_queues_max + 1, 16),
            invalid,
            invalid_entry_field(42),
        ),
        ("the last queue identifier", io(u16::MAX, 16), invalid, invalid_entry_field(42)),
        ("a queue of one entry", io(2, 1), invalid, invalid_entry_field(44)),
        ("a queue deeper than CAP says", io(2, depth + 1), invalid, invalid_entry_field(44)),
        ("the deepest queue", io(2, 65_536), invalid, invalid_entry_field(44)),
        (
            "no such controller",
            ConnectParams { controller_id: 0x7777, ..io(2, 16) },
            invalid,
            invalid_data_field(16),
        ),
        (
            "a queue of a new controller",
            ConnectParams { controller_id: NEW_CONTROLLER, ..io(2, 16) },
            invalid,
            invalid_data_field(16),
        ),
        (
            "another host's controller",
            ConnectParams { controller_id: others, ..io(2, 16) },
            invalid,
            invalid_data_field(512),
        ),
        (
            "another host identifier",
            ConnectParams { host_id: [3; 16], ..io(2, 16) },
            invalid,
            invalid_data_field(0),
        ),
        (
            "a queue of a discovery controller",
            ConnectParams { controller_id: discovery, ..io(2, 16) },
            invalid,
            invalid_data_field(16),
        ),
        ("a queue before enable", ConnectParams { controller_id: not_enabled, ..io(1, 16) }, sequence, 0),
        (
            "an I/O queue of discovery",
            with(ConnectParams::discovery(), |c| Connect { queue_id: 1, ..c }),
            invalid,
            invalid_entry_field(42),
        ),
        (
            "a controller that is named",
            ConnectParams { controller_id: mine, ..admin() },
            invalid,
            invalid_data_field(16),
        ),
        (
            "no such subsystem",
            ConnectParams { subsystem_nqn: "nqn.2026-11.org.example:no".to_owned(), ..admin() },
            invalid,
            invalid_data_field(256),
        ),
        (
            "a subsystem without a name",
            ConnectParams { subsystem_nqn: String::new(), ..admin() },
            invalid,
            invalid_data_field(256),
        ),
        (
            "a host name that is none",
            ConnectParams { host_nqn: "a host".to_owned(), ..admin() },
            invalid,
            invalid_data_field(512),
        ),
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
            invalid_entry_field(48),
        ),
    ];
    for (what, params, status, dw0) in table {
        let (mut peer, cqe) = connect_queue(victim, &params);
        assert!(cqe.status().is(status), "{what}: {:?}", cqe.status());
        assert_eq!(cqe.dw0.get(), dw0, "{what}");
        // The same connection may retry with valid parameters.
        let again = peer
            .fabrics_connect(&ConnectParams { host_nqn: "nqn.2026-11.io.octokv:again".to_owned(), ..admin() })
            .unwrap();
        assert!(again.status().is_success(), "after {what}: {again:?}");
    }
    // A connected queue rejects a second Connect and continues.
    let (mut admin_peer, _) = RawConnection::connect_admin(victim).unwrap();
    assert!(admin_peer.fabrics_connect(&admin()).unwrap().status().is(sequence));
    assert!(admin_peer.execute(&keep_alive(1), &[]).unwrap().status().is_success());
    let mut second = RawConnection::connect_io(victim, mine, 2, 16).unwrap();
    assert!(second.fabrics_connect(&io(3, 16)).unwrap().status().is(sequence));
    assert!(second.execute(&flush(1), &[]).unwrap().status().is_success());
    // Other Fabrics commands are invalid on an I/O queue, and Disconnect on the admin queue.
    let property = FabricsCommand::PropertyGet { offset: 0x1c, is_64_bit: false }.encode(2);
    assert!(second.execute(&property, &[]).unwrap().status().is(Status::INVALID_OPCODE));
    assert!(
        admin_peer
            .execute(&FabricsCommand::Disconnect.encode(2), &[])
            .unwrap()
            .status()
            .is(Status::DISCONNECT_INVALID_QUEUE)
    );
    drop((admin_peer, second));
    // A reset also closes the I/O queues; a connection of before is closed, its identifier is free.
    let (mut admin_peer, id) = RawConnection::connect_admin(victim).unwrap();
    let mut before = RawConnection::connect_io(victim, id, 1, 16).unwrap();
    admin_peer.write_cc(ControllerConfiguration(0)).unwrap();
    assert!(!before.wait_closed().unwrap());
    admin_peer.write_cc(ControllerConfiguration::ENABLED).unwrap();
    let mut after = RawConnection::connect_io(victim, id, 1, 16).unwrap();
    assert!(after.execute(&flush(1), &[]).unwrap().status().is_success());
    // So does the end of the admin connection.
    drop(admin_peer);
    assert!(!after.wait_closed().unwrap());
    drop((_admin, _discovery, disabled, _other, _first, after, before));
    harness.finish().unwrap();
}

#[test]
fn floods_of_connections_and_controllers_stay_within_the_configured_limits() {
    // The handshake limit is too long to release surplus connections here.
    let harness = start_harness(NodeLimits { handshake_limit_s: 60, ..NodeLimits::default() });
    let (victim, limits) = (harness.target_addr(), &harness.limits);
    // Controllers of one host, then of many hosts: both limits respond "busy", which is retryable.
    let mut controllers = Vec::new();
    for number in 0..limits.controllers_max * 2 {
        let host = format!("nqn.2026-11.io.octokv:host{}", if number < 12 { 0 } else { number });
        let (peer, cqe) =
            connect_queue(victim, &ConnectParams { host_nqn: host, ..ConnectParams::admin(victim) });
        if cqe.status().is_success() {
            controllers.push(peer);
        } else {
            assert_eq!(cqe.status(), Status::CONNECT_CONTROLLER_BUSY, "controller {number}");
            let most = if number < 12 { limits.controllers_per_host_max } else { limits.controllers_max - 1 };
            assert_eq!(controllers.len(), most, "controller {number}");
        }
    }
    assert_eq!(controllers.len(), limits.controllers_max - 1, "the honest host has the last");
    harness.reference_client_progresses().unwrap();
    // Connections: those beyond the limit are closed, at once or at their turn in the backlog.
    let mut flood = Vec::new();
    for _ in 0..limits.connections_max * 8 {
        flood.push(RawConnection::connect_tcp(victim).unwrap());
    }
    let reference_connections = 2;
    let settled = eventually(RECEIVE_TIMEOUT, || {
        harness.attacker_sockets() <= limits.connections_max - reference_connections
    });
    assert!(settled, "{} connections", harness.attacker_sockets());
    harness.reference_client_progresses().unwrap();
    let refused = flood
        .iter_mut()
        .map(RawConnection::receive_nonblocking)
        .filter(|left| matches!(left, Ok(None)))
        .count();
    assert!(refused >= limits.connections_max * 6, "{refused} were refused");
    // Once they are gone a new host can connect: `AttackHarness::end` connects one.
    drop((flood, controllers));
    harness.wait_idle().unwrap();
    // Connects and disconnects, at every point of the handshake.
    for round in 0..400 {
        let mut peer = RawConnection::connect_tcp(victim).unwrap();
        let request =
            IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
        match round % 4 {
            0 => {}
            1 => peer.send(&request.encode()[..round % 128]).unwrap(),
            2 => peer.send(&request.encode()).unwrap(),
            _ => {
                peer.send(&request.encode()).unwrap();
                peer.receive_pdu().unwrap();
                // Succeeds or fails, depending on how many of the others the node still has.
                let _ = peer.fabrics_connect(&ConnectParams::admin(victim));
            }
        }
    }
    harness.finish().unwrap();
}

#[test]
fn silent_and_trickling_hosts_are_disconnected_after_the_handshake_timeout() {
    let limits = NodeLimits { handshake_limit_s: 1, ..NodeLimits::default() };
    let harness = start_harness(limits);
    let victim = harness.target_addr();
    let began = Instant::now();
    let mut silent = RawConnection::connect_tcp(victim).unwrap();
    let mut opened = RawConnection::connect_initialised(victim, false, false).unwrap();
    let mut half = RawConnection::connect_tcp(victim).unwrap();
    let request =
        IcRequest { host_alignment: 4, header_digest: false, data_digest: false, open_transfers_max: 1 };
    half.send(&request.encode()[..100]).unwrap();
    // One byte at a time, none of which extends the limit.
    let mut trickle = RawConnection::connect_tcp(victim).unwrap();
    let mut bytes = request.encode().into_iter();
    let mut trickled = 0;
    while !matches!(trickle.receive_nonblocking(), Ok(None)) {
        assert!(began.elapsed() < RECEIVE_TIMEOUT, "{trickled} bytes were let through");
        trickle.send(&[bytes.next().expect("the node closes before the last byte")]).unwrap();
        trickled += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(trickled >= 10, "it was let go after {trickled} bytes");
    for (name, peer) in [("silent", &mut silent), ("opened", &mut opened), ("half", &mut half)] {
        assert!(!peer.wait_closed().unwrap(), "{name}");
        let after = began.elapsed();
        assert!(
            after >= Duration::from_millis(900) && after < RECEIVE_TIMEOUT,
            "{name} was let go after {after:?}"
        );
    }
    // A connected host may be as slow as it likes if its bytes are valid.
    let (admin, mut io) = RawConnection::connect_pair(victim, 16).unwrap();
    for byte in io.capsule(&exist(1, b"slow"), &[]) {
        io.send(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(io.receive_completion().unwrap().status(), Status::KV_KEY_DOES_NOT_EXIST);
    drop((admin, io, silent, opened, half, trickle));
    harness.finish().unwrap();
}

#[test]
fn a_host_without_keep_alive_loses_its_controller_and_queues() {
    let harness = start_harness(NodeLimits::default());
    let victim = harness.target_addr();
    let mut params = ConnectParams::admin(victim);
    params.connect.keep_alive_ms = 1000;
    let (mut admin, id) = RawConnection::connect_admin_as(victim, &params, false, false).unwrap();
    let mut io = RawConnection::connect_io(victim, id, 1, 16).unwrap();
    for event in 0..4 {
        admin.send(&admin.capsule(&async_event_request(event), &[])).unwrap();
    }
    // Active for twice its keep-alive time, it stays connected.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert!(admin.execute(&keep_alive(9), &[]).unwrap().status().is_success());
        std::thread::sleep(Duration::from_millis(100));
    }
    let silent = Instant::now();
    assert!(!io.wait_closed().unwrap());
    // Its last activity was a tenth of a second before that, or more.
    assert!(silent.elapsed() >= Duration::from_millis(500), "{:?}", silent.elapsed());
    assert!(matches!(admin.receive_pdu().unwrap(), ReceivedPdu::Closed));
    drop((admin, io));
    harness.finish().unwrap();
}
