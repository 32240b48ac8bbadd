//! The node under test: the production reactors, target and block store on a virtual host with several disks,
//! whose namespaces come and go while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──attach, detach (as the real node orders its cores)──▶ Up ──stop──▶ Off
//! ```
//! In: when to start and stop it, which disk to serve as which namespace. Out: what is in use.

use super::scenario::{BlockScenarioPlan, DiskPlan};
use crate::faulty_disk::{DiskFaults, FaultyDisk};
use octokv_base::{BufferPool, NamespaceId};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::HashEngine;
use octokv_node::block_backend::{BlockBackend, BlockVolume};
use octokv_node::monitor::Monitor;
use octokv_node::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_node::{CoreMessage, ReactorLoop, ReactorParts, reactor};
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

type ArrivingNamespaces = Rc<RefCell<Vec<(NamespaceId, NamespaceBackend<HashEngine>)>>>;

struct BlockNodeCore {
    handle: ReactorHandle,
    channel: DeviceHandle,
    pool: BufferPool,
    stores: Rc<NamespaceTable<HashEngine>>,
    /// Those that it takes in before its next turn.
    arriving: ArrivingNamespaces,
    connections: Rc<Cell<usize>>,
    requests: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

struct RunningBlockNode {
    target: Arc<Target>,
    cores: Vec<BlockNodeCore>,
}

/// The stores of a namespace that was removed, until nobody uses them.
pub struct DrainingBackends(Vec<Rc<NamespaceBackend<HashEngine>>>);

impl DrainingBackends {
    /// Whether the last request on it has ended.
    pub fn is_drained(&self) -> bool {
        self.0.iter().all(|store| Rc::strong_count(store) == 1)
    }
}

/// The node's host.
pub struct BlockNodeUnderTest {
    sim: SimEnv,
    /// Its host.
    pub host: SimHostId,
    disks: Vec<SimDiskId>,
    plan: BlockScenarioPlan,
    faults: DiskFaults,
    /// Whether cores look after each turn whether they are idle; costs time.
    tracks_idle: Rc<Cell<bool>>,
    /// The monitors of all its starts.
    monitors: Vec<Arc<Monitor>>,
    running: Option<RunningBlockNode>,
}

impl BlockNodeUnderTest {
    /// A node with empty disks, off.
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.sim.address(self.host), PORT)
    }

    /// All that a disk holds now.
    pub fn read_disk(&self, disk: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.plan.disks[disk].disk.size_bytes as usize];
        self.sim.read_disk(self.disks[disk], 0, &mut bytes);
        bytes
    }

    /// Starts it: it serves no namespace yet.
    pub fn boot(&mut self) {
        self.sim.start_host(self.host);
        let plan = &self.plan.node;
        let settings = SubsystemConfig {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            h2c_data_bytes_max: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            outbox_bytes_max: plan.outbox_bytes_max,
            ..SubsystemConfig::new(NQN)
        };
        let target = Target::new(settings, Vec::new());
        target.set_listeners(vec![self.address()]);
        let scheduling = plan.scheduling.start_monitor(self.monitors.len(), plan.cores);
        self.monitors.push(Arc::clone(&scheduling));
        let doorbells: Vec<_> = (0..plan.cores).map(|_| CoreWaker::without_eventfd()).collect();
        let mailboxes = mesh(&doorbells, MAILBOX_MESSAGES);
        let cores = mailboxes.into_iter().zip(&doorbells).enumerate();
        let start = |(index, (mailbox, doorbell)): (usize, (Mailbox<CoreMessage>, &Arc<CoreWaker>))| {
            self.start_core(index, mailbox, Arc::clone(doorbell), &target, &scheduling)
        };
        let cores = cores.map(start).collect();
        self.running = Some(RunningBlockNode { target, cores });
    }

    fn start_core(
        &self,
        index: usize,
        mailbox: Mailbox<CoreMessage>,
        doorbell: Arc<CoreWaker>,
        target: &Arc<Target>,
        scheduling: &Arc<Monitor>,
    ) -> BlockNodeCore {
        let channel =
            DeviceHandle::new(Box::new(self.sim.device_queue(self.host)), self.plan.node.device_depth);
        let handle = ReactorHandle::new(doorbell, channel.clone(), CpuTime::simulated());
        let pool = BufferPool::new(self.plan.node.pool_bytes);
        let stores: Rc<NamespaceTable<HashEngine>> = Rc::default();
        let mut sockets = self.sim.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("nobody else is on this host"));
        }
        let mut reactor_loop = reactor(ReactorParts {
            sockets,
            local_address: |_: &SimSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            namespaces: Rc::clone(&stores),
            pool: pool.clone(),
            requests_max: self.plan.node.requests_max,
            monitor: Arc::clone(scheduling),
            costs: self.plan.node.scheduling.costs,
        });
        let (connections, requests, is_idle) = (Rc::default(), Rc::default(), Rc::new(Cell::new(true)));
        let arriving = ArrivingNamespaces::default();
        let (newcomers, served) = (Rc::clone(&arriving), Rc::clone(&stores));
        let core = BlockNodeCore {
            handle: handle.clone(),
            channel,
            pool,
            stores,
            arriving,
            connections,
            requests,
            is_idle,
        };
        let (count, begun, idle) =
            (Rc::clone(&core.connections), Rc::clone(&core.requests), Rc::clone(&core.is_idle));
        let watched = Rc::clone(&self.tracks_idle);
        let (scheduling_plan, monitor) = (self.plan.node.scheduling, Arc::clone(scheduling));
        let (start, mut chosen) = (self.monitors.len() - 1, 0);
        self.sim.add_reactor(self.host, handle, move |now| {
            if !newcomers.borrow().is_empty() {
                reactor_loop.fail_missing_namespaces(now);
                newcomers.borrow_mut().drain(..).for_each(|(id, store)| served.insert(id, store));
            }
            if index == 0 {
                scheduling_plan.rotate_policy(&monitor, start, &mut chosen);
            }
            let busy = reactor_loop.run_iteration(now);
            if watched.get() {
                count.set(reactor_loop.connections());
                begun.set(reactor_loop.requests());
                idle.set(reactor_loop.is_drained());
            }
            busy
        });
        core
    }

    /// How many cores it has.
    pub fn cores(&self) -> usize {
        self.plan.node.cores
    }

    /// The target, while it is up.
    pub fn target(&self) -> Option<&Arc<Target>> {
        self.running.as_ref().map(|up| &up.target)
    }

    /// What the cores of a disk's namespace share, for one time that it is served.
    pub fn volume(&self, disk: usize) -> Arc<BlockVolume> {
        let DiskPlan { disk, block_bytes, .. } = self.plan.disks[disk];
        BlockVolume::new(block_bytes, disk.size_bytes)
    }

    /// Gives one core its store of a namespace.
    pub fn attach_namespace(&self, core: usize, disk: usize, id: NamespaceId, volume: &Arc<BlockVolume>) {
        let Some(up) = &self.running else { return };
        let core = &up.cores[core];
        let (pool, handle) = (core.pool.clone(), core.handle.clone());
        let (volume, device, name) = (Arc::clone(volume), self.device(core, disk), Rc::from("virtual disk"));
        let store = NamespaceBackend::Block(BlockBackend { volume, device, pool, handle, device_name: name });
        core.arriving.borrow_mut().push((id, store));
        core.handle.core_waker().notify();
    }

    /// Shows a namespace to hosts.
    pub fn publish_namespace(&self, disk: usize, id: NamespaceId, ana_group: u32) {
        let Some(up) = &self.running else { return };
        let DiskPlan { disk: settings, block_bytes, .. } = self.plan.disks[disk];
        let added = up.target.add_namespace(NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: settings.size_bytes / u64::from(block_bytes) * u64::from(block_bytes),
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group,
        });
        assert!(added.is_ok(), "the operator adds a namespace once");
    }

    /// Takes a namespace from one core.
    pub fn detach_namespace(&self, core: usize, id: NamespaceId, draining: &mut DrainingBackends) {
        let Some(up) = &self.running else { return };
        up.cores[core].arriving.borrow_mut().retain(|(newcomer, _)| *newcomer != id);
        draining.0.extend(up.cores[core].stores.remove(id));
    }

    /// Nothing that leaves yet.
    pub fn new_draining() -> DrainingBackends {
        DrainingBackends(Vec::new())
    }

    fn device(&self, core: &BlockNodeCore, disk: usize) -> Rc<dyn Device> {
        let media = self.sim.device_source(self.disks[disk]);
        let blocks = media.size_bytes / u64::from(media.block_bytes);
        let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
        let file = core.channel.open(&media).expect("a virtual disk opens on a virtual queue");
        let device = FileDevice::new(core.channel.clone(), file, geometry, media.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), core.handle.clone()))
    }

    /// Ends it. What tasks left undone is left undone.
    pub fn stop(&mut self, stop: HostFailure) {
        self.running = None;
        self.faults.clear();
        self.sim.stop_host(self.host, stop);
    }

    /// Requests that ran on another core than that of their connection, and those that waited for their turn among
    /// tenants, in all its lives.
    pub fn offloaded_and_queued(&self) -> (u64, u64) {
        self.monitors
            .iter()
            .map(|monitor| monitor.offloaded_and_queued())
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Whether cores tell what they do; they know it only after their next turn.
    pub fn track_idle(&self, on: bool) {
        self.tracks_idle.set(on);
        for core in self.running.iter().flat_map(|up| &up.cores) {
            core.is_idle.set(false);
            core.handle.core_waker().notify();
        }
    }

    /// Whether no connection, request or device operation is left.
    pub fn is_quiescent(&self) -> bool {
        let is_core_quiescent = |core: &BlockNodeCore| {
            core.is_idle.get() && core.connections.get() == 0 && core.channel.in_flight() == 0
        };
        self.running.as_ref().is_none_or(|up| up.cores.iter().all(is_core_quiescent))
    }

    /// What is in use although nothing should be, or `None`.
    pub fn find_leak(&self) -> Option<String> {
        let up = self.running.as_ref()?;
        for (index, core) in up.cores.iter().enumerate() {
            let (links, requests) = (core.connections.get(), core.requests.get());
            let (bytes, flying) = (core.pool.in_use_bytes(), core.channel.in_flight());
            if links + requests + bytes + flying > 0 {
                return Some(format!(
                    "core {index} keeps {links} connections, {requests} requests, {bytes} B of buffers, \
                     {flying} device operations"
                ));
            }
        }
        let (connections, controllers) = (up.target.connection_count(), up.target.controllers().len());
        (connections + controllers > 0)
            .then(|| format!("the target keeps {connections} connections, {controllers} controllers"))
    }
}
