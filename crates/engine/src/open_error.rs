//! The errors of formatting, opening and verifying a volume.

use crate::EngineError;
use crate::common::superblock::SuperblockError;
use octokv_device::DeviceError;
use std::fmt;

/// Why a volume was not formatted, opened or verified. The texts complete "device NAME: …".
///
/// [`Volume::open`](crate::Volume::open) writes nothing before recovery has read everything, so each of these leaves the device
/// as it was, except [`OpenError::Device`] and [`OpenError::Engine`], which the writes at the end of recovery can
/// return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// No superblock that this code can use.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The volume cannot be on so many devices.
    #[error("a volume lies on at most {most} devices, not on {have}")]
    DeviceCount {
        /// The number of devices given.
        have: usize,
        /// The largest number that the engine serves.
        most: usize,
    },
    /// A device of several has no superblock of their volume. `at` is its place in the list, from 0.
    #[error("device {at} of the list is none of a volume of several: {error}")]
    SpanDevice {
        /// Its place in the list, from 0.
        at: u16,
        /// Why its first blocks hold no superblock of such a volume.
        error: SuperblockError,
    },
    /// The list lacks devices of the volume, or has more.
    #[error("the volume has {count} devices, and {have} are given")]
    DevicesMissing {
        /// The number of devices given.
        have: usize,
        /// The number of devices of the volume.
        count: u16,
    },
    /// A device is of another volume than the first.
    #[error("device {at} of the list is one of another volume")]
    OtherVolume {
        /// Its place in the list, from 0.
        at: u16,
    },
    /// Two devices have the same place in the volume: one is a copy of the other.
    #[error("device {at} of the list is device {index} of the volume, as another one is")]
    DeviceTwice {
        /// Its place in the list, from 0.
        at: u16,
        /// Its index in the volume.
        index: u16,
    },
    /// A device was replaced: the operator said that what it holds is lost, and the volume goes on without it.
    #[error("device {at} of the list was replaced by another: what it holds is out of date")]
    DeviceReplaced {
        /// Its place in the list, from 0.
        at: u16,
    },
    /// A device is being replaced, or the replacement failed after another device may have counted it.
    #[error("device {at} of the list is given up: its replacement has not ended")]
    DeviceGivenUp {
        /// Its place in the list, from 0.
        at: u16,
    },
    /// No other device serves that could count the replacement of one.
    #[error("none of its other devices serves, and one has to know that this was replaced")]
    NotCounted,
    /// The volume is on one device, which takes down all of its keys.
    #[error("it is on one device, and nothing of it would be left")]
    NotSpanned,
    /// A device is to be added to a volume that was formatted on one device.
    #[error("its volume is on one device alone, and only one that was formatted on several can get another")]
    NotExtendable,
    /// A device is to be added while another one of the volume is not available.
    #[error(
        "device {index} of the volume is not available: it has to be there, or to be replaced, before another is added"
    )]
    OtherDeviceAbsent {
        /// Its index in the volume.
        index: u16,
    },
    /// A device is to be added, and a core has no handle on one that was added before.
    #[error(
        "a core could not open device {index} of the volume: open the namespace again before another is added"
    )]
    CoreLacksDevice {
        /// Its index in the volume.
        index: u16,
    },
    /// The addition of a device ended after it was recorded on some devices of the volume.
    #[error(
        "device {index} of the volume could not record the addition, and others may have: keep the new device, and repeat the addition"
    )]
    AdditionUnfinished {
        /// The index of the device that failed.
        index: u16,
    },
    /// A device was replaced as often as can be counted.
    #[error("device {index} of the volume was replaced 255 times: format a new volume")]
    ReplacementsMax {
        /// Its index in the volume.
        index: u16,
    },
    /// A volume formatted now would have other limits of keys or values than those on the other devices.
    #[error("the configured format differs from that of the other devices")]
    OtherFormat,
    /// A volume on several devices has the ring of XXH3.
    #[error("a volume on several devices hashes its keys with XXH3")]
    SpanHash,
    /// Only the hash engine, from its format 2 on, and the log engine have what a swap region needs.
    #[error("swap regions need the hash engine (format 2) or the log engine")]
    SwapEngine,
    /// The size of swap regions.
    #[error("a swap region of {bytes} bytes is not a multiple of 64 KiB, or too large")]
    SwapBytes {
        /// The size.
        bytes: u64,
    },
    /// The device is smaller than the volume, or than any volume can be.
    #[error("it has {have_bytes} bytes, and {need_bytes} are needed")]
    TooSmall {
        /// The size of the device in bytes.
        have_bytes: u64,
        /// The smallest sufficient size in bytes.
        need_bytes: u64,
    },
    /// A record of the longest configured value would span more units than an index entry can express, or too large a part of the
    /// data area.
    #[error("a volume of its size and unit holds values of at most {value_bytes_max} bytes")]
    ValuesTooLong {
        /// The longest value that the volume allows, in bytes.
        value_bytes_max: u64,
    },
    /// The device's blocks are larger than the volume's units.
    #[error("its blocks have {block_bytes} bytes, more than the volume's units of {unit_bytes}")]
    BlockTooLarge {
        /// The device's block size in bytes.
        block_bytes: u32,
        /// The volume's unit in bytes.
        unit_bytes: u32,
    },
    /// Neither copy of a metadata structure passes its checks. A crash alone damages at most one copy.
    #[error("both copies of {structure}, at blocks {} and {}, are damaged or unreadable", .lbas[0], .lbas[1])]
    CopiesUnreadable {
        /// The structure.
        structure: MetadataStructure,
        /// The first block of each copy.
        lbas: [u64; 2],
    },
    /// Metadata with valid checksums that contradict each other.
    #[error("its index is inconsistent at block {lba}: {mismatch}")]
    Inconsistent {
        /// The first block of the structure or record that does not fit.
        lba: u64,
        /// What disagrees.
        mismatch: IndexMismatch,
    },
    /// The device failed. The text has the cause, so that it is no source: a printed chain would repeat it.
    #[error("it failed: {0}")]
    Device(DeviceError),
    /// No memory is left within the buffer budget.
    #[error("out of buffers")]
    NoMemory,
    /// Another failure of the engine while it completed the opening.
    #[error(transparent)]
    Engine(EngineError),
}

