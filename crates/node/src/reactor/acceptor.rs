//! New connections of a node, on the first core: accepted, and assigned to all cores in rotation.
//!
//! Invariants: at most [`ACCEPTS_PER_ITERATION`] accepted connections wait for a core; behind them, the kernel's accept
//! queue holds new ones.

use super::core_links::CoreLinks;
use octokv_nvmf::Target;
use octokv_runtime::{ListenerId, SocketId, Sockets};
use std::collections::VecDeque;
use std::net::SocketAddr;

/// Connections accepted per iteration: a connect flood leaves time for established ones.
const ACCEPTS_PER_ITERATION: usize = 2;

/// A connection: socket, local address, address of the host.
pub(super) type AcceptedConnection = (SocketId, SocketAddr, SocketAddr);

/// See the module header.
pub(super) struct Acceptor {
    listeners: Vec<(ListenerId, SocketAddr)>,
    unassigned: VecDeque<AcceptedConnection>,
    /// Connections assigned to cores so far.
    assigned_count: usize,
}

impl Acceptor {
    /// Accepts on these listeners, of which only the first core has any.
    pub fn new(listeners: Vec<(ListenerId, SocketAddr)>) -> Acceptor {
        Acceptor { listeners, unassigned: VecDeque::new(), assigned_count: 0 }
    }

    /// Accepts connections. True if there were any.
    pub fn accept(&mut self, sockets: &mut impl Sockets) -> bool {
        let mut worked = false;
        for &(listener, address) in &self.listeners {
            for _ in self.unassigned.len()..ACCEPTS_PER_ITERATION {
                let Some((socket, peer)) = sockets.accept(listener) else { break };
                let local = sockets.local_address(socket).unwrap_or(address);
                self.unassigned.push_back((socket, local, peer));
                worked = true;
            }
        }
        assert!(self.unassigned.len() <= ACCEPTS_PER_ITERATION, "more accepted than a core may hold");
        worked
    }

    /// Assigns accepted connections to cores while their rings have room. The next one of this core, if any.
    pub fn assign(
        &mut self,
        sockets: &mut impl Sockets,
        target: &Target,
        links: &mut CoreLinks,
    ) -> Option<AcceptedConnection> {
        while let Some((socket, local, peer)) = self.unassigned.pop_front() {
            // I/O queues are spread evenly. An admin queue, known as one after Connect, does not count: otherwise
            // hosts with one I/O queue would have all of them on every second core.
            let to = self.assigned_count.wrapping_sub(target.controllers_created()) % links.core_count();
            if to != links.core().index() && !links.has_room(to) {
                self.unassigned.push_front((socket, local, peer));
                return None;
            }
            self.assigned_count += 1;
            if to == links.core().index() {
                return Some((socket, local, peer));
            }
            if let Some(socket) = sockets.detach(socket) {
                links.hand_over(to, socket, local, peer);
            }
        }
        None
    }

    /// Accepted connections that wait for a core.
    pub fn unassigned(&self) -> usize {
        self.unassigned.len()
    }
}
