//! Versions of the tree: which tables, segments and lost ranges there are between two edits. Never changed.
//!
//! ```text
//!   TreeVersion ─▶ level 0: list, newest first          │ may overlap
//!               ─▶ levels 1–6: SharedTree of tables     │ by key, disjoint; a version shares nodes with the ones before and after it
//!               ─▶ segments: SharedTree, lost ranges
//! ```
//! In: an edit. Out: the next version, or what is wrong with the edit: edits come from journals and images, too.
//!
//! Invariants: levels 1 and below are ordered by key and disjoint; a table is in one level; every entry of a key in a level is newer than all in the
//! levels below it, and in level 0 a table is newer than those behind it where they overlap. The last is the caller's: a compaction takes whatever overlaps
//! (`compaction_choice.rs`).
//! Tested in `tree_version_tests.rs` and `version_model_tests.rs`.

use super::lost_ranges::LostRanges;
use super::shared_tree::{SharedTree, TreeChange};
use super::table_meta::{SegmentMeta, SegmentState, TableMeta};
use super::version_edit::{LEVELS, TableRemoval, VersionEdit};
use crate::common::allocator::Extent;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What is wrong with an edit, or with a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionProblem {
    /// The edit removes or moves a table that is not there.
    TableMissing {
        /// The level where it should be.
        level: usize,
        /// Its number.
        id: u64,
    },
    /// A new table has the number of another one.
    TableTwice {
        /// The number.
        id: u64,
    },
    /// Two tables of a level other than 0 share keys.
    TablesOverlap {
        /// The level.
        level: usize,
        /// The table with the lower first key.
        before: u64,
        /// The other one.
        after: u64,
    },
    /// A table refers to a segment that is not there.
    SegmentOfTableMissing {
        /// The table.
        table: u64,
        /// The segment.
        segment: u32,
    },
    /// The edit seals or removes a segment that is not there.
    SegmentMissing {
        /// The segment.
        segment: u32,
    },
    /// A new segment has the number of another one, or a segment is sealed twice.
    SegmentTwice {
        /// The number.
        segment: u32,
    },
    /// A segment is sealed with no units, or more than it has.
    SealOutside {
        /// The number of the segment.
        segment: u32,
    },
    /// The edit removes a segment to which tables refer, or changes that are not in tables.
    SegmentInUse {
        /// The segment.
        segment: u32,
    },
    /// Two tables or segments share space.
    ExtentsOverlap {
        /// The first unit of one.
        location: u64,
        /// The first unit of the other.
        other_location: u64,
    },
    /// A table or segment lies outside of the space for them.
    ExtentOutside {
        /// Its first unit.
        location: u64,
    },
    /// What is flushed would become less.
    FlushedBackwards {
        /// The sequence number of the edit.
        through: u64,
    },
}

impl fmt::Display for VersionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VersionProblem::TableMissing { level, id } => write!(f, "table {id} is not in level {level}"),
            VersionProblem::TableTwice { id } => write!(f, "a second table has the number {id}"),
            VersionProblem::TablesOverlap { level, before, after } => {
                write!(f, "tables {before} and {after} of level {level} share keys")
            }
            VersionProblem::SegmentOfTableMissing { table, segment } => {
                write!(f, "table {table} refers to segment {segment}, which is not there")
            }
            VersionProblem::SegmentMissing { segment } => write!(f, "segment {segment} is not there"),
            VersionProblem::SegmentTwice { segment } => {
                write!(f, "segment {segment} is there or sealed already")
            }
            VersionProblem::SealOutside { segment } => {
                write!(f, "segment {segment} is sealed with units that it does not have")
            }
            VersionProblem::SegmentInUse { segment } => write!(f, "segment {segment} is in use"),
            VersionProblem::ExtentsOverlap { location, other_location } => {
                write!(f, "the extents at units {location} and {other_location} overlap")
            }
            VersionProblem::ExtentOutside { location } => {
                write!(f, "the extent at unit {location} is outside of the space for tables and segments")
            }
            VersionProblem::FlushedBackwards { through } => {
                write!(f, "changes beyond {through} were flushed already")
            }
        }
    }
}

