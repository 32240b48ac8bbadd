//! The clients of the log-store simulation: gets, puts and deletes on an engine, in closed loops or at a rate.
//!
//! ```text
//!   warm-up ─▶ moment ─▶ measured requests ─▶ moment       each client begins a request when its last one has ended, or when the next arrives
//! ```
//! In: an engine with objects, a [`Load`]. Out: [`LoadStats`], or what was wrong: every value that is read is compared with its key.

use super::load_stats::{LoadStats, Moment};
use super::parameters::{KEY_BYTES, ZIPF_SKEW};
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::{Buffer, Key, Nanos, Prng};
use octokv_bench::key_distribution::{KeyDistribution, KeySampler};
use octokv_engine::{DeleteOutcome, Engine, PutMode, PutOutcome};
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;

/// What is stored: objects 0 to `count` − 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredObjects {
    /// Their number.
    pub count: u32,
    /// Length of each value.
    pub value_bytes: u32,
}

/// The requests of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// Puts of all objects, each once.
    Fill,
    /// Gets and puts of existing objects, so many percent of them puts, all objects equally often.
    Uniform(u8),
    /// The same, a few of the objects most often.
    Zipf(u8),
    /// Deletes of the first objects.
    Deletes,
    /// Puts of the first objects.
    PutsInOrder,
}

/// When requests begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// A client begins one when its last one has ended.
    WhenOthersEnd,
    /// They arrive at random times, on average one in this time, and wait for a client. Latencies count from the arrival.
    OneIn(Nanos),
}

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Its requests.
    pub kind: LoadKind,
    /// Requests in flight, at most if they arrive at a rate.
    pub depth: usize,
    /// When they begin.
    pub arrivals: Arrivals,
    /// Requests before the measured ones.
    pub warm_up: u32,
    /// Measured requests.
    pub measured: u32,
    /// Seed of the choice of objects.
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Get = 0,
    Put = 1,
    Delete = 2,
}

/// The state that the clients of a load share.
struct LoadState {
    load: Load,
    objects: StoredObjects,
    random: Prng,
    sampler: KeySampler,
    /// When the last request arrived, with [`Arrivals::OneIn`].
    arrived_at: Nanos,
    begun: u32,
    completed: u32,
    stats: LoadStats,
}

/// The key of an object.
pub fn object_key(number: u32) -> Key {
    let mut bytes = [0; KEY_BYTES];
    bytes[KEY_BYTES - 4..].copy_from_slice(&number.to_be_bytes());
    Key::new(&bytes).expect("16 bytes")
}

/// The start of each value; the rest is zeros.
pub fn value_start(number: u32) -> [u8; 8] {
    octokv_base::prng::mix64(u64::from(number)).to_le_bytes()
}

impl LoadState {
    fn total(&self) -> u32 {
        self.load.warm_up + self.load.measured
    }

    /// When the next request arrives, if they arrive at a rate.
    fn next_arrival(&mut self) -> Option<Nanos> {
        let Arrivals::OneIn(mean) = self.load.arrivals else { return None };
        // Independent arrivals: times between them are exponentially distributed. From (0, 1], whose logarithm is finite.
        let uniform = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        self.arrived_at = self.arrived_at + Nanos((-(1.0 - uniform).ln() * mean.0 as f64) as u64);
        Some(self.arrived_at)
    }

    /// The next request, unless the load ends.
    fn next(&mut self) -> Option<(Request, u32)> {
        let (number, is_in_order) =
            (self.begun, !matches!(self.load.kind, LoadKind::Uniform(_) | LoadKind::Zipf(_)));
        // Loads at random have requests in flight up to their end.
        if self.completed >= self.total() || is_in_order && number >= self.total() {
            return None;
        }
        self.begun += 1;
        Some(match self.load.kind {
            LoadKind::Fill | LoadKind::PutsInOrder => (Request::Put, number),
            LoadKind::Deletes => (Request::Delete, number),
            LoadKind::Uniform(put_percent) | LoadKind::Zipf(put_percent) => {
                let is_put = self.random.below(100) < u64::from(put_percent);
                let number = self.sampler.sample(self.objects.count.into(), &mut self.random) as u32;
                (if is_put { Request::Put } else { Request::Get }, number)
            }
        })
    }

