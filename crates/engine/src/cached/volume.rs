//! A volume with a cache of values in front of it.

use super::engine::CachedEngine;
use super::value_cache::ValueCache;
use crate::common::abandoned::AbandonedCount;
use crate::{
    DeviceLayout, EngineStatistics, FormatConfig, FormatVersions, OpenConfig, OpenError, PrefetchPlan,
    VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, SharedSum};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

/// An open volume with a cache of [`OpenConfig::cache_bytes`].
#[derive(Clone)]
pub struct CachedVolume<V> {
    volume: V,
    cache: Arc<ValueCache>,
    /// Changes whose callers dropped them.
    abandoned: AbandonedCount,
}

impl<V: Volume> CachedVolume<V> {
    /// An open volume with a cache of so many bytes.
    pub fn new(volume: V, cache_bytes: u64) -> CachedVolume<V> {
        let cache = Arc::new(ValueCache::new(cache_bytes, volume.info().id));
        CachedVolume { volume, cache, abandoned: AbandonedCount::default() }
    }

    /// The volume behind the cache.
    pub fn volume(&self) -> &V {
        &self.volume
    }

    /// The cache.
    pub fn cache(&self) -> &Arc<ValueCache> {
        &self.cache
    }
}

impl<V: Volume> Volume for CachedVolume<V> {
    type Engine = CachedEngine<V::Engine>;

    const PREFETCH: PrefetchPlan = V::PREFETCH;

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        V::format(devices, config).await
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<CachedVolume<V>, OpenError> {
        let cache_bytes = config.cache_bytes;
        Ok(CachedVolume::new(V::open(devices, pool, config, format).await?, cache_bytes))
    }

    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        V::verify(devices, pool, observer).await
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        V::upgrade(devices, pool).await
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        V::device_layout(format_region)
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> Self::Engine {
        let engine = self.volume.engine(core, devices, pool);
        CachedEngine::new(engine, Arc::clone(&self.cache), self.abandoned.clone())
    }

    fn info(&self) -> VolumeInfo {
        self.volume.info()
    }

    fn used_bytes(&self) -> SharedSum {
        self.volume.used_bytes()
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        self.volume.set_scrub_rate(bytes_per_second);
    }

    fn is_idle(&self) -> bool {
        self.abandoned.is_zero() && self.volume.is_idle()
    }

    fn is_read_only(&self) -> bool {
        self.volume.is_read_only()
    }

    fn statistics(&self) -> EngineStatistics {
        EngineStatistics { cache: self.cache.statistics(), ..self.volume.statistics() }
    }
}
