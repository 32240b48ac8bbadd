//! A background task that can be told to end where it waits.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Tells a task to end.
#[derive(Default)]
pub(crate) struct CancelToken {
    cancelled: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl CancelToken {
    /// The task ends at its next turn, wherever it waits: it must not be in the midst of anything.
    pub fn cancel(&self) {
        self.cancelled.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Runs a future to its end, or until `stop` is asked for.
pub(crate) fn abortable<F: Future<Output = ()>>(token: Rc<CancelToken>, future: F) -> Abortable<F> {
    Abortable { token, future: Box::pin(future) }
}

/// See [`until`].
pub(crate) struct Abortable<F> {
    token: Rc<CancelToken>,
    future: Pin<Box<F>>,
}

impl<F: Future<Output = ()>> Future for Abortable<F> {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.token.cancelled.get() {
            return Poll::Ready(());
        }
        *self.token.waker.borrow_mut() = Some(context.waker().clone());
        self.future.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_task_ends_when_it_is_cancelled() {
        let token = Rc::new(CancelToken::default());
        let mut task = abortable(Rc::clone(&token), std::future::pending());
        let context = &mut Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut task).poll(context).is_pending());
        token.cancel();
        assert!(Pin::new(&mut task).poll(context).is_ready());
    }
}
