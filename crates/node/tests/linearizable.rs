//! Linearizability of a real node on real cores, sockets and devices under concurrent hosts.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Key, Prng};
use octokv_client::command::{Command, Response, Value};
use octokv_client::config::ClientConfig;
use octokv_client::session::Session;
use octokv_engine::PutMode;
use octokv_engine::conformance::{operation_of, value_of};
use octokv_engine::linearizability::{Call, CallHistory, CallId, CallResult, Observed};
use octokv_node::{DeviceConfig, NodeConfig, RunningNode, StartError, start};
use octokv_runtime::{DeviceDriver, KernelSockets};
use octokv_sys::{clock, thread};
use octokv_wire::kv::StoreMode;
use std::collections::BTreeMap;

const SESSIONS: usize = 4;
const DEPTH: usize = 4;

fn node(device: DeviceConfig, driver: DeviceDriver) -> RunningNode {
    let mut config = NodeConfig {
        devices: vec![device],
        driver,
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        cores: thread::allowed_cores(),
        ..NodeConfig::default()
    };
    // Few bitmap partitions cause more contention.
    config.format.bitmap_partitions_log2 = 1;
    start(config).expect("starts")
}

fn session(node: &RunningNode) -> Session<KernelSockets> {
    let config = ClientConfig { queue_depth: DEPTH as u16, ..ClientConfig::default() };
    let mut session = Session::new(KernelSockets::new().unwrap(), node.addresses()[0], config, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

/// One round: `operations` operations on few fresh keys, many of them concurrent.
fn round(sessions: &mut [Session<KernelSockets>], round: u64, operations: u64) {
    let (mut random, mut history) = (Prng::new(round), CallHistory::default());
    let mut open: BTreeMap<u64, (Key, Call, CallId)> = BTreeMap::new();
    let (mut submitted, mut ended) = (0, 0);
    while ended < operations {
        for session in &mut *sessions {
            while submitted < operations && session.free_slots() > 0 {
                submitted += 1;
                let key = Key::new(format!("r{round}k{}", random.below(3)).as_bytes()).unwrap();
                let bound = [100, 5_000, 40_000][random.below(3) as usize];
                let length = 8 + random.below(bound) as usize;
                let value = value_of(&key, submitted, length);
                let (call, command) = match random.below(6) {
                    0 | 1 => {
                        let (value, mode) = (Value::Slice(&value), StoreMode::Upsert);
                        let call =
                            Call::Put { operation: submitted, bytes: length as u32, mode: PutMode::Upsert };
                        (call, Command::Store { key: key.clone(), value, mode })
                    }
                    2 => (Call::Clear, Command::Delete { key: key.clone() }),
                    _ => (Call::Get, Command::Retrieve { key: key.clone(), limit_bytes: u32::MAX }),
                };
                let id = history.begin(key.clone(), call);
                session.submit(command, submitted).expect("a slot is free");
                open.insert(submitted, (key, call, id));
            }
            session.poll(clock::now(), |token, response| {
                let (key, call, id) = open.remove(&token).expect("one response per command");
                let outcome = match response.expect("the command succeeds") {
                    Response::Stored | Response::Deleted => CallResult::Acknowledged,
                    Response::Value { data, .. } => {
                        CallResult::Observed(Observed::Value(operation_of(&key, &data)))
                    }
                    Response::NotFound if call == Call::Get => CallResult::Observed(Observed::Absent),
                    Response::NotFound => CallResult::ConditionFailed,
                    other => panic!("{other:?}"),
                };
                history.end(id, outcome);
                ended += 1;
            });
        }
    }
    if let Err(violation) = history.check() {
        panic!("round {round}: {violation}");
    }
}

fn check_linearizable(device: DeviceConfig, driver: DeviceDriver, rounds: u64) {
    let node = node(device, driver);
    let mut sessions: Vec<_> = (0..SESSIONS).map(|_| session(&node)).collect();
    for number in 0..rounds {
        round(&mut sessions, number, 120);
    }
    drop(sessions);
    node.stop().expect("shuts down cleanly");
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
    // If io_uring is forbidden, a node configured for it fails to start and names the reason.
    let config = NodeConfig { devices: vec![device], driver: DeviceDriver::Uring, ..NodeConfig::default() };
    let error = start(config).err().expect("start fails");
    assert!(matches!(error, StartError::Driver(_)), "{error}");
    assert!(!folder.path().join("device").exists(), "a failed start created the device file");
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
            session.poll(clock::now(), |_, response| stored = matches!(response, Ok(Response::Stored)));
        }
        drop(session);
        node.stop().expect("shuts down cleanly");
    }
}
