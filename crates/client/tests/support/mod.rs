//! A node in memory: the target in front of a sorted map, and sockets that are queues.

#![allow(dead_code)] // Each test file uses its part.

pub mod block_node;

use octokv_base::{Buffer, BufferPool, Key, NamespaceId, Nanos, Prng, RecordLayout};
use octokv_client::{ClientConfig, Command, Error, Response, Session, StoreMode, Value};
use octokv_nvmf::{
    Connection, IoRequest, IteratorHandle, IteratorRequest, NamespaceInfo, NamespaceKind, RequestOperation,
    RequestOutcome, SubsystemConfig, Target,
};
use octokv_runtime::{DetachedSocket, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets};
use octokv_wire::iterator::{PairListWriter, buffer_bytes_for};
use octokv_wire::kv::KeyListWriter;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

pub const NQN: &str = "nqn.2026-11.io.octokv:node";
const RECORD_LAYOUT: RecordLayout = RecordLayout::new(48);

pub fn address() -> SocketAddr {
    "127.0.0.1:4420".parse().unwrap()
}

pub fn target(change: impl FnOnce(&mut SubsystemConfig)) -> Arc<Target> {
    let mut config = SubsystemConfig::new(NQN);
    change(&mut config);
    let namespace = NamespaceInfo {
        id: NamespaceId(1),
        nguid: [7; 16],
        size_bytes: 1 << 30,
        used_bytes: Default::default(),
        kind: NamespaceKind::KeyValue {
            value_bytes_max: config.value_bytes_max,
            key_bytes_max: config.key_bytes_max,
            record_layout: RECORD_LAYOUT,
            has_iterators: true,
        },
        ana_group: 1,
        tokens: None,
    };
    Target::new(config, vec![namespace])
}

/// An iterator: a copy of what it yields, in its direction.
struct MapIterator {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
    reverse: bool,
    next: Mutex<usize>,
}

/// An engine of one sorted map that completes at once.
#[derive(Default)]
pub struct MapStore {
    pub values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Maximum total length of values, in bytes.
    pub capacity_bytes: Option<usize>,
    /// Number of operations to fail as busy.
    pub busy_responses: u32,
    /// Number of seeks to fail as unreadable.
    pub failed_seeks: u32,
    pub executed_count: u64,
}

