//! One core of a node on the kernel's sockets and devices: prepares its reactor, runs its iterations and executes the
//! node's control messages.
//!
//! ```text
//!   AttachNamespace ─▶ a backend of its own ─▶ response
//!   DetachNamespace ─▶ backend removed ─▶ its last request ended ─▶ (first core: the volume is idle) ─▶ response
//! ```
//! Invariants: every control message gets exactly one response, unless the node stops first; a core reports its start
//! exactly once, even if it panics; a batch or checkpoint in progress is written to its end, whatever hosts do.

use crate::abortable::{CancelToken, abortable};
use crate::config::{NodeConfig, REQUESTS_MAX};
use crate::device_driver::open_core_queue;
use crate::error::StartError;
use crate::kv_backend::KvBackend;
use crate::monitor::Monitor;
use crate::namespace_open::{CoreContext, NamespaceVolume, OpenNamespace};
use crate::namespace_table::{NamespaceBackend, NamespaceTable};
use crate::reactor::{CoreMessage, ReactorLoop, ReactorParts, SimulatedCosts, new_reactor};
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_engine::EngineError;
use octokv_engine::hash::HashEngine;
use octokv_nvmf::Target;
use octokv_runtime::device_queue::OPERATIONS_MAX;
use octokv_runtime::timer::TIMERS_MAX;
use octokv_runtime::waiter_queue::WAITERS_MAX;
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, IdlePolicy, KernelSockets, ListenerId, Mailbox, ReactorHandle, Sockets,
    Stage,
};
use octokv_sys::clock;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Poll interval of a core that waits for requests or volumes to end.
const DRAIN_POLL_INTERVAL: Nanos = Nanos::from_millis(1);

/// Control messages queued for one core: a namespace change and a status report, each under a lock of the node that
/// its sender holds until the response. A core that no longer responds is sent nothing more.
const CONTROL_MESSAGES_MAX: usize = 2;

/// Upper bound on the device operations of one request, and on its timers: a record and both copies of a batch, and a
/// timer for each under a drive profile, or one for a buffer.
const OPERATIONS_PER_REQUEST_MAX: usize = 4;
const _: () = assert!(OPERATIONS_PER_REQUEST_MAX * REQUESTS_MAX < OPERATIONS_MAX);
const _: () = assert!(OPERATIONS_PER_REQUEST_MAX * REQUESTS_MAX < TIMERS_MAX);

/// Upper bound on the cores of a node: the scheduler's core index has 16 bits.
const CORES_MAX: usize = 1 << 16;
// A request has one position in the queue of a key's lock or of a namespace's ranges.
const _: () = assert!(REQUESTS_MAX * CORES_MAX < WAITERS_MAX);

/// State shared by the cores of a node.
pub(crate) struct NodeShared {
    pub stopping: AtomicBool,
    pub core_wakers: Vec<Arc<CoreWaker>>,
    pub control_queues: Vec<ControlQueue>,
    pub monitor: Arc<Monitor>,
    /// By core: whether it has nothing left to finish. All run until all are drained, since cores work for each other.
    pub drained: Vec<AtomicBool>,
}

/// Control messages to one core.
#[derive(Default)]
pub(crate) struct ControlQueue {
    messages: Mutex<VecDeque<ControlMessage>>,
    /// Whether there are any: the core reads this flag each iteration instead of taking the lock.
    has_messages: AtomicBool,
}

impl ControlQueue {
    fn push(&self, message: ControlMessage) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(messages.len() < CONTROL_MESSAGES_MAX, "more than {CONTROL_MESSAGES_MAX} control messages");
        messages.push_back(message);
        drop(messages);
        self.has_messages.store(true, Ordering::Release);
    }

    fn take(&self) -> VecDeque<ControlMessage> {
        if !self.has_messages.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        self.has_messages.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl NodeShared {
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

    /// Queues a control message for a core and wakes it. REQUIRES: the caller holds the lock of its kind of message, and
    /// the core has responded to the last one.
    pub fn send_control(&self, core: usize, message: ControlMessage) {
        self.control_queues[core].push(message);
        self.core_wakers[core].notify();
    }
}

/// A command that a core executes between two iterations.
pub(crate) enum ControlMessage {
    /// Serve a namespace.
    AttachNamespace(Box<OpenNamespace>, Sender<io::Result<()>>),
    /// Stop serving a namespace; the response is sent when none of its requests is left.
    DetachNamespace(NamespaceId, Sender<io::Result<()>>),
    /// Report the core's status.
    ReportStatus(Sender<CoreStatus>),
}

/// Status of one core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreStatus {
    /// Open connections.
    pub connections: usize,
    /// Requests started or queued.
    pub requests: usize,
    /// Bytes of buffers in use.
    pub buffer_bytes_in_use: usize,
    /// Bytes of memory that the buffer pool occupies, free buffers included.
    pub buffer_bytes_resident: usize,
    /// Device operations in flight.
    pub device_operations: usize,
    /// Background tasks: one per Key Value namespace, on the first core.
    pub background_tasks: usize,
    /// Detached namespaces with requests in progress.
    pub draining_namespaces: usize,
    /// CPU time of useful work since the start, without empty polls and sleep.
    pub busy_time: Nanos,
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
    pub namespaces: Vec<OpenNamespace>,
    pub mailbox: Mailbox<CoreMessage>,
    pub target: Arc<Target>,
    pub shared: Arc<NodeShared>,
    pub guard: CoreGuard,
}

