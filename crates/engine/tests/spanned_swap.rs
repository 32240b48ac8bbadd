//! Swap regions: the contract with every put swapped that can be, power loss, and the loss of a region's device.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, SUPERBLOCKS_END, blank, filled};
use crate::common::pool;
use crate::common::spanned_contract::{
    agrees_with_the_model, clauses_hold, futures_may_be_dropped, is_linearizable,
};
use crate::common::spanned_fixture::{SpannedFixture, spanned_volume};
use crate::common::stable_memory::StableMemory;
use crate::common::swapped_volume::{
    ENGINES, damage, is_unavailable, keys_at, swapped, swaps, used_region_blocks,
};
use octokv_base::{Key, Lba, Nanos, Prng, RingRange, Version};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::{TaskSet, key_of, record_of};
use octokv_engine::volume_suite::VolumeSuite;
use octokv_engine::{
    AnyEngine, AnyVolume, DeleteOutcome, Engine, EngineError, EngineKind, OpenError, PutMode, PutOptions,
    PutOutcome, PutValue, ScanEntry, SwapReport, Volume,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::rc::Rc;

#[test]
fn random_operations_and_reopenings_agree_with_the_model() {
    for engine in ENGINES {
        for (seed, cache_bytes) in [(1, 0), (2, 3 << 20), (3, 0)] {
            agrees_with_the_model(&SpannedFixture { cache_bytes, ..SpannedFixture::swapping(engine) }, seed);
        }
    }
}

#[test]
fn concurrent_operations_on_few_keys_are_linearizable() {
    for engine in ENGINES {
        for seed in 0..20 {
            let volume = is_linearizable(&SpannedFixture::swapping(engine), seed);
            let SwapReport { swapped, merged, .. } = swaps(&volume);
            assert!(swapped > 20, "{engine}: {swapped} swapped, {merged} merged");
        }
    }
}

#[test]
fn the_clauses_of_the_contract_hold() {
    ENGINES.into_iter().for_each(|engine| clauses_hold(|| SpannedFixture::swapping(engine)));
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    ENGINES.into_iter().for_each(|engine| futures_may_be_dropped(&SpannedFixture::swapping(engine)));
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

#[test]
fn no_damaged_block_of_a_region_gives_an_older_value() {
    for engine in ENGINES {
        let fixture = SpannedFixture::swapping(engine);
        let (devices, opened) = swapped(&fixture);
        run(opened.engine.close()).expect("closes");
        let (mut refused, mut served) = (0, 0);
        // The first device has the values of the others' keys.
        for block in used_region_blocks(&devices[0], &fixture) {
            let intact = damage(&devices[0], block);
            let opened = Opened::new(&fixture, &devices).expect("opens");
            for number in 0..KEYS {
                match opened.found(number) {
                    Ok(found) => {
                        assert_eq!(found, Some(KEYS + number), "{engine}: damaged block {block}");
                        served += 1;
                    }
                    Err(EngineError::Corrupt { .. }) => refused += 1,
                    Err(error) => {
                        assert!(is_unavailable(&error, 0), "{engine}: {error}");
                        refused += 1;
                    }
                }
            }
            drop(opened);
            run(devices[0].write(Lba(block), intact)).result.expect("memory");
        }
        assert!(refused > 100 && served > 1_000, "{engine}: {refused} refused, {served} served");
    }
}

/// The versions of the keys that a scan shows.
async fn scanned(engine: &AnyEngine) -> Vec<(Key, Version)> {
    let mut keys = Vec::new();
    let mut sink = |entry: &ScanEntry<'_>| {
        keys.push((Key::new(entry.key).expect("a key"), entry.version));
        true
    };
    engine.scan(RingRange::FULL, Version::NONE, &mut sink).await.expect("no fault");
    keys
}

#[test]
fn a_scan_beside_merges_shows_no_version_from_before_them() {
    let (old, new) = (Version::from_bits(5), Version::from_bits(6));
    for engine in ENGINES {
        for seed in 0..10 {
            let (disk, engines, volume, mut random) = spanned_volume(&SpannedFixture::swapping(engine), seed);
            let mut order = Prng::new(seed);
            let mut complete = || {
                disk.complete_one(&mut order);
            };
            for version in [old, new] {
                for number in 0..30 {
                    let (key, layout) = (key_of(number), engines[0].record_layout());
                    let value = PutValue::new(record_of(layout, &key, &[7; 10]), 10);
                    let options = PutOptions { version, ..PutOptions::default() };
                    let put = engines[0].put_with(&key, value, options);
                    assert_eq!(block_on(put, &mut complete), Ok(PutOutcome::Stored));
                }
            }
            assert_eq!(swaps(&volume).keys, 30);
            let mut tasks = TaskSet::default();
            for number in 0..30 {
                let own = Rc::clone(&engines[1]);
                // It is refused, and the key merged before.
                tasks.add(async move {
                    let refused = own.delete_with(&key_of(number), old).await;
                    assert_eq!(refused, Ok(DeleteOutcome::NotNewer(new)));
                });
            }
            for _ in 0..3 {
                let own = Rc::clone(&engines[0]);
                tasks.add(async move {
                    let keys = scanned(&own).await;
                    assert_eq!(keys.len(), 30, "seed {seed}");
                    assert!(keys.iter().all(|(_, version)| *version == new), "{engine}, {seed}: {keys:?}");
                });
            }
            tasks.run(&mut random, |random| disk.complete_one(random));
            assert_eq!(swaps(&volume).keys, 0);
        }
    }
}

/// Runs the maintenance of a volume for a time without operations.
fn idle_for_a_time(Opened { volume, engine }: Opened) -> Opened {
    let (handle, sim) = (Rc::new(engine), SimEnv::new(SimEnvConfig::new(1)));
    let queue = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
    let reactor = ReactorHandle::new(CoreWaker::without_eventfd(), queue, CpuTime::simulated());
    let (mut now, mut random, mut tasks) = (Nanos::from_secs(1), Prng::new(3), TaskSet::default());
    reactor.begin_iteration(now);
    let (own, of_task) = (Rc::clone(&handle), reactor.clone());
    tasks.add(async move { own.maintain(&of_task, |error| panic!("maintenance: {error}")).await });
    for _ in 0..20 {
        now = now + Nanos::from_millis(5);
        reactor.begin_iteration(now);
        while tasks.step(&mut random) {}
    }
    drop(tasks);
    Opened { volume, engine: Rc::into_inner(handle).expect("its task was dropped") }
}

#[test]
fn an_idle_home_gets_its_keys_back() {
    for engine in ENGINES {
        let fixture = SpannedFixture { cores: 1, ..SpannedFixture::swapping(engine) };
        let (devices, opened) = swapped(&fixture);
        run(opened.engine.close()).expect("closes");
        let fixture = SpannedFixture { swap_gap: 8, ..fixture };
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert_eq!(swaps(&opened.volume).keys, KEYS as usize);
        let opened = idle_for_a_time(opened);
        assert_eq!(swaps(&opened.volume), SwapReport { keys: 0, swapped: 0, merged: KEYS }, "{engine}");
        assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(KEYS + number))), "{engine}");
        run(opened.engine.close()).expect("closes");
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert_eq!(swaps(&opened.volume).keys, 0, "{engine}");
    }
}

