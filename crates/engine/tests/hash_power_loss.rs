//! The hash engine under power loss at every write and flush, and under bit flips and misdirected writes.

use crate::common::unwritten::AllUnwritten;
use crate::common::{HashFixture, pool};
use octokv_base::{Key, Lba, Prng};
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{
    FaultDevice, FaultPlan, FaultRule, InjectedFault as DeviceFault, OpFilter,
};
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_engine::common::superblock_io::{check_slots, newest};
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, random_length, record_of, value_of};
use octokv_engine::hash::superblock::HashSuperblock;
use octokv_engine::hash::{HashEngine, HashVolume};
use octokv_engine::volume_suite::{self, CallTrace, KEYS, VolumeSuite};
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

const DISK_BYTES: usize = 1 << 20;

fn fixture() -> HashFixture {
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(512);
    fixture.format.value_bytes_max = 64 << 10;
    fixture
}

fn open(image: impl Into<DiskImage>) -> Result<(PowerLossDisk, HashEngine), String> {
    let disk = PowerLossDisk::new(image, 512);
    let mut random = Prng::new(1);
    let engine = block_on(fixture().open(Rc::new(disk.clone())), || {
        disk.complete_one(&mut random);
    })?;
    Ok((disk, engine))
}

/// With versions.
fn versioned_suite() -> VolumeSuite<Arc<HashVolume>> {
    let mut suite = suite();
    suite.has_versions = true;
    suite
}

fn suite() -> VolumeSuite<Arc<HashVolume>> {
    let fixture = fixture();
    let mut suite = VolumeSuite::new(fixture.format, fixture.open_config(), vec![DISK_BYTES], 512);
    suite.background =
        |engine: Rc<HashEngine>| Box::pin(async move { engine.checkpoint(false).await.expect("no fault") });
    // As maintenance does when idle: recovery then distinguishes corruption from torn writes.
    suite.settle =
        |engine: Rc<HashEngine>| Box::pin(async move { engine.mark_durable().await.expect("marks") });
    suite
}

/// A run whose last superblock tells that checkpoints were written while it ran.
fn run_traced(seed: u64, operations: u64) -> (PowerLossDisk, CallTrace) {
    let (mut disks, trace) = suite().run_traced(seed, operations);
    let superblock = superblock_of(&disks[0].image());
    assert!(operations < 300 || superblock.checkpoint.id & 0xff_ffff > 1, "{:?}", superblock.checkpoint);
    (disks.remove(0), trace)
}

/// The value of each key, or its error.
fn read_all(disk: &PowerLossDisk, engine: &HashEngine) -> BTreeMap<Key, Result<Option<u64>, EngineError>> {
    (0..KEYS).map(key_of).zip(volume_suite::read_all(disk, engine)).collect()
}

fn assert_durability(
    disk: &PowerLossDisk,
    engine: &HashEngine,
    trace: &CallTrace,
    events: usize,
    context: &str,
) {
    volume_suite::assert_durability(&volume_suite::read_all(disk, engine), trace, events, context);
}

#[test]
fn acknowledged_writes_survive_power_loss_at_every_write_and_flush() {
    let (disk, trace) = run_traced(7, 2_000);
    assert!(disk.events() > 6_000, "{} events", disk.events());
    suite().lose_power_at_events(&[disk], &trace, 1);
}

/// Beside the operations, on a disk that reports every block as never written.
fn preparing_suite() -> VolumeSuite<Arc<HashVolume>> {
    let mut suite = suite();
    suite.format.value_bytes_max = 8 << 10;
    suite.open.prepare_bytes = 64 << 10;
    suite.view = |disk| Rc::new(AllUnwritten(Rc::new(disk)));
    suite.background = |engine: Rc<HashEngine>| {
        Box::pin(async move {
            for _ in 0..6 {
                for _ in 0..8 {
                    engine.prepare_next().await.expect("no fault");
                }
            }
            engine.checkpoint(false).await.expect("no fault");
            while engine.prepare_next().await.expect("no fault") {}
        })
    };
    suite
}