/// A core that is ready to serve.
struct PreparedCore {
    parts: ReactorParts<KernelSockets, HashEngine>,
    idle_policy: IdlePolicy,
    namespaces: CoreNamespaces,
}

/// The namespaces of a core, draining ones included.
struct CoreNamespaces {
    core: usize,
    table: Rc<NamespaceTable<HashEngine>>,
    pool: BufferPool,
    handle: ReactorHandle,
    served: Vec<ServedNamespace>,
    draining: Vec<DrainingNamespace>,
}

struct ServedNamespace {
    namespace: OpenNamespace,
    /// Cancels the volume's maintenance task; on the first core only.
    maintenance: Option<Rc<CancelToken>>,
}

struct DrainingNamespace {
    namespace: ServedNamespace,
    backend: Option<Rc<NamespaceBackend<HashEngine>>>,
    response_tx: Sender<io::Result<()>>,
}

impl CoreThread {
    /// Prepares the core, reports its start and runs it until the node stops. REQUIRES: called on the core's own thread,
    /// since sockets, device queue and engines belong to the thread that makes them.
    pub fn run(self) {
        let CoreThread { index, config, namespaces, mailbox, target, shared, mut guard } = self;
        let prepared = PreparedCore::new(index, &config, namespaces, mailbox, target, &shared);
        match prepared.map_err(|error| error.on_core(guard.processor)) {
            Ok(core) => {
                guard.report(Ok(core.parts.listeners.iter().map(|(_, address)| *address).collect()));
                core.run(&config, &shared);
            }
            Err(error) => guard.report(Err(error)),
        }
    }
}

/// Opens the configured addresses.
fn listen_all(
    sockets: &mut KernelSockets,
    addresses: &[SocketAddr],
) -> Result<Vec<(ListenerId, SocketAddr)>, StartError> {
    let listen = |&address| sockets.listen(address).map_err(|error| StartError::Listen { address, error });
    addresses.iter().map(listen).collect()
}

impl PreparedCore {
    fn new(
        index: usize,
        config: &NodeConfig,
        initial_namespaces: Vec<OpenNamespace>,
        mailbox: Mailbox<CoreMessage>,
        target: Arc<Target>,
        shared: &NodeShared,
    ) -> Result<PreparedCore, StartError> {
        let core_waker = Arc::clone(&shared.core_wakers[index]);
        let queue = open_core_queue(config.driver, config.device_depth, &core_waker, index)?;
        let devices = DeviceHandle::new(queue, config.device_depth);
        let mut sockets = KernelSockets::new().map_err(StartError::System)?;
        let listeners = if index == 0 { listen_all(&mut sockets, &config.listen)? } else { Vec::new() };
        let idle_policy = IdlePolicy::new(
            config.polling,
            Arc::clone(&core_waker),
            &mut sockets,
            devices.completion_eventfd(),
        )
        .map_err(StartError::System)?;
        let handle = ReactorHandle::new(core_waker, devices, CpuTime::measured());
        let pool = BufferPool::new(config.buffer_bytes);
        let mut namespaces = CoreNamespaces {
            core: index,
            table: Rc::default(),
            pool: pool.clone(),
            handle: handle.clone(),
            served: Vec::new(),
            draining: Vec::new(),
        };
        for namespace in initial_namespaces {
            namespaces.attach(namespace).map_err(StartError::System)?;
        }
        let parts = ReactorParts {
            sockets,
            listeners,
            mailbox,
            core: index,
            handle,
            target,
            namespaces: Rc::clone(&namespaces.table),
            pool,
            requests_max: config.requests_max,
            monitor: Arc::clone(&shared.monitor),
            costs: SimulatedCosts::default(),
        };
        Ok(PreparedCore { parts, idle_policy, namespaces })
    }

    fn run(self, config: &NodeConfig, shared: &NodeShared) {
        let PreparedCore { parts, mut idle_policy, mut namespaces } = self;
        let (handle, index) = (parts.handle.clone(), parts.core);
        let mut reactor = new_reactor(parts);
        let mut stop_at = Nanos::NEVER;
        loop {
            let now = clock::now();
            let mut worked = reactor.run_iteration(now);
            for message in shared.control_queues[index].take() {
                namespaces.handle_control(message, &mut reactor, now);
                // It may have left the reactor something to do.
                worked = true;
            }
            namespaces.reap_drained();
            if shared.stopping.load(Ordering::Acquire) && stop_at == Nanos::NEVER {
                reactor.begin_drain();
                stop_at = now + config.shutdown_timeout;
            }
            let is_finished =
                now >= stop_at || (stop_at != Nanos::NEVER && shared.all_drained(index, &mut reactor));
            if is_finished && namespaces.are_volumes_idle() {
                break;
            }
            let poll_soon = is_finished || !namespaces.draining.is_empty();
            let deadline =
                if poll_soon { now + DRAIN_POLL_INTERVAL } else { handle.next_deadline().min(stop_at) };
            let device_busy = handle.device_operations_in_flight() > 0;
            idle_policy.spin_or_sleep(worked, clock::now(), device_busy, deadline, reactor.sockets());
        }
        tracing::debug!(core = index, "reactor stopped");
        handle.shutdown();
    }
}

