//! The choice of the next compaction. Pure: a version, what runs, and where earlier searches stopped go in; a compaction comes out.
//!
//! ```text
//!   level 0 has many runs, or a level has many bytes     the one that is furthest above its target: its tables, and what they overlap below
//!   tombstones are most of a table                        into the next level; in the last that has its range it is written again, without them
//!   too much of the value segments is dead                a table that refers to mostly dead ones is written again, with its values
//! ```
//! Every [`CLEANUP_TURN`]th choice looks at the last two first, so that writes which keep the levels above their targets do not put them off for ever. Searches over
//! many tables are bounded; they go on where they stopped, by the next call.
//!
//! Every choice makes progress, so that they end when writes do: sizes decrease, tombstones sink and, once nothing lies below, go (a table from which
//! none may go is not chosen again: [`super::table_meta::TableFields::is_settled`]), a table that is written for its values does not refer to the segments afterwards.
//!
//! Tables that the device failed to read are left out until they may be tried again ([`CompactionInput::postponed`]), and so is every compaction that would read one;
//! only level 0, of which most others depend, is then compacted around them ([`TreeCompaction::around`]).
//! Tested in `version_model_tests.rs`.

use super::compaction::{
    CompactionInput, CompactionReason, CompactionSettings, TreeCompaction, are_disjoint, hull,
};
use super::compaction_cleanup::{GarbageSearch, TombstoneSearch};
use super::settings::run_bytes_least;
use super::table_meta::TableMeta;
use super::tree_version::TreeVersion;
use super::version_edit::LEVELS;
use std::sync::Arc;

/// Every so many choices, tombstones and dead values are considered before the sizes of levels.
pub const CLEANUP_TURN: u64 = 4;
/// The tables of a level of which the one is chosen that overlaps least.
const CANDIDATES: usize = 16;
/// While something cannot be read, level 0 has at most about so many runs of tables above it.
const RUNS_MAX: usize = 16;

/// What one choice leaves for the next.
#[derive(Clone, Debug, Default)]
pub struct ChoiceState {
    choices: u64,
    /// Of each level the key behind which the last compaction ended.
    behind: [Vec<u8>; LEVELS],
    tombstones: TombstoneSearch,
    garbage: GarbageSearch,
}

/// The outcome of a choice.
#[derive(Clone, Debug)]
pub enum CompactionChoice {
    /// This compaction.
    Compact(TreeCompaction),
    /// A search has not ended: choose again soon.
    LookAgain,
    /// Nothing until the tree, its snapshots or its compactions change.
    Nothing,
}

/// The bytes that a level may have; of level 0 and of the last level there is no such number.
pub fn level_target(level: usize, settings: &CompactionSettings) -> u64 {
    if level == 0 || level + 1 == LEVELS {
        return u64::MAX;
    }
    settings.level1_bytes.saturating_mul(settings.multiplier.saturating_pow(level as u32 - 1))
}

/// The bytes that compactions will read until every level has reached its target, estimated.
pub fn pending_bytes(version: &TreeVersion, settings: &CompactionSettings) -> u64 {
    let mut pending = 0u64;
    // The bytes that the levels above are to give.
    let mut incoming = 0;
    if version.level0_runs() >= settings.level0_trigger {
        incoming = version.level_bytes(0);
        pending = incoming.saturating_add(version.level_bytes(1));
    }
    for level in 1..LEVELS - 1 {
        let bytes = version.level_bytes(level).saturating_add(incoming);
        incoming = bytes.saturating_sub(level_target(level, settings));
        if incoming > 0 {
            // Each byte meets as many as the next level has for each of this one.
            let overlapped =
                u128::from(incoming) * u128::from(version.level_bytes(level + 1)) / u128::from(bytes);
            pending = pending.saturating_add(incoming).saturating_add(overlapped as u64);
        }
    }
    pending
}

