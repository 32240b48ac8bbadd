//! The device half of the seam: operations with owned buffers, and the futures that await them.
//!
//! ```text
//!   task ──submit──▶ Channel ──at most `depth` at a time──▶ DeviceQueue ──▶ kernel or virtual disk
//!    ▲                 │ slots: Waiting → Flying → Done → free                       │
//!    └──wakes──────────┴◀───────────────── poll ◀────────────────────────────────────┘
//! ```
//! Invariants: a buffer in flight belongs to the queue, whatever happens to the task; operations reach
//! the queue in the order they were submitted; a dropped [`CompletionFuture`] leaves its operation running and
//! its slot in use until the device has answered.

use octokv_base::Buffer;
use octokv_sys::file::DeviceFile;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// One thing to do on a device. Offsets and lengths are bytes and multiples of the device's block;
/// a transfer covers all `len()` bytes of its buffer.
#[derive(Debug)]
pub enum IoOperation {
    /// Fill the buffer from the device.
    Read {
        /// Where on the device.
        offset: u64,
        /// What to fill.
        buffer: Buffer,
    },
    /// Put the buffer on the device.
    Write {
        /// Where on the device.
        offset: u64,
        /// What to write.
        buffer: Buffer,
    },
    /// Make every write that completed before now survive a power cut.
    Flush,
    /// The range holds nothing of worth any more.
    Trim {
        /// Where on the device.
        offset: u64,
        /// How much.
        bytes: u64,
    },
}

impl IoOperation {
    fn into_buffer(self) -> Option<Buffer> {
        match self {
            IoOperation::Read { buffer, .. } | IoOperation::Write { buffer, .. } => Some(buffer),
            IoOperation::Flush | IoOperation::Trim { .. } => None,
        }
    }
}

/// EBADF.
const EBADF: i32 = 9;

/// The device's answer. The buffer of a read or write comes back, except from a remote device whose operation
/// failed: it may have gone with the connection.
#[derive(Debug)]
pub struct IoCompletion {
    /// The operation's buffer, if it had one.
    pub buffer: Option<Buffer>,
    /// Success, or the error number of the kernel; a short transfer is EIO.
    pub result: Result<(), i32>,
}

/// An open device, as one queue knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub u32);

/// A device that was opened once for the process and is then opened on each core's queue.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    /// What to call it in messages: its path.
    pub name: Arc<str>,
    /// How large it is.
    pub size_bytes: u64,
    /// The unit of transfers: a power of two, 512 to 4096.
    pub block_bytes: u32,
    pub(crate) kind: DeviceSourceKind,
}

#[derive(Clone, Debug)]
pub(crate) enum DeviceSourceKind {
    Kernel(Arc<DeviceFile>),
    Simulated(u32),
}

impl DeviceSource {
    /// A regular file or block device of this machine.
    pub fn from_file(file: DeviceFile) -> DeviceSource {
        DeviceSource {
            name: file.path().to_string_lossy().into(),
            size_bytes: file.size_bytes(),
            block_bytes: file.block_bytes(),
            kind: DeviceSourceKind::Kernel(Arc::new(file)),
        }
    }

    /// Whether it is a whole block device rather than a file on one.
    pub fn is_block_device(&self) -> bool {
        matches!(&self.kind, DeviceSourceKind::Kernel(file) if file.is_block_device())
    }

