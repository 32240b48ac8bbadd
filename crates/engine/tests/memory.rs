//! What the engines take in memory, by the bytes that they allocate. A binary of its own, since it counts what each of its threads allocates.

mod log_memory;
mod lsm_memory;

use octokv_sys::counting_allocator::{CountingAllocator, thread_held_bytes};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// What the thread holds more than `before`. It may hold less than nothing: a test's thread frees what started it.
fn held_since(before: i64) -> usize {
    usize::try_from(thread_held_bytes() - before).expect("nothing is freed that was there before")
}
