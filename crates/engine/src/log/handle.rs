//! One core's handle on a volume of the log engine: the contract's operations, whose futures may be dropped.
//!
//! Reads hold references and buffers, and a drop releases them. Writes own a key, a reference to the core's part of the volume and their
//! buffers, so that they continue without their caller ([`crate::common::abandoned`]).

use super::core::LogCore;
use super::log_place::LogKind;
use super::volume::LogVolume;
use crate::common::abandoned::{RunnerCell, RunnerPool};
use crate::common::record;
use crate::{
    Capability, DeleteOutcome, Engine, EngineError, EngineStatistics, KeySink, KeyStatus, NoIterator,
    PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
};
use futures_util::future::join;
use octokv_base::{BufferPool, Key, RecordLayout, RingRange, Version};
use octokv_device::Device;
use octokv_runtime::{ReactorHandle, yield_now};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One core's handle on a volume. Dropping it while abandoned operations run is a crash of this core to the volume: it becomes read-only.
pub struct LogEngine {
    core: Rc<LogCore>,
    puts: RunnerPool<LogPut, Result<PutOutcome, EngineError>>,
}

/// One put.
struct LogPut {
    key: Key,
    value: PutValue,
    options: PutOptions,
}

impl LogEngine {
    /// The handle of a core. REQUIRES: `device` is that core's view of the volume's device.
    pub fn new(volume: Arc<LogVolume>, device: Rc<dyn Device>, pool: BufferPool) -> LogEngine {
        let core = Rc::new(LogCore::new(volume, device, pool));
        let puts_core = Rc::clone(&core);
        let puts = RunnerPool::new(move |cell: Rc<RunnerCell<LogPut, _>>| {
            let core = Rc::clone(&puts_core);
            async move {
                loop {
                    let LogPut { key, value, options } = cell.next_job().await;
                    cell.finish(core.put(&key, value, options).await);
                }
            }
        });
        LogEngine { core, puts }
    }

    /// The state that all cores share.
    pub fn volume(&self) -> &Arc<LogVolume> {
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

    /// States in each store's key log that its last images are durable, as maintenance does when nothing is written.
    ///
    /// # Errors
    /// A failed write, which makes the volume read-only.
    pub async fn mark_durable(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.mark_durable().await }).await
    }

    /// Compacts the head chunk of one of the logs of each store. Whether a head has advanced.
    ///
    /// # Errors
    /// Device failures, no memory.
    pub async fn compact_once(&self, log: LogKind) -> Result<bool, EngineError> {
        self.compact_rounds(log, 1).await
    }

    /// Compacts the first `rounds` chunks of one of the logs of each store, the later ones prefetched. Whether a head has advanced.
    ///
    /// # Errors
    /// Device failures, no memory.
    pub async fn compact_rounds(&self, log: LogKind, rounds: u32) -> Result<bool, EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.compact_stores(log, rounds).await }).await
    }

    /// Lists all keys. Returns whether damage left none out.
    ///
    /// # Errors
    /// Device failures, no memory.
    pub async fn list_whole(&self, sink: &mut impl KeySink) -> Result<bool, EngineError> {
        self.core.list_whole(&Key::new(&[]).expect("the empty key"), sink).await
    }

    /// Splits the next segment of each store in which that is due. Whether one was split.
    ///
    /// # Errors
    /// Device failures, no memory.
    pub async fn split_once(&self) -> Result<bool, EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.split_due_stores().await }).await
    }
}

impl Drop for LogEngine {
    fn drop(&mut self) {
        // They refer to the core's part, which refers to them.
        self.core.abandoned.clear();
    }
}

impl Engine for LogEngine {
    type Iterator = NoIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        self.puts.begin(&self.core.abandoned, LogPut { key: key.clone(), value, options }).await
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

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        self.core.abandoned.detachable(async move { core.forget_tombstones(version).await }).await
    }

    async fn give_up_space(&self, _bytes: u64) -> Result<u64, EngineError> {
        Err(EngineError::Unsupported(Capability::Reclaim))
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        // Goes with the caller: the operation that it leaves then ends after its round.
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
        self.core.run_maintenance(handle, report).await;
    }

    async fn run_abandoned(&self) {
        join(self.core.abandoned.run(), self.core.run_splits()).await;
    }

    async fn close(&self) -> Result<(), EngineError> {
        let core = Rc::clone(&self.core);
        core.volume.is_closing.store(true, Ordering::Release);
        let close = async move {
            while !core.volume.compactions.is_idle() {
                yield_now().await;
            }
            core.checkpoint(true).await
        };
        self.core.abandoned.detachable(close).await
    }

    fn record_layout(&self) -> RecordLayout {
        record::LAYOUT
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        Some(self.core.volume.owner_core(key))
    }

    fn drive_core(&self, key: &Key, drive_cores: usize) -> usize {
        self.core.volume.core_of_store(key, drive_cores)
    }

    fn has_abandoned(&self) -> bool {
        !self.core.volume.abandoned.is_zero()
    }

    fn statistics(&self) -> EngineStatistics {
        self.core.volume.statistics()
    }
}
