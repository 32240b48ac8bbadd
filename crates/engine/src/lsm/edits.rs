//! Edits and checkpoints: how the tree's changes of shape become durable.
//!
//! ```text
//!   edit         lock ─▶ flush (its tables and records) ─▶ its parts, journal batches ─▶ current version ─▶ space to which nothing refers
//!   checkpoint   image of the current version ─▶ flush ─▶ superblock: the journal is needed from the oldest memtable on
//! ```
//! Each edit takes along the segments that have become ready to be sealed, and removes those to which nothing refers.
//!
//! Invariants: edits are installed in the order of the journal, each after it is durable; what a checkpoint's image lacks of the edits lies behind the position at
//! which replay begins: while an edit has parts in the journal and is not installed, no memtable that had the journal's first part of it is flushed, since
//! that takes an edit, too.

use super::core::LsmCore;
use super::edit_parts::encode_parts;
use super::journal::JournalChange;
use super::superblock::LsmSuperblock;
use super::table_meta::{SegmentSeal, SegmentState};
use super::version_edit::VersionEdit;
use super::version_image::VersionImageWriter;
use super::version_set::SegmentUsage;
use crate::bug_injection::{self, InjectedBug};
use crate::common::commit_queue::PoisonGuard;
use crate::common::group_commit::{checkpoint_if, commit, flush_device};
use crate::common::image_stream::ImageWriter;
use crate::common::superblock_io::write_superblock;
use crate::common::volume_layout::Checkpoint;
use crate::{Durability, EngineError};
use octokv_device::DeviceError;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The lock of edits, among the maintenance locks of the volume behind those of group commit.
const EDIT_LOCK: u64 = 16;

