//! Large zeroed memory in transparent huge pages, if the kernel has them: fewer TLB misses.
//!
//! Unsafe code: a mapping of its own (mmap, madvise, munmap) and the slices over it. Tested below.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The size and alignment of a huge page, in bytes.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Owned bytes, initially zero, aligned to [`HUGE_PAGE_BYTES`].
#[derive(Debug)]
pub struct HugePageBuffer {
    start: NonNull<u8>,
    len: usize,
    /// The mapping that contains them: start and length in bytes.
    mapping: (NonNull<libc::c_void>, usize),
}

// SAFETY: the buffer is the only owner of its memory, as a boxed slice is.
unsafe impl Send for HugePageBuffer {}
// SAFETY: a shared reference only gives shared access to the bytes. What writes by the pointer of `start` excludes that by itself.
unsafe impl Sync for HugePageBuffer {}

impl HugePageBuffer {
    /// Allocates `len` zeroed bytes.
    ///
    /// # Errors
    /// Fails with ENOMEM if the address space or memory is exhausted.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn new(len: usize) -> io::Result<HugePageBuffer> {
        assert!(len > 0, "len must be > 0");
        let mapped = len.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping affects no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let shift = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: the mapping is larger than `len` by a huge page, so the aligned address is within it.
        let aligned = unsafe { mapping.cast::<u8>().add(shift) };
        // SAFETY: the range is within our mapping. Advice only: it fails on a kernel without huge pages.
        let _ = unsafe { libc::madvise(aligned.as_ptr().cast(), mapped - shift, libc::MADV_HUGEPAGE) };
        Ok(HugePageBuffer { start: aligned, len, mapping: (mapping, mapped) })
    }

    /// Where the bytes are.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Deref for HugePageBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` has `len` bytes, zeroed by the kernel, that live until `drop`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for HugePageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HugePageBuffer {
    fn drop(&mut self) {
        let (start, len) = self.mapping;
        // SAFETY: `new` created the mapping, and no reference to it remains.
        let result = unsafe { libc::munmap(start.as_ptr(), len) };
        debug_assert_eq!(result, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_aligned_zeroed_and_writable_to_the_end() {
        for len in [1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5] {
            let mut bytes = HugePageBuffer::new(len).unwrap();
            assert_eq!((bytes.as_ptr() as usize % HUGE_PAGE_BYTES, bytes.len()), (0, len));
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes[len - 1] = 7;
            assert_eq!(bytes[len - 1], 7);
        }
    }
}
