//! A device that notes the operations which reach it.

#![allow(dead_code)]

use super::stable_memory::StableMemory;
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceFuture, Geometry};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A device of which reads and writes are noted when they begin, first block and blocks, and flushes counted.
pub struct NotedDevice {
    inner: Rc<dyn Device>,
    pub reads: RefCell<Vec<(u64, u64)>>,
    pub writes: RefCell<Vec<(u64, u64)>>,
    pub flushes: Cell<u64>,
}

impl NotedDevice {
    pub fn new(inner: Rc<dyn Device>) -> Rc<NotedDevice> {
        Rc::new(NotedDevice {
            inner,
            reads: RefCell::default(),
            writes: RefCell::default(),
            flushes: Cell::default(),
        })
    }

    pub fn in_memory(bytes: u64, block_bytes: u32) -> Rc<NotedDevice> {
        NotedDevice::new(StableMemory::new(bytes, block_bytes))
    }

    /// The reads, writes and flushes since the last call.
    pub fn take_counts(&self) -> (usize, usize, u64) {
        (self.reads.take().len(), self.writes.take().len(), self.flushes.take())
    }

    fn blocks_of(&self, buffer: &Buffer) -> u64 {
        buffer.len() as u64 / u64::from(self.geometry().block_bytes)
    }
}

impl Device for NotedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn name(&self) -> &str {
        "a device that notes its operations"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.reads.borrow_mut().push((at.0, self.blocks_of(&buffer)));
        self.inner.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.writes.borrow_mut().push((at.0, self.blocks_of(&buffer)));
        self.inner.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.flushes.set(self.flushes.get() + 1);
        self.inner.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}
