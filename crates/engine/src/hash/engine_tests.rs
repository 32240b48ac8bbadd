//! Operations of the hash engine in cases that need its inside: colliding tags, held locks, epochs and owners.

use super::*;
use crate::PrefetchStage;
use crate::common::record::RecordFormat;
use crate::conformance::{key_of, record_of, value_of};
use crate::contract_clauses::Clauses;
use crate::hash::{HashEngine, index, open};
use crate::{Engine, FormatConfig, OpenConfig, WallClock};
use octokv_device::{MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

fn volatile_engine() -> HashEngine {
    let pool = BufferPool::new(1 << 20);
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap()));
    let config = OpenConfig {
        durability: crate::Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let format_config = FormatConfig { unit_bytes: Some(512), ..FormatConfig::default() };
    let volume = block_on(open(&device, &pool, config, &format_config), || ()).unwrap();
    HashEngine::new(volume, 0, device, pool)
}

#[test]
fn prefetches_change_no_result_whenever_they_come() {
    let engine = volatile_engine();
    let keys: Vec<Key> = (0..50_u32).map(|i| Key::new(&i.to_le_bytes()).unwrap()).collect();
    let prefetch_all = |key: &Key| {
        for stage in
            [PrefetchStage::Record, PrefetchStage::Partition, PrefetchStage::Entry, PrefetchStage::Record]
        {
            engine.prefetch(key, stage);
        }
    };
    // Before the puts, after them, and after the deletes.
    keys.iter().for_each(prefetch_all);
    for key in &keys {
        let value = value_of(key, 1, 50);
        let put = engine.put(key, PutMode::Upsert, record_of(engine.record_layout(), key, &value), 50);
        assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
        prefetch_all(key);
        let got = block_on(engine.get(key), || ()).unwrap().unwrap();
        assert_eq!(got.as_bytes(), value);
    }
    for key in &keys {
        assert_eq!(block_on(engine.delete(key), || ()), Ok(DeleteOutcome::Deleted));
        prefetch_all(key);
        assert!(block_on(engine.get(key), || ()).unwrap().is_none());
    }
    // While the partitions are locked.
    let guards: Vec<_> = engine.volume().partitions.iter().map(|partition| partition.state.lock()).collect();
    keys.iter().for_each(prefetch_all);
    drop(guards);
}

#[test]
fn a_put_waits_for_readers_that_hold_space_back_and_is_full_without_them() {
    let (pool, disk) = (BufferPool::new(1 << 20), RamDisk::new(1 << 20, 512).unwrap());
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(disk));
    let config = OpenConfig {
        durability: crate::Durability::PowerSafe,
        cores: 2,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let format_config = FormatConfig { unit_bytes: Some(512), ..FormatConfig::default() };
    let volume = block_on(open(&device, &pool, config, &format_config), || ()).unwrap();
    let [engine, reader] =
        [0, 1].map(|core| HashEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool.clone()));
    let put = |index, operation| {
        let (engine, key) = (&engine, key_of(index));
        async move {
            let value = value_of(&key, operation, 40_000);
            let record = record_of(engine.record_layout(), &key, &value);
            engine.put(&key, PutMode::Upsert, record, value.len()).await
        }
    };
    let poll = |put: Pin<&mut dyn Future<Output = _>>| put.poll(&mut Context::from_waker(Waker::noop()));
    let guard = reader.core.enter_epoch();
    let mut overwrites = 0;
    let mut waiting = loop {
        let mut next = Box::pin(put(0, overwrites));
        match poll(next.as_mut()) {
            Poll::Ready(outcome) => assert_eq!(outcome, Ok(PutOutcome::Stored)),
            Poll::Pending => break next,
        }
        overwrites += 1;
    };
    assert!((10..30).contains(&overwrites), "{overwrites} of 40,000 bytes in a MiB");
    assert!(poll(waiting.as_mut()).is_pending());
    drop(guard);
    assert_eq!(poll(waiting.as_mut()), Poll::Ready(Ok(PutOutcome::Stored)));
    let get = block_on(engine.get(&key_of(0)), || ()).unwrap().unwrap();
    assert_eq!(get.as_bytes(), value_of(&key_of(0), overwrites, 40_000));
    let stored = (1..30).take_while(|&index| block_on(put(index, 0), || ()) == Ok(PutOutcome::Stored));
    assert!((10..29).contains(&stored.count()));
    assert_eq!(block_on(put(30, 0), || ()), Ok(PutOutcome::Full));
}

#[test]
fn keys_have_owners_only_once_they_are_assigned() {
    let engine = volatile_engine();
    assert!(!engine.has_owner_cores());
    engine.volume().assign_owner_cores(3);
    assert!(engine.has_owner_cores());
    Clauses { engine: &engine, idle: &RefCell::new(|| ()) }.owner_cores(3);
    for core in 0..3 {
        let owned = (0..300).filter(|&index| engine.owner_core(&key_of(index)) == Some(core)).count();
        assert!((60..150).contains(&owned), "core {core} owns {owned} of 300 keys");
    }
}

#[test]
fn keys_whose_tags_collide_are_kept_apart() {
    let engine = volatile_engine();
    let (one, other) = (Key::new(b"one").unwrap(), Key::new(b"other").unwrap());
    let put = |key: &Key, operation| {
        let value = value_of(key, operation, 50);
        let put = engine.put(key, PutMode::Upsert, record_of(engine.record_layout(), key, &value), 50);
        assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
    };
    put(&one, 1);
    // The index also maps the other key's tag to the first record.
    let (hash, first_record) =
        (engine.volume().hash(&other), engine.volume().candidates(engine.volume().hash(&one))[0]);
    let (new, units) = (first_record.location, first_record.units as u32);
    engine.volume().apply(
        &IndexChange {
            hash,
            new_location: new,
            old_location: 0,
            sequence: 0,
            units,
            flags: RecordFlags::NONE,
        },
        0,
    );
    let get = |key: &Key| block_on(engine.get(key), || ()).unwrap();
    assert!(get(&other).is_none());
    assert_eq!(block_on(engine.delete(&other), || ()), Ok(DeleteOutcome::NotFound));
    put(&other, 2);
    assert_eq!(engine.volume().candidates(hash).len(), 2, "beside it, without replacing it");
    // A key longer than a block is not damage for a short key with the same tag.
    let long = Key::new(&[b'l'; 1_000]).unwrap();
    let short = Key::new(b"short").unwrap();
    put(&long, 3);
    let record_ref = engine.volume().candidates(engine.volume().hash(&long))[0];
    let sequence = 2;
    assert_eq!(index::fingerprint(RecordFormat::V1, sequence, RecordFlags::NONE), record_ref.fingerprint);
    let (hash, new, units) = (engine.volume().hash(&short), record_ref.location, record_ref.units as u32);
    engine.volume().apply(
        &IndexChange { hash, new_location: new, old_location: 0, sequence, units, flags: RecordFlags::NONE },
        0,
    );
    assert!(get(&short).is_none());
    assert_eq!(block_on(engine.exist(&short), || ()), Ok(None));
    put(&short, 4);
    assert_eq!(get(&long).unwrap().as_bytes(), value_of(&long, 3, 50));
    assert_eq!(get(&one).unwrap().as_bytes(), value_of(&one, 1, 50));
    assert_eq!(get(&other).unwrap().as_bytes(), value_of(&other, 2, 50));
}
