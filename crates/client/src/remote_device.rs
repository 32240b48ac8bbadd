//! A block namespace as a device, so that an engine runs in the client's process (architecture (c) of NetKVS).
//!
//! ```text
//!  engine ─▶ RemoteDevice ─▶ DeviceHandle (tickets) ─▶ RemoteSession: operations ─▶ Session ─▶ node
//!    ▲                                                   │  ▲  parts in sequence if an operation exceeds a
//!    └────────── DeviceHandle::poll ◀── finished ◀───────┘  │  command; retried after a delay if the node is busy
//!                                                           │
//!                                      RemoteSession::poll ─┘
//! ```
//! In: operations with owned buffers; time, by [`RemoteSession::poll`], which the owner calls in each iteration before it
//! polls the device handle. Out: their completions. Flush is NVMe Flush, trim is Dataset Management.
//!
//! Invariants: an operation with unknown outcome fails. Writes that the node completed but had not flushed when the
//! connection was lost may be lost (the node may have lost power), and a write in flight may be executed later: in both
//! cases the device is *fenced*, and every further write, trim and flush fails until a device is created on a new session.
//! A journaling engine then stops writing, as after any failed flush. In all other cases operations wait for the
//! connection, at most the command timeout. Limitation: a late write cannot be cancelled. The node completes commands of a
//! closed connection, and a node that delays a write longer than the engine's recovery takes could still execute it then.
//! Queues are bounded by the depth of the device handle. Tested in `tests/remote_device.rs` against a node that loses power.

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

/// Error numbers of failed operations.
const EIO: i32 = 5;
const EROFS: i32 = 30;
const ENOTCONN: i32 = 107;
const ETIMEDOUT: i32 = 110;

/// Delay before an operation is retried on a busy node.
const BUSY_RETRY_DELAY: Nanos = Nanos::from_millis(1);