/// The tables and segments of one moment.
#[derive(Clone, Default)]
pub struct TreeVersion {
    /// Newest first.
    level0: Arc<[Arc<TableMeta>]>,
    level0_bytes: u64,
    level0_runs: usize,
    /// Level 1 and below.
    levels: [SharedTree<TableMeta>; LEVELS - 1],
    segments: SharedTree<SegmentState>,
    lost: LostRanges,
    flushed_through: u64,
    last_table_id: u64,
    last_segment_id: u32,
}

/// The changes of a level by first key: the table that comes, and the number of the one that goes.
type LevelChanges = BTreeMap<Vec<u8>, (Option<Arc<TableMeta>>, Option<u64>)>;

impl TreeVersion {
    /// The tables of level 0, newest first.
    pub fn level0(&self) -> &[Arc<TableMeta>] {
        &self.level0
    }

    /// The sorted runs of level 0: the tables of one flush share no keys and count as one, since a lookup reads at most one of them.
    pub fn level0_runs(&self) -> usize {
        self.level0_runs
    }

    /// The tables of a level, by key. REQUIRES: `1 <= level < LEVELS`.
    pub fn level(&self, level: usize) -> &SharedTree<TableMeta> {
        assert!((1..LEVELS).contains(&level), "level {level}");
        &self.levels[level - 1]
    }
    /// The number of tables of any level.
    pub fn level_tables(&self, level: usize) -> usize {
        if level == 0 { self.level0.len() } else { self.level(level).len() }
    }
    /// The bytes of the tables of any level.
    pub fn level_bytes(&self, level: usize) -> u64 {
        if level == 0 { self.level0_bytes } else { self.level(level).summary().bytes }
    }
    /// All tables with their levels.
    pub fn tables(&self) -> impl Iterator<Item = (usize, &Arc<TableMeta>)> {
        let level0 = self.level0.iter().map(|table| (0, table));
        let below = |level| self.level(level).iter().map(move |table| (level, table));
        level0.chain((1..LEVELS).flat_map(below))
    }

    /// The only table of a level that may have entries of a key. REQUIRES: `1 <= level < LEVELS`.
    pub fn table_of(&self, level: usize, key: &[u8]) -> Option<&Arc<TableMeta>> {
        self.level(level).floor(key).filter(|table| key <= table.last_key())
    }

    /// The ranks of the tables of a level that share keys with those from `first` to `last`, both included. REQUIRES: `1 <= level < LEVELS`.
    pub fn overlapping(&self, level: usize, first: &[u8], last: &[u8]) -> Range<usize> {
        let tables = self.level(level);
        let begun = tables.rank(first, true);
        let reaches = |rank: &usize| tables.nth(*rank).is_some_and(|table| first <= table.last_key());
        let start = begun.checked_sub(1).filter(reaches).unwrap_or(begun);
        start..tables.rank(last, true).max(start)
    }

    /// Whether no level below `level` has a table with keys from `first` to `last`.
    pub fn is_bottommost(&self, level: usize, first: &[u8], last: &[u8]) -> bool {
        (level + 1..LEVELS).all(|below| self.overlapping(below, first, last).is_empty())
    }
    /// The segments.
    pub fn segments(&self) -> &SharedTree<SegmentState> {
        &self.segments
    }
    /// The segment of a value address.
    pub fn segment(&self, id: u32) -> Option<&Arc<SegmentMeta>> {
        self.segments.get(&id).map(|segment| &segment.meta)
    }
    /// The keys of which entries were lost.
    pub fn lost(&self) -> &LostRanges {
        &self.lost
    }
    /// Changes up to this sequence number are in tables: the journal is needed from the next on.
    pub fn flushed_through(&self) -> u64 {
        self.flushed_through
    }
    /// The highest number that a table has or had.
    pub fn last_table_id(&self) -> u64 {
        self.last_table_id
    }
    /// The highest number that a segment has or had.
    pub fn last_segment_id(&self) -> u32 {
        self.last_segment_id
    }

