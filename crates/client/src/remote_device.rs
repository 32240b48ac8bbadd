//! A namespace of blocks as a device, so that an engine runs on this side of the network (NetKVS's
//! architecture (c)).
//!
//! ```text
//!  engine ─▶ RemoteDevice ─▶ Channel (tickets) ─▶ Remote: jobs ─▶ Session ─▶ node
//!    ▲                                              │  ▲  parts one after another, where a job is larger
//!    └────────────── Channel::poll ◀── finished ◀───┘  │  than a command; again a little later, where the
//!                                                      │  node was busy
//!                                         Remote::turn ┘
//! ```
//! In: operations with owned buffers; time, by [`RemoteSession::turn`], which the owner's loop calls each turn, before
//! it polls the channel. Out: their completions. Flush is NVMe's Flush, trim its Dataset Management.
//!
//! Invariants: an operation whose outcome is not known fails. What the node had completed and not yet flushed
//! when the connection was lost may be lost (the node may have lost power), and a write that was on its way may
//! be carried out later: where there was either, this device is *fenced*, and every further write, trim and flush
//! fails until it is made anew over a new session. An engine that writes a journal then ends its writing, as
//! after any failed flush. Without either, operations wait for the connection, as long as a command may take.
//! What this cannot do is call such a late write back: the node ends what it had begun for a connection that is gone,
//! and a device that keeps a write for longer than opening the volume again takes could still carry it out then.
//! Tested in `tests/remote.rs` against a node that loses power.

use crate::bug_injection::{self, InjectedBug};
use crate::command::{Command, Response, Value};
use crate::controller_info::BlockInfo;
use crate::error::Error;
use crate::session::Session;
use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::{Device, DeviceFuture, Geometry};
use octokv_runtime::Sockets;
use octokv_runtime::device_queue::{
    DeviceHandle, DeviceQueue, DeviceSource, FileId, IoCompletion, IoOperation,
};
use octokv_wire::nvm::LbaRange;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

/// Error numbers that operations fail with.
const EIO: i32 = 5;
const EROFS: i32 = 30;
const ENOTCONN: i32 = 107;
const ETIMEDOUT: i32 = 110;

/// How long an operation waits that the node was too busy for.
const BUSY_RETRY_DELAY: Nanos = Nanos::from_millis(1);

/// A session with a namespace of blocks, shared by a device and the loop that turns it. Clones are the same.
pub struct RemoteSession<S: Sockets>(Rc<RefCell<RemoteState<S>>>);

impl<S: Sockets> Clone for RemoteSession<S> {
    fn clone(&self) -> RemoteSession<S> {
        RemoteSession(Rc::clone(&self.0))
    }
}

struct RemoteState<S: Sockets> {
    session: Session<S>,
    now: Nanos,
    blocks: BlockInfo,
    /// By ticket.
    operations: Vec<Option<RemoteOperation>>,
    /// In line for room or a connection.
    wait_queue: VecDeque<u32>,
    /// To be tried again, and when.
    retry_queue: VecDeque<(Nanos, u32)>,
    finished: Vec<(u32, IoCompletion)>,
    responses: Vec<(u64, Result<Response, Error>)>,
    in_flight: usize,
    /// Writes and trims that the node has completed.
    completed_writes: u64,
    /// So many of them are durable.
    durable_writes: u64,
    /// Which life of the session that was.
    connection_epoch: u64,
    fenced: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OperationKind {
    Read,
    Write,
    Trim,
    /// Makes so many changes durable.
    Flush {
        durable_writes: u64,
    },
}

struct RemoteOperation {
    kind: OperationKind,
    offset: u64,
    bytes: u64,
    done_bytes: u64,
    buffer: Option<Buffer>,
    deadline: Nanos,
}

impl<S: Sockets> RemoteState<S> {
    fn begin(&mut self, ticket: u32, operation: IoOperation) {
        let (what, offset, bytes, buffer) = match operation {
            IoOperation::Read { offset, buffer } => {
                (OperationKind::Read, offset, buffer.len() as u64, Some(buffer))
            }
            IoOperation::Write { offset, buffer } => {
                (OperationKind::Write, offset, buffer.len() as u64, Some(buffer))
            }
            IoOperation::Trim { offset, bytes } => (OperationKind::Trim, offset, bytes, None),
            IoOperation::Flush => (OperationKind::Flush { durable_writes: 0 }, 0, 0, None),
        };
        let deadline = self.now + self.session.config().command_timeout;
        let index = ticket as usize;
        if self.operations.len() <= index {
            self.operations.resize_with(index + 1, || None);
        }
        self.operations[index] =
            Some(RemoteOperation { kind: what, offset, bytes, done_bytes: 0, buffer, deadline });
        self.in_flight += 1;
        self.submit_next_part(ticket);
    }

