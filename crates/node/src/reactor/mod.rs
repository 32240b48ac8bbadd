//! One core of a node: takes turns, each of which moves everything on that can move.
//!
//! ```text
//!   turn:  timers ─▶ accept ─▶ mailbox ─▶ sockets (P1) ─▶ requests are given to workers ─▶ workers that were woken
//!          ─▶ device completions (P2) ─▶ workers that these woke ─▶ outcomes to connections ─▶ one send each
//! ```
//! In: a driver (kernel or virtual), the stores of the namespaces, a target. Out: whether the turn did anything. Holds: the
//! connections of this core and what works on their requests. The three stages target, kv and device are
//! timed apart.
//!
//! Invariants: a request's answer leaves by the connection it came on; a link is forgotten only when none of
//! its requests is out; what does not fit (workers, buffers, unsent replies) stops the reading of sockets.
//! The first core accepts and deals connections to all cores in turn, admin queues that are known for such left out.
//!
//! # Layout
//! - this file: what a core is made of, and its turn.
//! - `intake`: what comes in: connections, messages of other cores, bytes, requests.
//! - `replies`: what goes out: outcomes, bytes, the ends of links.

mod egress;
mod ingress;

use crate::bug_injection::{self, InjectedBug};
use crate::connection_io::{ConnectionIo, RECEIVE_BUFFER_BYTES};
use crate::connection_queue::ConnectionQueue;
use crate::core_metrics::{MetricsWriter, RequestTiming};
use crate::log_limiter::LogRateLimiter;
use crate::monitor::{Monitor, MonitorDuty};
use crate::namespace_table::{NamespaceTable, RemovedNamespaces};
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::request_scheduler::RequestScheduler;
use crate::time_budget::IterationBudget;
use octokv_base::map::FxHashMap;
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_engine::Engine;
use octokv_nvmf::{IoRequest, RequestOutcome, Target};
use octokv_runtime::{
    DetachedSocket, DeviceHandle, JobSlot, ListenerId, Mailbox, ReactorHandle, SocketId, Sockets, Stage,
    WorkerPool,
};
use octokv_sched::{CoreId, TenantId};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// How often a core with connections looks at their deadlines, at the least.
const TICK_INTERVAL_MAX: Nanos = Nanos::from_millis(50);

/// Connections that are accepted in one turn, of each listener: a flood of them leaves time for those that are there.
const ACCEPTS_PER_ITERATION: usize = 2;

/// How long the requests of a fair queue are begun one after the other before sockets are looked at again: who asks for
/// little may have come meanwhile.
const FAIR_DISPATCH_MAX: Nanos = Nanos::from_micros(20);

/// Requests of one flow that wait for their turn hold at most about this part of a core's buffers.
const TENANT_BUFFER_DIVISOR: usize = 8;

/// Of so many connections the network's round trip is asked for at the end of a window.
const RTT_SAMPLES_PER_INTERVAL: usize = 32;

/// Connections that are closed at once: replies go before them, and a flood of them leaves time.
const CLOSES_PER_ITERATION: usize = 2;

/// What cores tell each other.
pub enum CoreMessage {
    /// Take over a connection that was just accepted.
    NewConnection {
        /// The socket.
        socket: DetachedSocket,
        /// Our address.
        local: SocketAddr,
        /// The host's address.
        peer: SocketAddr,
    },
    /// Carry out a request of a connection of mine.
    Execute(PendingRequest),
    /// What came of a request of a connection of yours.
    Completed(RequestCompletion),
}

/// What requests cost a core of a virtual world, where nothing takes time by itself. On a real core time passes by itself,
/// and these are not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedCosts {
    /// To receive, take apart and answer one, on the core of its connection.
    pub target: Nanos,
    /// To carry one out, on the core that does.
    pub kv: Nanos,
    /// To hand its operations to the device and take its answers, there too.
    pub device: Nanos,
}

