//! One core of a node and one host on one thread, connected by in-memory byte streams, with a memory device: no
//! kernel and no clock, so that the core's own work can be measured.
//!
//! ```text
//!   Session ──commands──▶ stream ──▶ reactor ─▶ target ─▶ engine ─▶ MemoryDevice    a batch is recorded once …
//!                 bytes ──▶ stream ──▶ the same, responses discarded                  … and replayed many times
//! ```
//! Time is a counter that grows by 10 µs with each iteration, unless the configuration asks for the clock.
//!
//! A [`RigNode`] may have several cores, each a [`ReactorRig`] on a thread of its own. They share what the cores of a node
//! share in production; each has its own host. Hosts connect one after the other, so that the node's rotation gives the I/O
//! queue of each to the core on its thread.

#![allow(dead_code, reason = "each of its users has a part of it")]

#[path = "rig_device.rs"]
mod rig_device;
#[path = "rig_sockets.rs"]
mod rig_sockets;

use octokv_base::{BufferPool, Key, Lba, NamespaceId, Nanos, SharedSum};
use octokv_client::{ClientConfig, Command, Reconnect, Response, Session, StoreMode, Value};
use octokv_device::{Device, Geometry, RamDisk};
use octokv_engine::{AnyVolume, Durability, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_node::block_backend::BlockVolume;
use octokv_node::monitor::Monitor;
use octokv_node::{
    ControlQueue, CoreMessage, CoreNamespace, CoreParts, CoreRoles, NamespaceVolume, NodeCore, OpenDevice,
    SimulatedCosts, namespace_info,
};
use octokv_nvmf::{LbaRange, NamespaceInfo, NamespaceKind, SubsystemConfig, Target};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, Mailbox, ReactorHandle, block_on, mesh};
use octokv_sys::clock;
use parking_lot::Mutex;
pub use rig_device::TestCosts;
use rig_device::{DeferredQueue, RigDevice};
use rig_sockets::{SharedConnection, TestNetwork, TestSockets};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const NQN: &str = "nqn.2026-11.io.octokv:node";
/// The namespace of blocks, beside namespace 1 of keys and values.
pub const BLOCK_NAMESPACE: NamespaceId = NamespaceId(2);
const BLOCK_NAMESPACE_BLOCK_BYTES: u32 = 512;
const BLOCK_NAMESPACE_BYTES: u64 = 8 << 20;
const DEVICE_DEPTH: usize = 128;
/// Messages from one core to another.
const MAILBOX_CAPACITY: usize = 4;
const ITERATION: Nanos = Nanos::from_micros(10);
/// Iterations within which every request must end.
const ITERATIONS_MAX: usize = 10_000;
/// Iterations of a core within which others on their threads do their part: seconds.
const WAITING_ITERATIONS_MAX: usize = 10_000_000;
/// A host of a rig sends no Keep Alive while its commands are replayed.
const KEEP_ALIVE: Nanos = Nanos::from_secs(3_600);
/// A command's PDU header and SQE, before the data in its capsule.
const COMMAND_HEAD_BYTES: usize = 72;

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
    /// Whether cores have the clock and measure their time, as in production.
    pub has_clock: bool,
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
            has_clock: false,
        }
    }

    /// The handle of a core.
    fn new_handle(&self, core_waker: &Arc<CoreWaker>) -> ReactorHandle {
        let queue = DeferredQueue::new(if self.is_deferred { self.device_bytes as usize } else { 0 });
        let devices = DeviceHandle::new(Box::new(queue), DEVICE_DEPTH);
        let cpu_time = if self.has_clock { CpuTime::measured() } else { CpuTime::simulated() };
        ReactorHandle::new(Arc::clone(core_waker), devices, cpu_time)
    }

    /// The time after an iteration that began at `before`.
    fn next_time(&self, before: Nanos) -> Nanos {
        if self.has_clock { clock::now() } else { before + ITERATION }
    }
}

/// What the cores of a node share.
pub struct RigNode {
    config: RigConfig,
    network: Arc<TestNetwork>,
    core_wakers: Vec<Arc<CoreWaker>>,
    /// By core, until it takes its own.
    mailboxes: Mutex<Vec<Option<Mailbox<CoreMessage>>>>,
    monitor: Arc<Monitor>,
    target: Arc<Target>,
    kv_device: RigDevice,
    kv_volume: AnyVolume,
    block_device: RigDevice,
    block_volume: Arc<BlockVolume>,
    /// Cores whose host is connected.
    connected: AtomicUsize,
}

impl RigNode {
    /// A node of `cores` cores with an empty volume in memory.
    pub fn new(config: RigConfig, cores: usize) -> RigNode {
        assert!(!config.is_deferred, "a deferred device belongs to one core");
        let core_wakers: Vec<_> = (0..cores).map(|_| CoreWaker::without_eventfd()).collect();
        let opener = config.new_handle(&CoreWaker::without_eventfd());
        RigNode::with_opener(config, core_wakers, &opener)
    }

