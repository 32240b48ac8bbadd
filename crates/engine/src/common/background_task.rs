//! What tasks that repeat background work have in common: reports of their errors, and a wait that a condition or a time ends.
//!
//! In: errors of rounds, a reactor's timer. Out: one report of an error that stays. Invariant: an error is reported again only after another one, or a success.

use crate::EngineError;
use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

/// Errors of a task that repeats its work: one that stays is reported once.
pub(crate) struct ErrorReports<F> {
    report: F,
    last: Option<EngineError>,
}

impl<F: Fn(EngineError)> ErrorReports<F> {
    /// No error yet; `report` receives each.
    pub(crate) fn new(report: F) -> ErrorReports<F> {
        ErrorReports { report, last: None }
    }

    /// The work failed: reports the error, unless it is the last one.
    pub(crate) fn failed(&mut self, error: EngineError) {
        if self.last.replace(error) != Some(error) {
            (self.report)(error);
        }
    }

    /// The work succeeds again: the next error is a new one.
    pub(crate) fn succeeded(&mut self) {
        self.last = None;
    }
}

/// Waits until `is_true`, which is asked when the task is polled, or until a time, unless that is [`Nanos::NEVER`].
pub(crate) async fn wait_at_most(handle: &ReactorHandle, until: Nanos, is_true: impl Fn() -> bool) {
    let mut sleep = pin!(handle.sleep_until(until));
    poll_fn(|context| match is_true() {
        true => Poll::Ready(()),
        false if until == Nanos::NEVER => Poll::Pending,
        false => sleep.as_mut().poll(context),
    })
    .await;
}
