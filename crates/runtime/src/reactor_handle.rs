//! What a task knows of its reactor: the time, timers, background tasks, the device channel.
//!
//! A [`Handle`] is cloned freely on its core and never leaves it. The reactor drives it:
//! [`Handle::begin_turn`] once per turn, [`Handle::run_background`] with the other tasks,
//! [`Handle::next_deadline`] before it sleeps.

use crate::core_waker::Doorbell;
use crate::cpu_accounting::Busy;
use crate::device_queue::Channel;
use crate::executor::Tasks;
use crate::timer::Timers;
use octokv_base::Nanos;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

type Background = Pin<Box<dyn Future<Output = ()>>>;

/// The most background tasks a core may have: merges, checkpoints, copies; never one per request.
pub const BACKGROUND_TASKS_MAX: usize = 1024;

/// One reactor, as its tasks know it.
#[derive(Clone)]
pub struct Handle(Rc<Core>);

struct Core {
    now: Cell<Nanos>,
    timers: RefCell<Timers>,
    background: RefCell<Tasks<Background>>,
    /// Spawned by a task while the tasks above are being polled.
    incoming: RefCell<VecDeque<Background>>,
    channel: Channel,
    doorbell: Arc<Doorbell>,
    busy: Busy,
    /// When the reactor itself wants its next turn at the latest.
    wanted: Cell<Nanos>,
    /// Device operations that are timed here and not answered by the channel.
    underway: Cell<usize>,
}

impl Handle {
    /// The handle of a reactor that is woken by `doorbell`, on whose core devices go by `channel`.
    pub fn new(doorbell: Arc<Doorbell>, channel: Channel, busy: Busy) -> Handle {
        Handle(Rc::new(Core {
            now: Cell::new(Nanos::ZERO),
            timers: RefCell::new(Timers::default()),
            background: RefCell::new(Tasks::new(BACKGROUND_TASKS_MAX, Arc::clone(&doorbell))),
            incoming: RefCell::new(VecDeque::new()),
            channel,
            doorbell,
            busy,
            wanted: Cell::new(Nanos::NEVER),
            underway: Cell::new(0),
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
        Sleep { core: Rc::clone(&self.0), deadline, key: None }
    }

    /// Starts a task that nobody waits for. Boxed: for rare background work, not for requests.
    ///
    /// # Panics
    /// When more than [`BACKGROUND_TASKS_MAX`] run at the next turn, which only a bug of ours can cause.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.0.incoming.borrow_mut().push_back(Box::pin(future));
        self.0.doorbell.ring();
    }

    /// The devices of this core.
    pub fn channel(&self) -> Channel {
        self.0.channel.clone()
    }

    /// Counts an operation of a device that answers by this core's timers, for as long as what is given lives.
    pub fn underway(&self) -> Underway {
        self.0.underway.set(self.0.underway.get() + 1);
        Underway(Rc::clone(&self.0))
    }

    /// How many device operations of this core have not been answered, by its channel or by its timers. While there
    /// are any, the core must not be slow to wake: see [`crate::Idle::rest`]. One that both are asked for counts twice.
    pub fn device_operations(&self) -> usize {
        self.0.channel.in_flight() + self.0.underway.get()
    }

    /// What wakes this reactor.
    pub fn doorbell(&self) -> &Arc<Doorbell> {
        &self.0.doorbell
    }

    /// Where this core's time goes.
    pub fn busy(&self) -> &Busy {
        &self.0.busy
    }

    /// Begins a turn: sets the time, answers the doorbell, fires timers that are due. Gives how many
    /// fired. Call it before looking at mailboxes and tasks.
    pub fn begin_turn(&self, now: Nanos) -> usize {
        self.0.now.set(now);
        self.0.doorbell.begin_turn();
        let mut fired = 0;
        loop {
            let waker = self.0.timers.borrow_mut().fire(now);
            let Some(waker) = waker else { return fired };
            waker.wake();
            fired += 1;
        }
    }

    /// Starts new background tasks and polls those that were woken. Gives how many were polled.
    pub fn run_background(&self) -> usize {
        let mut tasks = self.0.background.borrow_mut();
        let mut polled = 0;
        loop {
            let Some(future) = self.0.incoming.borrow_mut().pop_front() else { break };
            assert!(tasks.spawn(future).is_ok(), "more than {BACKGROUND_TASKS_MAX} background tasks");
            polled += 1;
        }
        polled + tasks.poll_ready()
    }

    /// How many background tasks are not over.
    pub fn background_running(&self) -> usize {
        self.0.background.borrow().running() + self.0.incoming.borrow().len()
    }

    /// Drops every background task. For the end of a reactor: tasks hold handles, and the handle holds
    /// the tasks, so without this neither would ever be freed.
    pub fn shutdown(&self) {
        loop {
            let incoming = std::mem::take(&mut *self.0.incoming.borrow_mut());
            let none = Tasks::new(BACKGROUND_TASKS_MAX, Arc::clone(&self.0.doorbell));
            let running = self.0.background.replace(none);
            if incoming.is_empty() && running.running() == 0 {
                return;
            }
            // Dropped here, with nothing borrowed: what a task drops may spawn or cancel timers.
        }
    }

    /// Asks for a turn at `deadline` at the latest, timers or not; replaces what was asked before.
    pub fn want_turn_at(&self, deadline: Nanos) {
        self.0.wanted.set(deadline);
    }

    /// When the next turn is due at the latest: the earliest timer or wish.
    pub fn next_deadline(&self) -> Nanos {
        self.0.timers.borrow().next().min(self.0.wanted.get())
    }
}

/// A device operation that the channel does not know of. Dropping it ends it.
pub struct Underway(Rc<Core>);

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.underway.set(self.0.underway.get() - 1);
    }
}

/// A timer as a future. Dropping it forgets the timer.
pub struct Sleep {
    core: Rc<Core>,
    deadline: Nanos,
    key: Option<u32>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.core.now.get() >= self.deadline {
            return Poll::Ready(());
        }
        let core = Rc::clone(&self.core);
        match self.key {
            Some(key) => core.timers.borrow_mut().set_waker(key, context.waker()),
            None => {
                let key = core.timers.borrow_mut().insert(self.deadline, context.waker().clone());
                self.key = Some(key);
            }
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.core.timers.borrow_mut().remove(key);
        }
    }
}
