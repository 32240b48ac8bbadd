//! Writes of the hash engine whose futures are dropped half done: what they hold meanwhile, and what they leave.

use crate::common::HashFixture;
use crate::common::traced_memory::{DeviceTrace, TracedVolume, TracingMemory, poll_once};
use octokv_base::Key;
use octokv_device::{MemoryDevice, RamDisk};
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::HashEngine;
use octokv_engine::{DeleteOutcome, Durability, Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;

type PutResult = Result<PutOutcome, EngineError>;

fn start_put<'a>(
    engine: &'a HashEngine,
    key: &'a Key,
    operation: u64,
    bytes: usize,
) -> Pin<Box<dyn Future<Output = PutResult> + 'a>> {
    let record = record_of(engine.record_layout(), key, &value_of(key, operation, bytes));
    Box::pin(engine.put(key, PutMode::Upsert, record, bytes))
}

fn put(engine: &HashEngine, key: &Key, operation: u64, bytes: usize) -> PutResult {
    block_on(start_put(engine, key, operation, bytes), || ())
}

fn stored_operation(engine: &HashEngine, key: &Key) -> Option<u64> {
    let found = block_on(engine.get(key), || ()).unwrap();
    found.map(|value| operation_of(key, value.as_bytes()))
}

/// Polls a put once and drops it.
fn abandon(mut put: Pin<Box<dyn Future<Output = PutResult> + '_>>) {
    assert!(poll_once(&mut put.as_mut()).is_none(), "it waits");
}

fn run_abandoned(engine: &HashEngine) {
    assert!(poll_once(&mut pin!(engine.run_abandoned())).is_none(), "never ends");
}

#[test]
fn a_dropped_leader_commits_its_batch_and_a_dropped_follower_is_committed_by_its_leader() {
    for dropped in [[true, false], [false, true], [true, true]] {
        let mut volume = TracedVolume::new(Durability::PowerSafe, 4 << 20);
        let (engine, trace) = (Rc::clone(&volume.engine), Rc::clone(&volume.trace));
        let keys = [key_of(1), key_of(2)];
        trace.holds_flushes.set(true);
        let mut puts: Vec<_> = keys.iter().map(|key| start_put(&engine, key, 1, 100)).collect();
        puts.iter_mut().for_each(|put| assert!(poll_once(&mut put.as_mut()).is_none()));
        let mut kept: Vec<_> =
            puts.into_iter().zip(dropped).filter_map(|(put, dropped)| (!dropped).then_some(put)).collect();
        assert!(!engine.volume().is_idle());
        let mut runner = Box::pin(engine.run_abandoned());
        assert!(poll_once(&mut runner.as_mut()).is_none());
        trace.release();
        // The order in which they lead is not the caller's: a few polls of all let each batch end.
        let mut results = Vec::new();
        for _ in 0..4 {
            assert!(poll_once(&mut runner.as_mut()).is_none());
            kept.retain_mut(|put| {
                poll_once(&mut put.as_mut()).is_none_or(|result| {
                    results.push(result);
                    false
                })
            });
        }
        assert!(kept.is_empty() && results.iter().all(|result| *result == Ok(PutOutcome::Stored)));
        assert!(engine.volume().is_idle() && !engine.volume().is_read_only());
        drop((kept, runner));
        drop(engine);
        volume.reopen();
        keys.iter().for_each(|key| assert_eq!(stored_operation(&volume.engine, key), Some(1), "{dropped:?}"));
    }
}

#[test]
fn an_abandoned_put_keeps_its_key_locked_until_it_has_ended() {
    // Beside its batch, and before it.
    for bytes in [50_000, 200_000] {
        let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
        let key = key_of(1);
        assert_eq!(put(&engine, &key, 1, 100), Ok(PutOutcome::Stored));
        trace.held_from_bytes.set(40_000);
        abandon(start_put(&engine, &key, 2, bytes));
        let mut delete = Box::pin(engine.delete(&key));
        assert!(poll_once(&mut delete.as_mut()).is_none(), "its key is locked");
        let other = key_of(2);
        let mut runner = Box::pin(engine.run_abandoned());
        assert!(poll_once(&mut runner.as_mut()).is_none());
        assert!(poll_once(&mut delete.as_mut()).is_none(), "its key is locked");
        assert_eq!(stored_operation(&engine, &key), Some(1));
        trace.release();
        assert!(poll_once(&mut runner.as_mut()).is_none());
        assert_eq!(stored_operation(&engine, &key), Some(2), "{bytes} bytes");
        assert_eq!(poll_once(&mut delete.as_mut()), Some(Ok(DeleteOutcome::Deleted)));
        assert_eq!(put(&engine, &other, 3, 100), Ok(PutOutcome::Stored));
    }
}

#[test]
fn an_abandoned_writer_that_waits_for_its_key_writes_in_its_turn() {
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let key = key_of(1);
    trace.holds_flushes.set(true);
    let mut first = start_put(&engine, &key, 1, 100);
    assert!(poll_once(&mut first.as_mut()).is_none());
    abandon(start_put(&engine, &key, 2, 100));
    let mut third = start_put(&engine, &key, 3, 100);
    assert!(poll_once(&mut third.as_mut()).is_none());
    trace.release();
    assert_eq!(poll_once(&mut first.as_mut()), Some(Ok(PutOutcome::Stored)));
    assert!(poll_once(&mut third.as_mut()).is_none(), "the second has the lock");
    run_abandoned(&engine);
    assert_eq!(stored_operation(&engine, &key), Some(2));
    assert_eq!(poll_once(&mut third.as_mut()), Some(Ok(PutOutcome::Stored)));
    assert_eq!(stored_operation(&engine, &key), Some(3));
}

