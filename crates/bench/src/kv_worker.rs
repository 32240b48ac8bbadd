//! One OS thread of the generator: a session with one queue per thread of the plan, and its streams.
//!
//! ```text
//!            submit                    answer
//!  waiting ──────────▶ in flight ───────────────▶ waiting      (threads × depth streams)
//!                          ▲          │ of the read of a read-modify-write
//!                          └─ writing ◀
//! ```
//! A turn submits for every waiting stream, with a rate only what is due, then polls once. Latency is from just before
//! the submission, with a rate from when that was meant to be ([`crate::pace`]), to the moment the answer is handed
//! over; nothing is corrected or left out.
//! Invariants: each stream has at most one operation in flight; no operation allocates (keys longer than
//! 16 bytes do, in [`Key`]).

use crate::Clock;
use crate::arrival_schedule::Pace;
use crate::op_generator::{Chooser, Operation};
use crate::recorder::{Answered, Tally};
use crate::runner::{Error, Shared};
use crate::workload::{Action, Workload};
use octokv_base::{Buffer, Key, Nanos};
use octokv_client::{Answer, Command, Rejected, Session, Settings, StoreMode, Value};
use octokv_runtime::{Doorbell, Idle, Polling, RealSockets, Sockets};
use octokv_wire::kv::{LIST_HEADER_BYTES, UncheckedList, list_entry_bytes};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// How long one wait for news of a connection lasts at most.
const PATIENCE: Nanos = Nanos::from_millis(5);

/// A live session, or why there is none.
///
/// # Errors
/// What the session ended with, or what the machine refused.
pub fn connect(
    address: SocketAddr,
    settings: Settings,
    now: Clock,
) -> Result<Session<RealSockets>, octokv_client::Error> {
    let sockets = RealSockets::new()
        .map_err(|error| octokv_client::Error::Local(error.raw_os_error().unwrap_or_default()))?;
    let mut session = Session::new(sockets, address, settings, now());
    loop {
        let busy = session.poll(now(), |_, _| {});
        if let Some(error) = session.ended() {
            return Err(error);
        }
        if session.is_live() {
            return Ok(session);
        }
        if !busy {
            let wait = session.next_deadline().since(now()).min(PATIENCE);
            session.sockets_mut().wait(wait);
        }
    }
}

/// Ends a session in good order.
pub fn disconnect(mut session: Session<RealSockets>, now: Clock) {
    session.close(now(), |_, _| {});
    while session.ended().is_none() {
        if !session.poll(now(), |_, _| {}) {
            let wait = session.next_deadline().since(now()).min(PATIENCE);
            session.sockets_mut().wait(wait);
        }
    }
}

#[derive(Clone, Copy)]
struct Stream {
    operation: Operation,
    started: Nanos,
    /// What the read of a read-modify-write came to.
    read: Option<Outcome>,
}

/// What an answer says.
#[derive(Clone, Copy)]
struct Outcome {
    found: bool,
    value_bytes: u64,
    keys_listed: u64,
}

struct Worker<'a, S: Sockets> {
    shared: &'a Shared,
    session: Session<S>,
    chooser: Chooser,
    pace: Option<Pace>,
    streams: Vec<Stream>,
    waiting: Vec<u32>,
    /// Streams that have read what they are to store again.
    writing: Vec<u32>,
    tally: Tally,
}

