//! A value record: key, version, expiry and value, as a value log has them, packed by granules.
//!
//! ```text
//!    0 magic 0x56          4 value bytes u32                          16 version u64, flag 1 │ expiry u64, ms since 1970, flag 2
//!    1 flags u8            8 CRC-32C of the head u32                     key
//!    2 key bytes u16      12 CRC-32C of the value u32, or 0              with flag 4, CRC-32C u32 of each 128 KiB of the value
//!                            with flag 4                                 value, zeros to the granule
//! ```
//! Flags: 1 version, 2 expiry, 4 piece checksums, exactly if the value has more than 128 KiB. The head is all before the value. Its
//! checksum covers it without itself, exclusive or the seed of the place ([`super::log_place::checksum_seed`]). Integers are
//! little-endian.
//!
//! Invariants: any bytes are a record or an error; a record at another place, of another store or of an earlier use of the chunk is an error;
//! [`check_value_record`] gives only the value that the entry names. An empty value has no record.
//! Tested below.

use super::log_place::{ChecksumKind, ChunkIndex, checksum_seed};
use super::segment_entry::{LOG_VALUE_BYTES_MAX, SegmentEntry};
use crate::bug_injection::{self, InjectedBug};
use crate::common::record::{EXPIRY_END, RecordFlags, RecordMeta};
use octokv_base::{Crc32c, KEY_BYTES_MAX, UnixTime, Version, crc32c};
use smallvec::SmallVec;
use std::mem::offset_of;
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The fixed part of a record, in bytes.
pub const VALUE_RECORD_FIXED_BYTES: usize = 16;
/// A value of more bytes has a checksum for each piece of so many.
pub const VALUE_PIECE_BYTES: usize = 128 << 10;
/// The longest head, in bytes.
pub const VALUE_HEAD_BYTES_MAX: usize =
    VALUE_RECORD_FIXED_BYTES + 16 + KEY_BYTES_MAX + 4 * (LOG_VALUE_BYTES_MAX as usize / VALUE_PIECE_BYTES);

/// The magic number: the first byte of a record.
pub const VALUE_RECORD_MAGIC: u8 = 0x56;
const HAS_VERSION: u8 = 1;
const HAS_EXPIRY: u8 = 2;
const HAS_PIECES: u8 = 4;
const KNOWN_FLAGS: u8 = HAS_VERSION | HAS_EXPIRY | HAS_PIECES;

/// The fixed part of a record on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct ValueRecordLayout {
    magic: u8,
    flags: u8,
    key_bytes: U16,
    value_bytes: U32,
    head_crc: U32,
    value_crc: U32,
}
const _: () = assert!(size_of::<ValueRecordLayout>() == VALUE_RECORD_FIXED_BYTES);
const CRC_AT: Range<usize> =
    offset_of!(ValueRecordLayout, head_crc)..offset_of!(ValueRecordLayout, value_crc);

/// Where a record begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueRecordPlace {
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
    /// The chunk in the store's value log.
    pub index: ChunkIndex,
    /// The granule, counted from the start of the chunk.
    pub granule: u32,
}

/// A record to be encoded. REQUIRES: a value of 1 to [`LOG_VALUE_BYTES_MAX`] bytes.
#[derive(Clone, Copy, Debug)]
pub struct NewValueRecord<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Version and expiry; the flags do not matter.
    pub meta: RecordMeta,
    /// The length of the value in bytes.
    pub value_bytes: u32,
}

/// Why bytes are not the record that an entry names. Users see each as corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueRecordError {
    /// No magic number, a length or a flag that is none, or fewer bytes than the record has.
    Malformed,
    /// The checksum of the head does not match: damage, or another place's record.
    HeadChecksum,
    /// An intact record of another key, version, expiry or length.
    OtherRecord,
    /// The checksum of the value, or of a piece of it, does not match.
    ValueChecksum,
}

