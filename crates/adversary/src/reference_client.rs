//! The honest host: stores and reads at a fixed rate, checks every byte, and takes the time.
//!
//! ```text
//!   due times at a fixed rate ──▶ store or retrieve, in turn ──▶ answer: right bytes? how late after it was due?
//! ```
//! In: a node, a rate. Out: [`ReferenceClientReport`]. Latency counts from when an operation was due, so that a node that stalls is
//! not spared what it kept waiting. Each key has at most one operation on its way: what a read may find is known
//! exactly. Invariant: a wrong byte, a missing key or a lost connection ends the host with an error; that the node
//! says "busy" is an answer.

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

/// The longest that a host sleeps.
const SLEEP_MAX: Nanos = Nanos::from_millis(5);

/// What a host is to do.
#[derive(Clone, Debug)]
pub struct ReferenceClientConfig {
    /// Operations a second.
    pub ops_per_s: u64,
    /// Values have this many bytes at the most.
    pub value_bytes_max: usize,
    /// And this many at the least.
    pub value_bytes_min: usize,
    /// Its keys begin with this: hosts stay apart.
    pub prefix: &'static str,
    /// How many keys.
    pub key_count: usize,
    /// Whether its thread goes before every other of the machine: for times that are the node's.
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
            prefix: "honest",
            key_count: 128,
            realtime_priority: false,
            host_nqn: "nqn.2026-11.io.octokv:honest",
        }
    }
}

/// Into which figures an operation goes that a host comes to begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MeasurePhase {
    /// Into none.
    Uncounted,
    /// Nobody attacks.
    Quiet,
    /// Somebody does.
    Attacked,
}

const PHASES: u32 = 3;

impl MeasurePhase {
    fn of(slice: u32) -> MeasurePhase {
        [MeasurePhase::Uncounted, MeasurePhase::Quiet, MeasurePhase::Attacked][(slice % PHASES) as usize]
    }
}

/// What a host saw.
#[derive(Clone, Debug)]
pub struct ReferenceClientReport {
    /// Operations answered rightly.
    pub completed: u64,
    /// Operations that the node was too busy for.
    pub busy_responses: u64,
    /// The longest time from when an operation was due to its answer, in nanoseconds.
    pub max_latency_ns: u64,
    /// What was taken in each slice of time that counts, in their order.
    pub slices: Vec<LatencySlice>,
}

/// A stretch of time that counts as one: how long its operations took, in nanoseconds.
#[derive(Clone, Debug)]
pub struct LatencySlice {
    number: u32,
    /// Whether somebody attacked.
    pub phase: MeasurePhase,
    /// From when they were due.
    pub latencies_from_due_ns: Vec<u64>,
    /// From when the host came to begin them: what passed before is its machine's, not the node's.
    pub latencies_from_begin_ns: Vec<u64>,
}

#[derive(Default)]
struct ReferenceClientShared {
    stop: AtomicBool,
    /// How many slices there were, and the phase of this one.
    slice: AtomicU32,
    completed: AtomicU64,
    max_latency_ns: AtomicU64,
}

/// A host at work on a thread of its own.
pub struct ReferenceClient {
    shared: Arc<ReferenceClientShared>,
    thread: JoinHandle<Result<ReferenceClientReport>>,
}

impl ReferenceClient {
    /// Connects, stores every key once, and goes on at the plan's rate.
    ///
    /// # Errors
    /// When the node refuses, or is not what it should be.
    pub fn start(target: &TargetAddr, plan: ReferenceClientConfig) -> Result<ReferenceClient> {
        let settings = ClientConfig {
            subsystem_nqn: target.nqn.clone(),
            host_nqn: plan.host_nqn.to_owned(),
            queue_depth: 64,
            reconnect: Reconnect::Never,
            receive_buffer_bytes: 64 << 10,
            pool_bytes: 8 << 20,
            ..ClientConfig::default()
        };
        let session = connect(target.address, settings, now).map_err(|error| anyhow!("{error}"))?;
        let shared = Arc::<ReferenceClientShared>::default();
        let mut work = ReferenceClientWorker::new(session, plan, Arc::clone(&shared));
        work.store_all_keys()?;
        let realtime_priority = work.plan.realtime_priority;
        let thread = thread::spawn("honest", move || {
            if realtime_priority {
                thread::set_realtime_priority().context("a real-time priority")?;
            }
            work.run()
        })?;
        Ok(ReferenceClient { shared, thread })
    }

