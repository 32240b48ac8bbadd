//! The hash engine through power cuts at every write and flush, and through rot and misdirected writes.

mod common;

use common::Hash;
use octokv_base::{Key, Lba, Random};
use octokv_device::fault_injection::{Fault as DeviceFault, FaultDevice, On, Plan, Rule};
use octokv_device::power_loss::{Cut, History, PowerDisk};
use octokv_device::{Device, Geometry, Memory, MemoryDevice, Pending};
use octokv_engine::conformance::{Crowd, Subject, key_of, operation_of, record_of, some_length, value_of};
use octokv_engine::hash::{HashEngine, superblock};
use octokv_engine::{Engine, Fault, Put, PutMode};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

const KEYS: u64 = 24;
const DISK_BYTES: usize = 1 << 20;

/// A write or delete: when it began and was acknowledged, by the test's clock and by the disk's events.
struct Call {
    key: Key,
    /// `None` deletes.
    stores: Option<u64>,
    began: (u64, usize),
    acknowledged: Option<(u64, usize)>,
}

#[derive(Default)]
struct Trace {
    clock: u64,
    calls: Vec<Call>,
}

impl Trace {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// What may be found under each key after a cut at `events`: the values of writes that had begun, less
    /// those that a later acknowledged write surely replaced.
    fn allowed(&self, key: &Key, events: usize) -> Vec<Option<u64>> {
        let begun = self.calls.iter().filter(|call| call.key == *key && call.began.1 <= events);
        let begun: Vec<&Call> = begun.collect();
        let acknowledged = |call: &&&Call| call.acknowledged.is_some_and(|(_, at)| at <= events);
        let surely_replaced = |at: u64| begun.iter().filter(acknowledged).any(|call| call.began.0 > at);
        let mut allowed = Vec::new();
        if !surely_replaced(0) {
            allowed.push(None);
        }
        for call in &begun {
            let ended = call.acknowledged.filter(|(_, at)| *at <= events);
            if ended.is_none_or(|(at, _)| !surely_replaced(at)) {
                allowed.push(call.stores);
            }
        }
        allowed
    }
}

fn subject() -> Hash {
    let mut subject = Hash::default();
    subject.format.unit_bytes = 512;
    subject.format.value_bytes_max = 64 << 10;
    subject
}

fn open(image: Vec<u8>) -> Result<(PowerDisk, HashEngine), String> {
    let disk = PowerDisk::new(image, 512);
    let mut random = Random::new(1);
    let engine = block_on(subject().open(Rc::new(disk.clone())), || {
        disk.complete(&mut random);
    })?;
    Ok((disk, engine))
}

async fn one_call(
    engine: Rc<HashEngine>,
    trace: Rc<RefCell<Trace>>,
    disk: PowerDisk,
    operation: u64,
    random: RefCell<Random>,
) {
    let key = key_of(random.borrow_mut().below(KEYS));
    let stores = (!random.borrow_mut().one_in(4)).then_some(operation);
    let id = {
        let mut trace = trace.borrow_mut();
        let began = (trace.tick(), disk.events());
        trace.calls.push(Call { key: key.clone(), stores, began, acknowledged: None });
        trace.calls.len() - 1
    };
    match stores {
        Some(operation) => {
            let length = some_length(&mut random.borrow_mut(), 5_000);
            let value = value_of(&key, operation, length);
            let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), length).await;
            assert_eq!(put, Ok(Put::Stored));
        }
        None => drop(engine.delete(&key).await.expect("no fault")),
    }
    let mut trace = trace.borrow_mut();
    let at = (trace.tick(), disk.events());
    trace.calls[id].acknowledged = Some(at);
}

