//! Deadlines in order: a binary heap that knows where each entry is, so that a timer which is no
//! longer wanted goes at once and the heap is never larger than the timers that live.
//!
//! Invariants: the entry at the top is the earliest; equal deadlines fire in the order they were set.

use octokv_base::Nanos;
use std::task::Waker;

struct Entry {
    deadline: Nanos,
    sequence: u64,
    /// Where in the heap; `usize::MAX` when not there (fired or free).
    position: usize,
    waker: Option<Waker>,
}

/// The timers of one core.
#[derive(Default)]
pub struct Timers {
    entries: Vec<Entry>,
    free: Vec<u32>,
    heap: Vec<u32>,
    sequence: u64,
}

const OUT: usize = usize::MAX;

impl Timers {
    /// Sets a timer; its waker is woken at or after `deadline`.
    pub fn insert(&mut self, deadline: Nanos, waker: Waker) -> u32 {
        self.sequence += 1;
        let entry =
            Entry { deadline, sequence: self.sequence, position: self.heap.len(), waker: Some(waker) };
        let key = match self.free.pop() {
            Some(key) => {
                self.entries[key as usize] = entry;
                key
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.heap.push(key);
        self.up(self.heap.len() - 1);
        key
    }

    /// Has the timer wake `waker` instead.
    pub fn set_waker(&mut self, key: u32, waker: &Waker) {
        if let Some(old) = &mut self.entries[key as usize].waker {
            old.clone_from(waker);
        }
    }

    /// Forgets a timer, fired or not; its key may name another from now on.
    pub fn remove(&mut self, key: u32) {
        let position = self.entries[key as usize].position;
        if position != OUT {
            self.take_out(position);
        }
        self.entries[key as usize].waker = None;
        self.free.push(key);
    }

    /// The earliest deadline, [`Nanos::NEVER`] when there is none.
    pub fn next(&self) -> Nanos {
        self.heap.first().map_or(Nanos::NEVER, |&key| self.entries[key as usize].deadline)
    }

    /// Takes one timer that is due at `now`, earliest first, and gives its waker.
    pub fn fire(&mut self, now: Nanos) -> Option<Waker> {
        if self.next() > now {
            return None;
        }
        let key = *self.heap.first()?;
        self.take_out(0);
        self.entries[key as usize].waker.take()
    }

    /// How many timers wait.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    fn take_out(&mut self, position: usize) {
        let key = self.heap.swap_remove(position);
        self.entries[key as usize].position = OUT;
        if position < self.heap.len() {
            self.entries[self.heap[position] as usize].position = position;
            self.down(position);
            self.up(position);
        }
    }

    fn before(&self, a: usize, b: usize) -> bool {
        let order = |at: usize| {
            let entry = &self.entries[self.heap[at] as usize];
            (entry.deadline, entry.sequence)
        };
        order(a) < order(b)
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.entries[self.heap[a] as usize].position = a;
        self.entries[self.heap[b] as usize].position = b;
    }

    fn up(&mut self, mut at: usize) {
        while at > 0 && self.before(at, (at - 1) / 2) {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }

    fn down(&mut self, mut at: usize) {
        loop {
            let (left, right) = (2 * at + 1, 2 * at + 2);
            if left >= self.heap.len() {
                return;
            }
            let child = if right < self.heap.len() && self.before(right, left) { right } else { left };
            if !self.before(child, at) {
                return;
            }
            self.swap(child, at);
            at = child;
        }
    }
}
