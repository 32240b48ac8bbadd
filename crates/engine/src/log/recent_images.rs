//! A cache of the segment images that users' operations read or wrote last, of one core.
//!
//! A put whose key was read a moment before, as in a read-modify-write, finds the image of its segment here, and so does the next operation on a hot segment:
//! one access less each. Replacement is FIFO with a second chance.
//!
//! In: images with the place of each. Out: images that are still those of their segments. Invariants: an image is given only for the place that the segment table
//! names now, in a chunk that was not opened since it was read or written there, so it is the image that a read would find; images with damaged buckets are
//! never kept; the bytes of all are at most those allowed. Tested below, and in `tests/log_accesses.rs`.

use super::chunk_pool::ChunkPool;
use super::hash_prefix::SegmentNumber;
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::map::FxHashMap;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::rc::Rc;

/// The memory of an image beside its entries, about.
const OVERHEAD_BYTES: usize = 128;

/// A segment of a store.
type SegmentOfStore = (u32, SegmentNumber);

struct RecentImage {
    place: SegmentRef,
    /// The openings of chunks before it was read, or when it was published.
    opens: u64,
    entries: Rc<SegmentImage>,
    was_used: bool,
}

/// The images of a core.
pub(super) struct RecentImages {
    images: FxHashMap<SegmentOfStore, RecentImage>,
    /// Each of the segments once, in the order in which they are looked at for replacement.
    order: VecDeque<SegmentOfStore>,
    bytes: usize,
    bytes_max: usize,
}

fn memory_of(image: &SegmentImage) -> usize {
    image.entry_bytes() + size_of_val(image.starts()) + OVERHEAD_BYTES
}

impl RecentImages {
    /// None yet, and never more bytes than these. 0 keeps none.
    pub(super) fn new(bytes_max: usize) -> RecentImages {
        RecentImages { images: FxHashMap::default(), order: VecDeque::new(), bytes: 0, bytes_max }
    }

    /// The image of a segment, if it is the one that lies at `place`, where the segment table says now that it lies.
    pub(super) fn find(
        &mut self,
        store: u32,
        segment: SegmentNumber,
        place: SegmentRef,
        pool: &ChunkPool,
    ) -> Option<Rc<SegmentImage>> {
        let image = self.images.get_mut(&(store, segment))?;
        let is_there =
            image.place == place.with_lock(false) && pool.unopened_since(place.unit(), image.opens);
        if !is_there && !bug_injection::is_injected(InjectedBug::LogServeOldImage) {
            return None;
        }
        image.was_used = true;
        Some(Rc::clone(&image.entries))
    }

    /// Keeps an intact image. REQUIRES: it lay at its place at a moment after `opens` was taken.
    pub(super) fn keep(
        &mut self,
        store: u32,
        segment: SegmentNumber,
        place: SegmentRef,
        opens: u64,
        entries: Rc<SegmentImage>,
    ) {
        let memory = memory_of(&entries);
        if memory > self.bytes_max || entries.is_lost() {
            return;
        }
        let image = RecentImage { place: place.with_lock(false), opens, entries, was_used: false };
        self.bytes += memory;
        match self.images.entry((store, segment)) {
            Entry::Occupied(mut known) => {
                self.bytes -= memory_of(&known.get().entries);
                known.insert(RecentImage { was_used: true, ..image });
            }
            Entry::Vacant(vacant) => {
                vacant.insert(image);
                self.order.push_back((store, segment));
            }
        }
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.order.pop_front() else { break };
            let Some(image) = self.images.get_mut(&oldest) else { continue };
            if std::mem::take(&mut image.was_used) {
                self.order.push_back(oldest);
            } else {
                self.bytes -= memory_of(&image.entries);
                self.images.remove(&oldest);
            }
        }
    }

    /// Whether it has an image of a segment, of whatever place.
    pub(super) fn has(&self, store: u32, segment: SegmentNumber) -> bool {
        self.images.contains_key(&(store, segment))
    }
}

