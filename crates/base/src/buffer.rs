//! Page-aligned buffers that move between sockets and devices without a copy, and their bounded pool.
//!
//! A [`Buffer`] has one owner at a time, which may write it; during a device operation the device queue is
//! the owner. A dropped buffer returns to its [`BufferPool`]. The pool never has more bytes in use than its
//! budget: `None` from [`BufferPool::take`] starts back-pressure.
//!
//! Invariants: a buffer starts at a multiple of [`PAGE_BYTES`] and its capacity is a multiple of it; the
//! bytes in use never exceed the budget; a reused buffer is not cleared. Tested below.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Alignment and size granularity of buffers, in bytes: sufficient for O_DIRECT on every accepted device.
pub const PAGE_BYTES: usize = 4096;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// An owned, page-aligned buffer. Dereferences to `len()` bytes; [`Buffer::set_len`] extends it to at most
/// `capacity()` bytes.
pub struct Buffer {
    pages: Box<[Page]>,
    len: usize,
    pool: Option<Arc<PoolInner>>,
}

impl Buffer {
    /// A zeroed buffer of `len` bytes outside any pool and its budget.
    pub fn zeroed(len: usize) -> Buffer {
        Buffer { pages: zeroed_pages(len.div_ceil(PAGE_BYTES)), len, pool: None }
    }

    /// The allocated size in bytes, a multiple of [`PAGE_BYTES`].
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_BYTES
    }

    /// Sets the length in bytes. The contents beyond the old length are unspecified, never uninitialized.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes in a buffer of {}", self.capacity());
        self.len = len;
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.release(std::mem::take(&mut self.pages));
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} of {} B)", self.len, self.capacity())
    }
}

fn zeroed_pages(count: usize) -> Box<[Page]> {
    // Fails only if the process is out of memory, and the pool's budget was chosen to fit it.
    <[Page]>::new_box_zeroed_with_elems(count).expect("memory for a buffer within its budget")
}

/// A buffer pool with a byte budget. Clones share one pool; a buffer may be dropped on any thread.
#[derive(Clone)]
pub struct BufferPool(Arc<PoolInner>);

struct PoolInner {
    budget_bytes: usize,
    /// Bytes of the buffers that are taken and not yet dropped, at most `budget_bytes`.
    in_use_bytes: AtomicUsize,
    /// Bytes allocated by the pool: in use plus kept in `free_lists` for reuse.
    resident_bytes: AtomicUsize,
    /// Free buffers, indexed by their [`size_class`].
    free_lists: [Mutex<Vec<Box<[Page]>>>; SIZE_CLASSES],
}

/// The number of size classes. Above 8 pages, classes step by a quarter of a power of two, so at most a fifth
/// of a large buffer is unused.
const SIZE_CLASSES: usize = 72;

fn size_class(pages: usize) -> usize {
    if pages <= 8 {
        return pages;
    }
    let power = pages.ilog2() as usize;
    let step = 1 << (power - 2);
    let quarters = (pages - (1 << power)).div_ceil(step);
    8 + (power - 3) * 4 + quarters
}

fn size_class_pages(class: usize) -> usize {
    if class <= 8 {
        return class;
    }
    let power = 3 + (class - 8) / 4;
    (1 << power) + ((class - 8) % 4) * (1 << (power - 2))
}

impl BufferPool {
    /// An empty pool that has at most `budget_bytes` in use at a time.
    pub fn new(budget_bytes: usize) -> BufferPool {
        BufferPool(Arc::new(PoolInner {
            budget_bytes,
            in_use_bytes: AtomicUsize::new(0),
            resident_bytes: AtomicUsize::new(0),
            free_lists: std::array::from_fn(|_| Mutex::new(Vec::new())),
        }))
    }

    /// Takes a buffer of `len` bytes with unspecified contents. `None` if it would exceed the budget.
    pub fn take(&self, len: usize) -> Option<Buffer> {
        Some(self.reserve(len)?.into_buffer())
    }

