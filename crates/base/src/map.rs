//! Hash maps with a fixed hash: the iteration order is the same in every run, so a simulation repeats.
//!
//! Not for keys that a peer chooses: the hash has no secret, so a peer could make all keys collide.

#![allow(clippy::disallowed_types, reason = "the replacement for the randomly ordered maps")]

/// A hash map with a fixed iteration order.
pub type FxHashMap<K, V> = std::collections::HashMap<K, V, rustc_hash::FxBuildHasher>;
/// A hash set with a fixed iteration order.
pub type FxHashSet<K> = std::collections::HashSet<K, rustc_hash::FxBuildHasher>;
