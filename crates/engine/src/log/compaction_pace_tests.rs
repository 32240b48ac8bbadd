//! Tests of the pace of compaction: how many compactions and visits run at once follows from the free chunks, and the space that a window needs from what lives in its chunks.

use super::compaction_rounds::RoundPace;
use super::compaction_tests::{check_values, filled, stored, value_head};
use super::log_place::{ChunkIndex, LogKind};
use super::test_log_volume::OpenTestVolume;
use crate::Durability;
use crate::conformance::key_of;
use octokv_runtime::block_on;
use std::sync::atomic::Ordering;

#[test]
fn beside_many_compactions_a_round_waits_for_spare_chunks() {
    let volume = OpenTestVolume::new(13, Durability::PowerSafe, |_| ());
    filled(&volume, 3_000, 1);
    let spare = volume.core.volume.passes.spare_chunks(volume.pool());
    assert!((6..40).contains(&spare), "{spare} spare chunks");
    let round = || block_on(volume.core.compact_round(u32::MAX, RoundPace::InTurn), || ());
    // Of stores that the volume does not have.
    let running = &volume.core.volume.compactions;
    let begun =
        |stores| -> Vec<_> { (10..10 + stores).map(|store| running.begin(store, LogKind::Keys)).collect() };
    let many = begun(spare / 2 + 1);
    assert_eq!(round(), Ok(false));
    drop(many);
    let _few = begun(3);
    assert_eq!(round(), Ok(true));
}

/// The head of the value log of store 0 behind as many rounds as help.
fn head_compacted_in_turn(volume: &OpenTestVolume) -> ChunkIndex {
    while block_on(volume.core.compact_round(u32::MAX, RoundPace::InTurn), || ()) == Ok(true) {}
    value_head(volume, 0)
}

#[test]
fn a_round_without_room_for_its_window_waits_for_the_rounds_of_other_value_logs() {
    let volume = OpenTestVolume::of_chunks((1_536, 32), 19, Durability::PowerSafe, |_| ());
    let mut model = filled(&volume, 1_500, 1);
    let mut overwrite = |numbers: &mut dyn Iterator<Item = u64>| {
        for number in numbers {
            let bytes = model[&number].1;
            stored(&volume, &key_of(number), number, bytes);
            model.insert(number, (number, bytes));
        }
    };
    // Of a store that the volume does not have. Its round takes all chunks that are spare, or become so.
    let running = &volume.core.volume.compactions;
    let turn = running.begin(10, LogKind::Values).expect("none runs");
    assert!(running.take_round(10, LogKind::Values, u64::MAX, u64::MAX));
    // A half of each chunk is garbage: for each of the other records an image would be written, more than two chunks in all.
    overwrite(&mut (0..1_500).step_by(2));
    let full = value_head(&volume, 0);
    assert_eq!(head_compacted_in_turn(&volume), full);
    assert!(volume.stores()[0].state.lock().window.is_none(), "it would be in the way of other windows");
    // An eighth of each chunk lives: moving that takes less than the chunk that becomes free, images included.
    overwrite(&mut (0..1_500).filter(|number| number % 8 != 0));
    let emptied = head_compacted_in_turn(&volume);
    assert!(emptied > full, "it is {full:?}");
    assert!(volume.core.volume.counters.moved_values.load(Ordering::Relaxed) > 0, "nothing lived in them");
    drop(turn);
    // Beside a key log it does not wait, though it has no room.
    let _keys = running.begin(10, LogKind::Keys).expect("none runs");
    assert!(running.take_round(10, LogKind::Keys, u64::MAX, u64::MAX));
    assert!(head_compacted_in_turn(&volume) > emptied, "it is {emptied:?}");
    check_values(&volume, 1_500, &model);
}

#[test]
fn compaction_visits_one_segment_at_a_time_while_space_is_enough() {
    let volume = OpenTestVolume::new(16, Durability::PowerSafe, |settings| settings.sub_compactions = 16);
    let visits = |pace| volume.core.visits_at_once(pace);
    assert_eq!((visits(RoundPace::InTurn), visits(RoundPace::Any)), (1, 16));
}

#[test]
fn more_compactions_begin_the_fewer_chunks_are_spare() {
    let volume = OpenTestVolume::of_chunks((1_536, 32), 17, Durability::PowerSafe, |settings| {
        settings.compactions = 4;
    });
    let (passes, pool) = (&volume.core.volume.passes, volume.pool());
    let limits = *pool.limits();
    assert_eq!((limits.start, limits.pass), (24, 12));
    let shortage = || limits.start.saturating_sub(passes.spare_chunks(pool) + limits.key);
    let mut keys = (0..300).cycle().zip(0..);
    let mut fill_until = |short| {
        while shortage() < short {
            let (number, operation) = keys.next().expect("it has no end");
            stored(&volume, &key_of(number), operation, 3_000);
        }
        assert_eq!(shortage(), short);
    };
    let running = &volume.core.volume.compactions;
    // Beside so many of stores that the volume does not have, and without a write that waits.
    let begins_beside = |others: u32| {
        let _turns: Vec<_> = (10..10 + others).map(|store| running.begin(store, LogKind::Keys)).collect();
        block_on(volume.core.compact_round(0, RoundPace::InTurn), || ())
    };
    fill_until(1);
    assert_eq!(begins_beside(1), Ok(false));
    assert_eq!(begins_beside(0), Ok(true));
    fill_until(2);
    assert_eq!(begins_beside(2), Ok(false));
    assert_eq!(begins_beside(1), Ok(true));
    fill_until(5);
    assert_eq!(begins_beside(3), Ok(true));
}

#[test]
fn what_lives_in_chunks_without_a_count_is_expected_to_be_what_the_counted_ones_leave() {
    let volume = OpenTestVolume::new(18, Durability::PowerSafe, |_| ());
    filled(&volume, 1_500, 2);
    let store = &volume.stores()[0];
    let sealed: Vec<_> = store.state.lock().values.sealed().collect();
    let live = || {
        let state = store.state.lock();
        volume.core.live_until(&state, state.values.tail().index)
    };
    let (records, granules) = live();
    let chunks = sealed.len() as u64;
    assert!(chunks > 10 && records > 300, "{records} records in {chunks} chunks");
    // As a recovery leaves them: a change that is not possible ends the count of a chunk.
    for &(_, chunk) in &sealed {
        volume.pool().add_live(chunk, i32::MIN, 0);
        assert_eq!(volume.pool().live_of(chunk), None);
    }
    let (expected_records, expected_granules) = live();
    assert!((granules - chunks..=granules).contains(&expected_granules), "{expected_granules} of {granules}");
    // All values have a record.
    assert!((records - chunks..=records).contains(&expected_records), "{expected_records} of {records}");
}
