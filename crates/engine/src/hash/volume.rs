//! What all cores share of an open volume: index, free space, journal state.
//!
//! Every part has its own lock, held for a few memory accesses and never across an await.

use super::Places;
use super::allocator::{Extent, Space};
use super::commit_queue::{Commits, JournalPosition};
use super::epoch::Epochs;
use super::index::{Place, Slot, TAG_BITS, Table, check_of};
use super::journal::Entry;
use super::key_locks::{Held, KeyLocks};
use super::record::Identity;
use super::superblock::{HashKind, Superblock};
use crate::bug_injection::{self, Bug};
use crate::{Durability, Statistics};
use octokv_base::{Key, Lba};
use parking_lot::Mutex;
use sha1::{Digest, Sha1};
use smallvec::{Array, SmallVec};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Parts of the table of key locks: cores that write different keys rarely meet.
const LOCKS: usize = 64;

/// One partition of the index.
#[derive(Default)]
pub struct Segment {
    pub(super) entries: Mutex<Entries>,
}

/// The index entries of a partition, and how far the journal has been applied to them.
#[derive(Default)]
pub struct Entries {
    pub(super) table: Table,
    /// The number of the last journal entry applied.
    pub(super) applied: u64,
}

/// An open volume.
pub struct Volume {
    pub(super) superblock: Mutex<Superblock>,
    fixed: Superblock,
    unit_blocks: u64,
    pub(super) durability: Durability,
    /// Whether the device keeps nothing, so that there is no journal.
    pub(super) volatile: bool,
    pub(super) segments: Box<[Segment]>,
    /// The locks of keys that are being written, by their hash.
    locks: [KeyLocks; LOCKS],
    pub(super) space: Space,
    pub(super) epochs: Epochs,
    pub(super) commits: Commits,
    stamp: AtomicU64,
    used_bytes: Arc<AtomicU64>,
    pub(super) checkpoints: AtomicU64,
    checkpoints_tried: AtomicU64,
    /// Held while a checkpoint is written.
    pub(super) checkpointing: KeyLocks,
}

/// What recovery found.
pub(super) struct Contents {
    pub(super) segments: Box<[Segment]>,
    pub(super) space: Space,
    pub(super) position: JournalPosition,
}

impl Volume {
    pub(super) fn new(
        superblock: Superblock,
        contents: Contents,
        block_bytes: u32,
        volatile: bool,
        settings: OpenSettings,
    ) -> Arc<Volume> {
        let used = (contents.space.units() - contents.space.free_units()) * u64::from(superblock.unit_bytes);
        Arc::new(Volume {
            fixed: superblock,
            unit_blocks: u64::from(superblock.unit_bytes / block_bytes),
            durability: settings.durability,
            volatile,
            segments: contents.segments,
            locks: std::array::from_fn(|_| KeyLocks::default()),
            space: contents.space,
            epochs: Epochs::new(settings.cores),
            commits: Commits::new(contents.position, superblock.journal_units, superblock.unit_bytes),
            stamp: AtomicU64::new(u64::from(superblock.incarnation) << 40),
            used_bytes: Arc::new(AtomicU64::new(used)),
            checkpoints: AtomicU64::new(0),
            checkpoints_tried: AtomicU64::new(0),
            checkpointing: KeyLocks::default(),
            superblock: Mutex::new(superblock),
        })
    }

