//! The names by which cores and flows are spoken of in this room.

use std::fmt;

/// A core of the node, counted from 0 in the order of the node's settings: an index into whatever has one entry for
/// each core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreId(pub u16);

/// A flow, which is a tenant: a small number that the node gave to a host's name. It may be given again once the flow
/// has gone; [`crate::fair`] says what is remembered of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

impl CoreId {
    /// The core at this place of a list with an entry for each.
    ///
    /// # Panics
    /// Where a node had more than 65,536 cores.
    pub fn from_index(index: usize) -> CoreId {
        CoreId(u16::try_from(index).expect("a node has fewer cores"))
    }

    /// Its place in such a list.
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
        write!(f, "flow {}", self.0)
    }
}
