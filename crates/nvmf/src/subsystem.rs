//! The target as a whole: its controllers, and who may connect.
//!
//! In: Connect commands of any core (`admit`), ends of controllers. Out: controllers to share, or the
//! status that refuses. Locks are taken only here at connects, ends, notices and reports: no I/O command
//! takes one. What may change while it runs is in `changes`.
//!
//! Invariants: controllers, controllers per host and connections never exceed the settings; a
//! controller's identifier is unique among those that live.

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
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries that every admin queue may have, however small I/O queues are.
const ADMIN_QUEUE_ENTRIES: u32 = 128;
/// Identifiers from here on have a meaning of their own (NVMe Base 2.1, 3.1.3.3).
const CONTROLLER_IDS_END: u16 = 0xfff0;
/// The controller that a host of a static target would ask for: any.
const ANY_CONTROLLER: u16 = 0xfffe;

/// One NVMe subsystem and its discovery service, shared by all cores.
#[derive(Debug)]
pub struct Target {
    config: SubsystemConfig,
    /// Its namespaces and their access.
    pub(crate) namespace_directory: NamespaceDirectory,
    /// What all connections did.
    pub(crate) counters: SharedCounters,
    /// What went wrong lately, for log 01h.
    pub(crate) error_log: ErrorLog,
    connection_count: AtomicUsize,
    controllers_created: AtomicUsize,
    pub(crate) registry: Mutex<ControllerRegistry>,
    pub(crate) discovery_addresses: Mutex<DiscoveryAddresses>,
    pub(crate) health: Mutex<HealthStatus>,
}

/// The controllers that live, and the hosts that may have some.
#[derive(Debug)]
pub(crate) struct ControllerRegistry {
    pub controllers: FxHashMap<u16, Arc<Controller>>,
    pub host_acl: HostAcl,
    next_id: u16,
}

/// Where the target listens, and where others do.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiscoveryAddresses {
    /// Changes with every change of the discovery log.
    pub generation: u64,
    /// The target's own.
    pub listeners: Vec<SocketAddr>,
    /// Other discovery services.
    pub referrals: Vec<SocketAddr>,
}

/// A controller as an operator sees it.
#[derive(Clone, Debug)]
pub struct ControllerReport {
    /// Its identifier.
    pub id: u16,
    /// What it is for.
    pub controller_type: ControllerType,
    /// Its host's name.
    pub host_nqn: String,
    /// How it is.
    pub state: ControllerState,
    /// Its connected I/O queues.
    pub queue_count: usize,
    /// What its connections did.
    pub counters: CounterSet,
}

