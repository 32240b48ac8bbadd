//! Damage to every unit of a table, by unreadable blocks, flipped bits and blocks of another table: what is lost, and that nothing
//! wrong is found.

use super::cursor::{TableCursor, TableCursorConfig, UnreadPart};
use super::frame::{BlockKind, TRAILER_BYTES, seal};
use super::index::push_block;
use super::info::{TableInfo, TablePlace};
use super::key_block::{KeyBlockBuilder, KeyBlockPosition};
use super::reader::CacheFill;
use super::test_tables::{
    EntryShape, LOCATION, OwnedEntry, TestVolume, at, inline, keys_of, model_get, model_seek, random_entries,
};
use super::writer::TableWriterConfig;
use crate::EngineError;
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::Position;
use octokv_base::{Lba, Prng};
use octokv_device::DeviceError;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::block_on;
use std::ops::RangeInclusive;

const UNIT_BYTES: u32 = 4096;
const UNIT_BLOCKS: u64 = 8;
const SHAPE: EntryShape = EntryShape { keys: 700, key_bytes_max: 40, value_bytes_max: 3000, versions_max: 6 };
const CONFIG: TableWriterConfig = TableWriterConfig { block_bytes: 4096, compresses: false };

/// A table with data before and behind the first copy of its metadata.
fn table_of(seed: u64) -> (TestVolume, Vec<OwnedEntry>, TableInfo) {
    let volume = TestVolume::new(4 << 20, UNIT_BYTES, 1 << 20);
    let mut entries = random_entries(seed, SHAPE);
    if seed % 2 == 1 {
        entries.truncate(entries.len() / 10);
    }
    let table = volume.write(3, CONFIG, &entries);
    assert_eq!(table.place.front_bytes > 0, seed.is_multiple_of(2), "{} bytes", table.data_bytes);
    (volume, entries, table)
}

fn unit_blocks(unit: u64) -> (Lba, Lba) {
    let first = (LOCATION + unit) * UNIT_BLOCKS;
    (Lba(first), Lba(first + UNIT_BLOCKS))
}

/// The entries of which a part lies in each unit.
fn entries_by_unit(volume: &TestVolume, entries: &[OwnedEntry], table: &TableInfo) -> Vec<Vec<OwnedEntry>> {
    let mut by_unit = vec![Vec::new(); table.extent.units as usize];
    let index = block_on(volume.reader(table).index(CacheFill::Skip), || ()).expect("an intact index");
    let (mut block_at, mut first) = (KeyBlockPosition::default(), 0);
    index.first(&mut block_at);
    while let Some(block) = block_at.body() {
        // Its separator is at or behind its last entry.
        let end = model_seek(entries, Position { key: block_at.key(), sequence: block.sequence });
        let is_last = entries.get(end).is_some_and(|entry| {
            entry.as_entry().position() == Position { key: block_at.key(), sequence: block.sequence }
        });
        let end = end + usize::from(is_last);
        let start = table.place.data_offset(block.offset, block.bytes, UNIT_BYTES).expect("a block");
        let last_byte = start + u64::from(block.bytes) - 1;
        for unit in start / u64::from(UNIT_BYTES)..=last_byte / u64::from(UNIT_BYTES) {
            by_unit[unit as usize].extend_from_slice(&entries[first..end]);
        }
        first = end;
        index.next(&mut block_at);
    }
    assert_eq!(first, entries.len());
    by_unit
}

/// What a scan found, and what it could not read.
struct Salvaged {
    found: Vec<OwnedEntry>,
    unread: Vec<RangeInclusive<Vec<u8>>>,
}

