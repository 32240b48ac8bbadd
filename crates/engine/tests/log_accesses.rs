//! The device accesses of the log engine's operations (LEED §3.3: a GET has two, a PUT three, a DEL two), each counted alone and in batches.
//! Flushes are counted apart, and no segment images are kept in memory, but in the last test. The volumes are so large that no counted operation writes a directory, a marker or a checkpoint, or splits a segment.

use crate::common::log_fixture::LogFixture;
use crate::common::noted_device::NotedDevice;
use crate::common::pool;
use futures_util::future::join_all;
use octokv_base::{Key, Prng, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::{DeleteOutcome, Engine, FormatConfig, PutMode, PutOptions, PutOutcome, PutValue};
use octokv_runtime::block_on;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

const KEYS: u64 = 200;
const DISK_BYTES: u64 = 64 << 20;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// A volume whose chunks are not filled by what a test writes, so that no value has two extents, and no directory is written.
struct CountedVolume {
    device: Rc<NotedDevice>,
    engine: LogEngine,
}

impl CountedVolume {
    fn new(unit_bytes: u32, stores: u16) -> CountedVolume {
        CountedVolume::on(NotedDevice::in_memory(DISK_BYTES, 512), unit_bytes, stores, 0, || ())
    }

    fn on(
        device: Rc<NotedDevice>,
        unit_bytes: u32,
        stores: u16,
        recent_image_bytes: usize,
        mut complete: impl FnMut(),
    ) -> CountedVolume {
        let format = FormatConfig {
            unit_bytes: Some(unit_bytes),
            partitions: stores,
            chunk_bytes: Some(512 << 10),
            value_bytes_max: 64 << 10,
            ..LogFixture::default().format
        };
        let fixture = LogFixture {
            cores: 1,
            format,
            recent_image_bytes: Some(recent_image_bytes),
            ..LogFixture::default()
        };
        let as_device: Rc<dyn Device> = device.clone();
        block_on(fixture.format(Rc::clone(&as_device)), &mut complete);
        let volume = block_on(fixture.open_volume(&as_device), &mut complete).expect("opens");
        CountedVolume { device, engine: LogEngine::new(volume, as_device, pool()) }
    }

    /// The reads and writes of an operation, and its outcome.
    fn count<T>(&self, operation: impl Future<Output = T>) -> (T, usize, usize) {
        self.device.take_counts();
        let outcome = run(operation);
        let (reads, writes, _) = self.device.take_counts();
        (outcome, reads, writes)
    }

    fn splits(&self) -> u64 {
        self.engine.statistics().log.expect("it has logs").splits
    }

    fn split_all(&self) {
        while run(self.engine.split_once()).expect("no fault") {}
    }
}

async fn put(engine: &LogEngine, key: &Key, operation: u64, bytes: usize) -> PutOutcome {
    let record = record_of(engine.record_layout(), key, &value_of(key, operation, bytes));
    engine.put(key, PutMode::Upsert, record, bytes).await.expect("no fault")
}

#[test]
fn a_get_alone_has_two_accesses_a_put_three_and_a_delete_two() {
    for unit_bytes in [512, 4096] {
        let volume = CountedVolume::new(unit_bytes, 2);
        let (engine, mut loads) = (&volume.engine, 0);
        for index in 0..KEYS {
            let splits = volume.splits();
            let (outcome, reads, writes) = volume.count(put(engine, &key_of(index), 1, 256));
            assert_eq!(outcome, PutOutcome::Stored);
            // A put that splits a segment has the accesses of the split, too.
            if volume.splits() == splits {
                assert!(
                    matches!((reads, writes), (0 | 1, 2)),
                    "unit {unit_bytes}, key {index}: {reads}, {writes}"
                );
                loads += 1;
            }
        }
        assert!(loads > KEYS / 2, "{loads}");
        volume.split_all();
        let splits = volume.splits();
        for (index, bytes) in (0..KEYS).zip([256, 1_000, 4_000, 9_000].into_iter().cycle()) {
            let (key, at) = (key_of(index), || format!("unit {unit_bytes}, key {index}"));
            assert_eq!(volume.count(put(engine, &key, 2, bytes)), (PutOutcome::Stored, 1, 2), "{}", at());
            let (value, reads, writes) = volume.count(engine.get(&key));
            let value = value.expect("no fault").expect("is there");
            assert_eq!(
                (operation_of(&key, value.as_bytes()), value.as_bytes().len()),
                (2, bytes),
                "{}",
                at()
            );
            assert_eq!((reads, writes), (2, 0), "{}", at());
            assert_eq!(volume.count(engine.exist(&key)), (Ok(Some(bytes)), 1, 0), "{}", at());
            if index % 3 == 0 {
                let deleted = volume.count(engine.delete(&key));
                assert_eq!(deleted, (Ok(DeleteOutcome::Deleted), 1, 1), "{}", at());
                let (value, reads, writes) = volume.count(engine.get(&key));
                assert!(value.expect("no fault").is_none());
                assert_eq!((reads, writes), (1, 0), "{}", at());
                let missing = volume.count(engine.delete(&key));
                assert_eq!(missing, (Ok(DeleteOutcome::NotFound), 1, 0), "{}", at());
            }
        }
        assert_eq!(volume.splits(), splits, "nothing was split meanwhile");
    }
}

#[test]
fn empty_values_conditions_and_versions_take_no_more() {
    let volume = CountedVolume::new(512, 2);
    let engine = &volume.engine;
    for index in 0..KEYS {
        assert_eq!(run(put(engine, &key_of(index), 1, 300)), PutOutcome::Stored);
    }
    volume.split_all();
    let splits = volume.splits();
    for index in 0..20 {
        let key = key_of(index);
        // The value is in the entry.
        assert_eq!(volume.count(put(engine, &key, 2, 0)), (PutOutcome::Stored, 1, 1));
        let (value, reads, writes) = volume.count(engine.get(&key));
        assert_eq!((value.unwrap().unwrap().as_bytes(), reads, writes), (&[][..], 1, 0));
        let conditional = |mode, operation| {
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, 300));
            engine.put(&key, mode, record, 300)
        };
        // What is refused leaves nothing.
        let refused = volume.count(conditional(PutMode::AddOnly, 3));
        assert_eq!(refused, (Ok(PutOutcome::Exists), 1, 0));
        let stored = volume.count(conditional(PutMode::UpdateOnly, 4));
        assert_eq!(stored, (Ok(PutOutcome::Stored), 1, 2));
        let versioned = |version, operation| {
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, 300));
            let options = PutOptions { version: Version::from_bits(version), ..PutOptions::default() };
            engine.put_with(&key, PutValue::new(record, 300), options)
        };
        assert_eq!(volume.count(versioned(9, 5)), (Ok(PutOutcome::Stored), 1, 2));
        // The value is written beside the read of the key's segment, before that refuses it.
        let (older, reads, writes) = volume.count(versioned(8, 6));
        assert_ne!(older, Ok(PutOutcome::Stored));
        assert_eq!((reads, writes), (1, 1));
        // The record has to say the key's version, which only its segment tells: a second one is written.
        assert_eq!(volume.count(put(engine, &key, 7, 300)), (PutOutcome::Stored, 1, 3));
        let deleted = volume.count(engine.delete_with(&key, Version::from_bits(10)));
        assert_eq!(deleted, (Ok(DeleteOutcome::Deleted), 1, 1), "a tombstone");
    }
    assert_eq!(volume.splits(), splits, "nothing was split meanwhile");
}

