//! Simulated flash: a device whose answers take the time that a solid-state drive would take.
//!
//! In: operations of any core. Out: their completion, when both the device beneath has carried them out and the
//! modelled drive would have answered. Holds: one [`SsdModel`] for all cores. The time is that of the core's [`Handle`], so
//! the same code runs in real and in virtual time.
//!
//! Contents are the business of the device beneath: a write is there when *that* has it. What the model answers
//! (in the buffer, on flash) is about time alone: a power cut is played with other devices (`power`, the virtual
//! world's disks), not with this one. A simulated drive says that it is not `volatile`, even over memory: it stands for
//! one that keeps what it is given, so an engine formats it and writes its journal, which is what takes a drive's time.
//!
//! Invariants: an operation is in the model from the call on, whatever becomes of its [`DeviceFuture`]; none is answered
//! before the model's time; one that the device beneath refuses at once (out of range) is not in the model.
//! Tested in `tests/nand_device.rs`.
//!
//! # Layout
//! - this file: [`SimulatedSsd`].
//! - [`drive_profiles`]: what drives there are, and where each number comes from.
//! - [`timing`]: how long things take.
//! - `space`: where pages lie, and garbage collection. `buffer`: what is written and not on flash. `line`: when a
//!   channel or a link is free.

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

/// One core's view of a simulated drive.
pub struct SimulatedSsd {
    inner: Rc<dyn Device>,
    model: SharedSsdModel,
    handle: ReactorHandle,
}

impl SimulatedSsd {
    /// What `beneath` holds, with the times of `model`, on the core of `handle`.
    ///
    /// # Panics
    /// When `beneath` is larger than the drive.
    pub fn new(beneath: Rc<dyn Device>, model: SharedSsdModel, handle: ReactorHandle) -> SimulatedSsd {
        let (bytes, drive) = (beneath.geometry().bytes(), *model.lock().profile());
        assert!(bytes <= drive.capacity_bytes, "{bytes} bytes are more than a {} has", drive.product);
        SimulatedSsd { inner: beneath, model, handle }
    }

    /// The operation of the device beneath, answered at the model's time.
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

/// Both must be over: the operation and the time. Dropped, the operation goes on and its time stays taken.
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
        Poll::Ready(self.result.take().expect("awaited once"))
    }
}

impl Device for SimulatedSsd {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.inner.geometry() }
    }
    fn name(&self) -> &str {
        self.inner.name()
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
