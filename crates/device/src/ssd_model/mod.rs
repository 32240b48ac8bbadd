//! A simulated SSD: a device whose operations take as long as on a modelled solid-state drive.
//!
//! In: operations of any core. Out: their completions, when the inner device has executed them and the model's time has
//! passed. Holds: one [`SsdModel`] for all cores. Time is that of the core's [`ReactorHandle`], so the same code runs in
//! real and in simulated time.
//!
//! The inner device stores the contents; the model (write buffer, flash) determines time alone. Power loss is tested
//! with other devices (`power_loss`, the simulator's disks). A simulated SSD is never `volatile`, even over memory: it
//! stands for a drive that keeps its contents, so an engine formats it and writes a journal, which costs drive time.
//!
//! Invariants: an operation occupies the model from the call on, even if its [`DeviceFuture`] is dropped; no operation
//! completes before the model's time; one that is out of range does not enter the model.
//! Tested in `tests/simulated_ssd.rs`.
//!
//! # Layout
//! - this file: [`SimulatedSsd`].
//! - [`drive_profiles`]: the modelled drives, and the source of each number.
//! - [`timing`]: the time of each operation.
//! - `ftl`: page mapping and garbage collection. `write_buffer`: pages that are written and not yet on flash.
//!   `timeline`: the reservations of a channel or a link.

pub mod drive_profiles;
mod ftl;
mod timeline;
pub mod timing;
mod write_buffer;

pub use drive_profiles::DriveProfile;
pub use timing::{SsdModel, SsdStatistics};

use crate::{Device, DeviceFuture, Geometry, IoResult};
use octokv_base::{Buffer, Lba, Nanos};
use octokv_runtime::{InFlightGuard, ReactorHandle, Sleep};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A drive's model, shared by the devices of all cores.
pub type SharedSsdModel = Arc<Mutex<SsdModel>>;

/// A model for the devices of all cores.
pub fn shared_model(model: SsdModel) -> SharedSsdModel {
    Arc::new(Mutex::new(model))
}

/// One core's view of a simulated drive.
pub struct SimulatedSsd {
    inner: Rc<dyn Device>,
    model: SharedSsdModel,
    handle: ReactorHandle,
}

impl SimulatedSsd {
    /// A device with the contents of `inner` and the times of `model`, on the core of `handle`.
    ///
    /// # Panics
    /// If `inner` is larger than the drive.
    pub fn new(inner: Rc<dyn Device>, model: SharedSsdModel, handle: ReactorHandle) -> SimulatedSsd {
        let (bytes, drive) = (inner.geometry().bytes(), *model.lock().profile());
        assert!(bytes <= drive.capacity_bytes, "{bytes} bytes are more than a {} has", drive.product);
        SimulatedSsd { inner, model, handle }
    }

    /// Completes the inner device's operation at the model's time.
    fn complete_at_model_time(
        &self,
        pending: DeviceFuture,
        completion_time: impl FnOnce(&mut SsdModel, Nanos) -> Nanos,
    ) -> DeviceFuture {
        let until = completion_time(&mut self.model.lock(), self.handle.now());
        DeviceFuture::boxed(TimedIo {
            pending,
            result: None,
            sleep: self.handle.sleep_until(until),
            _in_flight: self.handle.track_operation(),
        })
    }

    fn blocks(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

/// Completes when the inner operation has completed and the model's time has passed. If it is dropped, the operation
/// continues and its time stays reserved.
struct TimedIo {
    pending: DeviceFuture,
    result: Option<IoResult>,
    sleep: Sleep,
    _in_flight: InFlightGuard,
}

impl Future for TimedIo {
    type Output = IoResult;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        if self.result.is_none() {
            self.result = Some(ready!(Pin::new(&mut self.pending).poll(context)));
        }
        ready!(Pin::new(&mut self.sleep).poll(context));
        Poll::Ready(self.result.take().expect("a device future is awaited once"))
    }
}

impl Device for SimulatedSsd {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.inner.geometry() }
    }
    fn preferred_write_bytes(&self) -> u32 {
        self.inner.preferred_write_bytes()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn now(&self) -> Option<Nanos> {
        Some(self.handle.now())
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry().is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let blocks = self.blocks(&buffer);
        self.complete_at_model_time(self.inner.read(at, buffer), |model, now| model.read(now, at, blocks))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry().is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let blocks = self.blocks(&buffer);
        self.complete_at_model_time(self.inner.write(at, buffer), |model, now| model.write(now, at, blocks))
    }
    fn prefetch_write(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_write(at, blocks);
    }
    fn prefetch_read(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_read(at, blocks);
    }
    fn flush(&self) -> DeviceFuture {
        self.complete_at_model_time(self.inner.flush(), SsdModel::flush)
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        let end = at.0.saturating_add(blocks).min(self.geometry().blocks);
        let blocks_in_range = end.saturating_sub(at.0);
        self.complete_at_model_time(self.inner.trim(at, blocks), |model, now| {
            model.trim(now, at, blocks_in_range)
        })
    }
}
