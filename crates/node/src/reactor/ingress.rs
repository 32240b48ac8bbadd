//! The inbound path: connections, messages of other cores, bytes of hosts, and the requests in them.
//!
//! In: sockets and the mailbox. Out: connections, requests that start here or on another core
//! (`crate::request_scheduler`). Invariants: those of the reactor; a connection gets its share of an iteration
//! (`crate::time_budget`), and while requests wait for workers nothing is received.

use super::{ACCEPTS_PER_ITERATION, CoreMessage, MESSAGES_PER_ITERATION_MAX, Reactor, RequestCompletion};
use crate::connection_io::{ConnectionIo, ReceiveBudget};
use crate::core_metrics::MetricsWriter;
use crate::request_queue::{PendingRequest, RequestQueue, TicketId};
use crate::request_scheduler::RequestScheduler;
use crate::tenants::OVERFLOW_TENANT;
use octokv_base::Nanos;
use octokv_nvmf::{Connection, IoRequest};
use octokv_runtime::{Mailbox, SocketId, Sockets, Stage};
use octokv_sched::{CoreId, RoutingDecision, TenantId};
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

/// Admits the requests of this core's connections.
struct RequestAdmission<'a> {
    core: CoreId,
    scheduler: &'a mut RequestScheduler,
    request_queue: &'a mut RequestQueue,
    mailbox: &'a mut Mailbox<CoreMessage>,
    metrics: &'a MetricsWriter,
    now: Nanos,
}

