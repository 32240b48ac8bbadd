//! New connections of a node, on its accepting core: accepted, and assigned in rotation to the cores that have connections.
//!
//! Invariants: at most [`ACCEPTS_PER_ITERATION`] accepted connections wait for a core; behind them, the kernel's accept
//! queue holds new ones. The listeners take turns in being first, so that a flood on one of them does not keep out the
//! connections on the others.

use super::core_links::CoreLinks;
use crate::core_roles::CoreRoles;
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
    roles: CoreRoles,
    /// Index of the listener that is first in the next iteration.
    first_listener: usize,
    unassigned: VecDeque<AcceptedConnection>,
    /// Connections assigned to cores so far.
    assigned_count: usize,
}

impl Acceptor {
    /// Accepts on these listeners, of which only the accepting core has any.
    pub fn new(listeners: Vec<(ListenerId, SocketAddr)>, roles: CoreRoles) -> Acceptor {
        Acceptor { listeners, roles, first_listener: 0, unassigned: VecDeque::new(), assigned_count: 0 }
    }

    /// Accepts connections. True if there were any.
    pub fn accept(&mut self, sockets: &mut impl Sockets) -> bool {
        let mut worked = false;
        let (before, after) = self.listeners.split_at(self.first_listener);
        for &(listener, address) in after.iter().chain(before) {
            for _ in self.unassigned.len()..ACCEPTS_PER_ITERATION {
                let Some((socket, peer)) = sockets.accept(listener) else { break };
                let local = sockets.local_address(socket).unwrap_or(address);
                self.unassigned.push_back((socket, local, peer));
                worked = true;
            }
        }
        self.first_listener = if after.len() > 1 { self.first_listener + 1 } else { 0 };
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
            let place = self.assigned_count.wrapping_sub(target.controllers_created());
            let to = self.roles.core_of_connection(place, links.core_count());
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

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::{DetachedSocket, ReceiveStatus, SendStatus};
    use std::io::{self, IoSlice};

    /// Listeners of which every other one has connections without end.
    struct FloodedSockets {
        accepted: Vec<ListenerId>,
        next_socket: u32,
    }

    impl Sockets for FloodedSockets {
        fn listen(&mut self, _: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
            let has_waiting = listener.0.is_multiple_of(2) || !self.accepted.contains(&listener);
            has_waiting.then(|| {
                self.accepted.push(listener);
                self.next_socket += 1;
                (SocketId(self.next_socket), ([127, 0, 0, 1], 50_000).into())
            })
        }
        fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn detach(&mut self, _: SocketId) -> Option<DetachedSocket> {
            None
        }
        fn attach(&mut self, _: DetachedSocket) -> SocketId {
            unreachable!("nothing is detached")
        }
        fn receive(&mut self, _: SocketId, _: &mut [u8]) -> ReceiveStatus {
            ReceiveStatus::WouldBlock
        }
        fn send(&mut self, _: SocketId, _: &[IoSlice<'_>]) -> SendStatus {
            SendStatus::WouldBlock
        }
        fn ready(&mut self, _: &mut Vec<SocketId>) {}
        fn close(&mut self, _: SocketId) {}
    }

    #[test]
    fn a_flood_on_some_listeners_does_not_keep_out_the_others() {
        let listeners = (0..4).map(|index| (ListenerId(index), ([127, 0, 0, 1], 4420).into())).collect();
        let mut acceptor = Acceptor::new(listeners, CoreRoles::SHARED);
        let mut sockets = FloodedSockets { accepted: Vec::new(), next_socket: 0 };
        for _ in 0..4 {
            assert!(acceptor.accept(&mut sockets));
            acceptor.unassigned.clear();
        }
        let quiet = [ListenerId(1), ListenerId(3)];
        assert!(quiet.iter().all(|listener| sockets.accepted.contains(listener)), "{:?}", sockets.accepted);
        assert_eq!(sockets.accepted.len(), 4 * ACCEPTS_PER_ITERATION);
    }
}