/// Chooses the next compaction. The caller adds it to those that run before it chooses again.
pub fn choose_compaction(input: &CompactionInput<'_>, state: &mut ChoiceState) -> CompactionChoice {
    if input.running.len() >= input.settings.parallel_max {
        return CompactionChoice::Nothing;
    }
    let cleans_first = state.choices % CLEANUP_TURN == CLEANUP_TURN - 1;
    let by_size = |state: &mut ChoiceState| choose_by_size(input, state);
    let by_cleanup = |state: &mut ChoiceState| {
        let found =
            state.tombstones.choose(input, |first| choose_level0(input, CompactionReason::Tombstones, first));
        found.or_else(|| {
            state.garbage.choose(input, |first| choose_level0(input, CompactionReason::Garbage, first))
        })
    };
    let found = match cleans_first {
        true => by_cleanup(state).or_else(|| by_size(state)),
        false => by_size(state).or_else(|| by_cleanup(state)),
    };
    match found {
        Some(compaction) => {
            state.choices += 1;
            CompactionChoice::Compact(compaction.complete(input))
        }
        None if state.tombstones.is_searching() || state.garbage.is_searching() => {
            CompactionChoice::LookAgain
        }
        None => CompactionChoice::Nothing,
    }
}

/// A compaction of the level that is furthest above its target and that has tables which none that runs needs.
fn choose_by_size(input: &CompactionInput<'_>, state: &mut ChoiceState) -> Option<TreeCompaction> {
    let (version, settings) = (input.version, input.settings);
    // In thousandths of the target, and the bytes above it.
    let mut levels: Vec<(u128, usize, u64)> = Vec::new();
    let level0_runs = version.level0_runs();
    if level0_runs >= settings.level0_trigger.max(1) || (settings.wants_space && level0_runs > 0) {
        levels.push((level0_runs as u128 * 1000 / settings.level0_trigger.max(1) as u128, 0, 0));
    }
    let last_level = (1..LEVELS).rev().find(|&level| version.level_tables(level) > 0).unwrap_or(0);
    for level in 1..LEVELS - 1 {
        let leaving = input.running.iter().filter(|it| it.input_level == level && it.output_level != level);
        let leaving_bytes: u64 = leaving.flat_map(|it| &it.inputs).map(|table| table.bytes()).sum();
        let bytes = version.level_bytes(level).saturating_sub(leaving_bytes);
        let target = match settings.wants_space && level < last_level {
            true => 0,
            false => level_target(level, settings),
        };
        if bytes > target {
            levels.push((u128::from(bytes) * 1000 / u128::from(target.max(1)), level, bytes - target));
        }
    }
    levels.sort_unstable_by(|one, other| other.cmp(one));
    let wants_level0 = levels.iter().any(|(_, level, _)| *level == 0);
    let chosen = levels.into_iter().find_map(|(_, level, excess_bytes)| match level {
        0 => choose_level0(input, CompactionReason::Level0, 0),
        _ => choose_level(input, level, excess_bytes, &mut state.behind[level]),
    });
    // Level 1 is too large for level 0 to be merged with it in the space that there is: the tables of level 1 sink first.
    chosen.or_else(|| {
        let is_useful = input.postponed.is_empty() || settings.wants_space;
        let sinks = wants_level0 && is_useful && version.level_tables(1) > 0;
        sinks.then(|| choose_level(input, 1, u64::MAX, &mut state.behind[1])).flatten()
    })
}

/// A compaction of the oldest tables of level 0: if it can, of all from the oldest to the one at `through`, counted from the newest.
fn choose_level0(
    input: &CompactionInput<'_>,
    reason: CompactionReason,
    through: usize,
) -> Option<TreeCompaction> {
    let level0 = input.version.level0();
    let is_running = level0.iter().any(|table| input.running.iter().any(|running| running.has(table)));
    if is_running || level0.is_empty() {
        return None;
    }
    let oldest = |from: usize| TreeCompaction::new(input, reason, (0, 1), level0[from..].to_vec());
    let mut from = level0.len() - 1;
    let mut chosen = oldest(from);
    while from > through {
        let longer = oldest(from - 1);
        // What only has to be moved is not written because of what came later.
        if longer.input_bytes() > input.settings.input_bytes_max
            || (chosen.is_move && !longer.is_move)
            || !input.can_read(&longer)
        {
            break;
        }
        (from, chosen) = (from - 1, longer);
    }
    let is_possible = |chosen: &TreeCompaction| input.admits(chosen) && chosen.has_space(input.settings);
    let chosen = Some(chosen).filter(is_possible);
    let goes_around = chosen.is_none() && reason == CompactionReason::Level0 && !input.postponed.is_empty();
    if goes_around { choose_around(input).filter(is_possible) } else { chosen }
}