impl OpenError {
    /// Whether the volume is damaged, so that [`Volume::verify`](crate::Volume::verify) can list its intact structures.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            OpenError::Superblock(SuperblockError::Damaged | SuperblockError::Inconsistent)
                | OpenError::CopiesUnreadable { .. }
                | OpenError::Inconsistent { .. }
        )
    }
}

impl OpenError {
    /// Whether structures and records of this format may be on the device, so that a scan for them is worth its time.
    pub(crate) fn may_leave_records(&self) -> bool {
        let is_without_superblock =
            matches!(self, OpenError::Superblock(SuperblockError::Blank | SuperblockError::Foreign));
        let is_cut_short = matches!(self, OpenError::TooSmall { .. } | OpenError::Device(_));
        self.is_damage() || is_without_superblock || is_cut_short
    }
}

impl From<DeviceError> for OpenError {
    fn from(error: DeviceError) -> OpenError {
        OpenError::Device(error)
    }
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> OpenError {
        match error {
            EngineError::Device { error, .. } => OpenError::Device(error),
            EngineError::NoMemory => OpenError::NoMemory,
            error => OpenError::Engine(error),
        }
    }
}

/// A metadata structure that is written in two copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataStructure {
    /// The superblock of one parity of generations.
    Superblock,
    /// The checkpoint image of one index partition.
    CheckpointImage {
        /// The partition, from 0.
        partition: u32,
    },
    /// A journal batch.
    JournalBatch {
        /// Its number.
        batch: u64,
    },
}

impl fmt::Display for MetadataStructure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetadataStructure::Superblock => f.write_str("a superblock"),
            MetadataStructure::CheckpointImage { partition } => {
                write!(f, "the checkpoint image of index partition {partition}")
            }
            MetadataStructure::JournalBatch { batch } => write!(f, "journal batch {batch}"),
        }
    }
}

/// What disagrees in an inconsistent index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexMismatch {
    /// A journal entry replaces or deletes a record that neither the checkpoint nor an earlier entry wrote.
    #[error("journal entry {entry} replaces a record there that the index does not have")]
    MissingPredecessor {
        /// The number of the entry.
        entry: u64,
    },
    /// A journal batch names a record outside the record area, or an entry number that cannot occur.
    #[error("journal batch {batch} has a valid checksum and entries that cannot be")]
    ImpossibleBatch {
        /// The number of the batch.
        batch: u64,
    },
    /// An index entry names units outside the record area.
    #[error("an index entry names {units} units there, outside the record area")]
    OutsideRecordArea {
        /// How many units the entry names.
        units: u64,
    },
    /// An edit in the journal is none of the tree to which it belongs.
    #[error("journal entry {entry} has a valid checksum and does not fit the tree")]
    TreeEdit {
        /// The number of the entry.
        entry: u64,
    },
    /// The image of a tree is not consistent.
    #[error("the image of the tree there has valid checksums and is not consistent")]
    TreeImage,
    /// Tables or segments of a tree share space, or lie outside of it.
    #[error("tables or value segments share space, or lie outside of the space for them")]
    TreeSpace,
    /// Two index entries name the same unit.
    #[error("an index entry names {units} units there, and another entry names one of them too")]
    OverlappingRecords {
        /// How many units the entry names.
        units: u64,
    },
    /// The images of the stores in a checkpoint are not consistent.
    #[error("the images of the stores there have valid checksums and are not consistent")]
    StoreImages,
    /// An image in a key log contradicts those before it, or the checkpoint.
    #[error("image {sequence} of a key log, there, has valid checksums and contradicts what is before it")]
    LogImage {
        /// Its number in the key log.
        sequence: u64,
    },
    /// Two logs claim the same chunk.
    #[error("two logs claim chunk {chunk}, which begins there")]
    ChunkClaimedTwice {
        /// The chunk.
        chunk: u32,
    },
    /// The image of a segment lies outside of its store's key log.
    #[error("the image of segment {segment} lies there, outside of its key log")]
    SegmentOutsideLog {
        /// The segment.
        segment: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;

    #[test]
    fn a_printed_chain_names_each_cause_once() {
        let device = OpenError::from(DeviceError::Io(5));
        assert_eq!(device.to_string(), format!("it failed: {}", DeviceError::Io(5)));
        let place = crate::VolumePlace::default();
        let engine = EngineError::Device { error: DeviceError::NoSpace, place };
        let errors =
            [device, OpenError::from(engine), EngineError::ReadOnly.into(), SuperblockError::Blank.into()];
        for error in errors {
            assert!(error.source().is_none(), "{error}, then its source");
        }
    }
}
