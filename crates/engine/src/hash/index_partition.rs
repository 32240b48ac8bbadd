//! One partition of the index: its table, and what is counted and known of it.

use super::index::{IndexEntry, IndexTable, RecordRef, fingerprint};
use super::journal::IndexChange;
use crate::common::record::{RecordFlags, RecordFormat};
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
        // Of the entries, not of the change: a journal may have any flags in any change.
        let is_tombstone =
            |record_ref: RecordRef| u64::from(record_ref.flags(format).contains(RecordFlags::TOMBSTONE));
        let is_in_table = change.new_location != 0 && (change.old_location == 0 || before.is_some());
        self.tombstones += if is_in_table { is_tombstone(new) } else { 0 };
        self.tombstones -= before.map_or(0, is_tombstone);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Intact bytes of a journal may say this, though no writer does.
    #[test]
    fn a_change_that_leaves_no_tombstone_counts_none() {
        for format in [RecordFormat::V1, RecordFormat::V2] {
            let mut state = PartitionState::default();
            let change = |old_location, new_location| IndexChange {
                hash: 0,
                new_location,
                old_location,
                sequence: 1,
                units: 1,
                flags: RecordFlags::TOMBSTONE,
            };
            assert_eq!(state.apply(format, 5, &change(0, 9)), None);
            assert_eq!(state.keys(), u64::from(format == RecordFormat::V1));
            assert_eq!(state.apply(format, 5, &change(8, 10)), None, "there is no such record");
            assert!(state.apply(format, 5, &change(9, 0)).is_some());
            assert_eq!(state.keys(), 0, "{format:?}");
        }
    }
}
