//! Recovery against a model: volumes with several stores, whose devices lose any of the units written since the last flush, again and again.

use super::log_place::ChunkNumber;
use super::recovery::load_stores;
use super::replay::{ReplayedStore, replay_with};
use super::test_log_writer::{TestLogVolume, VOLUME, test_layout};
use super::test_recovery_checks::{check_pool, check_store, recover};
use crate::common::unit_reader::UnitReader;
use octokv_base::Prng;
use octokv_runtime::block_on;
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    Put {
        store: usize,
        segment: u32,
        key: u8,
        value_bytes: u32,
    },
    Delete {
        store: usize,
        segment: u32,
        key: u8,
    },
    Rewrite {
        store: usize,
        segment: u32,
    },
    Split {
        store: usize,
    },
    Marker {
        store: usize,
    },
    /// Writes a store's contents anew, so that its chunks are freed.
    Compact {
        store: usize,
    },
    Flush,
    Checkpoint {
        images: u64,
    },
    /// Each unit since the last flush is lost with this chance in 8, at a crash.
    Crash {
        seed: u64,
        eighths: u64,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let lengths = prop_oneof![2 => Just(0u32), 6 => 1..400u32, 2 => 1000..4000u32, 1 => 7000..20_000u32];
    let operation = prop_oneof![
        12 => (0..2usize, any::<u32>(), 0..6u8, lengths)
            .prop_map(|(store, segment, key, value_bytes)| Operation::Put { store, segment, key, value_bytes }),
        2 => (0..2usize, any::<u32>(), 0..6u8)
            .prop_map(|(store, segment, key)| Operation::Delete { store, segment, key }),
        2 => (0..2usize, any::<u32>()).prop_map(|(store, segment)| Operation::Rewrite { store, segment }),
        2 => (0..2usize).prop_map(|store| Operation::Split { store }),
        1 => (0..2usize).prop_map(|store| Operation::Marker { store }),
        1 => (0..2usize).prop_map(|store| Operation::Compact { store }),
        3 => Just(Operation::Flush),
        1 => (0..6u64).prop_map(|images| Operation::Checkpoint { images }),
        2 => (any::<u64>(), 0..=8u64).prop_map(|(seed, eighths)| Operation::Crash { seed, eighths }),
    ];
    vec(operation, 1..120)
}

/// A key whose length makes images of several buckets.
fn key(segment: u32, key: u8) -> Vec<u8> {
    let mut bytes = vec![key; 8 + 45 * usize::from(key)];
    bytes[..4].copy_from_slice(&segment.to_le_bytes());
    bytes
}

fn compact(volume: &mut TestLogVolume, store: usize) {
    let segments: Vec<u32> = volume.stores[store].model.segments.keys().copied().collect();
    for segment in segments {
        volume.rewrite(store, segment);
    }
    volume.flush();
    volume.marker(store);
    volume.flush();
}

fn apply(volume: &mut TestLogVolume, operation: &Operation) {
    let number = |volume: &TestLogVolume, store: usize, segment: u32| {
        segment % volume.stores[store].model.level.segments() as u32
    };
    match *operation {
        Operation::Put { store, segment, key: of, value_bytes } => {
            let segment = number(volume, store, segment);
            volume.put(store, segment, &key(segment, of), value_bytes);
        }
        Operation::Delete { store, segment, key: of } => {
            let segment = number(volume, store, segment);
            volume.delete(store, segment, &key(segment, of));
        }
        Operation::Rewrite { store, segment } => {
            let segment = number(volume, store, segment);
            volume.rewrite(store, segment);
        }
        Operation::Split { store } => volume.split(store),
        Operation::Marker { store } => volume.marker(store),
        Operation::Compact { store } => compact(volume, store),
        Operation::Flush => volume.flush(),
        Operation::Checkpoint { images } => volume.checkpoint(images),
        Operation::Crash { .. } => unreachable!("a crash is no change"),
    }
}

/// The replays of all stores, with another bound of the queue.
fn replay_all(volume: &TestLogVolume, queue_max: usize) -> Vec<ReplayedStore> {
    let device = volume.device();
    let reader = UnitReader::new(&device, 512);
    let (stores, _) = block_on(load_stores(reader, &volume.superblock), || {}).unwrap();
    let replay =
        |store| block_on(replay_with(reader, &volume.layout, VOLUME, store, queue_max), || {}).unwrap();
    stores.into_iter().map(replay).collect()
}

fn check_crash(volume: &mut TestLogVolume) {
    let recovered = recover(volume).unwrap();
    check_pool(&recovered);
    let ends: Vec<u64> =
        recovered.stores.iter().enumerate().map(|(at, store)| check_store(volume, store, at)).collect();
    for queue_max in [0, 2] {
        for (store, recovered) in replay_all(volume, queue_max).iter().zip(&recovered.stores) {
            let (table, other) = (&store.table, &recovered.table);
            assert!(table.level() == other.level() && table.images().eq(other.images()));
            assert_eq!((store.last_sequence, store.totals), (recovered.last_sequence, recovered.totals));
            let counts = (store.images, store.rejected, store.durable_through);
            assert_eq!(counts, (recovered.images, recovered.rejected, recovered.durable_through));
        }
    }
    let is_proven = recovered.stores.iter().all(|store| store.durable_through == store.last_sequence);
    assert!(is_proven || recovered.needs_checkpoint);
    volume.reopen(&ends, recovered.needs_checkpoint);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_store_ends_with_its_last_whole_image(has_checkpoint: bool, operations in operations()) {
        let mut volume = TestLogVolume::new(test_layout(2));
        // Before a value log goes on in its second chunk, something has to name that.
        match has_checkpoint {
            true => volume.checkpoint(0),
            false => (0..2).for_each(|store| volume.marker(store)),
        }
        for operation in &operations {
            match *operation {
                Operation::Crash { seed, eighths } => {
                    let mut random = Prng::new(seed);
                    volume.lose_units(|_| random.below(8) < eighths);
                    check_crash(&mut volume);
                }
                // A full volume takes no more.
                _ if volume.free_chunks() < 24 => {
                    (0..2).for_each(|store| if volume.free_chunks() > 14 { compact(&mut volume, store) });
                    volume.checkpoint(0);
                    if volume.free_chunks() < 14 {
                        break;
                    }
                }
                _ => apply(&mut volume, operation),
            }
        }
        volume.lose_units(|_| false);
        check_crash(&mut volume);
    }
}

#[test]
fn a_new_volume_has_its_stores_in_the_chunks_of_their_numbers() {
    let volume = TestLogVolume::new(test_layout(2));
    let recovered = recover(&volume).unwrap();
    check_pool(&recovered);
    assert_eq!(recovered.stores.len(), 2);
    for (store, number) in recovered.stores.iter().zip(0..) {
        assert_eq!(store.keys.tail().chunk, ChunkNumber(2 * number));
        assert_eq!(store.values.tail().chunk, ChunkNumber(2 * number + 1));
        assert_eq!((store.keys.tail().unit, store.last_sequence, store.rejected), (0, 0, 0));
        assert_eq!(volume.stores[number as usize].start.range, store.range);
    }
    // Nothing names the chunks that follow.
    assert!(recovered.needs_checkpoint);
    assert_eq!(recovered.pool.free(), 64 - 8);
}
