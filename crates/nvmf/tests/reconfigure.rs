//! Changes while hosts are connected: namespaces, access control, ANA states, health.

use crate::common::*;
use octokv_base::{Lba, NamespaceId, Nanos};
use octokv_nvmf::{
    AnaState, CloseReason, HealthStatus, HostAcl, LbaRange, NamespaceExists, RequestOperation, RequestOutcome,
};
use octokv_wire::fabrics::{self, ControllerConfiguration, NEW_CONTROLLER, invalid_parameter_dw0, property};
use octokv_wire::identify::{self, cns};
use octokv_wire::log_page::{HealthLog, id};
use octokv_wire::nvm::NvmCommand;
use octokv_wire::queue_entry::{admin, event, feature};
use octokv_wire::{Sgl, Sqe, Status};

const READ: NvmCommand = NvmCommand::Read { range: LbaRange { lba: Lba(0), blocks: 1 } };
const WRITE: NvmCommand =
    NvmCommand::Write { range: LbaRange { lba: Lba(0), blocks: 8 }, force_unit_access: false };

fn queue() -> (TestHost, TestHost) {
    let admin = TestHost::admin(&mixed_target());
    let io = TestHost::io(&admin, 1);
    (admin, io)
}

/// Enables all events and leaves an event request outstanding.
fn await_event(host: &mut TestHost) {
    host.set_feature(feature::ASYNC_EVENTS, 0, u32::MAX);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    assert!(host.received_pdus.is_empty());
}

fn event(host: &mut TestHost) -> u32 {
    host.advance_time(Nanos::from_millis(600));
    host.next_response().dw0()
}

fn active(host: &mut TestHost) -> Vec<u32> {
    let response = host.identify(cns::NAMESPACE_LIST, 0, 0);
    let list: &identify::NamespaceIdList = identify::decode_page(&response.data).unwrap();
    list.ids().map(|id| id.0).collect()
}

