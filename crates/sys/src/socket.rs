//! Non-blocking TCP: listen, accept, connect, receive, gathered send.
//!
//! Every stream has TCP_NODELAY and is closed on exec. Nothing here blocks; "would block" is a value,
//! because it is the common case.

use octokv_base::Nanos;
use std::io::{self, IoSlice, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The most slices that one `sendmsg` takes (UIO_MAXIOV).
pub const SLICES_MAX: usize = 1024;
const BACKLOG: i32 = 1024;

/// A listening socket.
#[derive(Debug)]
pub struct Listener(TcpListener);

/// A connected or connecting stream.
#[derive(Debug)]
pub struct TcpConn(TcpStream);

/// What a transfer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketIo {
    /// Moved so many bytes, at least one.
    Bytes(usize),
    /// Would block.
    WouldBlock,
    /// The stream is over.
    Closed,
}

impl Listener {
    /// Listens at an address; port 0 takes a free one. An address may be taken again at once after its
    /// last owner ended.
    pub fn bind(at: SocketAddr) -> io::Result<Listener> {
        let socket = new_socket(&at)?;
        set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
        let (address, len) = to_sockaddr(&at);
        // SAFETY: `address` is a live sockaddr_storage of which `len` bytes are set.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
        check_result(bound)?;
        // SAFETY: a system call on an open descriptor with plain arguments.
        check_result(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) })?;
        Ok(Listener(TcpListener::from(socket)))
    }

    /// Where it listens.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The next waiting stream and its peer, if any.
    pub fn accept(&self) -> io::Result<Option<(TcpConn, SocketAddr)>> {
        loop {
            match self.accept_once() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // The peer gave up while it waited in line: the next one may not have.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn accept_once(&self) -> io::Result<(TcpConn, SocketAddr)> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let (no_address, no_len) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: null pointers say that the peer's address is not wanted here.
        let fd = check_result(unsafe { libc::accept4(self.0.as_raw_fd(), no_address, no_len, flags) })?;
        // SAFETY: `fd` was just made, is open, and nobody else owns it.
        let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let connection_gone = |_| io::Error::from_raw_os_error(libc::ECONNABORTED);
        let peer = stream.peer_addr().map_err(connection_gone)?;
        stream.set_nodelay(true).map_err(connection_gone)?;
        Ok((TcpConn(stream), peer))
    }
}

impl TcpConn {
    /// Begins to connect. Until it is up, transfers say `WouldBlock`; when it failed, `Closed`.
    pub fn connect(to: SocketAddr) -> io::Result<TcpConn> {
        let socket = new_socket(&to)?;
        let (address, len) = to_sockaddr(&to);
        // SAFETY: `address` is a live sockaddr_storage of which `len` bytes are set.
        let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
        match check_result(result) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        Ok(TcpConn(stream))
    }

    /// Receives what has arrived, up to the length of `into`.
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

    /// Sends the slices in order, as much as the stream takes now; at most [`SLICES_MAX`] of them.
    pub fn send(&self, slices: &[IoSlice<'_>]) -> SocketIo {
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        // SAFETY: all-zero is a valid msghdr: no name, no slices, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // IoSlice is promised to have the layout of iovec; the kernel only reads through it.
        message.msg_iov = slices.as_ptr().cast_mut().cast();
        message.msg_iovlen = slices.len() as _;
        loop {
            // SAFETY: `message` describes slices that are borrowed for the length of this call.
            let sent = unsafe { libc::sendmsg(self.0.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
            if sent > 0 {
                return SocketIo::Bytes(sent as usize);
            }
            if sent == 0 {
                return SocketIo::WouldBlock;
            }
            match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => return SocketIo::WouldBlock,
                e if e.kind() == io::ErrorKind::Interrupted => {}
                _ => return SocketIo::Closed,
            }
        }
    }

    /// The peer's address.
    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.0.peer_addr()
    }

    /// Our own address.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The kernel's smoothed estimate of the time to the peer and back; `None` before it has one.
    pub fn round_trip_time(&self) -> Option<Nanos> {
        // SAFETY: all-zero is a valid tcp_info.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
        let (fd, into) = (self.0.as_raw_fd(), (&raw mut info).cast());
        // SAFETY: `into` has `len` bytes, of which the kernel writes at most so many.
        let got = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, into, &raw mut len) };
        let known = check_result(got).is_ok() && info.tcpi_rtt > 0;
        known.then(|| Nanos::from_micros(u64::from(info.tcpi_rtt)))
    }

    /// Why the stream ended, if the kernel knows; asking forgets it.
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

fn check_result(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn new_socket(for_address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if for_address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a system call with plain arguments.
    let fd = check_result(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: `fd` was just made, is open, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set_option(socket: &OwnedFd, level: i32, option: i32) -> io::Result<()> {
    let on: i32 = 1;
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: `on` is a live i32 and `len` its size.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const on).cast(), len) };
    check_result(set).map(|_| ())
}

/// The kernel's form of an address, and how many bytes of it count.
fn to_sockaddr(address: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let len = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage is large enough and aligned for every address family.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: a sockaddr_storage is large enough and aligned for every address family.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}
