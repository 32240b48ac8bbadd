//! The bound of what compactions write: tables and the values that move with them, however short the compactions are; a caller that waits for one does not wait
//! for its pauses. Writers that compaction cannot follow are delayed a little each, instead of stopped.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Nanos, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, TaskSet, key_of, record_of, value_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{
    DeleteOutcome, Engine, IteratorOptions, OpenConfig, PutMode, PutOutcome, TreeStatistics,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The least speed of compactions is above it.
const BOUND: u64 = 16 << 10;
/// What may be written before its pause: one short compaction, with tables and values of 64 KiB each.
const AHEAD_BYTES: u64 = 180 << 10;
/// Tables of level 0 at which writers are delayed the most.
const LEVEL0_HARD: usize = 12;

struct Maintained {
    engine: Rc<LsmEngine>,
    handle: ReactorHandle,
    tasks: TaskSet,
    now: Nanos,
    random: Prng,
}

/// A memtable that holds all that a test deletes.
fn with_a_long_memtable(settings: &mut TreeSettings) {
    make_small(settings);
    settings.memtable_bytes = 1 << 20;
}

/// The same, but that tombstones which are close to each other leave it.
fn with_few_tombstones(settings: &mut TreeSettings) {
    with_a_long_memtable(settings);
    settings.tombstones_max = 500;
}

/// Compactions that are long, and slow unless something asks for more.
fn with_slow_compactions(settings: &mut TreeSettings) {
    with_a_long_memtable(settings);
    settings.table_bytes = 256 << 10;
    settings.compaction.level1_bytes = 16 << 20;
    settings.compaction.input_bytes_max = 16 << 20;
    settings.pacing.compaction_min = 64 << 10;
    settings.pacing.catch_up = Nanos::from_secs(1_000);
}

/// The same, but for tables that are mostly tombstones as well.
fn with_slow_compactions_of_tombstones(settings: &mut TreeSettings) {
    with_slow_compactions(settings);
    settings.pacing.tombstones_min = 0;
}

/// Flushes that are shorter than a compaction.
fn with_short_compactions(settings: &mut TreeSettings) {
    make_small(settings);
    settings.memtable_bytes = 64 << 10;
}

/// The longest that a put of [`Maintained::add_writer`] took, and their number.
#[derive(Default)]
struct Puts {
    longest: Cell<Nanos>,
    count: Cell<u64>,
}

/// Writers are delayed from a few tables of level 0 on.
fn with_few_tables_in_level_0(settings: &mut TreeSettings) {
    with_short_compactions(settings);
    (settings.pacing.level0_soft, settings.pacing.level0_hard) = (4, LEVEL0_HARD);
    settings.pacing.device_max = 16 << 20;
}

impl Maintained {
    /// A volume with much to compact: tables, and values in segments that are mostly dead.
    fn new(compact_bytes_per_second: u64) -> Maintained {
        Maintained::with(compact_bytes_per_second, with_short_compactions)
    }

    fn with(compact_bytes_per_second: u64, adjust: fn(&mut TreeSettings)) -> Maintained {
        Maintained::on_device(24 << 20, compact_bytes_per_second, adjust)
    }

