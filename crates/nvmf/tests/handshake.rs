//! Connection setup from the first byte to a connected queue, and every way in which a connection ends.

use crate::common::*;
use octokv_base::Nanos;
use octokv_nvmf::{CloseReason, HostAcl, SubsystemConfig};
use octokv_wire::fabrics::{
    self, Connect, ControllerConfiguration, NEW_CONTROLLER, invalid_parameter_dw0, property,
};
use octokv_wire::pdu::{IcRequest, Role, TermReq};
use octokv_wire::pdu_error::FatalErrorStatus;
use octokv_wire::{PduError, Sgl, Sqe, Status, nqn};

const ENABLED: u64 = ControllerConfiguration::ENABLED.0 as u64;

#[test]
fn icresp_grants_digests_and_reports_maxh2cdata() {
    for bits in 0..4u8 {
        let mut host = TestHost::new(&target());
        let (header_digest, data_digest) = (bits & 1 != 0, bits & 2 != 0);
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        host.send(&request.encode());
        let Some(ReceivedPdu::Ic(response)) = host.received_pdus.pop_front() else { panic!("no ICResp") };
        assert_eq!((response.header_digest, response.data_digest), (header_digest, data_digest));
        assert_eq!((response.controller_alignment, response.h2c_data_bytes_max), (4, 512 * 1024));
    }
}

#[test]
fn c2hdata_honours_the_hosts_data_alignment() {
    let target = target();
    let mut host = TestHost::new(&target);
    let request =
        IcRequest { host_alignment: 64, header_digest: true, data_digest: true, open_transfers_max: 1 };
    host.send(&request.encode());
    host.received_pdus.clear();
    (host.params.header_digest, host.params.data_digest) = (true, true);
    host.connect(0, NEW_CONTROLLER).unwrap();
    host.enable();
    host.connection.send_buffer().clear();
    let id = host.id();
    let mut sqe = octokv_wire::identify::IdentifyRequest {
        cns: 1,
        csi: 0,
        controller_id: 0,
        namespace: octokv_base::NamespaceId(0),
    }
    .encode(id);
    sqe.sgl = Sgl::transport(4096);
    let capsule = host.capsule(&sqe, &[]);
    host.connection.receive(host.now, &capsule, &host.pool, &mut host.requests);
    let mut slices = Vec::new();
    host.connection.send_buffer().slices(&mut slices, usize::MAX);
    assert_eq!(slices[0][3], 64, "the data offset of the C2HData");
    drop(slices);
    host.drain();
    assert_eq!(host.next_response().data.len(), 4096);
}

#[test]
fn a_controller_is_connected_enabled_and_shut_down() {
    let target = target();
    let mut host = TestHost::initialized(&target, false, false);
    let id = host.connect(0, NEW_CONTROLLER).unwrap();
    assert_eq!(target.controllers()[0].id, id);
    assert_eq!(host.connection.host_nqn(), Some(HOST_NQN));
    let capabilities = fabrics::ControllerCapabilities::decode(host.get_property(property::CAP, true));
    assert!(capabilities.nvm && capabilities.command_sets);
    assert_eq!(capabilities.queue_entries_max, 1024);
    assert_eq!(host.get_property(property::VS, false), 0x20000);
    assert_eq!(host.get_property(property::CSTS, false), 0);
    assert!(
        host.identify(1, 0, 0).status().is(Status::COMMAND_SEQUENCE_ERROR),
        "a disabled controller accepts no Identify"
    );
    host.set_property(property::CC, ENABLED);
    assert_eq!(host.get_property(property::CSTS, false), 1);
    assert_eq!(host.get_property(property::CC, false), ENABLED);
    host.set_property(property::CC, ENABLED | 1 << 14);
    assert_eq!(host.get_property(property::CSTS, false), 0b1001);
    host.connection.peer_closed();
    assert_eq!(host.connection.close_reason(), Some(CloseReason::PeerClosed));
    assert!(target.controllers().is_empty());
}

