//! The node under test: the production reactors, target and block backend on a simulated host with several disks,
//! whose namespaces are added and removed while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──attach, detach (core by core, as in the real node)──▶ Up ──stop──▶ Off
//! ```
//! In: calls to start and stop it, and the disk that each namespace serves. Out: resources in use.

use super::scenario::{BlockScenarioPlan, DiskPlan};
use crate::faulty_disk::{DiskFaults, FaultyDisk};
use octokv_base::{BufferPool, NamespaceId};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::HashEngine;
use octokv_node::block_backend::{BlockBackend, BlockVolume};
use octokv_node::monitor::Monitor;
use octokv_node::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_node::{CoreMessage, ReactorLoop, ReactorParts, new_reactor};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, SubsystemConfig, Target};
use octokv_runtime::simulated::{HostFailure, SimDiskId, SimEnv, SimHostId, SimSockets};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, Mailbox, ReactorHandle, Sockets, mesh};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const MAILBOX_MESSAGES: usize = 4;
const NQN: &str = "nqn.2026-11.io.octokv:node";

type PendingNamespaces = Rc<RefCell<Vec<(NamespaceId, NamespaceBackend<HashEngine>)>>>;

struct BlockNodeCore {
    handle: ReactorHandle,
    channel: DeviceHandle,
    pool: BufferPool,
    namespaces: Rc<NamespaceTable<HashEngine>>,
    /// Namespaces that the core attaches before its next iteration.
    pending_namespaces: PendingNamespaces,
    connections: Rc<Cell<usize>>,
    requests: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

struct RunningBlockNode {
    target: Arc<Target>,
    cores: Vec<BlockNodeCore>,
}

/// Backends of a removed namespace, until the last request on it ends.
#[derive(Default)]
pub struct DrainingBackends(Vec<Rc<NamespaceBackend<HashEngine>>>);

impl DrainingBackends {
    /// Whether the last request on the namespace has ended.
    pub fn is_drained(&self) -> bool {
        self.0.iter().all(|backend| Rc::strong_count(backend) == 1)
    }
}

/// The node and its host.
pub struct BlockNodeUnderTest {
    sim: SimEnv,
    /// The simulated host.
    pub host: SimHostId,
    disks: Vec<SimDiskId>,
    plan: BlockScenarioPlan,
    faults: DiskFaults,
    /// Whether cores publish whether they are idle after each iteration; off by default because it costs time.
    tracks_idle: Rc<Cell<bool>>,
    /// The monitor of each start.
    monitors: Vec<Arc<Monitor>>,
    running: Option<RunningBlockNode>,
}

impl BlockNodeUnderTest {
    /// A stopped node with empty disks.
    pub fn new(sim: &SimEnv, plan: &BlockScenarioPlan, faults: DiskFaults) -> BlockNodeUnderTest {
        let host = sim.add_host();
        let disks = plan.disks.iter().map(|disk| sim.add_disk(host, disk.disk)).collect();
        let (sim, plan) = (sim.clone(), plan.clone());
        BlockNodeUnderTest {
            sim,
            host,
            disks,
            plan,
            faults,
            tracks_idle: Rc::default(),
            monitors: Vec::new(),
            running: None,
        }
    }

    /// Address of its listener.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.sim.address(self.host), PORT)
    }

