//! Storage engines: key-value stores on block devices that recover from any crash.
//!
//! # Layout
//! - this file: the [`Engine`] trait: the contract of every engine.
//! - [`direct`]: operations that end at once, for the shortest path of a request.
//! - [`operation`]: what operations take and give. [`tree_statistics`], [`log_statistics`]: the statistics of a tree, of logs. [`error`]: why they fail. [`partition`]: the parts of a volume.
//! - [`open_error`]: why a volume does not open. [`verify_report`]: what a verification finds.
//! - [`snapshot_iterator`]: what the operations on iterators take and give. [`iterator_clauses`]: their clauses of the contract.
//! - [`volume`]: a volume, from format to close. [`engine_kind`]: the engines that there are; [`engines`]: their volumes; [`any_engine`]: their handles.
//! - [`common`]: what engines are made of: superblocks, records, group commit, journal and replay, image streams, free space,
//!   epochs, key locks.
//! - [`hash`]: OctoKV's hash engine: the index in memory, records and an index journal on the device.
//! - [`log`]: the log engine (LEED).
//! - [`lsm`]: parts of the ordered engine.
//! - [`cached`]: a cache of values in front of any volume. [`spanned`]: volumes on several devices.
//! - [`memory`]: the contract's model: an engine without a device.
//! - [`conformance`]: the test suite of every engine, against a model. [`contract_clauses`]: the clauses on versions,
//!   expiry, ranges, scans and partitions.
//! - [`volume_suite`]: power loss and damaged blocks, for any volume on one disk or several.
//! - [`linearizability`]: whether what concurrent callers saw has an order.
//! - [`bug_injection`]: deliberate bugs that test the tests.
//! - `sync`: the atomics and the lock of the model-checked modules, replaceable by loom's.

pub mod any_engine;
pub mod bug_injection;
pub mod cached;
pub mod common;
pub mod conformance;
pub mod contract_clauses;
pub mod direct;
pub mod engine_kind;
pub mod engines;
pub mod error;
pub mod hash;
pub mod iterator_clauses;
pub mod linearizability;
pub mod log;
pub mod log_statistics;
pub mod lsm;
pub mod memory;
pub mod open_error;
pub mod operation;
pub mod partition;
pub mod snapshot_iterator;
pub mod spanned;
mod sync;
pub mod tree_statistics;
pub mod verify_report;
pub mod volume;
pub mod volume_suite;

pub use any_engine::{AnyEngine, AnyIterator};
pub use cached::{CacheStatistics, CachedEngine, CachedVolume};
pub use direct::{FoundNow, KeyLookup, LookupStage};
pub use engine_kind::{EngineKind, UnknownEngine};
pub use engines::AnyVolume;
pub use error::{Capability, EngineError, VolumePlace};
pub use log_statistics::{ChunkLogStatistics, LogStatistics, ScrubStatistics};
pub use open_error::{IndexMismatch, MetadataStructure, OpenError};
pub use operation::{
    CompactionStatistics, DeleteOutcome, Durability, EngineStatistics, KeyStatus, PrefetchStage, PutMode,
    PutOptions, PutOutcome, PutValue, ScanEntry, StoredValue, ValueRange, value_digest,
};
pub use partition::{PartitionError, PartitionInfo, Partitions};
pub use snapshot_iterator::{IteratorOptions, IteratorProgress, NoIterator, PairSink};
pub use spanned::{DeviceQueue, MoveStage, QueueAdmission, QueueClosed, SpannedVolume};
pub use tree_statistics::{
    LevelStatistics, PostponedStatistics, SnapshotAge, StallStatistics, TREE_LEVELS, TreeStatistics,
};
pub use verify_report::{
    Finding, FindingKind, ProblemKind, RecordProblem, SalvageReport, VerifyFailure, VerifyObserver,
    VerifyReport,
};
pub use volume::{
    DeviceLayout, DeviceReport, FormatConfig, FormatVersions, HashKind, KeyTraffic, OpenConfig, PrefetchPlan,
    QueueReport, SwapReport, TreeOptions, Volume, VolumeInfo, WallClock,
};

