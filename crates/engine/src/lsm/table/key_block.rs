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
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::marker::PhantomData;

/// Entries from one restart point to the next.
const RESTART_INTERVAL: u32 = 16;
/// The most bytes of an entry in front of its body, with an offset among the restart points.
pub const KEY_OVERHEAD_MAX: usize = 2 + 2 + size_of::<u32>();
/// The most bytes of a block besides its entries and the offsets of restart points but the first.
pub const BLOCK_OVERHEAD_MAX: usize = 2 * size_of::<u32>();

/// A key in memory, without an allocation if it is short.
type KeyBytes = SmallVec<[u8; 32]>;

/// What an entry of a block has besides its key.
pub trait BlockBody: Copy {
    /// The body at `at`, and where it ends; `None` if there is none.
    fn decode(bytes: &[u8], at: usize) -> Option<(Self, usize)>;
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
    first.iter().zip(second).take_while(|(first, second)| first == second).count()
}

/// A block in memory.
#[derive(Debug)]
pub struct KeyBlock<B> {
    bytes: Box<[u8]>,
    entries_bytes: usize,
    restarts: usize,
    body: PhantomData<fn() -> B>,
}

/// A place in a block: at an entry, or at none. It stays valid while the block's memory is given up and read again.
#[derive(Clone, Debug)]
pub struct KeyBlockPosition<B> {
    key: KeyBytes,
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
            key: KeyBytes::new(),
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

/// An entry as it is on media.
struct StoredKey<'a, B> {
    shared: usize,
    unshared: &'a [u8],
    body: B,
    end: usize,
}

impl<B: BlockBody> KeyBlock<B> {
    /// The block of these bytes, if `check` accepts each of its bodies; `None` if they are none.
    pub fn decode(bytes: Box<[u8]>, mut check: impl FnMut(&B) -> bool) -> Option<KeyBlock<B>> {
        let (_, count) = bytes.split_last_chunk()?;
        let restarts = usize::try_from(u32::from_le_bytes(*count)).ok()?;
        let trailer_bytes = restarts.checked_add(1)?.checked_mul(size_of::<u32>())?;
        let entries_bytes = bytes.len().checked_sub(trailer_bytes)?;
        let block = KeyBlock { bytes, entries_bytes, restarts, body: PhantomData };
        block.is_consistent(&mut check).then_some(block)
    }

    fn is_consistent(&self, check: &mut impl FnMut(&B) -> bool) -> bool {
        let (mut key, mut before) = (KeyBytes::new(), None);
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
        self.enter(self.restart_for(target), place);
        while let Some(body) = place.body
            && (Position { key: &place.key, sequence: body.sequence() }) < target
        {
            self.step(place);
        }
        place.body.is_some()
    }

    /// Moves to the next entry. False, and at no entry, behind the last one. REQUIRES: it is at an entry of this block.
    pub fn next(&self, place: &mut KeyBlockPosition<B>) -> bool {
        place.forget_before();
        self.step(place)
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
        self.search(target).and_then(|(body, has_key)| has_key.then_some(body))
    }

    /// The body of the first entry at or behind a position.
    pub fn seek_body(&self, target: Position<'_>) -> Option<B> {
        self.search(target).map(|(body, _)| body)
    }

