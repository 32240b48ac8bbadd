//! The remote device against a node that delays responses, closes connections, and loses power.

use crate::support::block_node::BlockNodeSockets;
use octokv_base::{Buffer, Key, Lba, Prng};
use octokv_client::bug_injection::{InjectedBug, inject};
use octokv_client::{ClientConfig, Error, Reconnect, RemoteDevice, RemoteSession};
use octokv_device::{Device, DeviceError, Geometry, IoResult};
use octokv_engine::conformance::{
    self, EngineFixture, VolumeFixture, key_of, operation_of, record_of, value_of,
};
use octokv_engine::{AnyVolume, Durability, Engine, EngineError, PutMode, PutOutcome};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::{DeviceHandle, block_on};
use octokv_wire::{Status, nvm};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

const BYTES: usize = 4 << 20;

/// A node and a device on it.
struct RemoteFixture {
    node: BlockNodeSockets,
    remote: RemoteSession<BlockNodeSockets>,
    channel: DeviceHandle,
}

fn config(reconnect: Reconnect) -> ClientConfig {
    ClientConfig { io_queues: 1, queue_depth: 32, reconnect, ..ClientConfig::default() }
}

fn reconnect_forever() -> Reconnect {
    let ms = octokv_base::Nanos::from_millis;
    Reconnect::BackOff { first_delay: ms(1), delay_max: ms(5), give_up_after: octokv_base::Nanos::NEVER }
}

impl RemoteFixture {
    fn new(block_bytes: usize, reconnect: Reconnect) -> RemoteFixture {
        RemoteFixture::on(BlockNodeSockets::new(block_bytes, vec![0; BYTES]), reconnect)
    }

    fn on(node: BlockNodeSockets, reconnect: Reconnect) -> RemoteFixture {
        let session = node.connect_session(config(reconnect));
        let remote = RemoteSession::new(session, node.0.borrow().now).expect("a live namespace of blocks");
        let channel = remote.channel();
        RemoteFixture { node, remote, channel }
    }

    fn device(&self) -> RemoteDevice {
        self.remote.device(&self.channel)
    }

    /// One iteration of device and node.
    fn step(&self) {
        self.remote.poll(self.node.advance_time());
        self.channel.poll();
        self.node.pump();
    }