    fn on_device(bytes: u64, compact_bytes_per_second: u64, adjust: fn(&mut TreeSettings)) -> Maintained {
        let fixture = LsmFixture::default();
        let device: Rc<dyn Device> = StableMemory::new(bytes, 512);
        block_on(fixture.format(Rc::clone(&device)), || ());
        let config = OpenConfig { compact_bytes_per_second, ..fixture.open_config() };
        let pool = pool();
        let opened = open_with(&device, &pool, config, &fixture.format, adjust);
        let volume = block_on(opened, || ()).expect("opens");
        let engine = Rc::new(LsmEngine::new(Arc::clone(&volume), 0, device, pool.clone()));
        for operation in 0..4 {
            // Some keys keep their first value, which is in a segment beside many that do not.
            for index in (0..1_000).filter(|index| operation == 0 || index % 10 != 1) {
                let (key, bytes) = (key_of(index), if index % 2 == 0 { 200 } else { 5_000 });
                let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
                let stored = block_on(engine.put(&key, PutMode::Upsert, record, bytes), || ());
                assert_eq!(stored, Ok(PutOutcome::Stored));
            }
            block_on(engine.flush_memtables(), || ()).expect("no fault");
        }
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let queue = Box::new(sim.device_queue(sim.add_host()));
        let devices = DeviceHandle::new(queue, 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let (mut tasks, now) = (TaskSet::default(), Nanos::from_secs(1));
        handle.begin_iteration(now);
        let (maintained, own) = (Rc::clone(&engine), handle.clone());
        tasks.add(async move { maintained.maintain(&own, |error| panic!("maintenance: {error}")).await });
        Maintained { engine, handle, tasks, now, random: Prng::new(3) }
    }

    fn put(&self, indexes: Range<u64>, value_bytes: usize) {
        for index in indexes {
            let key = key_of(index);
            let value = value_of(&key, index, value_bytes);
            let record = record_of(self.engine.record_layout(), &key, &value);
            let stored = block_on(self.engine.put(&key, PutMode::Upsert, record, value_bytes), || ());
            assert_eq!(stored, Ok(PutOutcome::Stored));
        }
    }

    /// Adds a task that puts a value each millisecond, or as fast as the volume lets it.
    fn add_writer(&mut self, first: u64, puts: &Rc<Puts>) {
        let (engine, handle, puts) = (Rc::clone(&self.engine), self.handle.clone(), Rc::clone(puts));
        self.tasks.add(async move {
            for index in (first..).step_by(7) {
                let (key, begun) = (key_of(index % 1_000), handle.now());
                let record = record_of(engine.record_layout(), &key, &value_of(&key, index, 250));
                assert_eq!(engine.put(&key, PutMode::Upsert, record, 250).await, Ok(PutOutcome::Stored));
                puts.longest.set(puts.longest.get().max(handle.now().since(begun)));
                puts.count.set(puts.count.get() + 1);
                handle.sleep(Nanos::from_millis(1)).await;
            }
        });
    }

    fn advance_ms(&mut self, millis: u64) {
        for _ in 0..millis {
            self.handle.begin_iteration(self.now);
            while self.tasks.step(&mut self.random) {}
            self.now = self.now + Nanos::from_millis(1);
        }
    }

    fn tree(&self) -> TreeStatistics {
        self.engine.statistics().tree.expect("it has one")
    }

    fn written_bytes(&self) -> u64 {
        self.tree().compacted_bytes + self.tree().moved_bytes
    }
}

#[test]
fn compactions_write_no_more_than_their_bound_and_end_their_work() {
    let mut unbounded = Maintained::new(u64::MAX);
    unbounded.advance_ms(5_000);
    let (work, work_bytes) = (unbounded.tree(), unbounded.written_bytes());
    assert!(work.moved_bytes > AHEAD_BYTES && work.compacted_bytes > AHEAD_BYTES, "{work:?}");

    let mut bounded = Maintained::new(BOUND);
    let mut seconds = 0;
    while bounded.written_bytes() < work_bytes * 3 / 4 {
        bounded.advance_ms(1_000);
        seconds += 1;
        let written = bounded.written_bytes();
        assert!(written <= BOUND * seconds + AHEAD_BYTES, "{written} bytes in {seconds} s");
        assert!(seconds * BOUND <= 2 * work_bytes, "it does not use what it may: {:?}", bounded.tree());
    }
}

#[test]
fn a_bound_of_0_leaves_compaction_to_those_who_call_for_it() {
    let mut volume = Maintained::new(0);
    volume.advance_ms(5_000);
    let idle = volume.tree();
    assert_eq!((idle.compactions, idle.levels[0].tables > 6), (0, true), "{idle:?}");
    block_on(volume.engine.compact_all(), || ()).expect("no fault");
    let called = volume.tree();
    assert!(called.compactions > 0 && called.levels[0].tables == 0, "{called:?}");
}

#[test]
fn a_caller_ends_the_pauses_of_the_compaction_that_it_waits_for() {
    let mut volume = Maintained::new(1);
    volume.advance_ms(3_000);
    // Its first pause takes days.
    assert_eq!(volume.tree().compactions, 0);
    let engine = Rc::clone(&volume.engine);
    volume.tasks.add(async move { engine.compact_all().await.expect("no fault") });
    volume.advance_ms(100);
    let called = volume.tree();
    assert!(called.compactions > 0 && called.levels[0].tables == 0, "{called:?}");
}

#[test]
fn tombstones_leave_the_memtable_and_the_tables_although_nothing_more_is_written() {
    let mut volume = Maintained::with(u64::MAX, with_a_long_memtable);
    volume.put(1_000..2_000, 100);
    block_on(volume.engine.flush_memtables(), || ()).expect("no fault");
    let empty_bytes = volume.tree().memtable_bytes;
    volume.advance_ms(1_000);
    for index in 0..2_000 {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || ());
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted), "{index}");
    }
    volume.advance_ms(1_000);
    let at_once = volume.tree();
    assert!(at_once.memtable_bytes > empty_bytes, "{at_once:?}");
    volume.advance_ms(9_000);
    let later = volume.tree();
    let tables: u64 = later.levels.iter().map(|level| level.tables).sum();
    assert_eq!((later.memtable_bytes, tables), (empty_bytes, 0), "{later:?}");
}

