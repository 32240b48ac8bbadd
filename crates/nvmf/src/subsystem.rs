//! The target: its controllers and the admission of queues.
//!
//! In: Connect commands of any core (`admit_queue`), ends of controllers. Out: shared controllers, or the
//! error of the Connect. Locks are taken at Connect, when a controller ends, for events and for reports: no
//! I/O command takes one. `reconfigure` has the changes at run time.
//!
//! Invariants: the numbers of controllers, controllers per host and connected connections never exceed the
//! configuration; the identifiers of live controllers are unique.

use crate::config::SubsystemConfig;
use crate::controller::{Controller, ControllerState, ControllerType, HostIdentity};
use crate::counters::{CounterSet, SharedCounters};
use crate::error_log::ErrorLog;
use crate::health::HealthStatus;
use crate::host_acl::HostAcl;
use crate::namespace_directory::NamespaceDirectory;
use crate::namespace_info::NamespaceInfo;
use octokv_base::Nanos;
use octokv_base::map::FxHashMap;
use octokv_wire::fabrics::{self, Connect, ConnectData, InvalidConnectNqn, NEW_CONTROLLER};
use octokv_wire::{Status, nqn};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries that every admin queue may have, even if I/O queues have fewer.
const ADMIN_QUEUE_ENTRIES: u32 = 128;
/// Controller identifiers from here on are reserved (NVMe Base 2.1, 3.1.3.3).
const CONTROLLER_IDS_END: u16 = 0xfff0;
/// CNTLID of Connect with which a host requests any controller of a static target.
const ANY_CONTROLLER: u16 = 0xfffe;

/// Offsets of Connect's fields, which DW0 of a failed Connect names.
mod connect_field {
    /// In the data: host identifier.
    pub const HOST_ID: u16 = 0;
    /// In the data: controller identifier.
    pub const CONTROLLER_ID: u16 = 16;
    /// In the data: subsystem NQN.
    pub const SUBSYSTEM_NQN: u16 = 256;
    /// In the data: host NQN.
    pub const HOST_NQN: u16 = 512;
    /// In the SQE: queue identifier.
    pub const QUEUE_ID: u16 = 42;
    /// In the SQE: submission queue size.
    pub const QUEUE_SIZE: u16 = 44;
    /// In the SQE: keep-alive timeout.
    pub const KEEP_ALIVE: u16 = 48;
}

/// One NVMe subsystem and its discovery service, shared by all cores.
#[derive(Debug)]
pub struct Target {
    config: SubsystemConfig,
    /// Computed once: each command on blocks is compared with it.
    transfer_bytes_max: u64,
    pub(crate) namespace_directory: NamespaceDirectory,
    /// Sums over all connections.
    pub(crate) counters: SharedCounters,
    /// The last failed commands (log page 01h).
    pub(crate) error_log: ErrorLog,
    connection_count: AtomicUsize,
    controllers_created: AtomicUsize,
    pub(crate) registry: Mutex<ControllerRegistry>,
    pub(crate) discovery_addresses: Mutex<DiscoveryAddresses>,
    pub(crate) health: Mutex<HealthStatus>,
    /// The weights of hosts in the tokens of devices.
    host_weights: Mutex<HostWeights>,
}

/// The weights by which hosts share tokens.
#[derive(Clone, Debug)]
pub struct HostWeights {
    /// By host NQN.
    pub of_hosts: BTreeMap<String, u32>,
    /// Of all others; at least 1.
    pub default: u32,
}

impl Default for HostWeights {
    fn default() -> HostWeights {
        HostWeights { of_hosts: BTreeMap::new(), default: 1 }
    }
}

impl HostWeights {
    fn of(&self, nqn: &str) -> u32 {
        self.of_hosts.get(nqn).copied().unwrap_or(self.default).max(1)
    }
}

