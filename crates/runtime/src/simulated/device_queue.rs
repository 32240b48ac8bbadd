//! The [`DeviceQueue`] of the simulation.

use super::disk::SimQueueState;
use super::ids::{DriverId, SimHostId};
use super::state::SharedSimState;
use crate::device_queue::{DeviceQueue, DeviceSource, DeviceSourceKind, FileId, IoCompletion, IoOperation};
use std::io;

/// The device queue of one core of a simulated host.
pub struct SimDeviceQueue {
    sim: SharedSimState,
    driver: DriverId,
    queue: u32,
    /// The disk of each open file. Grows with each open: a simulated file ID is not reused.
    files: Vec<u32>,
}

impl SimDeviceQueue {
    pub(crate) fn new(sim: SharedSimState, host: SimHostId) -> SimDeviceQueue {
        let (driver, queue) = sim.with(|state| {
            let driver = state.driver_owners.add();
            state.disks.queues.push(SimQueueState::new(host, driver));
            (driver, (state.disks.queues.len() - 1) as u32)
        });
        SimDeviceQueue { sim, driver, queue, files: Vec::new() }
    }
}

impl DeviceQueue for SimDeviceQueue {
    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId> {
        let DeviceSourceKind::Simulated(disk) = source.kind else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.files.push(disk);
        Ok(FileId((self.files.len() - 1) as u32))
    }

    fn close(&mut self, _file: FileId) {
        // Disks exist as long as the simulation.
    }

    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation) {
        let disk = self.files[file.0 as usize];
        self.sim.with(|state| {
            state.driver_owners.note_use(self.driver);
            state.disks.submit(self.queue, token, disk, operation, state.now, &mut state.events);
        });
    }

    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        self.sim.with(|state| {
            state.driver_owners.note_use(self.driver);
            let queue = &mut state.disks.queues[self.queue as usize];
            queue.in_flight -= queue.completions.len();
            completions.append(&mut queue.completions);
        });
    }

    fn in_flight(&self) -> usize {
        self.sim.with(|state| state.disks.queues[self.queue as usize].in_flight)
    }
}

impl Drop for SimDeviceQueue {
    fn drop(&mut self) {
        self.sim.with(|state| {
            let queue = &mut state.disks.queues[self.queue as usize];
            queue.is_open = false;
            queue.completions.clear();
        });
    }
}
