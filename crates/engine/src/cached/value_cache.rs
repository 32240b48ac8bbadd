//! The values that the cores of a volume keep in memory: bounded, scan-resistant, coherent with the engine behind it.
//!
//! ```text
//!   hash of the key ──▶ shard ──▶ one lock over { entries: key → value, slots: changes in progress, generation }
//! ```
//! In: reads with a lease for their fill, changes of keys. Out: values by reference. A shard's entries are those of
//! `quick_cache`: Clock-PRO with a small cold queue and a history of evicted hashes, so that keys which are read once do not
//! displace those which are read often. It runs without a clock, threads and random numbers: equal calls have equal results.
//!
//! Invariants: entries at their allocated size, with the tables around them, never exceed the configured bytes; values that
//! have left the cache while sockets still send them take at most an eighth of that on top (then nothing is filled); a key
//! that is being changed has no entry. A slot stands for all keys of its hash: a change blocks fills of the few
//! other keys in it, too.
//! Tested below, in `crates/engine/tests/cached_*.rs`, and by the simulator.

use crate::bug_injection::{self, InjectedBug};
use octokv_base::{ByteBudget, Key, SharedBuffer, Version};
use parking_lot::{Mutex, MutexGuard};
use quick_cache::unsync::Cache;
use quick_cache::{Equivalent, Lifecycle, OptionsBuilder, Weighter};
use smallvec::SmallVec;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The fewest bytes of a cache: below, its tables are most of it.
pub const CACHE_BYTES_MIN: u64 = 16 << 10;
/// The bytes of a shard, at least, if there are several.
const SHARD_BYTES_MIN: u64 = 16 << 20;
const SHARDS_LOG2_MAX: u32 = 6;
/// A value is not kept if it takes more than this part of a shard.
const VALUE_SHARE: u64 = 8;
/// Values that have left the cache, but that sockets still send, may take this part of its bytes on top.
const SENDING_SHARE: u64 = 8;
/// The slots of a shard; a power of two.
const SLOTS: usize = 256;
/// The average entry for which the history of evicted hashes is made, in bytes.
const ENTRY_BYTES_EXPECTED: u64 = 4 << 10;
/// What an entry, or an evicted hash, takes in a shard's tables: at most two slots of the slab, which grows by doubling, and
/// of the hash table (5 bytes for each bucket, of which 7/16 to 7/8 are used). A test compares it with the real memory.
const TABLE_BYTES: u64 = 2 * SLAB_SLOT_BYTES + 12;
const SLAB_SLOT_BYTES: u64 = (size_of::<CacheKey>() + size_of::<CachedValue>()) as u64 + 24;

/// A value in the cache.
#[derive(Clone, Debug)]
pub struct CachedValue {
    /// Its bytes, whose checksum was verified when they came in.
    pub bytes: SharedBuffer,
    /// The version of the key.
    pub version: Version,
}

/// The hash of a key in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHash(pub u64);

#[derive(Debug)]
struct CacheKey {
    hash: CacheHash,
    key: Key,
}

struct CacheKeyRef<'a> {
    hash: CacheHash,
    key: &'a [u8],
}

impl Hash for CacheKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash.0);
    }
}

impl PartialEq for CacheKey {
    fn eq(&self, other: &CacheKey) -> bool {
        self.hash == other.hash && self.key == other.key
    }
}

impl Eq for CacheKey {}

impl Hash for CacheKeyRef<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash.0);
    }
}

impl Equivalent<CacheKey> for CacheKeyRef<'_> {
    fn equivalent(&self, other: &CacheKey) -> bool {
        self.hash == other.hash && self.key == other.key.as_bytes()
    }
}

/// Gives the hash that a [`CacheKey`] has.
#[derive(Clone, Debug, Default)]
struct KeptHash(u64);

impl Hasher for KeptHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("a key writes its hash alone");
    }
}

/// The memory of an entry, in bytes.
#[derive(Clone, Debug)]
struct EntryBytes;

impl Weighter<CacheKey, CachedValue> for EntryBytes {
    fn weight(&self, key: &CacheKey, value: &CachedValue) -> u64 {
        entry_bytes(&key.key, value.bytes.len())
    }
}

fn entry_bytes(key: &Key, value_bytes: usize) -> u64 {
    TABLE_BYTES + (key.heap_bytes() + SharedBuffer::allocated_bytes(value_bytes)) as u64
}