/// What a reactor is made of.
pub struct ReactorParts<S, E> {
    /// This core's sockets.
    pub sockets: S,
    /// Our own address on a socket, where the driver knows it.
    pub local_address: fn(&S, SocketId) -> Option<SocketAddr>,
    /// The listeners of this core, with their addresses; only the first core has any.
    pub listeners: Vec<(ListenerId, SocketAddr)>,
    /// This core's end of the mesh.
    pub mailbox: Mailbox<CoreMessage>,
    /// This core's number among the node's.
    pub core: usize,
    /// Time, timers, tasks.
    pub handle: ReactorHandle,
    /// The subsystem.
    pub target: Arc<Target>,
    /// What does the requests of each namespace on this core.
    pub namespaces: Rc<NamespaceTable<E>>,
    /// The buffers of this core.
    pub pool: BufferPool,
    /// The most requests at a time.
    pub requests_max: usize,
    /// The monitor, and what is chosen.
    pub monitor: Arc<Monitor>,
    /// What requests cost in virtual time.
    pub costs: SimulatedCosts,
}

/// A request that has ended, on its way to its connection.
#[derive(Debug)]
pub struct RequestCompletion {
    home_core: CoreId,
    connection: u32,
    slot: u32,
    outcome: RequestOutcome,
    tenant: TenantId,
    timing: RequestTiming,
    ticket_id: TicketId,
}

/// One core. `F` is the future of what carries out its requests.
struct Reactor<S, F> {
    sockets: S,
    local_address: fn(&S, SocketId) -> Option<SocketAddr>,
    listeners: Vec<(ListenerId, SocketAddr)>,
    mailbox: Mailbox<CoreMessage>,
    core: usize,
    handle: ReactorHandle,
    device: DeviceHandle,
    target: Arc<Target>,
    pool: BufferPool,
    receive_buffer: Box<[u8]>,
    connections: Vec<Option<ConnectionIo>>,
    free_connections: Vec<u32>,
    by_socket: FxHashMap<SocketId, u32>,
    ready_sockets: Vec<SocketId>,
    /// Links that received in this turn.
    received_from: Vec<u32>,
    /// How many did in the last turn.
    active_connections: usize,
    /// In what order links receive, send, and are offered their bytes again.
    receive_queue: ConnectionQueue,
    send_queue: ConnectionQueue,
    resume_queue: ConnectionQueue,
    /// What this turn has spent, and may.
    budget: IterationBudget,
    requests: Vec<IoRequest>,
    request_queue: RequestQueue,
    /// Namespaces whose stores were taken out since the last turn.
    removed_namespaces: RemovedNamespaces,
    workers: WorkerPool<PendingRequest, F>,
    completions: Rc<RefCell<Vec<RequestCompletion>>>,
    delivering: Vec<RequestCompletion>,
    /// Links with bytes to send.
    send_pending: Vec<u32>,
    slices: Vec<IoSlice<'static>>,
    unassigned: VecDeque<(SocketId, SocketAddr, SocketAddr)>,
    /// How many connections were dealt to cores, by this one.
    assigned_count: usize,
    next_tick: Nanos,
    draining: bool,
    /// What is told of hosts that come and go.
    log_limiter: LogRateLimiter,
    monitor: Arc<Monitor>,
    /// The number of the last window that this core knows.
    last_interval: u64,
    /// From which link on the network's round trips are asked for next.
    next_rtt_sample: usize,
    /// When it must end the one that runs, if it must.
    interval_ends: Nanos,
    metrics: MetricsWriter,
    scheduler: RequestScheduler,
    /// Outcomes for other cores that their rings had no room for.
    outbound_completions: VecDeque<RequestCompletion>,
    costs: SimulatedCosts,
    is_served: Box<dyn Fn(NamespaceId) -> bool>,
}

/// A core as whoever drives it sees it.
pub trait ReactorLoop<S> {
    /// Does everything there is to do now. False when there was nothing.
    fn run_iteration(&mut self, now: Nanos) -> bool;
    /// The sockets, for a driver that sleeps on them.
    fn sockets(&mut self) -> &mut S;
    /// Takes no more connections and no more commands; those begun are finished.
    fn begin_drain(&mut self);
    /// Whether, while draining, nothing is left to finish.
    fn is_drained(&mut self) -> bool;
    /// How many connections this core has.
    fn connections(&self) -> usize;
    /// How many requests this core has begun and not ended.
    fn requests(&self) -> usize;
    /// Ends whatever has come for namespaces that are not served here: before one of the same identifier is.
    fn fail_missing_namespaces(&mut self, now: Nanos);
}

