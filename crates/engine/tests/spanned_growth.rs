//! A device is added to a volume on several, and partitions move to it while it is used: contents at each moment, after each loss of power, and with a device that fails.

use crate::common::faulty_volume::run;
use crate::common::growing_volume::{DELETED, Growing, STEPS_MAX, grown};
use crate::common::opened_span::{Devices, KEYS, Opened, SUPERBLOCKS_END, blank, contents_of, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use crate::common::swapped_volume::{ENGINES, swaps};
use futures_util::FutureExt;
use octokv_base::{Key, Lba, Nanos, Prng, RingPosition};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyVolume, Engine, EngineError, EngineKind, KeySink, MoveStage, OpenError, PutMode, Volume,
};
use octokv_runtime::{ReactorHandle, block_on};
use std::cell::Cell;
use std::rc::Rc;

/// Volumes of all engines, and those with swap regions, whose puts are all swapped that can be.
fn fixtures() -> impl Iterator<Item = (String, SpannedFixture)> {
    let without = EngineKind::ALL.map(|engine| (engine.to_string(), SpannedFixture::new(engine)));
    let swapping = ENGINES.map(|engine| (format!("{engine}, swapping"), SpannedFixture::swapping(engine)));
    without.into_iter().chain(swapping)
}

#[test]
fn partitions_move_to_an_added_device_while_all_keys_are_read_and_written() {
    for (engine, fixture) in fixtures() {
        let mut devices = filled(&fixture, 3);
        devices.extend(blank(1));
        let mut growing = grown(&fixture, &devices);
        let mut rounds = 0;
        while !growing.is_settled() {
            growing.step();
            growing.write().expect("no fault");
            let number = growing.random.below(KEYS);
            growing.check(number);
            if rounds % 16 == 0 {
                assert_eq!(growing.listed(), growing.live(), "{engine}: round {rounds}");
            }
            rounds += 1;
            assert!(rounds < 20_000, "{engine}: {} partitions have moved", growing.moved());
        }
        assert!(rounds > 10, "{engine}: {rounds} writes beside it");
        let swapped = swaps(&growing.volume).swapped;
        assert_eq!(
            swapped > 10,
            fixture.format.swap_bytes > 0,
            "{engine}: {swapped} puts were swapped beside it"
        );
        (0..KEYS).for_each(|number| growing.check(number));
        let (model, live) = (growing.model.clone(), growing.live());
        growing.close();
        // Nothing is left over where it was.
        let report = run(AnyVolume::verify(&devices, &pool(), &mut |_, _| ())).expect("is intact");
        assert_eq!((report.keys as usize, report.problems.len()), (live, 0), "{engine}");
        devices.rotate_left(1);
        let opened = Opened::new(&fixture, &devices).expect("opens");
        for (number, &operation) in (0..).zip(&model) {
            let found = opened.found(number).expect("no fault");
            assert_eq!(found.unwrap_or(DELETED), operation, "{engine}: key {number}");
        }
        devices.remove(0);
        let refused = Opened::new(&fixture, &devices).map(|_| ()).expect_err("one is missing");
        assert!(refused.contains("4 devices"), "{refused}");
    }
}

/// Receives keys, and pauses in front of the first page until the test goes on.
struct PausedListing {
    handle: ReactorHandle,
    may_go_on: Rc<Cell<bool>>,
    count: Rc<Cell<usize>>,
}

impl KeySink for PausedListing {
    fn offer(&mut self, _: &[u8]) -> bool {
        self.count.set(self.count.get() + 1);
        true
    }

    async fn yield_point(&mut self) {
        while !self.may_go_on.get() {
            self.handle.sleep(Nanos::from_millis(1)).await;
        }
    }
}

