//! Swap regions: the contract with every put swapped that can be, power loss, and the loss of a region's device.

use crate::common::faulty_volume::run;
use crate::common::held_clauses::holds_on;
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::{SPAN_DISK_BYTES, SpannedFixture, spanned_volume};
use crate::common::stable_memory::StableMemory;
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_device::unavailable::UnavailableDevice;
use octokv_device::{Device, DeviceError};
use octokv_engine::conformance::{self, key_of, record_of};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::volume_suite::VolumeSuite;
use octokv_engine::{
    AnyEngine, AnyVolume, Engine, EngineError, EngineKind, OpenError, PutMode, PutOutcome, SwapReport,
    Volume, WallClock,
};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The engines that have swap regions.
const ENGINES: [EngineKind; 2] = [EngineKind::Hash, EngineKind::Log];

fn swaps(volume: &AnyVolume) -> SwapReport {
    volume.device_reports().iter().fold(SwapReport::default(), |sum, of| SwapReport {
        keys: sum.keys + of.swaps.keys,
        swapped: sum.swapped + of.swaps.swapped,
        merged: sum.merged + of.swaps.merged,
    })
}

#[test]
fn random_operations_and_reopenings_agree_with_the_model() {
    for engine in ENGINES {
        for (seed, cache_bytes) in [(1, 0), (2, 3 << 20), (3, 0)] {
            let fixture = SpannedFixture { cache_bytes, ..SpannedFixture::swapping(engine) };
            let disk = PowerLossDisk::new(vec![0; SPAN_DISK_BYTES], 512);
            let device: Rc<dyn Device> = Rc::new(disk.clone());
            let mut random = Prng::new(seed);
            let idle = RefCell::new(|| {
                disk.complete_one(&mut random);
            });
            conformance::sequential(&fixture, &device, seed, 800, &idle);
        }
    }
}

#[test]
fn concurrent_operations_on_few_keys_are_linearizable() {
    for engine in ENGINES {
        for seed in 0..20 {
            let (disk, engines, volume, mut random) = spanned_volume(&SpannedFixture::swapping(engine), seed);
            let mut advance_io = |random: &mut Prng| disk.complete_one(random);
            conformance::concurrent(&engines, seed, 400, &mut advance_io);
            while disk.complete_one(&mut random) {}
            let SwapReport { swapped, merged, .. } = swaps(&volume);
            assert!(swapped > 20, "{engine}: {swapped} swapped, {merged} merged");
        }
    }
}

fn holds(engine: EngineKind, clause: impl Fn(&Clauses<'_, AnyEngine>, &TestClock)) {
    let (mut fixture, clock) = (SpannedFixture::swapping(engine), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, SPAN_DISK_BYTES, |clauses| clause(clauses, &clock));
}

#[test]
fn the_clauses_of_the_contract_hold() {
    for engine in ENGINES {
        holds(engine, |clauses, _| clauses.buffers_and_ranges());
        holds(engine, |clauses, _| clauses.scans());
        holds(engine, |clauses, _| clauses.scans_since());
        holds(engine, |clauses, _| clauses.conditions());
        holds(engine, |clauses, _| clauses.versions());
        holds(engine, |clauses, clock| clauses.expiry(clock));
        for seed in 0..20 {
            holds(engine, |clauses, _| clauses.random_writes(seed, 300));
        }
    }
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    for engine in ENGINES {
        let (disk, engines, volume, mut random) = spanned_volume(&SpannedFixture::swapping(engine), 7);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let half_done = Cell::new(0);
        let clauses = Clauses { engine: &*engines[0], idle: &idle };
        half_done.set(half_done.get() + clauses.dropped_futures(Some(&|| volume.is_idle())));
        assert!(half_done.get() >= 10, "{engine}: {} futures were dropped half done", half_done.get());
        assert!(!volume.is_read_only());
    }
}

#[test]
fn acknowledged_writes_survive_power_loss_on_three_disks() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let suite: VolumeSuite<AnyVolume> =
            VolumeSuite::new(fixture.format, fixture.open_config(), vec![11 << 20, 10 << 20, 12 << 20], 512);
        let (disks, trace) = suite.run_traced(31, 300);
        assert!(disks[0].events() > 600, "{engine}: {} events", disks[0].events());
        suite.lose_power_at_events(&disks, &trace, 7);
        suite.lose_power_twice(&disks, &trace, 101);
    }
}

