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
//! In: operations with owned buffers; time, by [`Remote::turn`], which the owner's loop calls each turn, before
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

use crate::bug_injection::{self, Bug};
use crate::command::{Answer, Command, Value};
use crate::controller_init::Blocks;
use crate::error::Error;
use crate::session::Session;
use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::{Device, Geometry, Pending};
use octokv_runtime::Sockets;
use octokv_runtime::device_queue::{Channel, Completed, DeviceQueue, FileId, Media, Operation};
use octokv_wire::nvm::Range;
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
const PAUSE: Nanos = Nanos::from_millis(1);

/// A session with a namespace of blocks, shared by a device and the loop that turns it. Clones are the same.
pub struct Remote<S: Sockets>(Rc<RefCell<State<S>>>);

impl<S: Sockets> Clone for Remote<S> {
    fn clone(&self) -> Remote<S> {
        Remote(Rc::clone(&self.0))
    }
}

struct State<S: Sockets> {
    session: Session<S>,
    now: Nanos,
    blocks: Blocks,
    /// By ticket.
    jobs: Vec<Option<Job>>,
    /// In line for room or a connection.
    waiting: VecDeque<u32>,
    /// To be tried again, and when.
    paused: VecDeque<(Nanos, u32)>,
    finished: Vec<(u32, Completed)>,
    answers: Vec<(u64, Result<Answer, Error>)>,
    in_flight: usize,
    /// Writes and trims that the node has completed.
    changes: u64,
    /// So many of them are durable.
    durable: u64,
    /// Which life of the session that was.
    life: u64,
    fenced: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Read,
    Write,
    Trim,
    /// Makes so many changes durable.
    Flush {
        covers: u64,
    },
}

struct Job {
    what: What,
    offset: u64,
    bytes: u64,
    done_bytes: u64,
    buffer: Option<Buffer>,
    deadline: Nanos,
}

impl<S: Sockets> State<S> {
    fn begin(&mut self, ticket: u32, operation: Operation) {
        let (what, offset, bytes, buffer) = match operation {
            Operation::Read { offset, buffer } => (What::Read, offset, buffer.len() as u64, Some(buffer)),
            Operation::Write { offset, buffer } => (What::Write, offset, buffer.len() as u64, Some(buffer)),
            Operation::Trim { offset, bytes } => (What::Trim, offset, bytes, None),
            Operation::Flush => (What::Flush { covers: 0 }, 0, 0, None),
        };
        let deadline = self.now + self.session.settings().command_timeout;
        let index = ticket as usize;
        if self.jobs.len() <= index {
            self.jobs.resize_with(index + 1, || None);
        }
        self.jobs[index] = Some(Job { what, offset, bytes, done_bytes: 0, buffer, deadline });
        self.in_flight += 1;
        self.launch(ticket);
    }

    fn job(&mut self, ticket: u32) -> &mut Job {
        self.jobs[ticket as usize].as_mut().expect("a ticket has its job until it is finished")
    }

    fn finish(&mut self, ticket: u32, result: Result<(), i32>) {
        let job = self.jobs[ticket as usize].take().expect("a ticket is finished once");
        self.finished.push((ticket, Completed { buffer: job.buffer, result }));
    }

    /// Sends a job's next part, or has it wait for room.
    fn launch(&mut self, ticket: u32) {
        let (what, changes) = (self.job(ticket).what, self.changes);
        if self.fenced && what != What::Read {
            return self.finish(ticket, Err(EROFS));
        }
        let deallocates = self.session.facts().is_some_and(|facts| facts.deallocates);
        let job = self.job(ticket);
        if job.done_bytes == job.bytes && !matches!(what, What::Flush { .. }) {
            return self.finish(ticket, Ok(()));
        }
        if what == What::Trim && !deallocates {
            return self.finish(ticket, Ok(()));
        }
        if self.session.room() == 0 {
            if self.session.ended().is_some() {
                return self.finish(ticket, Err(ENOTCONN));
            }
            return self.waiting.push_back(ticket);
        }
        if bug_injection::is(Bug::AnswerFlushEarly) && matches!(what, What::Flush { .. }) {
            return self.finish(ticket, Ok(()));
        }
        let (block_bytes, most) = self.limits();
        let State { session, jobs, .. } = self;
        let job = jobs[ticket as usize].as_mut().expect("it was there above");
        let lba = Lba((job.offset + job.done_bytes) / block_bytes);
        let left = job.bytes - job.done_bytes;
        let part = left.min(most);
        let range = Range { lba, blocks: (part / block_bytes) as u32 };
        let token = u64::from(ticket);
        let submitted = match what {
            // A part of a read comes into a buffer of its own.
            What::Read if part < job.bytes => session.submit(Command::Read { range, into: None }, token),
            What::Read => session.submit(Command::Read { range, into: job.buffer.take() }, token),
            What::Write => {
                let (from, to) = (job.done_bytes as usize, (job.done_bytes + part) as usize);
                let buffer = job.buffer.take().expect("a write has its buffer between its parts");
                let data = Value::Buffer { buffer, from, to };
                session.submit(Command::Write { lba, data, force_unit_access: false }, token)
            }
            What::Trim => {
                let blocks = (left / block_bytes).min(u64::from(u32::MAX)) as u32;
                session.submit(Command::Deallocate { ranges: &[Range { lba, blocks }] }, token)
            }
            What::Flush { .. } => {
                job.what = What::Flush { covers: changes };
                session.submit(Command::Flush, token)
            }
        };
        if submitted.is_err() {
            // There was room, so it is the command itself: the namespace has shrunk.
            self.finish(ticket, Err(EIO));
        }
    }

