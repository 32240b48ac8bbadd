//! An engine on the client's side, on a namespace of blocks of a real node over real sockets: the same suites that
//! hold for an engine on a device of its own.

#![allow(clippy::disallowed_methods, reason = "the test's own thread reads the clock")]

use octokv_base::{Buffer, Lba, NamespaceId, Pool};
use octokv_client::error::Lost;
use octokv_client::{Answer, Command, Error, Reconnect, Remote, Session, Settings};
use octokv_device::Device;
use octokv_engine::Durability;
use octokv_engine::conformance::{self, Subject};
use octokv_engine::hash::{FormatSettings, HashEngine, OpenSettings, format, open};
use octokv_node::{Content, DeviceSettings, Existing, NamespaceSettings, NodeSettings, RunningNode, start};
use octokv_runtime::{Channel, RealSockets, block_on};
use octokv_sys::{clock, thread};
use octokv_wire::nvm::Range;
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

const BLOCKS: NamespaceId = NamespaceId(2);

fn namespace(directory: &Path, block_bytes: u32) -> NamespaceSettings {
    NamespaceSettings {
        id: BLOCKS,
        device: DeviceSettings::File {
            path: directory.join(format!("blocks-{block_bytes}")),
            create_bytes: Some(16 << 20),
        },
        nand: None,
        content: Content::Blocks { block_bytes },
        existing: Existing::Keep,
        ana_group: 1,
        required: true,
        identity: 7,
    }
}

fn node(directory: &Path, block_bytes: u32) -> RunningNode {
    let settings = NodeSettings {
        device: DeviceSettings::Memory { bytes: 32 << 20, block_bytes: 4096 },
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        cores: thread::cores(),
        namespaces: vec![namespace(directory, block_bytes)],
        ..NodeSettings::default()
    };
    start(settings).expect("starts")
}

fn session(node: &RunningNode) -> Session<RealSockets> {
    let settings = Settings {
        namespace: BLOCKS,
        queues: 2,
        depth: 16,
        reconnect: Reconnect::Never,
        ..Settings::default()
    };
    let mut session = Session::new(RealSockets::new().unwrap(), node.addresses()[0], settings, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    session
}

struct Ground {
    remote: Remote<RealSockets>,
    channel: Channel,
}

impl Ground {
    fn new(node: &RunningNode) -> Ground {
        let remote = Remote::new(session(node), clock::now()).expect("a namespace of blocks");
        let channel = remote.channel();
        Ground { remote, channel }
    }

    fn device(&self) -> Rc<dyn Device> {
        Rc::new(self.remote.device(&self.channel))
    }

    fn turn(&self) {
        self.remote.turn(clock::now());
        self.channel.poll();
    }

    fn finish<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || self.turn())
    }
}

struct Hash {
    unit_bytes: u32,
    seed: u64,
}

impl Hash {
    fn settings(&self) -> FormatSettings {
        FormatSettings { seed: self.seed, unit_bytes: self.unit_bytes, ..FormatSettings::default() }
    }
}

impl Subject for Hash {
    type Engine = HashEngine;

    async fn format(&self, device: Rc<dyn Device>) {
        format(&*device, &self.settings()).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<HashEngine, String> {
        let (pool, settings) =
            (Pool::new(64 << 20), OpenSettings { durability: Durability::Flush, cores: 1 });
        let volume = open(&device, &pool, settings, &self.settings()).await;
        Ok(HashEngine::new(volume.map_err(|error| error.to_string())?, 0, device, pool))
    }

    async fn close(&self, engine: &HashEngine) {
        engine.checkpoint(true).await.expect("closes");
    }
}

#[test]
fn the_hash_engine_conforms_on_a_namespace_of_blocks_of_a_real_node() {
    for block_bytes in [512, 4096] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let node = node(directory.path(), block_bytes);
        let ground = Ground::new(&node);
        let turn = RefCell::new(|| ground.turn());
        let mut subject = Hash { unit_bytes: block_bytes, seed: 1 };
        conformance::sequential(&subject, &ground.device(), 5, 400, &turn);
        subject.seed = 2;
        ground.finish(Subject::format(&subject, ground.device()));
        let engine = ground.finish(subject.open(ground.device())).expect("opens");
        conformance::concurrent(&[Rc::new(engine)], 6, 300, |_| {
            ground.turn();
            true
        });
        node.stop().expect("stops in order");
    }
}

#[test]
fn what_an_engine_on_this_side_flushed_is_there_after_the_node_was_started_again() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let subject = Hash { unit_bytes: 512, seed: 3 };
    let (key, value) = (conformance::key_of(1), conformance::value_of(&conformance::key_of(1), 9, 5000));
    {
        use octokv_engine::{Engine, Put, PutMode};
        let node = node(directory.path(), 512);
        let ground = Ground::new(&node);
        ground.finish(Subject::format(&subject, ground.device()));
        let engine = ground.finish(subject.open(ground.device())).expect("opens");
        let put = engine.put(&key, PutMode::Upsert, conformance::record_of(&key, &value), value.len());
        assert_eq!(ground.finish(put), Ok(Put::Stored));
        drop(engine);
        node.stop().expect("stops in order");
        // Its connection is gone, and it does not come back.
        assert!(ground.finish(ground.device().flush()).result.is_err());
    }
    use octokv_engine::Engine;
    let node = node(directory.path(), 512);
    let ground = Ground::new(&node);
    let engine = ground.finish(subject.open(ground.device())).expect("opens again");
    let found = ground.finish(engine.get(&key)).expect("no fault").expect("it was acknowledged");
    assert!(found.as_bytes() == value);
    node.stop().expect("stops in order");
}

/// The answer to one command.
fn ask(session: &mut Session<RealSockets>, command: Command<'_>) -> Result<Answer, Error> {
    session.submit(command, 1).expect("there is room");
    let mut answer = None;
    while answer.is_none() {
        session.poll(clock::now(), |_, came| answer = Some(came));
    }
    answer.expect("it came")
}

#[test]
fn a_session_hears_that_its_namespace_is_removed() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let node = node(directory.path(), 4096);
    let mut session = session(&node);
    let range = Range { lba: Lba(0), blocks: 2 };
    let read = ask(&mut session, Command::Read { range, into: Some(Buffer::zeroed(8192)) });
    assert!(matches!(read, Ok(Answer::Blocks { .. })), "{read:?}");
    node.remove_namespace(BLOCKS).expect("it is there");
    while session.ended().is_none() {
        session.poll(clock::now(), |_, _| ());
    }
    assert_eq!(session.ended(), Some(Error::Connect(node.addresses()[0], Lost::NoNamespace)));
    node.stop().expect("stops in order");
}
