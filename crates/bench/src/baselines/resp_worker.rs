//! A worker for RESP servers: one OS thread with several connections.
//!
//! The counterpart of [`crate::kv_worker`]: the same operation generator, values, clock, sockets and idle policy, so
//! that only the server differs. A connection has up to `depth` requests in flight; replies arrive in order. An update
//! is a SET of the whole value, a delete a DEL.
//! Invariants: each stream has at most one operation in flight; every value read is verified.

use crate::arrival_schedule::ArrivalSchedule;
use crate::baselines::resp::{self, RespDecoder, RespReply, ServerError};
use crate::error::BenchError;
use crate::op_generator::{OpGenerator, Operation};
use crate::recorder::{OpResult, Recorder};
use crate::workload::WorkloadOp;
use crate::workload_state::WorkloadState;
use octokv_base::{Key, Nanos};
use octokv_runtime::{CoreWaker, IdlePolicy, KernelSockets, ReceiveStatus, SendStatus, SocketId, Sockets};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::Ordering;

struct RespStream {
    operation: Operation,
    started: Nanos,
    /// Result of the read of a read-modify-write: value bytes, and whether the key existed.
    read_result: Option<(u64, bool)>,
}

struct RespConnection {
    socket: SocketId,
    /// Encoded requests; the first `sent` bytes are sent.
    out: Vec<u8>,
    sent: usize,
    /// Streams with a request in flight, in order; at most `depth`.
    in_flight: VecDeque<u32>,
    decoder: RespDecoder,
}

struct RespWorker<'a> {
    shared: &'a WorkloadState,
    sockets: KernelSockets,
    connections: Vec<RespConnection>,
    op_generator: OpGenerator,
    arrivals: Option<ArrivalSchedule>,
    streams: Vec<RespStream>,
    waiting: Vec<u32>,
    recorder: Recorder,
    ready: Vec<SocketId>,
}

/// Runs one workload on `threads` connections. `number` identifies the worker.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    number: usize,
    threads: usize,
) -> Result<Recorder, BenchError> {
    let connected = connect_all(shared, number, threads);
    shared.group.failed.fetch_or(connected.is_err(), Ordering::AcqRel);
    shared.group.connected.fetch_add(1, Ordering::AcqRel);
    let mut worker = connected?;
    while shared.group.connected.load(Ordering::Acquire) < shared.group.workers {
        std::hint::spin_loop();
    }
    let ended = worker.run_loop(number);
    shared.group.failed.fetch_or(ended.is_err(), Ordering::AcqRel);
    ended?;
    Ok(worker.recorder)
}

fn connect_all(shared: &WorkloadState, number: usize, threads: usize) -> Result<RespWorker<'_>, BenchError> {
    let local = |error: std::io::Error| BenchError::Thread(error.raw_os_error().unwrap_or_default());
    let mut sockets = KernelSockets::new().map_err(local)?;
    let connect = |_| {
        let socket = sockets.connect(shared.address)?;
        let (out, in_flight) = (Vec::new(), VecDeque::with_capacity(shared.config.depth));
        Ok(RespConnection { socket, out, sent: 0, in_flight, decoder: RespDecoder::default() })
    };
    let connections = (0..threads).map(connect).collect::<Result<_, _>>().map_err(local)?;
    let count = threads * shared.config.depth;
    let idle = Operation { kind: WorkloadOp::Read, index: 0, range_keys: 0 };
    let stream = |_| RespStream { operation: idle, started: Nanos::ZERO, read_result: None };
    Ok(RespWorker {
        shared,
        sockets,
        connections,
        op_generator: shared.op_generator(number),
        arrivals: None,
        streams: (0..count).map(stream).collect(),
        waiting: (0..count as u32).rev().collect(),
        recorder: Recorder::new(Nanos::ZERO),
        ready: Vec::with_capacity(threads),
    })
}

