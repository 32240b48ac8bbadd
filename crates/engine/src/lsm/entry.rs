//! Entries: what one write left of a key. Their order, and their bytes in tables and in the journal.
//!
//! ```text
//!   flags u8 │ sequence varint │ [version u64] │ [expiry u64] │ value
//!   flags: 0–1 kind (0 tombstone, 1 inline, 2 in a value segment), 2 has a version, 3 has an expiry
//!   value: inline  length varint, bytes       in a segment  segment varint, unit varint, length varint
//! ```
//! The key is not part of it: tables compress it, and the journal has it in front. Integers are little-endian, varints LEB128 of at most ten bytes.
//! Invariant: [`TreeEntry::decode`] takes any bytes, and gives back what [`TreeEntry::encode`] was given.

use crate::common::superblock::COUNT_MAX;
use octokv_base::{UnixTime, Version};
use std::cmp::Ordering;

const KIND_MASK: u8 = 0b11;
const KIND_TOMBSTONE: u8 = 0;
const KIND_INLINE: u8 = 1;
const KIND_IN_SEGMENT: u8 = 2;
const HAS_VERSION: u8 = 1 << 2;
const HAS_EXPIRY: u8 = 1 << 3;
const FLAGS_ALL: u8 = KIND_MASK | HAS_VERSION | HAS_EXPIRY;

/// The most bytes of an encoded entry without its inline value.
pub const ENTRY_OVERHEAD_MAX: usize = 1 + VARINT_BYTES_MAX + 8 + 8 + 3 * VARINT_BYTES_MAX;
const VARINT_BYTES_MAX: usize = 10;

/// Where the record of a value lies that is not in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueAddress {
    /// The identifier of its value segment.
    pub segment: u32,
    /// The first unit of its record, from the start of the segment.
    pub unit: u32,
    /// The length of the value, in bytes.
    pub value_bytes: u32,
}

/// The value of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryValue<'a> {
    /// None: the key was deleted.
    Tombstone,
    /// These bytes.
    Inline(&'a [u8]),
    /// That of a record in a value segment.
    InSegment(ValueAddress),
}

/// What one write left of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeEntry<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The number of the write in the journal, from 1: a snapshot sees the entries up to its own number.
    pub sequence: u64,
    /// The version of the key from this write on.
    pub version: Version,
    /// When the value expires; [`UnixTime::NEVER`] of a tombstone.
    pub expires_at: UnixTime,
    /// The value.
    pub value: EntryValue<'a>,
}

/// A place in the order of entries: by key, bytewise, and of one key the newest entry first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The sequence number.
    pub sequence: u64,
}

impl<'a> Position<'a> {
    /// The place before all entries.
    pub const START: Position<'static> = Position::before(&[]);

    /// The place before all entries of a key.
    pub const fn before(key: &'a [u8]) -> Position<'a> {
        Position { key, sequence: u64::MAX }
    }

    /// The place behind all entries of a key.
    pub const fn behind(key: &'a [u8]) -> Position<'a> {
        Position { key, sequence: 0 }
    }
}

impl Ord for Position<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key.cmp(other.key).then(other.sequence.cmp(&self.sequence))
    }
}

impl PartialOrd for Position<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<'a> TreeEntry<'a> {
    /// Its place among entries.
    pub fn position(&self) -> Position<'a> {
        Position { key: self.key, sequence: self.sequence }
    }

    /// The bytes of its value, wherever it lies.
    pub fn value_bytes(&self) -> usize {
        match self.value {
            EntryValue::Tombstone => 0,
            EntryValue::Inline(value) => value.len(),
            EntryValue::InSegment(address) => address.value_bytes as usize,
        }
    }

    /// The length of its bytes.
    pub fn encoded_bytes(&self) -> usize {
        let value_bytes = match self.value {
            EntryValue::Tombstone => 0,
            EntryValue::Inline(value) => varint_bytes(value.len() as u64) + value.len(),
            EntryValue::InSegment(ValueAddress { segment, unit, value_bytes }) => {
                [segment, unit, value_bytes].map(|field| varint_bytes(u64::from(field))).iter().sum()
            }
        };
        let version_bytes = if self.version == Version::NONE { 0 } else { 8 };
        let expiry_bytes = if self.expires_at == UnixTime::NEVER { 0 } else { 8 };
        1 + varint_bytes(self.sequence) + version_bytes + expiry_bytes + value_bytes
    }

    /// Appends its bytes, without the key.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let kind = match self.value {
            EntryValue::Tombstone => KIND_TOMBSTONE,
            EntryValue::Inline(_) => KIND_INLINE,
            EntryValue::InSegment(_) => KIND_IN_SEGMENT,
        };
        let has_version = if self.version == Version::NONE { 0 } else { HAS_VERSION };
        let has_expiry = if self.expires_at == UnixTime::NEVER { 0 } else { HAS_EXPIRY };
        bytes.push(kind | has_version | has_expiry);
        push_varint(bytes, self.sequence);
        if has_version > 0 {
            bytes.extend_from_slice(&self.version.to_bits().to_le_bytes());
        }
        if has_expiry > 0 {
            bytes.extend_from_slice(&self.expires_at.0.to_le_bytes());
        }
        match self.value {
            EntryValue::Tombstone => {}
            EntryValue::Inline(value) => {
                push_varint(bytes, value.len() as u64);
                bytes.extend_from_slice(value);
            }
            EntryValue::InSegment(ValueAddress { segment, unit, value_bytes }) => {
                for field in [segment, unit, value_bytes] {
                    push_varint(bytes, u64::from(field));
                }
            }
        }
    }

    /// The entry of a key at the front of `bytes`, which it leaves behind it; `None` if there is none.
    pub fn decode(key: &'a [u8], bytes: &mut &'a [u8]) -> Option<TreeEntry<'a>> {
        let (&flags, rest) = bytes.split_first()?;
        let mut rest = rest;
        if flags & !FLAGS_ALL != 0 {
            return None;
        }
        let sequence = take_varint(&mut rest).filter(|sequence| (1..=COUNT_MAX).contains(sequence))?;
        let version = match flags & HAS_VERSION {
            0 => Version::NONE,
            _ => Version::from_bits(take_u64(&mut rest)?),
        };
        let expires_at = match flags & HAS_EXPIRY {
            0 => UnixTime::NEVER,
            _ => UnixTime(take_u64(&mut rest)?),
        };
        let value = match flags & KIND_MASK {
            KIND_TOMBSTONE => EntryValue::Tombstone,
            KIND_INLINE => {
                let value_bytes = usize::try_from(take_varint(&mut rest)?).ok()?;
                let (value, behind) = rest.split_at_checked(value_bytes)?;
                rest = behind;
                EntryValue::Inline(value)
            }
            KIND_IN_SEGMENT => {
                let mut field = || u32::try_from(take_varint(&mut rest)?).ok();
                let (segment, unit, value_bytes) = (field()?, field()?, field()?);
                EntryValue::InSegment(ValueAddress { segment, unit, value_bytes })
            }
            _ => return None,
        };
        *bytes = rest;
        Some(TreeEntry { key, sequence, version, expires_at, value })
    }
}

