//! The log engine under power loss at every write and flush.

use crate::common::log_fixture::{LogFixture, SmallLogVolume};
use futures_util::future::join_all;
use octokv_base::Prng;
use octokv_device::power_loss::{DiskHistory, PowerLossMode};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::volume_suite::{VolumeSuite, read_all};
use octokv_engine::{Durability, FormatConfig};
use std::rc::Rc;

const DISK_BYTES: usize = 8 << 20;

fn suite_of(durability: Durability) -> VolumeSuite<SmallLogVolume> {
    let fixture = LogFixture { cores: 2, durability, ..LogFixture::default() };
    let format = FormatConfig { value_bytes_max: 64 << 10, ..fixture.format };
    let mut suite = VolumeSuite::new(format, fixture.open_config(), vec![DISK_BYTES], 512);
    suite.background = |engine: Rc<LogEngine>| {
        Box::pin(async move {
            engine.split_once().await.expect("no fault");
            engine.checkpoint().await.expect("no fault");
            engine.compact_once(LogKind::Values).await.expect("no fault");
            engine.compact_once(LogKind::Keys).await.expect("no fault");
            engine.mark_durable().await.expect("no fault");
        })
    };
    suite.settle =
        |engine: Rc<LogEngine>| Box::pin(async move { engine.mark_durable().await.expect("marks") });
    suite
}

fn suite() -> VolumeSuite<SmallLogVolume> {
    suite_of(Durability::PowerSafe)
}

#[test]
fn acknowledged_writes_survive_power_loss_at_every_write_and_flush() {
    let (disks, trace) = suite().run_traced(7, 2_500);
    assert!(disks[0].events() > 5_000, "{} events", disks[0].events());
    suite().lose_power_at_events(&disks, &trace, 1);
}

/// Both logs of both stores are compacted at the same time: each call takes what no other one has.
#[test]
fn acknowledged_writes_survive_power_loss_beside_four_compactions_at_once() {
    let mut suite = suite();
    suite.background = |engine: Rc<LogEngine>| {
        Box::pin(async move {
            engine.split_once().await.expect("no fault");
            engine.checkpoint().await.expect("no fault");
            let logs = [LogKind::Values, LogKind::Keys, LogKind::Values, LogKind::Keys];
            for advanced in join_all(logs.map(|log| engine.compact_once(log))).await {
                advanced.expect("no fault");
            }
            engine.mark_durable().await.expect("no fault");
        })
    };
    let (disks, trace) = suite.run_traced(17, 1_500);
    suite.lose_power_at_events(&disks, &trace, 2);
    let (disks, trace) = suite.run_traced(18, 120);
    suite.lose_power_twice(&disks, &trace, 13);
}

#[test]
fn acknowledged_writes_of_two_cores_survive_power_loss_at_every_write_and_flush() {
    let mut suite = suite();
    suite.cores = 2;
    let (disks, trace) = suite.run_traced(9, 2_500);
    suite.lose_power_at_events(&disks, &trace, 1);
}

#[test]
fn acknowledged_writes_with_versions_and_tombstones_survive_power_loss() {
    let mut suite = suite();
    (suite.has_versions, suite.cores) = (true, 2);
    let (disks, trace) = suite.run_traced(11, 700);
    suite.lose_power_at_events(&disks, &trace, 5);
    let (disks, trace) = suite.run_traced(12, 120);
    suite.lose_power_twice(&disks, &trace, 13);
}

/// Their records share writes, and their entries batches.
#[test]
fn acknowledged_writes_of_two_keys_survive_power_loss_at_every_write_and_flush() {
    for has_versions in [false, true] {
        let mut suite = suite();
        (suite.keys, suite.cores, suite.has_versions) = (2, 2, has_versions);
        let (disks, trace) = suite.run_traced(21, 700);
        suite.lose_power_at_events(&disks, &trace, 1);
        let (disks, trace) = suite.run_traced(22, 120);
        suite.lose_power_twice(&disks, &trace, 13);
    }
}

#[test]
fn acknowledged_writes_survive_a_second_power_loss_during_recovery() {
    let (disks, trace) = suite().run_traced(8, 200);
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
