//! The scrub of the log engine, in simulated time: it finds what a get would find damaged, and nothing else; it keeps its rate; a volume with it serves as one without.

use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::noted_device::NotedDevice;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba, Nanos, Prng, UnixTime};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{EngineFixture, TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::{
    Engine, EngineError, LogStatistics, PutOptions, PutOutcome, PutValue, ScrubStatistics, Volume, WallClock,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

const BLOCK: usize = 512;
/// More than any test reads.
const AT_ONCE: u64 = 1 << 40;
/// From one pass to the next, where a test makes many.
const SHORT_INTERVAL: Nanos = Nanos::from_millis(1);
const EIO: InjectedFault = InjectedFault::Error(5);
const ENODATA: InjectedFault = InjectedFault::Error(61);
/// What expires then has expired.
const NOW: UnixTime = UnixTime(1_000_000);

/// A volume with its maintenance.
struct Scrubbed {
    memory: Rc<StableMemory>,
    noted: Rc<NotedDevice>,
    plan: FaultPlan,
    engine: Rc<LogEngine>,
    handle: ReactorHandle,
    tasks: TaskSet,
    now: Nanos,
    random: Prng,
    reports: Rc<RefCell<Vec<EngineError>>>,
    has_ended: Rc<Cell<bool>>,
}

impl Scrubbed {
    fn new(disk_bytes: u64, interval: Option<Nanos>) -> Scrubbed {
        let mut fixture = LogFixture { cores: 1, ..LogFixture::default() };
        fixture.format.value_bytes_max = 200_000;
        fixture.clock = WallClock::new(|| NOW);
        let memory = StableMemory::new(disk_bytes, BLOCK as u32);
        let (noted, plan) = (NotedDevice::new(memory.clone()), FaultPlan::default());
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(noted.clone(), plan.clone()));
        block_on(fixture.format(Rc::clone(&device)), || ());
        let adjust = |settings: &mut LogSettings| {
            make_small(settings);
            // What gets find damaged is what the device has.
            settings.recent_image_bytes = 0;
            settings.scrub_interval = interval.unwrap_or(settings.scrub_interval);
        };
        let pool = pool();
        let opened = open_with(&device, &pool, fixture.open_config(), &fixture.format, adjust);
        let volume = block_on(opened, || ()).expect("opens");
        let engine = Rc::new(LogEngine::new(volume, device, pool));
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let devices = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let now = Nanos::from_secs(1);
        handle.begin_iteration(now);
        let (tasks, random) = (TaskSet::default(), Prng::new(7));
        let (reports, has_ended) = (Rc::default(), Rc::default());
        Scrubbed { memory, noted, plan, engine, handle, tasks, now, random, reports, has_ended }
    }

    fn begin(&mut self, bytes_per_second: u64) {
        self.engine.volume().set_scrub_rate(bytes_per_second);
        let (engine, own, reports) = (Rc::clone(&self.engine), self.handle.clone(), Rc::clone(&self.reports));
        let has_ended = Rc::clone(&self.has_ended);
        self.tasks.add(async move {
            engine.maintain(&own, |error| reports.borrow_mut().push(error)).await;
            has_ended.set(true);
        });
    }

    fn put(&self, index: u64, operation: u64, bytes: usize, options: PutOptions) {
        let put = put(&self.engine, index, operation, bytes, options);
        assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
    }

    fn advance(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            self.handle.begin_iteration(self.now);
            while self.tasks.step(&mut self.random) {}
            self.now = self.now + Nanos::from_millis(1);
        }
    }

    /// Lets a pass that begins from now on end.
    fn pass(&mut self) -> ScrubStatistics {
        let until = self.scrub().passes + 2;
        while self.scrub().passes < until {
            self.advance(Nanos::from_millis(1));
        }
        self.scrub()
    }

    fn log(&self) -> LogStatistics {
        self.engine.statistics().log.expect("it has logs")
    }

    fn scrub(&self) -> ScrubStatistics {
        self.log().scrub
    }

    fn read_block(&self, block: u64) -> Buffer {
        let read = block_on(self.memory.read(Lba(block), Buffer::zeroed(BLOCK)), || ());
        read.into_read().expect("memory")
    }

    fn flip(&self, block: u64, bit: usize) {
        let mut bytes = self.read_block(block);
        bytes[bit / 8] ^= 1 << (bit % 8);
        block_on(self.memory.write(Lba(block), bytes), || ()).result.expect("memory");
    }

    /// The number of keys whose gets return an error.
    fn damaged_keys(&self, keys: Range<u64>) -> u64 {
        let is_damaged = |index: &u64| match block_on(self.engine.get(&key_of(*index)), || ()) {
            Ok(_) => false,
            Err(EngineError::Corrupt { .. } | EngineError::Device { .. }) => true,
            Err(error) => panic!("key {index}: {error}"),
        };
        keys.filter(is_damaged).count() as u64
    }

    fn take_reports(&self) -> Vec<EngineError> {
        self.reports.take()
    }
}