/// The length of a varint in bytes.
pub fn varint_bytes(value: u64) -> usize {
    (64 - (value | 1).leading_zeros()).div_ceil(7) as usize
}

/// Appends a varint.
pub fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// The varint at the front of `bytes`, which it leaves behind it; `None` if there is none of 64 bits.
#[inline]
pub fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    match **bytes {
        [byte, ref rest @ ..] if byte < 0x80 => {
            *bytes = rest;
            Some(u64::from(byte))
        }
        [first, second, ref rest @ ..] if second < 0x80 => {
            *bytes = rest;
            Some(u64::from(first & 0x7f) | u64::from(second) << 7)
        }
        _ => take_long_varint(bytes),
    }
}

/// As [`take_varint`], of any length.
fn take_long_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for index in 0..VARINT_BYTES_MAX {
        let byte = *bytes.get(index)?;
        let part = u64::from(byte & 0x7f);
        let shift = 7 * index as u32;
        if part > u64::MAX >> shift {
            return None;
        }
        value |= part << shift;
        if byte & 0x80 == 0 {
            *bytes = &bytes[index + 1..];
            return Some(value);
        }
    }
    None
}

fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values() -> impl Strategy<Value = (u8, Vec<u8>, [u32; 3])> {
        (0..3u8, proptest::collection::vec(any::<u8>(), 0..300), any::<[u32; 3]>())
    }

    proptest! {
        #[test]
        fn an_entry_round_trips_and_no_part_of_it_is_one(
            (kind, inline, [segment, unit, value_bytes]) in values(),
            sequence in 1..=COUNT_MAX,
            version in prop_oneof![Just(0), any::<u64>()],
            expiry in prop_oneof![Just(u64::MAX), any::<u64>()],
        ) {
            let value = match kind {
                0 => EntryValue::Tombstone,
                1 => EntryValue::Inline(&inline),
                _ => EntryValue::InSegment(ValueAddress { segment, unit, value_bytes }),
            };
            let (version, expires_at) = (Version::from_bits(version), UnixTime(expiry));
            let entry = TreeEntry { key: b"key", sequence, version, expires_at, value };
            let mut bytes = Vec::new();
            entry.encode(&mut bytes);
            prop_assert_eq!(bytes.len(), entry.encoded_bytes());
            prop_assert!(bytes.len() <= ENTRY_OVERHEAD_MAX + inline.len());
            for end in 0..bytes.len() {
                prop_assert_eq!(TreeEntry::decode(b"key", &mut &bytes[..end]), None);
            }
            bytes.push(77);
            let mut rest = &bytes[..];
            prop_assert_eq!(TreeEntry::decode(b"key", &mut rest), Some(entry));
            prop_assert_eq!(rest, &[77][..]);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut rest = &bytes[..];
            if TreeEntry::decode(b"key", &mut rest).is_none() {
                prop_assert_eq!(rest.len(), bytes.len());
            }
        }
    }

    #[test]
    fn varints_of_every_length_round_trip() {
        for shift in 0..64 {
            for value in [1 << shift, (1 << shift) - 1, u64::MAX >> shift] {
                let mut bytes = Vec::new();
                push_varint(&mut bytes, value);
                assert_eq!(bytes.len(), varint_bytes(value), "{value}");
                assert_eq!(take_varint(&mut &bytes[..]), Some(value));
            }
        }
        assert_eq!(take_varint(&mut &[0xff; 10][..]), None, "more than 64 bits");
        assert_eq!(take_varint(&mut &[0x80; 20][..]), None, "more than ten bytes");
    }

    #[test]
    fn the_newest_entry_of_a_key_comes_first() {
        let at = |key, sequence| Position { key, sequence };
        let ordered = [
            Position::START,
            at(b"", 7),
            Position::before(b"a"),
            at(b"a", 9),
            at(b"a", 3),
            Position::behind(b"a"),
            Position::before(b"a\0"),
            at(b"b", 1),
        ];
        assert!(ordered.is_sorted());
    }

    #[test]
    fn unknown_flags_and_sequence_numbers_are_no_entry() {
        for bytes in [&[3, 1][..], &[16, 1], &[0, 0]] {
            assert_eq!(TreeEntry::decode(b"key", &mut &bytes[..]), None, "{bytes:?}");
        }
    }
}
