//! The node under test of key-value simulations: a [`SimNode`] with the production engine on one disk or several.
//!
//! ```text
//!   Off ──boot──▶ Recovering ──opened, audited──▶ Up
//!    ▲                │ stop                       │ stop
//!    └────────────────┴────────────────────────────┘
//! ```
//! In: the plan of the node, calls to start and stop it. Out: audits (the state of every key, read from the
//! engine and not through clients), verification of the disk, resources in use.

use crate::engine_work::EngineWork;
use crate::faulty_disk::DiskFaults;
use crate::operator::ReconfigurableNode;
use crate::scenario::NodePlan;
use crate::sim_device::{SimDevice, SimStorage};
use crate::sim_node::{NodesUnderTest, SimNode};
use octokv_base::{BufferPool, Key, NamespaceId, Prng};
use octokv_device::{Device, RamDisk};
use octokv_engine::volume::FORMAT_REGION_BYTES;
use octokv_engine::{
    AnyEngine, AnyVolume, DeviceLayout, Engine, EngineError, FormatConfig, OpenConfig, OpenError,
    VerifyReport, Volume, WallClock,
};
use octokv_node::control::CoreChangeError;
use octokv_node::kv_backend::KvBackend;
use octokv_node::namespace_table::NamespaceBackend;
use octokv_node::{CoreNamespace, NamespaceVolume, OpenDevice, namespace_info};
use octokv_nvmf::{NamespaceInfo, Target};
use octokv_runtime::simulated::{HostFailure, SimDiskId, SimEnv, SimHostId};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle};
use octokv_sched::StartingCosts;
use octokv_sched::command_costs::KindCost;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

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
pub type RecoveryResult = Result<(AnyVolume, Vec<AuditResult>), OpenError>;

pub(crate) struct RunningVolume {
    pub volume: AnyVolume,
    /// Its devices, by their places in the list that the node has.
    pub devices: Vec<SimDevice>,
    /// The namespace of the volume; `None` while it has none.
    pub namespace: Cell<Option<NamespaceId>>,
}

/// A node with one key-value namespace, on one disk or several.
pub struct KvNodeUnderTest {
    /// Its host, reactors and target.
    pub sim_node: SimNode,
    pub(crate) storages: Vec<SimStorage>,
    /// The number of each storage among the disks that faults name: one that replaced another has a number of its own.
    pub(crate) numbers: Vec<usize>,
    /// A disk of which the addition has not come to its end.
    pub(crate) aside: Option<SimStorage>,
    /// Disks that were replaced, with the index of those in their places.
    pub(crate) retired: Vec<(usize, SimStorage)>,
    /// The new disk of a replacement that a crash cut, with the index of that in its place.
    pub(crate) cut_replacement: Option<(usize, SimStorage)>,
    /// The order in which the storages are given to the node, another one at each recovery.
    pub(crate) order: RefCell<Vec<usize>>,
    /// Of the orders.
    random: RefCell<Prng>,
    pub(crate) running: Option<RunningVolume>,
}

impl NodesUnderTest for Vec<KvNodeUnderTest> {
    fn sim_nodes(&self) -> Vec<&SimNode> {
        self.iter().map(|node| &node.sim_node).collect()
    }
}

/// The operator changes one of several nodes: that of the disk.
impl ReconfigurableNode for Vec<KvNodeUnderTest> {
    fn target(&self) -> Option<&Arc<Target>> {
        self.first()?.sim_node.running().map(|running| &running.target)
    }

    fn add_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let node = &self[disk];
        let Some(RunningVolume { volume, namespace, .. }) = &node.running else { return Ok(()) };
        let (core_namespace, info) = node.namespace(volume, id);
        node.sim_node.add_namespace(&core_namespace, info, between)?;
        namespace.set(Some(id));
        Ok(())
    }

    fn remove_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let node = &self[disk];
        let Some(RunningVolume { namespace, .. }) = &node.running else { return Ok(()) };
        namespace.set(None);
        node.sim_node.remove_namespace(id, between)
    }
}

