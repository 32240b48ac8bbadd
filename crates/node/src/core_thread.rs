//! One core of a node on the kernel's sockets and devices: prepares its reactor, turns it, and does what the node
//! orders: namespaces in, namespaces out, reports.
//!
//! ```text
//!   Attach ─▶ a store of its own ─▶ answered
//!   Detach ─▶ no store any more ─▶ its last request ended ─▶ (first core: the volume is idle) ─▶ answered
//! ```
//! Invariants: an order is answered exactly once, unless the node stops before; whatever hosts do, a batch or
//! checkpoint that was begun is written to its end.

use crate::abortable::{CancelToken, abortable};
use crate::config::NodeConfig;
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
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, IdlePolicy, KernelSockets, Mailbox, ReactorHandle, Sockets, Stage,
};
use octokv_sys::clock;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// How soon a core that waits for the end of something looks again.
const DRAIN_POLL_INTERVAL: Nanos = Nanos::from_millis(1);

/// What cores of a node share.
pub(crate) struct NodeShared {
    pub stopping: AtomicBool,
    pub core_wakers: Vec<Arc<CoreWaker>>,
    pub mailboxes: Vec<Mutex<Option<Mailbox<CoreMessage>>>>,
    pub control_queues: Vec<ControlQueue>,
    pub monitor: Arc<Monitor>,
    /// By core: whether it has nothing left to finish. All go on until all have, since cores work for each other.
    pub drained: Vec<AtomicBool>,
}

/// What one core is asked to do.
#[derive(Default)]
pub(crate) struct ControlQueue {
    messages: Mutex<VecDeque<ControlMessage>>,
    /// Whether there are any: what a core looks at each turn.
    has_messages: AtomicBool,
}

impl ControlQueue {
    fn push(&self, message: ControlMessage) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push_back(message);
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
    /// Says whether a core has nothing left to finish. Who waits for that only sleeps.
    fn set_drained(&self, core: usize, drained: bool) {
        let was_drained = self.drained[core].swap(drained, Ordering::AcqRel);
        if drained && !was_drained {
            self.core_wakers.iter().for_each(|doorbell| doorbell.notify());
        }
    }

    /// Gives a core an order and wakes it.
    pub fn send_control(&self, core: usize, message: ControlMessage) {
        self.control_queues[core].push(message);
        self.core_wakers[core].notify();
    }
}

/// Something that a core does between two turns.
pub(crate) enum ControlMessage {
    /// Serve a namespace.
    AttachNamespace(Box<OpenNamespace>, Sender<io::Result<()>>),
    /// Serve it no more; answered when nothing of it is left.
    DetachNamespace(NamespaceId, Sender<io::Result<()>>),
    /// Say how things are.
    ReportStatus(Sender<CoreStatus>),
}

/// How a core is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreStatus {
    /// Connections that it serves.
    pub connections: usize,
    /// Requests that it has begun and not ended.
    pub requests: usize,
    /// Bytes of buffers that are out.
    pub buffer_bytes_in_use: usize,
    /// Bytes of memory that the buffers take, those that are kept for later included.
    pub buffer_bytes_resident: usize,
    /// Device operations in flight.
    pub device_operations: usize,
    /// Background tasks: one for each namespace of keys, on the first core.
    pub background_tasks: usize,
    /// Namespaces that are on their way out.
    pub draining_namespaces: usize,
    /// How long it has worked since its start: no empty polls, no sleep.
    pub busy_time: Nanos,
}

/// What a core's thread is given.
#[derive(Clone)]
pub(crate) struct CoreThread {
    pub config: Arc<NodeConfig>,
    /// The namespaces that each core begins with. Taken by it: what is kept here would be open for ever.
    pub initial_namespaces: Arc<[Mutex<Vec<OpenNamespace>>]>,
    pub target: Arc<Target>,
    pub shared: Arc<NodeShared>,
    pub startup_tx: Sender<Result<Vec<SocketAddr>, StartError>>,
}

/// A core that is there until this is dropped.
struct DrainGuard<'a>(&'a NodeShared, usize);

impl Drop for DrainGuard<'_> {
    fn drop(&mut self) {
        self.0.set_drained(self.1, true);
    }
}

/// A core that is ready to serve.
struct PreparedCore {
    parts: ReactorParts<KernelSockets, HashEngine>,
    idle_policy: IdlePolicy,
    namespaces: CoreNamespaces,
    /// Where it listens.
    addresses: Vec<SocketAddr>,
}

/// The namespaces of a core, those that leave included.
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
    /// Ends what keeps the volume in order: on the first core.
    maintenance: Option<Rc<CancelToken>>,
}

struct DrainingNamespace {
    namespace: ServedNamespace,
    backend: Option<Rc<NamespaceBackend<HashEngine>>>,
    response_tx: Sender<io::Result<()>>,
}

impl CoreThread {
    pub fn run(&self, index: usize) {
        // However this core ends, no other waits for it.
        let _drain_guard = DrainGuard(&self.shared, index);
        match self.prepare(index) {
            Ok(PreparedCore { parts, idle_policy, namespaces, addresses }) => {
                // The starter waits for every core's word before anybody is served.
                let _ = self.startup_tx.send(Ok(addresses));
                self.run_reactor(index, parts, idle_policy, namespaces);
            }
            Err(error) => drop(self.startup_tx.send(Err(error))),
        }
    }

