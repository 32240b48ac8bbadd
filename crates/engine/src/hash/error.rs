//! Why a volume was not opened, in words for its operator.

use super::superblock::SuperblockError;
use crate::EngineError;
use octokv_device::DeviceError;
use std::fmt;

/// Why a volume was not opened. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The device is not a volume that this code knows.
    Superblock(SuperblockError),
    /// The device has fewer bytes than the volume needs, or than any volume does.
    TooSmall {
        /// The size of the device in bytes.
        have_bytes: u64,
        /// The size it must have at least, in bytes.
        need_bytes: u64,
    },
    /// Values as long as the settings allow would span more units than a record may.
    ValuesTooLong {
        /// The longest values that units of this size allow, in bytes.
        value_bytes_max: u64,
    },
    /// The device's blocks are larger than the volume's units.
    BlockTooLarge {
        /// The device's block size in bytes.
        block_bytes: u32,
        /// The volume's unit in bytes.
        unit_bytes: u32,
    },
    /// Both copies of a block of metadata are damaged, which no crash alone does.
    Damaged {
        /// Which block of metadata.
        structure: &'static str,
        /// Where it lies.
        lba: u64,
    },
    /// The device failed.
    Device(DeviceError),
    /// No memory is left within the budget.
    NoMemory,
}

impl From<DeviceError> for OpenError {
    fn from(error: DeviceError) -> OpenError {
        OpenError::Device(error)
    }
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> OpenError {
        match error {
            EngineError::Device(error) => OpenError::Device(error),
            EngineError::Corrupt { lba } => OpenError::Damaged { structure: "record", lba },
            EngineError::ReadOnly => OpenError::Damaged { structure: "journal", lba: 0 },
            EngineError::NoMemory => OpenError::NoMemory,
        }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Superblock(SuperblockError::Blank) => f.write_str("it is not formatted"),
            OpenError::Superblock(SuperblockError::Foreign) => {
                f.write_str("it holds something else than an octokv volume")
            }
            OpenError::Superblock(SuperblockError::Version(version)) => {
                write!(f, "it is a volume of format version {version}, and this octokv knows version 1")
            }
            OpenError::Superblock(SuperblockError::Engine(engine)) => {
                write!(f, "it is a volume of another engine (number {engine}), not of the hash engine")
            }
            OpenError::Superblock(SuperblockError::Damaged) => {
                f.write_str("both copies of its superblock are damaged")
            }
            OpenError::TooSmall { have_bytes, need_bytes } => {
                write!(f, "it has {have_bytes} bytes, and {need_bytes} are needed")
            }
            OpenError::ValuesTooLong { value_bytes_max: most_bytes } => {
                write!(f, "units of its size hold values of at most {most_bytes} bytes")
            }
            OpenError::BlockTooLarge { block_bytes, unit_bytes } => {
                write!(f, "its blocks have {block_bytes} bytes, more than the volume's units of {unit_bytes}")
            }
            OpenError::Damaged { structure: what, lba } => {
                write!(f, "both copies of the {what} at block {lba} are damaged")
            }
            OpenError::Device(error) => write!(f, "it failed: {error}"),
            OpenError::NoMemory => f.write_str("out of buffers"),
        }
    }
}

impl std::error::Error for OpenError {}
