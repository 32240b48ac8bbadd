//! One compaction: what it reads, where its output goes, and what of it excludes another at the same time.
//!
//! Invariants, which [`super::compaction_choice`] keeps: its tables of one level follow each other there, and of level 0 it has the oldest, so that newer
//! entries of a key stay above older ones (or all of the newest, and leaves in level 0 the keys that older ones may have: [`TreeCompaction::around`]); it has all tables of its output level that share keys with what it reads; its output lies between its first and last
//! key. Two compactions without a [`TreeCompaction::conflicts_with`] may run at the same time and end in any order.
//! Tested in `version_model_tests.rs`.

use super::kept_keys::KeptKeys;
use super::table_meta::{TableFields, TableMeta};
use super::tree_version::TreeVersion;
use super::version_edit::{TableMove, TableRemoval, VersionEdit};
use super::version_set::{SegmentUsage, is_flushed};
use octokv_base::Version;
use octokv_base::map::{FxHashMap, FxHashSet};
use std::sync::Arc;

/// What decides how a tree is compacted.
#[derive(Clone, Debug)]
pub struct CompactionSettings {
    /// Level 0 is compacted from this many runs on ([`TreeVersion::level0_runs`]).
    pub level0_trigger: usize,
    /// The bytes that level 1 may have.
    pub level1_bytes: u64,
    /// How many times as many bytes as the one above each further level may have, at least 2.
    pub multiplier: u64,
    /// A compaction of more than the fewest possible tables reads at most these bytes of tables.
    pub input_bytes_max: u64,
    /// A compaction that moves values of more than one segment moves at most these bytes.
    pub moved_bytes_max: u64,
    /// The most compactions at the same time.
    pub parallel_max: usize,
    /// A table with so many tombstones in a thousand entries is compacted soon.
    pub tombstone_permille: u16,
    /// A segment is collected if at most so many of a thousand of its bytes live.
    pub segment_live_permille: u16,
    /// Tables are compacted only to collect segments if so many of a thousand bytes in all segments are dead.
    pub garbage_permille: u16,
    /// A compaction that could write more than these bytes, of tables and of values, is not chosen: there is no space for it.
    pub output_bytes_max: u64,
    /// The bytes of a unit: a record in a segment takes whole ones.
    pub unit_bytes: u64,
    /// Whether every replaced entry is worth a compaction, since space is wanted: all levels above the last one that has tables are then to be empty.
    pub wants_space: bool,
    /// The values that puts wrote into segments up to this number are moved, so that they lie in the order of keys. 0: those of no segment.
    pub ordered_segments: u32,
}

impl Default for CompactionSettings {
    fn default() -> CompactionSettings {
        CompactionSettings {
            level0_trigger: 4,
            level1_bytes: 256 << 20,
            multiplier: 10,
            input_bytes_max: 256 << 20,
            moved_bytes_max: 256 << 20,
            parallel_max: 2,
            tombstone_permille: 500,
            segment_live_permille: 500,
            garbage_permille: 250,
            output_bytes_max: u64::MAX,
            unit_bytes: 512,
            wants_space: false,
            ordered_segments: 0,
        }
    }
}

/// Why a compaction runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionReason {
    /// Level 0 has too many runs.
    Level0,
    /// A level has too many bytes.
    LevelBytes,
    /// A table has too many tombstones.
    Tombstones,
    /// Too many bytes in value segments are dead.
    Garbage,
    /// There is no space for a compaction of a table with all that it overlaps: it is written again as several.
    Split,
    /// Values are to lie in the order of keys.
    ValueOrder,
}

/// What a choice knows of a tree.
#[derive(Clone, Copy)]
pub struct CompactionInput<'a> {
    /// The current version.
    pub version: &'a TreeVersion,
    /// The bytes that live in its segments.
    pub usage: &'a SegmentUsage,
    /// The compactions that have not ended.
    pub running: &'a [Arc<TreeCompaction>],
    /// No snapshot is older than this sequence number: the oldest one's, or that of the last change without one.
    pub oldest_snapshot: u64,
    /// No write of a version below this one will come.
    pub forget_below: Version,
    /// The settings.
    pub settings: &'a CompactionSettings,
    /// Segments of which a value could not be read: they are not collected.
    pub unmovable: &'a FxHashSet<u32>,
    /// Tables that the device failed to read a short time ago: no compaction reads them.
    pub postponed: &'a FxHashSet<u64>,
}

