//! The signal that stores have grown, for the task that splits their segments.
//!
//! In: writes that have made a store larger. Out: the wake-up of the task of their core. Invariant: a signal that is set while the task is
//! busy is seen by its next wait. Tested in `tests/log_power_loss.rs`, whose volumes split.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

/// That stores of a core may have segments to split, for the task that splits them.
#[derive(Default)]
pub(super) struct SplitSignal {
    is_set: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl SplitSignal {
    /// Sets it, and wakes the task.
    pub(super) fn set(&self) {
        if !self.is_set.replace(true)
            && let Some(waker) = self.waker.take()
        {
            waker.wake();
        }
    }

    /// Ready when it was set, and is not any more.
    pub(super) fn wait(&self) -> impl Future<Output = ()> + '_ {
        poll_fn(|context| match self.is_set.take() {
            true => Poll::Ready(()),
            false => {
                self.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        })
    }
}
