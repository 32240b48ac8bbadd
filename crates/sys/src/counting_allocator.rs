//! A counting allocator, for tests that a path does not allocate, or of what a structure takes in memory.
//!
//! A test installs it by `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`. It forwards to
//! the system's allocator and counts per thread, so other threads do not disturb a measurement.
//!
//! Unsafe code: the trait [`GlobalAlloc`]. Tested in `octokv-runtime`'s `tests/tasks.rs`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATION_COUNT: Cell<u64> = const { Cell::new(0) };
    static HELD_BYTES: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator with a count of allocations and bytes.
pub struct CountingAllocator;

/// The number of allocations and reallocations of the calling thread; 0 if [`CountingAllocator`] is not installed.
pub fn thread_allocation_count() -> u64 {
    ALLOCATION_COUNT.with(Cell::get)
}

/// The bytes that the calling thread has allocated and not freed, as they were asked for: without what the system's allocator adds. Negative if it has freed
/// what other threads allocated; 0 if [`CountingAllocator`] is not installed.
pub fn thread_held_bytes() -> i64 {
    HELD_BYTES.with(Cell::get)
}

fn count_allocation() {
    // Fails only while the thread exits, after every measurement.
    let _ = ALLOCATION_COUNT.try_with(|count| count.set(count.get() + 1));
}

fn count_bytes(allocated: usize, freed: usize) {
    // Sizes fit: an allocation has at most `isize::MAX` bytes.
    let _ = HELD_BYTES.try_with(|held| held.set(held.get() + allocated as i64 - freed as i64));
}

// SAFETY: every method forwards its arguments to the system's allocator, whose guarantees hold.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        count_bytes(layout.size(), 0);
        // SAFETY: the caller upholds the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        count_bytes(layout.size(), 0);
        // SAFETY: the caller upholds the contract of `alloc_zeroed`, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation();
        count_bytes(size, layout.size());
        // SAFETY: the caller upholds the contract of `realloc`, which is the same.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        count_bytes(0, layout.size());
        // SAFETY: the caller upholds the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(start, layout) }
    }
}
