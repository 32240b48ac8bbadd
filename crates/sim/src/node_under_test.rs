//! The node under test: the production reactors, target and engine on a simulated host with one disk.
//!
//! ```text
//!   Off ──boot──▶ Recovering ──opened, audited──▶ Up
//!    ▲                │ stop                       │ stop
//!    └────────────────┴────────────────────────────┘
//! ```
//! In: the plan of the node, calls to start and stop it. Out: audits (the state of every key, read from the
//! engine and not through clients), verification of the disk, resources in use. It composes the same parts as
//! [`octokv_node::start`], with the simulated driver in place of the kernel's.

use crate::faulty_disk::{DiskFaults, FaultyDisk};
use crate::scenario::NodePlan;
use octokv_base::{BufferPool, Key, NamespaceId};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::superblock::{self, SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, Superblock};
use octokv_engine::hash::{self, FormatConfig, HashEngine, OpenConfig, OpenError, VerifyReport, Volume};
use octokv_engine::{Engine, EngineError};
use octokv_node::fair_yield::FairYield;
use octokv_node::kv_backend::KvBackend;
use octokv_node::monitor::Monitor;
use octokv_node::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_node::{ReactorLoop, ReactorParts, namespace_info, new_reactor};
use octokv_nvmf::{SubsystemConfig, Target};
use octokv_runtime::simulated::{HostFailure, SimDiskId, SimEnv, SimHostId, SimSockets};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, Mailbox, ReactorHandle, Sockets, mesh};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const MAILBOX_MESSAGES: usize = 4;
const NQN: &str = "nqn.2026-11.io.octokv:node";

/// Result of auditing one key.
pub enum AuditResult {
    /// No such key.
    Missing,
    /// Its value.
    Value(Vec<u8>),
    /// The record that begins at this block is corrupted.
    Corrupt(u64),
    /// The read failed otherwise.
    Failed(EngineError),
}

/// Result of a task; `None` until the task ends.
pub type TaskResult<T> = Rc<RefCell<Option<T>>>;

/// Result of recovery: the open volume, and the audit of every key.
pub type RecoveryResult = Result<(Arc<Volume>, Vec<AuditResult>), OpenError>;

/// Handles of one core for inspection.
struct KvNodeCore {
    handle: ReactorHandle,
    channel: DeviceHandle,
    executor: Rc<KvBackend<HashEngine>>,
    connections: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

struct RunningKvNode {
    volume: Arc<Volume>,
    cores: Vec<KvNodeCore>,
}

/// The node and its host.
pub struct KvNodeUnderTest {
    sim: SimEnv,
    /// The simulated host.
    pub host: SimHostId,
    disk: SimDiskId,
    plan: NodePlan,
    faults: DiskFaults,
    /// Whether cores publish whether they are idle after each iteration; off by default because it costs time.
    tracks_idle: Rc<Cell<bool>>,
    /// The monitor of each start.
    monitors: Vec<Arc<Monitor>>,
    running: Option<RunningKvNode>,
}

impl KvNodeUnderTest {
    /// A stopped node with an empty disk.
    pub fn new(sim: &SimEnv, plan: NodePlan, faults: DiskFaults) -> KvNodeUnderTest {
        let host = sim.add_host();
        let disk = sim.add_disk(host, plan.disk);
        let tracks_idle = Rc::new(Cell::new(false));
        KvNodeUnderTest {
            sim: sim.clone(),
            host,
            disk,
            plan,
            faults,
            tracks_idle,
            monitors: Vec::new(),
            running: None,
        }
    }

    /// Address of its listener.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.sim.address(self.host), PORT)
    }

    /// Format of the volume.
    fn format(&self) -> FormatConfig {
        FormatConfig {
            unit_bytes: self.plan.unit_bytes,
            hash: self.plan.hash,
            bitmap_partitions_log2: self.plan.partitions_log2,
            value_bytes_max: self.plan.value_bytes_max,
            namespace: 1,
            seed: 7,
        }
    }

