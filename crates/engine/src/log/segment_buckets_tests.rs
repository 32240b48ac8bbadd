//! Tests of the buckets of segment images: round trips, damage of any bucket, and images of other places.

use super::hash_prefix::SegmentNumber;
use super::log_place::{ChunkIndex, ChunkNumber};
use super::segment_buckets::{
    CheckedImage, ImageHead, ImagePlace, ImageRole, ImageState, PreviousImage, StoreTotals, UncheckedBuckets,
    ValueTailPlace, encode_image, image_capacity_bytes, image_units, seal_buckets,
};
use super::segment_image::SegmentImage;
use super::segment_ref::CHAIN_MAX;
use super::test_entries::{OwnedSegmentEntry, any_entry};
use octokv_base::Prng;
use proptest::collection::vec;
use proptest::prelude::*;

const PLACE: ImagePlace = ImagePlace {
    volume_id: 0x0102_0304_0506_0708,
    partition: 9,
    index: ChunkIndex(7),
    unit: 3,
    unit_bytes: 512,
};

/// A header with a distinct value in each field.
const STATE: ImageState = ImageState {
    role: ImageRole::Segment,
    segment: SegmentNumber(0x1234),
    depth: 13,
    sequence: 0x1122_3344_5566,
    incarnation: 0x21,
    durable_lag: 0x22,
    key_head: ChunkIndex(0x23),
    value_head: ChunkIndex(0x24),
    next_key_chunk: ChunkNumber(0x25),
    next_value_chunk: ChunkNumber(0x26),
    value_tail: ValueTailPlace { index: ChunkIndex(0x27), granule: 0x28 },
    totals: StoreTotals { keys: 0x31_3233_3435, live_granules: 0x41_4243_4445, entry_bytes: 0x51_5253_5455 },
    previous: PreviousImage { segment: SegmentNumber(0x61), chain: 0x2a },
};

fn place(unit_bytes: u32) -> ImagePlace {
    ImagePlace { unit_bytes, ..PLACE }
}

fn encoded(state: &ImageState, image: &SegmentImage, place: ImagePlace) -> Vec<u8> {
    let chain = image_units(image.entry_bytes(), place.unit_bytes).expect("a short image");
    let mut bytes = vec![0xee; usize::from(chain) * place.unit_bytes as usize];
    encode_image(&mut bytes, state, image, place);
    bytes
}

/// Images of at most 63 buckets.
fn any_image() -> impl Strategy<Value = SegmentImage> {
    (vec(any_entry(), 0..40), any::<bool>()).prop_map(|(entries, is_lost)| {
        let mut image = SegmentImage::new();
        image.set_lost(is_lost);
        for entry in entries {
            if image_units(image.entry_bytes() + entry.as_entry().encoded_bytes(), 512).is_some() {
                image.replace(&entry.as_entry());
            }
        }
        image
    })
}

fn any_unit() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(512), 1 => Just(1024), 1 => Just(4096)]
}

/// An image of so many entries of about 60 bytes, in units of 512.
fn example(entries: u8) -> SegmentImage {
    let mut image = SegmentImage::new();
    for number in 0..entries {
        let contents = super::segment_entry::EntryContents::LostValue { bytes: 1 };
        let meta = crate::common::record::RecordMeta::PLAIN;
        let key = [number; 57];
        image.replace(&super::segment_entry::SegmentEntry { key: &key, meta, contents });
    }
    image
}

fn check(bytes: &[u8], place: ImagePlace) -> CheckedImage {
    let chain = (bytes.len() / place.unit_bytes as usize) as u8;
    UncheckedBuckets { bytes, place }.check(chain)
}

/// The entries of an image that lie in none of these buckets.
fn entries_outside(image: &SegmentImage, buckets: u64, unit_bytes: u32) -> Vec<OwnedSegmentEntry> {
    let bucket_of =
        |at: usize| (1..=CHAIN_MAX).position(|chain| at < image_capacity_bytes(chain, unit_bytes));
    let intact = image.iter().zip(image.starts()).filter(|(entry, start)| {
        let last = **start as usize + entry.encoded_bytes() - 1;
        let mut touched = bucket_of(**start as usize).unwrap()..=bucket_of(last).unwrap();
        touched.all(|bucket| buckets >> bucket & 1 == 0)
    });
    intact.map(|(entry, _)| OwnedSegmentEntry::of(&entry)).collect()
}

