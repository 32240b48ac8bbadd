//! A cache of values in front of the hash engine, and of the engine in memory: the contract, linearizability, threads, drops.

#![allow(clippy::disallowed_methods, reason = "tests start threads")]

use crate::common::{HashFixture, pool};
use octokv_base::{BufferPool, DataRef, Key, Prng, Received, UnixTime, Version};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::cached::value_cache::CacheRead;
use octokv_engine::cached::{CachedEngine, CachedVolume, ValueCache};
use octokv_engine::common::abandoned::AbandonedCount;
use octokv_engine::conformance::{
    EngineFixture, Operation, concurrent, key_of, operation_of, record_of, run_operations, value_of,
};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::hash::{HashEngine, HashVolume};
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_engine::{
    AnyVolume, CacheStatistics, Engine, OpenConfig, PutMode, PutOptions, PutOutcome, PutValue, ValueRange,
    Volume,
};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

type CachedHash = CachedVolume<Arc<HashVolume>>;

const CACHE_BYTES: u64 = 64 << 10;

/// The hash engine with a small cache, and what the caches of all openings did.
struct CachedFixture {
    hash: HashFixture,
    cache_bytes: u64,
    caches: RefCell<Vec<Arc<ValueCache>>>,
}

impl Default for CachedFixture {
    fn default() -> CachedFixture {
        CachedFixture { hash: HashFixture::default(), cache_bytes: CACHE_BYTES, caches: RefCell::default() }
    }
}

impl CachedFixture {
    fn open_config(&self) -> OpenConfig {
        OpenConfig { cache_bytes: self.cache_bytes, ..self.hash.open_config() }
    }

    async fn open_volume(&self, devices: &[Rc<dyn Device>]) -> Result<CachedHash, String> {
        let opened = CachedHash::open(devices, &pool(), self.open_config(), &self.hash.format).await;
        let volume = opened.map_err(|error| error.to_string())?;
        self.caches.borrow_mut().push(Arc::clone(volume.cache()));
        Ok(volume)
    }

    fn sum(&self, figure: impl Fn(CacheStatistics) -> u64) -> u64 {
        self.caches.borrow().iter().map(|cache| figure(cache.statistics())).sum()
    }
}

impl EngineFixture for CachedFixture {
    type Engine = CachedEngine<HashEngine>;

    async fn format(&self, device: Rc<dyn Device>) {
        self.hash.format(device).await;
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<Self::Engine, String> {
        let devices = [device];
        Ok(self.open_volume(&devices).await?.engine(0, &devices, pool()))
    }
}

/// A new volume on a disk that completes operations in random order.
fn new_volume(fixture: &CachedFixture, seed: u64) -> (PowerLossDisk, Rc<dyn Device>, CachedHash, Prng) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; 2 << 20], 512), Prng::new(seed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(Rc::clone(&device)), &mut complete);
    let volume = block_on(fixture.open_volume(&[Rc::clone(&device)]), &mut complete).expect("opens");
    (disk, device, volume, random)
}

#[test]
fn the_conformance_suite_holds_with_a_cache_that_evicts() {
    let fixture = CachedFixture { cache_bytes: 16 << 10, ..CachedFixture::default() };
    for seed in 0..20 {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; 8 << 20], 512), Prng::new(seed));
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Prng::new(seed);
        // Many reads, of values that fit, and few reopenings, which empty the cache.
        let operations = (0..400).flat_map(|_| {
            let operation = match Operation::random(&mut random) {
                Operation::Put { key, mode, bytes } => Operation::Put { key, mode, bytes: bytes.min(1_500) },
                Operation::Reopen { .. } if random.below(10) > 0 => Operation::Exist(random.below(60)),
                operation => operation,
            };
            [operation, Operation::Get(random.below(60)), Operation::Get(random.below(60))]
        });
        let operations: Vec<Operation> = operations.collect();
        run_operations(&fixture, &device, &operations, &idle);
    }
    let hits = fixture.sum(|figures| figures.hits);
    let evictions = fixture.sum(|figures| figures.evictions);
    assert!(hits > 1_000 && evictions > 500, "{hits} hits, {evictions} evictions");
}

