//! A device is added to a volume with swapped keys: partitions move when their keys are merged, those of a full device behind others; its region takes swapped keys in its turn.

use crate::common::faulty_volume::run;
use crate::common::growing_volume::{Growing, STEPS_MAX, grown};
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use crate::common::swapped_volume::{ENGINES, damage, is_unavailable, swapped, swaps, used_region_blocks};
use octokv_base::{Key, Lba};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::{Engine, MoveStage, PutMode, PutOutcome};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const FILLER_BYTES: usize = 90_000;
/// More than the tables of any engine have inline, so that a merge needs space.
const VALUE_BYTES: usize = 1_000;

fn put(opened: &Opened, key: &Key, value: &[u8]) -> PutOutcome {
    let record = record_of(opened.engine.record_layout(), key, value);
    run(opened.engine.put(key, PutMode::Upsert, record, value.len())).expect("no fault")
}

fn named(name: &str, number: usize) -> Key {
    Key::new(format!("{name} {number}").as_bytes()).expect("short")
}

/// Stores keys of a name until so many have found their device full, and returns the numbers of those that were stored.
fn fill(opened: &Opened, name: &str, bytes: usize, refusals: usize) -> Vec<usize> {
    let (mut stored, mut refused) = (Vec::new(), 0);
    for number in 0.. {
        match put(opened, &named(name, number), &vec![number as u8; bytes]) {
            PutOutcome::Stored => stored.push(number),
            outcome => {
                assert_eq!(outcome, PutOutcome::Full);
                refused += 1;
            }
        }
        if refused == refusals {
            break;
        }
    }
    stored
}

#[test]
fn a_full_device_gives_partitions_away_before_its_swapped_keys_are_merged() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let (mut devices, opened) = swapped(&fixture);
        for number in 0..KEYS {
            let (key, operation) = (key_of(number), 2 * KEYS + number);
            assert_eq!(put(&opened, &key, &value_of(&key, operation, VALUE_BYTES)), PutOutcome::Stored);
        }
        assert_eq!(swaps(&opened.volume).keys, KEYS as usize, "{engine}");
        let fillers = fill(&opened, "filler", FILLER_BYTES, 60);
        fill(&opened, "small", VALUE_BYTES, 60);
        run(opened.engine.close()).expect("closes");
        devices.extend(blank(1));
        let mut growing = grown(&fixture, &devices);
        growing.model = (2 * KEYS..3 * KEYS).collect();
        let mut moved_before = 0;
        for step in 0.. {
            growing.step();
            if swaps(&growing.volume).keys > 0 {
                moved_before = growing.moved();
            }
            if growing.is_settled() {
                break;
            }
            assert!(step < STEPS_MAX, "{engine}: {} partitions have moved", growing.moved());
        }
        assert!(moved_before > 0, "{engine}: no partition moved before all keys were merged");
        (0..KEYS).for_each(|number| growing.check(number));
        for number in fillers {
            let key = named("filler", number);
            let value = growing.end(async |engine| engine.get(&key).await).expect("no fault");
            let value = value.unwrap_or_else(|| panic!("{engine}: filler {number} is missing"));
            assert!(value.as_bytes() == [number as u8; FILLER_BYTES], "{engine}: filler {number}");
        }
    }
}

/// The devices of a volume whose keys are all swapped, shut down cleanly, and another.
fn swapped_and_blank(fixture: &SpannedFixture) -> Devices {
    let (mut devices, opened) = swapped(fixture);
    run(opened.engine.close()).expect("closes");
    devices.extend(blank(1));
    devices
}

#[test]
fn a_lost_region_says_nothing_of_partitions_that_have_moved_away() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let mut devices = swapped_and_blank(&fixture);
        let mut growing = grown(&fixture, &devices);
        growing.settle();
        let has_moved = |&number: &u64| growing.spanned().device_of(key_of(number).as_bytes()) == 3;
        let moved: Vec<u64> = (0..KEYS).filter(has_moved).collect();
        assert!(moved.len() > 10, "{engine}: {moved:?}");
        growing.close();
        // The superblock of device 0 still names its partitions, and the region of device 1.
        devices[1] = Rc::new(UnavailableDevice::new("gone".to_owned()));
        let opened = Opened::new(&fixture, &devices).expect("the others open");
        for number in moved {
            assert_eq!(opened.found(number), Ok(Some(KEYS + number)), "{engine}: key {number}");
        }
    }
}

#[test]
fn partitions_with_keys_in_a_region_that_cannot_be_opened_stay() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let devices = swapped_and_blank(&fixture);
        // The first device has the values of the others' keys.
        for block in used_region_blocks(&devices[0], &fixture) {
            damage(&devices[0], block);
        }
        let mut growing = grown(&fixture, &devices);
        growing.settle();
        let mut refused = 0;
        for number in 0..KEYS {
            let key = key_of(number);
            match growing.end(async |engine| engine.get(&key).await) {
                Ok(value) => {
                    let found = value.map(|value| operation_of(&key, value.as_bytes()));
                    assert_eq!(found, Some(KEYS + number), "{engine}: an older value");
                }
                Err(error) => {
                    assert!(is_unavailable(&error, 0), "{engine}: {error}");
                    let device = growing.spanned().device_of(key.as_bytes());
                    assert!([1, 2].contains(&device), "{engine}: key {number} is on device {device}");
                    refused += 1;
                }
            }
        }
        assert!(refused > 30, "{engine}: {refused} refused");
    }
}

