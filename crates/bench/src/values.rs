//! Keys and values generated from an index and a seed, so that a reader can verify every byte of a value.
//!
//! ```text
//! key:   0000000000001234                     the index in decimal, padded with zeros to the key's length
//! value: index u64 | mix(index, seed) u64 | pattern[from(index, seed)..]    cut off at the value's length
//! ```
//! Values are incompressible and differ from key to key; generating or checking one costs a copy or a
//! comparison and no random numbers.

use octokv_base::prng::mix64;
use octokv_base::{Key, Prng};

const HEADER_BYTES: usize = 16;
/// Number of offsets in the pattern at which values start: small enough to stay in the cache.
const PATTERN_OFFSETS: usize = 64 << 10;
/// The longest key, in bytes.
const KEY_BYTES_MAX: usize = octokv_base::KEY_BYTES_MAX;

/// The key of an index.
///
/// REQUIRES: the index has at most `key_bytes` decimal digits ([`crate::BenchConfig::validate`] ensures it).
pub fn key(index: u64, key_bytes: usize) -> Key {
    let mut bytes = [b'0'; KEY_BYTES_MAX];
    let (mut rest, mut at) = (index, key_bytes);
    while rest > 0 && at > 0 {
        at -= 1;
        bytes[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    Key::new(&bytes[..key_bytes]).expect("a validated configuration has no longer keys")
}

/// The index of a key; `None` if no index has it, whatever the length of keys.
pub fn index_of(key: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u64::from(byte - b'0'));
    key.iter().try_fold(0u64, |index, byte| index.checked_mul(10)?.checked_add(digit(byte)?))
}

/// A key that no index has, adjacent to the key of `index`: its last byte is no digit.
pub fn absent_key(index: u64, key_bytes: usize) -> Key {
    let mut bytes = [0; KEY_BYTES_MAX];
    bytes[..key_bytes].copy_from_slice(key(index, key_bytes).as_bytes());
    // '0' to '9' become 'p' to 'y'.
    bytes[key_bytes - 1] |= 0x40;
    Key::new(&bytes[..key_bytes]).expect("as long as the key of the index")
}

/// Generates and checks the values of one seed.
pub struct ValueGenerator {
    seed: u64,
    pattern: Vec<u8>,
}

impl ValueGenerator {
    /// Creates a generator of values of up to `value_bytes_max` bytes.
    pub fn new(seed: u64, value_bytes_max: usize) -> ValueGenerator {
        let mut pattern = vec![0; PATTERN_OFFSETS + value_bytes_max];
        Prng::new(seed).fill(&mut pattern);
        ValueGenerator { seed, pattern }
    }

    fn header_and_body(&self, index: u64, bytes: usize) -> ([u8; HEADER_BYTES], &[u8]) {
        let mixed = mix64(index ^ mix64(self.seed));
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&index.to_le_bytes());
        header[8..].copy_from_slice(&mixed.to_le_bytes());
        let start = mixed as usize % PATTERN_OFFSETS;
        (header, &self.pattern[start..start + bytes.saturating_sub(HEADER_BYTES)])
    }

    /// Fills `into` with the value of an index.
    pub fn fill(&self, index: u64, into: &mut [u8]) {
        let (header, rest) = self.header_and_body(index, into.len());
        let head = into.len().min(HEADER_BYTES);
        into[..head].copy_from_slice(&header[..head]);
        into[head..].copy_from_slice(rest);
    }

    /// Whether `value` is the value of an index.
    pub fn matches(&self, index: u64, value: &[u8]) -> bool {
        let (header, rest) = self.header_and_body(index, value.len());
        let head = value.len().min(HEADER_BYTES);
        value[..head] == header[..head] && value[head..] == *rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_index_in_decimal() {
        assert_eq!(key(1234, 16).as_bytes(), b"0000000000001234");
        assert_eq!(key(0, 1).as_bytes(), b"0");
        assert_eq!(key(7, 20).as_bytes(), b"00000000000000000007");
    }

    #[test]
    fn the_index_of_a_key_is_found_and_no_other_key_has_one() {
        for index in [0, 7, 1234, u64::MAX] {
            assert_eq!(index_of(key(index, 30).as_bytes()), Some(index));
        }
        for other in ["00123y", "18446744073709551616", " 1", "-1"] {
            assert_eq!(index_of(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn an_absent_key_belongs_to_no_index() {
        assert_eq!(absent_key(1239, 6).as_bytes(), b"00123y");
        assert_eq!(absent_key(0, 1).as_bytes(), b"p");
    }

    #[test]
    fn a_value_matches_its_index_only_and_to_the_last_byte() {
        let values = ValueGenerator::new(3, 5000);
        for bytes in [1, 7, 16, 17, 4096, 5000] {
            let mut value = vec![0; bytes];
            values.fill(9, &mut value);
            assert!(values.matches(9, &value));
            assert!(!values.matches(10, &value));
            assert!(bytes < 16 || !ValueGenerator::new(4, 5000).matches(9, &value));
            value[bytes - 1] ^= 1;
            assert!(!values.matches(9, &value));
        }
    }
}
