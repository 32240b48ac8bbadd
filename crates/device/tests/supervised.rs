//! Supervised devices: time-outs, and when a device counts as failed.

use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::health::{DeviceFailure, DeviceHealth, FAILURES_MIN};
use octokv_device::supervised::{SupervisedDevice, TIME_OUTS_MAX};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, MemoryDevice, RamDisk};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

const TIME_OUT: Nanos = Nanos::from_secs(8);
const GRACE: Nanos = Nanos::from_secs(1);
const EIO: i32 = 5;
const ENODEV: i32 = 19;

/// A core whose time the test tells.
struct TestCore {
    handle: ReactorHandle,
    now: Nanos,
}

impl TestCore {
    fn new() -> TestCore {
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let devices = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let mut core = TestCore { handle, now: Nanos::from_secs(100) };
        core.pass(Nanos(0));
        core
    }

    fn pass(&mut self, time: Nanos) {
        self.now = self.now + time;
        self.handle.begin_iteration(self.now);
    }

    fn supervise(&self, inner: Rc<dyn Device>) -> (SupervisedDevice, Arc<DeviceHealth>) {
        let health = Arc::default();
        (SupervisedDevice::new(inner, Arc::clone(&health), self.handle.clone(), TIME_OUT), health)
    }
}

fn memory(plan: &FaultPlan) -> Rc<dyn Device> {
    let memory = MemoryDevice::new(RamDisk::new(1 << 20, 4096).expect("memory"));
    Rc::new(FaultDevice::new(Rc::new(memory), plan.clone()))
}

fn block() -> Buffer {
    Buffer::zeroed(4096)
}

