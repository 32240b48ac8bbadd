//! A task's access to its reactor: the time, timers, background tasks, the device handle.
//!
//! A [`ReactorHandle`] is cloned freely on its core and never leaves it. The reactor calls
//! [`ReactorHandle::begin_iteration`] once per iteration, [`ReactorHandle::poll_background`] with its other tasks, and
//! [`ReactorHandle::next_deadline`] before it sleeps. Tested in `tests/tasks.rs`.

use crate::core_waker::CoreWaker;
use crate::cpu_accounting::CpuTime;
use crate::device_queue::DeviceHandle;
use crate::executor::TaskSlab;
use crate::timer::Timers;
use octokv_base::Nanos;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

type BackgroundTask = Pin<Box<dyn Future<Output = ()>>>;

/// The limit of background tasks per core. They are merges, checkpoints and copies, never one per request.
pub const BACKGROUND_TASKS_MAX: usize = 1024;

/// A handle to the core's reactor. Clones share one reactor.
#[derive(Clone)]
pub struct ReactorHandle(Rc<HandleInner>);

struct HandleInner {
    now: Cell<Nanos>,
    timers: RefCell<Timers>,
    background: RefCell<TaskSlab<BackgroundTask>>,
    /// Tasks spawned since the last `poll_background`, which may be running (and borrows `background`).
    spawned: RefCell<VecDeque<BackgroundTask>>,
    devices: DeviceHandle,
    core_waker: Arc<CoreWaker>,
    cpu_time: CpuTime,
    /// The deadline that the reactor set by `request_wakeup_at`.
    requested_wakeup: Cell<Nanos>,
    /// The number of live [`InFlightGuard`]s.
    timed_operations: Cell<usize>,
}

impl ReactorHandle {
    /// The handle of the reactor that `core_waker` wakes and that polls `devices`.
    pub fn new(core_waker: Arc<CoreWaker>, devices: DeviceHandle, cpu_time: CpuTime) -> ReactorHandle {
        ReactorHandle(Rc::new(HandleInner {
            now: Cell::new(Nanos::ZERO),
            timers: RefCell::new(Timers::default()),
            background: RefCell::new(TaskSlab::new(BACKGROUND_TASKS_MAX, Arc::clone(&core_waker))),
            spawned: RefCell::new(VecDeque::new()),
            devices,
            core_waker,
            cpu_time,
            requested_wakeup: Cell::new(Nanos::NEVER),
            timed_operations: Cell::new(0),
        }))
    }

    /// The time at the start of this iteration.
    pub fn now(&self) -> Nanos {
        self.0.now.get()
    }

    /// A future that completes `duration` after [`ReactorHandle::now`].
    pub fn sleep(&self, duration: Nanos) -> Sleep {
        self.sleep_until(self.now() + duration)
    }

    /// A future that completes at `deadline`.
    pub fn sleep_until(&self, deadline: Nanos) -> Sleep {
        Sleep { inner: Rc::clone(&self.0), deadline, timer_key: None }
    }