/// Scans a table, and goes on behind what cannot be read.
fn scan(cursor: &mut TableCursor, is_forward: bool, table: &TableInfo) -> Salvaged {
    let mut salvaged = Salvaged { found: Vec::new(), unread: Vec::new() };
    let mut is_first = true;
    block_on(
        async {
            // A scan of a table that is read again and again would not end.
            for _ in 0..table.entries + table.data_bytes {
                let moved = match (is_forward, std::mem::take(&mut is_first)) {
                    (true, true) => cursor.seek(Position::START).await,
                    (true, false) => cursor.next().await,
                    (false, true) => cursor.seek_before(None).await,
                    (false, false) => cursor.prev().await,
                };
                match (moved, at(cursor)) {
                    (Ok(()), Some(entry)) => salvaged.found.push(entry),
                    (Ok(()), None) => return,
                    (Err(EngineError::Corrupt { lba, place }), None) => {
                        assert_eq!((place.device(), place.partition()), (1, 2));
                        assert!((LOCATION * UNIT_BLOCKS..).contains(&lba), "block {lba}");
                        salvaged.unread.push(match cursor.unread_part().expect("a part that was not read") {
                            UnreadPart::Keys(first, last) => first.clone()..=last.clone(),
                            UnreadPart::Table => table.first_key.to_vec()..=table.last_key.to_vec(),
                        });
                    }
                    (moved, entry) => panic!("{moved:?} at {entry:?}"),
                }
            }
            panic!("the scan does not end");
        },
        || (),
    );
    if !is_forward {
        salvaged.found.reverse();
    }
    salvaged
}

