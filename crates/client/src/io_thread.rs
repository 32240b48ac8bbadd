//! The I/O thread of a [`crate::Client`]: takes jobs from any thread, runs a session, repeats what is
//! safe to repeat.
//!
//! ```text
//!  callers ──Inbox (mutex, doorbell)──▶ backlog ──room──▶ Session ──answers──▶ Promise, its waker
//!                                          ▲    busy: after a pause │
//!                                          └────────────────────────┘ not executed, or only read
//! ```
//! Invariants: every promise is kept exactly once, also when the thread ends; a write whose outcome is
//! unknown is never repeated; a job waits no longer than the command timeout for a connection.

use crate::command::{Answer, Command, Value};
use crate::config::Settings;
use crate::controller_init::Facts;
use crate::error::{Error, Lost};
use crate::session::{Rejected, Session};
use crate::url::Url;
use octokv_base::{Key, Lba, Nanos};
use octokv_runtime::kernel::{now, spawn_thread};
use octokv_runtime::{Doorbell, Idle, Polling, RealSockets};
use octokv_wire::kv::StoreMode;
use octokv_wire::nvm::Range;
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A caller's command, with everything it needs to be sent more than once.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Store { key: Key, value: Arc<[u8]>, mode: StoreMode },
    Retrieve { key: Key, limit_bytes: u32 },
    Delete { key: Key },
    Exist { key: Key },
    List { start: Key, limit_bytes: u32 },
    Flush,
    Read { range: Range },
    Write { lba: Lba, data: Arc<[u8]>, force_unit_access: bool },
}

impl Request {
    fn command(&self) -> Command<'_> {
        match self.clone() {
            Request::Store { key, value, mode } => Command::Store { key, value: Value::Shared(value), mode },
            Request::Retrieve { key, limit_bytes } => Command::Retrieve { key, limit_bytes },
            Request::Delete { key } => Command::Delete { key },
            Request::Exist { key } => Command::Exist { key },
            Request::List { start, limit_bytes } => Command::List { start, limit_bytes },
            Request::Flush => Command::Flush,
            Request::Read { range } => Command::Read { range, into: None },
            Request::Write { lba, data, force_unit_access } => {
                Command::Write { lba, data: Value::Shared(data), force_unit_access }
            }
        }
    }
}

enum Slot<T> {
    Waiting(Option<Waker>),
    Kept(T),
    Taken,
}

type Shelf<T> = Arc<Mutex<Slot<Result<T, Error>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The caller's end of an answer to come.
pub(crate) struct Promise<T>(Shelf<T>);

/// The thread's end: dropped without an answer it says [`Error::Closed`].
pub(crate) struct Reply<T>(Shelf<T>);

pub(crate) fn promise<T>() -> (Reply<T>, Promise<T>) {
    let shelf = Arc::new(Mutex::new(Slot::Waiting(None)));
    (Reply(Arc::clone(&shelf)), Promise(shelf))
}

impl<T> Reply<T> {
    pub(crate) fn keep(self, result: Result<T, Error>) {
        self.put(result);
    }

    fn put(&self, result: Result<T, Error>) {
        let mut slot = lock(&self.0);
        if let Slot::Waiting(waker) = &mut *slot {
            let waker = waker.take();
            *slot = Slot::Kept(result);
            drop(slot);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.put(Err(Error::Closed));
    }
}

impl<T> Future for Promise<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.0);
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Kept(result) => Poll::Ready(result),
            Slot::Waiting(_) => {
                *slot = Slot::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
            // Only a caller that polls a finished future again can get here.
            Slot::Taken => panic!("a promise is kept once"),
        }
    }
}

pub(crate) struct Job {
    request: Request,
    reply: Reply<Answer>,
    /// Set when the thread first sees the job.
    deadline: Nanos,
}

#[derive(Default)]
struct Inbox {
    jobs: VecDeque<Job>,
    closing: bool,
    /// Why the thread takes no more jobs.
    ended: Option<Error>,
}

/// What the thread and the callers share.
pub(crate) struct Shared {
    inbox: Mutex<Inbox>,
    doorbell: Arc<Doorbell>,
}

