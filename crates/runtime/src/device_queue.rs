//! The device driver trait, and a core's handle to its devices: operations with owned buffers, awaited as futures.
//!
//! ```text
//!   task ──submit──▶ DeviceHandle ──at most `depth` in flight──▶ DeviceQueue ──▶ kernel or simulated disk
//!    ▲                 │ slots: Queued → InFlight → Completed → Free               │
//!    └──wakes──────────┴◀──────────────────── poll ◀───────────────────────────────┘
//! ```
//! Invariants: a buffer in flight belongs to the queue, even if its task ends; operations reach the queue in submission
//! order; a dropped [`CompletionFuture`] does not cancel its operation, and the slot stays in use until the operation
//! completes. Tested in `tests/device_queues.rs`.

use octokv_base::Buffer;
use octokv_sys::eventfd::EventFd;
use octokv_sys::file::DeviceFile;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A device operation. Offsets and lengths are in bytes, multiples of the device's block size; a transfer covers all
/// `len()` bytes of its buffer.
#[derive(Debug)]
pub enum IoOperation {
    /// Reads from the device into the buffer.
    Read {
        /// Device offset in bytes.
        offset: u64,
        /// Destination; its length is the transfer length.
        buffer: Buffer,
    },
    /// Writes the buffer to the device.
    Write {
        /// Device offset in bytes.
        offset: u64,
        /// Source; its length is the transfer length.
        buffer: Buffer,
    },
    /// Writes the buffers side by side, as one write. They are not returned.
    WriteVectored {
        /// Device offset in bytes.
        offset: u64,
        /// Sources, 1 to [`VECTOR_BUFFERS_MAX`]; the sum of their lengths is the transfer length.
        buffers: Vec<Buffer>,
    },
    /// Makes every write that completed before the submission survive a power loss.
    Flush,
    /// Deallocates a range: its contents are no longer needed. Advisory.
    Trim {
        /// Device offset in bytes.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

/// The most buffers of one [`IoOperation::WriteVectored`] (the kernel's IOV_MAX).
pub const VECTOR_BUFFERS_MAX: usize = 1024;

impl IoOperation {
    /// The same operation, with one buffer in place of several: for queues that are no drivers of the kernel's.
    pub fn into_single_buffer(self) -> IoOperation {
        let IoOperation::WriteVectored { offset, buffers } = self else { return self };
        let mut joined = Buffer::zeroed(buffers.iter().map(|buffer| buffer.len()).sum());
        let mut rest = &mut joined[..];
        for buffer in &buffers {
            let (part, after) = rest.split_at_mut(buffer.len());
            part.copy_from_slice(buffer);
            rest = after;
        }
        IoOperation::Write { offset, buffer: joined }
    }

    fn into_buffer(self) -> Option<Buffer> {
        match self {
            IoOperation::Read { buffer, .. } | IoOperation::Write { buffer, .. } => Some(buffer),
            IoOperation::WriteVectored { .. } | IoOperation::Flush | IoOperation::Trim { .. } => None,
        }
    }
}

/// The kernel's error number for a closed file.
const EBADF: i32 = 9;

/// The completion of an operation. It returns the buffer of a read or write, except for a failed operation of a remote
/// device, whose buffer may be lost with the connection.
#[derive(Debug)]
pub struct IoCompletion {
    /// The operation's buffer; `None` for a vectored write, flush and trim.
    pub buffer: Option<Buffer>,
    /// Success, or the kernel's error number. A short transfer fails with EIO.
    pub result: Result<(), i32>,
}

/// An open device, by its index in one queue. Reused after [`DeviceQueue::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u32);

/// A device that the process has opened, to be opened again on each core's queue.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    /// The name in messages: its path.
    pub name: Arc<str>,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The block size in bytes, the unit of transfers: a power of two, 512 to 4096.
    pub block_bytes: u32,
    /// The size in bytes from which a write needs no read below: at least a block.
    pub preferred_write_bytes: u32,
    pub(crate) kind: DeviceSourceKind,
}

#[derive(Clone, Debug)]
pub(crate) enum DeviceSourceKind {
    Kernel(Arc<DeviceFile>),
    Simulated(u32),
}

impl DeviceSource {
    /// A regular file or block device of this system.
    pub fn from_file(file: DeviceFile) -> DeviceSource {
        DeviceSource {
            name: file.path().to_string_lossy().into(),
            size_bytes: file.size_bytes(),
            block_bytes: file.block_bytes(),
            preferred_write_bytes: file.preferred_write_bytes(),
            kind: DeviceSourceKind::Kernel(Arc::new(file)),
        }
    }

