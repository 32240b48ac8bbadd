//! Replay of a key log, case by case: torn batches, damaged and unreadable images, images of earlier openings, values that are not there, and
//! checkpoints that contradict each other.

use super::log_place::{ChunkIndex, ChunkNumber, LogKind, LogPlace};
use super::recovery::{RecoveredStore, RecoveredVolume, recover_volume};
use super::sealed_sums::LiveContents;
use super::segment_buckets::ImageRole;
use super::segment_ref::SegmentRef;
use super::store_image::PinnedChunk;
use super::test_log_writer::{TestLogVolume, device_with, test_layout};
use super::test_recovery_checks::{check_pool, check_store, check_table, recover};
use crate::open_error::{IndexMismatch, OpenError};
use octokv_base::{Lba, Prng};
use octokv_device::DeviceError;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_runtime::block_on;
use std::rc::Rc;

/// Error codes of a medium that has lost a block, and of anything else.
const MEDIA_ERROR: i32 = 61;
const OTHER_ERROR: i32 = 5;

/// A key that takes so many bytes.
fn key(number: u8, bytes: usize) -> Vec<u8> {
    vec![number; bytes]
}

/// A volume with one store, whose log has images of 1 to 5 buckets, splits and markers, in several chunks, each flushed a while before the
/// next. Without a checkpoint, or with one in the middle.
fn example(with_checkpoint: bool) -> TestLogVolume {
    let mut volume = TestLogVolume::new(test_layout(1));
    for round in 0..7u8 {
        let segments = volume.stores[0].model.level.segments() as u32;
        for segment in 0..segments.min(4) {
            volume.put(
                0,
                segment,
                &key(round, 60 + 90 * usize::from(round % 3)),
                40 + 100 * u32::from(round),
            );
            volume.put(0, segment, &key(round + 100, 250), 0);
        }
        if round % 2 == 0 {
            volume.split(0);
        }
        volume.flush();
        if round == 3 && with_checkpoint {
            volume.checkpoint(2);
        }
        volume.marker(0);
    }
    // Two images that are durable, and are not stated to be.
    volume.put(0, 1, &key(1, 200), 100);
    volume.put(0, 2, &key(2, 200), 100);
    assert!(volume.stores[0].model.key_tail.0 >= 3);
    volume
}

fn only(recovered: RecoveredVolume) -> RecoveredStore {
    let [store] = recovered.stores.try_into().map_err(|_| "one store").unwrap();
    store
}

/// The images that a replay reads, and the last that one of them states to be durable without those of some numbers.
fn replayed(volume: &TestLogVolume) -> std::ops::RangeInclusive<u64> {
    let store = &volume.stores[0];
    store.start.replay.sequence..=store.model.last_sequence
}

fn stated_durable(volume: &TestLogVolume, without: &[u64]) -> u64 {
    let store = &volume.stores[0];
    let images = store.written.range(replayed(volume)).filter(|(sequence, _)| !without.contains(sequence));
    let stated = images.map(|(sequence, image)| sequence - u64::from(image.state.durable_lag));
    stated.max().unwrap_or(0).max(store.start.durable_through)
}

/// Flips a bit of a bucket.
fn damage(volume: &mut TestLogVolume, sequence: u64, bucket: usize, random: &mut Prng) {
    let at = volume.image_at(volume.stores[0].written[&sequence].at);
    volume.disk[at + bucket * 512 + random.below(512) as usize] ^= 1 << random.below(8);
}

fn buckets(volume: &TestLogVolume, sequence: u64) -> usize {
    volume.stores[0].written[&sequence].bytes.len() / 512
}

fn role(volume: &TestLogVolume, sequence: u64) -> ImageRole {
    volume.stores[0].written[&sequence].state.role
}