impl Shared {
    /// Hands a job to the thread.
    pub(crate) fn send(&self, request: Request) -> Promise<Answer> {
        let (reply, promise) = promise();
        let mut inbox = lock(&self.inbox);
        if let Some(error) = inbox.ended.clone() {
            drop(inbox);
            reply.keep(Err(error));
            return promise;
        }
        inbox.jobs.push_back(Job { request, reply, deadline: Nanos::NEVER });
        drop(inbox);
        self.doorbell.ring();
        promise
    }

    /// Lets the thread end when it has done what it has.
    pub(crate) fn close(&self) {
        lock(&self.inbox).closing = true;
        self.doorbell.ring();
    }
}

fn local(error: &io::Error) -> Error {
    Error::Local(error.raw_os_error().unwrap_or(0))
}

/// Starts a thread that connects to `url`. The promise is kept when it is connected, or cannot be.
pub(crate) fn start(url: Url, settings: Settings) -> Result<(Arc<Shared>, Promise<Facts>), Error> {
    let doorbell = Doorbell::new().map_err(|error| local(&error))?;
    let shared = Arc::new(Shared { inbox: Mutex::default(), doorbell });
    let (reply, promise) = promise();
    let ours = Arc::clone(&shared);
    spawn_thread("octokv-client", move || {
        let guard = EndGuard(Arc::clone(&ours));
        match connect(&url, &settings, &ours.doorbell) {
            Ok((session, idle, facts)) => {
                reply.keep(Ok(facts));
                Thread::new(session, idle, settings, ours).run();
            }
            Err(error) => {
                guard.end(error.clone());
                reply.keep(Err(error));
            }
        }
    })
    .map_err(|error| local(&error))?;
    Ok((shared, promise))
}

/// Refuses jobs once the thread has ended, for whatever reason.
struct EndGuard(Arc<Shared>);

impl EndGuard {
    fn end(&self, error: Error) {
        let mut inbox = lock(&self.0.inbox);
        inbox.ended.get_or_insert(error);
        let jobs = std::mem::take(&mut inbox.jobs);
        drop(inbox);
        drop(jobs);
    }
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.end(Error::Closed);
    }
}

type Connected = (Session<RealSockets>, Idle, Facts);

