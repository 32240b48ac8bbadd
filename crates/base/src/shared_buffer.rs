//! Read-only bytes that several owners share, within a budget, and the two forms in which a value is passed to a socket.
//!
//! A [`SharedBuffer`] is what a cache keeps: sockets send from it, and its memory is freed when the cache and the last
//! socket have dropped it, on any thread. Unlike a [`Buffer`] it takes no whole pages, and no device reads into it.
//!
//! Invariant: the bytes of all buffers of a [`ByteBudget`], at their allocated size, never exceed its limit. Tested below.

use crate::buffer::Buffer;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A limit for the allocated bytes of shared buffers. Clones are the same budget.
#[derive(Clone, Debug)]
pub struct ByteBudget(Arc<BudgetState>);

#[derive(Debug)]
struct BudgetState {
    limit_bytes: usize,
    in_use_bytes: AtomicUsize,
}

impl ByteBudget {
    /// A budget of `limit_bytes`, of which nothing is in use.
    pub fn new(limit_bytes: usize) -> ByteBudget {
        ByteBudget(Arc::new(BudgetState { limit_bytes, in_use_bytes: AtomicUsize::new(0) }))
    }

    /// The bytes in use, at most the limit.
    pub fn in_use_bytes(&self) -> usize {
        self.0.in_use_bytes.load(Ordering::Relaxed)
    }

    fn reserve(&self, bytes: usize) -> bool {
        let reserve = |in_use: usize| in_use.checked_add(bytes).filter(|&sum| sum <= self.0.limit_bytes);
        self.0.in_use_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    fn release(&self, bytes: usize) {
        let before = self.0.in_use_bytes.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "{bytes} of {before} bytes released");
    }
}

/// Read-only bytes with several owners. A clone is another owner.
#[derive(Clone)]
pub struct SharedBuffer(Arc<SharedState>);

struct SharedState {
    bytes: Box<[u8]>,
    budget: ByteBudget,
}

/// What the allocator takes for `bytes` bytes on a 64-bit machine: a word in front, a multiple of 16 bytes, at least 32.
const fn allocated(bytes: usize) -> usize {
    let rounded = (bytes + 8).next_multiple_of(16);
    if rounded < 32 { 32 } else { rounded }
}

impl SharedBuffer {
    /// A copy of `bytes`. `None` if it would exceed the budget.
    pub fn copy_of(bytes: &[u8], budget: &ByteBudget) -> Option<SharedBuffer> {
        if !budget.reserve(SharedBuffer::allocated_bytes(bytes.len())) {
            return None;
        }
        Some(SharedBuffer(Arc::new(SharedState { bytes: bytes.into(), budget: budget.clone() })))
    }

    /// The memory that a buffer of `bytes` bytes takes, in bytes: its own and that of its counters.
    pub const fn allocated_bytes(bytes: usize) -> usize {
        const COUNTER_BYTES: usize = 2 * size_of::<usize>();
        allocated(bytes) + allocated(COUNTER_BYTES + size_of::<SharedState>())
    }
}

impl Drop for SharedState {
    fn drop(&mut self) {
        self.budget.release(SharedBuffer::allocated_bytes(self.bytes.len()));
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({} B)", self.len())
    }
}

/// A value on its way to a socket, which keeps it until it is sent.
#[derive(Debug)]
pub enum DataBuffer {
    /// Read for this request alone.
    Owned(Buffer),
    /// Kept by a cache, too.
    Shared(SharedBuffer),
}

impl Deref for DataBuffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            DataBuffer::Owned(buffer) => buffer,
            DataBuffer::Shared(buffer) => buffer,
        }
    }
}

impl From<Buffer> for DataBuffer {
    #[inline]
    fn from(buffer: Buffer) -> DataBuffer {
        DataBuffer::Owned(buffer)
    }
}

impl From<SharedBuffer> for DataBuffer {
    #[inline]
    fn from(buffer: SharedBuffer) -> DataBuffer {
        DataBuffer::Shared(buffer)
    }
}

/// What became of data that was given for the time of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The receiver has no memory for it.
    Refused,
    /// The receiver has what it needs.
    Taken,
    /// The receiver needs so many bytes from the start of the data ([`DataRef::Borrowed`]) for longer: the giver holds them, unchanged.
    Lent(usize),
}

/// A value that its receiver may read for the time of a call.
#[derive(Clone, Copy, Debug)]
pub enum DataRef<'a> {
    /// Bytes to copy, or to ask for ([`Received::Lent`]).
    Borrowed(&'a [u8]),
    /// Bytes that the receiver may also keep.
    Shared(&'a SharedBuffer),
}

impl<'a> DataRef<'a> {
    /// The bytes.
    #[inline]
    pub fn as_bytes(self) -> &'a [u8] {
        match self {
            DataRef::Borrowed(bytes) => bytes,
            DataRef::Shared(buffer) => buffer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_exceeded_and_is_free_when_the_last_owner_has_dropped() {
        let bytes = SharedBuffer::allocated_bytes(100);
        let budget = ByteBudget::new(2 * bytes);
        let first = SharedBuffer::copy_of(&[1; 100], &budget).unwrap();
        let second = SharedBuffer::copy_of(&[2; 100], &budget).unwrap();
        assert!(SharedBuffer::copy_of(&[], &budget).is_none(), "two fill it");
        let other_owner = first.clone();
        drop(first);
        assert_eq!((&other_owner[..], budget.in_use_bytes()), (&[1; 100][..], 2 * bytes));
        drop((other_owner, second));
        assert_eq!(budget.in_use_bytes(), 0);
    }

    #[test]
    fn an_allocation_is_counted_with_its_counters() {
        assert_eq!(SharedBuffer::allocated_bytes(0), 32 + 48);
        assert_eq!(SharedBuffer::allocated_bytes(24), 32 + 48);
        assert_eq!(SharedBuffer::allocated_bytes(25), 48 + 48);
        assert_eq!(SharedBuffer::allocated_bytes(4096), 4112 + 48);
        // A word for the variant must not make each unsent part larger.
        assert_eq!(size_of::<DataBuffer>(), size_of::<Buffer>());
    }
}
