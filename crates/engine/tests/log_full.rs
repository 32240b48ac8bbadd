//! A full volume of the log engine: it refuses puts, and serves reads, deletes, and the puts that deletes made room for.

use crate::common::log_fixture::{LogFixture, log_volume};
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::{DeleteOutcome, Engine, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::collections::BTreeMap;

/// The length of a value, in bytes.
fn length_of(key: u64, operation: u64) -> usize {
    match (key + operation) % 7 {
        0 => 20_000,
        1..=3 => 700,
        _ => 90,
    }
}

async fn put(engine: &LogEngine, key: u64, operation: u64) -> PutOutcome {
    let bytes = length_of(key, operation);
    let name = key_of(key);
    let record = record_of(engine.record_layout(), &name, &value_of(&name, operation, bytes));
    engine.put(&name, PutMode::Upsert, record, bytes).await.expect("no fault")
}

fn run<T>(disk: &PowerLossDisk, random: &mut Prng, future: impl Future<Output = T>) -> T {
    block_on(future, || {
        disk.complete_one(random);
    })
}

fn check(disk: &PowerLossDisk, engine: &LogEngine, random: &mut Prng, keys: u64, operation: u64) {
    for key in 0..keys {
        let name = key_of(key);
        let value = run(disk, random, engine.get(&name)).expect("reads").expect("exists");
        assert_eq!(operation_of(&name, value.as_bytes()), operation, "key {key}");
    }
}

#[test]
fn a_full_volume_refuses_puts_and_serves_reads_deletes_and_overwrites() {
    let (disk, engines, mut random) = log_volume(&LogFixture { cores: 1, ..LogFixture::default() }, 7);
    let (engine, random) = (&engines[0], &mut random);
    let mut stored = BTreeMap::new();
    for key in 0.. {
        match run(&disk, random, put(engine, key, 1)) {
            PutOutcome::Stored => drop(stored.insert(key, 1)),
            outcome => {
                assert_eq!(outcome, PutOutcome::Full);
                break;
            }
        }
    }
    let keys = stored.len() as u64;
    let statistics = engine.statistics();
    assert!(statistics.used_bytes * 100 > statistics.capacity_bytes * 98, "{statistics:?}");
    check(&disk, engine, random, keys, 1);
    for key in (0..keys).step_by(2) {
        assert_eq!(run(&disk, random, engine.delete(&key_of(key))), Ok(DeleteOutcome::Deleted));
    }
    for key in (0..keys).step_by(4) {
        assert_eq!(run(&disk, random, put(engine, key, 2)), PutOutcome::Stored, "key {key}");
    }
    for key in 0..keys {
        let name = key_of(key);
        let value = run(&disk, random, engine.get(&name)).expect("reads");
        let want = [Some(2), Some(1), None, Some(1)][key as usize % 4];
        assert_eq!(value.map(|value| operation_of(&name, value.as_bytes())), want, "key {key}");
    }
}
