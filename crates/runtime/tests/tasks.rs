//! Tasks, timers and background work of one core: bounds, order, and no allocation per task.

use octokv_base::{Buffer, Nanos};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation, JobSlot,
    ReactorHandle, TaskSlab, WorkerPool, yield_now,
};
use octokv_sys::counting_allocator::{self, CountingAllocator};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::rc::Rc;
use std::task::{Poll, Waker};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A device queue that completes each operation at the poll after next.
#[derive(Default)]
struct DelayedEcho {
    waiting: Vec<(u32, IoCompletion)>,
    sent: Vec<(u32, IoCompletion)>,
}

impl DeviceQueue for DelayedEcho {
    fn open(&mut self, _: &DeviceSource) -> io::Result<FileId> {
        Ok(FileId(0))
    }
    fn close(&mut self, _: FileId) {}
    fn submit(&mut self, token: u32, _: FileId, operation: IoOperation) {
        let buffer = match operation {
            IoOperation::Read { buffer, .. } | IoOperation::Write { buffer, .. } => Some(buffer),
            IoOperation::WriteVectored { .. } | IoOperation::Flush | IoOperation::Trim { .. } => None,
        };
        self.waiting.push((token, IoCompletion { buffer, result: Ok(()) }));
    }
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        completions.append(&mut self.sent);
        self.sent.append(&mut self.waiting);
    }
    fn in_flight(&self) -> usize {
        self.waiting.len() + self.sent.len()
    }
}

fn handle() -> ReactorHandle {
    ReactorHandle::new(
        CoreWaker::without_eventfd(),
        DeviceHandle::new(Box::new(DelayedEcho::default()), 64),
        CpuTime::measured(),
    )
}

#[test]
fn a_task_that_never_waits_completes_in_spawn() {
    let mut tasks = TaskSlab::new(1, CoreWaker::without_eventfd());
    let done = Rc::new(Cell::new(0));
    for _ in 0..3 {
        let done = Rc::clone(&done);
        assert!(tasks.spawn(async move { done.set(done.get() + 1) }).is_ok());
    }
    assert_eq!((done.get(), tasks.running()), (3, 0));
}