fn owned(image: &SegmentImage) -> Vec<OwnedSegmentEntry> {
    image.iter().map(|entry| OwnedSegmentEntry::of(&entry)).collect()
}

proptest! {
    #[test]
    fn an_image_gives_back_its_header_and_its_entries(image in any_image(), unit_bytes in any_unit()) {
        let bytes = encoded(&STATE, &image, place(unit_bytes));
        let chain = image_units(image.entry_bytes(), unit_bytes).unwrap();
        let entry_bytes = image.entry_bytes() as u32;
        let head = ImageHead { state: STATE, chain, entry_bytes, is_lost: image.is_lost() };
        prop_assert_eq!(UncheckedBuckets { bytes: &bytes, place: place(unit_bytes) }.head(), Some(head));
        let checked = check(&bytes, place(unit_bytes));
        prop_assert_eq!(checked, CheckedImage { head: Some(head), damaged: 0, entries: image });
    }

    #[test]
    fn a_flipped_bit_costs_exactly_its_bucket(image in any_image(), unit_bytes in any_unit(), bits: [u32; 16]) {
        let bytes = encoded(&STATE, &image, place(unit_bytes));
        for bit in bits.map(|bit| bit as usize % (8 * bytes.len())) {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let bucket = bit / 8 / unit_bytes as usize;
            let checked = check(&bytes, place(unit_bytes));
            prop_assert_eq!(checked.damaged, 1 << bucket, "bit {}", bit);
            prop_assert_eq!(checked.head.is_some(), bucket != 0);
            prop_assert!(checked.entries.is_lost());
            prop_assert_eq!(owned(&checked.entries), entries_outside(&image, 1 << bucket, unit_bytes));
        }
    }

    #[test]
    fn the_entries_between_damaged_buckets_are_found(image in any_image(), unit_bytes in any_unit(), mask: u64) {
        let mut bytes = encoded(&STATE, &image, place(unit_bytes));
        let mut damaged = 0;
        for (position, bucket) in bytes.chunks_exact_mut(unit_bytes as usize).enumerate() {
            if mask >> position & 1 == 1 {
                bucket[100..].fill(0);
                damaged |= 1 << position;
            }
        }
        let checked = check(&bytes, place(unit_bytes));
        prop_assert_eq!(checked.damaged, damaged);
        prop_assert_eq!(owned(&checked.entries), entries_outside(&image, damaged, unit_bytes));
    }

    #[test]
    fn no_bytes_under_valid_checksums_panic(image in any_image(), changes in vec((any::<u32>(), any::<u8>()), 1..8)) {
        let mut bytes = encoded(&STATE, &image, PLACE);
        for (at, byte) in changes {
            let at = at as usize % bytes.len();
            bytes[at] = byte;
        }
        seal_buckets(&mut bytes, PLACE);
        for chain in [0, 1, (bytes.len() / 512) as u8, CHAIN_MAX, u8::MAX] {
            let checked = UncheckedBuckets { bytes: &bytes, place: PLACE }.check(chain);
            prop_assert_eq!(checked.damaged >> chain.min(CHAIN_MAX), 0);
            // What is taken for entries can be looked at and written again.
            let rewritten = image_units(checked.entries.entry_bytes(), 512).unwrap();
            prop_assert!(rewritten <= CHAIN_MAX && checked.entries.iter().count() == checked.entries.entries());
        }
    }

    #[test]
    fn no_bytes_panic(bytes in vec(any::<u8>(), 0..3000), chain: u8) {
        let checked = UncheckedBuckets { bytes: &bytes, place: PLACE }.check(chain);
        prop_assert_eq!(checked.damaged.count_ones(), u32::from(chain.min(CHAIN_MAX)));
        prop_assert_eq!(checked.entries.entries(), 0);
    }
}

