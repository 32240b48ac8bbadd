//! Links, listeners and streams of the virtual world.
//!
//! ```text
//!   connect ─▶ Connecting ──established──▶ Open ──close──▶ (an end travels behind the bytes)
//!                  │ refused, given up       │ reset, host gone
//!                  └────────▶ Broken ◀───────┘
//! ```
//! A stream is two ends. Bytes sent wait `queue + bytes / bandwidth + latency + jitter` on the link,
//! then lie in the other end's inbox; what is on the link and in the inbox together is at most the
//! window, which is what the sender feels as back-pressure. A cut link delays, as TCP does; it loses
//! nothing by itself.
//!
//! Invariants: bytes arrive in order; an end that was closed by its owner names nothing any more; an
//! event for an end that is gone does nothing (ends carry a generation).

use super::HostId;
use super::event_queue::{Agenda, Event};
use crate::sockets::{Received, Sent};
use octokv_base::map::Map;
use octokv_base::{Nanos, Random};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// How a link behaves, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSettings {
    /// From the end of sending to arrival.
    pub latency: Nanos,
    /// Up to so much is added to the latency of each piece.
    pub jitter: Nanos,
    /// Zero: without limit.
    pub bytes_per_second: u64,
    /// The most bytes of one stream on the link and unread at the receiver.
    pub window_bytes: usize,
    /// Whether sends are cut into pieces that arrive one by one, and receives come up short.
    pub fragments: bool,
}

