//! The remote device against a node that answers late, loses connections, and loses its power.

mod support;

use octokv_base::{Buffer, Key, Lba, Pool, Random};
use octokv_client::bug_injection::{Bug, plant};
use octokv_client::{Error, Reconnect, Remote, RemoteDevice, Settings};
use octokv_device::{Device, DeviceError, Done, Geometry};
use octokv_engine::conformance::{self, Subject, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{FormatSettings, HashEngine, OpenSettings, format, open};
use octokv_engine::{Durability, Engine, Fault, Put, PutMode};
use octokv_runtime::{Channel, block_on};
use octokv_wire::{Status, nvm};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use support::block_node::Puppet;

const BYTES: usize = 4 << 20;

/// A node and a device on it.
struct World {
    node: Puppet,
    remote: Remote<Puppet>,
    channel: Channel,
}

fn settings(reconnect: Reconnect) -> Settings {
    Settings { queues: 1, depth: 32, reconnect, ..Settings::default() }
}

fn again() -> Reconnect {
    let ms = octokv_base::Nanos::from_millis;
    Reconnect::BackOff { first: ms(1), longest: ms(5), give_up: octokv_base::Nanos::NEVER }
}

impl World {
    fn new(block_bytes: usize, reconnect: Reconnect) -> World {
        World::on(Puppet::new(block_bytes, vec![0; BYTES]), reconnect)
    }

    fn on(node: Puppet, reconnect: Reconnect) -> World {
        let session = node.connect_session(settings(reconnect));
        let remote = Remote::new(session, node.0.borrow().now).expect("a live namespace of blocks");
        let channel = remote.channel();
        World { node, remote, channel }
    }

    fn device(&self) -> RemoteDevice {
        self.remote.device(&self.channel)
    }

    /// One turn of device and node.
    fn turn(&self) {
        self.remote.turn(self.node.tick());
        self.channel.poll();
        self.node.pump();
    }

    fn finish<T>(&self, future: impl Future<Output = T>) -> T {
        let mut turns = 0;
        block_on(future, || {
            turns += 1;
            assert!(turns < 3_000_000, "standstill");
            self.turn();
        })
    }

    fn write(&self, at: u64, data: &[u8]) -> Result<(), DeviceError> {
        let mut buffer = Buffer::zeroed(data.len());
        buffer.copy_from_slice(data);
        self.finish(self.device().write(Lba(at), buffer)).result
    }

    fn read(&self, at: u64, bytes: usize) -> Result<Buffer, DeviceError> {
        self.finish(self.device().read(Lba(at), Buffer::zeroed(bytes))).into_read()
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.finish(self.device().flush()).result
    }

    /// Turns until the connection that was lost is back.
    fn reconnected(&self) {
        let lives = self.remote.with_session(|session| session.lives());
        while self.remote.with_session(|session| session.lives() == lives || !session.is_live()) {
            self.turn();
        }
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn operations_of_any_length_are_carried_out_in_parts_that_a_command_can_carry() {
    for block_bytes in [512, 4096] {
        let world = World::new(block_bytes, again());
        assert_eq!(
            world.device().geometry(),
            Geometry {
                block_bytes: block_bytes as u32,
                blocks: (BYTES / block_bytes) as u64,
                volatile: false
            }
        );
        world.node.0.borrow_mut().lag = 3;
        // 128 KiB is the most of one command.
        for bytes in [block_bytes, 128 << 10, (128 << 10) + block_bytes, 1 << 20, 3 << 20] {
            let data = pattern(bytes);
            world.write(8, &data).unwrap();
            let read = world.read(8, bytes).unwrap();
            assert!(read.len() == bytes && read[..] == data, "{bytes} bytes");
        }
        assert_eq!(world.node.0.borrow().most_blocks as usize, (128 << 10) / block_bytes);
        let trimmed = world.finish(world.device().trim(Lba(8), 16)).result;
        assert_eq!(trimmed, Ok(()));
        let zeros = vec![0; 16 * block_bytes];
        assert!(world.read(8, zeros.len()).unwrap()[..] == zeros);
        let beyond = world.device().geometry().blocks;
        assert_eq!(world.write(beyond, &vec![0; block_bytes]), Err(DeviceError::OutOfRange));
        let trimmed = world.finish(world.device().trim(Lba(u64::MAX), 2)).result;
        assert_eq!(trimmed, Err(DeviceError::OutOfRange));
    }
}

#[test]
fn a_buffer_comes_back_with_its_write() {
    let world = World::new(512, again());
    let buffer = Buffer::zeroed(1 << 20);
    let at = buffer.as_ptr();
    let Done { buffer, result } = world.finish(world.device().write(Lba(0), buffer));
    assert_eq!((buffer.map(|buffer| buffer.as_ptr()), result), (Some(at), Ok(())));
}

#[test]
fn many_operations_at_once_go_beyond_what_a_queue_takes() {
    let world = World::new(512, again());
    world.node.0.borrow_mut().lag = 4;
    let device = world.device();
    let filled = |byte: u8| {
        let mut buffer = Buffer::zeroed(1024);
        buffer.fill(byte);
        buffer
    };
    let writes: Vec<_> = (0..200).map(|i| device.write(Lba(2 * i), filled(i as u8))).collect();
    for write in writes {
        assert_eq!(world.finish(write).result, Ok(()));
    }
    let reads: Vec<_> = (0..200).map(|i| (i, device.read(Lba(2 * i), filled(0)))).collect();
    for (i, read) in reads {
        assert_eq!(world.finish(read).into_read().unwrap()[..], filled(i as u8)[..]);
    }
}

#[test]
fn what_a_busy_node_put_off_is_asked_for_again() {
    let world = World::new(512, again());
    world.node.0.borrow_mut().busy = 12;
    world.write(0, &pattern(1 << 20)).unwrap();
    world.node.0.borrow_mut().busy = 12;
    assert!(world.read(0, 1 << 20).unwrap()[..] == pattern(1 << 20));
    world.node.0.borrow_mut().busy = 3;
    assert!(world.read(0, 512).unwrap()[..] == pattern(512));
    world.node.0.borrow_mut().busy = 5;
    assert_eq!(world.flush(), Ok(()));
    // For ever is too long.
    world.node.0.borrow_mut().busy = u32::MAX;
    assert_eq!(world.flush(), Err(DeviceError::Io(110)));
}

#[test]
fn a_failed_command_is_a_failed_operation_and_no_more() {
    let world = World::new(512, again());
    world.node.0.borrow_mut().fails = Some(Status::new(2, 0x80));
    assert_eq!(world.write(0, &pattern(512)), Err(DeviceError::Io(5)));
    world.node.0.borrow_mut().short_reads = true;
    assert_eq!(world.read(0, 1024).unwrap_err(), DeviceError::Io(5));
    world.node.0.borrow_mut().short_reads = false;
    assert_eq!(world.write(0, &pattern(512)), Ok(()));
    assert_eq!(world.flush(), Ok(()));
    assert!(!world.remote.is_fenced());
}

#[test]
fn a_loss_with_nothing_at_stake_is_only_a_pause() {
    let world = World::new(512, again());
    world.write(0, &pattern(512)).unwrap();
    world.flush().unwrap();
    world.node.cut();
    while world.remote.with_session(|session| session.is_live()) {
        world.turn();
    }
    // It waits for the connection.
    world.write(1, &pattern(512)).unwrap();
    assert_eq!((world.flush(), world.remote.is_fenced()), (Ok(()), false));
    assert!(world.read(0, 512).unwrap()[..] == pattern(512));
}

#[test]
fn a_write_that_was_not_flushed_when_the_connection_went_fences_the_device() {
    let world = World::new(512, again());
    world.write(0, &pattern(512)).unwrap();
    world.node.power_cut();
    world.reconnected();
    assert!(world.remote.is_fenced());
    for _ in 0..2 {
        assert_eq!(world.flush(), Err(DeviceError::Io(30)));
        assert_eq!(world.write(1, &pattern(512)), Err(DeviceError::Io(30)));
        assert_eq!(world.finish(world.device().trim(Lba(0), 1)).result, Err(DeviceError::Io(30)));
    }
    assert!(world.read(0, 512).is_ok());
    let anew = World::on(world.node.clone(), again());
    assert_eq!((anew.write(1, &pattern(512)), anew.flush()), (Ok(()), Ok(())));
}

#[test]
fn operations_under_way_fail_with_their_connection_and_a_write_among_them_fences_the_device() {
    let world = World::new(512, again());
    world.node.0.borrow_mut().lag = u64::MAX;
    let read = world.device().read(Lba(0), Buffer::zeroed(512));
    let flush = world.device().flush();
    (0..4).for_each(|_| world.turn());
    world.node.cut();
    assert_eq!(world.finish(read).result, Err(DeviceError::Io(5)));
    assert_eq!(world.finish(flush).result, Err(DeviceError::Io(5)));
    assert!(!world.remote.is_fenced());
    world.reconnected();
    let write = world.device().write(Lba(0), Buffer::zeroed(512));
    (0..4).for_each(|_| world.turn());
    world.node.cut();
    assert_eq!(world.finish(write).result, Err(DeviceError::Io(5)));
    assert!(world.remote.is_fenced());
}

#[test]
fn when_the_session_has_ended_everything_fails() {
    let world = World::new(512, Reconnect::Never);
    let waiting = world.device().read(Lba(0), Buffer::zeroed(512));
    world.node.cut();
    assert!(world.finish(waiting).result.is_err());
    assert_eq!(world.read(0, 512).unwrap_err(), DeviceError::Io(107));
    assert_eq!(world.flush(), Err(DeviceError::Io(107)));
}

#[test]
fn what_is_no_device_is_none() {
    let of = |block_bytes| {
        let node = Puppet::new(block_bytes, vec![0; BYTES]);
        let session = node.connect_session(Settings::default());
        let now = node.0.borrow().now;
        Remote::new(session, now).err()
    };
    assert_eq!(of(4096), None);
    assert_eq!(of(8192), Some(Error::BlockBytes { have: 8192, block_bytes: 8192, max: 4096 }));
}

struct Hash {
    unit_bytes: u32,
    seed: u64,
    durability: Durability,
}

fn pool() -> Pool {
    Pool::new(64 << 20)
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
        let settings = OpenSettings { durability: self.durability, cores: 1 };
        let volume = open(&device, &pool(), settings, &self.settings()).await;
        Ok(HashEngine::new(volume.map_err(|error| error.to_string())?, 0, device, pool()))
    }

    async fn close(&self, engine: &HashEngine) {
        engine.checkpoint(true).await.expect("closes");
    }
}

#[test]
fn the_hash_engine_conforms_on_a_remote_device() {
    for (seed, block_bytes) in [(1, 512), (2, 4096)] {
        let node = Puppet::new(block_bytes, vec![0; BYTES]);
        node.0.borrow_mut().lag = 2;
        // Many a record is longer than a command.
        node.0.borrow_mut().data_pages_log2 = 1;
        let world = World::on(node, again());
        let device: Rc<dyn Device> = Rc::new(world.device());
        let mut subject = Hash { unit_bytes: block_bytes as u32, seed, durability: Durability::Flush };
        let turn = RefCell::new(|| world.turn());
        conformance::sequential(&subject, &device, seed, 600, &turn);
        subject.seed += 10;
        world.finish(Subject::format(&subject, Rc::clone(&device)));
        let engine = Rc::new(world.finish(subject.open(Rc::clone(&device))).expect("opens"));
        conformance::concurrent(&[engine], seed, 400, |_| {
            world.turn();
            true
        });
    }
}

/// What was promised and tried.
#[derive(Default)]
struct Ledger {
    /// The last operation on each key that a promise holds for.
    settled: BTreeMap<Key, u64>,
    /// Stored, and not yet flushed.
    stored: BTreeMap<Key, u64>,
    tried: BTreeMap<Key, Vec<u64>>,
}

/// Puts and flushes until the node has lost its power in their midst, then opens the volume again: what was
/// promised is there. The error says what does not hold.
fn play(seed: u64, durability: Durability) -> Result<(), String> {
    let mut random = Random::new(seed);
    let world = World::new(512, again());
    world.node.0.borrow_mut().random = Random::new(seed ^ 7);
    world.node.0.borrow_mut().lag = 1 + random.below(4);
    let device: Rc<dyn Device> = Rc::new(world.device());
    let subject = Hash { unit_bytes: 512, seed: 42, durability };
    world.finish(subject.format(Rc::clone(&device)));
    let engine = world.finish(subject.open(device)).expect("opens after format");
    let mut ledger = Ledger::default();
    let (cut_at, mut turns) = (random.below(1500), 0);
    let mut turn = || {
        turns += 1;
        if turns == cut_at {
            world.node.power_cut();
        }
        world.turn();
        turns >= cut_at
    };
    for operation in 1..60 {
        let key = key_of(random.below(12));
        let value = value_of(&key, operation, 8 + random.below(3000) as usize);
        ledger.tried.entry(key.clone()).or_default().push(operation);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), value.len());
        match block_on(put, || _ = turn()) {
            Ok(Put::Stored) => drop(ledger.stored.insert(key, operation)),
            Ok(other) => return Err(format!("a put was answered with {other:?}")),
            Err(Fault::Device(_) | Fault::ReadOnly) if turn() => {}
            Err(fault) => return Err(format!("a put failed on a healthy node: {fault}")),
        }
        let idle = random.below(40);
        (0..idle).for_each(|_| _ = turn());
        let flushed = random.one_in(8) && block_on(engine.flush(), || _ = turn()).is_ok();
        if flushed || durability == Durability::Flush {
            ledger.settled.append(&mut ledger.stored);
        }
    }
    world.node.power_cut();
    let anew = World::on(world.node.clone(), again());
    let device: Rc<dyn Device> = Rc::new(anew.device());
    let engine = anew.finish(subject.open(device)).map_err(|why| format!("does not open again: {why}"))?;
    for (key, operations) in ledger.tried {
        let found = anew.finish(engine.get(&key)).map_err(|fault| format!("{key}: {fault}"))?;
        let found = found.map(|value| operation_of(&key, value.as_bytes()));
        let settled = ledger.settled.get(&key).copied();
        // The last that was promised, or one that was tried after it.
        let later = |operation: &u64| operations.contains(operation) && Some(*operation) > settled;
        if found != settled && !found.as_ref().is_some_and(later) {
            return Err(format!("{key}: promised was {settled:?}, found {found:?}"));
        }
    }
    Ok(())
}

#[test]
fn what_was_promised_survives_a_power_cut_of_the_node() {
    for seed in 0..40 {
        for durability in [Durability::Flush, Durability::Device] {
            play(seed, durability).unwrap_or_else(|what| panic!("seed {seed}, {durability:?}: {what}"));
        }
    }
}

fn is_found(bug: Bug, durability: Durability) {
    plant(Some(bug));
    let found = (0..100).find_map(|seed| play(seed, durability).err().map(|what| (seed, what)));
    plant(None);
    let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
    println!("{bug:?}, after {} seeds: {what}", seed + 1);
}

#[test]
fn a_flush_that_is_answered_before_the_nodes_flush_is_found() {
    is_found(Bug::AnswerFlushEarly, Durability::Flush);
}

#[test]
fn lost_writes_that_are_forgotten_are_found() {
    is_found(Bug::ForgetLostWrites, Durability::Device);
}

#[test]
fn a_flush_of_the_device_is_a_flush_of_the_node() {
    let world = World::new(512, again());
    world.flush().unwrap();
    assert_eq!(world.node.0.borrow().commands.get(&nvm::opcode::FLUSH), Some(&1));
}
