//! Bytes of a disk that are intact and that no version writes, or only one before it stopped: no operation panics.

use crate::common::crafted_volume::CraftedVolume;
use octokv_base::{KEY_BYTES_MAX, Key};
use octokv_engine::common::record::{self, NewRecord, RecordFlags, RecordFormat, RecordId, RecordMeta};
use octokv_engine::common::superblock::SuperblockError;
use octokv_engine::conformance::key_of;
use octokv_engine::hash::index::{IndexEntry, RecordRef, TAG_BITS, fingerprint};
use octokv_engine::hash::journal::IndexChange;
use octokv_engine::{Engine, OpenError, PutMode};
use octokv_runtime::block_on;

fn small_volume() -> CraftedVolume {
    CraftedVolume::new(0, 248, 0, 100, 20_000)
}

#[test]
fn a_damaged_record_that_two_keys_of_its_tag_replace_in_the_last_batch_is_replaced_once() {
    // As an earlier version left it; the top bits of the hashes are the same.
    let mut volume = small_volume();
    let (damaged, hash) = (volume.superblock.layout.data_start_unit, volume.hash(&key_of(1)));
    let record_ref = RecordRef {
        location: damaged,
        units: 1,
        fingerprint: fingerprint(RecordFormat::V1, 7, RecordFlags::NONE),
    };
    volume.write_checkpoint(&[vec![IndexEntry::new((hash >> (128 - TAG_BITS)) as u64, record_ref)]]);
    volume.write_record(damaged + 2, 8, &key_of(1));
    volume.write_record(damaged + 3, 9, &key_of(2));
    let put = |hash: u128, location: u64, sequence: u64| IndexChange {
        hash,
        new_location: location,
        old_location: damaged,
        sequence,
        units: 1,
        flags: RecordFlags::NONE,
    };
    let delete = |hash: u128| IndexChange { units: 0, sequence: 0, ..put(hash, 0, 0) };
    let table = [
        ([put(hash, damaged + 2, 8), put(hash ^ 1, damaged + 3, 9)], 2),
        ([put(hash, damaged + 2, 8), delete(hash ^ 1)], 1),
        ([delete(hash ^ 1), put(hash, damaged + 2, 8)], 1),
        ([delete(hash), delete(hash ^ 1)], 0),
    ];
    for (entries, records) in table {
        volume.write_batch(0, &volume.header(5, 50, 4), &entries);
        let report = volume.verify().unwrap_or_else(|error| panic!("{entries:?}: {error}"));
        assert_eq!((report.keys, report.used_bytes), (records, records * 1_024), "{entries:?}");
        assert_eq!(volume.open().unwrap().statistics().keys, records, "{entries:?}");
    }
}

#[test]
fn a_key_that_is_longer_than_any_is_not_listed() {
    let mut volume = small_volume();
    let first = volume.superblock.layout.data_start_unit;
    let entry = |at: u64| {
        let fingerprint = fingerprint(RecordFormat::V1, 7 + at, RecordFlags::NONE);
        IndexEntry::new(at, RecordRef { location: first + 2 * at, units: 2, fingerprint })
    };
    volume.write_checkpoint(&[vec![entry(0), entry(1)]]);
    for (at, key) in [(0, [7; KEY_BYTES_MAX + 1].as_slice()), (1, &[7; KEY_BYTES_MAX])] {
        let location = first + 2 * at;
        let new = NewRecord {
            format: RecordFormat::V1,
            identity: RecordId { volume_id: 77, sequence: 7 + at, location },
            namespace: 1,
            key,
            value_bytes: 0,
            stored_bytes: 0,
            meta: RecordMeta::PLAIN,
        };
        let mut bytes = vec![0; 2_048];
        record::encode(&mut bytes, &new);
        volume.device.put(volume.lba(location), &bytes);
    }
    let mut listed = Vec::new();
    let mut sink = |key: &[u8]| {
        listed.push(key.len());
        true
    };
    let engine = volume.open().unwrap();
    block_on(engine.list(&Key::new(&[]).unwrap(), &mut sink), || ()).unwrap();
    assert_eq!(listed, [KEY_BYTES_MAX]);
}

#[test]
fn a_superblock_whose_counters_or_longest_value_break_an_invariant_is_refused() {
    type Change = fn(&mut CraftedVolume);
    let changes: [Change; 2] = [
        |volume| volume.superblock.checkpoint.batch = 0,
        // Longer than an index entry can tell.
        |volume| volume.superblock.value_bytes_max = 9 << 20,
    ];
    for change in changes {
        let mut volume = small_volume();
        change(&mut volume);
        match volume.open() {
            Err(OpenError::Superblock(SuperblockError::Inconsistent)) => {}
            Err(error) => panic!("{error:?}"),
            // What opens has to work.
            Ok(engine) => {
                let (key, bytes) = (key_of(1), volume.superblock.value_bytes_max as usize);
                let value = vec![1; bytes];
                let record = octokv_engine::conformance::record_of(engine.record_layout(), &key, &value);
                let stored = block_on(engine.put(&key, PutMode::Upsert, record, bytes), || ());
                panic!("opened; a put gives {stored:?}");
            }
        }
    }
}
