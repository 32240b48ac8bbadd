//! Devices by io_uring: the queue of a real core.
//!
//! Trims of block devices go to one worker thread, started with the first: io_uring learnt to discard
//! only in Linux 6.12.

use crate::core_waker::CoreWaker;
use crate::device_queue::{DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation};
use crate::thread_queue::ThreadQueue;
use octokv_sys::file::DeviceFile;
use octokv_sys::uring::UringDriver;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

/// A queue of one core over its ring. Made and used by one thread.
pub struct UringQueue {
    driver: UringDriver,
    /// By the ring's number of each; none once it is closed.
    files: Vec<Option<Arc<DeviceFile>>>,
    trim_queue: Option<ThreadQueue>,
    core_waker: Arc<CoreWaker>,
}

impl UringQueue {
    /// A queue for about `depth` operations at a time. An error of kind PermissionDenied (EPERM) or with
    /// ENOSYS means that io_uring is forbidden or missing here.
    pub fn new(depth: usize, core_waker: Arc<CoreWaker>) -> io::Result<UringQueue> {
        let driver = UringDriver::new(depth.min(4096) as u32)?;
        Ok(UringQueue { driver, files: Vec::new(), trim_queue: None, core_waker })
    }

    fn file(&self, file: FileId) -> &Arc<DeviceFile> {
        self.files[file.0 as usize].as_ref().expect("a file that is open")
    }

    fn submit_discard(&mut self, token: u32, file: FileId, operation: IoOperation) {
        let owned = Arc::clone(self.file(file));
        if self.trim_queue.is_none() {
            self.trim_queue = ThreadQueue::new(1, Arc::clone(&self.core_waker)).ok();
        }
        match &mut self.trim_queue {
            Some(queue) => queue.submit_file(token, owned, operation),
            // No thread to be had. A trim is advice: a flush in its place does no harm and answers.
            None => self.driver.flush(token, file.0),
        }
    }
}

impl DeviceQueue for UringQueue {
    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId> {
        let file = source.kernel_file()?;
        let id = self.driver.register(Arc::clone(&file));
        let index = id as usize;
        self.files.resize(self.files.len().max(index + 1), None);
        self.files[index] = Some(file);
        Ok(FileId(id))
    }

    fn close(&mut self, file: FileId) {
        self.files[file.0 as usize] = None;
        self.driver.unregister(file.0);
    }

    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation) {
        match operation {
            IoOperation::Read { offset, buffer } => self.driver.read(token, file.0, offset, buffer),
            IoOperation::Write { offset, buffer } => self.driver.write(token, file.0, offset, buffer),
            IoOperation::Flush => self.driver.flush(token, file.0),
            IoOperation::Trim { .. } if self.file(file).is_block_device() => {
                self.submit_discard(token, file, operation);
            }
            IoOperation::Trim { offset, bytes } => self.driver.trim(token, file.0, offset, bytes),
        }
    }

    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        self.driver.poll_completions(|token, buffer, result| {
            completions.push((token, IoCompletion { buffer, result }))
        });
        if let Some(trim_queue) = &mut self.trim_queue {
            trim_queue.poll(completions);
        }
    }

    fn in_flight(&self) -> usize {
        self.driver.in_flight() + self.trim_queue.as_ref().map_or(0, ThreadQueue::in_flight)
    }

    fn completion_eventfd(&self) -> Option<RawFd> {
        Some(self.driver.completion_event().as_fd().as_raw_fd())
    }
}