/// Runs `operations` puts and deletes, up to six at once, on a fresh volume.
fn traced(seed: u64, operations: u64) -> (PowerDisk, Trace) {
    let mut random = Random::new(seed);
    let disk = PowerDisk::new(vec![0; DISK_BYTES], 512);
    let mut settle = || {
        disk.complete(&mut random);
    };
    block_on(subject().format(Rc::new(disk.clone())), &mut settle);
    let (disk, engine) = open(disk.contents()).expect("opens");
    let engine = Rc::new(engine);
    let trace = Rc::new(RefCell::new(Trace::default()));
    let mut crowd = Crowd::default();
    for operation in 1..=operations {
        let random_of_call = RefCell::new(random.fork());
        crowd.add(one_call(Rc::clone(&engine), Rc::clone(&trace), disk.clone(), operation, random_of_call));
        if random.one_in(50) {
            let engine = Rc::clone(&engine);
            crowd.add(async move { engine.checkpoint(false).await.expect("no fault") });
        }
        while crowd.len() >= 6 {
            if random.one_in(2) || !crowd.step(&mut random) {
                disk.complete(&mut random);
            }
        }
    }
    crowd.run(&mut random, |random| disk.complete(random));
    assert!(operations < 300 || engine.statistics().checkpoints > 1);
    // As an idle volume does: what follows tells rot from a write that a crash cut short.
    let mut settle = || {
        disk.complete(&mut random);
    };
    block_on(engine.mark(), &mut settle).expect("marks");
    drop((crowd, engine));
    (disk, Rc::try_unwrap(trace).ok().expect("all calls are over").into_inner())
}

/// Every key holds something that it may hold after a cut at `events`.
fn promises_hold(disk: &PowerDisk, engine: &HashEngine, trace: &Trace, events: usize, context: &str) {
    let mut random = Random::new(2);
    for index in 0..KEYS {
        let key = key_of(index);
        let found = block_on(engine.get(&key), || {
            disk.complete(&mut random);
        });
        let found = found.unwrap_or_else(|fault| panic!("{context}: {key}: {fault}"));
        let found = found.map(|value| operation_of(&key, value.as_bytes()));
        let allowed = trace.allowed(&key, events);
        assert!(allowed.contains(&found), "{context}: {key} holds {found:?}, of {allowed:?}");
    }
}

#[test]
fn every_promise_holds_after_a_power_cut_at_every_write_and_flush() {
    let (disk, trace) = traced(7, 2_000);
    let (mut history, mut random) = (History::of(&disk), Random::new(3));
    let total = disk.events();
    assert!(total > 6_000, "{total} events");
    for events in 0..=total {
        history.advance(events);
        // Before the first write the volume is there already: `traced` formatted it.
        for cut in Cut::ALL {
            let context = format!("cut at {events} of {total}, {cut:?}");
            let image = history.image(cut, &mut random);
            let (after, engine) = open(image).unwrap_or_else(|error| panic!("{context}: {error}"));
            promises_hold(&after, &engine, &trace, events, &context);
        }
    }
}

#[test]
fn a_second_power_cut_during_recovery_loses_nothing_either() {
    let (disk, trace) = traced(8, 400);
    let (mut history, mut random) = (History::of(&disk), Random::new(4));
    for events in (0..=disk.events()).step_by(7) {
        history.advance(events);
        let first = Cut::ALL[random.below(4) as usize];
        let image = history.image(first, &mut random);
        let (recovering, _engine) = open(image).expect("opens");
        for again in 0..=recovering.events() {
            let second = Cut::ALL[random.below(4) as usize];
            let context = format!("cut at {events}, {first:?}, then at {again} of recovery, {second:?}");
            let image = recovering.cut(again, second, &mut random);
            let (after, engine) = open(image).unwrap_or_else(|error| panic!("{context}: {error}"));
            promises_hold(&after, &engine, &trace, events, &context);
        }
    }
}

/// The bytes of a copy of the journal in an image.
fn journal_of(image: &[u8], copy: u64) -> std::ops::Range<usize> {
    let superblocks = image.chunks(4096).take(4).filter_map(|block| {
        superblock::Unchecked(block[..superblock::SUPERBLOCK_BYTES].try_into().unwrap()).check().ok()
    });
    let newest = superblocks.max_by_key(|superblock| superblock.generation).expect("a volume");
    let unit = newest.unit_bytes as usize;
    let first = newest.journal_first(copy) as usize * unit;
    first..first + newest.journal_units as usize * unit
}

#[test]
fn after_a_power_cut_and_more_writes_one_copy_of_the_journal_is_enough() {
    let (disk, trace) = traced(10, 290);
    let (mut history, mut random) = (History::of(&disk), Random::new(6));
    for events in (0..=disk.events()).step_by(5) {
        history.advance(events);
        for cut in Cut::ALL {
            let context = format!("cut at {events}, {cut:?}");
            let (recovered, engine) = open(history.image(cut, &mut random)).expect("opens");
            // New batches call those durable that were read.
            for operation in 1..=3 {
                let key = key_of(KEYS + operation);
                let value = value_of(&key, operation, 100);
                let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100);
                let stored = block_on(put, || {
                    recovered.complete(&mut random);
                });
                assert_eq!(stored, Ok(Put::Stored), "{context}");
            }
            for copy in 0..2 {
                let mut image = recovered.contents();
                let journal = journal_of(&image, copy);
                image[journal].fill(0);
                let context = format!("{context}, without copy {copy}");
                let (after, engine) = open(image).unwrap_or_else(|error| panic!("{context}: {error}"));
                promises_hold(&after, &engine, &trace, events, &context);
            }
        }
    }
}

