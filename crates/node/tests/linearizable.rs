//! A real node on real cores, sockets and devices: what concurrent hosts see of a key has one order.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Key, Prng};
use octokv_client::command::{Command, Response, Value};
use octokv_client::config::ClientConfig;
use octokv_client::session::Session;
use octokv_engine::conformance::{operation_of, value_of};
use octokv_engine::linearizability::{Call, CallHistory, CallId, CallOutcome};
use octokv_node::{DeviceConfig, NodeConfig, RunningNode, StartError, start};
use octokv_runtime::{DeviceDriver, KernelSockets};
use octokv_sys::{clock, thread};
use octokv_wire::kv::StoreMode;
use std::collections::BTreeMap;

const SESSIONS: usize = 4;
const DEPTH: usize = 4;

fn node(device: DeviceConfig, driver: DeviceDriver) -> RunningNode {
    let mut settings = NodeConfig {
        device,
        driver,
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        cores: thread::allowed_cores(),
        ..NodeConfig::default()
    };
    // Few partitions and small pieces: more meetings.
    settings.format.bitmap_partitions_log2 = 1;
    start(settings).expect("starts")
}

fn session(node: &RunningNode) -> Session<KernelSockets> {
    let settings = ClientConfig { queue_depth: DEPTH as u16, ..ClientConfig::default() };
    let mut session =
        Session::new(KernelSockets::new().unwrap(), node.addresses()[0], settings, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

/// One round: as many operations on few new keys as `operations` says, many at a time.
fn round(sessions: &mut [Session<KernelSockets>], round: u64, operations: u64) {
    let (mut random, mut history) = (Prng::new(round), CallHistory::default());
    let mut open: BTreeMap<u64, (Key, CallId)> = BTreeMap::new();
    let (mut begun, mut ended) = (0, 0);
    while ended < operations {
        for session in &mut *sessions {
            while begun < operations && session.free_slots() > 0 {
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
            session.poll(clock::now(), |token, response| {
                let (key, id) = open.remove(&token).expect("answered once");
                let outcome = match response.expect("no fault") {
                    Response::Stored | Response::Deleted => CallOutcome::Written,
                    Response::Value { data, .. } => CallOutcome::Read(Some(operation_of(&key, &data))),
                    // Of a delete it says that there was nothing to delete; of a read that there is none.
                    Response::NotFound => CallOutcome::Read(None),
                    other => panic!("{other:?}"),
                };
                history.end(id, outcome);
                ended += 1;
            });
        }
    }
    if let Err(unexplained) = history.check() {
        panic!("round {round}: {unexplained}");
    }
}

fn check_linearizable(device: DeviceConfig, driver: DeviceDriver, rounds: u64) {
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
    check_linearizable(DeviceConfig::Memory { bytes: 256 << 20, block_bytes: 512 }, DeviceDriver::Auto, 100);
}

#[test]
fn hosts_on_several_cores_agree_on_a_file_by_io_uring() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceConfig::File { path: folder.path().join("device"), create_bytes: Some(256 << 20) };
    if octokv_sys::uring::unavailable_errno().is_none() {
        return check_linearizable(device, DeviceDriver::Uring, 60);
    }
    // Where io_uring is forbidden, a node that was told to use it says so and does not begin.
    let settings = NodeConfig { device, driver: DeviceDriver::Uring, ..NodeConfig::default() };
    let refused = start(settings).err().expect("is refused");
    assert!(matches!(refused, StartError::Driver(_)), "{refused}");
    assert!(!folder.path().join("device").exists(), "a node that was refused has made its file");
}

#[test]
fn hosts_on_several_cores_agree_on_a_file_by_worker_threads() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceConfig::File { path: folder.path().join("device"), create_bytes: Some(256 << 20) };
    check_linearizable(device, DeviceDriver::Threads, 60);
}

#[test]
fn acknowledged_writes_survive_a_restart() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = DeviceConfig::File { path: folder.path().join("device"), create_bytes: Some(64 << 20) };
    for restart in 0..3 {
        let node = node(device.clone(), DeviceDriver::Auto);
        assert_eq!(node.statistics().keys, restart);
        let mut session = session(&node);
        let key = Key::new(format!("life{restart}").as_bytes()).unwrap();
        let command = Command::Store { key, value: Value::Slice(b"here"), mode: StoreMode::AddOnly };
        session.submit(command, 1).unwrap();
        let mut stored = false;
        while !stored {
            session.poll(clock::now(), |_, answer| stored = matches!(answer, Ok(Response::Stored)));
        }
        drop(session);
        node.stop().expect("stops in order");
    }
}
