//! Key locks: one writer at a time per key, first in, first out, on any core.
//!
//! A put or delete holds its key's lock from finding the old record until its change is in the index, so that the journal
//! and the index have the same order. The engine numbers the locks by hash: keys with the same number share one.
//!
//! ```text
//!            key free                       front of the queue, lock released
//!   lock ──────────────▶ held ──drop──▶ next     queued ──────────────▶ granted ──poll──▶ held
//! ```
//! Invariants: FIFO order; a waiter that is no longer in the queue of its key has the lock; a waiter that is dropped
//! leaves the queue, or passes the lock on if it was granted. A lock is found in a few steps, however many are held
//! ([`super::held_numbers`]); at most [`HELD_LOCKS_MAX`] are.

use super::held_numbers::HeldNumbers;
use octokv_base::map::FxHashMap;
use octokv_runtime::waiter_queue::WAITERS_MAX;
use octokv_runtime::{WaiterQueue, WaiterTicket};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

/// The held locks of a shard of keys, and the waiters for them, in a cache line of their own.
#[derive(Default)]
#[repr(align(64))]
pub struct KeyLocks {
    keys: Mutex<HeldKeys>,
    /// The number of locked keys, written under the lock of `keys`; a store releases what the holders did.
    held_count: AtomicUsize,
}

/// Most held locks of a shard: one for each operation in flight on any core, abandoned ones included. A waiter of each of them may
/// be in one queue, so it is the bound of those.
pub const HELD_LOCKS_MAX: usize = WAITERS_MAX;

#[derive(Default)]
struct HeldKeys {
    /// The numbers of the locked keys.
    held: HeldNumbers<HELD_LOCKS_MAX>,
    /// The waiters, by key. A key is here from its first waiter on until its lock is free, so that tickets are not reused.
    waiters: FxHashMap<u64, WaiterQueue<()>>,
}

/// A held lock, released on drop.
pub struct KeyGuard<'a> {
    locks: &'a KeyLocks,
    number: u64,
}

/// A waiter for a lock that was held. Dropping it gives up its turn.
pub struct KeyWaiter<'a> {
    locks: &'a KeyLocks,
    number: u64,
    /// `None` once the lock has become a [`KeyGuard`].
    ticket: Option<WaiterTicket>,
}

impl KeyLocks {
    /// Locks `number`, after all earlier callers.
    pub async fn lock(&self, number: u64) -> KeyGuard<'_> {
        match self.lock_or_queue(number) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        }
    }

    /// Locks `number` if it is free, or takes a turn behind all earlier callers. REQUIRES: it is not [`u64::MAX`].
    ///
    /// # Errors
    /// The waiter for the lock, which is held.
    #[inline]
    pub fn lock_or_queue(&self, number: u64) -> Result<KeyGuard<'_>, KeyWaiter<'_>> {
        let mut locks = self.keys.lock();
        if !locks.held.insert(number) {
            let ticket = locks.waiters.entry(number).or_default().push(());
            return Err(KeyWaiter { locks: self, number, ticket: Some(ticket) });
        }
        self.held_count.store(locks.held.count(), Ordering::Release);
        Ok(KeyGuard { locks: self, number })
    }

    /// Passes the lock to the first waiter, or frees the key. REQUIRES: the caller holds the lock.
    fn release(&self, number: u64) {
        let mut locks = self.keys.lock();
        if !locks.waiters.is_empty()
            && let Some(waiters) = locks.waiters.get_mut(&number)
        {
            if let Some(((), waker)) = waiters.pop_front() {
                drop(locks);
                return waker.into_iter().for_each(Waker::wake);
            }
            locks.waiters.remove(&number);
        }
        assert!(locks.held.remove(number), "released a lock that nobody holds");
        self.held_count.store(locks.held.count(), Ordering::Release);
    }

    /// Whether somebody has the lock of `number`. While no lock of the shard is held it writes nothing, so that the line stays in
    /// the caches of all cores that ask.
    ///
    /// REQUIRES: what orders this call after the begin of a holder (in the engine, the lock of an index partition that both
    /// take) also shows its count here; without such an order the answer may be of a moment before. A lock that is found free shows what
    /// its holder did before it released it: that it had another lock by then, for one.
    pub fn is_locked(&self, number: u64) -> bool {
        self.held_count.load(Ordering::Acquire) > 0 && self.keys.lock().held.contains(number)
    }

    /// Whether no lock is held.
    pub fn is_free(&self) -> bool {
        self.keys.lock().held.count() == 0
    }
}

