//! The contract of a handle on volumes on three devices, with or without swap regions: the model, concurrent calls, clauses, dropped futures.

#![allow(dead_code)]

use super::held_clauses::holds_on;
use super::spanned_fixture::{SPAN_DISK_BYTES, SpannedFixture, spanned_volume};
use octokv_base::Prng;
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance;
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::{AnyEngine, AnyVolume, Capability, Volume, WallClock};
use std::cell::RefCell;
use std::rc::Rc;

/// 800 random operations and reopenings agree with the model.
pub fn agrees_with_the_model(fixture: &SpannedFixture, seed: u64) {
    let disk = PowerLossDisk::new(vec![0; SPAN_DISK_BYTES], 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut random = Prng::new(seed);
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    conformance::sequential(fixture, &device, seed, 800, &idle);
}

/// 400 operations on few keys, from all cores at once, are linearizable. Returns the volume.
pub fn is_linearizable(fixture: &SpannedFixture, seed: u64) -> AnyVolume {
    let (disk, engines, volume, mut random) = spanned_volume(fixture, seed);
    let mut advance_io = |random: &mut Prng| disk.complete_one(random);
    conformance::concurrent(&engines, seed, 400, &mut advance_io);
    while disk.complete_one(&mut random) {}
    volume
}

/// A clause of the contract holds on a new volume.
pub fn holds(mut fixture: SpannedFixture, clause: impl Fn(&Clauses<'_, AnyEngine>, &TestClock)) {
    let clock = TestClock::default();
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, SPAN_DISK_BYTES, |clauses| clause(clauses, &clock));
}

/// The clauses hold that every volume on several devices can do, each on a new volume of `fixture`.
pub fn clauses_hold(fixture: impl Fn() -> SpannedFixture) {
    holds(fixture(), |clauses, _| clauses.buffers_and_ranges());
    holds(fixture(), |clauses, _| clauses.scans());
    holds(fixture(), |clauses, _| clauses.scans_since());
    holds(fixture(), |clauses, _| clauses.conditions());
    holds(fixture(), |clauses, _| clauses.versions());
    holds(fixture(), |clauses, clock| clauses.expiry(clock));
    holds(fixture(), |clauses, _| clauses.lacks(Capability::Reclaim));
    for seed in 0..8 {
        holds(fixture(), |clauses, _| clauses.random_writes(seed, 300));
    }
}

/// Futures may be dropped after any poll, and writes then continue.
pub fn futures_may_be_dropped(fixture: &SpannedFixture) {
    let (disk, engines, volume, mut random) = spanned_volume(fixture, 7);
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    let clauses = Clauses { engine: &*engines[0], idle: &idle };
    let half_done = clauses.dropped_futures(Some(&|| volume.is_idle()));
    let engine = fixture.format.engine;
    assert!(half_done >= 10, "{engine}: {half_done} futures were dropped half done");
    assert!(!volume.is_read_only());
    clauses.abandoned_writes(&|| volume.is_idle());
}
