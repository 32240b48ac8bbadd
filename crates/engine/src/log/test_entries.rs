//! Entries of segments for tests: any entry that has an encoding, with bytes of its own.

use super::log_place::ChunkNumber;
use super::segment_entry::{
    EXTENTS_MAX, EntryContents, GRANULES_LIMIT, LOG_VALUE_BYTES_MAX, SegmentEntry, ValueExtent, ValueExtents,
    ValuePlace,
};
use crate::common::record::{EXPIRY_END, RecordFlags, RecordMeta};
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version};
use proptest::collection::vec;
use proptest::prelude::*;

/// An entry that owns its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedSegmentEntry {
    pub key: Vec<u8>,
    pub meta: RecordMeta,
    pub contents: EntryContents,
}

impl OwnedSegmentEntry {
    pub(super) fn of(entry: &SegmentEntry<'_>) -> OwnedSegmentEntry {
        OwnedSegmentEntry { key: entry.key.to_vec(), meta: entry.meta, contents: entry.contents.clone() }
    }

    pub(super) fn as_entry(&self) -> SegmentEntry<'_> {
        SegmentEntry { key: &self.key, meta: self.meta, contents: self.contents.clone() }
    }
}

/// A key: mostly short, and seldom longer than a bucket.
pub(super) fn any_key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        8 => vec(any::<u8>(), 0..40),
        2 => vec(any::<u8>(), 250..260),
        1 => vec(any::<u8>(), 600..=KEY_BYTES_MAX),
    ]
}

fn any_extents() -> impl Strategy<Value = ValueExtents> {
    let extent = (any::<u32>(), 1..=u32::MAX)
        .prop_map(|(chunk, granules)| ValueExtent { chunk: ChunkNumber(chunk), granules });
    (any::<u32>(), vec(extent, 1..=EXTENTS_MAX))
        .prop_map(|(first_granule, extents)| ValueExtents { first_granule, extents: extents.into() })
}

fn any_contents() -> impl Strategy<Value = EntryContents> {
    let bytes = || prop_oneof![1u32..300, 1..=LOG_VALUE_BYTES_MAX, Just(LOG_VALUE_BYTES_MAX)];
    prop_oneof![
        1 => Just(EntryContents::Value { bytes: 0, at: ValuePlace::Nowhere }),
        6 => (bytes(), 0..GRANULES_LIMIT)
            .prop_map(|(bytes, granule)| EntryContents::Value { bytes, at: ValuePlace::Record(granule) }),
        1 => (bytes(), any_extents())
            .prop_map(|(bytes, extents)| EntryContents::Value { bytes, at: ValuePlace::Extents(extents) }),
        1 => Just(EntryContents::Tombstone),
        1 => (0..=LOG_VALUE_BYTES_MAX).prop_map(|bytes| EntryContents::LostValue { bytes }),
    ]
}

/// Any entry of a key, with the flags that decoding gives it.
pub(super) fn any_entry_of(key: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = OwnedSegmentEntry> {
    let version = prop_oneof![Just(0), 1..=u64::MAX].prop_map(Version::from_bits);
    let expiry = prop_oneof![Just(UnixTime::NEVER), (0..EXPIRY_END.0).prop_map(UnixTime)];
    (key, version, expiry, any_contents()).prop_map(|(key, version, expires_at, contents)| {
        let meta = match contents.is_tombstone() {
            true => {
                let flags = RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE);
                RecordMeta { version, expires_at: UnixTime::NEVER, flags }
            }
            false => {
                let is_plain = version == Version::NONE && expires_at == UnixTime::NEVER;
                let flags = if is_plain { RecordFlags::NONE } else { RecordFlags::VERSIONED };
                RecordMeta { version, expires_at, flags }
            }
        };
        OwnedSegmentEntry { key, meta, contents }
    })
}

/// Any entry of any key.
pub(super) fn any_entry() -> impl Strategy<Value = OwnedSegmentEntry> {
    any_entry_of(any_key())
}