impl CompactionInput<'_> {
    /// Whether a compaction reads no table that is postponed. One that moves tables reads none.
    pub fn can_read(&self, compaction: &TreeCompaction) -> bool {
        compaction.is_move || !compaction.tables().any(|table| self.postponed.contains(&table.id()))
    }

    /// Whether a compaction may run: beside those that do, and with tables that can be read.
    pub fn admits(&self, compaction: &TreeCompaction) -> bool {
        self.can_read(compaction) && !self.running.iter().any(|running| running.conflicts_with(compaction))
    }

    /// Whether a compaction that runs has a table, or none can read it now.
    pub fn is_busy(&self, table: &TableMeta) -> bool {
        self.postponed.contains(&table.id()) || self.running.iter().any(|running| running.has(table))
    }
}

/// A compaction.
#[derive(Clone, Debug)]
pub struct TreeCompaction {
    /// Why it runs.
    pub reason: CompactionReason,
    /// The level of its inputs.
    pub input_level: usize,
    /// The level of its output: the next one, or the same if tables are written again.
    pub output_level: usize,
    /// The tables of the input level; of level 0 newest first, otherwise by key.
    pub inputs: Vec<Arc<TableMeta>>,
    /// The tables of the output level that share keys with them, by key; none if the levels are the same.
    pub overlapped: Vec<Arc<TableMeta>>,
    /// The segments of whose values those that live are written to a new one, in ascending order.
    pub moved_segments: Vec<u32>,
    /// Once it has moved so many bytes of values, in the order of keys, the others stay where they are.
    pub moved_bytes_max: u64,
    /// The lowest key of its tables.
    pub first_key: Vec<u8>,
    /// The highest key of its tables.
    pub last_key: Vec<u8>,
    /// Whether no level below the output has a table in the key range of the compaction: its tombstones may then be dropped.
    pub is_bottommost: bool,
    /// Whether the inputs may go to the output level as they are.
    pub is_move: bool,
    /// The bytes of data of its tables, if not those that the settings of the tree say.
    pub table_bytes: Option<u64>,
    /// Keys whose entries stay in the input level, which is level 0: see [`TreeCompaction::around`].
    pub kept_keys: KeptKeys,
}

impl TreeCompaction {
    /// A compaction of tables of a level. Takes along what they overlap in the output level. Looks at no values: [`TreeCompaction::complete`]. REQUIRES: `inputs`
    /// has a table.
    pub fn new(
        input: &CompactionInput<'_>,
        reason: CompactionReason,
        (input_level, output_level): (usize, usize),
        inputs: Vec<Arc<TableMeta>>,
    ) -> TreeCompaction {
        let version = input.version;
        let (first, last) = hull(&inputs);
        let overlapped: Vec<Arc<TableMeta>> = if input_level == output_level {
            Vec::new()
        } else {
            let tables = version.level(output_level);
            tables.range(version.overlapping(output_level, first, last)).cloned().collect()
        };
        let (first_key, last_key) = match hull_or_none(&overlapped) {
            Some((lower, higher)) => (first.min(lower).to_vec(), last.max(higher).to_vec()),
            None => (first.to_vec(), last.to_vec()),
        };
        let is_bottommost = version.is_bottommost(output_level, &first_key, &last_key);
        let drops_tombstones = is_bottommost
            && inputs.iter().any(|table| {
                table.tombstone_permille() >= input.settings.tombstone_permille
                    && table.may_drop_tombstones(input.oldest_snapshot, input.forget_below)
            });
        let is_move = input_level != output_level
            && overlapped.is_empty()
            && !drops_tombstones
            && are_disjoint(&inputs);
        TreeCompaction {
            reason,
            input_level,
            output_level,
            inputs,
            overlapped,
            moved_segments: Vec::new(),
            moved_bytes_max: u64::MAX,
            first_key,
            last_key,
            is_bottommost,
            is_move,
            table_bytes: None,
            kept_keys: KeptKeys::default(),
        }
    }

    /// A compaction of the newest tables of level 0 around tables that cannot be read, of level 1 or `older` ones of level 0. Older entries of the keys in these
    /// ranges stay where they are, so the newer ones stay in level 0; all others go to level 1. REQUIRES: `newest` are all that are newer than `older`, and can be read.
    pub fn around(
        input: &CompactionInput<'_>,
        newest: Vec<Arc<TableMeta>>,
        older: &[Arc<TableMeta>],
    ) -> TreeCompaction {
        let whole = TreeCompaction::new(input, CompactionReason::Level0, (0, 1), newest);
        let below_older = KeptKeys::of_ranges(older.iter().map(range_of));
        // What lies below an older table of level 0 must not come above it.
        let stays = |table: &Arc<TableMeta>| {
            input.postponed.contains(&table.id()) || below_older.overlaps(table.first_key(), table.last_key())
        };
        let (staying, overlapped): (Vec<_>, Vec<_>) = whole.overlapped.iter().cloned().partition(stays);
        let kept_keys = KeptKeys::of_ranges(older.iter().chain(&staying).map(range_of));
        TreeCompaction { overlapped, kept_keys, is_bottommost: false, is_move: false, ..whole }
    }

