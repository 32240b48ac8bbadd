//! Epoch-based reclamation of record space.
//!
//! A reader *enters* an epoch before it looks up a record and leaves it after reading the record. Freed space is retired
//! with the current epoch, and is reclaimed when all readers that entered in that epoch or earlier have left. Each core
//! counts its own readers, publishes its oldest epoch, and keeps the space that it retired: while no reader is in its way,
//! it writes no line that another core reads. The epoch advances when space has to wait for readers of the current one.
//!
//! Correctness: a reader publishes its epoch before its lookup; space is retired after its entry is out of the index, and
//! takes its epoch after that. A reader that found the old entry has therefore published an epoch no later than that of
//! the space. The lock of the index partition orders the two: a reader that locks it after the removal does not find the
//! entry.
//!
//! Orderings: that lock and the lock of the queue carry the epochs from a reader that found the entry to the retiring and the
//! reclaiming core, so `current` is relaxed: who retires the space reads no older epoch than that reader. A reader's end has no lock: its release store, read by an acquire load, puts its reads
//! before the reuse. A writer that finds no space may wait for the readers that hold some back ([`Epochs::readers_left`]):
//! either it sees that the last one has left, or that one sees that somebody waits; a fence on both sides orders the two.
//! Model checked in `tests/loom.rs`.

use super::allocator::Extent;
use crate::bug_injection::{self, InjectedBug};
use crate::sync::{AtomicU64, Mutex, Ordering, fence};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

/// The epochs and retired space that all cores share.
pub struct Epochs {
    current: AtomicU64,
    /// The oldest epoch with a reader on each core; `u64::MAX` without readers.
    oldest: Box<[PaddedEpoch]>,
    /// By core, the space that it retired: at most `extents_max` runs, which are disjoint, since none is allocated again before
    /// it leaves its queue.
    retired: Box<[RetiredQueue]>,
    extents_max: u64,
    /// 1 while `waiters` has any.
    are_waiting: AtomicU64,
    /// Tasks that wait for readers to leave, each once.
    waiters: Mutex<Vec<Waker>>,
}

/// An epoch in its own cache line.
#[repr(align(64))]
struct PaddedEpoch(AtomicU64);

/// The space that one core retired, oldest first, in a cache line of its own.
#[repr(align(64))]
struct RetiredQueue(Mutex<VecDeque<(u64, Extent)>>);

impl Epochs {
    /// The epochs of the readers of `cores` cores, for a record area of `record_units` units.
    pub fn new(cores: usize, record_units: u64) -> Epochs {
        let no_reader = |_| PaddedEpoch(AtomicU64::new(u64::MAX));
        Epochs {
            current: AtomicU64::new(0),
            oldest: (0..cores).map(no_reader).collect(),
            retired: (0..cores).map(|_| RetiredQueue(Mutex::new(VecDeque::new()))).collect(),
            extents_max: record_units,
            are_waiting: AtomicU64::new(0),
            waiters: Mutex::new(Vec::new()),
        }
    }

    /// The number of cores.
    pub fn cores(&self) -> usize {
        self.oldest.len()
    }

    /// Retires space of core `core`. REQUIRES: its entries are out of the index.
    ///
    /// # Panics
    /// If more runs are retired than the record area has units.
    pub fn retire(&self, core: usize, extents: &[Extent]) {
        if !extents.is_empty() {
            let epoch = self.current.load(Ordering::Relaxed);
            let mut retired = self.retired[core].0.lock();
            retired.extend(extents.iter().map(|&extent| (epoch, extent)));
            assert!(
                retired.len() as u64 <= self.extents_max,
                "{} runs of units are retired in a record area of {} units",
                retired.len(),
                self.extents_max
            );
        }
    }

    /// Calls `each` for up to `limit` extents that core `core` retired and no reader can use.
    pub fn reclaim(&self, core: usize, limit: usize, mut each: impl FnMut(Extent)) {
        let mut retired = self.retired[core].0.lock();
        for _ in 0..limit {
            match self.pop_free(&mut retired, |_| true) {
                Some(extent) => each(extent),
                None => return,
            }
        }
    }

    /// [`Epochs::reclaim`] of all space, whichever core retired it.
    pub fn reclaim_all(&self, mut each: impl FnMut(Extent)) {
        (0..self.retired.len()).for_each(|core| self.reclaim(core, usize::MAX, &mut each));
    }

    /// The run that core `core` retired first, if no reader can use it and it has this length.
    pub fn recycle(&self, core: usize, units: u64) -> Option<Extent> {
        self.pop_free(&mut self.retired[core].0.lock(), |extent| extent.units == units)
    }

    /// Takes the first extent of a queue, if no reader can use it and `accepts` it. If readers of the current epoch are in its
    /// way, others enter the next one.
    fn pop_free(
        &self,
        retired: &mut VecDeque<(u64, Extent)>,
        accepts: impl FnOnce(Extent) -> bool,
    ) -> Option<Extent> {
        let &(epoch, extent) = retired.front()?;
        if epoch >= self.oldest() && !bug_injection::is_injected(InjectedBug::IgnoreEpochs) {
            if epoch == self.current.load(Ordering::Relaxed) {
                self.current.fetch_add(1, Ordering::Relaxed);
            }
            return None;
        }
        accepts(extent).then(|| {
            retired.pop_front();
            extent
        })
    }

