//! One core of a node, assembled over a driver's sockets and devices: reactor, namespaces, control messages.
//!
//! ```text
//!   iteration of the reactor ─▶ control messages ─▶ drained namespaces ─▶ a deadline for the next iteration
//! ```
//! In: [`CoreParts`] of any driver: the kernel's (`core_thread`), the simulator's (`crates/sim`), the papers' simulation's
//! (`crates/lab`), the in-memory one of this crate's tests. Out: whether an iteration did anything; the core's status.
//! Invariant: every control message gets exactly one response, unless the core ends first.
//! Tested by `crates/node/tests/`, and by every scenario of the simulator.

use crate::config::REQUESTS_MAX;
use crate::control::{ControlMessage, ControlQueue, CoreStatus, NamespaceChange};
use crate::core_namespaces::{CoreNamespace, CoreNamespaces, OpenDevice};
use crate::core_roles::{CoreRole, CoreRoles};
use crate::error::StartError;
use crate::monitor::Monitor;
use crate::namespace_table::NamespaceBackend;
use crate::reactor::{CoreMessage, ReactorLoop, ReactorParts, SimulatedCosts, new_reactor};
use octokv_base::{BufferPool, NamespaceId, Nanos};
use octokv_client::PollGroup;
use octokv_engine::AnyEngine;
use octokv_nvmf::Target;
use octokv_runtime::device_queue::OPERATIONS_MAX;
use octokv_runtime::timer::TIMERS_MAX;
use octokv_runtime::waiter_queue::WAITERS_MAX;
use octokv_runtime::{Mailbox, ReactorHandle, Sockets, Stage};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Poll interval of a core that waits for requests or volumes to end.
pub(crate) const DRAIN_POLL_INTERVAL: Nanos = Nanos::from_millis(1);

/// Upper bound on the device operations of one request, and on its timers: a record and both copies of a batch, and a
/// timer for each under a drive profile, or one for a buffer.
const OPERATIONS_PER_REQUEST_MAX: usize = 4;
const _: () = assert!(OPERATIONS_PER_REQUEST_MAX * REQUESTS_MAX < OPERATIONS_MAX);
const _: () = assert!(OPERATIONS_PER_REQUEST_MAX * REQUESTS_MAX < TIMERS_MAX);

/// Upper bound on the cores of a node: the scheduler's core index has 16 bits.
const CORES_MAX: usize = 1 << 16;
// A request has one lock of a key, or one position in the queue of such a lock or of a namespace's ranges.
const _: () = assert!(REQUESTS_MAX * CORES_MAX < WAITERS_MAX);

/// The parts of a core, from its driver and its node.
pub struct CoreParts<'a, S, D> {
    /// Index of the core in the node.
    pub index: usize,
    /// Its sockets.
    pub sockets: S,
    /// The roles of the node's cores.
    pub roles: CoreRoles,
    /// The node's addresses: the accepting core listens on them.
    pub listen: &'a [SocketAddr],
    /// Its clock, timers, background tasks and device queue.
    pub handle: ReactorHandle,
    /// Its end of the mesh.
    pub mailbox: Mailbox<CoreMessage>,
    /// Its control messages.
    pub control_queue: Arc<ControlQueue<D>>,
    /// The NVMe subsystem.
    pub target: Arc<Target>,
    /// The monitor of the node.
    pub monitor: Arc<Monitor>,
    /// Buffer memory of its requests, in bytes.
    pub buffer_bytes: usize,
    /// Most requests in execution.
    pub requests_max: usize,
    /// Simulated time of requests.
    pub costs: SimulatedCosts,
}

/// One core of a node.
pub struct NodeCore<S, D> {
    /// Called a few times per iteration, never per request.
    reactor: Box<dyn ReactorLoop<S>>,
    namespaces: CoreNamespaces<D>,
    control_queue: Arc<ControlQueue<D>>,
    pool: BufferPool,
    handle: ReactorHandle,
    peers: PollGroup,
    role: CoreRole,
    /// The addresses that it listens on.
    addresses: Vec<SocketAddr>,
}

