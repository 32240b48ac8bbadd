//! Devices by io_uring: the queue of a real core.
//!
//! Trims of block devices go to one worker thread, started with the first: io_uring learnt to discard
//! only in Linux 6.12.

use crate::core_waker::Doorbell;
use crate::device_queue::{Completed, DeviceQueue, FileId, Media, Operation};
use crate::thread_queue::ThreadQueue;
use octokv_sys::file::OwnedFile;
use octokv_sys::uring::Ring;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

/// A queue of one core over its ring. Made and used by one thread.
pub struct UringQueue {
    ring: Ring,
    /// By the ring's number of each; none once it is closed.
    files: Vec<Option<Arc<OwnedFile>>>,
    discards: Option<ThreadQueue>,
    doorbell: Arc<Doorbell>,
}

impl UringQueue {
    /// A queue for about `depth` operations at a time. An error of kind PermissionDenied (EPERM) or with
    /// ENOSYS means that io_uring is forbidden or missing here.
    pub fn new(depth: usize, doorbell: Arc<Doorbell>) -> io::Result<UringQueue> {
        let ring = Ring::new(depth.min(4096) as u32)?;
        Ok(UringQueue { ring, files: Vec::new(), discards: None, doorbell })
    }

    fn file(&self, file: FileId) -> &Arc<OwnedFile> {
        self.files[file.0 as usize].as_ref().expect("a file that is open")
    }

    fn discard(&mut self, ticket: u32, file: FileId, operation: Operation) {
        let owned = Arc::clone(self.file(file));
        if self.discards.is_none() {
            self.discards = ThreadQueue::new(1, Arc::clone(&self.doorbell)).ok();
        }
        match &mut self.discards {
            Some(queue) => queue.submit_on(ticket, owned, operation),
            // No thread to be had. A trim is advice: a flush in its place does no harm and answers.
            None => self.ring.flush(ticket, file.0),
        }
    }
}

impl DeviceQueue for UringQueue {
    fn open(&mut self, media: &Media) -> io::Result<FileId> {
        let file = media.kernel()?;
        let id = self.ring.register(Arc::clone(&file));
        let place = id as usize;
        self.files.resize(self.files.len().max(place + 1), None);
        self.files[place] = Some(file);
        Ok(FileId(id))
    }

    fn close(&mut self, file: FileId) {
        self.files[file.0 as usize] = None;
        self.ring.release(file.0);
    }

    fn submit(&mut self, ticket: u32, file: FileId, operation: Operation) {
        match operation {
            Operation::Read { offset, buffer } => self.ring.read(ticket, file.0, offset, buffer),
            Operation::Write { offset, buffer } => self.ring.write(ticket, file.0, offset, buffer),
            Operation::Flush => self.ring.flush(ticket, file.0),
            Operation::Trim { .. } if self.file(file).is_block_device() => {
                self.discard(ticket, file, operation);
            }
            Operation::Trim { offset, bytes } => self.ring.trim(ticket, file.0, offset, bytes),
        }
    }

    fn poll(&mut self, done: &mut Vec<(u32, Completed)>) {
        self.ring.complete(|ticket, buffer, result| done.push((ticket, Completed { buffer, result })));
        if let Some(discards) = &mut self.discards {
            discards.poll(done);
        }
    }

    fn in_flight(&self) -> usize {
        self.ring.in_flight() + self.discards.as_ref().map_or(0, ThreadQueue::in_flight)
    }

    fn wait_descriptor(&self) -> Option<RawFd> {
        Some(self.ring.signal().as_fd().as_raw_fd())
    }
}
