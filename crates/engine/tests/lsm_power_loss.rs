//! The ordered engine under power loss at every write and flush, and under damaged blocks.

use crate::common::lsm_fixture::LsmFixture;
use octokv_engine::Engine;
use octokv_engine::lsm::{LsmEngine, LsmVolume};
use octokv_engine::volume_suite::VolumeSuite;
use std::rc::Rc;
use std::sync::Arc;

const DISK_BYTES: usize = 8 << 20;

fn suite() -> VolumeSuite<Arc<LsmVolume>> {
    let mut fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
    fixture.format.value_bytes_max = 64 << 10;
    let mut suite = VolumeSuite::new(fixture.format, fixture.open_config(), vec![DISK_BYTES], 512);
    suite.background = |engine: Rc<LsmEngine>| {
        Box::pin(async move {
            engine.flush_memtables().await.expect("no fault");
            engine.compact_once(false).await.expect("no fault");
            engine.compact_once(true).await.expect("no fault");
            engine.checkpoint().await.expect("no fault");
            engine.compact_all().await.expect("no fault");
        })
    };
    suite.settle =
        |engine: Rc<LsmEngine>| Box::pin(async move { engine.mark_durable().await.expect("marks") });
    suite
}

#[test]
fn acknowledged_writes_survive_power_loss_at_every_write_and_flush() {
    let (disks, trace) = suite().run_traced(7, 700);
    assert!(disks[0].events() > 2_000, "{} events", disks[0].events());
    suite().lose_power_at_events(&disks, &trace, 3);
}

#[test]
fn acknowledged_writes_survive_a_second_power_loss_during_recovery() {
    let (disks, trace) = suite().run_traced(8, 300);
    suite().lose_power_twice(&disks, &trace, 11);
}
