//! A host that requests much and reads nothing delays no other host and is disconnected.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Key, Nanos};
use octokv_client::command::{Command, Response, Value};
use octokv_client::config::{ClientConfig, Reconnect};
use octokv_client::session::Session;
use octokv_node::{DeviceConfig, NodeConfig, RunningNode, start};
use octokv_runtime::KernelSockets;
use octokv_sys::clock;
use octokv_wire::kv::StoreMode;

const VALUE_BYTES: usize = 2 << 20;
const TIMEOUT: Nanos = Nanos::from_secs(15);

fn session(node: &RunningNode, keep_alive: Nanos) -> Session<KernelSockets> {
    let config = ClientConfig { keep_alive, reconnect: Reconnect::Never, ..ClientConfig::default() };
    let mut session = Session::new(KernelSockets::new().unwrap(), node.addresses()[0], config, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

fn key() -> Key {
    Key::new(b"large").unwrap()
}

/// Runs one command; panics after [`TIMEOUT`].
fn run(session: &mut Session<KernelSockets>, command: Command<'_>) -> Response {
    session.submit(command, 1).expect("a slot is free");
    let (started_at, mut response) = (clock::now(), None);
    while response.is_none() {
        session.poll(clock::now(), |_, found| response = Some(found));
        assert!(clock::now().since(started_at) < TIMEOUT, "no response in {TIMEOUT:?}");
    }
    response.unwrap().expect("the command succeeds")
}

#[test]
fn a_host_that_does_not_read_does_not_block_others_and_is_disconnected() {
    let node = start(NodeConfig {
        devices: vec![DeviceConfig::Memory { bytes: 20 << 20, block_bytes: 512 }],
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        buffer_bytes: 64 << 20,
        ..NodeConfig::default()
    })
    .expect("starts");
    let mut good = session(&node, Nanos::from_secs(60));
    let value = vec![7; VALUE_BYTES];
    let store = || Command::Store { key: key(), value: Value::Slice(&value), mode: StoreMode::Upsert };
    let retrieve = || Command::Retrieve { key: key(), limit_bytes: VALUE_BYTES as u32 };
    assert!(matches!(run(&mut good, store()), Response::Stored));
    let own = node.target().connection_count();

    // More than the core has buffers for, requested at once and never read.
    let mut hog = session(&node, Nanos::from_secs(5));
    for token in 0..100 {
        hog.submit(retrieve(), token).expect("a slot is free");
    }
    hog.poll(clock::now(), |_, _| ());
    // Often enough that each byte of the device is written again, those from which the slow host's responses were to be sent too.
    for _ in 0..12 {
        assert!(matches!(run(&mut good, store()), Response::Stored));
        let Response::Value { data, .. } = run(&mut good, retrieve()) else { panic!("no value") };
        assert!(data[..] == value[..]);
    }
    assert_eq!(
        node.target().connection_count(),
        own + 2,
        "the other host was served while the slow one was connected"
    );
    // Its keep-alive expires; the node waits only briefly for its last bytes.
    let started_at = clock::now();
    while node.target().connection_count() > own {
        good.poll(clock::now(), |_, _| ());
        assert!(clock::now().since(started_at) < TIMEOUT, "{} connections", node.target().connection_count());
    }
    drop((hog, good));
    node.stop().expect("shuts down cleanly");
}
