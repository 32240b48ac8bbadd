//! The papers' client: threads with one operation each at a time, over one connection per core of the node.
//!
//! ```text
//!   thread: submit ─▶ connection policy ─▶ queue of the session ─▶ … ─▶ response ─▶ submit
//!                      in order: the first connection with fewer outstanding commands than the threshold
//!                      weighted: at random, in proportion to weights
//! ```
//! In: responses of the node, time. Out: operations and their results. Puts store new keys in a scattered order; gets
//! sample stored keys. Values are zeros.
//!
//! Invariants: each operation completes once and successfully; the submit limit is never exceeded.

use super::metrics::ClientStats;
use super::parameters::{KEY_BYTES, Operation, VALUE_BYTES};
use octokv_base::{Key, Nanos, Prng};
use octokv_client::{Command, Response, Session, StoreMode, Value};
use octokv_runtime::simulated::SimSockets;
use octokv_runtime::{CoreWaker, ReactorHandle};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Largest number of tenants with disjoint keys.
const TENANTS_MAX: u32 = 16;

/// Connection policy of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionPolicy {
    /// The first connection with fewer outstanding commands than this, else the one with fewest (OctoFAS §3.3).
    FillInOrder(usize),
    /// At random, with these weights.
    Weighted(Vec<u64>),
    /// All commands on the connection with this index.
    Single(usize),
}

/// The load and the counters of a tenant, shared by the experiment and its client.
#[derive(Debug)]
pub struct TenantWorkload {
    /// Operation of all requests.
    pub operation: Operation,
    /// Connection policy.
    pub connection_policy: ConnectionPolicy,
    /// Threads that issue requests, one operation in flight each.
    pub threads: usize,
    /// Upper bound of [`TenantWorkload::submitted`].
    pub submit_limit: u64,
    /// Operations submitted so far.
    pub submitted: u64,
    /// Operations completed so far.
    pub completed: u64,
    /// Counters since [`TenantWorkload::take_stats`].
    pub stats: ClientStats,
    /// Whether the session is live.
    pub is_connected: bool,
    /// The first failure.
    pub failure: Option<String>,
    /// Keys stored so far; reads draw from them.
    pub keys_stored: u32,
    /// By connection: its queue of the session.
    pub queue_of: Vec<usize>,
    /// Index of the tenant; tenants store disjoint keys.
    tenant: u32,
    /// By connection: outstanding commands.
    outstanding: Vec<u64>,
    accounted_until: Nanos,
    /// The waker of the client's core, once there is a client.
    client_waker: Option<Arc<CoreWaker>>,
}

impl TenantWorkload {
    /// Creates the state of a tenant without load.
    ///
    /// # Panics
    /// If `tenant` is not below the number of tenants with disjoint keys.
    pub fn new(tenant: u32, connections: usize) -> Rc<RefCell<TenantWorkload>> {
        assert!(tenant < TENANTS_MAX, "{tenant}");
        Rc::new(RefCell::new(TenantWorkload {
            operation: Operation::Put,
            connection_policy: ConnectionPolicy::FillInOrder(1),
            threads: 0,
            submit_limit: 0,
            submitted: 0,
            completed: 0,
            stats: ClientStats { outstanding_ns: vec![0; connections], ..ClientStats::default() },
            is_connected: false,
            failure: None,
            keys_stored: 0,
            queue_of: (0..connections).collect(),
            tenant,
            outstanding: vec![0; connections],
            accounted_until: Nanos::ZERO,
            client_waker: None,
        }))
    }

    /// Notifies the client's core of a change of the load: it may be asleep.
    pub fn notify_client(&self) {
        if let Some(client_waker) = &self.client_waker {
            client_waker.notify();
        }
    }

    /// Returns the counters since the last call and resets them.
    pub fn take_stats(&mut self, now: Nanos) -> ClientStats {
        self.account_until(now);
        let connections = self.outstanding.len();
        let empty = ClientStats { outstanding_ns: vec![0; connections], ..ClientStats::default() };
        std::mem::replace(&mut self.stats, empty)
    }

    fn account_until(&mut self, now: Nanos) {
        let span = now.since(self.accounted_until);
        for (sum, outstanding) in self.stats.outstanding_ns.iter_mut().zip(&self.outstanding) {
            *sum += u128::from(span.0) * u128::from(*outstanding);
        }
        self.accounted_until = now;
    }

    /// The key of a number of this tenant.
    fn key(&self, number: u32) -> Key {
        assert!(number < u32::MAX / TENANTS_MAX, "no more keys");
        scattered_key(self.tenant * (u32::MAX / TENANTS_MAX) + number)
    }

    fn choose_connection(&self, random: &mut Prng) -> usize {
        let fewest = || (0..self.outstanding.len()).min_by_key(|&at| self.outstanding[at]).unwrap_or(0);
        match &self.connection_policy {
            ConnectionPolicy::FillInOrder(threshold) => {
                let has_room = |outstanding: &u64| *outstanding < *threshold as u64;
                self.outstanding.iter().position(has_room).unwrap_or_else(fewest)
            }
            ConnectionPolicy::Weighted(shares) => draw_weighted(random, shares),
            ConnectionPolicy::Single(connection) => *connection,
        }
    }
}

