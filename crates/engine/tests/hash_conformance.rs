//! The hash engine against the model, sequentially and concurrently, and its space under sustained overwrites.

use crate::common::stable_memory::StableMemory;
use crate::common::{self, HashFixture, small_volume, volatile_engine};
use octokv_base::{Buffer, Key, Prng};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::HashKind;
use octokv_engine::conformance::{self, EngineFixture, Operation, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, open};
use octokv_engine::{DeleteOutcome, Durability, Engine, PutMode, PutOutcome};
use octokv_runtime::block_on;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// In parts, so that a failing list loses whole parts first; with the shares of [`Operation::random`].
fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let key = || 0..60_u64;
    let mode = prop_oneof![Just(PutMode::Upsert), Just(PutMode::AddOnly), Just(PutMode::UpdateOnly)];
    let bytes = prop_oneof![8..=64_usize, 8..=600_usize, 8..=5_000_usize, 8..=9_000_usize];
    let operation = prop_oneof![
        4 => key().prop_map(Operation::Get),
        3 => key().prop_map(Operation::Exist),
        3 => key().prop_map(Operation::Delete),
        8 => (key(), mode, bytes).prop_map(|(key, mode, bytes)| Operation::Put { key, mode, bytes }),
        1 => (0..60_usize, 1..=5_usize).prop_map(|(start, limit)| Operation::List { start, limit }),
        1 => any::<bool>().prop_map(|clean| Operation::Reopen { clean }),
    ];
    vec(vec(operation, 0..=78), 0..=78).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12, rng_seed: RngSeed::Fixed(22), failure_persistence: None, max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_and_reopenings_agree_with_the_model(
        unit_bytes in prop_oneof![Just(512), Just(4_096)],
        hash in prop_oneof![Just(HashKind::Xxh3), Just(HashKind::Sha1)],
        durability in prop_oneof![Just(Durability::PowerSafe), Just(Durability::Completed)],
        version in 1..=2_u16,
        order_of_completions in any::<u64>(),
        operations in operations(),
    ) {
        let mut fixture = HashFixture { durability, ..HashFixture::default() };
        (fixture.format.unit_bytes, fixture.format.hash) = (Some(unit_bytes), hash);
        fixture.format.version = version;
        let disk = PowerLossDisk::new(vec![0; 8 << 20], 512);
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Prng::new(order_of_completions);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        conformance::run_operations(&fixture, &device, &operations, &idle);
    }
}

#[test]
fn concurrent_operations_on_few_keys_are_linearizable() {
    for seed in 0..60 {
        let (disk, engines, mut random) = small_volume(seed, 3);
        let mut advance_io = |random: &mut Prng| disk.complete_one(random);
        conformance::concurrent(&engines, seed, 400, &mut advance_io);
        while disk.complete_one(&mut random) {}
    }
}

#[test]
fn a_memory_device_serves_without_a_journal() {
    let engine = volatile_engine(4 << 20, 512);
    for index in 0..500 {
        let key = key_of(index);
        let value = value_of(&key, index, 100);
        let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100);
        assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
    }
    for index in 0..500 {
        let key = key_of(index);
        let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
        assert_eq!(operation_of(&key, found.as_bytes()), index);
    }
    assert_eq!(engine.statistics().journal_batches, 0);
}

