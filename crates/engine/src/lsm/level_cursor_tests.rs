//! Cursors over levels against the plain list of their entries: random tables, moves in both directions, damage, and the reads that a
//! prefetch of indexes makes and saves.

use super::cursor::EntryCursor;
use super::entry::Position;
use super::level_cursor::{IndexArrivals, LevelCursor, LevelCursorConfig, UnreadKeys, place_of};
use super::table::cursor::TableCursorConfig;
use super::table::info::TablePlace;
use super::test_cursor::{histories, in_order, seeded, test_key};
use super::test_level::{LEVEL, TestLevel, UNIT_BYTES, key, level_of};
use crate::EngineError;
use octokv_base::Lba;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::pin::pin;
use std::task::{Context, Waker};

const PREFETCH: LevelCursorConfig = LevelCursorConfig::ITERATOR;
/// Indexes are read ahead, blocks are not.
const INDEX_PREFETCH: LevelCursorConfig = LevelCursorConfig {
    table: TableCursorConfig { prefetches_blocks: false, ..TableCursorConfig::ITERATOR },
    ..PREFETCH
};
const NO_PREFETCH: LevelCursorConfig = LevelCursorConfig { prefetches_index: false, ..INDEX_PREFETCH };

const CONFIGS: [LevelCursorConfig; 6] = [
    PREFETCH,
    INDEX_PREFETCH,
    NO_PREFETCH,
    LevelCursorConfig::COMPACTION,
    LevelCursorConfig { prefetch_blocks: 1, ..PREFETCH },
    LevelCursorConfig {
        table: TableCursorConfig { read_ahead_bytes: 700, ..TableCursorConfig::ITERATOR },
        prefetch_blocks: 9,
        ..PREFETCH
    },
];

/// What a scan found, by index, and what it could not read.
#[derive(Debug, Default)]
struct Scanned {
    found: Vec<usize>,
    unread: Vec<UnreadKeys>,
    arrivals: IndexArrivals,
}

fn scan(level: &TestLevel, cursor: &mut LevelCursor, is_forward: bool) -> Scanned {
    let mut scanned = Scanned::default();
    let run = async {
        let mut moved = match is_forward {
            true => cursor.seek(Position::START).await,
            false => cursor.seek_before(None).await,
        };
        // A scan that is in one place again and again would not end.
        for _ in 0..2 * level.entries.len() + level.tables.len() + 2 {
            match (moved, cursor.entry()) {
                (Ok(()), Some(entry)) => {
                    let index = level.lower_bound(entry.position());
                    assert_eq!(entry, level.entries[index].get());
                    assert_eq!(cursor.unread_part(), None);
                    scanned.found.push(index);
                }
                (Err(EngineError::Corrupt { .. }), None) => {
                    scanned.unread.push(cursor.unread_part().expect("what was not read").clone());
                }
                (Ok(()), None) => return,
                other => panic!("{other:?}"),
            }
            moved = if is_forward { cursor.next().await } else { cursor.prev().await };
        }
        panic!("the scan does not end");
    };
    block_on(run, || ());
    scanned.arrivals = cursor.index_arrivals();
    if !is_forward {
        scanned.found.reverse();
        scanned.unread.reverse();
    }
    assert!(scanned.found.is_sorted_by(|before, after| before < after), "each entry once, in order");
    scanned
}

/// Operation, key, sequence number.
type Move = (u8, u8, u64);

fn moves() -> impl Strategy<Value = Vec<Move>> {
    proptest::collection::vec((0..20u8, 0..90u8, prop_oneof![Just(u64::MAX), 0..600u64]), 1..80)
}

