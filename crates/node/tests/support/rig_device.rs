//! Devices of the rig: memory, with simulated costs if wanted, and a file in memory that answers at the next poll.

use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::{Device, DeviceFuture, FileDevice, Geometry, MemoryDevice, RamDisk, ReadGuard};
use octokv_node::OpenDevice;
use octokv_runtime::{DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation, ReactorHandle, Stage};
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// Simulated costs of a core's work.
#[derive(Clone, Copy, Debug, Default)]
pub struct TestCosts {
    /// Per receive and per send.
    pub call: Nanos,
    /// Per device block read.
    pub block: Nanos,
}

/// A memory device whose reads have a cost.
struct CostedDevice {
    memory: MemoryDevice,
    handle: ReactorHandle,
    costs: TestCosts,
}

impl CostedDevice {
    fn charge_read(&self, bytes: usize) {
        let blocks = (bytes / self.geometry().block_bytes as usize) as u64;
        self.handle.cpu_time().advance_simulated(Stage::Kv, Nanos(self.costs.block.0 * blocks));
    }
}

impl Device for CostedDevice {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn name(&self) -> &str {
        self.memory.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.charge_read(buffer.len());
        self.memory.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.memory.write(at, buffer)
    }
    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.charge_read(bytes);
        self.memory.read_in_place(at, bytes)
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.memory.write_in_place(at, bytes, write)
    }
    fn flush(&self) -> DeviceFuture {
        self.memory.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.memory.trim(at, blocks)
    }
}

/// A device of the rig, as its core opens it.
#[derive(Clone)]
pub enum RigDevice {
    /// Memory, as a [`CostedDevice`] if there are costs.
    Memory { disk: Arc<RamDisk>, costs: TestCosts },
    /// The [`DeferredQueue`], as a file.
    Deferred(Geometry),
}

impl OpenDevice for RigDevice {
    fn open_for_core(&self, handle: &ReactorHandle) -> io::Result<Rc<dyn Device>> {
        Ok(match self {
            RigDevice::Memory { disk, costs } => {
                let memory = MemoryDevice::new(Arc::clone(disk));
                match costs.block {
                    Nanos::ZERO => Rc::new(memory),
                    _ => Rc::new(CostedDevice { memory, handle: handle.clone(), costs: *costs }),
                }
            }
            RigDevice::Deferred(geometry) => {
                Rc::new(FileDevice::new(handle.devices().clone(), FileId(0), *geometry, "deferred".into()))
            }
        })
    }
}

/// A queue to one file, which is in memory: operations are executed when they are submitted, and complete at the next poll.
/// Empty for memory devices, which need none.
pub struct DeferredQueue {
    bytes: Vec<u8>,
    completed: Vec<(u32, IoCompletion)>,
}

impl DeferredQueue {
    /// A file of `bytes` zeros.
    pub fn new(bytes: usize) -> DeferredQueue {
        DeferredQueue { bytes: vec![0; bytes], completed: Vec::new() }
    }
}

impl DeviceQueue for DeferredQueue {
    fn open(&mut self, _: &DeviceSource) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn close(&mut self, _: FileId) {}
    fn submit(&mut self, token: u32, _: FileId, operation: IoOperation) {
        let buffer = match operation {
            IoOperation::WriteVectored { mut offset, buffers } => {
                for buffer in buffers {
                    self.bytes[offset as usize..][..buffer.len()].copy_from_slice(&buffer);
                    offset += buffer.len() as u64;
                }
                None
            }
            IoOperation::Read { offset, mut buffer } => {
                let length = buffer.len();
                buffer.copy_from_slice(&self.bytes[offset as usize..][..length]);
                Some(buffer)
            }
            IoOperation::Write { offset, buffer } => {
                self.bytes[offset as usize..][..buffer.len()].copy_from_slice(&buffer);
                Some(buffer)
            }
            IoOperation::Flush | IoOperation::Trim { .. } => None,
        };
        self.completed.push((token, IoCompletion { buffer, result: Ok(()) }));
    }
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        completions.append(&mut self.completed);
    }
    fn in_flight(&self) -> usize {
        self.completed.len()
    }
}
