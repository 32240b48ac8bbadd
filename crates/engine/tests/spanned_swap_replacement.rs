//! Replacement of a device of a volume with swap regions: what its region had, what the regions of others have of its keys, and power loss.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, SUPERBLOCKS_END, blank, contents_of};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use crate::common::swapped_volume::{ENGINES, damage, is_unavailable, keys_at, swapped, used_region_blocks};
use futures_util::future::join;
use octokv_base::{Key, Lba, Prng};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyEngine, AnyVolume, DeviceReport, Engine, EngineError, OpenError, PutMode, PutOutcome, Volume,
};
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

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

/// A volume on disks after a loss of power.
struct AfterLoss {
    disk: PowerLossDisk,
    random: RefCell<Prng>,
    volume: AnyVolume,
    engine: AnyEngine,
}

impl AfterLoss {
    fn open(fixture: &SpannedFixture, images: Vec<DiskImage>) -> Result<AfterLoss, String> {
        let disks = PowerLossDisk::group(images, 512);
        let devices: Devices = disks.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
        let (disk, mut random) = (disks[0].clone(), Prng::new(1));
        let volume = block_on(fixture.open_volume(&devices), || {
            disk.complete_one(&mut random);
        })?;
        let engine = volume.engine(0, &devices, pool());
        Ok(AfterLoss { disk, random: RefCell::new(random), volume, engine })
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || {
            self.disk.complete_one(&mut self.random.borrow_mut());
        })
    }

    /// Which put stored the value of each key, if it is found. Without those that answer that the first device is not available.
    fn found(&self) -> BTreeMap<u64, Option<u64>> {
        let found = |number| {
            let key = key_of(number);
            let value = self.run(self.engine.get(&key));
            match value {
                Ok(value) => {
                    let put = value.map(|value| operation_of(&key, value.as_bytes()) / KEYS);
                    Some((number, put))
                }
                Err(error) => {
                    assert!(is_unavailable(&error, 0), "{error}");
                    None
                }
            }
        };
        (0..KEYS).filter_map(found).collect()
    }

    fn listed(&self) -> usize {
        let mut count = 0;
        let mut sink = |_: &[u8]| {
            count += 1;
            true
        };
        self.run(self.engine.list(&Key::new(&[]).expect("the empty key"), &mut sink)).expect("lists");
        count
    }

    fn is_first_absent(&self) -> bool {
        let is_replaced =
            |report: &DeviceReport| matches!(report.failure, Some(OpenError::DeviceReplaced { .. }));
        self.volume.device_reports().iter().any(is_replaced)
    }
}

