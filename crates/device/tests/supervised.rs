//! Supervised devices: timeouts, and when a device counts as failed.

use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::health::{DeviceFailure, DeviceHealth, FAILURES_MIN};
use octokv_device::supervised::{SupervisedDevice, TIMEOUTS_MAX};
use octokv_device::{
    Device, DeviceError, DeviceFuture, FileDevice, Geometry, IoResult, MemoryDevice, RamDisk,
};
use octokv_runtime::device_queue::{DeviceQueue, FileId};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, DeviceSource, IoCompletion, IoOperation, ReactorHandle,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

const TIMEOUT: Nanos = Nanos::from_secs(8);
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
        (SupervisedDevice::new(inner, Arc::clone(&health), self.handle.clone(), TIMEOUT), health)
    }
}

fn memory(plan: &FaultPlan) -> Rc<dyn Device> {
    let memory = MemoryDevice::new(RamDisk::new(1 << 20, 4096).expect("memory"));
    Rc::new(FaultDevice::new(Rc::new(memory), plan.clone()))
}

fn block_buffer() -> Buffer {
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
    let mut reads = [device.read(Lba(0), block_buffer()), device.read(Lba(1), block_buffer())];
    let mut write = device.write_vectored(Lba(2), vec![block_buffer(), block_buffer()]);
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
fn a_device_that_hangs_has_failed_behind_timeout_and_grace() {
    for filter in [OpFilter::Read, OpFilter::Write, OpFilter::Flush] {
        let (mut core, plan) = (TestCore::new(), FaultPlan::default());
        let (device, health) = core.supervise(memory(&plan));
        let begin = || match filter {
            OpFilter::Read => device.read(Lba(7), block_buffer()),
            OpFilter::Write => device.write(Lba(7), block_buffer()),
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
        assert_eq!(pending(&mut core, Nanos(TIMEOUT.0 - 1)), 4);
        assert_eq!(pending(&mut core, Nanos(1)), 4);
        assert!(device.is_available());
        assert_eq!(pending(&mut core, Nanos(GRACE.0 - 1)), 4);
        core.pass(Nanos(1));
        for (at, operation) in operations.iter_mut().enumerate() {
            let ended = poll(operation).expect("has ended");
            assert_eq!(ended.result, Err(DeviceError::Unavailable), "{filter:?} {at}");
            assert!(ended.buffer.is_none(), "the device has the buffer of what hangs");
        }
        assert_eq!(health.failure(), Some(DeviceFailure::TimedOut(TIMEOUT)));
        assert!(!device.is_available());
        // Later operations are not tried, though the device would execute them.
        plan.clear();
        assert_eq!(outcome(&mut begin()), Some(Err(DeviceError::Unavailable)));
        assert!(
            device.read_in_place(Lba(0), 4096).is_none() && !device.write_in_place(Lba(0), 4096, &mut |_| ())
        );
        assert_eq!(health.load().in_flight, 4, "the device has them still");
    }
}

#[test]
fn a_core_that_was_stopped_for_longer_than_the_timeout_finds_its_operations_ended() {
    let (mut core, inner) = (TestCore::new(), Rc::new(ManualDevice::default()));
    let (device, health) = core.supervise(Rc::clone(&inner) as Rc<dyn Device>);
    let mut read = device.read(Lba(0), block_buffer());
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
    // Each ends before the timeout of the one before it, the last behind many of its own.
    let mut operations: Vec<DeviceFuture> = (0..8).map(|at| device.write(Lba(at), block_buffer())).collect();
    for at in 0..operations.len() {
        assert!(operations[at..].iter_mut().all(|operation| poll(operation).is_none()));
        core.pass(Nanos(TIMEOUT.0 - 1));
        assert!(operations[at + 1..].iter_mut().all(|operation| poll(operation).is_none()));
        inner.end_first();
        assert_eq!(outcome(&mut operations[at]), Some(Ok(())), "{at}");
    }
    assert_eq!(health.failure(), None);
    // The first does not end, though others do.
    let mut lost = device.read(Lba(0), block_buffer());
    let kept = inner.begun.borrow_mut().pop_front();
    for round in 0..4 * TIMEOUTS_MAX {
        assert!(poll(&mut lost).is_none(), "{round}");
        let mut other = device.read(Lba(1), block_buffer());
        core.pass(Nanos(TIMEOUT.0 / 4));
        inner.end_first();
        assert_eq!(outcome(&mut other), Some(Ok(())), "{round}");
    }
    assert!(poll(&mut lost).is_none());
    core.pass(GRACE);
    assert_eq!(outcome(&mut lost), Some(Err(DeviceError::Unavailable)));
    assert_eq!(health.failure(), Some(DeviceFailure::TimedOut(TIMEOUT)));
    drop(kept);
}

#[test]
fn errors_of_some_blocks_are_no_failure_of_the_device() {
    let (mut core, plan) = (TestCore::new(), FaultPlan::default());
    let (device, health) = core.supervise(memory(&plan));
    plan.add(FaultRule::within(OpFilter::Read, Lba(0), Lba(100), InjectedFault::Error(EIO)));
    let fail = |block| {
        assert_eq!(outcome(&mut device.read(Lba(block), block_buffer())), Some(Err(DeviceError::Io(EIO))));
    };
    for number in 0..10 * FAILURES_MIN {
        core.pass(TIMEOUT);
        fail(number % 100);
        assert_eq!(outcome(&mut device.read(Lba(100), block_buffer())), Some(Ok(())));
    }
    // One block, again and again, and nothing else.
    for _ in 0..10 * FAILURES_MIN {
        core.pass(Nanos(TIMEOUT.0 / 2));
        fail(7);
    }
    // Others, each behind a pause in which nothing was tried.
    for number in 0..10 * FAILURES_MIN {
        core.pass(Nanos(TIMEOUT.0 + 1));
        fail(number % 100);
    }
    // Many at once, within the timeout.
    core.pass(Nanos(TIMEOUT.0 + 1));
    (0..10 * FAILURES_MIN).for_each(|number| fail(number % 100));
    assert_eq!((health.failure(), health.load().errors), (None, 40 * FAILURES_MIN));
    // No success since: the device has failed.
    core.pass(TIMEOUT);
    fail(5);
    let failure = DeviceFailure::Failing { span: TIMEOUT, last: DeviceError::Io(EIO) };
    assert_eq!(health.failure(), Some(failure));
    assert_eq!(outcome(&mut device.read(Lba(100), block_buffer())), Some(Err(DeviceError::Unavailable)));
}

#[test]
fn lost_blocks_are_no_failure_of_the_device() {
    let (mut core, plan) = (TestCore::new(), FaultPlan::default());
    let (device, health) = core.supervise(memory(&plan));
    for code in [61, 84] {
        plan.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(code)));
        for number in 0..10 * FAILURES_MIN {
            core.pass(Nanos(TIMEOUT.0 / 2));
            let read = outcome(&mut device.read(Lba(number % 100), block_buffer()));
            assert_eq!(read, Some(Err(DeviceError::Io(code))));
        }
        plan.clear();
    }
    assert_eq!(health.failure(), None);
}