/// The length of a head in bytes, for a value of at least one byte.
pub fn value_head_bytes(key_bytes: usize, value_bytes: u32, meta: &RecordMeta) -> usize {
    let version = if has_version(meta) { 8 } else { 0 };
    let expiry = if has_expiry(meta) { 8 } else { 0 };
    VALUE_RECORD_FIXED_BYTES + version + expiry + key_bytes + 4 * pieces(value_bytes)
}

/// The length of a record in bytes, before rounding to granules; 0 for an empty value.
pub fn value_record_bytes(key_bytes: usize, value_bytes: u32, meta: &RecordMeta) -> u32 {
    match value_bytes {
        0 => 0,
        _ => value_head_bytes(key_bytes, value_bytes, meta) as u32 + value_bytes,
    }
}

/// The granules of 2^`granule_log2` bytes that a record takes; 0 for an empty value.
pub fn record_granules(key_bytes: usize, value_bytes: u32, meta: &RecordMeta, granule_log2: u8) -> u32 {
    value_record_bytes(key_bytes, value_bytes, meta).div_ceil(1 << granule_log2)
}

/// The checksums of a value of more than 128 KiB.
fn pieces(value_bytes: u32) -> usize {
    match value_bytes as usize > VALUE_PIECE_BYTES {
        true => (value_bytes as usize).div_ceil(VALUE_PIECE_BYTES),
        false => 0,
    }
}

fn has_version(meta: &RecordMeta) -> bool {
    meta.version > Version::NONE
}

fn has_expiry(meta: &RecordMeta) -> bool {
    meta.expires_at < EXPIRY_END
}

/// Encodes a head into the front of `out`, given the checksum of each 128 KiB of the value: for values that are not in memory as a whole.
///
/// # Panics
/// If `out` is shorter than the head, or the checksums are not those of so long a value.
pub fn encode_value_head(
    out: &mut [u8],
    record: &NewValueRecord<'_>,
    piece_crcs: &[u32],
    place: ValueRecordPlace,
) {
    let NewValueRecord { key, meta, value_bytes } = *record;
    assert!((1..=LOG_VALUE_BYTES_MAX).contains(&value_bytes), "a record of {value_bytes} bytes");
    assert_eq!(piece_crcs.len(), (value_bytes as usize).div_ceil(VALUE_PIECE_BYTES), "checksums");
    let has_pieces = piece_crcs.len() > 1;
    let mut flags = 0;
    flags |= if has_version(&meta) { HAS_VERSION } else { 0 };
    flags |= if has_expiry(&meta) { HAS_EXPIRY } else { 0 };
    flags |= if has_pieces { HAS_PIECES } else { 0 };
    let head = &mut out[..value_head_bytes(key.len(), value_bytes, &meta)];
    let (layout, mut rest) = ValueRecordLayout::mut_from_prefix(head).expect("a head has a fixed part");
    *layout = ValueRecordLayout {
        magic: VALUE_RECORD_MAGIC,
        flags,
        key_bytes: (key.len() as u16).into(),
        value_bytes: value_bytes.into(),
        head_crc: U32::ZERO,
        value_crc: if has_pieces { U32::ZERO } else { piece_crcs[0].into() },
    };
    if flags & HAS_VERSION != 0 {
        put(&mut rest, &meta.version.to_bits().to_le_bytes());
    }
    if flags & HAS_EXPIRY != 0 {
        put(&mut rest, &meta.expires_at.0.to_le_bytes());
    }
    put(&mut rest, key);
    if has_pieces {
        piece_crcs.iter().for_each(|crc| put(&mut rest, &crc.to_le_bytes()));
    }
    let crc = head_crc(head, place);
    head[CRC_AT].copy_from_slice(&crc.to_le_bytes());
}

/// Copies bytes to the front of `out`, which it leaves behind them.
fn put(out: &mut &mut [u8], bytes: &[u8]) {
    let (front, rest) = std::mem::take(out).split_at_mut(bytes.len());
    front.copy_from_slice(bytes);
    *out = rest;
}

