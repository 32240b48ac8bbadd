//! The device half of the driver seam, in the virtual world.

use super::disk::Queue;
use super::{HostId, Shared};
use crate::device_queue::{Completed, DeviceQueue, FileId, Media, MediaKind, Operation};
use std::io;

/// The device queue of one core of a virtual host.
pub struct VirtualQueue {
    world: Shared,
    queue: u32,
    files: Vec<u32>,
}

impl VirtualQueue {
    pub(crate) fn new(world: Shared, host: HostId) -> VirtualQueue {
        let queue = world.with(|state| {
            state.disks.queues.push(Queue::new(host));
            (state.disks.queues.len() - 1) as u32
        });
        VirtualQueue { world, queue, files: Vec::new() }
    }
}

impl DeviceQueue for VirtualQueue {
    fn open(&mut self, media: &Media) -> io::Result<FileId> {
        let MediaKind::Virtual(disk) = media.kind else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        self.files.push(disk);
        Ok(FileId((self.files.len() - 1) as u32))
    }

    fn close(&mut self, _file: FileId) {
        // The disks of a world are there as long as it is.
    }

    fn submit(&mut self, ticket: u32, file: FileId, operation: Operation) {
        let disk = self.files[file.0 as usize];
        self.world.with(|state| {
            state.disks.submit(self.queue, ticket, disk, operation, state.now, &mut state.agenda);
        });
    }

    fn poll(&mut self, done: &mut Vec<(u32, Completed)>) {
        self.world.with(|state| {
            let queue = &mut state.disks.queues[self.queue as usize];
            queue.in_flight -= queue.done.len();
            done.append(&mut queue.done);
        });
    }

    fn in_flight(&self) -> usize {
        self.world.with(|state| state.disks.queues[self.queue as usize].in_flight)
    }
}

impl Drop for VirtualQueue {
    fn drop(&mut self) {
        self.world.with(|state| {
            let queue = &mut state.disks.queues[self.queue as usize];
            queue.alive = false;
            queue.done.clear();
        });
    }
}
