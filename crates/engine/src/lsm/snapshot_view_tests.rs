//! Views against a map of what exists in a snapshot, with damage, many versions of a key, and many tombstones.

use super::merge::MergingCursor;
use super::snapshot_view::{ENTRIES_PER_YIELD, KeyBounds, SnapshotView, ViewStatistics};
use super::snapshots::SnapshotPoint;
use super::test_cursor::{TestCursor, TestEntry, histories, seeded, spread, test_key};
use crate::EngineError;
use octokv_base::{UnixTime, Version};
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

const KEYS: u8 = 16;
const BLOCK_ENTRIES: usize = 3;

#[derive(Clone, Debug)]
enum ViewOperation {
    Seek(u8),
    SeekBefore(Option<u8>),
    SeekAtOrBefore(u8),
    Next,
    Prev,
}

impl ViewOperation {
    fn is_forward(&self) -> bool {
        matches!(self, ViewOperation::Seek(_) | ViewOperation::Next)
    }

    fn is_step(&self) -> bool {
        matches!(self, ViewOperation::Next | ViewOperation::Prev)
    }

    fn run(&self, view: &mut SnapshotView<TestCursor>) -> Result<(), EngineError> {
        let yield_point = &mut async || ();
        match *self {
            ViewOperation::Seek(number) => block_on(view.seek(&test_key(number), yield_point), || ()),
            ViewOperation::SeekBefore(number) => {
                let key = number.map(test_key);
                block_on(view.seek_before(key.as_deref(), yield_point), || ())
            }
            ViewOperation::SeekAtOrBefore(number) => {
                block_on(view.seek_at_or_before(&test_key(number), yield_point), || ())
            }
            ViewOperation::Next => block_on(view.next(yield_point), || ()),
            ViewOperation::Prev => block_on(view.prev(yield_point), || ()),
        }
    }
}

fn operations() -> impl Strategy<Value = Vec<ViewOperation>> {
    let operation = prop_oneof![
        1 => (0..KEYS).prop_map(ViewOperation::Seek),
        1 => proptest::option::of(0..KEYS).prop_map(ViewOperation::SeekBefore),
        1 => (0..KEYS).prop_map(ViewOperation::SeekAtOrBefore),
        5 => Just(ViewOperation::Next),
        5 => Just(ViewOperation::Prev),
    ];
    proptest::collection::vec(operation, 0..60)
}

fn bounds() -> impl Strategy<Value = KeyBounds> {
    let key = |number: Option<u8>| number.map(|number| test_key(number).into_boxed_slice());
    let bound = || proptest::option::weighted(0.3, 0..KEYS);
    (bound(), bound()).prop_map(move |(lower, upper)| KeyBounds {
        lower: key(lower).unwrap_or_default(),
        upper: key(upper),
    })
}

fn snapshots() -> impl Strategy<Value = SnapshotPoint> {
    (0..500u64, 0..120u64).prop_map(|(sequence, time)| SnapshotPoint { sequence, time: UnixTime(time) })
}

/// What exists in a snapshot within bounds.
fn visible<'a>(
    history: &'a [TestEntry],
    snapshot: SnapshotPoint,
    bounds: &KeyBounds,
) -> BTreeMap<&'a [u8], &'a TestEntry> {
    let seen = history.iter().filter(|entry| entry.sequence <= snapshot.sequence);
    let mut newest: BTreeMap<&[u8], &TestEntry> = seen.map(|entry| (&entry.key[..], entry)).collect();
    newest.retain(|key, entry| {
        let within = *key >= &*bounds.lower && bounds.upper.as_deref().is_none_or(|upper| *key < upper);
        within && entry.exists_at(snapshot.time)
    });
    newest
}

/// The keys that an operation may pass before it shows one: behind or before the bound that it begins at.
fn passed(at: Option<&[u8]>, operation: &ViewOperation) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    let at = at.map(<[u8]>::to_vec).unwrap_or_default();
    match *operation {
        ViewOperation::Seek(number) => (Bound::Included(test_key(number)), Bound::Unbounded),
        ViewOperation::SeekBefore(Some(number)) => (Bound::Unbounded, Bound::Excluded(test_key(number))),
        ViewOperation::SeekBefore(None) => (Bound::Unbounded, Bound::Unbounded),
        ViewOperation::SeekAtOrBefore(number) => (Bound::Unbounded, Bound::Included(test_key(number))),
        ViewOperation::Next => (Bound::Excluded(at), Bound::Unbounded),
        ViewOperation::Prev => (Bound::Unbounded, Bound::Excluded(at)),
    }
}

