//! Reads that the device fails while a volume of the log engine is maintained, in simulated time: nothing is lost, chunks that cannot be read
//! do not keep the garbage of others, and once the device reads again, they are freed.

use crate::common::log_fixture::LogFixture;
use crate::common::maintained_volume::Maintained;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba, Nanos, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::{Engine, EngineError, LogStatistics, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::rc::Rc;

const KEYS: u64 = 400;
const CHUNK_BLOCKS: u64 = 32;
/// Of which 15 chunks may be pinned.
const DISK_BYTES: u64 = 8 << 20;
/// Of which 5 may.
const SMALL_DISK_BYTES: u64 = 3 << 20;
const EIO: InjectedFault = InjectedFault::Error(5);

/// Of maintenance at once.
const COMPACTIONS: [usize; 3] = [1, 2, 4];

fn fixture() -> LogFixture {
    // Each operation reads the device.
    let mut fixture = LogFixture { cores: 1, recent_image_bytes: Some(0), ..LogFixture::default() };
    fixture.format.value_bytes_max = 8 << 10;
    fixture
}

impl Maintained<LogEngine> {
    fn new(disk_bytes: u64, compactions: usize) -> Maintained<LogEngine> {
        let (fixture, plan) =
            (LogFixture { compactions: Some(compactions), ..fixture() }, FaultPlan::default());
        let memory: Rc<dyn Device> = StableMemory::new(disk_bytes, 512);
        block_on(fixture.format(Rc::clone(&memory)), || ());
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
        let engine = open(&fixture, &device);
        Maintained::begin(engine, device, plan, KEYS)
    }

    fn log(&self) -> LogStatistics {
        self.engine.statistics().log.expect("it has logs")
    }

    /// The whole chunks among these blocks.
    fn first_chunk_block(&self) -> u64 {
        let chunks = self.log().chunks * CHUNK_BLOCKS;
        self.device.geometry().blocks - chunks
    }

    /// Writes until compaction has gone round the device several times.
    fn write_round(&mut self, rounds: u64) {
        let until = self.log().compaction_rounds + rounds * self.log().chunks;
        while self.log().compaction_rounds < until {
            self.write_for(Nanos::from_secs(1));
        }
    }

    /// Nothing was lost, and no chunk stays in use but those of the logs.
    fn check_healed(&mut self) {
        assert_eq!(self.read_all(), []);
        self.write_for(Nanos::from_secs(3));
        self.advance(Nanos::from_secs(125));
        assert_eq!(self.read_all(), []);
        let log = self.log();
        assert_eq!(
            (log.pinned_chunks, log.lost_stores, log.lost_values, log.miscounts),
            (0, 0, 0, 0),
            "{log:?}"
        );
        block_on(self.engine.compact_all(), || ()).expect("compacts");
        assert_eq!(self.read_all(), []);
    }
}

fn open(fixture: &LogFixture, device: &Rc<dyn Device>) -> LogEngine {
    let volume = block_on(fixture.open_volume(device), || ()).expect("opens");
    LogEngine::new(volume, Rc::clone(device), pool())
}

/// Opens the volume beside the engine that has it, as after a crash, and compares it with the model.
fn check_after_crash(volume: &Maintained<LogEngine>) -> LogStatistics {
    let engine = open(&fixture(), &volume.device);
    for (index, &operation) in (0..).zip(&volume.model) {
        let key = key_of(index);
        let value = block_on(engine.get(&key), || ()).expect("reads").expect("is there");
        assert_eq!(operation_of(&key, value.as_bytes()), operation, "key {index} after a crash");
    }
    engine.statistics().log.expect("it has logs")
}

#[test]
fn a_device_that_fails_all_reads_for_a_time_costs_nothing() {
    COMPACTIONS.into_iter().for_each(fail_all_reads_for_a_time);
}

fn fail_all_reads_for_a_time(compactions: usize) {
    let mut volume = Maintained::<LogEngine>::new(DISK_BYTES, compactions);
    volume.write_round(1);
    for millis in [20, 200, 2_000] {
        volume.plan.add(FaultRule::always(OpFilter::Read, EIO));
        volume.advance(Nanos::from_millis(millis));
        let errors = volume.read_all();
        assert_eq!(errors.len(), KEYS as usize);
        assert!(errors.iter().all(|(_, error)| matches!(error, EngineError::Device { .. })), "{errors:?}");
        volume.plan.clear();
        volume.check_healed();
        volume.write_round(1);
    }
    assert!(volume.take_reports().iter().all(|error| matches!(error, EngineError::Device { .. })));
}

#[test]
fn chunks_that_cannot_be_read_do_not_keep_the_garbage_of_others() {
    let mut pinned = 0;
    for (chunk, compactions) in [(5, 1), (100, 4), (177, 2), (177, 4), (320, 1)] {
        let mut volume = Maintained::<LogEngine>::new(DISK_BYTES, compactions);
        volume.write_round(1);
        assert_eq!(volume.take_reports(), []);
        let first = volume.first_chunk_block() + chunk * CHUNK_BLOCKS;
        volume.fail(first + 9..first + 10, EIO);
        // Keys whose segment lies there cannot be written; all others are, many times.
        let (mut stored, mut refused, mut random) = (0, 0, Prng::new(chunk));
        for number in 0..20_000_u64 {
            let index = random.below(KEYS);
            if number % 50 == 0 {
                volume.advance(Nanos::from_millis(50));
            }
            match volume.try_write(index) {
                Ok(outcome) => {
                    assert_eq!(outcome, PutOutcome::Stored);
                    volume.model[index as usize] = volume.operations;
                    stored += 1;
                }
                Err(EngineError::Device { .. }) => refused += 1,
                Err(error) => panic!("chunk {chunk}, write {number}: {error}"),
            }
        }
        let log = volume.log();
        assert!(stored > 19_000, "chunk {chunk}: {stored} stored, {refused} refused, {log:?}");
        pinned += log.pinned_chunks;
        let errors = volume.read_all();
        assert!(errors.iter().all(|(_, error)| matches!(error, EngineError::Device { .. })), "{errors:?}");
        if log.pinned_chunks > 0 {
            assert!(!volume.take_reports().is_empty(), "chunk {chunk}: operators are told");
        }
        volume.plan.clear();
        let after_crash = check_after_crash(&volume);
        assert_eq!(after_crash.pinned_chunks, log.pinned_chunks, "chunk {chunk}: pinned after a crash, too");
        volume.check_healed();
        check_after_crash(&volume);
    }
    assert!(pinned >= 2, "{pinned} were pinned");
}

#[test]
fn pinned_chunks_survive_crashes_and_are_emptied_by_a_later_opening() {
    COMPACTIONS.into_iter().for_each(pin_and_open_again);
}

fn pin_and_open_again(compactions: usize) {
    let mut volume = Maintained::<LogEngine>::new(SMALL_DISK_BYTES, compactions);
    volume.write_round(1);
    // Of a third of the chunks a part cannot be read.
    for chunk in (0..volume.log().chunks).step_by(3) {
        let first = volume.first_chunk_block() + chunk * CHUNK_BLOCKS;
        volume.fail(first + 20..first + 21, EIO);
    }
    let (mut random, mut refused) = (Prng::new(8), 0);
    for number in 0..8_000_u64 {
        // Most keys are rarely written, so that heads have live records.
        let keys = if random.one_in(40) { KEYS } else { KEYS / 10 };
        let index = random.below(keys);
        if number % 50 == 0 {
            volume.advance(Nanos::from_millis(100));
        }
        match volume.try_write(index) {
            Ok(PutOutcome::Stored) => volume.model[index as usize] = volume.operations,
            // Without space, or with an image that cannot be read.
            Err(EngineError::Device { .. }) => refused += 1,
            other => panic!("write {number}: {other:?}"),
        }
    }
    let log = volume.log();
    assert_eq!(log.pinned_chunks, log.chunks / 32, "no more than that, {compactions} at once: {log:?}");
    assert!(refused > 0, "a volume without space answers the error that keeps it from being compacted");
    assert!(!volume.take_reports().is_empty(), "operators are told");
    volume.plan.clear();
    let opened = open(&fixture(), &volume.device);
    assert_eq!(opened.statistics().log.expect("it has logs").pinned_chunks, log.pinned_chunks);
    block_on(opened.compact_all(), || ()).expect("compacts");
    assert_eq!(opened.statistics().log.expect("it has logs").pinned_chunks, 0);
    drop(opened);
    assert_eq!(check_after_crash(&volume).pinned_chunks, 0);
}

#[test]
fn blocks_that_the_medium_has_lost_pin_nothing() {
    let mut volume = Maintained::<LogEngine>::new(DISK_BYTES, COMPACTIONS[2]);
    volume.write_round(1);
    let first = volume.first_chunk_block() + 40 * CHUNK_BLOCKS;
    volume.plan.add(FaultRule::within(OpFilter::Read, Lba(first), Lba(first + 1), InjectedFault::Error(61)));
    for number in 0..20_000_u64 {
        let index = number % KEYS;
        if number % 50 == 0 {
            volume.advance(Nanos::from_millis(50));
        }
        match volume.try_write(index) {
            Ok(_) | Err(EngineError::Device { .. } | EngineError::Corrupt { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(volume.log().pinned_chunks, 0);
}

/// Acknowledged puts: the number of disk events at the acknowledgement, the index of the key, the operation.
type Acknowledged = Vec<(usize, u64, u64)>;

/// One client that writes while compactions of both logs meet blocks which cannot be read, and later can.
struct PinningRun {
    disk: PowerLossDisk,
    acknowledged: Acknowledged,
    /// The most chunks that were pinned.
    pinned: u64,
}

impl PinningRun {
    fn new(fixture: &LogFixture) -> PinningRun {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; 3 << 19], 512), Prng::new(5));
        let plan = FaultPlan::default();
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
        let mut complete = || {
            disk.complete_one(&mut random);
        };
        block_on(fixture.format(Rc::clone(&device)), &mut complete);
        let volume = block_on(fixture.open_volume(&device), &mut complete).expect("opens");
        let engine = LogEngine::new(volume, Rc::clone(&device), pool());
        let chunks = engine.statistics().log.expect("it has logs").chunks;
        let first = device.geometry().blocks - chunks * CHUNK_BLOCKS;
        let (mut order, mut acknowledged, mut most) = (Prng::new(6), Acknowledged::new(), 0);
        for operation in 1..=600 {
            if operation == 250 {
                for chunk in 0..chunks {
                    let block = first + chunk * CHUNK_BLOCKS + 11;
                    plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), EIO));
                }
            }
            if operation == 400 {
                plan.clear();
            }
            let index = order.below(40);
            let key = key_of(index);
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, 300));
            let stored = block_on(engine.put(&key, PutMode::Upsert, record, 300), &mut complete);
            if stored == Ok(PutOutcome::Stored) {
                acknowledged.push((disk.events(), index, operation));
            }
            if operation % 4 == 0 {
                for log in [LogKind::Values, LogKind::Keys] {
                    let _ = block_on(engine.compact_once(log), &mut complete);
                }
                let log = engine.statistics().log.expect("it has logs");
                most = most.max(log.pinned_chunks);
            }
            if operation > 400 && operation % 20 == 0 {
                block_on(engine.compact_all(), &mut complete).expect("reads again");
            }
        }
        let log = engine.statistics().log.expect("it has logs");
        assert_eq!(log.pinned_chunks, 0, "{log:?}");
        PinningRun { disk, acknowledged, pinned: most }
    }
}

