//! OctoKV's hash engine (OKSENG, OctoKV §IV.C), made durable.
//!
//! In: operations on keys, from any core. Out: reads, writes and flushes of one device. Holds in memory: an index entry
//! of 16 bytes per key, a bit per unit of space, and the changes that wait for a journal batch.
//!
//! ```text
//!   put   lock key ─▶ allocate ─┬─▶ write record ──────┬─▶ flush ─▶ index ─▶ reply, old space free
//!                               ├─▶ read old's header ─┤  (one batch and one flush for all waiting writes)
//!                               └─▶ journal batch ─────┘
//!   get   enter ─▶ index ─▶ read record ─▶ checksums, identity, key ─▶ reply
//! ```
//! The device: superblocks │ journal ×2 │ checkpoint areas A, B ×2 │ records. See docs/FORMATS.md.
//!
//! Invariants: the index names only records that are durable in the configured sense; a record is never changed in
//! place; its space is reused only after its replacement is durable and no reader uses it; a record is compared with the
//! full key before its value is returned.
//!
//! # Layout
//! - [`superblock`], [`journal`], [`checkpoint`]: the structures on the device that only it has.
//! - [`index`]: the structure in memory that no other engine has; `index_partition`: one part of it.
//! - [`format`](mod@format), [`recovery`], `upgrade`: creating a volume, opening it, and making it one of the newest format.
//! - [`verify`](mod@verify), `salvage`: verification, and the scan of an unrecoverable volume.
//! - `volume`: the state that all cores share. `engine`: the changes of one core; `record_write`: the write of a record and what runs beside it; `pieces`: values in pieces, `piece_list`: their lists; `reads`: its reads; `scan`: its scan of a ring range; `forget`: the end of tombstones.
//!   `compaction`: what makes one record of a value in pieces, `compaction_step`: the steps of
//!   that, `compaction_window`: the free runs that it makes for it, `compaction_state`: what all cores know of it.
//!   `prepare`: zeros in never-written space ahead of its use. `unindexed_record`: the space of a put on a volatile volume. `direct`: the operations that need not wait. `handle`: the
//!   contract over them, with operations that outlive their callers.
//! - `seam`: the engine behind the trait of all volumes.

pub mod checkpoint;
#[cfg(test)]
mod colliding_tags_tests;
mod compaction;
#[cfg(test)]
mod compaction_pace_tests;
mod compaction_state;
mod compaction_step;
#[cfg(test)]
mod compaction_tests;
mod compaction_window;
mod direct;
mod engine;
mod forget;
pub mod format;
mod handle;
pub mod index;
mod index_partition;
pub mod journal;
mod piece_list;
mod pieces;
#[cfg(test)]
mod pieces_tests;
mod prepare;
mod reads;
mod record_write;
pub mod recovery;
mod salvage;
mod scan;
mod seam;
pub mod superblock;
mod unindexed_record;
mod upgrade;
pub mod verify;
mod volume;

pub use format::format;
pub use handle::HashEngine;
pub use recovery::open;
pub use verify::verify;
pub use volume::HashVolume;
