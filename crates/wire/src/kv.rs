//! The Key Value command set (Key Value Command Set 1.3): the fields of each command and the key list.
//!
//! ```text
//! SQE   0 opcode   8..16 key bytes 0-7   40 CDW10 bytes   44 key length   45 options   56..64 key bytes 8-15
//! List  0 count u32, then each  { length u16, key, zeros up to a multiple of 4 }
//! ```
//! KV opcodes 01h and 02h equal NVM Write and Read: dispatch on the namespace's command set. Nonzero reserved fields are
//! accepted, because deployed hosts send them.

use crate::queue_entry::Sqe;
use crate::status::Status;
use octokv_base::ShortKey;
use zerocopy::byteorder::little_endian::U32;

/// The longest key of a standard command, in bytes.
pub const KEY_BYTES_MAX: usize = 16;

/// Opcodes of the command set.
pub mod opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Store.
    pub const STORE: u8 = 0x01;
    /// Retrieve.
    pub const RETRIEVE: u8 = 0x02;
    /// List.
    pub const LIST: u8 = 0x06;
    /// Delete.
    pub const DELETE: u8 = 0x10;
    /// Exist.
    pub const EXIST: u8 = 0x14;
}

/// Condition of a Store on the presence of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreMode {
    /// Store unconditionally.
    #[default]
    Upsert,
    /// Store only if the key does not exist, else fail with [`Status::KV_KEY_EXISTS`].
    AddOnly,
    /// Store only if the key exists, else fail with [`Status::KV_KEY_DOES_NOT_EXIST`].
    UpdateOnly,
}

const UPDATE_ONLY: u8 = 1;
const ADD_ONLY: u8 = 2;
const DO_NOT_COMPRESS: u8 = 4;

/// Options of a Store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// Condition on the presence of the key.
    pub mode: StoreMode,
    /// Whether the controller must not compress the value.
    pub do_not_compress: bool,
}

impl StoreOptions {
    /// Decodes the options byte.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`] if both add only and update only are set.
    #[inline]
    pub fn check(options: u8) -> Result<StoreOptions, Status> {
        let mode = match options & (UPDATE_ONLY | ADD_ONLY) {
            0 => StoreMode::Upsert,
            UPDATE_ONLY => StoreMode::UpdateOnly,
            ADD_ONLY => StoreMode::AddOnly,
            _ => return Err(Status::INVALID_FIELD.do_not_retry()),
        };
        Ok(StoreOptions { mode, do_not_compress: options & DO_NOT_COMPRESS != 0 })
    }

    /// Encodes the options byte.
    pub fn to_bits(self) -> u8 {
        let mode = match self.mode {
            StoreMode::Upsert => 0,
            StoreMode::AddOnly => ADD_ONLY,
            StoreMode::UpdateOnly => UPDATE_ONLY,
        };
        mode | if self.do_not_compress { DO_NOT_COMPRESS } else { 0 }
    }
}

/// One command of the Key Value command set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCommand {
    /// Makes all completed Stores and Deletes durable.
    Flush,
    /// Stores a value, which is the command's data.
    Store {
        /// Key, 1 to 16 bytes.
        key: ShortKey,
        /// Condition on the key, and whether the value may be compressed.
        options: StoreOptions,
        /// Length of the value, in bytes.
        value_bytes: u32,
    },
    /// Reads a value. DW0 of the completion is its full length.
    Retrieve {
        /// Key, 1 to 16 bytes.
        key: ShortKey,
        /// Size of the host's buffer, in bytes.
        limit_bytes: u32,
    },
    /// Deletes a key.
    Delete {
        /// Key, 1 to 16 bytes.
        key: ShortKey,
    },
    /// Tests whether a key exists.
    Exist {
        /// Key, 1 to 16 bytes.
        key: ShortKey,
    },
    /// Lists keys.
    List {
        /// First key of the list, inclusive; empty for the beginning.
        start: ShortKey,
        /// Size of the host's buffer, in bytes.
        limit_bytes: u32,
    },
}

