//! What storage engines are made of, whatever their index is.
//!
//! # Layout
//! - [`abandoned`]: operations whose callers dropped them.
//! - [`allocator`]: the free space of a record area, by units.
//! - `background_task`, `work_slice`: tasks that repeat work beside the requests of their core. `write_throttle`: puts that wait for it.
//! - [`epoch`]: when space that a reader may still use is free.
//! - [`flush_queue`]: a flush that callers on all cores share. [`waker_batch`]: wakers to wake once no lock is held.
//! - [`journal`], [`commit_queue`], [`group_commit`]: durable changes, many of them in one write and one flush. [`batch_parts`]: what
//!   they collect.
//!   [`journal_reader`]: their replay.
//! - `media_errors`: errors of reads whose blocks are lost.
//! - [`image_stream`]: structures of any length, in two copies. [`unit_reader`]: reads at any alignment.
//! - [`key_locks`]: one writer at a time per key. [`held_numbers`]: the set of those that are locked. `shared_lock`: several operations share it, or one has it alone.
//! - [`prepare`]: which never-written space is written with zeros, ahead of its use.
//! - [`record`]: key and value on the device. `write_rules`: versions, conditions and expiry of a write.
//! - [`superblock`], [`superblock_io`]: whose volume a device holds, and the newest of the superblocks that say it.
//! - [`volume_layout`]: the regions of a volume, and its last checkpoint. `volume_format`: what a format chooses and writes.

pub mod abandoned;
pub mod allocator;
pub(crate) mod background_task;
pub mod batch_parts;
pub mod commit_queue;
pub mod drive_cores;
pub mod epoch;
pub mod flush_queue;
pub mod group_commit;
pub mod held_numbers;
pub mod image_stream;
pub mod joined_value;
pub mod journal;
pub mod journal_reader;
pub mod key_locks;
pub(crate) mod media_errors;
pub mod prepare;
pub mod record;
pub(crate) mod shared_lock;
pub mod superblock;
pub mod superblock_io;
pub mod unit_reader;
pub(crate) mod volume_format;
pub mod volume_layout;
pub mod waker_batch;
pub(crate) mod work_slice;
pub(crate) mod write_rules;
pub(crate) mod write_throttle;

#[cfg(test)]
mod flush_queue_tests;
