//! Executes one request of a Key Value namespace on an engine.
//!
//! In: an operation whose key, lengths and buffers the target has checked. Out: exactly one outcome. Device and
//! engine errors are logged here, once, with key and device; the host gets a status.

use crate::buffer_wait::{BUFFER_RETRY_INTERVAL, BUFFER_WAIT_MAX};
use crate::fair_yield::{FairYield, YieldSlot};
use octokv_base::{BufferPool, Key};
use octokv_device::DeviceError;
use octokv_engine::{
    DeleteOutcome, Engine, EngineError, IteratorOptions, IteratorProgress, KeySink, PairSink, PrefetchStage,
    PutMode, PutOutcome, StoredValue,
};
use octokv_nvmf::{IteratorHandle, IteratorRequest, RequestOperation, RequestOutcome, StoreMode};
use octokv_runtime::ReactorHandle;
use octokv_wire::iterator::{PairListWriter, buffer_bytes_for};
use octokv_wire::kv::KeyListWriter;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Longest key of the standard commands, in bytes.
const STANDARD_KEY_BYTES_MAX: usize = octokv_wire::kv::KEY_BYTES_MAX;

/// One core's backend of a Key Value namespace.
pub struct KvBackend<E> {
    /// The core's view of the engine.
    pub engine: E,
    /// The core's buffers.
    pub pool: BufferPool,
    /// The core's clock and timers.
    pub handle: ReactorHandle,
    /// The device's name in messages.
    pub device_names: RefCell<Vec<Box<str>>>,
    /// Shares the core among long list requests.
    pub list_yield: FairYield,
}

/// Receives the keys of one list request.
struct ListSink<'a> {
    writer: KeyListWriter<'a>,
    long_keys: bool,
    yield_slot: YieldSlot<'a>,
    handle: &'a ReactorHandle,
}

impl KeySink for ListSink<'_> {
    fn offer(&mut self, key: &[u8]) -> bool {
        // A standard command cannot carry a longer key.
        (!self.long_keys && key.len() > STANDARD_KEY_BYTES_MAX) || self.writer.push(key)
    }

    async fn yield_point(&mut self) {
        self.yield_slot.yield_now(self.handle).await;
    }
}

/// Receives the pairs of one Next.
struct IteratorSink<'a> {
    writer: PairListWriter<'a>,
    /// The buffer that the pair needs which had no space.
    refused_bytes: Option<usize>,
    yield_slot: YieldSlot<'a>,
    handle: &'a ReactorHandle,
}

impl PairSink for IteratorSink<'_> {
    fn has_space(&mut self, key_bytes: usize, value_bytes: usize) -> bool {
        let has_space = self.writer.has_space(key_bytes, value_bytes);
        if !has_space {
            self.refused_bytes = Some(buffer_bytes_for(key_bytes, value_bytes));
        }
        has_space
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.writer.push(key, value);
    }

    async fn yield_point(&mut self) {
        self.yield_slot.yield_now(self.handle).await;
    }
}

/// The engine's mode of a Store.
pub(crate) fn put_mode(mode: StoreMode) -> PutMode {
    match mode {
        StoreMode::Upsert => PutMode::Upsert,
        StoreMode::AddOnly => PutMode::AddOnly,
        StoreMode::UpdateOnly => PutMode::UpdateOnly,
    }
}

/// The outcome of a Store.
pub(crate) fn put_outcome(outcome: PutOutcome) -> RequestOutcome {
    match outcome {
        PutOutcome::Stored => RequestOutcome::Stored,
        PutOutcome::Exists => RequestOutcome::AlreadyExists,
        PutOutcome::NotFound => RequestOutcome::NotFound,
        PutOutcome::Full => RequestOutcome::CapacityExceeded,
        PutOutcome::TooLong => RequestOutcome::InvalidValueSize,
        PutOutcome::OtherVersion(_) | PutOutcome::NotNewer(_) => {
            unreachable!("a standard command carries no version")
        }
    }
}

