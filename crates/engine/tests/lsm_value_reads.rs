//! The reads of values that lie in segments: those of gets, which the cache spares; and those ahead of an iterator: records side by side are read together, and one that
//! cannot be read costs none of the others; a full compaction lays them down side by side.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::noted_device::NotedDevice;
use crate::common::pool;
use crate::lsm_faults::AllPairs;
use futures_util::future::join;
use octokv_base::{BufferPool, Key, Lba, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::lsm::prefetch_degree::PrefetchMode;
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{Engine, EngineError, IteratorOptions, IteratorProgress, PutMode, PutOutcome};
use octokv_runtime::{block_on, yield_now};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

const BLOCK_BYTES: u64 = 512;
const VALUE_BYTES: usize = 3900;
/// Blocks of most records: header, key and value.
const RECORD_BLOCKS: u64 = 8;
const VALUES: u64 = 64;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// A volume of values of [`VALUE_BYTES`], if not said otherwise.
struct ScannedVolume {
    device: Rc<NotedDevice>,
    faults: FaultPlan,
    engine: LsmEngine,
    value_bytes: usize,
}

impl ScannedVolume {
    fn new(adjust: fn(&mut TreeSettings)) -> ScannedVolume {
        ScannedVolume::with(&LsmFixture::default(), adjust)
    }

    fn with(fixture: &LsmFixture, adjust: fn(&mut TreeSettings)) -> ScannedVolume {
        ScannedVolume::in_pool(fixture, adjust, pool())
    }

    fn in_pool(fixture: &LsmFixture, adjust: fn(&mut TreeSettings), pool: BufferPool) -> ScannedVolume {
        let noted = NotedDevice::in_memory(24 << 20, BLOCK_BYTES as u32);
        let faults = FaultPlan::default();
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(noted.clone(), faults.clone()));
        run(fixture.format(Rc::clone(&device)));
        let volume = run(open_with(&device, &pool, fixture.open_config(), &fixture.format, adjust));
        let engine = LsmEngine::new(volume.expect("opens"), 0, device, pool);
        ScannedVolume { device: noted, faults, engine, value_bytes: VALUE_BYTES }
    }

    fn in_the_order_of_keys(adjust: fn(&mut TreeSettings)) -> ScannedVolume {
        let volume = ScannedVolume::new(adjust);
        let mut keys: Vec<Key> = (0..VALUES).map(key_of).collect();
        keys.sort();
        keys.iter().for_each(|key| assert_eq!(volume.put(key, 1), Ok(PutOutcome::Stored)));
        volume
    }

    async fn store(&self, key: &Key, operation: u64) -> Result<PutOutcome, EngineError> {
        let record = record_of(self.engine.record_layout(), key, &value_of(key, operation, self.value_bytes));
        self.engine.put(key, PutMode::Upsert, record, self.value_bytes).await
    }

    fn put(&self, key: &Key, operation: u64) -> Result<PutOutcome, EngineError> {
        run(self.store(key, operation))
    }

    /// The pairs of a scan of everything, its errors, and its reads.
    fn scan(&self) -> (AllPairs, Vec<EngineError>, Vec<(u64, u64)>) {
        self.device.reads.borrow_mut().clear();
        let iterator = run(self.engine.create_iterator(IteratorOptions::default())).unwrap().unwrap();
        let (mut sink, mut errors) = (AllPairs::default(), Vec::new());
        loop {
            match run(self.engine.next_pairs(&iterator, &mut sink)) {
                Ok(IteratorProgress::AtEnd) => break,
                Ok(IteratorProgress::HasNext) => {}
                Err(error) => errors.push(error),
            }
            assert!(errors.len() < 10, "it does not get on: {errors:?}");
        }
        (sink, errors, self.device.reads.take())
    }
}

fn with_long_segments(settings: &mut TreeSettings) {
    make_small(settings);
    settings.segment_bytes = 1 << 20;
    // Keys stay in memory, so that all reads are those of values.
    settings.memtable_bytes = 1 << 20;
}

fn with_a_fixed_degree(settings: &mut TreeSettings) {
    with_long_segments(settings);
    settings.prefetch = PrefetchMode::Fixed(4);
}

#[test]
fn values_that_were_put_in_the_order_of_keys_share_reads() {
    let (sink, errors, reads) = ScannedVolume::in_the_order_of_keys(with_long_segments).scan();
    assert_eq!((sink.pairs.len() as u64, errors), (VALUES, vec![]));
    // Each block once.
    assert!(reads.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0), "{reads:?}");
    // A degree of four, of which two to three share a read.
    assert!(reads.len() as u64 <= VALUES / 2, "{reads:?}");
    let (_, _, fixed) = ScannedVolume::in_the_order_of_keys(with_a_fixed_degree).scan();
    assert_eq!(fixed.len() as u64, VALUES, "a fixed degree reads each by itself");
}

