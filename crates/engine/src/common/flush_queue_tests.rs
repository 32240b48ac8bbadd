//! The flush queue: tables on devices of tests, and any order of calls, drops and ends of flushes against a model.

use super::flush_queue::FlushQueue;
use octokv_base::{Buffer, Lba};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use proptest::collection::vec;
use proptest::prelude::*;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

type Call<'a> = Pin<Box<dyn Future<Output = Result<(), DeviceError>> + 'a>>;

/// Whether a task was woken since it was last polled.
struct WokenSince(AtomicBool);

impl Wake for WokenSince {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A task that is polled only when it was woken, so that a lost wake-up shows.
struct WokenTask<'a> {
    call: Call<'a>,
    woken: Arc<WokenSince>,
}

impl<'a> WokenTask<'a> {
    fn new(call: Call<'a>) -> WokenTask<'a> {
        WokenTask { call, woken: Arc::new(WokenSince(AtomicBool::new(true))) }
    }

    fn poll(&mut self) -> Poll<Result<(), DeviceError>> {
        if !self.woken.0.swap(false, Ordering::Relaxed) {
            return Poll::Pending;
        }
        self.call.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&self.woken))))
    }
}

/// A flush of [`ManualDevice`].
#[derive(Default)]
struct ManualFlush {
    /// The moment at which it began.
    began: u64,
    ended: Option<Result<(), DeviceError>>,
    waker: Option<Waker>,
    /// Whether its future is gone.
    is_dropped: bool,
}

/// A device whose flushes end when the test says so.
#[derive(Default)]
struct ManualDevice {
    flushes: Rc<RefCell<Vec<ManualFlush>>>,
    /// Rises with each step of the test.
    moment: std::cell::Cell<u64>,
}

impl ManualDevice {
    fn running(&self) -> Option<usize> {
        self.flushes.borrow().iter().position(|flush| flush.ended.is_none() && !flush.is_dropped)
    }

