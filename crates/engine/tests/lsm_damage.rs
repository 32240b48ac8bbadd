//! The ordered engine on damaged media: a flipped bit or an unreadable block anywhere costs at most the keys in it, and never gives a value that is wrong or older.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::lsm_faults::AllPairs;
use octokv_base::{Buffer, Lba, Prng};
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, DeviceFuture, Geometry};
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::volume_suite::{FoundValues, KEYS, VolumeSuite};
use octokv_engine::{
    DeleteOutcome, Engine, EngineError, IteratorOptions, IteratorProgress, PutMode, PutOutcome, VerifyReport,
    Volume,
};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

const BLOCK_BYTES: usize = 512;

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    BitFlipped,
    /// The medium has lost the block: a read fails with ENODATA.
    Unreadable,
}

/// A volume that is opened on a copy of an image.
struct Opened {
    disk: PowerLossDisk,
    device: Rc<dyn Device>,
    engine: LsmEngine,
}

fn fixture() -> LsmFixture {
    let mut fixture = LsmFixture { cores: 3, ..LsmFixture::default() };
    fixture.format.value_bytes_max = 64 << 10;
    fixture
}

/// An image with tables in several levels, segments, full memtables and a journal.
fn image(seed: u64) -> DiskImage {
    let fixture = fixture();
    let mut suite: VolumeSuite<Arc<LsmVolume>> =
        VolumeSuite::new(fixture.format, fixture.open_config(), vec![8 << 20], BLOCK_BYTES as u32);
    suite.background = |engine: Rc<LsmEngine>| {
        Box::pin(async move {
            engine.flush_memtables().await.expect("no fault");
            engine.compact_once(true).await.expect("no fault");
            engine.checkpoint().await.expect("no fault");
        })
    };
    suite.settle =
        |engine: Rc<LsmEngine>| Box::pin(async move { engine.mark_durable().await.expect("marks") });
    suite.run_traced(seed, 260).0[0].image()
}

fn damaged_device(image: &DiskImage, block: u64, damage: Damage) -> (PowerLossDisk, Rc<dyn Device>) {
    let mut image = image.clone();
    let plan = FaultPlan::default();
    match damage {
        Damage::BitFlipped => {
            let at = block as usize * BLOCK_BYTES + (block as usize * 37) % BLOCK_BYTES;
            let mut byte = [0];
            image.read(at, &mut byte);
            image.write(at, &[byte[0] ^ 1 << (block % 8)]);
        }
        Damage::Unreadable => {
            plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), InjectedFault::Error(61)))
        }
    }
    let disk = PowerLossDisk::new(image, BLOCK_BYTES as u32);
    let faults = FaultDevice::new(Rc::new(disk.clone()), plan.clone());
    let device: Rc<dyn Device> = Rc::new(RemappingDevice { faults, plan, block });
    (disk, device)
}

/// A device with an unreadable block, which is readable again once it is written, as a drive has another place for it then.
struct RemappingDevice {
    faults: FaultDevice,
    plan: FaultPlan,
    block: u64,
}

impl Device for RemappingDevice {
    fn geometry(&self) -> Geometry {
        self.faults.geometry()
    }
    fn name(&self) -> &str {
        self.faults.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.faults.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if (at.0..at.0 + (buffer.len() / BLOCK_BYTES) as u64).contains(&self.block) {
            self.plan.clear();
        }
        self.faults.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.faults.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.faults.trim(at, blocks)
    }
}

fn open((disk, device): (PowerLossDisk, Rc<dyn Device>), context: &str) -> Opened {
    let (mut random, fixture) = (Prng::new(1), fixture());
    let config = fixture.open_config();
    let opened = block_on(open_with(&device, &pool(), config, &fixture.format, make_small), || {
        disk.complete_one(&mut random);
    });
    let volume = opened.unwrap_or_else(|error| panic!("{context}: {error}"));
    let engine = LsmEngine::new(volume, 0, Rc::clone(&device), pool());
    Opened { disk, device, engine }
}

