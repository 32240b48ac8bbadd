//! Replay of the journal: which batches and entries count, and which damage is reported.

use crate::common::crafted_volume::CraftedVolume;
use octokv_base::{KEY_BYTES_MAX, Key, Lba};
use octokv_device::fault_injection::{FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::common::journal::BatchHeader;
use octokv_engine::common::record::{RecordFlags, RecordFormat, RecordId};
use octokv_engine::common::superblock::COUNT_MAX;
use octokv_engine::conformance::key_of;
use octokv_engine::hash::index::{IndexEntry, RECORD_UNITS_MAX, RecordRef, TAG_BITS, fingerprint};
use octokv_engine::hash::journal::IndexChange;
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome};
use octokv_engine::{IndexMismatch, MetadataStructure, OpenError};
use octokv_runtime::block_on;

/// The longest batch, in units.
const BATCH_UNITS_MAX: u32 = 31;

/// The shortest ring: 8 batches of the greatest length.
fn small_volume() -> CraftedVolume {
    CraftedVolume::new(0, 248, 0, 100, 20_000)
}

/// An entry of a key that is new.
fn put_entry(number: u64, location: u64, units: u32) -> IndexChange {
    // Spread over the table.
    let hash = u128::from(number * ((1 << TAG_BITS) / 30_000)) << (128 - TAG_BITS);
    IndexChange {
        hash,
        new_location: location,
        old_location: 0,
        sequence: number,
        units,
        flags: RecordFlags::NONE,
    }
}

/// A volume with a journal of `batches` batches from `unit` on, all but the last, which is empty, known durable.
/// Gives the first unit of each, and the units that the records take.
fn volume_with_journal(
    ring: u32,
    unit: u32,
    entries: impl Fn(u64) -> u64,
    batches: u64,
) -> (CraftedVolume, Vec<u32>, u64) {
    let volume = CraftedVolume::new(0, ring, unit, 400, 1 << 19);
    let (mut unit, mut number, mut units_of_batches) = (unit, 50, Vec::new());
    let mut location = volume.superblock.layout.data_start_unit;
    for batch in 5..=5 + batches {
        let count = if batch == 5 + batches { 0 } else { entries(batch) };
        let list: Vec<IndexChange> = (number..number + count)
            .map(|number| {
                let units = 1 + number % 3;
                location += units;
                put_entry(number, location - units, units as u32)
            })
            .collect();
        if unit + BATCH_UNITS_MAX > ring {
            unit = 0;
        }
        units_of_batches.push(unit);
        unit += volume.write_batch(unit, &volume.header(batch, number, batch - 1), &list);
        number += count;
    }
    let used = location - volume.superblock.layout.data_start_unit;
    (volume, units_of_batches, used)
}

#[test]
fn replay_follows_the_ring_beyond_its_end_and_reads_either_copy() {
    // A ring longer than a read of 1 MiB, passed nearly once.
    for first in [0, 1_469, 1_470] {
        let (volume, units, used) = volume_with_journal(1_500, first, |batch| batch * 37 % 661, 75);
        let keys: u64 = (5..80).map(|batch| batch * 37 % 661).sum();
        let check = |volume: &CraftedVolume, damaged_copies, context: &str| {
            let device = volume.prepared();
            let report =
                volume.verify_on(&device).unwrap_or_else(|error| panic!("{first}, {context}: {error}"));
            let journal = volume.journal_lbas(0)[0]..volume.checkpoint_lbas()[0];
            let mut reads = device.reads.take();
            reads.retain(|(lba, _)| journal.contains(lba));
            for &(lba, bytes) in &reads {
                let is_second = lba >= volume.journal_lbas(0)[1];
                let end = lba + bytes as u64 / 512;
                assert!(bytes <= 1 << 20 && end <= volume.journal_lbas(1_500)[usize::from(is_second)]);
            }
            assert!(context != "intact" || reads.len() <= 10, "{first}: {reads:?}");
            let want = (keys, used * 1_024, damaged_copies, 0);
            let found = (report.keys, report.used_bytes, report.damaged_copies, report.dropped_entries);
            assert_eq!(found, want, "{first}, {context}");
        };
        check(&volume, 0, "intact");
        // Every other batch is damaged in its first copy, the others in the second.
        let damaged = volume.clone();
        for (index, &unit) in units.iter().enumerate() {
            damaged.device.damage(volume.journal_lbas(unit)[index % 2], 20);
        }
        check(&damaged, 38, "damaged");
        // A window that cannot be read as a whole is read batch by batch.
        let unreadable = CraftedVolume { faults: FaultPlan::default(), ..volume.clone() };
        let lba = volume.journal_lbas(units[40])[0];
        unreadable.faults.add(FaultRule::within(
            OpFilter::Read,
            Lba(lba),
            Lba(lba + 1),
            InjectedFault::Error(5),
        ));
        let bad = units[40];
        let beside = units.iter().filter(|&&unit| unit <= bad && bad < unit + BATCH_UNITS_MAX);
        check(&unreadable, beside.count() as u64, "unreadable");
    }
}

