//! What the hash engine's format 1 can do of the contract's clauses, and what it refuses by name.

use crate::common::HashFixture;
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::Capability;
use octokv_engine::HashKind;
use octokv_engine::Volume;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::contract_clauses::Clauses;
use octokv_engine::hash::HashEngine;
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

fn holds(hash: HashKind, clause: impl Fn(&Clauses<'_, HashEngine>)) {
    let mut fixture = HashFixture::default();
    fixture.format.hash = hash;
    fixture.format.unit_bytes = Some(512);
    fixture.format.value_bytes_max = 64 << 10;
    let (disk, mut random) = (PowerLossDisk::new(vec![0; 4 << 20], 512), Prng::new(1));
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    let run_io = || (idle.borrow_mut())();
    block_on(fixture.format(Rc::new(disk.clone())), run_io);
    let engine = block_on(fixture.open(Rc::new(disk.clone())), run_io).expect("opens");
    clause(&Clauses { engine: &engine, idle: &idle });
}

#[test]
fn buffers_ranges_and_scans_hold() {
    holds(HashKind::Xxh3, |clauses| clauses.buffers_and_ranges());
    holds(HashKind::Sha1, |clauses| clauses.buffers_and_ranges());
    holds(HashKind::Xxh3, |clauses| clauses.scans());
    holds(HashKind::Xxh3, |clauses| clauses.owner_cores(4));
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    let half_done = Cell::new(0);
    holds(HashKind::Xxh3, |clauses| {
        half_done.set(clauses.dropped_futures(Some(&|| clauses.engine.volume().is_idle())));
        assert!(!clauses.engine.volume().is_read_only());
    });
    assert!(half_done.get() >= 15, "{} futures were dropped half done", half_done.get());
}

#[test]
fn what_the_format_lacks_is_refused_by_name() {
    for capability in [Capability::Versions, Capability::Expiry, Capability::Reclaim] {
        holds(HashKind::Xxh3, |clauses| clauses.lacks(capability));
    }
    holds(HashKind::Sha1, |clauses| clauses.lacks(Capability::RingOrder));
}
