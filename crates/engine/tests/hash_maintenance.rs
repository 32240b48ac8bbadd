//! Where superblocks are written, and what maintenance does and when.

use crate::common::traced_memory::{BLOCK_BYTES, DeviceTrace, TracedVolume, TracingMemory};
use crate::common::{HashFixture, volatile_engine};
use octokv_base::{Buffer, Lba, Nanos, Prng};
use octokv_device::fault_injection::{FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::{Device, DeviceError, MemoryDevice, RamDisk};
use octokv_engine::common::superblock::{SUPERBLOCK_BYTES, UncheckedSuperblock};
use octokv_engine::conformance::{EngineFixture, TaskSet, key_of, record_of, value_of};
use octokv_engine::hash::HashEngine;
use octokv_engine::hash::superblock::HashSuperblock;
use octokv_engine::{Durability, Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::RefCell;
use std::rc::Rc;

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

impl MaintainedVolume {
    fn new(durability: Durability) -> MaintainedVolume {
        let TracedVolume { engine, trace, plan, .. } = TracedVolume::new(durability, 4 << 20);
        MaintainedVolume::of(engine, trace, plan)
    }

    fn of(engine: Rc<HashEngine>, trace: Rc<DeviceTrace>, plan: FaultPlan) -> MaintainedVolume {
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
        block_on(
            self.engine.put(&key, PutMode::Upsert, record_of(self.engine.record_layout(), &key, &value), 100),
            || (),
        )
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
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
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
fn format_and_each_opening_leave_an_intact_superblock_in_every_slot() {
    let memory = RamDisk::new(4 << 20, BLOCK_BYTES as u32).unwrap();
    let traced =
        TracingMemory { memory: MemoryDevice::new(memory), is_volatile: false, trace: Rc::default() };
    let device: Rc<dyn Device> = Rc::new(traced);
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(BLOCK_BYTES as u32);
    let generation = |slot: u64| {
        let read = device.read(Lba(slot * 8), Buffer::zeroed(SUPERBLOCK_BYTES));
        let bytes = block_on(read, || ()).into_read().unwrap();
        UncheckedSuperblock(bytes[..].try_into().unwrap())
            .check::<HashSuperblock>()
            .ok()
            .map(|found| (found.generation, found.incarnation))
    };
    block_on(fixture.format(Rc::clone(&device)), || ());
    assert_eq!([0, 1, 2, 3].map(generation), [Some((0, 0)), None, Some((0, 0)), None]);
    drop(block_on(fixture.open(Rc::clone(&device)), || ()).unwrap());
    assert_eq!([0, 1, 2, 3].map(generation), [(0, 0), (1, 1), (0, 0), (1, 1)].map(Some));
    drop(block_on(fixture.open(Rc::clone(&device)), || ()).unwrap());
    assert_eq!([0, 1, 2, 3].map(generation), [(2, 2), (1, 1), (2, 2), (1, 1)].map(Some));
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
        assert_eq!(volume.trace.flushes.get(), 2 * round, "one flush for each");
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
    // With the marker exactly half of the ring, and one more.
    volume.put_all(200..247);
    volume.advance_ms(100);
    assert_eq!((volume.batches(), volume.engine.statistics().checkpoints), (249, 0));
    volume.put_all(247..248);
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
    assert_eq!(*volume.reports.borrow(), [EngineError::from(DeviceError::Io(5))]);
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

#[test]
fn maintenance_of_a_volatile_device_ends_at_once() {
    let engine = Rc::new(volatile_engine(4 << 20, BLOCK_BYTES as u32));
    assert!(MaintainedVolume::of(engine, Rc::default(), FaultPlan::default()).tasks.is_empty());
}
