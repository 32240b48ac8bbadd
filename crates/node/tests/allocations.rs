//! A request allocates nothing: buffers come from the pool, tasks from their slab, responses reuse their memory.

use crate::rig::{ReactorRig, keys};
use octokv_sys::counting_allocator::{CountingAllocator, thread_allocation_count};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: usize = 32;

/// Allocations of `rounds` replays of a batch, after a warm-up.
fn allocations(store: Option<usize>, rounds: usize) -> u64 {
    let mut rig = ReactorRig::new(256 << 20, DEPTH as u16);
    let bytes = store.unwrap_or(4096);
    let value = vec![7; bytes];
    let mut batch = rig.record_batch(&keys(0, DEPTH), Some(&value));
    if store.is_none() {
        batch = rig.record_batch(&keys(0, DEPTH), None);
    }
    // Until every buffer has its final size and the journal has wrapped.
    rig.replay(&batch, 3000);
    let before = thread_allocation_count();
    let response_bytes = rig.replay(&batch, rounds);
    let allocated = thread_allocation_count() - before;
    assert!(before > 100, "the allocator counts");
    // Proves that the batch was executed.
    assert!(response_bytes >= (rounds * DEPTH * 24) as u64, "{response_bytes} response bytes");
    allocated
}

#[test]
fn a_retrieve_allocates_nothing() {
    assert_eq!(allocations(None, 500), 0);
}

#[test]
fn a_store_allocates_nothing() {
    for bytes in [64, 4096] {
        assert_eq!(allocations(Some(bytes), 500), 0, "of {bytes} B");
    }
}