#[test]
fn a_full_slab_returns_the_future_and_freed_slots_are_reused() {
    let mut tasks = TaskSlab::new(2, CoreWaker::without_eventfd());
    let wakers: Rc<RefCell<Vec<Waker>>> = Rc::default();
    let gates: Vec<Rc<Cell<bool>>> = (0..3).map(|_| Rc::default()).collect();
    let wait_for = |gate: &Rc<Cell<bool>>| {
        let (gate, wakers) = (Rc::clone(gate), Rc::clone(&wakers));
        poll_fn(move |context| {
            if gate.get() {
                return Poll::Ready(());
            }
            wakers.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
    };
    let first = tasks.spawn(wait_for(&gates[0])).ok().unwrap();
    assert!(tasks.spawn(wait_for(&gates[1])).is_ok());
    assert!(tasks.is_full());
    let Err(refused) = tasks.spawn(wait_for(&gates[2])) else { panic!("the slab is full") };
    gates[0].set(true);
    assert_eq!(tasks.poll_ready(), 0, "no task was woken");
    wakers.borrow()[0].wake_by_ref();
    wakers.borrow()[0].wake_by_ref();
    assert_eq!(tasks.poll_ready(), 1, "two wake-ups, one poll");
    assert_eq!(tasks.spawn(refused).ok(), Some(first));
    wakers.borrow()[0].wake_by_ref();
    assert_eq!(tasks.poll_ready(), 1, "a waker of the slot's previous task causes one extra poll");
    assert_eq!(tasks.running(), 2);
}

#[test]
fn a_worker_runs_jobs_one_by_one_and_is_polled_only_while_it_has_one() {
    let wakers: Rc<RefCell<Vec<Waker>>> = Rc::default();
    let (polls, made): (Rc<Cell<u32>>, Rc<Cell<u32>>) = Default::default();
    let done: Rc<RefCell<Vec<u32>>> = Rc::default();
    let (own_wakers, own_polls, own_done, own_made) =
        (Rc::clone(&wakers), Rc::clone(&polls), Rc::clone(&done), Rc::clone(&made));
    // A job `n` ends at its n-th poll.
    let mut workers = WorkerPool::new(2, CoreWaker::without_eventfd(), move |slot: Rc<JobSlot<u32>>| {
        own_made.set(own_made.get() + 1);
        let (wakers, polls, done) = (Rc::clone(&own_wakers), Rc::clone(&own_polls), Rc::clone(&own_done));
        async move {
            loop {
                let job = slot.next_job().await;
                let mut left = job;
                poll_fn(|context| {
                    polls.set(polls.get() + 1);
                    wakers.borrow_mut().push(context.waker().clone());
                    left = left.saturating_sub(1);
                    if left == 0 { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                done.borrow_mut().push(job);
            }
        }
    });
    assert!(workers.start(1).is_ok());
    assert_eq!((done.borrow().as_slice(), workers.running(), made.get()), ([1].as_slice(), 0, 1));
    let first = workers.start(3).unwrap();
    let second = workers.start(2).unwrap();
    assert!(workers.is_full() && first != second);
    assert_eq!((workers.start(9), workers.running(), made.get()), (Err(9), 2, 2));
    assert_eq!(workers.poll_ready(), 0, "no task was woken");
    wakers.borrow()[2].wake_by_ref();
    wakers.borrow()[2].wake_by_ref();
    assert_eq!((workers.poll_ready(), done.borrow().as_slice()), (1, [1, 2].as_slice()));
    let before = polls.get();
    wakers.borrow()[2].wake_by_ref();
    assert_eq!((workers.poll_ready(), polls.get()), (1, before), "an idle worker is not polled");
    assert_eq!(workers.start(1), Ok(second), "an idle worker is reused");
    assert_eq!((workers.running(), made.get()), (1, 2));
}

#[test]
fn a_steady_stream_of_tasks_and_operations_allocates_nothing() {
    let handle = handle();
    let devices = handle.devices();
    let mut tasks = TaskSlab::new(64, CoreWaker::without_eventfd());
    let spare: Rc<RefCell<Vec<Buffer>>> = Rc::default();
    spare.borrow_mut().extend((0..64).map(|_| Buffer::zeroed(4096)));
    let finished = Rc::new(Cell::new(0u64));
    let file = FileId(0);
    let task = |handle: &ReactorHandle| {
        let (devices, handle) = (devices.clone(), handle.clone());
        let (spare, finished) = (Rc::clone(&spare), Rc::clone(&finished));
        async move {
            let buffer = spare.borrow_mut().pop().unwrap();
            let done = devices.submit(file, IoOperation::Write { offset: 0, buffer }).await;
            handle.sleep(Nanos(1)).await;
            yield_now().await;
            spare.borrow_mut().push(done.buffer.unwrap());
            finished.set(finished.get() + 1);
        }
    };
    let mut iterate = |now: u64| {
        handle.begin_iteration(Nanos(now));
        while !tasks.is_full() {
            assert!(tasks.spawn(task(&handle)).is_ok());
        }
        devices.poll();
        tasks.poll_ready();
    };
    (0..1_000).for_each(&mut iterate);
    let before = (counting_allocator::thread_allocation_count(), finished.get());
    (1_000..11_000).for_each(&mut iterate);
    assert!(finished.get() - before.1 > 100_000, "{} tasks", finished.get() - before.1);
    assert_eq!(counting_allocator::thread_allocation_count() - before.0, 0);
}

#[test]
fn timers_wake_their_tasks_in_order_and_only_when_due() {
    let handle = handle();
    let mut tasks = TaskSlab::new(8, CoreWaker::without_eventfd());
    let order: Rc<RefCell<Vec<u64>>> = Rc::default();
    handle.begin_iteration(Nanos(100));
    for span in [30, 10, 20] {
        let (sleep, order) = (handle.sleep(Nanos(span)), Rc::clone(&order));
        let task = async move {
            sleep.await;
            order.borrow_mut().push(span);
        };
        assert!(tasks.spawn(task).is_ok());
    }
    assert_eq!(handle.next_deadline(), Nanos(110));
    for now in 101..=140 {
        handle.begin_iteration(Nanos(now));
        tasks.poll_ready();
        let due = [10, 20, 30].iter().filter(|&&span| 100 + span <= now).count();
        assert_eq!(order.borrow().len(), due, "at {now}");
    }
    assert_eq!(*order.borrow(), [10, 20, 30]);
    assert_eq!(handle.next_deadline(), Nanos::NEVER);
    handle.request_wakeup_at(Nanos(7));
    assert_eq!(handle.next_deadline(), Nanos(7));
}

#[test]
fn a_dropped_sleep_leaves_no_timer() {
    let handle = handle();
    let mut sleep = Box::pin(handle.sleep(Nanos(10)));
    let mut context = std::task::Context::from_waker(Waker::noop());
    assert!(sleep.as_mut().poll(&mut context).is_pending());
    assert_eq!(handle.next_deadline(), Nanos(10));
    drop(sleep);
    assert_eq!(handle.next_deadline(), Nanos::NEVER);
}

#[test]
fn background_tasks_may_start_others_and_end_with_the_reactor() {
    let handle = handle();
    let done = Rc::new(Cell::new(0));
    let (inner_handle, inner_done) = (handle.clone(), Rc::clone(&done));
    handle.spawn(async move {
        let done = Rc::clone(&inner_done);
        inner_handle.spawn(async move { done.set(done.get() + 1) });
        inner_done.set(inner_done.get() + 1);
        inner_handle.sleep(Nanos::from_secs(1)).await;
    });
    while handle.poll_background() > 0 {}
    assert_eq!((done.get(), handle.background_count()), (2, 1));
    handle.shutdown();
    assert_eq!((Rc::strong_count(&done), handle.background_count()), (1, 0));
    assert_eq!(handle.next_deadline(), Nanos::NEVER, "its timer was cancelled");
}