#[test]
fn no_power_loss_while_chunks_are_pinned_and_emptied_loses_anything() {
    let mut fixture = fixture();
    fixture.format.partitions = 1;
    fixture.format.chunk_bytes = Some(16 << 10);
    let run = PinningRun::new(&fixture);
    assert!(run.pinned > 0, "chunks were pinned");
    let (mut history, mut random) = (DiskHistory::of(&run.disk), Prng::new(3));
    let mut with_pinned = 0;
    for events in 0..=run.disk.events() {
        history.advance(events);
        let mut least = [0; 40];
        let acknowledged = run.acknowledged.iter().filter(|(at, ..)| *at <= events);
        acknowledged.for_each(|&(_, index, operation)| least[index as usize] = operation);
        if least.iter().all(|&operation| operation == 0) {
            continue;
        }
        for mode in PowerLossMode::ALL {
            let context = format!("power loss at {events}, {mode:?}");
            let disk = PowerLossDisk::new(history.image(mode, &mut random), 512);
            let device: Rc<dyn Device> = Rc::new(disk.clone());
            let mut complete = || {
                disk.complete_one(&mut random);
            };
            let volume = block_on(fixture.open_volume(&device), &mut complete);
            let volume = volume.unwrap_or_else(|error| panic!("{context}: {error}"));
            let engine = LogEngine::new(volume, device, pool());
            for (index, &operation) in (0..).zip(&least).filter(|(_, operation)| **operation > 0) {
                let key = key_of(index);
                let value = block_on(engine.get(&key), &mut complete);
                let value = value.unwrap_or_else(|error| panic!("{context}, key {index}: {error}"));
                let found = value.map_or(0, |value| operation_of(&key, value.as_bytes()));
                assert!(found >= operation, "{context}: key {index} has {found}, not {operation}");
            }
            with_pinned += u64::from(engine.statistics().log.expect("it has logs").pinned_chunks > 0);
            if with_pinned % 50 == 1 {
                block_on(engine.compact_all(), &mut complete).expect("compacts");
                let log = engine.statistics().log.expect("it has logs");
                assert_eq!((log.pinned_chunks, log.lost_values), (0, 0), "{context}: {log:?}");
            }
        }
    }
    assert!(with_pinned > 100, "{with_pinned} openings found pinned chunks");
}