async fn follow(level: &TestLevel, cursor: &mut LevelCursor, moves: &[Move]) {
    let mut model: Option<usize> = None;
    level.assert_at(cursor, None);
    for &(operation, key, sequence) in moves {
        let key = test_key(key);
        let position = Position { key: &key, sequence };
        // Steps go on in one direction for some time, so that they cross tables.
        let steps = 1 + usize::from(operation) % 8 * 5;
        match (operation, model) {
            (0..3, _) | (3..12, None) => {
                cursor.seek(position).await.unwrap();
                model = Some(level.lower_bound(position)).filter(|&index| index < level.entries.len());
            }
            (12..15, _) | (_, None) => {
                let end = (sequence % 5 > 0).then_some(position);
                cursor.seek_before(end).await.unwrap();
                model = end.map_or(level.entries.len(), |end| level.lower_bound(end)).checked_sub(1);
            }
            (_, Some(_)) => {
                for _ in 0..steps {
                    let Some(now) = model else { break };
                    if operation < 12 {
                        cursor.next().await.unwrap();
                        model = Some(now + 1).filter(|&index| index < level.entries.len());
                    } else {
                        cursor.prev().await.unwrap();
                        model = now.checked_sub(1);
                    }
                    level.assert_at(cursor, model);
                }
            }
        }
        level.assert_at(cursor, model);
    }
}

proptest! {
    #![proptest_config(seeded(192))]

    #[test]
    fn a_cursor_that_moves_at_random_is_where_the_models_is(
        history in histories(90, 300),
        table_entries in 1..60usize,
        config in prop::sample::select(&CONFIGS[..]),
        cache_bytes in prop::sample::select(&[0u64, 1 << 20][..]),
        polls in 0..40u32,
        is_list: bool,
        moves in moves(),
    ) {
        let level = TestLevel::new(in_order(&history), |at| at % table_entries < 3, cache_bytes);
        level.slow_reads(polls);
        let mut cursor = if is_list { level.cursor_of_list(config) } else { level.cursor(config) };
        block_on(follow(&level, &mut cursor, &moves), || ());
    }

    #[test]
    fn a_scan_meets_each_damaged_part_once_and_loses_nothing_else(
        history in histories(90, 300),
        table_entries in 1..60usize,
        config in prop::sample::select(&CONFIGS[..]),
        damaged_units in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
        lost_tables in proptest::collection::vec(any::<prop::sample::Index>(), 0..3),
        polls in 0..3u32,
    ) {
        let level = TestLevel::new(in_order(&history), |at| at % table_entries < 3, 1 << 20);
        if level.tables.is_empty() {
            return Ok(());
        }
        let mut lost_tables: Vec<usize> =
            lost_tables.iter().map(|index| index.index(level.tables.len())).collect();
        lost_tables.sort_unstable();
        lost_tables.dedup();
        lost_tables.iter().for_each(|&table| level.lose_index(table));
        let units = level.tables.iter().map(|table| table.extent().units).sum::<u64>();
        damaged_units.iter().for_each(|unit| level.damage(Lba(1 + unit.index(units as usize) as u64)));
        level.slow_reads(polls);
        let scans = [true, false].map(|is_forward| scan(&level, &mut level.cursor(config), is_forward));
        let [Scanned { found, unread, .. }, back] = &scans;
        prop_assert_eq!(found, &back.found);
        prop_assert_eq!(unread, &back.unread);
        // Damaged parts come in order. They may have the key between them in common.
        prop_assert!(unread.is_sorted_by(|before, after| before.last <= after.first));
        for index in (0..level.entries.len()).filter(|index| found.binary_search(index).is_err()) {
            let key = &level.entries[index].key;
            prop_assert!(unread.iter().any(|part| &part.first <= key && key <= &part.last), "{:?}", key);
        }
        for part in unread {
            let table = level.version.table_of(LEVEL, &part.first).expect("keys of a table");
            prop_assert!(part.last[..] <= *table.last_key());
        }
        for &table in &lost_tables {
            let range = level.ranges[table].clone();
            prop_assert!(!found.iter().any(|index| range.contains(index)));
            let table = &level.tables[table];
            let [first, last] = [table.first_key(), table.last_key()].map(<[u8]>::to_vec);
            prop_assert_eq!(unread.iter().filter(|part| **part == UnreadKeys { first: first.clone(), last: last.clone() }).count(), 1);
        }
        if lost_tables.is_empty() && damaged_units.is_empty() {
            prop_assert!(unread.is_empty() && found.len() == level.entries.len());
        }
    }
}

