//! The io_uring driver of one thread: storage operations that own their buffers in flight.
//!
//! ```text
//!   read/write/flush/trim ─▶ overflow queue ─▶ SQ ─submit─▶ kernel ─▶ CQ ─poll_completions─▶ caller
//!                    buffer moves in ──────────────────────────────────── buffer moves out
//! ```
//! The kernel accesses a buffer long after the call that submitted it. The driver therefore owns every buffer and every
//! file from submission to completion. The drop waits for the kernel; if it cannot wait, it leaks the buffers.
//!
//! One thread creates the ring and uses it (SINGLE_ISSUER, DEFER_TASKRUN: the kernel posts completions only when that
//! thread enters it, and a flag in shared memory says that there are some, so an empty poll is a load).
//!
//! Sleeping: the ring signals an eventfd with each completion after a [`UringDriver::poll_completions`] that found none.
//! (Polling the ring's own descriptor does not work: with DEFER_TASKRUN the kernel wakes its pollers only after the
//! completions are posted, which the sleeping thread would have to do.) While every call finds completions, the eventfd
//! is disabled.
//!
//! Invariants: the operations in flight are bounded by the caller ([`TRANSFER_BYTES_MAX`] bounds one transfer); each
//! submitted entry completes exactly once; a closed file's index is reused only after its last operation.
//!
//! Unsafe code: pushing an entry that names memory and a descriptor. Tested in `octokv-runtime`'s
//! `tests/device_queues.rs`.

use crate::eventfd::EventFd;
use crate::file::{DeviceFile, PUNCH_HOLE_MODE, ignore_unsupported_trim};
use io_uring::{IoUring, opcode, squeue, types};
use octokv_base::Buffer;
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// The maximum length of one transfer, in bytes (the kernel's MAX_RW_COUNT).
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Why io_uring is unavailable to the calling thread: EPERM or EACCES if it is forbidden (by a container's filter or
/// `kernel.io_uring_disabled`), ENOSYS if the kernel lacks it. `None` if it works, or fails for another reason, which
/// [`UringDriver::new`] returns.
pub fn unavailable_errno() -> Option<i32> {
    let error = UringDriver::new(1).err()?.raw_os_error()?;
    is_unavailable_errno(error).then_some(error)
}

/// Whether an error number of [`UringDriver::new`] means that io_uring is forbidden or missing, not that a resource is
/// exhausted.
pub fn is_unavailable_errno(errno: i32) -> bool {
    matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSYS)
}

struct InFlightOp {
    token: u32,
    file: u32,
    buffer: Option<Buffer>,
    vector: Option<Box<IoVector>>,
    kind: OpKind,
}

