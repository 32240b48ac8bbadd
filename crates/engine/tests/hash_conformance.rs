//! The hash engine against the model, alone and in crowds, and its space under long use.

mod common;

use common::{Hash, small, volatile};
use octokv_base::{Buffer, Key, Lba, Random, value_offset};
use octokv_device::power_loss::PowerDisk;
use octokv_device::{Device, Geometry, Memory, MemoryDevice, Pending};
use octokv_engine::conformance::{self, Subject, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, HashKind, open};
use octokv_engine::{Delete, Durability, Engine, Put, PutMode};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

#[test]
fn random_operations_and_reopenings_agree_with_the_model() {
    for seed in 0..12 {
        let mut subject = Hash::default();
        subject.format.unit_bytes = if seed % 2 == 0 { 512 } else { 4096 };
        subject.format.hash = if seed % 3 == 0 { HashKind::Sha1 } else { HashKind::Xxh3 };
        subject.durability = if seed % 4 == 0 { Durability::Device } else { Durability::Flush };
        let disk = PowerDisk::new(vec![0; 8 << 20], 512);
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Random::new(seed + 1_000);
        let run = RefCell::new(|| {
            disk.complete(&mut random);
        });
        conformance::sequential(&subject, &device, seed, 1_500, &run);
    }
}

#[test]
fn crowds_on_few_keys_are_linearizable() {
    for seed in 0..60 {
        let (disk, engines, mut random) = small(seed, 3);
        let mut world = |random: &mut Random| disk.complete(random);
        conformance::concurrent(&engines, seed, 400, &mut world);
        while disk.complete(&mut random) {}
    }
}

#[test]
fn a_memory_device_serves_without_a_journal() {
    let engine = volatile(4 << 20, 512);
    for index in 0..500 {
        let key = key_of(index);
        let value = value_of(&key, index, 100);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100);
        assert_eq!(block_on(put, || ()), Ok(Put::Stored));
    }
    for index in 0..500 {
        let key = key_of(index);
        let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
        assert_eq!(operation_of(&key, found.as_bytes()), index);
    }
    assert_eq!(engine.statistics().batches, 0);
}

/// Fills to `percent` of the space with values of `least..most` bytes, then overwrites many times over.
fn overwrite_at(engine: &HashEngine, percent: u64, rounds: u64, least: u64, most: u64) {
    let (mut random, mut model, mut next) = (Random::new(percent), BTreeMap::new(), 0_u64);
    let put = |key: &Key, operation, length: usize| {
        let value = value_of(key, operation, length);
        block_on(engine.put(key, PutMode::Upsert, record_of(key, &value), length), || ()).unwrap()
    };
    let used = || engine.statistics().used_bytes * 100 / engine.statistics().capacity_bytes;
    while used() < percent {
        let key = Key::new(&next.to_le_bytes()).unwrap();
        assert_eq!(put(&key, next, (least + random.below(most - least)) as usize), Put::Stored);
        model.insert(key, next);
        next += 1;
    }
    let keys: Vec<Key> = model.keys().cloned().collect();
    let (mut full, mut total) = (0, 0);
    for round in 0..rounds * keys.len() as u64 {
        let key = &keys[random.below(keys.len() as u64) as usize];
        // Sizes follow the same mixture, so the fill stays about where it is.
        total += 1;
        match put(key, next + round, (least + random.below(most - least)) as usize) {
            Put::Stored => drop(model.insert(key.clone(), next + round)),
            Put::Full => full += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(full, 0, "of {total} overwrites that found no space at {percent} % full");
    for (key, operation) in &model {
        let found = block_on(engine.get(key), || ()).unwrap().unwrap();
        assert_eq!(operation_of(key, found.as_bytes()), *operation);
    }
}

#[test]
fn space_is_used_again_under_steady_overwrite_at_90_percent() {
    overwrite_at(&volatile(64 << 20, 512), 90, 20, 4_000, 4_001);
    overwrite_at(&volatile(64 << 20, 512), 90, 10, 100, 12_000);
}

/// Memory that says it keeps what it is given.
struct Kept(MemoryDevice);

impl Device for Kept {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.0.geometry() }
    }
    fn name(&self) -> &str {
        "kept"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        self.0.write(at, buffer)
    }
    fn flush(&self) -> Pending {
        self.0.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.0.trim(at, blocks)
    }
}

