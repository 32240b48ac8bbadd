//! What versions of a tree take in memory: iterators share what compactions did not change.

use crate::version_memory::measure;
use octokv_sys::counting_allocator::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TABLES: u64 = 65_000;
const ITERATORS: usize = 1000;

#[test]
fn a_thousand_iterators_between_compactions_hold_less_than_a_second_summary() {
    let memory = measure(TABLES, ITERATORS);
    let summary_bytes = memory.summary_bytes();
    assert!(memory.metadata_bytes > 100 * TABLES as i64, "the allocator counts");
    assert!(memory.structure_bytes > 8 * TABLES as i64, "a reference for each table");
    assert!(memory.structure_bytes < 16 * TABLES as i64, "{} B of nodes", memory.structure_bytes);
    assert!(memory.replaced_tables > 8 * ITERATORS as u64, "compactions, not moves");
    let total = summary_bytes + memory.held_bytes;
    assert!(total <= 2 * summary_bytes, "{total} B instead of {summary_bytes} B");
    // What one iterator costs, with the compaction behind it, but without the tables that it alone sees.
    let each = memory.held_structure_bytes / ITERATORS as i64;
    assert!(each <= 4096, "{each} B for each version");
}

#[test]
fn creating_an_iterator_allocates_nothing_however_large_the_tree() {
    for tables in [1000, 10_000] {
        assert_eq!(measure(tables, 10).iterator_bytes, 0, "{tables} tables");
    }
}
