//! The requests of a core: admitted, started by workers, completed.
//!
//! ```text
//!   admit ─▶ scheduler (policies, fair queue) ─▶ queue ─▶ workers ─▶ completions ─▶ connections, other cores
//!              └─ offloaded to another core
//! ```
//! Invariants: a request has one completion; no more requests and completions exist than command slots of the node.

use super::accounting::Accounting;
use super::core_links::CoreLinks;
use super::messages::RequestCompletion;
use crate::namespace_table::RemovedNamespaces;
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::request_scheduler::RequestScheduler;
use octokv_base::{NamespaceId, Nanos};
use octokv_nvmf::{IoRequest, RequestOutcome};
use octokv_runtime::WorkerPool;
use octokv_sched::{RoutingDecision, TenantId};
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::rc::Rc;

/// Longest time to start requests of a fair queue before sockets are read again: a light tenant's request may have
/// arrived.
const FAIR_DISPATCH_MAX: Nanos = Nanos::from_micros(20);

/// See the module header.
pub(super) struct Requests<F> {
    pub scheduler: RequestScheduler,
    /// Requests that wait for a worker.
    pub queue: RequestQueue,
    pub workers: WorkerPool<PendingRequest, F>,
    /// Of workers, in this iteration.
    pub completions: Rc<RefCell<Vec<RequestCompletion>>>,
    delivering: Vec<RequestCompletion>,
    /// Most completions of an iteration: the command slots of the node.
    completions_max: usize,
    /// Requests waiting for workers above which no messages are received; also the number of workers.
    waiting_max: usize,
    /// Namespaces removed since the last iteration.
    removed_namespaces: RemovedNamespaces,
    is_served: Box<dyn Fn(NamespaceId) -> bool>,
}

/// The bounds of a core's requests.
pub(super) struct RequestLimits {
    /// The number of workers.
    pub workers: usize,
    /// The command slots of the node.
    pub node_requests: usize,
}

/// What requests know of the core's namespaces.
pub(super) struct RequestNamespaces {
    /// Those removed since the last iteration.
    pub removed: RemovedNamespaces,
    /// Whether the core serves one.
    pub is_served: Box<dyn Fn(NamespaceId) -> bool>,
}

impl<F: Future<Output = Infallible>> Requests<F> {
    /// No requests. The workers push their completions to `completions`.
    pub fn new(
        scheduler: RequestScheduler,
        queue: RequestQueue,
        workers: WorkerPool<PendingRequest, F>,
        completions: Rc<RefCell<Vec<RequestCompletion>>>,
        limits: RequestLimits,
        namespaces: RequestNamespaces,
    ) -> Requests<F> {
        Requests {
            scheduler,
            queue,
            workers,
            completions,
            delivering: Vec::new(),
            completions_max: limits.node_requests,
            waiting_max: limits.workers,
            removed_namespaces: namespaces.removed,
            is_served: namespaces.is_served,
        }
    }

    /// Requests that have not ended on this core.
    pub fn count(&self) -> usize {
        self.queue.len() + self.scheduler.len() + self.workers.running()
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
        if self.scheduler.is_passthrough() {
            admitted.for_each(|request| self.queue.push(request));
            return metrics.record_executed_locally(count);
        }
        let mut executed_locally = 0;
        for mut request in admitted {
            if let RoutingDecision::Offload(to) = self.scheduler.route(&request) {
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

    /// Takes a request of another core's connection.
    pub fn enqueue(&mut self, request: PendingRequest, accounting: &Accounting, now: Nanos) {
        self.scheduler.enqueue(request, &mut self.queue, &accounting.metrics, now);
    }

    /// Starts the requests that wait for a worker.
    #[inline]
    pub fn start_waiting(&mut self) -> bool {
        self.queue.start(&mut self.workers)
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
        if self.removed_namespaces.is_empty() {
            return false;
        }
        let removed = self.removed_namespaces.take();
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
        let Requests { queue, completions, is_served, .. } = self;
        let completions = &mut *completions.borrow_mut();
        queue.retain(|request| {
            let fails = is_gone(is_served, request.namespace);
            if fails {
                completions.push(missing_namespace_completion(request));
            }
            !fails
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
