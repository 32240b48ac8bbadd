//! Slots: cursors that go on in what a memtable became, and the memory that is released.

use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use super::memtable::{Memtable, MemtableCursor};
use super::memtable_slot::{CursorSource, MemtableSlot, SlotContents, SlotCursor};
use super::merge::MergingCursor;
use super::retention::{ForgottenTombstones, RetentionRule};
use super::snapshot_view::{KeyBounds, SnapshotView};
use super::snapshots::SnapshotPoint;
use super::test_cursor::{TestCursor, TestEntry, histories, in_order, seeded, test_key};
use crate::EngineError;
use octokv_base::UnixTime;
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::sync::Arc;

const KEYS: u8 = 12;

/// What the memtables of these tests become: a memtable of what a flush kept.
impl CursorSource for Arc<Memtable> {
    type Cursor = MemtableCursor;
    type Context = ();
    fn cursor(&self, (): &()) -> MemtableCursor {
        MemtableCursor::new(Arc::clone(self))
    }
}

fn memtable_of<'a>(entries: impl IntoIterator<Item = TreeEntry<'a>>) -> Arc<Memtable> {
    let memtable = Memtable::default();
    assert!(entries.into_iter().all(|entry| memtable.insert(&entry)));
    Arc::new(memtable)
}

/// What a flush keeps for a snapshot, some time later.
fn flush(history: &[TestEntry], snapshot: SnapshotPoint) -> Arc<Memtable> {
    let now = UnixTime(snapshot.time.0 + 20);
    let rule = RetentionRule { snapshots: &[snapshot], now, forgotten: ForgottenTombstones::NONE };
    let sorted = in_order(history);
    let keys = sorted.chunk_by(|one, other| one.key == other.key);
    memtable_of(keys.flat_map(|entries| {
        let entries: Vec<TreeEntry<'_>> = entries.iter().map(TestEntry::get).collect();
        let retentions = rule.retain_in_flush(&entries);
        entries.into_iter().zip(retentions).filter_map(|(entry, retention)| retention.apply(entry))
    }))
}

proptest! {
    #![proptest_config(seeded(500))]

    #[test]
    fn a_cursor_goes_on_in_the_replacement_without_loss_or_repetition(
        history in histories(KEYS, 60),
        steps in proptest::collection::vec((0..5u8, 0..KEYS, 0..100u64), 0..40),
        replaced_at in 0..40usize,
    ) {
        let model = in_order(&history);
        let slot = Arc::new(MemtableSlot::new(memtable_of(history.iter().map(TestEntry::get))));
        let mut cursor = SlotCursor::new(Arc::clone(&slot), ());
        let mut at = None::<usize>;
        for (count, (step, number, sequence)) in steps.into_iter().enumerate() {
            if count == replaced_at {
                let memtable = Arc::downgrade(&slot.replace(memtable_of(history.iter().map(TestEntry::get))));
                prop_assert!(memtable.upgrade().is_none(), "a cursor holds the memtable");
            }
            let key = test_key(number);
            let position = Position { key: &key, sequence };
            let bound = model.partition_point(|entry| entry.get().position() < position);
            at = match (step, at) {
                (0 | 1, Some(at)) => {
                    block_on(cursor.next(), || ()).unwrap();
                    Some(at + 1)
                }
                (2 | 3, Some(at)) => {
                    block_on(cursor.prev(), || ()).unwrap();
                    at.checked_sub(1)
                }
                (_, _) if step % 2 == 0 => {
                    block_on(cursor.seek(position), || ()).unwrap();
                    Some(bound)
                }
                _ => {
                    block_on(cursor.seek_before(Some(position)), || ()).unwrap();
                    bound.checked_sub(1)
                }
            }
            .filter(|&at| at < model.len());
            prop_assert_eq!(cursor.entry(), at.map(|at| model[at].get()));
        }
    }

    /// The entries at which the cursors are may be missing in the replacements.
    #[test]
    fn a_view_goes_on_after_flushes_that_kept_what_its_snapshot_sees(
        history in histories(KEYS, 80),
        sequence in 0..160u64,
        time in 0..100u64,
        split in any::<proptest::sample::Index>(),
        replaced_at in [0..12usize, 0..12usize],
        is_forward: bool,
    ) {
        let snapshot = SnapshotPoint { sequence, time: UnixTime(time) };
        let (older, newer) = history.split_at(split.index(history.len() + 1));
        let parts = [newer, older];
        let slots = parts.map(|part| Arc::new(MemtableSlot::new(memtable_of(part.iter().map(TestEntry::get)))));
        let scan = |replaces: bool| {
            let slots = match replaces {
                true => slots.clone(),
                false => parts.map(|part| {
                    Arc::new(MemtableSlot::new(memtable_of(part.iter().map(TestEntry::get))))
                }),
            };
            let cursors = slots.iter().map(|slot| SlotCursor::new(Arc::clone(slot), ())).collect();
            let mut view = SnapshotView::new(MergingCursor::new(cursors), snapshot, KeyBounds::default());
            let yield_point = &mut async || ();
            match is_forward {
                true => block_on(view.seek(&[], yield_point), || ()).unwrap(),
                false => block_on(view.seek_before(None, yield_point), || ()).unwrap(),
            }
            let mut shown = Vec::new();
            loop {
                for (index, slot) in slots.iter().enumerate().filter(|_| replaces) {
                    if shown.len() == replaced_at[index] {
                        drop(slot.replace(flush(parts[index], snapshot)));
                    }
                }
                let Some(entry) = view.entry() else { return shown };
                shown.push((entry.key.to_vec(), entry.sequence));
                match is_forward {
                    true => block_on(view.next(yield_point), || ()).unwrap(),
                    false => block_on(view.prev(yield_point), || ()).unwrap(),
                }
            }
        };
        prop_assert_eq!(scan(true), scan(false));
    }
}

