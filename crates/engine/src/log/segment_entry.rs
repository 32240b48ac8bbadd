//! One entry of a segment: a key, its version and expiry, and where its value lies.
//!
//! ```text
//!   flags u8 │ key bytes u8, or u16 with flag 16 │ value bytes, LEB128 │ place │ version u64, flag 4 │ expiry u48, flag 8 │ key
//!
//!   flags     bits 0 and 1 kind     place of a value in one place      granule of the device, 40 bits; none if the value is empty
//!             4  version                  of a value in extents        extents u8, granule of the first in its chunk u32,
//!             8  expiry                                                of each: chunk u32, granules u32
//!            16  key above 255 B
//!            32  value on another device: refused by this version      kind  0 value in one place   1 value in extents
//!      64, 128   zero: a byte of 64 and more ends the entries                2 tombstone            3 value lost
//! ```
//! Value bytes and place are left out of a tombstone, the place of a lost value. Integers are little-endian.
//!
//! Invariants: what [`SegmentEntry::decode`] accepts has exactly one encoding, which it was; any other bytes are `None`.
//! Tested below.

use super::log_place::ChunkNumber;
use crate::common::record::{EXPIRY_END, RecordFlags, RecordMeta};
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version};
use smallvec::SmallVec;

/// The longest value, in bytes.
pub const LOG_VALUE_BYTES_MAX: u32 = 256 << 20;
/// The most extents of a value.
pub const EXTENTS_MAX: usize = 66;
/// The granules of a device are fewer: 40 bits.
pub const GRANULES_LIMIT: u64 = 1 << 40;
/// The longest entry, in bytes.
pub const SEGMENT_ENTRY_BYTES_MAX: usize =
    1 + 2 + LENGTH_BYTES_MAX + 5 + 8 * EXTENTS_MAX + 8 + 6 + KEY_BYTES_MAX;
/// What the bytes behind the last entry are filled with: no entry begins so.
pub const ENTRIES_END: u8 = 0xff;

const KIND_RECORD: u8 = 0;
const KIND_EXTENTS: u8 = 1;
const KIND_TOMBSTONE: u8 = 2;
const KIND_LOST: u8 = 3;
const KIND_MASK: u8 = 3;
const HAS_VERSION: u8 = 4;
const HAS_EXPIRY: u8 = 8;
const HAS_LONG_KEY: u8 = 16;
const KNOWN_FLAGS: u8 = KIND_MASK | HAS_VERSION | HAS_EXPIRY | HAS_LONG_KEY;
/// The longest length of a value in LEB128.
const LENGTH_BYTES_MAX: usize = 5;
const _: () = assert!(LOG_VALUE_BYTES_MAX >> (7 * (LENGTH_BYTES_MAX - 1)) == 1);

/// A part of a value: adjacent granules of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueExtent {
    /// The chunk.
    pub chunk: ChunkNumber,
    /// The granules in it, at least 1.
    pub granules: u32,
}

/// The parts of a record that is too long for one chunk, in the order of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueExtents {
    /// Where the first begins, in granules from the start of its chunk. The others begin at 0.
    pub first_granule: u32,
    /// 1 to [`EXTENTS_MAX`] extents.
    pub extents: SmallVec<[ValueExtent; 2]>,
}

/// Where a value lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValuePlace {
    /// The value is empty: it has no record.
    Nowhere,
    /// The record begins at this granule of the device, below [`GRANULES_LIMIT`].
    Record(u64),
    /// The record lies in several chunks.
    Extents(ValueExtents),
}

/// What an entry says of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryContents {
    /// It has a value.
    Value {
        /// The length of the value, at most [`LOG_VALUE_BYTES_MAX`]; 0 exactly if it lies nowhere.
        bytes: u32,
        /// Where its record lies.
        at: ValuePlace,
    },
    /// It was deleted.
    Tombstone,
    /// It had a value, whose record was found damaged.
    LostValue {
        /// The length of the value, at most [`LOG_VALUE_BYTES_MAX`].
        bytes: u32,
    },
}

