//! The honest host: stores and reads at a fixed rate, checks every byte, and takes the time.
//!
//! ```text
//!   due times at a fixed rate ──▶ store or retrieve, in turn ──▶ answer: right bytes? how late after it was due?
//! ```
//! In: a node, a rate. Out: [`Report`]. Latency counts from when an operation was due, so that a node that stalls is
//! not spared what it kept waiting. Each key has at most one operation on its way: what a read may find is known
//! exactly. Invariant: a wrong byte, a missing key or a lost connection ends the host with an error; that the node
//! says "busy" is an answer.

use anyhow::{Context, Result, anyhow, bail, ensure};
use octokv_base::{Key, Nanos, prng::mix};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_bench::values::Values;
use octokv_client::{Answer, Command, Error, Reconnect, Session, Settings, StoreMode, Value};
use octokv_runtime::RealSockets;
use octokv_sys::clock::now;
use octokv_sys::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::raw_connection::Victim;

/// The longest that a host sleeps.
const REST: Nanos = Nanos::from_millis(5);

/// What a host is to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Operations a second.
    pub rate: u64,
    /// Values have this many bytes at the most.
    pub value_bytes_max: usize,
    /// And this many at the least.
    pub value_bytes_min: usize,
    /// Its keys begin with this: hosts stay apart.
    pub prefix: &'static str,
    /// How many keys.
    pub keys: usize,
    /// Whether its thread goes before every other of the machine: for times that are the node's.
    pub goes_first: bool,
    /// Its host NQN.
    pub host: &'static str,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            rate: 500,
            value_bytes_max: 6000,
            value_bytes_min: 1,
            prefix: "honest",
            keys: 128,
            goes_first: false,
            host: "nqn.2026-11.io.octokv:honest",
        }
    }
}

/// Into which figures an operation goes that a host comes to begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Into none.
    Uncounted,
    /// Nobody attacks.
    Quiet,
    /// Somebody does.
    Attacked,
}

const PHASES: u32 = 3;

impl Phase {
    fn of(slice: u32) -> Phase {
        [Phase::Uncounted, Phase::Quiet, Phase::Attacked][(slice % PHASES) as usize]
    }
}

/// What a host saw.
#[derive(Clone, Debug)]
pub struct Report {
    /// Operations answered rightly.
    pub served: u64,
    /// Operations that the node was too busy for.
    pub busy: u64,
    /// The longest time from when an operation was due to its answer, in nanoseconds.
    pub worst_ns: u64,
    /// What was taken in each slice of time that counts, in their order.
    pub slices: Vec<Slice>,
}

/// A stretch of time that counts as one: how long its operations took, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Slice {
    number: u32,
    /// Whether somebody attacked.
    pub phase: Phase,
    /// From when they were due.
    pub from_due_ns: Vec<u64>,
    /// From when the host came to begin them: what passed before is its machine's, not the node's.
    pub from_begin_ns: Vec<u64>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// How many slices there were, and the phase of this one.
    slice: AtomicU32,
    served: AtomicU64,
    worst_ns: AtomicU64,
}

/// A host at work on a thread of its own.
pub struct Honest {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<Report>>,
}

impl Honest {
    /// Connects, stores every key once, and goes on at the plan's rate.
    ///
    /// # Errors
    /// When the node refuses, or is not what it should be.
    pub fn start(victim: &Victim, plan: Plan) -> Result<Honest> {
        let settings = Settings {
            subsystem: victim.nqn.clone(),
            host: plan.host.to_owned(),
            depth: 64,
            reconnect: Reconnect::Never,
            receive_bytes: 64 << 10,
            pool_bytes: 8 << 20,
            ..Settings::default()
        };
        let session = connect(victim.address, settings, now).map_err(|error| anyhow!("{error}"))?;
        let shared = Arc::<Shared>::default();
        let mut work = Work::new(session, plan, Arc::clone(&shared));
        work.fill()?;
        let goes_first = work.plan.goes_first;
        let thread = thread::spawn("honest", move || {
            if goes_first {
                thread::go_first().context("a real-time priority")?;
            }
            work.run()
        })?;
        Ok(Honest { shared, thread })
    }

