//! Clients of the simulated node: closed loops of a given number of requests in flight, or requests that arrive at a rate.
//!
//! ```text
//!   issue ─▶ (flow control) ─▶ queue of the core that owns the key ─▶ engine ─▶ end ─▶ complete ─▶ (closed loop) issue
//!                          one way                                            one way
//! ```
//! In: a load, an engine for each core. Out: [`NodeStats`], or why a request failed: every value that is read is compared with its key.
//!
//! Clients take turns with the requests. Latencies are those from the issue of a request, its time in the queue of its client included.
//!
//! Invariant: a core receives a request not before the core that caused it has done its work.

use super::client_flows::ClientFlows;
use super::node_stats::NodeStats;
use super::workload::{NodeOperation, NodeRequest, NodeWorkload, OperationSource};
use crate::simulation::log_store::load_client::{object_key, value_start};
use crate::simulation::log_store::load_stats::Moment;
use crate::simulation::log_store::parameters::KEY_BYTES;
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::{Buffer, Nanos};
use octokv_engine::{Engine, PutMode, PutOutcome, SwapReport};
use octokv_nvmf::TokenHold;
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::SimEnv;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// When requests begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeArrivals {
    /// Closed loop: so many in flight.
    InFlight(usize),
    /// Open loop: at random times, on average one in this time.
    OneIn(Nanos),
}

/// A load on the node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeLoad {
    /// Its operations.
    pub workload: NodeWorkload,
    /// When they begin.
    pub arrivals: NodeArrivals,
    /// Requests before the measured ones.
    pub warm_up: u32,
    /// Measured requests.
    pub measured: u32,
    /// Seed of all random choices.
    pub seed: u64,
}

/// The counters of all parts at one moment.
pub struct NodeMoment {
    /// By drive: its commands and dies, and the volume on it.
    pub drives: Vec<Moment>,
    /// By drive: what swapping did with its keys.
    pub swaps: Vec<SwapReport>,
    /// The time that all cores have worked.
    pub core_time: Nanos,
}

/// A request at the node.
struct ArrivedRequest {
    request: NodeRequest,
    at: Nanos,
    hold: Option<TokenHold>,
}

#[derive(Default)]
struct CoreQueue {
    requests: RefCell<VecDeque<ArrivedRequest>>,
    waker: RefCell<Option<Waker>>,
}

struct NodeLoadState {
    load: NodeLoad,
    source: OperationSource,
    issued: u32,
    completed: u32,
    stats: NodeStats,
}

/// The places of a key: its drive, and the core that owns it.
pub type PlaceOfKey = Box<dyn Fn(u32) -> (usize, usize)>;

/// The network between clients and node.
pub struct ClientPath {
    /// The delay of a request, and of a response.
    pub one_way: Nanos,
    /// The clients.
    pub clients: usize,
    /// Flow control of the clients; `None`: each request is sent when it is issued.
    pub flows: Option<ClientFlows>,
}

/// Clients of all cores.
pub struct NodeClients {
    sim: SimEnv,
    queues: Vec<CoreQueue>,
    path: ClientPath,
    place_of: PlaceOfKey,
    moment: Box<dyn Fn() -> NodeMoment>,
    value_bytes: usize,
    state: RefCell<Option<NodeLoadState>>,
    failure: RefCell<Option<String>>,
}

impl NodeClients {
    /// Clients of so many cores; `place_of` has the places of an object's key, `moment` the counters of all parts.
    pub fn new(
        sim: &SimEnv,
        cores: usize,
        value_bytes: u32,
        path: ClientPath,
        place_of: PlaceOfKey,
        moment: Box<dyn Fn() -> NodeMoment>,
    ) -> Rc<NodeClients> {
        let queues = (0..cores).map(|_| CoreQueue::default()).collect();
        Rc::new(NodeClients {
            sim: sim.clone(),
            queues,
            path,
            place_of,
            moment,
            value_bytes: value_bytes as usize,
            state: RefCell::default(),
            failure: RefCell::default(),
        })
    }

    /// Begins a load on a node with `present` of `objects` objects.
    pub fn begin(self: &Rc<Self>, load: NodeLoad, present: u32, objects: u32) {
        let source = OperationSource::new(load.workload, present, objects, load.seed);
        let state = NodeLoadState { load, source, issued: 0, completed: 0, stats: NodeStats::default() };
        *self.state.borrow_mut() = Some(state);
        if load.warm_up == 0 {
            self.note_begin();
        }
        match load.arrivals {
            NodeArrivals::InFlight(requests) => (0..requests).for_each(|_| self.issue(self.sim.now())),
            NodeArrivals::OneIn(_) => self.arrive_after(self.sim.now()),
        }
    }

