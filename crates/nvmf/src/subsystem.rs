//! The target as a whole: its controllers, and who may connect.
//!
//! In: Connect commands of any core (`admit`), ends of controllers. Out: controllers to share, or the
//! status that refuses. Locks are taken only here at connects, ends, notices and reports: no I/O command
//! takes one. What may change while it runs is in `changes`.
//!
//! Invariants: controllers, controllers per host and connections never exceed the settings; a
//! controller's identifier is unique among those that live.

use crate::config::{NamespaceInfo, TargetSettings};
use crate::controller::{Condition, Controller, Host, Purpose};
use crate::counters::{Counts, Statistics};
use crate::error_log::ErrorLog;
use crate::health::HealthFacts;
use crate::host_acl::Hosts;
use crate::namespaces::Table;
use octokv_base::Nanos;
use octokv_base::map::Map;
use octokv_wire::fabrics::{self, BadName, Connect, ConnectData, NEW_CONTROLLER};
use octokv_wire::{Status, nqn};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries that every admin queue may have, however small I/O queues are.
const ADMIN_ENTRIES: u32 = 128;
/// Identifiers from here on have a meaning of their own (NVMe Base 2.1, 3.1.3.3).
const CONTROLLER_IDS_END: u16 = 0xfff0;
/// The controller that a host of a static target would ask for: any.
const ANY_CONTROLLER: u16 = 0xfffe;

/// One NVMe subsystem and its discovery service, shared by all cores.
#[derive(Debug)]
pub struct Target {
    settings: TargetSettings,
    /// Its namespaces and their access.
    pub(crate) table: Table,
    /// What all connections did.
    pub(crate) statistics: Statistics,
    /// What went wrong lately, for log 01h.
    pub(crate) errors: ErrorLog,
    connections: AtomicUsize,
    controllers_made: AtomicUsize,
    pub(crate) registry: Mutex<Registry>,
    pub(crate) places: Mutex<Places>,
    pub(crate) health: Mutex<HealthFacts>,
}

/// The controllers that live, and the hosts that may have some.
#[derive(Debug)]
pub(crate) struct Registry {
    pub controllers: Map<u16, Arc<Controller>>,
    pub hosts: Hosts,
    next_id: u16,
}

/// Where the target listens, and where others do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
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
    pub purpose: Purpose,
    /// Its host's name.
    pub host_nqn: String,
    /// How it is.
    pub condition: Condition,
    /// Its connected I/O queues.
    pub queues: usize,
    /// What its connections did.
    pub counts: Counts,
}

/// Why a Connect is refused: the status, and DW0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub status: Status,
    pub dw0: u32,
}

impl Refusal {
    pub fn of(status: Status) -> Refusal {
        Refusal { status: status.do_not_retry(), dw0: 0 }
    }
    fn busy() -> Refusal {
        // Worth another try: another host may leave.
        Refusal { status: Status::CONNECT_CONTROLLER_BUSY, dw0: 0 }
    }
    fn entry(offset: u16) -> Refusal {
        let dw0 = fabrics::invalid_parameter(offset, false);
        Refusal { status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0 }
    }
    fn host() -> Refusal {
        let dw0 = fabrics::invalid_parameter(512, true);
        Refusal { status: Status::CONNECT_INVALID_HOST.do_not_retry(), dw0 }
    }
    fn data(offset: u16) -> Refusal {
        let dw0 = fabrics::invalid_parameter(offset, true);
        Refusal { status: Status::CONNECT_INVALID_PARAMETERS.do_not_retry(), dw0 }
    }
}

impl From<BadName> for Refusal {
    fn from(bad: BadName) -> Refusal {
        Refusal::data(bad.offset)
    }
}

/// A queue that may exist.
#[derive(Debug)]
pub(crate) struct Admission {
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
    pub fn new(settings: TargetSettings, namespaces: Vec<NamespaceInfo>) -> Arc<Target> {
        settings.assert_sound();
        namespaces.iter().for_each(|one| one.assert_sound(&settings));
        let table = Table::new(namespaces).expect("namespaces of their own identifiers and NGUIDs");
        let next_id = settings.first_controller_id;
        let registry = Registry { controllers: Map::default(), hosts: Hosts::Any, next_id };
        Arc::new(Target {
            settings,
            table,
            statistics: Statistics::default(),
            errors: ErrorLog::default(),
            connections: AtomicUsize::new(0),
            controllers_made: AtomicUsize::new(0),
            registry: Mutex::new(registry),
            places: Mutex::new(Places::default()),
            health: Mutex::new(HealthFacts::default()),
        })
    }

    /// What the target was started with.
    pub fn settings(&self) -> &TargetSettings {
        &self.settings
    }

    /// What all connections did, up to their last ticks.
    pub fn statistics(&self) -> Counts {
        self.statistics.read()
    }

