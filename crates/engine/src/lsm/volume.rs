//! The state of an open volume of the ordered engine that all cores share: memtables, versions, free space, journal.
//!
//! Each part has its own lock, held for a few memory accesses and never across an await.

use super::iterator_list::IteratorList;
use super::journal::{ChangeContents, JournalChange};
use super::journal_room::JournalRoom;
use super::memtables::Memtables;
use super::pace_meter::PaceRates;
use super::postponed_reads::PostponedReads;
use super::prefetch_degree::PrefetchBudget;
use super::retention::ForgottenTombstones;
use super::settings::{TreeSettings, run_bytes_least};
use super::snapshots::SnapshotList;
use super::superblock::LsmSuperblock;
use super::table::cache::BlockCache;
use super::table_meta::{SegmentMeta, TableMeta};
use super::tree_version::TreeVersion;
use super::value_segments::ValueSegments;
use super::version_set::VersionSet;
use crate::bug_injection::{self, InjectedBug};
use crate::common::abandoned::AbandonedCount;
use crate::common::allocator::{Extent, FitPolicy, SpaceAllocator};
use crate::common::commit_queue::{CommitQueue, JournalConfig};
use crate::common::journal::JournalPosition;
use crate::common::key_locks::{KeyGuard, KeyLocks, KeyWaiter};
use crate::common::record;
use crate::common::write_throttle::WriteThrottle;
use crate::lsm::compaction::TreeCompaction;
use crate::lsm::compaction_choice::ChoiceState;
use crate::{CompactionStatistics, EngineStatistics, OpenConfig, VolumeInfo, WallClock};
use octokv_base::map::FxHashSet;
use octokv_base::{Key, Lba, Nanos, RingPosition, Version};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Shards of the key locks: cores that write different keys rarely contend.
const KEY_LOCK_SHARDS: usize = 64;
/// Numbers of tables and segments that an opening leaves out: a crash may have left some that no version has.
const IDS_PER_OPENING: u32 = 64;

/// What edits need besides the versions.
pub(super) struct EditProgress {
    /// Edits of which a part may be in the journal, and which are not in the current version.
    pub in_progress: AtomicUsize,
    /// The number of the last change that is a part of an edit.
    pub last_part: AtomicU64,
    /// The number of the last change whose edit is in the current version. Locked while one is installed.
    pub installed: Mutex<u64>,
    next_edit: AtomicU64,
}

/// The compactions of a volume.
#[derive(Default)]
pub(super) struct CompactionState {
    /// How many compactions in turn found no free run that was long enough, up to [`SPACE_FAILURES_MAX`].
    space_failures: AtomicU32,
    pub choice: Mutex<ChoiceState>,
    /// Segments of which a compaction found a value damaged.
    pub unmovable: Mutex<FxHashSet<u32>>,
    /// Segments with a value for which a compaction found no free run, until one that moves values finds all that it needs.
    pub crowded: Mutex<FxHashSet<u32>>,
    /// The most units of a record for which space was wanted since the opening.
    pub longest_record: AtomicU64,
    /// What the device failed to read.
    pub postponed: Mutex<PostponedReads>,
    /// Compactions that failed because of it.
    pub postponed_compactions: AtomicU64,
    pub running: Mutex<Vec<Arc<TreeCompaction>>>,
    pub is_over: AtomicBool,
    /// Whether nothing was written for some time.
    pub is_idle: AtomicBool,
    /// Callers that wait for a compaction without pauses.
    pub hurried: AtomicUsize,
    pub compactions: AtomicU64,
    pub written_bytes: AtomicU64,
    pub moved_values: AtomicU64,
    pub moved_bytes: AtomicU64,
    pub flushes: AtomicU64,
    pub flushed_bytes: AtomicU64,
    /// Writes that waited for space, or for room in memory or in the journal, and the sum of their waits.
    pub waited_writes: AtomicU64,
    pub waited_ns: AtomicU64,
    /// Writes that waited for their turn since compaction could not keep up, and the sum of their waits.
    pub delayed_writes: AtomicU64,
    pub delayed_ns: AtomicU64,
    /// The bytes of users that compactions took out of level 0.
    pub drained_bytes: AtomicU64,
    pub rates: PaceRates,
}