impl KvCommand {
    /// Decodes an entry for a Key Value namespace.
    ///
    /// # Errors
    /// The status that fails the command: [`Status::INVALID_OPCODE`], [`Status::KV_INVALID_KEY_SIZE`] or
    /// [`Status::INVALID_FIELD`].
    #[inline]
    pub fn check(sqe: &Sqe) -> Result<KvCommand, Status> {
        let limit_bytes = sqe.cdw10.get();
        Ok(match sqe.opcode {
            opcode::FLUSH => KvCommand::Flush,
            opcode::STORE => KvCommand::Store {
                key: nonempty_key(sqe)?,
                options: StoreOptions::check((sqe.cdw11.get() >> 8) as u8)?,
                value_bytes: limit_bytes,
            },
            opcode::RETRIEVE => KvCommand::Retrieve { key: nonempty_key(sqe)?, limit_bytes },
            opcode::DELETE => KvCommand::Delete { key: nonempty_key(sqe)? },
            opcode::EXIST => KvCommand::Exist { key: nonempty_key(sqe)? },
            opcode::LIST => KvCommand::List { start: key_or_empty(sqe)?, limit_bytes },
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        })
    }

    /// Opcode of this command.
    pub fn opcode(&self) -> u8 {
        match self {
            KvCommand::Flush => opcode::FLUSH,
            KvCommand::Store { .. } => opcode::STORE,
            KvCommand::Retrieve { .. } => opcode::RETRIEVE,
            KvCommand::Delete { .. } => opcode::DELETE,
            KvCommand::Exist { .. } => opcode::EXIST,
            KvCommand::List { .. } => opcode::LIST,
        }
    }

    /// Encodes the entry of this command, its data pointer left empty.
    pub fn encode(&self, command_id: u16, namespace: octokv_base::NamespaceId) -> Sqe {
        let mut sqe = Sqe::new(self.opcode(), command_id);
        sqe.nsid = U32::new(namespace.0);
        match self {
            KvCommand::Flush => {}
            KvCommand::Store { key, options, value_bytes } => {
                set_key(&mut sqe, key, options.to_bits());
                sqe.cdw10 = U32::new(*value_bytes);
            }
            KvCommand::Retrieve { key, limit_bytes } | KvCommand::List { start: key, limit_bytes } => {
                set_key(&mut sqe, key, 0);
                sqe.cdw10 = U32::new(*limit_bytes);
            }
            KvCommand::Delete { key } | KvCommand::Exist { key } => set_key(&mut sqe, key, 0),
        }
        sqe
    }
}

/// Sets the key and the options byte of a KV command.
pub fn set_key(sqe: &mut Sqe, key: &ShortKey, options: u8) {
    let padded = key.padded();
    let word = |at: usize| U32::from_bytes([padded[at], padded[at + 1], padded[at + 2], padded[at + 3]]);
    sqe.cdw2 = word(0);
    sqe.cdw3 = word(4);
    sqe.cdw14 = word(8);
    sqe.cdw15 = word(12);
    sqe.cdw11 = U32::new(key.len() as u32 | u32::from(options) << 8);
}

#[inline]
fn key_or_empty(sqe: &Sqe) -> Result<ShortKey, Status> {
    let words = [sqe.cdw2, sqe.cdw3, sqe.cdw14, sqe.cdw15];
    ShortKey::from_padded(zerocopy::transmute!(words), sqe.cdw11.get() as u8)
        .ok_or(Status::KV_INVALID_KEY_SIZE.do_not_retry())
}

#[inline]
fn nonempty_key(sqe: &Sqe) -> Result<ShortKey, Status> {
    match key_or_empty(sqe)? {
        key if key.is_empty() => Err(Status::KV_INVALID_KEY_SIZE.do_not_retry()),
        key => Ok(key),
    }
}

/// Length of one entry of a key list, in bytes.
pub const fn list_entry_bytes(key_bytes: usize) -> usize {
    (2 + key_bytes).next_multiple_of(4)
}

/// Length of the header of a key list, in bytes.
pub const LIST_HEADER_BYTES: usize = 4;

/// Writes a key list into a buffer. It holds whole keys only.
pub struct KeyListWriter<'a> {
    buffer: &'a mut [u8],
    used_bytes: usize,
    count: u32,
}