    /// Whether the source is a whole block device, not a regular file or a simulated disk.
    pub fn is_block_device(&self) -> bool {
        matches!(&self.kind, DeviceSourceKind::Kernel(file) if file.is_block_device())
    }

    /// The first bytes from `offset` on that were never written, as [`DeviceFile::next_unwritten`]; `None` for a simulated disk.
    pub fn next_unwritten(&self, offset: u64) -> Option<Range<u64>> {
        match &self.kind {
            DeviceSourceKind::Kernel(file) => file.next_unwritten(offset),
            DeviceSourceKind::Simulated(_) => None,
        }
    }

    /// The file; fails with `Unsupported` for a simulated disk.
    pub(crate) fn kernel_file(&self) -> io::Result<Arc<DeviceFile>> {
        match &self.kind {
            DeviceSourceKind::Kernel(file) => Ok(Arc::clone(file)),
            DeviceSourceKind::Simulated(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// A driver that executes device operations: io_uring, worker threads, or a simulated disk. One per core.
///
/// A queue holds at most the operations that its caller has in flight; [`DeviceHandle`] bounds them.
pub trait DeviceQueue {
    /// Opens a device on this queue.
    ///
    /// # Errors
    /// Fails with `Unsupported` if the source belongs to another kind of driver.
    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId>;
    /// Closes a device, after its operations in flight complete.
    ///
    /// REQUIRES: the caller submits no further operation on `file`.
    fn close(&mut self, file: FileId);
    /// Accepts an operation; never fails and never blocks. `token` identifies its completion.
    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation);
    /// Starts the submitted operations and appends the completed ones, each with its token.
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>);
    /// The most operations that proceed at once, over all devices of the queue; further ones wait.
    fn concurrency(&self) -> usize {
        usize::MAX
    }
    /// From now on a drop of the queue does not wait for operations in flight, of which some will not end: their buffers and devices stay as they are.
    fn give_up_in_flight(&mut self) {}
    /// The number of operations submitted and not yet returned by `poll`.
    fn in_flight(&self) -> usize;
    /// An eventfd that is signalled by completions after a `poll` that returned none; a sleeping reactor waits on it.
    /// `None` if the queue notifies the reactor's [`crate::CoreWaker`] itself.
    fn completion_eventfd(&self) -> Option<Arc<EventFd>> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpState {
    Free,
    /// The operation is in `queued`.
    Queued,
    InFlight,
    Completed,
}

struct OpSlot {
    state: OpState,
    /// The future was dropped: `complete` frees the slot.
    is_abandoned: bool,
    /// Of an operation in flight, the bound that it counts for; [`UNBOUNDED`] if there is none.
    bound: u32,
    waker: Option<Waker>,
    /// Of a completed operation; without a buffer otherwise.
    completion: IoCompletion,
}

/// The bound of an operation on a device that has none.
const UNBOUNDED: u32 = u32::MAX;

/// The operations of one device of which not more than `depth` are at the queue or wait for it.
struct DeviceBound {
    file: FileId,
    depth: usize,
    in_flight: usize,
    /// Those that wait for it, in order, in state `Queued`.
    queued: VecDeque<(u32, IoOperation)>,
}

struct DeviceHandleInner {
    queue: Box<dyn DeviceQueue>,
    depth: usize,
    in_flight: usize,
    slots: Vec<OpSlot>,
    free: Vec<u32>,
    /// Operations in state `Queued`, in order, each with its slot.
    queued: VecDeque<(u32, FileId, IoOperation)>,
    /// Of the devices that have one: usually none. Those of closed devices have no file.
    bounds: Vec<Option<DeviceBound>>,
    completions: Vec<(u32, IoCompletion)>,
    has_given_up: bool,
}

/// The limit of one core's operations, in flight and queued. Callers bound their tasks below it: more are a bug.
pub const OPERATIONS_MAX: usize = 1 << 27;

/// A core's handle to its devices. At most `depth` operations are at the queue; later ones wait here in order.
#[derive(Clone)]
pub struct DeviceHandle(Rc<RefCell<DeviceHandleInner>>);

impl DeviceHandle {
    /// A handle that keeps at most `depth` operations of `queue` in flight.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn new(queue: Box<dyn DeviceQueue>, depth: usize) -> DeviceHandle {
        assert!(depth > 0, "queue depth must be positive");
        DeviceHandle(Rc::new(RefCell::new(DeviceHandleInner {
            queue,
            depth,
            in_flight: 0,
            slots: Vec::with_capacity(2 * depth),
            free: Vec::with_capacity(2 * depth),
            queued: VecDeque::with_capacity(depth),
            bounds: Vec::new(),
            completions: Vec::with_capacity(depth),
            has_given_up: false,
        })))
    }

    /// The most operations that proceed at the same time.
    pub fn concurrency(&self) -> usize {
        let inner = self.0.borrow();
        inner.depth.min(inner.queue.concurrency())
    }

    /// See [`DeviceQueue::give_up_in_flight`].
    pub fn give_up_in_flight(&self) {
        let mut inner = self.0.borrow_mut();
        inner.has_given_up = true;
        inner.queue.give_up_in_flight();
    }

    /// Whether operations are in flight that a drop of the queue does not wait for.
    pub fn leaves_operations(&self) -> bool {
        let inner = self.0.borrow();
        inner.has_given_up && inner.queue.in_flight() > 0
    }

    /// Opens a device on this core.
    ///
    /// # Errors
    /// As [`DeviceQueue::open`].
    pub fn open(&self, source: &DeviceSource) -> io::Result<FileId> {
        self.0.borrow_mut().queue.open(source)
    }

    /// Keeps at most `depth` operations of a device in flight, so that it leaves the others of the queue to other devices although it hangs. REQUIRES: none
    /// of its operations is in flight.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn set_depth(&self, file: FileId, depth: usize) {
        assert!(depth > 0, "a device without operations");
        let bound = DeviceBound { file, depth, in_flight: 0, queued: VecDeque::new() };
        let bounds = &mut self.0.borrow_mut().bounds;
        match bounds.iter_mut().find(|slot| slot.is_none()) {
            Some(free) => *free = Some(bound),
            None => bounds.push(Some(bound)),
        }
    }

    /// Closes a device. Its queued operations fail with EBADF; those in flight complete.
    ///
    /// REQUIRES: as [`DeviceHandle::poll`].
    pub fn close(&self, file: FileId) {
        let mut inner = self.0.borrow_mut();
        inner.release_queued(file);
        for index in (0..inner.queued.len()).rev() {
            if inner.queued[index].1 == file
                && let Some((slot, _, operation)) = inner.queued.remove(index)
            {
                inner.in_flight += 1;
                inner.slots[slot as usize].state = OpState::InFlight;
                let completed = IoCompletion { buffer: operation.into_buffer(), result: Err(EBADF) };
                if let Some(waker) = inner.complete(slot, completed) {
                    waker.wake();
                }
            }
        }
        inner.queue.close(file);
    }

    /// Submits an operation. The device starts it at the next [`DeviceHandle::poll`], or when fewer than `depth` are in
    /// flight.
    ///
    /// # Panics
    /// If the core has [`OPERATIONS_MAX`] operations.
    pub fn submit(&self, file: FileId, operation: IoOperation) -> CompletionFuture {
        let mut inner = self.0.borrow_mut();
        let slot = inner.take_slot();
        let Some(operation) = inner.enter_bound(slot, file, operation) else {
            return CompletionFuture { devices: DeviceHandle(Rc::clone(&self.0)), slot };
        };
        if inner.in_flight < inner.depth && inner.queued.is_empty() {
            inner.start(slot, file, operation);
        } else {
            inner.slots[slot as usize].state = OpState::Queued;
            inner.queued.push_back((slot, file, operation));
        }
        CompletionFuture { devices: DeviceHandle(Rc::clone(&self.0)), slot }
    }

    /// Starts submitted operations, collects completions and wakes their tasks. Returns the number of completions.
    ///
    /// REQUIRES: a task's waker does not poll the task or use this handle. The core's wakers only set bits.
    pub fn poll(&self) -> usize {
        let mut inner = self.0.borrow_mut();
        if inner.in_flight == 0 {
            return 0;
        }
        let mut completions = std::mem::take(&mut inner.completions);
        let DeviceHandleInner { queue, .. } = &mut *inner;
        queue.poll(&mut completions);
        let count = completions.len();
        for (slot, completed) in completions.drain(..) {
            if let Some(waker) = inner.complete(slot, completed) {
                waker.wake();
            }
        }
        inner.completions = completions;
        if count > 0 && inner.start_queued() {
            // The operations that replace the completed ones reach the device in this iteration, too.
            let DeviceHandleInner { queue, completions, .. } = &mut *inner;
            queue.poll(completions);
        }
        count
    }

    /// The number of operations not completed, queued ones included.
    pub fn in_flight(&self) -> usize {
        let inner = self.0.borrow();
        let bounded = inner.bounds.iter().flatten().map(|bound| bound.queued.len()).sum::<usize>();
        inner.in_flight + inner.queued.len() + bounded
    }

    /// See [`DeviceQueue::completion_eventfd`].
    pub fn completion_eventfd(&self) -> Option<Arc<EventFd>> {
        self.0.borrow().queue.completion_eventfd()
    }
}

impl DeviceHandleInner {
    #[inline]
    fn take_slot(&mut self) -> u32 {
        match self.free.pop() {
            Some(slot) => slot,
            None => self.add_slot(),
        }
    }

