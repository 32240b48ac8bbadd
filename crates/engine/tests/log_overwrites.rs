//! A volume of the log engine of which 90 % of all chunks live takes overwrites at random, beside its maintenance, without ever being out of space.
//!
//! `OCTOKV_LOG_OVERWRITE_MIB` is the size of the device, 4 MiB if it is not set, `OCTOKV_LOG_OVERWRITE_VALUE_BYTES` that of a value, 1 KiB, and `OCTOKV_LOG_OVERWRITE_CHUNK_KIB` that of a chunk, 8 KiB. `make log-overwrites` has 64 MiB,
//! and values of 256 B, too.

use crate::common::log_background::LogBackground;
use crate::common::log_fixture::LogFixture;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use futures_util::future::join_all;
use octokv_base::{Key, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, record_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::open::open;
use octokv_engine::{DeleteOutcome, Engine, FormatConfig, LogStatistics, PutMode, PutOutcome};
use octokv_runtime::{block_on, yield_now};
use std::cell::RefCell;
use std::rc::Rc;

/// How often each object is overwritten.
const OVERWRITES: u32 = 20;
/// The part of all chunks that lives, in percent.
const LIVE_PERCENT: u64 = 90;
const WRITERS: usize = 8;
/// A memory device has no operation in progress, so that only idle polls are bounded.
const OPERATIONS_MAX: u64 = u64::MAX;

/// The lengths of all objects of a volume.
#[derive(Clone, Copy)]
struct ObjectBytes {
    key: usize,
    value: usize,
}

fn key_of(number: u32, bytes: usize) -> Key {
    Key::new(format!("{number:0bytes$}").as_bytes()).expect("a key")
}

/// A value that says which overwrite it is of.
fn value_of(number: u32, overwrite: u32, value_bytes: usize) -> Vec<u8> {
    let mut value = vec![number as u8 ^ overwrite as u8; value_bytes];
    value[..4].copy_from_slice(&overwrite.to_le_bytes());
    value
}

async fn put(engine: &LogEngine, number: u32, overwrite: u32, bytes: ObjectBytes) -> PutOutcome {
    let (key, value) = (key_of(number, bytes.key), value_of(number, overwrite, bytes.value));
    let record = record_of(engine.record_layout(), &key, &value);
    engine.put(&key, PutMode::Upsert, record, bytes.value).await.expect("no fault")
}

/// All objects in a random order.
fn shuffled(objects: u32, random: &mut Prng) -> Vec<u32> {
    let mut order: Vec<u32> = (0..objects).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

fn log_of(engine: &LogEngine) -> LogStatistics {
    engine.statistics().log.expect("a log engine")
}

/// The number in a variable of the environment.
fn number_of(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |number| number.parse().expect("a number"))
}

/// A volume of so many MiB, in chunks of so many KiB.
fn fixture_of(mib: u64, chunk_kib: u64) -> LogFixture {
    let format = FormatConfig {
        partitions: (mib / 32).clamp(1, 8) as u16,
        chunk_bytes: Some((chunk_kib as u32) << 10),
        value_bytes_max: 4_096,
        ..LogFixture::default().format
    };
    LogFixture { cores: 1, format, ..LogFixture::default() }
}

/// An open volume, and its maintenance.
fn opened(fixture: &LogFixture, device: &Rc<dyn Device>) -> (Rc<LogEngine>, LogBackground) {
    let opened = block_on(open(device, &pool(), fixture.open_config(), &fixture.format), || ());
    let engine = Rc::new(LogEngine::new(opened.expect("opens"), Rc::clone(device), pool()));
    let background = LogBackground::begin(&engine, OPERATIONS_MAX);
    (engine, background)
}

/// A new volume of so many MiB, in chunks of so many KiB, and its maintenance.
fn new_volume(mib: u64, chunk_kib: u64) -> (Rc<LogEngine>, LogBackground) {
    let (fixture, device) = (fixture_of(mib, chunk_kib), StableMemory::new(mib << 20, 512));
    let device: Rc<dyn Device> = device;
    block_on(fixture.format(Rc::clone(&device)), || ());
    opened(&fixture, &device)
}

/// Puts new objects until so large a part of all chunks lives, in percent. How many.
fn fill(
    engine: &LogEngine,
    background: &mut LogBackground,
    random: &mut Prng,
    live_percent: u64,
    bytes: ObjectBytes,
) -> u32 {
    let chunks_bytes = log_of(engine).chunks * log_of(engine).chunk_bytes;
    let mut objects = 0;
    while engine.statistics().used_bytes * 100 / chunks_bytes < live_percent {
        let outcome = background.run(|_| false, random, put(engine, objects, 0, bytes));
        assert_eq!(outcome, PutOutcome::Stored, "object {objects}");
        objects += 1;
    }
    objects
}

/// Overwrites each of so many objects, in a random order, by [`WRITERS`] writers.
fn overwrite_all(
    engine: &LogEngine,
    background: &mut LogBackground,
    random: &mut Prng,
    (objects, overwrite): (u32, u32),
    bytes: ObjectBytes,
) {
    let order = RefCell::new(shuffled(objects, random));
    let writer = || async {
        loop {
            let Some(number) = order.borrow_mut().pop() else { return };
            let outcome = put(engine, number, overwrite, bytes).await;
            assert_eq!(outcome, PutOutcome::Stored, "object {number}, overwrite {overwrite}");
            yield_now().await;
        }
    };
    let writers = async { drop(join_all((0..WRITERS).map(|_| writer())).await) };
    background.run(|_| false, random, writers);
}

fn check(engine: &LogEngine, (objects, overwrite): (u32, u32), bytes: ObjectBytes) {
    for number in 0..objects {
        let read = block_on(engine.get(&key_of(number, bytes.key)), || ()).expect("reads").expect("exists");
        assert!(read.as_bytes() == value_of(number, overwrite, bytes.value), "object {number}");
    }
}

#[test]
fn objects_at_90_percent_are_overwritten_twenty_times_at_random() {
    let value = number_of("OCTOKV_LOG_OVERWRITE_VALUE_BYTES", 1_024) as usize;
    let (bytes, mut random) = (ObjectBytes { key: 16, value }, Prng::new(5));
    // The shortest chunks: so the capacity, which a small number of chunks makes smaller, is above what lives.
    let chunk_kib = number_of("OCTOKV_LOG_OVERWRITE_CHUNK_KIB", 8);
    let (engine, mut background) = new_volume(number_of("OCTOKV_LOG_OVERWRITE_MIB", 4), chunk_kib);
    let chunks_bytes = log_of(&engine).chunks * log_of(&engine).chunk_bytes;
    let live = || engine.statistics().used_bytes * 100 / chunks_bytes;
    let objects = fill(&engine, &mut background, &mut random, LIVE_PERCENT, bytes);
    for overwrite in 1..=OVERWRITES {
        overwrite_all(&engine, &mut background, &mut random, (objects, overwrite), bytes);
        assert!((LIVE_PERCENT - 1..=LIVE_PERCENT).contains(&live()), "{} % live", live());
        println!("overwrite {overwrite} of {OVERWRITES}: {} values moved", log_of(&engine).moved_values);
    }
    let log = log_of(&engine);
    let moved = log.moved_values as f64 / f64::from(OVERWRITES * objects);
    println!(
        "{objects} objects of {value} B in {} chunks: {} puts waited, {moved:.1} values moved a put",
        log.chunks, log.waited_writes
    );
    // Without compaction all would be used up after a tenth of an overwrite.
    assert!(moved > 1.0 && log.compaction_rounds > log.chunks, "{log:?}");
    check(&engine, (objects, OVERWRITES), bytes);
}

/// The key log has nearly all that lives, in images of several units, so that much of each of its chunks is an end that the next image does not fit.
#[test]
fn a_volume_that_keys_of_1000_bytes_fill_is_overwritten_at_random() {
    const FEWER: u32 = 3;
    let (bytes, mut random) = (ObjectBytes { key: 1_000, value: 20 }, Prng::new(6));
    let (engine, mut background) = new_volume(16, 32);
    let mut objects = 0;
    while background.run(|_| false, &mut random, put(&engine, objects, 0, bytes)) == PutOutcome::Stored {
        objects += 1;
    }
    let statistics = engine.statistics();
    assert!(statistics.used_bytes * 100 > statistics.capacity_bytes * 98, "{statistics:?}");
    // Puts that have not replaced their objects yet count beside these.
    let left = objects - objects / 25;
    for number in left..objects {
        let key = key_of(number, bytes.key);
        let deleted = background.run(|_| false, &mut random, engine.delete(&key));
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted));
    }
    for overwrite in 1..=FEWER {
        overwrite_all(&engine, &mut background, &mut random, (left, overwrite), bytes);
    }
    let rounds_per_put = log_of(&engine).compaction_rounds as f64 / f64::from(FEWER * left);
    println!("{objects} objects, {rounds_per_put:.1} rounds of compaction a put");
    // 5.4; were the ends of key chunks not counted as used, 10.3.
    assert!((1.0..7.0).contains(&rounds_per_put), "{rounds_per_put:.1}");
    check(&engine, (left, FEWER), bytes);
}

