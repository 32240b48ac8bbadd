//! A worker for Key Value commands: one OS thread with one session, which has a queue per connection, and its streams.
//!
//! ```text
//!            submit                   response
//!  waiting ──────────▶ in flight ───────────────▶ waiting      (threads × depth streams)
//!                          ▲             │ of the read of a read-modify-write, or of a scan but for its last command
//!                          └ continued  ◀┘
//! ```
//! A scan creates an iterator, reads its pairs and destroys it; latency includes all of these. The writer beside a workload
//! is one stream and one connection more, whose stores count for themselves.
//! Each iteration submits for every waiting stream, with a rate only operations that are due, then polls once. Latency
//! counts from just before the submission, with a rate from the due time ([`crate::arrival_schedule`]), to the delivery
//! of the response; it is neither corrected nor filtered.
//! Invariants: each stream has at most one operation in flight; no operation allocates (keys longer than
//! 16 bytes do, in [`Key`]).

use crate::arrival_schedule::ArrivalSchedule;
use crate::error::BenchError;
use crate::flow_sender::{FlowKind, FlowSender};
use crate::op_generator::{OpGenerator, Operation};
use crate::platform::Clock;
use crate::recorder::{OpResult, Recorder};
use crate::scan_progress::ScanProgress;
use crate::workload::{Workload, WorkloadOp};
use crate::workload_state::WorkloadState;
use octokv_base::{Buffer, Key, Nanos};
use octokv_client::{
    ClientConfig, Command, RemoteIterator, Response, Session, StoreMode, SubmitError, Value,
};
use octokv_runtime::{CoreWaker, IdlePolicy, KernelSockets, Polling, Sockets};
use octokv_wire::Status;
use octokv_wire::iterator::{PairList, buffer_bytes_for};
use octokv_wire::kv::{LIST_HEADER_BYTES, UncheckedKeyList, list_entry_bytes};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Longest wait for an event of a connection.
const WAIT_MAX: Nanos = Nanos::from_millis(5);
/// Interval in which a worker whose streams have ended checks whether the others' have.
const FINISH_POLL_INTERVAL: Nanos = Nanos::from_millis(1);
/// Length of the pairs of one command of a scan, in bytes, unless one pair is longer.
const PAIRS_BYTES: usize = 256 << 10;

/// Connects and waits until the session is live.
///
/// # Errors
/// The error that ended the session, or the failure of a socket.
pub fn connect(
    address: SocketAddr,
    settings: ClientConfig,
    now: Clock,
) -> Result<Session<KernelSockets>, octokv_client::Error> {
    let sockets = KernelSockets::new()
        .map_err(|error| octokv_client::Error::Os(error.raw_os_error().unwrap_or_default()))?;
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
            let wait = session.next_deadline().since(now()).min(WAIT_MAX);
            session.sockets_mut().wait(wait);
        }
    }
}

/// Closes a session with a clean shutdown.
pub fn disconnect(mut session: Session<KernelSockets>, now: Clock) {
    session.close(now(), |_, _| {});
    while session.ended().is_none() {
        if !session.poll(now(), |_, _| {}) {
            let wait = session.next_deadline().since(now()).min(WAIT_MAX);
            session.sockets_mut().wait(wait);
        }
    }
}

#[derive(Clone, Copy)]
struct KvStream {
    operation: Operation,
    started: Nanos,
    /// Result of the read of a read-modify-write.
    read_result: Option<ResponseSummary>,
    /// The iterator of a scan.
    iterator: Option<RemoteIterator>,
}

/// The relevant part of a response.
#[derive(Clone, Copy)]
struct ResponseSummary {
    found: bool,
    value_bytes: u64,
    keys_listed: u64,
    pairs_read: u64,
}

struct KvWorker<'a, S: Sockets> {
    shared: &'a WorkloadState,
    session: Session<S>,
    op_generator: OpGenerator,
    arrivals: Option<ArrivalSchedule>,
    streams: Vec<KvStream>,
    waiting: Vec<u32>,
    /// Scans of the streams.
    scans: Vec<ScanProgress>,
    /// Streams whose operation needs another command.
    continued: Vec<u32>,
    writer: Option<Writer>,
    recorder: Recorder,
    /// Flow control, if the client asked for it and the namespace has tokens.
    flow: Option<FlowSender>,
}

