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

use crate::sockets::{Detached, DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
use octokv_base::Nanos;
use octokv_sys::epoll::{Event, Poller, Watch};
use octokv_sys::eventfd::EventFd;
use octokv_sys::socket::{Listener, Stream, Transfer};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// Up to how many sockets are all tried in each turn.
const FEW: usize = 3;
/// With few sockets, epoll is asked for listeners and blocked streams once in so many turns.
const TURNS_PER_POLL: u32 = 16;

/// Token kinds in the upper half, index in the lower.
const LISTENER: u64 = 1 << 32;
const OTHER: u64 = 2 << 32;

struct Entry {
    stream: Stream,
    /// An edge was seen and "nothing" was not, since.
    readable: bool,
    blocked: bool,
    /// In `edges` of [`RealSockets`].
    listed: bool,
}

struct Listening {
    listener: Listener,
    waiting: bool,
}

/// The sockets of one core, on the kernel.
pub struct RealSockets {
    poller: Poller,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    listeners: Vec<Listening>,
    /// Sockets with an edge, in the order of their first; may name closed ones.
    edges: Vec<u32>,
    blocked: usize,
    /// A listener or another descriptor had news since the last `wait`: what a look in passing took from the poller,
    /// nobody has acted on yet.
    signalled: bool,
    turns: u32,
}

impl RealSockets {
    /// No sockets yet.
    pub fn new() -> io::Result<RealSockets> {
        Ok(RealSockets {
            poller: Poller::new()?,
            entries: Vec::new(),
            free: Vec::new(),
            listeners: Vec::new(),
            edges: Vec::new(),
            blocked: 0,
            signalled: false,
            turns: 0,
        })
    }

    /// Has [`RealSockets::wait`] end when `event` is signalled.
    pub fn also_wake_for(&mut self, event: &EventFd) -> io::Result<()> {
        self.poller.add(event, OTHER, Watch::Level)
    }

    /// Has [`RealSockets::wait`] end with each signal of an eventfd that lives elsewhere.
    pub fn also_wake_for_raw(&mut self, descriptor: RawFd) -> io::Result<()> {
        self.poller.add_raw(descriptor, OTHER, Watch::Signals)
    }

    /// Blocks until a socket may have bytes, room or an end, until one of the other descriptors is
    /// readable, or until `span` has passed.
    pub fn wait(&mut self, span: Nanos) {
        // A signal that a look in passing took from the poller still counts.
        let span = if self.signalled { Nanos::ZERO } else { span };
        self.poll(span);
        self.signalled = false;
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
        self.entries.get(socket.0 as usize)?.as_ref()?.stream.local().ok()
    }

    fn poll(&mut self, span: Nanos) {
        let RealSockets { poller, entries, listeners, edges, blocked, signalled, .. } = self;
        poller.wait(span, |Event { token, readable, writable }| {
            let index = (token & 0xffff_ffff) as usize;
            match token & !0xffff_ffff {
                LISTENER => {
                    listeners[index].waiting = true;
                    *signalled = true;
                }
                0 => {
                    let Some(entry) = entries[index].as_mut() else { return };
                    if writable && std::mem::replace(&mut entry.blocked, false) {
                        *blocked -= 1;
                    }
                    entry.readable |= readable;
                    if entry.readable && !std::mem::replace(&mut entry.listed, true) {
                        edges.push(index as u32);
                    }
                }
                _ => *signalled = true,
            }
        });
    }

    fn insert(&mut self, stream: Stream) -> io::Result<SocketId> {
        let index = self.free.last().copied().unwrap_or(self.entries.len() as u32);
        self.poller.add(&stream, u64::from(index), Watch::Edges)?;
        // Bytes may have come before the poller knew the stream, so it counts as readable; the poller
        // tells of those that come later.
        let entry = Entry { stream, readable: true, blocked: false, listed: true };
        if self.free.pop().is_some() {
            self.entries[index as usize] = Some(entry);
        } else {
            self.entries.push(Some(entry));
        }
        self.edges.push(index);
        Ok(SocketId(index))
    }

    fn entry(&mut self, socket: SocketId) -> Option<&mut Entry> {
        self.entries.get_mut(socket.0 as usize)?.as_mut()
    }

    fn take(&mut self, socket: SocketId) -> Option<Entry> {
        let entry = self.entries.get_mut(socket.0 as usize)?.take()?;
        self.blocked -= usize::from(entry.blocked);
        if entry.listed {
            self.edges.retain(|&index| index != socket.0);
        }
        self.free.push(socket.0);
        Some(entry)
    }
}

impl Sockets for RealSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        let listener = Listener::bind(at)?;
        let address = listener.address()?;
        let index = self.listeners.len() as u32;
        self.poller.add(&listener, LISTENER | u64::from(index), Watch::Signals)?;
        self.listeners.push(Listening { listener, waiting: true });
        Ok((ListenerId(index), address))
    }

    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let listening = &mut self.listeners[listener.0 as usize];
        if !listening.waiting {
            return None;
        }
        match listening.listener.accept() {
            Ok(Some((stream, peer))) => Some((self.insert(stream).ok()?, peer)),
            Ok(None) => {
                listening.waiting = false;
                None
            }
            // Out of descriptors, say: what stays in line is asked for again at every turn, and since the
            // listener is watched by edges it does not keep the core awake.
            Err(_) => None,
        }
    }

    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        let stream = Stream::connect(to)?;
        self.insert(stream)
    }

    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        let entry = self.take(socket)?;
        // Fails only for a descriptor that is not watched, which this one was from `insert` on.
        let _ = self.poller.remove(&entry.stream);
        Some(DetachedSocket(Detached::Kernel(entry.stream)))
    }

    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let Detached::Kernel(stream) = socket.0 else {
            panic!("a socket of a virtual world on a real core");
        };
        // It was watched on another core a moment ago; only memory or the watch limit can be out now,
        // and then the process cannot serve anybody.
        self.insert(stream).expect("the kernel watches one more socket")
    }

    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> Received {
        let Some(entry) = self.entry(socket) else { return Received::Closed };
        match entry.stream.receive(into) {
            Transfer::Bytes(bytes) => Received::Bytes(bytes),
            Transfer::Nothing => {
                entry.readable = false;
                Received::Nothing
            }
            Transfer::Over => Received::Closed,
        }
    }

    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> Sent {
        let Some(entry) = self.entry(socket) else { return Sent::Broken };
        if entry.blocked {
            return Sent::Full;
        }
        match entry.stream.send(slices) {
            Transfer::Bytes(bytes) => Sent::Bytes(bytes),
            Transfer::Over => Sent::Broken,
            Transfer::Nothing => {
                entry.blocked = true;
                self.blocked += 1;
                Sent::Full
            }
        }
    }

    fn round_trip(&self, socket: SocketId) -> Option<Nanos> {
        self.entries.get(socket.0 as usize)?.as_ref()?.stream.round_trip()
    }

    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let few = self.len() <= FEW;
        self.turns = self.turns.wrapping_add(1);
        if !few || self.blocked > 0 || self.turns.is_multiple_of(TURNS_PER_POLL) {
            self.poll(Nanos::ZERO);
        }
        let RealSockets { entries, edges, .. } = self;
        edges.retain(|&index| {
            let Some(entry) = entries[index as usize].as_mut() else { return false };
            entry.listed = entry.readable;
            if entry.readable && !few {
                out.push(SocketId(index));
            }
            entry.readable
        });
        if few {
            let open = entries.iter().enumerate().filter(|(_, entry)| entry.is_some());
            out.extend(open.map(|(index, _)| SocketId(index as u32)));
        }
    }

    fn close(&mut self, socket: SocketId) {
        drop(self.take(socket));
    }
}