    /// The same, with the device of `opener`.
    fn with_opener(config: RigConfig, core_wakers: Vec<Arc<CoreWaker>>, opener: &ReactorHandle) -> RigNode {
        let RigConfig { device_bytes, block_bytes, is_deferred, costs, .. } = config;
        let memory = |bytes, block_bytes| RigDevice::Memory {
            disk: RamDisk::new(bytes, block_bytes).expect("memory"),
            costs,
        };
        let kv_device = match is_deferred {
            true => RigDevice::Deferred(Geometry {
                block_bytes,
                blocks: device_bytes / u64::from(block_bytes),
                volatile: false,
            }),
            false => memory(device_bytes, block_bytes),
        };
        let device = kv_device.open_for_core(opener).expect("it opens");
        let kv_volume = block_on(open_volume(device, core_wakers.len()), || {
            opener.devices().poll();
        });
        let block_volume = BlockVolume::new(BLOCK_NAMESPACE_BLOCK_BYTES, BLOCK_NAMESPACE_BYTES);
        let block_info = NamespaceInfo {
            id: BLOCK_NAMESPACE,
            nguid: [2; 16],
            size_bytes: block_volume.size_bytes(),
            used_bytes: SharedSum::constant(block_volume.size_bytes()),
            kind: NamespaceKind::Block { block_bytes: BLOCK_NAMESPACE_BLOCK_BYTES },
            ana_group: 1,
            tokens: None,
        };
        let namespaces = vec![namespace_info(&kv_volume, 1024), block_info];
        let clock = if config.has_clock { clock::now } else { || Nanos::ZERO };
        let monitor = Monitor::new(core_wakers.len(), octokv_sched::SchedConfig::default(), clock);
        RigNode {
            config,
            network: Arc::default(),
            mailboxes: Mutex::new(mesh(&core_wakers, MAILBOX_CAPACITY).into_iter().map(Some).collect()),
            core_wakers,
            monitor: Arc::new(monitor.expect("the defaults are valid")),
            target: Target::new(SubsystemConfig::new(NQN), namespaces),
            kv_device,
            kv_volume,
            block_device: memory(BLOCK_NAMESPACE_BYTES, BLOCK_NAMESPACE_BLOCK_BYTES),
            block_volume,
            connected: AtomicUsize::new(0),
        }
    }

    /// Runs a core until the hosts of so many cores are connected.
    fn run_until_connected(&self, cores: usize, mut run_core: impl FnMut()) {
        for _ in 0..WAITING_ITERATIONS_MAX {
            if self.connected.load(Ordering::Acquire) >= cores {
                return;
            }
            run_core();
        }
        panic!("the hosts of other cores do not connect");
    }

    /// Core `index`, without connections.
    fn build_core(&self, index: usize, handle: ReactorHandle) -> NodeCore<TestSockets, RigDevice> {
        let mailbox = self.mailboxes.lock()[index].take().expect("each core is built once");
        let parts = CoreParts {
            index,
            sockets: TestSockets::of_core(&self.network, &handle, self.config.costs),
            roles: CoreRoles::SHARED,
            listen: &["127.0.0.1:4420".parse().expect("an address")],
            mailbox,
            control_queue: ControlQueue::new(handle.core_waker()),
            handle,
            target: Arc::clone(&self.target),
            monitor: Arc::clone(&self.monitor),
            buffer_bytes: 64 << 20,
            requests_max: 1024,
            costs: SimulatedCosts::default(),
        };
        let namespaces = [
            CoreNamespace {
                id: NamespaceId(1),
                volume: NamespaceVolume::Kv(self.kv_volume.clone()),
                devices: vec![self.kv_device.clone()],
            },
            CoreNamespace {
                id: BLOCK_NAMESPACE,
                volume: NamespaceVolume::Block(Arc::clone(&self.block_volume)),
                devices: vec![self.block_device.clone()],
            },
        ];
        NodeCore::new(parts, namespaces).expect("a core in memory")
    }
}

/// One core and its host.
pub struct ReactorRig {
    config: RigConfig,
    network: Arc<TestNetwork>,
    core: NodeCore<TestSockets, RigDevice>,
    session: Session<TestSockets>,
    /// The host's I/O queue.
    io_queue: SharedConnection,
    /// Of a batch that [`ReactorRig::begin_replay`] began.
    batch_response_bytes: u64,
    /// The core's handle.
    handle: ReactorHandle,
    now: Nanos,
    monitor: Arc<Monitor>,
    /// Buffer size that the host offers for a Retrieve, in bytes.
    pub read_bytes_max: u32,
}