async fn put(
    engine: &LogEngine,
    index: u64,
    operation: u64,
    bytes: usize,
    options: PutOptions,
) -> Result<PutOutcome, EngineError> {
    let key = key_of(index);
    let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
    engine.put_with(&key, PutValue::new(record, bytes), options).await
}

#[test]
fn a_pass_counts_what_gets_find_damaged_and_no_damage_of_dead_data() {
    const KEYS: u64 = 150;
    const EXPIRED: u64 = 20;
    const ABSENT: u64 = 300;
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    for operation in 0..3 {
        for index in 0..KEYS {
            let bytes = if index % 10 == 3 { 20_000 } else { 30 + 9 * index as usize };
            volume.put(index, operation, bytes, PutOptions::default());
        }
    }
    volume.put(KEYS, 1, 150_000, PutOptions::default());
    let expired = PutOptions { expires_at: UnixTime(NOW.0 - 1), ..PutOptions::default() };
    (KEYS + 1..KEYS + EXPIRED).for_each(|index| volume.put(index, 1, 900, expired));
    while block_on(volume.engine.split_once(), || ()).expect("no fault") {}
    volume.begin(AT_ONCE);
    let intact = volume.pass();
    assert_eq!((intact.damaged_buckets, intact.damaged_values, intact.skipped_segments), (0, 0, 0));

    let log = volume.log();
    let blocks = volume.memory.geometry().blocks;
    let first = blocks - log.chunks * log.chunk_bytes / BLOCK as u64;
    let (mut of_buckets, mut of_values, mut of_dead) = (0, 0, 0);
    let used: Vec<u64> =
        (first..blocks).filter(|&block| volume.read_block(block).iter().any(|&byte| byte != 0)).collect();
    for block in used.into_iter().step_by(2) {
        let bit = volume.random.below(8 * BLOCK as u64) as usize;
        volume.flip(block, bit);
        let (found, damaged) = (volume.pass(), volume.damaged_keys(0..KEYS + EXPIRED));
        let context = format!("block {block}: {found:?}, {damaged} keys");
        let reported = volume.take_reports();
        let is_found = found.damaged_buckets + found.damaged_values > 0;
        assert_eq!(is_found, !reported.is_empty(), "{context}");
        assert!(reported.iter().all(|error| matches!(error, EngineError::Corrupt { .. })), "{reported:?}");
        match (found.damaged_buckets, damaged) {
            (0, 0) => {
                assert_eq!(found.damaged_values, 0, "{context}");
                of_dead += 1;
            }
            (0, damaged) => {
                assert_eq!(found.damaged_values, damaged, "{context}");
                of_values += 1;
            }
            (1, damaged) => {
                // Also keys that were never put cannot be said to be absent. A segment may have no others.
                let absent = volume.damaged_keys(KEYS + EXPIRED..KEYS + EXPIRED + ABSENT);
                assert!(damaged + absent > 0 && absent < ABSENT, "{context}, {absent} absent");
                of_buckets += 1;
            }
            _ => panic!("{context}"),
        }
        volume.flip(block, bit);
        let restored = volume.pass();
        assert_eq!((restored.damaged_buckets, restored.damaged_values), (0, 0), "block {block}");
        volume.take_reports();
    }
    assert!(of_buckets > 10 && of_values > 200 && of_dead > 200, "{of_buckets}, {of_values}, {of_dead}");
}

