//! The index table of one partition: maps a key's tag to its record, in 16 bytes per entry.
//!
//! ```text
//!   word 0   tag 55 bits │ low 9 bits of the length in units
//!   word 1   location 36 bits (unit; 0 = empty slot) │ fingerprint 24 bits (of the sequence) │ length's high 4
//! ```
//! In a volume of format 2, the low 3 bits of the fingerprint are the record's flags.
//!
//! The table uses linear probing with entries sorted by tag: the home slot is monotonic in the tag, no entry is before its
//! home, and no empty slot is between an entry and its home. A lookup scans from the home until the tag is passed, which
//! stays short up to high loads; a listing scans the table in order. Tables grow by an eighth, so the load is between 0.8
//! and 0.9: 18 to 20 bytes per key.
//!
//! Two keys may share a tag; a lookup compares the full key on the device.
//! Invariants: sorted by tag; `len` counts the occupied slots; the last slot is empty.
//! Tested below against a model.

use crate::common::record::{RecordFlags, RecordFormat, RecordHeader};
use crate::direct::FoundEntry;
use smallvec::SmallVec;

/// Bits of a tag.
pub const TAG_BITS: u32 = 55;
/// The maximum units of one record.
pub const RECORD_UNITS_MAX: u64 = (1 << 13) - 1;
/// The highest location.
pub const LOCATION_MAX: u64 = (1 << 36) - 1;
/// Bytes of an entry, in memory and in a checkpoint.
pub const INDEX_ENTRY_BYTES: usize = 16;

/// The location of a record, and a fingerprint that detects a stale record there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRef {
    /// Its first unit; never 0.
    pub location: u64,
    /// The number of its units.
    pub units: u64,
    /// 24 bits derived from its sequence number, and its flags, by [`fingerprint`].
    pub fingerprint: u32,
}

/// The locations where a key's record may be: one, unless tags collide.
pub type Candidates = SmallVec<[RecordRef; 2]>;

/// The bits of a fingerprint that are the record's flags, in a volume of format 2.
const FLAGS_MASK: u32 = (1 << RecordFlags::BITS) - 1;

/// What the index keeps of a record's sequence number and flags.
#[inline]
pub fn fingerprint(format: RecordFormat, sequence: u64, flags: RecordFlags) -> u32 {
    let fingerprint = (octokv_base::prng::mix64(sequence) >> 40) as u32;
    match format {
        RecordFormat::V1 => fingerprint,
        RecordFormat::V2 => fingerprint & !FLAGS_MASK | u32::from(flags.bits()),
    }
}

/// Whether the index has the sequence number and the flags of this header.
#[inline]
pub fn is_fingerprint_of(format: RecordFormat, record_ref: RecordRef, header: &RecordHeader) -> bool {
    fingerprint(format, header.identity.sequence, header.meta.flags) == record_ref.fingerprint
}

impl RecordRef {
    /// The flags of the record.
    #[inline]
    pub fn flags(&self, format: RecordFormat) -> RecordFlags {
        match format {
            RecordFormat::V1 => RecordFlags::NONE,
            RecordFormat::V2 => RecordFlags::from_known_bits((self.fingerprint & FLAGS_MASK) as u8),
        }
    }
}

/// An index entry, in the layout of memory and checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexEntry([u64; 2]);

impl IndexEntry {
    const EMPTY: IndexEntry = IndexEntry([0, 0]);

    /// The entry of `tag`. REQUIRES: `tag` has at most [`TAG_BITS`] bits.
    pub fn new(tag: u64, record_ref: RecordRef) -> IndexEntry {
        debug_assert!(
            record_ref.location != 0
                && record_ref.location <= LOCATION_MAX
                && record_ref.units <= RECORD_UNITS_MAX
        );
        let word1 =
            (record_ref.location << 28) | (u64::from(record_ref.fingerprint) << 4) | (record_ref.units >> 9);
        IndexEntry([(tag << 9) | (record_ref.units & 0x1ff), word1])
    }

    /// The entry of [`IndexEntry::words`].
    pub fn from_words(words: [u64; 2]) -> IndexEntry {
        IndexEntry(words)
    }

    /// The entry as two words.
    pub fn words(self) -> [u64; 2] {
        self.0
    }

    /// The tag: the hash bits after those of the partition.
    pub fn tag(self) -> u64 {
        self.0[0] >> 9
    }

