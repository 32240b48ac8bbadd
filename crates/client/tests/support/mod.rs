//! A node in memory: the real target's machine in front of a sorted map, and sockets that are queues.

#![allow(dead_code)] // Each test file uses its part.

pub mod block_node;

use octokv_base::{Buffer, Key, NamespaceId, Nanos, Pool, Random, value_offset};
use octokv_client::{Answer, Command, Error, Session, Settings, StoreMode, Value};
use octokv_nvmf::{
    Connection, NamespaceInfo, NamespaceKind, Operation, Outcome, Request, Target, TargetSettings,
};
use octokv_runtime::{DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
use octokv_wire::kv::ListWriter;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

pub const NQN: &str = "nqn.2026-11.io.octokv:node";

pub fn address() -> SocketAddr {
    "127.0.0.1:4420".parse().unwrap()
}

pub fn target(change: impl FnOnce(&mut TargetSettings)) -> Arc<Target> {
    let mut settings = TargetSettings::new(NQN);
    change(&mut settings);
    let namespace = NamespaceInfo {
        id: NamespaceId(1),
        nguid: [7; 16],
        size_bytes: 1 << 30,
        used_bytes: Default::default(),
        kind: NamespaceKind::KeyValue {
            value_bytes_max: settings.value_bytes_max,
            key_bytes_max: settings.key_bytes_max,
        },
        ana_group: 1,
    };
    Target::new(settings, vec![namespace])
}

/// What an engine would do, at once.
#[derive(Default)]
pub struct Store {
    pub values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Above so many bytes of values there is no room.
    pub room_bytes: Option<usize>,
    /// Answer "busy" so many times.
    pub busy: u32,
    pub executed: u64,
}

impl Store {
    pub fn execute(&mut self, operation: Operation) -> Outcome {
        self.executed += 1;
        if self.busy > 0 {
            self.busy -= 1;
            return Outcome::Busy;
        }
        match operation {
            Operation::Store { key, mode, record, value_bytes } => {
                let there = self.values.contains_key(key.as_bytes());
                match mode {
                    StoreMode::AddOnly if there => return Outcome::AlreadyExists,
                    StoreMode::UpdateOnly if !there => return Outcome::NotFound,
                    _ => {}
                }
                let from = value_offset(key.len());
                let value = record[from..from + value_bytes as usize].to_vec();
                let used: usize = self.values.values().map(Vec::len).sum();
                if self.room_bytes.is_some_and(|room| used + value.len() > room) {
                    return Outcome::CapacityExceeded;
                }
                self.values.insert(key.as_bytes().to_vec(), value);
                Outcome::Stored
            }
            Operation::Retrieve { key, .. } => match self.values.get(key.as_bytes()) {
                None => Outcome::NotFound,
                Some(value) => {
                    let mut buffer = Buffer::zeroed(64 + value.len());
                    buffer[64..].copy_from_slice(value);
                    Outcome::Value { buffer, offset: 64, bytes: value.len() }
                }
            },
            Operation::Delete { key } => match self.values.remove(key.as_bytes()) {
                Some(_) => Outcome::Deleted,
                None => Outcome::NotFound,
            },
            Operation::Exist { key } => match self.values.get(key.as_bytes()) {
                Some(value) => Outcome::Exists { value_bytes: value.len() as u32 },
                None => Outcome::NotFound,
            },
            Operation::List { start, limit_bytes, long_keys } => {
                let mut buffer = Buffer::zeroed(limit_bytes as usize);
                let mut list = ListWriter::new(&mut buffer).unwrap();
                for key in self.values.range(start.as_bytes().to_vec()..).map(|(key, _)| key) {
                    if (long_keys || key.len() <= 16) && !list.push(key) {
                        break;
                    }
                }
                let bytes = list.bytes();
                Outcome::Listing { buffer, bytes }
            }
            Operation::Flush => Outcome::Flushed,
            other => unreachable!("no namespace of blocks here: {other:?}"),
        }
    }
}

struct Wire {
    connection: Connection,
    to_target: Vec<u8>,
    to_client: VecDeque<u8>,
    dead: bool,
    held: Vec<Request>,
}

pub struct Net {
    pub target: Arc<Target>,
    pub store: Store,
    wires: Vec<Wire>,
    pool: Pool,
    pub now: Nanos,
    pub refuse: bool,
    /// Requests get no answer.
    pub hold: bool,
    /// At most so many bytes per send and receive.
    pub chunk: usize,
    /// Sends take nothing.
    pub jammed: bool,
    /// Spoils one byte in so many of those that come from the target.
    pub spoil: Option<(Random, u64)>,
    pub connects: u32,
}

/// The client's sockets. Clones are the same.
#[derive(Clone)]
pub struct Memory(pub Rc<RefCell<Net>>);

impl Memory {
    pub fn new(target: Arc<Target>) -> Memory {
        Memory(Rc::new(RefCell::new(Net {
            target,
            store: Store::default(),
            wires: Vec::new(),
            pool: Pool::new(64 << 20),
            now: Nanos::ZERO,
            refuse: false,
            hold: false,
            chunk: usize::MAX,
            jammed: false,
            spoil: None,
            connects: 0,
        })))
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.0.borrow_mut().wires.iter_mut().for_each(|wire| wire.cut());
    }

    /// Lets the target work.
    pub fn pump(&self) {
        let net = &mut *self.0.borrow_mut();
        let mut requests = Vec::new();
        for wire in net.wires.iter_mut().filter(|wire| !wire.dead) {
            loop {
                let consumed = wire.connection.receive(net.now, &wire.to_target, &net.pool, &mut requests);
                wire.to_target.drain(..consumed.bytes);
                let progress = consumed.bytes > 0 || !requests.is_empty();
                if net.hold {
                    wire.held.append(&mut requests);
                }
                for request in requests.drain(..) {
                    let outcome = net.store.execute(request.operation);
                    wire.connection.complete(net.now, request.slot, outcome);
                }
                if !progress {
                    break;
                }
            }
            wire.connection.tick(net.now);
            let outbox = wire.connection.outbox();
            while !outbox.is_empty() {
                let mut slices = Vec::new();
                outbox.slices(&mut slices, usize::MAX);
                wire.to_client.extend(slices.iter().flat_map(|slice| slice.iter()));
                let count = slices.iter().map(|slice| slice.len()).sum();
                outbox.advance(count);
            }
        }
    }
}

impl Wire {
    fn cut(&mut self) {
        if !self.dead {
            self.dead = true;
            self.connection.peer_closed();
            for request in self.held.drain(..) {
                self.connection.complete(Nanos::ZERO, request.slot, Outcome::NotReady);
            }
        }
    }
}

impl Sockets for Memory {
    fn listen(&mut self, _at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn accept(&mut self, _listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        None
    }
    fn connect(&mut self, _to: SocketAddr) -> io::Result<SocketId> {
        let net = &mut *self.0.borrow_mut();
        net.connects += 1;
        let peer = "127.0.0.1:50000".parse().unwrap();
        net.wires.push(Wire {
            connection: Connection::new(Arc::clone(&net.target), address(), peer, net.now),
            to_target: Vec::new(),
            to_client: VecDeque::new(),
            dead: net.refuse,
            held: Vec::new(),
        });
        Ok(SocketId(net.wires.len() as u32 - 1))
    }
    fn detach(&mut self, _socket: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _socket: DetachedSocket) -> SocketId {
        unreachable!("no test hands sockets over")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> Received {
        let net = &mut *self.0.borrow_mut();
        let wire = &mut net.wires[socket.0 as usize];
        let count = into.len().min(wire.to_client.len()).min(net.chunk);
        if count == 0 {
            let over = wire.dead || wire.connection.is_closed();
            return if over { Received::Closed } else { Received::Nothing };
        }
        for (to, from) in into.iter_mut().zip(wire.to_client.drain(..count)) {
            *to = from;
            if let Some((random, one_in)) = &mut net.spoil
                && random.one_in(*one_in)
            {
                *to = random.next_u64() as u8;
            }
        }
        Received::Bytes(count)
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> Sent {
        let net = &mut *self.0.borrow_mut();
        let wire = &mut net.wires[socket.0 as usize];
        if wire.dead || net.jammed {
            return if wire.dead { Sent::Broken } else { Sent::Full };
        }
        let mut room = net.chunk;
        let before = wire.to_target.len();
        for slice in slices {
            let part = &slice[..slice.len().min(room)];
            wire.to_target.extend_from_slice(part);
            room -= part.len();
        }
        Sent::Bytes(wire.to_target.len() - before)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let count = self.0.borrow().wires.len() as u32;
        out.extend((0..count).map(SocketId));
    }
    fn close(&mut self, socket: SocketId) {
        self.0.borrow_mut().wires[socket.0 as usize].cut();
    }
}

/// A session on a node in memory, driven together.
pub struct World {
    pub memory: Memory,
    pub session: Session<Memory>,
    pub done: Vec<(u64, Result<Answer, Error>)>,
}

impl World {
    pub fn new(settings: Settings, target: Arc<Target>) -> World {
        let memory = Memory::new(target);
        let session = Session::new(memory.clone(), address(), settings, Nanos::ZERO);
        World { memory, session, done: Vec::new() }
    }

    pub fn live(settings: Settings, target: Arc<Target>) -> World {
        let mut world = World::new(settings, target);
        world.run_until(|world| world.session.is_live());
        world
    }

    /// One turn of client and node, and `span` passes.
    pub fn turn(&mut self, span: Nanos) {
        let now = {
            let mut net = self.memory.0.borrow_mut();
            net.now = net.now + span;
            net.now
        };
        let done = &mut self.done;
        self.session.poll(now, |token, result| done.push((token, result)));
        self.memory.pump();
    }

    pub fn run_until(&mut self, mut until: impl FnMut(&World) -> bool) {
        for _ in 0..200_000 {
            if until(self) {
                return;
            }
            self.turn(Nanos::from_micros(10));
        }
        panic!("it does not come: {:?}, {:?}", self.session.ended(), self.session.last_loss());
    }

    /// The answer to one command.
    pub fn ask(&mut self, command: Command<'_>) -> Result<Answer, Error> {
        if let Err(octokv_client::Rejected::Invalid(error)) = self.session.submit(command, 77) {
            return Err(error);
        }
        self.run_until(|world| !world.done.is_empty());
        let (token, result) = self.done.remove(0);
        assert_eq!(token, 77);
        result
    }

    pub fn put(&mut self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<Answer, Error> {
        self.ask(Command::Store { key: Key::new(key).unwrap(), value: Value::Slice(value), mode })
    }

    pub fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let key = Key::new(key).unwrap();
        match self.ask(Command::Retrieve { key, limit_bytes: u32::MAX }) {
            Ok(Answer::Value { data, full_bytes }) => {
                assert_eq!(data.len(), full_bytes as usize);
                Some(data.to_vec())
            }
            Ok(Answer::NotFound) => None,
            other => panic!("{other:?}"),
        }
    }
}

pub fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8).collect()
}