/// A compaction of the newest tables of level 0 around those that cannot be read, there or in level 1, if it makes one of several runs. What it leaves in level 0 is
/// written again only once there is a quarter as much new, so that the work for each write is bounded however long the device fails.
fn choose_around(input: &CompactionInput<'_>) -> Option<TreeCompaction> {
    let level0 = input.version.level0();
    let is_postponed = |table: &Arc<TableMeta>| input.postponed.contains(&table.id());
    let (newest, older) = level0.split_at(level0.iter().position(is_postponed).unwrap_or(level0.len()));
    let run_bytes = bytes_of_runs(newest);
    let least = if input.settings.wants_space { 2 } else { input.settings.level0_trigger.max(2) };
    let (all_bytes, longest) = (run_bytes.iter().sum::<u64>(), run_bytes.iter().max().copied().unwrap_or(0));
    let is_much = (all_bytes - longest) * 4 >= longest || run_bytes.len() >= RUNS_MAX;
    if run_bytes.len() < least || !(is_much || input.settings.wants_space) {
        return None;
    }
    let chosen = TreeCompaction::around(input, newest.to_vec(), older);
    (!chosen.kept_keys.is_empty()).then_some(chosen)
}

/// The bytes of the runs of tables: each has tables that follow each other and share no keys.
fn bytes_of_runs(tables: &[Arc<TableMeta>]) -> Vec<u64> {
    let mut runs: Vec<u64> = Vec::new();
    let mut run: Vec<&Arc<TableMeta>> = Vec::new();
    for table in tables {
        if run.is_empty() || run.iter().any(|other| other.overlaps(table.first_key(), table.last_key())) {
            run.clear();
            runs.push(0);
        }
        run.push(table);
        *runs.last_mut().expect("pushed above") += table.bytes();
    }
    runs
}

/// A compaction of the table of a level that overlaps least, of those that follow the last one.
fn choose_level(
    input: &CompactionInput<'_>,
    level: usize,
    excess_bytes: u64,
    behind: &mut Vec<u8>,
) -> Option<TreeCompaction> {
    let tables = input.version.level(level);
    let start = tables.rank(behind, true);
    let mut best: Option<(u128, usize)> = None;
    // The one that would need the least space, of those for which there is none.
    let mut blocked: Option<(u64, usize)> = None;
    let mut candidates = 0;
    for step in 0..tables.len() {
        let rank = (start + step) % tables.len();
        let Some(table) = tables.nth(rank) else { continue };
        let compaction =
            TreeCompaction::new(input, CompactionReason::LevelBytes, (level, level + 1), vec![table.clone()]);
        if !input.can_read(&compaction) {
            continue;
        }
        candidates += 1;
        if candidates > CANDIDATES {
            break;
        }
        let overlapped_bytes: u64 = compaction.overlapped.iter().map(|table| table.bytes()).sum();
        let cost = u128::from(overlapped_bytes) * 1000 / u128::from(table.bytes());
        let (has_space, needed) =
            (compaction.has_space(input.settings), compaction.space_bytes(input.settings));
        if !has_space
            && table.first_key() < table.last_key()
            && blocked.is_none_or(|(least, _)| needed < least)
        {
            blocked = Some((needed, rank));
        }
        if best.is_none_or(|(least, _)| cost < least) && has_space && if_admitted(input, compaction).is_some()
        {
            best = Some((cost, rank));
        }
    }
    if let (None, Some((needed, rank))) = (best, blocked)
        && let Some(table) = tables.nth(rank)
    {
        return split(input, level, table, needed);
    }
    let Some((_, rank)) = best else {
        // All of them are being compacted: the next choice looks behind them.
        *behind = tables.nth((start + CANDIDATES) % tables.len())?.last_key().to_vec();
        return None;
    };
    let chosen = widened(input, level, rank, excess_bytes);
    *behind = hull(&chosen.inputs).1.to_vec();
    Some(chosen)
}

