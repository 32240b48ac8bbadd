//! Operations that end at once: equal to those that may wait, also when both change the same keys on several threads.

#![allow(clippy::disallowed_methods, reason = "the test's own threads contend for the same keys")]

use crate::common::{HashFixture, pool, volatile_engine};
use octokv_base::{BufferPool, DataRef, Key, Prng, Received, RecordLayout, RingRange, UnixTime, Version};
use octokv_device::late_memory::LateMemory;
use octokv_device::{Device, HeldBytes, MemoryDevice, RamDisk};
use octokv_engine::conformance::{
    EngineFixture, concurrent, key_of, operation_of, record_of, sequential, value_of,
};
use octokv_engine::hash::{HashEngine, open};
use octokv_engine::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, FoundNow, KeyLookup, KeySink, KeyStatus,
    LookupStage, NoIterator, PutMode, PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
};
use octokv_runtime::{ReactorHandle, block_on};
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

/// Executes what it can at once, with the lookup as far as a random stage, and the rest the long way.
struct DirectFirst {
    engine: HashEngine,
    random: RefCell<Prng>,
    at_once: Cell<u64>,
    buffers: BufferPool,
    /// Values that it reads where they are, with what they were.
    held: RefCell<Vec<(HeldBytes, Vec<u8>)>>,
    /// How many it holds between operations. None if operations of one thread overlap: they would wait for each other.
    loans_max: usize,
}

impl DirectFirst {
    fn new(engine: HashEngine, seed: u64, loans_max: usize) -> DirectFirst {
        DirectFirst {
            engine,
            random: RefCell::new(Prng::new(seed)),
            at_once: Cell::new(0),
            buffers: pool(),
            held: RefCell::default(),
            loans_max,
        }
    }

    fn lookup(&self, key: &Key) -> Option<KeyLookup> {
        let stages = self.random.borrow_mut().below(4);
        let mut lookup = self.engine.begin_lookup(key.as_bytes()).filter(|_| stages < 3)?;
        for stage in [LookupStage::Entry, LookupStage::Record].iter().take(stages as usize) {
            self.engine.advance_lookup(&mut lookup, *stage);
        }
        Some(lookup)
    }

    fn count<T>(&self, result: Option<T>) -> Option<T> {
        self.at_once.set(self.at_once.get() + u64::from(result.is_some()));
        result
    }

    /// Lets go of what it holds, which nothing may have changed: before it waits, since others may wait for that.
    fn end_loans(&self) {
        for (held, was) in self.held.borrow_mut().drain(..) {
            assert_eq!(held[..], was[..]);
        }
    }

    fn get_now(&self, key: &Key) -> Option<Option<StoredValue>> {
        let lookup = self.lookup(key)?;
        let mut stored = None;
        let keep = |value: &[u8]| {
            let mut buffer = self.buffers.take(value.len().max(1)).expect("a pool for all values");
            buffer[..value.len()].copy_from_slice(value);
            let bytes = value.len() as u32;
            let (version, expires_at) = (Version::NONE, UnixTime::NEVER);
            let buffer = buffer.into();
            StoredValue { buffer, offset: 0, bytes, value_bytes: bytes, version, expires_at }
        };
        let borrows = self.random.borrow_mut().one_in(2);
        let mut receive = |value: DataRef<'_>| {
            let value = value.as_bytes();
            if borrows {
                return Received::Lent(value.len());
            }
            stored = Some(keep(value));
            Received::Taken
        };
        match self.engine.get_now(key.as_bytes(), &lookup, &mut receive)? {
            FoundNow::Missing => assert!(stored.is_none()),
            FoundNow::Taken => assert!(stored.is_some()),
            FoundNow::Lent(value) => {
                let found = stored.insert(keep(&value));
                let mut held = self.held.borrow_mut();
                held.push((value, found.as_bytes().to_vec()));
                if held.len() > self.loans_max {
                    drop(held);
                    self.end_loans();
                }
            }
        }
        Some(stored)
    }
}

