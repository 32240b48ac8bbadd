//! The tables that a flush or a compaction writes, one after another.
//!
//! In: the entries of one key after another, in order. Out: tables of a given length, their space. All entries of a key are in one table, so that tables of a level share
//! no keys.
//!
//! Invariants: an output that is not finished is given up before its space is used again; when it fails, no write of it is in flight and its space is free.

use super::compaction::TreeCompaction;
use super::core::LsmCore;
use super::entry::TreeEntry;
use super::table::info::TableInfo;
use super::table::writer::{TableWriteError, TableWriter, TableWriterConfig};
use super::table_meta::{TableFields, TableMeta, TableParts};
use crate::EngineError;
use crate::common::allocator::Extent;
use octokv_base::Version;
use octokv_device::DeviceError;
use std::sync::Arc;

/// A run has so many times the bytes of data that its table is to have: two copies of filter and index, and prefixes that compress less than expected. What the table does not
/// use is given back.
const RUN_FACTOR: u64 = 2;
/// Bytes of a run beside that.
const RUN_BYTES_MORE: u64 = 256 << 10;
/// If a run is not free, one for a table of half the length is tried, down to these bytes.
const TABLE_BYTES_LEAST: u64 = 64 << 10;

/// A table that is being written.
struct OpenTable {
    writer: TableWriter,
    run: Extent,
    /// The bytes of data for which the run was made.
    data_bytes_max: u64,
}

/// Writes tables.
pub(super) struct TableOutput<'a> {
    core: &'a LsmCore,
    table_bytes: u64,
    open: Option<OpenTable>,
    finished: Vec<TableInfo>,
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
    /// Tables of about `table_bytes` of data.
    pub(super) fn new(core: &'a LsmCore, table_bytes: u64) -> TableOutput<'a> {
        TableOutput { core, table_bytes, open: None, finished: Vec::new(), data_bytes: 0 }
    }

    /// Adds all entries of a key, the newest first. REQUIRES: there is one, and the key is above those before.
    ///
    /// # Errors
    /// The device's, no memory, and [`DeviceError::NoSpace`]. The output can then only be given up.
    pub(super) async fn push_key(&mut self, entries: &[TreeEntry<'_>]) -> Result<(), EngineError> {
        let bytes: usize = entries.iter().map(|entry| entry.key.len() + entry.encoded_bytes() + 16).sum();
        let bytes = bytes as u64;
        if let Some(open) = &self.open {
            let data_bytes = open.writer.data_bytes();
            if data_bytes >= self.table_bytes || data_bytes + bytes > open.data_bytes_max {
                self.finish_table().await?;
            }
        }
        let mut is_new = self.open.is_none();
        loop {
            if self.open.is_none() {
                self.open = Some(self.begin(bytes)?);
            }
            let open = self.open.as_mut().expect("opened above");
            match add_all(&mut open.writer, entries).await {
                Ok(()) => break,
                // A table with less overhead than data has room for what it was made for.
                Err(TableWriteError::RunFull) if !is_new && open.writer.entries() > 0 => {
                    self.finish_table().await?;
                    is_new = true;
                }
                Err(TableWriteError::RunFull) => return Err(DeviceError::NoSpace.into()),
                Err(TableWriteError::Engine(error)) => return Err(error),
            }
        }
        self.data_bytes += bytes;
        Ok(())
    }

    fn begin(&self, key_bytes: u64) -> Result<OpenTable, EngineError> {
        let volume = &self.core.volume;
        let unit_bytes = volume.unit_bytes() as u64;
        let mut data_bytes_max = self.table_bytes.max(2 * key_bytes);
        loop {
            let units = (RUN_FACTOR * data_bytes_max + RUN_BYTES_MORE).div_ceil(unit_bytes);
            if let Some(run) = volume.allocate(units, false) {
                let config = TableWriterConfig {
                    compresses: volume.settings.compresses,
                    ..TableWriterConfig::default()
                };
                let writer = TableWriter::new(self.core.io.clone(), volume.next_table_id(), run, config);
                return Ok(OpenTable { writer, run, data_bytes_max });
            }
            if data_bytes_max <= TABLE_BYTES_LEAST.max(2 * key_bytes) {
                return Err(DeviceError::NoSpace.into());
            }
            data_bytes_max = (data_bytes_max / 2).max(2 * key_bytes);
        }
    }

    async fn finish_table(&mut self) -> Result<(), EngineError> {
        let Some(OpenTable { writer, run, .. }) = self.open.take() else { return Ok(()) };
        match writer.finish().await {
            Ok(info) => {
                let used = info.extent.units;
                let rest = Extent { location: run.location + used, units: run.units - used };
                self.core.volume.release(rest);
                self.finished.push(info);
                Ok(())
            }
            Err(error) => {
                self.core.volume.release(run);
                Err(error)
            }
        }
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
        let meta = |info: &TableInfo| {
            let mut fields = fields_of(info);
            fields.is_settled = settled(&fields);
            volume.table_meta(&fields)
        };
        Ok(self.finished.iter().map(meta).collect())
    }

    /// Gives up the tables and their space.
    pub(super) async fn give_up(mut self) {
        let volume = &self.core.volume;
        if let Some(OpenTable { writer, run, .. }) = self.open.take() {
            writer.abandon().await;
            volume.release(run);
        }
        self.finished.drain(..).for_each(|info| volume.release(info.extent));
    }
}

async fn add_all(writer: &mut TableWriter, entries: &[TreeEntry<'_>]) -> Result<(), TableWriteError> {
    for (index, entry) in entries.iter().enumerate() {
        match writer.add(entry).await {
            // The key's first entries are in the table: its run was made for all of them.
            Err(TableWriteError::RunFull) if index > 0 => {
                return Err(TableWriteError::Engine(DeviceError::NoSpace.into()));
            }
            other => other?,
        }
    }
    Ok(())
}

/// Whether a compaction's output table drops no tombstone if it is written again.
pub(super) fn settled_by(
    compaction: &TreeCompaction,
    oldest_snapshot: u64,
    forget_below: Version,
) -> impl Fn(&TableFields) -> bool + '_ {
    move |fields| compaction.is_settled(fields, oldest_snapshot, forget_below)
}