/// Collects what a call evicts, to be dropped without the lock.
#[derive(Clone, Debug)]
struct CollectEvicted;

type Evicted = SmallVec<[(CacheKey, CachedValue); 4]>;

impl Lifecycle<CacheKey, CachedValue> for CollectEvicted {
    type RequestState = Evicted;
    fn on_evict(&self, evicted: &mut Evicted, key: CacheKey, value: CachedValue) {
        evicted.push((key, value));
    }
}

/// The keys of one slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Changes that have begun, ever.
    generation: u64,
    /// Changes that have not ended.
    changes: u32,
}

struct Shard {
    entries: Cache<CacheKey, CachedValue, EntryBytes, BuildHasherDefault<KeptHash>, CollectEvicted>,
    slots: Box<[Slot; SLOTS]>,
    hits: u64,
    misses: u64,
    evictions: u64,
}

/// Allows a fill of one key, as long as no change of it has begun since.
#[derive(Clone, Copy, Debug)]
pub struct FillLease {
    hash: CacheHash,
    generation: u64,
}

/// What a read finds.
#[derive(Debug)]
pub enum CacheRead {
    /// The value.
    Hit(CachedValue),
    /// Nothing; the value that the engine has may be filled with a lease.
    Miss(Option<FillLease>),
}

/// A change in progress. Fills of its keys are blocked until [`Change::end`]. If it is dropped instead, they stay blocked:
/// the engine may still apply the change.
#[must_use]
pub struct Change<'a> {
    cache: &'a ValueCache,
    /// `None`: of all keys.
    hash: Option<CacheHash>,
}

/// Statistics of a cache, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Its configured size, in bytes; 0: there is no cache.
    pub capacity_bytes: u64,
    /// Memory of the entries, in bytes.
    pub used_bytes: u64,
    /// The number of entries.
    pub entries: u64,
    /// Reads that an entry served.
    pub hits: u64,
    /// Reads that went to the engine.
    pub misses: u64,
    /// Entries that had to leave for others.
    pub evictions: u64,
}

impl CacheStatistics {
    /// Adds those of another cache.
    pub fn add(&mut self, other: &CacheStatistics) {
        self.capacity_bytes += other.capacity_bytes;
        self.used_bytes += other.used_bytes;
        self.entries += other.entries;
        self.hits += other.hits;
        self.misses += other.misses;
        self.evictions += other.evictions;
    }
}

/// The cache of one volume. See the module header.
pub struct ValueCache {
    capacity_bytes: u64,
    shards: Box<[Mutex<Shard>]>,
    /// The longest value that is kept: the bytes of its entry.
    entry_bytes_max: u64,
    /// All values that are in memory, those included that only sockets still have.
    budget: ByteBudget,
    hash_seed: u64,
}

impl ValueCache {
    /// An empty cache of `capacity_bytes`. Volumes with the same seed place the same keys in the same shards and slots; a
    /// seed that clients do not know keeps them from choosing keys that collide.
    pub fn new(capacity_bytes: u64, hash_seed: u64) -> ValueCache {
        let capacity_bytes = capacity_bytes.max(CACHE_BYTES_MIN);
        let shards_log2 = (capacity_bytes / SHARD_BYTES_MIN).max(1).ilog2().min(SHARDS_LOG2_MAX);
        let shard_bytes = capacity_bytes >> shards_log2;
        let entries_expected = shard_bytes / ENTRY_BYTES_EXPECTED;
        let slots_bytes = (SLOTS * size_of::<Slot>() + size_of::<Shard>()) as u64;
        let history_bytes = entries_expected / 2 * TABLE_BYTES;
        let entries_bytes = shard_bytes - slots_bytes - history_bytes;
        let new_shard = |_| {
            let options = OptionsBuilder::new()
                .estimated_items_capacity(entries_expected as usize)
                .weight_capacity(entries_bytes)
                .ghost_allocation(0.5)
                .shards(1)
                .build()
                .expect("both capacities are given");
            let entries =
                Cache::with_options(options, EntryBytes, BuildHasherDefault::default(), CollectEvicted);
            let slots = Box::new([Slot::default(); SLOTS]);
            Mutex::new(Shard { entries, slots, hits: 0, misses: 0, evictions: 0 })
        };
        ValueCache {
            capacity_bytes,
            shards: (0..1 << shards_log2).map(new_shard).collect(),
            entry_bytes_max: shard_bytes / VALUE_SHARE,
            budget: ByteBudget::new((capacity_bytes + capacity_bytes / SENDING_SHARE) as usize),
            hash_seed,
        }
    }

