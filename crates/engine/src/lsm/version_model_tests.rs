//! Trees in a model: random flushes, and compactions as they are chosen, several at once, which end in any order. Tables have entries here, but no
//! bytes on a device; each tree is compared with a map of what was written, also as snapshots see it.

use super::compaction::{CompactionInput, CompactionReason, CompactionSettings, TreeCompaction};
use super::compaction_choice::{
    ChoiceState, CompactionChoice, are_compatible, choose_compaction, level_target, pending_bytes,
};
use super::reclaim::ReclaimQueue;
use super::table_meta::{SegmentMeta, SegmentSeal, TableFields, TableMeta, TableParts};
use super::tree_version::TreeVersion;
use super::version_edit::{LEVELS, VersionEdit};
use super::version_image::{VersionImageLoader, VersionImageWriter};
use super::version_set::{SegmentUsage, VersionSet};
use crate::common::allocator::Extent;
use octokv_base::map::{FxHashMap, FxHashSet};
use octokv_base::{Prng, UnixTime, Version};
use std::collections::BTreeMap;
use std::sync::Arc;

const TABLE_BYTES: u64 = 2000;
const ENTRY_BYTES: u64 = 20;
const VALUE_BYTES: u64 = 100;
const FLUSH_ENTRIES: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum TestValue {
    Tombstone,
    Inline,
    InSegment(u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct TestEntry {
    key: u16,
    sequence: u64,
    value: TestValue,
}

/// What a reader finds of each key: the sequence number of its last write, unless that deleted it.
type TestView = BTreeMap<u16, u64>;

pub(super) struct TestTree {
    pub(super) random: Prng,
    settings: CompactionSettings,
    pub(super) set: VersionSet,
    state: ChoiceState,
    pub(super) running: Vec<Arc<TreeCompaction>>,
    /// The entries of every table that there ever was, by key, newest first.
    entries: FxHashMap<u64, Vec<TestEntry>>,
    model: TestView,
    sequence: u64,
    /// A snapshot: its version, its sequence number, and what it sees.
    pub(super) snapshot: Option<(Arc<TreeVersion>, u64, TestView)>,
    /// Whether tombstones stay, for a reason that the choice does not know.
    keeps_tombstones: bool,
    /// Tables that cannot be read.
    pub(super) postponed: FxHashSet<u64>,
    last_table: u64,
    last_segment: u32,
    next_unit: u64,
    pub(super) flushed_bytes: u64,
    pub(super) written_bytes: u64,
    compactions: FxHashMap<u8, u64>,
}

fn key_bytes(key: u16) -> Vec<u8> {
    key.to_be_bytes().to_vec()
}

/// What is written in a test.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    /// Any of so many keys, of a hundred writes so many deletes.
    Uniform { keys: u64, deletes: u64 },
    /// Each key once, in order.
    Sequential,
    /// All keys are written, and then most are deleted, in order.
    DeleteAll,
}

impl TestTree {
    pub(super) fn new(seed: u64, settings: CompactionSettings) -> TestTree {
        TestTree {
            random: Prng::new(seed),
            settings,
            set: VersionSet::new(TreeVersion::default(), ReclaimQueue::new()).unwrap(),
            state: ChoiceState::default(),
            running: Vec::new(),
            entries: FxHashMap::default(),
            model: TestView::new(),
            sequence: 0,
            snapshot: None,
            keeps_tombstones: false,
            postponed: FxHashSet::default(),
            last_table: 0,
            last_segment: 0,
            next_unit: 0,
            flushed_bytes: 0,
            written_bytes: 0,
            compactions: FxHashMap::default(),
        }
    }

    pub(super) fn take_snapshot(&mut self) {
        self.snapshot = Some((self.set.current(), self.sequence, self.model.clone()));
    }

    fn oldest_snapshot(&self) -> u64 {
        self.snapshot.as_ref().map_or(self.sequence, |it| it.1)
    }

    fn extent(&mut self, units: u64) -> Extent {
        let location = self.next_unit;
        self.next_unit += units;
        Extent { location, units }
    }

    /// A new segment for the values among these entries that are to lie in one, with the edit that adds and seals it.
    fn write_segment(
        &mut self,
        entries: &mut [TestEntry],
        goes: impl Fn(&TestEntry) -> bool,
        edit: &mut VersionEdit,
    ) {
        let values: Vec<&mut TestEntry> = entries.iter_mut().filter(|entry| goes(entry)).collect();
        if values.is_empty() {
            return;
        }
        self.last_segment += 1;
        let record_bytes = values.len() as u64 * VALUE_BYTES;
        self.written_bytes += record_bytes;
        let last_sequence = values.iter().map(|entry| entry.sequence).max().unwrap_or(0);
        values.into_iter().for_each(|entry| entry.value = TestValue::InSegment(self.last_segment));
        let extent = self.extent(1);
        edit.added_segments.push(SegmentMeta::new(self.last_segment, extent, self.set.reclaim()));
        edit.sealed_segments.push((self.last_segment, SegmentSeal { units: 1, record_bytes, last_sequence }));
    }

    /// A table of entries, settled or not as `is_settled` decides.
    fn write_table(
        &mut self,
        entries: &[TestEntry],
        is_settled: impl Fn(&TableFields) -> bool,
    ) -> Arc<TableMeta> {
        self.last_table += 1;
        let mut segment_bytes = BTreeMap::new();
        for entry in entries {
            if let TestValue::InSegment(segment) = entry.value {
                *segment_bytes.entry(segment).or_default() += VALUE_BYTES;
            }
        }
        let sequences = || entries.iter().map(|entry| entry.sequence);
        let tombstones = entries.iter().filter(|entry| entry.value == TestValue::Tombstone);
        let mut fields = TableFields {
            id: self.last_table,
            extent: self.extent(1),
            parts: TableParts::default(),
            bytes: entries.len() as u64 * ENTRY_BYTES,
            entries: entries.len() as u64,
            tombstones: tombstones.count() as u64,
            smallest_sequence: sequences().min().unwrap(),
            largest_sequence: sequences().max().unwrap(),
            largest_tombstone_version: Version::NONE,
            earliest_expiry: UnixTime::NEVER,
            is_settled: false,
            first_key: key_bytes(entries[0].key),
            last_key: key_bytes(entries[entries.len() - 1].key),
            segment_bytes: segment_bytes.into_iter().collect(),
        };
        fields.is_settled = is_settled(&fields);
        self.written_bytes += fields.bytes;
        self.entries.insert(fields.id, entries.to_vec());
        TableMeta::new(&fields, self.set.reclaim())
    }

    pub(super) fn flush(&mut self, load: Load) {
        let mut memtable = BTreeMap::new();
        for _ in 0..FLUSH_ENTRIES {
            self.sequence += 1;
            let (key, is_delete) = match load {
                Load::Uniform { keys, deletes } => {
                    (self.random.below(keys), self.random.below(100) < deletes)
                }
                Load::Sequential => (self.sequence, false),
                Load::DeleteAll => (self.sequence % 6000, self.sequence > 6000),
            };
            let value = match is_delete {
                true => TestValue::Tombstone,
                false => TestValue::Inline,
            };
            memtable.insert(key as u16, TestEntry { key: key as u16, sequence: self.sequence, value });
        }
        for entry in memtable.values() {
            match entry.value {
                TestValue::Tombstone => _ = self.model.remove(&entry.key),
                _ => _ = self.model.insert(entry.key, entry.sequence),
            }
        }
        let mut entries: Vec<TestEntry> = memtable.into_values().collect();
        let mut edit = VersionEdit { flushed_through: Some(self.sequence), ..VersionEdit::default() };
        let before = self.written_bytes;
        // Values of every third write are long.
        let is_long =
            |entry: &TestEntry| entry.value != TestValue::Tombstone && entry.sequence.is_multiple_of(3);
        self.write_segment(&mut entries, is_long, &mut edit);
        edit.added_tables.push((0, self.write_table(&entries, |_| false)));
        self.flushed_bytes += self.written_bytes - before;
        self.set.install(&edit).unwrap();
    }

    /// Begins the next compaction, if there is one.
    pub(super) fn begin(&mut self) -> bool {
        let mut looks = 0;
        loop {
            let oldest_snapshot = self.oldest_snapshot();
            let (settings, running, state) = (&self.settings, &self.running, &mut self.state);
            let choice = self.set.with_usage(|version, usage| {
                let forget_below = Version::NONE;
                let unmovable = &FxHashSet::default();
                let input = CompactionInput {
                    version,
                    usage,
                    running,
                    oldest_snapshot,
                    forget_below,
                    settings,
                    unmovable,
                    postponed: &self.postponed,
                };
                choose_compaction(&input, state)
            });
            match choice {
                CompactionChoice::Compact(compaction) => {
                    self.check_choice(&compaction);
                    *self.compactions.entry(compaction.reason as u8).or_default() += 1;
                    self.running.push(Arc::new(compaction));
                    assert!(are_compatible(&self.running), "{:?}", self.running);
                    return true;
                }
                CompactionChoice::LookAgain => looks += 1,
                CompactionChoice::Nothing => return false,
            }
            assert!(looks < 10_000, "a search without end");
        }
    }

    fn check_choice(&self, compaction: &TreeCompaction) {
        let version = self.set.current();
        let (inputs, bound) = (compaction.inputs.len(), self.settings.input_bytes_max);
        assert!(inputs > 0 && compaction.output_level < LEVELS);
        let is_least = inputs == 1;
        let is_around = !compaction.kept_keys.is_empty();
        assert!(is_least || is_around || compaction.input_bytes() <= bound, "{compaction:?}");
        let can_read = |table: &Arc<TableMeta>| !self.postponed.contains(&table.id());
        assert!(compaction.is_move || compaction.tables().all(can_read), "{compaction:?}");
        if compaction.input_level == 0 {
            let start = if is_around { 0 } else { version.level0().len() - inputs };
            let tables = &version.level0()[start..start + inputs];
            assert!(tables.iter().zip(&compaction.inputs).all(|(one, other)| one.id() == other.id()));
        }
        if compaction.is_move {
            assert!(compaction.overlapped.is_empty() && compaction.moved_segments.is_empty());
        }
    }

    /// Ends any of the compactions that run.
    pub(super) fn end_one(&mut self) {
        let index = self.random.below(self.running.len() as u64) as usize;
        let compaction = self.running.swap_remove(index);
        let mut edit = match compaction.is_move {
            true => compaction.edit(Vec::new()),
            false => {
                let mut edit = VersionEdit::default();
                let mut entries = self.merged(&compaction);
                let moves = |entry: &TestEntry| match entry.value {
                    TestValue::InSegment(segment) => compaction.moved_segments.contains(&segment),
                    _ => false,
                };
                self.write_segment(&mut entries, moves, &mut edit);
                // Changes of the segments that are written here are in tables already.
                edit.sealed_segments.iter_mut().for_each(|(_, seal)| seal.last_sequence = 0);
                let oldest_snapshot = self.oldest_snapshot();
                let is_settled =
                    |fields: &TableFields| compaction.is_settled(fields, oldest_snapshot, Version::NONE);
                let mut outputs = Vec::new();
                let mut rest = &entries[..];
                while !rest.is_empty() {
                    // All entries of a key are in one table.
                    let mut end = rest.len().min((TABLE_BYTES / ENTRY_BYTES) as usize);
                    let section = |entry: &TestEntry| compaction.kept_keys.section(&key_bytes(entry.key));
                    let is_other = |entry: &TestEntry| section(entry) != section(&rest[0]);
                    end = rest[..end].iter().position(is_other).unwrap_or(end);
                    while end < rest.len() && rest[end].key == rest[end - 1].key {
                        end += 1;
                    }
                    outputs.push(self.write_table(&rest[..end], is_settled));
                    rest = &rest[end..];
                }
                let tables = compaction.edit(outputs);
                VersionEdit {
                    added_segments: edit.added_segments,
                    sealed_segments: edit.sealed_segments,
                    ..tables
                }
            }
        };
        drop(compaction);
        self.set.install(&edit).unwrap();
        edit = VersionEdit {
            removed_segments: self.set.with_usage(|version, usage| {
                usage.unused(version).map(|segment| segment.meta.id()).collect()
            }),
            ..VersionEdit::default()
        };
        self.set.install(&edit).unwrap();
    }

    /// What a compaction keeps: of each key the newest entry, and the one that the snapshot sees; a tombstone that is the last one goes if nothing lies below and
    /// no snapshot is older.
    fn merged(&self, compaction: &TreeCompaction) -> Vec<TestEntry> {
        let mut entries: Vec<TestEntry> =
            compaction.tables().flat_map(|table| &self.entries[&table.id()]).copied().collect();
        entries.sort_by_key(|entry| (entry.key, std::cmp::Reverse(entry.sequence)));
        let mut kept = Vec::new();
        for of_key in entries.chunk_by(|one, other| one.key == other.key) {
            let start = kept.len();
            kept.push(of_key[0]);
            let snapshot = self.snapshot.as_ref().map(|it| it.1);
            let seen = snapshot.and_then(|sequence| of_key.iter().find(|entry| entry.sequence <= sequence));
            kept.extend(seen.filter(|entry| entry.sequence != of_key[0].sequence));
            let last = kept[kept.len() - 1];
            if last.value == TestValue::Tombstone
                && !self.keeps_tombstones
                && compaction.is_bottommost
                && last.sequence <= self.oldest_snapshot()
            {
                kept.pop();
            }
            assert!(kept.len() <= start + 2);
        }
        kept
    }

    /// What a reader of a version finds: of each key the first entry from above that it may see.
    fn view(&self, version: &TreeVersion, through: u64) -> TestView {
        let mut first: BTreeMap<u16, TestEntry> = BTreeMap::new();
        for (_, table) in version.tables() {
            for entry in self.entries[&table.id()].iter().filter(|entry| entry.sequence <= through) {
                first.entry(entry.key).or_insert(*entry);
            }
        }
        let found = first.values().filter(|entry| entry.value != TestValue::Tombstone);
        found.map(|entry| (entry.key, entry.sequence)).collect()
    }

    /// Checks the tree now and then.
    fn check_sometimes(&mut self) {
        if self.random.one_in(4) {
            self.check();
        }
    }

    pub(super) fn check(&self) {
        let version = self.set.current();
        for level in 1..LEVELS {
            let tables: Vec<_> = version.level(level).iter().collect();
            assert!(tables.is_sorted_by(|one, other| one.last_key() < other.first_key()), "level {level}");
        }
        self.set.with_usage(|version, usage| {
            assert_eq!(Ok(usage.clone()), SegmentUsage::of(version));
        });
        assert_eq!(version.check_extents(0..self.next_unit), Ok(()));
        assert!(self.view(&version, u64::MAX) == self.model, "a read finds the last write");
        if let Some((version, sequence, view)) = &self.snapshot {
            assert!(self.view(version, *sequence) == *view, "a snapshot keeps its version");
            // A memtable that was flushed after the snapshot was made: its reader goes on in newer versions.
            assert!(self.view(&self.set.current(), *sequence) == *view, "nothing that it sees is dropped");
        }
    }

    /// Ends and begins compactions until there are none.
    pub(super) fn settle(&mut self) {
        let mut steps = 0;
        loop {
            let has_begun = self.begin();
            if self.running.is_empty() {
                assert!(!has_begun);
                break;
            }
            if !has_begun || self.random.one_in(2) {
                self.end_one();
                self.check_sometimes();
            }
            steps += 1;
            assert!(steps < 3000, "compactions without end: {:?}", self.compactions);
        }
        self.check();
    }

    /// Whether all levels are within their targets, and nothing is left to be collected.
    pub(super) fn check_settled(&self) {
        let version = self.set.current();
        assert!(version.level0_runs() < self.settings.level0_trigger);
        for level in 1..LEVELS {
            assert!(version.level_bytes(level) <= level_target(level, &self.settings), "level {level}");
        }
        assert_eq!(pending_bytes(&version, &self.settings), 0);
        for (level, table) in version.tables() {
            let is_bottommost =
                level > 0 && version.is_bottommost(level, table.first_key(), table.last_key());
            let must_stay = table.largest_sequence() > self.oldest_snapshot();
            let is_dense = table.tombstone_permille() >= self.settings.tombstone_permille;
            assert!(!is_dense || (is_bottommost && must_stay), "tombstones in level {level}: {table:?}");
        }
        self.set.with_usage(|version, usage| {
            let sealed =
                || version.segments().iter().filter_map(|it| Some((it.meta.id(), it.seal?.record_bytes)));
            let all: u64 = sealed().map(|it| it.1).sum();
            let live: u64 = sealed().map(|it| usage.live_bytes(it.0)).sum();
            let is_victim = |id, bytes| {
                usage.live_bytes(id) * 1000 <= bytes * u64::from(self.settings.segment_live_permille)
            };
            let victims = sealed().filter(|&(id, bytes)| is_victim(id, bytes)).count();
            let is_little = (all - live) * 1000 < all * u64::from(self.settings.garbage_permille);
            assert!(
                is_little || victims == 0,
                "{live} of {all} bytes live, {victims} segments are mostly dead"
            );
        });
    }

    /// The version as a checkpoint and a reopening give it.
    fn check_image(&self) {
        let version = self.set.current();
        let mut writer = VersionImageWriter::new(version.clone(), 1, 2);
        let queue = ReclaimQueue::new();
        let mut loader = VersionImageLoader::new(1, 2, queue);
        let mut bytes = Vec::new();
        while writer.append_image(&mut bytes) {
            assert_eq!(loader.load(&bytes), Some(bytes.len()));
            bytes.clear();
        }
        let loaded = loader.finish(0..self.next_unit).unwrap();
        assert_eq!(format!("{loaded:?}"), format!("{version:?}"));
        assert!(self.view(&loaded, u64::MAX) == self.model);
    }
}

pub(super) fn settings(random: &mut Prng) -> CompactionSettings {
    CompactionSettings {
        level0_trigger: 2 + random.below(4) as usize,
        level1_bytes: TABLE_BYTES * (3 + random.below(5)),
        multiplier: 2 + random.below(5),
        input_bytes_max: TABLE_BYTES * (4 + random.below(30)),
        parallel_max: 1 + random.below(4) as usize,
        tombstone_permille: 500,
        segment_live_permille: 300 + random.below(400) as u16,
        garbage_permille: 200 + random.below(300) as u16,
        ..CompactionSettings::default()
    }
}

/// A tree under a load, with snapshots that come and go, and then at rest.
fn run(seed: u64, load: Load, flushes: u64) -> TestTree {
    let mut random = Prng::new(seed);
    let mut tree = TestTree::new(seed, settings(&mut random));
    for _ in 0..flushes {
        tree.flush(load);
        for _ in 0..random.below(4) {
            tree.begin();
        }
        for _ in 0..random.below(4) {
            if !tree.running.is_empty() {
                tree.end_one();
                tree.check_sometimes();
            }
        }
        match tree.snapshot {
            None if random.one_in(8) => tree.take_snapshot(),
            Some(_) if random.one_in(8) => tree.snapshot = None,
            _ => {}
        }
    }
    tree.settle();
    tree.check_settled();
    tree.check_image();
    if tree.snapshot.take().is_some() {
        tree.settle();
        tree.check_settled();
    }
    tree.check();
    drop(tree.state);
    tree.state = ChoiceState::default();
    assert!(!tree.begin(), "at rest nothing is chosen, whatever earlier choices were");
    let units = tree.set.current().extents().map(|extent| extent.units).sum::<u64>();
    assert_eq!((tree.set.pinned_units(), tree.set.reclaim().live_units()), (0, units));
    tree
}

fn write_amplification(tree: &TestTree) -> f64 {
    tree.written_bytes as f64 / tree.flushed_bytes as f64
}

#[test]
fn random_trees_keep_what_was_written_and_come_to_rest_within_their_targets() {
    let mut reasons = [0; 4];
    for seed in 0..20 {
        let load = [
            Load::Uniform { keys: 400, deletes: 0 },
            Load::Uniform { keys: 4000, deletes: 10 },
            Load::Uniform { keys: 60_000, deletes: 40 },
            Load::Sequential,
            Load::DeleteAll,
        ][seed as usize % 5];
        let tree = run(seed, load, 60);
        for (reason, count) in &tree.compactions {
            reasons[usize::from(*reason)] += count;
        }
        let amplification = write_amplification(&tree);
        println!("seed {seed}, {load:?}: write amplification {amplification:.1}");
        assert!(amplification < 10.0, "seed {seed}, {load:?}: {amplification}");
    }
    assert!(reasons.iter().all(|&count| count > 10), "every reason occurs: {reasons:?}");
}

#[test]
fn keys_in_order_are_moved_down_and_written_once() {
    let mut tree =
        TestTree::new(1, CompactionSettings { garbage_permille: 1000, ..settings(&mut Prng::new(1)) });
    (0..100).for_each(|_| {
        tree.flush(Load::Sequential);
        tree.settle();
    });
    tree.check_settled();
    assert_eq!(write_amplification(&tree), 1.0);
}

#[test]
fn a_tree_whose_keys_were_all_deleted_becomes_empty() {
    let mut tree = TestTree::new(2, settings(&mut Prng::new(2)));
    (0..60).for_each(|_| tree.flush(Load::DeleteAll));
    tree.settle();
    assert!(tree.model.len() <= 1);
    let version = tree.set.current();
    let tombstones: u64 = version.tables().map(|(_, table)| table.tombstones()).sum();
    assert!(tombstones <= FLUSH_ENTRIES, "{tombstones} tombstones are left");
}

#[test]
fn tombstones_that_stay_are_not_written_again_and_again() {
    for seed in 0..4 {
        let mut tree = TestTree::new(seed, settings(&mut Prng::new(seed)));
        tree.keeps_tombstones = true;
        (0..60).for_each(|_| tree.flush(Load::DeleteAll));
        // Ends.
        tree.settle();
        let version = tree.set.current();
        let tombstones: u64 = version.tables().map(|(_, table)| table.tombstones()).sum();
        assert!(tombstones > 5000, "{tombstones} are left");
    }
}

#[test]
fn what_a_snapshot_needs_is_kept_and_goes_after_it() {
    let mut tree = TestTree::new(3, settings(&mut Prng::new(3)));
    (0..30).for_each(|_| tree.flush(Load::DeleteAll));
    tree.take_snapshot();
    assert_eq!(tree.model.len(), 6000);
    (0..30).for_each(|_| tree.flush(Load::DeleteAll));
    tree.settle();
    tree.check_settled();
    let entries =
        |tree: &TestTree| tree.set.current().tables().map(|(_, table)| table.entries()).sum::<u64>();
    assert!(entries(&tree) >= 6000);
    tree.snapshot = None;
    tree.settle();
    tree.check();
    assert!(entries(&tree) < 600, "{} entries are left", entries(&tree));
}

#[test]
fn writes_that_never_end_do_not_put_off_tombstones_and_dead_values() {
    // Sizes are above their targets all the time, as one compaction for each flush is too few.
    let settings = CompactionSettings { parallel_max: 1, level0_trigger: 1, ..settings(&mut Prng::new(4)) };
    let mut tree = TestTree::new(4, settings);
    for step in 0..200 {
        tree.flush(Load::Uniform { keys: 500, deletes: if step < 100 { 80 } else { 0 } });
        tree.begin();
        if !tree.running.is_empty() {
            tree.end_one();
        }
    }
    let count = |reason: CompactionReason| tree.compactions.get(&(reason as u8)).copied().unwrap_or(0);
    assert!(
        count(CompactionReason::Garbage) + count(CompactionReason::Tombstones) >= 20,
        "{:?}",
        tree.compactions
    );
}
