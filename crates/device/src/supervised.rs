//! A device with a timeout, so that one that hangs or fails does not hold up what a core does with others.
//!
//! ```text
//!   operation ─▶ failed? Unavailable ─▶ started ─▶ result ─▶ counted
//!                                          └─▶ nothing of the device ends for the timeout and a grace: it has failed, Unavailable
//! ```
//! In: operations of one core. Out: their results; of a failed device [`crate::DeviceError::Unavailable`]. Invariants: once the device has failed no operation is started; one that hangs keeps
//! its buffer and its slot in the core's queue (whose share of the device is bounded there: [`octokv_runtime::DeviceHandle::set_depth`]), and its caller goes on without both.
//!
//! The timeout begins when the operation leaves the queue of the core, and again while others of the device end, up to [`TIMEOUTS_MAX`] times: those before it in the queue of a slow device are progress.
//! The grace is an eighth of the timeout, and begins when the timeout is noticed: a core that was stopped for longer than the timeout notices the completions of its
//! operations within it. Each operation is allocated. Tested in `tests/supervised.rs`.

use crate::health::{DeviceFailure, DeviceHealth, OperationKind};
use crate::{Device, DeviceFuture, Geometry, IoResult, ReadGuard};
use octokv_base::{Buffer, Lba, Nanos};
use octokv_runtime::ReactorHandle;
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// The grace is one of so many parts of the timeout.
const GRACE_DIVISOR: u64 = 8;
/// An operation that does not end within so many timeouts hangs, whatever others do.
pub const TIMEOUTS_MAX: u32 = 10;

/// The supervision of one of several devices of a namespace, on all cores: clones share its health.
#[derive(Clone)]
pub struct DeviceSupervision {
    health: Arc<DeviceHealth>,
    timeout: Nanos,
    devices: usize,
}

impl DeviceSupervision {
    /// That of a device of a namespace with so many. REQUIRES: `timeout` and `devices` are not 0.
    pub fn new(timeout: Nanos, devices: usize) -> DeviceSupervision {
        DeviceSupervision { health: Arc::default(), timeout, devices }
    }

    /// The health of the device.
    pub fn health(&self) -> &DeviceHealth {
        &self.health
    }

    /// The operations that the device may have in flight on a core: if it hangs, it leaves most of the core's queue to the others of the namespace, and all of them leave half
    /// to other namespaces.
    pub fn depth(&self, core: &ReactorHandle) -> usize {
        (core.devices().concurrency() / (2 * self.devices)).max(1)
    }

    /// A core's view of the device.
    pub fn supervise(&self, device: Rc<dyn Device>, core: &ReactorHandle) -> SupervisedDevice {
        SupervisedDevice::new(device, Arc::clone(&self.health), core.clone(), self.timeout)
    }
}

/// One core's view of a supervised device.
pub struct SupervisedDevice {
    inner: Rc<dyn Device>,
    supervision: Rc<Supervision>,
}

struct Supervision {
    health: Arc<DeviceHealth>,
    handle: ReactorHandle,
    timeout: Nanos,
    /// Which counters of the health it uses.
    core: usize,
    /// When the last operation ended on this core.
    last_end: Cell<Nanos>,
}

/// An operation, counted until it is dropped, or for good if it hangs.
struct BegunOperation {
    supervision: Rc<Supervision>,
    kind: OperationKind,
    block: u64,
    bytes: u64,
    at: Nanos,
    /// The device still has it.
    hangs: Cell<bool>,
}

impl Drop for BegunOperation {
    fn drop(&mut self) {
        if !self.hangs.get() {
            self.supervision.health.note_end(self.supervision.core);
        }
    }
}

impl SupervisedDevice {
    /// A core's view of a device. Times are those of the handle. REQUIRES: the views of all cores share `health`; `timeout` is not 0.
    pub fn new(
        inner: Rc<dyn Device>,
        health: Arc<DeviceHealth>,
        handle: ReactorHandle,
        timeout: Nanos,
    ) -> SupervisedDevice {
        let (core, last_end) = (health.add_core(), Cell::new(Nanos::ZERO));
        let supervision = Rc::new(Supervision { health, handle, timeout, core, last_end });
        SupervisedDevice { inner, supervision }
    }

    /// Starts an operation with `start`, unless the device has failed; its argument has the buffer then, if there is one.
    fn begin<A>(
        &self,
        (kind, block, bytes): (OperationKind, u64, usize),
        argument: A,
        start: impl FnOnce(&dyn Device, A) -> DeviceFuture,
        into_buffer: impl FnOnce(A) -> Option<Buffer>,
    ) -> DeviceFuture {
        let supervision = &self.supervision;
        if supervision.health.failure().is_some() {
            return DeviceFuture::ready(IoResult::unavailable(into_buffer(argument)));
        }
        supervision.health.note_start(supervision.core);
        let begun = BegunOperation {
            supervision: Rc::clone(supervision),
            kind,
            block,
            bytes: bytes as u64,
            at: supervision.handle.now(),
            hangs: Cell::new(false),
        };
        let operation = start(&*self.inner, argument);
        DeviceFuture::boxed(async move { begun.finish(operation).await })
    }
}

