//! The statistics of a tree: each number is that of the version, of the writes that were made, or of the iterators that are open.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Nanos, UnixTime};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{
    Engine, IteratorOptions, LevelStatistics, PutMode, PutOutcome, SnapshotAge, TreeStatistics, WallClock,
};
use octokv_runtime::block_on;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const UNIT_BYTES: u64 = 512;
/// Below the threshold of the fixture: such values are in tables.
const INLINE_BYTES: usize = 200;
/// A record of such a value, with its header of 48 bytes and a key of at most 464 bytes, takes three units.
const RECORD_VALUE_BYTES: usize = 1000;
const RECORD_BYTES: u64 = 3 * UNIT_BYTES;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// Memtables are flushed on request alone.
fn with_long_memtables(settings: &mut TreeSettings) {
    make_small(settings);
    settings.memtable_bytes = 4 << 20;
    settings.compaction.level1_bytes = 64 << 10;
}

/// Handles of two cores on a new volume.
fn engines(clock: WallClock) -> [LsmEngine; 2] {
    let fixture = LsmFixture { cores: 2, clock, ..LsmFixture::default() };
    let device: Rc<dyn Device> = StableMemory::new(24 << 20, UNIT_BYTES as u32);
    run(fixture.format(Rc::clone(&device)));
    let opened =
        run(open_with(&device, &pool(), fixture.open_config(), &fixture.format, with_long_memtables));
    let volume = opened.expect("opens");
    [0, 1].map(|core| LsmEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool()))
}

fn put(engine: &LsmEngine, keys: Range<u64>, operation: u64, bytes: usize) {
    for index in keys {
        let key = key_of(index);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, bytes)), Ok(PutOutcome::Stored));
    }
}

fn tree(engine: &LsmEngine) -> TreeStatistics {
    engine.statistics().tree.expect("it has one")
}

/// The levels of the current version, counted table by table.
fn counted_levels(engine: &LsmEngine) -> [LevelStatistics; 7] {
    let mut levels = [LevelStatistics::default(); 7];
    for (level, table) in engine.volume().version().tables() {
        levels[level].tables += 1;
        levels[level].bytes += table.bytes();
    }
    levels
}

/// Location and units of the tables of the current version whose level `is_wanted`, and of the segments, which have none.
fn extents(engine: &LsmEngine, is_wanted: impl Fn(Option<usize>) -> bool) -> BTreeSet<(u64, u64)> {
    let version = engine.volume().version();
    let tables = version.tables().map(|(level, table)| (Some(level), table.extent()));
    let segments = version.segments().iter().map(|segment| (None, segment.meta.extent()));
    let wanted = tables.chain(segments).filter(|(level, _)| is_wanted(*level));
    wanted.map(|(_, extent)| (extent.location, extent.units)).collect()
}

#[test]
fn levels_flushes_and_compactions_are_counted() {
    let [engine, other] = engines(WallClock::default());
    let empty = tree(&engine);
    assert_eq!((empty.memtables, empty.flushes, empty.compactions, empty.last_sequence), (1, 0, 0, 0));
    let mut memtable_bytes = 0;
    for flushes in 1..=4 {
        let before = tree(&engine).memtable_bytes;
        // Four keys more each time, and the same ones again: the tables overlap.
        put(&engine, 0..4 * flushes, flushes, INLINE_BYTES);
        memtable_bytes = tree(&engine).memtable_bytes - before;
        run(engine.flush_memtables()).expect("no fault");
        let now = tree(&engine);
        assert_eq!((now.flushes, now.levels[0].tables), (flushes, flushes));
        assert_eq!(now.flushed_bytes, now.levels[0].bytes, "nothing was compacted");
    }
    assert!(memtable_bytes >= 16 * INLINE_BYTES as u64, "{memtable_bytes}");
    let flushed = tree(&engine);
    // Two tables of level 0 are too many, and level 1 is empty.
    assert_eq!(flushed.pending_bytes, flushed.levels[0].bytes);
    // The oldest one moves there as it is, which writes nothing; one compaction writes it again with the others.
    assert!(run(engine.compact_once(false)).expect("no fault"));
    let moved = tree(&engine);
    assert_eq!((moved.compactions, moved.levels[0].tables, moved.levels[1].tables), (0, 3, 1));
    while run(engine.compact_once(false)).expect("no fault") {}
    let compacted = tree(&engine);
    assert_eq!((compacted.compactions, compacted.levels[0].tables), (1, 0));
    assert_eq!(compacted.compacted_bytes, compacted.levels[1].bytes);
    assert_eq!((compacted.flushes, compacted.flushed_bytes), (4, flushed.flushed_bytes));
    assert_eq!(compacted.pending_bytes, 0);

    // Until three levels have tables.
    let mut operation = 4;
    while counted_levels(&engine)[1..].iter().filter(|level| level.tables > 0).count() < 3 {
        operation += 1;
        put(&engine, 0..40 * operation, operation, INLINE_BYTES);
        run(engine.flush_memtables()).expect("no fault");
        while run(engine.compact_once(false)).expect("no fault") {}
    }
    put(&engine, 0..8, 99, INLINE_BYTES);
    run(engine.flush_memtables()).expect("no fault");
    let grown = tree(&engine);
    assert_eq!(grown.levels, counted_levels(&engine));
    assert!(
        grown.levels[0].tables > 0 && grown.levels[1..].iter().filter(|it| it.bytes > 0).count() >= 3,
        "{grown:?}"
    );
    assert_eq!(tree(&other), grown, "all cores have one tree");
}