/// What the keys of an image hold, or the fault of each.
fn read_all(disk: &PowerDisk, engine: &HashEngine) -> BTreeMap<Key, Result<Option<u64>, Fault>> {
    let mut random = Random::new(5);
    let mut read = |key: &Key| {
        let found = block_on(engine.get(key), || {
            disk.complete(&mut random);
        });
        found.map(|value| value.map(|value| operation_of(key, value.as_bytes())))
    };
    (0..KEYS).map(key_of).map(|key| (key.clone(), read(&key))).collect()
}

#[test]
fn a_rotten_bit_in_any_block_never_gives_a_wrong_byte_and_spares_the_other_keys() {
    let (disk, _) = traced(9, 300);
    let image = disk.contents();
    let (reference_disk, engine) = open(image.clone()).expect("opens");
    let good = read_all(&reference_disk, &engine);
    let (mut random, mut named) = (Random::new(6), 0);
    for block in 0..image.len() / 512 {
        let mut rotten = image.clone();
        rotten[block * 512 + random.below(512) as usize] ^= 1 << random.below(8);
        let (disk, engine) = open(rotten).unwrap_or_else(|error| panic!("block {block}: {error}"));
        let found = read_all(&disk, &engine);
        let faults: Vec<&Key> =
            found.iter().filter(|(key, read)| *read != &good[*key]).map(|(key, _)| key).collect();
        assert!(faults.len() <= 1, "block {block} hurt {faults:?}");
        for key in faults {
            let Err(Fault::Corrupt { lba }) = found[key] else { panic!("block {block}: {:?}", found[key]) };
            assert!(
                lba as usize <= block && block < lba as usize + 12,
                "block {block} is not of block {lba}"
            );
            named += 1;
        }
    }
    assert!(named > 20, "only {named} blocks held anything");
}

/// A device beside another, so that a fault plan can wrap a disk whose power can be cut.
struct Shared(Rc<dyn Device>);

impl Device for Shared {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn name(&self) -> &str {
        self.0.name()
    }
    fn read(&self, at: Lba, buffer: octokv_base::Buffer) -> Pending {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: octokv_base::Buffer) -> Pending {
        self.0.write(at, buffer)
    }
    fn flush(&self) -> Pending {
        self.0.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.0.trim(at, blocks)
    }
}

/// A volume on a faulty disk, and what was acknowledged last for each key.
fn stored_under(plan: &Plan, image: Vec<u8>, random: &mut Random) -> (Vec<u8>, BTreeMap<Key, Option<u64>>) {
    let disk = PowerDisk::new(image, 512);
    let device: Rc<dyn Device> =
        Rc::new(FaultDevice::new(Rc::new(Shared(Rc::new(disk.clone()))), plan.clone()));
    let mut completing = random.fork();
    let mut settle = || {
        disk.complete(&mut completing);
    };
    let engine = block_on(subject().open(device), &mut settle).expect("opens");
    let mut stored = BTreeMap::new();
    for operation in 1..=60 {
        let key = key_of(random.below(KEYS));
        let length = some_length(random, 3_000);
        let value = value_of(&key, operation, length);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), length);
        if block_on(put, &mut settle) == Ok(Put::Stored) {
            stored.insert(key, Some(operation));
        }
    }
    block_on(engine.mark(), &mut settle).expect("marks");
    (disk.contents(), stored)
}

