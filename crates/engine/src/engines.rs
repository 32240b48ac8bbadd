//! The volumes and handles of all engines.
//!
//! In: an [`EngineKind`], from the configuration of a namespace, or the superblock of a device. Out: that engine's volume
//! and handles, dispatched by `match`. A method of [`AnyEngine`] gives the engine's own future, not one that awaits it, which
//! would be moved once more on the path of every request; that of a volume with a cache is boxed, so that it does not make
//! the others larger.

use crate::cached::{CachedEngine, CachedVolume};
use crate::common::superblock_io::{newest_header, read_header};
use crate::hash::{HashEngine, HashVolume};
use crate::log::handle::LogEngine;
use crate::log::volume::LogVolume;
use crate::lsm::{LsmEngine, LsmVolume, TreeIterator};
use crate::{
    Capability, DeleteOutcome, DeviceLayout, Engine, EngineError, EngineKind, EngineStatistics, FormatConfig,
    FormatVersions, FoundNow, IteratorOptions, IteratorProgress, KeyLookup, KeySink, KeyStatus, LookupStage,
    OpenConfig, OpenError, PairSink, PrefetchPlan, PrefetchStage, PutMode, PutOptions, PutOutcome, PutValue,
    ScanSink, StoredValue, ValueRange, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use futures_util::future::Either;
use octokv_base::{BufferPool, DataRef, Key, Received, RecordLayout, RingRange, Version};
use octokv_device::Device;
use octokv_runtime::ReactorHandle;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// An open volume of any engine.
#[derive(Clone)]
pub enum AnyVolume {
    /// Of the hash engine.
    Hash(Arc<HashVolume>),
    /// Of the hash engine, with a cache of values.
    CachedHash(CachedVolume<Arc<HashVolume>>),
    /// Of the ordered engine.
    Lsm(Arc<LsmVolume>),
    /// Of the log engine.
    Log(Arc<LogVolume>),
    /// Of the log engine, with a cache of values.
    CachedLog(CachedVolume<Arc<LogVolume>>),
}

/// One core's handle on a volume of any engine.
pub enum AnyEngine {
    /// Of the hash engine.
    Hash(HashEngine),
    /// Of the hash engine, with a cache of values.
    CachedHash(CachedEngine<HashEngine>),
    /// Of the ordered engine. Boxed so that it does not make the others larger.
    Lsm(Box<LsmEngine>),
    /// Of the log engine. Boxed for the same reason.
    Log(Box<LogEngine>),
    /// Of the log engine, with a cache of values. Boxed for the same reason.
    CachedLog(Box<CachedEngine<LogEngine>>),
}

impl AnyVolume {
    /// Gives each key an owner among `cores` cores, in place of the engine's rule: a simulation of engines that need
    /// owners. REQUIRES: no node serves the volume yet, and each core below `cores` then gets a handle.
    ///
    /// # Panics
    /// If `cores` is 0.
    pub fn assign_owner_cores(&self, cores: usize) {
        match self {
            AnyVolume::Hash(volume) => volume.assign_owner_cores(cores),
            AnyVolume::CachedHash(volume) => volume.volume().assign_owner_cores(cores),
            AnyVolume::Lsm(_) => panic!("the ordered engine has no owners"),
            AnyVolume::Log(_) | AnyVolume::CachedLog(_) => panic!("the log engine has owners by its stores"),
        }
    }
}

/// The engine of the volume on devices; the default if no superblock is intact.
async fn kind_of(devices: &[Rc<dyn Device>]) -> EngineKind {
    let Some(device) = devices.first() else { return EngineKind::default() };
    let header = read_header(&**device).await.ok().flatten();
    header.and_then(|header| EngineKind::from_number(header.engine)).unwrap_or_default()
}

impl Volume for AnyVolume {
    type Engine = AnyEngine;

    const PREFETCH: PrefetchPlan = <Arc<HashVolume> as Volume>::PREFETCH;

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        match config.engine {
            EngineKind::Hash => <Arc<HashVolume>>::format(devices, config).await,
            EngineKind::Lsm => <Arc<LsmVolume>>::format(devices, config).await,
            EngineKind::Log => <Arc<LogVolume>>::format(devices, config).await,
        }
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<AnyVolume, OpenError> {
        match format.engine {
            EngineKind::Hash if config.cache_bytes > 0 => {
                CachedVolume::open(devices, pool, config, format).await.map(AnyVolume::CachedHash)
            }
            EngineKind::Hash => {
                <Arc<HashVolume>>::open(devices, pool, config, format).await.map(AnyVolume::Hash)
            }
            // The cache is that of its tables' blocks.
            EngineKind::Lsm => {
                <Arc<LsmVolume>>::open(devices, pool, config, format).await.map(AnyVolume::Lsm)
            }
            EngineKind::Log if config.cache_bytes > 0 => {
                CachedVolume::open(devices, pool, config, format).await.map(AnyVolume::CachedLog)
            }
            EngineKind::Log => {
                <Arc<LogVolume>>::open(devices, pool, config, format).await.map(AnyVolume::Log)
            }
        }
    }

    /// A device without an intact superblock is scanned for what the hash engine writes, which is the default.
    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        match kind_of(devices).await {
            EngineKind::Hash => <Arc<HashVolume>>::verify(devices, pool, observer).await,
            EngineKind::Lsm => <Arc<LsmVolume>>::verify(devices, pool, observer).await,
            EngineKind::Log => <Arc<LogVolume>>::verify(devices, pool, observer).await,
        }
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        match kind_of(devices).await {
            EngineKind::Hash => <Arc<HashVolume>>::upgrade(devices, pool).await,
            EngineKind::Lsm => <Arc<LsmVolume>>::upgrade(devices, pool).await,
            EngineKind::Log => <Arc<LogVolume>>::upgrade(devices, pool).await,
        }
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        match EngineKind::from_number(newest_header(format_region)?.engine)? {
            EngineKind::Hash => <Arc<HashVolume>>::device_layout(format_region),
            EngineKind::Lsm => <Arc<LsmVolume>>::device_layout(format_region),
            EngineKind::Log => <Arc<LogVolume>>::device_layout(format_region),
        }
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> AnyEngine {
        match self {
            AnyVolume::Hash(volume) => AnyEngine::Hash(volume.engine(core, devices, pool)),
            AnyVolume::CachedHash(volume) => AnyEngine::CachedHash(volume.engine(core, devices, pool)),
            AnyVolume::Lsm(volume) => AnyEngine::Lsm(Box::new(volume.engine(core, devices, pool))),
            AnyVolume::Log(volume) => AnyEngine::Log(Box::new(volume.engine(core, devices, pool))),
            AnyVolume::CachedLog(volume) => {
                AnyEngine::CachedLog(Box::new(volume.engine(core, devices, pool)))
            }
        }
    }

    fn info(&self) -> VolumeInfo {
        match self {
            AnyVolume::Hash(volume) => volume.info(),
            AnyVolume::CachedHash(volume) => volume.info(),
            AnyVolume::Lsm(volume) => Volume::info(volume),
            AnyVolume::Log(volume) => Volume::info(volume),
            AnyVolume::CachedLog(volume) => Volume::info(volume),
        }
    }

    fn used_bytes(&self) -> Arc<AtomicU64> {
        match self {
            AnyVolume::Hash(volume) => volume.used_bytes(),
            AnyVolume::CachedHash(volume) => volume.used_bytes(),
            AnyVolume::Lsm(volume) => Volume::used_bytes(volume),
            AnyVolume::Log(volume) => Volume::used_bytes(volume),
            AnyVolume::CachedLog(volume) => Volume::used_bytes(volume),
        }
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        match self {
            AnyVolume::Hash(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::CachedHash(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::Lsm(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::Log(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::CachedLog(volume) => volume.set_scrub_rate(bytes_per_second),
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            AnyVolume::Hash(volume) => volume.is_idle(),
            AnyVolume::CachedHash(volume) => volume.is_idle(),
            AnyVolume::Lsm(volume) => Volume::is_idle(volume),
            AnyVolume::Log(volume) => Volume::is_idle(volume),
            AnyVolume::CachedLog(volume) => Volume::is_idle(volume),
        }
    }

    fn is_read_only(&self) -> bool {
        match self {
            AnyVolume::Hash(volume) => volume.is_read_only(),
            AnyVolume::CachedHash(volume) => volume.is_read_only(),
            AnyVolume::Lsm(volume) => Volume::is_read_only(volume),
            AnyVolume::Log(volume) => Volume::is_read_only(volume),
            AnyVolume::CachedLog(volume) => Volume::is_read_only(volume),
        }
    }

    fn statistics(&self) -> EngineStatistics {
        match self {
            AnyVolume::Hash(volume) => volume.statistics(),
            AnyVolume::CachedHash(volume) => volume.statistics(),
            AnyVolume::Lsm(volume) => Volume::statistics(volume),
            AnyVolume::Log(volume) => Volume::statistics(volume),
            AnyVolume::CachedLog(volume) => Volume::statistics(volume),
        }
    }
}

/// A future of any engine: that of the hash engine in place, the others boxed.
type EngineFuture<H, C, T, L, K> =
    Either<H, Either<Pin<Box<C>>, Either<Pin<Box<T>>, Either<Pin<Box<L>>, Pin<Box<K>>>>>>;

fn of_cached<H, C, T, L, K>(future: C) -> EngineFuture<H, C, T, L, K> {
    Either::Right(Either::Left(Box::pin(future)))
}

fn of_lsm<H, C, T, L, K>(future: T) -> EngineFuture<H, C, T, L, K> {
    Either::Right(Either::Right(Either::Left(Box::pin(future))))
}

fn of_log<H, C, T, L, K>(future: L) -> EngineFuture<H, C, T, L, K> {
    Either::Right(Either::Right(Either::Right(Either::Left(Box::pin(future)))))
}

fn of_cached_log<H, C, T, L, K>(future: K) -> EngineFuture<H, C, T, L, K> {
    Either::Right(Either::Right(Either::Right(Either::Right(Box::pin(future)))))
}

impl Engine for AnyEngine {
    type Iterator = TreeIterator;

    fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> impl Future<Output = Result<PutOutcome, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.put_with(key, value, options)),
            AnyEngine::CachedHash(engine) => of_cached(engine.put_with(key, value, options)),
            AnyEngine::Lsm(engine) => of_lsm(engine.put_with(key, value, options)),
            AnyEngine::Log(engine) => of_log(engine.put_with(key, value, options)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.put_with(key, value, options)),
        }
    }

    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.get(key)),
            AnyEngine::CachedHash(engine) => of_cached(engine.get(key)),
            AnyEngine::Lsm(engine) => of_lsm(engine.get(key)),
            AnyEngine::Log(engine) => of_log(engine.get(key)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.get(key)),
        }
    }

    fn get_range(
        &self,
        key: &Key,
        range: ValueRange,
    ) -> impl Future<Output = Result<Option<StoredValue>, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.get_range(key, range)),
            AnyEngine::CachedHash(engine) => of_cached(engine.get_range(key, range)),
            AnyEngine::Lsm(engine) => of_lsm(engine.get_range(key, range)),
            AnyEngine::Log(engine) => of_log(engine.get_range(key, range)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.get_range(key, range)),
        }
    }

    fn delete_with(
        &self,
        key: &Key,
        version: Version,
    ) -> impl Future<Output = Result<DeleteOutcome, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.delete_with(key, version)),
            AnyEngine::CachedHash(engine) => of_cached(engine.delete_with(key, version)),
            AnyEngine::Lsm(engine) => of_lsm(engine.delete_with(key, version)),
            AnyEngine::Log(engine) => of_log(engine.delete_with(key, version)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.delete_with(key, version)),
        }
    }

    fn status(&self, key: &Key) -> impl Future<Output = Result<Option<KeyStatus>, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.status(key)),
            AnyEngine::CachedHash(engine) => of_cached(engine.status(key)),
            AnyEngine::Lsm(engine) => of_lsm(engine.status(key)),
            AnyEngine::Log(engine) => of_log(engine.status(key)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.status(key)),
        }
    }

    fn list(&self, start: &Key, sink: &mut impl KeySink) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.list(start, sink)),
            AnyEngine::CachedHash(engine) => of_cached(engine.list(start, sink)),
            AnyEngine::Lsm(engine) => of_lsm(engine.list(start, sink)),
            AnyEngine::Log(engine) => of_log(engine.list(start, sink)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.list(start, sink)),
        }
    }

    fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.scan(range, since, sink)),
            AnyEngine::CachedHash(engine) => of_cached(engine.scan(range, since, sink)),
            AnyEngine::Lsm(engine) => of_lsm(engine.scan(range, since, sink)),
            AnyEngine::Log(engine) => of_log(engine.scan(range, since, sink)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.scan(range, since, sink)),
        }
    }

    fn forget_below(&self, version: Version) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.forget_below(version)),
            AnyEngine::CachedHash(engine) => of_cached(engine.forget_below(version)),
            AnyEngine::Lsm(engine) => of_lsm(engine.forget_below(version)),
            AnyEngine::Log(engine) => of_log(engine.forget_below(version)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.forget_below(version)),
        }
    }

    fn give_up_space(&self, bytes: u64) -> impl Future<Output = Result<u64, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.give_up_space(bytes)),
            AnyEngine::CachedHash(engine) => of_cached(engine.give_up_space(bytes)),
            AnyEngine::Lsm(engine) => of_lsm(engine.give_up_space(bytes)),
            AnyEngine::Log(engine) => of_log(engine.give_up_space(bytes)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.give_up_space(bytes)),
        }
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<TreeIterator>, EngineError> {
        match self {
            AnyEngine::Hash(_) | AnyEngine::CachedHash(_) | AnyEngine::Log(_) | AnyEngine::CachedLog(_) => {
                Err(EngineError::Unsupported(Capability::Iterators))
            }
            AnyEngine::Lsm(engine) => engine.create_iterator(options).await,
        }
    }

    async fn next_pairs(
        &self,
        iterator: &TreeIterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        match self {
            AnyEngine::Hash(_) | AnyEngine::CachedHash(_) | AnyEngine::Log(_) | AnyEngine::CachedLog(_) => {
                Err(EngineError::Unsupported(Capability::Iterators))
            }
            AnyEngine::Lsm(engine) => engine.next_pairs(iterator, sink).await,
        }
    }

    async fn seek_iterator(&self, iterator: &TreeIterator, key: &Key) -> Result<(), EngineError> {
        match self {
            AnyEngine::Hash(_) | AnyEngine::CachedHash(_) | AnyEngine::Log(_) | AnyEngine::CachedLog(_) => {
                Err(EngineError::Unsupported(Capability::Iterators))
            }
            AnyEngine::Lsm(engine) => engine.seek_iterator(iterator, key).await,
        }
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        match self {
            AnyEngine::Hash(engine) => engine.compact_all().await,
            AnyEngine::CachedHash(engine) => engine.compact_all().await,
            AnyEngine::Lsm(engine) => engine.compact_all().await,
            AnyEngine::Log(engine) => engine.compact_all().await,
            AnyEngine::CachedLog(engine) => engine.compact_all().await,
        }
    }

    fn flush(&self) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.flush()),
            AnyEngine::CachedHash(engine) => of_cached(engine.flush()),
            AnyEngine::Lsm(engine) => of_lsm(engine.flush()),
            AnyEngine::Log(engine) => of_log(engine.flush()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.flush()),
        }
    }

    fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) -> impl Future<Output = ()> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.maintain(handle, report)),
            AnyEngine::CachedHash(engine) => of_cached(engine.maintain(handle, report)),
            AnyEngine::Lsm(engine) => of_lsm(engine.maintain(handle, report)),
            AnyEngine::Log(engine) => of_log(engine.maintain(handle, report)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.maintain(handle, report)),
        }
    }

    fn run_abandoned(&self) -> impl Future<Output = ()> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.run_abandoned()),
            AnyEngine::CachedHash(engine) => of_cached(engine.run_abandoned()),
            AnyEngine::Lsm(engine) => of_lsm(engine.run_abandoned()),
            AnyEngine::Log(engine) => of_log(engine.run_abandoned()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.run_abandoned()),
        }
    }

    fn close(&self) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.close()),
            AnyEngine::CachedHash(engine) => of_cached(engine.close()),
            AnyEngine::Lsm(engine) => of_lsm(engine.close()),
            AnyEngine::Log(engine) => of_log(engine.close()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.close()),
        }
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        match self {
            AnyEngine::Hash(engine) => engine.owner_core(key),
            AnyEngine::CachedHash(engine) => engine.owner_core(key),
            AnyEngine::Lsm(engine) => engine.owner_core(key),
            AnyEngine::Log(engine) => engine.owner_core(key),
            AnyEngine::CachedLog(engine) => engine.owner_core(key),
        }
    }

    #[inline]
    fn may_end_at_once(&self) -> bool {
        match self {
            AnyEngine::Hash(engine) => engine.may_end_at_once(),
            AnyEngine::CachedHash(engine) => engine.may_end_at_once(),
            AnyEngine::Lsm(engine) => engine.may_end_at_once(),
            AnyEngine::Log(engine) => engine.may_end_at_once(),
            AnyEngine::CachedLog(engine) => engine.may_end_at_once(),
        }
    }
    #[inline]
    fn begin_lookup(&self, key: &[u8]) -> Option<KeyLookup> {
        match self {
            AnyEngine::Hash(engine) => engine.begin_lookup(key),
            AnyEngine::CachedHash(engine) => engine.begin_lookup(key),
            AnyEngine::Lsm(engine) => engine.begin_lookup(key),
            AnyEngine::Log(engine) => engine.begin_lookup(key),
            AnyEngine::CachedLog(engine) => engine.begin_lookup(key),
        }
    }

    #[inline]
    fn advance_lookup(&self, lookup: &mut KeyLookup, stage: LookupStage) {
        match self {
            AnyEngine::Hash(engine) => engine.advance_lookup(lookup, stage),
            AnyEngine::CachedHash(engine) => engine.advance_lookup(lookup, stage),
            AnyEngine::Lsm(engine) => engine.advance_lookup(lookup, stage),
            AnyEngine::Log(engine) => engine.advance_lookup(lookup, stage),
            AnyEngine::CachedLog(engine) => engine.advance_lookup(lookup, stage),
        }
    }

    #[inline]
    fn get_now(
        &self,
        key: &[u8],
        lookup: &KeyLookup,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<FoundNow> {
        match self {
            AnyEngine::Hash(engine) => engine.get_now(key, lookup, receive),
            AnyEngine::CachedHash(engine) => engine.get_now(key, lookup, receive),
            AnyEngine::Lsm(engine) => engine.get_now(key, lookup, receive),
            AnyEngine::Log(engine) => engine.get_now(key, lookup, receive),
            AnyEngine::CachedLog(engine) => engine.get_now(key, lookup, receive),
        }
    }

    fn exist_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<Option<usize>> {
        match self {
            AnyEngine::Hash(engine) => engine.exist_now(key, lookup),
            AnyEngine::CachedHash(engine) => engine.exist_now(key, lookup),
            AnyEngine::Lsm(engine) => engine.exist_now(key, lookup),
            AnyEngine::Log(engine) => engine.exist_now(key, lookup),
            AnyEngine::CachedLog(engine) => engine.exist_now(key, lookup),
        }
    }

    #[inline]
    fn put_now(&self, key: &[u8], lookup: &KeyLookup, mode: PutMode, value: &[u8]) -> Option<PutOutcome> {
        match self {
            AnyEngine::Hash(engine) => engine.put_now(key, lookup, mode, value),
            AnyEngine::CachedHash(engine) => engine.put_now(key, lookup, mode, value),
            AnyEngine::Lsm(engine) => engine.put_now(key, lookup, mode, value),
            AnyEngine::Log(engine) => engine.put_now(key, lookup, mode, value),
            AnyEngine::CachedLog(engine) => engine.put_now(key, lookup, mode, value),
        }
    }

    fn delete_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<DeleteOutcome> {
        match self {
            AnyEngine::Hash(engine) => engine.delete_now(key, lookup),
            AnyEngine::CachedHash(engine) => engine.delete_now(key, lookup),
            AnyEngine::Lsm(engine) => engine.delete_now(key, lookup),
            AnyEngine::Log(engine) => engine.delete_now(key, lookup),
            AnyEngine::CachedLog(engine) => engine.delete_now(key, lookup),
        }
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        match self {
            AnyEngine::Hash(engine) => engine.prefetch(key, stage),
            AnyEngine::CachedHash(engine) => engine.prefetch(key, stage),
            AnyEngine::Lsm(engine) => engine.prefetch(key, stage),
            AnyEngine::Log(engine) => engine.prefetch(key, stage),
            AnyEngine::CachedLog(engine) => engine.prefetch(key, stage),
        }
    }

    fn record_layout(&self) -> RecordLayout {
        match self {
            AnyEngine::Hash(engine) => engine.record_layout(),
            AnyEngine::CachedHash(engine) => engine.record_layout(),
            AnyEngine::Lsm(engine) => engine.record_layout(),
            AnyEngine::Log(engine) => engine.record_layout(),
            AnyEngine::CachedLog(engine) => engine.record_layout(),
        }
    }

    fn statistics(&self) -> EngineStatistics {
        match self {
            AnyEngine::Hash(engine) => engine.statistics(),
            AnyEngine::CachedHash(engine) => engine.statistics(),
            AnyEngine::Lsm(engine) => engine.statistics(),
            AnyEngine::Log(engine) => engine.statistics(),
            AnyEngine::CachedLog(engine) => engine.statistics(),
        }
    }
}