#[test]
fn values_in_segments_are_live_while_a_table_refers_to_them() {
    let [engine, _] = engines(WallClock::default());
    let bytes_of = |keys: Range<u64>| -> u64 {
        keys.map(|index| (key_of(index).len() + RECORD_VALUE_BYTES) as u64).sum()
    };
    put(&engine, 0..20, 1, RECORD_VALUE_BYTES);
    let written = tree(&engine);
    // The records of 20 values fit in one segment.
    assert_eq!((written.segments, written.segment_bytes, written.segment_live_bytes), (1, 32 << 10, 0));
    run(engine.flush_memtables()).expect("no fault");
    assert_eq!(tree(&engine).segment_live_bytes, bytes_of(0..20));
    put(&engine, 0..15, 2, RECORD_VALUE_BYTES);
    run(engine.flush_memtables()).expect("no fault");
    let twice = tree(&engine);
    assert_eq!((twice.segments, twice.segment_bytes), (2, 64 << 10));
    assert_eq!(twice.segment_live_bytes, bytes_of(0..20) + bytes_of(0..15), "the old values are there yet");
    assert_eq!((twice.moved_values, twice.moved_bytes), (0, 0));
    run(engine.compact_all()).expect("no fault");
    let compacted = tree(&engine);
    assert_eq!(compacted.segment_live_bytes, bytes_of(0..20));
    // Those that were left in the first segment moved; the second one may have had to as well.
    assert!(compacted.moved_values >= 5, "{compacted:?}");
    assert_eq!(compacted.moved_bytes, compacted.moved_values * RECORD_BYTES);
}

#[test]
fn an_iterator_shows_its_age_and_what_it_holds_until_it_ends() {
    let time = Arc::new(AtomicU64::new(5_000));
    let own = Arc::clone(&time);
    let [engine, other] = engines(WallClock::new(move || UnixTime(own.load(Ordering::Relaxed))));
    put(&engine, 0..60, 1, INLINE_BYTES);
    put(&engine, 60..90, 1, RECORD_VALUE_BYTES);
    run(engine.compact_all()).expect("no fault");
    let before = tree(&engine);
    assert_eq!((before.iterators, before.oldest_snapshot, before.pinned_bytes), (0, None, 0));

    let create = |engine: &LsmEngine| run(engine.create_iterator(IteratorOptions::default()));
    let oldest = create(&engine).expect("no fault").expect("not too many");
    let mut held_extents = extents(&engine, |_| true);
    time.store(6_500, Ordering::Relaxed);
    assert_eq!(tree(&engine).pinned_bytes, 0, "the current version is the iterator's");
    put(&engine, 0..60, 2, INLINE_BYTES);
    put(&engine, 60..90, 2, RECORD_VALUE_BYTES);
    run(engine.flush_memtables()).expect("no fault");
    // The iterator's memtable was the empty one, which has become these.
    held_extents.extend(extents(&engine, |level| level == Some(0)));
    run(engine.compact_all()).expect("no fault");
    let second = create(&other).expect("no fault").expect("not too many");
    time.store(7_000, Ordering::Relaxed);
    let held = tree(&engine);
    assert_eq!((held.iterators, held.expired_iterators), (2, 0));
    let age = SnapshotAge { sequence: before.last_sequence, age: Nanos::from_secs(2) };
    assert_eq!(held.oldest_snapshot, Some(age));
    let current = extents(&engine, |_| true);
    let pinned_units: u64 = held_extents.difference(&current).map(|(_, units)| units).sum();
    assert_eq!(held.pinned_bytes, pinned_units * UNIT_BYTES);
    assert!(pinned_units > 0);
    assert_eq!(tree(&other), held);

    drop(oldest);
    let after = tree(&engine);
    let age = SnapshotAge { sequence: held.last_sequence, age: Nanos::from_millis(500) };
    assert_eq!((after.iterators, after.oldest_snapshot, after.pinned_bytes), (1, Some(age), 0));
    assert!(age.sequence >= before.last_sequence + 90);
    drop(second);
    assert_eq!((tree(&engine).iterators, tree(&engine).oldest_snapshot), (0, None));
}
