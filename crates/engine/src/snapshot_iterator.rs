//! Iterators over snapshots: what the operations of [`Engine`](crate::Engine) on them take and give.
//!
//! An iterator yields the pairs of a volume in the order of keys as they were when it was created, whatever is written, compacted
//! or collected meanwhile (IterKVSSD).

use octokv_base::Key;
use std::future::Future;

/// The iterator of an engine without iterators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoIterator {}

/// What an iterator yields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IteratorOptions {
    /// The lowest key; `None` for no bound.
    pub lower: Option<Key>,
    /// The key below which all keys are; `None` for no bound. If it is not above `lower`, there are none.
    pub upper: Option<Key>,
    /// Whether the highest key comes first.
    pub reverse: bool,
    /// Whether values are left out: each then has no bytes.
    pub keys_only: bool,
}

/// Where an iterator is after it was advanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IteratorProgress {
    /// The sink had no space for the next pair, which the next call offers again.
    HasNext,
    /// Behind its last pair. A seek may bring it back.
    AtEnd,
}

/// Receives the pairs of an iterator one by one.
pub trait PairSink {
    /// Whether there is space for a pair of these lengths in bytes. If not, the call ends, and the iterator stays before that pair.
    fn has_space(&mut self, key_bytes: usize, value_bytes: usize) -> bool;
    /// Receives the pair for which there was space.
    fn push(&mut self, key: &[u8], value: &[u8]);
    /// Awaited now and then, so that many keys without a value do not hold up other commands.
    fn yield_point(&mut self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}
