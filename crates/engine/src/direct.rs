//! Operations that end at once: no future, no task, no buffer.
//!
//! ```text
//!   begin_lookup ──▶ advance_lookup(Entry) ──▶ advance_lookup(Record) ──▶ get_now, put_now, delete_now, exist_now
//!   hash, prefetch   prefetch                  index lookup, prefetch     result, or None: take the long way
//! ```
//! A caller with several commands advances all of their lookups before it executes the first, so that their memory
//! accesses overlap. `None` is always a correct answer: whatever has to wait or is unusual (a key that is being written,
//! colliding tags, damage, a full volume) is left to the operations of [`Engine`](crate::Engine), which report it. Both ways
//! are linearizable with each other.

use octokv_device::HeldBytes;

/// The value of a key, as [`Engine::get_now`](crate::Engine::get_now) found it.
#[derive(Debug)]
pub enum FoundNow {
    /// The key does not exist.
    Missing,
    /// The receiver took the value.
    Taken,
    /// The receiver asked for these bytes of it.
    Lent(HeldBytes),
}

/// The lookup of a key on one core. It is a snapshot: an operation verifies what it relies on.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyLookup {
    /// The hash of the key.
    pub(crate) hash: u128,
    /// The partition of the index and the tag in it, in an engine that has both: each stage needs them.
    pub(crate) partition: u32,
    pub(crate) tag: u64,
    /// What the index has.
    pub(crate) found: FoundEntry,
}

/// The result of a lookup in an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FoundEntry {
    /// Not looked up yet.
    #[default]
    Unknown,
    /// No entry may be the key's.
    Missing,
    /// One entry may be, in the engine's encoding.
    One([u64; 2]),
    /// Several may be.
    Several,
}

/// The next step of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupStage {
    /// The index entry is prefetched.
    Entry,
    /// The index is read, and the record prefetched.
    Record,
}