impl Default for LinkSettings {
    /// A quiet 25 Gbit/s network.
    fn default() -> LinkSettings {
        LinkSettings {
            latency: Nanos::from_micros(10),
            jitter: Nanos::from_micros(2),
            bytes_per_second: 3_125_000_000,
            window_bytes: 1 << 20,
            fragments: false,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum NetEvent {
    /// A connection request reaches the host it is for.
    Request { end: End, tries: u32 },
    /// The answer reaches the one who asked: established or refused.
    Answer { end: End, established: bool },
    /// The oldest pieces on the way to an end may have arrived.
    Arrival { end: End },
    /// A reset reaches an end.
    Reset { end: End },
}

/// One end of a stream: index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Open,
    Broken,
}

struct Piece {
    at: Nanos,
    bytes: Vec<u8>,
}

struct Stream {
    host: HostId,
    remote_host: HostId,
    remote: SocketAddr,
    phase: Phase,
    /// The other end; none before it exists and after it is gone.
    peer: Option<End>,
    inbox: VecDeque<u8>,
    on_the_way: VecDeque<Piece>,
    /// Bytes in `on_the_way`.
    on_the_way_bytes: usize,
    /// The peer closed; true once all its bytes and the end behind them have arrived.
    ended: bool,
    ending: bool,
    /// Bytes that a peer without power will never read.
    lost_bytes: usize,
}

struct Listener {
    host: HostId,
    at: SocketAddr,
    line: VecDeque<End>,
}

struct Host {
    on: bool,
    address: IpAddr,
    next_port: u16,
}

#[derive(Clone, Copy)]
struct Link {
    settings: LinkSettings,
    partitioned: bool,
    free_at: Nanos,
}

/// The network.
pub(crate) struct Net {
    random: Random,
    default_link: LinkSettings,
    hosts: Vec<Host>,
    links: Map<(u32, u32), Link>,
    listeners: Vec<Option<Listener>>,
    streams: Vec<Option<Stream>>,
    generations: Vec<u32>,
    free: Vec<u32>,
}

/// How often a connection request is sent before the connection fails, and how far apart.
const REQUEST_TRIES: u32 = 6;
const REQUEST_AGAIN: Nanos = Nanos::from_millis(200);
const FIRST_PORT: u16 = 40_000;

impl Net {
    pub(crate) fn new(random: Random, default_link: LinkSettings) -> Net {
        Net {
            random,
            default_link,
            hosts: Vec::new(),
            links: Map::default(),
            listeners: Vec::new(),
            streams: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(crate) fn add_host(&mut self) -> HostId {
        let number = self.hosts.len() as u32;
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0001 + number));
        self.hosts.push(Host { on: true, address, next_port: FIRST_PORT });
        HostId(number)
    }

    pub(crate) fn address(&self, host: HostId) -> IpAddr {
        self.hosts[host.0 as usize].address
    }

    fn link(&mut self, from: HostId, to: HostId) -> &mut Link {
        let settings = self.default_link;
        self.links.entry((from.0, to.0)).or_insert(Link {
            settings,
            partitioned: false,
            free_at: Nanos::ZERO,
        })
    }

    pub(crate) fn set_link(&mut self, a: HostId, b: HostId, settings: LinkSettings) {
        self.link(a, b).settings = settings;
        self.link(b, a).settings = settings;
    }

    pub(crate) fn set_partitioned(
        &mut self,
        a: HostId,
        b: HostId,
        partitioned: bool,
        now: Nanos,
        agenda: &mut Agenda,
    ) {
        self.link(a, b).partitioned = partitioned;
        self.link(b, a).partitioned = partitioned;
        if partitioned {
            return;
        }
        for index in 0..self.streams.len() {
            let Some(stream) = &self.streams[index] else { continue };
            let between = (stream.host, stream.remote_host);
            if between == (a, b) || between == (b, a) {
                let end = self.end(index as u32);
                let at = now + self.delay(between.1, between.0);
                agenda.set(at, Event::Net(NetEvent::Arrival { end }));
            }
        }
    }

    pub(crate) fn reset_streams(&mut self, a: HostId, b: HostId) -> usize {
        let mut ends = 0;
        for stream in self.streams.iter_mut().flatten() {
            let between = (stream.host, stream.remote_host);
            if (between == (a, b) || between == (b, a)) && stream.phase != Phase::Broken {
                stream.break_off();
                ends += 1;
            }
        }
        ends / 2
    }

    /// Latency and jitter of one piece.
    fn delay(&mut self, from: HostId, to: HostId) -> Nanos {
        let settings = self.link(from, to).settings;
        settings.latency + Nanos(self.random.below(settings.jitter.0 + 1))
    }

    fn end(&self, index: u32) -> End {
        End { index, generation: self.generations[index as usize] }
    }

    fn stream(&mut self, end: End) -> Option<&mut Stream> {
        if self.generations.get(end.index as usize) != Some(&end.generation) {
            return None;
        }
        self.streams[end.index as usize].as_mut()
    }

    fn new_stream(&mut self, host: HostId, remote_host: HostId, remote: SocketAddr) -> End {
        let stream = Stream {
            host,
            remote_host,
            remote,
            phase: Phase::Connecting,
            peer: None,
            inbox: VecDeque::new(),
            on_the_way: VecDeque::new(),
            on_the_way_bytes: 0,
            ended: false,
            ending: false,
            lost_bytes: 0,
        };
        match self.free.pop() {
            Some(index) => {
                self.streams[index as usize] = Some(stream);
                self.end(index)
            }
            None => {
                self.streams.push(Some(stream));
                self.generations.push(0);
                self.end((self.streams.len() - 1) as u32)
            }
        }
    }

    fn remove(&mut self, end: End) -> Option<Stream> {
        self.stream(end)?;
        self.generations[end.index as usize] += 1;
        self.free.push(end.index);
        self.streams[end.index as usize].take()
    }

    fn host_at(&self, address: IpAddr) -> Option<HostId> {
        let index = self.hosts.iter().position(|host| host.address == address)?;
        Some(HostId(index as u32))
    }

    pub(crate) fn listen(&mut self, host: HostId, at: SocketAddr) -> io::Result<(u32, SocketAddr)> {
        let own = self.address(host);
        if !(at.ip() == own || at.ip().is_unspecified() || at.ip().is_loopback()) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let port = if at.port() == 0 { self.take_port(host) } else { at.port() };
        let at = SocketAddr::new(own, port);
        if self.listeners.iter().flatten().any(|listener| listener.at == at) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        self.listeners.push(Some(Listener { host, at, line: VecDeque::new() }));
        Ok(((self.listeners.len() - 1) as u32, at))
    }

    fn take_port(&mut self, host: HostId) -> u16 {
        let host = &mut self.hosts[host.0 as usize];
        let port = host.next_port;
        host.next_port = if port == u16::MAX { FIRST_PORT } else { port + 1 };
        port
    }

    pub(crate) fn connect(
        &mut self,
        host: HostId,
        to: SocketAddr,
        now: Nanos,
        agenda: &mut Agenda,
    ) -> io::Result<End> {
        let address = if to.ip().is_loopback() { self.address(host) } else { to.ip() };
        let remote_host = self.host_at(address).ok_or(io::ErrorKind::HostUnreachable)?;
        let end = self.new_stream(host, remote_host, SocketAddr::new(address, to.port()));
        let at = now + self.delay(host, remote_host);
        agenda.set(at, Event::Net(NetEvent::Request { end, tries: 1 }));
        Ok(end)
    }

    /// Carries an event out; gives a fact for the trace.
    pub(crate) fn happen(&mut self, event: NetEvent, now: Nanos, agenda: &mut Agenda) -> u64 {
        match event {
            NetEvent::Request { end, tries } => self.request(end, tries, now, agenda),
            NetEvent::Answer { end, established } => {
                let Some(stream) = self.stream(end) else { return 1 };
                if !established {
                    stream.break_off();
                } else if stream.phase == Phase::Connecting {
                    stream.phase = Phase::Open;
                }
                2 + u64::from(established)
            }
            NetEvent::Arrival { end } => self.arrive(end, now),
            NetEvent::Reset { end } => self.reset(end, now, agenda),
        }
    }

    fn reset(&mut self, end: End, now: Nanos, agenda: &mut Agenda) -> u64 {
        let Some(stream) = self.stream(end) else { return 3 };
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).partitioned {
            // The news comes with the next try after the link is mended.
            agenda.set(now + REQUEST_AGAIN, Event::Net(NetEvent::Reset { end }));
        } else if let Some(stream) = self.stream(end) {
            stream.break_off();
        }
        4
    }

    fn request(&mut self, end: End, tries: u32, now: Nanos, agenda: &mut Agenda) -> u64 {
        let Some(stream) = self.stream(end) else { return 5 };
        let (host, remote_host, remote) = (stream.host, stream.remote_host, stream.remote);
        if self.link(host, remote_host).partitioned || !self.hosts[remote_host.0 as usize].on {
            let event = if tries < REQUEST_TRIES {
                NetEvent::Request { end, tries: tries + 1 }
            } else {
                NetEvent::Answer { end, established: false }
            };
            agenda.set(now + REQUEST_AGAIN, Event::Net(event));
            return 6;
        }
        let at = now + self.delay(remote_host, host);
        let listener = self.listeners.iter().position(|l| l.as_ref().is_some_and(|l| l.at == remote));
        if let Some(listener) = listener {
            let client = SocketAddr::new(self.address(host), self.take_port(host));
            let other = self.new_stream(remote_host, host, client);
            if let Some(stream) = self.stream(other) {
                stream.phase = Phase::Open;
                stream.peer = Some(end);
            }
            if let Some(stream) = self.stream(end) {
                stream.peer = Some(other);
            }
            if let Some(listener) = &mut self.listeners[listener] {
                listener.line.push_back(other);
            }
        }
        agenda.set(at, Event::Net(NetEvent::Answer { end, established: listener.is_some() }));
        7
    }

    fn arrive(&mut self, end: End, now: Nanos) -> u64 {
        let Some(stream) = self.stream(end) else { return 8 };
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).partitioned {
            return 9;
        }
        let Some(stream) = self.stream(end) else { return 8 };
        let mut arrived = 0u64;
        while stream.on_the_way.front().is_some_and(|piece| piece.at <= now) {
            let Some(piece) = stream.on_the_way.pop_front() else { break };
            stream.on_the_way_bytes -= piece.bytes.len();
            arrived += piece.bytes.len() as u64;
            stream.inbox.extend(piece.bytes);
        }
        stream.ended = stream.ending && stream.on_the_way.is_empty();
        10 ^ (arrived << 8)
    }

