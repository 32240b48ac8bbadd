//! One OS thread of the generator against a server that speaks RESP: a connection per thread of the plan.
//!
//! What [`crate::worker`] is for a node: the same choice of operations, the same values, the same clock, the same
//! sockets and the same rest, so that what differs is the server. A connection has up to `depth` requests on their
//! way; replies come in their order. An update is a SET of the whole value, a delete a DEL.
//! Invariants: each stream has at most one operation in flight; every value that is read is compared.

use crate::arrival_schedule::Pace;
use crate::baselines::resp::{self, Decoder, Fault, Reply};
use crate::op_generator::{Chooser, Operation};
use crate::recorder::{Answered, Tally};
use crate::runner::{Error, Shared};
use crate::workload::Action;
use octokv_base::{Key, Nanos};
use octokv_runtime::{Doorbell, Idle, RealSockets, Received, Sent, SocketId, Sockets};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::Ordering;

struct Stream {
    operation: Operation,
    started: Nanos,
    /// Of a read-modify-write: value bytes that were read, and whether the key was there.
    read: Option<(u64, bool)>,
}

struct Connection {
    socket: SocketId,
    /// Requests, of which so many bytes are sent.
    out: Vec<u8>,
    sent: usize,
    /// Streams that wait for replies, in order.
    in_flight: VecDeque<u32>,
    decoder: Decoder,
}

struct Worker<'a> {
    shared: &'a Shared,
    sockets: RealSockets,
    connections: Vec<Connection>,
    chooser: Chooser,
    pace: Option<Pace>,
    streams: Vec<Stream>,
    waiting: Vec<u32>,
    tally: Tally,
    ready: Vec<SocketId>,
}

/// Drives `threads` connections through one workload. `number` tells this worker from the others.
pub(crate) fn drive(shared: &Shared, number: usize, threads: usize) -> Result<Tally, Error> {
    let begun = begin(shared, number, threads);
    shared.crew.failed.fetch_or(begun.is_err(), Ordering::AcqRel);
    shared.crew.connected.fetch_add(1, Ordering::AcqRel);
    let mut worker = begun?;
    while shared.crew.connected.load(Ordering::Acquire) < shared.crew.workers {
        std::hint::spin_loop();
    }
    let ended = worker.run(number);
    shared.crew.failed.fetch_or(ended.is_err(), Ordering::AcqRel);
    ended?;
    Ok(worker.tally)
}

fn begin(shared: &Shared, number: usize, threads: usize) -> Result<Worker<'_>, Error> {
    let local = |error: std::io::Error| Error::Thread(error.raw_os_error().unwrap_or_default());
    let mut sockets = RealSockets::new().map_err(local)?;
    let connect = |_| {
        let socket = sockets.connect(shared.address)?;
        let (out, in_flight) = (Vec::new(), VecDeque::with_capacity(shared.plan.depth));
        Ok(Connection { socket, out, sent: 0, in_flight, decoder: Decoder::default() })
    };
    let connections = (0..threads).map(connect).collect::<Result<_, _>>().map_err(local)?;
    let count = threads * shared.plan.depth;
    let idle = Operation { action: Action::Read, index: 0, list_keys: 0 };
    let stream = |_| Stream { operation: idle, started: Nanos::ZERO, read: None };
    Ok(Worker {
        shared,
        sockets,
        connections,
        chooser: shared.chooser(number),
        pace: None,
        streams: (0..count).map(stream).collect(),
        waiting: (0..count as u32).rev().collect(),
        tally: Tally::new(Nanos::ZERO),
        ready: Vec::with_capacity(threads),
    })
}