#[test]
fn acknowledged_writes_survive_power_loss_at_every_write_and_flush_of_a_volume_that_is_prepared() {
    let (disks, trace) = preparing_suite().run_traced(12, 800);
    preparing_suite().lose_power_at_events(&disks, &trace, 1);
}

#[test]
fn acknowledged_writes_survive_a_second_power_loss_of_a_volume_that_is_prepared() {
    let (disks, trace) = preparing_suite().run_traced(13, 300);
    preparing_suite().lose_power_twice(&disks, &trace, 11);
}

/// The suite that judges mutants: short enough for hundreds of runs.
#[test]
fn acknowledged_writes_survive_power_loss_at_sampled_events() {
    let (disk, trace) = run_traced(9, 700);
    assert!(disk.events() > 2_000, "{} events", disk.events());
    suite().lose_power_at_events(&[disk], &trace, 5);
}

#[test]
fn acknowledged_writes_to_a_volume_of_format_1_survive_power_loss() {
    let mut of_format_1 = suite();
    of_format_1.format.version = 1;
    let (disks, trace) = of_format_1.run_traced(13, 700);
    of_format_1.lose_power_at_events(&disks, &trace, 3);
}

#[test]
fn acknowledged_writes_with_versions_and_tombstones_survive_power_loss_at_every_write_and_flush() {
    let (disks, trace) = versioned_suite().run_traced(11, 1_000);
    assert!(disks[0].events() > 3_000, "{} events", disks[0].events());
    versioned_suite().lose_power_at_events(&disks, &trace, 1);
    let (disks, trace) = versioned_suite().run_traced(12, 300);
    versioned_suite().lose_power_twice(&disks, &trace, 7);
}

#[test]
fn acknowledged_writes_survive_a_second_power_loss_during_recovery() {
    let (disk, trace) = run_traced(8, 400);
    suite().lose_power_twice(&[disk], &trace, 7);
}

fn superblock_of(image: &DiskImage) -> HashSuperblock {
    let mut front = [0; SUPERBLOCK_AREA_BYTES as usize];
    image.read(0, &mut front);
    newest(&check_slots(&front).collect::<Vec<_>>()).expect("a volume")
}

/// The bytes of a copy of the journal in an image.
fn journal_range(image: &DiskImage, copy: u64) -> std::ops::Range<usize> {
    let superblock = superblock_of(image);
    let unit = superblock.layout.unit_bytes as usize;
    let first = superblock.layout.journal_start_unit(copy) as usize * unit;
    first..first + superblock.layout.journal_units as usize * unit
}

#[test]
fn one_journal_copy_suffices_after_power_loss_and_more_writes() {
    let (disk, trace) = run_traced(10, 290);
    let (mut history, mut random) = (DiskHistory::of(&disk), Prng::new(6));
    for events in (0..=disk.events()).step_by(5) {
        history.advance(events);
        for mode in PowerLossMode::ALL {
            let context = format!("power loss at {events}, {mode:?}");
            let (recovered, engine) = open(history.image(mode, &mut random)).expect("opens");
            // New batches mark the recovered ones as durable.
            for operation in 1..=3 {
                let key = key_of(KEYS + operation);
                let value = value_of(&key, operation, 100);
                let put =
                    engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100);
                let stored = block_on(put, || {
                    recovered.complete_one(&mut random);
                });
                assert_eq!(stored, Ok(PutOutcome::Stored), "{context}");
            }
            for copy in 0..2 {
                let mut image = recovered.image();
                let journal = journal_range(&image, copy);
                image.write(journal.start, &vec![0; journal.len()]);
                let context = format!("{context}, without copy {copy}");
                let (after, engine) = open(image).unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_durability(&after, &engine, &trace, events, &context);
            }
        }
    }
}

