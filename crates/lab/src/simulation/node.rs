//! The node of an experiment: its volume on the SSD model, and its cores.
//!
//! In: a simulation, a host of it, costs of requests. Out: serving cores. Messages to other cores are delivered when
//! the work that produced them is done.

use super::delayed_sockets::DelayedSockets;
use super::parameters::CORES;
use super::ssd_device::{ModelledDrive, SharedSsd};
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_engine::{AnyVolume, Durability, FormatConfig, OpenConfig, Volume, WallClock};
use octokv_node::monitor::Monitor;
use octokv_node::{
    ControlQueue, CoreMessage, CoreNamespace, CoreParts, CoreRoles, NamespaceVolume, NodeCore, OpenDevice,
    SimulatedCosts, namespace_info,
};
use octokv_nvmf::{SubsystemConfig, Target};
use octokv_runtime::simulated::{SimEnv, SimHostId};
use octokv_runtime::{CoreWaker, CpuTime, DelayedMesh, DeviceHandle, ReactorHandle, delayed_mesh};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// The subsystem's name.
pub const NQN: &str = "nqn.2026-11.io.octokv:node";
/// Bytes of the buffer pool of a core, and of a client.
pub const POOL_BYTES: usize = 64 << 20;
const PORT: u16 = 4420;
const DEVICE_BYTES: u64 = 16 << 30;
const MAILBOX_MESSAGES: usize = 256;
/// Time limit of any wait in an experiment.
pub const COMPLETION_TIMEOUT: Nanos = Nanos::from_secs(120);

/// The volume, or why it did not open, when the task that opens it is done.
type OpenResult = Rc<RefCell<Option<Result<AnyVolume, String>>>>;

/// A node before it serves.
pub struct ExperimentNode<'a> {
    /// The simulation.
    pub sim: &'a SimEnv,
    /// Its host.
    pub host: SimHostId,
    /// Its monitor.
    pub scheduling: &'a Arc<Monitor>,
    /// Costs of requests on its cores.
    pub costs: SimulatedCosts,
    /// Whether its engine writes a journal.
    pub journal: bool,
}

/// A reactor handle of a host.
pub fn host_handle(sim: &SimEnv, host: SimHostId, waker: Arc<CoreWaker>) -> ReactorHandle {
    let channel = DeviceHandle::new(Box::new(sim.device_queue(host)), 1);
    ReactorHandle::new(waker, channel, CpuTime::simulated())
}

impl ExperimentNode<'_> {
    /// The address of its listener.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.sim.address(self.host), PORT)
    }

    /// Formats the drive and opens the volume, on a reactor of its own.
    ///
    /// # Errors
    /// A message if the volume does not open.
    pub fn open(&self, ssd: &Rc<RefCell<SharedSsd>>) -> Result<AnyVolume, String> {
        let handle = host_handle(self.sim, self.host, CoreWaker::without_eventfd());
        let device = self.drive(ssd).open_for_core(&handle).map_err(|error| error.to_string())?;
        let opened: OpenResult = Rc::default();
        let result = Rc::clone(&opened);
        handle.spawn(async move {
            let format = FormatConfig { seed: 7, ..FormatConfig::default() };
            let pool = BufferPool::new(POOL_BYTES);
            let open_config = OpenConfig {
                durability: Durability::Completed,
                cores: CORES,
                cache_bytes: 0,
                prepare_bytes: 0,
                compact_bytes_per_second: 0,
                tree: OpenConfig::TREE,
                swap_gap: OpenConfig::SWAP_GAP,
                clock: WallClock::default(),
                tokens: None,
            };
            let volume = async {
                let devices = [device];
                AnyVolume::format(&devices, &format).await?;
                AnyVolume::open(&devices, &pool, open_config, &format).await
            };
            let volume = volume.await.map_err(|error| format!("the volume: {error}"));
            *result.borrow_mut() = Some(volume);
        });
        let own = handle.clone();
        let task = self.sim.add_reactor(self.host, handle, move |now| {
            let fired = own.begin_iteration(now);
            fired + own.poll_background() > 0
        });
        self.sim.run_until_true(COMPLETION_TIMEOUT, || opened.borrow().is_some());
        self.sim.remove_reactor(task);
        let opened = opened.borrow_mut().take();
        opened.unwrap_or_else(|| Err("the volume does not open".to_owned()))
    }

    fn drive(&self, ssd: &Rc<RefCell<SharedSsd>>) -> ModelledDrive {
        ModelledDrive::new(ssd, (DEVICE_BYTES / 4096, !self.journal), self.sim)
    }

    /// Starts its cores.
    ///
    /// # Errors
    /// A message if a core does not start.
    pub fn serve(&self, ssd: &Rc<RefCell<SharedSsd>>, volume: &AnyVolume) -> Result<(), String> {
        let subsystem = SubsystemConfig::new(NQN);
        let namespace = namespace_info(volume, subsystem.key_bytes_max);
        let target = Target::new(subsystem, vec![namespace]);
        target.set_listeners(vec![self.address()]);
        let wakers: Vec<_> = (0..CORES).map(|_| CoreWaker::without_eventfd()).collect();
        let (mailboxes, carrier) = delayed_mesh(&wakers, MAILBOX_MESSAGES);
        let carrier = Rc::new(RefCell::new(carrier));
        for (index, (mailbox, waker)) in mailboxes.into_iter().zip(wakers).enumerate() {
            let control_queue = ControlQueue::new(&waker);
            let handle = host_handle(self.sim, self.host, waker);
            let parts = CoreParts {
                index,
                sockets: DelayedSockets::new(self.sim.sockets(self.host), &handle, self.sim),
                roles: CoreRoles::SHARED,
                listen: &[self.address()],
                handle,
                mailbox,
                control_queue,
                target: Arc::clone(&target),
                monitor: Arc::clone(self.scheduling),
                buffer_bytes: POOL_BYTES,
                requests_max: 1024,
                costs: self.costs,
            };
            let volume = NamespaceVolume::Kv(volume.clone());
            let namespace = CoreNamespace { id: NamespaceId(1), volume, devices: vec![self.drive(ssd)] };
            let core = NodeCore::new(parts, [namespace]).map_err(|error| error.to_string())?;
            self.run_core(index, core, Rc::clone(&carrier));
        }
        Ok(())
    }

    fn run_core(
        &self,
        index: usize,
        mut core: NodeCore<DelayedSockets, ModelledDrive>,
        carrier: Rc<RefCell<DelayedMesh<CoreMessage>>>,
    ) {
        let (sim, handle) = (self.sim.clone(), core.handle().clone());
        self.sim.add_reactor(self.host, handle.clone(), move |now| {
            let busy = core.run_iteration(now);
            // Messages of this iteration are delivered when its work is done.
            let done = now + handle.cpu_time().iteration_elapsed();
            loop {
                let Some((to, message)) = carrier.borrow_mut().take_sent(index) else { break };
                let carrier = Rc::clone(&carrier);
                sim.schedule_at(done, move || {
                    let delivered = carrier.borrow_mut().deliver(index, to, message);
                    assert!(delivered.is_ok(), "more messages than requests");
                });
            }
            busy
        });
    }
}