/// Recovers with a device that fails reads of an image's bucket.
fn recover_failing(
    volume: &TestLogVolume,
    failing: &[(u64, usize)],
    code: i32,
    times: u32,
) -> Result<RecoveredVolume, OpenError> {
    let plan = FaultPlan::default();
    for &(sequence, bucket) in failing {
        let block = (volume.image_at(volume.stores[0].written[&sequence].at) / 512 + bucket) as u64;
        let rule = FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), InjectedFault::Error(code));
        plan.add(FaultRule { times, ..rule });
    }
    let device = FaultDevice::new(Rc::new(volume.device()), plan);
    block_on(recover_volume(&device), || {})
}

#[test]
fn a_log_over_several_chunks_is_replayed_with_and_without_a_checkpoint() {
    for with_checkpoint in [false, true] {
        let volume = example(with_checkpoint);
        let recovered = recover(&volume).unwrap();
        check_pool(&recovered);
        let end = check_store(&volume, &recovered.stores[0], 0);
        assert_eq!(end, volume.stores[0].model.last_sequence);
        assert_eq!(volume.superblock.checkpoint.area.is_some(), with_checkpoint);
        assert!(recovered.needs_checkpoint, "the last images are not stated to be durable");
    }
}

#[test]
fn a_checkpoint_of_everything_leaves_nothing_to_do() {
    let mut volume = example(false);
    volume.checkpoint(0);
    let recovered = recover(&volume).unwrap();
    check_pool(&recovered);
    check_store(&volume, &recovered.stores[0], 0);
    let store = &recovered.stores[0];
    assert_eq!((store.images, recovered.needs_checkpoint), (0, false));
    for (chunk, uses) in store.values.chunks().zip(&volume.stores[0].start.value_chunks) {
        let live = LiveContents { records: uses.live_records, amount: uses.live_granules };
        assert_eq!(recovered.pool.live_of(chunk), Some(live));
    }
    // Values are not counted behind it.
    volume.put(0, 0, b"k", 10);
    let recovered = recover(&volume).unwrap();
    let value_chunk = recovered.stores[0].values.tail().chunk;
    assert_eq!((recovered.pool.live_of(value_chunk), recovered.needs_checkpoint), (None, true));
}

#[test]
fn of_a_torn_batch_a_front_of_whole_images_remains() {
    let mut volume = example(true);
    volume.flush();
    let first = volume.stores[0].model.last_sequence + 1;
    volume.put(0, 0, &key(7, 250), 300);
    volume.split(0);
    volume.put(0, 3, &key(8, 250), 300);
    volume.marker(0);
    // The units of the images in their order; values are whole.
    let units: Vec<u64> = (first..=volume.stores[0].model.last_sequence)
        .flat_map(|sequence| {
            let image = &volume.stores[0].written[&sequence];
            let unit = volume.image_at(image.at) as u64 / 512;
            unit..unit + (image.bytes.len() / 512) as u64
        })
        .collect();
    let (whole, unflushed) = (volume.disk.clone(), volume.unflushed.clone());
    let mut ends = Vec::new();
    for prefix in 0..=units.len() {
        (volume.disk, volume.unflushed) = (whole.clone(), unflushed.clone());
        let lost = &units[prefix..];
        volume.lose_units(|unit| lost.contains(&unit));
        let recovered = recover(&volume).unwrap();
        check_pool(&recovered);
        ends.push(check_store(&volume, &recovered.stores[0], 0));
        assert!(recovered.needs_checkpoint);
    }
    assert!(ends.is_sorted());
    ends.dedup();
    // Each image ends a front, but for the first of the split.
    let all = first - 1..=volume.stores[0].model.last_sequence;
    let want: Vec<u64> = all
        .filter(|&sequence| sequence < first || role(&volume, sequence) != ImageRole::SplitFirst)
        .collect();
    assert_eq!(ends, want);
}

