//! The state of an open volume of the log engine that all cores share: stores, chunks, shared flushes.
//!
//! In: a recovered volume. Out: the store of a key, what the volume is, what its logs do. Invariant: the superblock in memory is the last one that was written.

use super::checkpoint_writer::segments_max;
use super::chunk_pool::ChunkPool;
use super::hash_prefix::{HashPrefix, initial_store_of};
use super::log_layout::LogLayout;
use super::log_place::LogKind;
use super::running_compactions::RunningCompactions;
use super::scrub_state::ScrubState;
use super::settings::{LogSettings, checkpoint_interval_bytes};
use super::space_limits::ChunkPurpose;
use super::space_pass::SpacePasses;
use super::store::Store;
use super::superblock::LogSuperblock;
use crate::common::abandoned::AbandonedCount;
use crate::common::flush_queue::FlushQueue;
use crate::common::key_locks::KeyLocks;
use crate::common::record;
use crate::sync::Mutex;
use crate::{OpenConfig, VolumeInfo, WallClock};
use octokv_base::{Key, Lba, RingPosition, Version};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What the operations of a volume did since its opening.
#[derive(Debug, Default)]
pub(super) struct LogCounters {
    /// Batches of images.
    pub batches: AtomicU64,
    /// The images in them, without markers.
    pub images: AtomicU64,
    /// Markers.
    pub markers: AtomicU64,
    /// Reads that met a chunk which was opened meanwhile, and were repeated.
    pub repeated_reads: AtomicU64,
    /// Segment images that operations found in memory.
    pub image_cache_hits: AtomicU64,
    /// Segments that were split.
    pub splits: AtomicU64,
    /// Splits that failed.
    pub failed_splits: AtomicU64,
    /// Checkpoints.
    pub checkpoints: AtomicU64,
    /// Rounds of compaction that advanced a head.
    pub compaction_rounds: AtomicU64,
    /// Images of which key compaction made new ones.
    pub moved_images: AtomicU64,
    /// The units of the images that compaction appends, of those of value compaction at most.
    pub compaction_image_units: AtomicU64,
    /// Segments that value compaction visited.
    pub visits: AtomicU64,
    /// Values that it moved.
    pub moved_values: AtomicU64,
    /// The bytes of their records.
    pub moved_bytes: AtomicU64,
    /// Those of them whose records it read together with others.
    pub values_read_together: AtomicU64,
    /// Values whose records it found damaged.
    pub lost_values: AtomicU64,
    /// Images behind the last checkpoint that the opening replayed.
    pub replayed_images: AtomicU64,
}

/// An open volume.
pub struct LogVolume {
    pub(super) superblock: Mutex<LogSuperblock>,
    /// The superblock of the opening: what does not change while the volume is open.
    fixed: LogSuperblock,
    unit_blocks: u64,
    pub(super) settings: LogSettings,
    cores: usize,
    pub(super) pool: ChunkPool,
    /// The initial stores, in ring order.
    pub(super) stores: Vec<Store>,
    pub(super) flushes: FlushQueue,
    pub(super) passes: SpacePasses,
    pub(super) compactions: RunningCompactions,
    /// Head chunks that compactions are about to pin.
    pub(super) wanted_pins: AtomicU32,
    /// Of checkpoints and of changes of the superblock.
    pub(super) maintenance_locks: KeyLocks,
    /// Of each store, by its number: writers that split because splits lag wait for each other, so that one holds the segment alone.
    pub(super) split_locks: KeyLocks,
    pub(super) abandoned: AbandonedCount,
    pub(super) clock: WallClock,
    /// Tombstones of lower versions are as absent keys.
    forgotten_below: AtomicU64,
    has_failed: AtomicBool,
    /// The segments of all stores, and the most of which a checkpoint fits its area.
    pub(super) segments: AtomicU64,
    segments_max: u64,
    /// Whether the volume is being closed: nothing is compacted any more.
    pub(super) is_closing: AtomicBool,
    /// Checkpoints that were begun since the opening.
    pub(super) checkpoint_attempts: AtomicU64,
    /// The units of images that had been appended when the last checkpoint began.
    pub(super) units_at_checkpoint: AtomicU64,
    pub(super) scrub: ScrubState,
    used_bytes: Arc<AtomicU64>,
    pub(super) counters: LogCounters,
}

