//! A bounded crew of futures that each carry out one job after the other.
//!
//! ```text
//!            start(job)                       next() while nothing is on the desk
//!   vacant ────────────▶ at work (polled) ───────────────────────────────────────▶ vacant
//! ```
//! In: jobs by [`Workers::start`], wake-ups by wakers from any thread. Out: nothing; a worker leaves its result where
//! its reactor looks. Beside [`Tasks`](crate::Tasks), whose future is new for each piece of work: a request's future
//! is kilobytes, and to write one down for each request costs more than most of its steps. Here a job is laid on
//! the desk of a future that was made once.
//!
//! Invariants: a worker has at most one job; it is polled only while it has one; a wake-up after its job's end does
//! nothing, or polls its next job once more. Tested in `tests/tasks.rs`.

use crate::core_waker::Doorbell;
use crate::executor::{TaskId, WakeBits};
use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Where a worker finds its jobs.
pub struct Desk<J> {
    job: Cell<Option<J>>,
    is_vacant: Cell<bool>,
}

impl<J> Desk<J> {
    /// The next job, waited for. What a worker awaits between two jobs, and nowhere else.
    pub fn next(&self) -> impl Future<Output = J> + '_ {
        poll_fn(|_| match self.job.take() {
            Some(job) => Poll::Ready(job),
            None => {
                self.is_vacant.set(true);
                Poll::Pending
            }
        })
    }
}

struct Worker<J, F> {
    desk: Rc<Desk<J>>,
    course: Pin<Box<F>>,
}

/// Makes one more worker's future, given its desk.
type Hire<J, F> = dyn Fn(Rc<Desk<J>>) -> F;

/// Workers of one kind on one core, at most `bound`.
pub struct Workers<J, F> {
    bound: usize,
    hire: Box<Hire<J, F>>,
    workers: Vec<Worker<J, F>>,
    wakers: Vec<Waker>,
    vacant: Vec<u32>,
    bits: Arc<WakeBits>,
}

impl<J, F: Future<Output = Infallible>> Workers<J, F> {
    /// Nobody yet. `hire` makes a future that does jobs for ever; wake-ups ring `doorbell`, the one of the reactor
    /// that will poll them.
    pub fn new(
        bound: usize,
        doorbell: Arc<Doorbell>,
        hire: impl Fn(Rc<Desk<J>>) -> F + 'static,
    ) -> Workers<J, F> {
        Workers {
            bound,
            hire: Box::new(hire),
            workers: Vec::with_capacity(bound),
            wakers: Vec::with_capacity(bound),
            vacant: Vec::with_capacity(bound),
            bits: Arc::new(WakeBits::new(bound, doorbell)),
        }
    }

    /// Gives a vacant worker a job and polls it once at once: a job that need not wait is over when this returns.
    /// Gives the job back when all are at work.
    pub fn start(&mut self, job: J) -> Result<TaskId, J> {
        let index = match self.vacant.pop() {
            Some(index) => index as usize,
            None if self.workers.len() < self.bound => self.grow(),
            None => return Err(job),
        };
        let desk = &self.workers[index].desk;
        desk.is_vacant.set(false);
        desk.job.set(Some(job));
        self.poll(index);
        Ok(TaskId(index as u32))
    }

    /// Hires one more, for good.
    fn grow(&mut self) -> usize {
        let index = self.workers.len();
        let desk = Rc::new(Desk { job: Cell::new(None), is_vacant: Cell::new(true) });
        let course = Box::pin((self.hire)(Rc::clone(&desk)));
        self.workers.push(Worker { desk, course });
        self.wakers.push(WakeBits::waker(&self.bits, index));
        index
    }

    fn poll(&mut self, index: usize) {
        let Worker { desk, course } = &mut self.workers[index];
        if desk.is_vacant.get() {
            return;
        }
        let Poll::Pending = course.as_mut().poll(&mut Context::from_waker(&self.wakers[index]));
        if desk.is_vacant.get() {
            self.vacant.push(index as u32);
        }
    }

    /// Polls every worker that has a job and was woken since the last call, once each, in order. Gives how many were
    /// woken. One that wakes itself runs again in the next call.
    pub fn poll_ready(&mut self) -> usize {
        if !self.bits.any() {
            return 0;
        }
        let bits = Arc::clone(&self.bits);
        let mut woken = 0;
        bits.take(|index| {
            woken += 1;
            self.poll(index);
        });
        woken
    }

    /// How many are at work.
    pub fn running(&self) -> usize {
        self.workers.len() - self.vacant.len()
    }

    /// Whether `start` would give the job back.
    pub fn is_full(&self) -> bool {
        self.vacant.is_empty() && self.workers.len() == self.bound
    }
}
