//! The I/O thread of a [`crate::Client`]: executes commands of any thread on a session, and retries those that are safe to
//! retry.
//!
//! ```text
//!  callers ──Inbox (mutex, waker)──▶ backlog ──free slots──▶ Session ──responses──▶ ResponseFuture, its waker
//!                                       ▲  retry queue: busy, after a delay │
//!                                       └───────────────────────────────────┘ not executed, or only read
//! ```
//! Invariants: every response future resolves exactly once, also when the thread ends; a write with unknown outcome is
//! never retried; a command waits at most the command timeout for a connection. The inbox is unbounded: each caller that
//! awaits its response adds at most one command.

use crate::command::{Command, RemoteIterator, Response, Value};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::{ConnectionError, Error, SubmitError};
use crate::session::Session;
use crate::url::Url;
use octokv_base::{Key, Lba, Nanos};
use octokv_runtime::kernel::{now, spawn_thread};
use octokv_runtime::{CoreWaker, IdlePolicy, KernelSockets, Polling};
use octokv_wire::kv::StoreMode;
use octokv_wire::nvm::LbaRange;
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A command that owns its data, so that it can be sent more than once.
#[derive(Clone, Debug)]
pub(crate) enum OwnedCommand {
    Store { key: Key, value: Arc<[u8]>, mode: StoreMode },
    Retrieve { key: Key, limit_bytes: u32 },
    Delete { key: Key },
    Exist { key: Key },
    List { start: Key, limit_bytes: u32 },
    CreateIterator { lower: Key, upper: Key, reverse: bool, keys_only: bool },
    NextPairs { iterator: RemoteIterator, limit_bytes: u32, pairs_max: u32 },
    SeekIterator { iterator: RemoteIterator, key: Key },
    DestroyIterator { iterator: RemoteIterator },
    Flush,
    Read { range: LbaRange },
    Write { lba: Lba, data: Arc<[u8]>, force_unit_access: bool },
}

impl OwnedCommand {
    fn command(&self) -> Command<'_> {
        match self.clone() {
            OwnedCommand::Store { key, value, mode } => {
                Command::Store { key, value: Value::Shared(value), mode }
            }
            OwnedCommand::Retrieve { key, limit_bytes } => Command::Retrieve { key, limit_bytes },
            OwnedCommand::Delete { key } => Command::Delete { key },
            OwnedCommand::Exist { key } => Command::Exist { key },
            OwnedCommand::List { start, limit_bytes } => Command::List { start, limit_bytes },
            OwnedCommand::CreateIterator { lower, upper, reverse, keys_only } => {
                Command::CreateIterator { lower, upper, reverse, keys_only }
            }
            OwnedCommand::NextPairs { iterator, limit_bytes, pairs_max } => {
                Command::NextPairs { iterator, limit_bytes, pairs_max }
            }
            OwnedCommand::SeekIterator { iterator, key } => Command::SeekIterator { iterator, key },
            OwnedCommand::DestroyIterator { iterator } => Command::DestroyIterator { iterator },
            OwnedCommand::Flush => Command::Flush,
            OwnedCommand::Read { range } => Command::Read { range, buffer: None },
            OwnedCommand::Write { lba, data, force_unit_access } => {
                Command::Write { lba, data: Value::Shared(data), force_unit_access }
            }
        }
    }
}

enum ResponseState<T> {
    Waiting(Option<Waker>),
    Ready(T),
    Taken,
}

type SharedResponse<T> = Arc<Mutex<ResponseState<Result<T, Error>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Future of a response.
pub(crate) struct ResponseFuture<T>(SharedResponse<T>);

/// Sender of a response. Dropped without one, it resolves the future with [`Error::Closed`].
pub(crate) struct ResponseSender<T>(SharedResponse<T>);

pub(crate) fn response_channel<T>() -> (ResponseSender<T>, ResponseFuture<T>) {
    let shared = Arc::new(Mutex::new(ResponseState::Waiting(None)));
    (ResponseSender(Arc::clone(&shared)), ResponseFuture(shared))
}

impl<T> ResponseSender<T> {
    pub(crate) fn send(self, result: Result<T, Error>) {
        self.complete(result);
    }

