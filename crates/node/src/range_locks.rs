//! Exclusive locks on ranges of device blocks, granted in arrival order across all cores.
//!
//! For devices whose block is larger than the namespace's: a partial write reads, patches and writes the whole device
//! block, so writes of its other parts must not interleave.
//!
//! Invariants: of two overlapping ranges, the earlier request holds its lock first; dropping a guard releases its
//! range or its position in the queue. Every waiter is a request in execution, so the queue is at most as long as the
//! workers of all cores.

use parking_lot::Mutex;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

/// Ranges held or waited for.
#[derive(Default)]
pub struct RangeLocks(Mutex<RangeQueue>);

#[derive(Default)]
struct RangeQueue {
    next_ticket: u64,
    /// In arrival order.
    waiters: Vec<RangeWaiter>,
}

struct RangeWaiter {
    ticket: u64,
    range: Range<u64>,
    waker: Option<Waker>,
}

impl RangeQueue {
    /// Whether no range before that of `ticket` overlaps it.
    fn is_granted(&self, ticket: u64) -> bool {
        let index = self
            .waiters
            .iter()
            .position(|waiter| waiter.ticket == ticket)
            .expect("a guard's waiter stays in the queue");
        let own_range = &self.waiters[index].range;
        !self.waiters[..index].iter().any(|waiter| overlaps(&waiter.range, own_range))
    }
}

fn overlaps(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// A held range, or a position in the queue until the range is granted. Dropping it releases either.
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    ticket: u64,
}

impl RangeLocks {
    /// Waits until no earlier caller holds or waits for any of these blocks.
    pub async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        let ticket = {
            let mut queue = self.0.lock();
            let ticket = queue.next_ticket;
            queue.next_ticket += 1;
            queue.waiters.push(RangeWaiter { ticket, range, waker: None });
            ticket
        };
        let guard = RangeGuard { locks: self, ticket };
        poll_fn(|context| {
            let mut queue = self.0.lock();
            if queue.is_granted(ticket) {
                return Poll::Ready(());
            }
            let waiter = queue.waiters.iter_mut().find(|waiter| waiter.ticket == ticket);
            waiter.expect("a guard's waiter stays in the queue").waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        guard
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.locks.0.lock();
        let Some(index) = queue.waiters.iter().position(|waiter| waiter.ticket == self.ticket) else {
            return;
        };
        let released = queue.waiters.remove(index);
        let candidates =
            queue.waiters[index..].iter_mut().filter(|waiter| overlaps(&waiter.range, &released.range));
        candidates.filter_map(|waiter| waiter.waker.take()).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    fn poll<T>(future: &mut std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn overlapping_ranges_are_granted_in_arrival_order() {
        let locks = RangeLocks::default();
        let (mut first, mut second) = (pin!(locks.lock(0..4)), pin!(locks.lock(3..6)));
        let (mut third, mut apart) = (pin!(locks.lock(5..9)), pin!(locks.lock(9..10)));
        let guard = poll(&mut first).expect("no range is before it");
        assert!(poll(&mut second).is_none());
        assert!(poll(&mut third).is_none(), "it overlaps the second, which came before");
        let _apart = poll(&mut apart).expect("overlaps none");
        drop(guard);
        let guard = poll(&mut second).expect("the first is released");
        assert!(poll(&mut third).is_none());
        drop(guard);
        assert!(poll(&mut third).is_some());
    }

    #[test]
    fn a_dropped_waiter_lets_the_next_in() {
        let locks = RangeLocks::default();
        let mut last = pin!(locks.lock(0..2));
        {
            let mut waiting = Box::pin(locks.lock(0..1));
            assert!(poll(&mut waiting.as_mut()).is_some());
        }
        let mut first = Box::pin(locks.lock(0..1));
        let guard = poll(&mut first.as_mut()).expect("free");
        assert!(poll(&mut last).is_none());
        drop((guard, first));
        assert!(poll(&mut last).is_some());
        assert!(locks.0.lock().waiters.is_empty(), "every guard was dropped");
    }
}