impl<'a> KeyListWriter<'a> {
    /// An empty list in `buffer`; `None` if the buffer is smaller than the header.
    pub fn new(buffer: &'a mut [u8]) -> Option<KeyListWriter<'a>> {
        buffer.get_mut(..LIST_HEADER_BYTES)?.fill(0);
        Some(KeyListWriter { buffer, used_bytes: LIST_HEADER_BYTES, count: 0 })
    }

    /// Appends a key if it fits into the rest of the buffer.
    #[must_use = "false means that the key is not in the list"]
    pub fn push(&mut self, key: &[u8]) -> bool {
        let (Ok(len), end) = (u16::try_from(key.len()), self.used_bytes + list_entry_bytes(key.len())) else {
            return false;
        };
        let Some(entry) = self.buffer.get_mut(self.used_bytes..end) else { return false };
        let (length, rest) = entry.split_at_mut(2);
        length.copy_from_slice(&len.to_le_bytes());
        rest[..key.len()].copy_from_slice(key);
        rest[key.len()..].fill(0);
        self.used_bytes = end;
        self.count += 1;
        self.buffer[..LIST_HEADER_BYTES].copy_from_slice(&self.count.to_le_bytes());
        true
    }

    /// Length of the list so far, in bytes.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Number of keys in the list.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// A key list as received.
#[derive(Clone, Copy)]
pub struct UncheckedKeyList<'a>(pub &'a [u8]);

/// A key list whose keys all lie within its buffer.
#[derive(Clone, Copy, Debug)]
pub struct KeyList<'a> {
    entries: &'a [u8],
    count: u32,
}

/// A key list that is shorter than its count requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncatedKeyList {
    /// Number of keys in the header; 0 if the header itself is truncated.
    pub count: u32,
    /// Length of the buffer, in bytes.
    pub bytes: usize,
}

impl<'a> UncheckedKeyList<'a> {
    /// Checks that all keys lie within the buffer.
    ///
    /// # Errors
    /// [`TruncatedKeyList`] if the header or a key extends beyond the buffer.
    pub fn check(self) -> Result<KeyList<'a>, TruncatedKeyList> {
        let short = |count| TruncatedKeyList { count, bytes: self.0.len() };
        let (head, entries) = self.0.split_first_chunk::<LIST_HEADER_BYTES>().ok_or(short(0))?;
        let count = u32::from_le_bytes(*head);
        let mut rest = entries;
        for _ in 0..count {
            (_, rest) = split_key(rest).ok_or(short(count))?;
        }
        Ok(KeyList { entries, count })
    }
}

fn split_key(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let len = usize::from(u16::from_le_bytes(*length));
    let key = rest.get(..len)?;
    // The padding of the last key may be missing.
    let next = list_entry_bytes(len).min(bytes.len());
    Some((key, &bytes[next..]))
}