#[cfg(test)]
mod tests {
    use super::super::chunk_pool::ChunkOwner;
    use super::super::log_layout::ChunkSizes;
    use super::super::log_place::{ChunkIndex, LogKind};
    use super::super::segment_entry::{EntryContents, SegmentEntry};
    use super::super::space_limits::{ChunkPurpose, SpaceLimits};
    use super::*;
    use crate::common::record::{RecordFlags, RecordMeta};

    const CHUNK_UNITS: u32 = 128;

    fn pool() -> ChunkPool {
        ChunkPool::new(0, ChunkSizes::of_units(CHUNK_UNITS), SpaceLimits::new(64, 2, 1))
    }

    fn open_chunk(pool: &ChunkPool) -> u64 {
        let chunk = pool.reserve(ChunkPurpose::User).expect("free chunks");
        pool.open(chunk, ChunkOwner { partition: 0, kind: LogKind::Keys, index: ChunkIndex(0) });
        u64::from(chunk.0) * u64::from(CHUNK_UNITS)
    }

    fn image(key: &[u8]) -> Rc<SegmentImage> {
        let mut image = SegmentImage::new();
        let flags = RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE);
        let meta = RecordMeta { flags, ..RecordMeta::PLAIN };
        image.replace(&SegmentEntry { key, meta, contents: EntryContents::Tombstone });
        Rc::new(image)
    }

    #[test]
    fn an_image_is_given_for_its_place_alone_and_not_behind_an_opening_of_its_chunk() {
        let (pool, mut recent) = (pool(), RecentImages::new(10_000));
        let (segment, unit) = (SegmentNumber(7), open_chunk(&pool));
        let place = SegmentRef::new(unit, 1);
        recent.keep(3, segment, place, pool.opens_now(), image(b"key"));
        let find =
            |recent: &mut RecentImages, store, segment, place| recent.find(store, segment, place, &pool);
        assert_eq!(find(&mut recent, 3, segment, place), Some(image(b"key")));
        assert_eq!(find(&mut recent, 3, segment, place.with_lock(true)), Some(image(b"key")));
        assert_eq!(find(&mut recent, 2, segment, place), None, "another store");
        assert_eq!(find(&mut recent, 3, SegmentNumber(8), place), None, "another segment");
        assert_eq!(find(&mut recent, 3, segment, SegmentRef::new(unit + 1, 1)), None, "a newer image");
        assert_eq!(find(&mut recent, 3, segment, SegmentRef::new(unit, 2)), None, "a longer one");
        // As if its chunk had been opened behind the read.
        let opens_before = pool.opens_now() - 1;
        recent.keep(3, segment, place, opens_before, image(b"key"));
        assert_eq!(find(&mut recent, 3, segment, place), None);
    }

    #[test]
    fn the_bytes_are_bounded_and_images_that_were_used_stay() {
        let pool = pool();
        let place = SegmentRef::new(open_chunk(&pool), 1);
        let memory = memory_of(&image(b"0123"));
        let mut recent = RecentImages::new(10 * memory);
        for number in 0..100 {
            recent.keep(0, SegmentNumber(number), place, pool.opens_now(), image(b"0123"));
            assert!(recent.bytes <= 10 * memory && recent.bytes == recent.images.len() * memory);
            assert_eq!(recent.order.len(), recent.images.len());
            if number >= 5 {
                assert!(recent.find(0, SegmentNumber(5), place, &pool).is_some(), "{number}");
            }
        }
        assert_eq!(recent.images.len(), 10);
        // Again and again the same, of other lengths.
        for length in 0..50 {
            recent.keep(0, SegmentNumber(5), place, pool.opens_now(), image(&[1; 50][..length]));
        }
        assert!(recent.bytes <= 10 * memory && recent.has(0, SegmentNumber(5)));
        let mut lost = SegmentImage::clone(&image(b"key"));
        lost.set_lost(true);
        recent.keep(0, SegmentNumber(500), place, pool.opens_now(), Rc::new(lost));
        assert!(!recent.has(0, SegmentNumber(500)), "an image with damaged buckets");
        let mut none = RecentImages::new(0);
        none.keep(0, SegmentNumber(1), place, pool.opens_now(), image(b"key"));
        assert!(!none.has(0, SegmentNumber(1)));
    }
}