#[test]
fn a_reset_closes_the_queues_and_they_can_reconnect() {
    let target = target();
    let mut admin = TestHost::admin(&target);
    let mut io = TestHost::io(&admin, 1);
    admin.set_property(property::CC, 0);
    assert_eq!(admin.get_property(property::CSTS, false), 0);
    io.advance_time(Nanos::from_secs(1));
    assert!(io.connection.is_closed());
    assert_eq!(io.connection.close_reason(), Some(CloseReason::ControllerEnded));
    admin.enable();
    let mut again = TestHost::io(&admin, 1);
    assert!(again.store(b"k", b"v", 0).status().is_success());
    drop(io);
    assert_eq!(
        target.controllers()[0].queue_count,
        1,
        "closing the old queue does not disconnect the new one"
    );
}

#[test]
fn the_end_of_the_admin_connection_ends_its_queues() {
    let target = target();
    let admin = TestHost::admin(&target);
    let mut io = TestHost::io(&admin, 1);
    drop(admin);
    assert!(target.controllers().is_empty());
    io.send_command(&store_sqe(1, b"k", 1, Sgl::in_capsule(1), 0), b"v");
    assert!(io.connection.is_closed() && io.requests.is_empty());
}

#[test]
fn disconnect_completes_and_then_closes_the_queue() {
    let target = target();
    let mut admin = TestHost::admin(&target);
    let mut io = TestHost::io(&admin, 1);
    let id = io.id();
    assert!(io.run(fabrics::FabricsCommand::Disconnect.encode(id), &[]).status().is_success());
    assert!(!io.connection.is_closed());
    assert_eq!(target.controllers()[0].queue_count, 0);
    io.send(b"bytes after Disconnect are discarded");
    assert!(io.received_pdus.is_empty());
    io.advance_time(Nanos::from_secs(2));
    assert!(io.connection.is_closed());
    assert_eq!(io.connection.close_reason(), Some(CloseReason::Disconnected));
    let id = admin.id();
    let response = admin.run(fabrics::FabricsCommand::Disconnect.encode(id), &[]);
    assert!(response.status().is(Status::DISCONNECT_INVALID_QUEUE));
}

#[test]
fn a_slow_handshake_times_out() {
    let target = target();
    let mut silent = TestHost::new(&target);
    let mut half = TestHost::initialized(&target, false, false);
    for host in [&mut silent, &mut half] {
        host.advance_time(Nanos::from_secs(9));
        assert!(!host.connection.is_closed());
        host.advance_time(Nanos::from_secs(2));
        assert!(host.connection.is_closed());
        assert_eq!(host.connection.close_reason(), Some(CloseReason::HandshakeTimeout));
    }
}

#[test]
fn keep_alive_expiry_ends_the_controller() {
    let target = target();
    let mut admin = TestHost::initialized(&target, false, false);
    admin.connect_as(0, NEW_CONTROLLER, NQN, HOST_NQN, |connect| connect.keep_alive_ms = 1000);
    admin.enable();
    let mut io = TestHost::io(&admin, 1);
    // Commands on any queue count as activity.
    for _ in 0..5 {
        admin.advance_time(Nanos::from_millis(700));
        io.advance_time(Nanos::from_millis(700));
        assert!(io.store(b"k", b"v", 0).status().is_success());
    }
    assert_eq!(admin.connection.next_deadline(), admin.now + Nanos::from_millis(500));
    admin.advance_time(Nanos::from_millis(700));
    assert!(admin.admin_command(0x18, 0, 0, 0).status().is_success());
    admin.advance_time(Nanos::from_millis(990));
    assert!(!admin.connection.is_closed());
    admin.advance_time(Nanos::from_millis(20));
    assert_eq!(admin.connection.close_reason(), Some(CloseReason::KeepAliveExpired));
    assert!(admin.connection.is_closed() && target.controllers().is_empty());
    io.now = admin.now;
    io.connection.tick(io.now);
    assert_eq!(io.connection.close_reason(), Some(CloseReason::ControllerEnded));
    assert_eq!(target.counters().keep_alive_expired, 1);
}

