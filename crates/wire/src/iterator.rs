//! octokv's vendor commands over iterators, the bounds that create one, and the pairs that it returns.
//!
//! ```text
//! A1h create   data out = bounds      CDW10 their bytes     CDW11 bit 0 reverse, bit 1 keys only     DW0 the iterator
//! A2h next     data in = pairs        CDW10 buffer bytes    CDW11 iterator   CDW12 most pairs        DW0 count   DW1 bit 0 the end
//! A5h seek     data out = key         CDW10 its bytes       CDW11 iterator
//! A8h destroy                                               CDW11 iterator
//!
//! bounds   0 lower bytes u16   2 upper bytes u16   4 lower, upper            (0 bytes: open)
//! pairs    0 count u32         4 flags u32 (bit 0 the end)   then each { value bytes u32, key bytes u16, 0 u16, key, value, zeros up to a multiple of 8 }
//! ```
//! The end is in the data too: the Linux kernel's passthrough returns DW0 alone.
//! `docs/PROTOCOL.md` has the whole specification.

use crate::queue_entry::Sqe;
use crate::status::Status;
use crate::vendor::opcode;
use octokv_base::{KEY_BYTES_MAX, NamespaceId};
use zerocopy::byteorder::little_endian::U32;

/// Length of the header of bounds, in bytes.
pub const BOUNDS_HEADER_BYTES: usize = 4;
/// The longest bounds, in bytes.
pub const BOUNDS_BYTES_MAX: usize = BOUNDS_HEADER_BYTES + 2 * KEY_BYTES_MAX;
/// Length of the header of pairs, in bytes.
pub const PAIRS_HEADER_BYTES: usize = 8;
/// Length of the header of one pair, in bytes.
pub const PAIR_HEADER_BYTES: usize = 8;

const FLAG_REVERSE: u32 = 1 << 0;
const FLAG_KEYS_ONLY: u32 = 1 << 1;
const FLAG_END: u32 = 1 << 0;

/// A command over iterators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IteratorCommand {
    /// Creates an iterator. The data is [`IteratorBounds`].
    Create {
        /// Length of the bounds, in bytes.
        bounds_bytes: u16,
        /// Whether the highest key comes first.
        reverse: bool,
        /// Whether values are left out.
        keys_only: bool,
    },
    /// Reads the next pairs into the host's buffer.
    Next {
        /// The iterator.
        iterator: u32,
        /// Size of the host's buffer, in bytes.
        limit_bytes: u32,
        /// The most pairs, at least 1.
        pairs_max: u32,
    },
    /// Moves an iterator to a key. The data is the key.
    Seek {
        /// The iterator.
        iterator: u32,
        /// Length of the key, in bytes.
        key_bytes: u16,
    },
    /// Ends an iterator.
    Destroy {
        /// The iterator.
        iterator: u32,
    },
}

impl IteratorCommand {
    /// Whether an opcode is that of a command over iterators.
    pub fn has_opcode(opcode: u8) -> bool {
        matches!(
            opcode,
            opcode::ITERATOR_CREATE
                | opcode::ITERATOR_NEXT
                | opcode::ITERATOR_SEEK
                | opcode::ITERATOR_DESTROY
        )
    }