/// Scans read each value, however often.
fn without_cached_values(settings: &mut TreeSettings) {
    with_long_segments(settings);
    settings.cache_bytes = 16 << 10;
}

fn with_a_cache(settings: &mut TreeSettings) {
    with_long_segments(settings);
    settings.cache_bytes = 4 << 20;
}

#[test]
fn a_get_reads_a_value_once_until_it_is_replaced_or_moved() {
    let volume = ScannedVolume::new(with_a_cache);
    let mut stored = put_at_random(&volume, 100);
    let reads_of_gets = |stored: &BTreeMap<Key, u64>| {
        volume.device.reads.borrow_mut().clear();
        for (key, &operation) in stored {
            let found = run(volume.engine.get(key)).expect("no fault").expect("it is stored");
            assert_eq!(found.as_bytes(), value_of(key, operation, VALUE_BYTES), "{key:?}");
        }
        volume.device.reads.take().len()
    };
    assert_eq!(reads_of_gets(&stored), 100);
    assert_eq!(reads_of_gets(&stored), 0);
    for (key, operation) in stored.iter_mut().step_by(2) {
        *operation += 1_000;
        assert_eq!(volume.put(key, *operation), Ok(PutOutcome::Stored));
    }
    assert_eq!(reads_of_gets(&stored), 50, "those that were replaced");
    run(volume.engine.compact_all()).expect("no fault");
    assert!(reads_of_gets(&stored) >= 100, "all have moved, and their entries with them");
    assert_eq!(reads_of_gets(&stored), 0);
    let key = stored.keys().next().expect("there are some").clone();
    run(volume.engine.delete(&key)).expect("no fault");
    assert!(run(volume.engine.get(&key)).expect("no fault").is_none());
}

#[test]
fn a_scan_reads_no_value_that_the_cache_has_and_an_older_snapshot_keeps_its_own() {
    let volume = ScannedVolume::in_the_order_of_keys(with_a_cache);
    let older = run(volume.engine.create_iterator(IteratorOptions::default())).unwrap().unwrap();
    let (all, errors, reads) = volume.scan();
    assert_eq!((all.pairs.len() as u64, errors), (VALUES, vec![]));
    assert!(!reads.is_empty());
    let (again, _, reads) = volume.scan();
    assert_eq!((again.pairs, reads), (all.pairs.clone(), vec![]));
    for key in all.pairs.keys().step_by(2) {
        assert_eq!(volume.put(key, 1_000), Ok(PutOutcome::Stored));
    }
    let (changed, _, reads) = volume.scan();
    assert!(changed.pairs.values().step_by(2).all(|&operation| operation == 1_000));
    let read_blocks: u64 = reads.iter().map(|(_, blocks)| blocks).sum();
    assert!(read_blocks >= VALUES / 2 * RECORD_BLOCKS, "those that were replaced: {reads:?}");
    // Gets find the newest ones there.
    all.pairs.keys().for_each(|key| assert!(run(volume.engine.get(key)).expect("no fault").is_some()));
    let mut sink = AllPairs::default();
    while run(volume.engine.next_pairs(&older, &mut sink)).expect("no fault") != IteratorProgress::AtEnd {}
    assert_eq!(sink.pairs, all.pairs);
}

#[test]
fn a_get_reads_the_blocks_of_its_record_and_not_the_rest_of_the_last_unit() {
    let mut fixture = LsmFixture::default();
    fixture.format.unit_bytes = Some(4096);
    let mut volume = ScannedVolume::with(&fixture, with_long_segments);
    for (index, (value_bytes, want)) in
        [(3_900, 8), (4_100, 9), (8_100, 16), (16_384, 33)].into_iter().enumerate()
    {
        let (key, operation) = (key_of(index as u64), index as u64);
        volume.value_bytes = value_bytes;
        assert_eq!(volume.put(&key, operation), Ok(PutOutcome::Stored));
        volume.device.reads.borrow_mut().clear();
        let found = run(volume.engine.get(&key)).expect("no fault").expect("it is stored");
        assert_eq!(found.as_bytes(), value_of(&key, operation, value_bytes));
        let reads = volume.device.reads.take();
        assert_eq!(
            reads.iter().map(|&(_, blocks)| blocks).collect::<Vec<_>>(),
            [want],
            "{value_bytes} bytes"
        );
    }
}