    fn channel(&self) -> DeviceHandle {
        DeviceHandle::new(Box::new(self.sim.device_queue(self.host)), self.plan.device_depth)
    }

    fn device(&self, handle: &ReactorHandle) -> Rc<dyn Device> {
        let source = self.sim.device_source(self.disk);
        let blocks = source.size_bytes / u64::from(source.block_bytes);
        let geometry = Geometry { block_bytes: source.block_bytes, blocks, volatile: false };
        let channel = handle.devices();
        let file = channel.open(&source).expect("a simulated disk opens on a simulated queue");
        let device = FileDevice::new(channel, file, geometry, source.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), handle.clone()))
    }

    /// Starts a reactor that runs one task.
    fn spawn_task<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<dyn Device>) -> F,
    ) -> TaskResult<T> {
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), self.channel(), CpuTime::simulated());
        let result_slot: TaskResult<T> = Rc::default();
        let (future, result) = (task(self.device(&handle)), Rc::clone(&result_slot));
        handle.spawn(async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
        });
        let (own, channel) = (handle.clone(), handle.devices());
        self.sim.add_reactor(self.host, handle, move |now| {
            let fired = own.begin_iteration(now);
            let before = own.poll_background();
            let completions = channel.poll();
            fired + before + completions + own.poll_background() > 0
        });
        result_slot
    }

    /// Starts the host and opens the disk, after formatting it if `first`, then audits every key.
    pub fn start_recovery(&self, keys: Vec<Key>, first: bool) -> TaskResult<RecoveryResult> {
        self.sim.start_host(self.host);
        let (format, plan) = (self.format(), self.plan);
        self.spawn_task(move |device| async move {
            if first {
                hash::format(&*device, &format).await?;
            }
            let pool = BufferPool::new(plan.pool_bytes);
            let config = OpenConfig { durability: plan.durability, cores: plan.cores };
            let volume = hash::open(&device, &pool, config, &format).await?;
            let engine = HashEngine::new(Arc::clone(&volume), 0, device, pool);
            let audited = audit_keys(&engine, &keys).await;
            Ok((volume, audited))
        })
    }

    /// Starts the reactors on an open volume; the node accepts connections.
    pub fn start_serving(&mut self, volume: Arc<Volume>) {
        // Recovery is complete: its reactor ends.
        self.remove_reactors();
        let plan = &self.plan;
        let config = SubsystemConfig {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            h2c_data_bytes_max: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            outbox_bytes_max: plan.outbox_bytes_max,
            ..SubsystemConfig::new(NQN)
        };
        let namespace = namespace_info(&volume, config.key_bytes_max);
        let target = Target::new(config, vec![namespace]);
        target.set_listeners(vec![self.address()]);
        let monitor = plan.scheduling.start_monitor(self.monitors.len(), plan.cores);
        self.monitors.push(Arc::clone(&monitor));
        let wakers: Vec<_> = (0..plan.cores).map(|_| CoreWaker::without_eventfd()).collect();
        let mailboxes = mesh(&wakers, MAILBOX_MESSAGES);
        let cores = mailboxes.into_iter().zip(&wakers).enumerate();
        let cores = cores.map(|(index, (mailbox, waker))| {
            self.start_core(index, mailbox, Arc::clone(waker), &volume, &target, &monitor)
        });
        let cores = cores.collect();
        self.running = Some(RunningKvNode { volume, cores });
    }

    fn start_core(
        &self,
        index: usize,
        mailbox: Mailbox<octokv_node::CoreMessage>,
        waker: Arc<CoreWaker>,
        volume: &Arc<Volume>,
        target: &Arc<Target>,
        monitor: &Arc<Monitor>,
    ) -> KvNodeCore {
        let channel = self.channel();
        let handle = ReactorHandle::new(waker, channel.clone(), CpuTime::simulated());
        let device = self.device(&handle);
        let pool = BufferPool::new(self.plan.pool_bytes);
        let engine = HashEngine::new(Arc::clone(volume), index, device, pool.clone());
        let (own, device) = (pool.clone(), Rc::from("simulated disk"));
        let list_yield = FairYield::default();
        let executor = Rc::new(KvBackend {
            engine,
            pool: own,
            handle: handle.clone(),
            device_name: device,
            list_yield: list_yield,
        });
        let namespaces = Rc::new(NamespaceTable::default());
        namespaces.insert(NamespaceId(1), NamespaceBackend::Kv(Rc::clone(&executor)));
        let mut sockets = self.sim.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("the only listener of this host"));
            let (executor, own) = (Rc::clone(&executor), handle.clone());
            handle.spawn(async move { executor.engine.maintain(&own, |_| ()).await });
        }
        let mut reactor_loop = new_reactor(ReactorParts {
            sockets,
            local_address: |_: &SimSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            namespaces: namespaces,
            pool,
            requests_max: self.plan.requests_max,
            monitor: Arc::clone(monitor),
            costs: self.plan.scheduling.costs,
        });
        let (connections, is_idle) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
        let (count, idle, tracks_idle) =
            (Rc::clone(&connections), Rc::clone(&is_idle), Rc::clone(&self.tracks_idle));
        let (scheduling_plan, monitor) = (self.plan.scheduling, Arc::clone(monitor));
        let (start, mut chosen) = (self.monitors.len() - 1, 0);
        self.sim.add_reactor(self.host, handle.clone(), move |now| {
            if index == 0 {
                scheduling_plan.rotate_policy(&monitor, start, &mut chosen);
            }
            let busy = reactor_loop.run_iteration(now);
            if tracks_idle.get() {
                count.set(reactor_loop.connections());
                idle.set(reactor_loop.is_drained());
            }
            busy
        });
        KvNodeCore { handle, channel, executor: executor, connections, is_idle }
    }

    /// Crashes the node; tasks in progress are dropped.
    pub fn stop(&mut self, stop: HostFailure) {
        self.running = None;
        self.faults.clear();
        self.sim.stop_host(self.host, stop);
    }

    fn remove_reactors(&self) {
        // Stopping the host loses nothing: its disk has no operation in flight.
        self.sim.stop_host(self.host, HostFailure::ProcessKilled);
        self.sim.start_host(self.host);
    }

    /// Requests executed on another core than their connection's, and requests queued behind other tenants, over all
    /// starts.
    pub fn offloaded_and_queued(&self) -> (u64, u64) {
        self.monitors
            .iter()
            .map(|monitor| monitor.offloaded_and_queued())
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Turns idle tracking on or off. With tracking on, a core counts as busy until its next iteration.
    pub fn track_idle(&self, on: bool) {
        self.tracks_idle.set(on);
        if let Some(running) = &self.running {
            for core in &running.cores {
                core.is_idle.set(false);
                core.handle.core_waker().notify();
            }
        }
    }

    /// Whether no connection, request or device operation is left. REQUIRES: idle tracking is on.
    pub fn is_quiescent(&self) -> bool {
        let is_core_quiescent = |core: &KvNodeCore| {
            core.is_idle.get() && core.connections.get() == 0 && core.channel.in_flight() == 0
        };
        self.running.as_ref().is_none_or(|running| running.cores.iter().all(is_core_quiescent))
    }

    /// Describes resources in use, or `None`. REQUIRES: the node is quiescent.
    pub fn find_leak(&self) -> Option<String> {
        let running = self.running.as_ref()?;
        for (index, core) in running.cores.iter().enumerate() {
            let (connections, bytes) = (core.connections.get(), core.executor.pool.in_use_bytes());
            let in_flight = core.channel.in_flight();
            if connections + bytes + in_flight > 0 {
                return Some(format!(
                    "core {index} keeps {connections} connections, {bytes} B of buffers, {in_flight} device operations"
                ));
            }
        }
        None
    }

    /// The open volume, or `None` while the node is down.
    pub fn volume(&self) -> Option<&Arc<Volume>> {
        self.running.as_ref().map(|running| &running.volume)
    }

    /// Audits every key on the first core.
    pub fn start_audit(&self, keys: Vec<Key>) -> TaskResult<Vec<AuditResult>> {
        self.spawn_on_first_core(|executor| async move { audit_keys(&executor.engine, &keys).await })
    }

    /// Writes the final checkpoint of a clean shutdown; the volume then rejects writes.
    pub fn start_clean_shutdown(&self) -> TaskResult<Result<(), EngineError>> {
        self.spawn_on_first_core(|executor| async move { executor.engine.checkpoint(true).await })
    }

    fn spawn_on_first_core<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<KvBackend<HashEngine>>) -> F,
    ) -> TaskResult<T> {
        let result_slot: TaskResult<T> = Rc::default();
        if let Some(running) = &self.running {
            let core = &running.cores[0];
            let (future, result) = (task(Rc::clone(&core.executor)), Rc::clone(&result_slot));
            core.handle.spawn(async move {
                let value = future.await;
                *result.borrow_mut() = Some(value);
            });
        }
        result_slot
    }

    /// Verifies the whole disk. REQUIRES: the node is stopped.
    pub fn start_verify(&self) -> TaskResult<Result<VerifyReport, OpenError>> {
        self.sim.start_host(self.host);
        let pool = BufferPool::new(self.plan.pool_bytes);
        self.spawn_task(move |device| async move {
            hash::verify(&*device, &pool, &mut |_, _| ()).await.map_err(|failure| failure.reason)
        })
    }

    /// The valid superblock with the highest generation.
    pub fn superblock(&self) -> Option<Superblock> {
        let mut newest: Option<Superblock> = None;
        for copy in 0..superblock::SUPERBLOCKS {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            self.sim.read_disk(self.disk, copy * SUPERBLOCK_STRIDE_BYTES, &mut bytes);
            let Ok(found) = superblock::UncheckedSuperblock(&bytes).check() else { continue };
            if newest.is_none_or(|newest| found.generation > newest.generation) {
                newest = Some(found);
            }
        }
        newest
    }

    /// Flips a bit of the disk. Returns false and flips nothing if the sector holds only zeros.
    pub fn flip_bit(&self, at_byte: u64, bit: u8) -> bool {
        let sector = at_byte / 512 * 512;
        let mut bytes = [0; 512];
        self.sim.read_disk(self.disk, sector, &mut bytes);
        if bytes.iter().all(|&byte| byte == 0) {
            return false;
        }
        bytes[(at_byte % 512) as usize] ^= 1 << (bit % 8);
        self.sim.write_disk(self.disk, sector, &bytes);
        true
    }

    /// Whether the longest possible record that begins at block `lba` contains a byte of the disk.
    pub fn record_contains(&self, lba: u64, at_byte: u64) -> bool {
        let start = lba * u64::from(self.plan.disk.block_bytes);
        let longest = u64::from(self.plan.value_bytes_max) + 8192;
        (start..start + longest).contains(&at_byte)
    }
}

/// Reads every key, one after another.
pub(crate) async fn audit_keys(engine: &HashEngine, keys: &[Key]) -> Vec<AuditResult> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        found.push(match engine.get(key).await {
            Ok(None) => AuditResult::Missing,
            Ok(Some(value)) => AuditResult::Value(value.as_bytes().to_vec()),
            Err(EngineError::Corrupt { lba }) => AuditResult::Corrupt(lba),
            Err(fault) => AuditResult::Failed(fault),
        });
    }
    found
}

/// A reactor handle without devices.
pub fn handle_without_devices(sim: &SimEnv, host: SimHostId) -> ReactorHandle {
    let channel = DeviceHandle::new(Box::new(sim.device_queue(host)), 1);
    ReactorHandle::new(CoreWaker::without_eventfd(), channel, CpuTime::simulated())
}