impl LogVolume {
    /// A volume that recovery has found, whose superblock has the new incarnation already.
    pub(super) fn new(
        superblock: LogSuperblock,
        pool: ChunkPool,
        stores: Vec<Store>,
        used_bytes: u64,
        block_bytes: u32,
        config: OpenConfig,
        settings: LogSettings,
    ) -> Arc<LogVolume> {
        let segments = stores.iter().map(|store| store.state.lock().table.segments()).sum();
        // Stores are as many as a checkpoint has.
        let segments_max = segments_max(&superblock.layout, stores.len() as u32);
        // One split of each store at a time.
        let segments_max = segments_max.saturating_sub(stores.len() as u64);
        let passes = SpacePasses::new(used_bytes, superblock.layout.unit_bytes, stores.len());
        let used_of_capacity = used_bytes + pool.key_end_excess_bytes(ChunkPurpose::User);
        for store in &stores {
            passes.set_key_tail(store.id, store.state.lock().keys.tail().unit, &pool);
        }
        Arc::new(LogVolume {
            fixed: superblock,
            unit_blocks: u64::from(superblock.layout.unit_bytes / block_bytes),
            settings,
            cores: config.cores.max(1),
            pool,
            stores,
            flushes: FlushQueue::new(),
            passes,
            compactions: RunningCompactions::default(),
            wanted_pins: AtomicU32::new(0),
            maintenance_locks: KeyLocks::default(),
            split_locks: KeyLocks::default(),
            abandoned: AbandonedCount::default(),
            clock: config.clock,
            forgotten_below: AtomicU64::new(superblock.forgotten_below.to_bits()),
            has_failed: AtomicBool::new(false),
            segments: AtomicU64::new(segments),
            segments_max,
            is_closing: AtomicBool::new(false),
            checkpoint_attempts: AtomicU64::new(0),
            units_at_checkpoint: AtomicU64::new(0),
            scrub: ScrubState::default(),
            used_bytes: Arc::new(AtomicU64::new(used_of_capacity)),
            counters: LogCounters::default(),
            superblock: Mutex::new(superblock),
        })
    }

    /// The superblock as it was at the opening.
    pub(super) fn fixed(&self) -> &LogSuperblock {
        &self.fixed
    }

    /// The images behind the last checkpoint that the opening replayed.
    pub fn replayed_images(&self) -> u64 {
        self.counters.replayed_images.load(Ordering::Relaxed)
    }

    pub(super) fn layout(&self) -> &LogLayout {
        &self.fixed.layout
    }

    /// The first block of a unit.
    pub(super) fn lba(&self, unit: u64) -> Lba {
        Lba(unit * self.unit_blocks)
    }

    /// The unit of a block.
    pub(super) fn unit_of(&self, block: Lba) -> u64 {
        block.0 / self.unit_blocks
    }

    /// Which of the logs has a block now; `None` if none does.
    pub fn log_of_block(&self, block: Lba) -> Option<LogKind> {
        self.pool.owner_of(self.unit_of(block)).map(|(owner, _)| owner.kind)
    }

    /// The position of a key on the ring.
    pub(super) fn position_of(&self, key: &[u8]) -> RingPosition {
        RingPosition::of_bytes(key, self.fixed.hash_seed)
    }

    /// The store of a position.
    pub(super) fn store_of(&self, position: RingPosition) -> &Store {
        // Stores are the initial ones, and a layout has at least one.
        &self.stores[usize::from(initial_store_of(position, self.stores.len() as u16))]
    }

    /// The store of a key, and its prefix there.
    pub(super) fn place_of_key(&self, key: &Key) -> (&Store, HashPrefix) {
        let position = self.position_of(key.as_bytes());
        let store = self.store_of(position);
        (store, store.prefix_of(position))
    }

    /// The core that runs the operations of a key.
    pub(super) fn owner_core(&self, key: &Key) -> usize {
        self.core_of_store(key, self.cores)
    }

