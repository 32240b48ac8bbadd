//! The parts of tables that the cores of a volume keep in memory: indexes, filters and data blocks, within a bound in bytes.
//!
//! In: parts that were read and verified. Out: the same, by reference. The replacement policy is that of `quick_cache`: Clock-PRO, so
//! that blocks which a scan reads once do not displace those which are read often. It runs without a clock, threads and random
//! numbers.
//!
//! A block that a scan reads ahead must stay in the cache until the scan reaches it. So a part of the cache is for blocks that were used at most once
//! (`HOT_PART`). When the scan reaches the block, that does not count as a second use ([`TableCache::peek`]): otherwise scans would evict blocks that are read often.
//!
//! Invariants: the parts at their allocated size, with the tables around them, never exceed the configured bytes; a part is never
//! replaced by another, since a table is never changed and its identifier is never used again. A reader keeps the part that it has
//! while the cache gives it up. Tested below and by the tests of whole tables.

use super::filter::TableFilter;
use super::index::TableIndex;
use super::stored_entry::DataBlock;
use octokv_base::prng::mix64;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

/// The fewest bytes of a cache: below, its tables are most of it.
pub const TABLE_CACHE_BYTES_MIN: u64 = 16 << 10;
/// The bytes of a shard, at least, if there are several. An index or a filter that is longer than a shard is not kept.
const SHARD_BYTES_MIN: u64 = 16 << 20;
const SHARDS_LOG2_MAX: u32 = 6;
/// The average part for which the history of evicted parts is made, in bytes.
const PART_BYTES_EXPECTED: u64 = 4 << 10;
/// What a part takes besides its bytes: slots in the tables of the cache, and the counters and lengths around its bytes.
const PART_OVERHEAD_BYTES: u64 = 192;

/// The part of the cache for what was used more than once. The rest has to hold what all scans have read ahead and not come to: with the default of
/// the library, 3 %, a third of the reads of eight scans of 1 MiB in 64 MiB was for blocks that were evicted before.
const HOT_PART: f64 = 0.75;

/// Which part of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartName {
    /// Its index.
    Index,
    /// Its filter.
    Filter,
    /// The data block at this offset.
    Data(u32),
}

/// A part of a table in memory. Clones share it.
#[derive(Clone, Debug)]
pub enum TablePart {
    /// The index.
    Index(Arc<TableIndex>),
    /// The filter; `None` if both copies are damaged.
    Filter(Option<Arc<TableFilter>>),
    /// A data block.
    Data(Arc<DataBlock>),
}

impl TablePart {
    fn bytes(&self) -> usize {
        match self {
            TablePart::Index(index) => index.bytes().len(),
            TablePart::Filter(filter) => filter.as_ref().map_or(0, |filter| filter.bytes().len()),
            TablePart::Data(block) => block.bytes().len(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartKey {
    table_id: u64,
    part: u32,
}

impl PartKey {
    /// Offsets are below [`TABLE_BYTES_MAX`](super::info::TABLE_BYTES_MAX).
    fn new(table_id: u64, part: PartName) -> PartKey {
        let part = match part {
            PartName::Index => u32::MAX,
            PartName::Filter => u32::MAX - 1,
            PartName::Data(offset) => offset,
        };
        PartKey { table_id, part }
    }
}

impl Hash for PartKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(mix64(mix64(self.table_id).wrapping_add(u64::from(self.part))));
    }
}

/// Gives the hash that a [`PartKey`] computes.
#[derive(Clone, Debug, Default)]
struct PartHasher(u64);

impl Hasher for PartHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("a key writes one number");
    }
}

/// The memory of a part, in bytes.
#[derive(Clone, Debug)]
struct PartBytes;

impl Weighter<PartKey, TablePart> for PartBytes {
    fn weight(&self, _key: &PartKey, part: &TablePart) -> u64 {
        PART_OVERHEAD_BYTES + part.bytes() as u64
    }
}

/// The cache of one volume, for all its tables and cores.
pub struct TableCache {
    parts: Cache<PartKey, TablePart, PartBytes, BuildHasherDefault<PartHasher>>,
    capacity_bytes: u64,
}

