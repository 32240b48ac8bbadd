//! The merge against a sorted list, with damage and failures of its sources.

use super::cursor::EntryCursor;
use super::entry::Position;
use super::merge::MergingCursor;
use super::test_cursor::{TestCursor, TestEntry, histories, in_order, seeded, spread, test_key};
use crate::EngineError;
use octokv_base::{Prng, UnixTime, Version};
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

const KEYS: u8 = 16;
const BLOCK_ENTRIES: usize = 3;

#[derive(Clone, Debug)]
enum MergeOperation {
    Seek(u8, u64),
    SeekBefore(Option<(u8, u64)>),
    Next,
    Prev,
}

fn operations() -> impl Strategy<Value = Vec<MergeOperation>> {
    let operation = prop_oneof![
        1 => (0..KEYS, 0..80u64).prop_map(|(key, sequence)| MergeOperation::Seek(key, sequence)),
        1 => proptest::option::of((0..KEYS, 0..80u64)).prop_map(MergeOperation::SeekBefore),
        6 => Just(MergeOperation::Next),
        6 => Just(MergeOperation::Prev),
    ];
    proptest::collection::vec(operation, 0..60)
}

fn draws() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(any::<usize>().prop_map(|draw| draw % 64), 1..30)
}

/// Runs an operation to its end, through damage. Gives the blocks at which it failed.
fn run_through<C: EntryCursor>(cursor: &mut C, operation: &MergeOperation) -> Vec<u64> {
    let key = |number: u8| test_key(number);
    let outcome = match operation {
        MergeOperation::Seek(number, sequence) => {
            block_on(cursor.seek(Position { key: &key(*number), sequence: *sequence }), || ())
        }
        MergeOperation::SeekBefore(Some((number, sequence))) => {
            block_on(cursor.seek_before(Some(Position { key: &key(*number), sequence: *sequence })), || ())
        }
        MergeOperation::SeekBefore(None) => block_on(cursor.seek_before(None), || ()),
        MergeOperation::Next => block_on(cursor.next(), || ()),
        MergeOperation::Prev => block_on(cursor.prev(), || ()),
    };
    let is_forward = matches!(operation, MergeOperation::Seek(..) | MergeOperation::Next);
    let (mut outcome, mut damage) = (outcome, Vec::new());
    while let Err(error) = outcome {
        let EngineError::Corrupt { lba, .. } = error else { panic!("{error}") };
        damage.push(lba);
        assert!(cursor.entry().is_none(), "at an entry after damage");
        outcome = match is_forward {
            true => block_on(cursor.next(), || ()),
            false => block_on(cursor.prev(), || ()),
        };
    }
    damage
}

/// The place of the model after an operation; `None` at no entry.
fn model_place(model: &[TestEntry], at: Option<usize>, operation: &MergeOperation) -> Option<usize> {
    let bound = |number: u8, sequence: u64| {
        let key = test_key(number);
        model.partition_point(|entry| entry.get().position() < Position { key: &key, sequence })
    };
    match *operation {
        MergeOperation::Seek(number, sequence) => Some(bound(number, sequence)),
        MergeOperation::SeekBefore(Some((number, sequence))) => bound(number, sequence).checked_sub(1),
        MergeOperation::SeekBefore(None) => model.len().checked_sub(1),
        MergeOperation::Next => at.map(|at| at + 1),
        MergeOperation::Prev => at.and_then(|at| at.checked_sub(1)),
    }
    .filter(|&place| place < model.len())
}

fn damaged_cursors(sources: &[Rc<[TestEntry]>], damaged_blocks: &[Vec<usize>]) -> Vec<TestCursor> {
    let blocks = damaged_blocks.iter().cloned().chain(std::iter::repeat(Vec::new()));
    let cursor = |(index, (source, blocks)): (usize, (&Rc<[TestEntry]>, Vec<usize>))| {
        let mut cursor = TestCursor::new(Rc::clone(source), BLOCK_ENTRIES, blocks, index as u64 * 1000);
        cursor.is_slow = index % 2 == 1;
        cursor
    };
    sources.iter().zip(blocks).enumerate().map(cursor).collect()
}

/// The entries that can be read, in order, and the number of damaged blocks.
fn readable(sources: &[Rc<[TestEntry]>], damaged_blocks: &[Vec<usize>]) -> (Vec<TestEntry>, usize) {
    let (mut entries, mut damaged) = (Vec::new(), 0);
    for (source, cursor) in sources.iter().zip(damaged_cursors(sources, damaged_blocks)) {
        entries.extend((0..source.len()).filter(|&at| cursor.can_read(at)).map(|at| source[at].clone()));
        let blocks = source.len().div_ceil(BLOCK_ENTRIES);
        damaged += (0..blocks).filter(|&block| !cursor.can_read(block * BLOCK_ENTRIES)).count();
    }
    (in_order(&entries), damaged)
}