    /// Bytes of a block, and the most of one command.
    fn limits(&self) -> (u64, u64) {
        let data_bytes_max = self.session.facts().map_or(u32::MAX, |facts| facts.data_bytes_max);
        let most = self.blocks.command_bytes_max(data_bytes_max);
        (u64::from(self.blocks.block_bytes), u64::from(most.max(self.blocks.block_bytes)))
    }

    fn answered(&mut self, ticket: u32, answer: Result<Answer, Error>) {
        let (block_bytes, most) = self.limits();
        let job = self.job(ticket);
        let left = job.bytes - job.done_bytes;
        match answer {
            Ok(Answer::Blocks { data }) => {
                let bytes = data.len() as u64;
                if bytes == job.bytes {
                    job.buffer = data.into_buffer();
                } else if let Some(whole) = &mut job.buffer {
                    let from = job.done_bytes as usize;
                    whole[from..from + data.len()].copy_from_slice(&data);
                }
                job.done_bytes += bytes;
                self.launch(ticket);
            }
            Ok(Answer::Written { buffer }) => {
                job.done_bytes += match job.what {
                    What::Trim => left.min(u64::from(u32::MAX) * block_bytes),
                    _ => left.min(most),
                };
                job.buffer = buffer;
                self.changes += 1;
                self.launch(ticket);
            }
            Ok(Answer::Flushed) => {
                if let What::Flush { covers } = job.what {
                    self.durable = self.durable.max(covers);
                }
                self.finish(ticket, Ok(()));
            }
            Ok(Answer::Again { buffer }) => {
                job.buffer = job.buffer.take().or(buffer);
                if job.what == What::Write && job.buffer.is_none() {
                    // It was refused before its data had left: the buffer went with the data.
                    return self.finish(ticket, Err(EIO));
                }
                self.pause(ticket);
            }
            Err(Error::Busy) => self.pause(ticket),
            Err(Error::OutcomeUnknown) => {
                self.fence();
                self.finish(ticket, Err(EIO));
            }
            Ok(_) | Err(_) => self.finish(ticket, Err(EIO)),
        }
    }

    fn pause(&mut self, ticket: u32) {
        let again = self.now + PAUSE;
        if self.job(ticket).deadline <= again {
            return self.finish(ticket, Err(ETIMEDOUT));
        }
        self.paused.push_back((again, ticket));
    }

    fn fence(&mut self) {
        self.fenced |= !bug_injection::is(Bug::ForgetLostWrites);
    }

    /// Sends and receives at the time of this turn.
    fn exchange(&mut self) -> bool {
        let State { session, answers, now, .. } = self;
        let busy = session.poll(*now, |token, answer| answers.push((token, answer)));
        let mut answers = std::mem::take(&mut self.answers);
        for (token, answer) in answers.drain(..) {
            self.answered(token as u32, answer);
        }
        self.answers = answers;
        let lives = self.session.lives();
        if (lives != self.life || !self.session.is_live()) && self.changes > self.durable {
            self.fence();
        }
        self.life = lives;
        busy
    }

    fn turn(&mut self, now: Nanos) -> bool {
        self.now = now;
        let mut busy = self.exchange();
        let over = self.session.ended().is_some();
        while let Some(&(due, ticket)) = self.paused.front()
            && (due <= now || over)
        {
            self.paused.pop_front();
            self.waiting.push_back(ticket);
        }
        for _ in 0..self.waiting.len() {
            let Some(ticket) = self.waiting.pop_front() else { break };
            if self.session.room() > 0 || over || self.fenced {
                self.launch(ticket);
                busy = true;
            } else if self.job(ticket).deadline <= now {
                self.finish(ticket, Err(ETIMEDOUT));
                busy = true;
            } else {
                self.waiting.push_back(ticket);
            }
        }
        busy
    }

