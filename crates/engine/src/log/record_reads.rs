//! The records of values: read, checked against their entries.
//!
//! ```text
//!   entry ─▶ granules of the device ─▶ whole units around them, one read for each extent ─▶ chunks opened meanwhile? ─▶ checksums
//!   part of a long value: the same of its head, and of the pieces of 128 KiB that have the part
//! ```
//! In: entries of an image that a lookup found. Out: the value within its buffer. Invariants: a value is given only if key, version, length
//! and checksums are those of the entry; a record whose chunk was opened again since the lookup is not judged.
//! Tested in `tests/log_conformance.rs` and `tests/log_power_loss.rs`.

use super::core::LogCore;
use super::log_place::LogKind;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::store::Store;
use super::value_record::{
    VALUE_PIECE_BYTES, ValueRecordPlace, check_value_pieces, value_head_bytes, value_record_bytes,
};
use crate::EngineError;
use octokv_base::Buffer;
use smallvec::SmallVec;
use std::ops::Range;

/// What became of a read of a record.
pub(super) enum RecordRead {
    /// The buffer, and in it the bytes of the value that were asked for.
    Value(Buffer, Range<usize>),
    /// A chunk of it was opened again since the lookup.
    Reused,
    /// No log has the chunk of this unit.
    Unowned(u64),
    /// It is not the record that the entry names. The unit is its first.
    Damaged(u64),
}

/// The bytes of a record that one read gives.
struct RecordSpan {
    /// The units that are read.
    units: Range<u64>,
    /// Where the bytes begin in the first unit.
    within: usize,
    bytes: usize,
}

/// A part of a record on the device.
struct PlacedPart {
    /// The granules of the device.
    granules: Range<u64>,
    /// Its bytes; fewer than those of its granules in the last part.
    bytes: usize,
}

impl LogCore {
    /// The parts of a record of so many bytes; `None` if it has a place outside of the chunks.
    fn parts_of(&self, at: &ValuePlace, record_bytes: u32) -> Option<Vec<PlacedPart>> {
        let layout = self.volume.layout();
        let granules = u64::from(record_bytes.div_ceil(1 << layout.granule_log2));
        let mut rest = record_bytes as usize;
        let mut part = |first: u64, granules: u64| {
            let (_, within) = layout.place_of_granule(first)?;
            let is_inside = u64::from(within) + granules <= layout.chunk_granules().into();
            let bytes = ((granules << layout.granule_log2) as usize).min(rest);
            rest -= bytes;
            is_inside.then_some(PlacedPart { granules: first..first + granules, bytes })
        };
        let parts = match at {
            ValuePlace::Nowhere => return None,
            ValuePlace::Record(granule) => vec![part(*granule, granules)?],
            ValuePlace::Extents(extents) => {
                let mut first = extents.first_granule;
                let mut parts = Vec::with_capacity(extents.extents.len());
                for extent in &extents.extents {
                    let is_chunk = extent.chunk.0 < layout.chunks && first < layout.chunk_granules();
                    let granule = is_chunk.then(|| layout.granule_of(extent.chunk, first))?;
                    parts.push(part(granule, extent.granules.into())?);
                    first = 0;
                }
                parts
            }
        };
        (rest == 0).then_some(parts)
    }

    /// The value of an entry, which is not empty. `opens` are the openings of chunks before the entry was looked up.
    ///
    /// # Errors
    /// Device failures and no memory.
    pub(super) async fn read_record(
        &self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        opens: u64,
    ) -> Result<RecordRead, EngineError> {
        self.read_record_part(store, entry, 0..u32::MAX, opens).await
    }

