//! A volume on three devices, of any engine, as a fixture of the conformance suite: they are parts of one disk.

use super::pool;
use octokv_base::{Nanos, Prng};
use octokv_device::Device;
use octokv_device::device_window::DeviceWindow;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::{
    AnyEngine, AnyVolume, Durability, EngineKind, FormatConfig, OpenConfig, Volume, WallClock,
};
use octokv_runtime::block_on;
use octokv_sched::StartingCosts;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of each device.
pub const DEVICE_BYTES: [u64; 3] = [10 << 20, 16 << 20, 22 << 20];
/// The bytes of the disk.
pub const SPAN_DISK_BYTES: usize = (DEVICE_BYTES[0] + DEVICE_BYTES[1] + DEVICE_BYTES[2]) as usize;

pub struct SpannedFixture {
    pub format: FormatConfig,
    pub durability: Durability,
    pub cache_bytes: u64,
    pub clock: WallClock,
    pub cores: usize,
    pub tokens: Option<StartingCosts>,
    pub swap_gap: u32,
}

impl SpannedFixture {
    pub fn new(engine: EngineKind) -> SpannedFixture {
        let format = FormatConfig {
            engine,
            seed: 42,
            unit_bytes: Some(512),
            inline_bytes_max: 300,
            partitions: 2,
            value_bytes_max: 100_000,
            ..FormatConfig::default()
        };
        let clock = WallClock::default();
        SpannedFixture {
            format,
            durability: Durability::PowerSafe,
            cache_bytes: 0,
            clock,
            cores: 4,
            swap_gap: OpenConfig::SWAP_GAP,
            tokens: None,
        }
    }

    /// That of devices with queues, by a clock that passes 50 µs at each reading.
    pub fn with_tokens(self) -> SpannedFixture {
        let elapsed = AtomicU64::new(1);
        let clock = self.clock.with_monotonic(move || Nanos(elapsed.fetch_add(50_000, Ordering::Relaxed)));
        SpannedFixture { tokens: Some(StartingCosts::default()), clock, ..self }
    }

    /// One with swap regions, whose puts are all swapped that can be.
    pub fn swapping(engine: EngineKind) -> SpannedFixture {
        let mut fixture = SpannedFixture { swap_gap: 0, ..SpannedFixture::new(engine) };
        fixture.format.swap_bytes = 5 << 20;
        fixture
    }

    pub fn open_config(&self) -> OpenConfig {
        OpenConfig {
            durability: self.durability,
            cores: self.cores,
            cache_bytes: self.cache_bytes,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: self.swap_gap,
            clock: self.clock.clone(),
            tokens: self.tokens,
        }
    }

    /// The parts of a disk.
    pub fn devices(disk: &Rc<dyn Device>) -> Vec<Rc<dyn Device>> {
        let mut start = 0;
        let part = |bytes: u64| -> Rc<dyn Device> {
            let range = start..start + bytes;
            start += bytes;
            Rc::new(DeviceWindow::part(Rc::clone(disk), range))
        };
        DEVICE_BYTES.map(part).into()
    }

    pub async fn open_volume(&self, devices: &[Rc<dyn Device>]) -> Result<AnyVolume, String> {
        let volume = AnyVolume::open(devices, &pool(), self.open_config(), &self.format).await;
        volume.map_err(|error| error.to_string())
    }
}

impl EngineFixture for SpannedFixture {
    type Engine = AnyEngine;

    /// The ordered engine estimates it after a crash.
    const COUNTS_KEYS: bool = false;

    async fn format(&self, device: Rc<dyn Device>) {
        let devices = SpannedFixture::devices(&device);
        AnyVolume::format(&devices, &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<AnyEngine, String> {
        let devices = SpannedFixture::devices(&device);
        Ok(self.open_volume(&devices).await?.engine(0, &devices, pool()))
    }
}

/// A new volume on a disk that completes operations in random order, with handles of its cores.
pub fn spanned_volume(
    fixture: &SpannedFixture,
    seed: u64,
) -> (PowerLossDisk, Vec<Rc<AnyEngine>>, AnyVolume, Prng) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; SPAN_DISK_BYTES], 512), Prng::new(seed ^ 0x5eed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let devices = SpannedFixture::devices(&device);
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(device), &mut complete);
    let volume = block_on(fixture.open_volume(&devices), &mut complete).expect("opens");
    let engine = |core| Rc::new(volume.engine(core, &devices, pool()));
    let engines = (0..fixture.cores).map(engine).collect();
    (disk, engines, volume, random)
}
