//! The records of values: read, checked against their entries.
//!
//! ```text
//!   entry ─▶ granules of the device ─▶ whole units around them, one read for each extent ─▶ chunks opened meanwhile? ─▶ checksums
//! ```
//! In: entries of an image that a lookup found. Out: the value within its buffer. Invariants: a value is given only if key, version, length
//! and checksums are those of the entry; a record whose chunk was opened again since the lookup is not judged.
//! Tested in `tests/log_conformance.rs` and `tests/log_power_loss.rs`.

use super::core::LogCore;
use super::log_place::LogKind;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::store::Store;
use super::value_record::{ValueRecordPlace, check_value_record, value_record_bytes};
use crate::EngineError;
use octokv_base::Buffer;
use std::ops::Range;

/// What became of a read of a record.
pub(super) enum RecordRead {
    /// The buffer, and the bytes of the value in it.
    Value(Buffer, Range<usize>),
    /// A chunk of it was opened again since the lookup.
    Reused,
    /// No log has the chunk of this unit.
    Unowned(u64),
    /// It is not the record that the entry names. The unit is its first.
    Damaged(u64),
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
        let EntryContents::Value { bytes, at } = &entry.contents else {
            return Ok(RecordRead::Damaged(self.volume.layout().chunks_start_unit));
        };
        let record_bytes = value_record_bytes(entry.key.len(), *bytes, &entry.meta);
        let Some(parts) = self.parts_of(at, record_bytes) else {
            return Ok(RecordRead::Damaged(self.volume.layout().chunks_start_unit));
        };
        let (layout, pool) = (self.volume.layout(), &self.volume.pool);
        let unit_granules = u64::from(layout.unit_granules());
        let units_of = |part: &PlacedPart| {
            part.granules.start / unit_granules..part.granules.end.div_ceil(unit_granules)
        };
        let first_unit = units_of(&parts[0]).start;
        let mut reads = Vec::with_capacity(parts.len());
        for part in &parts {
            let units = units_of(part);
            // A record has at most 256 MiB, and a unit 512 B or more.
            reads.push(self.read_units(units.start, (units.end - units.start) as u32, store.id));
        }
        let buffers = futures_util::future::join_all(reads).await;
        let owner = pool.owner_of(first_unit);
        if parts.iter().any(|part| !pool.unopened_since(units_of(part).start, opens)) {
            return Ok(RecordRead::Reused);
        }
        let buffers = buffers.into_iter().collect::<Result<Vec<Buffer>, EngineError>>()?;
        let Some((owner, _)) = owner else { return Ok(RecordRead::Unowned(first_unit)) };
        if (owner.partition, owner.kind) != (store.id, LogKind::Values) {
            return Ok(RecordRead::Damaged(first_unit));
        }
        let within_unit = |part: &PlacedPart| {
            let granule = part.granules.start % unit_granules;
            (granule as usize) << layout.granule_log2
        };
        let (buffer, start) = match &buffers[..] {
            [_] => (buffers.into_iter().next().expect("there is one"), within_unit(&parts[0])),
            _ => {
                let mut joined = self.pool.take(record_bytes as usize).ok_or(EngineError::NoMemory)?;
                let mut at = 0;
                for (part, buffer) in parts.iter().zip(&buffers) {
                    let from = within_unit(part);
                    joined[at..at + part.bytes].copy_from_slice(&buffer[from..from + part.bytes]);
                    at += part.bytes;
                }
                (joined, 0)
            }
        };
        // The first part lies in a chunk.
        let granule = layout.place_of_granule(parts[0].granules.start).map_or(0, |(_, granule)| granule);
        let place = ValueRecordPlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index: owner.index,
            granule,
        };
        Ok(match check_value_record(&buffer[start..start + record_bytes as usize], entry, place) {
            Ok(value) => RecordRead::Value(buffer, start + value.start..start + value.end),
            Err(_) => RecordRead::Damaged(first_unit),
        })
    }
}
