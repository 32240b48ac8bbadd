//! The ordered engine as a fixture of the conformance suite, with parts so small that a few hundred operations fill several levels.

use super::pool;
use octokv_base::Prng;
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::{Durability, EngineKind, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

/// The bytes of a small volume's disk.
pub const LSM_DISK_BYTES: usize = 24 << 20;

pub struct LsmFixture {
    pub format: FormatConfig,
    pub durability: Durability,
    pub clock: WallClock,
    pub cores: usize,
}

impl Default for LsmFixture {
    fn default() -> LsmFixture {
        let format = FormatConfig {
            engine: EngineKind::Lsm,
            seed: 42,
            unit_bytes: Some(512),
            inline_bytes_max: 300,
            ..FormatConfig::default()
        };
        LsmFixture { format, durability: Durability::PowerSafe, clock: WallClock::default(), cores: 4 }
    }
}

/// Memtables of a few dozen entries, tables of a few blocks, segments of a few records.
pub fn make_small(settings: &mut TreeSettings) {
    settings.memtable_bytes = 8 << 10;
    settings.table_bytes = 6 << 10;
    settings.segment_bytes = 32 << 10;
    settings.reserve_bytes = 2 << 20;
    settings.compaction.level0_trigger = 2;
    settings.compaction.level1_bytes = 12 << 10;
    settings.compaction.multiplier = 2;
    settings.compaction.input_bytes_max = 64 << 10;
    settings.views_max = 4;
    settings.snapshots_max = 40;
}

impl LsmFixture {
    pub fn open_config(&self) -> OpenConfig {
        OpenConfig {
            durability: self.durability,
            cores: self.cores,
            cache_bytes: 64 << 10,
            prepare_bytes: 0,
            compact_bytes_per_second: u64::MAX,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: self.clock.clone(),
            tokens: None,
        }
    }

    pub async fn open_volume(&self, device: &Rc<dyn Device>) -> Result<Arc<LsmVolume>, String> {
        let volume = open_with(device, &pool(), self.open_config(), &self.format, make_small).await;
        volume.map_err(|error| error.to_string())
    }
}

impl EngineFixture for LsmFixture {
    type Engine = LsmEngine;
    const COUNTS_KEYS: bool = false;

    async fn format(&self, device: Rc<dyn Device>) {
        <Arc<LsmVolume>>::format(&[device], &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<LsmEngine, String> {
        let volume = self.open_volume(&device).await?;
        Ok(LsmEngine::new(volume, 0, device, pool()))
    }
}

/// A new volume on a disk that completes operations in random order, with handles of several cores.
pub fn lsm_volume(fixture: &LsmFixture, seed: u64) -> (PowerLossDisk, Vec<Rc<LsmEngine>>, Prng) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; LSM_DISK_BYTES], 512), Prng::new(seed ^ 0x5eed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(Rc::clone(&device)), &mut complete);
    let volume = block_on(fixture.open_volume(&device), &mut complete).unwrap();
    let engine = |core| Rc::new(LsmEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool()));
    (disk.clone(), (0..fixture.cores).map(engine).collect(), random)
}