    fn end(&self, flush: usize, result: Result<(), DeviceError>) {
        let waker = {
            let flush = &mut self.flushes.borrow_mut()[flush];
            flush.ended = Some(result);
            flush.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Marks a flush whose future is dropped.
struct DropMark(Rc<RefCell<Vec<ManualFlush>>>, usize);

impl Drop for DropMark {
    fn drop(&mut self) {
        self.0.borrow_mut()[self.1].is_dropped = true;
    }
}

impl Device for ManualDevice {
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: 512, blocks: 1, volatile: false }
    }
    fn name(&self) -> &str {
        "manual"
    }
    fn read(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        DeviceFuture::out_of_range(Some(buffer))
    }
    fn write(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        DeviceFuture::out_of_range(Some(buffer))
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        DeviceFuture::out_of_range(None)
    }
    fn flush(&self) -> DeviceFuture {
        let flushes = Rc::clone(&self.flushes);
        let index = flushes.borrow().len();
        flushes.borrow_mut().push(ManualFlush { began: self.moment.get(), ..ManualFlush::default() });
        let mark = DropMark(Rc::clone(&flushes), index);
        DeviceFuture::boxed(poll_fn(move |context| {
            let mut flushes = mark.0.borrow_mut();
            let flush = &mut flushes[index];
            match flush.ended {
                Some(result) => Poll::Ready(IoResult { buffer: None, result }),
                None => {
                    flush.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A new call, which is polled or not.
    Call { is_polled: bool },
    /// The call with this number, counted round, is polled if it was woken.
    Poll(usize),
    /// It is dropped.
    Drop(usize),
    /// The flush that runs ends.
    End { fails: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => any::<bool>().prop_map(|is_polled| Step::Call { is_polled }),
        4 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::Drop),
        3 => Just(Step::End { fails: false }),
        1 => (0..8).prop_map(|failure| Step::End { fails: failure == 0 }),
    ];
    vec(step, 0..120)
}

/// A call of the model: when it was made (polled for the first time).
struct ModelCall<'a> {
    task: WokenTask<'a>,
    made: Option<u64>,
}

/// The calls, and what the device did.
struct Model<'a> {
    queue: &'a FlushQueue,
    device: &'a ManualDevice,
    calls: Vec<ModelCall<'a>>,
}

impl Model<'_> {
    fn step(&self) -> u64 {
        self.device.moment.set(self.device.moment.get() + 1);
        self.device.moment.get()
    }

    fn poll(&mut self, index: usize) {
        let moment = self.step();
        let call = &mut self.calls[index];
        let made = *call.made.get_or_insert(moment);
        let Poll::Ready(result) = call.task.poll() else { return };
        let flushes = self.device.flushes.borrow();
        match result {
            Ok(()) => {
                let is_served = |flush: &ManualFlush| flush.began >= made && flush.ended == Some(Ok(()));
                assert!(
                    flushes.iter().any(is_served),
                    "acknowledged without a flush that began after the call"
                );
            }
            Err(error) => {
                let has_failed = |flush: &ManualFlush| flush.ended == Some(Err(error));
                assert!(flushes.iter().any(has_failed), "failed without a failure");
            }
        }
        drop(flushes);
        self.calls.swap_remove(index);
    }

    fn check(&self) {
        let flushes = self.device.flushes.borrow();
        let running = flushes.iter().filter(|flush| flush.ended.is_none() && !flush.is_dropped).count();
        assert!(running <= 1, "{running} flushes run");
        if let Some(failed) = self.queue.failure() {
            assert_eq!(flushes.last().and_then(|flush| flush.ended), Some(Err(failed)), "a failure is final");
        }
    }
}

proptest! {
    #[test]
    fn a_call_ends_after_a_flush_that_began_after_it_whatever_is_dropped(steps in steps()) {
        let (queue, device) = (FlushQueue::new(), ManualDevice::default());
        let mut model = Model { queue: &queue, device: &device, calls: Vec::new() };
        for step in steps {
            match step {
                Step::Call { is_polled } => {
                    let task = WokenTask::new(Box::pin(queue.flush(&device)));
                    model.calls.push(ModelCall { task, made: None });
                    if is_polled {
                        model.poll(model.calls.len() - 1);
                    }
                }
                Step::Poll(number) if !model.calls.is_empty() => model.poll(number % model.calls.len()),
                Step::Drop(number) if !model.calls.is_empty() => {
                    model.step();
                    model.calls.swap_remove(number % model.calls.len());
                }
                Step::Poll(_) | Step::Drop(_) => {}
                Step::End { fails } => {
                    model.step();
                    if let Some(running) = device.running() {
                        device.end(running, if fails { Err(DeviceError::Io(5)) } else { Ok(()) });
                    }
                }
            }
            model.check();
        }
        // Every call ends when flushes do: no wake-up is lost.
        for _ in 0..4 * (model.calls.len() + 2) {
            (0..model.calls.len()).rev().for_each(|index| model.poll(index));
            if let Some(running) = device.running() {
                device.end(running, Ok(()));
            }
        }
        prop_assert!(model.calls.is_empty(), "{} calls wait for ever", model.calls.len());
        prop_assert!(device.running().is_none());
    }
}

fn memory_device() -> Rc<dyn Device> {
    Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap()))
}

#[test]
fn callers_that_meet_a_flush_share_the_next_one() {
    let (queue, device) = (FlushQueue::new(), ManualDevice::default());
    let mut tasks: Vec<WokenTask> = (0..12).map(|_| WokenTask::new(Box::pin(queue.flush(&device)))).collect();
    tasks.iter_mut().for_each(|task| assert!(task.poll().is_pending()));
    device.end(0, Ok(()));
    let first: Vec<bool> = tasks.iter_mut().map(|task| task.poll().is_ready()).collect();
    assert_eq!(first.iter().position(|&is_ready| is_ready), Some(0));
    assert_eq!(first.iter().filter(|&&is_ready| is_ready).count(), 1, "the others came while it ran");
    device.end(1, Ok(()));
    // The leader first: it wakes the others.
    assert!(tasks[1..].iter_mut().all(|task| task.poll() == Poll::Ready(Ok(()))));
    assert_eq!(queue.flushes(), 2);
}

#[test]
fn lone_callers_flush_once_each_on_a_device_in_memory() {
    let (queue, device) = (FlushQueue::new(), memory_device());
    for call in 1..=3 {
        assert_eq!(block_on(queue.flush(&*device), || ()), Ok(()));
        assert_eq!(queue.flushes(), call);
    }
}

#[test]
fn a_failed_flush_fails_its_callers_and_all_later_ones() {
    let plan = FaultPlan::default();
    plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Slow { polls: 2 }).once(0));
    plan.add(FaultRule::always(OpFilter::Flush, InjectedFault::Error(5)).once(0));
    let (queue, device) = (FlushQueue::new(), FaultDevice::new(memory_device(), plan));
    let mut tasks: Vec<WokenTask> = (0..4).map(|_| WokenTask::new(Box::pin(queue.flush(&device)))).collect();
    let mut results = vec![None; 4];
    for _ in 0..8 {
        for (task, result) in tasks.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
            if let Poll::Ready(ended) = task.poll() {
                *result = Some(ended);
            }
        }
    }
    let failure = Err(DeviceError::Io(5));
    assert_eq!(results, [Some(Ok(())), Some(failure), Some(failure), Some(failure)]);
    // The plan has no fault left; the queue does not ask the device again.
    assert_eq!(block_on(queue.flush(&device), || ()), failure);
    assert_eq!((queue.flushes(), queue.failure()), (2, Some(DeviceError::Io(5))));
}