use crate::common::drive_cores::core_of_drive;
use octokv_base::{Buffer, DataRef, Key, Received, RecordLayout, RingPosition, RingRange, Version};
use octokv_runtime::ReactorHandle;
use std::future::Future;

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

/// Receives the entries of a scan one by one.
pub trait ScanSink {
    /// Offers the next entry. False if there is no space for it, which ends the scan.
    fn offer(&mut self, entry: &ScanEntry<'_>) -> bool;
}

impl<F: FnMut(&ScanEntry<'_>) -> bool> ScanSink for F {
    fn offer(&mut self, entry: &ScanEntry<'_>) -> bool {
        self(entry)
    }
}

/// One core's handle on a key-value store.
///
/// Any core may run any operation on any key, unless [`Engine::owner_core`] names one; concurrent operations on one key
/// are linearizable.
///
/// Dropped operations: the future of an operation may be dropped at any time, except those of [`Engine::maintain`], which has to
/// run until the volume is idle, and [`Engine::run_abandoned`]. A future that was never polled has done nothing. A read releases
/// what it holds at once. A write happens or not, as a whole, and its caller does not learn which. If it is half done it is abandoned:
/// it keeps the lock of its key, its space and its buffers, other writes may wait for it, and the volume is not idle. Only
/// [`Engine::run_abandoned`], of the handle on which the write began, runs it to its end and releases what it holds.
///
/// Versions: a write with a version applies only if it is newer than the key's version, one without always; the version
/// of a key never decreases, deletes included, until [`Engine::forget_below`]. Expiry: a key whose time has come is as one
/// that does not exist, but for its version.
pub trait Engine {
    /// An iterator over a snapshot, which is released when the iterator is dropped, on any thread. It belongs to the volume, not
    /// to a core: any handle may advance it.
    type Iterator: Send + Sync + 'static;

