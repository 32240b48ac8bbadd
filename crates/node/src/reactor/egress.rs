//! The outbound path: completions to their connections or home cores, responses to hosts, and closed connections.
//!
//! In: completions of workers and of other cores. Out: bytes, in one send per connection and iteration. Invariants: a
//! completion is delivered exactly once; a connection is forgotten only when none of its requests is in execution, on
//! any core.

use super::connections::Connections;
use super::{CLOSES_PER_ITERATION, Reactor, RequestCompletion};
use crate::tenants::OVERFLOW_TENANT;
use octokv_base::Nanos;
use octokv_engine::Engine;
use octokv_nvmf::{CloseReason, Connection, RequestOutcome};
use octokv_runtime::{Sockets, Stage};
use std::convert::Infallible;
use std::future::Future;

impl<S: Sockets, E: Engine, F: Future<Output = Infallible>> Reactor<S, E, F> {
    /// Delivers completions to their connections, or by mailbox to their home cores. The `spent` time on requests
    /// that waited for their devices is divided among the completed ones.
    pub(super) fn deliver_completions(&mut self, now: Nanos, spent: Nanos) -> bool {
        let mut delivering = self.requests.take_completions();
        if delivering.is_empty() && self.links.waiting() == 0 {
            self.requests.return_buffer(delivering);
            return false;
        }
        let each = Nanos(spent.0 / delivering.len().max(1) as u64);
        let (metrics, core) = (&self.accounting.metrics, self.links.core());
        for completions in delivering.chunk_by(|one, next| one.tenant == next.tenant) {
            let tenant = completions[0].tenant;
            self.accounting.charge(tenant, each.times(completions.len()));
            let ended = now + self.accounting.iteration_elapsed();
            let mut batch = metrics.completion_batch(tenant, ended);
            let own = completions.iter().filter(|completion| completion.home_core == core);
            own.for_each(|completion| batch.add(completion.timing));
        }
        for mut completion in delivering.drain(..) {
            let ticket_id = std::mem::take(&mut completion.ticket_id);
            self.requests.scheduler.on_complete(ticket_id, &completion.outcome);
            if completion.home_core == core {
                let RequestCompletion { connection, slot, outcome, .. } = completion;
                self.complete_request(connection, slot, outcome);
            } else {
                let (metrics, home_core) = (&self.accounting.metrics, completion.home_core);
                completion.timing = metrics.transfer_timing(home_core, completion.tenant, completion.timing);
                metrics.record_executed_for(home_core);
                self.links.push_completion(completion);
            }
        }
        self.requests.return_buffer(delivering);
        self.links.send_completions();
        true
    }

    /// Delivers one completion from another core to its connection on this core.
    pub(super) fn complete_remote(&mut self, now: Nanos, completion: RequestCompletion) {
        let RequestCompletion { connection, slot, outcome, tenant, timing, .. } = completion;
        let elapsed = self.accounting.iteration_elapsed();
        self.accounting.metrics.record_completed(tenant, timing, now + elapsed);
        self.complete_request(connection, slot, outcome);
    }

    /// Gives the outcome of a request to its connection on this core.
    #[inline]
    fn complete_request(&mut self, connection: u32, slot: u16, outcome: RequestOutcome) {
        let io = self.connections.get_mut(connection).expect("a connection outlives its requests");
        io.connection.complete(slot, outcome);
        self.connections.mark_send_pending(connection);
    }

    /// Sends pending responses and closes finished connections. The rest is left to the next iteration.
    pub(super) fn send_replies(&mut self) -> bool {
        if self.connections.send_pending.is_empty() {
            return false;
        }
        let (mut worked, mut closes) = (false, 0);
        let share = self.budget.share(self.connections.send_pending.len());
        self.connections.queue_senders(&self.budget);
        let mut time_before = self.accounting.stage_elapsed();
        while let Some(index) = self.connections.send_queue.next(self.budget.is_send_exhausted()) {
            let Some(io) = self.connections.get_mut(index) else { continue };
            if io.connection.is_closed() && closes >= CLOSES_PER_ITERATION {
                io.end_unsendable_loans();
                self.connections.send_pending.push(index);
                worked = true;
                continue;
            }
            let sent = io.send(&mut self.sockets, &mut self.slices);
            let closed = self.close_if_finished(index);
            closes += usize::from(closed);
            if sent.is_some() | closed {
                worked = true;
                self.connections.send_queue.mark_served();
            }
            let stage_time = self.accounting.end_stage(Stage::Target, worked);
            let connection_time = stage_time.since(std::mem::take(&mut time_before));
            self.budget.send_time = self.budget.send_time + connection_time;
            let Some(io) = self.connections.get_mut(index) else { continue };
            if let Some(bytes) = sent {
                let tenant = io.tenant.unwrap_or(OVERFLOW_TENANT);
                self.accounting.charge(tenant, connection_time);
                self.accounting.metrics.add_bytes(tenant, bytes);
                self.budget.account(&mut io.usage, connection_time);
                io.send_quantum.adjust(bytes, connection_time, share);
            }
            io.in_send_list = !io.socket_closed && !io.connection.send_buffer().is_empty();
            if io.in_send_list {
                self.connections.send_pending.push(index);
            }
        }
        let Connections { send_queue, send_pending, .. } = &mut self.connections;
        send_queue.finish();
        let unsent_count = send_pending.len();
        send_pending.extend(send_queue.unserved());
        worked | (send_pending.len() > unsent_count)
    }

    /// Closes the socket of a closed connection once its last bytes are sent, and forgets the connection once its
    /// last request has ended.
    pub(super) fn close_if_finished(&mut self, index: u32) -> bool {
        let Some(io) = self.connections.get_mut(index) else { return false };
        if !io.connection.is_closed() || !io.connection.send_buffer().is_empty() {
            return false;
        }
        let mut worked = false;
        if !io.socket_closed {
            io.socket_closed = true;
            self.sockets.close(io.socket);
            if let Some(suppressed) = self.log_limiter.allow(self.handle.now()) {
                log_disconnect(&io.connection, suppressed);
            }
            let socket = io.socket;
            self.connections.forget_socket(socket);
            worked = true;
        }
        let Some(io) = self.connections.get_mut(index) else { return worked };
        if io.connection.in_flight() == 0 {
            if let Some(tenant) = io.tenant {
                self.accounting.monitor.tenants().release(tenant);
            }
            self.connections.remove(index);
            worked = true;
        }
        worked
    }
}

/// Logs the end of a connection; `suppressed` such lines were left out before.
fn log_disconnect(connection: &Connection, suppressed: u64) {
    let (peer, host) = (connection.peer_address(), connection.host_nqn().unwrap_or("unknown"));
    if let Some(status) = connection.connect_error() {
        tracing::warn!(%peer, host, %status, suppressed, "connect rejected");
        return;
    }
    match connection.close_reason() {
        None | Some(CloseReason::Disconnected | CloseReason::PeerClosed | CloseReason::ControllerEnded) => {
            tracing::info!(%peer, host, suppressed, "disconnected");
        }
        Some(reason) => tracing::warn!(%peer, host, ?reason, suppressed, "connection closed on an error"),
    }
}