impl RequestAdmission<'_> {
    /// Starts, queues or offloads a connection's requests, and leaves the vector empty.
    fn admit(self, connection: u32, tenant: TenantId, requests: &mut Vec<IoRequest>) {
        let RequestAdmission { core, scheduler, request_queue, mailbox, metrics, now } = self;
        let count = requests.len() as u64;
        let timing = metrics.record_started(tenant, count);
        let admitted = requests.drain(..).map(|IoRequest { slot, namespace, operation }| PendingRequest {
            home_core: core,
            connection,
            slot,
            namespace,
            operation,
            tenant,
            timing,
            ticket_id: TicketId::NONE,
        });
        if scheduler.is_passthrough() {
            admitted.for_each(|request| request_queue.push(request));
            return metrics.record_executed_locally(count);
        }
        let mut executed_locally = 0;
        for mut request in admitted {
            if let RoutingDecision::Offload(to) = scheduler.route(&request) {
                let timing = request.timing;
                request.timing = metrics.transfer_timing(to, tenant, timing);
                match mailbox.send(to.index(), CoreMessage::Execute(request)) {
                    Ok(()) => {
                        metrics.record_offloaded_to(to);
                        continue;
                    }
                    // A full ring means that core is busy enough: run it here.
                    Err(CoreMessage::Execute(returned)) => request = PendingRequest { timing, ..returned },
                    Err(CoreMessage::NewConnection { .. } | CoreMessage::Completed(_)) => {
                        unreachable!("send returns the message it was given")
                    }
                }
            }
            executed_locally += 1;
            scheduler.enqueue(request, request_queue, metrics, now);
        }
        metrics.record_executed_locally(executed_locally);
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    pub(super) fn accept(&mut self, now: Nanos) -> bool {
        if self.draining {
            return false;
        }
        let mut worked = false;
        for index in 0..self.listeners.len() {
            let (listener, address) = self.listeners[index];
            // If the other cores' rings are full, the kernel's accept queue holds new connections.
            for _ in self.unassigned.len()..ACCEPTS_PER_ITERATION {
                let Some((socket, peer)) = self.sockets.accept(listener) else { break };
                let local = self.sockets.local_address(socket).unwrap_or(address);
                self.unassigned.push_back((socket, local, peer));
                worked = true;
            }
        }
        while let Some((socket, local, peer)) = self.unassigned.pop_front() {
            // I/O queues are spread evenly. An admin queue, known as one after Connect, does not count: otherwise
            // hosts with one I/O queue would have all of them on every second core.
            let to = self.assigned_count.wrapping_sub(self.target.controllers_created())
                % self.mailbox.core_count();
            if to == self.core {
                self.add_connection(socket, local, peer, now);
            } else if self.mailbox.free_slots(to) == 0 {
                self.unassigned.push_front((socket, local, peer));
                break;
            } else if let Some(socket) = self.sockets.detach(socket) {
                let sent = self.mailbox.send(to, CoreMessage::NewConnection { socket, local, peer });
                assert!(sent.is_ok(), "free_slots was above zero");
            }
            self.assigned_count += 1;
        }
        worked
    }

    /// Handles messages of other cores: at most [`MESSAGES_PER_ITERATION_MAX`], and none while `requests_max` requests
    /// wait for workers. Then messages stay in their rings, which are bounded, and a core whose ring is full executes its
    /// requests itself. Workers never wait for a message, so the queue shrinks and receiving resumes.
    pub(super) fn process_messages(&mut self, now: Nanos) -> bool {
        let mut count = 0;
        while count < MESSAGES_PER_ITERATION_MAX
            && self.request_queue.len() < self.requests_max
            && let Some(message) = self.mailbox.receive()
        {
            self.process_message(message, now);
            count += 1;
        }
        count > 0
    }

    pub(super) fn process_message(&mut self, message: CoreMessage, now: Nanos) {
        match message {
            CoreMessage::NewConnection { socket, local, peer } => {
                let socket = self.sockets.attach(socket);
                self.add_connection(socket, local, peer, now);
            }
            CoreMessage::Execute(request) => {
                self.scheduler.enqueue(request, &mut self.request_queue, &self.metrics, now)
            }
            CoreMessage::Completed(completion) => self.complete_request(now, completion),
        }
    }

    pub(super) fn add_connection(
        &mut self,
        socket: SocketId,
        local: SocketAddr,
        peer: SocketAddr,
        now: Nanos,
    ) {
        // Checked here and not at accept, when connections not yet adopted do not count.
        if !self.target.can_accept_connection() {
            if let Some(suppressed) = self.log_limiter.allow(now) {
                tracing::warn!(%peer, suppressed, "connection rejected: connections_max reached");
            }
            self.sockets.close(socket);
            return;
        }
        if let Some(suppressed) = self.log_limiter.allow(now) {
            tracing::info!(%peer, core = self.core, suppressed, "connected");
        }
        let io = ConnectionIo::new(socket, Connection::new(Arc::clone(&self.target), local, peer, now));
        let index = self.free_connections.pop().unwrap_or_else(|| {
            self.connections.push(None);
            (self.connections.len() - 1) as u32
        });
        self.connections[index as usize] = Some(io);
        self.by_socket.insert(socket, index);
        self.next_tick = now;
    }

    /// Queues the connections with readable sockets, except stalled and closed ones and those of a full tenant.
    fn queue_ready_connections(&mut self) {
        self.ready_sockets.clear();
        self.sockets.ready(&mut self.ready_sockets);
        self.receive_queue.rebuild(self.ready_sockets.iter().filter_map(|socket| {
            let index = *self.by_socket.get(socket)?;
            let io = self.connections[index as usize].as_ref().filter(|io| io.may_receive())?;
            if io.tenant.is_some_and(|tenant| self.scheduler.is_tenant_full(tenant)) {
                return None;
            }
            Some((index, self.budget.is_heavy(io.usage)))
        }));
    }

    pub(super) fn receive(&mut self, now: Nanos) -> bool {
        if self.draining || !self.request_queue.is_empty() {
            return false;
        }
        let mut worked = false;
        self.queue_ready_connections();
        let share = self.budget.share(self.active_connections);
        let Reactor { sockets, receive_buffer, pool, connections, handle, .. } = self;
        let Reactor { requests, request_queue, workers, completions, .. } = self;
        let Reactor { scheduler, mailbox, metrics, monitor, costs, .. } = self;
        let core = CoreId::from_index(self.core);
        // Time before this belongs to no connection.
        let mut time_before = handle.cpu_time().stage_elapsed();
        let mut received_from = std::mem::take(&mut self.received_from);
        while let Some(index) = self.receive_queue.next(self.budget.is_receive_exhausted()) {
            let Some(io) = &mut connections[index as usize] else { continue };
            let mut connection_time = Nanos::ZERO;
            let tenant = io.resolve_tenant(monitor.tenants());
            let execute = |connection: &mut Connection, requests: &mut Vec<IoRequest>| {
                handle.cpu_time().advance_simulated(Stage::Target, costs.target.times(requests.len()));
                let ingress_time = handle.cpu_time().end_stage(Stage::Target, true);
                metrics.add_cpu_time(tenant, ingress_time);
                RequestAdmission { core, scheduler, request_queue, mailbox, metrics, now }
                    .admit(index, tenant, requests);
                let started = request_queue.start(workers);
                let execute_time = handle.cpu_time().end_stage(Stage::Kv, started);
                metrics.add_cpu_time(tenant, execute_time);
                connection_time = connection_time + ingress_time + execute_time;
                // A completed request reserves response space by its actual length, no longer by its maximum.
                let is_own = |completion: &mut RequestCompletion| {
                    completion.home_core == core
                        && completion.connection == index
                        && completion.tenant == tenant
                };
                let mut batch = metrics.completion_batch(tenant, now + handle.cpu_time().iteration_elapsed());
                for completion in completions.borrow_mut().extract_if(.., is_own) {
                    scheduler.on_complete(completion.ticket_id, &completion.outcome);
                    batch.add(completion.timing);
                    connection.complete(completion.slot, completion.outcome);
                }
                drop(batch);
                match request_queue.is_empty() && connection_time < share {
                    true if connection_time.0 < share.0 / 4 => ReceiveBudget::Ample,
                    true => ReceiveBudget::Low,
                    false => ReceiveBudget::Exhausted,
                }
            };
            let received = io.receive(now, sockets, receive_buffer, pool, execute, requests);
            connection_time = connection_time.since(std::mem::take(&mut time_before));
            if let Some(bytes) = received {
                metrics.add_bytes(tenant, bytes);
                self.receive_queue.mark_served();
                io.receive_quantum.adjust(bytes, connection_time, share);
                self.budget.receive_time = self.budget.receive_time + connection_time;
                self.budget.account(&mut io.usage, connection_time);
                worked = true;
                received_from.push(index);
            }
        }
        self.receive_queue.finish();
        self.active_connections = received_from.len();
        for index in received_from.drain(..) {
            self.mark_send_pending(index);
        }
        self.received_from = received_from;
        worked
    }

    /// Feeds stalled connections their unconsumed bytes, in rotation, while this iteration has time.
    pub(super) fn resume_stalled(&mut self, now: Nanos) -> bool {
        if self.draining || !self.request_queue.is_empty() {
            return false;
        }
        let mut worked = false;
        let mut queue = std::mem::take(&mut self.resume_queue);
        let stalled = self.connections.iter().enumerate().filter_map(|(index, io)| {
            let io = io.as_ref().filter(|io| io.is_stalled())?;
            let full = io.tenant.is_some_and(|tenant| self.scheduler.is_tenant_full(tenant));
            (!full).then_some((index as u32, true))
        });
        queue.rebuild(stalled);
        let share = self.budget.share(queue.len());
        let mut time_before = self.handle.cpu_time().stage_elapsed();
        while self.request_queue.is_empty()
            && let Some(index) = queue.next(self.budget.is_receive_exhausted())
        {
            let Some(io) = &mut self.connections[index as usize] else { continue };
            let bytes = io.resume(now, &self.pool, &mut self.requests);
            let tenant = io.tenant.unwrap_or(OVERFLOW_TENANT);
            self.handle
                .cpu_time()
                .advance_simulated(Stage::Target, self.costs.target.times(self.requests.len()));
            let ingress_time = self.handle.cpu_time().end_stage(Stage::Target, bytes > 0);
            let mut connection_time = ingress_time.since(std::mem::take(&mut time_before));
            let Reactor { scheduler, request_queue, mailbox, metrics, requests, .. } = self;
            RequestAdmission {
                core: CoreId::from_index(self.core),
                scheduler,
                request_queue,
                mailbox,
                metrics,
                now,
            }
            .admit(index, tenant, requests);
            let started = self.start_requests(now);
            connection_time = connection_time + self.handle.cpu_time().end_stage(Stage::Kv, started);
            self.metrics.add_cpu_time(tenant, connection_time);
            if let Some(io) = &mut self.connections[index as usize]
                && bytes > 0
            {
                io.receive_quantum.adjust(bytes, connection_time, share);
                self.budget.account(&mut io.usage, connection_time);
                queue.mark_served();
                worked = true;
            }
            self.budget.receive_time = self.budget.receive_time + connection_time;
            self.mark_send_pending(index);
        }
        queue.finish();
        self.resume_queue = queue;
        worked
    }
}
