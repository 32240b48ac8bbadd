//! The identifiers of the simulation's hosts, reactors and disks.

/// A simulated host, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimHostId(pub u32);

/// A reactor of the simulation, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimReactorId(pub u32);

/// A simulated disk, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimDiskId(pub u32);