    pub(crate) fn send(&mut self, end: End, slices: &[IoSlice<'_>], now: Nanos, agenda: &mut Agenda) -> Sent {
        let Some(stream) = self.stream(end) else { return Sent::Broken };
        let (host, remote_host, peer) = (stream.host, stream.remote_host, stream.peer);
        match stream.phase {
            Phase::Broken => return Sent::Broken,
            Phase::Connecting => return Sent::Full,
            Phase::Open => {}
        }
        let lost = stream.lost_bytes;
        let window = self.link(host, remote_host).settings.window_bytes;
        let remote_is_on = self.hosts[remote_host.0 as usize].on;
        let used = match peer.and_then(|peer| self.stream(peer)) {
            Some(other) => other.on_the_way_bytes + other.inbox.len(),
            // A peer without power answers nothing; a closed one answers with a reset.
            None if !remote_is_on => lost,
            None => return Sent::Broken,
        };
        let offered: usize = slices.iter().map(|slice| slice.len()).sum();
        let taken = offered.min(window.saturating_sub(used));
        if taken == 0 {
            return Sent::Full;
        }
        let Some(peer) = peer.filter(|&peer| self.stream(peer).is_some()) else {
            if let Some(stream) = self.stream(end) {
                stream.lost_bytes += taken;
            }
            return Sent::Bytes(taken);
        };
        let mut bytes = Vec::with_capacity(taken);
        for slice in slices {
            let part = slice.len().min(taken - bytes.len());
            bytes.extend_from_slice(&slice[..part]);
        }
        self.put_on_the_way(host, peer, bytes, now, agenda);
        Sent::Bytes(taken)
    }

    /// Sends bytes over the link, in up to three pieces where the link makes fragments.
    fn put_on_the_way(&mut self, from: HostId, to: End, mut bytes: Vec<u8>, now: Nanos, agenda: &mut Agenda) {
        let Some(to_host) = self.stream(to).map(|stream| stream.host) else { return };
        let settings = self.link(from, to_host).settings;
        let pieces = if settings.fragments { 1 + self.random.below(3) } else { 1 };
        for piece in 0..pieces {
            let last = piece + 1 == pieces;
            let cut = if last { 0 } else { self.random.below(bytes.len() as u64 + 1) as usize };
            let rest = if last { Vec::new() } else { bytes.split_off(cut) };
            let bytes_now = std::mem::replace(&mut bytes, rest);
            let at = self.arrival_time(from, to_host, bytes_now.len(), now);
            let Some(stream) = self.stream(to) else { return };
            let at = stream.on_the_way.back().map_or(at, |piece| piece.at.max(at));
            stream.on_the_way_bytes += bytes_now.len();
            stream.on_the_way.push_back(Piece { at, bytes: bytes_now });
            agenda.set(at, Event::Net(NetEvent::Arrival { end: to }));
        }
    }

    fn arrival_time(&mut self, from: HostId, to: HostId, bytes: usize, now: Nanos) -> Nanos {
        let delay = self.delay(from, to);
        let link = self.link(from, to);
        let rate = link.settings.bytes_per_second;
        let sending = (bytes as u64).saturating_mul(1_000_000_000).checked_div(rate).unwrap_or(0);
        link.free_at = link.free_at.max(now) + Nanos(sending);
        link.free_at + delay
    }

    pub(crate) fn receive(&mut self, end: End, into: &mut [u8]) -> Received {
        let Some(stream) = self.stream(end) else { return Received::Closed };
        if stream.phase == Phase::Broken {
            return Received::Closed;
        }
        if stream.inbox.is_empty() || into.is_empty() {
            return if stream.ended && stream.inbox.is_empty() {
                Received::Closed
            } else {
                Received::Nothing
            };
        }
        let mut count = stream.inbox.len().min(into.len());
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).settings.fragments && self.random.one_in(4) {
            count = 1 + self.random.below(count as u64) as usize;
        }
        let Some(stream) = self.stream(end) else { return Received::Closed };
        let (front, back) = stream.inbox.as_slices();
        let of_front = front.len().min(count);
        into[..of_front].copy_from_slice(&front[..of_front]);
        into[of_front..count].copy_from_slice(&back[..count - of_front]);
        stream.inbox.drain(..count);
        Received::Bytes(count)
    }

