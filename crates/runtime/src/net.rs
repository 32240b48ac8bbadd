//! The socket half of the seam: streams of bytes, without waiting.
//!
//! One implementor per core: [`crate::KernelSockets`] (TCP by the kernel) and
//! [`crate::virtual_world::SimSockets`]. No call blocks. A socket belongs to the core that accepted
//! or connected it until [`Sockets::detach`] hands it to another.
//!
//! Invariants: bytes come out in the order they went in, none lost while the socket lives; a
//! [`SocketId`] may name another socket after [`Sockets::close`] or [`Sockets::detach`].

use octokv_base::Nanos;
use std::io::{self, IoSlice};
use std::net::SocketAddr;

/// One stream, as its core knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u32);

/// One listening address, as its core knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId(pub u32);

/// What [`Sockets::receive`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveStatus {
    /// So many bytes, at least one.
    Bytes(usize),
    /// None now.
    WouldBlock,
    /// None ever again: the peer closed, reset, or never answered.
    Closed,
}

/// What [`Sockets::send`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// Took so many bytes of the head, at least one.
    Bytes(usize),
    /// Took none; the stream is full or not yet connected.
    WouldBlock,
    /// Took none and never will.
    Closed,
}

/// A socket between two cores. Dropped instead of attached, the stream is over (in a virtual world, once
/// its host stops).
#[derive(Debug)]
pub struct DetachedSocket(pub(crate) DetachedSocketKind);

#[derive(Debug)]
pub(crate) enum DetachedSocketKind {
    Kernel(octokv_sys::socket::TcpConn),
    /// An end in the virtual world.
    Simulated {
        index: u32,
        generation: u32,
    },
}

/// The sockets of one core.
pub trait Sockets {
    /// Listens. Gives the actual address: port 0 is resolved.
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)>;
    /// The next stream that a peer opened, and the peer's address.
    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)>;
    /// Begins to connect. Until it is up, `send` says [`SendStatus::WouldBlock`] and `receive` says
    /// [`ReceiveStatus::WouldBlock`]; when it failed, they say `Closed` and `Closed`.
    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId>;
    /// Takes a stream out, to be attached on another core. `None` when there is no such socket.
    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket>;
    /// Takes in a stream from another core.
    fn attach(&mut self, socket: DetachedSocket) -> SocketId;
    /// Moves bytes that have arrived to the start of `into`.
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus;
    /// Gives the bytes of `slices`, in order, to the stream, as many as it takes now.
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus;
    /// Adds to `out` the sockets that may have bytes (or news of their end) now, each at most once.
    /// A socket that was named and not received from until `WouldBlock` is named again.
    fn ready(&mut self, out: &mut Vec<SocketId>);
    /// How long bytes take to the peer and back, as the driver last saw it; `None` where it does not know.
    fn round_trip_time(&self, _socket: SocketId) -> Option<Nanos> {
        None
    }
    /// Closes a stream. Bytes that `send` took still go out.
    fn close(&mut self, socket: SocketId);
}
