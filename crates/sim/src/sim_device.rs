//! The storage of a namespace under test: a simulated disk, or memory, and the devices through which cores reach it.
//!
//! In: the plan of a disk. Out: a device for each core, with the injected faults. Invariant: memory is empty after each stop
//! of its node, a disk never.

use crate::faulty_disk::{DiskFaults, FaultyDisk};
use octokv_base::{Buffer, Lba};
use octokv_device::supervised::DeviceSupervision;
use octokv_device::{Device, FileDevice, Geometry, MemoryDevice, RamDisk};
use octokv_node::OpenDevice;
use octokv_runtime::simulated::{SimDiskConfig, SimDiskId, SimEnv, SimHostId};
use octokv_runtime::{DeviceSource, ReactorHandle, block_on};
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// The storage of a namespace.
pub enum SimStorage {
    /// A simulated disk of the node's host.
    Disk(SimDiskId),
    /// Memory of the node's process.
    Memory(Arc<RamDisk>),
}

impl SimStorage {
    /// Empty storage of this shape.
    pub fn new(sim: &SimEnv, host: SimHostId, config: SimDiskConfig, is_in_memory: bool) -> SimStorage {
        match is_in_memory {
            true => SimStorage::Memory(new_memory(config.size_bytes, config.block_bytes)),
            false => SimStorage::Disk(sim.add_disk(host, config)),
        }
    }

    /// Whether a stop of the node loses the contents.
    pub fn is_in_memory(&self) -> bool {
        matches!(self, SimStorage::Memory(_))
    }

    /// The disk.
    ///
    /// # Panics
    /// If the storage is memory.
    pub fn disk(&self) -> SimDiskId {
        match self {
            SimStorage::Disk(disk) => *disk,
            SimStorage::Memory(_) => panic!("memory is not a disk of the simulation"),
        }
    }

    /// The memory.
    pub fn memory(&self) -> Option<&Arc<RamDisk>> {
        match self {
            SimStorage::Disk(_) => None,
            SimStorage::Memory(memory) => Some(memory),
        }
    }

    /// The process ends: memory is lost.
    pub fn end_process(&mut self) {
        if let SimStorage::Memory(memory) = self {
            let Geometry { block_bytes, .. } = memory.geometry();
            *memory = new_memory(memory.geometry().bytes(), block_bytes);
        }
    }

    /// The first `bytes` bytes.
    pub fn read(&self, sim: &SimEnv, bytes: usize) -> Vec<u8> {
        match self {
            SimStorage::Disk(disk) => {
                let mut contents = vec![0; bytes];
                sim.read_disk(*disk, 0, &mut contents);
                contents
            }
            SimStorage::Memory(memory) => {
                let read = MemoryDevice::new(Arc::clone(memory)).read(Lba(0), Buffer::zeroed(bytes));
                block_on(read, || ()).into_read().expect("memory of this size").to_vec()
            }
        }
    }

    /// The device on this storage, which is a disk of a node, with injected faults. Of several it is supervised.
    pub fn device(
        &self,
        sim: &SimEnv,
        faults: (&DiskFaults, usize),
        supervision: Option<DeviceSupervision>,
    ) -> SimDevice {
        let source = match self {
            SimStorage::Disk(disk) => StorageSource::Disk(sim.device_source(*disk)),
            SimStorage::Memory(memory) => StorageSource::Memory(Arc::clone(memory)),
        };
        SimDevice { source, faults: (faults.0.clone(), faults.1), supervision }
    }
}

fn new_memory(bytes: u64, block_bytes: u32) -> Arc<RamDisk> {
    RamDisk::new(bytes, block_bytes).expect("memory for a small disk")
}

#[derive(Clone)]
enum StorageSource {
    Disk(DeviceSource),
    Memory(Arc<RamDisk>),
}

/// Storage with injected faults, as cores open it.
#[derive(Clone)]
pub struct SimDevice {
    source: StorageSource,
    faults: (DiskFaults, usize),
    supervision: Option<DeviceSupervision>,
}

impl SimDevice {
    /// Whether it was given up by a core that supervises it.
    pub fn has_failed(&self) -> bool {
        self.supervision.as_ref().is_some_and(|supervision| supervision.health().failure().is_some())
    }
}

impl OpenDevice for SimDevice {
    fn open_for_core(&self, handle: &ReactorHandle) -> io::Result<Rc<dyn Device>> {
        let device: Rc<dyn Device> = match &self.source {
            StorageSource::Disk(source) => {
                let blocks = source.size_bytes / u64::from(source.block_bytes);
                let geometry = Geometry { block_bytes: source.block_bytes, blocks, volatile: false };
                let queue = handle.devices();
                let file = queue.open(source)?;
                let device = FileDevice::new(queue, file, geometry, source.name.to_string());
                Rc::new(match &self.supervision {
                    None => device,
                    Some(supervision) => device.with_depth(supervision.depth(handle)),
                })
            }
            StorageSource::Memory(memory) => Rc::new(MemoryDevice::new(Arc::clone(memory))),
        };
        let device: Rc<dyn Device> = Rc::new(FaultyDisk::new(device, self.faults.clone(), handle.clone()));
        Ok(match &self.supervision {
            None => device,
            Some(supervision) => Rc::new(supervision.supervise(device, handle)),
        })
    }
}
