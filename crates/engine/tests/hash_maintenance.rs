//! Where superblocks are written, what maintenance does and when, and which records are written beside their batch.

use crate::common::HashFixture;
use octokv_base::{Buffer, Key, Lba, Nanos, Prng, value_offset};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, MemoryDevice, RamDisk};
use octokv_engine::conformance::{EngineFixture, TaskSet, key_of, record_of, value_of};
use octokv_engine::hash::HashEngine;
use octokv_engine::hash::superblock::{SUPERBLOCK_BYTES, UncheckedSuperblock};
use octokv_engine::{Durability, Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const BLOCK_BYTES: u64 = 512;

/// Non-volatile memory that logs writes, counts flushes, and completes long writes only when they are released.
struct TracingMemory {
    memory: MemoryDevice,
    trace: Rc<DeviceTrace>,
}

#[derive(Default)]
struct DeviceTrace {
    /// First block and length in bytes of each write.
    writes: RefCell<Vec<(u64, usize)>>,
    flushes: Cell<u64>,
    /// Writes of at least so many bytes do not complete; 0 holds none.
    held_from_bytes: Cell<usize>,
}

impl Device for TracingMemory {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.memory.geometry() }
    }
    fn name(&self) -> &str {
        "traced"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.memory.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let (trace, bytes) = (Rc::clone(&self.trace), buffer.len());
        trace.writes.borrow_mut().push((at.0, bytes));
        let mut written = Box::pin(self.memory.write(at, buffer));
        let is_held = move || (1..=bytes).contains(&trace.held_from_bytes.get());
        DeviceFuture::boxed(poll_fn(move |context| match is_held() {
            true => Poll::Pending,
            false => written.as_mut().poll(context),
        }))
    }
    fn flush(&self) -> DeviceFuture {
        self.trace.flushes.set(self.trace.flushes.get() + 1);
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.memory.trim(at, blocks)
    }
}

/// A fresh volume whose maintenance runs in simulated time.
struct MaintainedVolume {
    engine: Rc<HashEngine>,
    trace: Rc<DeviceTrace>,
    plan: FaultPlan,
    handle: ReactorHandle,
    tasks: TaskSet,
    random: Prng,
    now: Nanos,
    reports: Rc<RefCell<Vec<EngineError>>>,
}

fn traced_volume(durability: Durability, bytes: u64) -> (Rc<HashEngine>, Rc<DeviceTrace>, FaultPlan) {
    let mut fixture = HashFixture { durability, ..HashFixture::default() };
    fixture.format.unit_bytes = BLOCK_BYTES as u32;
    let (trace, plan) = (Rc::<DeviceTrace>::default(), FaultPlan::default());
    let memory = MemoryDevice::new(RamDisk::new(bytes, BLOCK_BYTES as u32).unwrap());
    let traced = Rc::new(TracingMemory { memory, trace: Rc::clone(&trace) });
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(traced, plan.clone()));
    block_on(fixture.format(Rc::clone(&device)), || ());
    let engine = Rc::new(block_on(fixture.open(device), || ()).unwrap());
    trace.writes.borrow_mut().clear();
    trace.flushes.set(0);
    (engine, trace, plan)
}

impl MaintainedVolume {
    fn new(durability: Durability) -> MaintainedVolume {
        let (engine, trace, plan) = traced_volume(durability, 4 << 20);
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let queue = Box::new(sim.device_queue(sim.add_host()));
        let handle = ReactorHandle::new(
            CoreWaker::without_eventfd(),
            DeviceHandle::new(queue, 1),
            CpuTime::simulated(),
        );
        let now = Nanos::from_secs(1);
        handle.begin_iteration(now);
        let reports: Rc<RefCell<Vec<EngineError>>> = Rc::default();
        let mut tasks = TaskSet::default();
        let (maintained, own, sink) = (Rc::clone(&engine), handle.clone(), Rc::clone(&reports));
        tasks.add(async move { maintained.maintain(&own, |error| sink.borrow_mut().push(error)).await });
        let mut volume =
            MaintainedVolume { engine, trace, plan, handle, tasks, random: Prng::new(1), now, reports };
        volume.advance_ms(0);
        volume
    }

