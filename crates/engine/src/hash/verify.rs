//! Reads everything a volume holds and verifies it; changes nothing.

use super::error::OpenError;
use super::index::{RecordRef, fingerprint};
use super::record;
use super::recovery::load_volume;
use super::volume::{hash_of, partition_and_tag};
use octokv_base::{BufferPool, Key, Lba};
use octokv_device::Device;
use std::fmt;

/// What is wrong with one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordProblem {
    /// The first block of the record.
    pub lba: u64,
    /// Its key, where the header is whole.
    pub key: Option<Key>,
    /// What is wrong.
    pub kind: ProblemKind,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The header or key is damaged, or it is no record at all.
    Header,
    /// A record of another place, time or volume lies there.
    WrongRecord,
    /// The value is damaged.
    Value,
    /// The device could not read it.
    Unreadable,
}

impl fmt::Display for RecordProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ProblemKind::Header => "header or key damaged",
            ProblemKind::WrongRecord => "holds another record",
            ProblemKind::Value => "value damaged",
            ProblemKind::Unreadable => "unreadable",
        };
        match &self.key {
            Some(key) => write!(f, "block {}, key {key}: {kind}", self.lba),
            None => write!(f, "block {}: {kind}", self.lba),
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Keys in the index.
    pub keys: u64,
    /// Bytes of values that were read and verified.
    pub value_bytes: u64,
    /// Bytes of space in use.
    pub used_bytes: u64,
    /// Bytes of space for records.
    pub capacity_bytes: u64,
    /// Journal entries of the last moment before a crash whose records never became whole.
    pub dropped_entries: u64,
    /// Pieces of metadata of which one copy is damaged. Those that opening met it mends; the others are written
    /// anew by the next checkpoint.
    pub damaged_copies: u64,
    /// Records that cannot be read back as they were written.
    pub problems: Vec<RecordProblem>,
    /// Whether the volume was closed in order.
    pub is_clean_shutdown: bool,
}

/// Verifies the volume on a device. `progress` is told how many of how many keys are done.
pub async fn verify(
    device: &dyn Device,
    pool: &BufferPool,
    mut progress: impl FnMut(u64, u64),
) -> Result<VerifyReport, OpenError> {
    let loaded = load_volume(device).await?;
    let superblock = loaded.superblock;
    let unit_bytes = u64::from(superblock.unit_bytes);
    let unit_blocks = unit_bytes / u64::from(device.geometry().block_bytes);
    let entries =
        |index: usize| -> Vec<_> { loaded.partitions[index].state.lock().table.iter_from(0).collect() };
    let keys =
        (0..loaded.partitions.len()).map(|index| loaded.partitions[index].state.lock().table.len() as u64);
    let mut report = VerifyReport {
        keys: keys.sum(),
        used_bytes: (loaded.space.units() - loaded.space.free_units()) * unit_bytes,
        capacity_bytes: loaded.space.units() * unit_bytes,
        dropped_entries: loaded.dropped_entries,
        damaged_copies: loaded.damaged_copies,
        is_clean_shutdown: superblock.is_clean_shutdown,
        ..VerifyReport::default()
    };
    let mut done = 0;
    for index in 0..loaded.partitions.len() {
        for entry in entries(index) {
            let (record_ref, lba) = (entry.record_ref(), entry.record_ref().location * unit_blocks);
            let buffer = pool.take((record_ref.units * unit_bytes) as usize).ok_or(OpenError::NoMemory)?;
            let location_in_index =
                |key: &Key| partition_and_tag(hash_of(&superblock, key), superblock.index_partitions_log2);
            match device.read(Lba(lba), buffer).await.into_read() {
                Err(_) => {
                    report.problems.push(RecordProblem { lba, key: None, kind: ProblemKind::Unreadable })
                }
                Ok(bytes) => match verify_record(&bytes, record_ref, superblock.volume_id) {
                    Ok((key, value_bytes)) if location_in_index(&key) == (index, entry.tag()) => {
                        report.value_bytes += value_bytes as u64;
                    }
                    Ok((key, _)) => {
                        report.problems.push(RecordProblem {
                            lba,
                            key: Some(key),
                            kind: ProblemKind::WrongRecord,
                        });
                    }
                    Err((key, what)) => report.problems.push(RecordProblem { lba, key, kind: what }),
                },
            }
            done += 1;
            progress(done, report.keys);
        }
    }
    Ok(report)
}

fn verify_record(
    bytes: &[u8],
    record_ref: RecordRef,
    volume: u64,
) -> Result<(Key, usize), (Option<Key>, ProblemKind)> {
    let (header, key) = record::UncheckedRecord(bytes).header().map_err(|_| (None, ProblemKind::Header))?;
    let key = Key::new(key).ok_or((None, ProblemKind::Header))?;
    let identity = header.identity;
    let same = identity.volume_id == volume
        && identity.location == record_ref.location
        && fingerprint(identity.sequence) == record_ref.fingerprint;
    if !same {
        return Err((Some(key), ProblemKind::WrongRecord));
    }
    match header.value_range(bytes) {
        Ok(range) => Ok((key, range.len())),
        Err(_) => Err((Some(key), ProblemKind::Value)),
    }
}