#[test]
fn a_namespace_is_added_while_hosts_are_connected() {
    let (mut admin, mut io) = queue();
    let target = admin.target.clone();
    assert!(io.block_command(9, READ, &[]).status().is(Status::INVALID_NAMESPACE));
    await_event(&mut admin);
    target.add_namespace(block_namespace(9, 512)).unwrap();
    assert_eq!(event(&mut admin), event::NAMESPACE_CHANGED);
    assert_eq!(admin.log(id::CHANGED_NAMESPACES, 0, 0, 4096).data[..8], [9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(active(&mut admin), [1, 2, 3, 9]);
    assert_eq!(io.block_command(9, READ, &[]).data, [0; 512]);
    let taken = Err(NamespaceExists { id: NamespaceId(9) });
    assert_eq!(target.add_namespace(namespace(9)), taken);
}

#[test]
fn a_removed_namespace_rejects_commands_and_completes_requests_in_flight() {
    let (mut admin, mut io) = queue();
    let target = admin.target.clone();
    let id = io.id();
    let mut sqe = READ.encode(id, NamespaceId(2));
    sqe.sgl = Sgl::transport(512);
    io.send_command(&sqe, &[]);
    let slot = io.requests.pop().unwrap().slot;
    await_event(&mut admin);
    assert_eq!(target.remove_namespace(NamespaceId(2)).unwrap().id, NamespaceId(2));
    assert!(target.remove_namespace(NamespaceId(2)).is_none());
    assert_eq!(event(&mut admin), event::NAMESPACE_CHANGED);
    assert_eq!(active(&mut admin), [1, 3]);
    assert_eq!(admin.identify(cns::NAMESPACE, 0, 2).data, [0; 4096], "inactive");
    assert!(io.block_command(2, READ, &[]).status().is(Status::INVALID_NAMESPACE));
    assert!(io.block_command(3, READ, &[]).status().is_success(), "other namespaces are unaffected");
    let buffer = octokv_base::Buffer::zeroed(512);
    io.connection.complete(slot, RequestOutcome::Blocks { buffer });
    io.drain();
    let response = io.next_response();
    assert_eq!((response.status(), response.data.len()), (Status::SUCCESS, 512));
}

#[test]
fn data_for_a_removed_namespace_is_not_written() {
    let (admin, mut io) = queue();
    for replaced in [false, true] {
        let id = io.id();
        let mut sqe = WRITE.encode(id, NamespaceId(2));
        sqe.sgl = Sgl::transport(4096);
        io.send_command(&sqe, &[]);
        admin.target.remove_namespace(NamespaceId(2)).unwrap();
        if replaced {
            // A Key Value namespace with the same identifier: the data must not become a value.
            admin.target.add_namespace(namespace(2)).unwrap();
        }
        io.send_requested_data(&value(4096), 1000);
        assert!(io.requests.is_empty());
        assert!(io.next_response().status().is(Status::INVALID_NAMESPACE));
        admin.target.remove_namespace(NamespaceId(2));
        admin.target.add_namespace(block_namespace(2, 512)).unwrap();
    }
    assert_eq!(io.pool.in_use_bytes(), 0);
    assert!(io.block_command(2, WRITE, &value(4096)).status().is_success());
}

#[test]
fn a_reused_namespace_identifier_has_default_features() {
    let (mut admin, mut io) = queue();
    admin.set_feature(feature::KV_CONFIGURATION, 1, 1);
    assert!(io.key_command(0x10, b"none").status().is(Status::KV_KEY_DOES_NOT_EXIST));
    admin.target.remove_namespace(NamespaceId(1)).unwrap();
    assert!(admin.get_feature(feature::KV_CONFIGURATION, 1).status().is(Status::INVALID_NAMESPACE));
    admin.target.add_namespace(namespace(1)).unwrap();
    assert_eq!(admin.get_feature(feature::KV_CONFIGURATION, 1).dw0(), 0);
    assert!(io.key_command(0x10, b"none").status().is_success());
}

#[test]
fn a_host_without_the_kv_command_set_gets_no_events_for_kv_namespaces() {
    let target = mixed_target();
    let mut host = TestHost::initialized(&target, false, false);
    host.connect(0, NEW_CONTROLLER).unwrap();
    host.set_property(0x14, 0x0046_0001);
    await_event(&mut host);
    target.add_namespace(namespace(7)).unwrap();
    target.remove_namespace(NamespaceId(1)).unwrap();
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty());
    target.add_namespace(block_namespace(8, 512)).unwrap();
    assert_eq!(event(&mut host), event::NAMESPACE_CHANGED);
    assert_eq!(host.log(id::CHANGED_NAMESPACES, 0, 0, 4096).data[..8], [8, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_denied_host_cannot_connect_and_loses_its_controllers() {
    let other = "nqn.2014-08.org.example:other";
    let (mut admin, mut io) = queue();
    let target = admin.target.clone();
    assert_eq!(target.host_acl(), HostAcl::Any);
    target.set_host_acl(HostAcl::Listed([HOST_NQN.to_owned()].into()));
    admin.advance_time(Nanos::from_secs(1));
    assert!(!admin.connection.is_closed(), "a listed host keeps its controller");
    let mut denied = TestHost::initialized(&target, false, false);
    let response = denied.connect_as(0, NEW_CONTROLLER, NQN, other, |_| {});
    assert!(response.status().is(Status::CONNECT_INVALID_HOST) && response.status().is_final());
    assert_eq!(response.dw0(), invalid_parameter_dw0(512, true));

    let id = io.id();
    let mut sqe = READ.encode(id, NamespaceId(2));
    sqe.sgl = Sgl::transport(512);
    io.send_command(&sqe, &[]);
    target.set_host_acl(HostAcl::Listed([other.to_owned()].into()));
    assert!(target.controllers().is_empty(), "at once");
    io.send_command(&sqe, &[]);
    admin.advance_time(Nanos::from_secs(1));
    for host in [&mut admin, &mut io] {
        assert!(host.connection.is_closed());
        assert_eq!(host.connection.close_reason(), Some(CloseReason::ControllerEnded));
    }
    assert_eq!(io.connection.in_flight(), 1);
    io.execute_requests();
    assert!(io.connection.in_flight() == 0 && io.received_pdus.is_empty());
    let mut again = TestHost::initialized(&target, false, false);
    assert!(again.connect(0, NEW_CONTROLLER).unwrap_err().status().is(Status::CONNECT_INVALID_HOST));
    assert!(again.connect(1, 1).unwrap_err().status().is(Status::CONNECT_INVALID_HOST));
    // The discovery service admits the host, and does not show the subsystem.
    TestHost::discovery(&target);
    target.set_host_acl(HostAcl::Any);
    assert!(again.connect(0, NEW_CONTROLLER).is_ok());
}

#[test]
fn a_shutdown_is_complete_when_every_namespace_is_flushed() {
    let shut_down = || {
        let (mut admin, io) = queue();
        let id = admin.id();
        let value = u64::from(ControllerConfiguration::ENABLED.with_shutdown().0);
        let command = fabrics::FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value };
        admin.send_command(&command.encode(id), &[]);
        let flushed: Vec<u32> = admin.requests.iter().map(|request| request.namespace.0).collect();
        assert_eq!(flushed, [1, 2, 3]);
        assert!(admin.requests.iter().all(|request| matches!(request.operation, RequestOperation::Flush)));
        assert!(admin.received_pdus.is_empty() && admin.connection.in_flight() == 1);
        (admin, io)
    };
    let outcomes = [RequestOutcome::Flushed, RequestOutcome::WriteFault, RequestOutcome::NotReady];
    let (mut admin, mut io) = shut_down();
    let requests = std::mem::take(&mut admin.requests);
    for (request, outcome) in requests.iter().zip(outcomes) {
        assert!(admin.received_pdus.is_empty());
        assert_eq!(admin.get_property(property::CSTS, false), 1, "not before the last flush");
        assert!(io.block_command(2, READ, &[]).status().is_success());
        admin.connection.complete(request.slot, outcome);
        admin.drain();
    }
    assert!(admin.next_response().status().is_success());
    assert_eq!(admin.get_property(property::CSTS, false), 0b1001);
    // A repeated shutdown has nothing to flush; an abrupt one does not flush.
    admin.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED.with_shutdown().0));
    admin.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED.0));
    admin.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED.0 | 2 << 14));
    assert!(admin.requests.is_empty());
    assert_eq!(admin.get_property(property::CSTS, false), 0b1001);

    // A reset in between takes precedence, and so does the end of the connection.
    let (mut admin, _io) = shut_down();
    let requests = std::mem::take(&mut admin.requests);
    admin.set_property(property::CC, 0);
    for request in &requests {
        admin.connection.complete(request.slot, RequestOutcome::Flushed);
    }
    admin.drain();
    assert!(admin.next_response().status().is_success());
    assert_eq!(admin.get_property(property::CSTS, false), 0);
    let (mut admin, _io) = shut_down();
    admin.connection.peer_closed();
    for request in std::mem::take(&mut admin.requests) {
        assert_eq!(admin.connection.in_flight(), 1);
        admin.connection.complete(request.slot, RequestOutcome::Flushed);
    }
    assert_eq!(admin.connection.in_flight(), 0);
}