    #[cold]
    fn add_slot(&mut self) -> u32 {
        assert!(self.slots.len() < OPERATIONS_MAX, "{OPERATIONS_MAX} device operations on one core");
        let completion = IoCompletion { buffer: None, result: Ok(()) };
        let (state, is_abandoned, bound, waker) = (OpState::Free, false, UNBOUNDED, None);
        self.slots.push(OpSlot { state, is_abandoned, bound, waker, completion });
        (self.slots.len() - 1) as u32
    }

    /// Counts an operation for the bound of its device, if that has one. `None` if it has to wait there.
    #[inline]
    fn enter_bound(&mut self, slot: u32, file: FileId, operation: IoOperation) -> Option<IoOperation> {
        if self.bounds.is_empty() {
            return Some(operation);
        }
        let of_file = |bound: &Option<DeviceBound>| bound.as_ref().is_some_and(|bound| bound.file == file);
        let Some(at) = self.bounds.iter().position(of_file) else { return Some(operation) };
        let bound = self.bounds[at].as_mut().expect("it has the file");
        if bound.in_flight == bound.depth {
            self.slots[slot as usize].state = OpState::Queued;
            bound.queued.push_back((slot, operation));
            return None;
        }
        bound.in_flight += 1;
        self.slots[slot as usize].bound = at as u32;
        Some(operation)
    }

