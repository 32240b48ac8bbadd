//! The event queue of a core, in which requests of dense tenants are requeued behind others a few times before they
//! execute (OctoFAS §4.3.2, Algorithm 3; its "backwarding").
//!
//! ```text
//!   push ─▶ │ d0 │ s │ d2 │ d1 │ ─▶ poll, once each:  d0  ─▶ requeue, as d1
//!           requeue ◀──────────────────┘              s   ─▶ forward     B = 0: sparse, or from another core
//!                                                     d2  ─▶ forward     B = 2: requeued twice already
//!                                                     d1  ─▶ requeue, as d2
//! ```
//! In: events; at each poll the time, the number of events that may be forwarded, and B of each event. Out: forwarded
//! events. Passive; its capacity is fixed.
//!
//! Each poll reads B again, so that a decision applies to queued events as well.
//!
//! # Time in the queue
//! A poll handles each event that is present at its start once, and no event pushed meanwhile. With enough capacity,
//! an event leaves at the latest in poll B + 1, whatever else arrives, or in the first poll at which it is older than
//! `held_max`, whichever is first. If a poll runs out of capacity, the events that it did not reach are first in the
//! next one: with a capacity of at least one per poll, an event leaves within (B + 1) × (events in the queue at its
//! arrival + 1) + B polls, and an event older than `held_max` is forwarded when a poll reaches it.
//!
//! Invariants: no event is lost or duplicated; events with the same B leave in arrival order, except old ones; a poll
//! costs at most one step per event. Tests below.

use octokv_base::Nanos;
use std::collections::VecDeque;

#[derive(Debug)]
struct RequeueEntry<T> {
    event: T,
    arrived_at: Nanos,
    requeues: u32,
}

/// The result of one poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequeueStats {
    /// Events forwarded to be executed.
    pub forwarded: usize,
    /// Events put back at the end of the queue.
    pub requeued: usize,
}

/// A bounded FIFO with requeueing.
#[derive(Debug)]
pub struct RequeueQueue<T> {
    entries: VecDeque<RequeueEntry<T>>,
    events_max: usize,
    held_max: Nanos,
}

impl<T> RequeueQueue<T> {
    /// Creates an empty queue of at most `events_max` events; none stays longer than `held_max` and one poll.
    pub fn new(events_max: usize, held_max: Nanos) -> RequeueQueue<T> {
        RequeueQueue { entries: VecDeque::with_capacity(events_max), events_max, held_max }
    }

    /// Changes the age limit, for queued events as well.
    pub fn set_held_max(&mut self, held_max: Nanos) {
        self.held_max = held_max;
    }

    /// The number of queued events.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Appends an event.
    ///
    /// # Errors
    /// Returns the event if the queue is full: execute it at once, or stop taking input.
    pub fn push(&mut self, event: T, now: Nanos) -> Result<(), T> {
        if self.entries.len() == self.events_max {
            return Err(event);
        }
        self.entries.push_back(RequeueEntry { event, arrived_at: now, requeues: 0 });
        Ok(())
    }

    /// Handles each event once: forwards it, up to `capacity` events, or requeues it. `requeues` gives B of an event;
    /// an event with B = 0 is forwarded at once.
    pub fn poll(
        &mut self,
        now: Nanos,
        capacity: usize,
        requeues: impl Fn(&T) -> u32,
        mut forward: impl FnMut(T),
    ) -> RequeueStats {
        let mut stats = RequeueStats::default();
        for _ in 0..self.entries.len() {
            if stats.forwarded == capacity {
                break;
            }
            let Some(mut entry) = self.entries.pop_front() else { break };
            let old = now.since(entry.arrived_at) >= self.held_max;
            if old || entry.requeues >= requeues(&entry.event) {
                stats.forwarded += 1;
                forward(entry.event);
            } else {
                stats.requeued += 1;
                entry.requeues += 1;
                self.entries.push_back(entry);
            }
        }
        stats
    }