/// A rest of a run of fewer units is not given back: no table would fit in it.
pub(super) fn rest_units_least(unit_bytes: u32) -> u64 {
    run_bytes_least(0).div_ceil(unit_bytes.into())
}

/// Each compaction that finds no free run halves what the next may write; after so many there is nothing left to try.
const SPACE_FAILURES_MAX: u32 = 8;

impl CompactionState {
    /// What compactions have done: the bytes that they wrote, and those that left level 0, also if tables were only moved.
    pub(super) fn work_bytes(&self) -> u64 {
        let counts = [&self.written_bytes, &self.moved_bytes, &self.drained_bytes];
        counts.map(|count| count.load(Ordering::Relaxed)).iter().sum()
    }
    /// How many compactions in turn found no space.
    pub(super) fn space_failures(&self) -> u32 {
        self.space_failures.load(Ordering::Relaxed)
    }
    /// Whether so many compactions found no space that there is none to be made. The next try begins anew.
    pub(super) fn is_out_of_space(&self) -> bool {
        let is_out = self.space_failures() >= SPACE_FAILURES_MAX;
        if is_out {
            self.space_failures.store(0, Ordering::Relaxed);
        }
        is_out
    }
    /// A compaction ended, for lack of space or otherwise.
    pub(super) fn note_outcome(&self, is_no_space: bool) {
        let failures = if is_no_space { (self.space_failures() + 1).min(SPACE_FAILURES_MAX) } else { 0 };
        self.space_failures.store(failures, Ordering::Relaxed);
    }
}

/// An open volume.
pub struct LsmVolume {
    pub(super) superblock: Mutex<LsmSuperblock>,
    fixed: LsmSuperblock,
    unit_blocks: u64,
    /// The number of the first change of this opening.
    first_change: u64,
    pub(super) settings: TreeSettings,
    pub(super) memtables: Memtables,
    pub(super) versions: VersionSet,
    pub(super) segments: ValueSegments,
    pub(super) snapshots: Arc<SnapshotList>,
    pub(super) iterators: IteratorList,
    pub(super) cache: Arc<BlockCache>,
    pub(super) prefetch_budget: Arc<PrefetchBudget>,
    pub(super) space: SpaceAllocator,
    pub(super) commits: CommitQueue<JournalChange>,
    pub(super) journal_room: JournalRoom,
    key_locks: [KeyLocks; KEY_LOCK_SHARDS],
    /// Group commit's, and those of edits: while one is held, the volume is not idle.
    pub(super) maintenance_locks: KeyLocks,
    /// Of work that may be dropped at any time but while it holds one of the others.
    pub(super) work_locks: KeyLocks,
    /// Operations of all cores whose callers dropped them.
    pub(super) abandoned: AbandonedCount,
    pub(super) edits: EditProgress,
    pub(super) compaction: CompactionState,
    pub(super) throttle: WriteThrottle,
    next_table_id: AtomicU64,
    next_segment_id: AtomicU32,
    /// Whether a write ever had a version: then a put has to know that of its key.
    has_versions: AtomicBool,
    pub(super) forgotten: Mutex<ForgottenTombstones>,
    /// The clock of expiry.
    pub(super) clock: WallClock,
    /// The time by which iterators are idle, as maintenance has last seen it.
    pub(super) time: AtomicU64,
    used_bytes: Arc<AtomicU64>,
    checkpoints: AtomicU64,
    checkpoint_attempts: AtomicU64,
    /// The bytes of the last image.
    pub(super) image_bytes: AtomicU64,
}

/// The recovered parts of a volume.
pub(super) struct TreeState {
    pub memtables: Memtables,
    pub versions: VersionSet,
    pub space: SpaceAllocator,
    pub position: JournalPosition,
    pub has_versions: bool,
    /// The number of the last change whose edit is in the version.
    pub installed: u64,
}

