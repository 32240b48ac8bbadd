//! A memory that cores share: its bytes are read and written in place, under latches of its pages.
//!
//! In: ranges of bytes. Out: guards that give access to them, or `None`, since no call waits. A reader may hold bytes beyond
//! its call ([`HeldBytes`]), to send them from where they are.
//!
//! Unsafe code: the slices over the mapping, whose aliasing the latches decide. A page with a writer has no other user;
//! that is model checked in [`crate::page_latches`].

use crate::huge_pages::HugePageBuffer;
use crate::page_latches::PageLatches;
use crate::prefetch::{prefetch_read_at, prefetch_write_at};
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that have one latch.
pub const LATCHED_PAGE_BYTES: usize = 4096;

/// See the module documentation.
#[derive(Debug)]
pub struct LatchedMemory {
    /// Owns the mapping. Never dereferenced as a whole: that would alias what a writer has.
    memory: HugePageBuffer,
    len: usize,
    latches: PageLatches,
}

impl LatchedMemory {
    /// Shares a memory.
    pub fn new(memory: HugePageBuffer) -> LatchedMemory {
        let len = memory.len();
        LatchedMemory { memory, len, latches: PageLatches::new(len.div_ceil(LATCHED_PAGE_BYTES)) }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// The pages of a range of bytes.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    fn pages(&self, range: &Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        range.start / LATCHED_PAGE_BYTES..range.end.div_ceil(LATCHED_PAGE_BYTES)
    }

    #[inline]
    fn address(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.len);
        // SAFETY: callers have checked by `pages` that the offset is within the mapping, or its end.
        unsafe { self.memory.start().add(offset) }
    }

    /// Access to bytes that stay as they are. `None` if a writer has one of their pages, or waits for it.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    pub fn try_read(&self, range: Range<usize>) -> Option<ReadGuard<'_>> {
        let pages = self.pages(&range);
        self.latches.try_read(pages.clone()).then(|| ReadGuard { memory: self, pages, range })
    }

    /// Access to bytes that nothing else reads or writes. `None` if something does, in one of their pages.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    pub fn try_write(&self, range: Range<usize>) -> Option<WriteGuard<'_>> {
        let pages = self.pages(&range);
        self.latches.try_write(pages.clone()).then(|| WriteGuard { memory: self, pages, range })
    }

    /// As [`LatchedMemory::try_write`] for a caller that tries until it succeeds or calls [`LatchedMemory::stop_waiting`]. Until
    /// then no new reader gets the bytes that it waits for.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub fn wait_to_write(&self, range: Range<usize>) -> Option<WriteGuard<'_>> {
        let pages = self.pages(&range);
        self.latches.wait_to_write(pages.clone()).then(|| WriteGuard { memory: self, pages, range })
    }

    /// Ends the waiting for a range.
    ///
    /// # Panics
    /// If the range is not within the memory.
    pub fn stop_waiting(&self, range: Range<usize>) {
        self.latches.stop_waiting(self.pages(&range));
    }

    /// Prefetches bytes for reading. A hint, which reads nothing.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    pub fn prefetch_read(&self, range: Range<usize>) {
        self.pages(&range);
        prefetch_read_at(self.address(range.start).as_ptr(), range.len());
    }

    /// Prefetches bytes for writing. A hint, which writes nothing.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    pub fn prefetch_write(&self, range: Range<usize>) {
        self.pages(&range);
        prefetch_write_at(self.address(range.start).as_ptr(), range.len());
    }
}

/// One core's owner of a memory. Its clones, and the bytes that are held by it, count on this core alone.
#[derive(Clone, Debug)]
pub struct MemoryView(Rc<SharedOwner>);

#[derive(Debug)]
struct SharedOwner(Arc<LatchedMemory>);

impl MemoryView {
    /// An owner of `memory` on this core.
    pub fn new(memory: Arc<LatchedMemory>) -> MemoryView {
        MemoryView(Rc::new(SharedOwner(memory)))
    }
}

impl Deref for MemoryView {
    type Target = LatchedMemory;
    #[inline]
    fn deref(&self) -> &LatchedMemory {
        &self.0.0
    }
}

/// Bytes that stay as they are while the guard lives.
#[derive(Debug)]
pub struct ReadGuard<'a> {
    memory: &'a LatchedMemory,
    pages: Range<usize>,
    range: Range<usize>,
}

impl ReadGuard<'_> {
    /// Holds some of the bytes, a range in this guard's, for as long as needed.
    ///
    /// # Panics
    /// If `owner` is another memory, or the range is not within the guard's.
    #[inline]
    pub fn hold(self, owner: &MemoryView, held: Range<usize>) -> HeldBytes {
        assert!(std::ptr::eq(&raw const **owner, self.memory), "the owner of the bytes");
        assert!(held.start <= held.end && held.end <= self.range.len(), "{held:?} of {:?}", self.range);
        let start = self.memory.address(self.range.start + held.start);
        let pages = self.pages.clone();
        // The latches stay: they are the held bytes' now.
        std::mem::forget(self);
        HeldBytes { memory: owner.clone(), pages, start, len: held.len() }
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let start = self.memory.address(self.range.start).as_ptr();
        // SAFETY: the range is within the mapping, which outlives the borrow, and its pages are latched for reading: nothing
        // writes them while the guard lives.
        unsafe { std::slice::from_raw_parts(start, self.range.len()) }
    }
}

