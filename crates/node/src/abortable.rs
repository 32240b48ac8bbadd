//! A background task that can be told to end where it waits.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Tells a task to end.
#[derive(Default)]
pub(crate) struct Stop {
    asked: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Stop {
    /// The task ends at its next turn, wherever it waits: it must not be in the midst of anything.
    pub fn ask(&self) {
        self.asked.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Runs a future to its end, or until `stop` is asked for.
pub(crate) fn until<F: Future<Output = ()>>(stop: Rc<Stop>, future: F) -> Until<F> {
    Until { stop, future: Box::pin(future) }
}

/// See [`until`].
pub(crate) struct Until<F> {
    stop: Rc<Stop>,
    future: Pin<Box<F>>,
}

impl<F: Future<Output = ()>> Future for Until<F> {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.stop.asked.get() {
            return Poll::Ready(());
        }
        *self.stop.waker.borrow_mut() = Some(context.waker().clone());
        self.future.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_waits_for_ever_ends_when_it_is_told_to() {
        let stop = Rc::new(Stop::default());
        let mut task = until(Rc::clone(&stop), std::future::pending());
        let context = &mut Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut task).poll(context).is_pending());
        stop.ask();
        assert!(Pin::new(&mut task).poll(context).is_ready());
    }
}
