//! What the cores of a volume keep in memory within a bound in bytes: indexes, filters and data blocks of tables, and the records of values that lie in segments.
//!
//! In: parts and records that were read and verified. Out: the same, by reference. The replacement policy is that of `quick_cache`: Clock-PRO, so
//! that blocks which a scan reads once do not displace those which are read often. It runs without a clock, threads and random
//! numbers.
//!
//! A block that a scan reads ahead must stay in the cache until the scan reaches it. So a part of the cache is for blocks that were used at most once
//! (`HOT_PART`). When the scan reaches the block, that does not count as a second use ([`BlockCache::peek`]): otherwise scans would evict blocks that are read often.
//!
//! Invariants: the parts and records at their allocated size, with the tables around them, never exceed the configured bytes; none is ever
//! replaced by another, since neither a table nor the record of a value is changed, and their identifiers are not used again. So changes of keys need not
//! be told to the cache: a value is found by the address in the newest entry of its key. A reader keeps what it has while the cache gives it up; values that sockets still send
//! take about an eighth of the cache on top, then nothing is added to it. Tested below, by the tests of whole tables and in `crates/engine/tests/lsm_value_cache.rs`.

use super::filter::TableFilter;
use super::index::TableIndex;
use super::stored_entry::DataBlock;
use crate::lsm::entry::ValueAddress;
use octokv_base::prng::mix64;
use octokv_base::{ByteBudget, SharedBuffer};
use quick_cache::sync::Cache;
use quick_cache::{Lifecycle, OptionsBuilder, Weighter};
use smallvec::SmallVec;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The fewest bytes of a cache: below, its tables are most of it.
pub const BLOCK_CACHE_BYTES_MIN: u64 = 16 << 10;
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
/// A record is not kept if it takes more than this part of a shard.
const RECORD_SHARE: u64 = 8;
/// Records that have left the cache, but that sockets still send, may take this part of its bytes on top.
const SENDING_SHARE: u64 = 8;

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
            TablePart::Data(block) => block.memory_bytes(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockCacheKey {
    /// The table, or the segment of a record.
    owner: u64,
    part: u32,
    is_record: bool,
}

impl BlockCacheKey {
    /// Offsets are below [`TABLE_BYTES_MAX`](super::info::TABLE_BYTES_MAX).
    fn of_part(table_id: u64, part: PartName) -> BlockCacheKey {
        let part = match part {
            PartName::Index => u32::MAX,
            PartName::Filter => u32::MAX - 1,
            PartName::Data(offset) => offset,
        };
        BlockCacheKey { owner: table_id, part, is_record: false }
    }

    fn of_record(address: ValueAddress) -> BlockCacheKey {
        BlockCacheKey { owner: u64::from(address.segment), part: address.unit, is_record: true }
    }
}

impl Hash for BlockCacheKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let kind = u64::from(self.is_record) << 32;
        state.write_u64(mix64(mix64(self.owner).wrapping_add(u64::from(self.part) | kind)));
    }
}

#[derive(Clone)]
enum CachedItem {
    Part(TablePart),
    Record(SharedBuffer),
}

impl CachedItem {
    fn into_part(self) -> Option<TablePart> {
        match self {
            CachedItem::Part(part) => Some(part),
            CachedItem::Record(_) => unreachable!("the key of a part"),
        }
    }
}

/// Gives the hash that a [`BlockCacheKey`] computes.
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

/// The memory of an item, in bytes.
#[derive(Clone, Debug)]
struct ItemBytes;

fn record_weight(record_bytes: usize) -> u64 {
    PART_OVERHEAD_BYTES + SharedBuffer::allocated_bytes(record_bytes) as u64
}

impl Weighter<BlockCacheKey, CachedItem> for ItemBytes {
    fn weight(&self, _key: &BlockCacheKey, item: &CachedItem) -> u64 {
        match item {
            CachedItem::Part(part) => PART_OVERHEAD_BYTES + part.bytes() as u64,
            CachedItem::Record(record) => record_weight(record.len()),
        }
    }
}

/// Counts the bytes of the records in the cache, as [`ByteBudget`] does.
#[derive(Clone, Debug, Default)]
struct RecordCounter(Arc<AtomicUsize>);

