//! The search for tables that are worth a compaction for what they do not need to keep: tombstones, and values in segments that are mostly dead.
//!
//! A search looks at a bounded number of tables and goes on behind them by the next call. It ends when it has looked at all tables since the last one that it
//! found; the next call begins anew.

use super::compaction::{CompactionInput, CompactionReason, TreeCompaction, collectable, victims};
use super::table_meta::TableMeta;
use super::version_edit::LEVELS;
use std::sync::Arc;

/// The tables with many tombstones at which one choice looks.
const TOMBSTONE_TABLES: usize = 64;
/// The tables at which one choice looks for what they refer to.
const GARBAGE_TABLES: usize = 64;

/// Where the next look of a search begins.
#[derive(Clone, Debug, Default)]
struct SearchPlace {
    /// The level; 0 at the beginning.
    level: usize,
    /// Tables whose first keys are above this one follow.
    behind: Option<Vec<u8>>,
    /// Whether something was found since the beginning: then it begins again at the end.
    has_found: bool,
}

impl SearchPlace {
    /// The rank of the next table of the level.
    fn rank(&self, input: &CompactionInput<'_>) -> usize {
        self.behind.as_ref().map_or(0, |key| input.version.level(self.level).rank(key, true))
    }

    fn next_level(&mut self) {
        (self.level, self.behind) = (self.level + 1, None);
    }

    /// Whether it has passed all levels; then it is at the beginning again. Gives whether the search goes on from there.
    fn has_passed_all(&mut self) -> Option<bool> {
        let passed = std::mem::take(self);
        if passed.level < LEVELS {
            *self = passed;
            return None;
        }
        Some(passed.has_found)
    }
}

/// The search for tables of which most entries are tombstones.
#[derive(Clone, Debug, Default)]
pub struct TombstoneSearch {
    place: SearchPlace,
    is_searching: bool,
}

/// The search for tables that refer to segments which are mostly dead.
#[derive(Clone, Debug, Default)]
pub struct GarbageSearch {
    place: SearchPlace,
    is_searching: bool,
}

impl TombstoneSearch {
    /// Whether the last call stopped before it had looked at all tables.
    pub fn is_searching(&self) -> bool {
        self.is_searching
    }

    /// The next compaction for tombstones. `choose_level0` chooses one of level 0 with the table of an index, if that can be.
    pub fn choose(
        &mut self,
        input: &CompactionInput<'_>,
        choose_level0: impl Fn(usize) -> Option<TreeCompaction>,
    ) -> Option<TreeCompaction> {
        self.is_searching = true;
        let least = input.settings.tombstone_permille.max(1);
        if self.place.level == 0 {
            let level0 = input.version.level0();
            // A choice of level 0 has all tables that are older than the one that is wanted.
            let found = level0.iter().rposition(|table| table.tombstone_permille() >= least);
            if let Some(compaction) = found.and_then(&choose_level0) {
                self.place.has_found = true;
                return Some(compaction);
            }
            self.place.next_level();
        }
        for _ in 0..TOMBSTONE_TABLES {
            if let Some(goes_on) = self.place.has_passed_all() {
                self.is_searching = goes_on;
                return None;
            }
            let tables = input.version.level(self.place.level);
            let found = tables.find_from(self.place.rank(input), |it| it.tombstone_permille >= least);
            let Some((rank, table)) = found else {
                self.place.next_level();
                continue;
            };
            self.place.behind = Some(table.first_key().to_vec());
            let compaction = of_tombstones(input, self.place.level, rank);
            if compaction.is_some() {
                self.place.has_found = true;
                return compaction;
            }
        }
        None
    }
}

/// A compaction that takes a table with many tombstones down, or writes it again if nothing lies below.
fn of_tombstones(input: &CompactionInput<'_>, level: usize, rank: usize) -> Option<TreeCompaction> {
    let (version, settings) = (input.version, input.settings);
    let table = version.level(level).nth(rank)?;
    let is_bottommost = |table: &TableMeta| version.is_bottommost(level, table.first_key(), table.last_key());
    let may_drop = |table: &TableMeta| {
        table.tombstone_permille() >= settings.tombstone_permille.max(1)
            && table.may_drop_tombstones(input.oldest_snapshot, input.forget_below)
            && is_bottommost(table)
    };
    let compaction = if !is_bottommost(table) {
        TreeCompaction::new(input, CompactionReason::Tombstones, (level, level + 1), vec![table.clone()])
    } else if may_drop(table) {
        let inputs = run_from(input, level, rank, may_drop);
        TreeCompaction::new(input, CompactionReason::Tombstones, (level, level), inputs)
    } else {
        return None;
    };
    (input.admits(&compaction) && compaction.has_space(input.settings)).then_some(compaction)
}

