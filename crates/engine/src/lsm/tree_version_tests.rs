//! Versions: what edits of tables and segments make of them, and which are refused.

use super::super::compaction::{CompactionInput, CompactionSettings};
use super::super::compaction_choice::{ChoiceState, CompactionChoice, choose_compaction, pending_bytes};
use super::super::reclaim::ReclaimQueue;
use super::super::table_meta::tests::table_fields;
use super::super::table_meta::{SegmentSeal, TableFields};
use super::super::version_edit::TableMove;
use super::super::version_set::SegmentUsage;
use super::*;
use octokv_base::Version;
use octokv_base::map::FxHashSet;

fn table(queue: &Arc<ReclaimQueue>, id: u64, first: &[u8], last: &[u8]) -> Arc<TableMeta> {
    TableMeta::new(&table_fields(id, first, last), queue)
}

fn added(tables: &[(usize, &Arc<TableMeta>)]) -> VersionEdit {
    let added_tables = tables.iter().map(|(level, table)| (*level, (*table).clone())).collect();
    VersionEdit { added_tables, ..VersionEdit::default() }
}

fn removal(level: usize, table: &TableMeta) -> TableRemoval {
    TableRemoval { level, id: table.id(), first_key: table.first_key().to_vec() }
}

fn ids(tables: &[Arc<TableMeta>]) -> Vec<u64> {
    tables.iter().map(|table| table.id()).collect()
}

#[test]
fn tables_are_found_by_key_and_by_range() {
    let queue = ReclaimQueue::new();
    let tables = [(1, b"b", b"d"), (2, b"e", b"e"), (3, b"h", b"k")];
    let tables = tables.map(|(id, first, last)| table(&queue, id, first, last));
    let edit = added(&[(2, &tables[0]), (2, &tables[1]), (2, &tables[2])]);
    let version = TreeVersion::default().edited(&edit).unwrap();
    let found = |key: &[u8]| version.table_of(2, key).map(|table| table.id());
    let keys: [&[u8]; 9] = [b"a", b"b", b"d", b"da", b"e", b"f", b"h", b"k", b"l"];
    let wanted = [None, Some(1), Some(1), None, Some(2), None, Some(3), Some(3), None];
    assert_eq!(keys.map(found), wanted);
    //   want  from   to
    let ranges: [(Range<usize>, &[u8], &[u8]); 7] = [
        (0..0, b"", b"az"),
        (0..1, b"a", b"b"),
        (0..3, b"c", b"i"),
        (1..2, b"dd", b"e"),
        (2..2, b"f", b"g"),
        (2..3, b"k", b"z"),
        (3..3, b"l", b"z"),
    ];
    for (want, first, last) in ranges {
        assert_eq!(version.overlapping(2, first, last), want, "{first:?} to {last:?}");
    }
    assert!(version.is_bottommost(2, b"b", b"b") && version.is_bottommost(1, b"f", b"g"));
    assert!(!version.is_bottommost(1, b"c", b"c"));
    assert_eq!((version.level_tables(2), version.level_bytes(2)), (3, 3 << 20));
    assert_eq!(version.tables().map(|(level, table)| (level, table.id())).last(), Some((2, 3)));
}

#[test]
fn level_0_is_newest_first_whatever_the_order_of_flushes() {
    let queue = ReclaimQueue::new();
    let (one, two, three) =
        (table(&queue, 1, b"a", b"z"), table(&queue, 2, b"a", b"z"), table(&queue, 3, b"a", b"c"));
    let version = TreeVersion::default().edited(&added(&[(0, &two)])).unwrap();
    assert_eq!(version.edited(&added(&[(0, &two)])).unwrap_err(), VersionProblem::TableTwice { id: 2 });
    assert_eq!(version.edited(&added(&[(0, &one)])).unwrap().last_table_id(), 2, "it began first");
    let version = version.edited(&added(&[(0, &three)])).unwrap();
    assert_eq!((ids(version.level0()), version.level_bytes(0)), (vec![3, 2], 2 << 20));
    let edit = VersionEdit { removed_tables: vec![removal(0, &two)], ..VersionEdit::default() };
    assert_eq!(ids(version.edited(&edit).unwrap().level0()), [3]);
}