#[test]
fn concurrent_operations_on_several_cores_are_linearizable() {
    let fixture = CachedFixture::default();
    for seed in 0..60 {
        let (disk, device, volume, mut random) = new_volume(&fixture, seed);
        let engines = [0, 1, 2].map(|core| Rc::new(volume.engine(core, &[Rc::clone(&device)], pool())));
        concurrent(&engines, seed, 400, |random| disk.complete_one(random));
        while disk.complete_one(&mut random) {}
    }
    let hits = fixture.sum(|figures| figures.hits);
    assert!(hits > 1_000, "{hits} hits are what was tested");
}

/// Threads read and write few keys; a reader sees torn values, values of other keys, and operations of one writer in the
/// wrong order.
#[test]
fn threads_never_see_an_older_value_after_a_newer_one() {
    const THREADS: usize = 4;
    const KEYS: u64 = 3;
    let fixture = CachedFixture::default();
    let disk = RamDisk::new(1 << 20, 512).expect("memory");
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Arc::clone(&disk)));
    let volume = block_on(fixture.open_volume(&[device]), || ()).expect("opens");
    let at_once = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (volume, disk, at_once) = (volume.clone(), Arc::clone(&disk), &at_once);
            scope.spawn(move || {
                let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(disk));
                let engine = volume.engine(thread, &[device], pool());
                let mut random = Prng::new(thread as u64);
                // By key and thread: the last operation that was seen.
                let mut seen = [[0; THREADS]; KEYS as usize];
                for operation in 1..=30_000_u64 {
                    let index = random.below(KEYS);
                    let key = key_of(index);
                    if random.one_in(8) {
                        let tagged = operation * THREADS as u64 + thread as u64;
                        let bytes = 64 + (tagged % 900) as usize;
                        let value = value_of(&key, tagged, bytes);
                        let record = record_of(engine.record_layout(), &key, &value);
                        let put = engine.put(&key, PutMode::Upsert, record, bytes);
                        assert_eq!(poll_to_end(put), Ok(PutOutcome::Stored));
                        continue;
                    }
                    let mut found = None;
                    let lookup = engine.begin_lookup(key.as_bytes()).expect("it may be in the cache");
                    let mut receive = |data: DataRef<'_>| {
                        found = Some(data.as_bytes().to_vec());
                        Received::Taken
                    };
                    if engine.get_now(key.as_bytes(), &lookup, &mut receive).is_some() {
                        at_once.fetch_add(1, Ordering::Relaxed);
                    } else {
                        let value = poll_to_end(engine.get(&key)).expect("no fault");
                        found = value.map(|value| value.as_bytes().to_vec());
                    }
                    let Some(value) = found else { continue };
                    let tagged = operation_of(&key, &value);
                    assert_eq!(value.len(), 64 + (tagged % 900) as usize);
                    let (writer, number) = ((tagged % THREADS as u64) as usize, tagged / THREADS as u64);
                    let last = &mut seen[index as usize][writer];
                    assert!(*last <= number, "{number} of {writer} after {last}");
                    *last = number;
                }
            });
        }
    });
    let (at_once, statistics) = (at_once.load(Ordering::Relaxed), volume.statistics().cache);
    assert!(at_once > 10_000 && statistics.hits >= at_once, "{at_once} hits at once, {statistics:?}");
}

/// The cache alone, before an engine that is one number per key, with pauses where threads overtake each other.
#[test]
fn threads_that_pause_between_their_steps_never_see_an_older_number_after_a_newer_one() {
    const KEYS: u64 = 2;
    let cache = ValueCache::new(CACHE_BYTES, 1);
    let numbers: [AtomicU64; KEYS as usize] = Default::default();
    let hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cache, numbers, hits) = (&cache, &numbers, &hits);
            scope.spawn(move || {
                let (mut random, mut seen) = (Prng::new(thread), [0; KEYS as usize]);
                for _ in 0..20_000 {
                    let mut pause = || {
                        if random.one_in(4) {
                            std::thread::yield_now();
                        }
                        random.below(KEYS)
                    };
                    let index = pause();
                    let key = key_of(index);
                    let hash = cache.hash(key.as_bytes());
                    if pause() == 0 && pause() == 0 && pause() == 0 {
                        let change = cache.begin_change(hash, key.as_bytes());
                        pause();
                        numbers[index as usize].fetch_add(1, Ordering::SeqCst);
                        pause();
                        change.end();
                        continue;
                    }
                    let number = match cache.read(hash, key.as_bytes()) {
                        CacheRead::Hit(value) => {
                            hits.fetch_add(1, Ordering::Relaxed);
                            u64::from_le_bytes(value.bytes[..].try_into().expect("eight bytes"))
                        }
                        CacheRead::Miss(lease) => {
                            pause();
                            let number = numbers[index as usize].load(Ordering::SeqCst);
                            pause();
                            if let Some(lease) = lease {
                                cache.fill(lease, &key, &number.to_le_bytes(), Version::NONE);
                            }
                            number
                        }
                    };
                    let last = &mut seen[index as usize];
                    assert!(*last <= number, "{number} after {last}");
                    *last = number;
                }
            });
        }
    });
    assert!(hits.load(Ordering::Relaxed) > 5_000, "{hits:?}");
}

