//! The reactor of one core: each iteration advances everything that can advance.
//!
//! ```text
//!   iteration:  timers ─▶ accept ─▶ mailbox ─▶ sockets (P1) ─▶ requests to workers ─▶ woken workers
//!               ─▶ device completions (P2) ─▶ workers woken by them ─▶ outcomes to connections ─▶ one send each
//! ```
//! In: a driver (kernel or simulated), the backends of the namespaces, a target. Out: whether the iteration did
//! anything. Holds: the connections of this core and the workers of its requests. The stages target, kv and device
//! are timed separately.
//!
//! Invariants: a response leaves on the connection of its request; a connection is forgotten only when none of its
//! requests is in execution; without free workers, buffers or response space nothing is received. The first core
//! accepts connections and assigns them to all cores in rotation; connections known to be admin queues are not
//! counted.
//!
//! # Layout
//! - this file: the parts of a core, and its iteration.
//! - `ingress`: connections, messages of other cores, bytes, requests.
//! - `egress`: completions, responses, closed connections.

mod egress;
mod ingress;

use crate::bug_injection::{self, InjectedBug};
use crate::config::NAMESPACE_ID_MAX;
use crate::connection_io::{ConnectionIo, RECEIVE_BUFFER_BYTES};
use crate::connection_queue::ConnectionQueue;
use crate::core_metrics::{MetricsWriter, RequestTiming};
use crate::log_limiter::LogRateLimiter;
use crate::monitor::{Monitor, MonitorDuty};
use crate::namespace_table::{NamespaceTable, RemovedNamespaces};
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::request_scheduler::{RequestScheduler, SchedulerLimits};
use crate::time_budget::IterationBudget;
use octokv_base::map::FxHashMap;
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_engine::Engine;
use octokv_nvmf::{IoRequest, RequestOutcome, SubsystemConfig, Target};
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

/// Longest interval between deadline checks on a core with connections.
const TICK_INTERVAL_MAX: Nanos = Nanos::from_millis(50);

/// Connections accepted per iteration and listener: a connect flood leaves time for established ones.
const ACCEPTS_PER_ITERATION: usize = 2;

/// Longest time to start requests of a fair queue before sockets are read again: a light tenant's request may have
/// arrived.
const FAIR_DISPATCH_MAX: Nanos = Nanos::from_micros(20);

/// Queued requests of one tenant hold at most about this part of a core's buffers.
const TENANT_BUFFER_DIVISOR: usize = 8;

/// Connections whose network round trip is sampled per interval.
const RTT_SAMPLES_PER_INTERVAL: usize = 32;

/// Connections closed per iteration: responses go first, and a flood of closes leaves time.
const CLOSES_PER_ITERATION: usize = 2;

/// Messages of other cores handled per iteration, one full ring: a burst leaves time for this core's connections.
const MESSAGES_PER_ITERATION_MAX: usize = 256;

/// Upper bound on the requests of a node: each occupies a command slot of a connection, except that a host's shutdown
/// flushes every namespace from one slot. It bounds every queue of requests and completions, on any core.
fn node_requests_max(config: &SubsystemConfig) -> usize {
    let per_connection = usize::from(config.queue_depth) + NAMESPACE_ID_MAX as usize;
    config.connections_max.saturating_mul(per_connection)
}

/// A message between cores.
pub enum CoreMessage {
    /// Hands over an accepted connection.
    NewConnection {
        /// The socket.
        socket: DetachedSocket,
        /// The local address.
        local: SocketAddr,
        /// The host's address.
        peer: SocketAddr,
    },
    /// Executes a request of the sender's connection.
    Execute(PendingRequest),
    /// Completes a request of the receiver's connection.
    Completed(RequestCompletion),
}

/// Simulated time of a request, under a simulated clock; ignored on a real core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedCosts {
    /// To receive, parse and complete a request, on its connection's core.
    pub target: Nanos,
    /// To execute it, on the executing core.
    pub kv: Nanos,
    /// To submit and complete its device operations, on the executing core.
    pub device: Nanos,
}

/// The parts of a reactor.
pub struct ReactorParts<S, E> {
    /// This core's sockets.
    pub sockets: S,
    /// The listeners of this core with their addresses; empty except on the first core.
    pub listeners: Vec<(ListenerId, SocketAddr)>,
    /// This core's end of the mesh.
    pub mailbox: Mailbox<CoreMessage>,
    /// Index of this core in the node.
    pub core: usize,
    /// Clock, timers and background tasks.
    pub handle: ReactorHandle,
    /// The NVMe subsystem.
    pub target: Arc<Target>,
    /// The backends of this core.
    pub namespaces: Rc<NamespaceTable<E>>,
    /// The buffers of this core.
    pub pool: BufferPool,
    /// Most requests in execution: the number of workers.
    pub requests_max: usize,
    /// The monitor of the node.
    pub monitor: Arc<Monitor>,
    /// Simulated time of requests.
    pub costs: SimulatedCosts,
}

/// A completed request on its way to its connection.
#[derive(Debug)]
pub struct RequestCompletion {
    home_core: CoreId,
    connection: u32,
    slot: u16,
    outcome: RequestOutcome,
    tenant: TenantId,
    timing: RequestTiming,
    ticket_id: TicketId,
}

