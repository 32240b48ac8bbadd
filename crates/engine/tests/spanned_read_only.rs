//! A device of a volume that has become read-only after a failed write: what it may have of writes that failed is never counted as gone.

use crate::common::faulty_volume::run;
use crate::common::growing_volume::{BALANCED, Growing, STEPS_MAX, grown};
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::{AnyVolume, DeleteOutcome, Engine, EngineKind, PutMode, Volume};
use std::rc::Rc;

/// A volume on three devices without keys, and the faults of the second.
fn emptied(fixture: &SpannedFixture) -> (Devices, FaultPlan) {
    let mut devices = filled(fixture, 3);
    let opened = Opened::new(fixture, &devices).expect("opens");
    for number in 0..KEYS {
        assert_eq!(run(opened.engine.delete(&key_of(number))), Ok(DeleteOutcome::Deleted));
    }
    run(opened.engine.close()).expect("closes");
    let plan = FaultPlan::default();
    devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
    (devices, plan)
}

#[test]
fn no_flush_succeeds_after_a_write_that_may_be_on_the_device() {
    for engine in EngineKind::ALL {
        for filter in [OpFilter::Write, OpFilter::Flush] {
            let (fixture, plan) = (SpannedFixture::new(engine), FaultPlan::default());
            let mut devices = filled(&fixture, 3);
            devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
            let opened = Opened::new(&fixture, &devices).expect("opens");
            run(opened.engine.flush()).expect("no fault");
            plan.add(FaultRule::always(filter, InjectedFault::Error(5)));
            let failed =
                (0..KEYS).filter(|&number| run(opened.engine.delete(&key_of(number))).is_err()).count();
            assert!(failed > 10, "{engine}, {filter:?}: {failed} deletes failed");
            plan.clear();
            let flushed = run(opened.engine.flush());
            assert!(flushed.is_err(), "{engine}, {filter:?}: the device has lost writes");
        }
    }
}

#[test]
fn a_put_that_failed_on_a_device_is_not_there_after_its_partition_has_moved() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let mut moved = 0;
        for number in 0..24 {
            let (mut devices, plan) = emptied(&fixture);
            devices.extend(blank(1));
            let mut growing = grown(&fixture, &devices);
            // The put is on the device when it fails.
            plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
            let key = key_of(number);
            let put = growing.end(async |engine| {
                let record = record_of(engine.record_layout(), &key, &value_of(&key, number, 100));
                engine.put(&key, PutMode::Upsert, record, 100).await
            });
            plan.clear();
            if put.is_ok() {
                continue;
            }
            for _ in 0..STEPS_MAX {
                if growing.moved() == BALANCED {
                    break;
                }
                growing.step();
            }
            assert_eq!(growing.moved(), BALANCED, "{engine}: key {number}");
            (0..5_000).for_each(|_| growing.step());
            let is_rebalancing = growing.spanned().is_rebalancing();
            drop(growing);
            let mut growing = Growing::open_all(&fixture, &devices, Box::new(|| {}));
            growing.settle();
            let found = growing.end(async |engine| engine.get(&key).await).expect("no fault").is_some();
            growing.close();
            let report = run(AnyVolume::verify(&devices, &pool(), &mut |_, _| ())).expect("is intact");
            assert_eq!(report.keys, u64::from(found), "{engine}: key {number}");
            // It waits for an opening that tells what the device has.
            assert!(found || is_rebalancing, "{engine}: key {number}");
            moved += usize::from(!found);
        }
        assert!(moved > 0, "{engine}: no partition has moved whose put failed");
    }
}