#[test]
fn keys_stay_where_they_were_as_long_as_a_listing_reads_them_there() {
    for (engine, fixture) in fixtures() {
        let mut devices = filled(&fixture, 3);
        devices.extend(blank(1));
        let mut growing = Growing::open(&fixture, &devices, Box::new(|| {}));
        let (may_go_on, count): (Rc<Cell<bool>>, Rc<Cell<usize>>) = Default::default();
        let (handle, of_core) = (growing.handle.clone(), Rc::clone(&growing.engines[1]));
        let mut sink = PausedListing { handle, may_go_on: Rc::clone(&may_go_on), count: Rc::clone(&count) };
        growing.tasks.add(async move {
            let start = Key::new(&[]).expect("the empty key");
            of_core.list(&start, &mut sink).await.expect("no fault");
        });
        growing.step();
        growing.add(&fixture, &devices);
        growing.extend(&devices);
        (0..500).for_each(|_| growing.step());
        assert_eq!((growing.moved(), count.get()), (0, 0), "{engine}: it has not ended");
        may_go_on.set(true);
        growing.settle();
        assert_eq!(count.get(), KEYS as usize, "{engine}");
    }
}

#[test]
fn keys_that_have_moved_are_not_available_without_the_new_device() {
    for (engine, fixture) in fixtures() {
        let mut devices = filled(&fixture, 3);
        devices.extend(blank(1));
        let mut growing = grown(&fixture, &devices);
        growing.settle();
        growing.close();
        // The others know of the moves.
        devices[3] = Rc::new(UnavailableDevice::new("gone".to_owned()));
        let opened = Opened::new(&fixture, &devices).expect("the others open");
        let mut lost = 0;
        for number in 0..KEYS {
            match opened.found(number) {
                Ok(found) => assert_eq!(found, Some(number), "{engine}"),
                Err(EngineError::Device { place, .. }) if place.device() == 3 => lost += 1,
                Err(error) => panic!("{engine}: {error}"),
            }
        }
        assert!((10..40).contains(&lost), "{engine}: {lost} keys");
    }
}

#[test]
fn nothing_moves_before_all_cores_have_the_new_device() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let mut devices = filled(&fixture, 3);
    devices.extend(blank(1));
    let mut growing = Growing::begin(&fixture, &devices, Box::new(|| {}));
    let (volume, engine) = (growing.volume.clone(), Rc::clone(&growing.engines[0]));
    volume.extend_engine(&engine, (0, &devices[3], &pool()));
    (0..200).for_each(|_| growing.step());
    assert_eq!(growing.moved(), 0);
    let engine = Rc::clone(&growing.engines[1]);
    volume.extend_engine(&engine, (1, &devices[3], &pool()));
    growing.settle();
    (0..KEYS).for_each(|number| growing.check(number));
}

#[test]
fn a_device_that_replaces_the_destination_of_a_move_knows_what_is_copied_to_it() {
    for (engine, fixture) in fixtures() {
        let mut devices = filled(&fixture, 3);
        devices.extend(blank(1));
        let mut growing = grown(&fixture, &devices);
        while growing.spanned().move_stage() != MoveStage::Copy {
            growing.step();
        }
        devices[3] = blank(1).remove(0);
        let (pool, configs) = (pool(), (&fixture.open_config(), &fixture.format));
        let replaced = growing.volume.replace((&devices, 3, false), &pool, configs, |_| {});
        block_on(replaced, &mut growing.complete).expect("replaces");
        for (core, engine) in growing.engines.iter().enumerate() {
            growing.volume.renew_engine(engine, 3, (core, &devices[3], &pool));
        }
        let copied = |growing: &Growing| growing.volume.device_reports()[3].statistics.keys;
        let mut steps = 0;
        while copied(&growing) == 0 {
            growing.step();
            steps += 1;
            assert!(steps < 1_000, "{engine}: nothing is copied");
        }
        // A kill, before they are deleted.
        drop(growing);
        let opened = Opened::new(&fixture, &devices).expect("opens");
        assert_eq!(opened.listed(), Ok(KEYS as usize), "{engine}");
        let AnyVolume::Spanned(spanned) = &opened.volume else { panic!("it spans devices") };
        assert_eq!(spanned.move_stage(), MoveStage::CleanUp, "{engine}");
    }
}