impl RespWorker<'_> {
    fn run_loop(&mut self, number: usize) -> Result<(), BenchError> {
        let (shared, now) = (self.shared, self.shared.platform.now);
        let mut idle = IdlePolicy::new(shared.polling, CoreWaker::without_eventfd(), &mut self.sockets, None)
            .map_err(|error| BenchError::Thread(error.raw_os_error().unwrap_or_default()))?;
        let begin = now();
        self.arrivals =
            shared.config.rate.map(|rate| ArrivalSchedule::new(rate, number, shared.workers, begin));
        self.recorder = Recorder::new(begin + shared.config.warm_up);
        let until = shared.end_time(begin);
        loop {
            let exhausted = self.submit_due(now(), until);
            if exhausted && self.waiting.len() == self.streams.len() {
                break;
            }
            self.send_all()?;
            let busy = self.poll()?;
            let next_start = match self.arrivals {
                Some(pace) if !self.waiting.is_empty() => pace.next_arrival(),
                _ => Nanos::NEVER,
            };
            let until = if exhausted { Nanos::NEVER } else { until };
            idle.spin_or_sleep(busy, now(), false, until.min(next_start), &mut self.sockets);
        }
        if let Some(arrivals) = self.arrivals {
            self.recorder.set_backlog(arrivals.backlog(until));
        }
        Ok(())
    }

    /// Encodes requests for every waiting stream, with a rate only for those that are due. Returns true if the workload has
    /// no more operations.
    fn submit_due(&mut self, now: Nanos, until: Nanos) -> bool {
        if now >= until || self.shared.group.failed.load(Ordering::Relaxed) {
            return true;
        }
        while let Some(&stream) = self.waiting.last() {
            let started = self.arrivals.map_or(now, |pace| pace.next_arrival());
            if started > now {
                return false;
            }
            let Some(operation) = self.shared.next_op(&mut self.op_generator) else { return true };
            if let Some(arrivals) = &mut self.arrivals {
                arrivals.start_next(now);
            }
            self.streams[stream as usize] = RespStream { operation, started, read_result: None };
            self.append_request(stream);
            self.waiting.pop();
        }
        false
    }

    /// Appends the next request of a stream to its connection.
    fn append_request(&mut self, stream: u32) {
        let (shared, config) = (self.shared, &self.shared.config);
        let RespStream { operation: Operation { kind, index, .. }, read_result: read, .. } =
            &self.streams[stream as usize];
        let connection = &mut self.connections[stream as usize / config.depth];
        let (out, key) = (&mut connection.out, key_of(shared, *kind, *index));
        let key = key.as_bytes();
        match kind {
            WorkloadOp::Read | WorkloadOp::ReadMissing => resp::encode_get(out, key),
            WorkloadOp::ReadModifyWrite if read.is_none() => resp::encode_get(out, key),
            WorkloadOp::Store | WorkloadOp::Insert | WorkloadOp::ReadModifyWrite => {
                resp::encode_set(out, key, config.value_bytes(*index), |value| {
                    shared.values.fill(*index, value)
                });
            }
            WorkloadOp::Delete => resp::encode_delete(out, key),
            WorkloadOp::List | WorkloadOp::Scan => {
                unreachable!("check_supported rejects workloads with lists")
            }
        }
        connection.in_flight.push_back(stream);
    }

    fn send_all(&mut self) -> Result<(), BenchError> {
        for connection in self.connections.iter_mut().filter(|connection| !connection.out.is_empty()) {
            while connection.sent < connection.out.len() {
                let rest = IoSlice::new(&connection.out[connection.sent..]);
                match self.sockets.send(connection.socket, &[rest]) {
                    SendStatus::Bytes(bytes) => connection.sent += bytes,
                    SendStatus::WouldBlock => break,
                    SendStatus::Closed => return Err(closed_error(self.shared)),
                }
            }
            if connection.sent == connection.out.len() {
                connection.out.clear();
                connection.sent = 0;
            }
        }
        Ok(())
    }

    /// Receives from all ready connections. Returns true if any bytes were received.
    fn poll(&mut self) -> Result<bool, BenchError> {
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

    fn receive(&mut self, number: usize) -> Result<bool, BenchError> {
        let mut busy = false;
        loop {
            let RespConnection { socket, decoder, .. } = &mut self.connections[number];
            let buffer = decoder.receive_buffer();
            let room_bytes = buffer.len();
            let bytes = match self.sockets.receive(*socket, buffer) {
                ReceiveStatus::Bytes(bytes) => bytes,
                ReceiveStatus::WouldBlock => return Ok(busy),
                ReceiveStatus::Closed => return Err(closed_error(self.shared)),
            };
            decoder.advance(bytes);
            busy = true;
            while self.take_reply(number)? {}
            // A receive that did not fill the buffer has drained the socket.
            if bytes < room_bytes {
                return Ok(busy);
            }
        }
    }

    /// Takes one reply. Returns false if none is complete.
    fn take_reply(&mut self, number: usize) -> Result<bool, BenchError> {
        let (shared, now) = (self.shared, self.shared.platform.now);
        let RespConnection { in_flight, decoder, .. } = &mut self.connections[number];
        let reply = match decoder.take() {
            Ok(Some(reply)) => reply,
            Ok(None) => return Ok(false),
            Err(error) => return Err(server_error(shared, None, ServerError::Protocol(error))),
        };
        let Some(number) = in_flight.pop_front() else {
            return Err(server_error(shared, None, ServerError::UnexpectedReply));
        };
        let stream = &mut self.streams[number as usize];
        let (found, value_bytes) = check_reply(shared, stream, reply)?;
        if stream.operation.kind == WorkloadOp::ReadModifyWrite && stream.read_result.is_none() {
            stream.read_result = Some((value_bytes, found));
            self.append_request(number);
            return Ok(true);
        }
        let (read_bytes, found) = stream.read_result.map_or((0, found), |(bytes, found)| (bytes, found));
        let started = stream.started;
        self.waiting.push(number);
        let value_bytes = value_bytes + read_bytes;
        self.recorder.record_op(OpResult {
            started,
            finished: now(),
            found,
            value_bytes,
            keys_listed: 0,
            pairs_read: 0,
        });
        shared.completed_ops.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }
}

