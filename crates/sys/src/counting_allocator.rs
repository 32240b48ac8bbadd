//! A counting allocator, for tests that a path does not allocate.
//!
//! A test installs it by `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`. It forwards to
//! the system's allocator and counts per thread, so other threads do not disturb a measurement.
//!
//! Unsafe code: the trait [`GlobalAlloc`]. Tested in `octokv-runtime`'s `tests/tasks.rs`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATION_COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator with a count of allocations.
pub struct CountingAllocator;

/// The number of allocations and reallocations of the calling thread; 0 if [`CountingAllocator`] is not installed.
pub fn thread_allocation_count() -> u64 {
    ALLOCATION_COUNT.with(Cell::get)
}

fn count_allocation() {
    // Fails only while the thread exits, after every measurement.
    let _ = ALLOCATION_COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every method forwards its arguments to the system's allocator, whose guarantees hold.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller upholds the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller upholds the contract of `alloc_zeroed`, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation();
        // SAFETY: the caller upholds the contract of `realloc`, which is the same.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(start, layout) }
    }
}