    /// Operations answered so far.
    pub fn completed(&self) -> u64 {
        self.shared.completed.load(Ordering::Acquire)
    }

    /// The longest wait counts from here on.
    pub fn reset_max_latency(&self) {
        self.shared.max_latency_ns.store(0, Ordering::Release);
    }

    /// Operations that are begun from now on are a slice of their own.
    pub fn begin_slice(&self, phase: MeasurePhase) {
        let before = self.shared.slice.load(Ordering::Acquire) / PHASES;
        self.shared.slice.store((before + 1) * PHASES + phase as u32, Ordering::Release);
    }

    /// Whether it has ended by itself, which only an error does.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it; gives what it saw.
    ///
    /// # Errors
    /// The first thing that was not right.
    pub fn finish(self) -> Result<ReferenceClientReport> {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("the honest host panicked"))?.context("the honest host")
    }
}

#[derive(Clone, Copy)]
struct ReferenceKey {
    version: u64,
    in_flight: Option<InFlightOperation>,
}

/// An operation on its way.
#[derive(Clone, Copy)]
struct InFlightOperation {
    due: Nanos,
    begun: Nanos,
    slice: u32,
    /// What it stores, if it does.
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
    /// When the host first came to begin the operation that is due, and in which slice, while it has no room for it.
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
        Key::new(format!("{}{index:06}", self.plan.prefix).as_bytes()).expect("a short key")
    }

    fn value_bytes_of(&self, version: u64) -> usize {
        let span = (self.plan.value_bytes_max - self.plan.value_bytes_min) as u64 + 1;
        self.plan.value_bytes_min + (mix64(version) % span) as usize
    }

    /// Begins an operation that was due at `due`. False when no key or no slot is free.
    fn submit(&mut self, due: Nanos, stores: bool) -> Result<bool> {
        let here = (now(), self.shared.slice.load(Ordering::Acquire));
        let (begun, slice) = *self.first_attempt.get_or_insert(here);
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

    /// Takes what came; gives whether anything did.
    fn poll(&mut self) -> Result<bool> {
        let mut answers = Vec::new();
        let busy = self.session.poll(now(), |token, answer| answers.push((token as usize, answer)));
        let at = now();
        for (index, answer) in answers {
            let InFlightOperation { due, begun, slice, version } =
                self.keys[index].in_flight.take().context("an answer to nothing")?;
            match (answer, version) {
                (Ok(Response::Stored), Some(version)) => self.keys[index].version = version,
                (Ok(Response::Value { data, full_bytes }), None) => {
                    let version = self.keys[index].version;
                    let right = data.len() == full_bytes as usize
                        && data.len() == self.value_bytes_of(version)
                        && self.values.matches(version, &data);
                    ensure!(right, "key {} has a wrong value of {full_bytes} B", self.key(index));
                }
                (Err(Error::Busy), _) => {
                    self.report.busy_responses += 1;
                    continue;
                }
                (answer, _) => bail!("key {}: {answer:?}", self.key(index)),
            }
            let late_ns = at.since(due).0.max(1);
            self.report.completed += 1;
            self.shared.max_latency_ns.fetch_max(late_ns, Ordering::AcqRel);
            if MeasurePhase::of(slice) == MeasurePhase::Uncounted {
                continue;
            }
            let slices = &mut self.report.slices;
            // An answer may come after those of the next slice have begun to come.
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
        ensure!(self.session.ended().is_none(), "lost its connection: {:?}", self.session.ended());
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
                // What was due already waits for a free slot, and so for an answer.
                let span = if due <= now() { SLEEP_MAX } else { due.since(now()).min(SLEEP_MAX) };
                self.session.sockets_mut().wait(span);
            }
        }
        self.report.max_latency_ns = self.shared.max_latency_ns.load(Ordering::Acquire);
        // Everything that was stored is read once more.
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