    fn finish<T>(&self, future: impl Future<Output = T>) -> T {
        let mut iterations = 0;
        block_on(future, || {
            iterations += 1;
            assert!(iterations < 3_000_000, "no progress");
            self.step();
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

    /// Runs until the lost connection is reestablished.
    fn reconnected(&self) {
        let epoch = self.remote.with_session(|session| session.connection_epoch());
        while self.remote.with_session(|session| session.connection_epoch() == epoch || !session.is_live()) {
            self.step();
        }
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn operations_of_any_length_are_split_into_commands() {
    for block_bytes in [512, 4096] {
        let fixture = RemoteFixture::new(block_bytes, reconnect_forever());
        assert_eq!(
            fixture.device().geometry(),
            Geometry {
                block_bytes: block_bytes as u32,
                blocks: (BYTES / block_bytes) as u64,
                volatile: false
            }
        );
        fixture.node.0.borrow_mut().delay_one_in = 3;
        // One command carries at most 128 KiB.
        for bytes in [block_bytes, 128 << 10, (128 << 10) + block_bytes, 1 << 20, 3 << 20] {
            let data = pattern(bytes);
            fixture.write(8, &data).unwrap();
            let read = fixture.read(8, bytes).unwrap();
            assert!(read.len() == bytes && read[..] == data, "{bytes} bytes");
        }
        assert_eq!(fixture.node.0.borrow().blocks_max as usize, (128 << 10) / block_bytes);
        let trimmed = fixture.finish(fixture.device().trim(Lba(8), 16)).result;
        assert_eq!(trimmed, Ok(()));
        let zeros = vec![0; 16 * block_bytes];
        assert!(fixture.read(8, zeros.len()).unwrap()[..] == zeros);
        let beyond = fixture.device().geometry().blocks;
        assert_eq!(fixture.write(beyond, &vec![0; block_bytes]), Err(DeviceError::OutOfRange));
        let trimmed = fixture.finish(fixture.device().trim(Lba(u64::MAX), 2)).result;
        assert_eq!(trimmed, Err(DeviceError::OutOfRange));
    }
}

#[test]
fn a_buffer_returns_with_its_write() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    let buffer = Buffer::zeroed(1 << 20);
    let at = buffer.as_ptr();
    let IoResult { buffer, result } = fixture.finish(fixture.device().write(Lba(0), buffer));
    assert_eq!((buffer.map(|buffer| buffer.as_ptr()), result), (Some(at), Ok(())));
}

#[test]
fn more_operations_than_queue_slots_complete() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.node.0.borrow_mut().delay_one_in = 4;
    let device = fixture.device();
    let filled = |byte: u8| {
        let mut buffer = Buffer::zeroed(1024);
        buffer.fill(byte);
        buffer
    };
    let writes: Vec<_> = (0..200).map(|i| device.write(Lba(2 * i), filled(i as u8))).collect();
    for write in writes {
        assert_eq!(fixture.finish(write).result, Ok(()));
    }
    let reads: Vec<_> = (0..200).map(|i| (i, device.read(Lba(2 * i), filled(0)))).collect();
    for (i, read) in reads {
        assert_eq!(fixture.finish(read).into_read().unwrap()[..], filled(i as u8)[..]);
    }
}

#[test]
fn operations_that_a_busy_node_rejects_are_retried() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.node.0.borrow_mut().busy_responses = 12;
    fixture.write(0, &pattern(1 << 20)).unwrap();
    fixture.node.0.borrow_mut().busy_responses = 12;
    assert!(fixture.read(0, 1 << 20).unwrap()[..] == pattern(1 << 20));
    fixture.node.0.borrow_mut().busy_responses = 3;
    assert!(fixture.read(0, 512).unwrap()[..] == pattern(512));
    fixture.node.0.borrow_mut().busy_responses = 5;
    assert_eq!(fixture.flush(), Ok(()));
    // A node that stays busy exceeds the deadline.
    fixture.node.0.borrow_mut().busy_responses = u32::MAX;
    assert_eq!(fixture.flush(), Err(DeviceError::Io(110)));
}

#[test]
fn a_failed_command_fails_its_operation_only() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.node.0.borrow_mut().next_status = Some(Status::MEDIA_WRITE_FAULT);
    assert_eq!(fixture.write(0, &pattern(512)), Err(DeviceError::Io(5)));
    fixture.node.0.borrow_mut().short_reads = true;
    assert_eq!(fixture.read(0, 1024).unwrap_err(), DeviceError::Io(5));
    fixture.node.0.borrow_mut().short_reads = false;
    assert_eq!(fixture.write(0, &pattern(512)), Ok(()));
    assert_eq!(fixture.flush(), Ok(()));
    assert!(!fixture.remote.is_fenced());
}

#[test]
fn a_connection_loss_without_unflushed_writes_only_delays() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.write(0, &pattern(512)).unwrap();
    fixture.flush().unwrap();
    fixture.node.cut_connections();
    while fixture.remote.with_session(|session| session.is_live()) {
        fixture.step();
    }
    // The write waits for the connection.
    fixture.write(1, &pattern(512)).unwrap();
    assert_eq!((fixture.flush(), fixture.remote.is_fenced()), (Ok(()), false));
    assert!(fixture.read(0, 512).unwrap()[..] == pattern(512));
}

#[test]
fn an_unflushed_write_at_connection_loss_fences_the_device() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.write(0, &pattern(512)).unwrap();
    fixture.node.power_cut();
    fixture.reconnected();
    assert!(fixture.remote.is_fenced());
    for _ in 0..2 {
        assert_eq!(fixture.flush(), Err(DeviceError::Io(30)));
        assert_eq!(fixture.write(1, &pattern(512)), Err(DeviceError::Io(30)));
        assert_eq!(fixture.finish(fixture.device().trim(Lba(0), 1)).result, Err(DeviceError::Io(30)));
    }
    assert!(fixture.read(0, 512).is_ok());
    let reopened = RemoteFixture::on(fixture.node.clone(), reconnect_forever());
    assert_eq!((reopened.write(1, &pattern(512)), reopened.flush()), (Ok(()), Ok(())));
}

