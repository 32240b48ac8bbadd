//! The parts that all nodes under test share: the production cores and target on a simulated host.
//!
//! ```text
//!   Off ──start: target, mailboxes, the cores──▶ Running ──stop: a crash──▶ Off
//! ```
//! In: the plan of the node, a target, the namespaces to serve, changes of these. Out: resources in use, counters of the
//! scheduler. Invariant: a change is sent to a core between two simulation steps and waits for the core's response, as a
//! caller of [`octokv_node::RunningNode`] does.

use crate::faulty_disk::DiskFaults;
use crate::scenario::NodePlan;
use crate::sim_device::{SimDevice, SimStorage};
use crate::stats::PROGRESS_TIMEOUT;
use octokv_base::{NamespaceId, Nanos};
use octokv_device::supervised::DeviceSupervision;
use octokv_node::control::{CoreChangeError, attach_to_cores, detach_from_cores};
use octokv_node::monitor::Monitor;
use octokv_node::{
    ControlMessage, ControlQueue, CoreNamespace, CoreParts, CoreRoles, CoreStatus, NamespaceChange, NodeCore,
};
use octokv_nvmf::{NamespaceInfo, SubsystemConfig, Target};
use octokv_runtime::simulated::{HostFailure, SimEnv, SimHostId, SimSockets};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, mesh};
use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::channel;

/// The timeout of several disks of a node, longer than any delay of an operation.
pub const DEVICE_TIMEOUT: Nanos = Nanos::from_secs(2);

const PORT: u16 = 4420;
/// Messages of a ring between cores: so few that rings are full at times.
const MAILBOX_MESSAGES: usize = 2;
const NQN: &str = "nqn.2026-11.io.octokv:node";

/// One core of a running node. Its reactor in the simulation shares it.
pub struct SimCore {
    /// The core. REQUIRES: borrowed between simulation steps only.
    pub core: Rc<RefCell<NodeCore<SimSockets, SimDevice>>>,
    control_queue: Arc<ControlQueue<SimDevice>>,
}

/// A running node.
pub struct RunningNode {
    /// Its target.
    pub target: Arc<Target>,
    /// Its cores.
    pub cores: Vec<SimCore>,
}

/// The nodes of a simulation.
pub trait NodesUnderTest {
    /// Each node, by the index that faults name.
    fn sim_nodes(&self) -> Vec<&SimNode>;

    /// Whether no node has a connection, request or device operation left.
    fn are_quiescent(&self) -> bool {
        self.sim_nodes().into_iter().all(SimNode::is_quiescent)
    }

    /// Describes resources in use, or `None`. REQUIRES: all nodes are quiescent.
    fn find_leak(&self) -> Option<String> {
        let leaks = self.sim_nodes().into_iter().enumerate();
        leaks.into_iter().find_map(|(index, node)| Some(format!("node {index}: {}", node.find_leak()?)))
    }
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
    /// The monitor of each start.
    monitors: Vec<Arc<Monitor>>,
    running: Option<RunningNode>,
}