impl Lifecycle<BlockCacheKey, CachedItem> for RecordCounter {
    type RequestState = Displaced;
    fn on_evict(&self, displaced: &mut Displaced, _key: BlockCacheKey, item: CachedItem) {
        if let CachedItem::Record(record) = &item {
            self.0.fetch_sub(SharedBuffer::allocated_bytes(record.len()), Ordering::Relaxed);
        }
        displaced.0.push(item);
    }
}

/// What has left the cache for something else. It is dropped outside of the cache's locks.
#[derive(Default)]
pub(super) struct Displaced(SmallVec<[CachedItem; 2]>);

impl Displaced {
    /// The data blocks.
    pub(super) fn into_blocks(self) -> impl Iterator<Item = Arc<DataBlock>> {
        self.0.into_iter().filter_map(|item| match item {
            CachedItem::Part(TablePart::Data(block)) => Some(block),
            CachedItem::Part(_) | CachedItem::Record(_) => None,
        })
    }
}

/// The cache of one volume, for all its tables, value segments and cores.
pub struct BlockCache {
    items: Cache<BlockCacheKey, CachedItem, ItemBytes, BuildHasherDefault<PartHasher>, RecordCounter>,
    record_counter: RecordCounter,
    capacity_bytes: u64,
    /// The most bytes of a record with what it takes besides.
    record_weight_max: u64,
    record_budget: ByteBudget,
}

impl BlockCache {
    /// An empty cache of `capacity_bytes`, or [`BLOCK_CACHE_BYTES_MIN`] if that is more.
    pub fn new(capacity_bytes: u64) -> BlockCache {
        let capacity_bytes = capacity_bytes.max(BLOCK_CACHE_BYTES_MIN);
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
        let record_counter = RecordCounter::default();
        let items =
            Cache::with_options(options, ItemBytes, BuildHasherDefault::default(), record_counter.clone());
        BlockCache {
            items,
            record_counter,
            capacity_bytes,
            record_weight_max: (capacity_bytes >> shards_log2) / RECORD_SHARE,
            record_budget: ByteBudget::new((capacity_bytes + capacity_bytes / SENDING_SHARE) as usize),
        }
    }

    /// A part of a table, if it is here.
    pub fn get(&self, table_id: u64, part: PartName) -> Option<TablePart> {
        self.items.get(&BlockCacheKey::of_part(table_id, part)).and_then(CachedItem::into_part)
    }

    /// A part of a table, if it is here, for the scan that has read it ahead. Unlike a read, this does not keep it here longer.
    pub fn peek(&self, table_id: u64, part: PartName) -> Option<TablePart> {
        self.items.peek(&BlockCacheKey::of_part(table_id, part)).and_then(CachedItem::into_part)
    }

    /// Whether a part is here. Unlike a read, this does not keep it here longer.
    pub fn has(&self, table_id: u64, part: PartName) -> bool {
        self.items.contains_key(&BlockCacheKey::of_part(table_id, part))
    }

    /// Keeps a part of a table, if it fits.
    pub fn insert(&self, table_id: u64, name: PartName, part: TablePart) {
        drop(self.insert_displacing(table_id, name, part));
    }

    /// The same. Gives what has left the cache for it.
    pub(super) fn insert_displacing(&self, table_id: u64, name: PartName, part: TablePart) -> Displaced {
        let mut displaced = Displaced::default();
        if !self.is_lent_out() {
            let (key, item) = (BlockCacheKey::of_part(table_id, name), CachedItem::Part(part));
            self.items.insert_with_lifecycle(key, item, &mut displaced);
        }
        displaced
    }

    /// The record at an address, header and key and value, if it is here.
    pub fn record(&self, address: ValueAddress) -> Option<SharedBuffer> {
        match self.items.get(&BlockCacheKey::of_record(address))? {
            CachedItem::Record(record) => Some(record),
            CachedItem::Part(_) => unreachable!("the key of a record"),
        }
    }