/// The writer beside a workload: the stream after all others.
struct Writer {
    arrivals: Option<ArrivalSchedule>,
    is_storing: bool,
}

/// Runs one workload on `threads` connections. `number` identifies the worker.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    number: usize,
    threads: usize,
) -> Result<Recorder, BenchError> {
    let has_writer = shared.has_writer(number);
    let session = connect_worker(shared, threads + usize::from(has_writer)).and_then(|mut session| {
        let scans = has_iterators(shared, &mut session)?;
        Ok((session, scans))
    });
    // Connected or not, the other workers must not wait for this one.
    shared.group.failed.fetch_or(session.is_err(), Ordering::AcqRel);
    shared.group.connected.fetch_add(1, Ordering::AcqRel);
    let (mut session, scans) = session?;
    let now = shared.platform.now;
    while shared.group.connected.load(Ordering::Acquire) < shared.group.workers {
        session.poll(now(), |_, _| {});
        std::hint::spin_loop();
    }
    if shared.group.failed.load(Ordering::Acquire) {
        disconnect(session, now);
        return Ok(Recorder::new(now()));
    }
    let mut idle = IdlePolicy::new(shared.polling, CoreWaker::without_eventfd(), session.sockets_mut(), None)
        .map_err(|error| BenchError::Thread(error.raw_os_error().unwrap_or_default()))?;
    let count = threads * shared.config.depth;
    let begin = now();
    let streams = count + usize::from(has_writer);
    let idle_operation = Operation { kind: WorkloadOp::Read, index: 0, range_keys: 0 };
    let idle_stream =
        KvStream { operation: idle_operation, started: begin, read_result: None, iterator: None };
    let mut op_generator = shared.op_generator(number);
    op_generator.set_scans(scans);
    let flow = session.controller_info().and_then(|info| FlowSender::new(info, streams));
    let mut worker = KvWorker {
        shared,
        session,
        op_generator,
        arrivals: shared.config.rate.map(|rate| ArrivalSchedule::new(rate, number, shared.workers, begin)),
        streams: vec![idle_stream; streams],
        scans: vec![ScanProgress::default(); streams],
        waiting: (0..count as u32).rev().collect(),
        continued: Vec::with_capacity(count),
        writer: has_writer.then(|| Writer {
            arrivals: shared.config.write_rate.map(|rate| ArrivalSchedule::new(rate, 0, 1, begin)),
            is_storing: false,
        }),
        recorder: Recorder::new(begin + shared.config.warm_up),
        flow,
    };
    let until = shared.end_time(begin);
    let mut has_finished = false;
    loop {
        let exhausted = worker.submit_due(now(), until)?;
        if exhausted && worker.waiting.len() == count && !has_finished {
            shared.group.finished.fetch_add(1, Ordering::AcqRel);
            has_finished = true;
        }
        let is_writing = worker.submit_write(now())?;
        if has_finished && !is_writing {
            break;
        }
        worker.send_flow(now)?;
        let busy = worker.poll(now)?;
        let deadline = worker
            .session
            .next_deadline()
            .min(if exhausted { Nanos::NEVER } else { until })
            .min(if has_finished { now() + FINISH_POLL_INTERVAL } else { Nanos::NEVER })
            .min(worker.next_arrival());
        idle.spin_or_sleep(busy, now(), false, deadline, worker.session.sockets_mut());
    }
    let KvWorker { session, mut recorder, arrivals, .. } = worker;
    if let Some(arrivals) = arrivals {
        recorder.set_backlog(arrivals.backlog(until));
    }
    disconnect(session, now);
    Ok(recorder)
}

