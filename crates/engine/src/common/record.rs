//! One record: header, key and value in whole units, as it lies on the device. A volume of format 2 has headers of version 2, and
//! those of version 1 that it had before it was upgraded.
//!
//! ```text
//!  version 1                                              version 2
//!   0  magic "OKVR"            24  location u64 (unit)     0  magic "KR"            24  value bytes u32
//!   4  header CRC-32C u32      32  value bytes u32         2  version u8            28  value CRC-32C u32
//!   8  volume u64              36  value CRC-32C u32       3  flags u8              32  version of the key u64
//!  16  sequence u64            40  key bytes u16           4  header CRC-32C u32    40  expiry u48, ms since 1970
//!                              42  version u8              8  volume u64                (all ones: never)
//!                              43  zero u8                16  sequence u64          46  key bytes u16
//!                              44  namespace u32
//!  48  key, zeros to value_offset(key bytes), value, zeros to the end of the last unit
//! ```
//! The header's checksum covers bytes 8 to the end of the key, so that a key can be compared without reading the value. In version 2 it
//! is that CRC-32C, exclusive or the low 32 bits of SplitMix64's mix of location + flags · 2^56. A record on a volatile device has no checksums, and any
//! bytes in place of the zeros: memory is trusted, as its copy in any cache would be. The location detects misdirected writes, the
//! sequence number, of which the index has a fingerprint, stale reads.

use crate::bug_injection::{self, InjectedBug};
use octokv_base::prng::mix64;
use octokv_base::{RecordLayout, UnixTime, Version, crc32c};
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC_1: [u8; 4] = *b"OKVR";
const MAGIC_2: [u8; 3] = [b'K', b'R', 2];
/// The fixed part of a record, in bytes.
pub const HEADER_BYTES: usize = 48;
/// Where the buffer of a record has key and value.
pub const LAYOUT: RecordLayout = RecordLayout::new(HEADER_BYTES as u16);

/// The version of the headers that a volume writes: that of its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecordFormat {
    /// Without version and expiry.
    V1,
    /// With them.
    V2,
}

/// What kind of record it is, in the header and in the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordFlags(u8);

impl RecordFlags {
    /// A value without version or expiry.
    pub const NONE: RecordFlags = RecordFlags(0);
    /// The key has a version or an expiry time.
    pub const VERSIONED: RecordFlags = RecordFlags(1);
    /// The key was deleted, and the record keeps its version.
    pub const TOMBSTONE: RecordFlags = RecordFlags(2);
    /// The value lies in pieces, and the record has their list.
    pub const PIECES: RecordFlags = RecordFlags(4);
    /// All flags that there are.
    const KNOWN: u8 = 7;
    /// The bits that the index keeps for flags.
    pub const BITS: u32 = 3;

    /// The flags with these bits; `None` if this format has no such flags.
    pub fn from_bits(bits: u8) -> Option<RecordFlags> {
        (bits & !RecordFlags::KNOWN == 0).then_some(RecordFlags(bits))
    }

    /// The flags with those of these bits that this format has.
    pub fn from_known_bits(bits: u8) -> RecordFlags {
        RecordFlags(bits & RecordFlags::KNOWN)
    }

    /// The bits, in the header, in the index and in the journal.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Both sets of flags.
    pub const fn with(self, other: RecordFlags) -> RecordFlags {
        RecordFlags(self.0 | other.0)
    }

    /// These flags but for those of `other`.
    pub const fn without(self, other: RecordFlags) -> RecordFlags {
        RecordFlags(self.0 & !other.0)
    }