    /// The time at which the oldest event is forwarded whatever its B; [`Nanos::NEVER`] if the queue is empty. A
    /// sleeping core wakes at this time. Costs a pass over all events.
    pub fn next_deadline(&self) -> Nanos {
        let oldest = self.entries.iter().map(|entry| entry.arrived_at).min();
        oldest.map_or(Nanos::NEVER, |arrived_at| arrived_at + self.held_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    const UNLIMITED: usize = usize::MAX;

    /// Pushes events (name, B) and returns the names that each poll forwards.
    fn polls(events: &[(u32, u32)], capacity: usize, count: usize) -> Vec<Vec<u32>> {
        let mut queue = RequeueQueue::new(64, Nanos::from_secs(1));
        for &event in events {
            queue.push(event, Nanos::ZERO).unwrap();
        }
        let mut forwarded_by_poll = Vec::new();
        for _ in 0..count {
            let mut forwarded = Vec::new();
            queue.poll(Nanos::ZERO, capacity, |event| event.1, |event| forwarded.push(event.0));
            forwarded_by_poll.push(forwarded);
        }
        forwarded_by_poll
    }

    #[test]
    fn dense_events_are_requeued_b_times_and_others_are_forwarded_at_once() {
        // Events with their B, the capacity, and the names that each poll forwards.
        type RequeueRow = (&'static [(u32, u32)], usize, &'static [&'static [u32]]);
        let table: &[RequeueRow] = &[
            (&[], UNLIMITED, &[&[]]),
            (&[(1, 0)], UNLIMITED, &[&[1]]),
            (&[(1, 2), (2, 0)], UNLIMITED, &[&[2], &[], &[1], &[]]),
            (&[(1, 1), (2, 0), (3, 1), (4, 0)], UNLIMITED, &[&[2, 4], &[1, 3]]),
            (&[(1, 3), (2, 1)], UNLIMITED, &[&[], &[2], &[], &[1]]),
            (&[(1, 0), (2, 0), (3, 0)], 2, &[&[1, 2], &[3]]),
            (&[(1, 1), (2, 0), (3, 0)], 1, &[&[2], &[3], &[1]]),
            (&[(1, 0)], 0, &[&[], &[]]),
        ];
        for (events, capacity, want) in table {
            assert_eq!(polls(events, *capacity, want.len()), *want, "{events:?}");
        }
    }

    #[test]
    fn events_pushed_during_a_poll_wait_for_the_next() {
        let mut queue = RequeueQueue::new(8, Nanos::from_secs(1));
        queue.push(1, Nanos::ZERO).unwrap();
        let mut pushed = Vec::new();
        let stats = queue.poll(Nanos::ZERO, UNLIMITED, |_| 0, |event| pushed.push(event + 1));
        assert_eq!(stats, RequeueStats { forwarded: 1, requeued: 0 });
        pushed.into_iter().for_each(|event| queue.push(event, Nanos::ZERO).unwrap());
        assert_eq!(queue.len(), 1);
        assert_eq!(
            queue.poll(Nanos::ZERO, UNLIMITED, |_| 5, |_| ()),
            RequeueStats { forwarded: 0, requeued: 1 }
        );
        assert_eq!(queue.len(), 1, "a rotation handles an event once, not until it is out");
    }

    #[test]
    fn a_full_queue_returns_the_event() {
        let mut queue = RequeueQueue::new(2, Nanos::from_secs(1));
        assert_eq!((queue.push(1, Nanos::ZERO), queue.push(2, Nanos::ZERO)), (Ok(()), Ok(())));
        assert_eq!(queue.push(3, Nanos::ZERO), Err(3));
        assert_eq!(queue.len(), 2);
        queue.poll(Nanos::ZERO, 1, |_| 0, |_| ());
        assert_eq!(queue.push(3, Nanos::ZERO), Ok(()));
        assert_eq!(RequeueQueue::new(0, Nanos::ZERO).push(1, Nanos::ZERO), Err(1));
    }

    #[test]
    fn an_old_event_leaves_whatever_its_b() {
        let mut queue = RequeueQueue::new(8, Nanos(100));
        assert_eq!(queue.next_deadline(), Nanos::NEVER);
        queue.push("young", Nanos(50)).unwrap();
        queue.push("old", Nanos(10)).unwrap();
        assert_eq!(queue.next_deadline(), Nanos(110));
        let forwarded = |queue: &mut RequeueQueue<&'static str>, now: u64| {
            let mut forwarded = Vec::new();
            queue.poll(Nanos(now), UNLIMITED, |_| u32::MAX, |event| forwarded.push(event));
            forwarded
        };
        assert!(forwarded(&mut queue, 109).is_empty());
        assert_eq!(forwarded(&mut queue, 110), ["old"]);
        assert_eq!(queue.next_deadline(), Nanos(150));
        queue.set_held_max(Nanos(70));
        assert_eq!(forwarded(&mut queue, 120), ["young"], "a new limit is for those that wait, too");
    }

    #[test]
    fn a_new_b_applies_to_queued_events() {
        let mut queue = RequeueQueue::new(8, Nanos::from_secs(1));
        queue.push((), Nanos::ZERO).unwrap();
        for _ in 0..5 {
            assert_eq!(queue.poll(Nanos::ZERO, UNLIMITED, |_| 10, |_| ()).forwarded, 0);
        }
        assert_eq!(queue.poll(Nanos::ZERO, UNLIMITED, |_| 5, |_| ()).forwarded, 1);
    }

    #[test]
    fn no_event_stays_longer_than_its_b_allows() {
        let random = &mut Prng::new(6);
        for round in 0..200 {
            let tight = round % 2 == 1;
            let mut queue = RequeueQueue::new(32, Nanos::from_secs(1));
            let (mut pushed, mut left, mut poll) = (0_u64, Vec::new(), 0_u64);
            while poll < 400 || !queue.is_empty() {
                for _ in 0..random.below(6) {
                    let event = (pushed, random.below(5) as u32, poll, queue.len() as u64);
                    if poll < 400 && queue.push(event, Nanos::ZERO).is_ok() {
                        pushed += 1;
                    }
                }
                let capacity = if tight { random.below(3) as usize + 1 } else { UNLIMITED };
                poll += 1;
                let before = queue.len();
                let stats = queue.poll(
                    Nanos::ZERO,
                    capacity,
                    |event| event.1,
                    |(name, b, pushed, ahead)| {
                        let (b, polls) = (u64::from(b), poll - pushed);
                        let most = if tight { (b + 1) * (ahead + 1) + b } else { b + 1 };
                        assert!(polls <= most, "{polls} polls, not {most}");
                        assert!(tight || polls == b + 1, "not before its time either");
                        left.push((b, name));
                    },
                );
                assert!(stats.forwarded + stats.requeued <= before && stats.forwarded <= capacity);
            }
            assert_eq!(left.len() as u64, pushed, "each leaves once");
            for b in 0..5 {
                let names = left.iter().filter(|event| event.0 == b).map(|event| event.1);
                assert!(names.is_sorted(), "those with the same B keep their order");
            }
        }
    }
}