#[test]
fn a_scan_reads_each_part_once_with_and_without_prefetch() {
    for (is_forward, polls) in [(true, 0), (false, 0), (true, 3), (false, 3), (true, 1000), (false, 1000)] {
        let mut all_reads = Vec::new();
        for (config, is_prefetched) in [(PREFETCH, true), (NO_PREFETCH, false)] {
            let level = level_of(6, 1 << 20);
            level.slow_reads(polls);
            let scanned = scan(&level, &mut level.cursor(config), is_forward);
            assert_eq!(scanned.found.len(), level.entries.len());
            // Ten entries or so are in the last two blocks, a step polls once.
            let arrivals = match (is_prefetched, polls) {
                (false, _) => IndexArrivals { missing: 5, ..IndexArrivals::default() },
                (true, 0 | 3) => IndexArrivals { there: 5, ..IndexArrivals::default() },
                (true, _) => IndexArrivals { in_flight: 5, ..IndexArrivals::default() },
            };
            assert_eq!(scanned.arrivals, arrivals, "forward: {is_forward}, {polls} polls");
            for table in 0..6 {
                assert_eq!(level.index_reads(table), 1, "table {table}");
            }
            let mut reads = level.reads.take();
            reads.sort_unstable();
            all_reads.push(reads);
            // What is in the cache is neither read nor prefetched.
            let mut again = level.cursor(config);
            let scanned = scan(&level, &mut again, !is_forward);
            assert_eq!(scanned.arrivals, IndexArrivals { there: 5, ..IndexArrivals::default() });
            assert!(level.reads.take().is_empty());
        }
        let [ahead, one_by_one] = &all_reads[..] else { panic!("two scans") };
        let covered = |reads: &[(Lba, usize)]| -> BTreeSet<u64> {
            reads
                .iter()
                .flat_map(|(lba, bytes)| lba.0..lba.0 + *bytes as u64 / u64::from(UNIT_BYTES))
                .collect()
        };
        assert_eq!(covered(ahead), covered(one_by_one), "the same blocks of the device");
        match is_forward {
            true => assert!(3 * ahead.len() < one_by_one.len(), "{ahead:?} instead of {one_by_one:?}"),
            false => assert_eq!(ahead, one_by_one, "the same reads"),
        }
    }
}

#[test]
fn the_next_index_is_read_from_the_configured_block_on() {
    for (is_forward, prefetch_blocks) in [(true, 1), (true, 2), (true, 4), (false, 1), (false, 2), (false, 4)]
    {
        let level = level_of(4, 1 << 20);
        let config = LevelCursorConfig { prefetch_blocks, ..INDEX_PREFETCH };
        scan(&level, &mut level.cursor(config), is_forward);
        let reads = level.reads.take();
        let place_in_order = |table: usize| if is_forward { table } else { 3 - table };
        let begins = |table: usize| {
            let read = level.index_read(place_in_order(table));
            reads.iter().position(|&other| other == read).expect("it was read")
        };
        for table in 0..3 {
            let location = level.tables[place_in_order(table)].extent();
            let behind = reads[begins(table + 1) + 1..]
                .iter()
                .filter(|(at, _)| (location.location..location.location + location.units).contains(&at.0));
            // The block in which the prefetch started was read before.
            assert_eq!(behind.count() as u32, prefetch_blocks - 1, "table {table}, forward: {is_forward}");
        }
    }
}