/// Every operation on a damaged table gives the model's answer, or says what it cannot read. Gives the entries that a scan lost.
fn check(volume: &TestVolume, entries: &[OwnedEntry], table: &TableInfo) -> Vec<OwnedEntry> {
    let configs = [
        (true, TableCursorConfig::COMPACTION),
        (false, TableCursorConfig { fill: CacheFill::Skip, read_ahead_bytes: 0, prefetches_blocks: true }),
    ];
    let mut lost = None;
    for (is_forward, config) in configs {
        let Salvaged { found, unread } = scan(&mut volume.cursor(table, config), is_forward, table);
        let mut rest = entries.iter();
        let mut missing = Vec::new();
        for entry in &found {
            // In order, and nothing that is not the model's.
            missing.extend(rest.by_ref().take_while(|model| *model != entry).cloned());
        }
        missing.extend(rest.cloned());
        assert_eq!(found.len() + missing.len(), entries.len(), "an entry that the table never had");
        for entry in &missing {
            assert!(unread.iter().any(|range| range.contains(&entry.key)), "{:?} got lost", entry.key);
        }
        assert_eq!(missing.is_empty(), unread.is_empty());
        assert!(lost.as_ref().is_none_or(|lost| *lost == missing), "both directions lose the same");
        lost = Some(missing);
    }
    let lost = lost.expect("two scans");
    let lost_keys = keys_of(&lost);
    for entry in entries {
        for snapshot in [u64::MAX, entry.sequence] {
            let model = model_get(entries, &entry.key, snapshot);
            match volume.get(table, &entry.key, snapshot) {
                Ok(found) => assert_eq!(found.as_ref(), model),
                Err(EngineError::Corrupt { .. }) => {
                    assert!(lost_keys.contains(&entry.key), "{:?} cannot be read", entry.key);
                    assert!(model.is_some_and(|model| lost.contains(model)), "another entry than the lost");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    lost
}

/// Damages each unit in turn, and checks that only what lies there is lost.
fn check_each_unit(seed: u64, damage: impl Fn(&TestVolume, u64), repair: impl Fn(&TestVolume, u64)) {
    let (volume, entries, table) = table_of(seed);
    let by_unit = entries_by_unit(&volume, &entries, &table);
    for (unit, there) in by_unit.iter().enumerate() {
        damage(&volume, unit as u64);
        let lost = check(&volume.reopened(), &entries, &table);
        assert!(lost == *there, "unit {unit}: {} entries are lost, of {}", lost.len(), there.len());
        repair(&volume, unit as u64);
    }
    assert_eq!(check(&volume.reopened(), &entries, &table), []);
    assert!(by_unit.iter().any(|there| there.is_empty()), "a unit of metadata alone");
}

#[test]
fn an_unreadable_unit_costs_the_entries_in_it_alone() {
    for seed in 0..2 {
        let damage = |volume: &TestVolume, unit| {
            let (from, to) = unit_blocks(unit);
            volume.faults.add(FaultRule::within(OpFilter::Read, from, to, InjectedFault::Error(61)));
        };
        check_each_unit(seed, damage, |volume, _| volume.faults.clear());
    }
}

#[test]
fn gets_go_on_without_a_filter_that_the_device_fails_to_read() {
    let volume = TestVolume::new(4 << 20, UNIT_BYTES, 1 << 20);
    let entries: Vec<OwnedEntry> =
        (0..20_000u64).map(|key| inline(&key.to_be_bytes(), key + 1, b"value")).collect();
    let table = volume.write(3, CONFIG, &entries);
    let block_bytes = u64::from(UNIT_BYTES) / UNIT_BLOCKS;
    for copy in table.place.copies(UNIT_BYTES) {
        let start = copy + u64::from(table.place.descriptor_bytes);
        let blocks = start / block_bytes + 1..(start + u64::from(table.place.filter_bytes)) / block_bytes;
        let lba = |block| Lba(LOCATION * UNIT_BLOCKS + block);
        let (from, to) = (lba(blocks.start), lba(blocks.end));
        volume.faults.add(FaultRule::within(OpFilter::Read, from, to, InjectedFault::Error(5)));
    }
    let get = |key: u64| volume.get(&table, &key.to_be_bytes(), u64::MAX);
    assert_eq!(get(17).as_ref().map(Option::as_ref), Ok(Some(&entries[17])));
    assert_eq!((get(10_000_000), volume.io.counters.statistics().filter_uses), (Ok(None), 0));
    // The filter is used once it can be read.
    volume.faults.clear();
    assert_eq!((get(10_000_000), volume.io.counters.statistics().filter_uses), (Ok(None), 1));
}

#[test]
fn a_flipped_bit_costs_the_entries_of_its_block_alone() {
    let (volume, entries, table) = table_of(0);
    let by_unit = entries_by_unit(&volume, &entries, &table);
    let random = &mut Prng::new(5);
    for _ in 0..150 {
        let unit = random.below(table.extent.units);
        let intact = volume.unit(LOCATION, unit);
        let mut damaged = intact.clone();
        damaged[random.below(u64::from(UNIT_BYTES)) as usize] ^= 1 << random.below(8);
        volume.set_unit(LOCATION, unit, &damaged);
        let lost = check(&volume.reopened(), &entries, &table);
        let there = &by_unit[unit as usize];
        assert!(lost.iter().all(|entry| there.contains(entry)), "unit {unit}");
        volume.set_unit(LOCATION, unit, &intact);
    }
}

#[test]
fn units_of_an_older_table_at_the_same_place_are_found() {
    for seed in 0..2 {
        let (volume, entries, table) = table_of(seed);
        let newer: Vec<Vec<u8>> = (0..table.extent.units).map(|unit| volume.unit(LOCATION, unit)).collect();
        // The same entries with other values: blocks begin and end at the same places.
        let older: Vec<OwnedEntry> = entries.iter().map(older).collect();
        assert_eq!(volume.write(2, CONFIG, &older).place, TablePlace { id: 2, ..table.place });
        let stale: Vec<Vec<u8>> = (0..table.extent.units).map(|unit| volume.unit(LOCATION, unit)).collect();
        for (unit, bytes) in newer.iter().enumerate() {
            volume.set_unit(LOCATION, unit as u64, bytes);
        }
        let by_unit = entries_by_unit(&volume, &entries, &table);
        for unit in 0..table.extent.units {
            volume.set_unit(LOCATION, unit, &stale[unit as usize]);
            let lost = check(&volume.reopened(), &entries, &table);
            let there = &by_unit[unit as usize];
            assert!(lost.iter().all(|entry| there.contains(entry)), "unit {unit}");
            volume.set_unit(LOCATION, unit, &newer[unit as usize]);
        }
        // All of it.
        for (unit, bytes) in stale.iter().enumerate() {
            volume.set_unit(LOCATION, unit as u64, bytes);
        }
        assert_eq!(check(&volume.reopened(), &entries, &table), entries);
    }
}

/// An entry of the same length with another value.
fn older(entry: &OwnedEntry) -> OwnedEntry {
    let mut older = entry.clone();
    if let super::test_tables::OwnedValue::Inline(value) = &mut older.value {
        value.iter_mut().for_each(|byte| *byte ^= 1);
    }
    older
}

#[test]
fn a_block_of_the_same_table_at_another_place_is_found() {
    // Blocks of the same length with equal keys: only their offset tells them apart.
    let entries: Vec<OwnedEntry> =
        (1..=64).rev().map(|sequence| inline(b"key", 1 << 20 | sequence, &[sequence as u8; 4096])).collect();
    let volume = TestVolume::new(4 << 20, 512, 0);
    let table = volume.write(3, CONFIG, &entries);
    // Exchanges the data of two blocks.
    let bytes: Vec<u8> = (0..table.extent.units).flat_map(|unit| volume.unit(LOCATION, unit)).collect();
    let (data, block_bytes) = (table.place.tail_offset(512) as usize, table.data_bytes as usize / 64);
    let mut exchanged = bytes.clone();
    let [first, second] = [10, 40].map(|block| data + block * block_bytes);
    exchanged[first..first + block_bytes].copy_from_slice(&bytes[second..second + block_bytes]);
    for (unit, bytes) in exchanged.chunks(512).enumerate() {
        volume.set_unit(LOCATION, unit as u64, bytes);
    }
    let found = volume.get(&table, b"key", entries[10].sequence);
    assert!(matches!(found, Err(EngineError::Corrupt { lba, .. }) if lba == LOCATION + first as u64 / 512));
    let found = volume.get(&table, b"key", entries[40].sequence);
    assert_eq!(found.expect("an intact block").as_ref(), Some(&entries[40]));
}

#[test]
fn without_filter_gets_go_on_and_without_index_all_is_unread() {
    let (volume, entries, table) = table_of(0);
    let lose = |offset: u64, bytes: u32| {
        for copy in table.place.copies(UNIT_BYTES) {
            let block = LOCATION * UNIT_BLOCKS + (copy + offset + u64::from(bytes) / 2) / 512;
            let fault = InjectedFault::Error(61);
            volume.faults.add(FaultRule::within(OpFilter::Read, Lba(block), Lba(block + 1), fault));
        }
    };
    let filter_offset = u64::from(table.place.descriptor_bytes);
    lose(filter_offset, table.place.filter_bytes);
    let damaged = volume.reopened();
    assert_eq!(check(&damaged, &entries, &table), []);
    assert_eq!(damaged.get(&table, b"no such key", u64::MAX), Ok(None));
    let statistics = damaged.io.counters.statistics();
    assert_eq!((statistics.filter_uses, statistics.filter_errors, statistics.damaged_copies), (0, 0, 2));

    let index_offset = filter_offset + u64::from(table.place.filter_bytes);
    lose(index_offset, table.place.index_bytes);
    let damaged = volume.reopened();
    assert_eq!(check(&damaged, &entries, &table), entries);
    let lba = LOCATION * UNIT_BLOCKS + (table.place.copies(UNIT_BYTES)[0] + index_offset) / 512;
    let corrupt = damaged.get(&table, b"no such key", u64::MAX);
    assert_eq!(corrupt, Err(EngineError::Corrupt { lba, place: damaged.io.place }));
}

#[test]
fn a_device_that_fails_is_no_damage() {
    let (volume, entries, table) = table_of(1);
    let no_device = DeviceError::Io(19);
    let failed = EngineError::Device { error: no_device, place: volume.io.place };
    let key = &entries[5].key;
    // Index, filter and data block, one after the other, then with the index in the cache.
    for prepare in [false, true] {
        let volume = volume.reopened();
        if prepare {
            block_on(volume.reader(&table).prefetch_index(), || ());
        }
        volume.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(19)));
        assert_eq!(volume.get(&table, key, u64::MAX), Err(failed));
        block_on(
            async {
                let mut cursor = volume.cursor(&table, TableCursorConfig::COMPACTION);
                assert_eq!(cursor.seek(Position::START).await, Err(failed));
                assert_eq!((at(&cursor), cursor.unread_part()), (None, None));
                volume.faults.clear();
                cursor.seek(Position::START).await.expect("no fault");
                assert_eq!(at(&cursor).as_ref(), Some(&entries[0]));
            },
            || (),
        );
        assert_eq!(
            volume.get(&table, key, u64::MAX).expect("no fault").as_ref(),
            model_get(&entries, key, u64::MAX)
        );
    }
}

#[test]
fn a_seek_into_damage_goes_on_behind_it_in_both_directions() {
    let (volume, entries, table) = table_of(0);
    let (from, to) = unit_blocks(3);
    volume.faults.add(FaultRule::within(OpFilter::Read, from, to, InjectedFault::Error(84)));
    let lost = check(&volume.reopened(), &entries, &table);
    let first = model_seek(&entries, lost[0].as_entry().position());
    let middle = lost[lost.len() / 2].as_entry().position();
    block_on(
        async {
            let mut cursor = volume.cursor(&table, TableCursorConfig::ITERATOR);
            assert!(cursor.seek(middle).await.is_err());
            assert_eq!(at(&cursor), None);
            while cursor.next().await.is_err() {}
            assert_eq!(at(&cursor).as_ref(), Some(&entries[first + lost.len()]));
            assert_eq!(cursor.unread_part(), None);
            while cursor.prev().await.is_err() {}
            assert_eq!(at(&cursor).as_ref(), Some(&entries[first - 1]), "it turned around");
            assert!(cursor.seek_before(Some(middle)).await.is_err());
            while cursor.prev().await.is_err() {}
            assert_eq!(at(&cursor).as_ref(), Some(&entries[first - 1]));
        },
        || (),
    );
}

#[test]
fn bytes_changed_at_random_never_give_a_wrong_entry() {
    for seed in 0..60 {
        let (volume, entries, table) = table_of(1);
        let random = &mut Prng::new(seed);
        for _ in 0..1 + random.below(6) {
            let unit = random.below(table.extent.units);
            let mut bytes = volume.unit(LOCATION, unit);
            let start = random.below(u64::from(UNIT_BYTES)) as usize;
            let end = (start + 1 + random.below(200) as usize).min(bytes.len());
            random.fill(&mut bytes[start..end]);
            volume.set_unit(LOCATION, unit, &bytes);
        }
        check(&volume.reopened(), &entries, &table);
    }
}

/// Changes the payload of a block in the run, and gives it a valid checksum again.
fn change_block(
    volume: &TestVolume,
    (kind, table_id): (BlockKind, u64),
    (start, bytes, offset): (u64, u32, u32),
    random: &mut Prng,
) {
    let mut block = volume.bytes(start, bytes as usize - TRAILER_BYTES);
    for _ in 0..1 + random.below(4) {
        // Small numbers are lengths and flags, the end is the restart points.
        let last = block.len() as u64 - 1;
        let at = if random.one_in(3) { last - random.below(last.min(16)) } else { random.below(last) };
        block[at as usize] = [random.next_u64() as u8, random.below(4) as u8, 255][random.below(3) as usize];
    }
    seal(&mut block, 0, kind, volume.io.owner(table_id), offset);
    volume.set_bytes(start, &block);
}

#[test]
fn blocks_with_any_bytes_under_valid_checksums_are_read_without_a_panic() {
    let (mut corrupt, mut intact) = (0, 0);
    for seed in 0..300 {
        let (volume, entries, table) = table_of(1);
        let (random, place) = (&mut Prng::new(seed), table.place);
        let index = block_on(volume.reader(&table).index(CacheFill::Skip), || ()).expect("an intact index");
        let target = entries[random.below(entries.len() as u64) as usize].as_entry().position();
        let block = index.seek_body(target).expect("a block");
        let at = place.data_offset(block.offset, block.bytes, UNIT_BYTES).expect("a block");
        let of = |kind| (kind, table.place.id);
        if seed % 3 < 2 {
            change_block(&volume, of(BlockKind::Data), (at, block.bytes, block.offset), random);
        }
        if seed % 3 > 0 {
            for copy in place.copies(UNIT_BYTES) {
                let filter = copy + u64::from(place.descriptor_bytes);
                let index = filter + u64::from(place.filter_bytes);
                change_block(&volume, of(BlockKind::Index), (index, place.index_bytes, 0), random);
                change_block(&volume, of(BlockKind::Filter), (filter, place.filter_bytes, 0), random);
            }
        }
        for entry in &entries {
            match volume.get(&table, &entry.key, entry.sequence) {
                Ok(_) => intact += 1,
                Err(_) => corrupt += 1,
            }
        }
        for config in [TableCursorConfig::COMPACTION, TableCursorConfig::ITERATOR] {
            for is_forward in [true, false] {
                scan(&mut volume.cursor(&table, config), is_forward, &table);
            }
        }
    }
    assert!(corrupt > 1000 && intact > 1000, "{corrupt} and {intact}");
}

#[test]
fn an_index_of_blocks_that_cannot_be_is_refused() {
    let (volume, entries, table) = table_of(0);
    let key = &entries[0].key;
    assert!(table.place.front_bytes > 70_000, "{:?}", table.place);
    let border = table.place.front_bytes - 500;
    let many = |bytes: u32, count: u32| (0..count).map(|block| (block * bytes, bytes)).collect::<Vec<_>>();
    for (blocks, is_index) in [
        // Offsets and lengths. The first ones could be those of an index.
        (many(500, 3), true),
        (vec![(0, 500), (501, 600)], false),
        (vec![(0, 500), (499, 600)], false),
        (vec![(0, 500), (0, 500)], false),
        (vec![(1, 500)], false),
        // Too long, on both sides of the first copy, beyond the data.
        (many(70_000, 1), false),
        ([many(500, border / 500), vec![(border / 500 * 500, 2000)]].concat(), false),
        (many(500, table.extent.units as u32 * UNIT_BYTES / 500), false),
        (vec![(0, 500), (500, u32::MAX)], false),
    ] {
        let (mut builder, mut index) = (KeyBlockBuilder::default(), Vec::new());
        for (number, (offset, bytes)) in blocks.iter().enumerate() {
            push_block(&mut builder, Position::behind(&(number as u32).to_be_bytes()), *offset, *bytes);
        }
        builder.finish(&mut index);
        seal(&mut index, 0, BlockKind::Index, volume.io.owner(table.place.id), 0);
        let mut place = table.place;
        let metadata_bytes = place.descriptor_bytes + place.filter_bytes;
        for copy in place.copies(UNIT_BYTES) {
            let start = copy + u64::from(metadata_bytes);
            volume.set_bytes(start, &index);
        }
        place.index_bytes = index.len() as u32;
        let changed = TableInfo { place, ..table.clone() };
        let reader = volume.reopened().reader(&changed);
        let found = block_on(reader.index(CacheFill::Skip), || ());
        assert_eq!(found.is_ok(), is_index, "{blocks:?}");
        if !is_index {
            let found = volume.reopened().get(&changed, key, u64::MAX);
            assert!(matches!(found, Err(EngineError::Corrupt { .. })), "{found:?}");
        }
    }
}

#[test]
fn entries_of_a_block_share_as_many_bytes_as_they_can() {
    use crate::lsm::entry::Position;
    use crate::lsm::table::index::TableIndex;
    // Blocks of other writers: a search that skips entries by what they share must not meet them. Each body: sequence, offset, length.
    let block = |second: &[u8]| {
        let first = [0, 2, b'a', b'b', 1, 0, 100];
        let bytes = [&first[..], second, &[5, 100, 100], &[0; 4], &1_u32.to_le_bytes()].concat();
        TableIndex::decode(bytes, |_| true)
    };
    let shares_all = block(&[1, 1, b'c']).expect("a block");
    assert_eq!(shares_all.find(Position { key: b"ac", sequence: 5 }).map(|body| body.offset), Some(100));
    assert!(block(&[0, 2, b'a', b'c']).is_none(), "one byte less than it can");
    assert!(block(&[0, 3, b'a', b'b', b'c']).is_none(), "two bytes less");
    assert!(block(&[2, 1, b'c']).is_some() && block(&[0, 1, b'b']).is_some());
}