impl Opened {
    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut random = Prng::new(2);
        block_on(future, || {
            self.disk.complete_one(&mut random);
        })
    }

    fn read_all(&self) -> FoundValues {
        let read = |index| {
            let key = key_of(index);
            let found = self.run(self.engine.get(&key));
            found.map(|value| value.map(|value| operation_of(&key, value.as_bytes())))
        };
        (0..KEYS).map(read).collect()
    }

    /// Each key has what it had, or an error. Gives the keys with errors.
    fn check(&self, good: &FoundValues, context: &str) -> Vec<u64> {
        let mut lost = Vec::new();
        for ((index, found), good) in (0..).zip(self.read_all()).zip(good) {
            match found {
                // Of a record, the device's error: its value may lie behind a device that works again.
                Err(EngineError::Corrupt { .. } | EngineError::Device { .. }) => lost.push(index),
                found => assert_eq!(&found, good, "{context}: {}", key_of(index)),
            }
        }
        lost
    }

    /// What an iterator yields is there, and what it leaves out is lost: it says so, and ends, whichever cores it is advanced on.
    fn check_iterator(&self, engines: &[&LsmEngine], good: &FoundValues, reverse: bool, context: &str) {
        let options = IteratorOptions { reverse, ..IteratorOptions::default() };
        let iterator = self.run(self.engine.create_iterator(options)).unwrap().unwrap();
        let (mut sink, mut errors) = (AllPairs::default(), 0);
        for call in 0.. {
            match self.run(engines[call % engines.len()].next_pairs(&iterator, &mut sink)) {
                Ok(IteratorProgress::AtEnd) => break,
                Ok(IteratorProgress::HasNext) => {}
                Err(EngineError::Corrupt { .. } | EngineError::Device { .. }) => errors += 1,
                Err(error) => panic!("{context}: {error}"),
            }
            assert!(call < 200, "{context}: an iterator on {} cores does not get on", engines.len());
        }
        let mut missing = 0;
        for (index, good) in (0..).zip(good) {
            match (sink.pairs.get(&key_of(index)), good) {
                (None, Ok(Some(_))) => missing += 1,
                (found, good) => assert_eq!(Ok(found.copied()), *good, "{context}: {}", key_of(index)),
            }
        }
        assert!(missing == 0 || errors > 0, "{context}: {missing} pairs are left out silently");
    }

    fn verify(&self) -> VerifyReport {
        let devices = [Rc::clone(&self.device)];
        let report = self.run(<Arc<LsmVolume>>::verify(&devices, &pool(), &mut |_, _| ()));
        report.expect("loads")
    }

    fn used_blocks(image: &DiskImage) -> Vec<u64> {
        let mut bytes = [0; BLOCK_BYTES];
        let mut is_used = |block: &u64| {
            image.read(*block as usize * BLOCK_BYTES, &mut bytes);
            bytes.iter().any(|byte| *byte != 0)
        };
        (0..(image.len() / BLOCK_BYTES) as u64).filter(&mut is_used).collect()
    }
}

fn damage_each_block(seed: u64, damage: Damage) -> (usize, usize) {
    let image = image(seed);
    let healthy = open(damaged_device(&image, 0, Damage::Unreadable), "healthy but for a superblock");
    let good = healthy.read_all();
    assert!(good.iter().all(Result::is_ok));
    let (mut affected, mut most) = (0, 0);
    for block in Opened::used_blocks(&image) {
        let context = format!("block {block}: {damage:?}");
        let opened = open(damaged_device(&image, block, damage), &context);
        let lost = opened.check(&good, &context);
        affected += usize::from(!lost.is_empty());
        most = most.max(lost.len());
        if lost.is_empty() && block % 7 != 0 {
            continue;
        }
        let volume = opened.engine.volume();
        let others: Vec<LsmEngine> = (1..3)
            .map(|core| LsmEngine::new(Arc::clone(volume), core, Rc::clone(&opened.device), pool()))
            .collect();
        let engines = [&opened.engine, &others[0], &others[1]];
        for reverse in [false, true] {
            opened.check_iterator(&engines[..1], &good, reverse, &context);
            opened.check_iterator(&engines, &good, reverse, &context);
        }
        let report = opened.verify();
        assert!(lost.is_empty() || !report.problems.is_empty(), "{context}: check finds nothing of {lost:?}");
        // What compaction cannot read stays lost until it is written.
        let compacted = opened.run(opened.engine.compact_all());
        assert_eq!(compacted, Ok(()), "{context}");
        let still_lost = opened.check(&good, &context);
        opened.check_iterator(&engines, &good, false, &context);
        for &index in &still_lost {
            let key = key_of(index);
            if index % 2 == 0 {
                let outcome = opened.run(opened.engine.delete(&key));
                assert_eq!(outcome, Ok(DeleteOutcome::Deleted), "{context}: a lost key counts as there");
                assert!(matches!(opened.run(opened.engine.get(&key)), Ok(None)), "{context}: deleted");
            } else {
                let record = record_of(opened.engine.record_layout(), &key, &value_of(&key, 9_999, 700));
                let outcome = opened.run(opened.engine.put(&key, PutMode::Upsert, record, 700));
                assert_eq!(outcome, Ok(PutOutcome::Stored), "{context}");
            }
        }
        opened.run(opened.engine.compact_all()).unwrap_or_else(|error| panic!("{context}: {error}"));
        let found = opened.read_all();
        for &index in &still_lost {
            let want = if index % 2 == 0 { None } else { Some(9_999) };
            assert_eq!(found[index as usize], Ok(want), "{context}: {}", key_of(index));
        }
        let mut healed = good.clone();
        for &index in &still_lost {
            healed[index as usize] = Ok(if index % 2 == 0 { None } else { Some(9_999) });
        }
        assert_eq!(found, healed, "{context}");
    }
    (affected, most)
}

