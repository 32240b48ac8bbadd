//! Connections of clients to members, and the messages on their way.
//!
//! ```text
//!   send ──delay──▶ due ──▶ at the member          lost: neither arrives nor is anyone notified
//!     │ cut                                        cut: held, and delivered after the cut
//!     └──▶ held ──healed──▶ …
//! ```
//! In: messages with the time of sending. Out: messages in the order of their arrival. Invariants: updates of the watches
//! of one connection arrive in the order of sending; requests and responses may overtake each other. A response that
//! arrives after its request's time-out, or on a connection that was reset since, is dropped; a request then still
//! arrives and is executed.

use super::faults::MessageFaults;
use octokv_base::{Nanos, Prng};
use octokv_cluster::etcd::{EtcdError, EtcdRequest, EtcdResponse, WatchRequest};
use octokv_cluster::{RequestLimitReached, StoreDelivery, WatchUpdate};
use std::collections::{BTreeMap, VecDeque};

/// The request or watch that a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin {
    pub connection: usize,
    pub token: u64,
    /// Distinguishes uses of a token.
    pub sequence: u64,
}

/// A message to a member.
#[derive(Clone, Debug)]
pub(super) enum ToMember {
    Request(EtcdRequest),
    Watch(WatchRequest),
    CancelWatch,
    RequestProgress,
}

/// A message to a client.
#[derive(Clone, Debug)]
pub(super) enum ToClient {
    Response(Result<EtcdResponse, EtcdError>),
    Update(WatchUpdate),
    /// The request's time is over.
    TimedOut,
}

/// A message of either direction.
#[derive(Clone, Debug)]
pub(super) enum EtcdMessage {
    ToMember(Origin, ToMember),
    ToClient(Origin, ToClient),
}

/// The client's end of a connection.
#[derive(Debug, Default)]
struct Endpoint {
    member: usize,
    /// The sequence number of each request in flight, and of each watch, by token.
    requests: BTreeMap<u64, u64>,
    watches: BTreeMap<u64, u64>,
    arrived: VecDeque<StoreDelivery>,
    /// The arrival of the newest watch update.
    last_update_at: Nanos,
    /// Whether messages to the member, and from it, are held.
    cut: [bool; 2],
    held: [Vec<EtcdMessage>; 2],
}

/// All connections and messages.
pub(super) struct EtcdTransport {
    random: Prng,
    delay_min: Nanos,
    delay_max: Nanos,
    request_timeout: Nanos,
    requests_max: usize,
    pub faults: MessageFaults,
    endpoints: Vec<Endpoint>,
    queue: BTreeMap<(Nanos, u64), EtcdMessage>,
    sequence: u64,
    /// Messages lost, and watches broken, by a fault.
    pub lost: u64,
    /// Requests whose outcome the client does not know.
    pub timed_out: u64,
}

impl EtcdTransport {
    pub fn new(
        random: Prng,
        (delay_min, delay_max): (Nanos, Nanos),
        request_timeout: Nanos,
        requests_max: usize,
    ) -> EtcdTransport {
        EtcdTransport {
            random,
            delay_min,
            delay_max,
            request_timeout,
            requests_max,
            faults: MessageFaults::default(),
            endpoints: Vec::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            lost: 0,
            timed_out: 0,
        }
    }

    pub fn connect(&mut self, member: usize) -> usize {
        self.endpoints.push(Endpoint { member, ..Endpoint::default() });
        self.endpoints.len() - 1
    }

    pub fn member_of(&self, connection: usize) -> usize {
        self.endpoints[connection].member
    }

    pub fn connections(&self) -> usize {
        self.endpoints.len()
    }

    /// Whether the client still has this watch.
    pub fn is_watching(&self, origin: Origin) -> bool {
        self.endpoints[origin.connection].watches.get(&origin.token) == Some(&origin.sequence)
    }

    /// Sends a request.
    ///
    /// # Errors
    /// If the connection has as many requests in flight as it may.
    pub fn submit(
        &mut self,
        now: Nanos,
        connection: usize,
        token: u64,
        request: EtcdRequest,
    ) -> Result<(), RequestLimitReached> {
        if self.endpoints[connection].requests.len() >= self.requests_max {
            return Err(RequestLimitReached);
        }
        let origin = self.new_origin(connection, token);
        let replaced = self.endpoints[connection].requests.insert(token, origin.sequence);
        assert!(replaced.is_none(), "token {token} is in use");
        self.schedule(now + self.request_timeout, EtcdMessage::ToClient(origin, ToClient::TimedOut));
        if self.occurs(self.faults.lose_request_one_in) {
            self.lost += 1;
            return Ok(());
        }
        self.send(now, EtcdMessage::ToMember(origin, ToMember::Request(request)));
        Ok(())
    }

    pub fn watch(&mut self, now: Nanos, connection: usize, token: u64, request: WatchRequest) {
        let origin = self.new_origin(connection, token);
        let replaced = self.endpoints[connection].watches.insert(token, origin.sequence);
        assert!(replaced.is_none(), "token {token} is in use");
        self.send(now, EtcdMessage::ToMember(origin, ToMember::Watch(request)));
    }

    pub fn cancel_watch(&mut self, now: Nanos, connection: usize, token: u64) {
        if let Some(sequence) = self.endpoints[connection].watches.remove(&token) {
            let origin = Origin { connection, token, sequence };
            self.send(now, EtcdMessage::ToMember(origin, ToMember::CancelWatch));
        }
    }

    pub fn request_progress(&mut self, now: Nanos, connection: usize) {
        let origin = self.new_origin(connection, 0);
        self.send(now, EtcdMessage::ToMember(origin, ToMember::RequestProgress));
    }