#[test]
fn tables_of_one_flush_are_one_run_and_call_for_no_compaction() {
    let queue = ReclaimQueue::new();
    let of_flush = |id: u64, sequences: Range<u64>, first: &[u8], last: &[u8]| {
        let (smallest_sequence, largest_sequence) = (sequences.start, sequences.end - 1);
        let fields = TableFields { smallest_sequence, largest_sequence, ..table_fields(id, first, last) };
        TableMeta::new(&fields, &queue)
    };
    let settings = CompactionSettings { level0_trigger: 3, ..CompactionSettings::default() };
    let chosen = |version: &TreeVersion| {
        let input = CompactionInput {
            version,
            usage: &SegmentUsage::default(),
            running: &[],
            oldest_snapshot: 0,
            forget_below: Version::NONE,
            settings: &settings,
            unmovable: &FxHashSet::default(),
            postponed: &FxHashSet::default(),
        };
        let choice = choose_compaction(&input, &mut ChoiceState::default());
        (
            version.level0_runs(),
            matches!(choice, CompactionChoice::Compact(_)),
            pending_bytes(version, &settings),
        )
    };
    // The flush found no run of free space for all of its entries.
    let first = [
        of_flush(1, 10..90, b"a", b"f"),
        of_flush(2, 1..95, b"g", b"m"),
        of_flush(3, 5..99, b"n", b"s"),
        of_flush(4, 20..50, b"t", b"z"),
    ];
    let version = TreeVersion::default().edited(&added(&first.each_ref().map(|table| (0, table)))).unwrap();
    assert_eq!(chosen(&version), (1, false, 0));
    // Later ones: one with the keys between two of the first, and one with their keys.
    let (between, above) = (of_flush(5, 100..150, b"fa", b"fz"), of_flush(6, 150..180, b"a", b"z"));
    let version = version.edited(&added(&[(0, &between)])).unwrap();
    assert_eq!(chosen(&version), (2, false, 0));
    let version = version.edited(&added(&[(0, &above)])).unwrap();
    assert_eq!(chosen(&version), (3, true, 6 << 20));
    // One whose entries are of the time of the newest and that shares its keys is another.
    let version = version.edited(&added(&[(0, &of_flush(7, 151..170, b"b", b"c"))])).unwrap();
    assert_eq!(version.level0_runs(), 4);
    let gone = first.iter().map(|table| removal(0, table)).collect();
    let version = version.edited(&VersionEdit { removed_tables: gone, ..VersionEdit::default() }).unwrap();
    assert_eq!(version.level0_runs(), 3);
}

#[test]
fn tables_of_level_0_that_share_no_keys_are_one_list() {
    let queue = ReclaimQueue::new();
    let tables = [
        (9, b"m", b"p"),
        (8, b"q", b"s"),
        (7, b"a", b"l"),
        (6, b"l", b"l"),
        (5, b"a", b"k"),
        (4, b"b", b"c"),
    ];
    let tables = tables.map(|(id, first, last)| table(&queue, id, first, last));
    let lists = |tables: &[Arc<TableMeta>]| -> Vec<Vec<u64>> {
        disjoint_lists(tables).iter().map(|list| ids(list)).collect()
    };
    assert_eq!(lists(&tables), [vec![7, 9, 8], vec![5, 6], vec![4]]);
    assert_eq!(lists(&tables[3..4]), [[6]]);
    assert!(lists(&[]).is_empty());
}

#[test]
fn a_moved_table_keeps_its_metadata_and_its_space() {
    let queue = ReclaimQueue::new();
    let one = table(&queue, 1, b"a", b"c");
    let version = TreeVersion::default().edited(&added(&[(0, &one)])).unwrap();
    let edit = VersionEdit {
        moved_tables: vec![TableMove { from: removal(0, &one), to_level: 1 }],
        ..VersionEdit::default()
    };
    drop(one);
    let next = version.edited(&edit).unwrap();
    assert_eq!((next.level_tables(0), next.level_tables(1), version.level_tables(0)), (0, 1, 1));
    drop(version);
    assert_eq!(queue.take(), []);
    drop(next);
    assert_eq!(queue.take().len(), 1);
}

#[test]
fn a_table_may_take_the_place_of_one_with_the_same_first_key() {
    let queue = ReclaimQueue::new();
    let (one, two) = (table(&queue, 1, b"a", b"m"), table(&queue, 2, b"a", b"c"));
    let version = TreeVersion::default().edited(&added(&[(1, &one)])).unwrap();
    let mut edit = added(&[(1, &two)]);
    assert_eq!(
        version.edited(&edit).unwrap_err(),
        VersionProblem::TablesOverlap { level: 1, before: 1, after: 2 }
    );
    edit.removed_tables.push(removal(1, &one));
    assert_eq!(version.edited(&edit).unwrap().table_of(1, b"b").unwrap().id(), 2);
}

