//! The reactor of one core: each iteration advances everything that can advance.
//!
//! ```text
//!   iteration:  timers ─▶ accept ─▶ mailbox ─▶ sockets (P1) ─▶ requests to workers ─▶ woken workers
//!               ─▶ device completions (P2) ─▶ peers ─▶ workers woken by both ─▶ outcomes to connections
//!               ─▶ one send each
//! ```
//! In: a driver (kernel or simulated), the backends of the namespaces, a target. Out: whether the iteration did
//! anything. Holds: the connections of this core and the workers of its requests. The stages target, kv and device
//! are timed separately.
//!
//! Invariants: a response leaves on the connection of its request; a connection is forgotten only when none of its
//! requests is in execution; without free workers, buffers or response space nothing is received. The accepting
//! core assigns connections in rotation to the cores that have any; connections known to be admin queues are not
//! counted.
//!
//! # Layout
//! - this file: the parts of a core, and its iteration.
//! - `connections`, `acceptor`: the connections of this core; new ones of the node. `core_links`, `messages`: the other cores.
//! - `requests`: from admission to completion; `direct_executor`: requests that need not wait. `owner_queues`: requests that wait for the owners of their keys. `accounting`: processor time, metrics, sampling intervals.
//! - `ingress`: bytes to requests, messages of other cores. `egress`: completions, responses, closed connections.

mod acceptor;
mod accounting;
mod connections;
mod core_links;
mod direct_executor;
mod egress;
mod ingress;
mod messages;
mod owner_queues;
mod requests;

use acceptor::Acceptor;
pub use accounting::SimulatedCosts;
pub use messages::CoreMessage;

use accounting::Accounting;
use connections::Connections;
use core_links::CoreLinks;
use messages::RequestCompletion;
use requests::{RequestLimits, RequestNamespaces, Requests};

use crate::bug_injection::{self, InjectedBug};
use crate::config::NAMESPACE_ID_MAX;
use crate::connection_io::{ConnectionIo, RECEIVE_BUFFER_BYTES};
use crate::core_roles::CoreRoles;
use crate::log_limiter::LogRateLimiter;
use crate::monitor::Monitor;
use crate::namespace_table::{NamespaceBackend, NamespaceTable};
use crate::request_queue::{PendingRequest, RequestQueue};
use crate::request_scheduler::{RequestScheduler, SchedulerLimits};
use crate::time_budget::IterationBudget;
use octokv_base::{BufferPool, Nanos};
use octokv_client::PollGroup;
use octokv_engine::Engine;
use octokv_nvmf::{IoRequest, RequestOutcome, SubsystemConfig, Target};
use octokv_runtime::{
    DeviceHandle, JobSlot, ListenerId, Mailbox, ReactorHandle, SocketId, Sockets, Stage, WorkerPool,
};
use octokv_sched::CoreId;
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Longest interval between deadline checks on a core with connections.
const TICK_INTERVAL_MAX: Nanos = Nanos::from_millis(50);

/// Queued requests of one tenant hold at most about this part of a core's buffers.
const TENANT_BUFFER_DIVISOR: usize = 8;

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

/// The parts of a reactor.
pub struct ReactorParts<S, E> {
    /// This core's sockets.
    pub sockets: S,
    /// The listeners of this core with their addresses; empty except on the accepting core.
    pub listeners: Vec<(ListenerId, SocketAddr)>,
    /// The roles of the node's cores.
    pub roles: CoreRoles,
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
    /// The outgoing sessions of this core.
    pub peers: PollGroup,
    /// Most requests in execution: the number of workers.
    pub requests_max: usize,
    /// The monitor of the node.
    pub monitor: Arc<Monitor>,
    /// Simulated time of requests.
    pub costs: SimulatedCosts,
}

/// The reactor; `F` is the future of a worker.
struct Reactor<S, E, F> {
    sockets: S,
    /// The backends of this core, for commands that are executed at once.
    namespaces: Rc<NamespaceTable<E>>,
    acceptor: Acceptor,
    links: CoreLinks,
    connections: Connections,
    requests: Requests<F>,
    accounting: Accounting,
    /// Time used by this iteration.
    budget: IterationBudget,
    peers: PeerSessions,
    handle: ReactorHandle,
    device: DeviceHandle,
    target: Arc<Target>,
    pool: BufferPool,
    receive_buffer: Box<[u8]>,
    /// Sockets with something to receive, in this iteration.
    ready_sockets: Vec<SocketId>,
    /// Requests of the connection that is being served, before they are admitted.
    parsed: Vec<IoRequest>,
    slices: Vec<IoSlice<'static>>,
    draining: bool,
    /// Rate limit for log lines that hosts can trigger.
    log_limiter: LogRateLimiter,
}