fn connect_worker(shared: &WorkloadState, threads: usize) -> Result<Session<KernelSockets>, BenchError> {
    let queues = threads as u16;
    let settings =
        ClientConfig { io_queues: queues, queue_depth: shared.config.depth as u16, ..shared.client.clone() };
    let session = connect(shared.address, settings, shared.platform.now).map_err(BenchError::Connect)?;
    let granted = session.controller_info().map_or(0, |facts| facts.io_queues);
    if granted < queues {
        return Err(BenchError::Threads { wanted: threads, granted: usize::from(granted) });
    }
    if session.free_slots() < threads * shared.config.depth {
        let granted = session.free_slots() / threads;
        return Err(BenchError::Depth { wanted: shared.config.depth, granted });
    }
    Ok(session)
}

/// Whether the namespace has iterators, for a workload that reads ranges of keys.
fn has_iterators(shared: &WorkloadState, session: &mut Session<KernelSockets>) -> Result<bool, BenchError> {
    let (workload, now) = (shared.workload, shared.platform.now);
    if workload != Workload::YcsbE {
        return Ok(false);
    }
    let create =
        Command::CreateIterator { lower: no_bound(), upper: no_bound(), reverse: false, keys_only: false };
    match execute(session, create, now) {
        Ok(Response::IteratorCreated(iterator)) => {
            // If this fails, the first operation does too.
            let _ = execute(session, Command::DestroyIterator { iterator }, now);
            Ok(true)
        }
        Ok(response) => unreachable!("a Create completed with {response:?}"),
        Err(octokv_client::Error::NoIterators) => Ok(false),
        // Only another namespace of the node has iterators.
        Err(octokv_client::Error::Status(status)) if status.is(Status::INVALID_OPCODE) => Ok(false),
        Err(error) => Err(BenchError::Connect(error)),
    }
}

/// Executes one command of an idle session.
fn execute(
    session: &mut Session<KernelSockets>,
    command: Command<'_>,
    now: Clock,
) -> Result<Response, octokv_client::Error> {
    match session.submit(command, 0) {
        Ok(()) => {}
        Err(SubmitError::Invalid(error)) => return Err(error),
        // An idle session has free slots.
        Err(SubmitError::QueueFull | SubmitError::NotConnected | SubmitError::Ended) => {
            return Err(session.ended().unwrap_or(octokv_client::Error::Closed));
        }
    }
    let mut response = None;
    loop {
        let busy = session.poll(now(), |_, received| response = Some(received));
        if let Some(received) = response {
            return received;
        }
        if let Some(error) = session.ended() {
            return Err(error);
        }
        if !busy {
            let wait = session.next_deadline().since(now()).min(WAIT_MAX);
            session.sockets_mut().wait(wait);
        }
    }
}

/// The open bound of an iterator.
fn no_bound() -> Key {
    Key::new(&[]).expect("the empty key is short enough")
}

