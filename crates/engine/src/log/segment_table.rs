//! The segment table of a store: where the newest image of each segment lies, in 6 bytes a segment (LEED §3.2).
//!
//! ```text
//!   pages      ┌ 8,192 entries of 6 B ┐ ┌ 8,192 entries ┐ ┌ 8,192 entries ┐
//!   segments   0 … 8191                 8192 … 16383      16384 … ← grow(): one more by each split
//! ```
//! Pages are allocated one by one and never moved, so the memory of the table rises by 48 KiB for each 8,192 segments, without the
//! doubling of an array. It does not shrink: a segment that has lost its keys keeps its entry.
//!
//! In: images that were published, locks of segments, splits. Out: entries, and pages for checkpoints.
//! Invariants: there are as many entries as [`HashLevel`] has segments, and the rest of the last page is zeros; an entry keeps its lock
//! when its place changes; a page of a checkpoint has no locks.
//! Tested below, also against a model.

use super::hash_prefix::{HashLevel, SegmentNumber};
use super::segment_ref::{SEGMENT_REF_BYTES, SegmentRef};
use crate::bug_injection::{self, InjectedBug};

/// The entries of a page.
pub const PAGE_ENTRIES: usize = 8192;
/// The bytes of a page.
pub const PAGE_BYTES: usize = PAGE_ENTRIES * SEGMENT_REF_BYTES;
const _: () = assert!(PAGE_BYTES == 48 << 10);

/// The segment table of a store, and its state of linear hashing.
pub struct LogSegmentTable {
    /// Each of [`PAGE_BYTES`].
    pages: Vec<Box<[u8]>>,
    level: HashLevel,
}

impl Default for LogSegmentTable {
    fn default() -> LogSegmentTable {
        LogSegmentTable::new(HashLevel::FIRST)
    }
}

impl LogSegmentTable {
    /// The table of a store whose segments have no images.
    ///
    /// # Panics
    /// If the state is not valid.
    pub fn new(level: HashLevel) -> LogSegmentTable {
        assert!(level.is_valid(), "{level:?}");
        let mut table = LogSegmentTable { pages: Vec::new(), level };
        table.add_pages();
        table
    }

    /// The state of linear hashing.
    pub fn level(&self) -> HashLevel {
        self.level
    }

    /// The number of segments.
    pub fn segments(&self) -> u64 {
        self.level.segments()
    }

