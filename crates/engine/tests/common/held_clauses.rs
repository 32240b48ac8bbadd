//! A clause of the contract on a new volume, whose device completes operations in random order.

use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::contract_clauses::Clauses;
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::rc::Rc;

/// Formats and opens a volume on a disk of so many bytes, and checks the clause on its engine.
pub fn holds_on<F: EngineFixture>(
    fixture: &F,
    disk_bytes: usize,
    clause: impl FnOnce(&Clauses<'_, F::Engine>),
) {
    let (disk, mut random) = (PowerLossDisk::new(vec![0; disk_bytes], 512), Prng::new(1));
    let idle = RefCell::new(|| {
        disk.complete_one(&mut random);
    });
    let run_io = || (idle.borrow_mut())();
    block_on(fixture.format(Rc::new(disk.clone())), run_io);
    let engine = block_on(fixture.open(Rc::new(disk.clone())), run_io).expect("opens");
    clause(&Clauses { engine: &engine, idle: &idle });
}
