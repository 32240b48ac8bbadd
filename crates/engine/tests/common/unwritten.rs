//! Devices that report what was never written.

#![allow(dead_code)]

use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceFuture, Geometry};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// A device that reports every block as never written, whatever is in it: nothing may depend on this report.
pub struct AllUnwritten(pub Rc<dyn Device>);

/// A device that reports the blocks that were never written, as a file system does. Views share `written`.
pub struct TrackedDevice {
    pub inner: Rc<dyn Device>,
    /// By block.
    pub written: Rc<RefCell<Vec<bool>>>,
}

impl TrackedDevice {
    pub fn new(inner: Rc<dyn Device>) -> TrackedDevice {
        let blocks = inner.geometry().blocks as usize;
        TrackedDevice { inner, written: Rc::new(RefCell::new(vec![false; blocks])) }
    }
}

macro_rules! delegate {
    ($inner:tt) => {
        fn geometry(&self) -> Geometry {
            Geometry { volatile: false, ..self.$inner.geometry() }
        }
        fn name(&self) -> &str {
            self.$inner.name()
        }
        fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
            self.$inner.read(at, buffer)
        }
        fn flush(&self) -> DeviceFuture {
            self.$inner.flush()
        }
        fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
            self.$inner.trim(at, blocks)
        }
    };
}

impl Device for AllUnwritten {
    delegate!(0);
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.write(at, buffer)
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        let end = Lba(self.geometry().blocks);
        (at < end).then_some(at..end)
    }
}

impl Device for TrackedDevice {
    delegate!(inner);
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let blocks = buffer.len() / self.geometry().block_bytes as usize;
        self.written.borrow_mut()[at.0 as usize..at.0 as usize + blocks].fill(true);
        self.inner.write(at, buffer)
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        let written = self.written.borrow();
        let start = (at.0 as usize..written.len()).find(|&block| !written[block])?;
        let end = (start..written.len()).find(|&block| written[block]).unwrap_or(written.len());
        Some(Lba(start as u64)..Lba(end as u64))
    }
}