    fn advance_ms(&mut self, millis: u64) {
        for _ in 0..=millis {
            self.handle.begin_iteration(self.now);
            while self.tasks.step(&mut self.random) {}
            self.now = self.now + Nanos::from_millis(u64::from(millis > 0));
        }
    }

    fn put(&self, index: u64) -> Result<PutOutcome, EngineError> {
        let key = key_of(index);
        let value = value_of(&key, index, 100);
        block_on(self.engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100), || ())
    }

    fn put_all(&self, indexes: std::ops::Range<u64>) {
        indexes.for_each(|index| assert_eq!(self.put(index % 40), Ok(PutOutcome::Stored)));
    }

    fn batches(&self) -> u64 {
        self.engine.statistics().journal_batches
    }
}

#[test]
fn each_generation_of_superblocks_has_two_slots_of_its_own() {
    let (engine, trace, _) = traced_volume(Durability::PowerSafe, 4 << 20);
    let superblock_writes = || {
        let writes = trace.writes.take();
        writes.into_iter().filter(|(lba, _)| *lba < 32).collect::<Vec<_>>()
    };
    // Format writes generation 0 and opening generation 1; the checkpoints write 2 and 3.
    block_on(engine.checkpoint(false), || ()).unwrap();
    assert_eq!(superblock_writes(), [(0, 4096), (16, 4096)]);
    block_on(engine.checkpoint(false), || ()).unwrap();
    assert_eq!(superblock_writes(), [(8, 4096), (24, 4096)]);
}

#[test]
fn format_and_opening_leave_an_intact_superblock_in_every_slot() {
    let memory = RamDisk::new(4 << 20, BLOCK_BYTES as u32).unwrap();
    let traced = TracingMemory { memory: MemoryDevice::new(memory), trace: Rc::default() };
    let device: Rc<dyn Device> = Rc::new(traced);
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = BLOCK_BYTES as u32;
    let generation = |slot: u64| {
        let read = device.read(Lba(slot * 8), Buffer::zeroed(SUPERBLOCK_BYTES));
        let bytes = block_on(read, || ()).into_read().unwrap();
        UncheckedSuperblock(bytes[..].try_into().unwrap()).check().ok().map(|found| found.generation)
    };
    block_on(fixture.format(Rc::clone(&device)), || ());
    assert_eq!([0, 1, 2, 3].map(generation), [Some(0), None, Some(0), None]);
    drop(block_on(fixture.open(Rc::clone(&device)), || ()).unwrap());
    assert_eq!([0, 1, 2, 3].map(generation), [Some(0), Some(1), Some(0), Some(1)]);
}

#[test]
fn maintenance_writes_one_marker_20_ms_after_a_change_and_nothing_when_idle() {
    let mut volume = MaintainedVolume::new(Durability::PowerSafe);
    volume.advance_ms(100);
    assert_eq!(volume.batches(), 0, "nothing has changed");
    for round in 1..4 {
        assert_eq!(volume.put(round), Ok(PutOutcome::Stored));
        volume.advance_ms(15);
        assert_eq!(volume.batches(), 2 * round - 1, "before its time");
        volume.advance_ms(10);
        assert_eq!(volume.batches(), 2 * round, "the change and its marker");
        volume.advance_ms(200);
        assert_eq!(volume.batches(), 2 * round, "idle again");
    }
    assert_eq!(volume.engine.statistics().checkpoints, 0);
    assert!(volume.reports.borrow().is_empty());
}

#[test]
fn maintenance_flushes_what_was_acknowledged_without_a_flush() {
    let mut volume = MaintainedVolume::new(Durability::Completed);
    volume.put_all(0..10);
    assert_eq!(volume.trace.flushes.get(), 0);
    volume.advance_ms(30);
    assert_eq!((volume.trace.flushes.get(), volume.batches()), (1, 11));
    volume.advance_ms(200);
    assert_eq!((volume.trace.flushes.get(), volume.batches()), (1, 11), "idle again");
}

