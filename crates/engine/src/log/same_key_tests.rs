//! Writes of one key that are in flight at once, and whose records share writes of the device: they end as if each had begun when the one before had ended.
//!
//! ```text
//!   operations of few keys, in an order ─▶ all begun, in it ─▶ outcomes, values, versions = those of a model that runs one after the other
//! ```
//! A write that fails with an error of the device has changed nothing, so the model leaves it out.

use super::test_log_volume::OpenTestVolume;
use crate::common::record::RecordMeta;
use crate::common::write_rules::{KnownKey, Remains, decide_delete, decide_put};
use crate::conformance::{key_of, value_of};
use crate::{DeleteOutcome, Durability, EngineError, PutMode, PutOptions, PutOutcome, ValueRange};
use futures_util::future::join_all;
use octokv_base::{Key, Prng, UnixTime, Version};
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::block_on;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

const KEYS: u64 = 2;
/// At once: as many as `join_all` polls in their order.
const IN_FLIGHT: u64 = 24;

/// A write of a key.
#[derive(Clone, Copy, Debug)]
enum KeyWrite {
    /// A value of so many bytes.
    Put(usize, PutOptions),
    Delete(Version),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteEnd {
    Put(PutOutcome),
    Delete(DeleteOutcome),
}

/// A key after some writes, one after the other.
#[derive(Clone, Default)]
struct KeyModel {
    meta: Option<RecordMeta>,
    /// The number of the write that stored its value, and its length.
    value: (u64, usize),
}

impl KeyModel {
    fn known(&self, now: UnixTime) -> KnownKey {
        self.meta.as_ref().map_or(KnownKey::ABSENT, |meta| KnownKey::of(meta, || now))
    }

    fn write(&mut self, number: u64, write: KeyWrite, now: UnixTime) -> WriteEnd {
        match write {
            KeyWrite::Put(bytes, options) => WriteEnd::Put(match decide_put(self.known(now), &options) {
                Ok(meta) => {
                    (self.meta, self.value) = (Some(meta), (number, bytes));
                    PutOutcome::Stored
                }
                Err(outcome) => outcome,
            }),
            KeyWrite::Delete(version) => {
                WriteEnd::Delete(match decide_delete(self.known(now), self.meta.as_ref(), version) {
                    Ok((remains, outcome)) => {
                        match remains {
                            Remains::Unchanged => {}
                            Remains::Nothing => self.meta = None,
                            Remains::Tombstone(meta) => self.meta = Some(meta),
                        }
                        outcome
                    }
                    Err(outcome) => outcome,
                })
            }
        }
    }

