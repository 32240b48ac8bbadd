//! Group commit: which writes wait for which, and what a failed one leaves.

use crate::common::traced_memory::{TracedVolume, poll_once};
use octokv_base::{Key, Lba};
use octokv_device::DeviceError;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::hash::HashEngine;
use octokv_engine::{DeleteOutcome, Durability, Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::pin::pin;
use std::rc::Rc;

/// The first block of the checkpoint areas: behind the superblocks and both copies of the journal, of 8 batches of 62
/// units.
const AREAS: u64 = 32 + 2 * 8 * 62;

fn put(engine: &HashEngine, key: &Key, operation: u64, bytes: usize) -> Result<PutOutcome, EngineError> {
    let value = value_of(key, operation, bytes);
    block_on(engine.put(key, PutMode::Upsert, record_of(engine.record_layout(), key, &value), bytes), || ())
}

fn stored_operation(engine: &HashEngine, key: &Key) -> Option<u64> {
    let found = block_on(engine.get(key), || ()).unwrap();
    found.map(|value| operation_of(key, value.as_bytes()))
}

#[test]
fn records_of_up_to_128_kib_are_written_beside_their_batch_and_longer_ones_delay_no_other_put() {
    let (long, short) = (Key::new(b"long").unwrap(), Key::new(b"short").unwrap());
    let limit = (128 << 10) - octokv_engine::common::record::LAYOUT.value_offset(long.len());
    for (value_bytes, is_concurrent) in [(limit, true), (limit + 1, false)] {
        let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 16 << 20);
        trace.held_from_bytes.set(128 << 10);
        let value = value_of(&long, 1, value_bytes);
        let mut long_put = pin!(engine.put(
            &long,
            PutMode::Upsert,
            record_of(engine.record_layout(), &long, &value),
            value_bytes
        ));
        assert!(poll_once(&mut long_put).is_none(), "its record is held");
        let journal_writes = trace.writes.borrow().iter().filter(|(_, bytes)| *bytes < 64 << 10).count();
        assert_eq!(journal_writes, if is_concurrent { 2 } else { 0 }, "{value_bytes} bytes");
        let value = value_of(&short, 2, 100);
        let mut short_put =
            pin!(engine.put(&short, PutMode::Upsert, record_of(engine.record_layout(), &short, &value), 100));
        assert_eq!(poll_once(&mut short_put).is_some(), !is_concurrent, "{value_bytes} bytes");
        trace.held_from_bytes.set(0);
        assert_eq!(poll_once(&mut long_put), Some(Ok(PutOutcome::Stored)));
    }
}