#[test]
fn a_write_that_lands_elsewhere_or_nowhere_never_gives_a_wrong_byte() {
    let mut random = Random::new(10);
    let fresh = PowerDisk::new(vec![0; DISK_BYTES], 512);
    let mut settling = random.fork();
    block_on(subject().format(Rc::new(fresh.clone())), || {
        fresh.complete(&mut settling);
    });
    let (fresh, mut hurt) = (fresh.contents(), 0);
    for strike in 4..184 {
        let to = Lba(random.below((DISK_BYTES / 512 - 12) as u64));
        let fault = if strike % 3 == 0 { DeviceFault::Lost } else { DeviceFault::Misdirected { to } };
        let plan = Plan::default();
        plan.add(Rule::always(On::Write, fault).once(strike));
        let (image, stored) = stored_under(&plan, fresh.clone(), &mut random);
        let (disk, engine) = open(image).unwrap_or_else(|error| panic!("write {strike} {fault:?}: {error}"));
        let found = read_all(&disk, &engine);
        let mut faults = 0;
        for (key, read) in &found {
            match read {
                Ok(found) => {
                    let want = stored.get(key).copied().flatten();
                    assert_eq!(*found, want, "write {strike} {fault:?}: {key}");
                }
                Err(Fault::Corrupt { .. }) => faults += 1,
                Err(other) => panic!("write {strike} {fault:?}: {key}: {other}"),
            }
        }
        // The record itself, and those that the misplaced blocks fell on.
        assert!(faults <= 8, "write {strike} {fault:?} hurt {faults} keys");
        hurt += faults;
    }
    assert!(hurt > 10, "the faults reached only {hurt} keys");
}

#[test]
fn a_failed_write_is_reported_and_the_value_before_stays() {
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(Memory::new(4 << 20, 512).unwrap()));
    let plan = Plan::default();
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
    let engine = block_on(subject().open(device), || ()).expect("opens");
    let key = Key::new(b"key").unwrap();
    let put = |operation| {
        let value = value_of(&key, operation, 100);
        block_on(engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100), || ())
    };
    assert_eq!(put(1), Ok(Put::Stored));
    let used = engine.statistics().used_bytes;
    for fault in [DeviceFault::Error(5), DeviceFault::NoSpace] {
        plan.add(Rule::always(On::Write, fault));
        assert!(matches!(put(2), Err(Fault::Device(_))));
        plan.clear();
    }
    let found = block_on(engine.get(&key), || ()).unwrap().unwrap();
    assert_eq!(operation_of(&key, found.as_bytes()), 1);
    assert_eq!(engine.statistics().used_bytes, used);
    // More failures than the device has units: what one took is free again.
    plan.add(Rule::always(On::Write, DeviceFault::Error(5)));
    for _ in 0..10_000 {
        assert!(matches!(put(2), Err(Fault::Device(_))));
    }
    plan.clear();
    assert_eq!(put(3), Ok(Put::Stored));
}

#[test]
fn after_a_failed_journal_write_nothing_is_acknowledged_until_the_volume_is_opened_again() {
    let (disk, _) = traced(11, 50);
    let (disk, plan) = (PowerDisk::new(disk.contents(), 512), Plan::default());
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
    let mut random = Random::new(12);
    let mut settle = || {
        disk.complete(&mut random);
    };
    let engine = block_on(subject().open(device), &mut settle).expect("opens");
    let key = key_of(1);
    let mut put = |operation| {
        let value = value_of(&key, operation, 100);
        block_on(engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100), &mut settle)
    };
    assert_eq!(put(900), Ok(Put::Stored));
    plan.add(Rule::always(On::Flush, DeviceFault::Error(5)).once(0));
    assert!(matches!(put(901), Err(Fault::Device(_))));
    assert_eq!(put(902), Err(Fault::ReadOnly));
    let read = block_on(engine.get(&key), &mut settle).unwrap().unwrap();
    assert_eq!(operation_of(&key, read.as_bytes()), 900);
    let (disk, engine) = open(disk.contents()).expect("opens");
    let found = read_all(&disk, &engine)[&key];
    assert!(matches!(found, Ok(Some(900 | 901))), "{found:?}");
}

#[test]
fn a_block_that_cannot_be_read_costs_at_most_one_key() {
    let (disk, _) = traced(13, 300);
    let image = disk.contents();
    let (reference_disk, engine) = open(image.clone()).expect("opens");
    let good = read_all(&reference_disk, &engine);
    let mut named = 0;
    for block in 0..image.len() as u64 / 512 {
        let (disk, plan) = (PowerDisk::new(image.clone(), 512), Plan::default());
        plan.add(Rule::within(On::Read, Lba(block), Lba(block + 1), DeviceFault::Error(5)));
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan));
        let mut random = Random::new(1);
        let opened = block_on(subject().open(device), || {
            disk.complete(&mut random);
        });
        let engine = opened.unwrap_or_else(|error| panic!("block {block}: {error}"));
        let found = read_all(&disk, &engine);
        let faults: Vec<&Key> =
            found.iter().filter(|(key, read)| *read != &good[*key]).map(|(key, _)| key).collect();
        assert!(faults.len() <= 1, "block {block} hurt {faults:?}");
        for key in faults {
            assert!(matches!(found[key], Err(Fault::Device(_))), "block {block}: {:?}", found[key]);
            named += 1;
        }
    }
    assert!(named > 20, "only {named} blocks held anything");
}