    /// A compaction that writes a table again as several of so many bytes.
    pub fn split(
        input: &CompactionInput<'_>,
        level: usize,
        table: Arc<TableMeta>,
        table_bytes: u64,
    ) -> TreeCompaction {
        let split = TreeCompaction::new(input, CompactionReason::Split, (level, level), vec![table]);
        TreeCompaction { table_bytes: Some(table_bytes), ..split }
    }

    /// Whether there is space for the tables that it writes.
    pub fn has_space(&self, settings: &CompactionSettings) -> bool {
        self.is_move || self.space_bytes(settings) <= settings.output_bytes_max
    }

    /// This compaction with the values that it moves.
    pub fn complete(mut self, input: &CompactionInput<'_>) -> TreeCompaction {
        if self.tables().any(|table| input.postponed.contains(&table.id())) {
            // It only moves them: nothing of them can be read.
            return self;
        }
        let values_bytes_max =
            input.settings.output_bytes_max.saturating_sub(self.space_bytes(input.settings));
        self.moved_segments = moved_segments(input, self.tables(), values_bytes_max);
        if input.settings.ordered_segments > 0 {
            self.moved_bytes_max = input.settings.input_bytes_max;
        }
        self.is_move &= self.moved_segments.is_empty();
        self
    }

    /// All tables that it reads.
    pub fn tables(&self) -> impl Iterator<Item = &Arc<TableMeta>> {
        self.inputs.iter().chain(&self.overlapped)
    }

    /// The bytes of the tables that it reads.
    pub fn input_bytes(&self) -> u64 {
        self.tables().map(|table| table.bytes()).sum()
    }

    /// The bytes of the space of the tables that it reads, with all that they consist of: those that it writes need at most about as much.
    pub fn space_bytes(&self, settings: &CompactionSettings) -> u64 {
        self.tables().map(|table| table.extent().units.saturating_mul(settings.unit_bytes)).sum()
    }

    /// Whether it may not run while the other does: they share a table, or could write into one range.
    pub fn conflicts_with(&self, other: &TreeCompaction) -> bool {
        let shares_range = self.first_key <= other.last_key && other.first_key <= self.last_key;
        // Tables that both read lie in both ranges.
        shares_range
            && (self.output_level == other.output_level || self.tables().any(|table| other.has(table)))
    }

    /// Whether it reads a table.
    pub fn has(&self, table: &TableMeta) -> bool {
        self.tables().any(|own| own.id() == table.id())
    }

    /// Whether an output table with these fields drops no tombstone if it is written again ([`TableFields::is_settled`]).
    pub fn is_settled(&self, fields: &TableFields, oldest_snapshot: u64, forget_below: Version) -> bool {
        let version = fields.largest_tombstone_version;
        self.is_bottommost
            && fields.largest_sequence <= oldest_snapshot
            && (version == Version::NONE || version < forget_below)
    }

    /// The level of an output table. All of its keys are of one section of the keys that are kept.
    fn level_of(&self, output: &TableMeta) -> usize {
        if self.kept_keys.has(output.first_key()) { self.input_level } else { self.output_level }
    }

    /// The edit at its end. A move has no outputs.
    pub fn edit(&self, outputs: Vec<Arc<TableMeta>>) -> VersionEdit {
        let removal = |level| {
            move |table: &Arc<TableMeta>| TableRemoval {
                level,
                id: table.id(),
                first_key: table.first_key().to_vec(),
            }
        };
        let inputs = self.inputs.iter().map(removal(self.input_level));
        if self.is_move {
            assert!(outputs.is_empty(), "a move writes nothing");
            let to_level = self.output_level;
            let moved_tables = inputs.map(|from| TableMove { from, to_level }).collect();
            return VersionEdit { moved_tables, ..VersionEdit::default() };
        }
        VersionEdit {
            removed_tables: inputs.chain(self.overlapped.iter().map(removal(self.output_level))).collect(),
            added_tables: outputs.into_iter().map(|table| (self.level_of(&table), table)).collect(),
            ..VersionEdit::default()
        }
    }
}

fn range_of(table: &Arc<TableMeta>) -> (&[u8], &[u8]) {
    (table.first_key(), table.last_key())
}

/// The lowest and the highest key of tables.
fn hull_or_none(tables: &[Arc<TableMeta>]) -> Option<(&[u8], &[u8])> {
    let first = tables.iter().map(|table| table.first_key()).min()?;
    let last = tables.iter().map(|table| table.last_key()).max()?;
    Some((first, last))
}

/// The lowest and the highest key of tables. REQUIRES: there is one.
pub fn hull(tables: &[Arc<TableMeta>]) -> (&[u8], &[u8]) {
    hull_or_none(tables).expect("a compaction has an input")
}