#[test]
fn the_first_step_back_in_a_block_reads_the_one_before_ahead() {
    for (config, is_forward) in [(PREFETCH, false), (INDEX_PREFETCH, false), (INDEX_PREFETCH, true)] {
        let level = level_of(1, 1 << 20);
        let mut cursor = level.cursor(config);
        let run = async {
            match is_forward {
                true => cursor.seek(Position::START).await.unwrap(),
                false => cursor.seek_before(None).await.unwrap(),
            }
            assert_eq!(level.reads.take().len(), 2, "the index and a block");
            let mut reads_of_steps = Vec::new();
            while cursor.entry().is_some() {
                match is_forward {
                    true => cursor.next().await.unwrap(),
                    false => cursor.prev().await.unwrap(),
                }
                reads_of_steps.push(level.reads.take().len());
            }
            reads_of_steps
        };
        let reads_of_steps = block_on(run, || ());
        let blocks = 1 + reads_of_steps.iter().sum::<usize>();
        assert!(blocks > 3 && reads_of_steps.iter().all(|&reads| reads < 2), "{reads_of_steps:?}");
        let is_ahead = config == PREFETCH;
        assert_eq!(reads_of_steps[0] == 1, is_ahead, "{reads_of_steps:?}");
        // The last block has none behind it: its entries take no reads.
        let last = reads_of_steps.iter().rposition(|&reads| reads == 1).unwrap();
        let steps_of_block = reads_of_steps.len() / blocks;
        let behind = reads_of_steps.len() - last;
        assert_eq!(behind > steps_of_block + steps_of_block / 2, is_ahead, "{reads_of_steps:?}");
    }
}

/// The number of reads of data blocks, and their bytes, in a scan of some steps from the first key of a table on.
fn reads_of_scan(level: &TestLevel, table: usize, steps: usize) -> (usize, usize) {
    let mut cursor = level.cursor(PREFETCH);
    let from = &level.entries[level.ranges[table].start];
    let run = async {
        cursor.seek(Position::before(&from.key)).await.unwrap();
        for _ in 0..steps {
            cursor.next().await.unwrap();
        }
    };
    block_on(run, || ());
    let index_reads: Vec<usize> = (0..level.tables.len()).map(|table| level.index_reads(table)).collect();
    let reads = level.reads.take();
    let bytes = reads.iter().map(|(_, bytes)| bytes).sum();
    (reads.len() - index_reads.iter().sum::<usize>(), bytes)
}

#[test]
fn a_scan_forward_reads_at_once_what_those_before_it_needed() {
    let level = level_of(8, 1 << 20);
    let steps = level.ranges[0].len() / 2;
    let (first, _) = reads_of_scan(&level, 0, steps);
    assert_eq!(first, 3, "one block, then three, then four");
    for table in 1..4 {
        assert_eq!(reads_of_scan(&level, table, steps).0, 1, "table {table}");
    }
    // The blocks that are in the cache are not read again.
    assert_eq!(reads_of_scan(&level, 3, steps).0, 0);
    // Short scans are expected again after some of them.
    for _ in 0..50 {
        reads_of_scan(&level, 0, 0);
    }
    let (reads, bytes) = reads_of_scan(&level, 7, 0);
    assert_eq!(reads, 1);
    let level = level_of(8, 1 << 20);
    assert_eq!(reads_of_scan(&level, 7, 0), (reads, bytes), "as of a core without earlier scans");
}

#[test]
fn a_scan_reads_no_more_ahead_than_a_part_of_the_cache() {
    let (small, large) = (level_of(2, 64 << 10), level_of(2, 1 << 20));
    let steps = small.ranges[0].len() - 1;
    let [in_small, in_large] = [&small, &large].map(|level| {
        reads_of_scan(level, 0, steps);
        reads_of_scan(level, 1, steps).0
    });
    assert!(in_small > 3 * in_large, "{in_small} reads with a small cache, {in_large} with a large one");
}

