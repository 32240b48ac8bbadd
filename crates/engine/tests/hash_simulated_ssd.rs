//! The hash engine on a simulated SSD: the conformance suite in simulated time, and the latency of a put.

use crate::common::HashFixture;
use octokv_device::ssd_model::drive_profiles::{DCT_983, DRIVE_PROFILES, DriveProfile, EVO_970};
use octokv_device::ssd_model::{SimulatedSsd, SsdModel};
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::conformance::{self, EngineFixture, key_of, record_of, value_of};
use octokv_engine::{Durability, Engine, PutMode, PutOutcome};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Memory with a drive's times, and a core whose time advances from timer to timer.
fn simulated_ssd(drive: &DriveProfile, bytes: u64) -> (Rc<dyn Device>, ReactorHandle) {
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let queue = Box::new(sim.device_queue(sim.add_host()));
    let handle =
        ReactorHandle::new(CoreWaker::without_eventfd(), DeviceHandle::new(queue, 1), CpuTime::simulated());
    let memory = Rc::new(MemoryDevice::new(RamDisk::new(bytes, 512).unwrap()));
    let model = Arc::new(Mutex::new(SsdModel::new(*drive, 512)));
    (Rc::new(SimulatedSsd::new(memory, model, handle.clone())), handle)
}

#[test]
fn random_operations_and_reopenings_agree_with_the_model_on_every_drive() {
    for (seed, profile) in DRIVE_PROFILES.into_iter().enumerate() {
        for durability in [Durability::PowerSafe, Durability::Completed] {
            let mut fixture = HashFixture { durability, ..HashFixture::default() };
            fixture.format.unit_bytes = Some(if seed == 0 { 512 } else { 4096 });
            let (device, handle) = simulated_ssd(profile, 8 << 20);
            let advance_time = RefCell::new(|| {
                handle.begin_iteration(handle.next_deadline());
            });
            conformance::sequential(&fixture, &device, seed as u64, 1_000, &advance_time);
            assert_eq!(handle.device_operations_in_flight(), 0);
        }
    }
}

/// The mean latency in microseconds of sequential puts of 4,000 bytes.
fn put_latency_us(profile: &DriveProfile, durability: Durability) -> u64 {
    let fixture = HashFixture { durability, ..HashFixture::default() };
    let (device, handle) = simulated_ssd(profile, 64 << 20);
    let mut advance_time = || {
        handle.begin_iteration(handle.next_deadline());
    };
    block_on(fixture.format(Rc::clone(&device)), &mut advance_time);
    let engine = block_on(fixture.open(device), &mut advance_time).unwrap();
    let begin = handle.now();
    for index in 0..1_000 {
        let key = key_of(index);
        let value = value_of(&key, index, 4_000);
        let put = engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 4_000);
        assert_eq!(block_on(put, &mut advance_time), Ok(PutOutcome::Stored));
    }
    (handle.now() - begin).0 / 1_000_000
}

#[test]
fn put_latency_follows_the_drive_and_the_durability() {
    // The drive without capacitors needs most of a millisecond for the flush.
    let table = [
        (&EVO_970, Durability::PowerSafe, 730..1_200),
        (&EVO_970, Durability::Completed, 20..60),
        (&DCT_983, Durability::PowerSafe, 100..160),
        (&DCT_983, Durability::Completed, 50..110),
    ];
    for (profile, durability, wanted) in table {
        let micros = put_latency_us(profile, durability);
        println!("{} {durability:?}: {micros} µs", profile.name);
        assert!(wanted.contains(&micros), "{} {durability:?}: {micros} µs", profile.name);
    }
}
