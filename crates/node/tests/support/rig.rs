//! One core of a node and one host on one thread, connected by in-memory byte streams, with a memory device: no
//! kernel and no clock, so that the core's own work can be measured.
//!
//! ```text
//!   Session ──commands──▶ stream ──▶ reactor ─▶ target ─▶ engine ─▶ MemoryDevice    a batch is recorded once …
//!                 bytes ──▶ stream ──▶ the same, responses discarded                  … and replayed many times
//! ```
//! Time is a counter that grows by 10 µs with each iteration.

#![allow(dead_code, reason = "each of its users has a part of it")]

#[path = "rig_device.rs"]
mod rig_device;

use octokv_base::{BufferPool, Key, Lba, NamespaceId, Nanos};
use octokv_client::{ClientConfig, Command, Reconnect, Response, Session, StoreMode, Value};
use octokv_device::{Device, Geometry, RamDisk};
use octokv_engine::{AnyVolume, Durability, FormatConfig, OpenConfig, Volume};
use octokv_node::block_backend::BlockVolume;
use octokv_node::monitor::Monitor;
use octokv_node::{
    ControlQueue, CoreNamespace, CoreParts, NamespaceVolume, NodeCore, OpenDevice, SimulatedCosts,
    namespace_info,
};
use octokv_nvmf::{LbaRange, NamespaceInfo, NamespaceKind, SubsystemConfig, Target};
use octokv_runtime::{
    CoreWaker, CpuTime, DetachedSocket, DeviceHandle, ListenerId, ReactorHandle, ReceiveStatus, SendStatus,
    SocketId, Sockets, Stage, block_on, mesh,
};
pub use rig_device::TestCosts;
use rig_device::{DeferredQueue, RigDevice};
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const NQN: &str = "nqn.2026-11.io.octokv:node";
/// The namespace of blocks, beside namespace 1 of keys and values.
pub const BLOCK_NAMESPACE: NamespaceId = NamespaceId(2);
const BLOCK_NAMESPACE_BLOCK_BYTES: u32 = 512;
const BLOCK_NAMESPACE_BYTES: u64 = 8 << 20;
const DEVICE_DEPTH: usize = 128;
const ITERATION: Nanos = Nanos::from_micros(10);
/// Iterations within which every request must end.
const ITERATIONS_MAX: usize = 10_000;

/// Bytes in transit in one direction.
#[derive(Default)]
struct ByteStream {
    bytes: Vec<u8>,
    taken: usize,
}

impl ByteStream {
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
struct TestConnection {
    to_node: ByteStream,
    to_host: ByteStream,
    /// If set, responses are discarded and their bytes counted here.
    discarded_bytes: Option<u64>,
}

/// What a rig is made of.
#[derive(Clone, Copy, Debug)]
pub struct RigConfig {
    /// Size of the Key Value namespace's device, in bytes.
    pub device_bytes: u64,
    /// Its block size, in bytes.
    pub block_bytes: u32,
    /// Whether it answers at once, as memory does, or at the core's next poll of its devices, as a file does: volatile and
    /// with a journal.
    pub is_deferred: bool,
    /// The namespace of the host's session.
    pub namespace: NamespaceId,
    /// Commands in flight of the host.
    pub depth: u16,
    /// Simulated costs of the core's work.
    pub costs: TestCosts,
}

impl RigConfig {
    /// A memory device with blocks of 4,096 bytes, and no costs.
    pub fn new(device_bytes: u64, depth: u16) -> RigConfig {
        RigConfig {
            device_bytes,
            block_bytes: 4096,
            is_deferred: false,
            namespace: NamespaceId(1),
            depth,
            costs: TestCosts::default(),
        }
    }
}

#[derive(Default)]
struct TestNetwork {
    connections: Vec<TestConnection>,
    accepted: usize,
}

/// One side of all connections.
pub struct TestSockets {
    network: Rc<RefCell<TestNetwork>>,
    is_node: bool,
    /// On the node's side: the core's clock, and the costs.
    accounting: Option<(ReactorHandle, TestCosts)>,
}

impl TestSockets {
    fn charge_call(&self) {
        if let Some((handle, costs)) = &self.accounting {
            handle.cpu_time().advance_simulated(Stage::Target, costs.call);
        }
    }
}

impl Sockets for TestSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Ok((ListenerId(0), at))
    }
    fn accept(&mut self, _: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let mut network = self.network.borrow_mut();
        let index = network.accepted;
        (index < network.connections.len()).then(|| {
            network.accepted += 1;
            (SocketId(index as u32), "127.0.0.1:50000".parse().expect("an address"))
        })
    }
    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        let mut network = self.network.borrow_mut();
        network.connections.push(TestConnection::default());
        Ok(SocketId(network.connections.len() as u32 - 1))
    }
    fn detach(&mut self, _: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _: DetachedSocket) -> SocketId {
        unreachable!("there is one core")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let connection = &mut self.network.borrow_mut().connections[socket.0 as usize];
        let stream = if self.is_node { &mut connection.to_node } else { &mut connection.to_host };
        match stream.take(into) {
            0 => ReceiveStatus::WouldBlock,
            count => {
                self.charge_call();
                ReceiveStatus::Bytes(count)
            }
        }
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let connection = &mut self.network.borrow_mut().connections[socket.0 as usize];
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        self.charge_call();
        match &mut connection.discarded_bytes {
            Some(unread) if self.is_node => *unread += bytes as u64,
            _ => {
                let stream = if self.is_node { &mut connection.to_host } else { &mut connection.to_node };
                slices.iter().for_each(|slice| stream.put(slice));
            }
        }
        SendStatus::Bytes(bytes)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let network = self.network.borrow();
        let count = if self.is_node { network.accepted } else { network.connections.len() };
        out.extend((0..count as u32).map(SocketId));
    }
    fn close(&mut self, _: SocketId) {}
}

