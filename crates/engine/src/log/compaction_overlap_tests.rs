//! Tests of compaction that prefetches the next round: each round frees its chunk, whatever the prefetched visits meet.

use super::compaction_rounds::{RoundEnd, RoundPace};
use super::compaction_tests::{Model, check_values, filled, stored, value_head};
use super::hash_prefix::HashPrefix;
use super::log_place::LogKind;
use super::records_to_move::VisitTarget;
use super::segment_visits::{SegmentVisits, SegmentsToVisit, VisitsEnd};
use super::settings::LogSettings;
use super::space_limits::ChunkPurpose;
use super::test_log_volume::{CHUNKS, OpenTestVolume};
use super::value_chunk_ids::ValueChunk;
use crate::Durability;
use crate::conformance::key_of;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::{block_on, yield_now};
use std::sync::atomic::Ordering;

const KEYS: u64 = 1_500;

fn overlapping(settings: &mut LogSettings) {
    settings.compaction_max_per_second = u64::MAX;
    settings.window_divisor = 1;
}

/// A volume whose window is begun and has taken chunks.
fn with_begun_window(adjust: impl FnOnce(&mut LogSettings)) -> (OpenTestVolume, Model) {
    let volume = OpenTestVolume::new(21, Durability::PowerSafe, |settings| {
        overlapping(settings);
        adjust(settings);
    });
    let model = filled(&volume, KEYS, 1);
    let begun = block_on(volume.core.compact_once(&volume.stores()[0], LogKind::Values), || ());
    assert_eq!(begun, Ok(RoundEnd::Advanced), "and no round behind it");
    assert_eq!(value_head(&volume, 0).0, 1);
    (volume, model)
}

fn rounds(volume: &OpenTestVolume) -> u64 {
    volume.core.volume.counters.compaction_rounds.load(Ordering::Relaxed)
}

fn finish(volume: &OpenTestVolume) -> u64 {
    let before = rounds(volume);
    assert_eq!(block_on(volume.core.finish_window(), || ()), Ok(true));
    rounds(volume) - before
}

#[test]
fn rounds_go_on_until_the_window_has_given_back_what_it_took() {
    let (alone, _) = with_begun_window(|settings| settings.overlaps_rounds = false);
    let (limited, _) = with_begun_window(|settings| settings.compaction_max_per_second = 1 << 30);
    assert_eq!([finish(&alone), finish(&limited)], [1, 1]);
    while block_on(alone.core.finish_window(), || ()) == Ok(true) {}
    for visits in [1, 3, 16] {
        let (volume, model) = with_begun_window(|settings| settings.sub_compactions = visits);
        assert!(finish(&volume) > 5);
        let has_debt = || {
            let state = volume.stores()[0].state.lock();
            state.window.as_ref().is_some_and(|window| window.has_debt(state.values.head()))
        };
        assert!(!has_debt(), "{visits} visits at a time");
        // One round was begun ahead when the debt was paid.
        let head = value_head(&alone, 0).0;
        assert!((head..=head + 1).contains(&value_head(&volume, 0).0), "{visits} visits at a time");
        volume.check_counts();
        check_values(&volume, KEYS, &model);
    }
}

