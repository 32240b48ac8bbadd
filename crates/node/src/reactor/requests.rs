//! The requests of a core: admitted, started by workers, completed.
//!
//! ```text
//!   admit ─▶ scheduler (policies, fair queue) ─▶ queue ─▶ workers ─▶ completions ─▶ connections, other cores
//!    │         └─ offloaded to another core
//!    └─ key of another core ─▶ that core, at once or from a queue (`owner_queues`)
//! ```
//! Invariants: a request has one completion; no more requests and completions exist than command slots of the node; a
//! request on a key with an owner core starts on that core, under every policy; a request of another core stays here.

use super::accounting::Accounting;
use super::core_links::CoreLinks;
use super::messages::RequestCompletion;
use super::owner_queues::OwnerQueues;
use crate::bug_injection::{self, InjectedBug};
use crate::core_roles::{CoreRole, CoreRoles};
use crate::namespace_table::RemovedNamespaces;
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::request_scheduler::RequestScheduler;
use octokv_base::{NamespaceId, Nanos};
use octokv_nvmf::{IoRequest, RequestOutcome};
use octokv_runtime::WorkerPool;
use octokv_sched::{CoreId, RoutingDecision, TenantId};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::Future;
use std::rc::Rc;

/// Longest time to start requests of a fair queue before sockets are read again: a light tenant's request may have
/// arrived.
const FAIR_DISPATCH_MAX: Nanos = Nanos::from_micros(20);

/// See the module header.
pub(super) struct Requests<F> {
    core: CoreId,
    pub scheduler: RequestScheduler,
    /// Requests that wait for a worker.
    pub queue: RequestQueue,
    /// Requests at the front of the queue of which [`Requests::check_owners`] knows that they may start here.
    checked_count: usize,
    /// Requests that wait for the ring to the core that owns their key.
    pub owner_queues: OwnerQueues,
    pub workers: WorkerPool<PendingRequest, F>,
    /// Of workers, in this iteration.
    pub completions: Rc<RefCell<Vec<RequestCompletion>>>,
    delivering: Vec<RequestCompletion>,
    /// Most completions of an iteration: the command slots of the node.
    completions_max: usize,
    /// Requests waiting for workers above which no messages are received; also the number of workers.
    waiting_max: usize,
    pub namespaces: RequestNamespaces,
}

/// The bounds of a core's requests.
pub(super) struct RequestLimits {
    /// The number of workers.
    pub workers: usize,
    /// The command slots of the node.
    pub node_requests: usize,
    /// The cores of the node.
    pub cores: usize,
}

/// The owner core of a request.
type OwnerCoreFn = dyn Fn(&PendingRequest) -> Option<usize>;

/// What requests know of the core's namespaces.
pub(super) struct RequestNamespaces {
    /// Those removed since the last iteration.
    pub removed: RemovedNamespaces,
    /// Whether the core serves one.
    pub is_served: Box<dyn Fn(NamespaceId) -> bool>,
    /// The roles of the node's cores.
    pub roles: CoreRoles,
    /// Whether requests of one have owner cores: only then is `owner_core` called.
    pub has_owner_cores: Rc<Cell<bool>>,
    /// The core that has to execute a request; `None` if any may, or if the core does not serve the namespace.
    pub owner_core: Box<OwnerCoreFn>,
}

impl<F: Future<Output = Infallible>> Requests<F> {
    /// No requests on `core`. The workers push their completions to `completions`.
    pub fn new(
        core: CoreId,
        scheduler: RequestScheduler,
        queue: RequestQueue,
        workers: WorkerPool<PendingRequest, F>,
        completions: Rc<RefCell<Vec<RequestCompletion>>>,
        limits: RequestLimits,
        namespaces: RequestNamespaces,
    ) -> Requests<F> {
        Requests {
            core,
            scheduler,
            queue,
            checked_count: 0,
            owner_queues: OwnerQueues::new(limits.cores, limits.node_requests),
            workers,
            completions,
            delivering: Vec::new(),
            completions_max: limits.node_requests,
            waiting_max: limits.workers,
            namespaces,
        }
    }

    /// Requests that have not ended on this core.
    pub fn count(&self) -> usize {
        self.queue.len() + self.scheduler.len() + self.owner_queues.len() + self.workers.running()
    }

    /// Whether requests wait for a worker: nothing is received from hosts then.
    #[inline]
    pub fn are_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether so few requests wait for a worker that messages of other cores are received.
    pub fn has_room(&self) -> bool {
        self.queue.len() < self.waiting_max
    }

    /// Starts, queues or offloads a connection's requests, and leaves the vector empty.
    pub fn admit(
        &mut self,
        (connection, tenant): (u32, TenantId),
        requests: &mut Vec<IoRequest>,
        links: &mut CoreLinks,
        accounting: &Accounting,
        now: Nanos,
    ) {
        let (home_core, metrics, count) = (links.core(), &accounting.metrics, requests.len() as u64);
        let timing = metrics.record_started(tenant, count);
        let admitted = requests.drain(..).map(|IoRequest { slot, namespace, operation }| PendingRequest {
            home_core,
            connection,
            slot,
            namespace,
            operation,
            tenant,
            timing,
            ticket_id: TicketId::NONE,
        });
        let has_owners = self.namespaces.has_owner_cores.get();
        if self.scheduler.is_passthrough() && !has_owners {
            admitted.for_each(|request| self.queue.push(request));
            return metrics.record_executed_locally(count);
        }
        let mut executed_locally = 0;
        for mut request in admitted {
            let owner = if has_owners { self.owner_of(&request, links) } else { None };
            if let Some(owner) = owner {
                if owner != home_core {
                    self.owner_queues.send(owner, request, links, metrics);
                    continue;
                }
            } else if let RoutingDecision::Offload(to) = self.scheduler.route(&request) {
                let timing = request.timing;
                request.timing = metrics.transfer_timing(to, tenant, timing);
                match links.offload(to, request) {
                    Ok(()) => {
                        metrics.record_offloaded_to(to);
                        continue;
                    }
                    // A full ring means that core is busy enough: run it here.
                    Err(returned) => request = PendingRequest { timing, ..returned },
                }
            }
            executed_locally += 1;
            self.scheduler.enqueue(request, &mut self.queue, metrics, now);
        }
        metrics.record_executed_locally(executed_locally);
    }

