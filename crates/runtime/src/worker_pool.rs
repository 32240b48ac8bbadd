//! [`WorkerPool`]: a bounded pool of futures that each execute one job after another.
//!
//! ```text
//!          start(job)                  next_job() while the slot is empty
//!   idle ────────────▶ busy (polled) ────────────────────────────────────▶ idle
//! ```
//! In: jobs by [`WorkerPool::start`], wake-ups by wakers from any thread. A worker returns nothing: it stores its
//! result in memory that its reactor reads. [`TaskSlab`](crate::TaskSlab) takes a new future per task; the future of a
//! request has kilobytes, and writing it costs more than most steps of the request. A pool therefore moves each job
//! into the [`JobSlot`] of an existing future.
//!
//! Invariants: a worker has at most one job and is polled only while it has one; a wake-up after the end of its job
//! does nothing, or polls its next job once without need. Tested in `tests/tasks.rs`.

use crate::core_waker::CoreWaker;
use crate::executor::TaskId;
use crate::wake_set::WakeSet;
use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// The slot through which a worker receives its jobs.
pub struct JobSlot<J> {
    job: Cell<Option<J>>,
    is_idle: Cell<bool>,
}

impl<J> JobSlot<J> {
    /// Waits for the next job.
    ///
    /// REQUIRES: awaited by the worker's own future, only between two jobs.
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

/// Creates a worker's future, given its slot.
type WorkerFactory<J, F> = dyn Fn(Rc<JobSlot<J>>) -> F;

/// The workers of one type on one core, at most `capacity`.
pub struct WorkerPool<J, F> {
    capacity: usize,
    make_worker: Box<WorkerFactory<J, F>>,
    workers: Vec<Worker<J, F>>,
    wakers: Vec<Waker>,
    idle_workers: Vec<u32>,
    wake_set: Arc<WakeSet>,
}

impl<J, F: Future<Output = Infallible>> WorkerPool<J, F> {
    /// An empty pool of at most `capacity` workers. `make_worker` creates a future that executes jobs for ever. A
    /// wake-up notifies `core_waker`, the waker of the core that polls the pool.
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

    /// Assigns a job to an idle worker and polls it once immediately: a job that does not wait has ended when this
    /// returns. Creates a worker if none is idle.
    ///
    /// # Errors
    /// Returns the job if all workers are busy and the pool is at its capacity.
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

    /// Creates one more worker. Workers are never removed.
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

    /// Polls every busy worker woken since the last call, once each, in index order. Returns the number of wake-ups. A
    /// worker that wakes itself is polled again by the next call.
    ///
    /// REQUIRES: called after [`CoreWaker::begin_iteration`] of this reactor iteration.
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

    /// The number of busy workers.
    pub fn running(&self) -> usize {
        self.workers.len() - self.idle_workers.len()
    }

    /// Whether [`WorkerPool::start`] would fail.
    pub fn is_full(&self) -> bool {
        self.idle_workers.is_empty() && self.workers.len() == self.capacity
    }
}
