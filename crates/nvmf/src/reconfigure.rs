//! Changes of a running target: namespaces, access control, listeners, referrals, ANA states, health.
//!
//! In: changes, from any thread. Out: new data for admin commands, and asynchronous events for the affected
//! hosts. Requests in flight are not affected.

use crate::async_events::AsyncEvent;
use crate::controller::{Controller, ControllerState, ControllerType};
use crate::health::HealthStatus;
use crate::host_acl::HostAcl;
use crate::namespace_directory::{NamespaceExists, NamespaceSnapshot};
use crate::namespace_info::NamespaceInfo;
use crate::subsystem::{DiscoveryAddresses, Target};
use octokv_base::{NamespaceId, SharedSum};
use octokv_wire::log_page::AnaState;
use std::net::SocketAddr;
use std::sync::Arc;

impl Target {
    /// The current snapshot of the namespaces.
    pub fn namespaces(&self) -> Arc<NamespaceSnapshot> {
        self.namespace_directory.snapshot()
    }

    /// Adds a namespace and notifies the hosts that see it.
    ///
    /// # Errors
    /// If its identifier or NGUID is in use.
    ///
    /// # Panics
    /// If a field of `info` is invalid or exceeds the target's configuration.
    pub fn add_namespace(&self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        info.assert_valid(self.config());
        let id = info.id;
        self.namespace_directory.add(info)?;
        self.notify_namespace_changed(id);
        Ok(())
    }

    /// Sets the size of a namespace in bytes, and what counts its use, and notifies the hosts that see it. Does nothing if there is
    /// none of this identifier.
    pub fn resize_namespace(&self, id: NamespaceId, size_bytes: u64, used_bytes: SharedSum) {
        if self.namespace_directory.resize(id, size_bytes, used_bytes) {
            self.notify_namespace_changed(id);
        }
    }

    /// Removes and returns a namespace, and notifies the hosts that saw it. New commands on it fail;
    /// requests in flight complete normally.
    pub fn remove_namespace(&self, id: NamespaceId) -> Option<NamespaceInfo> {
        let removed = self.namespace_directory.remove(id)?;
        self.for_each_controller(ControllerType::Io, |controller| {
            controller.forget_namespace(id);
            controller.notify_namespace_changed(&removed);
        });
        Some(removed)
    }

    /// Notifies the hosts that see a namespace of a change of its size or readiness.
    pub fn notify_namespace_changed(&self, id: NamespaceId) {
        if let Some(info) = self.namespace_directory.snapshot().get(id) {
            self.for_each_controller(ControllerType::Io, |controller| {
                controller.notify_namespace_changed(info)
            });
        }
    }

    /// The ANA states by ascending group, for groups that have had a namespace or were given a state.
    pub fn ana_states(&self) -> Vec<(u32, AnaState)> {
        self.namespace_directory.snapshot().groups().map(|(id, group)| (id, group.state)).collect()
    }

    /// Sets the ANA state of a group, and notifies all hosts if that is a change.
    ///
    /// # Panics
    /// If `group` is not in 1 to [`ANA_GROUPS_MAX`](crate::ANA_GROUPS_MAX).
    pub fn set_ana_state(&self, group: u32, state: AnaState) {
        if self.namespace_directory.set_ana_state(group, state) {
            self.for_each_controller(ControllerType::Io, |controller| {
                controller.lock_inner().async_events.notify(AsyncEvent::AnaChanged);
            });
        }
    }

    /// The current access control list.
    pub fn host_acl(&self) -> HostAcl {
        self.registry.lock().host_acl.clone()
    }

    /// Replaces the access control list. Ends the controllers of hosts that lose access, shows or hides the
    /// subsystem in the discovery log, and notifies the discovery controllers for which that changes.
    pub fn set_host_acl(&self, host_acl: HostAcl) {
        let mut affected = Vec::new();
        {
            let registry = &mut *self.registry.lock();
            if registry.host_acl == host_acl {
                return;
            }
            let before = std::mem::replace(&mut registry.host_acl, host_acl);
            self.discovery_addresses.lock().generation += 1;
            for controller in registry.controllers.values() {
                let (was, is) =
                    (before.allows(&controller.host.nqn), registry.host_acl.allows(&controller.host.nqn));
                if was != is {
                    affected.push(Arc::clone(controller));
                }
            }
        }
        for controller in affected {
            match controller.controller_type {
                ControllerType::Discovery => {
                    controller.lock_inner().async_events.notify(AsyncEvent::DiscoveryChanged)
                }
                // A host that has regained access meanwhile keeps its controller.
                ControllerType::Io if self.registry.lock().host_acl.allows(&controller.host.nqn) => {}
                ControllerType::Io => {
                    controller.terminate(ControllerState::Disconnected);
                    self.unregister_controller(&controller);
                }
            }
        }
    }

    /// Sets the target's addresses in the discovery log, and notifies discovery controllers of a change.
    pub fn set_listeners(&self, addresses: Vec<SocketAddr>) {
        self.update_discovery_addresses(|discovery| {
            std::mem::replace(&mut discovery.listeners, addresses.clone()) != addresses
        });
    }

    /// Sets the other discovery services in the discovery log, and notifies discovery controllers of a
    /// change.
    pub fn set_referrals(&self, addresses: Vec<SocketAddr>) {
        self.update_discovery_addresses(|discovery| {
            std::mem::replace(&mut discovery.referrals, addresses.clone()) != addresses
        });
    }

    /// A consistent view of the discovery addresses and the access control list.
    pub(crate) fn discovery_snapshot(&self) -> (DiscoveryAddresses, HostAcl) {
        let registry = self.registry.lock();
        (self.discovery_addresses.lock().clone(), registry.host_acl.clone())
    }

    /// Applies `change`, which returns whether it changed anything, and notifies discovery controllers if
    /// so.
    fn update_discovery_addresses(&self, change: impl FnOnce(&mut DiscoveryAddresses) -> bool) {
        {
            let discovery = &mut *self.discovery_addresses.lock();
            if !change(discovery) {
                return;
            }
            discovery.generation += 1;
        }
        self.for_each_controller(ControllerType::Discovery, |controller| {
            controller.lock_inner().async_events.notify(AsyncEvent::DiscoveryChanged);
        });
    }

    /// The node's part of the health log.
    pub fn health(&self) -> HealthStatus {
        *self.health.lock()
    }

    /// Replaces the node's part of the health log, and notifies hosts of new critical warnings.
    pub fn set_health(&self, health: HealthStatus) {
        let before = std::mem::replace(&mut *self.health.lock(), health);
        let new = health.critical_warnings() & !before.critical_warnings();
        for event in AsyncEvent::for_critical_warnings(new) {
            self.for_each_controller(ControllerType::Io, |controller| {
                controller.lock_inner().async_events.notify(event)
            });
        }
    }

    fn for_each_controller(&self, controller_type: ControllerType, notify: impl Fn(&Controller)) {
        let registry = self.registry.lock();
        registry
            .controllers
            .values()
            .filter(|controller| controller.controller_type == controller_type)
            .for_each(|controller| notify(controller));
    }
}