/// The live controllers by identifier, and the hosts that may create them.
#[derive(Debug)]
pub(crate) struct ControllerRegistry {
    pub controllers: FxHashMap<u16, Arc<Controller>>,
    pub host_acl: HostAcl,
    next_id: u16,
}

/// The addresses of the discovery log.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiscoveryAddresses {
    /// GENCTR: incremented with each change of the discovery log.
    pub generation: u64,
    /// The target's own listeners.
    pub listeners: Vec<SocketAddr>,
    /// Other discovery services.
    pub referrals: Vec<SocketAddr>,
}

/// A snapshot of a controller for administration.
#[derive(Clone, Debug)]
pub struct ControllerReport {
    /// Controller identifier (CNTLID).
    pub id: u16,
    /// I/O or discovery.
    pub controller_type: ControllerType,
    /// The host's NQN.
    pub host_nqn: String,
    /// The state at the time of the report.
    pub state: ControllerState,
    /// The number of connected I/O queues.
    pub queue_count: usize,
    /// Sums over the controller's connections.
    pub counters: CounterSet,
}

/// The status and DW0 of a failed Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectError {
    pub status: Status,
    pub dw0: u32,
}

impl ConnectError {
    pub fn from_status(status: Status) -> ConnectError {
        ConnectError { status: status.do_not_retry(), dw0: 0 }
    }
    fn controller_busy() -> ConnectError {
        // Without "do not retry": another host may disconnect.
        ConnectError { status: Status::CONNECT_CONTROLLER_BUSY, dw0: 0 }
    }
    fn invalid_sqe_field(offset: u16) -> ConnectError {
        let dw0 = fabrics::invalid_parameter_dw0(offset, false);
        ConnectError { status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0 }
    }
    fn host_not_allowed() -> ConnectError {
        let dw0 = fabrics::invalid_parameter_dw0(connect_field::HOST_NQN, true);
        ConnectError { status: Status::CONNECT_INVALID_HOST.do_not_retry(), dw0 }
    }
    fn invalid_data_field(offset: u16) -> ConnectError {
        let dw0 = fabrics::invalid_parameter_dw0(offset, true);
        ConnectError { status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0 }
    }
}

impl From<InvalidConnectNqn> for ConnectError {
    fn from(bad: InvalidConnectNqn) -> ConnectError {
        ConnectError::invalid_data_field(bad.offset)
    }
}

/// The result of a successful admission.
#[derive(Debug)]
pub(crate) struct QueueAdmission {
    pub controller: Arc<Controller>,
    /// The controller generation that an I/O queue belongs to; 0 for an admin queue.
    pub generation: u32,
}

impl Target {
    /// Creates a target with these namespaces that admits every host.
    ///
    /// # Panics
    /// If the configuration or a namespace is invalid, or two namespaces share an identifier or NGUID.
    pub fn new(config: SubsystemConfig, namespaces: Vec<NamespaceInfo>) -> Arc<Target> {
        config.assert_valid();
        namespaces.iter().for_each(|info| info.assert_valid(&config));
        let namespace_directory =
            NamespaceDirectory::new(namespaces).expect("namespaces with distinct identifiers and NGUIDs");
        let next_id = config.first_controller_id;
        let registry =
            ControllerRegistry { controllers: FxHashMap::default(), host_acl: HostAcl::Any, next_id };
        Arc::new(Target {
            transfer_bytes_max: config.transfer_bytes_max(),
            config,
            namespace_directory,
            counters: SharedCounters::default(),
            error_log: ErrorLog::default(),
            connection_count: AtomicUsize::new(0),
            controllers_created: AtomicUsize::new(0),
            registry: Mutex::new(registry),
            discovery_addresses: Mutex::new(DiscoveryAddresses::default()),
            health: Mutex::new(HealthStatus::default()),
            host_weights: Mutex::default(),
        })
    }

    /// The configuration that the target was created with.
    pub fn config(&self) -> &SubsystemConfig {
        &self.config
    }

