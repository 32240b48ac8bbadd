//! The devices of a volume on several: their order, devices of other volumes, and devices that fail.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba, Nanos, RingRange, Version};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::supervised::DeviceSupervision;
use octokv_device::unavailable::UnavailableDevice;
use octokv_device::{Device, DeviceError};
use octokv_engine::conformance::key_of;
use octokv_engine::{
    AnyVolume, DeleteOutcome, Engine, EngineError, EngineKind, IteratorOptions, KeyTraffic, PutOutcome,
    ScanEntry, Volume,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle};
use std::rc::Rc;

fn error_of(fixture: &SpannedFixture, devices: &[Rc<dyn Device>]) -> String {
    Opened::new(fixture, devices).map(|_| ()).expect_err("is refused")
}

#[test]
fn devices_may_be_given_in_any_order() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let devices = filled(&fixture, 3);
        for order in [[0, 1, 2], [2, 0, 1], [1, 0, 2]] {
            let given: Devices = order.map(|at: usize| Rc::clone(&devices[at])).into();
            let opened = Opened::new(&fixture, &given).expect("opens");
            for number in 0..KEYS {
                assert_eq!(opened.found(number), Ok(Some(number)), "{engine} {order:?}");
            }
            assert_eq!(opened.listed(), Ok(KEYS as usize));
            run(opened.engine.close()).expect("closes");
            let report = run(AnyVolume::verify(&given, &pool(), &mut |_, _| ())).expect("it is intact");
            assert_eq!((report.keys, report.problems.len(), report.is_clean_shutdown), (KEYS, 0, true));
        }
    }
}

#[test]
fn devices_of_other_volumes_are_refused_and_left_as_they_are() {
    let fixture = SpannedFixture::new(EngineKind::Log);
    let devices = filled(&fixture, 3);
    let mut other = SpannedFixture::new(EngineKind::Log);
    other.format.seed = 43;
    let others = filled(&other, 3);
    let with = |at: usize, device: &Rc<dyn Device>| {
        let mut given = devices.clone();
        given[at] = Rc::clone(device);
        error_of(&fixture, &given)
    };
    assert_eq!(with(1, &others[1]), "device 1 of the list is one of another volume");
    assert_eq!(with(2, &devices[0]), "device 2 of the list is device 0 of the volume, as another one is");
    assert_eq!(
        with(2, &blank(1)[0]),
        "device 2 of the list is none of a volume of several: it is not formatted"
    );
    let alone = StableMemory::new(16 << 20, 512) as Rc<dyn Device>;
    run(AnyVolume::format(&[Rc::clone(&alone)], &fixture.format)).expect("formats");
    assert_eq!(
        with(0, &alone),
        "device 0 of the list is none of a volume of several: it is a volume of the log engine, not of several \
         devices"
    );
    assert_eq!(error_of(&fixture, &devices[..2]), "the volume has 3 devices, and 2 are given");
    assert_eq!(error_of(&fixture, &devices[..1]), "the volume has 3 devices, and 1 are given");
    let more: Devices = devices.iter().chain(&others[..1]).cloned().collect();
    assert_eq!(error_of(&fixture, &more), "the volume has 3 devices, and 4 are given");
    let of_hash = SpannedFixture::new(EngineKind::Hash);
    assert_eq!(error_of(&of_hash, &devices), "it is a volume of the log engine, not of the hash engine");
    for (devices, fixture) in [(&devices, &fixture), (&others, &other)] {
        let opened = Opened::new(fixture, devices).expect("opens");
        assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(number))));
    }
}

/// Of a volume whose devices may serve or not: the keys of the device `failed` answer with its error, the others serve.
fn check_one_failed(
    opened: &Opened,
    engine: EngineKind,
    failed: u16,
    numbers: &mut dyn Iterator<Item = u64>,
) {
    let (mut of_failed, mut of_others) = (0, 0);
    for number in numbers {
        match opened.found(number) {
            Ok(found) => {
                assert_eq!(found, Some(number), "{engine}");
                assert_eq!(opened.put(number, number), Ok(PutOutcome::Stored), "{engine}");
                of_others += 1;
            }
            Err(EngineError::Device { error: DeviceError::Unavailable, place }) => {
                assert_eq!(place.device(), failed, "{engine}");
                assert!(opened.put(number, 1).is_err() && run(opened.engine.exist(&key_of(number))).is_err());
                assert!(run(opened.engine.delete(&key_of(number))).is_err());
                of_failed += 1;
            }
            Err(other) => panic!("{engine}: {other}"),
        }
    }
    assert!(
        of_failed > 15 && of_others > 30,
        "{engine}: {of_failed} keys of the failed device, {of_others} others"
    );
}