#[test]
fn a_region_that_fails_keeps_no_keys_from_home_that_are_in_others() {
    for engine in ENGINES {
        let with_gap = |swap_gap| SpannedFixture { cores: 1, swap_gap, ..SpannedFixture::swapping(engine) };
        let plan = FaultPlan::default();
        let mut devices = filled(&with_gap(0), 3);
        devices[0] = Rc::new(FaultDevice::new(Rc::clone(&devices[0]), plan.clone()));
        let opened = Opened::new(&with_gap(0), &devices).expect("opens");
        let mut keys = keys_at(engine, 1);
        keys.sort_by_key(|&number| key_of(number));
        // The first region takes a put, and none behind one that fails: that is read-only. Merges come to these keys first.
        assert_eq!(opened.put(keys[0], KEYS + keys[0]), Ok(PutOutcome::Stored));
        plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
        assert!(opened.put(keys[1], KEYS + keys[1]).is_err());
        for &number in &keys[2..] {
            assert_eq!(opened.put(number, KEYS + number), Ok(PutOutcome::Stored));
        }
        drop(opened);
        let opened = Opened::new(&with_gap(8), &devices).expect("opens");
        let AnyVolume::Spanned(volume) = &opened.volume else { panic!("it spans devices") };
        let is_in_region = |number: &&u64| volume.place_of_newest(&key_of(**number)) == 0;
        let in_region = keys.iter().filter(is_in_region).count();
        let elsewhere = swaps(&opened.volume).keys - in_region;
        assert!((1..=2).contains(&in_region) && elsewhere > 5, "{engine}: {in_region}, {elsewhere}");
        let blocks = devices[0].geometry().blocks;
        let region = blocks - with_gap(0).format.swap_bytes / 512;
        plan.add(FaultRule::within(OpFilter::Write, Lba(region), Lba(blocks), InjectedFault::Error(5)));
        let opened = idle_for_a_time(opened);
        assert_eq!(swaps(&opened.volume).keys, in_region, "{engine}");
        for number in keys.iter().filter(|&&number| number != keys[1]) {
            assert_eq!(opened.found(*number), Ok(Some(KEYS + number)), "{engine}: key {number}");
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

/// Puts a key, which is not swapped while no superblock of its home can be written: that has to note where it will be.
fn assert_noted_again(opened: &Opened, number: u64, plan: &FaultPlan) {
    let before = swaps(&opened.volume).swapped;
    let put = || {
        assert_eq!(opened.put(number, KEYS + number), Ok(PutOutcome::Stored));
        swaps(&opened.volume).swapped - before
    };
    plan.add(FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5)));
    assert_eq!(put(), 0, "it is not noted");
    plan.clear();
    assert_eq!(put(), 1, "it can be noted");
}

#[test]
fn a_note_that_may_not_be_durable_is_written_again() {
    for engine in ENGINES {
        let (fixture, plan) = (SpannedFixture::swapping(engine), FaultPlan::default());
        let mut devices = filled(&fixture, 3);
        devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
        let opened = Opened::new(&fixture, &devices).expect("opens");
        let number = keys_at(engine, 1)[0];
        // The superblock is written, and not flushed.
        plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
        assert_eq!(opened.put(number, KEYS + number), Ok(PutOutcome::Stored));
        assert_noted_again(&opened, number, &plan);
    }
}

#[test]
fn notes_that_may_be_cleared_are_written_again() {
    for engine in ENGINES {
        let (fixture, plan) = (SpannedFixture::swapping(engine), FaultPlan::default());
        let (mut devices, opened) = swapped(&fixture);
        for number in 0..KEYS {
            assert_eq!(run(opened.engine.delete(&key_of(number))), Ok(DeleteOutcome::Deleted));
            assert_eq!(opened.put(number, number), Ok(PutOutcome::Stored));
        }
        assert_eq!(swaps(&opened.volume).keys, 0, "{engine}");
        run(opened.engine.close()).expect("closes");
        devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
        // The first copy of the superblock is written, the second is not.
        let write = FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5));
        plan.add(write.once(1));
        let opened = Opened::new(&fixture, &devices).expect("opens");
        plan.clear();
        assert_noted_again(&opened, keys_at(engine, 1)[0], &plan);
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
