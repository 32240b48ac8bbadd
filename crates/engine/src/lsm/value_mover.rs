//! Values that a compaction moves out of segments that are mostly dead: read in the order of keys, and written into new segments in that order.
//!
//! In: a key and the bytes of a value's record. Out: the value's new address, and when all are moved, the new segments, sealed. Invariants: a record is written once, in
//! whole units; the space of a mover that is not finished is free when no write of it is in flight: when it was given up, or some time after it was dropped. Tested in
//! `unfinished_tests.rs`.

use super::core::LsmCore;
use super::entry::ValueAddress;
use super::table::run_writer::RunWriter;
use super::table_meta::{SegmentMeta, SegmentSeal};
use super::volume::rest_units_least;
use crate::EngineError;
use crate::common::allocator::Extent;
use crate::common::record::{self, NewRecord, RecordFormat, RecordMeta, record_bytes};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A segment that is being written.
struct OpenRun {
    id: u32,
    run: Extent,
    writer: RunWriter,
    next_unit: u64,
    record_bytes: u64,
}

/// Segments that a compaction has written.
pub(super) type MovedSegments = Vec<(Arc<SegmentMeta>, SegmentSeal)>;

/// Writes values into new segments.
pub(super) struct ValueMover<'a> {
    core: &'a LsmCore,
    open: Option<OpenRun>,
    finished: Vec<(u32, Extent, SegmentSeal)>,
    scratch: Vec<u8>,
    /// The records that it wrote, in bytes.
    pub written_bytes: u64,
}

impl<'a> ValueMover<'a> {
    /// Has moved nothing.
    pub(super) fn new(core: &'a LsmCore) -> ValueMover<'a> {
        ValueMover { core, open: None, finished: Vec::new(), scratch: Vec::new(), written_bytes: 0 }
    }

    /// Writes a value to its new place; `None` if no free run is as long as its record.
    ///
    /// # Errors
    /// The device's and no memory. The mover can then only be given up.
    pub(super) async fn push(
        &mut self,
        key: &[u8],
        value: &[u8],
        meta: RecordMeta,
    ) -> Result<Option<ValueAddress>, EngineError> {
        let volume = &self.core.volume;
        let unit_bytes = volume.unit_bytes();
        let units = record_bytes(key.len(), value.len()).div_ceil(unit_bytes) as u64;
        if self.open.as_ref().is_some_and(|open| open.next_unit + units > open.run.units) {
            self.finish_run().await?;
        }
        volume.note_record(units);
        if self.open.is_none() {
            self.open = self.begin(units);
        }
        let Some(open) = self.open.as_mut() else { return Ok(None) };
        let address =
            ValueAddress { segment: open.id, unit: open.next_unit as u32, value_bytes: value.len() as u32 };
        let location = open.run.location + open.next_unit;
        self.scratch.clear();
        self.scratch.resize(units as usize * unit_bytes, 0);
        let offset = LsmCore::value_offset(key);
        self.scratch[offset..offset + value.len()].copy_from_slice(value);
        let new = NewRecord {
            format: RecordFormat::V2,
            identity: self.core.record_id(address, location),
            namespace: volume.fixed().namespace,
            key,
            value_bytes: value.len(),
            stored_bytes: value.len(),
            meta,
        };
        record::encode(&mut self.scratch, &new);
        open.writer.append(&self.scratch).await?;
        open.next_unit += units;
        open.record_bytes += (key.len() + value.len()) as u64;
        self.written_bytes += self.scratch.len() as u64;
        volume.compaction.moved_values.fetch_add(1, Ordering::Relaxed);
        volume.compaction.moved_bytes.fetch_add(self.scratch.len() as u64, Ordering::Relaxed);
        Ok(Some(address))
    }

    fn begin(&self, units: u64) -> Option<OpenRun> {
        let volume = &self.core.volume;
        let run = volume.allocate(volume.segment_units_for(units), units, false)?;
        let writer = RunWriter::new(self.core.io.clone(), run);
        Some(OpenRun { id: volume.next_segment_id(), run, writer, next_unit: 0, record_bytes: 0 })
    }

    async fn finish_run(&mut self) -> Result<(), EngineError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.writer.finish().await?;
        let used = self.core.volume.release_behind(
            open.run,
            open.next_unit,
            rest_units_least(self.core.volume.unit_bytes() as u32),
        );
        let seal = SegmentSeal { units: used.units, record_bytes: open.record_bytes, last_sequence: 0 };
        self.finished.push((open.id, used, seal));
        self.open = None;
        Ok(())
    }

    /// Writes the rest, and gives the segments. Nothing is flushed.
    ///
    /// # Errors
    /// As for [`ValueMover::push`].
    pub(super) async fn finish(mut self) -> Result<MovedSegments, EngineError> {
        if let Err(error) = self.finish_run().await {
            self.give_up().await;
            return Err(error);
        }
        let volume = &self.core.volume;
        let meta = |(id, extent, seal)| (volume.segment_meta(id, extent), seal);
        // Their space is that of the metadata now.
        Ok(std::mem::take(&mut self.finished).into_iter().map(meta).collect())
    }

    /// Gives up the segments and their space, which is free when this ends.
    pub(super) async fn give_up(mut self) {
        if let Some(open) = &mut self.open {
            open.writer.settle().await;
        }
    }
}

impl Drop for ValueMover<'_> {
    fn drop(&mut self) {
        if let Some(OpenRun { writer, run, .. }) = self.open.take() {
            self.core.release_unfinished(run, writer.into_writes());
        }
        self.finished.drain(..).for_each(|(_, extent, _)| self.core.volume.release(extent));
    }
}
