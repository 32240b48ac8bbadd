//! What may change while a target runs: namespaces, who may connect, listeners, referrals, access, health.
//!
//! In: changes, of any thread. Out: what admin commands read from now on, and notices for the hosts that a
//! change concerns. Requests that are out already are not touched: they complete as they would have.

use crate::async_events::Notice;
use crate::config::NamespaceInfo;
use crate::controller::{Condition, Controller, Purpose};
use crate::health::HealthFacts;
use crate::host_acl::Hosts;
use crate::namespaces::{NamespaceExists, Namespaces};
use crate::subsystem::{Places, Target};
use octokv_base::NamespaceId;
use octokv_wire::log_page::AnaState;
use std::net::SocketAddr;
use std::sync::Arc;

impl Target {
    /// The namespaces as they are now.
    pub fn namespaces(&self) -> Arc<Namespaces> {
        self.table.read()
    }

    /// Adds a namespace. Connected hosts hear of it.
    ///
    /// # Errors
    /// When its identifier or its NGUID is taken.
    ///
    /// # Panics
    /// When its bounds are beyond those of the target's settings, or none of a namespace.
    pub fn add_namespace(&self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        info.assert_sound(self.settings());
        let id = info.id;
        self.table.add(info)?;
        self.namespace_changed(id);
        Ok(())
    }

    /// Removes a namespace, and gives it. Connected hosts hear of it, new commands on it fail, and
    /// requests that are out end as usual.
    pub fn remove_namespace(&self, id: NamespaceId) -> Option<NamespaceInfo> {
        let removed = self.table.remove(id)?;
        self.each_controller(Purpose::Io, |controller| {
            controller.forget_namespace(id);
            controller.namespace_changed(&removed);
        });
        Some(removed)
    }

    /// Tells every host that something about a namespace (its size, its readiness) changed.
    pub fn namespace_changed(&self, id: NamespaceId) {
        if let Some(info) = self.table.read().get(id) {
            self.each_controller(Purpose::Io, |controller| controller.namespace_changed(info));
        }
    }

    /// The groups of asymmetric access that have or had namespaces or were given a state, with it, by
    /// rising identifier.
    pub fn ana_states(&self) -> Vec<(u32, AnaState)> {
        self.table.read().groups().map(|(id, group)| (id, group.state)).collect()
    }

    /// Changes the access to the namespaces of a group. Connected hosts hear of it.
    ///
    /// # Panics
    /// When the group is not one of 1 to [`ANA_GROUPS_MAX`](crate::namespaces::ANA_GROUPS_MAX).
    pub fn set_ana_state(&self, group: u32, state: AnaState) {
        if self.table.set_state(group, state) {
            self.each_controller(Purpose::Io, |controller| {
                controller.book().events.notify(Notice::AccessChanged);
            });
        }
    }

    /// The hosts that may connect.
    pub fn hosts(&self) -> Hosts {
        self.registry.lock().hosts.clone()
    }

    /// Changes which hosts may connect. Controllers of a host that may no more are ended; discovery
    /// shows and hides the subsystem, and the hosts for which that is a change hear of it.
    pub fn set_hosts(&self, hosts: Hosts) {
        let mut concerned = Vec::new();
        {
            let registry = &mut *self.registry.lock();
            if registry.hosts == hosts {
                return;
            }
            let before = std::mem::replace(&mut registry.hosts, hosts);
            self.places.lock().generation += 1;
            for controller in registry.controllers.values() {
                let (was, is) =
                    (before.allows(&controller.host.nqn), registry.hosts.allows(&controller.host.nqn));
                if was != is {
                    concerned.push(Arc::clone(controller));
                }
            }
        }
        for controller in concerned {
            match controller.purpose {
                Purpose::Discovery => controller.book().events.notify(Notice::DiscoveryChanged),
                // A host that is allowed again connects anew; one that is not must go.
                Purpose::Io if self.registry.lock().hosts.allows(&controller.host.nqn) => {}
                Purpose::Io => {
                    controller.end(Condition::Gone);
                    self.forget(&controller);
                }
            }
        }
    }

    /// Where the target listens: what the discovery log tells. Discovery controllers hear of a change.
    pub fn set_listeners(&self, addresses: Vec<SocketAddr>) {
        self.change_places(|places| std::mem::replace(&mut places.listeners, addresses.clone()) != addresses);
    }

    /// Other discovery services that the discovery log names. Discovery controllers hear of a change.
    pub fn set_referrals(&self, addresses: Vec<SocketAddr>) {
        self.change_places(|places| std::mem::replace(&mut places.referrals, addresses.clone()) != addresses);
    }

    /// What the discovery log is made of, as of one moment.
    pub(crate) fn discovery_facts(&self) -> (Places, Hosts) {
        let registry = self.registry.lock();
        (self.places.lock().clone(), registry.hosts.clone())
    }

    /// `change` says whether it was one.
    fn change_places(&self, change: impl FnOnce(&mut Places) -> bool) {
        {
            let places = &mut *self.places.lock();
            if !change(places) {
                return;
            }
            places.generation += 1;
        }
        self.each_controller(Purpose::Discovery, |controller| {
            controller.book().events.notify(Notice::DiscoveryChanged);
        });
    }

    /// The facts that the health log tells.
    pub fn health(&self) -> HealthFacts {
        *self.health.lock()
    }

    /// Changes the facts that the health log tells. Hosts hear of a warning that is new.
    pub fn set_health(&self, facts: HealthFacts) {
        let before = std::mem::replace(&mut *self.health.lock(), facts);
        let new = facts.warnings() & !before.warnings();
        for notice in Notice::of_warnings(new) {
            self.each_controller(Purpose::Io, |controller| controller.book().events.notify(notice));
        }
    }

    fn each_controller(&self, purpose: Purpose, tell: impl Fn(&Controller)) {
        let registry = self.registry.lock();
        registry.controllers.values().filter(|one| one.purpose == purpose).for_each(|one| tell(one));
    }
}