/// Encodes a whole record: head, value, and zeros to the end of `out`.
///
/// # Panics
/// If `out` is shorter than the record, or the value has another length.
pub fn encode_value_record<'v>(
    out: &mut [u8],
    record: &NewValueRecord<'_>,
    value: impl Iterator<Item = &'v [u8]>,
    place: ValueRecordPlace,
) {
    let head_bytes = value_head_bytes(record.key.len(), record.value_bytes, &record.meta);
    let (head, rest) = out.split_at_mut(head_bytes);
    let (stored, padding) = rest.split_at_mut(record.value_bytes as usize);
    padding.fill(0);
    let mut unwritten = &mut *stored;
    value.for_each(|part| put(&mut unwritten, part));
    assert!(unwritten.is_empty(), "a value lacks {} of {} bytes", unwritten.len(), record.value_bytes);
    let piece_crcs: SmallVec<[u32; 8]> = stored.chunks(VALUE_PIECE_BYTES).map(crc32c).collect();
    encode_value_head(head, record, &piece_crcs, place);
}

/// The checksum of a head at a place.
fn head_crc(head: &[u8], place: ValueRecordPlace) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(&head[..CRC_AT.start]);
    crc.update(&head[CRC_AT.end..]);
    let ValueRecordPlace { volume_id, partition, index, granule } = place;
    crc.finish() ^ checksum_seed(volume_id, partition, ChecksumKind::Record, index, granule)
}

/// Bytes read from a value log, not validated.
#[derive(Clone, Copy)]
pub struct UncheckedValueRecord<'a> {
    /// The bytes, from the start of the record on.
    pub bytes: &'a [u8],
    /// The place from which they were read.
    pub place: ValueRecordPlace,
}

/// The head of a record, validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueRecordHead<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Version and expiry, and [`RecordFlags::VERSIONED`] if there is one of them.
    pub meta: RecordMeta,
    /// The length of the value in bytes, at least 1.
    pub value_bytes: u32,
    /// The checksum of each 128 KiB of the value, little-endian.
    piece_crcs: &'a [u8],
}

impl<'a> UncheckedValueRecord<'a> {
    /// The head, if its checksum is right. The bytes need not have the value.
    ///
    /// # Errors
    /// [`ValueRecordError::Malformed`] or [`ValueRecordError::HeadChecksum`].
    pub fn head(&self) -> Result<ValueRecordHead<'a>, ValueRecordError> {
        let malformed = ValueRecordError::Malformed;
        let (layout, rest) = ValueRecordLayout::ref_from_prefix(self.bytes).map_err(|_| malformed)?;
        let (value_bytes, key_bytes) = (layout.value_bytes.get(), usize::from(layout.key_bytes.get()));
        let flags = layout.flags;
        if layout.magic != VALUE_RECORD_MAGIC
            || flags & !KNOWN_FLAGS != 0
            || !(1..=LOG_VALUE_BYTES_MAX).contains(&value_bytes)
            || key_bytes > KEY_BYTES_MAX
            || (flags & HAS_PIECES != 0) != (pieces(value_bytes) > 0)
        {
            return Err(malformed);
        }
        let mut rest = rest;
        let mut meta = RecordMeta::PLAIN;
        if flags & HAS_VERSION != 0 {
            meta.version = Version::from_bits(take_u64(&mut rest).ok_or(malformed)?);
        }
        if flags & HAS_EXPIRY != 0 {
            meta.expires_at = UnixTime(take_u64(&mut rest).ok_or(malformed)?);
        }
        if flags & (HAS_VERSION | HAS_EXPIRY) != 0 {
            meta.flags = RecordFlags::VERSIONED;
        }
        let (key, rest) = rest.split_at_checked(key_bytes).ok_or(malformed)?;
        let piece_crcs = match pieces(value_bytes) {
            0 => layout.value_crc.as_bytes(),
            count => rest.get(..4 * count).ok_or(malformed)?,
        };
        let is_canonical = has_version(&meta) == (flags & HAS_VERSION != 0)
            && has_expiry(&meta) == (flags & HAS_EXPIRY != 0);
        if !is_canonical {
            return Err(malformed);
        }
        let head = &self.bytes[..value_head_bytes(key_bytes, value_bytes, &meta)];
        match head_crc(head, self.place) == layout.head_crc.get() {
            true => Ok(ValueRecordHead { key, meta, value_bytes, piece_crcs }),
            false => Err(ValueRecordError::HeadChecksum),
        }
    }
}

fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (array, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*array))
}

impl ValueRecordHead<'_> {
    /// The length of the head in bytes: where the value begins.
    pub fn head_bytes(&self) -> usize {
        value_head_bytes(self.key.len(), self.value_bytes, &self.meta)
    }

    /// The granules of the record.
    pub fn granules(&self, granule_log2: u8) -> u32 {
        record_granules(self.key.len(), self.value_bytes, &self.meta, granule_log2)
    }

    /// Whether it is the record that an entry names.
    pub fn is_of(&self, entry: &SegmentEntry<'_>) -> bool {
        self.key == entry.key
            && self.meta.version == entry.meta.version
            && self.meta.expires_at == entry.meta.expires_at
            && self.value_bytes == entry.contents.value_bytes()
    }

    /// The pieces of the value, each of 128 KiB but for the last.
    pub fn pieces(&self) -> usize {
        self.piece_crcs.len() / 4
    }

    /// Whether these are the bytes of a piece of the value.
    ///
    /// # Panics
    /// If there is no such piece.
    pub fn is_piece_intact(&self, piece: usize, bytes: &[u8]) -> bool {
        let rest = self.value_bytes as usize - piece * VALUE_PIECE_BYTES;
        bytes.len() == rest.min(VALUE_PIECE_BYTES)
            && self.piece_crcs[4 * piece..4 * piece + 4] == crc32c(bytes).to_le_bytes()
    }

    /// Whether these are the bytes of the value.
    pub fn is_value_intact(&self, value: &[u8]) -> bool {
        let mut pieces = value.chunks(VALUE_PIECE_BYTES).enumerate();
        value.len() == self.value_bytes as usize
            && pieces.all(|(piece, bytes)| self.is_piece_intact(piece, bytes))
    }
}

/// Where the value of an entry lies in the bytes of its record, if they are that record and intact as a whole.
///
/// # Errors
/// [`ValueRecordError`], by the first check that fails.
pub fn check_value_record(
    bytes: &[u8],
    entry: &SegmentEntry<'_>,
    place: ValueRecordPlace,
) -> Result<Range<usize>, ValueRecordError> {
    let head = UncheckedValueRecord { bytes, place }.head()?;
    let value_at = head.head_bytes()..head.head_bytes() + head.value_bytes as usize;
    let value = bytes.get(value_at.clone()).ok_or(ValueRecordError::Malformed)?;
    check_value_pieces(&bytes[..value_at.start], value, 0, entry, place)?;
    Ok(value_at)
}

