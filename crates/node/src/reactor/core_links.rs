//! Messages between this core and the others.
//!
//! In: requests for other cores, completions of their requests. Out: messages in their rings; those of the own ring.
//! Invariants: a message is sent once; what a full ring does not take stays here (completions) or with the sender
//! (requests, connections).

use super::messages::{CoreMessage, RequestCompletion};
use crate::bug_injection::{self, InjectedBug};
use crate::request_queue::PendingRequest;
use octokv_runtime::{DetachedSocket, Mailbox};
use octokv_sched::CoreId;
use std::collections::VecDeque;
use std::net::SocketAddr;

/// See the module header.
pub(super) struct CoreLinks {
    core: CoreId,
    mailbox: Mailbox<CoreMessage>,
    /// Completions for other cores whose rings are full: at most `outbound_max`.
    outbound: VecDeque<RequestCompletion>,
    outbound_max: usize,
}

impl CoreLinks {
    /// The links of core `core`, of which at most `outbound_max` completions wait.
    pub fn new(core: CoreId, mailbox: Mailbox<CoreMessage>, outbound_max: usize) -> CoreLinks {
        CoreLinks { core, mailbox, outbound: VecDeque::new(), outbound_max }
    }

    /// This core.
    pub fn core(&self) -> CoreId {
        self.core
    }

    /// The number of cores.
    pub fn core_count(&self) -> usize {
        self.mailbox.core_count()
    }

    /// The next message for this core.
    pub fn receive(&mut self) -> Option<CoreMessage> {
        self.mailbox.receive()
    }

    /// All messages for this core that were sent before.
    pub fn receive_queued(&mut self) -> Vec<CoreMessage> {
        let mut messages = Vec::new();
        self.mailbox.drain_queued(|message| messages.push(message));
        messages
    }

    /// Wakes a core.
    pub fn wake(&self, core: usize) {
        self.mailbox.wake(core);
    }

    /// Whether a message for a core would find room.
    pub fn has_room(&self, to: usize) -> bool {
        self.mailbox.free_slots(to) > 0
    }

    /// Hands a connection over. REQUIRES: [`CoreLinks::has_room`].
    pub fn hand_over(&mut self, to: usize, socket: DetachedSocket, local: SocketAddr, peer: SocketAddr) {
        let sent = self.mailbox.send(to, CoreMessage::NewConnection { socket, local, peer });
        assert!(sent.is_ok(), "there was room");
    }

    /// Sends a request to another core.
    ///
    /// # Errors
    /// The request, if that core's ring is full.
    pub fn offload(&mut self, to: CoreId, request: PendingRequest) -> Result<(), PendingRequest> {
        match self.mailbox.send(to.index(), CoreMessage::Execute(request)) {
            Ok(()) => Ok(()),
            Err(CoreMessage::Execute(returned)) => Err(returned),
            Err(CoreMessage::NewConnection { .. } | CoreMessage::Completed(_)) => {
                unreachable!("send returns the message it was given")
            }
        }
    }

    /// Queues a completion for the core of its connection.
    pub fn push_completion(&mut self, completion: RequestCompletion) {
        self.outbound.push_back(completion);
    }

    /// Sends the queued completions. A full ring delays only its own.
    ///
    /// # Panics
    /// More of them wait than the node has command slots: a bug of this program.
    pub fn send_completions(&mut self) {
        assert!(self.outbound.len() <= self.outbound_max, "more completions than command slots");
        for _ in 0..self.outbound.len() {
            let Some(completion) = self.outbound.pop_front() else { break };
            if let Err(CoreMessage::Completed(completion)) =
                self.mailbox.send(completion.home_core.index(), CoreMessage::Completed(completion))
            {
                if bug_injection::is_injected(InjectedBug::LoseOffloadedCompletion) {
                    continue;
                }
                self.outbound.push_back(completion);
            }
        }
    }

    /// Completions that wait for room in a ring.
    pub fn waiting(&self) -> usize {
        self.outbound.len()
    }
}