#[test]
fn the_ana_state_of_a_group_is_reported_and_applied_to_its_namespaces() {
    let target = mixed_target();
    let mut far = block_namespace(5, 512);
    far.ana_group = 2;
    target.add_namespace(far).unwrap();
    let mut admin = TestHost::admin(&target);
    let mut io = TestHost::io(&admin, 1);
    assert_eq!(target.ana_states(), [(1, AnaState::Optimized), (2, AnaState::Optimized)]);
    let table = [
        (AnaState::NonOptimized, Status::SUCCESS),
        (AnaState::Inaccessible, Status::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS),
        (AnaState::Change, Status::ANA_TRANSITION),
        (AnaState::Optimized, Status::SUCCESS),
    ];
    for (state, want) in table {
        await_event(&mut admin);
        target.set_ana_state(2, state);
        assert_eq!(event(&mut admin), event::ANA_CHANGED, "{state:?}");
        let page = admin.log(id::ANA, 0, 0, 256).data;
        // Group 1 with three namespaces takes 44 bytes; then group 2.
        assert_eq!((page[8], page[16], page[20], page[32]), (2, 1, 3, 1));
        assert_eq!((page[60], page[64], page[76], page[92]), (2, 1, state as u8, 5));
        let status = io.block_command(5, READ, &[]).status();
        assert!(status.is(want) && (want.is_success() || !status.is_final()), "{state:?}: {status:?}");
        assert!(io.block_command(2, READ, &[]).status().is_success(), "another group is unaffected");
        assert!(admin.identify(cns::NAMESPACE, 0, 5).status().is_success());
    }
    await_event(&mut admin);
    target.set_ana_state(2, AnaState::Optimized);
    admin.advance_time(Nanos::from_secs(1));
    assert!(admin.received_pdus.is_empty(), "no change");
    let page = admin.log_with(id::ANA, 1, 0, 0, 128).data;
    // Groups only: 32 bytes each. Group 2 is new and has changed five times.
    assert_eq!((page[16], page[20], page[48], page[52]), (1, 0, 2, 0));
    assert_eq!((page[0], page[56]), (7, 6));
}