#[test]
fn an_abandoned_put_whose_flush_fails_makes_the_volume_read_only() {
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let (key, other) = (key_of(1), key_of(2));
    trace.holds_flushes.set(true);
    trace.held_flushes_fail.set(true);
    abandon(start_put(&engine, &key, 1, 100));
    let mut follower = start_put(&engine, &other, 1, 100);
    assert!(poll_once(&mut follower.as_mut()).is_none());
    trace.release();
    run_abandoned(&engine);
    assert!(engine.volume().is_read_only());
    assert!(poll_once(&mut follower.as_mut()).is_some_and(|result| result.is_err()));
    assert_eq!(put(&engine, &other, 2, 100), Err(EngineError::ReadOnly));
}

#[test]
fn a_handle_dropped_with_abandoned_operations_is_a_crash() {
    let mut volume = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let key = key_of(1);
    assert_eq!(put(&volume.engine, &key, 1, 100), Ok(PutOutcome::Stored));
    volume.trace.holds_flushes.set(true);
    abandon(start_put(&volume.engine, &key, 2, 100));
    let shared = std::sync::Arc::clone(volume.engine.volume());
    assert!(!shared.is_idle() && !shared.is_read_only());
    volume.trace.release();
    volume.reopen();
    assert!(shared.is_read_only());
    assert!(matches!(stored_operation(&volume.engine, &key), Some(1 | 2)));
}

#[test]
fn an_abandoned_checkpoint_or_flush_ends_and_the_next_one_waits_for_it() {
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::Completed, 4 << 20);
    let key = key_of(1);
    for operation in 1..=20 {
        assert_eq!(put(&engine, &key, operation, 100), Ok(PutOutcome::Stored));
    }
    trace.holds_flushes.set(true);
    let mut checkpoint = Box::pin(engine.checkpoint(false));
    assert!(poll_once(&mut checkpoint.as_mut()).is_none());
    drop(checkpoint);
    let mut flush = Box::pin(engine.flush());
    assert!(poll_once(&mut flush.as_mut()).is_none());
    drop(flush);
    let mut second = Box::pin(engine.checkpoint(false));
    assert!(poll_once(&mut second.as_mut()).is_none());
    trace.release();
    assert!(poll_once(&mut second.as_mut()).is_none(), "the first has the lock");
    run_abandoned(&engine);
    assert_eq!(poll_once(&mut second.as_mut()), Some(Ok(())));
    assert_eq!(engine.statistics().checkpoints, 2);
    assert!(engine.volume().is_idle());
}

/// A volatile volume on memory that can hold writes.
fn slow_volatile_volume() -> (HashEngine, Rc<DeviceTrace>) {
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(512);
    fixture.format.value_bytes_max = 64 << 10;
    let trace = Rc::<DeviceTrace>::default();
    let memory = MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap());
    let device = Rc::new(TracingMemory { memory, is_volatile: true, trace: Rc::clone(&trace) });
    (block_on(fixture.open(device), || ()).unwrap(), trace)
}

/// Fills a volume with keys that no test uses, and gives their number.
fn fill(engine: &HashEngine) -> u64 {
    (0..).find(|index| put(engine, &key_of(1_000 + index), 1, 300) == Ok(PutOutcome::Full)).unwrap()
}

#[test]
fn space_of_a_dropped_volatile_put_is_free_after_its_write_and_not_before() {
    let capacity = fill(&slow_volatile_volume().0);
    let (engine, trace) = slow_volatile_volume();
    let keys: Vec<Key> = (0..8).map(key_of).collect();
    keys.iter().for_each(|key| assert_eq!(put(&engine, key, 1, 300), Ok(PutOutcome::Stored)));
    trace.held_from_bytes.set(1);
    keys.iter().for_each(|key| abandon(start_put(&engine, key, 2, 300)));
    assert!(!engine.volume().is_idle());
    trace.held_from_bytes.set(0);
    keys.iter().for_each(|key| assert_eq!(stored_operation(&engine, key), Some(1)));
    assert_eq!(fill(&engine), capacity - 16, "the space of the writes in flight is not given away");
    trace.release();
    run_abandoned(&engine);
    assert!(engine.volume().is_idle());
    let freed = keys.iter().filter(|key| {
        put(&engine, &key_of(500 + key.as_bytes()[0] as u64), 1, 300) == Ok(PutOutcome::Stored)
    });
    assert_eq!(freed.count(), 8);
    keys.iter().for_each(|key| assert_eq!(stored_operation(&engine, key), Some(1)));
}

#[test]
fn dropped_writes_leave_no_space_behind() {
    let fresh = TracedVolume::new(Durability::PowerSafe, 2 << 20);
    let capacity = fill(&fresh.engine);
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 2 << 20);
    for round in 0..200 {
        trace.holds_flushes.set(true);
        let key = key_of(round % 5);
        abandon(start_put(&engine, &key, round + 1, 300));
        if round % 3 == 0 {
            let mut delete = Box::pin(engine.delete(&key));
            assert!(poll_once(&mut delete.as_mut()).is_none());
        }
        trace.release();
        run_abandoned(&engine);
    }
    for index in 0..5 {
        assert!(block_on(engine.delete(&key_of(index)), || ()).is_ok());
    }
    assert_eq!(engine.statistics().used_bytes, 0);
    assert_eq!(fill(&engine), capacity);
}
