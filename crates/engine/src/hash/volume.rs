//! The state of an open volume that all cores share: index, free space, journal.
//!
//! Each part has its own lock, held for a few memory accesses and never across an await.

use super::compaction_state::Compaction;
use super::index::{Candidates, IndexEntry, RecordRef, TAG_BITS, is_fingerprint_of};
use super::index_partition::IndexPartition;
use super::journal::IndexChange;
use super::superblock::HashSuperblock;
use crate::bug_injection::{self, InjectedBug};
use crate::common::abandoned::AbandonedCount;
use crate::common::allocator::{Extent, SpaceAllocator};
use crate::common::commit_queue::{CommitQueue, JournalConfig};
use crate::common::epoch::Epochs;
use crate::common::held_numbers::SHARD_BITS;
use crate::common::journal::JournalPosition;
use crate::common::key_locks::{KeyGuard, KeyLocks, KeyWaiter};
use crate::common::prepare::Preparer;
use crate::common::record::{
    self, NewRecord, RecordError, RecordFlags, RecordFormat, RecordHeader, RecordId, RecordMeta,
    UncheckedRecord,
};
use crate::common::volume_layout::VolumeLayout;
use crate::direct::FoundEntry;
use crate::{EngineStatistics, HashKind, OpenConfig, VolumeInfo, WallClock};
use octokv_base::map::FxHashSet;
use octokv_base::{Key, Lba, RingPosition};
use parking_lot::Mutex;
use sha1::{Digest, Sha1};
use smallvec::{Array, SmallVec};
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Shards of the key locks: cores that write different keys rarely contend.
const KEY_LOCK_SHARDS: usize = 1 << SHARD_BITS;

/// What space is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceFor {
    /// A value.
    Value,
    /// A tombstone of a key without a record.
    NewTombstone,
    /// A tombstone in place of a record.
    Tombstone,
    /// The same, of the only delete that may take the last units.
    LastTombstone,
}

/// Free units that only one tombstone at a time takes. Many deletes at once would take all before any gives its old record back.
const LAST_UNITS: u64 = 8;

/// Free units that only tombstones take: a delete of a key that has a version needs space before it frees some.
fn tombstone_units(superblock: &HashSuperblock, volatile: bool) -> u64 {
    match superblock.format {
        RecordFormat::V2 if !volatile => (superblock.layout.data_units / 1024).clamp(LAST_UNITS, 1024),
        RecordFormat::V1 | RecordFormat::V2 => 0,
    }
}

/// In a cache line of its own, since all cores read the fields beside it for every request.
#[repr(align(64))]
struct NextSequence(AtomicU64);

/// An open volume.
pub struct HashVolume {
    pub(super) superblock: Mutex<HashSuperblock>,
    /// The superblock as it was at the opening, for the fields that do not change.
    constants: HashSuperblock,
    unit_blocks: u64,
    /// Whether the device is volatile, so that there is no journal.
    pub(super) volatile: bool,
    pub(super) partitions: Box<[IndexPartition]>,
    /// The locks of keys that are being written, by [`HashVolume::key_lock`].
    key_locks: [KeyLocks; KEY_LOCK_SHARDS],
    pub(super) space: SpaceAllocator,
    pub(super) epochs: Epochs,
    pub(super) commits: CommitQueue<IndexChange>,
    next_sequence: NextSequence,
    /// Cores among which keys have owners ([`HashVolume::assign_owner_cores`]); 0 if any core may run any operation.
    owner_cores: AtomicUsize,
    used_bytes: Arc<AtomicU64>,
    pub(super) checkpoints: AtomicU64,
    checkpoint_attempts: AtomicU64,
    /// Group commit's: of checkpoints and deferred flushes.
    pub(super) maintenance_locks: KeyLocks,
    /// Operations of all cores whose callers dropped them.
    pub(super) abandoned: AbandonedCount,
    /// What was never written of the device, until all of it is; `None` if nothing is prepared.
    pub(super) preparer: Mutex<Option<Preparer>>,
    pub(super) prepared_bytes: AtomicU64,
    /// The clock of expiry.
    pub(super) clock: WallClock,
    /// Locations of records whose lists of pieces could not be read at the opening: those pieces were not marked as used.
    pub(super) lost_pieces: Mutex<FxHashSet<u64>>,
    pub(super) compaction: Compaction,
    /// Free units that only tombstones take, so that a full volume can be emptied.
    tombstone_units: u64,
}