    /// As [`KeyBlock::seek`], without a copy of any key. Also gives whether the entry is one of the target's key.
    fn search(&self, target: Position<'_>) -> Option<(B, bool)> {
        let (mut at, mut key_bytes) = (self.restart_for(target), 0);
        // The bytes with which both the target and the entry before `at` begin. That entry is before the target.
        let mut matched = 0;
        loop {
            let StoredKey { shared, unshared, body, end } = self.entry_at(at, key_bytes)?;
            if shared < matched {
                // It is behind the target. At a restart point, it shares bytes that it does not say.
                return Some((body, shared == 0 && unshared == target.key));
            }
            if shared == matched {
                let rest = &target.key[matched..];
                let common = shared_bytes(unshared, rest);
                let order = match (unshared.get(common), rest.get(common)) {
                    (None, None) => target.sequence.cmp(&body.sequence()),
                    (byte, target_byte) => byte.cmp(&target_byte),
                };
                if order != Ordering::Less {
                    return Some((body, common == unshared.len() && common == rest.len()));
                }
                matched += common;
            }
            key_bytes = shared + unshared.len();
            at = end;
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
        let is_before = |(_, key, body_at): (usize, &[u8], usize)| {
            key < target.key || (key == target.key && is_newer(body_at))
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A body that is its sequence number.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Number(u64);

    impl BlockBody for Number {
        fn decode(bytes: &[u8], at: usize) -> Option<(Number, usize)> {
            let mut rest = bytes.get(at..)?;
            let number = take_varint(&mut rest)?;
            Some((Number(number), bytes.len() - rest.len()))
        }
        fn sequence(&self) -> u64 {
            self.0
        }
    }

    type Entries = Vec<(Vec<u8>, u64)>;
    /// In order: the newest first.
    fn entries() -> impl Strategy<Value = Entries> {
        let key = proptest::collection::vec(prop_oneof![4 => Just(b'a'), 1 => any::<u8>()], 0..20);
        proptest::collection::btree_set((key, 1..6u64), 1..100).prop_map(|entries: BTreeSet<_>| {
            let mut entries: Entries = entries.into_iter().collect();
            entries.sort_by(|(key, sequence), (other, than)| key.cmp(other).then(than.cmp(sequence)));
            entries
        })
    }

    fn encode(entries: &Entries) -> Vec<u8> {
        let (mut builder, mut bytes) = (KeyBlockBuilder::default(), Vec::new());
        for (key, sequence) in entries {
            builder.push(key, |bytes| push_varint(bytes, *sequence));
        }
        let expected_bytes = builder.bytes();
        builder.finish(&mut bytes);
        assert_eq!((bytes.len(), builder.bytes()), (expected_bytes, 0));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<KeyBlock<Number>> {
        KeyBlock::decode(bytes.into(), |_| true)
    }

    fn entry(place: &KeyBlockPosition<Number>) -> Option<(Vec<u8>, u64)> {
        place.body().map(|body| (place.key().to_vec(), body.0))
    }

    proptest! {
        #[test]
        fn every_step_and_every_search_is_the_models(
            entries in entries(),
            targets in proptest::collection::vec(
                (proptest::collection::vec(prop_oneof![Just(b'a'), any::<u8>()], 0..20), 0..7u64), 0..30),
        ) {
            let block = decode(&encode(&entries)).expect("a block");
            let mut place = KeyBlockPosition::default();
            prop_assert!(block.first(&mut place));
            for want in &entries {
                prop_assert_eq!(entry(&place), Some(want.clone()));
                block.next(&mut place);
            }
            prop_assert_eq!(entry(&place), None);
            prop_assert!(block.last(&mut place));
            for want in entries.iter().rev() {
                prop_assert_eq!(entry(&place), Some(want.clone()));
                block.prev(&mut place);
            }
            prop_assert_eq!(entry(&place), None);
            for (key, sequence) in targets.iter().chain(&entries) {
                let target = Position { key, sequence: *sequence };
                let at = entries.partition_point(|(key, sequence)| Position { key, sequence: *sequence } < target);
                prop_assert_eq!(block.seek(&mut place, target), at < entries.len());
                prop_assert_eq!(entry(&place), entries.get(at).cloned());
                let found = entries.get(at).map(|entry| Number(entry.1));
                prop_assert_eq!(block.seek_body(target), found);
                prop_assert_eq!(block.find(target), found.filter(|_| entries[at].0 == *key));
                if at < entries.len() {
                    prop_assert_eq!(block.prev(&mut place), at > 0);
                    prop_assert_eq!(entry(&place), at.checked_sub(1).map(|at| entries[at].clone()));
                }
            }
        }

        #[test]
        fn steps_in_any_order_are_the_models_whatever_the_restart_points(
            entries in entries(),
            interval in 1..60u32,
            steps in proptest::collection::vec(prop_oneof![any::<bool>(), Just(false)], 1..200),
        ) {
            let mut builder = KeyBlockBuilder::default();
            for (index, (key, sequence)) in entries.iter().enumerate() {
                // A writer with another interval.
                builder.since_restart = if (index as u32).is_multiple_of(interval) { RESTART_INTERVAL } else { 0 };
                builder.push(key, |bytes| push_varint(bytes, *sequence));
            }
            let mut bytes = Vec::new();
            builder.finish(&mut bytes);
            let block = decode(&bytes).expect("a block");
            let (mut place, mut at) = (KeyBlockPosition::default(), entries.len() / 2);
            let (key, sequence) = &entries[at];
            block.seek(&mut place, Position { key, sequence: *sequence });
            for is_forward in steps {
                prop_assert_eq!(entry(&place), Some(entries[at].clone()));
                let next = if is_forward { at + 1 } else { at.wrapping_sub(1) };
                if next >= entries.len() {
                    continue;
                }
                let is_moved = if is_forward { block.next(&mut place) } else { block.prev(&mut place) };
                prop_assert!(is_moved);
                at = next;
            }
        }

        #[test]
        fn any_bytes_are_no_block_or_one_that_is_read_in_order(
            entries in entries(),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = encode(&entries);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(block) = decode(&bytes) {
                let (mut place, mut forward) = (KeyBlockPosition::default(), Vec::new());
                block.first(&mut place);
                while let Some(entry) = entry(&place) {
                    forward.push(entry);
                    block.next(&mut place);
                }
                let is_behind = |(key, sequence): &(Vec<u8>, u64), (than, number): &(Vec<u8>, u64)| {
                    key < than || (key == than && sequence > number)
                };
                prop_assert!(forward.is_sorted_by(is_behind));
                block.last(&mut place);
                for want in forward.iter().rev() {
                    prop_assert_eq!(entry(&place), Some(want.clone()));
                    block.prev(&mut place);
                }
                prop_assert_eq!(entry(&place), None);
            }
        }
    }

    #[test]
    fn blocks_that_contradict_themselves_are_refused() {
        let restarts = |entries: &[u8], restarts: &[u32]| {
            let mut bytes = entries.to_vec();
            restarts.iter().for_each(|restart| bytes.extend_from_slice(&restart.to_le_bytes()));
            bytes.extend_from_slice(&(restarts.len() as u32).to_le_bytes());
            decode(&bytes).is_some()
        };
        // "a" of sequence 5, then "ab" of 3.
        let two = [0, 1, b'a', 5, 1, 1, b'b', 3];
        assert!(restarts(&two, &[0]));
        assert!(!restarts(&two, &[]), "no restart point");
        assert!(!restarts(&two, &[1]), "the first entry is no restart point");
        assert!(!restarts(&two, &[0, 4]), "a restart point that shares bytes");
        assert!(!restarts(&two, &[0, 5]), "a restart point within an entry");
        assert!(!restarts(&two, &[0, 0]), "a restart point twice");
        assert!(!restarts(&two[..7], &[0]), "an entry that is cut");
        assert!(!restarts(&[], &[0]), "no entry");
        assert!(!restarts(&[0, 1, b'b', 5, 0, 1, b'a', 3], &[0]), "keys out of order");
        assert!(!restarts(&[0, 1, b'a', 3, 1, 0, 5], &[0]), "sequence numbers that rise");
        assert!(!restarts(&[0, 1, b'a', 3, 1, 0, 3], &[0]), "an entry twice");
        assert!(!restarts(&[1, 1, b'a', 3], &[0]), "shared bytes without a key before");
        assert!(restarts(&[0, 1, b'a', 5, 1, 0, 3], &[0]), "two versions of a key");
        let long_key = |bytes: usize| {
            let mut entry = vec![0];
            push_varint(&mut entry, bytes as u64);
            entry.resize(entry.len() + bytes, b'k');
            entry.push(1);
            restarts(&entry, &[0])
        };
        assert!(long_key(KEY_BYTES_MAX) && !long_key(KEY_BYTES_MAX + 1), "the longest key");
        assert!(decode(&u32::MAX.to_le_bytes()).is_none(), "too many restart points");
    }
}