    /// Stores a value.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::ReadOnly`] after a failed journal write. The previous value remains,
    /// except that after a journal write failure either value may be found after recovery.
    /// [`EngineError::NoPartition`], and [`EngineError::Unsupported`] for options that the volume's format lacks.
    fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> impl Future<Output = Result<PutOutcome, EngineError>>;
    /// Reads a value or a part of it; `None` if the key does not exist.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Corrupt`] if no intact record is the key's.
    fn get_range(
        &self,
        key: &Key,
        range: ValueRange,
    ) -> impl Future<Output = Result<Option<StoredValue>, EngineError>>;
    /// Deletes a key. With a version other than [`Version::NONE`], its tombstone remains, also of a key that did not exist.
    ///
    /// # Errors
    /// As for [`Engine::put_with`].
    fn delete_with(
        &self,
        key: &Key,
        version: Version,
    ) -> impl Future<Output = Result<DeleteOutcome, EngineError>>;
    /// Length, version and expiry of a key's value; `None` if the key does not exist.
    ///
    /// # Errors
    /// As for [`Engine::get_range`]; the value itself is not verified.
    fn status(&self, key: &Key) -> impl Future<Output = Result<Option<KeyStatus>, EngineError>>;
    /// Offers keys from `start` (inclusive; empty for all) in the engine's order until the sink has no space: ring order, or
    /// the order of keys if the engine is ordered. If `start` does not exist, the listing begins at the next key of that
    /// order.
    ///
    /// # Errors
    /// Device failures and no memory. Damaged records are left out.
    fn list(&self, start: &Key, sink: &mut impl KeySink) -> impl Future<Output = Result<(), EngineError>>;
    /// Offers the last write of each key of a ring range, in ring order, if its version is `since` or newer, until the sink
    /// has no space. Tombstones are included. A key that has expired is offered as a tombstone, or not at all if it has no
    /// version. Damaged records are left out: compared with another replica they are missing, and so repaired.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Unsupported`].
    fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> impl Future<Output = Result<(), EngineError>>;
    /// Creates an iterator over the pairs that the volume has now: those of writes that were acknowledged, and of others or not.
    /// What expires later is still yielded. `None` if there are as many as may be; one that is dropped makes room for another.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] of an engine that has no order of keys; device failures and no memory.
    fn create_iterator(
        &self,
        _options: IteratorOptions,
    ) -> impl Future<Output = Result<Option<Self::Iterator>, EngineError>> {
        async { Err(EngineError::Unsupported(Capability::Iterators)) }
    }
    /// Offers the next pairs of an iterator of this volume until the sink has no space. Calls for one iterator are served in their
    /// order.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Corrupt`] at a part that cannot be read, behind which the iterator then goes on.
    /// Only a call whose sink has received nothing fails: one that met an error later ends before it.
    fn next_pairs(
        &self,
        _iterator: &Self::Iterator,
        _sink: &mut impl PairSink,
    ) -> impl Future<Output = Result<IteratorProgress, EngineError>> {
        async { Err(EngineError::Unsupported(Capability::Iterators)) }
    }
    /// Moves an iterator of this volume to the first key from `key` on, in its direction and within its bounds.
    ///
    /// # Errors
    /// As for [`Engine::next_pairs`].
    fn seek_iterator(
        &self,
        _iterator: &Self::Iterator,
        _key: &Key,
    ) -> impl Future<Output = Result<(), EngineError>> {
        async { Err(EngineError::Unsupported(Capability::Iterators)) }
    }
    /// Counts as a use of an iterator of this volume, which is not advanced: one that is not used for long expires.
    fn keep_iterator(&self, _iterator: &Self::Iterator) {}
    /// Forgets the tombstones below `version`: no write that is older will come.
    ///
    /// # Errors
    /// As for [`Engine::put_with`].
    fn forget_below(&self, version: Version) -> impl Future<Output = Result<(), EngineError>>;
    /// Removes keys without a version, in the engine's own order, until `bytes` are free or none is left. Gives the bytes
    /// that it freed.
    ///
    /// # Errors
    /// As for [`Engine::put_with`].
    fn give_up_space(&self, bytes: u64) -> impl Future<Output = Result<u64, EngineError>>;
    /// Compacts until nothing can be gained, without pauses: what maintenance does beside other work. An engine that compacts nothing does nothing.
    ///
    /// # Errors
    /// Device failures, no memory and no space. The volume's contents are the same, compacted as far as it went.
    fn compact_all(&self) -> impl Future<Output = Result<(), EngineError>> {
        async { Ok(()) }
    }
    /// Makes all acknowledged writes durable.
    ///
    /// # Errors
    /// Device failures; after a failed flush the engine is read-only. [`EngineError::ReadOnly`] from then on, and after any put or
    /// delete that failed and may be on the device nevertheless.
    fn flush(&self) -> impl Future<Output = Result<(), EngineError>>;
    /// The volume's work in the background: checkpoints, deferred flushes, compaction. Ends when the volume is read-only or
    /// has no such work. REQUIRES: exactly one core runs it while the volume is open. `report` receives each error.
    fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) -> impl Future<Output = ()>;
    /// Runs the abandoned operations of this handle to their end, those included that are dropped from now on; never ends. An
    /// engine whose writes end in their first poll has none. REQUIRES: while operations may be dropped, exactly one task of the
    /// handle's core runs it, until the volume is idle. To drop it, or the handle, before that is a crash of the core to the volume:
    /// the volume may become read-only, and what other cores wrote remains.
    fn run_abandoned(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }
    /// Writes what makes the next opening fast. REQUIRES: no operation follows or still runs, on any core ([`Volume::is_idle`]).
    ///
    /// # Errors
    /// Device failures; acknowledged writes are safe nevertheless.
    fn close(&self) -> impl Future<Output = Result<(), EngineError>>;
    /// Where the buffer of a put has key and value.
    fn record_layout(&self) -> RecordLayout;
    /// The core that has to run the operations of a key, the same for the life of the volume; `None` if any core may, and
    /// then for every key. List, scan and flush have no owner.
    fn owner_core(&self, _key: &Key) -> Option<usize> {
        None
    }
    /// The core, of the first `drive_cores`, of the device that has a key, where a node with such cores executes its operations in place
    /// of [`Engine::owner_core`]. Where they are executed is no matter of correctness: it changes when a key's device does.
    fn drive_core(&self, key: &Key, drive_cores: usize) -> usize {
        core_of_drive((0, 1), RingPosition::of(key, 0), drive_cores)
    }
    /// Whether keys have owner cores.
    fn has_owner_cores(&self) -> bool {
        Key::new(&[]).is_some_and(|key| self.owner_core(&key).is_some())
    }
    /// Whether [`Engine::begin_lookup`] may begin any lookup.
    fn may_end_at_once(&self) -> bool {
        false
    }
    /// Begins the lookup of a key for the operations that end at once ([`direct`]); `None` if this engine has none for it.
    fn begin_lookup(&self, _key: &[u8]) -> Option<KeyLookup> {
        None
    }
    /// Advances a lookup, each stage once and in order.
    fn advance_lookup(&self, _lookup: &mut KeyLookup, _stage: LookupStage) {}
    /// Calls `receive` with the key's verified value, while nothing changes it. `None` if [`Engine::get`] has to find out, also if
    /// `receive` refused.
    /// REQUIRES: `receive` uses no engine and no device.
    fn get_now(
        &self,
        _key: &[u8],
        _lookup: &KeyLookup,
        _receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<FoundNow> {
        None
    }
    /// The length of a key's value in bytes; `None` if [`Engine::exist`] has to find out.
    fn exist_now(&self, _key: &[u8], _lookup: &KeyLookup) -> Option<Option<usize>> {
        None
    }
    /// Stores a value; `None`, and nothing has changed, if that takes [`Engine::put`].
    fn put_now(&self, _key: &[u8], _lookup: &KeyLookup, _mode: PutMode, _value: &[u8]) -> Option<PutOutcome> {
        None
    }
    /// Deletes a key; `None`, and nothing has changed, if that takes [`Engine::delete`].
    fn delete_now(&self, _key: &[u8], _lookup: &KeyLookup) -> Option<DeleteOutcome> {
        None
    }
    /// Prefetches for a coming operation on the key. A hint, without effect on outcomes.
    fn prefetch(&self, _key: &Key, _stage: PrefetchStage) {}
    /// Whether operations of the volume whose futures were dropped have not ended, on any core: their writes may still happen.
    fn has_abandoned(&self) -> bool;
    /// The current statistics.
    fn statistics(&self) -> EngineStatistics;

    /// Stores a value that is in one buffer, without version or expiry ([`Engine::put_with`]).
    ///
    /// # Errors
    /// As for [`Engine::put_with`].
    fn put(
        &self,
        key: &Key,
        mode: PutMode,
        record: Buffer,
        value_bytes: usize,
    ) -> impl Future<Output = Result<PutOutcome, EngineError>> {
        self.put_with(key, PutValue::new(record, value_bytes), mode.into())
    }
    /// Reads a whole value ([`Engine::get_range`]).
    ///
    /// # Errors
    /// As for [`Engine::get_range`].
    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>> {
        self.get_range(key, ValueRange::ALL)
    }
    /// Deletes a key without a version ([`Engine::delete_with`]).
    ///
    /// # Errors
    /// As for [`Engine::put_with`].
    fn delete(&self, key: &Key) -> impl Future<Output = Result<DeleteOutcome, EngineError>> {
        self.delete_with(key, Version::NONE)
    }
    /// The length of a key's value in bytes; `None` if the key does not exist ([`Engine::status`]).
    ///
    /// # Errors
    /// As for [`Engine::status`].
    fn exist(&self, key: &Key) -> impl Future<Output = Result<Option<usize>, EngineError>> {
        async move { Ok(self.status(key).await?.map(|status| status.value_bytes)) }
    }
}
