//! The flush of a memtable: the oldest full one becomes tables of level 0.
//!
//! ```text
//!   memtable ─▶ what readers see ─▶ tables ─▶ edit: they are there, and changes up to the memtable's last are in tables ─▶ the memtable is released
//! ```
//! Invariants: one flush at a time; a snapshot that is created after the flush has listed them sees only entries that it keeps, since those that it drops were replaced
//! when the memtable became full.

use super::core::LsmCore;
use super::entry::{Position, TreeEntry};
use super::memtable::{Memtable, MemtableIndex};
use super::retention::RetentionRule;
use super::table_meta::TableMeta;
use super::table_output::TableOutput;
use super::version_edit::VersionEdit;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::work_slice::WorkSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The lock of flushes, among the volume's work locks.
const FLUSH_LOCK: u64 = 0;

impl LsmCore {
    /// Flushes the oldest full memtable. False if there is none.
    ///
    /// # Errors
    /// Device failures, no memory, no space: the memtable stays.
    pub(super) async fn flush_oldest(&self) -> Result<bool, EngineError> {
        let volume = &self.volume;
        let _guard = volume.work_locks.lock(FLUSH_LOCK).await;
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let Some((placed, through)) = volume.memtables.oldest_full() else { return Ok(false) };
        let tables = self.write_tables(&placed.memtable).await?;
        let flushed_bytes = tables.iter().map(|table| table.bytes()).sum();
        let edit = VersionEdit {
            added_tables: tables.iter().map(|table| (0, table.clone())).collect(),
            flushed_through: Some(
                through + u64::from(bug_injection::is_injected(InjectedBug::FlushClaimsTooMuch)),
            ),
            ..VersionEdit::default()
        };
        if bug_injection::is_injected(InjectedBug::ReleaseMemtableEarly) {
            volume.memtables.release_oldest(tables);
            self.commit_edit(edit).await?;
        } else {
            self.commit_edit(edit).await?;
            volume.memtables.release_oldest(tables);
        }
        volume.compaction.flushes.fetch_add(1, Ordering::Relaxed);
        volume.compaction.flushed_bytes.fetch_add(flushed_bytes, Ordering::Relaxed);
        Ok(true)
    }

    /// Writes what readers see of a memtable to tables. Nothing is flushed.
    ///
    /// # Errors
    /// Device failures, no memory, no space.
    pub(super) async fn write_tables(&self, memtable: &Memtable) -> Result<Vec<Arc<TableMeta>>, EngineError> {
        let mut output = TableOutput::new(self, memtable.bytes() as u64 / 8 * 9, true);
        match self.write_memtable(memtable, &mut output).await {
            Ok(()) => output.finish(|_| false).await,
            Err(error) => {
                output.give_up().await;
                Err(error)
            }
        }
    }

    async fn write_memtable(
        &self,
        memtable: &Memtable,
        output: &mut TableOutput<'_>,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        let snapshots = match bug_injection::is_injected(InjectedBug::FlushForgetsSnapshots) {
            true => Vec::new(),
            false => volume.snapshots.points(),
        };
        let forgotten = *volume.forgotten.lock();
        let rule = RetentionRule { snapshots: &snapshots, now: volume.clock.now(), forgotten };
        let mut at = memtable.first_from(Position::START);
        let mut slice = WorkSlice::default();
        while let Some(first) = at {
            let (entries, next) = entries_of_key(memtable, first);
            let bytes = entries.iter().map(TreeEntry::encoded_bytes).sum();
            let retained = rule.retain_in_flush(&entries);
            let kept: Vec<TreeEntry<'_>> = entries
                .into_iter()
                .zip(retained)
                .filter_map(|(entry, retention)| retention.apply(entry))
                .collect();
            if !kept.is_empty() {
                output.push_key(&kept).await?;
            }
            at = next;
            slice.count_entry(bytes).await;
        }
        Ok(())
    }

    /// Rotates the active memtable and flushes all full memtables. Later writes go to the new active memtable.
    ///
    /// # Errors
    /// As for [`LsmCore::flush_oldest`].
    pub(super) async fn flush_memtables(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.memtables.rotate(|| volume.commits.replay_from());
        let last = volume.memtables.current().full.first().map(|(_, through)| *through);
        while last.is_some_and(|last| volume.versions.current().flushed_through() < last) {
            if !self.flush_oldest().await? {
                break;
            }
        }
        Ok(())
    }
}

/// All entries of the key at an index, the newest first, and the index behind them.
fn entries_of_key(memtable: &Memtable, first: MemtableIndex) -> (Vec<TreeEntry<'_>>, Option<MemtableIndex>) {
    let mut entries = vec![memtable.entry(first)];
    let mut next = memtable.following(first);
    while let Some(index) = next {
        let entry = memtable.entry(index);
        if entry.key != entries[0].key {
            break;
        }
        entries.push(entry);
        next = memtable.following(index);
    }
    (entries, next)
}
