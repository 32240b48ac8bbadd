//! The log engine (LEED): a table of segments in memory, and two circular logs per store. Not reachable yet: no volume is opened with it.
//!
//! ```text
//!   key ─▶ ring position ─▶ store ─▶ segment ─▶ segment table: 6 bytes ─▶ segment image in the key log ─▶ value record in the value log
//! ```
//! Invariants: an image or a record is written once, at the tail of its log; decoders take any bytes from a device.
//!
//! # Layout
//! - [`hash_prefix`]: from a ring position to a store and a segment of it; linear hashing.
//! - [`log_place`]: places in a log, and the seeds of checksums there.
//! - [`segment_ref`]: an entry of a segment table.

pub mod hash_prefix;
pub mod log_place;
pub mod segment_ref;