#[test]
fn maintenance_writes_a_checkpoint_when_half_of_the_journal_is_in_use_and_not_before() {
    let mut volume = MaintainedVolume::new(Durability::PowerSafe);
    // The ring has 8 batches of 62 units; each put takes one unit.
    volume.put_all(0..200);
    volume.advance_ms(100);
    assert_eq!(volume.engine.statistics().checkpoints, 0);
    volume.put_all(200..260);
    volume.advance_ms(100);
    assert_eq!(volume.engine.statistics().checkpoints, 1);
    volume.put_all(0..10);
    volume.advance_ms(100);
    assert_eq!(volume.engine.statistics().checkpoints, 1);
}

#[test]
fn a_failed_checkpoint_is_reported_and_retried_a_second_later() {
    let mut volume = MaintainedVolume::new(Durability::PowerSafe);
    volume.put_all(0..260);
    // The areas lie behind the superblocks and both copies of the journal.
    let areas = Lba(32 + 2 * 8 * 62);
    let fault = FaultRule::within(OpFilter::Write, areas, Lba(areas.0 + 64), InjectedFault::Error(5));
    volume.plan.add(fault.once(0));
    volume.advance_ms(100);
    assert_eq!(*volume.reports.borrow(), [EngineError::Device(DeviceError::Io(5))]);
    assert_eq!(volume.engine.statistics().checkpoints, 0);
    volume.put_all(0..1);
    volume.advance_ms(900);
    assert_eq!(volume.engine.statistics().checkpoints, 0);
    volume.advance_ms(200);
    assert_eq!((volume.engine.statistics().checkpoints, volume.reports.borrow().len()), (1, 1));
}

#[test]
fn maintenance_ends_when_a_journal_write_has_failed() {
    // Asleep until there are changes, and asleep until its delay is over.
    for waits_for_delay in [false, true] {
        let mut volume = MaintainedVolume::new(Durability::PowerSafe);
        if waits_for_delay {
            volume.put_all(0..1);
            volume.advance_ms(1);
        }
        volume.plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
        assert!(volume.put(1).is_err());
        volume.advance_ms(30);
        assert!(volume.tasks.is_empty(), "it waits for changes that cannot come");
        assert!(volume.reports.borrow().is_empty(), "{:?}", volume.reports.borrow());
    }
}

fn poll_once<T>(future: &mut Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

#[test]
fn records_of_up_to_128_kib_are_written_beside_their_batch_and_longer_ones_delay_no_other_put() {
    let (long, short) = (Key::new(b"long").unwrap(), Key::new(b"short").unwrap());
    let limit = (128 << 10) - value_offset(long.len());
    for (value_bytes, is_concurrent) in [(limit, true), (limit + 1, false)] {
        let (engine, trace, _) = traced_volume(Durability::PowerSafe, 16 << 20);
        trace.held_from_bytes.set(128 << 10);
        let value = value_of(&long, 1, value_bytes);
        let mut long_put = pin!(engine.put(&long, PutMode::Upsert, record_of(&long, &value), value_bytes));
        assert!(poll_once(&mut long_put).is_none(), "its record is held");
        let journal_writes = trace.writes.borrow().iter().filter(|(_, bytes)| *bytes < 64 << 10).count();
        assert_eq!(journal_writes, if is_concurrent { 2 } else { 0 }, "{value_bytes} bytes");
        let value = value_of(&short, 2, 100);
        let mut short_put = pin!(engine.put(&short, PutMode::Upsert, record_of(&short, &value), 100));
        assert_eq!(poll_once(&mut short_put).is_some(), !is_concurrent, "{value_bytes} bytes");
        trace.held_from_bytes.set(0);
        assert_eq!(poll_once(&mut long_put), Some(Ok(PutOutcome::Stored)));
    }
}
