//! [`WakerBatch`]: wakers that a state machine gives out under its lock, to be woken after that lock is free.
//!
//! In: wakers of waiters whose turn has come. Out: their wake-ups, in the order of the waiters.
//! Invariant: a woken task may run at once on another core and take the same lock, so no lock is held while waking.

use smallvec::SmallVec;
use std::task::Waker;

/// Wakers to wake once no lock is held.
#[must_use = "a waiter that is not woken waits for ever"]
#[derive(Debug, Default)]
pub struct WakerBatch(SmallVec<[Waker; 4]>);

impl WakerBatch {
    /// Adds the waker of a waiter that has polled; one that has not polled yet will find its turn when it does.
    pub fn add(&mut self, waker: Option<Waker>) {
        self.0.extend(waker);
    }

    /// Adds the wakers of another batch behind these.
    pub fn append(&mut self, other: WakerBatch) {
        self.0.extend(other.0);
    }

    /// Whether there is nothing to wake.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Wakes all. REQUIRES: the caller holds no lock.
    pub fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}
