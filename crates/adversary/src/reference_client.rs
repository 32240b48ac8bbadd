//! The well-behaved client: stores and reads at a fixed rate, verifies every byte, and records latency.
//!
//! ```text
//!   due times at a fixed rate ──▶ store or retrieve, alternating ──▶ response: correct? latency since the due time?
//! ```
//! In: a node, a rate. Out: [`ReferenceClientReport`]. Latency counts from the due time of an operation (open loop), so
//! operations delayed by a stalled node count in full. Each key has at most one operation in flight, so the expected
//! result of a read is exact. Invariant: a wrong byte, a missing key or a lost connection ends the client with an
//! error; a busy status does not.

use anyhow::{Context, Result, anyhow, bail, ensure};
use octokv_base::{Key, Nanos, prng::mix64};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_bench::values::ValueGenerator;
use octokv_client::{ClientConfig, Command, Error, Reconnect, Response, Session, StoreMode, Value};
use octokv_runtime::KernelSockets;
use octokv_sys::clock::now;
use octokv_sys::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::raw_connection::TargetAddr;

/// Maximum time that the client sleeps without polling.
const SLEEP_MAX: Nanos = Nanos::from_millis(5);

/// Configuration of a reference client.
#[derive(Clone, Debug)]
pub struct ReferenceClientConfig {
    /// Rate, in operations per second.
    pub ops_per_s: u64,
    /// Maximum value length, in bytes.
    pub value_bytes_max: usize,
    /// Minimum value length, in bytes.
    pub value_bytes_min: usize,
    /// Prefix of its keys; clients of one namespace need different ones.
    pub prefix: &'static str,
    /// Number of keys.
    pub key_count: usize,
    /// Whether its thread has real-time priority, so that latency excludes contention for the CPU.
    pub realtime_priority: bool,
    /// Its host NQN.
    pub host_nqn: &'static str,
}

impl Default for ReferenceClientConfig {
    fn default() -> ReferenceClientConfig {
        ReferenceClientConfig {
            ops_per_s: 500,
            value_bytes_max: 6000,
            value_bytes_min: 1,
            prefix: "reference",
            key_count: 128,
            realtime_priority: false,
            host_nqn: "nqn.2026-11.io.octokv:reference",
        }
    }
}

/// Classification of operations begun in a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MeasurePhase {
    /// Not counted.
    Uncounted,
    /// Counted, without an attack.
    Quiet,
    /// Counted, under attack.
    Attacked,
}

const PHASES: u32 = 3;

impl MeasurePhase {
    fn of(slice: u32) -> MeasurePhase {
        [MeasurePhase::Uncounted, MeasurePhase::Quiet, MeasurePhase::Attacked][(slice % PHASES) as usize]
    }
}

/// Results of a reference client.
#[derive(Clone, Debug)]
pub struct ReferenceClientReport {
    /// Operations completed with the correct result.
    pub completed: u64,
    /// Operations rejected as busy.
    pub busy_responses: u64,
    /// Maximum latency since the due time, in nanoseconds.
    pub max_latency_ns: u64,
    /// Latencies by slice, for slices of counted phases, in order of their first completion.
    pub slices: Vec<LatencySlice>,
}

/// Latencies of the operations begun in one slice, in nanoseconds.
#[derive(Clone, Debug)]
pub struct LatencySlice {
    number: u32,
    /// Phase of the slice.
    pub phase: MeasurePhase,
    /// Latencies since the due time.
    pub latencies_from_due_ns: Vec<u64>,
    /// Latencies since submission was first attempted: excludes delays of the client machine.
    pub latencies_from_begin_ns: Vec<u64>,
}

#[derive(Default)]
struct ReferenceClientShared {
    stop: AtomicBool,
    /// `PHASES` times the number of slices so far, plus the phase of the current one.
    slice: AtomicU32,
    completed: AtomicU64,
    max_latency_ns: AtomicU64,
}

/// A client that runs on its own thread.
pub struct ReferenceClient {
    shared: Arc<ReferenceClientShared>,
    thread: JoinHandle<Result<ReferenceClientReport>>,
}