/// The reactor; `F` is the future of a worker.
struct Reactor<S, F> {
    sockets: S,
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
    /// Connections that received in this iteration.
    received_from: Vec<u32>,
    /// Their number in the last iteration.
    active_connections: usize,
    /// Service order for receiving, sending, and resuming stalled connections.
    receive_queue: ConnectionQueue,
    send_queue: ConnectionQueue,
    resume_queue: ConnectionQueue,
    /// Time used by this iteration.
    budget: IterationBudget,
    requests: Vec<IoRequest>,
    request_queue: RequestQueue,
    /// Namespaces removed since the last iteration.
    removed_namespaces: RemovedNamespaces,
    workers: WorkerPool<PendingRequest, F>,
    completions: Rc<RefCell<Vec<RequestCompletion>>>,
    delivering: Vec<RequestCompletion>,
    /// Connections that may have bytes to send.
    send_pending: Vec<u32>,
    slices: Vec<IoSlice<'static>>,
    unassigned: VecDeque<(SocketId, SocketAddr, SocketAddr)>,
    /// Connections assigned to cores so far, by this core.
    assigned_count: usize,
    next_tick: Nanos,
    draining: bool,
    /// Rate limit for log lines that hosts can trigger.
    log_limiter: LogRateLimiter,
    monitor: Arc<Monitor>,
    /// Number of the last interval applied.
    last_interval: u64,
    /// Connection from which the next round-trip sample starts.
    next_rtt_sample: usize,
    /// When this core must end the current interval, if it must.
    interval_ends: Nanos,
    metrics: MetricsWriter,
    scheduler: RequestScheduler,
    /// Completions for other cores whose rings are full: at most `node_requests_max`.
    outbound_completions: VecDeque<RequestCompletion>,
    node_requests_max: usize,
    /// Requests waiting for workers above which no messages are received; also the number of workers.
    requests_max: usize,
    costs: SimulatedCosts,
    is_served: Box<dyn Fn(NamespaceId) -> bool>,
}

/// A reactor as its driver sees it.
pub trait ReactorLoop<S> {
    /// Does everything there is to do at `now`. Returns false if there was nothing.
    fn run_iteration(&mut self, now: Nanos) -> bool;
    /// The sockets, for a driver that sleeps on them.
    fn sockets(&mut self) -> &mut S;
    /// Stops accepting connections and commands; requests in progress complete.
    fn begin_drain(&mut self);
    /// Whether, while draining, nothing is left to finish.
    fn is_drained(&mut self) -> bool;
    /// Open connections of this core.
    fn connections(&self) -> usize;
    /// Requests started or queued on this core.
    fn requests(&self) -> usize;
    /// Fails every received request whose namespace this core does not serve. REQUIRES: called before a namespace is
    /// attached that may reuse the identifier.
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
                    // The namespace was removed while the command was on its way here.
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
    let core_waker = Arc::clone(parts.handle.core_waker());
    let workers = WorkerPool::new(parts.requests_max, core_waker, make_worker);
    let namespaces = Rc::clone(&parts.namespaces);
    let requests_max = node_requests_max(parts.target.config());
    let request_queue = RequestQueue::new(requests_max, move |request, stage| {
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
    let limits = SchedulerLimits {
        requests_max: parts.requests_max,
        node_requests_max: node_requests_max(parts.target.config()),
        queued_bytes_max: parts.pool.budget_bytes() / TENANT_BUFFER_DIVISOR,
    };
    Reactor {
        sockets: parts.sockets,
        listeners: parts.listeners,
        mailbox: parts.mailbox,
        core: parts.core,
        device: parts.handle.devices(),
        metrics: MetricsWriter::new(core_metrics, core, parts.handle.cpu_time()),
        scheduler: RequestScheduler::new(core, cores, limits),
        node_requests_max: limits.node_requests_max,
        requests_max: parts.requests_max,
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
        // Time since the last iteration, perhaps asleep, belongs to no tenant.
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
            // Requests of other cores do not stop this core from receiving its own.
            self.handle.cpu_time().end_stage(Stage::Target, target_worked);
            let started = self.start_requests(now);
            self.handle.cpu_time().end_stage(Stage::Kv, started);
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
        // All of them: a request for a removed namespace was sent before every core detached it.
        let mut messages = Vec::new();
        self.mailbox.drain_queued(|message| messages.push(message));
        messages.into_iter().for_each(|message| self.process_message(message, now));
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

/// Completion of a request whose namespace is gone, with its ticket.
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
    /// Checks whether a sampling interval has ended or this core must end it.
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

    /// Applies this core's part of a decision and samples round trips for the next one.
    #[cold]
    fn apply_decision(&mut self, now: Nanos) {
        let Some(interval) = self.monitor.last_interval() else { return };
        self.last_interval = interval.number;
        if !self.draining {
            self.scheduler.apply_decision(&interval, &mut self.request_queue, now);
        }
        // One system call each, so only a few per interval.
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

    /// Fails queued requests of removed namespaces before another namespace can take the identifier.
    fn fail_removed_namespaces(&mut self) -> bool {
        if self.removed_namespaces.is_empty() {
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

    /// Adds a connection to the list of those that may have bytes to send or may be finished.
    fn mark_send_pending(&mut self, index: u32) {
        if let Some(io) = &mut self.connections[index as usize]
            && !io.in_send_list
        {
            io.in_send_list = true;
            self.send_pending.push(index);
        }
    }

    /// Starts the requests that are due: those queued by the scheduler, then those waiting for a worker.
    fn start_requests(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        loop {
            let polled = self.scheduler.poll(&mut self.request_queue, &self.metrics, now);
            let started = self.request_queue.start(&mut self.workers);
            worked |= polled | started;
            // Requests that completed at once free resources for the next ones, until sockets must be read.
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

    /// Advances the connections' timers.
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
        // Responses from a timer or a resumed connection go out at once.
        worked | (!self.request_queue.is_empty() && self.start_requests(now)) | self.send_replies()
    }
}

#[cfg(test)]
mod tests;
