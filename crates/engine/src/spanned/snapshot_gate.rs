//! Acknowledgements that wait while a snapshot of several devices is taken.
//!
//! ```text
//!   snapshot   ──close──▶ of device 0 ─▶ of device 1 ─▶ … ──open──▶
//!   write of device 0           ├─applied─┤  waits            ├─▶ acknowledged
//! ```
//! Without that a write could be acknowledged behind the snapshot of its device, and another one, which begins then, be in that of its own: the iterator would show
//! the later one alone. A write that is not acknowledged was seen by no host, nor was a read of it, so it is before or after the snapshot as each device has it.
//!
//! Invariant: no operation that ends while the gate is closed is acknowledged before it is open. Tested below.

use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

/// See the module header.
#[derive(Default)]
pub(super) struct SnapshotGate {
    /// The snapshots that are being taken.
    closed: AtomicUsize,
    waiting: Mutex<Vec<Waker>>,
}

/// Keeps the gate closed until it is dropped.
pub(super) struct ClosedGate<'a>(&'a SnapshotGate);

impl SnapshotGate {
    /// Closes the gate.
    pub fn close(&self) -> ClosedGate<'_> {
        self.closed.fetch_add(1, Ordering::SeqCst);
        ClosedGate(self)
    }

    fn is_open(&self) -> bool {
        self.closed.load(Ordering::SeqCst) == 0
    }

    /// Waits until the gate is open.
    pub async fn pass(&self) {
        if self.is_open() {
            return;
        }
        poll_fn(|context| {
            let mut waiting = self.waiting.lock();
            if self.is_open() {
                return Poll::Ready(());
            }
            waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        if self.0.closed.fetch_sub(1, Ordering::SeqCst) == 1 {
            let waiting = std::mem::take(&mut *self.0.waiting.lock());
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::task::noop_waker;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn operations_pass_once_every_snapshot_is_taken() {
        let gate = SnapshotGate::default();
        let waker = noop_waker();
        let mut context = Context::from_waker(&waker);
        assert!(pin!(gate.pass()).poll(&mut context).is_ready());
        let (first, second) = (gate.close(), gate.close());
        let mut waiting = pin!(gate.pass());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        assert_eq!(gate.waiting.lock().len(), 2);
        drop(second);
        assert!(gate.waiting.lock().is_empty(), "all were woken");
        assert!(waiting.as_mut().poll(&mut context).is_ready());
    }
}