    /// The core, of so many, of the store of a key: each has equally many stores.
    pub(super) fn core_of_store(&self, key: &Key, cores: usize) -> usize {
        let store = usize::from(initial_store_of(self.position_of(key.as_bytes()), self.stores.len() as u16));
        store * cores / self.stores.len()
    }

    pub(super) fn info(&self) -> VolumeInfo {
        VolumeInfo {
            id: self.fixed.volume_id,
            value_bytes_max: self.fixed.value_bytes_max as usize,
            capacity_bytes: self.capacity_bytes(),
            record_layout: record::LAYOUT,
            has_iterators: false,
        }
    }

    /// The compactions of all cores that may run at once.
    pub(super) fn compactions_max(&self) -> usize {
        self.settings.compactions.max(1) * self.cores
    }

    /// The bytes that live data may take.
    pub(super) fn capacity_bytes(&self) -> u64 {
        u64::from(self.pool.limits().capacity_chunks()) * u64::from(self.layout().chunk_bytes())
    }

    pub(super) fn used_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.used_bytes)
    }

    /// Notes that more or less of the pool is live.
    pub(super) fn add_used(&self, bytes: i64) {
        if !self.passes.add_used(bytes) {
            self.pool.note_miscount();
        }
        self.used_bytes.store(self.used_of_capacity(), Ordering::Relaxed);
    }

    /// The bytes of [`LogVolume::capacity_bytes`] that are used: live data, and what ends of key chunks take beyond what the limits allow for.
    pub(super) fn used_of_capacity(&self) -> u64 {
        self.passes.used_bytes() + self.pool.key_end_excess_bytes(ChunkPurpose::User)
    }

    /// Tombstones of lower versions are as absent keys.
    pub(super) fn forgotten_below(&self) -> Version {
        Version::from_bits(self.forgotten_below.load(Ordering::Acquire))
    }

    /// Raises [`LogVolume::forgotten_below`]. REQUIRES: the superblock on the device says so.
    pub(super) fn set_forgotten_below(&self, version: Version) {
        self.forgotten_below.fetch_max(version.to_bits(), Ordering::AcqRel);
    }

    /// Whether a write of images, or a flush, failed.
    pub(super) fn is_read_only(&self) -> bool {
        self.has_failed.load(Ordering::Acquire) || self.flushes.failure().is_some()
    }

    /// As [`LogVolume::fail`], for a caller that holds the lock of a store: the batch that is claimed ends the waits of the others.
    pub(super) fn note_failure(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    /// Makes the volume read-only: which images are on the device is no longer known.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
        for store in &self.stores {
            let wakers = store.state.lock().batches.fail();
            wakers.wake();
        }
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        let is_store_idle = |store: &Store| {
            let state = store.state.lock();
            state.batches.has_failed() || (state.batches.is_idle() && state.batches.unclaimed() == 0)
        };
        self.abandoned.is_zero() && self.maintenance_locks.is_free() && self.stores.iter().all(is_store_idle)
    }

    /// Whether a checkpoint has room for one more segment.
    pub(super) fn may_split(&self) -> bool {
        self.segments.load(Ordering::Relaxed) < self.segments_max
    }

    /// What compaction has written to both logs since the opening, in bytes.
    pub(super) fn compacted_bytes(&self) -> u64 {
        let image_units = self.counters.compaction_image_units.load(Ordering::Relaxed);
        let image_bytes = image_units * u64::from(self.layout().unit_bytes);
        image_bytes + self.counters.moved_bytes.load(Ordering::Relaxed)
    }

    /// The units of images that were appended since the opening.
    pub(super) fn key_units_appended(&self) -> u64 {
        self.stores.iter().map(|store| store.state.lock().appended_units).sum()
    }

    /// Whether so much was appended to the key logs that a checkpoint is due.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        let layout = self.layout();
        let appended = self.key_units_appended() - self.units_at_checkpoint.load(Ordering::Relaxed);
        let last_bytes = self.superblock.lock().checkpoint.bytes;
        appended * u64::from(layout.unit_bytes) >= checkpoint_interval_bytes(layout, last_bytes)
    }
}