#[test]
fn a_failed_checkpoint_is_tried_again_and_a_failed_flush_ends_the_writing() {
    let (disk, _) = traced(14, 300);
    let (disk, plan) = (PowerDisk::new(disk.contents(), 512), Plan::default());
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan.clone()));
    let mut random = Random::new(15);
    let mut settle = || {
        disk.complete(&mut random);
    };
    let engine = block_on(subject().open(device), &mut settle).expect("opens");
    // One write of a checkpoint fails: areas lie between the journal's two copies and the records.
    let areas = 16384 / 512 + 2 * 512;
    plan.add(Rule::within(On::Write, Lba(areas), Lba(areas + 100), DeviceFault::Error(5)).once(0));
    for operation in 1..1_200 {
        let key = key_of(operation % KEYS);
        let value = value_of(&key, operation, 100);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), 100);
        assert_eq!(block_on(put, &mut settle), Ok(Put::Stored), "operation {operation}");
    }
    assert!(engine.statistics().checkpoints > 0);
    plan.add(Rule::always(On::Flush, DeviceFault::Error(5)).once(0));
    assert!(matches!(block_on(engine.flush(), &mut settle), Err(Fault::Device(_))));
    let key = key_of(1);
    let put = engine.put(&key, PutMode::Upsert, record_of(&key, b"a value"), 7);
    assert_eq!(block_on(put, &mut settle), Err(Fault::ReadOnly));
}

#[test]
fn damage_to_any_image_of_a_large_checkpoint_is_mended_by_its_copy() {
    let disk = PowerDisk::new(vec![0; 64 << 20], 512);
    let mut random = Random::new(16);
    let mut settle = || {
        disk.complete(&mut random);
    };
    block_on(subject().format(Rc::new(disk.clone())), &mut settle);
    let mut hash = subject();
    hash.durability = octokv_engine::Durability::Device;
    let engine = block_on(hash.open(Rc::new(disk.clone())), &mut settle).expect("opens");
    for index in 0..70_000_u64 {
        let key = Key::new(&index.to_le_bytes()).unwrap();
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, b"a value"), 7);
        assert_eq!(block_on(put, &mut settle), Ok(Put::Stored));
    }
    block_on(engine.checkpoint(true), &mut settle).expect("writes");
    let image = disk.contents();
    let images: Vec<usize> = (0..image.len() - 4).filter(|&at| &image[at..at + 4] == b"OKVC").collect();
    assert!(images.len() >= 64, "{} images", images.len());
    // Every one: those that span the end of what is read at a time are the ones to get wrong.
    for &at in &images {
        let mut damaged = image.clone();
        damaged[at] ^= 1;
        let (_, engine) = open(damaged).unwrap_or_else(|error| panic!("image at {at}: {error}"));
        assert_eq!(engine.statistics().keys, 70_000, "image at {at}");
    }
}

#[test]
fn a_checkpoint_that_is_cut_short_ends_the_writing_and_loses_nothing() {
    let (disk, _) = traced(17, 300);
    let (disk, engine) = open(disk.contents()).expect("opens");
    let good = read_all(&disk, &engine);
    let (mut random, before) = (Random::new(18), disk.events());
    let mut checkpoint = Box::pin(engine.checkpoint(false));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    while disk.events() < before + 3 {
        assert!(checkpoint.as_mut().poll(&mut context).is_pending());
        disk.complete(&mut random);
    }
    drop(checkpoint);
    let mut settle = || {
        disk.complete(&mut random);
    };
    let key = key_of(1);
    let put = engine.put(&key, PutMode::Upsert, record_of(&key, b"a value"), 7);
    assert_eq!(block_on(put, &mut settle), Err(Fault::ReadOnly));
    assert_eq!(block_on(engine.checkpoint(true), &mut settle), Err(Fault::ReadOnly));
    let (disk, engine) = open(disk.contents()).expect("opens");
    assert_eq!(read_all(&disk, &engine), good);
}