    /// Whether some retired space is not reclaimed.
    pub fn has_retired(&self) -> bool {
        self.retired.iter().any(|queue| !queue.0.lock().is_empty())
    }

    /// Waits until all readers that are active at the call have left. Usually, space retired before the call can then be
    /// reclaimed; not if a reader has entered since with an older epoch. REQUIRES: the caller is in no epoch.
    pub fn readers_left(&self) -> impl Future<Output = ()> + '_ {
        let current = self.current.fetch_add(1, Ordering::Relaxed) + 1;
        poll_fn(move |context| {
            if self.oldest() >= current {
                return Poll::Ready(());
            }
            let mut waiters = self.waiters.lock();
            if !waiters.iter().any(|waiter| waiter.will_wake(context.waker())) {
                waiters.push(context.waker().clone());
            }
            self.are_waiting.store(1, Ordering::Relaxed);
            drop(waiters);
            fence(Ordering::SeqCst);
            if self.oldest() >= current { Poll::Ready(()) } else { Poll::Pending }
        })
    }

    /// The oldest epoch with a reader; `u64::MAX` without readers.
    fn oldest(&self) -> u64 {
        self.oldest.iter().map(|epoch| epoch.0.load(Ordering::Acquire)).min().unwrap_or(u64::MAX)
    }

    /// Publishes the oldest epoch of a core after one of its readers left, and wakes the tasks that wait for that.
    fn publish_leave(&self, core: usize, oldest: u64) {
        self.oldest[core].0.store(oldest, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.are_waiting.load(Ordering::Relaxed) != 0 {
            self.wake_waiters();
        }
    }

    #[cold]
    fn wake_waiters(&self) {
        let mut waiters = self.waiters.lock();
        let woken = std::mem::take(&mut *waiters);
        self.are_waiting.store(0, Ordering::Relaxed);
        drop(waiters);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// One core's readers: the number that entered in each epoch.
#[derive(Default)]
pub struct EpochReaders {
    core: usize,
    /// The last epoch that a reader entered, and its active readers: nearly always all there are.
    newest: Cell<(u64, u32)>,
    /// The earlier epochs with readers, oldest first. At most one entry per [`EpochGuard`].
    older: RefCell<VecDeque<(u64, u32)>>,
}

/// An active reader; dropping it leaves the epoch.
pub struct EpochGuard<'a> {
    readers: &'a EpochReaders,
    epochs: &'a Epochs,
    epoch: u64,
}

impl EpochReaders {
    /// The readers of core `core`.
    pub fn new(core: usize) -> EpochReaders {
        EpochReaders { core, ..EpochReaders::default() }
    }

    /// The core.
    pub fn core(&self) -> usize {
        self.core
    }

    /// Enters the current epoch. REQUIRES: the lookup follows.
    #[inline]
    pub fn enter<'a>(&'a self, epochs: &'a Epochs) -> EpochGuard<'a> {
        let epoch = epochs.current.load(Ordering::Relaxed);
        let (newest, count) = self.newest.get();
        if count > 0 && newest == epoch {
            self.newest.set((epoch, count + 1));
        } else {
            self.enter_first(epochs, epoch);
        }
        EpochGuard { readers: self, epochs, epoch }
    }

    /// Enters an epoch in which the core has no reader.
    fn enter_first(&self, epochs: &Epochs, epoch: u64) {
        let mut older = self.older.borrow_mut();
        let (newest, count) = self.newest.replace((epoch, 1));
        if count > 0 {
            older.push_back((newest, count));
        } else if older.is_empty() {
            epochs.oldest[self.core].0.store(epoch, Ordering::Release);
        }
    }

    /// Leaves an epoch in which the core has no other reader, or one before the newest.
    fn leave(&self, epochs: &Epochs, epoch: u64) {
        let mut older = self.older.borrow_mut();
        let (newest, count) = self.newest.get();
        let oldest_before = older.front().map_or(newest, |(epoch, _)| *epoch);
        if epoch == newest {
            self.newest.set((newest, count - 1));
        } else {
            let entry = older.iter_mut().find(|(entered, _)| *entered == epoch);
            entry.expect("a guard has entered its epoch").1 -= 1;
            while older.front().is_some_and(|(_, count)| *count == 0) {
                older.pop_front();
            }
        }
        let last = match self.newest.get() {
            (_, 0) => u64::MAX,
            (newest, _) => newest,
        };
        let oldest = older.front().map_or(last, |(epoch, _)| *epoch);
        if oldest != oldest_before {
            epochs.publish_leave(self.core, oldest);
        }
    }
}

impl Drop for EpochGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let (newest, count) = self.readers.newest.get();
        if newest == self.epoch && count > 1 {
            self.readers.newest.set((newest, count - 1));
        } else {
            self.readers.leave(self.epochs, self.epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Wake};

    #[derive(Default)]
    struct CountingWaker(std::sync::atomic::AtomicU64);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn reclaimed(epochs: &Epochs) -> usize {
        let mut count = 0;
        epochs.reclaim_all(|_| count += 1);
        count
    }

    #[test]
    fn retired_space_waits_for_earlier_readers_only() {
        let (epochs, here, there) = (Epochs::new(2, 8), EpochReaders::new(0), EpochReaders::new(1));
        let extent = [Extent { location: 1, units: 1 }];
        let early = here.enter(&epochs);
        epochs.retire(0, &extent);
        assert_eq!(reclaimed(&epochs), 0);
        // The space had to wait, so that this reader enters the next epoch.
        let late = there.enter(&epochs);
        drop(early);
        assert_eq!(reclaimed(&epochs), 1, "the late reader cannot have found it");
        epochs.retire(1, &extent);
        assert_eq!(reclaimed(&epochs), 0);
        drop(late);
        assert_eq!(reclaimed(&epochs), 1);
    }

    #[test]
    fn a_core_recycles_the_space_that_it_retired_first() {
        let (epochs, readers) = (Epochs::new(2, 8), EpochReaders::new(0));
        let [one, two] = [1, 2].map(|units| Extent { location: 8 * units, units });
        epochs.retire(1, &[two]);
        epochs.retire(0, &[two, one]);
        assert_eq!(epochs.recycle(0, 1), None, "the first has two units");
        let reader = readers.enter(&epochs);
        assert_eq!(epochs.recycle(0, 2), None, "a reader may use it");
        drop(reader);
        assert_eq!(
            (epochs.recycle(0, 2), epochs.recycle(0, 1), epochs.recycle(0, 1)),
            (Some(two), Some(one), None)
        );
        assert!(epochs.has_retired());
        assert_eq!((epochs.recycle(1, 2), epochs.has_retired()), (Some(two), false));
    }

    #[test]
    fn readers_may_leave_in_any_order() {
        let (epochs, readers) = (Epochs::new(1, 8), EpochReaders::new(0));
        let extent = [Extent { location: 1, units: 1 }];
        let first = readers.enter(&epochs);
        epochs.retire(0, &extent);
        let second = readers.enter(&epochs);
        epochs.retire(0, &extent);
        drop(second);
        assert_eq!(reclaimed(&epochs), 0);
        drop(first);
        assert_eq!(reclaimed(&epochs), 2);
    }

    #[test]
    fn readers_of_one_core_in_two_epochs_hold_back_what_each_may_use() {
        for older_leaves_first in [true, false] {
            let (epochs, readers) = (Epochs::new(1, 8), EpochReaders::new(0));
            let older = readers.enter(&epochs);
            epochs.retire(0, &[Extent { location: 1, units: 1 }]);
            assert_eq!(reclaimed(&epochs), 0);
            let newer = [readers.enter(&epochs), readers.enter(&epochs)];
            epochs.retire(0, &[Extent { location: 2, units: 1 }]);
            if older_leaves_first {
                drop(older);
                assert_eq!(
                    (reclaimed(&epochs), reclaimed(&epochs)),
                    (1, 0),
                    "the newer cannot have found it"
                );
                drop(newer);
                assert_eq!(reclaimed(&epochs), 1);
            } else {
                drop(newer);
                assert_eq!(reclaimed(&epochs), 0);
                // The core's other reader is in an earlier epoch.
                let late = readers.enter(&epochs);
                assert_eq!(reclaimed(&epochs), 0);
                drop(late);
                assert_eq!(reclaimed(&epochs), 0);
                drop(older);
                assert_eq!(reclaimed(&epochs), 2);
            }
        }
    }

    #[test]
    fn who_needs_space_is_woken_when_the_readers_of_before_have_left() {
        let (epochs, readers, other) = (Epochs::new(2, 8), EpochReaders::new(0), EpochReaders::new(1));
        let early = readers.enter(&epochs);
        epochs.retire(0, &[Extent { location: 1, units: 1 }]);
        let waker = Arc::new(CountingWaker::default());
        let mut left = pin!(epochs.readers_left());
        let late = other.enter(&epochs);
        let task = Waker::from(Arc::clone(&waker));
        let mut poll = || left.as_mut().poll(&mut Context::from_waker(&task));
        assert_eq!((poll(), poll()), (Poll::Pending, Poll::Pending));
        drop(early);
        assert_eq!(
            waker.0.load(std::sync::atomic::Ordering::Relaxed),
            1,
            "once, however often it was polled"
        );
        assert_eq!(poll(), Poll::Ready(()));
        assert_eq!(reclaimed(&epochs), 1);
        drop(late);
        assert_eq!(waker.0.load(std::sync::atomic::Ordering::Relaxed), 1);
    }

    #[test]
    #[should_panic(expected = "3 runs of units are retired in a record area of 2 units")]
    fn more_retired_runs_than_units_is_a_bug() {
        let epochs = Epochs::new(1, 2);
        epochs.retire(0, &[Extent { location: 1, units: 1 }; 3]);
    }
}