impl MapStore {
    pub fn execute(&mut self, operation: RequestOperation) -> RequestOutcome {
        self.executed_count += 1;
        if self.busy_responses > 0 {
            self.busy_responses -= 1;
            return RequestOutcome::Busy;
        }
        match operation {
            RequestOperation::Store { key, mode, record, value_bytes } => {
                let exists = self.values.contains_key(key.as_bytes());
                match mode {
                    StoreMode::AddOnly if exists => return RequestOutcome::AlreadyExists,
                    StoreMode::UpdateOnly if !exists => return RequestOutcome::NotFound,
                    _ => {}
                }
                let from = RECORD_LAYOUT.value_offset(key.len());
                let value = record[from..from + value_bytes as usize].to_vec();
                let used: usize = self.values.values().map(Vec::len).sum();
                if self.capacity_bytes.is_some_and(|max| used + value.len() > max) {
                    return RequestOutcome::CapacityExceeded;
                }
                self.values.insert(key.as_bytes().to_vec(), value);
                RequestOutcome::Stored
            }
            RequestOperation::Retrieve { key, .. } => match self.values.get(key.as_bytes()) {
                None => RequestOutcome::NotFound,
                Some(value) => {
                    let mut buffer = Buffer::zeroed(64 + value.len());
                    buffer[64..].copy_from_slice(value);
                    RequestOutcome::Value { buffer: buffer.into(), offset: 64, bytes: value.len() }
                }
            },
            RequestOperation::Delete { key } => match self.values.remove(key.as_bytes()) {
                Some(_) => RequestOutcome::Deleted,
                None => RequestOutcome::NotFound,
            },
            RequestOperation::Exist { key } => match self.values.get(key.as_bytes()) {
                Some(value) => RequestOutcome::Exists { value_bytes: value.len() as u32 },
                None => RequestOutcome::NotFound,
            },
            RequestOperation::List { start, limit_bytes, long_keys } => {
                let mut buffer = Buffer::zeroed(limit_bytes as usize);
                let mut list = KeyListWriter::new(&mut buffer).unwrap();
                for key in self.values.range(start.as_bytes().to_vec()..).map(|(key, _)| key) {
                    if (long_keys || key.len() <= 16) && !list.push(key) {
                        break;
                    }
                }
                let bytes = list.used_bytes();
                RequestOutcome::Listing { buffer, bytes }
            }
            RequestOperation::CreateIterator(request) => {
                let IteratorRequest { lower, upper, reverse, keys_only } = *request;
                let is_within =
                    |key: &[u8]| key >= lower.as_bytes() && (upper.is_empty() || key < upper.as_bytes());
                let within = self.values.iter().filter(|(key, _)| is_within(key));
                let value_of = |value: &Vec<u8>| if keys_only { Vec::new() } else { value.clone() };
                let mut pairs: Vec<_> = within.map(|(key, value)| (key.clone(), value_of(value))).collect();
                if reverse {
                    pairs.reverse();
                }
                let iterator = MapIterator { pairs, reverse, next: Mutex::new(0) };
                RequestOutcome::IteratorCreated(IteratorHandle(Arc::new(iterator)))
            }
            RequestOperation::SeekIterator { .. } if self.failed_seeks > 0 => {
                self.failed_seeks -= 1;
                RequestOutcome::Unrecovered
            }
            RequestOperation::SeekIterator { iterator, key } => {
                let iterator: &MapIterator = iterator.0.downcast_ref().unwrap();
                let key = key.as_bytes();
                let is_passed = |other: &[u8]| if iterator.reverse { other > key } else { other < key };
                *iterator.next.lock().unwrap() =
                    iterator.pairs.partition_point(|(other, _)| is_passed(other));
                RequestOutcome::Sought
            }
            RequestOperation::NextPairs { iterator, limit_bytes, pairs_max } => {
                let iterator: &MapIterator = iterator.0.downcast_ref().unwrap();
                let mut next = iterator.next.lock().unwrap();
                let mut buffer = Buffer::zeroed(limit_bytes as usize);
                let mut list = PairListWriter::new(&mut buffer, pairs_max).unwrap();
                for (key, value) in &iterator.pairs[*next..] {
                    if !list.has_space(key.len(), value.len()) {
                        break;
                    }
                    list.push(key, value);
                }
                let count = list.count();
                *next += count as usize;
                match iterator.pairs.get(*next) {
                    Some((key, value)) if count == 0 => RequestOutcome::PairTooLarge {
                        buffer_bytes: buffer_bytes_for(key.len(), value.len()) as u32,
                    },
                    rest => {
                        let is_end = rest.is_none();
                        let bytes = list.finish(is_end);
                        RequestOutcome::Pairs { buffer, bytes, count, is_end }
                    }
                }
            }
            RequestOperation::Flush => RequestOutcome::Flushed,
            other => unreachable!("not a Key Value operation: {other:?}"),
        }
    }
}

struct MemoryConnection {
    connection: Connection,
    to_target: Vec<u8>,
    to_client: VecDeque<u8>,
    is_dead: bool,
    held_requests: Vec<IoRequest>,
}

pub struct MemoryNetwork {
    pub target: Arc<Target>,
    pub store: MapStore,
    connections: Vec<MemoryConnection>,
    pool: BufferPool,
    pub now: Nanos,
    pub refuse: bool,
    /// Requests are held without a response.
    pub hold_requests: bool,
    /// Maximum bytes of one send or receive.
    pub transfer_bytes_max: usize,
    /// Sends would block.
    pub sends_blocked: bool,
    /// Corrupts each received byte with probability 1 / this.
    pub corrupt: Option<(Prng, u64)>,
    pub connect_count: u32,
    /// Bytes that the client has sent on all connections.
    pub sent_bytes: usize,
}