impl<'a> KeyList<'a> {
    /// Number of keys.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Iterates over the keys in list order.
    pub fn keys(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.entries;
        (0..self.count).map_while(move |_| {
            let (key, after) = split_key(rest)?;
            rest = after;
            Some(key)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::{NamespaceId, Prng};
    use zerocopy::IntoBytes;

    fn key(bytes: &[u8]) -> ShortKey {
        ShortKey::new(bytes).unwrap()
    }

    #[test]
    fn a_key_is_encoded_as_by_the_linux_kernel() {
        let command = KvCommand::Store {
            key: key(b"hello"),
            options: StoreOptions { mode: StoreMode::UpdateOnly, do_not_compress: true },
            value_bytes: 4096,
        };
        let sqe = command.encode(3, NamespaceId(1));
        assert_eq!((sqe.cdw2.get(), sqe.cdw3.get()), (0x6c6c_6568, 0x6f));
        assert_eq!((sqe.cdw10.get(), sqe.cdw11.get()), (4096, 0x0505));
        let long = KvCommand::Exist { key: key(b"0123456789abcdef") }.encode(3, NamespaceId(1));
        assert_eq!(&long.as_bytes()[8..16], b"01234567");
        assert_eq!(&long.as_bytes()[56..64], b"89abcdef");
    }

    #[test]
    fn commands_round_trip() {
        let options = StoreOptions { mode: StoreMode::AddOnly, do_not_compress: false };
        let commands = [
            KvCommand::Flush,
            KvCommand::Store { key: key(b"k"), options, value_bytes: 0 },
            KvCommand::Retrieve { key: key(&[0; 16]), limit_bytes: u32::MAX },
            KvCommand::Delete { key: key(b"kk") },
            KvCommand::Exist { key: key(b"kkk") },
            KvCommand::List { start: key(b""), limit_bytes: 8 },
        ];
        for command in commands {
            assert_eq!(KvCommand::check(&command.encode(1, NamespaceId(2))), Ok(command));
        }
    }

    #[test]
    fn invalid_fields_fail_with_their_status() {
        let mut sqe = KvCommand::Exist { key: key(b"k") }.encode(1, NamespaceId(1));
        sqe.cdw11 = U32::new(0);
        assert!(KvCommand::check(&sqe).unwrap_err().is(Status::KV_INVALID_KEY_SIZE));
        sqe.cdw11 = U32::new(17);
        assert!(KvCommand::check(&sqe).unwrap_err().is(Status::KV_INVALID_KEY_SIZE));
        sqe.opcode = opcode::STORE;
        sqe.cdw11 = U32::new(0x0301);
        assert!(KvCommand::check(&sqe).unwrap_err().is(Status::INVALID_FIELD));
        sqe.opcode = 0x0d;
        assert!(KvCommand::check(&sqe).unwrap_err().is(Status::INVALID_OPCODE));
    }

    #[test]
    fn nonzero_reserved_fields_are_accepted() {
        let mut sqe = KvCommand::Retrieve { key: key(b"k"), limit_bytes: 4096 }.encode(1, NamespaceId(1));
        sqe.cdw11 = U32::new(sqe.cdw11.get() | 0xffff_ff00);
        sqe.cdw12 = U32::new(77);
        let read = KvCommand::check(&sqe).unwrap();
        assert_eq!(read, KvCommand::Retrieve { key: key(b"k"), limit_bytes: 4096 });
    }

    #[test]
    fn a_list_holds_whole_keys_padded_to_four() {
        let mut buffer = [0xff; 21];
        let mut list = KeyListWriter::new(&mut buffer).unwrap();
        assert!(list.push(b"ab") && list.push(b"abc") && list.push(b""));
        assert!(!list.push(b""), "one byte is left");
        assert_eq!((list.used_bytes(), list.count()), (20, 3));
        assert_eq!(buffer[..20], *b"\x03\0\0\0\x02\0ab\x03\0abc\0\0\0\0\0\0\0");
        let read: Vec<&[u8]> = UncheckedKeyList(&buffer).check().unwrap().keys().collect();
        assert_eq!(read, [b"ab".as_slice(), b"abc", b""]);
        assert!(KeyListWriter::new(&mut [0; 3]).is_none());
    }

    #[test]
    fn a_list_with_a_count_beyond_its_bytes_is_truncated() {
        assert_eq!(UncheckedKeyList(&[1, 0]).check().unwrap_err(), TruncatedKeyList { count: 0, bytes: 2 });
        let short = [2, 0, 0, 0, 2, 0, b'a', b'b'];
        assert_eq!(UncheckedKeyList(&short).check().unwrap_err(), TruncatedKeyList { count: 2, bytes: 8 });
    }

    #[test]
    fn random_entries_and_lists_never_panic() {
        let mut random = Prng::new(2);
        for _ in 0..20_000 {
            let mut bytes = [0; 64];
            random.fill(&mut bytes);
            bytes[0] &= 0x17;
            let _ = KvCommand::check(&Sqe::from_bytes(&bytes));
            let cut = random.below(64) as usize;
            bytes[1..4].fill(0);
            bytes[5] = 0;
            if let Ok(list) = UncheckedKeyList(&bytes[..cut]).check() {
                assert_eq!(list.keys().count(), list.count() as usize);
            }
        }
    }
}
