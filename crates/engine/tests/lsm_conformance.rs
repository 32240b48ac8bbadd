//! The ordered engine against the model and the contract's clauses, with flushes and compactions beside.

use crate::common::held_clauses::holds_on;
use crate::common::lsm_fixture::{LSM_DISK_BYTES, LsmFixture, lsm_volume};
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::conformance::{self, EngineFixture, Operation, TaskSet, key_of, record_of, value_of};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::lsm::LsmEngine;
use octokv_engine::{Capability, Durability, Engine, PutMode, PutOutcome, WallClock};
use octokv_runtime::block_on;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let key = || 0..60_u64;
    let mode = prop_oneof![
        Just(octokv_engine::PutMode::Upsert),
        Just(octokv_engine::PutMode::AddOnly),
        Just(octokv_engine::PutMode::UpdateOnly)
    ];
    let bytes = prop_oneof![8..=64_usize, 8..=600_usize, 8..=5_000_usize, 8..=400_000_usize];
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
        cases: 8, rng_seed: RngSeed::Fixed(22), failure_persistence: None, max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_and_reopenings_agree_with_the_model(
        unit_bytes in prop_oneof![Just(512), Just(4_096)],
        durability in prop_oneof![Just(Durability::PowerSafe), Just(Durability::Completed)],
        order_of_completions in any::<u64>(),
        operations in operations(),
    ) {
        let mut fixture = LsmFixture { durability, ..LsmFixture::default() };
        fixture.format.unit_bytes = Some(unit_bytes);
        let disk = PowerLossDisk::new(vec![0; 8 * LSM_DISK_BYTES], 512);
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
    for seed in 0..40 {
        let (disk, engines, mut random) = lsm_volume(&LsmFixture { cores: 3, ..LsmFixture::default() }, seed);
        let mut advance_io = |random: &mut Prng| disk.complete_one(random);
        conformance::concurrent(&engines, seed, 400, &mut advance_io);
        while disk.complete_one(&mut random) {}
    }
}