    /// Whether all of `other` are set.
    pub fn contains(self, other: RecordFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The header of version 1 on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderLayoutV1 {
    magic: [u8; 4],
    header_crc: U32,
    volume_id: U64,
    sequence: U64,
    location: U64,
    value_bytes: U32,
    value_crc: U32,
    key_bytes: U16,
    version: u8,
    zero: u8,
    namespace: U32,
}
const _: () = assert!(size_of::<HeaderLayoutV1>() == HEADER_BYTES);
const _: () = assert!(offset_of!(HeaderLayoutV1, namespace) == 44);

/// The header of version 2 on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderLayoutV2 {
    magic: [u8; 3],
    flags: u8,
    header_crc: U32,
    volume_id: U64,
    sequence: U64,
    value_bytes: U32,
    value_crc: U32,
    version: U64,
    expires_at: [u8; 6],
    key_bytes: U16,
}
const _: () = assert!(size_of::<HeaderLayoutV2>() == HEADER_BYTES);
const _: () = assert!(offset_of!(HeaderLayoutV2, key_bytes) == 46);

/// The first byte behind the header's checksum, in both versions.
const CHECKED_FROM: usize = offset_of!(HeaderLayoutV1, volume_id);
const _: () = assert!(offset_of!(HeaderLayoutV2, volume_id) == CHECKED_FROM);
const FLAGS_AT: usize = offset_of!(HeaderLayoutV2, flags);
const CRC_AT: std::ops::Range<usize> = 4..CHECKED_FROM;

/// The first point in time that a header cannot name, but for [`UnixTime::NEVER`]: the year 10889.
pub const EXPIRY_END: UnixTime = UnixTime((1 << 48) - 1);

/// The longest header and key together, in bytes: reading this much of a record always gives its whole key.
pub const HEADER_AND_KEY_BYTES_MAX: usize = HEADER_BYTES + octokv_base::KEY_BYTES_MAX;

/// The identity of a record: unique among all records ever written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordId {
    /// The volume it belongs to.
    pub volume_id: u64,
    /// The sequence number: unique in the volume and increasing.
    pub sequence: u64,
    /// Its first unit.
    pub location: u64,
}

/// What a record keeps beside key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordMeta {
    /// The version of the key.
    pub version: Version,
    /// When it expires.
    pub expires_at: UnixTime,
    /// Its kind.
    pub flags: RecordFlags,
}

impl RecordMeta {
    /// A value without version or expiry.
    pub const PLAIN: RecordMeta =
        RecordMeta { version: Version::NONE, expires_at: UnixTime::NEVER, flags: RecordFlags::NONE };
}

/// A record to be encoded.
#[derive(Clone, Copy, Debug)]
pub struct NewRecord<'a> {
    /// The version of its header. REQUIRES: [`RecordMeta::PLAIN`] in version 1.
    pub format: RecordFormat,
    /// Its identity.
    pub identity: RecordId,
    /// The namespace of its key, which version 1 states.
    pub namespace: u32,
    /// Its key.
    pub key: &'a [u8],
    /// The length of its value in bytes.
    pub value_bytes: usize,
    /// The bytes that it has of the value: all, or the length of the list of its pieces.
    pub stored_bytes: usize,
    /// What it keeps beside them.
    pub meta: RecordMeta,
}

/// Why bytes are not the expected record. Users see each as corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// No magic, another version, or a length beyond the bytes.
    Malformed,
    /// The header's checksum does not match.
    HeaderChecksum,
    /// The value's checksum does not match.
    ValueChecksum,
}

/// A validated record header.
#[derive(Clone, Copy, Debug)]
pub struct RecordHeader {
    /// The identity of the record.
    pub identity: RecordId,
    /// The length of the value in bytes.
    pub value_bytes: usize,
    /// Version, expiry and kind.
    pub meta: RecordMeta,
    key_bytes: usize,
    value_crc: u32,
}

/// The length of a record in bytes, before rounding to units.
pub fn record_bytes(key_bytes: usize, value_bytes: usize) -> usize {
    LAYOUT.value_offset(key_bytes) + value_bytes
}

/// Encodes header and key around the value, which is in `bytes` already, and zeroes the padding.
///
/// # Panics
/// If `bytes` is shorter than the record.
pub fn encode(bytes: &mut [u8], record: &NewRecord<'_>) {
    let (key_bytes, stored_bytes) = (record.key.len(), record.stored_bytes);
    let offset = LAYOUT.value_offset(key_bytes);
    let value_crc = crc32c(&bytes[offset..offset + stored_bytes]);
    let rest = encode_header(bytes, record, value_crc);
    rest[key_bytes..offset - HEADER_BYTES].fill(0);
    rest[offset - HEADER_BYTES + stored_bytes..].fill(0);
    let header_crc = header_crc(&bytes[..HEADER_BYTES + key_bytes], record.format, record.identity.location);
    bytes[CRC_AT].copy_from_slice(&header_crc.to_le_bytes());
}

/// The checksum of a header and its key.
fn header_crc(header_and_key: &[u8], format: RecordFormat, location: u64) -> u32 {
    match format {
        RecordFormat::V1 => crc32c(&header_and_key[CHECKED_FROM..]),
        RecordFormat::V2 => {
            let flags = u64::from(header_and_key[FLAGS_AT]);
            crc32c(&header_and_key[CHECKED_FROM..]) ^ mix64(location | flags << 56) as u32
        }
    }
}

