//! One core of a node and one host on one thread, with wires of bytes between them and a device in memory: no kernel
//! and no clock, so that what the core itself does can be counted.
//!
//! ```text
//!   Session ──commands──▶ wire ──▶ reactor ─▶ target ─▶ engine ─▶ MemoryDevice        a batch is recorded once …
//!                 bytes ──▶ wire ──▶ the same, answers thrown away                    … and played again and again
//! ```
//! Time is a number that grows by 10 µs with each turn.

#![allow(dead_code, reason = "each of its users has a part of it")]

use octokv_base::{Buffer, Key, Lba, NamespaceId, Nanos, Pool};
use octokv_client::{Answer, Command, Reconnect, Session, Settings, StoreMode, Value};
use octokv_device::{Device, Geometry, Memory, MemoryDevice, Pending};
use octokv_engine::Durability;
use octokv_engine::hash::{self, FormatSettings, HashEngine, OpenSettings};
use octokv_node::fair_yield::Pace;
use octokv_node::kv_backend::Performer;
use octokv_node::monitor::Scheduling;
use octokv_node::namespace_table::{Store, Stores};
use octokv_node::{Costs, Parts, Turns, namespace_of, reactor};
use octokv_nvmf::{Target, TargetSettings};
use octokv_runtime::{
    Busy, Channel, Completed, DetachedSocket, DeviceQueue, Doorbell, FileId, Handle, ListenerId, Media,
    Operation, Received, Sent, SocketId, Sockets, Stage, mesh,
};
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const NQN: &str = "nqn.2026-11.io.octokv:node";
const BLOCK_BYTES: u32 = 4096;
const TURN: Nanos = Nanos::from_micros(10);
/// Turns within which everything that is asked ends.
const TURNS_MAX: usize = 10_000;

/// Bytes under way in one direction.
#[derive(Default)]
struct Lane {
    bytes: Vec<u8>,
    taken: usize,
}

impl Lane {
    fn put(&mut self, bytes: &[u8]) {
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.bytes.len() - self.taken);
        into[..count].copy_from_slice(&self.bytes[self.taken..self.taken + count]);
        self.taken += count;
        count
    }
}

/// One connection.
#[derive(Default)]
struct Wire {
    to_node: Lane,
    to_host: Lane,
    /// Nobody reads what the node says; so many bytes were said.
    unread: Option<u64>,
}

/// What costs a core time, which is virtual here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prices {
    /// Each receive, and each send.
    pub call: Nanos,
    /// Each block of the device that is read.
    pub block: Nanos,
}

/// A device in memory whose reads have a price.
struct Priced {
    memory: MemoryDevice,
    handle: Handle,
    prices: Prices,
}

impl Device for Priced {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn name(&self) -> &str {
        self.memory.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        let blocks = buffer.len() / BLOCK_BYTES as usize;
        self.handle.busy().charge(Stage::Kv, Nanos(self.prices.block.0 * blocks as u64));
        self.memory.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        self.memory.write(at, buffer)
    }
    fn flush(&self) -> Pending {
        self.memory.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        self.memory.trim(at, blocks)
    }
}

#[derive(Default)]
struct Wires {
    wires: Vec<Wire>,
    accepted: usize,
}

/// One side of all wires.
pub struct Ends {
    wires: Rc<RefCell<Wires>>,
    is_node: bool,
    /// Of the node's side: where its time is counted, and what a call costs.
    handle: Option<(Handle, Prices)>,
}

impl Ends {
    fn charge(&self) {
        if let Some((handle, prices)) = &self.handle {
            handle.busy().charge(Stage::Target, prices.call);
        }
    }
}