    pub(crate) fn has_news(&mut self, end: End) -> bool {
        self.stream(end).is_none_or(|s| !s.inbox.is_empty() || s.ended || s.phase == Phase::Broken)
    }

    pub(crate) fn close(&mut self, end: End, now: Nanos, agenda: &mut Agenda) {
        let Some(stream) = self.remove(end) else { return };
        let Some(peer) = stream.peer else { return };
        let at = now + self.delay(stream.host, stream.remote_host);
        let Some(other) = self.stream(peer) else { return };
        if stream.phase == Phase::Broken {
            return;
        }
        other.ending = true;
        let at = other.on_the_way.back().map_or(at, |piece| piece.at.max(at));
        agenda.set(at, Event::Net(NetEvent::Arrival { end: peer }));
    }

    /// The next stream in line at a listener, and its peer's address.
    pub(crate) fn accept(&mut self, listener: u32) -> Option<(End, SocketAddr)> {
        loop {
            let end = self.listeners[listener as usize].as_mut()?.line.pop_front()?;
            // One that ended while it waited in line is gone.
            if let Some(stream) = self.stream(end) {
                return Some((end, stream.remote));
            }
        }
    }

    /// Stops listening.
    pub(crate) fn unlisten(&mut self, listener: u32) {
        self.listeners[listener as usize] = None;
    }