fn poll_to_end<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return outcome;
        }
        std::thread::yield_now();
    }
}

#[test]
fn futures_may_be_dropped_after_any_poll_and_their_keys_are_cached_again() {
    let mut fixture = CachedFixture::default();
    fixture.hash.format.unit_bytes = Some(512);
    let (disk, device, volume, mut random) = new_volume(&fixture, 1);
    let engine = volume.engine(0, &[device], pool());
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    let clauses = Clauses { engine: &engine, idle: &idle };
    clauses.abandoned_writes(&|| volume.is_idle());
    let half_done = clauses.dropped_futures(Some(&|| volume.is_idle()));
    assert!(half_done >= 15, "{half_done} futures were dropped half done");
    assert!(!volume.is_read_only());
    let hits = || volume.statistics().cache.hits;
    for key in [key_of(1), key_of(2)] {
        let before = hits();
        let record = record_of(engine.record_layout(), &key, &value_of(&key, 1, 100));
        let put = engine.put(&key, PutMode::Upsert, record, 100);
        block_on(put, || (idle.borrow_mut())()).expect("no fault");
        for _ in 0..2 {
            block_on(engine.get(&key), || (idle.borrow_mut())()).expect("no fault").expect("written");
        }
        assert!(hits() > before, "fills of {key} are blocked");
    }
}