/// The table of a rank and those behind it that are wanted, too, up to the bound and to what runs.
fn run_from(
    input: &CompactionInput<'_>,
    level: usize,
    rank: usize,
    is_wanted: impl Fn(&TableMeta) -> bool,
) -> Vec<Arc<TableMeta>> {
    let mut bytes = 0;
    let mut run: Vec<Arc<TableMeta>> = Vec::new();
    for table in input.version.level(level).range(rank..usize::MAX) {
        bytes += table.bytes();
        let bytes_max = input.settings.input_bytes_max.min(input.settings.output_bytes_max);
        if !run.is_empty() && (bytes > bytes_max || !is_wanted(table) || input.is_busy(table)) {
            break;
        }
        run.push(table.clone());
    }
    run
}

impl GarbageSearch {
    /// Whether the last call stopped before it had looked at all tables.
    pub fn is_searching(&self) -> bool {
        self.is_searching
    }

    /// The next compaction for dead values. `choose_level0` chooses one of level 0 with the table of an index, if that can be.
    pub fn choose(
        &mut self,
        input: &CompactionInput<'_>,
        choose_level0: impl Fn(usize) -> Option<TreeCompaction>,
    ) -> Option<TreeCompaction> {
        self.is_searching = false;
        if !has_garbage(input) {
            return None;
        }
        self.is_searching = true;
        let victims = victims(input);
        let victim_bytes = |table: &TableMeta| -> u64 {
            let of_victim = |it: &(u32, u64)| victims.contains_key(&it.0);
            table.segment_bytes().filter(of_victim).map(|it| it.1).fold(0, u64::saturating_add)
        };
        if self.place.level == 0 {
            let found = input.version.level0().iter().rposition(|table| victim_bytes(table) > 0);
            if let Some(compaction) = found.and_then(&choose_level0) {
                self.place.has_found = true;
                return Some(compaction);
            }
            self.place.next_level();
        }
        let mut looks = GARBAGE_TABLES;
        while looks > 0 {
            if let Some(goes_on) = self.place.has_passed_all() {
                self.is_searching = goes_on;
                return None;
            }
            let level = self.place.level;
            let tables = input.version.level(level);
            let start = self.place.rank(input);
            let ranks = start..(start + looks).min(tables.len());
            // A level without tables is a look, too.
            looks -= ranks.len().max(1);
            if ranks.is_empty() {
                self.place.next_level();
                continue;
            }
            let mut best: Option<(u64, usize)> = None;
            for (rank, table) in ranks.clone().zip(tables.range(ranks)) {
                self.place.behind = Some(table.first_key().to_vec());
                let bytes = victim_bytes(table);
                if bytes > best.map_or(0, |(most, _)| most) && !input.is_busy(table) {
                    best = Some((bytes, rank));
                }
            }
            if let Some((_, rank)) = best {
                let inputs = run_from(input, level, rank, |table| victim_bytes(table) > 0);
                let compaction =
                    TreeCompaction::new(input, CompactionReason::Garbage, (level, level), inputs);
                if moves_values(input, &compaction) && input.admits(&compaction) {
                    self.place.has_found = true;
                    return Some(compaction);
                }
            }
        }
        None
    }
}

/// Whether there is space for a compaction and for values that it moves: without them it would be written for nothing.
fn moves_values(input: &CompactionInput<'_>, compaction: &TreeCompaction) -> bool {
    compaction.has_space(input.settings) && !compaction.clone().complete(input).moved_segments.is_empty()
}

/// Whether so much of all segments is dead that tables are compacted for it.
fn has_garbage(input: &CompactionInput<'_>) -> bool {
    let (mut all_bytes, mut live_bytes) = (0u128, 0u128);
    for segment in input.version.segments().iter() {
        if let Some((record_bytes, live)) = collectable(input, segment.meta.id()) {
            all_bytes += u128::from(record_bytes);
            live_bytes += u128::from(live.min(record_bytes));
        }
    }
    all_bytes > live_bytes
        && (all_bytes - live_bytes) * 1000 >= all_bytes * u128::from(input.settings.garbage_permille)
}
