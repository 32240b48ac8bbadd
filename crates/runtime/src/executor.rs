//! A bounded slab of futures of one kind, and [`block_on`] for tests and tools.
//!
//! In: futures by [`TaskSlab::spawn`], wake-ups by their wakers from any thread. Out: nothing; a task
//! leaves its result where its reactor looks. Wake-ups are bits: one per slot and a summary above them,
//! so that any number of wake-ups from any number of cores takes bounded memory and no lock.
//!
//! Invariants: a slot, its box and its waker are made once and used again, so a task costs no
//! allocation in steady state; a wake-up after the task's end at most polls the slot's next task once
//! more; a wake-up is never lost (the doorbell rings after the bit is set).

use crate::core_waker::CoreWaker;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A running task: the index of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId(pub u32);

/// One bit per slot, set by wakers, and one summary bit per word of them.
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

    /// What sets the bit of a slot.
    pub(crate) fn waker(wake_set: &Arc<WakeSet>, index: usize) -> Waker {
        Waker::from(Arc::new(SlotWaker { wake_set: Arc::clone(wake_set), index }))
    }

    fn set(&self, index: usize) {
        let word = index / 64;
        // Where the word was not zero, whoever made it so sets or has set the summary.
        if self.words[word].fetch_or(1 << (index % 64), Ordering::SeqCst) == 0 {
            self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::SeqCst);
        }
        self.core_waker.notify();
    }

    /// Takes all set bits and gives their indices, ascending, to `each`.
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

/// Tasks of one type on one core, at most `bound` at a time.
pub struct TaskSlab<F> {
    capacity: usize,
    slots: Vec<Pin<Box<Option<F>>>>,
    wakers: Vec<Waker>,
    free: Vec<u32>,
    wake_set: Arc<WakeSet>,
}

impl<F: Future<Output = ()>> TaskSlab<F> {
    /// An empty slab. Wake-ups ring `doorbell`, the one of the reactor that will poll it.
    pub fn new(capacity: usize, core_waker: Arc<CoreWaker>) -> TaskSlab<F> {
        TaskSlab {
            capacity,
            slots: Vec::with_capacity(capacity),
            wakers: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            wake_set: Arc::new(WakeSet::new(capacity, core_waker)),
        }
    }

    /// Starts a task and polls it once at once: one that need not wait is over when this returns.
    /// Gives the future back when the slab is full.
    pub fn spawn(&mut self, future: F) -> Result<TaskId, F> {
        let index = match self.free.pop() {
            Some(index) => index as usize,
            None if self.slots.len() < self.capacity => self.add_slot(),
            None => return Err(future),
        };
        self.slots[index].as_mut().set(Some(future));
        self.poll(index);
        Ok(TaskId(index as u32))
    }

    /// Makes one more slot, for the first time and for good.
    fn add_slot(&mut self) -> usize {
        let index = self.slots.len();
        self.slots.push(Box::pin(None));
        self.wakers.push(WakeSet::waker(&self.wake_set, index));
        index
    }

    fn poll(&mut self, index: usize) {
        let Some(future) = self.slots[index].as_mut().as_pin_mut() else { return };
        if future.poll(&mut Context::from_waker(&self.wakers[index])).is_ready() {
            self.slots[index].as_mut().set(None);
            self.free.push(index as u32);
        }
    }

    /// Polls every task woken since the last call, once each, in the order of their slots. Gives how
    /// many were polled. A task that wakes itself runs again in the next call.
    pub fn poll_ready(&mut self) -> usize {
        if !self.wake_set.is_any_set() {
            return 0;
        }
        let wake_set = Arc::clone(&self.wake_set);
        let mut polled = 0;
        wake_set.take(|index| {
            polled += 1;
            self.poll(index);
        });
        polled
    }

    /// How many tasks are not over.
    pub fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether `spawn` would give the future back.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == self.capacity
    }
}

struct WakeFlag(std::sync::atomic::AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Polls `future` to its end on this thread, calling `idle` whenever it waits: the place to poll a
/// channel, turn a reactor, or block for the event that will wake it.
pub fn block_on<F: Future>(future: F, mut idle: impl FnMut()) -> F::Output {
    let mut future = pin!(future);
    let flag = Arc::new(WakeFlag(std::sync::atomic::AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&flag));
    loop {
        if flag.0.swap(false, Ordering::Acquire)
            && let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
        {
            return output;
        }
        if !flag.0.load(Ordering::Acquire) {
            idle();
        }
    }
}

/// Lets every other ready task run once before going on.
pub fn yield_now() -> impl Future<Output = ()> {
    let mut yielded = false;
    std::future::poll_fn(move |context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
}