impl ReferenceClient {
    /// Connects, stores every key once, and starts the thread at the configured rate.
    ///
    /// # Errors
    /// If the connection or an initial store fails.
    pub fn start(target: &TargetAddr, plan: ReferenceClientConfig) -> Result<ReferenceClient> {
        let config = ClientConfig {
            subsystem_nqn: target.nqn.clone(),
            host_nqn: plan.host_nqn.to_owned(),
            queue_depth: 64,
            reconnect: Reconnect::Never,
            receive_buffer_bytes: 64 << 10,
            pool_bytes: 8 << 20,
            ..ClientConfig::default()
        };
        let session = connect(target.address, config, now).map_err(|error| anyhow!("{error}"))?;
        let shared = Arc::<ReferenceClientShared>::default();
        let mut work = ReferenceClientWorker::new(session, plan, Arc::clone(&shared));
        work.store_all_keys()?;
        let realtime_priority = work.plan.realtime_priority;
        let thread = thread::spawn("reference", move || {
            if realtime_priority {
                thread::set_realtime_priority().context("setting real-time priority")?;
            }
            work.run()
        })?;
        Ok(ReferenceClient { shared, thread })
    }

    /// Operations completed so far.
    pub fn completed(&self) -> u64 {
        self.shared.completed.load(Ordering::Acquire)
    }

    /// Resets the maximum latency.
    pub fn reset_max_latency(&self) {
        self.shared.max_latency_ns.store(0, Ordering::Release);
    }

    /// Starts a new slice: it takes the operations begun from now on.
    pub fn begin_slice(&self, phase: MeasurePhase) {
        let before = self.shared.slice.load(Ordering::Acquire) / PHASES;
        self.shared.slice.store((before + 1) * PHASES + phase as u32, Ordering::Release);
    }

    /// Whether the thread has ended, which only an error causes.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Reads every key once more, ends the thread and returns its results.
    ///
    /// # Errors
    /// The first failure of the client.
    pub fn finish(self) -> Result<ReferenceClientReport> {
        self.shared.stop.store(true, Ordering::Release);
        self.thread
            .join()
            .map_err(|_| anyhow!("the reference client panicked"))?
            .context("the reference client")
    }
}

#[derive(Clone, Copy)]
struct ReferenceKey {
    version: u64,
    in_flight: Option<InFlightOperation>,
}

/// An operation in flight.
#[derive(Clone, Copy)]
struct InFlightOperation {
    due: Nanos,
    begun: Nanos,
    slice: u32,
    /// Version that a store writes; `None` for a read.
    version: Option<u64>,
}

struct ReferenceClientWorker {
    session: Session<KernelSockets>,
    plan: ReferenceClientConfig,
    shared: Arc<ReferenceClientShared>,
    values: ValueGenerator,
    keys: Vec<ReferenceKey>,
    value: Vec<u8>,
    next_version: u64,
    next_key: u64,
    report: ReferenceClientReport,
    /// Time and slice of the first attempt to submit the operation that is due, while no key or slot is free.
    first_attempt: Option<(Nanos, u32)>,
}

impl ReferenceClientWorker {
    fn new(
        session: Session<KernelSockets>,
        plan: ReferenceClientConfig,
        shared: Arc<ReferenceClientShared>,
    ) -> ReferenceClientWorker {
        ReferenceClientWorker {
            session,
            values: ValueGenerator::new(77, plan.value_bytes_max),
            keys: vec![ReferenceKey { version: 0, in_flight: None }; plan.key_count],
            value: vec![0; plan.value_bytes_max],
            plan,
            shared,
            next_version: 1,
            next_key: 0,
            report: ReferenceClientReport {
                completed: 0,
                busy_responses: 0,
                max_latency_ns: 0,
                slices: Vec::new(),
            },
            first_attempt: None,
        }
    }

    fn key(&self, index: usize) -> Key {
        Key::new(format!("{}{index:06}", self.plan.prefix).as_bytes()).expect("at most 1024 bytes")
    }

    fn value_bytes_of(&self, version: u64) -> usize {
        let span = (self.plan.value_bytes_max - self.plan.value_bytes_min) as u64 + 1;
        self.plan.value_bytes_min + (mix64(version) % span) as usize
    }

    /// Submits the operation that is due at `due`. Returns false if no key or no slot is free.
    fn submit(&mut self, due: Nanos, stores: bool) -> Result<bool> {
        let attempt = (now(), self.shared.slice.load(Ordering::Acquire));
        let (begun, slice) = *self.first_attempt.get_or_insert(attempt);
        let count = self.keys.len() as u64;
        let found = (0..count).map(|step| ((self.next_key + step) % count) as usize);
        let Some(index) = found.into_iter().find(|&index| self.keys[index].in_flight.is_none()) else {
            return Ok(false);
        };
        if self.session.free_slots() == 0 {
            ensure!(self.session.ended().is_none(), "{:?}", self.session.ended());
            return Ok(false);
        }
        self.next_key = index as u64 + 1;
        let key = self.key(index);
        let version = stores.then_some(self.next_version);
        let submitted = match version {
            Some(version) => {
                let bytes = self.value_bytes_of(version);
                self.values.fill(version, &mut self.value[..bytes]);
                let value = Value::Slice(&self.value[..bytes]);
                self.session.submit(Command::Store { key, value, mode: StoreMode::Upsert }, index as u64)
            }
            None => self.session.submit(Command::Retrieve { key, limit_bytes: u32::MAX }, index as u64),
        };
        submitted.map_err(|rejected| anyhow!("{rejected:?}"))?;
        self.next_version += u64::from(stores);
        self.first_attempt = None;
        self.keys[index].in_flight = Some(InFlightOperation { due, begun, slice, version });
        Ok(true)
    }