    fn complete(&self, result: Result<T, Error>) {
        let mut slot = lock(&self.0);
        if let ResponseState::Waiting(waker) = &mut *slot {
            let waker = waker.take();
            *slot = ResponseState::Ready(result);
            drop(slot);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl<T> Drop for ResponseSender<T> {
    fn drop(&mut self) {
        self.complete(Err(Error::Closed));
    }
}

impl<T> Future for ResponseFuture<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.0);
        match std::mem::replace(&mut *slot, ResponseState::Taken) {
            ResponseState::Ready(result) => Poll::Ready(result),
            ResponseState::Waiting(_) => {
                *slot = ResponseState::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
            // A future must not be polled after it returned `Ready`.
            ResponseState::Taken => panic!("the response future was polled after completion"),
        }
    }
}

pub(crate) struct QueuedCommand {
    command: OwnedCommand,
    response_sender: ResponseSender<Response>,
    /// Set when the thread takes the command from the inbox.
    deadline: Nanos,
}

#[derive(Default)]
struct Inbox {
    commands: VecDeque<QueuedCommand>,
    closing: bool,
    /// Error of all commands after the thread has ended.
    ended: Option<Error>,
}

/// State shared by the thread and the callers.
pub(crate) struct ClientShared {
    inbox: Mutex<Inbox>,
    thread_waker: Arc<CoreWaker>,
}

impl ClientShared {
    /// Passes a command to the thread.
    pub(crate) fn submit(&self, command: OwnedCommand) -> ResponseFuture<Response> {
        let (response_sender, future) = response_channel();
        let mut inbox = lock(&self.inbox);
        if let Some(error) = inbox.ended.clone() {
            drop(inbox);
            response_sender.send(Err(error));
            return future;
        }
        inbox.commands.push_back(QueuedCommand { command, response_sender, deadline: Nanos::NEVER });
        drop(inbox);
        self.thread_waker.notify();
        future
    }

    /// Ends the thread after the commands that it has.
    pub(crate) fn close(&self) {
        lock(&self.inbox).closing = true;
        self.thread_waker.notify();
    }
}

fn os_error(error: &io::Error) -> Error {
    Error::Os(error.raw_os_error().unwrap_or(0))
}

/// Starts a thread that connects to `url`. The future resolves when it is connected or failed.
pub(crate) fn start(
    url: Url,
    config: ClientConfig,
) -> Result<(Arc<ClientShared>, ResponseFuture<ControllerInfo>), Error> {
    let waker = CoreWaker::new().map_err(|error| os_error(&error))?;
    let shared = Arc::new(ClientShared { inbox: Mutex::default(), thread_waker: waker });
    let (sender, future) = response_channel();
    let thread_shared = Arc::clone(&shared);
    spawn_thread("octokv-client", move || {
        let guard = EndGuard(Arc::clone(&thread_shared));
        match connect(&url, &config, &thread_shared.thread_waker) {
            Ok((session, idle, info)) => {
                sender.send(Ok(info));
                IoThread::new(session, idle, config, thread_shared).run();
            }
            Err(error) => {
                guard.end(error.clone());
                sender.send(Err(error));
            }
        }
    })
    .map_err(|error| os_error(&error))?;
    Ok((shared, future))
}

/// Fails all commands once the thread has ended, also by a panic.
struct EndGuard(Arc<ClientShared>);

impl EndGuard {
    fn end(&self, error: Error) {
        let mut inbox = lock(&self.0.inbox);
        inbox.ended.get_or_insert(error);
        let commands = std::mem::take(&mut inbox.commands);
        drop(inbox);
        drop(commands);
    }
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.end(Error::Closed);
    }
}

type ConnectedSession = (Session<KernelSockets>, IdlePolicy, ControllerInfo);