/// An entry, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentEntry<'a> {
    /// The key, at most [`KEY_BYTES_MAX`] bytes.
    pub key: &'a [u8],
    /// Version and expiry. The flags follow from them and from the contents, and are not encoded: a decoded tombstone has both flags of
    /// one, any other entry [`RecordFlags::VERSIONED`] if it has a version or an expiry.
    pub meta: RecordMeta,
    /// What became of the key.
    pub contents: EntryContents,
}

/// The fields of an entry in the most frequent form: its value is shorter than 16 KiB and in one record, it does not expire, and its key has at most 255 bytes.
/// Parsing this form alone is faster than [`SegmentEntry::decode_any`].
struct UsualEntry {
    value_bytes: u32,
    granule: u64,
    version: Version,
    /// The key begins here and ends with the entry, in bytes from its front.
    key_at: usize,
    end: usize,
}

impl EntryContents {
    /// Whether the key was deleted.
    pub fn is_tombstone(&self) -> bool {
        matches!(self, EntryContents::Tombstone)
    }

    /// The length of the value in bytes; 0 of a tombstone.
    pub fn value_bytes(&self) -> u32 {
        match *self {
            EntryContents::Value { bytes, .. } | EntryContents::LostValue { bytes } => bytes,
            EntryContents::Tombstone => 0,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            EntryContents::Value { at: ValuePlace::Nowhere | ValuePlace::Record(_), .. } => KIND_RECORD,
            EntryContents::Value { at: ValuePlace::Extents(_), .. } => KIND_EXTENTS,
            EntryContents::Tombstone => KIND_TOMBSTONE,
            EntryContents::LostValue { .. } => KIND_LOST,
        }
    }
}

impl<'a> SegmentEntry<'a> {
    /// Whether the entry that begins with this byte may become stale: it is a tombstone, or expires.
    pub fn may_become_stale(first_byte: u8) -> bool {
        first_byte & KIND_MASK == KIND_TOMBSTONE || first_byte & HAS_EXPIRY != 0
    }

    /// The length of the entry in bytes.
    pub fn encoded_bytes(&self) -> usize {
        let length = |bytes: u32| (u32::BITS - (bytes | 1).leading_zeros()).div_ceil(7) as usize;
        let contents = match &self.contents {
            EntryContents::Value { bytes, at } => {
                let place = match at {
                    ValuePlace::Nowhere => 0,
                    ValuePlace::Record(_) => 5,
                    ValuePlace::Extents(extents) => 5 + 8 * extents.extents.len(),
                };
                length(*bytes) + place
            }
            EntryContents::Tombstone => 0,
            EntryContents::LostValue { bytes } => length(*bytes),
        };
        let key_length = if self.key.len() > 255 { 2 } else { 1 };
        let version = if has_version(&self.meta) { 8 } else { 0 };
        let expiry = if has_expiry(&self.meta, &self.contents) { 6 } else { 0 };
        1 + key_length + contents + version + expiry + self.key.len()
    }

    /// Appends the entry to `out`. REQUIRES: lengths and places within their limits. A tombstone's expiry is left out, and so is one
    /// from [`EXPIRY_END`] on: it is never.
    pub fn encode(&self, out: &mut Vec<u8>) {
        debug_assert!(self.key.len() <= KEY_BYTES_MAX && self.contents.value_bytes() <= LOG_VALUE_BYTES_MAX);
        let has_long_key = self.key.len() > 255;
        let mut flags = self.contents.kind();
        flags |= if has_version(&self.meta) { HAS_VERSION } else { 0 };
        flags |= if has_expiry(&self.meta, &self.contents) { HAS_EXPIRY } else { 0 };
        flags |= if has_long_key { HAS_LONG_KEY } else { 0 };
        out.push(flags);
        match has_long_key {
            true => out.extend_from_slice(&(self.key.len() as u16).to_le_bytes()),
            false => out.push(self.key.len() as u8),
        }
        match &self.contents {
            EntryContents::Value { bytes, at } => {
                push_length(out, *bytes);
                push_place(out, at);
            }
            EntryContents::Tombstone => {}
            EntryContents::LostValue { bytes } => push_length(out, *bytes),
        }
        if flags & HAS_VERSION != 0 {
            out.extend_from_slice(&self.meta.version.to_bits().to_le_bytes());
        }
        if flags & HAS_EXPIRY != 0 {
            out.extend_from_slice(&self.meta.expires_at.0.to_le_bytes()[..6]);
        }
        out.extend_from_slice(self.key);
    }