/// Makes a core's reactor.
pub fn new_reactor<S: Sockets, E: Engine + 'static>(parts: ReactorParts<S, E>) -> impl ReactorLoop<S> {
    let completions: Rc<RefCell<Vec<RequestCompletion>>> = Rc::default();
    let (namespaces, worker_completions) = (Rc::clone(&parts.namespaces), Rc::clone(&completions));
    let (handle, costs) = (parts.handle.clone(), parts.costs);
    let make_worker = move |job_slot: Rc<JobSlot<PendingRequest>>| {
        let (completions, namespaces, handle) =
            (Rc::clone(&worker_completions), Rc::clone(&namespaces), handle.clone());
        async move {
            loop {
                let PendingRequest {
                    home_core,
                    connection,
                    slot,
                    namespace,
                    operation,
                    tenant,
                    timing,
                    ticket_id,
                } = job_slot.next_job().await;
                handle.cpu_time().advance_simulated(Stage::Kv, costs.kv);
                let mut outcome = match namespaces.get(namespace) {
                    Some(backend) => backend.execute(operation).await,
                    // It was removed while the command was on its way here.
                    None => RequestOutcome::NotReady,
                };
                if bug_injection::is_injected(InjectedBug::RemoveDropsRequests)
                    && namespaces.get(namespace).is_none()
                {
                    continue;
                }
                if bug_injection::is_injected(InjectedBug::RemoveFailsRequests)
                    && namespaces.get(namespace).is_none()
                {
                    outcome = RequestOutcome::NotReady;
                }
                handle.cpu_time().advance_simulated(Stage::Device, costs.device);
                completions.borrow_mut().push(RequestCompletion {
                    home_core,
                    connection,
                    slot,
                    outcome,
                    tenant,
                    timing,
                    ticket_id,
                });
            }
        }
    };
    let doorbell = Arc::clone(parts.handle.core_waker());
    let workers = WorkerPool::new(parts.requests_max, doorbell, make_worker);
    let namespaces = Rc::clone(&parts.namespaces);
    let request_queue = RequestQueue::new(move |request, stage| {
        if let Some(backend) = namespaces.get(request.namespace) {
            backend.prefetch(&request.operation, stage);
        }
    });
    assemble(parts, completions, request_queue, workers)
}