impl Drop for ReadGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.memory.latches.end_read(self.pages.clone());
    }
}

/// Bytes that nothing else reads or writes while the guard lives.
#[derive(Debug)]
pub struct WriteGuard<'a> {
    memory: &'a LatchedMemory,
    pages: Range<usize>,
    range: Range<usize>,
}

impl Deref for WriteGuard<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let start = self.memory.address(self.range.start).as_ptr();
        // SAFETY: the range is within the mapping, which outlives the borrow, and its pages are latched for this guard alone.
        unsafe { std::slice::from_raw_parts(start, self.range.len()) }
    }
}

impl DerefMut for WriteGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.memory.address(self.range.start).as_ptr();
        // SAFETY: as above, and `&mut self` excludes every other borrow of the guard.
        unsafe { std::slice::from_raw_parts_mut(start, self.range.len()) }
    }
}

impl Drop for WriteGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.memory.latches.end_write(self.pages.clone());
    }
}

/// Bytes of a memory that stay as they are while this lives, on the core that holds them. Their writers wait meanwhile.
pub struct HeldBytes {
    memory: MemoryView,
    pages: Range<usize>,
    start: NonNull<u8>,
    len: usize,
}

impl Deref for HeldBytes {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `hold` took the range from a guard, whose latches this has until it is dropped: nothing writes the bytes. The
        // memory lives as long as this owner of it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HeldBytes {
    #[inline]
    fn drop(&mut self) {
        self.memory.latches.end_read(self.pages.clone());
    }
}

impl fmt::Debug for HeldBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeldBytes({} B)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn memory(bytes: usize) -> Arc<LatchedMemory> {
        Arc::new(LatchedMemory::new(HugePageBuffer::new(bytes).unwrap()))
    }

    #[test]
    fn held_bytes_stay_as_they_are_until_they_are_dropped() {
        let memory = memory(3 * LATCHED_PAGE_BYTES + 100);
        let owner = MemoryView::new(Arc::clone(&memory));
        memory.try_write(4000..4200).unwrap().fill(7);
        let held = memory.try_read(4000..4200).unwrap().hold(&owner, 50..150);
        assert_eq!(held[..], [7; 100]);
        assert!(memory.try_write(0..1).is_none() && memory.try_write(4096..4097).is_none(), "both pages");
        assert!(memory.try_write(8192..memory.bytes()).is_some(), "other pages");
        assert!(memory.try_read(0..1).is_some(), "readers share");
        assert!(memory.wait_to_write(0..1).is_none() && memory.try_read(0..1).is_none());
        memory.stop_waiting(0..1);
        drop(held);
        assert!(memory.try_write(0..memory.bytes()).is_some());
    }

    #[test]
    fn the_memory_outlives_its_last_owner_while_bytes_are_held() {
        let memory = memory(LATCHED_PAGE_BYTES);
        memory.try_write(0..10).unwrap().fill(9);
        let owner = MemoryView::new(memory);
        let held = owner.try_read(0..10).unwrap().hold(&owner, 0..10);
        drop(owner);
        assert_eq!(held[..], [9; 10]);
    }

    #[test]
    #[should_panic(expected = "the owner of the bytes")]
    fn bytes_are_held_by_their_own_memory_only() {
        let (memory, other) = (memory(10), MemoryView::new(memory(10)));
        let _ = memory.try_read(0..10).unwrap().hold(&other, 0..10);
    }

    #[test]
    fn ranges_outside_the_memory_are_refused() {
        let memory = memory(100);
        for range in [0..101, 101..101, 101..usize::MAX] {
            let refused = || drop(memory.try_read(range.clone()));
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(refused)).is_err(), "{range:?}");
        }
        assert!(memory.try_read(100..100).is_some_and(|guard| guard.is_empty()));
    }

    #[test]
    fn threads_never_see_a_half_written_page() {
        let (memory, ended) = (memory(2 * LATCHED_PAGE_BYTES), AtomicBool::new(false));
        let range = 1000..6000;
        std::thread::scope(|scope| {
            for thread in 0..2u8 {
                let (memory, ended, range) = (&memory, &ended, range.clone());
                scope.spawn(move || {
                    for round in 0..2000u32 {
                        match memory.wait_to_write(range.clone()) {
                            Some(mut bytes) => bytes.fill(thread * 100 + (round % 100) as u8),
                            None => std::thread::yield_now(),
                        }
                    }
                    memory.stop_waiting(range);
                    ended.store(true, Ordering::Relaxed);
                });
            }
            let owner = MemoryView::new(Arc::clone(&memory));
            while !ended.load(Ordering::Relaxed) {
                if let Some(guard) = memory.try_read(range.clone()) {
                    let held = guard.hold(&owner, 0..5000);
                    assert!(held.iter().all(|&byte| byte == held[0]));
                }
            }
        });
    }
}