/// A volume whose keys were all put twice, the second time into swap regions, and its devices.
fn swapped(fixture: &SpannedFixture) -> (Devices, Opened) {
    let devices: Devices = (0..3).map(|_| StableMemory::new(16 << 20, 512) as Rc<dyn Device>).collect();
    run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
    let opened = Opened::new(fixture, &devices).expect("opens");
    for operation in [0, KEYS] {
        for number in 0..KEYS {
            assert_eq!(opened.put(number, operation + number), Ok(PutOutcome::Stored));
        }
    }
    (devices, opened)
}

fn is_unavailable(error: &EngineError, device: u16) -> bool {
    matches!(error, EngineError::Device { error: DeviceError::Unavailable, place } if place.device() == device)
}

/// The keys that are found, each with the number of its put; the others answer that a device is not available.
fn found(opened: &Opened, lost: u16) -> Vec<(u64, u64)> {
    let found = |number: u64| match opened.found(number) {
        Ok(Some(operation)) => Some((number, operation / KEYS)),
        Ok(None) => panic!("{number} is missing"),
        Err(error) => {
            assert!(is_unavailable(&error, lost), "{error}");
            None
        }
    };
    (0..KEYS).filter_map(found).collect()
}

#[test]
fn swapped_values_are_found_listed_and_verified_after_an_opening() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let (devices, opened) = swapped(&fixture);
        assert_eq!(swaps(&opened.volume), SwapReport { keys: KEYS as usize, swapped: KEYS, merged: 0 });
        run(opened.engine.close()).expect("closes");
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert_eq!(swaps(&opened.volume), SwapReport { keys: KEYS as usize, swapped: 0, merged: 0 });
        assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(KEYS + number))), "{engine}");
        assert_eq!(opened.listed(), Ok(KEYS as usize));
        run(opened.engine.close()).expect("closes");
        let report = run(AnyVolume::verify(&devices, &pool(), &mut |_, _| ())).expect("it is intact");
        assert_eq!((report.keys, report.problems.len()), (KEYS, 0), "{engine}");
    }
}

#[test]
fn what_a_lost_region_may_have_is_not_served_from_home() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        for lost in 0..3 {
            let (mut devices, opened) = swapped(&fixture);
            run(opened.engine.close()).expect("closes");
            let whole = Rc::clone(&devices[lost]);
            devices[lost] = Rc::new(UnavailableDevice::new("gone".to_owned()));
            let opened = Opened::new(&fixture, &devices).expect("the others open");
            let served = found(&opened, lost as u16);
            assert!(served.iter().all(|(_, put)| *put == 1), "{engine}: older values: {served:?}");
            // Puts of the others' keys are refused, too: the region would have an older value when it is back.
            let refused: Vec<u64> = (0..KEYS).filter(|&number| opened.found(number).is_err()).collect();
            // Without a difference the first of the others has all.
            assert_eq!(refused.is_empty(), lost == 2, "{engine}: {refused:?}");
            for number in refused {
                assert!(is_unavailable(&opened.put(number, 5 * KEYS).expect_err("lost"), lost as u16));
            }
            drop(opened);
            devices[lost] = whole;
            let opened = Opened::new(&fixture, &devices).expect("opens");
            assert_eq!(found(&opened, 9).len(), KEYS as usize);
            assert!(found(&opened, 9).iter().all(|(_, put)| *put == 1), "{engine}");
        }
    }
}

/// The keys whose home is a device.
fn keys_at(engine: EngineKind, device: usize) -> Vec<u64> {
    // Without regions: the same keys are on the same devices.
    let fixture = SpannedFixture::new(engine);
    let mut devices = filled(&fixture, 3);
    devices[device] = Rc::new(UnavailableDevice::new("gone".to_owned()));
    let opened = Opened::new(&fixture, &devices).expect("the others open");
    (0..KEYS).filter(|&number| opened.found(number).is_err()).collect()
}

