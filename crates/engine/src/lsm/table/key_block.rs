//! Blocks of entries in order, with prefix-compressed keys: data blocks and the index of a table are such blocks.
//!
//! ```text
//!   entry │ entry │ … │ offset of each restart point, u32 │ number of restart points u32
//!   entry: shared varint │ unshared varint │ unshared bytes of the key │ body
//! ```
//! The key of an entry is the first `shared` bytes of the key before it, and its unshared bytes. Entries share all that they can, so that a search
//! compares few bytes; those at restart points share nothing, so that it can begin there. A body has the sequence number of its entry.
//!
//! In: positions and bodies in order. Out: the same, from any place in both directions.
//! Invariants of a [`KeyBlock`], which [`KeyBlock::decode`] checks once for all later reads: it has an entry; entries are in order and
//! fill the space up to the restart points; those are entries, the first entry among them.
//! Tested below, by the tests of whole tables, and by the fuzz target `table_block`.

use crate::lsm::entry::{Position, push_varint, take_varint};
use octokv_base::KEY_BYTES_MAX;
use std::cmp::Ordering;
use std::marker::PhantomData;

/// Entries from one restart point to the next.
const RESTART_INTERVAL: u32 = 16;
/// The most bytes of an entry in front of its body, with an offset among the restart points.
pub const KEY_OVERHEAD_MAX: usize = 2 + 2 + size_of::<u32>();
/// The most bytes of a block besides its entries and the offsets of restart points but the first.
pub const BLOCK_OVERHEAD_MAX: usize = 2 * size_of::<u32>();

/// What an entry of a block has besides its key.
pub trait BlockBody: Copy {
    /// The body at `at`, and where it ends; `None` if there is none.
    fn decode(bytes: &[u8], at: usize) -> Option<(Self, usize)>;
    /// Where the body at `at` ends. REQUIRES: decode has found one there.
    fn end(bytes: &[u8], at: usize) -> Option<usize> {
        Self::decode(bytes, at).map(|(_, end)| end)
    }
    /// The sequence number of the entry.
    fn sequence(&self) -> u64;
}

/// Builds the bytes of one block after the other.
#[derive(Default)]
pub struct KeyBlockBuilder {
    bytes: Vec<u8>,
    restarts: Vec<u32>,
    since_restart: u32,
    last_key: Vec<u8>,
}

impl KeyBlockBuilder {
    /// Appends an entry, whose body `push_body` appends. REQUIRES: entries come in order, and the caller checks it.
    pub fn push(&mut self, key: &[u8], push_body: impl FnOnce(&mut Vec<u8>)) {
        assert!(key.len() <= KEY_BYTES_MAX, "a key of {} bytes", key.len());
        let shared = match self.restarts.is_empty() || self.since_restart == RESTART_INTERVAL {
            true => {
                self.restarts.push(self.bytes.len() as u32);
                self.since_restart = 0;
                0
            }
            false => shared_bytes(&self.last_key, key),
        };
        self.since_restart += 1;
        push_varint(&mut self.bytes, shared as u64);
        push_varint(&mut self.bytes, (key.len() - shared) as u64);
        self.bytes.extend_from_slice(&key[shared..]);
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(&key[shared..]);
        push_body(&mut self.bytes);
    }

    /// The length of the block in bytes; 0 without entries.
    pub fn bytes(&self) -> usize {
        match self.restarts.len() {
            0 => 0,
            restarts => self.bytes.len() + (restarts + 1) * size_of::<u32>(),
        }
    }

    /// Appends the block to `out`, and begins the next. REQUIRES: it has an entry.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        assert!(!self.restarts.is_empty(), "a block without entries");
        out.extend_from_slice(&self.bytes);
        self.restarts.iter().for_each(|restart| out.extend_from_slice(&restart.to_le_bytes()));
        out.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        self.bytes.clear();
        self.restarts.clear();
    }
}

/// The number of bytes with which both begin.
pub fn shared_bytes(first: &[u8], second: &[u8]) -> usize {
    let (words, rest) = first.as_chunks();
    let (other_words, other_rest) = second.as_chunks();
    let mut shared = 0;
    for (word, other) in words.iter().zip(other_words) {
        let difference = u64::from_le_bytes(*word) ^ u64::from_le_bytes(*other);
        if difference != 0 {
            return shared + (difference.trailing_zeros() / u8::BITS) as usize;
        }
        shared += size_of::<u64>();
    }
    let (rest, other_rest) = match words.len().cmp(&other_words.len()) {
        Ordering::Less => (rest, &second[shared..]),
        Ordering::Equal => (rest, other_rest),
        Ordering::Greater => (&first[shared..], other_rest),
    };
    shared + rest.iter().zip(other_rest).take_while(|(first, second)| first == second).count()
}

