//! What a tree of many tables takes in memory, and what iterators hold that were created between compactions.

use octokv_base::{Prng, UnixTime, Version};
use octokv_engine::common::allocator::Extent;
use octokv_engine::lsm::reclaim::ReclaimQueue;
use octokv_engine::lsm::table_meta::{SegmentMeta, TableFields, TableMeta, TableParts};
use octokv_engine::lsm::tree_version::TreeVersion;
use octokv_engine::lsm::version_edit::{LEVELS, TableRemoval, VersionEdit};
use octokv_engine::lsm::version_set::VersionSet;
use octokv_sys::counting_allocator::thread_held_bytes;
use std::sync::Arc;

/// A level has this many times the tables of the one above, and a table as many tables below.
const MULTIPLIER: u64 = 10;
/// The keys of a table in the last level, in the numbers of which keys are made.
const KEYS_PER_TABLE: u64 = 1000;
const SEGMENTS: u32 = 400;
const SEGMENTS_PER_TABLE: u32 = 4;

/// Bytes that are allocated.
pub struct VersionMemory {
    /// The metadata of all tables.
    pub metadata_bytes: i64,
    /// The first version, without the metadata.
    pub structure_bytes: i64,
    /// What creating an iterator on a version allocates.
    pub iterator_bytes: i64,
    /// What all iterators hold together beyond the current version: nodes and metadata of tables that are gone.
    pub held_bytes: i64,
    /// Of this, nodes and versions.
    pub held_structure_bytes: i64,
    /// The tables that the compactions replaced.
    pub replaced_tables: u64,
}

impl VersionMemory {
    /// One summary: a version with its metadata.
    pub fn summary_bytes(&self) -> i64 {
        self.metadata_bytes + self.structure_bytes
    }
}

/// Keys of 16 bytes.
fn key(number: u64) -> Vec<u8> {
    format!("user{number:012}").into_bytes()
}

fn table(id: u64, first: u64, last: u64, queue: &Arc<ReclaimQueue>) -> Arc<TableMeta> {
    let segment = |index| (1 + (id as u32 + index * SEGMENTS / SEGMENTS_PER_TABLE) % SEGMENTS, 500_000);
    let mut segment_bytes: Vec<(u32, u64)> = (0..SEGMENTS_PER_TABLE).map(segment).collect();
    segment_bytes.sort_unstable();
    let fields = TableFields {
        id,
        extent: Extent { location: id * 512, units: 512 },
        parts: TableParts {
            front_bytes: 1 << 20,
            second_unit: 490,
            descriptor_bytes: 130,
            filter_bytes: 60_000,
            index_bytes: 15_000,
        },
        bytes: 2 << 20,
        entries: 40_000,
        tombstones: 300,
        smallest_sequence: id * 40_000,
        largest_sequence: id * 40_000 + 39_999,
        largest_tombstone_version: Version::NONE,
        earliest_expiry: UnixTime::NEVER,
        is_settled: false,
        first_key: key(first),
        last_key: key(last),
        segment_bytes,
    };
    TableMeta::new(&fields, queue)
}

/// The edit that makes a tree of so many tables. The tables of the last level lie side by side; one of a level above covers ten of the level below.
fn whole_tree(tables: u64, queue: &Arc<ReclaimQueue>) -> VersionEdit {
    let mut edit = VersionEdit::default();
    for id in 1..=SEGMENTS {
        let extent = Extent { location: (1 << 40) + u64::from(id) * 65_536, units: 65_536 };
        edit.added_segments.push(SegmentMeta::new(id, extent, queue));
    }
    // Of the last level, and from there upwards.
    let mut count = tables * (MULTIPLIER - 1) / MULTIPLIER;
    let mut keys = KEYS_PER_TABLE;
    let (mut id, mut rest) = (0, tables);
    for level in (1..LEVELS).rev() {
        let here = if level == 1 { rest } else { count.min(rest) };
        for index in 0..here {
            id += 1;
            edit.added_tables.push((level, table(id, index * keys, index * keys + keys - 1, queue)));
        }
        rest -= here;
        (count, keys) = (count / MULTIPLIER, keys * MULTIPLIER);
    }
    edit
}

