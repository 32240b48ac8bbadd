//! One OS thread of the generator: a session with one queue per thread of the plan, and its streams.
//!
//! ```text
//!            submit                    answer
//!  waiting ──────────▶ in flight ───────────────▶ waiting      (threads × depth streams)
//! ```
//! A turn submits for every waiting stream, then polls once. Latency is from just before the submission
//! to the moment the answer is handed over; nothing is corrected or left out.
//! Invariants: each stream has at most one operation in flight; no operation allocates (keys longer than
//! 16 bytes do, in [`Key`]).

use crate::data::{self, Values};
use crate::plan::{Plan, Workload};
use crate::run::{Error, Shared};
use crate::{Clock, report::Tally};
use octokv_base::{Buffer, Key, Nanos, Random};
use octokv_client::{Answer, Command, Rejected, Session, Settings, StoreMode, Value};
use octokv_runtime::{Doorbell, Idle, Polling, RealSockets, Sockets};
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
    index: u64,
    started: Nanos,
}

struct Worker<'a, S: Sockets> {
    plan: &'a Plan,
    shared: &'a Shared,
    session: Session<S>,
    values: &'a Values,
    random: Random,
    streams: Vec<Stream>,
    waiting: Vec<u32>,
    tally: Tally,
}

/// Drives `threads` connections through one workload. `number` tells this worker from the others.
pub(crate) fn drive(shared: &Shared, number: usize, threads: usize) -> Result<Tally, Error> {
    let session = join_in(shared, threads);
    // Whether or not this one is connected, the others must not wait for it.
    shared.failed.fetch_or(session.is_err(), Ordering::AcqRel);
    shared.connected.fetch_add(1, Ordering::AcqRel);
    let mut session = session?;
    let now = shared.host.now;
    while shared.connected.load(Ordering::Acquire) < shared.workers {
        session.poll(now(), |_, _| {});
        std::hint::spin_loop();
    }
    if shared.failed.load(Ordering::Acquire) {
        disconnect(session, now);
        return Ok(Tally::new(now()));
    }
    let mut idle = Idle::new(shared.polling, Doorbell::silent(), session.sockets_mut(), None)
        .map_err(|error| Error::Thread(error.raw_os_error().unwrap_or_default()))?;
    let count = threads * shared.plan.depth;
    let begin = now();
    let mut worker = Worker {
        plan: &shared.plan,
        shared,
        session,
        values: &shared.values,
        random: shared.random(number),
        streams: vec![Stream { index: 0, started: begin }; count],
        waiting: (0..count as u32).rev().collect(),
        tally: Tally::new(begin + shared.plan.warm_up),
    };
    let until = shared.until(begin);
    loop {
        let over = worker.submit_all(now(), until)?;
        if over && worker.waiting.len() == count {
            break;
        }
        let busy = worker.poll(now)?;
        let deadline = worker.session.next_deadline().min(until);
        idle.rest(busy, now(), deadline, worker.session.sockets_mut());
    }
    let Worker { session, tally, .. } = worker;
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
    /// Puts every waiting stream on its way. True when the workload has no more operations.
    fn submit_all(&mut self, now: Nanos, until: Nanos) -> Result<bool, Error> {
        if now >= until || self.shared.failed.load(Ordering::Relaxed) {
            return Ok(true);
        }
        while let Some(&stream) = self.waiting.last() {
            let Some(index) = self.shared.next_index(&mut self.random) else { return Ok(true) };
            self.streams[stream as usize] = Stream { index, started: now };
            let command = self.command(index);
            match self.session.submit(command, u64::from(stream)) {
                Ok(()) => self.waiting.pop(),
                Err(Rejected::Invalid(error)) => return Err(self.failed(index, error)),
                // There was room for every stream when the session went live, and it never reconnects.
                Err(Rejected::Full | Rejected::NotConnected | Rejected::Over) => {
                    let error = self.session.ended().unwrap_or(octokv_client::Error::Closed);
                    return Err(Error::Connect(error));
                }
            };
        }
        Ok(false)
    }

    fn command(&mut self, index: u64) -> Command<'static> {
        let key = data::key(index, self.plan.key_bytes);
        match self.shared.workload {
            Workload::FillSequential | Workload::FillRandom | Workload::Overwrite => {
                let to = self.plan.value_bytes;
                // The pool has room for every stream; where a plan is larger, memory is.
                let mut buffer = self.session.pool().take(to).unwrap_or_else(|| Buffer::zeroed(to));
                self.values.make(index, &mut buffer[..to]);
                Command::Store { key, value: Value::Buffer { buffer, from: 0, to }, mode: StoreMode::Upsert }
            }
            Workload::ReadRandom => Command::Retrieve { key, limit_bytes: u32::MAX },
            Workload::DeleteRandom => Command::Delete { key },
        }
    }

    fn poll(&mut self, clock: Clock) -> Result<bool, Error> {
        let Worker { plan, shared, session, values, streams, waiting, tally, .. } = self;
        let mut failure = None;
        let mut done = 0;
        let busy = session.poll(clock(), |token, answer| {
            let Stream { index, started } = streams[token as usize];
            waiting.push(token as u32);
            done += 1;
            let now = clock();
            match answer {
                Ok(Answer::Value { data, full_bytes }) => {
                    let bytes = plan.value_bytes;
                    let whole = full_bytes as usize == bytes && data.len() == bytes;
                    if plan.verify && !(whole && values.is_right(index, &data)) {
                        let have_bytes = full_bytes as usize;
                        failure = Some(Error::Wrong { key: data::key(index, plan.key_bytes), have_bytes });
                    }
                    tally.answered(started, now, true);
                }
                Ok(Answer::NotFound) => tally.answered(started, now, false),
                Ok(_) => tally.answered(started, now, true),
                Err(error) => {
                    failure = Some(failed(shared.workload, data::key(index, plan.key_bytes), error))
                }
            }
        });
        if done > 0 {
            shared.done.fetch_add(done, Ordering::Relaxed);
        }
        match failure {
            Some(error) => {
                shared.failed.store(true, Ordering::Release);
                Err(error)
            }
            None => Ok(busy),
        }
    }

    fn failed(&self, index: u64, error: octokv_client::Error) -> Error {
        self.shared.failed.store(true, Ordering::Release);
        failed(self.shared.workload, data::key(index, self.plan.key_bytes), error)
    }
}

fn failed(workload: Workload, key: Key, error: octokv_client::Error) -> Error {
    Error::Command { workload, key, error }
}

/// How a worker rests when nothing comes: spins a little, then sleeps.
pub const DEFAULT_POLLING: Polling = Polling::Adaptive { spin: Nanos::from_micros(50) };