#[test]
fn a_leader_that_is_dropped_in_mid_flight_passes_the_lead_on() {
    let (queue, device) = (FlushQueue::new(), ManualDevice::default());
    let mut leader = WokenTask::new(Box::pin(queue.flush(&device)));
    let mut waiter = WokenTask::new(Box::pin(queue.flush(&device)));
    assert!(leader.poll().is_pending() && waiter.poll().is_pending());
    drop(leader);
    assert!(waiter.poll().is_pending());
    assert_eq!(device.flushes.borrow().len(), 2, "the waiter leads a flush of its own");
    device.end(1, Ok(()));
    assert_eq!(waiter.poll(), Poll::Ready(Ok(())));
}

#[test]
fn a_failure_that_the_device_has_reported_outlives_its_leader() {
    let (queue, device) = (FlushQueue::new(), ManualDevice::default());
    let mut leader = WokenTask::new(Box::pin(queue.flush(&device)));
    let mut waiter = WokenTask::new(Box::pin(queue.flush(&device)));
    assert!(leader.poll().is_pending() && waiter.poll().is_pending());
    device.end(0, Err(DeviceError::Io(5)));
    drop(leader);
    assert_eq!(waiter.poll(), Poll::Ready(Err(DeviceError::Io(5))));
}

#[test]
fn a_waiter_that_is_dropped_after_it_was_woken_to_lead_passes_the_lead_on() {
    let (queue, device) = (FlushQueue::new(), ManualDevice::default());
    let mut tasks: Vec<WokenTask> = (0..3).map(|_| WokenTask::new(Box::pin(queue.flush(&device)))).collect();
    tasks.iter_mut().for_each(|task| assert!(task.poll().is_pending()));
    device.end(0, Ok(()));
    assert_eq!(tasks[0].poll(), Poll::Ready(Ok(())));
    let woken = |task: &WokenTask| task.woken.0.load(Ordering::Relaxed);
    assert_eq!((woken(&tasks[1]), woken(&tasks[2])), (true, false));
    drop(tasks.remove(1));
    assert!(woken(&tasks[1]));
    assert!(tasks[1].poll().is_pending());
    device.end(1, Ok(()));
    assert_eq!(tasks[1].poll(), Poll::Ready(Ok(())));
}
