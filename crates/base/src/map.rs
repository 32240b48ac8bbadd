//! Hash maps whose order does not change from run to run, so that a simulation repeats.
//!
//! Not for keys that a peer chooses: the hash has no secret.

#![allow(clippy::disallowed_types, reason = "what everybody else uses instead of the randomly ordered maps")]

/// A map with a fixed hash.
pub type FxHashMap<K, V> = std::collections::HashMap<K, V, rustc_hash::FxBuildHasher>;
/// A set with a fixed hash.
pub type FxHashSet<K> = std::collections::HashSet<K, rustc_hash::FxBuildHasher>;