    /// Sends a response, unless the fault profile loses it.
    pub fn respond(&mut self, now: Nanos, origin: Origin, result: Result<EtcdResponse, EtcdError>) {
        if self.occurs(self.faults.lose_response_one_in) {
            self.lost += 1;
            return;
        }
        self.send(now, EtcdMessage::ToClient(origin, ToClient::Response(result)));
    }

    /// Sends an update of a watch. False if the fault profile breaks the connection's watches instead.
    pub fn update(&mut self, now: Nanos, origin: Origin, update: WatchUpdate) -> bool {
        if self.occurs(self.faults.break_watch_one_in) {
            self.lost += 1;
            return false;
        }
        self.send(now, EtcdMessage::ToClient(origin, ToClient::Update(update)));
        true
    }

    /// Holds the messages to the member, and those from it, or delivers them again.
    pub fn set_cut(&mut self, now: Nanos, connection: usize, to_member: bool, to_client: bool) {
        let endpoint = &mut self.endpoints[connection];
        endpoint.cut = [to_member, to_client];
        let mut released = Vec::new();
        for direction in 0..2 {
            if !endpoint.cut[direction] {
                released.append(&mut endpoint.held[direction]);
            }
        }
        for message in released {
            self.send(now, message);
        }
    }

    /// Ends the watches of a connection; the client is notified at once.
    pub fn break_watches(&mut self, connection: usize) {
        let endpoint = &mut self.endpoints[connection];
        for token in std::mem::take(&mut endpoint.watches).into_keys() {
            endpoint.arrived.push_back(StoreDelivery::Watch { token, update: WatchUpdate::Disconnected });
        }
    }

    /// Resets a connection, which then leads to `member`: the outcome of its requests is unknown, its watches have
    /// ended.
    pub fn reset(&mut self, connection: usize, member: usize) {
        self.break_watches(connection);
        let endpoint = &mut self.endpoints[connection];
        endpoint.member = member;
        endpoint.held[1].clear();
        for token in std::mem::take(&mut endpoint.requests).into_keys() {
            self.timed_out += 1;
            endpoint.arrived.push_back(StoreDelivery::Response { token, result: Err(EtcdError::Unknown) });
        }
    }

    /// The next message that has arrived at a member by `now`. Messages that arrived at clients are delivered.
    pub fn next_due(&mut self, now: Nanos) -> Option<(Origin, ToMember)> {
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > now {
                return None;
            }
            match entry.remove() {
                EtcdMessage::ToMember(origin, message) => return Some((origin, message)),
                EtcdMessage::ToClient(origin, message) => self.deliver(origin, message),
            }
        }
        None
    }

    /// The time of the next arrival.
    pub fn next_arrival(&self) -> Nanos {
        self.queue.first_key_value().map_or(Nanos::NEVER, |((at, _), _)| *at)
    }

    /// The next delivery to a client.
    pub fn poll(&mut self, connection: usize) -> Option<StoreDelivery> {
        self.endpoints[connection].arrived.pop_front()
    }

    /// Whether a client has a delivery.
    pub fn has_arrived(&self, connection: usize) -> bool {
        !self.endpoints[connection].arrived.is_empty()
    }

    fn deliver(&mut self, origin: Origin, message: ToClient) {
        let Origin { connection, token, sequence } = origin;
        let endpoint = &mut self.endpoints[connection];
        let delivery = match message {
            ToClient::Response(_) | ToClient::TimedOut
                if endpoint.requests.get(&token) != Some(&sequence) =>
            {
                return;
            }
            ToClient::Update(_) if endpoint.watches.get(&token) != Some(&sequence) => return,
            ToClient::Response(result) => {
                endpoint.requests.remove(&token);
                StoreDelivery::Response { token, result }
            }
            ToClient::TimedOut => {
                self.timed_out += 1;
                endpoint.requests.remove(&token);
                StoreDelivery::Response { token, result: Err(EtcdError::Unknown) }
            }
            ToClient::Update(update) => {
                if matches!(update, WatchUpdate::Compacted { .. } | WatchUpdate::Canceled(_)) {
                    endpoint.watches.remove(&token);
                }
                StoreDelivery::Watch { token, update }
            }
        };
        endpoint.arrived.push_back(delivery);
    }

    fn send(&mut self, now: Nanos, message: EtcdMessage) {
        let (direction, origin) = match &message {
            EtcdMessage::ToMember(origin, _) => (0, *origin),
            EtcdMessage::ToClient(origin, _) => (1, *origin),
        };
        let mut at = now + self.draw_delay();
        let endpoint = &mut self.endpoints[origin.connection];
        if endpoint.cut[direction] {
            endpoint.held[direction].push(message);
            return;
        }
        if matches!(message, EtcdMessage::ToClient(_, ToClient::Update(_))) {
            at = at.max(endpoint.last_update_at);
            endpoint.last_update_at = at;
        }
        self.schedule(at, message);
    }

    fn draw_delay(&mut self) -> Nanos {
        let spread = self.delay_max.since(self.delay_min).0;
        let mut delay = self.delay_min + Nanos(self.random.below(spread + 1));
        if self.occurs(self.faults.delay_one_in) {
            delay = delay + Nanos(self.random.below(self.faults.delay_max.0 + 1));
        }
        delay
    }

    fn occurs(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.random.one_in(one_in)
    }

    fn new_origin(&mut self, connection: usize, token: u64) -> Origin {
        self.sequence += 1;
        Origin { connection, token, sequence: self.sequence }
    }

    fn schedule(&mut self, at: Nanos, message: EtcdMessage) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), message);
    }
}