fn poll(operation: &mut DeviceFuture) -> Option<IoResult> {
    match Pin::new(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

fn outcome(operation: &mut DeviceFuture) -> Option<Result<(), DeviceError>> {
    poll(operation).map(|ended| ended.result)
}

/// Operations end when the test ends them.
#[derive(Default)]
struct ManualDevice {
    begun: RefCell<VecDeque<Rc<RefCell<Option<Waker>>>>>,
}

impl ManualDevice {
    fn begin(&self, buffer: Option<Buffer>) -> DeviceFuture {
        let slot = Rc::default();
        self.begun.borrow_mut().push_back(Rc::clone(&slot));
        let mut buffer = Some(buffer);
        DeviceFuture::boxed(poll_fn(move |context| {
            // Only the test has it, until it ends the operation.
            if Rc::strong_count(&slot) == 1 {
                return Poll::Ready(IoResult { buffer: buffer.take().expect("polled once"), result: Ok(()) });
            }
            *slot.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        }))
    }

    fn begun(&self) -> usize {
        self.begun.borrow().len()
    }

    fn end_first(&self) {
        let slot = self.begun.borrow_mut().pop_front().expect("one has begun");
        let waker = slot.borrow_mut().take();
        drop(slot);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Device for ManualDevice {
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: 4096, blocks: 256, volatile: false }
    }
    fn name(&self) -> &str {
        "manual"
    }
    fn read(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        self.begin(Some(buffer))
    }
    fn write(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        self.begin(Some(buffer))
    }
    fn flush(&self) -> DeviceFuture {
        self.begin(None)
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        self.begin(None)
    }
}

#[test]
fn operations_are_counted_with_their_latencies() {
    let (mut core, inner) = (TestCore::new(), Rc::new(ManualDevice::default()));
    let (device, health) = core.supervise(Rc::clone(&inner) as Rc<dyn Device>);
    let mut reads = [device.read(Lba(0), block()), device.read(Lba(1), block())];
    let mut write = device.write_vectored(Lba(2), vec![block(), block()]);
    assert_eq!((inner.begun(), health.load().in_flight), (4, 3), "a vector is two writes of this device");
    assert!(reads.iter_mut().all(|read| poll(read).is_none()) && poll(&mut write).is_none());
    core.pass(Nanos(3_000));
    inner.end_first();
    assert_eq!(poll(&mut reads[0]).expect("ended").buffer.map(|buffer| buffer.len()), Some(4096));
    core.pass(Nanos(2_000));
    (0..3).for_each(|_| inner.end_first());
    assert_eq!((outcome(&mut reads[1]), outcome(&mut write)), (Some(Ok(())), Some(Ok(()))));
    let mut flush = device.flush();
    assert_eq!(outcome(&mut flush), None);
    drop(flush);
    let load = health.load();
    assert_eq!((load.reads.operations, load.reads.bytes), (2, 8192));
    assert_eq!((load.reads.latency_mean(), load.reads.latency_max), (Nanos(4_000), Nanos(5_000)));
    assert_eq!((load.writes.operations, load.writes.bytes), (1, 8192));
    assert_eq!((load.flushes.operations, load.errors, load.in_flight), (0, 0, 0));
    assert_eq!(health.failure(), None);
}

#[test]
fn a_device_that_hangs_has_failed_behind_time_out_and_grace() {
    for filter in [OpFilter::Read, OpFilter::Write, OpFilter::Flush] {
        let (mut core, plan) = (TestCore::new(), FaultPlan::default());
        let (device, health) = core.supervise(memory(&plan));
        let begin = || match filter {
            OpFilter::Read => device.read(Lba(7), block()),
            OpFilter::Write => device.write(Lba(7), block()),
            OpFilter::Flush => device.flush(),
        };
        assert_eq!(outcome(&mut begin()), Some(Ok(())));
        plan.add(FaultRule::always(filter, InjectedFault::Hang));
        let mut operations = [begin(), begin(), begin(), begin()];
        let mut pending = |core: &mut TestCore, time| {
            core.pass(time);
            operations.iter_mut().map(outcome).filter(Option::is_none).count()
        };
        assert_eq!(pending(&mut core, Nanos(0)), 4);
        assert_eq!(pending(&mut core, Nanos(TIME_OUT.0 - 1)), 4);
        assert_eq!(pending(&mut core, Nanos(1)), 4);
        assert!(device.is_available());
        assert_eq!(pending(&mut core, Nanos(GRACE.0 - 1)), 4);
        core.pass(Nanos(1));
        for (at, operation) in operations.iter_mut().enumerate() {
            let ended = poll(operation).expect("has ended");
            assert_eq!(ended.result, Err(DeviceError::Unavailable), "{filter:?} {at}");
            assert!(ended.buffer.is_none(), "the device has the buffer of what hangs");
        }
        assert_eq!(health.failure(), Some(DeviceFailure::TimedOut(TIME_OUT)));
        assert!(!device.is_available());
        // Later operations are not tried, though the device would execute them.
        plan.clear();
        assert_eq!(outcome(&mut begin()), Some(Err(DeviceError::Unavailable)));
        assert!(
            device.read_in_place(Lba(0), 4096).is_none() && !device.write_in_place(Lba(0), 4096, &mut |_| ())
        );
        assert_eq!(health.load().in_flight, 0);
    }
}

#[test]
fn a_core_that_was_stopped_for_longer_than_the_time_out_finds_its_operations_ended() {
    let (mut core, inner) = (TestCore::new(), Rc::new(ManualDevice::default()));
    let (device, health) = core.supervise(Rc::clone(&inner) as Rc<dyn Device>);
    let mut read = device.read(Lba(0), block());
    assert!(poll(&mut read).is_none());
    // The timer fires, and its task runs before the completion is seen.
    core.pass(Nanos::from_secs(3_600));
    assert!(poll(&mut read).is_none());
    inner.end_first();
    assert_eq!(outcome(&mut read), Some(Ok(())));
    assert_eq!(health.failure(), None);
}

#[test]
fn a_slow_device_that_makes_progress_has_not_failed_and_one_that_loses_an_operation_has() {
    let (mut core, inner) = (TestCore::new(), Rc::new(ManualDevice::default()));
    let (device, health) = core.supervise(Rc::clone(&inner) as Rc<dyn Device>);
    // Each ends before the time-out of the one before it, the last behind many of its own.
    let mut operations: Vec<DeviceFuture> = (0..8).map(|at| device.write(Lba(at), block())).collect();
    for at in 0..operations.len() {
        assert!(operations[at..].iter_mut().all(|operation| poll(operation).is_none()));
        core.pass(Nanos(TIME_OUT.0 - 1));
        assert!(operations[at + 1..].iter_mut().all(|operation| poll(operation).is_none()));
        inner.end_first();
        assert_eq!(outcome(&mut operations[at]), Some(Ok(())), "{at}");
    }
    assert_eq!(health.failure(), None);
    // The first does not end, though others do.
    let mut lost = device.read(Lba(0), block());
    let kept = inner.begun.borrow_mut().pop_front();
    for round in 0..4 * TIME_OUTS_MAX {
        assert!(poll(&mut lost).is_none(), "{round}");
        let mut other = device.read(Lba(1), block());
        core.pass(Nanos(TIME_OUT.0 / 4));
        inner.end_first();
        assert_eq!(outcome(&mut other), Some(Ok(())), "{round}");
    }
    assert!(poll(&mut lost).is_none());
    core.pass(GRACE);
    assert_eq!(outcome(&mut lost), Some(Err(DeviceError::Unavailable)));
    assert_eq!(health.failure(), Some(DeviceFailure::TimedOut(TIME_OUT)));
    drop(kept);
}

#[test]
fn errors_of_some_blocks_are_no_failure_of_the_device() {
    let (mut core, plan) = (TestCore::new(), FaultPlan::default());
    let (device, health) = core.supervise(memory(&plan));
    plan.add(FaultRule::within(OpFilter::Read, Lba(5), Lba(6), InjectedFault::Error(EIO)));
    for _ in 0..10 * FAILURES_MIN {
        core.pass(TIME_OUT);
        assert_eq!(outcome(&mut device.read(Lba(5), block())), Some(Err(DeviceError::Io(EIO))));
        assert_eq!(outcome(&mut device.read(Lba(6), block())), Some(Ok(())));
    }
    // Many at once, within the time-out.
    for _ in 0..10 * FAILURES_MIN {
        assert_eq!(outcome(&mut device.read(Lba(5), block())), Some(Err(DeviceError::Io(EIO))));
    }
    assert_eq!((health.failure(), health.load().errors), (None, 20 * FAILURES_MIN));
    // No success since: the device has failed.
    core.pass(TIME_OUT);
    assert_eq!(outcome(&mut device.read(Lba(5), block())), Some(Err(DeviceError::Io(EIO))));
    let failure = DeviceFailure::Failing { span: TIME_OUT, last: DeviceError::Io(EIO) };
    assert_eq!(health.failure(), Some(failure));
    assert_eq!(outcome(&mut device.read(Lba(6), block())), Some(Err(DeviceError::Unavailable)));
}

#[test]
fn a_device_that_is_gone_has_failed_at_once() {
    let (core, plan) = (TestCore::new(), FaultPlan::default());
    let (device, health) = core.supervise(memory(&plan));
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(ENODEV)).once(1));
    assert_eq!(outcome(&mut device.write(Lba(1), block())), Some(Ok(())));
    assert_eq!(outcome(&mut device.write(Lba(1), block())), Some(Err(DeviceError::Io(ENODEV))));
    assert_eq!(health.failure(), Some(DeviceFailure::Removed(ENODEV)));
    assert_eq!(outcome(&mut device.read(Lba(1), block())), Some(Err(DeviceError::Unavailable)));
    assert!(health.failure().expect("failed").to_string().contains("No such device"));
}
