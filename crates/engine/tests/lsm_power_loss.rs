//! The ordered engine under power loss at every write and flush.

use crate::common::lsm_fixture::LsmFixture;
use octokv_base::Prng;
use octokv_device::power_loss::{DiskHistory, PowerLossMode};
use octokv_engine::lsm::{LsmEngine, LsmVolume};
use octokv_engine::volume_suite::{VolumeSuite, read_all};
use octokv_engine::{Durability, Engine};
use std::rc::Rc;
use std::sync::Arc;

const DISK_BYTES: usize = 8 << 20;

fn suite_of(durability: Durability) -> VolumeSuite<Arc<LsmVolume>> {
    let mut fixture = LsmFixture { cores: 2, durability, ..LsmFixture::default() };
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

fn suite() -> VolumeSuite<Arc<LsmVolume>> {
    suite_of(Durability::PowerSafe)
}

/// Half of 5,000 operations: the other half runs beside it, on two cores.
#[test]
fn acknowledged_writes_survive_power_loss_at_every_write_and_flush() {
    let (disks, trace) = suite().run_traced(7, 2_500);
    assert!(disks[0].events() > 7_000, "{} events", disks[0].events());
    suite().lose_power_at_events(&disks, &trace, 1);
}

#[test]
fn acknowledged_writes_of_two_cores_survive_power_loss_at_every_write_and_flush() {
    let mut suite = suite();
    suite.cores = 2;
    let (disks, trace) = suite.run_traced(9, 2_500);
    assert!(disks[0].events() > 7_000, "{} events", disks[0].events());
    suite.lose_power_at_events(&disks, &trace, 1);
}

/// `make power-loss` makes it 100,000 operations by `OCTOKV_POWER_LOSS_OPERATIONS`.
#[test]
fn acknowledged_writes_survive_power_loss_at_sampled_events_of_a_long_run() {
    let operations = std::env::var("OCTOKV_POWER_LOSS_OPERATIONS");
    let operations: u64 = operations.map_or(5_000, |number| number.parse().expect("a number"));
    let mut suite = suite();
    suite.cores = 2;
    let (disks, trace) = suite.run_traced(10, operations);
    // About as many openings, however long the run is.
    suite.lose_power_at_events(&disks, &trace, (disks[0].events() / 700).max(1) | 1);
}

#[test]
fn acknowledged_writes_with_versions_and_tombstones_survive_power_loss() {
    let mut suite = suite();
    (suite.has_versions, suite.cores) = (true, 2);
    let (disks, trace) = suite.run_traced(11, 700);
    suite.lose_power_at_events(&disks, &trace, 5);
    let (disks, trace) = suite.run_traced(12, 200);
    suite.lose_power_twice(&disks, &trace, 13);
}

#[test]
fn acknowledged_writes_of_two_cores_survive_power_loss() {
    for seed in 30..34 {
        let mut suite = suite();
        suite.cores = 2;
        let (disks, trace) = suite.run_traced(seed, 500);
        suite.lose_power_at_events(&disks, &trace, 7);
    }
}

#[test]
fn acknowledged_writes_survive_a_second_power_loss_during_recovery() {
    let (disks, trace) = suite().run_traced(8, 300);
    suite().lose_power_twice(&disks, &trace, 11);
}

/// What was acknowledged before it was flushed may be gone, but nothing else is damaged.
#[test]
fn a_volume_that_acknowledges_before_flushes_opens_after_power_loss() {
    let mut suite = suite_of(Durability::Completed);
    suite.cores = 2;
    let (disks, _) = suite.run_traced(14, 700);
    let (mut history, mut random) = (DiskHistory::of(&disks[0]), Prng::new(3));
    for events in (0..=disks[0].events()).step_by(7) {
        history.advance(events);
        for mode in PowerLossMode::ALL {
            let context = format!("power loss at {events}, {mode:?}");
            let opened = suite.open(history.images(mode, &mut random));
            let (disks, engine) = opened.unwrap_or_else(|error| panic!("{context}: {error}"));
            let found = read_all(&disks[0], &engine);
            assert!(found.iter().all(Result::is_ok), "{context}: {found:?}");
        }
    }
}
