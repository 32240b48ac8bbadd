//! The vocabulary of octokv: units, ids, keys, aligned buffers, checksums, seeded randomness.
//!
//! Nothing here does I/O, reads a clock or draws randomness from the air; every other room stands on it.
//!
//! # Layout
//! - [`time`]: time, block addresses, the names of namespaces.
//! - [`key`]: the bytes that name a value.
//! - [`buffer`]: page-aligned memory that moves from socket to device and back, and its bounded pool.
//! - [`crc32c`]: CRC-32C (Castagnoli), the checksum of everything on the wire and on media.
//! - [`prng`]: a seeded generator.
//! - [`bug_injection`]: the switch for bugs that tests of the tests plant.
//! - [`map`]: hash maps whose order does not change from run to run.

pub mod buffer;
pub mod bug_injection;
pub mod crc32c;
pub mod key;
pub mod map;
pub mod prng;
pub mod time;

pub use buffer::{Buffer, BufferPool};
pub use crc32c::{Crc32c, crc32c};
pub use key::{KEY_BYTES_MAX, Key, value_offset};
pub use prng::Prng;
pub use time::{Lba, NamespaceId, Nanos};