/// One core and its host.
pub struct ReactorRig {
    network: Rc<RefCell<TestNetwork>>,
    core: NodeCore<TestSockets, RigDevice>,
    session: Session<TestSockets>,
    /// The core's handle.
    handle: ReactorHandle,
    now: Nanos,
    monitor: Arc<Monitor>,
    /// Buffer size that the host offers for a Retrieve, in bytes.
    pub read_bytes_max: u32,
}

impl ReactorRig {
    /// A node of one core and a connected host with `depth` commands in flight, in memory.
    pub fn new(device_bytes: u64, depth: u16) -> ReactorRig {
        ReactorRig::with_config(RigConfig::new(device_bytes, depth))
    }

    /// The same, with simulated costs.
    pub fn with_costs(device_bytes: u64, depth: u16, costs: TestCosts) -> ReactorRig {
        ReactorRig::with_config(RigConfig { costs, ..RigConfig::new(device_bytes, depth) })
    }

    /// A node of one core and a connected host.
    pub fn with_config(rig_config: RigConfig) -> ReactorRig {
        let RigConfig { device_bytes, is_deferred, namespace, depth, costs, .. } = rig_config;
        let network: Rc<RefCell<TestNetwork>> = Rc::default();
        let queue = DeferredQueue::new(if is_deferred { device_bytes as usize } else { 0 });
        let devices = DeviceHandle::new(Box::new(queue), DEVICE_DEPTH);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let sockets = |handle: Option<(ReactorHandle, TestCosts)>| TestSockets {
            network: Rc::clone(&network),
            is_node: handle.is_some(),
            accounting: handle,
        };
        let monitor = Monitor::new(1, octokv_sched::SchedConfig::default(), || Nanos::ZERO);
        let monitor = Arc::new(monitor.expect("the defaults are valid"));
        let node_sockets = sockets(Some((handle.clone(), costs)));
        let core = build_core(rig_config, node_sockets, handle.clone(), Arc::clone(&monitor));
        let config = ClientConfig {
            namespace,
            queue_depth: depth,
            reconnect: Reconnect::Never,
            ..ClientConfig::default()
        };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let now = Nanos::from_secs(1);
        let session = Session::new(sockets(None), address, config, now);
        let mut rig = ReactorRig { network, core, session, handle, now, monitor, read_bytes_max: 64 << 10 };
        for _ in 0..ITERATIONS_MAX {
            if rig.session.is_live() {
                return rig;
            }
            rig.run_iteration();
        }
        panic!("no connection: {:?}", rig.session.ended());
    }

    /// Lets `policy` take effect: one idle interval ends, and the next one is long.
    pub fn apply_policy(&mut self, policy: octokv_sched::Policy) {
        let set = |interval| {
            let config =
                octokv_sched::SchedConfig { policy, interval, ..octokv_sched::SchedConfig::default() };
            self.monitor.set_config(config).expect("within its range");
        };
        set(Nanos::from_millis(10));
        let intervals_before = self.monitor.interval_count();
        while self.monitor.interval_count() < intervals_before + 2 {
            self.now = self.now + ITERATION;
            self.core.run_iteration(self.now);
        }
        set(Nanos::from_secs(60));
        while self.monitor.interval_count() < intervals_before + 3 {
            self.now = self.now + ITERATION;
            self.core.run_iteration(self.now);
        }
    }