    /// Notes the end of a request.
    fn end(&mut self, request: Request, span: Nanos, moment: &impl Fn() -> Moment) {
        self.completed += 1;
        if (self.load.warm_up + 1..=self.total()).contains(&self.completed) {
            self.stats.latency_ns[request as usize].push(span.0.try_into().unwrap_or(u32::MAX));
        }
        if self.completed == self.load.warm_up {
            self.stats.before = moment();
        }
        if self.completed == self.total() {
            self.stats.after = moment();
        }
    }
}

/// Runs a load to its end. `moment` gives the counters of all parts.
///
/// # Errors
/// A message if a request failed, or a value was wrong.
///
/// # Panics
/// If a load in order has more requests than there are objects.
pub async fn run_load<E: Engine>(
    engine: &E,
    handle: &ReactorHandle,
    objects: StoredObjects,
    load: Load,
    moment: impl Fn() -> Moment,
) -> Result<LoadStats, String> {
    let distribution = match load.kind {
        LoadKind::Zipf(_) => KeyDistribution::Zipf,
        _ => KeyDistribution::Uniform,
    };
    let state = RefCell::new(LoadState {
        load,
        objects,
        random: Prng::new(load.seed),
        sampler: KeySampler::new(distribution, ZIPF_SKEW, objects.count.into(), load.seed),
        arrived_at: handle.now(),
        begun: 0,
        completed: 0,
        stats: LoadStats::default(),
    });
    let is_at_random = matches!(load.kind, LoadKind::Uniform(_) | LoadKind::Zipf(_));
    assert!(is_at_random || state.borrow().total() <= objects.count, "{load:?} of {objects:?}");
    if load.warm_up == 0 {
        state.borrow_mut().stats.before = moment();
    }
    let mut clients: FuturesUnordered<_> =
        (0..load.depth).map(|_| run_client(engine, handle, &state, &moment)).collect();
    while let Some(ended) = clients.next().await {
        ended?;
    }
    drop(clients);
    Ok(state.into_inner().stats)
}

async fn run_client<E: Engine>(
    engine: &E,
    handle: &ReactorHandle,
    state: &RefCell<LoadState>,
    moment: &impl Fn() -> Moment,
) -> Result<(), String> {
    // The core's work before this request, in the same iteration, delays it.
    let time = || handle.now() + handle.cpu_time().iteration_elapsed();
    let value_bytes = state.borrow().objects.value_bytes as usize;
    loop {
        let Some((request, number)) = state.borrow_mut().next() else { return Ok(()) };
        let key = object_key(number);
        let arrival = state.borrow_mut().next_arrival();
        if let Some(arrival) = arrival {
            handle.sleep_until(arrival).await;
        }
        let began = arrival.unwrap_or_else(time);
        match request {
            Request::Get => {
                let value = engine.get(&key).await.map_err(|error| format!("get {number}: {error}"))?;
                let value = value.ok_or_else(|| format!("get {number}: missing"))?;
                let bytes = value.as_bytes();
                if bytes.len() != value_bytes || !bytes.starts_with(&value_start(number)) {
                    return Err(format!("get {number}: another value"));
                }
            }
            Request::Put => {
                let from = engine.record_layout().value_offset(KEY_BYTES);
                let mut record = Buffer::zeroed(from + value_bytes);
                record[from..from + 8].copy_from_slice(&value_start(number));
                match engine.put(&key, PutMode::Upsert, record, value_bytes).await {
                    Ok(PutOutcome::Stored) => {}
                    other => return Err(format!("put {number}: {other:?}")),
                }
            }
            Request::Delete => match engine.delete(&key).await {
                Ok(DeleteOutcome::Deleted) => {}
                other => return Err(format!("delete {number}: {other:?}")),
            },
        }
        state.borrow_mut().end(request, time() - began, moment);
    }
}