/// The recovered parts of a volume.
pub(super) struct VolumeState {
    pub(super) partitions: Box<[IndexPartition]>,
    pub(super) space: SpaceAllocator,
    pub(super) position: JournalPosition,
    /// Locations of records whose pieces are not known.
    pub(super) lost_pieces: FxHashSet<u64>,
    /// Entries of the index whose values are in pieces.
    pub(super) values_in_pieces: u64,
}

impl HashVolume {
    pub(super) fn new(
        superblock: HashSuperblock,
        state: VolumeState,
        block_bytes: u32,
        volatile: bool,
        config: OpenConfig,
    ) -> Arc<HashVolume> {
        let used = (state.space.units() - state.space.free_units()) * u64::from(superblock.layout.unit_bytes);
        Arc::new(HashVolume {
            constants: superblock,
            unit_blocks: u64::from(superblock.layout.unit_bytes / block_bytes),
            volatile,
            partitions: state.partitions,
            key_locks: std::array::from_fn(|_| KeyLocks::default()),
            space: state.space,
            epochs: Epochs::new(config.cores, superblock.layout.data_units),
            commits: CommitQueue::new(
                state.position,
                JournalConfig {
                    ring_units: superblock.layout.journal_units,
                    unit_bytes: superblock.layout.unit_bytes,
                    volume_id: superblock.volume_id,
                    incarnation: superblock.incarnation,
                    durability: config.durability,
                    record_units: superblock.layout.data_units,
                },
            ),
            next_sequence: NextSequence(AtomicU64::new(u64::from(superblock.incarnation) << 40)),
            owner_cores: AtomicUsize::new(0),
            used_bytes: Arc::new(AtomicU64::new(used)),
            checkpoints: AtomicU64::new(0),
            checkpoint_attempts: AtomicU64::new(0),
            maintenance_locks: KeyLocks::default(),
            abandoned: AbandonedCount::default(),
            preparer: Mutex::new(None),
            prepared_bytes: AtomicU64::new(0),
            clock: config.clock,
            lost_pieces: Mutex::new(state.lost_pieces),
            compaction: Compaction::new(config.compact_bytes_per_second, state.values_in_pieces),
            tombstone_units: tombstone_units(&superblock, volatile),
            superblock: Mutex::new(superblock),
        })
    }

    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            id: self.constants.volume_id,
            value_bytes_max: self.value_bytes_max(),
            capacity_bytes: self.capacity_bytes(),
            record_layout: record::LAYOUT,
            has_iterators: false,
        }
    }
    pub(super) fn value_bytes_max(&self) -> usize {
        self.constants.value_bytes_max as usize
    }
    fn capacity_bytes(&self) -> u64 {
        self.space.units() * u64::from(self.constants.layout.unit_bytes)
    }
    pub(super) fn used_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.used_bytes)
    }
    pub(super) fn unit_bytes(&self) -> usize {
        self.constants.layout.unit_bytes as usize
    }
    pub(super) fn lba(&self, location: u64) -> Lba {
        Lba(location * self.unit_blocks)
    }
    /// Takes `count` sequence numbers of records, and gives the first.
    pub(super) fn take_sequences(&self, count: u64) -> u64 {
        self.next_sequence.0.fetch_add(count, Ordering::Relaxed)
    }
    /// The superblock as it was at the opening, for the fields that do not change while the volume is open.
    pub(super) fn constants(&self) -> &HashSuperblock {
        &self.constants
    }
    pub(super) fn layout(&self) -> &VolumeLayout {
        &self.constants.layout
    }

    /// The header and key of a record that was read from a location of the volume's device. Memory is trusted: records there have no checksums.
    ///
    /// # Errors
    /// As for [`UncheckedRecord::header`].
    pub(super) fn record_header<'a>(
        &self,
        bytes: &'a [u8],
        location: u64,
    ) -> Result<(RecordHeader, &'a [u8]), RecordError> {
        let unchecked = UncheckedRecord { bytes, location };
        match self.volatile {
            true => unchecked.unverified_header(),
            false => unchecked.header(),
        }
    }

    /// A record of this volume that is to be encoded.
    pub(super) fn new_record<'a>(
        &self,
        sequence: u64,
        location: u64,
        key: &'a [u8],
        (value_bytes, stored_bytes): (usize, usize),
        meta: RecordMeta,
    ) -> NewRecord<'a> {
        NewRecord {
            format: self.constants.format,
            identity: RecordId { volume_id: self.constants.volume_id, sequence, location },
            namespace: self.constants.namespace,
            key,
            value_bytes,
            stored_bytes,
            meta,
        }
    }

    /// The range of the value in a record that was read from the volume's device.
    ///
    /// # Errors
    /// As for [`RecordHeader::value_range`].
    pub(super) fn value_range(
        &self,
        header: &RecordHeader,
        bytes: &[u8],
    ) -> Result<Range<usize>, RecordError> {
        match self.volatile {
            true => header.unverified_value_range(bytes),
            false => header.value_range(bytes),
        }
    }

    /// Gives each key an owner among `cores` cores. This engine needs none: it serves simulations of engines that do.
    ///
    /// # Panics
    /// If `cores` is 0.
    pub(crate) fn assign_owner_cores(&self, cores: usize) {
        assert!(cores > 0, "owners among no cores");
        self.owner_cores.store(cores, Ordering::Relaxed);
    }

    /// Whether keys have owners.
    pub(super) fn has_owner_cores(&self) -> bool {
        self.owner_cores.load(Ordering::Relaxed) > 0
    }

    /// The owner of a key, if keys have owners.
    pub(super) fn owner_core(&self, key: &Key) -> Option<usize> {
        let position = (self.hash(key) >> 64) as u64;
        let core = position.checked_rem(self.owner_cores.load(Ordering::Relaxed) as u64)?;
        Some(core as usize)
    }

    /// The hash of a key.
    pub(super) fn hash(&self, key: &Key) -> u128 {
        self.hash_bytes(key.as_bytes())
    }

    /// The hash of a key's bytes.
    #[inline]
    pub(super) fn hash_bytes(&self, key: &[u8]) -> u128 {
        hash_of(&self.constants, key)
    }

    /// The partition and tag of a hash.
    pub(super) fn partition_and_tag(&self, hash: u128) -> (usize, u64) {
        partition_and_tag(hash, self.constants.index_partitions_log2)
    }

    /// Locks the key of this hash for a writer, together with all keys of its partition and tag. Each of them would take
    /// a damaged record with their tag for its own, and only one may replace it.
    ///
    /// # Errors
    /// The waiter for the lock, which another writer has.
    #[inline]
    pub(super) fn lock_key(&self, hash: u128) -> Result<KeyGuard<'_>, KeyWaiter<'_>> {
        let (shard, number) = self.key_lock(hash);
        match bug_injection::is_injected(InjectedBug::SkipKeyLock) {
            true => shard.lock_or_queue(self.take_sequences(1)),
            false => shard.lock_or_queue(number),
        }
    }

    /// The shard and the number of a key's lock. The number is the top bits of the hash: equal for all keys that have their
    /// partition and tag in common, which are those bits and at most 20 more.
    #[inline]
    fn key_lock(&self, hash: u128) -> (&KeyLocks, u64) {
        let number = match bug_injection::tag_mask() {
            u64::MAX => (hash >> (128 - TAG_BITS)) as u64,
            // A test makes tags collide.
            mask => {
                let (partition, tag) = self.partition_and_tag(hash);
                partition as u64 * (mask + 1) + tag
            }
        };
        (&self.key_locks[number as usize % KEY_LOCK_SHARDS], number)
    }

    /// The records that may be the key's of this hash.
    pub(super) fn candidates(&self, hash: u128) -> Candidates {
        let (partition, tag) = self.partition_and_tag(hash);
        self.partitions[partition].state.lock().table.lookup(tag).collect()
    }

    /// What the index has for a tag of a partition.
    #[inline]
    pub(super) fn find_entry(&self, partition: usize, tag: u64) -> FoundEntry {
        self.partitions[partition].state.lock().table.find(tag)
    }

    /// Whether an index entry is of a record with flags.
    #[inline]
    pub(super) fn has_flags(&self, words: [u64; 2]) -> bool {
        let record_ref = IndexEntry::from_words(words).record_ref();
        record_ref.flags(self.constants.format) != RecordFlags::NONE
    }

    /// The units of the record area.
    pub(super) fn record_units(&self) -> Range<u64> {
        self.constants.layout.record_units()
    }

    /// Prefetches the header of a partition, for writing: its lock is taken next.
    #[inline]
    pub(super) fn prefetch_partition(&self, partition: usize) {
        octokv_runtime::prefetch_value_for_write(&self.partitions[partition].state);
    }

    /// Prefetches the index entry for a tag, unless the partition is locked.
    #[inline]
    pub(super) fn prefetch_entry(&self, partition: usize, tag: u64) {
        if let Some(state) = self.partitions[partition].state.try_lock() {
            state.table.prefetch(tag);
        }
    }

    /// A record that is probably that of the key with this tag, unless the partition is locked; for prefetching.
    pub(super) fn likely_record(&self, partition: usize, tag: u64) -> Option<RecordRef> {
        self.partitions[partition].state.try_lock()?.table.lookup(tag).next()
    }

    /// Whether a record with this header is the one that the index names.
    #[inline]
    pub(super) fn is_record(&self, record_ref: RecordRef, header: &RecordHeader) -> bool {
        header.identity.volume_id == self.constants.volume_id
            && header.identity.location == record_ref.location
            && is_fingerprint_of(self.constants.format, record_ref, header)
    }

    /// Reads entries of a partition from `tag` on into `page`, and gives the start of the next page. Entries with the same
    /// tag are on one page, which may exceed its inline size for them.
    pub(super) fn read_page<T, A: Array<Item = T>>(
        &self,
        partition: usize,
        tag: u64,
        page: &mut SmallVec<A>,
        mut read: impl FnMut(IndexEntry) -> T,
    ) -> (usize, u64) {
        let state = self.partitions[partition].state.lock();
        let mut last = None;
        for entry in state.table.iter_from(tag) {
            if page.len() >= page.inline_size() && last != Some(entry.tag()) {
                return (partition, entry.tag());
            }
            last = Some(entry.tag());
            page.push(read(entry));
        }
        (partition + 1, 0)
    }

    /// The first bitmap partition of a core.
    pub(super) fn initial_space_partition(&self, core: usize) -> usize {
        self.space.initial_partition(core, self.epochs.cores())
    }

    /// Allocates space for a record, after reclaiming some retired space.
    pub(super) fn allocate(
        &self,
        core: usize,
        hash: u128,
        preferred_partition: &Cell<usize>,
        units: u64,
        purpose: SpaceFor,
    ) -> Option<Extent> {
        // In memory a record may be anywhere: the space that this core freed first is taken at once, if it has the size.
        if self.volatile
            && let Some(extent) = self.epochs.recycle(core, units)
        {
            return Some(extent);
        }
        self.epochs.reclaim(core, 8, |extent| self.space.release(extent));
        let placement_hash = (hash >> 64) as u64;
        let spared_units = match purpose {
            SpaceFor::Value | SpaceFor::NewTombstone => self.tombstone_units,
            SpaceFor::Tombstone => self.tombstone_units.min(LAST_UNITS),
            SpaceFor::LastTombstone => 0,
        };
        let allocate = || {
            let has_room = self.space.free_units() >= units + spared_units;
            has_room.then(|| self.space.allocate(placement_hash, preferred_partition, units)).flatten()
        };
        allocate().or_else(|| {
            self.epochs.reclaim_all(|extent| self.space.release(extent));
            allocate()
        })
    }

    /// Applies a change to the index, and gives the space of the replaced record. REQUIRES: the key's lock is held.
    ///
    /// # Panics
    /// If the record that the change replaces is not in the index.
    pub(super) fn apply(&self, entry: &IndexChange, number: u64) -> Option<Extent> {
        let (partition, tag) = self.partition_and_tag(entry.hash);
        let mut state = self.partitions[partition].state.lock();
        state.applied_through = number;
        let before = state.apply(self.constants.format, tag, entry);
        drop(state);
        assert!(
            entry.old_location == 0 || before.is_some(),
            "no record at {} to replace",
            entry.old_location
        );
        self.count_used_units(entry.units.into(), before);
        before.map(|record_ref| Extent { location: record_ref.location, units: record_ref.units })
    }

    /// Counts a record that came into the index, and the one that it replaced.
    fn count_used_units(&self, units: u64, before: Option<RecordRef>) {
        let unit = u64::from(self.constants.layout.unit_bytes);
        let freed_units = before.map_or(0, |record_ref| record_ref.units);
        // All cores have this sum: a record that takes the space of its predecessor leaves it alone.
        if units != freed_units {
            let grown_bytes = (units * unit).wrapping_sub(freed_units * unit);
            self.used_bytes.fetch_add(grown_bytes, Ordering::Relaxed);
        }
    }

    /// Applies a change of a writer without the key's lock, and gives the space of the replaced record. `None`, and nothing
    /// is changed, if a writer has the lock, or the index has another record than `old` for the key.
    pub(super) fn apply_if_current(
        &self,
        change: &IndexChange,
        old: Option<RecordRef>,
    ) -> Option<Option<Extent>> {
        let (partition, tag) = self.partition_and_tag(change.hash);
        let mut state = self.partitions[partition].state.lock();
        let (shard, number) = self.key_lock(change.hash);
        if shard.is_locked(number) && !bug_injection::is_injected(InjectedBug::ApplyDespiteKeyLock) {
            return None;
        }
        let is_current = match old {
            None => state.table.lookup(tag).next().is_none(),
            Some(old) => state.table.lookup(tag).any(|found| found == old),
        };
        if !is_current && !bug_injection::is_injected(InjectedBug::ApplyUncompared) {
            return None;
        }
        let before = state.apply(self.constants.format, tag, change);
        drop(state);
        self.count_used_units(change.units.into(), before);
        Some(before.map(|record_ref| Extent { location: record_ref.location, units: record_ref.units }))
    }

    /// Whether the index has this record for a tag of a partition. False also if its partition is locked: the caller may hold
    /// bytes of the device for which the owner of that lock waits.
    pub(super) fn is_current(&self, partition: usize, tag: u64, record_ref: RecordRef) -> bool {
        let state = self.partitions[partition].state.try_lock();
        state.is_some_and(|state| state.table.lookup(tag).any(|found| found == record_ref))
            || bug_injection::is_injected(InjectedBug::TrustEndInPlace)
    }

    /// Whether the index has this record for a tag of a partition; waits for the partition's lock.
    pub(super) fn has_entry(&self, partition: usize, tag: u64, record_ref: RecordRef) -> bool {
        self.partitions[partition].state.lock().table.lookup(tag).any(|found| found == record_ref)
    }

    /// Whether no change is in flight to the journal, no checkpoint is being written, no step of compaction runs, and no
    /// abandoned operation.
    pub fn is_idle(&self) -> bool {
        self.commits.is_idle()
            && self.abandoned.is_zero()
            && (self.commits.has_failed() || self.maintenance_locks.is_free())
    }

    /// Whether a journal write failed, so that nothing is written until the next opening.
    pub fn is_read_only(&self) -> bool {
        self.commits.has_failed()
    }

    /// A checkpoint number that no earlier attempt of this volume had.
    pub(super) fn next_checkpoint_id(&self) -> u64 {
        let attempts = self.checkpoint_attempts.fetch_add(1, Ordering::Relaxed);
        (u64::from(self.constants.incarnation) << 24) + attempts + 1
    }

    /// The current statistics.
    pub fn statistics(&self) -> EngineStatistics {
        let mut statistics = EngineStatistics {
            capacity_bytes: self.capacity_bytes(),
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            journal_batches: self.commits.batches_written(),
            checkpoints: self.checkpoints.load(Ordering::Relaxed),
            prepared_bytes: self.prepared_bytes.load(Ordering::Relaxed),
            compaction: self.compaction.statistics(),
            ..EngineStatistics::default()
        };
        for partition in &self.partitions {
            let state = partition.state.lock();
            statistics.keys += state.keys();
            statistics.index_bytes += (state.table.memory_bytes() + size_of::<IndexPartition>()) as u64;
        }
        statistics
    }
}