    /// Lets `time` pass without requests.
    pub fn pass_time(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + ITERATION;
            self.core.run_iteration(self.now);
        }
    }

    /// Connects one more host and returns the index of its connection. The node's responses to it are discarded.
    pub fn add_host(&mut self) -> usize {
        let config =
            ClientConfig { queue_depth: 128, reconnect: Reconnect::Never, ..ClientConfig::default() };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let ends = TestSockets { network: Rc::clone(&self.network), is_node: false, accounting: None };
        let mut session = Session::new(ends, address, config, self.now);
        for _ in 0..ITERATIONS_MAX {
            self.now = self.now + ITERATION;
            session.poll(self.now, |_, _| ());
            self.core.run_iteration(self.now);
            if session.is_live() {
                let mut network = self.network.borrow_mut();
                let index = network.connections.len() - 1;
                network.connections[index].discarded_bytes = Some(0);
                return index;
            }
        }
        panic!("no connection: {:?}", session.ended());
    }

    /// Queues bytes to the node on connection `index`.
    pub fn send_bytes(&mut self, connection: usize, bytes: &[u8]) {
        self.network.borrow_mut().connections[connection].to_node.put(bytes);
    }

    /// Bytes to the node not yet received, and bytes of responses discarded so far.
    pub fn pending_and_received_bytes(&self, connection: usize) -> (usize, u64) {
        let connection = &self.network.borrow().connections[connection];
        (
            connection.to_node.bytes.len() - connection.to_node.taken,
            connection.discarded_bytes.expect("only for a host of add_host"),
        )
    }

    /// Runs one iteration of the core and returns its simulated duration.
    pub fn run_core_iteration(&mut self) -> Nanos {
        self.handle.cpu_time().take_simulated();
        self.core.run_iteration(self.now);
        self.now = self.now + ITERATION;
        self.handle.cpu_time().take_simulated()
    }

    /// Runs the core until an iteration finds nothing to do, after which it would sleep.
    ///
    /// # Panics
    /// The core does not become idle.
    pub fn run_until_idle(&mut self) {
        let mut iterations = 0..ITERATIONS_MAX;
        while self.core.run_iteration(self.now) {
            self.now = self.now + ITERATION;
            iterations.next().expect("the core becomes idle");
        }
    }

    fn run_iteration(&mut self) -> (bool, usize) {
        self.now = self.now + ITERATION;
        let mut responses = 0;
        let session_worked = self.session.poll(self.now, |_, response| {
            assert!(
                matches!(response, Ok(Response::Stored | Response::Value { .. } | Response::Blocks { .. })),
                "{response:?}"
            );
            responses += 1;
        });
        (session_worked | self.core.run_iteration(self.now), responses)
    }

    /// Stores or retrieves these keys and returns the bytes of the commands: one batch.
    ///
    /// # Panics
    /// More keys than the queue depth, or a command that fails.
    pub fn record_batch(&mut self, keys: &[Key], store: Option<&[u8]>) -> Vec<u8> {
        let limit_bytes = self.read_bytes_max;
        self.record_commands(keys.iter().map(|key| match store {
            Some(value) => {
                Command::Store { key: key.clone(), value: Value::Slice(value), mode: StoreMode::Upsert }
            }
            None => Command::Retrieve { key: key.clone(), limit_bytes },
        }))
    }

    /// Reads `count` runs of `bytes` bytes of the block namespace, one after the other, and returns the bytes of the commands.
    ///
    /// # Panics
    /// More commands than the queue depth, or one that fails.
    pub fn record_reads(&mut self, count: usize, bytes: usize) -> Vec<u8> {
        let blocks = bytes as u32 / BLOCK_NAMESPACE_BLOCK_BYTES;
        let range = |at: usize| LbaRange { lba: Lba(at as u64 * u64::from(blocks)), blocks };
        self.record_commands((0..count).map(|at| Command::Read { range: range(at), buffer: None }))
    }

    fn record_commands<'a>(&mut self, commands: impl Iterator<Item = Command<'a>>) -> Vec<u8> {
        let mut submitted = 0;
        for (token, command) in (0..).zip(commands) {
            self.session.submit(command, token).expect("the batch fits the queue depth");
            submitted += 1;
        }
        let before = self.session.in_flight();
        self.session.poll(self.now, |_, _| ());
        assert_eq!(self.session.in_flight(), before);
        let network = self.network.borrow();
        let stream = &network.connections.last().expect("an I/O queue").to_node;
        let bytes = stream.bytes[stream.taken..].to_vec();
        drop(network);
        let mut completed = 0;
        for _ in 0..ITERATIONS_MAX {
            completed += self.run_iteration().1;
            if completed == submitted {
                return bytes;
            }
        }
        panic!("{completed} of {submitted} completed");
    }

    /// Replays a batch `rounds` times, each after the last one completed. Returns the response bytes.
    ///
    /// # Panics
    /// The core does not become idle.
    pub fn replay(&mut self, batch: &[u8], rounds: usize) -> u64 {
        self.network.borrow_mut().connections.last_mut().expect("an I/O queue").discarded_bytes = Some(0);
        for _ in 0..rounds {
            self.network.borrow_mut().connections.last_mut().expect("an I/O queue").to_node.put(batch);
            let mut iterations = 0;
            loop {
                self.now = self.now + ITERATION;
                let busy = self.core.run_iteration(self.now);
                if !busy && self.core.requests() == 0 {
                    break;
                }
                iterations += 1;
                assert!(iterations < ITERATIONS_MAX, "the core does not become idle");
            }
        }
        self.network
            .borrow()
            .connections
            .last()
            .and_then(|connection| connection.discarded_bytes)
            .expect("set above")
    }
}