proptest! {
    #![proptest_config(seeded(500))]

    #[test]
    fn the_merge_moves_as_a_sorted_list_does(
        history in histories(KEYS, 60),
        operations in operations(),
        source_count in 1..9usize,
        draws in draws(),
        damaged_blocks in proptest::collection::vec(proptest::collection::vec(0..8usize, 0..3), 0..3),
    ) {
        let sources = spread(&history, source_count, &draws);
        let (model, damaged) = readable(&sources, &damaged_blocks);
        let mut merge = MergingCursor::new(damaged_cursors(&sources, &damaged_blocks));
        prop_assert!(merge.entry().is_none());
        let mut at = None;
        for operation in &operations {
            if at.is_none() && matches!(operation, MergeOperation::Next | MergeOperation::Prev) {
                continue;
            }
            let met = run_through(&mut merge, operation);
            prop_assert!(met.len() <= damaged, "{met:?}");
            at = model_place(&model, at, operation);
            prop_assert_eq!(merge.entry(), at.map(|at| model[at].get()), "{:?}", operation);
            prop_assert!(damaged > 0 || !merge.may_be_outdated());
        }
    }

    #[test]
    fn a_scan_meets_each_damaged_block_once_and_marks_what_may_be_outdated(
        history in histories(KEYS, 80),
        source_count in 1..6usize,
        draws in draws(),
        damaged_blocks in proptest::collection::vec(proptest::collection::vec(0..8usize, 0..4), 0..6),
        is_forward: bool,
    ) {
        let sources = spread(&history, source_count, &draws);
        let (model, damaged) = readable(&sources, &damaged_blocks);
        let truth: BTreeMap<_, _> = history.iter().map(|entry| (entry.key.clone(), entry.sequence)).collect();
        let mut merge = MergingCursor::new(damaged_cursors(&sources, &damaged_blocks));
        let (first, step) = match is_forward {
            true => (MergeOperation::Seek(0, u64::MAX), MergeOperation::Next),
            false => (MergeOperation::SeekBefore(None), MergeOperation::Prev),
        };
        let mut met = run_through(&mut merge, &first);
        let mut entries = Vec::new();
        let mut shown = std::collections::BTreeSet::new();
        while let Some(entry) = merge.entry() {
            entries.push(entry.sequence);
            // The newest entry of its key that can be read, but not the newest.
            let is_newest_readable = shown.insert(entry.key.to_vec());
            if is_forward && is_newest_readable && truth[entry.key] != entry.sequence {
                prop_assert!(merge.may_be_outdated(), "{:?}", entry);
            }
            met.extend(run_through(&mut merge, &step));
        }
        let mut want: Vec<u64> = model.iter().map(|entry| entry.sequence).collect();
        if !is_forward {
            want.reverse();
        }
        prop_assert_eq!(entries, want);
        prop_assert_eq!(met.len(), damaged);
        met.sort_unstable();
        met.dedup();
        prop_assert_eq!(met.len(), damaged, "a block was passed on twice");
    }
}

fn entry(key: u8, sequence: u64) -> TestEntry {
    let value = Some(vec![1]);
    TestEntry { key: vec![key], sequence, version: Version::NONE, expires_at: UnixTime::NEVER, value }
}

#[test]
fn a_step_compares_as_often_as_the_tree_is_high() {
    for source_count in 1..=33usize {
        let mut random = Prng::new(source_count as u64);
        let mut sources = vec![Vec::new(); source_count];
        for sequence in 1..=1000 {
            sources[random.below(source_count as u64) as usize]
                .push(entry(random.below(100) as u8, sequence));
        }
        let sources = sources.iter().map(|source| Rc::from(in_order(source)));
        let cursors = sources.map(|source| TestCursor::new(source, 1, Vec::new(), 0)).collect();
        let mut merge = MergingCursor::new(cursors);
        for (first, step) in [
            (MergeOperation::Seek(0, u64::MAX), MergeOperation::Next),
            (MergeOperation::SeekBefore(None), MergeOperation::Prev),
        ] {
            let before = merge.comparisons();
            run_through(&mut merge, &first);
            assert!(merge.comparisons() - before < source_count as u64, "{source_count} sources");
            while merge.entry().is_some() {
                let before = merge.comparisons();
                run_through(&mut merge, &step);
                let height = u64::from(source_count.next_power_of_two().ilog2());
                assert!(merge.comparisons() - before <= height, "{source_count} sources");
            }
        }
    }
}