/// A compaction: a table of a level and all that it overlaps in the next one, replaced by as many.
fn compaction(version: &TreeVersion, random: &mut Prng, queue: &Arc<ReclaimQueue>) -> VersionEdit {
    // Of the two levels above the last one: only there tables are many, and changes lie far apart.
    let level = if random.one_in(10) { LEVELS - 3 } else { LEVELS - 2 };
    let rank = random.below(version.level(level).len() as u64) as usize;
    let input = version.level(level).nth(rank).expect("below the number of tables");
    let ranks = version.overlapping(level + 1, input.first_key(), input.last_key());
    let mut edit = VersionEdit::default();
    let inputs = version.level(level + 1).range(ranks).map(|table| (level + 1, table));
    for (level, table) in inputs.chain([(level, input)]) {
        let first_key = table.first_key().to_vec();
        edit.removed_tables.push(TableRemoval { level, id: table.id(), first_key });
    }
    let number = |key: &[u8]| -> u64 { std::str::from_utf8(&key[4..]).unwrap().parse().unwrap() };
    let (first, last) = (number(input.first_key()), number(input.last_key()));
    let outputs = edit.removed_tables.len() as u64;
    let start = |index: u64| first + (last + 1 - first) * index / outputs;
    for index in 0..outputs {
        let id = version.last_table_id() + 1 + index;
        edit.added_tables.push((level + 1, table(id, start(index), start(index + 1) - 1, queue)));
    }
    edit
}

/// Makes a tree of so many tables and so many iterators on it, with a compaction behind each. REQUIRES: the counting allocator is installed.
pub fn measure(tables: u64, iterators: usize) -> VersionMemory {
    let queue = ReclaimQueue::new();
    let start = thread_held_bytes();
    let edit = whole_tree(tables, &queue);
    let set = VersionSet::new(TreeVersion::default(), queue.clone()).unwrap();
    // Apart from the metadata itself, the edit has a list.
    let added_tables: Vec<Arc<TableMeta>> =
        edit.added_tables.iter().map(|(_, table)| table.clone()).collect();
    let version = set.install(&edit).unwrap();
    drop((edit, version));
    let list_bytes = (added_tables.capacity() * size_of::<Arc<TableMeta>>()) as i64;
    let all = thread_held_bytes() - start - list_bytes;
    drop(added_tables);
    let metadata_bytes = {
        let before = thread_held_bytes();
        let kept: Vec<_> = (1..=1000).map(|id| table(id, id * 1000, id * 1000 + 999, &queue)).collect();
        let list_bytes = (kept.capacity() * size_of::<Arc<TableMeta>>()) as i64;
        (thread_held_bytes() - before - list_bytes) * tables as i64 / 1000
    };
    drop(queue.take());
    assert_eq!(set.current().tables().count() as u64, tables);
    let mut kept: Vec<Arc<TreeVersion>> = Vec::with_capacity(iterators);
    let mut random = Prng::new(1);
    let (mut iterator_bytes, mut replaced_tables) = (0, 0);
    let before = thread_held_bytes();
    for _ in 0..iterators {
        let before = thread_held_bytes();
        kept.push(set.current());
        iterator_bytes = iterator_bytes.max(thread_held_bytes() - before);
        let edit = compaction(&set.current(), &mut random, &queue);
        replaced_tables += edit.removed_tables.len() as u64;
        set.install(&edit).unwrap();
    }
    assert!(queue.take().is_empty(), "an iterator sees every table that is gone");
    let with_iterators = thread_held_bytes() - before;
    assert_eq!(kept[0].tables().count() as u64, tables);
    drop(kept);
    let freed = queue.take();
    assert_eq!(freed.len() as u64, replaced_tables, "with the iterators the tables go");
    drop(freed);
    let held_bytes = with_iterators - (thread_held_bytes() - before);
    let meta_bytes = metadata_bytes / tables as i64;
    VersionMemory {
        metadata_bytes,
        structure_bytes: all - metadata_bytes,
        iterator_bytes,
        held_bytes,
        held_structure_bytes: held_bytes - meta_bytes * replaced_tables as i64,
        replaced_tables,
    }
}