impl<S: Sockets> KvWorker<'_, S> {
    /// Submits an operation for every waiting stream, with a rate only for those that are due. Returns true if the workload
    /// has no more operations.
    fn submit_due(&mut self, now: Nanos, until: Nanos) -> Result<bool, BenchError> {
        // These operations have started already.
        while let Some(&stream) = self.continued.last() {
            self.submit(stream)?;
            self.continued.pop();
        }
        if now >= until || self.shared.group.failed.load(Ordering::Relaxed) {
            return Ok(true);
        }
        while let Some(&stream) = self.waiting.last() {
            let started = self.arrivals.map_or(now, |pace| pace.next_arrival());
            if started > now {
                return Ok(false);
            }
            let Some(op) = self.shared.next_op(&mut self.op_generator) else { return Ok(true) };
            if let Some(arrivals) = &mut self.arrivals {
                arrivals.start_next(now);
            }
            self.streams[stream as usize] =
                KvStream { operation: op, started, read_result: None, iterator: None };
            if op.kind == WorkloadOp::Scan {
                let start = self.shared.config.key(op.index);
                self.scans[stream as usize].begin(start.as_bytes(), op.range_keys);
            }
            self.submit(stream)?;
            self.waiting.pop();
        }
        Ok(false)
    }

    /// Submits a store of the writer beside the workload if it is due. Returns whether the writer goes on.
    fn submit_write(&mut self, now: Nanos) -> Result<bool, BenchError> {
        let stream = self.streams.len() - 1;
        let Some(writer) = &mut self.writer else { return Ok(false) };
        if writer.is_storing {
            return Ok(true);
        }
        if self.shared.is_finished() {
            return Ok(false);
        }
        if let Some(arrivals) = &mut writer.arrivals {
            if arrivals.next_arrival() > now {
                return Ok(true);
            }
            arrivals.start_next(now);
        }
        writer.is_storing = true;
        let index = self.op_generator.next_write(&self.shared.keys);
        let operation = Operation { kind: WorkloadOp::Store, index, range_keys: 0 };
        self.streams[stream] = KvStream { operation, started: now, read_result: None, iterator: None };
        self.submit(stream as u32)?;
        Ok(true)
    }

    /// Due time of the next operation if a stream is waiting, and of the writer.
    fn next_arrival(&self) -> Nanos {
        let of_streams = self.arrivals.filter(|_| !self.waiting.is_empty());
        let of_writer =
            self.writer.as_ref().and_then(|writer| writer.arrivals.filter(|_| !writer.is_storing));
        let due = |arrivals: Option<ArrivalSchedule>| {
            arrivals.map_or(Nanos::NEVER, |arrivals| arrivals.next_arrival())
        };
        due(of_streams).min(due(of_writer))
    }

    /// Submits the next command of a stream, with flow control once its device has tokens for it.
    fn submit(&mut self, stream: u32) -> Result<(), BenchError> {
        let KvStream { operation: Operation { kind, index, .. }, read_result, .. } =
            self.streams[stream as usize];
        let (Some(flow), config) = (&mut self.flow, &self.shared.config) else {
            return self.submit_now(stream);
        };
        let Some((key, kind)) = FlowKind::of(config, kind, index, read_result.is_some()) else {
            return self.submit_now(stream);
        };
        flow.enqueue(stream, &key, kind);
        Ok(())
    }

    /// Submits the commands for which their devices have tokens.
    fn send_flow(&mut self, clock: Clock) -> Result<(), BenchError> {
        let Some(mut flow) = self.flow.take() else { return Ok(()) };
        let mut outcome = Ok(());
        flow.run(clock, |stream| {
            if outcome.is_ok() {
                outcome = self.submit_now(stream);
            }
        });
        self.flow = Some(flow);
        outcome
    }

    fn submit_now(&mut self, stream: u32) -> Result<(), BenchError> {
        let KvStream { operation, read_result: read, iterator, .. } = self.streams[stream as usize];
        let command = match operation.kind {
            WorkloadOp::Scan => self.build_scan_command(operation, stream, iterator, read.is_some()),
            _ => self.build_command(operation, read.is_some()),
        };
        match self.session.submit(command, u64::from(stream)) {
            Ok(()) => Ok(()),
            Err(SubmitError::Invalid(error)) => {
                self.shared.group.failed.store(true, Ordering::Release);
                let key = self.shared.config.key(operation.index);
                Err(command_error(self.shared.workload, key, error))
            }
            // The queues have a slot for every stream, and the session never reconnects.
            Err(SubmitError::QueueFull | SubmitError::NotConnected | SubmitError::Ended) => {
                let error = self.session.ended().unwrap_or(octokv_client::Error::Closed);
                Err(BenchError::Connect(error))
            }
        }
    }

    fn build_command(&mut self, operation: Operation, has_read: bool) -> Command<'static> {
        let (Operation { kind, index, range_keys }, config) = (operation, &self.shared.config);
        let key = config.key(index);
        // The host buffer of a value. A longer value than configured is detected by its length.
        let limit_bytes = config.value_sizes.max_bytes() as u32;
        match kind {
            WorkloadOp::ReadModifyWrite if !has_read => Command::Retrieve { key, limit_bytes },
            WorkloadOp::Store | WorkloadOp::Insert | WorkloadOp::ReadModifyWrite => {
                let to = config.value_bytes(index);
                // The pool has a buffer for every stream of usual configurations; larger ones allocate.
                let mut buffer = self.session.pool().take(to).unwrap_or_else(|| Buffer::zeroed(to));
                self.shared.values.fill(index, &mut buffer[..to]);
                Command::Store { key, value: Value::Buffer { buffer, from: 0, to }, mode: StoreMode::Upsert }
            }
            WorkloadOp::Read => Command::Retrieve { key, limit_bytes },
            WorkloadOp::ReadMissing => Command::Retrieve { key: config.absent_key(index), limit_bytes },
            WorkloadOp::Delete => Command::Delete { key },
            WorkloadOp::List => {
                let entries = range_keys as usize * list_entry_bytes(config.key_sizes.max_bytes());
                Command::List { start: key, limit_bytes: (LIST_HEADER_BYTES + entries) as u32 }
            }
            WorkloadOp::Scan => unreachable!("a scan has commands of its own"),
        }
    }

    /// The next command of a scan: the iterator is created, advanced as long as pairs are missing, and destroyed.
    fn build_scan_command(
        &self,
        operation: Operation,
        stream: u32,
        iterator: Option<RemoteIterator>,
        has_pairs: bool,
    ) -> Command<'static> {
        let config = &self.shared.config;
        match iterator {
            None => Command::CreateIterator {
                lower: config.key(operation.index),
                upper: no_bound(),
                reverse: false,
                keys_only: false,
            },
            Some(iterator) if has_pairs => Command::DestroyIterator { iterator },
            Some(iterator) => {
                let pairs_max = self.scans[stream as usize].pairs_left();
                let pair = buffer_bytes_for(config.key_sizes.max_bytes(), config.value_sizes.max_bytes());
                let limit_bytes = pair.saturating_mul(pairs_max as usize).min(PAIRS_BYTES).max(pair) as u32;
                Command::NextPairs { iterator, limit_bytes, pairs_max }
            }
        }
    }

    fn poll(&mut self, clock: Clock) -> Result<bool, BenchError> {
        let KvWorker { shared, session, streams, scans, waiting, continued, writer, recorder, flow, .. } =
            self;
        let writer_stream = streams.len() - usize::from(writer.is_some());
        let mut failure = None;
        let mut done = 0;
        let busy = session.poll(clock(), |token, response| {
            let (stream, is_writer) = (&mut streams[token as usize], token as usize == writer_stream);
            let checked = match stream.operation.kind {
                WorkloadOp::Scan => check_scan_response(shared, stream, &mut scans[token as usize], response),
                _ => check_response(shared, stream.operation, response).map(Some),
            };
            if shared.config.tolerates_errors && checked.as_ref().is_err_and(BenchError::is_status) {
                recorder.record_failed(clock());
                return match (is_writer, &mut *writer) {
                    (true, Some(writer)) => writer.is_storing = false,
                    _ => waiting.push(token as u32),
                };
            }
            if let (true, Some(writer)) = (is_writer, &mut *writer) {
                writer.is_storing = false;
                recorder.record_write_beside(clock());
                return failure = failure.take().or(checked.err());
            }
            let summary = match checked {
                Ok(Some(summary)) => summary,
                Ok(None) => return continued.push(token as u32),
                Err(error) => {
                    waiting.push(token as u32);
                    return failure = Some(error);
                }
            };
            if stream.operation.kind == WorkloadOp::ReadModifyWrite && stream.read_result.is_none() {
                stream.read_result = Some(summary);
                return continued.push(token as u32);
            }
            waiting.push(token as u32);
            done += 1;
            let read_bytes = stream.read_result.map_or(0, |read| read.value_bytes);
            recorder.record_op(OpResult {
                started: stream.started,
                finished: clock(),
                found: stream.read_result.unwrap_or(summary).found,
                value_bytes: summary.value_bytes + read_bytes,
                keys_listed: summary.keys_listed,
                pairs_read: summary.pairs_read,
            });
        });
        if let Some(flow) = flow {
            flow.complete(|reports| session.take_token_reports(reports));
        }
        if done > 0 {
            shared.completed_ops.fetch_add(done, Ordering::Relaxed);
        }
        match failure {
            Some(error) => {
                shared.group.failed.store(true, Ordering::Release);
                Err(error)
            }
            None => Ok(busy),
        }
    }
}