#[test]
fn a_discovery_controller_without_keep_alive_ends_when_it_is_idle() {
    let target = target();
    let mut host = TestHost::discovery(&target);
    host.advance_time(Nanos::from_secs(119));
    assert!(!host.connection.is_closed());
    host.advance_time(Nanos::from_secs(2));
    assert_eq!(host.connection.close_reason(), Some(CloseReason::KeepAliveExpired));
}

#[test]
fn an_io_controller_without_keep_alive_does_not_expire() {
    let mut host = TestHost::admin(&target());
    host.advance_time(Nanos::from_secs(3600));
    assert!(!host.connection.is_closed());
}

fn connect_error_of(change: impl FnOnce(&mut Connect), subsystem: &str, id: u16) -> (Status, u32) {
    let mut host = TestHost::initialized(&target(), false, false);
    let response = host.connect_as(0, id, subsystem, HOST_NQN, change);
    assert!(host.connect(0, NEW_CONTROLLER).is_ok(), "the host may retry");
    (response.status(), response.dw0())
}

#[test]
fn invalid_connects_fail_and_name_the_field() {
    let invalid = Status::CONNECT_INVALID_PARAMETERS.do_not_retry();
    let format = Status::CONNECT_INCOMPATIBLE_FORMAT.do_not_retry();
    assert_eq!(connect_error_of(|c| c.format = 1, NQN, NEW_CONTROLLER), (format, 0));
    let other = "nqn.2026-11.io.octokv:other";
    assert_eq!(connect_error_of(|_| {}, other, NEW_CONTROLLER), (invalid, invalid_parameter_dw0(256, true)));
    assert_eq!(connect_error_of(|_| {}, NQN, 5), (invalid, invalid_parameter_dw0(16, true)));
    assert_eq!(
        connect_error_of(|c| c.entries = 1, NQN, NEW_CONTROLLER),
        (invalid, invalid_parameter_dw0(44, false))
    );
    assert_eq!(
        connect_error_of(|c| c.entries = 9999, NQN, NEW_CONTROLLER),
        (invalid, invalid_parameter_dw0(44, false))
    );
    let kato = connect_error_of(|c| c.keep_alive_ms = u32::MAX, NQN, NEW_CONTROLLER);
    assert_eq!(kato, (invalid, invalid_parameter_dw0(48, false)));
    assert_eq!(connect_error_of(|c| c.queue_id = 65, NQN, 1), (invalid, invalid_parameter_dw0(42, false)));
    assert_eq!(connect_error_of(|c| c.queue_id = 1, NQN, 77), (invalid, invalid_parameter_dw0(16, true)));
    assert_eq!(
        connect_error_of(|c| c.queue_id = 1, nqn::DISCOVERY, 77),
        (invalid, invalid_parameter_dw0(42, false))
    );
}

#[test]
fn an_io_queue_connects_once_and_only_for_its_host() {
    let target = target();
    let admin = TestHost::admin(&target);
    let id = target.controllers()[0].id;
    let mut other = TestHost::initialized(&target, false, false);
    let response = other.connect_as(1, id, NQN, "nqn.2014-08.org.example:other", |_| {});
    assert!(response.status().is(Status::CONNECT_INVALID_PARAMETERS));
    assert_eq!(response.dw0(), invalid_parameter_dw0(512, true));
    let _first = TestHost::io(&admin, 1);
    let mut second = TestHost::initialized(&target, false, false);
    let response = second.connect(1, id).unwrap_err();
    assert!(response.status().is(Status::COMMAND_SEQUENCE_ERROR));
    let id = second.id();
    let again = second.run(Sqe::new(2, id), &[]);
    assert!(again.status().is(Status::COMMAND_SEQUENCE_ERROR), "commands before Connect fail");
}

#[test]
fn an_empty_host_nqn_is_admitted_without_an_access_list() {
    let target = target();
    let connect = || {
        let mut host = TestHost::initialized(&target, false, false);
        host.connect_as(0, NEW_CONTROLLER, NQN, "", |_| {}).status()
    };
    assert_eq!(connect(), Status::SUCCESS);
    target.set_host_acl(HostAcl::Listed([HOST_NQN.to_owned()].into()));
    assert!(connect().is(Status::CONNECT_INVALID_HOST));
}