/// Writers beside a scrub in whose pauses chunks are freed and used again, on a device that delays each operation. Gives the reads that the device had.
fn scrub_beside_writers(seed: u64) -> Vec<(u64, u64)> {
    const KEYS: u64 = 120;
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    volume.random = Prng::new(seed);
    for filter in [OpFilter::Read, OpFilter::Write] {
        volume.plan.add(FaultRule::always(filter, InjectedFault::Slow { polls: 2 }));
    }
    volume.begin(256 << 10);
    let abandoned = Rc::clone(&volume.engine);
    volume.tasks.add(async move { abandoned.run_abandoned().await });
    let (is_over, last) = (Rc::new(Cell::new(false)), Rc::new(RefCell::new(vec![0; KEYS as usize])));
    for writer in 0..4 {
        let (engine, is_over, last) = (Rc::clone(&volume.engine), Rc::clone(&is_over), Rc::clone(&last));
        let mut random = Prng::new(seed ^ (writer + 1));
        let handle = volume.handle.clone();
        volume.tasks.add(async move {
            for operation in 1.. {
                if is_over.get() {
                    return;
                }
                // Of each key one writer.
                let index = random.below(KEYS / 4) * 4 + writer;
                let bytes = if index < 4 { 140_000 } else { 50 + random.below(3_000) as usize };
                let stored = put(&engine, index, operation, bytes, PutOptions::default()).await;
                assert_eq!(stored, Ok(PutOutcome::Stored));
                last.borrow_mut()[index as usize] = operation;
                if operation % 4 == 0 {
                    handle.sleep(Nanos::from_millis(1)).await;
                }
            }
        });
    }
    let rounds = 2 * volume.log().chunks;
    while volume.log().compaction_rounds < rounds || volume.scrub().passes < 5 {
        volume.advance(Nanos::from_millis(20));
    }
    is_over.set(true);
    volume.advance(Nanos::from_secs(1));
    assert_eq!(volume.take_reports(), [], "{:?}", volume.log());
    let found = volume.scrub();
    assert_eq!((found.damaged_buckets, found.damaged_values, found.skipped_segments), (0, 0, 0));
    assert!(volume.log().repeated_reads > 0, "nothing was replaced while it was read: {:?}", volume.log());
    for (index, operation) in (0..).zip(last.take()) {
        let found = block_on(volume.engine.get(&key_of(index)), || ()).expect("no fault");
        let found = found.map_or(0, |value| operation_of(&key_of(index), value.as_bytes()));
        assert_eq!(found, operation, "key {index}");
    }
    volume.noted.reads.take()
}

#[test]
fn what_writers_and_compaction_replace_meanwhile_is_not_damage() {
    (1..4).for_each(|seed| drop(scrub_beside_writers(seed)));
}

#[test]
fn a_scrub_reads_the_same_blocks_in_the_same_order_again() {
    assert_eq!(scrub_beside_writers(9), scrub_beside_writers(9));
}

#[test]
fn a_scrub_keeps_to_its_rate_and_rests_until_the_next_pass_is_due() {
    const RATE: u64 = 64 << 10;
    let mut volume = Scrubbed::new(8 << 20, None);
    (0..200).for_each(|index| volume.put(index, 1, 5_000, PutOptions::default()));
    volume.put(200, 1, 190_000, PutOptions::default());
    volume.begin(RATE);
    // What maintenance alone reads.
    let (mut seconds, mut read) = (0, 0);
    volume.noted.reads.take();
    while volume.scrub().passes == 0 {
        volume.advance(Nanos::from_secs(1));
        seconds += 1;
        read += volume.noted.reads.take().iter().map(|&(_, blocks)| blocks * BLOCK as u64).sum::<u64>();
        // One step ahead, of which the last read may be a piece of a long value.
        assert!(read <= RATE * seconds + 3 * RATE, "{read} bytes in {seconds} s");
        assert!(
            read >= (RATE * seconds).saturating_sub(RATE) || volume.scrub().passes > 0,
            "{read} in {seconds} s"
        );
    }
    assert!(read > 1_190_000, "{read}");
    let counted = volume.scrub().read_bytes;
    assert!(counted <= read && counted >= read - read / 16, "{counted} of {read}");
    volume.advance(Nanos::from_secs(3_500 - seconds));
    assert_eq!(volume.noted.reads.take(), []);
    volume.advance(Nanos::from_secs(200));
    assert!(!volume.noted.reads.take().is_empty());
    assert_eq!(volume.scrub().passes, 2);
}

#[test]
fn without_a_rate_nothing_is_scrubbed() {
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    (0..50).for_each(|index| volume.put(index, 1, 300, PutOptions::default()));
    volume.begin(0);
    volume.noted.reads.take();
    volume.advance(Nanos::from_secs(10));
    assert_eq!((volume.noted.reads.take(), volume.scrub()), (Vec::new(), ScrubStatistics::default()));
}

