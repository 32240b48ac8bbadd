//! The socket half of the driver seam, in the virtual world.

use super::net::End;
use super::{HostId, Shared};
use crate::sockets::{Detached, DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
use std::io::{self, IoSlice};
use std::net::SocketAddr;

/// The sockets of one core of a virtual host. Dropping it closes them.
pub struct VirtualSockets {
    world: Shared,
    host: HostId,
    ends: Vec<Option<End>>,
    free: Vec<u32>,
    listeners: Vec<u32>,
}

impl VirtualSockets {
    pub(crate) fn new(world: Shared, host: HostId) -> VirtualSockets {
        VirtualSockets { world, host, ends: Vec::new(), free: Vec::new(), listeners: Vec::new() }
    }

    fn insert(&mut self, end: End) -> SocketId {
        match self.free.pop() {
            Some(index) => {
                self.ends[index as usize] = Some(end);
                SocketId(index)
            }
            None => {
                self.ends.push(Some(end));
                SocketId((self.ends.len() - 1) as u32)
            }
        }
    }

    fn end(&self, socket: SocketId) -> Option<End> {
        self.ends.get(socket.0 as usize).copied().flatten()
    }

    fn take(&mut self, socket: SocketId) -> Option<End> {
        let end = self.ends.get_mut(socket.0 as usize)?.take()?;
        self.free.push(socket.0);
        Some(end)
    }
}

impl Sockets for VirtualSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        let (listener, at) = self.world.with(|state| state.net.listen(self.host, at))?;
        self.listeners.push(listener);
        Ok((ListenerId((self.listeners.len() - 1) as u32), at))
    }

    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let number = self.listeners[listener.0 as usize];
        let (end, peer) = self.world.with(|state| state.net.accept(number))?;
        Some((self.insert(end), peer))
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        let end = self.world.with(|state| state.net.connect(self.host, to, state.now, &mut state.agenda))?;
        Ok(self.insert(end))
    }

    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        let end = self.take(socket)?;
        Some(DetachedSocket(Detached::Virtual { index: end.index, generation: end.generation }))
    }

    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let Detached::Virtual { index, generation } = socket.0 else {
            panic!("a kernel's socket in a virtual world");
        };
        self.insert(End { index, generation })
    }

    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> Received {
        let Some(end) = self.end(socket) else { return Received::Closed };
        self.world.with(|state| state.net.receive(end, into))
    }

    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> Sent {
        let Some(end) = self.end(socket) else { return Sent::Broken };
        self.world.with(|state| state.net.send(end, slices, state.now, &mut state.agenda))
    }

    fn ready(&mut self, out: &mut Vec<SocketId>) {
        self.world.with(|state| {
            for (index, end) in self.ends.iter().enumerate() {
                if end.is_some_and(|end| state.net.has_news(end)) {
                    out.push(SocketId(index as u32));
                }
            }
        });
    }

    fn close(&mut self, socket: SocketId) {
        let Some(end) = self.take(socket) else { return };
        self.world.with(|state| state.net.close(end, state.now, &mut state.agenda));
    }
}

impl Drop for VirtualSockets {
    fn drop(&mut self) {
        self.world.with(|state| {
            for end in self.ends.iter().flatten() {
                state.net.close(*end, state.now, &mut state.agenda);
            }
            for &listener in &self.listeners {
                state.net.unlisten(listener);
            }
        });
    }
}