/// Drives `threads` connections through one workload. `number` tells this worker from the others.
pub(crate) fn drive(shared: &Shared, number: usize, threads: usize) -> Result<Tally, Error> {
    let session = join_in(shared, threads);
    // Whether or not this one is connected, the others must not wait for it.
    shared.crew.failed.fetch_or(session.is_err(), Ordering::AcqRel);
    shared.crew.connected.fetch_add(1, Ordering::AcqRel);
    let mut session = session?;
    let now = shared.host.now;
    while shared.crew.connected.load(Ordering::Acquire) < shared.crew.workers {
        session.poll(now(), |_, _| {});
        std::hint::spin_loop();
    }
    if shared.crew.failed.load(Ordering::Acquire) {
        disconnect(session, now);
        return Ok(Tally::new(now()));
    }
    let mut idle = Idle::new(shared.polling, Doorbell::silent(), session.sockets_mut(), None)
        .map_err(|error| Error::Thread(error.raw_os_error().unwrap_or_default()))?;
    let count = threads * shared.plan.depth;
    let begin = now();
    let idle_operation = Operation { action: Action::Read, index: 0, list_keys: 0 };
    let mut worker = Worker {
        shared,
        session,
        chooser: shared.chooser(number),
        pace: shared.plan.rate.map(|rate| Pace::new(rate, number, shared.workers, begin)),
        streams: vec![Stream { operation: idle_operation, started: begin, read: None }; count],
        waiting: (0..count as u32).rev().collect(),
        writing: Vec::with_capacity(count),
        tally: Tally::new(begin + shared.plan.warm_up),
    };
    let until = shared.until(begin);
    loop {
        let over = worker.submit_all(now(), until)?;
        if over && worker.waiting.len() == count {
            break;
        }
        let busy = worker.poll(now)?;
        let deadline = worker
            .session
            .next_deadline()
            .min(if over { Nanos::NEVER } else { until })
            .min(worker.next_start());
        idle.rest(busy, now(), false, deadline, worker.session.sockets_mut());
    }
    let Worker { session, mut tally, pace, .. } = worker;
    if let Some(pace) = pace {
        tally.ended_behind(pace.backlog(until));
    }
    disconnect(session, now);
    Ok(tally)
}

fn join_in(shared: &Shared, threads: usize) -> Result<Session<RealSockets>, Error> {
    let queues = threads as u16;
    let settings = Settings { queues, depth: shared.plan.depth as u16, ..shared.client.clone() };
    let session = connect(shared.address, settings, shared.host.now).map_err(Error::Connect)?;
    let granted = session.facts().map_or(0, |facts| facts.queues);
    if granted < queues {
        return Err(Error::Threads { wanted: threads, granted: usize::from(granted) });
    }
    if session.room() < threads * shared.plan.depth {
        let granted = session.room() / threads;
        return Err(Error::Depth { wanted: shared.plan.depth, granted });
    }
    Ok(session)
}

impl<S: Sockets> Worker<'_, S> {
    /// Puts every waiting stream on its way, with a rate those that are due. True when the workload has no more
    /// operations.
    fn submit_all(&mut self, now: Nanos, until: Nanos) -> Result<bool, Error> {
        // These have begun long ago.
        while let Some(&stream) = self.writing.last() {
            self.submit(stream)?;
            self.writing.pop();
        }
        if now >= until || self.shared.crew.failed.load(Ordering::Relaxed) {
            return Ok(true);
        }
        while let Some(&stream) = self.waiting.last() {
            let started = self.pace.map_or(now, |pace| pace.next());
            if started > now {
                return Ok(false);
            }
            let Some(operation) = self.shared.next_operation(&mut self.chooser) else { return Ok(true) };
            if let Some(pace) = &mut self.pace {
                pace.take(now);
            }
            self.streams[stream as usize] = Stream { operation, started, read: None };
            self.submit(stream)?;
            self.waiting.pop();
        }
        Ok(false)
    }

    /// When the next operation is to begin, where one could.
    fn next_start(&self) -> Nanos {
        match self.pace {
            Some(pace) if !self.waiting.is_empty() => pace.next(),
            _ => Nanos::NEVER,
        }
    }

    fn submit(&mut self, stream: u32) -> Result<(), Error> {
        let Stream { operation, read, .. } = self.streams[stream as usize];
        let command = self.command(operation, read.is_some());
        match self.session.submit(command, u64::from(stream)) {
            Ok(()) => Ok(()),
            Err(Rejected::Invalid(error)) => {
                self.shared.crew.failed.store(true, Ordering::Release);
                let key = self.shared.plan.key(operation.index);
                Err(failed(self.shared.workload, key, error))
            }
            // There was room for every stream when the session went live, and it never reconnects.
            Err(Rejected::Full | Rejected::NotConnected | Rejected::Over) => {
                let error = self.session.ended().unwrap_or(octokv_client::Error::Closed);
                Err(Error::Connect(error))
            }
        }
    }

    fn command(&mut self, operation: Operation, has_read: bool) -> Command<'static> {
        let (Operation { action, index, list_keys }, plan) = (operation, &self.shared.plan);
        let key = plan.key(index);
        // The room that a host has for a value; a longer answer than the plan has is told by its length.
        let limit_bytes = plan.value_sizes.most() as u32;
        match action {
            Action::ReadModifyWrite if !has_read => Command::Retrieve { key, limit_bytes },
            Action::Store | Action::Insert | Action::ReadModifyWrite => {
                let to = plan.value_bytes(index);
                // The pool has room for every stream; where a plan is larger, memory is.
                let mut buffer = self.session.pool().take(to).unwrap_or_else(|| Buffer::zeroed(to));
                self.shared.values.make(index, &mut buffer[..to]);
                Command::Store { key, value: Value::Buffer { buffer, from: 0, to }, mode: StoreMode::Upsert }
            }
            Action::Read => Command::Retrieve { key, limit_bytes },
            Action::ReadMissing => Command::Retrieve { key: plan.missing_key(index), limit_bytes },
            Action::Delete => Command::Delete { key },
            Action::List => {
                let entries = list_keys as usize * list_entry_bytes(plan.key_sizes.most());
                Command::List { start: key, limit_bytes: (LIST_HEADER_BYTES + entries) as u32 }
            }
        }
    }

    fn poll(&mut self, clock: Clock) -> Result<bool, Error> {
        let Worker { shared, session, streams, waiting, writing, tally, .. } = self;
        let mut failure = None;
        let mut done = 0;
        let busy = session.poll(clock(), |token, answer| {
            let stream = &mut streams[token as usize];
            let outcome = match outcome(shared, stream.operation, answer) {
                Ok(outcome) => outcome,
                Err(error) => {
                    waiting.push(token as u32);
                    return failure = Some(error);
                }
            };
            if stream.operation.action == Action::ReadModifyWrite && stream.read.is_none() {
                stream.read = Some(outcome);
                return writing.push(token as u32);
            }
            waiting.push(token as u32);
            done += 1;
            let read_bytes = stream.read.map_or(0, |read| read.value_bytes);
            tally.answered(Answered {
                started: stream.started,
                now: clock(),
                found: stream.read.unwrap_or(outcome).found,
                value_bytes: outcome.value_bytes + read_bytes,
                keys_listed: outcome.keys_listed,
            });
        });
        if done > 0 {
            shared.done.fetch_add(done, Ordering::Relaxed);
        }
        match failure {
            Some(error) => {
                shared.crew.failed.store(true, Ordering::Release);
                Err(error)
            }
            None => Ok(busy),
        }
    }
}