fn flip_bit(image: &mut DiskImage, at: usize, bit: u64) {
    let mut byte = [0];
    image.read(at, &mut byte);
    image.write(at, &[byte[0] ^ 1 << bit]);
}

#[test]
fn a_flipped_bit_in_any_block_never_returns_wrong_data_and_affects_one_key() {
    let (disk, _) = run_traced(9, 300);
    let affected = suite().flip_a_bit_in_every_block(&[disk.image()]);
    assert!(affected > 20, "only {affected} blocks held anything");
}

/// A shared device, so that a fault plan can wrap a disk that the test also holds.
struct SharedDevice(Rc<dyn Device>);

impl Device for SharedDevice {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn read(&self, at: Lba, buffer: octokv_base::Buffer) -> DeviceFuture {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: octokv_base::Buffer) -> DeviceFuture {
        self.0.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.0.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.0.trim(at, blocks)
    }
}

/// Stores values on a faulty disk. Gives its image and the last acknowledged operation of each key.
fn store_with_faults(
    plan: &FaultPlan,
    image: Vec<u8>,
    random: &mut Prng,
) -> (Vec<u8>, BTreeMap<Key, Option<u64>>) {
    let disk = PowerLossDisk::new(image, 512);
    let device: Rc<dyn Device> =
        Rc::new(FaultDevice::new(Rc::new(SharedDevice(Rc::new(disk.clone()))), plan.clone()));
    let mut disk_random = random.fork();
    let mut complete_io = || {
        disk.complete_one(&mut disk_random);
    };
    let engine = block_on(fixture().open(device), &mut complete_io).expect("opens");
    let mut stored = BTreeMap::new();
    for operation in 1..=60 {
        let key = key_of(random.below(KEYS));
        let length = random_length(random, 3_000);
        let value = value_of(&key, operation, length);
        let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), length);
        if block_on(put, &mut complete_io) == Ok(PutOutcome::Stored) {
            stored.insert(key, Some(operation));
        }
    }
    block_on(engine.mark_durable(), &mut complete_io).expect("marks");
    (disk.contents(), stored)
}

#[test]
fn a_misdirected_or_lost_write_never_returns_wrong_data() {
    let mut random = Prng::new(10);
    let fresh = PowerLossDisk::new(vec![0; DISK_BYTES], 512);
    let mut disk_random = random.fork();
    block_on(fixture().format(Rc::new(fresh.clone())), || {
        fresh.complete_one(&mut disk_random);
    });
    let (fresh, mut affected) = (fresh.contents(), 0);
    for faulty_write in 4..184 {
        let to = Lba(random.below((DISK_BYTES / 512 - 12) as u64));
        let fault = if faulty_write % 3 == 0 { DeviceFault::Lost } else { DeviceFault::Misdirected { to } };
        let plan = FaultPlan::default();
        plan.add(FaultRule::always(OpFilter::Write, fault).once(faulty_write));
        let (image, stored) = store_with_faults(&plan, fresh.clone(), &mut random);
        let (disk, engine) =
            open(image).unwrap_or_else(|error| panic!("write {faulty_write} {fault:?}: {error}"));
        let found = read_all(&disk, &engine);
        let mut faults = 0;
        for (key, read) in &found {
            match read {
                Ok(found) => {
                    let want = stored.get(key).copied().flatten();
                    assert_eq!(*found, want, "write {faulty_write} {fault:?}: {key}");
                }
                Err(EngineError::Corrupt { .. }) => faults += 1,
                Err(other) => panic!("write {faulty_write} {fault:?}: {key}: {other}"),
            }
        }
        // The record itself, and those that the misdirected blocks overwrote.
        assert!(faults <= 8, "write {faulty_write} {fault:?} affected {faults} keys");
        affected += faults;
    }
    assert!(affected > 10, "the faults reached only {affected} keys");
}

