//! The kernel's TCP sockets of one core: non-blocking `recv`, one gathered `sendmsg`, edge-triggered epoll.
//!
//! ```text
//!   idle ──EPOLLIN edge / accept / attach──▶ readable ──WouldBlock──▶ idle
//!   open ──send would block──▶ blocked ──EPOLLOUT edge──▶ open
//! ```
//! With few sockets each iteration tries all of them: a `recv` costs as much as an `epoll_wait` and may return bytes.
//! With many sockets only the readable ones are tried. A blocked stream costs no system call until its EPOLLOUT edge.
//!
//! Invariants: a readable socket is in `edges` exactly once; a closed socket is removed from `edges` before its index
//! is reused. Tested in `tests/kernel_sockets.rs`.

use crate::net::{
    DetachedSocket, DetachedSocketKind, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets,
};
use octokv_base::Nanos;
use octokv_sys::epoll::{Interest, PollEvent, Poller};
use octokv_sys::eventfd::EventFd;
use octokv_sys::socket::{Listener, SocketIo, TcpConn};
use slab::Slab;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::AsFd;

/// Up to this many sockets are all tried in each iteration.
const SCAN_ALL_SOCKETS_MAX: usize = 3;
/// With few sockets, iterations between two polls of epoll (for listeners).
const ITERATIONS_PER_POLL: u32 = 16;

/// Epoll tokens: the kind in the upper 32 bits (0 for a stream), the index in the lower.
const LISTENER_TOKEN: u64 = 1 << 32;
const WAKE_TOKEN: u64 = 2 << 32;

struct SocketEntry {
    stream: TcpConn,
    /// There was an EPOLLIN edge, and no receive returned `WouldBlock` since.
    is_readable: bool,
    is_blocked: bool,
    /// Whether the socket is in [`KernelSockets`]'s `edges`.
    is_listed: bool,
}

struct ListenerEntry {
    listener: Listener,
    may_have_connection: bool,
}

/// The kernel sockets of one core.
pub struct KernelSockets {
    poller: Poller,
    /// The open sockets, by [`SocketId`].
    entries: Slab<SocketEntry>,
    listeners: Vec<ListenerEntry>,
    /// Readable sockets, in the order of their edges.
    edges: Vec<u32>,
    blocked_count: usize,
    /// A listener or wake descriptor had an edge since the last `wait`. A non-blocking poll consumes the edge without
    /// handling it, so the next `wait` must not block.
    has_unhandled_event: bool,
    iterations: u32,
}

impl KernelSockets {
    /// An empty set of sockets.
    ///
    /// # Errors
    /// Fails if the process is out of file descriptors or memory.
    pub fn new() -> io::Result<KernelSockets> {
        Ok(KernelSockets {
            poller: Poller::new()?,
            entries: Slab::new(),
            listeners: Vec::new(),
            edges: Vec::new(),
            blocked_count: 0,
            has_unhandled_event: false,
            iterations: 0,
        })
    }

    /// Makes [`KernelSockets::wait`] return while `event` is readable.
    ///
    /// # Errors
    /// Fails if the kernel is out of memory or epoll watches.
    pub fn add_wake_event(&mut self, event: impl AsFd) -> io::Result<()> {
        self.poller.add(event, WAKE_TOKEN, Interest::LevelRead)
    }

    /// Makes [`KernelSockets::wait`] return once per signal of `event`, which need not be drained.
    ///
    /// # Errors
    /// Fails if the kernel is out of memory or epoll watches.
    pub fn add_edge_wake_event(&mut self, event: &EventFd) -> io::Result<()> {
        self.poller.add(event, WAKE_TOKEN, Interest::EdgeRead)
    }

    /// Blocks until a socket becomes readable or writable or ends, a listener or wake descriptor becomes readable, or
    /// `timeout` has passed.
    pub fn wait(&mut self, timeout: Nanos) {
        // An event that a non-blocking poll consumed still ends this wait.
        let timeout = if self.has_unhandled_event { Nanos::ZERO } else { timeout };
        self.poll(timeout);
        self.has_unhandled_event = false;
    }

