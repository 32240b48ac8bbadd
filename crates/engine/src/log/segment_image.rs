//! The entries of a segment in memory: what an operation looks up and changes between reading an image and appending the next.
//!
//! ```text
//!   bytes    entry │ entry │ entry                 as on the device, without the headers of buckets
//!   starts   0       33      58                    of each entry
//! ```
//! In: entries of intact buckets, then changes. Out: entries, and what each change means for the totals of the store.
//!
//! Invariants: at most one entry per key, as writers keep it (of two, which only a bug writes, the first is found); the bytes are
//! whole entries, one behind the other, and `starts` has the start of each, ascending. The order of the entries has no meaning.
//! Tested below, against a map.

use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::value_record::value_record_bytes;
use crate::bug_injection::{self, InjectedBug};

/// The bytes of an entry with a key of 16 bytes, and no version.
const USUAL_ENTRY_BYTES: usize = 24;

/// The entries of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentImage {
    bytes: Vec<u8>,
    starts: Vec<u32>,
    is_lost: bool,
}

/// The record of a value that a change made garbage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldValue {
    /// Where it lies.
    pub at: ValuePlace,
    /// Its length in bytes, before rounding to granules.
    pub record_bytes: u32,
}

/// What a change of an image means for its store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryDifference {
    /// The record that the entry referred to before.
    pub old: Option<OldValue>,
    /// Keys more or fewer: -1, 0 or 1. A tombstone is none, a lost value is one.
    pub keys: i8,
    /// Bytes of entries more or fewer.
    pub entry_bytes: i32,
}

impl SegmentImage {
    /// The image of a segment without keys.
    pub fn new() -> SegmentImage {
        SegmentImage::default()
    }

    /// An image without keys, with memory for so many bytes of entries.
    pub(super) fn with_capacity(entry_bytes: usize) -> SegmentImage {
        SegmentImage {
            bytes: Vec::with_capacity(entry_bytes),
            starts: Vec::with_capacity(entry_bytes / USUAL_ENTRY_BYTES),
            is_lost: false,
        }
    }

    /// The encoded entries, one behind the other.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where each entry begins in [`SegmentImage::bytes`].
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The bytes of all entries.
    pub fn entry_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The number of entries, tombstones included.
    pub fn entries(&self) -> usize {
        self.starts.len()
    }

    /// Whether entries of the segment were lost by damage: a key without an entry may have had one.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// States whether entries of the segment were lost.
    pub fn set_lost(&mut self, is_lost: bool) {
        self.is_lost = is_lost;
    }

