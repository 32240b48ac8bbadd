//! The event queue of the simulation: a priority queue by time. Events of one time are in the order of scheduling.

use super::event::SimEvent;
use octokv_base::Nanos;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

struct ScheduledEvent {
    due_at: Nanos,
    sequence: u64,
    event: SimEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &ScheduledEvent) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for ScheduledEvent {}
impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &ScheduledEvent) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &ScheduledEvent) -> Ordering {
        (self.due_at, self.sequence).cmp(&(other.due_at, other.sequence))
    }
}

/// The scheduled events.
#[derive(Default)]
pub(crate) struct EventQueue {
    heap: BinaryHeap<Reverse<ScheduledEvent>>,
    sequence: u64,
}

impl EventQueue {
    pub(crate) fn schedule(&mut self, due_at: Nanos, event: SimEvent) {
        self.sequence += 1;
        self.heap.push(Reverse(ScheduledEvent { due_at, sequence: self.sequence, event }));
    }

    /// The time of the next event; [`Nanos::NEVER`] if there is none.
    pub(crate) fn next_due(&self) -> Nanos {
        self.heap.peek().map_or(Nanos::NEVER, |Reverse(entry)| entry.due_at)
    }

    /// Takes the next event if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<SimEvent> {
        if self.next_due() > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry.event)
    }
}
