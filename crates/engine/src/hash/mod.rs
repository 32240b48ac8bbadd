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
//! - [`superblock`], [`journal`], [`checkpoint`], [`record`]: the structures on the device; `superblock_io`.
//! - [`index`], [`allocator`], [`epoch`], `key_locks`: the structures in memory.
//! - `group_commit`, `commit_queue`: group commit, and its state.
//! - [`format`](mod@format), [`recovery`], `error`: creating and opening a volume, and the errors of both.
//! - [`verify`](mod@verify), `salvage`, `report`: verification, the scan of an unrecoverable volume, and their results.
//! - `volume`: the state that all cores share. `engine`: the operations of one core; `scan`: its scan of a ring range.

pub mod allocator;
pub mod checkpoint;
mod commit_queue;
mod engine;
pub mod epoch;
mod error;
pub mod format;
mod group_commit;
pub mod index;
pub mod journal;
mod key_locks;
pub mod record;
pub mod recovery;
mod report;
mod salvage;
mod scan;
pub mod superblock;
mod superblock_io;
pub mod verify;
mod volume;

pub use engine::HashEngine;
pub use error::{IndexMismatch, MetadataStructure, OpenError};
pub use format::{FormatConfig, format};
pub use recovery::open;
pub use report::{
    Finding, FindingKind, ProblemKind, RecordProblem, SalvageReport, VerifyFailure, VerifyObserver,
    VerifyReport,
};
pub use superblock::HashKind;
pub use verify::verify;
pub use volume::{OpenConfig, Volume};
