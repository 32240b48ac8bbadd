//! Simulated flash: a device whose answers take the time that a solid-state drive would take.
//!
//! In: operations of any core. Out: their completion, when both the device beneath has carried them out and the
//! modelled drive would have answered. Holds: one [`Model`] for all cores. The time is that of the core's [`Handle`], so
//! the same code runs in real and in virtual time.
//!
//! Contents are the business of the device beneath: a write is there when *that* has it. What the model answers
//! (in the buffer, on flash) is about time alone: a power cut is played with other devices (`power`, the virtual
//! world's disks), not with this one. A simulated drive says that it is not `volatile`, even over memory: it stands for
//! one that keeps what it is given, so an engine formats it and writes its journal, which is what takes a drive's time.
//!
//! Invariants: an operation is in the model from the call on, whatever becomes of its [`Pending`]; none is answered
//! before the model's time; one that the device beneath refuses at once (out of range) is not in the model.
//! Tested in `tests/nand_device.rs`.
//!
//! # Layout
//! - this file: [`NandDevice`].
//! - [`drive_profiles`]: what drives there are, and where each number comes from.
//! - [`timing`]: how long things take.
//! - `space`: where pages lie, and garbage collection. `buffer`: what is written and not on flash. `line`: when a
//!   channel or a link is free.

pub mod drive_profiles;
mod ftl;
mod timeline;
pub mod timing;
mod write_buffer;

pub use drive_profiles::Drive;
pub use timing::{Model, Statistics};

use crate::{Device, Done, Geometry, Pending};
use octokv_base::{Buffer, Lba, Nanos};
use octokv_runtime::{Handle, Sleep, Underway};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A drive's model, shared by the devices of all cores.
pub type SharedModel = Arc<Mutex<Model>>;

/// One core's view of a simulated drive.
pub struct NandDevice {
    beneath: Rc<dyn Device>,
    model: SharedModel,
    handle: Handle,
}

impl NandDevice {
    /// What `beneath` holds, with the times of `model`, on the core of `handle`.
    ///
    /// # Panics
    /// When `beneath` is larger than the drive.
    pub fn new(beneath: Rc<dyn Device>, model: SharedModel, handle: Handle) -> NandDevice {
        let (bytes, drive) = (beneath.geometry().bytes(), *model.lock().drive());
        assert!(bytes <= drive.capacity_bytes, "{bytes} bytes are more than a {} has", drive.product);
        NandDevice { beneath, model, handle }
    }

    /// The operation of the device beneath, answered at the model's time.
    fn at_its_time(&self, pending: Pending, time: impl FnOnce(&mut Model, Nanos) -> Nanos) -> Pending {
        let until = time(&mut self.model.lock(), self.handle.now());
        Pending::later(AtItsTime {
            pending,
            done: None,
            sleep: self.handle.sleep_until(until),
            _underway: self.handle.underway(),
        })
    }

    fn blocks(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

/// Both must be over: the operation and the time. Dropped, the operation goes on and its time stays taken.
struct AtItsTime {
    pending: Pending,
    done: Option<Done>,
    sleep: Sleep,
    _underway: Underway,
}

impl Future for AtItsTime {
    type Output = Done;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Done> {
        if self.done.is_none() {
            self.done = Some(ready!(Pin::new(&mut self.pending).poll(context)));
        }
        ready!(Pin::new(&mut self.sleep).poll(context));
        Poll::Ready(self.done.take().expect("awaited once"))
    }
}

impl Device for NandDevice {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.beneath.geometry() }
    }
    fn name(&self) -> &str {
        self.beneath.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry().holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let blocks = self.blocks(&buffer);
        self.at_its_time(self.beneath.read(at, buffer), |model, now| model.read(now, at, blocks))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry().holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let blocks = self.blocks(&buffer);
        self.at_its_time(self.beneath.write(at, buffer), |model, now| model.write(now, at, blocks))
    }
    fn expect_write(&self, at: Lba, blocks: u64) {
        self.beneath.expect_write(at, blocks);
    }
    fn expect_read(&self, at: Lba, blocks: u64) {
        self.beneath.expect_read(at, blocks);
    }
    fn flush(&self) -> Pending {
        self.at_its_time(self.beneath.flush(), Model::flush)
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        let end = at.0.saturating_add(blocks).min(self.geometry().blocks);
        let within = end.saturating_sub(at.0);
        self.at_its_time(self.beneath.trim(at, blocks), |model, now| model.trim(now, at, within))
    }
}
