//! Volumes on several devices in memory, filled, and opened again with devices that a test chooses.

#![allow(dead_code)]

use super::faulty_volume::run;
use super::pool;
use super::spanned_fixture::SpannedFixture;
use super::stable_memory::StableMemory;
use octokv_base::{Buffer, Key, Lba};
use octokv_device::Device;
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::{AnyEngine, AnyVolume, Engine, EngineError, PutMode, PutOutcome, Volume};
use std::rc::Rc;

/// The keys of a filled volume: numbers from 0.
pub const KEYS: u64 = 90;

/// The block behind the superblocks of a volume on several devices.
pub const SUPERBLOCKS_END: Lba = Lba(SUPERBLOCK_AREA_BYTES / 512);

pub type Devices = Vec<Rc<dyn Device>>;

pub fn blank(count: usize) -> Devices {
    (0..count).map(|_| StableMemory::new(16 << 20, 512) as Rc<dyn Device>).collect()
}

/// A volume of an engine, its devices, and a handle.
pub struct Opened {
    pub volume: AnyVolume,
    pub engine: AnyEngine,
}

impl Opened {
    pub fn new(fixture: &SpannedFixture, devices: &[Rc<dyn Device>]) -> Result<Opened, String> {
        let volume = run(fixture.open_volume(devices))?;
        let engine = volume.engine(0, devices, pool());
        Ok(Opened { volume, engine })
    }

    pub fn put(&self, number: u64, operation: u64) -> Result<PutOutcome, EngineError> {
        let key = key_of(number);
        let value = value_of(&key, operation, 100);
        let record = record_of(self.engine.record_layout(), &key, &value);
        run(self.engine.put(&key, PutMode::Upsert, record, value.len()))
    }

    /// The operation that stored a key's value.
    pub fn found(&self, number: u64) -> Result<Option<u64>, EngineError> {
        let key = key_of(number);
        run(self.engine.get(&key)).map(|value| value.map(|value| operation_of(&key, value.as_bytes())))
    }

    pub fn listed(&self) -> Result<usize, EngineError> {
        let mut count = 0;
        let mut sink = |_: &[u8]| {
            count += 1;
            true
        };
        run(self.engine.list(&Key::new(&[]).expect("the empty key"), &mut sink)).map(|()| count)
    }
}

/// A new volume with keys, shut down cleanly, and its devices.
pub fn filled(fixture: &SpannedFixture, count: usize) -> Devices {
    let devices = blank(count);
    run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
    let opened = Opened::new(fixture, &devices).expect("opens");
    for number in 0..KEYS {
        assert_eq!(opened.put(number, number), Ok(PutOutcome::Stored));
    }
    run(opened.engine.close()).expect("closes");
    devices
}

/// All bytes of a device.
pub fn contents_of(device: &Rc<dyn Device>) -> Vec<u8> {
    let geometry = device.geometry();
    let piece = |at: u64| {
        let bytes = (geometry.bytes() - at).min(1 << 20) as usize;
        let block = Lba(at / u64::from(geometry.block_bytes));
        run(device.read(block, Buffer::zeroed(bytes))).into_read().expect("memory")
    };
    (0..geometry.bytes()).step_by(1 << 20).flat_map(|at| piece(at).to_vec()).collect()
}
