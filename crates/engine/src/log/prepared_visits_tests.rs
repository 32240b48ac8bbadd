//! Tests of visits that are prepared together: how many reads they save, what becomes of changes and faults since.

use super::compaction_rounds::RoundPace;
use super::compaction_tests::{Model, check_values, compact_whole, filled, stored};
use super::compaction_window::CompactionWindow;
use super::hash_prefix::SegmentNumber;
use super::log_place::LogKind;
use super::prepared_visits::PreparedVisit;
use super::records_to_move::VisitTarget;
use super::test_log_volume::OpenTestVolume;
use super::window_space::WindowSpace;
use crate::conformance::key_of;
use crate::{DeleteOutcome, Durability};
use octokv_base::{Prng, Version};
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::block_on;
use std::sync::atomic::Ordering;

/// The system error of a read that fails.
const EIO: i32 = 5;
const KEYS: u64 = 600;

fn volume(seed: u64) -> (OpenTestVolume, Model) {
    let volume = OpenTestVolume::new(seed, Durability::PowerSafe, |settings| settings.recent_image_bytes = 0);
    let model = filled(&volume, KEYS, 2);
    (volume, model)
}

/// The visits of all segments of store 0, in a window of all sealed chunks of its value log.
fn prepare_all(volume: &OpenTestVolume) -> Vec<PreparedVisit> {
    let store = &volume.stores()[0];
    let level = {
        let state = &mut *store.state.lock();
        let (chunks, segments) = (state.values.head()..state.values.tail().index, state.table.segments());
        let space = WindowSpace::new(chunks.end.0 - chunks.start.0, 1.0, KEYS, segments);
        state.window = Some(CompactionWindow::new(chunks, space, segments));
        state.table.level()
    };
    let numbers = (0..level.segments() as u32).map(SegmentNumber);
    let segments = numbers.map(|segment| (segment, level.range_of(segment).first)).collect();
    block_on(volume.core.prepare_visits(store, segments, RoundPace::Any), || ())
}

/// Makes the visits, and gives how many of the records that they moved were read before.
fn visit_all(volume: &OpenTestVolume, visits: Vec<PreparedVisit>) -> (u64, u64) {
    let counters = &volume.core.volume.counters;
    let counts = || {
        [&counters.moved_values, &counters.values_read_together].map(|count| count.load(Ordering::Relaxed))
    };
    let before = counts();
    for visit in visits {
        let (end, image) =
            block_on(volume.core.visit_segment(&volume.stores()[0], visit, VisitTarget::Window), || ());
        assert!(end.is_ok_and(|end| end.is_complete), "{end:?}");
        assert_eq!(block_on(volume.core.commit_all(&volume.stores()[0]), || ()), Ok(()));
        drop(image);
    }
    let [moved, together] = counts();
    (moved - before[0], together - before[1])
}

#[test]
fn records_of_many_segments_are_read_together() {
    let reads = [0, 2 << 20].map(|prepared_bytes| {
        let volume = OpenTestVolume::new(3, Durability::PowerSafe, |settings| {
            settings.prepared_bytes = prepared_bytes;
            settings.recent_image_bytes = 0;
        });
        let model = filled(&volume, KEYS, 2);
        let before = volume.reads.get();
        compact_whole(&volume, LogKind::Values);
        let reads = volume.reads.get() - before;
        volume.check_counts();
        check_values(&volume, KEYS, &model);
        let counters = &volume.core.volume.counters;
        let moved = counters.moved_values.load(Ordering::Relaxed);
        assert!(moved > KEYS / 2, "{moved} moved");
        reads as f64 / moved as f64
    });
    assert!(reads[0] > 1.2, "a record, and a part of an image: {reads:?}");
    assert!(reads[1] < 0.4 * reads[0], "{reads:?}");
}

#[test]
fn a_visit_moves_what_was_read_of_its_segment_before() {
    let (volume, model) = volume(4);
    let visits = prepare_all(&volume);
    let reads = volume.reads.get();
    let (moved, together) = visit_all(&volume, visits);
    assert!(moved > KEYS / 3 && together == moved, "{together} of {moved}");
    assert_eq!(volume.reads.get(), reads, "the visits have read something");
    volume.check_counts();
    check_values(&volume, KEYS, &model);
}

#[test]
fn what_has_changed_since_a_preparation_stays() {
    for seed in 0..20 {
        let (volume, mut model) = volume(seed);
        let visits = prepare_all(&volume);
        let mut random = Prng::new(seed);
        let segments = volume.stores()[0].state.lock().table.segments();
        // Also keys that are new, so that segments are split.
        for operation in 10_000..10_000 + random.below(1_000) {
            let number = random.below(2 * KEYS);
            if random.one_in(5) {
                let existed = model.remove(&number).is_some();
                let expected = if existed { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound };
                let deleted = block_on(volume.core.delete(&key_of(number), Version::NONE), || ());
                assert_eq!(deleted, Ok(expected), "seed {seed}");
            } else {
                stored(&volume, &key_of(number), operation, 150);
                model.insert(number, (operation, 150));
            }
        }
        let is_split = volume.stores()[0].state.lock().table.segments() > segments;
        assert!(is_split || seed != 0, "no segment was split");
        visit_all(&volume, visits);
        volume.check_counts();
        check_values(&volume, 2 * KEYS, &model);
    }
}

#[test]
fn what_a_preparation_fails_to_read_its_visits_read() {
    // Images are read first, and shared reads then: `reads` are those of a preparation without faults.
    for failing_from in [|_| 0, |_| 10, |reads: u32| reads - 1] {
        let (volume, model) = volume(5);
        let before = volume.reads.get();
        prepare_all(&volume);
        let skip = failing_from((volume.reads.get() - before) as u32);
        let failing = FaultRule::always(OpFilter::Read, InjectedFault::Error(EIO));
        volume.faults.add(FaultRule { skip, ..failing });
        let visits = prepare_all(&volume);
        volume.faults.clear();
        let (moved, together) = visit_all(&volume, visits);
        assert!(together < moved, "{together} of {moved} behind {skip} reads");
        volume.check_counts();
        check_values(&volume, KEYS, &model);
    }
}

#[test]
fn a_bit_that_flips_in_a_shared_read_costs_another_read_alone() {
    for seed in 0..30 {
        let (volume, model) = volume(seed);
        let flip = FaultRule::always(OpFilter::Read, InjectedFault::BitFlip { seed });
        volume.faults.add(FaultRule { skip: seed as u32, ..flip });
        let visits = prepare_all(&volume);
        volume.faults.clear();
        let (moved, together) = visit_all(&volume, visits);
        assert!(together <= moved && moved > KEYS / 3);
        assert_eq!(volume.core.volume.counters.lost_values.load(Ordering::Relaxed), 0, "seed {seed}");
        volume.check_counts();
        check_values(&volume, KEYS, &model);
    }
}