/// A recovery does not know what lives in the chunks of value logs. Were they taken to be full of the shortest records, no window would find the space that it seems to need, and
/// compaction would visit a segment for each record.
#[test]
fn compaction_costs_about_as_much_behind_a_crash_as_behind_a_shutdown() {
    let bytes = ObjectBytes { key: 16, value: 256 };
    let costs = [true, false].map(|is_closed| {
        let (fixture, mut random) = (fixture_of(16, 8), Prng::new(7));
        let device: Rc<dyn Device> = StableMemory::new(16 << 20, 512);
        block_on(fixture.format(Rc::clone(&device)), || ());
        let (engine, mut background) = opened(&fixture, &device);
        let objects = fill(&engine, &mut background, &mut random, 60, bytes);
        overwrite_all(&engine, &mut background, &mut random, (objects, 1), bytes);
        if is_closed {
            assert_eq!(background.run(|_| false, &mut random, engine.close()), Ok(()));
        }
        drop((engine, background));
        let (engine, mut background) = opened(&fixture, &device);
        overwrite_all(&engine, &mut background, &mut random, (objects, 2), bytes);
        check(&engine, (objects, 2), bytes);
        let log = log_of(&engine);
        let per_put = |count: u64| count as f64 / f64::from(objects);
        println!(
            "closed {is_closed}: {objects} objects, {:.2} values moved a put by {:.2} visits, {:.2} images",
            per_put(log.moved_values),
            per_put(log.visited_segments),
            per_put(log.images)
        );
        (per_put(log.visited_segments), per_put(log.images))
    });
    let [(visits, images), (visits_behind_crash, images_behind_crash)] = costs;
    // 1.9 and 2.6; if chunks that are not counted are taken to be full of the shortest records, 3.8.
    assert!(visits_behind_crash < 1.2 * visits, "{costs:?}");
    assert!(images_behind_crash < 1.2 * images, "{costs:?}");
}