fn assemble<S: Sockets, E: Engine + 'static, F: Future<Output = Infallible>>(
    parts: ReactorParts<S, E>,
    completions: Rc<RefCell<Vec<RequestCompletion>>>,
    request_queue: RequestQueue,
    workers: WorkerPool<PendingRequest, F>,
) -> Reactor<S, F> {
    let (cores, core) = (parts.mailbox.core_count(), CoreId::from_index(parts.core));
    let core_metrics = Arc::clone(parts.monitor.core_metrics());
    let namespaces = Rc::clone(&parts.namespaces);
    Reactor {
        sockets: parts.sockets,
        local_address: parts.local_address,
        listeners: parts.listeners,
        mailbox: parts.mailbox,
        core: parts.core,
        device: parts.handle.devices(),
        metrics: MetricsWriter::new(core_metrics, core, parts.handle.cpu_time()),
        scheduler: RequestScheduler::new(
            core,
            cores,
            parts.requests_max,
            parts.pool.budget_bytes() / TENANT_BUFFER_DIVISOR,
        ),
        outbound_completions: VecDeque::new(),
        last_interval: 0,
        next_rtt_sample: 0,
        interval_ends: Nanos::NEVER,
        monitor: parts.monitor,
        costs: parts.costs,
        is_served: Box::new(move |namespace| namespaces.get(namespace).is_some()),
        handle: parts.handle,
        target: parts.target,
        pool: parts.pool,
        receive_buffer: vec![0; RECEIVE_BUFFER_BYTES].into(),
        connections: Vec::new(),
        free_connections: Vec::new(),
        by_socket: FxHashMap::default(),
        ready_sockets: Vec::new(),
        received_from: Vec::new(),
        active_connections: 0,
        receive_queue: ConnectionQueue::default(),
        send_queue: ConnectionQueue::default(),
        resume_queue: ConnectionQueue::default(),
        budget: IterationBudget::new(),
        requests: Vec::new(),
        request_queue,
        removed_namespaces: parts.namespaces.removed(),
        workers,
        completions,
        delivering: Vec::new(),
        send_pending: Vec::new(),
        slices: Vec::new(),
        unassigned: VecDeque::new(),
        assigned_count: 0,
        next_tick: Nanos::ZERO,
        draining: false,
        log_limiter: LogRateLimiter::default(),
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> ReactorLoop<S> for Reactor<S, F> {
    fn run_iteration(&mut self, now: Nanos) -> bool {
        // What passed since the last turn, asleep perhaps, is nobody's.
        self.handle.cpu_time().end_stage(Stage::Idle, false);
        self.handle.cpu_time().begin_iteration();
        let mut worked = self.handle.begin_iteration(now) > 0;
        self.budget.begin(now);
        self.metrics.begin_iteration(now);
        self.scheduler.begin_iteration(now);
        self.check_interval(now);
        worked |= self.fail_removed_namespaces();
        let mut target_worked = self.accept(now);
        target_worked |= self.process_messages(now);
        if !self.request_queue.is_empty() {
            // What other cores sent does not keep this one's own hosts from being heard.
            self.handle.cpu_time().end_stage(Stage::Target, target_worked);
            let begun = self.start_requests(now);
            self.handle.cpu_time().end_stage(Stage::Kv, begun);
        }
        target_worked |= self.receive(now);
        self.handle.cpu_time().end_stage(Stage::Target, target_worked);
        let kv_worked =
            self.start_requests(now) | (self.handle.poll_background() > 0) | (self.workers.poll_ready() > 0);
        let mut spent = self.handle.cpu_time().end_stage(Stage::Kv, kv_worked);
        let device_worked = self.device.poll() > 0;
        spent = spent + self.handle.cpu_time().end_stage(Stage::Device, device_worked);
        let kv_again = (self.handle.poll_background() > 0) | (self.workers.poll_ready() > 0);
        spent = spent + self.handle.cpu_time().end_stage(Stage::Kv, kv_again);
        let mut replied = self.deliver_completions(now, spent);
        replied |= self.send_replies();
        replied |= self.tick(now);
        self.handle.cpu_time().end_stage(Stage::Target, replied);
        worked |= target_worked | kv_worked | device_worked | kv_again | replied;
        self.scheduler.end_iteration(worked);
        worked
    }

    fn sockets(&mut self) -> &mut S {
        &mut self.sockets
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        self.scheduler.drain(&mut self.request_queue);
    }

    fn is_drained(&mut self) -> bool {
        let is_finished = |io: &mut ConnectionIo| {
            io.connection.in_flight() == 0 && (io.socket_closed || io.connection.send_buffer().is_empty())
        };
        let here = self.request_queue.len()
            + self.scheduler.len()
            + self.workers.running()
            + self.outbound_completions.len();
        here == 0 && self.connections.iter_mut().flatten().all(is_finished)
    }

    fn connections(&self) -> usize {
        self.connections.iter().flatten().count()
    }

    fn requests(&self) -> usize {
        self.request_queue.len() + self.scheduler.len() + self.workers.running()
    }

    fn fail_missing_namespaces(&mut self, now: Nanos) {
        self.process_messages(now);
        self.scheduler.release_all(&mut self.request_queue);
        let Reactor { request_queue, completions, is_served, .. } = self;
        request_queue.retain(|request| {
            let is_attached = is_served(request.namespace);
            if !is_attached {
                completions.borrow_mut().push(missing_namespace_completion(request));
            }
            is_attached
        });
    }
}

/// What becomes of a request whose namespace is gone. What was noted of it is given back with it.
fn missing_namespace_completion(request: &mut PendingRequest) -> RequestCompletion {
    let PendingRequest { home_core, connection, slot, tenant, timing, .. } = *request;
    RequestCompletion {
        home_core,
        connection,
        slot,
        outcome: RequestOutcome::NotReady,
        tenant,
        timing,
        ticket_id: std::mem::take(&mut request.ticket_id),
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    /// Looks whether a window has ended, or is to be ended by this core.
    fn check_interval(&mut self, now: Nanos) {
        self.interval_ends = match self.monitor.poll(self.core, now) {
            MonitorDuty::Nothing => Nanos::NEVER,
            MonitorDuty::EndIntervalAt(ends) => ends,
            MonitorDuty::WakeNext(next) => {
                self.mailbox.wake(next);
                Nanos::NEVER
            }
        };
        if self.monitor.interval_count() != self.last_interval {
            self.apply_decision(now);
        }
    }

    /// Takes this core's part of what was chosen, and tells what the monitor needs for the next choice.
    #[cold]
    fn apply_decision(&mut self, now: Nanos) {
        let Some(interval) = self.monitor.last_interval() else { return };
        self.last_interval = interval.number;
        if !self.draining {
            self.scheduler.apply_decision(&interval, &mut self.request_queue, now);
        }
        // A system call each: some of them at a time, in turn.
        let (count, from) = (self.connections.len(), self.next_rtt_sample);
        self.next_rtt_sample = (from + RTT_SAMPLES_PER_INTERVAL).checked_rem(count).unwrap_or(0);
        for io in
            self.connections.iter().cycle().skip(from).take(count.min(RTT_SAMPLES_PER_INTERVAL)).flatten()
        {
            if let Some(tenant) = io.tenant
                && let Some(round_trip) = self.sockets.round_trip_time(io.socket)
            {
                self.metrics.set_round_trip(tenant, round_trip);
            }
        }
    }

    /// Ends the requests that wait for a task and whose namespace was removed: another may have its identifier when
    /// their turn comes.
    fn fail_removed_namespaces(&mut self) -> bool {
        if self.removed_namespaces.borrow().is_empty() {
            return false;
        }
        let removed = self.removed_namespaces.take();
        self.scheduler.release_all(&mut self.request_queue);
        let completions = &mut *self.completions.borrow_mut();
        self.request_queue.retain(|request| {
            let is_attached = !removed.contains(&request.namespace);
            if !is_attached {
                completions.push(missing_namespace_completion(request));
            }
            is_attached
        });
        true
    }

    /// Puts a link on the list of those that may have something to send or may be over.
    fn mark_send_pending(&mut self, index: u32) {
        if let Some(io) = &mut self.connections[index as usize]
            && !io.in_send_list
        {
            io.in_send_list = true;
            self.send_pending.push(index);
        }
    }

    /// Begins what may begin: what waited for its turn among tenants, and what waits for a worker.
    fn start_requests(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        loop {
            let polled = self.scheduler.poll(&mut self.request_queue, &self.metrics, now);
            let started = self.request_queue.start(&mut self.workers);
            worked |= polled | started;
            // Those that have ended at once make room for the next ones, until others are to be heard.
            let Reactor { scheduler, completions, handle, .. } = self;
            if !started
                || !scheduler.has_open_tickets()
                || handle.cpu_time().stage_elapsed() > FAIR_DISPATCH_MAX
            {
                return worked;
            }
            for completion in completions.borrow_mut().iter_mut() {
                scheduler.on_complete(std::mem::take(&mut completion.ticket_id), &completion.outcome);
            }
        }
    }

    /// Lets time pass for the connections.
    fn tick(&mut self, now: Nanos) -> bool {
        let mut worked = self.resume_stalled(now);
        let due = now >= self.next_tick;
        let mut next = Nanos::NEVER;
        for index in (0..self.connections.len() as u32).filter(|_| due) {
            let Some(io) = &mut self.connections[index as usize] else { continue };
            io.connection.tick(now);
            next = next.min(io.connection.next_deadline());
            if io.connection.is_closed() {
                worked |= io.close_if_timed_out(now);
                next = next.min(now + TICK_INTERVAL_MAX);
            }
            self.mark_send_pending(index);
        }
        if due {
            self.next_tick = if next == Nanos::NEVER {
                next
            } else {
                next.min(now + TICK_INTERVAL_MAX).max(now + Nanos(1))
            };
        }
        let stalled = self.connections.iter().flatten().any(ConnectionIo::is_stalled);
        let waiting = if stalled { now + Nanos::from_millis(1) } else { Nanos::NEVER };
        let scheduled = self.interval_ends.min(self.scheduler.next_deadline(now));
        self.handle.request_wakeup_at(self.next_tick.min(waiting).min(scheduled));
        // What a tick or a resumed machine had to say goes out at once.
        worked | (!self.request_queue.is_empty() && self.start_requests(now)) | self.send_replies()
    }
}
