//! The inbound path: connections, messages of other cores, bytes of hosts, and the requests in them.
//!
//! In: sockets and the mailbox. Out: connections, requests that start here or on another core
//! (`crate::request_scheduler`). Invariants: those of the reactor; a connection gets its share of an iteration
//! (`crate::time_budget`), and while requests wait for workers nothing is received.

use super::acceptor::AcceptedConnection;
use super::accounting::GroupAccounting;
use super::connections::Connections;
use super::direct_executor::DirectExecutor;
use super::{CoreMessage, MESSAGES_PER_ITERATION_MAX, Reactor, RequestCompletion};
use crate::connection_io::{ConnectionIo, ReceiveBudget};
use crate::tenants::OVERFLOW_TENANT;
use octokv_base::Nanos;
use octokv_engine::Engine;
use octokv_nvmf::{Connection, IoRequest};
use octokv_runtime::{Sockets, Stage};
use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;

impl<S: Sockets, E: Engine, F: Future<Output = Infallible>> Reactor<S, E, F> {
    pub(super) fn accept(&mut self, now: Nanos) -> bool {
        if self.draining {
            return false;
        }
        let worked = self.acceptor.accept(&mut self.sockets);
        while let Some(accepted) = self.acceptor.assign(&mut self.sockets, &self.target, &mut self.links) {
            self.add_connection(accepted, now);
        }
        // No event announces space in another core's ring: until there is some, every iteration tries again.
        worked | (self.acceptor.unassigned() > 0)
    }