/// Why a Connect is refused: the status, and DW0.
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
        // Worth another try: another host may leave.
        ConnectError { status: Status::CONNECT_CONTROLLER_BUSY, dw0: 0 }
    }
    fn invalid_sqe_field(offset: u16) -> ConnectError {
        let dw0 = fabrics::invalid_parameter_dw0(offset, false);
        ConnectError { status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0 }
    }
    fn host_not_allowed() -> ConnectError {
        let dw0 = fabrics::invalid_parameter_dw0(512, true);
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

/// A queue that may exist.
#[derive(Debug)]
pub(crate) struct QueueAdmission {
    pub controller: Arc<Controller>,
    /// For an I/O queue the generation that it lives in.
    pub generation: u32,
}

impl Target {
    /// A target of these settings and namespaces, open to every host.
    ///
    /// # Panics
    /// When a bound of the settings cannot be kept, a namespace is beyond them, or two have one
    /// identifier or NGUID.
    pub fn new(config: SubsystemConfig, namespaces: Vec<NamespaceInfo>) -> Arc<Target> {
        config.assert_valid();
        namespaces.iter().for_each(|one| one.assert_valid(&config));
        let namespace_directory =
            NamespaceDirectory::new(namespaces).expect("namespaces of their own identifiers and NGUIDs");
        let next_id = config.first_controller_id;
        let registry =
            ControllerRegistry { controllers: FxHashMap::default(), host_acl: HostAcl::Any, next_id };
        Arc::new(Target {
            config,
            namespace_directory,
            counters: SharedCounters::default(),
            error_log: ErrorLog::default(),
            connection_count: AtomicUsize::new(0),
            controllers_created: AtomicUsize::new(0),
            registry: Mutex::new(registry),
            discovery_addresses: Mutex::new(DiscoveryAddresses::default()),
            health: Mutex::new(HealthStatus::default()),
        })
    }

    /// What the target was started with.
    pub fn config(&self) -> &SubsystemConfig {
        &self.config
    }

    /// What all connections did, up to their last ticks.
    pub fn counters(&self) -> CounterSet {
        self.counters.snapshot()
    }

    /// The controllers that live, by identifier.
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

    /// How many connections there are.
    pub fn connection_count(&self) -> usize {
        self.connection_count.load(Ordering::Relaxed)
    }

    /// Whether one more connection may be accepted.
    pub fn can_accept_connection(&self) -> bool {
        self.connection_count() < self.config.connections_max
    }

    /// How many controllers there ever were: as many connections were admin queues.
    pub fn controllers_created(&self) -> usize {
        self.controllers_created.load(Ordering::Relaxed)
    }

    /// Counts a connection; says whether it is within the bound.
    pub(crate) fn register_connection(&self) -> bool {
        self.connection_count.fetch_add(1, Ordering::Relaxed) < self.config.connections_max
    }

    pub(crate) fn unregister_connection(&self) {
        self.connection_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// The controller of a Connect, made for it on queue 0, found for it on others.
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
            _ => return Err(ConnectError::invalid_data_field(256)),
        };
        let entries_max = match connect.queue_id {
            0 => ADMIN_QUEUE_ENTRIES.max(u32::from(self.config.queue_depth)),
            _ => u32::from(self.config.queue_depth),
        };
        if connect.entries < 2 || connect.entries > entries_max {
            return Err(ConnectError::invalid_sqe_field(44));
        }
        match connect.queue_id {
            0 => self.create_controller(now, controller_type, connect, data),
            id if controller_type == ControllerType::Discovery || id > self.config.io_queues_max => {
                Err(ConnectError::invalid_sqe_field(42))
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
            return Err(ConnectError::invalid_data_field(16));
        }
        if !self.is_keep_alive_allowed(connect.keep_alive_ms) {
            return Err(ConnectError::invalid_sqe_field(48));
        }
        let registry = &mut *self.registry.lock();
        if controller_type == ControllerType::Io && !registry.host_acl.allows(data.host) {
            return Err(ConnectError::host_not_allowed());
        }
        let of_host = registry.controllers.values().filter(|one| one.host.nqn == data.host).count();
        if registry.controllers.len() >= self.config.controllers_max
            || of_host >= self.config.controllers_per_host_max
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
            .filter(|one| one.controller_type == ControllerType::Io)
            .ok_or(ConnectError::invalid_data_field(16))?;
        if controller.host.nqn != data.host {
            return Err(ConnectError::invalid_data_field(512));
        }
        if controller.host.id != data.host_id {
            return Err(ConnectError::invalid_data_field(0));
        }
        let generation =
            controller.connect_queue(queue_id).map_err(|status| ConnectError { status, dw0: 0 })?;
        Ok(QueueAdmission { controller, generation })
    }

    /// Whether a host may ask for this keep-alive time; zero turns it off.
    pub(crate) fn is_keep_alive_allowed(&self, milliseconds: u32) -> bool {
        Nanos::from_millis(u64::from(milliseconds)) <= self.config.keep_alive_max
    }

    /// A controller that ended is listed no more, and its identifier may be used again.
    pub(crate) fn unregister_controller(&self, controller: &Controller) {
        assert!(controller.epoch().state.has_ended(), "only an ended controller is forgotten");
        let registry = &mut *self.registry.lock();
        let is_it = |one: &Arc<Controller>| std::ptr::eq(Arc::as_ptr(one), controller);
        if registry.controllers.get(&controller.id).is_some_and(is_it) {
            registry.controllers.remove(&controller.id);
        }
    }
}

impl ControllerRegistry {
    /// An identifier that no controller has, the one used least recently.
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