impl NodeShared {
    /// Publishes whether core `index` is drained, and returns whether all are. Once true it stays true: a drained core
    /// has no request on another core and accepts none.
    fn all_drained(&self, index: usize, reactor: &mut impl ReactorLoop<KernelSockets>) -> bool {
        self.set_drained(index, reactor.is_drained());
        self.drained.iter().all(|drained| drained.load(Ordering::Acquire))
    }
}

impl CoreNamespaces {
    /// Serves a namespace on this core; the first core also starts the volume's maintenance task.
    fn attach(&mut self, namespace: OpenNamespace) -> io::Result<()> {
        let CoreNamespaces { core, pool, handle, .. } = self;
        let backend = namespace.open_backend(&CoreContext { core: *core, pool, handle })?;
        let mut maintenance = None;
        if self.core == 0
            && let NamespaceBackend::Kv(kv_backend) = &backend
        {
            let cancel = Rc::new(CancelToken::default());
            self.handle.spawn(abortable(Rc::clone(&cancel), run_maintenance(Rc::clone(kv_backend))));
            maintenance = Some(cancel);
        }
        self.table.insert(namespace.config.id, backend);
        self.served.push(ServedNamespace { namespace, maintenance });
        Ok(())
    }

    fn handle_control(
        &mut self,
        message: ControlMessage,
        reactor: &mut impl ReactorLoop<KernelSockets>,
        now: Nanos,
    ) {
        match message {
            ControlMessage::AttachNamespace(namespace, response_tx) => {
                reactor.fail_missing_namespaces(now);
                drop(response_tx.send(self.attach(*namespace)));
            }
            ControlMessage::DetachNamespace(id, response_tx) => {
                let Some(index) = self.served.iter().position(|served| served.namespace.config.id == id)
                else {
                    // Attaching it failed on this core.
                    return drop(response_tx.send(Ok(())));
                };
                let (namespace, backend) = (self.served.remove(index), self.table.remove(id));
                self.draining.push(DrainingNamespace { namespace, backend, response_tx });
            }
            ControlMessage::ReportStatus(response_tx) => drop(response_tx.send(CoreStatus {
                connections: reactor.connections(),
                requests: reactor.requests(),
                buffer_bytes_in_use: self.pool.in_use_bytes(),
                buffer_bytes_resident: self.pool.resident_bytes(),
                device_operations: self.handle.device_operations_in_flight(),
                background_tasks: self.handle.background_count(),
                draining_namespaces: self.draining.len(),
                busy_time: self.busy_time(),
            })),
        }
    }

    /// Drops the detached namespaces whose last request has ended, and sends their responses.
    fn reap_drained(&mut self) {
        self.draining.retain_mut(|DrainingNamespace { namespace, backend, response_tx }| {
            if backend.as_ref().is_some_and(|backend| Rc::strong_count(backend) > 1) || !namespace.is_idle() {
                return true;
            }
            if let Some(maintenance) = namespace.maintenance.take() {
                // The task holds a reference to the backend until it is polled once more.
                maintenance.cancel();
                return true;
            }
            if let Some(NamespaceBackend::Kv(kv_backend)) = backend.as_deref()
                && Rc::strong_count(kv_backend) > 1
            {
                return true;
            }
            *backend = None;
            let _ = response_tx.send(Ok(()));
            false
        });
    }

    fn busy_time(&self) -> Nanos {
        let spent = self.handle.cpu_time().reader().stage_times();
        [Stage::Target, Stage::Kv, Stage::Device]
            .iter()
            .fold(Nanos::ZERO, |sum, &stage| sum + spent[stage as usize])
    }

    fn are_volumes_idle(&self) -> bool {
        let draining = self.draining.iter().map(|draining| &draining.namespace);
        self.served.iter().chain(draining).all(ServedNamespace::is_idle)
    }
}

impl ServedNamespace {
    /// Whether no batch or checkpoint is in progress.
    fn is_idle(&self) -> bool {
        match &self.namespace.volume {
            NamespaceVolume::Kv(volume) => volume.is_idle(),
            NamespaceVolume::Block(_) => true,
        }
    }
}

/// Checkpoints and other background work of a volume, on the first core.
async fn run_maintenance(kv_backend: Rc<KvBackend<HashEngine>>) {
    let device = Rc::clone(&kv_backend.device_name);
    let log_error =
        |error: EngineError| tracing::error!(device = &*device, %error, "volume maintenance failed");
    kv_backend.engine.maintain(&kv_backend.handle, log_error).await;
}