/// Outgoing sessions, on the same sockets as the connections.
struct PeerSessions {
    group: PollGroup,
    /// Latest time of their next poll.
    deadline: Nanos,
    /// Whether `ready_sockets` is of this iteration.
    ready_is_current: bool,
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
                let backend = namespaces.get(namespace);
                let mut outcome = match backend.as_deref() {
                    Some(NamespaceBackend::Kv(backend)) => backend.execute(operation).await,
                    Some(NamespaceBackend::Block(backend)) => backend.execute(operation).await,
                    // The namespace was removed while the command was on its way here.
                    None => RequestOutcome::NotReady,
                };
                drop(backend);
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
) -> Reactor<S, E, F> {
    let (cores, core) = (parts.mailbox.core_count(), CoreId::from_index(parts.core));
    let (namespaces, owners) = (Rc::clone(&parts.namespaces), Rc::clone(&parts.namespaces));
    let node_requests = node_requests_max(parts.target.config());
    let limits = SchedulerLimits {
        requests_max: parts.requests_max,
        node_requests_max: node_requests,
        queued_bytes_max: parts.pool.budget_bytes() / TENANT_BUFFER_DIVISOR,
    };
    let requests = Requests::new(
        core,
        RequestScheduler::new(core, cores, limits),
        request_queue,
        workers,
        completions,
        RequestLimits { workers: parts.requests_max, node_requests, cores },
        RequestNamespaces {
            removed: parts.namespaces.removed(),
            is_served: Box::new(move |namespace| namespaces.get(namespace).is_some()),
            has_owner_cores: parts.namespaces.has_owner_cores(),
            roles: parts.roles,
            owner_core: Box::new(move |request: &PendingRequest| {
                let connection = request.home_core.index() + request.connection as usize;
                owners.owner_core(request.namespace, &request.operation, connection)
            }),
        },
    );
    Reactor {
        sockets: parts.sockets,
        namespaces: parts.namespaces,
        acceptor: Acceptor::new(parts.listeners, parts.roles),
        links: CoreLinks::new(core, parts.mailbox, node_requests),
        connections: Connections::default(),
        requests,
        accounting: Accounting::new(core, parts.handle.clone(), parts.monitor, parts.costs),
        budget: IterationBudget::new(),
        peers: PeerSessions { group: parts.peers, deadline: Nanos::NEVER, ready_is_current: false },
        device: parts.handle.devices(),
        handle: parts.handle,
        target: parts.target,
        pool: parts.pool,
        receive_buffer: vec![0; RECEIVE_BUFFER_BYTES].into(),
        ready_sockets: Vec::new(),
        parsed: Vec::new(),
        slices: Vec::new(),
        draining: false,
        log_limiter: LogRateLimiter::default(),
    }
}

impl<S: Sockets, E: Engine, F: Future<Output = Infallible>> ReactorLoop<S> for Reactor<S, E, F> {
    fn run_iteration(&mut self, now: Nanos) -> bool {
        self.accounting.begin_iteration(now);
        let mut worked = self.handle.begin_iteration(now) > 0;
        self.budget.begin(now);
        self.requests.scheduler.begin_iteration(now);
        self.peers.ready_is_current = false;
        if !self.peers.group.is_empty() {
            self.peers.group.begin_iteration(now);
        }
        self.check_interval(now);
        worked |= self.requests.fail_removed_namespaces();
        let mut target_worked = self.accept(now);
        target_worked |= self.process_messages(now);
        if !self.requests.owner_queues.is_empty() {
            target_worked |= self.requests.send_to_owners(&mut self.links, &self.accounting);
        }
        if self.requests.are_waiting() {
            // Requests of other cores do not stop this core from receiving its own.
            self.accounting.end_stage(Stage::Target, target_worked);
            let started = self.requests.start(&self.accounting, now);
            self.accounting.end_stage(Stage::Kv, started);
        }
        target_worked |= self.receive(now);
        self.accounting.end_stage(Stage::Target, target_worked);
        let kv_worked = self.requests.start(&self.accounting, now) | self.poll_tasks();
        let mut spent = self.accounting.end_stage(Stage::Kv, kv_worked);
        let device_worked = self.device.poll() > 0;
        spent = spent + self.accounting.end_stage(Stage::Device, device_worked);
        let peers_worked = !self.peers.group.is_empty() && self.poll_peers(now);
        // The second time those that the first have woken: the writers whose batch a leader has ended.
        let kv_again = self.poll_tasks() && (self.poll_tasks() | true);
        spent = spent + self.accounting.end_stage(Stage::Kv, kv_again);
        let mut replied = self.deliver_completions(now, spent);
        replied |= self.send_replies();
        replied |= self.tick(now);
        self.accounting.end_stage(Stage::Target, replied);
        worked |= target_worked | kv_worked | device_worked | peers_worked | kv_again | replied;
        // No event announces space in another core's ring: until there is some, every iteration tries again.
        worked |= !self.requests.owner_queues.is_empty();
        self.requests.scheduler.end_iteration(worked);
        worked
    }

