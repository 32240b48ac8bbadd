//! OctoKV's hash engine (OKSENG, OctoKV §IV.C), made durable.
//!
//! In: operations on keys, from any core. Out: reads, writes and flushes of one device. Holds in memory:
//! an index entry of 16 bytes a key, a bit a unit of space, and the journal batch being gathered.
//!
//! ```text
//!   put   lock key ─▶ allocate ─┬─▶ write record ──────┬─▶ flush ─▶ index ─▶ answer, old space free
//!                               ├─▶ read old's header ─┤  (one batch and one flush for all who wait)
//!                               └─▶ journal batch ─────┘
//!   get   enter ─▶ index ─▶ read record ─▶ checksums, identity, key ─▶ answer
//! ```
//! The device: superblocks │ journal ×2 │ checkpoint areas A, B ×2 │ records. See docs/FORMATS.md.
//!
//! Invariants: the index names only durable records (as the chosen durability means it); a record is never
//! changed in place; its space is used again only after its replacement is durable and no reader is on
//! it; what is read is compared with the full key before it is answered.
//!
//! # Layout
//! - [`superblock`], [`journal`], [`checkpoint`], [`record`]: what lies on the device.
//! - [`index`], [`allocator`], `readers`, `keylock`: what lies in memory.
//! - `commit`, `batches`: group commit, and what it remembers.
//! - [`format`](mod@format), [`recovery`](mod@open), `open_error`: a new volume, recovery, why there is none.
//! - [`verify`](mod@check): reads and verifies everything.
//! - `volume`: what all cores share. This file: the operations.

pub mod allocator;
pub mod checkpoint;
mod commit_queue;
mod engine;
mod epoch;
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