impl SimNode {
    /// A stopped node on a new host.
    pub fn new(sim: &SimEnv, plan: NodePlan, faults: DiskFaults) -> SimNode {
        SimNode { sim: sim.clone(), host: sim.add_host(), plan, faults, monitors: Vec::new(), running: None }
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

    /// The device on a storage of the host, which is the disk with this number, with the injected faults. Several are supervised, as a node does.
    pub fn device(&self, storage: &SimStorage, disk: usize) -> SimDevice {
        let count = self.plan.devices;
        let supervision = (count > 1).then(|| DeviceSupervision::new(DEVICE_TIMEOUT, count));
        storage.device(&self.sim, (&self.faults, disk), supervision)
    }

    /// Starts the cores, which serve `namespaces`.
    pub fn start(&mut self, target: Arc<Target>, namespaces: &[CoreNamespace<SimDevice>]) {
        target.set_listeners(vec![self.address()]);
        let start = self.monitors.len();
        let monitor = self.plan.scheduling.start_monitor(start, self.plan.cores);
        self.monitors.push(Arc::clone(&monitor));
        let wakers: Vec<_> = (0..self.plan.cores).map(|_| CoreWaker::without_eventfd()).collect();
        let mailboxes = mesh(&wakers, MAILBOX_MESSAGES);
        let mut cores = Vec::with_capacity(self.plan.cores);
        for (index, (mailbox, waker)) in mailboxes.into_iter().zip(wakers).enumerate() {
            let control_queue = ControlQueue::new(&waker);
            let parts = CoreParts {
                index,
                sockets: self.sim.sockets(self.host),
                roles: CoreRoles::with_drive_cores(self.plan.drive_cores),
                listen: &[self.address()],
                handle: ReactorHandle::new(waker, self.device_queue(), CpuTime::simulated()),
                mailbox,
                control_queue: Arc::clone(&control_queue),
                target: Arc::clone(&target),
                monitor: Arc::clone(&monitor),
                buffer_bytes: self.plan.pool_bytes,
                requests_max: self.plan.requests_max,
                costs: self.plan.scheduling.costs,
            };
            let core = NodeCore::new(parts, namespaces.iter().cloned());
            let core = Rc::new(RefCell::new(core.expect("address and disks of this host are free")));
            self.run_core(index, start, Rc::clone(&core), &monitor);
            cores.push(SimCore { core, control_queue });
        }
        self.running = Some(RunningNode { target, cores });
    }

    fn run_core(
        &self,
        index: usize,
        start: usize,
        core: Rc<RefCell<NodeCore<SimSockets, SimDevice>>>,
        monitor: &Arc<Monitor>,
    ) {
        let (scheduling_plan, monitor) = (self.plan.scheduling, Arc::clone(monitor));
        let mut policy_changes = 0;
        let handle = core.borrow().handle().clone();
        self.sim.add_reactor(self.host, handle, move |now| {
            if index == 0 {
                scheduling_plan.rotate_policy(&monitor, start, &mut policy_changes);
            }
            core.borrow_mut().run_iteration(now)
        });
    }

    /// Sends a change of namespaces to a core and runs the simulation until the response. `None` if the node is down or
    /// the response takes longer than [`PROGRESS_TIMEOUT`].
    pub fn change_namespaces(
        &self,
        core: usize,
        change: NamespaceChange<SimDevice>,
    ) -> Option<io::Result<()>> {
        let core = &self.running.as_ref()?.cores[core];
        let (response_tx, response_rx) = channel();
        core.control_queue.send(ControlMessage::ChangeNamespaces(change, response_tx));
        let mut response = None;
        self.sim.run_until_true(self.sim.now() + PROGRESS_TIMEOUT, || {
            response = response_rx.try_recv().ok();
            response.is_some()
        });
        response
    }

    /// Attaches a namespace on every core, then publishes it. `between` runs before each core.
    ///
    /// # Errors
    /// A core does not respond, or cannot open the device.
    pub fn add_namespace(
        &self,
        namespace: &CoreNamespace<SimDevice>,
        info: NamespaceInfo,
        mut between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let Some(RunningNode { target, .. }) = self.running() else { return Ok(()) };
        attach_to_cores(self.plan.cores, namespace, |core, change| {
            between();
            self.change_namespaces(core, change)
        })?;
        assert!(target.add_namespace(info).is_ok(), "the operator adds a namespace once");
        Ok(())
    }

    /// Unpublishes a namespace, then detaches it from core after core. `between` runs before each core.
    ///
    /// # Errors
    /// A core does not respond: requests of the namespace do not end.
    pub fn remove_namespace(
        &self,
        id: NamespaceId,
        mut between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let Some(RunningNode { target, .. }) = self.running() else { return Ok(()) };
        target.remove_namespace(id);
        detach_from_cores(self.plan.cores, id, |core, change| {
            between();
            self.change_namespaces(core, change)
        })
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

    /// Whether no connection, request or device operation is left.
    pub fn is_quiescent(&self) -> bool {
        let is_core_quiescent = |core: &SimCore| {
            let mut core = core.core.borrow_mut();
            let status = core.status();
            status.connections + status.device_operations == 0 && core.is_drained()
        };
        self.running.as_ref().is_none_or(|running| running.cores.iter().all(is_core_quiescent))
    }

    /// Describes resources in use, or `None`. REQUIRES: the node is quiescent.
    pub fn find_leak(&self) -> Option<String> {
        let running = self.running.as_ref()?;
        for (index, core) in running.cores.iter().enumerate() {
            let CoreStatus { connections, requests, buffer_bytes_in_use, device_operations, .. } =
                core.core.borrow().status();
            if connections + requests + buffer_bytes_in_use + device_operations > 0 {
                return Some(format!(
                    "core {index} keeps {connections} connections, {requests} requests, {buffer_bytes_in_use} B \
                     of buffers, {device_operations} device operations"
                ));
            }
        }
        let (connections, controllers) =
            (running.target.connection_count(), running.target.controllers().len());
        (connections + controllers > 0)
            .then(|| format!("the target keeps {connections} connections, {controllers} controllers"))
    }
}