#[test]
fn space_is_used_again_with_a_journal_under_steady_overwrite_and_after_reopening() {
    for durability in [Durability::Flush, Durability::Device] {
        let mut subject = Hash { durability, ..Hash::default() };
        subject.format.unit_bytes = 512;
        let memory = MemoryDevice::new(Memory::new(64 << 20, 512).unwrap());
        let device: Rc<dyn Device> = Rc::new(Kept(memory));
        block_on(subject.format(Rc::clone(&device)), || ());
        let engine = block_on(subject.open(Rc::clone(&device)), || ()).unwrap();
        overwrite_at(&engine, 90, 6, 100, 12_000);
        let before = engine.statistics();
        assert!(before.checkpoints > 2, "the ring went round");
        drop(engine);
        let engine = block_on(subject.open(device), || ()).unwrap();
        let after = engine.statistics();
        assert_eq!((after.keys, after.used_bytes), (before.keys, before.used_bytes));
    }
}

#[test]
fn a_full_store_says_so_keeps_serving_and_recovers_by_deletes() {
    let engine = volatile(4 << 20, 4096);
    let put = |index: u64, operation| {
        let key = key_of(index);
        let value = value_of(&key, operation, 3_000);
        block_on(engine.put(&key, PutMode::Upsert, record_of(&key, &value), 3_000), || ()).unwrap()
    };
    let stored = (0..).take_while(|&index| put(index, index) == Put::Stored).count() as u64;
    assert_eq!(engine.statistics().used_bytes, engine.statistics().capacity_bytes);
    assert_eq!(put(0, 99), Put::Full, "an overwrite needs space for the new value first");
    for index in 0..stored {
        let key = key_of(index);
        let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
        assert_eq!(operation_of(&key, found.as_bytes()), index);
    }
    for index in 0..stored {
        assert_eq!(block_on(engine.delete(&key_of(index)), || ()), Ok(Delete::Deleted));
    }
    assert_eq!(engine.statistics().used_bytes, 0);
    assert!((0..stored).all(|index| put(index, index) == Put::Stored));
}

#[test]
fn values_at_and_beyond_the_limit() {
    let engine = volatile(16 << 20, 512);
    let key = Key::new(b"k").unwrap();
    for (bytes, want) in
        [(0, Put::Stored), (1, Put::Stored), (2 << 20, Put::Stored), ((2 << 20) + 1, Put::TooLong)]
    {
        let record = Buffer::zeroed(value_offset(1) + bytes);
        assert_eq!(block_on(engine.put(&key, PutMode::Upsert, record, bytes), || ()), Ok(want), "{bytes}");
    }
    assert_eq!(block_on(engine.exist(&key), || ()), Ok(Some(2 << 20)));
}

#[test]
fn what_is_not_a_volume_of_ours_is_refused_and_left_alone() {
    let subject = Hash::default();
    for (byte, want) in [(0, "not formatted"), (0x5a, "something else")] {
        let disk = PowerDisk::new(vec![byte; 4 << 20], 4096);
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Random::new(1);
        let opened = block_on(open(&device, &common::pool(), subject.settings(), &subject.format), || {
            disk.complete(&mut random);
        });
        let Err(error) = opened else { panic!("opened") };
        assert!(error.to_string().contains(want), "{error}");
        assert!(disk.contents().iter().all(|&b| b == byte));
    }
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(Memory::new(64 << 10, 4096).unwrap()));
    let opened = block_on(open(&memory, &common::pool(), subject.settings(), &subject.format), || ());
    assert!(opened.is_err_and(|error| error.to_string().contains("are needed")));
}
