//! One core's handle on a volume with a cache of values.
//!
//! Reads are served by the cache or fill it. Changes own their key and a reference to the engine, so that they continue
//! without their caller ([`common::abandoned`](crate::common::abandoned)): a key stays blocked for as long as the engine may
//! apply a change of it. A value that expires is not kept: only the engine knows the time.

use super::value_cache::{CacheHash, CacheRead, CachedValue, FillLease, ValueCache};
use crate::common::abandoned::{AbandonedCount, AbandonedOperations};
use crate::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, FoundNow, IteratorOptions, IteratorProgress,
    KeyLookup, KeySink, KeyStatus, PairSink, PrefetchStage, PutOptions, PutOutcome, PutValue, ScanSink,
    StoredValue, ValueRange,
};
use octokv_base::{DataRef, Key, Received, RecordLayout, RingRange, UnixTime, Version};
use octokv_runtime::ReactorHandle;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// See the module header. Dropping it while abandoned changes run is a crash of this core to the volume.
pub struct CachedEngine<E> {
    engine: Rc<E>,
    cache: Arc<ValueCache>,
    abandoned: AbandonedOperations,
}

impl<E: Engine + 'static> CachedEngine<E> {
    /// A handle with a cache that all handles of the volume share. `abandoned` counts the changes that callers dropped on any
    /// of them.
    pub fn new(engine: E, cache: Arc<ValueCache>, abandoned: AbandonedCount) -> CachedEngine<E> {
        CachedEngine { engine: Rc::new(engine), cache, abandoned: AbandonedOperations::new(abandoned) }
    }

    /// The engine behind the cache. REQUIRES: the caller changes nothing by it.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// Runs a change of a key to its end, also if its caller drops the future. `operation` has not been polled yet.
    async fn change<T: 'static>(&self, key: &Key, operation: impl Future<Output = T> + 'static) -> T {
        let (key, cache) = (key.clone(), Arc::clone(&self.cache));
        let change = async move {
            let change = cache.begin_change(cache.hash(key.as_bytes()), key.as_bytes());
            let outcome = operation.await;
            change.end();
            outcome
        };
        self.abandoned.detachable(change).await
    }

    fn read(&self, key: &Key) -> CacheRead {
        let key = key.as_bytes();
        self.cache.read(self.cache.hash(key), key)
    }

    fn fill(&self, lease: FillLease, key: &Key, value: &StoredValue) {
        if value.bytes == value.value_bytes && value.expires_at == UnixTime::NEVER {
            self.cache.fill(lease, key, value.as_bytes(), value.version);
        }
    }
}

/// The part of a cached value that a read requested.
fn stored_value(value: CachedValue, range: ValueRange) -> StoredValue {
    let value_bytes = value.bytes.len() as u32;
    let requested = range.within(value_bytes);
    StoredValue {
        buffer: value.bytes.into(),
        offset: requested.start,
        bytes: requested.end - requested.start,
        value_bytes,
        version: value.version,
        expires_at: UnixTime::NEVER,
    }
}

impl<E> Drop for CachedEngine<E> {
    fn drop(&mut self) {
        // They refer to the engine, whose drop is the crash of its core.
        self.abandoned.clear();
    }
}