    /// Operations answered so far.
    pub fn served(&self) -> u64 {
        self.shared.served.load(Ordering::Acquire)
    }

    /// The longest wait counts from here on.
    pub fn forget_the_worst(&self) {
        self.shared.worst_ns.store(0, Ordering::Release);
    }

    /// Operations that are begun from now on are a slice of their own.
    pub fn enter(&self, phase: Phase) {
        let before = self.shared.slice.load(Ordering::Acquire) / PHASES;
        self.shared.slice.store((before + 1) * PHASES + phase as u32, Ordering::Release);
    }

    /// Whether it has ended by itself, which only an error does.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it; gives what it saw.
    ///
    /// # Errors
    /// The first thing that was not right.
    pub fn finish(self) -> Result<Report> {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.join().map_err(|_| anyhow!("the honest host panicked"))?.context("the honest host")
    }
}

#[derive(Clone, Copy)]
struct Entry {
    version: u64,
    open: Option<Open>,
}

/// An operation on its way.
#[derive(Clone, Copy)]
struct Open {
    due: Nanos,
    begun: Nanos,
    slice: u32,
    /// What it stores, if it does.
    version: Option<u64>,
}

struct Work {
    session: Session<RealSockets>,
    plan: Plan,
    shared: Arc<Shared>,
    values: Values,
    entries: Vec<Entry>,
    value: Vec<u8>,
    next_version: u64,
    turn: u64,
    report: Report,
    /// When the host first came to begin the operation that is due, and in which slice, while it has no room for it.
    came: Option<(Nanos, u32)>,
}

impl Work {
    fn new(session: Session<RealSockets>, plan: Plan, shared: Arc<Shared>) -> Work {
        Work {
            session,
            values: Values::new(77, plan.value_bytes_max),
            entries: vec![Entry { version: 0, open: None }; plan.keys],
            value: vec![0; plan.value_bytes_max],
            plan,
            shared,
            next_version: 1,
            turn: 0,
            report: Report { served: 0, busy: 0, worst_ns: 0, slices: Vec::new() },
            came: None,
        }
    }

    fn key(&self, index: usize) -> Key {
        Key::new(format!("{}{index:06}", self.plan.prefix).as_bytes()).expect("a short key")
    }

    fn bytes_of(&self, version: u64) -> usize {
        let span = (self.plan.value_bytes_max - self.plan.value_bytes_min) as u64 + 1;
        self.plan.value_bytes_min + (mix(version) % span) as usize
    }

    /// Begins an operation that was due at `due`. False when no key or no slot is free.
    fn begin(&mut self, due: Nanos, stores: bool) -> Result<bool> {
        let here = (now(), self.shared.slice.load(Ordering::Acquire));
        let (begun, slice) = *self.came.get_or_insert(here);
        let count = self.entries.len() as u64;
        let found = (0..count).map(|step| ((self.turn + step) % count) as usize);
        let Some(index) = found.into_iter().find(|&index| self.entries[index].open.is_none()) else {
            return Ok(false);
        };
        if self.session.room() == 0 {
            ensure!(self.session.ended().is_none(), "{:?}", self.session.ended());
            return Ok(false);
        }
        self.turn = index as u64 + 1;
        let key = self.key(index);
        let version = stores.then_some(self.next_version);
        let submitted = match version {
            Some(version) => {
                let bytes = self.bytes_of(version);
                self.values.make(version, &mut self.value[..bytes]);
                let value = Value::Slice(&self.value[..bytes]);
                self.session.submit(Command::Store { key, value, mode: StoreMode::Upsert }, index as u64)
            }
            None => self.session.submit(Command::Retrieve { key, limit_bytes: u32::MAX }, index as u64),
        };
        submitted.map_err(|rejected| anyhow!("{rejected:?}"))?;
        self.next_version += u64::from(stores);
        self.came = None;
        self.entries[index].open = Some(Open { due, begun, slice, version });
        Ok(true)
    }

