//! Checkpoints of an open volume: what each store gives to the writer of images, and the superblock that names them.
//!
//! ```text
//!   begin   first image that is not published: the start of replay     ─▶ pages ─▶ finish: lists, totals ─▶ flush ─▶ superblock ─▶ chunks freed
//! ```
//! In: stores that go on meanwhile. Out: a durable checkpoint. Invariants: one checkpoint at a time; key chunks from the start of replay of
//! the durable checkpoint on are not freed; a failed flush or superblock makes the volume read-only, a failed write of images does not.
//! Tested in `checkpoint_writer_tests.rs` and by power loss.

use super::checkpoint_writer::{CheckpointTarget, SnapshotSource, SnapshotStart, write_checkpoint};
use super::chunk_pool::ChunkPool;
use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::pinned_chunks::PinnedSnapshot;
use super::replay::LOST_STORE_DURABLE_THROUGH;
use super::segment_table::PAGE_ENTRIES;
use super::store::{Store, StoreState};
use super::store_image::{CheckpointId, PAGE_SEGMENTS, ReplayStart, StoreStart, ValueChunkUse};
use super::superblock::LogSuperblock;
use super::volume::LogVolume;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock_io::write_superblock;
use octokv_base::Version;
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;

const _: () = assert!(PAGE_ENTRIES == PAGE_SEGMENTS);
/// The lock of checkpoints and of changes of the superblock.
const CHECKPOINT_LOCK: u64 = 0;

/// A store of which a checkpoint is written.
struct StoreSnapshot<'a> {
    volume: &'a LogVolume,
    store: &'a Store,
    /// Where its replay begins, and the last image that the checkpoint makes durable.
    replay_start: Cell<ChunkIndex>,
    durable_through: Cell<u64>,
    pinned: RefCell<PinnedSnapshot>,
}

impl StoreState {
    /// The chunks of the key log from an index on, those that are retired included.
    fn key_chunks_from(&self, first: ChunkIndex) -> Vec<ChunkNumber> {
        let retired = self.retired.iter().filter(|retired| retired.log == LogKind::Keys);
        let mut before: Vec<_> = retired.map(|retired| (retired.index, retired.chunk)).collect();
        before.retain(|&(index, _)| index >= first);
        before.sort_unstable_by_key(|&(index, _)| index);
        let passed = first.0.saturating_sub(self.keys.head().0) as usize;
        before.into_iter().map(|(_, chunk)| chunk).chain(self.keys.chunks().skip(passed)).collect()
    }

    /// Does what a checkpoint that is durable now has stated. Gives how many chunks are free.
    pub(super) fn note_pinned(&mut self, snapshot: &PinnedSnapshot, pool: &ChunkPool) -> usize {
        for &pinned in &snapshot.new {
            pool.pin(pinned.chunk);
            self.advance_head(pinned.log, ChunkIndex(pinned.index.0 + 1), pool);
            self.pinned.wanted.retain(|wanted| *wanted != pinned);
            self.pinned.pinned.push(pinned);
        }
        for emptied in &snapshot.emptied {
            pool.retire(emptied.chunk);
            pool.release(emptied.chunk);
            self.pinned.emptied.retain(|other| other != emptied);
        }
        snapshot.emptied.len()
    }
}

impl SnapshotSource for StoreSnapshot<'_> {
    fn begin(&self) -> SnapshotStart {
        let state = self.store.state.lock();
        let published = &state.published;
        self.replay_start.set(published.index);
        let replay = ReplayStart {
            sequence: state.batches.published_sequence() + 1,
            index: published.index,
            unit: published.unit,
            incarnation: published.incarnation,
            previous: published.previous,
        };
        let replay = match bug_injection::is_injected(InjectedBug::CheckpointClaimsTooMuch) {
            true => {
                let tail = state.keys.tail();
                let sequence = state.batches.claimed_sequence() + 1;
                ReplayStart {
                    sequence,
                    index: tail.index,
                    unit: tail.unit,
                    previous: state.previous,
                    ..replay
                }
            }
            false => replay,
        };
        SnapshotStart { partition: self.store.id, level: state.table.level(), replay }
    }

    fn copy_page(&self, page: usize, entries: &mut Vec<u8>) {
        self.store.state.lock().table.copy_page(page, entries);
    }

    fn finish(&self, start: &SnapshotStart) -> StoreStart {
        let state = self.store.state.lock();
        let (layout, pool) = (self.volume.layout(), &self.volume.pool);
        let value_tail = self.store.tail.lock().completed();
        let pinned = state.pinned.snapshot(start.replay.index, value_tail.index);
        let value_head = pinned.head(LogKind::Values, state.values.head());
        let passed_values = (value_head.0 - state.values.head().0) as usize;
        // Chunks behind that of the tail are named by the images that reach them.
        let of_values = (value_tail.index.0 - value_head.0) as usize + 1;
        let mut is_counted = true;
        let value_chunks = state.values.chunks().skip(passed_values).take(of_values).map(|chunk| {
            let live = pool.live_of(chunk);
            is_counted &= live.is_some();
            let live = live.unwrap_or_default();
            ValueChunkUse { chunk, live_records: live.records, live_granules: live.amount }
        });
        let value_chunks: Vec<_> = value_chunks.collect();
        let durable_through = match state.is_lost {
            true => LOST_STORE_DURABLE_THROUGH,
            false if bug_injection::is_injected(InjectedBug::CheckpointClaimsTooMuch) => {
                state.batches.claimed_sequence()
            }
            false => state.batches.published_sequence(),
        };
        self.durable_through.set(state.batches.published_sequence());
        // The head may have passed the start of replay.
        let key_head = pinned.head(LogKind::Keys, state.keys.head()).min(start.replay.index);
        let key_chunks = state.key_chunks_from(key_head);
        debug_assert!(value_tail.granule <= layout.chunk_granules());
        self.pinned.replace(pinned);
        StoreStart {
            partition: start.partition,
            range: self.store.range,
            level: start.level,
            is_counted,
            replay: start.replay,
            durable_through,
            key_head,
            value_head,
            value_tail,
            next_key_chunk: state.keys.next_reserved(),
            next_value_chunk: state.value_chunk_behind(value_tail.index),
            totals: state.totals_published,
            key_chunks,
            value_chunks,
            pinned: self.pinned.borrow().all.clone(),
        }
    }
}

