//! An engine on the client's side, on a block namespace of a real node over real sockets, under the same conformance
//! suites as an engine on a local device.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Buffer, Lba, NamespaceId};
use octokv_client::error::ConnectionError;
use octokv_client::{ClientConfig, Command, Error, Reconnect, RemoteSession, Response, Session};
use octokv_device::Device;
use octokv_engine::conformance::{self, EngineFixture, VolumeFixture};
use octokv_engine::{AnyVolume, Durability, FormatConfig, OpenConfig, WallClock};
use octokv_node::{
    CommandSetConfig, DeviceConfig, ExistingDataPolicy, NamespaceConfig, NodeConfig, RunningNode, start,
};
use octokv_runtime::{DeviceHandle, KernelSockets, block_on};
use octokv_sys::{clock, thread};
use octokv_wire::nvm::LbaRange;
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

const BLOCKS: NamespaceId = NamespaceId(2);

fn namespace(directory: &Path, block_bytes: u32) -> NamespaceConfig {
    NamespaceConfig {
        id: BLOCKS,
        devices: vec![DeviceConfig::File {
            path: directory.join(format!("blocks-{block_bytes}")),
            create_bytes: Some(16 << 20),
        }],
        drive_profile: None,
        cache_bytes: 0,
        prepare_bytes: 0,
        command_set: CommandSetConfig::Blocks { block_bytes },
        existing_data: ExistingDataPolicy::Keep,
        ana_group: 1,
        required: true,
        nguid_suffix: 7,
    }
}

fn node(directory: &Path, block_bytes: u32) -> RunningNode {
    let config = NodeConfig {
        devices: vec![DeviceConfig::Memory { bytes: 32 << 20, block_bytes: 4096 }],
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        cores: thread::allowed_cores(),
        namespaces: vec![namespace(directory, block_bytes)],
        ..NodeConfig::default()
    };
    start(config).expect("starts")
}

fn session(node: &RunningNode) -> Session<KernelSockets> {
    let config = ClientConfig {
        namespace: BLOCKS,
        io_queues: 2,
        queue_depth: 16,
        reconnect: Reconnect::Never,
        ..ClientConfig::default()
    };
    let mut session = Session::new(KernelSockets::new().unwrap(), node.addresses()[0], config, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

struct RemoteFixture {
    remote: RemoteSession<KernelSockets>,
    channel: DeviceHandle,
}

impl RemoteFixture {
    fn new(node: &RunningNode) -> RemoteFixture {
        let remote = RemoteSession::new(session(node), clock::now()).expect("the namespace holds blocks");
        let channel = remote.channel();
        RemoteFixture { remote, channel }
    }

    fn device(&self) -> Rc<dyn Device> {
        Rc::new(self.remote.device(&self.channel))
    }

    fn run_iteration(&self) {
        self.remote.poll(clock::now());
        self.channel.poll();
    }

    fn run_to_completion<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || self.run_iteration())
    }
}

fn volume_fixture(unit_bytes: u32, seed: u64) -> VolumeFixture<AnyVolume> {
    let format = FormatConfig { seed, unit_bytes: Some(unit_bytes), ..FormatConfig::default() };
    VolumeFixture::new(
        format,
        OpenConfig {
            durability: Durability::PowerSafe,
            cores: 1,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        },
    )
}

#[test]
fn the_hash_engine_conforms_on_a_namespace_of_blocks_of_a_real_node() {
    for block_bytes in [512, 4096] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let node = node(directory.path(), block_bytes);
        let fixture = RemoteFixture::new(&node);
        let iterate = RefCell::new(|| fixture.run_iteration());
        let mut engine_fixture = volume_fixture(block_bytes, 1);
        conformance::sequential(&engine_fixture, &fixture.device(), 5, 400, &iterate);
        engine_fixture.format.seed = 2;
        fixture.run_to_completion(EngineFixture::format(&engine_fixture, fixture.device()));
        let engine = fixture.run_to_completion(engine_fixture.open(fixture.device())).expect("opens");
        conformance::concurrent(&[Rc::new(engine)], 6, 300, |_| {
            fixture.run_iteration();
            true
        });
        node.stop().expect("shuts down cleanly");
    }
}

#[test]
fn data_flushed_by_a_remote_engine_survives_a_node_restart() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let engine_fixture = volume_fixture(512, 3);
    let (key, value) = (conformance::key_of(1), conformance::value_of(&conformance::key_of(1), 9, 5000));
    {
        use octokv_engine::{Engine, PutMode, PutOutcome};
        let node = node(directory.path(), 512);
        let fixture = RemoteFixture::new(&node);
        fixture.run_to_completion(EngineFixture::format(&engine_fixture, fixture.device()));
        let engine = fixture.run_to_completion(engine_fixture.open(fixture.device())).expect("opens");
        let put = engine.put(
            &key,
            PutMode::Upsert,
            conformance::record_of(engine.record_layout(), &key, &value),
            value.len(),
        );
        assert_eq!(fixture.run_to_completion(put), Ok(PutOutcome::Stored));
        drop(engine);
        node.stop().expect("shuts down cleanly");
        // The connection is closed and is not reopened.
        assert!(fixture.run_to_completion(fixture.device().flush()).result.is_err());
    }
    use octokv_engine::Engine;
    let node = node(directory.path(), 512);
    let fixture = RemoteFixture::new(&node);
    let engine = fixture.run_to_completion(engine_fixture.open(fixture.device())).expect("opens again");
    let found =
        fixture.run_to_completion(engine.get(&key)).expect("the read succeeds").expect("it was acknowledged");
    assert!(found.as_bytes() == value);
    node.stop().expect("shuts down cleanly");
}

/// Executes one command and returns its response.
fn execute(session: &mut Session<KernelSockets>, command: Command<'_>) -> Result<Response, Error> {
    session.submit(command, 1).expect("a slot is free");
    let mut response = None;
    while response.is_none() {
        session.poll(clock::now(), |_, result| response = Some(result));
    }
    response.expect("the loop ends with a response")
}

#[test]
fn a_session_ends_when_its_namespace_is_removed() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let node = node(directory.path(), 4096);
    let mut session = session(&node);
    let range = LbaRange { lba: Lba(0), blocks: 2 };
    let read = execute(&mut session, Command::Read { range, buffer: Some(Buffer::zeroed(8192)) });
    assert!(matches!(read, Ok(Response::Blocks { .. })), "{read:?}");
    node.remove_namespace(BLOCKS).expect("the namespace exists");
    while session.ended().is_none() {
        session.poll(clock::now(), |_, _| ());
    }
    assert_eq!(
        session.ended(),
        Some(Error::Connect(node.addresses()[0], ConnectionError::NamespaceNotFound))
    );
    node.stop().expect("shuts down cleanly");
}