    fn operation(&mut self, ticket: u32) -> &mut RemoteOperation {
        self.operations[ticket as usize].as_mut().expect("a ticket has its job until it is finished")
    }

    fn finish(&mut self, ticket: u32, result: Result<(), i32>) {
        let queued = self.operations[ticket as usize].take().expect("a ticket is finished once");
        self.finished.push((ticket, IoCompletion { buffer: queued.buffer, result }));
    }

    /// Sends a job's next part, or has it wait for room.
    fn submit_next_part(&mut self, ticket: u32) {
        let (what, changes) = (self.operation(ticket).kind, self.completed_writes);
        if self.fenced && what != OperationKind::Read {
            return self.finish(ticket, Err(EROFS));
        }
        let deallocates = self.session.controller_info().is_some_and(|facts| facts.supports_deallocate);
        let queued = self.operation(ticket);
        if queued.done_bytes == queued.bytes && !matches!(what, OperationKind::Flush { .. }) {
            return self.finish(ticket, Ok(()));
        }
        if what == OperationKind::Trim && !deallocates {
            return self.finish(ticket, Ok(()));
        }
        if self.session.free_slots() == 0 {
            if self.session.ended().is_some() {
                return self.finish(ticket, Err(ENOTCONN));
            }
            return self.wait_queue.push_back(ticket);
        }
        if bug_injection::is_injected(InjectedBug::CompleteFlushEarly)
            && matches!(what, OperationKind::Flush { .. })
        {
            return self.finish(ticket, Ok(()));
        }
        let (block_bytes, most) = self.command_limits();
        let RemoteState { session, operations: jobs, .. } = self;
        let queued = jobs[ticket as usize].as_mut().expect("it was there above");
        let lba = Lba((queued.offset + queued.done_bytes) / block_bytes);
        let left = queued.bytes - queued.done_bytes;
        let part = left.min(most);
        let range = LbaRange { lba, blocks: (part / block_bytes) as u32 };
        let token = u64::from(ticket);
        let submitted = match what {
            // A part of a read comes into a buffer of its own.
            OperationKind::Read if part < queued.bytes => {
                session.submit(Command::Read { range, buffer: None }, token)
            }
            OperationKind::Read => {
                session.submit(Command::Read { range, buffer: queued.buffer.take() }, token)
            }
            OperationKind::Write => {
                let (from, to) = (queued.done_bytes as usize, (queued.done_bytes + part) as usize);
                let buffer = queued.buffer.take().expect("a write has its buffer between its parts");
                let data = Value::Buffer { buffer, from, to };
                session.submit(Command::Write { lba, data, force_unit_access: false }, token)
            }
            OperationKind::Trim => {
                let blocks = (left / block_bytes).min(u64::from(u32::MAX)) as u32;
                session.submit(Command::Deallocate { ranges: &[LbaRange { lba, blocks }] }, token)
            }
            OperationKind::Flush { .. } => {
                queued.kind = OperationKind::Flush { durable_writes: changes };
                session.submit(Command::Flush, token)
            }
        };
        if submitted.is_err() {
            // There was room, so it is the command itself: the namespace has shrunk.
            self.finish(ticket, Err(EIO));
        }
    }

    /// Bytes of a block, and the most of one command.
    fn command_limits(&self) -> (u64, u64) {
        let data_bytes_max = self.session.controller_info().map_or(u32::MAX, |facts| facts.data_bytes_max);
        let most = self.blocks.command_bytes_max(data_bytes_max);
        (u64::from(self.blocks.block_bytes), u64::from(most.max(self.blocks.block_bytes)))
    }

