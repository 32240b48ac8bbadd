//! A bounded crew of futures that each carry out one job after the other.
//!
//! ```text
//!            start(job)                       next() while nothing is on the desk
//!   vacant ────────────▶ at work (polled) ───────────────────────────────────────▶ vacant
//! ```
//! In: jobs by [`WorkerPool::start`], wake-ups by wakers from any thread. Out: nothing; a worker leaves its result where
//! its reactor looks. Beside [`TaskSlab`](crate::Tasks), whose future is new for each piece of work: a request's future
//! is kilobytes, and to write one down for each request costs more than most of its steps. Here a job is laid on
//! the desk of a future that was made once.
//!
//! Invariants: a worker has at most one job; it is polled only while it has one; a wake-up after its job's end does
//! nothing, or polls its next job once more. Tested in `tests/tasks.rs`.

use crate::core_waker::CoreWaker;
use crate::executor::{TaskId, WakeSet};
use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Where a worker finds its jobs.
pub struct JobSlot<J> {
    job: Cell<Option<J>>,
    is_idle: Cell<bool>,
}

impl<J> JobSlot<J> {
    /// The next job, waited for. What a worker awaits between two jobs, and nowhere else.
    pub fn next_job(&self) -> impl Future<Output = J> + '_ {
        poll_fn(|_| match self.job.take() {
            Some(job) => Poll::Ready(job),
            None => {
                self.is_idle.set(true);
                Poll::Pending
            }
        })
    }
}

struct Worker<J, F> {
    job_slot: Rc<JobSlot<J>>,
    future: Pin<Box<F>>,
}

/// Makes one more worker's future, given its desk.
type WorkerFactory<J, F> = dyn Fn(Rc<JobSlot<J>>) -> F;

/// Workers of one kind on one core, at most `bound`.
pub struct WorkerPool<J, F> {
    capacity: usize,
    make_worker: Box<WorkerFactory<J, F>>,
    workers: Vec<Worker<J, F>>,
    wakers: Vec<Waker>,
    idle_workers: Vec<u32>,
    wake_set: Arc<WakeSet>,
}

impl<J, F: Future<Output = Infallible>> WorkerPool<J, F> {
    /// Nobody yet. `hire` makes a future that does jobs for ever; wake-ups ring `doorbell`, the one of the reactor
    /// that will poll them.
    pub fn new(
        capacity: usize,
        core_waker: Arc<CoreWaker>,
        make_worker: impl Fn(Rc<JobSlot<J>>) -> F + 'static,
    ) -> WorkerPool<J, F> {
        WorkerPool {
            capacity,
            make_worker: Box::new(make_worker),
            workers: Vec::with_capacity(capacity),
            wakers: Vec::with_capacity(capacity),
            idle_workers: Vec::with_capacity(capacity),
            wake_set: Arc::new(WakeSet::new(capacity, core_waker)),
        }
    }

    /// Gives a vacant worker a job and polls it once at once: a job that need not wait is over when this returns.
    /// Gives the job back when all are at work.
    pub fn start(&mut self, job: J) -> Result<TaskId, J> {
        let index = match self.idle_workers.pop() {
            Some(index) => index as usize,
            None if self.workers.len() < self.capacity => self.add_worker(),
            None => return Err(job),
        };
        let job_slot = &self.workers[index].job_slot;
        job_slot.is_idle.set(false);
        job_slot.job.set(Some(job));
        self.poll(index);
        Ok(TaskId(index as u32))
    }

    /// Hires one more, for good.
    fn add_worker(&mut self) -> usize {
        let index = self.workers.len();
        let job_slot = Rc::new(JobSlot { job: Cell::new(None), is_idle: Cell::new(true) });
        let future = Box::pin((self.make_worker)(Rc::clone(&job_slot)));
        self.workers.push(Worker { job_slot, future });
        self.wakers.push(WakeSet::waker(&self.wake_set, index));
        index
    }

    fn poll(&mut self, index: usize) {
        let Worker { job_slot, future } = &mut self.workers[index];
        if job_slot.is_idle.get() {
            return;
        }
        let Poll::Pending = future.as_mut().poll(&mut Context::from_waker(&self.wakers[index]));
        if job_slot.is_idle.get() {
            self.idle_workers.push(index as u32);
        }
    }

    /// Polls every worker that has a job and was woken since the last call, once each, in order. Gives how many were
    /// woken. One that wakes itself runs again in the next call.
    pub fn poll_ready(&mut self) -> usize {
        if !self.wake_set.is_any_set() {
            return 0;
        }
        let wake_set = Arc::clone(&self.wake_set);
        let mut woken = 0;
        wake_set.take(|index| {
            woken += 1;
            self.poll(index);
        });
        woken
    }

    /// How many are at work.
    pub fn running(&self) -> usize {
        self.workers.len() - self.idle_workers.len()
    }

    /// Whether `start` would give the job back.
    pub fn is_full(&self) -> bool {
        self.idle_workers.is_empty() && self.workers.len() == self.capacity
    }
}
