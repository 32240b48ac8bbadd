//! The device half of the seam: operations with owned buffers, and the futures that await them.
//!
//! ```text
//!   task ──submit──▶ Channel ──at most `depth` at a time──▶ DeviceQueue ──▶ kernel or virtual disk
//!    ▲                 │ slots: Waiting → Flying → Done → free                       │
//!    └──wakes──────────┴◀───────────────── poll ◀────────────────────────────────────┘
//! ```
//! Invariants: a buffer in flight belongs to the queue, whatever happens to the task; operations reach
//! the queue in the order they were submitted; a dropped [`Ticket`] leaves its operation running and
//! its slot in use until the device has answered.

use octokv_base::Buffer;
use octokv_sys::file::OwnedFile;
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
pub enum Operation {
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

impl Operation {
    fn into_buffer(self) -> Option<Buffer> {
        match self {
            Operation::Read { buffer, .. } | Operation::Write { buffer, .. } => Some(buffer),
            Operation::Flush | Operation::Trim { .. } => None,
        }
    }
}

/// EBADF.
const BAD_FILE: i32 = 9;

/// The device's answer. The buffer of a read or write comes back, except from a remote device whose operation
/// failed: it may have gone with the connection.
#[derive(Debug)]
pub struct Completed {
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
pub struct Media {
    /// What to call it in messages: its path.
    pub name: Arc<str>,
    /// How large it is.
    pub size_bytes: u64,
    /// The unit of transfers: a power of two, 512 to 4096.
    pub block_bytes: u32,
    pub(crate) kind: MediaKind,
}

#[derive(Clone, Debug)]
pub(crate) enum MediaKind {
    Kernel(Arc<OwnedFile>),
    Virtual(u32),
}

impl Media {
    /// A regular file or block device of this machine.
    pub fn file(file: OwnedFile) -> Media {
        Media {
            name: file.path().to_string_lossy().into(),
            size_bytes: file.size_bytes(),
            block_bytes: file.block_bytes(),
            kind: MediaKind::Kernel(Arc::new(file)),
        }
    }

    /// Whether it is a whole block device rather than a file on one.
    pub fn is_block_device(&self) -> bool {
        matches!(&self.kind, MediaKind::Kernel(file) if file.is_block_device())
    }

    /// The file, unless the device is virtual.
    pub(crate) fn kernel(&self) -> io::Result<Arc<OwnedFile>> {
        match &self.kind {
            MediaKind::Kernel(file) => Ok(Arc::clone(file)),
            MediaKind::Virtual(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// What carries operations out: io_uring, worker threads, a virtual disk. One per core.
pub trait DeviceQueue {
    /// Makes a device known to this queue.
    fn open(&mut self, media: &Media) -> io::Result<FileId>;
    /// Forgets a device once its operations are over; nothing names it any more.
    fn close(&mut self, file: FileId);
    /// Takes an operation; never refuses one, and never blocks. The ticket comes back with its answer.
    fn submit(&mut self, ticket: u32, file: FileId, operation: Operation);
    /// Sends on what was submitted and adds what has been answered.
    fn poll(&mut self, done: &mut Vec<(u32, Completed)>);
    /// How many operations are submitted and not yet given back by `poll`.
    fn in_flight(&self) -> usize;
    /// An eventfd that is signalled when there are answers after a `poll` that gave none, for a reactor
    /// to sleep on. None where the queue rings the reactor's doorbell itself.
    fn wait_descriptor(&self) -> Option<RawFd> {
        None
    }
}

enum State {
    Free,
    Waiting(FileId, Operation),
    Flying,
    Done(Completed),
}

struct Slot {
    state: State,
    waker: Option<Waker>,
    /// The ticket was dropped: free the slot when the device has answered.
    abandoned: bool,
}

struct Inner {
    queue: Box<dyn DeviceQueue>,
    depth: usize,
    flying: usize,
    slots: Vec<Slot>,
    free: Vec<u32>,
    waiting: VecDeque<u32>,
    done: Vec<(u32, Completed)>,
}

/// The devices of one core: at most `depth` operations at the queue, later ones wait in order.
#[derive(Clone)]
pub struct Channel(Rc<RefCell<Inner>>);

impl Channel {
    /// A channel over a queue that takes `depth` operations at a time.
    pub fn new(queue: Box<dyn DeviceQueue>, depth: usize) -> Channel {
        assert!(depth > 0, "a channel of no depth does nothing");
        Channel(Rc::new(RefCell::new(Inner {
            queue,
            depth,
            flying: 0,
            slots: Vec::with_capacity(2 * depth),
            free: Vec::with_capacity(2 * depth),
            waiting: VecDeque::with_capacity(depth),
            done: Vec::with_capacity(depth),
        })))
    }

    /// Makes a device known to this core.
    pub fn open(&self, media: &Media) -> io::Result<FileId> {
        self.0.borrow_mut().queue.open(media)
    }

    /// Forgets a device. Operations of it that wait for their turn fail with EBADF.
    pub fn close(&self, file: FileId) {
        let mut inner = self.0.borrow_mut();
        for index in (0..inner.waiting.len()).rev() {
            let slot = inner.waiting[index];
            if matches!(&inner.slots[slot as usize].state, State::Waiting(of, _) if *of == file) {
                inner.waiting.remove(index);
                inner.flying += 1;
                let waiting = std::mem::replace(&mut inner.slots[slot as usize].state, State::Flying);
                let State::Waiting(_, operation) = waiting else { unreachable!("it waited a line ago") };
                let completed = Completed { buffer: operation.into_buffer(), result: Err(BAD_FILE) };
                if let Some(waker) = inner.land(slot, completed) {
                    waker.wake();
                }
            }
        }
        inner.queue.close(file);
    }

    /// Hands an operation over. It starts at the next [`Channel::poll`] at the latest.
    pub fn submit(&self, file: FileId, operation: Operation) -> Ticket {
        let mut inner = self.0.borrow_mut();
        let slot = inner.take_slot();
        if inner.flying < inner.depth && inner.waiting.is_empty() {
            inner.launch(slot, file, operation);
        } else {
            inner.slots[slot as usize].state = State::Waiting(file, operation);
            inner.waiting.push_back(slot);
        }
        Ticket { channel: Channel(Rc::clone(&self.0)), slot }
    }

    /// Sends on what was submitted, takes the device's answers and wakes who waits for them. Gives how
    /// many answers came.
    pub fn poll(&self) -> usize {
        let mut inner = self.0.borrow_mut();
        if inner.flying == 0 {
            return 0;
        }
        let mut done = std::mem::take(&mut inner.done);
        let Inner { queue, .. } = &mut *inner;
        queue.poll(&mut done);
        let count = done.len();
        for (slot, completed) in done.drain(..) {
            if let Some(waker) = inner.land(slot, completed) {
                waker.wake();
            }
        }
        inner.done = done;
        if count > 0 && inner.launch_waiting() {
            // What took the place of those answered goes to the device in this turn, too.
            let Inner { queue, done, .. } = &mut *inner;
            queue.poll(done);
        }
        count
    }

    /// How many operations have not been answered, those that wait for their turn included.
    pub fn in_flight(&self) -> usize {
        let inner = self.0.borrow();
        inner.flying + inner.waiting.len()
    }

    /// See [`DeviceQueue::wait_descriptor`].
    pub fn wait_descriptor(&self) -> Option<RawFd> {
        self.0.borrow().queue.wait_descriptor()
    }
}

impl Inner {
    fn take_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { state: State::Free, waker: None, abandoned: false });
            (self.slots.len() - 1) as u32
        })
    }