    /// Reserves a buffer of `len` bytes, which counts as in use. `None` if it would exceed the budget.
    #[inline]
    pub fn reserve(&self, len: usize) -> Option<BufferReservation> {
        let class = size_class(len.div_ceil(PAGE_BYTES).max(1));
        if class >= SIZE_CLASSES {
            return None;
        }
        let bytes = size_class_pages(class) * PAGE_BYTES;
        let inner = &self.0;
        let in_use_before = inner.in_use_bytes.fetch_add(bytes, Ordering::Relaxed);
        if in_use_before + bytes > inner.budget_bytes {
            inner.in_use_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        Some(BufferReservation { pool: Some(Arc::clone(inner)), class, len })
    }

    /// Bytes of the buffers in use, rounded up to their size classes.
    pub fn in_use_bytes(&self) -> usize {
        self.0.in_use_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of the budget that are not in use.
    pub fn free_bytes(&self) -> usize {
        self.0.budget_bytes.saturating_sub(self.in_use_bytes())
    }

    /// Bytes of memory allocated by the pool: buffers in use and free buffers kept for reuse.
    pub fn resident_bytes(&self) -> usize {
        self.0.resident_bytes.load(Ordering::Relaxed)
    }

    /// The limit for [`BufferPool::in_use_bytes`].
    pub fn budget_bytes(&self) -> usize {
        self.0.budget_bytes
    }
}

/// The right to a buffer of a pool, which the pool counts as in use.
pub struct BufferReservation {
    /// `None` once it is a buffer.
    pool: Option<Arc<PoolInner>>,
    class: usize,
    len: usize,
}

impl BufferReservation {
    /// The buffer, with unspecified contents.
    pub fn into_buffer(mut self) -> Buffer {
        // The bytes that are in use are the buffer's now.
        let pool = self.pool.take();
        let reused = pool.as_ref().and_then(|inner| inner.free_list(self.class).pop());
        let pages = reused.unwrap_or_else(|| {
            let pages = size_class_pages(self.class);
            pool.iter().for_each(|inner| inner.add_resident_bytes(pages * PAGE_BYTES));
            zeroed_pages(pages)
        });
        Buffer { pages, len: self.len, pool }
    }
}

impl fmt::Debug for BufferReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferReservation({} B)", self.len)
    }
}

impl Drop for BufferReservation {
    #[inline]
    fn drop(&mut self) {
        if let Some(inner) = &self.pool {
            let bytes = size_class_pages(self.class) * PAGE_BYTES;
            inner.in_use_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl PoolInner {
    fn free_list(&self, class: usize) -> std::sync::MutexGuard<'_, Vec<Box<[Page]>>> {
        self.free_lists[class].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accounts for a new allocation of `bytes`. Frees kept buffers of other sizes, largest first, while the
    /// resident bytes exceed the budget.
    fn add_resident_bytes(&self, bytes: usize) {
        let mut resident = self.resident_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        for class in (1..SIZE_CLASSES).rev() {
            while resident > self.budget_bytes {
                let Some(pages) = self.free_list(class).pop() else { break };
                let freed = pages.len() * PAGE_BYTES;
                resident = self.resident_bytes.fetch_sub(freed, Ordering::Relaxed) - freed;
            }
        }
    }

    fn release(&self, pages: Box<[Page]>) {
        let (class, bytes) = (size_class(pages.len()), pages.len() * PAGE_BYTES);
        // First to the free list, then out of use: a `take` in between may find the pages free, never missing.
        self.free_list(class).push(pages);
        self.in_use_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferPool({} of {} B in use)", self.in_use_bytes(), self.budget_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_class_fits_the_request_and_wastes_at_most_a_quarter() {
        for pages in 1..5000 {
            let got = size_class_pages(size_class(pages));
            assert!(got >= pages && got <= pages + pages.div_ceil(4), "{pages} pages got {got}");
            assert_eq!(size_class(got), size_class(pages));
        }
    }

    #[test]
    fn a_pool_never_hands_out_more_than_its_budget() {
        let pool = BufferPool::new(3 * PAGE_BYTES);
        let first = pool.take(1).unwrap();
        let _second = pool.take(PAGE_BYTES).unwrap();
        assert!(pool.take(PAGE_BYTES + 1).is_none());
        drop(first);
        assert!(pool.take(PAGE_BYTES + 1).is_some());
    }

    #[test]
    fn a_reservation_is_in_use_until_it_or_its_buffer_is_dropped() {
        let pool = BufferPool::new(3 * PAGE_BYTES);
        let (first, second) = (pool.reserve(PAGE_BYTES + 1).unwrap(), pool.reserve(1).unwrap());
        assert!(pool.take(1).is_none() && pool.reserve(1).is_none());
        let buffer = first.into_buffer();
        assert_eq!((buffer.len(), pool.in_use_bytes()), (PAGE_BYTES + 1, 3 * PAGE_BYTES));
        drop(second);
        assert_eq!(pool.in_use_bytes(), 2 * PAGE_BYTES);
        drop(buffer);
        assert_eq!((pool.in_use_bytes(), pool.resident_bytes()), (0, 2 * PAGE_BYTES));
    }

    #[test]
    fn free_buffers_are_released_for_other_sizes_within_the_budget() {
        let pool = BufferPool::new(8 * PAGE_BYTES);
        drop((0..8).map(|_| pool.take(1).unwrap()).collect::<Vec<_>>());
        drop(pool.take(8 * PAGE_BYTES).unwrap());
        assert!(pool.0.resident_bytes.load(Ordering::Relaxed) <= pool.budget_bytes());
    }

    #[test]
    fn buffers_are_aligned_and_grow_to_their_capacity() {
        let mut buffer = Buffer::zeroed(10);
        assert_eq!(buffer.as_ptr() as usize % PAGE_BYTES, 0);
        buffer.set_len(PAGE_BYTES);
        assert!(buffer.iter().all(|&b| b == 0));
    }
}