#[test]
fn writes_of_a_move_do_not_wait_for_the_format_of_a_further_device() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let mut devices = filled(&fixture, 3);
    devices.extend(blank(1));
    let mut growing = grown(&fixture, &devices);
    while growing.spanned().move_stage() != MoveStage::Copy {
        growing.step();
    }
    let plan = FaultPlan::default();
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Hang));
    devices.push(Rc::new(FaultDevice::new(blank(1).remove(0), plan.clone())));
    let (volume, open, format) = (growing.volume.clone(), fixture.open_config(), fixture.format);
    growing.tasks.add(async move {
        let added = volume.add(&devices, &pool(), (&open, &format), |_| {}).await;
        panic!("its format has ended: {added:?}");
    });
    for _ in 0..1_000 {
        growing.step();
        growing.write().expect("no fault");
    }
    assert_eq!(growing.moved(), 0, "a map is written beside the format");
    (0..KEYS).for_each(|number| growing.check(number));
}

#[test]
fn a_device_that_cannot_take_partitions_leaves_them_where_they_are() {
    let fixture = SpannedFixture::new(EngineKind::Log);
    let mut devices = filled(&fixture, 3);
    let plan = FaultPlan::default();
    devices.push(Rc::new(FaultDevice::new(blank(1).remove(0), plan.clone())));
    let mut growing = grown(&fixture, &devices);
    while !growing.spanned().is_rebalancing() {
        growing.step();
    }
    assert_eq!(growing.moved(), 0, "the first move has begun");
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)));
    for _ in 0..400 {
        growing.step();
        growing.write().expect("the first device has it");
        let number = growing.random.below(KEYS);
        growing.check(number);
    }
    assert_eq!(growing.moved(), 0);
    assert_eq!(growing.listed(), growing.live());
}

#[test]
fn a_device_that_cannot_be_added_is_refused_and_changes_nothing() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let devices = filled(&fixture, 3);
    let add = |fixture: &SpannedFixture, devices: &Devices| {
        let opened = Opened::new(fixture, &devices[..devices.len() - 1]).expect("opens");
        let configs = (&fixture.open_config(), &fixture.format);
        run(opened.volume.add(devices, &pool(), configs, |_| {}))
    };
    let mut with_absent = devices.clone();
    with_absent[1] = Rc::new(UnavailableDevice::new("gone".to_owned()));
    with_absent.extend(blank(1));
    assert_eq!(add(&fixture, &with_absent), Err(OpenError::OtherDeviceAbsent { index: 1 }));
    let alone = blank(2);
    run(AnyVolume::format(&alone[..1], &fixture.format)).expect("formats");
    assert_eq!(add(&fixture, &alone), Err(OpenError::NotExtendable));
    let opened = Opened::new(&fixture, &devices).expect("opens as before");
    assert_eq!(opened.listed(), Ok(KEYS as usize));
}

#[test]
fn power_loss_while_an_unfinished_addition_is_repeated_leaves_a_volume_that_opens() {
    for (engine, fixture) in fixtures() {
        let filled = filled(&fixture, 3);
        let images = filled.iter().map(contents_of).chain([vec![0; 16 << 20]]);
        let disks = PowerLossDisk::group(images.map(DiskImage::from).collect(), 512);
        let plan = FaultPlan::default();
        let mut devices: Devices = disks.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
        devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
        let mut random = Prng::new(7);
        let mut complete = || {
            disks[0].complete_one(&mut random);
        };
        let volume = block_on(fixture.open_volume(&devices[..3]), &mut complete).expect("opens");
        let (pool, configs) = (pool(), (&fixture.open_config(), &fixture.format));
        plan.add(
            FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5)).once(0),
        );
        let unfinished = block_on(volume.add(&devices, &pool, configs, |_| {}), &mut complete);
        assert_eq!(unfinished, Err(OpenError::AdditionUnfinished { index: 1 }), "{engine}");
        let begun = disks[0].events();
        block_on(volume.add(&devices, &pool, configs, |_| {}), &mut complete).expect("adds");
        let last = disks[0].events();
        // Few events of the format, and each around the writes of superblocks before and behind it.
        let format = (begun + 16..last - 32).step_by((last - begun) / 16);
        let moments = (begun..begun + 16).chain(format).chain(last - 32..=last);
        let mut absent = 0;
        for (events, mode) in moments.flat_map(|at| PowerLossMode::ALL.map(|mode| (at, mode))) {
            let image = |disk: &PowerLossDisk| {
                disk.image_after_power_loss(events, mode, &mut Prng::new(events as u64))
            };
            let left = PowerLossDisk::group(disks.iter().map(image).collect(), 512);
            let devices: Devices = left.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
            let mut complete = || {
                left[0].complete_one(&mut random);
            };
            // The first device has counted the new one.
            let volume = block_on(fixture.open_volume(&devices), &mut complete)
                .unwrap_or_else(|error| panic!("{engine}: {mode:?} at {events}: {error}"));
            let handle = volume.engine(0, &devices, pool.clone());
            for number in 0..KEYS {
                let read = block_on(handle.get(&key_of(number)), &mut complete);
                assert!(matches!(read, Ok(Some(_))), "{engine}: {mode:?} at {events}: key {number}");
            }
            absent += usize::from(volume.device_reports()[3].failure.is_some());
        }
        assert!(absent > 0, "{engine}: the new device was not absent at any moment of its format");
    }
}