/// Commands of some batches that differ in their heads only, such as their keys.
pub struct RecordedBatches {
    /// A whole batch.
    batch: Vec<u8>,
    /// The heads of all batches, one after the other.
    heads: Vec<u8>,
    /// Commands of a batch.
    depth: usize,
}

impl RecordedBatches {
    /// The number of batches.
    pub fn len(&self) -> usize {
        self.heads.len() / (self.depth * COMMAND_HEAD_BYTES)
    }

    fn heads_of(&self, batch: usize) -> &[u8] {
        let bytes = self.depth * COMMAND_HEAD_BYTES;
        &self.heads[batch * bytes..][..bytes]
    }
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
    pub fn with_config(config: RigConfig) -> ReactorRig {
        let core_waker = CoreWaker::without_eventfd();
        let handle = config.new_handle(&core_waker);
        let node = RigNode::with_opener(config, vec![core_waker], &handle);
        ReactorRig::connect(&node, 0, handle)
    }

    /// Core `index` of a node, and a connected host. Runs the core until the hosts of all cores are connected: REQUIRES that
    /// every core of the node is made meanwhile, each on a thread of its own.
    ///
    /// # Panics
    /// A host cannot connect, or the node gives its I/O queue to another core.
    pub fn on_core(node: &RigNode, index: usize) -> ReactorRig {
        let handle = node.config.new_handle(&node.core_wakers[index]);
        ReactorRig::connect(node, index, handle)
    }