impl Engine for DirectFirst {
    type Iterator = NoIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        if value.more.is_none()
            && let Some(lookup) = self.lookup(key)
        {
            let offset = self.record_layout().value_offset(key.len());
            if let Some(bytes) = value.record.get(offset..offset + value.bytes)
                && let Some(outcome) =
                    self.count(self.engine.put_now(key.as_bytes(), &lookup, options.mode, bytes))
            {
                return Ok(outcome);
            }
        }
        self.end_loans();
        self.engine.put_with(key, value, options).await
    }
    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        if range == ValueRange::ALL
            && let Some(found) = self.count(self.get_now(key))
        {
            return Ok(found);
        }
        self.end_loans();
        self.engine.get_range(key, range).await
    }
    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        if let Some(lookup) = self.lookup(key)
            && let Some(outcome) = self.count(self.engine.delete_now(key.as_bytes(), &lookup))
        {
            return Ok(outcome);
        }
        self.end_loans();
        self.engine.delete_with(key, version).await
    }
    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        if let Some(lookup) = self.lookup(key)
            && let Some(found) = self.count(self.engine.exist_now(key.as_bytes(), &lookup))
        {
            let (version, expires_at) = (Version::NONE, octokv_base::UnixTime::NEVER);
            return Ok(found.map(|value_bytes| KeyStatus { value_bytes, version, expires_at }));
        }
        self.end_loans();
        self.engine.status(key).await
    }
    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        self.end_loans();
        self.engine.list(start, sink).await
    }
    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        self.engine.scan(range, since, sink).await
    }
    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        self.engine.forget_below(version).await
    }
    async fn give_up_space(&self, bytes: u64) -> Result<u64, EngineError> {
        self.engine.give_up_space(bytes).await
    }
    async fn flush(&self) -> Result<(), EngineError> {
        self.engine.flush().await
    }
    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        self.engine.maintain(handle, report).await;
    }
    async fn close(&self) -> Result<(), EngineError> {
        self.engine.close().await
    }
    fn record_layout(&self) -> RecordLayout {
        self.engine.record_layout()
    }
    fn has_abandoned(&self) -> bool {
        self.engine.has_abandoned()
    }

    fn statistics(&self) -> EngineStatistics {
        self.engine.statistics()
    }
}

/// Keeps a volatile volume in the process: a reopening finds everything.
#[derive(Default)]
struct DirectFixture(RefCell<Option<(Arc<octokv_engine::hash::HashVolume>, u64)>>);

impl EngineFixture for DirectFixture {
    type Engine = DirectFirst;
    async fn format(&self, device: Rc<dyn Device>) {
        let fixture = HashFixture::default();
        let volume = open(&device, &pool(), fixture.open_config(), &fixture.format).await.expect("opens");
        *self.0.borrow_mut() = Some((volume, 0));
    }
    async fn open(&self, device: Rc<dyn Device>) -> Result<DirectFirst, String> {
        let mut opened = self.0.borrow_mut();
        let (volume, openings) = opened.as_mut().ok_or("not formatted")?;
        *openings += 1;
        Ok(DirectFirst::new(HashEngine::new(Arc::clone(volume), 0, device, pool()), *openings, 0))
    }
}

#[test]
fn the_conformance_suite_holds_with_operations_that_end_at_once() {
    for seed in 0..40 {
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(4 << 20, 512).unwrap()));
        sequential(&DirectFixture::default(), &device, seed, 400, &RefCell::new(|| ()));
    }
}

#[test]
fn concurrent_operations_of_both_ways_are_linearizable() {
    for seed in 0..40 {
        let mut fixture = HashFixture::default();
        fixture.format.unit_bytes = Some(512);
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap()));
        let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ()).unwrap();
        let engines = [0, 1, 2].map(|core| {
            let engine = HashEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool());
            Rc::new(DirectFirst::new(engine, seed * 3 + core as u64, 0))
        });
        concurrent(&engines, seed, 300, |_| false);
        assert!(engines.iter().all(|engine| engine.at_once.get() > 20), "it is what was tested");
    }
}