#[test]
fn operations_in_flight_fail_with_their_connection_and_a_write_fences_the_device() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.node.0.borrow_mut().delay_one_in = u64::MAX;
    let read = fixture.device().read(Lba(0), Buffer::zeroed(512));
    let flush = fixture.device().flush();
    (0..4).for_each(|_| fixture.step());
    fixture.node.cut_connections();
    assert_eq!(fixture.finish(read).result, Err(DeviceError::Io(5)));
    assert_eq!(fixture.finish(flush).result, Err(DeviceError::Io(5)));
    assert!(!fixture.remote.is_fenced());
    fixture.reconnected();
    let write = fixture.device().write(Lba(0), Buffer::zeroed(512));
    (0..4).for_each(|_| fixture.step());
    fixture.node.cut_connections();
    assert_eq!(fixture.finish(write).result, Err(DeviceError::Io(5)));
    assert!(fixture.remote.is_fenced());
}

#[test]
fn all_operations_fail_after_the_session_ended() {
    let fixture = RemoteFixture::new(512, Reconnect::Never);
    let waiting = fixture.device().read(Lba(0), Buffer::zeroed(512));
    fixture.node.cut_connections();
    assert!(fixture.finish(waiting).result.is_err());
    assert_eq!(fixture.read(0, 512).unwrap_err(), DeviceError::Io(107));
    assert_eq!(fixture.flush(), Err(DeviceError::Io(107)));
}

#[test]
fn unsupported_block_sizes_are_rejected() {
    let of = |block_bytes| {
        let node = BlockNodeSockets::new(block_bytes, vec![0; BYTES]);
        let session = node.connect_session(ClientConfig::default());
        let now = node.0.borrow().now;
        RemoteSession::new(session, now).err()
    };
    assert_eq!(of(4096), None);
    assert_eq!(of(8192), Some(Error::BlockDataLength { have: 8192, block_bytes: 8192, max: 4096 }));
}

