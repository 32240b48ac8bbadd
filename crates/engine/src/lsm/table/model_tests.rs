//! Tables against a plain model: gets at every snapshot, and cursors that move at random.

use super::cursor::TableCursorConfig;
use super::info::TableDescriptor;
use super::reader::CacheFill;
use super::test_tables::{
    EntryShape, LOCATION, OwnedEntry, OwnedValue, TestVolume, at, inline, keys_of, model_get, model_seek,
    random_entries, random_key,
};
use super::writer::{INLINE_VALUE_BYTES_MAX, TableWriterConfig};
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::Position;
use octokv_base::{KEY_BYTES_MAX, Prng, UnixTime, Version};
use octokv_runtime::block_on;
use proptest::prelude::*;

const SMALL: EntryShape = EntryShape { keys: 60, key_bytes_max: 12, value_bytes_max: 80, versions_max: 8 };
const LONG_KEYS: EntryShape =
    EntryShape { keys: 80, key_bytes_max: KEY_BYTES_MAX as u64, value_bytes_max: 300, versions_max: 30 };
const LONG_VALUES: EntryShape = EntryShape {
    keys: 100,
    key_bytes_max: 40,
    value_bytes_max: INLINE_VALUE_BYTES_MAX as u64,
    versions_max: 3,
};
/// More than what waits for the end of the table, so that data lies before the first copy of the metadata.
const MANY: EntryShape = EntryShape { keys: 6000, key_bytes_max: 24, value_bytes_max: 500, versions_max: 6 };

const SHAPES: [EntryShape; 4] = [SMALL, LONG_KEYS, LONG_VALUES, MANY];

fn assert_gets(volume: &TestVolume, entries: &[OwnedEntry], seed: u64, shape: &EntryShape) {
    let table = volume.write(7, config(seed), entries);
    let get = |key: &[u8], snapshot| volume.get(&table, key, snapshot).expect("no fault");
    for (index, entry) in entries.iter().enumerate() {
        // The entry itself, the next older one below it, and the newest.
        assert_eq!(get(&entry.key, entry.sequence).as_ref(), Some(entry));
        let older = entries.get(index + 1).filter(|older| older.key == entry.key);
        assert_eq!(get(&entry.key, entry.sequence - 1).as_ref(), older);
        assert_eq!(get(&entry.key, 0), None);
    }
    let random = &mut Prng::new(seed);
    for key in keys_of(entries) {
        assert_eq!(get(&key, u64::MAX).as_ref(), model_get(entries, &key, u64::MAX));
        let snapshot = random.below(1 << 20);
        assert_eq!(get(&key, snapshot).as_ref(), model_get(entries, &key, snapshot));
    }
    for _ in 0..200 {
        let key = random_key(random, shape);
        assert_eq!(get(&key, u64::MAX).as_ref(), model_get(entries, &key, u64::MAX));
    }
    for key in [&b""[..], b"\0", &[255; KEY_BYTES_MAX]] {
        assert_eq!(get(key, u64::MAX).as_ref(), model_get(entries, key, u64::MAX));
    }
}

/// Blocks of different lengths, some compressed.
fn config(seed: u64) -> TableWriterConfig {
    let block_bytes = [256, 4096, 700, 20_000][seed as usize % 4];
    TableWriterConfig { block_bytes, compresses: seed / 4 % 2 == 1 }
}

fn volume(seed: u64) -> TestVolume {
    // The index of a table with many keys would be read again and again if the cache had no space for it.
    let cache_bytes = if seed % 4 == 3 { 1 << 26 } else { [0, 1 << 20, 1 << 26][seed as usize % 3] };
    TestVolume::new(16 << 20, [512, 4096][seed as usize / 2 % 2], cache_bytes)
}

#[test]
fn every_get_at_every_snapshot_is_the_models() {
    for seed in 0..24 {
        let shape = SHAPES[seed as usize % 4];
        assert_gets(&volume(seed), &random_entries(seed, shape), seed / 4, &shape);
    }
}

