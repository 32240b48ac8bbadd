//! The reports of a verification: record problems, and the findings of the scan of an unrecoverable volume.

use crate::common::superblock::SuperblockError;
use crate::open_error::OpenError;
use octokv_base::Key;
use octokv_device::DeviceError;
use std::fmt;

/// A record that cannot be read back as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordProblem {
    /// The index of its device, in a volume on several.
    pub device: Option<u16>,
    /// The first block of the record.
    pub lba: u64,
    /// Its key, if the header and key are intact.
    pub key: Option<Key>,
    /// The kind of damage.
    pub kind: ProblemKind,
}

/// Why a record is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The header or key fails its checksum, or there is no record.
    Header,
    /// An intact record of another location, sequence number, key or volume.
    WrongRecord,
    /// The value fails its checksum.
    Value,
    /// A block of a table fails its checksum, or the medium has lost it: the entries in it are lost.
    TableBlock,
    /// A bucket of a segment image fails its checksum: the entries in it are lost.
    Bucket,
    /// The device failed to read it.
    Unreadable,
}

impl fmt::Display for ProblemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProblemKind::Header => "header or key damaged",
            ProblemKind::WrongRecord => "holds another record",
            ProblemKind::Value => "value damaged",
            ProblemKind::TableBlock => "block of a table damaged",
            ProblemKind::Bucket => "bucket of a segment damaged",
            ProblemKind::Unreadable => "unreadable: the device failed",
        })
    }
}

impl fmt::Display for RecordProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = self.device {
            write!(f, "device {device}, ")?;
        }
        match &self.key {
            Some(key) => write!(f, "block {}, key {key}: {}", self.lba, self.kind),
            None => write!(f, "block {}: {}", self.lba, self.kind),
        }
    }
}

/// The result of verifying a volume that recovery can load.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Keys in the index.
    pub keys: u64,
    /// Bytes of values that were read and match their checksums.
    pub value_bytes: u64,
    /// Bytes of space in use.
    pub used_bytes: u64,
    /// Bytes of space for records.
    pub capacity_bytes: u64,
    /// Unverified journal entries whose records are incomplete: writes cut short by a crash, never acknowledged.
    pub dropped_entries: u64,
    /// Metadata structures of which one copy is damaged. The next opening repairs those that recovery read; the next
    /// checkpoint rewrites the others.
    pub damaged_copies: u64,
    /// Records that cannot be read back as they were written.
    pub problems: Vec<RecordProblem>,
    /// Whether the volume had a clean shutdown.
    pub is_clean_shutdown: bool,
}

impl VerifyReport {
    /// Adds the report of the volume on another device.
    pub fn add(&mut self, report: VerifyReport) {
        let VerifyReport { keys, value_bytes, used_bytes, capacity_bytes, .. } = report;
        self.keys += keys;
        self.value_bytes += value_bytes;
        self.used_bytes += used_bytes;
        self.capacity_bytes += capacity_bytes;
        self.dropped_entries += report.dropped_entries;
        self.damaged_copies += report.damaged_copies;
        self.is_clean_shutdown &= report.is_clean_shutdown;
        self.problems.extend(report.problems);
    }
}

/// Recovery cannot load the volume; if its structures may still be there, a scan has looked for them.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}")]
pub struct VerifyFailure {
    /// Why recovery failed.
    pub reason: OpenError,
    /// The totals of the scan; `None` if the reason leaves nothing to look for, such as another format version.
    pub remains: Option<SalvageReport>,
}

/// The totals of a scan of an unrecoverable volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SalvageReport {
    /// Intact superblock copies, 0 to 4.
    pub superblocks: u64,
    /// Intact checkpoint images, each copy counted.
    pub checkpoint_images: u64,
    /// Intact journal batches, each copy counted, obsolete ones included.
    pub journal_batches: u64,
    /// Intact records, obsolete ones included.
    pub records: u64,
    /// Bytes of the values of the intact records.
    pub value_bytes: u64,
    /// Structures and records that are recognized and damaged.
    pub damaged: u64,
    /// Blocks that the device cannot read.
    pub unreadable_blocks: u64,
    /// Blocks that contain zeros only, outside the structures above.
    pub blank_blocks: u64,
    /// Blocks with bytes that begin no structure: remainders of overwritten or damaged records.
    pub unrecognized_blocks: u64,
}

