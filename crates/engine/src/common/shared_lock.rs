//! A lock that several operations share, or one has alone; first in, first out, on any core.
//!
//! ```text
//!   share ──────▶ held by n operations      exclude ──────▶ held by one
//!   in arrival order: an operation that would share waits behind one that waits to have it alone
//! ```
//! Invariants: an exclusive holder is the only one; a waiter that is no longer queued has the lock; one that is dropped leaves the queue, or releases the lock if it was
//! granted. Tested below.

use octokv_runtime::{WaiterQueue, WaiterTicket};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// See the module header.
#[derive(Default)]
pub(crate) struct SharedLock(Mutex<LockState>);

#[derive(Default)]
struct LockState {
    /// The operations that share it.
    shared: u32,
    is_exclusive: bool,
    waiters: WaiterQueue<LockMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockMode {
    Shared,
    Exclusive,
}

/// The lock, held until this is dropped.
pub(crate) struct SharedLockGuard<'a> {
    lock: &'a SharedLock,
    mode: LockMode,
}

/// Waits for the lock.
struct SharedLockWaiter<'a> {
    lock: &'a SharedLock,
    mode: LockMode,
    /// `None` once the lock has become a guard.
    ticket: Option<WaiterTicket>,
}

impl LockState {
    /// Takes the lock if it is compatible with its holders.
    fn take(&mut self, mode: LockMode) -> bool {
        match mode {
            LockMode::Shared if !self.is_exclusive => self.shared += 1,
            LockMode::Exclusive if !self.is_exclusive && self.shared == 0 => self.is_exclusive = true,
            LockMode::Shared | LockMode::Exclusive => return false,
        }
        true
    }

    /// Grants the lock to waiters, in order. Returns their wakers.
    fn grant(&mut self) -> SmallVec<[Waker; 4]> {
        let mut wakers = SmallVec::new();
        while let Some(&mode) = self.waiters.first()
            && self.take(mode)
        {
            wakers.extend(self.waiters.pop_front().and_then(|(_, waker)| waker));
        }
        wakers
    }
}

impl SharedLock {
    /// The lock, beside others that share it.
    pub async fn share(&self) -> SharedLockGuard<'_> {
        self.acquire(LockMode::Shared).await
    }

    /// The lock, without others.
    pub async fn exclude(&self) -> SharedLockGuard<'_> {
        self.acquire(LockMode::Exclusive).await
    }

    /// The lock, without others, if no operation has it or waits for it.
    pub fn try_exclude(&self) -> Option<SharedLockGuard<'_>> {
        let mut state = self.0.lock();
        let is_taken = state.waiters.is_empty() && state.take(LockMode::Exclusive);
        // Not built otherwise: its drop would release the lock.
        is_taken.then(|| SharedLockGuard { lock: self, mode: LockMode::Exclusive })
    }

    async fn acquire(&self, mode: LockMode) -> SharedLockGuard<'_> {
        let waiter = {
            let mut state = self.0.lock();
            if state.waiters.is_empty() && state.take(mode) {
                return SharedLockGuard { lock: self, mode };
            }
            SharedLockWaiter { lock: self, mode, ticket: Some(state.waiters.push(mode)) }
        };
        waiter.await
    }

    fn release(&self, mode: LockMode) {
        let mut state = self.0.lock();
        match mode {
            LockMode::Shared => state.shared -= 1,
            LockMode::Exclusive => state.is_exclusive = false,
        }
        let wakers = state.grant();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for SharedLockGuard<'_> {
    fn drop(&mut self) {
        self.lock.release(self.mode);
    }
}

impl<'a> Future for SharedLockWaiter<'a> {
    type Output = SharedLockGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<SharedLockGuard<'a>> {
        let ticket = self.ticket.expect("not polled after it had the lock");
        if self.lock.0.lock().waiters.set_waker(ticket, context.waker()) {
            return Poll::Pending;
        }
        self.ticket = None;
        Poll::Ready(SharedLockGuard { lock: self.lock, mode: self.mode })
    }
}

impl Drop for SharedLockWaiter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.lock.0.lock();
        match state.waiters.remove(ticket) {
            Some(_) => {
                // Those behind it may share the lock with its holders.
                let wakers = state.grant();
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
            }
            None => {
                drop(state);
                self.lock.release(self.mode);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn polled<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn one_alone_waits_for_those_that_share_and_others_wait_behind_it() {
        let lock = SharedLock::default();
        let first = polled(pin!(lock.share())).expect("free");
        let second = polled(pin!(lock.share())).expect("shared");
        let (mut alone, mut behind) = (pin!(lock.exclude()), pin!(lock.share()));
        assert!(polled(alone.as_mut()).is_none() && polled(behind.as_mut()).is_none());
        drop(first);
        assert!(polled(alone.as_mut()).is_none());
        drop(second);
        let guard = polled(alone.as_mut()).expect("it has the lock alone");
        assert!(polled(behind.as_mut()).is_none());
        drop(guard);
        let guard = polled(behind.as_mut()).expect("granted");
        assert!(polled(pin!(lock.exclude())).is_none(), "and dropped");
        assert!(lock.try_exclude().is_none());
        drop(guard);
        assert!(lock.try_exclude().is_some() && polled(pin!(lock.exclude())).is_some());
    }

    #[test]
    fn a_waiter_that_is_dropped_lets_those_behind_it_go_on() {
        for is_granted in [false, true] {
            let lock = SharedLock::default();
            let held = polled(pin!(lock.share())).expect("free");
            let (mut alone, mut behind) = (Box::pin(lock.exclude()), Box::pin(lock.share()));
            assert!(polled(alone.as_mut()).is_none() && polled(behind.as_mut()).is_none());
            if is_granted {
                drop(held);
                drop(alone);
                assert!(polled(behind.as_mut()).is_some());
            } else {
                drop(alone);
                assert!(polled(behind.as_mut()).is_some(), "it shares the lock with the first");
                drop(held);
            }
            drop(behind);
            assert!(polled(pin!(lock.exclude())).is_some(), "{is_granted}: no holder is left");
        }
    }
}