#[test]
fn a_journal_is_continued_behind_its_last_batch() {
    let (volume, units, _) = volume_with_journal(248, 100, |batch| batch * 7 % 100, 20);
    let device = volume.prepared();
    let engine = volume.open_on(&device).unwrap();
    let keys = engine.statistics().keys;
    // Its batches were checkpointed: the next one has the next number, at the next place.
    let key = key_of(1);
    let record = octokv_engine::conformance::record_of(engine.record_layout(), &key, b"a value");
    assert_eq!(block_on(engine.put(&key, PutMode::Upsert, record, 7), || ()), Ok(PutOutcome::Stored));
    let next = volume.journal_lbas(units[20] + 1)[0];
    let header = device.contents.borrow()[&next];
    assert_eq!((&header[..4], &header[16..24]), (&b"OKVJ"[..], &26_u64.to_le_bytes()[..]));
    drop(engine);
    let engine = volume.open_on(&device).unwrap();
    assert_eq!(engine.statistics().keys, keys + 1);
    assert!(block_on(engine.get(&key), || ()).unwrap().is_some());
}

#[test]
fn batches_of_another_volume_an_earlier_opening_or_another_number_end_the_journal() {
    let valid = |volume: &CraftedVolume| volume.header(5, 50, 4);
    type Change = fn(&mut BatchHeader);
    let table: [(&str, Change, u64); 6] = [
        ("the expected one", |_| (), 1),
        ("a later opening", |header| header.incarnation += 1, 1),
        ("an earlier opening", |header| header.incarnation -= 1, 0),
        ("an earlier batch", |header| header.batch = 4, 0),
        ("another volume", |header| header.volume_id += 1, 0),
        ("a later entry number", |header| header.first_entry = COUNT_MAX - 1, 1),
    ];
    for (context, change, keys) in table {
        let volume = small_volume();
        let mut header = valid(&volume);
        change(&mut header);
        let location = volume.superblock.layout.data_start_unit;
        volume.write_batch(0, &header, &[put_entry(50, location, 1)]);
        volume.write_record(location, 50, &key_of(0));
        let report = volume.verify().unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_eq!((report.keys, report.dropped_entries), (keys, 0), "{context}");
    }
    let volume = small_volume();
    let header = BatchHeader { first_entry: COUNT_MAX, ..valid(&volume) };
    volume.write_batch(0, &header, &[]);
    let mismatch = IndexMismatch::ImpossibleBatch { batch: 5 };
    assert_eq!(volume.open_error(), OpenError::Inconsistent { lba: volume.journal_lbas(0)[0], mismatch });
    // The second copy is named if only that one is intact.
    volume.device.damage(volume.journal_lbas(0)[0], 20);
    assert_eq!(volume.open_error(), OpenError::Inconsistent { lba: volume.journal_lbas(0)[1], mismatch });
}