#[test]
fn a_value_that_cannot_be_read_is_not_cached_and_one_that_is_cached_needs_no_device() {
    let volume = ScannedVolume::in_the_order_of_keys(with_a_cache);
    let keys: Vec<Key> = (0..2).map(key_of).collect();
    let get =
        |key: &Key| run(volume.engine.get(key)).map(|found| found.expect("it is stored").as_bytes().to_vec());
    assert_eq!(get(&keys[0]), Ok(value_of(&keys[0], 1, VALUE_BYTES)));
    volume.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)));
    assert!(matches!(get(&keys[1]), Err(EngineError::Device { .. })));
    assert_eq!(get(&keys[0]), Ok(value_of(&keys[0], 1, VALUE_BYTES)));
    volume.faults.clear();
    assert_eq!(get(&keys[1]), Ok(value_of(&keys[1], 1, VALUE_BYTES)));
}

fn with_many_values_ahead(settings: &mut TreeSettings) {
    with_long_segments(settings);
    settings.prefetch = PrefetchMode::Fixed(16);
    settings.views_max = 64;
}

#[test]
fn iterators_that_wait_for_their_consumer_leave_half_of_the_buffers_to_requests() {
    let pool = BufferPool::new(1 << 20);
    let volume = ScannedVolume::in_pool(&LsmFixture::default(), with_many_values_ahead, pool.clone());
    for index in 0..VALUES {
        assert_eq!(volume.put(&key_of(index), index), Ok(PutOutcome::Stored));
    }
    let mut iterators = Vec::new();
    for _ in 0..30 {
        let iterator = run(volume.engine.create_iterator(IteratorOptions::default())).unwrap().unwrap();
        let mut sink = AllPairs { room: 1, ..AllPairs::default() };
        assert_eq!(run(volume.engine.next_pairs(&iterator, &mut sink)), Ok(IteratorProgress::HasNext));
        assert!(pool.free_bytes() >= pool.budget_bytes() / 2, "{pool:?}");
        iterators.push((iterator, sink));
    }
    assert!(pool.in_use_bytes() > 0, "some have read ahead");
    for (iterator, mut sink) in iterators {
        sink.room = usize::MAX;
        assert_eq!(run(volume.engine.next_pairs(&iterator, &mut sink)), Ok(IteratorProgress::AtEnd));
        assert_eq!(sink.pairs.len() as u64, VALUES);
    }
}

/// Puts each of `keys` a few times, in random order. Gives the number of each one's last put.
fn put_at_random(volume: &ScannedVolume, keys: u64) -> BTreeMap<Key, u64> {
    let (mut random, mut stored) = (Prng::new(3), BTreeMap::new());
    for operation in 0..3 * keys {
        let key = key_of(if operation < keys { operation } else { random.below(keys) });
        assert_eq!(volume.put(&key, operation), Ok(PutOutcome::Stored));
        stored.insert(key, operation);
    }
    stored
}

#[test]
fn a_full_compaction_lays_values_down_in_the_order_of_keys_and_has_nothing_to_do_again() {
    let volume = ScannedVolume::new(with_long_segments);
    let stored = put_at_random(&volume, 300);
    let (_, _, before) = volume.scan();
    run(volume.engine.compact_all()).expect("no fault");
    let (sink, errors, after) = volume.scan();
    assert_eq!((sink.pairs, errors), (stored.clone(), vec![]));
    let of_values =
        |reads: &[(u64, u64)]| reads.iter().filter(|(_, blocks)| *blocks >= RECORD_BLOCKS).count();
    assert!(of_values(&before) > 290 && of_values(&after) < 160, "{before:?}, then {after:?}");
    let moved = || volume.engine.volume().statistics().tree.expect("a tree").moved_values;
    let moved_once = moved();
    run(volume.engine.compact_all()).expect("no fault");
    assert_eq!(moved(), moved_once);
    assert_eq!(volume.scan().0.pairs, stored);
}

#[test]
fn a_full_compaction_moves_no_more_values_in_a_step_than_a_compaction_may_read() {
    let volume = ScannedVolume::new(with_long_segments);
    // Each key once, so that no segment is collected.
    let stored: BTreeMap<Key, u64> = (0..300).map(|index| (key_of(index), index)).collect();
    (0..300).for_each(|index| assert_eq!(volume.put(&key_of(index), index), Ok(PutOutcome::Stored)));
    let tree = || volume.engine.volume().statistics().tree.expect("a tree");
    let (mut before, mut longest) = (tree(), 0);
    let mut compaction = pin!(volume.engine.compact_all());
    while compaction.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        let now = tree();
        if now.compactions > before.compactions {
            longest = longest.max(now.moved_bytes - before.moved_bytes);
            before = now;
        }
    }
    let input_bytes_max = volume.engine.volume().settings().compaction.input_bytes_max;
    assert!(
        longest > 0 && longest < input_bytes_max + RECORD_BLOCKS * BLOCK_BYTES,
        "{longest} bytes in a step"
    );
    assert_eq!((tree().moved_values, volume.scan().0.pairs), (300, stored));
}