    /// The core that has to execute a request, if one does.
    ///
    /// # Panics
    /// The engine names a core that does not exist: a bug of this program.
    #[inline(never)]
    fn owner_of(&self, request: &PendingRequest, links: &CoreLinks) -> Option<CoreId> {
        let owner = (self.namespaces.owner_core)(request)?;
        assert!(owner < links.core_count(), "core {owner} owns a request and does not exist");
        if bug_injection::is_injected(InjectedBug::ExecuteBesideOwner) && !links.has_room(owner) {
            return Some(links.core());
        }
        Some(CoreId::from_index(owner))
    }

    /// Sends the requests that wait for the owners of their keys, as far as the rings have space, after the completions
    /// that wait: otherwise these requests could take all of it. Returns whether any was sent.
    #[cold]
    pub fn send_to_owners(&mut self, links: &mut CoreLinks, accounting: &Accounting) -> bool {
        links.send_completions();
        self.owner_queues.send_waiting(links, &accounting.metrics)
    }

    /// Takes a request of another core's connection, which is never offloaded again.
    pub fn enqueue(&mut self, request: PendingRequest, accounting: &Accounting, now: Nanos) {
        self.scheduler.enqueue(request, &mut self.queue, &accounting.metrics, now);
    }

    /// Starts the requests that wait for a worker.
    #[inline]
    pub fn start_waiting(&mut self) -> bool {
        if self.namespaces.has_owner_cores.get() {
            self.check_owners();
        }
        let started = self.queue.start(&mut self.workers);
        self.checked_count = self.queue.len();
        started
    }

    /// Checks, apart from the routing, that no other core owns the requests that start next. A core for drives may have one of a
    /// key whose partition has moved to another drive since it came.
    ///
    /// # Panics
    /// Another core does: a bug of this program, and an engine with owners would miss or lose the key's value.
    #[cold]
    fn check_owners(&self) {
        for request in self.queue.iter().skip(self.checked_count) {
            if let Some(owner) = (self.namespaces.owner_core)(request) {
                let core = self.core.index();
                match self.namespaces.roles.role_of(core) {
                    CoreRole::Shared => {
                        assert_eq!(
                            core, owner,
                            "an operation on a key starts on a core that does not own it"
                        );
                    }
                    CoreRole::Drives => {}
                    CoreRole::Network => panic!("a request starts on core {core}, which has no drives"),
                }
            }
        }
    }

    /// Starts the requests that are due: those queued by the scheduler, then those waiting for a worker.
    pub fn start(&mut self, accounting: &Accounting, now: Nanos) -> bool {
        let mut worked = false;
        loop {
            let polled = self.scheduler.poll(&mut self.queue, &accounting.metrics, now);
            let started = self.start_waiting();
            worked |= polled | started;
            // Requests that completed at once free resources for the next ones, until sockets must be read.
            if !started
                || !self.scheduler.has_open_tickets()
                || accounting.stage_elapsed() > FAIR_DISPATCH_MAX
            {
                return worked;
            }
            for completion in self.completions.borrow_mut().iter_mut() {
                self.scheduler.on_complete(std::mem::take(&mut completion.ticket_id), &completion.outcome);
            }
        }
    }

    /// Takes the completions since the last call; [`Requests::return_buffer`] takes their memory back.
    ///
    /// # Panics
    /// There are more than the node has command slots: a bug of this program.
    pub fn take_completions(&mut self) -> Vec<RequestCompletion> {
        std::mem::swap(&mut self.delivering, &mut *self.completions.borrow_mut());
        assert!(self.delivering.len() <= self.completions_max, "more completions than command slots");
        std::mem::take(&mut self.delivering)
    }

    /// Takes back the memory of completions, which were all delivered.
    pub fn return_buffer(&mut self, delivered: Vec<RequestCompletion>) {
        self.delivering = delivered;
    }

    /// Fails queued requests of removed namespaces before another namespace can take the identifier.
    pub fn fail_removed_namespaces(&mut self) -> bool {
        if self.namespaces.removed.is_empty() {
            return false;
        }
        let removed = self.namespaces.removed.take();
        self.fail_queued(|_, namespace| removed.contains(&namespace));
        true
    }

    /// Fails queued requests whose namespace this core does not serve.
    pub fn fail_missing_namespaces(&mut self) {
        self.fail_queued(|is_served, namespace| !is_served(namespace));
    }

    /// Fails the queued requests of the namespaces for which `is_gone` returns true.
    fn fail_queued(&mut self, is_gone: impl Fn(&dyn Fn(NamespaceId) -> bool, NamespaceId) -> bool) {
        self.scheduler.release_all(&mut self.queue);
        let Requests { queue, owner_queues, completions, namespaces, .. } = self;
        let completions = &mut *completions.borrow_mut();
        let mut keep = |request: &mut PendingRequest| {
            let fails = is_gone(&namespaces.is_served, request.namespace);
            if fails {
                completions.push(missing_namespace_completion(request));
            }
            !fails
        };
        queue.retain(&mut keep);
        owner_queues.retain(keep);
        self.checked_count = 0;
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
