//! The vocabulary of octokv: units, ids, keys, aligned buffers, checksums, seeded randomness.
//!
//! Nothing here does I/O, reads a clock or draws randomness from the air; every other room stands on it.
//!
//! # Layout
//! - [`units`]: time, block addresses, the names of namespaces.
//! - [`key`]: the bytes that name a value.
//! - [`buffer`]: page-aligned memory that moves from socket to device and back, and its bounded pool.
//! - [`checksum`]: CRC-32C (Castagnoli), the checksum of everything on the wire and on media.
//! - [`random`]: a seeded generator.
//! - [`planted`]: the switch for bugs that tests of the tests plant.
//! - [`map`]: hash maps whose order does not change from run to run.

pub mod buffer;
pub mod checksum;
pub mod key;
pub mod map;
pub mod planted;
pub mod random;
pub mod units;

pub use buffer::{Buffer, Pool};
pub use checksum::{Crc32c, crc32c};
pub use key::{KEY_BYTES_MAX, Key, value_offset};
pub use random::Random;
pub use units::{Lba, NamespaceId, Nanos};