#[test]
fn segments_of_the_next_chunk_are_visited_before_its_round() {
    let unvisited = |goes_on: bool| {
        let (volume, _) = with_begun_window(|_| ());
        let store = &volume.stores()[0];
        let chunks: Vec<ValueChunk> = {
            let state = store.state.lock();
            state.values.sealed().take(2).map(|(index, chunk)| ValueChunk { index, chunk }).collect()
        };
        let ids = |of| {
            block_on(volume.core.ids_of_chunk(store, of), || ()).expect("no fault").expect("a directory")
        };
        let mut visits = SegmentVisits::new(&volume.core, store, VisitTarget::Window, RoundPace::Any);
        let of_round = SegmentsToVisit::OfIds(ids(chunks[0]));
        assert_eq!(block_on(visits.visit(of_round, &|| goes_on), || ()), Ok(VisitsEnd::All));
        assert_eq!(visits.is_ahead(), goes_on);
        let others_run = async {
            for _ in 0..2_000 {
                yield_now().await;
            }
        };
        block_on(visits.beside(others_run), || ());
        block_on(visits.finish(), || ()).expect("no fault");
        let state = &mut *store.state.lock();
        let level = state.table.level();
        let segments = ids(chunks[1]).into_iter().map(|id| level.segment_of(HashPrefix::of_id(id)).0);
        segments.filter(|&segment| !state.is_visited(segment)).count()
    };
    let without = unvisited(false);
    assert!(without > 3, "{without}");
    assert_eq!(unvisited(true), 0);
}

#[test]
fn a_key_log_goes_on_while_its_space_is_worth_least() {
    let rounds_of_a_call = |overlaps| {
        let volume = OpenTestVolume::new(22, Durability::Completed, |settings| {
            overlapping(settings);
            settings.overlaps_rounds = overlaps;
        });
        // Overwrites of the keys of one store leave garbage, most of it in its key log, beside images that live.
        let mut model = filled(&volume, KEYS, 1);
        let of_store = |number: &u64| {
            let position = volume.core.volume.position_of(key_of(*number).as_bytes());
            volume.stores()[0].range.contains(position)
        };
        let of_store: Vec<u64> = (0..KEYS).filter(of_store).collect();
        let mut operation = KEYS;
        while volume.pool().free() >= volume.pool().limits().start {
            let number = of_store[operation as usize * 7 % (of_store.len() / 2)];
            stored(&volume, &key_of(number), operation, 1);
            model.insert(number, (operation, 1));
            operation += 1;
        }
        let mut most = 0;
        for _ in 0..50 {
            // Others take what is free.
            while volume.pool().free() > volume.pool().limits().start - 4 {
                assert!(volume.pool().reserve(ChunkPurpose::KeyCompaction).is_some());
            }
            let before = rounds(&volume);
            if block_on(volume.core.compact_round(0, RoundPace::InTurn), || ()) != Ok(true) {
                break;
            }
            most = (rounds(&volume) - before).max(most);
        }
        check_values(&volume, KEYS, &model);
        most
    };
    assert_eq!(rounds_of_a_call(false), 1);
    assert!(rounds_of_a_call(true) > 1);
}

#[test]
fn reads_that_fail_ahead_of_their_round_are_repeated_in_it() {
    for every in [2, 3, 7, 20] {
        let (volume, model) = with_begun_window(|_| ());
        for skip in 0..60 {
            volume.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)).once(skip * every));
        }
        let mut calls = 0;
        while block_on(volume.core.finish_window(), || ()) != Ok(false) {
            calls += 1;
            assert!(calls < 500, "every {every}th read fails");
        }
        volume.faults.clear();
        while block_on(volume.core.finish_window(), || ()) == Ok(true) {}
        volume.check_counts();
        check_values(&volume, KEYS, &model);
    }
}

#[test]
fn a_directory_longer_than_the_first_read_is_read_again() {
    let volume = OpenTestVolume::of_chunks((CHUNKS, 512), 23, Durability::Completed, |_| ());
    let store = &volume.stores()[0];
    let sealed = || store.state.lock().values.sealed().next();
    let mut number = 0;
    while sealed().is_none() {
        stored(&volume, &key_of(number), number, 1);
        number += 1;
    }
    let (index, chunk) = sealed().expect("a sealed chunk");
    let live = volume.pool().live_of(chunk).expect("it is counted").records as usize;
    // 4 bytes an id, and the read has 4 KiB.
    assert!(live > 2_000, "{live} records");
    let ids = block_on(volume.core.ids_of_chunk(store, ValueChunk { index, chunk }), || ());
    assert_eq!(ids.expect("no fault").expect("a directory").len(), live);
}
