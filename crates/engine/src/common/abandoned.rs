//! Operations whose futures were dropped before their end, which continue until they have ended.
//!
//! An operation that is half done cannot be undone by a drop: its record may be on its way to the device, other writers may
//! share its journal batch, and its key is locked until the change is in the index. So its future owns what it needs, and a
//! drop hands it over to this list.
//!
//! ```text
//!   Detachable, DetachableJob ──polled to its end──▶ result
//!       │ dropped after its first poll
//!       ▼
//!   AbandonedOperations ──▶ run ──▶ ended: locks, space and buffers are released; the write happened or did not
//! ```
//! Invariants: an operation that was never polled has done nothing, and is dropped; one that was handed over is polled
//! again before anything else is expected of it, since it had a waker that may be gone; the volume counts it until it has
//! ended. There are at most as many as operations that callers began and whose memory the buffer pool gave.

use crate::bug_injection::{self, InjectedBug};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

/// Abandoned operations of a volume that have not ended, on any core.
#[derive(Clone, Debug, Default)]
pub struct AbandonedCount(Arc<AtomicUsize>);

impl AbandonedCount {
    /// Whether there are none.
    pub fn is_zero(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// Counts one operation until it is dropped.
struct CountGuard(AbandonedCount);

impl CountGuard {
    fn new(count: &AbandonedCount) -> CountGuard {
        count.0.fetch_add(1, Ordering::Relaxed);
        CountGuard(count.clone())
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

/// An operation without its caller.
type AbandonedOperation = Pin<Box<dyn Future<Output = ()>>>;

/// The abandoned operations of one core's handle.
pub struct AbandonedOperations {
    count: AbandonedCount,
    /// Handed over, and not yet seen by [`AbandonedOperations::run`].
    incoming: RefCell<Vec<AbandonedOperation>>,
    /// The task that runs them.
    runner: Cell<Option<Waker>>,
}

impl AbandonedOperations {
    /// None, of a volume whose abandoned operations `count` counts.
    pub fn new(count: AbandonedCount) -> AbandonedOperations {
        AbandonedOperations { count, incoming: RefCell::default(), runner: Cell::default() }
    }

    /// Hands over an operation, whose result is not awaited.
    pub fn push<T>(&self, operation: impl Future<Output = T> + 'static) {
        let guard = CountGuard::new(&self.count);
        self.incoming.borrow_mut().push(Box::pin(async move {
            operation.await;
            drop(guard);
        }));
        if let Some(runner) = self.runner.take() {
            runner.wake();
        }
    }

    /// An operation that is handed over if its future is dropped half done.
    pub fn detachable<F: Future + 'static>(&self, operation: F) -> Detachable<'_, F> {
        Detachable { abandoned: self, operation: Some(Box::pin(operation)), has_begun: false }
    }

    /// Polls the operations that were handed over until each has ended. The returned future never completes: more may come.
    pub async fn run(&self) {
        let mut running = FuturesUnordered::new();
        poll_fn(|context| -> Poll<()> {
            self.runner.set(Some(context.waker().clone()));
            running.extend(self.incoming.take());
            while let Poll::Ready(Some(())) = running.poll_next_unpin(context) {}
            Poll::Pending
        })
        .await;
    }

    /// Whether the volume has operations, of any core, that have not ended.
    pub fn has_any(&self) -> bool {
        !self.count.is_zero()
    }

    /// Drops what nothing has run: as far as the volume can tell, a crash of this core.
    pub fn clear(&self) {
        drop(self.incoming.take());
    }
}

/// A future that may be dropped at any time ([`AbandonedOperations::detachable`]).
pub struct Detachable<'a, F: Future + 'static> {
    abandoned: &'a AbandonedOperations,
    /// `None` once it has ended.
    operation: Option<Pin<Box<F>>>,
    has_begun: bool,
}

impl<F: Future + 'static> Future for Detachable<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.has_begun = true;
        let operation = self.operation.as_mut().expect("not polled after its end");
        let polled = operation.as_mut().poll(context);
        if polled.is_ready() {
            self.operation = None;
        }
        polled
    }
}

impl<F: Future + 'static> Drop for Detachable<'_, F> {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.take()
            && self.has_begun
        {
            match bug_injection::is_injected(InjectedBug::LoseAbandoned) {
                true => std::mem::forget(operation),
                false => self.abandoned.push(operation),
            }
        }
    }
}

/// Runners that a pool keeps for its next operations: at least as many as a core usually has in progress.
const IDLE_RUNNERS_MAX: usize = 256;

/// The cell through which a runner gets its next operation and gives back the result.
pub struct RunnerCell<J, R> {
    job: Cell<Option<J>>,
    result: Cell<Option<R>>,
}

impl<J, R> RunnerCell<J, R> {
    /// Waits for the next operation. REQUIRES: awaited by the runner only, between two operations.
    pub fn next_job(&self) -> impl Future<Output = J> + '_ {
        poll_fn(|_| self.job.take().map_or(Poll::Pending, Poll::Ready))
    }

    /// Ends the operation.
    pub fn finish(&self, result: R) {
        self.result.set(Some(result));
    }
}

/// A future that executes one operation after another, for ever.
struct Runner<J, R> {
    cell: Rc<RunnerCell<J, R>>,
    future: Pin<Box<dyn Future<Output = Infallible>>>,
}

impl<J, R> Runner<J, R> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<R> {
        let Poll::Pending = self.future.as_mut().poll(context);
        self.cell.result.take().map_or(Poll::Pending, Poll::Ready)
    }
}

