//! A real node on real cores, sockets and devices: what concurrent hosts see of a key has one order.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Key, Random};
use octokv_client::command::{Answer, Command, Value};
use octokv_client::config::Settings;
use octokv_client::session::Session;
use octokv_engine::conformance::{operation_of, value_of};
use octokv_engine::linearizability::{Call, CallId, History, Outcome};
use octokv_node::{DeviceSettings, NodeSettings, RunningNode, StartError, start};
use octokv_runtime::{DeviceDriver, RealSockets};
use octokv_sys::{clock, thread};
use octokv_wire::kv::StoreMode;
use std::collections::BTreeMap;

const SESSIONS: usize = 4;
const DEPTH: usize = 4;

fn node(device: DeviceSettings, driver: DeviceDriver) -> RunningNode {
    let mut settings = NodeSettings {
        device,
        driver,
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        cores: thread::cores(),
        ..NodeSettings::default()
    };
    // Few partitions and small pieces: more meetings.
    settings.format.partitions_log2 = 1;
    start(settings).expect("starts")
}

fn session(node: &RunningNode) -> Session<RealSockets> {
    let settings = Settings { depth: DEPTH as u16, ..Settings::default() };
    let mut session = Session::new(RealSockets::new().unwrap(), node.addresses()[0], settings, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

/// One round: as many operations on few new keys as `operations` says, many at a time.
fn round(sessions: &mut [Session<RealSockets>], round: u64, operations: u64) {
    let (mut random, mut history) = (Random::new(round), History::default());
    let mut open: BTreeMap<u64, (Key, CallId)> = BTreeMap::new();
    let (mut begun, mut ended) = (0, 0);
    while ended < operations {
        for session in &mut *sessions {
            while begun < operations && session.room() > 0 {
                begun += 1;
                let key = Key::new(format!("r{round}k{}", random.below(3)).as_bytes()).unwrap();
                let bound = [100, 5_000, 40_000][random.below(3) as usize];
                let length = 8 + random.below(bound) as usize;
                let value = value_of(&key, begun, length);
                let (call, command) = match random.below(6) {
                    0 | 1 => {
                        let (value, mode) = (Value::Slice(&value), StoreMode::Upsert);
                        (Call::Write(Some(begun)), Command::Store { key: key.clone(), value, mode })
                    }
                    2 => (Call::Write(None), Command::Delete { key: key.clone() }),
                    _ => (Call::Read, Command::Retrieve { key: key.clone(), limit_bytes: u32::MAX }),
                };
                let id = history.begin(key.clone(), call);
                session.submit(command, begun).expect("there was room");
                open.insert(begun, (key, id));
            }
            session.poll(clock::now(), |token, answer| {
                let (key, id) = open.remove(&token).expect("answered once");
                let seen = match answer.expect("no fault") {
                    Answer::Stored | Answer::Deleted => Outcome::Written,
                    Answer::Value { data, .. } => Outcome::Seen(Some(operation_of(&key, &data))),
                    // Of a delete it says that there was nothing to delete; of a read that there is none.
                    Answer::NotFound => Outcome::Seen(None),
                    other => panic!("{other:?}"),
                };
                history.end(id, seen);
                ended += 1;
            });
        }
    }
    if let Err(unexplained) = history.check() {
        panic!("round {round}: {unexplained}");
    }
}

fn hosts_agree(device: DeviceSettings, driver: DeviceDriver, rounds: u64) {
    let node = node(device, driver);
    let mut sessions: Vec<_> = (0..SESSIONS).map(|_| session(&node)).collect();
    for number in 0..rounds {
        round(&mut sessions, number, 120);
    }
    drop(sessions);
    node.stop().expect("stops in order");
}

#[test]
fn hosts_on_several_cores_agree_on_a_memory_device() {
    hosts_agree(DeviceSettings::Memory { bytes: 256 << 20, block_bytes: 512 }, DeviceDriver::Auto, 100);
}

#[test]
fn hosts_on_several_cores_agree_on_a_file_by_io_uring() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceSettings::File { path: folder.path().join("device"), create_bytes: Some(256 << 20) };
    if octokv_sys::uring::refusal().is_none() {
        return hosts_agree(device, DeviceDriver::Uring, 60);
    }
    // Where io_uring is forbidden, a node that was told to use it says so and does not begin.
    let settings = NodeSettings { device, driver: DeviceDriver::Uring, ..NodeSettings::default() };
    let refused = start(settings).err().expect("is refused");
    assert!(matches!(refused, StartError::Driver(_)), "{refused}");
    assert!(!folder.path().join("device").exists(), "a node that was refused has made its file");
}

#[test]
fn hosts_on_several_cores_agree_on_a_file_by_worker_threads() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceSettings::File { path: folder.path().join("device"), create_bytes: Some(256 << 20) };
    hosts_agree(device, DeviceDriver::Threads, 60);
}

#[test]
fn what_was_acknowledged_is_there_after_a_stop_and_a_start() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceSettings::File { path: folder.path().join("device"), create_bytes: Some(64 << 20) };
    for life in 0..3 {
        let node = node(device.clone(), DeviceDriver::Auto);
        assert_eq!(node.statistics().keys, life);
        let mut session = session(&node);
        let key = Key::new(format!("life{life}").as_bytes()).unwrap();
        let command = Command::Store { key, value: Value::Slice(b"here"), mode: StoreMode::AddOnly };
        session.submit(command, 1).unwrap();
        let mut stored = false;
        while !stored {
            session.poll(clock::now(), |_, answer| stored = matches!(answer, Ok(Answer::Stored)));
        }
        drop(session);
        node.stop().expect("stops in order");
    }
}
