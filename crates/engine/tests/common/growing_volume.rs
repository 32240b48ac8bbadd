//! A volume that gets a further device while it is used: two cores' handles in simulated time, and a model of what the keys have.

#![allow(dead_code)]

use super::opened_span::{Devices, KEYS};
use super::pool;
use super::spanned_fixture::SpannedFixture;
use octokv_base::{Key, Nanos, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyEngine, AnyVolume, DeleteOutcome, Engine, EngineError, PutMode, PutOutcome, SpannedVolume, Volume,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::rc::Rc;

/// Partitions on the last of four equal devices.
pub const BALANCED: usize = 64;
/// Steps of a millisecond after which a volume is balanced and has no key left over.
pub const STEPS_MAX: u64 = 60_000;

/// Two cores' handles on a volume, with their maintenance in simulated time.
pub struct Growing {
    pub volume: AnyVolume,
    pub engines: Vec<Rc<AnyEngine>>,
    pub handle: ReactorHandle,
    pub tasks: TaskSet,
    pub now: Nanos,
    pub random: Prng,
    /// Completes an operation of a device, if it does not do so itself.
    pub complete: Box<dyn FnMut()>,
    /// For each key the last operation, 0 if it was deleted.
    pub model: Vec<u64>,
    pub operations: u64,
}

impl Growing {
    /// A volume that was opened with a device less than these, which is added.
    pub fn begin(fixture: &SpannedFixture, devices: &Devices, complete: Box<dyn FnMut()>) -> Growing {
        let mut growing = Growing::open(fixture, devices, complete);
        growing.add(fixture, devices);
        growing
    }

    /// A volume that is opened with a device less than these.
    pub fn open(fixture: &SpannedFixture, devices: &Devices, complete: Box<dyn FnMut()>) -> Growing {
        Growing::open_all(fixture, &devices[..devices.len() - 1], complete)
    }

    /// A volume that is opened with these devices.
    pub fn open_all(
        fixture: &SpannedFixture,
        devices: &[Rc<dyn Device>],
        mut complete: Box<dyn FnMut()>,
    ) -> Growing {
        let volume = block_on(fixture.open_volume(devices), &mut complete).expect("opens");
        let engines: Vec<_> = (0..2).map(|core| Rc::new(volume.engine(core, devices, pool()))).collect();
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
    pub fn add(&mut self, fixture: &SpannedFixture, devices: &Devices) {
        let (pool, configs) = (pool(), (&fixture.open_config(), &fixture.format));
        block_on(self.volume.add(devices, &pool, configs, |_| {}), &mut self.complete).expect("adds");
    }

    /// Gives the handles the new device.
    pub fn extend(&mut self, devices: &Devices) {
        let device = devices.last().expect("the new one");
        for (core, engine) in self.engines.iter().enumerate() {
            self.volume.extend_engine(engine, (core, device, &pool()));
        }
    }

    pub fn step(&mut self) {
        self.handle.begin_iteration(self.now);
        while self.tasks.step(&mut self.random) {}
        for _ in 0..8 {
            (self.complete)();
        }
        self.now = self.now + Nanos::from_millis(1);
    }

    /// Runs an operation on a core's handle to its end, beside everything else.
    pub fn end<T>(&mut self, operation: impl AsyncFnOnce(Rc<AnyEngine>) -> T) -> T {
        let core = self.random.below(2) as usize;
        self.end_on(core, operation)
    }

    /// Runs an operation on the handle of a core to its end, beside everything else.
    pub fn end_on<T>(&mut self, core: usize, operation: impl AsyncFnOnce(Rc<AnyEngine>) -> T) -> T {
        let engine = Rc::clone(&self.engines[core]);
        let begun = self.now;
        block_on(operation(engine), || {
            assert!(self.now < begun + Nanos::from_secs(60), "an operation waits for ever");
            self.step();
        })
    }

    /// Stores or deletes a random key.
    pub fn write(&mut self) -> Result<(), EngineError> {
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
    pub fn check(&mut self, number: u64) {
        let key = key_of(number);
        let read = self.end(async |engine| engine.get(&key).await).expect("no fault");
        let found = read.map_or(DELETED, |value| operation_of(&key, value.as_bytes()));
        assert_eq!(found, self.model[number as usize], "key {number}");
    }

    pub fn listed(&mut self) -> usize {
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

    pub fn live(&self) -> usize {
        self.model.iter().filter(|&&operation| operation != DELETED).count()
    }

    pub fn spanned(&self) -> SpannedVolume<AnyVolume> {
        let AnyVolume::Spanned(volume) = &self.volume else { panic!("it spans devices") };
        volume.clone()
    }

    /// The partitions of the device that was added.
    pub fn moved(&self) -> usize {
        let last = self.spanned().members().count() as u8 - 1;
        self.spanned().placement().0.iter().filter(|&&device| device == last).count()
    }

    pub fn is_settled(&self) -> bool {
        self.moved() == BALANCED && !self.spanned().is_rebalancing()
    }

    pub fn settle(&mut self) {
        let mut steps = 0;
        while !self.is_settled() {
            self.step();
            steps += 1;
            assert!(steps < STEPS_MAX, "{} partitions have moved", self.moved());
        }
    }

    pub fn close(self) {
        drop(self.tasks);
        let mut complete = self.complete;
        for engine in self.engines {
            let engine = Rc::into_inner(engine).expect("its tasks have ended");
            block_on(engine.close(), &mut complete).expect("closes");
        }
    }
}

/// The operation of a key that is not there.
pub const DELETED: u64 = u64::MAX;

/// A volume whose handles have the device that was added.
pub fn grown(fixture: &SpannedFixture, devices: &Devices) -> Growing {
    let mut growing = Growing::begin(fixture, devices, Box::new(|| {}));
    growing.extend(devices);
    growing
}