#[test]
fn health_status_is_reported_and_a_new_warning_raises_an_event() {
    let (mut admin, _io) = queue();
    let target = admin.target.clone();
    let status = HealthStatus {
        power_cycles: 7,
        unsafe_shutdowns: 3,
        power_on_seconds: 2 * 3600 + 59 * 60,
        busy_seconds: 121,
        available_spare_percent: 50,
        read_only: false,
        degraded: false,
    };
    target.set_health(status);
    assert_eq!(target.health(), status);
    let page = admin.log(id::HEALTH, 0, 0, 512).data;
    let health: &HealthLog = identify::decode_page(&page).unwrap();
    assert_eq!((health.warnings, health.spare, health.spare_threshold), (0, 50, 10));
    assert_eq!((health.power_cycles.get(), health.unsafe_shutdowns.get()), (7, 3));
    assert_eq!((health.power_hours.get(), health.busy_minutes.get()), (2, 2));
    await_event(&mut admin);
    target.set_health(HealthStatus { available_spare_percent: 9, ..status });
    assert_eq!(event(&mut admin), event::SPARE_LOW);
    assert_eq!(admin.log(id::HEALTH, 0, 0, 512).data[0], 1);
    await_event(&mut admin);
    target.set_health(HealthStatus { available_spare_percent: 8, ..status });
    admin.advance_time(Nanos::from_secs(1));
    assert!(admin.received_pdus.is_empty(), "the warning was reported before");
    target.set_health(HealthStatus { read_only: true, ..status });
    assert_eq!(event(&mut admin), event::RELIABILITY);
    assert_eq!(admin.log(id::HEALTH, 0, 0, 512).data[0], 8);
}

#[test]
fn host_behaviour_is_stored_from_the_capsule_and_returned() {
    let (mut admin, _io) = queue();
    let id = admin.id();
    let mut sqe = Sqe::new(admin::SET_FEATURES, id);
    sqe.cdw10 = u32::from(feature::HOST_BEHAVIOR).into();
    sqe.sgl = Sgl::in_capsule(512);
    let mut data = vec![0; 512];
    (data[0], data[2]) = (1, 1);
    assert!(admin.run(sqe, &data).status().is_success());
    assert_eq!(admin.get_feature(feature::HOST_BEHAVIOR, 0).data, data);
    sqe.sgl = Sgl::transport(512);
    assert!(admin.run(sqe, &[]).status().is(Status::INVALID_SGL_LENGTH));
}
