//! What a task knows of its reactor: the time, timers, background tasks, the device channel.
//!
//! A [`ReactorHandle`] is cloned freely on its core and never leaves it. The reactor drives it:
//! [`ReactorHandle::begin_turn`] once per turn, [`ReactorHandle::run_background`] with the other tasks,
//! [`ReactorHandle::next_deadline`] before it sleeps.

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

/// The most background tasks a core may have: merges, checkpoints, copies; never one per request.
pub const BACKGROUND_TASKS_MAX: usize = 1024;

/// One reactor, as its tasks know it.
#[derive(Clone)]
pub struct ReactorHandle(Rc<HandleInner>);

struct HandleInner {
    now: Cell<Nanos>,
    timers: RefCell<Timers>,
    background: RefCell<TaskSlab<BackgroundTask>>,
    /// Spawned by a task while the tasks above are being polled.
    spawned: RefCell<VecDeque<BackgroundTask>>,
    devices: DeviceHandle,
    core_waker: Arc<CoreWaker>,
    cpu_time: CpuTime,
    /// When the reactor itself wants its next turn at the latest.
    requested_wakeup: Cell<Nanos>,
    /// Device operations that are timed here and not answered by the channel.
    timed_operations: Cell<usize>,
}

impl ReactorHandle {
    /// The handle of a reactor that is woken by `doorbell`, on whose core devices go by `channel`.
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

    /// The time at the start of this turn.
    pub fn now(&self) -> Nanos {
        self.0.now.get()
    }

    /// A future that is over `span` after now.
    pub fn sleep(&self, span: Nanos) -> Sleep {
        self.sleep_until(self.now() + span)
    }

    /// A future that is over at `deadline`.
    pub fn sleep_until(&self, deadline: Nanos) -> Sleep {
        Sleep { inner: Rc::clone(&self.0), deadline, timer_key: None }
    }

    /// Starts a task that nobody waits for. Boxed: for rare background work, not for requests.
    ///
    /// # Panics
    /// When more than [`BACKGROUND_TASKS_MAX`] run at the next turn, which only a bug of ours can cause.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.0.spawned.borrow_mut().push_back(Box::pin(future));
        self.0.core_waker.notify();
    }

    /// The devices of this core.
    pub fn devices(&self) -> DeviceHandle {
        self.0.devices.clone()
    }

    /// Counts an operation of a device that answers by this core's timers, for as long as what is given lives.
    pub fn track_operation(&self) -> InFlightGuard {
        self.0.timed_operations.set(self.0.timed_operations.get() + 1);
        InFlightGuard(Rc::clone(&self.0))
    }

    /// How many device operations of this core have not been answered, by its channel or by its timers. While there
    /// are any, the core must not be slow to wake: see [`crate::IdlePolicy::rest`]. One that both are asked for counts twice.
    pub fn device_operations_in_flight(&self) -> usize {
        self.0.devices.in_flight() + self.0.timed_operations.get()
    }

    /// What wakes this reactor.
    pub fn core_waker(&self) -> &Arc<CoreWaker> {
        &self.0.core_waker
    }

    /// Where this core's time goes.
    pub fn cpu_time(&self) -> &CpuTime {
        &self.0.cpu_time
    }

    /// Begins a turn: sets the time, answers the doorbell, fires timers that are due. Gives how many
    /// fired. Call it before looking at mailboxes and tasks.
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

    /// Starts new background tasks and polls those that were woken. Gives how many were polled.
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

    /// How many background tasks are not over.
    pub fn background_count(&self) -> usize {
        self.0.background.borrow().running() + self.0.spawned.borrow().len()
    }

    /// Drops every background task. For the end of a reactor: tasks hold handles, and the handle holds
    /// the tasks, so without this neither would ever be freed.
    pub fn shutdown(&self) {
        loop {
            let spawned = std::mem::take(&mut *self.0.spawned.borrow_mut());
            let none = TaskSlab::new(BACKGROUND_TASKS_MAX, Arc::clone(&self.0.core_waker));
            let running = self.0.background.replace(none);
            if spawned.is_empty() && running.running() == 0 {
                return;
            }
            // Dropped here, with nothing borrowed: what a task drops may spawn or cancel timers.
        }
    }

    /// Asks for a turn at `deadline` at the latest, timers or not; replaces what was asked before.
    pub fn request_wakeup_at(&self, deadline: Nanos) {
        self.0.requested_wakeup.set(deadline);
    }

    /// When the next turn is due at the latest: the earliest timer or wish.
    pub fn next_deadline(&self) -> Nanos {
        self.0.timers.borrow().next_deadline().min(self.0.requested_wakeup.get())
    }
}

/// A device operation that the channel does not know of. Dropping it ends it.
pub struct InFlightGuard(Rc<HandleInner>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.timed_operations.set(self.0.timed_operations.get() - 1);
    }
}

/// A timer as a future. Dropping it forgets the timer.
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