/// Checks a reply against the values that the operation may return: whether the key existed, and value bytes moved.
fn check_reply(
    shared: &WorkloadState,
    stream: &RespStream,
    reply: RespReply<'_>,
) -> Result<(bool, u64), BenchError> {
    let (Operation { kind, index, .. }, config) = (stream.operation, &shared.config);
    let reads = matches!(kind, WorkloadOp::Read | WorkloadOp::ReadMissing)
        || kind == WorkloadOp::ReadModifyWrite && stream.read_result.is_none();
    match reply {
        RespReply::Bulk(value) if reads => {
            let may_be = kind != WorkloadOp::ReadMissing && value.len() == config.value_bytes(index);
            if config.verify && !(may_be && shared.values.matches(index, value)) {
                return Err(BenchError::WrongValue {
                    key: key_of(shared, kind, index),
                    have_bytes: value.len(),
                });
            }
            Ok((true, value.len() as u64))
        }
        RespReply::Nil if reads => Ok((false, 0)),
        RespReply::Simple(b"OK") if !reads && kind != WorkloadOp::Delete => {
            if kind == WorkloadOp::Insert {
                shared.keys.insert_completed(index);
            }
            Ok((true, config.value_bytes(index) as u64))
        }
        RespReply::Integer(deleted) if kind == WorkloadOp::Delete => Ok((deleted > 0, 0)),
        RespReply::Error(message) => {
            let message = String::from_utf8_lossy(message).into_owned();
            Err(server_error(shared, Some(key_of(shared, kind, index)), ServerError::ErrorReply(message)))
        }
        _ => Err(server_error(shared, Some(key_of(shared, kind, index)), ServerError::UnexpectedReply)),
    }
}

fn key_of(shared: &WorkloadState, kind: WorkloadOp, index: u64) -> Key {
    match kind {
        WorkloadOp::ReadMissing => shared.config.absent_key(index),
        _ => shared.config.key(index),
    }
}

fn closed_error(shared: &WorkloadState) -> BenchError {
    server_error(shared, None, ServerError::Closed)
}

fn server_error(shared: &WorkloadState, key: Option<Key>, fault: ServerError) -> BenchError {
    BenchError::Server { name: shared.system_name, workload: shared.workload, key, error: fault }
}
