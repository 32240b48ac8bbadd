//! The compaction of a whole volume, which an operator asks for: all tables become those of one level.
//!
//! In: the request. Out: one level of tables, and segments of which little is dead. Invariant: each step is a compaction like any other, so it may end after any of them.

use super::compaction::{CompactionInput, CompactionReason, TreeCompaction};
use super::compaction_run::RunPace;
use super::core::LsmCore;
use super::maintenance::{COMPACTION_LOCK, CompactionStep, RunningCompaction, is_no_space};
use super::version_edit::LEVELS;
use crate::EngineError;
use octokv_runtime::yield_now;

/// Tables that a full compaction takes down at once: its edit has these and what they overlap.
const TABLES_DOWN: usize = 16;

impl LsmCore {
    /// Flushes all memtables, compacts all tables into the lowest level that has some, and collects segments, until nothing can be gained.
    ///
    /// # Errors
    /// Those of flush and compaction.
    pub(super) async fn compact_all(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.segments.close();
        self.flush_memtables().await?;
        let version = volume.versions.current();
        let lowest = (2..LEVELS).rev().find(|level| version.level_tables(*level) > 0).unwrap_or(1);
        drop(version);
        for level in 0..lowest {
            while match self.compact_down(level).await {
                // What follows needs less space at once.
                Err(error) if is_no_space(&error) => false,
                is_compacted => is_compacted?,
            } {
                yield_now().await;
            }
        }
        while self.compact_at_once(true).await? != CompactionStep::Nothing {
            yield_now().await;
        }
        Ok(())
    }

    /// Compacts the first tables of a level, or all of level 0, into the next. False if the level is empty.
    async fn compact_down(&self, level: usize) -> Result<bool, EngineError> {
        let volume = &self.volume;
        let pace = RunPace { handle: None };
        let _hurry = pace.hurry(volume);
        let _guard = volume.work_locks.lock(COMPACTION_LOCK).await;
        let (settings, unmovable) = (&volume.settings.compaction, volume.compaction.unmovable.lock().clone());
        let compaction = volume.versions.with_usage(|version, usage| {
            let tables = match level {
                0 => version.level0().to_vec(),
                _ => version.level(level).range(0..TABLES_DOWN).cloned().collect(),
            };
            let input = CompactionInput {
                version,
                usage,
                running: &[],
                oldest_snapshot: volume.oldest_snapshot(),
                forget_below: volume.forget_below(),
                settings,
                unmovable: &unmovable,
            };
            let levels = (level, level + 1);
            (!tables.is_empty()).then(|| {
                TreeCompaction::new(&input, CompactionReason::LevelBytes, levels, tables).complete(&input)
            })
        });
        let Some(compaction) = compaction else { return Ok(false) };
        let running = RunningCompaction::begin(volume, compaction);
        self.run_compaction(running.compaction(), &pace).await?;
        Ok(true)
    }
}
