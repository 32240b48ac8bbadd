//! Segment images of the log engine with any bytes, as they are and under valid checksums: entries and damaged buckets, never a panic.
//! What is intact is encoded to the same entries again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::log::log_place::{ChecksumKind, ChunkIndex, checksum_seed};
use octokv_engine::log::segment_buckets::{
    CheckedImage, ImagePlace, UncheckedBuckets, encode_image, image_units,
};
use octokv_engine::log::segment_entry::SegmentEntry;

const UNIT: usize = 512;
const PLACE: ImagePlace =
    ImagePlace { volume_id: 7, partition: 1, index: ChunkIndex(2), unit: 3, unit_bytes: UNIT as u32 };

fuzz_target!(|input: &[u8]| {
    decode_entries(input);
    let Some((&chain, bytes)) = input.split_first() else { return };
    check(bytes, chain);
    // Under a valid checksum of the first bucket, with its magic number, format and partition.
    let mut image = bytes.to_vec();
    image.resize(bytes.len().next_multiple_of(UNIT).max(UNIT), 0xff);
    image[..3].copy_from_slice(b"KB\x01");
    image[8..12].copy_from_slice(&PLACE.partition.to_le_bytes());
    let seed = checksum_seed(7, 1, ChecksumKind::Bucket, ChunkIndex(2), 3);
    let crc = crc32c(&[&image[..4], &image[8..UNIT]].concat()) ^ seed;
    image[4..8].copy_from_slice(&crc.to_le_bytes());
    check(&image, image[22]);
});

/// Entries, one behind the other: each has one encoding.
fn decode_entries(mut bytes: &[u8]) {
    while let Some((entry, length)) = SegmentEntry::decode(bytes) {
        let mut encoded = Vec::new();
        entry.encode(&mut encoded);
        assert_eq!(encoded, &bytes[..length], "{entry:?}");
        bytes = &bytes[length..];
    }
}

fn check(bytes: &[u8], chain: u8) {
    let CheckedImage { head, damaged, entries } = UncheckedBuckets { bytes, place: PLACE }.check(chain);
    assert_eq!(entries.iter().count(), entries.entries());
    let (Some(head), 0) = (head, damaged) else {
        assert!(entries.is_lost() || chain == 0);
        return;
    };
    let units = image_units(entries.entry_bytes(), PLACE.unit_bytes).expect("it has been one image");
    let mut again = vec![0; usize::from(units) * UNIT];
    encode_image(&mut again, &head.state, &entries, PLACE);
    let checked = UncheckedBuckets { bytes: &again, place: PLACE }.check(units);
    assert_eq!(checked, CheckedImage { head: Some(head), damaged: 0, entries });
}