/// The hash of a key on the volume of `superblock`.
pub(super) fn hash_of(superblock: &HashSuperblock, key: &[u8]) -> u128 {
    match superblock.hash {
        HashKind::Xxh3 => RingPosition::of_bytes(key, superblock.hash_seed).0,
        HashKind::Sha1 => {
            let digest = Sha1::digest(key);
            u128::from_be_bytes(digest[..16].try_into().expect("sixteen of twenty bytes"))
        }
    }
}

/// The partition (the top bits) and the tag (the bits that follow) of a hash.
pub(super) fn partition_and_tag(hash: u128, index_partitions_log2: u8) -> (usize, u64) {
    // A superblock is consistent with at most 20. The mask spares the shifts of words their checks.
    let log2 = u32::from(index_partitions_log2 & 63);
    let (high, low) = ((hash >> 64) as u64, hash as u64);
    // In two steps, since a shift by all 64 bits is none.
    let partition = (high >> 1) >> (63 - log2);
    let tag = ((high << log2) | ((low >> 1) >> (63 - log2))) >> (64 - TAG_BITS);
    (partition as usize, tag & bug_injection::tag_mask())
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn partition_and_tag_are_the_bits_of_a_hash_from_the_top() {
        let mut random = Prng::new(1);
        let any = || u128::from(random.next_u64()) << 64 | u128::from(random.next_u64());
        let hashes: Vec<u128> =
            [0, 1, u128::MAX].into_iter().chain(std::iter::repeat_with(any).take(100)).collect();
        for log2 in 0..=20 {
            for &hash in &hashes {
                let bits: Vec<bool> = (0..128).rev().map(|bit| hash >> bit & 1 == 1).collect();
                let number = |bits: &[bool]| bits.iter().fold(0, |sum, &bit| sum << 1 | u64::from(bit));
                let (partition, rest) = bits.split_at(usize::from(log2));
                let want = (number(partition) as usize, number(&rest[..TAG_BITS as usize]));
                assert_eq!(partition_and_tag(hash, log2), want, "{hash:x} of 2^{log2} partitions");
            }
        }
    }
}