/// The free space of a data area in which these extents are used; `None` if one does not fit.
pub(super) fn space_beside(
    superblock: &LsmSuperblock,
    used: impl Iterator<Item = Extent>,
) -> Option<SpaceAllocator> {
    let layout = &superblock.layout;
    // One partition: runs are long.
    let space = SpaceAllocator::new(layout.data_start_unit, layout.data_units, 1, FitPolicy::First);
    let mut used = used;
    used.all(|extent| space.mark_used(extent)).then_some(space)
}

impl LsmVolume {
    pub(super) fn new(
        superblock: LsmSuperblock,
        state: TreeState,
        block_bytes: u32,
        config: OpenConfig,
        settings: TreeSettings,
    ) -> Arc<LsmVolume> {
        let layout = &superblock.layout;
        let (last_table_id, last_segment_id) = {
            let version = state.versions.current();
            (version.last_table_id(), version.last_segment_id())
        };
        let volume = LsmVolume {
            fixed: superblock,
            unit_blocks: u64::from(layout.unit_bytes / block_bytes),
            first_change: state.position.entry,
            memtables: state.memtables,
            versions: state.versions,
            segments: ValueSegments::new(rest_units_least(layout.unit_bytes)),
            snapshots: SnapshotList::new(settings.snapshots_max),
            iterators: IteratorList::new(config.cores),
            cache: Arc::new(BlockCache::new(settings.cache_bytes)),
            prefetch_budget: PrefetchBudget::new(settings.prefetch_bytes_max),
            space: state.space,
            commits: CommitQueue::new(
                state.position,
                JournalConfig {
                    ring_units: layout.journal_units,
                    unit_bytes: layout.unit_bytes,
                    volume_id: superblock.volume_id,
                    incarnation: superblock.incarnation,
                    durability: config.durability,
                    record_units: layout.data_units,
                },
            ),
            journal_room: JournalRoom::new(layout.journal_units, layout.unit_bytes),
            key_locks: std::array::from_fn(|_| KeyLocks::default()),
            maintenance_locks: KeyLocks::default(),
            work_locks: KeyLocks::default(),
            abandoned: AbandonedCount::default(),
            edits: EditProgress {
                in_progress: AtomicUsize::new(0),
                last_part: AtomicU64::new(state.installed),
                installed: Mutex::new(state.installed),
                next_edit: AtomicU64::new(u64::from(superblock.incarnation) << 32),
            },
            compaction: CompactionState::default(),
            throttle: WriteThrottle::default(),
            next_table_id: AtomicU64::new(last_table_id + u64::from(IDS_PER_OPENING)),
            next_segment_id: AtomicU32::new(last_segment_id + IDS_PER_OPENING),
            has_versions: AtomicBool::new(state.has_versions),
            forgotten: Mutex::new(superblock.forgotten),
            clock: config.clock,
            time: AtomicU64::new(0),
            used_bytes: Arc::default(),
            checkpoints: AtomicU64::new(0),
            checkpoint_attempts: AtomicU64::new(0),
            image_bytes: AtomicU64::new(superblock.checkpoint.bytes),
            superblock: Mutex::new(superblock),
            settings,
        };
        volume.note_used_space();
        Arc::new(volume)
    }

    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            id: self.fixed.volume_id,
            value_bytes_max: self.value_bytes_max(),
            capacity_bytes: self.capacity_bytes(),
            record_layout: record::LAYOUT,
            has_iterators: true,
        }
    }
    pub(super) fn value_bytes_max(&self) -> usize {
        self.fixed.value_bytes_max as usize
    }
    fn capacity_bytes(&self) -> u64 {
        self.space.units() * u64::from(self.fixed.layout.unit_bytes)
    }
    pub(super) fn used_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.used_bytes)
    }
    pub(super) fn unit_bytes(&self) -> usize {
        self.fixed.layout.unit_bytes as usize
    }
    /// The superblock as it was at the opening.
    pub(super) fn fixed(&self) -> &LsmSuperblock {
        &self.fixed
    }
    pub(super) fn lba(&self, unit: u64) -> Lba {
        Lba(unit * self.unit_blocks)
    }
    /// The time by which iterators are idle.
    pub(super) fn time(&self) -> Nanos {
        Nanos(self.time.load(Ordering::Relaxed))
    }

    /// The opening that wrote the batch at a position of the journal, or an earlier one.
    pub(super) fn incarnation_of(&self, position: JournalPosition) -> u32 {
        match position.entry < self.first_change {
            true => self.fixed.checkpoint.incarnation,
            false => self.fixed.incarnation,
        }
    }

    /// The number of the next edit.
    pub(super) fn next_edit(&self) -> u64 {
        self.edits.next_edit.fetch_add(1, Ordering::Relaxed)
    }
    /// A number for a table: none had it before.
    pub(super) fn next_table_id(&self) -> u64 {
        self.next_table_id.fetch_add(1, Ordering::Relaxed) + 1
    }
    /// A number for a segment: none had it before.
    pub(super) fn next_segment_id(&self) -> u32 {
        self.next_segment_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether a put without a version has to know that of its key.
    pub(super) fn has_versions(&self) -> bool {
        self.has_versions.load(Ordering::Acquire)
    }
    /// A write with a version begins.
    pub(super) fn note_version(&self) {
        if !self.has_versions() {
            self.has_versions.store(true, Ordering::Release);
        }
    }

    /// Locks a key for a writer.
    ///
    /// # Errors
    /// The waiter for the lock, which another writer has.
    #[inline]
    pub(super) fn lock_key(&self, key: &Key) -> Result<KeyGuard<'_>, KeyWaiter<'_>> {
        let hash = self.hash(key);
        // Not the number that no lock has.
        self.key_locks[hash as usize % KEY_LOCK_SHARDS].lock_or_queue(hash >> 1)
    }

    fn hash(&self, key: &Key) -> u64 {
        RingPosition::of_bytes(key.as_bytes(), self.fixed.hash_seed).0 as u64
    }

    /// Applies a durable change. REQUIRES: changes come in the order of their numbers.
    pub(super) fn apply(&self, change: &JournalChange, number: u64) {
        let position = || self.commits.replay_from();
        let is_applied = match change.contents(number) {
            ChangeContents::Entry(entry) => self.memtables.apply(number, Some(&entry), position),
            ChangeContents::EditPart(_) => {
                self.edits.last_part.store(number, Ordering::Release);
                self.memtables.apply(number, None, position)
            }
            ChangeContents::Cancelled => self.memtables.apply(number, None, position),
        };
        assert!(is_applied, "change {number} has a place of its own");
    }

    /// Allocates a run of `longest` units or, if there is none, the longest that is free, at least `shortest`. With `spares`, it leaves the space that only flushes
    /// and compactions take.
    pub(super) fn allocate(&self, longest: u64, shortest: u64, spares: bool) -> Option<Extent> {
        self.release_reclaimed();
        let spared_units = if spares { self.spared_units() } else { 0 };
        let free_units = self.space.free_units().saturating_sub(spared_units);
        let longest = longest.min(free_units);
        let extent = match longest >= shortest {
            true => self.space.allocate_longest(longest, shortest)?,
            false => return None,
        };
        self.note_used_space();
        Some(extent)
    }

    /// Whether the last image took so much of its area that only flushes and compactions may still make it longer: without a checkpoint nothing could be deleted.
    pub(super) fn is_image_long(&self) -> bool {
        let layout = &self.fixed.layout;
        let area_bytes = layout.area_units * u64::from(layout.unit_bytes);
        self.image_bytes.load(Ordering::Relaxed) > area_bytes / 4 * 3
    }

    /// Frees the unused tail of a run, after its first `used` units, and returns the extent that remains allocated. A tail shorter than `least` units stays
    /// allocated: no table fits in it.
    pub(super) fn release_behind(&self, run: Extent, used: u64, least: u64) -> Extent {
        let kept = match run.units - used {
            rest if rest < least => run.units,
            _ => used,
        };
        self.release(Extent { location: run.location + kept, units: run.units - kept });
        Extent { units: kept, ..run }
    }

    /// Gives back space that nothing refers to, or that was allocated and not used. Not once the volume is read-only: the journal on the device may have the
    /// edit that failed, and with the next opening what that refers to.
    pub(super) fn release(&self, extent: Extent) {
        if extent.units > 0 && !self.commits.has_failed() {
            self.space.release(extent);
            self.note_used_space();
        }
    }

    /// Gives back the space to which no version refers any more. After a failed write of the journal nothing is given back: an edit whose batch failed may be
    /// on the device, and the next opening then has its tables.
    pub(super) fn release_reclaimed(&self) {
        let reclaimed = self.versions.reclaim().take();
        let is_kept = self.commits.has_failed() || bug_injection::is_injected(InjectedBug::FreeUnderVersions);
        if !reclaimed.is_empty() && !is_kept {
            reclaimed.into_iter().for_each(|extent| self.space.release(extent));
            self.note_used_space();
        }
    }

    fn note_used_space(&self) {
        let used_units = self.space.units() - self.space.free_units();
        self.used_bytes.store(used_units * u64::from(self.fixed.layout.unit_bytes), Ordering::Relaxed);
    }

    /// Whether no change is in flight to the journal, no checkpoint is being written, no edit, and no abandoned operation runs. A flush or compaction that
    /// has written no edit yet may be dropped.
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
        (u64::from(self.fixed.incarnation) << 24) + attempts + 1
    }

    pub(super) fn count_checkpoint(&self) {
        self.checkpoints.fetch_add(1, Ordering::Relaxed);
    }

    /// The sizes with which the tree works.
    pub fn settings(&self) -> &TreeSettings {
        &self.settings
    }

    /// The units that only older versions refer to, which iterators and other readers hold.
    pub fn pinned_units(&self) -> u64 {
        self.versions.pinned_units()
    }

    /// The current version, for statistics and tests.
    pub fn version(&self) -> Arc<TreeVersion> {
        self.versions.current()
    }

    /// The metadata of the tables and segments that a version refers to ends with it.
    pub(super) fn segment_meta(&self, id: u32, extent: Extent) -> Arc<SegmentMeta> {
        SegmentMeta::new(id, extent, self.versions.reclaim())
    }

    /// The metadata of a table that was written.
    pub(super) fn table_meta(&self, fields: &super::table_meta::TableFields) -> Arc<TableMeta> {
        TableMeta::new(fields, self.versions.reclaim())
    }

    /// The current statistics. The number of keys is that of entries less twice the tombstones: a key that was overwritten counts more than once until its
    /// entries are compacted.
    pub fn statistics(&self) -> EngineStatistics {
        self.release_reclaimed();
        let version = self.versions.current();
        let (mut entries, mut tombstones) = (0, 0);
        for (_, table) in version.tables() {
            entries += table.entries();
            tombstones += table.tombstones();
        }
        let memtables = self.memtables.current();
        entries += memtables.newest_first().map(|placed| placed.memtable.entries() as u64).sum::<u64>();
        let compaction = &self.compaction;
        EngineStatistics {
            keys: entries.saturating_sub(2 * tombstones),
            capacity_bytes: self.capacity_bytes(),
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            index_bytes: memtables.bytes() + self.cache.used_bytes(),
            journal_batches: self.commits.batches_written(),
            checkpoints: self.checkpoints.load(Ordering::Relaxed),
            compaction: CompactionStatistics {
                moved_records: compaction.moved_values.load(Ordering::Relaxed),
                moved_bytes: compaction.moved_bytes.load(Ordering::Relaxed),
                ..CompactionStatistics::default()
            },
            tree: Some(self.tree_statistics()),
            ..EngineStatistics::default()
        }
    }

    /// No write of a version below this one will come.
    pub(super) fn forget_below(&self) -> Version {
        self.forgotten.lock().below
    }
}
