//! The discovery controller: its log, read whole and in pieces, and its events.

use crate::common::*;
use octokv_base::{NamespaceId, Nanos};
use octokv_nvmf::{HostAcl, Target};
use octokv_wire::discovery::{self, SubsystemKind};
use octokv_wire::identify::{self, cns};
use octokv_wire::log_page::{self, id};
use octokv_wire::nqn;
use octokv_wire::queue_entry::{admin, event, feature};
use octokv_wire::{Sgl, Sqe, Status};
use std::net::SocketAddr;
use std::sync::Arc;

fn listening(addresses: &[&str]) -> Arc<Target> {
    let target = target();
    target.set_listeners(addresses.iter().map(|address| address.parse().unwrap()).collect());
    target
}

#[test]
fn the_discovery_log_lists_the_listeners() {
    let target = listening(&["10.1.2.3:4420", "[fd00::7]:4421", "0.0.0.0:4422"]);
    let mut host = TestHost::discovery(&target);
    let page = host.log(id::DISCOVERY, 0, 0, 8192).data;
    let entries: Vec<_> = discovery::decode_entries(&page).collect();
    let of =
        |kind, name| move |entry: &&discovery::DiscoveryEntry| entry.kind == kind && entry.subsystem == name;
    let addresses = |kind, name| -> Vec<SocketAddr> {
        entries.iter().filter(of(kind, name)).map(|entry| entry.address).collect()
    };
    let want: Vec<SocketAddr> = ["10.1.2.3:4420", "[fd00::7]:4421", "10.0.0.1:4422"]
        .iter()
        .map(|address| address.parse().unwrap())
        .collect();
    assert_eq!(addresses(SubsystemKind::Storage, NQN), want);
    assert_eq!(addresses(SubsystemKind::Current, nqn::DISCOVERY), want, "the discovery service itself");
    assert_eq!(discovery::decode_header(&page).unwrap().records, 6);
}

#[test]
fn the_discovery_log_read_in_pieces_is_consistent() {
    let target = listening(&["10.1.2.3:4420", "[fd00::7]:4421"]);
    let mut host = TestHost::discovery(&target);
    let whole = host.log(id::DISCOVERY, 0, 0, 5120).data;
    for piece in [4u64, 16, 1024, 2048] {
        let mut pieces = Vec::new();
        while (pieces.len() as u64) < 5120 {
            pieces.extend(host.log(id::DISCOVERY, 0, pieces.len() as u64, piece).data);
        }
        assert_eq!(pieces[..5120], whole, "by {piece} B");
    }
}

#[test]
fn identify_reports_a_discovery_controller() {
    let mut host = TestHost::discovery(&target());
    let response = host.identify(cns::CONTROLLER, 0, 0);
    let page: &identify::IdentifyController = identify::decode_page(&response.data).unwrap();
    assert_eq!((page.controller_type, page.namespace_id_max.get()), (2, 0));
    assert!(page.subsystem.starts_with(nqn::DISCOVERY.as_bytes()));
    assert_eq!(page.events.get(), event::DISCOVERY_CHANGED_BIT);
    assert!(page.vendor_capabilities().is_none());
}

#[test]
fn a_discovery_controller_rejects_io_controller_commands() {
    let mut host = TestHost::discovery(&target());
    assert!(host.identify(cns::NAMESPACE_LIST, 0, 0).status().is(Status::INVALID_FIELD));
    assert!(host.log(id::HEALTH, 0, 0, 512).status().is(Status::INVALID_LOG_PAGE));
    assert!(host.get_feature(feature::QUEUES, 0).status().is(Status::INVALID_FIELD));
    assert!(host.admin_command(0x0d, 0, 0, 0).status().is(Status::INVALID_OPCODE));
    assert!(host.admin_command(admin::KEEP_ALIVE, 0, 0, 0).status().is_success());
    assert!(host.set_feature(feature::KEEP_ALIVE, 0, 1000).status().is_success());
}

#[test]
fn a_change_of_listeners_changes_the_generation_and_raises_an_event() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    let generation = |page: &[u8]| discovery::decode_header(page).unwrap().generation;
    let before = generation(&host.log(id::DISCOVERY, 0, 0, 1024).data);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    target.set_listeners(vec!["10.1.2.3:4420".parse().unwrap()]);
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty(), "no change, no event");
    target.set_listeners(vec!["10.1.2.3:4421".parse().unwrap()]);
    host.advance_time(Nanos::from_secs(1));
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
    assert_ne!(generation(&host.log(id::DISCOVERY, 0, 0, 1024).data), before);
}