/// Sockets of the client. Clones share the network.
#[derive(Clone)]
pub struct MemorySockets(pub Rc<RefCell<MemoryNetwork>>);

impl MemorySockets {
    pub fn new(target: Arc<Target>) -> MemorySockets {
        MemorySockets(Rc::new(RefCell::new(MemoryNetwork {
            target,
            store: MapStore::default(),
            connections: Vec::new(),
            pool: BufferPool::new(64 << 20),
            now: Nanos::ZERO,
            refuse: false,
            hold_requests: false,
            transfer_bytes_max: usize::MAX,
            sends_blocked: false,
            corrupt: None,
            connect_count: 0,
            sent_bytes: 0,
        })))
    }

    /// Closes every connection.
    pub fn cut(&self) {
        self.0.borrow_mut().connections.iter_mut().for_each(|connection| connection.cut());
    }

    /// Closes one connection.
    pub fn cut_one(&self, connection: usize) {
        self.0.borrow_mut().connections[connection].cut();
    }

    /// Whether neither side has closed a connection.
    pub fn is_open(&self, connection: usize) -> bool {
        !self.0.borrow().connections[connection].is_dead
    }

    /// Bytes that the client receives on a connection as if the target had sent them.
    pub fn inject(&self, connection: usize, bytes: &[u8]) {
        self.0.borrow_mut().connections[connection].to_client.extend(bytes);
    }

    /// Executes the held requests of a connection.
    pub fn release(&self, connection: usize) {
        let network = &mut *self.0.borrow_mut();
        let MemoryConnection { connection, held_requests, .. } = &mut network.connections[connection];
        for request in held_requests.drain(..) {
            connection.complete(request.slot, network.store.execute(request.operation));
        }
    }

    /// Runs one iteration of the target.
    pub fn pump(&self) {
        let network = &mut *self.0.borrow_mut();
        let mut requests = Vec::new();
        for connection in network.connections.iter_mut().filter(|connection| !connection.is_dead) {
            loop {
                let consumed = connection.connection.receive(
                    network.now,
                    &connection.to_target,
                    &network.pool,
                    &mut requests,
                );
                connection.to_target.drain(..consumed.consumed_bytes);
                let progress = consumed.consumed_bytes > 0 || !requests.is_empty();
                if network.hold_requests {
                    connection.held_requests.append(&mut requests);
                }
                for request in requests.drain(..) {
                    let outcome = network.store.execute(request.operation);
                    connection.connection.complete(request.slot, outcome);
                }
                if !progress {
                    break;
                }
            }
            connection.connection.tick(network.now);
            let send_buffer = connection.connection.send_buffer();
            while !send_buffer.is_empty() {
                let mut slices = Vec::new();
                send_buffer.slices(&mut slices, usize::MAX);
                connection.to_client.extend(slices.iter().flat_map(|slice| slice.iter()));
                let count = slices.iter().map(|slice| slice.len()).sum();
                send_buffer.advance(count);
            }
        }
    }
}

impl MemoryConnection {
    fn cut(&mut self) {
        if !self.is_dead {
            self.is_dead = true;
            self.connection.peer_closed();
            for request in self.held_requests.drain(..) {
                self.connection.complete(request.slot, RequestOutcome::NotReady);
            }
        }
    }
}

