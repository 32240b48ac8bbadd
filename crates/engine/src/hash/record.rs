//! One record: header, key and value in whole units, as it lies on the device.
//!
//! ```text
//!   0  magic "OKVR"         16  sequence u64         36  value CRC-32C u32
//!   4  header CRC-32C u32   24  location u64 (unit)  40  key bytes u16   42 version u8   43 zero u8
//!   8  volume u64           32  value bytes u32      44  namespace u32
//!  48  key, zeros to value_offset(key bytes), value, zeros to the end of the last unit
//! ```
//! The header's checksum covers bytes 8 to the end of the key, so that a key can be compared without reading the value. A record on
//! a volatile device has no checksums, and any bytes in place of the zeros: memory is trusted, as its copy in any cache would be.
//! The record contains its own location, which detects misdirected writes, and a sequence number whose fingerprint is in
//! the index, which detects stale reads.

use crate::bug_injection::{self, InjectedBug};
use octokv_base::{RecordLayout, crc32c};
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVR";
const VERSION: u8 = 1;
/// The fixed part of a record, in bytes.
pub const HEADER_BYTES: usize = 48;
/// Where the buffer of a record has key and value.
pub const LAYOUT: RecordLayout = RecordLayout::new(HEADER_BYTES as u16);

/// The header of a record on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHeaderLayout {
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
const _: () = assert!(size_of::<RecordHeaderLayout>() == HEADER_BYTES);
const _: () = assert!(offset_of!(RecordHeaderLayout, namespace) == 44);
/// The first byte that the header's checksum covers.
const CHECKED_FROM: usize = offset_of!(RecordHeaderLayout, volume_id);

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
    /// The namespace of its key.
    pub namespace: u32,
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
pub fn encode(bytes: &mut [u8], identity: RecordId, key: &[u8], value_bytes: usize) {
    let offset = LAYOUT.value_offset(key.len());
    let value_crc = crc32c(&bytes[offset..offset + value_bytes]);
    let rest = encode_header(bytes, identity, key, value_bytes, value_crc);
    rest[key.len()..offset - HEADER_BYTES].fill(0);
    rest[offset - HEADER_BYTES + value_bytes..].fill(0);
    let header_crc = crc32c(&bytes[CHECKED_FROM..HEADER_BYTES + key.len()]);
    bytes[4..8].copy_from_slice(&header_crc.to_le_bytes());
}

/// Encodes a record that stays in memory, around its value: without checksums, which are not compared there, and with whatever
/// is in the padding.
///
/// # Panics
/// If `bytes` is shorter than the record.
#[inline]
pub fn encode_in_memory(bytes: &mut [u8], identity: RecordId, key: &[u8], value_bytes: usize) {
    assert!(record_bytes(key.len(), value_bytes) <= bytes.len(), "a record of {value_bytes} B of value");
    encode_header(bytes, identity, key, value_bytes, 0);
}

/// Encodes header and key, without the header's checksum. Gives the bytes behind the header.
#[inline]
fn encode_header<'a>(
    bytes: &'a mut [u8],
    identity: RecordId,
    key: &[u8],
    value_bytes: usize,
    value_crc: u32,
) -> &'a mut [u8] {
    let (layout, rest) = RecordHeaderLayout::mut_from_prefix(bytes).expect("a record has a header");
    *layout = RecordHeaderLayout {
        magic: MAGIC,
        header_crc: U32::ZERO,
        volume_id: identity.volume_id.into(),
        sequence: identity.sequence.into(),
        location: identity.location.into(),
        value_bytes: (value_bytes as u32).into(),
        value_crc: value_crc.into(),
        key_bytes: (key.len() as u16).into(),
        version: VERSION,
        zero: 0,
        namespace: identity.namespace.into(),
    };
    rest[..key.len()].copy_from_slice(key);
    rest
}

/// Bytes read from a device, not validated.
pub struct UncheckedRecord<'a>(pub &'a [u8]);

