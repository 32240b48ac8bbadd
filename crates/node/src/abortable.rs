//! A background task that another task can cancel at its next await point.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Cancels the task that runs under [`abortable`] with this token.
#[derive(Default)]
pub(crate) struct CancelToken {
    cancelled: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl CancelToken {
    /// Cancels the task at its next poll. REQUIRES: the task is at an await point where it holds nothing half done.
    pub fn cancel(&self) {
        self.cancelled.set(true);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Runs a future to its end or until `token` is cancelled.
pub(crate) fn abortable<F: Future<Output = ()>>(token: Rc<CancelToken>, future: F) -> Abortable<F> {
    Abortable { token, future: Box::pin(future) }
}

/// The future of [`abortable`].
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