/// Writes beside moves on disks that lose power.
struct History {
    disks: Vec<PowerLossDisk>,
    /// The events of the disks when the device had been added.
    added: usize,
    /// The events at which a map had changed.
    maps: Vec<usize>,
    /// Acknowledged operations: after how many events, of which key, and which.
    writes: Vec<(usize, usize, u64)>,
}

fn history_of(fixture: &SpannedFixture) -> History {
    let filled = filled(fixture, 3);
    let images = filled.iter().map(contents_of).chain([vec![0; 16 << 20]]);
    let disks = PowerLossDisk::group(images.map(DiskImage::from).collect(), 512);
    let devices: Devices = disks.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
    let (of_task, mut random) = (disks[0].clone(), Prng::new(7));
    let complete = Box::new(move || {
        of_task.complete_one(&mut random);
    });
    let mut growing = Growing::begin(fixture, &devices, complete);
    let added = disks[0].events();
    growing.extend(&devices);
    let (mut history, mut maps, mut moved) = (Vec::new(), Vec::new(), 0);
    while !growing.is_settled() {
        growing.write().expect("no fault");
        if growing.moved() != moved {
            moved = growing.moved();
            maps.push(disks[0].events());
        }
        let events = disks[0].events();
        for (number, &operation) in growing.model.iter().enumerate() {
            let last = history.iter().rev().find(|(_, of, _)| *of == number);
            if last.map_or(number as u64, |(_, _, operation)| *operation) != operation {
                history.push((events, number, operation));
            }
        }
        assert!(history.len() < 5_000, "{} partitions have moved", growing.moved());
    }
    History { disks, added, maps, writes: history }
}

#[test]
fn a_loss_of_power_at_any_moment_of_a_move_loses_nothing_acknowledged() {
    for (engine, fixture) in fixtures() {
        let History { disks, added, maps, writes: history } = history_of(&fixture);
        let last = disks[0].events();
        // Few moments of all, and each one before the map has changed first.
        let few = (0..40).map(|case| added + (last - added) * case / 39);
        let moments: Vec<usize> = few.chain(maps[0].saturating_sub(150).max(added)..maps[0]).collect();
        let (mut unmoved, mut moved) = (0, 0);
        let mut random = Prng::new(3);
        for (case, &events) in moments.iter().enumerate() {
            let mode = PowerLossMode::ALL[case % PowerLossMode::ALL.len()];
            let left = PowerLossDisk::group(
                disks
                    .iter()
                    .map(|disk| disk.image_after_power_loss(events, mode, &mut Prng::new(case as u64)))
                    .collect(),
                512,
            );
            let devices: Devices = left.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
            let mut complete = || {
                left[0].complete_one(&mut random);
            };
            let volume = block_on(fixture.open_volume(&devices), &mut complete)
                .unwrap_or_else(|error| panic!("{engine}: at {events}: {error}"));
            let handle = volume.engine(0, &devices, pool());
            let mut live = 0;
            for number in 0..KEYS {
                let key = key_of(number);
                let read = block_on(handle.get(&key), &mut complete).expect("no fault");
                let found = read.map_or(DELETED, |value| operation_of(&key, value.as_bytes()));
                live += usize::from(found != DELETED);
                let of_key = || history.iter().filter(|(_, of, _)| *of == number as usize);
                let acknowledged = of_key().rev().find(|(at, _, _)| *at <= events);
                let acknowledged = acknowledged.map_or(number, |(_, _, operation)| *operation);
                // The write that ran when the power was lost.
                let next = of_key().find(|(at, _, _)| *at > events).map(|(_, _, operation)| *operation);
                assert!(
                    found == acknowledged || Some(found) == next,
                    "{engine}: {mode:?} at {events}: key {number} has {found}, not {acknowledged} or {next:?}"
                );
            }
            let mut listed = 0;
            let mut sink = |_: &[u8]| {
                listed += 1;
                true
            };
            let start = Key::new(&[]).expect("the empty key");
            block_on(handle.list(&start, &mut sink), &mut complete).expect("no fault");
            assert_eq!(listed, live, "{engine}: at {events}");
            let AnyVolume::Spanned(spanned) = &volume else { panic!("it spans devices") };
            match spanned.placement().0.contains(&3) {
                true => moved += 1,
                false => unmoved += 1,
            }
        }
        assert!(unmoved > 5 && moved > 5, "{engine}: {unmoved} before a move, {moved} after one");
    }
}

