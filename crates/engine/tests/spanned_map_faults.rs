//! Superblocks that could not be written at a cutover: a device that has a map which was overruled does not serve by it.

use crate::common::growing_volume::{STEPS_MAX, grown};
use crate::common::opened_span::{Devices, KEYS, Opened, SUPERBLOCKS_END, blank, filled};
use crate::common::spanned_fixture::SpannedFixture;
use octokv_base::Lba;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::{EngineKind, MoveStage};
use std::rc::Rc;

#[test]
fn a_destination_whose_map_was_overruled_does_not_serve_by_it_alone() {
    for engine in EngineKind::ALL {
        let (fixture, plan) = (SpannedFixture::new(engine), FaultPlan::default());
        let mut devices: Devices = filled(&fixture, 2);
        devices.push(Rc::new(FaultDevice::new(blank(1).remove(0), plan.clone())));
        let mut growing = grown(&fixture, &devices);
        // Two writes note what it may have, the third gives it the map, and the fourth, the other copy of that, fails.
        let write = FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5));
        plan.add(write.once(3));
        let moved = growing.moved();
        let mut steps_until = |is_there: fn(MoveStage) -> bool| {
            for _ in 0..STEPS_MAX {
                if is_there(growing.spanned().move_stage()) {
                    return;
                }
                growing.step();
            }
            panic!("{engine}: it is at {:?}", growing.spanned().move_stage());
        };
        steps_until(|stage| stage == MoveStage::CleanUp);
        steps_until(|stage| stage != MoveStage::CleanUp);
        assert_eq!(growing.moved(), moved, "{engine}: no partition has moved");
        drop(growing);
        for at in [0, 1] {
            devices[at] = Rc::new(UnavailableDevice::new("gone".to_owned()));
        }
        let opened = Opened::new(&fixture, &devices).expect("one opens");
        for number in 0..KEYS {
            assert!(opened.found(number) != Ok(None), "{engine}: key {number}");
        }
    }
}