#[test]
fn a_put_whose_value_is_found_has_succeeded_though_the_split_behind_it_failed() {
    let (fixture, plan) = (fixture(), FaultPlan::default());
    let memory: Rc<dyn Device> = StableMemory::new(DISK_BYTES, 512);
    block_on(fixture.format(Rc::clone(&memory)), || ());
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
    let engine = open(&fixture, &device);
    let mut stored = 0;
    for number in 0..KEYS {
        let key = key_of(number);
        // The first read is that of the key's own segment, if it has one.
        plan.add(FaultRule::always(OpFilter::Read, EIO).once(1));
        let record = record_of(engine.record_layout(), &key, &value_of(&key, number, 100));
        let put = block_on(engine.put(&key, PutMode::Upsert, record, 100), || ());
        // Reads here succeed only if the put has used the rule.
        let read = || block_on(device.read(Lba(0), Buffer::zeroed(512)), || ()).result.is_ok();
        let is_used = read() && read();
        plan.clear();
        let found = block_on(engine.get(&key), || ()).expect("no fault").is_some();
        assert_eq!(found, put == Ok(PutOutcome::Stored), "key {number}: {put:?}");
        stored += usize::from(found && is_used);
    }
    assert!(stored > 10, "{stored} puts were stored though a read behind them failed");
}