    /// The volume's random number.
    pub fn id(&self) -> u64 {
        self.fixed.volume
    }
    /// The longest value, in bytes.
    pub fn value_bytes_max(&self) -> usize {
        self.fixed.value_bytes_max as usize
    }
    /// Space for records, in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.space.units() * u64::from(self.fixed.unit_bytes)
    }
    /// Space that holds records, in bytes; kept up to date.
    pub fn used_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.used_bytes)
    }
    pub(super) fn namespace(&self) -> u32 {
        self.fixed.namespace
    }
    pub(super) fn unit_bytes(&self) -> usize {
        self.fixed.unit_bytes as usize
    }
    pub(super) fn lba(&self, location: u64) -> Lba {
        Lba(location * self.unit_blocks)
    }
    pub(super) fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::Relaxed)
    }
    pub(super) fn fixed(&self) -> &Superblock {
        &self.fixed
    }

    /// The hash of a key.
    pub(super) fn hash(&self, key: &Key) -> u128 {
        hash_of(&self.fixed, key)
    }

    /// The partition and tag of a hash.
    pub(super) fn split(&self, hash: u128) -> (usize, u64) {
        split(hash, self.fixed.segments_log2)
    }

    /// Waits until no other writer has the key of this hash, and keeps others waiting.
    pub(super) async fn lock(&self, hash: u128) -> Held<'_> {
        let key = if bug_injection::is(Bug::SkipKeyLock) { u128::from(self.next_stamp()) } else { hash };
        self.locks[(hash >> 64) as usize % LOCKS].lock(key).await
    }

    /// Where a key of this hash may be.
    pub(super) fn places(&self, hash: u128) -> Places {
        let (segment, tag) = self.split(hash);
        self.segments[segment].entries.lock().table.lookup(tag).collect()
    }

    /// Says that what knows of the part of the index that this hash is in will be looked at soon.
    pub(super) fn expect_segment(&self, hash: u128) {
        octokv_runtime::expect(&self.segments[self.split(hash).0].entries);
    }

    /// Says that the entry of this hash will be. A hint is not worth a wait.
    pub(super) fn expect_entry(&self, hash: u128) {
        let (segment, tag) = self.split(hash);
        if let Some(entries) = self.segments[segment].entries.try_lock() {
            entries.table.expect(tag);
        }
    }

    /// Where a key of this hash is likely to be, for a hint, that does not wait.
    pub(super) fn likely_place(&self, hash: u128) -> Option<Place> {
        let (segment, tag) = self.split(hash);
        self.segments[segment].entries.try_lock()?.table.lookup(tag).next()
    }

    /// Whether a record read at `place` is the one that the index means.
    pub(super) fn is_the_record(&self, place: Place, identity: Identity) -> bool {
        identity.volume == self.fixed.volume
            && identity.location == place.location
            && identity.namespace == self.fixed.namespace
            && check_of(identity.stamp) == place.check
    }

    /// Takes entries of a partition from `tag` on into `page`, and gives where the next page begins.
    /// Entries of one tag stay together.
    pub(super) fn page_of<T, A: Array<Item = T>>(
        &self,
        segment: usize,
        tag: u64,
        page: &mut SmallVec<A>,
        mut read: impl FnMut(Slot) -> T,
    ) -> (usize, u64) {
        let entries = self.segments[segment].entries.lock();
        let mut last = None;
        for slot in entries.table.from(tag) {
            if page.len() >= page.inline_size() && last != Some(slot.tag()) {
                return (segment, slot.tag());
            }
            last = Some(slot.tag());
            page.push(read(slot));
        }
        (segment + 1, 0)
    }

    /// The partition of the space where a core begins.
    pub(super) fn first_partition(&self, core: usize) -> usize {
        self.space.start_of(core, self.epochs.cores())
    }

    /// Finds space for a record, first taking back what no reader is on any more.
    pub(super) fn allocate(&self, hash: u128, stay: &Cell<usize>, units: u64) -> Option<Extent> {
        self.epochs.reclaim(8, |extent| self.space.release(extent));
        let high = (hash >> 64) as u64;
        self.space.allocate(high, stay, units).or_else(|| {
            self.epochs.reclaim(usize::MAX, |extent| self.space.release(extent));
            self.space.allocate(high, stay, units)
        })
    }

    /// Applies a change to the index and gives the space that it freed.
    pub(super) fn apply(&self, entry: &Entry, number: u64) -> Option<Extent> {
        let (segment, tag) = self.split(entry.hash);
        let mut entries = self.segments[segment].entries.lock();
        entries.applied = number;
        let before = apply(&mut entries.table, tag, entry);
        drop(entries);
        // Only a bug of ours replaces a record that the index does not have: the key's lock is held.
        assert!(entry.old == 0 || before.is_some(), "no record at {} to replace", entry.old);
        let unit = u64::from(self.fixed.unit_bytes);
        let gone = before.map_or(0, |place| place.units) * unit;
        self.used_bytes.fetch_add(u64::from(entry.units) * unit, Ordering::Relaxed);
        self.used_bytes.fetch_sub(gone, Ordering::Relaxed);
        before.map(|place| Extent { location: place.location, units: place.units })
    }

    /// Whether no change is on its way to the journal and no checkpoint is being written: to end a core's work
    /// before that would cut it short.
    pub fn is_idle(&self) -> bool {
        self.commits.is_idle() && (self.commits.has_failed() || self.checkpointing.is_free())
    }

    /// Whether a journal write failed, so that nothing more is written until it is opened again.
    pub fn is_read_only(&self) -> bool {
        self.commits.has_failed()
    }

    /// A number that no checkpoint of this volume had before, tried or done.
    pub(super) fn next_checkpoint(&self) -> u64 {
        let tried = self.checkpoints_tried.fetch_add(1, Ordering::Relaxed);
        (u64::from(self.fixed.incarnation) << 24) + tried + 1
    }

    /// Figures.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = Statistics {
            capacity_bytes: self.capacity_bytes(),
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            batches: self.commits.batches(),
            checkpoints: self.checkpoints.load(Ordering::Relaxed),
            ..Statistics::default()
        };
        for segment in &self.segments {
            let entries = segment.entries.lock();
            statistics.keys += entries.table.len() as u64;
            statistics.index_bytes += (entries.table.bytes() + size_of::<Segment>()) as u64;
        }
        statistics
    }
}

/// How a volume is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenSettings {
    /// When writes are acknowledged.
    pub durability: Durability,
    /// How many cores will have a handle.
    pub cores: usize,
}

/// The hash of a key on the volume of `superblock`.
pub(super) fn hash_of(superblock: &Superblock, key: &Key) -> u128 {
    match superblock.hash {
        HashKind::Xxh3 => xxhash_rust::xxh3::xxh3_128_with_seed(key.as_bytes(), superblock.hash_seed),
        HashKind::Sha1 => {
            let digest = Sha1::digest(key.as_bytes());
            u128::from_be_bytes(digest[..16].try_into().expect("sixteen of twenty bytes"))
        }
    }
}

/// The partition (the top bits) and the tag (the bits that follow) of a hash.
pub(super) fn split(hash: u128, segments_log2: u8) -> (usize, u64) {
    let segment = if segments_log2 == 0 { 0 } else { hash >> (128 - u32::from(segments_log2)) };
    (segment as usize, ((hash << segments_log2) >> (128 - TAG_BITS)) as u64 & bug_injection::tag_mask())
}

/// Makes the change of `entry` in a table and gives the place that it took out, if any.
pub(super) fn apply(table: &mut Table, tag: u64, entry: &Entry) -> Option<Place> {
    let new = Place { location: entry.new, units: u64::from(entry.units), check: check_of(entry.stamp) };
    match (entry.old, entry.new) {
        (0, 0) => None,
        (0, _) => {
            table.insert(tag, new);
            None
        }
        (old, 0) => table.remove(tag, old),
        (old, _) => table.replace(tag, old, new),
    }
}
