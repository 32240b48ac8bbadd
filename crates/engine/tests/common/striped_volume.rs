//! A volume on several devices for tests: one volume of the hash engine on each, keys spread by their hash.
//!
//! Keeps the suites of several devices honest until an engine has them: their history, and the names in errors. Refuses what
//! no suite of it needs: lists and scans.

use octokv_base::{BufferPool, Key, RecordLayout, RingPosition, RingRange, Version};
use octokv_device::Device;
use octokv_engine::{
    AnyEngine, AnyVolume, Capability, DeleteOutcome, DeviceLayout, Engine, EngineError, EngineStatistics,
    FormatConfig, FormatVersions, KeySink, KeyStatus, NoIterator, OpenConfig, OpenError, PrefetchPlan,
    PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange, VerifyFailure, VerifyObserver,
    VerifyReport, Volume, VolumeInfo, VolumePlace,
};
use octokv_runtime::ReactorHandle;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

#[derive(Clone)]
pub struct StripedVolume(Vec<AnyVolume>);

pub struct StripedEngine(Vec<AnyEngine>);

impl StripedEngine {
    fn index_of(&self, key: &Key) -> usize {
        RingPosition::of(key, 0).0 as usize % self.0.len()
    }

    fn of(&self, key: &Key) -> &AnyEngine {
        &self.0[self.index_of(key)]
    }

    /// The error of an operation on a key, with the key's device.
    fn placed(&self, key: &Key, error: EngineError) -> EngineError {
        let at = VolumePlace::new(self.index_of(key) as u16, 0);
        match error {
            EngineError::Corrupt { lba, .. } => EngineError::Corrupt { lba, place: at },
            EngineError::Device { error, .. } => EngineError::Device { error, place: at },
            other => other,
        }
    }
}

fn each(devices: &[Rc<dyn Device>]) -> impl Iterator<Item = &[Rc<dyn Device>]> {
    devices.iter().map(std::slice::from_ref)
}

impl Volume for StripedVolume {
    type Engine = StripedEngine;
    const PREFETCH: PrefetchPlan = &[];

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        for device in each(devices) {
            AnyVolume::format(device, config).await?;
        }
        Ok(())
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<StripedVolume, OpenError> {
        let mut volumes = Vec::new();
        for device in each(devices) {
            volumes.push(AnyVolume::open(device, pool, config.clone(), format).await?);
        }
        Ok(StripedVolume(volumes))
    }

    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        AnyVolume::verify(&devices[..1], pool, observer).await
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        AnyVolume::upgrade(&devices[..1], pool).await
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        AnyVolume::device_layout(format_region)
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> StripedEngine {
        let engine = |(volume, device): (&AnyVolume, _)| volume.engine(core, device, pool.clone());
        StripedEngine(self.0.iter().zip(each(devices)).map(engine).collect())
    }

    fn info(&self) -> VolumeInfo {
        self.0[0].info()
    }
    fn used_bytes(&self) -> Arc<AtomicU64> {
        self.0[0].used_bytes()
    }
    fn is_idle(&self) -> bool {
        self.0.iter().all(Volume::is_idle)
    }
    fn is_read_only(&self) -> bool {
        self.0.iter().any(Volume::is_read_only)
    }
    fn statistics(&self) -> EngineStatistics {
        self.0[0].statistics()
    }
}

impl Engine for StripedEngine {
    type Iterator = NoIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        self.of(key).put_with(key, value, options).await.map_err(|error| self.placed(key, error))
    }
    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        self.of(key).get_range(key, range).await.map_err(|error| self.placed(key, error))
    }
    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        self.of(key).delete_with(key, version).await.map_err(|error| self.placed(key, error))
    }
    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        self.of(key).status(key).await.map_err(|error| self.placed(key, error))
    }
    async fn list(&self, _start: &Key, _sink: &mut impl KeySink) -> Result<(), EngineError> {
        Err(EngineError::Unsupported(Capability::RingOrder))
    }
    async fn scan(
        &self,
        _range: RingRange,
        _since: Version,
        _sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        Err(EngineError::Unsupported(Capability::RingOrder))
    }
    async fn forget_below(&self, _version: Version) -> Result<(), EngineError> {
        Err(EngineError::Unsupported(Capability::Versions))
    }
    async fn give_up_space(&self, _bytes: u64) -> Result<u64, EngineError> {
        Err(EngineError::Unsupported(Capability::Reclaim))
    }
    async fn flush(&self) -> Result<(), EngineError> {
        for engine in &self.0 {
            engine.flush().await?;
        }
        Ok(())
    }
    async fn maintain(&self, _handle: &ReactorHandle, _report: impl FnMut(EngineError)) {}
    async fn close(&self) -> Result<(), EngineError> {
        for engine in &self.0 {
            engine.close().await?;
        }
        Ok(())
    }
    fn record_layout(&self) -> RecordLayout {
        self.0[0].record_layout()
    }
    fn statistics(&self) -> EngineStatistics {
        self.0[0].statistics()
    }
}
