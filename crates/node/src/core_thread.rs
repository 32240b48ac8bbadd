//! One core of a node on a thread of its own: runs a [`NodeCore`] on the kernel's sockets and devices until the node
//! stops.
//!
//! ```text
//!   prepared ─▶ start reported ─▶ iterations, sleep ─▶ node stops: drains ─▶ all cores drained, volumes idle
//!            ─▶ outgoing sessions closed ─▶ end
//! ```
//! Invariants: a core reports its start exactly once, even if it panics; a batch or checkpoint in progress is written to
//! its end, whatever hosts do. Tested by `node.rs`.

use crate::config::NodeConfig;
use crate::control::ControlQueue;
use crate::core_namespaces::CoreNamespace;
use crate::core_roles::CoreRoles;
use crate::device_driver::open_core_queue;
use crate::error::StartError;
use crate::monitor::Monitor;
use crate::namespace_device::NamespaceDevice;
use crate::node_core::{CoreParts, DRAIN_POLL_INTERVAL, NodeCore};
use crate::reactor::{CoreMessage, SimulatedCosts};
use octokv_base::Nanos;
use octokv_nvmf::Target;
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, IdlePolicy, KernelSockets, Mailbox, ReactorHandle};
use octokv_sys::clock;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// State shared by the cores of a node.
pub(crate) struct NodeShared {
    pub stopping: AtomicBool,
    pub core_wakers: Vec<Arc<CoreWaker>>,
    pub control_queues: Vec<Arc<ControlQueue<NamespaceDevice>>>,
    pub monitor: Arc<Monitor>,
    /// By core: whether it has nothing left to finish. All run until all are drained, since cores work for each other.
    pub drained: Vec<AtomicBool>,
}

impl NodeShared {
    /// Publishes whether core `index` is drained, and returns whether all are. Once true it stays true: a drained core
    /// has no request on another core and accepts none.
    fn all_drained(&self, index: usize, drained: bool) -> bool {
        self.set_drained(index, drained);
        self.drained.iter().all(|drained| drained.load(Ordering::Acquire))
    }

    /// Sets whether a core has nothing left to finish. Becoming drained wakes all cores, since the others may wait only
    /// for that.
    fn set_drained(&self, core: usize, drained: bool) {
        let was_drained = self.drained[core].swap(drained, Ordering::AcqRel);
        if drained && !was_drained {
            self.wake_all();
        }
    }

    /// Wakes every core.
    pub fn wake_all(&self) {
        self.core_wakers.iter().for_each(|core_waker| core_waker.notify());
    }
}

/// Addresses that a core listens on, or why it did not start.
pub(crate) type StartReport = Result<Vec<SocketAddr>, StartError>;

/// Reports one core's start exactly once and marks the core drained when it is dropped: at the end of its thread, on a
/// panic, or if the thread was never spawned. So neither the starter nor another core waits for a core that is gone.
pub(crate) struct CoreGuard {
    index: usize,
    shared: Arc<NodeShared>,
    processor: usize,
    startup_tx: Option<Sender<StartReport>>,
}

impl CoreGuard {
    /// The guard of core `index` on `processor`. REQUIRES: made before the thread is spawned, and moved into it.
    pub fn new(
        index: usize,
        processor: usize,
        shared: &Arc<NodeShared>,
        startup_tx: Sender<StartReport>,
    ) -> CoreGuard {
        CoreGuard { index, processor, shared: Arc::clone(shared), startup_tx: Some(startup_tx) }
    }

    fn report(&mut self, report: StartReport) {
        if let Some(startup_tx) = self.startup_tx.take() {
            // The starter has gone if another core failed first.
            let _ = startup_tx.send(report);
        }
    }
}

impl Drop for CoreGuard {
    fn drop(&mut self) {
        let error = io::Error::other("its reactor thread ended during the start");
        self.report(Err(StartError::Core { core: self.processor, error }));
        self.shared.set_drained(self.index, true);
    }
}

/// One core before its thread runs: the parts that move to it.
pub(crate) struct CoreThread {
    pub index: usize,
    pub config: Arc<NodeConfig>,
    pub namespaces: Vec<CoreNamespace<NamespaceDevice>>,
    pub mailbox: Mailbox<CoreMessage>,
    pub target: Arc<Target>,
    pub shared: Arc<NodeShared>,
    pub guard: CoreGuard,
}

/// A core that is ready to serve.
struct PreparedCore {
    index: usize,
    core: NodeCore<KernelSockets, NamespaceDevice>,
    idle_policy: IdlePolicy,
}

