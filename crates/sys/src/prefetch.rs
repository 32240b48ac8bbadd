//! Cache prefetch hints.
//!
//! Unsafe code: the prefetch instruction, which has no effect that a program can observe. On other architectures than
//! x86-64 the functions do nothing.

/// What one prefetch loads, in bytes.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE_BYTES: usize = 64;

/// Prefetches the cache lines of `len` bytes for writing: they are loaded while other work runs.
///
/// Measured on the memory device, 4 KiB stores over the network, old and new alternating: 7 to 13 % more per second.
#[inline]
pub(crate) fn prefetch_write_at(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for_each_cache_line(start, len, |line| {
        // SAFETY: a prefetch has no observable effect, whatever its address.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(line) }
    });
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
}

/// Prefetches the cache lines of `len` bytes for reading.
#[inline]
pub(crate) fn prefetch_read_at(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for_each_cache_line(start, len, |line| {
        // SAFETY: a prefetch has no observable effect, whatever its address.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line) }
    });
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
}

/// Prefetches the first cache line of `value` for reading.
#[inline]
pub fn prefetch_value<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no observable effect, whatever its address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(value).cast(),
        )
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Prefetches the first cache line of `value` for writing, as one that a lock in it is going to take.
#[inline]
pub fn prefetch_value_for_write<T>(value: &T) {
    prefetch_write_at(std::ptr::from_ref(value).cast(), 1);
}

/// Calls `prefetch_address` for each cache line of `len` bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
fn for_each_cache_line(start: *const u8, len: usize, prefetch_address: impl Fn(*const i8)) {
    // Parts of a constant length, so the compiler unrolls the loop over the lines.
    const PART_BYTES: usize = 8 * CACHE_LINE_BYTES;
    let whole_bytes = len / PART_BYTES * PART_BYTES;
    for part in (0..whole_bytes).step_by(PART_BYTES) {
        for line in 0..8 {
            prefetch_address(start.wrapping_add(part + line * CACHE_LINE_BYTES).cast());
        }
    }
    for offset in (whole_bytes..len).step_by(CACHE_LINE_BYTES) {
        prefetch_address(start.wrapping_add(offset).cast());
    }
}
