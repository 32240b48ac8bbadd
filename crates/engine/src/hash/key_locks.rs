//! One writer at a time per key: the others wait in line, on any core.
//!
//! A put or delete holds its key's lock from finding the old record until its change is in the index, so
//! that the journal's order and the index's agree. Keys of one 128-bit hash share a lock.
//! Invariants: the line is first come, first served; who waits must not be dropped before its turn.

use octokv_base::map::Map;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The locks of some keys.
#[derive(Default)]
pub struct KeyLocks(Mutex<Map<u128, Line>>);

struct Line {
    /// Whose turn it is; turns count up.
    serving: u64,
    next: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

/// Held until dropped.
pub struct Held<'a> {
    locks: &'a KeyLocks,
    hash: u128,
}

impl KeyLocks {
    /// Waits for the turn of this caller.
    pub async fn lock(&self, hash: u128) -> Held<'_> {
        let turn = {
            let mut locks = self.0.lock();
            match locks.get_mut(&hash) {
                None => {
                    locks.insert(hash, Line { serving: 0, next: 1, waiting: VecDeque::new() });
                    return Held { locks: self, hash };
                }
                Some(line) => {
                    let turn = line.next;
                    line.next += 1;
                    line.waiting.push_back((turn, None));
                    turn
                }
            }
        };
        poll_fn(|context| {
            let mut locks = self.0.lock();
            let line = locks.get_mut(&hash).expect("a line lasts while somebody waits in it");
            if line.serving == turn {
                return Poll::Ready(());
            }
            let place = line.waiting.iter_mut().find(|(of, _)| *of == turn).expect("waits in line");
            place.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        Held { locks: self, hash }
    }
}

impl KeyLocks {
    /// Whether nobody holds a lock.
    pub fn is_free(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut locks = self.locks.0.lock();
        let line = locks.get_mut(&self.hash).expect("held");
        match line.waiting.pop_front() {
            None => {
                locks.remove(&self.hash);
            }
            Some((turn, waker)) => {
                line.serving = turn;
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
    fn writers_of_one_key_take_turns_and_others_do_not_wait() {
        let locks = KeyLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        let (mut second, mut third) = (pin!(locks.lock(1)), pin!(locks.lock(1)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert!(pin!(locks.lock(2)).poll(&mut context).is_ready());
        drop(first);
        assert!(third.as_mut().poll(&mut context).is_pending());
        let Poll::Ready(held) = second.as_mut().poll(&mut context) else { panic!("its turn") };
        drop(held);
        assert!(third.as_mut().poll(&mut context).is_ready());
        assert!(locks.0.lock().is_empty());
    }
}
