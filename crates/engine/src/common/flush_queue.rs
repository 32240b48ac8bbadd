//! A flush of a device that callers on all cores share.
//!
//! In: calls, each of which needs a flush that begins after it. Out: flushes, one at a time.
//!
//! ```text
//!   flush 7 runs    ├──────────────────────┤├─────────────────────┤ flush 8
//!   call a  ─▶ wants 7, leads it            │                     │
//!   call b        ─▶ wants 8 ───────────────┴▶ first: leads it ───┴▶ done
//!   call c            ─▶ wants 8 ─────────────────────────────────▶ done, by the flush of b
//! ```
//! A flush makes the writes durable that completed before it began (the contract of [`Device`]), so a call that comes while one runs
//! waits for the next; all that come meanwhile share it. The first of them leads.
//!
//! Invariants: at most one flush runs, unless its leader was dropped; a call succeeds only after a flush that began after the call and
//! succeeded. A failure is final: writes that were not durable then may be lost although a later flush would succeed, so the failed flush, all
//! that wait and all later calls fail. A dropped waiter gives up its place and passes the lead on. When a leader is dropped, the end of
//! its flush counts if the device has reported it by then. Otherwise the end is unknown: the flush counts for no call, and the next
//! waiter leads another one.
//! Tested in `flush_queue_tests.rs`, also against a model.

use super::waker_batch::WakerBatch;
use crate::sync::Mutex;
use octokv_device::{Device, DeviceError, DeviceFuture};
use octokv_runtime::{WaiterQueue, WaiterTicket};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// The shared flushes of one device.
pub struct FlushQueue {
    state: Mutex<FlushState>,
}

struct FlushState {
    /// Flushes that have begun, numbered from 1.
    begun: u64,
    /// The number of the last flush that has succeeded; those before it serve the same calls.
    succeeded: u64,
    /// Whether a flush runs: the one with the number `begun`.
    is_running: bool,
    failed: Option<DeviceError>,
    /// Callers, each with the number of the first flush that begins after its call: ascends from front to back.
    waiters: WaiterQueue<u64>,
}

impl FlushState {
    /// Lets the waiters go whose flush has succeeded (all of them after a failure), and wakes the next leader.
    fn settle(&mut self) -> WakerBatch {
        let mut wakers = WakerBatch::default();
        let is_settled =
            |state: &FlushState, wanted: u64| state.failed.is_some() || wanted <= state.succeeded;
        while self.waiters.first().is_some_and(|&wanted| is_settled(self, wanted)) {
            let (_, waker) = self.waiters.pop_front().expect("it is the first");
            wakers.add(waker);
        }
        if !self.is_running {
            wakers.add(self.waiters.take_first_waker());
        }
        wakers
    }
}

impl Default for FlushQueue {
    fn default() -> FlushQueue {
        FlushQueue::new()
    }
}

impl FlushQueue {
    /// No flush has begun.
    pub fn new() -> FlushQueue {
        let state = FlushState {
            begun: 0,
            succeeded: 0,
            is_running: false,
            failed: None,
            waiters: WaiterQueue::default(),
        };
        FlushQueue { state: Mutex::new(state) }
    }

    /// Returns after a flush of the device that began after this call. `device` is the caller's view of the one device of this
    /// queue.
    ///
    /// # Errors
    /// The device's. Then every later call fails with the same error.
    pub async fn flush(&self, device: &dyn Device) -> Result<(), DeviceError> {
        let mut caller = {
            let mut state = self.state.lock();
            if let Some(error) = state.failed {
                return Err(error);
            }
            let wanted = state.begun + 1;
            let ticket = state.waiters.push(wanted);
            FlushCaller { queue: self, wanted, ticket }
        };
        match std::future::poll_fn(|context| caller.poll_turn(context)).await? {
            FlushTurn::Served => Ok(()),
            FlushTurn::Lead => caller.lead(device).await,
        }
    }

    /// The number of flushes that have begun.
    pub fn flushes(&self) -> u64 {
        self.state.lock().begun
    }

    /// Why the device failed, if it did.
    pub fn failure(&self) -> Option<DeviceError> {
        self.state.lock().failed
    }
}

/// The turn of a call.
enum FlushTurn {
    /// A flush has served it.
    Served,
    /// It leads the next flush.
    Lead,
}

/// A call in the queue. Dropping it gives up its place.
struct FlushCaller<'a> {
    queue: &'a FlushQueue,
    wanted: u64,
    ticket: WaiterTicket,
}

impl<'a> FlushCaller<'a> {
    /// Ready when a flush has served the call, or when it is its turn to lead.
    fn poll_turn(&mut self, context: &Context<'_>) -> Poll<Result<FlushTurn, DeviceError>> {
        let mut state = self.queue.state.lock();
        // Before the failure: that may be of a later flush.
        if self.wanted <= state.succeeded {
            return Poll::Ready(Ok(FlushTurn::Served));
        }
        if let Some(error) = state.failed {
            return Poll::Ready(Err(error));
        }
        let is_first = state.waiters.earlier(self.ticket).next().is_none();
        if is_first && !state.is_running {
            return Poll::Ready(Ok(FlushTurn::Lead));
        }
        assert!(
            state.waiters.set_waker(self.ticket, context.waker()),
            "a caller waits until a flush serves it"
        );
        Poll::Pending
    }

    /// Begins the next flush. REQUIRES: its turn has come, and nothing was awaited since.
    fn lead(self, device: &dyn Device) -> RunningFlush<'a> {
        let queue = self.queue;
        {
            let mut state = queue.state.lock();
            assert!(!state.is_running, "two leaders of a flush");
            state.begun += 1;
            state.is_running = true;
            state.waiters.remove(self.ticket).expect("a leader is the first waiter");
        }
        // It waits no more.
        std::mem::forget(self);
        // The operation begins with this call.
        RunningFlush { queue, operation: Some(device.flush()) }
    }
}

impl Drop for FlushCaller<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.waiters.remove(self.ticket);
        let wakers = state.settle();
        drop(state);
        wakers.wake();
    }
}

/// The flush that runs, polled by its leader.
struct RunningFlush<'a> {
    queue: &'a FlushQueue,
    /// `None` once it has ended.
    operation: Option<DeviceFuture>,
}

impl RunningFlush<'_> {
    /// Notes how the flush ended; `None`: it is unknown.
    fn end(&mut self, result: Option<Result<(), DeviceError>>) {
        self.operation = None;
        let mut state = self.queue.state.lock();
        state.is_running = false;
        match result {
            Some(Ok(())) => state.succeeded = state.begun,
            Some(Err(error)) => state.failed = Some(error),
            None => {}
        }
        let wakers = state.settle();
        drop(state);
        wakers.wake();
    }
}

impl Future for RunningFlush<'_> {
    type Output = Result<(), DeviceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        let operation = self.operation.as_mut().expect("not polled after it has ended");
        let result = std::task::ready!(Pin::new(operation).poll(context)).result;
        self.end(Some(result));
        Poll::Ready(result)
    }
}

impl Drop for RunningFlush<'_> {
    fn drop(&mut self) {
        let Some(operation) = &mut self.operation else { return };
        // A failure that the device has reported already is not lost with the leader.
        let ended = match Pin::new(operation).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ended) => Some(ended.result),
            Poll::Pending => None,
        };
        self.end(ended);
    }
}