    /// MDTS in bytes ([`SubsystemConfig::transfer_bytes_max`]).
    #[inline]
    pub(crate) fn transfer_bytes_max(&self) -> u64 {
        self.transfer_bytes_max
    }

    /// Sums over all connections, as of their last ticks.
    pub fn counters(&self) -> CounterSet {
        self.counters.snapshot()
    }

    /// Reports all live controllers, by ascending identifier.
    pub fn controllers(&self) -> Vec<ControllerReport> {
        let registry = self.registry.lock();
        let report = |controller: &Arc<Controller>| ControllerReport {
            id: controller.id,
            controller_type: controller.controller_type,
            host_nqn: controller.host.nqn.clone(),
            state: controller.epoch().state,
            queue_count: controller.queue_count(),
            counters: controller.counters.snapshot(),
        };
        let mut reports: Vec<ControllerReport> = registry.controllers.values().map(report).collect();
        reports.sort_by_key(|report| report.id);
        reports
    }

    /// The number of connections.
    pub fn connection_count(&self) -> usize {
        self.connection_count.load(Ordering::Relaxed)
    }

    /// Whether another connection is within `connections_max`.
    pub fn can_accept_connection(&self) -> bool {
        self.connection_count() < self.config.connections_max
    }

    /// The number of controllers created so far; each had one admin queue.
    pub fn controllers_created(&self) -> usize {
        self.controllers_created.load(Ordering::Relaxed)
    }

    /// Counts a new connection; returns whether it is within `connections_max`.
    pub(crate) fn register_connection(&self) -> bool {
        self.connection_count.fetch_add(1, Ordering::Relaxed) < self.config.connections_max
    }