async fn open_volume(device: Rc<dyn Device>) -> AnyVolume {
    let (devices, pool) = ([device], BufferPool::new(64 << 20));
    let format = FormatConfig { seed: 7, ..FormatConfig::default() };
    AnyVolume::format(&devices, &format).await.expect("it fits");
    let config = OpenConfig { durability: Durability::PowerSafe, cores: 1, cache_bytes: 0 };
    AnyVolume::open(&devices, &pool, config, &format).await.expect("it was formatted")
}

fn build_core(
    rig_config: RigConfig,
    sockets: TestSockets,
    handle: ReactorHandle,
    monitor: Arc<Monitor>,
) -> NodeCore<TestSockets, RigDevice> {
    let RigConfig { device_bytes, block_bytes, is_deferred, costs, .. } = rig_config;
    let kv_device = match is_deferred {
        true => RigDevice::Deferred(Geometry {
            block_bytes,
            blocks: device_bytes / u64::from(block_bytes),
            volatile: false,
        }),
        false => RigDevice::Memory { disk: RamDisk::new(device_bytes, block_bytes).expect("memory"), costs },
    };
    let volume = block_on(open_volume(kv_device.open_for_core(&handle).expect("it opens")), || {
        handle.devices().poll();
    });
    let block_volume = BlockVolume::new(BLOCK_NAMESPACE_BLOCK_BYTES, BLOCK_NAMESPACE_BYTES);
    let block_device = RigDevice::Memory {
        disk: RamDisk::new(BLOCK_NAMESPACE_BYTES, BLOCK_NAMESPACE_BLOCK_BYTES).expect("memory"),
        costs,
    };
    let block_info = NamespaceInfo {
        id: BLOCK_NAMESPACE,
        nguid: [2; 16],
        size_bytes: block_volume.size_bytes(),
        used_bytes: Arc::new(AtomicU64::new(block_volume.size_bytes())),
        kind: NamespaceKind::Block { block_bytes: BLOCK_NAMESPACE_BLOCK_BYTES },
        ana_group: 1,
    };
    let target = Target::new(SubsystemConfig::new(NQN), vec![namespace_info(&volume, 1024), block_info]);
    let core_waker = Arc::clone(handle.core_waker());
    let parts = CoreParts {
        index: 0,
        sockets,
        listen: &["127.0.0.1:4420".parse().expect("an address")],
        mailbox: mesh(&[CoreWaker::without_eventfd()], 4).remove(0),
        control_queue: ControlQueue::new(&core_waker),
        handle,
        target,
        monitor,
        buffer_bytes: 64 << 20,
        requests_max: 1024,
        costs: SimulatedCosts::default(),
    };
    let namespaces = [
        CoreNamespace { id: NamespaceId(1), volume: NamespaceVolume::Kv(volume), device: kv_device },
        CoreNamespace {
            id: BLOCK_NAMESPACE,
            volume: NamespaceVolume::Block(block_volume),
            device: block_device,
        },
    ];
    NodeCore::new(parts, namespaces).expect("a core in memory")
}

/// `count` keys of 16 bytes.
pub fn keys(from: u64, count: usize) -> Vec<Key> {
    (from..).take(count).map(|index| Key::new(format!("{index:016}").as_bytes()).expect("16 bytes")).collect()
}
