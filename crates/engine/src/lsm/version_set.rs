//! The current version, and what is known of it alone: the bytes that live in each value segment.
//!
//! In: edits, one at a time, each durable before. Out: the current version, by a reference that readers keep as long as they need what it has.
//!
//! Live bytes are not part of versions: only the current ones choose what is collected, and one compaction changes those of all segments to which its tables
//! refer, so that each version would hold as many numbers as there are segments.
//!
//! Invariants: the live bytes of a segment are the sum over the tables of the current version; the lock of the current version is held for the clone of
//! a reference, or its exchange. Tested below and in `version_model_tests.rs`.

use super::reclaim::ReclaimQueue;
use super::table_meta::{SegmentState, TableMeta};
use super::tree_version::{TreeVersion, VersionProblem};
use super::version_edit::VersionEdit;
use octokv_base::map::FxHashMap;
use parking_lot::Mutex;
use std::sync::Arc;

/// The bytes to which the tables of one version refer in each segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentUsage {
    /// Segments to which no table refers are not in it. The sum of any number of tables of any image.
    live_bytes: FxHashMap<u32, u128>,
}

impl SegmentUsage {
    /// Counts those of a version.
    ///
    /// # Errors
    /// A table that refers to a segment which the version does not have.
    pub fn of(version: &TreeVersion) -> Result<SegmentUsage, VersionProblem> {
        let mut usage = SegmentUsage::default();
        for (_, table) in version.tables() {
            check_segments(version, table)?;
            usage.add(table);
        }
        Ok(usage)
    }

    /// The bytes to which tables refer in a segment.
    pub fn live_bytes(&self, segment: u32) -> u64 {
        self.live_bytes.get(&segment).map_or(0, |&bytes| u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// The bytes to which tables refer in all segments.
    pub fn sum_bytes(&self) -> u64 {
        self.live_bytes.values().sum::<u128>().try_into().unwrap_or(u64::MAX)
    }

    /// The segments of a version to which neither a table refers nor a change that is not in a table yet: an edit may remove them.
    pub fn unused<'a>(&self, version: &'a TreeVersion) -> impl Iterator<Item = &'a Arc<SegmentState>> {
        let is_unused = |segment: &&Arc<SegmentState>| {
            is_flushed(version, segment) && self.live_bytes(segment.meta.id()) == 0
        };
        version.segments().iter().filter(is_unused)
    }

    fn add(&mut self, table: &TableMeta) {
        for (segment, bytes) in table.segment_bytes() {
            *self.live_bytes.entry(segment).or_default() += u128::from(bytes);
        }
    }

    fn remove(&mut self, table: &TableMeta) {
        for (segment, bytes) in table.segment_bytes() {
            let live_bytes = self.live_bytes.get_mut(&segment).expect("the table was counted");
            *live_bytes -= u128::from(bytes);
            if *live_bytes == 0 {
                self.live_bytes.remove(&segment);
            }
        }
    }
}

/// Whether all changes whose records are in a segment are in tables.
pub fn is_flushed(version: &TreeVersion, segment: &SegmentState) -> bool {
    segment.seal.is_some_and(|seal| seal.last_sequence <= version.flushed_through())
}

fn check_segments(version: &TreeVersion, table: &TableMeta) -> Result<(), VersionProblem> {
    match table.segment_bytes().find(|(segment, _)| version.segments().get(segment).is_none()) {
        Some((segment, _)) => Err(VersionProblem::SegmentOfTableMissing { table: table.id(), segment }),
        None => Ok(()),
    }
}

/// What only the edits need.
struct EditState {
    usage: SegmentUsage,
    /// The units of the tables and segments of the current version.
    units: u64,
}

/// The units of a version that hold no value in a segment: a collection can free some of them, and needs some for its tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverheadUnits {
    /// In sealed segments whose changes are in tables: those of records that no table refers to, if a segment's records are of one length.
    pub dead: u64,
    /// Those of all tables.
    pub tables: u64,
}

impl OverheadUnits {
    fn of(version: &TreeVersion, usage: &SegmentUsage) -> OverheadUnits {
        let dead = |segment: &Arc<SegmentState>| {
            let seal = segment.seal.filter(|seal| seal.record_bytes > 0)?;
            let dead_bytes = seal.record_bytes.saturating_sub(usage.live_bytes(segment.meta.id()));
            let units = u128::from(seal.units) * u128::from(dead_bytes) / u128::from(seal.record_bytes);
            is_flushed(version, segment).then_some(units as u64)
        };
        OverheadUnits {
            dead: version.segments().iter().filter_map(dead).sum(),
            tables: version.tables().map(|(_, table)| table.extent().units).sum(),
        }
    }
}