#[test]
fn a_replaced_memtable_is_released_although_its_slot_and_cursors_live() {
    let history = [0u8, 1, 2].map(|number| TestEntry {
        key: vec![number],
        sequence: 1,
        version: octokv_base::Version::NONE,
        expires_at: UnixTime::NEVER,
        value: Some(vec![number; 100]),
    });
    let memtable = memtable_of(history.iter().map(TestEntry::get));
    let released = Arc::downgrade(&memtable);
    let slot = Arc::new(MemtableSlot::new(memtable));
    let mut cursors: Vec<_> = (0..3).map(|_| SlotCursor::new(Arc::clone(&slot), ())).collect();
    for (cursor, entry) in cursors.iter_mut().zip(&history) {
        block_on(cursor.seek(entry.get().position()), || ()).unwrap();
    }
    // An operation that has begun keeps the memtable.
    let SlotContents::Memtable(in_use) = slot.contents() else { panic!("not replaced") };
    drop(slot.replace(memtable_of(history.iter().map(TestEntry::get))));
    assert!(matches!(slot.contents(), SlotContents::Replacement(_)));
    assert!(released.upgrade().is_some());
    drop(in_use);
    assert!(released.upgrade().is_none(), "a slot or a cursor holds the memtable");
    for (cursor, entry) in cursors.iter().zip(&history) {
        assert_eq!(cursor.entry(), Some(entry.get()));
    }
}

/// A replacement with a block that cannot be read.
struct DamagedTable(Vec<TestEntry>);

impl CursorSource for DamagedTable {
    type Cursor = TestCursor;
    type Context = ();
    fn cursor(&self, (): &()) -> TestCursor {
        TestCursor::new(self.0.clone().into(), 2, vec![1], 0)
    }
}

#[test]
fn a_cursor_passes_damage_that_it_meets_on_its_way_to_the_replacement() {
    let entries = [1, 2, 3, 4, 5, 6].map(|number| TestEntry {
        key: vec![number],
        sequence: 7,
        version: octokv_base::Version::NONE,
        expires_at: UnixTime::NEVER,
        value: None,
    });
    // At 2 forward and at 5 backward: what follows is damaged.
    for (from, is_forward, want) in [(1, true, 4), (4, false, 1)] {
        let slot = Arc::new(MemtableSlot::new(memtable_of(entries.iter().map(TestEntry::get))));
        let mut cursor = SlotCursor::new(Arc::clone(&slot), ());
        block_on(cursor.seek(entries[from].get().position()), || ()).unwrap();
        drop(slot.replace(DamagedTable(entries.to_vec())));
        let mut step = || match is_forward {
            true => block_on(cursor.next(), || ()),
            false => block_on(cursor.prev(), || ()),
        };
        assert!(matches!(step(), Err(EngineError::Corrupt { lba: 1, .. })));
        assert_eq!(step(), Ok(()));
        assert_eq!(cursor.entry(), Some(entries[want].get()));
    }
}

#[test]
#[should_panic(expected = "replaced once")]
fn a_memtable_is_replaced_once() {
    let slot = MemtableSlot::new(memtable_of([]));
    drop(slot.replace(memtable_of([])));
    drop(slot.replace(memtable_of([])));
}
