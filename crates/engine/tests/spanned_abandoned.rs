//! Writes of keys that may be swapped whose callers drop them, beside merges and readers.

use crate::common::spanned_fixture::{SpannedFixture, spanned_volume};
use octokv_base::{Key, Prng, Version};
use octokv_engine::conformance::{TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyEngine, AnyVolume, DeleteOutcome, Engine, EngineKind, PutOptions, PutOutcome, PutValue, Volume,
};
use octokv_runtime::{block_on, yield_now};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

const VALUE_BYTES: usize = 100;
/// Less than the version of each put.
const OLDER: Version = Version::from_bits(1);

/// Puts the value of an operation with a version that rises with the operations.
async fn put(engine: &AnyEngine, key: &Key, operation: u64) {
    let value = value_of(key, operation, VALUE_BYTES);
    let record = PutValue::new(record_of(engine.record_layout(), key, &value), VALUE_BYTES);
    let version = Version::from_bits(OLDER.to_bits() + operation);
    let options = PutOptions { version, ..PutOptions::default() };
    assert_eq!(engine.put_with(key, record, options).await, Ok(PutOutcome::Stored));
}

/// Polls a put of a key so often, and drops it.
async fn dropped_put(engine: Rc<AnyEngine>, key: Key, operation: u64, mut polls: u64) {
    let mut put = pin!(put(&engine, &key, operation));
    poll_fn(|context| {
        polls = polls.saturating_sub(1);
        if polls == 0 { Poll::Ready(()) } else { put.as_mut().poll(context) }
    })
    .await;
}

/// A delete that is refused as too old merges the key and changes nothing else.
async fn merge(engine: Rc<AnyEngine>, key: Key) {
    let outcome = engine.delete_with(&key, OLDER).await;
    assert!(matches!(outcome, Ok(DeleteOutcome::NotNewer(newer)) if newer > OLDER), "{outcome:?}");
}

async fn read(engine: &AnyEngine, key: &Key) -> u64 {
    let value = engine.get(key).await.expect("no fault").expect("no delete applies");
    operation_of(key, value.as_bytes())
}

fn merged(volume: &AnyVolume) -> u64 {
    volume.device_reports().iter().map(|report| report.swaps.merged).sum()
}

#[test]
fn a_put_that_is_dropped_beside_a_merge_is_not_undone_for_a_reader_of_it() {
    for engine in [EngineKind::Hash, EngineKind::Log] {
        let (disk, engines, volume, mut random) = spanned_volume(&SpannedFixture::swapping(engine), 5);
        let mut tasks = TaskSet::default();
        for engine in &engines {
            let engine = Rc::clone(engine);
            tasks.add(async move { engine.run_abandoned().await });
        }
        let runners = tasks.len();
        let (mut applied, mut order) = (0, Prng::new(6));
        for number in 0..200 {
            let key = key_of(number);
            let mut complete = || {
                disk.complete_one(&mut order);
            };
            block_on(put(&engines[0], &key, 1), &mut complete);
            block_on(put(&engines[0], &key, 2), &mut complete);
            let is_over = Rc::new(Cell::new(false));
            let seen = Rc::new(RefCell::new(vec![2]));
            tasks.add(dropped_put(Rc::clone(&engines[0]), key.clone(), 3, random.below(6)));
            tasks.add(merge(Rc::clone(&engines[1]), key.clone()));
            let (reader, of_reader) = (Rc::clone(&engines[2]), (Rc::clone(&is_over), Rc::clone(&seen)));
            let read_key = key.clone();
            tasks.add(async move {
                while !of_reader.0.get() {
                    let operation = read(&reader, &read_key).await;
                    of_reader.1.borrow_mut().push(operation);
                    yield_now().await;
                }
            });
            let mut steps = 0..100_000;
            while tasks.len() > runners {
                assert!(steps.next().is_some(), "{engine}: key {number} is not written to its end");
                if !tasks.step(&mut random) || random.one_in(3) {
                    disk.complete_one(&mut random);
                }
                is_over.set(tasks.len() == runners + 1 && volume.is_idle());
            }
            seen.borrow_mut().push(block_on(read(&engines[0], &key), &mut complete));
            assert!(seen.borrow().is_sorted(), "{engine}: key {number}: {:?}", seen.borrow());
            applied += u64::from(seen.borrow().last() == Some(&3));
        }
        assert!(applied > 50 && applied < 195, "{engine}: {applied} applied");
        assert!(merged(&volume) > 100, "{engine}: {} merged", merged(&volume));
    }
}
