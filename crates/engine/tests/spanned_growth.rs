//! A device is added to a volume on several, and partitions move to it while it is used: contents at each moment, after each loss of power, and with a device that fails.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use octokv_base::{Buffer, Key, Lba, Nanos, Prng};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::{TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyEngine, AnyVolume, DeleteOutcome, Engine, EngineError, EngineKind, KeySink, MoveStage, OpenError,
    PutMode, PutOutcome, SpannedVolume, VerifyObserver, Volume,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::Cell;
use std::rc::Rc;

/// Partitions on the last of four equal devices.
const BALANCED: usize = 64;
/// Steps of a millisecond after which a volume is balanced and has no key left over.
const STEPS_MAX: u64 = 60_000;

/// Two cores' handles on a volume, with their maintenance in simulated time.
struct Growing {
    volume: AnyVolume,
    engines: Vec<Rc<AnyEngine>>,
    handle: ReactorHandle,
    tasks: TaskSet,
    now: Nanos,
    random: Prng,
    /// Completes an operation of a device, if it does not do so itself.
    complete: Box<dyn FnMut()>,
    /// For each key the last operation, 0 if it was deleted.
    model: Vec<u64>,
    operations: u64,
}

impl Growing {
    /// A volume that was opened with a device less than these, which is added.
    fn begin(fixture: &SpannedFixture, devices: &Devices, complete: Box<dyn FnMut()>) -> Growing {
        let mut growing = Growing::open(fixture, devices, complete);
        growing.add(fixture, devices);
        growing
    }

    /// A volume that is opened with a device less than these.
    fn open(fixture: &SpannedFixture, devices: &Devices, mut complete: Box<dyn FnMut()>) -> Growing {
        let old = &devices[..devices.len() - 1];
        let volume = block_on(fixture.open_volume(old), &mut complete).expect("opens");
        let engines: Vec<_> = (0..2).map(|core| Rc::new(volume.engine(core, old, pool()))).collect();
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let queue = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), queue, CpuTime::simulated());
        let (mut tasks, now) = (TaskSet::default(), Nanos::from_secs(1));
        handle.begin_iteration(now);
        for engine in &engines {
            let (of_task, own) = (Rc::clone(engine), handle.clone());
            tasks.add(async move { of_task.maintain(&own, |_| ()).await });
            let of_task = Rc::clone(engine);
            tasks.add(async move { of_task.run_abandoned().await });
        }
        let model = (0..KEYS).collect();
        let random = Prng::new(5);
        Growing { volume, engines, handle, tasks, now, random, complete, model, operations: KEYS }
    }

    /// Adds the last of the devices.
    fn add(&mut self, fixture: &SpannedFixture, devices: &Devices) {
        let (pool, configs) = (pool(), (&fixture.open_config(), &fixture.format));
        block_on(self.volume.add(devices, &pool, configs, |_| {}), &mut self.complete).expect("adds");
    }

    /// Gives the handles the new device.
    fn extend(&mut self, devices: &Devices) {
        let device = devices.last().expect("the new one");
        for (core, engine) in self.engines.iter().enumerate() {
            self.volume.extend_engine(engine, (core, device, &pool()));
        }
    }

    fn step(&mut self) {
        self.handle.begin_iteration(self.now);
        while self.tasks.step(&mut self.random) {}
        for _ in 0..8 {
            (self.complete)();
        }
        self.now = self.now + Nanos::from_millis(1);
    }

    /// Runs an operation on a core's handle to its end, beside everything else.
    fn end<T>(&mut self, operation: impl AsyncFnOnce(Rc<AnyEngine>) -> T) -> T {
        let core = self.random.below(2) as usize;
        let engine = Rc::clone(&self.engines[core]);
        let begun = self.now;
        block_on(operation(engine), || {
            assert!(self.now < begun + Nanos::from_secs(60), "an operation waits for ever");
            self.step();
        })
    }

    /// Stores or deletes a random key.
    fn write(&mut self) -> Result<(), EngineError> {
        let number = self.random.below(KEYS);
        self.operations += KEYS;
        let (key, operation) = (key_of(number), self.operations / KEYS * KEYS + number);
        if self.random.below(4) == 0 {
            let deleted = self.end(async |engine| engine.delete(&key).await)?;
            assert_eq!(deleted == DeleteOutcome::Deleted, self.model[number as usize] != DELETED, "{number}");
            self.model[number as usize] = DELETED;
        } else {
            let put = self.end(async |engine| {
                let bytes = 100 + operation as usize % 700;
                let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
                engine.put(&key, PutMode::Upsert, record, bytes).await
            })?;
            assert_eq!(put, PutOutcome::Stored);
            self.model[number as usize] = operation;
        }
        Ok(())
    }

    /// Reads a key, which has the value of the model.
    fn check(&mut self, number: u64) {
        let key = key_of(number);
        let read = self.end(async |engine| engine.get(&key).await).expect("no fault");
        let found = read.map_or(DELETED, |value| operation_of(&key, value.as_bytes()));
        assert_eq!(found, self.model[number as usize], "key {number}");
    }

    fn listed(&mut self) -> usize {
        let mut count = 0;
        self.end(async |engine| {
            let mut sink = |_: &[u8]| {
                count += 1;
                true
            };
            engine.list(&Key::new(&[]).expect("the empty key"), &mut sink).await
        })
        .expect("no fault");
        count
    }

    fn live(&self) -> usize {
        self.model.iter().filter(|&&operation| operation != DELETED).count()
    }

    fn spanned(&self) -> SpannedVolume<AnyVolume> {
        let AnyVolume::Spanned(volume) = &self.volume else { panic!("it spans devices") };
        volume.clone()
    }

    /// The partitions of the device that was added.
    fn moved(&self) -> usize {
        let last = self.spanned().members().count() as u8 - 1;
        self.spanned().placement().0.iter().filter(|&&device| device == last).count()
    }

    fn is_settled(&self) -> bool {
        self.moved() == BALANCED && !self.spanned().is_rebalancing()
    }

    fn settle(&mut self) {
        let mut steps = 0;
        while !self.is_settled() {
            self.step();
            steps += 1;
            assert!(steps < STEPS_MAX, "{} partitions have moved", self.moved());
        }
    }

    fn close(self) {
        drop(self.tasks);
        let mut complete = self.complete;
        for engine in self.engines {
            let engine = Rc::into_inner(engine).expect("its tasks have ended");
            block_on(engine.close(), &mut complete).expect("closes");
        }
    }
}

