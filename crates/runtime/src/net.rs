//! The socket driver trait: non-blocking byte streams of one core.
//!
//! Implemented by [`crate::KernelSockets`] (the kernel's TCP) and [`crate::simulated::SimSockets`]. No call blocks. A
//! socket belongs to the core that accepted or connected it until [`Sockets::detach`] moves it to another core.
//!
//! Invariants: bytes arrive in the order they were sent, none is lost while the socket is open; a [`SocketId`] may be
//! reused after [`Sockets::close`] or [`Sockets::detach`].

use octokv_base::Nanos;
use std::any::Any;
use std::io::{self, IoSlice};
use std::net::SocketAddr;

/// A stream, by its index on its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u32);

/// A listening socket, by its index on its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u32);

/// The result of [`Sockets::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveStatus {
    /// Received this many bytes, at least one.
    Bytes(usize),
    /// No bytes are available now.
    WouldBlock,
    /// The stream has ended: the peer closed or reset it, or the connection attempt failed.
    Closed,
}

/// The result of [`Sockets::send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// Accepted this many bytes from the start of the slices, at least one.
    Bytes(usize),
    /// Accepted none: the send buffer is full, or the stream is not yet connected.
    WouldBlock,
    /// Accepted none: the stream has ended.
    Closed,
}

/// A socket in transit between two cores. Dropping it closes the stream (in the simulation, when its host
/// stops).
#[derive(Debug)]
pub struct DetachedSocket(pub(crate) DetachedSocketKind);

#[derive(Debug)]
pub(crate) enum DetachedSocketKind {
    Kernel(octokv_sys::socket::TcpConn),
    /// A stream end of the simulated network.
    Simulated {
        index: u32,
        generation: u32,
    },
    /// A stream of a driver outside this crate.
    Other(Box<dyn Any + Send>),
}

impl DetachedSocket {
    /// A stream of a driver outside this crate, such as one in memory.
    pub fn from_driver(stream: impl Any + Send) -> DetachedSocket {
        DetachedSocket(DetachedSocketKind::Other(Box::new(stream)))
    }

    /// The stream given to [`DetachedSocket::from_driver`]; `None` if it has another type, or the socket another driver.
    pub fn into_stream<T: Any>(self) -> Option<T> {
        let DetachedSocketKind::Other(stream) = self.0 else { return None };
        stream.downcast().ok().map(|stream| *stream)
    }
}

/// The sockets of one core.
pub trait Sockets {
    /// Listens on `at`. Returns the actual address: port 0 selects a free port.
    ///
    /// # Errors
    /// Fails if the address is in use or not local, or a resource is exhausted.
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)>;
    /// Accepts the next connection, with the peer's address. `None` if there is none.
    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)>;
    /// Starts to connect. Until the stream is established, `send` and `receive` return `WouldBlock`; after a failed
    /// attempt they return `Closed`.
    ///
    /// # Errors
    /// Fails if the attempt fails at once or a resource is exhausted.
    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId>;
    /// Removes a stream, to attach it on another core. `None` for a closed socket.
    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket>;
    /// Adds a stream that another core detached.
    ///
    /// # Panics
    /// If the stream belongs to another driver, or the kernel cannot watch one more socket.
    fn attach(&mut self, socket: DetachedSocket) -> SocketId;
    /// Receives available bytes into the start of `into`.
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus;
    /// Sends the bytes of `slices`, in order, as many as the stream accepts now.
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus;
    /// Appends the sockets that may have bytes (or have ended) to `out`, each at most once. A socket stays ready until
    /// a receive returns `WouldBlock`.
    fn ready(&mut self, out: &mut Vec<SocketId>);
    /// The local address of a socket; `None` if the socket is closed or the driver has no addresses.
    fn local_address(&self, _socket: SocketId) -> Option<SocketAddr> {
        None
    }
    /// The driver's estimate of the round-trip time to the peer; `None` if it has none.
    fn round_trip_time(&self, _socket: SocketId) -> Option<Nanos> {
        None
    }
    /// Closes a stream. Bytes that `send` accepted are still transmitted.
    fn close(&mut self, socket: SocketId);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_of_another_driver_is_given_back_as_what_it_was() {
        assert_eq!(DetachedSocket::from_driver(7_u32).into_stream::<u32>(), Some(7));
        assert_eq!(DetachedSocket::from_driver(7_u32).into_stream::<u64>(), None);
        let simulated = DetachedSocket(DetachedSocketKind::Simulated { index: 7, generation: 0 });
        assert_eq!(simulated.into_stream::<u32>(), None);
    }
}
