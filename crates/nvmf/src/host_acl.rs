//! Access control: the hosts that may connect to the subsystem and see it in the discovery log.

use std::collections::BTreeSet;

/// An access control list of host NQNs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostAcl {
    /// Every host has access.
    #[default]
    Any,
    /// Only hosts with these NQNs have access.
    Listed(BTreeSet<String>),
}

impl HostAcl {
    /// Whether the host with this NQN has access.
    pub fn allows(&self, nqn: &str) -> bool {
        match self {
            HostAcl::Any => true,
            HostAcl::Listed(names) => names.contains(nqn),
        }
    }
}
