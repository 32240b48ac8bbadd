//! The maintenance of a log volume beside a test's operations, in simulated time.
//!
//! In: an engine; a future; what completes an operation of its device. Out: the future's result. A future that nothing can wake any more fails the test, and
//! so does one that takes too many operations.

use octokv_base::{Nanos, Prng};
use octokv_engine::Engine;
use octokv_engine::conformance::TaskSet;
use octokv_engine::log::handle::LogEngine;
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use std::rc::Rc;

/// The polls without any operation of the device in progress after which nothing will happen any more.
pub const IDLE_MAX: u32 = 100_000;
/// An operation of the device, or a look at timers, takes so long.
const STEP: Nanos = Nanos::from_micros(20);

/// The maintenance of a volume.
pub struct LogBackground {
    engine: Rc<LogEngine>,
    handle: ReactorHandle,
    tasks: TaskSet,
    now: Nanos,
    /// The operations of the device in which a future ends.
    operations_max: u64,
}

impl LogBackground {
    pub fn begin(engine: &Rc<LogEngine>, operations_max: u64) -> LogBackground {
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let devices = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let (mut tasks, now) = (TaskSet::default(), Nanos::from_secs(1));
        handle.begin_iteration(now);
        let (maintained, own) = (Rc::clone(engine), handle.clone());
        tasks.add(async move { maintained.maintain(&own, |error| panic!("maintenance: {error}")).await });
        let owner = Rc::clone(engine);
        tasks.add(async move { owner.run_abandoned().await });
        LogBackground { engine: Rc::clone(engine), handle, tasks, now, operations_max }
    }

    /// Runs a future beside the maintenance. `complete` completes an operation of the device, if one is in progress.
    pub fn run<T>(
        &mut self,
        complete: impl Fn(&mut Prng) -> bool,
        random: &mut Prng,
        future: impl Future<Output = T>,
    ) -> T {
        let (mut idle, mut operations) = (0, 0);
        block_on(future, || {
            self.now = self.now + STEP;
            self.handle.begin_iteration(self.now);
            let is_woken = self.tasks.step(random);
            let has_completed = complete(random);
            idle = if has_completed { 0 } else { idle + u32::from(!is_woken) };
            operations += u64::from(has_completed);
            let is_stuck = idle >= IDLE_MAX || operations >= self.operations_max;
            assert!(!is_stuck, "waits for ever, {operations} operations: {:?}", self.engine.statistics());
        })
    }
}
