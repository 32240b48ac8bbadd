//! Which hosts may connect to the subsystem, and see it.

use std::collections::BTreeSet;

/// The hosts that may connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostAcl {
    /// Every one.
    #[default]
    Any,
    /// Those of these names (NQN).
    Listed(BTreeSet<String>),
}

impl HostAcl {
    /// Whether the host of this name may connect.
    pub fn allows(&self, nqn: &str) -> bool {
        match self {
            HostAcl::Any => true,
            HostAcl::Listed(names) => names.contains(nqn),
        }
    }
}
