//! What will happen, in order of time; what is due at one time happens in the order it was set.

use super::disk::DiskEvent;
use super::net::NetEvent;
use octokv_base::Nanos;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Something that will happen.
pub(crate) enum Event {
    Net(NetEvent),
    Disk(DiskEvent),
    /// Whoever experiments in the world wants it.
    Call(Box<dyn FnOnce()>),
}

struct Entry {
    at: Nanos,
    sequence: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

/// The events to come.
#[derive(Default)]
pub(crate) struct Agenda {
    heap: BinaryHeap<Reverse<Entry>>,
    sequence: u64,
}

impl Agenda {
    pub(crate) fn set(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse(Entry { at, sequence: self.sequence, event }));
    }

    /// When the next event is due.
    pub(crate) fn next(&self) -> Nanos {
        self.heap.peek().map_or(Nanos::NEVER, |Reverse(entry)| entry.at)
    }

    /// Takes the next event, if it is due.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<Event> {
        if self.next() > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry.event)
    }
}