    fn prepare(&self, index: usize) -> Result<PreparedCore, StartError> {
        let config = &self.config;
        let core_waker = Arc::clone(&self.shared.core_wakers[index]);
        let queue = open_core_queue(config.driver, config.device_depth, &core_waker, index)?;
        let channel = DeviceHandle::new(queue, config.device_depth);
        let mut sockets = KernelSockets::new().map_err(StartError::System)?;
        let mut listeners = Vec::new();
        if index == 0 {
            for &address in &config.listen {
                let listening = sockets.listen(address);
                listeners.push(listening.map_err(|error| StartError::Listen { address, error })?);
            }
        }
        let idle_policy = IdlePolicy::new(
            config.polling,
            Arc::clone(&core_waker),
            &mut sockets,
            channel.completion_eventfd(),
        )
        .map_err(StartError::System)?;
        let handle = ReactorHandle::new(core_waker, channel, CpuTime::measured());
        let pool = BufferPool::new(config.buffer_bytes);
        let mut namespaces = CoreNamespaces {
            core: index,
            table: Rc::default(),
            pool: pool.clone(),
            handle: handle.clone(),
            served: Vec::new(),
            draining: Vec::new(),
        };
        let initial_namespaces = std::mem::take(
            &mut *self.initial_namespaces[index].lock().unwrap_or_else(PoisonError::into_inner),
        );
        for namespace in initial_namespaces {
            namespaces.attach(namespace).map_err(StartError::System)?;
        }
        let mailbox = self.shared.mailboxes[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        let addresses = listeners.iter().map(|(_, address)| *address).collect();
        let parts = ReactorParts {
            sockets,
            local_address: KernelSockets::local_address,
            listeners,
            mailbox: mailbox.expect("each core starts once"),
            core: index,
            handle,
            target: Arc::clone(&self.target),
            namespaces: Rc::clone(&namespaces.table),
            pool,
            requests_max: config.requests_max,
            monitor: Arc::clone(&self.shared.monitor),
            costs: SimulatedCosts::default(),
        };
        Ok(PreparedCore { parts, idle_policy, namespaces, addresses })
    }

    fn run_reactor(
        &self,
        index: usize,
        parts: ReactorParts<KernelSockets, HashEngine>,
        mut idle_policy: IdlePolicy,
        mut namespaces: CoreNamespaces,
    ) {
        let handle = parts.handle.clone();
        let mut reactor = new_reactor(parts);
        let mut stop_at = Nanos::NEVER;
        loop {
            let now = clock::now();
            let mut worked = reactor.run_iteration(now);
            for message in self.shared.control_queues[index].take() {
                namespaces.handle_control(message, &mut reactor, now);
                // It may have left something to do.
                worked = true;
            }
            namespaces.reap_drained();
            if self.shared.stopping.load(Ordering::Acquire) && stop_at == Nanos::NEVER {
                reactor.begin_drain();
                stop_at = now + self.config.shutdown_timeout;
            }
            let is_finished =
                now >= stop_at || (stop_at != Nanos::NEVER && self.all_drained(index, &mut reactor));
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

    /// Whether no core has anything left to finish. Once that is so it stays so: a core that is drained has no request at
    /// another, and takes none in.
    fn all_drained(&self, index: usize, reactor: &mut impl ReactorLoop<KernelSockets>) -> bool {
        self.shared.set_drained(index, reactor.is_drained());
        self.shared.drained.iter().all(|drained| drained.load(Ordering::Acquire))
    }
}

impl CoreNamespaces {
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
            ControlMessage::AttachNamespace(held, response_tx) => {
                reactor.fail_missing_namespaces(now);
                drop(response_tx.send(self.attach(*held)));
            }
            ControlMessage::DetachNamespace(id, response_tx) => {
                let Some(index) = self.served.iter().position(|served| served.namespace.config.id == id)
                else {
                    // It did not come to be served here.
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

    /// Lets go of the namespaces whose last request has ended.
    fn reap_drained(&mut self) {
        self.draining.retain_mut(|DrainingNamespace { namespace, backend, response_tx }| {
            if backend.as_ref().is_some_and(|store| Rc::strong_count(store) > 1) || !namespace.is_idle() {
                return true;
            }
            if let Some(maintenance) = namespace.maintenance.take() {
                // It holds a performer of its own until it has had its turn.
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
        let draining = self.draining.iter().map(|leaving| &leaving.namespace);
        self.served.iter().chain(draining).all(ServedNamespace::is_idle)
    }
}

impl ServedNamespace {
    /// Whether nothing is on its way to the device that must not be cut short.
    fn is_idle(&self) -> bool {
        match &self.namespace.volume {
            NamespaceVolume::Kv(volume) => volume.is_idle(),
            NamespaceVolume::Block(_) => true,
        }
    }
}

async fn run_maintenance(kv_backend: Rc<KvBackend<HashEngine>>) {
    let device = Rc::clone(&kv_backend.device_name);
    let report =
        |fault: EngineError| tracing::error!(device = &*device, %fault, "keeping the volume in order failed");
    kv_backend.engine.maintain(&kv_backend.handle, report).await;
}