#[test]
fn a_failed_write_is_reported_and_the_value_before_stays() {
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(4 << 20, 512).unwrap()));
    let plan = FaultPlan::default();
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
    let engine = block_on(fixture().open(device), || ()).expect("opens");
    let key = Key::new(b"key").unwrap();
    let put = |operation| {
        let value = value_of(&key, operation, 100);
        block_on(
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100),
            || (),
        )
    };
    assert_eq!(put(1), Ok(PutOutcome::Stored));
    let used = engine.statistics().used_bytes;
    for fault in [DeviceFault::Error(5), DeviceFault::NoSpace] {
        plan.add(FaultRule::always(OpFilter::Write, fault));
        assert!(matches!(put(2), Err(EngineError::Device { .. })));
        plan.clear();
    }
    let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
    assert_eq!(operation_of(&key, found.as_bytes()), 1);
    assert_eq!(engine.statistics().used_bytes, used);
    // More failures than the device has units: each releases its space.
    plan.add(FaultRule::always(OpFilter::Write, DeviceFault::Error(5)));
    for _ in 0..10_000 {
        assert!(matches!(put(2), Err(EngineError::Device { .. })));
    }
    plan.clear();
    assert_eq!(put(3), Ok(PutOutcome::Stored));
}

#[test]
fn after_a_failed_journal_write_nothing_is_acknowledged_until_the_volume_is_opened_again() {
    let (disk, _) = run_traced(11, 50);
    let (disk, plan) = (PowerLossDisk::new(disk.contents(), 512), FaultPlan::default());
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
    let mut random = Prng::new(12);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let engine = block_on(fixture().open(device), &mut complete_io).expect("opens");
    let key = key_of(1);
    let mut put = |operation| {
        let value = value_of(&key, operation, 100);
        block_on(
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100),
            &mut complete_io,
        )
    };
    assert_eq!(put(900), Ok(PutOutcome::Stored));
    plan.add(FaultRule::always(OpFilter::Flush, DeviceFault::Error(5)).once(0));
    assert!(matches!(put(901), Err(EngineError::Device { .. })));
    assert_eq!(put(902), Err(EngineError::ReadOnly));
    let read = block_on(engine.get(&key), &mut complete_io).unwrap().unwrap();
    assert_eq!(operation_of(&key, read.as_bytes()), 900);
    let (disk, engine) = open(disk.contents()).expect("opens");
    let found = read_all(&disk, &engine)[&key];
    assert!(matches!(found, Ok(Some(900 | 901))), "{found:?}");
}

#[test]
fn a_block_that_cannot_be_read_costs_at_most_one_key() {
    let (disk, _) = run_traced(13, 300);
    let image = disk.image();
    let (reference_disk, engine) = open(image.clone()).expect("opens");
    let good = read_all(&reference_disk, &engine);
    let mut named = 0;
    for block in 0..image.len() as u64 / 512 {
        let (disk, plan) = (PowerLossDisk::new(image.clone(), 512), FaultPlan::default());
        plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), DeviceFault::Error(5)));
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan));
        let mut random = Prng::new(1);
        let opened = block_on(fixture().open(device), || {
            disk.complete_one(&mut random);
        });
        let engine = opened.unwrap_or_else(|error| panic!("block {block}: {error}"));
        let found = read_all(&disk, &engine);
        let faults: Vec<&Key> =
            found.iter().filter(|(key, read)| *read != &good[*key]).map(|(key, _)| key).collect();
        assert!(faults.len() <= 1, "block {block} affected {faults:?}");
        for key in faults {
            assert!(matches!(found[key], Err(EngineError::Device { .. })), "block {block}: {:?}", found[key]);
            named += 1;
        }
    }
    assert!(named > 20, "only {named} blocks held anything");
}

