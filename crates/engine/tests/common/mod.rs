//! The hash engine as a fixture of the conformance suite.

#![allow(dead_code)]

pub mod crafted_volume;
pub mod faulty_volume;
pub mod growing_volume;
pub mod held_clauses;
pub mod log_background;
pub mod log_fixture;
pub mod lsm_fixture;
pub mod maintained_volume;
pub mod noted_device;
pub mod opened_span;
pub mod spanned_contract;
pub mod spanned_fixture;
pub mod stable_memory;
pub mod swapped_volume;
pub mod traced_memory;
pub mod unwritten;

use octokv_base::{BufferPool, Prng};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::Durability;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::hash::{HashEngine, format, open};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

pub fn pool() -> BufferPool {
    BufferPool::new(64 << 20)
}

pub struct HashFixture {
    pub format: FormatConfig,
    pub durability: Durability,
    pub prepare_bytes: u64,
    pub clock: WallClock,
}

impl Default for HashFixture {
    fn default() -> HashFixture {
        let format = FormatConfig { seed: 42, ..FormatConfig::default() };
        HashFixture {
            format,
            durability: Durability::PowerSafe,
            prepare_bytes: 0,
            clock: WallClock::default(),
        }
    }
}

impl HashFixture {
    pub fn open_config(&self) -> OpenConfig {
        OpenConfig {
            durability: self.durability,
            cores: 4,
            cache_bytes: 0,
            prepare_bytes: self.prepare_bytes,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: self.clock.clone(),
            tokens: None,
        }
    }
}

impl EngineFixture for HashFixture {
    type Engine = HashEngine;

    async fn format(&self, device: Rc<dyn Device>) {
        format(&*device, &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<HashEngine, String> {
        let volume = open(&device, &pool(), self.open_config(), &self.format).await;
        let volume = volume.map_err(|error| error.to_string())?;
        Ok(HashEngine::new(volume, 0, device, pool()))
    }
}

/// A new small volume on a disk that completes operations in random order, with handles of several cores.
pub fn small_volume(seed: u64, cores: usize) -> (PowerLossDisk, Vec<Rc<HashEngine>>, Prng) {
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(512);
    let (disk, mut random) = (PowerLossDisk::new(vec![0; 2 << 20], 512), Prng::new(seed ^ 0x5eed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(Rc::clone(&device)), &mut complete);
    let volume =
        block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), &mut complete).unwrap();
    let engine = |core| Rc::new(HashEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool()));
    (disk.clone(), (0..cores).map(engine).collect(), random)
}

/// A new volume in memory.
pub fn volatile_engine(bytes: u64, unit_bytes: u32) -> HashEngine {
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(unit_bytes);
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(bytes, 512).unwrap()));
    let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ()).unwrap();
    HashEngine::new(volume, 0, device, pool())
}