#[test]
fn a_device_that_is_absent_takes_down_its_own_keys() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let devices = filled(&fixture, 3);
        for failed in 0..3 {
            let mut given = devices.clone();
            given[failed] = Rc::new(UnavailableDevice::new("gone".to_owned()));
            let opened = Opened::new(&fixture, &given).expect("the others open");
            check_one_failed(&opened, engine, failed as u16, &mut (0..KEYS));
            // What would omit its keys fails.
            let is_unavailable = |error: EngineError| {
                assert!(
                    matches!(error, EngineError::Device { error: DeviceError::Unavailable, .. }),
                    "{error}"
                );
            };
            is_unavailable(opened.listed().expect_err("a device is absent"));
            let mut scan = |_: &ScanEntry<'_>| true;
            let scanned = run(opened.engine.scan(RingRange::FULL, Version::NONE, &mut scan));
            is_unavailable(scanned.expect_err("a device is absent"));
            is_unavailable(run(opened.engine.flush()).expect_err("a device is absent"));
            if engine == EngineKind::Lsm {
                let created = run(opened.engine.create_iterator(IteratorOptions::default()));
                is_unavailable(created.map(|_| ()).expect_err("a device is absent"));
            }
            assert!(!opened.volume.is_read_only());
            run(opened.engine.close()).expect("the others close");
        }
        // It is back: its keys are there, and what the others got meanwhile.
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(number))), "{engine}");
    }
}

#[test]
fn without_any_device_there_is_no_volume() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let gone: Devices =
        (0..3).map(|_| Rc::new(UnavailableDevice::new("gone".to_owned())) as Rc<dyn Device>).collect();
    assert_eq!(error_of(&fixture, &gone), format!("it failed: {}", DeviceError::Unavailable));
}

#[test]
fn a_device_whose_superblocks_are_damaged_takes_down_its_own_keys() {
    let fixture = SpannedFixture::new(EngineKind::Log);
    let devices = filled(&fixture, 3);
    for slot in 0..4 {
        let (at, mut block) = (Lba(slot * 8), Buffer::zeroed(512));
        block = run(devices[2].read(at, block)).into_read().expect("memory");
        block[200] ^= 1;
        run(devices[2].write(at, block)).result.expect("memory");
    }
    let opened = Opened::new(&fixture, &devices).expect("the others open");
    check_one_failed(&opened, EngineKind::Log, 2, &mut (0..KEYS));
}

#[test]
fn a_device_whose_writes_fail_leaves_the_others_writable() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let plan = FaultPlan::default();
        let mut devices = filled(&fixture, 3);
        devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
        let opened = Opened::new(&fixture, &devices).expect("opens");
        plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)));
        plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)));
        let (mut stored, mut failed) = (0, 0);
        for number in 0..KEYS {
            match opened.put(number, number + KEYS) {
                Ok(PutOutcome::Stored) => stored += 1,
                Err(EngineError::Device { place, .. }) => {
                    assert_eq!(place.device(), 1, "{engine}");
                    failed += 1;
                }
                Err(EngineError::ReadOnly) => failed += 1,
                other => panic!("{engine}: {other:?}"),
            }
        }
        assert!(stored > 30 && failed > 15, "{engine}: {stored} stored, {failed} failed");
        assert!(!opened.volume.is_read_only(), "{engine}");
        for number in 0..KEYS {
            let found = opened.found(number).expect("reads do not fail");
            assert!(found == Some(number) || found == Some(number + KEYS), "{engine}");
        }
    }
}