#[test]
fn entries_name_records_within_the_record_area() {
    let superblock = small_volume().superblock;
    let (first, end) = (superblock.layout.data_start_unit, superblock.layout.units());
    let most = RECORD_UNITS_MAX as u32;
    let table = [
        (first, 1, 0, true),
        (first - 1, 1, 0, false),
        (end - 1, 1, 0, true),
        (end - 1, 2, 0, false),
        (end, 1, 0, false),
        (first, 0, 0, false),
        (first, most, 0, true),
        (first, most + 1, 0, false),
        (end - u64::from(most), most, 0, true),
        (first, 1, end - 1, true),
        (first, 1, first - 1, false),
        (first, 1, end, false),
        (0, 0, first, true),
        (0, 0, 0, true),
    ];
    for (new_location, units, old_location, is_plausible) in table {
        let mut volume = small_volume();
        let entry = IndexChange { new_location, old_location, units, ..put_entry(50, 1, 1) };
        let old = RecordRef { location: old_location, units: 1, fingerprint: 1 };
        let tag = (entry.hash >> (128 - TAG_BITS)) as u64;
        if old_location >= first && old_location < end {
            volume.write_checkpoint(&[vec![IndexEntry::new(tag, old)]]);
        }
        volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
        let lba = volume.journal_lbas(0)[0];
        let want = OpenError::Inconsistent { lba, mismatch: IndexMismatch::ImpossibleBatch { batch: 5 } };
        assert_eq!(volume.open().err(), (!is_plausible).then_some(want), "{entry:?}");
    }
}

#[test]
fn a_later_batch_that_waited_for_a_missing_one_shows_that_it_was_damaged() {
    let end = 100;
    // Unit, header, whether it proves that batch 5 was durable.
    let volume = small_volume();
    let waited = |batch| BatchHeader { is_predecessor_unflushed: false, ..volume.header(batch, 60, 4) };
    let table = [
        ("the next one", end + 1, waited(6), true),
        ("as far as it can be", end + 4 * BATCH_UNITS_MAX - 1, waited(9), true),
        ("at the start of the ring", 0, waited(7), true),
        ("as far as it can be from the start", 4 * BATCH_UNITS_MAX - 1 - 30, waited(7), true),
        ("a later opening", end + 1, BatchHeader { incarnation: 4, ..waited(6) }, true),
        ("that did not wait", end + 1, volume.header(6, 60, 4), false),
        ("that did not wait, after a flush", end + 3, volume.header(8, 60, 5), true),
        ("the same one", end + 1, waited(5), false),
        ("an earlier opening", end + 1, BatchHeader { incarnation: 2, ..waited(6) }, false),
        ("another volume", end + 1, BatchHeader { volume_id: 78, ..waited(6) }, false),
    ];
    for (context, unit, header, is_proof) in table {
        for damaged_copy in 0..2 {
            let volume = CraftedVolume::new(0, 248, end, 100, 20_000);
            volume.write_batch(unit, &header, &[]);
            volume.device.damage(volume.journal_lbas(unit)[damaged_copy], 20);
            let structure = MetadataStructure::JournalBatch { batch: 5 };
            let want = OpenError::CopiesUnreadable { structure, lbas: volume.journal_lbas(end) };
            assert_eq!(volume.open().err(), is_proof.then_some(want), "{context}");
        }
    }
}

#[test]
fn a_batch_that_neither_copy_can_be_read_for_is_an_error_and_one_copy_suffices() {
    let volume = small_volume();
    let location = volume.superblock.layout.data_start_unit;
    volume.write_batch(0, &volume.header(5, 50, 4), &[put_entry(50, location, 1)]);
    volume.write_record(location, 50, &key_of(0));
    let fail = |copies: &[usize]| {
        let volume = CraftedVolume { faults: FaultPlan::default(), ..volume.clone() };
        for &copy in copies {
            let lba = volume.journal_lbas(0)[copy];
            volume.faults.add(FaultRule::within(
                OpFilter::Read,
                Lba(lba),
                Lba(lba + 1),
                InjectedFault::Error(5),
            ));
        }
        volume.open().map(|engine| engine.statistics().keys)
    };
    assert_eq!([fail(&[]), fail(&[0]), fail(&[1])], [Ok(1); 3]);
    // The last batch may be in one copy alone: a crash can have prevented the other.
    let torn = volume.clone();
    torn.device.damage(volume.journal_lbas(0)[0], 20);
    let report = torn.verify().unwrap();
    assert_eq!((report.keys, report.damaged_copies), (1, 0));
    let structure = MetadataStructure::JournalBatch { batch: 5 };
    let lbas = volume.journal_lbas(0);
    assert_eq!(fail(&[0, 1]), Err(OpenError::CopiesUnreadable { structure, lbas }));
}