/// Counts an edit in progress until it is dropped.
struct InProgress<'a>(&'a AtomicUsize);

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl LsmCore {
    /// Makes an edit durable and installs it. REQUIRES: all writes of its tables and records have ended.
    ///
    /// # Errors
    /// A failed write of the journal or a failed flush, which makes the volume read-only.
    ///
    /// # Panics
    /// If it is not an edit of the current version.
    pub(super) async fn commit_edit(&self, mut edit: VersionEdit) -> Result<(), EngineError> {
        let volume = &self.volume;
        let _guard = volume.maintenance_locks.lock(EDIT_LOCK).await;
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let has_output = !edit.added_tables.is_empty();
        edit.sealed_segments.extend(volume.segments.take_ready());
        let unused = volume.versions.with_usage(|version, usage| {
            usage.unused(version).map(|segment| segment.meta.id()).collect::<Vec<_>>()
        });
        edit.removed_segments.extend(unused);
        if has_output && !bug_injection::is_injected(InjectedBug::EditBeforeFlush) {
            flush_device(self).await?;
        }
        volume.edits.in_progress.fetch_add(1, Ordering::AcqRel);
        let _in_progress = InProgress(&volume.edits.in_progress);
        let mut lost = Vec::new();
        if bug_injection::is_injected(InjectedBug::LoseTableOfEdit) {
            lost.extend(edit.added_tables.pop());
        }
        let parts = encode_parts(&edit, volume.next_edit());
        edit.added_tables.append(&mut lost);
        for part in parts {
            commit(self, JournalChange::edit_part(&part), None, &mut ready(Ok(()))).await??;
        }
        if volume.commits.durability() == Durability::Completed {
            flush_device(self).await?;
        }
        if bug_injection::is_injected(InjectedBug::FreeUnderVersions) {
            let version = volume.versions.current();
            let tables = edit.removed_tables.iter().filter_map(|removed| version.find(removed).ok());
            tables.for_each(|table| volume.release(table.extent()));
            let segments = edit.removed_segments.iter().filter_map(|id| version.segments().get(id));
            segments.for_each(|segment| volume.release(segment.meta.extent()));
        }
        let mut installed = volume.edits.installed.lock();
        volume.versions.install(&edit).expect("an edit of the current version");
        *installed = volume.edits.last_part.load(Ordering::Acquire);
        drop(installed);
        for removed in &edit.removed_tables {
            volume.cache.forget_table(removed.id);
        }
        volume.release_reclaimed();
        Ok(())
    }

    /// Removes the segments that the last edit left without references, if there are some: otherwise the next edit would.
    ///
    /// # Errors
    /// As for [`LsmCore::commit_edit`].
    pub(super) async fn remove_unused_segments(&self) -> Result<(), EngineError> {
        let has_unused = |version: &_, usage: &SegmentUsage| usage.unused(version).next().is_some();
        match self.volume.versions.with_usage(has_unused) {
            true => self.commit_edit(VersionEdit::default()).await,
            false => Ok(()),
        }
    }

    /// Makes the edit of a compaction durable and installs it, once the journal has room for it: flushes make room, and need some for their own.
    ///
    /// # Errors
    /// As for [`LsmCore::commit_edit`] and those of a flush; [`DeviceError::NoSpace`] if there is no room. Nothing has changed.
    pub(super) async fn commit_compaction(&self, edit: VersionEdit) -> Result<(), EngineError> {
        let volume = &self.volume;
        let parts: Vec<usize> = encode_parts(&edit, 0).iter().map(Vec::len).collect();
        let has_room =
            || volume.journal_room.has_room_for_edit(parts.iter().copied(), volume.commits.used_units());
        if !has_room() {
            self.flush_memtables().await?;
            checkpoint_if(self, || !has_room()).await?;
            if !has_room() {
                return Err(DeviceError::NoSpace.into());
            }
        }
        self.commit_edit(edit).await
    }

    /// The seals of the segments that were open before recovery: nothing more is written to them. All of their bytes count as those of records.
    fn recovered_seals(&self) -> Vec<(u32, SegmentSeal)> {
        let volume = &self.volume;
        let (last_sequence, unit_bytes) = (volume.memtables.last_number(), volume.unit_bytes() as u64);
        let version = volume.versions.current();
        let unsealed = version.segments().iter().filter(|segment| segment.seal.is_none());
        let seal = |segment: &Arc<SegmentState>| {
            let units = segment.meta.extent().units;
            (segment.meta.id(), SegmentSeal { units, record_bytes: units * unit_bytes, last_sequence })
        };
        unsealed.map(seal).collect()
    }

    /// Seals the segments that were open before recovery.
    ///
    /// # Errors
    /// As for [`LsmCore::commit_edit`].
    pub(super) async fn seal_recovered(&self) -> Result<(), EngineError> {
        let sealed_segments = self.recovered_seals();
        match sealed_segments.is_empty() {
            true => Ok(()),
            false => self.commit_edit(VersionEdit { sealed_segments, ..VersionEdit::default() }).await,
        }
    }

    /// Flushes what recovery has found, and writes a checkpoint of it, without a batch in the journal: one would mark those before it as durable, and what recovery
    /// dropped of them would come back with the next. REQUIRES: nothing else runs yet.
    ///
    /// # Errors
    /// The device's, no memory, no space: the volume on the device is as it was.
    pub(super) async fn checkpoint_recovered(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.memtables.rotate(|| volume.commits.replay_from());
        let mut sealed_segments = self.recovered_seals();
        while let Some((placed, through)) = volume.memtables.oldest_full() {
            let tables = self.write_tables(&placed.memtable).await?;
            let edit = VersionEdit {
                added_tables: tables.iter().map(|table| (0, table.clone())).collect(),
                sealed_segments: std::mem::take(&mut sealed_segments),
                flushed_through: Some(through),
                ..VersionEdit::default()
            };
            volume.versions.install(&edit).expect("an edit of the current version");
            volume.memtables.release_oldest(tables);
        }
        if !sealed_segments.is_empty() {
            let edit = VersionEdit { sealed_segments, ..VersionEdit::default() };
            volume.versions.install(&edit).expect("an edit of the current version");
        }
        flush_device(self).await?;
        *volume.edits.installed.lock() = volume.memtables.last_number();
        self.checkpoint(false).await
    }

    /// Writes a checkpoint, and releases the journal before the oldest memtable. With `clean`, the superblock records a clean shutdown. REQUIRES: no other is being
    /// written.
    ///
    /// # Errors
    /// Device failures. A failed image write leaves the previous checkpoint valid; a failure after that makes the volume read-only.
    pub(super) async fn write_image(&self, clean: bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        if volume.edits.in_progress.load(Ordering::Acquire) == 0 {
            volume.memtables.advance_start(|| volume.commits.replay_from());
        }
        // Both before the version: what is flushed or edited meanwhile is in it, or behind them.
        let mut position = volume.memtables.current().start();
        let (version, image_entry) = {
            let installed = volume.edits.installed.lock();
            (volume.versions.current(), *installed)
        };
        if bug_injection::is_injected(InjectedBug::CheckpointClaimsTooMuch) {
            position = volume.commits.replay_from();
        }
        let superblock = *volume.superblock.lock();
        let layout = &superblock.layout;
        let (area, id) = (superblock.checkpoint.next_area(), volume.next_checkpoint_id());
        // If this is dropped half-way, its writes may still reach the area during the next checkpoint.
        let poison_guard = PoisonGuard(&volume.commits);
        let starts = [0, 1].map(|copy| volume.lba(layout.area_start_unit(area, copy)));
        let mut writer = ImageWriter::new(&*self.device, starts, volume.unit_bytes());
        let mut images = VersionImageWriter::new(version, superblock.volume_id, id);
        let (mut bytes, area_bytes) = (0, layout.area_units * volume.unit_bytes() as u64);
        loop {
            let before = writer.pending().len() as u64;
            if !images.append_image(writer.pending()) {
                break;
            }
            bytes += writer.pending().len() as u64 - before;
            let written = match bytes <= area_bytes {
                true => writer.write_chunks().await,
                false => Err(DeviceError::NoSpace.into()),
            };
            if let Err(error) = written {
                poison_guard.disarm();
                return Err(error);
            }
        }
        let bytes = match writer.finish().await {
            Ok(bytes) => bytes,
            Err(error) => {
                poison_guard.disarm();
                return Err(error);
            }
        };
        self.device.flush().await.result?;
        let next = LsmSuperblock {
            generation: superblock.generation + 1,
            is_clean_shutdown: clean,
            image_entry,
            forgotten: *volume.forgotten.lock(),
            has_versions: volume.has_versions(),
            checkpoint: Checkpoint {
                area: Some(area),
                id,
                bytes,
                journal_unit: position.unit,
                batch: position.batch,
                entry: position.entry.saturating_sub(1),
                incarnation: volume.incarnation_of(position),
            },
            ..superblock
        };
        // After a failure it is unknown which superblock is on the device, and which part of the journal it needs.
        write_superblock(&*self.device, &next).await?;
        poison_guard.disarm();
        *volume.superblock.lock() = next;
        volume.image_bytes.store(bytes, Ordering::Relaxed);
        volume.commits.release_before(position);
        volume.count_checkpoint();
        Ok(())
    }
}