/// A block in memory.
#[derive(Debug)]
pub struct KeyBlock<B> {
    bytes: Vec<u8>,
    entries_bytes: usize,
    restarts: usize,
    body: PhantomData<fn() -> B>,
}

/// A place in a block: at an entry, or at none. It stays valid while the block's memory is given up and read again.
#[derive(Clone, Debug)]
pub struct KeyBlockPosition<B> {
    key: Vec<u8>,
    body: Option<B>,
    /// Where the entry begins and ends.
    start: usize,
    end: usize,
    /// Entries before it that a step back decoded, for the steps that follow: the last one is the nearest.
    before: Vec<DecodedEntry<B>>,
    /// Their keys, one after the other.
    before_keys: Vec<u8>,
}

/// An entry that a step back decoded.
#[derive(Clone, Copy, Debug)]
struct DecodedEntry<B> {
    body: B,
    start: usize,
    end: usize,
    /// Where its key begins in the buffer of keys.
    key_start: usize,
}

impl<B> Default for KeyBlockPosition<B> {
    fn default() -> KeyBlockPosition<B> {
        KeyBlockPosition {
            key: Vec::new(),
            body: None,
            start: 0,
            end: 0,
            before: Vec::new(),
            before_keys: Vec::new(),
        }
    }
}

impl<B: BlockBody> KeyBlockPosition<B> {
    /// The key of the entry; unspecified without one.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The position of the entry.
    #[inline]
    pub fn position(&self) -> Option<Position<'_>> {
        let sequence = self.body.as_ref()?.sequence();
        Some(Position { key: &self.key, sequence })
    }

    /// The body of the entry.
    pub fn body(&self) -> Option<B> {
        self.body
    }

    /// Leaves the entry.
    pub fn clear(&mut self) {
        self.body = None;
        self.forget_before();
    }

    fn forget_before(&mut self) {
        self.before.clear();
        self.before_keys.clear();
    }

    /// Keeps a copy of the entry for a later step back. False if there are too many.
    fn keep_before(&mut self) -> bool {
        let (Some(body), true) = (self.body, self.before.len() < RESTART_INTERVAL as usize) else {
            return false;
        };
        let (start, end, key_start) = (self.start, self.end, self.before_keys.len());
        self.before.push(DecodedEntry { body, start, end, key_start });
        self.before_keys.extend_from_slice(&self.key);
        true
    }

    /// Moves to the nearest entry that a step back decoded.
    fn take_before(&mut self) -> bool {
        let Some(DecodedEntry { body, start, end, key_start }) = self.before.pop() else { return false };
        self.key.clear();
        self.key.extend_from_slice(&self.before_keys[key_start..]);
        self.before_keys.truncate(key_start);
        (self.body, self.start, self.end) = (Some(body), start, end);
        true
    }
}

/// An entry that a search found.
struct EntrySpan<B> {
    body: B,
    /// Whether it is one of the target's key.
    has_key: bool,
    start: usize,
    end: usize,
}

/// An entry as it is on media.
struct StoredKey<'a, B> {
    shared: usize,
    unshared: &'a [u8],
    body: B,
    end: usize,
}

impl<B: BlockBody> KeyBlock<B> {
    /// The block of these bytes, if `check` accepts each of its bodies; `None` if they are none.
    pub fn decode(bytes: Vec<u8>, mut check: impl FnMut(&B) -> bool) -> Option<KeyBlock<B>> {
        let (_, count) = bytes.split_last_chunk()?;
        let restarts = usize::try_from(u32::from_le_bytes(*count)).ok()?;
        let trailer_bytes = restarts.checked_add(1)?.checked_mul(size_of::<u32>())?;
        let entries_bytes = bytes.len().checked_sub(trailer_bytes)?;
        let block = KeyBlock { bytes, entries_bytes, restarts, body: PhantomData };
        block.is_consistent(&mut check).then_some(block)
    }