    /// Whether a load has failed, or has ended with no request in flight.
    pub fn is_done(&self) -> bool {
        let state = self.state.borrow();
        let is_over =
            |state: &NodeLoadState| state.completed == state.issued && state.completed >= state.total();
        self.failure.borrow().is_some() || state.as_ref().is_none_or(is_over)
    }

    /// The result of the load that has ended, and the number of objects that exist.
    ///
    /// # Errors
    /// A message if a request failed or a value was wrong.
    ///
    /// # Panics
    /// Without a load.
    pub fn take_stats(&self) -> Result<(NodeStats, u32), String> {
        let state = self.state.take().expect("a load was begun");
        self.failure.take().map_or(Ok((state.stats, state.source.present())), Err)
    }

    /// Notes why the load fails.
    pub fn fail(&self, error: String) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    /// Issues the next request at a time, unless the load ends.
    fn issue(self: &Rc<Self>, at: Nanos) {
        let mut state = self.state.borrow_mut();
        let Some(state) = state.as_mut().filter(|state| state.issues_more()) else { return };
        state.issued += 1;
        let (operation, number) = state.source.draw();
        let client = state.issued as usize % self.path.clients;
        let request = NodeRequest { operation, number, client, issued: at };
        match &self.path.flows {
            None => self.send(request, at),
            Some(flows) => {
                flows.enqueue(client, (self.place_of)(number).0, request);
                self.send_allowed(client, at);
            }
        }
    }

    /// Sends the requests of a client that its windows allow.
    fn send_allowed(self: &Rc<Self>, client: usize, at: Nanos) {
        let Some(flows) = &self.path.flows else { return };
        flows.sendable(client).into_iter().for_each(|request| self.send(request, at));
    }

    fn send(self: &Rc<Self>, request: NodeRequest, at: Nanos) {
        let (clients, core) = (Rc::clone(self), (self.place_of)(request.number).1);
        let at = at + self.path.one_way;
        self.sim.schedule_at(at, move || {
            let hold = clients.path.flows.as_ref().and_then(|flows| flows.begin(request.client, request));
            let queue = &clients.queues[core];
            queue.requests.borrow_mut().push_back(ArrivedRequest { request, at, hold });
            if let Some(waker) = queue.waker.borrow().as_ref() {
                waker.wake_by_ref();
            }
        });
    }

    /// Issues a request at a random time after another, and so on.
    fn arrive_after(self: &Rc<Self>, before: Nanos) {
        let mut state = self.state.borrow_mut();
        let Some(state) = state.as_mut().filter(|state| state.issued < state.total()) else { return };
        let NodeArrivals::OneIn(mean) = state.load.arrivals else { return };
        let at = before + Nanos((state.source.interval() * mean.0 as f64) as u64);
        let clients = Rc::clone(self);
        self.sim.schedule_at(at, move || {
            clients.issue(at);
            clients.arrive_after(at);
        });
    }

    fn note_begin(&self) {
        let NodeMoment { drives, swaps, core_time } = (self.moment)();
        let mut state = self.state.borrow_mut();
        let stats = &mut state.as_mut().expect("a load runs").stats;
        stats.drives.resize_with(drives.len(), Default::default);
        stats.drives.iter_mut().zip(drives).for_each(|(drive, before)| drive.before = before);
        stats.swaps_before = swaps;
        stats.core_time = core_time;
    }

    fn note_end(&self) {
        let NodeMoment { drives, swaps, core_time } = (self.moment)();
        let mut state = self.state.borrow_mut();
        let stats = &mut state.as_mut().expect("a load runs").stats;
        stats.drives.iter_mut().zip(drives).for_each(|(drive, after)| drive.after = after);
        stats.swaps_after = swaps;
        stats.core_time = core_time - stats.core_time;
    }

