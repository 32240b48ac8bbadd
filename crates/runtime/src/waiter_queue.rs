//! [`WaiterQueue`]: waiters in arrival order, from any core; the queue of a first-in, first-out lock.
//!
//! In: waiters, each with a value of the lock (what it waits for), and their wakers. Out: the first waiter, or the wakers
//! of later ones. The lock decides which waiter has its turn, holds its mutex around every call, and removes a waiter that
//! is dropped.
//!
//! Invariants: tickets ascend from front to back and are never used twice; at most [`WAITERS_MAX`] waiters. An empty
//! queue allocates nothing.

use std::collections::VecDeque;
use std::task::Waker;

/// The limit of one queue's waiters. Callers bound their requests below it: more are a bug.
pub const WAITERS_MAX: usize = 1 << 42;

/// Identifies a waiter of one queue. Lower tickets came earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterTicket(u64);

/// Waiters in arrival order.
#[derive(Debug)]
pub struct WaiterQueue<T> {
    next_ticket: u64,
    waiters: VecDeque<Waiter<T>>,
}

#[derive(Debug)]
struct Waiter<T> {
    ticket: WaiterTicket,
    value: T,
    waker: Option<Waker>,
}

impl<T> Default for WaiterQueue<T> {
    fn default() -> WaiterQueue<T> {
        WaiterQueue { next_ticket: 0, waiters: VecDeque::new() }
    }
}

impl<T> WaiterQueue<T> {
    /// Adds a waiter at the back.
    ///
    /// # Panics
    /// If the queue has [`WAITERS_MAX`] waiters.
    pub fn push(&mut self, value: T) -> WaiterTicket {
        assert!(self.waiters.len() < WAITERS_MAX, "{WAITERS_MAX} waiters in one queue");
        let ticket = WaiterTicket(self.next_ticket);
        self.next_ticket += 1;
        self.waiters.push_back(Waiter { ticket, value, waker: None });
        ticket
    }

    /// Sets the waker of a waiter. False if the waiter is not queued.
    pub fn set_waker(&mut self, ticket: WaiterTicket, waker: &Waker) -> bool {
        let Some(index) = self.index_of(ticket) else { return false };
        match &mut self.waiters[index].waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        true
    }

    /// The values of the waiters before `ticket`, oldest first.
    pub fn earlier(&self, ticket: WaiterTicket) -> impl Iterator<Item = &T> {
        self.waiters.iter().take_while(move |waiter| waiter.ticket < ticket).map(|waiter| &waiter.value)
    }

    /// Removes the first waiter. Gives its value, and its waker if it has one.
    pub fn pop_front(&mut self) -> Option<(T, Option<Waker>)> {
        self.waiters.pop_front().map(|waiter| (waiter.value, waiter.waker))
    }

    /// The value of the first waiter.
    pub fn first(&self) -> Option<&T> {
        self.waiters.front().map(|waiter| &waiter.value)
    }

    /// Takes the waker of the first waiter, which stays queued and must set its waker again if it still waits.
    pub fn take_first_waker(&mut self) -> Option<Waker> {
        self.waiters.front_mut()?.waker.take()
    }

    /// Removes a waiter at any position. `None` if it is not queued.
    pub fn remove(&mut self, ticket: WaiterTicket) -> Option<T> {
        let index = self.index_of(ticket)?;
        self.waiters.remove(index).map(|waiter| waiter.value)
    }

    /// Takes the wakers of the waiters after `ticket` whose value is `selected`, oldest first. Such a waiter stays queued
    /// and must set its waker again if it still waits.
    pub fn take_later_wakers(
        &mut self,
        ticket: WaiterTicket,
        mut selected: impl FnMut(&T) -> bool,
    ) -> impl Iterator<Item = Waker> {
        let first = self.waiters.partition_point(|waiter| waiter.ticket <= ticket);
        let later = self.waiters.range_mut(first..).filter(move |waiter| selected(&waiter.value));
        later.filter_map(|waiter| waiter.waker.take())
    }

    /// Whether the queue has no waiter.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    fn index_of(&self, ticket: WaiterTicket) -> Option<usize> {
        self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_leave_from_the_front_or_from_any_position() {
        let mut queue = WaiterQueue::default();
        let tickets = ["a", "b", "c", "d"].map(|value| queue.push(value));
        assert_eq!(queue.remove(tickets[1]), Some("b"));
        assert_eq!(queue.remove(tickets[1]), None);
        assert!(!queue.set_waker(tickets[1], Waker::noop()));
        assert_eq!(queue.earlier(tickets[3]).collect::<Vec<_>>(), [&"a", &"c"]);
        assert_eq!(queue.pop_front().map(|(value, _)| value), Some("a"));
        assert!(queue.set_waker(tickets[2], Waker::noop()));
        let (value, waker) = queue.pop_front().expect("two are left");
        assert!(value == "c" && waker.is_some());
        assert_eq!(queue.remove(tickets[3]), Some("d"));
        assert!(queue.is_empty() && queue.pop_front().is_none());
        assert!(queue.push("e") > tickets[3], "tickets are not reused");
    }

    #[test]
    fn later_wakers_are_taken_once_and_by_value() {
        let mut queue = WaiterQueue::default();
        let tickets = [1, 2, 3, 4].map(|value| queue.push(value));
        for ticket in tickets {
            assert!(queue.set_waker(ticket, Waker::noop()));
        }
        assert_eq!(queue.take_later_wakers(tickets[0], |value| value % 2 == 0).count(), 2);
        assert_eq!(
            queue.take_later_wakers(tickets[0], |_| true).count(),
            1,
            "only the third has a waker left"
        );
        assert!(queue.take_first_waker().is_some() && queue.take_first_waker().is_none());
        assert_eq!(queue.first(), Some(&1), "the first waiter stays queued");
    }
}
