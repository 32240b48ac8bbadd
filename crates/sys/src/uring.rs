//! Storage operations on an io_uring that owns the buffers in flight.
//!
//! ```text
//!   read/write/flush/trim ──▶ line ──▶ SQ ──submit──▶ kernel ──▶ CQ ──complete──▶ caller
//!                      buffer moves in ─────────────────────────────── buffer moves out
//! ```
//! The kernel writes to a buffer long after the call that named it. So a ring keeps every buffer (and
//! every file) from submission to completion, and on drop waits for the kernel before it lets go of
//! any; where it cannot wait it leaks them.
//!
//! One thread makes a ring and uses it (SINGLE_ISSUER, DEFER_TASKRUN: completions are worked off only
//! when that thread enters the kernel, told by a flag in shared memory, so an empty poll is a load).
//!
//! Sleeping: the ring signals an eventfd with each completion that follows an empty [`UringDriver::complete`].
//! (The ring's own descriptor will not do: with DEFER_TASKRUN the kernel does not wake those who poll
//! it before the work is worked off, which is what the sleeper would do.) While completions are found
//! at every call, the kernel is told not to signal.

use crate::eventfd::EventFd;
use crate::file::{DeviceFile, PUNCH_HOLE_MODE, ignore_unsupported_trim};
use io_uring::{IoUring, opcode, squeue, types};
use octokv_base::Buffer;
use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// The longest transfer that the kernel takes in one piece, in bytes.
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Why the calling thread cannot have io_uring, as an error number: EPERM where it is forbidden (by a container's
/// filter or `kernel.io_uring_disabled`), ENOSYS where the kernel lacks it. `None` where it works, and where it fails
/// for another reason: then [`UringDriver::new`] says which.
pub fn unavailable_errno() -> Option<i32> {
    let error = UringDriver::new(1).err()?.raw_os_error()?;
    is_unavailable_errno(error).then_some(error)
}

/// Whether an error of [`UringDriver::new`] says that io_uring is forbidden or missing here, rather than that something is
/// short.
pub fn is_unavailable_errno(errno: i32) -> bool {
    matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSYS)
}

