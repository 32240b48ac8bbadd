//! Operations of the ordered engine that fail: the device's errors, too few buffers, dropped futures. What was acknowledged stays, and what failed may be repeated.

use crate::common::faulty_volume::{FaultyEngine, FaultyVolume, fail_each, run};
use crate::common::lsm_fixture::{LsmFixture, lsm_volume, make_small};
use crate::common::pool;
use octokv_base::{BufferPool, Key, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{self, EngineFixture, TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{Engine, EngineError, IteratorOptions, IteratorProgress, PairSink, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

#[test]
fn flushes_beside_compactions_that_move_values_end_in_any_order() {
    for seed in 0..30 {
        let (disk, engines, mut random) = lsm_volume(&LsmFixture { cores: 3, ..LsmFixture::default() }, seed);
        let mut tasks = TaskSet::default();
        let engine = Rc::clone(&engines[2]);
        tasks.add(async move {
            for _ in 0..60 {
                engine.flush_memtables().await.expect("no fault");
            }
        });
        let engine = Rc::clone(&engines[1]);
        tasks.add(async move {
            for _ in 0..60 {
                engine.compact_once(true).await.expect("no fault");
            }
        });
        let mut order = Prng::new(seed);
        let mut advance_io = |random: &mut Prng| {
            tasks.step(&mut order);
            disk.complete_one(random)
        };
        conformance::concurrent(&engines[..1], seed, 400, &mut advance_io);
        while disk.complete_one(&mut random) {}
    }
}

fn fixture() -> LsmFixture {
    let mut fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
    fixture.format.value_bytes_max = 64 << 10;
    fixture
}

impl FaultyEngine for LsmEngine {
    const DISK_BYTES: u64 = 12 << 20;
    const KEYS: u64 = 40;
    const WRITES_BEFORE: u64 = 60;

    fn format(device: Rc<dyn Device>) {
        run(fixture().format(device));
    }

    fn open(device: &Rc<dyn Device>, buffers: BufferPool) -> LsmEngine {
        let (config, format) = (fixture().open_config(), fixture().format);
        let volume = run(open_with(device, &pool(), config, &format, make_small)).expect("opens");
        LsmEngine::new(volume, 0, Rc::clone(device), buffers)
    }

    fn is_read_only(&self) -> bool {
        self.volume().is_read_only()
    }

    /// Flushes, compactions and checkpoints.
    fn work_behind(&self, write: u64, note: &mut dyn FnMut(Result<(), EngineError>)) {
        if write.is_multiple_of(9) {
            note(run(self.flush_memtables()));
        }
        if write.is_multiple_of(13) {
            note(run(self.compact_once(true)).map(drop));
        }
        if write.is_multiple_of(31) {
            note(run(self.checkpoint()));
        }
    }

    fn compact_everything(&self) -> Result<(), EngineError> {
        run(self.compact_all())
    }

    fn check_more(&self, intact: &BTreeMap<Key, u64>, may_be_lost: bool, context: &str) {
        let (pairs, errors) = iterate(self, IteratorOptions::default());
        assert!(may_be_lost || errors == 0, "{context}: {errors} errors of an iterator");
        for (key, operation) in intact {
            assert_eq!(pairs.get(key), Some(operation), "{context}: {key} of an iterator");
        }
        assert!(may_be_lost || pairs.len() == intact.len(), "{context}: an iterator has more");
    }
}

/// A sink of all pairs, or of so many in a call.
pub struct AllPairs {
    pub pairs: BTreeMap<Key, u64>,
    pub room: usize,
}

impl Default for AllPairs {
    fn default() -> AllPairs {
        AllPairs { pairs: BTreeMap::new(), room: usize::MAX }
    }
}

impl PairSink for AllPairs {
    fn has_space(&mut self, _key_bytes: usize, _value_bytes: usize) -> bool {
        self.room > 0
    }
    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.room -= 1;
        let key = Key::new(key).expect("within the limit");
        let operation = operation_of(&key, value);
        assert!(self.pairs.insert(key, operation).is_none(), "a key comes once");
    }
}

/// All pairs, and the errors on the way.
fn iterate(engine: &LsmEngine, options: IteratorOptions) -> (BTreeMap<Key, u64>, usize) {
    let iterator = run(engine.create_iterator(options)).expect("no fault").expect("not too many");
    let (mut sink, mut errors) = (AllPairs::default(), 0);
    loop {
        match run(engine.next_pairs(&iterator, &mut sink)) {
            Ok(IteratorProgress::AtEnd) => return (sink.pairs, errors),
            Ok(IteratorProgress::HasNext) => {}
            Err(EngineError::Corrupt { .. }) => errors += 1,
            Err(error) => panic!("an iterator: {error}"),
        }
        assert!(errors < 1_000, "an iterator that does not get on");
    }
}

#[test]
fn a_failed_write_or_flush_of_any_part_loses_nothing_that_was_acknowledged() {
    for times in [1, u32::MAX] {
        let fail = |filter, fault, step| fail_each::<LsmEngine>((filter, fault), times, (step, 2_000), false);
        let writes = fail(OpFilter::Write, InjectedFault::Error(5), 11);
        assert!(writes.failed > 20 && writes.read_only > 5, "{writes:?}");
        assert!(times > 1 || writes.read_only < writes.failed, "{writes:?}");
        let full = fail(OpFilter::Write, InjectedFault::NoSpace, 37);
        assert!(full.failed > 5, "{full:?}");
        let flushes = fail(OpFilter::Flush, InjectedFault::Error(5), 23);
        assert!(flushes.failed > 5, "{flushes:?}");
    }
}

#[test]
fn a_failed_read_costs_keys_only_if_the_medium_has_lost_the_block() {
    let fail = |code, times, may_be_lost| {
        let reads = (OpFilter::Read, InjectedFault::Error(code));
        fail_each::<LsmEngine>(reads, times, (23, 2_000), may_be_lost)
    };
    // EIO and EAGAIN: nothing is given up for what may be read later.
    for code in [5, 11] {
        for times in [1, u32::MAX] {
            let reads = fail(code, times, false);
            assert!(reads.failed > 3 && reads.read_only == 0, "{code}: {reads:?}");
        }
    }
    let lost = fail(61, 1, true);
    assert_eq!(lost.read_only, 0, "{lost:?}");
}

#[test]
fn too_few_buffers_fail_background_work_and_iterators_which_go_on_later() {
    let mut refused = 0;
    for free in [0, 4 << 10, 20 << 10, 70 << 10, 260 << 10, 300 << 10, 600 << 10] {
        let pool = BufferPool::new(8 << 20);
        let (mut volume, mut random) = (FaultyVolume::<LsmEngine>::new(pool.clone()), Prng::new(9));
        volume.work(&mut random, 150);
        assert_eq!(volume.errors, []);
        for _ in 0..8 {
            volume.work(&mut random, 8);
            let held = pool.take(pool.free_bytes().saturating_sub(free));
            let engine = volume.engine();
            let iterator = run(engine.create_iterator(IteratorOptions::default())).unwrap().unwrap();
            let mut sink = AllPairs::default();
            let outcomes = [
                run(engine.next_pairs(&iterator, &mut sink)).map(drop),
                run(engine.flush_memtables()),
                run(engine.compact_once(true)).map(drop),
                run(engine.compact_all()),
                run(engine.checkpoint()),
            ];
            for error in outcomes.iter().filter_map(|outcome| outcome.err()) {
                assert_eq!(error, EngineError::NoMemory, "{free} B are free");
                refused += 1;
            }
            drop(held);
            while run(engine.next_pairs(&iterator, &mut sink)) != Ok(IteratorProgress::AtEnd) {}
            let (pairs, _) = iterate(&engine, IteratorOptions::default());
            assert_eq!(sink.pairs, pairs, "{free} B were free");
            run(engine.compact_all()).expect("compacts");
        }
        assert_eq!(volume.errors, []);
        volume.check(false, "buffers are back");
        volume.reopen();
        volume.check(false, "reopened");
    }
    assert!(refused > 20, "{refused} were refused");
}

#[test]
fn a_volume_that_became_read_only_is_read() {
    let (mut volume, mut random) = (FaultyVolume::<LsmEngine>::new(pool()), Prng::new(3));
    volume.work(&mut random, 120);
    let before = run(volume.engine().create_iterator(IteratorOptions::default())).unwrap().unwrap();
    let expected = iterate(&volume.engine(), IteratorOptions::default()).0;
    volume.plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)));
    volume.write(&mut random);
    assert!(volume.is_read_only());
    let errors = volume.errors.len();
    volume.work(&mut random, 40);
    assert!(volume.errors.len() >= errors + 40, "nothing is written");
    let engine = volume.engine();
    let mut sink = AllPairs::default();
    while run(engine.next_pairs(&before, &mut sink)).expect("reads") != IteratorProgress::AtEnd {}
    assert_eq!(sink.pairs, expected);
    let options = IteratorOptions { reverse: true, ..IteratorOptions::default() };
    iterate(&engine, options);
    volume.check(false, "read-only");
    volume.plan.clear();
    volume.reopen();
    volume.check(false, "reopened");
}

