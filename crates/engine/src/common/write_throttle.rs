//! The throttle of puts: while compaction cannot keep up, they enter at a given rate, in the order of their arrival.
//!
//! ```text
//!   no limit   a put looks at one flag
//!   limit      refill, every few milliseconds ─▶ allowance ─▶ the first put that waits, as long as there is some; its bytes may exceed it
//! ```
//! In: from the task that maintains the volume, the limit and the bytes that it allows since the last time; puts with their bytes. Out: when each enters.
//! Invariants: no put overtakes another that waits; without a limit none waits; one that is dropped while it waits leaves the queue. Tested below.

use crate::bug_injection::{self, InjectedBug};
use octokv_runtime::waiter_queue::{WaiterQueue, WaiterTicket};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// The throttle of a volume.
#[derive(Default)]
pub struct WriteThrottle {
    is_limited: AtomicBool,
    state: Mutex<ThrottleState>,
}

#[derive(Default)]
struct ThrottleState {
    /// The bytes that may enter now; below 0 after a put that had more.
    allowance: i64,
    waiters: WaiterQueue<u64>,
}

/// A put that waits for its turn.
pub struct ThrottledWrite<'a> {
    throttle: &'a WriteThrottle,
    bytes: u64,
    ticket: Option<WaiterTicket>,
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl ThrottleState {
    fn enter(&mut self, bytes: u64) {
        self.allowance = self.allowance.saturating_sub(signed(bytes));
    }
}

impl WriteThrottle {
    /// Whether a put would have to ask.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Relaxed)
    }

    /// Ready when a put of so many bytes may enter.
    pub fn enter(&self, bytes: u64) -> ThrottledWrite<'_> {
        ThrottledWrite { throttle: self, bytes, ticket: None }
    }

    /// Allows so many more bytes, of which at most `most` are kept for later puts.
    pub fn refill(&self, bytes: u64, most: u64) {
        let mut wakers: Vec<Waker> = Vec::new();
        {
            let mut state = self.state.lock();
            if !self.is_limited.swap(true, Ordering::Relaxed) {
                state.allowance = 0;
            }
            state.allowance = state.allowance.saturating_add(signed(bytes)).min(signed(most));
            while state.allowance > 0
                && let Some((bytes, waker)) = state.waiters.pop_front()
            {
                state.enter(bytes);
                wakers.extend(waker);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends the limit: all that wait enter. Idempotent.
    pub fn lift(&self) {
        if !self.is_limited() {
            return;
        }
        let mut wakers: Vec<Waker> = Vec::new();
        {
            let mut state = self.state.lock();
            self.is_limited.store(false, Ordering::Relaxed);
            while let Some((_, waker)) = state.waiters.pop_front() {
                wakers
                    .extend(waker.filter(|_| !bug_injection::is_injected(InjectedBug::ForgetDelayedWrites)));
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether a put waits.
    pub fn has_waiters(&self) -> bool {
        self.is_limited() && !self.state.lock().waiters.is_empty()
    }
}

impl Future for ThrottledWrite<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.throttle.state.lock();
        let ticket = match self.ticket {
            Some(ticket) => ticket,
            // A limit may have come since the flag was read, but none goes without waking those that wait.
            None if !self.throttle.is_limited() => return Poll::Ready(()),
            None if state.allowance > 0 && state.waiters.is_empty() => {
                state.enter(self.bytes);
                return Poll::Ready(());
            }
            None => state.waiters.push(self.bytes),
        };
        let is_waiting = state.waiters.set_waker(ticket, context.waker());
        drop(state);
        self.ticket = Some(ticket);
        if is_waiting { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for ThrottledWrite<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.throttle.state.lock().waiters.remove(ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn without_a_limit_every_put_enters_at_once() {
        let throttle = WriteThrottle::default();
        assert!(throttle.enter(u64::MAX).now_or_never().is_some());
        throttle.refill(0, 10);
        assert!(throttle.is_limited() && throttle.enter(1).now_or_never().is_none());
        assert!(!throttle.has_waiters(), "the one that was dropped has left");
        throttle.lift();
        assert!(throttle.enter(u64::MAX).now_or_never().is_some() && !throttle.is_limited());
    }

    #[test]
    fn puts_enter_in_the_order_of_arrival_as_their_bytes_are_allowed() {
        let throttle = WriteThrottle::default();
        throttle.refill(10, 100);
        assert!(throttle.enter(30).now_or_never().is_some(), "its bytes may exceed what is allowed");
        let mut puts = [50, 5, 5].map(|bytes| throttle.enter(bytes));
        let entered = |puts: &mut [ThrottledWrite<'_>]| -> Vec<bool> {
            puts.iter_mut().map(|put| put.now_or_never().is_some()).collect()
        };
        assert_eq!(entered(&mut puts), [false, false, false]);
        for (bytes, want) in [
            (20, [false, false, false]),
            (1, [true, false, false]),
            (49, [true, false, false]),
            (3, [true, true, false]),
            (3, [true, true, true]),
        ] {
            throttle.refill(bytes, 100);
            assert_eq!(entered(&mut puts), want, "{bytes} more");
        }
    }

    #[test]
    fn what_is_not_used_is_kept_up_to_a_bound_and_not_from_an_earlier_limit() {
        let throttle = WriteThrottle::default();
        throttle.refill(1000, 20);
        assert!(throttle.enter(20).now_or_never().is_some() && throttle.enter(1).now_or_never().is_none());
        throttle.lift();
        throttle.refill(0, 20);
        throttle.refill(1, 20);
        assert!(throttle.enter(1).now_or_never().is_some(), "the debt of the earlier limit is forgotten");
    }

    #[test]
    fn one_that_waits_is_woken_once_by_its_turn_or_by_the_end_of_the_limit() {
        let throttle = WriteThrottle::default();
        throttle.refill(0, 10);
        let wakes: [Arc<Wakes>; 2] = Default::default();
        let wakers = wakes.each_ref().map(|wakes| Waker::from(Arc::clone(wakes)));
        let mut puts = [throttle.enter(5), throttle.enter(5)];
        for (put, waker) in puts.iter_mut().zip(&wakers) {
            assert!(put.poll_unpin(&mut Context::from_waker(waker)).is_pending());
        }
        let counts = || wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed));
        throttle.refill(1, 10);
        assert_eq!(counts(), [1, 0]);
        throttle.lift();
        throttle.lift();
        assert_eq!(counts(), [1, 1]);
        assert!(puts.iter_mut().all(|put| put.now_or_never().is_some()));
    }
}