impl<'a> Future for KeyWaiter<'a> {
    type Output = KeyGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<KeyGuard<'a>> {
        let ticket = self.ticket.expect("not polled after it had the lock");
        let mut locks = self.locks.keys.lock();
        let waiters = locks.waiters.get_mut(&self.number).expect("a key has its waiters while it is locked");
        if waiters.set_waker(ticket, context.waker()) {
            return Poll::Pending;
        }
        drop(locks);
        self.ticket = None;
        Poll::Ready(KeyGuard { locks: self.locks, number: self.number })
    }
}

impl Drop for KeyWaiter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut locks = self.locks.keys.lock();
        let waiters = locks.waiters.get_mut(&self.number).expect("a key has its waiters while it is locked");
        if waiters.remove(ticket).is_none() {
            drop(locks);
            self.locks.release(self.number);
        }
    }
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        self.locks.release(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::Wake;

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
        assert!(locks.is_free() && locks.keys.lock().waiters.is_empty());
    }

    #[test]
    fn a_key_is_locked_from_the_first_holder_to_the_last() {
        let locks = KeyLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let is_locked = |key| [locks.is_locked(key), locks.is_locked(key + 10)];
        assert_eq!(is_locked(1), [false, false]);
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        assert_eq!(is_locked(1), [true, false], "others of the shard are free");
        let mut second = pin!(locks.lock(1));
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert_eq!(is_locked(1), [true, false], "granted, and not yet taken");
        let Poll::Ready(second) = second.as_mut().poll(&mut context) else { panic!("not granted") };
        let Poll::Ready(other) = pin!(locks.lock(2)).poll(&mut context) else { panic!("free") };
        drop(second);
        assert_eq!((is_locked(1), is_locked(2)), ([false, false], [true, false]));
        drop(other);
        assert_eq!(is_locked(2), [false, false]);
    }

    #[test]
    fn thousands_of_keys_of_a_shard_are_locked_and_released_in_any_order() {
        let locks = KeyLocks::default();
        let number = |index: u64| octokv_base::prng::mix64(index) >> 9;
        let lock = |index| locks.lock_or_queue(number(index)).unwrap_or_else(|_| panic!("{index} is free"));
        let mut guards: Vec<(u64, KeyGuard)> = (0..5_000).map(|index| (index, lock(index))).collect();
        assert!((0..5_000).all(|index| locks.is_locked(number(index))));
        assert!((5_000..10_000).all(|index| !locks.is_locked(number(index))));
        let mut waiter = Box::pin(locks.lock(number(77)));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiter.as_mut().poll(&mut context).is_pending());
        let mut random = octokv_base::Prng::new(1);
        while !guards.is_empty() {
            let (index, guard) = guards.swap_remove(random.below(guards.len() as u64) as usize);
            drop(guard);
            assert_eq!(locks.is_locked(number(index)), index == 77, "{index} has a waiter");
            assert!(guards.iter().take(3).all(|(index, _)| locks.is_locked(number(*index))));
        }
        assert!(!locks.is_free());
        drop(waiter);
        assert!(locks.is_free() && locks.keys.lock().waiters.is_empty());
    }

    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The second of three writers is dropped, before or after the lock is passed to it.
    fn the_third_follows_a_dropped_second(is_granted_first: bool) {
        let locks = KeyLocks::default();
        let (mut context, wakes) = (Context::from_waker(Waker::noop()), Arc::new(WakeCount::default()));
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        let (mut second, mut third) = (Box::pin(locks.lock(1)), Box::pin(locks.lock(1)));
        assert!(second.as_mut().poll(&mut context).is_pending());
        let third_waker = Waker::from(Arc::clone(&wakes));
        assert!(third.as_mut().poll(&mut Context::from_waker(&third_waker)).is_pending());
        if is_granted_first {
            drop(first);
            assert_eq!(wakes.0.load(Ordering::Relaxed), 0, "it is the second's turn");
            drop(second);
        } else {
            drop(second);
            assert_eq!(wakes.0.load(Ordering::Relaxed), 0, "the first holds the lock");
            drop(first);
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(guard) = third.as_mut().poll(&mut context) else { panic!("not granted") };
        drop((guard, third));
        assert!(locks.is_free());
    }

    #[test]
    fn a_waiter_dropped_before_its_turn_leaves_the_queue() {
        the_third_follows_a_dropped_second(false);
    }

    #[test]
    fn a_waiter_dropped_after_its_turn_came_passes_the_lock_on() {
        the_third_follows_a_dropped_second(true);
    }

    #[test]
    fn the_only_waiter_frees_the_key_when_it_is_dropped_after_its_turn_came() {
        let locks = KeyLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(locks.lock(1)).poll(&mut context) else { panic!("free") };
        let mut second = Box::pin(locks.lock(1));
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert!(!locks.is_free());
        drop(second);
        assert!(locks.is_free());
    }
}