    /// The version after an edit. Costs time and memory by what changes, and by the logarithm of what there is.
    ///
    /// Extents, and the bytes that tables refer to in segments, are not looked at: see [`TreeVersion::check_extents`] and
    /// [`super::version_set::SegmentUsage`].
    ///
    /// # Errors
    /// What is wrong with the edit.
    pub fn edited(&self, edit: &VersionEdit) -> Result<TreeVersion, VersionProblem> {
        let mut next = self.clone();
        next.change_tables(self, edit)?;
        next.change_segments(edit)?;
        next.lost = self.lost.edited(&edit.added_lost, &edit.removed_lost);
        if let Some(through) = edit.flushed_through {
            if through < self.flushed_through {
                return Err(VersionProblem::FlushedBackwards { through });
            }
            next.flushed_through = through;
        }
        Ok(next)
    }

    /// A table of a level, by number and first key.
    ///
    /// # Errors
    /// It is not there.
    pub fn find(&self, removal: &TableRemoval) -> Result<&Arc<TableMeta>, VersionProblem> {
        let TableRemoval { level, id, ref first_key } = *removal;
        let found = match level {
            0 => self.level0.iter().find(|table| table.id() == id && table.first_key() == first_key),
            _ => self.level(level).get(first_key).filter(|table| table.id() == id),
        };
        found.ok_or(VersionProblem::TableMissing { level, id })
    }

    /// Whether a table with this number and first key is there.
    fn has_table(&self, table: &TableMeta) -> bool {
        let is_it = |other: &Arc<TableMeta>| other.id() == table.id();
        let is_below = |level| self.level(level).get(table.first_key()).is_some_and(is_it);
        self.level0.iter().any(is_it) || (1..LEVELS).any(is_below)
    }

    fn change_tables(&mut self, before: &TreeVersion, edit: &VersionEdit) -> Result<(), VersionProblem> {
        let mut changes: [LevelChanges; LEVELS] = Default::default();
        let mut come = Vec::with_capacity(edit.added_tables.len() + edit.moved_tables.len());
        let mut go = |removal: &TableRemoval| -> Result<Arc<TableMeta>, VersionProblem> {
            let table = before.find(removal)?;
            // Of level 0 the number is needed, too: first keys may be equal there.
            let key = match removal.level {
                0 => table.id().to_be_bytes().to_vec(),
                _ => removal.first_key.clone(),
            };
            let gone = changes[removal.level].entry(key).or_default().1.replace(table.id());
            match gone {
                None => Ok(table.clone()),
                Some(_) => Err(VersionProblem::TableMissing { level: removal.level, id: removal.id }),
            }
        };
        edit.removed_tables.iter().try_for_each(|removal| go(removal).map(|_| ()))?;
        for moved in &edit.moved_tables {
            come.push((moved.to_level, go(&moved.from)?));
        }
        let mut added: Vec<&(usize, Arc<TableMeta>)> = edit.added_tables.iter().collect();
        added.sort_by_key(|(_, table)| table.id());
        let mut last_added = None;
        for (level, table) in added {
            // Numbers are taken when tables begin, and edits come when they end: a lower one may come later.
            if Some(table.id()) == last_added.replace(table.id()) || before.has_table(table) {
                return Err(VersionProblem::TableTwice { id: table.id() });
            }
            self.last_table_id = self.last_table_id.max(table.id());
            come.push((*level, table.clone()));
        }
        let (level0_comes, below): (Vec<_>, Vec<_>) = come.into_iter().partition(|(level, _)| *level == 0);
        for (level, table) in below {
            let change = &mut changes[level].entry(table.first_key().to_vec()).or_default().0;
            if let Some(other) = change.replace(table.clone()) {
                return Err(VersionProblem::TablesOverlap { level, before: other.id(), after: table.id() });
            }
        }
        let [level0_changes, below @ ..] = changes;
        if !level0_comes.is_empty() || !level0_changes.is_empty() {
            let goes = |table: &&Arc<TableMeta>| level0_changes.contains_key(&table.id().to_be_bytes()[..]);
            let stays = before.level0.iter().filter(|table| !goes(table)).cloned();
            let mut level0: Vec<_> = stays.chain(level0_comes.into_iter().map(|(_, table)| table)).collect();
            level0.sort_by_key(|table| std::cmp::Reverse((table.largest_sequence(), table.id())));
            self.level0_bytes = level0.iter().map(|table| table.bytes()).fold(0, u64::saturating_add);
            self.level0_runs = count_runs(&level0);
            self.level0 = level0.into();
        }
        for (index, changes) in below.into_iter().enumerate().filter(|(_, changes)| !changes.is_empty()) {
            self.change_level(index + 1, changes)?;
        }
        Ok(())
    }