proptest! {
    #![proptest_config(seeded(1000))]

    #[test]
    fn a_view_moves_as_a_map_does(
        history in histories(KEYS, 300),
        snapshot in snapshots(),
        bounds in bounds(),
        operations in operations(),
        source_count in 1..6usize,
        draws in proptest::collection::vec(0..64usize, 1..30),
    ) {
        let model = visible(&history, snapshot, &bounds);
        let sources = spread(&history, source_count, &draws);
        let cursors = sources.into_iter().map(|source| TestCursor::new(source, 1, vec![], 0)).collect();
        let mut view = SnapshotView::new(MergingCursor::new(cursors), snapshot, bounds);
        let mut at: Option<&[u8]> = None;
        for operation in &operations {
            operation.run(&mut view).unwrap();
            if at.is_some() || !operation.is_step() {
                let range = passed(at, operation);
                let mut range = model.range::<[u8], _>(as_slices(&range.0, &range.1));
                at = if operation.is_forward() { range.next() } else { range.next_back() }.map(|(key, _)| *key);
            }
            prop_assert_eq!(view.entry(), at.map(|key| model[key].get()), "{:?}", operation);
            prop_assert!(!view.may_be_outdated());
        }
    }

    #[test]
    fn a_view_of_damaged_sources_shows_nothing_wrong_that_it_does_not_mark(
        history in histories(KEYS, 300),
        snapshot in snapshots(),
        bounds in bounds(),
        operations in operations(),
        source_count in 1..6usize,
        draws in proptest::collection::vec(0..64usize, 1..30),
        damaged_blocks in proptest::collection::vec(proptest::collection::vec(0..16usize, 0..3), 6),
    ) {
        let model = visible(&history, snapshot, &bounds);
        let sources = spread(&history, source_count, &draws);
        let cursor = |(source, blocks)| TestCursor::new(source, BLOCK_ENTRIES, blocks, 0);
        let cursors: Vec<TestCursor> = sources.iter().cloned().zip(damaged_blocks).map(cursor).collect();
        let mut lost = Vec::new();
        for (source, cursor) in sources.iter().zip(&cursors) {
            lost.extend((0..source.len()).filter(|&at| !cursor.can_read(at)).map(|at| source[at].sequence));
        }
        let mut view = SnapshotView::new(MergingCursor::new(cursors), snapshot, bounds.clone());
        let mut at: Option<Vec<u8>> = None;
        for operation in &operations {
            let mut outcome = operation.run(&mut view);
            for _ in 0..1000 {
                let Err(error) = outcome else { break };
                prop_assert!(matches!(error, EngineError::Corrupt { .. }), "{}", error);
                prop_assert!(view.entry().is_none());
                let step = if operation.is_forward() { ViewOperation::Next } else { ViewOperation::Prev };
                outcome = step.run(&mut view);
            }
            prop_assert_eq!(outcome, Ok(()), "damage is passed on without end");
            if at.is_none() && operation.is_step() {
                prop_assert_eq!(view.entry(), None);
                continue;
            }
            let (mut from, mut to) = passed(at.as_deref(), operation);
            if let Some(entry) = view.entry() {
                prop_assert!(entry.key >= &*bounds.lower, "out of bounds");
                prop_assert!(bounds.upper.as_deref().is_none_or(|upper| entry.key < upper), "out of bounds");
                prop_assert!(BTreeMap::from([(entry.key, ())]).range::<[u8], _>(as_slices(&from, &to)).count() == 1);
                let truth = model.get(entry.key).map(|entry| entry.get());
                prop_assert!(Some(entry) == truth || view.may_be_outdated(), "{:?}, not {:?}", entry, truth);
                let key = Bound::Excluded(entry.key.to_vec());
                if operation.is_forward() { to = key } else { from = key }
            }
            for (key, entry) in model.range::<[u8], _>(as_slices(&from, &to)) {
                prop_assert!(lost.contains(&entry.sequence), "{:?} of {:?} is left out", entry, key);
            }
            at = view.entry().map(|entry| entry.key.to_vec());
        }
    }
}

/// A range of keys for a map of slices; empty if it is reversed.
fn as_slices<'a>(from: &'a Bound<Vec<u8>>, to: &'a Bound<Vec<u8>>) -> (Bound<&'a [u8]>, Bound<&'a [u8]>) {
    let slice = |bound: &'a Bound<Vec<u8>>| bound.as_ref().map(Vec::as_slice);
    match (slice(from), slice(to)) {
        (Bound::Excluded(from), Bound::Excluded(to)) if from >= to => {
            (Bound::Included(from), Bound::Excluded(from))
        }
        (Bound::Included(from), Bound::Excluded(to)) | (Bound::Excluded(from), Bound::Included(to))
            if from > to =>
        {
            (Bound::Included(from), Bound::Excluded(from))
        }
        other => other,
    }
}

fn entry(key: &[u8], sequence: u64, is_value: bool) -> TestEntry {
    let value = is_value.then(|| vec![sequence as u8]);
    TestEntry { key: key.to_vec(), sequence, version: Version::NONE, expires_at: UnixTime::NEVER, value }
}

fn view_of(entries: Vec<TestEntry>, sequence: u64) -> (SnapshotView<TestCursor>, Rc<Cell<u64>>) {
    let cursor = TestCursor::new(super::test_cursor::in_order(&entries).into(), 1, vec![], 0);
    let operations_left = Rc::clone(&cursor.operations_left);
    let snapshot = SnapshotPoint { sequence, time: UnixTime(0) };
    (SnapshotView::new(MergingCursor::new(vec![cursor]), snapshot, KeyBounds::default()), operations_left)
}

