//! One core's handle on a volume of the ordered engine: the contract's operations, whose futures may be dropped.
//!
//! Reads hold references and buffers, and a drop releases them. Writes own a key, a reference to the core's part of the volume and their buffers, so that they continue
//! without their caller ([`common::abandoned`](crate::common::abandoned)).

use super::core::LsmCore;
use super::maintenance::CompactionStep;
use super::retention::ForgottenTombstones;
use super::space_reserve::SpaceDemand;
use super::tree_iterator::TreeIterator;
use super::volume::LsmVolume;
use crate::common::abandoned::{RunnerCell, RunnerPool};
use crate::common::group_commit::{lock_checkpoint, write_durability_marker};
use crate::common::record;
use crate::{
    Capability, DeleteOutcome, Engine, EngineError, EngineStatistics, IteratorOptions, IteratorProgress,
    KeySink, KeyStatus, PairSink, PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
};
use futures_util::future::{join, join4};
use octokv_base::{BufferPool, Key, RecordLayout, RingRange, Version};
use octokv_device::Device;
use octokv_runtime::ReactorHandle;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One core's handle on a volume. Dropping it while abandoned operations run is a crash of this core to the volume: it becomes read-only.
pub struct LsmEngine {
    core: Rc<LsmCore>,
    puts: RunnerPool<TreePut, Result<PutOutcome, EngineError>>,
}

/// One put.
struct TreePut {
    key: Key,
    value: PutValue,
    options: PutOptions,
}

impl LsmCore {
    /// Writes a checkpoint and releases the journal before the oldest memtable.
    ///
    /// # Errors
    /// Device failures.
    pub(super) async fn checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let _guard = lock_checkpoint(self).await;
        self.write_image(clean).await
    }

    /// [`Engine::forget_below`]. The version that was forgotten survives a restart.
    async fn forget_tombstones(&self, below: Version) -> Result<(), EngineError> {
        {
            let mut forgotten = self.volume.forgotten.lock();
            if below <= forgotten.below {
                return Ok(());
            }
            let (sequence, time) = (self.volume.memtables.last_number(), self.volume.clock.now());
            *forgotten = ForgottenTombstones { below, sequence, time };
        }
        self.checkpoint(false).await
    }

    /// Writes what makes the next opening fast.
    async fn close(&self) -> Result<(), EngineError> {
        self.volume.compaction.is_over.store(true, Ordering::Relaxed);
        self.volume.iterators.wake_expiry();
        self.volume.segments.close();
        self.flush_memtables().await?;
        self.checkpoint(true).await
    }
}

impl LsmEngine {
    /// The handle of core `core`. REQUIRES: `device` is that core's view of the volume's device, and no other handle of the volume has the same core.
    pub fn new(volume: Arc<LsmVolume>, core: usize, device: Rc<dyn Device>, pool: BufferPool) -> LsmEngine {
        let core = Rc::new(LsmCore::new(volume, core, device, pool));
        let puts_core = Rc::clone(&core);
        let puts = RunnerPool::new(move |cell: Rc<RunnerCell<TreePut, _>>| {
            let core = Rc::clone(&puts_core);
            async move {
                loop {
                    let TreePut { key, value, options } = cell.next_job().await;
                    cell.finish(core.put(&key, value, options).await);
                }
            }
        });
        LsmEngine { core, puts }
    }

    /// The state that all cores share.
    pub fn volume(&self) -> &Arc<LsmVolume> {
        &self.core.volume
    }

    /// Writes a checkpoint, as maintenance does when one is due.
    ///
    /// # Errors
    /// Device failures.
    pub async fn checkpoint(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.checkpoint(false).await }).await
    }

    /// Flushes all memtables to tables, as maintenance does with full ones.
    ///
    /// # Errors
    /// Device failures, no memory, no space.
    pub async fn flush_memtables(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.flush_memtables().await }).await
    }

    /// Compacts once, if there is something to compact, without pauses. Whether it did.
    ///
    /// # Errors
    /// Device failures, no memory, no space: the tree is as it was.
    pub async fn compact_once(&self, wants_space: bool) -> Result<bool, EngineError> {
        let core = Rc::clone(&self.core);
        let step = async move {
            let pace = super::compaction_run::RunPace { handle: None };
            let need = if wants_space { SpaceDemand::Garbage } else { SpaceDemand::None };
            match core.compact_step(&pace, need).await? {
                CompactionStep::Compacted => Ok(true),
                CompactionStep::LookAgain | CompactionStep::Nothing => Ok(false),
                CompactionStep::Postponed(error) => Err(error),
            }
        };
        self.core.abandoned.detachable(step).await
    }

    /// Marks the last changes as durable in the journal, as maintenance does when nothing is written.
    ///
    /// # Errors
    /// A failed journal write, which makes the volume read-only.
    pub async fn mark_durable(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { write_durability_marker(&*core).await }).await
    }
}

impl Drop for LsmEngine {
    fn drop(&mut self) {
        // They refer to the core's part, which refers to them.
        self.core.abandoned.clear();
    }
}

impl Engine for LsmEngine {
    type Iterator = TreeIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        self.puts.begin(&self.core.abandoned, TreePut { key: key.clone(), value, options }).await
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        self.core.get(key, range).await
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let (core, key) = (Rc::clone(&self.core), key.clone());
        self.core.abandoned.detachable(async move { core.delete(&key, version).await }).await
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        self.core.status(key).await
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        self.core.list(start, sink).await
    }

    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        self.core.scan_range(range, since, sink).await
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<TreeIterator>, EngineError> {
        Ok(self.core.create_iterator(options))
    }

    async fn next_pairs(
        &self,
        iterator: &TreeIterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        self.core.next_pairs(iterator, sink).await
    }

    async fn seek_iterator(&self, iterator: &TreeIterator, key: &Key) -> Result<(), EngineError> {
        self.core.seek_iterator(iterator, key).await
    }

    fn keep_iterator(&self, iterator: &TreeIterator) {
        self.core.keep_iterator(iterator);
    }

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.forget_tombstones(version).await }).await
    }

    async fn give_up_space(&self, _bytes: u64) -> Result<u64, EngineError> {
        Err(EngineError::Unsupported(Capability::Reclaim))
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        // Goes with the caller: the operation that it leaves then ends after its step.
        let caller = Rc::new(());
        let (core, caller_alive) = (Rc::clone(&self.core), Rc::downgrade(&caller));
        let is_wanted = move || caller_alive.strong_count() > 0;
        let outcome = self.core.abandoned.detachable(async move { core.compact_all(&is_wanted).await }).await;
        drop(caller);
        outcome
    }

    async fn flush(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.flush().await }).await
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let (rounds, report) = (Cell::new(0), RefCell::new(report));
        let report = |error| report.borrow_mut()(error);
        // Compaction waits for rounds of maintenance: one task polls them all.
        join4(
            self.core.run_maintenance(handle, &rounds, report),
            self.core.run_compactions(handle, &rounds, report),
            self.core.run_expiry(handle),
            self.core.run_pace_control(handle),
        )
        .await;
    }

    async fn run_abandoned(&self) {
        join(self.core.abandoned.run(), self.core.run_views()).await;
    }

    async fn close(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.close().await }).await
    }

    fn record_layout(&self) -> RecordLayout {
        record::LAYOUT
    }

    fn has_abandoned(&self) -> bool {
        !self.core.volume.abandoned.is_zero()
    }

    fn statistics(&self) -> EngineStatistics {
        self.core.volume.statistics()
    }
}