#[test]
fn a_full_journal_waits_for_a_checkpoint_and_gives_up_after_the_third_failure() {
    for (failures, want) in [(2, Ok(PutOutcome::Stored)), (3, Err(EngineError::from(DeviceError::Io(5))))] {
        let TracedVolume { engine, plan, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
        for _ in 0..failures {
            let areas =
                FaultRule::within(OpFilter::Write, Lba(AREAS), Lba(AREAS + 64), InjectedFault::Error(5));
            plan.add(areas.once(0));
        }
        let key = key_of(1);
        let last = (0..600)
            .map(|operation| put(&engine, &key, operation, 100))
            .find(|put| *put != Ok(PutOutcome::Stored));
        assert_eq!(last.unwrap_or(Ok(PutOutcome::Stored)), want, "{failures} failures");
        assert_eq!(engine.volume().is_read_only(), want.is_err());
        assert_eq!(engine.statistics().checkpoints, u64::from(want.is_ok()));
    }
}

#[test]
fn a_put_is_acknowledged_only_after_the_records_of_its_whole_batch_are_written() {
    let TracedVolume { engine, trace, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let keys: Vec<Key> = (0..5).map(key_of).collect();
    let start = |index: usize, bytes: usize| {
        let value = value_of(&keys[index], 1, bytes);
        Box::pin(engine.put(
            &keys[index],
            PutMode::Upsert,
            record_of(engine.record_layout(), &keys[index], &value),
            bytes,
        ))
    };
    // Three leaders are held before their flushes; the changes of two more puts share the next batch.
    trace.holds_flushes.set(true);
    trace.held_from_bytes.set(40_000);
    let mut leaders: Vec<_> = (0..3).map(|index| start(index, 100)).collect();
    let (mut short, mut long) = (start(3, 100), start(4, 50_000));
    leaders.iter_mut().for_each(|put| assert!(poll_once(&mut put.as_mut()).is_none()));
    assert!(poll_once(&mut short.as_mut()).is_none() && poll_once(&mut long.as_mut()).is_none());
    trace.holds_flushes.set(false);
    for put in &mut leaders {
        assert_eq!(poll_once(&mut put.as_mut()), Some(Ok(PutOutcome::Stored)));
    }
    for _ in 0..3 {
        assert!(poll_once(&mut short.as_mut()).is_none(), "the other record of its batch is not written");
        assert!(poll_once(&mut long.as_mut()).is_none());
    }
    assert_eq!(stored_operation(&engine, &keys[4]), None);
    trace.held_from_bytes.set(0);
    assert!(poll_once(&mut long.as_mut()).is_none(), "its leader has not flushed");
    assert_eq!(poll_once(&mut short.as_mut()), Some(Ok(PutOutcome::Stored)));
    assert_eq!(poll_once(&mut long.as_mut()), Some(Ok(PutOutcome::Stored)));
    assert_eq!(engine.statistics().journal_batches, 4);
}

#[test]
fn a_put_whose_record_is_not_written_changes_nothing_now_or_after_reopening() {
    [false, true].into_iter().for_each(assert_failed_records_change_nothing);
}

fn assert_failed_records_change_nothing(fails_first: bool) {
    let mut volume = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let keys: Vec<Key> = (0..7).map(key_of).collect();
    keys.iter().for_each(|key| assert_eq!(put(&volume.engine, key, 1, 100), Ok(PutOutcome::Stored)));
    let (engine, trace) = (Rc::clone(&volume.engine), Rc::clone(&volume.trace));
    let start = |index: usize, bytes: usize| {
        let value = value_of(&keys[index], 2, bytes);
        Box::pin(engine.put(
            &keys[index],
            PutMode::Upsert,
            record_of(engine.record_layout(), &keys[index], &value),
            bytes,
        ))
    };
    trace.holds_flushes.set(true);
    trace.held_from_bytes.set(40_000);
    trace.held_writes_fail.set(true);
    // Three batches of one change, then one of four.
    let lengths = [100, 50_000, 100, 100, 50_000, 100, 60_000];
    let mut puts: Vec<_> = lengths.iter().enumerate().map(|(index, &bytes)| start(index, bytes)).collect();
    puts.iter_mut().for_each(|put| assert!(poll_once(&mut put.as_mut()).is_none()));
    // Each record fails while the preceding batches are in flight, or when the last batch is claimed already.
    let mut results = vec![None; puts.len()];
    for fails_first in [fails_first, !fails_first] {
        match fails_first {
            true => trace.held_from_bytes.set(0),
            false => trace.holds_flushes.set(false),
        }
        for _ in 0..4 {
            for (put, result) in puts.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
                *result = poll_once(&mut put.as_mut());
            }
        }
    }
    drop(puts);
    // The records of the batch of four lie side by side and leave as one write: before writes fail no more, or after.
    let fails = |index: usize| if index < 3 { lengths[index] > 100 } else { !fails_first };
    let failed = Err(EngineError::from(DeviceError::Io(5)));
    for (index, result) in results.into_iter().enumerate() {
        assert_eq!(result, Some(if fails(index) { failed } else { Ok(PutOutcome::Stored) }), "put {index}");
    }
    assert_eq!(engine.statistics().journal_batches, 7 + 4);
    drop(engine);
    for context in ["now", "after reopening"] {
        for (index, key) in keys.iter().enumerate() {
            let want = if fails(index) { 1 } else { 2 };
            assert_eq!(stored_operation(&volume.engine, key), Some(want), "{context}: {key}, put {index}");
        }
        let used_by = |index: usize| {
            let value_bytes = if fails(index) { 100 } else { lengths[index] };
            let layout = volume.engine.record_layout();
            (layout.value_offset(keys[index].len()) + value_bytes).next_multiple_of(512) as u64
        };
        let statistics = volume.engine.statistics();
        let used_bytes = (0..7).map(used_by).sum();
        assert_eq!((statistics.keys, statistics.used_bytes), (7, used_bytes), "{context}");
        volume.reopen();
    }
}

#[test]
fn a_volume_is_idle_without_changes_in_flight_and_after_a_failed_write() {
    let TracedVolume { engine, trace, plan, .. } = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let key = key_of(1);
    let value = value_of(&key, 1, 100);
    assert!(engine.volume().is_idle());
    trace.holds_flushes.set(true);
    let mut held =
        pin!(engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 100));
    assert!(poll_once(&mut held).is_none());
    assert!(!engine.volume().is_idle());
    trace.holds_flushes.set(false);
    assert_eq!(poll_once(&mut held), Some(Ok(PutOutcome::Stored)));
    assert!(engine.volume().is_idle());
    plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
    assert!(put(&engine, &key, 2, 100).is_err());
    assert!(engine.volume().is_idle() && engine.volume().is_read_only());
}