/// A volume with one key, whose journal then replaces its record: `second` describes the record of the replacement.
struct Replacement {
    volume: CraftedVolume,
    key: Key,
    old: u64,
    new: u64,
}

fn replacement(format: RecordFormat) -> Replacement {
    let mut volume = small_volume();
    volume.superblock.format = format;
    let (key, old) = (key_of(0), volume.superblock.layout.data_start_unit + 10);
    let tag = (volume.hash(&key) >> (128 - TAG_BITS)) as u64;
    let record_ref =
        RecordRef { location: old, units: 1, fingerprint: fingerprint(format, 7, RecordFlags::NONE) };
    volume.write_checkpoint(&[vec![IndexEntry::new(tag, record_ref)]]);
    volume.write_record(old, 7, &key);
    Replacement { volume, key, old, new: old + 1 }
}

/// The journal entry with which record 8 of `key`, at `new`, replaces the one at `old`.
fn replacing_entry(volume: &CraftedVolume, key: &Key, old: u64, new: u64) -> IndexChange {
    IndexChange {
        hash: volume.hash(key),
        new_location: new,
        old_location: old,
        sequence: 8,
        units: 1,
        flags: RecordFlags::NONE,
    }
}

#[test]
fn an_entry_that_is_not_known_durable_counts_only_with_its_own_intact_record() {
    for format in [RecordFormat::V1, RecordFormat::V2] {
        let Replacement { volume, key, old, new } = replacement(format);
        let entry = replacing_entry(&volume, &key, old, new);
        volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
        let own = RecordId { volume_id: 77, sequence: 8, location: new };
        let table = [
            (own, true),
            (RecordId { sequence: 9, ..own }, false),
            (RecordId { volume_id: 78, ..own }, false),
            (RecordId { location: old, ..own }, false),
        ];
        let check = |volume: &CraftedVolume, is_applied: bool, context: &str| {
            let report = volume.verify().unwrap();
            let want = (1, u64::from(!is_applied));
            assert_eq!((report.keys, report.dropped_entries), want, "{context}");
            let device = volume.prepared();
            let engine = volume.open_on(&device).unwrap();
            assert!(block_on(engine.get(&key), || ()).unwrap().is_some(), "{context}");
            // Later batches would mark it as durable: the checkpoint comes first.
            assert_eq!(engine.statistics().checkpoints, 1, "{context}");
            // Which of both records the index names: the other one's space is free.
            drop(engine);
            let lba = volume.lba(if is_applied { new } else { old });
            device.damage(lba, 20);
            let problems = volume.verify_on(&device).unwrap().problems;
            assert_eq!(problems.iter().map(|problem| problem.lba).collect::<Vec<_>>(), [lba], "{context}");
        };
        check(&volume, false, "no record");
        for (identity, is_applied) in table {
            let volume = volume.clone();
            volume.write_record_as(new, identity, &key);
            check(&volume, is_applied, &format!("{identity:?}"));
            let damaged = volume.clone();
            damaged.device.damage(volume.lba(new), 20);
            check(&damaged, false, "a damaged record");
        }
        // A record that cannot be read may be intact: reads of its key report the device.
        let unreadable = CraftedVolume { faults: FaultPlan::default(), ..volume.clone() };
        let lba = volume.lba(new);
        unreadable.faults.add(FaultRule::within(
            OpFilter::Read,
            Lba(lba),
            Lba(lba + 1),
            InjectedFault::Error(5),
        ));
        let engine = unreadable.open().unwrap();
        assert!(matches!(block_on(engine.get(&key), || ()), Err(EngineError::Device { .. })));
    }
}