/// A volume on three devices, and a fourth. Those between the first and the last get the plan.
fn devices_with_faults(fixture: &SpannedFixture, plan: &FaultPlan) -> Devices {
    let mut devices = filled(fixture, 3);
    for device in &mut devices[1..] {
        *device = Rc::new(FaultDevice::new(Rc::clone(device), plan.clone()));
    }
    devices.extend(blank(1));
    devices
}

/// Puts keys of the first device by the handle of core 0 while a delete hangs on each of those with the plan, and reads them by that of core 1. Returns the places of
/// the newest values.
fn places_of_puts(growing: &mut Growing, plan: &FaultPlan) -> Vec<usize> {
    let keys_of = |growing: &Growing, device| -> Vec<u64> {
        let is_there = |&number: &u64| growing.spanned().device_of(key_of(number).as_bytes()) == device;
        (0..KEYS).filter(is_there).collect()
    };
    let end = Lba((11 << 20) / 512);
    plan.add(FaultRule::within(OpFilter::Write, Lba(0), end, InjectedFault::Hang));
    for device in [1, 2] {
        let (engine, key) = (Rc::clone(&growing.engines[1]), key_of(keys_of(growing, device)[0]));
        growing.tasks.add(async move {
            engine.delete(&key).await.expect("it hangs");
        });
    }
    growing.step();
    let of_first = keys_of(growing, 0);
    let mut places = Vec::new();
    for number in of_first {
        let (key, operation) = (key_of(number), KEYS + number);
        let stored = growing.end_on(0, async |engine| {
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, VALUE_BYTES));
            engine.put(&key, PutMode::Upsert, record, VALUE_BYTES).await
        });
        assert_eq!(stored, Ok(PutOutcome::Stored));
        places.push(growing.spanned().place_of_newest(&key));
        growing.model[number as usize] = operation;
        let read = growing.end_on(1, async |engine| engine.get(&key).await).expect("no fault");
        let read = read.unwrap_or_else(|| panic!("key {number} is missing"));
        assert_eq!(operation_of(&key, read.as_bytes()), operation);
    }
    places
}

#[test]
fn the_region_of_an_added_device_takes_puts_of_others_once_all_cores_have_it() {
    for engine in ENGINES {
        let (fixture, plan) = (SpannedFixture::swapping(engine), FaultPlan::default());
        let devices = devices_with_faults(&fixture, &plan);
        let mut growing = grown(&fixture, &devices);
        growing.settle();
        let places = places_of_puts(&mut growing, &plan);
        assert!(places.contains(&3), "{engine}: {places:?}");
        let (fixture, plan) = (SpannedFixture::swapping(engine), FaultPlan::default());
        let devices = devices_with_faults(&fixture, &plan);
        let mut growing = Growing::begin(&fixture, &devices, Box::new(|| {}));
        growing.volume.extend_engine(&growing.engines[0], (0, &devices[3], &pool()));
        let places = places_of_puts(&mut growing, &plan);
        assert!(!places.is_empty() && !places.contains(&3), "{engine}: {places:?}");
    }
}

#[test]
fn a_write_that_waited_for_the_map_of_a_move_is_one_of_a_key_that_may_be_swapped() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let devices = swapped_and_blank(&fixture);
        let mut growing = grown(&fixture, &devices);
        while growing.spanned().move_stage() != MoveStage::Cutover {
            growing.step();
        }
        let is_moving = |number: &u64| growing.spanned().move_of(&key_of(*number)).is_some();
        let number = (0..KEYS).find(is_moving).expect("some keys move");
        let (key, of_core) = (key_of(number), Rc::clone(&growing.engines[0]));
        let record =
            record_of(of_core.record_layout(), &key, &value_of(&key, 2 * KEYS + number, VALUE_BYTES));
        let mut put = Box::pin(async { of_core.put(&key, PutMode::Upsert, record, VALUE_BYTES).await });
        let mut context = Context::from_waker(Waker::noop());
        assert!(put.as_mut().poll(&mut context).is_pending(), "{engine}: it waits for the map");
        // It is not run again before the move, and what is swapped meanwhile, have ended.
        growing.settle();
        let mut polled = Poll::Pending;
        while polled.is_pending() {
            polled = put.as_mut().poll(&mut context);
            if polled.is_pending() {
                growing.step();
            }
        }
        assert_eq!(polled, Poll::Ready(Ok(PutOutcome::Stored)));
        assert_eq!(growing.spanned().device_of(key.as_bytes()), 3, "{engine}: it has moved");
        assert_ne!(growing.spanned().place_of_newest(&key), 3, "{engine}: its put is not swapped");
    }
}