    /// The record.
    pub fn record_ref(self) -> RecordRef {
        RecordRef {
            location: self.0[1] >> 28,
            units: (self.0[0] & 0x1ff) | ((self.0[1] & 0xf) << 9),
            fingerprint: (self.0[1] >> 4) as u32 & 0xff_ffff,
        }
    }

    /// The bytes in a checkpoint, little-endian.
    pub fn to_bytes(self) -> [u8; INDEX_ENTRY_BYTES] {
        let mut bytes = [0; INDEX_ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.0[0].to_le_bytes());
        bytes[8..].copy_from_slice(&self.0[1].to_le_bytes());
        bytes
    }

    /// Decodes an entry of a checkpoint; `None` if location or length is 0.
    pub fn from_bytes(bytes: &[u8; INDEX_ENTRY_BYTES]) -> Option<IndexEntry> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let entry = IndexEntry([word(0), word(8)]);
        let record_ref = entry.record_ref();
        (record_ref.location != 0 && record_ref.units != 0).then_some(entry)
    }

    fn is_empty(self) -> bool {
        self.0[1] == 0
    }
}

/// The index table of one partition.
#[derive(Default)]
pub struct IndexTable {
    slots: Vec<IndexEntry>,
    /// Home slots are `0..home_slots`; the slots after them take entries that are displaced past the last home.
    home_slots: usize,
    len: usize,
}

/// Slots after the last home.
const SPILL_SLOTS: usize = 16;