#[test]
fn a_key_that_is_being_written_or_damaged_or_has_a_colliding_tag_is_left_to_the_long_way() {
    let engine = volatile_engine(1 << 20, 512);
    let (key, other) = (key_of(1), key_of(2));
    let put = |engine: &HashEngine, key: &Key, operation: u64| {
        let record = record_of(engine.record_layout(), key, &value_of(key, operation, 100));
        block_on(engine.put(key, PutMode::Upsert, record, 100), || ())
    };
    let lookup = |key: &Key| engine.begin_lookup(key.as_bytes()).expect("in memory");
    assert_eq!(
        engine.put_now(key.as_bytes(), &lookup(&key), PutMode::UpdateOnly, b"v"),
        Some(PutOutcome::NotFound)
    );
    assert_eq!(
        engine.put_now(key.as_bytes(), &lookup(&key), PutMode::AddOnly, b"v"),
        Some(PutOutcome::Stored)
    );
    assert_eq!(
        engine.put_now(key.as_bytes(), &lookup(&key), PutMode::AddOnly, b"w"),
        Some(PutOutcome::Exists)
    );
    assert_eq!(engine.exist_now(key.as_bytes(), &lookup(&key)), Some(Some(1)));
    // A lookup of before the change: its entry is not current.
    let mut stale = lookup(&key);
    engine.advance_lookup(&mut stale, LookupStage::Record);
    let mut stale_missing = lookup(&other);
    engine.advance_lookup(&mut stale_missing, LookupStage::Record);
    assert_eq!(put(&engine, &key, 1), Ok(PutOutcome::Stored));
    assert_eq!(put(&engine, &other, 2), Ok(PutOutcome::Stored));
    assert_eq!(engine.put_now(key.as_bytes(), &stale, PutMode::Upsert, b"x"), None);
    assert_eq!(engine.delete_now(key.as_bytes(), &stale), None);
    assert_eq!(engine.put_now(other.as_bytes(), &stale_missing, PutMode::Upsert, b"x"), None);
    let used_bytes = engine.statistics().used_bytes;
    // A value longer than the volume's limit.
    let too_long = vec![0; (2 << 20) + 1];
    assert_eq!(engine.put_now(key.as_bytes(), &lookup(&key), PutMode::Upsert, &too_long), None);
    let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
    assert_eq!(operation_of(&key, found.as_bytes()), 1);
    assert_eq!(engine.statistics().used_bytes, used_bytes);
    assert_eq!(engine.delete_now(key.as_bytes(), &lookup(&key)), Some(DeleteOutcome::Deleted));
    assert_eq!(engine.delete_now(key.as_bytes(), &lookup(&key)), Some(DeleteOutcome::NotFound));
    let found = engine.get_now(key.as_bytes(), &lookup(&key), |_| panic!("deleted"));
    assert!(matches!(found, Some(FoundNow::Missing)), "{found:?}");
}

