//! Space to which no version refers any more.
//!
//! Invariant: a unit is in the queue once, so the queue is bounded by the tables and segments that were live at the same time.
//! Tested in `table_meta.rs` and `version_set.rs`.

use crate::common::allocator::Extent;
use crate::common::superblock::COUNT_MAX;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The space of tables and segments to which nothing refers any more, and how much of it is still referred to.
///
/// A table leaves the current version when the edit that removes it is installed, which is after that edit is durable
/// ([`super::version_set::VersionSet::install`]). So whatever the queue gives may be freed at once.
#[derive(Debug, Default)]
pub struct ReclaimQueue {
    extents: Mutex<Vec<Extent>>,
    /// The units of all extents that are referred to.
    live_units: AtomicU64,
}

impl ReclaimQueue {
    /// A new queue.
    pub fn new() -> Arc<ReclaimQueue> {
        Arc::new(ReclaimQueue::default())
    }

    /// What came since the last call, for the caller to free. After the versions of a journal and an image were rebuilt, the caller drops it instead: free
    /// space is then what no table and segment of the last version has.
    pub fn take(&self) -> Vec<Extent> {
        std::mem::take(&mut *self.extents.lock())
    }

    /// The units of all tables and segments to which a version or a compaction refers.
    pub fn live_units(&self) -> u64 {
        self.live_units.load(Ordering::Relaxed)
    }

    /// Takes note that an extent is referred to.
    pub fn enter(&self, extent: Extent) {
        self.live_units.fetch_add(extent.units, Ordering::Relaxed);
    }

    /// Takes an extent to which nothing refers any more. REQUIRES: its units entered, once.
    pub fn give_up(&self, extent: Extent) {
        self.live_units.fetch_sub(extent.units, Ordering::Relaxed);
        self.extents.lock().push(extent);
    }
}

/// Whether an extent is one of a table or a segment: not empty, and of at most `u32::MAX` units.
pub fn is_extent(extent: Extent) -> bool {
    (1..=u64::from(u32::MAX)).contains(&extent.units) && extent.location <= COUNT_MAX
}
