//! The discovery controller: its log, read whole and by pieces, and its notices.

mod common;

use common::*;
use octokv_base::Nanos;
use octokv_target::Target;
use octokv_wire::Sqe;
use octokv_wire::Status;
use octokv_wire::command::{admin, event, feature};
use octokv_wire::discovery::{self, SubsystemKind};
use octokv_wire::identify::{self, cns};
use octokv_wire::log::id;
use octokv_wire::nqn;
use std::net::SocketAddr;
use std::sync::Arc;

fn listening(addresses: &[&str]) -> Arc<Target> {
    let target = target();
    target.set_listeners(addresses.iter().map(|address| address.parse().unwrap()).collect());
    target
}

#[test]
fn the_log_tells_where_the_subsystem_listens() {
    let target = listening(&["10.1.2.3:4420", "[fd00::7]:4421", "0.0.0.0:4422"]);
    let mut host = Host::discovery(&target);
    let page = host.log(id::DISCOVERY, 0, 0, 4096).data;
    let entries: Vec<_> = discovery::entries(&page).collect();
    let addresses: Vec<SocketAddr> = entries.iter().map(|entry| entry.address).collect();
    let want: Vec<SocketAddr> = ["10.1.2.3:4420", "[fd00::7]:4421", "10.0.0.1:4422"]
        .iter()
        .map(|address| address.parse().unwrap())
        .collect();
    assert_eq!(addresses, want);
    assert!(entries.iter().all(|entry| entry.subsystem == NQN && entry.kind == SubsystemKind::Storage));
    assert_eq!(discovery::summary(&page).unwrap().records, 3);
}

#[test]
fn the_log_is_the_same_when_it_is_read_by_pieces() {
    let target = listening(&["10.1.2.3:4420", "[fd00::7]:4421"]);
    let mut host = Host::discovery(&target);
    let whole = host.log(id::DISCOVERY, 0, 0, 3072).data;
    for piece in [4u64, 16, 1024, 2048] {
        let mut pieces = Vec::new();
        while (pieces.len() as u64) < 3072 {
            pieces.extend(host.log(id::DISCOVERY, 0, pieces.len() as u64, piece).data);
        }
        assert_eq!(pieces[..3072], whole, "by {piece} B");
    }
}

#[test]
fn the_controller_says_that_it_is_for_discovery() {
    let mut host = Host::discovery(&target());
    let done = host.identify(cns::CONTROLLER, 0, 0);
    let page: &identify::Controller = identify::read(&done.data).unwrap();
    assert_eq!((page.controller_type, page.namespaces.get()), (2, 0));
    assert!(page.subsystem.starts_with(nqn::DISCOVERY.as_bytes()));
    assert_eq!(page.events.get(), event::DISCOVERY_CHANGED_BIT);
    assert!(page.announcement().is_none());
}

#[test]
fn what_is_not_for_discovery_is_refused() {
    let mut host = Host::discovery(&target());
    assert!(host.identify(cns::NAMESPACE_LIST, 0, 0).status().is(Status::INVALID_FIELD));
    assert!(host.log(id::HEALTH, 0, 0, 512).status().is(Status::INVALID_LOG_PAGE));
    assert!(host.get_feature(feature::QUEUES, 0).status().is(Status::INVALID_FIELD));
    assert!(host.admin_command(0x0d, 0, 0, 0).status().is(Status::INVALID_OPCODE));
    assert!(host.admin_command(admin::KEEP_ALIVE, 0, 0, 0).status().is_success());
    assert!(host.set_feature(feature::KEEP_ALIVE, 0, 1000).status().is_success());
}

#[test]
fn a_change_of_listeners_changes_the_generation_and_is_told() {
    let target = listening(&["10.1.2.3:4420"]);
    let mut host = Host::discovery(&target);
    let generation = |page: &[u8]| discovery::summary(page).unwrap().generation;
    let before = generation(&host.log(id::DISCOVERY, 0, 0, 1024).data);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::DISCOVERY_CHANGED_BIT);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    target.set_listeners(vec!["10.1.2.3:4420".parse().unwrap()]);
    host.pass(Nanos::from_secs(1));
    assert!(host.replies.is_empty(), "nothing changed");
    target.set_listeners(vec!["10.1.2.3:4421".parse().unwrap()]);
    host.pass(Nanos::from_secs(1));
    assert_eq!(host.done().dw0(), event::DISCOVERY_CHANGED);
    assert_ne!(generation(&host.log(id::DISCOVERY, 0, 0, 1024).data), before);
}