    /// Ends all that a host has. With `tell`, its kernel lives and resets its streams.
    pub(crate) fn stop_host(&mut self, host: HostId, tell: bool, now: Nanos, agenda: &mut Agenda) {
        self.hosts[host.0 as usize].on = tell;
        for listener in &mut self.listeners {
            listener.take_if(|listener| listener.host == host);
        }
        for index in 0..self.streams.len() as u32 {
            let is_its = self.streams[index as usize].as_ref().is_some_and(|s| s.host == host);
            if !is_its {
                continue;
            }
            let end = self.end(index);
            let Some(stream) = self.remove(end) else { continue };
            if tell && let Some(peer) = stream.peer {
                let at = now + self.delay(host, stream.remote_host);
                agenda.set(at, Event::Net(NetEvent::Reset { end: peer }));
            }
        }
    }

    pub(crate) fn start_host(&mut self, host: HostId, now: Nanos, agenda: &mut Agenda) {
        self.hosts[host.0 as usize].on = true;
        for index in 0..self.streams.len() as u32 {
            let Some(stream) = &self.streams[index as usize] else { continue };
            if stream.remote_host != host || stream.phase != Phase::Open {
                continue;
            }
            let (own, peer) = (stream.host, stream.peer);
            if peer.is_none_or(|peer| self.stream(peer).is_none()) {
                let at = now + self.delay(host, own);
                let end = self.end(index);
                agenda.set(at, Event::Net(NetEvent::Reset { end }));
            }
        }
    }
}

impl Stream {
    fn break_off(&mut self) {
        self.phase = Phase::Broken;
        self.inbox.clear();
        self.on_the_way.clear();
        self.on_the_way_bytes = 0;
    }
}