/// Checks a response against the values that the operation may return.
#[inline]
fn check_response(
    shared: &WorkloadState,
    operation: Operation,
    response: Result<Response, octokv_client::Error>,
) -> Result<ResponseSummary, BenchError> {
    let (Operation { kind, index, .. }, config) = (operation, &shared.config);
    let summary =
        |found, value_bytes| Ok(ResponseSummary { found, value_bytes, keys_listed: 0, pairs_read: 0 });
    match response {
        Ok(Response::Value { data, full_bytes }) => {
            let bytes = config.value_bytes(index);
            let whole = full_bytes as usize == bytes && data.len() == bytes;
            let may_be = kind != WorkloadOp::ReadMissing && whole;
            if config.verify && !(may_be && shared.values.matches(index, &data)) {
                let missing = kind == WorkloadOp::ReadMissing;
                let key = if missing { config.absent_key(index) } else { config.key(index) };
                return Err(BenchError::WrongValue { key, have_bytes: full_bytes as usize });
            }
            summary(true, data.len() as u64)
        }
        Ok(Response::NotFound) => summary(false, 0),
        Ok(Response::Stored) => {
            if kind == WorkloadOp::Insert {
                shared.keys.insert_completed(index);
            }
            summary(true, config.value_bytes(index) as u64)
        }
        Ok(Response::Keys { list }) => {
            let from = config.key(index);
            let Ok(keys) = UncheckedKeyList(&list).check() else {
                return Err(BenchError::MalformedList { from });
            };
            let found = keys.keys().next() == Some(from.as_bytes());
            let keys_listed = u64::from(keys.count());
            Ok(ResponseSummary { found, value_bytes: 0, keys_listed, pairs_read: 0 })
        }
        Ok(_) => summary(true, 0),
        Err(error) => Err(command_error(shared.workload, config.key(index), error)),
    }
}