fn volume_fixture(unit_bytes: u32, seed: u64, durability: Durability) -> VolumeFixture<AnyVolume> {
    let format = FormatConfig { seed, unit_bytes: Some(unit_bytes), ..FormatConfig::default() };
    VolumeFixture::new(
        format,
        OpenConfig {
            durability,
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
fn the_hash_engine_conforms_on_a_remote_device() {
    for (seed, block_bytes) in [(1, 512), (2, 4096)] {
        let node = BlockNodeSockets::new(block_bytes, vec![0; BYTES]);
        node.0.borrow_mut().delay_one_in = 2;
        // Many records are longer than a command.
        node.0.borrow_mut().data_pages_log2 = 1;
        let fixture = RemoteFixture::on(node, reconnect_forever());
        let device: Rc<dyn Device> = Rc::new(fixture.device());
        let mut subject = volume_fixture(block_bytes as u32, seed, Durability::PowerSafe);
        let step = RefCell::new(|| fixture.step());
        conformance::sequential(&subject, &device, seed, 600, &step);
        subject.format.seed += 10;
        fixture.finish(EngineFixture::format(&subject, Rc::clone(&device)));
        let engine = Rc::new(fixture.finish(subject.open(Rc::clone(&device))).expect("opens"));
        conformance::concurrent(&[engine], seed, 400, |_| {
            fixture.step();
            true
        });
    }
}

/// Operations attempted, stored and durable.
#[derive(Default)]
struct WriteHistory {
    /// Last durable operation of each key.
    durable: BTreeMap<Key, u64>,
    /// Stored, not yet flushed.
    stored: BTreeMap<Key, u64>,
    attempted: BTreeMap<Key, Vec<u64>>,
}

/// Puts and flushes until the node loses power in between, then recovers the volume and checks that all
/// durable operations are present. The error names the violation.
fn run_power_cut(seed: u64, durability: Durability) -> Result<(), String> {
    let mut random = Prng::new(seed);
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.node.0.borrow_mut().random = Prng::new(seed ^ 7);
    fixture.node.0.borrow_mut().delay_one_in = 1 + random.below(4);
    let device: Rc<dyn Device> = Rc::new(fixture.device());
    let subject = volume_fixture(512, 42, durability);
    fixture.finish(subject.format(Rc::clone(&device)));
    let engine = fixture.finish(subject.open(device)).expect("opens after format");
    let mut history = WriteHistory::default();
    let (cut_at, mut iterations) = (random.below(1500), 0);
    let mut step = || {
        iterations += 1;
        if iterations == cut_at {
            fixture.node.power_cut();
        }
        fixture.step();
        iterations >= cut_at
    };
    for operation in 1..60 {
        let key = key_of(random.below(12));
        let value = value_of(&key, operation, 8 + random.below(3000) as usize);
        history.attempted.entry(key.clone()).or_default().push(operation);
        let put =
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), value.len());
        match block_on(put, || _ = step()) {
            Ok(PutOutcome::Stored) => drop(history.stored.insert(key, operation)),
            Ok(other) => return Err(format!("a put completed with {other:?}")),
            Err(EngineError::Device { .. } | EngineError::ReadOnly) if step() => {}
            Err(error) => return Err(format!("a put failed on a healthy node: {error}")),
        }
        let idle = random.below(40);
        (0..idle).for_each(|_| _ = step());
        let flushed = random.one_in(8) && block_on(engine.flush(), || _ = step()).is_ok();
        if flushed || durability == Durability::PowerSafe {
            history.durable.append(&mut history.stored);
        }
    }
    fixture.node.power_cut();
    let reopened = RemoteFixture::on(fixture.node.clone(), reconnect_forever());
    let device: Rc<dyn Device> = Rc::new(reopened.device());
    let engine =
        reopened.finish(subject.open(device)).map_err(|error| format!("recovery failed: {error}"))?;
    for (key, operations) in history.attempted {
        let found = reopened.finish(engine.get(&key)).map_err(|error| format!("{key}: {error}"))?;
        let found = found.map(|value| operation_of(&key, value.as_bytes()));
        let durable = history.durable.get(&key).copied();
        // The last durable operation, or one attempted after it.
        let later = |operation: &u64| operations.contains(operation) && Some(*operation) > durable;
        if found != durable && !found.as_ref().is_some_and(later) {
            return Err(format!("{key}: durable is {durable:?}, found {found:?}"));
        }
    }
    Ok(())
}

#[test]
fn durable_writes_survive_a_power_cut_of_the_node() {
    for seed in 0..40 {
        for durability in [Durability::PowerSafe, Durability::Completed] {
            run_power_cut(seed, durability)
                .unwrap_or_else(|violation| panic!("seed {seed}, {durability:?}: {violation}"));
        }
    }
}

fn assert_bug_is_found(bug: InjectedBug, durability: Durability) {
    inject(Some(bug));
    let found =
        (0..100).find_map(|seed| run_power_cut(seed, durability).err().map(|violation| (seed, violation)));
    inject(None);
    let (seed, violation) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
    println!("{bug:?}, after {} seeds: {violation}", seed + 1);
}

#[test]
fn a_flush_that_completes_before_the_nodes_flush_is_found() {
    assert_bug_is_found(InjectedBug::CompleteFlushEarly, Durability::PowerSafe);
}

#[test]
fn ignored_lost_writes_are_found() {
    assert_bug_is_found(InjectedBug::ForgetLostWrites, Durability::Completed);
}

#[test]
fn a_flush_of_the_device_is_a_flush_of_the_node() {
    let fixture = RemoteFixture::new(512, reconnect_forever());
    fixture.flush().unwrap();
    assert_eq!(fixture.node.0.borrow().command_counts.get(&nvm::opcode::FLUSH), Some(&1));
}