    /// The controllers that live, by identifier.
    pub fn controllers(&self) -> Vec<ControllerReport> {
        let registry = self.registry.lock();
        let report = |controller: &Arc<Controller>| ControllerReport {
            id: controller.id,
            purpose: controller.purpose,
            host_nqn: controller.host.nqn.clone(),
            condition: controller.life().condition,
            queues: controller.queues(),
            counts: controller.statistics.read(),
        };
        let mut reports: Vec<ControllerReport> = registry.controllers.values().map(report).collect();
        reports.sort_by_key(|report| report.id);
        reports
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Whether one more connection may be accepted.
    pub fn has_room(&self) -> bool {
        self.connections() < self.settings.connections_max
    }

    /// How many controllers there ever were: as many connections were admin queues.
    pub fn controllers_made(&self) -> usize {
        self.controllers_made.load(Ordering::Relaxed)
    }

    /// Counts a connection; says whether it is within the bound.
    pub(crate) fn connection_opened(&self) -> bool {
        self.connections.fetch_add(1, Ordering::Relaxed) < self.settings.connections_max
    }

    pub(crate) fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// The controller of a Connect, made for it on queue 0, found for it on others.
    pub(crate) fn admit(
        &self,
        now: Nanos,
        connect: &Connect,
        data: &ConnectData<'_>,
    ) -> Result<Admission, Refusal> {
        if connect.format != 0 {
            return Err(Refusal::of(Status::CONNECT_INCOMPATIBLE_FORMAT));
        }
        let purpose = match data.subsystem {
            name if name == self.settings.nqn => Purpose::Io,
            nqn::DISCOVERY => Purpose::Discovery,
            _ => return Err(Refusal::data(256)),
        };
        let entries_max = match connect.queue_id {
            0 => ADMIN_ENTRIES.max(u32::from(self.settings.queue_depth)),
            _ => u32::from(self.settings.queue_depth),
        };
        if connect.entries < 2 || connect.entries > entries_max {
            return Err(Refusal::entry(44));
        }
        match connect.queue_id {
            0 => self.new_controller(now, purpose, connect, data),
            id if purpose == Purpose::Discovery || id > self.settings.io_queues_max => {
                Err(Refusal::entry(42))
            }
            id => self.find_controller(id, data),
        }
    }

    fn new_controller(
        &self,
        now: Nanos,
        purpose: Purpose,
        connect: &Connect,
        data: &ConnectData<'_>,
    ) -> Result<Admission, Refusal> {
        if !matches!(data.controller_id, NEW_CONTROLLER | ANY_CONTROLLER) {
            return Err(Refusal::data(16));
        }
        if !self.keep_alive_is_possible(connect.keep_alive_ms) {
            return Err(Refusal::entry(48));
        }
        let registry = &mut *self.registry.lock();
        if purpose == Purpose::Io && !registry.hosts.allows(data.host) {
            return Err(Refusal::host());
        }
        let of_host = registry.controllers.values().filter(|one| one.host.nqn == data.host).count();
        if registry.controllers.len() >= self.settings.controllers_max
            || of_host >= self.settings.controllers_per_host_max
        {
            return Err(Refusal::busy());
        }
        let id = registry.free_id(self.settings.first_controller_id).ok_or(Refusal::busy())?;
        let host = Host { nqn: data.host.to_owned(), id: data.host_id };
        let controller = Arc::new(Controller::new(id, purpose, host, now));
        controller.set_keep_alive(connect.keep_alive_ms, now);
        registry.controllers.insert(id, Arc::clone(&controller));
        self.controllers_made.fetch_add(1, Ordering::Relaxed);
        Ok(Admission { controller, generation: 0 })
    }

    fn find_controller(&self, queue_id: u16, data: &ConnectData<'_>) -> Result<Admission, Refusal> {
        let found = {
            let registry = self.registry.lock();
            if !registry.hosts.allows(data.host) {
                return Err(Refusal::host());
            }
            registry.controllers.get(&data.controller_id).cloned()
        };
        let controller = found.filter(|one| one.purpose == Purpose::Io).ok_or(Refusal::data(16))?;
        if controller.host.nqn != data.host {
            return Err(Refusal::data(512));
        }
        if controller.host.id != data.host_id {
            return Err(Refusal::data(0));
        }
        let generation = controller.connect_queue(queue_id).map_err(|status| Refusal { status, dw0: 0 })?;
        Ok(Admission { controller, generation })
    }

    /// Whether a host may ask for this keep-alive time; zero turns it off.
    pub(crate) fn keep_alive_is_possible(&self, milliseconds: u32) -> bool {
        Nanos::from_millis(u64::from(milliseconds)) <= self.settings.keep_alive_max
    }

    /// A controller that ended is listed no more, and its identifier may be used again.
    pub(crate) fn forget(&self, controller: &Controller) {
        assert!(controller.life().condition.is_over(), "only an ended controller is forgotten");
        let registry = &mut *self.registry.lock();
        let is_it = |one: &Arc<Controller>| std::ptr::eq(Arc::as_ptr(one), controller);
        if registry.controllers.get(&controller.id).is_some_and(is_it) {
            registry.controllers.remove(&controller.id);
        }
    }
}

impl Registry {
    /// An identifier that no controller has, the one used least recently.
    fn free_id(&mut self, first: u16) -> Option<u16> {
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
