//! The parts that all nodes under test share: the production reactors and target on a simulated host.
//!
//! ```text
//!   Off ──start: target, mailboxes, a reactor per core──▶ Running ──stop: a crash──▶ Off
//! ```
//! In: the plan of the node, a target, and the namespaces that each core serves. Out: resources in use, counters of
//! the scheduler. Invariant: a core reports itself idle only after an iteration with idle tracking turned on.

use crate::faulty_disk::{DiskFaults, FaultyDisk};
use crate::scenario::NodePlan;
use octokv_base::{BufferPool, NamespaceId};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::HashEngine;
use octokv_node::monitor::Monitor;
use octokv_node::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_node::{CoreMessage, ReactorLoop, ReactorParts, new_reactor};
use octokv_nvmf::{SubsystemConfig, Target};
use octokv_runtime::simulated::{HostFailure, SimDiskId, SimEnv, SimHostId};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, Mailbox, ReactorHandle, Sockets, mesh};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const MAILBOX_MESSAGES: usize = 4;
const NQN: &str = "nqn.2026-11.io.octokv:node";

type PendingNamespaces = Rc<RefCell<Vec<(NamespaceId, NamespaceBackend<HashEngine>)>>>;

/// One core of a running node, as seen from outside of its reactor.
pub struct SimCore {
    /// Its reactor.
    pub handle: ReactorHandle,
    /// Buffer memory of its requests.
    pub pool: BufferPool,
    /// Namespaces that it serves.
    pub namespaces: Rc<NamespaceTable<HashEngine>>,
    /// Namespaces that it attaches before its next iteration.
    pub pending_namespaces: PendingNamespaces,
    connections: Rc<Cell<usize>>,
    requests: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

/// A running node.
pub struct RunningNode {
    /// Its target.
    pub target: Arc<Target>,
    /// Its cores.
    pub cores: Vec<SimCore>,
}

/// A node on a simulated host.
pub struct SimNode {
    /// The simulation.
    pub sim: SimEnv,
    /// The simulated host.
    pub host: SimHostId,
    /// Its configuration.
    pub plan: NodePlan,
    faults: DiskFaults,
    /// Whether cores publish whether they are idle after each iteration; off by default because it costs time.
    tracks_idle: Rc<Cell<bool>>,
    /// The monitor of each start.
    monitors: Vec<Arc<Monitor>>,
    running: Option<RunningNode>,
}

impl SimNode {
    /// A stopped node on a new host.
    pub fn new(sim: &SimEnv, plan: NodePlan, faults: DiskFaults) -> SimNode {
        SimNode {
            sim: sim.clone(),
            host: sim.add_host(),
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

    /// Configuration of its target.
    pub fn subsystem_config(&self) -> SubsystemConfig {
        let plan = &self.plan;
        SubsystemConfig {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            h2c_data_bytes_max: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            send_buffer_bytes_max: plan.send_buffer_bytes_max,
            ..SubsystemConfig::new(NQN)
        }
    }

    /// A device queue of the host.
    pub fn device_queue(&self) -> DeviceHandle {
        DeviceHandle::new(Box::new(self.sim.device_queue(self.host)), self.plan.device_depth)
    }

    /// Opens a disk of the host on a reactor, with the injected faults.
    pub fn open_device(&self, disk: SimDiskId, handle: &ReactorHandle) -> Rc<dyn Device> {
        let source = self.sim.device_source(disk);
        let blocks = source.size_bytes / u64::from(source.block_bytes);
        let geometry = Geometry { block_bytes: source.block_bytes, blocks, volatile: false };
        let queue = handle.devices();
        let file = queue.open(&source).expect("a simulated disk opens on a simulated queue");
        let device = FileDevice::new(queue, file, geometry, source.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), handle.clone()))
    }