#[test]
fn an_absent_device_does_not_undo_what_was_written_without_it_by_the_map_of_a_cut_move() {
    for (engine, fixture) in fixtures() {
        let History { disks, maps, .. } = history_of(&fixture);
        let (mut of_moved, mut random) = (0, Prng::new(3));
        for events in maps[0].saturating_sub(150)..maps[0] {
            let disks_after = || {
                let image = |disk: &PowerLossDisk| {
                    disk.image_after_power_loss(events, PowerLossMode::ALL[0], &mut Prng::new(1))
                };
                let left = PowerLossDisk::group(disks.iter().map(image).collect(), 512);
                let devices: Devices =
                    left.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
                (left[0].clone(), devices)
            };
            let (disk, devices) = disks_after();
            let with_all = block_on(fixture.open_volume(&devices), || {
                disk.complete_one(&mut random);
            });
            let AnyVolume::Spanned(with_all) = with_all.expect("opens") else { panic!("it spans devices") };
            let (moved, seed) = with_all.placement();
            let (disk, devices) = disks_after();
            let mut complete = || {
                disk.complete_one(&mut random);
            };
            let without = without_last(&devices);
            let volume = block_on(fixture.open_volume(&without), &mut complete).expect("the others open");
            let handle = volume.engine(0, &without, pool());
            let mut written = Vec::new();
            for number in 0..KEYS {
                let (key, operation) = (key_of(number), 1_000 * KEYS + number);
                let record = record_of(handle.record_layout(), &key, &value_of(&key, operation, 100));
                let is_written = match number % 3 {
                    0 => block_on(handle.delete(&key), &mut complete).is_ok(),
                    _ => block_on(handle.put(&key, PutMode::Upsert, record, 100), &mut complete).is_ok(),
                };
                if is_written {
                    written.push((key, Some(operation).filter(|_| number % 3 > 0)));
                }
            }
            block_on(handle.close(), &mut complete).expect("closes");
            drop(volume);
            let volume = block_on(fixture.open_volume(&devices), &mut complete).expect("opens");
            let handle = volume.engine(0, &devices, pool());
            if written.len() == KEYS as usize {
                let is_moved = |key: &Key| moved[usize::from(RingPosition::of(key, seed).0 as u8)] == 3;
                of_moved += written.iter().filter(|(key, _)| is_moved(key)).count();
            }
            for (key, operation) in written {
                let read = block_on(handle.get(&key), &mut complete).expect("no fault");
                let found = read.map(|value| operation_of(&key, value.as_bytes()));
                assert_eq!(found, operation, "{engine}: at {events}");
            }
        }
        assert!(of_moved > 0, "{engine}: no key was written that the map of the absent device has there");
    }
}

