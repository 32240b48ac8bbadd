//! Devices by worker threads and plain blocking calls: for where io_uring is forbidden, as in many
//! containers.
//!
//! ```text
//!   core ──submit──▶ line (mutex) ──▶ worker: pread, pwrite, fdatasync, … ──▶ answers (mutex) ──poll──▶ core
//!                                        └── rings the core's doorbell
//! ```
//! Invariants: a buffer is owned by the line, one worker, or the answers; on drop the workers finish
//! what is in line and end before the queue is gone.

use crate::core_waker::Doorbell;
use crate::device_queue::{Completed, DeviceQueue, FileId, Media, Operation};
use octokv_sys::file::OwnedFile;
use octokv_sys::thread;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

struct Job {
    ticket: u32,
    file: Arc<OwnedFile>,
    operation: Operation,
}

#[derive(Default)]
struct Line {
    jobs: VecDeque<Job>,
    ending: bool,
}

struct Shared {
    line: Mutex<Line>,
    work: Condvar,
    answers: Mutex<Vec<(u32, Completed)>>,
    /// How long `answers` is; changed only with its lock held.
    answered: AtomicUsize,
    doorbell: Arc<Doorbell>,
}

/// A queue of one core over a few threads of its own.
pub struct ThreadQueue {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// None once it is closed.
    files: Vec<Option<Arc<OwnedFile>>>,
    in_flight: usize,
}

impl ThreadQueue {
    /// A queue over `threads` workers that ring `doorbell` with each answer.
    pub fn new(threads: usize, doorbell: Arc<Doorbell>) -> io::Result<ThreadQueue> {
        let shared = Arc::new(Shared {
            line: Mutex::default(),
            work: Condvar::new(),
            answers: Mutex::default(),
            answered: AtomicUsize::new(0),
            doorbell,
        });
        let mut queue =
            ThreadQueue { shared, workers: Vec::with_capacity(threads), files: Vec::new(), in_flight: 0 };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&queue.shared);
            // A failure drops `queue`, which ends the workers started so far.
            queue.workers.push(thread::spawn("octokv-disk", move || shared.work())?);
        }
        Ok(queue)
    }

    pub(crate) fn submit_on(&mut self, ticket: u32, file: Arc<OwnedFile>, operation: Operation) {
        self.in_flight += 1;
        lock(&self.shared.line).jobs.push_back(Job { ticket, file, operation });
        self.shared.work.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn work(&self) {
        while let Some(Job { ticket, file, operation }) = self.next() {
            let completed = carry_out(&file, operation);
            let mut answers = lock(&self.answers);
            answers.push((ticket, completed));
            self.answered.store(answers.len(), Ordering::Release);
            drop(answers);
            self.doorbell.ring();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut line = lock(&self.line);
        loop {
            if let Some(job) = line.jobs.pop_front() {
                return Some(job);
            }
            if line.ending {
                return None;
            }
            line = self.work.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn carry_out(file: &OwnedFile, operation: Operation) -> Completed {
    match operation {
        Operation::Read { offset, mut buffer } => {
            let result = file.read_at(offset, &mut buffer);
            Completed { buffer: Some(buffer), result }
        }
        Operation::Write { offset, buffer } => {
            let result = file.write_at(offset, &buffer);
            Completed { buffer: Some(buffer), result }
        }
        Operation::Flush => Completed { buffer: None, result: file.sync_data() },
        Operation::Trim { offset, bytes } => Completed { buffer: None, result: file.trim(offset, bytes) },
    }
}

impl DeviceQueue for ThreadQueue {
    fn open(&mut self, media: &Media) -> io::Result<FileId> {
        let file = Some(media.kernel()?);
        let place = self.files.iter().position(Option::is_none).unwrap_or_else(|| {
            self.files.push(None);
            self.files.len() - 1
        });
        self.files[place] = file;
        Ok(FileId(place as u32))
    }

    fn close(&mut self, file: FileId) {
        // Jobs in line have the file to themselves.
        self.files[file.0 as usize] = None;
    }

    fn submit(&mut self, ticket: u32, file: FileId, operation: Operation) {
        let file = Arc::clone(self.files[file.0 as usize].as_ref().expect("a file that is open"));
        self.submit_on(ticket, file, operation);
    }

    fn poll(&mut self, done: &mut Vec<(u32, Completed)>) {
        // An empty poll takes no lock.
        if self.in_flight == 0 || self.shared.answered.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut answers = lock(&self.shared.answers);
        self.shared.answered.store(0, Ordering::Relaxed);
        self.in_flight -= answers.len();
        done.append(&mut answers);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for ThreadQueue {
    fn drop(&mut self) {
        lock(&self.shared.line).ending = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has nothing more to say.
            let _ = worker.join();
        }
    }
}