/// Checks a response to a command of a scan. `None` if the scan needs another command.
fn check_scan_response(
    shared: &WorkloadState,
    stream: &mut KvStream,
    scan: &mut ScanProgress,
    response: Result<Response, octokv_client::Error>,
) -> Result<Option<ResponseSummary>, BenchError> {
    let from = || shared.config.key(stream.operation.index);
    match response {
        Ok(Response::IteratorCreated(iterator)) => stream.iterator = Some(iterator),
        Ok(Response::Pairs { pairs }) => {
            let Ok(list) = PairList::check(&pairs) else {
                return Err(BenchError::MalformedPairs { from: from() });
            };
            for (key, value) in list.pairs() {
                scan.receive(shared, key, value)?;
            }
            // Without progress the scan would never end.
            if list.count() == 0 && !list.is_end() {
                return Err(BenchError::MalformedPairs { from: from() });
            }
            if list.is_end() || scan.pairs_left() == 0 {
                stream.read_result = Some(ResponseSummary {
                    found: scan.found,
                    value_bytes: 0,
                    keys_listed: 0,
                    pairs_read: 0,
                });
            }
        }
        Ok(_) => {
            let (value_bytes, pairs_read) = (scan.value_bytes, u64::from(scan.pairs));
            return Ok(Some(ResponseSummary { found: scan.found, value_bytes, keys_listed: 0, pairs_read }));
        }
        // Only another namespace of the node has iterators.
        Err(octokv_client::Error::Status(status)) if status.is(Status::INVALID_OPCODE) => {
            return Err(command_error(shared.workload, from(), octokv_client::Error::NoIterators));
        }
        Err(error) => return Err(command_error(shared.workload, from(), error)),
    }
    Ok(None)
}

fn command_error(workload: Workload, key: Key, error: octokv_client::Error) -> BenchError {
    BenchError::Command { workload, key, error }
}

/// Default polling of a worker: spins for 50 us, then sleeps.
pub const DEFAULT_POLLING: Polling = Polling::Adaptive { spin: Nanos::from_micros(50) };