#[test]
fn scans_in_both_directions_give_every_entry_once() {
    for seed in 0..16 {
        let (volume, entries) = (volume(seed), random_entries(seed, SHAPES[seed as usize % 4]));
        let table = volume.write(7, config(seed / 4), &entries);
        for config in [TableCursorConfig::ITERATOR, TableCursorConfig::COMPACTION] {
            block_on(
                async {
                    let mut cursor = volume.cursor(&table, config);
                    assert_eq!(at(&cursor), None, "a new cursor");
                    cursor.seek(Position::START).await.expect("no fault");
                    for entry in &entries {
                        assert_eq!(at(&cursor).as_ref(), Some(entry));
                        cursor.next().await.expect("no fault");
                    }
                    assert_eq!(at(&cursor), None);
                    cursor.seek_before(None).await.expect("no fault");
                    for entry in entries.iter().rev() {
                        assert_eq!(at(&cursor).as_ref(), Some(entry));
                        cursor.prev().await.expect("no fault");
                    }
                    assert_eq!(at(&cursor), None);
                },
                || (),
            );
        }
    }
}

/// One of: seek, seek before, next, prev.
type Move = (u8, prop::sample::Index, u8);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_cursor_that_moves_at_random_is_where_the_models_is(
        seed in 0..1_000_000u64,
        moves in proptest::collection::vec((0..12u8, any::<prop::sample::Index>(), 0..4u8), 1..120),
    ) {
        let shape = SHAPES[seed as usize % 3];
        let (volume, entries) = (volume(seed), random_entries(seed, shape));
        let table = volume.write(7, config(seed), &entries);
        let read_ahead_bytes = [0, 0, 1500, 100_000][seed as usize / 16 % 4];
        let mut cursor = volume.cursor(&table, TableCursorConfig { fill: CacheFill::Skip, read_ahead_bytes, prefetches_blocks: true });
        block_on(follow(&mut cursor, &entries, &moves, seed, &shape), || ());
    }
}

async fn follow(
    cursor: &mut super::cursor::TableCursor,
    entries: &[OwnedEntry],
    moves: &[Move],
    seed: u64,
    shape: &EntryShape,
) {
    let random = &mut Prng::new(seed);
    let mut model: Option<usize> = None;
    for (kind, near, offset) in moves {
        let entry = &entries[near.index(entries.len())];
        // An entry, around an entry of a key, around a key, or anywhere.
        let key = if *offset < 3 { entry.key.clone() } else { random_key(random, shape) };
        let sequence = match offset {
            0 => entry.sequence,
            1 => entry.sequence.saturating_add_signed(random.below(3) as i64 - 1),
            2 => [0, u64::MAX][random.below(2) as usize],
            _ => random.below(1 << 20),
        };
        let position = Position { key: &key, sequence };
        let found = model_seek(entries, position);
        match (kind, model) {
            (0, _) => {
                cursor.seek(position).await.expect("no fault");
                model = Some(found).filter(|&found| found < entries.len());
            }
            (1, _) => {
                let end = if *offset == 3 { None } else { Some(position) };
                cursor.seek_before(end).await.expect("no fault");
                model = if end.is_none() { entries.len() } else { found }.checked_sub(1);
            }
            (2..7, Some(now)) => {
                cursor.next().await.expect("no fault");
                model = Some(now + 1).filter(|&next| next < entries.len());
            }
            (_, Some(now)) => {
                cursor.prev().await.expect("no fault");
                model = now.checked_sub(1);
            }
            (_, None) => {}
        }
        assert_eq!(at(cursor).as_ref(), model.map(|model| &entries[model]));
    }
}