    fn sockets(&mut self) -> &mut S {
        &mut self.sockets
    }

    fn begin_drain(&mut self) {
        self.draining = true;
        self.requests.scheduler.drain(&mut self.requests.queue);
    }

    fn is_drained(&mut self) -> bool {
        let is_finished = |io: &mut ConnectionIo| {
            io.connection.in_flight() == 0 && (io.socket_closed || io.connection.send_buffer().is_empty())
        };
        let here = self.requests.count() + self.links.waiting();
        here == 0 && self.connections.slots.iter_mut().flatten().all(is_finished)
    }

    fn connections(&self) -> usize {
        self.connections.iter().count()
    }

    fn requests(&self) -> usize {
        self.requests.count()
    }

    fn fail_missing_namespaces(&mut self, now: Nanos) {
        // All of them: a request for a removed namespace was sent before every core detached it.
        for message in self.links.receive_queued() {
            self.process_message(message, now);
        }
        self.requests.fail_missing_namespaces();
    }
}

impl<S: Sockets, E: Engine, F: Future<Output = Infallible>> Reactor<S, E, F> {
    /// Polls the tasks of this core that were woken: background work, then workers.
    #[inline]
    fn poll_tasks(&mut self) -> bool {
        (self.handle.poll_background() > 0) | (self.requests.workers.poll_ready() > 0)
    }

    /// Polls the outgoing sessions: sends the commands that tasks have submitted, receives responses for them.
    #[inline(never)]
    fn poll_peers(&mut self, now: Nanos) -> bool {
        if !self.peers.ready_is_current {
            // Nothing is received from hosts while requests wait for workers. A worker may wait for a response of a
            // peer, so the sessions receive all the same. Sockets of hosts stay ready.
            self.ready_sockets.clear();
            self.sockets.ready(&mut self.ready_sockets);
        }
        let worked = self.peers.group.poll(&mut self.sockets, &self.ready_sockets, now);
        self.peers.deadline = self.peers.group.next_deadline();
        self.accounting.end_stage(Stage::Target, worked);
        worked
    }

    /// Applies the decision of a sampling interval that has ended.
    fn check_interval(&mut self, now: Nanos) {
        let links = &self.links;
        if let Some(interval) = self.accounting.check_interval(now, |core| links.wake(core)) {
            if !self.draining {
                self.requests.scheduler.apply_decision(&interval, &mut self.requests.queue, now);
            }
            self.accounting.sample_round_trips(&self.sockets, &self.connections.slots);
        }
    }

    /// Advances the connections' timers.
    fn tick(&mut self, now: Nanos) -> bool {
        let mut worked = self.resume_stalled(now);
        let due = now >= self.connections.next_tick;
        let mut next = Nanos::NEVER;
        for index in (0..self.connections.slots.len() as u32).filter(|_| due) {
            let Some(io) = self.connections.get_mut(index) else { continue };
            io.connection.tick(now);
            next = next.min(io.connection.next_deadline());
            if io.connection.is_closed() {
                worked |= io.close_if_timed_out(now);
                next = next.min(now + TICK_INTERVAL_MAX);
            }
            self.connections.mark_send_pending(index);
        }
        if due {
            self.connections.next_tick = if next == Nanos::NEVER {
                next
            } else {
                next.min(now + TICK_INTERVAL_MAX).max(now + Nanos(1))
            };
        }
        let stalled = self.connections.iter().any(ConnectionIo::is_stalled);
        let waiting = if stalled { now + Nanos::from_millis(1) } else { Nanos::NEVER };
        let scheduled = self
            .accounting
            .next_deadline()
            .min(self.requests.scheduler.next_deadline(now))
            .min(self.peers.deadline);
        self.handle.request_wakeup_at(self.connections.next_tick.min(waiting).min(scheduled));
        // Responses from a timer or a resumed connection go out at once.
        worked
            | (self.requests.are_waiting() && self.requests.start(&self.accounting, now))
            | self.send_replies()
    }
}

#[cfg(test)]
mod tests;
