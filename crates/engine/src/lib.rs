//! Storage engines: what keeps values on a device and finds them again after any crash.
//!
//! # Layout
//! - this file: the [`Engine`] contract, its answers and its faults.
//! - [`hash`]: OctoKV's engine: a hash index in memory, records and an index journal on the device.
//! - [`conformance`]: the one suite that every engine passes, against a model.
//! - [`linearizability`]: whether what concurrent callers saw has an order.
//! - [`bug_injection`]: bugs for tests of the tests.

pub mod bug_injection;
pub mod conformance;
pub mod hash;
pub mod linearizability;

use octokv_base::{Buffer, Key};
use octokv_device::DeviceError;
use std::fmt;
use std::future::Future;

/// What a put does where the key exists already, or does not (NVMe KV 1.3, Store options).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// Stores in either case.
    Upsert,
    /// Stores only a key that does not exist.
    AddOnly,
    /// Stores only a key that exists.
    UpdateOnly,
}

/// When a write is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When it survives a power cut: after a flush, shared by all writes that wait for one.
    PowerSafe,
    /// When the device has completed it, as the papers do.
    Completed,
}

/// The answer to a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The value is stored, as durably as the engine promises.
    Stored,
    /// The key exists, and only a new one was to be stored.
    Exists,
    /// The key does not exist, and only an existing one was to be stored.
    NotFound,
    /// No space is left for the value; what was there before is still there.
    Full,
    /// The value is longer than the engine takes.
    TooLong,
}

/// A value in the buffer that it was read into.
#[derive(Debug)]
pub struct StoredValue {
    /// Holds the record; the value is a part of it.
    pub buffer: Buffer,
    /// Where the value begins in the buffer, in bytes.
    pub offset: usize,
    /// How long the value is, in bytes.
    pub bytes: usize,
}

impl StoredValue {
    /// The value itself.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.offset..self.offset + self.bytes]
    }
}

/// The answer to a delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// The key is gone, as durably as the engine promises.
    Deleted,
    /// There was no such key.
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
    /// The device or its I/O queue could not be opened, so nothing was read or written.
    #[error("the device or its I/O queue cannot be opened: {}", OsError(*.os_error))]
    DeviceUnavailable {
        /// The system's error code, if there is one.
        os_error: Option<i32>,
    },
    /// A journal write failed earlier: nothing more is written until the engine is opened again.
    #[error("read-only since a journal write failed; restart to recover")]
    ReadOnly,
    /// No memory is left within the buffer budget; the same operation may succeed later.
    #[error("out of buffers; try again")]
    NoMemory,
}

impl EngineError {
    /// The error of an attempt to open the device or its I/O queue.
    pub fn device_unavailable(error: &std::io::Error) -> EngineError {
        EngineError::DeviceUnavailable { os_error: error.raw_os_error() }
    }
}

/// The text of a system error code.
struct OsError(Option<i32>);

impl fmt::Display for OsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(code) => std::io::Error::from_raw_os_error(code).fmt(f),
            None => f.write_str("no system error code"),
        }
    }
}

/// Takes the keys of a listing one by one; `false` means that there is no room for this one.
pub trait KeySink {
    /// Offers the next key.
    fn offer(&mut self, key: &[u8]) -> bool;
    /// Waited for before each page of a listing: a listing may be long, and others have commands too.
    fn yield_point(&mut self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

impl<F: FnMut(&[u8]) -> bool> KeySink for F {
    fn offer(&mut self, key: &[u8]) -> bool {
        self(key)
    }
}

/// Figures of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// Keys stored.
    pub keys: u64,
    /// Space that may hold records, in bytes.
    pub capacity_bytes: u64,
    /// Space that holds records, in bytes.
    pub used_bytes: u64,
    /// Memory of the index, in bytes.
    pub index_bytes: u64,
    /// Journal batches written since opening.
    pub journal_batches: u64,
    /// Checkpoints written since opening.
    pub checkpoints: u64,
}

/// What an operation that comes soon will look at: given one after the other, each while other operations are
/// carried out, they bring it to the processor's caches step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchStage {
    /// The part of the index that the key is in.
    Partition,
    /// Its entry there.
    Entry,
    /// The front of its record, with the key.
    Record,
}

/// One core's handle on a key-value store.
///
/// Any core may run any operation on any key; concurrent operations on one key are linearizable. A
/// future of an operation must be run to its end: to drop it half-way is a crash of the whole engine.
pub trait Engine {
    /// Stores a value. It lies in `record` behind [`octokv_base::value_offset`] of the key's length.
    fn put(
        &self,
        key: &Key,
        mode: PutMode,
        record: Buffer,
        value_bytes: usize,
    ) -> impl Future<Output = Result<PutOutcome, EngineError>>;
    /// Reads a value, or `None` when there is no such key.
    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>>;
    /// Removes a key.
    fn delete(&self, key: &Key) -> impl Future<Output = Result<DeleteOutcome, EngineError>>;
    /// The length of a key's value in bytes, or `None` when there is no such key.
    fn exist(&self, key: &Key) -> impl Future<Output = Result<Option<usize>, EngineError>>;
    /// Offers keys from `start` (inclusive; empty for all) in the engine's own order until the sink has
    /// no room. Where `start` does not exist, it begins at the next key of that order.
    fn list(&self, start: &Key, sink: &mut impl KeySink) -> impl Future<Output = Result<(), EngineError>>;
    /// Makes all that was acknowledged durable, whatever the durability.
    fn flush(&self) -> impl Future<Output = Result<(), EngineError>>;
    /// Says that an operation on the key comes soon. A hint, that changes no answer.
    fn prefetch(&self, _key: &Key, _stage: PrefetchStage) {}
    /// Figures.
    fn statistics(&self) -> EngineStatistics;
}