/// The operation of a key that is not there.
const DELETED: u64 = u64::MAX;

struct Quiet;
impl VerifyObserver for Quiet {
    fn keys_verified(&mut self, _: u64, _: u64) {}
}

/// A volume whose handles have the device that was added.
fn grown(fixture: &SpannedFixture, devices: &Devices) -> Growing {
    let mut growing = Growing::begin(fixture, devices, Box::new(|| {}));
    growing.extend(devices);
    growing
}

#[test]
fn partitions_move_to_an_added_device_while_all_keys_are_read_and_written() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
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
        (0..KEYS).for_each(|number| growing.check(number));
        let (model, live) = (growing.model.clone(), growing.live());
        growing.close();
        // Nothing is left over where it was.
        let report = run(AnyVolume::verify(&devices, &pool(), &mut Quiet)).expect("is intact");
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
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
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
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
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
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
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
    let swapping = SpannedFixture::swapping(EngineKind::Hash);
    let mut of_swapping = filled(&swapping, 2);
    of_swapping.extend(blank(1));
    assert_eq!(add(&swapping, &of_swapping), Err(OpenError::SpanSwaps));
    let opened = Opened::new(&fixture, &devices).expect("opens as before");
    assert_eq!(opened.listed(), Ok(KEYS as usize));
}

fn contents_of(device: &Rc<dyn Device>) -> Vec<u8> {
    let blocks = (1 << 20) / 512;
    let read = |at| run(device.read(Lba(at), Buffer::zeroed(1 << 20))).into_read().expect("memory");
    (0..device.geometry().blocks).step_by(blocks).flat_map(|at| read(at).to_vec()).collect()
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
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
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