    /// Some bytes of the value of an entry, which is not empty; fewer if it ends before. Of a value of more than 128 KiB the head and the pieces
    /// that have them are read, and a shorter one as a whole.
    ///
    /// # Errors
    /// As for [`LogCore::read_record`].
    pub(super) async fn read_record_part(
        &self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        wanted: Range<u32>,
        opens: u64,
    ) -> Result<RecordRead, EngineError> {
        let (layout, pool) = (self.volume.layout(), &self.volume.pool);
        let no_place = Ok(RecordRead::Damaged(layout.chunks_start_unit));
        let EntryContents::Value { bytes: value_bytes, at } = &entry.contents else { return no_place };
        let record_bytes = value_record_bytes(entry.key.len(), *value_bytes, &entry.meta);
        let Some(parts) = self.parts_of(at, record_bytes) else { return no_place };
        let head_bytes = value_head_bytes(entry.key.len(), *value_bytes, &entry.meta);
        let pieces = pieces_with(*value_bytes, &wanted);
        let in_record = head_bytes + pieces.start..head_bytes + pieces.end;
        // One span of the record, or its head and one behind it.
        let is_apart = pieces.start > 0;
        let first_span = if is_apart { 0..head_bytes } else { 0..in_record.end };
        let mut spans = self.spans_of(&parts, first_span);
        let first_parts = spans.len();
        if is_apart {
            spans.extend(self.spans_of(&parts, in_record));
        }
        // A record has at most 256 MiB, and a unit 512 B or more.
        let units = |span: &RecordSpan| (span.units.end - span.units.start) as u32;
        let reads = spans.iter().map(|span| self.read_units(span.units.start, units(span), store.id));
        let buffers = futures_util::future::join_all(reads).await;
        let first_unit = spans[0].units.start;
        let owner = pool.owner_of(first_unit);
        if spans.iter().any(|span| !pool.unopened_since(span.units.start, opens)) {
            return Ok(RecordRead::Reused);
        }
        let mut buffers = buffers.into_iter().collect::<Result<Vec<Buffer>, EngineError>>()?;
        let Some((owner, _)) = owner else { return Ok(RecordRead::Unowned(first_unit)) };
        if (owner.partition, owner.kind) != (store.id, LogKind::Values) {
            return Ok(RecordRead::Damaged(first_unit));
        }
        let behind = buffers.split_off(first_parts);
        let (front, front_at) = self.join_spans(&spans[..first_parts], buffers)?;
        // The first part lies in a chunk.
        let granule = layout.place_of_granule(parts[0].granules.start).map_or(0, |(_, granule)| granule);
        let place = ValueRecordPlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index: owner.index,
            granule,
        };
        let apart = match is_apart {
            true => Some(self.join_spans(&spans[first_parts..], behind)?),
            false => None,
        };
        let head = &front[front_at..front_at + head_bytes];
        let (buffer, at) = match &apart {
            Some((buffer, at)) => (buffer, *at),
            None => (&front, front_at + head_bytes),
        };
        let checked = check_value_pieces(head, &buffer[at..at + pieces.len()], pieces.start, entry, place);
        let start = (wanted.start as usize).clamp(pieces.start, pieces.end);
        let end = (wanted.end as usize).clamp(start, pieces.end);
        let of_value = at + start - pieces.start..at + end - pieces.start;
        Ok(match checked {
            Ok(()) => RecordRead::Value(apart.map_or(front, |(buffer, _)| buffer), of_value),
            Err(_) => RecordRead::Damaged(first_unit),
        })
    }

    /// The first unit of an entry's record; that of the chunks if it has no place in them.
    pub(super) fn first_unit_of(&self, entry: &SegmentEntry<'_>) -> u64 {
        let layout = self.volume.layout();
        let EntryContents::Value { bytes, at } = &entry.contents else { return layout.chunks_start_unit };
        let record_bytes = value_record_bytes(entry.key.len(), *bytes, &entry.meta);
        let parts = self.parts_of(at, record_bytes);
        let first = parts.map(|parts| parts[0].granules.start / u64::from(layout.unit_granules()));
        first.unwrap_or(layout.chunks_start_unit)
    }

    /// Where the bytes of a span of a record lie.
    fn spans_of(&self, parts: &[PlacedPart], span: Range<usize>) -> SmallVec<[RecordSpan; 2]> {
        let layout = self.volume.layout();
        let unit_bytes = u64::from(layout.unit_bytes);
        let (mut spans, mut part_start) = (SmallVec::new(), 0);
        for part in parts {
            let (from, to) = (span.start.max(part_start), span.end.min(part_start + part.bytes));
            if from < to {
                let first = (part.granules.start << layout.granule_log2) + (from - part_start) as u64;
                let bytes = to - from;
                let units = first / unit_bytes..(first + bytes as u64).div_ceil(unit_bytes);
                spans.push(RecordSpan { units, within: (first % unit_bytes) as usize, bytes });
            }
            part_start += part.bytes;
        }
        spans
    }

    /// A buffer with the bytes of spans that were read, and where they begin in it.
    ///
    /// # Errors
    /// [`EngineError::NoMemory`].
    fn join_spans(
        &self,
        spans: &[RecordSpan],
        mut buffers: Vec<Buffer>,
    ) -> Result<(Buffer, usize), EngineError> {
        if let ([span], 1) = (spans, buffers.len()) {
            return Ok((buffers.remove(0), span.within));
        }
        let bytes = spans.iter().map(|span| span.bytes).sum();
        let mut joined = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
        let mut at = 0;
        for (span, buffer) in spans.iter().zip(&buffers) {
            joined[at..at + span.bytes].copy_from_slice(&buffer[span.within..span.within + span.bytes]);
            at += span.bytes;
        }
        Ok((joined, 0))
    }
}

/// The bytes of the pieces of a value that have some of its bytes; all of a value without piece checksums.
fn pieces_with(value_bytes: u32, wanted: &Range<u32>) -> Range<usize> {
    let bytes = value_bytes as usize;
    if bytes <= VALUE_PIECE_BYTES {
        return 0..bytes;
    }
    let (start, end) = ((wanted.start as usize).min(bytes), (wanted.end as usize).min(bytes));
    match start < end {
        true => start - start % VALUE_PIECE_BYTES..end.next_multiple_of(VALUE_PIECE_BYTES).min(bytes),
        false => 0..0,
    }
}
