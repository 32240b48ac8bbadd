//! TCP by the kernel: plain non-blocking `recv`, one gathered `sendmsg`, edges from epoll.
//!
//! ```text
//!   quiet ──edge in / accept / attach──▶ readable ──"nothing"──▶ quiet
//!   open  ──send says "full"──▶ blocked ──edge out──▶ open
//! ```
//! With few sockets each turn simply tries all of them: one `recv` costs as much as asking epoll and
//! may bring bytes. With many, only those with an edge. A blocked stream costs no system call until the
//! kernel says that there is room again.
//!
//! Invariants: a readable socket is in `ready` exactly once; a socket is forgotten before its number
//! names another.

use crate::net::{
    DetachedSocket, DetachedSocketKind, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets,
};
use octokv_base::Nanos;
use octokv_sys::epoll::{Interest, PollEvent, Poller};
use octokv_sys::eventfd::EventFd;
use octokv_sys::socket::{Listener, SocketIo, TcpConn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// Up to how many sockets are all tried in each turn.
const SCAN_ALL_SOCKETS_MAX: usize = 3;
/// With few sockets, epoll is asked for listeners and blocked streams once in so many turns.
const ITERATIONS_PER_POLL: u32 = 16;

/// Token kinds in the upper half, index in the lower.
const LISTENER_TOKEN: u64 = 1 << 32;
const WAKE_TOKEN: u64 = 2 << 32;

struct SocketEntry {
    stream: TcpConn,
    /// An edge was seen and "nothing" was not, since.
    is_readable: bool,
    is_blocked: bool,
    /// In `edges` of [`KernelSockets`].
    is_listed: bool,
}

struct ListenerEntry {
    listener: Listener,
    may_have_connection: bool,
}

/// The sockets of one core, on the kernel.
pub struct KernelSockets {
    poller: Poller,
    entries: Vec<Option<SocketEntry>>,
    free: Vec<u32>,
    listeners: Vec<ListenerEntry>,
    /// Sockets with an edge, in the order of their first; may name closed ones.
    edges: Vec<u32>,
    blocked_count: usize,
    /// A listener or another descriptor had news since the last `wait`: what a look in passing took from the poller,
    /// nobody has acted on yet.
    has_unhandled_event: bool,
    iterations: u32,
}

impl KernelSockets {
    /// No sockets yet.
    pub fn new() -> io::Result<KernelSockets> {
        Ok(KernelSockets {
            poller: Poller::new()?,
            entries: Vec::new(),
            free: Vec::new(),
            listeners: Vec::new(),
            edges: Vec::new(),
            blocked_count: 0,
            has_unhandled_event: false,
            iterations: 0,
        })
    }

    /// Has [`KernelSockets::wait`] end when `event` is signalled.
    pub fn add_wake_event(&mut self, event: &EventFd) -> io::Result<()> {
        self.poller.add(event, WAKE_TOKEN, Interest::LevelRead)
    }

    /// Has [`KernelSockets::wait`] end with each signal of an eventfd that lives elsewhere.
    pub fn add_wake_descriptor(&mut self, descriptor: RawFd) -> io::Result<()> {
        self.poller.add_raw(descriptor, WAKE_TOKEN, Interest::EdgeRead)
    }

    /// Blocks until a socket may have bytes, room or an end, until one of the other descriptors is
    /// readable, or until `span` has passed.
    pub fn wait(&mut self, span: Nanos) {
        // A signal that a look in passing took from the poller still counts.
        let span = if self.has_unhandled_event { Nanos::ZERO } else { span };
        self.poll(span);
        self.has_unhandled_event = false;
    }

    /// How many sockets there are.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether there are no sockets.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Our own address on a socket.
    pub fn local_address(&self, socket: SocketId) -> Option<SocketAddr> {
        self.entries.get(socket.0 as usize)?.as_ref()?.stream.local_address().ok()
    }

    fn poll(&mut self, span: Nanos) {
        let KernelSockets { poller, entries, listeners, edges, blocked_count, has_unhandled_event, .. } =
            self;
        poller.wait(span, |PollEvent { token, readable, writable }| {
            let index = (token & 0xffff_ffff) as usize;
            match token & !0xffff_ffff {
                LISTENER_TOKEN => {
                    listeners[index].may_have_connection = true;
                    *has_unhandled_event = true;
                }
                0 => {
                    let Some(entry) = entries[index].as_mut() else { return };
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
        let index = self.free.last().copied().unwrap_or(self.entries.len() as u32);
        self.poller.add(&stream, u64::from(index), Interest::EdgeReadWrite)?;
        // Bytes may have come before the poller knew the stream, so it counts as readable; the poller
        // tells of those that come later.
        let entry = SocketEntry { stream, is_readable: true, is_blocked: false, is_listed: true };
        if self.free.pop().is_some() {
            self.entries[index as usize] = Some(entry);
        } else {
            self.entries.push(Some(entry));
        }
        self.edges.push(index);
        Ok(SocketId(index))
    }

    fn entry(&mut self, socket: SocketId) -> Option<&mut SocketEntry> {
        self.entries.get_mut(socket.0 as usize)?.as_mut()
    }

    fn take(&mut self, socket: SocketId) -> Option<SocketEntry> {
        let entry = self.entries.get_mut(socket.0 as usize)?.take()?;
        self.blocked_count -= usize::from(entry.is_blocked);
        if entry.is_listed {
            self.edges.retain(|&index| index != socket.0);
        }
        self.free.push(socket.0);
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
            // Out of descriptors, say: what stays in line is asked for again at every turn, and since the
            // listener is watched by edges it does not keep the core awake.
            Err(_) => None,
        }
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        let stream = TcpConn::connect(to)?;
        self.insert(stream)
    }

    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        let entry = self.take(socket)?;
        // Fails only for a descriptor that is not watched, which this one was from `insert` on.
        let _ = self.poller.remove(&entry.stream);
        Some(DetachedSocket(DetachedSocketKind::Kernel(entry.stream)))
    }

    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let DetachedSocketKind::Kernel(stream) = socket.0 else {
            panic!("a socket of a virtual world on a real core");
        };
        // It was watched on another core a moment ago; only memory or the watch limit can be out now,
        // and then the process cannot serve anybody.
        self.insert(stream).expect("the kernel watches one more socket")
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

    fn round_trip_time(&self, socket: SocketId) -> Option<Nanos> {
        self.entries.get(socket.0 as usize)?.as_ref()?.stream.round_trip_time()
    }

    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let scan_all = self.len() <= SCAN_ALL_SOCKETS_MAX;
        self.iterations = self.iterations.wrapping_add(1);
        if !scan_all || self.blocked_count > 0 || self.iterations.is_multiple_of(ITERATIONS_PER_POLL) {
            self.poll(Nanos::ZERO);
        }
        let KernelSockets { entries, edges, .. } = self;
        edges.retain(|&index| {
            let Some(entry) = entries[index as usize].as_mut() else { return false };
            entry.is_listed = entry.is_readable;
            if entry.is_readable && !scan_all {
                out.push(SocketId(index));
            }
            entry.is_readable
        });
        if scan_all {
            let open = entries.iter().enumerate().filter(|(_, entry)| entry.is_some());
            out.extend(open.map(|(index, _)| SocketId(index as u32)));
        }
    }

    fn close(&mut self, socket: SocketId) {
        drop(self.take(socket));
    }
}
