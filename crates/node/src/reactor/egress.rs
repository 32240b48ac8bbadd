//! The outbound path: completions to their connections or home cores, responses to hosts, and closed connections.
//!
//! In: completions of workers and of other cores. Out: bytes, in one send per connection and iteration. Invariants: a
//! completion is delivered exactly once; a connection is forgotten only when none of its requests is in execution, on
//! any core.

use super::{CLOSES_PER_ITERATION, CoreMessage, Reactor, RequestCompletion};
use crate::bug_injection::{self, InjectedBug};
use crate::tenants::OVERFLOW_TENANT;
use octokv_base::Nanos;
use octokv_nvmf::{CloseReason, Connection};
use octokv_runtime::{Sockets, Stage};
use std::convert::Infallible;
use std::future::Future;

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    /// Delivers completions to their connections, or by mailbox to their home cores. The `spent` time on requests
    /// that waited for their devices is divided among the completed ones.
    pub(super) fn deliver_completions(&mut self, now: Nanos, spent: Nanos) -> bool {
        std::mem::swap(&mut self.delivering, &mut *self.completions.borrow_mut());
        if self.delivering.is_empty() && self.outbound_completions.is_empty() {
            return false;
        }
        let mut delivering = std::mem::take(&mut self.delivering);
        let each = Nanos(spent.0 / delivering.len().max(1) as u64);
        for mut completion in delivering.drain(..) {
            self.metrics.add_cpu_time(completion.tenant, each);
            self.scheduler.on_complete(std::mem::take(&mut completion.ticket_id), &completion.outcome);
            if completion.home_core.index() == self.core {
                self.complete_request(now, completion);
            } else {
                completion.timing =
                    self.metrics.transfer_timing(completion.home_core, completion.tenant, completion.timing);
                self.metrics.record_executed_for(completion.home_core);
                self.outbound_completions.push_back(completion);
            }
        }
        self.delivering = delivering;
        assert!(
            self.outbound_completions.len() <= self.node_requests_max,
            "more completions than command slots"
        );
        // A full ring delays only its own completions.
        for _ in 0..self.outbound_completions.len() {
            let Some(completion) = self.outbound_completions.pop_front() else { break };
            if let Err(CoreMessage::Completed(completion)) =
                self.mailbox.send(completion.home_core.index(), CoreMessage::Completed(completion))
            {
                if bug_injection::is_injected(InjectedBug::LoseOffloadedCompletion) {
                    continue;
                }
                self.outbound_completions.push_back(completion);
            }
        }
        true
    }

    /// Delivers one completion to its connection on this core.
    pub(super) fn complete_request(&mut self, now: Nanos, completion: RequestCompletion) {
        let io = self.connections[completion.connection as usize]
            .as_mut()
            .expect("a connection outlives its requests");
        self.metrics.record_completed(
            completion.tenant,
            completion.timing,
            now + self.handle.cpu_time().iteration_elapsed(),
        );
        io.connection.complete(completion.slot, completion.outcome);
        self.mark_send_pending(completion.connection);
    }

    /// Sends pending responses and closes finished connections. The rest is left to the next iteration.
    pub(super) fn send_replies(&mut self) -> bool {
        let (mut worked, mut closes) = (false, 0);
        let share = self.budget.share(self.send_pending.len());
        let mut queue = std::mem::take(&mut self.send_queue);
        queue.rebuild(self.send_pending.drain(..).filter_map(|index| {
            let io = self.connections[index as usize].as_ref()?;
            Some((index, self.budget.is_heavy(io.usage)))
        }));
        let mut time_before = self.handle.cpu_time().stage_elapsed();
        while let Some(index) = queue.next(self.budget.is_send_exhausted()) {
            let Some(io) = &mut self.connections[index as usize] else { continue };
            if io.connection.is_closed() && closes >= CLOSES_PER_ITERATION {
                self.send_pending.push(index);
                worked = true;
                continue;
            }
            let sent = io.send(&mut self.sockets, &mut self.slices);
            let closed = self.close_if_finished(index);
            closes += usize::from(closed);
            if sent.is_some() | closed {
                worked = true;
                queue.mark_served();
            }
            let connection_time = self
                .handle
                .cpu_time()
                .end_stage(Stage::Target, worked)
                .since(std::mem::take(&mut time_before));
            self.budget.send_time = self.budget.send_time + connection_time;
            let Some(io) = &mut self.connections[index as usize] else { continue };
            if let Some(bytes) = sent {
                let tenant = io.tenant.unwrap_or(OVERFLOW_TENANT);
                self.metrics.add_cpu_time(tenant, connection_time);
                self.metrics.add_bytes(tenant, bytes);
                self.budget.account(&mut io.usage, connection_time);
                io.send_quantum.adjust(bytes, connection_time, share);
            }
            io.in_send_list = !io.socket_closed && !io.connection.send_buffer().is_empty();
            if io.in_send_list {
                self.send_pending.push(index);
            }
        }
        queue.finish();
        let unsent_count = self.send_pending.len();
        self.send_pending.extend(queue.unserved());
        worked |= self.send_pending.len() > unsent_count;
        self.send_queue = queue;
        worked
    }

    /// Closes the socket of a closed connection once its last bytes are sent, and forgets the connection once its
    /// last request has ended.
    pub(super) fn close_if_finished(&mut self, index: u32) -> bool {
        let Some(io) = &mut self.connections[index as usize] else { return false };
        if !io.connection.is_closed() || !io.connection.send_buffer().is_empty() {
            return false;
        }
        let mut worked = false;
        if !io.socket_closed {
            io.socket_closed = true;
            self.sockets.close(io.socket);
            self.by_socket.remove(&io.socket);
            if let Some(suppressed) = self.log_limiter.allow(self.handle.now()) {
                log_disconnect(&io.connection, suppressed);
            }
            worked = true;
        }
        if io.connection.in_flight() == 0 {
            if let Some(tenant) = io.tenant {
                self.monitor.tenants().release(tenant);
            }
            self.connections[index as usize] = None;
            self.free_connections.push(index);
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