#[test]
fn a_damaged_bucket_costs_no_other_segment() {
    let mut random = Prng::new(1);
    for with_checkpoint in [false, true] {
        let whole = example(with_checkpoint);
        let last = whole.stores[0].model.last_sequence;
        for sequence in replayed(&whole) {
            for bucket in 0..buckets(&whole, sequence) {
                let mut volume = example(with_checkpoint);
                damage(&mut volume, sequence, bucket, &mut random);
                let store = only(recover(&volume).unwrap());
                let what = format!("bucket {bucket} of image {sequence}, {:?}", role(&volume, sequence));
                let is_durable = sequence <= stated_durable(&volume, &[sequence]);
                let is_known = is_durable && (bucket > 0 || sequence < last);
                assert!(!store.is_lost || is_durable && !is_known, "{what}");
                if is_known {
                    assert_eq!((store.last_sequence, store.damaged), (last, 1), "{what}");
                    check_table(&store.table, &volume.stores[0].model, &what);
                    assert_eq!(store.totals, volume.stores[0].model.totals, "{what}");
                } else if !is_durable {
                    assert_eq!((store.last_sequence, store.damaged), (sequence - 1, 0), "{what}");
                    let expected = &volume.stores[0].written[&(sequence - 1)].after;
                    check_table(&store.table, expected, &what);
                }
            }
        }
    }
}

#[test]
fn two_adjacent_images_without_headers_lose_the_store() {
    let mut random = Prng::new(2);
    let whole = example(false);
    let mut lost = 0;
    for sequence in replayed(&whole) {
        let next = sequence + 1;
        if next >= stated_durable(&whole, &[sequence, next]) {
            break;
        }
        // If both are all that is in a chunk, nothing names the chunk behind it, and the log ends.
        let at = |sequence| whole.stores[0].written.get(&sequence).map(|image| image.at.index);
        if at(sequence - 1) != at(sequence) && at(sequence) == at(next) && at(next) != at(next + 1) {
            continue;
        }
        let mut volume = example(false);
        damage(&mut volume, sequence, 0, &mut random);
        damage(&mut volume, next, 0, &mut random);
        let recovered = recover(&volume).unwrap();
        assert!(recovered.stores[0].is_lost && recovered.needs_checkpoint, "images {sequence} and {next}");
        // Another bucket than the first leaves the header of the second.
        if buckets(&whole, next) > 1 {
            let mut volume = example(false);
            damage(&mut volume, sequence, 0, &mut random);
            damage(&mut volume, next, 1, &mut random);
            let store = only(recover(&volume).unwrap());
            assert_eq!((store.is_lost, store.damaged), (false, 2), "images {sequence} and {next}");
            check_table(&store.table, &volume.stores[0].model, &format!("image {sequence}"));
        }
        // One between is intact.
        let mut volume = example(false);
        damage(&mut volume, sequence, 0, &mut random);
        damage(&mut volume, sequence + 2, 0, &mut random);
        if sequence + 2 <= stated_durable(&volume, &[sequence, sequence + 2]) {
            let store = only(recover(&volume).unwrap());
            assert_eq!((store.is_lost, store.damaged), (false, 2), "images {sequence} and {}", sequence + 2);
            check_table(&store.table, &volume.stores[0].model, &format!("image {sequence}"));
        }
        lost += 1;
    }
    assert!(lost > 20);
}

#[test]
fn a_lost_store_stays_lost_and_leaves_the_others() {
    let mut volume = TestLogVolume::new(test_layout(2));
    for store in 0..2 {
        (0..20).for_each(|number| volume.put(store, 0, &key(number, 60), 50));
        volume.flush();
        volume.marker(store);
    }
    let mut random = Prng::new(3);
    damage(&mut volume, 4, 0, &mut random);
    damage(&mut volume, 5, 0, &mut random);
    let recovered = recover(&volume).unwrap();
    assert_eq!(recovered.stores.iter().map(|store| store.is_lost).collect::<Vec<_>>(), [true, false]);
    check_store(&volume, &recovered.stores[1], 1);
    volume.stores[0].is_lost = true;
    volume.checkpoint(0);
    let recovered = recover(&volume).unwrap();
    assert_eq!(recovered.stores.iter().map(|store| store.is_lost).collect::<Vec<_>>(), [true, false]);
    assert!(!recovered.needs_checkpoint);
    assert_eq!(recovered.stores[0].images, 0);
}

