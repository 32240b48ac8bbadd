//! What goes out: outcomes to their connections or to the cores that have them, replies to hosts, and the ends of links.
//!
//! In: what workers have ended, what other cores sent back. Out: bytes, by one send for a link and turn. Invariants: an outcome is
//! handed on exactly once; a link is forgotten only when none of its requests is out, on whatever core.

use super::{CLOSES_AT_ONCE, Finished, Message, Reactor};
use crate::bug_injection::{self, Bug};
use crate::tenants::OTHERS;
use octokv_base::Nanos;
use octokv_nvmf::{Closing, Connection};
use octokv_runtime::{Sockets, Stage};
use std::convert::Infallible;
use std::future::Future;

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    /// Hands outcomes to their connections, those of other cores' by their mailboxes. The time `spent` on requests that
    /// waited for their devices is shared by those that ended.
    pub(super) fn deliver(&mut self, now: Nanos, spent: Nanos) -> bool {
        std::mem::swap(&mut self.delivering, &mut *self.finished.borrow_mut());
        if self.delivering.is_empty() && self.outbound.is_empty() {
            return false;
        }
        let mut delivering = std::mem::take(&mut self.delivering);
        let each = Nanos(spent.0 / delivering.len().max(1) as u64);
        for mut done in delivering.drain(..) {
            self.tally.worked(done.flow, each);
            self.dispatch.done(std::mem::take(&mut done.note), &done.outcome);
            if done.home.index() == self.core {
                self.answer(now, done);
            } else {
                done.stamp = self.tally.towards(done.home, done.flow, done.stamp);
                self.tally.ran_for(done.home);
                self.outbound.push_back(done);
            }
        }
        self.delivering = delivering;
        // Those that find no room are passed by: others' rings may have some.
        for _ in 0..self.outbound.len() {
            let Some(done) = self.outbound.pop_front() else { break };
            if let Err(Message::Done(done)) = self.mailbox.send(done.home.index(), Message::Done(done)) {
                if bug_injection::is(Bug::LoseMovedAnswer) {
                    continue;
                }
                self.outbound.push_back(done);
            }
        }
        true
    }

    /// Hands one outcome to its connection on this core.
    pub(super) fn answer(&mut self, now: Nanos, done: Finished) {
        let link = self.links[done.link as usize].as_mut().expect("kept while its requests are out");
        self.tally.answered(done.flow, done.stamp, now + self.handle.busy().within_turn());
        link.connection.complete(now, done.slot, done.outcome);
        self.has_news(done.link);
    }

    /// Sends what links have to say, and closes those that are over. What there is no time for is left to the next turn.
    pub(super) fn send(&mut self) -> bool {
        let (mut worked, mut closes) = (false, 0);
        let share = self.this_turn.share(self.unsent.len());
        let mut line = std::mem::take(&mut self.sending);
        line.form(self.unsent.drain(..).filter_map(|index| {
            let link = self.links[index as usize].as_ref()?;
            Some((index, self.this_turn.asks_much(link.talk)))
        }));
        let mut before = self.handle.busy().since_lap();
        while let Some(index) = line.next(self.this_turn.is_over_for_sending()) {
            let Some(link) = &mut self.links[index as usize] else { continue };
            if link.connection.is_closed() && closes >= CLOSES_AT_ONCE {
                self.unsent.push(index);
                worked = true;
                continue;
            }
            let sent = link.send(&mut self.sockets, &mut self.slices);
            let closed = self.close_if_over(index);
            closes += usize::from(closed);
            if sent.is_some() | closed {
                worked = true;
                line.had_part();
            }
            let of_link = self.handle.busy().lap(Stage::Target, worked).since(std::mem::take(&mut before));
            self.this_turn.sending = self.this_turn.sending + of_link;
            let Some(link) = &mut self.links[index as usize] else { continue };
            if let Some(bytes) = sent {
                let flow = link.flow.unwrap_or(OTHERS);
                self.tally.worked(flow, of_link);
                self.tally.bytes(flow, bytes);
                self.this_turn.took(&mut link.talk, of_link);
                link.send_quantum.learn(bytes, of_link, share);
            }
            link.listed = !link.socket_closed && !link.connection.outbox().is_empty();
            if link.listed {
                self.unsent.push(index);
            }
        }
        line.end();
        let reached = self.unsent.len();
        self.unsent.extend(line.rest());
        worked |= self.unsent.len() > reached;
        self.sending = line;
        worked
    }

    /// Closes a link's socket once its machine is over and its last bytes are out, and forgets the link
    /// once its last request has ended.
    pub(super) fn close_if_over(&mut self, index: u32) -> bool {
        let Some(link) = &mut self.links[index as usize] else { return false };
        if !link.connection.is_closed() || !link.connection.outbox().is_empty() {
            return false;
        }
        let mut worked = false;
        if !link.socket_closed {
            link.socket_closed = true;
            self.sockets.close(link.socket);
            self.by_socket.remove(&link.socket);
            if let Some(untold) = self.gate.open(self.handle.now()) {
                log_end(&link.connection, untold);
            }
            worked = true;
        }
        if link.connection.in_flight() == 0 {
            if let Some(flow) = link.flow {
                self.scheduling.flows().leave(flow);
            }
            self.links[index as usize] = None;
            self.free_links.push(index);
            worked = true;
        }
        worked
    }
}

/// `untold` such lines were left out before this one.
fn log_end(connection: &Connection, untold: u64) {
    let (peer, host) = (connection.peer(), connection.host_nqn().unwrap_or("unknown"));
    if let Some(status) = connection.refused() {
        tracing::warn!(%peer, host, %status, untold, "a connect was refused");
        return;
    }
    match connection.closing_reason() {
        None | Some(Closing::Disconnected | Closing::PeerClosed | Closing::ControllerEnded) => {
            tracing::info!(%peer, host, untold, "disconnected");
        }
        Some(reason) => tracing::warn!(%peer, host, ?reason, untold, "connection refused or ended"),
    }
}