    /// The entry at the front of `bytes`, and its length in bytes; `None` if there is none.
    #[inline]
    pub fn decode(bytes: &'a [u8]) -> Option<(SegmentEntry<'a>, usize)> {
        SegmentEntry::decode_usual(bytes).or_else(|| SegmentEntry::decode_any(bytes))
    }

    /// The length of the entry at the front of `bytes`; `None` if there is none.
    #[inline]
    pub fn length_at(bytes: &[u8]) -> Option<usize> {
        match UsualEntry::parse(bytes) {
            Some(usual) => Some(usual.end),
            None => SegmentEntry::decode_any(bytes).map(|(_, length)| length),
        }
    }

    /// [`SegmentEntry::decode`] for entries in the form of [`UsualEntry`]; `None` for all others.
    fn decode_usual(bytes: &'a [u8]) -> Option<(SegmentEntry<'a>, usize)> {
        let UsualEntry { value_bytes, granule, version, key_at, end } = UsualEntry::parse(bytes)?;
        let flags = if version > Version::NONE { RecordFlags::VERSIONED } else { RecordFlags::NONE };
        let meta = RecordMeta { version, flags, ..RecordMeta::PLAIN };
        let contents = EntryContents::Value { bytes: value_bytes, at: ValuePlace::Record(granule) };
        Some((SegmentEntry { key: &bytes[key_at..end], meta, contents }, end))
    }

    /// [`SegmentEntry::decode`] for entries in any form.
    fn decode_any(bytes: &'a [u8]) -> Option<(SegmentEntry<'a>, usize)> {
        let mut rest = bytes;
        let [flags] = take(&mut rest)?;
        if flags & !KNOWN_FLAGS != 0 {
            return None;
        }
        let key_bytes = match flags & HAS_LONG_KEY != 0 {
            true => usize::from(u16::from_le_bytes(take(&mut rest)?)),
            false => usize::from(u8::from_le_bytes(take(&mut rest)?)),
        };
        if key_bytes > KEY_BYTES_MAX || (key_bytes > 255) != (flags & HAS_LONG_KEY != 0) {
            return None;
        }
        let contents = take_contents(&mut rest, flags & KIND_MASK)?;
        let mut meta = RecordMeta::PLAIN;
        if flags & HAS_VERSION != 0 {
            meta.version = Version::from_bits(u64::from_le_bytes(take(&mut rest)?));
        }
        if flags & HAS_EXPIRY != 0 {
            let [a, b, c, d, e, f] = take(&mut rest)?;
            meta.expires_at = UnixTime(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]));
        }
        meta.flags = match (contents.is_tombstone(), flags & (HAS_VERSION | HAS_EXPIRY)) {
            (true, _) => RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE),
            (false, 0) => RecordFlags::NONE,
            (false, _) => RecordFlags::VERSIONED,
        };
        // Only one encoding: what is not there, or not to be there, has no bytes.
        if has_version(&meta) != (flags & HAS_VERSION != 0)
            || has_expiry(&meta, &contents) != (flags & HAS_EXPIRY != 0)
        {
            return None;
        }
        let (key, rest) = rest.split_at_checked(key_bytes)?;
        Some((SegmentEntry { key, meta, contents }, bytes.len() - rest.len()))
    }
}