/// A leader that waited for journal space wrote a batch after the failure. It held the next change of the failed put's key,
/// with the same predecessor, and replay gave the key two records: one outlived a delete.
#[test]
fn no_batch_is_written_after_a_failed_one() {
    let mut volume = TracedVolume::new(Durability::PowerSafe, 4 << 20);
    let (engine, trace) = (Rc::clone(&volume.engine), Rc::clone(&volume.trace));
    let (key, other) = (key_of(1), key_of(2));
    // Room for one more batch: the ring has 8 batches of 62 units, and two stay free.
    for operation in 0..6 * 62 {
        assert_eq!(put(&engine, &key, operation, 100), Ok(PutOutcome::Stored));
    }
    let start = |key: &Key, operation: u64, bytes: usize| {
        let value = value_of(key, operation, bytes);
        let (engine, key) = (Rc::clone(&engine), key.clone());
        Box::pin(async move {
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), bytes).await
        })
    };
    // The batch is written, its record is not; the next change of the key waits for the first.
    trace.held_from_bytes.set(40_000);
    trace.held_writes_fail.set(true);
    let mut failing = start(&key, 1_000, 50_000);
    assert!(poll_once(&mut failing.as_mut()).is_none());
    let mut next = start(&key, 1_001, 100);
    assert!(poll_once(&mut next.as_mut()).is_none());
    // Another leader writes a checkpoint first.
    trace.holds_flushes.set(true);
    let mut leading = start(&other, 1_002, 100);
    assert!(poll_once(&mut leading.as_mut()).is_none());
    let journal = FaultRule::within(OpFilter::Write, Lba(32), Lba(AREAS), InjectedFault::Error(5));
    volume.plan.add(journal.once(0));
    trace.held_from_bytes.set(0);
    assert_eq!(poll_once(&mut failing.as_mut()), Some(Err(EngineError::from(DeviceError::Io(5)))));
    assert_eq!(poll_once(&mut next.as_mut()), Some(Err(EngineError::ReadOnly)));
    trace.writes.borrow_mut().clear();
    trace.holds_flushes.set(false);
    assert_eq!(poll_once(&mut leading.as_mut()), Some(Err(EngineError::ReadOnly)));
    let is_journal = |&(lba, _): &(u64, usize)| (32..AREAS).contains(&lba);
    assert_eq!(trace.writes.borrow().iter().filter(|write| is_journal(write)).count(), 0);
    drop((failing, next, leading, engine));
    volume.reopen();
    assert_eq!(volume.engine.statistics().keys, 1);
    assert_eq!(block_on(volume.engine.delete(&key), || ()), Ok(DeleteOutcome::Deleted));
    assert_eq!(stored_operation(&volume.engine, &key), None);
}