    /// Keeps a copy of the record at an address, if it fits.
    pub fn insert_record(&self, address: ValueAddress, record: &[u8]) {
        if record_weight(record.len()) <= self.record_weight_max
            && !self.is_lent_out()
            && let Some(record) = SharedBuffer::copy_of(record, &self.record_budget)
        {
            self.record_counter.0.fetch_add(SharedBuffer::allocated_bytes(record.len()), Ordering::Relaxed);
            self.items.insert(BlockCacheKey::of_record(address), CachedItem::Record(record));
        }
    }

    /// Whether records that have left the cache, but that sockets still send, have as many bytes as they may have beside it.
    fn is_lent_out(&self) -> bool {
        let cached_bytes = self.record_counter.0.load(Ordering::Relaxed);
        let lent_bytes = self.record_budget.in_use_bytes().saturating_sub(cached_bytes);
        lent_bytes as u64 >= (self.capacity_bytes / SENDING_SHARE).max(1)
    }

    /// Gives up index and filter of a table that no version refers to any more. Its data blocks leave when others need the space, as do the records of a segment.
    pub fn forget_table(&self, table_id: u64) {
        for part in [PartName::Index, PartName::Filter] {
            self.items.remove(&BlockCacheKey::of_part(table_id, part));
        }
    }

    /// The memory of the parts and records, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.items.weight()
    }

    /// The bound for [`BlockCache::used_bytes`], which includes the history of evicted parts.
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
        let cache = BlockCache::new(1 << 20);
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
        let cache = BlockCache::new(0);
        cache.insert(1, PartName::Filter, filter(100));
        cache.insert(1, PartName::Index, filter(20_000));
        assert!(cache.has(1, PartName::Filter) && !cache.has(1, PartName::Index));
        cache.forget_table(1);
        assert!(!cache.has(1, PartName::Filter));
        assert_eq!(cache.used_bytes(), 0);
    }

    #[test]
    fn records_share_the_bound_with_parts_and_are_found_by_their_address() {
        let cache = BlockCache::new(1 << 20);
        let address = |segment, unit| ValueAddress { segment, unit, value_bytes: 20_000 };
        for number in 0..500 {
            cache.insert_record(address(number % 7, number), &[number as u8; 20_000]);
            cache.insert(u64::from(number), PartName::Filter, filter(2_000));
            assert!(cache.used_bytes() <= cache.capacity_bytes());
        }
        let kept: Vec<u32> = (0..500).filter(|&it| cache.record(address(it % 7, it)).is_some()).collect();
        assert!(!kept.is_empty());
        for number in kept {
            let value = cache.record(address(number % 7, number)).expect("it is here");
            assert_eq!(&value[..], [number as u8; 20_000]);
            assert!(cache.record(address(number % 7 + 7, number)).is_none(), "another segment");
        }
        cache.insert_record(address(9, 9), &[0; 200_000]);
        assert!(cache.record(address(9, 9)).is_none(), "more than an eighth of a shard");
    }

    #[test]
    fn records_that_are_in_use_outside_are_bounded() {
        let cache = BlockCache::new(1 << 20);
        let address = |unit| ValueAddress { segment: 1, unit, value_bytes: 50_000 };
        let mut outside = Vec::new();
        for unit in 0..100 {
            cache.insert_record(address(unit), &[1; 50_000]);
            outside.extend(cache.record(address(unit)));
        }
        assert!((15..=24).contains(&outside.len()), "{} of 50,000 B", outside.len());
        // Blocks do not take the place of records that are still in memory.
        (0..1_000).for_each(|table_id| cache.insert(table_id, PartName::Filter, filter(2_900)));
        let outside_bytes: usize = outside.iter().map(|record| record.len()).sum();
        let cached = (0..100).filter(|&unit| cache.record(address(unit)).is_some()).count();
        let lent_bytes = outside_bytes as u64 - cached as u64 * 50_000;
        let all_bytes = cache.used_bytes() + lent_bytes;
        assert!(all_bytes < (1 << 20) / 8 * 9 + 100_000, "{all_bytes} B");
        drop(outside);
        cache.insert_record(address(100), &[1; 50_000]);
        assert!(cache.record(address(100)).is_some());
    }

    #[test]
    fn what_scans_read_ahead_stays_until_they_come_to_it_and_displaces_nothing_that_is_used() {
        let (cache, part) = (BlockCache::new(1 << 20), || filter(2_900));
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