/// Operations of one type that continue without their callers, as [`Detachable`], but whose futures are allocated once and
/// execute one operation after another: the future of a put has kilobytes.
pub struct RunnerPool<J, R> {
    make_runner: Box<MakeRunner<J, R>>,
    /// Runners without an operation; at most [`IDLE_RUNNERS_MAX`].
    idle: RefCell<Vec<Runner<J, R>>>,
}

/// Makes the future of a runner, which takes its operations from the cell.
type MakeRunner<J, R> = dyn Fn(Rc<RunnerCell<J, R>>) -> Pin<Box<dyn Future<Output = Infallible>>>;

impl<J: 'static, R: 'static> RunnerPool<J, R> {
    /// A pool whose runners `make_runner` makes.
    pub fn new<F: Future<Output = Infallible> + 'static>(
        make_runner: impl Fn(Rc<RunnerCell<J, R>>) -> F + 'static,
    ) -> RunnerPool<J, R> {
        RunnerPool {
            make_runner: Box::new(move |cell| Box::pin(make_runner(cell))),
            idle: RefCell::default(),
        }
    }

    /// Begins an operation, which `abandoned` gets if the returned future is dropped before its end. REQUIRES: the caller
    /// polls it at once, as an operation that was never polled is dropped.
    pub fn begin<'a>(&'a self, abandoned: &'a AbandonedOperations, job: J) -> DetachableJob<'a, J, R> {
        let runner = self.idle.borrow_mut().pop().unwrap_or_else(|| {
            let cell = Rc::new(RunnerCell { job: Cell::new(None), result: Cell::new(None) });
            Runner { future: (self.make_runner)(Rc::clone(&cell)), cell }
        });
        runner.cell.job.set(Some(job));
        DetachableJob { pool: self, abandoned, runner: Some(runner) }
    }
}

/// The future of an operation of a [`RunnerPool`], which may be dropped at any time.
pub struct DetachableJob<'a, J: 'static, R: 'static> {
    pool: &'a RunnerPool<J, R>,
    abandoned: &'a AbandonedOperations,
    /// `None` once the operation has ended.
    runner: Option<Runner<J, R>>,
}

impl<J: 'static, R: 'static> Future for DetachableJob<'_, J, R> {
    type Output = R;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<R> {
        let polled = self.runner.as_mut().expect("not polled after its end").poll(context);
        if polled.is_ready()
            && let Some(runner) = self.runner.take()
        {
            let mut idle = self.pool.idle.borrow_mut();
            if idle.len() < IDLE_RUNNERS_MAX {
                idle.push(runner);
            }
        }
        polled
    }
}

impl<J: 'static, R: 'static> Drop for DetachableJob<'_, J, R> {
    fn drop(&mut self) {
        let Some(mut runner) = self.runner.take() else { return };
        if let Some(never_begun) = runner.cell.job.take() {
            return drop(never_begun);
        }
        let rest = poll_fn(move |context| runner.poll(context));
        match bug_injection::is_injected(InjectedBug::LoseAbandoned) {
            true => std::mem::forget(rest),
            false => self.abandoned.push(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a test opens; it wakes who waited last.
    #[derive(Default)]
    struct Gate {
        is_open: Cell<bool>,
        waiter: Cell<Option<Waker>>,
    }

    impl Gate {
        fn open(&self) {
            self.is_open.set(true);
            self.waiter.take().into_iter().for_each(Waker::wake);
        }
    }

    /// A future that ends when `gate` is open, and then sets `ended`.
    fn gated(gate: &Rc<Gate>, ended: &Rc<Cell<bool>>) -> impl Future<Output = ()> + 'static {
        let (gate, ended) = (Rc::clone(gate), Rc::clone(ended));
        async move {
            poll_fn(|context| {
                gate.waiter.set(Some(context.waker().clone()));
                if gate.is_open.get() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            ended.set(true);
        }
    }

    #[test]
    fn an_operation_dropped_before_its_first_poll_is_dropped_and_later_runs_to_its_end() {
        let count = AbandonedCount::default();
        let abandoned = AbandonedOperations::new(count.clone());
        let (gate, ended) = (Rc::<Gate>::default(), Rc::<Cell<bool>>::default());
        let context = &mut Context::from_waker(Waker::noop());
        drop(abandoned.detachable(gated(&gate, &ended)));
        assert!(count.is_zero());
        let mut operation = abandoned.detachable(gated(&gate, &ended));
        assert!(Pin::new(&mut operation).poll(context).is_pending());
        drop(operation);
        assert!(!count.is_zero());
        let mut runner = Box::pin(abandoned.run());
        assert!(runner.as_mut().poll(context).is_pending());
        assert!(!count.is_zero() && !ended.get());
        gate.open();
        assert!(runner.as_mut().poll(context).is_pending());
        assert!(count.is_zero() && ended.get());
        let (shut, never) = (Rc::<Gate>::default(), Rc::<Cell<bool>>::default());
        abandoned.push(gated(&shut, &never));
        assert!(runner.as_mut().poll(context).is_pending());
        assert!(!count.is_zero());
        drop(runner);
        assert!(count.is_zero() && !never.get(), "dropped with its runner");
    }

    #[test]
    fn a_finished_operation_is_not_handed_over_and_what_nothing_runs_can_be_dropped() {
        let count = AbandonedCount::default();
        let abandoned = AbandonedOperations::new(count.clone());
        let (gate, ended) = (Rc::<Gate>::default(), Rc::<Cell<bool>>::default());
        gate.open();
        let context = &mut Context::from_waker(Waker::noop());
        let mut operation = abandoned.detachable(gated(&gate, &ended));
        assert!(Pin::new(&mut operation).poll(context).is_ready());
        drop(operation);
        assert!(count.is_zero() && ended.get());
        abandoned.push(std::future::pending::<()>());
        assert!(!count.is_zero());
        abandoned.clear();
        assert!(count.is_zero());
    }
}