/// The versions of a tree.
pub struct VersionSet {
    current: Mutex<Arc<TreeVersion>>,
    edits: Mutex<EditState>,
    /// Of the current version. Apart from it, because each put of a volume that is nearly full reads it.
    overhead: Mutex<OverheadUnits>,
    reclaim: Arc<ReclaimQueue>,
}

impl VersionSet {
    /// Begins with a version, empty or as it was read; `reclaim` is the queue of all its tables and segments.
    ///
    /// # Errors
    /// A table that refers to a segment which the version does not have.
    pub fn new(version: TreeVersion, reclaim: Arc<ReclaimQueue>) -> Result<VersionSet, VersionProblem> {
        let usage = SegmentUsage::of(&version)?;
        let units = version.extents().map(|extent| extent.units).sum();
        let overhead = Mutex::new(OverheadUnits::of(&version, &usage));
        Ok(VersionSet {
            current: Mutex::new(Arc::new(version)),
            edits: Mutex::new(EditState { usage, units }),
            overhead,
            reclaim,
        })
    }

    /// The current version. The reference keeps the space of its tables and segments.
    pub fn current(&self) -> Arc<TreeVersion> {
        self.current.lock().clone()
    }

    /// The queue of the space to which no version refers any more.
    pub fn reclaim(&self) -> &Arc<ReclaimQueue> {
        &self.reclaim
    }

    /// Makes the version after an edit the current one. REQUIRES: the edit is durable, and so is what its tables and segments have; edits come in
    /// the order of the journal.
    ///
    /// # Errors
    /// What is wrong with the edit; then nothing has changed.
    pub fn install(&self, edit: &VersionEdit) -> Result<Arc<TreeVersion>, VersionProblem> {
        let mut edits = self.edits.lock();
        let before = self.current();
        let next = Arc::new(before.edited(edit)?);
        let removed: Vec<&Arc<TableMeta>> =
            edit.removed_tables.iter().flat_map(|it| before.find(it)).collect();
        let removed_segments: Vec<&Arc<SegmentState>> =
            edit.removed_segments.iter().flat_map(|id| before.segments().get(id)).collect();
        for (_, table) in &edit.added_tables {
            check_segments(&next, table)?;
        }
        for segment in &removed_segments {
            let id = segment.meta.id();
            let of_segment = |table: &&Arc<TableMeta>| table.segment_bytes().find(|it| it.0 == id);
            let freed_bytes: u64 = removed.iter().filter_map(of_segment).map(|it| it.1).sum();
            if !is_flushed(&next, segment) || edits.usage.live_bytes(id) != freed_bytes {
                return Err(VersionProblem::SegmentInUse { segment: id });
            }
        }
        // From here on nothing fails.
        for (_, table) in &edit.added_tables {
            edits.usage.add(table);
            edits.units += table.extent().units;
        }
        edits.units += edit.added_segments.iter().map(|segment| segment.extent().units).sum::<u64>();
        for table in &removed {
            edits.usage.remove(table);
            edits.units -= table.extent().units;
        }
        edits.units -= removed_segments.iter().map(|segment| segment.meta.extent().units).sum::<u64>();
        for (id, seal) in &edit.sealed_segments {
            // Without one it is sealed and removed by one edit.
            let segment = next.segments().get(id);
            edits.units -= segment.map_or(0, |segment| segment.meta.give_up_behind(seal.units));
        }
        *self.overhead.lock() = OverheadUnits::of(&next, &edits.usage);
        let replaced = std::mem::replace(&mut *self.current.lock(), next.clone());
        // The last references to its own nodes and tables go here, outside of the lock that readers take.
        drop(replaced);
        Ok(next)
    }

    /// Passes the current version and its live bytes, which belong together.
    pub fn with_usage<R>(&self, use_both: impl FnOnce(&TreeVersion, &SegmentUsage) -> R) -> R {
        let edits = self.edits.lock();
        let current = self.current();
        use_both(&current, &edits.usage)
    }

    /// The units of the current version that hold no value in a segment.
    pub fn overhead(&self) -> OverheadUnits {
        *self.overhead.lock()
    }