fn connect(url: &Url, settings: &Settings, doorbell: &Arc<Doorbell>) -> Result<Connected, Error> {
    let unknown = || Error::UnknownHost(url.host.clone());
    let addresses = (url.host.as_str(), url.port).to_socket_addrs().map_err(|_| unknown())?;
    let mut last = unknown();
    for address in addresses {
        match connect_to(address, url, settings, doorbell) {
            Ok(connected) => return Ok(connected),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_to(
    address: SocketAddr,
    url: &Url,
    settings: &Settings,
    doorbell: &Arc<Doorbell>,
) -> Result<Connected, Error> {
    let mut sockets = RealSockets::new().map_err(|error| local(&error))?;
    let polling = Polling::Adaptive { spin: settings.spin };
    let idle = Idle::new(polling, Arc::clone(doorbell), &mut sockets, None);
    let mut idle = idle.map_err(|error| local(&error))?;
    let settings =
        Settings { subsystem: url.subsystem.clone(), namespace: url.namespace, ..settings.clone() };
    let mut session = Session::new(sockets, address, settings, now());
    loop {
        doorbell.begin_turn();
        let busy = session.poll(now(), |_, _| {});
        if let Some(error) = session.ended() {
            return Err(error);
        }
        if session.is_live() {
            let facts = session.facts().cloned().unwrap_or_else(Facts::unknown);
            return Ok((session, idle, facts));
        }
        idle.rest(busy, now(), false, session.next_deadline(), session.sockets_mut());
    }
}

/// How long a job that found the node busy waits before it is sent again.
const BUSY_PAUSE: Nanos = Nanos::from_millis(2);

struct Thread {
    session: Session<RealSockets>,
    idle: Idle,
    settings: Settings,
    shared: Arc<Shared>,
    backlog: VecDeque<Job>,
    /// Jobs that found the node busy, and when to send them again.
    paused: VecDeque<(Nanos, Job)>,
    /// Jobs in flight, by token.
    flying: Vec<Option<Job>>,
    tokens: Vec<usize>,
    finished: Vec<(u64, Result<Answer, Error>)>,
    closing: bool,
}

impl Thread {
    fn new(session: Session<RealSockets>, idle: Idle, settings: Settings, shared: Arc<Shared>) -> Thread {
        Thread {
            session,
            idle,
            settings,
            shared,
            backlog: VecDeque::new(),
            paused: VecDeque::new(),
            flying: Vec::new(),
            tokens: Vec::new(),
            finished: Vec::new(),
            closing: false,
        }
    }

    fn run(mut self) {
        loop {
            self.shared.doorbell.begin_turn();
            let now = now();
            let mut busy = self.take_jobs(now);
            busy |= self.submit();
            let finished = &mut self.finished;
            busy |= self.session.poll(now, |token, result| finished.push((token, result)));
            self.settle(now);
            self.expire(now);
            if let Some(error) = self.session.ended() {
                let guard = EndGuard(Arc::clone(&self.shared));
                guard.end(error.clone());
                return self.fail_all(&error);
            }
            let nothing_left = self.backlog.is_empty() && self.paused.is_empty();
            if self.closing && nothing_left && self.session.in_flight() == 0 {
                let finished = &mut self.finished;
                self.session.close(now, |token, result| finished.push((token, result)));
                self.settle(now);
            }
            let deadline = self.next_deadline();
            self.idle.rest(busy, now, false, deadline, self.session.sockets_mut());
        }
    }

    fn take_jobs(&mut self, now: Nanos) -> bool {
        while let Some((due, _)) = self.paused.front()
            && *due <= now
        {
            self.backlog.extend(self.paused.pop_front().map(|(_, job)| job));
        }
        let mut inbox = lock(&self.shared.inbox);
        self.closing = inbox.closing;
        let busy = !inbox.jobs.is_empty();
        for mut job in inbox.jobs.drain(..) {
            job.deadline = now + self.settings.command_timeout;
            self.backlog.push_back(job);
        }
        busy
    }

    fn submit(&mut self) -> bool {
        let mut busy = false;
        while self.session.room() > 0
            && let Some(job) = self.backlog.pop_front()
        {
            let token = self.tokens.pop().unwrap_or_else(|| {
                self.flying.push(None);
                self.flying.len() - 1
            });
            match self.session.submit(job.request.command(), token as u64) {
                Ok(()) => {
                    self.flying[token] = Some(job);
                    busy = true;
                }
                Err(rejected) => {
                    self.tokens.push(token);
                    let Rejected::Invalid(error) = rejected else {
                        self.backlog.push_front(job);
                        break;
                    };
                    job.reply.keep(Err(error));
                }
            }
        }
        busy
    }

    /// Keeps promises, or lines jobs up again that changed nothing.
    fn settle(&mut self, now: Nanos) {
        for (token, result) in self.finished.drain(..) {
            let job = self.flying[token as usize].take().expect("a token is answered once");
            self.tokens.push(token as usize);
            let in_time = job.deadline > now;
            match result {
                Err(Error::Disconnected(_)) if in_time => self.backlog.push_front(job),
                Err(Error::Busy) | Ok(Answer::Again { .. }) if in_time => {
                    self.paused.push_back((now + BUSY_PAUSE, job));
                }
                Ok(Answer::Again { .. }) => job.reply.keep(Err(Error::Busy)),
                result => job.reply.keep(result),
            }
        }
    }

    /// Gives up jobs that waited too long for a connection.
    fn expire(&mut self, now: Nanos) {
        while let Some(job) = self.backlog.front()
            && job.deadline <= now
        {
            let why = self.session.last_loss().unwrap_or(Lost::TimedOut);
            let error = match why {
                Lost::TimedOut => Error::TimedOut,
                why => Error::Disconnected(why),
            };
            if let Some(job) = self.backlog.pop_front() {
                job.reply.keep(Err(error));
            }
        }
    }

    fn fail_all(self, error: &Error) {
        let flying = self.flying.into_iter().flatten();
        for job in self.backlog.into_iter().chain(self.paused.into_iter().map(|(_, job)| job)).chain(flying) {
            job.reply.keep(Err(error.clone()));
        }
    }

    fn next_deadline(&self) -> Nanos {
        let paused = self.paused.front().map_or(Nanos::NEVER, |(due, _)| *due);
        let waiting = self.backlog.front().map_or(Nanos::NEVER, |job| job.deadline);
        self.session.next_deadline().min(paused).min(waiting)
    }
}
