//! Identifiers as distinct types: block addresses and namespace IDs.

use std::fmt;

/// A logical block address on one device, in units of that device's block size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// A namespace ID (NSID) within a subsystem: 1 and up (NVMe Base 2.1, 3.2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u32);

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
