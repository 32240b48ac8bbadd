//! The log engine against the model and the contract's clauses, with splits and checkpoints beside.

use crate::common::held_clauses::holds_on;
use crate::common::log_fixture::{LOG_DISK_BYTES, LogFixture, log_volume};
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::conformance::{self, EngineFixture, Operation, TaskSet};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::{Capability, Durability, Engine, Volume, WallClock};
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
    let bytes = prop_oneof![8..=64_usize, 8..=600_usize, 8..=5_000_usize, 8..=60_000_usize];
    let operation = prop_oneof![
        4 => key().prop_map(Operation::Get),
        3 => key().prop_map(Operation::Exist),
        3 => key().prop_map(Operation::Delete),
        8 => (key(), mode, bytes).prop_map(|(key, mode, bytes)| Operation::Put { key, mode, bytes }),
        1 => (0..60_usize, 1..=5_usize).prop_map(|(start, limit)| Operation::List { start, limit }),
        1 => any::<bool>().prop_map(|clean| Operation::Reopen { clean }),
    ];
    vec(vec(operation, 0..=40), 0..=40).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12, rng_seed: RngSeed::Fixed(23), failure_persistence: None, max_shrink_iters: 2_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_and_reopenings_agree_with_the_model(
        unit_bytes in prop_oneof![Just(512), Just(4_096)],
        durability in prop_oneof![Just(Durability::PowerSafe), Just(Durability::Completed)],
        order_of_completions in any::<u64>(),
        operations in operations(),
    ) {
        let mut fixture = LogFixture { durability, ..LogFixture::default() };
        fixture.format.unit_bytes = Some(unit_bytes);
        fixture.format.chunk_bytes = Some(32 * unit_bytes);
        let disk = PowerLossDisk::new(vec![0; 4 * LOG_DISK_BYTES], 512);
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
        let (disk, engines, mut random) = log_volume(&LogFixture { cores: 3, ..LogFixture::default() }, seed);
        let mut advance_io = |random: &mut Prng| disk.complete_one(random);
        conformance::concurrent(&engines, seed, 400, &mut advance_io);
        while disk.complete_one(&mut random) {}
    }
}

fn holds(clause: impl Fn(&Clauses<'_, LogEngine>, &TestClock)) {
    let (mut fixture, clock) = (LogFixture::default(), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, LOG_DISK_BYTES, |clauses| clause(clauses, &clock));
}

#[test]
fn buffers_scans_versions_conditions_and_expiry_hold() {
    holds(|clauses, _| clauses.buffers_and_ranges());
    holds(|clauses, _| clauses.scans());
    holds(|clauses, _| clauses.scans_since());
    holds(|clauses, _| clauses.conditions());
    holds(|clauses, _| clauses.versions());
    holds(|clauses, clock| clauses.expiry(clock));
    holds(|clauses, _| clauses.owner_cores(4));
    holds(|clauses, _| clauses.drive_cores(2));
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
    for recent_image_bytes in [Some(0), None] {
        let fixture = LogFixture { recent_image_bytes, ..LogFixture::default() };
        holds_on(&fixture, LOG_DISK_BYTES, |clauses| {
            let is_idle = || clauses.engine.volume().is_idle();
            half_done.set(half_done.get() + clauses.dropped_futures(Some(&is_idle)));
            assert!(!clauses.engine.volume().is_read_only());
        });
    }
    assert!(half_done.get() >= 25, "{} futures were dropped half done", half_done.get());
}

#[test]
fn abandoned_writes_are_run_by_a_task_that_waits_for_them() {
    holds(|clauses, _| clauses.abandoned_writes(&|| clauses.engine.volume().is_idle()));
}

#[test]
fn a_volume_in_memory_serves_like_any_other() {
    let fixture = LogFixture::default();
    let device = Rc::new(MemoryDevice::new(RamDisk::new(32 << 20, 512).expect("memory")));
    let engine = block_on(fixture.open(device), || ()).expect("opens");
    Clauses { engine: &engine, idle: &RefCell::new(|| ()) }.random_writes(5, 500);
}

#[test]
fn writers_of_several_cores_beside_splits_checkpoints_and_compactions_are_linearizable() {
    for seed in 0..20 {
        let (disk, engines, mut random) = log_volume(&LogFixture { cores: 3, ..LogFixture::default() }, seed);
        let mut tasks = TaskSet::default();
        let engine = Rc::clone(&engines[2]);
        tasks.add(async move {
            for round in 0..100 {
                match round % 5 {
                    0 => engine.checkpoint().await.expect("no fault"),
                    1 => drop(engine.split_once().await.expect("no fault")),
                    2 => drop(engine.compact_once(LogKind::Values).await.expect("no fault")),
                    3 => drop(engine.compact_once(LogKind::Keys).await.expect("no fault")),
                    _ => engine.mark_durable().await.expect("no fault"),
                }
                octokv_runtime::yield_now().await;
            }
        });
        let mut order = Prng::new(seed);
        let mut advance_io = |random: &mut Prng| {
            tasks.step(&mut order);
            disk.complete_one(random)
        };
        conformance::concurrent(&engines[..2], seed, 400, &mut advance_io);
        assert!(engines[0].statistics().checkpoints > 3, "checkpoints were written");
        while disk.complete_one(&mut random) {}
    }
}
