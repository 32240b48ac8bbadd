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
    #[inline]
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

    /// Prefetches `len` bytes from `offset` on for reading. A hint, which reads nothing: it may have any address.
    #[inline]
    pub fn prefetch_read(&self, offset: usize, len: usize) {
        prefetch_read_at(self.memory.start().as_ptr().wrapping_add(offset), len);
    }

    /// Prefetches `len` bytes from `offset` on for writing. A hint, as [`LatchedMemory::prefetch_read`].
    #[inline]
    pub fn prefetch_write(&self, offset: usize, len: usize) {
        prefetch_write_at(self.memory.start().as_ptr().wrapping_add(offset), len);
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

    /// Access to bytes that stay as they are. `None` if a writer has one of their pages, or waits for it.
    ///
    /// # Panics
    /// If the range is not within the memory.
    #[inline]
    pub fn try_read(&self, range: Range<usize>) -> Option<ReadGuard<'_>> {
        let pages = self.pages(&range);
        if !self.latches.try_read(pages.clone()) {
            return None;
        }
        Some(ReadGuard { owner: self, pages, start: self.address(range.start), len: range.len() })
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
    owner: &'a MemoryView,
    pages: Range<usize>,
    start: NonNull<u8>,
    len: usize,
}

impl ReadGuard<'_> {
    /// Holds some of the bytes, a range in this guard's, for as long as needed.
    ///
    /// # Panics
    /// If the range is not within the guard's.
    #[inline]
    pub fn hold(self, held: Range<usize>) -> HeldBytes {
        assert!(held.start <= held.end && held.end <= self.len, "{held:?} of {} bytes", self.len);
        // SAFETY: the range is within the guard's, which is within the mapping.
        let start = unsafe { self.start.add(held.start) };
        let (memory, pages) = (self.owner.clone(), self.pages.clone());
        // The latches stay: they are the held bytes' now.
        std::mem::forget(self);
        HeldBytes { memory, pages, start, len: held.len() }
    }
}

impl Deref for ReadGuard<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are within the mapping, which outlives the borrow, and their pages are latched for reading: nothing
        // writes them while the guard lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for ReadGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.owner.latches.end_read(self.pages.clone());
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
        let held = owner.try_read(4000..4200).unwrap().hold(50..150);
        assert_eq!(held[..], [7; 100]);
        assert!(memory.try_write(0..1).is_none() && memory.try_write(4096..4097).is_none(), "both pages");
        assert!(memory.try_write(8192..memory.bytes()).is_some(), "other pages");
        assert!(owner.try_read(0..1).is_some(), "readers share");
        assert!(memory.wait_to_write(0..1).is_none() && owner.try_read(0..1).is_none());
        memory.stop_waiting(0..1);
        drop(held);
        assert!(memory.try_write(0..memory.bytes()).is_some());
    }

    #[test]
    fn the_memory_outlives_its_last_owner_while_bytes_are_held() {
        let memory = memory(LATCHED_PAGE_BYTES);
        memory.try_write(0..10).unwrap().fill(9);
        let owner = MemoryView::new(memory);
        let held = owner.try_read(0..10).unwrap().hold(0..10);
        drop(owner);
        assert_eq!(held[..], [9; 10]);
    }

    #[test]
    #[should_panic(expected = "5..11 of 10 bytes")]
    fn no_bytes_are_held_beyond_those_that_were_read() {
        let owner = MemoryView::new(memory(20));
        let _ = owner.try_read(0..10).unwrap().hold(5..11);
    }

    #[test]
    fn ranges_outside_the_memory_are_refused() {
        let memory = MemoryView::new(memory(100));
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
                if let Some(guard) = owner.try_read(range.clone()) {
                    let held = guard.hold(0..5000);
                    assert!(held.iter().all(|&byte| byte == held[0]));
                }
            }
        });
    }
}
