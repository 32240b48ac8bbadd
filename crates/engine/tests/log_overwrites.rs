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
use octokv_engine::{Engine, FormatConfig, LogStatistics, PutMode, PutOutcome};
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

fn key_of(number: u32) -> Key {
    Key::new(format!("{number:016}").as_bytes()).expect("a key")
}

/// A value that says which overwrite it is of.
fn value_of(number: u32, overwrite: u32, value_bytes: usize) -> Vec<u8> {
    let mut value = vec![number as u8 ^ overwrite as u8; value_bytes];
    value[..4].copy_from_slice(&overwrite.to_le_bytes());
    value
}

async fn put(engine: &LogEngine, number: u32, overwrite: u32, value_bytes: usize) {
    let (key, value) = (key_of(number), value_of(number, overwrite, value_bytes));
    let record = record_of(engine.record_layout(), &key, &value);
    let outcome = engine.put(&key, PutMode::Upsert, record, value_bytes).await;
    assert_eq!(outcome, Ok(PutOutcome::Stored), "object {number}, overwrite {overwrite}");
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

/// Fills a volume, overwrites each object [`OVERWRITES`] times, in another order each time, and reads all values.
fn overwrite(value_bytes: usize) {
    let mib = number_of("OCTOKV_LOG_OVERWRITE_MIB", 4);
    // The shortest chunks: so the capacity, which a small number of chunks makes smaller, is above what lives.
    let format = FormatConfig {
        partitions: (mib / 32).clamp(1, 8) as u16,
        chunk_bytes: Some((number_of("OCTOKV_LOG_OVERWRITE_CHUNK_KIB", 8) as u32) << 10),
        value_bytes_max: 4_096,
        ..LogFixture::default().format
    };
    let fixture = LogFixture { cores: 1, format, ..LogFixture::default() };
    let device: Rc<dyn Device> = StableMemory::new(mib << 20, 512);
    block_on(fixture.format(Rc::clone(&device)), || ());
    let opened = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ());
    let engine = Rc::new(LogEngine::new(opened.expect("opens"), device, pool()));
    let mut random = Prng::new(5);
    let mut background = LogBackground::begin(&engine, OPERATIONS_MAX);
    let chunks_bytes = log_of(&engine).chunks * log_of(&engine).chunk_bytes;
    let live = || engine.statistics().used_bytes * 100 / chunks_bytes;
    let mut objects = 0;
    while live() < LIVE_PERCENT {
        background.run(|_| false, &mut random, put(&engine, objects, 0, value_bytes));
        objects += 1;
    }
    for overwrite in 1..=OVERWRITES {
        let order = RefCell::new(shuffled(objects, &mut random));
        let writer = || async {
            loop {
                let Some(number) = order.borrow_mut().pop() else { return };
                put(&engine, number, overwrite, value_bytes).await;
                yield_now().await;
            }
        };
        let writers = async { drop(join_all((0..WRITERS).map(|_| writer())).await) };
        background.run(|_| false, &mut random, writers);
        assert!((LIVE_PERCENT - 1..=LIVE_PERCENT).contains(&live()), "{} % live", live());
        println!("overwrite {overwrite} of {OVERWRITES}: {} values moved", log_of(&engine).moved_values);
    }
    let log = log_of(&engine);
    let moved = log.moved_values as f64 / f64::from(OVERWRITES * objects);
    println!(
        "{objects} objects of {value_bytes} B in {} chunks: {} puts waited, {moved:.1} values moved a put",
        log.chunks, log.waited_writes
    );
    // Without compaction all would be used up after a tenth of an overwrite.
    assert!(moved > 1.0 && log.compaction_rounds > log.chunks, "{log:?}");
    for number in 0..objects {
        let read = block_on(engine.get(&key_of(number)), || ()).expect("reads").expect("exists");
        assert!(read.as_bytes() == value_of(number, OVERWRITES, value_bytes), "object {number}");
    }
}

#[test]
fn objects_at_90_percent_are_overwritten_twenty_times_at_random() {
    overwrite(number_of("OCTOKV_LOG_OVERWRITE_VALUE_BYTES", 1_024) as usize);
}
