//! Why an operation failed.

use octokv_device::DeviceError;
use std::fmt;

/// The part of a volume that an error concerns: device and partition. Six bytes, so that an [`EngineError`] has sixteen:
/// results are moved on the path of every request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumePlace {
    device: u16,
    /// The low and the high half.
    partition: [u16; 2],
}

impl VolumePlace {
    /// The place of a partition on a device of a volume.
    pub fn new(device: u16, partition: u32) -> VolumePlace {
        VolumePlace { device, partition: [partition as u16, (partition >> 16) as u16] }
    }

    /// The index of the device within its volume.
    pub fn device(self) -> u16 {
        self.device
    }

    /// The identifier of the partition.
    pub fn partition(self) -> u32 {
        u32::from(self.partition[0]) | u32::from(self.partition[1]) << 16
    }
}

impl fmt::Display for VolumePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}, partition {}", self.device(), self.partition())
    }
}

/// What an engine or a format may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Versions of keys, tombstones and scans.
    Versions,
    /// Expiry times.
    Expiry,
    /// More than one partition.
    Partitions,
    /// Giving up space in an order of the engine's own.
    Reclaim,
    /// The order of ring positions: the volume hashes its keys otherwise.
    RingOrder,
    /// Iterators over snapshots.
    Iterators,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Capability::Versions => "versions",
            Capability::Expiry => "expiry times",
            Capability::Partitions => "several partitions",
            Capability::Reclaim => "giving up space",
            Capability::RingOrder => "ring order",
            Capability::Iterators => "iterators",
        })
    }
}

/// Why an operation failed. The outcomes that depend on the key (not found, full) are not errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The key's record on the device is not the one that was written.
    #[error("the record at block {lba} of {place} is corrupt")]
    Corrupt {
        /// The first block of the record.
        lba: u64,
        /// Its device and partition.
        place: VolumePlace,
    },
    /// A device failed.
    #[error("the device failed ({place}): {error}")]
    Device {
        /// The failure.
        error: DeviceError,
        /// The device, and the partition of the operation.
        place: VolumePlace,
    },
    /// A journal write failed earlier: nothing more is written until the engine is opened again.
    #[error("read-only since a journal write failed; restart to recover")]
    ReadOnly,
    /// No memory is left within the buffer budget; the same operation may succeed later.
    #[error("out of buffers; try again")]
    NoMemory,
    /// No partition of the volume has the key.
    #[error("no partition of the volume has the key")]
    NoPartition,
    /// The iterator was not used for so long that its snapshot was given up.
    #[error("the iterator has expired")]
    IteratorExpired,
    /// The engine, or the format of this volume, cannot do it.
    #[error("the volume's format has no {0}")]
    Unsupported(Capability),
}

const _: () = assert!(size_of::<EngineError>() == 16);

/// The failure of a volume's first device, in its first partition: those of a volume with one of each.
impl From<DeviceError> for EngineError {
    #[cold]
    fn from(error: DeviceError) -> EngineError {
        EngineError::Device { error, place: VolumePlace::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_device_and_partition() {
        let place = VolumePlace::new(3, 0x0001_0002);
        assert_eq!((place.device(), place.partition()), (3, 65_538));
        let corrupt = EngineError::Corrupt { lba: 7, place };
        assert_eq!(corrupt.to_string(), "the record at block 7 of device 3, partition 65538 is corrupt");
        let failed = EngineError::Device { error: DeviceError::Io(5), place };
        assert!(failed.to_string().contains("(device 3, partition 65538)"), "{failed}");
        assert_eq!(
            EngineError::Unsupported(Capability::Expiry).to_string(),
            "the volume's format has no expiry times"
        );
    }
}
