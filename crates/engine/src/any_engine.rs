//! One core's handle on a volume of any engine.
//!
//! A method gives the engine's own future, not one that awaits it, which
//! would be moved once more on the path of every request; that of a volume with a cache is boxed, so that it does not make
//! the others larger.

use crate::cached::CachedEngine;
use crate::hash::HashEngine;
use crate::log::handle::LogEngine;
use crate::lsm::{LsmEngine, TreeIterator};
use crate::spanned::{SpannedEngine, SpannedIterator};
use crate::{
    Capability, DeleteOutcome, Engine, EngineError, EngineStatistics, FoundNow, IteratorOptions,
    IteratorProgress, KeyLookup, KeySink, KeyStatus, LookupStage, PairSink, PrefetchStage, PutMode,
    PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
};
use futures_util::future::Either;
use octokv_base::{DataRef, Key, Received, RecordLayout, RingRange, Version};
use octokv_runtime::ReactorHandle;
use std::future::Future;
use std::pin::Pin;

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
    /// On several devices.
    Spanned(Box<SpannedEngine<AnyEngine>>),
}

/// An iterator of any engine that has iterators.
pub enum AnyIterator {
    /// Of the ordered engine.
    Tree(TreeIterator),
    /// On several devices.
    Spanned(Box<SpannedIterator<AnyIterator>>),
}

/// A future of any engine: that of the hash engine in place, the others boxed.
type EngineFuture<H, C, T, L, K, S> = Either<
    H,
    Either<Pin<Box<C>>, Either<Pin<Box<T>>, Either<Pin<Box<L>>, Either<Pin<Box<K>>, Pin<Box<S>>>>>>,
>;

/// A future without its type: that of a handle on several devices would contain itself, and those of iterators would make the others larger.
pub(crate) fn boxed<'a, O>(future: impl Future<Output = O> + 'a) -> Pin<Box<dyn Future<Output = O> + 'a>> {
    Box::pin(future)
}

fn of_cached<H, C, T, L, K, S>(future: C) -> EngineFuture<H, C, T, L, K, S> {
    Either::Right(Either::Left(Box::pin(future)))
}

fn of_lsm<H, C, T, L, K, S>(future: T) -> EngineFuture<H, C, T, L, K, S> {
    Either::Right(Either::Right(Either::Left(Box::pin(future))))
}

fn of_log<H, C, T, L, K, S>(future: L) -> EngineFuture<H, C, T, L, K, S> {
    Either::Right(Either::Right(Either::Right(Either::Left(Box::pin(future)))))
}

fn of_cached_log<H, C, T, L, K, S>(future: K) -> EngineFuture<H, C, T, L, K, S> {
    Either::Right(Either::Right(Either::Right(Either::Right(Either::Left(Box::pin(future))))))
}

fn of_spanned<H, C, T, L, K, S>(future: S) -> EngineFuture<H, C, T, L, K, S> {
    Either::Right(Either::Right(Either::Right(Either::Right(Either::Right(Box::pin(future))))))
}

impl Engine for AnyEngine {
    type Iterator = AnyIterator;