/// What the kernel reads of a vectored write, and the buffers that it names.
struct IoVector {
    parts: Vec<libc::iovec>,
    bytes: usize,
    _buffers: Vec<Buffer>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpKind {
    Transfer,
    Flush,
    Trim,
}

/// A file that operations refer to by its index.
struct RegisteredFile {
    file: Arc<DeviceFile>,
    in_flight: u32,
    /// Whether the file is closed: its last operation releases it.
    is_unregistered: bool,
}

/// One thread's io_uring.
pub struct UringDriver {
    ring: IoUring,
    /// The operations in flight, by the `user_data` of their entries.
    operations: Slab<InFlightOp>,
    /// Entries that did not fit into the submission queue, in order. At most the operations in flight.
    overflow_queue: VecDeque<squeue::Entry>,
    files: Slab<RegisteredFile>,
    completion_event: Arc<EventFd>,
    /// Whether the kernel signals completions by `completion_event`.
    is_armed: bool,
    /// Whether a drop waits for the operations in flight.
    is_awaited: bool,
    /// The kernel ties a SINGLE_ISSUER ring to a thread, so it does not move between threads.
    _one_thread: PhantomData<*const ()>,
}

impl UringDriver {
    /// A ring with at least `entries` submission entries (1 to 4096); further operations wait in memory. For the calling
    /// thread alone.
    ///
    /// # Errors
    /// An [`is_unavailable_errno`] if io_uring is forbidden or missing, ENOMEM over the limit of locked memory, or EMFILE
    /// if the process is out of descriptors.
    pub fn new(entries: u32) -> io::Result<UringDriver> {
        let entries = entries.clamp(1, 4096).next_power_of_two();
        let ring = UringDriver::build(entries, true).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => UringDriver::build(entries, false),
            _ => Err(error),
        })?;
        let completion_event = Arc::new(EventFd::new()?);
        ring.submitter().register_eventfd(completion_event.as_fd().as_raw_fd())?;
        Ok(UringDriver {
            ring,
            completion_event,
            is_armed: true,
            is_awaited: true,
            operations: Slab::with_capacity(entries as usize),
            overflow_queue: VecDeque::with_capacity(entries as usize),
            files: Slab::new(),
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

    /// Registers a file for operations and returns its index.
    pub fn register(&mut self, file: Arc<DeviceFile>) -> u32 {
        self.files.insert(RegisteredFile { file, in_flight: 0, is_unregistered: false }) as u32
    }

    /// A registered file.
    ///
    /// # Panics
    /// If `file` is not registered.
    pub fn file(&self, file: u32) -> &Arc<DeviceFile> {
        &self.files[file as usize].file
    }

    /// Closes a file once its last operation completes.
    ///
    /// REQUIRES: the caller submits no further operation on `file`.
    pub fn unregister(&mut self, file: u32) {
        let registered = &mut self.files[file as usize];
        registered.is_unregistered = true;
        if registered.in_flight == 0 {
            self.files.remove(file as usize);
        }
    }

    /// Submits a read into all of `buffer` from byte `offset`. `token` identifies the completion, as in the methods below.
    ///
    /// # Panics
    /// If the buffer exceeds [`TRANSFER_BYTES_MAX`].
    pub fn read(&mut self, token: u32, file: u32, offset: u64, mut buffer: Buffer) {
        assert!(buffer.len() <= TRANSFER_BYTES_MAX, "{} bytes in one transfer", buffer.len());
        let (start, bytes) = (buffer.as_mut_ptr(), buffer.len() as u32);
        let entry = opcode::Read::new(self.descriptor(file), start, bytes).offset(offset).build();
        self.submit_entry(
            InFlightOp { token, file, buffer: Some(buffer), vector: None, kind: OpKind::Transfer },
            entry,
        );
    }

    /// Submits a write of all of `buffer` at byte `offset`.
    ///
    /// # Panics
    /// If the buffer exceeds [`TRANSFER_BYTES_MAX`].
    pub fn write(&mut self, token: u32, file: u32, offset: u64, buffer: Buffer) {
        assert!(buffer.len() <= TRANSFER_BYTES_MAX, "{} bytes in one transfer", buffer.len());
        let (start, bytes) = (buffer.as_ptr(), buffer.len() as u32);
        let entry = opcode::Write::new(self.descriptor(file), start, bytes).offset(offset).build();
        self.submit_entry(
            InFlightOp { token, file, buffer: Some(buffer), vector: None, kind: OpKind::Transfer },
            entry,
        );
    }

    /// Submits a write of all `buffers` side by side from byte `offset`. The completion has no buffer.
    ///
    /// # Panics
    /// If the buffers exceed [`TRANSFER_BYTES_MAX`].
    pub fn write_vectored(&mut self, token: u32, file: u32, offset: u64, buffers: Vec<Buffer>) {
        let part = |buffer: &Buffer| libc::iovec {
            iov_base: buffer.as_ptr().cast_mut().cast(),
            iov_len: buffer.len(),
        };
        let parts: Vec<libc::iovec> = buffers.iter().map(part).collect();
        let bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        assert!(bytes <= TRANSFER_BYTES_MAX, "{bytes} bytes in one transfer");
        let vector = Box::new(IoVector { parts, bytes, _buffers: buffers });
        let (start, count) = (vector.parts.as_ptr(), vector.parts.len() as u32);
        let entry = opcode::Writev::new(self.descriptor(file), start, count).offset(offset).build();
        let kind = OpKind::Transfer;
        self.submit_entry(InFlightOp { token, file, buffer: None, vector: Some(vector), kind }, entry);
    }

    /// Submits a flush: every write that has completed survives a power loss (fdatasync).
    pub fn flush(&mut self, token: u32, file: u32) {
        let flags = types::FsyncFlags::DATASYNC;
        let entry = opcode::Fsync::new(self.descriptor(file)).flags(flags).build();
        self.submit_entry(InFlightOp { token, file, buffer: None, vector: None, kind: OpKind::Flush }, entry);
    }

    /// Submits the deallocation of a byte range of a regular file.
    pub fn trim(&mut self, token: u32, file: u32, offset: u64, bytes: u64) {
        let entry = opcode::Fallocate::new(self.descriptor(file), bytes)
            .offset(offset)
            .mode(PUNCH_HOLE_MODE.bits() as i32)
            .build();
        self.submit_entry(InFlightOp { token, file, buffer: None, vector: None, kind: OpKind::Trim }, entry);
    }

    fn descriptor(&self, file: u32) -> types::Fd {
        types::Fd(self.file(file).as_fd().as_raw_fd())
    }

    fn submit_entry(&mut self, operation: InFlightOp, entry: squeue::Entry) {
        self.files[operation.file as usize].in_flight += 1;
        let index = self.operations.insert(operation);
        let entry = entry.user_data(index as u64);
        if !self.overflow_queue.is_empty() || !push_entry(&mut self.ring, &entry) {
            self.overflow_queue.push_back(entry);
        }
    }

    /// The number of operations submitted and not completed.
    pub fn in_flight(&self) -> usize {
        self.operations.len()
    }

    /// The eventfd that is signalled by a completion after a [`UringDriver::poll_completions`] that found none. It is
    /// never drained: watch it edge-triggered.
    pub fn completion_event(&self) -> &Arc<EventFd> {
        &self.completion_event
    }

    /// Submits the new operations and calls `on_completion` with the token, buffer and result of each completed one. Makes
    /// a system call only if there are entries to submit or completions to post.
    pub fn poll_completions(&mut self, mut on_completion: impl FnMut(u32, Option<Buffer>, Result<(), i32>)) {
        if self.operations.is_empty() {
            return;
        }
        self.enter();
        if self.reap(&mut on_completion) > 0 {
            self.disarm();
        } else if !self.is_armed {
            self.arm();
            // Completions before `arm` were not signalled, so poll once more.
            self.enter();
            self.reap(&mut on_completion);
        }
    }

    fn arm(&mut self) {
        self.is_armed = true;
        self.ring.completion().enable_eventfd();
        fence(Ordering::SeqCst);
    }

    /// Disables the eventfd, on x86-64 only: there the kernel's store of the taskrun flag is ordered before its load of the
    /// disable flag. On other architectures a completion between the two could be lost.
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
            // After EBUSY, EAGAIN or EINTR the entries stay in the queue for the next call.
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
        let before = self.in_flight();
        let UringDriver { ring, operations, files, .. } = self;
        for entry in ring.completion() {
            // The kernel completes each entry once: a second completion of an index panics.
            let operation = operations.remove(entry.user_data() as usize);
            let registered = &mut files[operation.file as usize];
            registered.in_flight -= 1;
            let result = operation.result(entry.result()).map_err(|error| registered.file.error_of(error));
            if registered.is_unregistered && registered.in_flight == 0 {
                files.remove(operation.file as usize);
            }
            on_completion(operation.token, operation.buffer, result);
        }
        before - self.in_flight()
    }

    /// From now on a drop does not wait for operations in flight, of which some will not end. Their buffers and files are leaked.
    pub fn give_up_in_flight(&mut self) {
        self.is_awaited = false;
    }

    /// Blocks until at least one operation is complete, if any is in flight. For drop and tools.
    ///
    /// # Errors
    /// Returns the kernel's error, except EINTR.
    pub fn wait(&mut self) -> io::Result<()> {
        if self.operations.is_empty() {
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
        let outcome = if result < 0 { Err(-result) } else { Ok(()) };
        match self.kind {
            OpKind::Trim => ignore_unsupported_trim(outcome),
            OpKind::Flush => outcome,
            // A transfer is short only at the end of the device or after a media error.
            OpKind::Transfer => {
                let vector_bytes = self.vector.as_ref().map(|vector| vector.bytes);
                match self.buffer.as_ref().map(|buffer| buffer.len()).or(vector_bytes) {
                    Some(bytes) if outcome.is_ok() && result as usize != bytes => Err(libc::EIO),
                    _ => outcome,
                }
            }
        }
    }
}

fn push_entry(ring: &mut IoUring, entry: &squeue::Entry) -> bool {
    // SAFETY: the entry's buffer, or its vector and the buffers that this names, is in `operations`, where it stays until the completion with this entry's index is
    // reaped, or is leaked (`drop`); its file is in `files` until its last operation completes.
    unsafe { ring.submission().push(entry) }.is_ok()
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        while !self.operations.is_empty() {
            if !self.is_awaited || self.wait().is_err() {
                // The kernel may still write to these buffers, so their memory must never be reused.
                std::mem::forget(std::mem::take(&mut self.operations));
                std::mem::forget(std::mem::take(&mut self.files));
                return;
            }
            self.reap(&mut |_, buffer, _| drop(buffer));
        }
    }
}
