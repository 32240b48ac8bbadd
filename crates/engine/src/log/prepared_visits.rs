//! Visits of value compaction that are prepared together: the images of many segments are read first, then the records of all that lie close together.
//!
//! ```text
//!   segments ─▶ images, as lookups find them ─▶ places in the window, in the order of the device ─▶ reads of up to 128 KiB ─▶ visits, each with its records
//! ```
//! The records of a segment lie anywhere in the window, so a read for each takes as many accesses of the device as values are moved. Enough segments together
//! have some in each part of the window.
//!
//! In: segments, none of them held. Out: what their visits need not read. Invariants: nothing is held meanwhile, so a visit takes an image only if it is the newest then,
//! and a record only if its checksums and the entry agree; what could not be read is left to the visit, which knows what to do about it.
//! Tested below, in `prepared_visits_tests.rs` and in `compaction_tests.rs`.

use super::compaction_rounds::RoundPace;
use super::core::LogCore;
use super::hash_prefix::{HashPrefix, SegmentNumber};
use super::log_place::LogKind;
use super::records_to_move::{VisitTarget, VisitedChunks};
use super::segment_entry::ValuePlace;
use super::segment_reads::{FoundImage, ReadRepeats};
use super::shared_reads::{SharedRead, share_reads};
use super::store::Store;
use crate::EngineError;
use crate::common::work_slice::WorkSlice;
use futures_util::stream::{StreamExt, iter};
use octokv_base::Buffer;
use std::ops::RangeInclusive;

/// Records share a read if at most so many bytes lie between them: about what a device transfers in the time of one more access.
const GAP_BYTES: u64 = 16 << 10;
/// The bytes of a read that records share.
const SHARED_READ_BYTES: u64 = 128 << 10;
/// Longer records are read by their visits.
const RECORD_BYTES_MAX: u64 = 8 << 10;
/// The memory of an entry or a record beside its bytes, about.
const OVERHEAD_BYTES: u64 = 32;
/// One shared read in flight is allowed for each four concurrent visits, since it transfers more bytes than a visit.
const VISITS_PER_READ: usize = 4;

/// The bytes of records of one segment, read before its visit, each with its first granule.
#[derive(Debug, Default)]
pub(super) struct ReadRecords(Vec<(u64, Box<[u8]>)>);

impl ReadRecords {
    /// Removes the bytes of the record at a place and returns them; `None` if they were not read.
    pub(super) fn take(&mut self, at: &ValuePlace) -> Option<Box<[u8]>> {
        let ValuePlace::Record(granule) = at else { return None };
        let found = self.0.iter().position(|(of, _)| of == granule)?;
        Some(self.0.swap_remove(found).1)
    }
}

/// A segment to visit, with its image and records if they were read before the visit begins.
pub(super) struct PreparedVisit {
    pub segment: SegmentNumber,
    /// A prefix in the segment.
    pub prefix: HashPrefix,
    /// The image that a lookup found. It may be superseded when the visit begins.
    pub image: Option<FoundImage>,
    pub records: ReadRecords,
}

impl PreparedVisit {
    /// A visit that reads all by itself.
    pub(super) fn alone((segment, prefix): (SegmentNumber, HashPrefix)) -> PreparedVisit {
        PreparedVisit { segment, prefix, image: None, records: ReadRecords::default() }
    }
}

/// What lies in the chunks whose records visits move.
#[derive(Clone, Copy, Debug)]
struct WindowContents {
    /// The size of these chunks.
    bytes: u64,
    records: u64,
    record_bytes: u64,
    /// The segments that may have some of them.
    segments: u64,
    /// The mean bytes of entries of a segment, and their mean number.
    image_bytes: u64,
    image_entries: u64,
}

impl WindowContents {
    /// How many segments are prepared together: at least so many that records share reads, at most as many as fit into this memory. Empty if that is not possible.
    fn segments_together(&self, memory: u64) -> RangeInclusive<usize> {
        let none = RangeInclusive::new(1, 0);
        if self.records == 0 || self.segments == 0 || self.record_bytes / self.records > RECORD_BYTES_MAX {
            return none;
        }
        // A segment that is visited has one at least.
        let of_segment = (self.records as f64 / self.segments as f64).max(1.0);
        let record_bytes = self.record_bytes as f64 / self.records as f64 + OVERHEAD_BYTES as f64;
        let image_bytes = (self.image_bytes + self.image_entries * OVERHEAD_BYTES / 2) as f64;
        let most = memory as f64 / (image_bytes + of_segment * record_bytes);
        let least = (self.bytes as f64 / (of_segment * GAP_BYTES as f64)).ceil().max(2.0);
        if most < least { none } else { least as usize..=most as usize }
    }
}

/// A record that is to be read, of one of the visits.
struct WantedRecord {
    visit: usize,
    granule: u64,
    bytes: usize,
}

impl LogCore {
    /// How many segments of a store are prepared together; empty if each visit reads by itself.
    pub(super) fn segments_together(&self, store: &Store, target: VisitTarget) -> RangeInclusive<usize> {
        let (volume, layout) = (&self.volume, self.volume.layout());
        let memory = volume.settings.prepared_bytes;
        let memory = memory / u64::from(volume.compactions.count(LogKind::Values).max(1));
        let state = &mut *store.state.lock();
        let segments = state.table.segments();
        let head = state.values.head();
        let window = state.window.as_mut().filter(|_| target == VisitTarget::Window && memory > 0);
        let Some((reach, unvisited)) = window.map(|window| (window.reach(), window.unvisited(segments)))
        else {
            return RangeInclusive::new(1, 0);
        };
        let (records, granules) = self.live_until(state, reach);
        let chunks = reach.0.saturating_sub(head.0);
        let contents = WindowContents {
            bytes: u64::from(chunks) * u64::from(layout.chunk_bytes()),
            records,
            record_bytes: granules << layout.granule_log2,
            segments: unvisited,
            image_bytes: state.totals.entry_bytes / segments.max(1),
            image_entries: state.totals.keys / segments.max(1),
        };
        contents.segments_together(memory)
    }