/// A session with a block namespace, shared by its devices and the loop that polls it. Clones share the
/// session.
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
    /// Operations by ticket.
    operations: Vec<Option<RemoteOperation>>,
    /// Tickets that wait for a free slot or a connection.
    wait_queue: VecDeque<u32>,
    /// Retry times and tickets of operations that failed because the node was busy.
    retry_queue: VecDeque<(Nanos, u32)>,
    finished: Vec<(u32, IoCompletion)>,
    responses: Vec<(u64, Result<Response, Error>)>,
    in_flight: usize,
    /// Number of writes and trims that the node completed.
    completed_writes: u64,
    /// Number of them covered by a completed flush.
    durable_writes: u64,
    /// Epoch of the session at the last poll.
    connection_epoch: u64,
    fenced: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OperationKind {
    Read,
    Write,
    Trim,
    Flush {
        /// Number of completed writes and trims when the flush was submitted.
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
        let (kind, offset, bytes, buffer) = match operation.into_single_buffer() {
            IoOperation::Read { offset, buffer } => {
                (OperationKind::Read, offset, buffer.len() as u64, Some(buffer))
            }
            IoOperation::Write { offset, buffer } => {
                (OperationKind::Write, offset, buffer.len() as u64, Some(buffer))
            }
            IoOperation::WriteVectored { .. } => unreachable!("it has one buffer"),
            IoOperation::Trim { offset, bytes } => (OperationKind::Trim, offset, bytes, None),
            IoOperation::Flush => (OperationKind::Flush { durable_writes: 0 }, 0, 0, None),
        };
        let deadline = self.now + self.session.config().command_timeout;
        let index = ticket as usize;
        if self.operations.len() <= index {
            self.operations.resize_with(index + 1, || None);
        }
        self.operations[index] =
            Some(RemoteOperation { kind, offset, bytes, done_bytes: 0, buffer, deadline });
        self.in_flight += 1;
        self.submit_next_part(ticket);
    }

    fn operation(&mut self, ticket: u32) -> &mut RemoteOperation {
        self.operations[ticket as usize].as_mut().expect("a ticket has its operation until it is finished")
    }

    fn finish(&mut self, ticket: u32, result: Result<(), i32>) {
        let operation = self.operations[ticket as usize].take().expect("a ticket is finished once");
        self.finished.push((ticket, IoCompletion { buffer: operation.buffer, result }));
    }

    /// Submits the next part of an operation, or queues the operation if no slot is free.
    fn submit_next_part(&mut self, ticket: u32) {
        let (kind, completed_writes) = (self.operation(ticket).kind, self.completed_writes);
        if self.fenced && kind != OperationKind::Read {
            return self.finish(ticket, Err(EROFS));
        }
        let supports_deallocate = self.session.controller_info().is_some_and(|info| info.supports_deallocate);
        let operation = self.operation(ticket);
        if operation.done_bytes == operation.bytes && !matches!(kind, OperationKind::Flush { .. }) {
            return self.finish(ticket, Ok(()));
        }
        if kind == OperationKind::Trim && !supports_deallocate {
            return self.finish(ticket, Ok(()));
        }
        if self.session.free_slots() == 0 {
            if self.session.ended().is_some() {
                return self.finish(ticket, Err(ENOTCONN));
            }
            return self.wait_queue.push_back(ticket);
        }
        if bug_injection::is_injected(InjectedBug::CompleteFlushEarly)
            && matches!(kind, OperationKind::Flush { .. })
        {
            return self.finish(ticket, Ok(()));
        }
        let (block_bytes, command_bytes_max) = self.command_limits();
        let RemoteState { session, operations, .. } = self;
        let operation = operations[ticket as usize].as_mut().expect("the operation was found above");
        let lba = Lba((operation.offset + operation.done_bytes) / block_bytes);
        let left = operation.bytes - operation.done_bytes;
        let part = left.min(command_bytes_max);
        let range = LbaRange { lba, blocks: (part / block_bytes) as u32 };
        let token = u64::from(ticket);
        let submitted = match kind {
            // A part of a read uses a buffer of the pool.
            OperationKind::Read if part < operation.bytes => {
                session.submit(Command::Read { range, buffer: None }, token)
            }
            OperationKind::Read => {
                session.submit(Command::Read { range, buffer: operation.buffer.take() }, token)
            }
            OperationKind::Write => {
                let (from, to) = (operation.done_bytes as usize, (operation.done_bytes + part) as usize);
                let buffer = operation.buffer.take().expect("a write has its buffer between its parts");
                let data = Value::Buffer { buffer, from, to };
                session.submit(Command::Write { lba, data, force_unit_access: false }, token)
            }
            OperationKind::Trim => {
                let blocks = (left / block_bytes).min(u64::from(u32::MAX)) as u32;
                session.submit(Command::Deallocate { ranges: &[LbaRange { lba, blocks }] }, token)
            }
            OperationKind::Flush { .. } => {
                operation.kind = OperationKind::Flush { durable_writes: completed_writes };
                session.submit(Command::Flush, token)
            }
        };
        if submitted.is_err() {
            // A slot was free, so the command itself is invalid: the namespace has shrunk.
            self.finish(ticket, Err(EIO));
        }
    }

    /// Block size and maximum data of one command, in bytes.
    fn command_limits(&self) -> (u64, u64) {
        let data_bytes_max = self.session.controller_info().map_or(u32::MAX, |info| info.data_bytes_max);
        let command_bytes_max = self.blocks.command_bytes_max(data_bytes_max);
        (u64::from(self.blocks.block_bytes), u64::from(command_bytes_max.max(self.blocks.block_bytes)))
    }

    fn handle_response(&mut self, ticket: u32, response: Result<Response, Error>) {
        let (block_bytes, command_bytes_max) = self.command_limits();
        let operation = self.operation(ticket);
        let left = operation.bytes - operation.done_bytes;
        match response {
            Ok(Response::Blocks { data }) => {
                let bytes = data.len() as u64;
                if bytes == operation.bytes {
                    operation.buffer = data.into_buffer();
                } else if let Some(whole) = &mut operation.buffer {
                    let from = operation.done_bytes as usize;
                    whole[from..from + data.len()].copy_from_slice(&data);
                }
                operation.done_bytes += bytes;
                self.submit_next_part(ticket);
            }
            Ok(Response::Written { buffer }) => {
                operation.done_bytes += match operation.kind {
                    OperationKind::Trim => left.min(u64::from(u32::MAX) * block_bytes),
                    _ => left.min(command_bytes_max),
                };
                operation.buffer = buffer;
                self.completed_writes += 1;
                self.submit_next_part(ticket);
            }
            Ok(Response::Flushed) => {
                if let OperationKind::Flush { durable_writes } = operation.kind {
                    self.durable_writes = self.durable_writes.max(durable_writes);
                }
                self.finish(ticket, Ok(()));
            }
            Ok(Response::Retry { buffer }) => {
                operation.buffer = operation.buffer.take().or(buffer);
                if operation.kind == OperationKind::Write && operation.buffer.is_none() {
                    // The node rejected the command before all its data was sent, so the buffer was not
                    // returned.
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
        let retry_at = self.now + BUSY_RETRY_DELAY;
        if self.operation(ticket).deadline <= retry_at {
            return self.finish(ticket, Err(ETIMEDOUT));
        }
        self.retry_queue.push_back((retry_at, ticket));
    }

    fn fence(&mut self) {
        self.fenced |= !bug_injection::is_injected(InjectedBug::ForgetLostWrites);
    }

    /// Polls the session at the current time and handles its responses.
    fn poll_session(&mut self) -> bool {
        let RemoteState { session, responses, now, .. } = self;
        let progress = session.poll(*now, |token, response| responses.push((token, response)));
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
        let ended = self.session.ended().is_some();
        while let Some(&(due, ticket)) = self.retry_queue.front()
            && (due <= now || ended)
        {
            self.retry_queue.pop_front();
            self.wait_queue.push_back(ticket);
        }
        for _ in 0..self.wait_queue.len() {
            let Some(ticket) = self.wait_queue.pop_front() else { break };
            if self.session.free_slots() > 0 || ended || self.fenced {
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
        let retry_at = self.retry_queue.front().map_or(Nanos::NEVER, |(due, _)| *due);
        let deadline =
            |&ticket: &u32| self.operations[ticket as usize].as_ref().map(|operation| operation.deadline);
        let expires_at = self.wait_queue.iter().filter_map(deadline).min().unwrap_or(Nanos::NEVER);
        self.session.next_deadline().min(retry_at).min(expires_at)
    }
}

impl<S: Sockets + 'static> RemoteSession<S> {
    /// A remote session over a live session with a namespace of 512-byte or 4096-byte blocks.
    ///
    /// # Errors
    /// [`Error::Closed`] if the session is not live, [`Error::NotBlockNamespace`], or
    /// [`Error::BlockDataLength`] for another block size.
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

    /// A device handle for operations of this session's devices only. Its depth is the number of free slots.
    pub fn channel(&self) -> DeviceHandle {
        let depth = self.0.borrow().session.free_slots().max(1);
        DeviceHandle::new(Box::new(RemoteDeviceQueue(self.clone())), depth)
    }

    /// The namespace as a device. REQUIRES: `channel` is a result of [`RemoteSession::channel`].
    pub fn device(&self, channel: &DeviceHandle) -> RemoteDevice {
        let state = self.0.borrow();
        let BlockInfo { block_bytes, block_count, .. } = state.blocks;
        let config = state.session.config();
        let (address, nqn, id) = (state.session.address(), &config.subsystem_nqn, config.namespace);
        RemoteDevice {
            channel: channel.clone(),
            geometry: Geometry { block_bytes, blocks: block_count, volatile: false },
            name: format!("nvme+tcp://{address}/{nqn}?nsid={id}"),
        }
    }

    /// Sends, receives and handles deadlines; the next poll of the device handle returns the completions.
    /// Returns whether there was any work.
    pub fn poll(&self, now: Nanos) -> bool {
        self.0.borrow_mut().poll(now)
    }

    /// Latest time of the next [`RemoteSession::poll`], whatever the sockets report.
    pub fn next_deadline(&self) -> Nanos {
        self.0.borrow().next_deadline()
    }

    /// Whether the device rejects writes because earlier ones may have been lost with a connection.
    pub fn is_fenced(&self) -> bool {
        self.0.borrow().fenced
    }

    /// The session; `None` while other clones, device handles or queues of it exist.
    pub fn into_session(self) -> Option<Session<S>> {
        Rc::into_inner(self.0).map(|state| state.into_inner().session)
    }

    /// Calls `f` with the session, for example to wait on its sockets or to close it.
    pub fn with_session<T>(&self, f: impl FnOnce(&mut Session<S>) -> T) -> T {
        f(&mut self.0.borrow_mut().session)
    }
}

/// The session as the queue of a device handle.
struct RemoteDeviceQueue<S: Sockets>(RemoteSession<S>);

impl<S: Sockets> DeviceQueue for RemoteDeviceQueue<S> {
    fn open(&mut self, _media: &DeviceSource) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn close(&mut self, _file: FileId) {
        // The namespace exists as long as its session.
    }

    fn submit(&mut self, ticket: u32, _file: FileId, operation: IoOperation) {
        self.0.0.borrow_mut().begin(ticket, operation);
    }

    fn poll(&mut self, completion: &mut Vec<(u32, IoCompletion)>) {
        let mut state = self.0.0.borrow_mut();
        // Operations submitted in this iteration are sent in it.
        state.poll_session();
        state.in_flight -= state.finished.len();
        completion.append(&mut state.finished);
    }

    fn in_flight(&self) -> usize {
        self.0.0.borrow().in_flight
    }
}

/// A block namespace as a device. See the module documentation.
pub struct RemoteDevice {
    channel: DeviceHandle,
    geometry: Geometry,
    name: String,
}

/// Identifier of the only device of a session.
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