#[test]
fn an_io_queue_cannot_connect_before_the_controller_is_enabled() {
    let target = target();
    let mut admin = TestHost::initialized(&target, false, false);
    let id = admin.connect(0, NEW_CONTROLLER).unwrap();
    let mut io = TestHost::initialized(&target, false, false);
    assert!(io.connect(1, id).unwrap_err().status().is(Status::COMMAND_SEQUENCE_ERROR));
    admin.enable();
    io.connect(1, id).unwrap();
}

#[test]
fn a_second_connect_on_a_queue_is_out_of_sequence() {
    let mut admin = TestHost::admin(&target());
    let response = admin.connect(0, NEW_CONTROLLER).unwrap_err();
    assert!(response.status().is(Status::COMMAND_SEQUENCE_ERROR));
    let mut io = TestHost::io(&admin, 1);
    assert!(io.connect(1, 1).unwrap_err().status().is(Status::COMMAND_SEQUENCE_ERROR));
}

#[test]
fn hosts_over_a_limit_get_controller_busy() {
    let limited = |change: fn(&mut SubsystemConfig)| {
        let mut config = SubsystemConfig::new(NQN);
        change(&mut config);
        target_with(config)
    };
    let busy = |target: &std::sync::Arc<octokv_nvmf::Target>, host_nqn: &str| {
        let mut host = TestHost::initialized(target, false, false);
        let response = host.connect_as(0, NEW_CONTROLLER, NQN, host_nqn, |_| {});
        response.status() == Status::CONNECT_CONTROLLER_BUSY
    };
    let other = "nqn.2014-08.org.example:other";

    let target = limited(|config| config.controllers_max = 1);
    let first = TestHost::admin(&target);
    assert!(busy(&target, other));
    drop(first);
    assert!(!busy(&target, other));

    let target = limited(|config| config.controllers_per_host_max = 1);
    let _first = TestHost::admin(&target);
    assert!(busy(&target, HOST_NQN) && !busy(&target, other));

    let target = limited(|config| config.connections_max = 1);
    let _first = TestHost::admin(&target);
    assert!(!target.can_accept_connection() && busy(&target, other));
    assert_eq!(target.connection_count(), 1);
}

#[test]
fn the_hosts_termination_request_closes_the_connection() {
    let mut host = TestHost::admin(&target());
    let terminate = TermReq { fatal_status: FatalErrorStatus::SequenceError as u16, information: 7 };
    let mut bytes = Vec::new();
    terminate.encode(Role::Host, b"quoted", &mut bytes);
    host.send(&bytes);
    assert!(host.connection.is_closed() && host.received_pdus.is_empty());
    assert_eq!(host.connection.close_reason(), Some(CloseReason::HostTerminated(terminate)));
}

#[test]
fn a_pdu_error_is_reported_then_the_connection_drains_and_closes() {
    let target = target();
    let mut host = TestHost::new(&target);
    host.send(&[9; 128]);
    assert_eq!(host.terminated().fatal_status, FatalErrorStatus::SequenceError as u16);
    assert_eq!(
        host.connection.close_reason(),
        Some(CloseReason::PduError(PduError::UnexpectedPduType { kind: 9 }))
    );
    assert!(!host.connection.is_closed());
    host.send(&[0; 1000]);
    assert!(host.received_pdus.is_empty() && host.unsent.is_empty());
    host.advance_time(Nanos::from_millis(1001));
    assert!(host.connection.is_closed());
    assert_eq!(target.counters().transport_faults, 1);
}

#[test]
fn controller_identifiers_are_not_reused_immediately() {
    let target = target();
    let ids: Vec<u16> = (0..3)
        .map(|_| TestHost::initialized(&target, false, false).connect(0, NEW_CONTROLLER).unwrap())
        .collect();
    assert_eq!(ids, [1, 2, 3]);
}
