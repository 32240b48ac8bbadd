//! One partition of the index: its table, and what is counted and known of it.

use super::index::{IndexEntry, IndexTable, RecordRef, fingerprint};
use super::journal::IndexChange;
use super::record::{RecordFlags, RecordFormat};
use parking_lot::Mutex;

/// One partition of the index, in a cache line of its own: cores write the locks of two partitions at a time.
#[derive(Default)]
#[repr(align(64))]
pub struct IndexPartition {
    pub(super) state: Mutex<PartitionState>,
}

/// The index entries of a partition, and the last journal entry applied to them.
#[derive(Default)]
pub struct PartitionState {
    pub(super) table: IndexTable,
    /// The number of the last journal entry applied.
    pub(super) applied_through: u64,
    /// Entries whose records are tombstones.
    tombstones: u64,
}

impl PartitionState {
    /// Applies a change to the table, and gives the replaced record, if any.
    pub(super) fn apply(
        &mut self,
        format: RecordFormat,
        tag: u64,
        change: &IndexChange,
    ) -> Option<RecordRef> {
        let new = RecordRef {
            location: change.new_location,
            units: u64::from(change.units),
            fingerprint: fingerprint(format, change.sequence, change.flags),
        };
        let before = match (change.old_location, change.new_location) {
            (0, 0) => return None,
            (0, _) => {
                self.table.insert(tag, new);
                None
            }
            (old, 0) => self.table.remove(tag, old),
            (old, _) => self.table.replace(tag, old, new),
        };
        let is_tombstone = |flags: RecordFlags| u64::from(flags.contains(RecordFlags::TOMBSTONE));
        self.tombstones += is_tombstone(change.flags);
        self.tombstones -= before.map_or(0, |before| is_tombstone(before.flags(format)));
        before
    }

    /// Adds an entry of a checkpoint.
    pub(super) fn load(&mut self, format: RecordFormat, entry: IndexEntry) {
        let record_ref = entry.record_ref();
        self.tombstones += u64::from(record_ref.flags(format).contains(RecordFlags::TOMBSTONE));
        self.table.insert(entry.tag(), record_ref);
    }

    /// Clears the bits that are flags in format 2, of a table of format 1.
    pub(super) fn clear_flags(&mut self) {
        self.table.clear_flags();
    }

    /// Entries whose records have a value.
    pub(super) fn keys(&self) -> u64 {
        self.table.len() as u64 - self.tombstones
    }
}

const _: () = assert!(size_of::<IndexPartition>() == 64, "a prefetch of the header is one line");