/// The devices, of which the last is absent.
fn without_last(devices: &Devices) -> Devices {
    let mut without = devices.clone();
    *without.last_mut().expect("it has some") = Rc::new(UnavailableDevice::new("gone".to_owned()));
    without
}

#[test]
fn a_device_that_missed_a_map_and_is_alone_for_a_time_does_not_undo_it() {
    for (engine, fixture) in fixtures() {
        let disks = filled(&fixture, 3);
        let plan = FaultPlan::default();
        let stale: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::clone(&disks[1]), plan.clone()));
        let devices: Devices = vec![Rc::clone(&disks[0]), stale, Rc::clone(&disks[2]), blank(1).remove(0)];
        let mut growing = grown(&fixture, &devices);
        // Its superblock is not written at the cutovers, and it serves on.
        plan.add(FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5)));
        let mut steps = 0;
        while growing.moved() == 0 {
            growing.step();
            steps += 1;
            assert!(steps < STEPS_MAX, "{engine}: nothing moves");
        }
        for _ in 0..KEYS {
            // A put to another device than that fails by a note of its superblock on volumes with swap regions.
            let _ = growing.write();
        }
        let model = growing.model.clone();
        drop(growing);
        plan.clear();
        for _ in 0..3 {
            let alone: Devices = (0..4)
                .map(|at| match at {
                    1 => Rc::clone(&devices[1]),
                    _ => Rc::new(UnavailableDevice::new("gone".to_owned())) as Rc<dyn Device>,
                })
                .collect();
            Opened::new(&fixture, &alone).expect("one is enough");
        }
        let opened = Opened::new(&fixture, &devices).expect("opens");
        for (number, &operation) in (0..).zip(&model) {
            let found = opened.found(number).expect("no fault");
            assert_eq!(found.unwrap_or(DELETED), operation, "{engine}: key {number}");
        }
    }
}

#[test]
fn the_device_of_an_addition_that_another_took_over_is_out_of_date() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let mut devices = filled(&fixture, 3);
    let plan = FaultPlan::default();
    devices[1] = Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone()));
    let opened = Opened::new(&fixture, &devices).expect("opens");
    let (configs, new) = ((&fixture.open_config(), &fixture.format), blank(2));
    let with = |at: usize| -> Devices { devices.iter().chain([&new[at]]).cloned().collect() };
    let add = |at: usize| run(opened.volume.add(&with(at), &pool(), configs, |_| {}));
    plan.add(FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, InjectedFault::Error(5)).once(0));
    assert_eq!(add(0), Err(OpenError::AdditionUnfinished { index: 1 }));
    assert_eq!(add(1), Ok(()));
    let failure = |at: usize| {
        let opened = Opened::new(&fixture, &with(at)).expect("opens");
        assert_eq!((0..KEYS).filter(|number| opened.found(*number).is_ok()).count() as u64, KEYS);
        opened.volume.device_reports()[3].failure
    };
    assert_eq!(failure(0), Some(OpenError::DeviceReplaced { at: 3 }));
    assert_eq!(failure(1), None);
}

#[test]
fn partitions_do_not_move_before_a_put_has_ended_whose_caller_is_gone() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let plan = FaultPlan::default();
        let with_faults =
            |device: Rc<dyn Device>| -> Rc<dyn Device> { Rc::new(FaultDevice::new(device, plan.clone())) };
        let mut devices: Devices = filled(&fixture, 3).into_iter().map(with_faults).collect();
        devices.extend(blank(1));
        let mut growing = Growing::begin(&fixture, &devices, Box::new(|| {}));
        let (key, engine_of_put) = (key_of(0), Rc::clone(&growing.engines[0]));
        plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Hang).once(0));
        let record = record_of(engine_of_put.record_layout(), &key, &value_of(&key, KEYS, 100));
        let put = engine_of_put.put(&key, PutMode::Upsert, record, 100).now_or_never();
        assert!(put.is_none(), "{engine}: it has ended");
        drop(engine_of_put);
        growing.extend(&devices);
        for _ in 0..2_000 {
            growing.step();
        }
        assert_eq!(growing.moved(), 0, "{engine}");
    }
}