#[test]
fn a_replaced_device_takes_its_region_with_it() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        for lost in 0..3_usize {
            for is_closed_between in [false, true] {
                let (mut devices, mut opened) = swapped(&fixture);
                let of_lost = keys_at(engine, lost);
                if is_closed_between {
                    run(opened.engine.close()).expect("closes");
                    devices[lost] = Rc::new(UnavailableDevice::new("gone".to_owned()));
                    opened = Opened::new(&fixture, &devices).expect("the others open");
                }
                devices[lost] = blank(1).remove(0);
                let configs = (&fixture.open_config(), &fixture.format);
                run(opened.volume.replace((&devices, lost, true), &pool(), configs, |_| {}))
                    .expect("replaces");
                opened.volume.renew_engine(&opened.engine, lost, (0, &devices[lost], &pool()));
                let puts: Vec<_> = (0..KEYS)
                    .map(|number| opened.found(number).expect("served").map(|operation| operation / KEYS))
                    .collect();
                for (number, put) in (0..).zip(&puts) {
                    match of_lost.contains(&number) {
                        // The regions of the others had the newest values of its keys.
                        true => assert_eq!(*put, Some(1), "{engine}, {lost}: {number}"),
                        // Which keys its region had is known while the volume is open.
                        false if is_closed_between => assert!(put.is_some(), "{engine}, {lost}: {number}"),
                        false => assert_ne!(*put, Some(0), "{engine}, {lost}: {number}"),
                    }
                }
                let lost_keys = puts.iter().filter(|put| put.is_none()).count();
                assert_eq!(lost_keys > 0, !is_closed_between && lost < 2, "{engine}, {lost}");
                assert_eq!(opened.listed(), Ok(KEYS as usize - lost_keys), "{engine}, {lost}");
                run(opened.engine.close()).expect("closes");
                let opened = Opened::new(&fixture, &devices).expect("opens");
                let again = (0..KEYS).map(|number| opened.found(number).expect("served"));
                let again: Vec<_> = again.map(|found| found.map(|operation| operation / KEYS)).collect();
                assert_eq!(again, puts, "{engine}, {lost}");
            }
        }
    }
}

#[test]
fn a_full_region_leaves_puts_at_home() {
    for engine in ENGINES {
        let mut fixture = SpannedFixture::swapping(engine);
        fixture.format.value_bytes_max = 40_000;
        let devices: Devices = (0..2).map(|_| StableMemory::new(64 << 20, 512) as Rc<dyn Device>).collect();
        run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
        let opened = Opened::new(&fixture, &devices).expect("opens");
        let put = |number: u64, byte: u8| {
            let (key, layout) = (key_of(number), opened.engine.record_layout());
            let record = record_of(layout, &key, &[byte; 40_000]);
            run(opened.engine.put(&key, PutMode::Upsert, record, 40_000))
        };
        for byte in 0..4 {
            for number in 0..400 {
                assert_eq!(put(number, byte), Ok(PutOutcome::Stored), "{engine}: {number}, {byte}");
            }
        }
        let SwapReport { keys, swapped, .. } = swaps(&opened.volume);
        assert!(keys > 20 && keys < 300 && swapped > 50, "{engine}: {keys} keys, {swapped} puts");
        for number in 0..400 {
            let value = run(opened.engine.get(&key_of(number))).expect("no fault").expect("exists");
            assert!(value.as_bytes().len() == 40_000 && value.as_bytes().iter().all(|&byte| byte == 3));
        }
    }
}

#[test]
fn engines_without_versions_and_odd_sizes_have_no_region() {
    let refused = |change: &dyn Fn(&mut SpannedFixture)| {
        let mut fixture = SpannedFixture::swapping(EngineKind::Hash);
        change(&mut fixture);
        run(AnyVolume::format(&blank(2), &fixture.format)).expect_err("is refused")
    };
    assert_eq!(refused(&|fixture| fixture.format.engine = EngineKind::Lsm), OpenError::SwapEngine);
    assert_eq!(refused(&|fixture| fixture.format.version = 1), OpenError::SwapEngine);
    let odd = refused(&|fixture| fixture.format.swap_bytes = 100_000);
    assert_eq!(odd, OpenError::SwapBytes { bytes: 100_000 });
    let large = refused(&|fixture| fixture.format.swap_bytes = 16 << 20);
    assert!(matches!(large, OpenError::TooSmall { .. }), "{large}");
}