    /// The file, unless the device is virtual.
    pub(crate) fn kernel_file(&self) -> io::Result<Arc<DeviceFile>> {
        match &self.kind {
            DeviceSourceKind::Kernel(file) => Ok(Arc::clone(file)),
            DeviceSourceKind::Simulated(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// What carries operations out: io_uring, worker threads, a virtual disk. One per core.
pub trait DeviceQueue {
    /// Makes a device known to this queue.
    fn open(&mut self, source: &DeviceSource) -> io::Result<FileId>;
    /// Forgets a device once its operations are over; nothing names it any more.
    fn close(&mut self, file: FileId);
    /// Takes an operation; never refuses one, and never blocks. The ticket comes back with its answer.
    fn submit(&mut self, token: u32, file: FileId, operation: IoOperation);
    /// Sends on what was submitted and adds what has been answered.
    fn poll(&mut self, completions: &mut Vec<(u32, IoCompletion)>);
    /// How many operations are submitted and not yet given back by `poll`.
    fn in_flight(&self) -> usize;
    /// An eventfd that is signalled when there are answers after a `poll` that gave none, for a reactor
    /// to sleep on. None where the queue rings the reactor's doorbell itself.
    fn completion_eventfd(&self) -> Option<RawFd> {
        None
    }
}

enum OpState {
    Free,
    Queued(FileId, IoOperation),
    InFlight,
    Completed(IoCompletion),
}

struct OpSlot {
    state: OpState,
    waker: Option<Waker>,
    /// The ticket was dropped: free the slot when the device has answered.
    is_abandoned: bool,
}

struct DeviceHandleInner {
    queue: Box<dyn DeviceQueue>,
    depth: usize,
    in_flight: usize,
    slots: Vec<OpSlot>,
    free: Vec<u32>,
    queued: VecDeque<u32>,
    completions: Vec<(u32, IoCompletion)>,
}

/// The devices of one core: at most `depth` operations at the queue, later ones wait in order.
#[derive(Clone)]
pub struct DeviceHandle(Rc<RefCell<DeviceHandleInner>>);

impl DeviceHandle {
    /// A channel over a queue that takes `depth` operations at a time.
    pub fn new(queue: Box<dyn DeviceQueue>, depth: usize) -> DeviceHandle {
        assert!(depth > 0, "a channel of no depth does nothing");
        DeviceHandle(Rc::new(RefCell::new(DeviceHandleInner {
            queue,
            depth,
            in_flight: 0,
            slots: Vec::with_capacity(2 * depth),
            free: Vec::with_capacity(2 * depth),
            queued: VecDeque::with_capacity(depth),
            completions: Vec::with_capacity(depth),
        })))
    }

    /// Makes a device known to this core.
    pub fn open(&self, source: &DeviceSource) -> io::Result<FileId> {
        self.0.borrow_mut().queue.open(source)
    }

    /// Forgets a device. Operations of it that wait for their turn fail with EBADF.
    pub fn close(&self, file: FileId) {
        let mut inner = self.0.borrow_mut();
        for index in (0..inner.queued.len()).rev() {
            let slot = inner.queued[index];
            if matches!(&inner.slots[slot as usize].state, OpState::Queued(of, _) if *of == file) {
                inner.queued.remove(index);
                inner.in_flight += 1;
                let queued = std::mem::replace(&mut inner.slots[slot as usize].state, OpState::InFlight);
                let OpState::Queued(_, operation) = queued else { unreachable!("it waited a line ago") };
                let completed = IoCompletion { buffer: operation.into_buffer(), result: Err(EBADF) };
                if let Some(waker) = inner.complete(slot, completed) {
                    waker.wake();
                }
            }
        }
        inner.queue.close(file);
    }

    /// Hands an operation over. It starts at the next [`DeviceHandle::poll`] at the latest.
    pub fn submit(&self, file: FileId, operation: IoOperation) -> CompletionFuture {
        let mut inner = self.0.borrow_mut();
        let slot = inner.take_slot();
        if inner.in_flight < inner.depth && inner.queued.is_empty() {
            inner.start(slot, file, operation);
        } else {
            inner.slots[slot as usize].state = OpState::Queued(file, operation);
            inner.queued.push_back(slot);
        }
        CompletionFuture { devices: DeviceHandle(Rc::clone(&self.0)), slot }
    }

    /// Sends on what was submitted, takes the device's answers and wakes who waits for them. Gives how
    /// many answers came.
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
            // What took the place of those answered goes to the device in this turn, too.
            let DeviceHandleInner { queue, completions, .. } = &mut *inner;
            queue.poll(completions);
        }
        count
    }

    /// How many operations have not been answered, those that wait for their turn included.
    pub fn in_flight(&self) -> usize {
        let inner = self.0.borrow();
        inner.in_flight + inner.queued.len()
    }

    /// See [`DeviceQueue::wait_descriptor`].
    pub fn completion_eventfd(&self) -> Option<RawFd> {
        self.0.borrow().queue.completion_eventfd()
    }
}

impl DeviceHandleInner {
    fn take_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(OpSlot { state: OpState::Free, waker: None, is_abandoned: false });
            (self.slots.len() - 1) as u32
        })
    }

    fn start(&mut self, slot: u32, file: FileId, operation: IoOperation) {
        self.slots[slot as usize].state = OpState::InFlight;
        self.in_flight += 1;
        self.queue.submit(slot, file, operation);
    }

    fn start_queued(&mut self) -> bool {
        let mut started = false;
        while self.in_flight < self.depth
            && let Some(slot) = self.queued.pop_front()
        {
            let OpState::Queued(file, operation) =
                std::mem::replace(&mut self.slots[slot as usize].state, OpState::Free)
            else {
                unreachable!("slot {slot} is in line and does not wait");
            };
            self.start(slot, file, operation);
            started = true;
        }
        started
    }

    /// Takes an answer in; gives who waits for it.
    fn complete(&mut self, slot: u32, completed: IoCompletion) -> Option<Waker> {
        let entry = &mut self.slots[slot as usize];
        assert!(
            matches!(entry.state, OpState::InFlight),
            "an answer for slot {slot}, which has no operation"
        );
        self.in_flight -= 1;
        if entry.is_abandoned {
            self.release(slot);
            return None;
        }
        entry.state = OpState::Completed(completed);
        entry.waker.take()
    }

    fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = OpSlot { state: OpState::Free, waker: None, is_abandoned: false };
        self.free.push(slot);
    }
}

/// One operation under way, as a future of its answer.
///
/// # Panics
/// When polled again after it has given the answer.
#[must_use = "the answer says whether it happened"]
pub struct CompletionFuture {
    devices: DeviceHandle,
    slot: u32,
}

const SLOT_TAKEN: u32 = u32::MAX;

impl Future for CompletionFuture {
    type Output = IoCompletion;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoCompletion> {
        assert!(self.slot != SLOT_TAKEN, "polled after the answer was taken");
        let slot = self.slot;
        let mut inner = self.devices.0.borrow_mut();
        let entry = &mut inner.slots[slot as usize];
        if !matches!(entry.state, OpState::Completed(_)) {
            match &mut entry.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        let OpState::Completed(completed) = std::mem::replace(&mut entry.state, OpState::Free) else {
            unreachable!("it was done a line ago");
        };
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
        if matches!(entry.state, OpState::Completed(_)) {
            inner.release(self.slot);
        } else {
            entry.is_abandoned = true;
            entry.waker = None;
        }
    }
}
