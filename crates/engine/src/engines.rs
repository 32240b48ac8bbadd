//! The volumes of all engines.
//!
//! In: an [`EngineKind`], from the configuration of a namespace, or the superblock of a device. Out: that engine's volume,
//! dispatched by `match`; its handles are [`AnyEngine`]s.

use crate::any_engine::{AnyEngine, boxed};
use crate::cached::CachedVolume;
use crate::common::superblock::EngineNumber;
use crate::common::superblock_io::{newest_header, read_header};
use crate::hash::HashVolume;
use crate::log::volume::LogVolume;
use crate::lsm::LsmVolume;
use crate::spanned::SpannedVolume;
use crate::{
    DeviceLayout, DeviceReport, EngineKind, EngineStatistics, FormatConfig, FormatVersions, OpenConfig,
    OpenError, PrefetchPlan, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, SharedSum};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

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
    /// On several devices.
    Spanned(SpannedVolume<AnyVolume>),
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
            AnyVolume::Spanned(volume) => {
                volume.members().for_each(|member: AnyVolume| member.assign_owner_cores(cores));
            }
        }
    }

    /// Puts an empty volume on one device in the place of a lost one of several: [`SpannedVolume::replace`].
    ///
    /// # Errors
    /// As there; [`OpenError::NotSpanned`].
    pub async fn replace(
        &self,
        devices: (&[Rc<dyn Device>], usize, bool),
        pool: &BufferPool,
        config: (&OpenConfig, &FormatConfig),
        prepare: impl FnOnce(&AnyVolume),
    ) -> Result<(), OpenError> {
        match self {
            AnyVolume::Spanned(volume) => boxed(volume.replace(devices, pool, config, prepare)).await,
            _ => Err(OpenError::NotSpanned),
        }
    }

    /// Adds a device to a volume on several: [`SpannedVolume::add`].
    ///
    /// # Errors
    /// As there; [`OpenError::NotExtendable`].
    pub async fn add(
        &self,
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: (&OpenConfig, &FormatConfig),
        prepare: impl FnOnce(&AnyVolume),
    ) -> Result<(), OpenError> {
        match self {
            AnyVolume::Spanned(volume) => boxed(volume.add(devices, pool, config, prepare)).await,
            _ => Err(OpenError::NotExtendable),
        }
    }

    /// Gives a core's handle of this volume the device that was added last: [`SpannedVolume::extend_engine`].
    pub fn extend_engine(&self, engine: &AnyEngine, of_core: (usize, &Rc<dyn Device>, &BufferPool)) {
        if let (AnyVolume::Spanned(volume), AnyEngine::Spanned(engine)) = (self, engine) {
            volume.extend_engine(engine, of_core);
        }
    }

    /// Whether a device has the newest volume of its place: [`SpannedVolume::is_replaced_by`].
    pub async fn is_replaced_by(&self, devices: &[Rc<dyn Device>], given: usize) -> bool {
        match self {
            AnyVolume::Spanned(volume) => boxed(volume.is_replaced_by(devices, given)).await,
            _ => false,
        }
    }

    /// Gives a core's handle of this volume the device that was replaced: [`SpannedVolume::renew_engine`].
    pub fn renew_engine(
        &self,
        engine: &AnyEngine,
        given: usize,
        of_core: (usize, &Rc<dyn Device>, &BufferPool),
    ) {
        if let (AnyVolume::Spanned(volume), AnyEngine::Spanned(engine)) = (self, engine) {
            volume.renew_engine(engine, given, of_core);
        }
    }
}

/// The engine of the volume on devices; the default if no superblock is intact.
async fn kind_of(devices: &[Rc<dyn Device>]) -> EngineKind {
    let Some(device) = devices.first() else { return EngineKind::default() };
    let header = read_header(&**device).await.ok().flatten();
    header.and_then(|header| EngineKind::from_number(header.engine)).unwrap_or_default()
}

/// Whether the volume on devices spans several, or has to.
async fn is_spanned(devices: &[Rc<dyn Device>]) -> bool {
    let [device] = devices else { return true };
    let header = read_header(&**device).await.ok().flatten();
    header.is_some_and(|header| header.engine == EngineNumber::SPAN)
}

