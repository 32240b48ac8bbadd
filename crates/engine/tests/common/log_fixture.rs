//! The log engine as a fixture of the conformance suite, with parts so small that a few hundred operations fill chunks and split segments.

use super::pool;
use octokv_base::{BufferPool, Prng, SharedSum};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{
    DeviceLayout, Durability, EngineKind, EngineStatistics, FormatConfig, FormatVersions, OpenConfig,
    OpenError, PrefetchPlan, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo, WallClock,
};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

/// The bytes of a small volume's disk.
pub const LOG_DISK_BYTES: usize = 24 << 20;

#[derive(Clone)]
pub struct LogFixture {
    pub format: FormatConfig,
    pub durability: Durability,
    pub clock: WallClock,
    pub cores: usize,
    pub disk_bytes: usize,
    /// Those that maintenance runs at once; `None`: as many as the engine's default.
    pub compactions: Option<usize>,
    /// Segment images that a core keeps in memory, in bytes; `None`: as many as the engine's default.
    pub recent_image_bytes: Option<usize>,
}

impl Default for LogFixture {
    fn default() -> LogFixture {
        let format = FormatConfig {
            engine: EngineKind::Log,
            seed: 42,
            unit_bytes: Some(512),
            partitions: 2,
            chunk_bytes: Some(16 << 10),
            value_bytes_max: 400_000,
            ..FormatConfig::default()
        };
        LogFixture {
            format,
            durability: Durability::PowerSafe,
            clock: WallClock::default(),
            cores: 4,
            disk_bytes: LOG_DISK_BYTES,
            compactions: None,
            recent_image_bytes: None,
        }
    }
}

/// Segments of a few entries.
pub fn make_small(settings: &mut LogSettings) {
    settings.segment_target_bytes = 200;
}

impl LogFixture {
    pub fn open_config(&self) -> OpenConfig {
        OpenConfig {
            durability: self.durability,
            cores: self.cores,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: self.clock.clone(),
            tokens: None,
        }
    }

    pub async fn open_volume(&self, device: &Rc<dyn Device>) -> Result<Arc<LogVolume>, String> {
        let adjust = |settings: &mut LogSettings| {
            make_small(settings);
            settings.compactions = self.compactions.unwrap_or(settings.compactions);
            settings.recent_image_bytes = self.recent_image_bytes.unwrap_or(settings.recent_image_bytes);
        };
        let volume = open_with(device, &pool(), self.open_config(), &self.format, adjust).await;
        volume.map_err(|error| error.to_string())
    }
}

impl EngineFixture for LogFixture {
    type Engine = LogEngine;

    async fn format(&self, device: Rc<dyn Device>) {
        <Arc<LogVolume>>::format(&[device], &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<LogEngine, String> {
        let volume = self.open_volume(&device).await?;
        Ok(LogEngine::new(volume, device, pool()))
    }
}

/// A new volume on a disk that completes operations in random order, with handles of several cores.
pub fn log_volume(fixture: &LogFixture, seed: u64) -> (PowerLossDisk, Vec<Rc<LogEngine>>, Prng) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; fixture.disk_bytes], 512), Prng::new(seed ^ 0x5eed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(Rc::clone(&device)), &mut complete);
    let volume = block_on(fixture.open_volume(&device), &mut complete).unwrap();
    let engine = |_| Rc::new(LogEngine::new(Arc::clone(&volume), Rc::clone(&device), pool()));
    (disk.clone(), (0..fixture.cores).map(engine).collect(), random)
}

/// A volume that is opened with small segments.
#[derive(Clone)]
pub struct SmallLogVolume(pub Arc<LogVolume>);

impl Volume for SmallLogVolume {
    type Engine = LogEngine;
    const PREFETCH: PrefetchPlan = <Arc<LogVolume> as Volume>::PREFETCH;

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        <Arc<LogVolume>>::format(devices, config).await
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<SmallLogVolume, OpenError> {
        open_with(&devices[0], pool, config, format, make_small).await.map(SmallLogVolume)
    }

    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        <Arc<LogVolume>>::verify(devices, pool, observer).await
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        <Arc<LogVolume>>::upgrade(devices, pool).await
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        <Arc<LogVolume>>::device_layout(format_region)
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> LogEngine {
        self.0.engine(core, devices, pool)
    }

    fn info(&self) -> VolumeInfo {
        Volume::info(&self.0)
    }

    fn used_bytes(&self) -> SharedSum {
        Volume::used_bytes(&self.0)
    }

    fn is_idle(&self) -> bool {
        Volume::is_idle(&self.0)
    }

    fn is_read_only(&self) -> bool {
        Volume::is_read_only(&self.0)
    }

    fn statistics(&self) -> EngineStatistics {
        Volume::statistics(&self.0)
    }
}
