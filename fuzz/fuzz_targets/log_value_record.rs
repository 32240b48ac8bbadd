//! Value records of the log engine with any bytes, as they are and under a valid checksum of the head: a record or an error, and steps that
//! cover a chunk, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::log::log_place::{ChecksumKind, ChunkIndex, checksum_seed};
use octokv_engine::log::record_walk::{RecordWalk, WalkStep};
use octokv_engine::log::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use octokv_engine::log::value_record::{
    UncheckedValueRecord, VALUE_RECORD_MAGIC, ValueRecordHead, ValueRecordPlace, check_value_record,
};

const PLACE: ValueRecordPlace =
    ValueRecordPlace { volume_id: 7, partition: 1, index: ChunkIndex(2), granule: 3 };
const GRANULE_LOG2: u8 = 3;

fuzz_target!(|input: &[u8]| {
    walk(input);
    let mut record = input.to_vec();
    let Some(front) = record.first_chunk_mut::<16>() else { return };
    front[0] = VALUE_RECORD_MAGIC;
    // As long as its fields say.
    let (flags, key_bytes) = (front[1], usize::from(u16::from_le_bytes([front[2], front[3]])));
    let value_bytes = u32::from_le_bytes([front[4], front[5], front[6], front[7]]) as usize;
    let fields = 8 * usize::from(flags & 1) + 8 * usize::from(flags >> 1 & 1);
    let pieces = if flags & 4 != 0 { 4 * value_bytes.div_ceil(128 << 10) } else { 0 };
    let Some(behind) = record.get(12..16 + fields + key_bytes + pieces) else { return };
    let seed = checksum_seed(7, 1, ChecksumKind::Record, ChunkIndex(2), 3);
    let crc = crc32c(&[&record[..8], behind].concat()) ^ seed;
    record[8..12].copy_from_slice(&crc.to_le_bytes());
    walk(&record);
    if let Ok(head) = (UncheckedValueRecord { bytes: &record, place: PLACE }).head() {
        take(&record, &head);
    }
});

/// What an entry that names the record gets of it.
fn take(record: &[u8], head: &ValueRecordHead<'_>) {
    let contents = EntryContents::Value { bytes: head.value_bytes, at: ValuePlace::Record(3) };
    let entry = SegmentEntry { key: head.key, meta: head.meta, contents };
    let value = record.get(head.head_bytes()..head.head_bytes() + head.value_bytes as usize);
    let is_intact = value.is_some_and(|value| head.is_value_intact(value));
    assert_eq!(check_value_record(record, &entry, PLACE).is_ok(), is_intact);
    let other = SegmentEntry { key: b"another key than any of these", ..entry };
    assert!(check_value_record(record, &other, PLACE).is_err() || head.key == other.key);
}

fn walk(bytes: &[u8]) {
    let mut at = PLACE.granule;
    for step in RecordWalk::new(bytes, PLACE, GRANULE_LOG2) {
        let (granule, granules) = match step {
            WalkStep::Record { granule, head } => {
                let rest =
                    bytes[((granule - PLACE.granule) as usize) << GRANULE_LOG2..].get(head.head_bytes()..);
                let value = rest.and_then(|rest| rest.get(..head.value_bytes as usize));
                let is_whole = value.is_some_and(|value| head.is_value_intact(value));
                (granule, if is_whole { head.granules(GRANULE_LOG2) } else { 1 })
            }
            WalkStep::Gap { granule, granules, .. } => (granule, granules),
        };
        assert!(granule == at && granules > 0);
        at += granules;
    }
    // The value of the last record may end in a granule that is cut off.
    assert!(at - PLACE.granule >= (bytes.len() >> GRANULE_LOG2) as u32);
}