impl BegunOperation {
    /// Waits for the operation, but not for ever.
    async fn finish(&self, operation: DeviceFuture) -> IoResult {
        let Supervision { health, handle, timeout, core, last_end } = &*self.supervision;
        let ended = self.wait(pin!(operation)).await;
        let now = handle.now();
        let failure = match &ended {
            Some(IoResult { result: Ok(()), .. }) => {
                last_end.set(now);
                health.note_success(*core, self.kind, self.bytes, now.since(self.at));
                None
            }
            Some(IoResult { result: Err(error), .. }) => {
                last_end.set(now);
                health.note_error(*core, (now, self.block), *timeout, *error)
            }
            None => {
                self.hangs.set(true);
                // The end of this core does not wait for it.
                handle.devices().give_up_in_flight();
                Some(DeviceFailure::TimedOut(*timeout))
            }
        };
        if let Some(failure) = failure {
            health.fail(failure);
        }
        match (ended, failure) {
            (None, _) => IoResult::unavailable(None),
            // The first operation that meets it is answered as those behind it are.
            (Some(ended), Some(DeviceFailure::Removed(_))) => IoResult::unavailable(ended.buffer),
            (Some(ended), _) => ended,
        }
    }

    /// The result of the operation; `None` if it hangs, or waits behind what hangs.
    async fn wait(&self, mut operation: Pin<&mut DeviceFuture>) -> Option<IoResult> {
        let Supervision { health, handle, timeout, last_end, .. } = &*self.supervision;
        let grace = Nanos(timeout.0 / GRACE_DIVISOR);
        let mut begun_at = self.at;
        // The queue of the core may be full of operations of other devices: that is no sign of this one.
        while !operation.has_begun() {
            if let Some(ended) = self.ended_until(&mut operation, handle.now() + grace).await {
                return Some(ended);
            }
            if health.failure().is_some() {
                return None;
            }
            begun_at = handle.now();
        }
        let latest = begun_at + timeout.times(TIMEOUTS_MAX as usize);
        loop {
            let deadline = (last_end.get().max(begun_at) + *timeout).min(latest);
            if handle.now() < deadline {
                if let Some(ended) = self.ended_until(&mut operation, deadline).await {
                    return Some(ended);
                }
                continue;
            }
            // A device whose completions were not seen for so long has a moment to show them, on any core.
            let successes = health.successes();
            let ended = self.ended_until(&mut operation, handle.now() + grace).await;
            if ended.is_some() || health.successes() == successes || handle.now() >= latest {
                return ended;
            }
            last_end.set(handle.now());
        }
    }

    /// The result of the operation, if it ends by then.
    async fn ended_until(&self, operation: &mut Pin<&mut DeviceFuture>, until: Nanos) -> Option<IoResult> {
        let mut sleep = pin!(self.supervision.handle.sleep_until(until));
        poll_fn(|context| match operation.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => sleep.as_mut().poll(context).map(|()| None),
        })
        .await
    }
}

impl Device for SupervisedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn preferred_write_bytes(&self) -> u32 {
        self.inner.preferred_write_bytes()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn now(&self) -> Option<Nanos> {
        self.inner.now()
    }
    fn is_available(&self) -> bool {
        self.supervision.health.failure().is_none()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let load = (OperationKind::Read, at.0, buffer.len());
        self.begin(load, buffer, |device, buffer| device.read(at, buffer), Some)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let load = (OperationKind::Write, at.0, buffer.len());
        self.begin(load, buffer, |device, buffer| device.write(at, buffer), Some)
    }
    fn write_vectored(&self, at: Lba, buffers: Vec<Buffer>) -> DeviceFuture {
        let load = (OperationKind::Write, at.0, buffers.iter().map(|buffer| buffer.len()).sum());
        self.begin(load, buffers, |device, buffers| device.write_vectored(at, buffers), |_| None)
    }
    fn prefetch_write(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_write(at, blocks);
    }
    fn prefetch_read(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_read(at, blocks);
    }
    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.is_available().then(|| self.inner.read_in_place(at, bytes))?
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.is_available() && self.inner.write_in_place(at, bytes, write)
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        self.inner.next_unwritten(at)
    }
    fn flush(&self) -> DeviceFuture {
        self.begin((OperationKind::Flush, u64::MAX, 0), (), |device, ()| device.flush(), |()| None)
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.begin((OperationKind::Trim, at.0, 0), (), |device, ()| device.trim(at, blocks), |()| None)
    }
}