#[test]
fn entries_of_sources_newer_than_the_damaged_one_are_not_outdated() {
    // The middle source loses b@5 and b@4, and goes on at d@6.
    let sources: [&[TestEntry]; 3] = [
        &[entry(b'b', 9), entry(b'c', 8)],
        &[entry(b'b', 5), entry(b'b', 4), entry(b'd', 6), entry(b'e', 6)],
        &[entry(b'a', 1), entry(b'b', 2), entry(b'c', 3), entry(b'd', 3), entry(b'e', 3), entry(b'f', 3)],
    ];
    let cursors = sources.iter().enumerate().map(|(index, source)| {
        let damaged_blocks = if index == 1 { vec![0] } else { Vec::new() };
        TestCursor::new(Rc::from(*source), 2, damaged_blocks, 0)
    });
    let mut merge = MergingCursor::new(cursors.collect());
    assert_eq!(run_through(&mut merge, &MergeOperation::Seek(3, 7)), [0], "from key [3]");
    let mut shown = Vec::new();
    while let Some(entry) = merge.entry() {
        shown.push((entry.key[0], entry.sequence, merge.source_index().unwrap(), merge.may_be_outdated()));
        run_through(&mut merge, &MergeOperation::Next);
    }
    let want = [
        (b'a', 1, 2, true),
        (b'b', 9, 0, false),
        (b'b', 2, 2, true),
        (b'c', 8, 0, false),
        (b'c', 3, 2, true),
        (b'd', 6, 1, true),
        (b'd', 3, 2, false),
        (b'e', 6, 1, false),
        (b'e', 3, 2, false),
        (b'f', 3, 2, false),
    ];
    assert_eq!(shown, want);
}

#[test]
fn a_failure_other_than_damage_ends_the_merge_until_a_seek() {
    let sources = [[entry(1, 5), entry(3, 5)], [entry(2, 4), entry(4, 4)]];
    for failing in 1..5 {
        let cursors: Vec<TestCursor> =
            sources.iter().map(|source| TestCursor::new(Rc::new(source.clone()), 1, vec![], 0)).collect();
        cursors[0].operations_left.set(failing);
        let mut merge = MergingCursor::new(cursors);
        let mut outcome = block_on(merge.seek(Position::START), || ());
        let mut steps = 0;
        while outcome.is_ok() && merge.entry().is_some() {
            steps += 1;
            outcome = block_on(merge.next(), || ());
        }
        let fails = failing < 4;
        assert_eq!((outcome.is_err(), steps), (fails, [0, 1, 3, 4][failing as usize - 1]), "{failing}");
        if fails {
            assert_eq!(outcome, Err(TestCursor::failure()));
        }
        assert!(merge.entry().is_none());
        for cursor in merge.sources() {
            cursor.operations_left.set(100);
        }
        run_through(&mut merge, &MergeOperation::Seek(3, 5));
        assert_eq!(merge.entry(), Some(sources[0][1].get()));
    }
}

#[test]
fn an_operation_that_is_dropped_leaves_no_entry() {
    let mut cursors: Vec<TestCursor> =
        (1..4).map(|key| TestCursor::new(Rc::new([entry(key, 1)]), 1, vec![], 0)).collect();
    cursors[1].is_slow = true;
    let mut merge = MergingCursor::new(cursors);
    let context = &mut Context::from_waker(Waker::noop());
    assert!(pin!(merge.seek(Position::START)).poll(context).is_pending());
    assert!(merge.entry().is_none());
    block_on(merge.seek(Position::START), || ()).unwrap();
    assert!(merge.entry().is_some());
    assert!(pin!(merge.seek(Position::START)).poll(context).is_pending());
    assert!(merge.entry().is_none(), "the state before the seek");
    block_on(merge.seek(Position::START), || ()).unwrap();
    block_on(merge.next(), || ()).unwrap();
    assert!(pin!(merge.next()).poll(context).is_pending());
    assert!(merge.entry().is_none());
    block_on(merge.seek_before(None), || ()).unwrap();
    assert_eq!(merge.entry().map(|entry| entry.key[0]), Some(3));
}

#[test]
fn a_merge_of_nothing_has_no_entry() {
    for cursors in [vec![], vec![TestCursor::new(Rc::new([]), 1, vec![], 0)]] {
        let mut merge = MergingCursor::new(cursors);
        block_on(merge.seek(Position::START), || ()).unwrap();
        assert!(merge.entry().is_none() && merge.source_index().is_none());
        block_on(merge.seek_before(None), || ()).unwrap();
        assert!(merge.entry().is_none() && !merge.may_be_outdated());
    }
}