    /// The units that only older versions hold, and compactions that have not ended.
    pub fn pinned_units(&self) -> u64 {
        let edits = self.edits.lock();
        self.reclaim.live_units().saturating_sub(edits.units)
    }
}

#[cfg(test)]
mod tests {
    use super::super::table_meta::tests::table_fields;
    use super::super::table_meta::{SegmentMeta, SegmentSeal, TableFields};
    use super::super::version_edit::TableRemoval;
    use super::*;
    use crate::common::allocator::Extent;

    fn table(queue: &Arc<ReclaimQueue>, id: u64, segment_bytes: &[(u32, u64)]) -> Arc<TableMeta> {
        let key = [id as u8];
        let segment_bytes = segment_bytes.to_vec();
        TableMeta::new(&TableFields { segment_bytes, ..table_fields(id, &key, &key) }, queue)
    }

    fn segment(queue: &Arc<ReclaimQueue>, id: u32) -> Arc<SegmentMeta> {
        SegmentMeta::new(id, Extent { location: 5000 + u64::from(id), units: 3 }, queue)
    }

    /// A compaction begins its tables before a flush that ends first.
    #[test]
    fn tables_and_segments_may_come_in_another_order_than_their_numbers() {
        let queue = ReclaimQueue::new();
        let set = VersionSet::new(TreeVersion::default(), Arc::clone(&queue)).unwrap();
        let edit = |id: u64| VersionEdit {
            added_tables: vec![(0, table(&queue, id, &[]))],
            added_segments: vec![segment(&queue, id as u32)],
            ..VersionEdit::default()
        };
        set.install(&edit(5)).unwrap();
        let version = set.install(&edit(3)).unwrap();
        assert_eq!((version.last_table_id(), version.last_segment_id(), version.level0().len()), (5, 5, 2));
        let tables_alone = VersionEdit { added_segments: Vec::new(), ..edit(3) };
        assert_eq!(set.install(&tables_alone).unwrap_err(), VersionProblem::TableTwice { id: 3 });
        let segments_alone = VersionEdit { added_tables: Vec::new(), ..edit(3) };
        assert_eq!(set.install(&segments_alone).unwrap_err(), VersionProblem::SegmentTwice { segment: 3 });
    }

    #[test]
    fn what_the_records_of_a_sealed_segment_do_not_take_is_free_at_once() {
        let queue = ReclaimQueue::new();
        let set = VersionSet::new(TreeVersion::default(), Arc::clone(&queue)).unwrap();
        let added_segments = vec![segment(&queue, 1)];
        set.install(&VersionEdit { added_segments, ..VersionEdit::default() }).unwrap();
        let open = set.current();
        let seal = SegmentSeal { units: 2, record_bytes: 100, last_sequence: 0 };
        set.install(&VersionEdit { sealed_segments: vec![(1, seal)], ..VersionEdit::default() }).unwrap();
        assert_eq!(queue.take(), [Extent { location: 5003, units: 1 }], "although an older version has it");
        assert_eq!((queue.live_units(), set.pinned_units()), (2, 0));
        drop(open);
        assert_eq!(queue.take(), []);
        set.install(&VersionEdit { removed_segments: vec![1], ..VersionEdit::default() }).unwrap();
        assert_eq!(queue.take(), [Extent { location: 5001, units: 2 }]);
        assert_eq!((queue.live_units(), set.pinned_units()), (0, 0));
    }

    fn remove(tables: &[(usize, u64)], segments: &[u32]) -> VersionEdit {
        let removal = |&(level, id): &(usize, u64)| TableRemoval { level, id, first_key: vec![id as u8] };
        VersionEdit {
            removed_tables: tables.iter().map(removal).collect(),
            removed_segments: segments.to_vec(),
            ..VersionEdit::default()
        }
    }

    /// Tables 1 and 2, which refer to segments 1 (sealed, flushed), 2 (sealed, beyond what is flushed) and 3 (open).
    fn example() -> VersionSet {
        let queue = ReclaimQueue::new();
        let seal = |last_sequence| SegmentSeal { units: 3, record_bytes: 100, last_sequence };
        let edit = VersionEdit {
            added_tables: vec![(1, table(&queue, 1, &[(1, 10), (2, 20)])), (0, table(&queue, 2, &[(1, 5)]))],
            added_segments: (1..=3).map(|id| segment(&queue, id)).collect(),
            sealed_segments: vec![(1, seal(7)), (2, seal(9))],
            flushed_through: Some(8),
            ..VersionEdit::default()
        };
        let set = VersionSet::new(TreeVersion::default(), queue).unwrap();
        set.install(&edit).unwrap();
        set
    }

