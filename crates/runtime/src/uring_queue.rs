//! The device queue over io_uring.
//!
//! Trims of block devices run on one worker thread, started by the first of them: io_uring has a discard operation
//! only since Linux 6.12. Tested in `tests/device_queues.rs`.

use crate::core_waker::CoreWaker;
use crate::device_queue::{DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation};
use crate::thread_queue::ThreadQueue;
use octokv_sys::eventfd::EventFd;
use octokv_sys::uring::UringDriver;
use std::io;
use std::sync::Arc;

/// One core's device queue over its own ring. Created and used by one thread.
pub struct UringQueue {
    driver: UringDriver,
    trim_queue: Option<ThreadQueue>,
    core_waker: Arc<CoreWaker>,
}

impl UringQueue {
    /// A queue sized for `depth` operations in flight; more operations wait in memory.
    ///
    /// # Errors
    /// EPERM or EACCES if io_uring is forbidden, ENOSYS if the kernel lacks it, else the kernel's error for a
    /// shortage (memory, descriptors).
    pub fn new(depth: usize, core_waker: Arc<CoreWaker>) -> io::Result<UringQueue> {
        let driver = UringDriver::new(depth.min(4096) as u32)?;
        Ok(UringQueue { driver, trim_queue: None, core_waker })
    }

    fn submit_discard(&mut self, token: u32, file: FileId, operation: IoOperation) {
        let owned = Arc::clone(self.driver.file(file.0));
        if self.trim_queue.is_none() {
            self.trim_queue = ThreadQueue::new(1, Arc::clone(&self.core_waker)).ok();
        }
        match &mut self.trim_queue {
            Some(queue) => queue.submit_file(token, owned, operation),
            // The thread could not be started. A trim is advisory, so a flush completes the operation instead; its
            // errors are the trim's.
            None => self.driver.flush(token, file.0),
        }
    }
}

impl DeviceQueue for UringQueue {
    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId> {
        Ok(FileId(self.driver.register(source.kernel_file()?)))
    }

    fn close(&mut self, file: FileId) {
        self.driver.unregister(file.0);
    }

    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation) {
        match operation {
            IoOperation::Read { offset, buffer } => self.driver.read(token, file.0, offset, buffer),
            IoOperation::Write { offset, buffer } => self.driver.write(token, file.0, offset, buffer),
            IoOperation::WriteVectored { offset, buffers } => {
                self.driver.write_vectored(token, file.0, offset, buffers)
            }
            IoOperation::Flush => self.driver.flush(token, file.0),
            IoOperation::Trim { .. } if self.driver.file(file.0).is_block_device() => {
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

    fn give_up_in_flight(&mut self) {
        self.driver.give_up_in_flight();
        self.trim_queue.iter_mut().for_each(ThreadQueue::give_up_in_flight);
    }

    fn in_flight(&self) -> usize {
        self.driver.in_flight() + self.trim_queue.as_ref().map_or(0, ThreadQueue::in_flight)
    }

    fn completion_eventfd(&self) -> Option<Arc<EventFd>> {
        Some(Arc::clone(self.driver.completion_event()))
    }
}