    /// The number of open sockets.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no open socket.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn poll(&mut self, timeout: Nanos) {
        let KernelSockets { poller, entries, listeners, edges, blocked_count, has_unhandled_event, .. } =
            self;
        poller.wait(timeout, |PollEvent { token, readable, writable }| {
            let index = (token & 0xffff_ffff) as usize;
            match token & !0xffff_ffff {
                LISTENER_TOKEN => {
                    listeners[index].may_have_connection = true;
                    *has_unhandled_event = true;
                }
                0 => {
                    let Some(entry) = entries.get_mut(index) else { return };
                    if writable && std::mem::replace(&mut entry.is_blocked, false) {
                        *blocked_count -= 1;
                    }
                    entry.is_readable |= readable;
                    if entry.is_readable && !std::mem::replace(&mut entry.is_listed, true) {
                        edges.push(index as u32);
                    }
                }
                _ => *has_unhandled_event = true,
            }
        });
    }

    fn insert(&mut self, stream: TcpConn) -> io::Result<SocketId> {
        let index = self.entries.vacant_key() as u32;
        self.poller.add(&stream, u64::from(index), Interest::EdgeReadWrite)?;
        // Bytes may have arrived before the poller watched the stream, so it starts as readable. Later bytes cause
        // an edge.
        let entry = SocketEntry { stream, is_readable: true, is_blocked: false, is_listed: true };
        self.entries.insert(entry);
        self.edges.push(index);
        Ok(SocketId(index))
    }

    fn entry(&mut self, socket: SocketId) -> Option<&mut SocketEntry> {
        self.entries.get_mut(socket.0 as usize)
    }

    fn take(&mut self, socket: SocketId) -> Option<SocketEntry> {
        let entry = self.entries.try_remove(socket.0 as usize)?;
        self.blocked_count -= usize::from(entry.is_blocked);
        if entry.is_listed {
            self.edges.retain(|&index| index != socket.0);
        }
        Some(entry)
    }
}

impl Sockets for KernelSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        let listener = Listener::bind(at)?;
        let address = listener.local_address()?;
        let index = self.listeners.len() as u32;
        self.poller.add(&listener, LISTENER_TOKEN | u64::from(index), Interest::EdgeRead)?;
        self.listeners.push(ListenerEntry { listener, may_have_connection: true });
        Ok((ListenerId(index), address))
    }

    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let entry = &mut self.listeners[listener.0 as usize];
        if !entry.may_have_connection {
            return None;
        }
        match entry.listener.accept() {
            Ok(Some((stream, peer))) => Some((self.insert(stream).ok()?, peer)),
            Ok(None) => {
                entry.may_have_connection = false;
                None
            }
            // For example out of descriptors: the next iteration accepts again. The listener is edge-triggered, so
            // the connections that remain in the backlog do not keep the core awake.
            Err(_) => None,
        }
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        let stream = TcpConn::connect(to)?;
        self.insert(stream)
    }

    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        let entry = self.take(socket)?;
        // Fails only for a descriptor that is not watched; `insert` added this one.
        let _ = self.poller.remove(&entry.stream);
        Some(DetachedSocket(DetachedSocketKind::Kernel(entry.stream)))
    }

    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let DetachedSocketKind::Kernel(stream) = socket.0 else {
            panic!("a socket of another driver attached to kernel sockets");
        };
        // The stream was watched on another core a moment before. Adding it fails only if memory or the watch limit
        // is exhausted, and then the process cannot serve any connection.
        self.insert(stream).expect("epoll accepts one more socket")
    }

    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let Some(entry) = self.entry(socket) else { return ReceiveStatus::Closed };
        match entry.stream.receive(into) {
            SocketIo::Bytes(bytes) => ReceiveStatus::Bytes(bytes),
            SocketIo::WouldBlock => {
                entry.is_readable = false;
                ReceiveStatus::WouldBlock
            }
            SocketIo::Closed => ReceiveStatus::Closed,
        }
    }

    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let Some(entry) = self.entry(socket) else { return SendStatus::Closed };
        if entry.is_blocked {
            return SendStatus::WouldBlock;
        }
        match entry.stream.send(slices) {
            SocketIo::Bytes(bytes) => SendStatus::Bytes(bytes),
            SocketIo::Closed => SendStatus::Closed,
            SocketIo::WouldBlock => {
                entry.is_blocked = true;
                self.blocked_count += 1;
                SendStatus::WouldBlock
            }
        }
    }

    fn local_address(&self, socket: SocketId) -> Option<SocketAddr> {
        self.entries.get(socket.0 as usize)?.stream.local_address().ok()
    }

    fn round_trip_time(&self, socket: SocketId) -> Option<Nanos> {
        self.entries.get(socket.0 as usize)?.stream.round_trip_time()
    }

    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let scan_all = self.len() <= SCAN_ALL_SOCKETS_MAX;
        self.iterations = self.iterations.wrapping_add(1);
        if !scan_all || self.blocked_count > 0 || self.iterations.is_multiple_of(ITERATIONS_PER_POLL) {
            self.poll(Nanos::ZERO);
        }
        let KernelSockets { entries, edges, .. } = self;
        edges.retain(|&index| {
            let Some(entry) = entries.get_mut(index as usize) else { return false };
            entry.is_listed = entry.is_readable;
            if entry.is_readable && !scan_all {
                out.push(SocketId(index));
            }
            entry.is_readable
        });
        if scan_all {
            out.extend(entries.iter().map(|(index, _)| SocketId(index as u32)));
        }
    }

    fn close(&mut self, socket: SocketId) {
        drop(self.take(socket));
    }
}
