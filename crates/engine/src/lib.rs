//! Storage engines: key-value stores on a block device that recover from any crash.
//!
//! # Layout
//! - this file: the [`Engine`] trait, its outcomes and its errors.
//! - [`hash`]: OctoKV's hash engine: the index in memory, records and an index journal on the device.
//! - [`conformance`]: the test suite of every engine, against a model.
//! - [`linearizability`]: whether what concurrent callers saw has an order.
//! - [`bug_injection`]: deliberate bugs that test the tests.
//! - `sync`: the atomics and the lock of the model-checked modules, replaceable by loom's.

pub mod bug_injection;
pub mod conformance;
pub mod hash;
pub mod linearizability;
mod sync;

use octokv_base::{Buffer, Key};
use octokv_device::DeviceError;
use std::future::Future;

/// The condition of a put on the existence of its key (NVMe KV 1.3, Store options).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// Stores the value whether or not the key exists.
    Upsert,
    /// Stores the value only if the key does not exist.
    AddOnly,
    /// Stores the value only if the key exists.
    UpdateOnly,
}

/// When a write is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// After a flush, which all waiting writes share: the write survives a power loss.
    PowerSafe,
    /// When the device has completed it, as in the papers: a power loss may undo it.
    Completed,
}

/// The outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value is stored, with the engine's durability.
    Stored,
    /// The key exists, and the mode is [`PutMode::AddOnly`].
    Exists,
    /// The key does not exist, and the mode is [`PutMode::UpdateOnly`].
    NotFound,
    /// No space is left for the value; the previous value remains.
    Full,
    /// The value is longer than the engine's limit.
    TooLong,
}

/// A value within the buffer of its record.
#[derive(Debug)]
pub struct StoredValue {
    /// The whole record.
    pub buffer: Buffer,
    /// The offset of the value in the buffer, in bytes.
    pub offset: usize,
    /// The length of the value, in bytes.
    pub bytes: usize,
}

impl StoredValue {
    /// The bytes of the value.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.offset..self.offset + self.bytes]
    }
}

/// The outcome of a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// The key is deleted, with the engine's durability.
    Deleted,
    /// The key did not exist.
    NotFound,
}

/// Why an operation failed. The outcomes that depend on the key (not found, full) are not errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The key's record on the device is not the one that was written.
    #[error("the record at block {lba} is corrupt")]
    Corrupt {
        /// The first block of the record.
        lba: u64,
    },
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(#[from] DeviceError),
    /// A journal write failed earlier: nothing more is written until the engine is opened again.
    #[error("read-only since a journal write failed; restart to recover")]
    ReadOnly,
    /// No memory is left within the buffer budget; the same operation may succeed later.
    #[error("out of buffers; try again")]
    NoMemory,
}

/// Receives the keys of a listing one by one.
pub trait KeySink {
    /// Offers the next key. False if there is no space for it, which ends the listing.
    fn offer(&mut self, key: &[u8]) -> bool;
    /// Awaited before each page of a listing, so that a long listing can yield to other commands.
    fn yield_point(&mut self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

impl<F: FnMut(&[u8]) -> bool> KeySink for F {
    fn offer(&mut self, key: &[u8]) -> bool {
        self(key)
    }
}

/// Statistics of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// The number of keys.
    pub keys: u64,
    /// The size of the record area, in bytes.
    pub capacity_bytes: u64,
    /// The part of it that records occupy, in bytes.
    pub used_bytes: u64,
    /// Memory of the index, in bytes.
    pub index_bytes: u64,
    /// Journal batches written since opening.
    pub journal_batches: u64,
    /// Checkpoints written since opening.
    pub checkpoints: u64,
}

/// The stages of prefetching for a coming operation. Issued one after the other with other operations in between, they
/// bring index and record into the processor's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchStage {
    /// The header of the key's index partition.
    Partition,
    /// The index entry.
    Entry,
    /// The front of the record, with the key.
    Record,
}

/// One core's handle on a key-value store.
///
/// Any core may run any operation on any key; concurrent operations on one key are linearizable. REQUIRES: the future of
/// an operation is polled to completion; dropping it earlier leaves the engine read-only, as a crash would.
pub trait Engine {
    /// Stores a value, which begins in `record` at [`octokv_base::value_offset`] of the key's length.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::ReadOnly`] after a failed journal write. The previous value remains,
    /// except that after a journal write failure either value may be found after recovery.
    fn put(
        &self,
        key: &Key,
        mode: PutMode,
        record: Buffer,
        value_bytes: usize,
    ) -> impl Future<Output = Result<PutOutcome, EngineError>>;
    /// Reads a value; `None` if the key does not exist.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Corrupt`] if no intact record is the key's.
    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>>;
    /// Deletes a key.
    ///
    /// # Errors
    /// As for [`Engine::put`].
    fn delete(&self, key: &Key) -> impl Future<Output = Result<DeleteOutcome, EngineError>>;
    /// The length of a key's value in bytes; `None` if the key does not exist.
    ///
    /// # Errors
    /// As for [`Engine::get`]; the value itself is not verified.
    fn exist(&self, key: &Key) -> impl Future<Output = Result<Option<usize>, EngineError>>;
    /// Offers keys from `start` (inclusive; empty for all) in the engine's order until the sink has no space. If `start`
    /// does not exist, the listing begins at the next key of that order.
    ///
    /// # Errors
    /// Device failures and no memory. Damaged records are left out.
    fn list(&self, start: &Key, sink: &mut impl KeySink) -> impl Future<Output = Result<(), EngineError>>;
    /// Makes all acknowledged writes durable.
    ///
    /// # Errors
    /// Device failures; after a failed flush the engine is read-only.
    fn flush(&self) -> impl Future<Output = Result<(), EngineError>>;
    /// Prefetches for a coming operation on the key. A hint, without effect on outcomes.
    fn prefetch(&self, _key: &Key, _stage: PrefetchStage) {}
    /// The current statistics.
    fn statistics(&self) -> EngineStatistics;
}