/// Deletes every `step`th of 8,000 keys of a compacted volume, 200 in 30 ms. Gives the bytes of tables before, the most of memtables while it deletes, and the tree at once.
fn after_deletes(step: usize) -> (u64, u64, TreeStatistics) {
    // A journal that has all of the deletes.
    let mut volume = Maintained::on_device(192 << 20, u64::MAX, with_few_tombstones);
    volume.put(0..8_000, 100);
    block_on(volume.engine.compact_all(), || ()).expect("no fault");
    volume.advance_ms(100);
    let before = volume.tree().levels.iter().map(|level| level.bytes).sum();
    let mut memtable_bytes_max = 0;
    for (count, index) in (0..8_000).step_by(step).enumerate() {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || ());
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted), "{index}");
        if count % 200 == 199 {
            volume.advance_ms(30);
            memtable_bytes_max = memtable_bytes_max.max(volume.tree().memtable_bytes);
        }
    }
    (before, memtable_bytes_max, volume.tree())
}

#[test]
fn a_range_that_is_deleted_leaves_the_tables_while_it_is_deleted() {
    let (before, memtable_bytes_max, tree) = after_deletes(1);
    let table_bytes: u64 = tree.levels.iter().map(|level| level.bytes).sum();
    assert!(table_bytes * 4 < before, "{table_bytes} of {before}: {tree:?}");
    // One has all 8,000 tombstones in 1 MiB.
    assert!(memtable_bytes_max < 400 << 10, "{memtable_bytes_max}: {tree:?}");
}

#[test]
fn tombstones_that_lie_apart_wait_for_a_full_memtable() {
    let (before, _, tree) = after_deletes(10);
    let table_bytes: u64 = tree.levels.iter().map(|level| level.bytes).sum();
    assert_eq!(table_bytes, before, "no flush of 800 tombstones: {tree:?}");
}

/// Deletes every tenth of 10,000 keys, of 2 MB together, in one flush. Gives the compactions that ended in 500 ms.
fn compactions_of_tombstones(adjust: fn(&mut TreeSettings)) -> u64 {
    let mut volume = Maintained::on_device(192 << 20, u64::MAX, adjust);
    volume.put(0..10_000, 180);
    block_on(volume.engine.compact_all(), || ()).expect("no fault");
    let before = volume.tree();
    for index in (0..10_000).step_by(10) {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || ());
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted), "{index}");
    }
    block_on(volume.engine.flush_memtables(), || ()).expect("no fault");
    let flushed = volume.tree();
    assert_eq!((before.levels[0].tables, flushed.compactions), (0, before.compactions), "{flushed:?}");
    volume.advance_ms(500);
    volume.tree().compactions - before.compactions
}

#[test]
fn compactions_of_tables_that_are_mostly_tombstones_have_a_speed_of_their_own() {
    // All but what a run writes before its first pause takes 27 s at the speed of others.
    assert_eq!(compactions_of_tombstones(with_slow_compactions_of_tombstones), 0);
    assert!(compactions_of_tombstones(with_slow_compactions) > 0);
}

#[test]
fn an_idle_volume_drops_tombstones_in_tables_that_have_few() {
    let mut volume = Maintained::with(u64::MAX, with_a_long_memtable);
    volume.put(0..2_000, 10);
    block_on(volume.engine.compact_all(), || ()).expect("no fault");
    // A third of what one flush writes are tombstones.
    volume.put(2_000..2_600, 10);
    for index in (0..2_000).step_by(7) {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || ());
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted), "{index}");
    }
    block_on(volume.engine.flush_memtables(), || ()).expect("no fault");
    let table_bytes = |volume: &Maintained| volume.tree().levels.iter().map(|level| level.bytes).sum::<u64>();
    volume.advance_ms(2_000);
    let busy_bytes = table_bytes(&volume);
    volume.advance_ms(8_000);
    let idle_bytes = table_bytes(&volume);
    block_on(volume.engine.compact_all(), || ()).expect("no fault");
    // One level has fewer tables, so less of what each has beside its entries.
    let least = table_bytes(&volume);
    assert!(busy_bytes * 100 > least * 106, "{busy_bytes} of {least} before it was idle");
    assert!(idle_bytes * 100 <= least * 102, "{idle_bytes} of {least} once it was idle");
}

