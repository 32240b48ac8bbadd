//! Fixtures: volumes with swap regions, some of whose keys are swapped, and the values that their keys must have.

#![allow(dead_code)]

use super::faulty_volume::run;
use super::opened_span::{Devices, KEYS, Opened, filled};
use super::spanned_fixture::SpannedFixture;
use super::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba};
use octokv_device::unavailable::UnavailableDevice;
use octokv_device::{Device, DeviceError};
use octokv_engine::{AnyVolume, EngineError, EngineKind, PutOutcome, SwapReport, Volume};
use std::rc::Rc;

/// The engines that have swap regions.
pub const ENGINES: [EngineKind; 2] = [EngineKind::Hash, EngineKind::Log];

/// What the devices of a volume swapped, together.
pub fn swaps(volume: &AnyVolume) -> SwapReport {
    volume.device_reports().iter().fold(SwapReport::default(), |sum, of| SwapReport {
        keys: sum.keys + of.swaps.keys,
        swapped: sum.swapped + of.swaps.swapped,
        merged: sum.merged + of.swaps.merged,
    })
}

/// A volume whose keys were all put twice, the second time into swap regions, and its devices.
pub fn swapped(fixture: &SpannedFixture) -> (Devices, Opened) {
    let devices: Devices = (0..3).map(|_| StableMemory::new(16 << 20, 512) as Rc<dyn Device>).collect();
    run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
    let opened = Opened::new(fixture, &devices).expect("opens");
    for operation in [0, KEYS] {
        for number in 0..KEYS {
            assert_eq!(opened.put(number, operation + number), Ok(PutOutcome::Stored));
        }
    }
    (devices, opened)
}

/// Whether an error says that a device is not available.
pub fn is_unavailable(error: &EngineError, device: u16) -> bool {
    matches!(error, EngineError::Device { error: DeviceError::Unavailable, place } if place.device() == device)
}

/// The keys whose home is a device.
pub fn keys_at(engine: EngineKind, device: usize) -> Vec<u64> {
    // Without regions: the same keys are on the same devices.
    let fixture = SpannedFixture::new(engine);
    let mut devices = filled(&fixture, 3);
    devices[device] = Rc::new(UnavailableDevice::new("gone".to_owned()));
    let opened = Opened::new(&fixture, &devices).expect("the others open");
    (0..KEYS).filter(|&number| opened.found(number).is_err()).collect()
}

fn read(device: &Rc<dyn Device>, block: u64) -> Buffer {
    run(device.read(Lba(block), Buffer::zeroed(512))).into_read().expect("memory")
}

/// The blocks of the swap region of a device that are not zero.
pub fn used_region_blocks(device: &Rc<dyn Device>, fixture: &SpannedFixture) -> Vec<u64> {
    let (blocks, of_region) = (device.geometry().blocks, fixture.format.swap_bytes / 512);
    let is_used = |&block: &u64| read(device, block).iter().any(|&byte| byte != 0);
    (blocks - of_region..blocks).filter(is_used).collect()
}

/// Flips a bit of a block. Returns what it was.
pub fn damage(device: &Rc<dyn Device>, block: u64) -> Buffer {
    let (intact, mut damaged) = (read(device, block), read(device, block));
    damaged[100] ^= 1;
    run(device.write(Lba(block), damaged)).result.expect("memory");
    intact
}
