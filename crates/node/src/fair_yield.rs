//! Long flows of one core that take turns: each does a piece, then whoever waits longest does one.
//!
//! ```text
//!   line:  a  b  c      turn n: a's piece, a goes to the end      turn n+1: b's piece …
//! ```
//! In: flows, each with a [`Place`] in the line. Out: when each may go on: one piece of one flow in each turn of the
//! core, however many flows there are, so that commands that are over at once are not kept waiting.
//! Invariant: only the flow at the front of the line is woken by turns; the others cost nothing while they wait.

use octokv_base::Nanos;
use octokv_runtime::Handle;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Until the next turn of the core, whenever that is.
const NEXT_TURN: Nanos = Nanos(1);

/// The line of one core.
#[derive(Debug, Default)]
pub struct Pace {
    line: RefCell<VecDeque<(u64, Option<Waker>)>>,
    next_ticket: Cell<u64>,
    /// When the last piece was begun.
    last: Cell<Option<Nanos>>,
}

/// A place in the line, until it is dropped.
#[derive(Debug)]
pub struct Place<'a> {
    pace: &'a Pace,
    ticket: u64,
}

impl Pace {
    /// Puts one more flow at the end of the line.
    pub fn enter(&self) -> Place<'_> {
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        self.line.borrow_mut().push_back((ticket, None));
        Place { pace: self, ticket }
    }

    /// Whether the flow of a ticket may do its piece at `now`; then it goes to the end of the line.
    fn may_go(&self, ticket: u64, now: Nanos) -> bool {
        let mut line = self.line.borrow_mut();
        if self.last.get() == Some(now) || line.front().is_none_or(|(front, _)| *front != ticket) {
            return false;
        }
        self.last.set(Some(now));
        line.rotate_left(1);
        drop(line);
        self.wake_front();
        true
    }

    fn wake_front(&self) {
        let waker = self.line.borrow_mut().front_mut().and_then(|(_, waker)| waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until a ticket is at the front.
    async fn front(&self, ticket: u64) {
        poll_fn(|context| {
            let mut line = self.line.borrow_mut();
            if line.front().is_some_and(|(front, _)| *front == ticket) {
                return Poll::Ready(());
            }
            let place = line.iter_mut().rev().find(|(of, _)| *of == ticket);
            place.expect("a place lasts with its flow").1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Place<'_> {
    /// Waits until this flow may do its next piece.
    pub async fn turn(&self, handle: &Handle) {
        loop {
            self.pace.front(self.ticket).await;
            if self.pace.may_go(self.ticket, handle.now()) {
                return;
            }
            handle.sleep(NEXT_TURN).await;
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.pace.line.borrow_mut().retain(|(ticket, _)| *ticket != self.ticket);
        self.pace.wake_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::{Doorbell, Tasks};
    use std::future::Future;

    #[test]
    fn one_piece_of_one_flow_is_done_in_each_turn_and_all_flows_get_theirs() {
        let pace = Pace::default();
        let flows = [pace.enter(), pace.enter(), pace.enter()];
        let mut order = Vec::new();
        for turn in 0..6 {
            // Whatever order they are asked in.
            for flow in flows.iter().rev().chain(&flows) {
                if pace.may_go(flow.ticket, Nanos(turn)) {
                    order.push(flow.ticket);
                }
            }
        }
        assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn only_the_front_of_the_line_is_polled() {
        let pace = Pace::default();
        let flows = [pace.enter(), pace.enter(), pace.enter()];
        let (polls, mut tasks) = (Cell::new(0), Tasks::new(3, Doorbell::silent()));
        for flow in &flows {
            let polls = &polls;
            let mut front = Box::pin(pace.front(flow.ticket));
            let counted = poll_fn(move |context| {
                polls.set(polls.get() + 1);
                front.as_mut().poll(context)
            });
            assert!(tasks.spawn(counted).is_ok());
        }
        assert_eq!((polls.get(), tasks.running()), (3, 2), "the first is at the front at once");
        tasks.poll_ready();
        assert_eq!(polls.get(), 3);
        assert!(pace.may_go(0, Nanos(1)));
        tasks.poll_ready();
        assert_eq!((polls.get(), tasks.running()), (4, 1), "the second is woken, the third is not");
        drop(tasks);
    }

    #[test]
    fn a_flow_that_ends_holds_nobody_up() {
        let pace = Pace::default();
        let (first, second) = (pace.enter(), pace.enter());
        assert!(!pace.may_go(second.ticket, Nanos(1)));
        drop(first);
        assert!(pace.may_go(second.ticket, Nanos(1)));
        assert!(!pace.may_go(second.ticket, Nanos(1)));
        assert!(pace.may_go(second.ticket, Nanos(2)));
    }
}
