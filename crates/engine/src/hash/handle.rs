//! One core's handle on a volume: the contract's operations, whose futures may be dropped.
//!
//! Reads hold guards and buffers, and a drop releases them. Writes of a durable volume own a key, a reference to the core's
//! part of the volume and their buffers, so that they continue without their caller
//! ([`common::abandoned`](crate::common::abandoned)). The futures of such puts are allocated once and used again. A put on a
//! volatile volume has no journal batch, and its caller owns it: see [`super::engine`].

use super::engine::HashCore;
use super::volume::HashVolume;
use crate::common::abandoned::{RunnerCell, RunnerPool};
use crate::common::group_commit::write_durability_marker;
use crate::common::record::{self, RecordFormat};
use crate::{
    Capability, DeleteOutcome, Engine, EngineError, EngineStatistics, FoundNow, KeyLookup, KeySink,
    KeyStatus, LookupStage, NoIterator, PrefetchStage, PutMode, PutOptions, PutOutcome, PutValue, ScanSink,
    StoredValue, ValueRange,
};
use futures_util::future::join3;
use octokv_base::{BufferPool, DataRef, Key, Received, RecordLayout, RingRange, Version};
use octokv_device::Device;
use octokv_runtime::ReactorHandle;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// One core's handle on a volume. Dropping it while abandoned operations run is a crash of this core to the volume: it
/// becomes read-only.
pub struct HashEngine {
    pub(super) core: Rc<HashCore>,
    /// The puts of a durable volume.
    puts: RunnerPool<PutJob, Result<PutOutcome, EngineError>>,
}

/// One put of a durable volume.
struct PutJob {
    key: Key,
    value: PutValue,
    options: PutOptions,
}

impl HashEngine {
    /// The handle of core `core`. REQUIRES: `device` is that core's view of the volume's device, and no other handle of
    /// the volume has the same core.
    pub fn new(volume: Arc<HashVolume>, core: usize, device: Rc<dyn Device>, pool: BufferPool) -> HashEngine {
        let core = Rc::new(HashCore::new(volume, core, device, pool));
        let puts_core = Rc::clone(&core);
        let puts = RunnerPool::new(move |cell: Rc<RunnerCell<PutJob, _>>| {
            let core = Rc::clone(&puts_core);
            async move {
                loop {
                    let PutJob { key, value, options } = cell.next_job().await;
                    cell.finish(core.put(&key, value, options).await);
                }
            }
        });
        HashEngine { core, puts }
    }

    /// The state that all cores share.
    pub fn volume(&self) -> &Arc<HashVolume> {
        &self.core.volume
    }

    /// Writes a checkpoint and truncates the journal. With `clean`, the superblock records a clean shutdown. REQUIRES: no
    /// operation follows a clean checkpoint.
    ///
    /// # Errors
    /// Device failures. A failed image write leaves the previous checkpoint valid; a failure after that makes the volume
    /// read-only. [`EngineError::ReadOnly`] if it already is.
    pub async fn checkpoint(&self, clean: bool) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.checkpoint(clean).await }).await
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

impl HashEngine {
    /// Prepares the next chunk of never-written space, as maintenance does. False if there is none now.
    ///
    /// # Errors
    /// A failed write, after which the chunk is used as it is.
    pub async fn prepare_next(&self) -> Result<bool, EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.prepare_next().await }).await
    }

    /// Compacts once over the whole volume, as maintenance does, but without pauses. False if nothing was gained.
    ///
    /// # Errors
    /// Device failures, and no memory. Values that were not joined, and records that were not moved, are unchanged.
    pub async fn compact(&self) -> Result<bool, EngineError> {
        self.core.compact().await
    }
}

impl Drop for HashEngine {
    fn drop(&mut self) {
        // They refer to the core's part, which refers to them.
        self.core.abandoned.clear();
    }
}

impl Engine for HashEngine {
    type Iterator = NoIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        if self.core.volume.volatile {
            return self.core.put(key, value, options).await;
        }
        self.puts.begin(&self.core.abandoned, PutJob { key: key.clone(), value, options }).await
    }

    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>> {
        self.core.get(key, ValueRange::ALL)
    }

    /// A value in one record has one checksum: a part of it needs all of it. Of a value in pieces those are read that it touches.
    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        self.core.get(key, range).await
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        if self.core.volume.volatile {
            return self.core.delete(key, version).await;
        }
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

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        if self.core.volume.constants().format == RecordFormat::V1 {
            return Ok(()); // That format has no tombstones.
        }
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.forget_below(version).await }).await
    }

    async fn give_up_space(&self, _bytes: u64) -> Result<u64, EngineError> {
        Err(EngineError::Unsupported(Capability::Reclaim))
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        while self.core.compact().await? {}
        Ok(())
    }

    async fn flush(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.flush().await }).await
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let (rounds, report) = (Cell::new(0), RefCell::new(report));
        let report = |error| report.borrow_mut()(error);
        // Preparation and compaction wait for rounds of maintenance: one task polls them all.
        join3(
            self.core.run_maintenance(handle, &rounds, report),
            self.core.run_preparation(handle, &rounds, report),
            self.core.run_compaction(handle, &rounds, report),
        )
        .await;
    }

    async fn run_abandoned(&self) {
        self.core.abandoned.run().await;
    }

    async fn close(&self) -> Result<(), EngineError> {
        self.core.end_compaction().await;
        self.checkpoint(true).await
    }

    #[inline]
    fn may_end_at_once(&self) -> bool {
        self.core.may_end_at_once()
    }
    #[inline]
    fn begin_lookup(&self, key: &[u8]) -> Option<KeyLookup> {
        self.core.begin_lookup(key)
    }

    #[inline]
    fn advance_lookup(&self, lookup: &mut KeyLookup, stage: LookupStage) {
        self.core.advance_lookup(lookup, stage);
    }

    #[inline]
    fn get_now(
        &self,
        key: &[u8],
        lookup: &KeyLookup,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<FoundNow> {
        self.core.get_now(key, lookup, receive)
    }

    fn exist_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<Option<usize>> {
        self.core.exist_now(key, lookup)
    }

    #[inline]
    fn put_now(&self, key: &[u8], lookup: &KeyLookup, mode: PutMode, value: &[u8]) -> Option<PutOutcome> {
        self.core.put_now(key, lookup, mode, value)
    }

    fn delete_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<DeleteOutcome> {
        self.core.delete_now(key, lookup)
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        self.core.prefetch(key, stage);
    }

    fn record_layout(&self) -> RecordLayout {
        record::LAYOUT
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        self.core.volume.owner_core(key)
    }

    fn has_abandoned(&self) -> bool {
        !self.core.volume.abandoned.is_zero()
    }

    fn statistics(&self) -> EngineStatistics {
        self.core.volume.statistics()
    }
}
