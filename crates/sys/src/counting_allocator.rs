//! An allocator that counts, for tests that hold "no allocation here" and for memory reports.
//!
//! A binary or test that wants it says
//! `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`. It allocates as the
//! system does and counts per thread, so that other threads do not disturb a measurement.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATION_COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
pub struct CountingAllocator;

/// How often the calling thread has allocated or grown memory, where [`CountingAllocator`] is installed.
pub fn thread_allocation_count() -> u64 {
    ALLOCATION_COUNT.with(Cell::get)
}

fn count_allocation() {
    // Fails only while the thread ends, when nobody measures it.
    let _ = ALLOCATION_COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every method hands its arguments on to the system's allocator, whose promises hold.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: our caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation();
        // SAFETY: our caller keeps the contract of `alloc_zeroed`, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocation();
        // SAFETY: our caller keeps the contract of `realloc`, which is the same.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: our caller keeps the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(start, layout) }
    }
}