/// Threads write few keys both ways. Each value names its writer's operation, and grows with it, so that a reader sees torn
/// values, values of other keys, and operations of one thread in the wrong order.
#[test]
fn threads_that_write_both_ways_lose_nothing_and_tear_nothing() {
    const THREADS: usize = 4;
    const KEYS: u64 = 3;
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(512);
    let disk = RamDisk::new(1 << 20, 512).unwrap();
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Arc::clone(&disk)));
    let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ()).unwrap();
    let at_once = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (volume, disk, at_once) = (Arc::clone(&volume), Arc::clone(&disk), &at_once);
            scope.spawn(move || {
                let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(disk));
                let engine =
                    DirectFirst::new(HashEngine::new(volume, thread, device, pool()), thread as u64, 4);
                let mut random = Prng::new(thread as u64);
                // By key and thread: the last operation that was seen.
                let mut seen = [[0; THREADS]; KEYS as usize];
                for operation in 1..=20_000_u64 {
                    let index = random.below(KEYS);
                    let key = key_of(index);
                    if random.below(2) == 0 {
                        let tagged = operation * THREADS as u64 + thread as u64;
                        let bytes = 64 + (tagged % 900) as usize;
                        let value = value_of(&key, tagged, bytes);
                        let record = record_of(engine.record_layout(), &key, &value);
                        let mut put = pin!(engine.put(&key, PutMode::Upsert, record, bytes));
                        let outcome = loop {
                            if let std::task::Poll::Ready(outcome) =
                                put.as_mut().poll(&mut Context::from_waker(Waker::noop()))
                            {
                                break outcome;
                            }
                            std::thread::yield_now();
                        };
                        assert_eq!(outcome, Ok(PutOutcome::Stored));
                    } else if let Some(value) = block_on(engine.get(&key), std::thread::yield_now).unwrap() {
                        let tagged = operation_of(&key, value.as_bytes());
                        assert_eq!(value.bytes as usize, 64 + (tagged % 900) as usize);
                        let (writer, number) = ((tagged % THREADS as u64) as usize, tagged / THREADS as u64);
                        let last = &mut seen[index as usize][writer];
                        assert!(*last <= number, "{number} of {writer} after {last}");
                        *last = number;
                    }
                }
                at_once.fetch_add(engine.at_once.get(), Ordering::Relaxed);
            });
        }
    });
    assert!(at_once.load(Ordering::Relaxed) > 20_000);
    let engine = HashEngine::new(volume, 0, device, pool());
    let statistics = engine.statistics();
    assert_eq!(statistics.keys, KEYS);
    let used = (0..KEYS).map(|index| {
        let found = block_on(engine.exist(&key_of(index)), || ()).unwrap().expect("written");
        ((64 + found) as u64).next_multiple_of(512)
    });
    assert_eq!(statistics.used_bytes, used.sum::<u64>());
    // All the rest is free, also what was allocated for changes that were not applied.
    let stored = (KEYS..).map(key_of).take_while(|key| {
        let record = record_of(engine.record_layout(), key, &[1]);
        block_on(engine.put(key, PutMode::Upsert, record, 1), || ()) == Ok(PutOutcome::Stored)
    });
    let units: u64 = stored.map(|key| (64 + key.len() as u64).div_ceil(512)).sum();
    let free_bytes = statistics.capacity_bytes - statistics.used_bytes;
    // The last key may have needed two units.
    assert!(free_bytes / 512 - units <= 2, "{units} units were free, of {free_bytes} B");
}

#[test]
fn a_value_whose_end_was_given_to_another_record_is_not_returned() {
    let mut fixture = HashFixture::default();
    (fixture.format.unit_bytes, fixture.format.bitmap_partitions_log2) = (Some(512), 0);
    let disk = RamDisk::new(1 << 20, 512).unwrap();
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Arc::clone(&disk)));
    let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ()).unwrap();
    let late: Rc<dyn Device> = Rc::new(LateMemory::new(disk));
    let engine = HashEngine::new(Arc::clone(&volume), 0, device, pool());
    let other_core = HashEngine::new(volume, 1, late, pool());
    let [key, first, second] = [1, 2, 3].map(key_of);
    let put = |key: &Key, value: &[u8]| {
        let lookup = engine.begin_lookup(key.as_bytes()).expect("in memory");
        engine.put_now(key.as_bytes(), &lookup, PutMode::Upsert, value)
    };
    // Four units, then a longer record beyond them: the four are free.
    let old = vec![1; 1_900];
    assert_eq!(put(&key, &old), Some(PutOutcome::Stored));
    let mut lookup = engine.begin_lookup(key.as_bytes()).expect("in memory");
    engine.advance_lookup(&mut lookup, LookupStage::Record);
    assert_eq!(put(&key, &vec![2; 4_000]), Some(PutOutcome::Stored));
    // Another core has allocated the first unit, and not written it; the next one is written.
    let record = record_of(other_core.record_layout(), &first, &[3; 100]);
    let mut unwritten = pin!(other_core.put(&first, PutMode::Upsert, record, 100));
    assert!(unwritten.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(put(&second, &[4; 300]), Some(PutOutcome::Stored));
    let mut found = Vec::new();
    let is_found = engine.get_now(key.as_bytes(), &lookup, |value| {
        found = value.as_bytes().to_vec();
        Received::Taken
    });
    assert!(is_found.is_none() || found == old, "{is_found:?}: a value that nobody wrote");
}