#[test]
fn a_seek_prefetches_nothing_and_a_step_uses_the_prefetch_of_its_side_only() {
    let level = level_of(3, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    let run = async {
        for number in [39, 40, 79] {
            cursor.seek(Position::before(&key(number))).await.unwrap();
        }
        assert_eq!((level.index_reads(0), level.index_reads(1), level.index_reads(2)), (1, 1, 0));
        cursor.prev().await.unwrap();
        cursor.next().await.unwrap();
        level.assert_at(&cursor, Some(79));
        assert_eq!(level.index_reads(2), 1, "from the first step forward in the last block");
    };
    block_on(run, || ());
}

#[test]
fn a_seek_between_two_tables_reads_the_one_behind_it_alone() {
    let level = level_of(3, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    block_on(cursor.seek(Position::before(&[&key(39)[..], b"a"].concat())), || ()).unwrap();
    level.assert_at(&cursor, Some(40));
    assert_eq!([0, 1, 2].map(|table| level.index_reads(table)), [0, 1, 0]);
}

#[test]
fn a_cursor_that_turns_prefetches_on_the_other_side() {
    let level = level_of(3, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    let run = async {
        cursor.seek(Position::before(&key(60))).await.unwrap();
        cursor.next().await.unwrap();
        for index in (40..=60).rev() {
            cursor.prev().await.unwrap();
            level.assert_at(&cursor, Some(index));
            // The first two blocks have fewer than 18 entries.
            assert!(index < 58 || level.index_reads(0) == 0, "too early, at {index}");
        }
        assert_eq!([0, 1, 2].map(|table| level.index_reads(table)), [1, 1, 0]);
    };
    block_on(run, || ());
}

#[test]
fn seeks_in_one_table_keep_the_index_that_passed_the_cache() {
    let level = level_of(3, 1 << 20);
    let mut cursor = level.cursor_of_list(LevelCursorConfig::COMPACTION);
    for number in [50, 60, 45, 79] {
        block_on(cursor.seek(Position::before(&key(number))), || ()).unwrap();
        level.assert_at(&cursor, Some(number as usize));
    }
    assert_eq!([0, 1, 2].map(|table| level.index_reads(table)), [0, 1, 0]);
}

#[test]
#[should_panic(expected = "a step from no entry")]
fn a_step_after_a_failure_without_a_seek_is_refused() {
    let level = level_of(1, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    level.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(19)).once(0));
    level.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(19)).once(0));
    block_on(cursor.seek(Position::START), || ()).unwrap_err();
    let _ = block_on(cursor.next(), || ());
}

#[test]
fn a_prefetch_that_is_in_flight_is_used_by_a_seek_and_given_up_for_the_other_side() {
    let level = level_of(3, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    let run = async {
        // The index of the middle table alone is in the cache. Then every read takes long.
        cursor.seek(Position::before(&key(78))).await.unwrap();
        level.slow_reads(1000);
        cursor.next().await.unwrap();
        assert_eq!(level.index_reads(2), 1);
        cursor.seek(Position::before(&key(80))).await.unwrap();
        level.assert_at(&cursor, Some(80));
        assert_eq!(level.index_reads(2), 1, "the seek awaited it");
        assert_eq!(cursor.index_arrivals(), IndexArrivals::default(), "only steps are counted");
        for index in (36..80).rev() {
            cursor.prev().await.unwrap();
            level.assert_at(&cursor, Some(index));
        }
        assert_eq!(level.index_reads(0), 1);
        let arrivals = IndexArrivals { there: 1, in_flight: 1, missing: 0 };
        assert_eq!(cursor.index_arrivals(), arrivals, "back into the middle table, and on to the first");
    };
    block_on(run, || ());
}

#[test]
fn an_index_that_is_damaged_is_read_once_and_passed_on_at_its_table() {
    for polls in [0, 1000] {
        for is_forward in [true, false] {
            let level = level_of(3, 1 << 20);
            level.lose_index(1);
            level.slow_reads(polls);
            let scanned = scan(&level, &mut level.cursor(PREFETCH), is_forward);
            assert_eq!(scanned.found, (0..40).chain(80..120).collect::<Vec<_>>());
            let [first, last] = [40, 79].map(key);
            assert_eq!(scanned.unread, [UnreadKeys { first, last }]);
            // The reads fail before the log.
            assert_eq!(level.io.counters.statistics().damaged_copies, 2);
        }
    }
}

#[test]
fn a_prefetch_that_fails_has_no_effect() {
    let level = level_of(2, 1 << 20);
    let block = level.index_blocks(1)[0];
    let fails = FaultRule::within(OpFilter::Read, block, Lba(block.0 + 1), InjectedFault::Error(19));
    level.faults.add(fails.once(0));
    let second = level.index_blocks(1)[1];
    let fails = FaultRule::within(OpFilter::Read, second, Lba(second.0 + 1), InjectedFault::Error(19));
    level.faults.add(fails.once(0));
    let scanned = scan(&level, &mut level.cursor(PREFETCH), true);
    assert_eq!(scanned.found.len(), 80);
    assert!(scanned.unread.is_empty());
    assert_eq!(scanned.arrivals, IndexArrivals { missing: 1, ..IndexArrivals::default() });
}

#[test]
fn a_device_failure_leaves_no_entry_until_a_seek() {
    let level = level_of(2, 1 << 20);
    let mut cursor = level.cursor(NO_PREFETCH);
    let run = async {
        cursor.seek(Position::before(&key(39))).await.unwrap();
        level.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(19)));
        let outcome = cursor.next().await;
        assert!(matches!(outcome, Err(EngineError::Device { .. })), "{outcome:?}");
        assert_eq!((cursor.entry(), cursor.unread_part()), (None, None));
        level.faults.clear();
        cursor.seek(Position::before(&key(40))).await.unwrap();
        level.assert_at(&cursor, Some(40));
    };
    block_on(run, || ());
}