#[test]
fn an_image_that_a_checkpoint_states_to_be_durable_is_not_the_end() {
    let mut volume = example(false);
    volume.checkpoint(3);
    let last = volume.stores[0].model.last_sequence;
    let whole = volume.disk.clone();
    let mut random = Prng::new(4);
    damage(&mut volume, last - 1, 0, &mut random);
    let store = only(recover(&volume).unwrap());
    assert_eq!((store.last_sequence, store.damaged, store.is_lost), (last, 1, false));
    // Nothing says which segment the last one was of.
    volume.disk = whole;
    damage(&mut volume, last, 0, &mut random);
    assert!(only(recover(&volume).unwrap()).is_lost);
}

#[test]
fn images_of_an_earlier_opening_do_not_follow_those_of_a_later_one() {
    let mut volume = TestLogVolume::new(test_layout(1));
    volume.put(0, 0, b"a", 10);
    volume.flush();
    volume.checkpoint(0);
    (0..4).for_each(|number| volume.put(0, 0, &key(number, 20), 0));
    // The first of them is lost.
    let lost = volume.image_at(volume.stores[0].written[&2].at) as u64 / 512;
    volume.lose_units(|unit| unit == lost);
    let recovered = recover(&volume).unwrap();
    assert_eq!((check_store(&volume, &recovered.stores[0], 0), recovered.needs_checkpoint), (1, false));
    volume.reopen(&[1], false);
    volume.put(0, 0, &key(9, 20), 0);
    let recovered = recover(&volume).unwrap();
    // The images 3, 4 and 5 are there, of the opening before.
    assert_eq!(check_store(&volume, &recovered.stores[0], 0), 2);
}

#[test]
fn a_rejected_image_does_not_come_back_when_its_value_is_written_again() {
    let mut volume = TestLogVolume::new(test_layout(1));
    volume.put(0, 0, b"other", 10);
    volume.flush();
    volume.marker(0);
    let value_unit = |volume: &TestLogVolume| volume.layout.unit_of(volume.stores[0].model.values[0], 1);
    // Records begin at the unit at which a later opening begins.
    volume.stores[0].model.value_tail.granule = 64;
    volume.put(0, 0, b"key", 300);
    volume.put(0, 0, b"another", 0);
    let lost = value_unit(&volume);
    volume.lose_units(|unit| unit == lost);
    let recovered = recover(&volume).unwrap();
    assert_eq!((check_store(&volume, &recovered.stores[0], 0), recovered.stores[0].rejected), (2, 2));
    assert!(recovered.needs_checkpoint);
    volume.reopen(&[2], true);
    assert_eq!(volume.stores[0].model.value_tail.granule, 64);
    // The same key with a value of the same length at the same place, whose image is lost.
    volume.put(0, 0, b"key", 300);
    let image = volume.image_at(volume.stores[0].written[&3].at) as u64 / 512;
    volume.lose_units(|unit| unit == image);
    let recovered = recover(&volume).unwrap();
    assert_eq!(check_store(&volume, &recovered.stores[0], 0), 2);
    assert_eq!(recovered.stores[0].rejected, 0);
}

#[test]
fn a_value_in_extents_is_verified_to_its_end() {
    for torn in [false, true] {
        let mut volume = TestLogVolume::new(test_layout(1));
        volume.put(0, 0, b"short", 10);
        volume.flush();
        volume.put(0, 0, b"long", 200_000);
        let last = volume.stores[0].model.last_sequence;
        let model = &volume.stores[0].model;
        let tail = model.values[model.value_tail.index.0 as usize];
        let unit = volume.layout.unit_of(tail, 0);
        volume.lose_units(|of| torn && of == unit);
        let recovered = recover(&volume).unwrap();
        let end = check_store(&volume, &recovered.stores[0], 0);
        // Markers name the chunks of the value, and remain.
        assert_eq!(end, if torn { last - 1 } else { last });
        assert!(last > 20);
    }
}