    /// The bytes of memory, without those of the structure itself.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len() * PAGE_BYTES + self.pages.capacity() * size_of::<Box<[u8]>>()
    }

    /// The entry of a segment.
    ///
    /// # Panics
    /// If there is no such segment.
    #[inline]
    pub fn get(&self, segment: SegmentNumber) -> SegmentRef {
        let (page, at) = self.offset_of(segment);
        let bytes = self.pages[page][at..].first_chunk().expect("a page has whole entries");
        SegmentRef::from_bytes(*bytes)
    }

    /// Sets the place of a segment's newest image. The segment stays locked, or not.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn set(&mut self, segment: SegmentNumber, image: SegmentRef) {
        let is_locked = self.get(segment).is_locked();
        let is_forgotten = bug_injection::is_injected(InjectedBug::LogForgetLockBit);
        self.write(segment, image.with_lock(is_locked && !is_forgotten));
    }

    /// Locks a segment. False if it is locked already.
    ///
    /// # Panics
    /// If there is no such segment.
    pub fn lock(&mut self, segment: SegmentNumber) -> bool {
        let entry = self.get(segment);
        if !entry.is_locked() {
            self.write(segment, entry.with_lock(true));
        }
        !entry.is_locked()
    }

    /// Unlocks a segment.
    ///
    /// # Panics
    /// If it is not locked.
    pub fn unlock(&mut self, segment: SegmentNumber) {
        let entry = self.get(segment);
        assert!(entry.is_locked(), "{segment:?} is not locked");
        self.write(segment, entry.with_lock(false));
    }

    /// Whether so many bytes of entries are too many for the number of segments: `target_bytes` is their mean per segment.
    pub fn is_split_due(&self, entry_bytes: u64, target_bytes: u32) -> bool {
        self.level.can_advance() && entry_bytes > self.segments().saturating_mul(target_bytes.into())
    }

    /// Splits the next segment: `low` is the image of what remains in it, `high` that of the new segment, which is not locked.
    ///
    /// # Panics
    /// If no more segments can be numbered.
    pub fn grow(&mut self, low: SegmentRef, high: SegmentRef) {
        assert!(self.level.can_advance(), "{:?} is the last", self.level);
        let (parent, child) = (SegmentNumber(self.level.split), self.level.next_segment());
        self.level = self.level.advanced();
        self.add_pages();
        self.set(parent, low);
        self.set(child, high);
    }

    /// Takes over a later state of linear hashing. The new segments have no images. For a replay: the images of the segments between
    /// follow, and a segment that was split without one has none.
    ///
    /// # Panics
    /// If the state is not valid, or earlier than the present one.
    pub fn grow_to(&mut self, level: HashLevel) {
        assert!(level.is_valid() && level.segments() >= self.segments(), "{:?} to {level:?}", self.level);
        self.level = level;
        self.add_pages();
    }

    /// The number of pages.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// The first segment of a page, and the number of its segments. REQUIRES: `page` is below [`LogSegmentTable::page_count`].
    pub fn page_segments(&self, page: usize) -> (SegmentNumber, u32) {
        let first = (page * PAGE_ENTRIES) as u64;
        // Segments have 32 bits.
        (SegmentNumber(first as u32), (self.segments() - first).min(PAGE_ENTRIES as u64) as u32)
    }

    /// Appends the entries of a page to `out`, without their locks. REQUIRES: as for [`LogSegmentTable::page_segments`].
    pub fn copy_page(&self, page: usize, out: &mut Vec<u8>) {
        let (_, count) = self.page_segments(page);
        let (entries, _) = self.pages[page].as_chunks::<SEGMENT_REF_BYTES>();
        for entry in &entries[..count as usize] {
            out.extend(SegmentRef::from_bytes(*entry).with_lock(false).to_bytes());
        }
    }

    /// Takes over the entries of a page from a checkpoint. False, and the page is unchanged, if there is no such page, it has another
    /// number of segments, or one of its entries is none that this version writes.
    #[must_use]
    pub fn load_page(&mut self, page: usize, bytes: &[u8]) -> bool {
        if page >= self.pages.len() {
            return false;
        }
        let (_, count) = self.page_segments(page);
        let (entries, rest) = bytes.as_chunks::<SEGMENT_REF_BYTES>();
        let are_valid = entries.iter().all(|entry| SegmentRef::from_bytes(*entry).is_valid());
        if entries.len() != count as usize || !rest.is_empty() || !are_valid {
            return false;
        }
        self.pages[page][..bytes.len()].copy_from_slice(bytes);
        true
    }

    /// The segments that have an image, with their entries, in the order of their numbers.
    pub fn images(&self) -> impl Iterator<Item = (SegmentNumber, SegmentRef)> + '_ {
        // Segments have 32 bits.
        let segments = (0..self.segments()).map(|segment| SegmentNumber(segment as u32));
        segments.map(|segment| (segment, self.get(segment))).filter(|(_, image)| !image.is_empty())
    }

    fn add_pages(&mut self) {
        let pages = self.segments().div_ceil(PAGE_ENTRIES as u64) as usize;
        self.pages.resize_with(pages, || vec![0; PAGE_BYTES].into_boxed_slice());
    }

    fn write(&mut self, segment: SegmentNumber, entry: SegmentRef) {
        let (page, at) = self.offset_of(segment);
        self.pages[page][at..at + SEGMENT_REF_BYTES].copy_from_slice(&entry.to_bytes());
    }

    /// The page of a segment, and the first byte of its entry there.
    #[inline]
    fn offset_of(&self, segment: SegmentNumber) -> (usize, usize) {
        assert!(u64::from(segment.0) < self.segments(), "{segment:?} of {}", self.segments());
        let number = segment.0 as usize;
        (number / PAGE_ENTRIES, number % PAGE_ENTRIES * SEGMENT_REF_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Operation {
        Set(u32, u64, u8),
        Lock(u32),
        Unlock(u32),
        Grow(u64, u64),
        /// By so many segments at once.
        GrowBy(u64),
        Reload(usize),
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let operation = prop_oneof![
            4 => (any::<u32>(), 0..1u64 << 36, 1..64u8).prop_map(|(n, unit, chain)| Operation::Set(n, unit, chain)),
            2 => any::<u32>().prop_map(Operation::Lock),
            2 => any::<u32>().prop_map(Operation::Unlock),
            4 => (0..9u64, 0..9u64).prop_map(|(low, high)| Operation::Grow(low, high)),
            1 => (0..3 * PAGE_ENTRIES as u64 / 2).prop_map(Operation::GrowBy),
            1 => any::<usize>().prop_map(Operation::Reload),
        ];
        vec(operation, 0..120)
    }

    /// An image at a unit, or none at 0.
    fn image_at(unit: u64) -> SegmentRef {
        if unit == 0 { SegmentRef::EMPTY } else { SegmentRef::new(unit, 2) }
    }

    fn level_of(segments: u64) -> HashLevel {
        let level = segments.ilog2();
        HashLevel { level: level as u8, split: (segments - (1 << level)) as u32 }
    }

    /// Writes a page as a checkpoint does, and reads it again. The model loses its locks.
    fn reload(table: &mut LogSegmentTable, page: usize, model: &mut [SegmentRef]) {
        let mut bytes = Vec::new();
        table.copy_page(page, &mut bytes);
        let (first, count) = table.page_segments(page);
        assert_eq!(bytes.len(), count as usize * SEGMENT_REF_BYTES);
        let shorter = &bytes[..bytes.len() - SEGMENT_REF_BYTES];
        assert!(!table.load_page(page, &bytes[1..]) && !table.load_page(page, shorter));
        assert!(!table.load_page(table.page_count(), &bytes));
        assert!(table.load_page(page, &bytes));
        let of_page = &mut model[first.0 as usize..][..count as usize];
        of_page.iter_mut().for_each(|entry| *entry = entry.with_lock(false));
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_a_list(start in 1..20_000u64, operations in operations()) {
            let mut table = LogSegmentTable::new(level_of(start));
            let mut model = vec![SegmentRef::EMPTY; start as usize];
            for operation in operations {
                let number = |n: u32| n as usize % model.len();
                match operation {
                    Operation::Set(n, unit, chain) => {
                        let n = number(n);
                        let image = SegmentRef::new(unit, chain);
                        table.set(SegmentNumber(n as u32), image);
                        model[n] = image.with_lock(model[n].is_locked());
                    }
                    Operation::Lock(n) => {
                        let n = number(n);
                        prop_assert_eq!(table.lock(SegmentNumber(n as u32)), !model[n].is_locked());
                        model[n] = model[n].with_lock(true);
                    }
                    Operation::Unlock(n) => {
                        let n = number(n);
                        if model[n].is_locked() {
                            table.unlock(SegmentNumber(n as u32));
                            model[n] = model[n].with_lock(false);
                        }
                    }
                    Operation::Grow(low, high) => {
                        let parent = model.len() - (1 << model.len().ilog2());
                        table.grow(image_at(low), image_at(high));
                        model[parent] = image_at(low).with_lock(model[parent].is_locked());
                        model.push(image_at(high));
                    }
                    Operation::GrowBy(segments) => {
                        model.resize(model.len() + segments as usize, SegmentRef::EMPTY);
                        table.grow_to(level_of(model.len() as u64));
                    }
                    Operation::Reload(page) => {
                        let page = page % table.page_count();
                        reload(&mut table, page, &mut model);
                    }
                }
                prop_assert_eq!(table.segments(), model.len() as u64);
                prop_assert_eq!(table.page_count(), model.len().div_ceil(PAGE_ENTRIES));
            }
            for (n, &entry) in model.iter().enumerate() {
                prop_assert_eq!(table.get(SegmentNumber(n as u32)), entry, "segment {}", n);
            }
            let images = model.iter().enumerate().filter(|(_, entry)| !entry.is_empty());
            prop_assert!(table.images().eq(images.map(|(n, &entry)| (SegmentNumber(n as u32), entry))));
        }

        #[test]
        fn no_bytes_of_a_page_panic(segments in 1..10_000u64, bytes in vec(any::<u8>(), 0..600), page in 0..3usize) {
            let mut table = LogSegmentTable::new(level_of(segments));
            if table.load_page(page, &bytes) {
                let mut copy = Vec::new();
                table.copy_page(page, &mut copy);
                prop_assert_eq!(copy, bytes);
            }
        }
    }

    #[test]
    fn a_page_with_an_entry_of_another_version_is_refused() {
        let mut table = LogSegmentTable::new(level_of(2));
        let good = [SegmentRef::new(7, 1).to_bytes(), SegmentRef::new(9, 3).to_bytes()].concat();
        assert!(table.load_page(0, &good));
        for (at, bit) in [(5, 0x80), (11, 0x80), (5, 0x04)] {
            let mut bytes = good.clone();
            bytes[at] |= bit;
            assert!(!table.load_page(0, &bytes), "byte {at}");
        }
        assert_eq!(table.get(SegmentNumber(1)), SegmentRef::new(9, 3));
    }

    /// The memory of a table with so many objects, each of so many bytes of entries, after all splits that are due.
    fn memory_of(objects: u64, entry_bytes: u64, target_bytes: u32) -> usize {
        let segments = (objects * entry_bytes).div_ceil(target_bytes.into()).max(1);
        let table = LogSegmentTable::new(level_of(segments));
        assert!(!table.is_split_due(objects * entry_bytes, target_bytes));
        assert!(
            segments == 1
                || LogSegmentTable::new(level_of(segments - 1))
                    .is_split_due(objects * entry_bytes, target_bytes)
        );
        table.memory_bytes()
    }

    #[test]
    fn an_object_adds_less_than_half_a_byte() {
        // Entry and target in bytes; the most bytes per object that the target is chosen for.
        for (entry, target, most) in [(25, 800, 0.20), (33, 800, 0.26), (39, 800, 0.30), (33, 2_800, 0.08)] {
            let (few, many) = (1_000_000, 10_000_000);
            let added = memory_of(many, entry, target) - memory_of(few, entry, target);
            let slope = added as f64 / (many - few) as f64;
            assert!(slope < most, "{slope} B an object of {entry} B at a target of {target} B");
            assert!(slope < 0.5);
        }
    }

    #[test]
    fn memory_rises_by_a_page_and_never_doubles() {
        let mut table = LogSegmentTable::default();
        let mut before = table.memory_bytes();
        for _ in 0..20 * PAGE_ENTRIES {
            table.grow(SegmentRef::EMPTY, SegmentRef::EMPTY);
            let added = table.memory_bytes() - before;
            assert!(added <= PAGE_BYTES + 1024, "{added} bytes at {} segments", table.segments());
            before += added;
        }
        assert_eq!(table.page_count(), 21);
    }

    #[test]
    #[should_panic(expected = "is not locked")]
    fn unlocking_twice_is_a_bug() {
        let mut table = LogSegmentTable::default();
        assert!(table.lock(SegmentNumber(0)));
        table.unlock(SegmentNumber(0));
        table.unlock(SegmentNumber(0));
    }

    #[test]
    #[should_panic(expected = "SegmentNumber(3) of 3")]
    fn a_segment_behind_the_last_is_a_bug() {
        LogSegmentTable::new(level_of(3)).get(SegmentNumber(3));
    }
}
