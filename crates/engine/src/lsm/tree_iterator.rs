//! The iterator of a caller: an entry in the volume's list of iterators until it is dropped.
//!
//! Invariant: the snapshot is taken before memtables and version, and these in this order.

use super::iterator_list::{IteratorSources, IteratorState};
use super::volume::LsmVolume;
use crate::IteratorOptions;
use std::sync::Arc;

/// An iterator of a volume of the ordered engine. Dropping it ends its snapshot.
pub struct TreeIterator {
    pub(super) state: Arc<IteratorState>,
    volume: Arc<LsmVolume>,
}

impl TreeIterator {
    /// An iterator over what the volume has now; `None` if there are as many as may be.
    pub(super) fn create(volume: &Arc<LsmVolume>, options: IteratorOptions) -> Option<TreeIterator> {
        let time = volume.clock.now();
        let sequence = || volume.memtables.last_number();
        let snapshot = volume.snapshots.create(sequence, time, volume.time())?;
        let slots =
            volume.memtables.current().newest_first().map(|placed| Arc::clone(&placed.slot)).collect();
        let version = volume.versions.current();
        let sources = IteratorSources { slots, version };
        let state = volume.iterators.add(|id| IteratorState::new(id, options, snapshot, sources));
        Some(TreeIterator { state, volume: Arc::clone(volume) })
    }
}

impl Drop for TreeIterator {
    fn drop(&mut self) {
        self.volume.iterators.remove(&self.state);
    }
}