    /// Starts the reactors. `attach` prepares each core before its reactor runs.
    pub fn start(&mut self, target: Arc<Target>, mut attach: impl FnMut(&SimNode, usize, &SimCore)) {
        target.set_listeners(vec![self.address()]);
        let monitor = self.plan.scheduling.start_monitor(self.monitors.len(), self.plan.cores);
        self.monitors.push(Arc::clone(&monitor));
        let wakers: Vec<_> = (0..self.plan.cores).map(|_| CoreWaker::without_eventfd()).collect();
        let mailboxes = mesh(&wakers, MAILBOX_MESSAGES);
        let mut cores = Vec::with_capacity(self.plan.cores);
        for (index, (mailbox, waker)) in mailboxes.into_iter().zip(wakers).enumerate() {
            let core = SimCore {
                handle: ReactorHandle::new(waker, self.device_queue(), CpuTime::simulated()),
                pool: BufferPool::new(self.plan.pool_bytes),
                namespaces: Rc::default(),
                pending_namespaces: Rc::default(),
                connections: Rc::default(),
                requests: Rc::default(),
                is_idle: Rc::new(Cell::new(true)),
            };
            attach(self, index, &core);
            self.start_reactor(index, &core, mailbox, &target, &monitor);
            cores.push(core);
        }
        self.running = Some(RunningNode { target, cores });
    }

    fn start_reactor(
        &self,
        index: usize,
        core: &SimCore,
        mailbox: Mailbox<CoreMessage>,
        target: &Arc<Target>,
        monitor: &Arc<Monitor>,
    ) {
        let mut sockets = self.sim.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("the only listener of this host"));
        }
        let mut reactor_loop = new_reactor(ReactorParts {
            sockets,
            listeners,
            mailbox,
            core: index,
            handle: core.handle.clone(),
            target: Arc::clone(target),
            namespaces: Rc::clone(&core.namespaces),
            pool: core.pool.clone(),
            requests_max: self.plan.requests_max,
            monitor: Arc::clone(monitor),
            costs: self.plan.scheduling.costs,
        });
        let (pending, namespaces) = (Rc::clone(&core.pending_namespaces), Rc::clone(&core.namespaces));
        let (connections, requests, is_idle) =
            (Rc::clone(&core.connections), Rc::clone(&core.requests), Rc::clone(&core.is_idle));
        let tracks_idle = Rc::clone(&self.tracks_idle);
        let (scheduling_plan, monitor) = (self.plan.scheduling, Arc::clone(monitor));
        let (start, mut policy_changes) = (self.monitors.len() - 1, 0);
        self.sim.add_reactor(self.host, core.handle.clone(), move |now| {
            if !pending.borrow().is_empty() {
                reactor_loop.fail_missing_namespaces(now);
                pending.borrow_mut().drain(..).for_each(|(id, backend)| namespaces.insert(id, backend));
            }
            if index == 0 {
                scheduling_plan.rotate_policy(&monitor, start, &mut policy_changes);
            }
            let busy = reactor_loop.run_iteration(now);
            if tracks_idle.get() {
                connections.set(reactor_loop.connections());
                requests.set(reactor_loop.requests());
                is_idle.set(reactor_loop.is_drained());
            }
            busy
        });
    }

    /// The running node, or `None` while it is down.
    pub fn running(&self) -> Option<&RunningNode> {
        self.running.as_ref()
    }

    /// Crashes the node; tasks in progress are dropped.
    pub fn stop(&mut self, failure: HostFailure) {
        self.running = None;
        self.faults.clear();
        self.sim.stop_host(self.host, failure);
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
        let is_core_quiescent = |core: &SimCore| {
            core.is_idle.get() && core.connections.get() == 0 && core.handle.devices().in_flight() == 0
        };
        self.running.as_ref().is_none_or(|running| running.cores.iter().all(is_core_quiescent))
    }

    /// Describes resources in use, or `None`. REQUIRES: the node is quiescent.
    pub fn find_leak(&self) -> Option<String> {
        let running = self.running.as_ref()?;
        for (index, core) in running.cores.iter().enumerate() {
            let (connections, requests) = (core.connections.get(), core.requests.get());
            let (bytes, in_flight) = (core.pool.in_use_bytes(), core.handle.devices().in_flight());
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