/// A volume on a disk that completes operations in random order, one for each call of `complete_one`.
fn slow_volume(stores: u16) -> (PowerLossDisk, CountedVolume, Prng) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; DISK_BYTES as usize], 512), Prng::new(5));
    let device = NotedDevice::new(Rc::new(disk.clone()));
    let volume = CountedVolume::on(device, 512, stores, 0, || {
        disk.complete_one(&mut random);
    });
    for index in 0..KEYS {
        let stored = block_on(put(&volume.engine, &key_of(index), 1, 300), || {
            disk.complete_one(&mut random);
        });
        assert_eq!(stored, PutOutcome::Stored);
    }
    while block_on(volume.engine.split_once(), || {
        disk.complete_one(&mut random);
    })
    .expect("no fault")
    {}
    volume.device.take_counts();
    (disk, volume, random)
}

#[test]
fn the_value_of_a_put_is_written_while_its_segment_is_read() {
    let (disk, volume, mut random) = slow_volume(2);
    let key = key_of(7);
    let mut putting = pin!(put(&volume.engine, &key, 2, 300));
    assert!(putting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!((volume.device.reads.borrow().len(), volume.device.writes.borrow().len()), (1, 1));
    let stored = block_on(putting, || {
        disk.complete_one(&mut random);
    });
    assert_eq!((stored, volume.device.take_counts()), (PutOutcome::Stored, (1, 2, 1)));
}

#[test]
fn puts_that_wait_together_share_appends_and_flushes() {
    for stores in [1, 2, 4] {
        let (disk, volume, mut random) = slow_volume(stores);
        let splits = volume.splits();
        for writers in [2, 12, 48] {
            let engine = &volume.engine;
            let keys: Vec<Key> = (0..writers).map(key_of).collect();
            let stored = block_on(join_all(keys.iter().map(|key| put(engine, key, 2, 300))), || {
                disk.complete_one(&mut random);
            });
            assert!(stored.iter().all(|&outcome| outcome == PutOutcome::Stored));
            let (reads, writes, flushes) = volume.device.take_counts();
            let at = format!(
                "{writers} writers, {stores} stores: {reads} reads, {writes} writes, {flushes} flushes"
            );
            let writers = writers as usize;
            assert!(reads <= writers && writes <= 2 * writers && flushes <= writers as u64, "{at}");
            // Those of a store share appends, all of them flushes.
            if writers >= 12 * usize::from(stores) {
                assert!(writes < writers, "{at}");
            }
            assert!(writers == 2 || flushes < writers as u64, "{at}");
        }
        assert_eq!(volume.splits(), splits, "nothing was split meanwhile");
    }
}

#[test]
fn operations_on_a_segment_in_memory_do_not_read_it() {
    // A few segments, and not those of twenty keys.
    let device = NotedDevice::in_memory(DISK_BYTES, 512);
    let volume = CountedVolume::on(device, 512, 2, 2_000, || ());
    let engine = &volume.engine;
    for index in 0..KEYS {
        assert_eq!(run(put(engine, &key_of(index), 1, 300)), PutOutcome::Stored);
    }
    volume.split_all();
    let splits = volume.splits();
    let get = |index: u64| {
        let (value, reads, writes) = volume.count(engine.get(&key_of(index)));
        let value = value.expect("no fault").expect("is there");
        (operation_of(&key_of(index), value.as_bytes()), reads, writes)
    };
    let found = || engine.statistics().log.expect("it has logs").image_cache_hits;
    let mut read_first = 0;
    for index in 0..20 {
        for other in 100..160 {
            get(other);
        }
        let (key, found_before) = (key_of(index), found());
        let first = get(index);
        // The segment of a key may be that of one of the others.
        assert!(matches!(first, (1, 1 | 2, 0)), "key {index}: {first:?}");
        read_first += first.1 - 1;
        // As in a read-modify-write.
        assert_eq!(volume.count(put(engine, &key, 2, 300)), (PutOutcome::Stored, 0, 2));
        // By the image that the put wrote, and not the older one.
        assert_eq!(get(index), (2, 1, 0), "key {index}");
        assert_eq!(volume.count(engine.exist(&key)), (Ok(Some(300)), 0, 0));
        assert_eq!(volume.count(engine.delete(&key)), (Ok(DeleteOutcome::Deleted), 0, 1));
        assert_eq!(volume.count(engine.exist(&key)), (Ok(None), 0, 0));
        assert_eq!(volume.count(put(engine, &key, 3, 300)), (PutOutcome::Stored, 0, 2));
        assert_eq!(found() - found_before, 8 - first.1 as u64);
    }
    assert!(read_first > 10, "{read_first}");
    assert_eq!(volume.splits(), splits, "nothing was split meanwhile");
}
