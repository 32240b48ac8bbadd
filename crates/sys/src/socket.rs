//! Non-blocking TCP: listen, accept, connect, receive, gathered send.
//!
//! Every stream has TCP_NODELAY and is closed on exec. No call blocks; "would block" is a value, because it is the
//! common case. A receive is one `recv`, a send one `sendmsg`, without allocation.
//!
//! Unsafe code: `getsockopt(TCP_INFO)`, for which rustix has no function. Tested in `octokv-runtime`'s
//! `tests/kernel_sockets.rs`.

use octokv_base::Nanos;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, ipproto, sockopt};
use std::io::{self, IoSlice, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The maximum number of slices of one `sendmsg` (UIO_MAXIOV).
pub const SLICES_MAX: usize = 1024;
/// Connections that the kernel queues before `accept`.
const BACKLOG: i32 = 1024;

/// A listening socket.
#[derive(Debug)]
pub struct Listener(TcpListener);

/// A connected or connecting TCP stream.
#[derive(Debug)]
pub struct TcpConn(TcpStream);

/// The result of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketIo {
    /// Transferred this many bytes, at least one.
    Bytes(usize),
    /// Nothing was transferred: no data, or no room in the send buffer (EAGAIN).
    WouldBlock,
    /// The stream has ended.
    Closed,
}

impl Listener {
    /// Listens at an address; port 0 selects a free port. SO_REUSEADDR: an address may be reused immediately after its
    /// last owner ended.
    ///
    /// # Errors
    /// Fails if the address is in use (EADDRINUSE) or not local, or the process is out of descriptors.
    pub fn bind(at: SocketAddr) -> io::Result<Listener> {
        let socket = new_socket(&at)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &at)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(Listener(TcpListener::from(socket)))
    }

    /// The address that it listens at.
    ///
    /// # Errors
    /// Fails if the kernel is out of memory.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Accepts the next connection, with the peer's address. `None` if there is none.
    ///
    /// # Errors
    /// Fails if the process is out of descriptors (EMFILE) or the kernel out of memory. The connection stays queued.
    pub fn accept(&self) -> io::Result<Option<(TcpConn, SocketAddr)>> {
        loop {
            match self.accept_once() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(Errno::AGAIN) => return Ok(None),
                // The peer aborted a queued connection: accept the next one.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn accept_once(&self) -> Result<(TcpConn, SocketAddr), Errno> {
        let socket = rustix::net::accept_with(&self.0, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        let stream = TcpStream::from(socket);
        let peer = stream.peer_addr().map_err(|_| Errno::CONNABORTED)?;
        stream.set_nodelay(true).map_err(|_| Errno::CONNABORTED)?;
        Ok((TcpConn(stream), peer))
    }
}

impl TcpConn {
    /// Starts to connect. Until the connection is established, transfers return `WouldBlock`; after a failed attempt,
    /// `Closed`.
    ///
    /// # Errors
    /// Fails if the attempt fails immediately or the process is out of descriptors or ports.
    pub fn connect(to: SocketAddr) -> io::Result<TcpConn> {
        let socket = new_socket(&to)?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        Ok(TcpConn(stream))
    }

    /// Receives available bytes, up to the length of `into`.
    pub fn receive(&self, into: &mut [u8]) -> SocketIo {
        loop {
            match (&self.0).read(into) {
                Ok(0) => return if into.is_empty() { SocketIo::WouldBlock } else { SocketIo::Closed },
                Ok(bytes) => return SocketIo::Bytes(bytes),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return SocketIo::WouldBlock,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return SocketIo::Closed,
            }
        }
    }

    /// Sends the slices in order, as many bytes as the socket buffer accepts; at most [`SLICES_MAX`] slices.
    pub fn send(&self, slices: &[IoSlice<'_>]) -> SocketIo {
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        loop {
            let mut no_control = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.0, slices, &mut no_control, SendFlags::NOSIGNAL) {
                Ok(0) | Err(Errno::AGAIN) => return SocketIo::WouldBlock,
                Ok(bytes) => return SocketIo::Bytes(bytes),
                Err(Errno::INTR) => {}
                Err(_) => return SocketIo::Closed,
            }
        }
    }

    /// The peer's address.
    ///
    /// # Errors
    /// Fails with ENOTCONN if the stream is not connected.
    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.0.peer_addr()
    }

    /// The local address.
    ///
    /// # Errors
    /// Fails if the kernel is out of memory.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The kernel's smoothed round-trip time (TCP_INFO, `tcpi_rtt`); `None` before the first measurement.
    pub fn round_trip_time(&self) -> Option<Nanos> {
        // SAFETY: all-zero is a valid tcp_info.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        let (fd, into) = (self.0.as_raw_fd(), (&raw mut info).cast());
        // SAFETY: `into` points to `len` bytes of `info`; the kernel writes at most `len`.
        let result = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, into, &raw mut len) };
        let known = result == 0 && info.tcpi_rtt > 0;
        known.then(|| Nanos::from_micros(u64::from(info.tcpi_rtt)))
    }

    /// The pending socket error (SO_ERROR), if any; the call clears it.
    pub fn take_error(&self) -> Option<io::Error> {
        self.0.take_error().ok().flatten()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for TcpConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn new_socket(for_address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if for_address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?)
}
