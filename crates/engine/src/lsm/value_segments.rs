//! The value segment to which puts write: its free end, and when it is sealed.
//!
//! ```text
//!   open ──no room for a record──▶ closed ──its last write has ended──▶ ready ──edit──▶ sealed
//! ```
//! In: segments that an edit has added, lengths of records. Out: the space of each record, and the segments to be sealed. All cores write to one segment, so that the
//! records of a batch lie side by side and leave as one write.
//!
//! Invariants: two records share no unit; a segment is ready when no record of it is being written or waits for its batch, so that every number of a change that
//! refers to it is at most that of the last applied change. Tested below.

use super::entry::ValueAddress;
use super::table_meta::{SegmentMeta, SegmentSeal};
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::Extent;
use parking_lot::Mutex;
use std::sync::Arc;

/// A segment to which records are, or were, written.
struct WrittenSegment {
    meta: Arc<SegmentMeta>,
    /// The first unit without a record.
    next_unit: u64,
    /// Records that are being written.
    writes: usize,
    /// The bytes of the keys and values of those that were.
    record_bytes: u64,
    /// The number of a change that is at least that of each which refers to a record here.
    last_sequence: u64,
}

#[derive(Default)]
struct SegmentTable {
    open: Option<WrittenSegment>,
    closed: Vec<WrittenSegment>,
    ready: Vec<(u32, SegmentSeal)>,
    rest_units_least: u64,
}

/// The segments to which puts write.
pub struct ValueSegments {
    table: Mutex<SegmentTable>,
}

/// The space of one record, and the promise to say how its write ended.
pub struct RecordSpace<'a> {
    segments: &'a ValueSegments,
    /// The address of the value.
    pub address: ValueAddress,
    /// The units of the record.
    pub extent: Extent,
    /// The bytes of key and value, and the number of the change or a later one, once it is committed.
    stored: Option<(u64, u64)>,
}

impl ValueSegments {
    /// None is open. A sealed segment keeps what its records do not fill if that has fewer units than `rest_units_least`.
    pub fn new(rest_units_least: u64) -> ValueSegments {
        ValueSegments { table: Mutex::new(SegmentTable { rest_units_least, ..SegmentTable::default() }) }
    }

    /// The space for a record of so many units; `None` if the open segment has no room for it.
    pub fn reserve(&self, units: u64, value_bytes: u32) -> Option<RecordSpace<'_>> {
        let mut table = self.table.lock();
        let open = table.open.as_mut()?;
        let extent = open.meta.extent();
        if open.next_unit + units > extent.units {
            return None;
        }
        // Units of a segment have 32 bits.
        let address = ValueAddress { segment: open.meta.id(), unit: open.next_unit as u32, value_bytes };
        let location = extent.location + open.next_unit;
        open.next_unit += units;
        open.writes += 1;
        Some(RecordSpace { segments: self, address, extent: Extent { location, units }, stored: None })
    }

    /// Opens a segment, which the current version has, in place of the one that is open.
    pub fn open(&self, meta: Arc<SegmentMeta>) {
        let mut table = self.table.lock();
        let opened = WrittenSegment { meta, next_unit: 0, writes: 0, record_bytes: 0, last_sequence: 0 };
        if let Some(before) = table.open.replace(opened) {
            table.close(before);
        }
    }

    /// Closes the open segment.
    pub fn close(&self) {
        let mut table = self.table.lock();
        if let Some(open) = table.open.take() {
            table.close(open);
        }
    }

    /// The segments that became ready since the last call: for the next edit to seal.
    pub fn take_ready(&self) -> Vec<(u32, SegmentSeal)> {
        std::mem::take(&mut self.table.lock().ready)
    }

    fn end_write(&self, segment: u32, stored: Option<(u64, u64)>) {
        let mut table = self.table.lock();
        if let Some(open) = table.open.as_mut().filter(|open| open.meta.id() == segment) {
            open.end_write(stored);
            return;
        }
        let index = table.closed.iter().position(|closed| closed.meta.id() == segment);
        if index.is_none() && bug_injection::is_injected(InjectedBug::SealBeforeLastWrite) {
            return;
        }
        let index = index.expect("a segment stays closed until its writes have ended");
        let closed = &mut table.closed[index];
        closed.end_write(stored);
        if closed.writes == 0 {
            let closed = table.closed.swap_remove(index);
            let seal = closed.seal(table.rest_units_least);
            table.ready.push((segment, seal));
        }
    }
}

impl SegmentTable {
    fn close(&mut self, segment: WrittenSegment) {
        let seal = segment.seal(self.rest_units_least);
        match segment.writes {
            1.. if bug_injection::is_injected(InjectedBug::SealBeforeLastWrite) => {
                self.ready.push((segment.meta.id(), seal));
            }
            0 => self.ready.push((segment.meta.id(), seal)),
            _ => self.closed.push(segment),
        }
    }
}

impl WrittenSegment {
    fn end_write(&mut self, stored: Option<(u64, u64)>) {
        self.writes -= 1;
        if let Some((bytes, sequence)) = stored {
            self.record_bytes += bytes;
            self.last_sequence = self.last_sequence.max(sequence);
        }
    }

    fn seal(&self, rest_units_least: u64) -> SegmentSeal {
        let units = self.meta.extent().units;
        let is_kept = units - self.next_unit < rest_units_least;
        SegmentSeal {
            units: if is_kept { units } else { self.next_unit.max(1) },
            record_bytes: self.record_bytes,
            last_sequence: self.last_sequence,
        }
    }
}

impl RecordSpace<'_> {
    /// The change that refers to the record, whose key has so many bytes, is committed. `sequence` is its number or a later one.
    pub fn committed(mut self, key_bytes: usize, sequence: u64) {
        self.stored = Some((key_bytes as u64 + u64::from(self.address.value_bytes), sequence));
    }
}

impl Drop for RecordSpace<'_> {
    fn drop(&mut self) {
        self.segments.end_write(self.address.segment, self.stored);
    }
}

#[cfg(test)]
mod tests {
    use super::super::reclaim::ReclaimQueue;
    use super::*;

    fn segment(id: u32, units: u64) -> Arc<SegmentMeta> {
        SegmentMeta::new(id, Extent { location: 100 * u64::from(id), units }, &ReclaimQueue::new())
    }

    #[test]
    fn records_lie_side_by_side_and_a_segment_is_ready_when_its_last_write_has_ended() {
        let segments = ValueSegments::new(2);
        assert!(segments.reserve(1, 10).is_none(), "none is open");
        segments.open(segment(1, 5));
        let first = segments.reserve(2, 10).unwrap();
        let second = segments.reserve(3, 20).unwrap();
        assert_eq!(
            (first.extent, second.extent),
            (Extent { location: 100, units: 2 }, Extent { location: 102, units: 3 })
        );
        assert_eq!(second.address, ValueAddress { segment: 1, unit: 2, value_bytes: 20 });
        assert!(segments.reserve(1, 10).is_none(), "it is full");
        first.committed(4, 9);
        segments.open(segment(2, 5));
        assert_eq!(segments.take_ready(), [], "a write goes on");
        drop(second);
        let seal = |units, record_bytes, last_sequence| SegmentSeal { units, record_bytes, last_sequence };
        assert_eq!(segments.take_ready(), [(1, seal(5, 14, 9))], "the second failed");
        assert_eq!(segments.take_ready(), []);
        segments.close();
        assert_eq!(segments.take_ready(), [(2, seal(1, 0, 0))]);
    }
}