/// What an answer says, held against what it may say.
#[inline]
fn outcome(
    shared: &Shared,
    operation: Operation,
    answer: Result<Answer, octokv_client::Error>,
) -> Result<Outcome, Error> {
    let (Operation { action, index, .. }, plan) = (operation, &shared.plan);
    let outcome = |found, value_bytes| Ok(Outcome { found, value_bytes, keys_listed: 0 });
    match answer {
        Ok(Answer::Value { data, full_bytes }) => {
            let bytes = plan.value_bytes(index);
            let whole = full_bytes as usize == bytes && data.len() == bytes;
            let may_be = action != Action::ReadMissing && whole;
            if plan.verify && !(may_be && shared.values.is_right(index, &data)) {
                let missing = action == Action::ReadMissing;
                let key = if missing { plan.missing_key(index) } else { plan.key(index) };
                return Err(Error::Wrong { key, have_bytes: full_bytes as usize });
            }
            outcome(true, data.len() as u64)
        }
        Ok(Answer::NotFound) => outcome(false, 0),
        Ok(Answer::Stored) => {
            if action == Action::Insert {
                shared.keys.added(index);
            }
            outcome(true, plan.value_bytes(index) as u64)
        }
        Ok(Answer::Keys { list }) => {
            let from = plan.key(index);
            let Ok(keys) = UncheckedList(&list).check() else { return Err(Error::List { from }) };
            let found = keys.keys().next() == Some(from.as_bytes());
            Ok(Outcome { found, value_bytes: 0, keys_listed: u64::from(keys.count()) })
        }
        Ok(_) => outcome(true, 0),
        Err(error) => Err(failed(shared.workload, plan.key(index), error)),
    }
}

fn failed(workload: Workload, key: Key, error: octokv_client::Error) -> Error {
    Error::Command { workload, key, error }
}

/// How a worker rests when nothing comes: spins a little, then sleeps.
pub const DEFAULT_POLLING: Polling = Polling::Adaptive { spin: Nanos::from_micros(50) };
