//! The [`Sockets`] of the simulation.

use super::event::StreamEnd;
use super::ids::{DriverId, SimHostId};
use super::state::{SharedSimState, SimState};
use crate::net::{
    DetachedSocket, DetachedSocketKind, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets,
};
use slab::Slab;
use std::io::{self, IoSlice};
use std::net::SocketAddr;

/// The sockets of one core of a simulated host. The drop closes them.
pub struct SimSockets {
    sim: SharedSimState,
    host: SimHostId,
    driver: DriverId,
    ends: Slab<StreamEnd>,
    listeners: Vec<u32>,
}

impl SimSockets {
    pub(crate) fn new(sim: SharedSimState, host: SimHostId) -> SimSockets {
        let driver = sim.with(|state| state.driver_owners.add());
        SimSockets { sim, host, driver, ends: Slab::new(), listeners: Vec::new() }
    }

    /// Runs `action` on the state for the reactor that calls.
    fn with<T>(&self, action: impl FnOnce(&mut SimState) -> T) -> T {
        self.sim.with(|state| {
            state.driver_owners.note_use(self.driver);
            action(state)
        })
    }

    fn insert(&mut self, end: StreamEnd) -> SocketId {
        self.with(|state| state.network.watch(end, Some(self.driver)));
        SocketId(self.ends.insert(end) as u32)
    }

    fn end(&self, socket: SocketId) -> Option<StreamEnd> {
        self.ends.get(socket.0 as usize).copied()
    }

    fn take(&mut self, socket: SocketId) -> Option<StreamEnd> {
        self.ends.try_remove(socket.0 as usize)
    }
}

impl Sockets for SimSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        let (listener, at) = self.with(|state| state.network.listen(self.host, self.driver, at))?;
        self.listeners.push(listener);
        Ok((ListenerId((self.listeners.len() - 1) as u32), at))
    }

    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let number = self.listeners[listener.0 as usize];
        let (end, peer) = self.with(|state| state.network.accept(number))?;
        Some((self.insert(end), peer))
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        let end = self.with(|state| state.network.connect(self.host, to, state.now, &mut state.events))?;
        Ok(self.insert(end))
    }

    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        let end = self.take(socket)?;
        self.with(|state| state.network.watch(end, None));
        Some(DetachedSocket(DetachedSocketKind::Simulated { index: end.index, generation: end.generation }))
    }

    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let DetachedSocketKind::Simulated { index, generation } = socket.0 else {
            panic!("a socket of another driver attached to simulated sockets");
        };
        self.insert(StreamEnd { index, generation })
    }

    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let Some(end) = self.end(socket) else { return ReceiveStatus::Closed };
        self.with(|state| state.network.receive(end, into))
    }

    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let Some(end) = self.end(socket) else { return SendStatus::Closed };
        self.with(|state| state.network.send(end, slices, state.now, &mut state.events))
    }

    fn ready(&mut self, out: &mut Vec<SocketId>) {
        self.with(|state| {
            for (index, &end) in &self.ends {
                if state.network.is_ready(end) {
                    out.push(SocketId(index as u32));
                }
            }
        });
    }

    fn close(&mut self, socket: SocketId) {
        let Some(end) = self.take(socket) else { return };
        self.with(|state| state.network.close(end, state.now, &mut state.events));
    }
}

impl Drop for SimSockets {
    fn drop(&mut self) {
        self.sim.with(|state| {
            for (_, &end) in &self.ends {
                state.network.close(end, state.now, &mut state.events);
            }
            for &listener in &self.listeners {
                state.network.close_listener(listener);
            }
        });
    }
}