/// Draws an index with a probability in proportion to its share.
fn draw_weighted(random: &mut Prng, shares: &[u64]) -> usize {
    let mut left = random.below(shares.iter().sum());
    for (index, &share) in shares.iter().enumerate() {
        if left < share {
            return index;
        }
        left -= share;
    }
    0
}

#[derive(Clone, Copy)]
struct OutstandingRequest {
    submitted_at: Nanos,
    connection: usize,
    operation: Operation,
}

/// The client's reactor.
pub struct WorkloadClient {
    session: Session<SimSockets>,
    handle: ReactorHandle,
    workload: Rc<RefCell<TenantWorkload>>,
    random: Prng,
    value: Arc<[u8]>,
    /// By thread: its request in flight.
    outstanding_by_thread: Vec<Option<OutstandingRequest>>,
    completions: Vec<(u64, Result<Response, octokv_client::Error>)>,
}

/// The key of a number: the number times an odd constant, so that consecutive numbers give distant keys.
pub fn scattered_key(number: u32) -> Key {
    let bytes: [u8; KEY_BYTES] = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
    Key::new(&bytes).expect("short")
}

impl WorkloadClient {
    /// Creates a client with the load `load`.
    pub fn new(
        session: Session<SimSockets>,
        handle: ReactorHandle,
        load: Rc<RefCell<TenantWorkload>>,
        random: Prng,
    ) -> WorkloadClient {
        let value = vec![0; VALUE_BYTES].into();
        load.borrow_mut().client_waker = Some(Arc::clone(handle.core_waker()));
        WorkloadClient {
            session,
            handle,
            workload: load,
            random,
            value,
            outstanding_by_thread: Vec::new(),
            completions: Vec::new(),
        }
    }

    /// Runs one iteration: delivers responses and submits. Returns false if there was no work.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        self.handle.begin_iteration(now);
        let mut busy = false;
        loop {
            let done = &mut self.completions;
            let polled = self.session.poll(now, |token, response| done.push((token, response)));
            let progressed = self.handle_responses(now) | self.submit(now);
            busy |= polled | progressed;
            if !progressed {
                break;
            }
        }
        self.handle.request_wakeup_at(self.session.next_deadline());
        busy
    }

    fn handle_responses(&mut self, now: Nanos) -> bool {
        let mut load = self.workload.borrow_mut();
        load.is_connected = self.session.is_live();
        if let Some(error) = self.session.ended() {
            load.failure.get_or_insert(format!("the session ended: {error}"));
        }
        if self.completions.is_empty() {
            return false;
        }
        load.account_until(now);
        for (token, response) in self.completions.drain(..) {
            let Some(request) = self.outstanding_by_thread[token as usize].take() else {
                load.failure.get_or_insert(format!("thread {token} received two responses"));
                continue;
            };
            load.outstanding[request.connection] -= 1;
            load.completed += 1;
            load.stats.completed += 1;
            load.stats.response_ns.push(now.since(request.submitted_at).0 as u32);
            let is_expected = match (&response, request.operation) {
                (Ok(Response::Stored), Operation::Put) => true,
                (Ok(Response::Value { data, .. }), Operation::Get) => data.len() == VALUE_BYTES,
                _ => false,
            };
            if !is_expected {
                load.failure.get_or_insert(format!("{:?} returned {response:?}", request.operation));
            }
        }
        true
    }

    fn submit(&mut self, now: Nanos) -> bool {
        let mut load = self.workload.borrow_mut();
        if !load.is_connected {
            return false;
        }
        let mut submitted = false;
        let threads = load.threads;
        self.outstanding_by_thread.resize(self.outstanding_by_thread.len().max(threads), None);
        for thread in 0..threads {
            if load.submitted >= load.submit_limit || self.outstanding_by_thread[thread].is_some() {
                continue;
            }
            let connection = load.choose_connection(&mut self.random);
            let command = match load.operation {
                Operation::Put => {
                    let key = load.key(load.keys_stored);
                    load.keys_stored += 1;
                    Command::Store {
                        key,
                        value: Value::Shared(Arc::clone(&self.value)),
                        mode: StoreMode::Upsert,
                    }
                }
                Operation::Get => {
                    let key = load.key(self.random.below(u64::from(load.keys_stored.max(1))) as u32);
                    Command::Retrieve { key, limit_bytes: VALUE_BYTES as u32 }
                }
            };
            if let Err(error) = self.session.submit_on(load.queue_of[connection], command, thread as u64) {
                load.failure.get_or_insert(format!("the session rejected a command: {error:?}"));
                return submitted;
            }
            load.account_until(now);
            load.outstanding[connection] += 1;
            load.submitted += 1;
            self.outstanding_by_thread[thread] =
                Some(OutstandingRequest { submitted_at: now, connection, operation: load.operation });
            submitted = true;
        }
        submitted
    }
}