#[test]
fn a_device_that_is_gone_has_failed_at_once() {
    let (core, plan) = (TestCore::new(), FaultPlan::default());
    let (device, health) = core.supervise(memory(&plan));
    plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(ENODEV)).once(1));
    assert_eq!(outcome(&mut device.write(Lba(1), block_buffer())), Some(Ok(())));
    assert_eq!(outcome(&mut device.write(Lba(1), block_buffer())), Some(Err(DeviceError::Unavailable)));
    assert_eq!(health.failure(), Some(DeviceFailure::Removed(ENODEV)));
    assert_eq!(outcome(&mut device.read(Lba(1), block_buffer())), Some(Err(DeviceError::Unavailable)));
    assert!(health.failure().expect("failed").to_string().contains("No such device"));
}

/// A queue whose first operation ends when the test says so.
#[derive(Clone, Default)]
struct HeldQueue(Rc<RefCell<VecDeque<u32>>>, Rc<RefCell<Vec<u32>>>);

impl DeviceQueue for HeldQueue {
    fn open(&mut self, _source: &DeviceSource) -> std::io::Result<FileId> {
        unreachable!("the test gives devices their numbers")
    }
    fn close(&mut self, _file: FileId) {}
    fn submit(&mut self, token: u32, _file: FileId, _operation: IoOperation) {
        self.0.borrow_mut().push_back(token);
    }
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        let ended = std::mem::take(&mut *self.1.borrow_mut());
        completions
            .extend(ended.into_iter().map(|token| (token, IoCompletion { buffer: None, result: Ok(()) })));
    }
    fn in_flight(&self) -> usize {
        self.0.borrow().len()
    }
}

#[test]
fn waiting_for_the_queue_of_the_core_is_no_failure_of_the_device() {
    let queue = HeldQueue::default();
    let channel = DeviceHandle::new(Box::new(queue.clone()), 1);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), channel.clone(), CpuTime::simulated());
    let mut core = TestCore { handle, now: Nanos::from_secs(100) };
    core.pass(Nanos(0));
    let geometry = Geometry { block_bytes: 4096, blocks: 256, volatile: false };
    let file = |number: u32| FileDevice::new(channel.clone(), FileId(number), geometry, number.to_string());
    let other = file(1);
    let (device, health) = core.supervise(Rc::new(file(2)));
    let mut first = other.flush();
    let mut waiting = device.flush();
    for _ in 0..10 * TIMEOUTS_MAX {
        assert!(poll(&mut first).is_none() && poll(&mut waiting).is_none());
        core.pass(TIMEOUT);
    }
    assert_eq!(health.failure(), None);
    // It begins now, and hangs.
    let token = queue.0.borrow_mut().pop_front().expect("the first has begun");
    queue.1.borrow_mut().push(token);
    assert_eq!(channel.poll(), 1);
    assert_eq!(outcome(&mut first), Some(Ok(())));
    assert!(poll(&mut waiting).is_none());
    core.pass(Nanos(TIMEOUT.0 - 1));
    assert!(poll(&mut waiting).is_none());
    core.pass(GRACE);
    assert!(poll(&mut waiting).is_none(), "it began at most a grace ago");
    core.pass(GRACE);
    assert_eq!(outcome(&mut waiting), Some(Err(DeviceError::Unavailable)));
    assert_eq!(health.failure(), Some(DeviceFailure::TimedOut(TIMEOUT)));
}