/// Encodes a record that stays in memory, around its value: without checksums, which are not compared there, and with whatever
/// is in the padding.
///
/// # Panics
/// If `bytes` is shorter than the record.
#[inline]
pub fn encode_in_memory(bytes: &mut [u8], record: &NewRecord<'_>) {
    let fits = record_bytes(record.key.len(), record.value_bytes) <= bytes.len();
    assert!(fits, "a record of {} B of value", record.value_bytes);
    encode_header(bytes, record, 0);
}

/// Encodes header and key, without the header's checksum. Gives the bytes behind the header.
#[inline]
fn encode_header<'a>(bytes: &'a mut [u8], record: &NewRecord<'_>, value_crc: u32) -> &'a mut [u8] {
    let NewRecord { format, identity, namespace, key, value_bytes, meta, .. } = *record;
    let rest = match format {
        RecordFormat::V1 => {
            debug_assert!(meta == RecordMeta::PLAIN, "version 1 has no {meta:?}");
            let (layout, rest) = HeaderLayoutV1::mut_from_prefix(bytes).expect("a record has a header");
            *layout = HeaderLayoutV1 {
                magic: MAGIC_1,
                header_crc: U32::ZERO,
                volume_id: identity.volume_id.into(),
                sequence: identity.sequence.into(),
                location: identity.location.into(),
                value_bytes: (value_bytes as u32).into(),
                value_crc: value_crc.into(),
                key_bytes: (key.len() as u16).into(),
                version: 1,
                zero: 0,
                namespace: namespace.into(),
            };
            rest
        }
        RecordFormat::V2 => {
            let (layout, rest) = HeaderLayoutV2::mut_from_prefix(bytes).expect("a record has a header");
            let expires_at = meta.expires_at.min(EXPIRY_END).0.to_le_bytes();
            *layout = HeaderLayoutV2 {
                magic: MAGIC_2,
                flags: meta.flags.bits(),
                header_crc: U32::ZERO,
                volume_id: identity.volume_id.into(),
                sequence: identity.sequence.into(),
                value_bytes: (value_bytes as u32).into(),
                value_crc: value_crc.into(),
                version: meta.version.to_bits().into(),
                expires_at: [0, 1, 2, 3, 4, 5].map(|byte| expires_at[byte]),
                key_bytes: (key.len() as u16).into(),
            };
            rest
        }
    };
    rest[..key.len()].copy_from_slice(key);
    rest
}

/// Bytes read from the device at a location, not validated.
pub struct UncheckedRecord<'a> {
    /// The bytes, of which header and key are needed.
    pub bytes: &'a [u8],
    /// The unit from which they were read.
    pub location: u64,
}

impl<'a> UncheckedRecord<'a> {
    /// The header and key, if their checksum is valid. The bytes need not include the value.
    ///
    /// # Errors
    /// [`RecordError::Malformed`] or [`RecordError::HeaderChecksum`].
    pub fn header(self) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let UncheckedRecord { bytes, location } = self;
        let (header, key) = UncheckedRecord { bytes, location }.unverified_header()?;
        let format = if bytes.starts_with(&MAGIC_1) { RecordFormat::V1 } else { RecordFormat::V2 };
        let crc = header_crc(&bytes[..HEADER_BYTES + key.len()], format, location);
        match bytes[CRC_AT] == crc.to_le_bytes() {
            true => Ok((header, key)),
            false => Err(RecordError::HeaderChecksum),
        }
    }

    /// The header and key, without their checksum: of a record in memory. The bytes need not include the value.
    ///
    /// # Errors
    /// [`RecordError::Malformed`].
    #[inline]
    pub fn unverified_header(self) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let UncheckedRecord { bytes, location } = self;
        let (layout, _) = HeaderLayoutV1::ref_from_prefix(bytes).map_err(|_| RecordError::Malformed)?;
        let header = match layout.magic {
            MAGIC_1 if layout.version == 1 => RecordHeader {
                identity: RecordId {
                    volume_id: layout.volume_id.get(),
                    sequence: layout.sequence.get(),
                    location: layout.location.get(),
                },
                value_bytes: layout.value_bytes.get() as usize,
                meta: RecordMeta::PLAIN,
                key_bytes: layout.key_bytes.get().into(),
                value_crc: layout.value_crc.get(),
            },
            [b'K', b'R', 2, _] => header_of_version_2(bytes, location)?,
            _ => return Err(RecordError::Malformed),
        };
        let key = bytes.get(HEADER_BYTES..HEADER_BYTES + header.key_bytes).ok_or(RecordError::Malformed)?;
        Ok((header, key))
    }
}

