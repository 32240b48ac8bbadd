//! Identifiers of cores and tenants in this crate.

use std::fmt;

/// A core of the node: an index, from 0 in the order of the node's configuration, into every list with an entry for
/// each core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreId(pub u16);

/// A tenant: a small number that the node assigned to a host NQN. It is reused after the tenant disconnects;
/// [`crate::fair_queue`] describes the state that remains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

impl CoreId {
    /// The core at this index.
    ///
    /// # Panics
    /// If the index is 65,536 or more.
    pub fn from_index(index: usize) -> CoreId {
        CoreId(u16::try_from(index).expect("a node has fewer cores"))
    }

    /// Its index.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for CoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "core {}", self.0)
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tenant {}", self.0)
    }
}