/// One structure, record or block that a scan found, intact or damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its first block.
    pub lba: u64,
    /// The structure that lies there.
    pub kind: FindingKind,
}

/// What a scan found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// An intact superblock.
    Superblock {
        /// Its generation.
        generation: u64,
    },
    /// A superblock copy that is blank, damaged or of other software.
    NoSuperblock(SuperblockError),
    /// An intact checkpoint image.
    CheckpointImage {
        /// The volume it belongs to.
        volume_id: u64,
        /// The number of the checkpoint.
        checkpoint_id: u64,
        /// The index partition.
        partition: u32,
        /// How many index entries it has.
        entries: u64,
    },
    /// The header of a checkpoint image whose checksum fails.
    DamagedImage,
    /// An intact journal batch.
    JournalBatch {
        /// The volume it belongs to.
        volume_id: u64,
        /// Its number.
        batch: u64,
        /// How many journal entries it has.
        entries: u64,
    },
    /// The header of a journal batch whose checksum fails.
    DamagedBatch,
    /// A record whose header, key and value match their checksums. It may be obsolete: of the records of a key the
    /// one with the highest sequence number is the newest, and the key may have been deleted since.
    Record {
        /// The volume it belongs to.
        volume_id: u64,
        /// Its key.
        key: Key,
        /// The length of its value in bytes.
        value_bytes: u64,
        /// Its sequence number, unique in the volume and rising.
        sequence: u64,
    },
    /// A record that is recognized and unusable.
    DamagedRecord {
        /// Its key, if the header and key are intact.
        key: Option<Key>,
        /// The kind of damage.
        problem: ProblemKind,
    },
    /// A block that the device cannot read.
    Unreadable(DeviceError),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}: ", self.lba)?;
        match &self.kind {
            FindingKind::Superblock { generation } => {
                write!(f, "superblock, generation {generation}: intact")
            }
            FindingKind::NoSuperblock(SuperblockError::Blank) => f.write_str("superblock: blank"),
            FindingKind::NoSuperblock(SuperblockError::Damaged | SuperblockError::Foreign) => {
                f.write_str("superblock: damaged")
            }
            FindingKind::NoSuperblock(error) => write!(f, "superblock: {error}"),
            FindingKind::CheckpointImage { volume_id, checkpoint_id, partition, entries } => write!(
                f,
                "image of index partition {partition} of checkpoint {checkpoint_id}, {entries} entries, volume \
                 {volume_id:016x}: intact"
            ),
            FindingKind::DamagedImage => f.write_str("checkpoint image: damaged"),
            FindingKind::JournalBatch { volume_id, batch, entries } => {
                write!(f, "journal batch {batch}, {entries} entries, volume {volume_id:016x}: intact")
            }
            FindingKind::DamagedBatch => f.write_str("journal batch: damaged"),
            FindingKind::Record { volume_id, key, value_bytes, sequence } => write!(
                f,
                "record of key {key}, {value_bytes} bytes, sequence {sequence}, volume {volume_id:016x}: intact"
            ),
            FindingKind::DamagedRecord { key: Some(key), problem } => {
                write!(f, "record of key {key}: {problem}")
            }
            FindingKind::DamagedRecord { key: None, problem } => write!(f, "record: {problem}"),
            FindingKind::Unreadable(error) => write!(f, "unreadable: {error}"),
        }
    }
}

/// Receives the progress and the findings of a verification.
pub trait VerifyObserver {
    /// `done` of `keys` keys are verified.
    fn keys_verified(&mut self, done: u64, keys: u64);
    /// Recovery failed for `reason`: a scan of the device follows.
    fn scan_started(&mut self, _reason: &OpenError) {}
    /// `done` of `blocks` blocks are scanned.
    fn blocks_scanned(&mut self, _done: u64, _blocks: u64) {}
    /// The scan found a structure or record, intact or damaged. Findings come in the order of their blocks.
    fn found(&mut self, _finding: &Finding) {}
}

impl<F: FnMut(u64, u64)> VerifyObserver for F {
    fn keys_verified(&mut self, done: u64, keys: u64) {
        self(done, keys);
    }
}
