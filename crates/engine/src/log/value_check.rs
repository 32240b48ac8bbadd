//! Whether the values of an image are on the device: for images that are not known to be durable.
//!
//! In: the entries of an image, and how far the value log is known to be durable. Out: whether each record behind that is there.
//!
//! Invariants: a record that was torn, or is another one, is found; one that cannot be read after [`READ_ATTEMPTS`] attempts counts as
//! intact, since a medium does not lose a write that power cut short, and reads of the key report it; memory is bounded by
//! [`RECORDS_AT_ONCE`] parts of records, each of at most a piece of a value.
//! Tested in `replay_tests.rs`.

use super::known_chunks::KnownChunks;
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber};
use super::log_window::READ_ATTEMPTS;
use super::segment_buckets::ValueTailPlace;
use super::segment_entry::{EntryContents, SegmentEntry, ValueExtent, ValuePlace};
use super::segment_image::SegmentImage;
use super::value_record::{
    UncheckedValueRecord, VALUE_PIECE_BYTES, ValueRecordPlace, record_granules, value_head_bytes,
};
use crate::common::unit_reader::UnitReader;
use futures_util::future::join_all;
use smallvec::SmallVec;

/// Records that are read at the same time.
pub const RECORDS_AT_ONCE: usize = 16;

/// What the records of a store are compared with.
pub struct ValueChecker<'a> {
    /// The device.
    pub reader: UnitReader<'a>,
    /// The regions of the volume.
    pub layout: &'a LogLayout,
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
    /// The chunks of the value log.
    pub values: &'a KnownChunks,
    /// Records before this place are known to be durable.
    pub proven: ValueTailPlace,
}

/// A part of a record that lies in one chunk.
#[derive(Clone, Copy)]
struct RecordPart {
    chunk: ChunkNumber,
    /// The first granule, counted from the start of the chunk.
    granule: u32,
    granules: u32,
}

/// The parts of a record: one, unless it is in extents.
type RecordParts = SmallVec<[RecordPart; 1]>;

impl ValueChecker<'_> {
    /// Whether every record of these entries that is not known to be durable is on the device, or cannot be read.
    pub async fn has_values(&self, image: &SegmentImage) -> bool {
        let entries: Vec<_> =
            image.iter().filter_map(|entry| Some((self.unproven_parts(&entry)?, entry))).collect();
        for some in entries.chunks(RECORDS_AT_ONCE) {
            let found = join_all(some.iter().map(|(parts, entry)| self.has_record(entry, parts))).await;
            if found.contains(&false) {
                return false;
            }
        }
        true
    }

    /// The parts of an entry's record, if it has one and that is not known to be durable. A chunk that the value log has not had since is
    /// an older one.
    fn unproven_parts(&self, entry: &SegmentEntry<'_>) -> Option<RecordParts> {
        let EntryContents::Value { bytes, at } = &entry.contents else { return None };
        let parts: RecordParts = match at {
            ValuePlace::Nowhere => return None,
            ValuePlace::Record(granule) => {
                let (chunk, granule) = self.layout.place_of_granule(*granule)?;
                let granules =
                    record_granules(entry.key.len(), *bytes, &entry.meta, self.layout.granule_log2);
                SmallVec::from_elem(RecordPart { chunk, granule, granules }, 1)
            }
            ValuePlace::Extents(of) => {
                let starts = std::iter::once(of.first_granule).chain(std::iter::repeat(0));
                let part = |(extent, granule): (&ValueExtent, u32)| RecordPart {
                    chunk: extent.chunk,
                    granule,
                    granules: extent.granules,
                };
                of.extents.iter().zip(starts).map(part).collect()
            }
        };
        parts.iter().any(|part| self.is_unproven(part)).then_some(parts)
    }

    fn is_unproven(&self, part: &RecordPart) -> bool {
        let index = self.values.index_of(part.chunk, self.proven.index);
        index.is_some_and(|index| ValueTailPlace { index, granule: part.granule } >= self.proven)
    }

    /// Whether the record of an entry is on the device as a whole; true if it cannot be read.
    async fn has_record(&self, entry: &SegmentEntry<'_>, parts: &RecordParts) -> bool {
        let value_bytes = entry.contents.value_bytes();
        let granules = record_granules(entry.key.len(), value_bytes, &entry.meta, self.layout.granule_log2);
        let is_inside = |part: &RecordPart| {
            let end = u64::from(part.granule) + u64::from(part.granules);
            part.chunk.0 < self.layout.chunks && end <= self.layout.chunk_granules().into()
        };
        let have: u64 = parts.iter().map(|part| u64::from(part.granules)).sum();
        let first = parts[0];
        // The first extent of a record may be older than what is looked at.
        let Some(index) = self.values.index_of(first.chunk, ChunkIndex(0)) else { return false };
        if have != u64::from(granules) || !parts.iter().all(is_inside) {
            return false;
        }
        let place = ValueRecordPlace {
            volume_id: self.volume_id,
            partition: self.partition,
            index,
            granule: first.granule,
        };
        let head_bytes = value_head_bytes(entry.key.len(), value_bytes, &entry.meta);
        let front_bytes = head_bytes + (value_bytes as usize).min(VALUE_PIECE_BYTES);
        let Some(front) = self.read(parts, 0, front_bytes).await else { return true };
        let Ok(head) = (UncheckedValueRecord { bytes: &front, place }).head() else { return false };
        if !head.is_of(entry) || !head.is_piece_intact(0, &front[head_bytes..]) {
            return false;
        }
        for piece in 1..head.pieces() {
            let start = piece * VALUE_PIECE_BYTES;
            let bytes = (value_bytes as usize - start).min(VALUE_PIECE_BYTES);
            let Some(bytes) = self.read(parts, head_bytes + start, bytes).await else { continue };
            if !head.is_piece_intact(piece, &bytes) {
                return false;
            }
        }
        true
    }

    /// Reads bytes of a record from an offset on; `None` if the device fails in every attempt. REQUIRES: the parts have so many.
    async fn read(&self, parts: &RecordParts, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        let (mut skipped, mut found) = (offset as u64, Vec::with_capacity(bytes));
        for part in parts {
            let part_bytes = u64::from(part.granules) << self.layout.granule_log2;
            if skipped >= part_bytes {
                skipped -= part_bytes;
                continue;
            }
            let wanted = (part_bytes - skipped).min((bytes - found.len()) as u64) as usize;
            let from = (u64::from(part.granule) << self.layout.granule_log2) + skipped;
            found.extend_from_slice(&self.read_part(part.chunk, from, wanted).await?);
            skipped = 0;
            if found.len() == bytes {
                break;
            }
        }
        Some(found)
    }

    async fn read_part(&self, chunk: ChunkNumber, from: u64, bytes: usize) -> Option<Vec<u8>> {
        for _ in 0..READ_ATTEMPTS {
            if let Ok(bytes) = self.reader.read(self.layout.unit_of(chunk, 0), from, bytes).await {
                return Some(bytes);
            }
        }
        None
    }
}