impl<E: Engine> KvBackend<E> {
    /// Executes one operation.
    // An `async fn` would move the operation once more.
    #[expect(clippy::manual_async_fn)]
    pub fn execute(&self, operation: RequestOperation) -> impl Future<Output = RequestOutcome> + '_ {
        async move {
            match operation {
                RequestOperation::Store { key, mode, record, value_bytes } => {
                    match self.engine.put(&key, put_mode(mode), record, value_bytes as usize).await {
                        Ok(outcome) => put_outcome(outcome),
                        Err(error) => self.log_failure("store", &key, error),
                    }
                }
                RequestOperation::Retrieve { key, .. } => match self.engine.get(&key).await {
                    // Boxed because it is rare: it would enlarge every worker.
                    Err(EngineError::NoMemory) => Box::pin(self.retrieve_later(&key)).await,
                    found => self.retrieved(&key, found),
                },
                RequestOperation::Delete { key } => match self.engine.delete(&key).await {
                    Ok(DeleteOutcome::Deleted) => RequestOutcome::Deleted,
                    Ok(DeleteOutcome::NotFound) => RequestOutcome::NotFound,
                    Ok(DeleteOutcome::NotNewer(_)) => unreachable!("a standard command carries no version"),
                    Err(error) => self.log_failure("delete", &key, error),
                },
                RequestOperation::Exist { key } => match self.engine.exist(&key).await {
                    Ok(Some(bytes)) => RequestOutcome::Exists { value_bytes: bytes as u32 },
                    Ok(None) => RequestOutcome::NotFound,
                    Err(error) => self.log_failure("exist", &key, error),
                },
                // Out of line: a task slot has the size of its largest future, and this one is moved into place.
                rare => self.execute_rare(rare).await,
            }
        }
    }

    /// Executes an operation that is none on one key.
    #[cold]
    #[inline(never)]
    fn execute_rare(
        &self,
        operation: RequestOperation,
    ) -> Pin<Box<dyn Future<Output = RequestOutcome> + '_>> {
        Box::pin(async move {
            match operation {
                RequestOperation::List { start, limit_bytes, long_keys } => {
                    self.list(&start, limit_bytes as usize, long_keys).await
                }
                RequestOperation::CreateIterator(request) => self.create_iterator(*request).await,
                RequestOperation::NextPairs { iterator, limit_bytes, pairs_max } => {
                    self.next_pairs(&iterator, limit_bytes as usize, pairs_max).await
                }
                RequestOperation::SeekIterator { iterator, key } => self.seek_iterator(&iterator, &key).await,
                RequestOperation::Flush => match self.engine.flush().await {
                    Ok(()) => RequestOutcome::Flushed,
                    Err(error) => self.log_keyless_failure("flush", error),
                },
                other => unreachable!("the target dispatches on the namespace's command set: {other:?}"),
            }
        })
    }

    /// Prefetches the memory that `operation` will read, one [`PrefetchStage`] at a time.
    pub fn prefetch(&self, operation: &RequestOperation, stage: PrefetchStage) {
        if let RequestOperation::Store { key, .. }
        | RequestOperation::Retrieve { key, .. }
        | RequestOperation::Delete { key }
        | RequestOperation::Exist { key } = operation
        {
            self.engine.prefetch(key, stage);
        }
    }

    /// The outcome of a Retrieve.
    #[inline]
    fn retrieved(&self, key: &Key, found: Result<Option<StoredValue>, EngineError>) -> RequestOutcome {
        match found {
            Ok(Some(value)) => {
                let (offset, bytes) = (value.offset as usize, value.bytes as usize);
                RequestOutcome::Value { buffer: value.buffer, offset, bytes }
            }
            Ok(None) => RequestOutcome::NotFound,
            Err(error) => self.log_failure("retrieve", key, error),
        }
    }

    /// Retries a Retrieve that found no buffer.
    async fn retrieve_later(&self, key: &Key) -> RequestOutcome {
        let deadline = self.handle.now() + BUFFER_WAIT_MAX;
        loop {
            self.handle.sleep(BUFFER_RETRY_INTERVAL).await;
            match self.engine.get(key).await {
                Err(EngineError::NoMemory) if self.handle.now() < deadline => {}
                found => return self.retrieved(key, found),
            }
        }
    }

    async fn list(&self, start: &Key, limit_bytes: usize, long_keys: bool) -> RequestOutcome {
        let Some(mut buffer) = self.pool.take(limit_bytes) else { return RequestOutcome::Busy };
        let Some(writer) = KeyListWriter::new(&mut buffer) else { return RequestOutcome::InvalidValueSize };
        let yield_slot = self.list_yield.join();
        let mut sink = ListSink { writer, long_keys, yield_slot, handle: &self.handle };
        match self.engine.list(start, &mut sink).await {
            Ok(()) => {
                let bytes = sink.writer.used_bytes();
                drop(sink);
                RequestOutcome::Listing { buffer, bytes }
            }
            Err(error) => self.log_failure("list", start, error),
        }
    }

    async fn create_iterator(&self, request: IteratorRequest) -> RequestOutcome {
        let IteratorRequest { lower, upper, reverse, keys_only } = request;
        let bound = |key: Key| Some(key).filter(|key| !key.is_empty());
        let first = lower.clone();
        let options = IteratorOptions { lower: bound(lower), upper: bound(upper), reverse, keys_only };
        match self.engine.create_iterator(options).await {
            Ok(Some(iterator)) => RequestOutcome::IteratorCreated(IteratorHandle(Arc::new(iterator))),
            Ok(None) => RequestOutcome::TooManyIterators,
            Err(error) => self.log_failure("create iterator", &first, error),
        }
    }

    /// The engine's iterator; `None` of another engine's, as after a namespace was replaced.
    fn iterator_of(handle: &IteratorHandle) -> Option<&E::Iterator> {
        handle.0.downcast_ref()
    }

    async fn next_pairs(
        &self,
        handle: &IteratorHandle,
        limit_bytes: usize,
        pairs_max: u32,
    ) -> RequestOutcome {
        let Some(iterator) = Self::iterator_of(handle) else { return RequestOutcome::NotReady };
        let Some(mut buffer) = self.pool.take(limit_bytes) else { return RequestOutcome::Busy };
        let Some(writer) = PairListWriter::new(&mut buffer, pairs_max) else {
            return RequestOutcome::InvalidValueSize;
        };
        let yield_slot = self.list_yield.join();
        let mut sink = IteratorSink { writer, refused_bytes: None, yield_slot, handle: &self.handle };
        match self.engine.next_pairs(iterator, &mut sink).await {
            Ok(progress) => {
                let is_end = progress == IteratorProgress::AtEnd;
                let (count, refused_bytes) = (sink.writer.count(), sink.refused_bytes);
                if let Some(bytes) = refused_bytes.filter(|_| count == 0) {
                    return RequestOutcome::PairTooLarge { buffer_bytes: bytes as u32 };
                }
                let bytes = sink.writer.finish(is_end);
                drop(sink);
                RequestOutcome::Pairs { buffer, bytes, count, is_end }
            }
            Err(EngineError::IteratorExpired) => RequestOutcome::IteratorExpired,
            Err(error) => self.log_keyless_failure("next", error),
        }
    }

    async fn seek_iterator(&self, handle: &IteratorHandle, key: &Key) -> RequestOutcome {
        let Some(iterator) = Self::iterator_of(handle) else { return RequestOutcome::NotReady };
        match self.engine.seek_iterator(iterator, key).await {
            Ok(()) => RequestOutcome::Sought,
            Err(EngineError::IteratorExpired) => RequestOutcome::IteratorExpired,
            Err(error) => self.log_failure("seek", key, error),
        }
    }

    fn log_keyless_failure(&self, command: &'static str, error: EngineError) -> RequestOutcome {
        self.log_failure(command, &Key::new(&[]).expect("an empty key is within bounds"), error)
    }

    fn log_failure(&self, command: &'static str, key: &Key, error: EngineError) -> RequestOutcome {
        if error == EngineError::NoMemory {
            tracing::info!(command, %key, "out of buffers: command fails with a retryable status");
            return RequestOutcome::Busy;
        }
        if let EngineError::Device { error: DeviceError::Unavailable, .. } = error {
            // It was logged once, when the namespace was opened.
            return RequestOutcome::DeviceUnavailable;
        }
        tracing::error!(command, %key, device = self.device_names.borrow().join(", "), %error, "command failed");
        RequestOutcome::Unrecovered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Buffer;
    use octokv_engine::WallClock;
    use octokv_engine::memory::{MemoryConfig, MemoryEngine};
    use octokv_runtime::{CoreWaker, CpuTime, DeviceDriver, DeviceHandle, block_on, open_device_queue};
    use octokv_wire::iterator::PairList;

    const POOL_BYTES: usize = 1 << 20;

    fn backend() -> KvBackend<MemoryEngine> {
        let core_waker = CoreWaker::without_eventfd();
        let (queue, _) = open_device_queue(DeviceDriver::Threads, 1, &core_waker).expect("worker threads");
        let handle = ReactorHandle::new(core_waker, DeviceHandle::new(queue, 1), CpuTime::simulated());
        let config =
            MemoryConfig { ring_seed: 1, devices: 1, partition_bytes: 1 << 20, value_bytes_max: 1 << 16 };
        let (engine, pool) = (MemoryEngine::new(config, WallClock::default()), BufferPool::new(POOL_BYTES));
        let (device_names, list_yield) = (RefCell::default(), FairYield::default());
        KvBackend { engine, pool, handle, device_names, list_yield }
    }

    fn key(bytes: &[u8]) -> Key {
        Key::new(bytes).expect("short")
    }

    fn run(backend: &KvBackend<MemoryEngine>, operation: RequestOperation) -> RequestOutcome {
        block_on(backend.execute(operation), || ())
    }

    /// A backend with the keys "a" to "e", whose values have 100 bytes, and an iterator over those from "b" on.
    fn iterating() -> (KvBackend<MemoryEngine>, IteratorHandle) {
        let backend = backend();
        for byte in b'a'..=b'e' {
            let (key, mode) = (key(&[byte]), StoreMode::Upsert);
            let mut record = Buffer::zeroed(200);
            record.fill(byte);
            let stored = run(&backend, RequestOperation::Store { key, mode, record, value_bytes: 100 });
            assert!(matches!(stored, RequestOutcome::Stored));
        }
        let request = IteratorRequest { lower: key(b"b"), upper: key(b""), reverse: false, keys_only: false };
        let created = run(&backend, RequestOperation::CreateIterator(Box::new(request)));
        let RequestOutcome::IteratorCreated(iterator) = created else { panic!("{created:?}") };
        (backend, iterator)
    }

    fn next(iterator: &IteratorHandle, limit_bytes: u32, pairs_max: u32) -> RequestOperation {
        RequestOperation::NextPairs { iterator: iterator.clone().into(), limit_bytes, pairs_max }
    }

    fn keys(outcome: RequestOutcome) -> (Vec<u8>, bool) {
        let RequestOutcome::Pairs { buffer, bytes, count, is_end } = outcome else { panic!("{outcome:?}") };
        let list = PairList::check(&buffer[..bytes]).expect("whole pairs");
        assert_eq!((list.count(), list.is_end()), (count, is_end));
        let pairs = list.pairs().inspect(|(key, value)| assert_eq!(*value, [key[0]; 100]));
        (pairs.map(|(key, _)| key[0]).collect(), is_end)
    }

    #[test]
    fn pairs_are_returned_in_order_as_many_as_fit_and_from_where_a_seek_goes() {
        let (backend, iterator) = iterating();
        assert_eq!(keys(run(&backend, next(&iterator, 4096, 1))), (b"b".to_vec(), false));
        assert_eq!(keys(run(&backend, next(&iterator, 8 + 112 + 109, 9))), (b"cd".to_vec(), false));
        assert_eq!(keys(run(&backend, next(&iterator, 4096, 9))), (b"e".to_vec(), true));
        assert_eq!(keys(run(&backend, next(&iterator, 8, 9))), (Vec::new(), true));
        let seek = RequestOperation::SeekIterator { iterator: iterator.clone().into(), key: key(b"cc") };
        assert!(matches!(run(&backend, seek), RequestOutcome::Sought));
        assert_eq!(keys(run(&backend, next(&iterator, 4096, 9))), (b"de".to_vec(), true));
    }

    #[test]
    fn a_pair_without_room_is_told_by_its_length_and_a_node_without_buffers_is_busy() {
        let (backend, iterator) = iterating();
        let refused = run(&backend, next(&iterator, 116, 9));
        assert!(matches!(refused, RequestOutcome::PairTooLarge { buffer_bytes: 117 }), "{refused:?}");
        assert_eq!(keys(run(&backend, next(&iterator, 117, 9))), (b"b".to_vec(), false));
        let held = backend.pool.take(POOL_BYTES - 4096).expect("all but a little");
        assert!(matches!(run(&backend, next(&iterator, 1 << 16, 9)), RequestOutcome::Busy));
        drop(held);
        assert_eq!(keys(run(&backend, next(&iterator, 1 << 16, 9))), (b"cde".to_vec(), true));
    }

    #[test]
    fn an_iterator_of_another_engine_is_not_advanced_and_one_without_owner_makes_room() {
        let (backend, iterator) = iterating();
        let foreign = IteratorHandle(Arc::new(7));
        assert!(matches!(run(&backend, next(&foreign, 4096, 1)), RequestOutcome::NotReady));
        let create = || {
            let request =
                IteratorRequest { lower: key(b""), upper: key(b""), reverse: true, keys_only: true };
            run(&backend, RequestOperation::CreateIterator(Box::new(request)))
        };
        let mut iterators = vec![RequestOutcome::IteratorCreated(iterator)];
        while let created @ RequestOutcome::IteratorCreated(_) = create() {
            iterators.push(created);
        }
        assert!(matches!(create(), RequestOutcome::TooManyIterators));
        iterators.pop();
        assert!(matches!(create(), RequestOutcome::IteratorCreated(_)));
    }
}
