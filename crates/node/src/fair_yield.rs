//! Round-robin among the long requests of one core: one step of one request per reactor iteration.
//!
//! ```text
//!   queue:  a  b  c      iteration n: step of a, a moves to the back      iteration n+1: step of b …
//! ```
//! In: requests, each with a [`YieldSlot`]. Out: when each may take its next step. One step runs per iteration,
//! however many requests there are, so that short requests are not delayed.
//!
//! Invariant: an iteration wakes only the front of the queue; the others cost nothing while they wait. Every slot
//! belongs to a request in execution, so the queue is at most as long as the core's workers. It is no `WaiterQueue`: a slot
//! keeps its ticket when it moves to the back, so tickets do not ascend.

use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// The shortest timer: it fires in the next iteration.
const NEXT_ITERATION: Nanos = Nanos(1);

/// The round-robin queue of one core.
#[derive(Debug, Default)]
pub struct FairYield {
    queue: RefCell<VecDeque<(u64, Option<Waker>)>>,
    next_ticket: Cell<u64>,
    /// Start of the iteration that ran the last step.
    last_step_at: Cell<Option<Nanos>>,
}

/// A position in the queue, released on drop.
#[derive(Debug)]
pub struct YieldSlot<'a> {
    fair_yield: &'a FairYield,
    ticket: u64,
}

impl FairYield {
    /// Adds a request at the back of the queue.
    pub fn join(&self) -> YieldSlot<'_> {
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        self.queue.borrow_mut().push_back((ticket, None));
        YieldSlot { fair_yield: self, ticket }
    }

    /// Whether the slot of `ticket` may run its step in the iteration at `now`; if so it moves to the back.
    fn try_step(&self, ticket: u64, now: Nanos) -> bool {
        let mut queue = self.queue.borrow_mut();
        if self.last_step_at.get() == Some(now) || queue.front().is_none_or(|(front, _)| *front != ticket) {
            return false;
        }
        self.last_step_at.set(Some(now));
        queue.rotate_left(1);
        drop(queue);
        self.wake_front();
        true
    }

    fn wake_front(&self) {
        let waker = self.queue.borrow_mut().front_mut().and_then(|(_, waker)| waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until `ticket` is at the front.
    async fn wait_for_front(&self, ticket: u64) {
        poll_fn(|context| {
            let mut queue = self.queue.borrow_mut();
            if queue.front().is_some_and(|(front, _)| *front == ticket) {
                return Poll::Ready(());
            }
            let slot = queue.iter_mut().rev().find(|(of, _)| *of == ticket);
            slot.expect("a slot stays in the queue until it is dropped").1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl YieldSlot<'_> {
    /// Waits until this request may run its next step.
    pub async fn yield_now(&self, handle: &ReactorHandle) {
        loop {
            self.fair_yield.wait_for_front(self.ticket).await;
            if self.fair_yield.try_step(self.ticket, handle.now()) {
                return;
            }
            handle.sleep(NEXT_ITERATION).await;
        }
    }
}

impl Drop for YieldSlot<'_> {
    fn drop(&mut self) {
        self.fair_yield.queue.borrow_mut().retain(|(ticket, _)| *ticket != self.ticket);
        self.fair_yield.wake_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::{CoreWaker, TaskSlab};
    use std::future::Future;

    #[test]
    fn each_iteration_runs_one_step_round_robin() {
        let fair_yield = FairYield::default();
        let slots = [fair_yield.join(), fair_yield.join(), fair_yield.join()];
        let mut order = Vec::new();
        for iteration in 0..6 {
            // In any order of polling.
            for slot in slots.iter().rev().chain(&slots) {
                if fair_yield.try_step(slot.ticket, Nanos(iteration)) {
                    order.push(slot.ticket);
                }
            }
        }
        assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn only_the_front_of_the_queue_is_polled() {
        let fair_yield = FairYield::default();
        let slots = [fair_yield.join(), fair_yield.join(), fair_yield.join()];
        let (polls, mut tasks) = (Cell::new(0), TaskSlab::new(3, CoreWaker::without_eventfd()));
        for slot in &slots {
            let polls = &polls;
            let mut front = Box::pin(fair_yield.wait_for_front(slot.ticket));
            let counted = poll_fn(move |context| {
                polls.set(polls.get() + 1);
                front.as_mut().poll(context)
            });
            assert!(tasks.spawn(counted).is_ok());
        }
        assert_eq!((polls.get(), tasks.running()), (3, 2), "the first is at the front at once");
        tasks.poll_ready();
        assert_eq!(polls.get(), 3);
        assert!(fair_yield.try_step(0, Nanos(1)));
        tasks.poll_ready();
        assert_eq!((polls.get(), tasks.running()), (4, 1), "the second is woken, the third is not");
        drop(tasks);
    }

    #[test]
    fn a_dropped_slot_does_not_block_the_others() {
        let fair_yield = FairYield::default();
        let (first, second) = (fair_yield.join(), fair_yield.join());
        assert!(!fair_yield.try_step(second.ticket, Nanos(1)));
        drop(first);
        assert!(fair_yield.try_step(second.ticket, Nanos(1)));
        assert!(!fair_yield.try_step(second.ticket, Nanos(1)));
        assert!(fair_yield.try_step(second.ticket, Nanos(2)));
    }
}
