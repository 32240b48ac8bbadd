//! Compaction in virtual time: its pace, its rests, its end; and the volumes that have none.

use super::pieces_tests::{TestVolume, UNIT, format_config, open_config, scattered};
use super::{HashEngine, format, open};
use crate::bug_injection::{InjectedBug, inject};
use crate::conformance::{TaskSet, key_of, record_of, value_of};
use crate::{CompactionStatistics, DeleteOutcome, Durability, Engine, PutMode, PutOutcome};
use octokv_base::{BufferPool, Nanos, Prng};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::rc::Rc;

/// The maintenance of a volume, in virtual time. Its disk takes none.
struct Maintained {
    engine: Rc<HashEngine>,
    disk: PowerLossDisk,
    handle: ReactorHandle,
    tasks: TaskSet,
    random: Prng,
    now: Nanos,
}

impl Maintained {
    fn new(bytes_per_second: u64) -> Maintained {
        Maintained::of(16 << 20, bytes_per_second)
    }

    fn of(disk_bytes: usize, bytes_per_second: u64) -> Maintained {
        let (disk, pool) = (PowerLossDisk::new(vec![0; disk_bytes], UNIT), BufferPool::new(64 << 20));
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut config = open_config(Durability::PowerSafe);
        config.compact_bytes_per_second = bytes_per_second;
        let (format_config, mut random) = (format_config(256 << 10), Prng::new(1));
        let volume = block_on(
            async {
                format(&*device, &format_config).await.expect("formats");
                open(&device, &pool, config, &format_config).await.expect("opens")
            },
            || {
                disk.complete_one(&mut random);
            },
        );
        let engine = Rc::new(HashEngine::new(volume, 0, device, pool));
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let queue = Box::new(sim.device_queue(sim.add_host()));
        let devices = DeviceHandle::new(queue, 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let now = Nanos::from_secs(1);
        handle.begin_iteration(now);
        let mut tasks = TaskSet::default();
        let (maintained, own) = (Rc::clone(&engine), handle.clone());
        tasks.add(async move { maintained.maintain(&own, |error| panic!("{error}")).await });
        let mut maintained = Maintained { engine, disk, handle, tasks, random, now };
        maintained.advance_ms(1);
        maintained
    }

    fn advance_ms(&mut self, millis: u64) {
        for _ in 0..millis * 10 {
            self.handle.begin_iteration(self.now);
            while self.tasks.step(&mut self.random) || self.disk.complete_one(&mut self.random) {}
            self.now = self.now + Nanos::from_micros(100);
        }
    }

    fn put(&mut self, index: u64, bytes: usize) {
        assert_eq!(self.try_put(index, bytes), PutOutcome::Stored);
    }

    fn try_put(&mut self, index: u64, bytes: usize) -> PutOutcome {
        let key = key_of(index);
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, index, bytes));
        let stored = block_on(self.engine.put(&key, PutMode::Upsert, record, bytes), || {
            self.disk.complete_one(&mut self.random);
        });
        stored.expect("no fault")
    }

    fn joined(&self) -> u64 {
        self.engine.statistics().compaction.joined_values
    }
}

#[test]
fn compaction_keeps_to_its_pace_and_rests_when_nothing_is_in_pieces() {
    const RATE: u64 = 2 << 20;
    let mut volume = Maintained::new(RATE);
    scattered(|| (0..40).for_each(|index| volume.put(index, 100_000)));
    let mut last = 0;
    for tenths in 1..60 {
        volume.advance_ms(100);
        let CompactionStatistics { joined_values, moved_bytes, .. } = volume.engine.statistics().compaction;
        // What was read and what was written, and the value that is being joined.
        assert!(2 * moved_bytes <= RATE * tenths / 10 + 400_000, "{moved_bytes} bytes in {tenths} tenths");
        assert!(joined_values - last <= 2, "{joined_values} after {last}");
        last = joined_values;
    }
    assert_eq!((last, volume.engine.statistics().compaction.values_in_pieces), (40, 0));
    volume.advance_ms(2_000);
    let (events, timers) = (volume.disk.events(), volume.handle.next_deadline());
    volume.advance_ms(10_000);
    assert_eq!((volume.disk.events(), timers), (events, Nanos(u64::MAX)), "idle");
    // A put of a value in pieces is enough to go on.
    scattered(|| volume.put(50, 100_000));
    volume.advance_ms(500);
    assert_eq!(volume.joined(), 41);
}