#[test]
fn a_put_whose_caller_is_gone_keeps_its_key_out_of_the_cache_until_it_has_ended() {
    let fixture = CachedFixture::default();
    let (disk, device, volume, mut random) = new_volume(&fixture, 2);
    let engine = volume.engine(0, &[device], pool());
    let key = key_of(1);
    let put = |operation| {
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, 100));
        engine.put(&key, PutMode::Upsert, record, 100)
    };
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(put(1), &mut complete).expect("no fault");
    block_on(engine.get(&key), &mut complete).expect("no fault");
    assert_eq!(engine.statistics().cache.entries, 1);
    {
        let mut dropped = pin!(put(2));
        assert!(dropped.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(engine.statistics().cache.entries, 0, "removed before the engine begins");
    }
    assert!(!volume.is_idle());
    let read = |complete: &mut dyn FnMut()| {
        let found = block_on(engine.get(&key), complete).expect("no fault").expect("written");
        operation_of(&key, found.as_bytes())
    };
    assert_eq!(read(&mut complete), 1, "nothing runs the put");
    assert_eq!(engine.statistics().cache.entries, 0, "the put may yet be applied");
    let mut abandoned = pin!(engine.run_abandoned());
    while !volume.is_idle() {
        assert!(abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        complete();
    }
    assert_eq!((read(&mut complete), read(&mut complete)), (2, 2));
    assert_eq!(engine.statistics().cache.entries, 1);
}

const MEMORY_CONFIG: MemoryConfig =
    MemoryConfig { ring_seed: 3, devices: 2, partition_bytes: 1 << 20, value_bytes_max: 1 << 16 };

fn cached_memory() -> (CachedEngine<MemoryEngine>, TestClock) {
    let clock = TestClock::default();
    let wall = clock.clone();
    let engine = MemoryEngine::new(MEMORY_CONFIG, octokv_engine::WallClock::new(move || wall.now()));
    let cache = Arc::new(ValueCache::new(CACHE_BYTES, 1));
    (CachedEngine::new(engine, cache, AbandonedCount::default()), clock)
}

#[test]
fn the_clauses_on_versions_expiry_ranges_and_space_hold() {
    let holds = |clause: &dyn Fn(&Clauses<'_, CachedEngine<MemoryEngine>>, &TestClock)| {
        let (engine, clock) = cached_memory();
        clause(&Clauses { engine: &engine, idle: &RefCell::new(|| ()) }, &clock);
        engine.statistics().cache.hits
    };
    let mut hits = 0;
    hits += holds(&|clauses, _| clauses.versions());
    hits += holds(&|clauses, _| clauses.conditions());
    hits += holds(&|clauses, clock| clauses.expiry(clock));
    hits += holds(&|clauses, _| clauses.buffers_and_ranges());
    hits += holds(&|clauses, _| clauses.scans());
    hits += holds(&|clauses, _| clauses.gives_up_space());
    for seed in 0..20 {
        hits += holds(&|clauses, _| clauses.random_writes(seed, 400));
    }
    assert!(hits > 100, "{hits}");
}

#[test]
fn a_value_that_expires_is_not_kept_and_a_part_of_a_value_is_read_from_the_whole() {
    let (engine, clock) = cached_memory();
    let (key, value) = (key_of(1), value_of(&key_of(1), 5, 100));
    let put = |expires_at| {
        let record = record_of(engine.record_layout(), &key, &value);
        let options = PutOptions { expires_at, version: Version::NONE, mode: PutMode::Upsert };
        poll_to_end(engine.put_with(&key, PutValue::new(record, 100), options)).expect("no fault")
    };
    let part = |offset, bytes_max| {
        let found = poll_to_end(engine.get_range(&key, ValueRange { offset, bytes_max })).expect("no fault");
        found.map(|found| (found.as_bytes().to_vec(), found.value_bytes))
    };
    clock.set(UnixTime(10));
    put(UnixTime(20));
    assert!(part(0, 200).is_some());
    assert_eq!(engine.statistics().cache.entries, 0);
    clock.set(UnixTime(20));
    assert!(part(0, 200).is_none());
    put(UnixTime::NEVER);
    assert_eq!(part(10, 5), Some((value[10..15].to_vec(), 100)));
    assert_eq!(engine.statistics().cache.entries, 0, "a part is not a value");
    assert_eq!(part(0, 100), Some((value.clone(), 100)));
    assert_eq!(engine.statistics().cache.entries, 1);
    let hits = engine.statistics().cache.hits;
    assert_eq!(part(10, 5), Some((value[10..15].to_vec(), 100)));
    assert_eq!(part(90, 50), Some((value[90..].to_vec(), 100)));
    assert_eq!(part(200, 50), Some((Vec::new(), 100)));
    let status = poll_to_end(engine.status(&key)).expect("no fault").expect("it exists");
    assert_eq!((status.value_bytes, status.version), (100, Version::NONE));
    assert_eq!(engine.statistics().cache.hits, hits + 4);
}

#[test]
fn a_cache_is_what_the_configuration_of_the_opening_says_and_is_gone_with_its_volume() {
    let fixture = CachedFixture::default();
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).expect("memory")));
    let open = |cache_bytes| {
        let config = OpenConfig { cache_bytes, ..fixture.open_config() };
        block_on(AnyVolume::open(&[Rc::clone(&device)], &pool(), config, &fixture.hash.format), || ())
    };
    let plain = open(0).expect("opens");
    assert!(matches!(plain, AnyVolume::Hash(_)));
    assert_eq!(plain.statistics().cache, CacheStatistics::default());
    let AnyVolume::CachedHash(cached) = open(1 << 20).expect("opens") else { panic!("without a cache") };
    assert_eq!(cached.statistics().cache.capacity_bytes, 1 << 20);
    let engine = cached.engine(0, &[Rc::clone(&device)], BufferPool::new(1 << 20));
    let key: Key = key_of(1);
    let record = record_of(engine.record_layout(), &key, b"value");
    poll_to_end(engine.put(&key, PutMode::Upsert, record, 5)).expect("no fault");
    poll_to_end(engine.get(&key)).expect("no fault");
    // A socket still sends the value.
    let sending = poll_to_end(engine.get(&key)).expect("no fault").expect("written");
    let cache = Arc::downgrade(cached.cache());
    drop((engine, cached));
    assert!(cache.upgrade().is_none());
    assert_eq!(sending.as_bytes(), b"value");
}