/// Fills `percent` of the space with values of `least..most` bytes, then overwrites each `rounds` times on average.
fn overwrite_at(engine: &HashEngine, percent: u64, rounds: u64, least: u64, most: u64) {
    let (mut random, mut model, mut next) = (Prng::new(percent), BTreeMap::new(), 0_u64);
    let put = |key: &Key, operation, length: usize| {
        let value = value_of(key, operation, length);
        block_on(
            engine.put(key, PutMode::Upsert, record_of(engine.record_layout(), key, &value), length),
            || (),
        )
        .unwrap()
    };
    let used = || engine.statistics().used_bytes * 100 / engine.statistics().capacity_bytes;
    while used() < percent {
        let key = Key::new(&next.to_le_bytes()).unwrap();
        assert_eq!(put(&key, next, (least + random.below(most - least)) as usize), PutOutcome::Stored);
        model.insert(key, next);
        next += 1;
    }
    let keys: Vec<Key> = model.keys().cloned().collect();
    let (mut full, mut total) = (0, 0);
    for round in 0..rounds * keys.len() as u64 {
        let key = &keys[random.below(keys.len() as u64) as usize];
        // The size distribution stays the same, and so does the fill level.
        total += 1;
        match put(key, next + round, (least + random.below(most - least)) as usize) {
            PutOutcome::Stored => drop(model.insert(key.clone(), next + round)),
            PutOutcome::Full => full += 1,
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
    overwrite_at(&volatile_engine(64 << 20, 512), 90, 20, 4_000, 4_001);
    overwrite_at(&volatile_engine(64 << 20, 512), 90, 10, 100, 12_000);
}

#[test]
fn space_is_used_again_with_a_journal_under_steady_overwrite_and_after_reopening() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let mut fixture = HashFixture { durability, ..HashFixture::default() };
        fixture.format.unit_bytes = Some(512);
        let device: Rc<dyn Device> = StableMemory::new(64 << 20, 512);
        block_on(fixture.format(Rc::clone(&device)), || ());
        let engine = block_on(fixture.open(Rc::clone(&device)), || ()).unwrap();
        overwrite_at(&engine, 90, 6, 100, 12_000);
        let before = engine.statistics();
        assert!(before.checkpoints > 2, "the ring wrapped");
        drop(engine);
        let engine = block_on(fixture.open(device), || ()).unwrap();
        let after = engine.statistics();
        assert_eq!((after.keys, after.used_bytes), (before.keys, before.used_bytes));
    }
}

#[test]
fn a_full_store_keeps_serving_and_recovers_by_deletes() {
    let engine = volatile_engine(4 << 20, 4096);
    let put = |index: u64, operation| {
        let key = key_of(index);
        let value = value_of(&key, operation, 3_000);
        block_on(
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 3_000),
            || (),
        )
        .unwrap()
    };
    let stored = (0..).take_while(|&index| put(index, index) == PutOutcome::Stored).count() as u64;
    assert_eq!(engine.statistics().used_bytes, engine.statistics().capacity_bytes);
    assert_eq!(put(0, 99), PutOutcome::Full, "an overwrite needs space for the new value first");
    for index in 0..stored {
        let key = key_of(index);
        let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
        assert_eq!(operation_of(&key, found.as_bytes()), index);
    }
    for index in 0..stored {
        assert_eq!(block_on(engine.delete(&key_of(index)), || ()), Ok(DeleteOutcome::Deleted));
    }
    assert_eq!(engine.statistics().used_bytes, 0);
    assert!((0..stored).all(|index| put(index, index) == PutOutcome::Stored));
}

#[test]
fn values_at_and_beyond_the_limit() {
    let engine = volatile_engine(16 << 20, 512);
    let key = Key::new(b"k").unwrap();
    for (bytes, want) in [
        (0, PutOutcome::Stored),
        (1, PutOutcome::Stored),
        (2 << 20, PutOutcome::Stored),
        ((2 << 20) + 1, PutOutcome::TooLong),
    ] {
        let record = Buffer::zeroed(engine.record_layout().value_offset(1) + bytes);
        assert_eq!(block_on(engine.put(&key, PutMode::Upsert, record, bytes), || ()), Ok(want), "{bytes}");
    }
    assert_eq!(block_on(engine.exist(&key), || ()), Ok(Some(2 << 20)));
}

#[test]
fn a_device_without_a_volume_is_rejected_and_left_unchanged() {
    let fixture = HashFixture::default();
    for (byte, want) in [(0, "not formatted"), (0x5a, "something else")] {
        let disk = PowerLossDisk::new(vec![byte; 4 << 20], 4096);
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Prng::new(1);
        let opened = block_on(open(&device, &common::pool(), fixture.open_config(), &fixture.format), || {
            disk.complete_one(&mut random);
        });
        let Err(error) = opened else { panic!("opened") };
        assert!(error.to_string().contains(want), "{error}");
        assert!(disk.contents().iter().all(|&b| b == byte));
    }
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(64 << 10, 4096).unwrap()));
    let opened = block_on(open(&memory, &common::pool(), fixture.open_config(), &fixture.format), || ());
    assert!(opened.is_err_and(|error| error.to_string().contains("are needed")));
}