    /// The contents of a disk.
    pub fn read_disk(&self, disk: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.plan.disks[disk].disk.size_bytes as usize];
        self.sim.read_disk(self.disks[disk], 0, &mut bytes);
        bytes
    }

    /// Starts the node without namespaces.
    pub fn boot(&mut self) {
        self.sim.start_host(self.host);
        let plan = &self.plan.node;
        let config = SubsystemConfig {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            h2c_data_bytes_max: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            outbox_bytes_max: plan.outbox_bytes_max,
            ..SubsystemConfig::new(NQN)
        };
        let target = Target::new(config, Vec::new());
        target.set_listeners(vec![self.address()]);
        let monitor = plan.scheduling.start_monitor(self.monitors.len(), plan.cores);
        self.monitors.push(Arc::clone(&monitor));
        let wakers: Vec<_> = (0..plan.cores).map(|_| CoreWaker::without_eventfd()).collect();
        let mailboxes = mesh(&wakers, MAILBOX_MESSAGES);
        let cores = mailboxes.into_iter().zip(&wakers).enumerate();
        let start = |(index, (mailbox, waker)): (usize, (Mailbox<CoreMessage>, &Arc<CoreWaker>))| {
            self.start_core(index, mailbox, Arc::clone(waker), &target, &monitor)
        };
        let cores = cores.map(start).collect();
        self.running = Some(RunningBlockNode { target, cores });
    }

    fn start_core(
        &self,
        index: usize,
        mailbox: Mailbox<CoreMessage>,
        waker: Arc<CoreWaker>,
        target: &Arc<Target>,
        monitor: &Arc<Monitor>,
    ) -> BlockNodeCore {
        let channel =
            DeviceHandle::new(Box::new(self.sim.device_queue(self.host)), self.plan.node.device_depth);
        let handle = ReactorHandle::new(waker, channel.clone(), CpuTime::simulated());
        let pool = BufferPool::new(self.plan.node.pool_bytes);
        let namespaces: Rc<NamespaceTable<HashEngine>> = Rc::default();
        let mut sockets = self.sim.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("the only listener of this host"));
        }
        let mut reactor_loop = new_reactor(ReactorParts {
            sockets,
            local_address: |_: &SimSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            namespaces: Rc::clone(&namespaces),
            pool: pool.clone(),
            requests_max: self.plan.node.requests_max,
            monitor: Arc::clone(monitor),
            costs: self.plan.node.scheduling.costs,
        });
        let (connections, requests, is_idle) = (Rc::default(), Rc::default(), Rc::new(Cell::new(true)));
        let pending_namespaces = PendingNamespaces::default();
        let (attaching, served) = (Rc::clone(&pending_namespaces), Rc::clone(&namespaces));
        let core = BlockNodeCore {
            handle: handle.clone(),
            channel,
            pool,
            namespaces,
            pending_namespaces,
            connections,
            requests,
            is_idle,
        };
        let (count, begun, idle) =
            (Rc::clone(&core.connections), Rc::clone(&core.requests), Rc::clone(&core.is_idle));
        let tracks_idle = Rc::clone(&self.tracks_idle);
        let (scheduling_plan, monitor) = (self.plan.node.scheduling, Arc::clone(monitor));
        let (start, mut chosen) = (self.monitors.len() - 1, 0);
        self.sim.add_reactor(self.host, handle, move |now| {
            if !attaching.borrow().is_empty() {
                reactor_loop.fail_missing_namespaces(now);
                attaching.borrow_mut().drain(..).for_each(|(id, backend)| served.insert(id, backend));
            }
            if index == 0 {
                scheduling_plan.rotate_policy(&monitor, start, &mut chosen);
            }
            let busy = reactor_loop.run_iteration(now);
            if tracks_idle.get() {
                count.set(reactor_loop.connections());
                begun.set(reactor_loop.requests());
                idle.set(reactor_loop.is_drained());
            }
            busy
        });
        core
    }

    /// Number of reactor cores.
    pub fn cores(&self) -> usize {
        self.plan.node.cores
    }

    /// The target, or `None` while the node is down.
    pub fn target(&self) -> Option<&Arc<Target>> {
        self.running.as_ref().map(|running| &running.target)
    }

    /// State that all cores share for one attachment of a disk's namespace.
    pub fn volume(&self, disk: usize) -> Arc<BlockVolume> {
        let DiskPlan { disk, block_bytes, .. } = self.plan.disks[disk];
        BlockVolume::new(block_bytes, disk.size_bytes)
    }

    /// Attaches a namespace to one core.
    pub fn attach_namespace(&self, core: usize, disk: usize, id: NamespaceId, volume: &Arc<BlockVolume>) {
        let Some(running) = &self.running else { return };
        let core = &running.cores[core];
        let (pool, handle) = (core.pool.clone(), core.handle.clone());
        let (volume, device, name) =
            (Arc::clone(volume), self.device(core, disk), Rc::from("simulated disk"));
        let backend =
            NamespaceBackend::Block(BlockBackend { volume, device, pool, handle, device_name: name });
        core.pending_namespaces.borrow_mut().push((id, backend));
        core.handle.core_waker().notify();
    }

    /// Makes a namespace visible to hosts. REQUIRES: every core has it attached.
    pub fn publish_namespace(&self, disk: usize, id: NamespaceId, ana_group: u32) {
        let Some(running) = &self.running else { return };
        let DiskPlan { disk: config, block_bytes, .. } = self.plan.disks[disk];
        let added = running.target.add_namespace(NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: config.size_bytes / u64::from(block_bytes) * u64::from(block_bytes),
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group,
        });
        assert!(added.is_ok(), "the operator adds a namespace once");
    }

    /// Detaches a namespace from one core; `draining` takes its backend.
    pub fn detach_namespace(&self, core: usize, id: NamespaceId, draining: &mut DrainingBackends) {
        let Some(running) = &self.running else { return };
        running.cores[core].pending_namespaces.borrow_mut().retain(|(pending, _)| *pending != id);
        draining.0.extend(running.cores[core].namespaces.remove(id));
    }

    fn device(&self, core: &BlockNodeCore, disk: usize) -> Rc<dyn Device> {
        let source = self.sim.device_source(self.disks[disk]);
        let blocks = source.size_bytes / u64::from(source.block_bytes);
        let geometry = Geometry { block_bytes: source.block_bytes, blocks, volatile: false };
        let file = core.channel.open(&source).expect("a simulated disk opens on a simulated queue");
        let device = FileDevice::new(core.channel.clone(), file, geometry, source.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), core.handle.clone()))
    }

    /// Crashes the node; tasks in progress are dropped.
    pub fn stop(&mut self, stop: HostFailure) {
        self.running = None;
        self.faults.clear();
        self.sim.stop_host(self.host, stop);
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
        for core in self.running.iter().flat_map(|running| &running.cores) {
            core.is_idle.set(false);
            core.handle.core_waker().notify();
        }
    }

    /// Whether no connection, request or device operation is left. REQUIRES: idle tracking is on.
    pub fn is_quiescent(&self) -> bool {
        let is_core_quiescent = |core: &BlockNodeCore| {
            core.is_idle.get() && core.connections.get() == 0 && core.channel.in_flight() == 0
        };
        self.running.as_ref().is_none_or(|running| running.cores.iter().all(is_core_quiescent))
    }

    /// Describes resources in use, or `None`. REQUIRES: the node is quiescent.
    pub fn find_leak(&self) -> Option<String> {
        let running = self.running.as_ref()?;
        for (index, core) in running.cores.iter().enumerate() {
            let (connections, requests) = (core.connections.get(), core.requests.get());
            let (bytes, in_flight) = (core.pool.in_use_bytes(), core.channel.in_flight());
            if connections + requests + bytes + in_flight > 0 {
                return Some(format!(
                    "core {index} keeps {connections} connections, {requests} requests, {bytes} B of buffers, \
                     {in_flight} device operations"
                ));
            }
        }
        let (connections, controllers) =
            (running.target.connection_count(), running.target.controllers().len());
        (connections + controllers > 0)
            .then(|| format!("the target keeps {connections} connections, {controllers} controllers"))
    }
}
