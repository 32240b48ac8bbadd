//! The hash engine as a subject of the suites.

#![allow(dead_code)]

use octokv_base::{Pool, Random};
use octokv_device::power_loss::PowerDisk;
use octokv_device::{Device, Memory, MemoryDevice};
use octokv_engine::Durability;
use octokv_engine::conformance::Subject;
use octokv_engine::hash::{FormatSettings, HashEngine, OpenSettings, format, open};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

pub fn pool() -> Pool {
    Pool::new(64 << 20)
}

pub struct Hash {
    pub format: FormatSettings,
    pub durability: Durability,
}

impl Default for Hash {
    fn default() -> Hash {
        let format = FormatSettings { seed: 42, ..FormatSettings::default() };
        Hash { format, durability: Durability::Flush }
    }
}

impl Hash {
    pub fn settings(&self) -> OpenSettings {
        OpenSettings { durability: self.durability, cores: 4 }
    }
}

impl Subject for Hash {
    type Engine = HashEngine;

    async fn format(&self, device: Rc<dyn Device>) {
        format(&*device, &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<HashEngine, String> {
        let volume = open(&device, &pool(), self.settings(), &self.format).await;
        let volume = volume.map_err(|error| error.to_string())?;
        Ok(HashEngine::new(volume, 0, device, pool()))
    }

    async fn close(&self, engine: &HashEngine) {
        engine.checkpoint(true).await.expect("closes");
    }
}

/// A fresh small volume on a disk that completes operations in any order, with handles of several cores.
pub fn small(seed: u64, cores: usize) -> (PowerDisk, Vec<Rc<HashEngine>>, Random) {
    let mut subject = Hash::default();
    subject.format.unit_bytes = 512;
    let (disk, mut random) = (PowerDisk::new(vec![0; 2 << 20], 512), Random::new(seed ^ 0x5eed));
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut complete = || {
        disk.complete(&mut random);
    };
    block_on(subject.format(Rc::clone(&device)), &mut complete);
    let volume =
        block_on(open(&device, &pool(), subject.settings(), &subject.format), &mut complete).unwrap();
    let engine = |core| Rc::new(HashEngine::new(Arc::clone(&volume), core, Rc::clone(&device), pool()));
    (disk.clone(), (0..cores).map(engine).collect(), random)
}

/// A fresh store in memory.
pub fn volatile(bytes: u64, unit_bytes: u32) -> HashEngine {
    let mut subject = Hash::default();
    subject.format.unit_bytes = unit_bytes;
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Memory::new(bytes, 512).unwrap()));
    let volume = block_on(open(&device, &pool(), subject.settings(), &subject.format), || ()).unwrap();
    HashEngine::new(volume, 0, device, pool())
}