    /// The value of a get.
    fn value_of(&self, key: &Key, now: UnixTime) -> Option<Vec<u8>> {
        let (number, bytes) = self.value;
        self.known(now).exists.then(|| value_of(key, number, bytes))
    }
}

fn random_write(random: &mut Prng, number: u64, now: UnixTime) -> KeyWrite {
    // Versions of later writes are mostly higher.
    let version = match random.below(3) {
        0 => Version::from_bits((number + random.below(8)).saturating_sub(4)),
        _ => Version::NONE,
    };
    if random.one_in(5) {
        return KeyWrite::Delete(version);
    }
    let mode = match random.below(8) {
        0 => PutMode::AddOnly,
        1 => PutMode::UpdateOnly,
        2 => PutMode::IfVersion(Version::from_bits(number.saturating_sub(random.below(6)))),
        3 => PutMode::IfVersion(Version::NONE),
        _ => PutMode::Upsert,
    };
    let expires_at = match random.below(6) {
        0 => now,
        1 => UnixTime(now.0 + 1),
        _ => UnixTime::NEVER,
    };
    let bytes = [0, 1, 100, 400, 1_000, 3_000, 20_000][random.below(7) as usize];
    KeyWrite::Put(bytes, PutOptions { mode, version, expires_at })
}

async fn write(
    test: &OpenTestVolume,
    key: &Key,
    number: u64,
    write: KeyWrite,
) -> Result<WriteEnd, EngineError> {
    match write {
        KeyWrite::Put(bytes, options) => test.put(key, number, bytes, options).await.map(WriteEnd::Put),
        KeyWrite::Delete(version) => test.core.delete(key, version).await.map(WriteEnd::Delete),
    }
}

/// A rule for one write of those that touch a chunk in which a value log ends.
fn failed_value_write(test: &OpenTestVolume, store: usize, skip: u32) -> FaultRule {
    let (pool, tail) = (test.pool(), test.stores()[store].state.lock().values.tail());
    let first = pool.first_unit_of(tail.chunk);
    let blocks = [first, first + u64::from(pool.chunk_units())].map(|unit| test.core.volume.lba(unit));
    FaultRule::within(OpFilter::Write, blocks[0], blocks[1], InjectedFault::Error(5)).once(skip)
}

/// Runs random writes; in some rounds one write of values fails. Returns how many operations failed by that.
fn run_rounds(seed: u64, durability: Durability, is_rewritten: bool) -> usize {
    let test = OpenTestVolume::new(seed, durability, |settings| settings.rewrites_tail = is_rewritten);
    let mut random = Prng::new(seed);
    let mut models: Vec<KeyModel> = vec![KeyModel::default(); KEYS as usize];
    let (mut number, mut failed) = (0, 0);
    for round in 0..5 {
        let now = UnixTime(test.clock.fetch_add(1, Ordering::Relaxed) + 1);
        let has_fault = round % 2 == 1;
        if has_fault {
            let (store, skip) = (random.below(2) as usize, random.below(3) as u32);
            test.faults.add(failed_value_write(&test, store, skip));
        }
        let mut writes = Vec::new();
        for _ in 0..IN_FLIGHT {
            number += 1;
            writes.push((random.below(KEYS), number, random_write(&mut random, number, now)));
        }
        let keys: Vec<Key> = (0..KEYS).map(key_of).collect();
        let running =
            writes.iter().map(|&(key, number, of_key)| write(&test, &keys[key as usize], number, of_key));
        let ends = block_on(join_all(running), || ());
        test.faults.clear();
        for (&(key, number, of_key), end) in writes.iter().zip(ends) {
            let context = format!("seed {seed}, write {number} of key {key}: {of_key:?}");
            match end {
                Err(EngineError::Device { .. }) if has_fault => failed += 1,
                end => {
                    assert_eq!(end, Ok(models[key as usize].write(number, of_key, now)), "{context}");
                }
            }
        }
        for (key, model) in keys.iter().zip(&models) {
            assert_eq!(block_on(test.get(key), || ()), Ok(model.value_of(key, now)), "seed {seed}, {key}");
            let found = block_on(test.core.get(key, ValueRange::ALL), || ()).unwrap();
            let version = found.map(|value| value.version);
            let want = model.known(now).exists.then(|| model.known(now).version);
            assert_eq!(version, want, "seed {seed}, {key}");
        }
        test.check_counts();
    }
    failed
}

#[test]
fn writes_of_a_key_at_once_end_as_one_after_the_other() {
    let mut failed = 0;
    for seed in 0..200 {
        let durability = if seed % 2 == 0 { Durability::Completed } else { Durability::PowerSafe };
        failed += run_rounds(seed, durability, seed % 4 < 2);
    }
    assert!(failed > 200, "{failed} writes failed");
}

#[test]
fn a_write_that_fails_is_that_of_its_puts_alone() {
    // So that no later record lies in the last unit of the failed write.
    let test = OpenTestVolume::new(5, Durability::Completed, |settings| settings.rewrites_tail = false);
    let key = key_of(1);
    let store = test.stores().iter().position(|store| store.id == test.core.volume.place_of_key(&key).0.id);
    let put = |mode| KeyWrite::Put(100, PutOptions { mode, ..PutOptions::default() });
    let stored = Ok(WriteEnd::Put(PutOutcome::Stored));
    // The first record is written alone, and those that come meanwhile together.
    let writes = [
        (put(PutMode::Upsert), Some(stored)),
        (put(PutMode::Upsert), None),
        (put(PutMode::Upsert), None),
        (KeyWrite::Delete(Version::NONE), Some(Ok(WriteEnd::Delete(DeleteOutcome::Deleted)))),
        (put(PutMode::UpdateOnly), Some(Ok(WriteEnd::Put(PutOutcome::NotFound)))),
        (put(PutMode::Upsert), None),
        (put(PutMode::AddOnly), Some(stored)),
        (put(PutMode::AddOnly), Some(Ok(WriteEnd::Put(PutOutcome::Exists)))),
    ];
    let failed = failed_value_write(&test, store.expect("a store has the key"), 1);
    test.faults.add(failed);
    let running = writes.iter().zip(1..).map(|(&(of_key, _), number)| write(&test, &key, number, of_key));
    let ends = block_on(join_all(running), || ());
    for ((of_key, want), end) in writes.into_iter().zip(ends) {
        match want {
            Some(want) => assert_eq!(end, want, "{of_key:?}"),
            None => assert!(matches!(end, Err(EngineError::Device { .. })), "{of_key:?}: {end:?}"),
        }
    }
    assert_eq!(block_on(test.get(&key), || ()), Ok(Some(value_of(&key, 7, 100))));
    assert!(!test.core.volume.is_read_only());
    test.check_counts();
}

#[test]
fn puts_behind_one_that_is_dropped_end() {
    let plain = KeyWrite::Put(100, PutOptions::default());
    let (mut dropped_leads, mut dropped_waits) = (0, 0);
    for seed in 0..100 {
        // So that no later record lies in the last unit of a write whose leader is dropped.
        let test =
            OpenTestVolume::new(seed, Durability::Completed, |settings| settings.rewrites_tail = false);
        // No record is written with the first poll: a write whose batch is under way must not be dropped.
        test.faults.add(FaultRule::always(OpFilter::Write, InjectedFault::Slow { polls: 1 }));
        let (key, mut random) = (key_of(1), Prng::new(seed));
        let is_dropped = random.below(6);
        let mut puts: Vec<_> =
            (0..6).map(|number| Some(Box::pin(write(&test, &key, number, plain)))).collect();
        let context = &mut Context::from_waker(Waker::noop());
        for put in puts.iter_mut().flatten() {
            assert!(put.as_mut().poll(context).is_pending(), "its record is not written");
        }
        puts[is_dropped as usize] = None;
        let ends = block_on(join_all(puts.into_iter().flatten()), || ());
        let want = Ok(WriteEnd::Put(PutOutcome::Stored));
        assert!(ends.iter().all(|end| *end == want), "seed {seed}, without {is_dropped}: {ends:?}");
        let last = if is_dropped == 5 { 4 } else { 5 };
        assert_eq!(block_on(test.get(&key), || ()), Ok(Some(value_of(&key, last, 100))), "seed {seed}");
        test.check_counts();
        *(if is_dropped == 0 { &mut dropped_leads } else { &mut dropped_waits }) += 1;
    }
    assert!(dropped_leads > 5 && dropped_waits > 50, "{dropped_leads}, {dropped_waits}");
}

#[test]
fn a_key_that_a_put_has_not_decided_on_is_not_known_to_be_absent() {
    let test = OpenTestVolume::new(7, Durability::Completed, |_| ());
    test.faults.add(FaultRule::always(OpFilter::Write, InjectedFault::Slow { polls: 1 }));
    let key = key_of(1);
    let (store, prefix) = test.core.volume.place_of_key(&key);
    // Between its lock and its segment a put has its turn alone.
    let lock = block_on(store.lock_key(prefix), || ());
    let turn = store.queue_turn(prefix);
    drop(lock);
    assert!(!store.is_absent(prefix));
    drop(turn);
    assert!(store.is_absent(prefix));
    let mut put = pin!(write(&test, &key, 1, KeyWrite::Put(100, PutOptions::default())));
    assert!(put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // It waits for its record alone: it has left its lock to later writes.
    assert!(!store.is_absent(prefix));
    // A delete behind it, without an access of its own, waits for it.
    let delete = test.core.delete(&key, Version::NONE);
    let (stored, deleted) = block_on(futures_util::future::join(put, delete), || ());
    assert_eq!((stored, deleted), (Ok(WriteEnd::Put(PutOutcome::Stored)), Ok(DeleteOutcome::Deleted)));
    assert_eq!(block_on(test.get(&key), || ()), Ok(None));
}
