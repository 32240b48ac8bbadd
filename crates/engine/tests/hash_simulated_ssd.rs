//! The hash engine on a simulated drive: the conformance suite in the drive's virtual time, and what a put takes.

mod common;

use common::Hash;
use octokv_device::ssd_model::drive_profiles::{DRIVES, Drive, EVO_970, LEED};
use octokv_device::ssd_model::{Model, NandDevice};
use octokv_device::{Device, Memory, MemoryDevice};
use octokv_engine::conformance::{self, Subject, key_of, record_of, value_of};
use octokv_engine::{Durability, Engine, Put, PutMode};
use octokv_runtime::simulated::{VirtualWorld, WorldSettings};
use octokv_runtime::{Busy, Channel, Doorbell, Handle, block_on};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Memory with a drive's times, and the core whose time is that of its next timer, again and again.
fn drive(drive: &Drive, bytes: u64) -> (Rc<dyn Device>, Handle) {
    let world = VirtualWorld::new(WorldSettings::new(1));
    let queue = Box::new(world.queue(world.add_host()));
    let handle = Handle::new(Doorbell::silent(), Channel::new(queue, 1), Busy::virtual_time());
    let memory = Rc::new(MemoryDevice::new(Memory::new(bytes, 512).unwrap()));
    let model = Arc::new(Mutex::new(Model::new(*drive, 512)));
    (Rc::new(NandDevice::new(memory, model, handle.clone())), handle)
}

#[test]
fn random_operations_and_reopenings_agree_with_the_model_on_every_drive() {
    for (seed, of) in DRIVES.into_iter().enumerate() {
        for durability in [Durability::Flush, Durability::Device] {
            let mut subject = Hash { durability, ..Hash::default() };
            subject.format.unit_bytes = if seed == 0 { 512 } else { 4096 };
            let (device, handle) = drive(of, 8 << 20);
            let run = RefCell::new(|| {
                handle.begin_turn(handle.next_deadline());
            });
            conformance::sequential(&subject, &device, seed as u64, 1_000, &run);
            assert_eq!(handle.device_operations(), 0);
        }
    }
}

/// Microseconds that a put of 4,000 bytes takes, one after another.
fn put_micros(of: &Drive, durability: Durability) -> u64 {
    let subject = Hash { durability, ..Hash::default() };
    let (device, handle) = drive(of, 64 << 20);
    let mut run = || {
        handle.begin_turn(handle.next_deadline());
    };
    block_on(subject.format(Rc::clone(&device)), &mut run);
    let engine = block_on(subject.open(device), &mut run).unwrap();
    let begin = handle.now();
    for index in 0..1_000 {
        let key = key_of(index);
        let value = value_of(&key, index, 4_000);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), 4_000);
        assert_eq!(block_on(put, &mut run), Ok(Put::Stored));
    }
    (handle.now() - begin).0 / 1_000_000
}

#[test]
fn a_put_takes_what_its_drive_takes_to_keep_it() {
    // Both write; the drive without capacitors needs most of a millisecond for the flush.
    let table = [
        (&EVO_970, Durability::Flush, 730..1_200),
        (&EVO_970, Durability::Device, 20..60),
        (&LEED, Durability::Flush, 100..160),
        (&LEED, Durability::Device, 50..110),
    ];
    for (of, durability, wanted) in table {
        let micros = put_micros(of, durability);
        println!("{} {durability:?}: {micros} µs", of.name);
        assert!(wanted.contains(&micros), "{} {durability:?}: {micros} µs", of.name);
    }
}