#[test]
fn tombstones_that_an_iterator_needs_are_dropped_when_it_has_ended() {
    let mut volume = Maintained::with(u64::MAX, with_a_long_memtable);
    let iterator = block_on(volume.engine.create_iterator(IteratorOptions::default()), || ());
    let iterator = iterator.expect("no fault").expect("not too many");
    for index in 0..1_000 {
        let deleted = block_on(volume.engine.delete(&key_of(index)), || ());
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted), "{index}");
    }
    let tables = |volume: &Maintained| volume.tree().levels.iter().map(|level| level.tables).sum::<u64>();
    volume.advance_ms(10_000);
    assert!(tables(&volume) > 0, "the iterator has them");
    drop(iterator);
    volume.advance_ms(10_000);
    assert_eq!(tables(&volume), 0, "{:?}", volume.tree());
}

/// The sizes that a volume of its length has.
fn by_its_length(_settings: &mut TreeSettings) {}

#[test]
fn puts_on_a_nearly_full_volume_are_stored_and_none_waits_for_much_of_the_collection() {
    const VALUE_BYTES: usize = 5_000;
    const VOLUME_BYTES: u64 = 24 << 20;
    let mut volume = Maintained::with(u64::MAX, by_its_length);
    let mut keys = 1_000;
    while volume.engine.statistics().used_bytes * 100 < volume.engine.statistics().capacity_bytes * 85 {
        volume.put(keys..keys + 10, VALUE_BYTES);
        keys += 10;
    }
    volume.advance_ms(5_000);
    let (longest_bytes, longest, count) =
        (Rc::new(Cell::new(0)), Rc::<Puts>::default(), Rc::new(Cell::new(0u64)));
    for writer in 0..8 {
        let (engine, handle) = (Rc::clone(&volume.engine), volume.handle.clone());
        let (longest_bytes, longest, count) =
            (Rc::clone(&longest_bytes), Rc::clone(&longest), Rc::clone(&count));
        volume.tasks.add(async move {
            let mut random = Prng::new(writer);
            let collected = || engine.statistics().tree.expect("it has one").moved_bytes;
            loop {
                let key = key_of(random.below(keys));
                let record = record_of(engine.record_layout(), &key, &value_of(&key, writer, VALUE_BYTES));
                let (begun, before) = (handle.now(), collected());
                let stored = engine.put(&key, PutMode::Upsert, record, VALUE_BYTES).await;
                assert_eq!(stored, Ok(PutOutcome::Stored), "put {}", count.get());
                longest.longest.set(longest.longest.get().max(handle.now().since(begun)));
                longest_bytes.set(longest_bytes.get().max(collected() - before));
                count.set(count.get() + 1);
                handle.sleep(Nanos::from_millis(1)).await;
            }
        });
    }
    volume.advance_ms(20_000);
    let (stalls, longest) = (volume.tree().stalls, longest.longest.get());
    let report =
        format!("{} puts, {longest:?} and {} B for one, {stalls:?}", count.get(), longest_bytes.get());
    // The keys were overwritten more than once.
    assert!(count.get() > 2 * keys, "{report}");
    assert!(longest_bytes.get() < VOLUME_BYTES / 4 && longest < Nanos::from_millis(500), "{report}");
}

#[test]
fn writers_that_compaction_cannot_follow_are_delayed_and_not_stopped() {
    const COMPACTED_PER_SECOND: u64 = 512 << 10;
    let mut volume = Maintained::with(COMPACTED_PER_SECOND, with_few_tables_in_level_0);
    volume.advance_ms(60_000);
    assert_eq!(volume.tree().stalls.delayed_writes, 0, "compaction alone delays no put");
    let puts = Rc::<Puts>::default();
    (0..4).for_each(|writer| volume.add_writer(writer * 250, &puts));
    let (mut level0_most, mut counts) = (0, Vec::new());
    for _ in 0..20 {
        let before = puts.count.get();
        volume.advance_ms(1_000);
        counts.push(puts.count.get() - before);
        level0_most = level0_most.max(volume.tree().levels[0].tables);
    }
    let (stalls, longest) = (volume.tree().stalls, puts.longest.get());
    let report = format!("{counts:?} puts, {longest:?} for one, {level0_most} tables, {stalls:?}");
    assert!(stalls.delayed_writes > 1_000 && counts.iter().all(|&count| count > 1_000), "{report}");
    assert!(longest < Nanos::from_millis(250), "{report}");
    // Without delays there are several hundred.
    assert!(level0_most <= LEVEL0_HARD as u64, "{report}");
}