    /// A request ended at the node: its response is on its way.
    fn end(self: &Rc<Self>, arrived: ArrivedRequest, at: Nanos) {
        let ArrivedRequest { request, at: arrived_at, hold } = arrived;
        if let Some(state) = &mut *self.state.borrow_mut()
            && state.is_measured(state.completed + 1)
        {
            state.stats.node_latency_ns.push((at - arrived_at).0.try_into().unwrap_or(u32::MAX));
        }
        let window = hold.map(|hold| hold.end(1));
        // The order of events of loads without a network is that of their published figures.
        if self.path.one_way == Nanos::ZERO {
            return self.complete(request, window, at);
        }
        let (clients, at) = (Rc::clone(self), at + self.path.one_way);
        self.sim.schedule_at(at, move || clients.complete(request, window, at));
    }

    /// The response of a request is at its client.
    fn complete(self: &Rc<Self>, request: NodeRequest, window: Option<u32>, at: Nanos) {
        let NodeRequest { operation, number, client, issued } = request;
        if let Some(flows) = &self.path.flows {
            flows.complete(client, (self.place_of)(number).0, operation, window);
        }
        let (is_begin, is_end, is_closed_loop) = {
            let mut state = self.state.borrow_mut();
            let state = state.as_mut().expect("a load runs");
            state.completed += 1;
            if operation == NodeOperation::Write {
                state.source.note_written(number);
            }
            if state.is_measured(state.completed) {
                let latencies = &mut state.stats.drives[(self.place_of)(number).0].latency_ns;
                let kind = usize::from(operation != NodeOperation::Read);
                latencies[kind].push((at - issued).0.try_into().unwrap_or(u32::MAX));
            }
            let is_begin = state.completed == state.load.warm_up;
            let is_closed_loop = matches!(state.load.arrivals, NodeArrivals::InFlight(_));
            (is_begin, state.completed == state.total(), is_closed_loop)
        };
        if is_begin {
            self.note_begin();
        }
        if is_end {
            self.note_end();
        }
        if is_closed_loop {
            self.issue(at);
        }
        self.send_allowed(client, at);
    }

    /// Executes the requests of a core until it is dropped.
    pub async fn serve<E: Engine>(self: Rc<Self>, core: usize, engine: Rc<E>, handle: ReactorHandle) {
        let (clients, queue) = (&self, &self.queues[core]);
        let mut running = FuturesUnordered::new();
        let next = || queue.requests.borrow_mut().pop_front();
        poll_fn(|context| {
            *queue.waker.borrow_mut() = Some(context.waker().clone());
            while let Some(arrived) = next() {
                let (engine, handle) = (&engine, &handle);
                running.push(async move {
                    match clients.execute(&**engine, arrived.request).await {
                        Ok(()) => {
                            clients.end(arrived, handle.now() + handle.cpu_time().iteration_elapsed());
                        }
                        Err(error) => {
                            clients.fail(error);
                        }
                    }
                });
            }
            while let Poll::Ready(Some(())) = running.poll_next_unpin(context) {}
            Poll::<()>::Pending
        })
        .await;
    }

    async fn execute<E: Engine>(&self, engine: &E, request: NodeRequest) -> Result<(), String> {
        let NodeRequest { operation, number, .. } = request;
        let key = object_key(number);
        if operation != NodeOperation::Write {
            let value = engine.get(&key).await.map_err(|error| format!("get {number}: {error}"))?;
            let value = value.ok_or_else(|| format!("get {number}: missing"))?;
            let bytes = value.as_bytes();
            if bytes.len() != self.value_bytes || !bytes.starts_with(&value_start(number)) {
                return Err(format!("get {number}: another value"));
            }
        }
        if operation != NodeOperation::Read {
            let from = engine.record_layout().value_offset(KEY_BYTES);
            let mut record = Buffer::zeroed(from + self.value_bytes);
            record[from..from + 8].copy_from_slice(&value_start(number));
            match engine.put(&key, PutMode::Upsert, record, self.value_bytes).await {
                Ok(PutOutcome::Stored) => {}
                other => return Err(format!("put {number}: {other:?}")),
            }
        }
        Ok(())
    }
}

impl NodeLoadState {
    fn total(&self) -> u32 {
        self.load.warm_up + self.load.measured
    }

    /// Whether the completion with this number is one of the measured ones.
    fn is_measured(&self, completion: u32) -> bool {
        (self.load.warm_up + 1..=self.total()).contains(&completion)
    }

    /// A closed loop has its requests in flight up to its end; the fill inserts each object once.
    fn issues_more(&self) -> bool {
        match self.load.arrivals {
            NodeArrivals::InFlight(_) if self.load.workload != NodeWorkload::FILL => {
                self.completed < self.total()
            }
            _ => self.issued < self.total(),
        }
    }
}