fn holds(clause: impl Fn(&Clauses<'_, LsmEngine>, &TestClock)) {
    let (mut fixture, clock) = (LsmFixture::default(), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, LSM_DISK_BYTES, |clauses| clause(clauses, &clock));
}

#[test]
fn buffers_scans_versions_conditions_and_expiry_hold() {
    holds(|clauses, _| clauses.buffers_and_ranges());
    holds(|clauses, _| clauses.scans());
    holds(|clauses, _| clauses.drive_cores(5));
    holds(|clauses, _| clauses.scans_since());
    holds(|clauses, _| clauses.conditions());
    holds(|clauses, _| clauses.versions());
    holds(|clauses, clock| clauses.expiry(clock));
}

#[test]
fn random_writes_with_versions_agree_with_the_model() {
    for seed in 0..20 {
        holds(|clauses, _| clauses.random_writes(seed, 300));
    }
}

#[test]
fn what_the_engine_lacks_is_refused_by_name() {
    holds(|clauses, _| clauses.lacks(Capability::Reclaim));
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    let half_done = Cell::new(0);
    holds(|clauses, _| {
        half_done.set(half_done.get() + clauses.dropped_futures(Some(&|| clauses.engine.volume().is_idle())));
        assert!(!clauses.engine.volume().is_read_only());
    });
    assert!(half_done.get() >= 15, "{} futures were dropped half done", half_done.get());
}

#[test]
fn abandoned_writes_are_run_by_a_task_that_waits_for_them() {
    holds(|clauses, _| clauses.abandoned_writes(&|| clauses.engine.volume().is_idle()));
}

/// Runs a step of the engine's background work.
fn settle(engine: &LsmEngine, disk: &PowerLossDisk, random: &mut Prng) {
    let choice = random.below(4);
    let mut order = Prng::new(random.next_u64());
    let complete = || {
        disk.complete_one(&mut order);
    };
    match choice {
        0 => block_on(engine.flush_memtables(), complete).expect("no fault"),
        1 => drop(block_on(engine.compact_once(false), complete).expect("no fault")),
        2 => drop(block_on(engine.compact_once(true), complete).expect("no fault")),
        _ => block_on(engine.checkpoint(), complete).expect("no fault"),
    }
}

#[test]
fn iterators_yield_what_there_was_at_their_creation_whatever_is_flushed_and_compacted() {
    for seed in 0..60 {
        let fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
        let (disk, engines, mut random) = lsm_volume(&fixture, seed);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let clauses = Clauses { engine: &*engines[0], idle: &idle };
        clauses.iterators(seed, 600, |random| settle(&engines[0], &disk, random));
    }
}

#[test]
fn the_limits_of_iterators_hold() {
    holds(|clauses, clock| clauses.iterator_limits(clock));
}

#[test]
fn a_volume_in_memory_serves_like_any_other() {
    let fixture = LsmFixture::default();
    let device = Rc::new(MemoryDevice::new(RamDisk::new(32 << 20, 512).expect("memory")));
    let engine = block_on(fixture.open(device), || ()).expect("opens");
    let clauses = Clauses { engine: &engine, idle: &RefCell::new(|| ()) };
    clauses.iterators(5, 500, |_| ());
}

#[test]
fn writers_of_several_cores_beside_flushes_and_compactions_are_linearizable() {
    for seed in 0..20 {
        let (disk, engines, mut random) = lsm_volume(&LsmFixture { cores: 3, ..LsmFixture::default() }, seed);
        let mut tasks = TaskSet::default();
        for (engine, flushes) in [(&engines[1], true), (&engines[2], false)] {
            let engine = Rc::clone(engine);
            tasks.add(async move {
                for _ in 0..60 {
                    match flushes {
                        true => engine.flush_memtables().await.expect("no fault"),
                        false => drop(engine.compact_once(false).await.expect("no fault")),
                    }
                    octokv_runtime::yield_now().await;
                }
            });
        }
        let mut order = Prng::new(seed);
        let mut advance_io = |random: &mut Prng| {
            tasks.step(&mut order);
            disk.complete_one(random)
        };
        conformance::concurrent(&engines[..2], seed, 400, &mut advance_io);
        assert!(engines[0].volume().version().last_table_id() > 70, "tables were written");
        while disk.complete_one(&mut random) {}
    }
}

#[test]
fn a_full_compaction_frees_what_was_overwritten_and_deleted() {
    let fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
    let (disk, engines, mut random) = lsm_volume(&fixture, 3);
    let engine = &engines[0];
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    for round in 0..30_u64 {
        for index in 0..20 {
            let key = key_of(index);
            let bytes = if index % 2 == 0 { 2_000 } else { 100 };
            let record = record_of(engine.record_layout(), &key, &value_of(&key, round, bytes));
            let put = block_on(engine.put(&key, PutMode::Upsert, record, bytes), &mut complete);
            assert_eq!(put, Ok(PutOutcome::Stored));
        }
    }
    block_on(engine.compact_all(), &mut complete).expect("no fault");
    let after = engine.statistics();
    assert_eq!(after.keys, 20, "each key has one entry");
    assert!(after.used_bytes < 70_000, "{} bytes are used for 21,000 of values", after.used_bytes);
    for index in 0..20 {
        block_on(engine.delete(&key_of(index)), &mut complete).expect("no fault");
    }
    block_on(engine.compact_all(), &mut complete).expect("no fault");
    let after = engine.statistics();
    assert_eq!((after.keys, after.used_bytes), (0, 0));
}

#[test]
fn a_full_compaction_drops_the_tombstones_of_a_flush_that_nothing_overlaps() {
    let fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
    let (disk, engines, mut random) = lsm_volume(&fixture, 4);
    let engine = &engines[0];
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    for index in 0..5 {
        let key = key_of(index);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, 0, 10));
        let put = block_on(engine.put(&key, PutMode::Upsert, record, 10), &mut complete);
        assert_eq!(put, Ok(PutOutcome::Stored));
    }
    block_on(engine.delete(&key_of(2)), &mut complete).expect("no fault");
    block_on(engine.compact_all(), &mut complete).expect("no fault");
    assert_eq!(engine.statistics().keys, 4);
}