#[test]
fn referrals_are_listed_and_a_change_raises_an_event() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    target.set_referrals(vec!["10.9.9.9:8009".parse().unwrap()]);
    host.advance_time(Nanos::from_secs(1));
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
    let page = host.log(id::DISCOVERY, 0, 0, 8192).data;
    let last = discovery::decode_entries(&page).last().unwrap();
    assert_eq!((last.kind, last.subsystem.as_str()), (SubsystemKind::Referral, nqn::DISCOVERY));
    assert_eq!((last.address, last.port_id), ("10.9.9.9:8009".parse().unwrap(), 2));
}

#[test]
fn a_denied_host_does_not_see_the_subsystem() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    let storage = |host: &mut TestHost| {
        let page = host.log(id::DISCOVERY, 0, 0, 8192).data;
        let found =
            discovery::decode_entries(&page).filter(|entry| entry.kind == SubsystemKind::Storage).count();
        (found, discovery::decode_header(&page).unwrap().generation)
    };
    let (found, first) = storage(&mut host);
    assert_eq!(found, 1);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    let listed = |name: &str| HostAcl::Listed([name.to_owned()].into());
    target.set_host_acl(listed(HOST_NQN));
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty(), "no change for this host, no event");
    target.set_host_acl(listed("nqn.2014-08.org.example:other"));
    host.advance_time(Nanos::from_secs(1));
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
    let (found, second) = storage(&mut host);
    assert!(found == 0 && second > first);
    target.set_host_acl(HostAcl::Any);
    assert_eq!(storage(&mut host).0, 1);
}

#[test]
fn a_change_without_an_event_request_is_reported_by_the_next_one() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    target.set_host_acl(HostAcl::Listed([].into()));
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty(), "no event request, no completion");
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
}

#[test]
fn a_change_between_an_event_and_the_read_of_the_log_raises_another_event() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    target.set_host_acl(HostAcl::Listed([].into()));
    host.advance_time(Nanos::from_secs(1));
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    target.set_host_acl(HostAcl::Any);
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty(), "masked until the log is read");
    let mut read = log_page::LogPageRequest {
        id: id::DISCOVERY,
        log_specific: 0,
        retain_event: true,
        bytes: 1024,
        offset: 0,
        csi: 0,
        namespace: NamespaceId(0),
    };
    let mut run = |host: &mut TestHost, retain_event| {
        read.retain_event = retain_event;
        let mut sqe = read.encode(host.id());
        sqe.sgl = Sgl::transport(1024);
        assert!(host.run(sqe, &[]).status().is_success());
    };
    run(&mut host, true);
    host.advance_time(Nanos::from_secs(1));
    assert!(host.received_pdus.is_empty(), "a read that retains the event does not unmask it");
    run(&mut host, false);
    assert_eq!(host.next_response().dw0(), event::DISCOVERY_CHANGED);
}

#[test]
fn a_persistent_discovery_controller_uses_its_keep_alive_timeout() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = TestHost::discovery(&target);
    assert!(host.set_feature(feature::KEEP_ALIVE, 0, 60_000).status().is_success());
    for _ in 0..10 {
        host.advance_time(Nanos::from_secs(50));
        assert!(host.admin_command(admin::KEEP_ALIVE, 0, 0, 0).status().is_success());
    }
    host.advance_time(Nanos::from_secs(61));
    assert!(host.connection.is_closed());
}

#[test]
fn a_discovery_controller_has_the_logs_of_every_controller() {
    let mut host = TestHost::discovery(&target());
    assert!(host.admin_command(0x0d, 0, 0, 0).status().is(Status::INVALID_OPCODE));
    let supported = host.log(id::SUPPORTED, 0, 0, 1024).data;
    let pages: Vec<usize> = (0..256).filter(|page| supported[page * 4] == 1).collect();
    assert_eq!(pages, [0, 1, 5, 0x12, 0x13, 0x70]);
    for page in pages {
        assert!(host.log(page as u8, 0, 0, 1024).status().is_success(), "{page:02x}");
    }
    let errors = host.log(id::ERROR, 0, 0, 64).data;
    assert_eq!(errors[0], 1, "an unsupported opcode");
    let features = host.log(id::FEATURES, 0, 0, 1024).data;
    let features: Vec<usize> = (0..256).filter(|feature| features[feature * 4] == 1).collect();
    assert_eq!(features, [0x0b, 0x0f]);
    let effects = host.log(id::EFFECTS, 0, 0, 4096).data;
    assert!(effects[1024..].iter().all(|byte| *byte == 0), "no effects of I/O commands");
}
