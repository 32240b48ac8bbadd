//! The base types of octokv: time, identifiers, keys, page-aligned buffers, checksums, seeded randomness.
//!
//! No I/O, no clock and no unseeded randomness. Every other crate depends on this one.
//!
//! # Layout
//! - [`time`]: time points and durations in nanoseconds.
//! - [`ids`]: block addresses and namespace IDs.
//! - [`key`]: keys, inline up to 16 bytes.
//! - [`buffer`]: page-aligned buffers and their bounded pool.
//! - [`shared_buffer`]: read-only bytes with several owners, within a budget.
//! - [`shared_sum`]: a sum of counters that others update.
//! - [`mod@crc32c`]: CRC-32C (Castagnoli), the checksum on the wire and on media.
//! - [`prng`]: a seeded pseudo-random number generator.
//! - [`ring`]: positions of keys on the hash ring.
//! - [`version`]: versions of records.
//! - [`bug_injection`]: deliberate bugs that tests enable to prove that a checker detects them.
//! - [`map`]: hash maps with a fixed iteration order.

pub mod buffer;
pub mod bug_injection;
pub mod crc32c;
pub mod ids;
pub mod key;
pub mod map;
pub mod prng;
pub mod ring;
pub mod shared_buffer;
pub mod shared_sum;
pub mod time;
pub mod version;

pub use buffer::{Buffer, BufferPool, BufferReservation};
pub use crc32c::{Crc32c, crc32c};
pub use ids::{Lba, NamespaceId};
pub use key::{KEY_BYTES_MAX, Key, RecordLayout, ShortKey};
pub use prng::Prng;
pub use ring::{RingPosition, RingRange};
pub use shared_buffer::{ByteBudget, DataBuffer, DataRef, Received, SharedBuffer};
pub use shared_sum::SharedSum;
pub use time::{Nanos, UnixTime};
pub use version::Version;
