//! The suites of a volume on several disks: power is lost on all of them at once.

use crate::common::spanned_fixture::SpannedFixture;
use octokv_base::{Buffer, Lba};
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_engine::volume_suite::VolumeSuite;
use octokv_engine::{AnyEngine, AnyVolume, Engine, EngineKind};
use std::rc::Rc;

fn suite(engine: EngineKind) -> VolumeSuite<AnyVolume> {
    let fixture = SpannedFixture::new(engine);
    let disk_bytes = match engine {
        EngineKind::Hash => vec![1 << 20, 700 << 10, 768 << 10],
        EngineKind::Lsm | EngineKind::Log => vec![10 << 20, 8 << 20, 12 << 20],
    };
    VolumeSuite::new(fixture.format, fixture.open_config(), disk_bytes, 512)
}

#[test]
fn acknowledged_writes_survive_power_loss_on_three_disks() {
    for engine in EngineKind::ALL {
        let suite = suite(engine);
        let (disks, trace) = suite.run_traced(31, 300);
        assert!(disks[0].events() > 600, "{engine}: {} events", disks[0].events());
        suite.lose_power_at_events(&disks, &trace, 7);
        suite.lose_power_twice(&disks, &trace, 101);
    }
}

#[test]
fn a_flipped_bit_of_any_disk_affects_one_key_and_names_the_disk() {
    let mut suite = suite(EngineKind::Hash);
    // Recovery then takes no damaged record for one that a crash has torn.
    suite.settle = |engine: Rc<AnyEngine>| Box::pin(async move { engine.close().await.expect("closes") });
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
    let mut suite = suite(EngineKind::Hash);
    suite.view = |disk| Rc::new(NoFlush(disk));
    let (disks, trace) = suite.run_traced(33, 100);
    suite.lose_power_at_events(&disks, &trace, 3);
}