    fn is_consistent(&self, check: &mut impl FnMut(&B) -> bool) -> bool {
        let (mut key, mut before) = (Vec::new(), None);
        let (mut at, mut restarts) = (0, 0);
        while at < self.entries_bytes {
            let Some(StoredKey { shared, unshared, body, end }) = self.entry_at(at, key.len()) else {
                return false;
            };
            let is_restart = restarts < self.restarts && self.restart(restarts) == at;
            restarts += usize::from(is_restart);
            let shares_more = key.get(shared).is_some_and(|byte| unshared.first() == Some(byte));
            if (is_restart && shared > 0) || (!is_restart && shares_more) {
                return false;
            }
            let order = key[shared..].cmp(unshared);
            let is_behind = match before {
                None => restarts == 1,
                Some(before) => order.then(body.sequence().cmp(&before)) == Ordering::Less,
            };
            if !is_behind || !check(&body) {
                return false;
            }
            key.truncate(shared);
            key.extend_from_slice(unshared);
            (before, at) = (Some(body.sequence()), end);
        }
        before.is_some() && restarts == self.restarts
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The memory that it takes for them, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// The memory of its bytes.
    pub fn into_memory(self) -> Vec<u8> {
        self.bytes
    }

    /// Moves to the first entry.
    pub fn first(&self, place: &mut KeyBlockPosition<B>) -> bool {
        self.enter(0, place)
    }

    /// Moves to the last entry.
    pub fn last(&self, place: &mut KeyBlockPosition<B>) -> bool {
        self.enter(self.restart(self.restarts - 1), place);
        while place.end < self.entries_bytes && self.step(place) {}
        place.body.is_some()
    }

    /// Moves to the first entry at or behind a position. False, and at no entry, if there is none.
    pub fn seek(&self, place: &mut KeyBlockPosition<B>, target: Position<'_>) -> bool {
        place.forget_before();
        place.key.clear();
        let key = &mut place.key;
        let found = self.search(target, |shared, unshared| {
            key.truncate(shared);
            key.extend_from_slice(unshared);
        });
        let Some(EntrySpan { body, start, end, .. }) = found else {
            place.body = None;
            return false;
        };
        (place.body, place.start, place.end) = (Some(body), start, end);
        true
    }

    /// Moves to the next entry. False, and at no entry, behind the last one. REQUIRES: it is at an entry of this block.
    pub fn next(&self, place: &mut KeyBlockPosition<B>) -> bool {
        place.forget_before();
        self.step(place)
    }

    /// The bodies of the entries behind one, in order. REQUIRES: `place` is at an entry of this block.
    pub fn bodies_behind<'a>(&'a self, place: &KeyBlockPosition<B>) -> impl Iterator<Item = B> + use<'a, B> {
        let mut at = place.end;
        std::iter::from_fn(move || {
            // The keys are not needed: decode has checked what they share.
            let StoredKey { body, end, .. } = self.entry_at(at, KEY_BYTES_MAX)?;
            at = end;
            Some(body)
        })
    }

    /// Moves to the preceding entry. False, and at no entry, before the first one. REQUIRES: it is at an entry of this block.
    pub fn prev(&self, place: &mut KeyBlockPosition<B>) -> bool {
        if place.take_before() {
            return true;
        }
        let start = place.start;
        if start == 0 {
            place.clear();
            return false;
        }
        let restart = self.restarts_before(|at| at < start).saturating_sub(1);
        self.enter(self.restart(restart), place);
        // A block of another writer may have more entries between restart points than are kept: then none is.
        let mut are_kept = true;
        while place.body.is_some() && place.end < start {
            are_kept = are_kept && place.keep_before();
            self.step(place);
        }
        if !are_kept {
            place.forget_before();
        }
        place.body.is_some()
    }

    /// The body of the first entry at or behind a position, if that is of the same key.
    pub fn find(&self, target: Position<'_>) -> Option<B> {
        self.search(target, |_, _| ()).filter(|found| found.has_key).map(|found| found.body)
    }

    /// The body of the first entry at or behind a position.
    pub fn seek_body(&self, target: Position<'_>) -> Option<B> {
        self.search(target, |_, _| ()).map(|found| found.body)
    }

    /// The first entry at or behind a position. `pass_key` gets the shared and the other bytes of each key up to that entry's, from a restart point on.
    #[inline]
    fn search(&self, target: Position<'_>, mut pass_key: impl FnMut(usize, &[u8])) -> Option<EntrySpan<B>> {
        let (mut at, mut key_bytes) = (self.restart_for(target), 0);
        // The bytes with which both the target and the entry before `at` begin. That entry is before the target.
        let mut matched = 0;
        loop {
            let start = at;
            let (shared, unshared, body_at) = self.key_at(start, key_bytes)?;
            pass_key(shared, unshared);
            let found = |has_key| {
                let (body, end) = B::decode(self.entries(), body_at)?;
                Some(EntrySpan { body, has_key, start, end })
            };
            if shared < matched {
                // It is behind the target. At a restart point, it shares bytes that it does not say.
                return found(shared == 0 && unshared == target.key);
            }
            if shared == matched {
                let rest = &target.key[matched..];
                let common = shared_bytes(unshared, rest);
                match (unshared.get(common), rest.get(common)) {
                    (None, None) => {
                        let found = found(true)?;
                        if found.body.sequence() <= target.sequence {
                            return Some(found);
                        }
                    }
                    (byte, target_byte) if byte > target_byte => return found(false),
                    _ => {}
                }
                matched += common;
            }
            key_bytes = shared + unshared.len();
            at = B::end(self.entries(), body_at)?;
        }
    }

    /// Moves to the entry at a restart point.
    fn enter(&self, at: usize, place: &mut KeyBlockPosition<B>) -> bool {
        place.forget_before();
        place.key.clear();
        place.end = at;
        self.step(place)
    }

    /// Moves to the entry that begins where the current one ends.
    fn step(&self, place: &mut KeyBlockPosition<B>) -> bool {
        let Some(StoredKey { shared, unshared, body, end }) = self.entry_at(place.end, place.key.len())
        else {
            place.clear();
            return false;
        };
        place.key.truncate(shared);
        place.key.extend_from_slice(unshared);
        (place.body, place.start, place.end) = (Some(body), place.end, end);
        true
    }

    fn entries(&self) -> &[u8] {
        &self.bytes[..self.entries_bytes]
    }

    /// The entry at an offset, behind one with a key of `key_bytes`.
    #[inline]
    fn entry_at(&self, at: usize, key_bytes: usize) -> Option<StoredKey<'_, B>> {
        let (shared, unshared, body_at) = self.key_at(at, key_bytes)?;
        let (body, end) = B::decode(self.entries(), body_at)?;
        Some(StoredKey { shared, unshared, body, end })
    }

    /// Of that entry, the number of shared bytes, the others, and where the body begins.
    #[inline]
    fn key_at(&self, at: usize, key_bytes: usize) -> Option<(usize, &[u8], usize)> {
        let mut rest = self.entries().get(at..)?;
        let (shared, unshared_bytes) = (take_length(&mut rest)?, take_length(&mut rest)?);
        if shared > key_bytes || shared + unshared_bytes > KEY_BYTES_MAX {
            return None;
        }
        let (unshared, behind) = rest.split_at_checked(unshared_bytes)?;
        Some((shared, unshared, self.entries_bytes - behind.len()))
    }

    /// The last restart point before a position, or the first one.
    fn restart_for(&self, target: Position<'_>) -> usize {
        let is_newer = |body_at| {
            B::decode(self.entries(), body_at).is_some_and(|(body, _)| body.sequence() > target.sequence)
        };
        // Of another key, the body need not be decoded.
        let is_before = |(_, key, body_at): (usize, &[u8], usize)| match key.cmp(target.key) {
            Ordering::Equal => is_newer(body_at),
            order => order.is_lt(),
        };
        let behind = self.restarts_before(|at| self.key_at(at, 0).is_some_and(is_before));
        self.restart(behind.saturating_sub(1))
    }

    /// The offset of a restart point. REQUIRES: it exists.
    fn restart(&self, index: usize) -> usize {
        let at = self.entries_bytes + index * size_of::<u32>();
        let bytes = self.bytes[at..].first_chunk().expect("decode found this many restart points");
        u32::from_le_bytes(*bytes) as usize
    }

    /// The number of restart points at the front that are before a place.
    fn restarts_before(&self, is_before: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (0, self.restarts);
        while low < high {
            let middle = low.midpoint(high);
            match is_before(self.restart(middle)) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}

/// A length of at most [`KEY_BYTES_MAX`].
#[inline]
fn take_length(bytes: &mut &[u8]) -> Option<usize> {
    if let Some((&byte, rest)) = bytes.split_first()
        && byte < 0x80
    {
        *bytes = rest;
        return Some(usize::from(byte));
    }
    take_varint(bytes).filter(|&length| length <= KEY_BYTES_MAX as u64).map(|length| length as usize)
}

#[cfg(test)]
#[path = "key_block_tests.rs"]
mod tests;
