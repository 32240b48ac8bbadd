//! Iterators of the ordered engine in large numbers and across cores: nothing stays held when they end, by a drop or by expiry.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use crate::lsm_faults::AllPairs;
use octokv_base::{Nanos, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, TaskSet, key_of, record_of, value_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{Engine, EngineError, IteratorOptions, IteratorProgress, PutMode, PutOutcome};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

const KEYS: u64 = 60;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// Handles of three cores.
fn engines(adjust: fn(&mut TreeSettings)) -> Vec<Rc<LsmEngine>> {
    let fixture = LsmFixture { cores: 3, ..LsmFixture::default() };
    let device: Rc<dyn Device> = StableMemory::new(24 << 20, 512);
    run(fixture.format(Rc::clone(&device)));
    let volume = run(open_with(&device, &pool(), fixture.open_config(), &fixture.format, adjust));
    let volume = volume.expect("opens");
    let engine = |core| Rc::new(LsmEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool()));
    (0..3).map(engine).collect()
}

fn with_many_iterators(settings: &mut TreeSettings) {
    make_small(settings);
    settings.snapshots_max = 4096;
    settings.iterator_idle = Nanos::from_secs(10);
}

/// Puts values, a few of them inline, and gives what is stored.
fn churn(engine: &LsmEngine, puts: u64, random: &mut Prng, stored: &mut BTreeMap<u64, u64>) {
    for _ in 0..puts {
        let (index, operation) = (random.below(KEYS), random.next_u64());
        let (key, bytes) = (key_of(index), 8 + random.below(700) as usize);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, bytes)), Ok(PutOutcome::Stored));
        stored.insert(index, operation);
    }
    run(engine.compact_all()).expect("no fault");
}

/// Lets each core hear which iterators have ended.
fn run_views(engines: &[Rc<LsmEngine>]) {
    for engine in engines {
        let mut abandoned = pin!(engine.run_abandoned());
        let _ = abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
}

#[test]
fn thousands_of_iterators_that_are_advanced_on_every_core_hold_nothing_when_they_end() {
    let engines = engines(with_many_iterators);
    let (mut random, mut stored) = (Prng::new(6), BTreeMap::new());
    for round in 0..8 {
        let mut open = Vec::new();
        for _ in 0..100 {
            churn(&engines[0], 10, &mut random, &mut stored);
            for _ in 0..5 {
                let core = random.below(3) as usize;
                let options = IteratorOptions { reverse: random.one_in(2), ..IteratorOptions::default() };
                let iterator = run(engines[core].create_iterator(options)).unwrap().expect("not too many");
                let expected: BTreeMap<_, _> =
                    stored.iter().map(|(index, operation)| (key_of(*index), *operation)).collect();
                open.push((iterator, AllPairs::default(), expected));
            }
            // Each call goes to another core; a sink with space for a few pairs ends it half-way.
            for _ in 0..10 {
                let index = random.below(open.len() as u64) as usize;
                let (iterator, sink, expected) = &mut open[index];
                sink.room = 1 + random.below(9) as usize;
                let core = random.below(3) as usize;
                let progress = run(engines[core].next_pairs(iterator, sink)).expect("no fault");
                if progress == IteratorProgress::AtEnd {
                    assert_eq!(&sink.pairs, expected, "round {round}");
                    open.swap_remove(index);
                }
            }
        }
        let volume = engines[0].volume();
        assert!(volume.pinned_units() > 0, "they hold older versions");
        for (_, sink, expected) in open {
            assert!(sink.pairs.iter().all(|(key, operation)| expected.get(key) == Some(operation)));
        }
        run_views(&engines);
        assert_eq!(volume.pinned_units(), 0, "round {round}");
    }
}

#[test]
fn iterators_that_nobody_uses_expire_and_release_what_they_hold() {
    let engines = engines(with_many_iterators);
    let (mut random, mut stored) = (Prng::new(7), BTreeMap::new());
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let queue = Box::new(sim.device_queue(sim.add_host()));
    let device = DeviceHandle::new(queue, 1);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), device, CpuTime::simulated());
    let mut now = Nanos::from_secs(1);
    handle.begin_iteration(now);
    let mut tasks = TaskSet::default();
    let (engine, own) = (Rc::clone(&engines[0]), handle.clone());
    tasks.add(async move { engine.maintain(&own, |error| panic!("maintenance: {error}")).await });
    let mut advance = |seconds: u64, random: &mut Prng, between: &mut dyn FnMut()| {
        for _ in 0..seconds * 20 {
            handle.begin_iteration(now);
            while tasks.step(random) {}
            now = now + Nanos::from_millis(50);
            between();
        }
    };
    advance(1, &mut random, &mut || ());
    churn(&engines[0], 200, &mut random, &mut stored);
    let create = || run(engines[1].create_iterator(IteratorOptions::default())).unwrap().unwrap();
    let (used, unused) = (create(), (0..2_000).map(|_| create()).collect::<Vec<_>>());
    for iterator in &unused[..100] {
        let mut sink = AllPairs { room: 3, ..AllPairs::default() };
        assert_eq!(run(engines[2].next_pairs(iterator, &mut sink)), Ok(IteratorProgress::HasNext));
    }
    churn(&engines[0], 200, &mut random, &mut stored);
    assert!(engines[0].volume().pinned_units() > 0);
    let mut pairs = 0;
    advance(30, &mut random, &mut || {
        let mut sink = AllPairs { room: 1, ..AllPairs::default() };
        if pairs < 50 && run(engines[2].next_pairs(&used, &mut sink)).is_ok() {
            pairs += sink.pairs.len();
        }
    });
    for iterator in &unused {
        let outcome = run(engines[2].next_pairs(iterator, &mut AllPairs::default()));
        assert_eq!(outcome, Err(EngineError::IteratorExpired));
    }
    // The one that was used at first and then for 27 s not has expired, too.
    let outcome = run(engines[2].next_pairs(&used, &mut AllPairs::default()));
    assert!(pairs >= 50 && outcome == Err(EngineError::IteratorExpired), "{pairs} pairs, {outcome:?}");
    // A compaction that runs holds what it writes.
    advance(5, &mut random, &mut || ());
    run_views(&engines);
    assert_eq!(engines[0].volume().pinned_units(), 0);
}
