//! The compaction of a whole volume, which an operator asks for: all tables become those of one level, and values lie in the order of keys, so that scans read many at once.
//!
//! ```text
//!   memtables ─▶ level 0 ─▶ … ─▶ the lowest level ─▶ its tables again, each with the values to which it refers ─▶ segments that are mostly dead
//! ```
//! A segment to which puts wrote has values of keys from anywhere, so the tables of all keys have to move their values before it is free. There has to be space for a second copy of all
//! these values; otherwise they stay where they are.
//!
//! In: the request. Out: of what was there when it came, one level of tables, values in the order of keys, segments of which little is dead. Invariants: each step is one compaction, so the
//! volume may be closed, or a step may fail, after any of them; one that orders values has a table and moves about as many bytes as a compaction may read; it ends although users write.

use super::compaction::{
    CompactionInput, CompactionReason, CompactionSettings, TreeCompaction, collectable, is_to_be_ordered,
    stored_bytes,
};
use super::compaction_run::{RunFailure, RunPace};
use super::core::LsmCore;
use super::maintenance::{COMPACTION_LOCK, CompactionStep, RunningCompaction, is_no_space};
use super::space_reserve::SpaceDemand;
use super::table_meta::TableMeta;
use super::version_edit::LEVELS;
use super::volume::LsmVolume;
use crate::EngineError;
use octokv_base::map::FxHashSet;
use octokv_runtime::yield_now;
use std::sync::Arc;

/// Tables that a full compaction takes down at once: its edit has these and what they overlap.
const TABLES_DOWN: usize = 16;

/// What a tree had when a full compaction began: what users write meanwhile is left to other compactions.
struct InitialTree {
    /// Changes up to this one were in tables.
    sequence: u64,
    /// The highest number of a segment.
    segment: u32,
    /// The bytes of tables and segments.
    bytes: u64,
    /// What users had written.
    written_bytes: u64,
}

impl InitialTree {
    fn new(volume: &LsmVolume) -> InitialTree {
        let version = volume.versions.current();
        let units: u64 = version.extents().map(|extent| extent.units).sum();
        InitialTree {
            sequence: version.flushed_through(),
            segment: version.last_segment_id(),
            bytes: units * volume.unit_bytes() as u64,
            written_bytes: volume.memtables.written_bytes(),
        }
    }

    /// Whether a table has entries that were there.
    fn has_entries_of(&self, table: &TableMeta) -> bool {
        table.smallest_sequence() <= self.sequence
    }
}

impl LsmCore {
    /// Flushes all memtables, compacts all tables into the lowest level that has some, and collects segments, until nothing can be gained of what was there at its
    /// begin, or `is_wanted` no longer says so between two steps. Tries also what was postponed.
    ///
    /// # Errors
    /// Those of flush and compaction.
    pub(super) async fn compact_all(&self, is_wanted: &impl Fn() -> bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.segments.close();
        self.flush_memtables().await?;
        volume.compaction.postponed.lock().clear();
        let initial = InitialTree::new(volume);
        let version = volume.versions.current();
        let lowest = (2..LEVELS).rev().find(|level| version.level_tables(*level) > 0).unwrap_or(1);
        drop(version);
        for level in 0..lowest {
            let mut behind = Vec::new();
            while is_wanted() {
                match self.compact_down(level, &initial, &mut behind).await {
                    // What follows needs less space at once.
                    Err(error) if is_no_space(&error) => break,
                    is_compacted if !is_compacted? => break,
                    _ => yield_now().await,
                }
            }
        }
        self.order_values(lowest, &initial, is_wanted).await?;
        self.collect_all(&initial, is_wanted).await
    }

    /// Collects segments, and compacts what else frees space, until nothing can be gained. While users write there is always something: it then ends when compactions have
    /// done as much as was there.
    async fn collect_all(
        &self,
        initial: &InitialTree,
        is_wanted: &impl Fn() -> bool,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        let work_bytes = volume.compaction.work_bytes();
        let has_done_enough = || {
            volume.memtables.written_bytes() > initial.written_bytes
                && volume.compaction.work_bytes() - work_bytes > initial.bytes
        };
        while is_wanted() && !has_done_enough() {
            match self.compact_at_once(SpaceDemand::Garbage).await? {
                CompactionStep::Nothing => break,
                CompactionStep::Postponed(error) => return Err(error),
                CompactionStep::Compacted | CompactionStep::LookAgain => yield_now().await,
            }
        }
        let error = volume.compaction.postponed.lock().error();
        error.map_or(Ok(()), Err)
    }

    /// Compacts the first tables of a level behind a key, or all of level 0, into the next, if they have entries that were there at the begin. False if there are none.
    async fn compact_down(
        &self,
        level: usize,
        initial: &InitialTree,
        behind: &mut Vec<u8>,
    ) -> Result<bool, EngineError> {
        // A table that nothing overlaps is moved only if it has no tombstones that can go.
        let settings =
            CompactionSettings { tombstone_permille: 1, ..self.volume.settings.compaction.clone() };
        self.compact_chosen(&settings, |input| {
            let is_initial = |table: &Arc<TableMeta>| initial.has_entries_of(table);
            let tables: Vec<_> = match level {
                // In one step: parts of it would each write the tables again that they overlap.
                0 if input.version.level0().iter().any(is_initial) => input.version.level0().to_vec(),
                0 => Vec::new(),
                _ => {
                    let tables = input.version.level(level);
                    let tables = tables.range(tables.rank(behind, false)..tables.len());
                    tables.skip_while(|table| !is_initial(table)).take(TABLES_DOWN).cloned().collect()
                }
            };
            *behind = tables.last()?.last_key().to_vec();
            let levels = (level, level + 1);
            Some(TreeCompaction::new(input, CompactionReason::LevelBytes, levels, tables).complete(input))
        })
        .await
    }

    /// Writes the values of the tables of a level again in the order of keys, those of segments to which puts wrote before the begin, if there is space for all of them.
    async fn order_values(
        &self,
        level: usize,
        initial: &InitialTree,
        is_wanted: &impl Fn() -> bool,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        // Beside the reserve, and as much again for what is written meanwhile.
        let free_bytes = || {
            volume.release_reclaimed();
            let free_units = volume.space.free_units().saturating_sub(2 * volume.reserve_units());
            free_units * volume.unit_bytes() as u64
        };
        let mut behind = Vec::new();
        while is_wanted() {
            let settings = CompactionSettings {
                ordered_segments: initial.segment,
                output_bytes_max: free_bytes(),
                ..volume.settings.compaction.clone()
            };
            let is_ordered = self.compact_chosen(&settings, |input| {
                let tables = input.version.level(level);
                // What is left, each time: others take space, too.
                if unordered_bytes(input) > settings.output_bytes_max {
                    return None;
                }
                for rank in tables.rank(&behind, true).. {
                    let table = tables.nth(rank)?.clone();
                    let last_key = table.last_key().to_vec();
                    let levels = (level, level);
                    let rewritten =
                        TreeCompaction::new(input, CompactionReason::ValueOrder, levels, vec![table]);
                    let rewritten = rewritten.complete(input);
                    // The step may leave some of its values to the next one.
                    if !rewritten.moved_segments.is_empty() {
                        return Some(rewritten);
                    }
                    behind = last_key;
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
        Ok(())
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
    let unordered = ids.filter(|id| is_to_be_ordered(input, *id));
    let stored = |id| collectable(input, id).map(|(_, live_bytes)| stored_bytes(input, id, live_bytes));
    unordered.filter_map(stored).sum()
}
