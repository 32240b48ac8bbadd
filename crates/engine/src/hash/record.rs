//! One record: header, key and value in whole units, as it lies on the device.
//!
//! ```text
//!   0  magic "OKVR"         16  stamp u64            36  value CRC-32C u32
//!   4  header CRC-32C u32   24  location u64 (unit)  40  key bytes u16   42 version u8   43 zero u8
//!   8  volume u64           32  value bytes u32      44  namespace u32
//!  48  key, zeros to value_offset(key bytes), value, zeros to the end of the last unit
//! ```
//! The header's checksum covers bytes 8 to the end of the key, so that a key can be compared from the
//! first block alone. The record names its own place (a misdirected write shows) and carries a stamp that
//! the index knows too (a stale read shows).

use crate::bug_injection::{self, InjectedBug};
use octokv_base::{Key, crc32c, value_offset};

const MAGIC: [u8; 4] = *b"OKVR";
const VERSION: u8 = 1;
/// The fixed part, in bytes.
pub const HEADER_BYTES: usize = octokv_base::key::RECORD_HEADER_BYTES;
const _: () = assert!(HEADER_BYTES == 44 + size_of::<u32>());
/// The longest header and key together, in bytes: reading this much of a record always gives its whole key.
pub const HEADER_AND_KEY_BYTES_MAX: usize = HEADER_BYTES + octokv_base::KEY_BYTES_MAX;

/// What tells one written record from any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordId {
    /// The volume it belongs to.
    pub volume_id: u64,
    /// Unique among all records ever written to the volume.
    pub sequence: u64,
    /// The unit that it begins at.
    pub location: u64,
    /// The namespace of its key.
    pub namespace: u32,
}

/// Why bytes are not the record that was looked for. Each is the same to a user: corrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// No magic, another version, or a length beyond the bytes.
    Malformed,
    /// The header's checksum does not match.
    HeaderChecksum,
    /// A record of another volume, place or time.
    WrongId,
    /// The value's checksum does not match.
    ValueChecksum,
}

/// A header that was checked.
#[derive(Clone, Copy, Debug)]
pub struct RecordHeader {
    /// What it is.
    pub identity: RecordId,
    /// The length of its value.
    pub value_bytes: usize,
    key_bytes: usize,
    value_crc: u32,
}

/// How many bytes a record of this shape takes, before rounding to units.
pub fn record_bytes(key_bytes: usize, value_bytes: usize) -> usize {
    value_offset(key_bytes) + value_bytes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Completes the record around the value that lies in `bytes` already, and clears what pads it.
pub fn encode(bytes: &mut [u8], identity: RecordId, key: &Key, value_bytes: usize) {
    let (key, offset) = (key.as_bytes(), value_offset(key.len()));
    let value_crc = crc32c(&bytes[offset..offset + value_bytes]);
    let (header, rest) = bytes.split_first_chunk_mut::<HEADER_BYTES>().expect("a record has a header");
    header[0..4].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&identity.volume_id.to_le_bytes());
    header[16..24].copy_from_slice(&identity.sequence.to_le_bytes());
    header[24..32].copy_from_slice(&identity.location.to_le_bytes());
    header[32..36].copy_from_slice(&(value_bytes as u32).to_le_bytes());
    header[36..40].copy_from_slice(&value_crc.to_le_bytes());
    header[40..42].copy_from_slice(&(key.len() as u16).to_le_bytes());
    header[42] = VERSION;
    header[43] = 0;
    header[44..48].copy_from_slice(&identity.namespace.to_le_bytes());
    rest[..key.len()].copy_from_slice(key);
    rest[key.len()..offset - HEADER_BYTES].fill(0);
    rest[offset - HEADER_BYTES + value_bytes..].fill(0);
    let header_crc = crc32c(&bytes[8..HEADER_BYTES + key.len()]);
    bytes[4..8].copy_from_slice(&header_crc.to_le_bytes());
}

/// Bytes read from a device, which may be anything.
pub struct UncheckedRecord<'a>(pub &'a [u8]);

impl<'a> UncheckedRecord<'a> {
    /// The header and key, once their checksum holds. The value may lie beyond the bytes.
    pub fn header(self) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let bytes = self.0;
        if bytes.len() < HEADER_BYTES || bytes[0..4] != MAGIC || bytes[42] != VERSION {
            return Err(RecordError::Malformed);
        }
        let key_end = HEADER_BYTES + usize::from(u16_at(bytes, 40));
        if key_end > bytes.len() {
            return Err(RecordError::Malformed);
        }
        if crc32c(&bytes[8..key_end]) != u32_at(bytes, 4) {
            return Err(RecordError::HeaderChecksum);
        }
        let identity = RecordId {
            volume_id: u64_at(bytes, 8),
            sequence: u64_at(bytes, 16),
            location: u64_at(bytes, 24),
            namespace: u32_at(bytes, 44),
        };
        let header = RecordHeader {
            identity,
            value_bytes: u32_at(bytes, 32) as usize,
            key_bytes: key_end - HEADER_BYTES,
            value_crc: u32_at(bytes, 36),
        };
        Ok((header, &bytes[HEADER_BYTES..key_end]))
    }
}

impl RecordHeader {
    /// Where in `bytes` the value lies, once its checksum holds too.
    pub fn value_range(&self, bytes: &[u8]) -> Result<std::ops::Range<usize>, RecordError> {
        let offset = value_offset(self.key_bytes);
        let range = offset..offset + self.value_bytes;
        let value = bytes.get(range.clone()).ok_or(RecordError::Malformed)?;
        if crc32c(value) != self.value_crc && !bug_injection::is_injected(InjectedBug::SkipValueChecksum) {
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
        encode(&mut bytes, IDENTITY, &Key::new(b"hello").unwrap(), 100);
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