impl Sockets for MemorySockets {
    fn listen(&mut self, _at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn accept(&mut self, _listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        None
    }
    fn connect(&mut self, _to: SocketAddr) -> io::Result<SocketId> {
        let network = &mut *self.0.borrow_mut();
        network.connect_count += 1;
        let peer = "127.0.0.1:50000".parse().unwrap();
        network.connections.push(MemoryConnection {
            connection: Connection::new(Arc::clone(&network.target), address(), peer, network.now),
            to_target: Vec::new(),
            to_client: VecDeque::new(),
            is_dead: network.refuse,
            held_requests: Vec::new(),
        });
        Ok(SocketId(network.connections.len() as u32 - 1))
    }
    fn detach(&mut self, _socket: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _socket: DetachedSocket) -> SocketId {
        unreachable!("no test detaches sockets")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let network = &mut *self.0.borrow_mut();
        let connection = &mut network.connections[socket.0 as usize];
        let count = into.len().min(connection.to_client.len()).min(network.transfer_bytes_max);
        if count == 0 {
            let closed = connection.is_dead || connection.connection.is_closed();
            return if closed { ReceiveStatus::Closed } else { ReceiveStatus::WouldBlock };
        }
        for (to, from) in into.iter_mut().zip(connection.to_client.drain(..count)) {
            *to = from;
            if let Some((random, one_in)) = &mut network.corrupt
                && random.one_in(*one_in)
            {
                *to = random.next_u64() as u8;
            }
        }
        ReceiveStatus::Bytes(count)
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let network = &mut *self.0.borrow_mut();
        let connection = &mut network.connections[socket.0 as usize];
        if connection.is_dead || network.sends_blocked {
            return if connection.is_dead { SendStatus::Closed } else { SendStatus::WouldBlock };
        }
        let mut left = network.transfer_bytes_max;
        let before = connection.to_target.len();
        for slice in slices {
            let part = &slice[..slice.len().min(left)];
            connection.to_target.extend_from_slice(part);
            left -= part.len();
        }
        let sent_bytes = connection.to_target.len() - before;
        network.sent_bytes += sent_bytes;
        SendStatus::Bytes(sent_bytes)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let count = self.0.borrow().connections.len() as u32;
        out.extend((0..count).map(SocketId));
    }
    /// The target gets what was sent before.
    fn close(&mut self, socket: SocketId) {
        self.pump();
        self.0.borrow_mut().connections[socket.0 as usize].cut();
    }
}

/// A session and an in-memory node, run together.
pub struct SessionFixture {
    pub sockets: MemorySockets,
    pub session: Session<MemorySockets>,
    pub completed: Vec<(u64, Result<Response, Error>)>,
}

impl SessionFixture {
    pub fn new(config: ClientConfig, target: Arc<Target>) -> SessionFixture {
        let memory = MemorySockets::new(target);
        let session = Session::new(memory.clone(), address(), config, Nanos::ZERO);
        SessionFixture { sockets: memory, session, completed: Vec::new() }
    }

    pub fn live(config: ClientConfig, target: Arc<Target>) -> SessionFixture {
        let mut fixture = SessionFixture::new(config, target);
        fixture.run_until(|fixture| fixture.session.is_live());
        fixture
    }

    /// One iteration of client and node after `span`.
    pub fn step(&mut self, span: Nanos) {
        let now = {
            let mut network = self.sockets.0.borrow_mut();
            network.now = network.now + span;
            network.now
        };
        let completed = &mut self.completed;
        self.session.poll(now, |token, result| completed.push((token, result)));
        self.sockets.pump();
    }

    pub fn run_until(&mut self, mut until: impl FnMut(&SessionFixture) -> bool) {
        for _ in 0..200_000 {
            if until(self) {
                return;
            }
            self.step(Nanos::from_micros(10));
        }
        panic!("no progress: {:?}, {:?}", self.session.ended(), self.session.last_error());
    }

    /// The response of one command.
    pub fn execute(&mut self, command: Command<'_>) -> Result<Response, Error> {
        if let Err(octokv_client::SubmitError::Invalid(error)) = self.session.submit(command, 77) {
            return Err(error);
        }
        self.run_until(|fixture| !fixture.completed.is_empty());
        let (token, result) = self.completed.remove(0);
        assert_eq!(token, 77);
        result
    }

    pub fn put(&mut self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<Response, Error> {
        self.execute(Command::Store { key: Key::new(key).unwrap(), value: Value::Slice(value), mode })
    }

    pub fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let key = Key::new(key).unwrap();
        match self.execute(Command::Retrieve { key, limit_bytes: u32::MAX }) {
            Ok(Response::Value { data, full_bytes }) => {
                assert_eq!(data.len(), full_bytes as usize);
                Some(data.to_vec())
            }
            Ok(Response::NotFound) => None,
            other => panic!("{other:?}"),
        }
    }
}

pub fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8).collect()
}