#[test]
fn a_value_that_is_known_to_be_durable_is_not_read() {
    let mut volume = TestLogVolume::new(test_layout(1));
    volume.put(0, 0, b"a", 100);
    volume.flush();
    volume.marker(0);
    let at = volume.layout.unit_of(volume.stores[0].model.values[0], 0) as usize * 512;
    volume.disk[at + 60] ^= 1;
    let store = only(recover(&volume).unwrap());
    assert_eq!((store.last_sequence, store.rejected), (2, 0));
    // Also if the image itself is not stated to be durable.
    volume.put(0, 0, b"b", 0);
    assert_eq!(only(recover(&volume).unwrap()).last_sequence, 3);
}

#[test]
fn an_unreadable_image_is_a_damaged_one_if_it_is_proven() {
    let volume = example(false);
    let last = volume.stores[0].model.last_sequence;
    for sequence in replayed(&volume).take_while(|&sequence| sequence <= stated_durable(&volume, &[sequence]))
    {
        for code in [MEDIA_ERROR, OTHER_ERROR] {
            let recovered = recover_failing(&volume, &[(sequence, 0)], code, u32::MAX).unwrap();
            assert!(recovered.needs_checkpoint);
            let store = only(recovered);
            assert_eq!((store.last_sequence, store.damaged), (last, 1), "image {sequence}, error {code}");
            check_table(&store.table, &volume.stores[0].model, &format!("image {sequence}"));
        }
    }
    // An error that passes is none.
    let store = only(recover_failing(&volume, &[(5, 0)], OTHER_ERROR, 6).unwrap());
    assert_eq!((store.last_sequence, store.damaged), (last, 0));
}

#[test]
fn an_error_that_says_nothing_of_the_medium_ends_no_log_and_loses_no_store() {
    let volume = example(false);
    let last = volume.stores[0].model.last_sequence;
    let device_error = OpenError::Device(DeviceError::Io(OTHER_ERROR));
    for (failing, is_lost, end) in [
        (vec![(last, 0)], false, last - 1),
        (vec![(last - 1, 1)], false, last - 2),
        (vec![(5, 0), (6, 0)], true, 0),
    ] {
        let failed = recover_failing(&volume, &failing, OTHER_ERROR, u32::MAX);
        assert_eq!(failed.err(), Some(device_error), "{failing:?}");
        let recovered = recover_failing(&volume, &failing, MEDIA_ERROR, u32::MAX).unwrap();
        assert!(recovered.needs_checkpoint);
        let store = only(recovered);
        assert_eq!(store.is_lost, is_lost, "{failing:?}");
        assert!(is_lost || store.last_sequence == end, "{failing:?}");
    }
}

#[test]
fn an_unreadable_value_counts_as_intact() {
    let mut volume = TestLogVolume::new(test_layout(1));
    volume.put(0, 0, b"a", 100);
    let block = volume.layout.unit_of(volume.stores[0].model.values[0], 0);
    for code in [MEDIA_ERROR, OTHER_ERROR] {
        let plan = FaultPlan::default();
        plan.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), InjectedFault::Error(code)));
        let device = FaultDevice::new(Rc::new(volume.device()), plan);
        let recovered = block_on(recover_volume(&device), || {}).unwrap();
        assert_eq!((recovered.stores[0].last_sequence, recovered.needs_checkpoint), (1, true));
    }
}

#[test]
fn a_flipped_bit_anywhere_misplaces_no_segment() {
    let mut random = Prng::new(5);
    let mut volume = example(true);
    volume.flush();
    let whole = volume.disk.clone();
    let first = volume.layout.area_start_unit(0, 0);
    for unit in first..volume.layout.units() {
        let at = unit as usize * 512;
        // Units without anything are all alike.
        if whole[at..at + 512].iter().all(|&byte| byte == 0) && random.below(16) > 0 {
            continue;
        }
        let mut disk = whole.clone();
        disk[at + random.below(512) as usize] ^= 1 << random.below(8);
        let recovered = block_on(recover_volume(&device_with(&disk)), || {}).unwrap();
        let store = only(recovered);
        assert!(!store.is_lost, "unit {unit}");
        let model = match volume.stores[0].written.get(&store.last_sequence) {
            Some(image) => &image.after,
            None => panic!("unit {unit}: the log ends before the first image"),
        };
        check_table(&store.table, model, &format!("unit {unit}"));
        assert_eq!(store.totals, model.totals, "unit {unit}");
        // What an image behind states to be durable is there.
        assert!(store.last_sequence >= stated_durable(&volume, &[]), "unit {unit}");
    }
}