/// Those of a device that writes slowly.
fn starting_costs(put_tokens: u32) -> StartingCosts {
    let write = KindCost { tokens: put_tokens, tokens_per_4k: 64 };
    StartingCosts { put: write, delete: write, ..StartingCosts::default() }
}

impl KvNodeUnderTest {
    /// A stopped node with empty disks.
    pub fn new(sim: &SimEnv, plan: NodePlan, faults: DiskFaults) -> KvNodeUnderTest {
        let sim_node = SimNode::new(sim, plan, faults);
        let storage = |_| SimStorage::new(sim, sim_node.host, plan.disk, plan.is_in_memory);
        let storages = (0..plan.devices).map(storage).collect();
        let (order, random) = (RefCell::new((0..plan.devices).collect()), RefCell::new(Prng::new(7)));
        let (numbers, retired) = ((0..plan.devices).collect(), Vec::new());
        KvNodeUnderTest {
            sim_node,
            storages,
            numbers,
            aside: None,
            retired,
            cut_replacement: None,
            order,
            random,
            running: None,
        }
    }

    /// Format of the volume.
    pub(crate) fn format(&self) -> FormatConfig {
        let plan = &self.sim_node.plan;
        plan.engine.format(FormatConfig {
            version: plan.format_version,
            unit_bytes: Some(plan.unit_bytes),
            hash: plan.hash,
            bitmap_partitions_log2: plan.partitions_log2,
            value_bytes_max: plan.value_bytes_max,
            namespace: 1,
            seed: 7,
            swap_bytes: plan.swap_bytes,
            ..FormatConfig::default()
        })
    }

    /// How the volume is opened.
    pub(crate) fn open_config(&self) -> OpenConfig {
        let plan = self.sim_node.plan;
        let NodePlan { durability, cache_bytes, prepare_bytes, compact_bytes_per_second, .. } = plan;
        OpenConfig {
            durability,
            cores: plan.cores + usize::from(plan.has_parallel_core),
            cache_bytes,
            prepare_bytes,
            compact_bytes_per_second,
            tree: OpenConfig::TREE,
            swap_gap: plan.swap_gap,
            clock: WallClock::default(),
            tokens: (plan.put_tokens > 0).then(|| starting_costs(plan.put_tokens)),
        }
    }