/// A compaction that splits a table for which, with what it overlaps, so many bytes would be needed, so that its parts fit.
fn split(
    input: &CompactionInput<'_>,
    level: usize,
    table: &Arc<TableMeta>,
    needed_bytes: u64,
) -> Option<TreeCompaction> {
    let fitting = u128::from(table.bytes()) * u128::from(input.settings.output_bytes_max / 2);
    let table_bytes = (fitting / u128::from(needed_bytes.max(1))) as u64;
    let least = run_bytes_least(table.first_key().len().max(table.last_key().len()));
    let table_bytes = table_bytes.clamp(least, (table.bytes() / 2).max(least));
    let chosen = TreeCompaction::split(input, level, Arc::clone(table), table_bytes);
    // One of the least length is what it is.
    let is_smaller = table.bytes() > table_bytes;
    if_admitted(input, chosen).filter(|chosen| is_smaller && chosen.has_space(input.settings))
}

/// A compaction of the table of a rank and of those beside it that lead to no more of the next level, up to the bound.
fn widened(input: &CompactionInput<'_>, level: usize, rank: usize, excess_bytes: u64) -> TreeCompaction {
    let tables = input.version.level(level);
    let of_ranks = |start: usize, end: usize| {
        let inputs = tables.range(start..end).cloned().collect();
        TreeCompaction::new(input, CompactionReason::LevelBytes, (level, level + 1), inputs)
    };
    let (mut start, mut end) = (rank, rank + 1);
    let mut chosen = of_ranks(start, end);
    for is_right in [true, false] {
        loop {
            let (wider_start, wider_end) = match is_right {
                true => (start, end + 1),
                false => (start.wrapping_sub(1), end),
            };
            let input_bytes: u64 = chosen.inputs.iter().map(|table| table.bytes()).sum();
            if wider_end > tables.len() || wider_start >= tables.len() || input_bytes >= excess_bytes {
                break;
            }
            let wider = of_ranks(wider_start, wider_end);
            if wider.overlapped.len() != chosen.overlapped.len()
                || wider.input_bytes() > input.settings.input_bytes_max
                || !wider.has_space(input.settings)
                || wider.is_move != chosen.is_move
                || !input.admits(&wider)
            {
                break;
            }
            (start, end, chosen) = (wider_start, wider_end, wider);
        }
    }
    chosen
}

fn if_admitted(input: &CompactionInput<'_>, compaction: TreeCompaction) -> Option<TreeCompaction> {
    input.admits(&compaction).then_some(compaction)
}

/// Whether compactions that run at the same time share no table and write into no common range, and moves are only moves.
pub fn are_compatible(compactions: &[Arc<TreeCompaction>]) -> bool {
    let pairs = compactions.iter().enumerate();
    let is_move_of_disjoint = |it: &Arc<TreeCompaction>| !it.is_move || are_disjoint(&it.inputs);
    let mut by_id: Vec<u64> =
        compactions.iter().flat_map(|it| it.tables()).map(|table: &Arc<TableMeta>| table.id()).collect();
    by_id.sort_unstable();
    by_id.windows(2).all(|pair| pair[0] != pair[1])
        && compactions.iter().all(is_move_of_disjoint)
        && pairs.into_iter().all(|(index, one)| {
            compactions[index + 1..].iter().all(|other| {
                one.output_level != other.output_level
                    || one.last_key < other.first_key
                    || other.last_key < one.first_key
            })
        })
}