impl Worker<'_> {
    fn run(&mut self, number: usize) -> Result<(), Error> {
        let (shared, now) = (self.shared, self.shared.host.now);
        let mut idle = Idle::new(shared.polling, Doorbell::silent(), &mut self.sockets, None)
            .map_err(|error| Error::Thread(error.raw_os_error().unwrap_or_default()))?;
        let begin = now();
        self.pace = shared.plan.rate.map(|rate| Pace::new(rate, number, shared.workers, begin));
        self.tally = Tally::new(begin + shared.plan.warm_up);
        let until = shared.until(begin);
        loop {
            let over = self.submit_all(now(), until);
            if over && self.waiting.len() == self.streams.len() {
                break;
            }
            self.send_all()?;
            let busy = self.poll()?;
            let next_start = match self.pace {
                Some(pace) if !self.waiting.is_empty() => pace.next(),
                _ => Nanos::NEVER,
            };
            let until = if over { Nanos::NEVER } else { until };
            idle.rest(busy, now(), false, until.min(next_start), &mut self.sockets);
        }
        if let Some(pace) = self.pace {
            self.tally.ended_behind(pace.backlog(until));
        }
        Ok(())
    }

    /// Makes requests for every waiting stream, with a rate those that are due. True when there are no more operations.
    fn submit_all(&mut self, now: Nanos, until: Nanos) -> bool {
        if now >= until || self.shared.crew.failed.load(Ordering::Relaxed) {
            return true;
        }
        while let Some(&stream) = self.waiting.last() {
            let started = self.pace.map_or(now, |pace| pace.next());
            if started > now {
                return false;
            }
            let Some(operation) = self.shared.next_operation(&mut self.chooser) else { return true };
            if let Some(pace) = &mut self.pace {
                pace.take(now);
            }
            self.streams[stream as usize] = Stream { operation, started, read: None };
            self.request(stream);
            self.waiting.pop();
        }
        false
    }

    /// Adds the next request of a stream to its connection.
    fn request(&mut self, stream: u32) {
        let (shared, plan) = (self.shared, &self.shared.plan);
        let Stream { operation: Operation { action, index, .. }, read, .. } = &self.streams[stream as usize];
        let connection = &mut self.connections[stream as usize / plan.depth];
        let (out, key) = (&mut connection.out, key_of(shared, *action, *index));
        let key = key.as_bytes();
        match action {
            Action::Read | Action::ReadMissing => resp::get(out, key),
            Action::ReadModifyWrite if read.is_none() => resp::get(out, key),
            Action::Store | Action::Insert | Action::ReadModifyWrite => {
                resp::set(out, key, plan.value_bytes(*index), |value| shared.values.make(*index, value));
            }
            Action::Delete => resp::delete(out, key),
            Action::List => unreachable!("a plan with lists is refused before"),
        }
        connection.in_flight.push_back(stream);
    }

    fn send_all(&mut self) -> Result<(), Error> {
        for connection in self.connections.iter_mut().filter(|connection| !connection.out.is_empty()) {
            while connection.sent < connection.out.len() {
                let rest = IoSlice::new(&connection.out[connection.sent..]);
                match self.sockets.send(connection.socket, &[rest]) {
                    Sent::Bytes(bytes) => connection.sent += bytes,
                    Sent::Full => break,
                    Sent::Broken => return Err(closed(self.shared)),
                }
            }
            if connection.sent == connection.out.len() {
                connection.out.clear();
                connection.sent = 0;
            }
        }
        Ok(())
    }

    /// Takes in what has come. True when something has.
    fn poll(&mut self) -> Result<bool, Error> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.sockets.ready(&mut ready);
        let mut busy = false;
        for &socket in &ready {
            let number = self.connections.iter().position(|connection| connection.socket == socket);
            busy |= self.receive(number.expect("every socket is a connection's"))?;
        }
        self.ready = ready;
        Ok(busy)
    }

    fn receive(&mut self, number: usize) -> Result<bool, Error> {
        let mut busy = false;
        loop {
            let Connection { socket, decoder, .. } = &mut self.connections[number];
            let room = decoder.room();
            let room_bytes = room.len();
            let bytes = match self.sockets.receive(*socket, room) {
                Received::Bytes(bytes) => bytes,
                Received::Nothing => return Ok(busy),
                Received::Closed => return Err(closed(self.shared)),
            };
            decoder.received(bytes);
            busy = true;
            while self.take_reply(number)? {}
            // A receive that did not fill the room has taken all there was; the next turn finds what has come since.
            if bytes < room_bytes {
                return Ok(busy);
            }
        }
    }

    /// Takes one reply. False when none has come whole.
    fn take_reply(&mut self, number: usize) -> Result<bool, Error> {
        let (shared, now) = (self.shared, self.shared.host.now);
        let Connection { in_flight, decoder, .. } = &mut self.connections[number];
        let reply = match decoder.take() {
            Ok(Some(reply)) => reply,
            Ok(None) => return Ok(false),
            Err(corrupt) => return Err(failed(shared, None, Fault::Corrupt(corrupt))),
        };
        let Some(number) = in_flight.pop_front() else {
            return Err(failed(shared, None, Fault::Unexpected));
        };
        let stream = &mut self.streams[number as usize];
        let (found, value_bytes) = outcome(shared, stream, reply)?;
        if stream.operation.action == Action::ReadModifyWrite && stream.read.is_none() {
            stream.read = Some((value_bytes, found));
            self.request(number);
            return Ok(true);
        }
        let (read_bytes, found) = stream.read.map_or((0, found), |(bytes, found)| (bytes, found));
        let started = stream.started;
        self.waiting.push(number);
        let value_bytes = value_bytes + read_bytes;
        self.tally.answered(Answered { started, now: now(), found, value_bytes, keys_listed: 0 });
        shared.done.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }
}

/// What a reply says, held against what it may say: whether the key was there, and value bytes that were moved.
fn outcome(shared: &Shared, stream: &Stream, reply: Reply<'_>) -> Result<(bool, u64), Error> {
    let (Operation { action, index, .. }, plan) = (stream.operation, &shared.plan);
    let reads = matches!(action, Action::Read | Action::ReadMissing)
        || action == Action::ReadModifyWrite && stream.read.is_none();
    match reply {
        Reply::Value(value) if reads => {
            let may_be = action != Action::ReadMissing && value.len() == plan.value_bytes(index);
            if plan.verify && !(may_be && shared.values.is_right(index, value)) {
                return Err(Error::Wrong { key: key_of(shared, action, index), have_bytes: value.len() });
            }
            Ok((true, value.len() as u64))
        }
        Reply::Nothing if reads => Ok((false, 0)),
        Reply::Simple(b"OK") if !reads && action != Action::Delete => {
            if action == Action::Insert {
                shared.keys.added(index);
            }
            Ok((true, plan.value_bytes(index) as u64))
        }
        Reply::Integer(deleted) if action == Action::Delete => Ok((deleted > 0, 0)),
        Reply::Refused(words) => {
            let words = String::from_utf8_lossy(words).into_owned();
            Err(failed(shared, Some(key_of(shared, action, index)), Fault::Refused(words)))
        }
        _ => Err(failed(shared, Some(key_of(shared, action, index)), Fault::Unexpected)),
    }
}

fn key_of(shared: &Shared, action: Action, index: u64) -> Key {
    match action {
        Action::ReadMissing => shared.plan.missing_key(index),
        _ => shared.plan.key(index),
    }
}

fn closed(shared: &Shared) -> Error {
    failed(shared, None, Fault::Closed)
}

fn failed(shared: &Shared, key: Option<Key>, fault: Fault) -> Error {
    Error::Server { name: shared.system.name(), workload: shared.workload, key, fault }
}