impl TableCache {
    /// An empty cache of `capacity_bytes`, or [`TABLE_CACHE_BYTES_MIN`] if that is more.
    pub fn new(capacity_bytes: u64) -> TableCache {
        let capacity_bytes = capacity_bytes.max(TABLE_CACHE_BYTES_MIN);
        let shards_log2 = (capacity_bytes / SHARD_BYTES_MIN).max(1).ilog2().min(SHARDS_LOG2_MAX);
        let parts_expected = capacity_bytes / PART_BYTES_EXPECTED;
        let history_bytes = parts_expected / 2 * PART_OVERHEAD_BYTES;
        let options = OptionsBuilder::new()
            .estimated_items_capacity(parts_expected as usize)
            .weight_capacity(capacity_bytes - history_bytes)
            .hot_allocation(HOT_PART)
            .ghost_allocation(0.5)
            .shards(1 << shards_log2)
            .build()
            .expect("both capacities are given");
        let parts = Cache::with_options(
            options,
            PartBytes,
            BuildHasherDefault::default(),
            DefaultLifecycle::default(),
        );
        TableCache { parts, capacity_bytes }
    }

    /// A part of a table, if it is here.
    pub fn get(&self, table_id: u64, part: PartName) -> Option<TablePart> {
        self.parts.get(&PartKey::new(table_id, part))
    }

    /// A part of a table, if it is here, for the scan that has read it ahead. Unlike a read, this does not keep it here longer.
    pub fn peek(&self, table_id: u64, part: PartName) -> Option<TablePart> {
        self.parts.peek(&PartKey::new(table_id, part))
    }

    /// Whether a part is here. Unlike a read, this does not keep it here longer.
    pub fn has(&self, table_id: u64, part: PartName) -> bool {
        self.parts.contains_key(&PartKey::new(table_id, part))
    }

    /// Keeps a part of a table, if it fits.
    pub fn insert(&self, table_id: u64, name: PartName, part: TablePart) {
        self.parts.insert(PartKey::new(table_id, name), part);
    }

    /// Gives up index and filter of a table that no version refers to any more. Its data blocks leave when others need the space.
    pub fn forget_table(&self, table_id: u64) {
        for part in [PartName::Index, PartName::Filter] {
            self.parts.remove(&PartKey::new(table_id, part));
        }
    }

    /// The memory of the parts, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.parts.weight()
    }

    /// The bound for [`TableCache::used_bytes`], which includes the history of evicted parts.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::filter::FilterHash;
    use super::*;

    fn filter(keys: u64) -> TablePart {
        let hashes: Vec<FilterHash> = (0..keys).map(|key| FilterHash::of(&key.to_le_bytes())).collect();
        TablePart::Filter(Some(Arc::new(TableFilter::new(&hashes))))
    }

    #[test]
    fn parts_stay_within_the_bound_and_in_their_place() {
        let cache = TableCache::new(1 << 20);
        for table_id in 0..2000 {
            cache.insert(table_id, PartName::Filter, filter(table_id % 50 * 51));
            assert!(cache.used_bytes() <= cache.capacity_bytes());
            assert!(cache.get(table_id, PartName::Index).is_none(), "another part");
            assert!(cache.get(table_id, PartName::Data(0)).is_none(), "another part");
        }
        assert!(cache.used_bytes() > 3 << 18, "{} bytes are used", cache.used_bytes());
        let kept = (0..2000).filter(|&table_id| cache.has(table_id, PartName::Filter));
        for table_id in kept {
            let part = cache.get(table_id, PartName::Filter).expect("it is here");
            assert_eq!(part.bytes() as u64, TableFilter::bytes_for(table_id % 50 * 51));
        }
    }

    #[test]
    fn a_part_that_is_longer_than_the_cache_is_not_kept() {
        let cache = TableCache::new(0);
        cache.insert(1, PartName::Filter, filter(100));
        cache.insert(1, PartName::Index, filter(20_000));
        assert!(cache.has(1, PartName::Filter) && !cache.has(1, PartName::Index));
        cache.forget_table(1);
        assert!(!cache.has(1, PartName::Filter));
        assert_eq!(cache.used_bytes(), 0);
    }

    #[test]
    fn what_scans_read_ahead_stays_until_they_come_to_it_and_displaces_nothing_that_is_used() {
        let (cache, part) = (TableCache::new(1 << 20), || filter(2_900));
        let used: Vec<u64> = (0..40).collect();
        for _ in 0..3 {
            for &table_id in &used {
                if cache.get(table_id, PartName::Filter).is_none() {
                    cache.insert(table_id, PartName::Filter, part());
                }
            }
        }
        for scan in 0..100 {
            let ahead = (scan + 1) * 1_000..(scan + 1) * 1_000 + 32;
            ahead.clone().for_each(|table_id| cache.insert(table_id, PartName::Filter, part()));
            let lost = ahead.filter(|&table_id| cache.peek(table_id, PartName::Filter).is_none()).count();
            assert_eq!(lost, 0, "scan {scan} of an eighth of the cache");
        }
        let kept = used.iter().filter(|&&table_id| cache.has(table_id, PartName::Filter)).count();
        assert!(kept >= 38, "{kept} of {} that were used are here", used.len());
    }
}