#[test]
fn a_device_that_goes_while_it_is_open_is_told_when_the_volume_closes() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let plan = FaultPlan::default();
        let devices = filled(&fixture, 3);
        let mut supervised = devices.clone();
        let inner = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
        let (sim, waker) = (SimEnv::new(SimEnvConfig::new(1)), CoreWaker::without_eventfd());
        let queue = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(waker, queue, CpuTime::simulated());
        supervised[1] = Rc::new(DeviceSupervision::new(Nanos::from_secs(1), 3).supervise(inner, &handle));
        let opened = Opened::new(&fixture, &supervised).expect("opens");
        let no_such_device = 19;
        for filter in [OpFilter::Read, OpFilter::Write, OpFilter::Flush] {
            plan.add(FaultRule::always(filter, InjectedFault::Error(no_such_device)));
        }
        // The first operation that notices: of the ordered engine it needs no device.
        match opened.listed() {
            Err(EngineError::Device { error: DeviceError::Unavailable, place }) if place.device() == 1 => {}
            listed => assert!(listed.is_ok() && engine == EngineKind::Lsm, "{engine}: {listed:?}"),
        }
        check_one_failed(&opened, engine, 1, &mut (0..KEYS));
        let error = run(opened.engine.close()).expect_err("one was not closed");
        assert!(
            matches!(error, EngineError::Device { error: DeviceError::Unavailable, place } if place.device() == 1),
            "{engine}: {error}"
        );
        // It recovers.
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(number))), "{engine}");
    }
}

#[test]
fn a_read_error_names_the_device() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let plan = FaultPlan::default();
        let mut devices = filled(&fixture, 3);
        devices[2] = Rc::new(FaultDevice::new(Rc::clone(&devices[2]), plan.clone()));
        let opened = Opened::new(&fixture, &devices).expect("opens");
        plan.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)));
        let mut failed = 0;
        for number in 0..KEYS {
            match opened.found(number) {
                Ok(found) => assert_eq!(found, Some(number), "{engine}"),
                Err(EngineError::Device { error, place }) => {
                    assert_eq!((error, place.device()), (DeviceError::Io(5), 2), "{engine}");
                    failed += 1;
                }
                Err(other) => panic!("{engine}: {other}"),
            }
        }
        assert!(failed > 15, "{engine}: {failed} keys of the failed device");
    }
}

#[test]
fn a_volume_on_many_devices_has_keys_on_each() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let devices = filled(&fixture, 7);
    let opened = Opened::new(&fixture, &devices).expect("opens");
    let AnyVolume::Spanned(volume) = &opened.volume else { panic!("it spans devices") };
    let keys: Vec<u64> = volume.members().map(|member| member.statistics().keys).collect();
    assert!(
        keys.len() == 7 && keys.iter().all(|&keys| keys > 3) && keys.iter().sum::<u64>() == KEYS,
        "{keys:?}"
    );
    assert_eq!(opened.volume.statistics().keys, KEYS);
    let infos: Vec<_> = volume.members().map(|member| member.info()).collect();
    let capacity: u64 = infos.iter().map(|info| info.capacity_bytes).sum();
    assert_eq!(opened.volume.info().capacity_bytes, capacity);
    assert!(infos.iter().all(|info| info.id != opened.volume.info().id));
    let used: u64 = volume.members().map(|member| member.used_bytes().get()).sum();
    assert_eq!(opened.volume.used_bytes().get(), used);
    assert_eq!(run(opened.engine.delete(&key_of(3))), Ok(DeleteOutcome::Deleted));
    assert_eq!(opened.volume.statistics().keys, KEYS - 1);
}

#[test]
fn what_the_keys_of_each_device_take_and_give_is_counted() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let devices = filled(&fixture, 3);
    let opened = Opened::new(&fixture, &devices).expect("opens");
    let traffic = || opened.volume.device_reports().iter().map(|report| report.traffic).collect::<Vec<_>>();
    assert_eq!(traffic(), [KeyTraffic::default(); 3]);
    for number in 0..KEYS {
        assert_eq!(opened.put(number, number), Ok(PutOutcome::Stored));
        assert_eq!(opened.found(number), Ok(Some(number)));
    }
    // Each value has 100 bytes.
    let keys: u64 = (0..KEYS).map(|number| key_of(number).len() as u64).sum();
    let sum = |bytes: fn(&KeyTraffic) -> u64| traffic().iter().map(bytes).sum::<u64>();
    assert_eq!((sum(|one| one.put_bytes), sum(|one| one.got_bytes)), (keys + KEYS * 100, KEYS * 100));
    assert!(
        traffic().iter().all(|one| one.put_bytes > one.got_bytes && one.got_bytes > 1_000),
        "{:?}",
        traffic()
    );
    assert_eq!(run(opened.engine.get(&key_of(KEYS + 1))).map(|value| value.is_none()), Ok(true));
    assert_eq!(sum(|one| one.got_bytes), KEYS * 100);
}