impl Volume for AnyVolume {
    type Engine = AnyEngine;

    const PREFETCH: PrefetchPlan = <Arc<HashVolume> as Volume>::PREFETCH;

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        match config.engine {
            _ if devices.len() > 1 => boxed(SpannedVolume::<AnyVolume>::format(devices, config)).await,
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
            _ if is_spanned(devices).await => {
                boxed(SpannedVolume::open(devices, pool, config, format)).await.map(AnyVolume::Spanned)
            }
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
        if is_spanned(devices).await {
            return boxed(SpannedVolume::<AnyVolume>::verify(devices, pool, observer)).await;
        }
        match kind_of(devices).await {
            EngineKind::Hash => <Arc<HashVolume>>::verify(devices, pool, observer).await,
            EngineKind::Lsm => <Arc<LsmVolume>>::verify(devices, pool, observer).await,
            EngineKind::Log => <Arc<LogVolume>>::verify(devices, pool, observer).await,
        }
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        if is_spanned(devices).await {
            return boxed(SpannedVolume::<AnyVolume>::upgrade(devices, pool)).await;
        }
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
            AnyVolume::Spanned(volume) => AnyEngine::Spanned(Box::new(volume.engine(core, devices, pool))),
        }
    }

    fn info(&self) -> VolumeInfo {
        match self {
            AnyVolume::Hash(volume) => volume.info(),
            AnyVolume::CachedHash(volume) => volume.info(),
            AnyVolume::Lsm(volume) => Volume::info(volume),
            AnyVolume::Log(volume) => Volume::info(volume),
            AnyVolume::CachedLog(volume) => Volume::info(volume),
            AnyVolume::Spanned(volume) => volume.info(),
        }
    }

    fn used_bytes(&self) -> SharedSum {
        match self {
            AnyVolume::Hash(volume) => volume.used_bytes(),
            AnyVolume::CachedHash(volume) => volume.used_bytes(),
            AnyVolume::Lsm(volume) => Volume::used_bytes(volume),
            AnyVolume::Log(volume) => Volume::used_bytes(volume),
            AnyVolume::CachedLog(volume) => Volume::used_bytes(volume),
            AnyVolume::Spanned(volume) => volume.used_bytes(),
        }
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        match self {
            AnyVolume::Hash(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::CachedHash(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::Lsm(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::Log(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::CachedLog(volume) => volume.set_scrub_rate(bytes_per_second),
            AnyVolume::Spanned(volume) => volume.set_scrub_rate(bytes_per_second),
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            AnyVolume::Hash(volume) => volume.is_idle(),
            AnyVolume::CachedHash(volume) => volume.is_idle(),
            AnyVolume::Lsm(volume) => Volume::is_idle(volume),
            AnyVolume::Log(volume) => Volume::is_idle(volume),
            AnyVolume::CachedLog(volume) => Volume::is_idle(volume),
            AnyVolume::Spanned(volume) => volume.is_idle(),
        }
    }

    fn is_read_only(&self) -> bool {
        match self {
            AnyVolume::Hash(volume) => volume.is_read_only(),
            AnyVolume::CachedHash(volume) => volume.is_read_only(),
            AnyVolume::Lsm(volume) => Volume::is_read_only(volume),
            AnyVolume::Log(volume) => Volume::is_read_only(volume),
            AnyVolume::CachedLog(volume) => Volume::is_read_only(volume),
            AnyVolume::Spanned(volume) => volume.is_read_only(),
        }
    }

    fn statistics(&self) -> EngineStatistics {
        match self {
            AnyVolume::Hash(volume) => volume.statistics(),
            AnyVolume::CachedHash(volume) => volume.statistics(),
            AnyVolume::Lsm(volume) => Volume::statistics(volume),
            AnyVolume::Log(volume) => Volume::statistics(volume),
            AnyVolume::CachedLog(volume) => Volume::statistics(volume),
            AnyVolume::Spanned(volume) => volume.statistics(),
        }
    }

    fn device_reports(&self) -> Vec<DeviceReport> {
        match self {
            AnyVolume::Spanned(volume) => volume.device_reports(),
            _ => Vec::new(),
        }
    }
}