    /// The entries, in the order of the image.
    pub fn iter(&self) -> impl Iterator<Item = SegmentEntry<'_>> {
        self.starts.iter().map(|&start| self.entry_at(start).0)
    }

    /// The entries that may become stale, in the order of the image.
    pub(super) fn stale_candidates(&self) -> impl Iterator<Item = SegmentEntry<'_>> {
        let candidates =
            self.starts.iter().filter(|&&start| SegmentEntry::may_become_stale(self.bytes[start as usize]));
        candidates.map(|&start| self.entry_at(start).0)
    }

    /// The entry of a key.
    pub fn find(&self, key: &[u8]) -> Option<SegmentEntry<'_>> {
        if bug_injection::is_injected(InjectedBug::SkipKeyCompare) {
            return self.iter().find(|entry| entry.key.len() == key.len());
        }
        self.index_of(key).map(|index| self.entry_at(self.starts[index]).0)
    }

    /// The number of the entry of a key. An entry ends with its key, so that only those which end with `key` are decoded: 45 entries are
    /// searched in less time than three are decoded.
    fn index_of(&self, key: &[u8]) -> Option<usize> {
        let ends = self.starts.iter().skip(1).map(|&end| end as usize).chain([self.bytes.len()]);
        let mut entries = self.starts.iter().zip(ends).enumerate();
        // The last 8 bytes are compared first, as a number: most entries need no call of a comparison then.
        let key_end = key.last_chunk::<8>();
        let is_of_key = |start: u32, end: usize| {
            let entry = &self.bytes[start as usize..end];
            (key_end.is_none() || entry.last_chunk() == key_end)
                && entry.ends_with(key)
                && self.entry_at(start).0.key == key
        };
        entries.find(|&(_, (&start, end))| is_of_key(start, end)).map(|(index, _)| index)
    }

    /// The first entries, of so many bytes at most: what a split has that forgets the others.
    pub(super) fn first_entries(&self, bytes_max: usize) -> SegmentImage {
        let mut first = SegmentImage::new();
        for entry in self.iter().take_while(|entry| entry.encoded_bytes() <= bytes_max) {
            if first.entry_bytes() + entry.encoded_bytes() <= bytes_max {
                first.replace(&entry);
            }
        }
        first
    }

    /// Puts an entry in the place of the one that its key has, or behind all others.
    pub fn replace(&mut self, entry: &SegmentEntry<'_>) -> EntryDifference {
        let mut difference = self.remove(entry.key);
        difference.keys += key_count(&entry.contents);
        difference.entry_bytes += entry.encoded_bytes() as i32;
        self.starts.push(self.bytes.len() as u32);
        entry.encode(&mut self.bytes);
        difference
    }

    /// Removes the entry of a key, if there is one.
    pub fn remove(&mut self, key: &[u8]) -> EntryDifference {
        let Some(index) = self.index_of(key) else { return EntryDifference::default() };
        let start = self.starts.remove(index);
        let (entry, entry_bytes) = self.entry_at(start);
        let keys = -key_count(&entry.contents);
        let old = old_value(entry);
        self.bytes.drain(start as usize..start as usize + entry_bytes);
        self.starts[index..].iter_mut().for_each(|start| *start -= entry_bytes as u32);
        EntryDifference { old, keys, entry_bytes: -(entry_bytes as i32) }
    }

    /// The images of both halves of the segment: of the keys that stay, and of those that `is_moved`. If entries were lost, those of
    /// either half may have been.
    pub fn split(&self, is_moved: impl Fn(&[u8]) -> bool) -> (SegmentImage, SegmentImage) {
        let empty = SegmentImage { is_lost: self.is_lost, ..SegmentImage::new() };
        let (mut low, mut high) = (empty.clone(), empty);
        for &start in &self.starts {
            let (entry, entry_bytes) = self.entry_at(start);
            let half = if is_moved(entry.key) { &mut high } else { &mut low };
            half.push_encoded(&self.bytes[start as usize..start as usize + entry_bytes]);
        }
        (low, high)
    }

    /// Appends the entries at the front of `bytes`. Returns their length: what follows is none. REQUIRES: none of their keys has an entry.
    pub(super) fn push_encoded(&mut self, bytes: &[u8]) -> usize {
        let (before, mut end) = (self.bytes.len(), 0);
        while let Some(entry_bytes) = SegmentEntry::length_at(&bytes[end..]) {
            self.starts.push((before + end) as u32);
            end += entry_bytes;
        }
        self.bytes.extend_from_slice(&bytes[..end]);
        end
    }

    fn entry_at(&self, start: u32) -> (SegmentEntry<'_>, usize) {
        SegmentEntry::decode(&self.bytes[start as usize..]).expect("an image has whole entries")
    }
}

/// The keys that an entry stands for.
fn key_count(contents: &EntryContents) -> i8 {
    i8::from(!contents.is_tombstone())
}