/// What identifies a record in memory, and the length of its value. Of a record without flags.
pub struct PlainRecord<'a> {
    /// The volume it belongs to.
    pub volume_id: u64,
    /// The sequence number.
    pub sequence: u64,
    /// The length of the value in bytes.
    pub value_bytes: usize,
    /// The key.
    pub key: &'a [u8],
}

/// The record at the front of bytes in memory, where all headers are of version 2; `None` if there is none, or it has flags.
#[inline]
pub fn plain_in_memory(bytes: &[u8]) -> Option<PlainRecord<'_>> {
    let (layout, _) = HeaderLayoutV2::ref_from_prefix(bytes).ok()?;
    if layout.magic != MAGIC_2 || layout.flags != RecordFlags::NONE.bits() {
        return None;
    }
    Some(PlainRecord {
        volume_id: layout.volume_id.get(),
        sequence: layout.sequence.get(),
        value_bytes: layout.value_bytes.get() as usize,
        key: bytes.get(HEADER_BYTES..HEADER_BYTES + usize::from(layout.key_bytes.get()))?,
    })
}

impl PlainRecord<'_> {
    /// The range of the value in the record's bytes; `None` if it is not within `bytes`.
    #[inline]
    pub fn value_range(&self, bytes: usize) -> Option<std::ops::Range<usize>> {
        let offset = LAYOUT.value_offset(self.key.len());
        let range = offset..offset + self.value_bytes;
        (range.end <= bytes).then_some(range)
    }
}

/// The fields of a header of version 2, not validated.
#[inline]
fn header_of_version_2(bytes: &[u8], location: u64) -> Result<RecordHeader, RecordError> {
    let (layout, _) = HeaderLayoutV2::ref_from_prefix(bytes).map_err(|_| RecordError::Malformed)?;
    let [a, b, c, d, e, f] = layout.expires_at;
    let expires_at = match UnixTime(u64::from_le_bytes([a, b, c, d, e, f, 0, 0])) {
        EXPIRY_END => UnixTime::NEVER,
        at => at,
    };
    Ok(RecordHeader {
        identity: RecordId { volume_id: layout.volume_id.get(), sequence: layout.sequence.get(), location },
        value_bytes: layout.value_bytes.get() as usize,
        meta: RecordMeta {
            version: Version::from_bits(layout.version.get()),
            expires_at,
            flags: RecordFlags::from_bits(layout.flags).ok_or(RecordError::Malformed)?,
        },
        key_bytes: layout.key_bytes.get().into(),
        value_crc: layout.value_crc.get(),
    })
}

impl RecordHeader {
    /// Where the record has its value, or the list of its pieces.
    pub fn value_offset(&self) -> usize {
        LAYOUT.value_offset(self.key_bytes)
    }

    /// The checksum of what the record has of its value.
    pub fn stored_crc(&self) -> u32 {
        self.value_crc
    }

    /// The range of the value in `bytes`, without its checksum: of a record in memory.
    ///
    /// # Errors
    /// [`RecordError::Malformed`] if the value is not within `bytes`.
    #[inline]
    pub fn unverified_value_range(&self, bytes: &[u8]) -> Result<std::ops::Range<usize>, RecordError> {
        let offset = LAYOUT.value_offset(self.key_bytes);
        let range = offset..offset + self.value_bytes;
        if range.end > bytes.len() {
            return Err(RecordError::Malformed);
        }
        Ok(range)
    }

    /// The range of the value in `bytes`, if its checksum is valid. REQUIRES: the record is not one with pieces.
    ///
    /// # Errors
    /// [`RecordError::Malformed`] if the value is not within `bytes`, or [`RecordError::ValueChecksum`].
    pub fn value_range(&self, bytes: &[u8]) -> Result<std::ops::Range<usize>, RecordError> {
        let range = self.unverified_value_range(bytes)?;
        if crc32c(&bytes[range.clone()]) != self.value_crc
            && !bug_injection::is_injected(InjectedBug::SkipValueChecksum)
        {
            return Err(RecordError::ValueChecksum);
        }
        Ok(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    const IDENTITY: RecordId = RecordId { volume_id: 7, sequence: 8, location: 9 };
    const FORMATS: [RecordFormat; 2] = [RecordFormat::V1, RecordFormat::V2];

    fn meta(format: RecordFormat) -> RecordMeta {
        match format {
            RecordFormat::V1 => RecordMeta::PLAIN,
            RecordFormat::V2 => RecordMeta {
                version: Version::from_bits(0x0102_0304_0506_0708),
                expires_at: UnixTime(EXPIRY_END.0 - 1),
                flags: RecordFlags::VERSIONED,
            },
        }
    }

    fn new_record(format: RecordFormat) -> NewRecord<'static> {
        let (key, meta) = (b"hello", meta(format));
        NewRecord { format, identity: IDENTITY, namespace: 1, key, value_bytes: 100, stored_bytes: 100, meta }
    }

    fn record(format: RecordFormat) -> Vec<u8> {
        let mut bytes = vec![0xaa; 4096];
        bytes[64..164].fill(5);
        encode(&mut bytes, &new_record(format));
        bytes
    }

    fn unchecked(bytes: &[u8]) -> UncheckedRecord<'_> {
        UncheckedRecord { bytes, location: 9 }
    }

