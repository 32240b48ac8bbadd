//! The ordered engine (IterKVSSD): a log-structured merge tree with key-value separation and snapshot iterators
//! ([decision 0027](../../../../docs/decisions/0027-an-ordered-engine-from-common-parts.md)).
//!
//! ```text
//!   put   ─▶ journal batch (value below the threshold inline, else its record in a value segment beside the batch) ─▶ memtable
//!   flush    memtable ─▶ table of level 0
//!   compact  tables of two levels ─▶ tables of the lower one; values of segments that are mostly dead move along, in key order
//!   get      memtables ─▶ level 0, newest first ─▶ one table of each level below ─▶ value segment
//! ```
//! Invariants: entries of one key are found newest first; what a snapshot can see is dropped by no flush and no compaction; a table
//! is never changed, and its space is freed when no version refers to it.
//!
//! # Layout
//! - [`superblock`]: the layout of a volume and its last checkpoint. [`format`](mod@format): creating a volume. [`journal`]: changes in the journal.
//! - `recovery`: opening. `verify`: verification. [`settings`]: sizes. `volume`: the state that all cores share, `volume_statistics`: what operators see of it; `core`: a core's part.
//! - `handle`: the contract; `reads`, `writes`, `iterators`, `ring_scan`: its operations. `seam`: the engine behind the trait of all volumes.
//! - [`memtables`]: the memtables of a volume. [`memtable`]: the newest entries, in memory ([`append_list`]: their nodes); [`memtable_slot`]: a memtable or what it became.
//! - [`value_segments`]: where puts write values. `put_space`: how a put gets space there; `space_reserve`: what of the free space it may have. [`journal_room`]: which puts may enter the journal.
//! - `maintenance`: background work; `full_compaction`: what an operator asks for. `flush`: writes a memtable to tables. `compaction_run`: merges tables. Both write by `table_output`; `value_mover` moves values.
//!   `edits`: how that becomes durable, and checkpoints.
//! - [`entry`]: what a write left of a key, its place in the order, and its encoding ([`copied_entry`]: with bytes of its own). [`cursor`]: what moves over entries.
//! - [`table`]: sorted entries on the device.
//! - [`table_meta`]: metadata of tables and value segments. [`reclaim`]: the space that none of it refers to.
//!   [`shared_tree`]: persistent ordered trees. [`lost_ranges`]: keys of which entries were lost.
//! - [`tree_version`]: the tables and segments of one moment. [`version_set`]: the current ones. [`version_edit`]: what changes, and its bytes;
//!   [`edit_parts`]: these in the journal. [`version_image`]: a whole version in bytes.
//! - [`compaction`]: one compaction, and what excludes another. [`compaction_choice`]: what is compacted next; [`compaction_cleanup`]: for tombstones and dead values.
//!   [`pacing`]: how fast, and how much writers are delayed. [`postponed_reads`]: what the device failed to read, and when it is tried again; [`kept_keys`]: the keys that
//!   a compaction around such tables leaves in level 0.
//! - [`level_cursor`]: the tables of a level as one cursor. [`merge`]: several cursors as one; [`snapshot_view`]: what a snapshot shows of it.
//! - `iterator_list`: the iterators of a volume, `tree_iterator`: a caller's; `iterator_views`: a core's cursors over them, `iterator_steps`: how these move; `value_reads`: of the values ahead. [`prefetch_degree`]: how many values one reads ahead, [`length_estimate`]: how many it probably reads.
//! - [`snapshots`]: the live ones; [`retention`]: which entries flush and compaction keep for them.

pub mod append_list;
pub mod compaction;
pub mod compaction_choice;
pub mod compaction_cleanup;
mod compaction_run;
pub mod copied_entry;
mod core;
pub mod cursor;
pub mod edit_parts;
mod edits;
pub mod entry;
mod flush;
pub mod format;
mod full_compaction;
mod handle;
mod iterator_list;
mod iterator_steps;
mod iterator_views;
mod iterators;
pub mod journal;
pub mod journal_room;
pub mod kept_keys;
pub mod length_estimate;
pub mod level_cursor;
pub mod lost_ranges;
mod maintenance;
pub mod memtable;
pub mod memtable_slot;
pub mod memtables;
pub mod merge;
mod pace_control;
mod pace_meter;
pub mod pacing;
pub mod postponed_reads;
pub mod prefetch_degree;
mod put_space;
mod reads;
pub mod reclaim;
mod recovery;
pub mod retention;
mod ring_scan;
mod seam;
pub mod settings;
pub mod shared_tree;
pub mod snapshot_view;
pub mod snapshots;
mod space_reserve;
pub mod superblock;
pub mod table;
pub mod table_meta;
mod table_output;
mod tree_iterator;
pub mod tree_version;
mod value_mover;
mod value_reads;
pub mod value_segments;
mod verify;
pub mod version_edit;
pub mod version_image;
pub mod version_set;
mod volume;
mod volume_statistics;
mod writes;

pub use handle::LsmEngine;

pub use recovery::{open, open_with};
pub use tree_iterator::TreeIterator;
pub use volume::LsmVolume;

#[cfg(test)]
mod level_cursor_tests;
#[cfg(test)]
mod memtable_slot_tests;
#[cfg(test)]
mod memtable_tests;
#[cfg(test)]
mod merge_tests;
#[cfg(test)]
mod postponed_model_tests;
#[cfg(test)]
mod prefetch_degree_tests;
#[cfg(test)]
mod retention_tests;
#[cfg(test)]
mod snapshot_view_tests;
#[cfg(test)]
mod test_cursor;
#[cfg(test)]
mod test_level;
#[cfg(test)]
mod unfinished_tests;
#[cfg(test)]
mod version_model_tests;
