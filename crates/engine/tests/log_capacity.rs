//! What a full volume of the log engine stores, beside what its format allows, by arithmetic of docs/FORMATS.md.
//!
//! ```text
//!   an object   entry in the key log: 1 flags, 1 length of the key, 2 of the value, 5 place, key
//!               record in the value log: 16 header, key, value, zeros to the granule; 4 id in the directory
//!   a segment   its entries in buckets of a unit, of which the first has 80 B besides and the others 8
//!   a chunk     32 trailer of the directory, if it is of a value log
//! ```
//! Stated fill: `capacity_bytes`, which is all chunks but a sixteenth ([`octokv_engine::log::space_limits`]).

use crate::common::log_fixture::LogFixture;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::Key;
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, record_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::open::open;
use octokv_engine::{Engine, FormatConfig, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::rc::Rc;

const DISK_BYTES: u64 = 64 << 20;
const UNIT_BYTES: f64 = 512.0;
const CHUNK_BYTES: u32 = 16 << 10;
const STORES: u16 = 4;
const KEY_BYTES: u64 = 16;
const GRANULE_BYTES: u64 = 8;
/// The buckets of the longest image of these chunks: half of a chunk.
const CHAIN_MAX: f64 = 16.0;
const BUCKET_0_BYTES: f64 = UNIT_BYTES - 80.0;
const BUCKET_BYTES: f64 = UNIT_BYTES - 8.0;

/// The bytes of an entry whose value has 128 to 16,383 bytes.
const ENTRY_BYTES: f64 = 1.0 + 1.0 + 2.0 + 5.0 + KEY_BYTES as f64;

/// The bytes that an object takes in a value log: record, id, and its part of the trailer.
fn value_log_bytes(value_bytes: u64) -> f64 {
    let record = (16 + KEY_BYTES + value_bytes).next_multiple_of(GRANULE_BYTES) as f64 + 4.0;
    record * f64::from(CHUNK_BYTES) / (f64::from(CHUNK_BYTES) - 32.0)
}

/// The bytes of the key log for each object when all segments are as long as an image can be: no volume can have fewer.
fn key_log_bytes_least() -> f64 {
    let entries = BUCKET_0_BYTES + (CHAIN_MAX - 1.0) * BUCKET_BYTES;
    ENTRY_BYTES * CHAIN_MAX * UNIT_BYTES / entries
}

/// The buckets of a segment with so many objects.
fn buckets_of(objects: u32) -> f64 {
    let rest = f64::from(objects) * ENTRY_BYTES - BUCKET_0_BYTES;
    if rest <= 0.0 { 1.0 } else { 1.0 + (rest / BUCKET_BYTES).ceil() }
}

/// The mean buckets of a segment whose number of objects has Poisson's distribution.
fn mean_buckets(mean_objects: f64) -> f64 {
    let (mut probability, mut sum) = ((-mean_objects).exp(), 0.0);
    for objects in 0..1_000 {
        sum += probability * buckets_of(objects);
        probability *= mean_objects / f64::from(objects + 1);
    }
    sum
}

/// The bytes of the key log for each of so many objects of a store with so many segments: of linear hashing, the split ones have half of the keys of the others.
fn key_log_bytes(objects: f64, segments: f64) -> f64 {
    let level = segments.log2().floor().exp2();
    let split = segments - level;
    let units =
        2.0 * split * mean_buckets(objects / (2.0 * level)) + (level - split) * mean_buckets(objects / level);
    units * UNIT_BYTES / objects
}

/// A key of [`KEY_BYTES`].
fn key_of(number: u64) -> Key {
    Key::new(format!("{number:016}").as_bytes()).expect("a key")
}

/// Fills a new volume until a put is refused. Gives the objects, the segments of a store, and the bytes that live data may take.
fn fill(value_bytes: u64) -> (f64, f64, f64) {
    let format = FormatConfig {
        partitions: STORES,
        chunk_bytes: Some(CHUNK_BYTES),
        value_bytes_max: 4_096,
        ..LogFixture::default().format
    };
    let fixture = LogFixture { cores: 1, format, ..LogFixture::default() };
    let device: Rc<dyn Device> = StableMemory::new(DISK_BYTES, UNIT_BYTES as u32);
    block_on(fixture.format(Rc::clone(&device)), || ());
    let opened = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ());
    let volume = opened.expect("opens");
    let engine = LogEngine::new(volume, device, pool());
    let mut value = vec![0; value_bytes as usize];
    for number in 0.. {
        value[..8].copy_from_slice(&u64::to_le_bytes(number));
        let key = key_of(number);
        let record = record_of(engine.record_layout(), &key, &value);
        let put = engine.put(&key, PutMode::Upsert, record, value.len());
        match block_on(put, || ()) {
            Ok(PutOutcome::Stored) => {}
            refused => {
                assert_eq!(refused, Ok(PutOutcome::Full));
                break;
            }
        }
    }
    let statistics = engine.statistics();
    // The last value is there, and the chunks are nearly all of the device.
    let last = statistics.keys - 1;
    let read = block_on(engine.get(&key_of(last)), || ()).expect("reads").expect("exists");
    assert_eq!(read.as_bytes()[..8], last.to_le_bytes());
    let log = statistics.log.expect("a log engine");
    assert!(log.chunks * log.chunk_bytes * 100 > DISK_BYTES * 98, "{} chunks", log.chunks);
    assert!(statistics.capacity_bytes * 16 >= log.chunks * log.chunk_bytes * 15, "{statistics:?}");
    let segments = log.segments as f64 / f64::from(STORES);
    (statistics.keys as f64, segments, statistics.capacity_bytes as f64)
}

/// Asserts what part of the user's bytes that the format allows is stored: with segments of the number that the volume has, and with the longest that there
/// can be, which would make a put write the most.
fn assert_stored(value_bytes: u64) {
    let (objects, segments, capacity_bytes) = fill(value_bytes);
    let part_of =
        |key_log_bytes: f64| objects * (value_log_bytes(value_bytes) + key_log_bytes) / capacity_bytes;
    let of_format = part_of(key_log_bytes(objects / f64::from(STORES), segments));
    let of_longest = part_of(key_log_bytes_least());
    let share = objects * (KEY_BYTES + value_bytes) as f64 / capacity_bytes;
    println!(
        "{value_bytes} B: {objects} objects, {share:.4} of the capacity, {of_format:.4} of what the format allows, {of_longest:.4} with the longest segments"
    );
    assert!((0.97..1.005).contains(&of_format), "{of_format}");
    assert!((0.97..1.0).contains(&of_longest), "{of_longest}");
}

#[test]
fn a_full_volume_of_256_bytes_has_97_percent_of_what_the_format_allows() {
    assert_stored(256);
}

#[test]
fn a_full_volume_of_1_kib_has_97_percent_of_what_the_format_allows() {
    assert_stored(1024);
}