    /// Ends the count of an operation for a bound; the next one that waits there takes its place among those for the queue.
    #[cold]
    fn leave_bound(&mut self, at: u32) {
        let Some(bound) = &mut self.bounds[at as usize] else { return };
        let Some((slot, operation)) = bound.queued.pop_front() else {
            bound.in_flight -= 1;
            return;
        };
        self.slots[slot as usize].bound = at;
        self.queued.push_back((slot, bound.file, operation));
    }

    /// Ends the bound of a device that is closed: what waits there waits for the queue.
    fn release_queued(&mut self, file: FileId) {
        let of_file = |slot: &&mut Option<DeviceBound>| slot.as_ref().is_some_and(|bound| bound.file == file);
        let Some(bound) = self.bounds.iter_mut().find(of_file).and_then(Option::take) else { return };
        // The place may become another device's.
        for entry in &mut self.slots {
            let is_its = entry.bound != UNBOUNDED && self.bounds[entry.bound as usize].is_none();
            entry.bound = if is_its { UNBOUNDED } else { entry.bound };
        }
        self.queued.extend(bound.queued.into_iter().map(|(slot, operation)| (slot, file, operation)));
        if self.bounds.iter().all(Option::is_none) {
            self.bounds.clear();
        }
    }

    #[inline]
    fn start(&mut self, slot: u32, file: FileId, operation: IoOperation) {
        self.slots[slot as usize].state = OpState::InFlight;
        self.in_flight += 1;
        self.queue.submit(slot, file, operation);
    }

