//! The statistics of logs: each number is that of the writes that were made, of the layout, or of another number.

use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::{DeleteOutcome, Engine, LogStatistics, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::ops::Range;
use std::rc::Rc;

const KEYS: u64 = 300;
const VALUE_BYTES: usize = 700;
const RECORD_HEADER_BYTES: u64 = 16;
const GRANULE_BYTES: u64 = 8;
const ID_BYTES: u64 = 4;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

struct StableLogs {
    fixture: LogFixture,
    device: Rc<dyn Device>,
}

impl StableLogs {
    fn format() -> StableLogs {
        let fixture = LogFixture { cores: 1, ..LogFixture::default() };
        let device: Rc<dyn Device> = StableMemory::new(24 << 20, 512);
        run(fixture.format(Rc::clone(&device)));
        StableLogs { fixture, device }
    }

    fn open(&self) -> LogEngine {
        let config = self.fixture.open_config();
        let opened = run(open_with(&self.device, &pool(), config, &self.fixture.format, make_small));
        LogEngine::new(opened.expect("opens"), Rc::clone(&self.device), pool())
    }
}

fn put(engine: &LogEngine, keys: Range<u64>, operation: u64) {
    for index in keys {
        let key = key_of(index);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, VALUE_BYTES));
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, VALUE_BYTES)), Ok(PutOutcome::Stored));
    }
}

/// The record of a key's value, in whole granules.
fn record_bytes(index: u64) -> u64 {
    let bytes = RECORD_HEADER_BYTES + key_of(index).len() as u64 + VALUE_BYTES as u64;
    bytes.next_multiple_of(GRANULE_BYTES)
}

fn log(engine: &LogEngine) -> LogStatistics {
    engine.statistics().log.expect("it has logs")
}

/// The next chunk of each log is neither free nor part of it.
fn assert_chunks_add_up(log: &LogStatistics) {
    let reserved = 2 * log.stores;
    let sum = log.free_chunks + log.keys.chunks + log.values.chunks + log.retired_chunks;
    let sum = sum + log.pinned_chunks + reserved;
    assert_eq!(sum, log.chunks, "{log:?}");
}

/// LEED packs values (§3.2), so that 4 KiB do not take the 8 KiB that whole units of 4 KiB would: a header and a key are in front of a value.
#[test]
fn values_of_4_kib_take_at_most_a_twentieth_more_than_their_bytes() {
    const VALUES: u64 = 8_000;
    const PACKED_BYTES: usize = 4096;
    for unit_bytes in [512, 4096] {
        let mut fixture = LogFixture { cores: 1, ..LogFixture::default() };
        fixture.format.unit_bytes = Some(unit_bytes);
        fixture.format.chunk_bytes = None;
        let device: Rc<dyn Device> = StableMemory::new(96 << 20, unit_bytes);
        run(fixture.format(Rc::clone(&device)));
        let volume = run(fixture.open_volume(&device)).expect("opens");
        let engine = LogEngine::new(volume, Rc::clone(&device), pool());
        for index in 0..VALUES {
            let key = key_of(index);
            let record = record_of(engine.record_layout(), &key, &value_of(&key, 1, PACKED_BYTES));
            let stored = run(engine.put(&key, PutMode::Upsert, record, PACKED_BYTES));
            assert_eq!(stored, Ok(PutOutcome::Stored));
        }
        let log = log(&engine);
        let value_bytes = VALUES * PACKED_BYTES as u64;
        assert!((value_bytes..value_bytes * 21 / 20).contains(&log.values.live_bytes), "{log:?}");
        // Each store has one chunk that is not full.
        let full_chunks = log.values.chunks - log.stores;
        assert!(full_chunks * log.chunk_bytes <= value_bytes * 21 / 20, "units of {unit_bytes}: {log:?}");
    }
}