#[test]
fn an_error_of_the_device_is_reported_once_and_is_no_damage() {
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    (0..100).for_each(|index| volume.put(index, 1, 300, PutOptions::default()));
    volume.plan.add(FaultRule::always(OpFilter::Read, EIO));
    volume.begin(AT_ONCE);
    volume.advance(Nanos::from_secs(5));
    let skipped = volume.scrub();
    assert!((4..=6).contains(&skipped.skipped_segments), "{skipped:?}");
    assert_eq!((skipped.damaged_buckets, skipped.damaged_values), (0, 0));
    let reports = volume.take_reports();
    assert!(matches!(reports[..], [EngineError::Device { .. }]), "{reports:?}");
    volume.plan.clear();
    volume.advance(Nanos::from_secs(5));
    let healed = volume.scrub();
    assert!(healed.passes > 2 && healed.skipped_segments <= skipped.skipped_segments + 1, "{healed:?}");
    assert_eq!(volume.damaged_keys(0..100), 0);
    volume.put(1, 2, 300, PutOptions::default());
}

#[test]
fn a_read_that_is_wrong_once_is_no_damage() {
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    (0..60).for_each(|index| volume.put(index, 1, 300, PutOptions::default()));
    volume.begin(AT_ONCE);
    volume.pass();
    for skip in 0..40 {
        let flip = FaultRule::always(OpFilter::Read, InjectedFault::BitFlip { seed: skip.into() });
        volume.plan.add(flip.once(skip));
        let found = volume.pass();
        assert_eq!((found.damaged_buckets, found.damaged_values), (0, 0), "read {skip}");
    }
    assert_eq!(volume.take_reports(), []);
}

#[test]
fn blocks_that_the_medium_has_lost_are_damage() {
    const KEYS: u64 = 100;
    let mut volume = Scrubbed::new(4 << 20, Some(SHORT_INTERVAL));
    (0..KEYS).for_each(|index| volume.put(index, 1, 300, PutOptions::default()));
    volume.begin(AT_ONCE);
    for kind in [LogKind::Values, LogKind::Keys] {
        let blocks = volume.memory.geometry().blocks;
        let of_log = |block: &u64| volume.engine.volume().log_of_block(Lba(*block)) == Some(kind);
        for block in (0..blocks).filter(of_log) {
            volume.plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), ENODATA));
        }
        let passes = volume.scrub().passes;
        let found = volume.pass();
        assert_eq!(found.skipped_segments, 0, "{found:?}");
        match kind {
            LogKind::Values => assert_eq!((found.damaged_buckets, found.damaged_values), (0, KEYS)),
            LogKind::Keys => assert!(found.damaged_buckets >= volume.log().segments, "{found:?}"),
        }
        // It counts all, and reports some of them.
        let reports = volume.take_reports().len() as u64;
        assert!((16..=16 * (volume.scrub().passes + 1 - passes)).contains(&reports), "{reports}");
        volume.plan.clear();
        let again = volume.pass();
        assert_eq!((again.damaged_buckets, again.damaged_values), (0, 0));
        volume.take_reports();
    }
}

#[test]
fn a_scrub_ends_when_its_volume_is_read_only_or_closed() {
    let begun = |rate| {
        let mut volume = Scrubbed::new(4 << 20, None);
        (0..200).for_each(|index| volume.put(index, 1, 2_000, PutOptions::default()));
        volume.begin(rate);
        volume.advance(Nanos::from_secs(2));
        assert!(volume.scrub().read_bytes > 0 && volume.scrub().passes == 0);
        volume
    };
    // At this rate the first pause takes hours.
    let mut volume = begun(1);
    volume.plan.add(FaultRule::always(OpFilter::Write, EIO));
    assert!(block_on(volume.engine.delete(&key_of(1)), || ()).is_err());
    volume.advance(Nanos::from_secs(2));
    assert!(volume.has_ended.get());

    let mut volume = begun(64 << 10);
    block_on(volume.engine.close(), || ()).expect("closes");
    volume.advance(Nanos::from_millis(100));
    volume.noted.reads.take();
    volume.advance(Nanos::from_secs(10));
    assert_eq!((volume.noted.reads.take(), volume.scrub().passes), (Vec::new(), 0));
}