impl<'a> UncheckedRecord<'a> {
    /// The header and key, if their checksum is valid. The bytes need not include the value.
    ///
    /// # Errors
    /// [`RecordError::Malformed`] or [`RecordError::HeaderChecksum`].
    pub fn header(self) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let (header, key) = UncheckedRecord(self.0).unverified_header()?;
        let (layout, _) = RecordHeaderLayout::ref_from_prefix(self.0).map_err(|_| RecordError::Malformed)?;
        if crc32c(&self.0[CHECKED_FROM..HEADER_BYTES + key.len()]) != layout.header_crc.get() {
            return Err(RecordError::HeaderChecksum);
        }
        Ok((header, key))
    }

    /// The header and key, without their checksum: of a record in memory. The bytes need not include the value.
    ///
    /// # Errors
    /// [`RecordError::Malformed`].
    #[inline]
    pub fn unverified_header(self) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let bytes = self.0;
        let (layout, _) = RecordHeaderLayout::ref_from_prefix(bytes).map_err(|_| RecordError::Malformed)?;
        let key_end = HEADER_BYTES + usize::from(layout.key_bytes.get());
        if layout.magic != MAGIC || layout.version != VERSION || key_end > bytes.len() {
            return Err(RecordError::Malformed);
        }
        let identity = RecordId {
            volume_id: layout.volume_id.get(),
            sequence: layout.sequence.get(),
            location: layout.location.get(),
            namespace: layout.namespace.get(),
        };
        let header = RecordHeader {
            identity,
            value_bytes: layout.value_bytes.get() as usize,
            key_bytes: key_end - HEADER_BYTES,
            value_crc: layout.value_crc.get(),
        };
        Ok((header, &bytes[HEADER_BYTES..key_end]))
    }
}

impl RecordHeader {
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

    /// The range of the value in `bytes`, if its checksum is valid.
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

    const IDENTITY: RecordId = RecordId { volume_id: 7, sequence: 8, location: 9, namespace: 1 };

    fn record() -> Vec<u8> {
        let mut bytes = vec![0xaa; 4096];
        bytes[64..164].fill(5);
        encode(&mut bytes, IDENTITY, b"hello", 100);
        bytes
    }

    #[test]
    fn a_record_gives_back_its_key_value_and_identity() {
        let bytes = record();
        let (header, key) = UncheckedRecord(&bytes).header().unwrap();
        assert_eq!((header.identity, key), (IDENTITY, &b"hello"[..]));
        assert_eq!(bytes[header.value_range(&bytes).unwrap()], [5; 100]);
        assert!(bytes[164..].iter().all(|&byte| byte == 0), "no old bytes reach the device");
    }

    #[test]
    fn a_record_in_memory_has_no_checksums() {
        let mut bytes = vec![0xaa; 512];
        bytes[64..164].fill(5);
        encode_in_memory(&mut bytes, IDENTITY, b"hello", 100);
        let (header, key) = UncheckedRecord(&bytes).unverified_header().unwrap();
        assert_eq!((header.identity, key), (IDENTITY, &b"hello"[..]));
        assert_eq!(bytes[header.unverified_value_range(&bytes).unwrap()], [5; 100]);
        assert_eq!(UncheckedRecord(&bytes).header().unwrap_err(), RecordError::HeaderChecksum);
    }

    #[test]
    fn any_flipped_bit_of_header_key_or_value_is_found() {
        let good = record();
        for bit in (0..(48 + 5) * 8).chain(64 * 8..164 * 8) {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = UncheckedRecord(&bytes).header().and_then(|(header, _)| header.value_range(&bytes));
            assert!(found.is_err() || bit / 8 == 43, "bit {bit} of byte {}", bit / 8);
        }
    }

    #[test]
    fn no_bytes_panic() {
        let mut random = Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes = record();
            let len = random.below(bytes.len() as u64 + 1) as usize;
            bytes.truncate(len);
            for _ in 0..random.below(4) {
                if let Some(byte) = bytes.get_mut(random.below(64) as usize) {
                    *byte = random.next_u64() as u8;
                }
            }
            if let Ok((header, _)) = UncheckedRecord(&bytes).header() {
                let _ = header.value_range(&bytes);
            }
        }
    }
}