#[test]
fn chunks_bytes_and_images_are_those_of_the_writes() {
    let logs = StableLogs::format();
    let engine = logs.open();
    let empty = log(&engine);
    assert_eq!((empty.stores, empty.lost_stores, empty.chunk_bytes), (2, 0, 16 << 10));
    assert_eq!((empty.keys.chunks, empty.values.chunks, empty.retired_chunks), (2, 2, 0));
    assert_eq!((empty.keys.live_bytes, empty.values.live_bytes, empty.entry_bytes), (0, 0, 0));
    assert!(empty.capacity_chunks < empty.chunks);
    assert_chunks_add_up(&empty);

    put(&engine, 0..KEYS, 1);
    while run(engine.split_once()).expect("no fault") {}
    let (statistics, full) = (engine.statistics(), log(&engine));
    assert_eq!(statistics.keys, KEYS);
    assert_chunks_add_up(&full);
    assert_eq!((full.batches, statistics.journal_batches), (full.batches, full.batches));
    // A split writes two images of which no put is the cause.
    assert_eq!(full.images, KEYS + 2 * full.splits);
    assert_eq!(full.segments, empty.segments + full.splits);
    assert!(full.splits > 20, "{full:?}");
    let records: u64 = (0..KEYS).map(|index| record_bytes(index) + ID_BYTES).sum();
    assert_eq!(full.values.live_bytes, records);
    assert!(full.values.chunks * full.chunk_bytes >= full.values.live_bytes, "{full:?}");
    // What the ends of key chunks take beside live data: of each less than a marker, and an image of two units.
    let ends = statistics.used_bytes - (full.keys.live_bytes + full.values.live_bytes);
    assert!(ends < full.keys.chunks * 3 * 512, "{ends} {full:?}");
    assert!(full.keys.live_bytes >= full.segments * 512 / 2 && full.keys.live_bytes >= full.entry_bytes);
    let key_bytes: u64 = (0..KEYS).map(|index| key_of(index).len() as u64).sum();
    assert!((key_bytes + 8 * KEYS..key_bytes + 24 * KEYS).contains(&full.entry_bytes), "{full:?}");
    assert_eq!(full.segment_table_bytes + full.chunk_table_bytes, statistics.index_bytes);
    assert!(full.segment_table_bytes >= 6 * full.segments);
    assert_eq!((full.compaction_rounds, full.moved_values, full.waited_writes), (0, 0, 0));

    for index in 0..KEYS {
        assert_eq!(run(engine.delete(&key_of(index))), Ok(DeleteOutcome::Deleted));
    }
    let deleted = log(&engine);
    assert_eq!((deleted.values.live_bytes, deleted.entry_bytes), (0, 0), "{deleted:?}");
    assert_eq!((engine.statistics().keys, deleted.lost_values), (0, 0));
}

#[test]
fn compactions_count_what_they_move_and_an_opening_counts_from_0() {
    let logs = StableLogs::format();
    let engine = logs.open();
    put(&engine, 0..KEYS, 1);
    // The images of the other keys come to lie in the oldest chunks.
    for operation in 0..20 {
        put(&engine, 0..12, operation);
    }
    let before = log(&engine);
    assert_eq!((before.compaction_rounds, before.moved_images, before.moved_values), (0, 0, 0));
    let mut rounds = 0;
    for kind in [LogKind::Keys, LogKind::Values] {
        while match kind {
            LogKind::Keys => log(&engine).moved_images == 0,
            LogKind::Values => log(&engine).moved_values == 0,
        } {
            assert_eq!(run(engine.compact_once(kind)), Ok(true));
            rounds += 1;
        }
    }
    run(engine.checkpoint()).expect("no fault");
    let after = log(&engine);
    assert_chunks_add_up(&after);
    // Of each store at most one at a time.
    assert!((rounds..=2 * rounds).contains(&after.compaction_rounds), "{rounds}: {after:?}");
    assert!(after.visited_segments > 0 && after.visited_segments <= after.segments, "{after:?}");
    let shortest = (0..KEYS).map(record_bytes).min().expect("there are keys");
    let longest = (0..KEYS).map(record_bytes).max().expect("there are keys");
    // As they are counted, without what is left of the last granule.
    let moved_each = (shortest - GRANULE_BYTES) * after.moved_values..=longest * after.moved_values;
    assert!(moved_each.contains(&after.moved_bytes), "{after:?}");
    assert_eq!(after.values.live_bytes, before.values.live_bytes, "what is live stays so");
    assert_eq!((after.lost_values, after.lost_stores, after.miscounts), (0, 0, 0));

    run(engine.close()).expect("closes");
    drop(engine);
    let engine = logs.open();
    let opened = log(&engine);
    assert_eq!((opened.batches, opened.images, opened.splits, opened.markers), (0, 0, 0, 0));
    assert_eq!((opened.compaction_rounds, opened.moved_values, opened.moved_bytes), (0, 0, 0));
    assert_eq!(opened.values.live_bytes, after.values.live_bytes);
    assert_eq!((opened.segments, opened.entry_bytes), (after.segments, after.entry_bytes));
    assert_chunks_add_up(&opened);
}