impl Sockets for Ends {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Ok((ListenerId(0), at))
    }
    fn accept(&mut self, _: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let mut wires = self.wires.borrow_mut();
        let index = wires.accepted;
        (index < wires.wires.len()).then(|| {
            wires.accepted += 1;
            (SocketId(index as u32), "127.0.0.1:50000".parse().expect("an address"))
        })
    }
    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        let mut wires = self.wires.borrow_mut();
        wires.wires.push(Wire::default());
        Ok(SocketId(wires.wires.len() as u32 - 1))
    }
    fn detach(&mut self, _: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _: DetachedSocket) -> SocketId {
        unreachable!("there is one core")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> Received {
        let wire = &mut self.wires.borrow_mut().wires[socket.0 as usize];
        let lane = if self.is_node { &mut wire.to_node } else { &mut wire.to_host };
        match lane.take(into) {
            0 => Received::Nothing,
            count => {
                self.charge();
                Received::Bytes(count)
            }
        }
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> Sent {
        let wire = &mut self.wires.borrow_mut().wires[socket.0 as usize];
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        self.charge();
        match &mut wire.unread {
            Some(unread) if self.is_node => *unread += bytes as u64,
            _ => {
                let lane = if self.is_node { &mut wire.to_host } else { &mut wire.to_node };
                slices.iter().for_each(|slice| lane.put(slice));
            }
        }
        Sent::Bytes(bytes)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let wires = self.wires.borrow();
        let count = if self.is_node { wires.accepted } else { wires.wires.len() };
        out.extend((0..count as u32).map(SocketId));
    }
    fn close(&mut self, _: SocketId) {}
}

/// A queue without devices: memory needs none.
struct NoQueue;

impl DeviceQueue for NoQueue {
    fn open(&mut self, _: &Media) -> io::Result<FileId> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn close(&mut self, _: FileId) {}
    fn submit(&mut self, _: u32, _: FileId, _: Operation) {
        unreachable!("nothing was opened")
    }
    fn poll(&mut self, _: &mut Vec<(u32, Completed)>) {}
    fn in_flight(&self) -> usize {
        0
    }
}

/// The core and its host.
pub struct Rig {
    wires: Rc<RefCell<Wires>>,
    core: Box<dyn Turns<Ends>>,
    session: Session<Ends>,
    /// The core's.
    handle: Handle,
    now: Nanos,
    scheduling: Arc<Scheduling>,
    /// The room that the host has for a value that it reads.
    pub read_bytes_max: u32,
}

impl Rig {
    /// A node of one core whose host is connected, with this many commands at a time.
    pub fn new(device_bytes: u64, depth: u16) -> Rig {
        Rig::with(device_bytes, depth, Prices::default())
    }

    /// The same where work takes time.
    pub fn with(device_bytes: u64, depth: u16, prices: Prices) -> Rig {
        let wires: Rc<RefCell<Wires>> = Rc::default();
        let handle =
            Handle::new(Doorbell::silent(), Channel::new(Box::new(NoQueue), 1), Busy::virtual_time());
        let ends = |handle: Option<(Handle, Prices)>| Ends {
            wires: Rc::clone(&wires),
            is_node: handle.is_some(),
            handle,
        };
        let scheduling = Scheduling::new(1, octokv_sched::Settings::default(), || Nanos::ZERO);
        let scheduling = Arc::new(scheduling.expect("defaults"));
        let of_node = ends(Some((handle.clone(), prices)));
        let core = core(device_bytes, of_node, handle.clone(), prices, Arc::clone(&scheduling));
        let settings = Settings { depth, reconnect: Reconnect::Never, ..Settings::default() };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let now = Nanos::from_secs(1);
        let session = Session::new(ends(None), address, settings, now);
        let mut rig = Rig { wires, core, session, handle, now, scheduling, read_bytes_max: 64 << 10 };
        for _ in 0..TURNS_MAX {
            if rig.session.is_live() {
                return rig;
            }
            rig.turn();
        }
        panic!("no connection: {:?}", rig.session.ended());
    }

    /// Has a policy choose, by a window in which nothing happens, and no other window end for a long while.
    pub fn choose(&mut self, policy: octokv_sched::Policy) {
        let set = |window| {
            let settings = octokv_sched::Settings { policy, window, ..octokv_sched::Settings::default() };
            self.scheduling.set(settings).expect("within its range");
        };
        set(Nanos::from_millis(10));
        let before = self.scheduling.windows();
        while self.scheduling.windows() < before + 2 {
            self.now = self.now + TURN;
            self.core.turn(self.now);
        }
        set(Nanos::from_secs(60));
        while self.scheduling.windows() < before + 3 {
            self.now = self.now + TURN;
            self.core.turn(self.now);
        }
    }

    /// One more host, connected, and which wire its commands go over. What the node says to it is thrown away.
    pub fn another(&mut self) -> usize {
        let settings = Settings { depth: 128, reconnect: Reconnect::Never, ..Settings::default() };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let ends = Ends { wires: Rc::clone(&self.wires), is_node: false, handle: None };
        let mut session = Session::new(ends, address, settings, self.now);
        for _ in 0..TURNS_MAX {
            self.now = self.now + TURN;
            session.poll(self.now, |_, _| ());
            self.core.turn(self.now);
            if session.is_live() {
                let mut wires = self.wires.borrow_mut();
                let index = wires.wires.len() - 1;
                wires.wires[index].unread = Some(0);
                return index;
            }
        }
        panic!("no connection: {:?}", session.ended());
    }

    /// Puts bytes on a wire's way to the node.
    pub fn say(&mut self, wire: usize, bytes: &[u8]) {
        self.wires.borrow_mut().wires[wire].to_node.put(bytes);
    }

    /// Bytes on a wire's way that the node has not taken, and those that it has said there.
    pub fn state(&self, wire: usize) -> (usize, u64) {
        let wire = &self.wires.borrow().wires[wire];
        (wire.to_node.bytes.len() - wire.to_node.taken, wire.unread.expect("of another host"))
    }

    /// Has the core take one turn, and gives how long it took.
    pub fn core_turn(&mut self) -> Nanos {
        self.handle.busy().take_charged();
        self.core.turn(self.now);
        self.now = self.now + TURN;
        self.handle.busy().take_charged()
    }

    fn turn(&mut self) -> (bool, usize) {
        self.now = self.now + TURN;
        let mut answers = 0;
        let said = self.session.poll(self.now, |_, answer| {
            assert!(matches!(answer, Ok(Answer::Stored | Answer::Value { .. })), "{answer:?}");
            answers += 1;
        });
        (said | self.core.turn(self.now), answers)
    }

    /// Has these keys stored or retrieved, and gives the bytes that asked for it: one batch.
    ///
    /// # Panics
    /// When there are more than fit at a time, or one fails.
    pub fn record(&mut self, keys: &[Key], store: Option<&[u8]>) -> Vec<u8> {
        for (token, key) in (0..).zip(keys) {
            let command = match store {
                Some(value) => {
                    Command::Store { key: key.clone(), value: Value::Slice(value), mode: StoreMode::Upsert }
                }
                None => Command::Retrieve { key: key.clone(), limit_bytes: self.read_bytes_max },
            };
            self.session.submit(command, token).expect("there is room for a batch");
        }
        let before = self.session.in_flight();
        self.session.poll(self.now, |_, _| ());
        assert_eq!(self.session.in_flight(), before);
        let wires = self.wires.borrow();
        let lane = &wires.wires.last().expect("an I/O queue").to_node;
        let bytes = lane.bytes[lane.taken..].to_vec();
        drop(wires);
        let mut answered = 0;
        for _ in 0..TURNS_MAX {
            answered += self.turn().1;
            if answered == keys.len() {
                return bytes;
            }
        }
        panic!("{answered} of {} were answered", keys.len());
    }

    /// Plays a batch again, `rounds` times, each after the last one was answered. Gives the bytes of the answers.
    ///
    /// # Panics
    /// When the core does not come to rest.
    pub fn play(&mut self, batch: &[u8], rounds: usize) -> u64 {
        self.wires.borrow_mut().wires.last_mut().expect("an I/O queue").unread = Some(0);
        for _ in 0..rounds {
            self.wires.borrow_mut().wires.last_mut().expect("an I/O queue").to_node.put(batch);
            let mut turns = 0;
            loop {
                self.now = self.now + TURN;
                let busy = self.core.turn(self.now);
                if !busy && self.core.requests() == 0 {
                    break;
                }
                turns += 1;
                assert!(turns < TURNS_MAX, "it does not come to rest");
            }
        }
        self.wires.borrow().wires.last().and_then(|wire| wire.unread).expect("set above")
    }
}

fn core(
    device_bytes: u64,
    sockets: Ends,
    handle: Handle,
    prices: Prices,
    scheduling: Arc<Scheduling>,
) -> Box<dyn Turns<Ends>> {
    let memory = MemoryDevice::new(Memory::new(device_bytes, BLOCK_BYTES).expect("memory"));
    let device: Rc<dyn Device> = Rc::new(Priced { memory, handle: handle.clone(), prices });
    let pool = Pool::new(64 << 20);
    let format = FormatSettings { seed: 7, ..FormatSettings::default() };
    let volume = at_once(async {
        hash::format(&*device, &format).await.expect("it fits");
        let settings = OpenSettings { durability: Durability::Flush, cores: 1 };
        hash::open(&device, &pool, settings, &format).await.expect("it was formatted")
    });
    let target = Target::new(TargetSettings::new(NQN), vec![namespace_of(&volume, 1024)]);
    let engine = HashEngine::new(volume, 0, device, pool.clone());
    let performer = Rc::new(Performer {
        engine,
        pool: pool.clone(),
        handle: handle.clone(),
        device: Rc::from("memory"),
        listings: Pace::default(),
    });
    let (keeper, own) = (Rc::clone(&performer), handle.clone());
    handle.spawn(async move { keeper.engine.maintain(&own, |_| ()).await });
    let stores = Rc::new(Stores::default());
    stores.insert(NamespaceId(1), Store::Keys(performer));
    let mailbox = mesh(&[Doorbell::silent()], 4).remove(0);
    let address = "127.0.0.1:4420".parse().expect("an address");
    Box::new(reactor(Parts {
        sockets,
        local_address: |_: &Ends, _| None,
        listeners: vec![(ListenerId(0), address)],
        mailbox,
        core: 0,
        handle,
        target,
        stores,
        pool,
        requests_max: 1024,
        scheduling,
        costs: Costs::default(),
    }))
}

/// The result of what never waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("memory does not wait"),
    }
}

/// Keys of 16 bytes.
pub fn keys(from: u64, count: usize) -> Vec<Key> {
    (from..).take(count).map(|index| Key::new(format!("{index:016}").as_bytes()).expect("16 bytes")).collect()
}