#[test]
fn an_operation_that_is_dropped_leaves_no_entry_and_keeps_the_prefetch() {
    let level = level_of(2, 1 << 20);
    let mut cursor = level.cursor(PREFETCH);
    block_on(cursor.seek(Position::before(&key(38))), || ()).unwrap();
    level.slow_reads(200);
    block_on(cursor.next(), || ()).unwrap();
    level.assert_at(&cursor, Some(39));
    assert_eq!(level.index_reads(1), 1, "in flight");
    let context = &mut Context::from_waker(Waker::noop());
    assert!(pin!(cursor.next()).poll(context).is_pending());
    assert_eq!(cursor.entry(), None);
    assert!(pin!(cursor.seek_before(None)).poll(context).is_pending());
    assert_eq!(cursor.entry(), None);
    block_on(cursor.seek(Position::before(&key(40))), || ()).unwrap();
    level.assert_at(&cursor, Some(40));
    assert_eq!(level.index_reads(1), 1, "not read again");
}

#[test]
fn a_step_goes_on_behind_damage_and_may_turn_there() {
    let level = level_of(3, 1 << 20);
    level.lose_index(1);
    let run = async {
        let mut cursor = level.cursor(NO_PREFETCH);
        cursor.seek(Position::before(&key(39))).await.unwrap();
        assert!(cursor.next().await.is_err());
        cursor.next().await.unwrap();
        level.assert_at(&cursor, Some(80));
        assert!(cursor.prev().await.is_err());
        assert!(cursor.unread_part().is_some());
        cursor.prev().await.unwrap();
        level.assert_at(&cursor, Some(39));
        assert_eq!(cursor.unread_part(), None);
        // Into the damage.
        assert!(cursor.seek(Position::before(&key(50))).await.is_err());
        cursor.next().await.unwrap();
        level.assert_at(&cursor, Some(80));
    };
    block_on(run, || ());
}

#[test]
fn the_place_of_a_table_is_the_one_that_its_writer_gave() {
    let level = level_of(3, 1 << 20);
    let places: Vec<TablePlace> = level.tables.iter().map(|table| place_of(table)).collect();
    assert_eq!(places, level.places);
}

#[test]
fn a_level_without_tables_has_no_entry() {
    let level = TestLevel::new(Vec::new(), |_| true, 0);
    for mut cursor in [level.cursor(PREFETCH), level.cursor_of_list(PREFETCH)] {
        assert!(scan(&level, &mut cursor, true).found.is_empty());
        assert!(scan(&level, &mut cursor, false).found.is_empty());
    }
}

#[test]
#[should_panic(expected = "the tables share keys, or are not in order")]
fn a_list_of_tables_in_another_order_is_refused() {
    let mut level = level_of(2, 0);
    level.tables.reverse();
    level.cursor_of_list(PREFETCH);
}
