//! Tables: sorted entries on the device, written once (sorted string tables).
//!
//! ```text
//!   run of units
//!   │ data blocks … │ first copy: descriptor, filter, index │ data blocks (the last 256 to 512 KiB) │ second copy │
//!                   unit                                                                            unit
//! ```
//! Data blocks lie side by side without padding; each copy of the metadata begins in a unit of its own. So an unreadable unit costs the
//! entries of the blocks in it and nothing else: of the metadata, it costs at most one copy.
//!
//! Invariants: a table is never changed, and no identifier is used twice, so a part of it that is in memory is always right. What is
//! read has a checksum that covers volume, table and place, and is decoded with all bounds checked before it is used.
//! The bytes are those of FORMATS.md, "Ordered engine".
//!
//! # Layout
//! - [`writer`]: entries in order become a table; [`run_writer`] writes its bytes.
//! - [`reader`]: gets. [`cursor`]: steps through the entries, in both directions; [`scan_lengths`]: how far they go; `block_scan`: how many
//!   blocks they read ahead, and `blocks_ahead`: which they have.
//! - [`info`]: what is known of a table without reading it, and its descriptor on media.
//! - [`key_block`]: blocks of prefix-compressed keys: [`stored_entry`] in data blocks, [`index`] of those. [`frame`]: their checksum
//!   and compression.
//! - [`filter`]: which keys a table may have.
//! - [`cache`]: parts of tables in memory, for all cores; [`spare_blocks`]: memory of those that left it. [`io`]: what a core reads and writes with.

mod block_scan;
mod blocks_ahead;
pub mod cache;
pub mod cursor;
pub mod filter;
pub mod frame;
pub mod index;
pub mod info;
pub mod io;
pub mod key_block;
pub mod reader;
pub mod run_writer;
pub mod scan_lengths;
pub mod spare_blocks;
pub mod stored_entry;
pub mod writer;

#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod test_tables;
#[cfg(test)]
mod write_tests;