    /// Processes completions. Returns whether there were any.
    fn poll(&mut self) -> Result<bool> {
        let mut completions = Vec::new();
        let busy = self.session.poll(now(), |token, response| completions.push((token as usize, response)));
        let at = now();
        for (index, response) in completions {
            let InFlightOperation { due, begun, slice, version } =
                self.keys[index].in_flight.take().context("a completion of no operation")?;
            match (response, version) {
                (Ok(Response::Stored), Some(version)) => self.keys[index].version = version,
                (Ok(Response::Value { data, full_bytes }), None) => {
                    let version = self.keys[index].version;
                    let is_correct = data.len() == full_bytes as usize
                        && data.len() == self.value_bytes_of(version)
                        && self.values.matches(version, &data);
                    ensure!(is_correct, "key {} has a wrong value of {full_bytes} B", self.key(index));
                }
                (Err(Error::Busy), _) => {
                    self.report.busy_responses += 1;
                    continue;
                }
                (response, _) => bail!("key {}: {response:?}", self.key(index)),
            }
            let late_ns = at.since(due).0.max(1);
            self.report.completed += 1;
            self.shared.max_latency_ns.fetch_max(late_ns, Ordering::AcqRel);
            if MeasurePhase::of(slice) == MeasurePhase::Uncounted {
                continue;
            }
            let slices = &mut self.report.slices;
            // Completions of a slice may arrive after the first of the next slice.
            let of_slice = slices.iter().rposition(|known| known.number == slice).unwrap_or_else(|| {
                let (from_due_ns, from_begin_ns) = Default::default();
                slices.push(LatencySlice {
                    number: slice,
                    phase: MeasurePhase::of(slice),
                    latencies_from_due_ns: from_due_ns,
                    latencies_from_begin_ns: from_begin_ns,
                });
                slices.len() - 1
            });
            let slice = &mut slices[of_slice];
            slice.latencies_from_due_ns.push(late_ns);
            slice.latencies_from_begin_ns.push(at.since(begun).0.max(1));
        }
        self.shared.completed.store(self.report.completed, Ordering::Release);
        ensure!(self.session.ended().is_none(), "the connection is lost: {:?}", self.session.ended());
        Ok(busy)
    }

    fn is_idle(&self) -> bool {
        self.keys.iter().all(|entry| entry.in_flight.is_none())
    }

    /// Stores every key once.
    fn store_all_keys(&mut self) -> Result<()> {
        while self.keys.iter().any(|entry| entry.version == 0) {
            let fresh = self.keys.iter().position(|entry| entry.version == 0 && entry.in_flight.is_none());
            if let Some(index) = fresh {
                self.next_key = index as u64;
                self.submit(now(), true)?;
            }
            if !self.poll()? {
                self.session.sockets_mut().wait(Nanos::from_millis(1));
            }
        }
        while !self.is_idle() {
            self.poll()?;
        }
        self.shared.max_latency_ns.store(0, Ordering::Release);
        Ok(())
    }

    fn run(mut self) -> Result<ReferenceClientReport> {
        let interval = Nanos(1_000_000_000 / self.plan.ops_per_s.max(1));
        let (mut due, mut count) = (now() + interval, 0_u64);
        while !self.shared.stop.load(Ordering::Acquire) {
            while due <= now() && self.submit(due, count % 2 == 0)? {
                count += 1;
                due = due + interval;
            }
            if !self.poll()? {
                // An overdue operation needs a free slot first, and so a completion.
                let span = if due <= now() { SLEEP_MAX } else { due.since(now()).min(SLEEP_MAX) };
                self.session.sockets_mut().wait(span);
            }
        }
        self.report.max_latency_ns = self.shared.max_latency_ns.load(Ordering::Acquire);
        // Verifies every key once more.
        while !self.is_idle() {
            self.poll()?;
        }
        for index in 0..self.keys.len() {
            self.next_key = index as u64;
            while !self.submit(now(), false)? {
                self.poll()?;
            }
        }
        while !self.is_idle() {
            self.poll()?;
        }
        disconnect(self.session, now);
        Ok(self.report)
    }
}