/// Two failed reads of a torn record, and recovery replaced the previous value by it: the key was corrupt for good.
#[test]
fn a_read_error_that_passes_does_not_decide_whether_an_entry_counts() {
    for format in [RecordFormat::V1, RecordFormat::V2] {
        for (is_torn, failures) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            let Replacement { volume, key, old, new } = replacement(format);
            let (hash, lba) = (volume.hash(&key), volume.lba(new));
            let entry = IndexChange {
                hash,
                new_location: new,
                old_location: old,
                sequence: 8,
                units: 1,
                flags: RecordFlags::NONE,
            };
            volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
            volume.write_record(new, 8, &key);
            if is_torn {
                volume.device.damage(lba, 20);
            }
            let fails = FaultRule::within(OpFilter::Read, Lba(lba), Lba(lba + 1), InjectedFault::Error(5));
            volume.faults.add(FaultRule { times: failures, ..fails });
            let engine = volume.open().unwrap();
            let found = block_on(engine.get(&key), || ());
            assert!(matches!(found, Ok(Some(_))), "torn: {is_torn}, {failures} failures");
        }
    }
}

#[test]
fn a_batch_that_one_recovery_could_not_read_does_not_appear_in_the_next() {
    for format in [RecordFormat::V1, RecordFormat::V2] {
        for copy in [0, 1] {
            let Replacement { volume, key, old, new } = replacement(format);
            let entry = replacing_entry(&volume, &key, old, new);
            // A crash while the batch was written: it is in one copy alone.
            volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
            volume.write_record(new, 8, &key);
            volume.device.damage(volume.journal_lbas(0)[1 - copy], 20);
            let names_new = |failures: u32| {
                let volume = CraftedVolume { faults: FaultPlan::default(), ..volume.clone() };
                let device = volume.prepared();
                if failures > 0 {
                    let lba = volume.journal_lbas(0)[copy];
                    let fails =
                        FaultRule::within(OpFilter::Read, Lba(lba), Lba(lba + 1), InjectedFault::Error(5));
                    volume.faults.add(FaultRule { times: failures, ..fails });
                }
                drop(volume.open_on(&device).unwrap());
                // What an opening that reads everything finds now.
                device.damage(volume.lba(old), 20);
                volume.verify_on(&device).unwrap().problems.is_empty()
            };
            // The first failure is that of a long read, which is repeated with the batch alone.
            assert_eq!([0, 1, 2, 3].map(names_new), [true, true, false, false], "copy {copy}");
        }
    }
}

#[test]
fn a_change_of_a_dropped_entry_replaces_the_record_before_it() {
    for format in [RecordFormat::V1, RecordFormat::V2] {
        for deletes in [false, true] {
            let Replacement { volume, key, old, new } = replacement(format);
            let dropped = replacing_entry(&volume, &key, old, new);
            let next = match deletes {
                true => IndexChange { new_location: 0, old_location: new, sequence: 0, units: 0, ..dropped },
                false => IndexChange { new_location: new + 1, old_location: new, sequence: 9, ..dropped },
            };
            volume.write_record(new + 1, 9, &key);
            let first = volume.write_batch(0, &volume.header(5, 50, 4), &[dropped]);
            volume.write_batch(first, &volume.header(6, 51, 4), &[next]);
            let report = volume.verify().unwrap();
            let want = if deletes { 0 } else { 1 };
            assert_eq!((report.keys, report.used_bytes, report.dropped_entries), (want, want * 1_024, 1));
            assert!(report.problems.is_empty(), "{:?}", report.problems);
        }
    }
}

#[test]
fn an_entry_that_replaces_another_keys_record_of_the_same_tag_replaces_nothing() {
    for format in [RecordFormat::V1, RecordFormat::V2] {
        let own = RecordId { volume_id: 77, sequence: 7, location: 0 };
        let (one, other) = (key_of(0), key_of(1));
        // The key and the identity of the record at the old location, and the keys that remain.
        let table = [
            ("another key's record", &one, own, 2),
            ("its own record", &other, own, 1),
            ("a newer record", &one, RecordId { sequence: 6, ..own }, 1),
            ("another volume's record", &one, RecordId { volume_id: 78, ..own }, 1),
            ("another location's record", &one, RecordId { location: 9, ..own }, 1),
            ("another tag's record", &key_of(2), own, 1),
        ];
        for (context, found_key, identity, keys) in table {
            let Replacement { volume, old, new, .. } = replacement(format);
            let location = if identity.location == 0 { old } else { identity.location };
            volume.write_record_as(old, RecordId { location, ..identity }, found_key);
            // As if the hash of `other` had the tag of `one`.
            let hash = volume.hash(&one);
            volume.write_record(new, 8, &other);
            let entry = IndexChange {
                hash,
                new_location: new,
                old_location: old,
                sequence: 8,
                units: 1,
                flags: RecordFlags::NONE,
            };
            volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
            let report = volume.verify().unwrap();
            assert_eq!((report.keys, report.dropped_entries), (keys, 0), "{context}");
            // An entry that is known durable was amended before.
            volume.write_batch(0, &volume.header(5, 50, 5), &[entry]);
            assert_eq!(volume.verify().unwrap().keys, 1, "{context}");
        }
    }
}