    /// Decodes an entry.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`]; [`Status::INVALID_FIELD`] for unknown flags, a buffer or bounds shorter than their header, or no pairs;
    /// [`Status::KV_INVALID_KEY_SIZE`] for a key that is empty or longer than [`KEY_BYTES_MAX`].
    pub fn check(sqe: &Sqe) -> Result<IteratorCommand, Status> {
        let (bytes, cdw11) = (sqe.cdw10.get(), sqe.cdw11.get());
        let invalid_field = || Status::INVALID_FIELD.do_not_retry();
        match sqe.opcode {
            opcode::ITERATOR_CREATE => {
                let is_possible = (BOUNDS_HEADER_BYTES..=BOUNDS_BYTES_MAX).contains(&(bytes as usize));
                if !is_possible || cdw11 & !(FLAG_REVERSE | FLAG_KEYS_ONLY) != 0 {
                    return Err(invalid_field());
                }
                Ok(IteratorCommand::Create {
                    bounds_bytes: bytes as u16,
                    reverse: cdw11 & FLAG_REVERSE != 0,
                    keys_only: cdw11 & FLAG_KEYS_ONLY != 0,
                })
            }
            opcode::ITERATOR_NEXT => {
                let pairs_max = sqe.cdw12.get();
                if (bytes as usize) < PAIRS_HEADER_BYTES || pairs_max == 0 {
                    return Err(invalid_field());
                }
                Ok(IteratorCommand::Next { iterator: cdw11, limit_bytes: bytes, pairs_max })
            }
            opcode::ITERATOR_SEEK => match bytes as usize {
                1..=KEY_BYTES_MAX => Ok(IteratorCommand::Seek { iterator: cdw11, key_bytes: bytes as u16 }),
                _ => Err(Status::KV_INVALID_KEY_SIZE.do_not_retry()),
            },
            opcode::ITERATOR_DESTROY => Ok(IteratorCommand::Destroy { iterator: cdw11 }),
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    /// Length of the data that the host sends, in bytes.
    pub fn host_data_bytes(&self) -> u16 {
        match *self {
            IteratorCommand::Create { bounds_bytes, .. } => bounds_bytes,
            IteratorCommand::Seek { key_bytes, .. } => key_bytes,
            IteratorCommand::Next { .. } | IteratorCommand::Destroy { .. } => 0,
        }
    }

    /// Encodes the entry of this command, its data pointer left empty.
    pub fn encode(&self, command_id: u16, namespace: NamespaceId) -> Sqe {
        let (opcode, cdw10, cdw11, cdw12) = match *self {
            IteratorCommand::Create { bounds_bytes, reverse, keys_only } => {
                let reverse = if reverse { FLAG_REVERSE } else { 0 };
                let keys_only = if keys_only { FLAG_KEYS_ONLY } else { 0 };
                (opcode::ITERATOR_CREATE, u32::from(bounds_bytes), reverse | keys_only, 0)
            }
            IteratorCommand::Next { iterator, limit_bytes, pairs_max } => {
                (opcode::ITERATOR_NEXT, limit_bytes, iterator, pairs_max)
            }
            IteratorCommand::Seek { iterator, key_bytes } => {
                (opcode::ITERATOR_SEEK, u32::from(key_bytes), iterator, 0)
            }
            IteratorCommand::Destroy { iterator } => (opcode::ITERATOR_DESTROY, 0, iterator, 0),
        };
        let mut sqe = Sqe::new(opcode, command_id);
        sqe.nsid = U32::new(namespace.0);
        sqe.cdw10 = U32::new(cdw10);
        sqe.cdw11 = U32::new(cdw11);
        sqe.cdw12 = U32::new(cdw12);
        sqe
    }
}

/// The bounds of an iterator; an empty one is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IteratorBounds<'a> {
    /// The lowest key.
    pub lower: &'a [u8],
    /// The key below which all keys are.
    pub upper: &'a [u8],
}

impl<'a> IteratorBounds<'a> {
    /// The bytes of the bounds. REQUIRES: neither is longer than [`KEY_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BOUNDS_HEADER_BYTES + self.lower.len() + self.upper.len());
        bytes.extend_from_slice(&(self.lower.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&(self.upper.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.lower);
        bytes.extend_from_slice(self.upper);
        bytes
    }

    /// Decodes bounds.
    ///
    /// # Errors
    /// [`Status::KV_INVALID_KEY_SIZE`] if one is longer than [`KEY_BYTES_MAX`]; [`Status::INVALID_FIELD`] if the bytes are not
    /// exactly those of the bounds, or if the upper one is below the lower one.
    pub fn check(bytes: &'a [u8]) -> Result<IteratorBounds<'a>, Status> {
        let invalid_field = Status::INVALID_FIELD.do_not_retry();
        let (header, keys) = bytes.split_first_chunk::<BOUNDS_HEADER_BYTES>().ok_or(invalid_field)?;
        let [lower_bytes, upper_bytes] = [[header[0], header[1]], [header[2], header[3]]]
            .map(|bytes| usize::from(u16::from_le_bytes(bytes)));
        if lower_bytes.max(upper_bytes) > KEY_BYTES_MAX {
            return Err(Status::KV_INVALID_KEY_SIZE.do_not_retry());
        }
        if keys.len() != lower_bytes + upper_bytes {
            return Err(invalid_field);
        }
        let (lower, upper) = keys.split_at(lower_bytes);
        if !upper.is_empty() && upper < lower {
            return Err(invalid_field);
        }
        Ok(IteratorBounds { lower, upper })
    }
}

/// Length of a pair with its padding, in bytes; `None` beyond what its header can say.
fn pair_bytes(key_bytes: usize, value_bytes: usize) -> Option<usize> {
    let is_possible = u16::try_from(key_bytes).is_ok() && u32::try_from(value_bytes).is_ok();
    is_possible.then(|| (PAIR_HEADER_BYTES + key_bytes + value_bytes).next_multiple_of(8))
}

/// Writes pairs into a buffer.
#[derive(Debug)]
pub struct PairListWriter<'a> {
    buffer: &'a mut [u8],
    used_bytes: usize,
    count: u32,
    pairs_max: u32,
}

impl<'a> PairListWriter<'a> {
    /// An empty list of at most `pairs_max` pairs in `buffer`; `None` if the buffer is smaller than the header.
    pub fn new(buffer: &'a mut [u8], pairs_max: u32) -> Option<PairListWriter<'a>> {
        buffer.get_mut(..PAIRS_HEADER_BYTES)?.fill(0);
        Some(PairListWriter { buffer, used_bytes: PAIRS_HEADER_BYTES, count: 0, pairs_max })
    }

    /// Whether a pair of these lengths in bytes fits. The last one needs no room for its padding.
    pub fn has_space(&self, key_bytes: usize, value_bytes: usize) -> bool {
        let free_bytes = self.buffer.len() - self.used_bytes;
        self.count < self.pairs_max
            && pair_bytes(key_bytes, value_bytes).is_some()
            && PAIR_HEADER_BYTES + key_bytes + value_bytes <= free_bytes
    }

    /// Appends a pair.
    ///
    /// # Panics
    /// If it has no space.
    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        assert!(self.has_space(key.len(), value.len()), "no space for {} and {} B", key.len(), value.len());
        let bytes = pair_bytes(key.len(), value.len()).expect("it has space");
        let end = (self.used_bytes + bytes).min(self.buffer.len());
        let pair = &mut self.buffer[self.used_bytes..end];
        pair[..4].copy_from_slice(&(value.len() as u32).to_le_bytes());
        pair[4..6].copy_from_slice(&(key.len() as u16).to_le_bytes());
        pair[6..8].fill(0);
        let (key_place, rest) = pair[PAIR_HEADER_BYTES..].split_at_mut(key.len());
        key_place.copy_from_slice(key);
        let (value_place, padding) = rest.split_at_mut(value.len());
        value_place.copy_from_slice(value);
        padding.fill(0);
        self.used_bytes = end;
        self.count += 1;
    }

