//! A list that grows while other threads read it: elements never move, and readers take no lock.
//!
//! ```text
//!   directory: 24 parts, each of twice as many chunks as the one before ─▶ chunk of 512 elements ─▶ element
//! ```
//! Parts and chunks are allocated when they are needed. Elements begin with their default, and have to be changeable behind a shared
//! reference: atomics, or a `OnceLock`. Indices are 32 bits, half a pointer: links between elements are indices, and no reference
//! to an element outlives a borrow of the list. A thread that learned of an index by an acquire load, after its release store, finds the
//! element.
//!
//! Tested below and by the memtable.

use std::sync::OnceLock;

const CHUNK_ELEMENTS: u32 = 512;
const PARTS: usize = 24;

/// The index that no element has.
pub const NO_INDEX: u32 = u32::MAX;

type ListChunk<T> = OnceLock<Box<[T]>>;

/// The list.
pub struct AppendList<T> {
    parts: [OnceLock<Box<[ListChunk<T>]>>; PARTS],
}

/// Part, chunk within it, and element within that.
fn place_of(index: u32) -> (usize, usize, usize) {
    let chunk = index / CHUNK_ELEMENTS + 1;
    let part = chunk.ilog2();
    (part as usize, (chunk - (1 << part)) as usize, (index % CHUNK_ELEMENTS) as usize)
}

fn defaults<E: Default>(elements: usize) -> Box<[E]> {
    std::iter::repeat_with(E::default).take(elements).collect()
}

impl<T> Default for AppendList<T> {
    fn default() -> AppendList<T> {
        AppendList { parts: std::array::from_fn(|_| OnceLock::new()) }
    }
}

impl<T: Default> AppendList<T> {
    /// Makes the element of an index, if it is not there. Gives the sizes of the allocations for it, in bytes.
    ///
    /// # Panics
    /// If the index is [`NO_INDEX`].
    pub fn grow_to(&self, index: u32) -> [usize; 2] {
        assert_ne!(index, NO_INDEX, "the list is full");
        let (part, chunk, _) = place_of(index);
        let (mut part_bytes, mut chunk_bytes) = (0, 0);
        let chunks = self.parts[part].get_or_init(|| {
            part_bytes = size_of::<ListChunk<T>>() << part;
            defaults(1 << part)
        });
        chunks[chunk].get_or_init(|| {
            chunk_bytes = size_of::<T>() * CHUNK_ELEMENTS as usize;
            defaults(CHUNK_ELEMENTS as usize)
        });
        [part_bytes, chunk_bytes]
    }

    /// The element of an index.
    ///
    /// # Panics
    /// If it was not made.
    #[inline]
    pub fn get(&self, index: u32) -> &T {
        let (part, chunk, element) = place_of(index);
        let chunks = self.parts[part].get().expect("an index is published after its element");
        &chunks[chunk].get().expect("an index is published after its element")[element]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn every_index_has_a_place_of_its_own() {
        assert_eq!(place_of(0), (0, 0, 0));
        assert_eq!(place_of(511), (0, 0, 511));
        assert_eq!(place_of(512), (1, 0, 0));
        assert_eq!(place_of(512 * 3), (2, 0, 0));
        assert_eq!(place_of(512 * 7 - 1), (2, 3, 511));
        assert_eq!(place_of(NO_INDEX - 1), (PARTS - 1, 0, 510));
    }

    #[test]
    fn elements_stay_where_they_are() {
        let list = AppendList::<AtomicU32>::default();
        let mut allocated_bytes: usize = list.grow_to(0).iter().sum();
        let first: *const AtomicU32 = list.get(0);
        for index in 0..5000 {
            allocated_bytes += list.grow_to(index).iter().sum::<usize>();
            list.get(index).store(index * 3, Ordering::Relaxed);
        }
        assert!((0..5000).all(|index| list.get(index).load(Ordering::Relaxed) == index * 3));
        assert!(std::ptr::eq(first, list.get(0)));
        let chunks = 5000usize.div_ceil(512);
        let directory = (1 << (chunks.ilog2() + 1)) - 1;
        assert_eq!(allocated_bytes, chunks * 512 * size_of::<AtomicU32>() + directory * 24);
    }
}
