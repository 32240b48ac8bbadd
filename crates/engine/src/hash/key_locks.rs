//! One writer at a time per key: the others wait in line, on any core.
//!
//! A put or delete holds its key's lock from finding the old record until its change is in the index, so
//! that the journal's order and the index's agree. Keys of one 128-bit hash share a lock.
//! Invariants: the line is first come, first served; who waits must not be dropped before its turn.

use octokv_base::map::FxHashMap;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The locks of some keys.
#[derive(Default)]
pub struct KeyLocks(Mutex<FxHashMap<u128, Waiters>>);

struct Waiters {
    /// Whose turn it is; turns count up.
    serving_ticket: u64,
    next_ticket: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

/// Held until dropped.
pub struct KeyGuard<'a> {
    locks: &'a KeyLocks,
    hash: u128,
}

impl KeyLocks {
    /// Waits for the turn of this caller.
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
            let waiters = locks.get_mut(&hash).expect("a line lasts while somebody waits in it");
            if waiters.serving_ticket == ticket {
                return Poll::Ready(());
            }
            let waiter = waiters
                .waiting
                .iter_mut()
                .find(|(waiting_ticket, _)| *waiting_ticket == ticket)
                .expect("waits in line");
            waiter.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        KeyGuard { locks: self, hash }
    }
}

impl KeyLocks {
    /// Whether nobody holds a lock.
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
    fn writers_of_one_key_are_served_in_order_and_others_do_not_wait() {
        let locks = KeyLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        let (mut second, mut third) = (pin!(locks.lock(1)), pin!(locks.lock(1)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert!(pin!(locks.lock(2)).poll(&mut context).is_ready());
        drop(first);
        assert!(third.as_mut().poll(&mut context).is_pending());
        let Poll::Ready(guard) = second.as_mut().poll(&mut context) else { panic!("its turn") };
        drop(guard);
        assert!(third.as_mut().poll(&mut context).is_ready());
        assert!(locks.0.lock().is_empty());
    }
}