#[test]
fn the_info_of_a_table_is_that_of_its_entries_and_both_descriptors_have_it() {
    for seed in 0..16 {
        let (volume, entries) = (volume(seed), random_entries(seed, SHAPES[seed as usize % 4]));
        let table = volume.write(7, config(seed), &entries);
        let is_tombstone = |entry: &&OwnedEntry| entry.value == OwnedValue::Tombstone;
        assert_eq!(table.place.id, 7);
        assert_eq!((table.extent.location, table.place.location), (LOCATION, LOCATION));
        assert_eq!(table.entries, entries.len() as u64);
        assert_eq!(table.keys, keys_of(&entries).len() as u64);
        assert_eq!(table.tombstones, entries.iter().filter(is_tombstone).count() as u64);
        assert_eq!(*table.first_key, entries[0].key);
        assert_eq!(*table.last_key, entries[entries.len() - 1].key);
        let sequences = entries.iter().map(|entry| entry.sequence);
        assert_eq!(Some(table.smallest_sequence), sequences.clone().min());
        assert_eq!(Some(table.largest_sequence), sequences.max());
        assert_eq!(Some(table.largest_version), entries.iter().map(|entry| entry.version).max());
        assert_eq!(Some(table.earliest_expiry), entries.iter().map(|entry| entry.expires_at).min());
        for segment in &table.segments {
            let values = entries.iter().filter_map(|entry| match entry.value {
                OwnedValue::InSegment(value) if value.segment == segment.segment => {
                    Some(u64::from(value.value_bytes) + entry.key.len() as u64)
                }
                _ => None,
            });
            assert_eq!((segment.values, segment.bytes), (values.clone().count() as u64, values.sum()));
        }
        let in_segments = entries.iter().filter(|entry| matches!(entry.value, OwnedValue::InSegment(_)));
        assert_eq!(
            table.segments.iter().map(|segment| segment.values).sum::<u64>(),
            in_segments.count() as u64
        );
        // A scan of the device finds the table, twice.
        let found: Vec<TableDescriptor> = (0..table.extent.units)
            .filter_map(|unit| {
                let bytes = (unit..table.extent.units).take(128).flat_map(|unit| volume.unit(LOCATION, unit));
                let magic = volume.unit(LOCATION, unit)[..4] == *b"OKVT";
                magic.then(|| TableDescriptor::decode(&bytes.collect::<Vec<u8>>())).flatten()
            })
            .collect();
        assert_eq!(found.len(), 2);
        for descriptor in found {
            assert_eq!(
                (descriptor.volume_id, descriptor.unit_bytes),
                (volume.io.volume_id, volume.io.unit_bytes)
            );
            assert_eq!(descriptor.info, table);
        }
        let has_front = table.data_bytes >= 512 << 10;
        assert_eq!(table.place.front_bytes > 0, has_front, "{} bytes", table.data_bytes);
    }
}

#[test]
fn versions_of_one_key_cross_block_borders() {
    let entries: Vec<OwnedEntry> =
        (1..=500).rev().map(|sequence| inline(b"the only key", sequence, &[b'v'; 50])).collect();
    let volume = volume(0);
    let table = volume.write(7, TableWriterConfig { block_bytes: 256, compresses: false }, &entries);
    assert_eq!((table.keys, table.entries), (1, 500));
    for snapshot in 0..=501 {
        let found = volume.get(&table, b"the only key", snapshot).expect("no fault");
        assert_eq!(found.as_ref(), model_get(&entries, b"the only key", snapshot));
        assert_eq!(volume.get(&table, b"the only kex", snapshot), Ok(None));
        assert_eq!(volume.get(&table, b"the only key\0", snapshot), Ok(None));
    }
}

#[test]
fn the_extremes_of_an_entry_are_kept() {
    let mut longest = inline(&[255; KEY_BYTES_MAX], 1, &[7; INLINE_VALUE_BYTES_MAX]);
    longest.version = Version::MAX;
    longest.expires_at = UnixTime(u64::MAX - 1);
    let entries = [inline(b"", 1 << 62, b""), inline(b"\0", 1, b""), longest];
    for seed in 0..8 {
        let volume = volume(seed);
        let table = volume.write(u64::MAX, config(seed), &entries);
        assert_eq!(table.earliest_expiry, UnixTime(u64::MAX - 1));
        for entry in &entries {
            assert_eq!(volume.get(&table, &entry.key, u64::MAX).expect("no fault").as_ref(), Some(entry));
        }
    }
}

#[test]
fn compression_saves_space_where_values_repeat() {
    let entries: Vec<OwnedEntry> =
        (0..2000u64).map(|key| inline(&key.to_be_bytes(), 1, &[b'v'; 100])).collect();
    let volume = volume(0);
    let bytes = |compresses| {
        volume.write(7, TableWriterConfig { compresses, ..TableWriterConfig::default() }, &entries).data_bytes
    };
    assert!(bytes(true) * 4 < bytes(false));
}
