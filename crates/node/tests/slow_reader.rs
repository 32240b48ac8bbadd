//! A host that asks for much and reads nothing holds its own share, and not for ever.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Key, Nanos};
use octokv_client::command::{Answer, Command, Value};
use octokv_client::config::{Reconnect, Settings};
use octokv_client::session::Session;
use octokv_node::{DeviceSettings, NodeSettings, RunningNode, start};
use octokv_runtime::RealSockets;
use octokv_sys::clock;
use octokv_wire::kv::StoreMode;

const VALUE_BYTES: usize = 2 << 20;
const PATIENCE: Nanos = Nanos::from_secs(15);

fn session(node: &RunningNode, keep_alive: Nanos) -> Session<RealSockets> {
    let settings = Settings { keep_alive, reconnect: Reconnect::Never, ..Settings::default() };
    let mut session = Session::new(RealSockets::new().unwrap(), node.addresses()[0], settings, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

fn key() -> Key {
    Key::new(b"large").unwrap()
}

/// One command to its end, or a panic when it takes too long.
fn run(session: &mut Session<RealSockets>, command: Command<'_>) -> Answer {
    session.submit(command, 1).expect("room");
    let (began, mut answer) = (clock::now(), None);
    while answer.is_none() {
        session.poll(clock::now(), |_, found| answer = Some(found));
        assert!(clock::now().since(began) < PATIENCE, "no answer in {PATIENCE:?}");
    }
    answer.unwrap().expect("served")
}

#[test]
fn a_host_that_does_not_read_leaves_room_for_others_and_is_let_go() {
    let node = start(NodeSettings {
        device: DeviceSettings::Memory { bytes: 128 << 20, block_bytes: 512 },
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        buffer_bytes: 64 << 20,
        ..NodeSettings::default()
    })
    .expect("starts");
    let mut good = session(&node, Nanos::from_secs(60));
    let value = vec![7; VALUE_BYTES];
    let store = || Command::Store { key: key(), value: Value::Slice(&value), mode: StoreMode::Upsert };
    let retrieve = || Command::Retrieve { key: key(), limit_bytes: VALUE_BYTES as u32 };
    assert!(matches!(run(&mut good, store()), Answer::Stored));
    let own = node.target().connections();

    // More than the core has buffers for, asked for at once, and never read.
    let mut hog = session(&node, Nanos::from_secs(3));
    for token in 0..100 {
        hog.submit(retrieve(), token).expect("room");
    }
    hog.poll(clock::now(), |_, _| ());
    for _ in 0..5 {
        assert!(matches!(run(&mut good, store()), Answer::Stored));
        let Answer::Value { data, .. } = run(&mut good, retrieve()) else { panic!("no value") };
        assert!(data[..] == value[..]);
    }
    assert_eq!(node.target().connections(), own + 2, "others were served while it was there, not after it");
    // Its keep-alive time runs out; its last bytes are not waited for long.
    let began = clock::now();
    while node.target().connections() > own {
        good.poll(clock::now(), |_, _| ());
        assert!(clock::now().since(began) < PATIENCE, "{} connections", node.target().connections());
    }
    drop((hog, good));
    node.stop().expect("stops in order");
}