    fn start_queued(&mut self) -> bool {
        let mut started = false;
        while self.in_flight < self.depth
            && let Some((slot, file, operation)) = self.queued.pop_front()
        {
            self.start(slot, file, operation);
            started = true;
        }
        started
    }

    /// Records a completion; returns the waker of the task that awaits it.
    #[inline]
    fn complete(&mut self, slot: u32, completed: IoCompletion) -> Option<Waker> {
        let entry = &mut self.slots[slot as usize];
        assert!(
            entry.state == OpState::InFlight,
            "completion for slot {slot}, which has no operation in flight"
        );
        self.in_flight -= 1;
        let bound = std::mem::replace(&mut entry.bound, UNBOUNDED);
        let waker = match entry.is_abandoned {
            true => {
                self.release(slot);
                None
            }
            false => {
                entry.state = OpState::Completed;
                entry.completion = completed;
                entry.waker.take()
            }
        };
        if bound != UNBOUNDED {
            self.leave_bound(bound);
        }
        waker
    }

    /// Frees a slot. Its waker and its buffer were taken, or are dropped by the caller.
    #[inline]
    fn release(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        (entry.state, entry.is_abandoned) = (OpState::Free, false);
        self.free.push(slot);
    }
}

/// The future of one operation's [`IoCompletion`].
///
/// # Panics
/// If polled again after it returned the completion.
#[must_use = "await it: the completion carries the result"]
pub struct CompletionFuture {
    devices: DeviceHandle,
    slot: u32,
}

/// The `slot` of a future that has returned its completion.
const SLOT_TAKEN: u32 = u32::MAX;

impl CompletionFuture {
    /// Whether the operation is at the queue, or has ended: false while it waits for the depth of the core or of its device.
    pub fn has_begun(&self) -> bool {
        self.slot == SLOT_TAKEN || self.devices.0.borrow().slots[self.slot as usize].state != OpState::Queued
    }
}

impl Future for CompletionFuture {
    type Output = IoCompletion;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoCompletion> {
        assert!(self.slot != SLOT_TAKEN, "polled after the completion was taken");
        let slot = self.slot;
        let mut inner = self.devices.0.borrow_mut();
        let entry = &mut inner.slots[slot as usize];
        if entry.state != OpState::Completed {
            match &mut entry.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        let IoCompletion { buffer, result } = &mut entry.completion;
        let completed = IoCompletion { buffer: buffer.take(), result: *result };
        inner.release(slot);
        drop(inner);
        self.slot = SLOT_TAKEN;
        Poll::Ready(completed)
    }
}

impl Drop for CompletionFuture {
    fn drop(&mut self) {
        if self.slot == SLOT_TAKEN {
            return;
        }
        let mut inner = self.devices.0.borrow_mut();
        let entry = &mut inner.slots[self.slot as usize];
        entry.waker = None;
        if entry.state == OpState::Completed {
            let buffer = entry.completion.buffer.take();
            inner.release(self.slot);
            drop(inner);
            drop(buffer);
        } else {
            entry.is_abandoned = true;
        }
    }
}