    fn change_level(&mut self, level: usize, changes: LevelChanges) -> Result<(), VersionProblem> {
        let tree = self.level(level);
        let mut come = Vec::new();
        let mut list = Vec::with_capacity(changes.len());
        for (key, (table, gone)) in changes {
            if let (Some(table), None) = (&table, gone)
                && let Some(other) = tree.get(&key)
            {
                let (before, after) = (other.id(), table.id());
                return Err(VersionProblem::TablesOverlap { level, before, after });
            }
            list.push(match table {
                Some(table) => {
                    come.push(table.clone());
                    TreeChange::Put(table)
                }
                None => TreeChange::Remove(key),
            });
        }
        let tree = tree.edited(&list);
        for table in come {
            let rank = tree.rank(table.first_key(), false);
            for (before, after) in [(rank.wrapping_sub(1), rank), (rank, rank + 1)] {
                if let (Some(before), Some(after)) = (tree.nth(before), tree.nth(after))
                    && before.last_key() >= after.first_key()
                {
                    let (before, after) = (before.id(), after.id());
                    return Err(VersionProblem::TablesOverlap { level, before, after });
                }
            }
        }
        self.levels[level - 1] = tree;
        Ok(())
    }

    fn change_segments(&mut self, edit: &VersionEdit) -> Result<(), VersionProblem> {
        let mut changes: BTreeMap<u32, Option<SegmentState>> = BTreeMap::new();
        let mut added: Vec<&Arc<SegmentMeta>> = edit.added_segments.iter().collect();
        added.sort_by_key(|segment| segment.id());
        for segment in added {
            let id = segment.id();
            let state = SegmentState { meta: segment.clone(), seal: None };
            if self.segments.get(&id).is_some() || changes.insert(id, Some(state)).is_some() {
                return Err(VersionProblem::SegmentTwice { segment: id });
            }
            self.last_segment_id = self.last_segment_id.max(id);
        }
        for &(id, seal) in &edit.sealed_segments {
            let state = match changes.get(&id) {
                Some(state) => state.clone(),
                None => self.segments.get(&id).map(|state| SegmentState::clone(state)),
            };
            let mut state = state.ok_or(VersionProblem::SegmentMissing { segment: id })?;
            if state.seal.replace(seal).is_some() {
                return Err(VersionProblem::SegmentTwice { segment: id });
            }
            if !(1..=state.meta.extent().units).contains(&seal.units) {
                return Err(VersionProblem::SealOutside { segment: id });
            }
            changes.insert(id, Some(state));
        }
        for &id in &edit.removed_segments {
            let is_there = match changes.get(&id) {
                Some(state) => state.is_some(),
                None => self.segments.get(&id).is_some(),
            };
            if !is_there {
                return Err(VersionProblem::SegmentMissing { segment: id });
            }
            changes.insert(id, None);
        }
        let change = |(id, state)| match state {
            Some(state) => TreeChange::Put(Arc::new(state)),
            None => TreeChange::Remove(id),
        };
        let list: Vec<TreeChange<SegmentState, u32>> = changes.into_iter().map(change).collect();
        self.segments = self.segments.edited(&list);
        Ok(())
    }

