//! The identifiers of the simulation's hosts, reactors, disks and drivers.

/// A simulated host, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimHostId(pub u32);

/// A reactor of the simulation, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimReactorId(pub u32);

/// A simulated disk, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimDiskId(pub u32);

/// The sockets or the device queue of one core, by the index of their owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverId(pub(crate) u32);
