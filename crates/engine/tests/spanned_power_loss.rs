//! The suites of a volume on several disks: power is lost on all of them at once.

use crate::common::HashFixture;
use crate::common::striped_volume::{StripedEngine, StripedVolume};
use octokv_base::{Buffer, Lba};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_engine::Engine;
use octokv_engine::volume_suite::VolumeSuite;
use std::rc::Rc;

fn suite() -> VolumeSuite<StripedVolume> {
    let mut fixture = HashFixture::default();
    fixture.format.unit_bytes = Some(512);
    fixture.format.value_bytes_max = 64 << 10;
    VolumeSuite::new(fixture.format, fixture.open_config(), vec![1 << 20, 640 << 10, 768 << 10], 512)
}

#[test]
fn acknowledged_writes_survive_power_loss_on_three_disks() {
    let suite = suite();
    let (disks, trace) = suite.run_traced(31, 300);
    assert!(disks[0].events() > 900, "{} events", disks[0].events());
    suite.lose_power_at_events(&disks, &trace, 7);
    suite.lose_power_twice(&disks, &trace, 101);
}

#[test]
fn a_flipped_bit_of_any_disk_affects_one_key_and_names_the_disk() {
    let mut suite = suite();
    // Recovery then takes no damaged record for one that a crash has torn.
    suite.settle = |engine: Rc<StripedEngine>| Box::pin(async move { engine.close().await.expect("closes") });
    let (disks, _) = suite.run_traced(32, 120);
    let images: Vec<_> = disks.iter().map(PowerLossDisk::image).collect();
    assert!(suite.flip_a_bit_in_every_block(&images) > 10);
}

/// A disk that completes a flush without one, unless it is the first of its group.
struct NoFlush(PowerLossDisk);

impl Device for NoFlush {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        match self.0.index_in_group() {
            0 => self.0.flush(),
            _ => DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) }),
        }
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.0.trim(at, blocks)
    }
}

#[test]
#[should_panic(expected = "power loss at")]
fn a_volume_that_flushes_only_its_first_disk_fails_the_suite() {
    let mut suite = suite();
    suite.view = |disk| Rc::new(NoFlush(disk));
    let (disks, trace) = suite.run_traced(33, 100);
    suite.lose_power_at_events(&disks, &trace, 3);
}
