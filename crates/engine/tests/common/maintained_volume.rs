//! A volume with its maintenance in simulated time, on a device whose operations a test fails.

#![allow(dead_code)]

use octokv_base::{Lba, Nanos, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{TaskSet, key_of, operation_of, record_of, value_of};
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// One key in four has a value of so many bytes, the others one of [`SHORT_BYTES`].
const LONG_BYTES: usize = 1_200;
const SHORT_BYTES: usize = 100;

/// So long after its begin a write waits for what will not happen.
const WAIT_MAX: Nanos = Nanos::from_secs(300);

/// A volume with its maintenance, which starts full: each key has a value.
pub struct Maintained<E> {
    pub device: Rc<dyn Device>,
    pub engine: Rc<E>,
    pub plan: FaultPlan,
    pub operations: u64,
    /// The last operation on each key.
    pub model: Vec<u64>,
    handle: ReactorHandle,
    tasks: TaskSet,
    now: Nanos,
    random: Prng,
    reports: Rc<RefCell<Vec<EngineError>>>,
}

impl<E: Engine + 'static> Maintained<E> {
    /// Of a new volume, for so many keys.
    pub fn begin(engine: E, device: Rc<dyn Device>, plan: FaultPlan, keys: u64) -> Maintained<E> {
        let engine = Rc::new(engine);
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let devices = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let (mut tasks, now) = (TaskSet::default(), Nanos::from_secs(1));
        handle.begin_iteration(now);
        let reports: Rc<RefCell<Vec<EngineError>>> = Rc::default();
        let (maintained, own, reported) = (Rc::clone(&engine), handle.clone(), Rc::clone(&reports));
        tasks.add(async move { maintained.maintain(&own, |error| reported.borrow_mut().push(error)).await });
        let (random, model) = (Prng::new(3), vec![0; keys as usize]);
        let mut volume =
            Maintained { device, engine, plan, operations: 0, model, handle, tasks, now, random, reports };
        volume.write_all();
        volume.advance(Nanos::from_secs(5));
        volume
    }

    pub fn advance(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            self.step();
        }
    }

    fn step(&mut self) {
        self.handle.begin_iteration(self.now);
        while self.tasks.step(&mut self.random) {}
        self.now = self.now + Nanos::from_millis(5);
    }

    pub fn try_write(&mut self, index: u64) -> Result<PutOutcome, EngineError> {
        self.operations += 1;
        let (key, bytes) = (key_of(index), if index.is_multiple_of(4) { LONG_BYTES } else { SHORT_BYTES });
        let value = value_of(&key, self.operations, bytes);
        let engine = Rc::clone(&self.engine);
        let record = record_of(engine.record_layout(), &key, &value);
        let (begun, statistics) = (self.now, engine.statistics());
        block_on(engine.put(&key, PutMode::Upsert, record, bytes), || {
            assert!(self.now < begun + WAIT_MAX, "a write of key {index} waits for ever: {statistics:?}");
            self.step();
        })
    }

    pub fn write(&mut self, index: u64) {
        assert_eq!(self.try_write(index), Ok(PutOutcome::Stored), "key {index}");
        self.model[index as usize] = self.operations;
    }

    pub fn write_all(&mut self) {
        (0..self.model.len() as u64).for_each(|index| self.write(index));
    }

    /// Writes random keys for a time.
    pub fn write_for(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            for _ in 0..20 {
                let index = self.random.below(self.model.len() as u64);
                self.write(index);
            }
            self.advance(Nanos::from_millis(50));
        }
    }

    /// Reads all keys. Gives the errors.
    pub fn read_all(&self) -> Vec<(u64, EngineError)> {
        let mut errors = Vec::new();
        for (index, &operation) in (0..).zip(&self.model) {
            let key = key_of(index);
            match block_on(self.engine.get(&key), || ()) {
                Ok(found) => {
                    let value = found.unwrap_or_else(|| panic!("key {index} is not found"));
                    assert_eq!(operation_of(&key, value.as_bytes()), operation, "key {index}");
                }
                Err(error) => errors.push((index, error)),
            }
        }
        errors
    }

    pub fn fail(&self, blocks: Range<u64>, fault: InjectedFault) {
        self.plan.add(FaultRule::within(OpFilter::Read, Lba(blocks.start), Lba(blocks.end), fault));
    }

    /// The reports since the last call.
    pub fn take_reports(&self) -> Vec<EngineError> {
        std::mem::take(&mut self.reports.borrow_mut())
    }
}