    fn handle_response(&mut self, ticket: u32, response: Result<Response, Error>) {
        let (block_bytes, most) = self.command_limits();
        let queued = self.operation(ticket);
        let left = queued.bytes - queued.done_bytes;
        match response {
            Ok(Response::Blocks { data }) => {
                let bytes = data.len() as u64;
                if bytes == queued.bytes {
                    queued.buffer = data.into_buffer();
                } else if let Some(whole) = &mut queued.buffer {
                    let from = queued.done_bytes as usize;
                    whole[from..from + data.len()].copy_from_slice(&data);
                }
                queued.done_bytes += bytes;
                self.submit_next_part(ticket);
            }
            Ok(Response::Written { buffer }) => {
                queued.done_bytes += match queued.kind {
                    OperationKind::Trim => left.min(u64::from(u32::MAX) * block_bytes),
                    _ => left.min(most),
                };
                queued.buffer = buffer;
                self.completed_writes += 1;
                self.submit_next_part(ticket);
            }
            Ok(Response::Flushed) => {
                if let OperationKind::Flush { durable_writes: covers } = queued.kind {
                    self.durable_writes = self.durable_writes.max(covers);
                }
                self.finish(ticket, Ok(()));
            }
            Ok(Response::Retry { buffer }) => {
                queued.buffer = queued.buffer.take().or(buffer);
                if queued.kind == OperationKind::Write && queued.buffer.is_none() {
                    // It was refused before its data had left: the buffer went with the data.
                    return self.finish(ticket, Err(EIO));
                }
                self.retry_later(ticket);
            }
            Err(Error::Busy) => self.retry_later(ticket),
            Err(Error::OutcomeUnknown) => {
                self.fence();
                self.finish(ticket, Err(EIO));
            }
            Ok(_) | Err(_) => self.finish(ticket, Err(EIO)),
        }
    }

    fn retry_later(&mut self, ticket: u32) {
        let again = self.now + BUSY_RETRY_DELAY;
        if self.operation(ticket).deadline <= again {
            return self.finish(ticket, Err(ETIMEDOUT));
        }
        self.retry_queue.push_back((again, ticket));
    }

    fn fence(&mut self) {
        self.fenced |= !bug_injection::is_injected(InjectedBug::ForgetLostWrites);
    }

    /// Sends and receives at the time of this turn.
    fn poll_session(&mut self) -> bool {
        let RemoteState { session, responses: answers, now, .. } = self;
        let progress = session.poll(*now, |token, response| answers.push((token, response)));
        let mut responses = std::mem::take(&mut self.responses);
        for (token, response) in responses.drain(..) {
            self.handle_response(token as u32, response);
        }
        self.responses = responses;
        let epoch = self.session.connection_epoch();
        if (epoch != self.connection_epoch || !self.session.is_live())
            && self.completed_writes > self.durable_writes
        {
            self.fence();
        }
        self.connection_epoch = epoch;
        progress
    }

    fn poll(&mut self, now: Nanos) -> bool {
        self.now = now;
        let mut progress = self.poll_session();
        let over = self.session.ended().is_some();
        while let Some(&(due, ticket)) = self.retry_queue.front()
            && (due <= now || over)
        {
            self.retry_queue.pop_front();
            self.wait_queue.push_back(ticket);
        }
        for _ in 0..self.wait_queue.len() {
            let Some(ticket) = self.wait_queue.pop_front() else { break };
            if self.session.free_slots() > 0 || over || self.fenced {
                self.submit_next_part(ticket);
                progress = true;
            } else if self.operation(ticket).deadline <= now {
                self.finish(ticket, Err(ETIMEDOUT));
                progress = true;
            } else {
                self.wait_queue.push_back(ticket);
            }
        }
        progress
    }

    fn next_deadline(&self) -> Nanos {
        let paused = self.retry_queue.front().map_or(Nanos::NEVER, |(due, _)| *due);
        let deadline =
            |&ticket: &u32| self.operations[ticket as usize].as_ref().map(|queued| queued.deadline);
        let waiting = self.wait_queue.iter().filter_map(deadline).min().unwrap_or(Nanos::NEVER);
        self.session.next_deadline().min(paused).min(waiting)
    }
}

impl<S: Sockets + 'static> RemoteSession<S> {
    /// Over a session that is live, with a namespace of blocks of 512 or 4096 bytes.
    ///
    /// # Errors
    /// When it is neither.
    pub fn new(session: Session<S>, now: Nanos) -> Result<RemoteSession<S>, Error> {
        let info = session.controller_info().filter(|_| session.is_live()).ok_or(Error::Closed)?;
        let blocks = info.blocks.ok_or(Error::NotBlockNamespace)?;
        let block_bytes = blocks.block_bytes;
        if ![512, 4096].contains(&block_bytes) {
            return Err(Error::BlockDataLength { have: u64::from(block_bytes), block_bytes, max: 4096 });
        }
        Ok(RemoteSession(Rc::new(RefCell::new(RemoteState {
            now,
            blocks,
            operations: Vec::new(),
            wait_queue: VecDeque::new(),
            retry_queue: VecDeque::new(),
            finished: Vec::new(),
            responses: Vec::new(),
            in_flight: 0,
            completed_writes: 0,
            durable_writes: 0,
            connection_epoch: session.connection_epoch(),
            fenced: false,
            session,
        }))))
    }

