//! The simulated network: links, listeners and streams.
//!
//! ```text
//!   connect ─▶ Connecting ──established──▶ Open ──close──▶ (a FIN follows the bytes)
//!                  │ refused, timed out      │ reset, host failed
//!                  └────────▶ Broken ◀───────┘
//! ```
//! A stream has two ends. Sent bytes spend `queueing + bytes / bandwidth + latency + jitter` on the link and are then in
//! the other end's inbox. Link and inbox together hold at most the window; the sender sees the rest as back-pressure.
//! A link that is cut, in one direction or both, delays, as TCP does with retransmissions; it loses nothing by itself. That
//! acknowledgements are delayed too is not simulated: of a link cut one way, the other direction's window stays open.
//!
//! A change of an end or listener is an edge, as epoll reports it: bytes, FIN, reset, established, space for a blocked
//! send, a connection to accept. It makes the driver ready that watches it, and the driver's reactor is woken.
//!
//! Invariants: bytes arrive in order; a closed end is never reused under the same generation; an event for a closed end
//! has no effect. Tested in `tests/simulated.rs`.

use super::event::{NetworkEvent, SimEvent, StreamEnd};
use super::event_queue::EventQueue;
use super::ids::{DriverId, SimHostId};
use super::link::{SimLink, SimLinkConfig};
use crate::net::{ReceiveStatus, SendStatus};
use octokv_base::map::FxHashMap;
use octokv_base::{Nanos, Prng};
use slab::Slab;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Connecting,
    Open,
    Broken,
}

struct InFlightSegment {
    arrives_at: Nanos,
    bytes: Vec<u8>,
}

struct SimStream {
    /// Unique: an event for an earlier end with the same index does not match.
    generation: u32,
    host: SimHostId,
    remote_host: SimHostId,
    remote: SocketAddr,
    state: StreamState,
    /// The sockets that hold this end; `None` while it is in an accept queue or between two cores.
    driver: Option<DriverId>,
    /// Whether the last send was refused for lack of space.
    is_send_blocked: bool,
    /// The other end; `None` before it exists. May name a closed end.
    peer: Option<StreamEnd>,
    inbox: VecDeque<u8>,
    in_flight: VecDeque<InFlightSegment>,
    /// The total of the bytes in `in_flight`.
    in_flight_bytes: usize,
    /// Whether the peer's FIN and all bytes before it have arrived.
    fin_received: bool,
    fin_sent: bool,
    /// Bytes accepted for a peer without power, which never receives them.
    undeliverable_bytes: usize,
}

struct SimListener {
    host: SimHostId,
    driver: DriverId,
    address: SocketAddr,
    accept_queue: VecDeque<StreamEnd>,
}

struct SimHost {
    is_up: bool,
    address: IpAddr,
    next_port: u16,
}

/// The hosts' addresses, the links, and all listeners and streams.
pub(crate) struct SimNetwork {
    random: Prng,
    default_link_config: SimLinkConfig,
    hosts: Vec<SimHost>,
    links: FxHashMap<(u32, u32), SimLink>,
    listeners: Vec<Option<SimListener>>,
    /// The stream ends, by the index of their [`StreamEnd`].
    streams: Slab<SimStream>,
    /// The number of stream ends created: the next generation.
    generation: u32,
    /// The drivers with an edge, until their reactors are woken.
    pub(crate) ready_drivers: Vec<DriverId>,
}

/// The attempts to connect before the connection fails; `RETRY_INTERVAL` apart.
const CONNECT_ATTEMPTS_MAX: u32 = 6;
const RETRY_INTERVAL: Nanos = Nanos::from_millis(200);
const EPHEMERAL_PORT_MIN: u16 = 40_000;

impl SimNetwork {
    pub(crate) fn new(random: Prng, default_link_config: SimLinkConfig) -> SimNetwork {
        SimNetwork {
            random,
            default_link_config,
            hosts: Vec::new(),
            links: FxHashMap::default(),
            listeners: Vec::new(),
            streams: Slab::new(),
            generation: 0,
            ready_drivers: Vec::new(),
        }
    }

