//! What may change while a target runs: namespaces, who may connect, listeners, referrals, access, health.
//!
//! In: changes, of any thread. Out: what admin commands read from now on, and notices for the hosts that a
//! change concerns. Requests that are out already are not touched: they complete as they would have.

use crate::async_events::AsyncEvent;
use crate::controller::{Controller, ControllerState, ControllerType};
use crate::health::HealthStatus;
use crate::host_acl::HostAcl;
use crate::namespace_directory::{NamespaceExists, NamespaceSnapshot};
use crate::namespace_info::NamespaceInfo;
use crate::subsystem::{DiscoveryAddresses, Target};
use octokv_base::NamespaceId;
use octokv_wire::log_page::AnaState;
use std::net::SocketAddr;
use std::sync::Arc;

impl Target {
    /// The namespaces as they are now.
    pub fn namespaces(&self) -> Arc<NamespaceSnapshot> {
        self.namespace_directory.snapshot()
    }

    /// Adds a namespace. Connected hosts hear of it.
    ///
    /// # Errors
    /// When its identifier or its NGUID is taken.
    ///
    /// # Panics
    /// When its bounds are beyond those of the target's settings, or none of a namespace.
    pub fn add_namespace(&self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        info.assert_valid(self.config());
        let id = info.id;
        self.namespace_directory.add(info)?;
        self.notify_namespace_changed(id);
        Ok(())
    }

    /// Removes a namespace, and gives it. Connected hosts hear of it, new commands on it fail, and
    /// requests that are out end as usual.
    pub fn remove_namespace(&self, id: NamespaceId) -> Option<NamespaceInfo> {
        let removed = self.namespace_directory.remove(id)?;
        self.for_each_controller(ControllerType::Io, |controller| {
            controller.forget_namespace(id);
            controller.notify_namespace_changed(&removed);
        });
        Some(removed)
    }

    /// Tells every host that something about a namespace (its size, its readiness) changed.
    pub fn notify_namespace_changed(&self, id: NamespaceId) {
        if let Some(info) = self.namespace_directory.snapshot().get(id) {
            self.for_each_controller(ControllerType::Io, |controller| {
                controller.notify_namespace_changed(info)
            });
        }
    }

    /// The groups of asymmetric access that have or had namespaces or were given a state, with it, by
    /// rising identifier.
    pub fn ana_states(&self) -> Vec<(u32, AnaState)> {
        self.namespace_directory.snapshot().groups().map(|(id, group)| (id, group.state)).collect()
    }

    /// Changes the access to the namespaces of a group. Connected hosts hear of it.
    ///
    /// # Panics
    /// When the group is not one of 1 to [`ANA_GROUPS_MAX`](crate::ANA_GROUPS_MAX).
    pub fn set_ana_state(&self, group: u32, state: AnaState) {
        if self.namespace_directory.set_ana_state(group, state) {
            self.for_each_controller(ControllerType::Io, |controller| {
                controller.lock_inner().async_events.notify(AsyncEvent::AnaChanged);
            });
        }
    }

    /// The hosts that may connect.
    pub fn host_acl(&self) -> HostAcl {
        self.registry.lock().host_acl.clone()
    }

    /// Changes which hosts may connect. Controllers of a host that may no more are ended; discovery
    /// shows and hides the subsystem, and the hosts for which that is a change hear of it.
    pub fn set_host_acl(&self, host_acl: HostAcl) {
        let mut concerned = Vec::new();
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
                    concerned.push(Arc::clone(controller));
                }
            }
        }
        for controller in concerned {
            match controller.controller_type {
                ControllerType::Discovery => {
                    controller.lock_inner().async_events.notify(AsyncEvent::DiscoveryChanged)
                }
                // A host that is allowed again connects anew; one that is not must go.
                ControllerType::Io if self.registry.lock().host_acl.allows(&controller.host.nqn) => {}
                ControllerType::Io => {
                    controller.terminate(ControllerState::Disconnected);
                    self.unregister_controller(&controller);
                }
            }
        }
    }

    /// Where the target listens: what the discovery log tells. Discovery controllers hear of a change.
    pub fn set_listeners(&self, addresses: Vec<SocketAddr>) {
        self.update_discovery_addresses(|discovery| {
            std::mem::replace(&mut discovery.listeners, addresses.clone()) != addresses
        });
    }

    /// Other discovery services that the discovery log names. Discovery controllers hear of a change.
    pub fn set_referrals(&self, addresses: Vec<SocketAddr>) {
        self.update_discovery_addresses(|discovery| {
            std::mem::replace(&mut discovery.referrals, addresses.clone()) != addresses
        });
    }

    /// What the discovery log is made of, as of one moment.
    pub(crate) fn discovery_snapshot(&self) -> (DiscoveryAddresses, HostAcl) {
        let registry = self.registry.lock();
        (self.discovery_addresses.lock().clone(), registry.host_acl.clone())
    }

    /// `change` says whether it was one.
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

    /// The facts that the health log tells.
    pub fn health(&self) -> HealthStatus {
        *self.health.lock()
    }

    /// Changes the facts that the health log tells. Hosts hear of a warning that is new.
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
            .filter(|one| one.controller_type == controller_type)
            .for_each(|one| notify(one));
    }
}