impl UsualEntry {
    /// Parses the entry at the front of `bytes`; `None` if it has another form, or there is none.
    #[inline]
    fn parse(bytes: &[u8]) -> Option<UsualEntry> {
        let &[flags, key_bytes, low, high] = bytes.first_chunk()?;
        if flags & !HAS_VERSION != 0 {
            return None;
        }
        let (value_bytes, place_at) = match (low, high) {
            (1..0x80, _) => (u32::from(low), 3),
            (0x80.., 1..0x80) => (u32::from(low & 0x7f) | u32::from(high) << 7, 4),
            _ => return None,
        };
        let mut rest = &bytes[place_at..];
        let [a, b, c, d, e] = take(&mut rest)?;
        let granule = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
        let (mut version, mut key_at) = (Version::NONE, place_at + 5);
        if flags == HAS_VERSION {
            version = Version::from_bits(u64::from_le_bytes(take(&mut rest)?));
            key_at += 8;
            if version == Version::NONE {
                return None;
            }
        }
        let end = key_at + usize::from(key_bytes);
        (end <= bytes.len()).then_some(UsualEntry { value_bytes, granule, version, key_at, end })
    }
}

fn has_version(meta: &RecordMeta) -> bool {
    meta.version > Version::NONE
}

fn has_expiry(meta: &RecordMeta, contents: &EntryContents) -> bool {
    meta.expires_at < EXPIRY_END && !contents.is_tombstone()
}

/// Takes an array off the front.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (array, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*array)
}

fn push_length(out: &mut Vec<u8>, mut bytes: u32) {
    while bytes >= 0x80 {
        out.push(bytes as u8 | 0x80);
        bytes >>= 7;
    }
    out.push(bytes as u8);
}

/// A length in the fewest bytes of LEB128, at most [`LOG_VALUE_BYTES_MAX`].
fn take_length(bytes: &mut &[u8]) -> Option<u32> {
    let mut length = 0;
    for index in 0..LENGTH_BYTES_MAX {
        let [byte] = take(bytes)?;
        length |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            let is_shortest = byte != 0 || index == 0;
            return (is_shortest && length <= u64::from(LOG_VALUE_BYTES_MAX)).then_some(length as u32);
        }
    }
    None
}

fn push_place(out: &mut Vec<u8>, place: &ValuePlace) {
    match place {
        ValuePlace::Nowhere => {}
        ValuePlace::Record(granule) => {
            debug_assert!(*granule < GRANULES_LIMIT);
            out.extend_from_slice(&granule.to_le_bytes()[..5]);
        }
        ValuePlace::Extents(ValueExtents { first_granule, extents }) => {
            debug_assert!((1..=EXTENTS_MAX).contains(&extents.len()));
            out.push(extents.len() as u8);
            out.extend_from_slice(&first_granule.to_le_bytes());
            for extent in extents {
                out.extend_from_slice(&extent.chunk.0.to_le_bytes());
                out.extend_from_slice(&extent.granules.to_le_bytes());
            }
        }
    }
}

fn take_contents(bytes: &mut &[u8], kind: u8) -> Option<EntryContents> {
    Some(match kind {
        KIND_TOMBSTONE => EntryContents::Tombstone,
        KIND_LOST => EntryContents::LostValue { bytes: take_length(bytes)? },
        KIND_EXTENTS => {
            let value_bytes = take_length(bytes).filter(|&length| length > 0)?;
            EntryContents::Value { bytes: value_bytes, at: ValuePlace::Extents(take_extents(bytes)?) }
        }
        _ => match take_length(bytes)? {
            0 => EntryContents::Value { bytes: 0, at: ValuePlace::Nowhere },
            value_bytes => {
                let [a, b, c, d, e] = take(bytes)?;
                let granule = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
                EntryContents::Value { bytes: value_bytes, at: ValuePlace::Record(granule) }
            }
        },
    })
}

fn take_extents(bytes: &mut &[u8]) -> Option<ValueExtents> {
    let [count] = take(bytes)?;
    if !(1..=EXTENTS_MAX).contains(&usize::from(count)) {
        return None;
    }
    let first_granule = u32::from_le_bytes(take(bytes)?);
    let mut extents = SmallVec::new();
    for _ in 0..count {
        let chunk = ChunkNumber(u32::from_le_bytes(take(bytes)?));
        let granules = u32::from_le_bytes(take(bytes)?);
        if granules == 0 {
            return None;
        }
        extents.push(ValueExtent { chunk, granules });
    }
    Some(ValueExtents { first_granule, extents })
}

