//! The device queue over worker threads and blocking system calls, for systems that forbid io_uring, as many
//! containers do.
//!
//! ```text
//!   core ─submit─▶ work queue (mutex) ─▶ worker: pread, pwrite, fdatasync, … ─▶ completions (mutex) ─poll─▶ core
//!                                           └── notifies the core's CoreWaker
//! ```
//! Invariants: a buffer is owned by the work queue, one worker, or the completions; the work queue and the completions
//! hold at most the operations that the caller has in flight (bounded by [`crate::DeviceHandle`]'s depth); drop waits
//! until the workers have executed every queued operation. Tested in `tests/device_queues.rs`, `tests/reactor.rs` and
//! `tests/thread_fallback.rs`.

use crate::core_waker::CoreWaker;
use crate::device_queue::{DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation};
use octokv_sys::file::DeviceFile;
use octokv_sys::thread;
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

struct BlockingJob {
    token: u32,
    file: Arc<DeviceFile>,
    operation: IoOperation,
}

#[derive(Default)]
struct WorkQueue {
    jobs: VecDeque<BlockingJob>,
    is_closing: bool,
}

struct ThreadQueueShared {
    work_queue: Mutex<WorkQueue>,
    work_available: Condvar,
    completions: Mutex<Vec<(u32, IoCompletion)>>,
    /// The length of `completions`; changed only with its lock held.
    completion_count: AtomicUsize,
    core_waker: Arc<CoreWaker>,
}

/// One core's device queue over its own worker threads.
pub struct ThreadQueue {
    shared: Arc<ThreadQueueShared>,
    workers: Vec<JoinHandle<()>>,
    /// The open files, by [`FileId`].
    files: Slab<Arc<DeviceFile>>,
    in_flight: usize,
    /// Whether a drop waits for the workers.
    is_awaited: bool,
}

impl ThreadQueue {
    /// A queue with `threads` workers (at least one), which notify `core_waker` after each completion.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
    pub fn new(threads: usize, core_waker: Arc<CoreWaker>) -> io::Result<ThreadQueue> {
        let shared = Arc::new(ThreadQueueShared {
            work_queue: Mutex::default(),
            work_available: Condvar::new(),
            completions: Mutex::default(),
            completion_count: AtomicUsize::new(0),
            core_waker,
        });
        let workers = Vec::with_capacity(threads);
        let mut queue = ThreadQueue { shared, workers, files: Slab::new(), in_flight: 0, is_awaited: true };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&queue.shared);
            // A failure drops `queue`, which ends the workers already started.
            queue.workers.push(thread::spawn("octokv-disk", move || shared.run_worker())?);
        }
        Ok(queue)
    }

    pub(crate) fn submit_file(&mut self, token: u32, file: Arc<DeviceFile>, operation: IoOperation) {
        self.in_flight += 1;
        lock(&self.shared.work_queue).jobs.push_back(BlockingJob { token, file, operation });
        self.shared.work_available.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadQueueShared {
    fn run_worker(&self) {
        while let Some(BlockingJob { token, file, operation }) = self.next_job() {
            let completed = execute(&file, operation);
            let mut completions = lock(&self.completions);
            completions.push((token, completed));
            self.completion_count.store(completions.len(), Ordering::Release);
            drop(completions);
            self.core_waker.notify();
        }
    }

    fn next_job(&self) -> Option<BlockingJob> {
        let mut work_queue = lock(&self.work_queue);
        loop {
            if let Some(job) = work_queue.jobs.pop_front() {
                return Some(job);
            }
            if work_queue.is_closing {
                return None;
            }
            work_queue = self.work_available.wait(work_queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn execute(file: &DeviceFile, operation: IoOperation) -> IoCompletion {
    match operation {
        IoOperation::Read { offset, mut buffer } => {
            let result = file.read_at(offset, &mut buffer);
            IoCompletion { buffer: Some(buffer), result }
        }
        IoOperation::Write { offset, buffer } => {
            let result = file.write_at(offset, &buffer);
            IoCompletion { buffer: Some(buffer), result }
        }
        IoOperation::WriteVectored { offset, buffers } => {
            let mut at = offset;
            let result = buffers.iter().try_for_each(|buffer| {
                let written = file.write_at(at, buffer);
                at += buffer.len() as u64;
                written
            });
            IoCompletion { buffer: None, result }
        }
        IoOperation::Flush => IoCompletion { buffer: None, result: file.sync_data() },
        IoOperation::Trim { offset, bytes } => {
            IoCompletion { buffer: None, result: file.trim(offset, bytes) }
        }
    }
}

impl DeviceQueue for ThreadQueue {
    fn concurrency(&self) -> usize {
        self.workers.len()
    }

    fn give_up_in_flight(&mut self) {
        self.is_awaited = false;
    }

    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId> {
        Ok(FileId(self.files.insert(source.kernel_file()?) as u32))
    }

    fn close(&mut self, file: FileId) {
        // Queued jobs hold their own reference to the file.
        self.files.remove(file.0 as usize);
    }

    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation) {
        let file = Arc::clone(&self.files[file.0 as usize]);
        self.submit_file(token, file, operation);
    }

    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>) {
        // An empty poll takes no lock.
        if self.in_flight == 0 || self.shared.completion_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut finished = lock(&self.shared.completions);
        self.shared.completion_count.store(0, Ordering::Relaxed);
        self.in_flight -= finished.len();
        completions.append(&mut finished);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        lock(&self.shared.work_queue).is_closing = true;
        self.shared.work_available.notify_all();
        // Workers that are not awaited end by themselves, once their operations do.
        for worker in self.workers.drain(..).filter(|_| self.is_awaited) {
            // A worker's panic was printed by the panic hook.
            let _ = worker.join();
        }
    }
}