#[test]
fn every_bit_of_an_image_belongs_to_one_bucket() {
    let image = example(24);
    let bytes = encoded(&STATE, &image, PLACE);
    assert_eq!(bytes.len(), 3 * 512);
    for bit in 0..8 * bytes.len() {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let checked = check(&bytes, PLACE);
        assert_eq!(checked.damaged, 1 << (bit / 8 / 512), "bit {bit}");
        assert_eq!(owned(&checked.entries), entries_outside(&image, checked.damaged, 512), "bit {bit}");
    }
}

#[test]
fn buckets_of_another_place_store_lap_or_volume_are_none() {
    let bytes = encoded(&STATE, &example(24), PLACE);
    let others = [
        ImagePlace { volume_id: PLACE.volume_id ^ 1, ..PLACE },
        ImagePlace { partition: 8, ..PLACE },
        ImagePlace { index: ChunkIndex(8), ..PLACE },
        ImagePlace { unit: 4, ..PLACE },
    ];
    for place in others {
        let checked = check(&bytes, place);
        let nothing = (checked.head, checked.damaged, checked.entries.entries());
        assert_eq!(nothing, (None, 0b111, 0), "{place:?}");
    }
}

#[test]
fn buckets_of_the_image_that_was_at_the_place_before_are_none() {
    let old = encoded(&STATE, &example(24), PLACE);
    let image = example(23);
    let newer = ImageState { sequence: STATE.sequence + 1, ..STATE };
    let new = encoded(&newer, &image, PLACE);
    for written in 1..3 {
        // The new image's front is written, and the old one's rest is still there; or the other way around.
        for (front, rest, head) in [(&new, &old, newer), (&old, &new, STATE)] {
            let mixed = [&front[..512 * written], &rest[512 * written..]].concat();
            let checked = check(&mixed, PLACE);
            assert_eq!(checked.head.map(|head| head.state), Some(head));
            assert_eq!(checked.damaged, 0b111 & !((1 << written) - 1));
        }
    }
}

#[test]
fn an_image_of_another_length_than_expected_is_damaged() {
    let bytes = encoded(&STATE, &example(24), PLACE);
    for chain in [1, 2, 4] {
        let checked = UncheckedBuckets { bytes: &bytes, place: PLACE }.check(chain);
        assert_eq!((checked.head, checked.damaged & 1), (None, 1), "{chain} buckets");
        assert!(checked.entries.is_lost());
    }
}

#[test]
fn images_hold_so_many_bytes_of_entries() {
    let capacities = |unit_bytes| [1, 2, 3].map(|chain| image_capacity_bytes(chain, unit_bytes));
    assert_eq!(capacities(512), [432, 936, 1440]);
    assert_eq!(capacities(4096), [4016, 8104, 12192]);
    for unit_bytes in [512, 1024, 2048, 4096] {
        assert_eq!(image_units(0, unit_bytes), Some(1));
        for chain in 1..=CHAIN_MAX {
            let bytes = image_capacity_bytes(chain, unit_bytes);
            assert_eq!(image_units(bytes, unit_bytes), Some(chain));
            assert_eq!(image_units(bytes + 1, unit_bytes), (chain < CHAIN_MAX).then_some(chain + 1));
        }
    }
}

#[test]
fn markers_and_halves_of_a_split_are_known_by_their_flags() {
    let marker = ImageState { role: ImageRole::Marker, segment: SegmentNumber::MARKER, depth: 0, ..STATE };
    let first = ImageState { role: ImageRole::SplitFirst, segment: SegmentNumber(5), depth: 4, ..STATE };
    let second = ImageState { role: ImageRole::SplitSecond, segment: SegmentNumber(13), depth: 4, ..STATE };
    for (state, flags) in [(marker, 1), (first, 2), (second, 4)] {
        let bytes = encoded(&state, &SegmentImage::new(), PLACE);
        assert_eq!((bytes.len(), bytes[3]), (512, flags));
        assert_eq!(check(&bytes, PLACE).head.map(|head| head.state), Some(state));
    }
}