#[test]
fn a_failed_checkpoint_is_retried_and_a_failed_flush_makes_the_volume_read_only() {
    let (disk, _) = run_traced(14, 300);
    let (disk, plan) = (PowerLossDisk::new(disk.contents(), 512), FaultPlan::default());
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
    let mut random = Prng::new(15);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let engine = block_on(fixture().open(device), &mut complete_io).expect("opens");
    // One write of a checkpoint fails: the areas are between the journal's copies and the records.
    let areas = 16384 / 512 + 2 * 512;
    plan.add(FaultRule::within(OpFilter::Write, Lba(areas), Lba(areas + 100), DeviceFault::Error(5)).once(0));
    for operation in 1..1_200 {
        let key = key_of(operation % KEYS);
        let value = value_of(&key, operation, 100);
        let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100);
        assert_eq!(block_on(put, &mut complete_io), Ok(PutOutcome::Stored), "operation {operation}");
    }
    assert!(engine.statistics().checkpoints > 0);
    plan.add(FaultRule::always(OpFilter::Flush, DeviceFault::Error(5)).once(0));
    assert!(matches!(block_on(engine.flush(), &mut complete_io), Err(EngineError::Device { .. })));
    let key = key_of(1);
    let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, b"a value"), 7);
    assert_eq!(block_on(put, &mut complete_io), Err(EngineError::ReadOnly));
}

#[test]
fn damage_to_any_image_of_a_large_checkpoint_is_repaired_from_its_copy() {
    let disk = PowerLossDisk::new(vec![0; 64 << 20], 512);
    let mut random = Prng::new(16);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture().format(Rc::new(disk.clone())), &mut complete_io);
    let mut hash = fixture();
    hash.durability = octokv_engine::Durability::Completed;
    let engine = block_on(hash.open(Rc::new(disk.clone())), &mut complete_io).expect("opens");
    for index in 0..70_000_u64 {
        let key = Key::new(&index.to_le_bytes()).unwrap();
        let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, b"a value"), 7);
        assert_eq!(block_on(put, &mut complete_io), Ok(PutOutcome::Stored));
    }
    block_on(engine.checkpoint(true), &mut complete_io).expect("writes");
    let image = disk.image();
    let bytes = image.to_vec();
    let images: Vec<usize> = (0..bytes.len() - 4).filter(|&at| &bytes[at..at + 4] == b"OKVC").collect();
    assert!(images.len() >= 64, "{} images", images.len());
    // Each image, also those that span the end of a read window.
    for &at in &images {
        let mut damaged = image.clone();
        flip_bit(&mut damaged, at, 0);
        let (_, engine) = open(damaged).unwrap_or_else(|error| panic!("image at {at}: {error}"));
        assert_eq!(engine.statistics().keys, 70_000, "image at {at}");
    }
}

#[test]
fn a_checkpoint_whose_core_ends_makes_the_volume_read_only_and_loses_nothing() {
    let (disk, _) = run_traced(17, 300);
    let (disk, engine) = open(disk.contents()).expect("opens");
    let good = read_all(&disk, &engine);
    let (mut random, before) = (Prng::new(18), disk.events());
    let mut checkpoint = Box::pin(engine.checkpoint(false));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    while disk.events() < before + 3 {
        assert!(checkpoint.as_mut().poll(&mut context).is_pending());
        disk.complete_one(&mut random);
    }
    drop(checkpoint);
    // Nothing runs it any more.
    let volume = Arc::clone(engine.volume());
    drop(engine);
    let engine = HashEngine::new(volume, 1, Rc::new(disk.clone()), pool());
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let key = key_of(1);
    let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, b"a value"), 7);
    assert_eq!(block_on(put, &mut complete_io), Err(EngineError::ReadOnly));
    assert_eq!(block_on(engine.checkpoint(true), &mut complete_io), Err(EngineError::ReadOnly));
    let (disk, engine) = open(disk.contents()).expect("opens");
    assert_eq!(read_all(&disk, &engine), good);
}