impl CoreThread {
    /// Prepares the core, reports its start and runs it until the node stops. REQUIRES: called on the core's own thread,
    /// since sockets, device queue and engines belong to the thread that makes them.
    ///
    /// Whether it leaves operations with the device queue that may never end.
    pub fn run(self) -> bool {
        let CoreThread { index, config, namespaces, mailbox, target, shared, mut guard } = self;
        let prepared = PreparedCore::new(index, &config, namespaces, mailbox, target, &shared);
        match prepared.map_err(|error| error.on_core(guard.processor)) {
            Ok(prepared) => {
                guard.report(Ok(prepared.core.addresses().to_vec()));
                prepared.run(&config, &shared)
            }
            Err(error) => {
                guard.report(Err(error));
                false
            }
        }
    }
}

impl PreparedCore {
    fn new(
        index: usize,
        config: &NodeConfig,
        namespaces: Vec<CoreNamespace<NamespaceDevice>>,
        mailbox: Mailbox<CoreMessage>,
        target: Arc<Target>,
        shared: &NodeShared,
    ) -> Result<PreparedCore, StartError> {
        let core_waker = Arc::clone(&shared.core_wakers[index]);
        let queue = open_core_queue(config.driver, config.device_depth, &core_waker, index)?;
        let devices = DeviceHandle::new(queue, config.device_depth);
        let mut sockets = KernelSockets::new().map_err(StartError::System)?;
        let idle_policy = IdlePolicy::new(
            config.polling,
            Arc::clone(&core_waker),
            &mut sockets,
            devices.completion_eventfd(),
        )
        .map_err(StartError::System)?;
        let parts = CoreParts {
            index,
            sockets,
            roles: CoreRoles::with_drive_cores(config.drive_cores.len()),
            listen: &config.listen,
            handle: ReactorHandle::new(core_waker, devices, CpuTime::measured()),
            mailbox,
            control_queue: Arc::clone(&shared.control_queues[index]),
            target,
            monitor: Arc::clone(&shared.monitor),
            buffer_bytes: config.buffer_bytes,
            requests_max: config.requests_max,
            costs: SimulatedCosts::default(),
        };
        Ok(PreparedCore { index, core: NodeCore::new(parts, namespaces)?, idle_policy })
    }

    /// Runs the core until the node stops. Whether it leaves operations with the device queue.
    fn run(self, config: &NodeConfig, shared: &NodeShared) -> bool {
        let PreparedCore { index, mut core, mut idle_policy } = self;
        let handle = core.handle().clone();
        let mut stop_at = Nanos::NEVER;
        loop {
            let now = clock::now();
            let worked = core.run_iteration(now);
            if shared.stopping.load(Ordering::Acquire) && stop_at == Nanos::NEVER {
                core.begin_drain();
                stop_at = now + config.shutdown_timeout;
            }
            let is_finished =
                now >= stop_at || (stop_at != Nanos::NEVER && shared.all_drained(index, core.is_drained()));
            if is_finished && core.are_volumes_idle() && (core.close_peers() || now >= stop_at) {
                break;
            }
            let poll_at = if is_finished { now + DRAIN_POLL_INTERVAL } else { stop_at };
            let deadline = handle.next_deadline().min(poll_at);
            let device_busy = handle.device_operations_in_flight() > 0;
            idle_policy.spin_or_sleep(worked, clock::now(), device_busy, deadline, core.sockets());
        }
        tracing::debug!(core = index, "reactor stopped");
        if clock::now() >= stop_at && handle.device_operations_in_flight() > 0 {
            // They have outlasted the time to stop, and may hang.
            handle.devices().give_up_in_flight();
        }
        let leaves_operations = handle.devices().leaves_operations();
        handle.shutdown();
        leaves_operations
    }
}

/// The main function of a core's thread.
pub(crate) type CoreMain = Box<dyn FnOnce() + Send>;

/// The thread of a core.
pub(crate) struct RunningCore {
    thread: JoinHandle<()>,
    /// Receives whether the device queue was left with operations that may never end, when the core has ended in order;
    /// closed without a message if its thread panicked.
    ended_rx: Mutex<Receiver<bool>>,
}

impl RunningCore {
    /// Starts a core on the thread that `spawn` starts.
    ///
    /// # Errors
    /// That of `spawn`.
    pub fn start(
        spawn: impl FnOnce(CoreMain) -> io::Result<JoinHandle<()>>,
        core: CoreThread,
    ) -> io::Result<RunningCore> {
        let (ended_tx, ended_rx) = channel();
        let main = move || {
            let leaves_operations = core.run();
            // A node whose start failed has dropped the receiver.
            let _ = ended_tx.send(leaves_operations);
        };
        Ok(RunningCore { thread: spawn(Box::new(main))?, ended_rx: Mutex::new(ended_rx) })
    }

    /// Whether its main function has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the core has ended, and for its thread too unless that has left operations with the kernel, which ends the thread only
    /// with them. Whether the core ended in order.
    pub fn join(self) -> bool {
        let ended_rx = self.ended_rx.into_inner().unwrap_or_else(PoisonError::into_inner);
        let ended = ended_rx.recv();
        if ended == Ok(true) { true } else { self.thread.join().is_ok() && ended.is_ok() }
    }
}