#[test]
fn many_versions_of_a_key_cost_a_few_steps_and_a_seek() {
    let versions = (1..=20_000).map(|sequence| entry(b"hot", sequence, true));
    let others = [entry(b"a", 1, true), entry(b"z", 1, true)];
    let (mut view, operations_left) = view_of(versions.chain(others).collect(), 10_000);
    let want = [(b"a".to_vec(), 1), (b"hot".to_vec(), 10_000), (b"z".to_vec(), 1)];
    for is_forward in [true, false] {
        let before = operations_left.get();
        let yield_point = &mut async || panic!("that many steps");
        match is_forward {
            true => block_on(view.seek(b"", yield_point), || ()).unwrap(),
            false => block_on(view.seek_before(None, yield_point), || ()).unwrap(),
        }
        let mut shown = Vec::new();
        while let Some(entry) = view.entry() {
            shown.push((entry.key.to_vec(), entry.sequence));
            match is_forward {
                true => block_on(view.next(yield_point), || ()).unwrap(),
                false => block_on(view.prev(yield_point), || ()).unwrap(),
            }
        }
        if !is_forward {
            shown.reverse();
        }
        assert_eq!(shown, want);
        let operations = before - operations_left.get();
        assert!(operations < 60, "{operations} operations, forward {is_forward}");
    }
    assert!(view.statistics().seeks >= 3, "{:?}", view.statistics());
}

#[test]
fn a_step_over_many_tombstones_yields() {
    const TOMBSTONES: u64 = 10_000;
    let tombstones = (1..=TOMBSTONES).map(|sequence| entry(&sequence.to_be_bytes(), sequence, false));
    let ends = [entry(b"", 1, true), entry(&[255; 9], 1, true)];
    let (mut view, _) = view_of(tombstones.chain(ends).collect(), TOMBSTONES);
    let yields = Cell::new(0);
    let yield_point = &mut async || yields.set(yields.get() + 1);
    block_on(view.seek(b"", yield_point), || ()).unwrap();
    assert_eq!(yields.take(), 0);
    block_on(view.next(yield_point), || ()).unwrap();
    assert_eq!(view.entry().map(|entry| entry.key.len()), Some(9));
    let expected = TOMBSTONES / u64::from(ENTRIES_PER_YIELD);
    assert_eq!(yields.take(), expected);
    block_on(view.prev(yield_point), || ()).unwrap();
    assert_eq!(view.entry().map(|entry| entry.key.len()), Some(0));
    assert_eq!(yields.take(), expected);
    let skipped_tombstones = 2 * TOMBSTONES;
    assert_eq!(view.statistics(), ViewStatistics { skipped_tombstones, ..ViewStatistics::default() });
}

#[test]
fn what_is_left_out_is_counted_by_its_reason() {
    let expired = TestEntry { expires_at: UnixTime(0), ..entry(b"c", 1, true) };
    let entries = vec![
        entry(b"a", 9, true),
        entry(b"a", 3, true),
        entry(b"a", 2, true),
        entry(b"b", 1, false),
        expired,
    ];
    for is_forward in [true, false] {
        let (mut view, _) = view_of(entries.clone(), 5);
        let yield_point = &mut async || ();
        match is_forward {
            true => {
                block_on(view.seek(b"", yield_point), || ()).unwrap();
                assert_eq!(view.entry(), Some(entries[1].get()));
                block_on(view.next(yield_point), || ()).unwrap();
                assert_eq!(view.entry(), None);
            }
            false => {
                block_on(view.seek_before(None, yield_point), || ()).unwrap();
                assert_eq!(view.entry(), Some(entries[1].get()));
            }
        }
        let want =
            ViewStatistics { skipped_versions: 2, skipped_tombstones: 1, skipped_expired: 1, seeks: 0 };
        assert_eq!(view.statistics(), want, "forward {is_forward}");
        assert!(view.merge().sources().len() == 1);
    }
}

#[test]
fn a_step_that_is_dropped_leaves_no_entry() {
    let mut cursor = TestCursor::new(Rc::new([entry(b"a", 1, true), entry(b"b", 1, true)]), 1, vec![], 0);
    cursor.is_slow = true;
    let snapshot = SnapshotPoint { sequence: 1, time: UnixTime(0) };
    let mut view = SnapshotView::new(MergingCursor::new(vec![cursor]), snapshot, KeyBounds::default());
    let yield_point = &mut async || ();
    block_on(view.seek(b"", yield_point), || ()).unwrap();
    assert!(view.entry().is_some());
    let context = &mut Context::from_waker(Waker::noop());
    assert!(pin!(view.next(yield_point)).poll(context).is_pending());
    assert_eq!(view.entry(), None);
    assert_eq!(block_on(view.next(yield_point), || ()), Ok(()));
    assert_eq!(view.entry(), None, "a step at no entry stays there");
    block_on(view.seek_before(None, yield_point), || ()).unwrap();
    assert_eq!(view.entry().map(|entry| entry.key[0]), Some(b'b'));
}
