//! The timers of a core: an indexed binary heap. Each entry knows its heap position, so a cancelled timer is removed at
//! once and the heap never exceeds the live timers.
//!
//! Invariants: the top entry has the earliest deadline; equal deadlines fire in the order they were set. Tested below.

use octokv_base::Nanos;
use std::task::Waker;

struct TimerEntry {
    deadline: Nanos,
    sequence: u64,
    /// Index into the heap; [`NOT_IN_HEAP`] for a fired or free entry.
    position: usize,
    waker: Option<Waker>,
}

/// The timers of one core.
#[derive(Default)]
pub struct Timers {
    entries: Vec<TimerEntry>,
    free: Vec<u32>,
    heap: Vec<u32>,
    sequence: u64,
}

/// The limit of one core's timers. Callers bound their tasks below it: more are a bug.
pub const TIMERS_MAX: usize = 1 << 27;

const NOT_IN_HEAP: usize = usize::MAX;

impl Timers {
    /// Sets a timer and returns its key; [`Timers::pop_due`] returns `waker` at or after `deadline`. The key stays
    /// valid until [`Timers::remove`].
    ///
    /// # Panics
    /// If the core has [`TIMERS_MAX`] timers.
    pub fn insert(&mut self, deadline: Nanos, waker: Waker) -> u32 {
        self.sequence += 1;
        let entry =
            TimerEntry { deadline, sequence: self.sequence, position: self.heap.len(), waker: Some(waker) };
        let key = match self.free.pop() {
            Some(key) => {
                self.entries[key as usize] = entry;
                key
            }
            None => {
                assert!(self.entries.len() < TIMERS_MAX, "{TIMERS_MAX} timers on one core");
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.heap.push(key);
        self.sift_up(self.heap.len() - 1);
        key
    }

    /// Replaces the timer's waker. No effect once the timer has fired.
    pub fn set_waker(&mut self, key: u32, waker: &Waker) {
        if let Some(old) = &mut self.entries[key as usize].waker {
            old.clone_from(waker);
        }
    }

    /// Frees a timer, fired or not. Its key may be reused.
    ///
    /// REQUIRES: `key` was returned by [`Timers::insert`] and not removed since.
    pub fn remove(&mut self, key: u32) {
        let position = self.entries[key as usize].position;
        if position != NOT_IN_HEAP {
            self.remove_at(position);
        }
        self.entries[key as usize].waker = None;
        self.free.push(key);
    }

    /// The earliest deadline; [`Nanos::NEVER`] if no timer is set.
    pub fn next_deadline(&self) -> Nanos {
        self.heap.first().map_or(Nanos::NEVER, |&key| self.entries[key as usize].deadline)
    }

    /// Fires the earliest timer that is due at `now` and returns its waker.
    pub fn pop_due(&mut self, now: Nanos) -> Option<Waker> {
        if self.next_deadline() > now {
            return None;
        }
        let key = *self.heap.first()?;
        self.remove_at(0);
        self.entries[key as usize].waker.take()
    }

    /// The number of timers that have not fired.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether no timer is set.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    fn remove_at(&mut self, position: usize) {
        let key = self.heap.swap_remove(position);
        self.entries[key as usize].position = NOT_IN_HEAP;
        if position < self.heap.len() {
            self.entries[self.heap[position] as usize].position = position;
            self.sift_down(position);
            self.sift_up(position);
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
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

    fn sift_up(&mut self, mut at: usize) {
        while at > 0 && self.is_before(at, (at - 1) / 2) {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let (left, right) = (2 * at + 1, 2 * at + 2);
            if left >= self.heap.len() {
                return;
            }
            let child = if right < self.heap.len() && self.is_before(right, left) { right } else { left };
            if !self.is_before(child, at) {
                return;
            }
            self.swap(child, at);
            at = child;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use std::fmt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::task::Wake;

    /// Stores its number in the shared counter when woken.
    struct RecordingWaker(u64, Arc<AtomicU64>);
    impl Wake for RecordingWaker {
        fn wake(self: Arc<Self>) {
            self.1.store(self.0, Ordering::Relaxed);
        }
    }

    fn fired(timers: &mut Timers, now: u64, last: &AtomicU64) -> Vec<u64> {
        std::iter::from_fn(|| {
            timers.pop_due(Nanos(now))?.wake();
            Some(last.load(Ordering::Relaxed))
        })
        .collect()
    }

    #[test]
    fn timers_fire_by_deadline_and_equal_ones_in_the_order_they_were_set() {
        let (mut timers, last) = (Timers::default(), Arc::new(AtomicU64::new(0)));
        for (number, deadline) in [(1, 30), (2, 10), (3, 20), (4, 10), (5, 10)] {
            timers.insert(Nanos(deadline), Arc::new(RecordingWaker(number, Arc::clone(&last))).into());
        }
        assert_eq!(timers.next_deadline(), Nanos(10));
        assert_eq!(fired(&mut timers, 9, &last), []);
        assert_eq!(fired(&mut timers, 20, &last), [2, 4, 5, 3]);
        assert_eq!(fired(&mut timers, 30, &last), [1]);
        assert!(timers.is_empty());
        assert_eq!(timers.next_deadline(), Nanos::NEVER);
    }

    #[derive(Clone, Copy)]
    enum Operation {
        /// Sets a timer, this long after now.
        Set(u64),
        /// Removes one of the timers that have not fired, if any; the number counts round.
        Remove(usize),
        /// Advances the time and fires the timers that are due.
        Advance(u64),
    }

    /// One line, also in a failing list.
    impl fmt::Debug for Operation {
        fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
            match self {
                Operation::Set(ns) => write!(f, "set a timer in {ns}"),
                Operation::Remove(number) => write!(f, "remove timer {number}"),
                Operation::Advance(ns) => write!(f, "advance by {ns}"),
            }
        }
    }

    /// In parts, so that a failing list loses whole parts first.
    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let operation = (0..4, 0..500_usize, 0..100_u64).prop_map(|(kind, large, small)| match kind {
            0 | 1 => Operation::Set(large as u64),
            2 => Operation::Remove(large),
            _ => Operation::Advance(small),
        });
        vec(vec(operation, 0..=90), 0..=90).prop_map(|parts| parts.concat())
    }

    fn assert_agrees_with_a_sorted_list(operations: &[Operation]) {
        let (mut timers, last) = (Timers::default(), Arc::new(AtomicU64::new(0)));
        let mut model: Vec<(u64, u64, u32)> = Vec::new();
        let mut now = 0;
        for (&operation, number) in operations.iter().zip(0..) {
            match operation {
                Operation::Set(ns) => {
                    let waker = Arc::new(RecordingWaker(number, Arc::clone(&last))).into();
                    model.push((now + ns, number, timers.insert(Nanos(now + ns), waker)));
                }
                Operation::Remove(at) if !model.is_empty() => {
                    let (_, _, key) = model.swap_remove(at % model.len());
                    timers.remove(key);
                }
                Operation::Remove(_) => {}
                Operation::Advance(ns) => {
                    now += ns;
                    model.sort_unstable();
                    let due = model.partition_point(|&(deadline, ..)| deadline <= now);
                    let expected: Vec<u64> = model[..due].iter().map(|&(_, number, _)| number).collect();
                    assert_eq!(fired(&mut timers, now, &last), expected, "the timers that fire at {now}");
                    model.drain(..due).for_each(|(_, _, key)| timers.remove(key));
                }
            }
            assert_eq!(timers.len(), model.len(), "the number of timers");
        }
        assert!(timers.entries.len() < 1_000, "{} entries for few timers", timers.entries.len());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 10, rng_seed: RngSeed::Fixed(1), failure_persistence: None, max_shrink_iters: 4_000,
            ..ProptestConfig::default()
        })]

        #[test]
        fn random_timers_agree_with_a_sorted_list_and_removed_ones_are_gone_at_once(operations in operations()) {
            assert_agrees_with_a_sorted_list(&operations);
        }
    }
}
