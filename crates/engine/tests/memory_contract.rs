//! The engine in memory holds every clause of the contract, the conformance suite, and its own limits.

use octokv_base::{Key, UnixTime};
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::conformance::{EngineFixture, concurrent, key_of, record_of, sequential};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_engine::{DeleteOutcome, Engine, Partitions, PutMode, PutOutcome, WallClock};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::rc::Rc;

const CONFIG: MemoryConfig =
    MemoryConfig { ring_seed: 3, devices: 2, partition_bytes: 1 << 20, value_bytes_max: 1 << 16 };

fn engine(config: MemoryConfig) -> (MemoryEngine, TestClock) {
    let clock = TestClock::default();
    let wall = clock.clone();
    (MemoryEngine::new(config, WallClock::new(move || wall.now())), clock)
}

fn holds(clause: impl Fn(&Clauses<'_, MemoryEngine>, &TestClock)) {
    let (engine, clock) = engine(CONFIG);
    let idle = RefCell::new(|| ());
    clause(&Clauses { engine: &engine, idle: &idle }, &clock);
}

#[test]
fn every_clause_holds() {
    holds(|clauses, _| clauses.versions());
    holds(|clauses, _| clauses.conditions());
    holds(|clauses, clock| clauses.expiry(clock));
    holds(|clauses, _| clauses.buffers_and_ranges());
    holds(|clauses, _| clauses.scans());
    holds(|clauses, _| clauses.scans_since());
    holds(|clauses, _| clauses.gives_up_space());
    holds(|clauses, _| clauses.owner_cores(1));
    holds(|clauses, _| clauses.partitions());
}

#[test]
fn a_future_dropped_before_its_first_poll_has_done_nothing_and_no_operation_takes_a_second_poll() {
    holds(|clauses, _| assert_eq!(clauses.dropped_futures(None), 0));
}

#[test]
fn random_writes_with_versions_agree_with_the_model() {
    for seed in 0..50 {
        holds(|clauses, _| clauses.random_writes(seed, 400));
    }
}

#[test]
fn iterators_yield_what_was_there_at_their_creation() {
    for seed in 0..50 {
        holds(|clauses, _| clauses.iterators(seed, 500, |_| ()));
    }
    holds(|clauses, clock| clauses.iterator_limits(clock));
}

/// Keeps the volume in the process, as if every write were durable.
#[derive(Default)]
struct MemoryFixture(RefCell<Option<MemoryEngine>>);

impl EngineFixture for MemoryFixture {
    type Engine = MemoryEngine;
    async fn format(&self, _device: Rc<dyn Device>) {
        *self.0.borrow_mut() = Some(engine(CONFIG).0);
    }
    async fn open(&self, _device: Rc<dyn Device>) -> Result<MemoryEngine, String> {
        self.0.borrow().clone().ok_or_else(|| "not formatted".to_owned())
    }
}

#[test]
fn the_conformance_suite_holds() {
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap()));
    for seed in 0..20 {
        sequential(&MemoryFixture::default(), &device, seed, 300, &RefCell::new(|| ()));
        let engines = [Rc::new(engine(CONFIG).0)];
        concurrent(&engines, seed, 300, |_| false);
    }
}

#[test]
fn a_partition_is_full_before_its_size_is_exceeded() {
    let (engine, _) = engine(MemoryConfig { partition_bytes: 1_000, value_bytes_max: 600, ..CONFIG });
    let put = |key: &Key, bytes: usize| {
        let value = vec![1; bytes];
        block_on(
            engine.put(key, PutMode::Upsert, record_of(engine.record_layout(), key, &value), bytes),
            || (),
        )
        .expect("no fault")
    };
    let (one, other) = (key_of(1), key_of(2));
    assert_eq!(put(&one, 601), PutOutcome::TooLong);
    assert_eq!(put(&one, 600), PutOutcome::Stored);
    assert_eq!(put(&other, 400), PutOutcome::Full);
    assert_eq!(put(&other, 392), PutOutcome::Stored);
    assert_eq!(engine.partitions()[0].used_bytes, 1_000);
    assert_eq!((engine.statistics().used_bytes, engine.statistics().keys), (1_000, 2));
    // A full partition takes a shorter value, and a delete with a version.
    assert_eq!(put(&one, 500), PutOutcome::Stored);
    let version = octokv_base::Version::new(1, 1).unwrap();
    assert_eq!(block_on(engine.delete_with(&key_of(3), version), || ()), Ok(DeleteOutcome::NotFound));
    assert_eq!(block_on(engine.delete(&other), || ()), Ok(DeleteOutcome::Deleted));
    assert_eq!((engine.statistics().used_bytes, engine.statistics().keys), (504, 1));
}

#[test]
fn a_clock_that_goes_back_brings_a_key_back() {
    let (engine, clock) = engine(CONFIG);
    let key = key_of(1);
    let options = octokv_engine::PutOptions { expires_at: UnixTime(10), ..Default::default() };
    let value = octokv_engine::PutValue::new(record_of(engine.record_layout(), &key, b"a value"), 7);
    assert_eq!(block_on(engine.put_with(&key, value, options), || ()), Ok(PutOutcome::Stored));
    for (now, want) in [(9, Some(7)), (10, None), (9, Some(7))] {
        clock.set(UnixTime(now));
        assert_eq!(block_on(engine.exist(&key), || ()), Ok(want), "at {now}");
    }
}