#[cfg(test)]
mod tests {
    use super::super::test_entries::{OwnedSegmentEntry, any_entry};
    use super::*;
    use proptest::prelude::*;

    fn encoded(entry: &SegmentEntry<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        bytes
    }

    fn value(key: &[u8], bytes: u32, at: ValuePlace) -> SegmentEntry<'_> {
        SegmentEntry { key, meta: RecordMeta::PLAIN, contents: EntryContents::Value { bytes, at } }
    }

    proptest! {
        #[test]
        fn an_entry_gives_back_every_field(entry in any_entry(), behind: Vec<u8>) {
            let entry = entry.as_entry();
            let mut bytes = encoded(&entry);
            prop_assert_eq!(bytes.len(), entry.encoded_bytes());
            prop_assert!(bytes.len() <= SEGMENT_ENTRY_BYTES_MAX && bytes[0] < 64);
            let length = bytes.len();
            bytes.extend_from_slice(&behind);
            prop_assert_eq!(SegmentEntry::decode(&bytes), Some((entry, length)));
            for end in 0..length {
                prop_assert_eq!(SegmentEntry::decode(&bytes[..end]), None, "cut at {}", end);
            }
        }

        #[test]
        fn whatever_decodes_has_this_encoding(bytes in proptest::collection::vec(any::<u8>(), 0..60), flags in 0u8..64) {
            // Flags that are known make it past the first byte more often.
            for first in [None, Some(flags), Some(flags & 15)] {
                let mut bytes = bytes.clone();
                if let (Some(flags), Some(front)) = (first, bytes.first_mut()) {
                    *front = flags;
                }
                if let Some((entry, length)) = SegmentEntry::decode(&bytes) {
                    prop_assert_eq!(&encoded(&entry), &bytes[..length]);
                }
            }
        }
    }

    #[test]
    fn usual_entries_are_decoded_as_others_are() {
        let mut usual = 0;
        for flags in 0..64 {
            for key_bytes in [0, 3, 16, 255] {
                for length in [&[0][..], &[1], &[127], &[128, 0], &[128, 1], &[255, 127], &[128, 128, 1]] {
                    for version in [0, 1, u64::MAX] {
                        let mut bytes = [&[flags, key_bytes][..], length, &[1, 2, 3, 4, 5]].concat();
                        bytes.extend_from_slice(&version.to_le_bytes());
                        bytes.resize(bytes.len() + 254, 7);
                        for end in [bytes.len(), bytes.len() - 1, 24, 16, 9, 8, 7, 4, 3, 0] {
                            let entry = SegmentEntry::decode_any(&bytes[..end]);
                            let of_entry = (entry.clone(), entry.as_ref().map(|&(_, length)| length));
                            usual += u32::from(SegmentEntry::decode_usual(&bytes[..end]).is_some());
                            let decoded = SegmentEntry::decode(&bytes[..end]);
                            assert_eq!(
                                (decoded, SegmentEntry::length_at(&bytes[..end])),
                                of_entry,
                                "{flags}, {key_bytes}, {length:?}, {version}, {end}"
                            );
                        }
                    }
                }
            }
        }
        assert!(usual > 100, "{usual}");
    }

    #[test]
    fn typical_entries_take_25_33_and_39_bytes() {
        let key = [7; 16];
        for value_bytes in [128, 16 << 10 | 1, (16 << 10) - 1] {
            let mut entry = value(&key, value_bytes, ValuePlace::Record(1 << 39));
            let longer = usize::from(value_bytes > 16 << 10);
            assert_eq!(entry.encoded_bytes(), 25 + longer);
            entry.meta.version = Version::from_bits(1);
            assert_eq!(entry.encoded_bytes(), 33 + longer);
            entry.meta.expires_at = UnixTime(1);
            assert_eq!(entry.encoded_bytes(), 39 + longer);
        }
    }

    #[test]
    fn the_longest_entry_fits_its_bound() {
        let key = [1; KEY_BYTES_MAX];
        let extent = ValueExtent { chunk: ChunkNumber(u32::MAX), granules: u32::MAX };
        let extents = std::iter::repeat_n(extent, EXTENTS_MAX).collect();
        let at = ValuePlace::Extents(ValueExtents { first_granule: u32::MAX, extents });
        let mut entry = value(&key, LOG_VALUE_BYTES_MAX, at);
        entry.meta = RecordMeta {
            version: Version::from_bits(1),
            expires_at: UnixTime(1),
            flags: RecordFlags::VERSIONED,
        };
        assert_eq!(encoded(&entry).len(), SEGMENT_ENTRY_BYTES_MAX);
        assert_eq!(SegmentEntry::decode(&encoded(&entry)), Some((entry, SEGMENT_ENTRY_BYTES_MAX)));
    }

    #[test]
    fn the_bytes_of_an_entry_are_fixed() {
        let mut entry = value(b"key", 300, ValuePlace::Record(0x12_3456_789a));
        assert_eq!(encoded(&entry), [&[0, 3, 0xac, 2, 0x9a, 0x78, 0x56, 0x34, 0x12][..], b"key"].concat());
        entry.meta.version = Version::from_bits(5);
        entry.meta.expires_at = UnixTime(6);
        entry.contents = EntryContents::LostValue { bytes: 1 };
        assert_eq!(
            encoded(&entry),
            [&[15, 3, 1, 5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0][..], b"key"].concat()
        );
        entry.contents = EntryContents::Tombstone;
        assert_eq!(encoded(&entry), [&[6, 3, 5, 0, 0, 0, 0, 0, 0, 0][..], b"key"].concat());
        let extents =
            [(7, 8), (9, 10)].map(|(chunk, granules)| ValueExtent { chunk: ChunkNumber(chunk), granules });
        let at = ValuePlace::Extents(ValueExtents { first_granule: 6, extents: extents.into() });
        let bytes = [1, 1, 5, 2, 6, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0, 10, 0, 0, 0, b'k'];
        assert_eq!(encoded(&value(b"k", 5, at)), bytes);
    }

    #[test]
    fn other_bytes_are_no_entry() {
        let table: [(&str, &[u8]); 10] = [
            ("nothing", &[]),
            ("the end of the entries", &[ENTRIES_END; 40]),
            ("a value on another device", &[32, 0, 1, 0, 0, 0, 0, 0, 0]),
            ("a version of zero", &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("an expiry that is never", &[8, 0, 0, 255, 255, 255, 255, 255, 255]),
            ("a tombstone that expires", &[10, 0, 1, 0, 0, 0, 0, 0]),
            ("a short key with a long length", &[16, 1, 0, 0, 7]),
            ("a length with a byte too many", &[0, 0, 0x81, 0, 0, 0, 0, 0, 0]),
            ("no extents", &[1, 0, 1, 0, 0, 0, 0, 0]),
            ("an extent without granules", &[1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ];
        for (what, bytes) in table {
            assert_eq!(SegmentEntry::decode(bytes), None, "{what}");
        }
        let long_key = [&[16, 1, 4, 0][..], &[0; 1025]].concat();
        assert_eq!(SegmentEntry::decode(&long_key), None, "a key of 1,025 bytes");
        let longest = [3, 0, 0x80, 0x80, 0x80, 0x80, 1];
        assert!(SegmentEntry::decode(&longest).is_some());
        assert_eq!(SegmentEntry::decode(&[3, 0, 0x81, 0x80, 0x80, 0x80, 1]), None, "a longer value");
    }

    #[test]
    fn an_expiry_beyond_the_last_is_never() {
        let mut entry = value(b"k", 0, ValuePlace::Nowhere);
        entry.meta.expires_at = EXPIRY_END;
        let (found, _) = SegmentEntry::decode(&encoded(&entry))
            .map(|(entry, at)| (OwnedSegmentEntry::of(&entry), at))
            .unwrap();
        assert_eq!(found.meta, RecordMeta::PLAIN);
    }
}