#[test]
fn a_pass_that_gains_nothing_is_repeated_more_and_more_rarely() {
    let mut volume = Maintained::new(1 << 30);
    inject(Some(InjectedBug::ForgetPiece));
    volume.put(1, 100_000);
    inject(None);
    let mut reads = Vec::new();
    for _ in 0..8 {
        let before = volume.engine.volume().compaction.steps();
        for index in 0..100 {
            volume.put(2 + index % 2, 100);
            volume.advance_ms(40);
        }
        reads.push(volume.engine.volume().compaction.steps() - before);
    }
    assert_eq!(volume.joined(), 0);
    assert!((3..12).contains(&reads[0]), "{reads:?}");
    assert!(reads[4..].iter().sum::<u64>() <= 2, "{reads:?}");
}

#[test]
fn puts_take_the_window_of_a_compaction_that_pauses() {
    let mut volume = Maintained::of(2 << 20, 16 << 10);
    let count = (0..).find(|&index| volume.try_put(index, 4_000) == PutOutcome::Full).expect("a full volume");
    for index in (0..count).step_by(2) {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || {
            volume.disk.complete_one(&mut volume.random);
        });
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted));
    }
    volume.put(9_000, 30_000);
    let (engine, units) = (Rc::clone(&volume.engine), u64::from(UNIT));
    let held_window = || engine.volume().compaction.held.lock().is_some();
    (0..200).take_while(|_| !held_window()).for_each(|_| volume.advance_ms(10));
    assert!(held_window(), "a window is being emptied");
    // Maintenance does not run meanwhile.
    let stored = (10_000..).take_while(|&index| volume.try_put(index, 300) == PutOutcome::Stored).count();
    assert!(!held_window(), "{stored} puts took it");
    let statistics = volume.engine.statistics();
    let left = (statistics.capacity_bytes - statistics.used_bytes) / units;
    assert!(left < 40, "{left} units are free, besides those for tombstones");
}

#[test]
fn compaction_that_is_off_or_over_does_nothing() {
    let mut volume = Maintained::new(0);
    scattered(|| volume.put(1, 100_000));
    volume.advance_ms(5_000);
    assert_eq!(volume.joined(), 0);
    let mut volume = Maintained::new(1 << 20);
    scattered(|| (0..20).for_each(|index| volume.put(index, 100_000)));
    volume.advance_ms(300);
    let before = volume.joined();
    assert!((1..5).contains(&before), "{before} values");
    let engine = Rc::clone(&volume.engine);
    volume.tasks.add(async move { engine.close().await.expect("no fault") });
    volume.advance_ms(10_000);
    assert!(volume.joined() <= before + 1, "{} values", volume.joined());
    assert!(volume.engine.volume().is_idle());
    assert_eq!(block_on(volume.engine.compact(), || ()), Ok(false));
    assert_eq!(volume.handle.next_deadline(), Nanos(u64::MAX), "no timer is left");
}

#[test]
fn a_volume_in_memory_and_one_of_format_1_have_nothing_to_compact() {
    let pool = BufferPool::new(8 << 20);
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, UNIT).unwrap()));
    let mut config = open_config(Durability::PowerSafe);
    config.compact_bytes_per_second = 1 << 30;
    let volume = block_on(open(&memory, &pool, config, &format_config(64 << 10)), || ()).expect("opens");
    let engine = HashEngine::new(volume, 0, memory, pool);
    let record = record_of(engine.record_layout(), &key_of(1), &value_of(&key_of(1), 1, 20_000));
    let stored = scattered(|| block_on(engine.put(&key_of(1), PutMode::Upsert, record, 20_000), || ()));
    assert_eq!((stored, engine.statistics().compaction.values_in_pieces), (Ok(PutOutcome::Stored), 0));
    assert_eq!(block_on(engine.compact(), || ()), Ok(false));
    let (disk, mut config) = (PowerLossDisk::new(vec![0; 1 << 20], UNIT), format_config(64 << 10));
    config.version = 1;
    block_on(format(&disk, &config), || {
        disk.complete_one(&mut Prng::new(1));
    })
    .expect("formats");
    let volume = TestVolume::open(disk.image(), config, Durability::PowerSafe);
    scattered(|| assert_eq!(volume.put(1, 1, 20_000), PutOutcome::Stored));
    assert!(!volume.compact());
    assert_eq!(volume.statistics().compaction, CompactionStatistics::default());
}
