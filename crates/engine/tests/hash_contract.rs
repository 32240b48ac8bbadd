//! What each format of the hash engine can do of the contract's clauses, and what it refuses by name.

use crate::common::HashFixture;
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::{MemoryDevice, RamDisk};
use octokv_engine::Capability;
use octokv_engine::HashKind;
use octokv_engine::Volume;
use octokv_engine::WallClock;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::hash::HashEngine;
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// On a volume of each format.
fn holds(hash: HashKind, clause: impl Fn(&Clauses<'_, HashEngine>)) {
    for version in [1, 2] {
        holds_in(version, hash, |clauses, _| clause(clauses));
    }
}

/// On a volume of format 2 in memory.
fn holds_in_memory(clause: impl Fn(&Clauses<'_, HashEngine>, &TestClock)) {
    let (mut fixture, clock) = (HashFixture::default(), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    fixture.format.version = 2;
    let device = Rc::new(MemoryDevice::new(RamDisk::new(4 << 20, 512).expect("memory")));
    let engine = block_on(fixture.open(device), || ()).expect("opens");
    clause(&Clauses { engine: &engine, idle: &RefCell::new(|| ()) }, &clock);
}

fn holds_in(version: u16, hash: HashKind, clause: impl Fn(&Clauses<'_, HashEngine>, &TestClock)) {
    let (mut fixture, clock) = (HashFixture::default(), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    (fixture.format.version, fixture.format.hash) = (version, hash);
    fixture.format.unit_bytes = Some(512);
    fixture.format.value_bytes_max = 64 << 10;
    let (disk, mut random) = (PowerLossDisk::new(vec![0; 4 << 20], 512), Prng::new(1));
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    let run_io = || (idle.borrow_mut())();
    block_on(fixture.format(Rc::new(disk.clone())), run_io);
    let engine = block_on(fixture.open(Rc::new(disk.clone())), run_io).expect("opens");
    clause(&Clauses { engine: &engine, idle: &idle }, &clock);
}

#[test]
fn buffers_ranges_and_scans_hold() {
    holds(HashKind::Xxh3, |clauses| clauses.buffers_and_ranges());
    holds(HashKind::Sha1, |clauses| clauses.buffers_and_ranges());
    holds(HashKind::Xxh3, |clauses| clauses.scans());
    holds(HashKind::Xxh3, |clauses| clauses.owner_cores(4));
    holds(HashKind::Xxh3, |clauses| clauses.drive_cores(5));
}

#[test]
fn versions_conditions_expiry_and_scans_since_hold_in_format_2() {
    for hash in [HashKind::Xxh3, HashKind::Sha1] {
        holds_in(2, hash, |clauses, _| clauses.conditions());
    }
    holds_in(2, HashKind::Xxh3, |clauses, _| clauses.versions());
    holds_in(2, HashKind::Xxh3, |clauses, clock| clauses.expiry(clock));
    holds_in(2, HashKind::Xxh3, |clauses, _| clauses.scans_since());
    holds_in_memory(|clauses, _| clauses.conditions());
    holds_in_memory(|clauses, _| clauses.versions());
    holds_in_memory(|clauses, clock| clauses.expiry(clock));
    holds_in_memory(|clauses, _| clauses.scans_since());
}

#[test]
fn random_writes_with_versions_agree_with_the_model() {
    for seed in 0..20 {
        holds_in(2, HashKind::Xxh3, |clauses, _| clauses.random_writes(seed, 300));
        holds_in_memory(|clauses, _| clauses.random_writes(seed, 300));
    }
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    let half_done = Cell::new(0);
    holds(HashKind::Xxh3, |clauses| {
        half_done.set(half_done.get() + clauses.dropped_futures(Some(&|| clauses.engine.volume().is_idle())));
        assert!(!clauses.engine.volume().is_read_only());
    });
    assert!(half_done.get() >= 2 * 15, "{} futures were dropped half done", half_done.get());
}

#[test]
fn abandoned_writes_are_run_by_a_task_that_waits_for_them() {
    holds(HashKind::Xxh3, |clauses| clauses.abandoned_writes(&|| clauses.engine.volume().is_idle()));
}

#[test]
fn what_the_format_lacks_is_refused_by_name() {
    for capability in [Capability::Versions, Capability::Expiry, Capability::Reclaim] {
        holds_in(1, HashKind::Xxh3, |clauses, _| clauses.lacks(capability));
    }
    holds_in(2, HashKind::Xxh3, |clauses, _| clauses.lacks(Capability::Reclaim));
    holds_in(2, HashKind::Xxh3, |clauses, _| clauses.lacks(Capability::Iterators));
    holds(HashKind::Sha1, |clauses| clauses.lacks(Capability::RingOrder));
}
