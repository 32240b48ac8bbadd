//! A device in memory that keeps its contents: for tests that write so much that a history of it would not fit.

#![allow(dead_code)]

use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use std::rc::Rc;

/// A device in memory that says it is not volatile, so that a volume on it is opened again.
pub struct StableMemory(MemoryDevice);

impl StableMemory {
    pub fn new(bytes: u64, block_bytes: u32) -> Rc<StableMemory> {
        Rc::new(StableMemory(MemoryDevice::new(RamDisk::new(bytes, block_bytes).expect("memory"))))
    }
}

impl Device for StableMemory {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: false, ..self.0.geometry() }
    }
    fn name(&self) -> &str {
        "stable memory"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.0.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.0.trim(at, blocks)
    }
}