/// Polls a future so many times; whether it ended.
fn poll_some<T>(future: impl Future<Output = T>, polls: usize, mut between: impl FnMut()) -> bool {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    for _ in 0..polls {
        if future.as_mut().poll(&mut context).is_ready() {
            return true;
        }
        between();
    }
    false
}

#[test]
fn background_work_and_iterators_may_be_dropped_after_any_poll() {
    let mut dropped = 0;
    for polls in 0..60 {
        let (disk, engines, mut random) = lsm_volume(&LsmFixture { cores: 1, ..LsmFixture::default() }, 5);
        let engine = &engines[0];
        let mut order = random.fork();
        let mut complete = || {
            disk.complete_one(&mut order);
        };
        let mut expected = BTreeMap::new();
        for operation in 1..=90_u64 {
            let key = key_of(random.below(LsmEngine::KEYS));
            let bytes = conformance::random_length(&mut random, 4_000);
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
            let stored = block_on(engine.put(&key, PutMode::Upsert, record, bytes), &mut complete);
            assert_eq!(stored, Ok(PutOutcome::Stored));
            expected.insert(key, operation);
            if operation % 10 == 0 {
                let iterator = block_on(engine.create_iterator(IteratorOptions::default()), &mut complete);
                let iterator = iterator.unwrap().unwrap();
                let (mut sink, polls) = (AllPairs::default(), polls + operation as usize % 7);
                let ended = match operation / 10 % 5 {
                    0 => poll_some(engine.flush_memtables(), polls, &mut complete),
                    1 => poll_some(engine.compact_once(true), polls, &mut complete),
                    2 => poll_some(engine.compact_all(), polls, &mut complete),
                    3 => poll_some(engine.checkpoint(), polls, &mut complete),
                    _ => poll_some(engine.next_pairs(&iterator, &mut sink), polls, &mut complete),
                };
                dropped += u32::from(!ended);
                let mut rest = AllPairs::default();
                // What a dropped call received, it has, or the next one yields again.
                while block_on(engine.next_pairs(&iterator, &mut rest), &mut complete)
                    != Ok(IteratorProgress::AtEnd)
                {}
                sink.pairs.extend(rest.pairs);
                assert_eq!(sink.pairs, expected, "{polls} polls");
                let idle = || engine.volume().is_idle();
                let mut abandoned = pin!(engine.run_abandoned());
                while !idle() {
                    let _ = abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    complete();
                }
            }
        }
        block_on(engine.compact_all(), &mut complete).expect("compacts");
        for (key, &operation) in &expected {
            let value = block_on(engine.get(key), &mut complete).unwrap().unwrap();
            assert_eq!(operation_of(key, value.as_bytes()), operation);
        }
        block_on(engine.close(), &mut complete).expect("closes");
        let fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
        let reopened = block_on(fixture.open(Rc::new(disk.clone())), &mut complete).expect("opens");
        for (key, &operation) in &expected {
            let value = block_on(reopened.get(key), &mut complete).unwrap().unwrap();
            assert_eq!(operation_of(key, value.as_bytes()), operation);
        }
    }
    assert!(dropped > 100, "{dropped} were dropped half done");
}