    /// Number of pairs so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Writes the header, and gives the length of the list in bytes.
    pub fn finish(&mut self, is_end: bool) -> usize {
        let flags = if is_end { FLAG_END } else { 0 };
        self.buffer[..4].copy_from_slice(&self.count.to_le_bytes());
        self.buffer[4..8].copy_from_slice(&flags.to_le_bytes());
        self.used_bytes
    }
}

/// The length in bytes of a buffer that has room for one pair.
pub fn buffer_bytes_for(key_bytes: usize, value_bytes: usize) -> usize {
    PAIRS_HEADER_BYTES + PAIR_HEADER_BYTES + key_bytes + value_bytes
}

/// Pairs that all lie within their buffer.
#[derive(Clone, Copy, Debug)]
pub struct PairList<'a> {
    pairs: &'a [u8],
    count: u32,
    is_end: bool,
}

/// Pairs that are shorter than their count requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncatedPairs {
    /// Number of pairs in the header; 0 if the header itself is truncated.
    pub count: u32,
    /// Length of the buffer, in bytes.
    pub bytes: usize,
}

impl<'a> PairList<'a> {
    /// Checks that all pairs of a response lie within its bytes.
    ///
    /// # Errors
    /// [`TruncatedPairs`] if the header or a pair extends beyond them.
    pub fn check(bytes: &'a [u8]) -> Result<PairList<'a>, TruncatedPairs> {
        let truncated = |count| TruncatedPairs { count, bytes: bytes.len() };
        let (header, pairs) = bytes.split_first_chunk::<PAIRS_HEADER_BYTES>().ok_or(truncated(0))?;
        let [count, flags] = [0, 4].map(|at| u32_at(header, at));
        let mut rest = pairs;
        for _ in 0..count {
            rest = split_pair(rest).ok_or(truncated(count))?.1;
        }
        Ok(PairList { pairs, count, is_end: flags & FLAG_END != 0 })
    }

    /// Number of pairs.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether the iterator is behind its last pair.
    pub fn is_end(&self) -> bool {
        self.is_end
    }

    /// The pairs: keys with their values.
    pub fn pairs(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let mut rest = self.pairs;
        (0..self.count).map_while(move |_| {
            let (pair, behind) = split_pair(rest)?;
            rest = behind;
            Some(pair)
        })
    }
}

/// A key with its value.
type Pair<'a> = (&'a [u8], &'a [u8]);

/// The pair at the front, and what is behind its padding; `None` if it extends beyond the bytes.
fn split_pair(bytes: &[u8]) -> Option<(Pair<'_>, &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<PAIR_HEADER_BYTES>()?;
    let value_bytes = u32_at(header, 0) as usize;
    let key_bytes = usize::from(u16::from_le_bytes([header[4], header[5]]));
    let (key, rest) = rest.split_at_checked(key_bytes)?;
    let value = rest.get(..value_bytes)?;
    let behind = bytes.get(pair_bytes(key_bytes, value_bytes)?..).unwrap_or_default();
    Some(((key, value), behind))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn commands_round_trip_and_have_the_specified_fields() {
        let commands = [
            IteratorCommand::Create { bounds_bytes: 4, reverse: true, keys_only: false },
            IteratorCommand::Create { bounds_bytes: 2052, reverse: false, keys_only: true },
            IteratorCommand::Next { iterator: 7, limit_bytes: 8, pairs_max: 1 },
            IteratorCommand::Seek { iterator: u32::MAX, key_bytes: 1024 },
            IteratorCommand::Destroy { iterator: 3 },
        ];
        for command in commands {
            let sqe = command.encode(1, NamespaceId(1));
            assert_eq!(IteratorCommand::check(&sqe), Ok(command));
            assert!(IteratorCommand::has_opcode(sqe.opcode));
        }
        let next = commands[2].encode(1, NamespaceId(1));
        assert_eq!((next.opcode, next.cdw10.get(), next.cdw11.get(), next.cdw12.get()), (0xa2, 8, 7, 1));
        assert_eq!(commands[0].encode(1, NamespaceId(1)).cdw11.get(), 1);
        assert_eq!(commands.map(|command| command.host_data_bytes()), [4, 2052, 0, 1024, 0]);
    }

    #[test]
    fn fields_out_of_range_fail_with_their_status() {
        let fails = |command: IteratorCommand, change: fn(&mut Sqe), status: Status| {
            let mut sqe = command.encode(1, NamespaceId(1));
            change(&mut sqe);
            assert!(IteratorCommand::check(&sqe).unwrap_err().is(status), "{command:?}");
        };
        let create = IteratorCommand::Create { bounds_bytes: 4, reverse: false, keys_only: false };
        fails(create, |sqe| sqe.cdw10 = U32::new(3), Status::INVALID_FIELD);
        fails(create, |sqe| sqe.cdw10 = U32::new(2053), Status::INVALID_FIELD);
        fails(create, |sqe| sqe.cdw11 = U32::new(4), Status::INVALID_FIELD);
        let next = IteratorCommand::Next { iterator: 1, limit_bytes: 8, pairs_max: 1 };
        fails(next, |sqe| sqe.cdw10 = U32::new(7), Status::INVALID_FIELD);
        fails(next, |sqe| sqe.cdw12 = U32::new(0), Status::INVALID_FIELD);
        let seek = IteratorCommand::Seek { iterator: 1, key_bytes: 1 };
        fails(seek, |sqe| sqe.cdw10 = U32::new(0), Status::KV_INVALID_KEY_SIZE);
        fails(seek, |sqe| sqe.cdw10 = U32::new(1025), Status::KV_INVALID_KEY_SIZE);
        fails(seek, |sqe| sqe.opcode = 0x81, Status::INVALID_OPCODE);
    }

    #[test]
    fn bounds_round_trip_and_reversed_or_odd_ones_fail() {
        let longest = [7; KEY_BYTES_MAX];
        let open = IteratorBounds::default();
        let bounds = [
            open,
            IteratorBounds { lower: b"a", ..open },
            IteratorBounds { upper: b"b", ..open },
            IteratorBounds { lower: b"a", upper: b"a" },
            IteratorBounds { lower: &longest, upper: &longest },
        ];
        for bounds in bounds {
            let bytes = bounds.encode();
            assert_eq!(IteratorBounds::check(&bytes), Ok(bounds));
            assert!(IteratorBounds::check(&bytes[..bytes.len() - 1]).is_err());
            assert!(IteratorBounds::check(&[&bytes[..], &[0]].concat()).is_err());
        }
        assert_eq!(bounds[1].encode(), *b"\x01\0\0\0a");
        let reversed = IteratorBounds { lower: b"b", upper: b"a" }.encode();
        assert!(IteratorBounds::check(&reversed).unwrap_err().is(Status::INVALID_FIELD));
        assert!(IteratorBounds::check(&[1, 4, 0, 0]).unwrap_err().is(Status::KV_INVALID_KEY_SIZE));
    }

    #[test]
    fn pairs_have_the_specified_bytes() {
        let mut buffer = [0xff; 8 + 16 + 13];
        let mut list = PairListWriter::new(&mut buffer, 3).unwrap();
        assert!(list.has_space(2, 3));
        list.push(b"ab", b"xyz");
        assert!(list.has_space(1, 4) && !list.has_space(1, 5), "the last one needs no padding");
        list.push(b"c", b"1234");
        assert!(!list.has_space(0, 0), "no room for a header");
        assert_eq!((list.count(), list.finish(true)), (2, 37));
        let expected = b"\x02\0\0\0\x01\0\0\0\x03\0\0\0\x02\0\0\0abxyz\0\0\0\x04\0\0\0\x01\0\0\0c1234";
        assert_eq!(buffer, *expected);
        let list = PairList::check(&buffer).unwrap();
        assert!(list.is_end() && list.count() == 2);
        assert_eq!(list.pairs().collect::<Vec<_>>(), [(&b"ab"[..], &b"xyz"[..]), (b"c", b"1234")]);
        for end in 0..buffer.len() {
            assert!(PairList::check(&buffer[..end]).is_err(), "{end}");
        }
        assert_eq!(buffer_bytes_for(2, 3), 21);
        assert!(PairListWriter::new(&mut [0; 7], 1).is_none());
    }

    #[test]
    fn a_list_holds_at_most_so_many_pairs() {
        let mut buffer = [0; 100];
        let mut list = PairListWriter::new(&mut buffer, 1).unwrap();
        list.push(b"a", b"");
        assert!(!list.has_space(1, 0));
        assert_eq!(list.finish(false), 24);
        let list = PairList::check(&buffer[..24]).unwrap();
        assert_eq!((list.is_end(), list.pairs().count()), (false, 1));
    }

    #[test]
    fn random_entries_bounds_and_pairs_never_panic() {
        let mut random = Prng::new(5);
        for _ in 0..20_000 {
            let mut bytes = [0; 64];
            random.fill(&mut bytes);
            bytes[0] = bytes[0] & 0x0f | 0xa0;
            let _ = IteratorCommand::check(&Sqe::from_bytes(&bytes));
            let cut = random.below(64) as usize;
            bytes[1..4].fill(0);
            bytes[9..12].fill(0);
            bytes[13] = 0;
            let _ = IteratorBounds::check(&bytes[..cut]);
            if let Ok(list) = PairList::check(&bytes[..cut]) {
                assert_eq!(list.pairs().count(), list.count() as usize);
            }
        }
    }
}