    /// Handles messages of other cores: at most [`MESSAGES_PER_ITERATION_MAX`], and none while `requests_max` requests
    /// wait for workers. Then messages stay in their rings, which are bounded, and a core whose ring is full executes its
    /// requests itself. Workers never wait for a message, so the queue shrinks and receiving resumes.
    pub(super) fn process_messages(&mut self, now: Nanos) -> bool {
        let mut count = 0;
        while count < MESSAGES_PER_ITERATION_MAX
            && self.requests.has_room()
            && let Some(message) = self.links.receive()
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
                self.add_connection((socket, local, peer), now);
            }
            CoreMessage::Execute(request) => self.requests.enqueue(request, &self.accounting, now),
            CoreMessage::Completed(completion) => self.complete_remote(now, completion),
        }
    }

    fn add_connection(&mut self, (socket, local, peer): AcceptedConnection, now: Nanos) {
        // Checked here and not at accept, when connections not yet adopted do not count.
        if !self.target.can_accept_connection() {
            if let Some(suppressed) = self.log_limiter.allow(now) {
                tracing::warn!(%peer, suppressed, "connection rejected: connections_max reached");
            }
            self.sockets.close(socket);
            return;
        }
        if let Some(suppressed) = self.log_limiter.allow(now) {
            tracing::info!(%peer, core = self.links.core().index(), suppressed, "connected");
        }
        let io = ConnectionIo::new(socket, Connection::new(Arc::clone(&self.target), local, peer, now));
        self.connections.add(io, now);
    }

    /// Queues the connections with readable sockets, except stalled and closed ones and those of a full tenant.
    fn queue_ready_connections(&mut self) {
        self.ready_sockets.clear();
        self.sockets.ready(&mut self.ready_sockets);
        self.peers.ready_is_current = true;
        let scheduler = &self.requests.scheduler;
        let is_held = |io: &ConnectionIo| io.tenant.is_some_and(|tenant| scheduler.is_tenant_full(tenant));
        self.connections.queue_ready(&self.ready_sockets, &self.budget, is_held);
    }

    pub(super) fn receive(&mut self, now: Nanos) -> bool {
        if self.draining || self.requests.are_waiting() {
            return false;
        }
        let mut worked = false;
        self.queue_ready_connections();
        let share = self.budget.share(self.connections.active_count);
        let Reactor { sockets, receive_buffer, pool, connections, requests, .. } = self;
        let Reactor { links, accounting, parsed, budget, namespaces, .. } = self;
        let Connections { slots, receive_queue, received_from, .. } = connections;
        let core = links.core();
        // Time before this belongs to no connection.
        let mut time_before = accounting.stage_elapsed();
        while let Some(index) = receive_queue.next(budget.is_receive_exhausted()) {
            let Some(io) = &mut slots[index as usize] else { continue };
            let mut connection_time = Nanos::ZERO;
            let tenant = io.resolve_tenant(accounting.monitor.tenants());
            let (group_time, executed) = (Cell::new(Nanos::ZERO), Cell::new((0, 0)));
            let group_accounting = GroupAccounting {
                accounting,
                tenant,
                now,
                parse_time: Cell::default(),
                time: &group_time,
                executed: &executed,
            };
            let is_direct = requests.scheduler.may_execute_directly(tenant, now);
            let loans = std::mem::take(&mut io.loans);
            let mut direct = DirectExecutor::new(namespaces, group_accounting, is_direct, loans);
            let execute = |connection: &mut Connection, parsed: &mut Vec<IoRequest>| {
                let ingress_time = accounting.end_ingress(parsed.len(), true);
                requests.admit((index, tenant), parsed, links, accounting, now);
                let started = requests.start_waiting();
                let slice_time = ingress_time + accounting.end_stage(Stage::Kv, started);
                accounting.charge(tenant, slice_time);
                connection_time = connection_time + group_time.take() + slice_time;
                // A completed request reserves response space by its actual length, no longer by its maximum.
                let is_own = |completion: &mut RequestCompletion| {
                    completion.home_core == core
                        && completion.connection == index
                        && completion.tenant == tenant
                };
                let mut batch =
                    accounting.metrics.completion_batch(tenant, now + accounting.iteration_elapsed());
                for completion in requests.completions.borrow_mut().extract_if(.., is_own) {
                    requests.scheduler.on_complete(completion.ticket_id, &completion.outcome);
                    batch.add(completion.timing);
                    connection.complete(completion.slot, completion.outcome);
                }
                drop(batch);
                match !requests.are_waiting() && connection_time < share {
                    true if connection_time.0 < share.0 / 4 => ReceiveBudget::Ample,
                    true => ReceiveBudget::Low,
                    false => ReceiveBudget::Exhausted,
                }
            };
            let received = io.receive(now, sockets, receive_buffer, pool, &mut direct, execute, parsed);
            io.loans = direct.into_loans();
            let (commands, bytes) = executed.get();
            requests.scheduler.charge_direct(tenant, commands, bytes, &accounting.metrics, now);
            connection_time = connection_time.since(std::mem::take(&mut time_before));
            if let Some(bytes) = received {
                accounting.metrics.add_bytes(tenant, bytes);
                receive_queue.mark_served();
                io.receive_quantum.adjust(bytes, connection_time, share);
                budget.receive_time = budget.receive_time + connection_time;
                budget.account(&mut io.usage, connection_time);
                worked = true;
                received_from.push(index);
            }
        }
        receive_queue.finish();
        let mut received_from = std::mem::take(received_from);
        connections.active_count = received_from.len();
        for index in received_from.drain(..) {
            connections.mark_send_pending(index);
        }
        connections.received_from = received_from;
        worked
    }

    /// Feeds stalled connections their unconsumed bytes, in rotation, while this iteration has time.
    pub(super) fn resume_stalled(&mut self, now: Nanos) -> bool {
        let is_any_stalled = self.connections.iter().any(ConnectionIo::is_stalled);
        if !is_any_stalled || self.draining || self.requests.are_waiting() {
            return false;
        }
        let mut worked = false;
        let Reactor { connections, requests, links, accounting, budget, pool, parsed, .. } = self;
        let scheduler = &requests.scheduler;
        let is_held = |io: &ConnectionIo| io.tenant.is_some_and(|tenant| scheduler.is_tenant_full(tenant));
        connections.queue_stalled(is_held);
        let share = budget.share(connections.resume_queue.len());
        let mut time_before = accounting.stage_elapsed();
        while !requests.are_waiting()
            && let Some(index) = connections.resume_queue.next(budget.is_receive_exhausted())
        {
            let Some(io) = connections.get_mut(index) else { continue };
            let bytes = io.resume(now, pool, parsed);
            let tenant = io.tenant.unwrap_or(OVERFLOW_TENANT);
            let ingress_time = accounting.end_ingress(parsed.len(), bytes > 0);
            let mut connection_time = ingress_time.since(std::mem::take(&mut time_before));
            requests.admit((index, tenant), parsed, links, accounting, now);
            let started = requests.start(accounting, now);
            connection_time = connection_time + accounting.end_stage(Stage::Kv, started);
            accounting.charge(tenant, connection_time);
            // The requests may be other connections' requests, released by the scheduler.
            worked |= started;
            if let Some(io) = connections.get_mut(index) {
                // A socket with bytes causes no further event, so a connection that may receive again needs an
                // iteration: its rest is the head of a PDU.
                worked |= bytes > 0 || !io.is_stalled();
                if bytes > 0 {
                    io.receive_quantum.adjust(bytes, connection_time, share);
                    budget.account(&mut io.usage, connection_time);
                    connections.resume_queue.mark_served();
                }
            }
            budget.receive_time = budget.receive_time + connection_time;
            connections.mark_send_pending(index);
        }
        connections.resume_queue.finish();
        worked
    }
}