    /// Takes what came; gives whether anything did.
    fn poll(&mut self) -> Result<bool> {
        let mut answers = Vec::new();
        let busy = self.session.poll(now(), |token, answer| answers.push((token as usize, answer)));
        let at = now();
        for (index, answer) in answers {
            let Open { due, begun, slice, version } =
                self.entries[index].open.take().context("an answer to nothing")?;
            match (answer, version) {
                (Ok(Answer::Stored), Some(version)) => self.entries[index].version = version,
                (Ok(Answer::Value { data, full_bytes }), None) => {
                    let version = self.entries[index].version;
                    let right = data.len() == full_bytes as usize
                        && data.len() == self.bytes_of(version)
                        && self.values.is_right(version, &data);
                    ensure!(right, "key {} has a wrong value of {full_bytes} B", self.key(index));
                }
                (Err(Error::Busy), _) => {
                    self.report.busy += 1;
                    continue;
                }
                (answer, _) => bail!("key {}: {answer:?}", self.key(index)),
            }
            let late_ns = at.since(due).0.max(1);
            self.report.served += 1;
            self.shared.worst_ns.fetch_max(late_ns, Ordering::AcqRel);
            if Phase::of(slice) == Phase::Uncounted {
                continue;
            }
            let slices = &mut self.report.slices;
            // An answer may come after those of the next slice have begun to come.
            let of_slice = slices.iter().rposition(|known| known.number == slice).unwrap_or_else(|| {
                let (from_due_ns, from_begin_ns) = Default::default();
                slices.push(Slice { number: slice, phase: Phase::of(slice), from_due_ns, from_begin_ns });
                slices.len() - 1
            });
            let slice = &mut slices[of_slice];
            slice.from_due_ns.push(late_ns);
            slice.from_begin_ns.push(at.since(begun).0.max(1));
        }
        self.shared.served.store(self.report.served, Ordering::Release);
        ensure!(self.session.ended().is_none(), "lost its connection: {:?}", self.session.ended());
        Ok(busy)
    }

    fn is_idle(&self) -> bool {
        self.entries.iter().all(|entry| entry.open.is_none())
    }

    /// Stores every key once.
    fn fill(&mut self) -> Result<()> {
        while self.entries.iter().any(|entry| entry.version == 0) {
            let fresh = self.entries.iter().position(|entry| entry.version == 0 && entry.open.is_none());
            if let Some(index) = fresh {
                self.turn = index as u64;
                self.begin(now(), true)?;
            }
            if !self.poll()? {
                self.session.sockets_mut().wait(Nanos::from_millis(1));
            }
        }
        while !self.is_idle() {
            self.poll()?;
        }
        self.shared.worst_ns.store(0, Ordering::Release);
        Ok(())
    }

    fn run(mut self) -> Result<Report> {
        let interval = Nanos(1_000_000_000 / self.plan.rate.max(1));
        let (mut due, mut count) = (now() + interval, 0_u64);
        while !self.shared.stop.load(Ordering::Acquire) {
            while due <= now() && self.begin(due, count % 2 == 0)? {
                count += 1;
                due = due + interval;
            }
            if !self.poll()? {
                // What was due already waits for a free slot, and so for an answer.
                let span = if due <= now() { REST } else { due.since(now()).min(REST) };
                self.session.sockets_mut().wait(span);
            }
        }
        self.report.worst_ns = self.shared.worst_ns.load(Ordering::Acquire);
        // Everything that was stored is read once more.
        while !self.is_idle() {
            self.poll()?;
        }
        for index in 0..self.entries.len() {
            self.turn = index as u64;
            while !self.begin(now(), false)? {
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
