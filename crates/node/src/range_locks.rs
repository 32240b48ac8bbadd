//! Exclusive locks on ranges of device blocks, granted in arrival order across all cores.
//!
//! For devices whose block is larger than the namespace's: a partial write reads, patches and writes the whole device
//! block, so writes of its other parts must not interleave.
//!
//! Invariants: of two overlapping ranges, the earlier request holds its lock first; dropping a guard releases its
//! range or its position in the queue. Ranges that are held stay in the queue until then. Every position belongs to a
//! request in execution, so the queue is at most as long as the workers of all cores.

use octokv_runtime::{WaiterQueue, WaiterTicket};
use parking_lot::Mutex;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

/// Ranges held or waited for.
#[derive(Default)]
pub struct RangeLocks(Mutex<WaiterQueue<Range<u64>>>);

fn overlaps(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// A held range, or a position in the queue until the range is granted. Dropping it releases either.
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    ticket: WaiterTicket,
}

impl RangeLocks {
    /// Waits until no earlier caller holds or waits for any of these blocks.
    pub async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        let ticket = self.0.lock().push(range.clone());
        let guard = RangeGuard { locks: self, ticket };
        poll_fn(|context| {
            let mut queue = self.0.lock();
            if !queue.earlier(ticket).any(|earlier| overlaps(earlier, &range)) {
                return Poll::Ready(());
            }
            assert!(queue.set_waker(ticket, context.waker()), "a guard's waiter stays in the queue");
            Poll::Pending
        })
        .await;
        guard
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.locks.0.lock();
        let released = queue.remove(self.ticket).expect("a guard's waiter stays in the queue");
        queue.take_later_wakers(self.ticket, |later| overlaps(later, &released)).for_each(Waker::wake);
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
        assert!(locks.0.lock().is_empty(), "every guard was dropped");
    }
}