    fn launch(&mut self, slot: u32, file: FileId, operation: Operation) {
        self.slots[slot as usize].state = State::Flying;
        self.flying += 1;
        self.queue.submit(slot, file, operation);
    }

    fn launch_waiting(&mut self) -> bool {
        let mut launched = false;
        while self.flying < self.depth
            && let Some(slot) = self.waiting.pop_front()
        {
            let State::Waiting(file, operation) =
                std::mem::replace(&mut self.slots[slot as usize].state, State::Free)
            else {
                unreachable!("slot {slot} is in line and does not wait");
            };
            self.launch(slot, file, operation);
            launched = true;
        }
        launched
    }

    /// Takes an answer in; gives who waits for it.
    fn land(&mut self, slot: u32, completed: Completed) -> Option<Waker> {
        let entry = &mut self.slots[slot as usize];
        assert!(matches!(entry.state, State::Flying), "an answer for slot {slot}, which has no operation");
        self.flying -= 1;
        if entry.abandoned {
            self.release(slot);
            return None;
        }
        entry.state = State::Done(completed);
        entry.waker.take()
    }

    fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot { state: State::Free, waker: None, abandoned: false };
        self.free.push(slot);
    }
}

/// One operation under way, as a future of its answer.
///
/// # Panics
/// When polled again after it has given the answer.
#[must_use = "the answer says whether it happened"]
pub struct Ticket {
    channel: Channel,
    slot: u32,
}

const TAKEN: u32 = u32::MAX;

impl Future for Ticket {
    type Output = Completed;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Completed> {
        assert!(self.slot != TAKEN, "polled after the answer was taken");
        let slot = self.slot;
        let mut inner = self.channel.0.borrow_mut();
        let entry = &mut inner.slots[slot as usize];
        if !matches!(entry.state, State::Done(_)) {
            match &mut entry.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        let State::Done(completed) = std::mem::replace(&mut entry.state, State::Free) else {
            unreachable!("it was done a line ago");
        };
        inner.release(slot);
        drop(inner);
        self.slot = TAKEN;
        Poll::Ready(completed)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.slot == TAKEN {
            return;
        }
        let mut inner = self.channel.0.borrow_mut();
        let entry = &mut inner.slots[self.slot as usize];
        if matches!(entry.state, State::Done(_)) {
            inner.release(self.slot);
        } else {
            entry.abandoned = true;
            entry.waker = None;
        }
    }
}
