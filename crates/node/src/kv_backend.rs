//! Executes one request of a Key Value namespace on an engine.
//!
//! In: an operation whose key, lengths and buffers the target has checked. Out: exactly one outcome. Device and
//! engine errors are logged here, once, with key and device; the host gets a status.

use crate::buffer_wait::{BUFFER_RETRY_INTERVAL, BUFFER_WAIT_MAX};
use crate::fair_yield::{FairYield, YieldSlot};
use octokv_base::{BufferPool, Key};
use octokv_engine::{
    DeleteOutcome, Engine, EngineError, KeySink, PrefetchStage, PutMode, PutOutcome, StoredValue,
};
use octokv_nvmf::{RequestOperation, RequestOutcome, StoreMode};
use octokv_runtime::ReactorHandle;
use octokv_wire::kv::KeyListWriter;
use std::future::Future;
use std::rc::Rc;

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

    fn log_failure(&self, command: &'static str, key: &Key, error: EngineError) -> RequestOutcome {
        if error == EngineError::NoMemory {
            tracing::info!(command, %key, "out of buffers: command fails with a retryable status");
            return RequestOutcome::Busy;
        }
        tracing::error!(command, %key, device = &*self.device_name, %error, "command failed");
        RequestOutcome::Unrecovered
    }
}