#[test]
fn a_flipped_bit_in_any_block_costs_at_most_the_keys_in_it() {
    let (affected, most) = damage_each_block(9, Damage::BitFlipped);
    assert!(affected > 20 && most < KEYS as usize, "{affected} blocks affected keys, one {most} of them");
}

#[test]
fn an_unreadable_block_anywhere_costs_at_most_the_keys_in_it() {
    let (affected, most) = damage_each_block(9, Damage::Unreadable);
    assert!(affected > 20 && most < KEYS as usize, "{affected} blocks affected keys, one {most} of them");
}

#[test]
fn a_block_that_the_device_fails_to_read_costs_nothing_once_it_can_be_read_again() {
    let image = image(9);
    let good = open(damaged_device(&image, 0, Damage::Unreadable), "healthy but for a superblock").read_all();
    let (mut affected, mut failed) = (0, 0);
    for block in Opened::used_blocks(&image) {
        let (context, plan) = (format!("block {block} fails"), FaultPlan::default());
        let (disk, error) = (PowerLossDisk::new(image.clone(), BLOCK_BYTES as u32), InjectedFault::Error(5));
        plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), error));
        let device = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
        let opened = open((disk, device), &context);
        let unread = opened.check(&good, &context);
        affected += usize::from(!unread.is_empty());
        if unread.is_empty() && block % 7 != 0 {
            continue;
        }
        let report = opened.verify();
        assert!(unread.is_empty() || !report.problems.is_empty(), "{context}: check names nothing");
        match opened.run(opened.engine.compact_all()) {
            Ok(()) => {}
            Err(EngineError::Device { .. }) => failed += 1,
            Err(error) => panic!("{context}: {error}"),
        }
        opened.check(&good, &context);
        plan.clear();
        for _ in 0..2 {
            assert_eq!(opened.check(&good, &context), [0; 0], "{context}: it can be read again");
            opened.run(opened.engine.compact_all()).unwrap_or_else(|error| panic!("{context}: {error}"));
        }
        let version = opened.engine.volume().version();
        assert_eq!(version.lost().as_slice(), [], "{context}");
        let units: u64 = version.extents().map(|extent| extent.units).sum();
        let used_bytes = opened.engine.statistics().used_bytes;
        assert_eq!(used_bytes, units * BLOCK_BYTES as u64, "{context}: space of what failed is free");
    }
    assert!(affected > 20 && failed > 20, "{affected} blocks affected keys, {failed} compactions");
}

#[test]
fn verification_finds_nothing_wrong_with_healthy_volumes() {
    for seed in 20..40 {
        let image = image(seed);
        let disk = PowerLossDisk::new(image, BLOCK_BYTES as u32);
        let opened = open((disk.clone(), Rc::new(disk)), "healthy");
        let report = opened.verify();
        assert_eq!((report.problems, report.damaged_copies), (Vec::new(), 0), "seed {seed}");
        let live = opened.read_all().iter().filter(|found| matches!(found, Ok(Some(_)))).count();
        assert_eq!(report.keys, live as u64, "seed {seed}");
    }
}
