//! The tables that a flush or a compaction writes, one after another.
//!
//! In: the entries of one key after another, in order. Out: tables of a given length, their space. All entries of a key are in one table, so that tables of a level share
//! no keys.
//!
//! Invariants: the space of an output that is not finished is free when no write of it is in flight: when it was given up, or some time after it was dropped. Tested in
//! `unfinished_tests.rs`.

use super::compaction::TreeCompaction;
use super::core::LsmCore;
use super::entry::TreeEntry;
use super::settings::run_bytes_least;
use super::table::info::TableInfo;
use super::table::writer::{TableWriteError, TableWriter, TableWriterConfig};
use super::table_meta::{TableFields, TableMeta, TableParts};
use crate::EngineError;
use crate::common::allocator::Extent;
use octokv_base::Version;
use octokv_device::DeviceError;
use std::sync::Arc;

/// A table that is being written.
struct OpenTable {
    writer: TableWriter,
    run: Extent,
    /// A shorter rest of the run stays with it.
    least_units: u64,
}

/// Writes tables.
pub(super) struct TableOutput<'a> {
    core: &'a LsmCore,
    run_bytes: u64,
    /// A flush takes any run that a table fits in: it is what makes room.
    is_flush: bool,
    open: Option<OpenTable>,
    /// The tables, with the runs that they keep.
    finished: Vec<(TableInfo, Extent)>,
    /// Bytes of data that were added.
    pub data_bytes: u64,
}

/// The fields of a table that was written.
pub(super) fn fields_of(info: &TableInfo) -> TableFields {
    TableFields {
        id: info.place.id,
        extent: info.extent,
        parts: TableParts {
            front_bytes: info.place.front_bytes,
            second_unit: info.place.second_unit,
            descriptor_bytes: info.place.descriptor_bytes,
            filter_bytes: info.place.filter_bytes,
            index_bytes: info.place.index_bytes,
        },
        bytes: info.data_bytes,
        entries: info.entries,
        tombstones: info.tombstones,
        smallest_sequence: info.smallest_sequence,
        largest_sequence: info.largest_sequence,
        largest_tombstone_version: if info.tombstones > 0 { info.largest_version } else { Version::NONE },
        earliest_expiry: info.earliest_expiry,
        is_settled: false,
        first_key: info.first_key.to_vec(),
        last_key: info.last_key.to_vec(),
        segment_bytes: info.segments.iter().map(|it| (it.segment, it.bytes)).collect(),
    }
}

impl<'a> TableOutput<'a> {
    /// Tables of at most `run_bytes`, with all that they consist of; of a flush or of a compaction.
    pub(super) fn new(core: &'a LsmCore, run_bytes: u64, is_flush: bool) -> TableOutput<'a> {
        TableOutput { core, run_bytes, is_flush, open: None, finished: Vec::new(), data_bytes: 0 }
    }

    /// Adds all entries of a key, the newest first. REQUIRES: there is one, and the key is above those before.
    ///
    /// # Errors
    /// The device's, no memory, and [`DeviceError::NoSpace`]. The output can then only be given up.
    pub(super) async fn push_key(&mut self, entries: &[TreeEntry<'_>]) -> Result<(), EngineError> {
        if let Some(open) = &self.open
            && open.writer.entries() > 0
            && !open.writer.has_room_for(entries)
        {
            self.finish_table().await?;
        }
        if self.open.is_none() {
            self.open = Some(self.begin(entries)?);
        }
        let writer = &mut self.open.as_mut().expect("opened above").writer;
        for entry in entries {
            match writer.add(entry).await {
                Ok(()) => {}
                Err(TableWriteError::RunFull) => return Err(DeviceError::NoSpace.into()),
                Err(TableWriteError::Engine(error)) => return Err(error),
            }
        }
        self.data_bytes += entries.iter().map(|it| (it.key.len() + it.encoded_bytes()) as u64).sum::<u64>();
        Ok(())
    }

    /// Begins a table in a run of the length that tables have, so that a table which goes leaves room for another; the rest of the run, which the last of several has, is given back.
    fn begin(&self, entries: &[TreeEntry<'_>]) -> Result<OpenTable, EngineError> {
        let volume = &self.core.volume;
        let unit_bytes = volume.unit_bytes();
        let key_bytes = entries.first().map_or(0, |entry| entry.key.len());
        let least_units = run_bytes_least(key_bytes).div_ceil(unit_bytes as u64);
        let needed_units = TableWriter::bytes_for(entries, unit_bytes).div_ceil(unit_bytes as u64);
        let shortest = match self.is_flush {
            true => needed_units.max(run_bytes_least(0).div_ceil(unit_bytes as u64)),
            false => needed_units.max(least_units),
        };
        let longest = self.run_bytes.div_ceil(unit_bytes as u64).max(shortest);
        let run = volume.allocate(longest, shortest, false).ok_or(DeviceError::NoSpace)?;
        let config =
            TableWriterConfig { compresses: volume.settings.compresses, ..TableWriterConfig::default() };
        let writer = TableWriter::new(self.core.io.clone(), volume.next_table_id(), run, config);
        Ok(OpenTable { writer, run, least_units })
    }

    /// Ends the table that is being written, if there is one: the next key begins another.
    ///
    /// # Errors
    /// As for [`TableOutput::push_key`].
    pub(super) async fn finish_table(&mut self) -> Result<(), EngineError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let info = open.writer.finish().await?;
        let kept = self.core.volume.release_behind(open.run, info.extent.units, open.least_units);
        self.finished.push((info, kept));
        self.open = None;
        Ok(())
    }

    /// Writes the rest, and gives the tables. Nothing is flushed. `compaction` knows which of them are settled.
    ///
    /// # Errors
    /// As for [`TableOutput::push_key`].
    pub(super) async fn finish(
        mut self,
        settled: impl Fn(&TableFields) -> bool,
    ) -> Result<Vec<Arc<TableMeta>>, EngineError> {
        if let Err(error) = self.finish_table().await {
            self.give_up().await;
            return Err(error);
        }
        let volume = &self.core.volume;
        let meta = |(info, extent): &(TableInfo, Extent)| {
            let mut fields = TableFields { extent: *extent, ..fields_of(info) };
            fields.is_settled = settled(&fields);
            volume.table_meta(&fields)
        };
        // Their space is that of the metadata now.
        Ok(std::mem::take(&mut self.finished).iter().map(meta).collect())
    }

    /// Gives up the tables and their space, which is free when this ends.
    pub(super) async fn give_up(mut self) {
        if let Some(open) = &mut self.open {
            open.writer.abandon().await;
        }
    }
}

impl Drop for TableOutput<'_> {
    fn drop(&mut self) {
        if let Some(OpenTable { writer, run, .. }) = self.open.take() {
            self.core.release_unfinished(run, writer.into_writes());
        }
        self.finished.drain(..).for_each(|(_, extent)| self.core.volume.release(extent));
    }
}

/// Whether a compaction's output table drops no tombstone if it is written again.
pub(super) fn settled_by(
    compaction: &TreeCompaction,
    oldest_snapshot: u64,
    forget_below: Version,
) -> impl Fn(&TableFields) -> bool + '_ {
    move |fields| compaction.is_settled(fields, oldest_snapshot, forget_below)
}
