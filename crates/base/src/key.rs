//! Keys: byte strings of 1 to [`KEY_BYTES_MAX`] arbitrary bytes.
//!
//! A key of up to 16 bytes, the maximum of the NVMe Key Value command set, is stored inline; a longer key
//! (octokv's vendor commands) is on the heap.

use std::fmt;

/// The maximum length of a key in any command, in bytes.
pub const KEY_BYTES_MAX: usize = 1024;
/// The maximum length of a [`ShortKey`], in bytes.
const INLINE_BYTES: usize = 16;

/// A key. Ordered bytewise.
#[derive(Clone)]
pub struct Key(KeyRepr);

#[derive(Clone)]
enum KeyRepr {
    Inline(ShortKey),
    Heap(Box<[u8]>),
}

/// A key of at most 16 bytes, as a command of the NVMe Key Value command set carries it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ShortKey {
    len: u8,
    /// Zeros behind the key.
    bytes: [u8; INLINE_BYTES],
}

impl ShortKey {
    /// Copies `bytes` into a key. `None` if there are more than 16.
    pub fn new(bytes: &[u8]) -> Option<ShortKey> {
        let mut padded = [0; INLINE_BYTES];
        padded.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(ShortKey { len: bytes.len() as u8, bytes: padded })
    }

    /// The first `len` of these bytes. `None` if that is more than 16.
    #[inline]
    pub fn from_padded(padded: [u8; INLINE_BYTES], len: u8) -> Option<ShortKey> {
        if usize::from(len) == INLINE_BYTES {
            // Most keys of such commands are as long as they can be.
            return Some(ShortKey { len, bytes: padded });
        }
        if usize::from(len) > INLINE_BYTES {
            return None;
        }
        // Shifts the bytes behind the key out.
        let unused_bits = (INLINE_BYTES as u32 - u32::from(len)) * 8;
        let kept = u128::MAX.checked_shr(unused_bits).unwrap_or(0);
        Some(ShortKey { len, bytes: (u128::from_le_bytes(padded) & kept).to_le_bytes() })
    }

    /// The key's bytes.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The key's bytes, and zeros behind them.
    pub fn padded(&self) -> [u8; INLINE_BYTES] {
        self.bytes
    }

    /// The length in bytes, at most 16.
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Whether the key is empty. Only the start key of a listing is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl From<ShortKey> for Key {
    fn from(key: ShortKey) -> Key {
        Key(KeyRepr::Inline(key))
    }
}

impl fmt::Debug for ShortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&Key::from(*self), f)
    }
}

impl Key {
    /// Copies `bytes` into a key. `None` if there are more than [`KEY_BYTES_MAX`]. The empty key is allowed,
    /// as the start key of a listing.
    pub fn new(bytes: &[u8]) -> Option<Key> {
        if let Some(short) = ShortKey::new(bytes) {
            Some(short.into())
        } else if bytes.len() <= KEY_BYTES_MAX {
            Some(Key(KeyRepr::Heap(bytes.into())))
        } else {
            None
        }
    }

    /// The key, if it has at most 16 bytes.
    pub fn as_short(&self) -> Option<ShortKey> {
        match self.0 {
            KeyRepr::Inline(short) => Some(short),
            KeyRepr::Heap(_) => None,
        }
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            KeyRepr::Inline(short) => short.as_bytes(),
            KeyRepr::Heap(bytes) => bytes,
        }
    }

    /// The length in bytes, at most [`KEY_BYTES_MAX`].
    pub fn len(&self) -> usize {
        self.as_bytes().len()
    }

    /// The memory that the key takes outside of itself, in bytes as allocated.
    pub fn heap_bytes(&self) -> usize {
        match &self.0 {
            KeyRepr::Inline { .. } => 0,
            KeyRepr::Heap(bytes) => (bytes.len() + 8).next_multiple_of(16),
        }
    }

    /// Whether the key is empty. Only the start key of a listing is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}
impl Eq for Key {}
impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Key {
    fn cmp(&self, other: &Key) -> std::cmp::Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}
impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Display for Key {
    /// Text if every byte is printable ASCII, else `0x` and hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.as_bytes();
        if !bytes.is_empty() && bytes.iter().all(|b| b.is_ascii_graphic()) {
            for &byte in bytes {
                write!(f, "{}", char::from(byte))?;
            }
            return Ok(());
        }
        f.write_str("0x")?;
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// Where a record's buffer has its key and value: behind the header, whose size is the engine's. The engine completes the
/// record in place and writes it without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    header_bytes: u16,
}

impl RecordLayout {
    /// The layout of records with a header of this size.
    pub const fn new(header_bytes: u16) -> RecordLayout {
        RecordLayout { header_bytes }
    }

    /// The offset of the key in the buffer, in bytes.
    pub const fn key_offset(self) -> usize {
        self.header_bytes as usize
    }

    /// The offset of the value behind a key of this length, in bytes, a multiple of 64.
    #[inline]
    pub const fn value_offset(self, key_bytes: usize) -> usize {
        (self.header_bytes as usize + key_bytes).next_multiple_of(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_hold_their_bytes_inline_and_on_the_heap() {
        for len in [0, 1, 15, 16, 17, 1024] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            assert_eq!(Key::new(&bytes).unwrap().as_bytes(), bytes);
        }
        assert!(Key::new(&[0; 1025]).is_none());
    }

    #[test]
    fn a_short_key_ends_where_its_length_says() {
        let padded: [u8; 16] = std::array::from_fn(|at| at as u8 + 1);
        for len in 0..=16 {
            let key = ShortKey::from_padded(padded, len).unwrap();
            assert_eq!((key.as_bytes(), key.len()), (&padded[..usize::from(len)], usize::from(len)));
            assert_eq!(Some(key), ShortKey::new(&padded[..usize::from(len)]));
            assert!(key.padded()[usize::from(len)..].iter().all(|&byte| byte == 0));
        }
        assert!(ShortKey::from_padded(padded, 17).is_none() && ShortKey::new(&[0; 17]).is_none());
    }

    #[test]
    fn keys_order_as_their_bytes() {
        let key = |b: &[u8]| Key::new(b).unwrap();
        assert!(key(b"a") < key(b"aa"));
        assert!(key(&[0; 17]) < key(b"a"));
    }

    #[test]
    fn keys_print_as_text_or_hexadecimal() {
        assert_eq!(Key::new(b"hello").unwrap().to_string(), "hello");
        assert_eq!(Key::new(&[0, 255]).unwrap().to_string(), "0x00ff");
    }
}
