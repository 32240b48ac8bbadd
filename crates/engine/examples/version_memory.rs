//! What the versions of the ordered engine's tree take in memory, beside the paper's summary (IterKVSSD: 44 B a table, 65,000 tables, 2.7 MB, copied for each
//! iterator): `cargo run --release -p octokv-engine --example version_memory`.
//!
//! A tree of 65,000 tables with 16-byte keys that refer to four value segments each; 1,000 iterators, behind each of them a compaction of a table with
//! the ten that it overlaps. Bytes as they were asked for, without the allocator's own.

#[path = "../tests/common/version_memory.rs"]
mod version_memory;

use octokv_sys::counting_allocator::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TABLES: u64 = 65_000;
const ITERATORS: usize = 1000;
/// IterKVSSD, "Memory Efficient Versioning Data Structure".
const PAPER_BYTES_PER_TABLE: i64 = 44;

fn main() {
    let memory = version_memory::measure(TABLES, ITERATORS);
    let (tables, iterators) = (TABLES as i64, ITERATORS as i64);
    let summary_bytes = memory.summary_bytes();
    let megabytes = |bytes: i64| format!("{:.2} MB", bytes as f64 / 1e6);
    let per_table = |bytes: i64| format!("{:.1} B a table", bytes as f64 / tables as f64);
    println!("{TABLES} tables, {ITERATORS} iterators with a compaction behind each");
    let rows = [
        ("metadata", memory.metadata_bytes),
        ("structure of one version", memory.structure_bytes),
        ("one summary", summary_bytes),
        ("one summary of the paper", PAPER_BYTES_PER_TABLE * tables),
    ];
    for (name, bytes) in rows {
        println!("{name:28} {:>10}   {}", megabytes(bytes), per_table(bytes));
    }
    println!("{:28} {:>8} B", "created on a version", memory.iterator_bytes);
    println!("{:28} {:>8} B", "structure held by each", memory.held_structure_bytes / iterators);
    println!("{:28} {:>8.1}", "tables held by each alone", memory.replaced_tables as f64 / ITERATORS as f64);
    let total = summary_bytes + memory.held_bytes;
    println!(
        "{:28} {:>10}   {:.2} x one summary",
        "all",
        megabytes(total),
        total as f64 / summary_bytes as f64
    );
    println!("{:28} {:>10}", "copies would take", megabytes(summary_bytes * (iterators + 1)));
    let paper = PAPER_BYTES_PER_TABLE * tables * (iterators + 1);
    println!("{:28} {:>10}", "copies of the paper's", megabytes(paper));
}