    // Its future is made where it is awaited, and not moved there.
    #[inline(always)]
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
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.put_with(key, value, options)).await })
            }
        }
    }

    fn get(&self, key: &Key) -> impl Future<Output = Result<Option<StoredValue>, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.get(key)),
            AnyEngine::CachedHash(engine) => of_cached(engine.get(key)),
            AnyEngine::Lsm(engine) => of_lsm(engine.get(key)),
            AnyEngine::Log(engine) => of_log(engine.get(key)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.get(key)),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.get(key)).await }),
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
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.get_range(key, range)).await })
            }
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
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.delete_with(key, version)).await })
            }
        }
    }

    fn status(&self, key: &Key) -> impl Future<Output = Result<Option<KeyStatus>, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.status(key)),
            AnyEngine::CachedHash(engine) => of_cached(engine.status(key)),
            AnyEngine::Lsm(engine) => of_lsm(engine.status(key)),
            AnyEngine::Log(engine) => of_log(engine.status(key)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.status(key)),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.status(key)).await }),
        }
    }

    fn list(&self, start: &Key, sink: &mut impl KeySink) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.list(start, sink)),
            AnyEngine::CachedHash(engine) => of_cached(engine.list(start, sink)),
            AnyEngine::Lsm(engine) => of_lsm(engine.list(start, sink)),
            AnyEngine::Log(engine) => of_log(engine.list(start, sink)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.list(start, sink)),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.list(start, sink)).await }),
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
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.scan(range, since, sink)).await })
            }
        }
    }

    fn forget_below(&self, version: Version) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.forget_below(version)),
            AnyEngine::CachedHash(engine) => of_cached(engine.forget_below(version)),
            AnyEngine::Lsm(engine) => of_lsm(engine.forget_below(version)),
            AnyEngine::Log(engine) => of_log(engine.forget_below(version)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.forget_below(version)),
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.forget_below(version)).await })
            }
        }
    }

    fn give_up_space(&self, bytes: u64) -> impl Future<Output = Result<u64, EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.give_up_space(bytes)),
            AnyEngine::CachedHash(engine) => of_cached(engine.give_up_space(bytes)),
            AnyEngine::Lsm(engine) => of_lsm(engine.give_up_space(bytes)),
            AnyEngine::Log(engine) => of_log(engine.give_up_space(bytes)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.give_up_space(bytes)),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.give_up_space(bytes)).await }),
        }
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<AnyIterator>, EngineError> {
        Ok(match self {
            AnyEngine::Lsm(engine) => boxed(engine.create_iterator(options)).await?.map(AnyIterator::Tree),
            AnyEngine::Spanned(engine) => {
                let created = boxed(engine.create_iterator(options)).await?;
                created.map(|iterator| AnyIterator::Spanned(Box::new(iterator)))
            }
            _ => return Err(EngineError::Unsupported(Capability::Iterators)),
        })
    }

    async fn next_pairs(
        &self,
        iterator: &AnyIterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        match (self, iterator) {
            (AnyEngine::Lsm(engine), AnyIterator::Tree(iterator)) => {
                boxed(engine.next_pairs(iterator, sink)).await
            }
            (AnyEngine::Spanned(engine), AnyIterator::Spanned(iterator)) => {
                boxed(engine.next_pairs(iterator, sink)).await
            }
            _ => Err(EngineError::Unsupported(Capability::Iterators)),
        }
    }

    async fn seek_iterator(&self, iterator: &AnyIterator, key: &Key) -> Result<(), EngineError> {
        match (self, iterator) {
            (AnyEngine::Lsm(engine), AnyIterator::Tree(iterator)) => {
                boxed(engine.seek_iterator(iterator, key)).await
            }
            (AnyEngine::Spanned(engine), AnyIterator::Spanned(iterator)) => {
                boxed(engine.seek_iterator(iterator, key)).await
            }
            _ => Err(EngineError::Unsupported(Capability::Iterators)),
        }
    }

    fn keep_iterator(&self, iterator: &AnyIterator) {
        match (self, iterator) {
            (AnyEngine::Lsm(engine), AnyIterator::Tree(iterator)) => engine.keep_iterator(iterator),
            (AnyEngine::Spanned(engine), AnyIterator::Spanned(iterator)) => engine.keep_iterator(iterator),
            _ => {}
        }
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        match self {
            AnyEngine::Hash(engine) => engine.compact_all().await,
            AnyEngine::CachedHash(engine) => engine.compact_all().await,
            AnyEngine::Lsm(engine) => engine.compact_all().await,
            AnyEngine::Log(engine) => engine.compact_all().await,
            AnyEngine::CachedLog(engine) => engine.compact_all().await,
            AnyEngine::Spanned(engine) => boxed(engine.compact_all()).await,
        }
    }

    fn flush(&self) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.flush()),
            AnyEngine::CachedHash(engine) => of_cached(engine.flush()),
            AnyEngine::Lsm(engine) => of_lsm(engine.flush()),
            AnyEngine::Log(engine) => of_log(engine.flush()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.flush()),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.flush()).await }),
        }
    }

    fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) -> impl Future<Output = ()> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.maintain(handle, report)),
            AnyEngine::CachedHash(engine) => of_cached(engine.maintain(handle, report)),
            AnyEngine::Lsm(engine) => of_lsm(engine.maintain(handle, report)),
            AnyEngine::Log(engine) => of_log(engine.maintain(handle, report)),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.maintain(handle, report)),
            AnyEngine::Spanned(engine) => {
                of_spanned(async move { boxed(engine.maintain(handle, report)).await })
            }
        }
    }

    fn run_abandoned(&self) -> impl Future<Output = ()> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.run_abandoned()),
            AnyEngine::CachedHash(engine) => of_cached(engine.run_abandoned()),
            AnyEngine::Lsm(engine) => of_lsm(engine.run_abandoned()),
            AnyEngine::Log(engine) => of_log(engine.run_abandoned()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.run_abandoned()),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.run_abandoned()).await }),
        }
    }

    fn close(&self) -> impl Future<Output = Result<(), EngineError>> {
        match self {
            AnyEngine::Hash(engine) => Either::Left(engine.close()),
            AnyEngine::CachedHash(engine) => of_cached(engine.close()),
            AnyEngine::Lsm(engine) => of_lsm(engine.close()),
            AnyEngine::Log(engine) => of_log(engine.close()),
            AnyEngine::CachedLog(engine) => of_cached_log(engine.close()),
            AnyEngine::Spanned(engine) => of_spanned(async move { boxed(engine.close()).await }),
        }
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        match self {
            AnyEngine::Hash(engine) => engine.owner_core(key),
            AnyEngine::CachedHash(engine) => engine.owner_core(key),
            AnyEngine::Lsm(engine) => engine.owner_core(key),
            AnyEngine::Log(engine) => engine.owner_core(key),
            AnyEngine::CachedLog(engine) => engine.owner_core(key),
            AnyEngine::Spanned(engine) => engine.owner_core(key),
        }
    }

    fn drive_core(&self, key: &Key, drive_cores: usize) -> usize {
        match self {
            AnyEngine::Hash(engine) => engine.drive_core(key, drive_cores),
            AnyEngine::CachedHash(engine) => engine.drive_core(key, drive_cores),
            AnyEngine::Lsm(engine) => engine.drive_core(key, drive_cores),
            AnyEngine::Log(engine) => engine.drive_core(key, drive_cores),
            AnyEngine::CachedLog(engine) => engine.drive_core(key, drive_cores),
            AnyEngine::Spanned(engine) => engine.drive_core(key, drive_cores),
        }
    }

    fn has_abandoned(&self) -> bool {
        match self {
            AnyEngine::Hash(engine) => engine.has_abandoned(),
            AnyEngine::CachedHash(engine) => engine.has_abandoned(),
            AnyEngine::Lsm(engine) => engine.has_abandoned(),
            AnyEngine::Log(engine) => engine.has_abandoned(),
            AnyEngine::CachedLog(engine) => engine.has_abandoned(),
            AnyEngine::Spanned(engine) => engine.has_abandoned(),
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
            // Through a handle of this type, which would be in the way of the others by its recursion.
            AnyEngine::Spanned(_) => false,
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
            AnyEngine::Spanned(_) => None,
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
            AnyEngine::Spanned(_) => {}
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
            AnyEngine::Spanned(_) => None,
        }
    }

    fn exist_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<Option<usize>> {
        match self {
            AnyEngine::Hash(engine) => engine.exist_now(key, lookup),
            AnyEngine::CachedHash(engine) => engine.exist_now(key, lookup),
            AnyEngine::Lsm(engine) => engine.exist_now(key, lookup),
            AnyEngine::Log(engine) => engine.exist_now(key, lookup),
            AnyEngine::CachedLog(engine) => engine.exist_now(key, lookup),
            AnyEngine::Spanned(_) => None,
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
            AnyEngine::Spanned(_) => None,
        }
    }

    fn delete_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<DeleteOutcome> {
        match self {
            AnyEngine::Hash(engine) => engine.delete_now(key, lookup),
            AnyEngine::CachedHash(engine) => engine.delete_now(key, lookup),
            AnyEngine::Lsm(engine) => engine.delete_now(key, lookup),
            AnyEngine::Log(engine) => engine.delete_now(key, lookup),
            AnyEngine::CachedLog(engine) => engine.delete_now(key, lookup),
            AnyEngine::Spanned(_) => None,
        }
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        match self {
            AnyEngine::Hash(engine) => engine.prefetch(key, stage),
            AnyEngine::CachedHash(engine) => engine.prefetch(key, stage),
            AnyEngine::Lsm(engine) => engine.prefetch(key, stage),
            AnyEngine::Log(engine) => engine.prefetch(key, stage),
            AnyEngine::CachedLog(engine) => engine.prefetch(key, stage),
            AnyEngine::Spanned(engine) => engine.prefetch(key, stage),
        }
    }

    fn record_layout(&self) -> RecordLayout {
        match self {
            AnyEngine::Hash(engine) => engine.record_layout(),
            AnyEngine::CachedHash(engine) => engine.record_layout(),
            AnyEngine::Lsm(engine) => engine.record_layout(),
            AnyEngine::Log(engine) => engine.record_layout(),
            AnyEngine::CachedLog(engine) => engine.record_layout(),
            AnyEngine::Spanned(engine) => engine.record_layout(),
        }
    }

    fn statistics(&self) -> EngineStatistics {
        match self {
            AnyEngine::Hash(engine) => engine.statistics(),
            AnyEngine::CachedHash(engine) => engine.statistics(),
            AnyEngine::Lsm(engine) => engine.statistics(),
            AnyEngine::Log(engine) => engine.statistics(),
            AnyEngine::CachedLog(engine) => engine.statistics(),
            AnyEngine::Spanned(engine) => engine.statistics(),
        }
    }
}