    /// The extents of all tables and segments, in no order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        let segments = self.segments.iter().map(|segment| segment.meta.extent());
        self.tables().map(|(_, table)| table.extent()).chain(segments)
    }

    /// Whether all tables and segments lie in these units, none on another. For what was read from a device: n log n in time.
    ///
    /// # Errors
    /// The first extent that does not.
    pub fn check_extents(&self, units: Range<u64>) -> Result<(), VersionProblem> {
        let mut extents: Vec<Extent> = self.extents().collect();
        extents.sort_unstable_by_key(|extent| extent.location);
        // Locations and lengths are limited (`is_extent`), so that sums do not overflow.
        let end = |extent: &Extent| extent.location + extent.units;
        let is_outside = |extent: &&Extent| extent.location < units.start || end(extent) > units.end;
        if let Some(extent) = extents.iter().find(is_outside) {
            return Err(VersionProblem::ExtentOutside { location: extent.location });
        }
        match extents.windows(2).find(|pair| end(&pair[0]) > pair[1].location) {
            Some(pair) => Err(VersionProblem::ExtentsOverlap {
                location: pair[0].location,
                other_location: pair[1].location,
            }),
            None => Ok(()),
        }
    }

    /// Restores the highest numbers that were given, as an image has them. The numbers of tables and segments are no higher.
    pub fn with_last_ids(mut self, last_table_id: u64, last_segment_id: u32) -> TreeVersion {
        self.last_table_id = self.last_table_id.max(last_table_id);
        self.last_segment_id = self.last_segment_id.max(last_segment_id);
        self
    }
}

/// Tables of level 0, newest first, as lists of tables that follow each other and share no keys, each in the order of keys: a scan needs one cursor for a list, and reads of one table at a time.
pub fn disjoint_lists(tables: &[Arc<TableMeta>]) -> Vec<Vec<Arc<TableMeta>>> {
    let mut lists: Vec<Vec<Arc<TableMeta>>> = Vec::new();
    for table in tables {
        let place = |list: &Vec<Arc<TableMeta>>| {
            let at = list.partition_point(|other| other.last_key() < table.first_key());
            list.get(at).is_none_or(|next| table.last_key() < next.first_key()).then_some(at)
        };
        match lists.last_mut().and_then(|list| Some((place(list)?, list))) {
            Some((at, list)) => list.insert(at, Arc::clone(table)),
            None => lists.push(vec![Arc::clone(table)]),
        }
    }
    lists
}

/// The runs of the tables of level 0, newest first: each has tables that follow each other, share no keys, and have entries from one time, which those of two flushes do not.
fn count_runs(tables: &[Arc<TableMeta>]) -> usize {
    let (mut runs, mut oldest_sequence) = (0, u64::MAX);
    // By first key, the last keys of a run.
    let mut run: BTreeMap<&[u8], &[u8]> = BTreeMap::new();
    for table in tables {
        let before = run.range(..=table.last_key()).next_back();
        let shares_keys = before.is_some_and(|(_, last_key)| *last_key >= table.first_key());
        if run.is_empty() || shares_keys || table.largest_sequence() < oldest_sequence {
            run.clear();
            (runs, oldest_sequence) = (runs + 1, u64::MAX);
        }
        run.insert(table.first_key(), table.last_key());
        oldest_sequence = oldest_sequence.min(table.smallest_sequence());
    }
    runs
}

impl fmt::Debug for TreeVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = (0..LEVELS).map(|level| self.level_tables(level));
        let mut debug = f.debug_struct("TreeVersion");
        debug.field("tables", &tables.collect::<Vec<_>>()).field("segments", &self.segments.len());
        debug.field("lost", &self.lost).field("flushed_through", &self.flushed_through).finish()
    }
}

#[cfg(test)]
#[path = "tree_version_tests.rs"]
mod tests;
