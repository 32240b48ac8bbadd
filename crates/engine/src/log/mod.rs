//! The log engine (LEED): a table of segments in memory, and two circular logs per store. Experimental: its format may change.
//!
//! ```text
//!   key ─▶ ring position ─▶ store ─▶ segment ─▶ segment table: 6 bytes ─▶ segment image in the key log ─▶ value record in the value log
//! ```
//! Invariants: an image or a record is written once, at the tail of its log; decoders take any bytes from a device.
//!
//! # Layout
//! - [`batch_state`]: the batches of a store: who leads, what is published and durable.
//! - [`busy_segments`]: segments that operations hold in memory, and their waiters.
//! - [`checkpoint_writer`]: writes the stores to a checkpoint area.
//! - [`chunk_directory`]: which segments the records of a value chunk belong to; [`record_walk`]: the records of a chunk without one.
//! - [`chunk_log`]: one log: its chunks, its tail and its head. [`chunk_pool`]: the chunks of the device, and the detection of reuse;
//!   [`sealed_sums`]: what the full chunks of a log have together.
//! - `store`, [`volume`], `core`: what operations share; `volume_statistics`: what of it operators see; [`handle`] and `seam`: the contract. [`open`](mod@open), `checkpoint`, `maintenance`, `scrub`, `scrub_state`, `verify`.
//! - `reads`, `segment_reads`, `recent_images`, `record_reads`, `ring_list`: lookups. `writes`, `value_writes`, `commit`, `split`, `split_signal`, `space_waits`: changes.
//! - [`compaction_policy`]: which log is compacted next. [`space_limits`]: how much free space each kind of work leaves.
//! - [`format`](mod@format): creating a volume. [`settings`]: sizes and rates of an open one.
//! - `key_compaction`, `value_compaction`, `value_chunk_ids`, `segment_visit`, `segment_visits`: compaction, which copies live images and records from the
//!   head of a log to its tail. `stale_entries`: the entries that it drops.
//!   `compaction_rounds`, `running_compactions`: one log after another. `compaction_window`: the segments that a window's compaction has visited.
//! - [`hash_prefix`]: from a ring position to a store and a segment of it; linear hashing.
//! - [`known_chunks`]: the chunks of a log that a recovery knows; [`log_window`]: its reads of them, in pieces.
//! - [`log_cursor`]: the images of a key log, one behind the other; [`tail_check`]: where they end, and what damage hides.
//! - [`log_layout`]: the regions of a volume, and what lies where in its chunks.
//! - [`log_place`]: places in a log, and the seeds of checksums there.
//! - [`recovery`]: opens a volume after any crash; [`replay`]: one store of it.
//! - [`segment_buckets`]: a segment image on the device; [`segment_image`]: its entries in memory; [`segment_entry`]: one of them.
//! - [`segment_ref`]: an entry of a segment table.
//! - [`segment_table`]: the segment table.
//! - [`space_pass`]: which writes may use space, in the order of their arrival.
//! - [`store_image`]: the stores in a checkpoint.
//! - [`superblock`]: the layout of a volume and its last checkpoint.
//! - `tail_pieces`: the bytes of a value log that are not written yet; `tail_tickets`: their writers.
//! - [`value_record`]: a value with its key in the value log. [`value_tail`]: the end of a value log, and who writes it.
//! - [`value_check`]: whether the values of an image are on the device; [`value_record`]: a value with its key in the value log.

pub mod batch_state;
pub mod busy_segments;
mod checkpoint;
pub mod checkpoint_writer;
pub mod chunk_directory;
pub mod chunk_log;
pub mod chunk_pool;
mod commit;
pub mod compaction_policy;
mod compaction_rounds;
mod compaction_window;
mod core;
pub mod format;
pub mod handle;
pub mod hash_prefix;
mod key_compaction;
pub mod known_chunks;
pub mod log_cursor;
pub mod log_layout;
pub mod log_place;
pub mod log_window;
mod maintenance;
pub mod open;
mod pinned_chunks;
mod pinned_compaction;
mod prepared_visits;
mod reads;
mod recent_images;
mod record_reads;
pub mod record_walk;
mod records_to_move;
pub mod recovery;
pub mod replay;
mod ring_list;
mod running_compactions;
mod scrub;
mod scrub_state;
pub mod sealed_sums;
mod seam;
pub mod segment_buckets;
pub mod segment_entry;
pub mod segment_image;
mod segment_reads;
pub mod segment_ref;
pub mod segment_table;
mod segment_visit;
mod segment_visits;
pub mod settings;
mod shared_reads;
pub mod space_limits;
pub mod space_pass;
mod space_waits;
mod split;
mod split_signal;
mod stale_entries;
mod store;
pub mod store_image;
pub mod superblock;
pub mod tail_check;
mod tail_pieces;
mod tail_tickets;
pub mod value_check;
mod value_chunk_ids;
mod value_compaction;
pub mod value_record;
pub mod value_tail;
mod value_writes;
mod verify;
pub mod volume;
mod volume_statistics;
mod window_space;
mod writes;

#[cfg(test)]
mod batch_state_tests;
#[cfg(test)]
mod busy_segments_tests;
#[cfg(test)]
mod checkpoint_writer_tests;
#[cfg(test)]
mod chunk_log_tests;
#[cfg(test)]
mod chunk_pool_tests;
#[cfg(test)]
mod compaction_overlap_tests;
#[cfg(test)]
mod compaction_pace_tests;
#[cfg(test)]
mod compaction_tests;
#[cfg(test)]
mod format_tests;
#[cfg(test)]
mod prepared_visits_tests;
#[cfg(test)]
mod recovery_tests;
#[cfg(test)]
mod replay_tests;
#[cfg(test)]
mod same_key_tests;
#[cfg(test)]
mod segment_buckets_tests;
#[cfg(test)]
mod space_pass_tests;
#[cfg(test)]
mod space_progress_tests;
#[cfg(test)]
mod store_image_tests;
#[cfg(test)]
mod tail_memory_tests;
#[cfg(test)]
mod test_entries;
#[cfg(test)]
mod test_log_volume;
#[cfg(test)]
mod test_log_writer;
#[cfg(test)]
mod test_recovery_checks;
#[cfg(test)]
mod test_store_model;
#[cfg(test)]
mod value_tail_tests;