#[test]
fn a_loss_of_power_within_a_replacement_keeps_every_acknowledged_value_and_lists_it() {
    for kind in ENGINES {
        let fixture = SpannedFixture::swapping(kind);
        // The first device has the newest values of the others' keys.
        let of_lost = keys_at(kind, 0);
        let (devices, opened) = swapped(&fixture);
        run(opened.engine.close()).expect("closes");
        drop(opened);
        let images: Vec<DiskImage> =
            devices.iter().chain(&blank(1)).map(contents_of).map(DiskImage::from).collect();
        let disks = PowerLossDisk::group(images, 512);
        let on: Devices = disks.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
        let (mut order, mut random) = (Prng::new(7), Prng::new(8));
        let mut complete = || {
            disks[0].complete_one(&mut order);
        };
        let volume = block_on(fixture.open_volume(&on[..3]), &mut complete).expect("opens");
        let engine = volume.engine(0, &on[..3], pool());
        let (begun, is_over) = (disks[0].events(), Cell::new(false));
        let new: Devices = vec![Rc::clone(&on[3]), Rc::clone(&on[1]), Rc::clone(&on[2])];
        let replace = async {
            let configs = (&fixture.open_config(), &fixture.format);
            volume.replace((&new, 0, true), &pool(), configs, |_| {}).await.expect("replaces");
            is_over.set(true);
        };
        // Third puts, beside it, and when they were acknowledged.
        let (stored, refused_from) = (RefCell::new(BTreeMap::new()), Cell::new(usize::MAX));
        let put = async {
            while !is_over.get() {
                let number = random.below(KEYS);
                // It is a long replacement, and there are few keys.
                let mut polls = random.below(12);
                poll_fn(|_| {
                    polls = polls.saturating_sub(1);
                    if polls == 0 || is_over.get() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                if stored.borrow().contains_key(&number) {
                    continue;
                }
                let key = key_of(number);
                let record = record_of(engine.record_layout(), &key, &value_of(&key, 2 * KEYS + number, 100));
                match engine.put(&key, PutMode::Upsert, record, 100).await {
                    Ok(outcome) => {
                        assert_eq!(outcome, PutOutcome::Stored);
                        stored.borrow_mut().insert(number, disks[0].events());
                    }
                    Err(error) => {
                        assert!(is_unavailable(&error, 0), "{error}");
                        refused_from.set(refused_from.get().min(disks[0].events()));
                    }
                }
            }
        };
        block_on(join(replace, put), &mut complete);
        let (stored, refused_from, last) = (stored.into_inner(), refused_from.get(), disks[0].events());
        let (mut history, mut as_before, mut between, mut replaced) = (DiskHistory::of(&disks[0]), 0, 0, 0);
        for events in (begun..=last).step_by((last - begun) / 150 + 1) {
            history.advance(events);
            let mode = PowerLossMode::ALL[random.below(4) as usize];
            let mut left = history.images(mode, &mut random);
            let of_new = left.pop().expect("four");
            let context = format!("{kind}: power loss at {events} of {begun}..{last}, {mode:?}");
            let old = AfterLoss::open(&fixture, left.clone()).expect("the others open");
            left[0] = of_new;
            let is_counted = old.is_first_absent();
            let mut is_between = false;
            let after = match (is_counted, AfterLoss::open(&fixture, left)) {
                (false, Err(_)) => {
                    as_before += 1;
                    old
                }
                (true, Ok(new)) => {
                    replaced += 1;
                    new
                }
                (true, Err(_)) => {
                    (between, is_between) = (between + 1, true);
                    old
                }
                (false, Ok(_)) => panic!("{context}: both are of the volume"),
            };
            let found = after.found();
            assert!(is_between || found.len() == KEYS as usize, "{context}: all devices are there");
            for (number, put) in found {
                let stored_at = stored.get(&number).filter(|&&at| at <= events);
                // What was stored since the first refusal is not in the region of the device that is given up.
                let is_safe = stored_at.is_some_and(|&at| at >= refused_from) && !of_lost.contains(&number);
                match is_counted {
                    false => assert!(
                        put >= Some(if stored_at.is_some() { 2 } else { 1 }),
                        "{context}: {number} {put:?}"
                    ),
                    true if is_safe => assert_eq!(put, Some(2), "{context}: {number}"),
                    true => assert_ne!(put, Some(0), "{context}: {number}"),
                }
            }
            if !is_counted {
                assert_eq!(after.listed(), KEYS as usize, "{context}");
            }
        }
        assert!(
            as_before > 20 && replaced > 0 && stored.values().filter(|&&at| at >= refused_from).count() > 3,
            "{kind}: {as_before} as before, {between} between, {replaced} replaced, {} stored, {begun}..{last}",
            stored.len()
        );
    }
}

#[test]
fn a_damaged_region_of_a_device_that_is_adopted_gives_no_older_value() {
    for kind in ENGINES {
        let fixture = SpannedFixture::swapping(kind);
        let configs = (&fixture.open_config(), &fixture.format);
        let replace = |opened: &Opened, devices: &Devices| {
            run(opened.volume.replace((devices, 0, true), &pool(), configs, |_| {}))?;
            opened.volume.renew_engine(&opened.engine, 0, (0, &devices[0], &pool()));
            Ok::<(), OpenError>(())
        };
        let (old, opened) = swapped(&fixture);
        let new: Devices = vec![blank(1).remove(0), Rc::clone(&old[1]), Rc::clone(&old[2])];
        replace(&opened, &new).expect("replaces");
        for (put, number) in (2..4).flat_map(|put| (0..KEYS).map(move |number| (put, number))) {
            assert_eq!(opened.put(number, put * KEYS + number), Ok(PutOutcome::Stored));
        }
        run(opened.engine.close()).expect("closes");
        let (mut served, mut refused) = (0, 0);
        for block in used_region_blocks(&new[0], &fixture) {
            let intact = damage(&new[0], block);
            // The node does not know the new device yet.
            let opened = Opened::new(&fixture, &old).expect("the others open");
            if replace(&opened, &new).is_ok() {
                for number in 0..KEYS {
                    match opened.found(number) {
                        Ok(found) => {
                            assert_eq!(found, Some(3 * KEYS + number), "{kind}: damaged block {block}");
                            served += 1;
                        }
                        Err(EngineError::Corrupt { .. }) => refused += 1,
                        Err(error) => {
                            assert!(is_unavailable(&error, 0), "{kind}: {error}");
                            refused += 1;
                        }
                    }
                }
            }
            drop(opened);
            run(new[0].write(Lba(block), intact)).result.expect("memory");
        }
        assert!(refused > 50 && served > 500, "{kind}: {refused} refused, {served} served");
    }
}

#[test]
fn after_a_replacement_that_was_recorded_in_part_the_lost_device_takes_no_puts_of_others() {
    // The writes of superblocks, two for each device, of which the last fails: the second of the first device, the first of the third.
    for (kind, written) in ENGINES.into_iter().flat_map(|kind| [(kind, 1), (kind, 2)]) {
        let fixture = SpannedFixture::swapping(kind);
        let (mut devices, opened) = swapped(&fixture);
        run(opened.engine.close()).expect("closes");
        let plan = FaultPlan::default();
        for at in [0, 2] {
            devices[at] = Rc::new(FaultDevice::new(Rc::clone(&devices[at]), plan.clone()));
        }
        let opened = Opened::new(&fixture, &devices).expect("opens");
        let mut new = devices.clone();
        new[1] = blank(1).remove(0);
        let configs = (&fixture.open_config(), &fixture.format);
        let replace_with = |filter: OpFilter, skip: u32| {
            let fault = InjectedFault::Error(5);
            plan.add(FaultRule { skip, ..FaultRule::within(filter, Lba(0), SUPERBLOCKS_END, fault) });
            let replaced = run(opened.volume.replace((&new, 1, true), &pool(), configs, |_| {}));
            plan.clear();
            (replaced, opened.volume.device_reports()[1].failure)
        };
        // Without a device that could count it nothing changes.
        assert_eq!(replace_with(OpFilter::Read, 0), (Err(OpenError::NotCounted), None), "{kind}");
        let (replaced, after_count) = replace_with(OpFilter::Write, written);
        assert!(matches!(replaced, Err(OpenError::Device(_))), "{kind}: {replaced:?}");
        // A further one that fails earlier does not let the lost device serve again.
        let (replaced, after_another) = replace_with(OpFilter::Read, 0);
        assert_eq!(replaced, Err(OpenError::NotCounted), "{kind}");
        let stored: Vec<_> =
            (0..KEYS).filter(|number| opened.put(*number, 2 * KEYS + number).is_ok()).collect();
        assert!(stored.len() > 30, "{kind}: {} keys are stored", stored.len());
        drop(opened);
        let again = Opened::new(&fixture, &devices).expect("the others open");
        for number in stored {
            assert_eq!(again.found(number), Ok(Some(2 * KEYS + number)), "{kind}: key {number}");
        }
        let given_up = Some(OpenError::DeviceGivenUp { at: 1 });
        assert_eq!((after_count, after_another), (given_up, given_up), "{kind}");
        assert_eq!(
            again.volume.device_reports()[1].failure,
            Some(OpenError::DeviceReplaced { at: 1 }),
            "{kind}"
        );
        run(again.volume.replace((&new, 1, true), &pool(), configs, |_| {})).expect("replaces");
        again.volume.renew_engine(&again.engine, 1, (0, &new[1], &pool()));
        assert!((0..KEYS).all(|number| again.put(number, 3 * KEYS + number).is_ok()), "{kind}");
    }
}