    /// A channel for its operations, as many at a time as the session takes; for this remote's devices alone.
    pub fn channel(&self) -> DeviceHandle {
        let depth = self.0.borrow().session.free_slots().max(1);
        DeviceHandle::new(Box::new(RemoteDeviceQueue(self.clone())), depth)
    }

    /// The device. `channel` is one of [`RemoteSession::channel`].
    pub fn device(&self, channel: &DeviceHandle) -> RemoteDevice {
        let state = self.0.borrow();
        let BlockInfo { block_bytes, block_count: count, .. } = state.blocks;
        let config = state.session.config();
        let (address, nqn, id) = (state.session.address(), &config.subsystem_nqn, config.namespace);
        RemoteDevice {
            channel: channel.clone(),
            geometry: Geometry { block_bytes, blocks: count, volatile: false },
            name: format!("nvme+tcp://{address}/{nqn}?nsid={id}"),
        }
    }

    /// Sends, receives, lets time pass; the channel's next poll then gives what has come. True when there was
    /// anything to do.
    pub fn poll(&self, now: Nanos) -> bool {
        self.0.borrow_mut().poll(now)
    }

    /// When [`RemoteSession::turn`] must be called at the latest, whatever the sockets say.
    pub fn next_deadline(&self) -> Nanos {
        self.0.borrow().next_deadline()
    }

    /// Whether writes may have been lost with a connection, so that no more are taken.
    pub fn is_fenced(&self) -> bool {
        self.0.borrow().fenced
    }

    /// The session, once the channels and devices made of this are gone.
    pub fn into_session(self) -> Option<Session<S>> {
        Rc::into_inner(self.0).map(|state| state.into_inner().session)
    }

    /// Does something with the session: waits on its sockets, closes it.
    pub fn with_session<T>(&self, then: impl FnOnce(&mut Session<S>) -> T) -> T {
        then(&mut self.0.borrow_mut().session)
    }
}

/// The remote as a channel's queue.
struct RemoteDeviceQueue<S: Sockets>(RemoteSession<S>);

impl<S: Sockets> DeviceQueue for RemoteDeviceQueue<S> {
    fn open(&mut self, _media: &DeviceSource) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn close(&mut self, _file: FileId) {
        // The namespace is there as long as its session.
    }

    fn submit(&mut self, ticket: u32, _file: FileId, operation: IoOperation) {
        self.0.0.borrow_mut().begin(ticket, operation);
    }

    fn poll(&mut self, completion: &mut Vec<(u32, IoCompletion)>) {
        let mut state = self.0.0.borrow_mut();
        // What was submitted since the turn began goes out in it.
        state.poll_session();
        state.in_flight -= state.finished.len();
        completion.append(&mut state.finished);
    }

    fn in_flight(&self) -> usize {
        self.0.0.borrow().in_flight
    }
}

/// A namespace of blocks as a device. See the module's text.
pub struct RemoteDevice {
    channel: DeviceHandle,
    geometry: Geometry,
    name: String,
}

/// The one device that a remote has.
const FILE: FileId = FileId(0);

impl RemoteDevice {
    fn offset(&self, at: Lba) -> u64 {
        at.0 * u64::from(self.geometry.block_bytes)
    }
}

impl Device for RemoteDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let operation = IoOperation::Read { offset: self.offset(at), buffer };
        DeviceFuture::submitted(self.channel.submit(FILE, operation))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let operation = IoOperation::Write { offset: self.offset(at), buffer };
        DeviceFuture::submitted(self.channel.submit(FILE, operation))
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::submitted(self.channel.submit(FILE, IoOperation::Flush))
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        if at.0.checked_add(blocks).is_none_or(|end| end > self.geometry.blocks) {
            return DeviceFuture::out_of_range(None);
        }
        let bytes = blocks * u64::from(self.geometry.block_bytes);
        DeviceFuture::submitted(
            self.channel.submit(FILE, IoOperation::Trim { offset: self.offset(at), bytes }),
        )
    }
}