impl<E: Engine + 'static> Engine for CachedEngine<E> {
    type Iterator = E::Iterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let (engine, owned_key) = (Rc::clone(&self.engine), key.clone());
        self.change(key, async move { engine.put_with(&owned_key, value, options).await }).await
    }

    async fn get(&self, key: &Key) -> Result<Option<StoredValue>, EngineError> {
        let lease = match self.read(key) {
            CacheRead::Hit(value) => return Ok(Some(stored_value(value, ValueRange::ALL))),
            CacheRead::Miss(lease) => lease,
        };
        let found = self.engine.get(key).await?;
        if let (Some(lease), Some(value)) = (lease, &found) {
            self.fill(lease, key, value);
        }
        Ok(found)
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        let lease = match self.read(key) {
            CacheRead::Hit(value) => return Ok(Some(stored_value(value, range))),
            CacheRead::Miss(lease) => lease,
        };
        let found = self.engine.get_range(key, range).await?;
        if let (Some(lease), Some(value)) = (lease, &found) {
            self.fill(lease, key, value);
        }
        Ok(found)
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let (engine, owned_key) = (Rc::clone(&self.engine), key.clone());
        self.change(key, async move { engine.delete_with(&owned_key, version).await }).await
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        match self.cache.hit(self.cache.hash(key.as_bytes()), key.as_bytes()) {
            Some(value) => Ok(Some(KeyStatus {
                value_bytes: value.bytes.len(),
                version: value.version,
                expires_at: UnixTime::NEVER,
            })),
            None => self.engine.status(key).await,
        }
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        self.engine.list(start, sink).await
    }

    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        self.engine.scan(range, since, sink).await
    }

    /// No value changes: only tombstones go.
    fn create_iterator(
        &self,
        options: IteratorOptions,
    ) -> impl Future<Output = Result<Option<E::Iterator>, EngineError>> {
        self.engine.create_iterator(options)
    }

    fn next_pairs(
        &self,
        iterator: &E::Iterator,
        sink: &mut impl PairSink,
    ) -> impl Future<Output = Result<IteratorProgress, EngineError>> {
        self.engine.next_pairs(iterator, sink)
    }

    fn seek_iterator(
        &self,
        iterator: &E::Iterator,
        key: &Key,
    ) -> impl Future<Output = Result<(), EngineError>> {
        self.engine.seek_iterator(iterator, key)
    }

    fn keep_iterator(&self, iterator: &E::Iterator) {
        self.engine.keep_iterator(iterator);
    }

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        self.engine.forget_below(version).await
    }

    /// Which keys go is the engine's choice: the cache is emptied.
    async fn give_up_space(&self, bytes: u64) -> Result<u64, EngineError> {
        let (engine, cache) = (Rc::clone(&self.engine), Arc::clone(&self.cache));
        let operation = async move {
            let change = cache.begin_change_of_all();
            let outcome = engine.give_up_space(bytes).await;
            change.end();
            outcome
        };
        self.abandoned.detachable(operation).await
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        self.engine.compact_all().await
    }

    async fn flush(&self) -> Result<(), EngineError> {
        self.engine.flush().await
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        self.engine.maintain(handle, report).await;
    }

    async fn run_abandoned(&self) {
        let (mut own, mut engines) = (pin!(self.abandoned.run()), pin!(self.engine.run_abandoned()));
        poll_fn(|context| -> Poll<()> {
            // Neither ends.
            let _ = own.as_mut().poll(context);
            let _ = engines.as_mut().poll(context);
            Poll::Pending
        })
        .await;
    }

    async fn close(&self) -> Result<(), EngineError> {
        self.engine.close().await
    }

    fn record_layout(&self) -> RecordLayout {
        self.engine.record_layout()
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        self.engine.owner_core(key)
    }

    fn has_abandoned(&self) -> bool {
        self.abandoned.has_any() || self.engine.has_abandoned()
    }

    fn drive_core(&self, key: &Key, drive_cores: usize) -> usize {
        self.engine.drive_core(key, drive_cores)
    }

    fn may_end_at_once(&self) -> bool {
        true
    }

    /// Whatever the engine could do at once, it would do behind the cache's back: only hits end at once, on any core.
    #[inline]
    fn begin_lookup(&self, key: &[u8]) -> Option<KeyLookup> {
        let hash = self.cache.hash(key);
        Some(KeyLookup { hash: hash.0.into(), ..KeyLookup::default() })
    }

    #[inline]
    fn get_now(
        &self,
        key: &[u8],
        lookup: &KeyLookup,
        mut receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<FoundNow> {
        let value = self.cache.hit(CacheHash(lookup.hash as u64), key)?;
        match receive(DataRef::Shared(&value.bytes)) {
            Received::Taken => Some(FoundNow::Taken),
            // Shared bytes are not lent: a receiver keeps the buffer.
            Received::Refused | Received::Lent(_) => None,
        }
    }

    fn exist_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<Option<usize>> {
        let value = self.cache.hit(CacheHash(lookup.hash as u64), key)?;
        Some(Some(value.bytes.len()))
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        self.engine.prefetch(key, stage);
    }

    fn statistics(&self) -> EngineStatistics {
        EngineStatistics { cache: self.cache.statistics(), ..self.engine.statistics() }
    }
}