    fn connect(node: &RigNode, index: usize, handle: ReactorHandle) -> ReactorRig {
        let RigConfig { namespace, depth, has_clock, .. } = node.config;
        let mut core = node.build_core(index, handle.clone());
        let mut now = if has_clock { clock::now() } else { Nanos::from_secs(1) };
        let mut run_core = |now: &mut Nanos| {
            *now = node.config.next_time(*now);
            core.run_iteration(*now);
        };
        node.run_until_connected(index, || run_core(&mut now));
        let config = ClientConfig {
            namespace,
            queue_depth: depth,
            reconnect: Reconnect::Never,
            keep_alive: KEEP_ALIVE,
            ..ClientConfig::default()
        };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let mut session = Session::new(TestSockets::of_host(&node.network), address, config, now);
        // The first core, whose thread may have to share a processor with this one, has its part in it.
        let mut iterations = 0..WAITING_ITERATIONS_MAX;
        while !session.is_live() {
            run_core(&mut now);
            session.poll(now, |_, response| panic!("no command was submitted: {response:?}"));
            let is_late = iterations.next().is_none();
            assert!(!is_late && session.ended().is_none(), "no connection: {:?}", session.ended());
        }
        let io_queue = node.network.connection(node.network.len() - 1);
        node.connected.store(index + 1, Ordering::Release);
        node.run_until_connected(node.core_wakers.len(), || run_core(&mut now));
        assert!(core.sockets().has(&io_queue), "core {index} has the I/O queue of its host");
        let (config, network, monitor) = (node.config, Arc::clone(&node.network), Arc::clone(&node.monitor));
        ReactorRig {
            config,
            network,
            core,
            session,
            io_queue,
            batch_response_bytes: 0,
            handle,
            now,
            monitor,
            read_bytes_max: 64 << 10,
        }
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
            self.now = self.config.next_time(self.now);
            self.core.run_iteration(self.now);
        }
        set(Nanos::from_secs(60));
        while self.monitor.interval_count() < intervals_before + 3 {
            self.now = self.config.next_time(self.now);
            self.core.run_iteration(self.now);
        }
    }

    /// Lets `time` pass without requests.
    pub fn pass_time(&mut self, time: Nanos) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.config.next_time(self.now);
            self.core.run_iteration(self.now);
        }
    }

    /// Connects one more host and returns the index of its connection. The node's responses to it are discarded.
    pub fn add_host(&mut self) -> usize {
        let config =
            ClientConfig { queue_depth: 128, reconnect: Reconnect::Never, ..ClientConfig::default() };
        let address = "127.0.0.1:4420".parse().expect("an address");
        let mut session = Session::new(TestSockets::of_host(&self.network), address, config, self.now);
        for _ in 0..ITERATIONS_MAX {
            self.now = self.config.next_time(self.now);
            session.poll(self.now, |_, _| ());
            self.core.run_iteration(self.now);
            if session.is_live() {
                let index = self.network.len() - 1;
                self.network.connection(index).lock().discarded_bytes = Some(0);
                return index;
            }
        }
        panic!("no connection: {:?}", session.ended());
    }

    /// Queues bytes to the node on connection `index`.
    pub fn send_bytes(&mut self, connection: usize, bytes: &[u8]) {
        self.network.connection(connection).lock().to_node.put(bytes);
    }

    /// Bytes to the node not yet received, and bytes of responses discarded so far.
    pub fn pending_and_received_bytes(&self, connection: usize) -> (usize, u64) {
        let connection = self.network.connection(connection);
        let connection = connection.lock();
        (connection.to_node.pending().len(), connection.discarded_bytes.expect("only for a host of add_host"))
    }

    /// Runs one iteration of the core and returns its simulated duration.
    pub fn run_core_iteration(&mut self) -> Nanos {
        self.handle.cpu_time().take_simulated();
        self.core.run_iteration(self.now);
        self.now = self.config.next_time(self.now);
        self.handle.cpu_time().take_simulated()
    }

    /// Runs the core until an iteration finds nothing to do, after which it would sleep.
    ///
    /// # Panics
    /// The core does not become idle.
    pub fn run_until_idle(&mut self) {
        let mut iterations = 0..ITERATIONS_MAX;
        while self.core.run_iteration(self.now) {
            self.now = self.config.next_time(self.now);
            iterations.next().expect("the core becomes idle");
        }
    }

    fn run_iteration(&mut self) -> (bool, usize) {
        self.now = self.config.next_time(self.now);
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
        let bytes = self.io_queue.lock().to_node.pending().to_vec();
        let mut completed = 0;
        // Another core may be interrupted while it has what a command waits for.
        for _ in 0..WAITING_ITERATIONS_MAX {
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
        self.io_queue.lock().discarded_bytes = Some(0);
        for _ in 0..rounds {
            self.io_queue.lock().to_node.put(batch);
            let mut iterations = 0;
            loop {
                self.now = self.config.next_time(self.now);
                let busy = self.core.run_iteration(self.now);
                if !busy && self.core.requests() == 0 {
                    break;
                }
                iterations += 1;
                assert!(iterations < ITERATIONS_MAX, "the core does not become idle");
            }
        }
        self.io_queue.lock().discarded_bytes.expect("set above")
    }

    /// Stores or retrieves these keys, `depth` at a time, and returns the commands.
    ///
    /// # Panics
    /// The keys are no multiple of the queue depth, or a command fails.
    pub fn record_batches(&mut self, keys: &[Key], store: Option<&[u8]>) -> RecordedBatches {
        let depth = usize::from(self.config.depth);
        let batch = self.record_batch(&keys[..depth], store);
        let command_bytes = batch.len() / depth;
        let mut heads = Vec::with_capacity(keys.len() * COMMAND_HEAD_BYTES);
        for keys in keys.chunks(depth) {
            let recorded = self.record_batch(keys, store);
            assert_eq!(recorded.len(), batch.len(), "whole batches of the same commands");
            for (command, first) in recorded.chunks(command_bytes).zip(batch.chunks(command_bytes)) {
                let (head, data) = command.split_at(COMMAND_HEAD_BYTES);
                heads.extend_from_slice(head);
                assert_eq!(data, &first[COMMAND_HEAD_BYTES..], "the same data");
            }
        }
        RecordedBatches { batch, heads, depth }
    }

    /// Begins to replay recorded batches: puts the first one's data into the connection.
    pub fn begin_replay(&mut self, recorded: &RecordedBatches) {
        self.batch_response_bytes = self.replay(&recorded.batch, 1);
    }

    /// Replays one batch, until all responses are sent. REQUIRES: [`ReactorRig::begin_replay`] of the same batches.
    ///
    /// # Panics
    /// A command fails, or the core does not execute it.
    pub fn replay_next(&mut self, recorded: &RecordedBatches, batch: usize) {
        let mut connection = self.io_queue.lock();
        connection.to_node.put_heads(recorded.heads_of(batch), COMMAND_HEAD_BYTES);
        connection.discarded_bytes = Some(0);
        drop(connection);
        for _ in 0..WAITING_ITERATIONS_MAX {
            self.now = self.config.next_time(self.now);
            self.core.run_iteration(self.now);
            // A failure has no data, and is shorter.
            let sent_bytes = self.io_queue.lock().discarded_bytes.expect("set above");
            if sent_bytes >= self.batch_response_bytes {
                assert_eq!(sent_bytes, self.batch_response_bytes, "one response for each command");
                return;
            }
        }
        panic!("the core does not answer every command");
    }
}

async fn open_volume(device: Rc<dyn Device>, cores: usize) -> AnyVolume {
    let (devices, pool) = ([device], BufferPool::new(64 << 20));
    let format = FormatConfig { seed: 7, ..FormatConfig::default() };
    AnyVolume::format(&devices, &format).await.expect("it fits");
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    AnyVolume::open(&devices, &pool, config, &format).await.expect("it was formatted")
}

/// `count` keys of 16 bytes.
pub fn keys(from: u64, count: usize) -> Vec<Key> {
    (from..).take(count).map(|index| Key::new(format!("{index:016}").as_bytes()).expect("16 bytes")).collect()
}