    fn next_deadline(&self) -> Nanos {
        let paused = self.paused.front().map_or(Nanos::NEVER, |(due, _)| *due);
        let deadline = |&ticket: &u32| self.jobs[ticket as usize].as_ref().map(|job| job.deadline);
        let waiting = self.waiting.iter().filter_map(deadline).min().unwrap_or(Nanos::NEVER);
        self.session.next_deadline().min(paused).min(waiting)
    }
}

impl<S: Sockets + 'static> Remote<S> {
    /// Over a session that is live, with a namespace of blocks of 512 or 4096 bytes.
    ///
    /// # Errors
    /// When it is neither.
    pub fn new(session: Session<S>, now: Nanos) -> Result<Remote<S>, Error> {
        let facts = session.facts().filter(|_| session.is_live()).ok_or(Error::Closed)?;
        let blocks = facts.blocks.ok_or(Error::NotBlocks)?;
        let block_bytes = blocks.block_bytes;
        if ![512, 4096].contains(&block_bytes) {
            return Err(Error::BlockBytes { have: u64::from(block_bytes), block_bytes, max: 4096 });
        }
        Ok(Remote(Rc::new(RefCell::new(State {
            now,
            blocks,
            jobs: Vec::new(),
            waiting: VecDeque::new(),
            paused: VecDeque::new(),
            finished: Vec::new(),
            answers: Vec::new(),
            in_flight: 0,
            changes: 0,
            durable: 0,
            life: session.lives(),
            fenced: false,
            session,
        }))))
    }

    /// A channel for its operations, as many at a time as the session takes; for this remote's devices alone.
    pub fn channel(&self) -> Channel {
        let depth = self.0.borrow().session.room().max(1);
        Channel::new(Box::new(Queue(self.clone())), depth)
    }

    /// The device. `channel` is one of [`Remote::channel`].
    pub fn device(&self, channel: &Channel) -> RemoteDevice {
        let state = self.0.borrow();
        let Blocks { block_bytes, count, .. } = state.blocks;
        let settings = state.session.settings();
        let (address, nqn, id) = (state.session.address(), &settings.subsystem, settings.namespace);
        RemoteDevice {
            channel: channel.clone(),
            geometry: Geometry { block_bytes, blocks: count, volatile: false },
            name: format!("nvme+tcp://{address}/{nqn}?nsid={id}"),
        }
    }

    /// Sends, receives, lets time pass; the channel's next poll then gives what has come. True when there was
    /// anything to do.
    pub fn turn(&self, now: Nanos) -> bool {
        self.0.borrow_mut().turn(now)
    }

    /// When [`Remote::turn`] must be called at the latest, whatever the sockets say.
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
struct Queue<S: Sockets>(Remote<S>);

impl<S: Sockets> DeviceQueue for Queue<S> {
    fn open(&mut self, _media: &Media) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn close(&mut self, _file: FileId) {
        // The namespace is there as long as its session.
    }

    fn submit(&mut self, ticket: u32, _file: FileId, operation: Operation) {
        self.0.0.borrow_mut().begin(ticket, operation);
    }

    fn poll(&mut self, done: &mut Vec<(u32, Completed)>) {
        let mut state = self.0.0.borrow_mut();
        // What was submitted since the turn began goes out in it.
        state.exchange();
        state.in_flight -= state.finished.len();
        done.append(&mut state.finished);
    }

    fn in_flight(&self) -> usize {
        self.0.0.borrow().in_flight
    }
}

/// A namespace of blocks as a device. See the module's text.
pub struct RemoteDevice {
    channel: Channel,
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
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let operation = Operation::Read { offset: self.offset(at), buffer };
        Pending::ticket(self.channel.submit(FILE, operation))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let operation = Operation::Write { offset: self.offset(at), buffer };
        Pending::ticket(self.channel.submit(FILE, operation))
    }
    fn flush(&self) -> Pending {
        Pending::ticket(self.channel.submit(FILE, Operation::Flush))
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        if at.0.checked_add(blocks).is_none_or(|end| end > self.geometry.blocks) {
            return Pending::out_of_range(None);
        }
        let bytes = blocks * u64::from(self.geometry.block_bytes);
        Pending::ticket(self.channel.submit(FILE, Operation::Trim { offset: self.offset(at), bytes }))
    }
}