impl<S: Sockets + 'static, D: OpenDevice> NodeCore<S, D> {
    /// Assembles a core that serves `namespaces`. REQUIRES: called on the core's own thread, since sockets, device queue
    /// and engines belong to the thread that makes them.
    ///
    /// # Errors
    /// An address that is unavailable, or a device that the core's queue cannot open.
    pub fn new(
        parts: CoreParts<'_, S, D>,
        namespaces: impl IntoIterator<Item = CoreNamespace<D>>,
    ) -> Result<NodeCore<S, D>, StartError> {
        let CoreParts { index, mut sockets, handle, control_queue, .. } = parts;
        let own = if index == parts.roles.accepting_core() { parts.listen } else { &[] };
        let listen =
            |&address| sockets.listen(address).map_err(|error| StartError::Listen { address, error });
        let listeners = own.iter().map(listen).collect::<Result<Vec<_>, _>>()?;
        let addresses = listeners.iter().map(|(_, address)| *address).collect();
        let pool = BufferPool::new(parts.buffer_bytes);
        let mut attached = CoreNamespaces::new(index, parts.roles, pool.clone(), handle.clone());
        for namespace in namespaces {
            attached.attach(namespace).map_err(StartError::System)?;
        }
        let peers = PollGroup::new(Arc::clone(handle.core_waker()));
        let reactor = new_reactor(ReactorParts {
            sockets,
            listeners,
            roles: parts.roles,
            mailbox: parts.mailbox,
            core: index,
            handle: handle.clone(),
            target: parts.target,
            namespaces: Rc::clone(attached.table()),
            pool: pool.clone(),
            peers: peers.clone(),
            requests_max: parts.requests_max,
            monitor: parts.monitor,
            costs: parts.costs,
        });
        let reactor = Box::new(reactor);
        let role = parts.roles.role_of(index);
        Ok(NodeCore { reactor, namespaces: attached, control_queue, pool, handle, peers, role, addresses })
    }

    /// Does everything there is to do at `now`, then executes control messages. Returns false if there was nothing.
    /// The next iteration is due at [`ReactorHandle::next_deadline`] at the latest.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        let mut worked = self.reactor.run_iteration(now);
        if self.control_queue.has_messages() {
            // They may leave the reactor something to do.
            worked = true;
            self.control_queue.take().into_iter().for_each(|message| self.execute_control(message, now));
        }
        if self.namespaces.draining_count() > 0 {
            self.namespaces.reap_drained();
            let poll_at = now + DRAIN_POLL_INTERVAL;
            self.handle.request_wakeup_at(poll_at.min(self.handle.next_deadline()));
        }
        worked
    }

    #[cold]
    fn execute_control(&mut self, message: ControlMessage<D>, now: Nanos) {
        match message {
            ControlMessage::ChangeNamespaces(NamespaceChange::Attach(namespace), response_tx) => {
                self.reactor.fail_missing_namespaces(now);
                drop(response_tx.send(self.namespaces.attach(namespace)));
            }
            ControlMessage::ChangeNamespaces(
                NamespaceChange::ReplaceDevice { id, at, device },
                response_tx,
            ) => {
                let _ = response_tx.send(self.namespaces.replace_device(id, at, device));
            }
            ControlMessage::ChangeNamespaces(NamespaceChange::AddDevice { id, device }, response_tx) => {
                let _ = response_tx.send(self.namespaces.add_device(id, device));
            }
            ControlMessage::ChangeNamespaces(NamespaceChange::Detach(id), response_tx) => {
                self.namespaces.detach(id, response_tx);
            }
            ControlMessage::Compact(id, on_compacted, response_tx) => {
                let _ = response_tx.send(self.namespaces.compact(id, on_compacted));
            }
            ControlMessage::ReportStatus(response_tx) => drop(response_tx.send(self.status())),
            ControlMessage::Run(function, response_tx) => {
                function(&self.handle, &self.peers);
                let _ = response_tx.send(());
            }
        }
    }

    /// The core's status.
    pub fn status(&self) -> CoreStatus {
        let spent = self.handle.cpu_time().reader().stage_times();
        let stages = [Stage::Target, Stage::Kv, Stage::Device];
        CoreStatus {
            role: self.role,
            connections: self.reactor.connections(),
            peers: self.peers.len(),
            requests: self.reactor.requests(),
            buffer_bytes_in_use: self.pool.in_use_bytes(),
            buffer_bytes_resident: self.pool.resident_bytes(),
            device_operations: self.handle.device_operations_in_flight(),
            background_tasks: self.handle.background_count(),
            draining_namespaces: self.namespaces.draining_count(),
            busy_time: stages.iter().fold(Nanos::ZERO, |sum, &stage| sum + spent[stage as usize]),
        }
    }

    /// Requests started or queued.
    pub fn requests(&self) -> usize {
        self.reactor.requests()
    }

    /// The sockets, for a driver that sleeps on them.
    pub fn sockets(&mut self) -> &mut S {
        self.reactor.sockets()
    }

    /// The core's clock, timers, background tasks and device queue.
    pub fn handle(&self) -> &ReactorHandle {
        &self.handle
    }

    /// The outgoing sessions, for tasks of this core.
    pub fn peers(&self) -> &PollGroup {
        &self.peers
    }

    /// Closes the outgoing sessions gracefully, while the caller continues to run iterations. Returns whether all have
    /// ended. REQUIRES: no request of any core is left that may use them.
    pub fn close_peers(&self) -> bool {
        self.peers.close();
        self.peers.is_empty()
    }

    /// The addresses that the core listens on, ports resolved; none except on the accepting core.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The backend of a namespace; `None` if the core does not serve it. REQUIRES: the caller drops it before the
    /// namespace is detached, which waits for it.
    pub fn backend(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<AnyEngine>>> {
        self.namespaces.table().get(id)
    }

    /// Stops accepting connections and commands; requests in progress complete.
    pub fn begin_drain(&mut self) {
        self.reactor.begin_drain();
    }

    /// Whether every response has been sent and no request is left. It may become false again while the core accepts
    /// commands or another core has requests for it.
    pub fn is_drained(&mut self) -> bool {
        self.reactor.is_drained()
    }

    /// Whether no volume has a batch or checkpoint in progress.
    pub fn are_volumes_idle(&self) -> bool {
        self.namespaces.are_volumes_idle()
    }
}