/// Whether no two tables share keys.
pub fn are_disjoint(tables: &[Arc<TableMeta>]) -> bool {
    let mut by_key: Vec<&Arc<TableMeta>> = tables.iter().collect();
    by_key.sort_by_key(|table| table.first_key());
    by_key.windows(2).all(|pair| pair[0].last_key() < pair[1].first_key())
}

/// Of a sealed segment whose changes are in tables: its bytes, and those that live.
pub fn collectable(input: &CompactionInput<'_>, segment: u32) -> Option<(u64, u64)> {
    let state = input.version.segments().get(&segment)?;
    let seal = state.seal.filter(|_| is_flushed(input.version, state))?;
    Some((seal.record_bytes, input.usage.live_bytes(segment)))
}

/// Of all sealed segments whose changes are in tables: their bytes, and those that are dead.
pub fn garbage(version: &TreeVersion, usage: &SegmentUsage) -> (u64, u64) {
    let flushed = version.segments().iter().filter(|segment| is_flushed(version, segment));
    flushed.fold((0, 0), |(all_bytes, dead_bytes), segment| {
        let bytes = segment.seal.map_or(0, |seal| seal.record_bytes);
        (all_bytes + bytes, dead_bytes + bytes.saturating_sub(usage.live_bytes(segment.meta.id())))
    })
}

/// The bytes that so many bytes of values of a segment take in records, if they are like its others.
pub fn stored_bytes(input: &CompactionInput<'_>, segment: u32, bytes: u64) -> u64 {
    let state = input.version.segments().get(&segment);
    let seal = state.and_then(|state| state.seal).filter(|seal| seal.record_bytes > 0);
    let stored = seal.map(|seal| {
        u128::from(bytes) * u128::from(seal.units * input.settings.unit_bytes) / u128::from(seal.record_bytes)
    });
    stored.map_or(bytes, |stored| (stored.min(u128::from(u64::MAX)) as u64).max(bytes))
}

/// Whether its values are to be ordered: they lie in the order in which they were put, of which the keys' order says nothing. Compactions move none at the time of a change.
pub fn is_to_be_ordered(input: &CompactionInput<'_>, segment: u32) -> bool {
    let state = input.version.segments().get(&segment);
    let is_in_order_of_puts = state.and_then(|state| state.seal).is_some_and(|seal| seal.last_sequence > 0);
    segment <= input.settings.ordered_segments && is_in_order_of_puts
}

/// The segments that are mostly dead, or whose values are to be ordered, with the bytes that live.
pub fn victims(input: &CompactionInput<'_>) -> FxHashMap<u32, u64> {
    let permille = u128::from(input.settings.segment_live_permille);
    let ids = input.version.segments().iter().map(|segment| segment.meta.id());
    let victim = |id| {
        if input.unmovable.contains(&id) {
            return None;
        }
        let (record_bytes, live_bytes) = collectable(input, id)?;
        let is_victim = u128::from(live_bytes) * 1000 <= u128::from(record_bytes) * permille
            || is_to_be_ordered(input, id);
        (is_victim && live_bytes > 0).then_some((id, live_bytes))
    };
    ids.filter_map(victim).collect()
}

/// The segments of [`victims`] to which these tables refer, those with the fewest live bytes first, as far as a compaction may move their values. At
/// least one, if there is one and space for its values. Of values that are to be ordered, all: the run itself ends after as many as it may move.
fn moved_segments<'a>(
    input: &CompactionInput<'_>,
    tables: impl Iterator<Item = &'a Arc<TableMeta>>,
    values_bytes_max: u64,
) -> Vec<u32> {
    let victims = victims(input);
    let mut bytes_of: FxHashMap<u32, u64> = FxHashMap::default();
    for (segment, bytes) in tables.flat_map(|table| table.segment_bytes()) {
        if victims.contains_key(&segment) {
            let sum = bytes_of.entry(segment).or_default();
            *sum = sum.saturating_add(stored_bytes(input, segment, bytes));
        }
    }
    let mut by_live_bytes: Vec<(u64, u32, u64)> =
        bytes_of.into_iter().map(|(segment, bytes)| (victims[&segment], segment, bytes)).collect();
    by_live_bytes.sort_unstable();
    let mut moved_bytes = 0u64;
    let is_within = |&(_, _, bytes): &(u64, u32, u64)| {
        let is_first = moved_bytes == 0;
        moved_bytes = moved_bytes.saturating_add(bytes);
        let is_few = is_first || moved_bytes <= input.settings.moved_bytes_max;
        moved_bytes <= values_bytes_max && (is_few || input.settings.ordered_segments > 0)
    };
    let mut moved: Vec<u32> = by_live_bytes.into_iter().take_while(is_within).map(|it| it.1).collect();
    moved.sort_unstable();
    moved
}