    pub(crate) fn add_host(&mut self) -> SimHostId {
        let number = self.hosts.len() as u32;
        let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0001 + number));
        self.hosts.push(SimHost { is_up: true, address, next_port: EPHEMERAL_PORT_MIN });
        SimHostId(number)
    }

    pub(crate) fn address(&self, host: SimHostId) -> IpAddr {
        self.hosts[host.0 as usize].address
    }

    fn link(&mut self, from: SimHostId, to: SimHostId) -> &mut SimLink {
        let config = self.default_link_config;
        self.links.entry((from.0, to.0)).or_insert(SimLink { config, is_cut: false, free_at: Nanos::ZERO })
    }

    pub(crate) fn set_link(&mut self, a: SimHostId, b: SimHostId, config: SimLinkConfig) {
        self.link(a, b).config = config;
        self.link(b, a).config = config;
        // A wider window has space again.
        for end in self.ends_between(a, b) {
            self.unblock_send(end);
        }
    }

    /// Cuts one direction of a link, or ends the cut: then the delayed bytes arrive.
    pub(crate) fn set_cut(
        &mut self,
        from: SimHostId,
        to: SimHostId,
        cut: bool,
        now: Nanos,
        events: &mut EventQueue,
    ) {
        self.link(from, to).is_cut = cut;
        if cut {
            return;
        }
        for end in self.ends_between(from, to) {
            if self.stream(end).is_some_and(|stream| stream.host == to) {
                let at = now + self.delay(from, to);
                events.schedule(at, SimEvent::Net(NetworkEvent::SegmentArrival { end }));
            }
        }
    }

    pub(crate) fn reset_streams(&mut self, a: SimHostId, b: SimHostId) -> usize {
        let ends = self.ends_between(a, b);
        let aborted = ends.into_iter().filter(|&end| self.abort(end)).count();
        aborted / 2
    }

    /// Aborts an end. False if it is closed or was aborted before.
    fn abort(&mut self, end: StreamEnd) -> bool {
        let Some(stream) = self.stream(end) else { return false };
        if stream.state == StreamState::Broken {
            return false;
        }
        stream.abort();
        self.mark_ready(end);
        true
    }

    /// Makes the driver that watches an end ready.
    fn mark_ready(&mut self, end: StreamEnd) {
        let driver = self.stream(end).and_then(|stream| stream.driver);
        self.ready_drivers.extend(driver);
    }

    /// Makes the driver of an end ready if the end's last send was refused for lack of space.
    fn unblock_send(&mut self, end: StreamEnd) {
        if self.stream(end).is_some_and(|stream| std::mem::take(&mut stream.is_send_blocked)) {
            self.mark_ready(end);
        }
    }

    /// Sets the driver that watches an end. As with epoll, what arrived before is an edge too.
    pub(crate) fn watch(&mut self, end: StreamEnd, driver: Option<DriverId>) {
        if let Some(stream) = self.stream(end) {
            stream.driver = driver;
        }
        if self.is_ready(end) {
            self.mark_ready(end);
        }
    }

    /// Latency and jitter of one segment.
    fn delay(&mut self, from: SimHostId, to: SimHostId) -> Nanos {
        let config = self.link(from, to).config;
        config.latency + Nanos(self.random.below(config.jitter.0 + 1))
    }

    /// All stream ends, by index.
    fn ends(&self) -> Vec<StreamEnd> {
        let end = |(index, stream): (usize, &SimStream)| StreamEnd {
            index: index as u32,
            generation: stream.generation,
        };
        self.streams.iter().map(end).collect()
    }

    /// The stream ends of two hosts to each other, by index.
    fn ends_between(&self, a: SimHostId, b: SimHostId) -> Vec<StreamEnd> {
        let mut ends = self.ends();
        ends.retain(|end| {
            let stream = &self.streams[end.index as usize];
            let between = (stream.host, stream.remote_host);
            between == (a, b) || between == (b, a)
        });
        ends
    }

    fn stream(&mut self, end: StreamEnd) -> Option<&mut SimStream> {
        let stream = self.streams.get_mut(end.index as usize)?;
        (stream.generation == end.generation).then_some(stream)
    }

    fn new_stream(&mut self, host: SimHostId, remote_host: SimHostId, remote: SocketAddr) -> StreamEnd {
        self.generation += 1;
        let generation = self.generation;
        let stream = SimStream {
            generation,
            host,
            remote_host,
            remote,
            state: StreamState::Connecting,
            driver: None,
            is_send_blocked: false,
            peer: None,
            inbox: VecDeque::new(),
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            fin_received: false,
            fin_sent: false,
            undeliverable_bytes: 0,
        };
        StreamEnd { index: self.streams.insert(stream) as u32, generation }
    }

    fn remove(&mut self, end: StreamEnd) -> Option<SimStream> {
        self.stream(end)?;
        self.streams.try_remove(end.index as usize)
    }

    fn host_at(&self, address: IpAddr) -> Option<SimHostId> {
        let index = self.hosts.iter().position(|host| host.address == address)?;
        Some(SimHostId(index as u32))
    }

    pub(crate) fn listen(
        &mut self,
        host: SimHostId,
        driver: DriverId,
        at: SocketAddr,
    ) -> io::Result<(u32, SocketAddr)> {
        let own = self.address(host);
        if !(at.ip() == own || at.ip().is_unspecified() || at.ip().is_loopback()) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let port = if at.port() == 0 { self.allocate_port(host) } else { at.port() };
        let address = SocketAddr::new(own, port);
        if self.listeners.iter().flatten().any(|listener| listener.address == address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        self.listeners.push(Some(SimListener { host, driver, address, accept_queue: VecDeque::new() }));
        Ok(((self.listeners.len() - 1) as u32, address))
    }

    fn allocate_port(&mut self, host: SimHostId) -> u16 {
        let host = &mut self.hosts[host.0 as usize];
        let port = host.next_port;
        host.next_port = if port == u16::MAX { EPHEMERAL_PORT_MIN } else { port + 1 };
        port
    }

    pub(crate) fn connect(
        &mut self,
        host: SimHostId,
        to: SocketAddr,
        now: Nanos,
        events: &mut EventQueue,
    ) -> io::Result<StreamEnd> {
        let address = if to.ip().is_loopback() { self.address(host) } else { to.ip() };
        let remote_host = self.host_at(address).ok_or(io::ErrorKind::HostUnreachable)?;
        let end = self.new_stream(host, remote_host, SocketAddr::new(address, to.port()));
        let at = now + self.delay(host, remote_host);
        events.schedule(at, SimEvent::Net(NetworkEvent::ConnectRequest { end, attempt: 1 }));
        Ok(end)
    }

    /// Applies an event; returns a fact for the trace.
    pub(crate) fn apply_event(&mut self, event: NetworkEvent, now: Nanos, events: &mut EventQueue) -> u64 {
        match event {
            NetworkEvent::ConnectRequest { end, attempt } => {
                self.handle_connect_request(end, attempt, now, events)
            }
            NetworkEvent::ConnectResponse { end, established } => {
                let Some(stream) = self.stream(end) else { return 1 };
                if !established {
                    self.abort(end);
                } else if stream.state == StreamState::Connecting {
                    stream.state = StreamState::Open;
                    self.mark_ready(end);
                }
                2 + u64::from(established)
            }
            NetworkEvent::SegmentArrival { end } => self.deliver_arrived(end, now),
            NetworkEvent::Reset { end } => self.handle_reset(end, now, events),
        }
    }

    fn handle_reset(&mut self, end: StreamEnd, now: Nanos, events: &mut EventQueue) -> u64 {
        let Some(stream) = self.stream(end) else { return 3 };
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).is_cut {
            // The reset arrives by a retransmission after the partition.
            events.schedule(now + RETRY_INTERVAL, SimEvent::Net(NetworkEvent::Reset { end }));
        } else {
            self.abort(end);
        }
        4
    }

    fn handle_connect_request(
        &mut self,
        end: StreamEnd,
        attempt: u32,
        now: Nanos,
        events: &mut EventQueue,
    ) -> u64 {
        let Some(stream) = self.stream(end) else { return 5 };
        let (host, remote_host, remote) = (stream.host, stream.remote_host, stream.remote);
        // A handshake needs both directions.
        let is_cut = self.link(host, remote_host).is_cut || self.link(remote_host, host).is_cut;
        if is_cut || !self.hosts[remote_host.0 as usize].is_up {
            let event = if attempt < CONNECT_ATTEMPTS_MAX {
                NetworkEvent::ConnectRequest { end, attempt: attempt + 1 }
            } else {
                NetworkEvent::ConnectResponse { end, established: false }
            };
            events.schedule(now + RETRY_INTERVAL, SimEvent::Net(event));
            return 6;
        }
        let at = now + self.delay(remote_host, host);
        let listener = self.listeners.iter().position(|l| l.as_ref().is_some_and(|l| l.address == remote));
        if let Some(listener) = listener {
            let client = SocketAddr::new(self.address(host), self.allocate_port(host));
            let other = self.new_stream(remote_host, host, client);
            if let Some(stream) = self.stream(other) {
                stream.state = StreamState::Open;
                stream.peer = Some(end);
            }
            if let Some(stream) = self.stream(end) {
                stream.peer = Some(other);
            }
            if let Some(listener) = &mut self.listeners[listener] {
                listener.accept_queue.push_back(other);
                self.ready_drivers.push(listener.driver);
            }
        }
        events.schedule(
            at,
            SimEvent::Net(NetworkEvent::ConnectResponse { end, established: listener.is_some() }),
        );
        7
    }

    fn deliver_arrived(&mut self, end: StreamEnd, now: Nanos) -> u64 {
        let Some(stream) = self.stream(end) else { return 8 };
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).is_cut {
            return 9;
        }
        let Some(stream) = self.stream(end) else { return 8 };
        let mut arrived = 0u64;
        while stream.in_flight.front().is_some_and(|segment| segment.arrives_at <= now) {
            let Some(segment) = stream.in_flight.pop_front() else { break };
            stream.in_flight_bytes -= segment.bytes.len();
            arrived += segment.bytes.len() as u64;
            stream.inbox.extend(segment.bytes);
        }
        stream.fin_received = stream.fin_sent && stream.in_flight.is_empty();
        if arrived > 0 || stream.fin_received {
            self.mark_ready(end);
        }
        10 ^ (arrived << 8)
    }

    pub(crate) fn send(
        &mut self,
        end: StreamEnd,
        slices: &[IoSlice<'_>],
        now: Nanos,
        events: &mut EventQueue,
    ) -> SendStatus {
        let Some(stream) = self.stream(end) else { return SendStatus::Closed };
        let (host, remote_host, peer) = (stream.host, stream.remote_host, stream.peer);
        match stream.state {
            StreamState::Broken => return SendStatus::Closed,
            StreamState::Connecting => return SendStatus::WouldBlock,
            StreamState::Open => {}
        }
        let undeliverable = stream.undeliverable_bytes;
        let window = self.link(host, remote_host).config.window_bytes;
        let remote_is_up = self.hosts[remote_host.0 as usize].is_up;
        let used = match peer.and_then(|peer| self.stream(peer)) {
            Some(other) => other.in_flight_bytes + other.inbox.len(),
            // A peer without power does not respond; a closed one responds with a reset.
            None if !remote_is_up => undeliverable,
            None => return SendStatus::Closed,
        };
        let offered: usize = slices.iter().map(|slice| slice.len()).sum();
        let taken = offered.min(window.saturating_sub(used));
        if taken == 0 {
            if let Some(stream) = self.stream(end) {
                stream.is_send_blocked = true;
            }
            return SendStatus::WouldBlock;
        }
        let Some(peer) = peer.filter(|&peer| self.stream(peer).is_some()) else {
            if let Some(stream) = self.stream(end) {
                stream.undeliverable_bytes += taken;
            }
            return SendStatus::Bytes(taken);
        };
        let mut bytes = Vec::with_capacity(taken);
        for slice in slices {
            let part = slice.len().min(taken - bytes.len());
            bytes.extend_from_slice(&slice[..part]);
        }
        self.transmit(host, peer, bytes, now, events);
        SendStatus::Bytes(taken)
    }

    /// Sends bytes over the link, in up to three segments if the link fragments.
    fn transmit(
        &mut self,
        from: SimHostId,
        to: StreamEnd,
        mut bytes: Vec<u8>,
        now: Nanos,
        events: &mut EventQueue,
    ) {
        let Some(to_host) = self.stream(to).map(|stream| stream.host) else { return };
        let config = self.link(from, to_host).config;
        let pieces = if config.fragments { 1 + self.random.below(3) } else { 1 };
        for piece in 0..pieces {
            let last = piece + 1 == pieces;
            let cut = if last { 0 } else { self.random.below(bytes.len() as u64 + 1) as usize };
            let rest = if last { Vec::new() } else { bytes.split_off(cut) };
            let bytes_now = std::mem::replace(&mut bytes, rest);
            let at = self.arrival_time(from, to_host, bytes_now.len(), now);
            let Some(stream) = self.stream(to) else { return };
            let arrives_at = stream.in_flight.back().map_or(at, |segment| segment.arrives_at.max(at));
            stream.in_flight_bytes += bytes_now.len();
            stream.in_flight.push_back(InFlightSegment { arrives_at, bytes: bytes_now });
            events.schedule(arrives_at, SimEvent::Net(NetworkEvent::SegmentArrival { end: to }));
        }
    }

    fn arrival_time(&mut self, from: SimHostId, to: SimHostId, bytes: usize, now: Nanos) -> Nanos {
        let delay = self.delay(from, to);
        let link = self.link(from, to);
        let rate = link.config.bytes_per_second;
        let sending = (bytes as u64).saturating_mul(1_000_000_000).checked_div(rate).unwrap_or(0);
        link.free_at = link.free_at.max(now) + Nanos(sending);
        link.free_at + delay
    }

    pub(crate) fn receive(&mut self, end: StreamEnd, into: &mut [u8]) -> ReceiveStatus {
        let Some(stream) = self.stream(end) else { return ReceiveStatus::Closed };
        if stream.state == StreamState::Broken {
            return ReceiveStatus::Closed;
        }
        if stream.inbox.is_empty() || into.is_empty() {
            return if stream.fin_received && stream.inbox.is_empty() {
                ReceiveStatus::Closed
            } else {
                ReceiveStatus::WouldBlock
            };
        }
        let mut count = stream.inbox.len().min(into.len());
        let (host, remote_host) = (stream.host, stream.remote_host);
        if self.link(remote_host, host).config.fragments && self.random.one_in(4) {
            count = 1 + self.random.below(count as u64) as usize;
        }
        let Some(stream) = self.stream(end) else { return ReceiveStatus::Closed };
        let (front, back) = stream.inbox.as_slices();
        let of_front = front.len().min(count);
        into[..of_front].copy_from_slice(&front[..of_front]);
        into[of_front..count].copy_from_slice(&back[..count - of_front]);
        stream.inbox.drain(..count);
        if let Some(peer) = stream.peer {
            self.unblock_send(peer);
        }
        ReceiveStatus::Bytes(count)
    }

    pub(crate) fn is_ready(&mut self, end: StreamEnd) -> bool {
        self.stream(end)
            .is_none_or(|s| !s.inbox.is_empty() || s.fin_received || s.state == StreamState::Broken)
    }

    pub(crate) fn close(&mut self, end: StreamEnd, now: Nanos, events: &mut EventQueue) {
        let Some(stream) = self.remove(end) else { return };
        let Some(peer) = stream.peer else { return };
        let at = now + self.delay(stream.host, stream.remote_host);
        let Some(other) = self.stream(peer) else { return };
        if stream.state == StreamState::Broken {
            return;
        }
        other.fin_sent = true;
        let at = other.in_flight.back().map_or(at, |segment| segment.arrives_at.max(at));
        events.schedule(at, SimEvent::Net(NetworkEvent::SegmentArrival { end: peer }));
    }

    /// Takes the next established stream of a listener, with its peer's address.
    pub(crate) fn accept(&mut self, listener: u32) -> Option<(StreamEnd, SocketAddr)> {
        loop {
            let end = self.listeners[listener as usize].as_mut()?.accept_queue.pop_front()?;
            // A stream that ended while it was in the queue is skipped.
            if let Some(stream) = self.stream(end) {
                return Some((end, stream.remote));
            }
        }
    }

    /// Closes a listener. Its index is not reused.
    pub(crate) fn close_listener(&mut self, listener: u32) {
        self.listeners[listener as usize] = None;
    }

    /// Closes the host's listeners and streams. `send_resets` is whether its kernel survives: then it is up and resets
    /// its streams' peers.
    pub(crate) fn stop_host(
        &mut self,
        host: SimHostId,
        send_resets: bool,
        now: Nanos,
        events: &mut EventQueue,
    ) {
        self.hosts[host.0 as usize].is_up = send_resets;
        for listener in &mut self.listeners {
            listener.take_if(|listener| listener.host == host);
        }
        for end in self.ends() {
            if self.stream(end).is_none_or(|stream| stream.host != host) {
                continue;
            }
            let Some(stream) = self.remove(end) else { continue };
            if send_resets && let Some(peer) = stream.peer {
                let at = now + self.delay(host, stream.remote_host);
                events.schedule(at, SimEvent::Net(NetworkEvent::Reset { end: peer }));
            }
        }
    }

    pub(crate) fn start_host(&mut self, host: SimHostId, now: Nanos, events: &mut EventQueue) {
        self.hosts[host.0 as usize].is_up = true;
        for end in self.ends() {
            let Some(stream) = self.stream(end) else { continue };
            if stream.remote_host != host || stream.state != StreamState::Open {
                continue;
            }
            let (own, peer) = (stream.host, stream.peer);
            if peer.is_none_or(|peer| self.stream(peer).is_none()) {
                let at = now + self.delay(host, own);
                events.schedule(at, SimEvent::Net(NetworkEvent::Reset { end }));
            }
        }
    }
}

impl SimStream {
    fn abort(&mut self) {
        self.state = StreamState::Broken;
        self.inbox.clear();
        self.in_flight.clear();
        self.in_flight_bytes = 0;
    }
}