fn connect(url: &Url, config: &ClientConfig, waker: &Arc<CoreWaker>) -> Result<ConnectedSession, Error> {
    let unknown = || Error::UnknownHost(url.host.clone());
    let addresses = (url.host.as_str(), url.port).to_socket_addrs().map_err(|_| unknown())?;
    let mut last_error = unknown();
    for address in addresses {
        match connect_to(address, url, config, waker) {
            Ok(connected) => return Ok(connected),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

fn connect_to(
    address: SocketAddr,
    url: &Url,
    config: &ClientConfig,
    waker: &Arc<CoreWaker>,
) -> Result<ConnectedSession, Error> {
    let mut sockets = KernelSockets::new().map_err(|error| os_error(&error))?;
    let polling = Polling::Adaptive { spin: config.spin_time };
    let idle = IdlePolicy::new(polling, Arc::clone(waker), &mut sockets, None);
    let mut idle = idle.map_err(|error| os_error(&error))?;
    let config =
        ClientConfig { subsystem_nqn: url.subsystem.clone(), namespace: url.namespace, ..config.clone() };
    let mut session = Session::new(sockets, address, config, now());
    loop {
        waker.begin_iteration();
        let progress = session.poll(now(), |_, _| {});
        if let Some(error) = session.ended() {
            return Err(error);
        }
        if session.is_live() {
            let info = session.controller_info().cloned().unwrap_or_else(ControllerInfo::unknown);
            return Ok((session, idle, info));
        }
        idle.spin_or_sleep(progress, now(), false, session.next_deadline(), session.sockets_mut());
    }
}

/// Delay before a command is retried on a busy node.
const BUSY_RETRY_DELAY: Nanos = Nanos::from_millis(2);

struct IoThread {
    session: Session<KernelSockets>,
    idle: IdlePolicy,
    config: ClientConfig,
    shared: Arc<ClientShared>,
    backlog: VecDeque<QueuedCommand>,
    /// Commands that failed because the node was busy, and the times of their retries.
    retry_queue: VecDeque<(Nanos, QueuedCommand)>,
    /// Commands in flight, by token.
    in_flight: Slab<QueuedCommand>,
    completed: Vec<(u64, Result<Response, Error>)>,
    closing: bool,
}

impl IoThread {
    fn new(
        session: Session<KernelSockets>,
        idle: IdlePolicy,
        config: ClientConfig,
        shared: Arc<ClientShared>,
    ) -> IoThread {
        IoThread {
            session,
            idle,
            config,
            shared,
            backlog: VecDeque::new(),
            retry_queue: VecDeque::new(),
            in_flight: Slab::new(),
            completed: Vec::new(),
            closing: false,
        }
    }

    fn run(mut self) {
        loop {
            self.shared.thread_waker.begin_iteration();
            let now = now();
            self.session.begin_iteration(now);
            let mut progress = self.take_commands(now);
            progress |= self.submit();
            let completed = &mut self.completed;
            progress |= self.session.poll(now, |token, result| completed.push((token, result)));
            self.complete_or_retry(now);
            self.expire_backlog(now);
            if let Some(error) = self.session.ended() {
                let guard = EndGuard(Arc::clone(&self.shared));
                guard.end(error.clone());
                return self.fail_all(&error);
            }
            let all_submitted = self.backlog.is_empty() && self.retry_queue.is_empty();
            if self.closing && all_submitted && self.session.in_flight() == 0 {
                let completed = &mut self.completed;
                self.session.close(now, |token, result| completed.push((token, result)));
                self.complete_or_retry(now);
            }
            let deadline = self.next_deadline();
            self.idle.spin_or_sleep(progress, now, false, deadline, self.session.sockets_mut());
        }
    }

    fn take_commands(&mut self, now: Nanos) -> bool {
        while let Some((due, _)) = self.retry_queue.front()
            && *due <= now
        {
            self.backlog.extend(self.retry_queue.pop_front().map(|(_, queued)| queued));
        }
        let mut inbox = lock(&self.shared.inbox);
        self.closing = inbox.closing;
        let progress = !inbox.commands.is_empty();
        for mut queued in inbox.commands.drain(..) {
            queued.deadline = now + self.config.command_timeout;
            self.backlog.push_back(queued);
        }
        progress
    }

    fn submit(&mut self) -> bool {
        let mut progress = false;
        while self.session.free_slots() > 0
            && let Some(queued) = self.backlog.pop_front()
        {
            let slot = self.in_flight.vacant_entry();
            match self.session.submit(queued.command.command(), slot.key() as u64) {
                Ok(()) => {
                    slot.insert(queued);
                    progress = true;
                }
                Err(submit_error) => {
                    let SubmitError::Invalid(error) = submit_error else {
                        self.backlog.push_front(queued);
                        break;
                    };
                    queued.response_sender.send(Err(error));
                }
            }
        }
        progress
    }

    /// Completes commands, or queues those again that changed nothing.
    fn complete_or_retry(&mut self, now: Nanos) {
        for (token, result) in self.completed.drain(..) {
            // A token completes once: a second completion panics.
            let queued = self.in_flight.remove(token as usize);
            let in_time = queued.deadline > now;
            match result {
                Err(Error::Disconnected(_)) if in_time => self.backlog.push_front(queued),
                Err(Error::Busy) | Ok(Response::Retry { .. }) if in_time => {
                    self.retry_queue.push_back((now + BUSY_RETRY_DELAY, queued));
                }
                Ok(Response::Retry { .. }) => queued.response_sender.send(Err(Error::Busy)),
                result => queued.response_sender.send(result),
            }
        }
    }

    /// Fails commands that exceeded their deadline without a connection.
    fn expire_backlog(&mut self, now: Nanos) {
        while let Some(queued) = self.backlog.front()
            && queued.deadline <= now
        {
            let cause = self.session.last_error().unwrap_or(ConnectionError::TimedOut);
            let error = match cause {
                ConnectionError::TimedOut => Error::TimedOut,
                cause => Error::Disconnected(cause),
            };
            if let Some(queued) = self.backlog.pop_front() {
                queued.response_sender.send(Err(error));
            }
        }
    }

    fn fail_all(self, error: &Error) {
        let in_flight = self.in_flight.into_iter().map(|(_, queued)| queued);
        for queued in self
            .backlog
            .into_iter()
            .chain(self.retry_queue.into_iter().map(|(_, queued)| queued))
            .chain(in_flight)
        {
            queued.response_sender.send(Err(error.clone()));
        }
    }

    fn next_deadline(&self) -> Nanos {
        let retry_at = self.retry_queue.front().map_or(Nanos::NEVER, |(due, _)| *due);
        let expires_at = self.backlog.front().map_or(Nanos::NEVER, |queued| queued.deadline);
        self.session.next_deadline().min(retry_at).min(expires_at)
    }
}