#[test]
fn entries_that_a_checkpoint_includes_are_not_applied_again() {
    // The images are from different times: the second one includes the first entry of the journal.
    let mut volume = CraftedVolume::new(1, 248, 0, 100, 20_000);
    let location = volume.superblock.layout.data_start_unit;
    let entry_of = |partition: u64, number: u64| IndexChange {
        hash: (u128::from(partition) << 127) | u128::from(number) << 80,
        ..put_entry(number, location + number - 50, 1)
    };
    let tag = |entry: &IndexChange| ((entry.hash << 1) >> (128 - TAG_BITS)) as u64;
    let entries = [entry_of(1, 50), entry_of(0, 51), entry_of(1, 52)];
    volume.superblock.checkpoint.entry = 50;
    let included =
        RecordRef { location, units: 1, fingerprint: fingerprint(RecordFormat::V1, 50, RecordFlags::NONE) };
    volume.write_checkpoint(&[vec![], vec![IndexEntry::new(tag(&entries[0]), included)]]);
    volume.superblock.checkpoint.entry = 49;
    for flushed_through in [4, 5] {
        for (entry, key) in entries.iter().zip(0..) {
            volume.write_record(entry.new_location, entry.sequence, &key_of(key));
        }
        volume.write_batch(0, &volume.header(5, 50, flushed_through), &entries);
        let report = volume.verify().unwrap();
        assert_eq!((report.keys, report.used_bytes, report.dropped_entries), (3, 3 * 1_024, 0));
    }
}

#[test]
fn a_durable_entry_that_replaces_a_missing_record_is_named_with_its_block() {
    let volume = small_volume();
    let old_location = volume.superblock.layout.data_start_unit + 7;
    let entry = IndexChange { old_location, ..put_entry(50, old_location + 1, 1) };
    volume.write_batch(0, &volume.header(5, 50, 5), &[entry]);
    let mismatch = IndexMismatch::MissingPredecessor { entry: 50 };
    let lba = volume.lba(old_location);
    assert_eq!(volume.open_error(), OpenError::Inconsistent { lba, mismatch });
}

#[test]
fn the_record_of_another_key_of_the_same_tag_stays_even_if_that_key_is_the_longest() {
    let mut volume = small_volume();
    let long = Key::new(&[7; KEY_BYTES_MAX]).unwrap();
    let (hash, old) = (volume.hash(&long), volume.superblock.layout.data_start_unit);
    let record_ref = RecordRef {
        location: old,
        units: 2,
        fingerprint: fingerprint(RecordFormat::V1, 7, RecordFlags::NONE),
    };
    volume.write_checkpoint(&[vec![IndexEntry::new((hash >> (128 - TAG_BITS)) as u64, record_ref)]]);
    volume.write_record(old, 7, &long);
    volume.write_record(old + 2, 8, &key_of(1));
    let entry = IndexChange {
        hash,
        new_location: old + 2,
        old_location: old,
        sequence: 8,
        units: 1,
        flags: RecordFlags::NONE,
    };
    volume.write_batch(0, &volume.header(5, 50, 4), &[entry]);
    assert_eq!(volume.verify().unwrap().keys, 2);
}

#[test]
fn what_follows_the_ring_is_no_batch_of_it() {
    // The journal ends near the end of the ring, and what looks like a later batch is behind its second copy.
    let volume = CraftedVolume::new(0, 248, 217, 100, 20_000);
    let header = BatchHeader { is_predecessor_unflushed: false, ..volume.header(6, 60, 4) };
    volume.write_batch(248, &header, &[]);
    volume.device.damage(volume.journal_lbas(248)[0], 20);
    assert!(volume.open().is_ok());
}