    pub(crate) fn unregister_connection(&self) {
        self.connection_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Admits the queue of a Connect: creates a controller for queue 0, finds it for other queues.
    ///
    /// # Errors
    /// The status and DW0 of the Connect's completion.
    pub(crate) fn admit_queue(
        &self,
        now: Nanos,
        connect: &Connect,
        data: &ConnectData<'_>,
    ) -> Result<QueueAdmission, ConnectError> {
        if connect.format != 0 {
            return Err(ConnectError::from_status(Status::CONNECT_INCOMPATIBLE_FORMAT));
        }
        let controller_type = match data.subsystem {
            name if name == self.config.nqn => ControllerType::Io,
            nqn::DISCOVERY => ControllerType::Discovery,
            _ => return Err(ConnectError::invalid_data_field(connect_field::SUBSYSTEM_NQN)),
        };
        let entries_max = match connect.queue_id {
            0 => ADMIN_QUEUE_ENTRIES.max(u32::from(self.config.queue_depth)),
            _ => u32::from(self.config.queue_depth),
        };
        if connect.entries < 2 || connect.entries > entries_max {
            return Err(ConnectError::invalid_sqe_field(connect_field::QUEUE_SIZE));
        }
        match connect.queue_id {
            0 => self.create_controller(now, controller_type, connect, data),
            id if controller_type == ControllerType::Discovery || id > self.config.io_queues_max => {
                Err(ConnectError::invalid_sqe_field(connect_field::QUEUE_ID))
            }
            id => self.find_controller(id, data),
        }
    }

    fn create_controller(
        &self,
        now: Nanos,
        controller_type: ControllerType,
        connect: &Connect,
        data: &ConnectData<'_>,
    ) -> Result<QueueAdmission, ConnectError> {
        if !matches!(data.controller_id, NEW_CONTROLLER | ANY_CONTROLLER) {
            return Err(ConnectError::invalid_data_field(connect_field::CONTROLLER_ID));
        }
        if !self.is_keep_alive_allowed(connect.keep_alive_ms) {
            return Err(ConnectError::invalid_sqe_field(connect_field::KEEP_ALIVE));
        }
        let registry = &mut *self.registry.lock();
        if controller_type == ControllerType::Io && !registry.host_acl.allows(data.host) {
            return Err(ConnectError::host_not_allowed());
        }
        let host_controllers =
            registry.controllers.values().filter(|controller| controller.host.nqn == data.host).count();
        if registry.controllers.len() >= self.config.controllers_max
            || host_controllers >= self.config.controllers_per_host_max
        {
            return Err(ConnectError::controller_busy());
        }
        let id =
            registry.allocate_id(self.config.first_controller_id).ok_or(ConnectError::controller_busy())?;
        let host = HostIdentity { nqn: data.host.to_owned(), id: data.host_id };
        let controller = Arc::new(Controller::new(id, controller_type, host, now));
        controller.set_keep_alive(connect.keep_alive_ms, now);
        registry.controllers.insert(id, Arc::clone(&controller));
        self.controllers_created.fetch_add(1, Ordering::Relaxed);
        Ok(QueueAdmission { controller, generation: 0 })
    }

    fn find_controller(&self, queue_id: u16, data: &ConnectData<'_>) -> Result<QueueAdmission, ConnectError> {
        let found = {
            let registry = self.registry.lock();
            if !registry.host_acl.allows(data.host) {
                return Err(ConnectError::host_not_allowed());
            }
            registry.controllers.get(&data.controller_id).cloned()
        };
        let controller = found
            .filter(|controller| controller.controller_type == ControllerType::Io)
            .ok_or(ConnectError::invalid_data_field(connect_field::CONTROLLER_ID))?;
        if controller.host.nqn != data.host {
            return Err(ConnectError::invalid_data_field(connect_field::HOST_NQN));
        }
        if controller.host.id != data.host_id {
            return Err(ConnectError::invalid_data_field(connect_field::HOST_ID));
        }
        let generation =
            controller.connect_queue(queue_id).map_err(|status| ConnectError { status, dw0: 0 })?;
        Ok(QueueAdmission { controller, generation })
    }

    /// Sets the weights by which hosts share the tokens of devices, also of those that have shares.
    pub fn set_host_weights(&self, weights: HostWeights) {
        let registry = self.registry.lock();
        let asked = registry.controllers.values().filter(|controller| controller.token_weight.get() > 0);
        asked.for_each(|controller| controller.token_weight.set(weights.of(&controller.host.nqn)));
        *self.host_weights.lock() = weights;
    }

    /// Gives a controller a share of the tokens of devices, or takes it (feature C0h).
    pub(crate) fn set_token_share(&self, controller: &Controller, is_asked: bool) {
        let weight = if is_asked { self.host_weights.lock().of(&controller.host.nqn) } else { 0 };
        controller.token_weight.set(weight);
    }

    /// Whether the keep-alive timeout is within `keep_alive_max`; 0 turns keep alive off.
    pub(crate) fn is_keep_alive_allowed(&self, milliseconds: u32) -> bool {
        Nanos::from_millis(u64::from(milliseconds)) <= self.config.keep_alive_max
    }

    /// Removes an ended controller from the registry; its identifier may then be reused.
    ///
    /// # Panics
    /// If the controller has not ended.
    pub(crate) fn unregister_controller(&self, controller: &Controller) {
        assert!(controller.epoch().state.has_ended(), "a live controller cannot be unregistered");
        let registry = &mut *self.registry.lock();
        let is_same = |other: &Arc<Controller>| std::ptr::eq(Arc::as_ptr(other), controller);
        if registry.controllers.get(&controller.id).is_some_and(is_same) {
            registry.controllers.remove(&controller.id);
        }
    }
}

impl ControllerRegistry {
    /// The free identifier that was used least recently.
    fn allocate_id(&mut self, first: u16) -> Option<u16> {
        for _ in first..CONTROLLER_IDS_END {
            let id = self.next_id;
            self.next_id = if id + 1 >= CONTROLLER_IDS_END { first } else { id + 1 };
            if !self.controllers.contains_key(&id) {
                return Some(id);
            }
        }
        None
    }
}