impl LogCore {
    /// Writes a checkpoint; one with `clean` at the end of the use of a volume.
    ///
    /// # Errors
    /// Device failures. The last checkpoint is valid.
    pub(super) async fn checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        let _guard = match volume.maintenance_locks.lock_or_queue(CHECKPOINT_LOCK) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        if volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let superblock = *volume.superblock.lock();
        let attempts = volume.checkpoint_attempts.fetch_add(1, Ordering::Relaxed);
        let id = CheckpointId {
            volume_id: superblock.volume_id,
            checkpoint_id: volume.fixed().checkpoint.id + attempts + 1,
        };
        let target = CheckpointTarget {
            layout: superblock.layout,
            id,
            last: superblock.checkpoint,
            incarnation: superblock.incarnation,
        };
        let appended = volume.key_units_appended();
        let snapshots: Vec<_> = volume
            .stores
            .iter()
            .map(|store| StoreSnapshot {
                volume,
                store,
                replay_start: Cell::new(ChunkIndex(0)),
                durable_through: Cell::new(0),
                pinned: RefCell::default(),
            })
            .collect();
        let checkpoint = write_checkpoint(&*self.device, &target, &snapshots).await?;
        let written = LogSuperblock {
            generation: superblock.generation + 1,
            checkpoint,
            is_clean_shutdown: clean,
            forgotten_below: volume.forgotten_below(),
            ..superblock
        };
        self.write_superblock(written).await?;
        volume.units_at_checkpoint.store(appended, Ordering::Relaxed);
        volume.counters.checkpoints.fetch_add(1, Ordering::Relaxed);
        let mut freed = 0;
        for snapshot in &snapshots {
            {
                let state = &mut *snapshot.store.state.lock();
                state.replay_start = snapshot.replay_start.get();
                freed += state.note_pinned(&snapshot.pinned.borrow(), &volume.pool);
            }
            freed += snapshot.store.note_durable(snapshot.durable_through.get(), &volume.pool);
        }
        if freed > 0 {
            volume.passes.chunks_freed(&volume.pool);
        }
        Ok(())
    }

    /// Writes a superblock, durably. REQUIRES: the caller has the lock of checkpoints.
    async fn write_superblock(&self, superblock: LogSuperblock) -> Result<(), EngineError> {
        if write_superblock(&*self.device, &superblock).await.is_err() {
            // Whether the device has it is not known.
            self.volume.fail();
            return Err(EngineError::ReadOnly);
        }
        *self.volume.superblock.lock() = superblock;
        Ok(())
    }

    /// [`Engine::forget_below`](crate::Engine::forget_below). The version survives a restart.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn forget_tombstones(&self, below: Version) -> Result<(), EngineError> {
        let volume = &self.volume;
        let _guard = match volume.maintenance_locks.lock_or_queue(CHECKPOINT_LOCK) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        if volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let superblock = *volume.superblock.lock();
        if below > superblock.forgotten_below {
            let generation = superblock.generation + 1;
            self.write_superblock(LogSuperblock { generation, forgotten_below: below, ..superblock }).await?;
            volume.set_forgotten_below(below);
        }
        Ok(())
    }

    /// States in each store's key log that its last images are durable, unless the last one says so.
    ///
    /// # Errors
    /// A failed write, which makes the volume read-only.
    pub(super) async fn mark_durable(&self) -> Result<(), EngineError> {
        let (passes, pool) = (&self.volume.passes, &self.volume.pool);
        for store in &self.volume.stores {
            let is_wanted = {
                let state = store.state.lock();
                // It does not take the last units that key compaction needs.
                let has_space = passes.spare_chunks(pool) > 0;
                !state.is_lost
                    && has_space
                    && state.previous.segment != SegmentNumber::MARKER
                    && state.batches.durable_sequence() == state.batches.claimed_sequence()
            };
            if is_wanted {
                self.append_marker(store).await?;
            }
        }
        Ok(())
    }
}
