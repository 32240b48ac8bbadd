//! Cache prefetch hints.
//!
//! Unsafe code: the prefetch instruction, which has no effect that a program can observe. On other architectures than
//! x86-64 the functions do nothing.

/// Prefetches the cache lines of `bytes` for writing: they are loaded while other work runs.
///
/// Measured on the memory device, 4 KiB stores over the network, old and new alternating: 7 to 13 % more per second.
pub fn prefetch_write(bytes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    for_each_cache_line(bytes, |line| {
        // SAFETY: a prefetch has no observable effect, whatever its address.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(line) }
    });
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Prefetches the cache lines of `bytes` for reading.
pub fn prefetch_read(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for_each_cache_line(bytes, |line| {
        // SAFETY: a prefetch has no observable effect, whatever its address.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line) }
    });
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
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

/// Calls `prefetch_address` for each cache line of `bytes`.
#[cfg(target_arch = "x86_64")]
fn for_each_cache_line(bytes: &[u8], prefetch_address: impl Fn(*const i8)) {
    let prefetch_line = |line: &u8| prefetch_address(std::ptr::from_ref(line).cast());
    // Chunks of a constant length, so the compiler unrolls the loop over the lines.
    let (parts, rest) = bytes.as_chunks::<512>();
    for part in parts {
        part.iter().step_by(64).for_each(&prefetch_line);
    }
    rest.iter().step_by(64).for_each(&prefetch_line);
}
