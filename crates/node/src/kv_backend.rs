//! Executes one request of a Key Value namespace on an engine.
//!
//! In: an operation whose key, lengths and buffers the target has checked. Out: exactly one outcome. Device and
//! engine errors are logged here, once, with key and device; the host gets a status.

use crate::buffer_wait::{BUFFER_RETRY_INTERVAL, BUFFER_WAIT_MAX};
use crate::fair_yield::{FairYield, YieldSlot};
use octokv_base::{BufferPool, Key};
use octokv_engine::{
    DeleteOutcome, Engine, EngineError, IteratorOptions, IteratorProgress, KeySink, PairSink, PrefetchStage,
    PutMode, PutOutcome, StoredValue,
};
use octokv_nvmf::{IteratorHandle, IteratorRequest, RequestOperation, RequestOutcome, StoreMode};
use octokv_runtime::ReactorHandle;
use octokv_wire::iterator::{PairListWriter, buffer_bytes_for};
use octokv_wire::kv::KeyListWriter;
use std::future::Future;
use std::rc::Rc;
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
    pub device_name: Rc<str>,
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
                RequestOperation::List { start, limit_bytes, long_keys } => {
                    // Boxed: a task slot has the size of its largest future and is moved into place.
                    Box::pin(self.list(&start, limit_bytes as usize, long_keys)).await
                }
                // Boxed as a list is.
                RequestOperation::CreateIterator(request) => Box::pin(self.create_iterator(*request)).await,
                RequestOperation::NextPairs { iterator, limit_bytes, pairs_max } => {
                    Box::pin(self.next_pairs(&iterator, limit_bytes as usize, pairs_max)).await
                }
                RequestOperation::SeekIterator { iterator, key } => {
                    Box::pin(self.seek_iterator(&iterator, &key)).await
                }
                RequestOperation::Flush => match Box::pin(self.engine.flush()).await {
                    Ok(()) => RequestOutcome::Flushed,
                    Err(error) => self.log_failure(
                        "flush",
                        &Key::new(&[]).expect("an empty key is within bounds"),
                        error,
                    ),
                },
                RequestOperation::Read { .. }
                | RequestOperation::Write { .. }
                | RequestOperation::Compare { .. }
                | RequestOperation::WriteZeroes { .. }
                | RequestOperation::Deallocate { .. }
                | RequestOperation::Verify { .. } => {
                    unreachable!("the target dispatches on the namespace's command set")
                }
            }
        }
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
            Err(error) => self.log_iterator_failure("next", error),
        }
    }

    async fn seek_iterator(&self, handle: &IteratorHandle, key: &Key) -> RequestOutcome {
        let Some(iterator) = Self::iterator_of(handle) else { return RequestOutcome::NotReady };
        match self.engine.seek_iterator(iterator, key).await {
            Ok(()) => RequestOutcome::Sought,
            Err(error) => self.log_failure("seek", key, error),
        }
    }

    fn log_iterator_failure(&self, command: &'static str, error: EngineError) -> RequestOutcome {
        self.log_failure(command, &Key::new(&[]).expect("an empty key is within bounds"), error)
    }

    fn log_failure(&self, command: &'static str, key: &Key, error: EngineError) -> RequestOutcome {
        if error == EngineError::NoMemory {
            tracing::info!(command, %key, "out of buffers: command fails with a retryable status");
            return RequestOutcome::Busy;
        }
        tracing::error!(command, %key, device = &*self.device_name, %error, "command failed");
        RequestOutcome::Unrecovered
    }
}