    /// The hash of a key.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> CacheHash {
        CacheHash(xxh3_64_with_seed(key, self.hash_seed))
    }

    fn shard(&self, hash: CacheHash) -> MutexGuard<'_, Shard> {
        self.shards[hash.0 as usize & (self.shards.len() - 1)].lock()
    }

    /// The value of a key, if it is here. It counts as a hit, but not as a miss.
    #[inline]
    pub fn hit(&self, hash: CacheHash, key: &[u8]) -> Option<CachedValue> {
        self.shard(hash).hit(hash, key)
    }

    /// Reads a key; of a miss, the engine may fill the cache.
    pub fn read(&self, hash: CacheHash, key: &[u8]) -> CacheRead {
        let mut shard = self.shard(hash);
        if let Some(value) = shard.hit(hash, key) {
            return CacheRead::Hit(value);
        }
        shard.misses += 1;
        let slot = *shard.slot(hash);
        let is_allowed = slot.changes == 0 || bug_injection::is_injected(InjectedBug::FillWithoutLease);
        CacheRead::Miss(is_allowed.then_some(FillLease { hash, generation: slot.generation }))
    }

    /// Keeps a value that the engine read after it was leased, unless a change began since or it does not fit.
    pub fn fill(&self, lease: FillLease, key: &Key, bytes: &[u8], version: Version) {
        let FillLease { hash, generation } = lease;
        if entry_bytes(key, bytes.len()) > self.entry_bytes_max {
            return;
        }
        let Some(bytes) = SharedBuffer::copy_of(bytes, &self.budget) else { return };
        let mut evicted = Evicted::new();
        let mut shard = self.shard(hash);
        let slot = *shard.slot(hash);
        let is_current = slot.generation == generation && slot.changes == 0;
        let may_fill = is_current || bug_injection::is_injected(InjectedBug::FillWithoutLease);
        // Another reader of the key may have filled it since.
        if may_fill && !shard.entries.contains_key(&CacheKeyRef { hash, key: key.as_bytes() }) {
            let key = CacheKey { hash, key: key.clone() };
            shard.entries.insert_with_lifecycle(key, CachedValue { bytes, version }, &mut evicted);
            shard.evictions += evicted.len() as u64;
        }
        drop(shard);
    }

    /// Removes a key's entry and blocks fills of it. REQUIRES: called before the engine begins the change.
    pub fn begin_change(&self, hash: CacheHash, key: &[u8]) -> Change<'_> {
        let mut shard = self.shard(hash);
        shard.slot(hash).begin();
        let removed = shard.entries.remove(&CacheKeyRef { hash, key });
        drop(shard);
        drop(removed);
        Change { cache: self, hash: Some(hash) }
    }

    /// [`ValueCache::begin_change`] of every key.
    pub fn begin_change_of_all(&self) -> Change<'_> {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.slots.iter_mut().for_each(Slot::begin);
            shard.entries.clear();
        }
        Change { cache: self, hash: None }
    }

    /// The current statistics.
    pub fn statistics(&self) -> CacheStatistics {
        let mut sum = CacheStatistics { capacity_bytes: self.capacity_bytes, ..CacheStatistics::default() };
        for shard in &self.shards {
            let shard = shard.lock();
            sum.used_bytes += shard.entries.weight();
            sum.entries += shard.entries.len() as u64;
            sum.hits += shard.hits;
            sum.misses += shard.misses;
            sum.evictions += shard.evictions;
        }
        sum
    }

    /// Memory of all values, also of those that only sockets still have, in bytes: at most 9/8 of the capacity.
    pub fn value_bytes(&self) -> u64 {
        self.budget.in_use_bytes() as u64
    }
}

impl Slot {
    fn begin(&mut self) {
        self.generation += 1;
        self.changes += 1;
    }

    fn end(&mut self) {
        assert!(self.changes > 0, "a change ends once");
        self.changes -= 1;
    }
}