    /// Reads the images of segments, and those of their records in the window that can share reads.
    pub(super) async fn prepare_visits(
        &self,
        store: &Store,
        segments: Vec<(SegmentNumber, HashPrefix)>,
        pace: RoundPace,
    ) -> Vec<PreparedVisit> {
        let most = self.visits_at_once(pace);
        let read = segments.into_iter().map(|(segment, prefix)| async move {
            let lookup = self.read_image(store, prefix, &mut ReadRepeats::default()).await;
            let image = lookup.ok().and_then(|lookup| lookup.image);
            PreparedVisit { image, ..PreparedVisit::alone((segment, prefix)) }
        });
        let mut visits: Vec<PreparedVisit> = iter(read).buffered(most).collect().await;
        let wanted = self.wanted_records(store, &visits);
        let layout = self.volume.layout();
        let unit_bytes = u64::from(layout.unit_bytes);
        let start_of = |record: &WantedRecord| record.granule << layout.granule_log2;
        let units_of = |record: &WantedRecord| {
            let start = start_of(record);
            start / unit_bytes..(start + record.bytes as u64).div_ceil(unit_bytes)
        };
        let units: Vec<_> = wanted.iter().map(units_of).collect();
        let reads = share_reads(&units, GAP_BYTES / unit_bytes, SHARED_READ_BYTES / unit_bytes);
        // A record that shares its read with none is read by its visit.
        let shared = reads.into_iter().filter(|read| read.records.len() > 1);
        let mut reads = iter(shared.map(|read| self.read_shared(store, read)))
            .buffer_unordered(most.div_ceil(VISITS_PER_READ));
        let mut slice = WorkSlice::default();
        while let Some((read, bytes)) = reads.next().await {
            let Ok(bytes) = bytes else { continue };
            for record in &wanted[read.records] {
                let at = (start_of(record) - read.units.start * unit_bytes) as usize;
                let of_record = Box::from(&bytes[at..at + record.bytes]);
                visits[record.visit].records.0.push((record.granule, of_record));
            }
            slice.count_bytes(bytes.len() as u64).await;
        }
        drop(reads);
        visits
    }

    /// The records of the images in the window, in the order of the device.
    fn wanted_records(&self, store: &Store, visits: &[PreparedVisit]) -> Vec<WantedRecord> {
        let chunks = {
            let state = store.state.lock();
            let Some(window) = &state.window else { return Vec::new() };
            VisitedChunks::Indices(state.values.head()..window.reach())
        };
        let mut wanted = Vec::new();
        for (visit, prepared) in visits.iter().enumerate() {
            let Some(image) = &prepared.image else { continue };
            for record in self.records_in(&image.entries, &chunks) {
                let bytes = record.record_bytes();
                if let ValuePlace::Record(granule) = record.at
                    && u64::from(bytes) <= RECORD_BYTES_MAX
                {
                    wanted.push(WantedRecord { visit, granule, bytes: bytes as usize });
                }
            }
        }
        wanted.sort_unstable_by_key(|record| record.granule);
        wanted
    }

    async fn read_shared(
        &self,
        store: &Store,
        read: SharedRead,
    ) -> (SharedRead, Result<Buffer, EngineError>) {
        // At most so many units as a shared read has.
        let units = (read.units.end - read.units.start) as u32;
        let bytes = self.read_units(read.units.start, units, store.id).await;
        (read, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 45 chunks of 256 KiB with 68 % live in records of 292 B, of 2,500 segments with 100 entries of 25 B.
    const CONTENTS: WindowContents = WindowContents {
        bytes: 45 * (256 << 10),
        records: 27_000,
        record_bytes: 27_000 * 292,
        segments: 2_500,
        image_bytes: 2_500,
        image_entries: 100,
    };

    #[test]
    fn so_many_segments_are_prepared_together_that_their_records_lie_close_and_fit_into_memory() {
        // 10.8 records of a segment: 67 segments have one in each 16 KiB. A segment takes 4,100 B with its image, and 3,500 B with its records.
        assert_eq!(CONTENTS.segments_together(2 << 20), 67..=275);
        assert_eq!(CONTENTS.segments_together(1 << 20), 67..=137);
        assert!(CONTENTS.segments_together(500_000).is_empty(), "65 segments");
        assert!(CONTENTS.segments_together(0).is_empty());
        // A tenth of the segments is left, with a tenth of the records.
        let late = WindowContents { records: 2_700, record_bytes: 2_700 * 292, segments: 250, ..CONTENTS };
        assert_eq!(late.segments_together(2 << 20), 67..=275);
        // The head chunk alone: each segment that is visited has a record in it.
        let head = WindowContents { bytes: 256 << 10, records: 600, record_bytes: 600 * 292, ..CONTENTS };
        assert_eq!(head.segments_together(2 << 20), 16..=474);
    }

    #[test]
    fn longer_records_and_empty_windows_are_not_prepared() {
        let long = |bytes: u64| WindowContents { record_bytes: 27_000 * bytes, ..CONTENTS };
        assert!(!long(8 << 10).segments_together(64 << 20).is_empty());
        assert!(long((8 << 10) + 1).segments_together(64 << 20).is_empty());
        for empty in [WindowContents { records: 0, ..CONTENTS }, WindowContents { segments: 0, ..CONTENTS }] {
            assert!(empty.segments_together(2 << 20).is_empty());
        }
    }
}