    /// Spawns a detached background task. The task is boxed: for rare background work, not for requests.
    ///
    /// # Panics
    /// The next [`ReactorHandle::poll_background`] panics if more than [`BACKGROUND_TASKS_MAX`] tasks run.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let mut spawned = self.0.spawned.borrow_mut();
        assert!(
            spawned.len() < BACKGROUND_TASKS_MAX,
            "more than {BACKGROUND_TASKS_MAX} background tasks spawned"
        );
        spawned.push_back(Box::pin(future));
        drop(spawned);
        self.0.core_waker.notify();
    }

    /// The devices of this core.
    pub fn devices(&self) -> DeviceHandle {
        self.0.devices.clone()
    }

    /// Counts a device operation that completes by this core's timers instead of its device queue, until the guard is
    /// dropped.
    pub fn track_operation(&self) -> InFlightGuard {
        self.0.timed_operations.set(self.0.timed_operations.get() + 1);
        InFlightGuard(Rc::clone(&self.0))
    }

    /// The number of device operations of this core in flight, in its device queue or by its timers. While it is not 0,
    /// the core spins longer: see [`crate::IdlePolicy::spin_or_sleep`]. An operation that is in both counts twice.
    pub fn device_operations_in_flight(&self) -> usize {
        self.0.devices.in_flight() + self.0.timed_operations.get()
    }

    /// The waker of this reactor's core.
    pub fn core_waker(&self) -> &Arc<CoreWaker> {
        &self.0.core_waker
    }

    /// This core's processor time.
    pub fn cpu_time(&self) -> &CpuTime {
        &self.0.cpu_time
    }

    /// Begins an iteration: sets the time, clears the core's notification, fires due timers. Returns how many fired.
    ///
    /// REQUIRES: called before the iteration polls mailboxes and tasks, else a wake-up may be lost.
    pub fn begin_iteration(&self, now: Nanos) -> usize {
        self.0.now.set(now);
        self.0.core_waker.begin_iteration();
        let mut fired = 0;
        loop {
            let waker = self.0.timers.borrow_mut().pop_due(now);
            let Some(waker) = waker else { return fired };
            waker.wake();
            fired += 1;
        }
    }

    /// Starts the spawned background tasks and polls the woken ones. Returns how many were polled.
    ///
    /// # Panics
    /// If more than [`BACKGROUND_TASKS_MAX`] tasks run.
    pub fn poll_background(&self) -> usize {
        let mut tasks = self.0.background.borrow_mut();
        let mut polled = 0;
        loop {
            let Some(future) = self.0.spawned.borrow_mut().pop_front() else { break };
            assert!(tasks.spawn(future).is_ok(), "more than {BACKGROUND_TASKS_MAX} background tasks");
            polled += 1;
        }
        polled + tasks.poll_ready()
    }

    /// The number of background tasks that have not ended.
    pub fn background_count(&self) -> usize {
        self.0.background.borrow().running() + self.0.spawned.borrow().len()
    }

    /// Drops every background task, at the end of a reactor. Tasks hold handles and the handle holds the tasks: without
    /// this call the reference cycle would never be freed.
    pub fn shutdown(&self) {
        loop {
            let spawned = std::mem::take(&mut *self.0.spawned.borrow_mut());
            let none = TaskSlab::new(BACKGROUND_TASKS_MAX, Arc::clone(&self.0.core_waker));
            let running = self.0.background.replace(none);
            if spawned.is_empty() && running.running() == 0 {
                return;
            }
            // The tasks are dropped here, with nothing borrowed: a drop may spawn tasks or cancel timers.
        }
    }

    /// Requests an iteration at `deadline` at the latest. Replaces the previous request.
    pub fn request_wakeup_at(&self, deadline: Nanos) {
        self.0.requested_wakeup.set(deadline);
    }

    /// The latest time for the next iteration: the earliest timer or the requested wake-up.
    pub fn next_deadline(&self) -> Nanos {
        self.0.timers.borrow().next_deadline().min(self.0.requested_wakeup.get())
    }
}

/// Counts one device operation in flight that is not in the device queue; the drop ends it.
pub struct InFlightGuard(Rc<HandleInner>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.timed_operations.set(self.0.timed_operations.get() - 1);
    }
}

/// A timer as a future. Dropping it cancels the timer.
pub struct Sleep {
    inner: Rc<HandleInner>,
    deadline: Nanos,
    timer_key: Option<u32>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.inner.now.get() >= self.deadline {
            return Poll::Ready(());
        }
        let inner = Rc::clone(&self.inner);
        match self.timer_key {
            Some(key) => inner.timers.borrow_mut().set_waker(key, context.waker()),
            None => {
                let key = inner.timers.borrow_mut().insert(self.deadline, context.waker().clone());
                self.timer_key = Some(key);
            }
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.timer_key {
            self.inner.timers.borrow_mut().remove(key);
        }
    }
}