impl Shard {
    /// The slot of a hash: other bits of it than those that select shard and bucket.
    fn slot(&mut self, hash: CacheHash) -> &mut Slot {
        &mut self.slots[(hash.0 >> 40) as usize % SLOTS]
    }

    #[inline]
    fn hit(&mut self, hash: CacheHash, key: &[u8]) -> Option<CachedValue> {
        let value = self.entries.get(&CacheKeyRef { hash, key })?.clone();
        self.hits += 1;
        Some(value)
    }
}

impl Change<'_> {
    /// The change has ended: the engine applied it, or will never apply it.
    pub fn end(self) {
        match self.hash {
            Some(hash) => self.cache.shard(hash).slot(hash).end(),
            None => {
                for shard in &self.cache.shards {
                    shard.lock().slots.iter_mut().for_each(Slot::end);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::key_of;
    use octokv_base::Prng;

    fn read(cache: &ValueCache, key: &Key) -> CacheRead {
        cache.read(cache.hash(key.as_bytes()), key.as_bytes())
    }

    fn change(cache: &ValueCache, key: &Key) {
        cache.begin_change(cache.hash(key.as_bytes()), key.as_bytes()).end();
    }

    /// Reads a key as an engine's reader does. Whether it was a hit.
    fn read_through(cache: &ValueCache, key: &Key, bytes: &[u8]) -> bool {
        match read(cache, key) {
            CacheRead::Hit(value) => {
                assert_eq!(&value.bytes[..], bytes);
                true
            }
            CacheRead::Miss(lease) => {
                cache.fill(lease.expect("nothing changes"), key, bytes, Version::NONE);
                false
            }
        }
    }

    #[test]
    fn a_fill_succeeds_only_if_no_change_of_its_key_began_since() {
        let cache = ValueCache::new(CACHE_BYTES_MIN, 1);
        let key = key_of(1);
        let hash = cache.hash(key.as_bytes());
        let lease = |found: CacheRead| match found {
            CacheRead::Miss(lease) => lease,
            CacheRead::Hit(_) => panic!("a hit"),
        };
        let before = lease(read(&cache, &key)).expect("no change");
        let first = cache.begin_change(hash, key.as_bytes());
        assert!(lease(read(&cache, &key)).is_none(), "a change is in progress");
        cache.fill(before, &key, b"before", Version::NONE);
        let second = cache.begin_change(hash, key.as_bytes());
        first.end();
        assert!(lease(read(&cache, &key)).is_none(), "the second is");
        second.end();
        cache.fill(before, &key, b"before", Version::NONE);
        let after = lease(read(&cache, &key)).expect("both have ended");
        cache.fill(after, &key, b"after", Version::NONE);
        cache.fill(after, &key, b"after", Version::NONE);
        assert_eq!(&cache.hit(hash, key.as_bytes()).expect("filled").bytes[..], b"after");
        assert_eq!(cache.statistics().evictions, 0, "a second reader replaces nothing");
        let all = cache.begin_change_of_all();
        assert!(cache.hit(hash, key.as_bytes()).is_none());
        cache.fill(after, &key, b"after", Version::NONE);
        assert!(lease(read(&cache, &key)).is_none());
        all.end();
        // A change that is dropped may still be applied.
        let again = lease(read(&cache, &key)).expect("it has ended");
        cache.fill(again, &key, b"again", Version::NONE);
        drop(cache.begin_change(hash, key.as_bytes()));
        assert!(lease(read(&cache, &key)).is_none(), "nor is the entry left");
    }

    #[test]
    fn memory_is_bounded_under_values_of_random_sizes_with_the_tables_around_them() {
        for capacity_bytes in [64 << 10, 1 << 20, 40 << 20] {
            let cache = ValueCache::new(capacity_bytes, 2);
            let (mut random, bytes) = (Prng::new(capacity_bytes), vec![7; 1 << 20]);
            // What sockets still send.
            let mut sending = std::collections::VecDeque::new();
            for round in 0..60_000 {
                let long_key = Key::new(&[random.below(200) as u8; 100]).expect("within the limit");
                let key = if random.one_in(10) { long_key } else { key_of(random.below(40_000)) };
                let most = if random.one_in(50) { bytes.len() as u64 } else { 300 };
                match read(&cache, &key) {
                    CacheRead::Hit(value) => sending.push_back(value),
                    CacheRead::Miss(lease) => {
                        let value = &bytes[..random.below(most) as usize];
                        cache.fill(lease.expect("no change"), &key, value, Version::NONE);
                    }
                }
                if sending.len() > 200 {
                    sending.pop_front();
                }
                if random.one_in(30) {
                    change(&cache, &key);
                }
                assert!(cache.value_bytes() <= capacity_bytes + capacity_bytes / SENDING_SHARE);
                if round % 500 == 0 {
                    let statistics = cache.statistics();
                    assert!(statistics.used_bytes <= capacity_bytes, "{statistics:?}");
                    let tables = cache.shards.iter().map(|shard| {
                        let shard = shard.lock();
                        let entries = shard.entries.iter();
                        let values: usize = entries
                            .map(|(key, value)| {
                                key.key.heap_bytes() + SharedBuffer::allocated_bytes(value.bytes.len())
                            })
                            .sum();
                        values + shard.entries.memory_used().total() + SLOTS * size_of::<Slot>()
                    });
                    let memory = tables.sum::<usize>() as u64;
                    assert!(memory <= capacity_bytes, "{memory} of {capacity_bytes}: {statistics:?}");
                }
            }
            let statistics = cache.statistics();
            assert!(statistics.evictions > 1_000 && statistics.hits > 100, "{statistics:?}");
        }
    }

    #[test]
    fn nothing_is_filled_while_sockets_send_too_much_that_has_left() {
        let cache = ValueCache::new(1 << 20, 3);
        let mut sending = Vec::new();
        for index in 0..10_000 {
            let key = key_of(index);
            read_through(&cache, &key, &[1; 1_000]);
            sending.extend(cache.hit(cache.hash(key.as_bytes()), key.as_bytes()));
            change(&cache, &key);
        }
        let bound = (1 << 20) + (1 << 17);
        assert!((bound - 2_000..=bound).contains(&cache.value_bytes()), "{}", cache.value_bytes());
        assert!(sending.len() > 1_000 && sending.len() < 1_180, "{}", sending.len());
        drop(sending);
        assert_eq!(cache.value_bytes(), 0);
        assert!(!read_through(&cache, &key_of(0), b"value") && read_through(&cache, &key_of(0), b"value"));
    }

    #[test]
    fn a_scan_of_ten_times_the_cache_does_not_displace_the_keys_that_are_read_often() {
        let cache = ValueCache::new(4 << 20, 4);
        let mut random = Prng::new(5);
        // The hot keys take half of the cache.
        let mut hot_hits = |reads: u64| {
            let hits = (0..reads).filter(|_| read_through(&cache, &key_of(random.below(500)), &[1; 4_000]));
            hits.count() as u64 * 100 / reads
        };
        hot_hits(5_000);
        assert_eq!(hot_hits(5_000), 100);
        let mut hits = Vec::new();
        for scanned in 0..10_u64 {
            for at in 0..1_000 {
                read_through(&cache, &key_of(10_000 + scanned * 1_000 + at), &[2; 4_000]);
            }
            hits.push(hot_hits(500));
        }
        assert!(hits.iter().all(|&hits| hits >= 95), "hit rates of the hot keys, in percent: {hits:?}");
    }

    #[test]
    fn a_value_that_would_displace_much_is_not_kept_and_a_short_one_is() {
        let cache = ValueCache::new(1 << 20, 6);
        let long = vec![1; 1 << 17];
        assert!(!read_through(&cache, &key_of(1), &long) && !read_through(&cache, &key_of(1), &long));
        let short = vec![1; 1 << 16];
        assert!(!read_through(&cache, &key_of(2), &short) && read_through(&cache, &key_of(2), &short));
        assert!(!read_through(&cache, &key_of(3), b"") && read_through(&cache, &key_of(3), b""));
        let statistics = cache.statistics();
        assert_eq!((statistics.hits, statistics.misses, statistics.entries), (2, 4, 2));
    }

    #[test]
    fn equal_calls_have_equal_results() {
        let run = || {
            let (cache, mut random) = (ValueCache::new(64 << 10, 7), Prng::new(8));
            let hits: Vec<bool> =
                (0..5_000).map(|_| read_through(&cache, &key_of(random.below(100)), &[1; 1_000])).collect();
            (hits, cache.statistics())
        };
        assert_eq!(run(), run());
    }
}
