//! [`TaskSlab`], a bounded slab of futures of one type, and [`block_on`] for tests and tools.
//!
//! In: futures by [`TaskSlab::spawn`], wake-ups by their wakers from any thread. A task returns nothing: it stores its
//! result in memory that its reactor reads. Wake-ups are bits of a `WakeSet`.
//!
//! Invariants: a slot, its box and its waker are allocated once and reused, so a task allocates nothing in steady
//! state; a wake-up after the task's end at most polls the slot's next task once without need; a wake-up is never
//! lost. Tested in `tests/tasks.rs`, the wake-ups in `tests/loom.rs`.

use crate::core_waker::CoreWaker;
use crate::wake_set::WakeSet;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A running task: the index of its slot in the slab, below the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskId(pub u32);

/// The tasks of one type on one core, at most `capacity` at a time.
pub struct TaskSlab<F> {
    capacity: usize,
    slots: Vec<Pin<Box<Option<F>>>>,
    wakers: Vec<Waker>,
    free: Vec<u32>,
    wake_set: Arc<WakeSet>,
}

impl<F: Future<Output = ()>> TaskSlab<F> {
    /// An empty slab of at most `capacity` tasks. A wake-up notifies `core_waker`, the waker of the core that polls
    /// the slab.
    pub fn new(capacity: usize, core_waker: Arc<CoreWaker>) -> TaskSlab<F> {
        TaskSlab {
            capacity,
            slots: Vec::with_capacity(capacity),
            wakers: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            wake_set: Arc::new(WakeSet::new(capacity, core_waker)),
        }
    }

    /// Starts a task and polls it once immediately: a task that does not wait has ended when this returns.
    ///
    /// # Errors
    /// Returns the future if the slab is full.
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

    /// Allocates one more slot. Slots are never freed.
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

    /// Polls every task woken since the last call, once each, in slot order. Returns how many wake-ups it handled. A
    /// task that wakes itself is polled again by the next call.
    ///
    /// REQUIRES: called after [`CoreWaker::begin_iteration`] of this reactor iteration.
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

    /// The number of tasks that have not ended.
    pub fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether [`TaskSlab::spawn`] would fail.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == self.capacity
    }
}

struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Polls `future` to completion on the calling thread, and calls `idle` whenever it is pending. `idle` polls a
/// device queue, runs a reactor iteration, or blocks for the event that wakes the future.
pub fn block_on<F: Future>(future: F, mut idle: impl FnMut()) -> F::Output {
    let mut future = pin!(future);
    let flag = Arc::new(WakeFlag(AtomicBool::new(true)));
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

/// Yields once: every other ready task runs before the caller continues.
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