/// The record of an entry, if it has one.
fn old_value(entry: SegmentEntry<'_>) -> Option<OldValue> {
    match entry.contents {
        EntryContents::Value { at: ValuePlace::Nowhere, .. }
        | EntryContents::Tombstone
        | EntryContents::LostValue { .. } => None,
        EntryContents::Value { bytes, at } => {
            Some(OldValue { at, record_bytes: value_record_bytes(entry.key.len(), bytes, &entry.meta) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_entries::{OwnedSegmentEntry, any_entry_of};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Change {
        Replace(OwnedSegmentEntry),
        Remove(Vec<u8>),
    }

    /// Few keys, so that changes meet.
    fn few_keys() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![vec(0u8..4, 0..3), vec(Just(7u8), 255..258)]
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let change = prop_oneof![
            3 => any_entry_of(few_keys()).prop_map(Change::Replace),
            1 => few_keys().prop_map(Change::Remove),
        ];
        vec(change, 0..60)
    }

    fn owned(image: &SegmentImage) -> BTreeMap<Vec<u8>, OwnedSegmentEntry> {
        image.iter().map(|entry| (entry.key.to_vec(), OwnedSegmentEntry::of(&entry))).collect()
    }

    /// Keys, bytes of entries and bytes of records of a model.
    fn totals(model: &BTreeMap<Vec<u8>, OwnedSegmentEntry>) -> (i64, i64, i64) {
        let mut totals = (0, 0, 0);
        for entry in model.values() {
            totals.0 += i64::from(!entry.contents.is_tombstone());
            totals.1 += entry.as_entry().encoded_bytes() as i64;
            totals.2 += record_bytes(entry);
        }
        totals
    }

    fn record_bytes(entry: &OwnedSegmentEntry) -> i64 {
        match entry.contents {
            EntryContents::Value { bytes, .. } => {
                value_record_bytes(entry.key.len(), bytes, &entry.meta).into()
            }
            EntryContents::Tombstone | EntryContents::LostValue { .. } => 0,
        }
    }

    fn check_structure(image: &SegmentImage) {
        let mut at = 0;
        for &start in image.starts() {
            assert_eq!(start as usize, at);
            at += SegmentEntry::decode(&image.bytes()[at..]).expect("whole entries").1;
        }
        assert_eq!(at, image.entry_bytes());
        assert_eq!(owned(image).len(), image.entries(), "two entries of a key");
    }

    proptest! {
        #[test]
        fn an_image_is_a_map_whose_changes_add_up(changes in changes()) {
            let (mut image, mut model) = (SegmentImage::new(), BTreeMap::new());
            let mut sums = (0, 0, 0);
            for change in changes {
                let (before, difference) = match change {
                    Change::Replace(entry) => {
                        let difference = image.replace(&entry.as_entry());
                        sums.2 += record_bytes(&entry);
                        (model.insert(entry.key.clone(), entry), difference)
                    }
                    Change::Remove(key) => (model.remove(&key), image.remove(&key)),
                };
                sums.0 += i64::from(difference.keys);
                sums.1 += i64::from(difference.entry_bytes);
                sums.2 -= difference.old.as_ref().map_or(0, |old| i64::from(old.record_bytes));
                let old_place = before.and_then(|entry| match entry.contents {
                    EntryContents::Value { at: ValuePlace::Nowhere, .. } => None,
                    EntryContents::Value { at, .. } => Some(at),
                    EntryContents::Tombstone | EntryContents::LostValue { .. } => None,
                });
                prop_assert_eq!(difference.old.map(|old| old.at), old_place);
                prop_assert_eq!(sums, totals(&model));
                prop_assert_eq!(owned(&image), model.clone());
                check_structure(&image);
            }
            for key in model.keys() {
                prop_assert_eq!(image.find(key).map(|entry| OwnedSegmentEntry::of(&entry)), model.get(key).cloned());
            }
            prop_assert_eq!(image.find(b"no such key"), None);
        }

        #[test]
        fn a_split_leaves_every_entry_in_one_half(
            entries in vec(any_entry_of(few_keys()), 0..40),
            bit in 0u32..3,
            is_lost: bool,
        ) {
            let is_moved = |key: &[u8]| key.iter().map(|&byte| u32::from(byte)).sum::<u32>() >> bit & 1 == 1;
            let mut image = SegmentImage::new();
            entries.iter().for_each(|entry| drop(image.replace(&entry.as_entry())));
            image.set_lost(is_lost);
            let (low, high) = image.split(is_moved);
            for (half, moved) in [(&low, false), (&high, true)] {
                check_structure(half);
                prop_assert!(half.iter().all(|entry| is_moved(entry.key) == moved));
                prop_assert_eq!(half.is_lost(), is_lost);
            }
            let mut both = owned(&low);
            both.extend(owned(&high));
            prop_assert_eq!(both, owned(&image));
            prop_assert_eq!(low.entry_bytes() + high.entry_bytes(), image.entry_bytes());
        }
    }
}