#[test]
fn a_chunk_of_two_stores_is_inconsistent() {
    let mut volume = TestLogVolume::new(test_layout(2));
    for store in 0..2 {
        (0..40).for_each(|number| volume.put(store, 0, &key(number % 7, 200), 0));
    }
    volume.flush();
    // A chunk of the other store, as one that a device error pins.
    let chunk = volume.stores[1].model.values[0];
    volume.stores[0].model.key_head = 1;
    let pinned = PinnedChunk { log: LogKind::Keys, index: ChunkIndex(0), chunk };
    volume.stores[0].pinned = vec![pinned];
    volume.checkpoint(0);
    let lba = volume.layout.unit_of(chunk, 0);
    let mismatch = IndexMismatch::ChunkClaimedTwice { chunk: chunk.0 };
    assert_eq!(recover(&volume).err(), Some(OpenError::Inconsistent { lba, mismatch }));
}

#[test]
fn a_segment_outside_of_its_log_is_inconsistent() {
    // In a free chunk, behind the tail, over the end of the chunk, outside of all chunks.
    for place in 0..4 {
        let mut volume = TestLogVolume::new(test_layout(1));
        volume.put(0, 0, b"a", 10);
        let model = &mut volume.stores[0].model;
        let unit = [volume.layout.unit_of(ChunkNumber(50), 0), 0, 0, 7][place];
        let in_tail = volume.layout.unit_of(model.keys[0], 0);
        let (unit, chain) = match place {
            1 => (in_tail + 1, 1),
            2 => (in_tail + 15, 2),
            _ => (unit, 1),
        };
        model.segments.get_mut(&0).unwrap().0 = SegmentRef::new(unit, chain);
        volume.checkpoint(0);
        let mismatch = IndexMismatch::SegmentOutsideLog { segment: 0 };
        assert_eq!(recover(&volume).err(), Some(OpenError::Inconsistent { lba: unit, mismatch }));
    }
}

#[test]
fn an_image_that_contradicts_those_before_is_inconsistent() {
    type Change = fn(&mut TestLogVolume);
    let changes: [Change; 5] = [
        |volume| *volume.stores[0].model.keys.last_mut().unwrap() = ChunkNumber(60),
        |volume| *volume.stores[0].model.values.last_mut().unwrap() = ChunkNumber(64),
        // Heads behind their tails, and a tail that goes back.
        |volume| volume.stores[0].model.value_tail.granule = 0,
        |volume| volume.stores[0].model.key_head = 1,
        |volume| volume.stores[0].model.value_head = 1,
    ];
    for (case, change) in changes.into_iter().enumerate() {
        let mut volume = TestLogVolume::new(test_layout(1));
        volume.put(0, 0, b"a", 10);
        volume.put(0, 0, b"b", 10);
        change(&mut volume);
        volume.put(0, 0, b"c", 0);
        let at = volume.stores[0].written[&3].at;
        let lba = volume.layout.unit_of(at.chunk, at.unit);
        let mismatch = IndexMismatch::LogImage { sequence: 3 };
        assert_eq!(recover(&volume).err(), Some(OpenError::Inconsistent { lba, mismatch }), "case {case}");
    }
}

#[test]
fn a_first_half_of_a_split_alone_is_not_taken_over() {
    let mut volume = example(true);
    volume.flush();
    let before = volume.stores[0].model.last_sequence;
    volume.split(0);
    let LogPlace { chunk, unit, .. } = volume.stores[0].written[&(before + 2)].at;
    let second = volume.layout.unit_of(chunk, unit);
    volume.lose_units(|unit| unit == second);
    let recovered = recover(&volume).unwrap();
    assert_eq!(check_store(&volume, &recovered.stores[0], 0), before);
    assert_eq!(recovered.stores[0].rejected, 1);
    assert!(recovered.needs_checkpoint);
}
