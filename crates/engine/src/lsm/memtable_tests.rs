//! Memtables against a sorted list, readers beside a writer, and their memory.
#![allow(clippy::disallowed_methods, reason = "tests start threads")]

use super::cursor::EntryCursor;
use super::entry::{EntryValue, Position, TreeEntry, ValueAddress};
use super::memtable::{Memtable, MemtableCursor};
use super::test_cursor::{TestEntry, histories, in_order, seeded, test_key};
use octokv_base::{Prng, UnixTime, Version};
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const KEYS: u8 = 16;

fn memtable_of(entries: &[TestEntry]) -> Arc<Memtable> {
    let memtable = Memtable::default();
    assert!(entries.iter().all(|entry| memtable.insert(&entry.get())));
    Arc::new(memtable)
}

proptest! {
    #![proptest_config(seeded(200))]

    #[test]
    fn a_memtable_is_a_sorted_list(
        history in histories(KEYS, 100).prop_shuffle(),
        lookups in proptest::collection::vec((0..KEYS, 0..160u64), 30),
        steps in proptest::collection::vec(0..4u8, 60),
    ) {
        let memtable = memtable_of(&history);
        let model = in_order(&history);
        prop_assert_eq!(memtable.entries(), model.len());
        let numbers = model.iter().map(|entry| entry.sequence);
        prop_assert_eq!(memtable.sequences(), numbers.clone().min().zip(numbers.max()).map(|(min, max)| min..=max));
        let mut cursor = MemtableCursor::new(Arc::clone(&memtable));
        prop_assert_eq!(cursor.entry(), None);
        for (number, sequence) in lookups {
            let key = test_key(number);
            let position = Position { key: &key, sequence };
            let newest = model.iter().find(|entry| entry.key == key && entry.sequence <= sequence);
            prop_assert_eq!(memtable.get(&key, sequence), newest.map(TestEntry::get));
            let mut at = model.partition_point(|entry| entry.get().position() < position);
            block_on(cursor.seek_before(Some(position)), || ()).unwrap();
            prop_assert_eq!(cursor.entry(), at.checked_sub(1).map(|at| model[at].get()));
            block_on(cursor.seek(position), || ()).unwrap();
            for step in &steps {
                prop_assert_eq!(cursor.entry(), model.get(at).map(TestEntry::get));
                if cursor.entry().is_none() {
                    break;
                }
                // Three steps of four lead in one direction.
                if (*step == 0) == (number % 2 == 0) {
                    block_on(cursor.next(), || ()).unwrap();
                    at += 1;
                } else {
                    block_on(cursor.prev(), || ()).unwrap();
                    at = at.wrapping_sub(1);
                }
            }
        }
        block_on(cursor.seek_before(None), || ()).unwrap();
        prop_assert_eq!(cursor.entry(), model.last().map(TestEntry::get));
    }

    #[test]
    fn a_position_has_one_entry(history in histories(KEYS, 30), again in any::<proptest::sample::Index>()) {
        prop_assume!(!history.is_empty());
        let memtable = memtable_of(&history);
        let bytes = memtable.bytes();
        let twice = TreeEntry { value: EntryValue::Tombstone, ..again.get(&history).get() };
        prop_assert!(!memtable.insert(&twice));
        prop_assert_eq!((memtable.entries(), memtable.bytes()), (history.len(), bytes));
        prop_assert_eq!(memtable.get(twice.key, twice.sequence), Some(again.get(&history).get()));
    }
}

#[test]
fn every_kind_of_value_is_kept() {
    let memtable = Memtable::default();
    let address = ValueAddress { segment: 1, unit: u32::MAX, value_bytes: 3 };
    let values = [
        EntryValue::Tombstone,
        EntryValue::Inline(&[]),
        EntryValue::Inline(&[7; 5000]),
        EntryValue::InSegment(address),
    ];
    let entries = values.map(|value| TreeEntry {
        key: b"key",
        sequence: 1 << 62,
        version: Version::MAX,
        expires_at: UnixTime(5),
        value,
    });
    for (number, entry) in entries.iter().enumerate() {
        let entry = TreeEntry { sequence: entry.sequence - number as u64, ..*entry };
        assert!(memtable.insert(&entry));
        let found = memtable.first_from(entry.position()).expect("inserted");
        assert_eq!(memtable.entry(found), entry);
        assert_eq!(memtable.owned_entry(found).get(), entry);
        assert_eq!(memtable.get(b"key", entry.sequence), Some(entry));
    }
    assert_eq!(memtable.get(b"key", (1 << 62) - 4), None);
    assert_eq!(memtable.get(b"ke", u64::MAX), None);
}

#[test]
#[should_panic(expected = "sequence number 0")]
fn a_sequence_number_is_at_least_one() {
    let entry = TestEntry {
        key: test_key(1),
        sequence: 0,
        version: Version::NONE,
        expires_at: UnixTime::NEVER,
        value: None,
    };
    let _ = Memtable::default().insert(&entry.get());
}

/// A reader that begins after an insertion has returned finds it, however many follow meanwhile, in order and in both directions.
#[test]
fn readers_beside_a_writer_see_every_insertion_that_has_returned() {
    const ENTRIES: u64 = 6000;
    let memtable = &Arc::new(Memtable::default());
    let inserted = &AtomicU64::new(0);
    let key_of = |sequence: u64| Prng::new(sequence).below(2000).to_be_bytes();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for sequence in 1..=ENTRIES {
                let value = EntryValue::Inline(&[1; 20]);
                let (version, expires_at) = (Version::NONE, UnixTime::NEVER);
                let key = &key_of(sequence);
                assert!(memtable.insert(&TreeEntry { key, sequence, version, expires_at, value }));
                inserted.store(sequence, Ordering::Release);
            }
        });
        for thread in 0..3u64 {
            scope.spawn(move || {
                let mut random = Prng::new(thread);
                loop {
                    let snapshot = inserted.load(Ordering::Acquire);
                    let sequence = 1 + random.below(snapshot.max(1));
                    if sequence <= snapshot {
                        let found = memtable.get(&key_of(sequence), sequence).expect("inserted");
                        assert_eq!(found.sequence, sequence);
                    }
                    let mut cursor = MemtableCursor::new(Arc::clone(memtable));
                    let (mut seen, mut last) = (0, None::<(Vec<u8>, u64)>);
                    let is_forward = random.one_in(2);
                    match is_forward {
                        true => block_on(cursor.seek(Position::START), || ()).unwrap(),
                        false => block_on(cursor.seek_before(None), || ()).unwrap(),
                    }
                    while let Some(entry) = cursor.entry() {
                        seen += u64::from(entry.sequence <= snapshot);
                        if let Some((key, sequence)) = &last {
                            let last = Position { key, sequence: *sequence };
                            assert_eq!(last < entry.position(), is_forward);
                        }
                        last = Some((entry.key.to_vec(), entry.sequence));
                        match is_forward {
                            true => block_on(cursor.next(), || ()).unwrap(),
                            false => block_on(cursor.prev(), || ()).unwrap(),
                        }
                    }
                    assert_eq!(seen, snapshot, "forward {is_forward}");
                    if snapshot == ENTRIES {
                        break;
                    }
                }
            });
        }
    });
}