impl IndexTable {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory of the table in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.slots.capacity() * INDEX_ENTRY_BYTES
    }

    fn home(&self, tag: u64) -> usize {
        ((u128::from(tag) * self.home_slots as u128) >> TAG_BITS) as usize
    }

    /// The first slot at or after `tag`'s home that is empty or holds `tag` or a higher one.
    fn seek(&self, tag: u64) -> usize {
        let mut at = self.home(tag);
        while !self.slots[at].is_empty() && self.slots[at].tag() < tag {
            at += 1;
        }
        at
    }

    /// All records with this tag: nearly always none or one.
    pub fn lookup(&self, tag: u64) -> impl Iterator<Item = RecordRef> + '_ {
        self.entries_of(tag).map(|entry| entry.record_ref())
    }

    /// All entries with this tag.
    pub fn entries_of(&self, tag: u64) -> impl Iterator<Item = IndexEntry> + '_ {
        let start = if self.home_slots == 0 { self.slots.len() } else { self.seek(tag) };
        self.slots[start..].iter().take_while(move |slot| !slot.is_empty() && slot.tag() == tag).copied()
    }

    /// What the table has for a tag.
    #[inline]
    pub(crate) fn find(&self, tag: u64) -> FoundEntry {
        if self.home_slots == 0 {
            return FoundEntry::Missing;
        }
        let at = self.seek(tag);
        let is_of_tag = |slot: IndexEntry| !slot.is_empty() && slot.tag() == tag;
        // The last slot is empty, so that there is one after an entry.
        match is_of_tag(self.slots[at]) {
            false => FoundEntry::Missing,
            true if is_of_tag(self.slots[at + 1]) => FoundEntry::Several,
            true => FoundEntry::One(self.slots[at].words()),
        }
    }

    /// Prefetches the home slot of `tag`.
    pub fn prefetch(&self, tag: u64) {
        if let Some(slot) = self.slots.get(self.home(tag)) {
            octokv_runtime::prefetch_value(slot);
        }
    }

    /// Adds an entry; others with the same tag remain.
    pub fn insert(&mut self, tag: u64, record_ref: RecordRef) {
        if (self.len + 1) * 100 > self.home_slots * 90 {
            self.resize(self.home_slots + (self.home_slots / 8).max(8));
        }
        let at = self.seek(tag);
        let free =
            (at..self.slots.len()).find(|&i| self.slots[i].is_empty()).expect("the last slot is empty");
        if free + 1 == self.slots.len() {
            // The last slot stays empty: scans end there.
            self.slots.resize(self.slots.len() + SPILL_SLOTS, IndexEntry::EMPTY);
        }
        self.slots.copy_within(at..free, at + 1);
        self.slots[at] = IndexEntry::new(tag, record_ref);
        self.len += 1;
    }

    /// Replaces the entry of `tag` at location `old`, and gives the previous record. `None` if there is no such entry.
    pub fn replace(&mut self, tag: u64, old: u64, new: RecordRef) -> Option<RecordRef> {
        let at = self.find_slot(tag, old)?;
        let before = self.slots[at].record_ref();
        self.slots[at] = IndexEntry::new(tag, new);
        Some(before)
    }

    /// Removes the entry of `tag` at location `old`. `None` if there is no such entry.
    pub fn remove(&mut self, tag: u64, old: u64) -> Option<RecordRef> {
        let at = self.find_slot(tag, old)?;
        let record_ref = self.slots[at].record_ref();
        let mut end = at + 1;
        while !self.slots[end].is_empty() && self.home(self.slots[end].tag()) < end {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = IndexEntry::EMPTY;
        self.len -= 1;
        Some(record_ref)
    }

    fn find_slot(&self, tag: u64, location: u64) -> Option<usize> {
        if self.home_slots == 0 {
            return None;
        }
        let start = self.seek(tag);
        (start..self.slots.len())
            .take_while(|&at| !self.slots[at].is_empty() && self.slots[at].tag() == tag)
            .find(|&at| self.slots[at].record_ref().location == location)
    }

    /// Clears the bits that are flags in format 2, of all entries.
    pub fn clear_flags(&mut self) {
        for slot in &mut self.slots {
            slot.0[1] &= !(u64::from(FLAGS_MASK) << 4);
        }
    }

    /// The entries with tags from `tag` on, sorted.
    pub fn iter_from(&self, tag: u64) -> impl Iterator<Item = IndexEntry> + '_ {
        let start = if self.home_slots == 0 { self.slots.len() } else { self.seek(tag) };
        self.slots[start..].iter().copied().filter(|slot| !slot.is_empty())
    }

    /// Reserves space for `count` entries in all, so that loading does not resize repeatedly.
    pub fn reserve(&mut self, count: usize) {
        let homes = count + count / 6 + 8;
        if homes > self.home_slots && count > self.len {
            self.resize(homes);
        }
    }

    fn resize(&mut self, homes: usize) {
        let mut slots = vec![IndexEntry::EMPTY; homes + SPILL_SLOTS];
        let mut next = 0;
        for slot in self.slots.iter().copied().filter(|slot| !slot.is_empty()) {
            let home = ((u128::from(slot.tag()) * homes as u128) >> TAG_BITS) as usize;
            let at = home.max(next);
            if at + 1 >= slots.len() {
                slots.resize(at + 1 + SPILL_SLOTS, IndexEntry::EMPTY);
            }
            slots[at] = slot;
            next = at + 1;
        }
        (self.slots, self.home_slots) = (slots, homes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use std::collections::BTreeMap;
    use std::fmt;

    fn record_ref_at(location: u64) -> RecordRef {
        let fingerprint = fingerprint(RecordFormat::V1, location, RecordFlags::NONE);
        RecordRef { location, units: location % RECORD_UNITS_MAX + 1, fingerprint }
    }

    #[test]
    fn a_slot_gives_back_every_field_at_its_limits() {
        for (tag, location, units) in
            [(0, 1, 1), ((1 << TAG_BITS) - 1, LOCATION_MAX, RECORD_UNITS_MAX), (5, 512, 511), (6, 7, 512)]
        {
            let record_ref = RecordRef { location, units, fingerprint: 0xab_cdef };
            let entry = IndexEntry::new(tag, record_ref);
            assert_eq!((entry.tag(), entry.record_ref()), (tag, record_ref));
            assert_eq!(IndexEntry::from_bytes(&entry.to_bytes()), Some(entry));
        }
        assert_eq!(IndexEntry::from_bytes(&[0; 16]), None);
    }

    /// On a tag; without an entry of the tag, the last two do what `RemoveAbsent` does.
    #[derive(Clone, Copy)]
    enum Operation {
        RemoveAbsent(u64),
        /// Up to three entries of a tag.
        Insert(u64),
        Remove(u64),
        Replace(u64),
    }

    /// One line, also in a failing list.
    impl fmt::Debug for Operation {
        fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
            match self {
                Operation::RemoveAbsent(tag) => write!(f, "remove an absent entry of tag {tag:#x}"),
                Operation::Insert(tag) => write!(f, "insert tag {tag:#x}"),
                Operation::Remove(tag) => write!(f, "remove tag {tag:#x}"),
                Operation::Replace(tag) => write!(f, "replace tag {tag:#x}"),
            }
        }
    }

    /// On this many tags of the whole range; in parts, so that a failing list loses whole parts first.
    fn operations(tags: u64) -> impl Strategy<Value = Vec<Operation>> {
        let operation = (0..5, 0..tags).no_shrink().prop_map(|(kind, number)| {
            let tag = octokv_base::prng::mix64(number) >> (64 - TAG_BITS);
            match kind {
                0 => Operation::RemoveAbsent(tag),
                1 | 2 => Operation::Insert(tag),
                3 => Operation::Remove(tag),
                _ => Operation::Replace(tag),
            }
        });
        vec(vec(operation, 0..=250), 0..=250).prop_map(|parts| parts.concat())
    }

    fn assert_agrees_with_a_model(operations: &[Operation]) {
        let mut table = IndexTable::default();
        let mut model: BTreeMap<(u64, u64), RecordRef> = BTreeMap::new();
        for (&operation, step) in operations.iter().zip(1..) {
            let (Operation::RemoveAbsent(tag)
            | Operation::Insert(tag)
            | Operation::Remove(tag)
            | Operation::Replace(tag)) = operation;
            let of_tag: Vec<u64> = model.range((tag, 0)..=(tag, u64::MAX)).map(|(key, _)| key.1).collect();
            match (operation, of_tag.first()) {
                (Operation::Insert(_), _) if of_tag.len() < 3 => {
                    table.insert(tag, record_ref_at(step));
                    model.insert((tag, step), record_ref_at(step));
                }
                (Operation::Replace(_), Some(&old)) => {
                    let replaced = table.replace(tag, old, record_ref_at(step));
                    assert_eq!(replaced, model.remove(&(tag, old)), "the replaced entry");
                    model.insert((tag, step), record_ref_at(step));
                }
                (Operation::Remove(_), Some(&old)) => {
                    assert_eq!(table.remove(tag, old), model.remove(&(tag, old)), "the removed entry");
                }
                _ => assert_eq!(table.remove(tag, u64::MAX), None, "an entry that is absent"),
            }
            let mut found: Vec<u64> = table.lookup(tag).map(|record_ref| record_ref.location).collect();
            found.sort_unstable();
            let expected: Vec<u64> = model.range((tag, 0)..=(tag, u64::MAX)).map(|(key, _)| key.1).collect();
            assert_eq!(found, expected, "the entries of tag {tag:#x}");
            assert_eq!(table.len(), model.len(), "the number of entries");
        }
        let listed: Vec<u64> = table.iter_from(0).map(IndexEntry::tag).collect();
        let expected: Vec<u64> = model.keys().map(|key| key.0).collect();
        assert_eq!(listed, expected, "all entries");
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 8, rng_seed: RngSeed::Fixed(7), failure_persistence: None, max_shrink_iters: 4_000,
            ..ProptestConfig::default()
        })]

        #[test]
        fn the_table_agrees_with_a_model_and_stays_sorted(
            operations in prop_oneof![operations(40), operations(3_000), operations(1 << 40)],
        ) {
            assert_agrees_with_a_model(&operations);
        }
    }

    #[test]
    fn any_number_of_equal_tags_at_the_end_of_the_range_is_kept() {
        let (mut table, tag) = (IndexTable::default(), (1 << TAG_BITS) - 1);
        (1..1_000).for_each(|location| table.insert(tag, record_ref_at(location)));
        assert_eq!(table.lookup(tag).count(), 999);
        assert!(table.memory_bytes() < 100_000, "{} bytes", table.memory_bytes());
        (1..1_000).for_each(|location| assert!(table.remove(tag, location).is_some()));
        assert!(table.is_empty());
    }

    #[test]
    fn a_large_table_takes_at_most_24_bytes_per_key() {
        let (mut random, mut table) = (Prng::new(3), IndexTable::default());
        for count in 1..100_000_u64 {
            table.insert(random.next_u64() >> (64 - TAG_BITS), record_ref_at(count));
            if count > 1_000 {
                assert!(
                    table.memory_bytes() as u64 <= 24 * count,
                    "{} bytes for {count} keys",
                    table.memory_bytes()
                );
            }
        }
    }
}
