//! The log engine (LEED): a table of segments in memory, and two circular logs per store. Not reachable yet: no volume is opened with it.
//!
//! ```text
//!   key ─▶ ring position ─▶ store ─▶ segment ─▶ segment table: 6 bytes ─▶ segment image in the key log ─▶ value record in the value log
//! ```
//! Invariants: an image or a record is written once, at the tail of its log; decoders take any bytes from a device.
//!
//! # Layout
//! - [`batch_state`]: the batches of a store: who leads, what is published and durable.
//! - [`busy_segments`]: segments that operations hold in memory, and their waiters.
//! - [`chunk_directory`]: which segments the records of a value chunk belong to; [`record_walk`]: the records of a chunk without one.
//! - [`chunk_log`]: one log: its chunks, its tail and its head. [`chunk_pool`]: the chunks of the device, and the detection of reuse.
//! - [`compaction_policy`]: which log is compacted next. [`space_limits`]: how much free space each kind of work leaves.
//! - [`hash_prefix`]: from a ring position to a store and a segment of it; linear hashing.
//! - [`log_layout`]: the regions of a volume, and what lies where in its chunks.
//! - [`log_place`]: places in a log, and the seeds of checksums there.
//! - [`segment_buckets`]: a segment image on the device; [`segment_image`]: its entries in memory; [`segment_entry`]: one of them.
//! - [`segment_ref`]: an entry of a segment table.
//! - [`segment_table`]: the segment table.
//! - [`store_image`]: the stores in a checkpoint.
//! - [`superblock`]: the layout of a volume and its last checkpoint.
//! - [`value_record`]: a value with its key in the value log.

pub mod batch_state;
pub mod busy_segments;
pub mod chunk_directory;
pub mod chunk_log;
pub mod chunk_pool;
pub mod compaction_policy;
pub mod hash_prefix;
pub mod log_layout;
pub mod log_place;
pub mod record_walk;
pub mod segment_buckets;
pub mod segment_entry;
pub mod segment_image;
pub mod segment_ref;
pub mod segment_table;
pub mod space_limits;
pub mod store_image;
pub mod superblock;
pub mod value_record;

#[cfg(test)]
mod batch_state_tests;
#[cfg(test)]
mod busy_segments_tests;
#[cfg(test)]
mod chunk_log_tests;
#[cfg(test)]
mod chunk_pool_tests;
#[cfg(test)]
mod segment_buckets_tests;
#[cfg(test)]
mod space_progress_tests;
#[cfg(test)]
mod store_image_tests;
#[cfg(test)]
mod test_entries;