    /// Starts a reactor that runs one task on the devices.
    fn spawn_task<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Vec<Rc<dyn Device>>) -> F,
    ) -> TaskResult<T> {
        self.spawn_task_on(self.devices(), task)
    }

    /// Starts a reactor that runs one task on these devices.
    pub(crate) fn spawn_task_on<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        devices: Vec<SimDevice>,
        task: impl FnOnce(Vec<Rc<dyn Device>>) -> F,
    ) -> TaskResult<T> {
        let handle = ReactorHandle::new(
            CoreWaker::without_eventfd(),
            self.sim_node.device_queue(),
            CpuTime::simulated(),
        );
        let result_slot: TaskResult<T> = Rc::default();
        let opened = devices.into_iter().map(|device| device.open_for_core(&handle));
        let devices = opened.collect::<Result<Vec<_>, _>>();
        let future = task(devices.expect("a simulated disk opens on a simulated queue"));
        let result = Rc::clone(&result_slot);
        handle.spawn(async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
        });
        let (own, channel) = (handle.clone(), handle.devices());
        self.sim_node.sim.add_reactor(self.sim_node.host, handle, move |now| {
            let fired = own.begin_iteration(now);
            let before = own.poll_background();
            let completions = channel.poll();
            fired + before + completions + own.poll_background() > 0
        });
        result_slot
    }

    /// The devices, in the order in which they are given to the node.
    pub(crate) fn devices(&self) -> Vec<SimDevice> {
        self.order
            .borrow()
            .iter()
            .map(|&at| self.sim_node.device(&self.storages[at], self.numbers[at]))
            .collect()
    }

    /// Gives the devices to the node in another order.
    fn shuffle_devices(&self) {
        let (mut order, mut random) = (self.order.borrow_mut(), self.random.borrow_mut());
        for at in (1..order.len()).rev() {
            order.swap(at, random.below(at as u64 + 1) as usize);
        }
    }

    /// Starts the host and opens the disks, after formatting them if `first`, then audits every key.
    pub fn start_recovery(&self, keys: Vec<Key>, first: bool) -> TaskResult<RecoveryResult> {
        self.sim_node.sim.start_host(self.sim_node.host);
        let (format, plan, config) = (self.format(), self.sim_node.plan, self.open_config());
        self.shuffle_devices();
        self.spawn_task(move |devices| async move {
            // Memory is formatted when it is opened.
            if first && !plan.is_in_memory {
                AnyVolume::format(&devices, &format).await?;
            }
            let pool = BufferPool::new(plan.pool_bytes);
            let volume = plan.engine.open(&devices, &pool, config, &format).await?;
            let engine = volume.engine(0, &devices, pool);
            let audited = audit_keys(&engine, &keys).await;
            Ok((volume, audited))
        })
    }

    /// Starts the reactors on an open volume; the node accepts connections.
    pub fn start_serving(&mut self, volume: AnyVolume) {
        self.start_serving_as(volume, NamespaceId(1));
    }

    /// Starts the reactors on an open volume, which is served as this namespace.
    pub fn start_serving_as(&mut self, volume: AnyVolume, id: NamespaceId) {
        // Recovery is complete: its reactor ends.
        self.remove_reactors();
        if self.sim_node.plan.has_owner_cores {
            volume.assign_owner_cores(self.sim_node.plan.cores);
        }
        let (namespace, info) = self.namespace(&volume, id);
        let target = Target::new(self.sim_node.subsystem_config(), vec![info]);
        self.sim_node.start(target, std::slice::from_ref(&namespace));
        let devices = namespace.devices;
        self.running = Some(RunningVolume { volume, devices, namespace: Cell::new(Some(id)) });
    }

    /// A new namespace on a volume: as cores and as hosts see it.
    fn namespace(&self, volume: &AnyVolume, id: NamespaceId) -> (CoreNamespace<SimDevice>, NamespaceInfo) {
        let info = namespace_info(volume, self.sim_node.subsystem_config().key_bytes_max);
        let devices = self.devices();
        let volume = NamespaceVolume::Kv(volume.clone());
        (CoreNamespace { id, volume, devices }, NamespaceInfo { id, ..info })
    }

    fn first_executor(&self) -> Option<Rc<KvBackend<AnyEngine>>> {
        let id = self.running.as_ref()?.namespace.get()?;
        let backend = self.sim_node.running()?.cores[0].core.borrow().backend(id)?;
        match &*backend {
            NamespaceBackend::Kv(executor) => Some(Rc::clone(executor)),
            NamespaceBackend::Block(_) => None,
        }
    }

    /// Crashes the node; tasks in progress are dropped.
    pub fn stop(&mut self, failure: HostFailure) {
        self.running = None;
        self.sim_node.stop(failure);
        self.storages.iter_mut().for_each(SimStorage::end_process);
    }

    fn remove_reactors(&self) {
        // Stopping the host loses nothing: its disk has no operation in flight.
        self.sim_node.sim.stop_host(self.sim_node.host, HostFailure::ProcessKilled);
        self.sim_node.sim.start_host(self.sim_node.host);
    }

    /// The only disk.
    fn disk(&self) -> SimDiskId {
        assert_eq!(self.storages.len(), 1, "faults of a disk are those of the only one");
        self.storages[0].disk()
    }

    /// Fails the disk for good, or puts an empty one in its place. REQUIRES: to replace it, the node is stopped.
    pub fn set_disk_lost(&self, lost: bool) {
        match lost {
            true => self.sim_node.sim.lose_disk(self.disk()),
            false => self.sim_node.sim.replace_disk(self.disk()),
        }
    }

    /// The memory of the volume, or `None` if it is on a disk.
    pub fn memory(&self) -> Option<&Arc<RamDisk>> {
        self.storages[0].memory()
    }

    /// The open volume, or `None` while the node is down.
    pub fn volume(&self) -> Option<&AnyVolume> {
        self.running.as_ref().map(|running| &running.volume)
    }

    /// Audits every key on the first core.
    pub fn start_audit(&self, keys: Vec<Key>) -> TaskResult<Vec<AuditResult>> {
        self.spawn_on_first_core(|executor| async move { audit_keys(&executor.engine, &keys).await })
    }

    /// Writes the final checkpoint of a clean shutdown; the volume then rejects writes.
    pub fn start_clean_shutdown(&self) -> TaskResult<Result<(), EngineError>> {
        self.spawn_on_first_core(|executor| async move { executor.engine.close().await })
    }

    /// Does a piece of background work on the first core. The result is that it has ended, in whatever way.
    pub fn start_work(&self, work: EngineWork) -> TaskResult<()> {
        self.spawn_on_first_core(move |executor| async move { work.run(&executor.engine).await })
    }

    fn spawn_on_first_core<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<KvBackend<AnyEngine>>) -> F,
    ) -> TaskResult<T> {
        let result_slot: TaskResult<T> = Rc::default();
        if let Some(executor) = self.first_executor() {
            let (future, result) = (task(Rc::clone(&executor)), Rc::clone(&result_slot));
            executor.handle.spawn(async move {
                let value = future.await;
                *result.borrow_mut() = Some(value);
            });
        }
        result_slot
    }

    /// Verifies the whole disk. REQUIRES: the node is stopped.
    pub fn start_verify(&self) -> TaskResult<Result<VerifyReport, OpenError>> {
        self.sim_node.sim.start_host(self.sim_node.host);
        let pool = BufferPool::new(self.sim_node.plan.pool_bytes);
        self.spawn_task(move |devices| async move {
            AnyVolume::verify(&devices, &pool, &mut |_, _| ()).await.map_err(|failure| failure.reason)
        })
    }

    /// Where the disk has what, by its newest valid superblock.
    pub fn device_layout(&self) -> Option<DeviceLayout> {
        let mut front = [0; FORMAT_REGION_BYTES as usize];
        self.sim_node.sim.read_disk(self.disk(), 0, &mut front);
        AnyVolume::device_layout(&front)
    }

    /// Flips a bit of the disk. Returns false and flips nothing if the sector holds only zeros.
    pub fn flip_bit(&self, at_byte: u64, bit: u8) -> bool {
        let sector = at_byte / 512 * 512;
        let (disk, mut bytes) = (self.disk(), [0; 512]);
        self.sim_node.sim.read_disk(disk, sector, &mut bytes);
        if bytes.iter().all(|&byte| byte == 0) {
            return false;
        }
        bytes[(at_byte % 512) as usize] ^= 1 << (bit % 8);
        self.sim_node.sim.write_disk(disk, sector, &bytes);
        true
    }

    /// Whether the longest possible record that begins at block `lba` contains a byte of the disk.
    pub fn record_contains(&self, lba: u64, at_byte: u64) -> bool {
        let start = lba * u64::from(self.sim_node.plan.disk.block_bytes);
        let longest = u64::from(self.sim_node.plan.value_bytes_max) + 8192;
        (start..start + longest).contains(&at_byte)
    }
}

/// Reads every key, one after another.
pub(crate) async fn audit_keys(engine: &AnyEngine, keys: &[Key]) -> Vec<AuditResult> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        found.push(match engine.get(key).await {
            Ok(None) => AuditResult::Missing,
            Ok(Some(value)) => AuditResult::Value(value.as_bytes().to_vec()),
            Err(EngineError::Corrupt { lba, .. }) => AuditResult::Corrupt(lba),
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