    fn live_bytes(set: &VersionSet) -> [u64; 3] {
        set.with_usage(|version, usage| {
            assert_eq!(Ok(usage.clone()), SegmentUsage::of(version), "as a count of all tables gives it");
            [1, 2, 3].map(|id| usage.live_bytes(id))
        })
    }

    #[test]
    fn live_bytes_follow_the_tables() {
        let set = example();
        assert_eq!(live_bytes(&set), [15, 20, 0]);
        set.install(&remove(&[(0, 2)], &[])).unwrap();
        assert_eq!(live_bytes(&set), [10, 20, 0]);
        let edit = VersionEdit {
            added_tables: vec![(1, table(set.reclaim(), 3, &[(2, 1)]))],
            ..remove(&[(1, 1)], &[])
        };
        set.install(&edit).unwrap();
        assert_eq!(live_bytes(&set), [0, 1, 0]);
        let unused = |version: &TreeVersion, usage: &SegmentUsage| {
            usage.unused(version).map(|segment| segment.meta.id()).collect::<Vec<u32>>()
        };
        assert_eq!(set.with_usage(unused), [1], "segment 3 is open");
    }

    #[test]
    fn dead_units_are_those_of_sealed_segments_whose_changes_are_in_tables() {
        let set = example();
        let dead_and_tables = || (set.overhead().dead, set.overhead().tables);
        let table_units = table_fields(1, &[1], &[1]).extent.units;
        assert_eq!(
            dead_and_tables(),
            (2, 2 * table_units),
            "85 of 100 B in 3 units; the second is not flushed"
        );
        set.install(&VersionEdit { flushed_through: Some(9), ..VersionEdit::default() }).unwrap();
        assert_eq!(dead_and_tables(), (2 + 2, 2 * table_units));
        set.install(&remove(&[(0, 2), (1, 1)], &[1])).unwrap();
        assert_eq!(dead_and_tables(), (3, 0), "all of the second");
        let again = VersionSet::new((*set.current()).clone(), Arc::clone(set.reclaim())).unwrap();
        assert_eq!(again.overhead(), set.overhead());
    }

    #[test]
    fn a_segment_goes_only_if_nothing_needs_it() {
        let set = example();
        let in_use = |segment| VersionProblem::SegmentInUse { segment };
        let refused = |edit: &VersionEdit| set.install(edit).unwrap_err();
        assert_eq!(refused(&remove(&[], &[1])), in_use(1));
        assert_eq!(refused(&remove(&[(0, 2)], &[1])), in_use(1), "table 1 refers to it");
        assert_eq!(refused(&remove(&[(1, 1)], &[2])), in_use(2), "not all of its changes are flushed");
        assert_eq!(refused(&remove(&[], &[3])), in_use(3), "it is open");
        let missing = VersionProblem::SegmentOfTableMissing { table: 3, segment: 1 };
        let edit = VersionEdit {
            added_tables: vec![(1, table(set.reclaim(), 3, &[(1, 10)]))],
            ..remove(&[(0, 2), (1, 1)], &[1])
        };
        assert_eq!(refused(&edit), missing);
        assert_eq!(live_bytes(&set), [15, 20, 0], "what was refused changed nothing");
        set.install(&remove(&[(0, 2), (1, 1)], &[1])).unwrap();
        assert!(set.current().segment(1).is_none());
        assert_eq!(live_bytes(&set), [0, 0, 0]);
    }

    #[test]
    fn space_is_given_up_when_the_last_version_with_it_goes() {
        let set = example();
        drop(set.reclaim().take());
        let snapshot = set.current();
        assert_eq!(set.pinned_units(), 0);
        set.install(&remove(&[(0, 2), (1, 1)], &[1])).unwrap();
        assert_eq!(set.reclaim().take(), []);
        assert_eq!(set.pinned_units(), 10 + 10 + 3);
        drop(snapshot);
        assert_eq!(set.pinned_units(), 0);
        let mut freed: Vec<u64> = set.reclaim().take().iter().map(|extent| extent.location).collect();
        freed.sort_unstable();
        assert_eq!(freed, [10, 20, 5001]);
    }
}
