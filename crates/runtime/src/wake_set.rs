//! The wake-up bits of one core's tasks: set by wakers on any thread, taken by the core that polls the tasks.
//!
//! ```text
//!   waker (any thread): word bit ──if the word was 0──▶ summary bit ──always──▶ CoreWaker::notify
//!   reactor:            swap summary word with 0 ──for each bit──▶ swap word with 0 ──▶ task indices
//! ```
//! One bit per slot and one summary bit per word of 64 slots, so any number of wake-ups from any number of cores
//! takes bounded memory and no lock.
//!
//! Invariants: a wake-up is never lost (the core is notified after the bits are set); wake-ups of one slot between
//! two [`WakeSet::take`] add up to one. Model checked in `tests/loom.rs`.

use crate::core_waker::CoreWaker;
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;
use std::task::{Wake, Waker};

/// One bit per slot and one summary bit per word of slots.
pub(crate) struct WakeSet {
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
    core_waker: Arc<CoreWaker>,
}

impl WakeSet {
    pub(crate) fn new(slots: usize, core_waker: Arc<CoreWaker>) -> WakeSet {
        let zeroes = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let words = slots.div_ceil(64);
        WakeSet { words: zeroes(words), summary: zeroes(words.div_ceil(64)), core_waker }
    }

    /// A waker that sets the bit of slot `index` and notifies the core.
    pub(crate) fn waker(wake_set: &Arc<WakeSet>, index: usize) -> Waker {
        Waker::from(Arc::new(SlotWaker { wake_set: Arc::clone(wake_set), index }))
    }

    fn set(&self, index: usize) {
        let word = index / 64;
        // If the word was not 0, the waker that changed it from 0 sets the summary bit and notifies after that.
        if self.words[word].fetch_or(1 << (index % 64), Ordering::SeqCst) == 0 {
            self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::SeqCst);
        }
        self.core_waker.notify();
    }

    /// Clears all set bits and calls `each` with their indices, ascending.
    ///
    /// REQUIRES: called by the core that `core_waker` wakes, after `CoreWaker::begin_iteration`.
    pub(crate) fn take(&self, mut each: impl FnMut(usize)) {
        for (upper, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut words = summary.swap(0, Ordering::SeqCst);
            while words != 0 {
                let word = upper * 64 + words.trailing_zeros() as usize;
                words &= words - 1;
                let mut bits = self.words[word].swap(0, Ordering::SeqCst);
                while bits != 0 {
                    each(word * 64 + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                }
            }
        }
    }

    pub(crate) fn is_any_set(&self) -> bool {
        self.summary.iter().any(|summary| summary.load(Ordering::Relaxed) != 0)
    }
}

struct SlotWaker {
    wake_set: Arc<WakeSet>,
    index: usize,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_set.set(self.index);
    }
}
