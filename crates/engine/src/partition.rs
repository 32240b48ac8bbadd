//! Partitions: the parts of a volume that are placed, moved and freed as a whole.
//!
//! A volume is one device or several, and its partitions divide the ring of keys: their ranges do not overlap, and a key
//! belongs to the one whose range has its position. A cluster's virtual node is a partition.

use crate::EngineError;
use octokv_base::{RingPosition, RingRange};
use std::future::Future;

/// One partition of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionInfo {
    /// Its identifier: never used again within the volume.
    pub id: u32,
    /// The positions of its keys.
    pub range: RingRange,
    /// The index of its device within the volume.
    pub device: u16,
    /// The space that it may use, in bytes.
    pub size_bytes: u64,
    /// The space that its records use, in bytes.
    pub used_bytes: u64,
}

/// Why partitions cannot be changed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// No partition has this identifier.
    #[error("there is no partition {0}")]
    Unknown(u32),
    /// The range overlaps that of another partition.
    #[error("its range overlaps that of partition {0}")]
    Overlap(u32),
    /// The volume has no device with this index.
    #[error("there is no device {0}")]
    UnknownDevice(u16),
    /// The position does not divide the range into two.
    #[error("position {0} does not divide its range")]
    NotWithin(RingPosition),
    /// The operation failed in the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Changes of a volume's partitions at run time. Each is atomic: after a crash it has happened or not.
pub trait Partitions {
    /// The partitions, in the order of their ranges.
    fn partitions(&self) -> Vec<PartitionInfo>;
    /// Creates an empty partition on a device, and gives its identifier.
    ///
    /// # Errors
    /// [`PartitionError`]; nothing changed.
    fn create_partition(
        &self,
        range: RingRange,
        device: u16,
    ) -> impl Future<Output = Result<u32, PartitionError>>;
    /// Splits a partition: it keeps the keys below `at`, and a new one, whose identifier is given, has the others.
    ///
    /// # Errors
    /// [`PartitionError`]; nothing changed.
    fn split_partition(&self, id: u32, at: RingPosition)
    -> impl Future<Output = Result<u32, PartitionError>>;
    /// Frees a partition and everything in it. Its keys then belong to no partition.
    ///
    /// # Errors
    /// [`PartitionError`]; nothing changed.
    fn free_partition(&self, id: u32) -> impl Future<Output = Result<(), PartitionError>>;
}
