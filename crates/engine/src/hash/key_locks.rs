//! Key locks: one writer at a time per key, first in, first out, on any core.
//!
//! A put or delete holds its key's lock from finding the old record until its change is in the index, so that the journal
//! and the index have the same order. Keys with the same 128-bit hash share a lock.
//! Invariants: FIFO order; a lock has at most one waiter per task. REQUIRES: a waiting future is not dropped before it
//! holds the lock, since its ticket would block the key.

use octokv_base::map::FxHashMap;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The held locks of a shard of keys.
#[derive(Default)]
pub struct KeyLocks(Mutex<FxHashMap<u128, Waiters>>);

struct Waiters {
    /// The ticket of the holder.
    serving_ticket: u64,
    next_ticket: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

/// A held lock, released on drop.
pub struct KeyGuard<'a> {
    locks: &'a KeyLocks,
    hash: u128,
}

impl KeyLocks {
    /// Locks `hash`, after all earlier callers.
    pub async fn lock(&self, hash: u128) -> KeyGuard<'_> {
        let ticket = {
            let mut locks = self.0.lock();
            match locks.get_mut(&hash) {
                None => {
                    locks.insert(
                        hash,
                        Waiters { serving_ticket: 0, next_ticket: 1, waiting: VecDeque::new() },
                    );
                    return KeyGuard { locks: self, hash };
                }
                Some(waiters) => {
                    let ticket = waiters.next_ticket;
                    waiters.next_ticket += 1;
                    waiters.waiting.push_back((ticket, None));
                    ticket
                }
            }
        };
        poll_fn(|context| {
            let mut locks = self.0.lock();
            let waiters = locks.get_mut(&hash).expect("a lock exists while it has waiters");
            if waiters.serving_ticket == ticket {
                return Poll::Ready(());
            }
            let waiter = waiters
                .waiting
                .iter_mut()
                .find(|(waiting_ticket, _)| *waiting_ticket == ticket)
                .expect("a waiter is queued");
            waiter.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        KeyGuard { locks: self, hash }
    }

    /// Whether no lock is held.
    pub fn is_free(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        let mut locks = self.locks.0.lock();
        let waiters = locks.get_mut(&self.hash).expect("held");
        match waiters.waiting.pop_front() {
            None => {
                locks.remove(&self.hash);
            }
            Some((ticket, waker)) => {
                waiters.serving_ticket = ticket;
                drop(locks);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn writers_of_one_key_are_granted_in_order_and_other_keys_do_not_wait() {
        let locks = KeyLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        let (mut second, mut third) = (pin!(locks.lock(1)), pin!(locks.lock(1)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert!(pin!(locks.lock(2)).poll(&mut context).is_ready());
        drop(first);
        assert!(third.as_mut().poll(&mut context).is_pending());
        let Poll::Ready(guard) = second.as_mut().poll(&mut context) else { panic!("not granted") };
        drop(guard);
        assert!(third.as_mut().poll(&mut context).is_ready());
        assert!(locks.0.lock().is_empty());
    }
}