    #[test]
    fn a_record_gives_back_its_key_value_identity_and_what_it_keeps_beside() {
        for format in FORMATS {
            let bytes = record(format);
            let (header, key) = unchecked(&bytes).header().unwrap();
            assert_eq!((header.identity, key, header.meta), (IDENTITY, &b"hello"[..], meta(format)));
            assert_eq!(bytes[header.value_range(&bytes).unwrap()], [5; 100]);
            assert!(bytes[164..].iter().all(|&byte| byte == 0), "no old bytes reach the device");
        }
    }

    #[test]
    fn what_never_expires_is_kept_as_such() {
        let mut bytes = record(RecordFormat::V2);
        encode(&mut bytes, &NewRecord { meta: RecordMeta::PLAIN, ..new_record(RecordFormat::V2) });
        assert_eq!(unchecked(&bytes).header().unwrap().0.meta, RecordMeta::PLAIN);
    }

    #[test]
    fn a_record_at_another_place_is_noticed() {
        for format in FORMATS {
            let bytes = record(format);
            let found = UncheckedRecord { bytes: &bytes, location: 10 }.header();
            assert!(found.is_err() || found.unwrap().0.identity.location != 10, "{format:?}");
        }
    }

    #[test]
    fn the_bytes_of_version_2_are_those_of_the_drawing() {
        let bytes = record(RecordFormat::V2);
        assert_eq!(bytes[..4], [b'K', b'R', 2, 1]);
        assert_eq!((bytes[8], bytes[16], bytes[24], bytes[46]), (7, 8, 100, 5));
        assert_eq!(bytes[32..40], 0x0102_0304_0506_0708_u64.to_le_bytes());
        assert_eq!(bytes[40..46], [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff]);
        let of_place = mix64(9 + (1 << 56)) as u32;
        assert_eq!(bytes[4..8], (crc32c(&bytes[8..48 + 5]) ^ of_place).to_le_bytes());
    }

    #[test]
    fn unknown_flags_are_refused() {
        for bit in 3..8 {
            let mut bytes = record(RecordFormat::V2);
            bytes[3] |= 1 << bit;
            assert_eq!(unchecked(&bytes).unverified_header().unwrap_err(), RecordError::Malformed, "{bit}");
        }
    }

    #[test]
    fn a_record_in_memory_has_no_checksums() {
        for format in FORMATS {
            let mut bytes = vec![0xaa; 512];
            bytes[64..164].fill(5);
            encode_in_memory(&mut bytes, &new_record(format));
            let (header, key) = unchecked(&bytes).unverified_header().unwrap();
            assert_eq!((header.identity, key, header.meta), (IDENTITY, &b"hello"[..], meta(format)));
            assert_eq!(bytes[header.unverified_value_range(&bytes).unwrap()], [5; 100]);
            assert_eq!(unchecked(&bytes).header().unwrap_err(), RecordError::HeaderChecksum);
        }
    }

    #[test]
    fn any_flipped_bit_of_header_key_or_value_is_found() {
        for format in FORMATS {
            let good = record(format);
            for bit in (0..(48 + 5) * 8).chain(64 * 8..164 * 8) {
                let mut bytes = good.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                let found = unchecked(&bytes).header().and_then(|(header, _)| header.value_range(&bytes));
                assert!(found.is_err(), "{format:?}: bit {bit} of byte {}", bit / 8);
            }
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut random = Prng::new(1);
        for round in 0..40_000 {
            let mut bytes = record(FORMATS[round % 2]);
            let len = random.below(bytes.len() as u64 + 1) as usize;
            bytes.truncate(len);
            for _ in 0..random.below(4) {
                if let Some(byte) = bytes.get_mut(random.below(64) as usize) {
                    *byte = random.next_u64() as u8;
                }
            }
            if let Ok((header, _)) = unchecked(&bytes).unverified_header() {
                let _ = header.value_range(&bytes);
            }
        }
    }
}