#[test]
fn fields_that_contradict_each_other_are_no_image() {
    let bytes = encoded(&STATE, &example(24), PLACE);
    let table: [(&str, usize, &[u8]); 15] = [
        ("magic", 0, b"KC"),
        ("format", 2, &[2]),
        ("an unknown flag", 3, &[16]),
        ("a marker of a segment", 3, &[1]),
        ("both halves of a split", 3, &[6]),
        ("a first half with the number of a second", 3, &[2]),
        ("partition", 8, &[8]),
        ("a marker's segment without its flag", 12, &[255; 4]),
        ("a segment beyond its depth", 23, &[12]),
        ("a depth beyond all", 23, &[33]),
        ("no buckets", 22, &[0]),
        ("more buckets than entries need", 22, &[4]),
        ("more buckets than there are in any", 22, &[64]),
        ("entries that need more buckets", 28, &[0xa1, 5]),
        ("a previous image of too many buckets", 79, &[64]),
    ];
    for (what, at, field) in table {
        let mut bytes = bytes.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        seal_buckets(&mut bytes, PLACE);
        assert_eq!(UncheckedBuckets { bytes: &bytes, place: PLACE }.head(), None, "{what}");
    }
    let lag = ImageState { sequence: 3, durable_lag: 3, ..STATE };
    let mut bytes = encoded(&lag, &SegmentImage::new(), PLACE);
    assert!(UncheckedBuckets { bytes: &bytes, place: PLACE }.head().is_some());
    bytes[32] = 4;
    seal_buckets(&mut bytes, PLACE);
    assert_eq!(UncheckedBuckets { bytes: &bytes, place: PLACE }.head(), None, "a lag beyond the first image");
}

#[test]
fn entries_that_contradict_the_header_are_damage() {
    let bytes = encoded(&STATE, &example(24), PLACE);
    // Of the header: fewer bytes of entries than there are. Of bucket 1: no entry where one should be, and an offset that is none.
    for (at, byte, damaged) in [(28, 0xa0 - 1, 1), (512 + 300, 0x80, 0b10), (512 + 2, 4, 0)] {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        if at == 512 + 300 {
            bytes[512 + 8..512 + 512].fill(byte);
        }
        seal_buckets(&mut bytes, PLACE);
        let checked = check(&bytes, PLACE);
        assert_eq!(checked.damaged, damaged, "byte {at}");
        assert_eq!(checked.entries.is_lost(), damaged != 0);
    }
}

#[test]
fn the_layout_of_an_image_is_fixed() {
    let bytes = encoded(&STATE, &example(8), PLACE);
    assert_eq!(bytes.len(), 1024);
    assert_eq!(bytes[..4], [b'K', b'B', 1, 0]);
    assert_eq!(bytes[8..24], [9, 0, 0, 0, 0x34, 0x12, 0, 0, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 2, 13]);
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!([24, 28, 32, 36, 40].map(u32_at), [0x21, 8 * 60, 0x22, 0x23, 0x24]);
    assert_eq!([44, 48, 52, 56].map(u32_at), [0x25, 0x26, 0x27, 0x28]);
    assert_eq!(bytes[60..65], [0x35, 0x34, 0x33, 0x32, 0x31]);
    assert_eq!(bytes[65..70], [0x45, 0x44, 0x43, 0x42, 0x41]);
    assert_eq!(bytes[70..75], [0x55, 0x54, 0x53, 0x52, 0x51]);
    assert_eq!(bytes[75..80], [0x61, 0, 0, 0, 0x2a]);
    // Entry 7 begins 12 bytes before the end of bucket 0, so none begins in bucket 1.
    assert_eq!(bytes[500..503], [3, 57, 1]);
    assert_eq!(bytes[512..516], [0xc5, 1, 0xff, 0xff]);
    assert_eq!(bytes[520..568], [7; 48]);
    assert_eq!(bytes[568..], [0xff; 456]);
    let bytes = encoded(&STATE, &example(9), PLACE);
    assert_eq!(bytes[512..516], [0xc5, 1, 56, 0], "entry 8 begins in bucket 1");
}

#[test]
fn a_random_block_is_no_bucket() {
    let mut bytes = [0; 1024];
    Prng::new(3).fill(&mut bytes);
    bytes[..4].copy_from_slice(&[b'K', b'B', 1, 0]);
    assert_eq!(UncheckedBuckets { bytes: &bytes, place: PLACE }.head(), None);
    assert_eq!(UncheckedBuckets { bytes: &bytes[..511], place: PLACE }.head(), None);
}