#[test]
fn an_inconsistent_edit_is_named_and_changes_nothing() {
    let queue = ReclaimQueue::new();
    let (one, two) = (table(&queue, 1, b"b", b"d"), table(&queue, 2, b"f", b"h"));
    let version = TreeVersion::default().edited(&added(&[(1, &one), (1, &two)])).unwrap();
    let overlap = |id, first: &[u8], last: &[u8]| {
        version.edited(&added(&[(1, &table(&queue, id, first, last))])).unwrap_err()
    };
    let both = |before, after| VersionProblem::TablesOverlap { level: 1, before, after };
    assert_eq!(overlap(3, b"a", b"b"), both(3, 1));
    assert_eq!(overlap(3, b"d", b"e"), both(1, 3));
    assert_eq!(overlap(3, b"e", b"z"), both(3, 2));
    assert_eq!(overlap(3, b"c", b"c"), both(1, 3));
    let remove = |removals: &[TableRemoval]| {
        let edit = VersionEdit { removed_tables: removals.to_vec(), ..VersionEdit::default() };
        version.edited(&edit).unwrap_err()
    };
    let missing = |level, id| VersionProblem::TableMissing { level, id };
    assert_eq!(remove(&[removal(2, &one)]), missing(2, 1));
    assert_eq!(remove(&[removal(0, &one)]), missing(0, 1));
    assert_eq!(remove(&[TableRemoval { id: 9, ..removal(1, &one) }]), missing(1, 9));
    assert_eq!(remove(&[removal(1, &one), removal(1, &one)]), missing(1, 1));
    let again = version.edited(&added(&[(2, &two)])).unwrap_err();
    assert_eq!(again, VersionProblem::TableTwice { id: 2 });
    let flushed = |through| VersionEdit { flushed_through: Some(through), ..VersionEdit::default() };
    let version = version.edited(&flushed(7)).unwrap();
    let problem = VersionProblem::FlushedBackwards { through: 6 };
    assert_eq!(version.edited(&flushed(6)).unwrap_err(), problem);
    assert_eq!((version.level_tables(1), version.flushed_through()), (2, 7));
}

#[test]
fn segments_come_once_are_sealed_once_and_go() {
    let queue = ReclaimQueue::new();
    let segment = |id| SegmentMeta::new(id, Extent { location: 1000 + u64::from(id), units: 5 }, &queue);
    let add = |id| VersionEdit { added_segments: vec![segment(id)], ..VersionEdit::default() };
    let seal_of = |id, units| VersionEdit {
        sealed_segments: vec![(id, SegmentSeal { units, record_bytes: 5, last_sequence: 0 })],
        ..VersionEdit::default()
    };
    let seal = |id| seal_of(id, 5);
    let remove = |id| VersionEdit { removed_segments: vec![id], ..VersionEdit::default() };
    let version = TreeVersion::default().edited(&add(2)).unwrap();
    let missing = VersionProblem::SegmentMissing { segment: 3 };
    let twice = VersionProblem::SegmentTwice { segment: 2 };
    assert_eq!(version.edited(&seal(3)).unwrap_err(), missing);
    assert_eq!(version.edited(&remove(3)).unwrap_err(), missing);
    assert_eq!(version.edited(&add(2)).unwrap_err(), twice);
    for units in [0, 6, u64::MAX] {
        let problem = VersionProblem::SealOutside { segment: 2 };
        assert_eq!(version.edited(&seal_of(2, units)).unwrap_err(), problem);
    }
    let sealed = version.edited(&seal(2)).unwrap();
    assert_eq!(sealed.edited(&seal(2)).unwrap_err(), twice);
    assert!(version.segments().get(&2).unwrap().seal.is_none(), "as it was");
    let removed = sealed.edited(&remove(2)).unwrap();
    assert!(removed.segment(2).is_none() && sealed.segment(2).is_some());
    assert_eq!((removed.last_segment_id(), removed.edited(&add(1)).unwrap().last_segment_id()), (2, 2));
}

#[test]
fn extents_outside_or_on_each_other_are_found() {
    let queue = ReclaimQueue::new();
    let at = |id, location, units| {
        let extent = Extent { location, units };
        let key = [id as u8];
        TableMeta::new(
            &super::super::table_meta::TableFields { extent, ..table_fields(id, &key, &key) },
            &queue,
        )
    };
    let version =
        |tables: &[(usize, &Arc<TableMeta>)]| TreeVersion::default().edited(&added(tables)).unwrap();
    let fine = version(&[(0, &at(1, 10, 10)), (1, &at(2, 20, 5))]);
    assert_eq!(fine.check_extents(10..25), Ok(()));
    assert_eq!(fine.check_extents(11..25), Err(VersionProblem::ExtentOutside { location: 10 }));
    assert_eq!(fine.check_extents(10..24), Err(VersionProblem::ExtentOutside { location: 20 }));
    let wrong = version(&[(0, &at(1, 10, 10)), (1, &at(2, 19, 5))]);
    let problem = VersionProblem::ExtentsOverlap { location: 10, other_location: 19 };
    assert_eq!(wrong.check_extents(0..100), Err(problem));
}
