//! The compaction of a whole volume, which an operator asks for: all tables become those of one level, and values lie in the order of keys, so that scans read many at once.
//!
//! ```text
//!   memtables ─▶ level 0 ─▶ … ─▶ the lowest level ─▶ its tables again, each with the values to which it refers ─▶ segments that are mostly dead
//! ```
//! A segment to which puts wrote has values of keys from anywhere, so the tables of all keys have to move their values before it is free. There has to be space for a second copy of all
//! these values; otherwise they stay where they are.
//!
//! In: the request. Out: one level of tables, values in the order of keys, segments of which little is dead. Invariant: each step is one compaction, so the volume may be closed, or
//! a step may fail, after any of them; one that orders values has a table and all values to which it refers.

use super::compaction::{
    CompactionInput, CompactionReason, CompactionSettings, TreeCompaction, collectable, is_in_order_of_puts,
    stored_bytes,
};
use super::compaction_run::{RunFailure, RunPace};
use super::core::LsmCore;
use super::maintenance::{COMPACTION_LOCK, CompactionStep, RunningCompaction, is_no_space};
use super::version_edit::LEVELS;
use crate::EngineError;
use octokv_base::map::FxHashSet;
use octokv_runtime::yield_now;

/// Tables that a full compaction takes down at once: its edit has these and what they overlap.
const TABLES_DOWN: usize = 16;

impl LsmCore {
    /// Flushes all memtables, compacts all tables into the lowest level that has some, and collects segments, until nothing can be gained. Tries also what was
    /// postponed.
    ///
    /// # Errors
    /// Those of flush and compaction.
    pub(super) async fn compact_all(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.segments.close();
        self.flush_memtables().await?;
        volume.compaction.postponed.lock().clear();
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
        self.order_values(lowest).await?;
        loop {
            match self.compact_at_once(true).await? {
                CompactionStep::Nothing => {
                    let error = volume.compaction.postponed.lock().error();
                    return error.map_or(Ok(()), Err);
                }
                CompactionStep::Postponed(error) => return Err(error),
                CompactionStep::Compacted | CompactionStep::LookAgain => yield_now().await,
            }
        }
    }

    /// Compacts the first tables of a level, or all of level 0, into the next. False if the level is empty.
    async fn compact_down(&self, level: usize) -> Result<bool, EngineError> {
        self.compact_chosen(&self.volume.settings.compaction, |input| {
            let tables = match level {
                0 => input.version.level0().to_vec(),
                _ => input.version.level(level).range(0..TABLES_DOWN).cloned().collect(),
            };
            let levels = (level, level + 1);
            (!tables.is_empty()).then(|| {
                TreeCompaction::new(input, CompactionReason::LevelBytes, levels, tables).complete(input)
            })
        })
        .await
    }

    /// Writes the values of the tables of a level again in the order of keys, those of segments to which puts wrote, if there is space for all of them.
    async fn order_values(&self, level: usize) -> Result<(), EngineError> {
        let volume = &self.volume;
        // Beside the reserve, and as much again for what is written meanwhile.
        let free_bytes = || {
            volume.release_reclaimed();
            let free_units = volume.space.free_units().saturating_sub(2 * volume.reserve_units());
            free_units * volume.unit_bytes() as u64
        };
        let mut behind: Option<Vec<u8>> = None;
        loop {
            let settings = CompactionSettings {
                orders_values: true,
                output_bytes_max: free_bytes(),
                ..volume.settings.compaction.clone()
            };
            let is_ordered = self.compact_chosen(&settings, |input| {
                let tables = input.version.level(level);
                // What is left, each time: others take space, too.
                if unordered_bytes(input) > settings.output_bytes_max {
                    return None;
                }
                for rank in behind.as_ref().map_or(0, |key| tables.rank(key, true)).. {
                    let table = tables.nth(rank)?.clone();
                    behind = Some(table.last_key().to_vec());
                    let levels = (level, level);
                    let rewritten =
                        TreeCompaction::new(input, CompactionReason::ValueOrder, levels, vec![table]);
                    let rewritten = rewritten.complete(input);
                    // Tables whose values stay where they are stay, too.
                    if !rewritten.moved_segments.is_empty() {
                        return Some(rewritten);
                    }
                }
                None
            });
            match is_ordered.await {
                Ok(true) => yield_now().await,
                Ok(false) => return Ok(()),
                // Others have taken the space.
                Err(error) if is_no_space(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs the compaction that `choose` gives, without pauses. False if it gives none.
    async fn compact_chosen(
        &self,
        settings: &CompactionSettings,
        choose: impl FnOnce(&CompactionInput<'_>) -> Option<TreeCompaction>,
    ) -> Result<bool, EngineError> {
        let volume = &self.volume;
        let pace = RunPace { handle: None };
        let _hurry = pace.hurry(volume);
        let _guard = volume.work_locks.lock(COMPACTION_LOCK).await;
        let unmovable = volume.compaction.unmovable.lock().clone();
        let compaction = volume.versions.with_usage(|version, usage| {
            choose(&CompactionInput {
                version,
                usage,
                running: &[],
                oldest_snapshot: volume.oldest_snapshot(),
                forget_below: volume.forget_below(),
                settings,
                unmovable: &unmovable,
                postponed: &FxHashSet::default(),
            })
        });
        let Some(compaction) = compaction else { return Ok(false) };
        let running = RunningCompaction::begin(volume, compaction);
        self.run_compaction(running.compaction(), &pace).await.map_err(RunFailure::error)?;
        Ok(true)
    }
}

/// The bytes that the records of the values take which lie in the order of puts.
fn unordered_bytes(input: &CompactionInput<'_>) -> u64 {
    let ids = input.version.segments().iter().map(|segment| segment.meta.id());
    let unordered = ids.filter(|id| is_in_order_of_puts(input, *id));
    let stored = |id| collectable(input, id).map(|(_, live_bytes)| stored_bytes(input, id, live_bytes));
    unordered.filter_map(stored).sum()
}