struct InFlightOp {
    token: u32,
    file: u32,
    buffer: Option<Buffer>,
    kind: OpKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpKind {
    Transfer,
    Flush,
    Trim,
}

/// A file that operations may name.
struct RegisteredFile {
    /// None once it was released: the place may be taken by another.
    file: Option<Arc<DeviceFile>>,
    in_flight: u32,
    /// Nobody names it any more: let go of it with its last operation.
    is_unregistered: bool,
}

/// One core's ring.
pub struct UringDriver {
    ring: IoUring,
    operations: Vec<Option<InFlightOp>>,
    free_operations: Vec<u32>,
    in_flight: usize,
    /// Entries that found the submission queue full.
    overflow_queue: VecDeque<squeue::Entry>,
    files: Vec<RegisteredFile>,
    completion_event: EventFd,
    /// Whether the kernel signals completions.
    is_armed: bool,
    /// The kernel ties a SINGLE_ISSUER ring to a thread, so it does not move between threads.
    _one_thread: PhantomData<*const ()>,
}

impl UringDriver {
    /// A ring for about `entries` operations at a time (more are taken and wait). For the calling
    /// thread alone.
    pub fn new(entries: u32) -> io::Result<UringDriver> {
        let entries = entries.clamp(1, 4096).next_power_of_two();
        let ring = UringDriver::build(entries, true).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => UringDriver::build(entries, false),
            _ => Err(error),
        })?;
        let completion_event = EventFd::new()?;
        ring.submitter().register_eventfd(completion_event.as_fd().as_raw_fd())?;
        Ok(UringDriver {
            ring,
            completion_event,
            is_armed: true,
            operations: Vec::with_capacity(entries as usize),
            free_operations: Vec::with_capacity(entries as usize),
            in_flight: 0,
            overflow_queue: VecDeque::with_capacity(entries as usize),
            files: Vec::new(),
            _one_thread: PhantomData,
        })
    }

    fn build(entries: u32, deferred_taskrun: bool) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(2 * entries);
        if deferred_taskrun {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        }
        builder.build(entries)
    }

    /// Keeps a file for operations; gives its index.
    pub fn register(&mut self, file: Arc<DeviceFile>) -> u32 {
        let registered = RegisteredFile { file: Some(file), in_flight: 0, is_unregistered: false };
        if let Some(index) = self.files.iter().position(|one| one.file.is_none()) {
            self.files[index] = registered;
            return index as u32;
        }
        self.files.push(registered);
        (self.files.len() - 1) as u32
    }

    /// Lets go of a file, with the last of its operations. No new one may name it.
    pub fn unregister(&mut self, file: u32) {
        let registered = &mut self.files[file as usize];
        registered.is_unregistered = true;
        if registered.in_flight == 0 {
            registered.file = None;
        }
    }

    /// Fills `buffer` from `offset`.
    pub fn read(&mut self, token: u32, file: u32, offset: u64, mut buffer: Buffer) {
        assert!(buffer.len() <= TRANSFER_BYTES_MAX, "{} bytes in one transfer", buffer.len());
        let (start, bytes) = (buffer.as_mut_ptr(), buffer.len() as u32);
        let entry = opcode::Read::new(self.descriptor(file), start, bytes).offset(offset).build();
        self.submit_entry(InFlightOp { token, file, buffer: Some(buffer), kind: OpKind::Transfer }, entry);
    }

    /// Writes `buffer` at `offset`.
    pub fn write(&mut self, token: u32, file: u32, offset: u64, buffer: Buffer) {
        assert!(buffer.len() <= TRANSFER_BYTES_MAX, "{} bytes in one transfer", buffer.len());
        let (start, bytes) = (buffer.as_ptr(), buffer.len() as u32);
        let entry = opcode::Write::new(self.descriptor(file), start, bytes).offset(offset).build();
        self.submit_entry(InFlightOp { token, file, buffer: Some(buffer), kind: OpKind::Transfer }, entry);
    }

    /// Makes every write that was completed survive a power cut (fdatasync).
    pub fn flush(&mut self, token: u32, file: u32) {
        let flags = types::FsyncFlags::DATASYNC;
        let entry = opcode::Fsync::new(self.descriptor(file)).flags(flags).build();
        self.submit_entry(InFlightOp { token, file, buffer: None, kind: OpKind::Flush }, entry);
    }

    /// Gives a range of a regular file back to its file system.
    pub fn trim(&mut self, token: u32, file: u32, offset: u64, bytes: u64) {
        let entry =
            opcode::Fallocate::new(self.descriptor(file), bytes).offset(offset).mode(PUNCH_HOLE_MODE).build();
        self.submit_entry(InFlightOp { token, file, buffer: None, kind: OpKind::Trim }, entry);
    }

    fn descriptor(&self, file: u32) -> types::Fd {
        // Only a bug of ours names a file after its release.
        let registered = self.files[file as usize].file.as_ref().expect("a file that was not released");
        types::Fd(registered.as_fd().as_raw_fd())
    }

    fn submit_entry(&mut self, operation: InFlightOp, entry: squeue::Entry) {
        let index = self.free_operations.pop().unwrap_or_else(|| {
            self.operations.push(None);
            (self.operations.len() - 1) as u32
        });
        self.files[operation.file as usize].in_flight += 1;
        self.operations[index as usize] = Some(operation);
        self.in_flight += 1;
        let entry = entry.user_data(u64::from(index));
        if !self.overflow_queue.is_empty() || !push_entry(&mut self.ring, &entry) {
            self.overflow_queue.push_back(entry);
        }
    }

    /// How many operations are not completed.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Signalled after the last [`UringDriver::complete`] that gave nothing: there is something now. To be
    /// watched by its signals.
    pub fn completion_event(&self) -> &EventFd {
        &self.completion_event
    }

    /// Sends on what was submitted and gives what is complete to `each`: ticket, buffer, result. A
    /// system call only when there is something to submit or the kernel has something for us.
    pub fn poll_completions(&mut self, mut on_completion: impl FnMut(u32, Option<Buffer>, Result<(), i32>)) {
        if self.in_flight == 0 {
            return;
        }
        self.enter();
        if self.reap(&mut on_completion) > 0 {
            self.disarm();
        } else if !self.is_armed {
            self.arm();
            // What came before the kernel knew that it is to signal, it did not signal.
            self.enter();
            self.reap(&mut on_completion);
        }
    }

    fn arm(&mut self) {
        self.is_armed = true;
        self.ring.completion().enable_eventfd();
        fence(Ordering::SeqCst);
    }

    /// Only where the kernel's "there is work" and its look at our wish are ordered (x86-64): elsewhere
    /// a completion could fall between the two and be signalled to nobody.
    fn disarm(&mut self) {
        if self.is_armed && cfg!(target_arch = "x86_64") {
            self.is_armed = false;
            self.ring.completion().disable_eventfd();
        }
    }

    fn enter(&mut self) {
        loop {
            let submission = self.ring.submission();
            let idle = submission.is_empty() && !submission.taskrun() && !submission.cq_overflow();
            drop(submission);
            if idle && self.overflow_queue.is_empty() {
                return;
            }
            // EBUSY, EAGAIN and EINTR mean "later": the entries stay in the queue for the next call.
            let entered = self.ring.submit();
            let mut moved = false;
            while let Some(entry) = self.overflow_queue.front() {
                if !push_entry(&mut self.ring, entry) {
                    break;
                }
                self.overflow_queue.pop_front();
                moved = true;
            }
            if entered.is_err() || !moved {
                return;
            }
        }
    }

    fn reap(&mut self, on_completion: &mut impl FnMut(u32, Option<Buffer>, Result<(), i32>)) -> usize {
        let before = self.in_flight;
        let UringDriver { ring, operations, free_operations, in_flight, files, .. } = self;
        for entry in ring.completion() {
            let index = entry.user_data() as usize;
            let operation = operations[index].take().expect("the kernel completes what was submitted, once");
            free_operations.push(index as u32);
            *in_flight -= 1;
            let registered = &mut files[operation.file as usize];
            registered.in_flight -= 1;
            if registered.is_unregistered && registered.in_flight == 0 {
                registered.file = None;
            }
            let result = operation.result(entry.result());
            on_completion(operation.token, operation.buffer, result);
        }
        before - self.in_flight
    }

    /// Blocks until at least one operation is complete, if any is in flight. For drop and for tools.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        self.enter();
        match self.ring.submit_and_wait(1) {
            Err(e) if e.raw_os_error() != Some(libc::EINTR) => Err(e),
            _ => Ok(()),
        }
    }
}

impl InFlightOp {
    fn result(&self, result: i32) -> Result<(), i32> {
        let done = if result < 0 { Err(-result) } else { Ok(()) };
        match self.kind {
            OpKind::Trim => ignore_unsupported_trim(done),
            OpKind::Flush => done,
            // Short only at the end of the device or on a failing one.
            OpKind::Transfer => match &self.buffer {
                Some(buffer) if done.is_ok() && result as usize != buffer.len() => Err(libc::EIO),
                _ => done,
            },
        }
    }
}

fn push_entry(ring: &mut IoUring, entry: &squeue::Entry) -> bool {
    // SAFETY: the memory that the entry names is in `flights`, where it stays until the completion with
    // this entry's index has been reaped, or for ever (`drop`); the file is in `files` until its last operation.
    unsafe { ring.submission().push(entry) }.is_ok()
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if self.wait().is_err() {
                // The kernel may still write to these buffers: nobody may have their memory again.
                std::mem::forget(std::mem::take(&mut self.operations));
                std::mem::forget(std::mem::take(&mut self.files));
                return;
            }
            self.reap(&mut |_, buffer, _| drop(buffer));
        }
    }
}