/// Whether a head is that of an entry's record, and these bytes are whole pieces of its value, from one that begins at a byte of the value on.
///
/// # Errors
/// As for [`check_value_record`].
pub fn check_value_pieces(
    head: &[u8],
    pieces: &[u8],
    first_byte: usize,
    entry: &SegmentEntry<'_>,
    place: ValueRecordPlace,
) -> Result<(), ValueRecordError> {
    let head = UncheckedValueRecord { bytes: head, place }.head()?;
    if !head.is_of(entry) {
        return Err(ValueRecordError::OtherRecord);
    }
    if !first_byte.is_multiple_of(VALUE_PIECE_BYTES) || first_byte + pieces.len() > head.value_bytes as usize
    {
        return Err(ValueRecordError::Malformed);
    }
    let mut numbered = (first_byte / VALUE_PIECE_BYTES..).zip(pieces.chunks(VALUE_PIECE_BYTES));
    match numbered.all(|(piece, bytes)| head.is_piece_intact(piece, bytes))
        || bug_injection::is_injected(InjectedBug::LogSkipValueChecksum)
    {
        true => Ok(()),
        false => Err(ValueRecordError::ValueChecksum),
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment_entry::{EntryContents, ValuePlace};
    use super::super::test_entries::any_key;
    use super::*;
    use octokv_base::Prng;
    use proptest::prelude::*;

    const PLACE: ValueRecordPlace =
        ValueRecordPlace { volume_id: 7, partition: 1, index: ChunkIndex(2), granule: 3 };

    fn meta(version: u64, expires_at: UnixTime) -> RecordMeta {
        let is_plain = version == 0 && expires_at == UnixTime::NEVER;
        let flags = if is_plain { RecordFlags::NONE } else { RecordFlags::VERSIONED };
        RecordMeta { version: Version::from_bits(version), expires_at, flags }
    }

    fn entry(key: &[u8], meta: RecordMeta, bytes: usize) -> SegmentEntry<'_> {
        let contents = EntryContents::Value { bytes: bytes as u32, at: ValuePlace::Record(9) };
        SegmentEntry { key, meta, contents }
    }

    fn encoded(key: &[u8], meta: RecordMeta, value: &[u8], place: ValueRecordPlace) -> Vec<u8> {
        let record = NewValueRecord { key, meta, value_bytes: value.len() as u32 };
        let mut bytes = vec![0xee; record_granules(key.len(), value.len() as u32, &meta, 3) as usize * 8];
        encode_value_record(&mut bytes, &record, value.chunks(1000), place);
        bytes
    }

    proptest! {
        #[test]
        fn a_record_gives_back_the_value_of_its_entry_alone(
            key in any_key(),
            version in prop_oneof![Just(0), any::<u64>()],
            expires_at in prop_oneof![Just(UnixTime::NEVER), (0..EXPIRY_END.0).prop_map(UnixTime)],
            value in proptest::collection::vec(any::<u8>(), 1..3000),
            behind: Vec<u8>,
        ) {
            let meta = meta(version, expires_at);
            let mut bytes = encoded(&key, meta, &value, PLACE);
            let head_bytes = value_head_bytes(key.len(), value.len() as u32, &meta);
            prop_assert!(bytes[head_bytes + value.len()..].iter().all(|&byte| byte == 0));
            bytes.extend_from_slice(&behind);
            let named = entry(&key, meta, value.len());
            let at = check_value_record(&bytes, &named, PLACE).unwrap();
            prop_assert_eq!(&bytes[at.clone()], &value[..]);
            for end in (0..at.end).step_by(37).chain([at.end - 1]) {
                let cut = check_value_record(&bytes[..end], &named, PLACE);
                prop_assert_eq!(cut, Err(ValueRecordError::Malformed), "cut at {}", end);
            }
            let mut others = [named.clone(), named.clone(), named.clone()];
            others[0].meta.version = Version::from_bits(version ^ 1);
            others[1].meta.expires_at = UnixTime(expires_at.0 ^ 1);
            others[2].contents = EntryContents::LostValue { bytes: value.len() as u32 + 1 };
            for other in others {
                let found = check_value_record(&bytes, &other, PLACE);
                prop_assert_eq!(found, Err(ValueRecordError::OtherRecord));
            }
            let key = [&key[..], b"."].concat();
            let other = SegmentEntry { key: &key, ..named };
            prop_assert_eq!(check_value_record(&bytes, &other, PLACE), Err(ValueRecordError::OtherRecord));
        }

        #[test]
        fn no_bytes_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), flags in 0u8..8, key_bytes in 0u8..100) {
            let fixed = [VALUE_RECORD_MAGIC, flags, key_bytes, 0];
            bytes.iter_mut().zip(fixed).for_each(|(byte, fixed)| *byte = fixed);
            let _ = UncheckedValueRecord { bytes: &bytes, place: PLACE }.head();
            if let Some(top) = bytes.get_mut(7) {
                *top = 0;
                let head = UncheckedValueRecord { bytes: &bytes, place: PLACE }.head();
                prop_assert!(head.is_err());
            }
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let meta = meta(5, UnixTime(6));
        let value = [9; 100];
        let bytes = encoded(b"key", meta, &value, PLACE);
        let record_bytes = value_record_bytes(3, 100, &meta) as usize;
        for bit in 0..record_bytes * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(check_value_record(&bytes, &entry(b"key", meta, 100), PLACE).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_record_of_another_place_store_lap_or_volume_is_none() {
        let bytes = encoded(b"key", RecordMeta::PLAIN, &[1; 50], PLACE);
        let others = [
            ValueRecordPlace { volume_id: 8, ..PLACE },
            ValueRecordPlace { partition: 2, ..PLACE },
            ValueRecordPlace { index: ChunkIndex(3), ..PLACE },
            ValueRecordPlace { granule: 4, ..PLACE },
        ];
        for place in others {
            let found = check_value_record(&bytes, &entry(b"key", RecordMeta::PLAIN, 50), place);
            assert_eq!(found, Err(ValueRecordError::HeadChecksum), "{place:?}");
        }
    }

    #[test]
    fn a_long_value_is_checked_by_pieces() {
        let mut value = vec![0; 2 * VALUE_PIECE_BYTES + 5];
        Prng::new(1).fill(&mut value);
        for (value_bytes, crcs) in [(VALUE_PIECE_BYTES, 0), (VALUE_PIECE_BYTES + 1, 2), (value.len(), 3)] {
            let value = &value[..value_bytes];
            let mut bytes = encoded(b"key", RecordMeta::PLAIN, value, PLACE);
            let head = UncheckedValueRecord { bytes: &bytes[..19 + 4 * crcs], place: PLACE }.head().unwrap();
            assert_eq!(head.head_bytes(), 19 + 4 * crcs);
            assert_eq!(head.pieces(), crcs.max(1));
            for (piece, part) in value.chunks(VALUE_PIECE_BYTES).enumerate() {
                assert!(head.is_piece_intact(piece, part));
                assert!(!head.is_piece_intact(piece, &part[1..]));
            }
            let named = entry(b"key", RecordMeta::PLAIN, value_bytes);
            assert!(check_value_record(&bytes, &named, PLACE).is_ok());
            for at in [0, value_bytes - 1] {
                bytes[19 + 4 * crcs + at] ^= 1;
                let found = check_value_record(&bytes, &named, PLACE);
                assert_eq!(found, Err(ValueRecordError::ValueChecksum), "byte {at}");
                bytes[19 + 4 * crcs + at] ^= 1;
            }
        }
    }

    #[test]
    fn records_of_common_lengths_take_these_bytes() {
        let key_bytes = 16;
        let versioned = meta(1, UnixTime::NEVER);
        let lengths = |value_bytes| {
            [RecordMeta::PLAIN, versioned].map(|meta| record_granules(key_bytes, value_bytes, &meta, 3) * 8)
        };
        assert_eq!((lengths(256), lengths(4096)), ([288, 296], [4128, 4136]));
        assert_eq!(lengths(0), [0, 0], "an empty value has no record");
        let longest = meta(1, UnixTime(1));
        assert_eq!(value_head_bytes(KEY_BYTES_MAX, LOG_VALUE_BYTES_MAX, &longest), VALUE_HEAD_BYTES_MAX);
    }

    #[test]
    fn the_layout_of_a_record_is_fixed() {
        let bytes = encoded(b"key", meta(5, UnixTime(6)), b"value", PLACE);
        assert_eq!(bytes.len(), 40);
        assert_eq!(bytes[..8], [0x56, 3, 3, 0, 5, 0, 0, 0]);
        assert_eq!(bytes[12..16], crc32c(b"value").to_le_bytes());
        assert_eq!(bytes[16..32], [5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[32..], *b"keyvalue");
    }
}