#[test]
fn a_full_compaction_without_its_caller_ends_after_its_step() {
    let volume = ScannedVolume::new(with_long_segments);
    (0..300).for_each(|index| assert_eq!(volume.put(&key_of(index), index), Ok(PutOutcome::Stored)));
    let tree = || volume.engine.volume().statistics().tree.expect("a tree");
    let context = &mut Context::from_waker(Waker::noop());
    let mut compaction = Box::pin(volume.engine.compact_all());
    while tree().moved_values == 0 {
        assert!(compaction.as_mut().poll(context).is_pending());
    }
    let compactions = tree().compactions;
    drop(compaction);
    let mut abandoned = pin!(volume.engine.run_abandoned());
    while !volume.engine.volume().is_idle() {
        assert!(abandoned.as_mut().poll(context).is_pending());
    }
    assert!(tree().compactions <= compactions + 1 && tree().moved_values < 100, "{:?}", tree());
    assert_eq!(volume.scan().0.pairs.len(), 300);
}

#[test]
fn a_full_compaction_ends_while_users_write() {
    let mut volume = ScannedVolume::new(make_small);
    let mut stored = put_at_random(&volume, 300);
    // In the tree.
    volume.value_bytes = 250;
    let (mut random, has_ended) = (Prng::new(5), Cell::new(false));
    let compact = async {
        volume.engine.compact_all().await.expect("no fault");
        has_ended.set(true);
    };
    let write = async {
        for operation in 1000.. {
            let key = key_of(random.below(300));
            assert_eq!(volume.store(&key, operation).await, Ok(PutOutcome::Stored));
            stored.insert(key, operation);
            if operation % 40 == 0 {
                yield_now().await;
            }
            if has_ended.get() {
                break;
            }
            assert!(operation < 50_000, "it does not end");
        }
    };
    run(join(compact, write));
    assert_eq!(volume.scan().0.pairs, stored);
}

#[test]
fn values_stay_where_they_are_if_there_is_no_space_for_a_second_copy() {
    let volume = ScannedVolume::new(with_long_segments);
    let device_bytes = volume.device.geometry().bytes();
    let keys = device_bytes * 6 / 10 / (RECORD_BLOCKS * BLOCK_BYTES);
    let mut stored = BTreeMap::new();
    for index in 0..keys {
        assert_eq!(volume.put(&key_of(index), index), Ok(PutOutcome::Stored), "{index} of {keys}");
        stored.insert(key_of(index), index);
    }
    run(volume.engine.compact_all()).expect("no fault");
    assert_eq!(volume.engine.volume().statistics().tree.expect("a tree").moved_values, 0);
    let (sink, errors, _) = volume.scan();
    assert_eq!((sink.pairs.len(), errors), (stored.len(), vec![]));
    assert_eq!(sink.pairs, stored);
}

#[test]
fn the_space_of_a_second_copy_is_that_of_whole_units() {
    let mut fixture = LsmFixture::default();
    fixture.format.unit_bytes = Some(4096);
    let mut volume = ScannedVolume::with(&fixture, with_long_segments);
    volume.value_bytes = 4200;
    // The values take a fourth of the device and would fit a second time; their records take half of it.
    let keys = volume.device.geometry().bytes() / 2 / (8 << 10);
    for index in 0..keys {
        assert_eq!(volume.put(&key_of(index), index), Ok(PutOutcome::Stored), "{index} of {keys}");
    }
    run(volume.engine.compact_all()).expect("no fault");
    assert_eq!(volume.engine.volume().statistics().tree.expect("a tree").moved_values, 0);
    assert_eq!(volume.scan().0.pairs.len() as u64, keys);
}

#[test]
fn a_record_that_cannot_be_read_costs_none_of_those_that_are_read_with_it() {
    let volume = ScannedVolume::in_the_order_of_keys(without_cached_values);
    let (all, _, reads) = volume.scan();
    let shared = |(_, blocks): &&(u64, u64)| *blocks > RECORD_BLOCKS;
    let (first_block, blocks) = *reads.iter().find(shared).expect("one that is shared");
    for record in 0..blocks / RECORD_BLOCKS {
        let from = first_block + record * RECORD_BLOCKS;
        for (error, is_lost) in [(61, true), (11, false)] {
            // The second passes: only the gathered read fails.
            let rule =
                FaultRule::within(OpFilter::Read, Lba(from + 1), Lba(from + 2), InjectedFault::Error(error));
            volume.faults.add(if is_lost { rule } else { rule.once(0) });
            let (sink, errors, _) = volume.scan();
            volume.faults.clear();
            assert_eq!(errors.len(), usize::from(is_lost), "record {record}: {errors:?}");
            let missing = all.pairs.keys().filter(|key| !sink.pairs.contains_key(key)).count();
            assert_eq!(missing, usize::from(is_lost), "record {record}, error {error}");
        }
    }
}
